"""The Hopper backward on a GPU: thousands of problems by the peers' rule, repeats to the bit, graphs, streams, offsets.

``FLASHLANE_DRAWS`` says how many problems each variant draws; a release takes hundreds. A variant is one compiled
configuration, whose lengths, heads, strides and values are drawn. That what is drawn is legal is tested anywhere.
"""

from __future__ import annotations

import collections
import math
import os
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from backward_rule import Given, complaints, given, logs_of, poison, without_an_owner

from flashlane import flash_attn_func, jit
from flashlane.bench.measure import drawn as draws
from flashlane.bench.measure.drawn_case import Case
from flashlane.core import registry
from flashlane.core.dispatch import select_backward
from flashlane.core.problem import AttentionProblem, Inputs, arch_of
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.backward import launch as backward_launch
from flashlane.kernels.hopper.backward.kernel import config_of, hopper_backward, supports
from flashlane.kernels.hopper.backward.launch import Workspace
from flashlane.kernels.hopper.backward.one_cta import in_kernel_dq, split_q
from flashlane.kernels.hopper.backward.one_cta import launch as one_cta_launch
from flashlane.kernels.hopper.backward.one_cta import tiles as one_cta_tiles
from flashlane.reference.naive import reference_attention
from flashlane.reference.tiled import Gradients

ARCH = "sm_90a"
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DRAWS = int(os.environ.get("FLASHLANE_DRAWS", "12"))
BF16, F16 = torch.bfloat16, torch.float16
KERNEL = registry.get("hopper(wgmma+tma)")
REFUSALS = {"rows that TMA cannot copy": r"rows of q, k and v must be contiguous and start on 16 bytes"}
"""Reasons for which a drawn problem may be refused; any other is a fault."""
refused: collections.Counter[str] = collections.Counter()
judged: collections.Counter[str] = collections.Counter()
needs_hopper = pytest.mark.skipif(arch_of(HERE) != ARCH, reason="needs an sm_90 GPU")


@dataclass(frozen=True)
class Variant:
    """What the kernels are compiled for."""

    dtype: torch.dtype = BF16
    head_dim: int = 128
    head_dim_v: int = 0
    mask: str = "right"
    """``full``; ``right`` (causal, or so many keys after a query); ``left``; ``both``."""
    features: tuple[str, ...] = ()
    """Of softcap, alibi, sinks, varlen, deterministic."""

    def __str__(self) -> str:
        dims = f"{self.head_dim}-{self.head_dim_v or self.head_dim}"
        return "_".join((str(self.dtype)[6:], dims, self.mask, *self.features))


FEATURES = ("softcap", "alibi", "sinks", "varlen", "deterministic")


def several() -> Iterator[Variant]:
    """Each feature alone, all of them, and products of them that a seed picks."""
    for feature in FEATURES:
        for head_dim in (64, 128, 256):
            yield Variant((BF16, F16)[head_dim == 64], head_dim, features=(feature,))
    for mask in ("full", "left", "both"):
        yield Variant(BF16, 64, mask=mask, features=("varlen",))
        yield Variant(F16, 128, mask=mask, features=("varlen", "deterministic"))
    for head_dim in (64, 128, 256):
        yield Variant(BF16, head_dim, mask="both", features=FEATURES)
    chance = random.Random(7)
    for _ in range(32):
        head_dim = 8 * chance.randint(1, 32)
        unlike = chance.random() < 0.4
        yield Variant(
            chance.choice((BF16, F16)),
            head_dim,
            8 * chance.randint(1, 32) if unlike else 0,
            chance.choice(("full", "right", "right", "left", "both")),
            tuple(feature for feature in FEATURES if chance.random() < 0.35),
        )


