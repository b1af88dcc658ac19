"""Machine code of every shipped configuration, recorded and compared: renames and moves must leave it as it is.

    python benchmarks/scripts/sass.py record --out before.json
    python benchmarks/scripts/sass.py compare before.json
    python benchmarks/scripts/sass.py summary before.json --cubins FOLDER --memo FILE --out FILE

A record holds, for each kernel and architecture, a digest of the executable sections and constant banks of every cubin,
its registers and its shared memory. Names (of functions, files and configurations), line tables and comments are no
part of a digest. A second digest leaves out at which offsets parameters lie in constant bank 0, too. Two records are
the same when each kernel has the same digests, in any order. It needs no GPU, but the disassembler of Triton's wheel.

A summary sets today's configurations next to those of the record of the same description one by one: identical, or
different in parameter offsets only, in operands (the same opcodes in the same order), or in instructions; registers,
spills, and the main loops of some. It needs the record's cubins for that, which ``record --keep FOLDER`` leaves.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from flashlane import jit
from flashlane.core import tuned
from flashlane.jit import KernelSource

CODE = (".text.", ".nv.constant2", ".nv.constant3", ".nv.constant4")
"""Sections that decide what runs; constant bank 0 holds parameters, of which only the size is compared."""
ADDRESS, LABEL = re.compile(r"/\*.*?\*/"), re.compile(r"\.L_x_\d+|`\(.*?\)")
PARAMETER = re.compile(r"c\[0x0\]\[[^\]]*\]")
SECTION = struct.Struct("<IIQQQQIIQQ")
NOBITS = 8
WORKERS = os.cpu_count() or 1
STRIDE = 16
"""A summary goes through the configurations of a kernel in so many passes, the first of which is its sample."""
FULL_ARCH, SAMPLED = "sm_90a", 12
"""The mma family ships two thousand configurations: all are compiled for one architecture, one of so many for
others."""


NAMED = ("Element", "Out", "HEAD_DIM", "HEAD_DIM_V")


class Job(NamedTuple):
    """A source to compile: ``kernel`` names it in the record, ``label`` its configuration for a reader."""

    kernel: str
    label: str
    source: KernelSource
    arch: str


def digest(cubin: bytes) -> str:
    """SHA-256 of a cubin's machine code and constants, without any name."""
    digests = []
    for name, kind, size, contents in _sections(cubin):
        # A section without contents (NOBITS: shared memory) counts by its size, and so does the parameters' bank.
        if name.startswith(CODE):
            digests.append((name.split(".")[1], contents if kind != NOBITS else b""))
        elif name.startswith((".nv.constant0", ".nv.shared")):
            digests.append((name.split(".")[2], str(size).encode()))
    return hashlib.sha256(repr(sorted(digests)).encode()).hexdigest()[:24]


def opcodes(cubin: bytes) -> list[int]:
    """The opcode of each instruction: the low 12 bits of its 16 bytes."""
    code = b"".join(contents for name, _, _, contents in _sections(cubin) if name.startswith(".text."))
    return [word & 0xFFF for word, _ in struct.iter_unpack("<QQ", code)]


def _sections(cubin: bytes) -> Iterator[tuple[str, int, int, bytes]]:
    """Name, type, size and contents of each section of an ELF file."""
    table, count, names = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HH", cubin, 60)
    headers = [SECTION.unpack_from(cubin, table + SECTION.size * i) for i in range(count)]
    strings = headers[names][4]
    for name_at, kind, _, _, offset, size, *_ in headers:
        start = strings + name_at
        yield cubin[start : cubin.index(b"\0", start)].decode(), kind, size, cubin[offset : offset + size]


def digest_without_offsets(cubin: bytes) -> str:
    """SHA-256 of a cubin's instructions in order, with parameter offsets, addresses and labels left out."""
    return _digest_of_text(_disassembled(cubin))


