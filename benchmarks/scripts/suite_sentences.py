"""What the documents say of the committed model suites."""

from __future__ import annotations

import json
from pathlib import Path

from markdown_parts import item
from result_tables import NOT_MEASURED

MODEL_SUITES = ("suite_model", "suite_model_long")
"""Results of the model suite: at N 1024, and at longer sequences."""


def slower_steps(results: Path) -> str:
    """An item of a list: the training steps of the model suite that take longer than with SDPA."""
    slower, steps, when = [], 0, set()
    for name in MODEL_SUITES:
        path = results / f"{name}.json"
        if not path.is_file():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        when.add(f"{result['environment']['device']}, {str(result['environment'].get('date'))[:10]}")
        times = {(row["size"], row["seqlen"], row["attention"]): row.get("step_avg") for row in result["rows"]}
        for suffix, how in (("", "eager"), ("+compile", "compiled")):
            for (size, seqlen, attention), theirs in times.items():
                ours = times.get((size, seqlen, f"auto{suffix}"))
                if attention == f"sdpa{suffix}" and ours and theirs:
                    steps += 1
                    if theirs < ours:
                        slower.append(f"`{size}` at N {seqlen} {how} {theirs / ours:.2f}")
    if not steps:
        return NOT_MEASURED
    return item(
        f"Training steps of the [model suite](suites.md#measured) are slower than with SDPA in {len(slower)} of {steps}"
        f" ({'; '.join(sorted(when))}; speed over that with SDPA): {', '.join(slower) or 'none'}."
        " Short steps are bound by the host."
    )
