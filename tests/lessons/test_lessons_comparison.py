"""The comparison of the lessons with torch."""

from __future__ import annotations

import json

import torch

from flashlane.lessons import comparison, launch


def item(tag, call, verify=lambda: None):
    return comparison.Item(tag, call, verify)


def broken():
    raise RuntimeError("no such instruction")


def test_one_failing_variant_does_not_stop_the_others():
    group = comparison.Group(
        "softmax",
        "4x4 f32",
        (
            item(comparison.TORCH, lambda: torch.ones(100).sum()),
            item("good", lambda: torch.ones(10).sum()),
            item("wrong", lambda: None, lambda: "3 of 16 elements differ"),
            item("raises", broken, broken),
            item("raises when timed", broken),
            item("ceiling 8 warps", lambda: None),
        ),
        flops=1e6,
    )
    settings = comparison.Settings(rounds=2, round_ms=0.05, warmup_ms=0.05, max_iterations=3)
    rows = {row.tag: row for row in comparison.run_group(group, settings, torch.device("cpu"))}
    assert [row.ok for row in rows.values()] == [True, True, False, False, False, True]
    assert rows["good"].versus_torch > 0 and rows["good"].of_ceiling > 0 and rows["good"].tflops > 0
    assert rows["wrong"].milliseconds is None and "3 of 16" in rows["wrong"].message
    assert "no such instruction" in rows["raises"].message and "no such" in rows["raises when timed"].message
    text = comparison.table(list(rows.values()))
    assert text.count("FAILED") == 3 and "6 rows, 3 failed" in text
    assert comparison.best_by_group(list(rows.values())) == {"softmax 4x4 f32": "good"}
    again = [comparison.Row(**row) for row in json.loads(json.dumps([row.to_dict() for row in rows.values()]))]
    assert comparison.table(again) == text


def test_the_checks_can_fail():
    expected = torch.rand(4, 5, dtype=torch.float64)
    for dtype in launch.DTYPES.values():
        assert comparison.wrong(expected.to(dtype), expected) is None
        off = expected.to(dtype)
        off[2, 3] *= 1.05
        assert "1 of 20 elements differ, first (2, 3)" in comparison.wrong(off, expected)
        off[2, 3] = float("nan")
        assert comparison.wrong(off, expected) is not None
        assert comparison.beyond(off, expected, 1.0) is not None
    out = torch.zeros(4, 5)
    assert comparison.verify(lambda: None, out, slice(None), expected) is not None  # poison stays
    assert comparison.verify(lambda: out.copy_(expected), out, slice(1, 3), expected[1:3]) is None


def test_honest_products_have_small_errors():
    a, b = torch.randn(32, 256).half(), torch.randn(256, 24).half()
    assert 1e-3 < comparison.product_error(a, b, "f32") < comparison.product_error(a, b, "f16") < 1