def all_variants() -> Iterator[Variant]:
    """Every head dim that is a multiple of 8; both types and all masks of common ones; unlike head dims; features."""
    for dtype in (BF16, F16):
        for head_dim in (64, 128, 256):
            yield from (Variant(dtype, head_dim, mask=mask) for mask in ("full", "right", "both"))
    for head_dim in range(8, 257, 8):
        yield Variant((BF16, F16)[head_dim // 8 % 2], head_dim, mask=("full", "right")[head_dim // 16 % 2])
    for head_dim, head_dim_v in ((192, 128), (128, 64), (64, 128), (64, 256), (256, 64), (40, 24)):
        yield Variant(BF16, head_dim, head_dim_v)
    yield from several()


VARIANTS = tuple(dict.fromkeys(all_variants()))


@dataclass(frozen=True)
class Drawn:
    """A problem, and how what its backward is given lies in memory."""

    case: Case
    do: str
    dlse: str
    out: str
    owned: bool
    """Whether rows without an owner are numbers (else NaN)."""

    def build(self, dtype: torch.dtype, device: torch.device) -> tuple[AttentionProblem, Inputs]:
        return self.case.build(dtype, device=str(device))

    def given(self, problem: AttentionProblem, inputs: Inputs) -> tuple[Inputs, Given]:
        """What the backward is called with, and what it must find."""
        generator = torch.Generator(inputs.q.device).manual_seed(self.case.seed)
        logs = logs_of(problem, inputs)
        do = laid_out((*inputs.q.shape[:-1], problem.head_dim_v), self.do, problem.dtype, generator)
        dlse = None if self.dlse == "none" else laid_out(logs, self.dlse, torch.float32, generator)
        what = given(problem, inputs, do, dlse)
        if self.out == "transposed":
            out = what.out.transpose(-3, -2).contiguous().transpose(-3, -2)
            what = replace(what, out=out, lse=what.lse.transpose(-1, -2).contiguous().transpose(-1, -2))
        return (inputs, what) if self.owned else without_an_owner(problem, inputs, what)


def laid_out(shape: tuple[int, ...], how: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers in one of the ways in which autograd hands gradients over."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=generator.device).to(dtype)

    if how == "transposed":
        return normal(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if how == "heads first" and len(shape) > 2:
        return normal(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-3, -2)
    if how == "one number":  # what the gradient of a sum is
        return normal(*(1,) * len(shape)).expand(shape)
    if how == "one row":
        return normal(*(1,) * (len(shape) - 1), shape[-1]).expand(shape)
    if how == "odd start":
        return normal(*shape[:-1], shape[-1] + 3)[..., 1:-2]
    return normal(*shape)


def draw(variant: Variant, number: int) -> Drawn:
    chance = random.Random(f"{variant} {number}")
    left, right = variant.mask in ("left", "both"), variant.mask in ("right", "both")
    space = replace(
        draws.features(draws.HOPPER_BACKWARD, variant.features),
        head_dims=(variant.head_dim,),
        head_dims_v=(variant.head_dim_v,),
        causal=(True, True, False) if right else (False,),
        left=(0, 5, 70, 130, 400) if left else (-1,),
        right=(0, 9, 100, 400) if right else (-1,),
        scales=(None, None, None, 0.3, 1 / variant.head_dim),
    )
    case = draws.draw(chance, space)
    return Drawn(
        case=case,
        do=chance.choice(("plain", "plain", "heads first", "transposed", "one number", "one row", "odd start")),
        dlse=chance.choice(("none", "plain", "plain", "transposed", "one number", "odd start")),
        out=chance.choice(("plain", "plain", "transposed")),
        owned=not case.varlen or chance.random() < 0.5,
    )


def run(problem: AttentionProblem, inputs: Inputs, what: Given) -> Gradients:
    """The gradients, in memory that held NaN."""
    poison(inputs, extra=1 << 24)
    return hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse)


def repeats(problem: AttentionProblem) -> tuple[str, ...]:
    """The gradients that have the same bits at every run: dQ is else summed in any order."""
    return ("k", "v", "sinks", *(("q",) if problem.deterministic else ()))


def equal(a: Gradients, b: Gradients, names: tuple[str, ...]) -> bool:
    pairs = ((getattr(a, name), getattr(b, name)) for name in names)
    return all(x is y is None or torch.equal(x, y) for x, y in pairs)


def refusal(problem: AttentionProblem) -> str | None:
    """Which of :data:`REFUSALS` a problem meets, or None when it is taken."""
    reason = supports(problem)
    if reason is None:
        return None
    found = [name for name, pattern in REFUSALS.items() if re.search(pattern, reason)]
    assert found, f"{problem.describe()} is refused: {reason}"
    return found[0]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """Compiles what the chosen variants need, on all cores, into the cache on disk."""
    asked = {item.callspec.params.get("variant") for item in request.session.items if hasattr(item, "callspec")}
    sources: dict[KernelSource, None] = {}
    for variant in asked & set(VARIANTS):
        case = replace(draw(variant, 0).case, lengths=((3, 5), (3, 5)), strides="plain")
        problem = replace(case.build(variant.dtype)[0].on(ARCH), deterministic="deterministic" in variant.features)
        if supports(problem) is None:
            config = config_of(problem)
            sources |= dict.fromkeys(config.sources())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: jit.compile(source, ARCH), sources))


@pytest.fixture(scope="module", autouse=True)
def report(request: pytest.FixtureRequest) -> Iterator[None]:
    """Says at the end how many problems were judged and refused."""
    yield
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and judged:
        counts = ", ".join(f"{count} refused ({name})" for name, count in refused.items()) or "none refused"
        terminal.write_line(f"\n{sum(judged.values())} drawn problems judged, {counts}")


# --- anywhere


def test_what_is_drawn_is_various() -> None:
    drawn = [draw(variant, number) for variant in VARIANTS for number in range(4)]
    cases = [item.case for item in drawn]
    assert {v.head_dim for v in VARIANTS} == set(range(8, 257, 8)) and len(VARIANTS) == len(set(map(str, VARIANTS)))
    assert {c.alignment for c in cases if c.causal} == {"bottom-right", "top-left"}
    assert {c.strides for c in cases} == {"plain", "transposed", "apart", "expanded", "sliced"}
    assert {item.do for item in drawn} > {"one number", "odd start"} and {item.owned for item in drawn} == {True, False}
    assert {item.dlse for item in drawn} == {"none", "plain", "transposed", "one number", "odd start"}
    lengths = {n for c in cases for pair in c.lengths for n in pair}
    assert {0, 1, 63, 65, 127, 1023} <= lengths and any(q != k for c in cases for q, k in c.lengths)
    assert {c.group for c in cases} == {1, 2, 3, 8} and {c.group for c in cases if c.varlen} == {1, 2, 3, 8}
    for feature in FEATURES:
        assert any(feature in v.features and v.mask == "both" for v in VARIANTS), feature
    assert any(q > k > 0 and c.causal and c.alignment == "bottom-right" for c in cases for q, k in c.lengths), (
        "blind rows"
    )


def test_takes_every_problem_that_it_must() -> None:
    for variant in VARIANTS:
        case = replace(draw(variant, 0).case, lengths=((3, 5), (3, 5)), strides="plain")
        problem = case.build(variant.dtype)[0].on(ARCH)
        assert supports(replace(problem, deterministic="deterministic" in variant.features)) is None, variant


def test_refusals_say_why() -> None:
    plain = replace(draw(Variant(), 0).case, lengths=((3, 5),), strides="plain")
    problem = plain.build(BF16)[0]
    for other, reason in (
        (problem, "it needs a GPU"),
        (problem.on("sm_80"), "architecture is sm_80"),
        (plain.build(torch.float32)[0].on(ARCH), "dtype is f32"),
        (replace(problem.on(ARCH), bias=True), "it has no bias"),
        (replace(problem.on(ARCH), dropout_p=0.1), "it has no dropout_p"),
        (replace(problem.on(ARCH), seqused_k=True), "it has no seqused_k"),
        (replace(problem.on(ARCH), head_dim=264), "head_dim is 264; it takes up to 256"),
        (replace(plain, strides="sliced").build(BF16)[0].on(ARCH), "must be contiguous and start on 16 bytes"),
    ):
        assert reason in (supports(other) or ""), reason


@pytest.mark.parametrize("varlen", [False, True])
def test_the_rule_takes_a_right_backward_and_finds_a_wrong_one(varlen: bool) -> None:
    """The judge itself, with the portable backward in the kernel's place."""
    from flashlane.reference.tiled import tiled_backward

    variant = Variant(BF16, 16, mask="both", features=("softcap", "alibi", "sinks", *(("varlen",) if varlen else ())))
    lengths = ((33, 40), (0, 7), (17, 0), (20, 9)) if varlen else ((33, 40), (33, 40))
    item = replace(draw(variant, 1), owned=not varlen, dlse="plain")
    item = replace(item, case=replace(item.case, lengths=lengths, strides="plain", kv_heads=2, group=2))
    problem, inputs = item.build(variant.dtype, torch.device("cpu"))
    rows, what = item.given(problem, inputs)
    found = tiled_backward(problem, rows, what.out, what.lse, what.do, what.dlse)
    assert not complaints(rows, what, found)
    for name in ("q", "k", "v", "sinks"):
        right = getattr(found, name)
        for spoilt in (right * 1.1, right.clone().index_fill_(0, torch.tensor([0]), math.nan), right.double()):
            (said,) = complaints(rows, what, found._replace(**{name: spoilt}))
            assert said.startswith(f"d{name}")
    without = tiled_backward(problem, rows, what.out, what.lse, what.do, None)
    assert complaints(rows, what, without), "the gradient of the LSE counts"


# --- on a Hopper GPU


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_is_as_near_as_torch(variant: Variant, compiled: None) -> None:
    for number in range(DRAWS):
        item = draw(variant, number)
        problem, inputs = item.build(variant.dtype, HERE)
        why = refusal(problem)
        if why is not None:
            refused[why] += 1
            continue
        rows, what = item.given(problem, inputs)
        found = run(problem, rows, what)
        wrong = complaints(rows, what, found)
        assert not wrong, f"{item}: {'; '.join(wrong)}"
        assert equal(found, run(problem, rows, what), repeats(problem)), f"{item}: other bits in another run"
        judged[str(variant)] += 1


@pytest.mark.gpu
@needs_hopper
def test_few_problems_are_refused() -> None:
    """Counted over all variants, with what TMA cannot copy among them."""
    whys = [refusal(draw(v, n).build(v.dtype, HERE)[0]) for v in VARIANTS[::3] for n in range(4)]
    assert 0 < sum(why is not None for why in whys) < 0.15 * len(whys)


def dense(n: int, head_dim: int, batch: int = 2, heads: int = 4, kv_heads: int = 2, **asked: Any):
    q, k, v = (torch.randn(batch, n, h, head_dim, device=HERE, dtype=BF16) for h in (heads, kv_heads, kv_heads))
    inputs = Inputs(q, k, v)
    return AttentionProblem.from_inputs(inputs, **asked), inputs


def forwarded(problem: AttentionProblem, inputs: Inputs) -> Given:
    """Output and LSE of the Hopper forward and random gradients of both; nothing to compare with."""
    out = torch.empty((*inputs.q.shape[:-1], problem.head_dim_v), dtype=problem.dtype, device=HERE)
    lse = torch.empty(logs_of(problem, inputs), device=HERE)
    KERNEL.forward(problem, inputs, out, lse)
    return Given(out, lse, torch.randn_like(out), torch.randn_like(lse), {}, {})


def on_four_streams(problem: AttentionProblem, inputs: Inputs, what: Given, calls: int) -> list[Gradients]:
    """What so many calls find, on four streams in turn, none waiting for another."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for turn in range(calls):
        with torch.cuda.stream(streams[turn % 4]):
            found.append(hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse))
    torch.cuda.synchronize()
    return found


GAP = 4096
"""Words between the parts of a call's memory in the next test, more than a slab of sums."""


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.Tensor, Workspace]]]:
    """Keeps the parts of each call's memory apart; gives that memory, every word of which was 1, and where they lie.

    As a float, 1 is so small that an addition of 0 to it in device memory makes it 0.
    """
    spaces, made = {}, []

    packing = backward_launch.workspace_of

    def workspace_of(*asked: Any) -> Workspace:
        packed = packing(*asked)
        order = enumerate(packed.offsets.items(), start=1)
        space = Workspace(packed.words + (len(packed.offsets) + 1) * GAP, {n: at + i * GAP for i, (n, at) in order})
        spaces[space.words] = space
        return space

    def allocator(device: torch.device) -> Any:
        def make(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            if shape[0] in spaces and len(shape) == 1:
                made.append((tensor, spaces[shape[0]]))
                tensor.view(torch.int32).fill_(1)
            return tensor

        return make

    registry.changed()  # plans that were made before know other places
    with monkeypatch.context() as patch:
        patch.setattr(backward_launch, "workspace_of", workspace_of)
        patch.setattr(backward_launch.launch, "allocator", allocator)
        yield made
    registry.changed()


@pytest.fixture
def always_split(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles are split into parts wherever they may be, as if that cost nothing."""
    registry.changed()
    with monkeypatch.context() as patch:
        for cost in ("START", "WAIT", "ADD", "LEAST_SAVING"):
            patch.setattr(split_q, cost, 0.0)
        yield
    registry.changed()


@pytest.fixture
def always_in_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Idle warps zero dq_accum and write dQ of all but the first heads, wherever that may be."""
    registry.changed()
    with monkeypatch.context() as patch:
        patch.setattr(in_kernel_dq, "ZEROED_AHEAD", 0)
        patch.setattr(in_kernel_dq, "LAST_ROUNDS", 0)
        patch.setattr(one_cta_tiles, "worth_it", lambda *asked: True)
        for module in (one_cta_launch, one_cta_tiles):
            patch.setattr(module, "heads_per_section", lambda *asked: 1)
        yield
    registry.changed()


IN_KERNEL = tuple(Variant(BF16, 128, mask=mask) for mask in ("full", "right", "both"))
IN_KERNEL += (
    Variant(F16, 104, mask="left"),
    Variant(F16, 120, 40),
    Variant(BF16, 64, 128),
    Variant(F16, 128, 64, "full"),
)
IN_KERNEL += (Variant(F16, 128, features=("sinks",)),)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("variant", IN_KERNEL, ids=str)
def test_idle_warps_make_the_dq_that_other_launches_make(variant: Variant, always_in_kernel: None) -> None:
    in_kernel = 0
    for number in range(DRAWS):
        item = draw(variant, number)
        # More heads than the SMs have tiles, or the launch before writes all zeros.
        item = replace(item, case=replace(item.case, kv_heads=7 * item.case.kv_heads))
        problem, inputs = item.build(variant.dtype, HERE)
        if refusal(problem) is not None:
            continue
        in_kernel += config_of(problem).in_kernel_dq
        rows, what = item.given(problem, inputs)
        for _ in range(3):
            found = run(problem, rows, what)
            wrong = complaints(rows, what, found)
            assert not wrong, f"{item}: {'; '.join(wrong)}"
    assert in_kernel >= DRAWS // 4


@pytest.mark.gpu
@needs_hopper
def test_in_kernel_dq_on_several_streams_at_once(always_in_kernel: None) -> None:
    problem, inputs = dense(1000, 128, batch=3, heads=50, kv_heads=50, causal=True)
    assert config_of(problem).in_kernel_dq
    what = forwarded(problem, inputs)
    right = run(problem, inputs, what)
    for again in on_four_streams(problem, inputs, what, 40):
        assert equal(right, again, repeats(problem))
        # Another order, rounded to bf16.
        assert float((again.q.float() - right.q.float()).norm() / right.q.float().norm()) < 3e-3


SPLIT = tuple(Variant(BF16, head_dim, mask=mask) for head_dim in (64, 96, 128) for mask in ("full", "right"))
SPLIT += (Variant(F16, 24), Variant(F16, 112, mask="full"), Variant(BF16, 128, 64, "full"), Variant(BF16, 40, 128))
SPLIT += tuple(Variant(F16, 128, mask="full", features=(feature,)) for feature in ("softcap", "alibi", "sinks"))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("variant", SPLIT, ids=str)
def test_parts_of_tiles_make_what_whole_tiles_make(variant: Variant, always_split: None) -> None:
    split = 0
    for number in range(DRAWS):
        item = draw(variant, number)
        problem, inputs = item.build(variant.dtype, HERE)
        if refusal(problem) is not None:
            continue
        split += config_of(problem).split_q
        rows, what = item.given(problem, inputs)
        found = run(problem, rows, what)
        wrong = complaints(rows, what, found)
        assert not wrong, f"{item}: {'; '.join(wrong)}"
        for _ in range(3):
            assert equal(found, run(problem, rows, what), repeats(problem)), f"{item}: other bits in another run"
    assert split >= DRAWS // 4


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_last_of_many_tiles_are_split(head_dim: int, always_split: None) -> None:
    problem, inputs = dense(1023, head_dim, batch=1, heads=17, kv_heads=17)  # 136 tiles, four more than SMs
    assert config_of(problem).split_q
    what = given(problem, inputs, torch.randn_like(inputs.q), torch.randn(logs_of(problem, inputs), device=HERE))
    found = run(problem, inputs, what)
    assert not (wrong := complaints(inputs, what, found)), wrong
    for _ in range(20):
        assert equal(found, run(problem, inputs, what), repeats(problem))


@pytest.mark.gpu
@needs_hopper
def test_parts_on_several_streams_at_once(always_split: None) -> None:
    """Launches share SMs, so that parts of one tile start far apart."""
    problem, inputs = dense(1500, 64, batch=1, heads=3, kv_heads=3)
    what = forwarded(problem, inputs)
    right = run(problem, inputs, what)
    assert all(equal(right, again, repeats(problem)) for again in on_four_streams(problem, inputs, what, 80))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [8, 24, 40, 48, 64, 72, 80, 96, 112, 128, 136, 160, 192, 256])
def test_no_part_of_a_calls_memory_is_written_past_its_end(
    head_dim: int, deterministic: bool, apart: list[tuple[torch.Tensor, Workspace]], always_split: None
) -> None:
    problem, inputs = dense(300, head_dim, causal=True, deterministic=deterministic)
    run(problem, inputs, forwarded(problem, inputs))
    ((words, space),) = apart
    starts = sorted(space.offsets.values())
    for end in (*starts, len(words)):  # each part ends a gap or less before what follows it
        gap = words[end - GAP : end].view(torch.int32)
        assert bool((gap == 1).all()), f"{int((gap != 1).sum())} words before {end} of {space}"


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 192, 256])
def test_repeats_to_the_bit(head_dim: int, causal: bool) -> None:
    problem, inputs = dense(777, head_dim, heads=6, causal=causal, deterministic=True)
    inputs = replace(inputs, sinks=torch.randn(6, device=HERE))
    problem = replace(problem, sinks=True)
    what = forwarded(problem, inputs)
    first = run(problem, inputs, what)
    for number in range(50):
        assert equal(first, run(problem, inputs, what), ("q", "k", "v", "sinks")), f"run {number}"
    free = run(replace(problem, deterministic=False), inputs, what)
    torch.testing.assert_close(free.q, first.q, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("features", [(), ("varlen", "sinks"), ("alibi", "softcap")], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_graphs_replay_on_new_inputs(head_dim: int, features: tuple[str, ...]) -> None:
    def drawn(seed: int) -> tuple[AttentionProblem, Inputs, Given]:
        item = draw(Variant(BF16, head_dim, features=(*features, "deterministic")), 5)
        lengths = ((300, 300), (65, 129), (0, 17)) if "varlen" in features else ((300, 300), (300, 300))
        case = replace(item.case, lengths=lengths, strides="plain", kv_heads=2, group=2, seed=seed)
        problem, inputs = replace(item, case=case).build(BF16, HERE)
        return problem, inputs, forwarded(problem, inputs)

    problem, inputs, what = drawn(1)
    run(problem, inputs, what)  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse)
    for seed in (1, 2, 3):
        other, new, given_then = drawn(seed)
        assert other == problem
        for mine, theirs in ((inputs, new), (what, given_then)):
            for name in mine.__dataclass_fields__:
                if isinstance(getattr(mine, name), torch.Tensor):
                    getattr(mine, name).copy_(getattr(theirs, name))
        expected = run(problem, new, given_then)
        for t in found[:3]:
            t.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert equal(found, expected, ("q", "k", "v", "sinks")), seed


@pytest.mark.gpu
@needs_hopper
def test_four_streams_at_once() -> None:
    chosen = [
        Variant(BF16, d, features=(*f, "deterministic")) for d in (64, 128, 256) for f in ((), ("varlen", "sinks"))
    ]
    pool = []
    for variant in chosen:
        for number in range(40):
            item = draw(variant, number)
            problem, inputs = item.build(BF16, HERE)
            if supports(problem) is None and min(inputs.q.shape[0], inputs.k.shape[0]):
                pool.append((problem, inputs, forwarded(problem, inputs)))
                break
    alone = [run(*item) for item in pool]
    torch.cuda.synchronize()
    chance, streams = random.Random(0), [torch.cuda.Stream() for _ in range(4)]
    for _ in range(10):
        found = []
        for _ in range(40):
            number = chance.randrange(len(pool))
            problem, inputs, what = pool[number]
            with torch.cuda.stream(chance.choice(streams)):
                found.append((number, hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse)))
        torch.cuda.synchronize()
        for number, grads in found:
            assert equal(grads, alone[number], ("q", "k", "v", "sinks")), pool[number][0].describe()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_launches_that_share_the_sms_end(head_dim: int, deterministic: bool) -> None:
    """Each has more tiles than there are SMs: none may hold an SM while it waits for a tile that has none."""
    problem, inputs = dense(2048, head_dim, batch=8, heads=8, kv_heads=4, causal=True, deterministic=deterministic)
    what = forwarded(problem, inputs)
    alone = run(problem, inputs, what)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    for number in range(18):
        with torch.cuda.stream(streams[number % 3]):
            found.append(hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse))
    torch.cuda.synchronize()
    for grads in found:
        assert equal(grads, alone, repeats(problem))
        torch.testing.assert_close(grads.q, alone.q, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_a_thread_that_has_not_used_cuda(head_dim: int) -> None:
    """Torch runs a backward pass in a thread of its own; the first there may be ours."""
    problem, inputs = dense(100, head_dim, deterministic=True)
    what = forwarded(problem, inputs)
    expected = run(problem, inputs, what)
    moved = Inputs(*(t.clone() for t in (inputs.q, inputs.k, inputs.v)))  # other addresses: maps are made anew
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(hopper_backward, problem, moved, what.out, what.lse, what.do, what.dlse).result()
    torch.cuda.synchronize()
    assert equal(found, expected, ("q", "k", "v"))


@pytest.mark.gpu
@needs_hopper
def test_rows_far_apart() -> None:
    """Rows of q, k, v and dO further apart than 2^31 elements."""
    rows, stride = 70, 1 << 25

    def far(*size: int) -> torch.Tensor:
        space = torch.empty(rows * stride + 64, dtype=BF16, device=HERE)
        return torch.as_strided(space, size, (1, stride, 1, 1)).normal_()

    q = far(1, rows, 1, 64)
    inputs = Inputs(q, q, q)
    problem = AttentionProblem.from_inputs(inputs, causal=True, deterministic=True)
    what = forwarded(problem, inputs)
    what = replace(what, do=far(1, rows, 1, 64))
    near = Inputs(*(t.contiguous() for t in (q, q, q)))
    found = run(problem, inputs, what)
    expected = run(
        AttentionProblem.from_inputs(near, causal=True, deterministic=True),
        near,
        replace(what, do=what.do.contiguous()),
    )
    assert equal(found, expected, ("q", "k", "v"))


@pytest.mark.gpu
@needs_hopper
def test_tensors_of_more_than_2_to_the_31_elements() -> None:
    """The last sequence of a call whose gradients and sums reach past 2^31 elements is as it is alone."""
    length, count, heads, head_dim = 1031, 132, 128, 128
    total = length * count
    if torch.cuda.get_device_properties(HERE).total_memory < 60 << 30:
        pytest.skip("needs 60 GB")
    q = torch.randn(total, heads, head_dim, device=HERE, dtype=BF16)
    k, v = (torch.randn(total, 8, head_dim, device=HERE, dtype=BF16) for _ in range(2))
    assert q.numel() > 1 << 31
    cu = torch.arange(count + 1, dtype=torch.int32, device=HERE) * length
    inputs = Inputs(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=length, max_seqlen_k=length)
    problem = AttentionProblem.from_inputs(inputs, causal=True, deterministic=True)
    what = forwarded(problem, inputs)
    found = hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse)
    last = slice(total - length, total)
    alone = replace(inputs, q=q[last], k=k[last], v=v[last], cu_seqlens_q=cu[:2], cu_seqlens_k=cu[:2])
    single = AttentionProblem.from_inputs(alone, causal=True, deterministic=True)
    logs = {name: getattr(what, name)[:, last].contiguous() for name in ("lse", "dlse")}
    expected = run(single, alone, replace(what, **logs, out=what.out[last], do=what.do[last]))
    for name in "qkv":
        assert torch.equal(getattr(found, name)[last], getattr(expected, name)), f"d{name}"


