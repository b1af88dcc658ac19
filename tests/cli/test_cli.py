"""The command line end to end, on the CPU."""

import csv
import json
import re
import subprocess
import sys
from typing import get_type_hints

import bench_fakes as fakes
import pytest
import torch

import flashlane
from flashlane.bench.measure import device_rates
from flashlane.cli import sizes as s
from flashlane.cli.main import app
from flashlane.core import registry

SMALL = ["bench", "--device", "cpu", "--arch", "none", "--N", "48", "--D", "32", "--H", "2", "--quick"]


def without(words):
    """``SMALL`` without the option that comes first in ``words``."""
    at = SMALL.index(words[0]) if words[0] in SMALL else len(SMALL)
    return [*SMALL[:at], *SMALL[at + 2 :]]


@pytest.mark.slow
def test_bench_end_to_end(invoke, tmp_path):
    done = invoke(*SMALL, "--causal", "--kv-heads", "1", "--dtype", "f16,f32")
    assert done.exit_code == 0, done.output
    for word in ("reference", "tiled", "(unfused)", "(sdpa-math)", "(flash)", "B1 H2/1 N48 D32 f16 causal", "f32"):
        assert word in done.stdout
    (report,) = (tmp_path / "results").glob("*.json")
    body = json.loads(report.read_text())
    assert {row["status"] for row in body["rows"]} == {"ok"} and len(body["rows"]) >= 10
    lines = list(csv.DictReader(report.with_suffix(".csv").open()))
    tags = {line["tag"] for line in lines}
    assert tags == {k.tag for k in registry.kernels(listed_only=True)} | {p.tag for p in flashlane.bench.PEERS}


def test_layouts_on_the_command_line(invoke, tmp_path):
    words = ("--layout", "packed,cache,paged", "--page", "16", "--Dv", "16", "--window", "9,-1", "--tags", "tiled")
    done = invoke(*SMALL, *words)
    assert done.exit_code == 0, done.output
    (report,) = (tmp_path / "results").glob("*.json")
    rows = json.loads(report.read_text())["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert [row["sizes"]["layout"] for row in rows] == ["packed", "cache", "paged"]
    assert [row["sizes"].get("page") for row in rows] == [None, None, 16]
    for row in rows:
        assert row["sizes"]["head_dim_v"] == 16 and row["sizes"]["window"] == [9, -1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--layout", "sideways"), "--layout has 'sideways'"),
        (("--page", "16"), "--page is '16' and --layout 'dense'"),
        (("--layout", "paged", "--page", "7"), "--page is 7; with --layout 'paged' it must divide --seqlen-k 48"),
        (("--window", "left"), "--window is 'left'"),
        (("--Dv", "0"), "--Dv has 0"),
        (("--layout", "cache", "--backward"), "--layout cache and paged have no backward pass"),
        (("--layout", "packed", "--cycles"), "--cycles is of dense problems"),
        (("--layout", "packed", "--range-k"), "--range-k is of dense problems"),
    ],
)
def test_layouts_that_cannot_be(invoke, words, message):
    done = invoke(*SMALL, *words)
    assert done.exit_code == 2 and message in done.output


@pytest.mark.slow
def test_packed_problems_are_compared_and_swept(invoke, tmp_path):
    """Each in a process of its own, forward and backward."""
    words = [word for word in SMALL[1:] if word not in ("--arch", "none")]
    words += ["--layout", "packed", "--backward", "--tags", "tiled", "--baselines", "none"]
    for command in ("compare", "sweep"):
        done = invoke(command, *words)
        assert done.exit_code == 0, done.output
        assert "varlen, backward" in done.output, done.output


def test_progress_goes_to_stderr_when_piped(invoke):
    done = invoke(*SMALL, "--tags", "tiled", "--baselines", "none")
    assert "[1/1] B1 H2 N48 D32 bf16" in done.stderr and "[1/1]" not in done.stdout


@pytest.mark.slow
def test_every_kernel_is_in_the_output(invoke):
    """Each tag is a row, or skipped with its reason, or in the compile report."""
    tags = ("reference", "tiled", "fa1(f32)", "mma(naive)", "mma(split-q+acc-f32+stage1)")
    with registry.table_of(*map(registry.get, tags)):
        done = invoke("bench", "--device", "cpu", "--quick", "--baselines", "none")
    assert done.exit_code == 0, done.output
    for tag in tags:
        assert tag in done.stdout, tag
    assert "compiled for sm_90a" in done.stdout and "further variants" not in done.stdout


