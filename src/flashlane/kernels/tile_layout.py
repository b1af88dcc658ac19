"""Shared-memory tiles in Python: the formulas of ``cuda/swizzle.cuh``, and the bank conflicts they give.

A tile row is cut into chunks of 8 elements (16 bytes), which is what one lane of ``ldmatrix`` reads. Shared memory
has 32 banks of 4 bytes, so the eight rows of one 8×8 matrix are read at once only if their chunks fall into eight
different 16-byte groups of banks (PTX ISA, ldmatrix; CUDA C++ programming guide, shared memory).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashlane.core.registry import DeviceKernel, Kernel
from flashlane.jit.budget import WARP

if TYPE_CHECKING:
    from flashlane.core.problem import AttentionProblem

CHUNK = 8
"""Elements (16-bit) of a chunk."""
CHUNK_BYTES = 16
SLOTS = 8
"""Chunks that the 32 banks serve at once: the bank groups."""
BANKS = 32
BANK_BYTES = 4
FRAGMENT_ROWS = 16
"""Rows that one ``ldmatrix.x4`` reads of a tile."""
FRAGMENT_COLUMNS = 16
MOST_THREADS = 1024


@dataclass(frozen=True)
class Layout:
    """How rows of ``columns`` 16-bit elements lie in shared memory.

    Raises:
        ValueError: ``columns`` is not a positive multiple of 8.
    """

    columns: int

    def __post_init__(self) -> None:
        if self.columns <= 0 or self.columns % CHUNK:
            raise ValueError(f"columns is {self.columns}; a row is whole chunks: a positive multiple of {CHUNK}")

    @property
    def scheme(self) -> str:
        """The layout's name."""
        raise NotImplementedError

    @property
    def chunks(self) -> int:
        return self.columns // CHUNK

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""
        return 2 * self.columns

    def place(self, row: int, chunk: int) -> int:
        """Where in its row a chunk lies, counted in chunks."""
        return chunk

    def offset(self, row: int, chunk: int) -> int:
        """Byte offset of a chunk in the tile."""
        return row * self.stride + self.place(row, chunk) * CHUNK_BYTES

    def slot(self, row: int, chunk: int) -> int:
        """The group of four banks, 0 to 7, that holds a chunk."""
        return self.offset(row, chunk) // CHUNK_BYTES % SLOTS

    def bytes(self, rows: int) -> int:
        return rows * self.stride

    def conflicts(self, row: int, chunk: int) -> int:
        """Extra passes when ldmatrix reads the 8×8 matrix at rows ``row``… and one chunk column: 0 is the best."""
        return bank_passes([self.offset(row + i, chunk) for i in range(8)], CHUNK_BYTES) - 1

    def collisions(self, rows: int) -> int:
        """Chunks of a tile that lie where another one lies: 0, or the layout loses data."""
        places = {self.offset(row, chunk) for row in range(rows) for chunk in range(self.chunks)}
        return rows * self.chunks - len(places)


@dataclass(frozen=True)
class PlainLayout(Layout):
    """Row after row, as in device memory."""

    @property
    def scheme(self) -> str:
        return "plain"


@dataclass(frozen=True)
class TileLayout(Layout):
    """A tile as the kernels have it: padded by one chunk a row, or swizzled without padding."""

    swizzled: bool

    @property
    def scheme(self) -> str:
        return "swizzled" if self.swizzled else "padded"

    @property
    def stride(self) -> int:
        return 2 * (self.columns if self.swizzled else self.columns + CHUNK)

    @property
    def span(self) -> int:
        """Chunks among which the swizzle permutes: the largest power of two, up to 8, that divides a row."""
        if not self.swizzled:
            return 1
        return next(span for span in (8, 4, 2, 1) if self.chunks % span == 0)

    def key(self, row: int) -> int:
        """What the chunk index of a row is XORed with."""
        return row // (SLOTS // self.span) % self.span

    def place(self, row: int, chunk: int) -> int:
        return chunk ^ self.key(row)


