"""The main job from Python: right kernels pass, wrong ones are caught, nothing is hidden."""

import json
import re
from dataclasses import replace

import bench_fakes as fakes
import pytest
import torch

from flashlane import bench
from flashlane.bench.measure.peers import PEERS, Peer
from flashlane.bench.measure.progress import Silent
from flashlane.bench.measure.runner import Selection, resolve_device
from flashlane.bench.measure.timing import PROTOCOLS, Settings
from flashlane.core import registry
from flashlane.core.problem import Inputs

FAST = Settings(rounds=2, round_ms=0.1, warmup_ms=0.1, warmup=1)


@pytest.fixture
def add():
    """Registers kernels for one test."""
    with registry.table_of(*registry.kernels()):
        yield registry.register


def run(*problems, tags=("reference",), peers=(), **keywords):
    problems = problems or (bench.make_problem(1, 2, 40, 32),)
    keywords = {"device": "cpu", "settings": FAST} | keywords
    return bench.run(problems, selection=Selection(tags=tags, peers=peers), **keywords)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"causal": True, "seqlen_k": 71, "kv_heads": 2}, {"causal": True, "seqlen_k": 30, "alignment": "top-left"}],
)
def test_everything_that_runs_on_a_cpu_is_right(dtype, sizes, seed):
    problem = bench.make_problem(2, 4, 53, 48, dtype, **sizes)
    results = run(problem, tags=("reference", "tiled"), peers=PEERS, seed=seed)
    assert [row.tag for row in results] == ["reference", "tiled", "(unfused)", "(sdpa-math)", "(flash)"]
    for row in results:
        # (unfused) rounds as often as the yardstick does, so that on few elements it may exceed twice its error
        assert row.status == "ok" or (row.tag == "(unfused)" and row.verdict.ratio < 2), row.message
        if row.status == "ok":
            assert row.timing.median > 0 and row.tflops > 0 and row.speedup > 0 and len(row.values) == 3
    # Of a peer that is wrong no speed-up counts, though it may be the fastest one.
    assert max(row.speedup for row in results if row.kind == "peer" and row.status == "ok") == 1.0
    assert {s.tag for s in results.skipped} | {row.tag for row in results} >= {peer.tag for peer in PEERS}
    assert not results.failed


@pytest.mark.parametrize(
    ("kernel", "word"),
    [
        (fakes.FakeKernel("wrong", fakes.one_element), "output: error"),
        (fakes.FakeKernel("wrong", fakes.one_nan), "NaN"),
        (fakes.FakeKernel("wrong", fakes.wrong_lse), "LSE"),
        (fakes.LazyKernel("wrong"), "64 of 2560 elements are NaN"),
        (fakes.RaisingKernel("wrong"), "RuntimeError: the launch failed"),
        (fakes.FakeKernel("wrong", emulation="scores=f1"), "low_precision_reference"),
    ],
)
def test_wrong_kernels_are_caught_and_not_timed(add, kernel, word):
    add(kernel)
    results = run(tags=("reference", "wrong"))
    right, wrong = results.rows
    assert right.status == "ok" and right.timing is not None
    assert wrong.status in ("FAIL", "error") and word in wrong.message and wrong.timing is None
    assert results.failed == [wrong]


def test_a_right_kernel_does_not_lend_its_output_to_a_lazy_one(add):
    """Kernels share one output buffer, so it must be poisoned between them."""
    add(fakes.FakeKernel("right"))
    add(fakes.LazyKernel("lazy"))
    assert [row.status for row in run(tags=("right", "lazy"))] == ["ok", "FAIL"]


def test_unchecked_is_said(add):
    add(fakes.FakeKernel("wrong", fakes.one_element))
    (row,) = run(tags=("wrong",), check=False)
    assert row.status == "unchecked" and row.verdict is None and row.timing is not None


