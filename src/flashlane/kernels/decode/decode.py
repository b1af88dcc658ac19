"""Few queries over a long key/value cache, packed, paged or padded, in one launch."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import fields, replace

import torch

from flashlane import jit
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import DeviceKernel, Resources, memoised, register
from flashlane.jit import KernelSource, tensormap
from flashlane.jit.launch_pool import counters_of
from flashlane.kernels.decode.config import PLANE, DecodeConfig
from flashlane.kernels.decode.select import config_for, lengths_differ, rows_of, splits_for, stream_k_ctas
from flashlane.kernels.device_file import device_code
from flashlane.kernels.features import CACHE, PAGED, VARLEN, unsupported_features
from flashlane.kernels.params import AttentionParams, attention_params, check_outputs
from flashlane.kernels.score import ScoreConfig, ScoreParams, run_time_score_inputs
from flashlane.kernels.seqlen import SeqlenParams

SOURCE = "kernels/decode/decode.cu"
"""Its entry; the device files beside it hold the tile scheduler, the producer, the consumer and the combine."""
MAX_HEAD_DIM = 256
MAX_BATCH = 65535
"""The grid's z."""
MAX_GROUP = 1 << 15
"""Largest group of heads by which 32 bits divide rows exactly."""
FEW_ROWS = 64
"""Rows (query tokens × heads of a group) up to which K and V are read once, and this kernel is the fastest."""
ABLE = (*(field.name for field in fields(ScoreConfig)), *VARLEN, *CACHE, *PAGED)


class _Split(ctypes.Structure):
    """Mirror of ``SplitParams`` in ``tiles.cuh``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "statistics", "arrivals")),
        ("splits", ctypes.c_int),
    ]


class DecodeParams(ctypes.Structure):
    """Mirror of ``Params`` in ``tiles.cuh``."""

    _fields_ = [
        ("attention", AttentionParams),
        ("seqlen", SeqlenParams),
        ("score", ScoreParams),
        ("split", _Split),
        *((name, ctypes.c_int) for name in ("kv_heads", "m_blocks", "total_q", "equal_lengths")),
        ("group_inverse", ctypes.c_uint),
    ]


def source_of(config: DecodeConfig) -> KernelSource:
    """The device file with a configuration's constants."""
    constants = (*config.constants(), ("PARAMS_BYTES", ctypes.sizeof(DecodeParams)))
    return KernelSource(SOURCE, device_code(SOURCE), "decode_attention", constants)


class Decode(DeviceKernel):
    """The registered kernel."""

    tag = "decode(split-kv)"
    family = "decode"
    summary = "few queries over a long cache: query heads share tiles, keys are split over CTAs, one launch"
    source = "Dao et al. 2023 (Flash-Decoding); PTX ISA mma.sync.m16n8k16, cp.async, cp.async.bulk.tensor"
    priority = 4

    def preference(self, problem: AttentionProblem) -> float:
        """Above every kernel that reads K and V once for each query head, where one reading does for all rows."""
        return 30.0 if rows_of(problem) <= FEW_ROWS else float(self.priority)

    def supports(self, problem: AttentionProblem) -> str | None:
        reason = unsupported_features(problem, ("f16", "bf16"), ABLE)
        if reason:
            return reason
        if problem.arch not in jit.LIMITS:
            return f"architecture is {problem.arch}; it takes {', '.join(jit.LIMITS)}"
        if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
            return f"head_dim is {max(problem.head_dim, problem.head_dim_v)}; it takes up to {MAX_HEAD_DIM}"
        if not problem.aligned:
            return "rows of q, k or v are not contiguous or do not start on 16 bytes"
        config = config_for(problem)
        if config is None:
            return f"no tile shape fits the {jit.shared_limit(problem.arch)} bytes of shared memory of {problem.arch}"
        if problem.batch > MAX_BATCH:
            return f"batch is {problem.batch}; it takes up to {MAX_BATCH}"
        if problem.group > MAX_GROUP:
            return f"{problem.group} query heads share a KV head; it takes up to {MAX_GROUP}"
        return None

    def config(self, problem: AttentionProblem) -> DecodeConfig:
        found = config_for(problem)
        if found is None:
            raise ValueError(f"kernel {self.tag!r} cannot run {problem.describe()}: {self.supports(problem)}")
        return found

    def kernel_source(self, config: DecodeConfig) -> KernelSource:
        return source_of(config)

    def resources(self, config: DecodeConfig) -> Resources:
        return config.resources()

    def shipped(self) -> Iterator[tuple[DecodeConfig, tuple[str, ...]]]:
        found: dict[DecodeConfig, list[str]] = {}
        for problem in shipped_problems(self):
            archs = found.setdefault(self.config(problem), [])
            if problem.arch not in archs:
                archs.append(problem.arch)
        for config, archs in found.items():
            yield config, tuple(archs)

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        _launch(None, problem, inputs, out, lse)

    def run(
        self,
        config: DecodeConfig,
        problem: AttentionProblem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        splits: int | None = None,
        debug: bool = False,
    ) -> None:
        """Launch a given configuration.

        Args:
            config, problem, inputs, out, lse: as :meth:`forward` has them.
            splits: most splits of an output tile, or with stream-K CTAs a tile; None for the problem's or the
                heuristic's.
            debug: compile with waits that trap after seconds, so that a hang is an error.

        Raises:
            ValueError: the configuration reads K and V by TMA, which cannot read them as they lie; or it divides keys
                otherwise than by splits, and the problem says how many splits there are.
        """
        _launch(config, problem, inputs, out, lse, splits, debug)


