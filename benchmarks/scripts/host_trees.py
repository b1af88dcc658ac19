"""What calls cost the host in two source trees of flashlane, without a GPU: microseconds of Python and of torch.

    PYTHONPATH=src python3 benchmarks/scripts/host_trees.py --before OLD/src --out host_trees.json [--seconds 120]

Launches do nothing (tests/support/driverless.py), kernels are not compiled, and tensors are on the CPU. What is left is
the Python of a call and what torch does for it. The tensors that a call allocates lie where those of the call before
did, as with torch's allocator of a GPU in a loop of calls that are alike; with ``addresses in turn`` they alternate
between a few places, as where results of a call live on; with ``new addresses`` none recurs while the library keeps
what it has prepared for an address. ``operator`` is ``flashlane::backward``, as a compiled graph calls it; with ``first
addresses`` each timing is of a problem that no call had before, and no address recurs. ``new lengths`` are calls of
which no other has the lengths, as prompts, the tokens after them and packed batches are. ``empty function`` is an
``autograd.Function`` with these tensors that computes nothing, the least that a function in Python costs; ``empty,
transposed`` has the four transposes that a call of ``scaled_dot_product_attention`` needs for tensors of this layout.
Each tree runs in processes of its own, one after another, because the same code differs by some percent from process to
process. In each round each tree times each call in drawn order, by the CPU time of its thread, and a figure is the
median or the lower quartile of all rounds. Launches and allocations of a call are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compare_trees import Tree

SUPPORT = Path(__file__).parents[2] / "tests/support"
SCRIPT = "benchmarks/scripts/host_trees.py"
KERNEL = "hopper(wgmma+tma)"
TREES = ("before", "after")
LEAST_ROUNDS = 2
"""Rounds of a process, whatever time there is."""
CALLS = 60
"""Calls of one timing."""
WARM_CALLS = 10
"""Calls before them, which bring code and data into the caches."""
SAME, TURNS, NEW = 0, 12, 3 * 300
"""Tensors of a layout that calls are given in turn: 0, those of the call before; or so many that a call with three of
a layout finds them again after four calls, or after more calls than a plan keeps blocks of parameters for (256)."""
WAYS_OF_ADDRESSES = {"addresses in turn": TURNS, "new addresses": NEW}

PROBLEMS: dict[str, dict[str, Any]] = {
    "B1 H8 N128 D64 causal": {"shape": (1, 128, 8, 8, 64)},
    "B3 H16 N515 D88 causal": {"shape": (3, 515, 16, 16, 88)},
    "B1 H5 N2138 D88 causal": {"shape": (1, 2138, 5, 5, 88)},
    "B1 H5 N2138 D88 causal window(127,0)": {"shape": (1, 2138, 5, 5, 88), "window": (127, 0)},
    "B1 H39 N1062 D128 causal": {"shape": (1, 1062, 39, 39, 128)},
    "B1 H39 N1062 D128 causal window(512,0)": {"shape": (1, 1062, 39, 39, 128), "window": (512, 0)},
    "B2 H4/2 N2635 D96 causal window(1000,0)": {"shape": (2, 2635, 4, 2, 96), "window": (1000, 0)},
    "B6 H7 N744 D192 causal": {"shape": (6, 744, 7, 7, 192)},
    "300+724 rows H8 D64 causal": {"shape": (1, 1024, 8, 8, 64), "lengths": (300, 724)},
    "300+724 rows H8/2 D128 causal window(128,0)": {
        "shape": (1, 1024, 8, 2, 128), "lengths": (300, 724), "window": (128, 0),
    },
}  # fmt: skip
"""Batch, rows, heads, key/value heads and head dim of each, with its window and the lengths of packed sequences."""
SMALL = ("B1 H8 N128 D64 causal",)
"""The problems of small tensors, which are timed with other addresses, too, and next to an empty function."""


# --- a worker: one tree, of which the public functions are known, and where it compiles and allocates ---


class Memory:
    """Gives tensors of each layout in turn, in place of an allocator."""

    def __init__(self) -> None:
        self.count = 0
        """Tensors that were given."""
        self.kept = SAME
        """Tensors of a layout that are given in turn."""
        self.tensors: dict[Any, list[Any]] = {}
        self.given: dict[Any, int] = {}
        """Tensors of each layout that were given since the turn began."""

    def begin(self) -> None:
        """A call begins."""
        if not self.kept:
            self.given.clear()

    def allocate(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: Any) -> Any:
        import torch

        self.count += 1
        layout = size, stride, dtype
        number = self.given.get(layout, 0)
        self.given[layout] = number + 1
        tensors = self.tensors.setdefault(layout, [])
        number = number % self.kept if self.kept else number
        while number >= len(tensors):
            tensors.append(torch.empty_strided(size, stride, dtype=dtype))
        return tensors[number].detach()


class Worker:
    """The calls of one tree."""

    def __init__(self) -> None:
        sys.path.insert(0, str(SUPPORT))
        import driverless
        import torch

        from flashlane import jit
        from flashlane.jit import launch
        from flashlane.ops import call_cache

        torch.set_num_threads(1)
        self.memory, self.driver = Memory(), driverless.install()
        launch.allocator = lambda device: self.memory.allocate  # type: ignore[assignment]
        call_cache.contents_are_read = lambda inputs: False  # as on a GPU
        compiled = functools.cache(Compiled)
        jit.compile = lambda source, arch, **options: compiled(source)  # type: ignore[assignment]
        jit.compile_together = lambda sources, arch: tuple(map(compiled, sources))  # type: ignore[assignment]
        self.calls: dict[str, tuple[int, Callable[[], object]]] = {}

    def build(self, source: str, only: str) -> list[str]:
        """Prepare the calls of the problems whose names have these words; the calls' names.

        Raises:
            ImportError: it is another tree's package that is imported, such as an installed one.
        """
        import flashlane

        if not Path(flashlane.__file__).resolve().is_relative_to(Path(source).resolve()):
            raise ImportError(f"there is no flashlane; {flashlane.__file__} was imported")
        for name, problem in PROBLEMS.items():
            if not set(only.split()) <= set(name.split()):
                continue
            call, leaves = built(problem)
            for way, timed in ways(call, leaves):
                self.calls[f"{way}: {name}"] = SAME, timed
                if name in SMALL and way != "forward":
                    self.calls |= {f"{way}, {at}: {name}": (kept, timed) for at, kept in WAYS_OF_ADDRESSES.items()}
            if name in SMALL:
                self.calls[f"operator: {name}"] = SAME, operator_call(leaves)
                self.calls[f"operator, first addresses: {name}"] = SAME, FirstAddresses(leaves)
                for title, empty in empty_calls(leaves):
                    self.calls |= {f"{way}, {title}: {name}": (SAME, timed) for way, timed in ways(empty, leaves)}
        if not only:
            self.calls |= {f"{way}, new lengths: {name}": (SAME, call) for way, name, call in calls_of_new_lengths()}
        for name, (kept, _) in self.calls.items():
            self.time(name, max(1, kept))
        gc.disable()  # it would begin in calls that keep what they made, at whatever the calls before have left
        return list(self.calls)

    def time(self, name: str, count: int) -> float:
        """Microseconds of a call."""
        import torch

        memory = self.memory
        memory.kept, call = self.calls[name]
        if isinstance(call, FirstAddresses | NewLengths):
            call.begin(WARM_CALLS + count)
        with torch.no_grad() if name.startswith(("forward", "operator")) else contextlib.nullcontext():
            for _ in range(WARM_CALLS):
                memory.begin()
                call()
            begin = time.thread_time()
            for _ in range(count):
                memory.begin()
                call()
            return (time.thread_time() - begin) / count * 1e6

    def count(self, name: str) -> tuple[int, int]:
        """Launches and allocations of a call."""
        before = self.driver.launched, self.memory.count
        self.time(name, 1)
        calls = WARM_CALLS + 1
        return (self.driver.launched - before[0]) // calls, (self.memory.count - before[1]) // calls


class Compiled:
    """Stands for a kernel that was compiled."""

    arch, cubin = "sm_90a", b""

    def __init__(self, source: Any) -> None:
        self.source, self.key = source, str(id(source))


def ways(call: Callable[[], Any], leaves: tuple[Any, ...]) -> Iterator[tuple[str, Callable[[], object]]]:
    """A call's forward, its backward of one kept graph, and a forward that records and its backward."""
    import torch

    out = call()
    do = torch.randn_like(out)
    yield "forward", call
    yield "backward", lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)
    yield "both", lambda: torch.autograd.grad(call(), leaves, do)


