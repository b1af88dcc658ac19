"""Cases of flex_attention for ``sanitize.py``: drawn programs, lists by hand and named masks, in both directions.

torch's own kernels do not survive racecheck in one process with instrumented ones. What torch computes of tensors on
the GPU, such as the lists that tiles walk over, is therefore computed on the CPU (:class:`OnHost`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

import flashlane
from flashlane.bench.measure.check import relative_l2
from flashlane.flex import blocks, masks
from flashlane.flex.bind import bind

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support import programs

SIZES = (1, 2, 150, 200)
"""Batch, heads, queries and keys; drawn functions read tensors of these sizes."""
ERROR, LSE_ERROR = 1e-2, 5e-3
"""Largest ‖x − ref‖ / ‖ref‖ of an output or a gradient in 16 bits, and largest error of an LSE."""
KERNELS = ("interval_states", "neighbourhood_states", "block_lists", "program_states")
"""What the names of the kernels that make block lists contain."""
Function = Callable[..., Any]


@dataclass(frozen=True)
class FlexCase:
    """A score and a mask, and what the kernels are asked."""

    name: str
    functions: Callable[[str], tuple[Function | None, Any]]
    """From a device to the score function and to a mask function, a named mask, lists or None."""
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    block: int = 128
    deterministic: bool = False
    lengths: tuple[int, int] = SIZES[2:]

    @property
    def tag(self) -> str:
        return f"flex, {self.name} D{self.head_dim}"

    def operands(self) -> list[torch.Tensor]:
        """q, k and v, ``(b, h, s, d)`` on the CPU."""
        generator = torch.Generator().manual_seed(0)
        batch, heads, _, _ = SIZES
        queries, keys = self.lengths
        return [
            torch.randn(batch, heads, n, self.head_dim, generator=generator).to(self.dtype)
            for n in (queries, keys, keys)
        ]

    def on(self, device: str) -> tuple[Function | None, BlockMask | None]:
        """The score function and the block mask on a device."""
        score, mask = self.functions(device)
        if mask is None or isinstance(mask, BlockMask):
            return score, mask
        batch, heads, _, _ = SIZES
        return score, flashlane.create_block_mask(mask, batch, heads, *self.lengths, device, self.block)


def _drawn(seed: int) -> Callable[[str], tuple[Function, Function]]:
    def functions(device: str) -> tuple[Function, Function]:
        before, programs.SIZES = programs.SIZES, SIZES
        try:
            made = (programs.draw(seed, kind, device, torch.float32).function for kind in ("score_mod", "mask_mod"))
            return tuple(made)  # type: ignore[return-value]
        finally:
            programs.SIZES = before

    return functions


def _by_hand(density: float, size: int) -> Callable[[str], tuple[None, BlockMask]]:
    def functions(device: str) -> tuple[None, BlockMask]:
        generator = torch.Generator().manual_seed(0)
        _, heads, queries, keys = SIZES
        table = torch.rand(1, heads, -(-queries // size), -(-keys // size), generator=generator) < density
        counts, indices = (t.to(device) for t in blocks.lists(table))
        none = torch.zeros_like(counts)
        given = none, indices, counts, indices
        return None, BlockMask.from_kv_blocks(*given, BLOCK_SIZE=size, seq_lengths=(queries, keys))

    return functions


def _tanh(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return 5 * torch.tanh(score / 5)


def _linear(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return score + (kv - q) * 0.01


DRAWN = (0, 3, 5, 8, 11, 13)
"""Seeds of drawn programs."""


def cases() -> Iterator[FlexCase]:
    for number, seed in enumerate(DRAWN):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        yield FlexCase(f"drawn program {seed}", _drawn(seed), (64, 128)[number % 2], dtype, deterministic=number > 3)
    yield FlexCase("lists by hand, 64", _by_hand(0.5, 64), 128, block=64)
    yield FlexCase("lists by hand, 64, deterministic", _by_hand(0.5, 64), 64, block=64, deterministic=True)
    yield FlexCase("lists by hand, 128", _by_hand(0.6, 128), 64)
    yield FlexCase("empty lists", _by_hand(0.0, 128), 128)
    square = {"lengths": (200, 200)}
    yield FlexCase("tanh in a window", lambda device: (_tanh, masks.sliding_window(40, 20)), 128, **square)
    yield FlexCase("tanh, causal", lambda device: (_tanh, masks.causal()), 64, deterministic=True, **square)
    yield FlexCase("linear, window and sinks", lambda device: (_linear, masks.sliding_window(40, 0, 5)), 64, **square)
    yield FlexCase(
        "linear, documents",
        lambda device: (_linear, masks.documents(torch.tensor([0, 70, 71, 200], device=device), causal=True)),
        128, **square,
    )  # fmt: skip
    yield FlexCase(
        "tanh, documents",
        lambda device: (_tanh, masks.documents(torch.tensor([0, 70, 71, 200], device=device), causal=True)),
        64, **square,
    )  # fmt: skip
    tree = ([-1, 0, 1, 1, 0], [60, 50, 40, 30, 20])
    yield FlexCase("prefix tree", lambda device: (None, masks.prefix_tree(*tree, device)), 64, block=64, **square)
    yield FlexCase("neighbourhood", lambda device: (None, masks.neighbourhood((4, 10, 5), (2, 3, 3))), 128, **square)


TRACING = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)
"""The modes in which torch records operations."""


class OnHost(TorchDispatchMode):
    """Operations of torch on tensors of a GPU are done on the CPU; views, allocations and copies of bytes are not."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(torch._C._get_dispatch_mode(mode) is not None for mode in TRACING):  # a program is recorded
            return function(*args, **kwargs)
        schema = function._schema
        there = [t for t in _tensors((args, kwargs)) if t.device.type == self.device.type]
        made_there = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == self.device.type
        writes = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        is_view = any(r.alias_info is not None for r in schema.returns) and not writes
        if not (there or made_there) or is_view or "empty" in schema.name:
            return function(*args, **kwargs)
        copies: dict[int, torch.UntypedStorage] = {}
        if made_there:
            kwargs["device"] = torch.device("cpu")
        here_args, here_kwargs = (self._replaced(given, lambda t: self._here(t, copies)) for given in (args, kwargs))
        result = function(*here_args, **here_kwargs)
        names = [a.name for a in schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for t in _tensors([given[name] for name in writes if name in given]):
            if t.device.type == self.device.type:
                t.untyped_storage().copy_(copies[t.untyped_storage().data_ptr()])
        if writes:
            return given[next(a.name for a in schema.arguments if a.name in writes)]
        leaves = function is torch.ops.aten._to_copy.default and "device" in kwargs and not made_there
        return result if leaves else self._replaced(result, self._there)

    def _replaced(self, value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return torch.utils._pytree.tree_map_only(torch.Tensor, change, value)

    def _here(self, t: torch.Tensor, copies: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if t.device.type != self.device.type:
            return t
        storage = t.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = torch.UntypedStorage(storage.nbytes()).copy_(storage)
        copy = copies[storage.data_ptr()]
        return torch.empty(0, dtype=t.dtype).set_(copy, t.storage_offset(), t.shape, t.stride())

    def _there(self, t: torch.Tensor) -> torch.Tensor:
        storage = torch.UntypedStorage(t.untyped_storage().nbytes(), device=self.device).copy_(t.untyped_storage())
        place = t.storage_offset(), t.shape, t.stride()
        return torch.empty(0, dtype=t.dtype, device=self.device).set_(storage, *place)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def by_kernels(case: FlexCase, device: torch.device) -> list[torch.Tensor]:
    """Output, LSE and gradients of q, k and v by the Hopper kernels, ``(b, s, h, d)``, on the CPU."""
    from flashlane.flex import windows
    from flashlane.kernels.hopper import flex as kernels

    with OnHost(device):
        q, k, v = (t.to(device).transpose(1, 2) for t in case.operands())
        score, mask = case.on(str(device))
        window = None if mask is None else windows.NOTES.of(mask)
        program, arguments = bind(score, None if mask is None else mask.mask_mod, device)
        if window is not None:
            program, mask = program.without_mask(), None
        call = program, arguments, mask, case.head_dim**-0.5, window or windows.OPEN
        out, lse = kernels.forward(q, k, v, *call)
        dout = torch.ones_like(out)
        found = kernels.backward(q, k, v, out, lse, dout, None, *call, deterministic=case.deterministic)
        return [t.cpu() for t in (out, lse, *found)]


def by_reference(case: FlexCase) -> list[torch.Tensor]:
    """The same by torch operations on the CPU, of the same operands in f32."""
    leaves = [t.float().requires_grad_() for t in case.operands()]
    out, lse = flashlane.flex_attention(*leaves, *case.on("cpu"), return_lse=True)
    gradients = torch.autograd.grad(out.sum(), leaves)
    return [out.detach().transpose(1, 2), lse.detach(), *(g.transpose(1, 2) for g in gradients)]


def run(words: list[str], chosen: Callable[[Iterable[FlexCase]], Iterable[FlexCase]], device: torch.device) -> None:
    """One call a case in both directions, checked. ``chosen`` gives a process's share of the cases."""
    for case in chosen(case for case in cases() if not words or any(word in case.tag for word in words)):
        found, wanted = by_kernels(case, device), by_reference(case)
        wrong = differences(found, wanted)
        print(f"ran {case.tag} {str(case.dtype)[6:]} {f'off by {wrong}' if wrong else 'ok'}", flush=True)


def differences(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> dict[str, str]:
    """What of output, LSE and gradients is not right, and by how much."""
    wrong = {}
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        seen = b.isfinite()
        a, b = (torch.where(seen, t.float(), 0) for t in (a, b))
        error = (a - b).abs().max().item() if name == "lse" else relative_l2(a, b) if b.any() else a.abs().max().item()
        if not error <= (LSE_ERROR if name == "lse" else ERROR):
            wrong[name] = f"{error:.2e}"
    return wrong
