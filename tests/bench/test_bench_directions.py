"""Backward and both: checked gradients, their time, FLOPs and memory; presets; what else a row says."""

import csv
import io
import json
import math

import bench_fakes as fakes
import pytest
import torch

from flashlane import bench
from flashlane.bench.measure import device_rates, gradients
from flashlane.bench.measure.flops import flops, least_bytes
from flashlane.bench.measure.inputs import random_inputs
from flashlane.bench.measure.memory import measure_memory
from flashlane.bench.measure.peers import PEERS, Peer, peers_of_files, unfused
from flashlane.bench.measure.presets import PRESETS, select_presets
from flashlane.bench.measure.results import load_results
from flashlane.bench.measure.runner import TITLES, Selection
from flashlane.bench.measure.timing import Settings, host_cost
from flashlane.cli.sizes import Sizes
from flashlane.core import registry

FAST = Settings(rounds=3, round_ms=0.1, warmup_ms=0.1, warmup=1)
CPU_PEERS = tuple(peer for peer in PEERS if peer.tag in ("(unfused)", "(sdpa-math)", "(flash)"))


def run(problem, tags=("reference", "tiled"), peers=CPU_PEERS, **keywords):
    selection = Selection(tags=tags, peers=peers)
    return bench.run([problem], device="cpu", selection=selection, settings=FAST, **keywords)


@pytest.mark.parametrize(
    ("dtype", "sizes", "directions"),
    [
        (torch.float32, {"kv_heads": 2, "causal": True}, ("forward", "backward", "both")),
        (torch.float16, {"seqlen_k": 71}, ("backward",)),
        (torch.bfloat16, {"seqlen_k": 30, "causal": True}, ("backward",)),  # rows that see no key
    ],
)
def test_gradients_of_everything_that_runs_on_a_cpu_are_right(dtype, sizes, directions):
    problem = bench.make_problem(1, 4, 37, 16, dtype, **sizes)
    peers = CPU_PEERS if "causal" not in sizes or "seqlen_k" not in sizes else CPU_PEERS[:0]
    results = run(problem, peers=peers, directions=directions, memory=False)
    assert [row.direction for row in results] == sorted(
        (row.direction for row in results), key=["forward", "backward", "both"].index
    )
    ours = [row for row in results if row.kind == "kernel"]
    assert len(ours) == 2 * len(directions) and {row.status for row in ours} == {"ok"}, [
        (r.tag, r.message) for r in ours
    ]
    for row in results:
        if row.status == "ok":
            factor = {"forward": 1.0, "backward": 2.5, "both": 3.5}[row.direction]
            work = round(flops(problem) * factor)
            assert row.tflops == pytest.approx(work / row.timing.median * 1e-9)
            assert row.tflops_peak >= row.tflops > 0 and row.tflops_peak >= row.tflops_mean
            assert row.timing.fastest <= row.timing.median <= row.timing.slowest
    titles = {row.problem for row in results}
    assert titles == {problem.describe() + TITLES[direction] for direction in directions}