def operator_call(leaves: tuple[Any, ...], scale: float = 0.125) -> Callable[..., object]:
    """The backward operator with the arguments that a compiled graph gives it, of q, k, v and an output's gradient."""
    import torch

    from flashlane.core.problem import CallOptions, Inputs
    from flashlane.ops import schema

    q, k, v = (t.detach() for t in leaves)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])
    options = CallOptions(scale=scale, causal=True)
    operator = torch.ops.flashlane.backward.default

    def call(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, do: torch.Tensor = out) -> object:
        return operator(out, lse, do, None, False, *schema.operands(Inputs(q, k, v), options, True, KERNEL))

    return call


class FirstAddresses:
    """The backward operator for one timing, then for that of another problem; tensors are made before it begins."""

    def __init__(self, leaves: tuple[Any, ...]) -> None:
        self.leaves, self.scales = leaves, itertools.count(1)

    def begin(self, calls: int) -> None:
        import torch

        self.call = operator_call(self.leaves, next(self.scales) / 1024)
        self.tensors = iter([[torch.zeros_like(self.leaves[0]) for _ in range(4)] for _ in range(calls)])

    def __call__(self) -> object:
        return self.call(*next(self.tensors))


class NewLengths:
    """Calls of which none has the lengths of another; their tensors are made before the timing begins."""

    def __init__(self, arguments: Callable[[int], tuple[Any, ...]], call: Callable[..., object]) -> None:
        self.arguments, self.call, self.numbers = arguments, call, itertools.count()

    def begin(self, calls: int) -> None:
        self.given = iter([self.arguments(next(self.numbers)) for _ in range(calls)])

    def __call__(self) -> object:
        return self.call(*next(self.given))


