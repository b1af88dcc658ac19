"""From a problem to the kernel that runs it, and the reasons why each other one would not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flashlane.core import registry, tuned
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import BackwardKernel, Kernel
from flashlane.lazy import loader

if TYPE_CHECKING:
    from flashlane.core.explanation import BackwardChoice, Explanation

__getattr__ = loader(__name__, dict.fromkeys(("BackwardChoice", "Explanation"), "flashlane.core.explanation"))
"""For readers of annotations: a call imports neither."""


LONGEST_EXPLAINED = 2**24
"""The most rows, and with a gradient keys, of a problem that is explained. Models of a time go through all tiles, for
each configuration of each kernel: beyond, for minutes."""


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
    fastest = tuned.best_tag(problem)
    if fastest is not None:
        for known in registry.kernels(listed_only=True):
            if known.tag == fastest and known.supports(problem) is None:
                return known
    best = registry.preferred(
        problem, lambda k: k.listed and k.supports(problem) is None, lambda k: k.preference(problem)
    )
    if best is None:
        listed = registry.kernels(listed_only=True)
        reasons = "; ".join(f"{k.tag}: {k.supports(problem)}" for k in listed if k.priority >= 0)
        raise NotImplementedError(f"no kernel can run {problem.describe()}: {reasons}")
    return best


def check_explained(problem: AttentionProblem, backward: bool) -> None:
    """Raise ValueError for a problem longer than :data:`LONGEST_EXPLAINED`; a backward goes through tiles of keys."""
    for name, length in (("seqlen_q", problem.seqlen_q), ("seqlen_k", problem.seqlen_k if backward else 0)):
        if length > LONGEST_EXPLAINED:
            raise ValueError(f"{name} is {length}; what is explained may have up to {LONGEST_EXPLAINED}")


def explain_problem(problem: AttentionProblem, kernel: str | None = None, show_all: bool = False) -> Explanation:
    """Which kernel would run a problem and why each other one would not; of the listed kernels, or of all.

    Raises:
        ValueError: no kernel is called ``kernel``, or the problem is longer than :data:`LONGEST_EXPLAINED`.
        NotImplementedError: see :func:`select`.
    """
    from flashlane.core.explanation import Choice, Explanation

    check_explained(problem, problem.needs_grad)
    if kernel is not None:
        registry.get(kernel)  # what is no tag may be no key of :func:`select` either
    chosen = select(problem, kernel)
    kernels = registry.kernels()
    listed = [k for k in kernels if show_all or k.listed or k is chosen]
    choices = tuple(Choice(k.tag, k.supports(problem), k.preference(problem), k.summary) for k in listed)
    by_timing = kernel is None and chosen.tag == tuned.best_tag(problem)
    explanation = Explanation(
        problem,
        chosen.tag,
        choices,
        by_timing,
        len(kernels) - len(listed),
        named=kernel is not None,
        instead_of=_unnamed(problem) if kernel is not None else None,
        predicted=predicted_times(problem, [choice.tag for choice in choices if choice.reason is None]),
        configurations=() if by_timing else predicted_configurations(problem, chosen),
    )
    if not problem.needs_grad:
        return explanation
    follows = select_backward(problem, chosen).tag
    return replace(explanation, backward=follows, backwards=backward_choices(problem, chosen))


def _unnamed(problem: AttentionProblem) -> str | None:
    """What runs when no kernel is named."""
    try:
        return select(problem).tag
    except NotImplementedError:
        return None


def predicted_times(problem: AttentionProblem, tags: Sequence[str]) -> dict[str, float]:
    """Milliseconds that a model predicts for kernels on a problem, by their tags; ``explain`` compares them."""
    times = {tag: registry.get(tag).predicted_ms(problem) for tag in tags}
    return {tag: float(ms) for tag, ms in times.items() if ms is not None}


def predicted_configurations(problem: AttentionProblem, kernel: Kernel) -> tuple[tuple[str, float], ...]:
    """Configurations of a kernel and the milliseconds that its cost model predicts, the fastest first."""
    return tuple(kernel.predicted_configs(problem)) if kernel.supports(problem) is None else ()


@registry.memoised
def select_backward(problem: AttentionProblem, forward: Kernel) -> BackwardKernel:
    """The backward kernel that follows ``forward``: of those that support the problem, the highest priority.

    Raises:
        NotImplementedError: none supports it; says why each does not.
    """
    best = registry.preferred_backward(problem, lambda k: k.supports(problem, forward) is None)
    if best is None:
        reasons = "; ".join(f"{choice.tag}: {choice.reason}" for choice in backward_choices(problem, forward))
        raise NotImplementedError(f"no backward can run {problem.describe()}: {reasons}")
    return best


def backward_choices(problem: AttentionProblem, forward: Kernel) -> tuple[BackwardChoice, ...]:
    """Every backward kernel, and why each that cannot follow ``forward`` on this problem cannot."""
    from flashlane.core.explanation import BackwardChoice

    def choice(kernel: BackwardKernel) -> BackwardChoice:
        reason = kernel.supports(problem, forward)
        return BackwardChoice(kernel.tag, reason, kernel.summary, "" if reason else kernel.describe(problem))

    return tuple(map(choice, registry.backward_kernels()))
