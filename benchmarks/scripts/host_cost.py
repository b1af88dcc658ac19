"""What a call costs the host in microseconds: straight, through the operator, with a gradient and backward; and peers.

    PYTHONPATH=src python3 benchmarks/scripts/host_cost.py --out benchmarks [--kernel TAG] [--seconds 30]

A round issues each implementation's calls back to back and reads the clock before waiting for the device, so that what
is timed is the time until the call returns. Rounds are short enough that the queue of launches never fills, and the
problem small enough that the device keeps up. The implementation ``nothing`` is ours with a kernel that launches
nothing: the part of the cost that is this library's Python. ``autograd alone`` is an empty ``torch.autograd.Function``
with our tensors, forward and backward: what torch's own autograd costs, which no function in Python goes below. A
backward is that of ``out.backward(do)``, with the gradients of the step before dropped; that of one kept graph is
``torch.autograd.grad``, as the bench times it. ``packed`` rows are of two sequences in one tensor with their lengths,
and ``windowed`` rows have a window of half the keys. PyTorch's FlashAttention-2 runs both by its operator, which is one
node of autograd, and dense tensors by ``scaled_dot_product_attention`` between four transposes.
On a machine without a GPU, where a call returns when it is computed, that is all that is measured. Writes
host_cost.json, again after each round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import flashlane
import flashlane.ops.library
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.peers import PEERS
from flashlane.bench.measure.results import check_writable, write_atomically
from flashlane.bench.measure.timing import drawn_order
from flashlane.core import dispatch, registry
from flashlane.core.problem import AttentionProblem, CallOptions, Inputs
from flashlane.core.registry import Kernel
from flashlane.ops import schema

FORMAT = "flashlane-host-cost/1"
CALLS = 100
"""Calls of one round: far fewer than the launches that fit into a queue (1024)."""
ROUNDS = 41
SETS = 24
"""Sets of q, k and v that alternate: the addresses of a model's layers, where one set alone might stay prepared."""
LIMITS = {"direct": 12.0, "operator": 20.0, "both": 130.0}
"""What a call of ours may cost, µs: of inference, and forward with backward."""
PEER_TAGS = ("(flash)", "(cudnn)", "(flash-attn-2)", "(flash-attn-3)", "(flash-attn-4)", "(ffpa)")


class Nothing(Kernel):
    """A kernel that launches nothing: its output is what the memory held."""

    tag, family, summary, source, priority = "nothing", "none", "launches nothing", "here", -1
    listed = False
    lse_optional = True

    def supports(self, problem: AttentionProblem) -> str | None:
        return None

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        pass


@dataclass
class Cost:
    """One implementation: its samples are microseconds a call, one a round."""

    name: str
    path: str
    """``direct``, ``operator``, ``gradient`` (forward that records one), ``both`` (forward and backward), ``kept``
    (backward of one kept graph), ``kept here`` (in the calling thread); of torch alone ``floor both``, ``floor kept``
    and ``floor kept here``; of peers ``peer``, ``peer gradient``, ``peer both`` and so on; the same of packed sequences
    and windows with ``packed`` or ``windowed`` before it."""
    kernel: str
    samples: list[float] = field(default_factory=list)
    error: str = ""

    def figures(self) -> dict[str, object]:
        """Median and quartiles, µs."""
        found: dict[str, object] = asdict(self)
        if self.samples:
            low, median, high = statistics.quantiles(self.samples, n=4) if len(self.samples) > 1 else self.samples * 3
            found |= {"us": median, "us_q1": low, "us_q3": high, "us_least": min(self.samples)}
        return found


Call = Callable[[], object]
Context = Callable[[], contextlib.AbstractContextManager[object]]


def ours(inputs: Inputs, grad: Inputs, kernel: str | None, name: str) -> Iterator[tuple[Cost, Call, Context]]:
    """The ways into a kernel of ours, causal."""
    q, k, v = inputs.q, inputs.k, inputs.v
    asked = (None, True, False, [-1, -1], "bottom-right", 0.0, 0.0, False, kernel)
    operands = schema.operands(inputs, CallOptions(causal=True), False, kernel)
    passed = asked if kernel else asked[:2]  # a compiled graph leaves off the last ones that have their defaults
    operator = torch.ops.flashlane.forward.default
    alternating = itertools.cycle([[t.clone() for t in (q, k, v)] for _ in range(SETS)])

    def direct() -> object:
        return flashlane.flash_attn_func(q, k, v, causal=True, kernel=kernel)

    def alternately() -> object:
        return flashlane.flash_attn_func(*next(alternating), causal=True, kernel=kernel)

    def short() -> object:
        return operator(q, k, v, causal=True, tag=kernel) if kernel else operator(q, k, v, causal=True)

    def in_graph() -> object:
        return operator(q, k, v, *passed)

    def recorded() -> object:
        return flashlane.flash_attn_func(grad.q, grad.k, grad.v, causal=True, kernel=kernel)

    yield Cost(f"{name}: flash_attn_func", "direct", name), direct, torch.no_grad
    yield Cost(f"{name}: flash_attn_func, {SETS} sets of tensors in turn", "direct", name), alternately, torch.no_grad
    yield Cost(f"{name}: flashlane::forward", "operator", name), short, torch.no_grad
    yield Cost(f"{name}: flashlane::forward in a compiled graph", "operator", name), in_graph, torch.no_grad
    yield (
        Cost(f"{name}: flashlane::forward, every argument", "operator", name),
        lambda: operator(*operands),
        torch.no_grad,
    )
    yield Cost(f"{name}: flash_attn_func with gradient", "gradient", name), recorded, contextlib.nullcontext
    if name != Nothing.tag:
        yield from backwards(f"{name}:", "", name, recorded, grad, contextlib.nullcontext)


