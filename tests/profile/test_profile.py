"""flashlane profile and roofline: the profilers' output read back, rows under ceilings, tools that are missing."""

import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashlane import bench
from flashlane.bench.measure import device_rates as rates
from flashlane.bench.measure.results import Row
from flashlane.bench.measure.timing import summarise
from flashlane.profile import ncu, nsys, target, tools

SAMPLE = (Path(__file__).parent / "data" / "ncu_raw.csv").read_text()
TAGS = ("mma(split-q+acc-f32+stage1)", "(flash)")


@pytest.fixture
def invoke(invoke, monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return invoke


# --- Nsight Compute


def test_counters_of_each_tag_are_read_back():
    counted = ncu.by_tag(ncu.read_csv(SAMPLE), TAGS)
    (ours,), flash = counted[TAGS[0]], counted[TAGS[1]]
    assert (
        ours.kernel == "mma_attention" and [launch.kernel.split("::")[1][:9] for launch in flash] == ["flash_fwd"] * 2
    )
    assert ours.metrics[ncu.CYCLES] == 47103.0 and ours.metrics["dram__bytes_read.sum"] == 8421376.0
    assert "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed" not in ours.metrics, "n/a is not a number"
    assert sum(launch.metrics[ncu.CYCLES] for launch in flash) == 13600 + 37000


def test_the_table_has_the_guide_s_counters():
    rows = dict(ncu.read_csv(SAMPLE)[1].rows())
    assert rows["time"] == "31.3 µs" and rows["SM cycles"] == "47 103" and rows["DRAM read"] == "8.4 MB"
    assert rows["DRAM throughput"] == "6.4 %" and rows["tensor pipe active"] == "71.9 %"
    assert rows["MUFU (XU) pipe"] == "38.2 %" and rows["achieved occupancy"] == "12.5 %"
    assert rows["bank conflicts, stores"] == "1 024" and rows["bank conflicts, ldmatrix"] == "0"
    for metric in ("dram__throughput", "sm__throughput", "sm__pipe_tensor_cycles_active", "_xu.", "warps_active"):
        assert any(metric in name for name in ncu.all_metrics()), metric


def test_what_bounds_a_kernel_is_the_busy_unit_or_what_warps_wait_for():
    _, tensor, _, latency, copy = ncu.read_csv(SAMPLE)
    assert tensor.bound_by == "bound by the tensor cores: busy 72 % of the time"
    assert copy.bound_by == "bound by device memory: busy 88 % of the time"
    assert latency.bound_by.startswith("bound by latency: the busiest unit is instruction issue, at 20 %")
    assert latency.bound_by.endswith("warps wait most for global memory or L2 (76%)")
    reasons = [reason for reason, _ in tensor.stalls]
    assert reasons == ["math_pipe_throttle", "wait", "long_scoreboard", "barrier"], "selected is no stall"
    assert sum(share for _, share in tensor.stalls) == pytest.approx(1.0)
    assert ncu.Launch("k").bound_by == "nothing that tells was counted"


def test_launches_without_their_markers_are_refused():
    with pytest.raises(RuntimeError, match="saw 2 of 3 implementations"):
        ncu.by_tag(ncu.read_csv(SAMPLE), (*TAGS, "tiled"))


def fake(folder, name, script):
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """A folder of programs that comes first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_ncu_is_asked_only_for_what_it_knows(on_path, tmp_path):
    (tmp_path / "sample.csv").write_text(SAMPLE)
    listed = "sm__cycles_elapsed   Counter  cycle  # of cycles\\nsm__throughput  Throughput\\n"
    fake(
        on_path,
        "ncu",
        f'if [ "$1" = --query-metrics ]; then printf "{listed}"; exit; fi\n'
        f'echo "$@" >> {tmp_path}/asked\ncat {tmp_path}/sample.csv\n',
    )
    problem = bench.make_problem(1, 8, 2048, 64, arch="sm_90a")
    counted = ncu.count(problem, TAGS)
    assert list(counted) == list(TAGS) and counted[TAGS[0]][0].metrics[ncu.CYCLES] == 47103.0
    asked = (tmp_path / "asked").read_text()
    metrics = asked.split("--metrics ")[1].split()[0].split(",")
    wanted = [ncu.CYCLES, "sm__throughput.avg.pct_of_peak_sustained_elapsed", "launch__registers_per_thread"]
    assert metrics == wanted and "--clock-control none" in asked and "--profile-from-start off" in asked
    assert "flashlane.profile.target" in asked
    assert ncu.count(problem, ()) == {}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1", "ERR_NVGPUCTRPERM.*run as root"),
        ("exit 3", "counted nothing: status 3"),
        ("sleep 20", "did not end within 1 s"),
    ],
)
def test_an_ncu_that_fails_says_why(on_path, script, message):
    fake(on_path, "ncu", script)
    with pytest.raises(RuntimeError, match=message):
        ncu.count(bench.make_problem(1, 1, 64, 64), TAGS, metrics=(ncu.CYCLES,), seconds=1.0)


def test_cycles_of_the_bench_are_those_of_all_launches(monkeypatch):
    from flashlane.bench.measure import runner

    monkeypatch.setattr(tools, "need_ncu", lambda device, name: "ncu")
    requests = []

    def count(problem, tags, direction, **keywords):
        requests.append((tags, direction, keywords["metrics"]))
        return {"tiled": [ncu.Launch("a", {ncu.CYCLES: 100.0}), ncu.Launch("b", {ncu.CYCLES: 11.0})], "(flash)": []}

    monkeypatch.setattr(ncu, "count", count)
    settings = bench.Settings(rounds=2, round_ms=0.1, warmup_ms=0.1, warmup=1)
    selection = bench.Selection(tags=("tiled",), peers=bench.select_peers("flash"))
    options = {"device": "cpu", "selection": selection, "settings": settings, "memory": False, "cycles": True}
    results = runner.run([bench.make_problem(1, 1, 16, 16)], **options)
    assert {row.tag: row.cycles for row in results} == {"tiled": 111.0, "(flash)": None}
    assert requests == [(["tiled", "(flash)"], "forward", (ncu.CYCLES,))] and "111" in results.to_csv()

    def refuse(*words, **keywords):
        raise RuntimeError("ncu counted nothing: no permission")

    monkeypatch.setattr(ncu, "count", refuse)
    results = runner.run([bench.make_problem(1, 1, 16, 16)], **options)
    assert results.notes == ["--cycles: ncu counted nothing: no permission"] and all(row.timing for row in results)


def test_a_request_travels_whole():
    problem = bench.make_problem(2, 8, 128, 64, torch.bfloat16, kv_heads=2, causal=True, arch="sm_90a")
    request = target.Request(problem, TAGS, "backward", 7, "cuda:0", 3)
    assert target.Request.from_json(request.to_json()) == request


def test_the_target_runs_what_it_is_asked_for(tmp_path):
    problem = bench.make_problem(1, 2, 32, 16)
    items = target.implementations(target.Request(problem, ("(flash)", "tiled"), "forward", 0, "cpu"))
    assert [item.tag for item in items] == ["(flash)", "tiled"]
    target.run(target.Request(problem, ("(flash)", "tiled"), "backward", 0, "cpu", 2))
    with pytest.raises(ValueError, match=r"mma\(naive\) cannot run .* GPU"):
        target.implementations(target.Request(problem, ("mma(naive)",), "forward", 0, "cpu"))
    for tag, message in (("tild", "did you mean 'tiled'"), ("(flsh)", r"did you mean '\(flash\)'")):
        with pytest.raises(ValueError, match=message):
            target.selection_of((tag,))


# --- Nsight Systems

KERN_SUM = """Generating SQLite file x.sqlite from x.nsys-rep
Processing [x.sqlite] with [cuda_gpu_kern_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
8.9,31000,10,3100.0,3090.0,3000,3300,40.1,"void flash_fwd_combine<T1, T2>(Params)"
91.1,318000,10,31800.0,31750.0,31000,33000,410.1,mma_attention

"""


def test_nsys_kernels_are_read_back(on_path, tmp_path):
    kernels = nsys.read_kernels(KERN_SUM)
    assert [(k.name, k.calls, k.total, k.median) for k in kernels] == [
        ("mma_attention", 10, 318.0, 31.75),
        ("void flash_fwd_combine<T1, T2>(Params)", 10, 31.0, 3.09),
    ]
    assert nsys.read_kernels("nothing") == []
    (tmp_path / "sum").write_text(KERN_SUM)
    path = fake(on_path, "nsys", f'echo "$@" >> {tmp_path}/asked\n[ "$1" = stats ] && cat {tmp_path}/sum\nexit 0\n')
    request = target.Request(bench.make_problem(1, 1, 64, 64), TAGS)
    assert len(nsys.record(str(path), request, tmp_path / "t.nsys-rep")) == 2
    asked = (tmp_path / "asked").read_text()
    assert "profile --trace=cuda,nvtx,osrt" in asked and "stats" in asked
    fake(on_path, "nsys", "echo 'no licence' >&2; exit 2")
    with pytest.raises(RuntimeError, match="status 2: no licence"):
        nsys.record(str(path), request, tmp_path / "t.nsys-rep")


# --- the commands, on a CPU


def test_a_trace_and_a_table_on_a_cpu(invoke, tmp_path):
    words = ["--device", "cpu", "--N", 48, "--D", 16, "--H", 2]
    done = invoke("profile", "--tag", "tiled", "--tag", "(flash)", *words, "--calls", 3, "--tool", "all")
    assert done.exit_code == 0, done.output + done.stderr
    assert "torch profiler" in done.stdout and "aten::" in done.stdout
    assert "--tool ncu reads the counters of an NVIDIA GPU; the device is cpu" in done.stdout
    trace = json.loads(next((tmp_path / "profiles").glob("*.trace.json")).read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("tiled") >= 3 and names.count("(flash)") >= 3
    body = json.loads(next(p for p in (tmp_path / "profiles").glob("*.json") if "trace" not in p.name).read_text())
    assert {r["name"]: r["calls"] for r in body["torch"]["ranges"]} == {"tiled": 3, "(flash)": 3}
    assert any("scaled_dot_product" in o["name"] for o in body["torch"]["operations"]) and body["notes"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tool", "ncu"], "--tool ncu reads the counters of an NVIDIA GPU"),
        (["--tool", "nsys"], "--tool nsys: nsys (Nsight Systems) is not on the PATH nor in CUDA_HOME: it comes with"),
        (["--tool", "perf"], "--tool is 'perf'"),
        (["--tag", "tild"], "did you mean 'tiled'"),
        (["--N", "16,32"], "the sizes name 2 problems"),
        (["--calls", "0"], "--calls is 0"),
        (["--out", "/dev/null/x"], "--out is '/dev/null/x'"),
    ],
)
def test_bad_input_and_missing_tools(invoke, monkeypatch, words, message):
    monkeypatch.setenv("PATH", "/nowhere")
    done = invoke("profile", *words)
    assert done.exit_code == 2 and message in done.stderr, done.stderr


def test_ncu_that_is_missing_names_the_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(
        ValueError, match=r"--cycles: ncu .Nsight Compute. is not on the PATH.*package cuda-nsight-compute"
    ):
        tools.need_ncu(torch.device("cuda", 0), "--cycles")
    with pytest.raises(RuntimeError, match="Nsight Compute"):
        ncu.count(bench.make_problem(1, 1, 64, 64), TAGS)


def test_a_tool_of_the_toolkit_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    path = fake(tmp_path / "bin", "nsys", "exit 0")
    assert tools.NSYS.path == str(path) and tools.NCU.path is None


REPORTING = """
case "$*" in
  *--query-metrics*) printf "LISTED";;
  *--set*)
    for word; do if [ "$last" = -o ]; then echo report > "$word.ncu-rep"; fi; last=$word; done
    eval spec=\\"\\${$#}\\"; cat "$spec" > ASKED.json
    echo "$@" > ASKED;;
  *--import*) echo "$@" >> ASKED; cat SAMPLE;;