def _disassembled(cubin: bytes) -> str:
    text = jit.disassemble(cubin)
    if text is None:
        raise RuntimeError("there is no disassembler: install triton, or put nvdisasm on PATH")
    return text


def _digest_of_text(text: str) -> str:
    lines = (ADDRESS.sub("", line).strip() for line in text.splitlines())
    code = (LABEL.sub("L", PARAMETER.sub("c[0x0]", line)) for line in lines if line.endswith(";"))
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:24]


def jobs() -> Iterator[Job]:
    """Every shipped configuration of every kernel, on each architecture that it ships for."""
    from flashlane.inspect.compile_report import describe_config, device_kernels

    number = 0
    with tuned.heuristics_only():
        for kernel in device_kernels():
            for config, archs in kernel.shipped():
                for arch in archs:
                    number += 1
                    if kernel.family == "mma" and arch != FULL_ARCH and number % SAMPLED:
                        continue
                    source = kernel.kernel_source(config)
                    yield Job(kernel.family, _label(describe_config(config), source), source, arch)
    yield from backward_jobs()
    yield from combine_jobs()
    yield from block_jobs()


def _label(config: str, source: KernelSource) -> str:
    """A configuration, with the head dimension and the types that its description leaves out."""
    constants = dict(source.constants)
    return " ".join(str(constants[name]) for name in NAMED if name in constants) + f" {config}"


def record(only: str = "", keep: Path | None = None) -> dict[str, Any]:
    """Compile everything, or the kernels whose name contains ``only``, and digest it."""
    chosen = [job for job in jobs() if only in job.kernel]

    def one(numbered: tuple[int, Job]) -> tuple[str, dict[str, Any]]:
        number, job = numbered
        compiled = jit.compile(job.source, job.arch)
        code = digest(compiled.cubin)
        if keep is not None:
            (keep / f"{code}.cubin").write_bytes(compiled.cubin)
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(chosen)}", end="", file=sys.stderr, flush=True)
        report = compiled.report
        return f"{job.kernel} {job.arch}", {
            "code": code, "instructions": digest_without_offsets(compiled.cubin), "config": job.label,
            "registers": report.registers, "spills": report.spills,
        }  # fmt: skip

    with ThreadPoolExecutor(WORKERS) as pool:
        rows: dict[str, list[dict[str, Any]]] = {}
        for name, row in pool.map(one, enumerate(chosen)):
            rows.setdefault(name, []).append(row)
    from flashlane.jit import toolchain

    return {
        "script": "benchmarks/scripts/sass.py",
        "commit": _commit(),
        "compiler": toolchain.compiler_version(),
        "kernels": rows,
    }


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, list[str]]:
    """How many configurations are the same, in words, and what differs by more than parameter offsets, a line each."""
    same = moved = 0
    lines = []
    for name in sorted({*before["kernels"], *after["kernels"]}):
        old, new = (list(side["kernels"].get(name, [])) for side in (before, after))
        same += _drop_equal(old, new, "code")
        moved += _drop_equal(old, new, "instructions")
        for what, rows in (("only before", old), ("only after", new)):
            lines += [f"{name}: {what}: {row['registers']} registers, {row['config']}" for row in rows]
    return f"{same} identical, {moved} differ in parameter offsets only, {len(lines)} on one side only", lines


def _drop_equal(old: list[dict[str, Any]], new: list[dict[str, Any]], key: str) -> int:
    """Take the rows that both lists have out of both; how many. A record may lack the second digest."""
    common = Counter(row.get(key) for row in old) & Counter(row.get(key) for row in new)
    common.pop(None, None)
    for rows in (old, new):
        left = common.copy()
        different = []
        for row in rows:
            if left[row.get(key)] > 0:
                left[row.get(key)] -= 1
            else:
                different.append(row)
        rows[:] = different
    return common.total()


# --- the summary ---

LABELLED = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
PRODUCTS = ("HGMMA", "HMMA")
LONGER = 0.02
"""Part by which a main loop must have grown to be listed."""


