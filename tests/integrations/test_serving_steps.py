"""The calls of serving engines, step after step over one cache, against the tokens of each request alone."""

from __future__ import annotations

from collections import Counter

import pytest
from serving_steps import FORMS, Call, Engine, Request, integers

pytestmark = pytest.mark.usefixtures("one_thread")
ENGINES, STEPS = 28, 20


def test_every_step_is_attention_over_the_tokens_that_were_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    forms, shared, inherited, compare = Counter(), 0, 0, Engine.compare

    def watched(engine: Engine, batch: list[tuple[Request, int]]) -> None:
        nonlocal shared, inherited
        shared += max(engine.owners) > 1
        kept = ((engine.k_cache[request.pages].flatten(0, 1), len(request.k)) for request, _ in batch)
        inherited += any(bool(rows[used:].isfinite().any()) for rows, used in kept)
        compare(engine, batch)

    monkeypatch.setattr(Engine, "compare", watched)
    for number in range(ENGINES):
        engine = Engine(number)
        for _ in range(STEPS):
            engine.step()
        forms.update(engine.forms)
    assert set(forms) == {form.name for form in FORMS}
    assert shared > ENGINES and inherited > ENGINES, "the draws must share pages, and leave rows of earlier requests"


def test_a_token_too_few_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = property(lambda call: integers([a + b - 1 for a, b in zip(call.before, call.counts, strict=True)]))
    monkeypatch.setattr(Call, "after", lengths)
    engine = Engine(0)
    with pytest.raises(AssertionError, match="out is off by"):
        for _ in range(STEPS):
            engine.step()
