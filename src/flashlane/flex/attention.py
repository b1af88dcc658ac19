"""``flex_attention``: flashlane's kernels compute what torch's function of that name computes."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex

from flashlane.core.arch import arch_of, autocast, records_gradients
from flashlane.core.once import differentiated_once
from flashlane.core.validate import check_dtype, check_flag, check_number, check_strided, kind_of
from flashlane.flex import packed, reference, repeats, windows
from flashlane.flex.bind import bind
from flashlane.flex.blocks import narrowed
from flashlane.flex.program import Arguments, Program, refusal
from flashlane.flex.trace import NO_TANGENTS

KERNELS = "flashlane.kernels.hopper.flex"
"""The module that has ``supports``, ``forward``, ``backward``, what repeats these, and ``ARCH``, for Hopper. The first
call on a GPU imports it.

Its functions take ``(b, s, h, d)``, which are transposed views of torch's ``(b, h, s, d)``."""
_log = logging.getLogger(__name__)
OF_THE_REFERENCE = ("cpu",)
"""The device types on which the reference runs every call."""
OURS = ("AUTO", "FLASHLANE", "REFERENCE")
TORCHS = ("TORCH", "TRITON", "TRITON_DECODE", "FLASH")
"""Values of ``kernel_options["BACKEND"]``: those of ``OURS`` run here, those of ``TORCHS`` run torch's function."""
WHOLE = 1 << 30
"""The block size of the mask that torch passes where its caller gave none."""
OTHERWISE = ("raise", "torch", "reference")
"""What :func:`attend` may do with a call that flashlane does not run."""


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute attention with a function of the scores and a mask of the pairs; signature and meaning are torch's.

    ``softmax(score_mod(q·k · scale, b, h, q_idx, kv_idx)) · v`` over the pairs that the block mask shows. Captured
    tensors that require gradients get them. A query that sees no key has output 0 and LSE −inf.

    Args:
        query: ``(B, Hq, L, E)``.
        key: ``(B or 1, Hkv, S, E)``.
        value: ``(B or 1, Hkv, S, Ev)``.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score`` on scalars, or None. It sees f32 scores and i32 indices.
        block_mask: torch's ``BlockMask``, as :func:`create_block_mask` or torch's own function makes it, or None.
        scale: the factor of q·k; 1/sqrt(E) by default.
        enable_gqa: allow fewer key/value heads than query heads.
        return_lse: also return the LSE, ``(B, Hq, L)`` in f32, natural logarithm, differentiable.
        kernel_options: ``{"BACKEND": name}`` chooses: ``FLASHLANE`` (as ``AUTO``, the default, on the CPU and on a GPU
            that has kernels here; on other GPUs ``AUTO`` is ``TORCH``), ``REFERENCE`` (torch operations in tiles),
            ``TORCH``, ``TRITON``, ``TRITON_DECODE`` or ``FLASH`` (torch's own function, compiled). Options that tune
            torch's Triton kernels have no meaning for flashlane's.
        return_aux: torch's ``AuxRequest``: the result is then ``(output, AuxOutput)``.

    Returns:
        The output, ``(B, Hq, L, Ev)`` in the query's type; ``(output, lse)`` with ``return_lse``, and
        ``(output, AuxOutput)`` with ``return_aux``.

    Raises:
        NotImplementedError: a function does what programs do not, no kernel here runs the call, or a transform of
            torch.func is at work; the message names it and the choices. Or, in a backward, a result is differentiated
            twice.
        ValueError: shapes, lengths or options do not fit together.
        TypeError: an argument is of another kind, as a nested or sparse tensor or one of another dtype is, or a
            function does not return a scalar tensor.
        RuntimeError: ``block_mask`` was sliced and has no mask function since.
    """
    call = query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
    return (_attend_apart if _compiling() else _attend)(*call, "raise", True)


def _is_of_torch(device: torch.device) -> bool:
    """Whether the device is a GPU for which there are no kernels here."""
    arch = arch_of(device)
    return arch is not None and arch != importlib.import_module(KERNELS).ARCH


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: dict[str, Any] | None,
    return_aux: Any,
    otherwise: str,
) -> Any:
    """:func:`flex_attention`, with a choice (:data:`OTHERWISE`) of what happens to calls that flashlane does not run.

    ``torch`` calls torch's own function. ``reference`` runs calls that no kernel takes, but raises where a function
    cannot be translated.
    """
    call = query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
    return (_attend_apart if _compiling() else _attend)(*call, otherwise, False)


def _check_kinds(query: Any, key: Any, value: Any, score_mod: Any, kernel_options: Any, return_aux: Any) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is {kind_of(t)}; it must be a torch.Tensor")
    if not (kernel_options is None or isinstance(kernel_options, dict)):
        raise TypeError(f"kernel_options is {kind_of(kernel_options)}; it may be a dict or None")
    if not (return_aux is None or hasattr(return_aux, "max_scores")):
        raise TypeError(f"return_aux is {return_aux!r}; it may be torch's AuxRequest or None")
    if not (score_mod is None or callable(score_mod)):
        raise TypeError(f"score_mod is {kind_of(score_mod)}; it may be a function or None")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: dict[str, Any] | None,
    return_aux: Any,
    otherwise: str,
    torch_elsewhere: bool,
) -> Any:
    """:func:`attend`; with ``torch_elsewhere`` torch's function runs the calls of other GPUs."""
    if torch.is_grad_enabled() and not records_gradients():  # in inference mode
        call = query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
        with torch.no_grad():
            return _attend(*call, otherwise, torch_elsewhere)
    _check_kinds(query, key, value, score_mod, kernel_options, return_aux)
    enable_gqa, return_lse = check_flag("enable_gqa", enable_gqa), check_flag("return_lse", return_lse)
    backend = (kernel_options or {}).get("BACKEND", "AUTO")
    most = return_aux is not None and return_aux.max_scores
    if backend in ("AUTO", "FLASHLANE") and not most and not (return_lse and return_aux is not None):
        found = repeats.find(query, key, value, score_mod, block_mask, scale, enable_gqa)
        if found is not None:
            again = _again(found, query, key, value, block_mask, return_lse or return_aux is not None)
            if again is not None and return_aux is not None:
                return again[0], torch_flex.AuxOutput(lse=again[1] if return_aux.lse else None)
            if again is not None:
                return again
    if backend not in (*OURS, *TORCHS):
        raise ValueError(f"kernel_options: BACKEND is {backend!r}; it may be {', '.join((*OURS, *TORCHS))}")
    if return_lse and return_aux is not None:
        raise ValueError("return_lse is True and return_aux is given; return_aux=AuxRequest(lse=True) asks for the LSE")
    if backend == "AUTO" and torch_elsewhere and _is_of_torch(query.device):
        _log.debug("flex_attention runs torch's own function: %s has no kernels of flashlane for it", query.device)
        backend = "TORCH"

    def by_torch() -> Any:
        options = {**(kernel_options or {}), "BACKEND": "AUTO" if backend not in TORCHS[1:] else backend}
        given = (score_mod, block_mask, scale, enable_gqa, return_lse, options)
        return torch_function(query.device)(query, key, value, *given, return_aux=return_aux)

    if backend in TORCHS:
        return by_torch()
    given = query, key, value
    query, key, value = map(autocast, given)  # as torch's function, which casts f16 and bf16 tensors, too
    if otherwise == "torch":
        try:
            _check_dtypes(query, key, value)
        except TypeError as error:
            _log.debug("flex_attention runs torch's own function: %s", error)
            return by_torch()
    check(query, key, value, block_mask, enable_gqa)
    given_scale = scale
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else check_number("scale", scale)
    try:
        call, arguments = _bound(query, key, value, score_mod, block_mask, scale, backend, otherwise)
    except NotImplementedError as error:
        if otherwise != "torch":
            raise
        _log.debug("flex_attention runs torch's own function: %s", error)
        return by_torch()
    if call.block_mask is not None:
        call.block_mask = narrowed(call.block_mask)
    out, lse, largest = _Attention.apply(call, most, query, key, value, *arguments.tensors)
    if call.kernels is not None and query is given[0] and key is given[1] and value is given[2]:
        prepare = functools.partial(_prepared, call, *given, arguments)
        repeats.remember(given, score_mod, block_mask, given_scale, enable_gqa, prepare)
    if return_aux is not None:
        return out, torch_flex.AuxOutput(lse=lse if return_aux.lse else None, max_scores=largest if most else None)
    return (out, lse) if return_lse else out


def _bound(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float,
    backend: str,
    otherwise: str,
) -> tuple[_Call, Arguments]:
    """A checked call with the program of its functions, and what the program reads.

    Raises:
        NotImplementedError: a function cannot be translated, no kernel runs the call, or a transform of torch.func is
            at work.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "flex_attention is called under a transform of torch.func (vmap, grad, vjp, jvp), which it has no rule "
            "for; torch.autograd differentiates it, and flash_attn_func and scaled_dot_product_attention have rules"
        )
    mask_mod = None if block_mask is None else block_mask.mask_mod
    program, arguments = bind(score_mod, mask_mod, query.device, "f64" if query.dtype == torch.float64 else "f32")
    if block_mask is not None and block_mask.BLOCK_SIZE[0] >= WHOLE and program.mask is None:
        block_mask = None  # torch made this mask of one block, in which every pair is visible
    window = windows.OPEN if block_mask is None else windows.NOTES.of(block_mask)
    documents = packed.NOTES.of(block_mask) if program.score is None and query.shape[0] == 1 else None
    needs_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if documents is not None and not documents.hold_for(arguments.tensors):
        documents = None
    if needs_backward and documents is not None and len(documents.offsets) - 1 > packed.MOST_WITH_GRADIENTS:
        documents = None
    kernels = None
    if backend != "REFERENCE" and query.device.type not in OF_THE_REFERENCE:
        lists = block_mask if window is None and documents is None else None
        kernels = _kernels(query, key, value, lists, otherwise, program, arguments.tensors, scale)
    return _Call(program, arguments.integers, block_mask, window, documents, scale, kernels, needs_backward), arguments


_compiling = torch.compiler.is_dynamo_compiling
_attend_apart = torch._dynamo.disable(_attend)
"""torch.compile breaks the graph at this one."""


def torch_function(device: torch.device) -> Callable[..., Any]:
    """torch's own flex_attention; it is compiled for every device but the CPU."""
    original = getattr(torch_flex.flex_attention, "flashlane_original", torch_flex.flex_attention)
    return original if device.type == "cpu" else _compiled(original)


_compiled_functions: dict[Callable[..., Any], Callable[..., Any]] = {}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return _compiled_functions.setdefault(function, torch.compile(function))


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any, enable_gqa: bool) -> None:
    """Check that the tensors and the block mask fit together, as torch's function asks.

    Raises:
        ValueError: shapes, devices or lengths do not fit together, or a tensor has no heads, or a head dim of 0.
        TypeError: a tensor is nested or sparse, or has a dtype that is not taken or not the query's, or ``block_mask``
            is neither a BlockMask nor None.
        RuntimeError: ``block_mask`` was sliced and has no mask function since.
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_strided(name, t)
    _check_dtypes(query, key, value)
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be (batch, heads, length, head dim)")
        for axis, what in ((1, "number of heads"), (3, "head dim")):
            if not t.shape[axis]:
                raise ValueError(f"{name} has shape {tuple(t.shape)}: its {what} is 0; it must be at least 1")
        if t.device != query.device:
            raise ValueError(f"{name} is on {t.device} and query on {query.device}; they must be on one device")
    batch, heads, _, head_dim = query.shape
    if key.shape[3] != head_dim:
        raise ValueError(f"key has head dim {key.shape[3]}; it must be the query's, {head_dim}")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"value has shape {tuple(value.shape)}; all but its head dim must be key's {tuple(key.shape)}")
    if key.shape[0] not in (1, batch):
        raise ValueError(f"key has batch size {key.shape[0]}; it must be 1 or the query's, {batch}")
    if heads != key.shape[1] and not enable_gqa:
        raise ValueError(f"query has {heads} heads and key {key.shape[1]}; enable_gqa=True allows that")
    if heads % key.shape[1]:
        raise ValueError(f"query has {heads} heads; it must be a multiple of key's, {key.shape[1]}")
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)


def _check_block_mask(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    """What :func:`check` asks of a mask, with tensors that fit together."""
    batch, heads, rows, _ = query.shape
    if not isinstance(block_mask, torch_flex.BlockMask):
        raise TypeError(f"block_mask is {kind_of(block_mask)}; it must be a BlockMask or None")
    if block_mask.kv_num_blocks.device != query.device:
        where = block_mask.kv_num_blocks.device
        raise ValueError(f"block_mask is on {where} and query on {query.device}; they must be on one device")
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise RuntimeError("block_mask was sliced, and has no mask_mod since; set block_mask.mask_mod to one that fits")
    given, lengths = tuple(block_mask.seq_lengths), (rows, key.shape[2])
    if block_mask.BLOCK_SIZE[0] < WHOLE and given != lengths:
        raise ValueError(
            f"block_mask was made for {given[0]} queries and {given[1]} keys; this call has {lengths[0]} and "
            f"{lengths[1]}. Make one for these lengths"
        )
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        counts, size = getattr(block_mask, name), block_mask.BLOCK_SIZE[0]
        if counts is not None and counts.ndim != 3:
            raise ValueError(
                f"block_mask: {name} has shape {tuple(counts.shape)}; it must be (batch or 1, heads or 1, rows of "
                f"blocks)"
            )
        if counts is not None and counts.shape[-1] < -(-rows // size):
            raise ValueError(
                f"block_mask: {name} has {counts.shape[-1]} rows of blocks; {rows} queries in blocks of {size} have "
                f"{-(-rows // size)}"
            )
    for i, (name, size) in enumerate((("batch size", batch), ("heads", heads))):
        if block_mask.kv_num_blocks.shape[i] not in (1, size):
            raise ValueError(f"block_mask has {name} {block_mask.kv_num_blocks.shape[i]}; it must be 1 or {size}")


def _check_dtypes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise a TypeError for types that only torch's function may take: f8, and several in one call."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_dtype(name, t.dtype)
        if t.dtype != query.dtype:
            raise TypeError(f"{name} has dtype {t.dtype} and query has {query.dtype}; they must be equal")


def _kernels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: Any,
    otherwise: str,
    program: Program,
    tensors: tuple[torch.Tensor, ...],
    scale: float,
) -> types.ModuleType | None:
    """The module whose kernels run a call, None for the reference; ``tensors`` are those of the program.

    Raises:
        NotImplementedError: no kernel runs the call, and ``otherwise`` is not ``reference``.
    """
    module = importlib.import_module(KERNELS)
    operands = _swap_heads_and_rows(query, key, value)
    reason = module.supports(*operands, block_mask, arch_of(query.device), program, scale) or refusal(tensors)
    if reason is None:
        return module
    if otherwise == "reference":
        _log.debug("flex_attention runs torch operations in tiles: %s", reason)
        return None
    raise NotImplementedError(
        f"no kernel of flashlane runs this call: {reason}. kernel_options={{'BACKEND': 'TORCH'}} takes torch's "
        f"FlexAttention, 'REFERENCE' torch operations"
    )


def _swap_heads_and_rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views with axes 1 and 2 exchanged: torch's ``(b, h, s, d)`` become the kernels' ``(b, s, h, d)``, and back."""
    return tuple([t.transpose(1, 2) for t in tensors])


