"""benchmarks/scripts/drawn.py without a GPU: it draws, checks, times, keeps its rows and says what they amount to."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_fakes import FakeKernel, LazyKernel, one_nan

from flashlane import bench
from flashlane.bench.measure import drawn as spaces
from flashlane.bench.measure.timing import HostClock
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = {"lengths": spaces.LogUniform(5, 70), "kv_heads": (1, 2), "groups": (1, 2), "least_heads": 1, "batch": (1, 3)}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with small problems, on the CPU, both protocols by the host's clock."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    module = importlib.import_module("drawn")
    for kind, space in spaces.TIMED.items():
        fewer = {
            "sequences": (2, 4),
            "head_dims": (16, 24),
            **({"keys": (9, 40)} if kind in ("decode", "cache") else {}),
        }
        monkeypatch.setitem(spaces.TIMED, kind, replace(space, **(SMALL | fewer)))
    monkeypatch.setattr(module, "device_or_exit", lambda: CPU)
    monkeypatch.setattr(module, "clocks_for", lambda device, settings: {way: HostClock() for way in settings.protocols})
    monkeypatch.setattr(module, "environment", lambda device: {"device": "a fake", "commit": "abc", "torch": "2"})
    return module


class UnlikeTimes(HostClock):
    """Runs the calls and gives milliseconds that no two rounds share, which real clocks do not promise."""

    rounds = itertools.count(1)

    def time(self, call: Any, iterations: int) -> list[float]:
        number = next(self.rounds)
        super().time(call, iterations)
        return [1 + number * 2**-20] * iterations


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    told = ["drawn", "--out", str(folder), "--round-ms", "0.1", "--peers", "fa2", "--seed", "1000", *words]
    monkeypatch.setattr("sys.argv", told)
    return script.main()


def bodies(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def test_it_times_every_kind_in_both_directions_beside_a_peer(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--kind",
        "dense,packed,window,deterministic,decode,cache",
        "--direction",
        "forward,backward",
        "--count",
        "2",
    )
    assert run(script, monkeypatch, tmp_path, *options) == 0
    by_name = bodies(tmp_path)
    one_way = {"drawn_backward_decode_1000", "drawn_backward_cache_1000", "drawn_forward_deterministic_1000"}
    assert len(by_name) == 9 and not one_way & set(by_name)
    in_order = by_name["drawn_backward_deterministic_1000"]["rows"]
    assert len(in_order) == 2 and all(row["ok"] and "deterministic" in row["problem"] for row in in_order)
    for row in by_name["drawn_forward_cache_1000"]["rows"]:
        case = spaces.timed("cache", 1000, row["number"])
        used = row["sizes"]["lengths"]
        assert row["ok"] and len(used) == row["sizes"]["batch"] and max(used) <= row["sizes"]["seqlen_k"]
        rate = row["tflops"]["flashlane"]["steady"] * row["ms"]["flashlane"]["steady"] * 1e9
        assert rate == pytest.approx(sum(case.flop((case.lengths[0][0], n)) for n in used)), "what is in use counts"
    body = by_name["drawn_backward_dense_1000"]
    assert body["role"] == "fitting" and body["begun"] is None and body["protocols"] == ["steady", "flushed"]
    assert [row["number"] for row in body["rows"]] == [0, 1]
    for row in body["rows"]:
        case = spaces.timed("dense", 1000, row["number"], script.MOST_FLOP["backward"])
        assert row["ok"] and set(row["ms"]["flashlane"]) == {"steady", "flushed"}
        flop = 2.5 * sum(map(case.flop, case.lengths))
        assert row["tflops"]["flashlane"]["steady"] == pytest.approx(flop / row["ms"]["flashlane"]["steady"] / 1e9)
    timed = [row for body in by_name.values() for row in body["rows"] if row["ratio"]]
    for row in timed:
        for way, ratio in row["ratio"].items():
            assert ratio == pytest.approx(row["ms"]["fa2"][way] / row["ms"]["flashlane"][way])
            assert row["best_peer"][way] == "fa2"
    assert len(timed) >= 4
    told = capsys.readouterr().out
    assert "forward, dense, seed 1000 (fitting): 2 of 2 problems, a fake, commit abc" in told
    assert (tmp_path / "drawn_1000.svg").read_text().count("<svg") == 1


@pytest.mark.parametrize("spoilt", [False, True])
def test_caches_are_timed_beside_the_peers_that_take_lengths(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoilt: bool,
) -> None:
    """FlashAttention-4 and FlashInfer are torch operations here; ``spoilt``, one of them reads the whole capacity."""
    import cache_libraries

    cache_libraries.install(monkeypatch)
    if spoilt:
        right = cache_libraries.flash_attn_varlen_func
        wrong = lambda *args, **words: right(*args, **words | {"seqused_k": None})  # noqa: E731
        monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", wrong)
    here = {peer.tag: replace(peer, available=lambda device: None) for peer in bench.select_peers("all")}
    monkeypatch.setattr(script.bench, "select_peers", lambda tags: tuple(here[tag] for tag in tags.split(",")))
    monkeypatch.setattr(script, "far_behind", lambda peers, clocks: {})
    short = {"lengths": (1, 1, 4), "head_dims": (64,), "caches": (("used",), ("used", "paged")), "pages": (4, 16)}
    monkeypatch.setitem(spaces.TIMED, "cache", replace(spaces.TIMED["cache"], least_used=(0.1,), **short))
    options = ("--kind", "cache", "--count", "5", "--peers", "cudnn,fa4,flashinfer")
    assert run(script, monkeypatch, tmp_path, *options) == 0, "a peer that is wrong is no failure of ours"
    rows = bodies(tmp_path)["drawn_forward_cache_1000"]["rows"]
    for word in ("N1x", "paged"):
        assert {word in row["problem"] for row in rows} == {False, True}
    for row in rows:
        assert row["absent"]["cudnn"] == "SDPA takes no lengths of sequences and no pages"
        assert {"flashlane", "flashinfer"} <= set(row["ms"]) and set(row["ratio"]) == {"steady", "flushed"}
        for way, ratio in row["ratio"].items():
            best = min(ms[way] for name, ms in row["ms"].items() if name != "flashlane")
            assert ratio == pytest.approx(best / row["ms"]["flashlane"][way])
    of_fa4 = {row["absent"].get("fa4", "")[:10] for row in rows}
    assert of_fa4 == ({"WRONG: out"} if spoilt else {""})
    assert all(("fa4" in row["ms"]) != spoilt for row in rows)
    told = capsys.readouterr().out
    assert "cudnn is absent from 5 problems: SDPA takes no lengths of sequences and no pages (5 times)" in told
    assert "forward, cache, seed 1000 (fitting): 5 of 5 problems" in told and "  flushed     5 problems" in told
    assert (tmp_path / "drawn_forward_cache_1000.svg").read_text().count("<svg") == 1


def test_a_further_run_adds_what_is_lacking_and_touches_no_row(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, monkeypatch, tmp_path, "--count", "1", "--peers", "none")
    (before,) = bodies(tmp_path).values()
    assert run(script, monkeypatch, tmp_path, "--count", "3", "--peers", "none", "--seconds", "0") == 0
    assert "time is up: 2 problems are left" in capsys.readouterr().out
    run(script, monkeypatch, tmp_path, "--count", "3", "--peers", "none")
    (after,) = bodies(tmp_path).values()
    assert [row["number"] for row in after["rows"]] == [0, 1, 2] and after["rows"][0] == before["rows"][0]
    assert all("ratio" not in row or not row["ratio"] for row in after["rows"])


def test_a_problem_that_ended_the_process_is_told_and_not_run_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_problem, measured = script.time_problem, []

    def ends(asked: Any, number: int, given: Any) -> Any:
        if number == 1 and 1 not in measured:
            measured.append(1)
            raise SystemExit(9)
        measured.append(number)
        return time_problem(asked, number, given)

    monkeypatch.setattr(script, "time_problem", ends)
    with pytest.raises(SystemExit):
        run(script, monkeypatch, tmp_path, "--count", "3", "--peers", "none")
    (body,) = bodies(tmp_path).values()
    assert body["begun"] == 1 and [row["number"] for row in body["rows"]] == [0]
    run(script, monkeypatch, tmp_path, "--count", "3", "--peers", "none")
    (body,) = bodies(tmp_path).values()
    assert measured == [0, 1, 2] and body["begun"] is None
    assert "the process ended" in body["rows"][1]["absent"]["flashlane"] and not body["rows"][1]["ok"]


def test_rows_of_two_commits_do_not_mix(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, monkeypatch, tmp_path, "--count", "1", "--peers", "none")
    monkeypatch.setattr(script, "environment", lambda device: {"device": "a fake", "commit": "def", "torch": "2"})
    with pytest.raises(SystemExit) as ended:
        run(script, monkeypatch, tmp_path, "--count", "2", "--peers", "none")
    assert ended.value.code == 2 and "was measured with commit abc, here it is def" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (("--seed", "7"), "--seed is 7; it may be 1000 to 1999 (fitting) or 2000 to 2999 (judging)"),
        (("--kind", "dence"), "--kind is 'dence'; it may hold dense, packed, window, deterministic, decode"),
        (("--peers", "fa3"), "--peers is 'fa3'; it may hold cudnn, fa2, fa4, flex, efficient"),
        (("--kind", "decode", "--direction", "backward"), "decode has no backward"),
        (("--kind", "deterministic", "--direction", "forward"), "deterministic has no forward"),
        (("--direction", "sideways"), "--direction is 'sideways'; it may hold forward, backward"),
    ],
)
def test_wrong_words_are_refused(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(script, monkeypatch, tmp_path, *words)
    assert ended.value.code == 2 and message in re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.mark.parametrize("kernel", [FakeKernel("fake", one_nan), LazyKernel("fake")])
def test_a_wrong_output_is_not_timed_and_fails(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kernel: FakeKernel,
) -> None:
    with registry.table_of(kernel):
        assert run(script, monkeypatch, tmp_path, "--count", "1") == 1
    (body,) = bodies(tmp_path).values()
    (row,) = body["rows"]
    assert not row["ok"] and "flashlane" not in row["ms"] and row["absent"]["flashlane"].startswith("WRONG: out")
    assert "WRONG 0:" in capsys.readouterr().out


@pytest.mark.parametrize("deterministic", [False, True])
def test_unlike_bits_of_two_calls_are_wrong_only_where_they_shall_be_equal(
    script: ModuleType, deterministic: bool
) -> None:
    calls = itertools.count(1)
    numbers = torch.ones(3)
    item = script.Implementation("a", "kernel", lambda: (numbers, numbers.add_(2**-20 * next(calls))))
    problem = SimpleNamespace(deterministic=deterministic)
    work = SimpleNamespace(problem=problem, out=numbers, inputs=SimpleNamespace(q=numbers, k=numbers, v=numbers))
    oracle = SimpleNamespace(judge=lambda result: "")
    assert script.checked(item, work, oracle) == ("WRONG: two calls gave unlike bits" if deterministic else "")
    equal = script.Implementation("b", "kernel", lambda: numbers)
    assert script.checked(equal, work, oracle) == ""


def test_candidates_are_timed_beside_the_chosen_one(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the reference's configurations on the CPU there is one at most, so three are made up."""
    from flashlane.core.registry import TunableKernel

    class Several(FakeKernel, TunableKernel):
        def config(self, problem: Any) -> Any:
            return "b"

        def candidates(self, problem: Any) -> Any:
            return ("a", "b", "wrong")

        def source_of(self, config: Any) -> str:
            return ""

        def run(self, config: Any, problem: Any, inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
            self.forward(problem, inputs, out, lse)
            if config == "wrong":
                out[0, 0].zero_()

    monkeypatch.setattr(script, "MARGIN", math.inf)
    clocks = {way: UnlikeTimes() for way in ("steady", "flushed")}
    monkeypatch.setattr(script, "clocks_for", lambda device, settings: clocks)
    with registry.table_of(Several("several")):
        assert run(script, monkeypatch, tmp_path, "--count", "2", "--peers", "none", "--candidates") == 0
    (body,) = bodies(tmp_path).values()
    for row in body["rows"]:
        assert row["candidates"]["chosen"] == "b" and set(row["candidates"]["ms"]) == {"a", "b"}
        assert row["candidates"]["left_out"]["wrong"].startswith("WRONG")
        assert "b" in row["candidates"]["again"] and set(row["candidates"]["again"]) <= {"a", "b"}
        for protocol, ms in row["candidates"]["again"]["b"].items():
            assert ms > 0 and ms != row["candidates"]["ms"]["b"][protocol]


def test_candidates_of_few_queries_are_numbers_of_splits(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel sees the number that a candidate asks for, and one whose output is wrong is left out."""
    asked = []

    class Splitting(FakeKernel):
        def forward(self, problem: Any, inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
            super().forward(problem, inputs, out, lse)
            asked.append(problem.num_splits)
            if problem.num_splits == 4:
                out.mul_(1.1)

    monkeypatch.setattr(script, "MARGIN", math.inf)
    monkeypatch.setattr(script, "SPLITS", (1, 4))
    with registry.table_of(Splitting("splitting")):
        options = ("--kind", "cache", "--count", "1", "--peers", "none", "--candidates")
        assert run(script, monkeypatch, tmp_path, *options) == 0
    (body,) = bodies(tmp_path).values()
    found = body["rows"][0]["candidates"]
    assert found["chosen"] == "chosen splits" and set(found["ms"]) == {"chosen splits", "1 splits"}
    assert found["left_out"]["4 splits"].startswith("WRONG") and set(asked) == {0, 1, 4}


@pytest.mark.parametrize("flushed, behind", [(1.51, {"slow": 1.51}), (1.49, {})])
def test_a_peer_far_behind_under_every_protocol_is_not_timed(
    script: ModuleType, flushed: float, behind: dict[str, float]
) -> None:
    """``slow`` takes 3 times the fastest peer's time back to back, and ``flushed`` times it with the cache flushed."""
    ms = {"steady": {"fast": 2.0, "slow": 6.0}, "flushed": {"fast": 1.0, "slow": flushed}}

    class Fixed(HostClock):
        def __init__(self, times: dict[str, float]) -> None:
            self.times = times

        def time(self, call: Any, iterations: int) -> list[float]:
            return [self.times[call()]] * iterations

    def refused() -> str:
        raise RuntimeError("no kernel for it")

    calls = {"fast": lambda: "fast", "slow": lambda: "slow", "none": refused}
    peers = [script.Implementation(tag, "peer", call) for tag, call in calls.items()]
    found = script.far_behind(peers, {way: Fixed(times) for way, times in ms.items()})
    assert found == pytest.approx(behind) and script.far_behind([], {}) == {}


def test_cudnn_runs_each_kind_of_problem_once_and_short(script: ModuleType) -> None:
    """One kernel serves head dims to 64, or from 72 to 128, and lengths of whole tiles or others."""
    called = []

    def prepare(problem: Any, inputs: Any) -> Any:
        called.append((problem.head_dim, problem.seqlen_q, problem.seqlen_k, problem.causal, inputs.q.requires_grad))
        assert (problem.batch, problem.heads, problem.kv_heads) == (1, 2, 1)
        if problem.head_dim == 72:
            raise RuntimeError("no plan")
        return lambda: (inputs.q * inputs.k.sum() * inputs.v.sum()).clone()

    supports = {True: "it takes no window", False: None}
    peer = script.Peer("(cudnn)", "", prepare, supports=lambda problem: supports[problem.window_left > 0])
    base = AttentionProblem(2, 4, 2, 900, 900, 16, 16, torch.float32, scale=1.0)
    causal = replace(base, window_right=0)
    problems = [
        (base, "forward"), (replace(base, batch=7, head_dim=64, head_dim_v=64, seqlen_q=1000), "forward"),
        (causal, "backward"), (replace(causal, window_left=5), "forward"), (replace(base, seqlen_q=1024), "forward"),
        (replace(base, seqlen_q=3, head_dim=72, head_dim_v=72), "forward"),
    ]  # fmt: skip
    assert script.warm_cudnn(problems, CPU, (peer,)) == 4 and script.warm_cudnn(problems, CPU, ()) == 0
    assert sorted(called) == [
        (16, 128, 132, False, False), (16, 132, 132, False, False), (16, 132, 132, True, True),
        (72, 3, 132, False, False),
    ]  # fmt: skip


def test_what_is_far_behind_is_told_and_has_no_ratio(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "far_behind", lambda peers, clocks: {item.tag: 2.5 for item in peers})
    assert run(script, monkeypatch, tmp_path, "--count", "1") == 0
    (body,) = bodies(tmp_path).values()
    (row,) = body["rows"]
    assert row["far_behind"] == {"fa2": 2.5} and set(row["ms"]) == {"flashlane"} and not row["ratio"]
    assert "fa2 is not timed in 1 problems: 2.50 times the fastest peer's time or more" in capsys.readouterr().out


def test_what_rows_amount_to(script: ModuleType) -> None:
    summary = importlib.import_module("drawn_summary")

    def row(number: int, ratio: float, regret: float) -> dict[str, Any]:
        candidates = {
            "chosen": "a",
            "ms": {"a": {"steady": 9.0}, "b": {"steady": 1.0}, "c": {"steady": 2.0}},
            "again": {"a": {"steady": 3 + 3 * regret}, "b": {"steady": 3.0}, "c": {"steady": 0.1}},
        }
        return {
            "number": number, "problem": f"P{number}", "ok": True, "absent": {"fa4": "not installed"},
            "ratio": {"steady": ratio, "flushed": ratio + 0.1}, "best_peer": {"steady": "fa2", "flushed": "fa2"},
            "tflops": {name: {"steady": 500.0, "flushed": 400.0} for name in ("flashlane", "fa2")},
            "candidates": candidates,
        }  # fmt: skip

    rows = [row(n, 0.9 + n / 100, n / 1000) for n in range(20)]
    assert summary.figures(rows, "steady")["ahead"] == 0.5 and summary.figures(rows, "flushed")["ahead"] == 1.0
    assert summary.figures(rows, "steady")["least"] == 0.9
    assert summary.figures(rows, "steady")["mean"] == pytest.approx(
        math.exp(sum(math.log(0.9 + n / 100) for n in range(20)) / 20)
    )
    behind = summary.regrets(rows, "steady")
    assert summary.percentile(behind, 0.95) == pytest.approx(0.018) and behind[-1] == pytest.approx(0.019)
    assert summary.regrets([row(0, 1.0, -0.1)], "steady") == [0.0] and summary.regrets(rows, "flushed") == []
    assert [item[2]["number"] for item in summary.worst(rows)] == list(range(10))
    body = {"rows": rows, "environment": {}, "direction": "forward", "kind": "dense", "seed": 2000, "role": "judging"}
    told = list(summary.summary({**body, "count": 20, "protocols": ["steady", "flushed"]}))
    assert any("50.0% at 1.00 or above" in text for text in told)
    assert any("95th percentile 1.8%, worst 1.9%" in text for text in told)
    assert any("fa4 is absent from 20 problems: not installed (20 times)" in text for text in told)
    assert max(map(len, told)) <= 100


def test_seeds_are_either_for_fitting_or_for_judging_and_used_ones_are_listed(script: ModuleType) -> None:
    seeds = json.loads((ROOT / "benchmarks" / "seeds.json").read_text())
    assert seeds["fitting"][1] < seeds["judging"][0]
    assert script.role_of(1000) == "fitting" and script.role_of(2999) == "judging"
    for used in seeds["used"]:
        assert script.role_of(used["seed"]) == "judging" and used["for"]
    listed = {used["seed"] for used in seeds["used"]}
    for path in (ROOT / "benchmarks" / "results").glob("drawn_*.json"):
        body = json.loads(path.read_text())
        assert body["role"] == "fitting" or body["seed"] in listed, f"{path.name}: its seed is not in seeds.json"


def test_lists_are_read_from_words(script: ModuleType) -> None:
    found = script.lists_of_text("dense:forward:1000:20,packed:backward:2001:5:candidates")
    assert [(each.kind, each.direction, each.seed, each.count, more) for each, more in found] == [
        ("dense", "forward", 1000, 20, False), ("packed", "backward", 2001, 5, True),
    ]  # fmt: skip
    for text in ("dense", "dense:forward:1:x", "dense:both:1:1", "dense:forward:1:1:all"):
        with pytest.raises(ValueError, match="list is"):
            script.lists_of_text(text)


def test_lists_of_several_seeds_are_timed_together(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["drawn", "--out", str(tmp_path), "--round-ms", "0.1", "--peers", "fa2"]
    monkeypatch.setattr("sys.argv", [*told, "--lists", "dense:forward:1001:1,decode:forward:1002:2"])
    assert script.main() == 0
    found = {name: [row["number"] for row in body["rows"]] for name, body in bodies(tmp_path).items()}
    assert found == {"drawn_forward_dense_1001": [0], "drawn_forward_decode_1002": [0, 1]}
    for wrong in (["dense:forward:1001:1:candidates"], ["dense:forward:1001:1", "--seed", "1001"], ["dense:forward:1"]):
        monkeypatch.setattr("sys.argv", [*told, "--lists", *wrong])
        with pytest.raises(SystemExit) as ended:
            script.main()
        assert ended.value.code == 2 and "list" in capsys.readouterr().err


def test_a_kernel_that_flash_attention_4_s_cache_lacks_is_not_compiled(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cache:
        def _try_load_from_storage(self, key: str) -> bool:
            return key == "there"

    module = SimpleNamespace(JITPersistentCache=Cache)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.cache_utils", module)
    script.refuse_to_compile_fa4()
    assert Cache()._try_load_from_storage("there")
    with pytest.raises(RuntimeError, match="lacks the kernel"):
        Cache()._try_load_from_storage("not there")


def test_what_a_problem_needs_on_a_gpu_is_known_without_one(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    problem = spaces.draw(random.Random(1), spaces.DENSE_TIMED).problem("sm_90a")
    needed = importlib.import_module("drawn_compile").needed
    forward = list(needed(problem, "forward", False))
    backward = list(needed(replace(problem, needs_grad=True), "backward", False))
    assert len(forward) == 1 and len(backward) >= 3 and forward[0] in backward
    assert len(list(needed(problem, "forward", True))) > 1


def test_shares_of_several_processes_are_joined(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each problem is in one share, and the joined file is what one process would have written."""
    for place in range(2):
        assert run(script, monkeypatch, tmp_path / str(place), "--count", "5", "--share", f"{place}/2") == 0
    assert [[row["number"] for row in bodies(tmp_path / str(place))["drawn_forward_dense_1000"]["rows"]]
            for place in range(2)] == [[0, 2, 4], [1, 3]]  # fmt: skip
    assert run(script, monkeypatch, tmp_path / "whole", "--count", "5") == 0
    monkeypatch.setattr(
        "sys.argv", ["drawn", "--out", str(tmp_path / "new"), "--join", str(tmp_path / "0"), str(tmp_path / "1")]
    )
    capsys.readouterr()
    assert script.main() == 0
    joined, whole = (
        json.loads((tmp_path / folder / "drawn_forward_dense_1000.json").read_text()) for folder in ("new", "whole")
    )
    assert [(row["number"], row["problem"]) for row in joined["rows"]] == [
        (row["number"], row["problem"]) for row in whole["rows"]
    ]
    assert {key: joined[key] for key in joined if key != "rows"} == {key: whole[key] for key in whole if key != "rows"}
    assert "picture" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment": {"device": "another", "commit": "abc", "torch": "2"}}, "two devices"),
        ({"seed": 7}, "two devices, commits, versions, lists"),
        ({}, "hold the same problem"),
    ],
)
def test_what_does_not_belong_together_is_not_joined(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    change: dict[str, Any], message: str,
) -> None:  # fmt: skip
    assert run(script, monkeypatch, tmp_path / "a", "--count", "1") == 0
    (tmp_path / "b").mkdir()
    body = json.loads((tmp_path / "a" / "drawn_forward_dense_1000.json").read_text())
    (tmp_path / "b" / "drawn_forward_dense_1000.json").write_text(json.dumps(body | change))
    monkeypatch.setattr(
        "sys.argv", ["drawn", "--out", str(tmp_path), "--join", str(tmp_path / "a"), str(tmp_path / "b")]
    )
    with pytest.raises(SystemExit):
        script.main()
    assert message in capsys.readouterr().err
    assert not (tmp_path / "drawn_forward_dense_1000.json").exists()


@pytest.mark.parametrize("share", ["4/4", "1", "a/2", "-1/2"])
def test_a_share_that_is_none_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], share: str
) -> None:
    with pytest.raises(SystemExit):
        run(script, monkeypatch, tmp_path, f"--share={share}")
    assert "0/4, the first of four shares" in capsys.readouterr().err
