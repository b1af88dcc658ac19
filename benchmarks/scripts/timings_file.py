"""Files of time_choices.py, as scripts that read them ask for them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from flashlane.bench.measure.results import read_json

FORMAT = "flashlane-choices/1"


def check_timings(parser: argparse.ArgumentParser, paths: Iterable[Path]) -> None:
    """End the script with an error of its arguments unless each file has timings."""
    for path in paths:
        try:
            body = read_json(path)
        except ValueError as error:
            parser.error(str(error))
        found = body.get("format") if isinstance(body, dict) else None
        if found != FORMAT:
            parser.error(f"{path} has format {found!r}; it must be {FORMAT!r}, as time_choices.py writes it")
