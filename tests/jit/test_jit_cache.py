"""The disk cache: shared by processes, checked, bounded, and never in the way."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jit_sources import vector_add

from flashlane import jit
from flashlane.core import tuned
from flashlane.core.problem import AttentionProblem
from flashlane.jit import cache, compiler, toolchain

WORKER = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from jit_sources import multiply
from flashlane import jit
compiled = jit.compile(multiply({steps}), "sm_80")
print(compiled.cached, hashlib.sha256(compiled.cubin).hexdigest(), compiled.report.registers)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_memo", {})
    return tmp_path / "cache"


def compile_afresh(source, arch="sm_80"):
    """As a new process would: without the memory of this one."""
    compiler._memo.clear()
    return jit.compile(source, arch)


def worker(steps: int) -> list[str]:
    source_root = str(Path(jit.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source_root}
    code = WORKER.format(tests=str(Path(__file__).parents[1] / "support"), steps=steps)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_a_second_process_loads_what_the_first_compiled():
    first, second = worker(2), worker(2)
    assert first[0] == "False" and second[0] == "True"
    assert first[1:] == second[1:]


def test_eight_processes_at_once(folder):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(worker, [4] * 8))
    assert len({tuple(answer[1:]) for answer in answers}) == 1
    (entry,) = folder.iterdir()  # one entry, and no temporary file left
    data = entry.read_bytes()
    assert hashlib.sha256(data[len(cache._MAGIC) + 32 :]).digest() in data


def test_a_loaded_entry_carries_the_report():
    first, second = compile_afresh(vector_add()), compile_afresh(vector_add())
    assert (first.cached, second.cached) == (False, True)
    assert (first.cubin, first.report, first.key) == (second.cubin, second.report, second.key)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign", "old format"])
def test_a_damaged_entry_is_compiled_again(folder, damage):
    first = compile_afresh(vector_add(damage))
    path = folder / f"{first.key}.cubin"
    data = path.read_bytes()
    if damage == "old format":
        cache.DiskCache(folder).put(first.key, b'{"another": "format"}')
    else:
        damaged = {
            "truncate": data[: len(data) // 2],
            "flip": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
            "empty": b"",
            "foreign": first.cubin,
        }
        path.write_bytes(damaged[damage])
    second = compile_afresh(vector_add(damage))
    assert (second.cached, second.cubin) == (False, first.cubin)
    assert compile_afresh(vector_add(damage)).cached


def test_an_unwritable_folder_warns_once_and_compiles(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for comment in ("one", "two", "three"):
            assert not compile_afresh(vector_add(comment)).cached
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert "FLASHLANE_CACHE_DIR" in str(warning.message) and str(tmp_path / "file" / "cache") in str(warning.message)


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """The home folder, of which ``ask`` calls a function as a user who may not look into it; 2: the function raised."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("FLASHLANE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))

    def ask(function) -> int:
        home.chmod(0)
        child = os.fork()
        if child == 0:
            status = 2
            with contextlib.suppress(BaseException):
                if os.geteuid() == 0:  # who may look everywhere
                    os.setuid(65534)
                status = int(function())
            os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    yield ask
    home.chmod(0o700)


def test_a_folder_that_may_not_be_looked_at_is_not_writable(closed):
    store = cache.DiskCache(cache.directory())
    assert store.writable()
    assert closed(store.writable) == 0


def test_a_folder_that_may_not_be_looked_at_holds_nothing_that_was_tuned(closed, monkeypatch):
    monkeypatch.delitem(sys.modules, tuned.PROVIDER, raising=False)
    problem = AttentionProblem(1, 8, 8, 128, 128, 64, 64, torch.float16, 0.125, arch="sm_90a")
    assert closed(lambda: tuned.lookup(SimpleNamespace(tag="any"), problem) is not None) == 0
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", "a" * 300)  # a longer name than a folder can have
    assert tuned.lookup(SimpleNamespace(tag="any"), problem) is None


