"""Compile, without a GPU, what the benchmarks and GPU tests run on a Hopper one, and pack it for that machine.

    python tools/ahead.py [--parts hopper,tests,mma,baseline,decode,sanitize,auto] [--out .carry/cubins.tar.xz] [--list]
    python tools/ahead.py --parts "" --drawn dense:forward:1000:60,dense:backward:1000:40:candidates

There, before the first run (the cache is keyed by sources and the compiler's version, so it must be the same NVRTC):

    mkdir -p CACHE/flashlane && tar xf cubins.tar.xz -C CACHE/flashlane && export XDG_CACHE_HOME=CACHE

Parts: ``hopper`` forward and backward benchmarks; ``tests`` their GPU tests; ``ranks`` those of several ranks, whose
kernels processes of their own compile; ``mma`` its targets; ``baseline`` its
logs; ``decode`` its cells; ``sanitize`` both builds that sanitize.py runs; ``auto`` everything that ``auto`` is checked
against, which takes longest. ``--drawn`` names lists of drawn.py, KIND:DIRECTION:SEED:COUNT, with candidates too
where ``:candidates`` follows. Exit status 1 when something did not compile.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.progress import Progress

from flashlane import jit
from flashlane.bench.suites.baseline import lines as baseline_lines
from flashlane.core import dispatch, registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import Kernel
from flashlane.distributed import own_copies, own_sums
from flashlane.inspect import prebuild
from flashlane.jit import KernelSource, cache
from flashlane.kernels.hopper.backward import kernel as backward
from flashlane.kernels.hopper.forward import select
from flashlane.kernels.hopper.forward.config import HopperConfig

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = ("benchmarks/scripts", "tests/support", "tests/kernels/hopper")
"""Folders whose modules the parts import."""
ARCH, SMS = "sm_90a", 132
HOPPER = "hopper(wgmma+tma)"


def of(pairs: Iterable[tuple[Kernel, AttentionProblem]]) -> Iterable[KernelSource]:
    """What kernels run problems with."""
    from gpu_run import sources_of

    return sources_of(pairs)


def with_backward(problem: AttentionProblem) -> Iterator[KernelSource]:
    yield from of([(registry.get(HOPPER), problem)])
    if backward.supports(problem) is None:
        yield from backward.KERNEL.sources(problem)


def hopper() -> Iterator[KernelSource]:
    import hopper_backward
    import hopper_forward
    from hopper_shapes import Shape, problem_of

    shapes = [shape for name in ("grid", "dims", "shapes") for shape in hopper_forward.suite(name)]
    shapes += [Shape(1, 8, 8, 128, 128, 64, 64, True)]  # host_cost.py
    for shape in shapes:
        yield from of([(registry.get(HOPPER), problem_of(shape))])
    for cell in hopper_backward.cells(("backward",)):
        for deterministic in {False, cell.deterministic}:
            yield from with_backward(problem_of(cell.shape, deterministic))


def tests() -> Iterator[KernelSource]:
    import hopper_gradients as of_backward
    import test_hopper_gpu as of_forward

    for variant in of_backward.VARIANTS:
        case = replace(of_backward.draw(variant, 0).case, lengths=((3, 5), (3, 5)), strides="plain")
        problem = case.build(variant.dtype)[0].on(ARCH)
        yield from with_backward(replace(problem, deterministic="deterministic" in variant.features))
    for number, (row, shape, causal) in enumerate(of_forward.ROWS):
        dtype = tuple(of_forward.RELATIVE)[number % 2]
        sizes = ((1500, 6, row.head_dim), (1777, 2, row.head_dim), (1777, 2, row.head_dim_v))
        inputs = Inputs(*(torch.empty(2, *size, dtype=dtype) for size in sizes))
        problem = AttentionProblem.from_inputs(inputs, causal=causal).on(ARCH)
        tile = HopperConfig(problem.dtype_name, row.head_dim, row.head_dim_v, **asdict(shape))
        yield select.specialise(tile, problem).source()
    for kind in of_forward.KINDS:
        yield from of((registry.get(HOPPER), of_forward.draw(kind, s)[0].on(ARCH)) for s in range(of_forward.SEEDS))
    for case in of_forward.CASES:
        yield case.config(case.build(torch.device("cpu"))[0].on(ARCH)).source()


def ranks() -> Iterator[KernelSource]:
    import rank_kernels
    import ranks_on_one_gpu

    yield own_copies.source()
    yield own_sums.source("bf16")
    yield from rank_kernels.sources_of_job(2, "check_and_repeat", rank_kernels.TOKENS, 0)
    ranks_on_one_gpu.HERE = torch.device("cpu")
    yield from ranks_on_one_gpu.sources()


def mma() -> Iterator[KernelSource]:
    import mma_targets

    yield from of(
        (registry.get(tag), g.problem) for g in mma_targets.targets(ARCH) for tag in mma_targets.tags_for(g, ())
    )


def baseline() -> Iterator[KernelSource]:
    yield from of((registry.get(tag), line.problem) for line in baseline_lines(ARCH) for tag in line.kernels)


def decode() -> Iterator[KernelSource]:
    import decode as bench

    yield from of((dispatch.select(problem), problem) for problem in bench.problems(bench.grid(), ARCH))


def sanitize() -> Iterator[KernelSource]:
    import sanitize as tools

    yield from of((kernel, problem) for kernel, problem, _ in tools.kernel_cases([], ARCH))
    for case in tools.forward_cases():
        problem = case.build(torch.device("cpu"))[0].on(ARCH)
        if registry.get(HOPPER).supports(problem) is None:
            yield case.config(problem).source()
    for case in tools.backward_cases():
        problem = case.build()[0].on(ARCH)
        if backward.supports(problem) is None:
            yield from backward.config_of(problem).sources()


def auto() -> Iterator[KernelSource]:
    import auto_check

    grid = auto_check.grid_of(argparse.Namespace(**auto_check.GRID))
    for problem in dict.fromkeys(auto_check.problems_of(grid, ARCH)):
        found = map(auto_check.source_of, auto_check.contenders(problem))
        yield from (source for source in found if source is not None)


def drawn(text: str) -> Iterator[KernelSource]:
    """What lists of drawn.py need."""
    import drawn as script
    from drawn_compile import needed

    for asked, candidates in script.lists_of_text(text):
        for number in range(asked.count):
            yield from needed(asked.problem(number, ARCH), asked.direction, candidates)


PARTS: dict[str, Callable[[], Iterator[KernelSource]]] = {
    part.__name__: part for part in (hopper, tests, ranks, mma, baseline, decode, sanitize, auto)
}


def collected(parts: Iterable[str], lists: str = "") -> dict[KernelSource, str]:
    """The sources of some parts and of lists of drawn problems, each with the first part that needs it."""
    sources: dict[KernelSource, str] = {}
    sys.path[:0] = [str(ROOT / folder) for folder in IMPORTED]
    device_properties = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=SMS)
    try:
        for part in parts:
            for source in PARTS[part]():
                sources.setdefault(source, part)
        for source in drawn(lists) if lists else ():
            sources.setdefault(source, "drawn")
    finally:
        torch.cuda.get_device_properties = device_properties
        del sys.path[: len(IMPORTED)]
    return sources


def packed(path: Path, folder: Path, keys: Iterable[str]) -> int:
    """Write an archive of what the cache holds under some keys; how many bytes it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with tarfile.open(part, "w:xz") as archive:
        for key in sorted(keys):
            for file in sorted(folder.glob(f"{key}.*")):
                archive.add(file, file.name)
    part.replace(path)
    return path.stat().st_size


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="hopper,tests", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--drawn", default="", help="lists of drawn.py: KIND:DIRECTION:SEED:COUNT[:candidates],...")
    parser.add_argument("--out", type=Path, default=Path(".carry/cubins.tar.xz"))
    parser.add_argument("--list", action="store_true", help="say how many kernels there are, and compile nothing")
    options = parser.parse_args(arguments)
    parts = [word for word in options.parts.split(",") if word]
    if not (parts or options.drawn) or not set(parts) <= set(PARTS):
        parser.error(f"--parts is {options.parts!r}; it may hold {', '.join(PARTS)}")
    try:
        sources = collected(parts, options.drawn)
    except ValueError as error:
        parser.error(f"--drawn: {error}")
    for part in (*parts, "drawn") if options.drawn else parts:
        print(f"{part}: {list(sources.values()).count(part)} kernels")
    if options.list:
        return 0
    racecheck = set(collected(["sanitize"])) if "sanitize" in parts else ()

    def build(wanted: Collection[KernelSource], words: str) -> prebuild.Built:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(words, total=len(wanted))
            return prebuild.compile_all(((source, ARCH) for source in wanted), lambda: progress.advance(task))

    built = [build(sources, "compiling")]
    os.environ[jit.compiler.RACECHECK] = "1"
    built.append(build(racecheck, "for racecheck"))
    del os.environ[jit.compiler.RACECHECK]
    keys = [one.key for each in built for one in each.compiled]
    wrong = [line for each in built for line in each.wrong]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{options.out}: {len(keys)} kernels, {packed(options.out, cache.default().folder, keys) / 1e6:.1f} MB")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
