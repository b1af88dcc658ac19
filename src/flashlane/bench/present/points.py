"""A results file as far as it is drawn: one point a timed row, and the ceilings."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlane.bench.measure.device_rates import DeviceRates, is_rates_file, rates_of, read_rates_file, stored_ceilings
from flashlane.bench.measure.results import FORMAT, OK, UNCHECKED, read_json
from flashlane.core.problem import DTYPES


@dataclass(frozen=True)
class Point:
    """One timed implementation on one problem."""

    problem: str
    tag: str
    ours: bool
    tflops: float
    speedup: float | None
    """Time of the problem's best peer over this one's; None where no peer was timed."""
    batch: int
    heads: str
    seqlen_q: int
    seqlen_k: int
    head_dim: str
    variant: str
    """What else the problem's name says: ``bf16 causal, graph replay``."""
    extra_bytes: int | None = None
    """What a call takes beyond its inputs, at the peak."""
    intensity: float | None = None
    """Operations a byte, each input read once and each output written once."""
    dtype: str = ""

    @property
    def extent(self) -> str:
        return f"B{self.batch} H{self.heads}"

    @property
    def queries(self) -> str:
        """The number of queries, where it is not that of keys."""
        return "" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q} queries"


@dataclass(frozen=True)
class Measured:
    """A results file, as far as it is drawn."""

    path: Path
    environment: dict[str, Any]
    points: tuple[Point, ...]

    @property
    def ceilings(self) -> DeviceRates | None:
        """The ceilings that were measured in the same run; None where they were not."""
        body = stored_ceilings(self.environment)
        return None if body is None else rates_of(body, str(self.path))

    def choose(self, words: Sequence[str]) -> Measured:
        """Peers, and the kernels whose tag contains one of the words (every kernel without words).

        Raises:
            ValueError: no timed kernel of the file has such a tag.
        """
        kept = [p for p in self.points if not p.ours or not words or any(word in p.tag for word in words)]
        if words and not any(p.ours for p in kept):
            raise ValueError(f"--tags is {','.join(words)}; no timed kernel of {self.path} has such a tag")
        return Measured(self.path, self.environment, tuple(kept))