def main_loop(text: str) -> list[str]:
    """Opcodes of the loop with most matrix products, the shortest if several have as many; empty without products.

    Loops that have loops inside or store to device memory are no candidates: those are tiles, and their ends.
    """
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := LABELLED.match(line):
            labels[label[1]] = len(opcodes)
        elif found := INSTRUCTION.match(line):
            opcodes.append(found[1].split(".")[0])
            target = re.search(r"\.L_x_\d+", found[2]) if opcodes[-1] == "BRA" else None
            if target and target[0] in labels:
                spans.append((labels[target[0]], len(opcodes)))
    products = {span: sum(op in PRODUCTS for op in opcodes[slice(*span)]) for span in spans}
    spans = [span for span in spans if products[span] and "STG" not in opcodes[slice(*span)]]
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return opcodes[slice(*min(inner, key=lambda span: (-products[span], span[1] - span[0])))] if inner else []


def _pairs(old: list[dict[str, Any]], new: list[Job]) -> list[tuple[dict[str, Any], Job]]:
    """The rows of a record with today's jobs of the same description, in order where several have the same one."""
    left: dict[str, list[Job]] = defaultdict(list)
    for job in reversed(new):
        left[job.label].append(job)
    return [(row, left[row["config"]].pop()) for row in old if left[row["config"]]]


class Comparison:
    """Today's configurations next to those of a record, one at a time.

    Args:
        cubins: the folder that ``record --keep`` wrote with the record.
        memo: a file of one line a cubin, with what its disassembly says: a summary that was ended goes on from there.
    """

    def __init__(self, cubins: Path, memo: Path) -> None:
        self.cubins, self.memo = cubins, memo
        lines = memo.read_text().splitlines() if memo.exists() else []
        self._read: dict[str, dict[str, Any]] = {row["code"]: row for row in map(json.loads, lines)}
        self._writing = threading.Lock()

    def row(self, sampled: bool, pair: tuple[dict[str, Any], Job]) -> dict[str, Any]:
        """What became of a configuration: how its code differs; registers, spills and instructions on both sides.

        Main loops are compared where registers, spills or the number of instructions grew, and of those that are
        ``sampled``: a disassembly takes as long as a compilation.
        """
        was, job = pair
        compiled = jit.compile(job.source, job.arch)
        report, code = compiled.report, digest(compiled.cubin)
        row = {
            "kernel": f"{job.kernel} {job.arch}", "config": job.label,
            "registers": [was["registers"], report.registers], "spills": [was["spills"], report.spills],
        }  # fmt: skip
        if code == was["code"]:
            return row | {"differs": "identical"}
        cubins = (self.cubins / f"{was['code']}.cubin").read_bytes(), compiled.cubin
        before, after = map(opcodes, cubins)
        row["instructions"] = [len(before), len(after)]
        grew = any(row[name][1] > row[name][0] for name in ("registers", "spills"))
        if before == after:
            old, new = self._facts(was["code"], cubins[0]), self._facts(code, cubins[1])
            same = old["instructions"] == new["instructions"]
            return row | {"differs": "in parameter offsets" if same else "in operands"}
        if grew or _growth(row["instructions"]) > LONGER or sampled:
            old, new = self._facts(was["code"], cubins[0]), self._facts(code, cubins[1])
            row |= {"main_loop": [old["length"], new["length"]], "same_loop": old["loop"] == new["loop"]}
        return row | {"differs": "in instructions"}

    def _facts(self, code: str, cubin: bytes) -> dict[str, Any]:
        if code not in self._read:
            text = _disassembled(cubin)
            loop = main_loop(text)
            facts = {"code": code, "instructions": _digest_of_text(text), "length": len(loop)}
            facts["loop"] = hashlib.sha256(" ".join(loop).encode()).hexdigest()[:24]
            with self._writing, self.memo.open("a") as file:
                self._read[code] = facts
                file.write(json.dumps(facts) + "\n")
        return self._read[code]


