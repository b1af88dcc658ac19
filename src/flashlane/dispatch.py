"""From a problem to the kernel that runs it, and the reasons why each other one would not."""

from __future__ import annotations

from dataclasses import dataclass

from flashlane import registry
from flashlane.problem import AttentionProblem
from flashlane.registry import Kernel


@dataclass(frozen=True)
class Choice:
    """One kernel's standing for a problem: ``reason`` says why it cannot run it, or is None."""

    tag: str
    reason: str | None
    preference: float
    summary: str


@dataclass(frozen=True)
class Explanation:
    """What would run, and why each other kernel would not. ``print`` it, or read ``chosen`` and ``choices``."""

    problem: AttentionProblem
    chosen: str
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        width = max(len(choice.tag) for choice in self.choices)
        lines = [f"{self.problem.describe()} on {self.problem.arch or 'cpu'}: {self.chosen}"]
        for choice in self.choices:
            if choice.tag == self.chosen:
                why = "runs"
            else:
                why = choice.reason or f"could run; preferred less ({choice.preference:g})"
            lines.append(f"  {choice.tag:<{width}}  {why}")
        return "\n".join(lines)


def select(problem: AttentionProblem, kernel: str | None = None) -> Kernel:
    """The kernel that runs a problem: the one named, or with None the supporting one that is preferred most.

    Raises:
        ValueError: no kernel is called that.
        NotImplementedError: the named kernel cannot run the problem (it never silently runs another), or none can.
    """
    if kernel is not None:
        named = registry.get(kernel)
        reason = named.supports(problem)
        if reason is not None:
            raise NotImplementedError(f"kernel {kernel!r} cannot run {problem.describe()}: {reason}")
        return named
    able = [k for k in registry.kernels() if k.supports(problem) is None]
    if not able:
        reasons = "; ".join(f"{k.tag}: {k.supports(problem)}" for k in registry.kernels() if k.priority >= 0)
        raise NotImplementedError(f"no kernel can run {problem.describe()}: {reasons}")
    return max(able, key=lambda k: k.preference(problem))


def explain_problem(problem: AttentionProblem, kernel: str | None = None) -> Explanation:
    """Which kernel would run a problem and why each other one would not."""
    choices = tuple(Choice(k.tag, k.supports(problem), k.preference(problem), k.summary) for k in registry.kernels())
    return Explanation(problem, select(problem, kernel).tag, choices)
