"""Compile kernels before their first call, in parallel and without a GPU.

The kernels are those that ``auto`` chooses for a list of problems. Triton compiles its kernels at their first call, so
nothing is compiled here for problems that these run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flashlane import jit
from flashlane.core import dispatch
from flashlane.core.arch import ELEMENTS
from flashlane.core.files import parse_json
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import CompiledKernel, Kernel
from flashlane.integrations.transformers import modifiers_of
from flashlane.jit import Compiled, KernelSource, ToolchainError, cache, compiler
from flashlane.jit.cache import DiskCache
from flashlane.kernels.hopper import flex
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.flex.problem import MAX_HEAD_DIM

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Lengths at which a model's kernels are looked up."""
BATCHES = (1, 4, 16)
LEAST = {
    "hidden_size": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1, "max_position_embeddings": 1,
    "sliding_window": 0,
}  # fmt: skip
"""The whole numbers of a model's configuration that are read here, with the least that each may be."""
MODEL_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def sources_of(problem: AttentionProblem, kernel: Kernel | None = None) -> tuple[KernelSource, ...]:
    """The sources that are compiled when a kernel (None: the one that ``auto`` chooses) runs a problem.

    With ``needs_grad``, the kernels of the backward that follows are among them.

    Raises:
        NotImplementedError: no kernel can run it.
    """
    kernel = dispatch.select(problem) if kernel is None else kernel
    kernels = [kernel, dispatch.select_backward(problem, kernel)] if problem.needs_grad else [kernel]
    found = [each.sources(problem) for each in kernels if isinstance(each, CompiledKernel)]
    return tuple(source for sources in found for source in sources)


def sources_of_lists(problem: AttentionProblem) -> tuple[KernelSource, ...]:
    """The kernels that ``flex_attention`` runs for lists of blocks without a score, of a problem's head dims and type.

    There are none where Hopper's kernels take no such problem. They are the same for all masks and lengths.
    """
    if problem.arch != ARCH or problem.dtype_name not in ELEMENTS:
        return ()
    dims = problem.head_dim, problem.head_dim_v
    if problem.varlen or max(dims) > MAX_HEAD_DIM or any(dim % 8 for dim in dims):
        return ()
    return flex.sources_of_lists(problem)


@dataclass
class Built:
    """The result of :func:`compile_all`."""

    compiled: list[Compiled] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """A line for each kernel that did not compile."""
    lost: int = 0
    """How many kernels neither the cache nor an installed package has: the disk was full, or the cache's limit."""

    @property
    def fresh(self) -> int:
        """How many kernels were compiled rather than found in the cache."""
        return sum(1 for one in self.compiled if not one.cached)

    @property
    def bytes(self) -> int:
        """The total size of the cubins, in bytes."""
        return sum(len(one.cubin) for one in self.compiled)


def compile_all(
    jobs: Iterable[tuple[KernelSource, str]],
    on_each: Callable[[], None] = lambda: None,
    workers: int | None = None,
    alone: bool = False,
) -> Built:
    """Compile kernels into the disk cache, in parallel threads.

    Args:
        jobs: kernels with their architectures.
        on_each: called after each kernel.
        workers: the number of threads; by default that of the cores.
        alone: the cache gets what an installed package of cubins has, too.
    """
    built = Built()
    with cache.without_installed() if alone else contextlib.nullcontext():
        _in_threads(jit.compile, jobs, built.compiled, built.wrong, on_each, workers)
        installed = cache.installed()
    stores = [cache.default()] if installed is None else [cache.default(), installed.store]
    built.lost = sum(1 for one in built.compiled if not any(one.key in store for store in stores))
    return built


def store_ptx(
    jobs: Iterable[tuple[KernelSource, str]], store: DiskCache, on_each: Callable[[], None] = lambda: None
) -> tuple[int, list[str]]:
    """Put the PTX of kernels into a folder for a wheel of flashlane (``jit.compiler.ptx_entry``).

    Args:
        jobs, on_each: as for :func:`compile_all`.
        store: ``jit.cache.ptx(folder)``.

    Returns:
        How many kernels there are now, and a line for each that has no PTX. The folder may have had no room for others.
    """
    entries: list[tuple[str, bytes]] = []
    wrong: list[str] = []
    _in_threads(compiler.ptx_entry, jobs, entries, wrong, on_each, None)
    for entry in entries:
        store.put(*entry)
    return sum(1 for key, _ in entries if key in store), wrong


