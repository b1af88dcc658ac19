"""The operators and the public functions on them: results, gradients, tracing, signatures and errors."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from problems import gradients
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashlane
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, CallOptions, Inputs
from flashlane.ops import call_cache, schema
from flashlane.reference.naive import reference_attention

pytestmark = pytest.mark.usefixtures("torch_kernels")

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
CONTRACT = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{TAIL}, block_table=None",
    "explain": f"q, k, v, {TAIL}",
}


def leaves(dtype: torch.dtype = torch.float64, n: int = 9, m: int = 13, **more: torch.Tensor) -> Inputs:
    made = Inputs(*(torch.randn(2, s, h, 16, dtype=dtype) for s, h in ((n, 4), (m, 2), (m, 2))), **more)
    for t in (made.q, made.k, made.v, made.bias, made.sinks):
        if t is not None:
            t.requires_grad_()
    return made


@pytest.mark.parametrize("name", CONTRACT)
def test_signatures_are_flash_attention_2s(name: str) -> None:
    parameters = inspect.signature(getattr(flashlane, name)).parameters.values()
    positional = [p.replace(annotation=p.empty) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [str(p) for p in positional] == [str(p) for p in _parse(CONTRACT[name])]
    ours = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert ours == {"kernel": None, "return_lse": False, "sinks": None, "attn_bias": None, "logit_scale": None}


def _parse(arguments: str) -> list[inspect.Parameter]:
    scope: dict[str, Any] = {}
    exec(f"def f({arguments}): ...", scope)
    return list(inspect.signature(scope["f"]).parameters.values())


@pytest.mark.parametrize("kernel", ["reference", "tiled"])
def test_results_and_gradients(kernel: str) -> None:
    inputs = leaves(bias=torch.randn(4, 1, 13, dtype=torch.float64), sinks=torch.randn(4, dtype=torch.float64))
    options = {"causal": True, "window_size": (6, 3), "softcap": 4.0}
    out, lse = flashlane.flash_attn_func(
        inputs.q,
        inputs.k,
        inputs.v,
        softmax_scale=0.3,
        kernel=kernel,
        return_lse=True,
        sinks=inputs.sinks,
        attn_bias=inputs.bias,
        **options,
    )
    want = reference_attention(AttentionProblem.from_inputs(inputs, scale=0.3, **options), inputs)
    torch.testing.assert_close((out, lse), want)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    torch.testing.assert_close(gradients(inputs, out, lse, do, dlse), gradients(inputs, *want, do, dlse))


def test_either_result_alone_can_be_differentiated() -> None:
    inputs = leaves()
    want = reference_attention(AttentionProblem.from_inputs(inputs), inputs)
    for which in (0, 1):
        got = flashlane.flash_attn_func(inputs.q, inputs.k, inputs.v, return_lse=True)[which]
        push = torch.randn_like(got)
        for tensor, weight in ((inputs.q, 1), (inputs.k, 1)):
            grads = (torch.autograd.grad(t, tensor, push * weight, retain_graph=True)[0] for t in (got, want[which]))
            torch.testing.assert_close(*grads)


def test_gradcheck_through_the_operator() -> None:
    inputs = leaves(n=3, m=4, sinks=torch.randn(4, dtype=torch.float64))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> Any:
        asked = {"causal": True, "softcap": 2.0, "return_lse": True, "kernel": "tiled"}
        return flashlane.flash_attn_func(q, k, v, sinks=sinks, **asked)

    assert torch.autograd.gradcheck(call, (inputs.q, inputs.k, inputs.v, inputs.sinks), fast_mode=True)


def test_a_second_derivative_is_refused() -> None:
    inputs = leaves()
    out = flashlane.flash_attn_func(inputs.q, inputs.k, inputs.v)
    (dq,) = torch.autograd.grad(out.sum(), inputs.q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        dq.sum().backward()


def test_where_nothing_watches_the_operator_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = leaves()
    want = flashlane.flash_attn_func(inputs.q, inputs.k, inputs.v)
    monkeypatch.setattr(schema, "operands", None)
    with torch.no_grad():
        assert torch.equal(flashlane.flash_attn_func(inputs.q, inputs.k, inputs.v), want.detach())
    assert torch.equal(flashlane.flash_attn_func(inputs.q, inputs.k, inputs.v), want)
    with pytest.raises(TypeError, match="not callable"), FakeTensorMode(allow_non_fake_inputs=True):
        flashlane.flash_attn_func(inputs.q, inputs.k, inputs.v)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("modified", [False, True])
def test_opcheck(varlen: bool, modified: bool) -> None:
    more = {"bias": torch.randn(1, 5), "sinks": torch.randn(4), "alibi_slopes": torch.rand(4)} if modified else {}
    cu = torch.tensor([0, 2, 5], dtype=torch.int32) if varlen else None
    outer = (5,) if varlen else (1, 5)
    q, k, v = (torch.randn(*outer, h, d, requires_grad=True) for h, d in ((4, 8), (2, 8), (2, 6)))
    longest = (5 if modified else 3) if varlen else None
    inputs = Inputs(q, k, v, **more, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)
    for t in (inputs.bias, inputs.sinks):
        if t is not None:
            t.requires_grad_()
    asked = CallOptions(causal=True, softcap=1.5)
    operands = schema.operands(inputs, asked, True, "tiled")
    torch.library.opcheck(torch.ops.flashlane.forward.default, operands)
    out, lse = (t.detach() for t in torch.ops.flashlane.forward(*operands))
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in operands]
    args = (out, lse, torch.randn_like(out), torch.randn_like(lse), modified, *plain)
    torch.library.opcheck(torch.ops.flashlane.backward.default, args)


@pytest.mark.parametrize("bias_grad", [False, True])
@pytest.mark.parametrize("given", [(), ("bias",), ("sinks",), ("bias", "sinks")])
def test_the_backward_operator_gives_the_gradients_that_there_are(given: tuple[str, ...], bias_grad: bool) -> None:
    made = {"bias": torch.randn(4, 1, 13, dtype=torch.float64), "sinks": torch.randn(4, dtype=torch.float64)}
    inputs = leaves(**{name: made[name] for name in given})
    asked = CallOptions(causal=True, softcap=2.0)
    out, lse = reference_attention(AttentionProblem.from_inputs(inputs, asked), inputs)
    do = torch.randn_like(out)
    names = ["q", "k", "v", *(name for name in given if bias_grad or name != "bias")]
    expected = torch.autograd.grad(out, [getattr(inputs, name) for name in names], do)
    operands = [t.detach() if isinstance(t, torch.Tensor) else t for t in schema.operands(inputs, asked, True, "tiled")]
    got = torch.ops.flashlane.backward(out.detach(), lse.detach(), do, None, bias_grad, *operands)
    torch.testing.assert_close(tuple(got), expected)


def test_a_compiled_graph_passes_no_trailing_defaults() -> None:
    seen: dict[str, int] = {}

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.update({str(node.target): len(node.args) for node in graph.graph.nodes if "flashlane" in str(node.target)})
        return make_boxed_func(graph.forward)

    inputs = leaves(dtype=torch.float32)
    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    call = torch.compile(flashlane.flash_attn_func, backend=backend)
    call(inputs.q, inputs.k, inputs.v, causal=True).sum().backward()
    forward = schema.POSITION["needs_grad"] + 1
    assert forward == 6
    extras = len(schema.BACKWARD_EXTRAS)
    assert seen == {"flashlane.forward.default": forward, "flashlane.backward.default": extras + forward}


def test_inductor_passes_no_defaults_either() -> None:
    if shutil.which("g++") is None:
        pytest.skip("Inductor needs a compiler of C++")
    call = torch.compile(lambda *tensors: flashlane.flash_attn_func(*tensors, causal=True))
    inputs = leaves(dtype=torch.float32)
    _, codes = run_and_get_code(
        lambda: torch.autograd.backward(out := call(inputs.q, inputs.k, inputs.v), out.detach())
    )
    calls = [words for code in codes for words in re.findall(r"ops\.flashlane\.\w+\.default\((.*)\)", code)]
    forward = schema.POSITION["needs_grad"] + 1
    assert [len(words.split(", ")) for words in calls] == [forward, len(schema.BACKWARD_EXTRAS) + forward]


def test_guards_of_a_compiled_call_are_few() -> None:
    """Torch checks all of them at every call; loops over the tables of arguments made them 222 and 231."""
    counts: list[int] = []

    def keep_all(guards: Sequence[Any]) -> list[bool]:
        counts.append(len(guards))
        return [True] * len(guards)

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flashlane.flash_attn_func(q, k, v, causal=True)

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> Any:
        return flashlane.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True)

    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    for function, tensors in ((dense, torch.randn(3, 2, 9, 4, 8)), (packed, [*torch.randn(3, 9, 4, 8), ends])):
        torch.compile(function, backend="eager", options={"guard_filter_fn": keep_all})(*tensors)
    assert len(counts) == 2 and max(counts) < 150


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic: bool) -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flashlane.flash_attn_func(q * 2, k, v, causal=True, window_size=(5, -1), return_lse=True)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (9, 11):
        inputs = leaves(n=n)
        got, want = (f(inputs.q, inputs.k, inputs.v) for f in (compiled, loss))
        torch.testing.assert_close(got, want)
        do, dlse = torch.randn_like(got[0]), torch.randn_like(got[1])
        torch.testing.assert_close(gradients(inputs, *got, do, dlse), gradients(inputs, *want, do, dlse))


def test_compiles_and_exports_without_a_gradient() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return flashlane.scaled_dot_product_attention(q, k, k, is_causal=True)

    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    want = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    with torch.no_grad():
        compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k), want)
        torch.testing.assert_close(torch.export.export(Model(), (q, k)).module()(q, k), want)


def test_a_process_that_only_loads_a_program_imports_a_function_first(tmp_path: Path) -> None:
    """docs/torch.md says so: the package's own import does not import torch, and so defines no operator."""

    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return flashlane.flash_attn_func(q, q, q, causal=True)

    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Model(), (torch.randn(1, 5, 2, 8),)), path)
    load = f"import torch; torch.export.load({str(path)!r}).module()(torch.ones(1, 5, 2, 8))"
    done = subprocess.run([sys.executable, "-c", f"from flashlane import flash_attn_func; {load}"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_fake_tensors_get_their_shapes() -> None:
    with FakeTensorMode():
        q, k, v = torch.empty(2, 5, 4, 8), torch.empty(2, 7, 2, 8), torch.empty(2, 7, 2, 6)
        out, lse = flashlane.flash_attn_func(q.half(), k.half(), v.half(), return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 5, 4, 6), torch.float16, (2, 4, 5), torch.float32)


def test_packed_functions_equal_the_plain_one() -> None:
    qkv = torch.randn(2, 7, 3, 4, 16, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64)
    q, k, v = (t.detach().requires_grad_() for t in qkv.unbind(2))
    want = flashlane.flash_attn_func(q, k, v, causal=True, softmax_scale=0.5, sinks=sinks)
    push = torch.randn_like(want)
    expected_grads = torch.stack(torch.autograd.grad(want, (q, k, v), push), 2)

    got = flashlane.flash_attn_qkvpacked_func(qkv, causal=True, softmax_scale=0.5, sinks=sinks)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, qkv, push)[0], expected_grads)

    kv = qkv.detach()[:, :, 1:].requires_grad_()
    got = flashlane.flash_attn_kvpacked_func(q, kv, causal=True, softmax_scale=0.5, sinks=sinks)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, kv, push)[0], expected_grads[:, :, 1:])


