"""Triton's kernels of a call are compiled at once, and those of a backward while the forward's is; needs no GPU."""

from __future__ import annotations

import contextlib
import threading
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashlane.core import registry
from flashlane.core.problem import DTYPES, AttentionProblem, Inputs
from flashlane.jit import compiler
from flashlane.kernels.triton import backward, launch
from flashlane.ops import execute

FORWARD = registry.get("triton")
BATCH, SEQLEN, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 4, 2, 64


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that threads make current."""
    current: list[int] = []

    @contextlib.contextmanager
    def device(index: int) -> Any:
        current.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    driver = types.SimpleNamespace(active=types.SimpleNamespace(get_current_device=lambda: 3))
    monkeypatch.setattr(launch, "driver", driver)
    monkeypatch.setattr(launch, "knobs", types.SimpleNamespace(runtime=types.SimpleNamespace(interpret=False)))
    return current


def a_launch(compile_it: Any, compiled: Any = None) -> launch.Launch:
    made = launch.Launch(None, (1,), {}, {})
    made.compiled = compiled
    made.compile = compile_it  # type: ignore[method-assign]
    return made


def test_launches_without_a_kernel_are_compiled_at_the_same_time(active: list[int]) -> None:
    together = threading.Barrier(3)
    given = []

    def compile_it(*call: Any) -> None:
        together.wait(timeout=300)
        given.append(call)

    calls = [(a_launch(compile_it), {"number": n}, {"of": n}) for n in range(3)]
    launch.compile_together([*calls, (a_launch(None, compiled="it is there"), {}, None)])
    assert sorted(given, key=str) == [({"number": n}, {"of": n}) for n in range(3)] and active == [3, 3, 3]


def test_triton_hashes_its_files_before_there_are_threads(monkeypatch: pytest.MonkeyPatch, active: list[int]) -> None:
    """Else each thread does, and they hinder one another."""
    hashed: list[str] = []
    monkeypatch.setattr(
        launch.cache, "triton_key", lambda: hashed.append(threading.current_thread().name), raising=False
    )
    launch._hash_triton.cache_clear()
    begun: list[int] = []

    def compile_it(*_: Any) -> None:
        begun.append(len(hashed))

    for _ in range(2):
        launch.compile_together([(a_launch(compile_it), {}, None)] * 2)
    assert hashed == [threading.current_thread().name] and begun == [1] * 4


def test_what_triton_raises_for_one_of_them_is_raised(active: list[int]) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("it does not compile")

    with pytest.raises(RuntimeError, match="it does not compile"):
        launch.compile_together([(a_launch(fail), {}, None), (a_launch(lambda *_: None), {}, None)])


def test_a_single_kernel_is_left_to_its_launch(active: list[int]) -> None:
    launch.compile_together([(a_launch(None), {}, None)])
    assert not active


def test_the_assembler_is_set_until_the_last_thread_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset by the first one that ends, it would be ptxas 12.8 for those that still compile."""
    nvidia = types.SimpleNamespace(ptxas="old")

    @contextlib.contextmanager
    def scope() -> Any:
        before = nvidia.ptxas
        yield
        nvidia.ptxas = before

    nvidia.scope = scope
    runtime = types.SimpleNamespace(interpret=False)
    monkeypatch.setattr(launch, "knobs", types.SimpleNamespace(runtime=runtime, nvidia=nvidia))
    monkeypatch.setattr(launch, "_newer_ptxas", lambda: "new" if nvidia.ptxas == "old" else None)
    first, second = launch.sound_assembler(), launch.sound_assembler()
    first.__enter__()
    second.__enter__()
    assert nvidia.ptxas == "new"
    first.__exit__(None, None, None)
    assert nvidia.ptxas == "new"
    second.__exit__(None, None, None)
    assert nvidia.ptxas == "old"
    with launch.sound_assembler():
        assert nvidia.ptxas == "new"
    assert nvidia.ptxas == "old"


def call_of(dtype: str, **options: Any) -> tuple[AttentionProblem, Inputs]:
    q, k, v = (torch.randn(BATCH, SEQLEN, heads, HEAD_DIM).to(DTYPES[dtype]) for heads in (HEADS, KV_HEADS, KV_HEADS))
    problem = AttentionProblem(
        BATCH, HEADS, KV_HEADS, SEQLEN, SEQLEN, HEAD_DIM, HEAD_DIM, DTYPES[dtype], HEAD_DIM**-0.5, arch="sm_90a",
        needs_grad=True, **options,
    )  # fmt: skip
    slopes = torch.rand(HEADS) if problem.alibi else None
    return problem, Inputs(q, k, v, alibi_slopes=slopes)


def wanted(call: tuple[launch.Launch, launch.Tensors, launch.Tensors | None]) -> tuple[Any, ...]:
    """What a call has Triton compile a kernel by, but for addresses."""
    kernel, tensors, descriptors = call
    kinds = {name: t if t is None else (t.dtype, t.data_ptr() % 16) for name, t in tensors.items()}
    return kernel.function, kernel.grid, kernel.arguments, kernel.options, kinds, descriptors


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("f32", {"window_right": 0}), ("bf16", {}), ("f16", {"alibi": True, "softcap": 20.0})],
    ids=str,
)
def test_what_is_compiled_ahead_is_what_the_backward_wants(
    active: list[int], monkeypatch: pytest.MonkeyPatch, dtype: str, options: dict[str, Any]
) -> None:
    problem, inputs = call_of(dtype, **options)
    ahead: list[Any] = []
    monkeypatch.setattr(launch, "compile_together", ahead.extend)
    backward.TritonBackward().compile_ahead(problem, inputs, FORWARD)
    out = torch.randn_like(inputs.q)
    call = inputs, out, torch.zeros(BATCH, HEADS, SEQLEN), torch.randn_like(out), None
    prepared = backward.prepare(problem, *call, False, FORWARD.precision_of(problem), None)
    calls = prepared._calls(*call)[0]
    assert len(calls) == 3 and [wanted(one) for one in ahead] == [wanted(one) for one in calls]
    assert all(t is None or t.is_meta for _, tensors, _ in ahead for t in tensors.values()), "no memory is kept"


def alive() -> list[threading.Thread]:
    """The threads that run on a moment later."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(timeout=300)
    return threading.enumerate()


def test_a_forward_that_compiles_has_its_backward_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, inputs = call_of("f32")
    begun = threading.Event()
    given: list[Any] = []

    def ahead(*call: Any) -> None:
        given.append(call)
        begun.set()

    chosen = backward.TritonBackward()
    monkeypatch.setattr(chosen, "compile_ahead", ahead)
    monkeypatch.setattr(execute.dispatch, "select_backward", lambda *_: chosen)
    with execute.compiling_backward_too(problem, inputs, FORWARD):
        assert not given
        compiler.start_alongside()
        assert begun.wait(timeout=300)
        compiler.start_alongside()
    compiler.start_alongside()
    assert given == [(problem, inputs, FORWARD)], "once, and only inside"
    with execute.compiling_backward_too(problem, inputs, FORWARD):
        compiler.start_alongside(delay=3600.0)()
    assert len(given) == 1 and all(thread.name != "compile what will follow" for thread in alive()), "it was left out"
    with execute.compiling_backward_too(replace(problem, arch=None), inputs, FORWARD):
        compiler.start_alongside()
    assert len(given) == 1, "on a CPU nothing is compiled"
