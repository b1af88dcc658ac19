"""A kernel's share of an SM: registers, spills, each region of shared memory, occupancy and what limits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from flashlane import jit
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import BackwardKernel, CompiledKernel, DeviceSource, Kernel
from flashlane.inspect.compile_report import Usage, usages_of
from flashlane.inspect.fitted_table import NONE, Column, make_table
from flashlane.jit.budget import MAX_REGISTERS

WIDE = 200
KIB = 1024
NOTE = f"""regs: of {MAX_REGISTERS} a thread; spill: bytes of stores and loads
Q, KV (its stages), P, stats, tiles: KiB of shared memory; shared: their sum, of what a CTA may have
CTA/SM: CTAs that an SM holds; regs·shared·threads: CTAs that each of these alone would allow"""


@dataclass(frozen=True)
class Budget:
    """One kernel's configuration for one problem, compiled for one architecture."""

    usage: Usage
    """The compiler's figures and the occupancy; its ``reason`` or ``error`` says why there is no budget."""
    regions: dict[str, int]
    """Bytes of each region of shared memory; they sum to ``usage.shared_bytes``."""
    shared_limit: int
    """Bytes of shared memory that one CTA may have."""
    fits: dict[str, int]
    """CTAs that an SM would hold if only registers, shared memory or threads counted."""

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        usage = asdict(self.usage)
        for name in ("instructions", "seconds", "cached"):
            del usage[name]
        return {**usage, "regions": self.regions, "shared_limit": self.shared_limit, "fits": self.fits}


def regions(config: Any, dynamic: int, static: int = 0) -> dict[str, int]:
    """The shared memory of a configuration, region by region, in the order in which the regions lie.

    Args:
        config: a configuration or one of its device files. Without an attribute ``regions`` it has one, ``tiles``.
        dynamic: bytes of dynamic shared memory, to which the regions sum.
        static: bytes of static shared memory, which is a region of its own.

    Raises:
        ValueError: the regions of a configuration do not sum to ``dynamic``, so its formula is out of date.
    """
    parts = getattr(config, "regions", None) or ({"tiles": dynamic} if dynamic else {})
    if sum(parts.values()) != dynamic:
        raise ValueError(f"{type(config).__name__}: the regions {parts} do not sum to its {dynamic} bytes")
    return {**parts, **({"static": static} if static else {})}


def budget_of(kernel: Kernel | BackwardKernel, problem: AttentionProblem, arch: str) -> list[Budget]:
    """The budgets of a kernel for a problem on an architecture, one for each device file; it needs no GPU.

    The device files are compiled. If the kernel does not support the problem, or does not compile, the budget's usage
    says why.

    Raises:
        ValueError: the kernel has no device file of ours, or the architecture is unknown.
    """
    if not isinstance(kernel, CompiledKernel):
        made = "compiled by Triton" if kernel.tag.startswith("triton") else "made of torch operations"
        raise ValueError(
            f"{kernel.tag} is {made}, not from a device file of ours; budgets are of kernels like mma(split-q+stage1)"
        )
    limit, posed = jit.shared_limit(arch), problem.on(arch)
    reason = kernel.supports(posed)
    if reason is not None:
        return [
            Budget(Usage(kernel.tag, arch, posed.describe(), direction=kernel.direction, reason=reason), {}, limit, {})
        ]
    config = kernel.config(posed)
    usages = usages_of(kernel, config, arch, problem=posed.describe(), instructions=False)
    return [
        Budget(usage, _regions_of(part, usage), limit, {} if usage.error else _fits(usage))
        for part, usage in zip(kernel.device_sources(config, arch), usages, strict=True)
    ]


def _regions_of(part: DeviceSource, usage: Usage) -> dict[str, int]:
    dynamic = part.resources.shared_memory
    return regions(part, dynamic, (usage.shared_bytes or dynamic) - dynamic)


def _fits(usage: Usage) -> dict[str, int]:
    def ctas(registers: int, shared: int) -> int:
        return jit.occupancy(usage.arch, usage.threads, registers, shared).ctas

    return {
        "registers": ctas(usage.registers, 0),
        "shared memory": ctas(0, usage.shared_bytes),
        "threads": ctas(0, 0),
    }


def print_budgets(budgets: Sequence[Budget], console: Console) -> None:
    """A table for each tag and problem with a line for each architecture."""
    groups: dict[tuple[str, str], list[Budget]] = {}
    for budget in budgets:
        groups.setdefault((budget.usage.name, budget.usage.problem), []).append(budget)
    for (tag, problem), group in groups.items():
        console.print(Text.assemble((tag, "bold"), f" · {problem}"))
        made = [budget for budget in group if not budget.usage.reason and not budget.usage.error]
        _print_configurations(made, console)
        if made:
            console.print(budget_table(made, console.width))
        for budget in group:
            usage = budget.usage
            if usage.error:
                console.print(Text(f"{usage.arch}: error: ", "bold red").append(usage.error, "default"))
            elif usage.reason:
                console.print(Text(f"{usage.arch}: not for this problem: ", "yellow").append(usage.reason, "default"))
            for line in usage.warnings:
                console.print(Text(f"{usage.arch}: compiler: ", "yellow").append(line, "default"))
        console.print()
    if any(budget.fits for budget in budgets):
        console.print(NOTE, style="dim")


def _print_configurations(budgets: Iterable[Budget], console: Console) -> None:
    archs: dict[str, list[str]] = {}
    for budget in budgets:
        archs.setdefault(budget.usage.config, []).append(budget.usage.arch)
    for config, names in archs.items():
        where = f"{' '.join(names)}: " if len(archs) > 1 else ""
        console.print(Text(f"{where}{config}", "dim"))


def budget_table(budgets: Sequence[Budget], width: int = WIDE) -> Group:
    """A table with one line for each budget, and a column for every region that any of them has."""
    names = list(dict.fromkeys(name for budget in budgets for name in budget.regions))

    def region(name: str) -> Column:
        return Column(name, lambda b: _kib(b.regions[name]) if name in b.regions else NONE, drop=2)

    columns = [
        Column("regs", lambda b: str(b.usage.registers)),
        Column("spill", lambda b: Text(str(b.usage.spills), "bold red" if b.usage.spills else "")),
        Column("threads", lambda b: str(b.usage.threads), drop=1),
        *map(region, names),
        Column("shared", lambda b: f"{_kib(b.usage.shared_bytes or 0)}/{b.shared_limit // KIB}"),
        Column("CTA/SM", lambda b: Text(str(b.usage.blocks), "bold" if b.usage.blocks else "bold red")),
        Column("occ", lambda b: f"{100 * (b.usage.occupancy or 0):.0f}%"),
        Column("limited by", lambda b: b.usage.limit, justify="left"),
        Column("regs·shared·threads", lambda b: "·".join(map(str, b.fits.values())), drop=3, justify="left"),
    ]
    return make_table(budgets, columns, "", width, head="arch", name=lambda b: b.usage.arch, elsewhere="see --json")


def _kib(size: int) -> str:
    return f"{size / KIB:.4g}"
