"""A call is known by the contents of its arguments and by its process groups, not by the objects that it was given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_pool import RankPool, first_ranks

import flashlane
from flashlane import distributed as cp
from flashlane.distributed import functional

LENGTH = 13
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def whole_tensors() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    return [torch.randn(1, LENGTH, 2, 8, generator=random) for _ in "qkv"]


def after_a_change(name: str) -> None:
    """Two calls with one object, which is written to between them, against one process each time."""
    group, qkv = first_ranks(2), whole_tensors()
    made = {
        "softmax_scale": (lambda: torch.tensor(0.1), lambda t: t.fill_(2.0)),
        "array of softmax_scale": (lambda: numpy.array(0.1), lambda t: t.fill(2.0)),
        "window_size": (lambda: torch.tensor([-1, -1]), lambda t: t.copy_(torch.tensor([2, 0]))),
        "a side of window_size": (lambda: [torch.tensor(-1), -1], lambda sides: sides[0].fill_(2)),
        "causal": (lambda: torch.tensor(True), lambda t: t.fill_(False)),
    }
    make, change = made[name]
    argument = name.split(" of ")[-1]
    value = make()
    shards = [cp.shard_sequence(t, group=group) for t in qkv]
    more: dict[str, Any] = {"causal": True} if argument != "causal" else {}
    for _ in range(2):
        out = cp.context_parallel_attn_func(*shards, **more, **{argument: value}, seqlen=LENGTH, group=group)
        plain = value.item() if getattr(value, "ndim", None) == 0 else tuple(map(int, value))
        right = flashlane.flash_attn_func(*qkv, **more, **{argument: plain})
        torch.testing.assert_close(out, cp.shard_sequence(right, group=group), **CLOSE, msg=lambda m: f"{name}: {m}")
        change(value)


def after_other_lengths() -> None:
    """Packed documents and the length of a sequence in tensors that are written to between two calls."""
    group, qkv = first_ranks(2), whole_tensors()
    ends = [torch.tensor(0), torch.tensor(6), torch.tensor(LENGTH)]
    for middle in (6, 7):
        ends[1].fill_(middle)
        cu = torch.tensor([0, middle, LENGTH], dtype=torch.int32)
        for layout in ("contiguous", "striped"):
            shards = [cp.shard_sequence(t[0], 0, cu_seqlens=cu, layout=layout, group=group) for t in qkv]
            out = cp.context_parallel_attn_varlen_func(*shards, ends, causal=True, layout=layout, group=group)
            right = flashlane.flash_attn_varlen_func(*(t[0] for t in qkv), cu, cu, LENGTH, LENGTH, causal=True)
            own = cp.shard_sequence(right, 0, cu_seqlens=cu, layout=layout, group=group)
            torch.testing.assert_close(out, own, **CLOSE)
    seqlen = torch.tensor(LENGTH)
    shards = [cp.shard_sequence(t, group=group) for t in qkv]
    cp.context_parallel_attn_func(*shards, seqlen=seqlen, group=group)
    seqlen.fill_(4 * LENGTH)
    with pytest.raises(ValueError, match=r"q has \d rows on rank"):
        cp.context_parallel_attn_func(*shards, seqlen=seqlen, group=group)


def under_torchs_name() -> None:
    group, qkv = first_ranks(2), [t.transpose(1, 2) for t in whole_tensors()]
    shards = [cp.shard_sequence(t, 2, group=group) for t in qkv]
    scale = torch.tensor(0.4)
    for _ in range(2):
        right = F.scaled_dot_product_attention(*qkv, is_causal=True, scale=float(scale))
        with cp.context_parallel_sdpa(group, seqlen=LENGTH):
            out = F.scaled_dot_product_attention(*shards, is_causal=True, scale=scale)
        torch.testing.assert_close(out, cp.shard_sequence(right, 2, group=group), **CLOSE)
        scale.mul_(3)


def with_changed_objects() -> bool:
    for name in (
        "softmax_scale", "array of softmax_scale", "window_size", "a side of window_size", "causal",
    ):  # fmt: skip
        after_a_change(name)
    after_other_lengths()
    under_torchs_name()
    return True


@pytest.mark.slow
def test_what_was_written_to_since_is_read_again(pool: RankPool) -> None:
    assert pool.run(with_changed_objects, ranks=[0, 1]) == [True] * 2


def kept_calls() -> list[int]:
    """How many calls are kept after two of the same contents in new objects, of each kind of object."""
    group, qkv = first_ranks(2), whole_tensors()
    shards = [cp.shard_sequence(t, group=group) for t in qkv]
    counts = []
    for make in (lambda: torch.tensor(0.3), lambda: numpy.float32(0.3), lambda: 0.3):
        functional._agreed.clear()
        for _ in range(2):
            cp.context_parallel_attn_func(*shards, softmax_scale=make(), seqlen=LENGTH, group=group)
        counts.append(len(functional._agreed))
    return counts


@pytest.mark.slow
def test_new_objects_of_the_same_contents_are_a_known_call(pool: RankPool) -> None:
    assert pool.run(kept_calls, ranks=[0, 1]) == [[1, 1, 1]] * 2


def on_new_groups(folder: str) -> list[Any]:
    """Calls on an equal mesh before and after new process groups replace them; what is kept of the first ones."""
    rank, qkv = dist.get_rank(), whole_tensors()
    right = flashlane.flash_attn_func(*qkv, causal=True)
    found = []
    for number in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=2)
        for shape in ((2,), (1, 2)):
            mesh = dist.device_mesh.init_device_mesh("cpu", shape)
            shards = [cp.shard_sequence(t, group=mesh) for t in qkv]
            for _ in range(2):
                out = cp.context_parallel_attn_func(*shards, causal=True, seqlen=LENGTH, group=mesh)
            torch.testing.assert_close(out, cp.shard_sequence(right, group=mesh), **CLOSE)
        found.append(len(functional._agreed))
    return found


@pytest.mark.slow
def test_an_equal_mesh_of_new_process_groups(tmp_path: Path) -> None:
    """Calls of destroyed groups are neither made again nor kept."""
    own = RankPool(2, tmp_path)
    try:
        assert own.run(on_new_groups, os.fspath(tmp_path)) == [[2, 2]] * 2
    finally:
        own.close()


AT_THE_END = """
import atexit, sys, weakref
groups = []
atexit.register(lambda: print("kept" if groups[0]() is not None else "ended"))  # runs after those that come later
import torch
import torch.distributed as dist
from flashlane.distributed import context_parallel_attn_func  # modules of torch that come later keep the group
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
groups.append(weakref.ref(dist.group.WORLD))
q = torch.randn(1, 8, 2, 8)
context_parallel_attn_func(q, q, q)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_destroyed_group_has_ended_before_the_interpreter_does(tmp_path: Path) -> None:
    """A thread of gloo that wants the interpreter's lock while it ends would abort the process."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END, tmp_path / "store"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