class Plan:
    """All about a launch that does not depend on addresses.

    Args:
        problem: what is asked.
        config: the configuration; None is the heuristic's.
        splits, debug: as :meth:`Decode.run` has them.
        sides: shape and strides of K and of V, packed ones as batches of one.
        device: index of the GPU.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        config: DecodeConfig | None,
        splits: int | None,
        debug: bool,
        sides: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
        device: int,
    ) -> None:
        reason = next(filter(None, (_no_tma(problem, *side) for side in sides)), None)
        if config is None:
            config = config_for(problem, tma=reason is None)
        elif config.tma and reason is not None:
            raise ValueError(f"config is {config.describe()}; {reason}")
        if problem.num_splits and (config.stream_k or config.cluster > 1):
            raise ValueError(
                f"config is {config.describe()}; it may have no stream-K and no clusters, as num_splits is "
                f"{problem.num_splits}"
            )
        self.config, self.problem, self.sides = config, problem, sides
        self.m_blocks = max(1, -(-rows_of(problem) // config.rows))
        self.tiles = tiles = problem.batch * problem.kv_heads * self.m_blocks
        self.function = jit.load(jit.compile(source_of(config), problem.arch, debug=debug), device)
        an_sm = self.function.occupancy(config.threads, config.shared_memory)
        resident = max(1, an_sm) * torch.cuda.get_device_properties(device).multi_processor_count
        if config.stream_k:
            ctas = stream_k_ctas(problem, config, resident if splits is None else splits * tiles)
            self.splits, self.grid, self.partials = ctas, (ctas, 1, 1), 2 * ctas
        else:
            splits = min(config.max_splits, splits or splits_for(problem, config, tiles, resident))
            self.splits, self.partials = splits, tiles * splits if splits > 1 else 0
            self.grid = problem.kv_heads * self.m_blocks * config.cluster, splits, problem.batch
        self._encoded: dict[tuple[int, int], ctypes.Array[ctypes.c_ubyte]] = {}

    def maps(self, k: torch.Tensor, v: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte]:
        """The tensor maps of K and V, packed by the driver once for each pair of addresses."""
        if not self.config.tma:
            return NO_MAPS
        addresses = k.data_ptr(), v.data_ptr()
        found = self._encoded.get(addresses)
        if found is None:
            if len(self._encoded) >= MAPS_KEPT:
                self._encoded.clear()
            element, box = self.problem.dtype_name, (PLANE, self.config.box_rows, 1, 1)
            described = (
                tensormap.describe(element, address, *_axes(*side), box)
                for address, side in zip(addresses, self.sides, strict=True)
            )
            found = _Maps.from_buffer_copy(b"".join(map(tensormap.encode, described)))
            self._encoded[addresses] = found
        return found


_plan = memoised(Plan)
_Maps = ctypes.c_ubyte * (2 * tensormap.MAP_BYTES)
NO_MAPS = _Maps()
MAPS_KEPT = 256


def _axes(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of K or V in a tensor map: (column, row, head, batch or page)."""
    (batch, rows, heads, columns), (by_batch, by_row, by_head, by_column) = shape, strides
    return (columns, rows, heads, batch), (by_column, by_row, by_head, by_batch)


