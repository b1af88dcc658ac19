"""Write the generated parts of docs/ and README.md: tables of kernels, of tile shapes, and of committed results.

    python benchmarks/scripts/readme_tables.py           # rewrite the documents
    python benchmarks/scripts/readme_tables.py --check   # exit 1 when one is not what would be written

A part stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``. NAME is ``kernels`` (the registry),
``features`` (the registry next to what other libraries document, benchmarks/scripts/features.json), ``standing`` (where
the committed results lead and where they trail), ``first-call`` (what a process's first call takes), ``mma-shapes``
(what the mma family's heuristic picks), ``mma-holes`` (where it has no tile that fits), or ``bench:FILE``:
benchmarks/FILE.json as the table that its format has. ``bench:FILE/VIEW`` takes another view of it: ``ladder`` and
``logs-columns`` of a file that ``flashlane bench`` or
baseline.py wrote, ``logs`` of that of baseline_logs.py, ``ceilings`` and ``rows`` of that of lessons_gpu.py, ``grid``
(or ``grid-backward``, ``grid-both``), ``rows`` and ``targets`` of those of hopper_forward.py and hopper_backward.py. A
file that is not there leaves a line that says so.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import itertools
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARKED = re.compile(
    r"(<!-- (kernels|features|standing|first-call|drawn|drawn-worst|mma-(?:shapes|holes)|bench:([\w.-]+?)"
    r"(?:/([\w-]+))?):begin -->\n)"
    r".*?(<!-- \2:end -->)",
    re.DOTALL,
)
VERSIONS = ("torch", "cuda", "driver", "flashlane")
NOT_MEASURED = "Not measured yet.\n"
FLASH, CUDNN = "(flash)", "(cudnn)"
DESIGNS = ("naive", "split-kv", "split-q", "split-q+share-kv", "split-q+share-qkv", "split-q+tiling-qk")
DESIGNS += ("split-q+tiling-qkv",)
SHAPE_HEAD_DIMS = (64, 128, 256, 512, 1024)
SHAPE_ARCH = "sm_90a"
CEILING = "% mma ceiling:"

Result = Mapping[str, Any]
Row = Mapping[str, Any]


def documents(root: Path = ROOT) -> list[Path]:
    """README and the pages that have a generated part."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in pages if page.is_file() and ":begin -->" in page.read_text(encoding="utf-8")]


def rendered(document: str, results: Path, name: str = "README") -> str:
    """The text of a document with every generated part made again from the folder of results and the registry.

    Raises:
        ValueError: a marker has no end, or names a file or a view that there is no table for.
    """
    for begin in re.findall(r"<!-- (\S+):begin -->", document):
        if f"<!-- {begin}:end -->" not in document:
            raise ValueError(f"{name} has <!-- {begin}:begin --> but no <!-- {begin}:end -->")
        if not MARKED.search(f"<!-- {begin}:begin -->\n<!-- {begin}:end -->"):
            allowed = "kernels, features, standing, first-call, drawn, drawn-worst, mma-shapes, mma-holes or "
            allowed += "bench:FILE[/VIEW]"
            raise ValueError(f"{name} has <!-- {begin}:begin -->; it may be {allowed}")

    def part(match: re.Match[str]) -> str:
        if match[2] == "kernels":
            body = kernel_list()
        elif match[2] == "features":
            body = feature_table(ROOT / "benchmarks" / "scripts" / "features.json")
        elif match[2] == "standing":
            body = standing(results)
        elif match[2] == "first-call":
            body = first_call(results / "first_call.json")
        elif match[2] == "drawn":
            body = drawn(results)
        elif match[2] == "drawn-worst":
            body = drawn_worst(results)
        elif match[2] == "mma-shapes":
            body = shape_table()
        elif match[2] == "mma-holes":
            body = hole_table()
        else:
            body = bench_tables(results / f"{match[3]}.json", match[4] or "")
        return f"{match[1]}{body}{match[5]}"

    return MARKED.sub(part, document)


def first_call(path: Path) -> str:
    """On the first call of a process, by the file of first_call.py; without figures where there is none."""
    said = "A first call with an empty cache compiles its kernels; later processes load them from the disk."
    if not path.is_file():
        return f"{said}\n"
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = {(row["case"], row["state"]): row for row in found["rows"] if "error" not in row}
    both = [rows.get(("dense", state)) for state in ("empty", "full")]
    if found["without_gpu"] or None in both:
        return f"{said}\n"
    forward = [f"{row['forward_ms']:.0f}" for row in both]
    whole = [f"{row['forward_ms'] + row['backward_ms']:.0f}" for row in both]
    said += f" In bf16 at head dim 128 that is {forward[0]} ms and {forward[1]} ms, with the backward {whole[0]} ms and"
    said += f" {whole[1]} ms ({found['environment']['device']}, `first_call.json`)."
    return textwrap.fill(said, 120) + "\n"