@pytest.fixture
def hidden():
    """A table of one listed kernel and one that must be asked for."""
    kernel = fakes.FakeKernel("hidden(grid)")
    kernel.listed = False
    with registry.table_of(registry.get("reference"), kernel):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("hidden")
def test_unlisted_kernels_are_counted_and_run_when_asked_for(invoke, tmp_path):
    done = invoke(*SMALL, "--baselines", "none", "--out", tmp_path / "out")
    assert "hidden(grid)" not in done.stdout
    assert "1 further variants of the kernel grid: --show-all runs them all, --tags WORD some" in done.stdout
    (report,) = (tmp_path / "out").glob("*.json")
    body = json.loads(report.read_text())
    assert body["unlisted"] == 1 and "--show-all" in body["unlisted_note"]
    for words in (["--show-all"], ["--tags", "hidden"], ["--kernels", "hidden(grid)"]):
        asked = invoke(*SMALL, "--baselines", "none", *words)
        assert asked.exit_code == 0 and "hidden(grid)" in asked.stdout and "further" not in asked.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("hidden")
def test_explain_and_compile_count_them_too(invoke):
    words = ["explain", "--arch", "cpu", "--N", "16"]
    said = invoke(*words).stdout
    assert "hidden(grid)" not in said and "1 further variants run only when named" in said
    assert "hidden(grid)" in invoke(*words, "--show-all").stdout
    forced = invoke(*words, "--kernel", "hidden(grid)").stdout
    assert "on cpu: hidden(grid)" in forced and "further" not in forced
    assert "1 further variants of the kernel grid: --show-all compiles" in invoke("compile").stdout


