"""Hold flashlane's vLLM backend against vLLM's own interface, as published, without installing vLLM.

    python tools/vllm_interface.py FOLDER

FOLDER has vLLM's sources: an unpacked wheel or sdist, so that FOLDER/vllm/v1/attention/backend.py is there. That file
and the registry next to it are loaded as they are; whatever else they import of vLLM is a stand-in. Checked are

- that nothing abstract is left, and that each method takes the arguments of the one that it overrides;
- that the registry gives the class for ``CUSTOM``, and that the class passes ``validate_configuration``;
- batches of prefills, of decoding and of both, over a paged cache, against plain attention, on the CPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

REAL = ("vllm.v1.attention.backend", "vllm.v1.attention.backends.registry")
PUBLISHED = "0.33.0"


class StandIn(types.ModuleType):
    """A module of vLLM of which nothing matters here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)


class Anything:
    """What such a module has under any name: called, it does nothing; as a condition of a test, it is not there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.name.startswith("get_") and self.name.endswith("_group"):
            raise AssertionError("no groups of processes")  # what vLLM raises where there are none
        return ALONE.get(self.name, Anything(self.name))

    def __getattr__(self, name: str) -> Any:
        return Anything(name)

    def __or__(self, other: object) -> object:
        return other

    __ror__ = __or__


ALONE = {"get_current_vllm_config_or_none": None, "get_dcp_world_size_and_rank": (1, 0)}
"""What vLLM's functions give outside its own processes."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The two files of a folder, and stand-ins for all other modules of vLLM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != "vllm":
            return None
        if fullname in REAL:
            where = self.folder.joinpath(*fullname.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(fullname, where)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "vllm.utils.import_utils":
            module.resolve_obj_by_qualname = resolve


def resolve(name: str) -> Any:
    module, _, leaf = name.rpartition(".")
    return getattr(importlib.import_module(module), leaf)


# --- signatures ---


def differences(ours: type) -> Iterator[str]:
    """Where a class does not take what the class that it stands for takes."""
    if left := sorted(getattr(ours, "__abstractmethods__", ())):
        yield f"{ours.__name__} does not define {', '.join(left)}"
    base = next(each for each in ours.__mro__[1:] if each.__module__ == REAL[0])
    for name, own in vars(ours).items():
        theirs = inspect.getattr_static(base, name, None)
        if theirs is None or not callable(getattr(base, name)):
            continue
        if type(own) is not type(theirs):
            yield f"{ours.__name__}.{name} is a {type(own).__name__}, and vLLM's a {type(theirs).__name__}"
        our_parameters, base_parameters = (inspect.signature(getattr(each, name)).parameters for each in (ours, base))
        common = list(our_parameters)[: len(base_parameters)]
        if common != list(base_parameters):
            yield f"{ours.__name__}.{name} takes {', '.join(our_parameters)}, and vLLM's {', '.join(base_parameters)}"
        for extra in list(our_parameters)[len(base_parameters) :]:
            if our_parameters[extra].default is inspect.Parameter.empty:
                yield f"{ours.__name__}.{name} needs {extra}, which vLLM does not give"
        for parameter in base_parameters:
            if base_parameters[parameter].default is not inspect.Parameter.empty and parameter in our_parameters:
                if our_parameters[parameter].default is inspect.Parameter.empty:
                    yield f"{ours.__name__}.{name} needs {parameter}, which vLLM may leave out"


# --- batches ---

HEADS, KV_HEADS, SIZE, PAGE, BLOCKS = 4, 2, 16, 16, 24


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], causal: bool) -> torch.Tensor:
    """Attention of one request's last queries over its keys, in f64."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5
    if cap := options.get("logits_soft_cap"):
        scores = cap * (scores / cap).tanh()
    place = torch.arange(len(q))[:, None] + len(k) - len(q)
    away = place - torch.arange(len(k))[None]
    if slopes := options.get("alibi_slopes"):
        scores = scores - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * away.abs()
    visible = away >= 0 if causal else torch.ones_like(away, dtype=torch.bool)
    if reach := options.get("sliding_window"):
        visible = visible & (away < reach) & (away > -reach)
    scores = scores.masked_fill(~visible, -torch.inf)
    sinks = options.get("sinks")
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def run(backend: Any, options: dict[str, Any], causal: bool = True, permuted: bool = False) -> float:
    """Three requests: prefill, both, decoding, decoding with a row that fills a graph. The largest error of all."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    torch.manual_seed(0)
    impl = backend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, KV_HEADS, **options)
    builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    cache = torch.full((BLOCKS, KV_HEADS, PAGE, 2 * SIZE), torch.nan)
    if permuted:  # the rows of a block outside its heads, as vLLM lays it out for some kernels
        cache = torch.full((BLOCKS, PAGE, KV_HEADS, 2 * SIZE), torch.nan).transpose(1, 2)
    cache[0] = 0  # vLLM's null block
    blocks = torch.randperm(BLOCKS - 1)[:12].reshape(3, 4) + 1
    cached_rows: list[list[torch.Tensor]] = [[], [], []]
    worst = 0.0
    for lengths, padding in (((5, 17, 33), 0), ((1, 9, 1), 0), ((1, 1, 1), 0), ((1, 1, 1), 1)):
        total = sum(lengths) + padding
        q, k, v = (torch.randn(total, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        slots, at = [], 0
        for request, count in enumerate(lengths):
            first = len(cached_rows[request])
            slots += [int(blocks[request, row // PAGE]) * PAGE + row % PAGE for row in range(first, first + count)]
            cached_rows[request] += [torch.stack([k[at + i], v[at + i]]) for i in range(count)]
            at += count
        seq_lens = [len(rows) for rows in cached_rows] + [0] * padding
        starts = torch.tensor([0, *lengths, *[1] * padding]).cumsum(0).int()
        table = torch.cat([blocks, blocks.new_zeros(padding, 4)]).int()
        given = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            num_reqs=3 + padding, num_actual_tokens=total, max_query_len=max(lengths), max_seq_len=max(seq_lens),
            block_table_tensor=table, slot_mapping=torch.tensor(slots + [-1] * padding), causal=causal,
        )  # fmt: skip
        batch = builder.build(0, given)
        output = torch.full((total + 2, HEADS * SIZE), 7.0)
        impl.forward(None, q, k, v, cache, batch, output)
        if not bool((output[total:] == 7).all()):
            return float("inf")
        at = 0
        for request, count in enumerate(lengths):
            rows = torch.stack(cached_rows[request])
            wanted = plain(q[at : at + count], rows[:, 0], rows[:, 1], options, causal)
            got = output[at : at + count].view(count, HEADS, SIZE)
            worst = max(worst, float((got - wanted).abs().max()))
            at += count
    return worst


def encode(backend: Any) -> float:
    """An encoder's attention, which has no cache."""
    from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

    impl = backend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, KV_HEADS, attn_type=AttentionType.ENCODER_ONLY)
    builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    q, k, v = (torch.randn(12, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts, lengths = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([5, 7], dtype=torch.int32)
    given = CommonAttentionMetadata(starts, starts, lengths, 2, 12, 7, 7, torch.zeros(2, 1).int(), torch.zeros(12))
    output = torch.empty(12, HEADS * SIZE)
    impl.forward(None, q, k, v, torch.empty(0), builder.build(0, given), output)
    got = output.view(12, HEADS, SIZE)
    parts = [plain(q[a:b], k[a:b], v[a:b], {}, False) for a, b in ((0, 5), (5, 12))]
    return float((got - torch.cat(parts)).abs().max())


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "sliding window": {"sliding_window": 6},
    "softcap": {"logits_soft_cap": 2.0},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}
TOLERANCE = 1e-4


def problems(folder: Path) -> Iterator[str]:
    """What is wrong, a sentence each; what was found right is printed."""
    sys.meta_path.insert(0, Finder(folder))
    from flashlane.integrations import vllm as integration

    name = integration.register_vllm()
    registry = importlib.import_module(REAL[1])
    backend = registry.AttentionBackendEnum[name].get_class()
    for ours in (backend, backend.get_impl_cls(), backend.get_builder_cls()):
        yield from differences(ours)
        print(f"{ours.__name__}: the arguments of vLLM's {ours.__mro__[1].__name__}")
    asked = inspect.signature(backend.validate_configuration).parameters
    given = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "has_sink": True}
    given |= {"device_capability": (9, 0), "attn_type": "decoder"}
    reasons = backend.validate_configuration(**{key: given.get(key, False) for key in asked})
    yield from (f"vLLM would not take the backend: {reason}" for reason in reasons)
    for title, options in CASES.items():
        yield from judged(title, run(backend, options))
    yield from judged("not causal", run(backend, {}, causal=False))
    yield from judged("heads outside the rows of a block", run(backend, {}, permuted=True))
    yield from judged("an encoder's", encode(backend))


def judged(title: str, error: float) -> Iterator[str]:
    if not error <= TOLERANCE:
        yield f"{title}: largest error {error:.2g}, may be {TOLERANCE:g}"
    else:
        print(f"{title}: largest error {error:.1e}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help=f"vLLM's sources, such as those of {PUBLISHED}, unpacked")
    known = parser.parse_args(arguments)
    wanted = known.folder / "vllm" / "v1" / "attention" / "backend.py"
    if not wanted.is_file():
        parser.error(f"folder is {known.folder}, which has no vllm/v1/attention/backend.py; unpack vLLM's wheel there")
    found = list(problems(known.folder))
    for problem in found:
        print(f"error: {problem}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
