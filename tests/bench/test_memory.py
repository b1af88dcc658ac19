"""What a process has taken at most, as the system says it."""

import re
import sys
from pathlib import Path

import pytest

from flashlane.bench.measure.memory import _peak_resident


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_peak_is_in_bytes():
    status = Path("/proc/self/status").read_text()
    (kibibytes,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    assert _peak_resident() == pytest.approx(1024 * int(kibibytes), rel=0.05)
