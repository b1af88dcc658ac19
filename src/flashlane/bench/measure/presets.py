"""Names problems after models: a preset has the shape of one attention layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """The sizes of one attention layer, and their source."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool
    source: str
    kv_heads: int | None = None

    def sizes(self) -> dict[str, str]:
        """The sizes as the command line writes them."""
        found = {"batch": self.batch, "heads": self.heads, "seqlen": self.seqlen, "head_dim": self.head_dim}
        if self.kv_heads is not None:
            found["kv_heads"] = self.kv_heads
        return {name: str(value) for name, value in found.items()}


PRESETS: dict[str, Preset] = {
    "gpt2": Preset(8, 12, 1024, 64, True, "GPT-2 small (Radford et al. 2019)"),
    "gpt3": Preset(2, 96, 2048, 128, True, "GPT-3 175B (Brown et al. 2020)"),
    "bert-base": Preset(16, 12, 512, 64, False, "BERT base (Devlin et al. 2018)"),
    "bert-large": Preset(8, 16, 512, 64, False, "BERT large (Devlin et al. 2018)"),
    "llama3-8b": Preset(1, 32, 8192, 128, True, "Llama 3 8B (Grattafiori et al. 2024): GQA 32/8", 8),
    "llama3-70b": Preset(1, 64, 8192, 128, True, "Llama 3 70B (Grattafiori et al. 2024): GQA 64/8", 8),
    "short": Preset(32, 8, 512, 64, False, "many short sequences"),
    "long": Preset(1, 8, 8192, 64, False, "one long sequence"),
    "very-long": Preset(1, 8, 16384, 64, False, "one very long sequence"),
}


def select_presets(text: str) -> tuple[Preset, ...]:
    """The presets of a comma list, or all of them for ``all``.

    Raises:
        ValueError: a name is unknown; the message names the nearest.
    """
    from flashlane.bench.measure.grid import parse_names

    if text.strip() == "all":
        return tuple(PRESETS.values())
    names = parse_names(text, "--preset", (*PRESETS, "all"))
    if not names or "all" in names:
        raise ValueError(f"--preset is {text!r}; it may be a list of {', '.join(PRESETS)}, or all alone")
    return tuple(PRESETS[name] for name in names)
