"""Which kernel is picked, what is said about the others, and that a named kernel never becomes another."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashlane
from flashlane.bench.measure.grid import make_problem
from flashlane.core import dispatch, registry, suggestions, tuned
from flashlane.core.problem import AttentionProblem, CallOptions, Inputs
from flashlane.core.registry import Kernel

pytestmark = pytest.mark.usefixtures("torch_kernels")


def problem(n: int = 16, **asked: float) -> AttentionProblem:
    return AttentionProblem.from_inputs(Inputs(*(torch.randn(1, n, 2, 8) for _ in range(3))), **asked)


class Picky(Kernel):
    tag, family, summary, source, priority = "picky", "test", "only head dimension 8", "here", 9

    def supports(self, problem: AttentionProblem) -> str | None:
        return None if problem.head_dim == 8 else f"head_dim is {problem.head_dim}; it may only be 8"

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        out.fill_(3.0)
        lse.fill_(4.0)


def test_few_scores_go_to_the_reference_and_many_to_the_tiled_kernel() -> None:
    assert dispatch.select(problem(16)).tag == "reference"
    assert dispatch.select(problem(1024)).tag == "tiled"


def test_the_most_preferred_supporting_kernel_is_picked() -> None:
    registry.register(Picky())
    assert dispatch.select(problem()).tag == "picky"
    other = AttentionProblem.from_inputs(Inputs(*(torch.randn(1, 4, 2, 16) for _ in range(3))))
    assert dispatch.select(other).tag == "reference"
    with pytest.raises(NotImplementedError, match=r"kernel 'picky' cannot run .*head_dim is 16; it may only be 8"):
        dispatch.select(other, "picky")


def test_a_kernel_that_was_fastest_runs_only_what_it_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of stored choices has problems that differ in what a kernel may ask for."""
    registry.register(Picky())
    monkeypatch.setattr(tuned, "best_tag", lambda problem: "picky")
    other = AttentionProblem.from_inputs(Inputs(*(torch.randn(1, 4, 2, 16) for _ in range(3))))
    assert dispatch.select(other).tag == "reference"
    assert dispatch.select(problem()).tag == "picky"
    assert dispatch.explain_problem(problem()).tuned
    assert not dispatch.explain_problem(problem(), "picky").tuned, "it was named"


def test_a_named_kernel_is_the_one_that_runs() -> None:
    registry.register(Picky())
    q = torch.randn(1, 4, 2, 8)
    assert torch.equal(flashlane.flash_attn_func(q, q, q, kernel="picky"), torch.full_like(q, 3.0))
    wide = torch.randn(1, 4, 2, 16)
    with pytest.raises(NotImplementedError, match="head_dim is 16"):
        flashlane.flash_attn_func(wide, wide, wide, kernel="picky")


def test_an_unknown_tag_names_near_ones() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"kernel is 'tilde', .*did you mean 'tiled'\?"):
        flashlane.flash_attn_func(q, q, q, kernel="tilde")


def test_what_no_kernel_can_run_is_refused_with_every_reason() -> None:
    class Other(Picky):
        tag = "other"

        def supports(self, problem: AttentionProblem) -> str | None:
            return "it is tired"

    q = torch.randn(1, 4, 2, 16)
    with registry.table_of(Picky(), Other()), pytest.raises(NotImplementedError) as error:
        flashlane.flash_attn_func(q, q, q)
    assert "picky: head_dim is 16; it may only be 8; other: it is tired" in str(error.value)


def test_explain_says_what_runs_and_why_the_others_do_not() -> None:
    registry.register(Picky())
    q = torch.randn(1, 4, 2, 16)
    said = flashlane.explain(q, q, q, causal=True)
    assert said.chosen == "reference" and said.problem.causal
    reasons = {choice.tag: choice.reason for choice in said.choices}
    assert reasons == {"reference": None, "tiled": None, "picky": "head_dim is 16; it may only be 8"}
    text = str(said)
    assert (
        "B1 H2 N4 D16 f32 causal on cpu: reference" in text
        and "head_dim is 16" in text
        and "ranked lower (place 2): tiled" in text
    )


def test_explain_groups_by_the_reason_and_fits_80_columns() -> None:
    """A hundred kernels with one reason are one line, not a hundred."""
    posed = make_problem(1, 2, 16, 16, torch.float32)
    with registry.table_of(*registry.kernels(), *(Grid(number, listed=True) for number in range(100))):
        text = str(dispatch.explain_problem(posed))
        assert "cannot run: head_dim is 16; it may only be 8 (100):" in text and "and 99 more" in text
        assert len(text.splitlines()) < 8 and max(map(len, text.splitlines())) <= 80
        everything = dispatch.explain_problem(posed, show_all=True).listed()
        assert len(everything.splitlines()) == 1 + 2 + 100
        named = str(dispatch.explain_problem(posed, "tiled"))
        assert ": tiled (it was named; otherwise reference would run)" in named.splitlines()[0]
        assert len(named.splitlines()) == 2, "and the idea of it"


