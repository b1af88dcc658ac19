"""The compile report: every kernel has a line, compiled or with its reason; failures are lines, not crashes."""

import dataclasses
import io

import pytest
from disassembly import absent
from rich.console import Console

from flashlane import bench, jit
from flashlane.bench.present.table import print_compiled
from flashlane.core import registry
from flashlane.core.registry import DeviceKernel, Resources
from flashlane.inspect import compile_report
from flashlane.inspect.compile_report import Usage, is_wrong, report_problem, usage_of

BODY = 'extern "C" __global__ void fake(float* out) { out[threadIdx.x] = cfg::SCALE * out[0]; }'


class FakeDeviceKernel(DeviceKernel):
    family, summary, source = "fake", "writes", "none"

    def __init__(self, body=BODY, tag="fake(device)"):
        self.tag = tag
        self.body = '#include "config.cuh"\n' + body

    def supports(self, problem):
        return None if problem.head_dim <= 64 else f"head_dim is {problem.head_dim}; it takes up to 64"

    def forward(self, problem, inputs, out, lse):
        raise AssertionError("never run without a GPU")

    def config(self, problem):
        return problem.head_dim

    def kernel_source(self, config):
        return jit.KernelSource("fake.cu", self.body, "fake", (("SCALE", config),))

    def resources(self, config):
        return Resources(threads=128, shared_memory=1024 * config)

    def shipped(self):
        yield 32, ("sm_80", "sm_90a")
        yield 64, ("sm_90a",)


def test_report_reads_the_compiler():
    usage = usage_of(FakeDeviceKernel(), 32, "sm_90a")
    assert usage.registers > 0 and usage.spills == 0 and usage.shared_bytes == 32 * 1024 and usage.threads == 128
    assert usage.blocks == jit.occupancy("sm_90a", 128, usage.registers, usage.shared_bytes).ctas > 0
    assert usage.seconds >= 0 and not usage.error and not is_wrong(usage)


def test_reasons_and_failures_are_lines():
    kernels = [FakeDeviceKernel(), FakeDeviceKernel("not C++", "fake(broken)")]
    small, large = bench.make_problem(1, 1, 64, 64), bench.make_problem(1, 1, 64, 128)
    fine, broken = report_problem(small, "sm_80", kernels)
    assert fine.registers and "CompileError: fake.cu does not compile" in broken.error and is_wrong(broken)
    assert {u.reason for u in report_problem(large, "sm_80", kernels)} == {"head_dim is 128; it takes up to 64"}


def test_shipped_is_every_configuration_on_its_architectures():
    usages = compile_report.report_shipped(None, [FakeDeviceKernel()])
    assert [(u.config, u.arch) for u in usages] == [("32", "sm_80"), ("32", "sm_90a"), ("64", "sm_90a")]
    assert len(compile_report.report_shipped(["sm_80"], [FakeDeviceKernel()])) == 1


def test_after_the_deadline_kernels_are_left_out_and_said_so():
    (usage,) = report_problem(bench.make_problem(1, 1, 64, 64), "sm_90a", [FakeDeviceKernel()], deadline=0.0)
    assert usage.registers is None and usage.reason == compile_report.LATE and usage.config == "64"


def test_strictness():
    spilled, warned = Usage("t", "sm_80", spill_stores=4, spill_loads=0), Usage("t", "sm_80", warnings=("w",))
    assert is_wrong(spilled) and is_wrong(warned) and not is_wrong(spilled, strict=False)


def test_declared_spills_are_accepted_and_no_more():
    note = ("ptxas warning : Registers are spilled to local memory",)
    declared = Usage("t", "sm_80", spill_stores=4, spill_loads=8, spills_allowed=12, warnings=note)
    assert not declared.spilled and not is_wrong(declared) and declared.spills == 12
    more = dataclasses.replace(declared, spill_loads=9)
    assert more.spilled and is_wrong(more) and more.unexpected_warnings == note
    assert is_wrong(dataclasses.replace(declared, warnings=(*note, "a C7510 note")))


def test_what_a_kernel_declares_is_asked_for_its_configuration_and_architecture():
    class Spilling(FakeDeviceKernel):
        def spills_allowed(self, config, arch):
            return config if arch == "sm_80" else 0

    assert [usage_of(Spilling(), 32, arch).spills_allowed for arch in ("sm_80", "sm_90a")] == [32, 0]


def test_instruction_counts_are_kept(monkeypatch):
    first = usage_of(FakeDeviceKernel(), 48, "sm_90a").instructions
    if first is None:
        absent()
    monkeypatch.setattr(jit, "instruction_counts", lambda cubin: pytest.fail("disassembled again"))
    assert usage_of(FakeDeviceKernel(), 48, "sm_90a").instructions == first and sum(first.values()) > 2


TAGS = ("fa1(f32)", "mma(naive)", "mma(split-q+acc-f32+swizzle-qkv+stage2)")


@pytest.fixture(scope="module")
def usages():
    with registry.table_of(*map(registry.get, ("reference", *TAGS))):
        return report_problem(bench.make_problem(1, 2, 128, 64), "sm_90a")


def test_every_listed_kernel_has_a_line(usages):
    """What each kernel of the whole table compiles to is the matter of test_kernels_compile."""
    assert [u.tag for u in usages] == list(TAGS)
    assert usages[0].reason == "dtype is f16; it takes f32"
    for usage in usages[1:]:
        assert usage.registers and not usage.error, (usage.tag, usage.error)


def test_unlisted_kernels_are_left_out_of_the_report():
    hidden = FakeDeviceKernel(tag="fake(hidden)")
    hidden.listed = False
    with registry.table_of(FakeDeviceKernel(), hidden):
        (usage,) = report_problem(bench.make_problem(1, 1, 64, 64), "sm_80")
    assert usage.tag == "fake(device)"


def test_what_the_compiler_warned_of_and_why_kernels_are_missing_is_printed():
    text = io.StringIO()
    kinds = {
        "warned": {"warnings": ("a C7510 note",)},
        "broken": {"error": "no instruction"},
        "other": {"reason": "f32"},
    }
    print_compiled([Usage(tag, "sm_80", **fields) for tag, fields in kinds.items()], Console(file=text, width=100))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    for word, found in (("compiler", "a C7510 note"), ("error", "no instruction"), ("not compiled", "f32")):
        assert any(word in line and found in line for line in lines), (word, lines)


@pytest.mark.parametrize("width", [120, 200])
def test_no_line_is_wider_than_the_terminal(usages, width):
    text = io.StringIO()
    print_compiled(usages, Console(file=text, width=width))
    assert max(map(len, text.getvalue().splitlines())) <= width
    flat = text.getvalue().replace("\n  +", "+")
    assert "compiled for sm_90a" in flat and "…" not in flat
