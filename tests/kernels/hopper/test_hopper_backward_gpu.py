"""The Hopper backward on a GPU: thousands of drawn problems by the peers' rule, and in training.

That what is drawn is legal is tested anywhere.
"""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from backward_rule import backward_inputs, complaints, poison
from hopper_gradients import (
    ARCH,
    BF16,
    DRAWS,
    FEATURES,
    HERE,
    KERNEL,
    VARIANTS,
    Variant,
    dense,
    draw,
    equal,
    forwarded,
    needs_hopper,
    refusal,
    repeats,
    run,
)

from flashlane import flash_attn_func, jit
from flashlane.core.dispatch import select_backward
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.backward.kernel import config_of, hopper_backward, supports
from flashlane.reference.naive import reference_attention
from flashlane.reference.tiled import Gradients

refused: collections.Counter[str] = collections.Counter()
judged: collections.Counter[str] = collections.Counter()


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
    rows, what = item.backward_inputs(problem, inputs)
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
        rows, what = item.backward_inputs(problem, inputs)
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
    what = backward_inputs(replace(problem, sinks=True), with_sinks, do, dlse)
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
        with pytest.raises((TypeError, ValueError), match=rf"^{name} has (shape|dtype) "):
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
    what = backward_inputs(problem, inputs, do, dlse)
    poison(inputs)
    assert not complaints(inputs, what, hopper_backward(problem, inputs, what.out, what.lse, do, dlse))
