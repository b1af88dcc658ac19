"""The scripts that measure and sanitize the Hopper kernels, without a GPU: what they ask, how they judge and keep."""

from __future__ import annotations

import importlib
import json
import os
import re
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from backward_kernels import StandIn

from flashlane import bench
from flashlane.bench.measure.results import Results, Row, Skipped
from flashlane.bench.measure.timing import summarise
from flashlane.core import registry
from flashlane.kernels.hopper.backward.kernel import config_of
from flashlane.kernels.hopper.backward.two_cta.config import TwoCtaConfig

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Scripts of benchmarks/ by name, imported as when they are run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    return importlib.import_module


@pytest.fixture
def script(scripts: Any) -> ModuleType:
    return scripts("hopper_backward")


@pytest.mark.parametrize("name", ["hopper_forward", "hopper_backward"])
def test_without_a_gpu_they_say_so(
    name: str, scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = scripts(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [name, "--out", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2 and "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_forward_problem_has_a_peer_with_an_installed_flash_attention_4(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and packed sequences too, for which torch has one as well."""
    forward, peers = scripts("hopper_forward"), {peer.tag: peer for peer in bench.PEERS}
    for shape in forward.suite("shapes"):
        small = scripts("hopper_shapes").Shape(
            1, shape.heads, shape.kv_heads, 8, 8, shape.head_dim, shape.head_dim_v, shape.causal, shape.window,
            (5, 8) if shape.lengths else (),
        )  # fmt: skip
        problem = forward.make(small, CPU)[0].on("sm_90a")
        able = {name for name in forward.PEER_TAGS if peers[forward.PEER_TAGS[name]].supports(problem) is None}
        assert {"fa2", "fa4"} <= able, shape.title
        assert ("cudnn" in able) == (not shape.lengths and shape.window < 0), shape.title


# --- hopper_backward.py: the cells


def test_every_bar_of_the_issue_has_its_cells(script: ModuleType) -> None:
    cells = list(script.cells())
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.direction for cell in cells} == {"backward", "both"}
    by_group = {name: [c for c in cells if c.group == name and c.direction == "backward"] for name in script.GROUPS}

    def ask(group: str) -> set[tuple[int, bool, int]]:
        return {(c.shape.head_dim, c.shape.causal, c.shape.seqlen_k) for c in by_group[group]}

    masks, lengths = (False, True), (1024, 2048, 4096, 8192, 16384)
    assert ask("grid") == {(d, m, n) for d in (64, 128) for m in masks for n in lengths}
    assert ask("d256") == {(256, m, n) for m in masks for n in lengths}
    assert {(d, m) for d, m, _ in ask("dims")} == {(d, m) for d in (96, 160, 192) for m in masks}
    assert {(d, m) for d, m, _ in ask("deterministic")} == {(d, m) for d in (64, 96, 128, 160, 192, 256) for m in masks}
    for cell in by_group["grid"] + by_group["d256"]:
        assert cell.shape.batch * cell.shape.seqlen_q == 16384 and cell.shape.heads * cell.shape.head_dim == 2048
    for cell in by_group["gqa"] + by_group["varlen"]:
        assert (cell.shape.heads, cell.shape.kv_heads, cell.shape.causal) == (32, 8, True)
    (mix,) = by_group["varlen"]
    assert max(mix.shape.lengths) == mix.shape.seqlen_q <= 16384 and 700 < sum(mix.shape.lengths) / 32 < 1400
    assert all(cell.peers == (("fa4",) if cell.deterministic else tuple(script.PEER_TAGS)) for cell in cells)
    fast = [c for c in by_group["d256"] if c.name.startswith(script.FAST_CELL)]
    assert len(fast) == 1
    targets = {name: (group.required, group.mean) for name, group in script.GROUPS.items()}
    assert targets["grid"] == (1.0, 1.05) and targets["d256"][0] == 1.35 and targets["dims"][0] == 1.10


def test_cells_are_chosen_by_words(script: ModuleType) -> None:
    chosen = [cell.name for cell in script.cells() if script.is_selected(cell, "d128, N4096,causal,backward,grid")]
    assert chosen == ["D128 causal N4096 B4 H16 backward"]
    assert len([c for c in script.cells() if script.is_selected(c, "varlen")]) == 2
    assert not [c for c in script.cells() if script.is_selected(c, "d12")]


def test_a_cell_is_the_problem_that_it_names(script: ModuleType, scripts: Any) -> None:
    shape = scripts("hopper_shapes").Shape(2, 4, 2, 9, 9, 16, 16, True)
    problem, inputs = script.Cell("deterministic", shape, "both").build(CPU)
    assert problem.deterministic and problem.causal and problem.group == 2 and inputs.q.dtype == torch.bfloat16
    assert not script.Cell("gqa", shape, "both").build(CPU)[0].deterministic


# --- how it judges


def timed(tag: str, ms: float | None, status: str = "ok") -> Row:
    kind = "peer" if tag.startswith("(") else "kernel"
    timing = None if ms is None else summarise([ms] * 5, 1, "test")
    return Row("P", {}, tag, kind, status, "" if ms else "why", timing=timing, tflops=None if ms is None else 100 / ms)


def cell_of(script: ModuleType, group: str, direction: str = "backward", number: int = 0) -> Any:
    return [c for c in script.cells() if c.group == group and c.direction == direction][number]


def problem_of(script: ModuleType) -> Any:
    return script.Cell("grid", script.Shape(1, 2, 2, 8, 8, 16, 16, True), "backward").build(CPU)[0]


def test_a_ratio_is_the_fastest_peers_time_over_ours(script: ModuleType) -> None:
    rows = [timed(script.TAG, 2.0), timed("(cudnn)", 3.0), timed("(flash-attn-4)", 2.2), timed("(flash)", None, "FAIL")]
    results = Results({}, {}, rows, [Skipped("P", "(flex)", "not here")])
    row = script.judged(cell_of(script, "grid"), problem_of(script), results)
    assert row["ratio"] == pytest.approx(1.1) and row["best_peer"] == "fa4" and row["met"]
    assert row["tflops"] == {"flashlane": 50.0, "cudnn": pytest.approx(100 / 3), "fa4": pytest.approx(100 / 2.2)}
    assert row["absent"] == {"fa2": "FAIL: why", "flex": "not here"} and row["cost"] is None
    assert not script.judged(cell_of(script, "d256"), problem_of(script), results)["met"], "1.35 is required there"
    text = script.line(row)
    assert "1.100 of fa4 pass 1.00" in text and "no flex: not here" in text


def test_determinism_is_set_against_flash_attention_4_and_costs(script: ModuleType) -> None:
    rows = [timed(script.TAG, 2.2), timed("(flash-attn-4)", 2.0), timed("(any-order)", 2.0)]
    row = script.judged(cell_of(script, "deterministic"), problem_of(script), Results({}, {}, rows))
    assert row["cost"] == pytest.approx(0.1) and not row["met"] and "any-order" not in str(row["tflops"])
    targets = {target["target"]: target for target in script.judge([row])}
    cost = targets["deterministic, backward: highest cost"]
    assert cost["measured"] == pytest.approx(0.1) and not cost["met"] and cost["required"] == 0.08
    assert script.judge([row | {"cost": 0.07}])[-1]["met"]


def test_bars_are_judged_over_their_cells(script: ModuleType) -> None:
    def row(number: int, ratio: float | None, direction: str = "backward", group: str = "grid") -> dict[str, Any]:
        cell = cell_of(script, group, direction, number)
        more = {"ratio": ratio, "cost": None, "tflops": {"flashlane": 480.0} if ratio else {}}
        return {"name": cell.name, "group": group, "direction": direction, **more}

    rows = [row(0, 1.2), row(1, 1.0), row(2, None), row(0, 0.99, "both")]
    rows += [row(4, 1.4, group="d256"), row(4, 1.4, "both", "d256")]
    targets = {target["target"]: target for target in script.judge(rows)}
    least, mean = (targets[f"D 64 and 128, backward: {what} ratio"] for what in ("least", "mean"))
    assert (least["measured"], least["met"], least["cells"]) == (1.0, True, 2)
    assert mean["measured"] == pytest.approx(1.2**0.5) and mean["met"]
    assert not targets["D 64 and 128, both: least ratio"]["met"] and targets["D 256, backward: least ratio"]["met"]
    fast = targets["D256 full N16384, backward: TFLOP/s"]
    assert (fast["cells"], fast["measured"], fast["met"]) == (1, 480.0, False)
    varlen = targets["log-normal mix of lengths, both: least ratio"]
    assert varlen["measured"] is None and not varlen["met"]
    text = "\n".join(script.summary(list(targets.values())))
    assert "MISS" in text and "pass" in text and "not measured" in text


# --- a whole run, of small problems, with a kernel of the CPU in the place of ours


@pytest.fixture
def small(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs main over small cells with options; gives its status and the file."""

    def pairs() -> Any:
        for causal in (False, True):
            yield "grid", script.Shape(1, 2, 2, 8, 8, 16, 16, causal)
        yield "varlen", script.Shape(3, 4, 2, 9, 9, 16, 16, True, lengths=(5, 9, 2))
        yield "deterministic", script.Shape(1, 2, 2, 8, 8, 16, 16, True)

    monkeypatch.setattr(script, "shapes", pairs)
    monkeypatch.setattr(script, "device_or_exit", lambda: CPU)
    monkeypatch.setattr(script, "heat", lambda device: None)
    monkeypatch.setattr(script, "TAG", "tiled")
    monkeypatch.setattr(script, "BACKWARD", "tiled")
    path = tmp_path / "found.json"

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        options = ["--out", str(path), "--round-ms", "0.1", *words]
        monkeypatch.setattr("sys.argv", ["hopper_backward.py", *options])
        with registry.table_of(registry.get("reference"), registry.get("tiled")):
            return script.main(), json.loads(path.read_text())

    return run


def test_a_run_writes_checks_and_judges(small: Any, script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status, body = small("--peers", "fa2,fa4")
    assert status == 0 and body["format"] == "flashlane-hopper-backward/3" and len(body["rows"]) == 8
    assert [row["name"] for row in body["rows"]] == [cell.name for cell in script.cells()]
    for row in body["rows"]:
        assert row["ms"]["flashlane"] > 0 and row["commit"] == body["environment"]["commit"]
        assert row["absent"]["fa4"] == "not installed"
        if row["group"] == "grid":  # torch's own kernel on the CPU is the peer
            assert row["best_peer"] == "fa2" and row["ratio"] == row["ms"]["fa2"] / row["ms"]["flashlane"]
        if row["group"] == "deterministic":
            assert row["cost"] is not None and row["ratio"] is None and "fa2" not in row["ms"]
    assert {target["target"]: target["cells"] for target in body["targets"]}["D 64 and 128, both: least ratio"] == 2
    assert "D 64 and 128, backward: mean ratio" in capsys.readouterr().out


def test_a_run_goes_on_where_it_stopped(
    small: Any, script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small("--only", "full", "--peers", "fa4")
    first = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["direction"] for row in first] == ["backward", "both"]
    status, body = small("--resume", "--peers", "fa4")
    assert status == 0 and len(body["rows"]) == 8 and body["rows"][:2] == first, "measured once"
    status, body = small("--seconds", "0", "--peers", "fa4", "--only", "full")
    assert status == 0 and "time is up before D16 full" in capsys.readouterr().out and len(body["rows"]) == 8
    changed = tmp_path / "found.json"
    changed.write_text(changed.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "0.1"'))
    for text, message in ((None, "measured with torch 0.1"), ("{", "no file of this script")):
        if text is not None:
            changed.write_text(text)
        with pytest.raises(SystemExit) as ended:
            small("--resume")
        assert ended.value.code == 2 and message in capsys.readouterr().err


def test_what_another_backward_would_run_is_not_measured(
    small: Any, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = StandIn("hopper", reason=lambda problem, kernel: "head_dim is 16", priority=20)
    monkeypatch.setattr(script, "BACKWARD", "hopper")
    with registry.backward_table_of(registry.get_backward("tiled"), refusing):
        status, body = small("--only", "full,backward", "--peers", "fa4")
    assert status == 0 and body["rows"][0]["ms"] == {}
    assert body["rows"][0]["absent"] == {"flashlane": "the tiled backward would run, not hopper: head_dim is 16"}


def test_wrong_gradients_end_in_status_1(small: Any, capsys: Any) -> None:
    right = registry.get_backward("tiled")

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        found = right.run(*arguments, **keywords)
        return found._replace(k=found.k * 1.5)

    with registry.backward_table_of(StandIn(right, wrong)):
        status, body = small("--only", "full,backward", "--peers", "fa4")
    assert status == 1 and "WRONG D16 full" in capsys.readouterr().out
    assert "flashlane" not in body["rows"][0]["ms"] and "dk" in body["rows"][0]["absent"]["flashlane"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--peers", "fa9"), "--peers is 'fa9'; it may hold cudnn, fa2, fa4, flex"),
        (("--directions", "up"), "--directions is 'up'; it may hold backward, both"),
        (("--only", "d7"), "--only is 'd7'; no cell has all of these words"),
    ],
)
def test_bad_options_are_named(words: tuple[str, ...], message: str, small: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        small(*words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


# --- sanitize.py


def test_what_racecheck_says_is_counted_by_who_meets_whom(scripts: Any) -> None:
    log = """
========= Error: Race reported between Write access at bulk_load(unsigned int, const void *)+0x6560 in tma.cuh:47
=========     and Read access at load_shared_float2(unsigned int)+0x1760 in ptx.cuh:74 [128 hazards]
=========     and Read access at load_shared_float2(unsigned int)+0x1780 in ptx.cuh:74 [128 hazards]
=========
========= Error: Race reported between Read access at load_shared_int4(unsigned int)+0xf60 in ptx.cuh:67
=========     and Write access at store_shared(unsigned int, uint4)+0x62a0 in ptx.cuh:97 [16 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
    assert scripts("sanitize").hazards(log) == {
        "write bulk_load (tma.cuh:47), read load_shared_float2 (ptx.cuh:74)": 2,
        "read load_shared_int4 (ptx.cuh:67), write store_shared (ptx.cuh:97)": 1,
    }


def test_what_the_tools_say_in_several_processes_is_one_verdict(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sanitize = scripts("sanitize")
    assert [list(sanitize.shared(range(5), (number, 3))) for number in range(3)] == [[0, 3], [1, 4], [2]]
    with monkeypatch.context() as late:
        late.setenv(sanitize.UNTIL, "1.0")
        assert list(sanitize.shared("ab", (0, 1))) == [] and "left out a\nleft out b\n" in capsys.readouterr().out
    shares: list[tuple[str, tuple[int, int]]] = []
    errors = {"racecheck": 0}

    def of(tool: str, script: list[str], share: tuple[int, int], compiled: bool) -> Any:
        assert not compiled
        shares.append((tool, share))
        number = errors.get(tool, 0) * share[0]
        said = f"ran {tool} {share[0]} D64 f16 ok\n========= {tool} SUMMARY: {number} errors\n"
        return sanitize.Run(said, "", number)

    monkeypatch.setattr(sanitize.Run, "of", of)
    monkeypatch.setattr(sanitize, "run_all", lambda *shares: None)
    monkeypatch.setattr(sanitize, "device_or_exit", lambda: CPU)
    monkeypatch.setattr(sanitize, "environment", lambda device: {})
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: name)
    out = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["sanitize.py", "--jobs", "2", "--out", str(out)])
    assert sanitize.main() == 0
    assert sorted(shares) == [(tool, (number, 2)) for tool in ("memcheck", "racecheck") for number in (0, 1)]
    found = json.loads(out.read_text())["memcheck"]
    assert found["kernels"] == ["memcheck 0 D64", "memcheck 1 D64"] and found["clean"] and len(found["summary"]) == 2
    errors["racecheck"] = 3
    assert sanitize.main() == 1
    found = json.loads(out.read_text())
    assert found["memcheck"]["clean"] and not found["racecheck"]["clean"] and found["racecheck"]["status"] == 3
    assert "racecheck: 2 kernels, NOT CLEAN" in capsys.readouterr().out


def test_what_does_not_end_is_killed_and_its_output_kept(scripts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sanitize, environ = scripts("sanitize"), dict(os.environ)
    killed = sanitize.ended(["bash", "-c", "echo ran a; echo b; sleep 300 & wait"], environ, 2.0, "racecheck")
    assert killed.status < 0 and killed.stdout == "ran a\nb\n"
    assert capsys.readouterr().out == "racecheck: ran a\n"
    done = sanitize.ended(["bash", "-c", "echo ran; echo bad >&2; exit 3"], environ, None)
    assert done == sanitize.Run("ran\n", "bad\n", 3)
    assert not sanitize.verdict([killed])["clean"]


def test_every_feature_of_the_backward_is_sanitized(scripts: Any) -> None:
    cases = list(scripts("sanitize").backward_cases())
    assert len({case.tag for case in cases}) == len(cases)
    for head_dim in (64, 128, 256):
        problems = [case.build()[0] for case in cases if case.head_dim == head_dim]
        for name in ("causal", "softcap", "alibi", "sinks", "varlen", "deterministic"):
            assert any(getattr(p, name) for p in problems) and not all(getattr(p, name) for p in problems), name
        assert any(p.window_left >= 0 and not p.causal for p in problems) and any(p.group == 2 for p in problems)
        assert any(p.softcap and p.alibi and p.sinks and p.varlen and p.deterministic for p in problems)
        split = [p.causal for p in problems if getattr(config_of(p.on("sm_90a")), "split_q", False)]
        assert set(split) == {False, True}
    configs = [config_of(case.build()[0].on("sm_90a")) for case in cases if case.heads[0] > 132]
    one_cta = [config for config in configs if config.head_dim <= 128]
    assert {(config.postprocess, config.dq, config.k_stages, config.dq_stages) for config in one_cta} == {
        ("own_launch", "register_atomics", 2, 1), ("own_launch", "tma_reduce_add", 1, 1),
        ("idle_warps", "register_atomics", 2, 1), ("own_launch", "ordered_tma_reduce_add", 1, 1),
        ("own_launch", "ordered_register_atomics", 2, 1),
    }  # fmt: skip
    assert any(isinstance(config, TwoCtaConfig) for config in configs), "a cluster takes more than one tile"


def test_the_backward_is_run_and_judged(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flashlane.reference.tiled import tiled_backward

    sanitize = scripts("sanitize")
    zeros, total = torch.zeros, torch.Tensor.sum

    def ours(*arguments: Any, config: Any) -> Any:
        assert not config.product_statistics, "memcheck would stop it"
        assert torch.zeros is not zeros and torch.Tensor.sum is not total
        assert torch.zeros(2, 3, dtype=torch.int32, device="cpu").shape == (2, 3)
        return tiled_backward(*arguments)

    monkeypatch.setattr(sanitize, "device_or_exit", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sanitize, "hopper_backward", ours)
    refusal = lambda problem: "head_dim is 256" if problem.head_dim == 256 else None  # noqa: E731
    monkeypatch.setattr(sanitize, "supports", refusal)
    sanitize.run_backwards([])
    lines = capsys.readouterr().out.splitlines()
    refused = [line for line in lines if re.fullmatch(r"refused hopper backward, .* D256: head_dim is 256", line)]
    ran = [line for line in lines if line.startswith("ran ") and line.endswith(" ok")]
    cases = list(sanitize.backward_cases())
    assert len(refused) == sum(case.head_dim == 256 for case in cases) == 13
    assert len(ran) == len(cases) - len(refused) == 29
    assert torch.zeros is zeros and torch.Tensor.sum is total

    def spoilt(*arguments: Any, config: Any) -> Any:
        found = ours(*arguments, config=config)
        return found._replace(v=found.v * 1.1)

    monkeypatch.setattr(sanitize, "hopper_backward", spoilt)
    sanitize.run_backwards(["full D64"])
    assert "off by {'dv'" in capsys.readouterr().out


def test_every_case_of_the_forward_is_run_and_judged(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flashlane.reference.naive import reference_attention

    sanitize, kernel = scripts("sanitize"), registry.get("hopper(wgmma+tma)")
    wrong = 0.0

    def ours(config: Any, problem: Any, inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
        assert torch.isnan(out).all() and torch.isnan(lse).all()
        right, right_lse = reference_attention(problem, inputs, torch.float32)
        out.copy_(right + wrong), lse.copy_(right_lse)

    monkeypatch.setattr(sanitize, "device_or_exit", lambda: CPU)
    monkeypatch.setattr(sanitize, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernel, "run", ours)
    sanitize.run_forwards([])
    lines = capsys.readouterr().out.splitlines()
    cases = list(sanitize.forward_cases())
    assert len(lines) == len(cases) and all(
        re.fullmatch(r"ran hopper forward, .* D\d+ b?f16 ok", line) for line in lines
    )
    wrong = 0.1
    sanitize.run_forwards(["cluster, full D64", "rows of pages D72"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and not any(line.endswith(" ok") for line in lines)


# --- hopper_drawn.py


def test_drawn_problems_are_legal_various_and_judged(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashlane.reference.naive import reference_attention

    script = scripts("hopper_drawn")
    factor = 1.0

    def ours(config: Any, problem: Any, inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
        found, found_lse = reference_attention(problem.on(None), inputs, torch.float32)
        out.copy_(found * factor), lse.copy_(found_lse)

    monkeypatch.setattr(script.KERNEL, "run", ours)
    drawn = [script.draw(seed) for seed in range(60)]
    problems = [script.build(case, CPU)[0] for case, _ in drawn]
    assert all(script.KERNEL.supports(problem) is None for problem in problems)
    configs = [script.config_of(problem, pick) for problem, (_, pick) in zip(problems, drawn, strict=True)]
    names = ("seqlen.varlen", "seqlen.cache", "gather", "page_rows", "split", "has_left")
    for name in (*names, "score.softcap", "score.alibi", "score.sinks"):
        assert {bool(attrgetter(name)(config)) for config in configs} == {False, True}, name
    assert not any(script.check(*drawn[number], number, CPU) for number in range(0, 60, 6))
    factor = 1.02
    assert all("off by" in script.check(*drawn[number], number, CPU) for number in range(0, 60, 20))