@pytest.mark.gpu
@needs_hopper
def test_follows_the_hopper_forward_in_training() -> None:
    """Through the public API: chosen after its own forward, with the sinks' gradient and that of the LSE."""
    problem, inputs = dense(203, 128, heads=8, causal=True)
    asked = replace(problem, needs_grad=True)
    assert select_backward(asked, KERNEL).tag == "hopper"
    sinks = torch.randn(8, device=HERE)
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v, sinks)]
    out, lse = flash_attn_func(*leaves[:3], causal=True, sinks=leaves[3], return_lse=True, kernel=KERNEL.tag)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad([out, lse], leaves, [do, dlse])
    with_sinks = replace(inputs, sinks=sinks)
    what = given(replace(problem, sinks=True), with_sinks, do, dlse)
    found = Gradients(*grads[:3], None, grads[3])
    assert not complaints(with_sinks, what, found)


@pytest.mark.gpu
@needs_hopper
def test_what_it_is_given_is_checked() -> None:
    problem, inputs = dense(64, 64)
    what = forwarded(problem, inputs)
    cases = (
        ("out", what.out[:, 1:]), ("out", what.out.float()), ("do", what.do[..., 1:]), ("do", what.do.half()),
        ("lse", what.lse.double()), ("lse", what.lse[:, 1:]), ("dlse", what.dlse.bfloat16()),
    )  # fmt: skip
    for name, wrong in cases:
        with pytest.raises(ValueError, match=rf"^{name} is "):
            run(problem, inputs, replace(what, **{name: wrong}))
    with pytest.raises(NotImplementedError, match="the Hopper backward cannot run"):
        hopper_backward(replace(problem, dropout_p=0.5), inputs, what.out, what.lse, what.do)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 64), (64, 0), (0, 0)])
def test_without_queries_or_keys(seqlen_q: int, seqlen_k: int) -> None:
    q, k = (torch.randn(2, n, 4, 64, device=HERE, dtype=BF16) for n in (seqlen_q, seqlen_k))
    inputs = Inputs(q, k, k.clone(), sinks=torch.randn(4, device=HERE))
    problem = AttentionProblem.from_inputs(inputs, causal=True)
    with torch.no_grad():
        out, lse = reference_attention(problem, inputs)
    do, dlse = torch.randn_like(out).to(BF16), torch.randn_like(lse)
    what = given(problem, inputs, do, dlse)
    poison(inputs)
    assert not complaints(inputs, what, hopper_backward(problem, inputs, what.out, what.lse, do, dlse))