def read_results(path: Path) -> Measured:
    """Read a results file of the bench; rows without a time (failed, in error) are left out.

    Raises:
        ValueError: it cannot be read, is not a results file, or holds no timed row; the message names it.
    """
    body = _read_json(path)
    if body.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a results file of flashlane bench: format {body.get('format')!r}, not {FORMAT!r}"
        )
    try:
        rows = [row for row in body["rows"] if row["status"] in (OK, UNCHECKED) and row["tflops"] is not None]
        points = tuple(_point(row) for row in rows)
        environment = dict(body["environment"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error} in its rows or environment") from None
    if not points:
        raise ValueError(f"{path} has no timed row")
    return Measured(path, environment, points)


def lines_of(ceilings: DeviceRates) -> dict[str, float]:
    """Matrix rates by ``f16 matrix product``, TFLOP/s, as ``bench.present.plots.throughput_figure`` takes them."""
    lines = {f"{dtype} matrix product": rate for dtype, rate in ceilings.matrix.items()}
    return lines | {f"{dtype} mma.sync": rate for dtype, rate in ceilings.mma.items()}


def all_rates(path: Path, device: str) -> tuple[dict[str, float], float | None]:
    """Matrix rates and, where the file has it, the copy rate in GB/s: of ``flashlane roofline`` or lessons_gpu.py.

    Raises:
        ValueError: no such file, it has no such rate, or it was measured on another device; the message names it.
    """
    if is_rates_file(_read_json(path)):
        found = read_rates_file(path, device)
        return lines_of(found), found.copy
    return {f"{name} mma.sync": rate for name, rate in read_matrix_rates(path, device).items()}, None


def read_matrix_rates(path: Path, device: str) -> dict[str, float]:
    """The matrix rates that ``benchmarks/scripts/lessons_gpu.py`` measured, TFLOP/s by ``f16 acc-f32``.

    Raises:
        ValueError: no such file, it has no such rate, or it was measured on another device; the message names it.
    """
    body = _read_json(path)
    ceilings: dict[str, float] = {}
    try:
        for row in body["rows"]:
            if row["block"] == "hgemm" and row["ok"] and row["of_ceiling"]:
                name = " ".join(row["group"].split()[1:3])
                ceilings[name] = max(ceilings.get(name, 0.0), row["tflops"] / row["of_ceiling"])
        measured_on = body["environment"]["device"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--ceilings: {path} is not a file of lessons_gpu.py: {type(error).__name__} {error}"
        ) from None
    if not ceilings:
        raise ValueError(f"--ceilings: {path} has no rate of the matrix units (of_ceiling of a block hgemm)")
    if measured_on != device:
        raise ValueError(f"--ceilings: {path} was measured on {measured_on}, the results on {device}")
    return ceilings


def _read_json(path: Path) -> dict[str, Any]:
    body = read_json(path)
    if not isinstance(body, dict):
        raise ValueError(f"{path} is not a results file: a JSON {type(body).__name__}, not an object")
    return body


def _point(row: dict[str, Any]) -> Point:
    sizes, name = row["sizes"], str(row["problem"])
    heads, kv_heads = int(sizes["heads"]), int(sizes["kv_heads"])
    named = re.fullmatch(r"B\S+ H\S+ N\S+ D(\S+) (.+)", name)
    head_dim, variant = named.groups() if named else (str(sizes["head_dim"]), name)
    return Point(
        problem=name,
        tag=str(row["tag"]),
        ours=row["kind"] == "kernel",
        tflops=_positive(row["tflops"]),
        speedup=None if row["speedup"] is None else _positive(row["speedup"]),
        batch=int(sizes["batch"]),
        heads=str(heads) if heads == kv_heads else f"{heads}/{kv_heads}",
        seqlen_q=int(sizes["seqlen_q"]),
        seqlen_k=int(sizes["seqlen_k"]),
        head_dim=head_dim,
        variant=variant,
        extra_bytes=(row.get("memory") or {}).get("extra"),
        intensity=_intensity(row),
        dtype=str(sizes.get("dtype") or re.split(r"[ ,]", variant)[0]),
    )


def _intensity(row: dict[str, Any]) -> float | None:
    """Operations over least bytes, where the row says enough to know both."""
    from flashlane.bench.measure.flops import least_bytes
    from flashlane.bench.measure.grid import make_problem

    s, timing = row["sizes"], row.get("timing")
    if not timing or s.get("dtype") not in DTYPES:
        return None
    lengths = (s["batch"], s["heads"], s["seqlen_q"], s["head_dim"], DTYPES[s["dtype"]])
    problem = make_problem(*lengths, kv_heads=s["kv_heads"], seqlen_k=s["seqlen_k"], head_dim_v=s.get("head_dim_v"))
    return row["tflops"] * timing["median"] * 1e9 / least_bytes(problem, row.get("direction", "forward"))


def _positive(figure: Any) -> float:
    if not 0 < float(figure) < math.inf:
        raise ValueError(f"{figure} is not a speed")
    return float(figure)


def fastest_tags(points: Iterable[Point], most: int) -> list[str]:
    """The kernels that come nearest to the fastest one everywhere, so that a picture of a few shows no problem slower.

    First the kernel with the best mean over all problems of its rate over the fastest kernel's (0 where it was not
    timed). Then, one after another, the kernel that raises most the mean of the best of those chosen; between equal
    ones the better mean decides.
    """
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    fastest: dict[str, float] = {}
    for point in points:
        if point.ours:
            shares[point.tag][point.problem] = point.tflops
            fastest[point.problem] = max(point.tflops, fastest.get(point.problem, 0.0))
    for by_problem in shares.values():
        for problem, rate in by_problem.items():
            by_problem[problem] = rate / fastest[problem]
    left = sorted(shares, key=lambda tag: -sum(shares[tag].values()))
    chosen: list[str] = []
    reached: dict[str, float] = defaultdict(float)
    while left and len(chosen) < most:
        gains = [sum(max(0.0, share - reached[problem]) for problem, share in shares[tag].items()) for tag in left]
        if max(gains) <= 1e-12:
            return [*chosen, *left][:most]
        chosen.append(left.pop(gains.index(max(gains))))
        for problem, share in shares[chosen[-1]].items():
            reached[problem] = max(reached[problem], share)
    return chosen
