"""Kernels of the forward and of the backward pass: a tag, what each can do and what it needs; and the tables of them.

A kernel is added by one line in :data:`MODULES` naming the module that defines it; the module calls
:func:`register`. Everything else (dispatch, ``explain``, the bench, the compile tests) reads the tables. Forward and
backward kernels have one table each, so that a forward kernel and a backward kernel may have the same tag.

A module is imported when its kernels are first asked for: the choice of a kernel for a problem asks for
:func:`preferred`, so that a process which runs one family imports that family.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from flashlane.core import aliases
from flashlane.core.repeats import Repeat, RepeatBackward
from flashlane.core.suggestions import KERNELS_LISTED_BY, suggest

if TYPE_CHECKING:
    import torch

    from flashlane.core.problem import AttentionProblem, Gradients, Inputs
    from flashlane.core.ranges import Arriving, KeyPart, QueryRanges, RangedRepeat, Ranges
    from flashlane.jit import Compiled, KernelSource


class Definition(NamedTuple):
    """A module that defines kernels."""

    module: str
    forward: float | None = None
    """The most that a listed forward kernel of the module is preferred for any problem; None: it has none."""
    above_few_rows: float | None = None
    """The same for problems of more query rows than :data:`FEW_ROWS`, where that is less."""
    half_of_few_rows: float | None = None
    """The same for problems of up to :data:`FEW_ROWS` query rows but more than half of them, where that is more."""
    backward: int | None = None
    """The highest priority of its backward kernels; None: it has none."""

    def most(self, problem: AttentionProblem | None) -> float | None:
        """The most that a listed forward kernel of the module is preferred for a problem, or for any."""
        if problem is None:
            return self.forward if self.half_of_few_rows is None else self.half_of_few_rows
        rows = problem.rows_of_kv_head
        if rows > FEW_ROWS:
            return self.forward if self.above_few_rows is None else self.above_few_rows
        return self.forward if self.half_of_few_rows is None or 2 * rows <= FEW_ROWS else self.half_of_few_rows


FEW_ROWS = 64
"""The decode kernel is the fastest for up to so many rows (query tokens × heads of a group) that read the same keys.
Above half of that number the Hopper kernel is faster where its tiles, with their splits, are not too few."""
DECODE, BEFORE_DECODE = 30.0, 31.0
"""The preference of the decode kernel, and that of the Hopper kernel where it is the faster one."""
MODULES = (
    Definition("flashlane.reference.naive", forward=1.5),
    Definition("flashlane.reference.tiled", forward=1.0, backward=0),
    Definition("flashlane.reference.sdpa", forward=1.2),
    Definition("flashlane.kernels.fa1.flash_attention_1", forward=-1.0),
    Definition("flashlane.kernels.mma.naive", forward=2.0),
    Definition("flashlane.kernels.mma.attention", forward=11.0),
    Definition("flashlane.kernels.hopper.forward.kernel", forward=20.0, half_of_few_rows=BEFORE_DECODE),
    Definition("flashlane.kernels.decode.decode", forward=DECODE, above_few_rows=4.0),
    Definition("flashlane.kernels.triton.attention", forward=5.0),
    Definition("flashlane.kernels.triton.backward", backward=10),
    Definition("flashlane.kernels.hopper.backward.kernel", backward=20),
)
"""In the order of the tables. A choice imports the modules by falling preference, and none that can no longer win."""


class Kernel(ABC):
    """One implementation of attention's forward pass, named by its tag."""

    direction = "forward"
    tag: str
    family: str
    summary: str
    """One line: the idea."""
    source: str
    """Paper, or PTX section, that it comes from."""
    priority: int = 0
    """``auto`` takes the supporting kernel with the highest :meth:`preference`, which starts from this."""
    lse_optional: bool = False
    """Whether what :meth:`prepare` gives takes None for the LSE, and then writes none."""
    listed: bool = True
    """Whether it is shown, run and chosen by ``auto`` without being asked for by name."""

    @abstractmethod
    def supports(self, problem: AttentionProblem) -> str | None:
        """None when the kernel can run the problem, else the reason in words."""

    @abstractmethod
    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the output ``(b, sq, h, dv)`` and the LSE, f32 (f64 for f64) ``(b, h, sq)``, natural logarithm.

        Varlen: ``(total_q, h, dv)`` and ``(h, total_q)``. Both are allocated by the caller and fully written.
        """

    def prepare(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> Repeat:
        """What repeats :meth:`forward` for calls that differ from this one in addresses, and in what tensors hold.

        A kernel that spends more on the host than it must overrides this; a repeated launch is checked no more. Nothing
        that is read from a tensor may be kept, nor a tensor itself.

        Returns:
            A function of q, k, v, out, lse, the addresses of q, k and v, and the call's inputs. The addresses are
            multiples of 16; the inputs may be None if the call has no other tensors. All tensors are like those of
            this call (the LSE may be None, see ``lse_optional``), and on a GPU torch's current device is theirs.
        """
        from flashlane.core.problem import Inputs

        return lambda q, k, v, out, lse, addresses, inputs=None: self.forward(
            problem, inputs or Inputs(q, k, v), out, lse
        )

    def prepare_ranges(
        self,
        problem: AttentionProblem,
        ranges: Ranges,
        inputs: Inputs,
        out: torch.Tensor,
        arriving: Arriving | None = None,
    ) -> RangedRepeat | None:
        """What computes sequences that are ranges of rows and of keys in one launch; None where the kernel cannot.

        Args:
            problem: packed sequences, as many as the ranges, of at most their longest.
            ranges: the sequences.
            inputs: q ``(rows, h, d)``, k ``(keys, hk, d)`` and v ``(keys, hk, dv)`` like those of the calls.
            out: ``(rows, h, dv)`` like that of the calls.
            arriving: what arrives in a call like these, where ``ranges`` have chunks.

        Returns:
            A function of q, k, v, out, the LSE (f32 ``(h, rows)``, contiguous) and, where ``ranges`` have chunks, what
            arrives. Rows that no range has are not written.
        """
        return None

    def forward_f32(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> bool:
        """:meth:`forward` with an output in f32, which the caller merges with others; whether the kernel has it.

        If it has not, nothing was done. ``out`` and ``lse`` are contiguous, and q, k and v start on 16 bytes.
        """
        return False

    def preference(self, problem: AttentionProblem) -> float:
        """How much ``auto`` wants this kernel for a problem it supports; data of the kernel's heuristic."""
        return self.priority

    def predicted_configs(self, problem: AttentionProblem) -> list[tuple[str, float]]:
        """The configurations that a cost model compares and their milliseconds, the fastest first; none without one."""
        return []

    def predicted_ms(self, problem: AttentionProblem) -> float | None:
        """Milliseconds that the cost model gives the chosen configuration, where it gives any."""
        found = self.predicted_configs(problem)
        return found[0][1] if found else None

    def low_precision_reference(self, problem: AttentionProblem) -> str:
        """Which emulation the peers' relative rule compares with: see ``flashlane.bench.measure.check``."""
        return "standard"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tag}>"


