"""The Hopper kernel on a GPU: each tile of its tables, its features, streams and graphs. Drawing them runs anywhere."""

from __future__ import annotations

import functools
import importlib.util
import math
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flashlane import jit
from flashlane.bench.measure import drawn as draws
from flashlane.bench.measure.drawn import HOPPER_FORWARD_KINDS
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs, arch_of
from flashlane.kernels.hopper.forward import kernel as forward
from flashlane.kernels.hopper.forward import tiles
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.kernels.hopper.forward.select import MOST_GATHERING, specialise
from flashlane.reference.naive import reference_attention

KERNEL = registry.get("hopper(wgmma+tma)")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RELATIVE = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
"""Largest ‖out − ref‖ / ‖ref‖ against f32."""
KINDS = ("packed", "cache", "pages", "rows")
"""Packed sequences; a cache; pages that boxes fit, and any pages, with the first rows unused now and then."""
SEEDS = 12
needs_hopper = pytest.mark.skipif(arch_of(HERE) != "sm_90a", reason="needs an sm_90 GPU")
ROWS = [
    (one, shape, causal)
    for one in tiles.CLASSES
    for shape in dict.fromkeys(
        (*one.shapes, *one.plain, *one.loaded_plain, *one.loaded, one.few_rows, one.few_rows_without_modifier)
    )
    for causal in (False, True)
]


def draw(kind: str, seed: int) -> tuple[AttentionProblem, Inputs]:
    """Sequences of unlike length, with score modifiers now and then; what no sequence owns is NaN."""
    chance = random.Random(f"{kind} {seed}")
    case = draws.draw(chance, HOPPER_FORWARD_KINDS[kind])
    return case.build(chance.choice(tuple(RELATIVE)), device=str(HERE))


