"""What the shell completes after an option: names of kernels, peers, dtypes, architectures, presets and the like.

A shell waits for every TAB, so completing loads neither torch nor a kernel: the names are in ``names.json``, which
``python -m flashlane.cli.complete`` writes from the tables that define them. A test holds that the two are the same.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

NAMES = Path(__file__).with_name("names.json")
Completer = Callable[[str], list[str]]


@functools.cache
def names() -> dict[str, list[str]]:
    """The stored names by their kind: tags, words, backward, peers, dtypes, architectures, …"""
    return json.loads(NAMES.read_text(encoding="utf-8"))


def one_of(words: Sequence[str] | str) -> Completer:
    """Completes an option that takes one of the words; a text is a kind of :func:`names`."""

    def complete(incomplete: str) -> list[str]:
        return [_typed(word) for word in _known(words) if word.startswith(incomplete)]

    return complete


def list_of(words: Sequence[str] | str) -> Completer:
    """Completes the last word of an option that takes a comma list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        done = before.split(",")
        return [_typed(before + comma + w) for w in _known(words) if w.startswith(last) and w not in done]

    return complete


def _known(words: Sequence[str] | str) -> Iterable[str]:
    return names()[words] if isinstance(words, str) else words


class _Escaped(str):
    """A word with its brackets escaped; Typer asks whether it starts with what was typed, which has no escapes."""

    def startswith(self, *args: object) -> bool:
        return self.replace("\\", "").startswith(*args)


def _typed(word: str) -> str:
    """As the user would type it: bash wants brackets escaped outside quotes, and would take them for a subshell."""
    bash = os.environ.get("_FLASHLANE_COMPLETE", "").endswith("bash")
    quoted = re.search(r"[\"'][^\"']*$", os.environ.get("COMP_WORDS", ""))
    return _Escaped(re.sub(r"([()])", r"\\\1", word)) if bash and not quoted else word


def collect() -> dict[str, list[str]]:
    """The names of all kinds, from the tables that define them."""
    from flashlane.bench.measure.peers import peer_tags
    from flashlane.bench.suites.e2e import WORKLOADS
    from flashlane.bench.suites.model import ALL_SIZES
    from flashlane.bench.suites.whole_models import ATTENTIONS
    from flashlane.core import registry
    from flashlane.core.arch import DTYPES
    from flashlane.jit import LIMITS

    tags = [kernel.tag for kernel in registry.kernels(listed_only=True)]
    words = dict.fromkeys(word for tag in tags for word in re.split(r"[(+)]", tag) if word)
    return {
        "tags": tags,
        "words": list(words),
        "backward": [kernel.tag for kernel in registry.backward_kernels()],
        "peers": ["all", "none", *(tag.strip("()") for tag in peer_tags())],
        "dtypes": list(DTYPES),
        "architectures": list(LIMITS),
        "workloads": list(WORKLOADS),
        "attentions": list(ATTENTIONS),
        "models": list(ALL_SIZES),
    }


def main() -> None:
    """Write the names again."""
    NAMES.write_text(json.dumps(collect(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
