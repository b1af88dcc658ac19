"""What torch does to a call: seeds, compile, export, autocast, torch.func, FLOP counter, checkpointing, subclasses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashlane
from flashlane.bench.measure.flops import flops
from flashlane.core.problem import AttentionProblem, CallOptions, Inputs
from flashlane.ops import call as ops
from flashlane.ops import schema, torch_rules
from flashlane.ops.flops import visible_pairs

pytestmark = pytest.mark.usefixtures("torch_kernels")
F64 = torch.float64


def qkv(dtype: torch.dtype = F64, n: int = 9, m: int = 13, grad: bool = True) -> list[torch.Tensor]:
    made = (torch.randn(2, s, h, 16, dtype=dtype) for s, h in ((n, 4), (m, 2), (m, 2)))
    return [t.requires_grad_(grad) for t in made]


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = (t.repeat_interleave(group, -3) for t in (k, v))
    return (torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v).transpose(-2, -3)


# --- dropout's seed ---


def test_dropout_repeats_with_torchs_seed_and_differs_without() -> None:
    q, k, v = qkv()
    torch.manual_seed(3)
    first = flashlane.flash_attn_func(q, k, v, 0.5)
    second = flashlane.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(3)
    again = flashlane.flash_attn_func(q, k, v, 0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert not torch.equal(first, flashlane.flash_attn_func(q, k, v))


def test_without_dropout_no_number_is_drawn() -> None:
    q, k, v = qkv()
    before = torch.get_rng_state()
    flashlane.flash_attn_func(q, k, v)
    flashlane.explain(q, k, v, 0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_given_seed_is_used() -> None:
    q, k, v = qkv()
    draws = [ops.attend(Inputs(q, k, v, dropout_seed=torch.tensor([s])), dropout_p=0.5)[0] for s in (5, 5, 6)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_dropout_backward_sees_the_forwards_mask() -> None:
    q, k, v = qkv(n=5, m=6)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return flashlane.flash_attn_func(*tensors, 0.4)

    assert torch.autograd.gradcheck(call, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_dropout_gives_equal_gradients(reentrant: bool) -> None:
    q, k, v = qkv()

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashlane.flash_attn_func(q.sin(), k, v, 0.5, causal=True).square()

    grads = []
    for run in (block, lambda *args: checkpoint(block, *args, use_reentrant=reentrant)):
        torch.manual_seed(1)
        q.grad = k.grad = v.grad = None
        run(q, k, v).sum().backward()
        grads.append([t.grad for t in (q, k, v)])
    torch.testing.assert_close(*grads, rtol=0, atol=0)


# --- compile and export ---


class Block(torch.nn.Module):
    """A transformer block, pre-norm."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.GELU(), torch.nn.Linear(64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        mixed = flashlane.flash_attn_qkvpacked_func(packed, self.dropout if self.training else 0.0, causal=True)
        x = x + self.out(mixed.flatten(2))
        return x + self.mlp(self.norms[1](x))


