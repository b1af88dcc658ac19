"""Compile Triton forwards for a GPU that is not here, and print what came out as JSON: run by a test, in a process of
its own, because Triton is either the interpreter or the compiler in one process.

    python tests/support/triton_offline.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashlane import jit
from flashlane.core import registry
from flashlane.core.problem import DTYPES, AttentionProblem, Inputs
from flashlane.kernels.triton import forward, launch

POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
POINTERS[torch.int64] = "*i64"
CASES: tuple[dict[str, Any], ...] = (
    {"seqlen": 16384},
    {"head_dim": 128, "window_right": 0, "seqlen": 4096},
    # Narrow tiles of V next to K in one place of shared memory: ptxas 12.8 miscompiles this one.
    {"head_dim": 59, "head_dim_v": 80, "window_right": 0},
    {"varlen": True, "dropout_p": 0.1, "window_left": 64},
    {"seqlen_q": 2, "kv_heads": 2, "varlen": True, "alibi": True, "softcap": 20.0, "sinks": True},
    {"dtype": "f32"},
    {"bias": "row"},
    {"bias": "full", "window_right": 0},
    {"arch": "sm_80", "bias": "full", "head_dim": 128},
    {"arch": "sm_80", "window_right": 0},
)


def build(
    head_dim: int = 64,
    head_dim_v: int = 0,
    kv_heads: int = 8,
    seqlen: int = 1024,
    seqlen_q: int = 0,
    dtype: str = "bf16",
    arch: str = "sm_90a",
    bias: str = "",
    **options: Any,
) -> tuple[AttentionProblem, dict[str, torch.Tensor], Inputs]:
    """A problem of 2 × 8 heads and tensors without memory; a bias is one row for all queries, or full."""
    kind, batch, heads = DTYPES[dtype], 2, 8
    dv = head_dim_v or head_dim
    problem = AttentionProblem(
        batch=batch, heads=heads, kv_heads=kv_heads, seqlen_q=seqlen_q or seqlen, seqlen_k=seqlen, head_dim=head_dim,
        head_dim_v=dv, dtype=kind, scale=head_dim**-0.5, arch=arch,
        bias=bool(bias), **options,
    )  # fmt: skip

    def meta(*shape: int, of: torch.dtype = kind) -> torch.Tensor:
        return torch.empty(shape[1:] if problem.varlen and len(shape) == 4 else shape, dtype=of, device="meta")

    q, k = meta(batch, problem.seqlen_q, heads, head_dim), meta(batch, seqlen, kv_heads, head_dim)
    v, out = meta(batch, seqlen, kv_heads, dv), meta(batch, problem.seqlen_q, heads, dv)
    lse = meta(heads, q.shape[0], of=torch.float32) if problem.varlen else meta(batch, heads, 7, of=torch.float32)
    cu = meta(batch + 1, of=torch.int32) if problem.varlen else None
    slopes = meta(heads, of=torch.float32) if problem.alibi else None
    seed = meta(1, of=torch.int64) if problem.dropout_p else None
    sinks = meta(heads) if problem.sinks else None
    added = meta(batch, 1, problem.seqlen_q if bias == "full" else 1, seqlen) if bias else None
    inputs = Inputs(
        q, k, v, bias=added, alibi_slopes=slopes, sinks=sinks, cu_seqlens_q=cu, cu_seqlens_k=cu, dropout_seed=seed
    )
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "slopes": slopes, "sinks": sinks, "seed": seed}
    tensors |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "bias": added}
    return problem, {name: t for name, t in tensors.items() if t is not None}, inputs


def kind_in_tuple(tensor: torch.Tensor | None, value: Any) -> str:
    """The type of a field of a named tuple, of which Triton knows nothing else."""
    if tensor is not None:
        return POINTERS[tensor.dtype]
    if value is None or isinstance(value, triton.language.constexpr):
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"


def compile_launch(
    kernel: launch.Launch, tensors: dict[str, torch.Tensor], plan: forward.PreparedForward, arch: str
) -> Any:
    """What Triton would compile at the first call with tensors that start on 16 bytes."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    described = plan.descriptors or {}
    for index, (param, (name, value)) in enumerate(
        zip(kernel.function.params, kernel.neutral({}).items(), strict=True)
    ):
        assert param.name == name, f"argument {index} is {param.name!r} and the launch gives {name!r}"
        tensor = tensors.get(name)
        if isinstance(value, tuple):
            kinds = []
            for place, (field, one) in enumerate(zip(value._fields, value, strict=True)):
                kinds.append(kind_in_tuple(tensors.get(field), one))
                if kinds[-1] == "constexpr":
                    constants[index, place] = getattr(one, "value", one)
            signature[name] = value._make(kinds)
        elif param.is_constexpr or (tensor is None and value is None):
            signature[name], constants[(index,)] = "constexpr", value
        elif name in described:
            block = ",".join(map(str, described[name][2]))
            signature[name] = f"tensordesc<{POINTERS[tensor.dtype][1:]}[{block}]>"
        elif tensor is not None:
            signature[name] = POINTERS[tensor.dtype]
            if not param.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            signature[name], constants[(index,)] = "constexpr", 1
        else:
            signature[name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel.function, signature, constants, attributes)
    target = GPUTarget("cuda", int(re.sub(r"\D", "", arch)), 32)
    with launch.sound_assembler():
        return triton.compile(source, target=target, options=dict(kernel.options))


def machine_code(cubin: bytes) -> str:
    """The disassembly, by the tool that Triton carries."""
    tool = Path(triton.__path__[0], "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def unwritten_uniform_registers(text: str) -> list[str]:
    """Instructions that read a uniform register before any instruction above them writes it.

    A matrix descriptor (``gdesc``) names four registers of which it may need two, and is left out.
    """
    written: set[int] = set()
    unwritten = []
    for line in re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+ [^;]*);", text):
        operation, _, operands = line.partition(" ")
        words = [word.strip() for word in operands.split(",")]
        first, *others = words[1:] if re.fullmatch(r"U?P\d", words[0]) else words
        makes = operation.startswith(("U", "R2UR", "S2UR")) and re.fullmatch(r"UR\d+", first)
        read = others if makes else [first, *others]
        registers = [int(n) for word in read if "gdesc" not in word for n in re.findall(r"\bUR(\d+)\b", word)]
        unwritten += [line.strip() for n in registers if n not in written]
        written.update(registers)
        if makes:
            number = int(first[2:])
            written.update((number, number + 1) if ".64" in operation or "WIDE" in operation else (number,))
    return unwritten


def main() -> None:
    kernel = registry.get("triton")
    rows = []
    for case in CASES:
        problem, tensors, inputs = build(**case)
        assert kernel.supports(problem) is None
        config = kernel.config(problem)
        out, lse, precision = tensors["out"], tensors["lse"], kernel.precision_of(problem)
        plan = forward.PreparedForward(problem, config, inputs, out, lse, precision)
        if plan.splits > 1:
            tensors = {**tensors, "out": tensors["out"].float()}
        compiled = compile_launch(plan.forward, tensors, plan, str(problem.arch))
        text = machine_code(compiled.asm["cubin"])
        rows.append(
            {
                "case": str(case),
                "config": str(config),
                "shared": compiled.metadata.shared,
                "limit": jit.shared_limit(str(problem.arch)),
                "shuffles": len(re.findall(r"\bSHFL\b", text)),
                "stretches": plan.forward.arguments["PHASES"].bit_count(),
                "unwritten": unwritten_uniform_registers(text),
                "instructions": sorted(set(re.findall(r"\b(HGMMA|HMMA|UTMALDG|LDGSTS)\b", text))),
            }
        )
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
