"""Text of ``wgmma_shapes.cuh``: the wrappers of ``wgmma.mma_async`` for the sizes that a configuration needs.

An accumulator of N columns is N/2 operands of one instruction, so each size is its own function; a few lines of Python
write them. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

import functools

HEADER = "wgmma_shapes.cuh"
SUFFIXES = {"f16": "f16", "bf16": "bf16"}
MAX_COLUMNS = 256


@functools.cache
def wgmma_header(
    dtype: str, columns: tuple[int, ...], n_inner: tuple[int, ...] = (), rs_first: tuple[int, ...] = ()
) -> str:
    """``Wgmma<N>`` for each N of ``columns``, with operands of a dtype and f32 accumulators.

    Those of ``n_inner`` also have products of two tiles in shared memory whose B has n innermost. Those of ``rs_first``
    have a first product with A in registers.

    Raises:
        ValueError: a size is not a multiple of 8 from 8 to 256.
    """
    parts = ["#pragma once", '#include "ptx.cuh"', "template <int N>", "struct Wgmma;"]
    for n in sorted({*columns, *n_inner}):
        if n % 8 or not 8 <= n <= MAX_COLUMNS:
            raise ValueError(f"columns is {n}; wgmma takes multiples of 8 from 8 to {MAX_COLUMNS}")
        parts.append(_shape(SUFFIXES[dtype], n, n in n_inner, n in rs_first))
    return "\n".join(parts) + "\n"


def _shape(suffix: str, n: int, n_inner: bool, rs_first: bool) -> str:
    count = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    registers = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{suffix}.{suffix} {{{accumulators}}}"
    in_registers = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate))'

    def first(name: str, tail: str) -> str:
        a, b = f"%{count}", f"%{count + 1}"
        text = f"{{ .reg .pred p; setp.ne.b32 p, 0, 0; {instruction}, {a}, {b}, p, {tail}; }}"
        return (
            f"  static __device__ __forceinline__ void {name}(float (&d)[{count}], u64 a, u64 b) {{\n"
            f'    asm volatile("{text}"\n      : {outputs.replace("+f", "=f")}\n      : "l"(a), "l"(b));\n  }}'
        )

    def first_of_registers(name: str, tail: str) -> str:
        text = f"{{ .reg .pred p; setp.ne.b32 p, 0, 0; {instruction}, {registers}, %{count + 4}, p, {tail}; }}"
        return (
            f"  static __device__ __forceinline__ void {name}(float (&d)[{count}], const u32* a, u64 b) {{\n"
            f'    asm volatile("{text}"\n      : {outputs.replace("+f", "=f")}\n'
            f'      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));\n  }}'
        )

    def function(name: str, argument: str, a: str, operands: int, tail: str, inputs: str) -> str:
        b, accumulate = f"%{count + operands}", f"%{count + operands + 1}"
        text = f"{{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0; {instruction}, {a}, {b}, p, {tail}; }}"
        return (
            f"  static __device__ __forceinline__ void {name}(float (&d)[{count}], {argument}, u64 b,"
            f' bool accumulate) {{\n    asm volatile("{text}"\n      : {outputs}\n      : {inputs});\n  }}'
        )

    in_shared = '"l"(a), "l"(b), "r"(int(accumulate))'
    more = (function("ss_mn", "u64 a", f"%{count}", 1, "1, 1, 0, 1", in_shared), first("ss_mn_first", "1, 1, 0, 1"))
    return "\n".join(
        (
            f"template <>\nstruct Wgmma<{n}> {{",
            function("ss", "u64 a", f"%{count}", 1, "1, 1, 0, 0", in_shared),
            first("ss_first", "1, 1, 0, 0"),
            function("ss_mt", "u64 a", f"%{count}", 1, "1, 1, 1, 0", in_shared),
            first("ss_mt_first", "1, 1, 1, 0"),
            function("rs", "const u32* a", registers, 4, "1, 1, 0", in_registers),
            function("rs_mn", "const u32* a", registers, 4, "1, 1, 1", in_registers),
            *((first_of_registers("rs_mn_first", "1, 1, 1"),) if rs_first else ()),
            *(more if n_inner else ()),
            "};",
        )
    )
