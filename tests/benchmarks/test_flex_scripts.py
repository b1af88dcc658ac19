"""The GPU scripts of flex_attention, on the CPU: what they call, how they judge and what they write down."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import programs
from support.programs import Drawn

from flashlane import bench

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"
CPU = torch.device("cpu")


@pytest.fixture
def masks_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("flex_masks")


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    found = importlib.import_module("flex_speed")
    monkeypatch.setattr(found, "HEADS", 2)
    return found


@pytest.mark.parametrize("name", ["flex_masks", "flex_speed"])
def test_without_a_gpu_they_say_so(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [name, "--out", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_drawn_programs_begin_at_a_seed(masks_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"programs": 3, "failures": [], "ill_conditioned": [], "worst_error": 0.0}
    given: list[list[int]] = []
    monkeypatch.setattr(masks_script, "_check_some", lambda seeds, until: given.append(list(seeds)) or found)
    assert masks_script.check_programs(3, 1.0, 1, 70) == found and given == [[70, 71, 72]]


def test_attention_is_compared_by_value(masks_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU both sides are the reference; a call that fails is told."""
    rows = masks_script.check_attention(CPU, 20)
    assert len(rows) == 3 * 8 and all(row["error"] == 0.0 for row in rows) and not masks_script.wrong(rows)

    def broken(*args):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(masks_script.flashlane, "flex_attention", broken)
    assert len(masks_script.wrong(masks_script.check_attention(CPU, 20))) == len(rows)


def test_rows_that_one_side_does_not_see_are_an_infinite_difference(masks_script: ModuleType) -> None:
    a, b = torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, 2.0])
    assert masks_script.difference(a, b) == float("inf") and masks_script.difference(a, a) == 0.0
    assert masks_script.difference(1.1 * b, b) > masks_script.LARGEST_ERROR


def test_what_has_no_figure_is_not_within_a_bound(masks_script: ModuleType) -> None:
    assert masks_script.within(49.0, 50) and not masks_script.within(51.0, 50) and not masks_script.within("error", 50)


