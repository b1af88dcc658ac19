"""What one GPU shows of several ranks: forwards that poll flags while keys come, and the steps of a ring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from flashlane.core.arch import arch_of
from flashlane.core.problem import AttentionProblem, CallOptions, Inputs
from flashlane.distributed import attend
from flashlane.distributed.attend import Settings, State, accumulate, attend_backward
from flashlane.distributed.layout import token_indices
from flashlane.distributed.modifiers import Flow, Modifiers
from flashlane.distributed.plan import Division, ring_calls
from flashlane.distributed.ring_parts import ring_parts
from flashlane.kernels.hopper.forward.kernel import KERNEL
from flashlane.reference.naive import reference_attention

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scripts" / "ranks_on_one_gpu.py"
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


needs_hopper = pytest.mark.skipif(arch_of(HERE) != "sm_90a", reason="needs an sm_90 GPU")


def ring_output(division: Division, rank: int, qkv: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, in f32, and LSE of a rank's queries, merged over the shards of all ranks in the order of a ring."""
    shards = [token_indices(division.layout, division.lengths, division.ranks, each) for each in range(division.ranks)]
    q, *_ = (t.index_select(1, shards[rank].to(HERE)) for t in qkv)
    state, settings = State(q, qkv[2].shape[3]), Settings(CallOptions(scale=q.shape[3] ** -0.5), kernel=KERNEL.tag)
    for step in range(division.ranks):
        shard = (rank - step) % division.ranks
        k, v = (t.index_select(1, shards[shard].to(HERE)) for t in qkv[1:])
        calls = ring_calls(division, rank, shard, False, False)
        accumulate(state, q, k, v, calls, Modifiers(), settings)
    return state.out, state.lse


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("layout, left", [("zigzag", -1), ("contiguous", 700), ("striped", -1)])
def test_a_ring_merges_outputs_that_were_not_rounded(layout: str, left: int) -> None:
    """Against f64, where P in bf16 has an error, too; outputs in bf16, as other rings merge them, add theirs."""
    torch.manual_seed(2)
    qkv = [torch.randn(1, 2003, heads, 128, dtype=torch.bfloat16, device=HERE) for heads in (8, 2, 2)]
    division = Division(layout, (2003,), 4, left, 0)  # type: ignore[arg-type]
    whole = Inputs(*(t.double() for t in qkv))
    right, right_lse = reference_attention(
        AttentionProblem.from_inputs(whole, scale=128**-0.5, causal=True, window_size=(left, 0)), whole, torch.float64
    )
    for rank in range(4):
        rows = token_indices(division.layout, division.lengths, 4, rank).to(HERE)
        with mock.patch.object(attend, "F32_PARTIALS", False):
            rounded, _ = ring_output(division, rank, qkv)
        out, lse = ring_output(division, rank, qkv)
        wanted = right.index_select(1, rows)
        error, before = (float((each.double() - wanted).norm() / wanted.norm()) for each in (out, rounded))
        assert error < 0.85 * before and error < 2e-3, (rank, error, before)
        assert float((lse.double() - right_lse.index_select(2, rows)).abs().max()) < 1e-4


def ring_dq(
    division: Division, rank: int, tensors: list[torch.Tensor], lse: torch.Tensor, in_one: bool
) -> torch.Tensor:
    """dQ of a rank's queries over the shards of all ranks in the order of a ring.

    Args:
        division: of the tokens.
        rank: of the queries.
        tensors: q, k, v, the output and its gradient, of all tokens.
        lse: of all tokens.
        in_one: whether all steps add to one dQ in f32.
    """
    shards = [token_indices(division.layout, division.lengths, division.ranks, each) for each in range(division.ranks)]
    q, k, v, out, do = (t.index_select(1, shards[rank].to(HERE)) for t in tensors)
    lse = lse.index_select(2, shards[rank].to(HERE)).contiguous()
    settings = Settings(CallOptions(scale=q.shape[3] ** -0.5), kernel=KERNEL.tag, needs_grad=True)
    dq = torch.empty_like(q) if in_one else torch.zeros_like(q, dtype=torch.float32)
    parts = ring_parts({}, division, rank, division.ranks, (q, k, v, out, do, dq), settings) if in_one else None
    running = parts.prepared.begin(q, out, lse, do, dq, 0) if parts else None
    for step in range(division.ranks):
        shard = (rank - step) % division.ranks
        kv = tuple(t.index_select(1, shards[shard].to(HERE)) for t in tensors[1:3])
        if parts and running:
            gradients = tuple(torch.empty_like(t, dtype=torch.float32) for t in kv)
            for number, rows in parts.steps[step]:
                running.part(number, kv, rows.start, gradients, rows.start)
            continue
        for call in ring_calls(division, rank, shard, False, False).calls:
            attend_backward(dq, q, *kv, Flow(out, lse, do, None), call, Modifiers(), settings)
    if running:
        running.end()
    return dq.to(q.dtype)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_a_ring_rounds_dq_once(layout: str) -> None:
    """Against f64: dQ that is rounded at each of four steps has a larger error on a rank that has several."""
    torch.manual_seed(3)
    qkv = [torch.randn(1, 2003, heads, 128, dtype=torch.bfloat16, device=HERE) for heads in (8, 2, 2)]
    do = torch.randn_like(qkv[0])
    division = Division(layout, (2003,), 4, -1, 0)  # type: ignore[arg-type]
    whole = Inputs(*(t.double().requires_grad_() for t in qkv))
    problem = AttentionProblem.from_inputs(whole, scale=128**-0.5, causal=True)
    out, lse = reference_attention(problem, whole, torch.float64)
    right = torch.autograd.grad(out, whole.q, do.double())[0]
    tensors = [*qkv, out.detach().to(do.dtype), do]
    rows = token_indices(division.layout, division.lengths, 4, 3).to(HERE)
    wanted = right.index_select(1, rows)
    errors = []
    for in_one in (False, True):
        found = ring_dq(division, 3, tensors, lse.detach().float(), in_one)
        errors.append(float((found.double() - wanted).norm() / wanted.norm()))
    assert errors[1] < 0.95 * errors[0] and errors[1] < 4e-3, errors


@pytest.mark.gpu
@needs_hopper
def test_ranks_of_one_gpu(tmp_path: Path) -> None:
    """In a process of its own, as a kernel that waits too long ends its use of the GPU."""
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--seconds", "150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    file = tmp_path / "ranks_on_one_gpu.json"
    output = done.stdout[-3000:] + done.stderr[-2000:]
    assert file.exists(), output
    parts = json.loads(file.read_text())
    # A machine may refuse CUDA IPC, and with it two processes; torch may refuse two ranks on one GPU.
    apart = [each for each in parts if each["part"] in ("two processes", "symmetric memory")]
    found = [each for each in parts if each not in apart]
    wrong = [each for each in found if each.get("ok") is False or "skipped" in each]
    wrong += [each for each in apart if each.get("ok") is False and "ranks" in each]
    assert len(found) > 5 and not wrong, output