def run(
    problem: AttentionProblem, inputs: Inputs, config: HopperConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, written over NaN."""
    *batch, rows, heads, _ = inputs.q.shape
    out = torch.full((*batch, rows, heads, problem.head_dim_v), math.nan, dtype=problem.dtype, device=HERE)
    lse = torch.full((*batch, heads, rows), math.nan, device=HERE)
    KERNEL.run(config or KERNEL.config(problem), problem, inputs, out, lse)
    return out, lse


def assert_right(problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    with torch.no_grad():
        # In f64: an LSE of some hundreds, as ALiBi makes, has an error of its own in f32.
        ref_out, ref_lse = reference_attention(problem, inputs, torch.float64)
    finite = torch.isfinite(ref_lse)
    assert torch.isfinite(out).all() and torch.equal(torch.isfinite(lse), finite)
    assert (lse[~finite] == -math.inf).all()
    # The tanh of bf16 operands has a relative error of 2^-11.
    off = 1e-4 + 2**-11 * problem.softcap * (problem.dtype == torch.bfloat16)
    torch.testing.assert_close(lse[finite].double(), ref_lse[finite].double(), rtol=0, atol=off)
    assert (out.double() - ref_out).norm() <= RELATIVE[problem.dtype] * ref_out.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_legal_and_various(kind: str) -> None:
    problems = [draw(kind, seed)[0].on("sm_90a") for seed in range(SEEDS)]
    assert all(KERNEL.supports(problem) is None for problem in problems)
    for names in (("sinks",), ("alibi",), ("softcap",), ("causal",), ("window_left",)):
        assert any(getattr(p, name) not in (False, 0, -1) for p in problems for name in names), names
    assert {p.dtype for p in problems} == set(RELATIVE) and len({p.head_dim for p in problems}) > 2
    if kind == "rows":
        assert all(KERNEL.config(p).gather for p in problems) and {p.leftpad_k for p in problems} == {False, True}


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_tile_of_the_tables(number: int) -> None:
    row, shape, causal = ROWS[number]
    dtype = tuple(RELATIVE)[number % 2]
    q = torch.randn(2, 1500, 6, row.head_dim, device=HERE).to(dtype)
    k = torch.randn(2, 1777, 2, row.head_dim, device=HERE).to(dtype)
    v = torch.randn(2, 1777, 2, row.head_dim_v, device=HERE).to(dtype)
    inputs = Inputs(q, k, v)
    problem = AttentionProblem.from_inputs(inputs, causal=causal)
    tile = HopperConfig(problem.dtype_name, row.head_dim, row.head_dim_v, **asdict(shape))
    config = specialise(tile, problem)
    out, lse = run(problem, inputs, config)
    assert_right(problem, inputs, out, lse)
    again = run(problem, inputs, config)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


DEFERRED = tuple(
    (head_dim, replace(shape, deferred_max=True))
    for head_dim, shape in (
        (64, tiles.M192N128S3), (64, tiles.M256N64S4), (128, tiles.M192N64S3), (128, tiles.M128N128S3),
        (96, replace(tiles.M64N128S3, late_wait=True)),
    )
)  # fmt: skip
"""Head dims and shapes whose deferred maximum is tested."""
GROWTHS = {"first keys": 6.0, "slowly": 0.35, "beyond all exponents": 5.0}
"""How the scores of a row grow in the order in which blocks are walked, from the last to the first."""


def growing(q: torch.Tensor, k: torch.Tensor, growth: str) -> None:
    """Scale keys so that scores exceed the maximum of the blocks before: by 2^13 and more, or by 2^128 and more."""
    before, factor = k.shape[1] - torch.arange(k.shape[1], device=k.device), GROWTHS[growth]
    if growth == "first keys":
        k[:, :3] *= factor
        return
    q.abs_(), k.abs_()
    k.mul_((1 + before // 64 * factor)[None, :, None, None].to(k.dtype))


def tensors_that_grow(head_dim: int, dtype: torch.dtype, growth: str) -> Inputs:
    """Of 1151 keys the first query of a tile of 1024 sees all of a block, the next ones some of the one after it."""
    q = torch.randn(2, 1024, 18, head_dim, device=HERE).to(dtype)
    k, v = (torch.randn(2, 1151, 9, head_dim, device=HERE).to(dtype) for _ in range(2))
    growing(q, k, growth)
    return Inputs(q, k, v)


def check_deferred(inputs: Inputs, shape: tiles.TileShape, **options: Any) -> None:
    """A call by a tile with a deferred maximum is right, and gives the same bits again."""
    problem = AttentionProblem.from_inputs(inputs, **options)
    config = specialise(
        HopperConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v, **asdict(shape)), problem
    )
    assert config.deferred_max
    out, lse = run(problem, inputs, config)
    assert_near(problem, inputs, out, lse)
    again = run(problem, inputs, config)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("number", range(len(DEFERRED)))
def test_a_deferred_maximum_is_raised(number: int, causal: bool, growth: str) -> None:
    head_dim, shape = DEFERRED[number]
    dtype = tuple(RELATIVE)[number % 2]
    check_deferred(tensors_that_grow(head_dim, dtype, growth), shape, causal=causal)


MODIFIED = {
    "softcap": ("slowly", {"softcap": 15.0}, 0.0),
    "steep softcap": ("beyond all exponents", {"softcap": 400.0}, 0.0),
    "alibi": ("first keys", {}, 0.3),
    "alibi, growing": ("slowly", {}, 0.01),
    "alibi, beyond": ("beyond all exponents", {}, 0.01),
    "rising alibi": ("first keys", {}, -0.6),
}
"""By name: how scores grow, what caps them, and the largest slope, of either sign."""


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", MODIFIED)
@pytest.mark.parametrize("number", range(len(DEFERRED)))
def test_a_deferred_maximum_of_modified_scores_is_raised(number: int, name: str) -> None:
    """Also where scores are computed again. Under a steep cap f16 operands are exact; slopes below 0 defer nothing."""
    head_dim, shape = DEFERRED[number]
    growth, options, slope = MODIFIED[name]
    dtype = torch.float16 if "softcap" in name else tuple(RELATIVE)[number % 2]
    slopes = slope * torch.linspace(0.01, 1, 36, device=HERE).view(2, 18) if slope else None
    inputs = replace(tensors_that_grow(head_dim, dtype, growth), alibi_slopes=slopes)
    for causal in (True, False) if slopes is None else (True,):
        check_deferred(inputs, shape, causal=causal, **options)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("softcap", [5.0, 15.0, 50.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_scores_under_a_small_cap_take_no_maximum(head_dim: int, causal: bool, softcap: float) -> None:
    """Of bf16 operands, at both ends of the cap, with rows that see no key, and with a sink that exceeds all scores."""
    q = 4 * torch.randn(2, 700, 6, head_dim, device=HERE)
    k, v = (torch.randn(2, 611, 2, head_dim, device=HERE).bfloat16() for _ in range(2))
    q[:, 100:200] *= 30
    q[:, 300:400] = -30 * q[:, 300:400].abs()
    k[:, 200:] = k[:, 200:].abs()
    for sinks in (None, torch.tensor([-3.0, 0, 1, 20, 60, 130], device=HERE)):
        inputs = Inputs(q.bfloat16(), k, v, sinks=sinks)
        problem = AttentionProblem.from_inputs(inputs, causal=causal, softcap=softcap)
        config = KERNEL.config(problem)
        assert config.bounded_score and not config.deferred_max
        out, lse = run(problem, inputs)
        assert_right(problem, inputs, out, lse)
        again = run(problem, inputs)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


def assert_near(problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """The same as :func:`assert_right` for scores of any size, where an LSE in f32 has an error in proportion to it."""
    ref_out, ref_lse = reference_attention(problem, inputs, torch.float64)
    torch.testing.assert_close(lse.double(), ref_lse.double(), rtol=2e-6, atol=1e-4)
    assert (out.double() - ref_out).norm() <= RELATIVE[problem.dtype] * ref_out.norm()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_deferred_maximum_of_few_rows_in_a_cache(head_dim: int, page: int, splits: int, growth: str) -> None:
    """Four queries of 16 heads are the 64 rows of a tile. A sequence fills the cache, and one has a part of a block."""
    dtype, used = (torch.bfloat16, torch.float16)[page > 0], torch.tensor([1504, 700, 33], device=HERE).int()
    q = torch.randn(3, 4, 32, head_dim, device=HERE).to(dtype)
    k, v = (torch.randn(3, 1504, 2, head_dim, device=HERE).to(dtype) for _ in range(2))
    growing(q, k, growth)
    for i, keys in enumerate(used.tolist()):
        k[i, keys:], v[i, keys:] = math.nan, math.nan
    table = None
    if page:
        k, v = (t.reshape(-1, page, 2, head_dim) for t in (k, v))
        order = torch.randperm(k.shape[0], device=HERE)
        k, v, table = k[order], v[order], order.argsort().reshape(3, -1).int()
    inputs = Inputs(q, k, v, seqused_k=used, block_table=table)
    problem = AttentionProblem.from_inputs(inputs, causal=True, num_splits=splits)
    config = KERNEL.config(problem)
    assert (config.consumers, config.deferred_max, config.late_wait, config.split) == (1, True, True, splits > 1)
    assert_near(problem, inputs, *run(problem, inputs, config))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("number", range(len(DEFERRED)))
def test_bits_of_a_row_do_not_depend_on_rows_whose_maximum_is_raised(number: int) -> None:
    head_dim, shape = DEFERRED[number]
    q, k, v = (torch.randn(1, 800, 30, head_dim, device=HERE).bfloat16() for _ in range(3))
    inputs = Inputs(q, k, v)
    problem = AttentionProblem.from_inputs(inputs, causal=True)
    config = specialise(HopperConfig("bf16", head_dim, head_dim, **asdict(shape)), problem)
    out, lse = run(problem, inputs, config)
    steep = q.clone()
    steep[:, ::2] *= 60
    other, other_lse = run(problem, replace(inputs, q=steep), config)
    assert torch.equal(out[:, 1::2], other[:, 1::2]) and torch.equal(lse[..., 1::2], other_lse[..., 1::2])
    assert not torch.equal(out[:, ::2], other[:, ::2])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_unlike_length(kind: str, seed: int) -> None:
    problem, inputs = draw(kind, seed)
    assert_right(problem, inputs, *run(problem, inputs))


def features() -> ModuleType:
    """The small problems of benchmarks/, one for each feature."""
    path = Path(__file__).parents[3] / "benchmarks" / "scripts" / "hopper_features.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = list(features().forward_cases())


def dense(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, sinks: bool = False, **options: object
) -> tuple[AttentionProblem, Inputs]:
    """Random tensors of batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v."""
    batch, heads, kv_heads, rows, keys, head_dim, head_dim_v = sizes
    draw = torch.Generator(HERE).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw, device=HERE).to(dtype)

    more = {"sinks": normal(heads).float()} if sinks else {}
    q, k = normal(batch, rows, heads, head_dim), normal(batch, keys, kv_heads, head_dim)
    inputs = Inputs(q, k, normal(batch, keys, kv_heads, head_dim_v), **more)
    return AttentionProblem.from_inputs(inputs, **options), inputs


def assert_alike(one: tuple[torch.Tensor, torch.Tensor], two: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_every_feature_is_among_the_cases() -> None:
    problems = [(case, case.build(torch.device("cpu"))[0]) for case in CASES]
    assert all(KERNEL.supports(problem) is None for _, problem in problems)
    configs = [case.config(problem) for case, problem in problems]
    constants = [dict(config.constants()) for config in configs]
    switches = ("HAS_LEFT", "SOFTCAP", "ALIBI", "SINKS", "VARLEN", "CACHE", "GATHER", "SPLIT", "COMBINE_IN_KERNEL")
    for name in switches:
        assert any(each[name] for each in constants), name
    assert any(config.page_rows for config in configs)
    assert {config.v_slices for config in configs} >= {1, 2} and {config.dtype for config in configs} == {"f16", "bf16"}
    for case, config in zip(CASES, configs, strict=True):  # each is what it is called
        assert (config.cluster == 2) == case.feature.startswith("cluster"), case.tag
        assert config.combine_in_kernel == case.changes.get("combine_in_kernel", False), case.tag
        assert config.gather == (case.page % 8 > 0 or (case.page > 0 and case.leftpad)), case.tag


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_debug_build_does_every_feature(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait traps after two seconds there: what hangs is an error."""
    monkeypatch.setattr(jit, "compile", functools.partial(jit.compile, debug=True))
    problem, inputs = CASES[number].build(HERE)
    forward._prepared.cache_clear()
    try:
        assert_right(problem, inputs, *run(problem, inputs, CASES[number].config(problem)))
    finally:
        forward._prepared.cache_clear()


HANG = """
import ctypes, torch
from flashlane import jit
text = '''#include "mbarrier.cuh"
extern "C" __global__ void hang(int* p) {{
    __shared__ u64 b;
    if (threadIdx.x == 0) mbarrier_init(shared_address(&b), 1), {wait}(shared_address(&b), 0);
}}'''
torch.zeros(1, device="cuda")
kernel = jit.load(jit.compile(jit.KernelSource("hang.cu", text, "hang"), "sm_90a", debug=True), 0)
kernel.launch((1, 1, 1), (32, 1, 1), 0, [ctypes.c_void_p(0)])
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("wait", ["mbarrier_wait", "mbarrier_wait_cluster"])
def test_a_hang_is_an_error_in_a_debug_build(wait: str) -> None:
    """In a process of its own, which does not survive it."""
    done = subprocess.run([sys.executable, "-c", HANG.format(wait=wait)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and ("launch failure" in done.stderr or "trap" in done.stderr.lower()), done.stderr


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        ((2, 6, 2, 700, 900, 64, 512), {"causal": True}),
        ((2, 6, 2, 700, 900, 64, 264), {}),
        ((1, 40, 8, 515, 1031, 128, 320), {"window_size": (300, 0)}),
        ((3, 4, 4, 333, 500, 40, 1016), {"causal": True, "alignment": "top-left"}),
        ((2, 4, 1, 260, 777, 256, 512), {"softcap": 20.0}),
        ((2, 8, 2, 5, 3000, 64, 512), {}),
        ((2, 3, 3, 100, 2000, 192, 400), {"causal": True}),
    ],
)
def test_values_wider_than_an_accumulator(sizes: tuple[int, ...], asked: dict[str, object]) -> None:
    problem, inputs = dense(sizes, (torch.float16, torch.bfloat16)[sizes[5] % 128 // 64], sinks=sizes[0] == 3, **asked)
    for combine_in_kernel in {False, KERNEL.config(problem).split}:
        config = replace(KERNEL.config(problem), combine_in_kernel=combine_in_kernel)
        found = run(problem, inputs, config)
        assert_right(problem, inputs, *found)
        assert_alike(found, run(problem, inputs, config))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("sizes", [(2, 6, 2, 700, 700, 128, 128), (1, 4, 4, 300, 900, 248, 248)])
def test_a_window_that_hides_nothing_is_the_causal_mask(sizes: tuple[int, ...]) -> None:
    """Bit for bit. With one key less to the left a row's output differs, and is right."""
    problem, inputs = dense(sizes, torch.bfloat16, causal=True)
    found, keys = run(problem, inputs), sizes[4]
    for left in (keys - 1, 4096):
        wide, _ = dense(sizes, torch.bfloat16, window_size=(left, 0))
        assert_alike(found, run(wide, inputs))
    narrow, _ = dense(sizes, torch.bfloat16, window_size=(keys - 2, 0))
    other = run(narrow, inputs)
    assert_right(narrow, inputs, *other)
    assert not torch.equal(found[1], other[1])


PAIRS = [(one, shape) for one in tiles.CLASSES for shape in one.shapes if shape.cluster > 1]
MASKS = ({}, {"causal": True}, {"window_size": (200, 0)}, {"window_size": (60, 90), "alignment": "top-left"})


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("keys", [1111, 500])
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_two_ctas_of_a_cluster_give_what_one_gives(number: int, keys: int) -> None:
    """Odd numbers of tiles, rows without a key; bit for bit, as each row meets the same blocks in the same order."""
    row, shape = PAIRS[number]
    for asked in MASKS:
        problem, inputs = dense((3, 16, 4, 1300, keys, row.head_dim, row.head_dim_v), sinks=number % 2 == 0, **asked)
        pair = specialise(HopperConfig(problem.dtype_name, row.head_dim, row.head_dim_v, **asdict(shape)), problem)
        assert pair.cluster == 2
        found = run(problem, inputs, pair)
        assert_right(problem, inputs, *found)
        for _ in range(3):
            assert_alike(found, run(problem, inputs, pair))
        assert_alike(found, run(problem, inputs, replace(pair, cluster=1)))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        ((1, 32, 8, 1, 9000, 128, 128), {}),
        ((3, 8, 2, 3, 5000, 64, 64), {"causal": True}),
        ((1, 8, 8, 256, 8000, 128, 128), {}),
        ((2, 3, 3, 190, 2500, 256, 256), {"causal": True}),
        ((1, 2, 1, 700, 1900, 192, 128), {}),
        ((1, 4, 2, 300, 4000, 80, 80), {"window_size": (2400, 0)}),
    ],
)
def test_splits_are_combined_alike_in_the_kernel_and_after_it(sizes: tuple[int, ...], asked: dict[str, object]) -> None:
    """Bit for bit: the same splits in the same order. And by replayed graphs next to launches."""
    problem, inputs = dense(sizes, sinks=sizes[0] == 1, **asked)
    after = replace(KERNEL.config(problem), combine_in_kernel=False)
    assert after.split
    within = replace(after, combine_in_kernel=True)
    results = run(problem, inputs, within)
    assert_right(problem, inputs, *results)
    assert_alike(results, run(problem, inputs, after))
    out, lse = torch.empty_like(results[0]), torch.empty_like(results[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            KERNEL.run(within, problem, inputs, out, lse)
    for _ in range(5):
        out.fill_(math.nan)
        graph.replay()
        eager = run(problem, inputs, within)
        torch.cuda.synchronize()
        assert_alike(results, (out, lse))
        assert_alike(results, eager)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        ((2, 21, 21, 645, 10998, 128, 128), {"causal": True}),
        ((1, 12, 12, 1400, 6400, 248, 248), {}),
        ((1, 24, 12, 1059, 5007, 96, 96), {"causal": True, "softcap": 20.0}),
    ],
)
def test_tiles_that_fill_the_sms_have_splits_in_any_order_of_tiles(
    sizes: tuple[int, ...], asked: dict[str, object]
) -> None:
    """With sinks; each order of tiles has the same bits, and a launch without splits is as right."""
    problem, inputs = dense(sizes, torch.bfloat16, sinks=True, **asked)
    whole = replace(KERNEL.config(problem), split=False, kv_splits=0, combine_in_kernel=False)
    assert_right(problem, inputs, *run(problem, inputs, whole))
    for splits in (2, 3, 5):
        parts = replace(whole, split=True, kv_splits=splits)
        found = run(problem, inputs, parts)
        assert_right(problem, inputs, *found)
        for section in (1, 4, 6) if problem.has_right_only else ():
            assert_alike(found, run(problem, inputs, replace(parts, heads_per_section=section * problem.group)))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("seed", range(0, SEEDS, 2))
