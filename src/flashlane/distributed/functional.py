"""Attention of one sequence, or of packed documents, whose tokens are divided among the ranks of a process group.

Each rank passes the queries, keys and values of its own tokens and gets their output. The result is exactly that of one
process with all tokens. ``docs/context-parallel.md`` shows which tokens a rank holds and when they are sent.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import zlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from flashlane.core import registry
from flashlane.core.arch import compute_dtype, records_gradients
from flashlane.core.problem import CallOptions, Inputs, check_modifiers
from flashlane.core.validate import (
    SMALLEST_F32,
    check_flag,
    check_number,
    check_sizes,
    check_tensors,
    kind_of,
    whole_number,
    window_sides,
)
from flashlane.distributed.agree import agree, agree_on_grid
from flashlane.distributed.allgather import GatherAttention
from flashlane.distributed.attend import Settings
from flashlane.distributed.call_key import Key, Refused, Where, forget_destroyed, key_of_call, refuse, refuse_wrapped
from flashlane.distributed.comm import Grid, Group, Ranks, check_backend, label_of
from flashlane.distributed.copies import half_of_call
from flashlane.distributed.gather import Task
from flashlane.distributed.head_copies import HeadCopies, HeadTask, refuse_messages, task_of
from flashlane.distributed.layout import Layout, check_layout, rows_of, runs_of
from flashlane.distributed.modifiers import Modifiers
from flashlane.distributed.peer_memory import MOST_GROUPS, half_of
from flashlane.distributed.plan import Division
from flashlane.distributed.polled import come_in_chunks
from flashlane.distributed.ring import RingAttention
from flashlane.distributed.transport import TRANSPORTS, Place, Transport, place_of, why_not_copies
from flashlane.distributed.ulysses import Exchange, Heads, ToHeads, ToTokens
from flashlane.jit import launch
from flashlane.ops import torch_rules
from flashlane.ops.call import Result

Method = Literal["auto", "allgather", "ring", "ulysses", "usp"]
METHODS: tuple[Method, ...] = get_args(Method)
POLLED = True
"""Whether the forward with transport "copies" computes while keys arrive (:mod:`~flashlane.distributed.polled`), for
the calls that can."""


def context_parallel_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    group: Group = None,
    method: Method = "auto",
    layout: Layout = "zigzag",
    seqlen: int | None = None,
    heads_k_stride: int | tuple[int, ...] | None = None,
    transport: Transport = "auto",
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
) -> Result:
    """:func:`flashlane.flash_attn_func` of one sequence over several ranks: exact self-attention, differentiable.

    All ranks of the group must call it, in the same order. Row i of a rank's tensors is the token that
    :func:`flashlane.distributed.token_indices` gives; :func:`flashlane.distributed.shard_sequence` divides a tensor in
    this way.

    Args:
        q: ``(b, rows, h, d)``: the queries of this rank's tokens, f16, bf16, f32 or f64.
        k: ``(b, rows, hk, d)``: their keys; h is a multiple of hk.
        v: ``(b, rows, hk, dv)``: their values.
        dropout_p: must be 0.
        softmax_scale: ``d ** -0.5`` by default.
        causal: a token sees no token after its own position in the sequence.
        window_size: (left, right) in positions of the sequence, −1 for unbounded.
        softcap: when positive, scores become ``softcap * tanh(score / softcap)`` before the mask.
        alibi_slopes: f32 ``(h,)`` or ``(b, h)``, the same on all ranks; they have no gradient.
        deterministic: whether the kernels' backward gives the same bits at every run. Sums over ranks always do.
        return_attn_probs: must be False.
        group: a process group; a DeviceMesh of one dimension; a DeviceMesh of two, whose ranks exchange keys along the
            first and heads along the second, for method "usp"; or None for all ranks.
        method: "allgather" fetches the keys and values that its queries see, then computes; "ring" passes them from
            rank to rank, which needs less memory; "ulysses" exchanges heads for tokens; "usp" combines "ring" and
            "ulysses" on a mesh; "auto" chooses as :func:`choose_method` does.
        layout: which tokens a rank has: "zigzag", "contiguous" or "striped", see :mod:`flashlane.distributed.layout`.
        seqlen: tokens of the whole sequence; needed where the ranks have different numbers of rows.
        heads_k_stride: for "allgather", the number of KV heads that are fetched at once; the next ones are fetched
            while these are computed. A tuple gives the number for each group, the last one for all further groups. By
            default all heads are fetched at once.
        transport: how "allgather" and "ulysses" move data: "messages" of the process group; "copies" into the memory of
            the other ranks, which must be on one host: on GPUs copies use no SM, and the loss of a rank ends the
            others; or "auto", which copies where :func:`explain_transport` gives no reason against it.
        kernel: the tag of the kernel that computes each block, or None to let the dispatcher choose.
        return_lse: also return the LSE.
        sinks: ``(h,)``: a further logit in the softmax of every row of a head, which has no value.
        attn_bias: must be None.
        logit_scale: f32 ``(h,)``, positive: a factor of every score of a head.

    Returns:
        out ``(b, rows, h, dv)`` of this rank's tokens; with ``return_lse`` (out, lse), the LSE ``(b, h, rows)`` in f32
        (f64 for f64). The gradients of ``sinks`` and ``logit_scale`` are those of this rank's part of the computation:
        their sum over the ranks is the whole gradient, as for every weight that all ranks have.

    Raises:
        TypeError, ValueError: an argument is not valid, or not the same on all ranks; the message names it.
        NotImplementedError: no method computes this combination; the message names the argument.
        RuntimeError: a rank did not answer within the group's timeout.
    """
    refused = Refused(dropout_p, return_attn_probs, attn_bias)
    options = {"causal": causal, "window_size": window_size, "softcap": softcap, "softmax_scale": softmax_scale}
    how = {"deterministic": deterministic, "kernel": kernel, "heads_k_stride": heads_k_stride, "transport": transport}
    how["return_lse"] = return_lse
    where = Where(group, method, layout)
    modifiers = Modifiers(alibi_slopes, sinks, logit_scale)
    out, lse = _attend((q, k, v), modifiers, None, seqlen, where, {**options, **how}, refused)
    return (out, lse) if return_lse else out


def context_parallel_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    group: Group = None,
    method: Method = "auto",
    layout: Layout = "zigzag",
    heads_k_stride: int | tuple[int, ...] | None = None,
    transport: Transport = "auto",
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
) -> Result:
    """:func:`context_parallel_attn_func` of packed documents of any lengths, which do not see each other.

    Args:
        q: ``(rows, h, d)``: the queries of this rank's tokens, in the order of
            :func:`flashlane.distributed.token_indices`.
        k: ``(rows, hk, d)``.
        v: ``(rows, hk, dv)``.
        cu_seqlens: integers ``(documents + 1,)``, the same on all ranks: document i has the tokens ``cu_seqlens[i]`` to
            ``cu_seqlens[i + 1]`` of the whole call. The host reads them: pass a sequence or a tensor on the CPU, since
            a call waits for the GPU before it reads a tensor there.
        alibi_slopes: f32 ``(h,)`` or ``(documents, h)``.

    The other arguments and the errors are those of :func:`context_parallel_attn_func`.

    Returns:
        out ``(rows, h, dv)``; with ``return_lse`` (out, lse), the LSE ``(h, rows)``.
    """
    refused = Refused(dropout_p, return_attn_probs, attn_bias, lacks_cu_seqlens=cu_seqlens is None)
    options = {"causal": causal, "window_size": window_size, "softcap": softcap, "softmax_scale": softmax_scale}
    how = {"deterministic": deterministic, "kernel": kernel, "heads_k_stride": heads_k_stride, "transport": transport}
    how["return_lse"] = return_lse
    where = Where(group, method, layout)
    modifiers = Modifiers(alibi_slopes, sinks, logit_scale)
    out, lse = _attend((q, k, v), modifiers, cu_seqlens, None, where, {**options, **how}, refused)
    return (out, lse) if return_lse else out


def check_method(method: str) -> None:
    """Raise ValueError if ``method`` is none of :data:`METHODS`."""
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it may be one of {', '.join(map(repr, METHODS))}")


def check_kernel(kernel: Any) -> None:
    """Raise TypeError or ValueError if ``kernel`` is no tag of a kernel."""
    if not isinstance(kernel, str):
        raise TypeError(f"kernel is {kind_of(kernel)}; it must be the tag of a kernel, or None")
    registry.get(kernel)


def choose_method(grid: Grid, causal: bool, positional: bool) -> Method:
    """The method that "auto" takes.

    It is "allgather", which merges no partial outputs and has one exchange in each pass. A positional modifier (ALiBi)
    without a causal mask needs all tokens of a head on one rank, which "ulysses" gives. A mesh of two dimensions takes
    "usp".
    """
    if grid.heads is not None:
        return "usp"
    return "ulysses" if positional and not causal else "allgather"


def lengths_of(cu_seqlens: torch.Tensor | Sequence[int]) -> tuple[int, ...]:
    """The number of tokens of each document.

    Raises:
        TypeError, ValueError: ``cu_seqlens`` is not at least two integers that start at 0 and never decrease.
    """
    if hasattr(cu_seqlens, "to_local"):
        raise TypeError("cu_seqlens is a DTensor; it must be this rank's own torch.Tensor, as cu_seqlens.to_local() is")
    if hasattr(cu_seqlens, "__array__"):
        cu_seqlens = torch.as_tensor(cu_seqlens)
        no_numbers = cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool or cu_seqlens.is_meta
        if cu_seqlens.dim() != 1 or no_numbers:
            raise TypeError(
                f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)} on {cu_seqlens.device}; it must "
                f"hold whole numbers, (documents + 1,)"
            )
        ends = cu_seqlens.tolist()
    else:
        some = isinstance(cu_seqlens, Sequence) and not isinstance(cu_seqlens, str)
        ends = list(map(whole_number, cu_seqlens)) if some else None
        if ends is None or not all(type(end) is int for end in ends):
            raise TypeError(f"cu_seqlens is {cu_seqlens!r}; it must be whole numbers, (documents + 1,)")
    if len(ends) < 2 or ends[0] != 0 or any(one > other for one, other in itertools.pairwise(ends)):
        raise ValueError(f"cu_seqlens is {ends}; it must have two numbers or more, start at 0 and never fall")
    return tuple(other - one for one, other in itertools.pairwise(ends))


_agreed: dict[Key, _Call] = {}
"""Checked calls on which all ranks agreed, by everything that the checks read; they are not checked again."""
AGREED_SIZE = 4096
registry.on_change(_agreed.clear)
# A destroyed group ends with the last of its calls. A thread of gloo that is still there when the interpreter ends may
# ask for the interpreter's lock, and then ends the process by an error.
atexit.register(_agreed.clear)


@torch.compiler.disable
def _attend(
    qkv: tuple[Any, Any, Any],
    modifiers: Modifiers,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
    seqlen: int | None,
    where: Where,
    options: dict[str, Any],
    refused: Refused,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if torch.is_grad_enabled() and not records_gradients():  # in inference mode
        with torch.no_grad():
            return _attend(qkv, modifiers, cu_seqlens, seqlen, where, options, refused)
    inputs = torch_rules.autocast(Inputs(*qkv))
    q, k, v = inputs.q, inputs.k, inputs.v
    if options["transport"] == "auto" and isinstance(q, torch.Tensor) and _is_captured(q.device):
        options = {**options, "transport": "messages"}
    key = key_of_call(inputs, modifiers, cu_seqlens, seqlen, where, options, refused, POLLED)
    call = None if key is None else _agreed.get(key)
    if call is None:
        call = _checked(inputs, modifiers, cu_seqlens, seqlen, where, options, refused)
        if key is not None:
            forget_destroyed(_agreed)
            if len(_agreed) >= AGREED_SIZE:
                _agreed.clear()
            _agreed[key] = call
    if cu_seqlens is not None:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    with launch.on_device(q.device.index) if q.is_cuda else contextlib.nullcontext():
        out, lse = call.run(q, k, v, modifiers)
    if cu_seqlens is None:
        return out, lse
    return out.squeeze(0), None if lse is None else lse.squeeze(0)


def _checked(
    inputs: Inputs,
    modifiers: Modifiers,
    cu_seqlens: Any,
    seqlen: Any,
    where: Where,
    options: dict[str, Any],
    refused: Refused,
) -> _Call:
    """The call, after its arguments were checked here and compared with those of the other ranks."""
    grid = Grid.of(where.group)
    device = inputs.q.device if isinstance(inputs.q, torch.Tensor) else torch.device("cpu")
    error: Exception | None = None
    call: tuple[Division, Settings, Method] | None = None
    fields: tuple[tuple[str, object], ...] = ()
    try:
        refuse(refused)
        refuse_wrapped(inputs, modifiers)
        check_backend(grid.keys.group, "q", device)
        if _is_captured(device):
            raise NotImplementedError(
                "a CUDA graph captures a call that was not made before; make it once before the capture, with "
                "transport='messages' where the method is 'allgather'"
            )
        lengths = _checked_lengths(inputs, modifiers, cu_seqlens, seqlen, grid)
        call = _checked_call(inputs, modifiers, lengths, where, options, grid)
        _check_rows(inputs.q, call[0], grid)
        how = f"{options['transport']}{' (polled)' if POLLED else ''}, {options['heads_k_stride']}"
        fields = _fields(inputs, modifiers, call, how)
        if call[2] in ("ulysses", "usp"):  # which exchange the LSE, and the gradients of q, k and v, with all ranks
            fields += (("return_lse", bool(options["return_lse"])), ("requires_grad of q, k and v", _any_grad(inputs)))
    except (TypeError, ValueError, NotImplementedError) as found:
        error = found
    try:
        gathered = agree_on_grid(grid.groups, fields, device, error, place_of(device))
    except ValueError as found:
        if seqlen is None and str(found).startswith("seqlen is "):
            raise ValueError(f"{found}. It was not given, and is then the rows of q times the ranks") from None
        raise
    places = [Place(*each) for each in gathered[0]]
    return _Call(grid, *call, inputs, options, any(t is not None for t in modifiers), label_of(fields), places)


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph captures what is called now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def explain_transport(group: Group = None, device: torch.device | str | None = None) -> tuple[Transport, str]:
    """Which transport "auto" takes for calls of "allgather", and why. All ranks of the group must call it.

    Args:
        group: the ranks, as :func:`context_parallel_attn_func` takes them, on a mesh of one dimension.
        device: of the tensors; by default the current GPU, or the CPU where there is none.

    Returns:
        "copies" or "messages", the same on all ranks, and the reason. A call may send messages besides where it would
        keep too much memory (:data:`~flashlane.distributed.transport.MOST_OF_MEMORY`), fetches KV heads in more groups
        than copies take, or is captured in a CUDA graph.

    Raises:
        TypeError, ValueError: ``group`` or ``device`` is not valid.
        RuntimeError: a rank did not answer within the group's timeout.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}; it must be a torch.device, the name of one or None") from None
    ranks = Grid.of(group).keys
    check_backend(ranks.group, "device", device)
    gathered = agree(ranks, (("explain_transport", device.type),), device, value=place_of(device))
    reason = why_not_copies([Place(*each) for each in gathered])
    if reason is not None:
        return "messages", reason
    return "copies", "all ranks are on one host, and their GPUs reach each other's memory"


