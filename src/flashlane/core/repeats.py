"""What a kernel's ``prepare`` gives: a function that launches a call again with other tensors of the same layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from flashlane.core.problem import Gradients, Inputs


class Repeat(Protocol):
    """See :meth:`flashlane.core.registry.Kernel.prepare`."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        addresses: tuple[int, int, int],
        inputs: Inputs | None = None,
    ) -> None: ...


class RepeatBackward(Protocol):
    """See :meth:`flashlane.core.registry.BackwardKernel.prepare`."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
        dq: torch.Tensor | None = None,
        inputs: Inputs | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | Gradients | None: ...
