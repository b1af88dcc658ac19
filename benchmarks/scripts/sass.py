"""Machine code of every shipped configuration, recorded and compared: renames and moves must leave it as it is.

    python benchmarks/scripts/sass.py record --out benchmarks/results/sass_before.json
    python benchmarks/scripts/sass.py compare benchmarks/results/sass_before.json
    python benchmarks/scripts/sass.py summary benchmarks/results/sass_before.json --cubins FOLDER --out FILE

A record holds, for each kernel and architecture, a digest of the executable sections and constant banks of every cubin,
its registers and its shared memory. Names (of functions, files and configurations), line tables and comments are no
part of a digest. A second digest leaves out at which offsets parameters lie in constant bank 0, too. Two records are
the same when each kernel has the same digests, in any order. It needs no GPU, but the disassembler of Triton's wheel.

A summary sets today's configurations beside those of the record one by one: registers, spills and the instructions of
the main loop. It needs the record's cubins for that, which ``record --keep FOLDER`` leaves.
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
from collections import Counter, defaultdict
from collections.abc import Iterator
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
WORKERS = os.cpu_count() or 1
FULL_ARCH, SAMPLED = "sm_90a", 12
"""The mma family ships two thousand configurations: all are compiled for one architecture, one of so many for
others."""


class Job(NamedTuple):
    """A source to compile: ``kernel`` names it in the record, ``described`` its configuration for a reader."""

    kernel: str
    described: str
    source: KernelSource
    arch: str


def digest(cubin: bytes) -> str:
    """SHA-256 of a cubin's machine code and constants, without any name."""
    table, count, names = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HH", cubin, 60)
    headers = [SECTION.unpack_from(cubin, table + SECTION.size * i) for i in range(count)]
    strings = headers[names]
    found = []
    for name_at, kind, _, _, offset, size, *_ in headers:
        start = strings[4] + name_at
        name = cubin[start : cubin.index(b"\0", start)].decode()
        # A section without contents (NOBITS: shared memory) counts by its size, and so does the parameters' bank.
        if name.startswith(CODE):
            found.append((name.split(".")[1], cubin[offset : offset + size] if kind != 8 else b""))
        elif name.startswith((".nv.constant0", ".nv.shared")):
            found.append((name.split(".")[2], str(size).encode()))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:24]


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
                    yield Job(kernel.family, describe_config(config), kernel.kernel_source(config), arch)
    yield from backward_jobs()
    yield from combine_jobs()
    yield from block_jobs()


def record(only: str = "", keep: Path | None = None) -> dict[str, Any]:
    """Compile everything, or the kernels whose name contains ``only``, and digest it."""
    found = [job for job in jobs() if only in job.kernel]

    def one(numbered: tuple[int, Job]) -> tuple[str, dict[str, Any]]:
        number, job = numbered
        compiled = jit.compile(job.source, job.arch)
        code = digest(compiled.cubin)
        if keep is not None:
            (keep / f"{code}.cubin").write_bytes(compiled.cubin)
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(found)}", end="", file=sys.stderr, flush=True)
        report = compiled.report
        return f"{job.kernel} {job.arch}", {
            "code": code, "instructions": digest_without_offsets(compiled.cubin), "config": job.described,
            "registers": report.registers, "spills": report.spills,
        }  # fmt: skip

    with ThreadPoolExecutor(WORKERS) as pool:
        rows: dict[str, list[dict[str, Any]]] = {}
        for name, row in pool.map(one, enumerate(found)):
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
        kept = []
        for row in rows:
            if left[row.get(key)] > 0:
                left[row.get(key)] -= 1
            else:
                kept.append(row)
        rows[:] = kept
    return common.total()


# --- the summary ---

LABELLED = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
PRODUCTS = ("HGMMA", "HMMA")
LONGER = 0.02
"""Part by which a main loop must have grown to be listed."""
LARGE = 200
WORDS = {"slots": "stages", "pack": "pack_gqa", "fused": "combine_in_kernel"}
"""Words of descriptions that the redesign changed."""


def main_loop(text: str) -> int:
    """Instructions of the loop with most matrix products, the shortest if several have as many; 0 without products.

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
    return min(((-products[a, b], b - a) for a, b in inner), default=(0, 0))[1]


def _words(described: str) -> tuple[str, ...]:
    """A description's words in any order, as they are called today."""
    found = re.split(r", | ", described)
    renamed = {re.sub(r"^\w+", lambda name: WORDS.get(name[0], name[0]), word) for word in found}
    return tuple(
        sorted(renamed | {"paged"} if any(word.startswith(("page_rows", "gather")) for word in renamed) else renamed)
    )