def calls_of_new_lengths() -> Iterator[tuple[str, str, NewLengths]]:
    """The way, the name and the calls: prompts, one token after so many, and two packed sequences."""
    import torch

    import flashlane

    rows = 20_000
    q, k, v = (torch.zeros(1, rows, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8))

    def dense(queries: int, keys: int) -> tuple[Any, ...]:
        return q[:, :queries], k[:, :keys], v[:, :keys]

    def attend(*tensors: torch.Tensor) -> object:
        return flashlane.flash_attn_func(*tensors, causal=True)

    yield "forward", "B1 H32/8 N512.. D128 causal", NewLengths(lambda i: dense(512 + i, 512 + i), attend)
    yield "forward", "B1 H32/8 N1x512.. D128 causal", NewLengths(lambda i: dense(1, 512 + i), attend)
    total = 16_384
    leaves = tuple(t[0, :total].detach().requires_grad_() for t in (q, k, v))
    do = torch.zeros_like(leaves[0])

    def packed(i: int) -> tuple[Any, ...]:
        first = total // 2 + i
        return torch.tensor([0, first, total], dtype=torch.int32), first

    def attend_packed(ends: torch.Tensor, longest: int) -> Any:
        return flashlane.flash_attn_varlen_func(*leaves, ends, ends, longest, longest, causal=True)

    def both(ends: torch.Tensor, longest: int) -> object:
        with torch.autograd.set_multithreading_enabled(False):  # a thread's time is taken
            return torch.autograd.grad(attend_packed(ends, longest), leaves, do)

    name = "two of 16384 rows H32/8 D128 causal"
    yield "forward", name, NewLengths(packed, attend_packed)
    yield "both", name, NewLengths(packed, both)


