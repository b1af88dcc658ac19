"""What every Hopper kernel counts on: the architecture, its sizes, and how tiles lie in shared memory."""

from __future__ import annotations

from flashlane.core.arch import SMS as SMS_OF_ARCH

ARCH = "sm_90a"
WARPGROUP = 128
"""Threads of a warpgroup, which issues one wgmma."""
CHUNK = 64
"""Columns of a chunk of shared memory: 128 bytes, the widest swizzle."""
SMS = SMS_OF_ARCH["sm_90a"]
"""Streaming multiprocessors that the heuristics count on (H100 SXM and H200)."""
SECTION_BYTES = 32 << 20
"""What the heads of a section read, K and V or in the backward Q, dO and dQ, that is to stay in the L2 cache at once
while their tiles run: about half of the cache."""
L2_MIB = 60
"""Size of the L2 cache of an H200 (H100: 50)."""
