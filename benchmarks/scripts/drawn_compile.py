"""What drawn.py compiles before it times: our kernels, and cuDNN's by a call of each kind."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from hopper_shapes import PEER_TAGS

from flashlane import bench, jit
from flashlane.bench.measure.flops import Direction
from flashlane.bench.measure.peers import Peer
from flashlane.core import dispatch
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import CompiledKernel
from flashlane.jit import KernelSource
from flashlane.tuning.candidates import candidates_of, sources_of

WARM_LENGTH = 128
"""Sequences that cuDNN is called with, so that it compiles a kernel, have fewer tokens than twice as many."""


def needed(problem: AttentionProblem, direction: Direction, candidates: bool) -> Iterator[KernelSource]:
    """What a problem is compiled from, on its architecture."""
    kernels = [dispatch.select(problem)]
    if direction != "forward":
        kernels.append(dispatch.select_backward(problem, kernels[0]))
    for kernel in kernels:
        if isinstance(kernel, CompiledKernel):
            yield from (each.source for each in kernel.device_sources(kernel.config(problem), str(problem.arch)))
    if candidates:
        for candidate in candidates_of(problem, direction):
            yield from sources_of(candidate, problem)


def compile_all(problems: Iterable[tuple[AttentionProblem, Direction]], candidates: bool) -> int:
    """Compile what problems need, many at a time; how many kernels there are. One that fails is reported later."""
    jobs: dict[KernelSource, str] = {}
    for problem, direction in problems:
        jobs |= dict.fromkeys(needed(problem, direction, candidates), str(problem.arch))

    def build(source: KernelSource) -> None:
        try:
            jit.compile(source, jobs[source])
        except Exception as error:
            print(f"{source.entry}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, jobs))
    return len(jobs)


def warm_cudnn(
    problems: Iterable[tuple[AttentionProblem, Direction]], device: torch.device, peers: Sequence[Peer]
) -> int:
    """Call cuDNN for each kind of problem, many at a time; how many kinds there are. At the first call of a kind it
    compiles a kernel in a second or two, which it keeps for the process.

    A kernel serves 64 head dims, and lengths that are whole tiles or those that are not.
    """
    peer = next((peer for peer in peers if peer.tag == PEER_TAGS["cudnn"]), None)
    if peer is None or peer.available(device):
        return 0
    kinds: dict[tuple[Any, ...], tuple[AttentionProblem, Direction]] = {}
    for problem, direction in problems:
        if peer.supports(problem) is None:
            rows, keys = (
                n if n < WARM_LENGTH else WARM_LENGTH + n % WARM_LENGTH for n in (problem.seqlen_q, problem.seqlen_k)
            )
            short = replace(problem, batch=1, heads=problem.group, kv_heads=1, seqlen_q=rows, seqlen_k=keys)
            whole = rows % WARM_LENGTH == 0, keys % WARM_LENGTH == 0
            kind = problem.dtype, -(-problem.head_dim // 64), problem.causal, *whole, direction
            kinds.setdefault(kind, (short, direction))

    def call(kind: tuple[AttentionProblem, Direction]) -> None:
        problem, direction = kind
        grads = direction != "forward"
        inputs = bench.Case(problem).materialise(device, 0)
        tensors = [t.requires_grad_(grads) for t in (inputs.q, inputs.k, inputs.v)]
        with torch.set_grad_enabled(grads), contextlib.suppress(RuntimeError):  # its row reports the error
            out = peer.prepare(problem, inputs)()
            if grads:
                torch.autograd.grad(out, tensors, torch.ones_like(out))

    with peer.context(), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(call, kinds.values()))
    return len(kinds)


def refuse_to_compile_fa4() -> None:
    """Let FlashAttention-4 raise where its compile cache lacks a kernel, before it prepares to compile one."""
    try:
        from flash_attn.cute.cache_utils import JITPersistentCache
    except ImportError:
        return
    load = JITPersistentCache._try_load_from_storage

    def loaded(cache: Any, key: Any) -> bool:
        if load(cache, key):
            return True
        raise RuntimeError("its compile cache lacks the kernel (tools/fa4_cache.py --drawn)")

    JITPersistentCache._try_load_from_storage = loaded
