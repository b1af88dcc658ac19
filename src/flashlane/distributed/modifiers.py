"""Score modifiers of a call over several ranks.

A kernel applies them within one block. This module has their effects beyond a block: some depend on the distance of
query and key, and therefore on where a block lies; some apply once to all keys of a row.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import NamedTuple

import torch

from flashlane.core.modifiers import with_effect
from flashlane.core.problem import Gradients

Select = Callable[[torch.Tensor], torch.Tensor]
(_DISTANCE,), (_LOGIT,), (_FACTOR,) = with_effect("distance"), with_effect("logit"), with_effect("factor")
"""Each effect has one modifier. A second one would fail here, because this module would have to handle both."""
_OF_HEADS = with_effect("distance", "logit", "factor")
_Fields = namedtuple("_Fields", _OF_HEADS, defaults=[None] * len(_OF_HEADS))


class Flow(NamedTuple):
    """The inputs of a backward: output, LSE and their gradients."""

    out: torch.Tensor
    lse: torch.Tensor
    do: torch.Tensor
    dlse: torch.Tensor | None

    def heads(self, heads: slice) -> Flow:
        """The same for a slice of the query heads."""
        dlse = None if self.dlse is None else self.dlse[:, heads]
        return Flow(self.out[:, :, heads], self.lse[:, heads], self.do[:, :, heads], dlse)


class Modifiers(_Fields):
    """The tensors of a call that have values for each head, or None, in the order of
    :class:`flashlane.core.problem.Inputs`."""

    __slots__ = ()

    @property
    def _slopes(self) -> torch.Tensor | None:
        return getattr(self, _DISTANCE)

    @property
    def _logits(self) -> torch.Tensor | None:
        return getattr(self, _LOGIT)

    @property
    def positional(self) -> bool:
        """Whether a score depends on the distance of its query and key."""
        return self._slopes is not None

    @property
    def factor(self) -> torch.Tensor | None:
        """The modifier that multiplies scores, whose gradient the kernels of the blocks sum."""
        return getattr(self, _FACTOR)

    def heads(self, heads: slice) -> Modifiers:
        """The modifiers of a slice of the query heads."""
        return Modifiers(*(None if t is None else t[..., heads] for t in self))

    def of_some_keys(self) -> Modifiers:
        """The modifiers for a part of a row's keys: without the extra logit, which :meth:`finish` adds once."""
        return self._replace(**{_LOGIT: None})

    def of_block(self, step: int, select: Select) -> Modifiers:
        """The modifiers that a kernel gets for a block.

        Args:
            step: the distance in positions between neighbouring rows of the block.
            select: maps a tensor ``(documents, h)`` to one with a row for each sequence of the kernel's call.
        """
        slopes = self._slopes
        if slopes is None:
            return self
        slopes = slopes if step == 1 else slopes * step
        return self._replace(**{_DISTANCE: select(slopes) if slopes.dim() == 2 else slopes})

    def moved(self, lse: torch.Tensor, offset: int, per_row: Select) -> torch.Tensor:
        """The LSE of a block whose keys are nearer by ``offset`` than the kernel counted.

        Args:
            lse: ``(b, h, rows)``.
            offset: a number of positions.
            per_row: gives slopes a shape that broadcasts to the LSE.
        """
        if not offset or self._slopes is None:
            return lse
        return lse + per_row(self._slopes).to(lse.dtype) * offset

    def finish(self, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The LSE of rows with their extra logit, from the LSE of their scores, both ``(b, h, rows)``; and the part of
        the probability that the keys have, or None without an extra logit, where they have all of it."""
        if self._logits is None:
            return lse, None
        whole = torch.logaddexp(lse, self._logits.to(lse.dtype)[:, None])
        return whole, torch.exp(lse - whole.masked_fill(whole == -torch.inf, 0.0))

    def fill_without_keys(self, lse: torch.Tensor) -> None:
        """Write the LSE of rows that see no key, ``(b, h, rows)``."""
        if self._logits is None:
            lse.fill_(-torch.inf)
        else:
            lse.copy_(self._logits[:, None])

    @staticmethod
    def factor_gradient(gradients: Gradients) -> torch.Tensor | None:
        """The gradient of :attr:`factor` among those that a kernel computed."""
        return getattr(gradients, _FACTOR)

    def gradients(self, flow: Flow, d_factor: torch.Tensor | None) -> Modifiers:
        """The gradients from this rank's rows.

        Args:
            flow: the inputs of the backward.
            d_factor: the gradient of :attr:`factor`, summed over the blocks.
        """
        of_logits = None if self._logits is None else _logit_gradient(self._logits, flow)
        return Modifiers(**{_LOGIT: of_logits, _FACTOR: d_factor})


def _logit_gradient(logits: torch.Tensor, flow: Flow) -> torch.Tensor:
    lse = flow.lse
    delta = (flow.out.to(lse.dtype) * flow.do.to(lse.dtype)).sum(-1).transpose(1, 2)
    if flow.dlse is not None:
        delta = delta - flow.dlse
    top = lse.masked_fill(lse == -torch.inf, 0.0)
    share = torch.exp(logits.to(lse.dtype)[:, None] - top)
    return -(share * delta).sum((0, 2)).to(logits.dtype)
