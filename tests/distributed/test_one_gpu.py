"""What one GPU shows of several ranks: forwards that poll flags while keys come, and the steps of a ring."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from flashlane.core import dispatch
from flashlane.core.arch import arch_of
from flashlane.core.problem import AttentionProblem, CallOptions, Inputs
from flashlane.distributed import attend
from flashlane.distributed.attend import Settings, State, accumulate, attend_backward
from flashlane.distributed.calls import Packed
from flashlane.distributed.layout import Layout, token_indices
from flashlane.distributed.modifiers import Flow, Modifiers
from flashlane.distributed.plan import Division, ring_calls
from flashlane.distributed.ring_parts import ring_parts
from flashlane.kernels.hopper.forward.kernel import KERNEL
from flashlane.reference.naive import reference_attention

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scripts" / "ranks_on_one_gpu.py"
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


needs_hopper = pytest.mark.skipif(arch_of(HERE) != "sm_90a", reason="needs an sm_90 GPU")


@dataclass(frozen=True)
class Ring:
    """One call over four ranks in bf16, of which one device computes a rank's dQ."""

    layout: Layout = "zigzag"
    lengths: tuple[int, ...] = (2003,)
    left: int = -1
    head_dim: int = 128
    softcap: float = 0.0
    deterministic: bool = False
    modifiers: tuple[str, ...] = ()

    @property
    def division(self) -> Division:
        return Division(self.layout, self.lengths, 4, self.left, 0)

    @property
    def settings(self) -> Settings:
        options = CallOptions(self.head_dim**-0.5, softcap=self.softcap, deterministic=self.deterministic)
        named = HERE.type == "cuda" and "logit_scale" not in self.modifiers  # which Triton's kernels have
        return Settings(options, kernel=KERNEL.tag if named else None, needs_grad=True)

    def draw(self) -> tuple[list[torch.Tensor], Modifiers]:
        """q, k, v and the gradient of the output, of all tokens; and the modifiers."""
        torch.manual_seed(3)
        shapes = [(1, sum(self.lengths), heads, self.head_dim) for heads in (8, 2, 2, 8)]
        tensors = [torch.randn(shape, dtype=torch.bfloat16, device=HERE) for shape in shapes]
        values = {"alibi_slopes": torch.rand(8, device=HERE), "sinks": torch.randn(8, device=HERE).bfloat16()}
        values["logit_scale"] = torch.rand(8, device=HERE) + 0.5
        return tensors, Modifiers(**{name: values[name] for name in self.modifiers})

    def problem(self, qkv: list[torch.Tensor], modifiers: Modifiers) -> tuple[AttentionProblem, Inputs]:
        """The call as one process has it."""
        if len(self.lengths) == 1:
            inputs = Inputs(*qkv, **modifiers._asdict())
        else:
            cu = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=HERE)
            packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
            packed |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(self.lengths))
            inputs = Inputs(*(t[0] for t in qkv), **modifiers._asdict(), **packed)
        options = self.settings.options._replace(causal=True, window_size=(self.left, 0))
        return AttentionProblem.from_inputs(inputs, options), inputs

    def exact(self, tensors: list[torch.Tensor], modifiers: Modifiers) -> tuple[torch.Tensor, ...]:
        """The output, its LSE and dQ in f64."""
        *qkv, do = tensors
        q, *kv = (t.double() for t in qkv)
        problem, inputs = self.problem([q.requires_grad_(), *kv], modifiers)
        out, lse = reference_attention(problem, inputs, torch.float64)
        out, lse = (out, lse) if len(self.lengths) == 1 else (out[None], lse[None])
        return out.detach(), lse.detach(), torch.autograd.grad(out, q, do.double())[0]


