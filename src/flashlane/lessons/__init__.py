"""Building blocks of attention as runnable lessons: softmax, matrix product, activations, and the ceiling above them.

Each lesson is a device file (``row_softmax.cu``, ``gemm.cu``, ``activation.cu``, ``ceiling.cu``) and a Python file of
the same name with the function that runs it and the table of its variants. docs/lessons.md walks through them.
"""

from __future__ import annotations

from flashlane.lessons.activation import elu, hard_shrink, hard_swish
from flashlane.lessons.ceiling import mma_ceiling
from flashlane.lessons.gemm import hgemm
from flashlane.lessons.row_softmax import softmax

__all__ = ["elu", "hard_shrink", "hard_swish", "hgemm", "mma_ceiling", "softmax"]
