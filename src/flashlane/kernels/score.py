"""What is done to scores between Q·Kᵀ and the softmax: the Python side of ``cuda/attention/score.cuh``.

Kernels hold a :class:`ScoreConfig` and never name a modifier themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashlane.core.problem import AttentionProblem


@dataclass(frozen=True)
class ScoreConfig:
    """Which modifiers of the scores a kernel is compiled with."""

    softcap: bool = False
    """Scores are capped: ``softcap · tanh(score / softcap)``."""
    alibi: bool = False
    """A bias of −slope · distance is added to each score."""
    sinks: bool = False
    """Each row has one more logit, which takes probability and gives no value."""

    @classmethod
    def of(cls, problem: AttentionProblem) -> ScoreConfig:
        """What a problem needs, and no more."""
        return cls(softcap=problem.softcap > 0, alibi=problem.alibi, sinks=problem.sinks)

    @property
    def transformed(self) -> bool:
        """Whether scores change before the row maximum is taken, so that the scale cannot wait for the exponent."""
        return self.softcap or self.alibi

    @property
    def registers_per_score(self) -> int:
        """How many modifiers keep values beside the scores in registers."""
        return self.softcap + self.alibi

    def constants(self) -> tuple[tuple[str, bool], ...]:
        """Name and value of each compile-time constant."""
        return tuple((field.name.upper(), getattr(self, field.name)) for field in fields(self))

    def words(self) -> list[str]:
        """The modifiers that are on, for tables."""
        return [field.name for field in fields(self) if getattr(self, field.name)]
