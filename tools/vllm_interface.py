"""Hold flashlane's vLLM backend against vLLM's own interface, as published, without installing vLLM.

    python tools/vllm_interface.py FOLDER [--device cuda] [--out FILE.json]

FOLDER has vLLM's sources: an unpacked wheel or sdist, so that FOLDER/vllm/v1/attention/backend.py is there. That file
and the registry next to it are loaded as they are; whatever else they import of vLLM is a stand-in. Checked are

- that nothing abstract is left, and that each method takes the arguments of the one that it overrides;
- that the registry gives the class for ``CUSTOM``, and that the class passes ``validate_configuration``, but not with
  what flashlane does not have;
- batches of prefills, of decoding and of both, over a paged cache, against plain attention: in f32 on the CPU, or in
  bf16 on a GPU, where decoding is also captured in a CUDA graph and replayed with other rows, as vLLM does.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

HEADS, KV_HEADS, PAGE, BLOCKS = 4, 2, 16, 24


@dataclass(frozen=True)
class Place:
    """Where batches run: the head size, the dtype, and the largest error that is right there."""

    device: str
    size: int
    dtype: torch.dtype
    tolerance: float

    def rows(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, self.size, device=self.device).to(self.dtype)

    def integers(self, values: torch.Tensor) -> torch.Tensor:
        return values.int().to(self.device)


PLACES = {
    "cpu": Place("cpu", 16, torch.float32, 1e-4),
    "cuda": Place("cuda", 64, torch.bfloat16, 2e-2),
}
"""The largest error on a GPU is that of one bf16 rounding of results near 2."""


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], causal: bool) -> torch.Tensor:
    """Attention of one request's last queries over its keys, in f64."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if cap := options.get("logits_soft_cap"):
        scores = cap * (scores / cap).tanh()
    place = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    away = place - torch.arange(len(k), device=q.device)[None]
    if slopes := options.get("alibi_slopes"):
        slopes = torch.tensor(slopes, dtype=torch.float64, device=q.device)
        scores = scores - slopes[:, None, None] * away.abs()
    visible = away >= 0 if causal else torch.ones_like(away, dtype=torch.bool)
    if reach := options.get("sliding_window"):
        visible = visible & (away < reach) & (away > -reach)
    scores = scores.masked_fill(~visible, -torch.inf)
    sinks = options.get("sinks")
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q)[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The CUDA graph of a call, which runs once before on another stream, as vLLM's warm-up does."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def run(backend: Any, where: Place, options: dict[str, Any], causal: bool = True, permuted: bool = False) -> float:
    """Three requests: prefill, both, decoding, decoding with a row that fills a graph. The largest error of all.

    On a GPU the last batch is captured before its rows are known.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    torch.manual_seed(0)
    size = where.size
    options = {name: given.to(where.device) if name == "sinks" else given for name, given in options.items()}
    impl = backend.get_impl_cls()(HEADS, size, size**-0.5, KV_HEADS, **options)
    builder = backend.get_builder_cls()(None, ["layer"], None, torch.device(where.device))
    shape = (BLOCKS, PAGE, KV_HEADS, 2 * size) if permuted else (BLOCKS, KV_HEADS, PAGE, 2 * size)
    cache = torch.full(shape, torch.nan, dtype=where.dtype, device=where.device)
    if permuted:  # the rows of a block outside its heads, as vLLM lays it out for some kernels
        cache = cache.transpose(1, 2)
    cache[0] = 0  # vLLM's null block
    blocks = torch.randperm(BLOCKS - 1)[:12].reshape(3, 4) + 1
    cached_rows: list[list[torch.Tensor]] = [[], [], []]
    worst = 0.0
    for lengths, padding in (((5, 17, 33), 0), ((1, 9, 1), 0), ((1, 1, 1), 0), ((1, 1, 1), 1)):
        total = sum(lengths) + padding
        q, k, v = (where.rows(total, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        slots, at = [], 0
        for request, count in enumerate(lengths):
            first = len(cached_rows[request])
            slots += [int(blocks[request, row // PAGE]) * PAGE + row % PAGE for row in range(first, first + count)]
            cached_rows[request] += [torch.stack([k[at + i], v[at + i]]) for i in range(count)]
            at += count
        seq_lens = [len(rows) for rows in cached_rows] + [0] * padding
        starts = torch.tensor([0, *lengths, *[1] * padding]).cumsum(0).int()
        table = torch.cat([blocks, blocks.new_zeros(padding, 4)])
        given = CommonAttentionMetadata(
            query_start_loc=where.integers(starts), query_start_loc_cpu=starts,
            seq_lens=where.integers(torch.tensor(seq_lens)), num_reqs=3 + padding, num_actual_tokens=total,
            max_query_len=max(lengths), max_seq_len=max(seq_lens), block_table_tensor=where.integers(table),
            slot_mapping=where.integers(torch.tensor(slots + [-1] * padding)).long(), causal=causal,
        )  # fmt: skip
        batch = builder.build(0, given)
        output = torch.full((total + 2, HEADS * size), 7.0, dtype=where.dtype, device=where.device)
        if padding and where.device == "cuda":
            held = tuple(torch.zeros_like(t) for t in (q, k, v))
            graph = captured(
                lambda held=held, batch=batch, output=output: impl.forward(None, *held, cache, batch, output)
            )
            for static, new in zip(held, (q, k, v), strict=True):
                static.copy_(new)
            output.fill_(7)
            graph.replay()
        else:
            impl.forward(None, q, k, v, cache, batch, output)
        if not bool((output[total:] == 7).all()):
            return float("inf")
        at = 0
        for request, count in enumerate(lengths):
            rows = torch.stack(cached_rows[request])
            wanted = plain(q[at : at + count], rows[:, 0], rows[:, 1], options, causal)
            got = output[at : at + count].view(count, HEADS, size)
            worst = max(worst, float((got - wanted).abs().max()))
            at += count
    return worst


def encode(backend: Any, where: Place) -> float:
    """An encoder's attention, which has no cache."""
    from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

    size = where.size
    impl = backend.get_impl_cls()(HEADS, size, size**-0.5, KV_HEADS, attn_type=AttentionType.ENCODER_ONLY)
    builder = backend.get_builder_cls()(None, ["layer"], None, torch.device(where.device))
    q, k, v = (where.rows(12, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts, lengths = where.integers(torch.tensor([0, 5, 12])), where.integers(torch.tensor([5, 7]))
    table, slots = where.integers(torch.zeros(2, 1)), torch.zeros(12, device=where.device)
    given = CommonAttentionMetadata(starts, starts.cpu(), lengths, 2, 12, 7, 7, table, slots)
    output = torch.empty(12, HEADS * size, dtype=where.dtype, device=where.device)
    impl.forward(None, q, k, v, torch.empty(0), builder.build(0, given), output)
    got = output.view(12, HEADS, size)
    parts = [plain(q[a:b], k[a:b], v[a:b], {}, False) for a, b in ((0, 5), (5, 12))]
    return float((got - torch.cat(parts)).abs().max())


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "sliding window": {"sliding_window": 6},
    "softcap": {"logits_soft_cap": 2.0},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}

REFUSED = (
    "use_mla",
    "use_sparse",
    "use_mm_prefix",
    "use_per_head_quant_scales",
    "use_batch_invariant",
    "use_pcp",
    "use_dcp",
    "use_rswa",
)
"""What vLLM must hear from the backend's properties that flashlane does not have."""


def problems(folder: Path, where: Place, errors: dict[str, float]) -> Iterator[str]:
    """What is wrong, a sentence each; what was found right is printed. The batches' errors go to a dictionary."""
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
    plain = {key: given.get(key, False) for key in asked}
    yield from (f"vLLM would not take the backend: {reason}" for reason in backend.validate_configuration(**plain))
    for name in REFUSED:
        if name in plain and not backend.validate_configuration(**(plain | {name: True})):
            yield f"vLLM would take the backend with {name}, for which it has nothing"
    runs: dict[str, Callable[[], float]] = {
        title: lambda options=options: run(backend, where, options) for title, options in CASES.items()
    }
    runs["not causal"] = lambda: run(backend, where, {}, causal=False)
    runs["heads outside the rows of a block"] = lambda: run(backend, where, {}, permuted=True)
    runs["an encoder's"] = lambda: encode(backend, where)
    for title, call in runs.items():
        errors[title] = call()
        if not errors[title] <= where.tolerance:
            yield f"{title}: largest error {errors[title]:.2g}, may be {where.tolerance:g}"
        else:
            print(f"{title}: largest error {errors[title]:.1e}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help=f"vLLM's sources, such as those of {PUBLISHED}, unpacked")
    parser.add_argument("--device", choices=tuple(PLACES), default="cpu", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="write the errors there as JSON")
    known = parser.parse_args(arguments)
    wanted = known.folder / "vllm" / "v1" / "attention" / "backend.py"
    if not wanted.is_file():
        parser.error(f"folder is {known.folder}, which has no vllm/v1/attention/backend.py; unpack vLLM's wheel there")
    if known.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and torch sees no CUDA device; --device cpu runs the batches there")
    errors: dict[str, float] = {}
    found = list(problems(known.folder, PLACES[known.device], errors))
    for problem in found:
        print(f"error: {problem}")
    if known.out:
        from flashlane.bench.measure.environment import environment

        where = environment(torch.device(known.device))
        body = {
            "format": "flashlane-vllm-interface/1",
            "script": "tools/vllm_interface.py",
            "environment": where,
            "vllm": PUBLISHED,
            "seed": 0,
        }
        known.out.write_text(json.dumps(body | {"errors": errors, "problems": found}, indent=1) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