def _checked_lengths(inputs: Inputs, modifiers: Modifiers, cu_seqlens: Any, seqlen: Any, grid: Grid) -> tuple[int, ...]:
    varlen = cu_seqlens is not None
    q, k, v = inputs.q, inputs.k, inputs.v
    check_tensors(q, k, v, varlen, False)
    check_sizes(inputs, varlen, False)
    axis = 0 if varlen else 1
    if q.shape[axis] != k.shape[axis]:
        raise ValueError(f"k has {k.shape[axis]} rows and q has {q.shape[axis]}; a rank has both of its own tokens")
    if varlen:
        lengths = lengths_of(cu_seqlens)
    else:
        seqlen = whole_number(seqlen)
        if seqlen is not None and (type(seqlen) is not int or seqlen < 0):
            raise ValueError(f"seqlen is {seqlen!r}; it must be a whole number of at least 0, or None")
        lengths = (q.shape[1] * grid.size if seqlen is None else seqlen,)
    batch = len(lengths) if varlen else q.shape[0]
    sizes = {"batch": batch, "heads": q.shape[-2]}
    check_modifiers(modifiers, modifiers._fields, q.device, sizes)
    return lengths


def _checked_call(
    inputs: Inputs,
    modifiers: Modifiers,
    lengths: tuple[int, ...],
    where: Where,
    options: dict[str, Any],
    grid: Grid,
) -> tuple[Division, Settings, Method]:
    causal, deterministic, _ = (check_flag(name, options[name]) for name in ("causal", "deterministic", "return_lse"))
    left, right = window_sides(options["window_size"], causal)
    layout, method, positional = where.layout, where.method, modifiers.positional
    check_layout(layout)
    check_method(method)
    if options["kernel"] is not None:
        check_kernel(options["kernel"])
    if method == "auto":
        method = choose_method(grid, right == 0, positional)
    if (method == "usp") != (grid.heads is not None):
        dimensions = "two dimensions" if grid.heads is not None else "one dimension"
        raise ValueError(
            f"method is {method!r} and group has {dimensions}; 'usp' needs a DeviceMesh of two dimensions, and no "
            f"other method takes one"
        )
    stride = options["heads_k_stride"]
    sizes = stride if isinstance(stride, tuple) else (stride,)
    if stride is not None and not (sizes and all(type(size) is int and size > 0 for size in sizes)):
        raise ValueError(f"heads_k_stride is {stride!r}; it must be a whole number of at least 1, some of them or None")
    if stride is not None and method != "allgather":
        raise NotImplementedError(f"heads_k_stride is {stride} with method {method!r}; only 'allgather' has it")
    if options["transport"] not in TRANSPORTS:
        raise ValueError(f"transport is {options['transport']!r}; it may be one of {', '.join(map(repr, TRANSPORTS))}")
    if options["transport"] == "copies" and method not in ("allgather", "ulysses"):
        raise NotImplementedError(f"transport is 'copies' with method {method!r}; it must be 'allgather' or 'ulysses'")
    bounds = head_bounds(stride, inputs.k.shape[-2])
    if options["transport"] == "copies" and len(bounds) > MOST_GROUPS:
        raise NotImplementedError(f"heads_k_stride is {stride}; transport 'copies' takes up to {MOST_GROUPS} groups")
    key_ranks = grid.keys.size if method != "ulysses" else 1
    if positional and key_ranks > 1 and (right != 0 or (method != "allgather" and layout != "striped")):
        raise NotImplementedError(
            f"alibi_slopes is given with method {method!r}, layout {layout!r} and "
            f"{'a causal mask' if right == 0 else 'no causal mask'}; method 'ulysses' computes it, 'allgather' does "
            f"with causal=True"
        )
    heads_ranks = grid.heads.size if grid.heads else grid.size if method == "ulysses" else 1
    scale = inputs.q.shape[-1] ** -0.5 if options["softmax_scale"] is None else options["softmax_scale"]
    tensors = (inputs.q, inputs.k, inputs.v, *modifiers)
    settings = Settings(
        CallOptions(
            scale=check_number("softmax_scale", scale),
            softcap=check_number("softcap", options["softcap"], low=0.0, least=SMALLEST_F32),
            deterministic=deterministic,
        ),
        options["kernel"],
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors),
    )
    division = Division(layout, lengths, key_ranks, left, right, heads_ranks)
    if options["transport"] == "copies" and method == "ulysses":
        refuse_messages(division, inputs, not options["return_lse"] and not any(t is not None for t in modifiers))
    return division, settings, method


