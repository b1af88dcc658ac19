"""The script cli_gpu.py without a GPU: its commands have the options that it gives, and it judges what it finds."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    spec = importlib.util.spec_from_file_location("cli_gpu", ROOT / "benchmarks" / "scripts" / "cli_gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cli_gpu", module)
    spec.loader.exec_module(module)
    return module


def test_every_step_is_a_command_with_options_that_are_there(script, tmp_path):
    from typer.main import get_command

    from flashlane.cli.main import app

    commands = get_command(app).commands
    names = []
    for step in script.steps(tmp_path, tmp_path / "peers.py"):
        name, *words = step.words
        known = {option for p in commands[name].params for option in (*p.opts, *p.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, step.name
        assert script.looked(step, tmp_path) is not None, "nothing was written, and it must not say that all is well"
        names.append(name)
    assert {"bench", "sweep", "roofline", "profile", "report", "compare"} == set(names)
    compile(script.HANGING, "hanging.py", "exec")


def test_every_name_that_a_step_gives_is_known(script, tmp_path):
    """The command line would refuse it on the GPU machine, after the steps before it."""
    from flashlane.bench.measure.peers import select_peers
    from flashlane.cli.options import words_of
    from flashlane.core import registry
    from flashlane.profile.target import selection_of

    resolvers = {
        "--baselines": select_peers,
        "--kernels": lambda text: [registry.get(tag) for tag in words_of(text)],
        "--tag": lambda tag: selection_of((tag,)),
    }
    options = [
        (option, value)
        for step in script.steps(tmp_path, tmp_path / "peers.py")
        for option, value in zip(step.words, step.words[1:], strict=False)
        if option in resolvers
    ]
    assert {option for option, _ in options} == set(resolvers)
    for option, value in options:
        assert resolvers[option](value), (option, value)
    with pytest.raises(ValueError, match="unknown"):
        resolvers["--baselines"]("cudnnn,efficient")


def test_what_lacks_is_said(script, tmp_path):
    def write(rows, name="bench-1.json", **more):
        (tmp_path / name).write_text(json.dumps({"rows": rows, "notes": ["--cycles: no permission"], **more}))

    timing = {"method": "CUDA-graph replay, L2 warm"}
    write([{"timing": timing, "host_us": 5.0}])
    assert script.graphs(tmp_path) is None
    write([{"timing": timing, "host_us": None}])
    assert script.graphs(tmp_path)
    good = {"timing": timing, "cycles": 9.0, "tag": script.TAG, "direction": "forward", "mma_ceiling": 0.5}
    good |= {"memory": {"reserved": 1}}
    write([good])
    assert script.cycles(tmp_path) is None
    write([good | {"cycles": None}])
    assert script.cycles(tmp_path) == "no row has cycles: --cycles: no permission"
    write([good | {"mma_ceiling": None}])
    assert "ceiling" in script.cycles(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cli_gpu.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and "no CUDA device" in capsys.readouterr().err
