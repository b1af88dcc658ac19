"""Run the three suites of course tables on a GPU, as their committed results were measured.

    PYTHONPATH=src python3 benchmarks/scripts/suites.py --out benchmarks/results [--only flash] [--seconds 240]

A course table is a table that one course's assignments ask for (docs/suites.md): ``flashlane bench suite NAME`` fills
it. This script runs each suite with fixed arguments and writes suite_NAME.json, with the rows that there are when
Ctrl-C, or a signal that ends it, stops it. Exit status: the worst of the suites'.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from gpu_run import device_or_exit

from flashlane.cli.main import app

LENGTHS = "512,1024,2048,4096,8192,16384,32768,65536"
BOTH = "sdpa,auto,sdpa+compile,auto+compile"
ARGUMENTS = {
    "attention": ("attention",),
    "flash": ("flash", "--N", LENGTHS, "--compile", "static"),
    "model": ("model", "--sizes", "sm,md,lg,xl,2.7B", "--steps", "20", "--attention", BOTH),
    "model_long": (
        *("model", "--sizes", "sm,md", "--B", "1", "--N", "4096,16384,32768", "--steps", "3", "--attention", BOTH),
    ),
}
"""The suite of each table, and what it is run with beyond its defaults."""


def run(name: str, folder: Path, seconds: float) -> int:
    """Run one table's suite; its newest JSON becomes suite_NAME.json."""
    status = 0
    with tempfile.TemporaryDirectory() as place:
        words = ["bench", "suite", *ARGUMENTS[name], "--seconds", f"{seconds:g}", "--out", place]
        try:
            app(words)
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        written = max(Path(place).glob("*.json"), key=lambda path: path.stat().st_mtime, default=None)
        if written is not None:
            (folder / f"suite_{name}.json").write_text(written.read_text(encoding="utf-8"), encoding="utf-8")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of suite_NAME.json")
    parser.add_argument("--only", choices=tuple(ARGUMENTS), help="one table instead of all")
    parser.add_argument("--seconds", type=float, default=240.0, help="time to aim at for each suite")
    arguments = parser.parse_args()
    device_or_exit()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what a time limit sends: rows are kept as by Ctrl-C
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = [arguments.only] if arguments.only else list(ARGUMENTS)
    return max(run(name, arguments.out, arguments.seconds) for name in names)


if __name__ == "__main__":
    sys.exit(main())
