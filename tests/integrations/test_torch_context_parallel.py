"""torch's own context parallel over flashlane's operators: two processes, each with half of the rows, on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from flashlane.integrations import torch as registry

RAN = []
for name, run in list(registry.OPERATORS.items()):
    def noted(*args, _name=name, _run=run, **named):
        RAN.append(_name)
        return _run(*args, **named)
    registry.OPERATORS[name] = noted


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    ring._cp_options.enable_load_balance = False
    handle = registry.Handle("CPU")
    torch.manual_seed(0)
    whole = [torch.randn(2, 3, 24, 16) for _ in range(4)]
    mine = [t.chunk(2, 2)[rank].contiguous() for t in whole]
    for causal in (False, True):
        del RAN[:]
        q, k, v = (t.clone().requires_grad_() for t in whole[:3])
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        grads = torch.autograd.grad(want, (q, k, v), whole[3])
        found = ring._scaled_dot_product_ring_flash_attention(mesh, *mine[:3], 0.0, causal)
        out, lse = found[0], found[1]
        torch.testing.assert_close(out, want.chunk(2, 2)[rank])
        backward = ring._scaled_dot_product_ring_flash_attention_backward(
            mesh, mine[3], *mine[:3], out, lse, None, None, 12, 12, 0.0, causal, found[6], found[7]
        )
        for got, right in zip(backward, grads):
            torch.testing.assert_close(got, right.chunk(2, 2)[rank], rtol=1e-4, atol=1e-5)
        calls = {name: RAN.count(name) for name in set(RAN)}
        steps = 2 - causal * (rank == 0)  # the first half sees no key of the second
        assert calls["_scaled_dot_product_flash_attention"] == steps, calls
        assert calls["_scaled_dot_product_flash_attention_backward"] == steps, calls
    handle.remove()
    dist.destroy_process_group()
    print("agreed", flush=True)


main(int(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.slow
def test_the_ring_of_torch_runs_flashlane_and_agrees(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.tensor.experimental._context_parallel")
    command = [sys.executable, "-c", SCRIPT]
    each = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240) for process in each]
    assert all(process.returncode == 0 for process in each), said
    assert all(out.endswith("agreed\n") for out, _ in said), said
