"""Every committed result names the script that wrote it, and something reads it."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").iterdir())
ARCHIVE = sorted((ROOT / "benchmarks" / "archive").iterdir())
READERS = [
    path
    for folder in ("docs", "src", "tests", "tools", "benchmarks/scripts")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".md", ".py") and path != Path(__file__)
] + [ROOT / "README.md", ROOT / "Makefile"]


@pytest.fixture(scope="module")
def texts() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in READERS)


def written_by(path: Path) -> dict[str, object]:
    body = json.loads(path.read_text(encoding="utf-8"))
    return {"script": body.get("script"), **body.get("environment", {})}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_result_names_a_script_that_exists_and_is_read(path, texts):
    assert path.suffix == ".json"
    script = str(written_by(path)["script"])
    assert script.startswith("benchmarks/scripts/") and (ROOT / script).is_file(), script
    # Tables are named without their ending: in the documents' markers and in readme_tables.STANDING.
    named = (path.name, f"bench:{path.stem}:", f"bench:{path.stem}/", f'"{path.stem}": ')
    assert any(word in texts for word in named), f"nothing refers to {path.name}"


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
