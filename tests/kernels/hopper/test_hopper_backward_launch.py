"""The Hopper backward of head dims up to 128, without a GPU: what its launches are given."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from hopper_fakes import gradient_launches, gradient_plan, gradient_tensors

from flashlane.core.problem import AttentionProblem
from flashlane.jit import launch as jit_launch
from flashlane.kernels.hopper.backward import kernel as backward
from flashlane.kernels.hopper.backward import launch as backward_launch
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.backward.one_cta.tiles import pick

LAUNCHES = {"before": backward_launch.PreprocessParams, "gradients": backward_launch.BackwardParams}
LAUNCHES |= {"after": backward_launch.PostprocessParams}


def problem_of(**changes: object) -> AttentionProblem:
    fields = {"batch": 2, "heads": 8, "kv_heads": 4, "seqlen_q": 1000, "seqlen_k": 700, "head_dim": 128}
    fields |= {"head_dim_v": 128, "dtype": torch.bfloat16, "scale": 0.1, "arch": "sm_90a"}
    return AttentionProblem(**{**fields, **changes})


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch):
    """Launches a configuration, and tells what each launch was given, by which parameters it has; and the memory."""

    def run(config: GradientConfig, problem: AttentionProblem) -> tuple[dict[str, SimpleNamespace], list[torch.Tensor]]:
        allocated: list[torch.Tensor] = []

        def strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty_strided(size, stride, dtype=dtype)

        with monkeypatch.context() as patch:
            patch.setattr(
                jit_launch, "allocator", lambda device: lambda *how: allocated.append(strided(*how)) or allocated[-1]
            )
            found, tensors = gradient_launches(config, problem, patch)
        names = {params: name for name, params in LAUNCHES.items()}
        return {names[type(one.params)]: one for one in found}, [*allocated, tensors.dq, tensors.dk, tensors.dv]

    return run


def inside(memory: list[torch.Tensor], address: int | None, size: int) -> bool:
    """Whether so many bytes from an address on are of one tensor."""
    ends = ((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in memory)
    return address is not None and any(begin <= address and address + size <= end for begin, end in ends)


def test_what_additions_in_order_share(launch) -> None:
    problem = problem_of(window_right=0, deterministic=True)
    launches, memory = launch(pick(problem), problem)
    assert list(launches) == ["before", "gradients", "after"]
    before, gradients = launches["before"], launches["gradients"]
    # Both may begin early; the first waits for whatever is before it on the stream.
    assert before.overlapped and gradients.overlapped
    blocks = 16 * 8 * 2  # of 64 queries, of all heads and sequences
    assert before.grid == (16, 8, 2) and gradients.grid == (6 * 4 * 2, 1, 1)
    for one in (before.params, gradients.params):
        assert inside(memory, one.dq_accum, blocks * 64 * 128 * 4)
        assert inside(memory, one.semaphores, blocks * pick(problem).semaphore_ints * 4)
        assert inside(memory, one.counters, backward_launch.COUNTERS * 4)
        assert one.dq == memory[-3].data_ptr()
    strides = gradients.params
    assert (strides.dq_batch, strides.dq_row, strides.dq_head) == (1000 * 8 * 128, 8 * 128, 128)
    shared = ("dq_accum", "semaphores", "counters", "lse", "delta", "dq", "window_left")
    shared += ("window_right", "row_blocks", "heads")
    for name in shared:
        assert getattr(before.params, name) == getattr(gradients.params, name), name
    for name in ("seqlen_q", "seqlen_k", "bottom_right"):
        assert getattr(before.params.seqlen, name) == getattr(gradients.params.seqlen, name), name


def test_a_third_launch_where_the_second_does_not_finish(launch) -> None:
    problem = problem_of()
    launches, memory = launch(pick(problem), problem)
    assert list(launches) == ["before", "gradients", "after"]
    assert all(one.overlapped for one in launches.values())
    assert launches["after"].grid == launches["before"].grid == (13, 8, 2)  # of 80 queries
    sums = [one.params.dq_accum for one in launches.values()]
    assert sums == sums[:1] * 3
    assert launches["gradients"].params.semaphores is None and launches["after"].params.dq == memory[-3].data_ptr()


def test_rows_that_start_anywhere_are_copied() -> None:
    """A tensor of one row is contiguous to torch wherever it starts."""
    space = torch.arange(64, dtype=torch.bfloat16)
    for start in (0, 1):
        row = space[start : start + 24].view(1, 1, 1, 24)
        readable = backward._readable(row)
        assert torch.equal(readable, row) and readable.data_ptr() % 16 == 0
        assert (readable is row) == (row.data_ptr() % 16 == 0)
    assert backward._readable(space.view(1, 8, 1, 8)).data_ptr() == space.data_ptr()


DESIGNS = (
    {"head_dim": 64, "head_dim_v": 64, "window_right": 0},
    {"head_dim": 64, "head_dim_v": 64, "deterministic": True},
    {"deterministic": True},
    {"head_dim": 192},
    {"head_dim": 256, "head_dim_v": 256, "deterministic": True, "window_right": 0},
)


@pytest.mark.parametrize("changes", DESIGNS, ids=str)
def test_a_call_like_an_earlier_one_is_told_the_same_but_for_addresses(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(**changes)
    config = backward.config_of(problem)
    plan, launched = gradient_plan(config, problem, monkeypatch)
    spaces = [torch.empty(plan.workspace.words) for _ in range(3)]
    calls = [gradient_tensors(problem), gradient_tensors(problem)]

    def told(
        plan: backward_launch.PreparedBackward, launched: list[SimpleNamespace], which: int, space: int
    ) -> list[tuple[object, ...]]:
        monkeypatch.setattr(jit_launch, "allocator", lambda device: lambda *how: spaces[space])
        launched.clear()
        plan.launch(calls[which])
        return [(one.grid, one.block, one.shared, one.overlapped, bytes(one.params)) for one in launched]

    again = [told(plan, launched, *call) for call in ((0, 0), (1, 1), (0, 2))]
    (launches,) = plan.kinds.values()
    assert len(launches.launches) == len(launched)
    assert again[0] != again[1] != again[2] != again[0]
    fresh = [told(*gradient_plan(config, problem, monkeypatch), *call) for call in ((0, 0), (1, 1), (0, 2))]
    assert again == fresh


def test_other_strides_are_another_kind_and_threads_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    plan, launched = gradient_plan(backward.config_of(problem), problem, monkeypatch)
    tensors = gradient_tensors(problem)
    plan.launch(tensors)
    turned = tensors.do.transpose(1, 2).contiguous().transpose(1, 2)
    plan.launch(tensors._replace(do=turned))
    assert len(plan.kinds) == 2
    before, after = launched[0].params, launched[len(launched) // 2].params
    assert (before.dout_row, before.dout_head) == (8 * 128, 128)
    assert (after.dout_row, after.dout_head) == (128, 1000 * 128)
    launches, key = plan.kinds[tensors.kind], tuple(tensor.data_ptr() for tensor in tensors.mapped)
    taken = launches.acquire(key)  # as a thread has it that has not given it back
    plan.launch(tensors)
    assert launches.acquire(key) is not taken


def test_a_given_dq_is_written_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    plan, launched = gradient_plan(backward.config_of(problem), problem, monkeypatch)
    monkeypatch.setattr(jit_launch, "device_getter", lambda: lambda: 0)
    monkeypatch.setattr(
        jit_launch, "allocator",
        lambda device: lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype),
    )  # fmt: skip
    repeat = plan.repeated(torch.device("cpu"), torch.bfloat16)
    tensors = gradient_tensors(problem)
    call = (*tensors.mapped[:3], tensors.out, tensors.lse, tensors.do)
    wide = torch.zeros(2, 1000, 24, 128, dtype=torch.bfloat16)

    def written() -> set[tuple[int, int, int, int]]:
        params = [one.params for one in launched]
        told = {(p.dq, p.dq_batch, p.dq_row, p.dq_head) for p in params if hasattr(p, "dq_row")}  # who writes dQ
        assert len(params) > 1 and {p.dq for p in params} == {at for at, *_ in told}
        launched.clear()
        return told

    own, *_ = repeat(*call)
    assert written() == {(own.data_ptr(), 1000 * 8 * 128, 8 * 128, 128)}
    for first in (0, 8):
        given = wide[:, :, first : first + 8]
        dq, dk, dv = repeat(*call, given)
        assert dq is given and dk.shape == dv.shape == (2, 700, 4, 128)
        assert written() == {(given.data_ptr(), 1000 * 24 * 128, 24 * 128, 128)}
    unaligned = torch.zeros(2 * 1000 * 8 * 128 + 1, dtype=torch.bfloat16)[1:].view(2, 1000, 8, 128)
    assert repeat(*call, unaligned) is None and not launched


def test_an_operand_that_starts_anywhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    plan, _ = gradient_plan(backward.config_of(problem), problem, monkeypatch)
    tensors = gradient_tensors(problem)
    plan.launch(tensors)
    space = torch.empty(tensors.do.numel() + 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^the output's gradient starts at address .*; TMA needs a multiple of 16"):
        plan.launch(tensors._replace(do=space[1:].view(tensors.do.shape)))


@pytest.mark.parametrize("params", LAUNCHES.values())
def test_pointers_follow_each_other(params: type[ctypes.Structure]) -> None:
    """A call writes those of a kernel at once."""
    places = [getattr(params, name).offset for name, kind in params._fields_ if kind is ctypes.c_void_p]
    assert places == [places[0] + 8 * index for index in range(len(places))]


@pytest.mark.parametrize("varlen", [False, True], ids=["batch", "packed"])
def test_the_statistics_of_rows_are_read_where_their_strides_say(monkeypatch: pytest.MonkeyPatch, varlen: bool) -> None:
    """The gradient of the LSE has strides of its own; packed sequences have none from one to the next."""
    problem = problem_of(varlen=varlen)
    plan, found = gradient_plan(pick(problem), problem, monkeypatch)
    tensors = gradient_tensors(problem)
    apart = torch.zeros(*tensors.lse.shape[:-1], 1008)[..., : tensors.lse.shape[-1]]
    dlse = torch.zeros(8, 2016)[:, :2000] if varlen else apart
    plan.launch(tensors._replace(dlse=dlse))
    before = found[0].params
    assert (before.lse_in, before.dlse) == (tensors.lse.data_ptr(), dlse.data_ptr())
    assert (before.lse_batch, before.lse_head) == ((0, 2000) if varlen else (8000, 1000))
    assert (before.dlse_batch, before.dlse_head) == ((0, 2016) if varlen else (8 * 1008, 1008))
    for name in ("out", "dout"):
        strides = [getattr(before, f"{name}_{axis}") for axis in ("batch", "row", "head")]
        assert strides == [0 if varlen else 1000 * 8 * 128, 8 * 128, 128]
    assert before.kv_heads == 4 and before.n_blocks == plan.schedule.in_kernel_dq.n_blocks != 4


def test_only_rows_that_start_on_16_bytes_are_read_in_place() -> None:
    rows = torch.zeros(2, 10, 4, 72, dtype=torch.bfloat16)
    assert backward_launch.readable(rows) and backward_launch.readable(rows[..., :64])
    apart = torch.zeros(2, 10, 4, 68, dtype=torch.bfloat16)
    for one in (apart[..., :64], rows.mT, rows[:, :1].expand(2, 10, 4, 72), rows[..., 1:65]):
        assert not backward_launch.readable(one)
    assert backward_launch.readable(apart[:1, :1, :1, :64])  # no row follows
