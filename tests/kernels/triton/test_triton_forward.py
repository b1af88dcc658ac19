"""The Triton forward in the interpreter against the formula in f64, its configurations, and what the compiler makes.

Problems over the whole product of features are drawn in test_triton_draws.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import kept_by_dropout

from flashlane import flash_attn_func, jit
from flashlane.bench.measure.drawn_case import Case
from flashlane.core import registry, tuned
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.triton import attention
from flashlane.kernels.triton import forward_configs as configs
from flashlane.kernels.triton.backward import supports_backward
from flashlane.kernels.triton.forward_configs import TritonConfig
from flashlane.reference.naive import reference_attention

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests" / "support"
KERNEL = registry.get("triton")
PLAIN = Case(
    lengths=((65, 127),) * 2, varlen=False, kv_heads=1, group=2, head_dim=64, head_dim_v=64, causal=False,
    alignment="bottom-right", window=(-1, -1), softcap=0.0, alibi="none", bias=None, hide=False, sinks=False,
    strides="plain", seed=1,
)  # fmt: skip
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def run(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch | None = None, splits: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE over NaN, checked against the formula; ``splits`` shares the keys out over so many programs."""
    from flashlane.kernels.triton import forward

    problem, inputs = case.build(dtype)
    rows = inputs.q.shape[:-1]
    shape = (problem.heads, rows[0]) if problem.varlen else (problem.batch, problem.heads, problem.seqlen_q)
    out = torch.full((*rows, problem.head_dim_v), torch.nan, dtype=dtype)
    lse = torch.full(shape, torch.nan)
    forward.clear()
    before = configs.splits_of
    configs.splits_of = lambda problem, config: splits or before(problem, config)
    try:
        KERNEL.forward(problem, inputs, out, lse)
    finally:
        configs.splits_of = before
        forward.clear()
    want_out, want_lse = reference_attention(problem, inputs, torch.float64)
    visible = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), visible) and not lse.isnan().any()
    if out.numel():
        unit = 4e-6 if dtype == torch.float32 else 2e-3
        assert (out.double() - want_out).abs().max() <= unit * (1 + want_out.abs().max())
    if visible.any():
        assert (lse.double() - want_lse)[visible].abs().max() <= 4e-6 * (1 + want_lse[visible].abs().max())
    return out, lse


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        replace(PLAIN, causal=True),
        replace(PLAIN, head_dim=320, head_dim_v=8, lengths=((17, 40),)),
        replace(PLAIN, head_dim=512, head_dim_v=512, lengths=((3, 65),), causal=True),
        replace(PLAIN, head_dim=96, head_dim_v=160, window=(30, 2), sinks=True),
        replace(PLAIN, varlen=True, lengths=((0, 64), (1, 127), (65, 0), (64, 63)), causal=True, strides="sliced"),
        replace(PLAIN, lengths=((1, 127),) * 2, group=3, alibi="batch", bias=(True, True, True, True), hide=True),
    ],
    ids=("causal", "d320-8", "d512", "d96-160", "varlen", "decode"),
)
def test_f16(case: Case) -> None:
    run(case, torch.float16)


@interpreted
def test_rows_of_no_sequence_are_written() -> None:
    """More rows past the last sequence than its tiles have, and heads packed into them."""
    case = replace(PLAIN, varlen=True, lengths=((2, 30), (1, 0)), group=3)
    problem, inputs = case.build(torch.float32)
    q = torch.cat([inputs.q, torch.randn(200, *inputs.q.shape[1:])])
    inputs = replace(inputs, q=q)
    problem = AttentionProblem.from_inputs(inputs)
    assert configs.packed(problem)
    out, lse = torch.full_like(q, torch.nan), torch.full((problem.heads, len(q)), torch.nan)
    KERNEL.forward(problem, inputs, out, lse)
    assert (out[3:] == 0).all() and (lse[:, 3:] == -torch.inf).all()
    assert torch.isfinite(out[:2]).all() and (lse[:, 2] == -torch.inf).all()