def test_wrong_kernel_ends_with_status_1(invoke, tmp_path):
    with registry.table_of(fakes.FakeKernel("wrong", fakes.one_element)):
        done = invoke(*SMALL, "--kernels", "wrong", "--out", tmp_path / "out")
        assert done.exit_code == 1
        assert "FAIL" in done.stdout and "1 row of kernels failed: wrong" in done.stderr
        assert len(list((tmp_path / "out").iterdir())) == 2
        assert invoke(*SMALL, "--kernels", "wrong", "--no-check").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tags", "tild"], "--tags has 'tild'.*did you mean.*'tiled'"),
        (["--kernels", "referenc"], "--kernels has 'referenc'.*'reference'"),
        (["--baselines", "flsh"], "--peers has 'flsh', which is unknown; did you mean 'flash'"),
        (["--N", "8:4:x2"], "--N is '8:4:x2'"),
        (["--D", "2000"], "--D has 2000"),
        (["--H", "0"], "--H has 0"),
        (["--kv-heads", "3"], "--kv-heads is 3, which does not divide --H 2; --H must be a multiple of it"),
        (["--dtype", "int8"], "--dtype has 'int8'"),
        (["--alignment", "left"], "--alignment is 'left'"),
        (["--flops", "peak"], "--flops has 'peak'"),
        (["--rule", "lax"], "--rule is 'lax'"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--arch", "sm_1"], "--arch is 'sm_1'"),
        (["--graph"], "--graph"),
        (["--iters", "0"], "--iters is 0"),
        (["--out", "/dev/null/x"], "--out is '/dev/null/x'"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(invoke, tmp_path, words, message):
    done = invoke(*without(words), *words)
    assert done.exit_code == 2, done.output
    assert re.search(message, done.stderr), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_a_clear_error(invoke):
    done = invoke("bench", "--device", "cuda")
    assert done.exit_code == 2 and "no CUDA device here" in done.stderr


def test_a_size_given_twice_is_refused(invoke):
    """The last alone would run, and a list is meant."""
    done = invoke(*SMALL, "--N", "64")
    assert done.exit_code == 2 and "--N is given twice; of a list it may be --N A,B" in done.stderr
    assert invoke(*SMALL, "--seqlen=64").exit_code == 2
    assert invoke(*SMALL, "--tags", "tiled", "--peers", "none", "--device", "cpu").exit_code == 0


def paths_of(command):
    """Names of a command's options and arguments that are paths."""
    from typer.main import get_command

    hints = get_type_hints(next(c.callback for c in app.registered_commands if c.name == command))
    found = [p for p in get_command(app).commands[command].params if "Path" in str(hints.get(p.name))]
    return [p.opts[0] if p.param_type_name == "option" else "" for p in found]


@pytest.mark.parametrize("command", [c.name for c in app.registered_commands])
def test_an_empty_path_is_refused_by_every_command(invoke, tmp_path, command):
    """It would be the current folder."""
    for name in paths_of(command):
        for words in ([name, ""], [f"{name}="]) if name else ([""],):
            done = invoke(*command.split(), *words)
            assert done.exit_code == 2 and "is ''; it names a file or a folder" in done.stderr, (words, done.output)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["bench", "compare", "roofline"])
def test_where_nothing_could_be_timed_the_reason_is_shown_and_the_status_is_1(invoke, monkeypatch, command):
    """No memory holds such tensors."""
    monkeypatch.setattr(device_rates, "copy_rate", lambda *_: 1.0)
    monkeypatch.setattr(device_rates, "matrix_rate", lambda *_: 1.0)
    device_rates.measure_rates.cache_clear()
    words = ["--arch", "none"] if command == "bench" else []
    words += ["--device", "cpu", "--quick", "--N", 10**15, "--kernels", "tiled", "--peers", "none"]
    done = invoke(command, *words)
    device_rates.measure_rates.cache_clear()
    assert done.exit_code == 1 and "error: nothing was timed" in done.stderr, done.output
    assert "out of memory: its tensors do not fit: tiled" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "--tags", ""], "--tags is ''; it may be a list of words of kernels' tags"),
        (["tune", "--forget", "--tags", ","], "--tags is ','; it may be a list of words of kernels' tags"),
        (["tune", "--forget", "--kernels="], "--kernels is ''; it may be a list of whole tags"),
        (["explain", "--dtype", " "], "--dtype is ' '; it may be a name such as f16"),
        (["bench", "suite", "flash", "--dtype="], "--dtype is ''; it may be a name such as f16"),
        (["compile", "--arch", ""], "--arch is ''; it may be a list of architectures"),
        (["bench", "--peers", ""], "--peers is ''; it may be all, none or a list of peers, or left out"),
        (["compare", "--baselines="], "--baselines is ''; it may be all, none or a list of peers"),
        (["prebuild", "--N", "64", "--arch", ","], "--arch is ','; it may be a list of architectures"),
    ],
)
def test_an_empty_list_is_not_taken_for_no_list(invoke, tmp_path, monkeypatch, words, message):
    """A variable of the shell that is not set leaves one, and ``tune --forget`` would drop every choice."""
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "cache"))
    done = invoke(*words)
    assert done.exit_code == 2 and message in done.stderr, done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--format", "--kind", "--tags"])
def test_an_empty_value_of_an_option_is_not_taken_for_an_empty_path(invoke, tmp_path, option):
    (tmp_path / "no.json").write_text("{}")
    done = invoke("plot", "no.json", option, "")
    assert done.exit_code == 2 and "names a file" not in done.stderr
    assert option in done.stderr, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--tags", "nonsense"],
        ["bench", "--layout", "paged", "--page", "7", "--N", "48"],
        ["bench", "suite", "flash", "--N", "x"],
        ["bench", "suite", "model", "--kernel", "nonsense"],
        ["compare", "--kernels", "nonsense"],
        ["sweep", "--export"],
        ["sweep", "--masks", "half"],
        ["profile", "--tag", "nonsense"],
        ["profile", "--tool", "perf"],
        ["roofline", "--results", "absent.json"],
        ["report", "absent.json"],
        ["prebuild", "--arch", "sm_1"],
    ],
    ids=" ".join,
)
def test_a_refused_command_leaves_no_folder(invoke, tmp_path, words):
    done = invoke(*words, "--out", "new/folder")
    assert done.exit_code == 2, done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layout", "--tag", "nonsense"], "--tag is 'nonsense', which no kernel is called"),
        (["profile", "--tag", "nonsense"], "--tag is 'nonsense', which no kernel is called"),
        (["profile", "--tag", "(nonsense)"], "--tag is '(nonsense)', which no peer is called"),
        (["explain", "--kernel", "nonsense"], "--kernel is 'nonsense', which no kernel is called"),
        (["bench", "--kernels", "naive(unfused)"], "no kernel is called; it is the peer (unfused) (--peers)"),
        (["bench", "--kernels", "(flash)"], "no kernel is called; it is the peer (flash) (--peers)"),
        (["bench", "--dtype", "f8"], "--dtype has 'f8'; it may be"),
        (["bench", "--D", "64,2000"], "--D has 2000 (given '64,2000'); it may be"),
        (["budget", "nonsense"], "TAG is 'nonsense', which no kernel is called"),
        (["bench", "suite", "flash", "--kernel", "nonsense"], "--kernel is 'nonsense', which no kernel is called"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_an_unknown_name_is_reported_by_the_option_that_gave_it(invoke, words, message):
    done = invoke(*words)
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr) < 300, done.stderr