def _no_tma(problem: AttentionProblem, shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    """Why TMA cannot read K or V, or None."""
    if 0 in shape:
        return f"shape is {shape}; TMA reads no empty tensors"
    if any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        return f"strides are {strides}; TMA steps along no axis by 0"
    return tensormap.refusal(0, *_axes(shape, strides), problem.dtype_name)


def _launch(
    config: DecodeConfig | None,
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    splits: int | None = None,
    debug: bool = False,
) -> None:
    total_q, packed, device = -1, inputs, out.device
    if problem.varlen:  # packed tensors are batches of one
        total_q = out.shape[0]
        paged = inputs.block_table is not None
        k, v = (inputs.k, inputs.v) if paged else (inputs.k.unsqueeze(0), inputs.v.unsqueeze(0))
        packed = replace(inputs, q=inputs.q.unsqueeze(0), k=k, v=v)
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
        check_outputs(replace(problem, batch=1, seqlen_q=total_q), out, lse)
    else:
        check_outputs(problem, out, lse)
    if out.numel() == 0:
        return
    k, v = packed.k, packed.v
    plan = _plan(problem, config, splits, debug, ((k.shape, k.stride()), (v.shape, v.stride())), device.index)
    config = plan.config
    params = DecodeParams(
        attention_params(problem, packed, out, lse, q_blocks=1, heads_per_section=1),
        SeqlenParams.of(problem),
        ScoreParams.of(problem),
        kv_heads=problem.kv_heads,
        m_blocks=plan.m_blocks,
        total_q=total_q,
        equal_lengths=not lengths_differ(problem),
        group_inverse=-(-(1 << 32) // problem.group) if problem.group > 1 else 0,
    )
    params.seqlen.point_to(inputs)
    inputs = run_time_score_inputs(inputs)
    params.score.point_to(inputs)
    split = params.split
    split.splits = plan.splits
    if plan.partials:  # the tensors live until after the launch; their memory is used again on this stream only
        rows = plan.partials * config.rows
        space = torch.empty(rows * (problem.head_dim_v + 2 * config.cluster), dtype=torch.float32, device=device)
        arrivals = _arrivals(plan.tiles * config.cluster, device)
        split.out = space.data_ptr()
        split.statistics = space.data_ptr() + 4 * rows * problem.head_dim_v
        split.arrivals = arrivals.data_ptr()
    block = (config.threads, 1, 1)
    plan.function.launch(plan.grid, block, config.shared_memory, (params, plan.maps(k, v)))


def _arrivals(count: int, device: torch.device) -> torch.Tensor:
    """Counters at 0 for a launch on torch's current stream, which leaves them at 0."""
    stream = torch.cuda.current_stream(device).cuda_stream
    return counters_of(device.index, stream, count, torch.cuda.is_current_stream_capturing())


def shipped_problems(kernel: DeviceKernel) -> Iterator[AttentionProblem]:
    """Problems that lead the heuristic through its tables: rows, items, head dims; then dtypes, pages, modifiers."""
    base = AttentionProblem(1, 4, 1, 1, 65536, 128, 128, torch.bfloat16, 128**-0.5)
    shapes = ((64, 64), (128, 128), (192, 128), (256, 256))
    changes = ({"dtype": torch.float16}, {"softcap": 30.0}, {"seqlen_k": 1024}, {"batch": 16, "seqused_k": True})
    changes += ({"num_splits": 1},)
    changes += tuple(dict.fromkeys(PAGED, rows) for rows in (16, 17, 64, 256))
    for arch, (head_dim, head_dim_v), seqlen_q in itertools.product(kernel.architectures, shapes, (1, 8, 16)):
        plain = replace(base, arch=arch, head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=seqlen_q)
        more = [replace(plain, **change) for change in changes] if head_dim == 128 else []
        for problem in (plain, replace(plain, batch=256), *more):
            if kernel.supports(problem) is None:
                yield problem


register(Decode())
