"""Prepares what the bench runs on a problem: kernels that write into shared buffers, peers, and gradients of both."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from flashlane.bench.measure.flops import Direction, sequences_of
from flashlane.bench.measure.gradients import output_gradient
from flashlane.bench.measure.peers import Peer
from flashlane.core.arch import compute_dtype
from flashlane.core.problem import FEATURES, AttentionProblem, Inputs
from flashlane.core.registry import Kernel
from flashlane.kernels.features import CACHE, PAGED, VARLEN, is_cached

if TYPE_CHECKING:
    from flashlane.bench.measure.runner import Selection

Outcome = torch.Tensor | tuple[torch.Tensor, ...] | None


@dataclass
class Implementation:
    """A kernel that writes into shared buffers, or a peer that returns its output, on one problem.

    In a direction with a backward, the call of either returns dq, dk and dv.
    """

    tag: str
    kind: str
    call: Callable[[], Outcome]
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    kernel: Kernel | None = None
    public: Callable[[], Outcome] | None = None
    """The public function for the same result, which also allocates it; None where ``call`` is what a user calls."""

    @property
    def as_called(self) -> Implementation:
        """The implementation that is timed: the same, with the public function as its call."""
        return self if self.public is None else replace(self, call=self.public, public=None)


@dataclass
class Work:
    """One problem in one direction, with its tensors and the implementations that run on it."""

    problem: AttentionProblem
    direction: Direction
    inputs: Inputs
    out: torch.Tensor
    lse: torch.Tensor
    sequences: tuple[AttentionProblem, ...] = ()
    """The dense problems whose operations are counted."""
    do: torch.Tensor | None = None
    """The gradient of the output; None in the forward direction."""
    items: list[Implementation] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def poison(self) -> None:
        """Fill the memory of the results with NaN, so that what an implementation does not write shows."""
        if self.direction == "forward":
            poison_outputs(self.out, self.lse)
        else:
            poison_gradient_memory(self.inputs)


def poison_outputs(*results: torch.Tensor) -> None:
    """Fill results that every implementation writes to with NaN."""
    for result in results:
        result.fill_(math.nan)


def poison_gradient_memory(inputs: Inputs) -> None:
    """Fill memory with NaN that the gradients of the next call may get: it may hold the right ones of an earlier one.

    They are allocated at each call, from what the allocator has of their sizes.
    """
    stale = [torch.full_like(t, math.nan) for t in (inputs.q, inputs.k, inputs.v)]
    del stale


def prepare(
    problem: AttentionProblem,
    inputs: Inputs,
    direction: Direction,
    selection: Selection,
    device: torch.device,
    seed: int,
) -> Work:
    """Find the implementations that can run a problem in a direction, and the reasons that the others cannot."""
    out, lse = shared_outputs(problem, inputs)
    work = Work(problem, direction, inputs, out, lse, sequences_of(problem, inputs))
    if direction != "forward":
        work.problem = problem = replace(problem, needs_grad=True)
        q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
        work.inputs = inputs = replace(inputs, q=q, k=k, v=v)
        work.do = output_gradient(problem, inputs, seed)
    for tag, reason, make in _candidates(work, selection, device):
        if reason is None:
            work.items.append(make())
        else:
            work.skipped.append((tag, reason))
    return work


def _candidates(
    work: Work, selection: Selection, device: torch.device
) -> Iterator[tuple[str, str | None, Callable[[], Implementation]]]:
    problem = work.problem
    for kernel in selection.kernels():
        reason = kernel.supports(problem) or selection.declines(kernel, problem) or selection.excludes(kernel.tag)
        yield kernel.tag, reason, lambda kernel=kernel: _of_kernel(work, kernel)
    for peer in selection.peers:
        reason = peer.available(device) or peer.supports(problem) or selection.excludes(peer.tag)
        yield peer.tag, reason, lambda peer=peer: _of_peer(work, peer)


def _of_kernel(work: Work, kernel: Kernel) -> Implementation:
    if work.direction == "forward":
        call = _writer(kernel, work.problem, work.inputs, work.out, work.lse)
        public = public_call(work.problem, work.inputs, kernel.tag)
        return Implementation(kernel.tag, "kernel", call, kernel=kernel, public=public)
    forward = public_call(work.problem, work.inputs, kernel.tag)
    return Implementation(kernel.tag, "kernel", _Differentiated(work, forward), kernel=kernel)


def public_call(problem: AttentionProblem, inputs: Inputs, tag: str) -> Callable[[], torch.Tensor]:
    """The call of the public function that poses this problem, with the kernel named.

    Problems with modifiers of the scores, or with masks that are not bottom-right aligned, go through
    ``flashlane.ops.call.attention``, which takes the problem itself.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    other = [name for name in FEATURES if name not in (*VARLEN, *CACHE, *PAGED) and getattr(problem, name)]
    if other or problem.alignment != "bottom-right":
        from flashlane.ops.call import attention

        return lambda: attention(problem, inputs, tag)[0]
    import flashlane

    window = (problem.window_left, problem.window_right)
    options = {"softmax_scale": problem.scale, "causal": problem.causal, "window_size": window, "kernel": tag}
    if problem.varlen:
        lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.max_seqlen_q, inputs.max_seqlen_k)
        options |= {"block_table": inputs.block_table, "deterministic": problem.deterministic}
        return lambda: flashlane.flash_attn_varlen_func(q, k, v, *lengths, **options)
    if is_cached(problem):
        options |= {"cache_seqlens": inputs.seqused_k, "cache_batch_idx": inputs.batch_idx}
        options |= {"cache_leftpad": inputs.leftpad_k, "block_table": inputs.block_table}
        return lambda: flashlane.flash_attn_with_kvcache(q, k, v, num_splits=problem.num_splits, **options)
    return lambda: flashlane.flash_attn_func(q, k, v, deterministic=problem.deterministic, **options)


