"""The process around a command: how fast it is there, and what becomes of results when its output or the disk fails."""

import json
import os
import re
import resource
import shlex
import subprocess
import sys

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from flashlane.bench.measure.environment import child_environment
from flashlane.cli import complete, entry
from flashlane.cli.main import app

COMMAND = [sys.executable, "-m", "flashlane"]
TINY = ["--N", "32", "--D", "16", "--H", "1", "--B", "1", "--quick", "--kernels", "tiled", "--peers", "none"]
BENCH = ["bench", "--device", "cpu", "--arch", "none", *TINY]
ROOFLINE = ["roofline", "--device", "cpu", *TINY]
SUITE = ["bench", "suite", "flash", "--device", "cpu", "--max-seqlen", "128", "--D", "16", "--dtype", "f32"]


def run(*words, stdout=subprocess.PIPE, **how):
    how.setdefault("env", child_environment())
    return subprocess.run([*COMMAND, *map(str, words)], stdout=stdout, stderr=subprocess.PIPE, text=True, **how)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The names' ends of what lies in the folder of the results."""
    monkeypatch.chdir(tmp_path)
    return lambda folder="results": sorted(p.suffix for p in (tmp_path / folder).glob("*"))


# --- before a command runs ---

PARSER = {"annotated_doc", "click", "shellingham", "typer"}
CONFIGURATION = {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}
DRAWING = {"attr", "markdown_it", "mdurl", "pygments", "rich"}
PACKAGES = PARSER | CONFIGURATION | DRAWING
"""What may be imported before a command runs, and the standard library; attr is rich's, where it is installed."""
PARTS = {"bench", "cli", "core", "flex", "lazy"}
"""Packages of flashlane of which modules are imported then: for options, words to complete, and messages."""


@pytest.mark.parametrize(
    ("words", "completing"),
    [
        ("--version", None),
        ("--help", None),
        ("bench --help", None),
        ("bench --nonsens", None),
        ("bench --N x", None),
        ("sweep --D 64,,", None),
        ("benhc", None),
        ("", "flashlane bench --tags spl"),
        ("", "flashlane bench --kernels mma"),
        ("", "flashlane bench --peers fl"),
        ("", "flashlane explain --arch sm_9"),
    ],
)
def test_only_the_command_line_is_loaded_before_a_command_runs(words, completing):
    """What takes time before a command runs is what it imports: no kernel, and no package but those of the parser."""
    code = """
import sys
at_start = set(sys.modules)
from flashlane.cli.entry import main
try:
    main()
except SystemExit:
    names = {name for name in set(sys.modules) - at_start if not name.startswith("_")}
    packages = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"flashlane"}
    parts = {name.split(".")[1] for name in names if name.startswith("flashlane.")}
    print("LOADED", *sorted(packages), "OF FLASHLANE", *sorted(parts))
    assert "flashlane.core.registry" not in names
"""
    environment = child_environment()
    if completing:
        position = str(len(completing.split()) - 1)
        environment |= {"_FLASHLANE_COMPLETE": "complete_bash", "COMP_WORDS": completing, "COMP_CWORD": position}
        code = code.replace("main()\nexcept", "sys.argv[0] = 'flashlane'; main()\nexcept")
    process = subprocess.run(
        [sys.executable, "-c", code, *words.split()], env=environment, capture_output=True, text=True, check=False
    )
    loaded = re.search(r"^LOADED (.*) OF FLASHLANE (.*)$", process.stdout, re.MULTILINE)
    assert loaded, (process.stdout, process.stderr)
    assert set(loaded[1].split()) <= PACKAGES and set(loaded[2].split()) <= PARTS, loaded[0]
    assert process.returncode == 0, process.stderr
    assert not completing or len(process.stdout.splitlines()) > 1, "something is completed"


