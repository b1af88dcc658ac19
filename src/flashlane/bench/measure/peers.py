"""The peers: torch's own attention in every backend, and the other libraries where they are installed.

A peer turns the bench's tensors (``(b, s, h, d)``) into whatever its library wants *before* it is timed (views, not
copies), so that its own call alone is measured. :data:`PEERS` is the table; adding a peer is adding an entry.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import runpy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from flashlane.bench.measure import peers_flashinfer as flashinfer
from flashlane.core import aliases
from flashlane.core.modifiers import NUMBERS, numbers_for
from flashlane.core.problem import ARGUMENTS, FEATURES, AttentionProblem, Inputs
from flashlane.kernels.features import BIAS, PAGED, VARLEN, is_cached
from flashlane.reference.masks import sequence_batches

Call = Callable[[], torch.Tensor]
Reason = str | None


def _always(_: object) -> Reason:
    return None


@dataclass(frozen=True)
class Peer:
    """An implementation of others that the bench compares with."""

    tag: str
    summary: str
    prepare: Callable[[AttentionProblem, Inputs], Call]
    """A call without arguments that gives the output, ``(b, sq, h, dv)``."""
    available: Callable[[torch.device], Reason] = _always
    """Gives the reason that the machine cannot run it (not installed, no such device), or None."""
    supports: Callable[[AttentionProblem], Reason] = _always
    """Gives the reason that it cannot run a problem, as far as that is known before trying, or None."""
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Entered once around a round of calls, outside the timed region."""


def unfused(problem: AttentionProblem, inputs: Inputs, mask: torch.Tensor | None) -> torch.Tensor:
    """softmax(scale·QKᵀ + mask)·V as separate torch operations in the problem's dtype."""
    q, k, v = heads_first(problem, inputs)
    scores = torch.matmul(q, k.transpose(-2, -1)) * problem.scale
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    if may_have_blind_rows(problem):
        weights = torch.nan_to_num(weights)
    return torch.matmul(weights, v).transpose(1, 2)


