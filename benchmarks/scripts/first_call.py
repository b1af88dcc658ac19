"""What the first calls of a process take: imports, an empty cache, a full one, a wheel with PTX or cubins; and peers.

    PYTHONPATH=src python3 benchmarks/scripts/first_call.py --out benchmarks/results [--cases dense,f32] [--seconds 80]

Each figure is of a fresh process, with ``--repeats`` of the middle one of several. It imports torch and flashlane,
makes its tensors, and has torch run a sum forward and backward, so that what torch does at its own first use is not
counted. Then it calls an attention function, waits for the device, sums the output, calls ``backward`` of that sum, and
waits again. (``out.backward(gradient)`` would make torch itself import sympy and 480 modules more.) ``empty`` has a new
folder for the caches of flashlane and Triton; ``full`` is the next process with that folder; ``ptx`` has a new folder
again, and what the first process compiled as PTX in flashlane's own wheel; ``cubins`` has a new folder, and the same as
an installed package of cubins. The package is a copy whose byte code is compiled before, as pip does.

Without a GPU, ``--without-gpu`` times the host's side only: launches do nothing and tensors are on the CPU.

Writes first_call.json, again after each process; ``--seconds`` is when no further process is started. The cases:
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
FORMAT = "flashlane-first-call/1"
STATES = ("empty", "full", "ptx", "cubins")


@dataclass(frozen=True)
class Case:
    """A first call."""

    about: str
    size: tuple[int, int, int, int, int]
    """Batch, queries, keys, heads, head dim."""
    dtype: str = "bf16"
    dropout: float = 0.0
    backward: bool = True
    function: str = "flashlane"
    states: tuple[str, ...] = STATES
    tag: str | None = None
    """Of the kernel that runs, where one is named."""


CASES = {
    "dense": Case("bf16 causal D128, forward and backward", (2, 1024, 1024, 8, 128)),
    "inference": Case(
        "the same without a gradient", (2, 1024, 1024, 8, 128), backward=False, states=("empty", "full", "ptx")
    ),
    "decode": Case("one query token over 8192 keys", (2, 1, 8192, 8, 128), backward=False),
    "f32": Case("f32, which Triton's kernels compute", (2, 1024, 1024, 8, 64), "f32", states=("empty", "full")),
    "dropout": Case(
        "bf16 with dropout, by Triton's kernels", (2, 1024, 1024, 8, 64), "bf16", 0.1, states=("empty", "full")
    ),
}
PEERS = {
    f"peer {tag}": Case(tag, (2, 1024, 1024, 8, 128), function=tag, states=("as installed",))
    for tag in ("(flash)", "(cudnn)", "(flash-attn-4)")
}


def child(case: Case, without_gpu: bool, ptx: Path | None) -> dict[str, Any]:
    """The times of a fresh process's first calls, ms, and what they imported. ``ptx`` gets their kernels' PTX."""
    row: dict[str, Any] = {}
    last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        row[name] = 1e3 * (now - last)
        last = time.perf_counter()

    import torch

    lap("import_torch_ms")
    import flashlane

    call = flashlane.flash_attn_func
    lap("import_flashlane_ms")
    if without_gpu:
        sys.path.insert(0, str(SUPPORT))
        import driverless

        driverless.install()
    device = torch.device("cpu" if without_gpu else "cuda")
    wait = (lambda: None) if without_gpu else torch.cuda.synchronize
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
    batch, queries, keys, heads, dim = case.size
    q, k, v = (
        torch.randn(batch, n, heads, dim, dtype=dtype, device=device, requires_grad=case.backward)
        for n in (queries, keys, keys)
    )
    weight = torch.randn_like(q)
    with torch.enable_grad():
        own = torch.randn_like(q).requires_grad_()
        ((own * own) * weight).sum().backward()
    wait()
    if case.function == "flashlane":

        def run() -> torch.Tensor:
            return call(q, k, v, causal=queries == keys, dropout_p=case.dropout)

    else:
        run = PeerCall(case, q, k, v)
        run.prepare()
    before, last = set(sys.modules), time.perf_counter()
    out = run()
    wait()
    lap("forward_ms")
    if case.backward:
        loss = (out * weight).sum()
        wait()
        last = time.perf_counter()
        loss.backward()
        wait()
        lap("backward_ms")
    called = set(sys.modules) - before
    row["modules"] = len(called)
    row["other_modules"] = sorted({name.split(".")[0] for name in called} - {"flashlane"})
    if case.function == "flashlane":
        row |= kernels_of_process(ptx)
    return row


def kernels_of_process(ptx: Path | None) -> dict[str, Any]:
    """What of this process's kernels was compiled, cached or assembled; ``ptx`` gets their PTX.

    Raises:
        RuntimeError: a kernel has no PTX.
    """
    from flashlane.jit import compiler

    kernels = compiler._memo.values()
    facts = {
        "kernels": {one.source.entry: round(1e3 * one.seconds, 1) for one in kernels},
        "cached": all(one.cached for one in kernels),
        "assembled": sorted(one.source.entry for one in kernels if one.assembled),
    }
    if ptx is not None:
        from flashlane.inspect import prebuild
        from flashlane.jit import cache

        jobs = [(one.source, one.arch) for one in kernels]
        _, wrong = prebuild.store_ptx(jobs, cache.ptx(ptx))
        if wrong:
            raise RuntimeError(wrong[0])
    return facts


class PeerCall:
    """A peer's call; :meth:`prepare` is what the bench does before it times, and belongs to its first call."""

    def __init__(self, case: Case, *tensors: Any) -> None:
        self.case, self.tensors = case, tensors

    def prepare(self) -> None:
        from flashlane.bench.measure.peers import PEERS as known
        from flashlane.core.problem import AttentionProblem, Inputs

        (peer,) = [peer for peer in known if peer.tag == self.case.function]
        inputs = Inputs(*self.tensors)
        problem = AttentionProblem.from_inputs(inputs, causal=True)
        reason = peer.available(self.tensors[0].device) or peer.supports(problem)
        if reason:
            raise RuntimeError(reason)
        self.peer, self.call = peer, peer.prepare(problem, inputs)

    def __call__(self) -> Any:
        with self.peer.context():
            out = self.call()
        return out[0] if isinstance(out, tuple) else out