def test_tensors_that_no_memory_can_hold_are_out_of_memory():
    """Their bytes overflow what torch counts them with, which it says in other words."""
    results = run(bench.make_problem(10**6, 10**6, 10**5, 64))
    assert not results.rows and [s.reason for s in results.skipped] == ["out of memory: its tensors do not fit"]


def test_peers_that_raise_are_rows_that_say_so():
    def broken(problem, inputs):
        raise ImportError("its library is broken")

    def breaks_later(problem, inputs):
        return lambda: (_ for _ in ()).throw(RuntimeError("CUDA out of memory. Tried"))

    def wrong(problem, inputs):
        return lambda: inputs.q.clone()

    peers = (
        Peer("(broken)", "", broken),
        Peer("(later)", "", breaks_later),
        Peer("(wrong)", "", wrong),
        Peer("(absent)", "", broken, available=lambda device: "not installed"),
        Peer("(unable)", "", broken, supports=lambda problem: "head_dim is 32"),
    )
    results = run(peers=peers)
    rows = {row.tag: (row.status, row.message) for row in results}
    assert rows["reference"][0] == "ok"
    assert rows["(broken)"] == ("error", "ImportError: its library is broken")
    assert rows["(later)"] == ("error", "out of memory")
    assert rows["(wrong)"][0] == "FAIL"
    assert [(s.tag, s.reason) for s in results.skipped] == [
        ("(absent)", "not installed"),
        ("(unable)", "head_dim is 32"),
    ]
    assert rows["(wrong)"][1].startswith("output: error")
    assert not results.failed  # what peers do wrong is shown, and is theirs


def test_supports_reasons_are_kept(add):
    class Narrow(fakes.FakeKernel):
        def supports(self, problem):
            return "head_dim is 32; it takes 64"

    add(Narrow("narrow"))
    results = run(tags=("narrow",))
    assert not results.rows and results.skipped[0].reason == "head_dim is 32; it takes 64"


def test_fresh_inputs_for_each_seed_and_problem():
    problem = bench.make_problem(1, 1, 16, 16)
    first, second = run(problem, problem, seed=5)
    assert first.values != second.values
    assert run(problem, seed=6).rows[0].values == second.values


def test_acc_f32_leaves_out_f16_accumulators(add):
    add(fakes.FakeKernel("half", emulation="scores=f16,out=f32,store=f32"))
    add(fakes.FakeKernel("stored", emulation="scores=f32,out=f32,store=f16"))
    selection = Selection(tags=("half", "stored"), peers=(), accumulate_f32=True)
    results = bench.run([bench.make_problem(1, 1, 64, 16)], device="cpu", selection=selection, settings=FAST)
    assert [row.tag for row in results] == ["stored"] and results.skipped[0].tag == "half"


def test_selection_names_what_is_near():
    with pytest.raises(ValueError, match=r"--kernels has 'tild'.*'tiled'"):
        Selection(tags=("tild",))
    with pytest.raises(ValueError, match=r"--tags has 'referense'.*'reference'"):
        Selection(words=("referense",))
    with pytest.raises(ValueError, match="use --peers"):
        Selection(words=("cudnn",))
    assert [k.tag for k in Selection(words=("tile",)).kernels()] == ["tiled"]


def test_unlisted_kernels_run_when_asked_for(add):
    hidden = add(fakes.FakeKernel("hidden(grid)"))
    hidden.listed = False
    others = len(registry.kernels(listed_only=True))
    everything, usual = Selection(show_all=True), Selection()
    assert hidden in everything.kernels() and everything.unlisted == 0
    assert hidden not in usual.kernels() and len(usual.kernels()) == others and usual.unlisted >= 1
    for named in (Selection(tags=("hidden(grid)",)), Selection(words=("(grid",))):
        assert named.kernels() == [hidden] and named.unlisted == 0
    with registry.table_of(registry.get("reference"), hidden):
        problems = [bench.make_problem(1, 1, 16, 16)]
        results = bench.run(problems, device="cpu", selection=Selection(peers=()), settings=FAST)
    assert [row.tag for row in results] == ["reference"] and json.loads(results.to_json())["unlisted"] == 1


