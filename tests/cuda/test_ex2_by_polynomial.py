"""``ex2_by_polynomial`` of ``math.cuh``, compiled as C++ for the host."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import flashlane

MATH = Path(flashlane.__file__).parent / "cuda" / "math.cuh"
COMPILER = shutil.which("g++") or shutil.which("c++")
HOST = """
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
inline float ex2(float x) { return exp2f(x); }
"""
CALLS = """
extern "C" void by_polynomial(const float* x, float* y, int n) {
    for (int i = 0; i < n; ++i) y[i] = ex2_by_polynomial(x[i]);
}
template <int EIGHTHS>
int polynomials() {  // of 8 groups of 4 accumulators
    int found = 0;
    for (int i = 0; i < 32; ++i) found += ex2_of_column<EIGHTHS>(0.3f, i) != ex2(0.3f);
    return found;
}
extern "C" int polynomials_of(int eighths) {
    switch (eighths) {
        case 0: return polynomials<0>();
        case 2: return polynomials<2>();
        case 3: return polynomials<3>();
        default: return polynomials<4>();
    }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    text = MATH.read_text()
    functions = [
        re.search(rf"^[^\n]* {name}\(float x.*?^}}\n", text, re.MULTILINE | re.DOTALL)
        for name in ("ex2_by_polynomial", "ex2_of_column")
    ]
    bodies = [found[0] for found in functions if found is not None]
    assert len(bodies) == 2
    folder = tmp_path_factory.mktemp("ex2")
    folder.joinpath("ex2.cc").write_text(HOST + bodies[0] + "template <int EIGHTHS>\n" + bodies[1] + CALLS)
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "ex2.cc", "-o", "ex2.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(folder / "ex2.so"))


def by_polynomial(library: ctypes.CDLL, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    library.by_polynomial(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), len(x))
    return y


def test_the_relative_error_is_a_nineteenth_of_that_of_bf16(library: ctypes.CDLL) -> None:
    x = torch.linspace(-126, 127, 400_001)
    exact = torch.exp2(x.double())
    error = (by_polynomial(library, x) - exact).abs() / exact
    assert 1e-5 < error.max().item() < 1.03e-4


def test_what_is_hidden_is_zero_and_nothing_is_negative(library: ctypes.CDLL) -> None:
    x = torch.tensor([-torch.inf, -3e38, -1e6, -200.0, -127.5, -127.0])
    assert torch.equal(by_polynomial(library, x), torch.zeros(6))
    near = by_polynomial(library, torch.linspace(-127, -126, 1001))
    assert (near >= 0).all() and (near < 1.2e-38).all()
    assert by_polynomial(library, torch.zeros(1)).item() == 1


def test_nan_stays_visible(library: ctypes.CDLL) -> None:
    """An infinite probability makes its row NaN, by the sum."""
    assert not by_polynomial(library, torch.tensor([torch.nan])).bfloat16().isfinite().any()


@pytest.mark.parametrize("eighths", [0, 2, 3, 4])
def test_so_many_columns_are_by_the_polynomial(library: ctypes.CDLL, eighths: int) -> None:
    assert library.polynomials_of(eighths) == 4 * eighths