def heads_first(problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as ``(b, h, s, d)`` views, key/value heads expanded to the query heads (a copy only for GQA)."""
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    if problem.group > 1:
        k, v = (t.repeat_interleave(problem.group, dim=1) for t in (k, v))
    return q, k, v


def additive_mask(problem: AttentionProblem, inputs: Inputs) -> torch.Tensor | None:
    """The visibility rule and the bias of a problem as one additive mask, or None when there is neither."""
    band = next(sequence_batches(problem, inputs)).band
    rows, keys = range(problem.seqlen_q), range(problem.seqlen_k)
    bias = None if inputs.bias is None else inputs.bias.to(problem.dtype)
    if band.full(rows, keys):
        return bias
    offsets = band.offsets(rows, keys, inputs.q.device)
    hidden = offsets > band.right if band.right >= 0 else torch.zeros_like(offsets, dtype=torch.bool)
    if band.left >= 0:
        hidden |= offsets < -band.left
    mask = torch.zeros(hidden.shape, dtype=problem.dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
    return mask if bias is None else mask + bias


def may_have_blind_rows(problem: AttentionProblem) -> bool:
    """Whether some query may see no key: softmax gives NaN there, and the convention is 0."""
    masked = problem.window_left >= 0 or problem.window_right >= 0
    return problem.bias or problem.seqlen_k == 0 or (masked and not all(map(problem.visible_keys, _ends(problem))))


def _ends(problem: AttentionProblem) -> tuple[int, ...]:
    return (0, problem.seqlen_q - 1) if problem.seqlen_q else ()


def _unfused(problem: AttentionProblem, inputs: Inputs) -> Call:
    mask = additive_mask(problem, inputs)
    return lambda: unfused(problem, inputs, mask)


def _beyond(problem: AttentionProblem, *able: str) -> Reason:
    """The reason that the bench does not give a peer a feature of a problem; None when all features are in ``able``."""
    found = next((name for name in FEATURES if name not in able and getattr(problem, name)), None)
    return None if found is None else f"the bench does not give it {found}"


def _windowed(problem: AttentionProblem) -> bool:
    """Whether the mask is more than a causal one."""
    return problem.window_left >= 0 or problem.window_right > 0


def _plain_only(problem: AttentionProblem) -> Reason:
    """The reason of a peer that is given no mask but a causal one, or None."""
    if _windowed(problem):
        return "the bench does not give it windows"
    return _beyond(problem)


def _half_only(problem: AttentionProblem) -> Reason:
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {problem.dtype_name}; it takes f16 and bf16"
    return _plain_only(problem)


def _other_alignment(problem: AttentionProblem) -> Reason:
    """The reason of a peer whose causal masks and windows are bottom-right aligned, or None."""
    masked = problem.window_left >= 0 or problem.window_right >= 0
    unlike = problem.varlen or is_cached(problem) or problem.seqlen_q != problem.seqlen_k
    if masked and problem.alignment != "bottom-right" and unlike:
        return "its masks are bottom-right aligned"
    return None


def _bottom_right_half(problem: AttentionProblem) -> Reason:
    return _other_alignment(problem) or _half_only(problem)


@functools.cache
def _shared_modifiers() -> tuple[str, ...]:
    """The score modifiers that FlashAttention has: those in the signature that flashlane takes over from it."""
    from flashlane.integrations.flash_attn.fa3 import flash_attn_func

    names = inspect.signature(flash_attn_func).parameters
    return tuple(name for name in NUMBERS if name in names)


def _flash_attn_supports(problem: AttentionProblem, *of_cache: str) -> Reason:
    """FlashAttention-2, -3 and -4 take windows, packed sequences and the modifiers of :func:`_shared_modifiers`.

    ``of_cache`` are the features of caches that one of them takes.
    """
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {problem.dtype_name}; it takes f16 and bf16"
    if problem.varlen and is_cached(problem):
        return "the bench does not give it packed queries of a cache"
    return _other_alignment(problem) or _beyond(problem, *VARLEN, *of_cache, *_shared_modifiers())


# --- torch's scaled_dot_product_attention, one entry a backend ---


def _sdpa(problem: AttentionProblem, inputs: Inputs) -> Call:
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    # torch's own causal mask is top-left aligned, which makes no difference when the lengths agree.
    own_causal = problem.causal and problem.window_left < 0 and not problem.bias and _aligned_with_torch(problem)
    keywords = {"scale": problem.scale, "is_causal": own_causal}
    if not own_causal:
        keywords["attn_mask"] = additive_mask(problem, inputs)
    if problem.group > 1:
        keywords["enable_gqa"] = True
    blind = may_have_blind_rows(problem)

    def call() -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, **keywords).transpose(1, 2)
        return torch.nan_to_num(out) if blind else out

    return call


def _aligned_with_torch(problem: AttentionProblem) -> bool:
    return problem.alignment == "top-left" or problem.seqlen_q == problem.seqlen_k


def _sdpa_supports(problem: AttentionProblem) -> Reason:
    return _without_lengths(problem) or _bias_only(problem)


def _bias_only(problem: AttentionProblem) -> Reason:
    return _beyond(problem, *BIAS)


def _without_lengths(problem: AttentionProblem) -> Reason:
    return "SDPA takes no lengths of sequences and no pages" if is_cached(problem) else None


def _cudnn_supports(problem: AttentionProblem) -> Reason:
    return _nondeterministic(problem) or _sdpa_maskless(problem)


def _nondeterministic(problem: AttentionProblem) -> Reason:
    if problem.deterministic and problem.needs_grad:
        return "torch makes its gradients deterministic by a switch of the process, which the bench leaves as it is"
    return None


def _sdpa_maskless(problem: AttentionProblem) -> Reason:
    if is_cached(problem):
        return _without_lengths(problem)
    if _windowed(problem) or problem.bias:
        return "it takes no attn_mask"
    if problem.causal and not _aligned_with_torch(problem):
        return "it takes no attn_mask, and torch's is_causal is top-left aligned"
    return _half_only(problem)


def _flash_supports(problem: AttentionProblem) -> Reason:
    if problem.arch is None:  # torch's CPU kernel takes masks and every dtype
        return _sdpa_supports(problem)
    reason = _nondeterministic(problem)
    if reason is None and _needs_operator(problem):
        able = ("seqused_k", *PAGED)
        return _flash_attn_supports(problem, *able) or _beyond(problem, *VARLEN, *able) or _operator_pages(problem)
    if problem.causal and problem.alignment == "bottom-right":  # reached through causal_lower_right
        return reason or _half_only(problem)
    return reason or _sdpa_maskless(problem)


def _flash(problem: AttentionProblem, inputs: Inputs) -> Call:
    if problem.arch is not None and _needs_operator(problem):
        return _flash_operator(problem, inputs)
    if problem.arch is None or not problem.causal or _aligned_with_torch(problem):
        return _sdpa(problem, inputs)
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    mask = causal_lower_right(problem.seqlen_q, problem.seqlen_k)
    keywords = {"attn_mask": mask, "scale": problem.scale, **({"enable_gqa": True} if problem.group > 1 else {})}
    return lambda: F.scaled_dot_product_attention(q, k, v, **keywords).transpose(1, 2)


OPERATOR_PAGE = 256
"""The operator takes pages of multiples of so many rows."""


def _needs_operator(problem: AttentionProblem) -> bool:
    """Whether a problem has what SDPA has no arguments for, but the operator under its flash backend does."""
    return problem.varlen or _windowed(problem) or is_cached(problem)


def _operator_pages(problem: AttentionProblem) -> Reason:
    """The reason that the operator cannot read the pages of a problem, or None."""
    if not problem.paged:
        return None
    operator = torch.ops.aten._flash_attention_forward.default
    if all(argument.name != "block_table" for argument in operator._schema.arguments):
        return f"a cache in pages, which torch {torch.__version__} does not take; 2.13 does"
    rows = getattr(problem, *PAGED)
    return f"pages of {rows} rows; it takes multiples of {OPERATOR_PAGE}" if rows % OPERATOR_PAGE else None


def _flash_operator(problem: AttentionProblem, inputs: Inputs) -> Call:
    """A call of the operator under SDPA's flash backend; torch.nn.attention.varlen calls it too.

    It reads lengths in a cache with packed sequences only. So the queries of a cache are packed, and each sequence
    has its whole capacity, of which ``seqused_k`` are in use.
    """
    sides = {
        f"window_size_{side}": width
        for side, width in (("left", problem.window_left), ("right", problem.window_right))
        if width >= 0
    }
    own_causal = problem.causal and problem.window_left < 0
    longest = problem.seqlen_q, problem.seqlen_k
    ends, (q, k, v) = (inputs.cu_seqlens_q, inputs.cu_seqlens_k), (inputs.q, inputs.k, inputs.v)
    keywords = {"scale": problem.scale, **({} if own_causal else sides)}
    if is_cached(problem):
        steps = torch.arange(problem.batch + 1, dtype=torch.int32, device=q.device)
        ends, keywords["seqused_k"] = tuple(steps * length for length in longest), inputs.seqused_k
        if problem.paged:
            q, keywords["block_table"] = q.flatten(0, 1), inputs.block_table
        else:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    operator = torch.ops.aten._flash_attention_forward

    def call() -> torch.Tensor:
        return operator(q, k, v, *ends, *longest, 0.0, own_causal, False, **keywords)[0]

    return (lambda: call().view_as(inputs.q)) if is_cached(problem) else call


def _cuda_only(device: torch.device) -> Reason:
    return None if device.type == "cuda" else "it needs a CUDA device"


# --- libraries of others ---


def _installed(module: str) -> Callable[[torch.device], Reason]:
    """Whether a module can be found, on a CUDA device."""

    def available(device: torch.device) -> Reason:
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        if found is None:
            return "not installed"
        if found.origin == "flashlane":
            return "flashlane is installed under that name (flashlane.integrations.flash_attn)"
        return _cuda_only(device)

    return available


def _first(result: object) -> torch.Tensor:
    return result[0] if isinstance(result, tuple | list) else result


@dataclass(frozen=True)
class _CacheCall:
    """How a version of FlashAttention takes a cache."""

    function: str
    names: Mapping[str, str]
    """Its names of the tensors that say where keys lie, by ours."""

    def supports(self, problem: AttentionProblem) -> Reason:
        of_cache = [ARGUMENTS[name].flag for name in self.names if ARGUMENTS[name].flag]
        return _flash_attn_supports(problem, *of_cache, *(PAGED if "block_table" in self.names else ()))

    def tensors(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {name: t for ours, name in self.names.items() if (t := getattr(inputs, ours)) is not None}


_OF_CACHES = {"seqused_k": "cache_seqlens", "batch_idx": "cache_batch_idx", "leftpad_k": "cache_leftpad"}
_FA2 = _CacheCall("flash_attn_with_kvcache", {**_OF_CACHES, "block_table": "block_table"})
_FA3 = _CacheCall("flash_attn_with_kvcache", {**_OF_CACHES, "block_table": "page_table"})
_FA4 = _CacheCall("flash_attn_varlen_func", {"seqused_k": "seqused_k", "block_table": "page_table"})


def _flash_attn(
    module: str, caches: _CacheCall, unbounded: int | None = -1
) -> Callable[[AttentionProblem, Inputs], Call]:
    """FlashAttention-2, -3 and -4 name their functions alike; ``unbounded`` is a window's side that has no bound."""

    def prepare(problem: AttentionProblem, inputs: Inputs) -> Call:
        library = importlib.import_module(module)
        keywords = {"softmax_scale": problem.scale, "causal": problem.causal}
        if _windowed(problem):
            sides = (problem.window_left, problem.window_right)
            keywords["window_size"] = tuple(unbounded if side < 0 else side for side in sides)
        function = library.flash_attn_func
        keywords |= numbers_for(problem)
        if is_cached(problem):  # it has no gradients that could be deterministic
            function = getattr(library, caches.function)
            keywords |= caches.tensors(inputs)
        elif problem.deterministic:
            keywords["deterministic"] = True
        if problem.varlen:
            function = library.flash_attn_varlen_func
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            keywords |= {name: getattr(inputs, name) for name in names}
        return lambda: _first(function(inputs.q, inputs.k, inputs.v, **keywords))

    return prepare


def _flex(problem: AttentionProblem, inputs: Inputs) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # after eight shapes dynamo would run the eager version, and it would be timed
    if problem.needs_grad:  # a backward that is timed alone keeps its graph, which donated buffers would not outlive
        import torch._functorch.config as functorch

        functorch.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    batched = (t.unsqueeze(0) if problem.varlen else t for t in (inputs.q, inputs.k, inputs.v))
    q, k, v = (t.transpose(1, 2) for t in batched)
    mask = None
    if problem.varlen or problem.window_left >= 0 or problem.window_right >= 0:
        visible = _flex_mask(problem, inputs)
        mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=q.device)
    keywords = {"scale": problem.scale, "block_mask": mask, "enable_gqa": problem.group > 1}

    def call() -> torch.Tensor:
        out = compiled(q, k, v, **keywords).transpose(1, 2)
        return out[0] if problem.varlen else out

    return call


