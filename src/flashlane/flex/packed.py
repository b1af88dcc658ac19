"""Masks of packed documents: kernels take the documents' offsets, as ``cu_seqlens``, in the place of lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlane.flex.notes import Notes


@dataclass(frozen=True, eq=False)
class Documents:
    """Packed documents, of which each token sees its own, or what of it is before."""

    offsets: torch.Tensor
    """int32 ``(documents + 1,)``, of nobody else: the documents' first tokens and the length."""
    longest: int
    """Tokens of the longest document."""
    tokens: int
    causal: bool

    @classmethod
    def of(cls, offsets: torch.Tensor, causal: bool) -> Documents:
        """The documents of ``cu_seqlens``. It waits for the device once.

        Raises:
            ValueError: the first offset is not 0, or they descend.
        """
        lengths = offsets.diff()
        facts = torch.stack((offsets[0], offsets[-1], lengths.amin(), lengths.amax())).tolist()
        first, tokens, shortest, longest = facts
        if first or shortest < 0:
            raise ValueError(
                f"offsets begin with {first}, and the shortest document has {shortest} tokens; they must begin with 0 "
                f"and ascend"
            )
        return cls(offsets.to(torch.int32, copy=True), longest, tokens, causal)


NOTES: Notes[Documents] = Notes()
"""Of the masks that are documents."""
