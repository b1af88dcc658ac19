"""What the documents say of committed results in sentences: of the model suites, and of chosen Hopper problems."""

from __future__ import annotations

import json
from pathlib import Path

from markdown_parts import item
from result_tables import NOT_MEASURED, PEERS, hopper_name

CHOSEN = {"forward": "hopper_forward", "backward": "hopper_backward"}
"""Results of problems that we chose, and the page of docs/ that has their table."""
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


def behind_on_chosen(results: Path) -> str:
    """An item of a list a direction: the chosen problems in which a peer is ahead, with its ratio in each protocol."""
    items = []
    for direction, name in CHOSEN.items():
        path = results / f"{name}.json"
        if not path.is_file():
            continue
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        compared, behind, peers = 0, [], set()
        for row in rows:
            if row.get("direction", direction) != direction or row.get("group") == "deterministic":
                continue
            ratios = {}
            for protocol, times in row["protocols"].items():
                peer = min((tag for tag in times if tag != "flashlane"), key=times.__getitem__, default=None)
                if peer is not None and "flashlane" in times:
                    ratios[protocol] = times[peer] / times["flashlane"], peer
            compared += bool(ratios)
            if any(ratio < 1 for ratio, _ in ratios.values()):
                peers |= {PEERS.get(peer, peer) for ratio, peer in ratios.values() if ratio < 1}
                figures = " and ".join(f"{ratio:.2f} {protocol}" for protocol, (ratio, _) in ratios.items())
                behind.append(f"{hopper_name(row).removesuffix(f' {direction}')} ({figures})")
        ahead = f" ({', '.join(sorted(peers))})" if peers else ""
        items.append(item(
            f"Of {compared} {direction}s that we chose ([table]({name.replace('_', '-')}.md)), a peer{ahead} is ahead "
            f"in {len(behind)} under one protocol or both: {', '.join(behind) or 'none'}."
        ))  # fmt: skip
    return "".join(items) or NOT_MEASURED
