// How many pairs of a block are visible; flashlane.flex.blocks and flashlane.kernels.hopper.block_lists have the same
// numbers.
#pragma once

// None, some, or all; unknown: not looked at yet.
enum BlockState { BLOCK_NONE, BLOCK_PARTIAL, BLOCK_FULL, BLOCK_UNKNOWN };