def _pairs(name: str, old: list[Any], new: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Rows of the same configuration: by place, or by description where the record has others.

    Of the mma family another sample may be compiled for an architecture than was recorded.
    """
    if len(old) == len(new) and not name.startswith("mma "):
        yield from zip(old, new, strict=True)
        return
    by_words: dict[tuple[str, ...], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((old, new)):
        for row in rows:
            by_words[_words(row["config"])][side].append(row)
    for before, after in by_words.values():
        if len(before) == len(after):
            yield from zip(before, after, strict=True)


def summarise(before: dict[str, Any], cubins: Path, only: str, sample: int) -> dict[str, Any]:
    """Today's configurations beside those of a record.

    Args:
        before: the record.
        cubins: the folder that ``record --keep`` wrote with it.
        only: kernels whose name and architecture (``hopper sm_90a``) contain this.
        sample: of kernels with more than LARGE configurations, one in so many.
    """
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for job in jobs():
        if only in f"{job.kernel} {job.arch}":
            rows[f"{job.kernel} {job.arch}"].append({"config": job.described, "job": job})
    families, more_spills, longer = {}, [], []
    for name, old in before["kernels"].items():
        step = sample if len(old) > LARGE else 1
        pairs = list(_pairs(name, old, rows.get(name, [])))[::step]
        counts: Counter[str] = Counter()
        worst = {"registers": 0, "spills": 0, "main_loop": 0.0}
        with ThreadPoolExecutor(WORKERS) as pool:
            for was, now, verdict, loops in pool.map(lambda pair: _compared(pair, cubins), pairs):
                counts[verdict] += 1
                worst["registers"] = max(worst["registers"], now["registers"] - was["registers"])
                worst["spills"] = max(worst["spills"], now["spills"] - was["spills"])
                grown = loops[1] / loops[0] - 1 if loops[0] else 0.0
                worst["main_loop"] = round(max(worst["main_loop"], grown), 4)
                row = {"kernel": name, "config": now["config"], "registers": [was["registers"], now["registers"]]}
                row |= {"spills": [was["spills"], now["spills"]], "main_loop": list(loops)}
                if now["spills"] > was["spills"]:
                    more_spills.append(row)
                if grown > LONGER:
                    longer.append(row)
                if now["spills"] < was["spills"]:
                    counts["fewer spills"] += 1
        if pairs:
            families[name] = {"recorded": len(old), "today": len(rows.get(name, [])), "compared": len(pairs)}
            families[name] |= {**counts, "worst": worst}
            print(name, families[name], file=sys.stderr, flush=True)
    return {
        "script": "benchmarks/scripts/sass.py",
        "commits": [before["commit"], _commit()],
        "sample": sample,
        "families": families,
        "more_spills": more_spills,
        "longer_main_loop": longer,
    }


def _compared(
    pair: tuple[dict[str, Any], dict[str, Any]], cubins: Path
) -> tuple[dict[str, Any], dict[str, Any], str, tuple[int, int]]:
    was, now = pair
    job = now["job"]
    compiled = jit.compile(job.source, job.arch)
    now |= {"registers": compiled.report.registers, "spills": compiled.report.spills}
    if digest(compiled.cubin) == was["code"]:
        return was, now, "identical", (0, 0)
    old, new = (_disassembled(each) for each in ((cubins / f"{was['code']}.cubin").read_bytes(), compiled.cubin))
    if _digest_of_text(old) == _digest_of_text(new):
        return was, now, "parameter offsets only", (0, 0)
    return was, now, "instructions", (main_loop(old), main_loop(new))


def backward_jobs() -> Iterator[Job]:
    """The Hopper backward's kernels."""
    from flashlane.core import registry

    kernel, seen = registry.get_backward("hopper"), set()
    for config, (arch,) in kernel.shipped():
        for part in kernel.device_sources(config, arch):
            if part.source not in seen:
                seen.add(part.source)
                yield Job("hopper-backward", f"{part.source.entry} {config.describe()}", part.source, arch)


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
    summing.add_argument("--sample", type=int, default=1, help="of large families, one configuration in so many")
    for command in (recording, comparing, summing):
        command.add_argument("--only", default="", help="kernels whose name contains this")
    given = parser.parse_args()
    if given.command == "summary":
        found = summarise(json.loads(given.before.read_text()), given.cubins, given.only, given.sample)
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        counts = len(found["more_spills"]), len(found["longer_main_loop"])
        print("{} configurations spill more, {} have a longer main loop".format(*counts))
        return 0
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    found = record(given.only, given.keep)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    total = sum(map(len, found["kernels"].values()))
    if given.command == "record":
        print(f"{total} configurations of {len(found['kernels'])} kernels recorded")
        return 0
    before = json.loads(given.before.read_text())
    before["kernels"] = {name: rows for name, rows in before["kernels"].items() if given.only in name}
    summary, lines = compare(before, found)
    print(*lines, f"{total} configurations: {summary}", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
