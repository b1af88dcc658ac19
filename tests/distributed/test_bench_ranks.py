"""Context parallelism measured: the model of scaling, the sharded training step, the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from typer.testing import CliRunner

from flashlane.bench.measure import ranks as measure_ranks
from flashlane.bench.measure.ranks import SharedProblem, default_methods, group_sizes
from flashlane.bench.measure.scaling import Links, Workload, checked, modelled_rows
from flashlane.bench.suites.sharded_step import SharedStep, StepProblem, WholeStep
from flashlane.cli.main import _of_ranks, app

WORK = Workload(8192, 32, 8, 128, ranks_measured=2, forward_ms=3.0, both_ms=12.0)
FAST = Links(inside_gbs=1e9, latency_us=0.0, across_gbs=1e9)


def test_ranks_that_take_too_long_are_ended_with_what_they_were_doing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The notes of two ranks, and the stacks that the second one had time to write."""
    ended: list[int] = []
    folders: list[str] = []

    def spawn(work: Any, arguments: tuple[Any, ...], nprocs: int, join: bool) -> SimpleNamespace:
        size, folder, *_ = arguments
        folders.append(folder)
        for rank in range(size):
            monkeypatch.setattr(measure_ranks, "_notes", {"file": Path(folder, f"note_{rank}"), "began": 0.0})
            measure_ranks.note(f"part {rank}")
        Path(folder, "stack_1").write_text("line 7 in wait")
        return SimpleNamespace(
            join=lambda timeout: False, processes=[SimpleNamespace(kill=lambda: ended.append(1))] * nprocs
        )

    monkeypatch.setattr(measure_ranks.processes, "spawn", spawn)
    monkeypatch.setattr(measure_ranks, "SECONDS_FOR_STACKS", 0.0)
    with pytest.raises(TimeoutError) as error:
        measure_ranks.on_ranks(2, "gloo", print, seconds=0.0)
    text = str(error.value)
    assert "2 ranks took longer than 0 s" in text and ended == [1, 1]
    assert re.search(
        r"rank 0: part 0 since [\d.]+ s, \d+ kernels compiled in [\d.]+ s\nnothing yet\nrank 1: part 1", text
    )
    assert text.endswith("line 7 in wait") and not Path(folders[0]).exists()


def test_without_a_cost_of_links_all_ranks_are_ideal() -> None:
    for ranks in (2, 8, 64):
        assert WORK.efficiency(ranks, FAST, False) == pytest.approx(1.0, rel=1e-5)
        assert WORK.efficiency(ranks, FAST, True) == pytest.approx(1.0, rel=1e-5)


def test_a_ranks_share_grows_with_all_tokens() -> None:
    """With as many tokens a rank: twice the ranks, twice the keys of each query."""
    assert [WORK.share_ms(ranks, False) for ranks in (2, 4, 8)] == [1.5, 3.0, 6.0]


def test_what_cannot_be_hidden_is_added() -> None:
    """33.6 MB of keys and values from one rank at 100 GB/s take 0.336 ms, before which nothing can begin; in two groups
    half of it is hidden."""
    links = Links(inside_gbs=100.0, latency_us=0.0)
    once = Workload(8192, 32, 8, 128, 2, 3.0, 12.0)
    halves = Workload(8192, 32, 8, 128, 2, 3.0, 12.0, groups=(4, 4))
    assert once.predicted_ms(2, links, False) == pytest.approx(1.5 + 0.33554, abs=1e-4)
    assert halves.predicted_ms(2, links, False) == pytest.approx(1.5 + 0.16777, abs=1e-4)
    # The backward fetches as much again, and returns twice as many bytes, of which the last group's are not hidden.
    assert once.predicted_ms(2, links, True) == pytest.approx(6.0 + 2 * 0.33554 + 0.67109, abs=1e-4)
    assert halves.predicted_ms(2, links, True) == pytest.approx(6.0 + 2 * 0.16777 + 0.33554, abs=1e-4)


def test_copies_within_a_host_take_no_time_beside_the_computation() -> None:
    """Unless they take longer; ranks of several hosts send messages."""
    work = Workload(8192, 32, 8, 128, 2, 3.0, 12.0, copies=True)
    links = Links(inside_gbs=100.0, latency_us=0.0, host_gpus=2, across_gbs=100.0)
    assert work.predicted_ms(2, links, True) == pytest.approx(6.0)
    slow = Links(inside_gbs=10.0, latency_us=0.0, host_gpus=2)
    assert work.predicted_ms(2, slow, True) == pytest.approx(3.3554 + 3.3554 + 6.7109, abs=1e-3)
    messages = Workload(8192, 32, 8, 128, 2, 3.0, 12.0)
    assert work.predicted_ms(4, links, True) == messages.predicted_ms(4, links, True)


def test_ranks_of_other_hosts_have_the_slower_link() -> None:
    links = Links(inside_gbs=400.0, latency_us=10.0, host_gpus=8, across_gbs=40.0)
    assert links.milliseconds(1e6, 8) == pytest.approx(7 * 1e6 / 400e6 + 0.01)
    assert links.milliseconds(1e6, 64) == pytest.approx(56 * 1e6 / 40e6 + 0.01)


def test_modelled_rows_say_so_and_a_check_compares_with_what_was_measured() -> None:
    rows = modelled_rows(WORK, FAST, (4, 64))
    assert [(row["ranks"], row["source"], row["tokens"]) for row in rows] == [
        (4, "modelled", 32768),
        (64, "modelled", 524288),
    ]
    assert checked(WORK, FAST, 2.0, 5.0) == {"forward": pytest.approx(-0.25), "both": pytest.approx(0.2)}