esac
"""


def reporting(on_path, tmp_path):
    """An ncu that writes a report, and reads the sample from it."""
    (tmp_path / "sample.csv").write_text(SAMPLE)
    listed = "sm__cycles_elapsed   Counter\\nsm__throughput  Throughput\\n"
    script = REPORTING.replace("LISTED", listed).replace("ASKED", str(tmp_path / "asked"))
    fake(on_path, "ncu", script.replace("SAMPLE", str(tmp_path / "sample.csv")))


def test_one_run_writes_a_report_for_nsight_compute_and_is_read_back(on_path, tmp_path):
    reporting(on_path, tmp_path)
    problem, report = bench.make_problem(1, 8, 2048, 64, arch="sm_90a"), tmp_path / "a.b.ncu-rep"
    counted = ncu.count(problem, TAGS, report=report, sections="detailed")
    assert report.read_text() == "report\n"
    recorded, read = (tmp_path / "asked").read_text().splitlines()
    assert "--set detailed" in recorded and "--clock-control none" in recorded
    assert "flashlane.profile.target" in recorded and f"--metrics {ncu.CYCLES},sm__throughput" in recorded
    assert f"--import {report} --csv --page raw" in read
    assert counted[TAGS[0]][0].metrics[ncu.CYCLES] == 47103.0
    assert not any("dram" in name for name in counted[TAGS[0]][0].metrics), "only what the table has"
    assert json.loads((tmp_path / "asked.json").read_text())["calls"] == 1, "each set replays every launch many times"
    fake(on_path, "ncu", "echo '==ERROR== unknown set'; exit 1")
    with pytest.raises(RuntimeError, match="ncu wrote no report: ==ERROR== unknown set"):
        ncu.count(problem, TAGS, report=tmp_path / "c.ncu-rep", sections="fullest")


def test_a_profile_keeps_what_was_done_before_a_tool_that_fails_or_is_interrupted(invoke, tmp_path, monkeypatch):
    words = ("profile", "--device", "cpu", "--tag", "tiled", "--N", 32, "--calls", 1, "--tool", "torch,nsys")
    monkeypatch.setattr(tools.Tool, "path", property(lambda self: "/bin/false"))
    failed = invoke(*words)
    assert failed.exit_code == 2 and "error: --tool nsys: " in failed.stderr and "torch profiler" in failed.stdout
    for path in (tmp_path / "profiles").iterdir():
        path.unlink()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(nsys, "record", interrupt)
    stopped = invoke(*words)
    assert stopped.exit_code == 130 and "torch profiler" in stopped.stdout and "[2/2] Nsight Systems" in stopped.stderr
    (body,) = (p for p in (tmp_path / "profiles").glob("*.json") if "trace" not in p.name)
    assert json.loads(body.read_text())["torch"]["operations"]


def test_a_report_is_refused_without_a_gpu_and_its_command_is_shown(invoke):
    words = ("profile", "--device", "cpu", "--tag", "tiled", "--N", 32)
    done = invoke(*words, "--set", "full")
    assert done.exit_code == 2 and "--set reads the counters of an NVIDIA GPU" in done.stderr
    shown = invoke(*words, "--set", "full", "--show-commands")
    assert "--set full" in shown.stdout and "-o profiles/report" in shown.stdout


def test_conflicts_of_ldmatrix_are_shown_of_the_least_mean_and_most_busy_sm():
    name = ncu.LDSM_CONFLICTS
    launch = ncu.Launch(
        "k", {f"{name}.{end}": value for end, value in zip(("sum", "min", "avg", "max"), (90, 1, 3, 7))}
    )
    rows = dict(launch.rows())
    assert rows["bank conflicts, ldmatrix"] == "90"
    assert [rows[f"ldmatrix conflicts, {end} SM"] for end in ("least", "mean", "most")] == ["1", "3", "7"]
    assert {f"{name}.{end}" for end in ("sum", "min", "avg", "max")} <= set(ncu.all_metrics())


def test_commands_are_shown_without_running(invoke):
    done = invoke("profile", "--device", "cpu", "--tag", "tiled", "--N", 32, "--show-commands")
    assert done.exit_code == 0 and "--clock-control none" in done.stdout and "nsys profile" in done.stdout
    assert sys.executable in done.stdout and "dram__throughput" in done.stdout


# --- the roofline


def test_rows_are_placed_under_the_lower_ceiling():
    ceiling = rates.DeviceRates(1000.0, {"f16": 100.0}, {"f16": 50.0})
    assert ceiling.ridge("f16") == 100.0 and ceiling.ridge("f16", "mma(x)") == 50.0 and ceiling.rate("f32") is None
    assert ceiling.attainable(10.0, "f16") == 10.0 and ceiling.attainable(1e4, "f16") == 100.0
    problem = bench.make_problem(1, 1, 1024, 64)
    work, moved = bench.flops(problem), rates.bytes_of(timed(problem, "k", 1.0))
    assert moved == 4 * 1024 * 64 * 2 + 4 * 1024
    points = rates.place(
        [timed(problem, "k", 0.01), timed(problem, "mma(k)", 0.02), timed(problem, "no", None)], ceiling
    )
    assert [p.tag for p in points] == ["k", "mma(k)"]
    assert points[0].intensity == pytest.approx(work / moved) and points[0].bound_by == "matrix rate"
    assert points[0].share == pytest.approx(work / 0.01 * 1e-9 / 100) and points[1].attainable == 50.0
    small = rates.place([timed(bench.make_problem(1, 1, 16, 64), "k", 0.01)], ceiling)
    assert small[0].lower_ceiling == "copy rate" and small[0].attainable == pytest.approx(small[0].intensity)
    assert small[0].bound_by == "neither", "it reaches a hundredth of that"


def timed(problem, tag, ms):
    from flashlane.bench.measure.runner import sizes_of

    timing = None if ms is None else summarise([ms], 1, "m")
    tflops = None if ms is None else bench.tflops(problem, ms)
    return Row(problem.describe(), sizes_of(problem), tag, "kernel", "ok", timing=timing, tflops=tflops)


def test_the_sentence_says_what_bounds_it():
    device_rates = rates.DeviceRates(1000.0, {"f16": 100.0})
    problem = bench.make_problem(1, 1, 1024, 64)
    (fast,) = rates.place([timed(problem, "k", bench.flops(problem) / 60e9)], device_rates)
    assert rates.sentence([fast]) == (
        "B1 H1 N1024 D64 f16: 508 FLOP/byte, above the ridge at 100: the matrix rate bounds it; "
        "k reaches 60 of 100 TFLOP/s (60%)."
    )
    (slow,) = rates.place([timed(problem, "k", 1e3)], device_rates)
    (peer,) = rates.place([replace(timed(problem, "(flash)", 1e3), kind="peer")], device_rates)
    assert "the matrix rate bounds it" in rates.sentence([fast, peer]), "one that reaches a ceiling is enough"
    assert "neither ceiling bounds it" in rates.sentence([slow]) and "launches, latency or the host" in rates.sentence(
        [slow]
    )


def test_the_command_measures_places_and_draws(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["--device", "cpu", "--quick", "--N", "64,128", "--kernels", "tiled", "--baselines", "flash"]
    done = invoke("roofline", *words, "--format", "svg")
    assert done.exit_code == 0, done.output + done.stderr
    assert done.stdout.count("bounds it") == 2 and "copy" in done.stdout
    body = json.loads((tmp_path / "results" / "ceilings.json").read_text())
    assert (
        body["format"] == rates.FORMAT and body["ceilings"]["copy"] > 0.1 and body["ceilings"]["matrix"]["bf16"] > 1e-3
    )
    assert {p["tag"] for p in body["points"]} == {"tiled", "(flash)"} and len(body["points"]) == 4
    assert "Roofline" in (tmp_path / "results" / "roofline.svg").read_text()
    device = body["environment"]["device"]
    assert rates.read_rates_file(tmp_path / "results" / "ceilings.json", device).copy == body["ceilings"]["copy"]
    with pytest.raises(ValueError, match=r"was measured on .*, the results on other"):
        rates.read_rates_file(tmp_path / "results" / "ceilings.json", "other")


def test_results_of_another_device_are_not_placed(invoke, tmp_path):
    body = {"format": "flashlane-bench/1", "environment": {"device": "Some GPU"}, "settings": {}, "rows": []}
    (tmp_path / "r.json").write_text(json.dumps(body))
    done = invoke("roofline", "--device", "cpu", "--results", "r.json")
    assert done.exit_code == 2 and "was measured on Some GPU, this is" in done.stderr


def test_without_matplotlib_there_are_figures_but_no_picture(invoke, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["--device", "cpu", "--quick", "--N", "32", "--kernels", "tiled", "--baselines", "none"]
    done = invoke("roofline", *words)
    assert done.exit_code == 0 and 'no picture: plots need matplotlib: pip install "flashlane[plots]"' in done.stdout
    assert (tmp_path / "results" / "ceilings.json").exists()
