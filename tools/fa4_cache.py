"""Compile FlashAttention-4's kernels of the Hopper benchmarks into its own disk cache, on a machine without a GPU.

    PYTHONPATH=src:PEERS:PEERS/nvidia_cutlass_dsl/dsl_packages python3.12 tools/fa4_cache.py CACHE [--jobs 2]
        [--drawn dense:forward:1000:60,packed:backward:1000:20]

It compiles some ten seconds a kernel, tens of which the benchmarks call: too long on a GPU that is lent by the minute.
The benchmarks' own calls are made here on fake tensors, so that the keys are those of the calls there. PEERS is where
flash-attn-4, the CuTe DSL and what they need are unpacked; Python, torch and all of them must be of the versions of the
GPU machine, which then runs with

    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=CACHE

``--drawn`` takes the problems of those lists of benchmarks/scripts/drawn.py instead. ``--missing`` lists what CACHE
lacks, and compiles nothing. Exit status 1 when it lacks something in the end.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
TARGET = {
    "CUDA_VISIBLE_DEVICES": "",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
}
SECONDS = {"fwd": 6, "bwd": 7}
"""What a kernel of a folder of the cache takes about; others take 2."""
Kernel = tuple[Path, str]
"""Folder and key in the cache."""
Build = Callable[[], tuple[Any, Any]]
"""What makes a problem and its tensors."""


class NoGenerator:
    """Takes the place of torch's generator, which draws no fake tensors."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def manual_seed(self, seed: int) -> NoGenerator:
        return self


class Calls:
    """The benchmarks' calls of FlashAttention-4, on fake tensors of a GPU that need not be there.

    With ``lists``, those of drawn.py: the problems of these lists.
    """

    def __init__(self, lists: str = "") -> None:
        import torch
        import tvm_ffi
        from torch._subclasses.fake_tensor import FakeTensor

        from flashlane import bench
        from flashlane.bench.measure import implementations

        sys.path.insert(0, str(ROOT / "benchmarks" / "scripts"))
        self.shapes, self.forward, self.backward = map(
            importlib.import_module, ("hopper_shapes", "hopper_forward", "hopper_backward")
        )
        self.lists = importlib.import_module("drawn").lists_of_text(lists) if lists else ()
        (self.peer,) = bench.select_peers("(flash-attn-4)")
        self.device, self.implementations = torch.device("cuda", 0), implementations
        # What a machine without a driver cannot do, and no key depends on.
        torch.cuda.get_device_capability = lambda device=None: (9, 0)
        implementations.sequences_of = lambda problem, inputs: ()
        real = torch.Tensor.__dlpack__
        torch.Tensor.__dlpack__ = lambda t, **how: (
            tvm_ffi.from_dlpack(t).__dlpack__() if isinstance(t, FakeTensor) else real(t, **how)
        )

    def cells(self) -> Iterator[tuple[str, Build, str]]:
        """Title, what makes problem and tensors, and direction; ``graph`` is a forward that a backward may follow."""
        if self.lists:
            yield from self.drawn()
            return
        for name in ("grid", "dims", "shapes"):
            for shape in self.forward.suite(name):
                yield f"forward {name}: {shape.title}", self.builder(shape), "forward"
        for group, shape in self.backward.shapes():
            build = self.builder(shape, group == "deterministic")
            yield f"backward {group}: {shape.title}", build, "both"
        small = self.builder(self.shapes.Shape(1, 8, 8, 128, 128, 64, 64, True))
        yield "host cost", small, "forward"
        yield "host cost with gradient", small, "graph"

    def drawn(self) -> Iterator[tuple[str, Build, str]]:
        for problem_list, _ in self.lists:
            for number in range(problem_list.count):
                case = problem_list.case(number).posed("sm_90a")

                def build(case: Any = case) -> tuple[Any, Any]:
                    return case.problem, case.materialise(self.device, 0)

                title = f"{problem_list.direction} {problem_list.kind} {number}: {case.problem.describe()}"
                yield title, build, "forward" if problem_list.direction == "forward" else "both"

    def builder(self, shape: Any, deterministic: bool = False) -> Build:
        def build() -> tuple[Any, Any]:
            problem, inputs = self.shapes.make(shape, self.device)
            return replace(problem, deterministic=deterministic), inputs

        return build

    def make(self, build: Build, direction: str) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        def gradients(out: Any, inputs: Any, do: Any, retain_graph: bool = False) -> Any:
            with torch.no_grad():
                return out.grad_fn.apply(do, None)[:3]  # what autograd's engine would call

        fakes = {
            "randn": lambda size, generator=None, **how: torch.empty(size, **how),
            "randperm": lambda n, generator=None, **how: torch.empty(n, dtype=torch.int64, **how),
            "Generator": NoGenerator,
        }
        with (
            mock.patch.multiple(torch, **fakes),
            mock.patch.object(torch.autograd, "grad", gradients),
            FakeTensorMode(),
            torch.no_grad(),
        ):
            problem, inputs = build()
            if reason := self.peer.supports(problem):
                print(f"not FlashAttention-4's: {problem.describe()}: {reason}")
            elif direction == "both":
                only = mock.Mock(peers=(self.peer,), kernels=lambda: (), excludes=lambda tag: None)
                for item in self.implementations.prepare(problem, inputs, direction, only, self.device, 0).items:
                    item.call()
            else:
                if direction == "graph":
                    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in "qkv"}
                    inputs = replace(inputs, **leaves)
                with torch.set_grad_enabled(direction == "graph"):
                    self.implementations.Prepared(self.peer, problem, inputs)()

    def needs(self) -> list[tuple[int, str, tuple[Kernel, ...]]]:
        """Number and title of cells that need kernels which none before them does, and these; nothing is compiled."""
        from cutlass import cute
        from flash_attn.cute.cache_utils import JITCache, JITPersistentCache

        needs, new = [], []

        def put(cache: Any, key: Any, function: Any) -> None:
            JITCache.__setitem__(cache, key, function)
            new.append((cache.cache_path, cache._key_to_hash(key)))

        with (
            mock.patch.object(cute, "compile", lambda *a, **how: lambda *b: None),
            mock.patch.object(JITPersistentCache, "__setitem__", put),
            mock.patch.object(JITPersistentCache, "_try_load_from_storage", lambda cache, key: False),
        ):
            for number, (title, *cell) in enumerate(self.cells()):
                new.clear()
                self.make(*cell)
                if new:
                    needs.append((number, title, tuple(new)))
        return needs