def _in_threads(
    work: Callable[[KernelSource, str], Any],
    jobs: Iterable[tuple[KernelSource, str]],
    results: list[Any],
    wrong: list[str],
    on_each: Callable[[], None],
    workers: int | None,
) -> None:
    """Do the work of each job in one of the threads, and collect the results and a line for each failure."""
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        started = {pool.submit(work, *job): job for job in dict.fromkeys(jobs)}
        try:
            for each in as_completed(started):
                source, arch = started[each]
                try:
                    results.append(each.result())
                except ToolchainError:  # no fault of this kernel: all others would have the same line
                    raise
                except Exception as error:  # every failure becomes a line of the report
                    words = " ".join(str(error).splitlines()[:2])
                    wrong.append(f"{source.entry} for {arch}: {words}")
                on_each()
        except BaseException:  # Ctrl-C waits for the jobs under way, and not for those that wait
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def read_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` of a transformers model, from the file or its folder; its ``text_config`` if it has one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, or lacks the sizes of attention, or has sizes that no model can have.
    """
    path = path / "config.json" if path.is_dir() else path
    given = f"--model is {str(path)!r}"
    if not path.is_file():
        raise FileNotFoundError(f"{given}, which is not there; it may be a config.json or its folder")
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{given}, which is not valid JSON: {error}") from None
    config = config.get("text_config") or config if isinstance(config, dict) else config
    if not isinstance(config, dict):
        raise ValueError(f"{given}, which holds no JSON object")
    missing = [name for name in ("hidden_size", "num_attention_heads") if config.get(name) is None]
    if missing:
        raise ValueError(f"{given}, which has no {' and no '.join(missing)}")
    for name, least in LEAST.items():
        value = config.get(name)
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{given}, whose {name} is {value!r}; it may be a whole number from {least}")
    size, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        raise ValueError(f"{given}, whose num_key_value_heads is {kv_heads}; it may be a divisor of {heads}")
    if not config.get("head_dim") and size < heads:
        raise ValueError(f"{given}, whose hidden_size is {size}; it may be {heads}, the number of heads, or more")
    try:
        modifiers_of(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{given}, whose {error}") from None
    return config


def problems_of_model(
    config: Mapping[str, Any],
    arch: str,
    *,
    batches: Sequence[int] = BATCHES,
    dtype: torch.dtype | None = None,
    causal: bool = True,
    backward: bool = True,
) -> Iterator[AttentionProblem]:
    """The problems of a model's layers: dense sequences, packed ones, and one query token over keys or a cache.

    Sequences and caches have :data:`LENGTHS`; those beyond ``max_position_embeddings`` are left out.

    Args:
        config: see :func:`read_config`.
        arch: the GPU's architecture.
        batches: sequences in a call.
        dtype: None takes the configuration's dtype, or bf16 where that is f32, since such models are run in bf16.
        causal: whether a token sees only itself and the tokens before it.
        backward: whether problems with gradients are included.
    """
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    own = MODEL_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."))
    dtype = dtype or (torch.bfloat16 if own in (None, torch.float32) else own)
    longest = config.get("max_position_embeddings") or max(LENGTHS)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    windows = [(-1, 0 if causal else -1)] + ([(window - 1, 0 if causal else window - 1)] if window else [])
    within = [n for n in LENGTHS if n <= longest] or [min(LENGTHS)]
    modifiers = modifiers_of(config)
    for batch in batches:
        for n in within:
            for each in windows:
                prompt = AttentionProblem(
                    batch, heads, kv_heads, n, n, head_dim, head_dim, dtype, head_dim**-0.5, *each, arch=arch,
                    **modifiers,
                )  # fmt: skip
                for one in (prompt, replace(prompt, varlen=True)):
                    yield one
                    if backward:
                        yield replace(one, needs_grad=True)
                if causal:
                    yield replace(prompt, seqlen_q=1)
                    yield replace(prompt, seqlen_q=1, seqused_k=True)
