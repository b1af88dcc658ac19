"""The generated header: compiled by NVRTC, and its functions' values on the host and on a GPU against torch in f64."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from support import program_kernel
from support.circular import ANGLES, angles, check_circular
from support.flex_oracle import mapped
from support.programs import SIZES, Drawn, by_torch, draw

from flashlane import jit
from flashlane.flex.bind import bind
from flashlane.flex.evaluate import evaluate
from flashlane.flex.program import Arguments, Program, captured

DRAWN = int(os.environ.get("FLASHLANE_DRAWN_PROGRAMS", "60"))
"""Drawn programs of a test on a GPU."""
TOGETHER = 8
"""Of one kernel."""


def drawn_pair(seed: int, device: str = "cpu") -> tuple[Drawn, Drawn, Program, Arguments]:
    """A drawn score and a drawn mask over f32 tensors, and their program."""
    score, mask = (draw(seed, kind, device, torch.float32) for kind in ("score_mod", "mask_mod"))
    program, arguments = bind(score.function, mask.function, score.captured["slope"].device)
    return score, mask, program, arguments


def expected(score: Drawn, mask: Drawn, seed: int, scores: torch.Tensor) -> program_kernel.Outputs:
    """The same by torch, in f64 on the CPU, of tensors with the same f32 values."""
    wide = scores.detach().double().cpu().requires_grad_()
    functions = by_torch(seed, score, mask)
    values = mapped(functions[0], wide, SIZES)
    slope = torch.zeros_like(wide)
    if values.requires_grad:
        slope = torch.autograd.grad(values.sum(), wide, allow_unused=True)[0]
        slope = torch.zeros_like(wide) if slope is None else slope
    return values.detach().double(), slope, mapped(functions[1], None, SIZES)


def same(
    outputs: program_kernel.Outputs, expected_outputs: program_kernel.Outputs, score: Drawn, mask: Drawn, rtol: float
) -> None:
    for what, a, b in zip(("score", "derivative"), outputs, expected_outputs, strict=False):
        size = b.abs().clamp(max=1e30).amax().item()
        # A comparison of scores, or a kink, lies elsewhere in f32: at few pairs.
        wrong = ((a.cpu().double() - b).abs() > rtol * (1 + size)) & b.isfinite()
        assert wrong.double().mean() < 2e-3, f"{what}: {int(wrong.sum())} of {wrong.numel()} differ\n{score}"
    assert torch.equal(outputs[2].cpu(), expected_outputs[2]), mask


@pytest.mark.skipif(program_kernel.COMPILER is None, reason="no C++ compiler")
def test_drawn_programs_as_cpp_on_the_host(tmp_path: Path) -> None:
    programs, drawn = {}, {}
    for seed in range(24):
        score, mask, program, arguments = drawn_pair(seed)
        scores = torch.randn(SIZES, generator=torch.Generator().manual_seed(seed))
        programs[str(seed)], drawn[str(seed)] = (program, arguments, scores), (score, mask)
    for name, outputs in program_kernel.on_host(programs, tmp_path).items():
        score, mask = drawn[name]
        same(outputs, expected(score, mask, int(name), programs[name][2]), score, mask, 2e-5)


@pytest.mark.skipif(program_kernel.COMPILER is None, reason="no C++ compiler")
def test_floor_division_and_remainder_on_the_host(tmp_path: Path) -> None:
    divisors = torch.tensor([3, -3, 7, -1], dtype=torch.int32)
    fractions = torch.tensor([0.75, -0.75, 2.5, -3.0])

    def score_mod(score, b, h, q, kv):
        i, x = q - kv, (q - kv) * 0.25
        whole = (i // divisors[h]) * 100 + i % divisors[h] + torch.fmod(i, divisors[h]) * 0.125
        return whole + (x // fractions[h]) * 1000 + (x % fractions[h]) * 0.5 + (q // 5) * 7 + q % 5

    program, arguments = bind(score_mod, None, torch.device("cpu"))
    scores = torch.zeros(1, 4, 13, 17)
    found = program_kernel.on_host({"x": (program, arguments, scores)}, tmp_path)["x"]
    assert torch.equal(found[0], mapped(score_mod, scores, tuple(scores.shape)))


INTEGERS = {
    "products that wrap": lambda q, kv: (q * 1103515245 + 12345) % 61 + (q * 69069 + kv * 1664525) // (1 << 20),
    "sums that wrap": lambda q, kv: (q + (2**31 - 9)) // 3 % 1000 + ((-(2**31) + 5) - q) % 7,
    "short types": lambda q, kv: q.to(torch.int8) // 7 + kv.to(torch.uint8) % 5 + (q.to(torch.uint8) << 3),
    "shifts": lambda q, kv: ((q - kv) >> (kv % 5)) + ((q - kv) << (kv % 5)) + (q >> 3) + (kv << 2),
    "no such place": lambda q, kv: ((q - kv) >> (kv - 3)) + ((q & 3) << (kv * 3 - 3)),
    "in 64 bits": lambda q, kv: ((q.long() << 35) + (kv.long() << (kv + 30))) >> 33,
    "bits": lambda q, kv: ((q - kv) ^ (q | 5)) + ((q - kv) & (kv - 9)) + (~q | kv),
    "divided": lambda q, kv: torch.fmod(q - kv, 4 - kv * 2 + 1) + torch.div(q - kv, 5, rounding_mode="trunc"),
}


@pytest.mark.skipif(program_kernel.COMPILER is None, reason="no C++ compiler")
def test_integers_are_torchs_on_the_host(tmp_path: Path) -> None:
    """Of results that wrap around, short types, and shifts by any number of places; values below 2^24, exact in f32."""
    scores, programs = torch.zeros(1, 1, 300, 41), {}
    for name, function in INTEGERS.items():

        def score_mod(score, b, h, q, kv, function=function):
            return score + (function(q, kv) & 0xFFFF)

        programs[name] = score_mod
    built = {name: (*bind(f, None, torch.device("cpu")), scores) for name, f in programs.items()}
    found = program_kernel.on_host(built, tmp_path)
    for name, function in programs.items():
        assert torch.equal(found[name][0], mapped(function, scores, tuple(scores.shape))), name
    jit.compile(program_kernel.source(*(program for program, *_ in built.values())), "sm_90a")


DISTANCES = {
    "q − kv": lambda s, b, h, q, kv: s - (q - kv),
    "linear": lambda s, b, h, q, kv: s + (kv - q) * 0.01,
    "a slope of the head": lambda s, b, h, q, kv: s * 2 - (q - kv) * SLOPES[h],
    "negated": lambda s, b, h, q, kv: s + -(kv - q) * torch.exp2(-(h + 1.0)),
    "its size": lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv).abs(),
    "its size, negated": lambda s, b, h, q, kv: s + -(kv - q).abs() * 0.3,
    "a factor of the score": lambda s, b, h, q, kv: s * (q - kv),
    "a factor of the row": lambda s, b, h, q, kv: s + (q - kv) * (q * 0.5),
    "its square": lambda s, b, h, q, kv: s + (q - kv) * (q - kv) * 0.01,
    "compared": lambda s, b, h, q, kv: torch.where(q - kv > 3, s, s - 1.5),
    "other differences": lambda s, b, h, q, kv: s + (q - h) * 0.5 + (h - kv) * 0.25 + (q - q) * 0.5,
}
SLOPES = torch.tensor([0.5, -0.25, 3.0, 1.0])


@pytest.mark.skipif(program_kernel.COMPILER is None, reason="no C++ compiler")
def test_distances_in_two_parts_on_the_host(tmp_path: Path) -> None:
    """The caller gives a distance as a first one and what is added to it."""
    scores = torch.randn(2, 4, 40, 50, generator=torch.Generator().manual_seed(0))
    programs = {name: bind(function, None, torch.device("cpu")) for name, function in DISTANCES.items()}
    assert "distance.times" in programs["linear"][0].header()
    assert "distance" not in body_of(programs["compared"][0]) + body_of(programs["other differences"][0])
    found = program_kernel.on_host({name: (*pair, scores) for name, pair in programs.items()}, tmp_path)
    for name, function in DISTANCES.items():
        wanted = mapped(function, scores.double(), tuple(scores.shape))
        torch.testing.assert_close(found[name][0].double(), wanted.double(), rtol=1e-6, atol=1e-5, msg=name)


LINEAR = {"q − kv": (1, torch.ones(4)), "linear": (1, torch.full((4,), 0.01)), "a slope of the head": (2, SLOPES)}
LINEAR["negated"] = 1, -torch.exp2(-(torch.arange(4) + 1.0))
"""Of DISTANCES, with the gain and the slope of each head."""


def test_linear_scores_are_found_with_their_gain_and_slope() -> None:
    for name, function in DISTANCES.items():
        program, arguments = bind(function, None, torch.device("cpu"))
        linear = program.linear_score
        assert (linear is not None) == (name in LINEAR), name
        assert f"IS_LINEAR = {'true' if linear else 'false'}" in program.header(by_distance=True)
        assert "IS_LINEAR = false" in program.header()
        if linear is None:
            continue
        gain, slope = LINEAR[name]
        heads = {"h": torch.arange(4, dtype=torch.int32)}
        (found,) = evaluate([linear.slope], heads, arguments.tensors, arguments.integers)
        assert linear.gain == gain
        torch.testing.assert_close(found.expand(4), slope, msg=name)


def part_of(program: Program, name: str) -> str:
    """The statements of a function of the header, with its name."""
    return program.header().split(f" {name}(const ProgramParams")[1].split("static __device__")[0]


def body_of(program: Program) -> str:
    """The statements of the score."""
    return part_of(program, "score").split("{", 1)[1]


@pytest.mark.skipif(program_kernel.COMPILER is None, reason="no C++ compiler")
def test_circular_functions_of_all_numbers_on_the_host(tmp_path: Path) -> None:
    """Their errors are within CUDA's bounds, also behind the range reduction of large numbers."""
    x = angles()
    programs = {name: (*bind(function, None, torch.device("cpu")), x) for name, (function, _) in ANGLES.items()}
    found = program_kernel.on_host(programs, tmp_path)
    for name in ANGLES:
        check_circular(name, x, found[name])
    endless = torch.tensor([torch.inf, -torch.inf, torch.nan]).view(1, 1, 1, 3)
    found = program_kernel.on_host({name: (*given[:2], endless) for name, given in programs.items()}, tmp_path)
    assert all(outputs[0].isnan().all() for outputs in found.values())