def ours_packed(inputs: Inputs, grad: Inputs, kernel: str | None, name: str) -> Iterator[tuple[Cost, Call, Context]]:
    """The same of packed sequences, causal."""
    lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.max_seqlen_q, inputs.max_seqlen_k)
    function = flashlane.flash_attn_varlen_func

    def call(of: Inputs) -> object:
        return function(of.q, of.k, of.v, *lengths, causal=True, kernel=kernel)

    yield from ours_alike("packed", "flash_attn_varlen_func", call, inputs, grad, name)


def ours_windowed(inputs: Inputs, grad: Inputs, kernel: str | None, name: str) -> Iterator[tuple[Cost, Call, Context]]:
    """The same of a window of half the keys, causal."""
    window = inputs.k.shape[1] // 2, 0

    def call(of: Inputs) -> object:
        return flashlane.flash_attn_func(of.q, of.k, of.v, causal=True, window_size=window, kernel=kernel)

    yield from ours_alike("windowed", "windowed flash_attn_func", call, inputs, grad, name)


def ours_alike(
    kind: str, title: str, call: Callable[[Inputs], object], inputs: Inputs, grad: Inputs, name: str
) -> Iterator[tuple[Cost, Call, Context]]:
    """A public function of ours, with and without a gradient; ``kind`` is the begin of the paths."""
    recorded = functools.partial(call, grad)
    yield Cost(f"{name}: {title}", f"{kind} direct", name), functools.partial(call, inputs), torch.no_grad
    yield Cost(f"{name}: {title} with gradient", f"{kind} gradient", name), recorded, contextlib.nullcontext
    if name != Nothing.tag:
        yield from backwards(f"{name}: {kind}", f"{kind} ", name, recorded, grad, contextlib.nullcontext)


def backwards(
    title: str, before: str, kernel: str, call: Call, grad: Inputs, context: Context
) -> Iterator[tuple[Cost, Call, Context]]:
    """A call's forward and backward, and its backward alone, in autograd's thread of the device and in the calling one.
    ``before`` is the begin of their paths."""
    yield Cost(f"{title} forward and backward", f"{before}both", kernel), Both(call, grad), context
    name = f"{title} backward of one kept graph"
    yield Cost(name, f"{before}kept", kernel), KeptBackward(call, grad), context

    @contextlib.contextmanager
    def in_this_thread() -> Iterator[None]:
        with context(), torch.autograd.set_multithreading_enabled(False):
            yield

    yield Cost(f"{name}, in the calling thread", f"{before}kept here", kernel), KeptBackward(call, grad), in_this_thread


class KeptBackward:
    """The backward of a graph that one call of ``forward`` recorded."""

    def __init__(self, forward: Call, grad: Inputs) -> None:
        self.forward, self.leaves = forward, (grad.q, grad.k, grad.v)
        self.graph: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self) -> None:
        if self.graph is None:
            out = self.forward()
            out = out[0] if isinstance(out, tuple) else out
            self.graph = out, torch.randn_like(out)
        torch.autograd.grad(self.graph[0], self.leaves, self.graph[1], retain_graph=True)