@interpreted
def test_the_dropout_mask_is_the_defined_one() -> None:
    """The kept pairs, read back one by one: values are a unit matrix, and scores all alike."""
    q = torch.zeros(2, 33, 3, 8)
    v = torch.eye(40).view(1, 40, 1, 40).expand(2, 40, 3, 40).contiguous()
    inputs = Inputs(q, torch.zeros(2, 40, 3, 8), v, dropout_seed=torch.tensor([-(2**62) + 12345]))
    problem = AttentionProblem.from_inputs(inputs, dropout_p=0.25)
    out, lse = torch.empty(2, 33, 3, 40), torch.empty(2, 3, 33)
    KERNEL.forward(problem, inputs, out, lse)
    for b in range(2):
        kept = torch.from_numpy(kept_by_dropout(-(2**62) + 12345, 0.25, 3, b, 33, 40))
        assert torch.equal(out[b].transpose(0, 1) > 0, kept)
        assert torch.allclose(out[b].transpose(0, 1)[kept], torch.tensor(1 / 40 / 0.75))


@interpreted
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-50, 0.8])
def test_any_scale(scale: float) -> None:
    inputs = replace(PLAIN, causal=True).build(torch.float32)[1]
    problem = AttentionProblem.from_inputs(inputs, scale=scale, causal=True)
    out, lse = torch.empty_like(inputs.q), torch.empty(2, 2, 65)
    KERNEL.forward(problem, inputs, out, lse)
    want, want_lse = reference_attention(problem, inputs, torch.float64)
    assert (out - want).abs().max() < 1e-5 and (lse - want_lse).abs().max() < 1e-5


@interpreted
def test_a_public_function_runs_it_when_named_only() -> None:
    q = torch.randn(1, 20, 2, 16)
    want = flash_attn_func(q, q, q, causal=True)
    assert (flash_attn_func(q, q, q, causal=True, kernel="triton") - want).abs().max() < 1e-6
    with pytest.raises(NotImplementedError, match="Triton's interpreter computes its products wrongly"):
        flash_attn_func(*[q.bfloat16()] * 3, kernel="triton")
    problem = AttentionProblem.from_inputs(Inputs(q, q, q))
    able = [k for k in registry.kernels() if k.supports(problem) is None and k.family != KERNEL.family]
    assert KERNEL.preference(problem) < min(k.preference(problem) for k in able if k.family != "triton-tf32")


def problem_of(**changes: object) -> AttentionProblem:
    made = AttentionProblem(
        batch=8, heads=16, kv_heads=16, seqlen_q=2048, seqlen_k=2048, head_dim=64, head_dim_v=64,
        dtype=torch.bfloat16, scale=0.125, arch="sm_90a",
    )  # fmt: skip
    return replace(made, **changes)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KERNEL.supports(problem_of()) is None
    assert "dtype is f64" in KERNEL.supports(problem_of(dtype=torch.float64))
    assert "head_dim of v is 513; it takes up to 512" in KERNEL.supports(problem_of(head_dim_v=513))
    assert "architecture is sm_75" in KERNEL.supports(problem_of(arch="sm_75"))
    assert "scale is 3e+38" in KERNEL.supports(problem_of(scale=3e38))
    assert KERNEL.supports(problem_of(softcap=1e30)) is None
    assert "dtype is bf16; it takes f32" in registry.get("triton(tf32)").supports(problem_of())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "it needs a GPU" in KERNEL.supports(problem_of(arch=None)) and "TRITON_INTERPRET=1" in KERNEL.supports(
        problem_of(arch=None)
    )


def test_both_directions_refuse_a_problem_in_the_same_words() -> None:
    """Each up to its own head dim, and the forward alone for a scale."""
    cases = {
        "dtype is f64; it takes f16 or bf16 or f32": {"dtype": torch.float64},
        "architecture is sm_75; Triton takes sm_80 or later": {"arch": "sm_75"},
        "dtype is bf16; Triton's interpreter computes its products wrongly, it takes f16 or f32 there": {"arch": None},
        "softcap is 3e+38; it takes up to 1e+30": {"softcap": 3e38},
        "softcap is 1e-40 and scale 0.125; it takes at least 1.25e-31": {"softcap": 1e-40},
    }
    for message, changes in cases.items():
        assert KERNEL.supports(problem_of(**changes)) == supports_backward(problem_of(**changes)) == message
    wide = problem_of(head_dim_v=513)
    assert KERNEL.supports(wide) == "head_dim of v is 513; it takes up to 512"
    assert supports_backward(wide) == "head_dim of v is 513; it takes up to 256"
    assert supports_backward(problem_of(scale=3e38)) is None and supports_backward(problem_of(arch="sm_100")) is None