def test_given_tensors_are_the_ones_that_run():
    q = torch.randn(1, 9, 2, 16).half()
    problem = bench.make_problem(1, 2, 9, 16, scale=0.3)
    results = run(bench.Case(problem, "layer 0", Inputs(q, q, q)))
    assert results.rows[0].problem == "layer 0: B1 H2 N9 D16 f16"
    weights = torch.softmax(0.3 * torch.einsum("qhd,khd->hqk", q[0].float(), q[0].float()), -1)
    out = torch.einsum("hqk,khd->qhd", weights, q[0].float())
    assert results.rows[0].values[0] == pytest.approx(float(out[0, 0, 0]), abs=2e-3)
    assert results.rows[0].values[2] == pytest.approx(float(out[-1, -1, -1]), abs=2e-3)


@pytest.mark.parametrize("sizes", [{"seqlen_k": 0}, {"seqlen_k": 5, "causal": True}])
def test_blind_rows_and_empty_sequences(sizes):
    results = run(bench.make_problem(1, 2, 8, 16, **sizes), tags=("reference", "tiled"), peers=PEERS[:2])
    assert [row.status for row in results] == ["ok"] * 4, [row.message for row in results]
    assert json.loads(results.to_json())["rows"]


def test_results_say_what_they_were_measured_on():
    results = run()
    assert {"device", "date", "commit", "command", "torch", "python"} <= set(results.environment)
    assert results.settings["rounds"] == 2 and results.settings["check"] is True


def test_devices():
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="--device is 'gpu'"):
        resolve_device("gpu")
    with pytest.raises(ValueError, match="--device is 'meta'"):
        resolve_device("meta")
    with pytest.raises(ValueError, match=r"--device is 'cuda:97'"):
        resolve_device("cuda:97")


def test_packed_problems_without_lengths_are_all_as_long_as_the_problem_says():
    q, cu = torch.randn(4, 1, 8).half(), torch.tensor([0, 4], dtype=torch.int32)
    inputs = Inputs(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4)
    from flashlane.core.problem import AttentionProblem

    problem = AttentionProblem.from_inputs(inputs)
    results = run(problem, tags=("tiled",))
    assert [row.status for row in results] == ["ok"]
    drawn = bench.Case(replace(problem, batch=3, seqlen_k=6)).materialise(torch.device("cpu"), 0)
    assert drawn.cu_seqlens_q.tolist() == [0, 4, 8, 12] and drawn.cu_seqlens_k.tolist() == [0, 6, 12, 18]
    assert len(drawn.q) == 12 and len(drawn.k) == len(drawn.v) == 18


@pytest.mark.parametrize("page", [0, 8])
def test_packed_and_cached_problems_are_axes_of_the_same_bench(page):
    """Each sequence has its own length; its own operations count, and it is checked against the formula."""
    packed = bench.make_problem(3, 4, 60, 32, kv_heads=2, causal=True, layout="packed")
    cached = bench.make_problem(
        3, 4, 2, 32, kv_heads=2, seqlen_k=64, causal=True, layout="paged" if page else "cache", page=page
    )
    cases = [bench.Case(packed, lengths=(60, 7, 31)), bench.Case(cached, lengths=(64, 5, 40))]
    results = run(*cases, tags=("reference", "tiled"), peers=PEERS)
    assert [row.status for row in results] == ["ok"] * 4, [row.message for row in results]
    dense = [bench.make_problem(1, 4, n, 32, kv_heads=2, causal=True) for n in (60, 7, 31)]
    dense += [bench.make_problem(1, 4, 2, 32, kv_heads=2, seqlen_k=n, causal=True) for n in (64, 5, 40)]
    for row, sequences in zip(results.rows[::2], (dense[:3], dense[3:]), strict=True):
        work = sum(bench.flops(one) for one in sequences)
        assert row.tflops == pytest.approx(work / row.timing.median * 1e-9)
    assert all(s.reason for s in results.skipped)