@dataclass(slots=True)
class _Call:
    """All of a call but its tensors."""

    program: Program
    integers: tuple[int, ...]
    block_mask: Any
    window: windows.Window | None
    """The window, where the mask is one: the kernels take it in the place of the lists."""
    documents: packed.Documents | None
    """The packed documents, where the mask is these alone: the kernels take them in the place of the lists."""
    scale: float
    kernels: types.ModuleType | None
    needs_backward: bool = False

    def of_kernels(self, arguments: Arguments) -> tuple[Any, ...]:
        """The arguments that follow the tensors in the kernels' ``forward`` and ``backward``."""
        if self.window is None and self.documents is None:
            return self.program, arguments, self.block_mask, self.scale, windows.OPEN, None
        return self.program.without_mask(), arguments, None, self.scale, self.window or windows.OPEN, self.documents

    def problem(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> reference.Problem:
        arguments = Arguments(tuple(tensors), self.integers)
        return reference.Problem(q, k, v, self.program, arguments, self.block_mask, self.scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, most: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        problem = call.problem(*tensors)
        call.program.check(problem.arguments)
        if call.kernels is None:
            out, lse, largest = reference.forward(problem)
        else:
            given = call.of_kernels(problem.arguments)
            operands = _swap_heads_and_rows(problem.q, problem.k, problem.v)
            transposed, lse = call.kernels.forward(*operands, *given, needs_backward=call.needs_backward)
            (out,) = _swap_heads_and_rows(transposed)
            largest = reference.forward(problem)[2] if most else None
        ctx.call = call
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        return out, lse, largest

    @staticmethod
    @differentiated_once("flex_attention")
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        return None, None, *_gradients(ctx.call, out, lse, do, dlse, tensors, list(ctx.needs_input_grad)[2:])

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise NotImplementedError(NO_TANGENTS)


def _gradients(
    call: _Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    tensors: Sequence[torch.Tensor],
    needs_grad: list[bool],
    entry: repeats.Entry | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a call's tensors: the query, the key, the value and the captured ones.

    Those of the first three are computed as in the entry's calls, where there is an entry and it can.
    """
    operands: Any = None
    if entry is not None and dlse is None and type(do) is torch.Tensor and not do.is_neg() and any(needs_grad[:3]):
        operands = _repeated_gradients(entry, call, out, lse, do, tensors)
    if operands is not None and not any(needs_grad[3:]):
        found = (*operands, *(None for _ in tensors[3:]))
        return tuple([g if want else None for g, want in zip(found, needs_grad, strict=True)])
    problem = call.problem(*tensors)
    do = torch.zeros_like(out) if do is None else do
    arguments = (problem, out, lse, do, dlse, needs_grad[3:])
    if call.kernels is None:
        gradients = reference.backward(*arguments)
        operands = (gradients.dq, gradients.dk, gradients.dv)
    else:
        if operands is None:
            operands = (None, None, None)
            if any(needs_grad[:3]):
                q, k, v, of_out, of_do = _swap_heads_and_rows(problem.q, problem.k, problem.v, out, do)
                program = call.of_kernels(problem.arguments)
                operands = _swap_heads_and_rows(*call.kernels.backward(q, k, v, of_out, lse, of_do, dlse, *program))
        gradients = reference.backward(*arguments, operands=False) if any(needs_grad[3:]) else None
    captured = [None] * len(needs_grad[3:]) if gradients is None else gradients.captured
    grads = [g if want else None for g, want in zip((*operands, *captured), needs_grad, strict=True)]
    return tuple(None if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True))


# --- calls like an earlier one


def _prepared(
    call: _Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: Arguments
) -> tuple[Any, ...] | None:
    """What an entry keeps of a call: see :func:`repeats.remember`."""
    operands, kernels = _swap_heads_and_rows(query, key, value), call.kernels
    forward = None if kernels is None else kernels.prepare_forward(*operands, *call.of_kernels(arguments))
    if forward is None:
        return None
    has_mask = call.block_mask is not None
    return call.program, call.integers, call.scale, kernels, has_mask, call.window, call.documents, forward


def _again(
    found: repeats.Found,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: Any,
    wants_lse: bool,
) -> Any:
    """A call like that of an entry: the output, with ``wants_lse`` and the LSE; None where it does not run it."""
    entry, tensors = found.entry, found.tensors
    mask = block_mask if entry.has_mask else None
    if mask is not None and entry.window is None and not entry.is_packed:  # else the kernels are given no lists
        mask = narrowed(mask)
    if entry.binding.computes:
        entry.program.check(Arguments(tensors, entry.integers))
    if not entry.records:
        results = entry.forward(query, key, value, tensors, mask, found.documents)
        return results if results is None or wants_lse else results[0]
    call = _Call(entry.program, entry.integers, mask, entry.window, found.documents, entry.scale, entry.kernels)
    return _Repeated.apply(entry, call, wants_lse, query, key, value, *tensors)


class _Repeated(torch.autograd.function._SingleLevelFunction):
    """A call like that of an entry, under no transform of ``torch.func``; its results are those of :func:`_again`."""

    @staticmethod
    def forward(ctx: Any, entry: repeats.Entry, call: _Call, wants_lse: bool, *tensors: torch.Tensor) -> Any:
        results = entry.forward(*tensors[:3], tensors[3:], call.block_mask, call.documents)
        if results is None:
            return None
        ctx.entry, ctx.call = entry, call
        ctx.save_for_backward(*results, *tensors)
        ctx.set_materialize_grads(False)
        return results if wants_lse else results[0]

    @staticmethod
    @differentiated_once("flex_attention")
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None = None) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        needs_grad = list(ctx.needs_input_grad)[3:]
        return None, None, None, *_gradients(ctx.call, out, lse, do, dlse, tensors, needs_grad, ctx.entry)


def _repeated_gradients(
    entry: repeats.Entry,
    call: _Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...] | None:
    """The gradients of the query, the key and the value; None where the entry's launches do not fit."""
    q, k, v, of_out, of_do = _swap_heads_and_rows(*tensors[:3], out, do)
    deterministic = torch.are_deterministic_algorithms_enabled()
    repeat = entry.backwards.get(deterministic)
    captured = tuple(tensors[3:])
    if repeat is None:
        given = call.of_kernels(Arguments(captured, call.integers))
        repeat = entry.kernels.prepare_backward(q, k, v, *given, deterministic) or (lambda *_: None)
        entry.backwards[deterministic] = repeat
    found = repeat(q, k, v, of_out, lse, of_do, captured, call.block_mask, call.documents)
    return None if found is None else _swap_heads_and_rows(*found)