@pytest.mark.parametrize("kernel", ["reference", "tiled"])
def test_varlen_equals_one_sequence_after_another(kernel: str) -> None:
    lengths_q, lengths_k = (3, 0, 70, 2), (5, 4, 66, 0)
    q, k, v = (
        torch.randn(sum(n), h, 16, dtype=torch.float64, requires_grad=True)
        for n, h in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k))
    slopes = torch.rand(4, 4)
    out, lse = flashlane.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 70, 66, causal=True, alibi_slopes=slopes, kernel=kernel, return_lse=True
    )
    of_documents = [
        flashlane.flash_attn_func(
            a[None], b[None], c[None], causal=True, alibi_slopes=slopes[i], kernel=kernel, return_lse=True
        )
        for i, (a, b, c) in enumerate(zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True))
    ]
    want = torch.cat([p[0][0] for p in of_documents])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, torch.cat([p[1][0] for p in of_documents], 1))
    push = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), push), torch.autograd.grad(want, (q, k, v), push))


def test_return_attn_probs_gives_three_values_as_flash_attention_2() -> None:
    inputs = leaves()
    out, lse, s_dmask = flashlane.flash_attn_func(inputs.q, inputs.k, inputs.v, return_attn_probs=True)
    want = reference_attention(AttentionProblem.from_inputs(inputs), inputs)
    torch.testing.assert_close((out, lse), want)
    assert s_dmask.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_sdpa_equals_torch(mask: str, dtype: torch.dtype) -> None:
    inputs = leaves(dtype, n=33, m=47)
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    attn_mask = {"bool": torch.rand(2, 1, 33, 47) < 0.5, "float": torch.randn(33, 47, dtype=dtype)}.get(mask)
    if mask == "bool":
        attn_mask[:, :, 4] = False
    asked = {"attn_mask": attn_mask, "is_causal": mask == "causal", "scale": 0.2, "enable_gqa": True}
    got = flashlane.scaled_dot_product_attention(q, k, v, **asked)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    if mask == "float":
        asked["attn_mask"] = attn_mask.double()
    want = F.scaled_dot_product_attention(*exact, **asked)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=2 * ulp, atol=4 * ulp)
    do = torch.randn_like(want).to(dtype)
    pairs = zip(torch.autograd.grad(got, (q, k, v), do), torch.autograd.grad(want, exact, do.double()), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.double(), theirs, rtol=4 * ulp, atol=8 * ulp * float(theirs.abs().max()))


