"""Compile FlashInfer's libraries for drawn caches, on a machine without a GPU.

    PYTHONPATH=src:PEERS python3.12 tools/flashinfer_cache.py FOLDER --drawn cache:forward:1000:60 [--jobs 2]
        [--missing]

FlashInfer compiles a library for each head dim and dtype at its first call, with nvcc and ninja, for a minute or more:
too long on a GPU that is lent by the minute, and impossible where there is no nvcc. PEERS is where flashinfer-python
0.7.2.post1, apache-tvm-ffi and what they need are unpacked; nvcc and ninja are needed here, and CUDA_HOME where
libcudart is not next to nvcc's folder. FOLDER gets NAME/NAME.so for each library. On the GPU machine FOLDER's content
belongs into flashinfer/data/aot of the package, which then compiles nothing of it. ``--missing`` lists what FOLDER
lacks, and compiles nothing. Exit status 1 when it lacks something in the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARCH, TARGET = "sm_90a", "9.0a"
LINES, WIDTH = 4, 200
"""What is told of a build that failed: as many last lines, and as many last columns of each."""


def problems_of(lists: str) -> list[Any]:
    """The caches of lists of drawn.py that the peer takes.

    Raises:
        ValueError: it is no such list.
    """
    sys.path.insert(0, str(ROOT / "benchmarks" / "scripts"))
    from drawn import lists_of_text

    from flashlane import bench
    from flashlane.kernels.features import is_cached

    (peer,) = bench.select_peers("(flashinfer)")
    each = (lst.problem(number, ARCH) for lst, _ in lists_of_text(lists) for number in range(lst.count))
    return [problem for problem in each if is_cached(problem) and peer.supports(problem) is None]


def libraries_of(problems: Iterable[Any], decode: Callable[..., Any], prefill: Callable[..., Any]) -> dict[str, Any]:
    """What FlashInfer builds for these problems, by name.

    Args:
        problems: caches that it takes.
        decode: what makes the library of the decode kernel without tensor cores.
        prefill: what makes that of a backend of the prefill kernel, which is also the one with tensor cores.
    """
    import torch

    from flashlane.bench.measure.peers_flashinfer import PREFILL_BACKEND, without_tensor_cores
    from flashlane.core.modifiers import numbers_for

    found = {}
    for problem in problems:
        kind = *(problem.dtype,) * 3, torch.int32, problem.head_dim, problem.head_dim_v, 0
        kind += problem.window_left >= 0, bool(numbers_for(problem, "flashinfer"))
        library = decode(*kind) if without_tensor_cores(problem) else prefill(PREFILL_BACKEND, *kind, False)
        found[library.name] = library
    return found


def stand_in_for_the_driver(folder: Path) -> None:
    """Write an empty libcuda.so into a folder, to link with where there is no driver."""
    command = ["cc", "-shared", "-x", "c", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so")]
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if it is not there")
    parser.add_argument("--drawn", required=True, help="lists of drawn.py, KIND:DIRECTION:SEED:COUNT,...")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at one time")
    parser.add_argument("--missing", action="store_true", help="list what is lacking, and compile nothing")
    options = parser.parse_args()
    try:
        problems = problems_of(options.drawn)
    except ValueError as error:
        parser.error(f"--drawn: {error}")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"FLASHINFER_CUDA_ARCH_LIST": TARGET, "FLASHINFER_WORKSPACE_BASE": scratch}
        os.environ |= {"MAX_JOBS": str(options.jobs), "LIBRARY_PATH": f"{scratch}:{os.environ.get('LIBRARY_PATH', '')}"}
        try:
            from flashinfer.jit.attention import gen_batch_decode_module
            from flashinfer.prefill import _gen_batch_prefill_primary_module
        except ImportError as error:
            parser.error(f"FlashInfer is not there: {error}; PYTHONPATH must have what it needs")
        libraries = libraries_of(problems, gen_batch_decode_module, _gen_batch_prefill_primary_module)
        stand_in_for_the_driver(Path(scratch))
        lacking = 0
        for name, library in sorted(libraries.items()):
            target = options.folder / name / f"{name}.so"
            if not target.exists() and not options.missing:
                try:
                    library.build()
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(library.get_library_path(), target)
                    print(f"compiled {name}", flush=True)
                except RuntimeError as error:  # such a head dim is not theirs: others follow
                    told = str(error).strip().splitlines()[-LINES:]
                    print(name, *(line[-WIDTH:] for line in told), sep="\n    ", file=sys.stderr, flush=True)
            if not target.exists():
                lacking += 1
                print(f"lacking: {name}", flush=True)
    print(f"{len(libraries)} libraries, {lacking} of them lacking in {options.folder}")
    return int(lacking > 0)


if __name__ == "__main__":
    sys.exit(main())
