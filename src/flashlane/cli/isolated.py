"""What ``compare`` and ``sweep`` measure in processes of their own, and how: the options that both have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from flashlane.cli import options as o

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from flashlane.bench.measure.flops import Direction
    from flashlane.bench.measure.isolated import Spec
    from flashlane.core.problem import AttentionProblem

Check = Annotated[
    bool, o.option("--check/--no-check", help="Compare outputs (and gradients) with the formula.", panel=o.MEASURE)
]


@dataclass(frozen=True)
class Isolated:
    """Which implementations are measured, and how."""

    kernels: o.Kernels = ""
    peers: o.Peers = "all"
    peers_from: o.PeersFrom = None
    no_grad: o.NoGrad = False
    backward: o.Backward = False
    both: o.Both = False
    ceilings: o.MeasureRates = False
    check: Check = True
    warmup: o.Warmup = None
    iters: o.Rounds = None
    quick: o.Quick = False
    timeout: o.Timeout = o.TIMEOUT
    seed: o.Seed = 0
    device: o.Device = None
    out: o.Out = o.RESULTS

    def directions(self) -> tuple[Direction, ...]:
        """What is timed; ValueError where the options contradict each other, or the limit of time is none."""
        o.check_timeout(self.timeout)
        return o.directions_of(self.no_grad, self.backward, self.both)

    def spec(
        self,
        where: torch.device,
        tags: str,
        problems: list[AttentionProblem],
        otherwise: Callable[[list[AttentionProblem]], tuple[str, ...]] = lambda problems: (),
    ) -> Spec:
        """What the worker processes are given.

        Args:
            where: the device.
            tags: words of ``--tags``.
            problems: what they measure.
            otherwise: the kernels to measure where neither ``--tags`` nor ``--kernels`` names any.

        Raises:
            ValueError: an option cannot be read, or names what is not there.
        """
        from flashlane.bench.measure.isolated import Spec
        from flashlane.bench.measure.peers import peers_of_files, select_peers
        from flashlane.bench.measure.runner import Selection
        from flashlane.cli.measuring import settings_for

        directions = self.directions()
        o.check_layouts(problems, directions)
        files = tuple(self.peers_from or ())
        peers_of_files(files)  # refused here, before anything runs
        words, exact = o.words_of(tags), o.words_of(self.kernels)
        if not words and not exact:
            exact = otherwise(problems)
        Selection(words, exact)
        return Spec(
            str(where),
            words,
            exact,
            tuple(peer.tag for peer in select_peers(self.peers)),
            tuple(map(str, files)),
            directions=directions,
            settings=settings_for(where, self.quick, self.warmup, self.iters, graph=False),
            check=self.check,
            ceilings=self.ceilings,
        )


_NAMES = ("check", "warmup", "iters", "quick", "timeout", "seed", "device", "out")
COMPARED = Annotated[Isolated, ("kernels", "peers", "peers_from", "no_grad", "backward", "both", *_NAMES)]
SWEPT = Annotated[Isolated, ("kernels", "peers", "peers_from", "backward", "both", "ceilings", *_NAMES)]
DEFAULT = Isolated()
