"""Files, functions and lines that a reader takes in: no file of 600 lines, no function of a screen but Triton kernels,
and no line of a device file or of prose that a window of 120 columns does not show. (ruff holds Python files.)"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES, MOST_COLUMNS = 600, 120
SUFFIXES = (".py", ".cu", ".cuh", ".md", ".toml", ".yml", "Makefile")
MOST_OF_A_FUNCTION = 75
"""Lines of a body, without docstring and parameters."""
LONGER = {
    "attention_forward": "the Triton kernel: one function is what Triton compiles to one kernel",
    "key_gradients": "the same",
    "bias_gradients": "the same",
}


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("a tree without git")
    return [ROOT / name for name in done.stdout.split() if name.endswith(SUFFIXES) and (ROOT / name).exists()]


def test_no_file_is_longer_than_600_lines() -> None:
    long = {path.relative_to(ROOT).as_posix(): count for path in tracked() if (count := lines_of(path)) > MOST_LINES}
    assert not long, f"at most {MOST_LINES} lines: {long}"


def test_lines_of_device_files_and_the_makefile_have_120_columns_at_most() -> None:
    files = [path for path in tracked() if path.suffix in (".cu", ".cuh") or path.name == "Makefile"]
    assert len(files) > 50
    long = [
        f"{path.relative_to(ROOT).as_posix()}:{number}: {len(line)} columns"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MOST_COLUMNS
    ]
    assert not long, "\n".join(long)


NOT_PROSE = ("|", "![", "[!", "<")
"""What begins a line that cannot be wrapped: rows of tables, images, badges and HTML."""


def test_lines_of_prose_have_120_columns_at_most() -> None:
    files = [path for path in tracked() if path.suffix == ".md"]
    assert len(files) > 50
    long = []
    for path in files:
        code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code ^= line.lstrip().startswith("```")
            if len(line) > MOST_COLUMNS and not code and not line.lstrip().startswith(NOT_PROSE):
                long.append(f"{path.relative_to(ROOT).as_posix()}:{number}: {len(line)} columns")
    assert not long, "\n".join(long)


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_functions_of_the_library_fit_on_a_screen() -> None:
    long = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name not in LONGER:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                count = node.end_lineno - body[0].lineno + 1 if body else 0
                if count > MOST_OF_A_FUNCTION:
                    long[f"{path.relative_to(ROOT).as_posix()}: {node.name}"] = count
    assert not long, f"at most {MOST_OF_A_FUNCTION} lines: {long}"
