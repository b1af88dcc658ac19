"""Launches of the Hopper backward on a GPU: repeats to the bit, graphs, streams, threads, far strides and offsets."""

from __future__ import annotations

import itertools
import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from backward_rule import BackwardInputs
from hopper_gradients import (
    BF16,
    HERE,
    Variant,
    dense,
    draw,
    equal,
    forwarded,
    needs_hopper,
    repeats,
    run,
)

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.hopper.backward.kernel import KERNEL, hopper_backward, supports
from flashlane.kernels.hopper.backward.launch import PreparedBackward


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
    def drawn(seed: int) -> tuple[AttentionProblem, Inputs, BackwardInputs]:
        item = draw(Variant(BF16, head_dim, features=(*features, "deterministic")), 5)
        lengths = ((300, 300), (65, 129), (0, 17)) if "varlen" in features else ((300, 300), (300, 300))
        case = replace(item.case, lengths=lengths, strides="plain", kv_heads=2, group=2, seed=seed)
        problem, inputs = replace(item, case=case).build(BF16, HERE)
        return problem, inputs, forwarded(problem, inputs)

    problem, inputs, what = drawn(1)
    run(problem, inputs, what)  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse)
    for seed in (1, 2, 3):
        other, new, given_then = drawn(seed)
        assert other == problem
        for mine, theirs in ((inputs, new), (what, given_then)):
            for name in mine.__dataclass_fields__:
                if isinstance(getattr(mine, name), torch.Tensor):
                    getattr(mine, name).copy_(getattr(theirs, name))
        expected = run(problem, new, given_then)
        for t in gradients[:3]:
            t.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert equal(gradients, expected, ("q", "k", "v", "sinks")), seed


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
        results = []
        for _ in range(40):
            number = chance.randrange(len(pool))
            problem, inputs, what = pool[number]
            with torch.cuda.stream(chance.choice(streams)):
                results.append((number, hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse)))
        torch.cuda.synchronize()
        for number, grads in results:
            assert equal(grads, alone[number], ("q", "k", "v", "sinks")), pool[number][0].describe()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
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
    moved = Inputs(*(t.clone() for t in (inputs.q, inputs.k, inputs.v)))  # other addresses: maps are made again
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
    grads = run(problem, inputs, what)
    expected = run(
        AttentionProblem.from_inputs(near, causal=True, deterministic=True),
        near,
        replace(what, do=what.do.contiguous()),
    )
    assert equal(grads, expected, ("q", "k", "v"))


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
    grads = hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse)
    last = slice(total - length, total)
    alone = replace(inputs, q=q[last], k=k[last], v=v[last], cu_seqlens_q=cu[:2], cu_seqlens_k=cu[:2])
    single = AttentionProblem.from_inputs(alone, causal=True, deterministic=True)
    logs = {name: getattr(what, name)[:, last].contiguous() for name in ("lse", "dlse")}
    expected = run(single, alone, replace(what, **logs, out=what.out[last], do=what.do[last]))
    for name in "qkv":
        assert torch.equal(getattr(grads, name)[last], getattr(expected, name)), f"d{name}"


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 192, 256])
def test_rows_of_no_sequence_have_no_gradient(
    head_dim: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory that held NaN: rows after the last sequence, and those of sequences without keys or queries."""
    lengths = {"q": (300, 0, 17, 129, 1), "k": (200, 70, 0, 333, 5)}
    tail, heads, group = {"q": 75, "k": 500}, 6, 3
    cus = {side: [0, *itertools.accumulate(gradients)] for side, gradients in lengths.items()}
    size = {side: (cus[side][-1] + tail[side], heads // (1 if side == "q" else group), head_dim) for side in "qk"}
    q, k, v = (torch.randn(size[side], device=HERE, dtype=BF16) for side in "qkk")
    inputs = Inputs(
        q, k, v, max_seqlen_q=300, max_seqlen_k=333,
        **{f"cu_seqlens_{side}": torch.tensor(cus[side], dtype=torch.int32, device=HERE) for side in "qk"},
    )  # fmt: skip
    problem = AttentionProblem.from_inputs(inputs, causal=True, deterministic=deterministic)
    what = forwarded(problem, inputs)
    allocate = PreparedBackward.allocate
    monkeypatch.setattr(PreparedBackward, "allocate", lambda *given: tuple(t.fill_(math.nan) for t in allocate(*given)))
    gradients = hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse)
    assert not any(torch.isnan(t).any() for t in gradients[:3])
    for side, names in (("q", "q"), ("k", "kv")):
        for name in names:
            assert not getattr(gradients, name)[cus[side][-1] :].any(), f"d{name} after the last sequence"
    assert not gradients.q[cus["q"][2] : cus["q"][3]].any() and not gradients.k[cus["k"][1] : cus["k"][2]].any()
    assert all(t[:200].any() for t in gradients[:3])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dq_is_written_to_a_given_place(head_dim: int, deterministic: bool) -> None:
    problem, inputs = dense(777, head_dim, causal=True, deterministic=deterministic)
    what = replace(forwarded(problem, inputs), dlse=None)
    expected = run(problem, inputs, what)
    repeat = KERNEL.prepare(problem, inputs)
    wide = torch.full((2, 900, 12, head_dim), math.nan, dtype=BF16, device=HERE)
    dq_out = wide[:, 50:827, 4:8]
    dq, dk, dv = repeat(inputs.q, inputs.k, inputs.v, what.out, what.lse, what.do, dq_out)
    torch.cuda.synchronize()
    assert dq is dq_out and torch.equal(dk, expected.k) and torch.equal(dv, expected.v)
    torch.testing.assert_close(
        dq, expected.q, **({"rtol": 0, "atol": 0} if deterministic else {"rtol": 0.02, "atol": 0.02})
    )
    assert int(wide.isnan().sum()) == wide.numel() - dq_out.numel(), "rows or heads around it were written"