def runs(names: list[str]) -> Iterator[tuple[str, Case, str]]:
    """What is timed, in this order."""
    for name in names:
        case = (CASES | PEERS)[name]
        for state in case.states:
            yield name, case, state


def install_cubins(cache: Path, place: Path) -> None:
    """What a process compiled, as an installed package of cubins."""
    sys.path.insert(0, str(ROOT / "tools"))
    import cubin_wheel

    cubin_wheel.write_package(place / "flashlane_cubins", cache / "flashlane", None)


def copy_package(source: Path, place: Path) -> None:
    """flashlane as pip installs it: without the PTX that a clone may have, with byte code."""
    shutil.copytree(source / "flashlane", place / "flashlane", ignore=shutil.ignore_patterns("ptx", "__pycache__"))
    compileall.compile_dir(place / "flashlane", quiet=2)


def prepare(name: str, state: str, place: Path, without_gpu: bool, timeout: float) -> dict[str, Any]:
    """Make what a state needs beyond what the first process left in the folder; the error, if there is one."""
    cache = place / name
    if state == "cubins":
        install_cubins(cache, cache / "installed")
    if state == "ptx":
        copy_package(place / "src", cache / "src")
        folder = cache / "src" / "flashlane" / "ptx"
        return spawn(name, "full", place, without_gpu, timeout, "--write-ptx", str(folder))
    return {}


def cache_folders(cache: Path, state: str) -> dict[str, Path]:
    """The folders of the caches by their variables."""
    own = cache if state in ("empty", "full") else cache / f"empty, with {state}"
    return {"FLASHLANE_CACHE_DIR": own / "flashlane", "TRITON_CACHE_DIR": own / "triton"}


