"""The ceiling of mma.sync: a loop of products in registers."""

from __future__ import annotations

import pytest
import torch
from disassembly import needs_disassembler
from lesson_checks import ARCHITECTURES, loop_of, opcode_count

from flashlane import jit, lessons
from flashlane.lessons import ceiling, comparison, gemm


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_ceiling_needs_a_gpu():
    with pytest.raises(ValueError, match="no CUDA device"):
        lessons.mma_ceiling()


@needs_disassembler
@pytest.mark.parametrize("config", ceiling.CONFIGS.values(), ids=lambda c: f"{c.warps}warps")
@pytest.mark.parametrize("operands", gemm.OPERANDS, ids="-".join)
def test_the_ceiling_loop_is_products_and_a_counter(config, operands):
    for arch in ARCHITECTURES:
        compiled = jit.compile(ceiling.ceiling_source(config, *operands), arch)
        assert (compiled.report.spills, compiled.report.stack) == (0, 0)
        assert jit.occupancy(arch, config.warps * 32, compiled.report.registers, 0).ctas >= 1
    loop = loop_of(jit.compile(ceiling.ceiling_source(config, *operands), "sm_90a").cubin)
    products = 2 * config.m_tiles * config.n_tiles
    assert opcode_count(loop, "HMMA") == products
    assert len([line for line in loop if "NOP" not in line]) <= products + 6


@pytest.mark.gpu
@pytest.mark.parametrize("operands", gemm.OPERANDS, ids="-".join)
def test_the_ceiling_is_a_plausible_figure(operands):
    for warps in ceiling.CONFIGS:
        for wanted in (1e11, 4e11):
            call, flops = ceiling.ceiling_call(*operands, warps, wanted)
            assert comparison.verify_ceiling(call) is None
            assert flops == pytest.approx(wanted, rel=0.1)
    # Other processes may use the GPU meanwhile, so nothing closer is asked of a time.
    assert 1 < lessons.mma_ceiling(*operands, warps=8, milliseconds=0.5, repeats=8) < 5000