# --- from the registry


def judged(results: Path) -> list[Result]:
    """The files of drawn.py at judging seeds."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("drawn_*.json"))]
    return sorted(
        (body for body in found if body["role"] == "judging"), key=lambda body: body["direction"] != "forward"
    )


def drawn(results: Path) -> str:
    """How drawn problems of judging seeds compare with the fastest peer, a line for each file and protocol."""
    import drawn_summary

    rows = []
    for body in judged(results):
        for protocol in body["protocols"]:
            if found := drawn_summary.figures(body["rows"], protocol):
                what = f"{body['direction']}, {body['kind']}, {protocol}"
                ahead = f"{100 * found['ahead']:.0f} %"
                rows.append((what, int(found["problems"]), ahead, f"{found['least']:.2f}", f"{found['mean']:.2f}"))
    head = ("drawn problems", "count", "at the fastest peer's speed or above", "least", "geometric mean")
    return table(head, rows) if rows else NOT_MEASURED


def drawn_worst(results: Path) -> str:
    """The drawn problems of judging seeds that are furthest behind, ten of each file."""
    import drawn_summary

    rows = [
        (body["direction"], row["problem"], protocol, f"{ratio:.3f}", row["best_peer"][protocol])
        for body in judged(results)
        for ratio, protocol, row in drawn_summary.worst(body["rows"])
        if ratio < 1
    ]
    return table(("direction", "problem", "protocol", "ratio", "fastest peer"), rows) if rows else NOT_MEASURED


def kernel_list() -> str:
    """One line a kernel; variants that share an idea share a line."""
    from flashlane.core import registry

    ideas: dict[str, list[str]] = {}
    for kernel in registry.kernels():
        ideas.setdefault(kernel.summary, []).append(kernel.tag)
    rows = []
    for idea, tags in ideas.items():
        name = f"`{tags[0]}`"
        if len(tags) > 1:
            name = f"`{os.path.commonprefix(tags).rstrip('+')}+…)`, {len(tags)} variants"  # noqa: RUF071
        rows.append((name, idea))
    return table(("kernel", "idea"), rows)


def feature_table(path: Path) -> str:
    """A line a feature: which families of ours run it on a GPU, asked of the registry, and what others document."""
    others = json.loads(path.read_text(encoding="utf-8"))
    names = list(others["libraries"])
    rows = [(row["feature"], ours(row.get("ask")) or row["ours"], *(row.get(name, "–") for name in names))
            for row in others["features"]]  # fmt: skip
    said = [f"{name}: {source}" for name, source in others["libraries"].items()]
    head = ("", "flashlane", *names)
    return table(head, rows) + f"\n{others['note']} Sources: {'; '.join(said)}.\n"


def ours(ask: Mapping[str, Any] | None) -> str | None:
    """The GPU families that support a problem changed in some fields; the torch kernels where none does."""
    from dataclasses import replace

    from flashlane.bench import make_problem
    from flashlane.core import registry
    from flashlane.core.problem import DTYPES

    if ask is None:
        return None
    sizes = {name: value for name, value in ask.items() if name in ("head_dim", "kv_heads", "seqlen_q", "seqlen_k")}
    dtype = DTYPES[ask.get("dtype", "bf16")]
    problem = make_problem(
        2, 8, sizes.get("seqlen_q", 256), sizes.get("head_dim", 128), dtype, kv_heads=sizes.get("kv_heads"),
        seqlen_k=sizes.get("seqlen_k"), arch=SHAPE_ARCH,
    )  # fmt: skip
    rest = {name: value for name, value in ask.items() if name not in (*sizes, "dtype")}
    problem = replace(problem, **rest)
    families = dict.fromkeys(k.family for k in registry.kernels() if k.supports(problem) is None)
    on_gpu = [family for family in families if family not in ("reference", "tiled", "fa1")]
    if on_gpu:
        return ", ".join(on_gpu)
    return "torch operations" if families else "no"


def shape_table() -> str:
    """Tile, warps and KiB of shared memory, padded and swizzled, that each design gets at each head dim."""
    from flashlane.bench import make_problem
    from flashlane.core import registry

    known = {kernel.tag: kernel for kernel in registry.kernels()}
    rows = []
    for design in DESIGNS[1:]:
        for stage in (1, 2):
            padded = known[f"mma({design}+acc-f32+stage{stage})"]
            swizzled = known[f"mma({design}+acc-f32+swizzle-qkv+stage{stage})"]
            cells = []
            for head_dim in SHAPE_HEAD_DIMS:
                problem = make_problem(64, 8, 4096, head_dim, arch=SHAPE_ARCH)
                if padded.supports(problem) or swizzled.supports(problem):
                    cells.append("–")
                    continue
                plain, config = padded.config(problem), swizzled.config(problem)
                kib = f"{plain.shared_memory / 1024:.3g} / {config.shared_memory / 1024:.3g}"
                tiles = dict.fromkeys(f"{c.block_m}×{c.block_n}, {c.warps_q}×{c.warps_kv}" for c in (plain, config))
                cells.append(f"{' / '.join(tiles)}: {kib}")
            rows.append((f"{design}, stage {stage}", *cells))
    return table(("design", *(f"D {head_dim}" for head_dim in SHAPE_HEAD_DIMS)), rows)


def hole_table() -> str:
    """Where no tile of the mma family fits the shared memory of a block: a line a size of it, design and stage."""
    from flashlane import jit
    from flashlane.core import registry

    archs: dict[int, list[str]] = {}
    for arch in (arch for arch in jit.LIMITS if not arch.endswith(("a", "f")) or arch == SHAPE_ARCH):
        archs.setdefault(jit.shared_limit(arch), []).append(arch)
    known = {kernel.tag: kernel for kernel in registry.kernels()}
    rows = []
    for limit, names in sorted(archs.items()):
        for design, persist, stage in itertools.product(DESIGNS[1:], ("", "+persist-q"), (1, 2, 3, 4)):
            found: dict[str, list[str]] = {}
            for swizzle in ("", "+swizzle-q", "+swizzle-qk", "+swizzle-qkv"):
                kernel = known.get(f"mma({design}{persist}{swizzle}+stage{stage})")
                first = kernel and first_hole(kernel, names[0])
                if first:
                    found.setdefault(f"{first} to {kernel.variant.max_head_dim}", []).append(
                        swizzle.lstrip("+") or "padded"
                    )
            for head_dims, tiles in found.items():
                what = "all" if len(tiles) == 4 else ", ".join(tiles)
                rows.append((f"{limit // 1024} KiB: {', '.join(names)}", f"{design}{persist}", stage, what, head_dims))
    return table(("a block's shared memory", "design", "stage:", "tiles", "no tile for head dims"), rows)


def first_hole(kernel: Any, arch: str) -> int | None:
    """The head dim from which on a variant has no configuration on an architecture (see test_mma_grid.py).

    Tiles have whole 16 columns, so that a multiple of 8 has what the next multiple of 16 has.
    """
    from flashlane.bench import make_problem

    def none(head_dim: int) -> bool:
        problem = make_problem(64, 8, 4096, head_dim, arch=arch)
        return next(kernel.variant.configs(problem, False), None) is None

    head_dims = range(16, kernel.variant.max_head_dim + 1, 16)
    first = bisect.bisect_left(head_dims, True, key=none)
    return head_dims[first] - 8 if first < len(head_dims) else None


# --- from results


def bench_tables(path: Path, view: str = "") -> str:
    """A result as Markdown: on what it was measured, then the tables of its format and view."""
    if not path.is_file():
        return NOT_MEASURED
    result = json.loads(path.read_text(encoding="utf-8"))
    kind = str(result.get("format") or ("flashlane-lessons/0" if "block" in (result.get("rows") or [{}])[0] else None))
    views = next((views for prefix, views in VIEWS.items() if kind.startswith(prefix)), None)
    if views is None:
        raise ValueError(f"{path.name} has format {kind!r}; it must be a file that flashlane bench wrote")
    if view not in views:
        raise ValueError(f"{path.name} has no view {view!r}; it may be one of {', '.join(map(repr, views))}")
    return f"{measured_on(result['environment'])}{other_runs(result)}\n{views[view](result)}"


def measured_on(where: Mapping[str, Any]) -> str:
    """Device, versions, commit and day on one line."""
    versions = ", ".join(f"{name} {where[name]}" for name in VERSIONS if where.get(name))
    return f"{where['device']}; {versions}; commit {where.get('commit')}, {str(where.get('date'))[:10]}.\n"


def other_runs(result: Result) -> str:
    """How many rows are of runs at other commits, where a file joins several."""
    last = result["environment"].get("commit")
    commits = [row["commit"] for row in result.get("rows") or () if row.get("commit", last) != last]
    counts = (f"{commits.count(commit)} at commit {commit}" for commit in dict.fromkeys(commits))
    return f"Rows of earlier runs: {', '.join(counts)}.\n" if commits else ""


def by_problem(result: Result) -> dict[str, list[Row]]:
    """Rows of each problem, in their order."""
    problems: dict[str, list[Row]] = {}
    for row in result["rows"]:
        problems.setdefault(row["problem"], []).append(row)
    return problems


def all_rows(result: Result) -> str:
    """A table a problem with every row, fastest first."""
    head = ("tag", "ms:", "TFLOP/s:", "× best peer:")
    tables = []
    for problem, rows in by_problem(result).items():
        rows = sorted(rows, key=lambda row: milliseconds(row) or float("inf"))
        tables.append(f"**{problem}**\n\n" + table(head, [_cells(row) for row in rows]))
    return "\n".join(tables)


def _cells(row: Row) -> tuple[str, ...]:
    tag = row["tag"] if row["kind"] == "kernel" else f"{row['tag']} (peer)"
    if row["status"] != "ok":
        return (tag, row["status"], "", "")
    speeds = (number(row.get(key), digits) for key, digits in (("tflops", 1), ("speedup", 2)))
    return (tag, significant(milliseconds(row)), *speeds)


def ladder(result: Result) -> str:
    """A table a problem: the fastest tag of each design that accumulates and stores in f32, padded then swizzled."""
    head = ("design", "fastest tag", "ms:", "TFLOP/s:", "× design before:", "× SDPA flash:", "registers:", "KiB:")
    shares = any(row.get("mma_ceiling") for row in result["rows"])
    head += (CEILING,) if shares else ()
    tables = []
    for problem, rows in by_problem(result).items():
        baselines = {row["tag"]: milliseconds(row) for row in rows if row["kind"] == "peer" and milliseconds(row)}
        flash, before, lines = baselines.get(FLASH), None, []
        for name, members in designs(rows):
            timed = [row for row in members if row["status"] == "ok" and milliseconds(row)]
            if not timed:
                continue
            best = min(timed, key=milliseconds)
            ms, usage = milliseconds(best), best.get("usage") or {}
            ratios = [number(other / ms if other else None, 2) for other in (before, flash)]
            shared = usage.get("shared_bytes")
            size = (usage.get("registers") or "–", number(shared / 1024 if shared else None, 1))
            size += (share(best),) if shares else ()
            lines.append((name, f"`{best['tag']}`", significant(ms), number(best["tflops"], 1), *ratios, *size))
            before = ms
        for row in rows:
            if row["tag"] in baselines:
                ms = milliseconds(row)
                ratio = number(flash / ms if flash else None, 2)
                rest = ("", "", "") if shares else ("", "")
                lines.append((row["tag"], "", significant(ms), number(row["tflops"], 1), "", ratio, *rest))
        tables.append(f"**{problem}**\n\n" + table(head, lines))
    return "\n".join(tables)


def designs(rows: Sequence[Row]) -> Iterable[tuple[str, list[Row]]]:
    """(name, rows) of each design, from the bottom: each design with padded tiles, then all with swizzled ones."""
    kernels = [(row, *split_words(words_of(row["tag"]))) for row in rows if row["kind"] == "kernel"]

    def of(design: str, *must: str) -> list[Row]:
        return [row for row, named, words in kernels if named == design and set(words) - {"persist-q"} == set(must)]

    yield "naive", of("naive")
    for design in DESIGNS[1:]:
        yield design, of(design, "acc-f32")
    yield "swizzle-qkv", [row for design in DESIGNS[1:] for row in of(design, "acc-f32", "swizzle-qkv")]


def logs_columns(result: Result) -> str:
    """The columns and rows of the baseline logs: f16 accumulators and padded tiles.

    The last column is the gain over the best row so far, as those logs print it.
    """
    head = ("tag", "first, second, last output", "ms:", "TFLOP/s (all operations):", "over the best so far:")
    tables = []
    for problem, rows in by_problem(result).items():
        best, lines = None, []
        for row in rows:
            if row["kind"] == "kernel" and split_words(words_of(row["tag"]))[1]:
                continue
            ms = milliseconds(row)
            if row["status"] != "ok" or not ms:
                lines.append((row["tag"], "", row["status"], "", ""))
                continue
            gain = "" if best is not None and ms >= best else f"+{100 * (best / ms - 1) if best else 0:.2f} %"
            best = ms if best is None else min(best, ms)
            values = ", ".join(f"{value:.8f}" for value in row.get("values") or ())
            lines.append((row["tag"], values, f"{ms:.6f}", number(row.get("tflops_all"), 2), gain))
        tables.append(f"**{problem}**\n\n" + table(head, lines))
    return "\n".join(tables)


def summary(result: Result) -> str:
    """One line a problem: our fastest kernel next to SDPA flash (FlashAttention-2) and cuDNN."""
    head = ("problem", "fastest of ours", "ms:", "TFLOP/s:", "× SDPA flash:", "× cuDNN:")
    lines = []
    for problem, rows in by_problem(result).items():
        times = {row["tag"]: (milliseconds(row), row) for row in rows if milliseconds(row) and row["status"] == "ok"}
        ours = min((pair for pair in times.values() if pair[1]["kind"] == "kernel"), key=lambda pair: pair[0])
        ratios = (number(times[tag][0] / ours[0], 2) if tag in times else "" for tag in ("(flash)", "(cudnn)"))
        tflops = number(ours[1].get("tflops"), 1)
        lines.append((problem, f"`{ours[1]['tag']}`", significant(ours[0]), tflops, *ratios))
    return table(head, lines)


STANDING = {
    "baseline": "`mma`, baseline grid",
    "mma_targets": "`mma`, targets",
    "hopper_forward": "`hopper`, forward",
    "hopper_backward": "`hopper`, {direction}",
    "triton_targets": "`triton`, targets",
    "decode": "`decode`",
}
"""Committed results of a family against its peers, and what the table of the standing calls them."""
PEERS = {
    "unfused": "plain PyTorch",
    "flash": "FlashAttention-2 (SDPA)",
    "fa2": "FlashAttention-2 (SDPA)",
    "cudnn": "cuDNN (SDPA)",
    "efficient": "SDPA efficient",
    "sdpa-efficient": "SDPA efficient",
    "flex": "FlexAttention",
    "fa4": "FlashAttention-4",
    "flash-attn-4": "FlashAttention-4",
    "ffpa": "ffpa-attn",
}


def standing(results: Path) -> str:
    """Where we lead and where we trail: times as fast as each peer, over all problems of each committed file."""
    rows, devices = [], []
    for name, family in STANDING.items():
        path = results / f"{name}.json"
        if not path.is_file():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        ratios: dict[tuple[str, str], list[float]] = {}
        for part, parts_result in directions(result):
            for peer, ratio in pairs(parts_result):
                word = peer.strip("()")
                ratios.setdefault((family.format(direction=part), PEERS.get(word, word)), []).append(ratio)
        devices.append(f"{result['environment']['device']}, {str(result['environment'].get('date'))[:10]}")
        for who, found in ratios.items():
            mean = math.exp(sum(map(math.log, found)) / len(found))
            figures = (marked(value) for value in (mean, min(found), max(found)))
            rows.append((*who, len(found), sum(ratio > 1 for ratio in found), *figures))
    if not rows:
        return NOT_MEASURED
    head = ("kernels", "against", "problems:", "faster in:", "geometric mean:", "least:", "most:")
    text = table(head, rows) + f"\nMeasured on {'; '.join(dict.fromkeys(devices))}."
    absent = [name for name in dict.fromkeys(PEERS.values()) if name not in {row[1] for row in rows}]
    text += f" Not in any of these files: {', '.join(absent)}.\n" if absent else "\n"
    checked = results / "correctness.json"
    if checked.is_file():
        found = json.loads(checked.read_text(encoding="utf-8"))
        text += (
            f"{found['runs']} checked runs of {len(found['kernels'])} kernels over {found['problems']} drawn problems, "
            f"{found['failures']} failed ([correctness.json](../benchmarks/results/correctness.json)).\n"
        )
    return text


def directions(result: Result) -> Iterable[tuple[str, Result]]:
    """What is timed together, and a result with its rows only."""
    names = {"backward": "backward", "both": "forward and backward"}
    given = dict.fromkeys(row.get("direction") for row in result.get("rows") or ())
    if not given or not names.keys() >= given.keys():
        yield "", result
        return
    for direction in given:
        yield names[direction], {**result, "rows": [r for r in result["rows"] if r["direction"] == direction]}


def marked(ratio: float) -> str:
    """A ratio; in bold where it is a loss."""
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"


def pairs(result: Result) -> Iterable[tuple[str, float]]:
    """(peer, times as fast as it) of every problem of a family's file; nothing for a format that is not known."""
    kind = str(result.get("format"))
    if kind.startswith("flashlane-bench/"):
        for rows in by_problem(result).values():
            timed = [row for row in rows if row["status"] == "ok" and milliseconds(row)]
            ours = min((milliseconds(row) for row in timed if row["kind"] == "kernel"), default=None)
            yield from ((r["tag"], milliseconds(r) / ours) for r in timed if ours and r["kind"] == "peer")
    elif kind.startswith("flashlane-mma-targets/"):
        yield from ((target["peer"], target["ratio"]) for target in result["targets"] if target["ratio"])
    elif kind.startswith("flashlane-triton-targets/"):
        yield from (pair for target in result["targets"] for pair in (target.get("ratios") or {}).items() if pair[1])
    elif kind.startswith("flashlane-hopper-"):
        for row in result["rows"]:
            rates = row.get("tflops") or {}
            yield from (
                (n, rates["flashlane"] / x) for n, x in rates.items() if n != "flashlane" and "flashlane" in rates
            )
    elif kind.startswith("flashlane-decode/"):
        times: dict[str, dict[str, float]] = {}
        for row in result["rows"]:
            if row["check"] == "ok" and row.get("microseconds"):
                times.setdefault(row["cell"], {})[row["tag"]] = row["microseconds"]
        for cell in times.values():
            ours = min((us for tag, us in cell.items() if not tag.startswith("(")), default=None)
            yield from ((tag, us / ours) for tag, us in cell.items() if ours and tag.startswith("("))


