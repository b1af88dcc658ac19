"""Neighbourhoods: the table of their pairs, and the kernel's states of blocks, compiled as C++ for the host."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flashlane.flex import blocks, device_blocks, masks
from flashlane.flex.bind import bind
from flashlane.flex.neighbourhoods import Neighbourhood, mask_of_table
from flashlane.kernels.device_file import device_code

SHAPES = {
    "line": ((97,), (9,)),
    "line of which a token sees itself": ((97,), (1,)),
    "picture": ((13, 11), (4, 5)),
    "picture of which rows are whole": ((13, 11), (4, 11)),
    "video": ((5, 6, 7), (2, 3, 4)),
    "video of short lines": ((6, 8, 2), (3, 4, 1)),
    "video of lines of one token": ((6, 9, 1), (3, 4, 1)),
    "video of which an axis is whole": ((5, 4, 7), (2, 4, 3)),
    "video of which the first axis is whole": ((3, 8, 7), (3, 3, 3)),
    "everything": ((4, 5, 6), (4, 5, 6)),
}
COMPILER = shutil.which("g++") or shutil.which("c++")
HOST = """
#include <algorithm>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
"""
CALLS = """
extern "C" int state(const Params* p, int q_begin, int q_end, int k_begin, int k_end) {
    return state_of(*p, Lines(*p, q_begin, q_end), Lines(*p, k_begin, k_end));
}
"""


def pairs_of(name: str) -> torch.Tensor:
    mask = masks.neighbourhood(*SHAPES[name])
    n = mask.neighbourhood.tokens
    return torch_flex.create_mask(mask.function, 1, 1, n, n, "cpu")[0, 0]


@pytest.mark.parametrize("name", SHAPES)
def test_pairs_follow_from_the_definition(name: str) -> None:
    """Position by position: as many along each axis as the window has, around the token where the grid allows it."""
    shape, window = SHAPES[name]
    places = torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, len(shape))
    seen = torch.ones(len(places), len(places), dtype=torch.bool)
    for axis, (n, w) in enumerate(zip(shape, window)):
        first = (places[:, axis] - w // 2).clamp(0, n - w).unsqueeze(1)
        seen &= (places[:, axis] >= first) & (places[:, axis] < first + w)
    assert torch.equal(pairs_of(name), seen)


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_has_the_pairs(name: str) -> None:
    found = Neighbourhood.of(*SHAPES[name])
    function, n = mask_of_table(found.table(torch.device("cpu"))), found.tokens
    assert torch.equal(torch_flex.create_mask(function, 1, 1, n, n, "cpu")[0, 0], pairs_of(name))


def test_neighbourhoods_of_all_sizes_are_one_program() -> None:
    """So a grid or a window that was not seen before compiles nothing."""
    functions = (mask_of_table(Neighbourhood.of(*given).table(torch.device("cpu"))) for given in SHAPES.values())
    assert len({bind(None, function, torch.device("cpu"))[0] for function in functions}) == 1


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    text = Path(device_blocks.__file__).with_name("neighbourhood_states.cu").read_text()
    device = re.search(r"^struct Axis.*(?=^extern)", text, re.MULTILINE | re.DOTALL)
    assert device is not None
    folder = tmp_path_factory.mktemp("states")
    states = device_code("cuda/attention/block_state.cuh").replace("#pragma once", "")
    folder.joinpath("states.cc").write_text(HOST + states + device[0] + CALLS)
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "states.cc", "-o", "states.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(folder / "states.so"))


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (16, 8), (64, 64)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_states_of_blocks_are_those_of_their_pairs(library: ctypes.CDLL, name: str, size: tuple[int, int]) -> None:
    neighbourhood, pairs = Neighbourhood.of(*SHAPES[name]), pairs_of(name)
    params = device_blocks.NeighbourhoodParams()
    params.axes[:] = [(ctypes.c_int * 2)(*axis) for axis in neighbourhood.axes]
    params.position = neighbourhood.position
    for q in range(0, neighbourhood.tokens, size[0]):
        for k in range(0, neighbourhood.tokens, size[1]):
            block = pairs[q : q + size[0], k : k + size[1]]
            wanted = blocks.FULL if block.all() else blocks.PARTIAL if block.any() else blocks.HIDDEN
            ends = min(neighbourhood.tokens, q + size[0]), min(neighbourhood.tokens, k + size[1])
            assert library.state(ctypes.byref(params), q, ends[0], k, ends[1]) == wanted, (q, k)


@pytest.mark.parametrize(("shape", "window"), [((200,), (31,)), ((10, 20), (3, 7)), ((4, 5, 10), (3, 3, 5))])
def test_torchs_own_flex_attention_takes_them_compiled(shape: tuple[int, ...], window: tuple[int, ...]) -> None:
    """As a graph without breaks, which inductor makes a kernel of; here it runs in torch's operations."""
    mask, tokens = masks.neighbourhood(shape, window), math.prod(shape)
    q, k, v = (torch.randn(1, 2, tokens, 16) for _ in range(3))
    block_mask = torch_flex.create_block_mask(mask, 1, 1, tokens, tokens, device="cpu")
    compiled = torch.compile(torch_flex.flex_attention, backend="aot_eager", fullgraph=True)
    at = torch.arange(tokens)
    visible = mask(0, 0, at[:, None], at[None])
    assert 0 < int(visible.sum()) < tokens**2
    scores = (q @ k.transpose(-1, -2) * 16**-0.5).masked_fill(~visible, -math.inf)
    torch.testing.assert_close(compiled(q, k, v, block_mask=block_mask), scores.softmax(-1) @ v)
