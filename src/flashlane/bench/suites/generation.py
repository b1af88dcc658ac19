"""The workload ``generate``: transformers' continuous batching over its paged cache; prefill and decoding are separate.

transformers reads its paged cache with SDPA and a mask, or with FlashAttention's functions. flashlane is installed here
under the module names of the latter.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flashlane.bench.suites.whole_models import (
    DEFAULT,
    LLAMA,
    OURS,
    PACKAGES,
    VOCABULARY,
    Attention,
    Served,
    Setup,
    causal_model,
    implementation,
    installed,
)

PREFILL, DECODE = "prefill", "decode"
WORST = 0.2
"""How far a token may be below the best logit, in standard deviations of the logits: two bf16 models differ as much."""


def ours_in_transformers() -> str | None:
    """Install flashlane under FlashAttention's names; the name of transformers' implementation of it, or None.

    transformers looks for these packages once, so this must be called before it does.
    """
    from flashlane.integrations import flash_attn

    for module, name in (("flash_attn", "flash_attention_2"), ("flash_attn_interface", "flash_attention_3")):
        with contextlib.suppress(ImportError):  # an installed package stays as it is
            flash_attn.install(module)
            return name
    return None


def paged(name: str) -> str:
    """The name under which continuous batching runs an implementation: transformers 5.24 has no prefix any more."""
    from transformers import AttentionInterface

    prefixed = f"paged|{name}"
    return prefixed if prefixed in AttentionInterface() else name


@dataclass
class _Serving:
    """Requests to a model, and its latest answers."""

    model: Any
    prompts: list[list[int]]
    new_tokens: int
    answers: list[list[int]] = field(default_factory=list)

    def run(self) -> Mapping[str, float]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        longest = max(map(len, self.prompts)) + self.new_tokens
        blocks = sum(-(-longest // 256) for _ in self.prompts) + 1
        named = "auto_switch_to_flash"  # transformers 5.24 runs FlashAttention in the place of SDPA, which is ours here
        as_named = {named: False} if named in inspect.signature(ContinuousBatchingConfig).parameters else {}
        whole = ContinuousBatchingConfig(
            max_batch_tokens=max(256, sum(map(len, self.prompts))), num_blocks=blocks, allow_block_sharing=False,
            **as_named,
        )  # fmt: skip
        options = GenerationConfig(max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers = self.model.generate_batch(
            inputs=self.prompts, generation_config=options, continuous_batching_config=whole, record_timestamps=True
        )
        if len(answers) < len(self.prompts) or any(each.error for each in answers.values()):
            said = next((each.error for each in answers.values() if each.error), "a request has no answer")
            raise RuntimeError(f"transformers' continuous batching failed: {said}")
        self.answers = [list(each.generated_tokens) for each in answers.values()]
        stamps = [each.timestamps for each in answers.values()]
        begin = min(each.created_time for each in answers.values())
        read, end = max(times[0] for times in stamps), max(times[-1] for times in stamps)
        return {PREFILL: read - begin, DECODE: end - read}

    @torch.no_grad()
    def check(self) -> float:
        """How far each token is below the best logit of the model's own forward with SDPA, in standard deviations."""
        worst = 0.0
        with implementation(self.model, "sdpa"):
            for prompt, answer in zip(self.prompts, self.answers, strict=True):
                if len(answer) != self.new_tokens:
                    return float("inf")
                tokens = torch.tensor([[*prompt, *answer]], device=self.model.device)
                logits = self.model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
                taken = logits.gather(-1, tokens[0, len(prompt) :, None]).squeeze(-1)
                worst = max(worst, float(((logits.amax(-1) - taken) / logits.std(-1)).max()))
        return worst


def generate(setup: Setup) -> Served:
    """Llama-3.1-8B's shape serves requests of 1 to 2048 tokens, all at once."""
    name = ours_in_transformers() if setup.device.type == "cuda" else None
    model, _ = causal_model("Llama", 1, LLAMA, setup)
    model.eval()
    count, longest, new_tokens = (3, 16, 4) if setup.small else (32, 2048, 64)
    lengths = [max(1, longest * (number + 1) // count) for number in range(count)]
    ids = torch.Generator().manual_seed(setup.seed)
    prompts = [torch.randint(1, VOCABULARY, (length,), generator=ids).tolist() for length in lengths]
    serving = _Serving(model, prompts, new_tokens)
    attentions: dict[str, Attention] = {DEFAULT: lambda: implementation(model, paged("sdpa"))}
    if setup.device.type == "cuda":
        for tag in filter(installed, PACKAGES):
            attentions[tag] = lambda version=tag[-1]: implementation(model, paged(f"flash_attention_{version}"))
    if name is not None:
        attentions[OURS] = lambda: implementation(model, paged(name))
    tokens = {PREFILL: sum(lengths), DECODE: count * (new_tokens - 1)}
    return Served(serving.run, attentions, tokens, serving.check, WORST)