@dataclass(frozen=True)
class XorRow4Layout(Layout):
    """The swizzle of the baseline logs, column j of row i in chunk ``((j >> 3) ^ (i >> 2)) % chunks``, for 16 columns.

    With more columns it leaves conflicts, as four rows share one key, and where the chunks are not a power of two
    the remainder sends two chunks to one place (:meth:`collisions`).
    """

    @property
    def scheme(self) -> str:
        return "xor-row4"

    def place(self, row: int, chunk: int) -> int:
        return (chunk ^ (row >> 2)) % self.chunks


def schemes(columns: int) -> tuple[Layout, ...]:
    """Every layout of a row: plain, padded, swizzled, and the swizzle of the baseline logs' kernels."""
    padded, swizzled = (TileLayout(columns, swizzled) for swizzled in (False, True))
    return PlainLayout(columns), padded, swizzled, XorRow4Layout(columns)


def bank_passes(addresses: Iterable[int], width: int) -> int:
    """Passes that the banks need for one group of lanes: the most different words that one bank has to give.

    Args:
        addresses: byte address of each lane.
        width: bytes each lane moves, a multiple of 4; a word that several lanes read is given once.
    """
    words = {word for address in addresses for word in range(address // BANK_BYTES, (address + width) // BANK_BYTES)}
    load = [0] * BANKS
    for word in words:
        load[word % BANKS] += 1
    return max(load)


def fragment_a(layout: Layout, row: int, chunk: int) -> list[int]:
    """Addresses of the 32 lanes of the ``ldmatrix.x4`` that reads a 16×16 A operand (Q, P)."""
    return [layout.offset(row + lane % 16, chunk + lane // 16) for lane in range(WARP)]


def fragment_b(layout: Layout, row: int, chunk: int) -> list[int]:
    """The same of two 8×16 B operands whose rows are columns of the product (K, not transposed)."""
    return [layout.offset(row + lane % 8 + lane // 16 * 8, chunk + lane // 8 % 2) for lane in range(WARP)]


def fragment_b_transposed(layout: Layout, row: int, chunk: int) -> list[int]:
    """The same of the ``ldmatrix.x4.trans`` that reads two 16×8 B operands, row by row (V)."""
    return fragment_a(layout, row, chunk)


READS = {
    "A": ("A operand", "ldmatrix.x4", fragment_a),
    "B": ("B operand", "ldmatrix.x4", fragment_b),
    "Bt": ("B transposed", "ldmatrix.x4.trans", fragment_b_transposed),
}
"""How the kernels read fragments: what, by which instruction, and the lanes' addresses."""
OPERAND_READS = {"q": ("A",), "k": ("B",), "v": ("Bt",), "p": ("A",)}


@dataclass(frozen=True)
class Access:
    """What moving a whole tile once by one kind of instruction costs the banks."""

    name: str
    instruction: str
    passes: int
    best: int
    """Passes that it takes without any conflict."""
    ways: int
    """Passes of the worst group of lanes that is served at once: 1 without conflicts, 8 is "8-way"."""

    @property
    def extra(self) -> int:
        """Passes that conflicts cost: what Nsight Compute counts as bank conflicts."""
        return self.passes - self.best


@dataclass(frozen=True)
class Tile:
    """A tile of a kernel: its layout, its rows, the threads that copy it, and its operand."""

    layout: Layout
    rows: int = FRAGMENT_ROWS
    threads: int = 128
    """Threads of the CTA that copies it."""
    operand: str = ""
    """Which operand: "q", "k", "v" or "p"; "" for a tile that may be read as any."""
    vector: bool = True
    """Copied by ``cp.async``; else through registers."""

    def __post_init__(self) -> None:
        if self.rows <= 0 or self.rows % FRAGMENT_ROWS:
            raise ValueError(f"rows is {self.rows}; fragments are read by {FRAGMENT_ROWS} rows: a multiple of it")
        if self.layout.columns % FRAGMENT_COLUMNS:
            raise ValueError(
                f"columns is {self.layout.columns}; fragments are {FRAGMENT_COLUMNS} wide: a multiple of it"
            )
        if self.threads % WARP or not max(WARP, self.layout.chunks) <= self.threads <= MOST_THREADS:
            raise ValueError(
                f"threads is {self.threads}; whole warps, at least the {self.layout.chunks} chunks of a row and at "
                f"most {MOST_THREADS}, those of a CTA"
            )

    def accesses(self) -> tuple[Access, ...]:
        """Every read that the kernels do of such a tile, then the writes."""
        reads = [self._read(kind) for kind in OPERAND_READS.get(self.operand, tuple(READS))]
        return (*reads, self._store() if self.operand == "p" else self._copy())

    def _read(self, kind: str) -> Access:
        name, instruction, lanes = READS[kind]
        positions = ((row, c) for row in range(0, self.rows, FRAGMENT_ROWS) for c in range(0, self.layout.chunks, 2))
        return count(name, instruction, CHUNK_BYTES, (lanes(self.layout, row, chunk) for row, chunk in positions))

    def _copy(self) -> Access:
        instruction = "cp.async 16 B" if self.vector else "st.shared.v4"
        return count("copy", instruction, CHUNK_BYTES, self._copied_chunks())

    def _copied_chunks(self) -> Iterator[list[int]]:
        """``load_tile`` of ``cuda/tile.cuh``: each thread stays in one column of chunks."""
        chunks, layout = self.layout.chunks, self.layout
        step = self.threads // chunks
        for first in range(0, self.rows, step):
            for warp in range(0, self.threads, WARP):
                lanes = [divmod(thread, chunks) for thread in range(warp, warp + WARP)]
                yield [layout.offset(first + r, chunk) for r, chunk in lanes if r < step and first + r < self.rows]

    def _store(self) -> Access:
        """P leaves the accumulators of split-kv two elements a lane: rows g, columns 2t of a chunk (lane 4g + t)."""
        stores = (
            [self.layout.offset(row + lane // 4, chunk) + lane % 4 * 4 for lane in range(WARP)]
            for row in range(0, self.rows, 8)
            for chunk in range(self.layout.chunks)
        )
        return count("store", "st.shared.b32", BANK_BYTES, stores)


def count(name: str, instruction: str, width: int, requests: Iterable[Sequence[int]]) -> Access:
    """Passes of many instructions; each is served in groups of lanes that move 128 bytes at once."""
    at_once = BANKS * BANK_BYTES // width
    groups = [lanes[i : i + at_once] for lanes in requests for i in range(0, len(lanes), at_once)]
    passes = [bank_passes(group, width) for group in groups]
    return Access(name, instruction, sum(passes), len(groups), max(passes))


def kernel_tiles(kernel: Kernel, problem: AttentionProblem) -> tuple[Tile, ...]:
    """The tiles that a kernel is compiled with for a problem: the layouts and sizes of its configuration.

    Raises:
        ValueError: the kernel has no such tiles.
        NotImplementedError: it does not support the problem; the message says why.
    """
    reason = kernel.supports(problem)
    if reason is not None:
        raise NotImplementedError(f"{kernel.tag} does not run {problem.describe()}: {reason}")
    config = kernel.config(problem) if isinstance(kernel, DeviceKernel) else None
    if not isinstance(getattr(config, "layouts", None), dict):
        raise ValueError(f"{kernel.tag} does not say how it lays out tiles; kernels like mma(split-q+stage1) do")
    rows = {"q": config.block_m, "k": config.block_n, "v": config.slices[1], "p": config.block_m}
    threads = kernel.resources(config).threads
    exchanged = config.warps_kv > 1  # only then P passes through shared memory
    return tuple(
        Tile(layout, rows[operand], threads, operand, config.vector)
        for operand, layout in config.layouts.items()
        if operand != "p" or exchanged
    )


def alternatives(tile: Tile) -> tuple[Tile, ...]:
    """A tile as it is, then in every other scheme."""
    others = (layout for layout in schemes(tile.layout.columns) if layout != tile.layout)
    return (tile, *(replace(tile, layout=layout) for layout in others))
