"""Problems by the titles that results of the Hopper benchmarks give them."""

from __future__ import annotations

import re

import torch

from flashlane.core.problem import AttentionProblem

TITLE = re.compile(
    r"D(\d+) (full|causal)(?: window (\d+)(?:,(\d+))?)? N(\d+)(?:x(\d+))? B(\d+) H(\d+)(?:/(\d+))?( varlen)?( f16)?"
)


def problem_titled(title: str) -> AttentionProblem:
    """The backward problem of ``Shape.title`` of benchmarks/scripts/hopper_shapes.py; equal head dims of Q and V."""
    found = TITLE.match(title)
    assert found, title
    head_dim, mask, left, right, queries, keys, batch, heads, kv_heads, varlen, f16 = found.groups()
    before = -1 if left is None else int(left)
    after = 0 if mask == "causal" else before if right is None else int(right)
    return AttentionProblem(
        batch=int(batch), heads=int(heads), kv_heads=int(kv_heads or heads), seqlen_q=int(queries),
        seqlen_k=int(keys or queries), head_dim=int(head_dim), head_dim_v=int(head_dim),
        dtype=torch.float16 if f16 else torch.bfloat16, scale=0.1, window_left=before, window_right=after,
        varlen=varlen is not None, arch="sm_90a", needs_grad=True,
    )  # fmt: skip