@pytest.mark.parametrize(
    ("suite", "words", "message"),
    [
        ("model", ["--kernel", "tiled"], "--kernel goes with the suites attention and flash"),
        ("model", ["--H", "2"], "--H goes with the suites attention and flash"),
        ("model", ["--compile", "none"], "--compile goes with the suite flash"),
        ("attention", ["--compile", "none"], "--compile goes with the suite flash"),
        ("flash", ["--sizes", "sm"], "--sizes goes with the suite model"),
        ("attention", ["--attention", "sdpa"], "--attention goes with the suite model"),
    ],
)
def test_an_option_of_another_suite_is_refused(invoke, suite, words, message):
    done = invoke("bench", "suite", suite, *words)
    assert done.exit_code == 2 and message in done.stderr


def test_without_queries_there_is_no_rate(invoke, tmp_path):
    words = ("--tags", "tiled", "--peers", "none", "--N", "0")
    done = invoke(*without(["--N"]), *words)
    assert done.exit_code == 0 and "0.0000" not in done.stdout, done.stdout
    (report,) = (tmp_path / "results").glob("*.json")
    (row,) = json.loads(report.read_text())["rows"]
    assert row["timing"] and row["tflops"] is None and row["tflops_all"] is None


def test_unknown_option_is_status_2(invoke):
    assert invoke("bench", "--nonsense").exit_code == 2


@pytest.mark.slow
def test_qkv_file(invoke, tmp_path):
    save = pytest.importorskip("safetensors.torch").save_file
    q, k, v = (torch.randn(1, 33, 2, 16) for _ in range(3))
    save({"q": 30 * q, "k": k, "v": v}, tmp_path / "x.safetensors", metadata={"causal": "true"})
    words = ["bench", "--device", "cpu", "--arch", "none", "--quick", "--qkv", "x.safetensors"]
    done = invoke(*words, "--dtype", "f16,bf16,f32")
    assert done.exit_code == 0, done.output
    for dtype in ("f16", "bf16", "f32"):
        assert f"x.safetensors: B1 H2 N33 D16 {dtype} causal" in done.stdout
    (written,) = (tmp_path / "results").glob("*.json")
    assert json.loads(written.read_text())["settings"]["inputs"] == "saved tensors"
    filled = invoke(*words, "--range-k")
    assert filled.exit_code == 2 and "--range-k is given with --qkv, whose file has the tensors" in filled.stderr
    absent = invoke("bench", "--qkv", "absent.safetensors")
    assert absent.exit_code == 2 and "--qkv is 'absent.safetensors', which does not exist" in absent.stderr
    both = invoke(*words, "--N", "64")
    assert both.exit_code == 2 and "--N is '64' with --qkv" in both.stderr


def test_flags_of_the_baseline_logs(invoke):
    words = ["--baselines", "none", "--torch", "--show-all", "--no-rand-v", "--range-k", "--flops", "all"]
    done = invoke(*SMALL, "--tags", "tiled", *words, "--warmup", "1", "--iters", "2", "--seed", "7")
    assert done.exit_code == 0, done.output
    assert "(unfused)" in done.stdout and "(flash)" not in done.stdout and "1.000000" in done.stdout


COMMANDS = tuple(command.name for command in app.registered_commands)


def test_version_and_help(invoke):
    assert invoke("--version").stdout.strip() == f"flashlane {flashlane.__version__}"
    shown = invoke("--help").stdout
    for words in ("Exit status: 0 fine; 1 a check failed", "--install-completion", "1024:8192:x2"):
        assert words in shown
    for command in COMMANDS:
        assert command in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_reads_like_a_manual(invoke, command):
    shown = invoke(*command.split(), "--help")
    assert shown.exit_code == 0
    assert "Exit status: 0" in shown.stdout and "Examples:" in shown.stdout, "status and examples are in it"
    assert f"flashlane {command}" in shown.stdout.split("Examples:")[1]


