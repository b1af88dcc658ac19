"""Masks of packed documents: kernels take the documents' offsets, as ``cu_seqlens``, in the place of lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from flashlane.flex import windows
from flashlane.flex.expression import Expression
from flashlane.flex.notes import Notes

if TYPE_CHECKING:
    from flashlane.flex.program import Arguments


MOST_WITH_GRADIENTS = 65535
"""Documents that a backward takes in the place of lists: so many sequences has a launch."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Packed documents: a token sees its own document, with ``causal`` up to itself."""

    offsets: torch.Tensor
    """int32 ``(documents + 1,)``, a copy that nothing else writes: the documents' first tokens and the length."""
    longest: int
    """Tokens of the longest document."""
    tokens: int
    causal: bool
    source: tuple[torch.Tensor, int] | None = None
    """The tensor with each token's document that a mask function reads, and its version; None for a named mask."""

    def hold_for(self, read: Sequence[torch.Tensor]) -> bool:
        """Whether a mask function that reads these tensors still has these documents: its source is unchanged."""
        if self.source is None:
            return True
        tensor, version = self.source
        return tensor._version == version and any(t is tensor for t in read)

    def __reduce__(self) -> Any:
        if self.source is None:
            return _copied, (self.offsets, self.longest, self.tokens, self.causal, None)
        tensor, version = self.source
        if tensor._version != version:
            return type(None), ()  # the tensor has been written: the mask is no longer these documents
        return _copied, (self.offsets, self.longest, self.tokens, self.causal, tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Documents | None:
        """A function that closes over the tensor is not copied, and a copied mask reads the same tensor as before."""
        if self.source is None or id(self.source[0]) not in memo:
            return self
        make, arguments = self.__reduce__()
        return make(*(memo.get(id(each), each) for each in arguments))

    @classmethod
    def of(cls, offsets: torch.Tensor, causal: bool) -> Documents:
        """The documents of ``cu_seqlens``. The call waits for the device once.

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


def _copied(
    offsets: torch.Tensor, longest: int, tokens: int, causal: bool, read: torch.Tensor | None
) -> Documents | None:
    """The documents of a pickled mask, whose function reads ``read``; None where its changes could not be seen."""
    if read is None:
        return Documents(offsets, longest, tokens, causal)
    return None if read.is_inference() else Documents(offsets, longest, tokens, causal, (read, read._version))


def of_mask(mask: Expression | None, arguments: Arguments, lengths: tuple[int, int]) -> Documents | None:
    """The documents of a mask ``ids[q] == ids[kv]``, or that and ``q >= kv``; None for any other.

    The call waits for the device where the mask has that form. The tokens of a document must follow each other;
    otherwise, and while a CUDA graph is captured, the result is None.

    Args:
        mask: the expression.
        arguments: the tensors and integers that it reads.
        lengths: the numbers of queries and of keys.
    """
    read, causal = [], False
    for part in _conjunction(mask):
        vector = _compared(part)
        if vector is not None:
            read.append(vector)
        elif windows.of_expression(part, arguments.integers) == (-1, 0):
            causal = True
        else:
            return None
    if len(read) != 1:
        return None
    ids = arguments.tensors[read[0]]
    if tuple(ids.shape) != lengths[:1] or lengths[0] != lengths[1] or not lengths[0] or ids.is_inference():
        return None
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    tokens = len(ids)
    starts = pad((ids[1:] != ids[:-1]).nonzero().flatten() + 1, (1, 0))
    first_tokens, ids_there = torch.stack((starts, ids[starts].long())).cpu()  # one copy, and the rest is on the host
    if len(ids_there.unique()) != len(ids_there):
        return None
    longest = int(pad(first_tokens, (0, 1), value=tokens).diff().amax())
    offsets = pad(starts.to(torch.int32), (0, 1), value=tokens)
    return Documents(offsets, longest, tokens, causal, source=(ids, ids._version))


def _conjunction(e: Expression | None) -> Iterator[Expression]:
    if e is None:
        return
    if e.op != "and":
        yield e
        return
    for operand in e.operands:
        yield from _conjunction(operand)


def _compared(e: Expression) -> int | None:
    """The number of a captured integer vector whose elements at q and at kv must be equal; None for other masks."""
    if e.op != "eq" or any(load.op != "load" or len(load.operands) != 1 for load in e.operands):
        return None
    positions = {load.operands[0].value for load in e.operands if load.operands[0].op == "input"}
    vectors = {load.value for load in e.operands if load.dtype in ("i32", "i64")}
    return vectors.pop() if positions == {"q", "kv"} and len(vectors) == 1 else None  # type: ignore[return-value]


NOTES: Notes[Documents] = Notes("documents")
"""The documents of block masks that are nothing else."""
