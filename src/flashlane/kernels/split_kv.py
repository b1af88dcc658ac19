"""The time of attention of few rows whose keys are split over CTAs, which memory bounds: how many splits to take."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.memory_rate import READ_RATE, overlapped

SM_RATE = 0.07
"""MB a microsecond that an SM reads at most. This and the numbers below were fitted to 160 problems on an H200
(benchmarks/results/choices_decode*.json, docs/notebook/0052-combining-splits-of-decode.md)."""
LOAD_TIME = 1.2
"""Microseconds until keys are there that a CTA asks for, under load."""
WAVE_TIME = 2.5
"""Microseconds that a wave of CTAs starts and ends."""
LAST_WAVE = 0.95
"""The time of a last wave over what its CTAs would take by themselves: the wave before has not quite ended."""
COMBINE_TIME, SPLIT_TIME, SUMS_TIME = 1.8, 0.1, 1.7
"""Microseconds of combining splits: for any number, for each split, and for each thousand sums of a CTA."""
PASS_TIME = 3.0
"""Microseconds of each further pass of a combine whose splits do not fit its shared memory together: found with 214
problems whose lengths are on the device, on an H200 (benchmarks/archive/decode_lengths_fit.json)."""
STREAM_TIME = 5.0
"""Microseconds that stream-K takes besides reading and combining. UNEVEN was found with 74 dense problems,
STREAM_LENGTHS_TIME and UNLIKE with 53 whose lengths are on the device, on an H200
(benchmarks/archive/decode_stream_k.json)."""
STREAM_LENGTHS_TIME = 9.0
"""Microseconds more where the device finds out how long sequences are."""
STREAM_ROWS_TIME = 3.0
"""Microseconds that 16 rows more than 16 cost for each tile of a CTA with stream-K: one problem, tiles of 11 steps."""
UNEVEN = 1.06
"""The time of splits over its prediction, where SMs do not all have equally many that begin together: the prediction is
the least of several that are all uncertain."""
EVEN_ALONE, EVEN = 0.8, 0.95
"""The share of places that splits fill where SMs do: of the SMs if each has one, and otherwise of as many on each."""
UNLIKE = 1.1
"""The time of splits over its prediction where sequences may have different lengths."""


def lengths_differ(problem: AttentionProblem) -> bool:
    """Whether sequences may have different lengths, which the host does not know."""
    return problem.batch > 1 and (problem.varlen or problem.seqused_k or problem.leftpad_k)


class Work(NamedTuple):
    """What decides how many splits of its keys an output tile has."""

    tiles: int
    """Sequences × KV heads × tiles of rows."""
    steps: int
    """Steps over the keys of a tile, at most."""
    held: int
    """CTAs, or clusters, that the GPU holds at once."""
    sms: int
    step_bytes: int
    """K and V of a step of a CTA, or of a cluster's CTAs."""
    step_time: float
    """Microseconds that the products and exponentials of a step take."""
    in_flight: int
    """Bytes of K and V that a CTA, or a cluster's CTAs, have asked for while a step is computed."""
    sums: int
    """Values of an output tile."""
    sms_of_one: float = 1.0
    """SMs that a CTA, or a cluster, has."""
    combine_launch: float = 0.0
    """Microseconds of a launch that combines the splits, where there is one."""
    scratch: int = 0
    """Bytes of shared memory in which the last CTA combines the splits of its sums; 0 where a launch does."""
    rows: int = 0
    """Rows whose statistics lie there for each split, of 8 bytes each."""
    read_rate: float = READ_RATE
    """MB a microsecond that all SMs read together."""

    def microseconds(self, splits: int) -> float:
        """The predicted time with so many splits, without that of a launch."""
        each = -(-self.steps // splits)
        splits = max(1, -(-self.steps // max(1, each)))
        waves, more = divmod(self.tiles * splits, self.held)
        time = waves * self._wave(self.held, each)
        if more:
            time += self._wave(more, each) * (LAST_WAVE if waves else 1.0)
        time += (waves + (more > 0)) * WAVE_TIME
        return time + self._combine(splits)

    def is_even(self, splits: int) -> bool:
        """Whether so many splits of all tiles begin together, equally many on almost each SM."""
        ctas, of_sm = self.tiles * splits, math.ceil(self.tiles * splits / self.sms)
        return ctas <= self.held and ctas >= (EVEN if of_sm > 1 else EVEN_ALONE) * of_sm * self.sms

    def stream_microseconds(self, ctas: int, splits: int) -> float:
        """The predicted time of stream-K: ``ctas`` CTAs that begin together read equally much.

        Args:
            ctas: CTAs, no more than the GPU holds.
            splits: the most splits of an output tile.
        """
        rows = STREAM_ROWS_TIME * max(0, self.rows // 16 - 1) * self.tiles / ctas
        return self._wave(ctas, self.tiles * self.steps / ctas) + STREAM_TIME + rows + self._combine(splits)

    def _combine(self, splits: int) -> float:
        """Microseconds of combining the splits of an output tile."""
        if splits == 1:
            return 0.0
        sums = self.sums / max(1.0, self.sms_of_one)
        time = COMBINE_TIME + self.combine_launch + SPLIT_TIME * splits + SUMS_TIME * sums / 1000
        return time + PASS_TIME * (self._passes(splits) - 1)

    def _passes(self, splits: int) -> int:
        """Passes in which a CTA combines its sums: four of each split, and all statistics, fit its shared memory."""
        if not self.scratch:
            return 1
        at_once = max(1, (self.scratch - 8 * self.rows * splits) // (16 * splits))
        return math.ceil(self.sums / 4 / max(1.0, self.sms_of_one) / at_once)

    def _wave(self, ctas: int, steps: float) -> float:
        """Microseconds of so many CTAs, or clusters, that begin together.

        Four times bound them: of the memory, of what an SM reads, of the loads that a CTA has in flight, of its steps.
        64 to 112 SMs read 3 to 11 % less than 132 (benchmarks/archive/decode_stream_k_ctas.json).
        """
        each = steps * self.step_bytes / 1e6
        of_sm = math.ceil(ctas / self.sms) if self.sms_of_one < 1 else 1 / self.sms_of_one
        reading = overlapped(ctas * each / self.read_rate, of_sm * each / SM_RATE)
        return overlapped(reading, overlapped(1e6 * LOAD_TIME * each / self.in_flight, steps * self.step_time))


@lru_cache(maxsize=4096)
def split_count(work: Work, most: int) -> int:
    """The number of splits of each output tile's keys, up to ``most``, with the least predicted time."""
    return min(range(1, max(1, min(most, work.steps)) + 1), key=work.microseconds)