@pytest.mark.parametrize(
    ("words", "message", "asked"),
    [
        (("benhc",), r"error: no such command 'benhc'\. Did you mean 'bench'\?", "flashlane"),
        (("bench", "--peer", "none"), r"error: no such option: --peer .*--peers.*", "flashlane bench"),
        (("bench", "--iters", "x"), r"error: --iters is 'x'; it may be a whole number", "flashlane bench"),
        (("bench", "--timeout=x"), r"error: --timeout is 'x'; it may be a number", "flashlane bench"),
        (("bench", "--N", "1", "--N", "2"), r"error: --N is given twice; .*", "flashlane bench"),
        (("plot", ""), r"error: (?-i:RESULTS\.json\.\.\. is '');.*", "flashlane plot"),
        (("bench", "suite"), r"error: missing argument '?SUITE'?.*", "flashlane bench suite"),
    ],
)
def test_what_the_parser_refuses_is_a_line_and_a_hint(words, message, asked):
    done = run(*words)
    first, hint = done.stderr.splitlines()
    assert done.returncode == 2 and re.fullmatch(message, first, re.IGNORECASE), done.stderr
    assert hint.endswith(f"{asked} --help says what there is") and not done.stdout


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("'x' is not a valid integer.", "a whole number"),  # typer 0.26
        ("'x' is not a valid int.", "a whole number"),  # 0.27
        ("Input should be a valid integer, unable to parse string as an integer", "a whole number"),  # 0.29
        ("'x' is not a valid float.", "a number"),
        ("Input should be a valid number, unable to parse string as a number", "a number"),
    ],
)
def test_the_parsers_words_are_understood_of_every_version_of_typer(said, wanted, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flashlane", "bench", "--iters", "x"])
    found = entry._of_value(f"Invalid value for '--iters' / '--rounds': {said}")
    assert found == f"--iters is 'x'; it may be {wanted}"


def test_without_words_the_help_is_shown():
    done = run()
    assert done.returncode in (0, 2) and "Usage:" in done.stdout + done.stderr


def test_names_that_the_shell_completes_are_those_of_the_tables():
    assert complete.names() == complete.collect(), "python -m flashlane.cli.complete writes them again"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("flashlane bench su", "suite"),
        ("flashlane bench suite mo", "model"),
        ("flashlane bench --tags split-q,share-k", "split-q,share-kv"),
        ("flashlane bench --kernels mma(nai", r"mma\(naive\)"),
        ('flashlane profile --tag "mma(nai', "mma(naive)"),
        ("flashlane compare --peers flash,cud", "flash,cudnn"),
        ("flashlane bench --dtype f16,bf", "f16,bf16"),
        ("flashlane compile --arch sm_90,sm_12", "sm_90,sm_120"),
        ("flashlane bench --preset gpt2,llama3-8", "gpt2,llama3-8b"),
        ("flashlane plot --kind throughput,hea", "throughput,heatmap"),
        ("flashlane profile --tool torch,ns", "torch,nsys"),
        ("flashlane bench --layout dense,pag", "dense,paged"),
        ("flashlane bench suite model --sizes sm,l", "sm,lg"),
        ("flashlane sweep --masks full,", "full,causal"),
        ("flashlane plot --format png,", "png,svg"),
        ("flashlane prebuild --arch sm_90", "sm_90a"),
        ("flashlane bench --flops ", "all"),
    ],
)
def test_the_shell_completes_the_last_word_of_a_list(typed, expected, monkeypatch, capsys):
    words = typed.split(" ")
    monkeypatch.setenv("_FLASHLANE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit):
        app(prog_name="flashlane")
    assert expected in capsys.readouterr().out.split("\n")


FIXED = {
    "--dtype",
    "--device",
    "--arch",
    "--flops",
    "--format",
    "--masks",
    "--compile",
    "--sizes",
    "--attention",
    "--layout",
}
FIXED |= {"--kernels", "--tags", "--peers", "--kernel", "--tag", "--direction", "--rule", "--tool", "--set"}
FIXED |= {"--preset", "--alignment", "--method", "--kind"}
"""Options that take one or some of a fixed set of words, whatever the command."""


@pytest.mark.parametrize("command", sorted(get_command(app).commands))
def test_an_option_of_a_fixed_set_of_words_completes(command):
    parameters = get_command(app).commands[command].params
    lacking = [p.opts[0] for p in parameters if set(p.opts) & FIXED and p._custom_shell_complete is None]
    assert lacking == []


def test_a_command_of_two_words_is_not_completed_as_one(monkeypatch, capsys):
    monkeypatch.setenv("_FLASHLANE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "flashlane be")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        app(prog_name="flashlane")
    assert capsys.readouterr().out.splitlines() == ["bench"]


# --- the output cannot be written ---


def test_a_closed_pipe_loses_no_result(files):
    reading, writing = os.pipe()
    os.close(reading)
    done = run(*BENCH, stdout=writing)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "error" not in done.stderr, done.stderr
    assert files() == [".csv", ".json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("words", [BENCH, ["doctor"]])
def test_a_full_device_is_one_line_and_status_3(files, words):
    with open("/dev/full", "w") as full:
        done = run(*words, stdout=full)
    assert done.returncode == 3, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert errors == ["error: the output could not be written: No space left on device"]
    assert words is not BENCH or files() == [".csv", ".json"]


@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_a_terminal_of_ascii_shows_the_nearest_characters(files, variables):
    done = run(*BENCH, env=child_environment() | {"PYTHONCOERCECLOCALE": "0"} | variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and "+%" in done.stdout and "xbest" in done.stdout
    assert files() == [".csv", ".json"]


# --- a full disk ---


def small_files():
    """No file of this process may be larger than a few bytes: what a full disk says, without one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


@pytest.mark.parametrize(
    "words",
    [
        ROOFLINE,
        SUITE,
        ["layout", "--columns", "16", "--png", "x.png"],
        ["layout", "--columns", "16", "--json", "x.json"],
        ["report", "{results}", "--out", "x.html"],
        ["plot", "{results}", "--out", "plots"],
        ["regress", "save", "{results}", "--baseline", "x.json"],
        ["profile", "--device", "cpu", "--tag", "tiled", "--N", "32", "--D", "16", "--H", "1", "--calls", "1"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_full_disk_is_one_line_and_status_3(files, tmp_path, words):
    results = tmp_path / "measured.json"
    results.write_text(measured())
    words = [word.format(results=results) for word in words]
    done = run(*words, preexec_fn=small_files, env=child_environment() | {"MPLCONFIGDIR": str(tmp_path)})
    assert done.returncode == 3, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and "cannot be written" in done.stdout + done.stderr
    assert not [name for name in os.listdir(tmp_path) if name.startswith("x.") and os.path.getsize(tmp_path / name)]


def measured():
    """A results file of two kernels."""
    import torch

    from flashlane import bench

    problem = bench.make_problem(1, 1, 16, 16, torch.float32)
    selection = bench.Selection(tags=("reference", "tiled"), peers=())
    results = bench.run([problem], device="cpu", selection=selection, settings=bench.Settings(3, 0.1, 0.1, 1, 1))
    return results.to_json()


@pytest.mark.parametrize(("words", "status"), [(["--version"], 0), (["explain", "--N", "x"], 2), (BENCH, 0)])
def test_closed_streams_change_no_status(files, words, status):
    """As of a service that has none."""
    command = shlex.join([*COMMAND, *words])
    done = subprocess.run(["sh", "-c", f"exec {command} <&- >&- 2>&-"], env=child_environment(), check=False)
    assert done.returncode == status
    assert files() == ([".csv", ".json"] if words == BENCH else [])


def test_a_worker_without_streams_works(files):
    command = shlex.join([*COMMAND, "compare", "--device", "cpu", *TINY])
    done = subprocess.run(["sh", "-c", f"exec {command} <&- >&- 2>&-"], env=child_environment(), check=False)
    assert done.returncode == 0 and files() == [".csv", ".json", ".md"]


# --- Ctrl-C ---


@pytest.mark.parametrize("both", [True, False])
def test_ctrl_c_while_a_worker_loads_torch_is_a_line(both, tmp_path):
    """A terminal's reaches both processes, that of ``kill`` the first alone, which waits for nothing."""
    code = """
import multiprocessing, os, signal, sys, threading
from flashlane.bench.measure.isolated import Spec, Worker
if __name__ == "__main__":
    def press():
        while not multiprocessing.active_children():
            pass
        for one in [os.getpid(), multiprocessing.active_children()[0].pid][: 1 + {both}]:
            os.kill(one, signal.SIGINT)
    threading.Thread(target=press, daemon=True).start()
    try:
        Worker(Spec(device="cpu"), 60)
    except KeyboardInterrupt:
        assert not multiprocessing.active_children()
        sys.exit(130)
"""
    program = tmp_path / "program.py"
    program.write_text(code.replace("{both}", str(both)))
    done = subprocess.run(
        [sys.executable, program], env=child_environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_while_ranks_load_torch_prints_nothing(tmp_path):
    """Each rank gets it where it is about to load a module of torch, as from a terminal."""
    (tmp_path / "sitecustomize.py").write_text("""
import os, signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.functional" and "RANKS_PRESS" in os.environ:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
""")
    program = tmp_path / "program.py"
    program.write_text("""
import math, os
from flashlane.bench.measure.ranks import on_ranks
if __name__ == "__main__":
    os.environ["RANKS_PRESS"] = "1"
    try:
        on_ranks(2, "gloo", math.sqrt, seconds=300)
    except Exception as error:
        print(type(error).__name__)
""")
    environment = child_environment()
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=200)
    assert "Traceback" not in done.stderr, done.stderr


PRESSED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Press(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
"""
"""What Python runs at its start: Ctrl-C arrives where a module is about to be loaded, however fast the machine is."""


@pytest.mark.parametrize(
    "module",
    ["typer", "typer.main", "flashlane.cli.main", "torch", "torch._C", "torch.nn.functional", "numpy", "rich.progress",
     "flashlane.bench.measure.runner"],
)  # fmt: skip
def test_ctrl_c_ends_with_status_130_while_modules_are_loaded(module, tmp_path):
    """One that torch takes for a module that is not there, or that runs into the bench, would not."""
    (tmp_path / "sitecustomize.py").write_text(PRESSED.replace("{module}", module))
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    done = run(*BENCH, "--iters", "100000", env=environment, cwd=tmp_path, timeout=300)
    assert done.returncode == 130 and done.stderr == "interrupted\n" and done.stdout == "", done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (BENCH, {".csv", ".json"}),
        (ROOFLINE, {".json", ".png"}),
        (SUITE, {".csv", ".json", ".md"}),
        (["compare", "--device", "cpu", *TINY], {".csv", ".json", ".md"}),
        (["sweep", "--device", "cpu", *TINY], {".csv", ".json", ".md", ".jsonl"}),
        (["profile", "--device", "cpu", "--tag", "tiled", "--N", "32", "--calls", "1", "--out", "results"], {".json"}),
        (["layout", "--columns", "16", "--png", "results/x.png", "--json", "results/x.json"], {".json", ".png"}),
        (
            ["regress", "{results}", "{results}", "--json", "results/x.json", "--junit", "results/x.xml"],
            {".json", ".xml"},
        ),
    ],
    ids=lambda value: value[0] + " " + value[1] if isinstance(value, list) else "",
)
def test_files_are_written_before_anything_is_printed(files, tmp_path, monkeypatch, words, expected):
    """Ctrl-C at the first line of output: the files are there."""
    (tmp_path / "results").mkdir()
    (tmp_path / "measured.json").write_text(measured())
    write = Console.print

    def stopped(console, *args, **keywords):
        if console._file is None and not console.stderr:
            raise KeyboardInterrupt
        write(console, *args, **keywords)

    monkeypatch.setattr(Console, "print", stopped)
    done = CliRunner().invoke(app, [word.format(results=tmp_path / "measured.json") for word in words])
    assert done.exit_code == 130, (done.output, done.exception)
    assert set(files()) >= expected, files()
    for path in (tmp_path / "results").glob("*.json"):
        assert json.loads(path.read_text()), "whole"


def test_what_cannot_be_written_where_it_should_be_is_kept_elsewhere(tmp_path, monkeypatch):
    """The disk fills up while it is measured; the temporary folder is another one."""
    from flashlane.bench.measure import saved_files

    spare, write = tmp_path / "spare", saved_files.write_atomically
    spare.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(spare))

    def full(path, text):
        if path.parent.name == "results":
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(saved_files, "write_atomically", full)
    monkeypatch.chdir(tmp_path)
    for words in (SUITE, ["profile", "--device", "cpu", "--tag", "tiled", "--N", "32", "--out", "results"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 3, done.output
        assert "No space left on device" in done.stderr and str(spare) in done.stderr
    names = " ".join(path.name for path in spare.iterdir())
    assert re.search(r"suite-flash\S+\.json", names) and re.search(r"profile-\S+\.json", names)
