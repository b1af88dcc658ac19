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

    def product(name: str, transposes: str, accumulate: bool | None = True) -> str:
        """A function; ``accumulate``: whether d is added to, and None where its caller says that."""
        in_registers = name.startswith("rs")
        a, b = (registers, count + 4) if in_registers else (f"%{count}", count + 1)
        # Of a sum the predicate is an operand, too: ptxas orders some kernels otherwise where it is an immediate.
        predicate = 0 if accumulate is False else f"%{b + 1}"
        text = f"{{ .reg .pred p; setp.ne.b32 p, {predicate}, 0; {instruction}, {a}, %{b}, p, 1, 1, {transposes}; }}"
        inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])' if in_registers else '"l"(a)'
        inputs += ', "l"(b)' + {None: ', "r"(int(accumulate))', True: ', "r"(1)', False: ""}[accumulate]
        results = outputs.replace("+f", "=f") if accumulate is False else outputs
        argument = (
            ("const u32* a" if in_registers else "u64 a") + ", u64 b" + ", bool accumulate" * (accumulate is None)
        )
        return (
            f"  static __device__ __forceinline__ void {name}(float (&d)[{count}], {argument}) {{\n"
            f'    asm volatile("{text}"\n      : {results}\n      : {inputs});\n  }}'
        )

    more = (product("ss_mn", "0, 1"), product("ss_mn_first", "0, 1", False))
    return "\n".join(
        (
            f"template <>\nstruct Wgmma<{n}> {{",
            product("ss", "0, 0", None),
            product("ss_first", "0, 0", False),
            product("ss_mt", "1, 0"),
            product("ss_mt_first", "1, 0", False),
            product("rs", "0", None),
            product("rs_mn", "1"),
            *((product("rs_mn_first", "1", False),) if rs_first else ()),
            *(more if n_inner else ()),
            "};",
        )
    )
