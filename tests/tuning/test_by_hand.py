"""Tile parameters set by hand: a kernel that is another in these fields only."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import bench_fakes as fakes
import pytest
import torch
from typer.testing import CliRunner

import flashlane
from flashlane import bench
from flashlane.cli.main import app
from flashlane.cli.options import check_configured
from flashlane.core import registry
from flashlane.core.registry import TunableKernel
from flashlane.tuning.by_hand import add_configured, configured, parse_config

MMA = "mma(split-q+acc-f32+stage2)"


@dataclass(frozen=True)
class Config:
    rows: int = 64
    swizzled: bool = False
    name: str = "a"

    @property
    def shared_memory(self) -> int:
        return 1024 * self.rows


class Tunable(fakes.FakeKernel, TunableKernel):
    """Says with which configuration it ran."""

    def config(self, problem):
        return Config()

    def source_of(self, config):
        return "none"

    def run(self, config, problem, inputs, out, lse):
        self.ran.append(config)
        fakes.FakeKernel.forward(self, problem, inputs, out, lse)

    def forward(self, problem, inputs, out, lse):
        self.run(self.config(problem), problem, inputs, out, lse)

    def __init__(self, tag):
        super().__init__(tag)
        self.ran = []


@pytest.fixture
def kernel():
    kernel = Tunable("tunable")
    with registry.table_of(registry.get("reference"), kernel):
        yield kernel


def test_the_kernel_runs_with_the_fields_that_were_set(kernel):
    (tag,) = add_configured([kernel], ["rows=32,swizzled=1,name=b"])
    assert tag == "tunable[rows=32,swizzled=1,name=b]" and not registry.get(tag).listed
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    out = flashlane.flash_attn_func(q, k, v, kernel=tag)
    assert torch.equal(out, flashlane.flash_attn_func(q, k, v, kernel="tunable"))
    assert kernel.ran == [Config(32, True, "b"), Config()], "the kernel itself is as it was"
    assert flashlane.explain(q, k, v).chosen == "reference", "auto never takes it"
    assert add_configured([kernel], ["rows=32,swizzled=1,name=b"]) == (tag,), "a second time is no error"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows", "it may be FIELD=VALUE"),
        ("rows=1,rows=2", "each field once"),
        ("columns=3", "has 'columns', which Config does not have; it has rows=64, swizzled=False, name=a"),
        ("rows=many", "has rows=many; it may be a whole number, such as 64"),
        ("swizzled=2", "has swizzled=2; it may be 0 or 1"),
    ],
)
def test_fields_that_cannot_be(kernel, text, message):
    with pytest.raises(ValueError, match=message):
        configured(kernel, parse_config(text)).supports(bench.make_problem(1, 1, 8, 16))


def test_what_does_not_fit_an_architecture_is_a_reason(kernel):
    large = configured(kernel, {"rows": "200"})
    assert large.supports(bench.make_problem(1, 1, 8, 16, arch="sm_90a")) is None
    assert "it takes 200 KiB of shared memory; sm_80 has 163" in large.supports(
        bench.make_problem(1, 1, 8, 16, arch="sm_80")
    )


def test_bench_times_it_beside_the_kernel_itself(kernel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["bench", "--device", "cpu", "--arch", "none", "--quick", "--N", "16", "--H", "1", "--D", "16"]
    words += ["--peers", "none"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words, "--kernels", "tunable", "--config", "rows=32"])
    assert result.exit_code == 0, result.output
    assert "tunable[rows=32]" in result.stdout and {c.rows for c in kernel.ran} == {32, 64}
    for more, message in (
        (["--config", "rows=32"], "--kernels or --tags name"),
        (["--kernels", "reference", "--config", "rows=1"], "none of the kernels asked for has a configuration"),
        (["--kernels", "tunable", "--config", "size=1"], "has 'size', which Config does not have"),
        (["--kernels", "tunable", "--config", "rows=1", "--timeout", "5"], "--timeout is given with --config"),
    ):
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_a_field_is_checked_for_the_gpu_of_a_problem_and_without_one_for_that_of_reports(monkeypatch):
    seen = []
    asked = SimpleNamespace(supports=lambda problem: seen.append(problem.arch))
    monkeypatch.setattr(registry, "get", lambda tag: asked)
    problems = [bench.make_problem(1, 1, 8, 16, arch=arch) for arch in (None, "sm_80")]
    check_configured(("a", "b"), problems, "sm_90a")
    assert seen == ["sm_90a", "sm_90a", "sm_80", "sm_80"]


def test_a_compiled_kernel_is_compiled_with_it():
    kernel = registry.get(MMA)
    problem = bench.make_problem(1, 8, 1024, 64, arch="sm_90a")
    before = kernel.config(problem)
    small = configured(kernel, {"block_m": "64", "block_n": "32", "warps_q": "4"})
    assert small.supports(problem) is None and kernel.config(problem) == before
    config = small.config(problem)
    assert (config.block_m, config.block_n) == (64, 32) and small.resources(config).shared_memory < before.shared_memory