@pytest.mark.parametrize("version", [None, "3.5.1", "3.6.0", "4.0.0+git1"])
def test_missing_or_old_triton_is_said(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    attention.missing.cache_clear()
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: version and object())
    monkeypatch.setattr(attention.importlib.metadata, "version", lambda name: version)
    try:
        reason = KERNEL.supports(problem_of())
    finally:
        attention.missing.cache_clear()
    if version in (None, "3.5.1"):
        assert "pip install 'triton>=3.6'" in reason and (version or "not installed") in reason
    else:
        assert reason is None


def test_the_table_of_kernels_does_not_import_triton() -> None:
    code = "import sys; from flashlane.core import registry; registry.kernels(); sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


def environment() -> dict[str, str]:
    """Of a process in which Triton compiles."""
    values = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return values | {"PYTHONPATH": str(ROOT / "src")}


def test_no_kernel_is_made_for_a_length() -> None:
    """Forward, merge, backward and cache update: only flags and tiles choose a kernel, whatever the lengths divide."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "triton_keys.py"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    control, *rows = json.loads(done.stdout)
    assert list(control["several"]) == ["n"]
    assert {row["kernel"] for row in rows} == {
        "attention_forward", "combine", "row_statistics", "key_gradients", "query_gradients", "bias_gradients",
        "update_cache",
    }  # fmt: skip
    assert not [row for row in rows if row["several"]]


@pytest.mark.slow
def test_what_the_compiler_makes(tmp_path: Path) -> None:
    """Tensor-core and copy instructions are there, shared memory fits, and no uniform register is read unwritten.

    A thread reduces its rows over the 4 lanes that share them. More shuffles are there where the softmax is worked out
    in another layout than the product's, as it was with a bias that was loaded behind the product.
    """
    process = subprocess.run(
        [sys.executable, SUPPORT / "triton_offline.py"],
        env=environment() | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    rows = json.loads(process.stdout)
    assert len(rows) == 10
    for row in rows:
        assert row["shared"] <= row["limit"] and not row["unwritten"], row
        assert {"HGMMA", "HMMA"} & set(row["instructions"]), row
        if "bias" in row["case"]:
            assert row["shuffles"] <= 16 * row["stretches"], row
    assert {"HGMMA", "UTMALDG"} <= set(rows[0]["instructions"]) and "HMMA" in rows[-1]["instructions"]


def test_column_tiles_of_a_head_dim() -> None:
    found = {d: configs.column_tiles(d) for d in (1, 8, 16, 40, 59, 64, 80, 96, 111, 128, 160, 192, 256, 257, 320, 512)}
    assert found[1] == found[16] == (16, 0) and found[40] == found[59] == found[64] == (64, 0)
    assert found[80] == (64, 16) and found[96] == (64, 32) and found[111] == found[128] == (128, 0)
    assert found[160] == (128, 32) and found[192] == (128, 64) and found[257] == (256, 16) and found[512] == (256, 256)
    for d in range(1, 513):
        first, second = configs.column_tiles(d)
        assert first + second >= d and first <= 256 and all(n & (n - 1) == 0 for n in (first, second))


@pytest.mark.parametrize("tag", ["triton", "triton(tf32)", "triton(ieee)"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"])
def test_candidates_fit(tag: str, arch: str) -> None:
    kernel = registry.get(tag)
    for head_dim in (8, 64, 128, 192, 256, 512):
        for seqlen_q, right in ((1, 0), (300, -1), (4096, 0)):
            problem = problem_of(arch=arch, head_dim=head_dim, head_dim_v=head_dim, seqlen_q=seqlen_q)
            problem = replace(problem, window_right=right, dtype=torch.float32 if tag != "triton" else torch.bfloat16)
            found = list(kernel.candidates(problem))
            assert found and len(set(found)) == len(found) and kernel.config(problem) == found[0]
            assert all(config.shared_memory(problem) <= jit.shared_limit(arch) for config in found)


def test_descriptors_only_where_they_read_the_right_rows() -> None:
    assert KERNEL.config(problem_of()).descriptors
    for change in (
        {"varlen": True}, {"seqused_k": True}, {"leftpad_k": True}, {"page_size": 16}, {"aligned": False},
        {"head_dim": 96}, {"arch": "sm_80"}, {"seqlen_k": 0}, {"seqlen_q": 128, "batch": 1},
    ):  # fmt: skip
        assert not KERNEL.config(problem_of(**change)).descriptors, change
    wanted = TritonConfig(64, 64, 4, 3, descriptors=True)
    with pytest.raises(ValueError, match="descriptors read keys of a dense problem"):
        t = torch.empty(1)
        KERNEL.run(wanted, problem_of(varlen=True), Inputs(t, t, t), t, t)
    assert not configs.describes(torch.empty(1, 4, 1, 8).expand(2, 4, 3, 8)) and configs.describes(
        torch.empty(1, 4, 1, 8)
    )


def test_what_was_tuned_for_dense_keys_reads_a_cache_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"bm": 64, "bn": 32, "warps": 4, "stages": 2, "descriptors": True}
    monkeypatch.setattr(tuned, "lookup", lambda kernel, problem: stored)
    registry.changed()
    try:
        assert KERNEL.config(problem_of()) == TritonConfig(64, 32, 4, 2, True)
        assert KERNEL.config(problem_of(seqused_k=True)) == TritonConfig(64, 32, 4, 2, False)
    finally:
        registry.changed()


def test_splits() -> None:
    config = TritonConfig(16, 64, 4, 3)
    decode = problem_of(batch=1, heads=32, kv_heads=8, seqlen_q=1, seqlen_k=8192, head_dim=128)
    assert configs.packed(decode) and configs.splits_of(decode, config) == 32  # 8 tiles on 132 SMs, 256 keys each
    assert configs.splits_of(replace(decode, seqlen_k=1024), config) == 4
    assert configs.splits_of(replace(decode, batch=64), config) == 1
    assert configs.splits_of(replace(decode, window_left=100, window_right=0), config) == 1
    assert configs.splits_of(replace(decode, seqlen_q=0), config) >= 1


def test_splits_that_are_asked_for() -> None:
    config = TritonConfig(16, 64, 4, 3)
    for batch, arch in itertools.product((1, 64), ("sm_80", "sm_90a", None)):
        for asked, splits in ((1, 1), (3, 3), (100, 100), (1000, 128)):
            problem = problem_of(batch=batch, seqlen_q=1, seqlen_k=9000, arch=arch, num_splits=asked)
            assert configs.splits_of(problem, config) == splits
        assert configs.splits_of(replace(problem, seqlen_k=130), config) == 3  # one a tile of keys
        assert configs.splits_of(replace(problem, seqlen_k=0), config) == 1
        assert configs.splits_of(replace(problem, window_left=100, window_right=0), config) == 3  # of 116 keys
    for num_splits in (0, 1, 2):  # what is read through descriptors, in a large batch only, has other tiles
        short = problem_of(heads=2, kv_heads=2, seqlen_q=512, seqlen_k=512, num_splits=num_splits)
        found = {KERNEL.config(replace(short, batch=batch)) for batch in (1, 100)}
        assert len(found) == (1 if num_splits else 2)


@interpreted
@pytest.mark.parametrize("num_splits", [1, 2, 3, 50])
def test_keys_are_split_as_asked(num_splits: int) -> None:
    from flashlane.kernels.triton import forward

    inputs = Inputs(*(torch.randn(2, n, h, 32) for n, h in ((3, 4), (250, 2), (250, 2))))
    problem = AttentionProblem.from_inputs(inputs, causal=True, num_splits=num_splits)
    out, lse = torch.full((2, 3, 4, 32), torch.nan), torch.full((2, 4, 3), torch.nan)
    forward.clear()
    KERNEL.forward(problem, inputs, out, lse)
    (plan,) = forward._prepared.values()
    assert plan.splits == min(num_splits, -(-250 // plan.forward.arguments["BN"]))
    assert (plan.combine is not None) == (num_splits > 1)
    want_out, want_lse = reference_attention(problem, inputs, torch.float64)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every length of the targets is asked for, and a ratio is the named peer's time over ours."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "scripts")
    import triton_targets

    from flashlane.bench.measure.results import Results, Row
    from flashlane.bench.measure.timing import Timing

    targets = {target.name: target for target in triton_targets.targets("sm_90a")}
    names = [
        f"d{d} n{n} bf16 {m}" for d in (64, 128) for n in (1024, 2048, 4096, 8192, 16384) for m in ("full", "causal")
    ]
    assert set(names) < set(targets) and all(targets[name].peer == "(flex)" for name in names)
    assert {target.peer for name, target in targets.items() if "f32" in name} == {"(sdpa-efficient)"}

    def row(tag: str, ms: float) -> Row:
        return Row("P", {}, tag, "kernel", "ok", timing=Timing(ms, ms, ms, ms, ms, 5, 1, "test"))

    target = targets[names[0]]
    found = triton_targets.judged(
        target, Results({}, {}, [row("triton", 2.0), row("(flex)", 3.0), row("(flash)", 1.0)])
    )
    assert found.ratios == {"(flex)": 1.5, "(flash)": 0.5} and found.met
    rows = [
        replace(row(tag, flushed), timings={"steady": row(tag, steady).timing})
        for tag, flushed, steady in (("triton", 2.0, 3.0), ("(flex)", 3.0, 2.0))
    ]
    found = triton_targets.judged(target, Results({}, {}, rows))
    assert found.ratios == {"(flex)": 1.5} and found.steady_ratios == {"(flex)": 2 / 3} and not found.met
    assert not triton_targets.judged(target, Results({}, {}, [row("triton", 2.0), row("(flex)", 1.9)])).met
    assert not triton_targets.judged(target, Results({}, {}, [row("(flex)", 1.9)])).met


class FakeNvidia:
    """Triton's settings for NVIDIA: two assemblers, and a scope that undoes what is set in it."""

    def __init__(self, ptxas: str, blackwell: str | None) -> None:
        self.ptxas: Any = SimpleNamespace(path="old", version=ptxas)
        if blackwell:
            self.ptxas_blackwell = SimpleNamespace(path="new", version=blackwell)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        before = self.ptxas
        yield
        self.ptxas = before


