"""The lists of blocks of a mask for the tiles of a kernel, made once for each mask and tile."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.block_lists import BlockLists, tile_lists, unit_states
from flashlane.kernels.hopper.flex.problem import BlockMask
from flashlane.kernels.hopper.forward.config import HopperConfig

_made: WeakKeyDictionary[BlockMask, dict[tuple[object, ...], BlockLists]] = WeakKeyDictionary()


def _kept(mask: BlockMask, key: tuple[object, ...], make: Callable[[], BlockLists]) -> BlockLists:
    lists = _made.setdefault(mask, {})
    found = lists.get(key)
    if found is None:
        found = lists[key] = make()
    return found


def forward_lists(mask: BlockMask, config: HopperConfig, problem: AttentionProblem) -> BlockLists:
    """The n-blocks of each m-block.

    Args:
        mask: of the call.
        config: of the kernel, for its tile.
        problem: the call, for its lengths.
    """
    lengths = problem.seqlen_q, problem.seqlen_k

    def make() -> BlockLists:
        return tile_lists(_states(mask, lengths), config.block_m, config.block_n, lengths[1])

    return _kept(mask, ("forward", config.block_m, config.block_n, *lengths), make)


def backward_lists(mask: BlockMask, config: GradientConfig, problem: AttentionProblem) -> tuple[BlockLists, ...]:
    """The m-blocks of each n-block, for the kernel of the gradients.

    Args:
        mask: of the call.
        config: of the kernels, for their tiles.
        problem: the call.
    """
    lengths, block_m, keys = (problem.seqlen_q, problem.seqlen_k), config.block_m, config.block_n

    def make() -> BlockLists:
        states = _states(mask, lengths).transpose(2, 3)
        return tile_lists(states, keys, block_m, -(-lengths[0] // block_m) * block_m, problem.group, config.in_order)

    return (_kept(mask, ("backward", block_m, keys, problem.group, config.in_order, *lengths), make),)


def _states(mask: BlockMask, lengths: tuple[int, int]) -> torch.Tensor:
    given = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    return unit_states(*given, tuple(mask.BLOCK_SIZE), lengths)
