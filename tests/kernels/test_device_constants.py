"""Python hands a kernel no constant that its device code does not read."""

from __future__ import annotations

import functools
import re

import pytest

from flashlane.core import registry, tuned
from flashlane.inspect.compile_report import backward_device_kernels, device_kernels
from flashlane.jit import KernelSource, compiler, toolchain

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def read_constants(source: KernelSource) -> set[str]:
    """The constants that a kernel's file and the headers which it includes read."""
    generated = {**dict(source.headers), compiler.CONFIG_HEADER: compiler.constants_header(source.constants)}
    headers = toolchain.device_headers(source.text, generated)
    texts = (source.text, *(text for name, text in headers.items() if name != compiler.CONFIG_HEADER))
    texts += tuple(text for _, text in source.headers)
    return {name for text in texts for name in re.findall(r"\bcfg::(\w+)", COMMENT.sub("", text))}


@functools.cache
def sources() -> dict[tuple[str, ...], KernelSource]:
    """One source of each file and set of constants, of all shipped configurations."""
    with tuned.heuristics_only():
        return {
            (part.source.name, *sorted(name for name, _ in part.source.constants)): part.source
            for kernel in (*device_kernels(), *backward_device_kernels())
            for config, archs in kernel.shipped()
            for part in kernel.device_sources(config, archs[0])
        }


@pytest.mark.parametrize("source", sources().values(), ids=lambda source: source.name)
def test_every_constant_is_read(source: KernelSource) -> None:
    assert {name for name, _ in source.constants} <= read_constants(source)


def test_all_gradient_kernels_are_among_them() -> None:
    names = {source.name for source in sources().values()}
    kernel = registry.get_backward("hopper")
    wanted = {part.source.name for config, (arch,) in kernel.shipped() for part in kernel.device_sources(config, arch)}
    assert wanted <= names and len(wanted) >= 6