def _flex_mask(problem: AttentionProblem, inputs: Inputs) -> Callable[..., torch.Tensor]:
    """The mask function of a problem; packed sequences are one batch entry, and each sees its own keys alone."""
    left, right, shift = problem.window_left, problem.window_right, problem.shift
    sequences: list[torch.Tensor] = []
    if problem.varlen:
        ends = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        lengths = len(inputs.q), len(inputs.k)
        sequences = [
            torch.bucketize(torch.arange(length, device=end.device), end[1:], right=True)
            for length, end in zip(lengths, ends, strict=True)
        ]
        # Where the key lies that a row's query is aligned with, relative to the row.
        first_q, first_k = (end[:-1] for end in ends)
        aligned = first_k - first_q
        if problem.alignment == "bottom-right":
            aligned = aligned + ends[1].diff() - ends[0].diff()
        shift = torch.nn.functional.pad(aligned, (0, 1))[
            sequences[0]
        ]  # rows after the last sequence belong to no sequence

    def visible(_b: torch.Tensor, _h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        middle = i + (shift[i] if problem.varlen else shift)
        seen = [j <= middle + right] if right >= 0 else []
        seen += [j >= middle - left] if left >= 0 else []
        seen += [sequences[0][i] == sequences[1][j]] if problem.varlen else []
        return functools.reduce(torch.logical_and, seen)

    return visible


def _flex_supports(problem: AttentionProblem) -> Reason:
    return _beyond(problem, *VARLEN)


def _xformers(problem: AttentionProblem, inputs: Inputs) -> Call:
    ops = importlib.import_module("xformers.ops")
    mask = None
    if problem.causal:
        fmha = importlib.import_module("xformers.ops.fmha.attn_bias")
        bottom = problem.alignment == "bottom-right" and problem.seqlen_q != problem.seqlen_k
        mask = fmha.LowerTriangularFromBottomRightMask() if bottom else fmha.LowerTriangularMask()
    q, k, v = inputs.q, inputs.k, inputs.v
    if problem.group > 1:
        q = q.unflatten(2, (problem.kv_heads, problem.group))
        k, v = (t.unsqueeze(3).expand(*t.shape[:3], problem.group, t.shape[3]) for t in (k, v))

    def call() -> torch.Tensor:
        out = ops.memory_efficient_attention(q, k, v, attn_bias=mask, scale=problem.scale)
        return out.flatten(2, 3) if problem.group > 1 else out

    return call


def _ffpa(problem: AttentionProblem, inputs: Inputs) -> Call:
    # Without this ffpa-attn runs SDPA for sizes that its kernels do not take, and SDPA would be timed.
    os.environ["FFPA_FORCE_NO_SDPA_FALLBACK"] = "1"
    function = importlib.import_module("ffpa_attn").ffpa_attn_func
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    keywords = {"scale": problem.scale, "is_causal": problem.causal, "enable_gqa": problem.group > 1}
    return lambda: _first(function(q, k, v, **keywords)).transpose(1, 2)


def _ffpa_supports(problem: AttentionProblem) -> Reason:
    if problem.causal and problem.seqlen_k < problem.seqlen_q:
        return "causal with more queries than keys"
    return _bottom_right_half(problem)


def _flashinfer_supports(problem: AttentionProblem) -> Reason:
    if problem.needs_grad:
        return "it has no backward"
    if problem.window_right > 0:
        return "a window that ends after the query; it has window_left only"
    if is_cached(problem) and (problem.head_dim % flashinfer.PAGED_COLUMNS or problem.head_dim_v != problem.head_dim):
        return f"head dims of a cache that are not equal multiples of {flashinfer.PAGED_COLUMNS}"
    return _flash_attn_supports(problem, "seqused_k", *PAGED)


def _backend(backend: SDPBackend) -> Callable[[], contextlib.AbstractContextManager[object]]:
    return functools.partial(sdpa_kernel, backend)


PEERS: tuple[Peer, ...] = (
    Peer("(unfused)", "softmax(QKᵀ)V as torch operations, in the problem's dtype", _unfused, supports=_bias_only),
    Peer(
        "(sdpa-math)",
        "torch SDPA, math backend",
        _sdpa,
        supports=_sdpa_supports,
        context=_backend(SDPBackend.MATH),
    ),
    Peer(
        "(sdpa-efficient)",
        "torch SDPA, memory-efficient backend (xFormers' CUTLASS kernel)",
        _sdpa,
        available=_cuda_only,
        supports=_sdpa_supports,
        context=_backend(SDPBackend.EFFICIENT_ATTENTION),
    ),
    Peer(
        "(flash)",
        "torch SDPA, flash backend: FlashAttention-2 on a GPU, torch's own CPU kernel without one",
        _flash,
        supports=_flash_supports,
        context=_backend(SDPBackend.FLASH_ATTENTION),
    ),
    Peer(
        "(cudnn)",
        "torch SDPA, cuDNN backend",
        _sdpa,
        available=_cuda_only,
        supports=_cudnn_supports,
        context=_backend(SDPBackend.CUDNN_ATTENTION),
    ),
    Peer(
        "(flash-attn-2)",
        "Dao-AILab flash-attn 2",
        _flash_attn("flash_attn", _FA2),
        available=_installed("flash_attn.flash_attn_interface"),
        supports=_FA2.supports,
    ),
    Peer(
        "(flash-attn-3)",
        "Dao-AILab flash-attn 3 (hopper)",
        _flash_attn("flash_attn_interface", _FA3),
        available=_installed("flash_attn_interface"),
        supports=_FA3.supports,
    ),
    Peer(
        "(flash-attn-4)",
        "Dao-AILab flash-attn 4 (CuTe DSL)",
        _flash_attn("flash_attn.cute", _FA4, unbounded=None),
        available=_installed("flash_attn.cute"),
        supports=_FA4.supports,
    ),
    Peer("(flex)", "torch FlexAttention, compiled", _flex, available=_cuda_only, supports=_flex_supports),
    Peer(
        "(xformers)",
        "xFormers memory_efficient_attention",
        _xformers,
        available=_installed("xformers.ops"),
        supports=_plain_only,
    ),
    Peer(
        "(ffpa)",
        "ffpa-attn, its own kernels only (no SDPA fallback)",
        _ffpa,
        available=_installed("ffpa_attn"),
        supports=_ffpa_supports,
    ),
    Peer(
        "(flashinfer)",
        "FlashInfer: prefill of a ragged batch, decode and prefill of pages (its schedule made before)",
        flashinfer.prepare,
        available=_installed("flashinfer"),
        supports=_flashinfer_supports,
    ),
)


def peer_tags() -> tuple[str, ...]:
    """The tags of all peers."""
    return tuple(peer.tag for peer in PEERS)


def select_peers(text: str) -> tuple[Peer, ...]:
    """The peers that ``--peers`` asks for: ``all``, ``none``, or a list of their tags, brackets optional.

    Raises:
        ValueError: one of them is unknown; the message names the nearest.
    """
    from flashlane.bench.measure.grid import parse_names

    word = text.strip().lower()
    if word in ("all", "none", ""):
        return PEERS if word == "all" else ()
    names = [name.strip() for name in text.split(",") if name.strip()]
    names = [aliases.PEERS.get(name, aliases.PEERS.get(name.strip("()"), name)).strip("()") for name in names]
    known = [tag.strip("()") for tag in peer_tags()]
    chosen = parse_names(",".join(names), "--peers", (*known, "all", "none"))
    if not set(chosen) <= set(known):
        raise ValueError(f"--peers is {text!r}; it may be a list of {', '.join(known)}, or all or none alone")
    return tuple(peer for peer in PEERS if peer.tag.strip("()") in chosen)


def peers_of_files(paths: Iterable[Path]) -> tuple[Peer, ...]:
    """The ``PEERS`` that Python files of a user define; each file is run.

    Raises:
        ValueError: a file is not there, cannot be run, defines no PEERS, or a tag is taken or lacks its brackets.
    """
    peers: list[Peer] = []
    for path in paths:
        try:
            defined = runpy.run_path(str(path)).get("PEERS")
        except Exception as error:  # whatever a user's file raises
            raise ValueError(f"--peers-from is {str(path)!r}, which cannot be run: {error}") from error
        if not isinstance(defined, tuple) or not all(isinstance(peer, Peer) for peer in defined):
            raise ValueError(f"--peers-from is {str(path)!r}; it must define PEERS, a tuple of flashlane.bench.Peer")
        for peer in defined:
            if not re.fullmatch(r"\(.+\)", peer.tag):
                raise ValueError(f"{path} has a peer {peer.tag!r}; its tag must be in round brackets")
            if peer.tag in (*peer_tags(), *(other.tag for other in peers)):
                raise ValueError(f"{path} has a peer {peer.tag!r}, which is the tag of another")
            peers.append(peer)
    return tuple(peers)