def spawn_repeatedly(name: str, state: str, place: Path, without_gpu: bool, timeout: float, repeats: int) -> Any:
    """The answer of the middle one of several processes, and the milliseconds of each; or an error."""
    found = []
    for _ in range(repeats):
        if state != "full":
            for folder in cache_folders(place / name, state).values():
                shutil.rmtree(folder, ignore_errors=True)
        found.append(spawn(name, state, place, without_gpu, timeout))
        if "error" in found[-1]:
            return found[-1]
    found.sort(key=lambda row: row["forward_ms"] + row.get("backward_ms", 0.0))
    each = [[row["forward_ms"], row.get("backward_ms")] for row in found]
    return found[repeats // 2] | {"processes_ms": each}


def spawn(name: str, state: str, place: Path, without_gpu: bool, timeout: float, *more: str) -> dict[str, Any]:
    """A fresh process's answer; an error becomes one line."""
    cache = place / name
    package = cache / "src" if state == "ptx" else place / "src"
    paths = [str(package), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if state == "cubins":
        paths.insert(0, str(cache / "installed"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {variable: str(folder) for variable, folder in cache_folders(cache, state).items()}
    command = [sys.executable, __file__, "--child", name, *(["--without-gpu"] if without_gpu else []), *more]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1]) | {"process_s": round(time.perf_counter() - start, 1)}


def line(row: dict[str, Any]) -> str:
    """A row as a person reads it."""
    head = f"{row['case']:<20} {row['state']:<12}"
    if "error" in row:
        return f"{head} {row['error']}"
    both = f"{row['forward_ms'] + row['backward_ms']:8.0f}" if "backward_ms" in row else "       -"
    return f"{head} {row['import_flashlane_ms']:8.0f} {row['forward_ms']:8.0f} {both} {row['modules']:8}"


def main(arguments: list[str] | None = None) -> int:
    listed = "\n".join(f"  {name:<10} {case.about}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of first_call.json")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--repeats", type=int, default=1, help="processes of a row, which is of the middle one")
    parser.add_argument("--peers", action="store_true", help="also SDPA's flash, cuDNN and FlashAttention-4")
    parser.add_argument("--seconds", type=float, default=80.0, help="when no further process is started")
    parser.add_argument("--without-gpu", action="store_true", help="time the host's side, against no driver")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--write-ptx", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats is {options.repeats}; it may be 1 or more")
    if options.child:
        print(json.dumps(child((CASES | PEERS)[options.child], options.without_gpu, options.write_ptx)))
        return 0
    names = [name for name in options.cases.split(",") if name]
    if not names or not set(names) <= set(CASES):
        parser.error(f"--cases is {options.cases!r}; it may hold {', '.join(CASES)}")
    sys.path.insert(0, str(ROOT / "src"))  # as each child has it
    import torch

    from flashlane.bench.measure.environment import environment
    from flashlane.bench.measure.results import check_writable, write_atomically

    if not options.without_gpu and not torch.cuda.is_available():
        print("no CUDA device: --without-gpu times the host's side", file=sys.stderr)
        return 2
    check_writable(options.out)
    device = torch.device("cpu" if options.without_gpu else "cuda")
    body = {"format": FORMAT, "environment": environment(device), "without_gpu": options.without_gpu}
    body |= {"cases": {name: case.about for name, case in CASES.items()}}
    rows: list[dict[str, Any]] = []
    end, late, place = time.monotonic() + options.seconds, 0, Path(tempfile.mkdtemp(prefix="first-call-"))
    copy_package(ROOT / "src", place / "src")
    print(f"{'':<20} {'cache':<12} {'import':>8} {'forward':>8} {'both':>8} {'modules':>8}   (ms)")
    try:
        for name, _, state in runs([*names, *(PEERS if options.peers else ())]):
            if time.monotonic() > end:
                late += 1
                continue
            words = name, state, place, options.without_gpu, options.seconds
            made = prepare(*words)
            row = {
                "case": name,
                "state": state,
                **(made if "error" in made else spawn_repeatedly(*words, options.repeats)),
            }
            rows.append(row)
            print(line(row), flush=True)
            write_atomically(options.out / "first_call.json", json.dumps({**body, "rows": rows}, indent=1) + "\n")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if late:
        print(f"{late} processes were not started: --seconds {options.seconds:g} were over")
    print(f"wrote {options.out / 'first_call.json'}")
    return 1 if late or any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
