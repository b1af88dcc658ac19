"""The script that times candidates: what it draws, and what it keeps of candidates that are slow, wrong or refused."""

from __future__ import annotations

import importlib
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
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


@pytest.mark.parametrize("name", ["mma_even", "triton_forward_even", "triton_backward_even"])
def test_even_problems_have_every_form_at_every_head_dim_and_launches_of_every_size(
    families: ModuleType, name: str
) -> None:
    shapes = importlib.import_module("choice_shapes")
    kinds = {"mma_even": shapes.MMA_EVEN, "triton_forward_even": shapes.FORWARD_EVEN}.get(name, shapes.BACKWARD_EVEN)
    drawn = families.FAMILIES[name].shapes(1000, 12 * len(kinds))

    def form(shape) -> str:
        if shape.seqlen_q == shape.seqlen_k:
            return "square"
        return "few queries" if shape.seqlen_q < shape.seqlen_k else "few keys"

    for dtype, head_dim, most_flop in kinds:
        mine = [shape for shape in drawn if (shape.dtype, shape.head_dim) == (dtype, head_dim)]
        assert [sum(form(shape) == word for shape in mine) for word in ("square", "few queries", "few keys")] == [
            6,
            3,
            3,
        ]
        for shape in mine:
            pairs = shape.seqlen_q * shape.seqlen_k - shape.causal * shape.seqlen_q**2 // 2
            heads = shape.batch * shape.heads
            assert heads == 1 or 4 * head_dim * pairs * heads <= 1.6 * most_flop, shape.title
            assert not shape.causal or shape.seqlen_k >= shape.seqlen_q
    tiles = sorted(shape.batch * shape.heads * -(-shape.seqlen_q // 128) for shape in drawn)
    assert tiles[len(tiles) // 5] < 60 and tiles[-len(tiles) // 5] > 400, tiles


def test_the_splits_of_decode_that_are_timed_can_be_launched(families: ModuleType) -> None:
    select = importlib.import_module("flashlane.kernels.decode.select")
    for shape in families.FAMILIES["decode"].shapes(1000, 24):
        problem = importlib.import_module("hopper_shapes").problem_of(shape)
        found = families.decode_configs(problem)
        chosen = families.DECODE.config(problem)
        assert found[0] == (chosen, None if chosen.stream_k else families.rule_splits(problem, chosen))
        assert len(set(found)) == len(found)
        for config, splits in found:
            steps = -(-select.keys_of(problem) // (config.step * config.cluster))
            assert splits is None or 1 <= splits <= min(steps, config.max_splits)


def test_what_the_choice_of_decode_loses_on_its_timed_problems(families: ModuleType) -> None:
    """The predictions' constants are fitted to these timings; a worse formula or constant is seen without a GPU."""
    script = importlib.import_module("decode_regret")
    rows, errors = script.timed(json.loads(script.FILE.read_text(encoding="utf-8")))
    assert len({row.number for row in rows}) == 52 and len(rows) > 1200, "two have shapes that are timed elsewhere"
    losses = [loss for loss, *_ in importlib.import_module("cost_fit").regrets(rows, np.array(errors))]
    assert statistics.mean(losses) < 1.012 and max(losses) < 1.08


def test_candidates_are_timed_again_where_the_fastest_ones_differ_from_themselves(families: ModuleType) -> None:
    contested = importlib.import_module("time_choices").contested
    assert contested({0: [1.0, 1.0, 1.0], 1: [1.02, 1.02, 1.02]}) == []
    assert contested({0: [1.0, 1.0, 1.0], 1: [1.0, 1.02, 1.06], 2: [1.3, 1.5, 1.7]}) == [0, 1]
    assert contested({0: [1.0, 1.1, 1.2], 1: [1.5, 1.5, 1.5]}) == [], "nothing else can be the fastest"


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
    output, ms = [None], {"chosen": 2.0, "faster": 1.6, "slow": 6.0, "wrong": 0.1, "refused": 0.1}

    def call(words: str) -> str:
        if words == "refused":
            raise RuntimeError("out of resource: shared memory")
        output[0] = torch.tensor([1.0, 2.0]) + (words == "wrong")
        return words

    def candidates(shape, device, checked):
        found = [families.Candidate(words, 0, lambda words=words: call(words), lambda: (2,)) for words in ms]
        return found, lambda: output[0]

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
    argv += ["--resume"]
    kept = (tmp_path / "choices_fake.json").read_text()
    monkeypatch.setattr(script, "elapsed", lambda call, iterations: 1 / 0)
    assert script.main() == 0 and (tmp_path / "choices_fake.json").read_text() == kept, "no problem is timed twice"
    (tmp_path / "choices_fake.json").write_text(kept.replace('"fake"', '"other"'))
    with pytest.raises(SystemExit, match="is of other at seed 1000"):
        script.main()


@pytest.mark.parametrize(
    ("script", "before"),
    [("decode_regret", []), ("fit_forward_cost", []), ("fit_grid_cost", ["--family", "mma", "--judge"])],
)
def test_files_without_timings_are_refused_by_name(
    families: ModuleType, tmp_path: Path, script: str, before: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    if script == "fit_forward_cost":
        pytest.importorskip("scipy")
    other, broken = tmp_path / "other.json", tmp_path / "broken.json"
    other.write_text('{"format": "flashlane-drawn/1"}')
    broken.write_text("{")
    for path, words in ((tmp_path / "no.json", "cannot be read"), (broken, "not valid JSON"), (other, "has format")):
        monkeypatch.setattr("sys.argv", [script, *before, str(path)])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(script).main()
        assert ended.value.code == 2 and f"{path} " in (said := capsys.readouterr().err) and words in said