def _any_grad(inputs: Inputs) -> bool:
    """Whether q, k or v has a gradient."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in (inputs.q, inputs.k, inputs.v))


def _fields(
    inputs: Inputs, modifiers: Modifiers, call: tuple[Division, Settings, Method], how: str
) -> tuple[tuple[str, object], ...]:
    """The values that must be the same on all ranks, under the names of the arguments."""
    division, settings, method = call
    q, k, v = inputs.q, inputs.k, inputs.v
    varlen = q.dim() == 3
    lengths = division.lengths
    shapes = [(name, list(t.shape[1:] if varlen else (t.shape[0], *t.shape[2:]))) for name, t in zip("qkv", (q, k, v))]
    return (
        *((f"{name} without its rows", tuple(shape)) for name, shape in shapes),
        ("dtype", str(q.dtype)),
        ("method", method),
        ("layout", division.layout),
        ("transport and heads_k_stride", how),
        ("cu_seqlens", digest(lengths)) if varlen else ("seqlen", lengths[0]),
        ("causal and window_size", (division.left, division.right)),
        ("softmax_scale", settings.options.scale),
        ("softcap", settings.options.softcap),
        ("deterministic", settings.options.deterministic),
        ("kernel", settings.kernel),
        ("requires_grad", settings.needs_grad),
        *((name, t is not None) for name, t in modifiers._asdict().items()),
    )


def digest(lengths: tuple[int, ...]) -> str:
    """The numbers of documents and tokens, with a checksum of the lengths."""
    return f"{len(lengths)} documents of {sum(lengths)} tokens ({zlib.crc32(repr(lengths).encode()):08x})"


def _check_rows(q: torch.Tensor, division: Division, grid: Grid) -> None:
    rows = q.shape[0] if q.dim() == 3 else q.shape[1]
    wanted = rows_of(runs_of(division.layout, division.lengths, grid.size, grid.rank))
    if rows != wanted:
        raise ValueError(
            f"q has {rows} rows on rank {grid.rank}; layout {division.layout!r} gives it {wanted} of "
            f"{sum(division.lengths)} tokens"
        )


def head_bounds(stride: int | tuple[int, ...] | None, heads: int) -> tuple[int, ...]:
    """The first KV head of each group, and the end of the last group."""
    sizes = stride if isinstance(stride, tuple) else (stride or heads,)
    bounds = [0]
    while bounds[-1] < heads:
        bounds.append(min(heads, bounds[-1] + sizes[min(len(bounds), len(sizes)) - 1]))
    return tuple(bounds)


def _copies(
    transport: Transport,
    grid: Grid,
    division: Division,
    bounds: tuple[tuple[int, ...], tuple[int, ...]],
    inputs: Inputs,
    places: list[Place],
) -> bool:
    """Whether a call of "allgather" copies; all ranks decide from the same values."""
    k, v, device = inputs.k, inputs.v, inputs.q.device
    if transport != "auto" or grid.size == 1:
        return transport == "copies"
    groups = len(bounds[0]) - 1
    if why_not_copies(places, groups) is not None:
        return False
    task = Task(grid.keys, division, Settings(CallOptions()), *bounds)
    half = half_of_call(task, *(t[None] if t.dim() == 3 else t for t in (k, v)))
    return why_not_copies(places, groups, half, half_of(grid.keys, device)) is None


class _Call:
    """A checked call, which serves all calls with equal arguments."""

    def __init__(
        self,
        grid: Grid,
        division: Division,
        settings: Settings,
        method: Method,
        inputs: Inputs,
        options: dict[str, Any],
        modified: bool,
        number: int,
        places: list[Place],
    ) -> None:
        heads, kv_heads = inputs.q.shape[-2], inputs.k.shape[-2]
        self.returns_lse = bool(options["return_lse"])
        self.exchange: Exchange | None = None
        self.head_task: HeadTask | None = None
        copies = in_chunks = False
        keys: Ranks | None = grid.keys
        bounds: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        if method in ("allgather", "ring"):
            stride = options["heads_k_stride"]
            one = inputs.q.dim() == 3 or inputs.q.shape[0] == 1
            bounds = (head_bounds(stride, kv_heads),) * 2
            copies = method == "allgather" and _copies(options["transport"], grid, division, bounds, inputs, places)
            in_chunks = POLLED and copies and stride is None and one and not modified and come_in_chunks(division)
        else:
            by_heads = grid.heads or grid.keys
            keys = grid.keys if grid.heads and grid.keys.size > 1 else None
            division_of = Heads(heads, kv_heads, by_heads.size)
            if grid.heads is None and grid.size > 1:
                plain, transport = not modified and not self.returns_lse, options["transport"]
                self.head_task = task_of(grid.keys, division, settings, inputs, transport, plain, places, number)
            self.exchange = Exchange(by_heads, division, division_of, keys.rank if keys else 0, number)
        self.function = RingAttention if keys is not None and method != "allgather" else GatherAttention
        self.task = Task(keys, division, settings, *bounds, copies, self.returns_lse, in_chunks, number)
        self.parts = self.exchange.heads.parts(self.exchange.ranks.rank) if self.exchange else []

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output and LSE; the LSE may be None if it is not requested."""
        if self.head_task is not None:
            return HeadCopies.apply(self.head_task, q, k, v), None
        exchange = self.exchange
        if exchange is None:
            return self.function.apply(self.task, q, k, v, *modifiers)
        all_q, all_k, all_v = ToHeads.apply(exchange, q, k, v)
        queries = exchange.heads.queries(exchange.ranks.rank)
        results = [
            self.function.apply(
                self.task,
                all_q[:, :, first.start : first.stop],
                all_k[:, :, second.start : second.stop],
                all_v[:, :, second.start : second.stop],
                *modifiers.heads(slice(queries.start + first.start, queries.start + first.stop)),
            )
            for first, second in self.parts
        ]
        if not results:
            # Gradients of 0, as of the queries: a backward exchanges on all ranks or on none. Sums of no values are 0
            # whatever a modifier holds.
            # The product keeps a tensor, so that activation checkpointing computes the exchange again here, too.
            zero = sum((t.sum() for t in modifiers.heads(slice(0, 0)) if t is not None), all_q.sum())
            out = all_q.new_empty((*all_q.shape[:3], v.shape[-1])) + zero * zero
            results = [(out, all_q.new_empty((all_q.shape[0], 0, all_q.shape[1]), dtype=compute_dtype(q.dtype)))]
        out = results[0][0] if len(results) == 1 else torch.cat([each for each, _ in results], dim=2)
        if not self.returns_lse:
            return ToTokens.apply(exchange, out, None)
        lse = results[0][1] if len(results) == 1 else torch.cat([each for _, each in results], dim=1)
        return ToTokens.apply(exchange, out, lse)