def test_without_a_home_kernels_are_compiled_and_not_kept(monkeypatch):
    def unknown(*_):
        raise KeyError("no such user")

    for name in ("HOME", "FLASHLANE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(cache, "_caches", {})
    assert cache.directory() == cache.NO_DIRECTORY and not cache.default().writable()
    with pytest.warns(RuntimeWarning, match="has no home .* set FLASHLANE_CACHE_DIR to a folder"):
        assert not compile_afresh(vector_add()).cached
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", "~/c")
    with pytest.raises(ValueError, match="FLASHLANE_CACHE_DIR is '~/c', of which no home is known"):
        cache.directory()


def test_a_failed_write_leaves_nothing(folder, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", fail)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert not compile_afresh(vector_add()).cached
    assert list(folder.iterdir()) == []


def test_key_follows_headers_options_compiler_and_architecture(tmp_path, monkeypatch):
    headers = tmp_path / "cuda"
    headers.mkdir()
    (headers / "value.cuh").write_text("constexpr float VALUE = 1.f;")
    monkeypatch.setattr(toolchain, "DEVICE_HEADERS", (headers,))
    text = '#include "value.cuh"\nextern "C" __global__ void k(float* x) { x[0] = VALUE; }'
    source = jit.KernelSource("k.cu", text, "k")
    first = compile_afresh(source)
    assert compile_afresh(source).cached
    (headers / "value.cuh").write_text("constexpr float VALUE = 2.f;")
    changed = compile_afresh(source)
    assert not changed.cached and changed.key != first.key and changed.cubin != first.cubin
    (headers / "value.cuh").write_text("constexpr float VALUE = 1.f;")
    assert compile_afresh(source).key == first.key
    keys = {first.key, changed.key, compile_afresh(source, "sm_90a").key}
    for name in ("compiler_version", "installed_version"):
        monkeypatch.setattr(toolchain, name, lambda: "13.9")
    keys.add(compile_afresh(source).key)
    monkeypatch.setattr(toolchain, "runtime_headers_digest", lambda: "other")
    keys.add(compile_afresh(source).key)
    compiler._memo.clear()
    keys.add(jit.compile(source, "sm_80", options=("-DX",)).key)
    keys.add(jit.compile(source, "sm_80", debug=True).key)
    keys.add(compile_afresh(jit.KernelSource("k.cu", text, "k", (("X", 1),))).key)
    assert len(keys) == 8


def test_the_oldest_entries_go_first(tmp_path):
    disk = cache.DiskCache(tmp_path / "small", limit=3500)
    now = time.time()
    for age, key in enumerate("abc"):
        disk.put(key, os.urandom(900))
        os.utime(tmp_path / "small" / f"{key}.cubin", (now - 100 + age,) * 2)
    assert disk.state().entries == 3
    assert disk.get("a") is not None  # reading makes it the newest
    disk.put("d", os.urandom(900))
    assert [disk.get(key) is not None for key in "abcd"] == [True, False, True, True]
    assert disk.state().bytes <= 3500
    disk.put("e", os.urandom(4000))  # larger than the whole cache: not kept, and nothing makes room for it
    assert disk.get("e") is None and disk.state().entries == 3


def test_what_was_just_written_stays_where_other_entries_seem_newer(tmp_path):
    """Another machine's clock may be ahead, in a folder that both write to."""
    disk = cache.DiskCache(tmp_path, limit=2500)
    later = time.time() + 1000
    for key in "ab":
        disk.put(key, os.urandom(900))
        os.utime(tmp_path / f"{key}.cubin", (later,) * 2)
    disk.put("c", os.urandom(900))
    assert disk.get("c") is not None and disk.state().entries == 2


def test_a_folder_that_is_made_is_its_users_alone(tmp_path):
    folder = tmp_path / "made"
    cache.DiskCache(folder).put("a", b"x")
    assert folder.stat().st_mode & 0o077 == 0


def test_files_of_killed_writers_are_removed(tmp_path):
    disk = cache.DiskCache(tmp_path)
    for name, age in (("old", 7200), ("new", 5)):
        path = tmp_path / f"{cache._TEMPORARY}{name}"
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    disk.put("a", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{cache._TEMPORARY}new", "a.cubin"]


def test_where_the_cache_is(monkeypatch):
    monkeypatch.delenv("FLASHLANE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.directory() == Path("/x/flashlane")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache.directory() == Path("/h/.cache/flashlane")
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", "~/c")
    assert cache.directory() == Path("/h/c")


@pytest.mark.parametrize(
    "text, size", [("", 1 << 30), ("0", 0), ("12345", 12345), ("500M", 500 << 20), ("2GiB", 2 << 30)]
)
def test_size_limit(monkeypatch, text, size):
    monkeypatch.setenv("FLASHLANE_CACHE_LIMIT", text)
    assert cache.size_limit() == size


@pytest.mark.parametrize("text", ["-1", "much", "1.5G"])
def test_size_limit_that_is_none(monkeypatch, text):
    monkeypatch.setenv("FLASHLANE_CACHE_LIMIT", text)
    with pytest.raises(ValueError, match="FLASHLANE_CACHE_LIMIT is"):
        cache.size_limit()


def test_limit_zero_keeps_nothing(folder, monkeypatch):
    monkeypatch.setenv("FLASHLANE_CACHE_LIMIT", "0")
    compile_afresh(vector_add())
    assert not compile_afresh(vector_add()).cached
    assert not folder.exists()


def test_other_users_may_read_a_folder_that_was_filled_for_them(tmp_path):
    cache.DiskCache(tmp_path).put("entry", b"content")
    assert (tmp_path / "entry.cubin").stat().st_mode & 0o777 == 0o644


def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent(folder):
    held = compiler._at_work.setdefault((vector_add("fork"), "sm_80", ()), threading.Lock())
    with held:  # as while a thread compiles
        child = os.fork()
        if child == 0:
            signal.alarm(300)  # ends it where it waits
            with contextlib.suppress(BaseException):
                os._exit(int(jit.compile(vector_add("fork"), "sm_80").cached))
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
