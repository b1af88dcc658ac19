"""What every Hopper kernel counts on: the architecture, its sizes, and how tiles lie in shared memory."""

from __future__ import annotations

ARCH = "sm_90a"
WARPGROUP = 128
"""Threads of a warpgroup, which issues one wgmma."""
CHUNK = 64
"""Columns of a chunk of shared memory: 128 bytes, the widest swizzle."""
SMS = 132
"""Streaming multiprocessors that the heuristics count on (H100 SXM and H200)."""
L2_BYTES = 32 << 20
"""About how much heads that run at once read again; in short sequences no more than stays in the L2 cache."""
L2_MIB = 60
"""Size of the L2 cache of an H200 (H100: 50)."""
