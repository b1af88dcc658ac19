"""The exponential on the FMA units: its constants, read from the header, have the error that it states."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import flashlane

HEADER = (Path(flashlane.__file__).parent / "cuda" / "attention" / "online_softmax.cuh").read_text(encoding="utf-8")
FUNCTION = re.search(r"(?:// [^\n]*\n)+__device__[^\n]* ex2_polynomial\(.*?\n}\n", HEADER, re.DOTALL)[0]
STATED = float(re.search(r"relative error of at most ([\d.e-]+),", FUNCTION.replace("\n// ", " "))[1])
EXTREMA = (-0.5, -0.34, 0.30, 0.5)
"""Where the header says that they are."""
GRID = np.linspace(-0.5, 0.5, 200_001)


def coefficients() -> np.ndarray:
    """Of x³, x², x and 1, as f32 has them."""
    nested = re.fullmatch(
        r"fmaf\(fmaf\(fmaf\(([\d.]+)f, x, ([\d.]+)f\), x, ([\d.]+)f\), x, ([\d.]+)f\)",
        re.search(r"return (.*);", FUNCTION)[1],
    )
    return np.float32([float(number) for number in nested.groups()])


def relative_error(x: np.ndarray) -> np.ndarray:
    return np.polyval(coefficients().astype(np.float64), x) * 2.0**-x - 1


def horner(x: np.ndarray) -> np.ndarray:
    """As the device evaluates it: each FMA is rounded to f32 once. (In f64 the product of two f32 is exact.)"""
    value = np.full_like(x, coefficients()[0])
    for coefficient in coefficients()[1:]:
        value = (value.astype(np.float64) * x + np.float64(coefficient)).astype(np.float32)
    return value


def test_the_largest_error_is_the_stated_one() -> None:
    largest = np.abs(relative_error(GRID)).max()
    assert 0.99 * STATED < largest <= STATED < 2.0**-13


def test_no_polynomial_of_that_form_is_better_by_a_percent() -> None:
    """The theorem of de la Vallée Poussin for q of 1 + x · q(x), which has three coefficients: where errors over x have
    four extrema of alternating signs, the least of them bounds the error of the best q from below."""
    nearest = [GRID[abs(GRID - at) < 0.01] for at in EXTREMA]
    errors = [relative_error(around)[np.abs(relative_error(around)).argmax()] for around in nearest]
    signs = np.sign(errors) * np.sign(EXTREMA)
    assert (signs[1:] == -signs[:-1]).all()
    assert min(map(abs, errors)) > 0.99 * np.abs(relative_error(GRID)).max()


def test_powers_of_two_are_exact_and_the_rounding_of_f32_is_within_the_stated_error() -> None:
    assert horner(np.float32([0.0]))[0] == 1
    x = GRID.astype(np.float32)
    assert np.abs(horner(x).astype(np.float64) / 2.0 ** x.astype(np.float64) - 1).max() <= STATED


@pytest.mark.parametrize("offset", ["12582912.f;", "12582912.f + 127.f;"])
def test_the_rest_of_a_rounded_number_is_in_the_interval(offset: str) -> None:
    """A sum with the constant is rounded to an integer, in f32, so that the rest is at most one half."""
    assert f"constexpr float ROUND = {offset}" in HEADER
    constant = np.float32(sum(float(part.strip(" ;f")) for part in offset.split("+")))
    x = np.linspace(-126, 126, 100_003).astype(np.float32)
    integer = (x + constant) - constant
    assert (integer == np.rint(integer)).all() and np.abs(x - integer).max() <= 0.5
