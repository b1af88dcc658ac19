"""Which n-blocks add to the dQ of an m-block in the Hopper backward: the device's own functions, compiled for the host.

The tiles' steps, what is counted of them, and which slices of dQ are ever complete must agree, or a launch never ends.
"""

from __future__ import annotations

import collections
import itertools
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig
from flashlane.kernels.hopper.backward.seen_keys import seen_n_blocks

KEYS = OneCtaConfig.block_n
BLOCKS_M = (48, 64, 80, 96, 112, 128)
SETS = [(m, *flags) for m in BLOCKS_M for flags in itertools.product((0, 1), repeat=3)]
"""Queries of a block; whether sequences are packed, and the left and the right side bounded."""
PROGRAM = """
#include <algorithm>
#include <cstdio>
#include <vector>
using std::max; using std::min;
struct int2 {{ int x, y; }};
using u32 = unsigned;
constexpr int WARP = 32;
struct dim3 {{ u32 x, y, z; }} blockIdx, gridDim;
inline int __popc(u32 x) {{ return __builtin_popcount(x); }}
template <typename Predicate>
u32 warp_ballot(const Predicate& predicate) {{
    u32 found = 0;
    for (int lane = 0; lane < WARP; ++lane) found |= static_cast<u32>(predicate(lane)) << lane;
    return found;
}}
inline constexpr int ceil_div(int a, int b) {{ return (a + b - 1) / b; }}
inline constexpr int constant_min(int a, int b) {{ return a < b ? a : b; }}
inline int load_relaxed(const int* from) {{ return *from; }}
{shared}
struct Params {{
    SeqlenParams seqlen;
    int heads, window_left, window_right, row_blocks;
}};
{namespaces}
int main() {{
    int set, batch;
    while (scanf("%d %d", &set, &batch) == 2) {{
        Params p;
        p.seqlen.batch = batch;
        for (int* x : {{&p.heads, &p.seqlen.seqlen_q, &p.seqlen.seqlen_k, &p.window_left, &p.window_right,
                       &p.seqlen.bottom_right, &p.row_blocks}})
            if (scanf("%d", x) != 1) return 1;
        std::vector<int> cu(2 * batch + 2);
        for (int& x : cu) if (scanf("%d", &x) != 1) return 1;
        p.seqlen.cu_seqlens_q = cu.data(), p.seqlen.cu_seqlens_k = cu.data() + batch + 1;
        {calls}
        puts("end");
    }}
}}
"""
NAMESPACE = """
namespace set{number} {{
namespace cfg {{
using Element = short;
constexpr int BLOCK_M = {m}, BLOCK_N = {n}, HEAD_DIM = 64, DQ_SEMAPHORES = 2;
constexpr bool VARLEN = {varlen}, HAS_LEFT = {left}, HAS_RIGHT = {right}, QUERY_RANGES = false;
}}
{header}
void run(const Params& p) {{
    for (int i = 0; i < p.seqlen.batch; ++i) {{
        const Seqlen s(p.seqlen, i);
        const TileMask mask = tile_mask(p, s);
        for (int t = 0; t * cfg::BLOCK_N < s.k_length; ++t) {{
            const BlockRange found = m_block_range<BLOCK_M>(mask, s.q_length, t * cfg::BLOCK_N, cfg::BLOCK_N);
            printf("tile %d %d %d %d\\n", i, t, found.low, found.high);
        }}
        for (int b = 0; b * BLOCK_M < s.q_length; ++b) {{
            const BlockRange found = n_block_range_of<BLOCK_M>(mask, b, cfg::BLOCK_N);
            printf("block %d %d %d %d\\n", i, b, found.low, found.high);
            for (int h = 0; h < p.heads; ++h)
                printf("place %d %d %d %lld\\n", i, b, h, first_row_block(p, s, i, h) + b);
        }}
    }}
    gridDim = {{static_cast<u32>(p.row_blocks), 1, cfg::VARLEN ? 1 : static_cast<u32>(p.seqlen.batch)}};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {{
            const RowBlock at(p, row_block_place());
            printf("cta %d %d %d\\n", at.of_no_sequence() ? -1 : at.sequence, at.m_block, blockIdx.x);
        }}
}}
}}
"""


