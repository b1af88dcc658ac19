"""The Hopper backward of head dims up to 128, without a GPU: what its launches are given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hopper_fakes import gradient_launches

from flashlane.kernels.hopper import backward, backward_launch
from flashlane.kernels.hopper.backward_config import BackwardConfig
from flashlane.kernels.hopper.backward_shapes import pick
from flashlane.problem import AttentionProblem

LAUNCHES = {"before": backward_launch.PrepareParams, "gradients": backward_launch.BackwardParams}
LAUNCHES |= {"after": backward_launch.FinishParams}


def problem_of(**changes: object) -> AttentionProblem:
    fields = {"batch": 2, "heads": 8, "kv_heads": 4, "seqlen_q": 1000, "seqlen_k": 700, "head_dim": 128}
    fields |= {"head_dim_v": 128, "dtype": torch.bfloat16, "scale": 0.1, "arch": "sm_90a"}
    return AttentionProblem(**{**fields, **changes})


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch):
    """Launches a configuration, and tells what each launch was given, by which parameters it has; and the memory."""

    def run(config: BackwardConfig, problem: AttentionProblem) -> tuple[dict[str, SimpleNamespace], list[torch.Tensor]]:
        made: list[torch.Tensor] = []
        empty = torch.empty
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *size, **how: made.append(empty(*size, **how)) or made[-1])
            found, tensors = gradient_launches(config, problem, patch)
        names = {params: name for name, params in LAUNCHES.items()}
        return {names[type(one.params)]: one for one in found}, [*made, tensors.dq, tensors.dk, tensors.dv]

    return run


def inside(memory: list[torch.Tensor], address: int | None, size: int) -> bool:
    """Whether so many bytes from an address on are of one tensor."""
    ends = ((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in memory)
    return address is not None and any(begin <= address and address + size <= end for begin, end in ends)


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_launches_make_all_gradients(launch, deterministic: bool) -> None:
    problem = problem_of(window_right=0, deterministic=deterministic)
    launches, memory = launch(replace(pick(problem), finish_inside=True), problem)
    assert list(launches) == ["before", "gradients"]
    before, gradients = launches["before"], launches["gradients"]
    # Only the second may begin early: the first is behind whatever is on the stream.
    assert (before.overlapped, gradients.overlapped) == (False, True)
    blocks = 16 * 8 * 2  # of 64 queries, of all heads and sequences
    assert before.grid == (16, 8, 2) and gradients.grid == (6 * 4 * 2, 1, 1)
    for one in (before.params, gradients.params):
        assert inside(memory, one.dq, blocks * 64 * 128 * 4)
        assert inside(memory, one.states, blocks * backward_launch.STATE_INTS * 4)
        assert inside(memory, one.counters, backward_launch.COUNTERS * 4)
        assert inside(memory, one.queue, 2 * blocks * 4)
        assert one.queue >= one.counters + 4 * backward_launch.COUNTERS
        assert (one.dq_row, one.dq_out) == (8 * 128, memory[-3].data_ptr())
    shared = ("dq", "states", "counters", "queue", "lse", "delta", "dq_out", "seqlen_q", "seqlen_k", "window_left")
    shared += ("window_right", "bottom_right", "stat_blocks", "heads", "dq_batch", "dq_row", "dq_head")
    for name in shared:
        assert getattr(before.params, name) == getattr(gradients.params, name), name


def test_a_third_launch_where_the_second_does_not_finish(launch) -> None:
    problem = problem_of()
    launches, memory = launch(replace(pick(problem), finish_inside=False), problem)
    assert list(launches) == ["before", "gradients", "after"]
    assert [one.overlapped for one in launches.values()] == [False, True, True]
    assert launches["after"].grid == launches["before"].grid == (13, 8, 2)  # of 80 queries
    assert launches["after"].params.sums == launches["gradients"].params.dq == launches["before"].params.dq
    assert launches["gradients"].params.states is None and launches["after"].params.dq == memory[-3].data_ptr()


def test_rows_that_start_anywhere_are_copied() -> None:
    """A tensor of one row is contiguous to torch wherever it starts."""
    space = torch.arange(64, dtype=torch.bfloat16)
    for start in (0, 1):
        row = space[start : start + 24].view(1, 1, 1, 24)
        readable = backward._readable(row)
        assert torch.equal(readable, row) and readable.data_ptr() % 16 == 0
        assert (readable is row) == (row.data_ptr() % 16 == 0)
    assert backward._readable(space.view(1, 8, 1, 8)).data_ptr() == space.data_ptr()
