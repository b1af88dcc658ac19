"""The Hopper kernels with programs and lists of blocks, without a GPU: what the compiler and the SASS say of them."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from disassembly import counted, disassembled
from sass_loops import families, steady_loops

from flashlane import jit
from flashlane.flex.bind import bind
from flashlane.flex.program import Program
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig
from flashlane.kernels.hopper.block_lists import UNIT
from flashlane.kernels.hopper.flex import run_backward, run_forward, supports
from flashlane.kernels.hopper.flex.masks import bits_source
from flashlane.kernels.hopper.flex.problem import problem_of

SPILLS, BACKWARD_SPILLS = 320, 32
"""Bytes, all outside the loops."""
CPU = torch.device("cpu")


def documents(b, h, q, k):
    return (DOCUMENT[q] == DOCUMENT[k]) & (q >= k)


DOCUMENT = torch.arange(256, dtype=torch.int32) // 100
SLOPES = torch.tensor([0.5, 0.25])
SCORES = {
    "none": None,
    "linear": lambda s, b, h, q, k: s + (k - q) * 0.01,
    "abs": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "tanh": lambda s, b, h, q, k: 30 * torch.tanh(s / 30),
}


def program_of(score: str, masked: bool) -> Program:
    return bind(SCORES[score], documents if masked else None, CPU, "f32")[0]


def problem(head_dim: int, deterministic: bool = False):
    q = torch.empty(1, 256, 2, head_dim, dtype=torch.bfloat16)
    return problem_of(q, q, q, 0.1, (-1, -1), deterministic)


@pytest.mark.parametrize(
    ("head_dim", "score", "block", "bits"),
    [
        (64, "none", (128, 128), True),
        (128, "none", (128, 128), True),
        (128, "none", (64, 64), False),
        (128, "tanh", (128, 128), True),
        (128, "tanh", (128, 128), False),
        (64, "linear", (128, 128), True),
        (64, "abs", (128, 128), True),
        (256, "linear", (128, 128), True),
    ],
)
def test_forward_compiles_without_spills_in_its_loop(
    head_dim: int, score: str, block: tuple[int, int], bits: bool
) -> None:
    config = run_forward.config_of(problem(head_dim), program_of(score, block != (64, 64)), block, bits)
    compiled = jit.compile(config.source(), ARCH)
    report = compiled.report
    assert not [line for line in report.warnings if "spill" not in line]
    assert config.ctas_per_sm * (config.shared_memory + 1024) <= 228 << 10
    assert report.registers * config.threads * config.ctas_per_sm <= 1 << 16
    assert sum(config.registers[:1] + config.registers[1:] * config.consumers) * 128 * config.ctas_per_sm <= 1 << 16
    text = disassembled(compiled.cubin)
    products = -(-head_dim // 16) + config.block_n // 16
    loops = [loop for loop in steady_loops(text) if sum(op.startswith("HGMMA") for op in loop) == products]
    if config.deferred_max:  # full blocks have a loop of their own, and others may spill
        assert 3 <= len(loops) <= 4
        assert not [op for op in min(loops, key=len) if op.startswith(("LDL", "STL"))]
        assert report.spills <= SPILLS
        return
    # Full and partial blocks share one loop; its branches for masks may go back to its head themselves.
    assert len(loops) == 1 or (config.program and not config.across_tiles and len({loop[0] for loop in loops}) == 1)
    if bits or block == (64, 64):  # a program that is asked needs registers for addresses
        assert not [op for op in max(loops, key=len) if op.startswith(("LDL", "STL"))]
    assert report.spills <= SPILLS


def test_a_tanh_of_small_heads_by_lists_spills_one_value_in_its_loop() -> None:
    """Four consumers leave it 96 registers at launch; they are faster than two or three, too (notebook 0020)."""
    config = run_forward.config_of(problem(64), program_of("tanh", True), (128, 128), True)
    assert (config.block_m, config.block_n) == (256, 64)
    compiled = jit.compile(config.source(), ARCH)
    assert compiled.report.spills <= 360
    text = disassembled(compiled.cubin)
    loop = next(loop for loop in steady_loops(text) if sum(op.startswith("HGMMA") for op in loop) == 8)
    assert sum(op.startswith(("LDL", "STL")) for op in loop) <= 2


@pytest.mark.parametrize(
    ("head_dim", "score", "ordered"), [(64, "none", False), (128, "none", True), (128, "tanh", False)]
)
def test_backward_compiles_without_spills(head_dim: int, score: str, ordered: bool) -> None:
    config = run_backward.config_of(problem(head_dim, ordered), program_of(score, True), (128, 128), True)
    compiled = jit.compile(config.gradient_sources()[0], ARCH)
    assert not [line for line in compiled.report.warnings if "spill" not in line]
    assert compiled.report.spills <= BACKWARD_SPILLS
    assert config.shared_memory <= jit.shared_limit(ARCH)


def test_additions_in_order_have_more_heads_a_section_by_lists() -> None:
    """Tiles wait for those of their head; without lists heads are chosen as without a program."""

    def heads(ordered: bool, block: tuple[int, int] | None, **changes: int) -> int:
        of = replace(problem(128, ordered), **changes)
        return run_backward.config_of(of, program_of("none", block is not None), block).heads_per_section

    few, many = {"batch": 1, "heads": 2, "kv_heads": 2}, {"batch": 4, "heads": 8, "kv_heads": 8}
    for length, fitting in ((4096, 8), (16384, 2), (1 << 20, 1)):
        sizes = {**many, "seqlen_q": length, "seqlen_k": length}
        assert (heads(False, (128, 128), **sizes), heads(True, (128, 128), **sizes)) == (fitting, 2 * fitting)
        assert (heads(False, None, **sizes), heads(True, None, **sizes)) == (fitting, 0)
    assert heads(True, (128, 128), **few) == 2


@pytest.mark.parametrize("head_dim", [64, 128])
def test_hidden_keys_of_a_consumer_have_a_shorter_step_and_spill_nothing(head_dim: int) -> None:
    """Lists by hand of 64 keys; with 128 keys both consumers see a block, and of a function's mask few are unlike."""

    def config_of(block: tuple[int, int], masked: bool = False) -> OneCtaConfig:
        return run_backward.config_of(problem(head_dim), program_of("none", masked), block, masked)

    config = config_of((128, 64))
    assert config.skips_hidden
    assert not config_of((64, 128)).skips_hidden and not config_of((64, 64), True).skips_hidden
    products = []
    for one in (config, config_of((64, 128))):
        compiled = jit.compile(one.gradient_sources()[0], ARCH)
        assert compiled.report.spills == 0 and not compiled.report.warnings
        text = disassembled(compiled.cubin)
        products.append(max(sum(op.startswith("HGMMA") for op in loop) for loop in steady_loops(text)))
    assert products[0] - products[1] == config.block_n // 16, "the shorter step has the products of dQ alone"


