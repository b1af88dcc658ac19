"""What bounds the kernels that miss a target: Nsight Compute's counters of one launch each, on a GPU.

    PYTHONPATH=src python3 benchmarks/scripts/ncu_bounds.py --out benchmarks

The fastest tag at D 128 (causal and full) next to SDPA flash, padded next to swizzled tiles, the fastest tags at D 320,
512 and 1024, and HGEMM. Clocks are left alone; cycles repeat within about 1 %. Writes ncu_bounds.json. Exit status 2
when ncu cannot count.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpu_run import device_or_exit, ncu_or_exit
from ncu_conflicts import read_csv
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlane import bench
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import check_writable, write_atomically
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, arch_of
from flashlane.kernels.mma.tiles import best_tag
from flashlane.lessons.gemm import hgemm

FORMAT = "flashlane-ncu-bounds/1"
KERNELS = "regex:mma_attention|hgemm|flash_fwd"
METRICS = {
    "cycles": "sm__cycles_elapsed.max",
    "tensor %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "mma instructions": "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "issue %": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "shared %": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "mufu %": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "fma %": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "L2 %": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "L2 to SM bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps an SM": "sm__warps_active.avg.per_cycle_active",
}
STALLS = (
    "barrier",
    "long_scoreboard",
    "short_scoreboard",
    "math_pipe_throttle",
    "mio_throttle",
    "wait",
    "not_selected",
)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def attention(tag: str, problem: AttentionProblem) -> Callable[[], object]:
    """A call of a kernel on random inputs."""
    inputs = bench.random_inputs(problem, torch.device("cuda"), seed=1)
    out = torch.empty_like(inputs.q)
    lse = torch.empty(problem.batch, problem.heads, problem.seqlen_q, device="cuda")
    return lambda: registry.get(tag).forward(problem, inputs, out, lse)


def sdpa_flash(problem: AttentionProblem) -> Callable[[], object]:
    """FlashAttention-2 as torch has it, on random inputs."""
    inputs = bench.random_inputs(problem, torch.device("cuda"), seed=1)
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))

    def call() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)

    return call


def product(size: int, accumulate: str) -> Callable[[], object]:
    """A product of square matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    return lambda: hgemm(a, b, accumulate=accumulate)


def launches(arch: str) -> Iterator[tuple[str, float, Callable[[], Callable[[], object]]]]:
    """(name, FLOP, maker of the call) in the order in which they are launched."""
    for causal in (False, True):
        problem = bench.make_problem(4, 16, 4096, 128, causal=causal, arch=arch)
        flop = 4.0 * problem.batch * problem.heads * problem.visible_pairs() * 128
        mask = "causal" if causal else "full"
        yield f"SDPA flash D128 {mask}", flop, lambda p=problem: sdpa_flash(p)
        for words in ("swizzle-qkv+stage1", "swizzle-qkv+stage2", "stage1"):
            tag = f"mma(split-q+acc-f32+{words})"
            yield f"{tag} D128 {mask}", flop, lambda p=problem, t=tag: attention(t, p)
    for head_dim in (320, 512, 1024):
        problem = bench.make_problem(1, 8, 8192, head_dim, arch=arch)
        tag = str(best_tag(head_dim, few=False))
        yield f"{tag} D{head_dim}", 4.0 * 8 * 8192**2 * head_dim, lambda p=problem, t=tag: attention(t, p)
    for accumulate in ("f32", "f16"):
        yield f"hgemm 8192 {accumulate}", 2.0 * 8192**3, lambda a=accumulate: product(8192, a)


def profile(ncu: str) -> list[dict[str, float]]:
    """The counters of each launch, in order; those that this chip does not know are left out."""
    names = [*METRICS.values(), *(STALL.format(word) for word in STALLS)]
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--kernel-name", KERNELS, "--metrics", ",".join(names), sys.executable, __file__, "--inside"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    counted = read_csv(done.stdout)
    if not counted:
        said = [line for line in (done.stdout + done.stderr).splitlines() if re.match(r"==(ERROR|WARNING)==", line)]
        raise RuntimeError("ncu counted nothing: " + (" ".join(said) or done.stderr[-500:]))
    return counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of ncu_bounds.json")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = device_or_exit()
    work = list(launches(str(arch_of(device))))
    for _, _, make in work:  # outside the tool this compiles; inside, it is what is counted
        make()()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if arguments.inside:
        return 0
    ncu = ncu_or_exit()
    check_writable(arguments.out)
    counted = profile(ncu)
    if len(counted) != len(work):
        print(f"ncu counted {len(counted)} launches of {len(work)}", file=sys.stderr)
        return 2
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    rows = []
    for (name, flop, _), found in zip(work, counted, strict=True):
        row: dict[str, object] = {"name": name, "flop": flop}
        row |= {word: found[metric] for word, metric in METRICS.items() if metric in found}
        row["stalls"] = {word: found[STALL.format(word)] for word in STALLS if STALL.format(word) in found}
        row["FLOP a clock and SM"] = flop / (found[METRICS["cycles"]] * sms)
        rows.append(row)
        shown = "  ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float) and k != "flop")
        stalls = " ".join(f"{k} {v:.2f}" for k, v in row["stalls"].items())
        print(f"{name}\n    {shown}\n    stalls: {stalls}", flush=True)
    body = {"format": FORMAT, "environment": environment(device), "launches": rows}
    write_atomically(arguments.out / "ncu_bounds.json", json.dumps(body, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