def rotating(item: Implementation, others: Sequence[Callable[[], Outcome]]) -> Implementation:
    """The same implementation, which at each call goes on to the next of several sets of inputs."""
    calls = itertools.cycle((item.call, *others))
    return replace(item, call=lambda: next(calls)())


def _of_peer(work: Work, peer: Peer) -> Implementation:
    prepared = Prepared(peer, work.problem, work.inputs)
    call = prepared if work.direction == "forward" else _Differentiated(work, prepared)
    return Implementation(peer.tag, "peer", call, peer.context)


def _writer(
    kernel: Kernel, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
) -> Callable[[], None]:
    return lambda: kernel.forward(problem, inputs, out, lse)


@dataclass
class Prepared:
    """A peer's call, which its first use prepares, so that a peer that cannot be prepared gets a row that says so."""

    peer: Peer
    problem: AttentionProblem
    inputs: Inputs
    function: Callable[[], torch.Tensor] | None = field(default=None, repr=False)

    def __call__(self) -> torch.Tensor:
        if self.function is None:
            self.function = self.peer.prepare(self.problem, self.inputs)
        return self.function()


@dataclass
class _Differentiated:
    """The gradients of a forward call: of one kept graph (``backward``), or of a new forward each time (``both``)."""

    work: Work
    forward: Callable[[], torch.Tensor]
    out: torch.Tensor | None = field(default=None, repr=False)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        inputs, keep = self.work.inputs, self.work.direction == "backward"
        out = self.out
        if out is None:
            with torch.enable_grad():
                out = self.forward()
            if keep:
                self.out = out
        return torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), self.work.do, retain_graph=keep)


def shared_outputs(problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The output ``(…, sq, h, dv)`` in q's dtype and the LSE ``(…, h, sq)`` that all kernels write, filled with NaN."""
    *batch, rows, heads, _ = inputs.q.shape
    out = inputs.q.new_full((*batch, rows, heads, problem.head_dim_v), math.nan)
    return out, inputs.q.new_full((*batch, heads, rows), math.nan, dtype=compute_dtype(problem.dtype))


def first_second_last(out: torch.Tensor | Sequence[torch.Tensor]) -> tuple[float, ...]:
    """The first, second and last element in row-major order, of dq where there are gradients; none of an empty one."""
    out = out if isinstance(out, torch.Tensor) else out[0]
    if out.numel() == 0:
        return ()
    last = tuple(size - 1 for size in out.shape)
    flat = out[(0,) * (out.dim() - 1)]
    return tuple(float(x) for x in (flat[0], flat[min(1, flat.numel() - 1)], out[last]))
