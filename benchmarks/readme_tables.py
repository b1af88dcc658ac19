"""Write README.md's generated parts: the list of kernels, and a table for each committed result.

    python benchmarks/readme_tables.py           # rewrite README.md
    python benchmarks/readme_tables.py --check   # exit 1 when README.md is not what would be written

Between ``<!-- bench:NAME:begin -->`` and ``<!-- bench:NAME:end -->`` goes benchmarks/NAME.json, a file that
``flashlane bench`` wrote; between ``<!-- kernels:begin -->`` and ``<!-- kernels:end -->`` the registry.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- (kernels|bench:([\w.-]+)):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)
VERSIONS = ("torch", "cuda", "driver", "flashlane")


def rendered(readme: str, results: Path) -> str:
    """The text of README with every generated part made anew from the folder of results and the registry.

    Raises:
        ValueError: a marker names a result that is not there, or a file that the bench did not write.
    """
    for begin in re.findall(r"<!-- (\S+):begin -->", readme):
        if f"<!-- {begin}:end -->" not in readme:
            raise ValueError(f"README has <!-- {begin}:begin --> but no <!-- {begin}:end -->")

    def part(match: re.Match[str]) -> str:
        body = kernel_list() if match[2] == "kernels" else bench_tables(results / f"{match[3]}.json")
        return f"{match[1]}{body}{match[4]}"

    return MARKED.sub(part, readme)


def kernel_list() -> str:
    """One line a kernel; variants that share an idea share a line."""
    from flashlane import registry

    ideas: dict[str, list[str]] = {}
    for kernel in registry.kernels():
        ideas.setdefault(kernel.summary, []).append(kernel.tag)
    lines = ["| kernel | idea |", "| --- | --- |"]
    for idea, tags in ideas.items():
        name = f"`{tags[0]}`"
        if len(tags) > 1:
            name = f"`{os.path.commonprefix(tags).rstrip('+')}+…)`, {len(tags)} variants"  # noqa: RUF071
        lines.append(f"| {name} | {idea} |")
    return "\n".join(lines) + "\n"


def bench_tables(path: Path) -> str:
    """A result as Markdown: on what it was measured, then a table a problem with every row, fastest first."""
    if not path.is_file():
        raise ValueError(f"README names {path.stem}, but {path.name} is not in {path.parent.name}/")
    result = json.loads(path.read_text(encoding="utf-8"))
    if not str(result.get("format", "")).startswith("flashlane-bench/"):
        raise ValueError(
            f"{path.name} has format {result.get('format')!r}; it must be a file that flashlane bench wrote"
        )
    where = result["environment"]
    versions = ", ".join(f"{name} {where[name]}" for name in VERSIONS if where.get(name))
    text = f"{where['device']}; {versions}; commit {where.get('commit')}, {str(where.get('date'))[:10]}.\n"
    for problem in dict.fromkeys(row["problem"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["problem"] == problem]
        rows.sort(key=lambda row: row["timing"]["median"] if row.get("timing") else float("inf"))
        text += f"\n**{problem}**\n\n| tag | ms | TFLOPS | × best baseline |\n| --- | ---: | ---: | ---: |\n"
        text += "".join(_line(row) for row in rows)
    return text


def _line(row: Mapping[str, Any]) -> str:
    tag = row["tag"] if row["kind"] == "kernel" else f"{row['tag']} (baseline)"
    if row["status"] != "ok":
        return f"| {tag} | {row['status']} | | |\n"
    cells = [f"{row['timing']['median']:.4g}" if row.get("timing") else "–"]
    cells += [f"{row[key]:.{digits}f}" if row.get(key) else "–" for key, digits in (("tflops", 1), ("speedup", 2))]
    return f"| {tag} | {' | '.join(cells)} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when README.md is out of date")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = rendered(old, ROOT / "benchmarks")
    if check and new != old:
        print("README.md is out of date: python benchmarks/readme_tables.py", file=sys.stderr)
        return 1
    if not check and new != old:
        temporary = readme.with_suffix(".md.part")
        temporary.write_text(new, encoding="utf-8")
        temporary.replace(readme)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