def words_of(tag: str) -> list[str]:
    """``mma(split-q+acc-f32+stage1)``: split-q, acc-f32, stage1."""
    return tag.partition("(")[2].rstrip(")").split("+")


def split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """The design (where the data lives), and what else is said but the stages."""
    design = [word for word in words if word.startswith(("naive", "split", "share", "tiling"))]
    return "+".join(design), [word for word in words if word not in design and not word.startswith("stage")]


def targets(result: Result) -> str:
    """A line a target: the ratio to the peer, and whether the target was met."""
    shares = any(target.get("mma_ceiling") for target in result["targets"])
    head = ("problem", "against", "ratio:", "target:", "", "ms:", "TFLOP/s:", *((CEILING,) if shares else ()), "tag")
    rows = []
    for target in result["targets"]:
        verdict = "" if target["ratio"] is None else "met" if target["met"] else "**missed**"
        tag = f"`{target['tag']}`" if target["tag"] else "not run"
        figures = (significant(target["ms"]), number(target["tflops"], 1), *((share(target),) if shares else ()))
        rows.append(
            (target["problem"], target["peer"], number(target["ratio"], 3), target["asked"], verdict, *figures, tag)
        )
    met = sum(target["met"] for target in result["targets"])
    return table(head, rows) + f"\n{met} of {len(rows)} targets met.\n"


