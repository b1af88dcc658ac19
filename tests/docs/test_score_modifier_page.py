"""The worked example of a score modifier names every source file that it touches, and those are few."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add-a-score-modifier.md"
MODIFIER = "logit_scale"
MOST = 8


def files_with(word: str) -> set[str]:
    """Source files whose text contains a word, in any case."""
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    found = (path for path in (ROOT / "src" / "flashlane").rglob("*") if path.suffix in (".py", ".cu", ".cuh"))
    return {path.relative_to(ROOT).as_posix() for path in found if pattern.search(path.read_text(encoding="utf-8"))}


def test_the_page_names_exactly_the_files_that_mention_the_modifier() -> None:
    named = set(re.findall(r"^## .*`(src/[^`]+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert named == files_with(MODIFIER)
    assert len(named) <= MOST


def test_the_lines_that_the_page_quotes_are_in_the_files() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        path = re.search(r"`(src/[^`]+)`", section.splitlines()[0])
        if path is None:
            continue
        source = " ".join((ROOT / path[1]).read_text(encoding="utf-8").split())
        for quoted in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            assert " ".join(quoted.split()) in source, quoted


MOST_FILES = {"softcap": 12, "sinks": 10, "alibi": 10, "page_size": 8}
"""Files of the library that may name a feature; 39, 29, 26 and 20 did before the features were declared once."""
LIBRARY = ("api", "core", "cuda", "jit", "kernels", "ops", "reference")
"""Integrations and peers name features as others call them, context parallelism in its own functions."""


@pytest.mark.parametrize("word", MOST_FILES)
def test_few_files_of_the_library_name_a_feature(word: str) -> None:
    root = ROOT / "src" / "flashlane"
    paths = [
        path for package in LIBRARY for path in (root / package).rglob("*") if path.suffix in (".py", ".cu", ".cuh")
    ]
    found = [path for path in paths if word in path.read_text(encoding="utf-8").lower()]
    assert len(found) <= MOST_FILES[word], found
    devices = [path.name for path in found if path.suffix in (".cu", ".cuh")]
    assert devices == (["seqlen.cuh"] if word == "page_size" else ["score.cuh"]), "kernels name no feature"


def test_of_context_parallelism_one_file_besides_its_functions_knows_modifiers() -> None:
    found = {
        path.name
        for path in (ROOT / "src" / "flashlane" / "distributed").glob("*.py")
        if re.search(r"alibi|sinks|softcap|logit_scale", path.read_text(encoding="utf-8"))
    }
    assert found == {"functional.py", "modifiers.py", "names.py"}, "names.py has the arguments of other libraries"