def test_a_sine_and_its_derivative_share_a_range_reduction() -> None:
    program, _ = bind(lambda s, b, h, q, kv: s * s.sin() + s.cos(), None, torch.device("cpu"))
    functions = program.header().split("static __device__")
    assert [text.count("angle_of(") for text in functions if "sin_of(" in text] == [1, 1]


def test_what_the_pairs_of_a_head_share_is_computed_for_the_head() -> None:
    table = torch.randn(2, 4, 8)

    def score_mod(score, b, h, q, kv):
        return score * (table[b, h].exp() * score).tanh().sum() + table[0, h, kv % 8] * table[b, 1, 0].sin()

    program, _ = bind(score_mod, None, torch.device("cpu"))
    assert part_of(program, "head").count("program::read") == 9
    assert part_of(program, "score").count("program::read") == 1, "that of kv"
    single, _ = bind(lambda s, b, h, q, kv: s * table[b, h, 0].exp() + kv, None, torch.device("cpu"))
    assert "program::read" in part_of(single, "score") and "value0" not in single.header()


@pytest.mark.parametrize("seed", range(6))
def test_drawn_programs_compile_without_spills(seed: int) -> None:
    *_, program, _ = drawn_pair(100 + seed)
    report = jit.compile(program_kernel.source(program), "sm_90a").report
    assert report.spill_stores == 0


