"""Every variant of every lesson against torch: checked against float64 first, then timed, interleaved in its group.

A group holds what is comparable: one operation on one input. A variant that fails its check is not timed; one that
raises gives a row that says so, and the others go on. ``benchmarks/scripts/lessons_gpu.py`` prints and stores the rows.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from flashlane.bench.measure.timing import Settings, Timing, clock_for, measure
from flashlane.lessons import activation, ceiling, gemm, row_softmax
from flashlane.lessons.launch import DTYPES, device_arch, dtype_name

TORCH = "torch"
CEILING = "ceiling"
SETTINGS = Settings(rounds=7, round_ms=6.0, warmup_ms=30.0)
SOFTMAX_SHAPES = ((262144, 256), (32768, 2048), (32768, 2047), (8192, 8192), (1024, 65536))
ACTIVATION_SIZES = (1 << 26, (1 << 22) + 5)
SAMPLED_ROWS = 512
"""Rows of a softmax that are compared with float64, spread evenly."""
CHECKED_ROWS = 64
"""Rows of a large product that are compared with float64."""
TOLERANCES = {"f32": (1e-5, 1e-7), "f16": (2.0**-10, 2.0**-24), "bf16": (2.0**-7, 1e-30)}
"""dtype -> relative and absolute error that a rounded result of f32 arithmetic may have: one unit in the last place
of the 16-bit types; in f32 what the special-function unit gives e^x for x down to −80."""


@dataclass(frozen=True)
class Item:
    """One implementation in a group; what :func:`flashlane.bench.measure.timing.measure` times."""

    tag: str
    call: Callable[[], object]
    verify: Callable[[], str | None]
    """None, or what is wrong with the result."""
    flops: float | None = None
    """Operations of one call, where they differ from the group's."""

    def context(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


@dataclass(frozen=True)
class Group:
    """What is compared: one operation on one input."""

    block: str
    """The lesson; files of results call it so."""
    name: str
    items: tuple[Item, ...]
    flops: float = 0.0
    """Operations of one call; 0 where memory is the ceiling."""
    bytes: float = 0.0
    """Input read once and output written once."""


@dataclass
class Row:
    """One line of the table."""

    block: str
    group: str
    tag: str
    ok: bool
    message: str = ""
    milliseconds: float | None = None
    spread: float | None = None
    tflops: float | None = None
    gigabytes_per_second: float | None = None
    versus_torch: float | None = None
    """Times as fast as torch in the same group."""
    of_ceiling: float | None = None
    """Share of the best ceiling row in the same group."""
    samples: tuple[float, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def softmax_groups(device: torch.device) -> Iterator[Group]:
    """Softmax: every variant on short, long and odd rows."""
    for dtype in ("f32", "f16"):
        for rows, columns in SOFTMAX_SHAPES:
            x = 4 * torch.randn(rows, columns, device=device, dtype=DTYPES[dtype])
            out = torch.empty_like(x)
            sample = slice(0, rows, max(1, rows // SAMPLED_ROWS))
            expected = torch.softmax(x[sample].double(), -1)
            calls = {TORCH: partial(torch.softmax, x, -1, out=out)}
            calls |= {
                tag: partial(row_softmax.softmax, x, variant=tag, out=out)
                for tag, variant in row_softmax.VARIANTS.items()
                if not variant.registers or columns <= row_softmax.longest_row(dtype)
            }
            items = tuple(Item(tag, call, partial(verify, call, out, sample, expected)) for tag, call in calls.items())
            yield Group("softmax", f"{rows}x{columns} {dtype}", items, bytes=2 * x.numel() * x.element_size())


def activation_groups(device: torch.device) -> Iterator[Group]:
    """Activations: scalar and packed access, on a long input and on an odd one."""
    functions = {
        "elu": (activation.elu, torch.ops.aten.elu),
        "hard_shrink": (activation.hard_shrink, torch.ops.aten.hardshrink),
        "hard_swish": (activation.hard_swish, torch.ops.aten.hardswish),
    }
    for dtype in DTYPES:
        for size in ACTIVATION_SIZES:
            x = 4 * torch.randn(size, device=device, dtype=DTYPES[dtype])
            out = torch.empty_like(x)
            for name, (ours, theirs) in functions.items():
                expected = theirs(x.double())
                calls = {TORCH: partial(theirs.out, x, out=out)}
                calls |= {access: partial(ours, x, access=access, out=out) for access in activation.ACCESSES}
                items = tuple(
                    Item(tag, call, partial(verify, call, out, slice(None), expected)) for tag, call in calls.items()
                )
                yield Group("activation", f"{name} {size} {dtype}", items, bytes=2 * x.numel() * x.element_size())


def hgemm_groups(device: torch.device, size: int = 8192) -> Iterator[Group]:
    """HGEMM: every configuration, cuBLAS, and the ceiling of mma.sync, on a cube."""
    arch = device_arch(device)
    flops = 2.0 * size**3
    for dtype, accumulate in gemm.OPERANDS:
        for layout in gemm.LAYOUTS:
            a, b, out = (torch.randn(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(3))
            if accumulate == "f16":
                a, b = a / 8, b / 8  # sums of K products stay far within f16
            right = b if layout == "nn" else b.t()
            rows = torch.randperm(size, device=device)[:CHECKED_ROWS]
            expected = a[rows].double() @ right.double()
            allowed = product_error(a[rows], right, accumulate)
            calls = {TORCH: partial(torch.mm, a, right, out=out)}
            for name, config in gemm.CONFIGS.items():
                if gemm.fits(config, accumulate, arch):
                    calls[name] = partial(
                        gemm.hgemm, a, b, layout=layout, accumulate=accumulate, config=config, out=out
                    )
            items = [
                Item(tag, call, partial(verify, call, out, rows, expected, allowed)) for tag, call in calls.items()
            ]
            items += ceiling_items(dtype, accumulate, flops, device)
            yield Group("hgemm", f"{size} {dtype} acc-{accumulate} {layout}", tuple(items), flops=flops)


def ceiling_items(dtype: str, accumulate: str, flops: float, device: torch.device) -> list[Item]:
    """The register-only loops with about as many operations as the group's product."""
    items = []
    for warps in ceiling.CONFIGS:
        call, done = ceiling.ceiling_call(dtype, accumulate, warps, flops, device)
        items.append(Item(f"{CEILING} {warps} warps", call, partial(verify_ceiling, call), done))
    return items


def verify_ceiling(call: Callable[[], torch.Tensor]) -> str | None:
    """Whether the threads' sums are those of different random products."""
    sums = call()
    fine = bool(sums.isfinite().all()) and sums.unique().numel() > sums.numel() // 4
    return None if fine else "the sums are not those of different random products"


def verify(
    call: Callable[[], object],
    out: torch.Tensor,
    rows: slice | torch.Tensor,
    expected: torch.Tensor,
    allowed: float | None = None,
) -> str | None:
    """What is wrong with some rows of what a call writes into ``out``, which holds NaN before; None when nothing is."""
    out.fill_(float("nan"))
    call()
    found = out[rows]
    return wrong(found, expected) if allowed is None else beyond(found, expected, allowed)


LESSONS: dict[str, Callable[[torch.device], Iterator[Group]]] = {
    "hgemm": hgemm_groups,
    "softmax": softmax_groups,
    "activation": activation_groups,
}


def wrong(out: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Whether ``out`` differs from a float64 result by more than rounding; None when it does not."""
    relative, absolute = TOLERANCES[dtype_name(out.dtype)]
    error = (out.double() - expected).abs() - relative * expected.abs() - absolute
    bad = ~(error <= 0) & ~(out.isnan() & expected.isnan()) & ~(out == expected)
    return None if not bad.any() else f"{int(bad.sum())} of {bad.numel()} elements differ, first {first_bad(bad)}"


def beyond(out: torch.Tensor, expected: torch.Tensor, allowed: float) -> str | None:
    """Whether the largest error is above what is allowed; NaN is."""
    error = (out.double() - expected).abs()
    bad = ~(error <= allowed)
    if not bad.any():
        return None
    most = float(error.max())
    share = f"{int(bad.sum())} of {bad.numel()} elements"
    return f"{share} are off, by up to {most:.3g} (allowed {allowed:.3g}), first {first_bad(bad)}"


def first_bad(bad: torch.Tensor) -> tuple[int, ...]:
    """Index of the first wrong element."""
    return tuple(int(i) for i in bad.nonzero()[0])


def product_error(a: torch.Tensor, b: torch.Tensor, accumulate: str) -> float:
    """What a correct product that rounds where the kernel does is off by at most, times 2 (f32) or 4 (f16 sums).

    f16 sums are rounded here after every 16 products; the hardware may round more often within them.
    """
    expected = a.double() @ b.double()
    if accumulate == "f32":
        rounded = (a.float() @ b.float()).to(a.dtype) if a.device.type == "cpu" else a @ b
    else:
        rounded = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16, device=a.device)
        for k in range(0, a.shape[1], 16):
            step = a[:, k : k + 16].float() @ b[k : k + 16].float()
            rounded = (rounded.float() + step).half()
    return (2 if accumulate == "f32" else 4) * float((rounded.double() - expected).abs().max()) + 1e-6


def run_group(group: Group, settings: Settings, device: torch.device) -> list[Row]:
    """Check every item of a group, time those that are right, one row each."""
    rows = {item.tag: Row(group.block, group.name, item.tag, ok=True) for item in group.items}
    for item in group.items:
        try:
            message = item.verify()
        except Exception as error:  # a variant that raises is a row, and the others go on
            message = f"{type(error).__name__}: {error}"
        if message is not None:
            rows[item.tag].ok, rows[item.tag].message = False, message
    timed = [item for item in group.items if rows[item.tag].ok]
    try:
        timings = measure(timed, clock_for(device, settings), settings)
    except Exception as error:  # the device is unusable; the results of the checks are still returned
        timings = [error] * len(timed)
    for item, timing in zip(timed, timings):
        _fill(rows[item.tag], timing, item.flops or group.flops, group.bytes)
    _compare(list(rows.values()))
    return list(rows.values())


def _fill(row: Row, timing: Timing | Exception, flops: float, size: float) -> None:
    if isinstance(timing, Exception):
        row.ok, row.message = False, f"{type(timing).__name__}: {timing}"
        return
    row.milliseconds, row.spread, row.samples = timing.median, timing.spread, timing.samples
    row.tflops = flops / timing.median / 1e9 if flops else None
    row.gigabytes_per_second = size / timing.median / 1e6 if size else None


def _compare(rows: list[Row]) -> None:
    """Set each row against torch and against the best ceiling row."""
    timed = [row for row in rows if row.milliseconds]
    torch_rows = [row for row in timed if row.tag == TORCH]
    ceilings = [row.tflops for row in timed if row.tag.startswith(CEILING)]
    for row in timed:
        if torch_rows and not row.tag.startswith(CEILING):
            row.versus_torch = torch_rows[0].milliseconds / row.milliseconds
        if ceilings:
            row.of_ceiling = row.tflops / max(ceilings)


def table(rows: list[Row]) -> str:
    """The rows as text: groups in order, fastest first, failures last."""
    head = f"{'lesson':<11}{'group':<30}{'variant':<26}"
    head += f"{'ms':>9}{'±%':>6}{'TFLOP/s':>9}{'GB/s':>7}{'×torch':>8}{'of ceiling':>11}"
    lines = [head, "-" * len(head)]
    for name in dict.fromkeys((row.block, row.group) for row in rows):
        members = [row for row in rows if (row.block, row.group) == name]
        members.sort(key=lambda row: row.milliseconds or float("inf"))
        lines += [_line(row) for row in members] + [""]
    failed = [row for row in rows if not row.ok]
    lines += [f"FAILED {row.block} {row.group} {row.tag}: {row.message}" for row in failed]
    return "\n".join([*lines, f"{len(rows)} rows, {len(failed)} failed"])


def _line(row: Row) -> str:
    start = f"{row.block:<11}{row.group:<30}{row.tag:<26}"
    if row.milliseconds is None:
        return f"{start}  {row.message[:70]}"
    cells = (
        f"{row.milliseconds:9.4f}",
        f"{50 * row.spread:6.1f}",
        f"{row.tflops:9.1f}" if row.tflops else " " * 9,
        f"{row.gigabytes_per_second:7.0f}" if row.gigabytes_per_second else " " * 7,
        f"{row.versus_torch:8.3f}" if row.versus_torch else " " * 8,
        f"{row.of_ceiling:11.3f}" if row.of_ceiling else " " * 11,
    )
    return start + "".join(cells)


def best_by_group(rows: list[Row]) -> dict[str, str]:
    """Group -> the variant of ours that was fastest in it."""
    best: dict[str, Row] = {}
    for row in rows:
        ours = row.milliseconds and row.tag != TORCH and not row.tag.startswith(CEILING)
        key = f"{row.block} {row.group}"
        if ours and (key not in best or row.milliseconds < best[key].milliseconds):
            best[key] = row
    return {key: row.tag for key, row in best.items()}


def noise(rows: list[Row]) -> float:
    """The median spread of the timed rows: differences below it mean nothing."""
    return statistics.median([row.spread for row in rows if row.spread is not None] or [0.0])