FUNCTIONS = {
    "sin": (lambda s, b, h, q, k: s.sin(), 4200),
    "tan": (lambda s, b, h, q, k: s.tan(), 4600),
    "rows, amax": (lambda s, b, h, q, k: s + (ROWS[h] + s).amax(), 5200),
}
"""Scores, and a bound of the instructions of their kernels, forward and backward: NVRTC's time grows with these."""
ROWS = torch.randn(2, 8)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scores_of_many_operations_are_short_kernels(name: str) -> None:
    """Range reductions of large angles are a function that is there once, and calls of it do not serialise products."""
    function, most = FUNCTIONS[name]
    program = bind(function, None, CPU, "f32")[0]
    of = replace(problem(128), seqlen_q=4096, seqlen_k=4096, window_right=0)
    forward = run_forward.config_of(of, program, None).source()
    backward = run_backward.config_of(of, program, None).gradient_sources()[0]
    for source in (forward, backward):
        compiled = jit.compile(source, ARCH)
        assert not [line for line in compiled.report.warnings if "spill" not in line]
        assert compiled.report.spills <= SPILLS
        counts = counted(compiled.cubin)
        assert sum(counts.values()) <= most, counts


@pytest.mark.parametrize("block", [None, (128, 128)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["sin", "tan"])
def test_a_call_in_the_softmax_leaves_the_output_that_is_being_computed(
    name: str, head_dim: int, block: tuple[int, int] | None
) -> None:
    """P·V is in flight while scores are computed: a function that saved and restored its registers would undo it."""
    program = bind(FUNCTIONS[name][0], documents if block else None, CPU, "f32")[0]
    config = run_forward.config_of(problem(head_dim), program, block, block is not None)
    text = disassembled(jit.compile(config.source(), ARCH).cubin)
    kernel, function = re.split(r"angle_of_large\w*:\n", text)
    products = re.findall(r"HGMMA\.64x(\d+)x16\S* R(\d+), R\d+,", kernel)
    assert products, "P is in registers"
    output = {register for n, first in products for register in range(int(first), int(first) + int(n) // 2)}
    results = re.findall(r"/ +(?:@!?\w+ )?([A-Z][\w.]*) (?:U?P\d, )*R(\d+),", function.split("RET")[0])
    written = {int(first) + i for op, first in results for i in range(1 + bool(re.search("64|WIDE", op)))}
    assert len(output) == max(int(n) for n, _ in products) // 2
    assert len(written) > 4 and not output & written


@pytest.mark.parametrize(("score", "longest", "spills"), [("linear", 128, SPILLS), ("abs", 112, 0), ("tanh", 112, 0)])
def test_steps_of_small_head_dims_without_lists_are_long_and_do_not_spill(
    score: str, longest: int, spills: int
) -> None:
    """In their loop: those of linear scores are longer, and what spills is between tiles."""
    program, rows = program_of(score, False), {}
    for name, changes, block in (
        ("no lists", {}, None), ("lists", {}, (128, 128)), ("deterministic", {"deterministic": True}, None)
    ):  # fmt: skip
        of = replace(problem(64), seqlen_q=4096, seqlen_k=4096, window_right=0, **changes)
        config = run_backward.config_of(of, program, block)
        rows[name] = config.block_m
        assert config.shared_memory <= jit.shared_limit(ARCH)
        if name == "no lists":
            assert config.ping_pong == ("until_issued" if longest == 128 else "off")
            compiled = jit.compile(config.gradient_sources()[0], ARCH)
            assert compiled.report.spills <= spills
            text = jit.disassemble(compiled.cubin)
            loops = [] if text is None else [loop for loop in steady_loops(text) if "MUFU.EX2" in loop]
            assert text is None or loops
            assert not [op for loop in loops for op in loop if op.startswith(("LDL", "STL"))]
    assert rows == {"no lists": longest, "lists": 64, "deterministic": 64}


@pytest.mark.parametrize(
    ("length", "window", "rows"),
    [(4096, (-1, 0), 112), (2048, (-1, -1), 112), (700, (-1, 0), 64), (8192, (500, 0), 64)],
)
def test_steps_are_as_long_as_was_fastest(length: int, window: tuple[int, int], rows: int) -> None:
    """On an H200 (notebook 0020); what reads a tensor by position spills in long steps."""
    left, right = window
    of = replace(problem(64), seqlen_q=length, seqlen_k=length, window_left=left, window_right=right)
    assert run_backward.config_of(of, program_of("tanh", False), None).block_m == rows
    table = bind(lambda s, b, h, q, k: s + DOCUMENT[q], None, CPU, "f32")[0]
    assert run_backward.config_of(of, table, None).block_m == 64


def test_masks_with_bits_share_a_kernel_and_positions_are_not_converted() -> None:
    causal = bind(None, lambda b, h, q, k: q >= k, CPU, "f32")[0]
    config = run_forward.config_of(problem(128), causal, (128, 128), True)
    assert config == run_forward.config_of(problem(128), program_of("none", True), (128, 128), True)
    assert bits_source(causal.header()) != bits_source(program_of("none", True).header())
    assert "distance.times" in program_of("linear", False).header()


STEP = 20
"""Instructions of a step that a bias takes, however many scores it has."""


@pytest.mark.parametrize(("head_dim", "score", "most"), [(128, "linear", 2.0), (64, "linear", 2.0), (128, "abs", 2.8)])
def test_a_bias_of_the_distance_takes_few_instructions(head_dim: int, score: str, most: float) -> None:
    """More of the forward's loop than without a score, for each score and for a step; distances are made once for two
    rows."""
    lengths = []
    for name in ("none", score):
        config = run_forward.config_of(problem(head_dim), program_of(name, False), None)
        compiled = jit.compile(config.source(), ARCH)
        text = disassembled(compiled.cubin)
        assert compiled.report.spills <= 16
        # What raises a deferred maximum is inside the loop, and hardly ever runs.
        loop = steady_loops(text, shortest=config.deferred_max)[-1]
        assert not [op for op in loop if op.startswith(("LDL", "STL"))]
        # Of a step that masks nothing: without a score it has a loop of its own, with one it jumps over the mask.
        lengths.append((len(steady_loops(text, shortest=True)[-1]), config.block_n / 2))
    (plain, scores), (longer, _) = lengths
    assert longer - plain <= most * scores + STEP, lengths


@pytest.mark.parametrize("score", ["linear", "abs", "tanh"])
@pytest.mark.parametrize("block", [None, (128, 128)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_body_serves_all_steps_of_a_program(score: str, block: tuple[int, int] | None, head_dim: int) -> None:
    """Its products are there once, and besides them a tile's first S and its last P·V."""
    config = run_forward.config_of(problem(head_dim), program_of(score, block is not None), block, block is not None)
    assert not config.across_tiles
    text = disassembled(jit.compile(config.source(), ARCH).cubin)
    products = -(-head_dim // 16) + config.block_n // 16
    assert len(re.findall(r"\bHGMMA\.\w+\.F32\b", text)) == 2 * products  # an empty group is one of f16
    assert run_forward.config_of(problem(head_dim), program_of("none", block is not None), block, True).across_tiles


@pytest.mark.parametrize("head_dim", [64, 128])
def test_linear_scores_take_no_maximum_where_no_mask_is(head_dim: int) -> None:
    """Their steps have one FFMA a score more than those without a score. By lists they take it."""
    config = run_forward.config_of(problem(head_dim), program_of("linear", False), None)
    assert config.deferred_max and not config.across_tiles
    loops = [
        families(steady_loops(disassembled(jit.compile(one.source(), ARCH).cubin), shortest=True)[-1])
        for one in (config, replace(config, deferred_max=False))
    ]
    deferred, eager = loops
    assert deferred["FMNMX"] == 0 and eager["FMNMX"] >= config.block_n // 2
    assert deferred["FFMA"] >= config.block_n and deferred.total() <= 0.85 * eager.total()
    by_lists = run_forward.config_of(problem(head_dim), program_of("linear", True), (128, 128), True)
    tiny = replace(problem(head_dim), scale=2.0**-30)  # the slope would not be a number in units of it
    assert not by_lists.deferred_max
    assert not run_forward.config_of(tiny, program_of("linear", False), None).deferred_max


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounded_scores_of_bf16_take_no_maximum(dtype: torch.dtype) -> None:
    """Their steps have no FMNMX of a row's scores and no shuffle; P in f16 would overflow."""
    of = replace(problem(128), dtype=dtype)
    config = run_forward.config_of(of, program_of("tanh", False), None)
    text = disassembled(jit.compile(config.source(), ARCH).cubin)
    loop = steady_loops(text)[-1]
    found = sum(op.startswith(("FMNMX", "SHFL")) for op in loop)
    assert found == 0 if dtype == torch.bfloat16 else found > config.block_n / 2


def test_tanh_is_approximate_for_bf16() -> None:
    program = program_of("tanh", False)
    for run in (run_forward, run_backward):
        for dtype, block in itertools.product((torch.bfloat16, torch.float16), (None, (128, 128))):
            config = run.config_of(replace(problem(128), dtype=dtype), program, block, block is not None)
            approximate = dtype == torch.bfloat16
            assert ("approximate_tanh(" in config.program) == approximate != ("program::tanh(" in config.program)
    assert "approximate_tanh(" not in bits_source(program.header()).headers[0][1]


def test_the_kernel_of_bits_compiles() -> None:
    assert jit.compile(bits_source(program_of("none", True).header()), ARCH).report.spills == 0


def test_refusals_name_what_was_given() -> None:
    q = torch.empty(1, 256, 2, 128, dtype=torch.bfloat16)
    wide = torch.empty(1, 256, 2, 256, dtype=torch.bfloat16, requires_grad=True)
    assert supports(q, q, q) is None and supports(wide.detach(), wide.detach(), wide.detach()) is None
    assert supports(wide, wide, wide) == "head_dim of q is 256; the backward takes up to 128"
    many = torch.empty(1, 64, 4, 64, dtype=torch.bfloat16).expand(65536, -1, -1, -1)
    assert supports(many, many, many) is None
    many.requires_grad_()
    assert supports(many, many, many) == "batch is 65536 with 4 heads; the backward takes up to 65535 of each"
    assert supports(q, q, q, arch="sm_80") == "architecture is sm_80; it takes sm_90a"
    assert re.match(r"dtypes are torch.float32, .*f16, bf16", supports(q.float(), q.float(), q.float()) or "")
    assert re.match(r"head_dim of v is 100; ", supports(q, q, q[..., :100]) or "")

    class Blocks:
        BLOCK_SIZE = (32, UNIT)
        seq_lengths = (256, 256)
        kv_num_blocks = torch.zeros(1, 1, 8, dtype=torch.int32)

    assert supports(q, q, q, Blocks()) == "the block mask has blocks of (32, 64); it takes multiples of 64"  # type: ignore[arg-type]
