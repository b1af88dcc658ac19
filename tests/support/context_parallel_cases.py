"""Cases of context parallelism: what a rank runs, and what one process computes for all tokens."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy
import parts_reference
import polled_reference
import share_reference
import sums_reference
import torch
import torch.distributed as dist
from parts_reference import in_parts
from polled_reference import polling
from rank_pool import first_ranks
from share_reference import sharing
from sums_reference import summing

import flashlane
from flashlane.distributed import attend, context_parallel_attn_func, context_parallel_attn_varlen_func, gather
from flashlane.distributed.comm import LABEL_TAG
from flashlane.distributed.layout import token_indices
from flashlane.distributed.peer_memory import FileMemory

GRADIENTS = ("q", "k", "v", "sinks", "logit_scale")


@dataclass(frozen=True)
class Case:
    """One call; ``lengths`` of more than one document, or ``packed``, is the varlen function."""

    lengths: tuple[int, ...] = (37,)
    packed: bool = False
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    head_dim_v: int = 8
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    logit_scale: bool = False
    deterministic: bool = False
    dtype: torch.dtype = torch.float32
    method: str = "allgather"
    layout: str = "zigzag"
    heads_k_stride: int | tuple[int, ...] | None = None
    transport: str = "messages"
    reads_lse: bool = True
    """Whether the LSE is asked for, and the loss depends on it."""
    polled: bool = False
    """Whether keys come chunk by chunk by copies: to a GPU while its kernel runs."""
    shared: bool = False
    """Whether a backward of two chunks has one launch, as on a GPU."""
    parted: bool = False
    """Whether a backward by copies has parts of its keys, as on a GPU."""
    large: bool = False
    """Whether gradients of K and V are added apart, as those of large tensors are."""
    summed: bool = False
    """Whether one kernel adds the gradients of K and V, as on a GPU."""
    rounded: bool = False
    """Whether gradients are rounded before they are added, as by kernels that write none in f32."""
    again: bool = False
    """Whether the same call is made before with other values, as in a second step of a training."""

    @property
    def varlen(self) -> bool:
        return self.packed or len(self.lengths) > 1

    @property
    def axis(self) -> int:
        """The axis of the tokens."""
        return 0 if self.varlen else 1

    @property
    def cu_seqlens(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case(), name)]
        return " ".join(changed) or "plain"


def adding_apart() -> contextlib.AbstractContextManager[Any]:
    """Gradients of K and V are added apart, however few they are."""
    return mock.patch.object(gather, "MOST_STACKED", 0)


def rounding() -> contextlib.AbstractContextManager[Any]:
    """Kernels write gradients in the dtype of their inputs, before any sum."""
    return mock.patch.object(attend, "F32_GRADIENTS", False)


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    """All tokens' tensors and output gradients, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    outer = (sum(case.lengths),) if case.varlen else (case.batch, sum(case.lengths))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(case.dtype)

    tensors = {
        "q": draw(*outer, case.heads, case.head_dim),
        "k": draw(*outer, case.kv_heads, case.head_dim),
        "v": draw(*outer, case.kv_heads, case.head_dim_v),
        "do": draw(*outer, case.heads, case.head_dim_v),
        "dlse": torch.randn((*outer, case.heads), generator=generator),
    }
    if case.alibi:
        shape = (len(case.lengths) if case.varlen else case.batch, case.heads)
        tensors["alibi_slopes"] = torch.rand(shape, generator=generator)
    if case.sinks:
        tensors["sinks"] = draw(case.heads)
    if case.logit_scale:
        tensors["logit_scale"] = torch.rand(case.heads, generator=generator) + 0.5
    return tensors


