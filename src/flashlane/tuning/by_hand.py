"""Tile parameters that a user sets: a kernel as it is, but for some fields of its configuration."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from types import MethodType
from typing import Any

from flashlane import jit
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import Kernel, TunableKernel

OPTION = "--config"
TRUE, FALSE = ("1", "true", "yes"), ("0", "false", "no")


def parse_config(text: str) -> dict[str, str]:
    """Fields and values from ``block_m=64,kv_stages=3``.

    Raises:
        ValueError: it is not of that form, or a field is given twice.
    """
    fields: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = (word.strip() for word in item.partition("="))
        if not name or not equals or not value or name in fields:
            raise ValueError(f"{OPTION} is {text!r}; it may be FIELD=VALUE,…, each field once: block_m=64,kv_stages=3")
        fields[name] = value
    return fields


def add_configured(kernels: Sequence[Kernel], texts: Sequence[str]) -> tuple[str, ...]:
    """Register each kernel with each set of fields; the tags of the new kernels.

    Raises:
        ValueError: a text cannot be read, or no kernel has such a configuration; the message names the fields.
    """
    added = []
    for text in texts:
        wanted = parse_config(text)
        able = [kernel for kernel in kernels if isinstance(kernel, TunableKernel)]
        if not able:
            raise ValueError(f"{OPTION} is {text!r}; none of the kernels asked for has a configuration")
        for kernel in able:
            new = configured(kernel, wanted)
            if new.tag not in [known.tag for known in registry.kernels()]:
                registry.register(new)
            added.append(new.tag)
    return tuple(added)


def configured(kernel: TunableKernel, fields: dict[str, str]) -> TunableKernel:
    """The kernel with some fields of its configuration set; a problem that these do not fit is not supported."""
    new = copy.copy(kernel)

    def config(self: TunableKernel, problem: AttentionProblem) -> Any:
        return with_fields(kernel.config(problem), fields)

    def supports(self: TunableKernel, problem: AttentionProblem) -> str | None:
        return kernel.supports(problem) or _misfit(self, problem)

    def forward(self: TunableKernel, problem: AttentionProblem, inputs: Inputs, out: Any, lse: Any) -> None:
        kernel.run(self.config(problem), problem, inputs, out, lse)

    def candidates(self: TunableKernel, problem: AttentionProblem) -> tuple[Any, ...]:
        return (self.config(problem),)

    methods = {"config": config, "supports": supports, "forward": forward, "candidates": candidates}
    methods["prepare"] = Kernel.prepare
    set_to = ",".join(f"{name}={value}" for name, value in fields.items())
    attributes = {"tag": f"{kernel.tag}[{set_to}]", "listed": False}
    attributes |= {name: MethodType(method, new) for name, method in methods.items()}
    for name, value in attributes.items():
        object.__setattr__(new, name, value)  # kernels may be frozen dataclasses
    return new


def with_fields(config: Any, changes: dict[str, str]) -> Any:
    """A configuration with other values of some fields, each of the type that the field has.

    Raises:
        ValueError: it has no such field, or the value is of another type; the message has what it may be.
    """
    if not is_dataclass(config):
        raise ValueError(f"{OPTION} sets fields of a configuration; {type(config).__name__} has none")
    plain = {f.name: getattr(config, f.name) for f in fields(config)}
    plain = {name: value for name, value in plain.items() if isinstance(value, bool | int | str)}
    changed = {}
    for name, text in changes.items():
        if name not in plain:
            known = ", ".join(f"{field}={value}" for field, value in plain.items())
            raise ValueError(f"{OPTION} has {name!r}, which {type(config).__name__} does not have; it has {known}")
        changed[name] = _converted(name, text, plain[name])
    return replace(config, **changed)


def _converted(name: str, text: str, old: bool | int | str) -> bool | int | str:
    if isinstance(old, bool):
        if text.lower() not in (*TRUE, *FALSE):
            raise ValueError(f"{OPTION} has {name}={text}; it may be 0 or 1")
        return text.lower() in TRUE
    if isinstance(old, int):
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{OPTION} has {name}={text}; it may be a whole number, such as {old}") from None
    return text


def _misfit(kernel: Any, problem: AttentionProblem) -> str | None:
    """Why a configuration that was set cannot run a problem; None if nothing is known before it is compiled."""
    try:
        config = kernel.config(problem)
        shared = getattr(config, "shared_memory", 0)
    except (AssertionError, ArithmeticError, LookupError) as error:
        return f"{OPTION}: no such configuration ({type(error).__name__}: {error})"
    limit = jit.shared_limit(problem.arch) if problem.arch else None
    if limit is not None and isinstance(shared, int) and shared > limit:
        return f"{OPTION}: it takes {shared / 1024:.0f} KiB of shared memory; {problem.arch} has {limit / 1024:.0f}"
    return None
