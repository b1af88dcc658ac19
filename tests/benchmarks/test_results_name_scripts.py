"""Every committed result names the script that wrote it, and something reads it."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").iterdir())
ARCHIVE = sorted((ROOT / "benchmarks" / "archive").iterdir())
FOLDERS = ("docs", "src", "tests", "tools", "benchmarks/scripts")
READERS = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".md", ".py", ".json", ".ipynb") and path != Path(__file__)
] + [ROOT / "README.md", ROOT / "Makefile"]
PAST = (ROOT / "docs" / "notebook", ROOT / "docs" / "changelog.md")
"""What tells of the past, and may name results of any time."""


def text_of(paths: list[Path]) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


@pytest.fixture(scope="module")
def texts() -> str:
    return text_of(READERS)


@pytest.fixture(scope="module")
def present() -> str:
    """What reads a result as one of the tree as it is."""
    return text_of([path for path in READERS if not any(path.is_relative_to(past) for past in PAST)])


def written_by(path: Path) -> dict[str, object]:
    body = json.loads(path.read_text(encoding="utf-8"))
    return {"script": body.get("script"), **body.get("environment", {})}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_result_names_a_script_that_exists_and_is_read(path, present):
    """The rule is on docs/repository.md: what only the notebook still names belongs to the archive."""
    assert path.suffix == ".json"
    script = str(written_by(path)["script"])
    assert script.startswith("benchmarks/scripts/") and (ROOT / script).is_file(), script
    # Tables are named without their ending: in the documents' markers, readme_tables.STANDING and choice_families.
    named = (re.escape(path.name), rf"bench:{path.stem}[:/]", f'"{path.stem}"')
    assert re.search(rf"(?<!\w)({'|'.join(named)})", present), f"only the notebook names {path.name}, or nothing does"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_result_says_where_when_and_with_what_it_was_measured(path):
    where = json.loads(path.read_text(encoding="utf-8")).get("environment", {})
    on_gpu = str(where.get("device")).startswith("NVIDIA")
    wanted = ("device", "torch", "commit", "date", *(("cuda",) if on_gpu else ()))
    assert not [name for name in wanted if not where.get(name)]


@pytest.mark.parametrize("path", ARCHIVE, ids=lambda path: path.name)
def test_an_archived_result_says_what_wrote_it_and_at_which_commit(path, texts):
    where = written_by(path)
    assert where["script"] and where["commit"]
    assert path.name in texts, f"nothing refers to {path.name}"


@pytest.mark.parametrize("path", RESULTS + ARCHIVE, ids=lambda path: path.name)
def test_no_command_names_a_folder_of_one_machine(path):
    commands = re.findall(r'"command": ?"((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8"))
    assert commands or not written_by(path).get("command")
    assert not [word for command in commands for word in re.split("[ =,]", command) if word.startswith("/")]