class Both:
    """A forward call and the backward of its output."""

    def __init__(self, forward: Call, grad: Inputs) -> None:
        self.forward, self.leaves = forward, (grad.q, grad.k, grad.v)
        self.do: torch.Tensor | None = None

    def __call__(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None
        out = self.forward()
        out = out[0] if isinstance(out, tuple) else out
        if self.do is None:
            self.do = torch.randn_like(out)
        out.backward(self.do)


class Empty(torch.autograd.Function):
    """Saves its inputs, allocates its outputs and its gradients, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor, dlse: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def floor(grad: Inputs) -> Iterator[tuple[Cost, Call, Context]]:
    """Autograd without attention."""
    yield from backwards(
        "autograd alone:", "floor ", "none", lambda: Empty.apply(grad.q, grad.k, grad.v), grad, contextlib.nullcontext
    )


def peers(problem: AttentionProblem, inputs: Inputs, grad: Inputs) -> Iterator[tuple[Cost, Call, Context]]:
    """The peers that this machine has, with and without a gradient."""
    kind = "packed " if problem.varlen else "windowed " if problem.window_left >= 0 else ""
    for peer in PEERS:
        if peer.tag not in PEER_TAGS or peer.available(inputs.q.device) or peer.supports(problem):
            continue
        for suffix, path, tensors in (("", "peer", inputs), ("with gradient", "peer gradient", grad)):

            @contextlib.contextmanager
            def context(peer=peer, recording=bool(suffix)) -> Iterator[None]:
                with peer.context(), torch.set_grad_enabled(recording):
                    yield

            call = peer.prepare(problem, tensors)
            yield Cost(f"{peer.tag} {kind}{suffix}".rstrip(), kind + path, peer.tag), call, context
            if suffix:
                yield from backwards(f"{peer.tag} {kind}".rstrip(), f"{kind}peer ", peer.tag, call, grad, context)


def packed_inputs(inputs: Inputs) -> Inputs:
    """The rows of a batch of one as two sequences, of a third and of two thirds of them."""
    tensors = tuple(t.detach()[0].clone().requires_grad_(t.requires_grad) for t in (inputs.q, inputs.k, inputs.v))
    rows = tensors[0].shape[0]
    cu, most = torch.tensor([0, rows // 3, rows], dtype=torch.int32, device=inputs.q.device), rows - rows // 3
    return Inputs(*tensors, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=most, max_seqlen_k=most)


def one_round(call: Call, context: Context, wait: Callable[[], None], calls: int) -> float:
    """Microseconds a call until it returns."""
    with context():
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        spent = time.perf_counter() - start
        wait()
    return spent / calls * 1e6


def measure(
    items: list[tuple[Cost, Call, Context]],
    wait: Callable[[], None],
    rounds: int,
    seconds: float,
    keep: Callable[[], None],
) -> None:
    """Warm every implementation, then time them in turn until the rounds or the seconds are spent."""
    able = []
    for cost, call, context in items:
        try:
            one_round(call, context, wait, CALLS)
            able.append((cost, call, context))
        except Exception as error:  # a peer may raise anything; it becomes a line that says so
            cost.error = f"{type(error).__name__}: {error}"
    end = time.monotonic() + seconds
    last = -1
    for number, index in drawn_order(len(able), rounds):
        if number != last:
            if last >= 0:
                keep()
            if time.monotonic() > end:
                break
            last = number
        cost, call, context = able[index]
        cost.samples.append(one_round(call, context, wait, CALLS))
    keep()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--kernel", help="tag of the kernel; default: what auto takes")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--dtype", choices=("f16", "bf16", "f32"), default="bf16")
    options = parser.parse_args(arguments)
    check_writable(options.out)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    shape = {"batch": 1, "heads": 8, "seqlen": options.seqlen, "head_dim": 64}
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[options.dtype]
    inputs = Inputs(*(torch.randn(1, options.seqlen, 8, 64, dtype=dtype, device=device) for _ in range(3)))
    grad = Inputs(*(t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)))
    with torch.no_grad():
        problem = AttentionProblem.from_inputs(inputs, causal=True)
    packed, packed_grad = packed_inputs(inputs), packed_inputs(grad)
    registry.register(Nothing())
    items = [*floor(grad), *ours(inputs, grad, "nothing", "nothing")]
    items += ours_packed(packed, packed_grad, "nothing", "nothing")
    items += ours_windowed(inputs, grad, "nothing", "nothing")
    tag = dispatch.select(problem, options.kernel).tag
    if gpu or options.kernel:
        items += ours(inputs, grad, options.kernel, tag)
        items += ours_packed(packed, packed_grad, options.kernel, tag)
        items += ours_windowed(inputs, grad, options.kernel, tag)
    if gpu:
        items += peers(problem, inputs, grad)
        with torch.no_grad():
            items += peers(AttentionProblem.from_inputs(packed, causal=True), packed, packed_grad)
            window = options.seqlen // 2, 0
            windowed = AttentionProblem.from_inputs(inputs, causal=True, window_size=window)
            items += peers(windowed, inputs, grad)
    body = {"format": FORMAT, "environment": environment(device), "problem": problem.describe(), **shape}
    body |= {"calls": CALLS, "method": "host clock, the device waited for outside", "limits_us": LIMITS, "auto": tag}
    path = options.out / "host_cost.json"

    def keep() -> None:
        rows = [cost.figures() for cost, _, _ in items]
        write_atomically(path, json.dumps({**body, "rows": rows}, indent=1) + "\n")

    measure(items, torch.cuda.synchronize if gpu else lambda: None, options.rounds, options.seconds, keep)
    over = 0
    for cost, _, _ in items:
        row = cost.figures()
        limit = LIMITS.get(cost.path) if gpu else None
        if "us" not in row:
            print(f"{cost.name:<60} {cost.error}")
            continue
        late = limit is not None and row["us"] > limit
        over += late
        note = f"  {'OVER' if late else 'within'} {limit:g}" if limit else ""
        print(f"{cost.name:<60} {row['us']:7.1f} µs  ({row['us_q1']:.1f} to {row['us_q3']:.1f}){note}")
    print(f"wrote {path}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
