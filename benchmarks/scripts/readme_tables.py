"""Write the generated parts of docs/ and README.md: tables of kernels, of tile shapes, and of committed results.

    python benchmarks/scripts/readme_tables.py           # rewrite the documents
    python benchmarks/scripts/readme_tables.py --check   # exit 1 when one is not what would be written

A part stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``. NAME is ``kernels`` (the registry),
``features`` (the registry next to what other libraries document, benchmarks/scripts/features.json), ``standing`` (where
the committed results lead and where they trail), ``suite-steps`` (training steps slower than with SDPA),
``chosen-behind`` (peers ahead on chosen problems), ``drawn`` and others of drawn_tables.py (drawn problems),
``first-call`` (what a process's first call takes), ``mma-shapes`` (what the mma family's heuristic picks),
``mma-holes`` (where it has no tile that fits), or ``bench:FILE``: benchmarks/FILE.json as the table that its format
has. ``bench:FILE/VIEW`` takes another view of it: ``designs`` and ``logs-columns`` of a file that ``flashlane bench``
or baseline.py wrote, ``logs`` of that of baseline_logs.py, ``ceilings`` and ``rows`` of that of lessons_gpu.py,
``grid`` (or ``grid-backward``, ``grid-both``), ``rows`` and ``targets`` of those of hopper_forward.py and
hopper_backward.py. A file that is not there leaves a line that says so.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import drawn_tables
from baseline_tables import DESIGNS, ROOT
from markdown_parts import table, wrapped
from result_tables import bench_tables, standing
from suite_sentences import behind_on_chosen, slower_steps

SHAPE_HEAD_DIMS = (64, 128, 256, 512, 1024)
SHAPE_ARCH = "sm_90a"


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
            raise ValueError(f"{name} has <!-- {begin}:begin -->; it may be {', '.join(PARTS)} or bench:FILE[/VIEW]")

    def part(match: re.Match[str]) -> str:
        make = PARTS.get(match[2])
        body = make(results) if make else bench_tables(results / f"{match[3]}.json", match[4] or "")
        return f"{match[1]}{body}{match[5]}"

    return MARKED.sub(part, document)


def first_call(path: Path) -> str:
    """On the first call of a process, by the file of first_call.py; without figures where there is none."""
    text = "A first call with an empty cache compiles its kernels; later processes load them from the disk."
    if not path.is_file():
        return f"{text}\n"
    body = json.loads(path.read_text(encoding="utf-8"))
    rows = {(row["case"], row["state"]): row for row in body["rows"] if "error" not in row}
    told = []
    for case, what in (("inference", "without a gradient"), ("dense", "with the backward")):
        found = [rows.get((case, state)) for state in ("empty", "full", "ptx")]
        if body["without_gpu"] or None in found:
            return f"{text}\n"
        both = (row["forward_ms"] + (row["backward_ms"] if case == "dense" else 0) for row in found if row)
        told.append(" / ".join(f"{ms:.0f}" for ms in both) + f" ms {what}")
    text += f" In bf16 at head dim 128 a call takes {' and '.join(told)}: with an empty cache, with a full one, and"
    text += " with an empty one and a wheel of `make wheel`, which has the kernels' PTX"
    where = body["environment"]
    return wrapped(f"{text} ({where['device']}, `first_call.json`, {where['date'][:10]}).")


# --- from the registry


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
    return table(head, rows) + "\n" + wrapped(f"{others['note']} Sources: {'; '.join(said)}.")


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
    kernels = {kernel.tag: kernel for kernel in registry.kernels()}
    rows = []
    for limit, names in sorted(archs.items()):
        for design, persist, stage in itertools.product(DESIGNS[1:], ("", "+persist-q"), (1, 2, 3, 4)):
            holes: dict[str, list[str]] = {}
            for swizzle in ("", "+swizzle-q", "+swizzle-qk", "+swizzle-qkv"):
                kernel = kernels.get(f"mma({design}{persist}{swizzle}+stage{stage})")
                first = kernel and first_hole(kernel, names[0])
                if first:
                    holes.setdefault(f"{first} to {kernel.variant.max_head_dim}", []).append(
                        swizzle.lstrip("+") or "padded"
                    )
            for head_dims, tiles in holes.items():
                what = "all" if len(tiles) == 4 else ", ".join(tiles)
                rows.append((f"{limit // 1024} KiB: {', '.join(names)}", f"{design}{persist}", stage, what, head_dims))
    return table(("a CTA's shared memory", "design", "stage:", "tiles", "no tile for head dims"), rows)


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


PARTS: dict[str, Callable[[Path], str]] = {
    "kernels": lambda results: kernel_list(),
    "features": lambda results: feature_table(ROOT / "benchmarks" / "scripts" / "features.json"),
    "standing": standing,
    "suite-steps": slower_steps,
    "chosen-behind": behind_on_chosen,
    "first-call": lambda results: first_call(results / "first_call.json"),
    **drawn_tables.PARTS,
    "mma-shapes": lambda results: shape_table(),
    "mma-holes": lambda results: hole_table(),
}
"""What makes each part, but for those of a results file, from the folder of results."""
MARKED = re.compile(
    rf"(<!-- ({'|'.join(PARTS)}|bench:([\w.-]+?)(?:/([\w-]+))?):begin -->\n)"
    r".*?(<!-- \2:end -->)",
    re.DOTALL,
)


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
