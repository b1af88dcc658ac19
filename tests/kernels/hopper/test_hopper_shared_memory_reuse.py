"""No warp releases shared memory that it is still reading: in the machine code of each kind of kernel, by repetition.

The forward did so with Q in registers: one launch in 2000 of short causal problems had wrong rows (notebook 0015).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from disassembly import disassembled
from sass_hazards import arrivals_before_loads

from flashlane import jit
from flashlane.bench import make_problem, random_inputs
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward.kernel import config_of, hopper_backward

FORWARD = registry.get("hopper(wgmma+tma)")
DECODE = registry.get("decode(split-kv)")


def problem(head_dim: int, seqlen: int, **more: object) -> AttentionProblem:
    return make_problem(2, 8, seqlen, head_dim, torch.bfloat16, causal=True, arch=ARCH, **more)


def forward_sources() -> Iterator[tuple[str, KernelSource]]:
    for head_dim, seqlen in ((64, 300), (128, 300), (192, 700)):
        configs = FORWARD.candidates(problem(head_dim, seqlen))
        config = next(config for config in configs if config.q_in_registers)
        yield f"forward D{head_dim}", config.source()
    cluster = next(c for c in FORWARD.candidates(problem(128, 4096)) if c.cluster > 1)
    yield "forward in clusters", cluster.source()


def backward_sources() -> Iterator[tuple[str, KernelSource]]:
    for head_dim, more in ((64, {}), (128, {}), (192, {}), (256, {"deterministic": True})):
        asked = replace(problem(head_dim, 1024, **more), needs_grad=True)
        for source in config_of(asked).gradient_sources():
            yield f"backward D{head_dim} {source.name.split('/')[-2]}", source


def decode_sources() -> Iterator[tuple[str, KernelSource]]:
    asked = make_problem(4, 32, 1, 128, torch.bfloat16, kv_heads=8, seqlen_k=4096, arch=ARCH)
    yield "decode", DECODE.kernel_source(DECODE.config(asked))


SOURCES = dict([*forward_sources(), *backward_sources(), *decode_sources()])


@pytest.mark.parametrize("name", SOURCES)
def test_a_warp_has_read_what_it_releases(name: str) -> None:
    text = disassembled(jit.compile(SOURCES[name], ARCH).cubin, encodings=True)
    assert "SYNCS.ARRIVE" in text or name == "decode"
    assert arrivals_before_loads(text) == []


def test_an_arrival_that_overtakes_a_load_is_found() -> None:
    def line(address: str, words: str, sets: int, waits: int) -> str:
        control = (sets << 5 | waits << 11) << 41
        return f"        /*{address}*/  {words} ; /* 0x0000000000000000 */\n   /* 0x{control:016x} */\n"

    load, arrive = line("0010", "LDSM.16.M88.4 R8, [R2]", 3, 0), "@!P2 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6], RZ"
    waiting = line("0020", "LOP3.LUT R1, R8, R9, RZ, 0xfc, !PT", 7, 1 << 3)
    assert len(arrivals_before_loads(load + line("0030", arrive, 7, 0))) == 1
    assert arrivals_before_loads(load + waiting + line("0030", arrive, 7, 0)) == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "head_dim"),
    [(8, 20, 300, 128), (2, 39, 743, 128), (2, 17, 764, 192), (4, 24, 200, 64)],
)
def test_short_causal_forwards_have_the_same_bits_a_thousand_times(
    batch: int, heads: int, seqlen: int, head_dim: int
) -> None:
    device = torch.device("cuda")
    problem = make_problem(batch, heads, seqlen, head_dim, torch.bfloat16, causal=True, arch=ARCH)
    if FORWARD.supports(problem) is not None or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    inputs = random_inputs(problem, device, 0)
    for config in [c for c in FORWARD.candidates(problem) if c.q_in_registers][:2]:
        # Sections make long tiles follow short ones, whose stores the loads of the next Q wait behind.
        config = replace(config, heads_per_section=8)
        out = torch.full_like(inputs.q, torch.nan)
        lse = torch.empty(batch, heads, seqlen, device=device)
        FORWARD.run(config, problem, inputs, out, lse)
        first, wrong = out.clone(), torch.zeros((), device=device)
        for _ in range(1000):
            out.fill_(torch.nan)
            FORWARD.run(config, problem, inputs, out, lse)
            wrong += (out != first).any()
        assert wrong.item() == 0, config.describe()


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, False), (128, False), (256, False), (256, True)])
def test_short_backwards_have_the_same_bits_many_times(head_dim: int, deterministic: bool) -> None:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    problem = make_problem(
        8, 20, 300, head_dim, torch.bfloat16, causal=True, deterministic=deterministic, arch=ARCH
    )  # fmt: skip
    problem = replace(problem, needs_grad=True)
    inputs = random_inputs(problem, device, 0)
    out, lse = torch.empty_like(inputs.q), torch.empty(8, 20, 300, device=device)
    FORWARD.forward(problem, inputs, out, lse)
    do = torch.randn_like(out)
    first = hopper_backward(problem, inputs, out, lse, do)
    wrong = torch.zeros((), device=device)
    for _ in range(600):
        again = hopper_backward(problem, inputs, out, lse, do)
        wrong += (again.k != first.k).any() | (again.v != first.v).any()
        wrong += (again.q.float() - first.q.float()).abs().max() > 0.02 * first.q.float().abs().max()
    assert wrong.item() == 0
