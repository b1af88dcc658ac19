"""NVRTC compiles, its log is read, and its errors say what is wrong; no GPU needed."""

from __future__ import annotations

import pickle
import re

import disassembly
import pytest
from jit_sources import multiply, spilling, vector_add

from flashlane import jit
from flashlane.jit import compiler, report, sass, toolchain

ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_memo", {})
    return tmp_path / "cache"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_and_reads_the_log(arch):
    compiled = jit.compile(vector_add(), arch)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert (compiled.arch, compiled.cached) == (arch, False)
    found = compiled.report
    used = re.search(r"Used (\d+) registers", found.log)
    assert 6 <= found.registers == int(used[1]) <= 40
    assert (found.spills, found.stack, found.static_shared, found.warnings) == (0, 0, 0, ())
    # Constant bank 0 holds the 32 bytes of parameters after what the driver puts there.
    assert found.constant > 32


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_spills_are_reported(arch):
    found = jit.compile(spilling(), arch).report
    assert found.registers <= 64
    assert found.spill_stores > 0 and found.spill_loads > 0 and found.stack >= found.spill_stores // 2
    assert any("spilled" in line for line in found.warnings)


def test_static_shared_memory_and_warnings():
    text = """
    extern "C" __global__ void k(float* x) {
      __shared__ float tile[640];
      int unused;
      tile[threadIdx.x] = x[threadIdx.x]; __syncthreads(); x[threadIdx.x] = tile[threadIdx.x ^ 5];
    }"""
    found = jit.compile(jit.KernelSource("k.cu", text, "k"), "sm_80").report
    assert found.static_shared == 2560
    assert any("unused" in line and "k.cu" in line for line in found.warnings)


def test_serialised_wgmma_counts_as_a_warning():
    log = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "ptxas info    : Function properties for k\n"
        "ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 2 barriers, 24 bytes cumulative stack size, 8 bytes smem\n"
        "ptxas info    : Compiling entry function 'other' for 'sm_90a'\n"
        "ptxas info    : Used 99 registers\n"
    )
    cubin = jit.compile(vector_add(), "sm_80").cubin
    found = report.read_log(log, "k", cubin)
    numbers = (found.registers, found.spill_stores, found.spill_loads, found.stack, found.static_shared)
    assert numbers == (168, 4, 8, 24, 8)
    assert len(found.warnings) == 1 and "C7510" in found.warnings[0]
    assert report.read_log(log, "other", cubin).registers == 99


def test_constants_reach_the_kernel():
    source = jit.KernelSource(
        "constants.cu",
        """
        #include "config.cuh"
        static_assert(cfg::TILE == 64 && cfg::CAUSAL && !cfg::LAST && cfg::LOW == -2147483647);
        static_assert(sizeof(cfg::Element) == 2 && sizeof(cfg::Wide) == 8);
        extern "C" __global__ void k(cfg::Element* x, cfg::Wide* y) { y[0] = __half2float(x[0]); }
        """,
        "k",
        (
            ("TILE", 64),
            ("CAUSAL", True),
            ("LAST", False),
            ("LOW", -(2**31) + 1),
            ("Element", "__half"),
            ("Wide", "double"),
        ),
    )
    first = jit.compile(source, "sm_80")
    changed = jit.KernelSource(source.name, source.text, source.entry, (("TILE", 32), *source.constants[1:]))
    with pytest.raises(jit.CompileError, match="static assertion"):
        jit.compile(changed, "sm_80")
    assert first.report.registers > 0


@pytest.mark.parametrize(
    "constant, error, words",
    [
        (("N", 2**31), ValueError, "N is 2147483648"),
        (("a b", 1), ValueError, "'a b' is not"),
        (("N", 1.5), TypeError, "N is 1.5; it may be int"),
    ],
)
def test_bad_constants(constant, error, words):
    with pytest.raises(error, match=words):
        jit.compile(jit.KernelSource("k.cu", "", "k", (constant,)), "sm_80")


