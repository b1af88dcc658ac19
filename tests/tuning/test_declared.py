"""What the registry declares for the tuner, and what the tuner shares with the bench."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from tuner_fakes import CPU

from flashlane import bench
from flashlane.bench.measure.implementations import Work
from flashlane.core import registry, tuned
from flashlane.tuning import search as tuner
from flashlane.tuning import search_backward, stored


@pytest.mark.parametrize("table", [registry.kernels, registry.backward_kernels])
def test_what_is_kept_of_a_configuration_is_void_when_a_file_of_the_package_changes(table):
    """Of each kernel, for a problem that it takes; one that keeps nothing names no file."""
    for kernel in table():
        if not hasattr(kernel, "tuned_fields"):
            assert not hasattr(kernel, "source_of")
            continue
        dtypes = (torch.float16, torch.float32)
        able = [bench.make_problem(1, 2, 256, 64, dtype=dtype, arch="sm_90a") for dtype in dtypes]
        config = kernel.config(next(each for each in able if kernel.supports(each) is None))
        kept = kernel.tuned_fields(config)
        if kept is None:
            with pytest.raises(NotImplementedError, match=re.escape(f"backward kernel {kernel.tag!r} names no file")):
                kernel.source_of(config)
        else:
            assert len(stored.digest_of(kernel.source_of(config))) == 64
            assert kept and all(isinstance(value, tuned.PLAIN) for value in kept.values())


def test_bench_and_tuner_poison_the_same_memory(monkeypatch):
    """The results of a forward pass; and of a backward one what the allocator may give to gradients."""
    one = bench.make_problem(1, 2, 8, 16, dtype=torch.float32)
    forward = tuner.ForwardSubject(one, CPU, 0)
    backward = search_backward.BackwardSubject(replace(one, needs_grad=True), CPU, 0)
    filled = []
    monkeypatch.setattr(torch, "full_like", lambda like, value: filled.append((tuple(like.shape), value)))
    for each in (forward, Work(one, "forward", forward.inputs, torch.zeros(3), torch.zeros(2))):
        each.out.zero_(), each.lse.zero_()
        each.poison()
        assert each.out.isnan().all() and each.lse.isnan().all() and not filled
    work = Work(one, "backward", forward.inputs, torch.zeros(3), torch.zeros(3))
    for poison in (backward.poison, work.poison):
        poison()
        assert [shape for shape, value in filled if math.isnan(value)] == 3 * [(1, 8, 2, 16)]
        filled.clear()
    assert not work.out.any()
