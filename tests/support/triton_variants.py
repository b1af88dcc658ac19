"""What the Triton kernels are compiled for in the GPU tests, and the problems that each variant draws."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from flashlane.bench.measure.drawn import TRITON_BACKWARD, TRITON_FORWARD, draw, features
from flashlane.bench.measure.drawn_case import Case

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WINDOWS = ((5, -1), (70, 0), (64, 9), (0, 200))
STRIDES = {"plain": ("plain", "transposed", "expanded"), "sliced": ("sliced",)}


@dataclass(frozen=True)
class ForwardVariant:
    """What the kernel is compiled for; lengths, heads and values are drawn."""

    dtype: torch.dtype = BF16
    head_dim: int = 64
    head_dim_v: int = 0
    mask: str = "any"
    features: tuple[str, ...] = ()
    strides: str = "plain"
    tag: str = "triton"

    def __str__(self) -> str:
        dims = f"{self.head_dim}-{self.head_dim_v or self.head_dim}"
        strides = () if self.strides == "plain" else (self.strides,)
        return "_".join((self.tag, str(self.dtype)[6:], dims, self.mask, *self.features, *strides))

    def draw(self, number: int) -> Case:
        chance = random.Random(f"{self} {number}")
        left, right = chance.choice(WINDOWS) if self.mask == "window" else (-1, -1)
        space = replace(
            features(TRITON_FORWARD, self.features),
            head_dims=(self.head_dim,),
            head_dims_v=(self.head_dim_v,),
            causal=(self.mask == "causal",),
            left=(left,),
            right=(right,),
            strides=STRIDES[self.strides],
        )
        return draw(chance, space)


MASKS = ("full", "causal", "window")
ALL = ("alibi", "bias", "sinks", "softcap", "dropout")
FORWARD_VARIANTS = (
    *(ForwardVariant(dtype, d, mask=mask) for dtype in (BF16, F16) for d in (64, 128) for mask in MASKS),
    *(ForwardVariant(head_dim=d, mask="causal") for d in (8, 16, 32, 40, 59, 80, 96, 111, 160, 192, 256, 320, 512)),
    *(ForwardVariant(F16, d, mask="full", strides="sliced") for d in (8, 32, 59, 64, 96, 111, 320)),
    *(ForwardVariant(BF16, d, dv, mask="causal") for d, dv in ((192, 128), (64, 512), (111, 32), (59, 80))),
    *(ForwardVariant(head_dim=d, head_dim_v=dv, mask="full") for d, dv in ((59, 16), (40, 96), (128, 32))),
    *(ForwardVariant(head_dim=d, mask=mask, features=("varlen",)) for d in (64, 128) for mask in MASKS),
    *(ForwardVariant(mask="causal", features=(feature,)) for feature in ALL),
    *(ForwardVariant(F16, 128, mask="full", features=(feature,)) for feature in ALL),
    *(ForwardVariant(head_dim=d, mask="window", features=("varlen", *ALL)) for d in (64, 111)),
    *(ForwardVariant(mask="causal", features=(f,)) for f in ("used", "leftpad", "batch_idx", "paged")),
    *(ForwardVariant(head_dim=128, mask=mask, features=("paged", "used", "leftpad")) for mask in MASKS),
    *(ForwardVariant(head_dim=128, mask="causal", features=("used", "batch_idx", feature)) for feature in ALL[:4]),
    ForwardVariant(mask="causal", features=("varlen", "paged")),
    *(ForwardVariant(F32, d, mask=mask) for d in (64, 128) for mask in ("full", "causal")),
    *(ForwardVariant(F32, d, mask="causal") for d in (8, 59, 96, 256, 512)),
    ForwardVariant(F32, 40, mask="window", features=("varlen", *ALL)),
    ForwardVariant(F32, 64, mask="causal", features=("paged", "used")),
    *(ForwardVariant(F32, d, mask="causal", tag="triton(ieee)") for d in (40, 64, 128)),
    *(ForwardVariant(F32, d, mask="causal", tag="triton(tf32)") for d in (40, 64, 128)),
)  # fmt: skip


@dataclass(frozen=True)
class BackwardVariant:
    """What the kernels are compiled for; lengths, heads and values are drawn."""

    dtype: torch.dtype = BF16
    head_dim: int = 64
    head_dim_v: int = 0
    mask: str = "any"
    features: tuple[str, ...] = ()
    strides: tuple[str, ...] = ("plain", "transposed")
    precision: str = "ieee"

    def __str__(self) -> str:
        dims = f"{self.head_dim}-{self.head_dim_v or self.head_dim}"
        words = (str(self.dtype)[6:], dims, self.mask, *self.features)
        return "_".join(words + ((self.precision,) if self.precision != "ieee" else ()))

    def draw(self, number: int) -> Case:
        windowed = self.mask == "window"
        space = replace(
            features(TRITON_BACKWARD, self.features),
            head_dims=(self.head_dim,),
            head_dims_v=(self.head_dim_v,),
            causal={"causal": (True,), "any": (False, True)}.get(self.mask, (False,)),
            left=(0, 5, 70, 130) if windowed else (-1,),
            right=(0, 9, 100) if windowed else (-1,),
            strides=self.strides,
        )
        return draw(random.Random(f"{self} {number}"), space)


BACKWARD_VARIANTS = (
    *(
        BackwardVariant(dtype, d, mask=mask)
        for dtype in (BF16, F16)
        for d in (64, 128)
        for mask in ("full", "causal", "window")
    ),
    *(
        BackwardVariant(head_dim=d, mask="causal", strides=("sliced", "expanded", "plain"))
        for d in (8, 40, 59, 96, 111, 256)
    ),
    BackwardVariant(head_dim=192, head_dim_v=128, mask="causal"),
    BackwardVariant(F16, 64, 128, "full"),
    *(BackwardVariant(head_dim=d, mask=mask, features=("varlen",)) for d in (64, 128) for mask in ("full", "causal")),
    *(BackwardVariant(mask="causal", features=(f,)) for f in ("softcap", "alibi", "sinks", "dropout", "bias")),
    BackwardVariant(mask="full", features=("bias", "sinks")),
    BackwardVariant(F16, 64, mask="window", features=("varlen", "softcap", "alibi", "sinks", "dropout", "bias")),
    BackwardVariant(head_dim=128, mask="causal", features=("varlen", "alibi", "dropout")),
    *(BackwardVariant(F32, 64, mask="causal", precision=p) for p in ("ieee", "tf32", "bf16x6")),
    *(BackwardVariant(F32, 128, mask="full", precision=p) for p in ("ieee", "bf16x6")),
    BackwardVariant(F32, 40, mask="window", features=("varlen", "softcap", "alibi", "sinks", "dropout", "bias")),
)
