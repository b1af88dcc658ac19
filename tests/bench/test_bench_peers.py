"""What the peers are given of windows, packed sequences and determinism, and that the bench times such problems."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_fakes import FakeKernel

from flashlane import bench
from flashlane.bench.measure.flops import flops, sequences_of
from flashlane.bench.measure.inputs import Case
from flashlane.bench.measure.peers import PEERS, Peer
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.naive import reference_attention

PEER = {peer.tag: peer for peer in PEERS}
GPU = "sm_90a"
QUICK = bench.Settings(2, 0.1, 0.1, 1, 1)


def dense(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, n: int = 64, keys: int = 64, **asked: Any):
    q, k = (torch.randn(2, length, heads, 16, device=device).to(dtype) for length, heads in ((n, 4), (keys, 2)))
    inputs = Inputs(q, k, torch.randn_like(k))
    return AttentionProblem.from_inputs(inputs, **asked), inputs


def packed(lengths: tuple[int, ...] = (5, 0, 33, 17), spare: int = 2, device: str = "cpu", **words: Any):
    """Sequences of a call, and rows of q that belong to none."""
    total = sum(lengths)
    q, k, v = (
        torch.randn(n, h, d).to(torch.bfloat16) for n, h, d in ((total + spare, 4, 16), (total, 2, 16), (total, 2, 8))
    )
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs = Inputs(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
    return AttentionProblem.from_inputs(inputs, **words), inputs


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """FlashAttention-2, -3 and -4 as modules that note what they are called with."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def function(name: str) -> Any:
        def called(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, None]:
            calls.append((name, keywords))
            return q, None

        return called

    for path in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
        module = types.ModuleType(path)
        for name in ("flash_attn_func", "flash_attn_varlen_func"):
            setattr(module, name, function(name))
        monkeypatch.setitem(sys.modules, path, module)
    return calls


@pytest.mark.parametrize("tag", ["(flash-attn-2)", "(flash-attn-3)", "(flash-attn-4)"])
def test_flash_attn_is_given_the_whole_problem(tag: str, library: list[tuple[str, dict[str, Any]]]) -> None:
    unbounded = None if tag == "(flash-attn-4)" else -1
    plain = {"softmax_scale": 0.25, "causal": False}
    window = {"window_size": (7, 0), "causal": True, "softcap": 9.0, "deterministic": True}
    cases = [
        (dense(), plain),
        (dense(causal=True), plain | {"causal": True}),
        (dense(causal=True, window_size=(7, -1), softcap=9.0, deterministic=True), plain | window),
        (dense(window_size=(-1, 3)), plain | {"window_size": (unbounded, 3)}),
    ]
    for (problem, inputs), want in cases:
        assert PEER[tag].supports(problem) is None
        assert PEER[tag].prepare(problem, inputs)() is inputs.q, "the output is the first of what it returns"
        assert library.pop() == ("flash_attn_func", want)
    problem, inputs = packed(causal=True)
    PEER[tag].prepare(problem, inputs)()
    name, keywords = library.pop()
    assert name == "flash_attn_varlen_func" and keywords.pop("cu_seqlens_q") is inputs.cu_seqlens_q
    assert keywords.pop("cu_seqlens_k") is inputs.cu_seqlens_k
    assert keywords == plain | {"causal": True, "max_seqlen_q": 33, "max_seqlen_k": 33}


class Ragged:
    """FlashInfer's wrapper, which notes what it is planned and run with."""

    planned: dict[str, Any]

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(
        self, qo_indptr: Any, kv_indptr: Any, heads: int, kv_heads: int, dim: int, dim_v: int, **others: Any
    ) -> None:
        sizes = (qo_indptr.tolist(), kv_indptr.tolist(), heads, kv_heads, dim, dim_v)
        Ragged.planned = {"sizes": sizes, **others}

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert q.dim() == k.dim() == v.dim() == 3
        return torch.arange(q.shape[0] * q.shape[1] * v.shape[2]).view(*q.shape[:2], v.shape[2])