def test_arguments_of_another_type_are_named():
    source = jit.KernelSource("k.cu", "", "k")
    calls = {
        "source is None; it must be a KernelSource": lambda: jit.compile(None, "sm_80"),
        "options is '-G'; it must be a sequence of str": lambda: jit.compile(source, "sm_80", options="-G"),
        r"options is \[3\]": lambda: jit.compile(source, "sm_80", options=[3]),
        r"constants is \[\('N', 1\)\]; it must be a tuple": lambda: jit.KernelSource("k.cu", "", "k", [("N", 1)]),
        r"headers is \(\['a', 'b'\],\); it must be a tuple": lambda: jit.KernelSource(
            "k.cu", "", "k", (), (["a", "b"],)
        ),
    }
    for message, call in calls.items():
        with pytest.raises(TypeError, match=message):
            call()


def test_options_may_be_a_list():
    text = 'extern "C" __global__ void k(int* x) { *x = NUMBER; }'
    assert jit.compile(jit.KernelSource("k.cu", text, "k"), "sm_80", options=["-DNUMBER=3"]).cubin


def test_syntax_error_names_kernel_and_line_and_caches_nothing(folder):
    broken = jit.KernelSource("kernels/broken.cu", 'extern "C" __global__ void k() {\n  int x = ;\n}', "k")
    with pytest.raises(jit.CompileError) as caught:
        jit.compile(broken, "sm_80")
    message = str(caught.value)
    assert "kernels/broken.cu does not compile for sm_80" in message and "kernels/broken.cu(2): error" in message
    assert "expected an expression" in caught.value.log and caught.value.source is broken
    assert not folder.exists() or not list(folder.iterdir())
    with pytest.raises(jit.CompileError):
        jit.compile(broken, "sm_80")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.log, again.source) == (message, caught.value.log, broken)


def test_an_error_of_ptxas_is_a_compile_error_too():
    text = 'extern "C" __global__ void k(int* x) { asm volatile("wgmma.fence.sync.aligned;"); x[0] = 1; }'
    with pytest.raises(jit.CompileError, match=r"sm_90a|wgmma"):
        jit.compile(jit.KernelSource("k.cu", text, "k"), "sm_80")


def test_missing_entry_is_a_compile_error(folder):
    source = jit.KernelSource("k.cu", "__global__ void mangled(int* x) { x[0] = 1; }", "k")
    with pytest.raises(jit.CompileError, match=r"no entry function 'k'.*extern \"C\""):
        jit.compile(source, "sm_80")
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("arch", ["sm_42", "sm_80a", "sm_90f", "compute_80", "90", "", None])
def test_unknown_architecture(arch):
    with pytest.raises(ValueError, match=re.escape(f"arch is {arch!r}")) as caught:
        jit.compile(vector_add(), arch)
    assert "sm_80" in str(caught.value) and "sm_90a" in str(caught.value)


def test_debug_and_options_change_the_code():
    text = """
    extern "C" __global__ void k(float* x) {
    #ifdef FLASHLANE_DEBUG
      if (x[0] != x[0]) __trap();
    #endif
    #ifdef EXTRA
      x[1] = EXTRA;
    #endif
      x[0] = 1.f;
    }"""
    source = jit.KernelSource("k.cu", text, "k")
    plain = jit.compile(source, "sm_80")
    debug = jit.compile(source, "sm_80", debug=True)
    extra = jit.compile(source, "sm_80", options=("-DEXTRA=3.f",))
    assert len({c.key for c in (plain, debug, extra)}) == len({c.cubin for c in (plain, debug, extra)}) == 3


def test_a_second_call_is_the_same_object():
    first = jit.compile(vector_add(), "sm_80")
    assert jit.compile(vector_add(), "sm_80") is first


