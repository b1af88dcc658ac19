"""Tensors that are made once and serve later calls, whatever the mode of the call that made them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Tensors that are made here, with a device, are those that a call outside of all modes makes.

    Autograd keeps no tensor that was made under ``torch.inference_mode``, and one made under a ``FakeTensorMode`` has
    no values. The default device is a mode, too, which a given device overrides.
    """
    with torch.inference_mode(False), _disable_current_modes():
        yield


def cached_index(size: int) -> Callable[[Callable[P, torch.Tensor]], Callable[P, torch.Tensor]]:
    """Cache the last ``size`` tensors of a function, which makes them on the CPU."""

    def decorate(make: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
        @functools.lru_cache(size)
        def made(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
            with outside_modes():
                return make(*args, **kwargs)

        @functools.wraps(make)
        def given(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return make(*args, **kwargs)
            # A mode of the call refuses tensors that were made outside of it; this operator makes them its own.
            return torch.ops.aten.lift_fresh.default(made(*args, **kwargs))

        return given

    return decorate
