"""The backward's tuner on the CPU: fake kernels of both directions, a fake clock, a fake GPU's name; real files."""

from __future__ import annotations

from dataclasses import dataclass, replace

import bench_fakes as fakes
import pytest
from tuner_fakes import ARCH, CPU, DEVICE, SETTINGS

from flashlane import bench, jit
from flashlane.core import registry, tuned
from flashlane.core.registry import BackwardKernel, CompiledKernel, DeviceSource, Resources
from flashlane.reference.tiled import tiled_backward
from flashlane.tuning import search_backward as tuner
from flashlane.tuning import stored

SOURCE = "kernels/hopper/backward/postprocess.cu"
pytestmark = pytest.mark.usefixtures("gpu")


@dataclass(frozen=True)
class FakeConfig:
    rows: int
    dtype: str = "f16"


class FakeBackward(BackwardKernel, CompiledKernel):
    """Computes the formula; ``times`` says what each number of rows costs, ``wrong`` which numbers spoil dK."""

    summary = source = "none"

    def __init__(self, tag, times, wrong=(), broken=(), raising=(), priority=99):
        self.tag, self.times, self.priority = tag, times, priority
        self.wrong, self.broken, self.raising = wrong, broken, raising
        self.ran = []

    def supports(self, problem, forward=None):
        return None if problem.head_dim <= 64 else f"head_dim is {problem.head_dim}; it takes up to 64"

    def config(self, problem):
        fields = tuned.lookup_backward(self, problem)
        return replace(FakeConfig(next(iter(self.times))), **fields)

    def candidates(self, problem):
        return [FakeConfig(rows) for rows in self.times]

    def tuned_fields(self, config):
        return {"rows": config.rows}

    def source_of(self, config):
        return SOURCE

    def device_sources(self, config, arch):
        text = "this is not C++" if config.rows in self.broken else 'extern "C" __global__ void fake() {}'
        source = jit.KernelSource(SOURCE, text, "fake", (("ROWS", config.rows),))
        return (DeviceSource(source, Resources(32, 0)),)

    def shipped(self):
        yield FakeConfig(1), (ARCH,)

    def run(self, problem, inputs, out, lse, do, dlse=None, *, bias_grad=True, forward=None, config=None):
        self.ran.append(config.rows)
        if config.rows in self.raising:
            raise RuntimeError("the launch failed")
        found = tiled_backward(problem, inputs, out, lse, do, dlse)
        if config.rows in self.wrong:
            found.k[0, -1, 0, 0] += 1.0
        return found


class PlainBackward(BackwardKernel):
    """One that is not compiled by us and has no configurations to choose from."""

    tag, summary, source, times = "plain", "none", "none", {None: 0.5}

    def supports(self, problem, forward=None):
        return None

    def run(self, *call, bias_grad=True, forward=None, config=None):
        return tiled_backward(*call)


def problem(n=64, d=16, **sizes):
    return bench.make_problem(1, 2, n, d, arch=ARCH, **sizes)


def run(kernels, *problems):
    with registry.table_of(fakes.FakeKernel("forward")), registry.backward_table_of(*kernels):
        return tuner.tune_backward_kernels(problems or [problem()], kernels, CPU, settings=SETTINGS)


def test_the_fastest_right_configuration_is_stored_and_used():
    kernel = FakeBackward("a", {64: 2.0, 128: 1.0, 32: 3.0})
    assert kernel.config(problem()) == FakeConfig(64)
    found = run([kernel])
    assert [(t.config, t.ms, t.chosen, t.heuristic, t.auto) for t in found.trials] == [
        ("rows=64 dtype=f16", 2.0, False, True, True),
        ("rows=128 dtype=f16", 1.0, True, False, False),
        ("rows=32 dtype=f16", 3.0, False, False, False),
    ]
    assert kernel.ran == [64, 128, 32], "each candidate is checked; the fake clock runs none"
    trained = replace(problem(), needs_grad=True)
    assert tuned.lookup_backward(kernel, trained) == {"rows": 128} and kernel.config(trained) == FakeConfig(128)
    assert kernel.config(problem(50)) == FakeConfig(128), "64 stands for 33 to 64"
    for other in (problem(65), problem(causal=True), replace(problem(), deterministic=True)):
        assert kernel.config(other) == FakeConfig(64)
    with tuned.heuristics_only():
        assert kernel.config(problem()) == FakeConfig(64)
    (entry,) = stored.load(stored.path_of(DEVICE, ARCH)).values()
    assert (entry.tag, entry.source, entry.ms) == ("a", SOURCE, 1.0)
    again = run([kernel])
    assert [(t.heuristic, t.auto) for t in again.trials] == [(True, False), (False, True), (False, False)]


def test_wrong_broken_and_raising_candidates_are_never_chosen():
    kernel = FakeBackward("a", {64: 2.0, 128: 1.0, 32: 0.5, 16: 0.1}, wrong=(128,), broken=(32,), raising=(16,))
    found = run([kernel])
    assert [t.status for t in found.trials] == ["ok", "FAIL", "error", "error"]
    assert "dk" in found.trials[1].message and "CompileError" in found.trials[2].message
    assert "the launch failed" in found.trials[3].message
    assert [t.timing is None for t in found.trials] == [False, True, True, True]
    assert tuned.lookup_backward(kernel, problem()) == {"rows": 64}


def test_each_tag_keeps_its_own_and_one_without_configurations_none():
    first, second = FakeBackward("a", {64: 2.0}), FakeBackward("b", {64: 3.0, 32: 1.0}, priority=1)
    plain = PlainBackward()
    found = run([first, second, plain])
    assert [(t.tag, t.chosen) for t in found.trials] == [("a", True), ("b", False), ("b", True), ("plain", True)]
    assert tuned.lookup_backward(first, problem()) == {"rows": 64}
    assert tuned.lookup_backward(second, problem()) == {"rows": 32}
    assert tuned.lookup_backward(plain, problem()) == {} and len(found.stored) == 2
    assert tuned.best_tag(problem()) is None, "the forward's choice is not the backward's"


def test_what_cannot_run_is_skipped_with_its_reason():
    other = FakeBackward("b", {64: 1.0})
    other.supports = lambda problem, forward=None: None
    found = run([FakeBackward("a", {64: 1.0}, priority=100), other], problem(d=128))
    assert [(tag, reason) for _, tag, reason in found.skipped] == [("a", "head_dim is 128; it takes up to 64")]
    assert [t.tag for t in found.trials] == ["b"]


@pytest.mark.parametrize("changes", [{"window_left": 8}, {"deterministic": True}], ids=str)
def test_what_is_not_tuned_is_refused_before_anything_runs(changes):
    kernel = FakeBackward("a", {64: 1.0})
    with pytest.raises(ValueError, match="only dense ones"):
        run([kernel], problem(), replace(problem(), **changes))
    assert not kernel.ran