def examples(command):
    """The command lines of a command's help."""
    import shlex

    text = next(c.callback.__doc__ for c in app.registered_commands if c.name == command)
    lines = text.split("Examples:")[1].splitlines() if "Examples:" in text else []
    return [shlex.split(line.replace("\\[", "[")) for line in lines if line.strip().startswith("flashlane ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_have_options_that_are_there(command):
    from typer.main import get_command

    parameters = get_command(app).commands
    for _, *line in examples(command):
        name = max((c for c in parameters if " ".join(line).startswith(c)), key=len)
        words = line[len(name.split()) :]
        known = {option for p in parameters[name].params for option in (*p.opts, *p.secondary_opts)}
        own = words[: words.index("--")] if "--" in words else words
        assert {word for word in own if word.startswith("--")} <= known, words
        tags = [own[at + 1] for at, word in enumerate(own) if word in ("--tag", "--kernel")]
        for tag in (tag for tag in tags if not tag.startswith("(")):  # a peer's tag is (cudnn)
            assert registry.get(tag).tag == tag


def test_the_same_option_means_the_same_everywhere():
    """One grammar: the same parameter of two commands is the same object of flashlane.cli.sizes."""
    kinds = {"batch": s.Batch, "heads": s.Heads, "seqlen": s.Seqlen, "head_dim": s.HeadDim, "kv_heads": s.KvHeads}
    kinds |= {"seqlen_k": s.SeqlenK, "dtype": s.Dtype, "preset": s.PresetName, "alignment": s.AlignmentName}
    names = ("bench", "compare", "sweep", "tune", "explain", "compile", "prebuild", "roofline", "profile")
    shared = [command for command in app.registered_commands if command.name in names]
    assert len(shared) == len(names)
    for command in shared:
        hints = get_type_hints(command.callback, include_extras=True)
        for name, kind in kinds.items():
            assert hints[name] == kind, f"{command.name}: {name}"


@pytest.mark.slow
def test_the_shell_completes():
    from flashlane.bench.measure.environment import child_environment

    code = """
import os
from flashlane.cli.main import app
for words in ("flashlane comp", "flashlane bench --preset llama"):
    os.environ.update(_FLASHLANE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    try:
        app(prog_name="flashlane")
    except SystemExit:
        print("--")
"""
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True)
    commands, presets, _ = done.stdout.split("--\n")
    assert {"compare", "compile"} <= set(commands.split()) and "sweep" not in commands
    assert presets.split() == ["llama3-8b", "llama3-70b"]


def test_explain_as_json(invoke):
    (found,) = json.loads(invoke("explain", "--arch", "cpu", "--N", "16", "--json").stdout)
    assert found["chosen"] == "reference" and found["arch"] == "cpu"
    assert next(k for k in found["kernels"] if k["tag"] == "mma(naive)" or k["reason"])["reason"]
    several = json.loads(invoke("explain", "--arch", "sm_90a", "--preset", "gpt2,bert-base", "--json").stdout)
    assert [each["problem"] for each in several] == ["B8 H12 N1024 D64 f16 causal", "B16 H12 N512 D64 f16"]


def test_explain(invoke):
    done = invoke("explain", "--arch", "cpu", "--N", "16", "--D", "32", "--H", "2")
    assert done.exit_code == 0 and "on cpu: reference" in done.stdout
    forced = invoke("explain", "--arch", "cpu", "--kernel", "mma(naive)")
    assert forced.exit_code == 2 and "mma(naive)" in forced.stderr


def test_doctor(invoke):
    done = invoke("doctor")
    assert done.exit_code == 0 and "torch" in done.stdout
    assert json.loads(invoke("doctor", "--json").stdout)["findings"]


def test_compile(invoke):
    done = invoke("compile", "--tags", "naive", "--arch", "sm_80,sm_90a", "--no-strict")
    assert done.exit_code == 0, done.output
    assert "compiled for sm_80" in done.stdout and "compiled for sm_90a" in done.stdout and "mma(naive)" in done.stdout
    usages = json.loads(invoke("compile", "--tags", "naive", "--json", "--no-strict").stdout)
    assert usages[0]["tag"] == "mma(naive)" and usages[0]["registers"] > 0
    assert invoke("compile", "--arch", "sm_1").exit_code == 2