def test_flashinfer_is_given_a_batch_as_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = Ragged
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    peer = PEER["(flashinfer)"]
    problem, inputs = dense(keys=80, causal=True, window_size=(7, -1), softcap=9.0)
    out = peer.prepare(problem, inputs)()
    assert out.shape == (2, 64, 4, 16) and int(out[1, 0, 0, 0]) == 64 * 4 * 16
    types_ = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    asked = {"causal": True, "sm_scale": 0.25, "window_left": 7, "logits_soft_cap": 9.0}
    assert Ragged.planned == {"sizes": ([0, 64, 128], [0, 80, 160], 4, 2, 16, 16), **asked, **types_}
    problem, inputs = packed()
    assert peer.prepare(problem, inputs)().shape == (57, 4, 8)
    asked = {"causal": False, "sm_scale": 0.25, "window_left": -1}
    assert Ragged.planned == {"sizes": ([0, 5, 5, 38, 55],) * 2 + (4, 2, 16, 8), **asked, **types_}
    assert peer.supports(problem.on(GPU)) is None
    assert peer.supports(replace(problem.on(GPU), needs_grad=True)) == "it has no backward"
    assert "window_left only" in peer.supports(dense(window_size=(-1, 3))[0].on(GPU))


def test_our_own_names_are_no_peer() -> None:
    """With flashlane under FlashAttention's module names, the bench would compare it with itself."""
    from flashlane.integrations import flash_attn

    flash_attn.install()
    try:
        for tag in ("(flash-attn-2)", "(flash-attn-3)", "(flash-attn-4)"):
            assert "flashlane is installed under that name" in PEER[tag].available(torch.device("cuda"))
    finally:
        flash_attn.uninstall()
    assert PEER["(flash-attn-3)"].available(torch.device("cuda")) == "not installed"


def test_what_a_peer_cannot_be_given_is_refused() -> None:
    top_left, _ = dense(keys=80, window_size=(-1, 3), alignment="top-left")
    assert "bottom-right" in PEER["(flash-attn-4)"].supports(top_left)
    assert PEER["(flex)"].supports(top_left.on(GPU)) is None
    fixed = replace(dense(causal=True, deterministic=True)[0].on(GPU), needs_grad=True)
    for tag in ("(flash)", "(cudnn)"):
        assert "deterministic" in PEER[tag].supports(fixed)
        assert PEER[tag].supports(replace(fixed, deterministic=False)) is None
        assert PEER[tag].supports(replace(fixed, needs_grad=False)) is None, "a forward pass is deterministic"
    assert PEER["(flex)"].supports(packed()[0].on(GPU)) is None
    for tag in ("(cudnn)", "(unfused)", "(sdpa-efficient)", "(xformers)", "(ffpa)"):
        assert PEER[tag].supports(packed()[0].on(GPU)) == "the bench does not give it varlen", tag
    for tag in ("(flash)", "(cudnn)", "(flex)", "(unfused)", "(xformers)"):
        assert PEER[tag].supports(dense(softcap=3.0)[0].on(GPU)) == "the bench does not give it softcap", tag


MASKS = [{}, {"causal": True}, {"window_size": (7, 0)}, {"window_size": (-1, 3)}, {"window_size": (7, -1)}]