class Resources(NamedTuple):
    """What one launch of a compiled configuration takes."""

    threads: int
    shared_memory: int
    """Dynamic shared memory of one block, bytes."""


class TunableKernel(Kernel):
    """A kernel of several configurations, of which ``flashlane tune`` may find the fastest."""

    @abstractmethod
    def config(self, problem: AttentionProblem) -> Any:
        """The configuration (a frozen dataclass) that the heuristic gives to a supported problem."""

    @abstractmethod
    def source_of(self, config: Any) -> str:
        """The package's file whose change makes stored timings of a configuration void."""

    def tuned_fields(self, config: Any) -> dict[str, Any]:
        """What ``flashlane tune`` keeps of a configuration: by default, fields that hold plain values."""
        from flashlane.core.tuned import plain_config

        return plain_config(config)

    def candidates(self, problem: AttentionProblem) -> Iterable[Any]:
        """The configurations that ``flashlane tune`` times for a supported problem."""
        return (self.config(problem),)

    def run(self, config: Any, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        """:meth:`forward` with a given configuration; a kernel of more than one candidate overrides it.

        Raises:
            ValueError: the kernel runs no other configuration than :meth:`config`, and was given one.
        """
        only = self.config(problem)
        if config != only:
            raise ValueError(f"config is {config}; kernel {self.tag!r} runs {problem.describe()} with {only} only")
        self.forward(problem, inputs, out, lse)

    def low_precision_reference_of(self, config: Any, problem: AttentionProblem) -> str:
        """:meth:`low_precision_reference` of a given configuration, where it depends on that."""
        return self.low_precision_reference(problem)


class DeviceSource(NamedTuple):
    """One device file that a configuration is compiled from, and what a launch of it takes."""

    source: KernelSource
    resources: Resources
    regions: dict[str, int] | None = None
    """Bytes of its dynamic shared memory by what lies there; None where they are not known apart."""
    spills_allowed: int = 0
    """Bytes, stores and loads, that it is known to spill: ``flashlane compile`` accepts no more."""


class CompiledKernel(ABC):
    """What kernels have in common, of either direction, that :mod:`flashlane.jit` compiles from CUDA C++.

    The compile report, ``flashlane budget`` and ``flashlane tune`` read this.
    """

    direction: str
    tag: str
    architectures: tuple[str, ...] = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
    """The architectures that CI compiles every shipped configuration for."""

    @abstractmethod
    def supports(self, problem: AttentionProblem) -> str | None:
        """None when the kernel can run the problem, else the reason in words."""

    @abstractmethod
    def config(self, problem: AttentionProblem) -> Any:
        """The configuration that the heuristic gives to a supported problem."""

    @abstractmethod
    def device_sources(self, config: Any, arch: str) -> tuple[DeviceSource, ...]:
        """What a configuration is compiled from, in the order of the launches."""

    def sources(self, problem: AttentionProblem) -> tuple[KernelSource, ...]:
        """What a call of a supported problem is compiled from, which is all that it launches."""
        return tuple(each.source for each in self.device_sources(self.config(problem), str(problem.arch)))

    @abstractmethod
    def shipped(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Every configuration that the heuristic can choose, with the architectures it can be chosen on."""


class DeviceKernel(TunableKernel, CompiledKernel):
    """A forward kernel written in CUDA C++, of one device file, and compiled by :mod:`flashlane.jit`."""

    @abstractmethod
    def kernel_source(self, config: Any) -> KernelSource:
        """The device code and the compile-time constants of a configuration."""

    def resources(self, config: Any) -> Resources:
        """Threads and shared memory of one CTA of a configuration."""
        return Resources(config.threads, config.shared_memory)

    def device_sources(self, config: Any, arch: str) -> tuple[DeviceSource, ...]:
        regions, spills = getattr(config, "regions", None), self.spills_allowed(config, arch)
        return (DeviceSource(self.kernel_source(config), self.resources(config), regions, spills),)

    def source_of(self, config: Any) -> str:
        return self.kernel_source(config).name

    def spills_allowed(self, config: Any, arch: str) -> int:
        """Bytes, stores and loads, that a configuration is known to spill: ``flashlane compile`` accepts no more."""
        return 0

    def compile(self, config: Any, arch: str) -> Compiled:
        """Compile a configuration (or load it from the disk cache)."""
        from flashlane import jit

        return jit.compile(self.kernel_source(config), arch)


class BackwardKernel(ABC):
    """One implementation of attention's backward pass. It reads O and the LSE of the forward kernel, whichever ran."""

    direction = "backward"
    tag: str
    summary: str
    """One line: the idea."""
    source: str
    """Paper, or PTX section, that it comes from."""
    priority: int = 0
    """Of the backward kernels that support a problem, the one with the highest priority runs."""

    @abstractmethod
    def supports(self, problem: AttentionProblem, forward: Kernel | None = None) -> str | None:
        """None when the kernel can follow that forward kernel (None: a forward kernel on the GPU) on a problem.

        Otherwise the reason in words.
        """

    @abstractmethod
    def run(
        self,
        problem: AttentionProblem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
        dlse: torch.Tensor | None = None,
        *,
        bias_grad: bool = True,
        forward: Kernel | None = None,
        config: Any = None,
    ) -> Gradients:
        """The gradients of a call; all but two arguments are as in :func:`flashlane.reference.tiled.tiled_backward`.

        ``forward`` is the kernel that wrote ``out``, and ``config`` the configuration to run, or None for that of
        :meth:`config`.
        """

    def run_f32(
        self, problem: AttentionProblem, *call: Any, f32_dq: bool, forward: Kernel | None = None
    ) -> Gradients | None:
        """:meth:`run` for a caller that adds dK and dV to others: in f32 (f64 for f64), and so is dQ with ``f32_dq``.

        A bias has no gradient. None, and nothing is done, where the kernel writes the inputs' dtype only.
        """
        return None

    def compile_ahead(self, problem: AttentionProblem, inputs: Inputs, forward: Kernel | None = None) -> None:
        """Compile what :meth:`run` will want for a call, while another thread compiles the forward kernel.

        A kernel that another compiler compiles when it is launched overrides this; those of a :class:`CompiledKernel`
        are known by its sources. The inputs' memory is neither read nor kept.
        """
        return None

    def prepare(
        self, problem: AttentionProblem, inputs: Inputs, forward: Kernel | None = None
    ) -> RepeatBackward | None:
        """What repeats :meth:`run` for calls that differ from this one in addresses, strides, and what tensors hold.

        A kernel that spends much on the host overrides this; a repeated launch is not checked again. Nothing that is
        read from a tensor may be kept, nor a tensor itself.

        Returns:
            A function of q, k, v, out, lse and do that gives the gradients of q, k and v; the LSE has none. Of a call
            that has other tensors too it is given the inputs, and gives all gradients but the bias' where one of these
            has a gradient. The tensors have the shapes and dtypes of this call. Where the caller gives dq, a tensor of
            q's shape and dtype whose rows are contiguous, the gradient of q is written there. The function gives None,
            and has done nothing, where :meth:`run` is to be called instead, as for strides that need a copy. None:
            there is no such function.
        """
        return None

    def prepare_share(
        self, problem: AttentionProblem, inputs: Inputs, ranges: QueryRanges | None = None
    ) -> RepeatBackward | None:
        """What :meth:`prepare` is for a rank's share of a call, whose dK and dV are f32, for sums over ranks.

        Args:
            problem: dense, without tensors of modifiers; with ``ranges`` it has their rows and all keys that these see.
            inputs: the tensors of the call.
            ranges: two ranges of rows of q with alignments of their own; None: all rows are aligned alike.
        """
        return None

    def prepare_parts(self, problem: AttentionProblem, inputs: Inputs, parts: Sequence[KeyPart]) -> Any | None:
        """Prepare a rank's share of a call as launches of parts of its keys, which add to one dQ.

        Args:
            problem: dense, without score modifiers, with the queries of all parts.
            inputs: q, and k and v of any number of keys.
            parts: of the keys; no key is in two of them.

        Returns:
            An object whose ``begin`` enqueues what comes before all parts
            (:class:`~flashlane.kernels.hopper.backward.parts.BackwardParts`); None where the kernel has no such parts.
        """
        return None

    def config(self, problem: AttentionProblem) -> Any:
        """The configuration that a supported problem runs with; None for a kernel that has none to choose."""
        return None

    def candidates(self, problem: AttentionProblem) -> Iterable[Any]:
        """The configurations that ``flashlane tune --direction backward`` times for a supported problem."""
        return (self.config(problem),)

    def tuned_fields(self, config: Any) -> dict[str, Any] | None:
        """What ``flashlane tune`` keeps of a configuration; None where there is nothing to keep."""
        return None

    def source_of(self, config: Any) -> str:
        """As :meth:`TunableKernel.source_of`, for a kernel of which something is kept."""
        raise NotImplementedError(f"backward kernel {self.tag!r} names no file of the configurations that it has kept")

    def describe(self, problem: AttentionProblem) -> str:
        """The configuration of a supported problem in a few words, for ``explain``; empty where there is none."""
        return ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} backward {self.tag}>"


K = TypeVar("K", bound="Kernel | BackwardKernel")
_memos: list[Callable[[], None]] = []
MEMO_SIZE = 4096

F = TypeVar("F", bound=Callable[..., Any])


def memoised(function: F) -> F:
    """A bounded memory for a function of hashable arguments, emptied by :func:`changed`."""
    cached = functools.lru_cache(MEMO_SIZE)(function)
    _memos.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


def on_change(forget: Callable[[], None]) -> None:
    """Call ``forget`` whenever :func:`memoised` results are forgotten; for a memory that is kept elsewhere."""
    _memos.append(forget)


def changed() -> None:
    """Forget every :func:`memoised` result: the table of kernels, or what the tuner knows, is another now."""
    for forget in _memos:
        forget()


class _Table(Generic[K]):
    """The kernels of one direction by tag."""

    def __init__(self, called: str, most: Callable[[Definition, AttentionProblem | None], float | None]) -> None:
        """``most`` gives the most that a module is preferred, for a problem or for any; None: it has no kernel."""
        self.called, self.most = called, most
        self.kernels: dict[str, K] = {}
        self._changes = 0
        self._by_module: tuple[int, dict[str | None, list[K]]] = (0, {})
        """The kernels that each module defines, under None those that none does, and after which change this holds."""
        self.whole = False
        """Whether no module is left to import."""
        self._defined = [each for each in MODULES if most(each, None) is not None]

    def add(self, kernel: K) -> None:
        if kernel.tag in self.kernels:
            raise ValueError(f"tag {kernel.tag!r} is registered already")
        self.kernels[kernel.tag] = kernel
        self._changes += 1

    def fill(self, kernels: Iterable[K]) -> None:
        kernels = tuple(kernels)
        self.kernels.clear()
        self.kernels.update((kernel.tag, kernel) for kernel in kernels)
        self._changes += 1

    def load(self) -> dict[str, K]:
        """All kernels, in the order of :data:`MODULES`; those that no module of it defines come last."""
        if not self.whole:
            for each in self._defined:
                importlib.import_module(each.module)
            rank = {each.module: number for number, each in enumerate(self._defined)}
            self.fill(sorted(self.kernels.values(), key=lambda k: rank.get(type(k).__module__, len(rank))))
            self.whole = True
        return self.kernels

    def preferred(
        self, problem: AttentionProblem, able: Callable[[K], bool], preference: Callable[[K], float]
    ) -> K | None:
        """The kernel that is preferred most for a problem among those that are able, or None where none is.

        Of those that are preferred alike, it is the first of the table. Modules whose kernels cannot be preferred more
        than what was found are not imported, and their kernels are not asked.
        """
        best, best_key = None, (-math.inf, 0)
        for most, rank, module in self._modules(problem):
            if most < best_key[0]:
                break
            for kernel in filter(able, self._of_module(module)):
                key = preference(kernel), -rank
                if best is None or key > best_key:
                    best, best_key = kernel, key
        return best

    def _modules(self, problem: AttentionProblem) -> list[tuple[float, int, str | None]]:
        """For each module its highest preference for the problem, its rank in the table and its name; highest first.

        None stands for the kernels that no module defines.
        """
        defined = ((self.most(each, problem) or 0.0, rank, each.module) for rank, each in enumerate(self._defined))
        return [(math.inf, len(self._defined), None), *sorted(defined, key=lambda each: -each[0])]

    def _of_module(self, module: str | None) -> list[K]:
        if module is not None:
            importlib.import_module(module)
        changes, (known, found) = self._changes, self._by_module
        if known != changes:
            found = {}
            for kernel in tuple(self.kernels.values()):
                found.setdefault(_module_of(kernel), []).append(kernel)
            self._by_module = changes, found
        return found.get(module, [])

    def get(self, tag: str) -> K:
        if not isinstance(tag, str):
            raise TypeError(f"kernel is {tag!r}; it must be the tag of a {self.called}, a str")
        tag = aliases.KERNELS.get(tag, tag)
        found = self.kernels.get(tag) or self.load().get(tag)
        if found is None:
            known = suggest(tag, tuple(self.kernels), KERNELS_LISTED_BY)
            raise ValueError(f"kernel is {tag!r}, which no {self.called} is called; {known}")
        return found

    @contextlib.contextmanager
    def holding(self, kernels: Iterable[K]) -> Iterator[None]:
        before = tuple(self.load().values())
        try:
            self.fill(kernels)
            changed()
            yield
        finally:
            self.fill(before)
            changed()


_FORWARD: _Table[Kernel] = _Table("kernel", lambda each, problem: each.most(problem))
_BACKWARD: _Table[BackwardKernel] = _Table("backward kernel", lambda each, _: each.backward)
_DEFINING = frozenset(each.module for each in MODULES)


def _module_of(kernel: Kernel | BackwardKernel) -> str | None:
    """The module of :data:`MODULES` that defines a kernel, if one does."""
    module = type(kernel).__module__
    return module if module in _DEFINING else None


def register(kernel: K) -> K:
    """Add a kernel to the table of its direction, in which its tag must be new."""
    (_BACKWARD if isinstance(kernel, BackwardKernel) else _FORWARD).add(kernel)  # type: ignore[arg-type]
    if _module_of(kernel) is None:  # else what was chosen before was preferred to it
        changed()
    return kernel


def table_of(*kernels: Kernel) -> contextlib.AbstractContextManager[None]:
    """A table of forward kernels that holds exactly these, for as long as the context lasts; for tests."""
    return _FORWARD.holding(kernels)


def backward_table_of(*kernels: BackwardKernel) -> contextlib.AbstractContextManager[None]:
    """The same for the table of backward kernels."""
    return _BACKWARD.holding(kernels)


def kernels(listed_only: bool = False) -> tuple[Kernel, ...]:
    """All forward kernels, in the order of the table; or those that are shown without being asked for."""
    return tuple(kernel for kernel in _FORWARD.load().values() if kernel.listed or not listed_only)


def backward_kernels() -> tuple[BackwardKernel, ...]:
    """All backward kernels, in the order of the table."""
    return tuple(_BACKWARD.load().values())


def preferred(
    problem: AttentionProblem, able: Callable[[Kernel], bool], preference: Callable[[Kernel], float]
) -> Kernel | None:
    """The forward kernel that is preferred most for a problem among those that are able, or None; the first of several.

    Modules whose kernels cannot be preferred more than what was found are not imported.
    """
    return _FORWARD.preferred(problem, able, preference)


def preferred_backward(problem: AttentionProblem, able: Callable[[BackwardKernel], bool]) -> BackwardKernel | None:
    """The backward kernel of the highest priority among those that are able, in the same way."""
    return _BACKWARD.preferred(problem, able, lambda kernel: kernel.priority)


def get(tag: str) -> Kernel:
    """The forward kernel of that tag.

    Raises:
        TypeError: the tag is no str.
        ValueError: no kernel has it; the message names the nearest tags.
    """
    return _FORWARD.get(tag)


def get_backward(tag: str) -> BackwardKernel:
    """The backward kernel of that tag; :func:`get` says what is raised where there is none."""
    return _BACKWARD.get(tag)
