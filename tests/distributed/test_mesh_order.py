"""Meshes whose ranks are not in ascending order: a rank has the tokens of its place in the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pool import RankPool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

import flashlane
from flashlane import distributed as cp

LENGTH = 16
MESHES: tuple[Any, ...] = ([0, 1, 2, 3], [3, 1, 2, 0], [[0, 1], [3, 2]], [[0, 3], [2, 1]], [[3, 2, 1, 0]])
"""The first two have one process group, that of all ranks."""


def place_of(ranks: Any) -> int:
    """This rank's place in a mesh, counted row by row."""
    return torch.tensor(ranks).flatten().tolist().index(torch.distributed.get_rank())


def apart_on_meshes() -> list[float]:
    """How far outputs and gradients of calls on each mesh are from those of one process."""
    random = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, LENGTH, 4, 8, generator=random, dtype=torch.float64) for _ in range(4))
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    right = flashlane.flash_attn_func(*whole, causal=True)
    wanted = [right.detach(), *torch.autograd.grad(right, whole, do)]
    found = []
    for ranks in MESHES:
        mesh = DeviceMesh("cpu", ranks)
        methods = ("allgather", "ring", "ulysses") if mesh.ndim == 1 else ("usp",)
        for method in methods:
            for transport in ("messages", "copies") if method in ("allgather", "ulysses") else ("auto",):
                own = cp.token_indices(LENGTH, rank=place_of(ranks), world_size=4)
                part = [t[:, own].requires_grad_() for t in (q, k, v)]
                where: dict[str, Any] = {"group": mesh, "method": method, "transport": transport}
                out = cp.context_parallel_attn_func(*part, causal=True, **where)
                results = [out.detach(), *torch.autograd.grad(out, part, do[:, own])]
                found += [float((one - t[:, own]).abs().max()) for one, t in zip(results, wanted, strict=True)]
        shard = cp.shard_sequence(right.detach(), group=mesh)
        found.append(float((cp.unshard_sequence(shard, group=mesh) - right).abs().max()))
        with FakeTensorMode():
            assert cp.position_ids(LENGTH, group=mesh).shape == (LENGTH // 4,)
        compiled = torch.compile(lambda x, on=mesh: cp.shard_sequence(x, group=on), backend="eager", fullgraph=True)
        found.append(float((compiled(right.detach()) - shard).abs().max()))
    return found


@pytest.mark.slow
def test_a_rank_has_the_tokens_of_its_place_in_the_mesh(pool: RankPool) -> None:
    for apart in pool.run(apart_on_meshes):
        assert max(apart) < 1e-12, apart


def apart_under_torchs_context() -> float:
    random = torch.Generator().manual_seed(4)
    qkv = [torch.randn(1, 4, LENGTH, 8, generator=random) for _ in range(3)]
    buffers = [*qkv, F.scaled_dot_product_attention(*qkv, is_causal=True)]
    mesh = DeviceMesh("cpu", [3, 1, 2, 0])
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4), cp.context_parallel_sdpa(mesh):
        out = F.scaled_dot_product_attention(*buffers[:3], is_causal=True)
        return float((out - buffers[3]).abs().max())


@pytest.mark.slow
def test_torchs_context_divides_tokens_by_the_place_in_the_mesh(pool: RankPool) -> None:
    assert max(pool.run(apart_under_torchs_context)) < 1e-5


def refused_outside(first: int) -> list[str]:
    """The errors of calls on meshes of two ranks, on the ranks that they do not have."""
    x, errors = torch.randn(1, 4, 2, 8), []
    for ranks in ([first, first + 1], [[first], [first + 1]]):
        mesh = DeviceMesh("cpu", ranks)
        if mesh.get_coordinate() is None:
            for call in (cp.shard_sequence, cp.unshard_sequence, cp.token_indices, cp.context_parallel_attn_func):
                given = [4] if call is cp.token_indices else [x] * (3 if "attn" in call.__name__ else 1)
                with pytest.raises(ValueError) as error:
                    call(*given, group=mesh)
                errors.append(str(error.value))
    return errors


@pytest.mark.slow
def test_a_rank_outside_of_a_mesh_is_told(pool: RankPool) -> None:
    found = pool.run(refused_outside, 0)
    assert [len(each) for each in found] == [0, 0, 8, 8]
    assert {error for each in found for error in each} == {
        "group does not have this rank; every rank of the call must belong to it"
    }


def told_other_orders() -> str:
    mesh = DeviceMesh("cpu", [0, 1, 2, 3] if torch.distributed.get_rank() != 1 else [3, 1, 2, 0])
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError) as error:
        cp.context_parallel_attn_func(x, x, x, softmax_scale=0.123, group=mesh)
    return str(error.value)


@pytest.mark.slow
def test_ranks_that_have_other_orders_are_told(pool: RankPool) -> None:
    for error in pool.run(told_other_orders):
        assert (
            "the order of the ranks in group is 'ascending' on rank 0, [3, 1, 2, 0] on rank 1, 'ascending' on" in error
        )