@dataclass(frozen=True)
class Packed:
    """Sequences of queries and keys, and which of them see each other; −1: a side is not bounded."""

    lengths: tuple[tuple[int, int], ...]
    left: int = -1
    right: int = -1
    bottom_right: bool = True
    varlen: bool = False
    heads: int = 2

    def visible(self, sequence: int, query: int) -> range:
        """The keys that a query sees."""
        queries, keys = self.lengths[sequence]
        at = query + (keys - queries if self.bottom_right else 0)
        first = max(0, at - self.left) if self.left >= 0 else 0
        last = min(keys, at + self.right + 1) if self.right >= 0 else keys
        return range(first, max(first, last))

    def places(self, block_m: int) -> tuple[int, int]:
        """Places of blocks of a head, and of all, as ``backward_launch.RowBlocks`` counts them."""
        total, longest = sum(q for q, _ in self.lengths), max(q for q, _ in self.lengths)
        a_head = total // block_m + len(self.lengths) + 1 if self.varlen else -(-longest // block_m)
        return a_head, a_head * self.heads * (1 if self.varlen else len(self.lengths))

    def words(self, block_m: int) -> str:
        """A line for the program."""
        sides = (block_m, int(self.varlen), int(self.left >= 0), int(self.right >= 0))
        queries, keys = zip(*self.lengths, strict=True)
        cu = (0, *itertools.accumulate(queries), 0, *itertools.accumulate(keys))
        numbers = (SETS.index(sides), len(self.lengths), self.heads, max(queries), max(keys), self.left, self.right)
        return " ".join(map(str, (*numbers, int(self.bottom_right), self.places(block_m)[0], *cu)))


def tiles_in_order(packed: Packed, block_m: int) -> range:
    """The n-blocks of a dense launch with additions in order that are tiles."""
    (queries, keys), *_ = packed.lengths
    problem = AttentionProblem(
        batch=len(packed.lengths), heads=packed.heads, kv_heads=packed.heads, seqlen_q=queries, seqlen_k=keys,
        head_dim=64, head_dim_v=64, dtype=torch.bfloat16, scale=0.1, arch="sm_90a", window_left=packed.left,
        window_right=packed.right, alignment="bottom-right" if packed.bottom_right else "top-left", deterministic=True,
    )  # fmt: skip
    return seen_n_blocks(problem, KEYS, block_m)