@pytest.mark.parametrize("asked", [*MASKS[1:], {"window_size": (5, 2), "alignment": "top-left"}], ids=str)
def test_flex_masks_as_we_do(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    problem, inputs = dense(dtype=torch.float32, n=70, keys=90, **asked)
    with torch.no_grad():
        found = PEER["(flex)"].prepare(problem, inputs)()
        torch.testing.assert_close(found, reference_attention(problem, inputs)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize("asked", MASKS, ids=str)
def test_flex_keeps_packed_sequences_apart(
    asked: dict[str, Any], alignment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    lengths = ((5, 9), (33, 40), (0, 7), (20, 20))  # of queries and of keys
    ends = [torch.tensor([0, *column]).cumsum(0).to(torch.int32) for column in zip(*lengths, strict=True)]
    q, k, v = (torch.randn(int(end[-1]), heads, 16) for end, heads in ((ends[0], 4), (ends[1], 2), (ends[1], 2)))
    inputs = Inputs(q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=33, max_seqlen_k=40)
    problem = AttentionProblem.from_inputs(inputs, alignment=alignment, **asked)
    with torch.no_grad():
        found = PEER["(flex)"].prepare(problem, inputs)()
        torch.testing.assert_close(found, reference_attention(problem, inputs)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", [{"window_size": (7, 0)}, {"window_size": (-1, 3)}, {"window_size": (7, 2)}], ids=str)
@pytest.mark.parametrize("lengths", ["dense", "packed"])
def test_the_flash_operator_has_the_arguments_and_a_gradient(
    lengths: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no GPU its shapes can be asked of the meta device, and what it was called with noted."""
    problem, inputs = packed(**asked) if lengths == "packed" else dense(**asked)
    v = inputs.k.clone()  # torch's flash backend has one head dim
    where = {name: getattr(inputs, name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    where = {name: None if t is None else t.to("meta") for name, t in where.items()}
    leaves = [t.to("meta").requires_grad_() for t in (inputs.q, inputs.k, v)]
    with_leaves = replace(inputs, **dict(zip("qkv", leaves, strict=True)), **where)
    calls = []
    operator = torch.ops.aten._flash_attention_forward

    def noted(*arguments: Any, **keywords: Any) -> Any:
        calls.append((arguments, keywords))
        return operator(*arguments, **keywords)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", noted)
    problem = replace(problem.on(GPU), head_dim_v=16)
    assert PEER["(flash)"].supports(problem) is None
    out = PEER["(flash)"].prepare(problem, with_leaves)()
    assert out.shape == inputs.q.shape
    grads = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    ((arguments, keywords),) = calls
    left, right = problem.window_left, problem.window_right
    asked_for = arguments[8], keywords.get("window_size_left", -1), keywords.get("window_size_right", -1)
    assert asked_for == (False, left, right) and keywords["scale"] == problem.scale
    assert arguments[3:7] == (with_leaves.cu_seqlens_q, with_leaves.cu_seqlens_k, problem.seqlen_q, problem.seqlen_k)


def test_a_causal_mask_of_packed_sequences_is_the_operators_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", lambda *a, **k: (seen.append((a[8], k)), 0)[:1] * 2)
    problem, inputs = packed(causal=True)
    PEER["(flash)"].prepare(problem.on(GPU), inputs)()
    assert seen == [(True, {"scale": problem.scale})]


# --- the bench on packed sequences


def timed(case: Case, peers: tuple[Peer, ...] = (), **how: Any) -> bench.Results:
    return bench.run([case], device="cpu", selection=bench.Selection(peers=peers), settings=QUICK, **how)


@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window_size": (4, 2)}], ids=str)
def test_packed_sequences_are_checked_and_counted_one_by_one(asked: dict[str, Any]) -> None:
    problem, inputs = packed(**asked)
    case = Case(problem, "mix", inputs)
    directions = ("forward", "backward", "both")
    with registry.table_of(registry.get("tiled"), FakeKernel("wrong", lambda out, lse: out[0].add_(0.25))):
        found = timed(case, directions=directions, memory=False)
    rows = {(row.tag, row.direction): row for row in found}
    assert rows["wrong", "forward"].status == "FAIL"
    alone = sequences_of(problem, inputs)
    assert [one.seqlen_q for one in alone] == [5, 0, 33, 17] and not any(one.varlen for one in alone)
    for direction in directions:
        row = rows["tiled", direction]
        assert row.status == "ok" and 0 < row.verdict.ratio < 1
        work = sum(flops(one, "gemm", direction) for one in alone)
        assert row.tflops == pytest.approx(work / row.timing.median * 1e-9)


def test_wrong_gradients_of_packed_sequences_fail() -> None:
    problem, inputs = packed(causal=True)

    def mixed(problem: AttentionProblem, inputs: Inputs) -> Any:
        """Sequences that see each other."""
        one = replace(problem, batch=1, varlen=False)
        batched = Inputs(*(t[: inputs.k.shape[0]].unsqueeze(0) for t in (inputs.q, inputs.k, inputs.v)))
        whole = AttentionProblem.from_inputs(batched, causal=one.causal)
        spare = inputs.q.new_zeros(len(inputs.q) - len(inputs.k), problem.heads, problem.head_dim_v)
        return lambda: torch.cat([reference_attention(whole, batched, inputs.q.dtype)[0][0], spare])

    with registry.table_of(registry.get("tiled")):
        (_, theirs) = timed(Case(problem, "mix", inputs), (Peer("(mixed)", "", mixed),), directions=("both",))
    assert theirs.status == "FAIL" and "dq" in theirs.message


def test_too_few_lengths_and_cycles_of_packed_sequences_are_refused() -> None:
    problem, inputs = packed()
    with pytest.raises(ValueError, match="packed sequences and 99 lengths"):
        bench.run([Case(problem, lengths=(1,) * 99)], device="cpu")
    with pytest.raises(ValueError, match="--cycles counts dense problems"):
        bench.run([Case(problem, "mix", inputs)], device="cpu", cycles=True)