def ring_output(ring: Ring, rank: int, qkv: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, in f32, and LSE of a rank's queries, merged over the shards of all ranks in the order of a ring."""
    shards = [token_indices(ring.layout, ring.lengths, 4, each).to(HERE) for each in range(4)]
    q = qkv[0].index_select(1, shards[rank])
    state = State(q, qkv[2].shape[3])
    for step in range(4):
        shard = (rank - step) % 4
        k, v = (t.index_select(1, shards[shard]) for t in qkv[1:])
        calls = ring_calls(ring.division, rank, shard, True, False)
        accumulate(state, q, k, v, calls, Modifiers(), ring.settings)
    return state.out, state.lse


DOCUMENTS = (400, 3, 800, 1, 0, 500, 299)
MERGED = {
    "zigzag": Ring(),
    "contiguous, window": Ring("contiguous", left=700),
    "striped": Ring("striped"),
    "documents": Ring(lengths=DOCUMENTS),
    "documents, window, D64": Ring(lengths=DOCUMENTS, left=150, head_dim=64),
    "documents, D256": Ring(lengths=DOCUMENTS, head_dim=256),
    "documents, striped": Ring("striped", lengths=DOCUMENTS),
}


@pytest.mark.parametrize("name", [name for name in MERGED if name.startswith("documents")])
def test_steps_of_documents_are_packed_sequences(name: str) -> None:
    ring, packed = MERGED[name], 0
    tokens = [token_indices(ring.layout, ring.lengths, 4, rank) for rank in range(4)]
    documents = torch.repeat_interleave(torch.arange(len(ring.lengths)), torch.tensor(ring.lengths))
    for rank, shard in itertools.product(range(4), range(4)):
        calls = ring_calls(ring.division, rank, shard, True, False).calls
        apart = tokens[rank][:, None] - tokens[shard]
        sees = (documents[tokens[rank]][:, None] == documents[tokens[shard]]) & (apart >= 0)
        if ring.left >= 0:
            sees &= apart <= ring.left
        computed = torch.zeros(sees.shape, dtype=torch.int32)
        for call in calls:
            blocks = call.blocks if isinstance(call, Packed) else (call,)
            for block in blocks:  # all of a call have the window of the first one
                computed[block.q_first : block.q_stop, block.k_first : block.k_stop] += seen_by_a_kernel(
                    block.q_stop - block.q_first, block.k_stop - block.k_first, blocks[0].left, blocks[0].right
                )
            if isinstance(call, Packed):
                packed += 1
                ends = [0, *(stop for _, stop, _ in call.sequences)]
                assert [first for first, *_ in call.sequences] == ends[:-1] and ends[-1] == len(sees)
                assert tuple(block for *_, block in call.sequences if block) == call.blocks
        assert torch.equal(computed, sees.int()), (rank, shard)
    assert packed > 0


def seen_by_a_kernel(rows: int, keys: int, left: int, right: int) -> torch.Tensor:
    """Which keys a sequence's queries see under a window, which is aligned with the last query and the last key."""
    apart = torch.arange(rows)[:, None] + (keys - rows) - torch.arange(keys)
    return ((apart <= left) | (left < 0)) & ((-apart <= right) | (right < 0))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("ring", MERGED.values(), ids=MERGED)
def test_a_ring_merges_outputs_that_were_not_rounded(ring: Ring) -> None:
    """Against f64, where P in bf16 has an error, too; outputs in bf16, as other rings merge them, add theirs."""
    tensors, modifiers = ring.draw()
    right, right_lse, _ = ring.exact(tensors, modifiers)
    for rank in range(4):
        rows = token_indices(ring.layout, ring.lengths, 4, rank).to(HERE)
        with mock.patch.object(attend, "F32_PARTIALS", False):
            rounded, _ = ring_output(ring, rank, tensors[:3])
        out, lse = ring_output(ring, rank, tensors[:3])
        wanted = right.index_select(1, rows)
        error, before = (float((each.double() - wanted).norm() / wanted.norm()) for each in (out, rounded))
        assert error < 0.85 * before and error < 2e-3, (rank, error, before)
        assert float((lse.double() - right_lse.index_select(2, rows)).abs().max()) < 1e-4


def ring_dq(
    ring: Ring,
    rank: int,
    tensors: list[torch.Tensor],
    lse: torch.Tensor,
    modifiers: Modifiers,
    in_one: bool = False,
) -> torch.Tensor:
    """dQ of a rank's queries over the shards of all ranks in the order of a ring.

    Args:
        ring: the call.
        rank: of the queries.
        tensors: q, k, v, the output and its gradient, of all tokens.
        lse: of all tokens.
        modifiers: of the call.
        in_one: whether all steps are launches that add to one dQ.
    """
    division, settings = ring.division, ring.settings
    shards = [token_indices(ring.layout, ring.lengths, 4, each).to(HERE) for each in range(4)]
    q, k, v, out, do = (t.index_select(1, shards[rank]) for t in tensors)
    lse = lse.index_select(2, shards[rank]).contiguous()
    dq = torch.empty_like(q) if in_one else torch.zeros_like(q, dtype=torch.float32)
    parts = ring_parts({}, division, rank, 4, (q, k, v, out, do, dq), settings) if in_one else None
    assert bool(parts) == in_one
    running = parts.prepared.begin(q, out, lse, do, dq, 0) if parts else None
    for step in range(4):
        shard = (rank - step) % 4
        kv = tuple(t.index_select(1, shards[shard]) for t in tensors[1:3])
        if parts and running:
            gradients = tuple(torch.empty_like(t, dtype=torch.float32) for t in kv)
            for number, rows in parts.steps[step]:
                running.part(number, kv, rows.start, gradients, rows.start)
            continue
        for call in ring_calls(division, rank, shard, True, modifiers.positional).calls:
            attend_backward(dq, q, *kv, Flow(out, lse, do, None), call, modifiers, settings)
    if running:
        running.end()
    return dq.to(q.dtype)


def dq_errors(ring: Ring, ways: tuple[str, ...], ranks: tuple[int, ...]) -> dict[str, float]:
    """Errors of dQ of these ranks against f64: of one process, of parts in f32, of parts in bf16, of one dQ."""
    drawn, modifiers = ring.draw()
    out, lse, right = ring.exact(drawn, modifiers)
    *qkv, do = drawn
    tensors, lse = [*qkv, out.bfloat16(), do], lse.float()
    rows = [token_indices(ring.layout, ring.lengths, 4, rank).to(HERE) for rank in ranks]
    wanted = right.index_select(1, torch.cat(rows))

    def found(way: str) -> torch.Tensor:
        if way == "one process":
            problem, inputs = ring.problem(qkv, modifiers)
            given = (tensors[3], lse, do) if len(ring.lengths) == 1 else (tensors[3][0], lse[0], do[0])
            problem = replace(problem, needs_grad=True)
            kernel = dispatch.select(problem, ring.settings.kernel)
            grads = dispatch.select_backward(problem, kernel).run(problem, inputs, *given, bias_grad=False)
            return grads.q.view_as(qkv[0]).index_select(1, torch.cat(rows))
        with mock.patch.object(attend, "F32_GRADIENTS", way != "bf16"):
            return torch.cat([ring_dq(ring, rank, tensors, lse, modifiers, way == "in one") for rank in ranks], 1)

    return {way: float((found(way).double() - wanted).norm() / wanted.norm()) for way in ways}


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_a_ring_rounds_dq_once(layout: Layout) -> None:
    """Against f64: dQ that is rounded at each of four steps has a larger error on a rank that has several."""
    errors = dq_errors(Ring(layout), ("bf16", "f32", "in one"), (3,))
    assert all(errors[way] < 0.95 * errors["bf16"] and errors[way] < 4e-3 for way in ("f32", "in one")), errors


RINGS = {
    "window": Ring(left=700),
    "window, deterministic": Ring(left=700, deterministic=True),
    "documents": Ring(lengths=DOCUMENTS),
    "documents, deterministic": Ring(lengths=DOCUMENTS, deterministic=True, head_dim=64),
    "two documents": Ring(lengths=(1200, 803), head_dim=96),
    "deterministic": Ring(deterministic=True),
    "deterministic, D64": Ring(deterministic=True, head_dim=64),
    "softcap": Ring(softcap=20.0),
    "ALiBi": Ring("striped", modifiers=("alibi_slopes",)),
    "sinks": Ring("striped", modifiers=("sinks",), head_dim=64),
    "all": Ring("striped", (1200, 803), 900, 64, 20.0, True, ("alibi_slopes", "sinks")),
    "logit scale": Ring(modifiers=("logit_scale",)),
    "D192": Ring(head_dim=192),
    "D192, window": Ring(head_dim=192, left=700),
    "D256, documents, deterministic": Ring(lengths=DOCUMENTS, deterministic=True, head_dim=256),
}


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("ring", RINGS.values(), ids=RINGS)
def test_the_steps_of_a_ring_have_a_dq_in_f32(ring: Ring) -> None:
    """Whatever the steps have, the sum is as near to f64 as the dQ of one process, and nearer than that of bf16."""
    errors = dq_errors(ring, ("one process", "f32", "bf16"), (0, 1, 2, 3))
    assert errors["f32"] < 1.05 * errors["one process"] and errors["f32"] < 0.97 * errors["bf16"], errors


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
