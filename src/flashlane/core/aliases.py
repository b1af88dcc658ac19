"""Other names of kernels and peers: those that the baseline logs print, and those that people type."""

from __future__ import annotations

KERNELS = {
    "mma(stage1)": "mma(split-kv+stage1)",
    "mma(stage2)": "mma(split-kv+stage2)",
    "out_FA1f32": "fa1(f32)",
    "FA1f32": "fa1(f32)",
    "out_FA2MMAf16": "mma(naive)",
    "FA2MMAf16": "mma(naive)",
}
"""The logs' name of a kernel -> its tag."""
PEERS = {
    "naive(unfused)": "(unfused)",
    "torch(unfused)": "(unfused)",
    "th(naive)": "(unfused)",
    "torch": "(unfused)",
    "sdpa": "(sdpa-efficient)",
    "efficient": "(sdpa-efficient)",
    "math": "(sdpa-math)",
    "fa2": "(flash-attn-2)",
    "fa3": "(flash-attn-3)",
    "fa4": "(flash-attn-4)",
}
"""Another name of a peer, without its brackets -> its tag."""