def for_host(*files: str) -> str:
    """Device headers as C++ for the host, without their includes."""
    texts = (device_code(file).partition("// ---- scores of")[0] for file in files)  # without masking of registers
    text = "\n".join(texts)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return re.sub("__device__|__forceinline__", "inline", "\n".join(lines)).replace("inline inline", "inline")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], list[list[list[str]]]]:
    """Runs the device's functions: of each line of words, the lines of words that they print."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for the host")
    shared = for_host("cuda/attention/seqlen.cuh", "cuda/attention/mask.cuh", "cuda/attention/block_range.cuh")
    header = for_host("kernels/hopper/backward/row_blocks.cuh", "kernels/hopper/backward/dq_semaphore.cuh")
    namespaces = "".join(
        NAMESPACE.format(number=i, m=m, n=KEYS, varlen=varlen, left=left, right=right, header=header)
        for i, (m, varlen, left, right) in enumerate(SETS)
    )
    calls = "\n        ".join(f"if (set == {i}) set{i}::run(p);" for i in range(len(SETS)))
    folder: Path = tmp_path_factory.mktemp("blocks")
    (folder / "blocks.cpp").write_text(PROGRAM.format(shared=shared, namespaces=namespaces, calls=calls))
    build = [compiler, "-std=c++17", "-O0", str(folder / "blocks.cpp"), "-o", str(folder / "blocks")]
    process = subprocess.run(build, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr

    def run(lines: list[str]) -> list[list[list[str]]]:
        program, text = str(folder / "blocks"), "\n".join(lines)
        process = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
        return [[line.split() for line in part.splitlines()] for part in process.stdout.split("end\n")[:-1]]

    return run


def drawn(seed: int) -> tuple[Packed, int]:
    chance = random.Random(seed)
    varlen = chance.random() < 0.5
    lengths = [(chance.choice((1, 17, 64, 130, 300)), chance.choice((1, 60, 128, 129, 400))) for _ in range(3)]
    if chance.random() < 0.3:
        lengths = [(n, n) for n, _ in lengths]
    if varlen:
        lengths[chance.randrange(3)] = chance.choice(((0, 0), (0, 50), (50, 0), (200, 1)))
    sides = [chance.choice((-1, 0, 5, 70, 200)) for _ in range(2)]
    packed = Packed(tuple(lengths if varlen else [lengths[0]] * 3), *sides, chance.random() < 0.6, varlen)
    return packed, chance.choice(BLOCKS_M)


def test_what_is_counted_is_what_the_tiles_do(device: Callable[[list[str]], list[list[list[str]]]]) -> None:
    cases = [drawn(seed) for seed in range(600)]
    kinds: collections.Counter[str] = collections.Counter()
    for (packed, block_m), lines in zip(cases, device([p.words(m) for p, m in cases]), strict=True):
        what = f"{packed} by {block_m}"
        steps: dict[tuple[int, int], set[int]] = collections.defaultdict(set)  # of a sequence's block: its tiles
        counted: dict[tuple[int, int], range] = {}
        places: list[int] = []
        ctas: list[tuple[int, int]] = []  # the sequence and m-block of each
        for kind, *rest in lines:
            sequence, *numbers = map(int, rest)
            if kind == "tile":
                tile, low, high = numbers
                for block in range(low, high):
                    steps[sequence, block].add(tile)
            elif kind == "block":
                block, low, high = numbers
                counted[sequence, block] = range(low, max(low, high))
            elif kind == "cta":
                ctas.append((sequence, numbers[0]))
            else:
                places.append(numbers[-1])
        # Of each block, the blocks of keys that are counted are those that step through it: the first one stores.
        assert set(steps) <= set(counted), what
        for (sequence, block), tiles in counted.items():
            assert set(tiles) == steps[sequence, block], (what, sequence, block)
            queries = range(block * block_m, min((block + 1) * block_m, packed.lengths[sequence][0]))
            keys = {key // KEYS for query in queries for key in packed.visible(sequence, query)}
            assert keys <= set(tiles), (what, sequence, block)
            kinds["unseen" if not tiles else "one" if len(tiles) == 1 else "several"] += 1
        # Additions in order wait for all n-blocks that are counted: each is a tile.
        if not packed.varlen:
            assert set().union(*counted.values()) <= set(tiles_in_order(packed, block_m)), what
        # Each m-block has a CTA of the preprocess and postprocess kernels; the others have none of a sequence's rows.
        in_order = sorted(counted, reverse=not packed.varlen)  # of dense tensors the last ones come first
        assert [at for at in ctas if at in counted] == in_order and len(set(ctas)) == len(ctas), what
        # Each has a place of its own.
        assert len(places) == packed.heads * len(counted) == len(set(places)), what
        assert all(0 <= place < packed.places(block_m)[1] for place in places), what
    assert min(kinds[kind] for kind in ("unseen", "one", "several")) > 100, kinds


@pytest.mark.parametrize("sequences", [1, 32, 33, 70, 1100])
def test_ctas_find_their_sequence_among_many(
    sequences: int, device: Callable[[list[str]], list[list[list[str]]]]
) -> None:
    """A warp looks at 32 sequences at a time: of more it first finds between which of them the m-block lies."""
    chance = random.Random(sequences)
    for block_m in (64, 80):
        lengths = tuple((chance.choice((0, 1, 63, 64, 65, 200)), 1) for _ in range(sequences))
        (lines,) = device([Packed(lengths, varlen=True, heads=1).words(block_m)])
        found = [tuple(map(int, rest[:2])) for kind, *rest in lines if kind == "cta"]
        blocks = [(i, block) for i, (rows, _) in enumerate(lengths) for block in range(-(-rows // block_m))]
        assert [at for at in found if at[1] * block_m < lengths[at[0]][0]] == blocks
        # A CTA whose m-block is in no sequence belongs to the sequence before it, past its end.
        assert all(0 <= i < sequences for i, _ in found) and len(set(found)) == len(found)