def test_each_named_mask_gives_one_table_by_three_ways(
    masks_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = masks_script.call_milliseconds
    monkeypatch.setattr(masks_script, "call_milliseconds", lambda build, repeats=1: real(build, 1))
    for name, (mask, function) in masks_script.named(2048, CPU).items():
        row = masks_script.time_mask(name, mask, function, 2048, False, CPU)
        assert row["same_lists"] is True, name
        assert all(isinstance(row[key], float) for key in ("intervals_call_ms", "program_call_ms", "torch_call_ms"))
        assert isinstance(row["program_device_us"], str), "there are no CUDA graphs on a CPU"


def test_cells_are_timed_compared_and_judged(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = bench.Settings(rounds=1, round_ms=0.01, warmup_ms=0.01, warmup=1, max_iterations=1)
    counts: list[int] = []
    rows = speed.run(
        CPU,
        ["triton"],
        settings,
        60,
        shrink=128,
        words=["documents", "D64"],
        keep=lambda rows: counts.append(len(rows)),
    )
    assert [row["cell"] for row in rows[::2]] == [
        "causal documents 32k",
        "causal 4096 D64, linear",
        "causal 4096 D64, tanh",
    ]
    assert counts == list(range(1, 7))
    for row in rows:
        assert row["wrong"] == [] and set(row["tflops"]) >= {"flashlane", "native"}
        assert set(row["failed"]) == ({"triton"} if row["direction"] == "backward" else set()), (
            "torch's has none on a CPU"
        )
    assert "flashlane, ordered" in rows[1]["tflops"] and rows[1]["difference"]["flashlane, ordered"] == 0.0
    assert not torch.are_deterministic_algorithms_enabled()
    assert rows[0]["difference"]["native"] < 1e-5 < rows[2]["difference"]["native"], "which has no score"


def test_bars_are_told_from_ratios(speed: ModuleType) -> None:
    found = {"flashlane": 560.0, "native": 600.0, "flash": 400.0, "triton": 300.0}
    assert speed.met(0.95, found) == {"0.95 of native": False, "1.25 of flash": True, "1.8 of triton": True}
    assert speed.met(620, {"flashlane": 560.0}) == {"620 TFLOP/s": False} and speed.met(0, {"flashlane": 1.0}) == {}


def test_a_target_is_met_under_both_protocols(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steady figures are a row's own; a target that a further protocol misses is missed."""
    settings = bench.Settings(rounds=1, protocols=("steady", "flushed"))
    ms = {"flashlane": {"steady": 1.0, "flushed": 2.0}, "flash": {"steady": 2.0, "flushed": 2.0}}
    calls = {name: lambda: torch.ones(2, 2, 4, 4) for name in ms}
    timings = [{p: bench.Timing(t, t, t, t, t, 1, 1, p) for p, t in of.items()} for of in ms.values()]
    monkeypatch.setattr(speed, "measure_by", lambda *given: timings)
    row = speed.measured(next(speed.cells(128)), "forward", calls, settings, CPU)
    assert row["ms"] == {"flashlane": 1.0, "flash": 2.0} and row["ratio"] == {"flash": 2.0}
    assert row["protocols"]["flushed"]["flash"] == row["tflops"]["flash"] == row["tflops"]["flashlane"] / 2
    assert row["met"] == {"1.25 of flash": False}


def test_a_wrong_output_is_told(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(speed.cells(128))
    calls = {
        "flashlane": lambda: torch.ones(2, 2, 4, 4), "triton": lambda: torch.full((2, 2, 4, 4), 1.1),
        "flash": lambda: 1 / 0,
    }  # fmt: skip
    settings = bench.Settings(rounds=1, round_ms=0.01, warmup_ms=0.01, warmup=1, max_iterations=1)
    row = speed.measured(cell, "forward", calls, settings, CPU)
    assert row["wrong"] == ["triton"] and "ZeroDivisionError" in row["failed"]["flash"] and "flash" not in row["ms"]


def test_pairs_are_those_of_the_masks(speed: ModuleType) -> None:
    from flashlane.flex import blocks

    for cell in speed.cells(64):
        mask = cell.mask(CPU)
        batch, tokens, _ = cell.size
        states = blocks.states(mask)
        n = mask.BLOCK_SIZE[0]
        at = (
            torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
            for axis, size in enumerate((1, 2, tokens, tokens))
        )
        b, h, q, k = at
        state = states.expand(1, 2, -1, -1).repeat_interleave(n, 2).repeat_interleave(n, 3)[:, :, :tokens, :tokens]
        seen = (state == blocks.FULL) | ((state == blocks.PARTIAL) & mask.mask_mod(b, h, q, k))
        assert batch * int(seen.sum()) == cell.pairs, cell.name


def test_cells_in_processes_give_the_same_rows(speed: ModuleType) -> None:
    processes = importlib.import_module("flex_processes")
    settings = bench.Settings(rounds=1, round_ms=0.01, warmup_ms=0.01, warmup=1, max_iterations=1)
    counts: list[int] = []
    given = CPU, ["triton"], settings, 120, 120
    rows = processes.run(*given, shrink=128, words=["D64, tanh"], keep=lambda rows: counts.append(len(rows)))
    assert [(row["cell"], row["direction"]) for row in rows] == [
        ("causal 4096 D64, tanh", "forward"), ("causal 4096 D64, tanh", "backward")
    ]  # fmt: skip
    assert all(row["wrong"] == [] and "flashlane" in row["tflops"] for row in rows) and counts[-1] == 2
    late = processes.run(CPU, [], settings, 0.0, 120, shrink=128, words=["D64, tanh"])
    assert late == [
        {"cell": "causal 4096 D64, tanh", "direction": "both", "failed": {"all": "still compiling after 0 s"}}
    ]


def test_lists_by_hand_have_a_function_for_flash(speed: ModuleType) -> None:
    cell = next(cell for cell in speed.cells(64) if cell.blocks_apart)
    mask = cell.mask(CPU)
    peers = speed.flex_peers
    made = peers.with_function(mask)
    assert made.mask_mod is peers.every_pair and mask.mask_mod is not peers.every_pair
    assert made.full_kv_indices is mask.full_kv_indices and bool(made.mask_mod(0, 0, torch.tensor(3), 0))


def test_peers_get_torchs_own_masks(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not ours, whose functions read intervals; each with the pairs of the cell."""
    from flashlane.flex import blocks, intervals

    functions = []
    create = speed.torch_flex.create_block_mask
    monkeypatch.setattr(
        speed.torch_flex,
        "create_block_mask",
        lambda function, *rest: (functions.append(function), create(function, *rest))[1],
    )
    for cell in speed.cells(128):
        made = len(functions)
        mask, ours = speed.peers_mask(cell, CPU), cell.mask(CPU)
        assert torch.equal(blocks.states(mask), blocks.states(ours)), cell.name
        assert (len(functions) > made) == (cell.function is not None), cell.name
        assert getattr(mask.mask_mod, "func", None) is not intervals.visible
    assert len(functions) == 6


def test_tiles_of_triton_fit_blocks_of_64(speed: ModuleType) -> None:
    options = {cell.name: speed.flex_peers.options("triton", speed.peers_mask(cell, CPU)) for cell in speed.cells(4)}
    assert options["random 64-blocks 10%"]["BLOCK_M"] == 64 and options["causal documents 32k"] == {"BACKEND": "TRITON"}
    assert speed.flex_peers.options("flash", None) == {"BACKEND": "FLASH"}


def test_what_f32_makes_of_a_drawn_function_is_no_failure(
    masks_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum with a large number rounds the score in f32, in torch as in a kernel."""
    seed, errors = 3, []

    def rounding(kind: str) -> Drawn:
        if kind == "mask_mod":
            return Drawn("q >= kv", lambda b, h, q, kv: q >= kv, {})
        return Drawn("score", lambda score, b, h, q, kv: torch.sin((score + 65536.0) - 65536.0), {})

    def kernels(*given):
        scores = given[0][-1]
        score, mask = rounding("score_mod"), rounding("mask_mod")
        values, slope, visible = masks_script._in_f32(seed, score, mask, scores)
        return [(values + errors[-1], slope, visible)]

    for module in (masks_script, programs):
        monkeypatch.setattr(module, "draw", lambda seed, kind, *_: rounding(kind))
    monkeypatch.setattr(masks_script, "bind", lambda *_: (None, None))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t)
    monkeypatch.setattr(masks_script.program_kernel, "on_gpu", kernels)
    for wrong, failures in ((0.0, 0), (0.1, 1)):
        errors.append(wrong)
        result = masks_script._check_some([seed], float("inf"))
        assert (len(result["failures"]), result["ill_conditioned"]) == (failures, [] if failures else [seed])


def test_a_cell_whose_peers_are_late_is_timed_without_them(speed: ModuleType) -> None:
    processes = importlib.import_module("flex_processes")
    settings = bench.Settings(rounds=1, round_ms=0.01, warmup_ms=0.01, warmup=1, max_iterations=1)
    rows = processes.run(CPU, ["triton"], settings, 0.0, 120, shrink=128, words=["D64, tanh"])
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert row["failed"] == {"triton": "still compiling after 0 s"} and {"flashlane", "native"} <= set(row["ms"])


def test_a_run_is_resumed_where_commit_and_card_are_the_same(speed: ModuleType) -> None:
    where = {"commit": "a", "device": "H200", "torch": "2.11", "driver": "1"}

    def row(cell: str, direction: str, *names: str) -> dict:
        return {"cell": cell, "direction": direction, "tflops": dict.fromkeys(names, 1.0), "failed": {}}

    whole = [row("x", "forward", "flashlane", "flash"), row("x", "backward", "flashlane")]
    rows = [*whole, row("y", "forward", "flashlane"), {"cell": "z", "direction": "both", "failed": {"all": "late"}}]
    before = {"environment": where, "rows": rows}
    assert speed.resumed({"environment": where}, before) == whole
    for key in where:
        assert speed.resumed({"environment": {**where, key: "other"}}, before) == [], key


def test_a_run_without_a_result_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that cannot be imported has no result; what an earlier run wrote stays."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script, file = importlib.import_module("flex_attention_tests"), tmp_path / "tests.json"

    def row(of: str, passed: int, commit: str) -> dict[str, object]:
        return {"of": of, "on": "cuda", "passed": passed, "skipped": 0, "failed": 0, "environment": {"commit": commit}}

    script.keep(file, [row("PyTorch", 5, "a"), row("attention-gym", 7, "a")])
    script.keep(file, [row("PyTorch", 0, "b"), row("attention-gym", 9, "b")])
    script.keep(file, [row("PyTorch", 0, "c")])
    kept = json.loads(file.read_text())
    assert {each["of"]: each["passed"] for each in kept["rows"]} == {"PyTorch": 5, "attention-gym": 9}
    assert kept["environment"] == {"commit": "b"}