def summarise(before: dict[str, Any], comparison: Comparison, only: str, until: float) -> dict[str, Any]:
    """Today's configurations next to those of a record.

    Args:
        before: the record.
        comparison: what compares two configurations.
        only: kernels whose name and architecture (``hopper sm_90a``) contain this.
        until: the time (as of ``time.time``) after which no further configuration is compared. Those of a kernel are
            taken in an order of strides, so that what was compared by then is spread over all.
    """
    today: dict[str, list[Job]] = defaultdict(list)
    for job in jobs():
        if only in f"{job.kernel} {job.arch}":
            today[f"{job.kernel} {job.arch}"].append(job)
    families, rows = {}, []
    for name in sorted(today, key=lambda name: len(today[name])):
        pairs = _pairs(before["kernels"].get(name, []), today[name])
        spread = [(first == 0, pair) for first in range(STRIDE) for pair in pairs[first::STRIDE]]
        with ThreadPoolExecutor(WORKERS) as pool:
            found = list(pool.map(lambda at: comparison.row(*at) if time.time() < until else None, spread))
        compared = [row for row in found if row is not None]
        rows += compared
        loops = [row for row in compared if "main_loop" in row]
        counts = [row["instructions"] for row in compared if "instructions" in row]
        families[name] = {
            "recorded": len(before["kernels"].get(name, [])), "today": len(today[name]),
            "paired": len(pairs), "compared": len(compared), **Counter(row["differs"] for row in compared),
            "more_registers": sum(row["registers"][1] > row["registers"][0] for row in compared),
            "fewer_registers": sum(row["registers"][1] < row["registers"][0] for row in compared),
            "more_spills": sum(row["spills"][1] > row["spills"][0] for row in compared),
            "fewer_spills": sum(row["spills"][1] < row["spills"][0] for row in compared),
            "spilled_bytes": [sum(row["spills"][side] for row in compared) for side in (0, 1)],
            "instructions": [sum(count[side] for count in counts) for side in (0, 1)],
            "most_growth": round(max(map(_growth, counts), default=0.0), 4),
            "main_loops": len(loops), "main_loops_of_the_same_opcodes": sum(row["same_loop"] for row in loops),
        }  # fmt: skip
        if any(row["differs"] != "identical" for row in compared):
            families[name]["commits"] = commits_of(name.split()[0], before["commit"])
        print(name, families[name], file=sys.stderr, flush=True)
    return {
        "script": "benchmarks/scripts/sass.py",
        "commits": [before["commit"], _commit()],
        "families": families,
        "more_spills": [row for row in rows if row["spills"][1] > row["spills"][0]],
        "longer_main_loop": [row for row in rows if _growth(row.get("main_loop", (0, 0))) > LONGER],
    }


FOLDERS = {"hopper": "kernels/hopper/forward", "hopper-combine": "kernels/hopper/forward"}
FOLDERS |= {"hopper-backward": "kernels/hopper/backward", "mma": "kernels/mma", "decode": "kernels/decode"}
FOLDERS |= {"fa1": "kernels/fa1"}


def commits_of(kernel: str, since: str) -> list[str]:
    """The commits that changed a kernel's device files or the shared attention headers since the record."""
    folders = (FOLDERS.get(kernel, "lessons"), "cuda/attention")
    paths = [f"src/flashlane/{folder}/*.{suffix}" for folder in folders for suffix in ("cu", "cuh")]
    command = ["git", "log", "--reverse", "--format=%h %s", f"{since}..HEAD", "--", *paths]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def _growth(sides: Sequence[int]) -> float:
    """By which part of the old number the new one is larger."""
    return sides[1] / sides[0] - 1 if sides[0] else 0.0


