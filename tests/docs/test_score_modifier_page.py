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


MOST_FILES = {"soft_?cap": 12, r"\bd?sinks?(?![a-z])|_sink": 10, "alibi": 10, "page_size": 8}
"""Files of all the source that may name a feature; 39, 29, 26 and 20 did before the features were declared once."""
DECLARE = ("core/problem.py", "api/functional.py", "cuda/attention/score.cuh", "kernels/score.py", "reference/score.py")
"""Files that a score modifier of every kernel is in, besides the Triton kernels', context parallelism's and foreign
signatures."""


@pytest.mark.parametrize("pattern", MOST_FILES)
def test_few_files_name_a_feature(pattern: str) -> None:
    root = ROOT / "src" / "flashlane"
    paths = [path for path in root.rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".md", ".jinja", ".html")]
    named = re.compile(pattern, re.IGNORECASE)
    files = {path.relative_to(root).as_posix() for path in paths if named.search(path.read_text(encoding="utf-8"))}
    assert len(files) <= MOST_FILES[pattern], sorted(files)
    devices = {name for name in files if name.endswith((".cu", ".cuh"))}
    place = "seqlen" if pattern == "page_size" else "score"
    assert devices == {f"cuda/attention/{place}.cuh"}, "no kernel names a feature"
    assert not any(name.startswith(("bench/", "inspect/", "cli/", "tuning/")) for name in files), "these are generic"
    if pattern != "page_size":
        assert files >= set(DECLARE)


def test_of_context_parallelism_only_signatures_name_modifiers() -> None:
    found = {
        path.name
        for path in (ROOT / "src" / "flashlane" / "distributed").glob("*.py")
        if re.search(r"alibi|sinks|softcap|logit_scale", path.read_text(encoding="utf-8"))
    }
    assert found == {"functional.py", "names.py"}, "names.py has the arguments of other libraries"