def shares(todo: list[tuple[int, str, tuple[Kernel, ...]]], jobs: int) -> list[list[int]]:
    """Numbers of cells for each process, the longest first and each to who has least."""
    cost = {number: sum(SECONDS.get(folder.name, 2) for folder, _ in kernels) for number, _, kernels in todo}
    found: list[list[int]] = [[] for _ in range(jobs)]
    for number in sorted(cost, key=cost.get, reverse=True):
        min(found, key=lambda share: sum(cost[n] for n in share)).append(number)
    return [share for share in found if share]


def lacking(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    return tuple((folder, key) for folder, key in kernels if not (folder / f"{key}.o").exists())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, metavar="CACHE", help="folder, made if it is not there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--drawn", default="", help="lists of drawn.py, KIND:DIRECTION:SEED:COUNT,...")
    parser.add_argument("--missing", action="store_true", help="list what is lacking, and compile nothing")
    parser.add_argument("--cells", default="", help="numbers of cells: compile just them, in this process")
    options = parser.parse_args()
    os.environ.update(TARGET, FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=str(options.cache.resolve()))
    os.environ.pop("FA_LOG_LEVEL", None)  # it is in the keys
    try:
        calls = Calls(options.drawn)
        importlib.import_module("flash_attn.cute")
    except ImportError as error:
        parser.error(f"FlashAttention-4 is not there: {error}; PYTHONPATH must have what it needs")
    except ValueError as error:
        parser.error(f"--drawn: {error}")
    if options.cells:
        wanted = {int(number) for number in options.cells.split(",")}
        for number, (title, *cell) in enumerate(calls.cells()):
            if number in wanted:
                start, failed = time.monotonic(), ""
                try:
                    calls.make(*cell)
                except Exception as error:  # such a head dim is not theirs: the benchmark says so, and others follow
                    failed = f": {type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"
                print(f"{time.monotonic() - start:6.1f} s  {title}{failed}", flush=True)
        return 0
    needs = calls.needs()
    todo = [(number, title, missing) for number, title, kernels in needs if (missing := lacking(kernels))]
    if not options.missing:
        command = [sys.executable, "-W", "ignore", __file__, str(options.cache), "--drawn", options.drawn, "--cells"]
        numbers = [",".join(map(str, share)) for share in shares(todo, max(1, options.jobs))]
        for child in [subprocess.Popen([*command, share]) for share in numbers]:
            child.wait()
        todo = [(number, title, missing) for number, title, kernels in needs if (missing := lacking(kernels))]
    for _, title, kernels in todo:
        print(f"lacking for {title}:", *(f"{folder.name}/{key[:8]}" for folder, key in kernels))
    count = sum(len(kernels) for *_, kernels in todo)
    print(f"{sum(len(kernels) for *_, kernels in needs)} kernels, {count} of them lacking in {options.cache}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
