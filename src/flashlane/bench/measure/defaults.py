"""Defaults of the bench's options, and exit statuses. Importing this module loads neither torch nor a kernel."""

from __future__ import annotations

PAGE = 64
"""Rows of a page where none are asked for."""
TIMEOUT = 120.0
"""Seconds without a report after which the bench ends a worker process."""
FLOOR_PERCENT, ALPHA = 2.0, 0.01
"""The change that ``flashlane regress`` counts as none, and the chance of any false alarm among all cells."""
NOT_WRITTEN, INTERRUPTED = 3, 130
"""Exit statuses: something could not be written where it should be; the user stopped it."""
