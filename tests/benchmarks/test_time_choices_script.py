"""The script that times candidates: what it draws, and what it keeps of candidates that are slow, wrong or refused."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashlane.core import registry

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    return importlib.import_module("choice_families")


def test_the_problems_of_a_family_are_those_of_its_seed(families: ModuleType) -> None:
    for name, family in families.FAMILIES.items():
        found = family.shapes(1000, 20)
        assert found == family.shapes(1000, 25)[:20] and found != family.shapes(1001, 20), name
    few = families.FAMILIES["mma"].shapes(1000, 60)
    tiles = [shape.batch * shape.heads * -(-shape.seqlen_q // 128) for shape in few]
    assert min(tiles) < 30 and max(tiles) > 1000, "problems that fill a part of a GPU, and many that fill it"


def test_the_candidates_of_mma_are_different_and_the_chosen_one_comes_first(families: ModuleType) -> None:
    for shape in families.FAMILIES["mma"].shapes(1000, 20):
        problem = importlib.import_module("hopper_shapes").problem_of(shape)
        found = families.mma_configs(problem)
        words = [f"{kernel.tag} {config.describe()}" for kernel, config in found]
        assert len(set(words)) == len(words) > 2
        chosen = max((registry.get(tag) for tag in families.MMA_TAGS), key=lambda k: k.preference(problem))
        assert found[0] == (chosen, chosen.config(problem))


@pytest.mark.parametrize("graphs", [False, True])
def test_what_a_row_has(
    families: ModuleType, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    script = importlib.import_module("time_choices")
    made, ms = [None], {"chosen": 2.0, "faster": 1.6, "slow": 6.0, "wrong": 0.1, "refused": 0.1}

    def call(words: str) -> str:
        if words == "refused":
            raise RuntimeError("out of resource: shared memory")
        made[0] = torch.tensor([1.0, 2.0]) + (words == "wrong")
        return words

    def candidates(shape, device, checked):
        found = [families.Candidate(words, 0, lambda words=words: call(words), lambda: (2,)) for words in ms]
        return found, lambda: made[0]

    shape = families.FAMILIES["mma"].shapes(1000, 1)[0]
    family = families.Family("choices_fake", lambda seed, count: [shape] * count, candidates, graphs=graphs)
    monkeypatch.setattr(script, "FAMILIES", {"fake": family})
    monkeypatch.setattr(script, "device_or_exit", lambda: CPU)
    monkeypatch.setattr(script, "heat", lambda device: None)
    monkeypatch.setattr(script, "environment", lambda device: {"device": "a fake"})
    monkeypatch.setattr(script, "elapsed", lambda call, iterations: ms[call()])
    argv = ["time_choices", "--family", "fake", "--seed", "1000", "--count", "2", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", argv)
    assert script.main() == 1, "one candidate is wrong"
    body = json.loads((tmp_path / "choices_fake.json").read_text())
    assert (body["seed"], len(body["rows"])) == (1000, 2)
    row = body["rows"][0]
    assert row["ms"] == [["chosen", 0, 2.0, 2.0, [2]], ["faster", 0, 1.6, 1.6, [2]]]
    assert [words for words, _ in row["wrong"]] == ["wrong"] and row["refused"][0][0] == "refused"
    assert "1.250 of the best: faster" in capsys.readouterr().out
    monkeypatch.setattr(
        script, "FAMILIES", {"fake": replace(family, candidates=lambda *a: (candidates(*a)[0][:3], candidates(*a)[1]))}
    )
    assert script.main() == 0