def test_every_kernel_is_listed_below_its_reason_where_the_columns_are_few() -> None:
    posed = make_problem(1, 2, 16, 16, torch.float32)
    with registry.table_of(*registry.kernels(), *(Grid(number) for number in (1, 2))):
        everything = dispatch.explain_problem(posed, show_all=True)
    wide = everything.listed(120).splitlines()
    assert wide == everything.listed().splitlines() and max(map(len, wide)) > 80
    assert wide[3] == f"  {Grid(1).tag}  head_dim is 16; it may only be 8"
    assert everything.listed(80).splitlines() == [
        "B1 H2 N16 D16 f32 on cpu: reference",
        "  runs:",
        "    reference",
        "  can run; ranked lower (place 2):",
        "    tiled",
        "  cannot run: head_dim is 16; it may only be 8 (2):",
        "    mma(split-q+tiling-qk+acc-f32+variant-0001+stage2)",
        "    mma(split-q+tiling-qk+acc-f32+variant-0002+stage2)",
    ]
    assert everything.listed(45).splitlines()[5:] == [
        "  cannot run: head_dim is 16; it may only be",
        "      8 (2):",
        "    mma(split-q+tiling-qk+acc-f32",
        "        +variant-0001+stage2)",
        "    mma(split-q+tiling-qk+acc-f32",
        "        +variant-0002+stage2)",
    ]


@pytest.mark.parametrize(("tiled", "told"), [(2.24, "12 % slower"), (1.5, "25 % faster"), (2.009, "to be as fast")])
def test_explain_compares_predicted_times_where_there_are_some(monkeypatch, tiled: float, told: str) -> None:
    times = {"reference": 2.0, "tiled": tiled}
    for tag, ms in times.items():
        monkeypatch.setattr(registry.get(tag), "predicted_ms", lambda problem, ms=ms: ms, raising=False)
    assert dispatch.predicted_times(problem(), ["reference", "tiled"]) == times
    assert f"  ranked lower, predicted {told}: tiled" in str(dispatch.explain_problem(problem())).splitlines()


def test_a_tag_is_registered_once() -> None:
    registry.register(Picky())
    with pytest.raises(ValueError, match="'picky' is registered already"):
        registry.register(Picky())


class Grid(Picky):
    """A variant of a large grid."""

    def __init__(self, number: int, listed: bool = False) -> None:
        self.tag, self.listed, self.asked = f"mma(split-q+tiling-qk+acc-f32+variant-{number:04}+stage2)", listed, 0

    def supports(self, problem: AttentionProblem) -> str | None:
        self.asked += 1
        return super().supports(problem)


def test_auto_considers_listed_kernels_only() -> None:
    hidden = registry.register(Grid(1))
    assert dispatch.select(problem()).tag == "reference" and hidden.asked == 0
    assert dispatch.select(problem(), hidden.tag) is hidden
    shown = registry.register(Grid(2, listed=True))
    assert dispatch.select(problem()) is shown
    assert registry.kernels(listed_only=True) == (*registry.kernels()[:2], shown)


def test_explain_lists_the_listed_ones_and_the_chosen() -> None:
    grid = [registry.register(Grid(number, listed=number == 0)) for number in range(5)]
    said = dispatch.explain_problem(problem())
    assert [choice.tag for choice in said.choices] == ["reference", "tiled", grid[0].tag] and said.unlisted == 4
    assert "4 further variants run only when named" in str(said)
    forced = dispatch.explain_problem(problem(), grid[3].tag)
    assert [choice.tag for choice in forced.choices][-1] == grid[3].tag and forced.unlisted == 3
    everything = dispatch.explain_problem(problem(), show_all=True)
    assert len(everything.choices) == 7 and everything.unlisted == 0 and "further" not in str(everything)


def test_a_problem_is_matched_once_until_the_table_changes() -> None:
    first = registry.register(Grid(1, listed=True))
    for _ in range(3):
        assert dispatch.select(problem()) is first
    assert first.asked == 1
    better = Grid(2, listed=True)
    better.priority = first.priority + 1
    registry.register(better)
    assert dispatch.select(problem()) is better
    with registry.table_of(first):
        assert dispatch.select(problem()) is first
    assert dispatch.select(problem()) is better


def test_a_refusal_is_not_remembered_as_a_choice() -> None:
    registry.register(Picky())
    wide = AttentionProblem.from_inputs(Inputs(*(torch.randn(1, 4, 2, 16) for _ in range(3))))
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="head_dim is 16"):
            dispatch.select(wide, "picky")


def test_few_tags_of_a_large_table_are_compared_letter_by_letter(monkeypatch) -> None:
    """Comparing 5000 tags letter by letter would take many seconds."""
    compared, closest = [], difflib.get_close_matches

    def counted(word: str, possibilities: Sequence[str], **how: Any) -> list[str]:
        compared.append(len(possibilities))
        return closest(word, possibilities, **how)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    with registry.table_of(*(Grid(number) for number in range(5000))):
        with pytest.raises(
            ValueError, match=r"did you mean 'mma\(split-q\+tiling-qk\+acc-f32\+variant-1234\+stage2\)'"
        ):
            registry.get("mma(split-q+tiling-qk+acc-f32+varian-1234+stage2)")
        with pytest.raises(ValueError, match=r"5000 are known, such as mma"):
            registry.get("#")
    assert len(compared) == 2 and max(compared) <= suggestions.SHORTLIST


