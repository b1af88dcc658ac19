"""A rank's backward in parts of its keys: launches add to one dQ, and each key's gradients come from one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashlane.core.arch import arch_of
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.ranges import KeyPart, QueryRanges
from flashlane.core.registry import BackwardKernel
from flashlane.distributed.key_parts import KeysOfRank, keys_of_rank
from flashlane.distributed.layout import rows_of, token_indices
from flashlane.distributed.plan import Division, Segment, gather_calls, gather_plan
from flashlane.kernels.hopper.backward.kernel import KERNEL, config_of_rank
from flashlane.kernels.hopper.backward.launch import COUNTERS
from flashlane.kernels.hopper.backward.parts import COUNTERS_OF_A_PART, BackwardParts
from flashlane.reference.naive import reference_attention

ARCH = "sm_90a"
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_hopper = pytest.mark.skipif(arch_of(HERE) != ARCH, reason="needs an sm_90 GPU")
PLAIN = AttentionProblem(
    batch=1, heads=8, kv_heads=2, seqlen_q=1000, seqlen_k=1000, head_dim=128, head_dim_v=128, dtype=torch.bfloat16,
    scale=128**-0.5, window_right=0, needs_grad=True, arch=ARCH,
)  # fmt: skip
PARTS = (
    KeyPart(500, QueryRanges(500, (-500, 0))),
    KeyPart(1300, QueryRanges(500, (-500, 1300))),
    KeyPart(500, QueryRanges(500, (0, 500))),
)


def test_launches_share_row_statistics_and_sums() -> None:
    config = replace(config_of_rank(PLAIN, PARTS[0].ranges), split_q=False)
    parts = BackwardParts(config, PLAIN, PARTS, torch.Size((1, 1000, 8, 128)), torch.Size((1, 1000, 2, 128)), 0, 132)
    assert len({each.rows.row_blocks for each in parts.prepared}) == 1
    assert len({tuple(each.workspace.offsets.items()) for each in parts.prepared}) == 1
    assert [each.schedule.gradients[0].sizes["blocks"] for each in parts.prepared] == [4, 11, 4]
    assert parts.words == parts.counters + 3 * COUNTERS_OF_A_PART
    # The preprocess kernel zeroes the counters of all parts, and no word behind the memory of the call.
    assert parts.counters + COUNTERS + parts.further_counters == parts.words
    assert not config.split_q and config.f32_dkdv and config.postprocess == "own_launch"


def test_what_has_no_parts() -> None:
    q, k = torch.empty(1, 8, 8, 128, device="meta"), torch.empty(1, 8, 2, 128, device="meta")
    for change in ({"deterministic": True}, {"window_left": 100}, {"softcap": 2.0}, {"head_dim": 192}):
        assert KERNEL.prepare_parts(replace(PLAIN, **change), Inputs(q, k, k), PARTS) is None
    assert BackwardKernel.prepare_parts(KERNEL, PLAIN, Inputs(q, k, k), PARTS) is None


def of_rank(
    keys: KeysOfRank,
    own_keys: tuple[Segment, ...],
    problem: AttentionProblem,
    local: list[torch.Tensor],
    gathered: list[torch.Tensor],
) -> list[torch.Tensor]:
    """dq, and dk and dv of all gathered keys; the tensors are q, k, v, out, lse and do of the rank."""
    q, k, v, out, lse, do = local
    prepared = KERNEL.prepare_parts(problem, Inputs(q, k, v), keys.launches)
    dq = torch.full_like(q, torch.nan)
    totals, of_own = (
        [torch.full(t.shape, torch.nan, dtype=torch.float32, device=HERE) for t in some] for some in (gathered, (k, v))
    )
    running = prepared.begin(q, out, lse, do, dq)
    *first, last = keys.own
    for number, row in enumerate(first):
        running.part(number, (k, v), row, of_own, row)
    for number, places in enumerate(keys.foreign, len(first)):
        running.part(number, gathered, places.start, totals, places.start)
    running.part(len(keys.launches) - 1, (k, v), last, of_own, last)
    running.end()
    for total, own in zip(totals, of_own, strict=True):
        for row, key, count in own_keys:
            total[:, key : key + count] = own[:, row : row + count]
    return [dq, *totals]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("tokens, ranks, heads", [(4001, 2, (8, 2)), (2048, 3, (4, 4)), (517, 2, (4, 1))])
@pytest.mark.parametrize("head_dim, early", [(64, True), (128, False), (128, True)])
def test_all_ranks_against_f64(
    layout: str, tokens: int, ranks: int, heads: tuple[int, int], head_dim: int, early: bool
) -> None:
    """No farther than twice the kernel's own backward of the whole problem, which rounds dK and dV."""
    torch.manual_seed(4)
    shapes = [(1, tokens, each, head_dim) for each in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, do = (torch.randn(shape, dtype=torch.bfloat16, device=HERE) for shape in shapes)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    problem = AttentionProblem.from_inputs(Inputs(q, k, v), scale=head_dim**-0.5, causal=True)
    out, lse = reference_attention(problem, Inputs(*wide), torch.float64)
    right = torch.autograd.grad(out, wide, do.double())
    out, lse = out.detach().bfloat16(), lse.detach().float()
    alone = KERNEL.run(replace(problem, needs_grad=True), Inputs(q, k, v), out, lse.contiguous(), do)
    found = [torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v)]
    division = Division(layout, (tokens,), ranks, -1, 0)  # type: ignore[arg-type]
    taken = 0
    for rank in range(ranks):
        plan, calls = gather_plan(division, rank), gather_calls(division, rank, True, False)
        keys = keys_of_rank(plan, calls, early)
        own = token_indices(layout, (tokens,), ranks, rank).to(HERE)  # type: ignore[arg-type]
        places = torch.cat([torch.tensor(run.positions) for run in plan.runs]).to(HERE)
        assert rows_of(division.shard(rank)) == len(own)
        if keys is None:  # the first of contiguous shards, which needs no other rank
            given = (t.index_select(1, own) for t in (q, k, v))
            of_own = replace(problem, seqlen_q=len(own), seqlen_k=len(own), needs_grad=True)
            grads = KERNEL.run(of_own, Inputs(*given), out.index_select(1, own), lse.index_select(2, own).contiguous(),
                               do.index_select(1, own))  # fmt: skip
            grads, places = (grads.q, grads.k, grads.v), own
        else:
            taken += 1
            local = [t.index_select(1, own) for t in (q, k, v, out)]
            local += [lse.index_select(2, own), do.index_select(1, own)]
            of_rank_problem = replace(problem, seqlen_q=len(own), seqlen_k=len(own), needs_grad=True)
            gathered = [t.index_select(1, places) for t in (k, v)]
            grads = of_rank(keys, plan.received[rank], of_rank_problem, local, gathered)
        found[0].index_add_(1, own, grads[0].float())
        for total, grad in zip(found[1:], grads[1:], strict=True):
            total.index_add_(1, places, grad.float())
    assert taken >= ranks - 1
    for ours, one, wanted in zip(found, (alone.q, alone.k, alone.v), right, strict=True):
        error, before = (float((t.double() - wanted).norm() / wanted.norm()) for t in (ours, one))
        assert error <= 2 * before, (error, before)
