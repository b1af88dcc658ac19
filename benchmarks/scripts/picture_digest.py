"""Pictures that say in a comment what they were drawn from, so that one that is out of date is found."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path


def digest(data: object) -> str:
    """The digest of what a picture shows."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def status_of(picture: Path, data: object, script: str) -> int:
    """0 where the picture was drawn from this data; else 1, and stderr has the script that draws it again."""
    if picture.is_file() and digest(data) in picture.read_text(encoding="utf-8"):
        return 0
    print(f"{picture.name} is out of date: python benchmarks/scripts/{script}", file=sys.stderr)
    return 1
