"""What a kernel may be unable to do, by groups, and the reason that it gives then.

A field of :class:`~flashlane.core.problem.AttentionProblem` declares the group that it belongs to. A kernel names the
groups that it implements and never the fields::

    ABLE = (*SCORE_FEATURES, *VARLEN, *CACHE, *PAGED)
    reason = unsupported_features(problem, ("f16", "bf16"), ABLE)

``SCORE_FEATURES`` are the score modifiers that ``kernels/score.py`` defines for device code. The group "score" has all
of them: a kernel that named it would accept, and ignore, a modifier which only other kernels have so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashlane.core.problem import FEATURES
from flashlane.jit import LIMITS
from flashlane.kernels.params import SCALES
from flashlane.kernels.score import LARGEST_CAP, cap_refusal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from flashlane.core.problem import AttentionProblem, Group


def of_group(*groups: Group) -> tuple[str, ...]:
    """The fields of a problem that belong to these groups."""
    return tuple(name for name, group in FEATURES.items() if group in groups)


BIAS = of_group("bias")
"""A tensor that is added to the scores."""
DROPOUT = of_group("dropout")
VARLEN = of_group("varlen")
"""Packed sequences."""
CACHE = of_group("cache")
"""Sequences that lie somewhere in a longer key/value cache."""
PAGED = of_group("paged")
"""A key/value cache in pages."""
ROW_ELEMENTS = 8
"""Elements of a 16-bit type in the 16 bytes that are copied at once."""


def is_cached(problem: AttentionProblem) -> bool:
    """Whether k and v of a problem are a key/value cache: its sequences lie somewhere in it, or it has pages."""
    return any(getattr(problem, name) for name in (*CACHE, *PAGED))


def head_dim_refusal(problem: AttentionProblem, most: int, most_v: int | None = None) -> str | None:
    """Why a kernel of head dims up to so many cannot run a problem, or None; ``most_v`` is of v where it differs."""
    if problem.head_dim > most:
        return f"head_dim is {problem.head_dim}; it takes up to {most}"
    most_v = most if most_v is None else most_v
    return f"head_dim of v is {problem.head_dim_v}; it takes up to {most_v}" if problem.head_dim_v > most_v else None


def rows_refusal(problem: AttentionProblem, copied_by: str) -> str:
    """Why a kernel of 16-bit types, which copies rows by 16 bytes, cannot copy those of a problem.

    Args:
        problem: one whose rows are not aligned, or have another head dim than multiples of 16 bytes.
        copied_by: what copies the rows.
    """
    for name, dim in (("head_dim", problem.head_dim), ("head_dim of v", problem.head_dim_v)):
        if dim % ROW_ELEMENTS:
            return f"{name} is {dim}; it takes multiples of {ROW_ELEMENTS}, as {copied_by} copies rows by 16 bytes"
    return f"rows of q, k and v must be contiguous and start on 16 bytes, as {copied_by} copies them"


def unsupported_features(
    problem: AttentionProblem,
    dtypes: Iterable[str],
    able: Iterable[str] = (),
    architectures: Collection[str] = LIMITS,
) -> str | None:
    """Why a CUDA kernel with plain masks (causal, window) cannot run a problem, or None.

    Args:
        problem: the attention problem.
        dtypes: names of the element types that the kernel takes.
        able: the fields that the kernel honours, of those that :data:`~flashlane.core.problem.FEATURES` lists.
        architectures: those that it can be compiled for; all whose limits are known, unless given.
    """
    if problem.arch is None:
        return "it needs a GPU"
    if problem.dtype_name not in dtypes:
        return f"dtype is {problem.dtype_name}; it takes {' or '.join(dtypes)}"
    missing = [name for name in FEATURES if name not in able and getattr(problem, name)]
    if missing:
        return f"it has no {', '.join(missing)}"
    if not SCALES[0] <= problem.scale <= SCALES[1]:
        return f"scale is {problem.scale:g}; it takes {SCALES[0]:g} to {SCALES[1]:g}"
    if problem.arch not in architectures:
        return f"architecture is {problem.arch}; it takes {', '.join(architectures)}"
    return cap_refusal(problem, LARGEST_CAP)