def test_the_gradient_oracle_is_autograd_of_the_formula_in_f64():
    problem = bench.make_problem(2, 4, 33, 16, torch.float32, kv_heads=2, causal=True, seqlen_k=40)
    inputs = random_inputs(problem, torch.device("cpu"), 3)
    do = gradients.output_gradient(problem, inputs, 3)
    q, k, v = (t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * problem.scale
    hidden = torch.arange(40) > torch.arange(33).unsqueeze(1) + 7
    out = torch.einsum(
        "bhij,bjhd->bihd", torch.softmax(scores.masked_fill(hidden, -torch.inf), -1), v.repeat_interleave(2, 2)
    )
    expected = torch.autograd.grad(out, (q, k, v), do.double())
    oracle = gradients.GradientOracle(problem, inputs, do)
    for found, right in zip(oracle.reference[0], expected):
        assert torch.allclose(found, right, rtol=0, atol=1e-13)
    assert oracle.judge([t.float() for t in expected]).ok


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("spoil", [lambda t: t.add_(0.05), lambda t: t[0, 0, 0, 0].fill_(math.nan)])
def test_a_wrong_gradient_is_caught_by_name(index, spoil):
    def wrong(problem, inputs):
        class Spoilt(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v):
                ctx.save_for_backward(q, k, v)
                return unfused(problem, bench_inputs(q, k, v), None)

            @staticmethod
            def backward(ctx, do):
                with torch.enable_grad():
                    leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                    grads = torch.autograd.grad(unfused(problem, bench_inputs(*leaves), None), leaves, do)
                spoil(grads[index])
                return tuple(grads)

        return lambda: Spoilt.apply(inputs.q, inputs.k, inputs.v)

    from flashlane.core.problem import Inputs as bench_inputs

    problem = bench.make_problem(1, 2, 24, 16)
    results = run(problem, tags=("reference",), peers=(Peer("(wrong)", "", wrong),), directions=("both",))
    row = next(row for row in results if row.tag == "(wrong)")
    assert row.status == "FAIL" and row.message.startswith(("dq", "dk", "dv")[index]) and row.timing is None


def test_a_kernel_without_gradients_says_so():
    class Forward(fakes.FakeKernel):
        def supports(self, problem):
            return "it has no backward" if problem.needs_grad else None

    with registry.table_of(Forward("forward-only"), registry.get("reference")):
        results = run(
            bench.make_problem(1, 1, 16, 16), tags=("forward-only",), peers=(), directions=("forward", "backward")
        )
    assert [row.direction for row in results] == ["forward"] and results.skipped[0].reason == "it has no backward"


def test_work_and_bytes_of_each_direction():
    problem = bench.make_problem(2, 8, 128, 64, kv_heads=2, seqlen_k=256)
    forward = flops(problem)
    assert forward == 4 * 2 * 8 * 128 * 256 * 64
    assert (flops(problem, direction="backward"), flops(problem, direction="both")) == (2.5 * forward, 3.5 * forward)
    q, kv, lse = 2 * 128 * 8 * 64 * 2, 2 * 256 * 2 * 64 * 2, 2 * 128 * 8 * 4
    assert least_bytes(problem) == 2 * q + 2 * kv + lse
    assert least_bytes(problem, "backward") == 4 * q + 4 * kv + lse
    assert least_bytes(problem, "both") == least_bytes(problem) + least_bytes(problem, "backward")
    with pytest.raises(ValueError, match="direction is 'sideways'"):
        flops(problem, direction="sideways")


def test_memory_is_what_a_call_allocates():
    def call():
        scores = torch.ones(256, 1024)  # 1 MiB, gone before the next
        del scores
        return torch.ones(512, 1024)  # 2 MiB

    call()
    found = measure_memory(call, torch.device("cpu"), written=100)
    assert found.extra == 2 * 2**20 + 100 and found.allocated is None and found.peak > 2**20
    peers = tuple(peer for peer in CPU_PEERS if peer.tag != "(sdpa-math)")
    rows = {row.tag: row for row in run(bench.make_problem(1, 2, 512, 64), tags=("reference",), peers=peers)}
    scores = 2 * 512 * 512 * 2
    assert rows["(unfused)"].memory.extra > scores > rows["(flash)"].memory.extra
    assert run(bench.make_problem(1, 1, 16, 16), memory=False).rows[0].memory is None


def test_presets_are_the_guide_s():
    assert set(PRESETS) == {
        "gpt2", "gpt3", "bert-base", "bert-large", "llama3-8b", "llama3-70b", "short", "long", "very-long"
    }  # fmt: skip
    gpt3, llama = PRESETS["gpt3"], PRESETS["llama3-70b"]
    assert (gpt3.batch, gpt3.seqlen, gpt3.heads, gpt3.head_dim, gpt3.causal) == (2, 2048, 96, 128, True)
    assert (llama.heads, llama.kv_heads, llama.head_dim, llama.causal) == (64, 8, 128, True)
    assert len(select_presets("all")) == 9
    (problem,) = Sizes(seqlen="64", dtype="bf16", preset="llama3-8b").problems(torch.device("cpu"))
    assert problem.describe() == "B1 H32/8 N64 D128 bf16 causal", "an option overrides the preset"
    with pytest.raises(ValueError, match=r"--preset has 'gtp2'.*'gpt2'"):
        select_presets("gtp2")


def test_results_files_are_read_back(tmp_path):
    results = run(bench.make_problem(1, 2, 24, 16), peers=CPU_PEERS[:1], directions=("forward", "backward"))
    path, _ = results.write(tmp_path, "x")
    again = load_results(path)
    assert again.rows == results.rows and again.skipped == results.skipped and again.to_csv() == results.to_csv()
    torn, mistimed = json.loads(path.read_text()), json.loads(path.read_text())
    torn["rows"][0]["speedup"] = "1.5"  # as a spreadsheet may write it: the report compared it, and named no file
    mistimed["rows"][0]["timing"]["median"] = "fast"
    for text, message in (
        (json.dumps(torn), r"x\.json is damaged: TypeError speedup is '1\.5'; it must be a number"),
        (json.dumps(mistimed), r"x\.json is damaged: TypeError median is 'fast'; it must be a number"),
        ("{}", "not a results file"),
        ("{", "not valid JSON"),
        ("[" * 200000, "not valid JSON: its brackets are nested too deeply"),
        ('{"format": "flashlane-bench/1"}', "damaged"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_results(path)


def test_host_cost_leaves_out_what_raises():
    class Item:
        def __init__(self, tag, call):
            self.tag, self.call = tag, call

        def context(self):
            return torch.no_grad()

    items = [Item("fine", lambda: sum(range(1000))), Item("bad", lambda: 1 / 0)]
    costs = host_cost(items, torch.device("cpu"), calls=3)
    assert set(costs) == {"fine"} and 1 < costs["fine"] < 1e5


def test_share_of_the_ceiling_weighs_the_two_products(monkeypatch):
    monkeypatch.setattr(device_rates, "ceiling", lambda device, dtype, kind: {"f16": 600.0, "f32": 300.0}[kind])
    problem, cuda = bench.make_problem(1, 1, 64, 64, arch="sm_90a"), torch.device("cuda", 0)

    def share(tag, device=cuda, problem=problem):
        return device_rates.share_of_ceiling(registry.get(tag), problem, 150.0, device)

    assert share("mma(split-q+acc-f32+stage1)") == pytest.approx(0.5)
    assert share("mma(split-q+stage1)") == pytest.approx(0.25)
    assert share("mma(split-q+acc-qk-f32+stage1)") == pytest.approx(0.375), "half the work at either rate"
    assert share("mma(split-q+acc-f32+stage1)", torch.device("cpu")) is None and share("tiled") is None


def test_a_ceiling_that_cannot_be_measured_is_a_note(monkeypatch):
    from flashlane.bench.measure import runner

    def broken(*words):
        raise RuntimeError("NVRTC is not there\nat all")

    monkeypatch.setattr(runner, "share_of_ceiling", broken)
    results = run(bench.make_problem(1, 1, 16, 16), peers=(), memory=False)
    assert results.notes == ["% mma ceiling: RuntimeError: NVRTC is not there"] or "NVRTC" in results.notes[0]
    assert len(results.notes) == 1 and all(row.timing for row in results)


@pytest.fixture
def invoke(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    return invoke


def test_the_command_times_all_three_and_says_it_in_every_file(invoke, tmp_path):
    words = ["bench", "--device", "cpu", "--arch", "none", "--quick", "--preset", "gpt2", "--N", "16", "--B", "1"]
    done = invoke(*words, "--H", "2", "--tags", "tiled", "--baselines", "unfused", "--both", "--repeats", "2")
    assert done.exit_code == 0, done.output
    for title in ("B1 H2 N16 D64 bf16 causal ·", "B1 H2 N16 D64 bf16 causal, backward", "forward+backward"):
        assert title in done.stdout
    for column in ("min", "max", "peak", "mean", "MiB"):
        assert f" {column} " in done.stdout
    (report,) = (tmp_path / "results").glob("*.json")
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == 6 and {row["direction"] for row in rows} == {"forward", "backward", "both"}
    lines = list(csv.DictReader(io.StringIO(report.with_suffix(".csv").read_text())))
    first = lines[0]
    assert float(first["ms_min"]) <= float(first["ms"]) <= float(first["ms_max"])
    assert float(first["tflops_peak"]) > 0 and int(first["memory_extra"]) > 0 and first["mma_ceiling"] == ""
    assert "CPU allocator" in first["memory_method"] and first["memory_allocated"] == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-grad", "--both"], "--no-grad is given with --both"),
        (["--graph", "--backward"], "--graph"),
        (["--cycles"], "--cycles reads the counters of an NVIDIA GPU; the device is cpu"),
        (["--preset", "gpt5"], "--preset has 'gpt5'"),
        (["--peers-from", "absent.py"], "--peers-from is 'absent.py'"),
    ],
)
def test_bad_input(invoke, words, message):
    done = invoke("bench", "--device", "cpu", "--arch", "none", "--quick", *words)
    assert done.exit_code == 2 and message in done.stderr, done.stderr


def test_peers_of_a_user_s_file(invoke, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from flashlane.bench import Peer\n"
        "from flashlane.bench.measure.peers import unfused\n"
        "PEERS = (Peer('(mine)', 'my own', lambda p, i: lambda: unfused(p, i, None)),)\n"
    )
    words = ["bench", "--device", "cpu", "--arch", "none", "--quick", "--tags", "tiled", "--baselines", "none"]
    done = invoke(*words, "--peers-from", "mine.py")
    assert done.exit_code == 0 and "(mine)" in done.stdout
    for text, message in (
        ("PEERS = 3", "must define PEERS"),
        ("import nothing_like_it", "cannot be run"),
        ("from flashlane.bench import Peer\nPEERS = (Peer('(flash)', '', None),)", "is the tag of another"),
        ("from flashlane.bench import Peer\nPEERS = (Peer('mine', '', None),)", "in round brackets"),
    ):
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(ValueError, match=message):
            peers_of_files([tmp_path / "bad.py"])


def test_a_frame_has_a_line_for_each_row():
    pytest.importorskip("pandas")
    results = run(bench.make_problem(1, 2, 24, 16), peers=(), directions=("forward", "backward"), memory=False)
    frame = results.frame()
    assert len(frame) == len(results) and list(frame["tag"]) == [row.tag for row in results]
    assert set(frame["direction"]) == {"forward", "backward"} and (frame["ms"] > 0).all()
    assert "<table" in results._repr_html_()


def test_files_that_cannot_be_written_go_elsewhere(invoke, tmp_path, monkeypatch):
    """The disk fills up while it is measured: the table is printed, the files are kept in the temporary folder."""
    spare = tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(spare))
    from flashlane.bench.measure import saved_files as r

    write = r.write_atomically

    def full(path, text):
        if path.parent.name == "out":
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(r, "write_atomically", full)
    words = ["bench", "--device", "cpu", "--arch", "none", "--quick", "--tags", "tiled", "--baselines", "none"]
    done = invoke(*words, "--out", "out")
    assert done.exit_code == 3 and "No space left on device" in done.stderr and str(spare) in done.stderr
    assert "tiled" in done.stdout and len(list(spare.glob("bench-*.json"))) == 1


class Stopping(fakes.FakeKernel):
    """Right on the first problem, and the end of the run on the second."""

    def __init__(self, error):
        super().__init__("stops")
        self.error = error

    def forward(self, problem, inputs, out, lse):
        if problem.seqlen_q == 24:
            raise self.error
        super().forward(problem, inputs, out, lse)


@pytest.mark.parametrize(("error", "status", "words"), [(KeyboardInterrupt(), 130, "interrupted"), (None, 1, "broke")])
def test_a_run_that_ends_early_keeps_what_is_done(invoke, tmp_path, monkeypatch, error, status, words):
    from flashlane.bench.measure import runner

    def broken(device, tag, problem, error):
        raise runner.BrokenContext(f"{tag} broke the CUDA context")

    monkeypatch.setattr(runner, "stop_if_broken", broken)
    with registry.table_of(Stopping(error or RuntimeError("an illegal access"))):
        options = ["--device", "cpu", "--arch", "none", "--quick", "--baselines", "none", "--no-memory"]
        done = invoke("bench", *options, "--N", "16,24,32", "--H", "1", "--D", "16")
    assert done.exit_code == status and words in done.stderr and "what is done before is kept" in done.stderr
    (report,) = (tmp_path / "results").glob("*.json")
    found = load_results(report)
    assert [row.problem for row in found] == ["B1 H1 N16 D16 bf16"] and words in found.stopped
    with registry.table_of(Stopping(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        bench.run([bench.make_problem(1, 1, 24, 16)], device="cpu", settings=FAST)
