"""Run FlashAttention-2's own test module, unmodified, on flashlane.

    python tools/fa2_tests.py PATH/test_flash_attn.py [--sample N] [--seed S] [--on-cpu] [pytest options]

The module imports ``flash_attn``; here those names are modules whose functions are flashlane's. It has hundreds of
thousands of cases: ``--sample N`` draws N of each of its functions, without making the others. See
docs/flash-attention-2-tests.md.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

import flashlane
from flashlane.api.attn_probs import block_of_keys
from flashlane.api.rotary import rotate
from flashlane.core.problem import arch_of

FUNCTIONS = [name for name in flashlane.__all__ if name.startswith("flash_attn_")]


# --- what the module imports beside the functions ---


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Rows ``(total, …)`` of ``(b, s, …)`` where the mask says so, their indices, cu_seqlens, longest, and lengths."""
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = every.sum(-1, dtype=torch.int32), attention_mask.sum(-1, dtype=torch.int32)
    indices = every.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()), used


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of :func:`unpad_input`, with zeros elsewhere."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Rows ``(b, s, h, d)`` rotated for the positions ``seqlen_offsets + row``."""
    rows = torch.arange(x.shape[1], device=x.device)
    offsets = seqlen_offsets[:, None] if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets
    turned = rotate(x, cos, sin, offsets + rows, interleaved=interleaved)
    return x.copy_(turned) if inplace else turned


def get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    return block_of_keys(head_dim, is_dropout, is_causal, arch_of(torch.device(device)))


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
    """FlashAttention-2's private forward of packed sequences, as far as its tests call it."""
    if num_splits > 1:
        raise RuntimeError("num_splits > 1 is not supported for varlen")
    if seqused_k is not None:
        cu_seqlens_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    out, lse, s_dmask = flashlane.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        alibi_slopes,
        return_attn_probs=True,
        block_table=block_table,
    )
    return out, lse, s_dmask, None


def with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``flash_attn_with_kvcache``, which for pages waits for the GPU to check the lengths, as FlashAttention-2 does.

    flashlane does not wait: on a GPU, lengths past the pages count as full.
    """
    table, lengths = kwargs.get("block_table"), kwargs.get("cache_seqlens")
    if table is not None and isinstance(lengths, torch.Tensor):
        new = 0 if kwargs.get("k") is None else kwargs["k"].shape[1]
        capacity = table.shape[1] * k_cache.shape[1]
        if int(lengths.max()) + new > capacity:
            raise RuntimeError(f"cache_seqlens is up to {int(lengths.max())} + {new}; block_table holds {capacity}")
    return flashlane.flash_attn_with_kvcache(q, k_cache, v_cache, *args, **kwargs)


def modules() -> dict[str, types.ModuleType]:
    """The modules of FlashAttention-2 that its tests import, with flashlane's functions in them."""
    functions: dict[str, Callable[..., Any]] = {name: getattr(flashlane, name) for name in FUNCTIONS}
    functions["flash_attn_with_kvcache"] = with_kvcache
    private = {
        "_get_block_size_n": get_block_size_n,
        "_flash_attn_varlen_forward": varlen_forward,
        # True where there is no CUDA extension: a test of that extension's raw functions is skipped by it.
        "USE_TRITON_ROCM": True,
    }
    contents = {
        "flash_attn": functions,
        "flash_attn.flash_attn_interface": {**functions, **private},
        "flash_attn.bert_padding": {"pad_input": pad_input, "unpad_input": unpad_input},
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {"apply_rotary_emb": apply_rotary_emb},
    }
    made = {name: types.ModuleType(name) for name in contents}
    for name, module in made.items():
        vars(module).update(contents[name])
        module.__path__ = []
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, module)
    return made


# --- fewer cases ---


class Sample:
    """A pytest plugin that draws so many cases of each test function from the product of its parameters."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        marks = [mark for mark in metafunc.definition.own_markers if mark.name == "parametrize"]
        axes = [_axis(mark) for mark in marks]
        total = math.prod(len(values) for _, values in axes)
        if not axes or total <= self.count:
            return
        draw = random.Random(f"{self.seed} {metafunc.definition.name}")
        names = [name for axis, _ in axes for name in axis]
        cases = [_case(axes, number) for number in sorted(draw.sample(range(total), self.count))]
        metafunc.definition.own_markers[:] = [m for m in metafunc.definition.own_markers if m not in marks]
        metafunc.parametrize(names, cases, ids=["-".join(map(str, case)) for case in cases])


def _axis(mark: pytest.Mark) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Names and values of one ``parametrize``."""
    names, values = mark.args[:2]
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
        if len(names) == 1:
            return names, [(value,) for value in values]
    return list(names), [tuple(value) for value in values]


def _case(axes: list[tuple[list[str], list[tuple[Any, ...]]]], number: int) -> list[Any]:
    """Case ``number`` of the product, without making the product."""
    chosen: list[Any] = []
    for _, values in axes:
        number, at = divmod(number, len(values))
        chosen += values[at]
    return chosen


# --- without a GPU ---


class OnCpu(TorchFunctionMode):
    """What is asked of "cuda" is done on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _pretend() -> list[Any]:
    """What the module asks of a GPU that is not there."""
    memory = types.SimpleNamespace(total_memory=1 << 37)
    return [
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (8, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: memory),
        OnCpu(),
    ]


# --- pytest, whose workers (``-n 8``) load this file as a plugin too ---


def _add_options(add: Callable[..., Any]) -> None:
    add("--sample", type=int, default=None, metavar="N", help="run N cases of each test function")
    add("--seed", type=int, default=0, help="of the sample")
    add("--on-cpu", action="store_true", help="run on the CPU what the module asks of a GPU; slow")


def pytest_addoption(parser: pytest.Parser) -> None:
    _add_options(parser.getgroup("flash-attention-2").addoption)


def pytest_configure(config: pytest.Config) -> None:
    sys.modules.update(modules())
    if config.getoption("--sample") is not None:
        config.pluginmanager.register(Sample(config.getoption("--sample"), config.getoption("--seed")))
    for context in _pretend() if config.getoption("--on-cpu") else []:
        context.__enter__()
        config.add_cleanup(functools.partial(context.__exit__, None, None, None))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path, help="FlashAttention-2's tests/test_flash_attn.py")
    _add_options(parser.add_argument)
    known, rest = parser.parse_known_args(arguments)
    if not known.module.is_file():
        parser.error(f"module is {known.module}, which is not a file; download FlashAttention-2's test module")
    if known.sample is not None and known.sample < 1:
        parser.error(f"--sample is {known.sample}; it must be at least 1")
    sys.path.insert(0, str(Path(__file__).parent))
    # Its own root, so that no configuration or conftest of this repository is in force.
    options = ["-p", "fa2_tests", str(known.module), f"--rootdir={known.module.parent}", "-c", "/dev/null"]
    options += ["-p", "no:cacheprovider", f"--seed={known.seed}"]
    options += [f"--sample={known.sample}"] if known.sample is not None else []
    options += ["--on-cpu"] if known.on_cpu else []
    return int(pytest.main([*options, *rest]))


if __name__ == "__main__":
    sys.exit(main())