def test_a_float_mask_gets_its_gradient() -> None:
    q, k, v = (torch.randn(2, 4, 9, 16, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(4, 1, 9, dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(attend(q, k, v, attn_mask=mask).square().sum(), mask)[0]
        for attend in (flashlane.scaled_dot_product_attention, F.scaled_dot_product_attention)
    ]
    torch.testing.assert_close(*grads)


Q = torch.randn(2, 5, 4, 8)
CU = torch.tensor([0, 5], dtype=torch.int32)
BAD = {
    "scale": (lambda: flashlane.flash_attn_func(Q, Q, Q, softmax_scale="x"), TypeError, "^softmax_scale is 'x'"),
    "bias": (lambda: flashlane.flash_attn_func(Q, Q, Q, attn_bias=Q), ValueError, "^attn_bias has shape"),
    "sinks": (lambda: flashlane.flash_attn_func(Q, Q, Q, sinks=Q), ValueError, "^sinks has shape"),
    "qkv": (lambda: flashlane.flash_attn_qkvpacked_func(Q), ValueError, r"^qkv has shape \(2, 5, 4, 8\); .*3, heads"),
    "qkv type": (lambda: flashlane.flash_attn_qkvpacked_func(None), TypeError, "^qkv is None"),
    "kv": (lambda: flashlane.flash_attn_kvpacked_func(Q, Q), ValueError, "^kv has shape .*2, heads, head_dim"),
    "cu": (lambda: flashlane.flash_attn_varlen_func(Q, Q, Q, None, None, 5, 5), TypeError, "^cu_seqlens_q is None"),
    "rank": (lambda: flashlane.scaled_dot_product_attention(Q[0], Q, Q), ValueError, "^key has shape .*rank 4.*rank 3"),
    "rank 2": (lambda: flashlane.scaled_dot_product_attention(Q[0, 0], Q, Q), ValueError, "^query has shape .*rank 4"),
    "nested": (
        lambda: flashlane.scaled_dot_product_attention(torch.nested.nested_tensor([Q[0]]), Q, Q),
        TypeError,
        "^query is a nested tensor; flash_attn_varlen_func",
    ),
    "value": (lambda: flashlane.scaled_dot_product_attention(Q, Q, 3), TypeError, "^value is an int"),
    "kernel": (lambda: flashlane.flash_attn_func(Q, Q, Q, kernel=3), TypeError, "^kernel is 3; it must be the tag of"),
    "is_causal": (
        lambda: flashlane.scaled_dot_product_attention(Q, Q, Q, is_causal="yes"),
        TypeError,
        "^is_causal is 'yes'; it must be True or False",
    ),
    "both masks": (
        lambda: flashlane.scaled_dot_product_attention(Q, Q, Q, torch.ones(4, 4) > 0, is_causal=True),
        ValueError,
        "is_causal is True and attn_mask is given",
    ),
    "gqa": (lambda: flashlane.scaled_dot_product_attention(Q, Q[:, :1], Q[:, :1]), ValueError, "enable_gqa is True"),
    "sdpa length": (
        lambda: flashlane.scaled_dot_product_attention(Q, Q, Q[:, :, :1]),
        ValueError,
        f"value has length 1 and key has {Q.shape[2]}",
    ),
    "mask shape": (
        lambda: flashlane.scaled_dot_product_attention(Q, Q, Q, torch.ones(3, 3)),
        ValueError,
        "^attn_mask has shape",
    ),
    "mask dtype": (
        lambda: flashlane.scaled_dot_product_attention(Q, Q, Q, torch.ones(4, 4).half()),
        TypeError,
        "^attn_mask has dtype torch.float16",
    ),
    "key dtype": (
        lambda: flashlane.scaled_dot_product_attention(Q, Q.half(), Q),
        TypeError,
        "^key has dtype torch.float16 and query has torch.float32; they must be equal",
    ),
    "operator": (
        lambda: torch.ops.flashlane.forward(Q, Q.half(), Q, alignment="top-left"),
        TypeError,
        "^k has dtype torch.float16",
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_errors_name_the_callers_argument(case: tuple) -> None:
    call, kind, message = case
    with pytest.raises(kind, match=message):
        call()


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, flashlane; assert flashlane.__version__ and 'torch' not in sys.modules; flashlane.explain"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_is_there() -> None:
    for name in flashlane.__all__:
        assert getattr(flashlane, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'flash_attention'"):
        flashlane.flash_attention  # noqa: B018


@pytest.mark.parametrize("shape", [(2, 9, 4, 16), (1, 0, 2, 8)])
def test_a_remembered_call_gives_what_the_first_gave(shape: tuple[int, ...]) -> None:
    call_cache.forget()
    q, k, v = (torch.randn(shape) for _ in range(3))
    first = flashlane.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert len(call_cache._entries) == 1
    out, lse = flashlane.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, first[0]) and torch.equal(lse, first[1])
    assert out.is_contiguous() and out.stride() == torch.empty(shape).stride() and lse.is_contiguous()
    full = flashlane.flash_attn_func(q, k, v)
    assert len(call_cache._entries) == 2 and (shape[1] == 0 or not torch.equal(full, out))


def test_a_remembered_call_is_not_taken_for_one_that_wants_gradients() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    plain = flashlane.flash_attn_func(q, k, v)
    assert not plain.requires_grad
    with_grad = flashlane.flash_attn_func(q.requires_grad_(), k, v)
    assert with_grad.requires_grad and torch.allclose(with_grad, plain)
    assert flashlane.flash_attn_func(q, k, v).requires_grad
    with torch.no_grad():
        assert not flashlane.flash_attn_func(q, k, v).requires_grad


def test_another_table_of_kernels_forgets_remembered_calls() -> None:
    class Ones(registry.Kernel):
        tag, family, summary, source, priority = "ones", "test", "", "", 1000

        def supports(self, problem: object) -> None:
            return None

        def forward(self, problem: object, inputs: object, out: torch.Tensor, lse: torch.Tensor) -> None:
            out.fill_(1.0)

    q = torch.randn(1, 5, 2, 8)
    before = flashlane.flash_attn_func(q, q, q)
    with registry.table_of(registry.get("reference"), Ones()):
        assert flashlane.flash_attn_func(q, q, q).eq(1).all()
    assert torch.equal(flashlane.flash_attn_func(q, q, q), before)


def test_a_call_remembered_in_inference_mode_serves_outside_it() -> None:
    call_cache.forget()
    q = torch.randn(1, 6, 2, 8)
    with torch.inference_mode():
        inside = flashlane.flash_attn_func(q, q, q)
    assert inside.is_inference()
    with torch.no_grad():
        outside = flashlane.flash_attn_func(q, q, q)
    assert not outside.is_inference() and torch.equal(outside, inside)
    (
        outside * torch.ones(1, requires_grad=True)
    ).sum().backward()  # saved for a backward pass: inference tensors may not


def test_the_operator_has_defaults_under_every_transform() -> None:
    """The dispatcher leaves trailing defaults off, so that every Python kernel of ours sees fewer arguments."""
    q, k, v = (torch.randn(2, 9, 2, 16) for _ in range(3))
    short = torch.ops.flashlane.forward
    defaults = (None, False, False, [-1, -1], "bottom-right", 0.0, 0.0, False, None, *[None] * 12)
    want = short(q, k, v, *defaults)
    torch.testing.assert_close(short(q, k, v), want)
    torch.testing.assert_close(
        want, reference_attention(AttentionProblem.from_inputs(Inputs(q, k, v)), Inputs(q, k, v))
    )
    causal = short(q, k, v, causal=True)
    assert not torch.equal(causal[0], want[0])
    batched = torch.vmap(lambda *t: short(*t, causal=True))(*(torch.stack([t, -t]) for t in (q, k, v)))
    torch.testing.assert_close([t[0] for t in batched], list(causal))
    flops = []
    for call in (lambda: short(q, k, v), lambda: short(q, k, v, *defaults)):
        with FlopCounterMode(display=False) as counter:
            call()
        flops.append(counter.get_total_flops())
    assert flops == [2 * 2 * 2 * 9 * 9 * (16 + 16)] * 2
    with torch.autocast("cpu", torch.bfloat16):
        assert short(q, k, v)[0].dtype == torch.bfloat16
    compiled = torch.compile(lambda *t: short(*t, causal=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), causal)
    wanting = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(short(wanting, k, v, causal=True)[0].sum(), wanting)
    torch.testing.assert_close(grad, torch.func.grad(lambda x: short(x, k, v, causal=True)[0].sum())(q))


@pytest.mark.parametrize("masked", ["none", "causal", "of all", "of each"])
def test_scaled_dot_product_attention_of_rank_3_is_of_one_head(masked: str) -> None:
    draw = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(3, n, 16, generator=draw, requires_grad=True) for n in (7, 9, 9))
    asked: dict[str, object] = {"is_causal": masked == "causal"}
    if masked.startswith("of"):
        shape = (7, 9) if masked == "of all" else (3, 7, 9)
        asked["attn_mask"] = torch.rand(shape, generator=draw) < 0.8
    found = flashlane.scaled_dot_product_attention(q, k, v, **asked)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, **asked)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    grads, wanted = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, right))
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-4)
