"""Backward kernels for tests of the table: one that does what another does, but for its function or its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import BackwardKernel, Kernel


class StandIn(BackwardKernel):
    """A backward kernel with the tag and the reasons of another one, or its own, and its own function."""

    summary = source = "a stand-in"

    def __init__(
        self,
        like: BackwardKernel | str,
        run: Callable[..., Any] = lambda *arguments, **keywords: None,
        reason: Callable[[AttentionProblem, Kernel | None], str | None] | None = None,
        priority: int = 0,
    ) -> None:
        self.tag = like if isinstance(like, str) else like.tag
        self.priority = priority if isinstance(like, str) else like.priority
        self.reason = reason or (like.supports if isinstance(like, BackwardKernel) else lambda problem, forward: None)
        self.function = run

    def supports(self, problem: AttentionProblem, forward: Kernel | None = None) -> str | None:
        return self.reason(problem, forward)

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)