def test_problems_and_methods_have_the_words_of_the_other_tables() -> None:
    problem = SharedProblem(tokens=64, heads=4, kv_heads=2, head_dim=32, dtype="float32")
    assert problem.describe(2) == "one sequence of 128 tokens, H4/2 D32 f32 causal"
    labels = [label for label in default_methods(problem) if "allgather" in label]
    assert labels == ["allgather", "allgather by messages", "allgather by messages, 1 KV head at a time"]


def test_groups_of_heads() -> None:
    assert group_sizes(None, 8) == (8,)
    assert group_sizes(3, 8) == (3, 3, 2)
    assert group_sizes((1, 4), 8) == (1, 4, 3)


SIZES = StepProblem(tokens=9, layers=2, hidden=32, inner=48, heads=4, kv_heads=2, vocabulary=50, dtype="float32")


def step_gradients(method: str, layout: str) -> list[float]:
    """How far each weight's gradient is from that of one process, relative to its largest value; and the loss."""
    total = SIZES.tokens * 4 + 1
    device = torch.device("cpu")
    whole = WholeStep(SIZES, device, total)
    loss = whole.gradients()
    shared = SharedStep(SIZES, device, method, layout, total)
    part = shared.gradients()
    torch.distributed.all_reduce(part)
    right = dict(whole.model.named_parameters())
    apart = [float((part - loss).abs())]
    for name, weight in shared.model.named_parameters():
        mine, one = weight.grad.full_tensor(), right[name].grad
        apart.append(float((mine - one).abs().max() / one.abs().max()))
    return apart


@pytest.mark.slow
@pytest.mark.parametrize("method, layout", [("allgather", "zigzag"), ("ring", "striped"), ("ulysses", "contiguous")])
def test_a_sharded_step_has_the_gradients_of_one_process(pool: RankPool, method: str, layout: str) -> None:
    for apart in pool.run(step_gradients, method, layout):
        assert len(apart) == 1 + 2 * 9 + 3
        assert max(apart) < 2e-5


@pytest.mark.slow
def test_the_command_on_a_cpu(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    line = ["bench", "ranks", "--tokens", "16", "--method", "allgather", "--iters", "1", "--device", "cpu"]
    done = CliRunner().invoke(app, [*line, "--out", "results"])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    found = json.loads((tmp_path / "results" / "ranks.json").read_text())
    assert [row["method"] for row in found["rows"]] == ["one process", "allgather"]
    assert all(row["forward_ms"] > 0 and row["both_ms"] > 0 for row in found["rows"])
    assert found["modelled"] == [] and "no model" in found["notes"][0]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--ranks", "1"], "--ranks is 1"),
        (["--kv-heads", "3"], "--kv-heads is 3 and --H 4"),
        (["--layout", "spiral"], "--layout is 'spiral'"),
        (["--method", "star"], "--method"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--iters", "0"], "--iters is 0"),
        (["--model", "one"], "--model"),
        (["--documents", "3,a"], "--documents is '3,a'"),
        (["--dtype", "bf16,f32"], "--dtype is 'bf16,f32'"),
        (["--documents", "30,4", "--tokens", "8"], "--tokens is 8 and --documents 30,4; give one of them"),
        (["--across", "0"], "--across is 0"),
        (["--H", "0"], "--H is 0"),
    ],
)
def test_wrong_options_are_named(options: list[str], message: str, tmp_path) -> None:
    done = CliRunner().invoke(app, ["bench", "ranks", "--device", "cpu", "--out", str(tmp_path), *options])
    assert done.exit_code == 2
    assert message in done.output + (done.stderr if done.stderr_bytes else "")


@pytest.mark.parametrize(
    "given, called",
    [
        (["bench", "--ranks", "2", "--tokens", "9"], ["bench", "ranks", "--ranks", "2", "--tokens", "9"]),
        (["e2e", "--ranks=2"], ["bench", "ranks", "--step", "--ranks=2"]),
        (["bench", "ranks", "--ranks", "2"], ["bench", "ranks", "--ranks", "2"]),
        (["bench", "--N", "64"], ["bench", "--N", "64"]),
        (["e2e"], ["e2e"]),
        (["compare", "--ranks", "2"], ["compare", "--ranks", "2"]),
    ],
)
def test_bench_and_e2e_over_ranks(given: list[str], called: list[str]) -> None:
    assert _of_ranks(given) == called


def test_bench_over_ranks_names_a_wrong_number() -> None:
    result = CliRunner().invoke(app, ["bench", "--ranks", "1", "--device", "cpu"])
    assert result.exit_code == 2
    assert "--ranks is 1; it must be at least 2" in result.output


def test_every_round_times_all_calls_in_a_new_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def timed(call: Any, count: int, before: int, device: Any) -> float:
        call()
        return {"one process": 4.0, "a": 2.0, "b": 8.0}[ran[-1]] * (1 + len(ran))

    monkeypatch.setattr(measure_ranks, "_slowest", timed)
    names = ("one process", "a", "b")
    calls = {name: lambda name=name: ran.append(name) for name in names}
    times = measure_ranks.round_milliseconds(calls, torch.device("cpu"), rounds=6)
    orders = [tuple(ran[-18:][i : i + 3]) for i in range(0, 18, 3)]
    assert all(sorted(order) == sorted(names) for order in orders) and len(set(orders)) > 2
    assert all(len(each) == 6 for each in times.values())


def test_a_share_is_of_the_time_of_one_process_in_the_same_round() -> None:
    """A clock that halves between rounds changes no share."""
    times = {"one process": [4.0, 8.0, 4.0], "a": [2.5, 5.0, 2.0], "b": [4.0, 8.0, 4.4]}
    found = measure_ranks.shares_of_ideal(times, 2)
    assert found == {"one process": 0.5, "a": pytest.approx(0.8), "b": pytest.approx(0.5)}
