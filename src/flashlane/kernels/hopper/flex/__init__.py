"""Attention on Hopper with a score and a mask as programs, and with lists of blocks: :func:`forward`, :func:`backward`.

The kernels are those of ``hopper/forward`` and ``hopper/backward``, compiled with ``program.cuh`` and with lists of
blocks in the place of ranges.
"""

from flashlane.kernels.hopper.flex.forward import forward
from flashlane.kernels.hopper.flex.problem import supports

__all__ = ["forward", "supports"]
