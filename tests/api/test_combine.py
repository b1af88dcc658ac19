"""``flashlane.combine``: against one softmax over all keys, in f64; gradients, parts without keys, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashlane
from flashlane import combine, flash_attn_func, flash_attn_varlen_func


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in torch operations alone: output ``(b, sq, h, dv)`` and LSE ``(b, h, sq)``."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


def drawn(*, keys: int = 21, dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(5)
    shapes = (2, 7, 3, 8), (2, keys, 3, 8), (2, keys, 3, 5)
    tensors = [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes]
    return tuple(t.to(dtype).requires_grad_(grad) for t in tensors)


def parts_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cuts: list[int]) -> tuple[list[Any], list[Any]]:
    pairs = [attended(q, *each) for each in zip(k.split(cuts, 1), v.split(cuts, 1), strict=True)]
    return [out for out, _ in pairs], [lse for _, lse in pairs]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("cuts", [[21], [1, 20], [6, 6, 9]], ids=str)
def test_parts_give_the_whole_and_its_gradients(cuts: list[int], stacked: bool) -> None:
    q, k, v = drawn()
    want = attended(q, k, v)
    outs, lses = parts_of(q, k, v, cuts)
    got = combine(torch.stack(outs), torch.stack(lses)) if stacked else combine(outs, lses)
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    do, dlse = torch.randn_like(want[0]), torch.randn_like(want[1])
    wanted = torch.autograd.grad(want, (q, k, v), (do, dlse))
    for mine, right in zip(torch.autograd.grad(got, (q, k, v), (do, dlse)), wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)


def test_each_result_alone_has_its_gradient() -> None:
    q, k, v = drawn()
    want = attended(q, k, v)
    for at in (0, 1):
        got = combine(*parts_of(q, k, v, [9, 12]))
        mine = torch.autograd.grad(got[at].sin().sum(), (q, k, v), allow_unused=True)
        right = torch.autograd.grad(want[at].sin().sum(), (q, k, v), allow_unused=True, retain_graph=True)
        for some, other in zip(mine, right, strict=True):
            torch.testing.assert_close(
                torch.zeros(()) if some is None else some, torch.zeros(()) if other is None else other
            )


def test_first_and_second_derivatives_by_differences() -> None:
    outs = [torch.randn(1, 2, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def call(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return combine(given[:3], given[3:])

    assert torch.autograd.gradcheck(call, (*outs, *lses))
    assert torch.autograd.gradgradcheck(call, (*outs, *lses))


@pytest.mark.parametrize("kernel", ["reference", "tiled"])
def test_our_functions_over_a_prefix_and_a_rest(kernel: str) -> None:
    """A shared prefix that every query sees, then a causal rest, is causal attention over both."""
    q, k, v = (t.detach().float() for t in drawn(keys=7 + 5))
    k, v = (t.requires_grad_() for t in (k, v))
    want = flash_attn_func(q, k, v, causal=True, return_lse=True, kernel=kernel)
    prefix = flash_attn_func(q, k[:, :5], v[:, :5], return_lse=True, kernel=kernel)
    rest = flash_attn_func(q, k[:, 5:], v[:, 5:], causal=True, return_lse=True, kernel=kernel)
    got = combine([prefix[0], rest[0]], [prefix[1], rest[1]])
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    for mine, right in zip(
        torch.autograd.grad(got[0].square().sum(), (k, v)),
        torch.autograd.grad(want[0].square().sum(), (k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_packed_sequences() -> None:
    cu = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    q, k, v = (torch.randn(10, 2, 8) for _ in range(3))
    want = flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, return_lse=True)
    early = flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, window_size=(-1, 0), return_lse=True)
    # What lies after the query: everything from it on, without its own key.
    hidden = torch.zeros(3, 1, 7, 7)
    for b, n in enumerate((3, 0, 7)):
        hidden[b, 0, :n, :n] = torch.full((n, n), -torch.inf).tril()
    late = flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, attn_bias=hidden, return_lse=True)
    assert late[1][:, 9].isneginf().all()  # the last query of a sequence sees nothing after it
    got = combine([early[0], late[0]], [early[1], late[1]])
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("content", [0.0, float("nan"), float("inf")])
def test_a_part_without_keys_is_not_read(content: float) -> None:
    q, k, v = drawn()
    out, lse = attended(q, k, v)
    empty = torch.full_like(out, content).requires_grad_()
    nothing = torch.full_like(lse, -torch.inf).requires_grad_()
    got = combine([empty, out], [nothing, lse])
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    of_infinite, _ = torch.autograd.grad(got[0], (empty, nothing), torch.full_like(out, torch.inf), retain_graph=True)
    assert torch.equal(of_infinite, torch.zeros_like(out)), "what is not read has no gradient, whatever that of out is"
    for grad in torch.autograd.grad((got[0].sum() + got[1].sum()), (empty, nothing)):
        assert torch.equal(grad, torch.zeros_like(grad))
    got = combine([empty, empty], [nothing, nothing])
    assert torch.equal(got[0], torch.zeros_like(out)) and bool(got[1].isneginf().all())
    for grad in torch.autograd.grad(got[0].sum(), (empty, nothing)):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_lse_that_is_no_number_shows_in_its_row_alone(bad: float) -> None:
    q, k, v = drawn()
    outs, lses = parts_of(q.detach(), k.detach(), v.detach(), [9, 12])
    right, _ = combine(outs, lses)
    lses[0][1, 2, 3] = bad
    given = [t.requires_grad_() for t in (*outs, *lses)]
    out, lse = combine(outs, lses)
    broken = torch.zeros_like(right, dtype=torch.bool)
    broken[1, 3, 2] = True
    assert torch.equal(out.isnan(), broken) and torch.equal(out[~broken], right[~broken])
    assert not lse[1, 2, 3].isfinite() and lse.isfinite().sum() == lse.numel() - 1
    do = torch.randn_like(out)
    assert torch.autograd.grad(out, given, do)[2][1, 2, 3].isnan()


def test_a_far_smaller_set_is_read() -> None:
    """Its weight may be 0 in f32, but what it has is no leftover in memory."""
    outs, lses = [torch.randn(1, 1, 1, 4) for _ in range(2)], [torch.zeros(1, 1, 1), torch.full((1, 1, 1), -1e4)]
    assert torch.equal(combine(outs, lses)[0], outs[0])
    outs[1][..., 0] = float("nan")
    assert torch.equal(combine(outs, lses)[0].isnan(), torch.tensor([[[[True, False, False, False]]]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_in_f32_and_rounded_once(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(1)
    outs = torch.randn(5, 2, 9, 3, 16, generator=gen).to(dtype)
    lses = torch.randn(5, 2, 3, 9, generator=gen) * 20
    want, want_lse = combine(outs.double(), lses.double())
    out, lse = combine(outs, lses)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(lse, want_lse.float(), rtol=1e-6, atol=1e-5)
    assert ((out.double() - want).abs() <= (want.abs() + 1e-6) * torch.finfo(dtype).eps * 0.51).all()
    wide, _ = combine(outs, lses, out_dtype=torch.float32)
    torch.testing.assert_close(wide, want.float(), rtol=1e-5, atol=1e-6)
    assert combine(outs.float(), lses, out_dtype=dtype)[0].dtype == dtype


def test_under_vmap_and_compile() -> None:
    outs, lses = torch.randn(4, 2, 6, 2, 8), torch.randn(4, 2, 2, 6)
    want = [combine(outs[:, b : b + 1].clone(), lses[:, b : b + 1].clone()) for b in range(2)]
    got = torch.vmap(lambda o, s: combine(o.unsqueeze(1), s.unsqueeze(1)), in_dims=1)(outs, lses)
    for b in range(2):
        torch.testing.assert_close(got[0][b], want[b][0])
        torch.testing.assert_close(got[1][b], want[b][1])
    for grad in (False, True):
        given = [t.clone().requires_grad_(grad) for t in (outs, lses)]
        compiled = torch.compile(lambda *given: combine(*given), backend="aot_eager", fullgraph=True)
        mine, right = compiled(*given), combine(*given)
        torch.testing.assert_close(mine, right)
        if grad:
            each = [torch.autograd.grad(out.square().sum(), given) for out, _ in (mine, right)]
            torch.testing.assert_close(*each)


OUT, LSE = torch.zeros(2, 4, 3, 8), torch.zeros(2, 3, 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: combine([OUT], []), ValueError, "outs is of 1 sets of keys and lses of 0"),
        (lambda: combine([], []), ValueError, "outs is of 0 sets"),
        (
            lambda: combine([OUT], [LSE.transpose(1, 2)]),
            ValueError,
            r"lses\[0\] has shape \(2, 4, 3\); it must be \(2, 3, 4\)",
        ),
        (lambda: combine([OUT, OUT[:1]], [LSE, LSE]), ValueError, r"outs\[1\] has shape \(1, 4, 3, 8\); it must be"),
        (lambda: combine([OUT, OUT.half()], [LSE, LSE]), TypeError, r"outs\[1\] has dtype torch.float16"),
        (lambda: combine([OUT.int()], [LSE]), TypeError, r"outs\[0\] has dtype torch.int32"),
        (
            lambda: combine([OUT, OUT.to("meta")], [LSE, LSE]),
            ValueError,
            r"outs\[1\] is on meta and outs\[0\] is on cpu",
        ),
        (lambda: combine(None, [LSE]), TypeError, "outs is None; it must be a sequence"),
        (lambda: combine("ab", [LSE]), TypeError, "outs is a str; it must be a sequence"),
        (lambda: combine([OUT, OUT.numpy()], [LSE, LSE]), TypeError, r"outs\[1\] is a numpy.ndarray; it must be"),
        (lambda: combine(torch.zeros(()), [LSE]), ValueError, r"outs has shape \(\)"),
        (lambda: combine([OUT[0, 0]], [LSE]), ValueError, r"outs\[0\] has shape \(3, 8\)"),
        (lambda: combine([OUT], [LSE], out_dtype=torch.int32), TypeError, "out_dtype is torch.int32"),
        (lambda: combine([OUT], [LSE], out_dtype=[OUT.dtype]), TypeError, r"out_dtype is \[torch.float"),
        (lambda: combine([OUT], [LSE], out_dtype=torch.float8_e4m3fn), TypeError, "out_dtype is torch.float8_e4m3fn"),
        (lambda: combine([OUT.to(torch.float8_e4m3fn)], [LSE]), TypeError, r"outs\[0\] has dtype torch.float8_e4m3fn"),
        (lambda: combine([OUT.to_sparse()], [LSE]), TypeError, r"outs\[0\] has layout torch.sparse_coo"),
        (lambda: combine([OUT], [LSE.to_sparse()]), TypeError, r"lses\[0\] has layout torch.sparse_coo"),
        (lambda: combine(torch.nested.nested_tensor([OUT]), [LSE]), TypeError, "outs is a nested tensor"),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_it_is_public() -> None:
    assert "combine" in flashlane.__all__ and flashlane.combine is combine


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parts_of_a_gpu_give_the_whole(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, n, 4, 64, device="cuda", dtype=dtype, requires_grad=True) for n in (200, 1000, 1000))
    want = flash_attn_func(q, k, v, return_lse=True)
    parts = [flash_attn_func(q, a, b, return_lse=True) for a, b in zip(k.split(333, 1), v.split(333, 1), strict=True)]
    got = combine([out for out, _ in parts], [lse for _, lse in parts])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(got[0], want[0], rtol=2e-2, atol=4e-3)
    do = torch.randn_like(want[0])
    for mine, right in zip(
        torch.autograd.grad(got[0], (q, k, v), do), torch.autograd.grad(want[0], (q, k, v), do), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=5e-2, atol=5e-3)