def test_packed_problems_need_the_length_of_each_sequence():
    with pytest.raises(ValueError, match="2 lengths"):
        run(bench.Case(bench.make_problem(3, 4, 60, 32, layout="packed"), lengths=(3, 4)))


def test_the_public_function_is_timed(add):
    """What is timed allocates its own output: the shared buffers of the check stay as they were."""
    addresses = []

    class Watching(fakes.FakeKernel):
        def forward(self, problem, inputs, out, lse):
            addresses.append(out.data_ptr())
            super().forward(problem, inputs, out, lse)

    add(Watching("watching"))
    results = run(tags=("watching",), memory=False)
    assert results.rows[0].status == "ok" and results.settings["calls"].startswith("the public function")
    assert results.settings["protocol"] == "flushed" and list(results.rows[0].timings) == ["flushed"]
    assert addresses[0] not in addresses[1:]


@pytest.mark.gpu
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_kernel_on_a_gpu(protocol):
    problem = bench.make_problem(1, 4, 300, 64, causal=True)
    results = bench.run([problem], settings=Settings(rounds=2, round_ms=0.5, warmup_ms=1.0, protocols=(protocol,)))
    assert not results.failed, [(row.tag, row.message) for row in results.failed]
    assert sum(row.kind == "kernel" for row in results) > 2


def test_plain_pytorch_is_timed_although_it_fails_the_rule_that_is_made_of_it():
    """Its time is what others are compared with; a wrong peer of another name has none, and neither is the best."""
    from flashlane.bench.measure.peers import Peer

    def wrong(problem, inputs):
        out = torch.ones_like(inputs.q)
        return lambda: out

    peers = (Peer("(unfused)", "plain", wrong), Peer("(other)", "wrong too", wrong))
    problem = bench.make_problem(1, 1, 16, 16, torch.float32)
    selection = bench.Selection(tags=("reference",), peers=peers)
    settings = bench.Settings(3, 0.1, 0.1, 1, 1)
    rows = {row.tag: row for row in bench.run([problem], device="cpu", selection=selection, settings=settings)}
    assert rows["(unfused)"].status == rows["(other)"].status == "FAIL"
    assert rows["(unfused)"].timing and not rows["(other)"].timing and rows["reference"].speedup is None


def test_a_problem_that_takes_minutes_on_a_cpu_says_so_before_it_runs(monkeypatch):
    from flashlane.bench.measure import expected

    monkeypatch.setattr(expected, "cpu_rate", lambda: 1e11)
    small = bench.make_problem(1, 1, 4096, 64)
    assert expected.warning([small], "forward", 5) == ""
    large = bench.make_problem(1, 1, 1_000_000, 64)
    assert bench.flops(large) == 2.56e14
    assert expected.warning([large], "forward", 1) == " · at least 2 h 51 min on this CPU"
    assert expected.warning([bench.make_problem(1, 1, 100_000, 64)], "forward", 2) == " · at least 3 min on this CPU"
    begun = []

    class Reporter(Silent):
        def begin(self, title, steps):
            begun.append(title)
            raise KeyboardInterrupt

    monkeypatch.setattr(expected, "cpu_rate", lambda: 1e3)
    monkeypatch.setattr(expected, "WORTH_SAYING", 1e-3)
    problem = bench.make_problem(1, 1, 64, 32, torch.float32)
    bench.run([problem], device="cpu", selection=bench.Selection(("tiled",), peers=()), reporter=Reporter(),
              keep_partial=True)  # fmt: skip
    assert len(begun) == 1 and re.fullmatch(r"B1 H1 N64 D32 f32 · at least \d+ min on this CPU", begun[0])


def test_what_a_cpu_does_in_a_second_is_plausible():
    from flashlane.bench.measure import expected

    assert 1e7 < expected.cpu_rate() < 1e14
