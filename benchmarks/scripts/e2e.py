"""Join files that ``flashlane e2e`` wrote on one machine into the committed results, and draw docs/e2e.md's picture.

    python benchmarks/scripts/e2e.py FILE.json ...   # writes benchmarks/results/suite_e2e.json and docs/images/e2e.svg
    python benchmarks/scripts/e2e.py                 # draws the picture again
    python benchmarks/scripts/e2e.py --check         # exit 1 when the picture is not of the committed results

Of a workload that several files have, the last one's rows stay; rows of another commit than the last file's say so. The
picture holds a digest of the times, so that ``--check`` does not depend on the version of matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from picture_digest import digest, status_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "suite_e2e.json"
PICTURE = ROOT / "docs" / "images" / "e2e.svg"


def joined(files: Sequence[Path]) -> dict[str, Any]:
    """The body of the results.

    Raises:
        ValueError: a file cannot be read, or the files are of different devices or versions of torch, or not of that
            command.
    """
    from flashlane.bench.measure.results import read_json
    from flashlane.bench.suites.e2e import WORKLOADS, E2ESuite

    bodies = [read_json(path) for path in files]
    for path, body in zip(files, bodies, strict=True):
        if body.get("suite") != "e2e":
            raise ValueError(f"{path} has suite {body.get('suite')!r}; flashlane e2e did not write it")
        here, first = ([each["environment"][key] for key in ("device", "torch")] for each in (body, bodies[0]))
        if here != first:
            raise ValueError(f"{path} is of {', '.join(here)}, and {files[0]} of {', '.join(first)}")
    last = bodies[-1]
    rows: dict[str, list[dict[str, Any]]] = {}
    notes: dict[str, str] = {}
    for body in bodies:
        notes |= {note.partition(":")[0]: note for note in body["notes"]}
        for name in dict.fromkeys(row["workload"] for row in body["rows"]):
            rows[name] = [dict(row) for row in body["rows"] if row["workload"] == name]
            for row in rows[name]:
                if body["environment"]["commit"] != last["environment"]["commit"]:
                    row.setdefault("commit", body["environment"]["commit"])
    order = sorted(rows, key=lambda name: list(WORKLOADS).index(name.split()[0]))
    compared = [row for name in order for row in E2ESuite.compared(rows[name])]
    names = [name for name in WORKLOADS if any(name == each.split()[0] for each in order)]
    general = [note for head, note in notes.items() if head not in WORKLOADS]
    return {
        **last,
        "environment": {"script": "benchmarks/scripts/e2e.py", **last["environment"]},
        "settings": {**last["settings"], "workloads": names},
        "columns": [{"key": column.key, "title": column.title} for column in E2ESuite.columns],
        "rows": compared,
        "notes": [*general, *(f"{name}: {WORKLOADS[name].what}." for name in names)],
        "messages": [message for body in bodies for message in body["messages"]],
    }


def shown(results: Path) -> list[list[object]]:
    """What the picture shows."""
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    return [[row["workload"], row["attention"], row["ms"], row["speedup"]] for row in rows]


def draw(results: Path, target: Path) -> None:
    from flashlane.bench.present.e2e_figure import figure_of
    from flashlane.bench.present.figure_frame import save

    save(figure_of(results), target)
    lines = [line.rstrip() for line in target.read_text(encoding="utf-8").splitlines()]
    target.write_text("\n".join([*lines, f"<!-- {digest(shown(results))} -->"]) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", help="results of flashlane e2e, the newest last")
    parser.add_argument("--check", action="store_true", help="draw nothing; exit 1 when the picture is out of date")
    options = parser.parse_args(arguments)
    if options.files and options.check:  # it would write the results that it is to check
        parser.error("--check is given with files; it takes none, and looks at the results that are there")
    if options.files:
        try:
            body = joined(options.files)
        except ValueError as error:
            parser.error(str(error))
        RESULTS.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    if not options.check:
        draw(RESULTS, PICTURE)
        return 0
    return status_of(PICTURE, shown(RESULTS), "e2e.py")


if __name__ == "__main__":
    sys.exit(main())
