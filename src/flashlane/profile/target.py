"""What a profiler runs: ``python -m flashlane.profile.target REQUEST.json``, each implementation once or more.

Everything is compiled and warm before the profiled region begins. In it, on a GPU, a marker kernel (torch's ``_sleep``)
comes before each implementation, and an NVTX range with its tag lies around its calls.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flashlane.bench.measure.flops import Direction
from flashlane.bench.measure.implementations import Implementation, prepare
from flashlane.bench.measure.inputs import random_inputs
from flashlane.bench.measure.peers import PEERS, peer_tags
from flashlane.bench.measure.runner import Selection
from flashlane.core.problem import DTYPE_NAMES, DTYPES, AttentionProblem
from flashlane.core.registry import get
from flashlane.core.suggestions import suggest

MARKER = "spin_kernel"
"""What torch calls the kernel of ``torch.cuda._sleep``."""
SLEEP_CYCLES = 100


@dataclass(frozen=True)
class Request:
    """What to run, and how often."""

    problem: AttentionProblem
    tags: tuple[str, ...]
    direction: Direction = "forward"
    seed: int = 0
    device: str = "cuda"
    calls: int = 1

    def to_json(self) -> str:
        body = asdict(self)
        body["problem"]["dtype"] = DTYPE_NAMES[self.problem.dtype]
        body["problem"].pop("strides", None)
        return json.dumps(body)

    @classmethod
    def from_json(cls, text: str) -> Request:
        body = json.loads(text)
        body["problem"]["dtype"] = DTYPES[body["problem"]["dtype"]]
        return cls(**{**body, "problem": AttentionProblem(**body["problem"]), "tags": tuple(body["tags"])})


def selection_of(tags: tuple[str, ...]) -> Selection:
    """Kernels and peers with exactly these tags.

    Raises:
        ValueError: a tag is unknown; the message names the nearest.
    """
    peers = tuple(peer for peer in PEERS if peer.tag in tags)
    kernels = tuple(tag for tag in tags if tag not in peer_tags())
    for tag in kernels:
        if tag.startswith("("):
            raise ValueError(f"tag is {tag!r}, which no peer is called; {suggest(tag, peer_tags())}")
        get(tag)
    return Selection(tags=kernels or ("reference",), peers=peers)


def implementations(request: Request) -> list[Implementation]:
    """What the request names, ready to be called, in its order.

    Raises:
        ValueError: a tag is unknown, or what it names cannot run the problem; the message says why.
    """
    device = torch.device(request.device)
    inputs = random_inputs(request.problem, device, request.seed)
    selection = selection_of(request.tags)
    work = prepare(request.problem, inputs, request.direction, selection, device, request.seed)
    found = {item.tag: item for item in work.items}
    reasons = dict(work.skipped)
    for tag in request.tags:
        if tag not in found:
            raise ValueError(f"{tag} cannot run {request.problem.describe()}: {reasons.get(tag, 'it is not there')}")
    return [found[tag] for tag in request.tags]


@contextlib.contextmanager
def named(tag: str, device: torch.device) -> Iterator[None]:
    """A range with the tag in every profiler that looks: torch's, and NVTX on a GPU."""
    ranged = torch.cuda.nvtx.range(tag) if device.type == "cuda" else contextlib.nullcontext()
    with torch.profiler.record_function(tag), ranged:
        yield


def run(request: Request) -> None:
    """Warm up, then run everything once between the start and the stop of the profiler."""
    device = torch.device(request.device)
    on_gpu = device.type == "cuda"
    with torch.no_grad():
        items = implementations(request)
        for item in items:
            with item.context():
                item.call()
                item.call()
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.cudart().cudaProfilerStart()
        for item in items:
            if on_gpu:
                torch.cuda._sleep(SLEEP_CYCLES)
            with named(item.tag, device), item.context():
                for _ in range(request.calls):
                    item.call()
            if on_gpu:
                torch.cuda.synchronize(device)
        if on_gpu:
            torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    run(Request.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")))
