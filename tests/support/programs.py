"""Drawn score and mask functions: random expressions over the score, the place of a pair and captured tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SIZES = (2, 3, 24, 40)
"""Batch, heads, queries and keys of the drawn functions' captured tensors."""


@dataclass
class Drawn:
    """A function and what it was written as."""

    text: str
    function: Callable[..., Any]
    captured: dict[str, torch.Tensor]

    def __repr__(self) -> str:
        return self.text


def by_torch(
    seed: int, score: Drawn, mask: Drawn, dtype: torch.dtype = torch.float64
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A drawn score and mask of f32 tensors once more, over tensors of ``dtype`` with the same values on the CPU."""
    functions = []
    for drawn, kind in ((score, "score_mod"), (mask, "mask_mod")):
        again = draw(seed, kind, "cpu", dtype)
        for name, t in again.captured.items():
            t.copy_(drawn.captured[name])
        functions.append(again.function)
    return functions[0], functions[1]


class _Draw:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one(self, *makers: Callable[[int], str]) -> Callable[[int], str]:
        return self.random.choice(makers)

    def number(self, depth: int) -> str:
        """A floating expression whose value stays of the order of its parts'."""
        if depth <= 0:
            leaves = ["score", "score", "slope[h]", "row[b, q]", "pairs[q, kv]", "halves[kv]", "(q - kv) * slope[h]"]
            return self.random.choice([*leaves, "(score * 0 + 0.75)"])
        a, b, kind = self.number(depth - 1), self.number(depth - 2), self.random.randrange(26)
        integer, truth = self.whole(depth - 2), self.truth(depth - 2)
        forms = [
            f"({a} + {b})",
            f"({a} - {b})",
            f"torch.tanh({a}) * {b}",
            f"{a} / ({b}.abs() + 1.5)",
            f"torch.tanh({a} / 3) * 3",
            f"torch.sigmoid({a})",
            f"torch.sin({a})",
            f"torch.exp(-torch.abs({a}) / 2)",
            f"torch.log(torch.abs({a}) + 1.25)",
            f"torch.sqrt(torch.abs({a}) + 0.5)",
            f"torch.where({truth}, {a}, {b} * 1.0)",
            f"torch.clamp({a}, -1.5, 1.5)",
            f"torch.maximum({a} * score, score * 0.5)",
            f"torch.nn.functional.softplus({a})",
            f"torch.cos({a}) + {integer} * slope[h]",
            f"-{a}",
            f"({a}).abs()",
            f"torch.nn.functional.silu({a})",
            f"torch.tanh({a}) ** 2",
            f"torch.minimum(score + {a}, score * 2 + {b})",
            f"(({a} + 0.28125) % 1.625)",
            f"torch.fmod({a} + 0.28125, torch.abs({b}) + 1.25)",
            f"(({a} + 0.28125) % (torch.abs({b}) + 1.25))",
            f"torch.where(({integer} & 1) == 0, {a}, {b})",
            f"{self.row(a, b, truth)}.{self.random.choice(['sum()', 'mean(-1)', 'amax()', 'amin(dim=0)'])} * 0.5",
            f"torch.tanh({self.row(a, b, truth)}).prod() - {self.row(b, a, truth)}[{self.random.randrange(-4, 4)}]",
        ]
        return f"({forms[kind]})"

    def row(self, a: str, b: str, truth: str) -> str:
        """A row of four elements."""
        forms = ["table[h]", f"(table[h] + {a})", f"(table[h] * torch.tanh({b}))", f"torch.sin(table[h] - {a})"]
        return self.random.choice([*forms, f"torch.where({truth}, table[h], {b})", "(table[h] * near[q])"])

    def whole(self, depth: int) -> str:
        if depth <= 0:
            return self.random.choice(["q", "kv", "b", "h", "(q - kv)", "ids[q]", "ids[kv]", "long_ids[b, kv]"])
        a, b = self.whole(depth - 1), self.whole(depth - 2)
        c = self.random.choice([2, 3, 5, 8, 17, -3, -4])
        forms = [f"({a} + {b})", f"({a} - {b})", f"({a} * 3)", f"({a} // {c})", f"({a} % {c})", f"({a}).abs()"]
        forms += [f"({a} + {c})", f"torch.clamp({a}, {-abs(c)}, 30)", f"torch.where({self.truth(depth - 2)}, {a}, {b})"]
        forms += [f"({a} & 7)", f"torch.minimum({a}, {a} - {b})"]
        return self.random.choice([*forms, *self.of_bits(a, b, c), *self.divided(a, b, c)])

    def of_bits(self, a: str, b: str, c: int) -> list[str]:
        """Bitwise operations and shifts, also by more places than there are and by fewer than 0."""
        forms = [f"({a} {op} {b})" for op in "&|^"] + [f"({a} ^ {c})", f"(~{a})"]
        forms += [f"({a} << {abs(c) % 5})", f"({a} >> {abs(c) % 5})", f"({a} >> ({b} & 3))"]
        return [*forms, f"(({a} & 15) << ({b} % 40))", f"({a} << (({b} & 1) * 33 - 1))", f"({a} >> (35 - {b}))"]

    def divided(self, a: str, b: str, c: int) -> list[str]:
        """Divisions and remainders by either sign, and of products that wrap around."""
        forms = [f"torch.fmod({a}, {c})", f"torch.div({a}, {c}, rounding_mode='trunc')"]
        divisor = f"(({b} & 7) * 2 - 7)"
        forms += [f"({a} {op} {divisor})" for op in ("//", "%")] + [f"torch.fmod({a}, {divisor})"]
        return [*forms, f"(({a} * 1103515245 + 12345) % 61)", f"(({a} * 69069 + {b} * 1664525) // {1 << 20})"]

    def truth(self, depth: int) -> str:
        if depth <= 0:
            c = self.random.randrange(-5, 30)
            return self.random.choice(
                ["q >= kv", "seen[q, kv]", "ids[q] == ids[kv]", f"kv < {c}", f"(q - kv).abs() <= {c}"]
            )
        a, b = self.truth(depth - 1), self.truth(depth - 2)
        relation = self.random.choice(["<", "<=", ">", ">=", "==", "!="])
        forms = [f"(({a}) & ({b}))", f"(({a}) | ({b}))", f"(~({a}))", f"(({a}) ^ ({b}))"]
        forms += [
            f"(near[q] {relation} ({self.whole(depth - 1)}).unsqueeze(-1)).{self.random.choice(['any(-1)', 'all()'])}"
        ]
        return self.random.choice([*forms, f"({self.whole(depth - 1)} {relation} {self.whole(depth - 2)})"])


def captured_tensors(seed: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The tensors that drawn functions read; ``halves`` has f16 values."""
    batch, heads, queries, keys = SIZES
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    long = max(queries, keys)
    tensors = {
        "slope": normal(heads),
        "row": normal(batch, queries),
        "pairs": normal(keys, queries).T,  # strides that are not contiguous
        "halves": normal(keys).half(),
        "table": normal(heads, 4),
        "near": torch.randint(-3, 30, (queries, 4), generator=generator),
        "ids": torch.randint(0, 4, (long,), generator=generator, dtype=torch.int32).sort().values,
        "long_ids": torch.randint(-9, 9, (batch, keys), generator=generator),
        "seen": torch.rand(queries, keys, generator=generator) < 0.6,
    }
    return {name: t.to(device) if t.is_contiguous() else t.T.to(device).T for name, t in tensors.items()}


def draw(seed: int, kind: str, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Drawn:
    """A drawn ``score_mod`` or ``mask_mod``."""
    drawing = _Draw(seed)
    depth = drawing.random.randrange(1, 6)
    scored = kind == "score_mod"
    text = drawing.number(depth) if scored else drawing.truth(depth)
    captured = captured_tensors(seed, device, dtype)
    names = "score, b, h, q, kv" if scored else "b, h, q, kv"
    function = eval(f"lambda {names}: {text}", {"torch": torch, **captured})
    return Drawn(text, function, captured)
