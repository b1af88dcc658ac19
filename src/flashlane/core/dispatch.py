"""From a problem to the kernel that runs it, and the reasons why each other one would not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashlane.core import registry
from flashlane.core import tuned as tune
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import BackwardKernel, Kernel


@dataclass(frozen=True)
class Choice:
    """One kernel's standing for a problem: ``reason`` says why it cannot run it, or is None."""

    tag: str
    reason: str | None
    preference: float
    summary: str


@dataclass(frozen=True)
class BackwardChoice:
    """One backward kernel's standing for a problem: ``reason`` says why it cannot run it, or is None."""

    tag: str
    reason: str | None
    summary: str
    config: str = ""
    """The configuration that it would run with, in a few words."""


@dataclass(frozen=True)
class Explanation:
    """What would run, and why each other kernel would not. ``print`` it, or read ``chosen`` and ``choices``."""

    problem: AttentionProblem
    chosen: str
    choices: tuple[Choice, ...]
    """The listed kernels, or all, and always the chosen one."""
    tuned: bool = False
    """Whether the chosen one is what ``flashlane tune`` found fastest on this GPU."""
    unlisted: int = 0
    """How many further kernels of the table are not among the choices."""
    backward: str | None = None
    """The tag of the backward kernel that would follow, or None where no gradient is asked for."""
    backwards: tuple[BackwardChoice, ...] = ()
    """Every backward kernel, when a gradient is asked for."""

    def __str__(self) -> str:
        width = max(len(choice.tag) for choice in self.choices)
        lines = [f"{self.problem.describe()} on {self.problem.arch or 'cpu'}: {self.chosen}"]
        for choice in self.choices:
            if choice.tag == self.chosen:
                why = "runs" + (" (the fastest that flashlane tune timed on this GPU)" if self.tuned else "")
            else:
                why = choice.reason or f"could run; preferred less ({choice.preference:g})"
            lines.append(f"  {choice.tag:<{width}}  {why}")
        for after in self.backwards:
            why = "runs" if after.tag == self.backward else after.reason or "could run; preferred less"
            lines.append(f"  backward {after.tag}: {why}" + (f" ({after.config})" if after.config else ""))
        if self.unlisted:
            lines.append(f"  {self.unlisted} further variants run only when named: flashlane explain --show-all")
        return "\n".join(lines)


@registry.memoised
def select(problem: AttentionProblem, kernel: str | None = None) -> Kernel:
    """The kernel that runs a problem: the one named; with None the listed one that was tuned or is preferred most.

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
    tuned = tune.best_tag(problem)
    if tuned is not None:
        for known in registry.kernels(listed_only=True):
            if known.tag == tuned and known.supports(problem) is None:
                return known
    best = registry.preferred(lambda k: k.listed and k.supports(problem) is None, lambda k: k.preference(problem))
    if best is None:
        listed = registry.kernels(listed_only=True)
        reasons = "; ".join(f"{k.tag}: {k.supports(problem)}" for k in listed if k.priority >= 0)
        raise NotImplementedError(f"no kernel can run {problem.describe()}: {reasons}")
    return best


def explain_problem(problem: AttentionProblem, kernel: str | None = None, show_all: bool = False) -> Explanation:
    """Which kernel would run a problem and why each other one would not; of the listed kernels, or of all."""
    chosen = select(problem, kernel)
    known = registry.kernels()
    shown = [k for k in known if show_all or k.listed or k is chosen]
    choices = tuple(Choice(k.tag, k.supports(problem), k.preference(problem), k.summary) for k in shown)
    tuned = kernel is None and chosen.tag == tune.best_tag(problem)
    said = Explanation(problem, chosen.tag, choices, tuned, len(known) - len(shown))
    if not problem.needs_grad:
        return said
    follows = select_backward(problem, chosen).tag
    return replace(said, backward=follows, backwards=backward_choices(problem, chosen))


@registry.memoised
def select_backward(problem: AttentionProblem, forward: Kernel) -> BackwardKernel:
    """The backward kernel that follows ``forward``: of those that support the problem, the highest priority.

    Raises:
        NotImplementedError: none supports it; says why each does not.
    """
    best = registry.preferred_backward(lambda k: k.supports(problem, forward) is None)
    if best is None:
        reasons = "; ".join(f"{choice.tag}: {choice.reason}" for choice in backward_choices(problem, forward))
        raise NotImplementedError(f"no backward can run {problem.describe()}: {reasons}")
    return best


def backward_choices(problem: AttentionProblem, forward: Kernel) -> tuple[BackwardChoice, ...]:
    """Every backward kernel, and why each that cannot follow ``forward`` on this problem cannot."""

    def choice(kernel: BackwardKernel) -> BackwardChoice:
        reason = kernel.supports(problem, forward)
        return BackwardChoice(kernel.tag, reason, kernel.summary, "" if reason else kernel.describe(problem))

    return tuple(map(choice, registry.backward_kernels()))