def backward_jobs() -> Iterator[Job]:
    """The Hopper backward's kernels."""
    from flashlane.core import registry

    kernel, seen = registry.get_backward("hopper"), set()
    for config, (arch,) in kernel.shipped():
        for part in kernel.device_sources(config, arch):
            if part.source not in seen:
                seen.add(part.source)
                label = _label(f"{part.source.entry} {config.describe()}", part.source)
                yield Job("hopper-backward", label, part.source, arch)


def combine_jobs() -> Iterator[Job]:
    """The Hopper forward's second launch."""
    from flashlane.kernels.hopper.forward.config import combine_source
    from flashlane.kernels.score import ScoreConfig

    for dtype, dim, sinks in itertools.product(("f16", "bf16"), (64, 128, 256), (False, True)):
        source = combine_source(dtype, dim, ScoreConfig(sinks=sinks))
        yield Job("hopper-combine", f"{dtype} {dim} {sinks}", source, "sm_90a")


def block_jobs() -> Iterator[Job]:
    """The lessons: HGEMM, softmax, activations, the matrix ceiling."""
    from flashlane.lessons import activation, ceiling, gemm, row_softmax

    archs = ("sm_80", "sm_90a")
    for config, layout, arch in itertools.product(gemm.CONFIGS.values(), ("nn", "tn"), archs):
        yield Job("hgemm", config.name, gemm.gemm_source(config, "f16", "f32", layout), arch)
    for config, arch in itertools.product(ceiling.CONFIGS.values(), archs):
        yield Job("ceiling", str(config), ceiling.ceiling_source(config, "f16", "f32"), arch)
    for config, arch in itertools.product(activation.CONFIGS.values(), archs):
        yield Job("activation", config.tag, activation.activation_source(config), arch)
    points = itertools.product(row_softmax.VARIANTS.values(), ("f16", "f32"), (100, 1000, 8000))
    for config in dict.fromkeys(row_softmax.softmax_config(*point) for point in points):
        for arch in archs:
            yield Job("softmax", str(config), row_softmax.softmax_source(config), arch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="compile everything and write the record")
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--keep", type=Path, help="a folder for the cubins, by digest")
    comparing = commands.add_parser("compare", help="compile everything and compare; exit 1 where something differs")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("--out", type=Path, help="also write the new record")
    comparing.add_argument("--keep", type=Path, help="a folder for the cubins, by digest")
    summing = commands.add_parser(
        "summary", help="compile everything, and say what changed from configuration to configuration"
    )
    summing.add_argument("before", type=Path)
    summing.add_argument("--cubins", type=Path, required=True, help="the folder that record --keep wrote")
    summing.add_argument("--out", type=Path, required=True)
    summing.add_argument("--memo", type=Path, required=True, help="a file that keeps what each disassembly said")
    summing.add_argument("--minutes", type=float, default=1e6, help="compare what can be compared in this time")
    for command in (recording, comparing, summing):
        command.add_argument("--only", default="", help="kernels whose name contains this")
    options = parser.parse_args()
    if options.command == "summary":
        comparison, until = Comparison(options.cubins, options.memo), time.time() + 60 * options.minutes
        verdicts = summarise(json.loads(options.before.read_text()), comparison, options.only, until)
        options.out.write_text(json.dumps(verdicts, indent=1) + "\n")
        counts = len(verdicts["more_spills"]), len(verdicts["longer_main_loop"])
        print("{} configurations spill more, {} have a longer main loop".format(*counts))
        return 0
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    verdicts = record(options.only, options.keep)
    if options.out is not None:
        options.out.write_text(json.dumps(verdicts, indent=1) + "\n")
    total = sum(map(len, verdicts["kernels"].values()))
    if options.command == "record":
        print(f"{total} configurations of {len(verdicts['kernels'])} kernels recorded")
        return 0
    before = json.loads(options.before.read_text())
    before["kernels"] = {name: rows for name, rows in before["kernels"].items() if options.only in name}
    summary, lines = compare(before, verdicts)
    print(*lines, f"{total} configurations: {summary}", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
