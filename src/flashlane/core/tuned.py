"""What ``flashlane tune`` found on this GPU, as dispatch and kernels ask for it.

The stored results are read by the module that :data:`PROVIDER` names, which is imported at the first question where
there are any: the core and the kernels import nothing of :mod:`flashlane.tuning`. Where nothing was tuned, the kernels'
heuristics decide.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from flashlane.core import registry

if TYPE_CHECKING:
    from pathlib import Path

    from flashlane.core.problem import AttentionProblem

PROVIDER = "flashlane.tuning.stored"
"""The module whose ``find(tag, problem)`` gives the stored choice for a problem, or None."""
AUTO = "auto"
"""Stands for a tag in the class whose entry says which tag is fastest."""
FEW_BLOCKS = 100
"""Tiles of 128 rows below which a problem leaves SMs of a large GPU idle: three quarters of an H200's 132, rounded. It
was chosen and not measured, and is a part of the classes of stored choices."""
PLAIN = (bool, int, float, str)
"""Types of what is stored of a configuration."""


Config = TypeVar("Config")


class Stored(Protocol):
    """One stored choice."""

    tag: str
    config: dict[str, Any]
    """Fields of the kernel's config dataclass."""


class Tagged(Protocol):
    """A forward or a backward kernel."""

    tag: str


_ignored = False


@functools.cache
def _find() -> Callable[[str, AttentionProblem], Stored | None]:
    return importlib.import_module(PROVIDER).find


def folder() -> Path:
    """Where the stored results are: ``tune`` in the cache folder of the compiled kernels."""
    from flashlane.jit import cache

    return cache.directory() / "tune"


def _stored(tag: str, problem: AttentionProblem) -> Stored | None:
    if _ignored or problem.arch is None:
        return None
    # os.path.isdir, unlike Path's, is False of what may not be looked at: another user's home.
    if PROVIDER not in sys.modules and not os.path.isdir(folder()):
        return None
    return _find()(tag, problem)


def lookup(kernel: Tagged, problem: AttentionProblem) -> dict[str, Any] | None:
    """Fields of the config dataclass that was fastest for problems of this class on the present GPU, if it was tuned.

    Give them to ``type(config)(**fields)``; do not change them.
    """
    found = _stored(kernel.tag, problem)
    return None if found is None else found.config


def config_of(kind: type[Config], kernel: Tagged, problem: AttentionProblem) -> Config | None:
    """The configuration that was fastest for problems of this class, as its dataclass; None where it was not tuned.

    None too, with a warning, where another version of flashlane stored fields that the dataclass does not have: the
    device code decides whether a stored choice holds, and may be the same with other fields.
    """
    found = lookup(kernel, problem)
    if not found:
        return None
    try:
        return kind(**found)
    except (TypeError, ValueError) as error:
        text = f"flashlane ignores what another version tuned for {kernel.tag} ({error}); run flashlane tune again"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None


def backward_tag(kernel: Tagged) -> str:
    """What a backward kernel's stored choices are filed under."""
    return f"{kernel.tag} backward"


def lookup_backward(kernel: Tagged, problem: AttentionProblem) -> dict[str, Any]:
    """Fields in which the fastest configuration of this class may differ from the heuristic's; empty where not tuned.

    Deterministic problems are not tuned.
    """
    found = None if problem.deterministic else _stored(backward_tag(kernel), problem)
    return {} if found is None else found.config


def best_tag(problem: AttentionProblem) -> str | None:
    """The tag that was fastest for problems of this class on the present GPU, if it was tuned."""
    found = _stored(AUTO, problem)
    return None if found is None else found.tag


@contextlib.contextmanager
def heuristics_only() -> Iterator[None]:
    """Kernels choose their configurations as on a GPU that was never tuned, in every thread."""
    global _ignored
    before, _ignored = _ignored, True
    registry.changed()
    try:
        yield
    finally:
        _ignored = before
        registry.changed()


def plain_config(config: Any) -> dict[str, Any]:
    """A config dataclass as a dict of plain values, without the fields that are dataclasses themselves: those say what
    a problem needs, as problems that are tuned do not.

    Raises:
        TypeError: it is no dataclass, or a field is not bool, int, float or str.
    """
    from flashlane.core.validate import kind_of

    if not is_dataclass(config):
        raise TypeError(f"config is {kind_of(config)}; it must be a dataclass")
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    values = {name: value for name, value in values.items() if not is_dataclass(value)}
    for name, value in values.items():
        if not isinstance(value, PLAIN):
            raise TypeError(f"config field {name} is {value!r}; it must be a bool, int, float or str")
    return values


def few_blocks(problem: AttentionProblem) -> bool:
    """Whether tiles of 128 rows would leave SMs of a large GPU idle."""
    problem = problem.chosen_for
    return problem.batch * problem.heads * -(-problem.seqlen_q // 128) < FEW_BLOCKS