def triton_targets(result: Result) -> str:
    """A line a target: our time, and how many times as fast as each peer it is."""
    peers = list(dict.fromkeys(peer for target in result["targets"] for peer in target.get("ratios") or {}))
    head = ("target", "ms:", "TFLOP/s:", *(f"× {PEERS.get(peer.strip('()'), peer)}:" for peer in peers), "target")
    rows = []
    for target in result["targets"]:
        ratios = (number((target.get("ratios") or {}).get(peer), 3) for peer in peers)
        verdict = "met" if target["met"] else "**missed**" if target.get("ratios") else "not run"
        rows.append((target["name"], significant(target["ms"]), number(target["tflops"], 1), *ratios, verdict))
    return table(head, rows) + f"\n{sum(target['met'] for target in result['targets'])} of {len(rows)} targets met.\n"


def suite(result: Result) -> str:
    """A course table (docs/suites.md explains them): our times, and how many times as fast as the others we are."""
    sizes = ("seqlen", "head_dim", "dtype", "size", "attention", "tokens", "peak")
    sizes += ("workload", "ms", "to_cudnn", "whole_s", "error")  # of whole models (docs/e2e.md)
    words = {c["key"]: c["title"] for c in result["columns"]}
    shown = [key for key in words if key in sizes or key.startswith(("ours_", "speedup")) or key.endswith("_avg")]

    def cell(key: str, value: object) -> str:
        if not isinstance(value, float):
            return "–" if value is None else str(value)
        return f"{marked(value)}×" if key.startswith(("speedup", "to_")) else f"{value:.4g}"

    rows = [[cell(key, row.get(key)) for key in shown] for row in result["rows"]]
    text = table([words[key].replace("_", " ") + ":" for key in shown], rows)
    return text + "".join(f"\n{message}\n" for message in result["messages"])


