"""The code and the pages use the field's words: what was renamed does not come back (docs/glossary.md maps it)."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "tools", "benchmarks/scripts", "docs", "README.md", "Makefile", "mkdocs.yml")
OWN_WORDS = ("docs/notebook/", "docs/glossary.md", "tests/docs/test_vocabulary.py")
"""Notebooks keep the words of their time, and the glossary maps them."""

LANDING: tuple[str, ...] = ()
"""Folders whose renaming is under way; empty when it is done."""

FORBIDDEN = {
    r"chores?": "in-kernel zeroing of dq_accum, in-kernel postprocess",
    r"tellers?|takers?": "scheduler warp",
    r"finishers?|finish_inside": "postprocess warp, in-kernel postprocess",
    r"adders?": "dQ-store warp",
    r"feeders?|fillers?": "producer warp",
    r"crews?": "warps",
    r"patience": "spin limit",
    r"(?<!tflops_)(?<!--)foundings?": "baseline grid",
    r"rungs?": "design, step",
    r"heads_together": "heads_per_section",
    r"multiply_(?:keys|values|queries)": "gemm_qk, gemm_pv, gemm_dq",
    r"(?:give|take)_registers": "setmaxnreg",
    r"(?:wait|pass)_turn|pass_on": "semaphore_acquire, semaphore_release; named barriers",
    r"TALL|MIDDLE|CRAMPED": "tile names by size, such as M128N64S3",
    r"backward_(?:pair|cut|chores|sums)": "two_cta, split_q, in_kernel_dq, dq_accumulate",
    r"dq_direct|direct_dq": "register atomics",
    r"copy engine": "TMA",
    r"house|public face": "project, public API",
    r"(?<![\"-])roofs?": "ceiling, ceilings; roofline",
}
"""A pattern of whole words (``_`` joins words and separates them), and what to write."""


def tracked() -> list[Path]:
    """Text files that the rule is for."""
    done = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False)
    paths = done.stdout.split() if done.returncode == 0 else []
    if not paths:  # a tree without git
        found = [ROOT / folder for folder in FOLDERS]
        paths = [
            path.relative_to(ROOT).as_posix()
            for top in found
            for path in ([top] if top.is_file() else sorted(top.rglob("*")))
            if path.is_file()
        ]
    suffixes = (".py", ".cu", ".cuh", ".md", ".yml", ".toml", ".ipynb", "Makefile")
    return [ROOT / path for path in paths if path.endswith(suffixes) and not path.startswith((*OWN_WORDS, *LANDING))]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in tracked() if path.exists()}


@pytest.mark.parametrize("words", FORBIDDEN)
def test_a_word_that_was_renamed_does_not_occur(words, texts):
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])")
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    found += [path for path in texts if pattern.search(path)]
    assert not found, f"write {FORBIDDEN[words]}:\n" + "\n".join(found[:40])


def test_the_rule_sees_files(texts):
    assert len(texts) > 300 and any(path.endswith(".cuh") for path in texts)