def test_pages_come_alike_by_tma_and_by_cp_async(seed: int) -> None:
    problem, inputs = draw("pages", seed)
    plain = KERNEL.config(problem)
    if plain.consumers > MOST_GATHERING:
        plain = specialise(replace(plain, consumers=2, q_stages=1), problem)
    gathering = specialise(replace(plain, gather=True), problem)
    assert gathering.gather and not plain.gather
    assert_alike(run(problem, inputs, plain), run(problem, inputs, gathering))


@pytest.mark.gpu
@needs_hopper
def test_a_thousand_launches_on_four_streams() -> None:
    pool = [draw(kind, seed) for kind in KINDS for seed in range(0, SEEDS, 2)]
    alone = [run(*item) for item in pool]
    torch.cuda.synchronize()
    chance, streams = random.Random(0), [torch.cuda.Stream() for _ in range(4)]
    for _ in range(20):
        results = []
        for _ in range(50):
            number = chance.randrange(len(pool))
            with torch.cuda.stream(chance.choice(streams)):
                results.append((number, run(*pool[number])))
        torch.cuda.synchronize()
        for number, (out, lse) in results:
            assert torch.equal(out, alone[number][0]) and torch.equal(lse, alone[number][1]), pool[number][0].describe()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_replay(kind: str) -> None:
    problem, inputs = draw(kind, 3)
    alone, _ = run(problem, inputs)
    out, lse = torch.empty_like(alone), torch.empty((*alone.shape[:-3], alone.shape[-2], alone.shape[-3]), device=HERE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            KERNEL.forward(problem, inputs, out, lse)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, alone)
