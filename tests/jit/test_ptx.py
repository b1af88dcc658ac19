"""A kernel from its PTX has the machine code of its source; what cannot be inline assembly is refused; needs no GPU."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from jit_sources import multiply, spilling, vector_add

from flashlane import jit
from flashlane.jit import cache, compiler, ptx

SHARED = """
struct Params { float* x; const float* y; };
extern __shared__ __align__(1024) unsigned char shared_memory[];
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128, 2) k(const __grid_constant__ Params p) {
  __shared__ float tile[128];
  float* more = reinterpret_cast<float*>(shared_memory);
  tile[threadIdx.x] = p.x[threadIdx.x];
  more[threadIdx.x] = p.y[threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 128 && tile[i] > 0.f; ++i) p.x[threadIdx.x] += tile[i] * more[127 - i];
}
"""
CONSTANT = """
__constant__ float table[64];
struct Params { float* x; };
extern "C" __global__ void k(Params p) { p.x[threadIdx.x] = table[threadIdx.x]; }
"""
FUNCTION = """
__device__ __noinline__ float f(float x, int n) { return n ? f(x * x, n - 1) + x : x; }
struct Params { float* x; int n; };
extern "C" __global__ void k(Params p) { p.x[threadIdx.x] = f(p.x[threadIdx.x], p.n); }
"""


def source(text: str) -> jit.KernelSource:
    return jit.KernelSource("tests/k.cu", text, "k")


@pytest.fixture(autouse=True)
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a wheel's PTX, and no kernel compiled before."""
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_memo", {})
    monkeypatch.setattr(cache, "PTX_FOLDER", tmp_path / "ptx")
    return tmp_path / "ptx"


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What NVRTC is given."""
    given: list[str] = []
    run = compiler._run_nvrtc

    def noting(one: jit.KernelSource, *rest: object) -> object:
        given.append(one.text)
        return run(one, *rest)

    monkeypatch.setattr(compiler, "_run_nvrtc", noting)
    return given


def compile_again(wanted: jit.KernelSource, arch: str, texts: list[str]) -> jit.Compiled:
    """In a process that has compiled nothing, with an empty cache."""
    compiler._memo.clear()
    texts.clear()
    for path in cache.directory().glob("*"):
        path.unlink()
    return jit.compile(wanted, arch)


@pytest.mark.parametrize(("made", "arch"), [(vector_add(), "sm_80"), (source(SHARED), "sm_90a")])
def test_a_packaged_kernel_is_assembled_and_has_its_machine_code(
    made: jit.KernelSource, arch: str, packaged: Path, texts: list[str]
) -> None:
    plain = jit.compile(made, arch)
    cache.ptx(packaged).put(*compiler.ptx_entry(made, arch))
    found = compile_again(made, arch, texts)
    assert len(texts) == 1 and "asm volatile" in texts[0] and "asm volatile" not in made.text
    assert ptx.same_machine_code(found.cubin, plain.cubin) and found.key == plain.key and not found.cached
    numbers = [(c.report.registers, c.report.static_shared, c.report.constant) for c in (plain, found)]
    assert numbers[0] == numbers[1] and found.source is made
    compiler._memo.clear()
    assert jit.compile(made, arch).cached, "what was assembled is in the user's cache"


def test_another_source_does_not_find_it(packaged: Path, texts: list[str]) -> None:
    cache.ptx(packaged).put(*compiler.ptx_entry(vector_add(), "sm_80"))
    other = vector_add("a comment")
    compile_again(other, "sm_80", texts)
    assert texts == [other.text]


@pytest.mark.parametrize("content", [b"nothing", zlib.compress(b"no kernel"), zlib.compress(b"\xff\xff")])
def test_what_does_not_assemble_is_compiled_from_its_source(content: bytes, packaged: Path, texts: list[str]) -> None:
    key, _ = compiler.ptx_entry(vector_add(), "sm_80")
    cache.ptx(packaged).put(key, content)
    found = compile_again(vector_add(), "sm_80", texts)
    assert texts[-1] == vector_add().text and found.cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (multiply(), "has a parameter that is no struct: .param .u64"),
        (source(CONSTANT), "has a declaration that cannot stand in a function: .const"),
        (source(FUNCTION), "has"),
    ],
)
def test_what_cannot_be_assembly_is_refused(made: jit.KernelSource, message: str) -> None:
    with pytest.raises(ValueError, match=f"the PTX of {made.entry} {message}"):
        compiler.ptx_entry(made, "sm_80")


def test_other_machine_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = jit.compile(vector_add(), "sm_80").cubin
    assert not ptx.same_machine_code(other, jit.compile(spilling(), "sm_80").cubin)
    altered = ptx.kernel_from_ptx
    monkeypatch.setattr(ptx, "kernel_from_ptx", lambda *of: altered(*of).replace("add.", "sub."))
    with pytest.raises(ValueError, match="the PTX of add gives other machine code than its source"):
        compiler.ptx_entry(vector_add(), "sm_80")