def test_every_type_of_captured_tensor_compiles() -> None:
    tensors = [torch.ones(4, 5, dtype=getattr(torch, name)) for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")]  # fmt: skip

    def score_mod(score, b, h, q, kv):
        return score + sum(t[h, kv] for t in tensors)

    program, _ = bind(score_mod, None, torch.device("cpu"))
    assert len(program.captured) == 10
    jit.compile(program_kernel.source(program), "sm_90a")
    jit.compile(program_kernel.source(program), "sm_80")


def test_erfc_relu_and_clamps_to_tensors_compile() -> None:
    table = torch.randn(4, dtype=torch.float32)

    def score_mod(score, b, h, q, kv):
        return torch.erfc(score) + torch.relu(score) + torch.clamp(score, table[h], table[kv]) + (table[q] > 2**40)

    program, _ = bind(score_mod, lambda b, h, q, kv: (q - kv < 2**31) & (q > kv.long() * 2**31), torch.device("cpu"))
    text = program.header()
    assert "erfcf(" in text and "<= static_cast<float>(0.0);" in text and text.count("program::isnan") == 3
    assert "4294967295u" not in text, "a number that does not fit"
    jit.compile(program_kernel.source(program), "sm_90a")


def test_the_python_mirror_of_the_parameters_has_their_offsets() -> None:
    tensors = tuple(torch.ones(s) for s in ((3,), (2, 3, 4), ()))
    program = Program(None, None, captured(tensors), 5)
    params = program.params(Arguments(tensors, (1, 2, 3, 4, 5)))
    checks = [f"static_assert(sizeof(ProgramParams) == {ctypes.sizeof(params)});"]
    for field, *_ in params._fields_:
        checks.append(f"static_assert(offsetof(ProgramParams, {field}) == {getattr(type(params), field).offset});")
    text = '#include "offsetof.cuh"\n#include "program.cuh"\n' + "\n".join(checks)
    text += '\nextern "C" __global__ void entry() {}\n'
    jit.compile(jit.KernelSource("tests/t.cu", text, "entry", headers=(("program.cuh", program.header()),)), "sm_90a")
    assert params.size[1][2] == 4 and params.stride[1][0] == 12 and params.integer[4] == 5


def test_wrong_arguments_are_named() -> None:
    program = Program(None, None, captured((torch.ones(3),)), 1)
    with pytest.raises(ValueError, match=r"captured0 is torch\.float16 of 1 dimensions; the program reads f32 of 1"):
        program.params(Arguments((torch.ones(3).half(),), (1,)))
    with pytest.raises(ValueError, match="arguments has 0 tensors and 1 integers; the program takes 1 and 1"):
        program.params(Arguments((), (1,)))
    with pytest.raises(ValueError, match=r"captured0 has shape \(0,\)"):
        program.params(Arguments((torch.ones(0),), (1,)))


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, DRAWN, TOGETHER))
def test_drawn_programs_on_a_gpu(first: int) -> None:
    drawn, programs = [], []
    for seed in range(first, min(first + TOGETHER, DRAWN)):
        score, mask, program, arguments = drawn_pair(seed, "cuda")
        scores = torch.randn(SIZES, generator=torch.Generator().manual_seed(seed)).cuda()
        drawn.append((seed, score, mask, scores))
        programs.append((program, arguments, scores))
    for (seed, score, mask, scores), found in zip(drawn, program_kernel.on_gpu(*programs), strict=True):
        same(found, expected(score, mask, seed, scores), score, mask, 1e-4)