def _asked(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    modifiers = {name: tensors.get(name) for name in ("alibi_slopes", "sinks", "logit_scale")}
    how = {"softcap": case.softcap, "deterministic": case.deterministic}
    return {"causal": case.causal, "window_size": case.window, **how, **modifiers}


def _results(out: torch.Tensor, lse: torch.Tensor | None, tensors: dict[str, torch.Tensor]) -> dict[str, numpy.ndarray]:
    """Output, LSE (b, rows, h) if there is one, and gradients, for numpy, which processes can exchange."""
    loss = (out.double() * tensors["do"].double()).sum()
    results = {"out": out}
    if lse is not None:
        results["lse"] = lse.transpose(-1, -2)
        loss = loss + (results["lse"].double() * tensors["dlse"].double()).sum()
    loss.backward()
    results |= {f"d{name}": tensors[name].grad for name in GRADIENTS if name in tensors}
    return {name: t.detach().double().cpu().numpy() for name, t in results.items()}


CPU = torch.device("cpu")


def _tensors_on(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: t.to(device) for name, t in tensors_of(case).items()}


def expected(case: Case, device: torch.device = CPU) -> dict[str, numpy.ndarray]:
    """One process, in f64."""
    tensors = {name: t.double() if name != "alibi_slopes" else t for name, t in _tensors_on(case, device).items()}
    if case.logit_scale:
        tensors["logit_scale"] = tensors["logit_scale"].float()
    return _on_one(case, tensors, kernel="reference")


def one_process(case: Case, device: torch.device = CPU) -> dict[str, numpy.ndarray]:
    """One process, in the case's dtype and with the kernel that it gets."""
    return _on_one(case, _tensors_on(case, device))


def _on_one(case: Case, tensors: dict[str, torch.Tensor], **how: Any) -> dict[str, numpy.ndarray]:
    how |= {**_asked(case, tensors), "return_lse": True}
    for name in GRADIENTS:
        if name in tensors:
            tensors[name].requires_grad_()
    q, k, v = (tensors[name] for name in "qkv")
    if case.varlen:
        cu = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=q.device)
        longest = max(case.lengths)
        found = flashlane.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **how)
    else:
        found = flashlane.flash_attn_func(q, k, v, **how)
    return _results(*(found if case.reads_lse else (found[0], None)), tensors)


def on_rank(case: Case, size: int, device: torch.device = CPU) -> dict[str, numpy.ndarray]:
    """What this rank gets of a case that the first ranks of the pool share."""
    rank = dist.get_rank()
    own = token_indices(case.layout, case.lengths, size, rank).to(device)
    whole = _tensors_on(case, device)
    sharded = {name: whole[name].index_select(case.axis, own) for name in ("q", "k", "v", "do", "dlse")}
    tensors = {**whole, **sharded}
    where: dict[str, Any] = {"method": case.method, "layout": case.layout, "return_lse": case.reads_lse}
    where["group"] = square_mesh() if case.method == "usp" else first_ranks(size)
    if case.heads_k_stride:
        where["heads_k_stride"] = case.heads_k_stride
    where["transport"] = case.transport
    with contextlib.ExitStack() as stack:
        for asked, how in (
            (case.polled, polling),
            (case.shared, sharing),
            (case.parted, in_parts),
            (case.large, adding_apart),
            (case.summed, summing),
            (case.rounded, rounding),
        ):
            if asked:
                stack.enter_context(how())
        if case.again:
            others = {name: t.flip(case.axis) * 0.5 if name in sharded else t for name, t in tensors.items()}
            _on_rank(case, others, where)
        return _on_rank(case, tensors, where)


def _on_rank(case: Case, tensors: dict[str, torch.Tensor], where: dict[str, Any]) -> dict[str, numpy.ndarray]:
    tensors = {name: t.clone().requires_grad_() if name in GRADIENTS else t for name, t in tensors.items()}
    q, k, v = (tensors[name] for name in "qkv")
    if case.varlen:
        found = context_parallel_attn_varlen_func(q, k, v, case.cu_seqlens, **_asked(case, tensors), **where)
    else:
        where = {**where, "seqlen": sum(case.lengths)}
        found = context_parallel_attn_func(q, k, v, **_asked(case, tensors), **where)
    return _results(*(found if case.reads_lse else (found, None)), tensors)


def launches_on_rank(case: Case, size: int) -> list[int]:
    """Blocks of each launch that polled flags."""
    polled_reference.used.clear()
    on_rank(case, size)
    return list(polled_reference.used)


def parts_on_rank(case: Case, size: int) -> list[int]:
    """The numbers of the parts of a backward, in the order in which they were computed."""
    parts_reference.used.clear()
    on_rank(case, size)
    return list(parts_reference.used)