def calls() -> list[tuple[Inputs, dict[str, object]]]:
    """Calls that differ in one thing each, the first two in nothing."""
    q, k = torch.randn(2, 9, 4, 16), torch.randn(2, 7, 2, 16)
    odd = torch.randn(2, 7, 2, 17)[..., :16]
    shifted = torch.randn(2 * 7 * 2 * 16 + 1)[1:].view(2, 7, 2, 16)
    plain = Inputs(q, k, k)
    option_sets = [
        {"causal": True},
        {"window_size": (3, 1)},
        {"softcap": 2},
        {"scale": 1},
        {"scale": 0.5},
    ]
    option_sets += [{"deterministic": True}, {"alignment": "top-left"}, {"window_size": torch.tensor([3, 2])}]
    option_sets += [{"num_splits": 1}, {"num_splits": 2}]
    inputs_of = [
        plain,
        Inputs(q.clone(), k.clone(), k.clone()),
        Inputs(q, k, odd),
        Inputs(q, shifted, k),
        Inputs(q, k, shifted),
    ]
    inputs_of += [
        Inputs(q.double(), k.double(), k.double()),
        Inputs(q.requires_grad_(), k, k),
        Inputs(q[:1], k[:1], k[:1]),
    ]
    inputs_of += [Inputs(q, k[:, ::2], k[:, ::2]), Inputs(q[:, :0], k, k), Inputs(q, k, k, sinks=torch.ones(4))]
    dropped = Inputs(q, k, k, dropout_seed=torch.tensor([7]))
    inputs_of.append(dropped)
    return (
        [(inputs, {}) for inputs in inputs_of]
        + [(plain, options) for options in option_sets]
        + [(dropped, {"dropout_p": 0.5})]
    )


def test_a_call_seen_before_gives_what_the_checks_would_give() -> None:
    problems = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for inputs, asked in calls() * 2:
                found = AttentionProblem.from_inputs(inputs, **asked)
                checked = AttentionProblem._checked(inputs, CallOptions(**asked))
                assert found == checked and found.strides == checked.strides
                problems.append(found)
    assert len(set(problems)) > 12


def test_the_checks_run_once_for_calls_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(3, 5, 7, 8)
    first = AttentionProblem.from_inputs(Inputs(q, q, q), causal=True)
    monkeypatch.setattr(AttentionProblem, "_checked", None)
    assert AttentionProblem.from_inputs(Inputs(q.clone(), q, q), causal=True) is first
    with pytest.raises(TypeError, match="not callable"):
        AttentionProblem.from_inputs(Inputs(q, q, q), causal=True, softcap=1.5)


def test_what_was_right_once_does_not_hide_what_is_wrong() -> None:
    q = torch.randn(1, 4, 2, 8)
    AttentionProblem.from_inputs(Inputs(q, q, q))
    for wrong, error in (
        (Inputs(q, q, q.half()), TypeError),
        (Inputs(q, q, q[0]), ValueError),
        (Inputs(q, q.to("meta"), q), ValueError),
        (Inputs(q, q, q.numpy()), TypeError),
        (Inputs(q.int(), q.int(), q.int()), TypeError),
        (Inputs(q.to_sparse(), q[0], q), TypeError),
    ):
        for _ in range(2):
            with pytest.raises(error):
                AttentionProblem.from_inputs(wrong)
    for asked in ({"softcap": -1.0}, {"scale": float("nan")}, {"dropout_p": 1}, {"window_size": (-2, 0)}):
        for _ in range(2):
            with pytest.raises(ValueError, match=next(iter(asked))):
                AttentionProblem.from_inputs(Inputs(q, q, q), **asked)


def test_memory_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashlane.core import problem as problems

    monkeypatch.setattr(problems, "VALIDATED_SIZE", 10)
    for length in range(1, 40):
        problem(length)
    assert len(problems._VALIDATED) <= 10


def test_the_order_of_the_table_does_not_depend_on_what_was_imported_first() -> None:
    show = "from flashlane.core import registry; print(*[k.tag for k in registry.kernels(listed_only=True)])"
    orders = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for code in (show, f"import flashlane.kernels.mma.attention, flashlane.reference.tiled; {show}")
    }
    assert len(orders) == 1 and orders.pop().startswith("reference tiled ")


def test_what_is_too_long_to_be_explained_is_refused() -> None:
    """Models of a time go through all tiles, which took minutes and gigabytes."""
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16, device="meta")
    long = q.expand(1, 10**9, 1, 64)
    with pytest.raises(ValueError, match=r"^seqlen_q is 1000000000; what is explained may have up to 16777216$"):
        flashlane.explain(long, long, long)
    problem = AttentionProblem.from_inputs(Inputs(q, long, long)).on("sm_90a")
    assert dispatch.explain_problem(problem).chosen
    with pytest.raises(ValueError, match=r"^seqlen_k is 1000000000"):
        dispatch.explain_problem(replace(problem, needs_grad=True))