def empty_calls(leaves: tuple[Any, ...]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """An empty function of q, k and v, and the same between transposes."""
    from host_cost import Empty

    yield "empty function", lambda: Empty.apply(*leaves)[0]
    yield "empty, transposed", lambda: Empty.apply(*(t.transpose(1, 2) for t in leaves))[0].transpose(1, 2)


def built(problem: dict[str, Any]) -> tuple[Callable[[], Any], tuple[Any, ...]]:
    """The call of a problem, and q, k and v."""
    import torch

    import flashlane

    batch, rows, heads, kv_heads, dim = problem["shape"]
    lengths = problem.get("lengths")
    size = (rows,) if lengths else (batch, rows)
    q, k, v = (torch.zeros(*size, n, dim, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads))
    leaves = tuple(t.requires_grad_() for t in (q, k, v))
    options = {"causal": True, "window_size": problem.get("window", (-1, -1)), "kernel": KERNEL}
    if not lengths:
        return lambda: flashlane.flash_attn_func(*leaves, **options), leaves
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    most = max(lengths)
    return lambda: flashlane.flash_attn_varlen_func(*leaves, ends, ends, most, most, **options), leaves


def serve() -> None:
    """Reads a request a line, writes an answer a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints must not be taken for an answer
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(worker, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(answer), file=answers, flush=True)


# --- the comparison ---


def asked(tree: Tree, **request: Any) -> Any:
    """What a worker answers.

    Raises:
        RuntimeError: it failed.
    """
    answer = tree.ask(**request)
    if "error" in answer:
        raise RuntimeError(f"{tree.source}: {answer['error']}")
    return answer["value"]


def figures(samples: list[float]) -> dict[str, float]:
    """Median and lower quartile, µs."""
    quartile, median, _ = statistics.quantiles(samples, n=4, method="inclusive")
    return {"us": round(median, 2), "us_q1": round(quartile, 2)}


def run(
    trees: dict[str, Tree], rows: dict[str, dict[str, Any]], draw: random.Random, seconds: float, only: str
) -> None:
    """Add rounds of a process of each tree to the rows, which are by the names of calls."""
    names, others = (asked(trees[tree], do="build", source=trees[tree].source, only=only) for tree in TREES)
    if names != others:
        raise RuntimeError("the trees have different calls")
    for name in names:
        row = rows.setdefault(name, {tree: {"samples": []} for tree in TREES})
        for tree in TREES:
            row[tree]["launches"], row[tree]["allocations"] = asked(trees[tree], do="count", name=name)
    end, rounds = time.monotonic() + seconds, 0
    while rounds < LEAST_ROUNDS or time.monotonic() < end:
        rounds += 1
        for name in draw.sample(names, len(names)):
            for tree in draw.sample(TREES, len(TREES)):
                rows[name][tree]["samples"].append(asked(trees[tree], do="time", name=name, count=CALLS))


def line(name: str, row: dict[str, dict[str, Any]]) -> str:
    """A row as text."""

    def change(key: str, form: str) -> str:
        return " -> ".join(f"{row[tree][key]:{form}}" for tree in TREES)

    quartiles = f"median {change('us', '6.1f')} µs, lower quartile {change('us_q1', '6.1f')}"
    return f"{name:<68} {quartiles}, launches {change('launches', '')}, allocations {change('allocations', '')}"


def main(arguments: list[str] | None = None) -> int:
    if "--worker" in sys.argv:
        serve()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="source folder of the old tree")
    parser.add_argument("--after", default="src", help="source folder of the new tree")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--processes", type=int, default=3, help="of each tree, among which the seconds are divided")
    parser.add_argument("--only", default="", help="problems whose names have all these words: 'D88 window(127,0)'")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    import torch

    from flashlane.bench.measure.environment import environment

    draw, rows = random.Random(options.seed), {}
    for _ in range(options.processes):
        trees = {name: Tree(getattr(options, name), __file__) for name in TREES}
        run(trees, rows, draw, options.seconds / options.processes, options.only)
        for tree in trees.values():
            tree.process.stdin.close()
            tree.process.wait()
    for name, row in rows.items():
        for tree in TREES:
            row[tree] |= figures(row[tree].pop("samples"))
        print(line(name, row))
    record = {
        "script": SCRIPT, "environment": environment(torch.device("cpu")), "seed": options.seed, "calls": CALLS,
        "device": "none: launches do nothing", "processes": options.processes,
        "commits": os.environ.get("COMPARED_COMMITS", ""), "rows": rows,
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