def trained(block: Callable[[torch.Tensor], torch.Tensor], module: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    torch.manual_seed(5)
    out = block(x)
    return [out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_transformer_block_compiles_as_one_graph_forward_and_backward(dropout: float) -> None:
    torch._dynamo.reset()
    block, x = Block(dropout=dropout), torch.randn(2, 17, 32)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(trained(compiled, block, x), trained(block, block, x))
    again = trained(compiled, block, x)
    torch.testing.assert_close(again, trained(compiled, block, x), rtol=0, atol=0)


def test_exports_with_dropout_and_decomposes() -> None:
    block, x = Block(dropout=0.3), torch.randn(2, 17, 32)
    program = torch.export.export(block.train(), (x,))
    names = [str(node.target) for node in program.graph.nodes]
    assert sum("flashlane.forward" in name for name in names) == 1, names
    torch.manual_seed(0)
    want = block(x)
    torch.manual_seed(0)
    torch.testing.assert_close(program.module()(x), want)
    decomposed = program.run_decompositions()
    assert any("flashlane.forward" in str(node.target) for node in decomposed.graph.nodes)


FEATURES = ("dropout", "varlen", "alibi", "bias", "sinks", "windowed")


@pytest.mark.parametrize("on", [(), *itertools.combinations(FEATURES, 1), FEATURES], ids="+".join)
def test_opcheck_of_both_operators_with_every_feature(on: tuple[str, ...]) -> None:
    cu = torch.tensor([0, 2, 5], dtype=torch.int32) if "varlen" in on else None
    outer = (5,) if "varlen" in on else (2, 5)
    q, k, v = (torch.randn(*outer, h, d, requires_grad=True) for h, d in ((4, 8), (2, 8), (2, 6)))
    inputs = Inputs(
        q,
        k,
        v,
        alibi_slopes=torch.rand(2, 4) if "alibi" in on else None,
        bias=torch.randn(4, 1, 3 if "varlen" in on else 5, requires_grad=True) if "bias" in on else None,
        sinks=torch.randn(4, requires_grad=True) if "sinks" in on else None,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        dropout_seed=torch.tensor([11]) if "dropout" in on else None,
        max_seqlen_q=3 if "varlen" in on else None,
        max_seqlen_k=3 if "varlen" in on else None,
    )
    window = (2, 1) if "windowed" in on else (-1, -1)
    asked = CallOptions(0.5, "windowed" not in on, "top-left", window, 1.5, 0.5 * ("dropout" in on), True)
    operands = schema.operands(inputs, asked, True, "tiled")
    torch.library.opcheck(torch.ops.flashlane.forward.default, operands)
    out, lse = (t.detach() for t in torch.ops.flashlane.forward(*operands))
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in operands]
    args = (out, lse, torch.randn_like(out), torch.randn_like(lse), "bias" in on, *plain)
    torch.library.opcheck(torch.ops.flashlane.backward.default, args)


def test_opcheck_of_a_paged_cache() -> None:
    q, pages = torch.randn(2, 3, 4, 8), torch.randn(5, 4, 2, 8)
    table = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
    inputs = Inputs(q, pages, pages, seqused_k=torch.tensor([7, 5], dtype=torch.int32), block_table=table)
    operands = schema.operands(inputs, CallOptions(causal=True), False, "tiled")
    torch.library.opcheck(torch.ops.flashlane.forward.default, operands)


# --- autocast ---


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_q_k_v_as_torchs_attention_does(compiled: bool) -> None:
    torch._dynamo.reset()
    q, k, v = qkv(torch.float32)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return flashlane.flash_attn_func(q.bfloat16(), k, v)  # as behind a projection and a rotary embedding

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    out = run(q, k, v)
    low = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    want = flashlane.flash_attn_func(*low)
    assert out.dtype == torch.bfloat16 and torch.equal(out, want)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    wanted = torch.autograd.grad(want.float().square().sum(), low)
    assert all(g.dtype == torch.float32 for g in grads)
    torch.testing.assert_close(grads, tuple(g.float() for g in wanted), rtol=0, atol=0)


def test_autocast_reaches_the_operator_and_not_into_the_kernel() -> None:
    q, k, v = qkv(torch.float32, grad=False)
    wide = qkv(grad=False)
    tail = (None, False, False, [-1, -1], "top-left", 0.0, 0.0, False, "reference", *[None] * 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ops.flashlane.forward(q, k, v, *tail)[0].dtype == torch.bfloat16
        # f64 is not cast, by torch's rule, and what computes it must not be cast either
        inside = flashlane.flash_attn_func(*wide)
        assert flashlane.explain(q, k, v).problem.dtype == torch.bfloat16
    assert torch.equal(inside, flashlane.flash_attn_func(*wide))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_meta_tensors_pass_under_autocast_of_another_device(dtype: torch.dtype) -> None:
    """Meta tensors have no autocast of their own: their dtype stays, as with torch's attention."""
    q, k, v = (t.detach().to("meta", dtype).requires_grad_() for t in qkv(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        out = flashlane.flash_attn_func(q, k, v)
        want = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True)
        out.sum().backward()
    assert out.dtype == want.dtype == q.grad.dtype == dtype
    assert out.shape == want.transpose(1, 2).shape and q.grad.shape == q.shape


def test_autocast_takes_a_float_mask_of_another_dtype() -> None:
    q, k, v = (t.transpose(1, 2) for t in qkv(torch.bfloat16, grad=False))
    mask = torch.randn(9, 13)
    with pytest.raises(TypeError, match=r"attn_mask has dtype torch.float32"):
        flashlane.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = flashlane.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    want = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask, enable_gqa=True)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


# --- torch.func ---


FUNCTIONS: dict[str, Callable[[Callable[..., torch.Tensor]], Any]] = {
    "grad": lambda f: torch.func.grad(lambda *a: f(*a).square().sum(), argnums=(0, 1, 2))(*qkv(grad=False)),
    "vjp": lambda f: torch.func.vjp(f, *qkv(grad=False))[1](torch.ones(2, 9, 4, 16, dtype=F64)),
    "jacrev": lambda f: torch.func.jacrev(lambda *a: f(*a).sum((-1, -2)), argnums=1)(*qkv(n=3, grad=False)),
    "vmap": lambda f: torch.func.vmap(f, in_dims=(1, None, 4))(
        torch.randn(2, 3, 9, 4, 16, dtype=F64),
        torch.randn(2, 13, 2, 16, dtype=F64),
        torch.randn(2, 13, 2, 16, 3, dtype=F64),
    ),
    "gradients of each sample": lambda f: torch.func.vmap(
        torch.func.grad(lambda *a: f(*a).square().sum(), argnums=(0, 1, 2)), in_dims=(0, 0, None)
    )(torch.randn(3, 2, 5, 4, 16, dtype=F64), torch.randn(3, 2, 7, 2, 16, dtype=F64), qkv(m=7, grad=False)[1]),
    "gradient of vmap": lambda f: torch.func.grad(lambda x: torch.func.vmap(lambda y: f(y, y, y))(x).square().sum())(
        torch.randn(3, 1, 5, 2, 8, dtype=F64)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_func(name: str) -> None:
    results = []
    for attend in (flashlane.flash_attn_func, torch_attention):
        torch.manual_seed(0)
        results.append(FUNCTIONS[name](attend))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "feature",
    ["alibi", "alibi of each", "alibi of one sequence", "bias", "bias of each", "sinks", "sinks of each", "lse"],
)
def test_vmap_of_features_is_one_call_after_another(feature: str) -> None:
    batch = 1 if feature.endswith("of one sequence") else 2
    q, k = torch.randn(3, batch, 5, 4, 8, dtype=F64), torch.randn(3, batch, 7, 2, 8, dtype=F64)
    each = feature.endswith("of each")
    shapes = {"alibi": (batch, 4), "bias": (4, 5, 1), "sinks": (4,), "lse": ()}
    kind = feature.split()[0]
    extra = torch.rand(((3,) if each else ()) + shapes[kind], dtype=torch.float32 if kind == "alibi" else F64)
    keyword = {"alibi": "alibi_slopes", "bias": "attn_bias", "sinks": "sinks"}.get(kind)

    def call(q: torch.Tensor, k: torch.Tensor, extra: torch.Tensor) -> Any:
        more = {keyword: extra} if keyword else {}
        return flashlane.flash_attn_func(q, k, k, causal=True, return_lse=True, **more)

    def loss(q: torch.Tensor, k: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        out, lse = call(q, k, extra)
        return out.square().sum() + lse[:, :, 2:].sum()

    argnums = (0, 1) if kind in ("alibi", "lse") else (0, 1, 2)
    for function in (call, torch.func.grad(loss, argnums=argnums)):
        got = torch.func.vmap(function, in_dims=(0, 0, 0 if each else None))(q, k, extra)
        want = [function(q[i], k[i], extra[i] if each else extra) for i in range(3)]
        torch.testing.assert_close(got, tuple(torch.stack(parts) for parts in zip(*want, strict=True)))


def test_vmap_of_dropout_obeys_torchs_randomness() -> None:
    q, k, v = (t.expand(3, *t.shape) for t in qkv(grad=False))
    call = lambda *a: flashlane.flash_attn_func(*a, 0.5)  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call)(q, k, v)
    same = torch.func.vmap(call, randomness="same")(q, k, v)
    assert torch.equal(same[0], same[1])
    different = torch.func.vmap(call, randomness="different")(q, k, v)
    assert not torch.equal(different[0], different[1])


def _sum(q: torch.Tensor) -> torch.Tensor:
    return flashlane.flash_attn_func(q, q, q).square().sum()


def _dual(q: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return _sum(forward_ad.make_dual(q, q))


def _dual_slopes(q: torch.Tensor) -> Any:
    """Of an argument that has no reverse-mode derivative either."""
    with forward_ad.dual_level():
        slopes = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        return ops.attend(Inputs(q, q, q, alibi_slopes=slopes))


FORWARD = "no forward-mode derivative"
TWICE = "differentiated once"
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "jvp": (lambda q: torch.func.jvp(_sum, (q,), (q,)), FORWARD),
    "jacfwd": (lambda q: torch.func.jacfwd(_sum)(q), FORWARD),
    "dual numbers": (_dual, FORWARD),
    "dual slopes": (_dual_slopes, FORWARD),
    "hessian": (lambda q: torch.func.hessian(_sum)(q), FORWARD),
    "jvp of grad": (lambda q: torch.func.jvp(torch.func.grad(_sum), (q,), (q,)), FORWARD),
    "grad of grad": (lambda q: torch.func.grad(lambda x: torch.func.grad(_sum)(x).sum())(q), TWICE),
    "jacrev of jacrev": (lambda q: torch.func.jacrev(torch.func.jacrev(_sum))(q), TWICE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_derivatives_that_there_are_not_are_errors(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=message):
        call(torch.randn(1, 3, 2, 8, dtype=F64))


@pytest.mark.parametrize("mapped", ["nothing", "q", "slopes"])
def test_no_gradient_of_slopes_is_lost(mapped: str) -> None:
    q, slopes = torch.randn(3, 1, 3, 2, 8), torch.rand(3, 2)

    def call(q: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        return flashlane.flash_attn_func(q, q, q, alibi_slopes=slopes).sum()

    def total(slopes: torch.Tensor) -> torch.Tensor:
        if mapped == "nothing":
            return call(q[0], slopes[0])
        if mapped == "q":
            return torch.vmap(lambda each: call(each, slopes[0]))(q).sum()
        return torch.vmap(lambda each: call(q[0], each))(slopes).sum()

    total(slopes)  # one like it that requires none
    message = "alibi_slopes is a tensor that requires gradients, and gets none; detach it"
    for ask in (torch.func.grad(total), torch.func.jacrev(total)):
        with pytest.raises(TypeError, match=message):
            ask(slopes)
    for _ in range(2):
        with pytest.raises(TypeError, match=message):
            total(slopes.requires_grad_())
    with torch.no_grad():
        assert not total(slopes).requires_grad


def test_what_has_no_derivative_is_asked_for_its_tangent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a kernel, which on a GPU would drop it."""
    seen: list[Any] = []
    monkeypatch.setattr(torch_rules, "refuse_tangents", seen.extend)
    slopes = torch.ones(2)
    with forward_ad.dual_level():
        ops.attend(Inputs(*[torch.randn(1, 3, 2, 8)] * 3, alibi_slopes=slopes))
    assert any(t is slopes for t in seen)


def test_what_has_no_tangent_is_computed_among_dual_numbers() -> None:
    q, k, v = qkv()
    expected = flashlane.flash_attn_func(q, k, v)
    with forward_ad.dual_level():
        out = flashlane.flash_attn_func(q, k, v)
        torch.testing.assert_close(out, expected)
        assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


# --- modes, subclasses, views ---


def test_inference_mode_takes_leaves_and_wants_no_gradient() -> None:
    q, k, v = qkv()
    with torch.inference_mode():
        out = flashlane.flash_attn_func(q, k, v)
        through = torch.ops.flashlane.forward(
            q, k, v, None, False, False, [-1, -1], "bottom-right", 0.0, 0.0, False, None, *[None] * 12
        )[0]
        assert not flashlane.explain(q, k, v).problem.needs_grad
    assert out.is_inference() and torch.equal(out, through)
    torch.testing.assert_close(out.clone(), torch_attention(q, k, v).detach())


@pytest.mark.parametrize("kernel", [None, "reference", "tiled"])
def test_gradients_switched_on_in_inference_mode_are_recorded_no_more_than_torchs(kernel: str | None) -> None:
    """Autograd records nothing there; what it cannot save must not be given to it."""
    q, k, v = qkv()
    slopes = torch.ones(q.shape[2], requires_grad=True)
    expected = flashlane.flash_attn_func(q, k, v, alibi_slopes=slopes.detach(), kernel=kernel)
    outs, lses = torch.randn(2, 1, 3, 2, 8, requires_grad=True), torch.randn(2, 1, 2, 3)
    with torch.inference_mode(), torch.enable_grad():
        for _ in range(2):
            out = flashlane.flash_attn_func(q, k, v, alibi_slopes=slopes, kernel=kernel)
            assert out.is_inference() and not out.requires_grad and torch.equal(out, expected)
        assert not flashlane.combine(list(outs), list(lses))[0].requires_grad
        assert not flashlane.flash_attn_with_kvcache(q, k, v, kernel=kernel).requires_grad
    assert flashlane.flash_attn_func(q, k, v, kernel=kernel).requires_grad


class _Halved(torch.Tensor):
    """A tensor whose values are in another one, halved; it has no memory of its own, as a DTensor."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def __new__(cls, half: torch.Tensor) -> _Halved:
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype, device=half.device)

    def __init__(self, half: torch.Tensor) -> None:
        self.half = half

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        args, kwargs = tree_map(lambda t: t.half * 2 if isinstance(t, cls) else t, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", ["alibi_slopes", "attn_bias", "sinks", "logit_scale", "cu_seqlens_q"])
def test_a_subclass_in_any_place_gets_the_operator(name: str) -> None:
    """A kernel would read the address of one without memory, which is 0."""
    q, k, v = qkv(torch.float32, grad=False)
    heads = q.shape[2]
    cu_seqlens = torch.tensor([0, 2, q.shape[1]], dtype=torch.int32)
    given = {"attn_bias": torch.randn(1, heads, q.shape[1], k.shape[1]), "cu_seqlens_q": cu_seqlens}.get(name)
    given = torch.rand(heads) + 0.5 if given is None else given

    def call(t: torch.Tensor) -> torch.Tensor:
        if name != "cu_seqlens_q":
            return flashlane.flash_attn_func(q, k, v, **{name: t})
        packed = q[0], k[0, : q.shape[1]], v[0, : q.shape[1]]
        return flashlane.flash_attn_varlen_func(*packed, t, cu_seqlens, q.shape[1], q.shape[1])

    for _ in range(2):
        _Halved.seen.clear()
        half = given / 2 if given.is_floating_point() else given // 2
        torch.testing.assert_close(call(_Halved(half)), call(half * 2))
        assert torch.ops.flashlane.forward.default in _Halved.seen


def test_a_subclass_that_knows_nothing_of_attention_gets_the_operator_or_an_error() -> None:
    class Logged(torch.Tensor):
        seen: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.seen.append(str(func))
            if "flashlane" in str(func):
                raise NotImplementedError(f"{cls.__name__} has no rule for {func}")
            return super().__torch_dispatch__(func, types, args, kwargs or {})

    q, k, v = qkv(grad=False)
    with pytest.raises(NotImplementedError, match=r"Logged has no rule for flashlane.forward.default"):
        flashlane.flash_attn_func(q.as_subclass(Logged), k, v)
    assert "flashlane.forward.default" in Logged.seen


def test_a_negative_view_is_read_as_its_value() -> None:
    q, k, v = qkv(grad=False)
    negative = torch.view_as_complex(torch.stack([q, -q], -1)).conj().imag
    assert negative.is_neg()
    torch.testing.assert_close(flashlane.flash_attn_func(negative, k, v), flashlane.flash_attn_func(q, k, v))


def test_a_profiler_sees_the_operators() -> None:
    q, k, v = qkv()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flashlane.flash_attn_func(q, k, v).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"flashlane::forward", "flashlane::backward"} <= names


# --- FLOP counter ---


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    "asked", [{}, {"causal": True}, {"window_size": (3, 2)}, {"causal": True, "window_size": (4, 0)}]
)
def test_the_flop_counter_counts_visible_pairs(asked: dict[str, Any], fake: bool) -> None:
    q, k, v = qkv(torch.float32, n=19, m=11)
    problem = AttentionProblem.from_inputs(Inputs(q, k, v), **asked)

    def count() -> tuple[int, int]:
        with FlopCounterMode(display=False) as counter:
            out = flashlane.flash_attn_func(q, k, v, **asked)
            forward = counter.get_total_flops()
            out.sum().backward()
        return forward, counter.get_total_flops() - forward

    if fake:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            q, k, v = (mode.from_tensor(t) for t in (q, k, v))
            forward, backward = count()
    else:
        forward, backward = count()
    assert forward == flops(problem) and 2 * backward == 5 * forward


def test_the_flop_counter_knows_that_values_have_columns_of_their_own() -> None:
    q, k, v = (torch.randn(1, n, h, d, requires_grad=True) for n, h, d in ((7, 4, 8), (5, 2, 8), (5, 2, 24)))
    with FlopCounterMode(display=False) as counter:
        out = flashlane.flash_attn_func(q, k, v)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * 4 * 7 * 5 * (8 + 24)
    assert counter.get_total_flops() - forward == 2 * 4 * 7 * 5 * (3 * 8 + 2 * 24)


def test_the_flop_counter_reads_the_lengths_of_sequences() -> None:
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 3, 3, 10], [0, 5, 9, 13]))
    q, k = torch.randn(10, 4, 8), torch.randn(13, 2, 8)
    with FlopCounterMode(display=False) as counter:
        flashlane.flash_attn_varlen_func(q, k, k, cu_q, cu_k, 7, 5, causal=True)
    each = [
        flops(AttentionProblem.from_inputs(Inputs(*(torch.empty(1, n, 4, 8) for n in (a, b, b))), causal=True))
        for a, b in ((3, 5), (7, 4))
    ]
    assert counter.get_total_flops() == sum(each)
    cached = {"seqused_k": torch.tensor([5, 13], dtype=torch.int32), "leftpad_k": torch.tensor([1, 0]).int()}
    inputs = Inputs(torch.randn(2, 1, 4, 8), *[torch.randn(2, 16, 2, 8)] * 2, **cached)
    with FlopCounterMode(display=False) as counter:
        ops.attend(inputs, causal=True)
    assert counter.get_total_flops() == 4 * 4 * 8 * (4 + 13)


def test_pairs_are_those_of_the_problem() -> None:
    for left, right, (n, m) in itertools.product((-1, 0, 3), (-1, 0, 2), ((1, 7), (6, 6), (9, 4), (0, 3))):
        inputs = Inputs(*(torch.empty(1, length, 1, 8) for length in (n, m, m)))
        for alignment in ("bottom-right", "top-left"):
            problem = AttentionProblem.from_inputs(inputs, window_size=(left, right), alignment=alignment)
            shift = m - n if alignment == "bottom-right" else 0
            assert visible_pairs(n, m, left, right, shift) == problem.visible_pairs()