HOPPER_PEERS = ("cudnn", "fa4", "fa2", "flex")
SQUARE = re.compile(r"D(64|128|256) (full|causal) N(\d+) B(\d+) H(\d+)")
"""A problem of the grid: as many tokens and columns whatever the length and the head dim."""


def hopper_name(row: Row) -> str:
    return str(row.get("name") or row["problem"])


def square(row: Row) -> re.Match[str] | None:
    """Head dim, mask, length, batch and heads of a problem of the grid; None of another."""
    return SQUARE.fullmatch(hopper_name(row).removesuffix(f" {row.get('direction')}"))


def hopper_grid(result: Result, direction: str | None = None) -> str:
    """A row a head dim and mask, a column a length: TFLOP/s of ours and of the peers, and the ratio to the fastest."""
    cells: dict[str, dict[int, str]] = {}
    ratios = []
    for row in result["rows"]:
        match = square(row)
        if match is None or row.get("direction") != direction or not row.get("ratio"):
            continue
        rates = [row["tflops"].get(peer) for peer in ("flashlane", *HOPPER_PEERS[:3])]
        text = " / ".join("–" if rate is None else f"{rate:.0f}" for rate in rates)
        cells.setdefault(f"D{match[1]} {match[2]}", {})[int(match[3])] = f"{text} **{row['ratio']:.2f}**"
        ratios.append(row["ratio"])
    if not ratios:
        return NOT_MEASURED
    lengths = sorted({length for row in cells.values() for length in row})
    lines = [(name, *(row.get(length, "–") for length in lengths)) for name, row in cells.items()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    text = table(("", *(f"N {length}:" for length in lengths)), lines)
    return text + f"\nGeometric mean of the {len(ratios)} ratios {mean:.3f}, the least {min(ratios):.3f}.\n"


def hopper_rows(result: Result) -> str:
    """A line a problem that is not of the grid: TFLOP/s of ours and of the peers, and the ratio to the fastest."""
    rows = [row for row in result["rows"] if row.get("ratio") and not square(row)]
    peers = [peer for peer in HOPPER_PEERS if any(peer in row["tflops"] for row in rows)]
    tiles = any(row.get("config") for row in rows)
    costs = any(row.get("cost") is not None for row in rows)
    head = ("problem", *(("tile",) if tiles else ()), "flashlane:", *(f"{PEERS.get(p, p)}:" for p in peers), "ratio:")
    lines = []
    for row in rows:
        rates = (number(row["tflops"].get(peer), 0) for peer in ("flashlane", *peers))
        tile = (str(row.get("config", "")).split(",")[0],) if tiles else ()
        cost = ("" if row.get("cost") is None else f"{100 * row['cost']:.0f} %",) if costs else ()
        lines.append((hopper_name(row), *tile, *rates, marked(row["ratio"]), *cost))
    return table((*head, *(("cost of the order:",) if costs else ())), lines)


def hopper_targets(result: Result) -> str:
    """A line a target of the whole run."""
    head = ("target", "problems:", "asked:", "found:", "")
    rows = [
        (
            row["target"],
            row["cells"],
            f"{row['asked']:g}",
            number(row["found"], 3),
            "met" if row["met"] else "**missed**",
        )
        for row in result["targets"]
    ]
    return table(head, rows)


def decoding(result: Result) -> str:
    """A line a cell: our time and share of the copy rate, the peers' times, and whether its targets were met."""
    cells: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        if row["check"] == "ok" and row.get("microseconds"):
            cells.setdefault(row["cell"], {})[row["tag"]] = row
    targets = {target["cell"]: target for target in result["targets"]}
    peers = list(dict.fromkeys(tag for rows in cells.values() for tag in rows if tag.startswith("(")))
    head = (
        "cell",
        "µs:",
        "of the copy rate:",
        *(f"{PEERS.get(p.strip('()'), p)}, µs:" for p in peers),
        "× the best:",
        "",
    )
    lines = []
    for cell, rows in cells.items():
        ours = min(
            (row for tag, row in rows.items() if tag not in peers), key=lambda row: row["microseconds"], default=None
        )
        if ours is None:
            continue
        times = [rows[peer]["microseconds"] if peer in rows else None for peer in peers]
        best = min((time for time in times if time), default=None)
        missed = ", ".join(target.split(", wanted ")[-1] for target in targets.get(cell, {}).get("missed", ()))
        lines.append((
            cell, number(ours["microseconds"], 1), f"{100 * ours['share']:.1f} %", *(number(time, 1) for time in times),
            marked(best / ours["microseconds"]) if best else "–", f"**missed** {missed}" if missed else "",
        ))  # fmt: skip
    met = sum(len(target["targets"]) - len(target["missed"]) for target in targets.values())
    every = sum(len(target["targets"]) for target in targets.values())
    rate = f"Copy rate in the same run: {result['copy_gigabytes_per_second']:.0f} GB/s.\n\n"
    return rate + table(head, lines) + f"\n{met} of {every} targets met.\n"


def logs(result: Result) -> str:
    """A table a log: every line of it, our figures, and the milliseconds that it reports."""
    reported = json.loads((ROOT / "src/flashlane/bench/suites/baseline_reported.json").read_text(encoding="utf-8"))
    head = ("problem", "tag", "first, second, last output", "ms:", "TFLOP/s (all operations):", "the log's ms:")
    measured = {(row["problem"], row["tag"]): row for row in result["rows"]}
    tables = []
    for log in reported["logs"]:
        lines = []
        for line in log["rows"]:
            title = "B{} H{} N{} D{}".format(*line["shape"]) + f" {line['dtype']}"
            for tag, theirs in line["ms"].items():
                row = measured.get((f"{title}, {log['name']}", tag), {})
                ms = milliseconds(row) if row.get("status") == "ok" else None
                values = ", ".join(f"{value:.8f}" for value in row.get("values") or ()) if ms else ""
                ours = f"{ms:.6f}" if ms else row.get("status", "not run")
                lines.append((title, f"`{tag}`", values, ours, number(row.get("tflops_all"), 2), f"{theirs:.6f}"))
        tables.append(f"**{log['name']}** (reported on {log['card']})\n\n" + table(head, lines))
    return "\n".join(tables)


def lessons(result: Result) -> str:
    """A line a group: the fastest of ours, torch, and the best loop of mma.sync from registers in the same rounds."""
    head = ("block", "problem", "fastest of ours", "ms:", "TFLOP/s or TB/s:", "torch, ms:", "× torch:", "% of ceiling:")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in result["rows"]:
        groups.setdefault((row["block"], row["group"]), []).append(row)
    lines = []
    for (block, group), rows in groups.items():
        ours = [row for row in rows if row["ok"] and row["tag"] != "torch" and not row["tag"].startswith("ceiling")]
        torch = next((row["milliseconds"] for row in rows if row["tag"] == "torch" and row["ok"]), None)
        if not ours:
            lines.append((block, group, "none passed its check", "–", "–", significant(torch), "–", ""))
            continue
        best = min(ours, key=lambda row: row["milliseconds"])
        rate = number(best["tflops"], 1) if best["tflops"] else number((best["gigabytes_per_second"] or 0) / 1e3, 2)
        figures = (rate, significant(torch), number(best["versus_torch"], 2))
        of_ceiling = number(100 * best["of_ceiling"], 0) if best["of_ceiling"] else ""
        lines.append((block, group, f"`{best['tag']}`", significant(best["milliseconds"]), *figures, of_ceiling))
    return table(head, lines)


def share(row: Row) -> str:
    """Percent of what ``mma.sync`` gives from registers, where it was measured."""
    return number(100 * row["mma_ceiling"], 0) if row.get("mma_ceiling") else "–"


def conflicts(result: Result) -> str:
    """A line a launch: what Nsight Compute counted."""
    head = ("D:", "layout", "ldmatrix conflicts:", "a read:", "cycles:", "tensor pipe %:", "KiB:", "tag")
    rows = []
    for launch in result["launches"]:
        counted = {name.rpartition("__")[2]: value for name, value in launch["metrics"].items()}
        total = counted["sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum"]
        reads = counted.get("sass_inst_executed_op_ldsm.sum")
        tensor = counted.get("pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active")
        each, cycles = number(total / reads if reads else None, 2), f"{counted['cycles_elapsed.max']:.0f}"
        figures = (f"{total:.0f}", each, cycles, number(tensor, 1), number(launch["shared_bytes"] / 1024, 1))
        rows.append((launch["head_dim"], launch["layout"], *figures, f"`{launch['tag']}`"))
    return table(head, rows)


def ceilings(result: Result) -> str:
    """What the tensor cores and the memory gave: the best ceiling of each precision, and the best copy."""
    best: dict[str, float] = {}
    copied = 0.0
    for row in result["rows"]:
        if row["tag"].startswith("ceiling") and row["tflops"]:
            words = row["group"].split()
            name = " ".join(word for word in words if word.startswith(("f16", "bf16", "acc-")))
            best[name] = max(best.get(name, 0.0), row["tflops"])
        copied = max(copied, row["gigabytes_per_second"] or 0.0)
    rows = [(f"mma.sync m16n8k16, {name}", f"{value:.0f} TFLOP/s") for name, value in best.items()]
    if copied:
        rows.append(("device memory, read and write together", f"{copied / 1000:.2f} TB/s"))
    return table(("ceiling", "measured:"), rows)


VIEWS = {
    "flashlane-bench/": {
        "": all_rows,
        "ladder": ladder,
        "logs-columns": logs_columns,
        "logs": logs,
        "summary": summary,
    },
    "flashlane-mma-targets/": {"": targets},
    "flashlane-triton-targets/": {"": triton_targets},
    "flashlane-ncu-conflicts/": {"": conflicts},
    "flashlane-suite/": {"": suite},
    "flashlane-decode/": {"": decoding},
    "flashlane-hopper-backward/": {
        "grid-backward": functools.partial(hopper_grid, direction="backward"),
        "grid-both": functools.partial(hopper_grid, direction="both"),
        "rows": hopper_rows,
        "targets": hopper_targets,
    },
    "flashlane-hopper-": {"grid": hopper_grid, "rows": hopper_rows},
    "flashlane-lessons/": {"ceilings": ceilings, "rows": lessons},
}
"""Start of a file's format -> its views."""


# --- Markdown


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a column whose title ends in a colon is set to the right."""
    lines = [[title.removesuffix(":") for title in head], ["---:" if title.endswith(":") else "---" for title in head]]
    lines += [[str(cell) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def milliseconds(row: Row) -> float | None:
    return row["timing"]["median"] if row.get("timing") else None


def significant(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def number(value: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" if value else "–"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a document is out of date")
    check = parser.parse_args().check
    stale = []
    for page in documents():
        old = page.read_text(encoding="utf-8")
        new = rendered(old, ROOT / "benchmarks" / "results", page.name)
        if new == old:
            continue
        stale.append(page.relative_to(ROOT).as_posix())
        if not check:
            temporary = page.with_suffix(".md.part")
            temporary.write_text(new, encoding="utf-8")
            temporary.replace(page)
    if check and stale:
        print(f"{', '.join(stale)} out of date: python benchmarks/scripts/readme_tables.py", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