@pytest.mark.parametrize(
    ("ptxas", "blackwell", "taken"), [("12.8", "12.9", "new"), ("12.9", "13.0", "old"), ("13.1", None, "old")]
)
def test_an_assembler_that_miscompiles_is_not_taken(
    ptxas: str, blackwell: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashlane.kernels.triton import launch

    nvidia = FakeNvidia(ptxas, blackwell)
    monkeypatch.setattr(launch, "knobs", SimpleNamespace(runtime=SimpleNamespace(interpret=False), nvidia=nvidia))
    with launch.sound_assembler():
        assert getattr(nvidia.ptxas, "path", nvidia.ptxas) == taken
    assert nvidia.ptxas.path == "old"


@pytest.mark.parametrize("blackwell", [None, "12.8"])
def test_a_lone_old_assembler_is_warned_of(blackwell: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashlane.kernels.triton import launch

    nvidia = FakeNvidia("12.8", blackwell)
    monkeypatch.setattr(launch, "knobs", SimpleNamespace(runtime=SimpleNamespace(interpret=False), nvidia=nvidia))
    launch._warn_of_ptxas.cache_clear()
    with pytest.warns(RuntimeWarning, match="TRITON_PTXAS_PATH to ptxas 12.9 or later"), launch.sound_assembler():
        assert nvidia.ptxas.path == "old"
    launch._warn_of_ptxas.cache_clear()
