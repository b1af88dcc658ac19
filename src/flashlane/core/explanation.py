"""What ``explain`` says of a problem: the kernel that runs, and why each other one does not, grouped by the reason."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flashlane.core.problem import AttentionProblem

ROOM = 80
"""The columns of a line. A group names as many of its tags as fit."""
SHOWN_CONFIGURATIONS = 3
"""How many configurations of the chosen kernel are shown: the one that runs and the next ones."""


@dataclass(frozen=True)
class Choice:
    """One kernel's standing for a problem: ``reason`` says why it cannot run it, or is None."""

    tag: str
    reason: str | None
    preference: float
    summary: str


@dataclass(frozen=True)
class BackwardChoice:
    """One backward kernel's standing for a problem: ``reason`` says why it cannot run it, or is None."""

    tag: str
    reason: str | None
    summary: str
    config: str = ""
    """The configuration that it would run with, in a few words."""


@dataclass(frozen=True)
class Explanation:
    """What would run, and why each other kernel would not. ``print`` it, or read ``chosen`` and ``choices``."""

    problem: AttentionProblem
    chosen: str
    choices: tuple[Choice, ...]
    """The listed kernels, or all, and always the chosen one."""
    tuned: bool = False
    """Whether the chosen one is what ``flashlane tune`` found fastest on this GPU."""
    unlisted: int = 0
    """The number of kernels of the table that are not among the choices."""
    backward: str | None = None
    """The tag of the backward kernel that would follow, or None where no gradient is asked for."""
    backwards: tuple[BackwardChoice, ...] = ()
    """Every backward kernel, when a gradient is asked for."""
    instead_of: str | None = None
    """What would run if no kernel were named; None where none is, or none could."""
    named: bool = False
    """Whether the chosen kernel was asked for by its tag."""
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds that a kernel is predicted to take, by its tag, where a model predicts them."""

    configurations: tuple[tuple[str, float], ...] = ()
    """Configurations of the chosen kernel with predicted milliseconds, the one that runs first."""

    def __str__(self) -> str:
        # No other kernel was considered when one was named.
        groups = [] if self.named else [_line(why, tags) for why, tags in self._groups()]
        texts = [self._head(), *self._summary(), *self._configurations(), *groups, *self._after()]
        return "\n".join(_fitted(texts, ROOM))

    def listed(self, width: int | None = None) -> str:
        """The same with a line for each kernel.

        Args:
            width: the columns of a line. Where a kernel's tag and its reason have no room side by side, all tags are
                listed below their reasons. None: lines may be of any length.
        """
        widest = max(len(choice.tag) for choice in self.choices)
        places = self.places()
        lines = []
        for choice in self.choices:
            why = choice.reason or ("runs" if choice.tag == self.chosen else self.lower(choice.tag, places[choice.tag]))
            lines.append(f"  {choice.tag:<{widest}}  {why}")
        if width is not None and max(map(len, lines)) > width:
            groups = [("runs", [self.chosen]), *self._groups()]
            lines = [line for why, tags in groups for line in (f"  {why}:", *(f"    {tag}" for tag in tags))]
        return "\n".join(_fitted([self._head(), *lines, *self._after()], width))

    def places(self) -> dict[str, int]:
        """The rank of each kernel that can run the problem: 1 for the highest preference, equal ones alike."""
        able = [choice for choice in self.choices if choice.reason is None]
        return {c.tag: 1 + sum(other.preference > c.preference for other in able) for c in able}

    def lower(self, tag: str, place: int, others: int = 0) -> str:
        """Why a kernel that could run does not: by how much it is predicted to be slower, or its place."""
        ours, theirs = self.predicted.get(self.chosen), self.predicted.get(tag)
        if ours and theirs:
            return f"ranked lower, predicted {_compared(theirs, ours, 0)}"
        return "can run; ranked lower " + (f"(places {place} to {place + others})" if others else f"(place {place})")

    def _head(self) -> str:
        notes = " (the fastest that flashlane tune timed on this GPU)" if self.tuned else ""
        if self.named:
            other = self.instead_of
            notes = " (it was named" + (f"; otherwise {other} would run)" if other and other != self.chosen else ")")
        text = f"{self.problem.describe()} on {self.problem.arch or 'cpu'}: {self.chosen}{notes}"
        return textwrap.fill(text, ROOM, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)

    def _summary(self) -> Iterable[str]:
        """The idea of the kernel that runs."""
        found = next((choice.summary for choice in self.choices if choice.tag == self.chosen), "")
        if found:
            yield textwrap.fill(found, ROOM, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)

    def _configurations(self) -> Iterable[str]:
        """What the chosen kernel's cost model compared."""
        for number, (words, ms) in enumerate(self.configurations[:SHOWN_CONFIGURATIONS]):
            compared = _compared(ms, self.configurations[0][1], 1)
            told = f"predicted {compared}" if number else f"runs, predicted {ms:.3g} ms"
            if not number and self.problem.chosen_for.batch < self.problem.batch:
                told += " for one sequence, by which num_splits has it chosen"
            yield textwrap.fill(f"{words}: {told}", ROOM, initial_indent="  ", subsequent_indent="    ")

    def _groups(self) -> Iterable[tuple[str, list[str]]]:
        """The other kernels: those that can run, by their places, and those that cannot, grouped by their reasons."""
        places = self.places()
        lower: dict[int, list[str]] = {}
        forecast: dict[str, list[str]] = {}
        reasons: dict[str, list[str]] = {}
        for choice in self.choices:
            if choice.tag == self.chosen:
                continue
            if choice.reason is not None:
                reasons.setdefault(choice.reason, []).append(choice.tag)
            elif choice.tag in self.predicted and self.chosen in self.predicted:
                forecast.setdefault(self.lower(choice.tag, places[choice.tag]), []).append(choice.tag)
            else:
                lower.setdefault(places[choice.tag], []).append(choice.tag)
        for why, tags in sorted(forecast.items(), key=lambda item: self.predicted[item[1][0]]):
            yield why, tags
        for place, tags in sorted(lower.items()):
            yield self.lower(tags[0], place, len(tags) - 1), tags
        for reason, tags in sorted(reasons.items(), key=lambda item: -len(item[1])):
            yield f"cannot run: {reason}" + (f" ({len(tags)})" if len(tags) > 1 else ""), tags

    def _after(self) -> Iterable[str]:
        for after in self.backwards:
            why = "runs" if after.tag == self.backward else after.reason or "can run; ranked lower"
            line = f"backward {after.tag}: {why}" + (f" ({after.config})" if after.config else "")
            yield textwrap.fill(line, ROOM, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        if self.unlisted and not self.named:
            yield f"  {self.unlisted} further variants run only when named: flashlane explain --show-all"


def _compared(ms: float, chosen_ms: float, digits: int) -> str:
    """How much longer something takes than what was chosen, in words. Where a user chose, it may be faster."""
    percent = f"{abs(100 * (ms / chosen_ms - 1)):.{digits}f}"
    if not float(percent):
        return "to be as fast"
    return f"{percent} % {'slower' if ms > chosen_ms else 'faster'}"


def _line(why: str, tags: list[str]) -> str:
    """``  why: tag, tag and 93 more``, with as many tags as fit; a long reason has lines of its own."""
    head = f"  {why}: "
    if len(head) + len(_some(tags[:1] * len(tags), 0)) > ROOM:  # not even one tag and how many more there are
        lines = textwrap.wrap(head.strip(), ROOM, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join([*lines, "    " + _some(tags, ROOM - 4)])
    return head + _some(tags, ROOM - len(head))


def _fitted(texts: Iterable[str], width: int | None) -> Iterator[str]:
    """The lines of texts; a longer one is broken after a blank or before a ``+``, as a tag has them, and indented."""
    for line in (line for text in texts for line in text.splitlines()):
        if width is None or len(line) <= width:
            yield line
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        begun = indent
        for part in re.split(r"(?=\+)|(?<= )", line.strip()):
            if begun.strip() and len(begun) + len(part.rstrip()) > width:
                yield begun.rstrip()
                begun = indent + "    "
            begun += part
        yield begun


def _some(tags: list[str], room: int) -> str:
    named = tags[:1]
    for tag in tags[1:]:
        if len(", ".join([*named, tag]) + f" and {len(tags)} more") > room:
            break
        named.append(tag)
    left = len(tags) - len(named)
    return ", ".join(named) + (f" and {left} more" if left else "")