def sums_on_rank(case: Case, size: int) -> list[int]:
    """The numbers of sums of the launches that added gradients."""
    sums_reference.used.clear()
    on_rank(case, size)
    return list(sums_reference.used)


def shares_on_rank(case: Case, size: int) -> list[bool]:
    """Whether each launch of a share's backward had two ranges of queries."""
    share_reference.used.clear()
    on_rank(case, size)
    return list(share_reference.used)


def on_slow_rank(case: Case, size: int, calls: int) -> list[dict[str, numpy.ndarray]]:
    """:func:`on_rank` so many times, while each rank is held up now and then where it writes to the others or waits."""
    chance = random.Random(dist.get_rank())

    def late(method: Any) -> Any:
        def run(*arguments: Any) -> None:
            time.sleep(chance.choice((0.0, 0.0, 0.0005, 0.004)))
            method(*arguments)

        return run

    with contextlib.ExitStack() as stack:
        for name in ("copy", "write", "wait"):
            stack.enter_context(mock.patch.object(FileMemory, name, late(getattr(FileMemory, name))))
        return [on_rank(case, size) for _ in range(calls)]


def each_on_rank(several: list[Case], size: int) -> list[dict[str, numpy.ndarray] | str]:
    """What :func:`on_rank` gives of each case, or the error that it raised."""
    results: list[dict[str, numpy.ndarray] | str] = []
    for case in several:
        try:
            results.append(on_rank(case, size))
        except (TypeError, ValueError, NotImplementedError) as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


@functools.cache
def square_mesh() -> dist.DeviceMesh:
    """Four ranks: two that exchange keys by two that exchange heads."""
    return dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "heads"))


def assembled(case: Case, of_ranks: list[dict[str, numpy.ndarray]]) -> dict[str, numpy.ndarray]:
    """The ranks' results as those of all tokens; gradients of what all ranks have are sums."""
    orders = [token_indices(case.layout, case.lengths, len(of_ranks), rank).numpy() for rank in range(len(of_ranks))]
    joined = {}
    for name, first in of_ranks[0].items():
        if name in ("dsinks", "dlogit_scale"):
            joined[name] = sum(each[name] for each in of_ranks)
            continue
        shape = list(first.shape)
        shape[case.axis] = sum(case.lengths)
        joined[name] = numpy.full(shape, numpy.nan)
        for order, each in zip(orders, of_ranks, strict=True):
            index = (order,) if case.varlen else (slice(None), order)
            joined[name][index] = each[name]
    return joined


def worst_difference(some: dict[str, numpy.ndarray], other: dict[str, numpy.ndarray]) -> dict[str, float]:
    """The largest absolute difference of each result; NaN and unlike infinities count as infinite."""
    worst = {}
    for name, values in other.items():
        with numpy.errstate(invalid="ignore"):
            apart = numpy.where(some[name] == values, 0.0, numpy.abs(some[name] - values))
        worst[name] = float(numpy.nan_to_num(apart, nan=numpy.inf).max(initial=0.0))
    return worst


def messages_on_rank(case: Case, size: int) -> dict[str, int]:
    """Batches of messages of a forward, and of forward and backward; other collectives; bytes that a forward sends."""
    on_rank(case, size)  # the ranks agree on it
    sent: list[int] = []
    at_backward: list[int] = []
    batch, backward = dist.batch_isend_irecv, torch.Tensor.backward

    def counted(operations: list[Any]) -> Any:
        if operations[0].tag != LABEL_TAG:  # labels are compared on a CPU only
            sent.append(
                sum(each.tensor.numel() * each.tensor.element_size() for each in operations if each.op is dist.isend)
            )
        return batch(operations)

    def noted(self: torch.Tensor) -> None:
        at_backward.append(len(sent))
        backward(self)

    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all_single", "broadcast", "barrier")
    others: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", counted))
        stack.enter_context(mock.patch.object(torch.Tensor, "backward", noted))
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, lambda *_, name=name, **__: others.append(name)))
        on_rank(case, size)
    forward = at_backward[0]
    return {"forward": forward, "both": len(sent), "others": len(others), "bytes": sum(sent[:forward])}
