"""The decorator of the backward passes of context parallelism, none of which has a derivative of its own."""

from __future__ import annotations

import functools

from flashlane.core import once

differentiated_once = functools.partial(once.differentiated_once, "context parallelism")
