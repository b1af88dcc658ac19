"""The reference in the place of the module of the Hopper kernels, for calls of flex_attention on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from flashlane.flex import attention, blocks, packed, reference, repeats, windows
from flashlane.flex.program import Arguments


def install(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Calls on the CPU go where those on a GPU go, and none is known yet."""
    made = Kernels(None)
    monkeypatch.setitem(sys.modules, attention.KERNELS, made)
    monkeypatch.setattr(attention, "OF_THE_REFERENCE", ())
    monkeypatch.setattr(repeats, "_entries", {})
    monkeypatch.setattr(repeats, "_met", {})
    return made


def _problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any) -> reference.Problem:
    return reference.Problem(*(t.transpose(1, 2) for t in (q, k, v)), *call)


def as_lists(
    mask: BlockMask | None,
    window: tuple[int, int],
    documents: packed.Documents | None,
    q: torch.Tensor,
    k: torch.Tensor,
) -> BlockMask | None:
    """The mask; a window or documents, which kernels have as an argument, as full blocks of one pair."""
    if window == windows.OPEN and documents is None:
        return mask
    assert mask is None
    rows, columns = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    if documents is not None:
        assert window == windows.OPEN and documents.longest == documents.offsets.diff().max()
        ids = torch.bucketize(torch.arange(documents.tokens), documents.offsets, right=True)
        shown = (ids[rows] == ids[columns]) & ((rows >= columns) | (not documents.causal))
    else:
        left, right = (side if side >= 0 else 1 << 20 for side in window)
        shown = (rows - columns <= left) & (columns - rows <= right)
    table = torch.where(shown, blocks.FULL, blocks.HIDDEN)[None, None].to(torch.int8)
    return blocks.from_states(table, torch_flex.noop_mask, tuple(table.shape[2:]), (1, 1))


class Kernels:
    """Takes the place of the module of the Hopper kernels: the reference, and a note of what was called. Tensors are
    ``(b, s, h, d)``."""

    def __init__(self, reason: str | None) -> None:
        self.reason, self.called = reason, []
        self.repeats = True
        """Whether it prepares calls."""

    def supports(self, q, k, v, block_mask, arch, program, scale):
        assert block_mask is None or isinstance(block_mask, torch_flex.BlockMask)
        assert arch is None or isinstance(arch, str)
        self.called.append(("supports", (tuple(q.shape), tuple(k.shape), tuple(v.shape))))
        return self.reason

    def prepare_forward(self, q, k, v, program, captured, block_mask, scale, window, documents):
        size, integers = (q.shape, k.shape), captured.integers

        def repeat(q, k, v, tensors, block_mask, documents):
            self.called.append(("forward again", block_mask))
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            assert (q.shape, k.shape) == size
            mask = as_lists(block_mask if needs_lists else None, window or windows.OPEN, documents, q, k)
            problem = _problem(q, k, v, program, Arguments(tensors, integers), mask, scale)
            return reference.forward(problem)[:2]

        needs_lists = block_mask is not None
        return repeat if self.repeats else None

    def prepare_backward(self, q, k, v, program, captured, block_mask, scale, window, documents, deterministic):
        integers, needs_lists = captured.integers, block_mask is not None

        def repeat(q, k, v, out, lse, do, tensors, block_mask, documents):
            self.called.append(("backward again", deterministic))
            arguments = Arguments(tensors, integers)
            mask = block_mask if needs_lists else None
            given = q, k, v, out, lse, do, None, program, arguments, mask, scale, window or windows.OPEN, documents
            return self.backward(*given)

        return repeat if self.repeats else None

    def forward(self, q, k, v, program, captured, block_mask, scale, window, documents, *, config=None,
                needs_backward=False):  # fmt: skip
        self.called.append(("forward", block_mask))
        block_mask = as_lists(block_mask, window, documents, q, k)
        operands = (t.transpose(1, 2) for t in (q, k, v))
        out, lse, _ = reference.forward(reference.Problem(*operands, program, captured, block_mask, scale))
        return out.transpose(1, 2), lse

    def backward(self, q, k, v, out, lse, dout, dlse, program, captured, block_mask, scale, window, documents):
        self.called.append(("backward", dlse is not None))
        block_mask = as_lists(block_mask, window, documents, q, k)
        q, k, v, out, dout = (t.transpose(1, 2) for t in (q, k, v, out, dout))
        problem = reference.Problem(q, k, v, program, captured, block_mask, scale)
        found = reference.backward(problem, out, lse, dout, dlse, [False] * len(captured.tensors))
        return tuple(t.transpose(1, 2) for t in (found.dq, found.dk, found.dv))