def test_missing_compiler_or_headers_say_how_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "_include_candidates", lambda: [tmp_path])
    toolchain.include_directory.cache_clear()
    try:
        with pytest.raises(jit.ToolchainError, match=r'cuda_fp16.h.*pip install "flashlane\[nvrtc\]"'):
            toolchain.include_directory()
    finally:
        toolchain.include_directory.cache_clear()
    import cuda.bindings.nvrtc as bindings

    def fail():
        raise RuntimeError("Failed to dlopen libnvrtc.so.13:\nNo such file: libnvrtc.so.13\n")

    monkeypatch.setattr(bindings, "nvrtcVersion", fail)
    toolchain.nvrtc.cache_clear()
    try:
        with pytest.raises(jit.ToolchainError, match=r'dlopen libnvrtc.*pip install "flashlane\[nvrtc\]"') as raised:
            toolchain.nvrtc()
        assert "\n" not in str(raised.value)
    finally:
        toolchain.nvrtc.cache_clear()


def test_a_compiler_that_is_too_old_is_named(monkeypatch):
    """The bindings of CUDA 12 load NVRTC 12 where 13 is installed too; it said that it did not know an option."""
    import cuda.bindings.nvrtc as bindings

    for version, fails in (((12, 8), True), ((12, 9), False), ((13, 0), False)):
        monkeypatch.setattr(bindings, "nvrtcVersion", lambda version=version: (0, *version))
        toolchain.nvrtc.cache_clear()
        try:
            if fails:
                with pytest.raises(toolchain.OldCompilerError, match=r"NVRTC is 12\.8; .* needs 12\.9 or newer.*13"):
                    toolchain.nvrtc()
            else:
                assert toolchain.nvrtc() is bindings
        finally:
            toolchain.nvrtc.cache_clear()


def test_the_compilers_version_is_that_of_the_wheel_that_is_loaded(monkeypatch):
    versions = {"nvidia-cuda-nvrtc": "13.0.88", "nvidia-cuda-nvrtc-cu12": "12.9.86"}
    monkeypatch.setattr(toolchain.importlib.metadata, "version", versions.__getitem__)
    for loaded, expected in (((13, 0), "13.0 (13.0.88)"), ((12, 9), "12.9 (12.9.86)")):
        monkeypatch.setattr(toolchain, "call", lambda _, loaded=loaded: loaded)
        assert toolchain.compiler_version.__wrapped__() == expected


@disassembly.needs_disassembler
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_instruction_counts(arch):
    counts = jit.instruction_counts(jit.compile(multiply(steps=5), arch).cubin)
    assert counts["HMMA"] == 5
    assert counts["MUFU.EX2"] == 1
    assert "LDL" not in counts and "STL" not in counts
    spills = jit.instruction_counts(jit.compile(spilling(), arch).cubin)
    assert spills["STL"] > 0 and spills["LDL"] > 0 and spills["BAR"] == 1


def test_instruction_parsing():
    text = """
    /*0000*/                   LDC R1, c[0x0][0x28] ;
    /*0010*/              @!P0 BRA `(.L_x_1) ;
    /*0020*/             @!UP0 UTMALDG.2D [UR8], [UR4], desc[UR6] ;
    /*0030*/                   HMMA.16816.F32 R4, R8, R16, R4 ;
    /*0040*/               @P1 MUFU.EX2 R2, R3 ;
    /*0050*/                   MUFU.RCP R2, R3 ;
    .L_x_1:
    """
    assert sass.count_instructions(text) == dict.fromkeys(("LDC", "BRA", "UTMALDG", "HMMA", "MUFU.EX2", "MUFU.RCP"), 1)


def test_no_disassembler_gives_none(monkeypatch):
    monkeypatch.setattr(jit.sass, "disassemblers", lambda: ())
    assert jit.disassemble(b"\x7fELF") is None and jit.instruction_counts(b"\x7fELF") is None


def test_a_missing_disassembler_fails_where_triton_brings_one(monkeypatch):
    """And skips elsewhere: a test that reads SASS passes nowhere without any."""
    monkeypatch.setattr(jit, "disassemble", lambda cubin, encodings=False: None)
    monkeypatch.setattr(jit, "instruction_counts", lambda cubin: None)
    for read in (disassembly.disassembled, disassembly.counted):
        for triton, outcome in ((True, pytest.fail.Exception), (False, pytest.skip.Exception)):
            monkeypatch.setattr(disassembly, "TRITON_HERE", triton)
            with pytest.raises(outcome, match="no disassembler"):
                read(b"")
