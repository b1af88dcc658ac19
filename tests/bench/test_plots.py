"""The pictures of results files: what is drawn is what the file says, in both themes, and bad files are refused."""

from __future__ import annotations

import errno
import json
import random
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashlane.bench.present import figure_frame as figures
from flashlane.bench.present import plots
from flashlane.cli import main as cli

pytest.importorskip("matplotlib")

ENVIRONMENT = {
    "device": "NVIDIA Test",
    "torch": "2.99.1",
    "cuda": "13.7",
    "driver": "600.1",
    "commit": "abcdef012345",
    "date": "2026-01-02T03:04:05+00:00",
}
KERNELS = ("mma(split-q+stage1)", "mma(split-q+stage2)", "mma(split-kv+stage1)", "fa1(plain)")
PEERS = ("(flash)", "(cudnn)")
LENGTHS = (512, 1024, 4096)


def row(tag: str, tflops: float | None, speedup: float | None, batch=1, length=1024, dim=64, status="ok", **more):
    sizes = {"batch": batch, "heads": 8, "kv_heads": 8, "seqlen_q": length, "seqlen_k": length, "head_dim": dim}
    return {
        "problem": f"B{batch} H8 N{length} D{dim} f16",
        "sizes": sizes,
        "tag": tag,
        "kind": "peer" if tag.startswith("(") else "kernel",
        "status": status,
        "tflops": tflops,
        "speedup": speedup,
        **more,
    }


@pytest.fixture
def rates():
    """Random TFLOP/s by (head dim, length, tag); split-q is the fastest kernel everywhere, fa1 the slowest."""
    spread = {"mma(split-q+stage1)": 300, "mma(split-q+stage2)": 250, "mma(split-kv+stage1)": 150, "fa1(plain)": 50}
    spread |= {"(flash)": 200, "(cudnn)": 380}
    return {(d, n, t): spread[t] + 40 * random.random() for d in (64, 128) for n in LENGTHS for t in spread}


def rows_of(rates: dict) -> list[dict]:
    best = {(d, n): max(rates[d, n, t] for t in PEERS) for d, n, _ in rates}
    return [row(t, rate, rate / best[d, n], length=n, dim=d) for (d, n, t), rate in reversed(rates.items())]


def write(path: Path, rows: list[dict], **more) -> Path:
    path.write_text(json.dumps({"format": "flashlane-bench/1", "environment": ENVIRONMENT, "rows": rows, **more}))
    return path


@pytest.fixture
def results(tmp_path, rates):
    return write(tmp_path / "run.json", rows_of(rates))


def lines_of(axis) -> dict[str, tuple[list[float], list[float]]]:
    return {x.get_label(): (list(x.get_xdata()), list(x.get_ydata())) for x in axis.lines if x.get_label()[0] != "_"}


def rates_of(axis) -> list[float]:
    return [line.get_ydata()[0] for line in axis.lines if line.get_label().startswith("_")]


def texts_of(figure) -> str:
    return "\n".join(text.get_text() for axis in figure.axes for text in axis.texts)


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, ["plot", *map(str, arguments)], env={"COLUMNS": "300"})


def refused(*arguments: object, status: int = 2) -> str:
    done = invoke(*arguments)
    assert done.exit_code == status, done.output
    return done.stderr


def test_lines_are_the_file_s_rates(results, rates):
    figure = plots.throughput_figure(plots.read_results(results), most=3)
    assert [axis.get_title(loc="left") for axis in figure.axes] == [
        "head dim 64 · f16 · B1 H8",
        "head dim 128 · f16 · B1 H8",
    ]
    for axis, dim in zip(figure.axes, (64, 128)):
        drawn = lines_of(axis)
        assert set(drawn) == {*KERNELS[:3], *PEERS}, "the three fastest kernels and every peer"
        for tag, (lengths, tflops) in drawn.items():
            assert tuple(lengths) == LENGTHS
            assert tflops == [rates[dim, n, tag] for n in LENGTHS]
        assert (axis.get_xlabel(), axis.get_ylabel()) == ("sequence length", "TFLOP/s")
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["512", "1024", "4096"]
        assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > max(rates[dim, n, "(cudnn)"] for n in LENGTHS)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(legend) == sorted(lines_of(figure.axes[0]))


def test_a_panel_without_a_drawn_kernel_is_left_out(tmp_path):
    rows = [row("k", 5.0, None), row("k", 5.0, None, length=512), row("other", 2.0, None, dim=128)]
    (axis,) = plots.throughput_figure(plots.read_results(write(tmp_path / "a.json", rows)), 1, {"ceiling": 9.0}).axes
    assert list(lines_of(axis)) == ["k"] and axis.get_title(loc="left").startswith("head dim 64")


@pytest.mark.parametrize("speeds", [(float("inf"), 1.0), (5.0, -1.0), (float("nan"), 1.0), ("fast", 1.0)])
def test_impossible_speeds_are_refused(tmp_path, speeds):
    with pytest.raises(ValueError, match=r"a\.json is damaged: ValueError"):
        plots.read_results(write(tmp_path / "a.json", [row("k", *speeds)]))


def test_peers_are_drawn_apart_and_every_line_differs(results):
    axis = plots.throughput_figure(plots.read_results(results)).axes[0]
    styles = {line.get_label(): (line.get_color(), line.get_linestyle(), line.get_marker()) for line in axis.lines}
    assert len(set(styles.values())) == len(styles) == 6
    assert {styles[tag][0] for tag in PEERS} == {plots.LIGHT.peer}
    assert all(styles[tag][0] in plots.LIGHT.lines and styles[tag][1] == "-" for tag in KERNELS)


def test_lines_of_one_length_and_two_batches_are_not_joined(tmp_path):
    rows = [row("k", rate, None, batch=b, length=n) for rate, b, n in ((1.5, 1, 512), (2.5, 1, 1024), (9.5, 4, 512))]
    figure = plots.throughput_figure(plots.read_results(write(tmp_path / "a.json", rows)))
    assert [lines_of(axis)["k"] for axis in figure.axes] == [([512, 1024], [1.5, 2.5]), ([512], [9.5])]
    rows = [row("k", 1.5, None, batch=4, length=512), row("k", 2.5, None, batch=1, length=1024)]
    (axis,) = plots.throughput_figure(plots.read_results(write(tmp_path / "b.json", rows))).axes
    assert lines_of(axis)["k"] == ([512, 1024], [1.5, 2.5])
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["512\nB4 H8", "1024\nB1 H8"]


def test_only_points_that_belong_together_are_joined(tmp_path):
    def styles(*extents):
        rows = [row("k", 1.5, None, batch=b, length=n) for b, n in extents]
        (axis,) = plots.throughput_figure(plots.read_results(write(tmp_path / "a.json", rows))).axes
        return {line.get_linestyle() for line in axis.lines if line.get_label()[0] != "_"}

    assert styles((4, 512), (2, 1024), (1, 2048)) == {"-"}, "equal tokens"
    assert styles((1, 512), (1, 1024)) == {"-"}
    assert styles((1, 512), (2, 1024), (1, 2048)) == {"None"}


def test_the_kernels_drawn_are_together_the_fastest_everywhere(tmp_path):
    """One that is second everywhere does not crowd out the one that is first where the others are slow."""
    speeds = {"all-round": (9, 9, 9, 3), "nearly": (8.9, 8.9, 8.9, 2.9), "long": (1, 1, 1, 10)}
    rows = [row(tag, v, None, length=2**i) for tag, values in speeds.items() for i, v in enumerate(values, 6)]
    (axis,) = plots.throughput_figure(plots.read_results(write(tmp_path / "a.json", rows)), most=2).axes
    assert set(lines_of(axis)) == {"all-round", "long"}


def test_labels_of_bars_stay_clear_of_the_line_at_one(results):
    figure = plots.speedup_figure(plots.read_results(results))
    labels = [text for axis in figure.axes for text in axis.texts]
    assert labels and min(label.xy[0] for label in labels) >= 1.0


def test_ceilings(results, tmp_path):
    measured = plots.read_results(results)
    figure = plots.throughput_figure(measured, ceilings={"ceiling": 700.0, "f16 acc-f32": 650.0, "bf16 acc-f32": 640.0})
    for axis in figure.axes:
        assert rates_of(axis) == [700, 650], "another dtype's ceiling is not this panel's"
        assert axis.get_ylim()[1] > 700
    assert "ceiling: 700 TFLOP/s" in texts_of(figure) and "acc-f32: 650 TFLOP/s" in texts_of(figure)
    label = next(text for text in figure.axes[0].texts if "700" in text.get_text())
    figure.canvas.draw()
    bottom = figure.axes[0].transData.inverted().transform(label.get_window_extent())[0, 1]
    assert bottom > 700, "labels hide no line"
    far = plots.throughput_figure(measured, ceilings={"ceiling": 9000.0})
    assert rates_of(far.axes[0]) == [] and "↑ ceiling: 9000 TFLOP/s" in texts_of(far)


def test_ceilings_of_a_file(results, tmp_path):
    body = {"environment": {"device": "NVIDIA Test"}, "failures": []}
    line = {"block": "hgemm", "group": "8192 f16 acc-f32 nn", "ok": True, "tflops": 300.0, "of_ceiling": 0.5}
    body["rows"] = [line, line | {"of_ceiling": 0.6}, {"block": "softmax"}, line | {"of_ceiling": None}]
    file = tmp_path / "lessons.json"
    file.write_text(json.dumps(body))
    assert plots.read_matrix_rates(file, "NVIDIA Test") == {"f16 acc-f32": 600.0}
    with pytest.raises(ValueError, match=r"lessons\.json was measured on NVIDIA Test, the results on NVIDIA Other"):
        plots.read_matrix_rates(file, "NVIDIA Other")
    assert invoke(results, "--ceilings", file, "--out", tmp_path, "--format", "svg").exit_code == 0
    assert "acc-f32 mma.sync: 600 TFLOP/s" in (tmp_path / "run-throughput.svg").read_text()
    file.write_text(json.dumps(body | {"rows": []}))
    assert f"--ceilings: {file} has no rate" in refused(results, "--ceilings", file, "--out", tmp_path)


def test_bars_are_the_speedups(results, rates):
    figure = plots.speedup_figure(plots.read_results(results), most=2)
    assert len(figure.axes) == 6
    for axis in figure.axes:
        _, _, length, dim, *_ = axis.get_title(loc="left").split()
        cell = (int(dim[1:]), int(length[1:]))
        best = max(rates[(*cell, tag)] for tag in PEERS)
        expected = sorted(((rates[(*cell, t)] / best, t) for t in (*KERNELS[:2], *PEERS)), reverse=True)
        assert [tick.get_text() for tick in axis.get_yticklabels()] == [tag for _, tag in expected]
        assert [bar.get_width() for bar in axis.patches] == pytest.approx([ratio for ratio, _ in expected])
        assert [t.get_text().split("×")[0] for t in axis.texts] == [f"{ratio:.2f}" for ratio, _ in expected]
        assert axis.yaxis_inverted(), "the fastest on top"
        assert "fastest 2 of 4" in axis.get_title(loc="left") and "× best peer" in axis.get_xlabel()


def test_heatmap_is_the_ratio_of_the_fastest(results, rates, tmp_path):
    figure = plots.heatmap_figure(plots.read_results(results))
    axis, bar = figure.axes
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["B1 H8 · f16"]
    cells = [(d, n) for d in (64, 128) for n in LENGTHS]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == [f"D{d}\nN{n}" for d, n in cells]
    ratios = [max(rates[(*c, t)] for t in KERNELS) / max(rates[(*c, t)] for t in PEERS) for c in cells]
    assert [2**log for log in axis.images[0].get_array()[0].tolist()] == pytest.approx(ratios)
    assert [text.get_text().split("×")[0] for text in axis.texts] == [f"{ratio:.2f}" for ratio in ratios]
    assert (axis.get_xlabel(), bar.get_ylabel()) == (
        "head dim and sequence length\nin a cell: × best peer, below it TFLOP/s",
        "× best peer",
    )
    rows = [row("k", 5, 2.0, batch=1, length=512), row("k", 5, 0.5, batch=2, length=1024)]
    axis = plots.heatmap_figure(plots.read_results(write(tmp_path / "sparse.json", rows))).axes[0]
    assert [text.get_text()[:5] for text in axis.texts] == ["2.00×", "–", "–", "0.50×"]


def test_untimed_and_failed_rows_are_left_out(tmp_path):
    rows = [row("k", 5.0, 2.0), row("bad", 99.0, 40.0, status="FAIL"), row("worse", None, None, status="error")]
    measured = plots.read_results(write(tmp_path / "a.json", rows))
    assert [point.tag for point in measured.points] == ["k"]


def measured_row(tag: str, length: int, ms: float, mib: float, **more):
    """A row with all that memory and the copy ceiling need."""
    found = row(tag, 4 * 8 * length**2 * 64 / ms * 1e-9, 1.0, length=length)
    found["sizes"]["dtype"] = "f16"
    return found | {"timing": {"median": ms}, "memory": {"extra": int(mib * 2**20)}, **more}


def test_memory_curves_are_the_file_s_bytes(tmp_path):
    rows = [measured_row(tag, n, 1.0, size * n / 512) for tag, size in (("k", 1.0), ("(flash)", 2.0)) for n in LENGTHS]
    figure = plots.memory_figure(plots.read_results(write(tmp_path / "a.json", rows)))
    (axis,) = figure.axes
    drawn = lines_of(axis)
    assert drawn == {"k": (list(LENGTHS), [1.0, 2.0, 8.0]), "(flash)": (list(LENGTHS), [2.0, 4.0, 16.0])}
    assert axis.get_yscale() == "log" and "MiB a call" in axis.get_ylabel()
    with pytest.raises(ValueError, match="does not say what a call allocates"):
        plots.memory_figure(plots.read_results(write(tmp_path / "b.json", [row("k", 5.0, 2.0)])))


def test_the_copy_ceiling_is_intensity_times_rate(tmp_path):
    path = write(tmp_path / "a.json", [measured_row("k", n, 4 * 8 * n**2 * 64 / 1e11, 1.0) for n in LENGTHS])
    measured = plots.read_results(path)
    moved = [4 * 8 * n * 64 * 2 + 4 * 8 * n for n in LENGTHS]
    intensity = [4 * 8 * n**2 * 64 / size for n, size in zip(LENGTHS, moved)]
    assert [p.intensity for p in measured.points] == pytest.approx(intensity)
    (axis,) = plots.throughput_figure(measured, copy=500.0).axes
    ceiling = next(line for line in axis.lines if line.get_linestyle() == ":")
    assert list(ceiling.get_xdata()) == [512, 1024], "the longest is far above the line, and left out"
    assert list(ceiling.get_ydata()) == pytest.approx([0.5 * x for x in intensity[:2]])
    assert "copy: 0.5 TB/s (dotted)" in [text.get_text() for text in axis.texts]
    (far,) = plots.throughput_figure(measured, copy=5e6).axes
    assert "↑ copy: 5e+03 TB/s" in [text.get_text() for text in far.texts]


def test_ceilings_of_the_run_itself_and_of_a_file_are_drawn(tmp_path):
    ceilings = {"copy": 4000.0, "matrix": {"f16": 0.15, "f32": 9.0}, "mma": {"f16": 0.12}}
    rows = [measured_row("k", n, 4 * 8 * n**2 * 64 / 1e11, 1.0) for n in LENGTHS]
    inside = write(tmp_path / "a.json", rows, environment={**ENVIRONMENT, "ceilings": ceilings})
    assert invoke(inside, "--format", "svg", "--out", tmp_path).exit_code == 0
    shown = (tmp_path / "a-throughput.svg").read_text()
    assert "matrix product: 0.15 TFLOP/s" in shown and "mma.sync: 0.12 TFLOP/s" in shown and "copy: 4 TB/s" in shown
    assert "9 TFLOP/s" not in shown, "that of another dtype"
    body = {"format": "flashlane-ceilings/1", "environment": ENVIRONMENT, "ceilings": ceilings}
    (tmp_path / "ceilings.json").write_text(json.dumps(body))
    plain = write(tmp_path / "b.json", rows)
    assert invoke(plain, "--ceilings", tmp_path / "ceilings.json", "--format", "svg", "--out", tmp_path).exit_code == 0
    assert "matrix product: 0.15 TFLOP/s" in (tmp_path / "b-throughput.svg").read_text()
    # As an earlier version wrote and named them.
    old = write(tmp_path / "c.json", rows, environment={**ENVIRONMENT, "roofs": ceilings})
    assert invoke(old, "--format", "svg", "--out", tmp_path).exit_code == 0
    assert "matrix product: 0.15 TFLOP/s" in (tmp_path / "c-throughput.svg").read_text()
    earlier = {"format": "flashlane-roofs/1", "environment": ENVIRONMENT, "roofs": ceilings}
    (tmp_path / "roofs.json").write_text(json.dumps(earlier))
    (tmp_path / "b-throughput.svg").unlink()
    assert invoke(plain, "--roofs", tmp_path / "roofs.json", "--format", "svg", "--out", tmp_path).exit_code == 0
    assert "matrix product: 0.15 TFLOP/s" in (tmp_path / "b-throughput.svg").read_text()
    for broken, words in (
        ({**body, "environment": {"device": "Other"}}, "was measured on Other"),
        ({**body, "ceilings": {"copy": -1}}, "has damaged ceilings"),
    ):
        (tmp_path / "ceilings.json").write_text(json.dumps(broken))
        assert words in refused(plain, "--ceilings", tmp_path / "ceilings.json")


@pytest.mark.parametrize("kind", ["throughput", "speedup", "heatmap"])
@pytest.mark.parametrize("theme", [plots.LIGHT, plots.DARK], ids=["light", "dark"])
def test_every_text_stands_out_and_the_title_says_where_from(results, kind, theme):
    from matplotlib.colors import to_rgb

    figure = getattr(plots, f"{kind}_figure")(plots.read_results(results), theme=theme)
    title = " ".join(text.get_text().replace("\n", " ") for text in figure.texts)
    for words in ("NVIDIA Test", "torch 2.99.1", "CUDA 13.7", "driver 600.1", "commit abcdef012345", "2026-01-02"):
        assert words in title
    assert to_rgb(figure.get_facecolor()) == to_rgb(theme.background)
    inside = [t for axis in figure.axes if kind != "heatmap" for t in axis.texts]  # a cell's ink is its colour's
    labels = [t for axis in figure.axes for t in (*axis.get_xticklabels(), *axis.get_yticklabels())]
    legend = [t for legend in figure.legends for t in legend.get_texts()]
    for text in [*figure.texts, *inside, *labels, *legend]:
        assert contrast(to_rgb(text.get_color()), to_rgb(theme.background)) > 4.5, text.get_text()


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The contrast ratio of WCAG 2."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_command_writes_what_it_says(results, tmp_path):
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    out = tmp_path / "new" / "pictures"
    arguments = (results, "--kind", "throughput,heatmap", "--format", "png,svg", "--dark", "--out", out)
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    names = [f"run-{kind}-dark.{suffix}" for kind in ("throughput", "heatmap") for suffix in ("png", "svg")]
    assert done.stdout.split() == [str(out / name) for name in names]
    assert sorted(path.name for path in out.iterdir()) == sorted(names), "and leaves nothing else"
    assert imread(out / names[0])[0, 0, :3] == pytest.approx(to_rgb(plots.DARK.background), abs=0.01)
    first = (out / names[1]).read_bytes()
    assert all(tag in first.decode() for tag in KERNELS), "text stays text"
    assert invoke(*arguments).exit_code == 0
    assert (out / names[1]).read_bytes() == first, "the same file, drawn again, is the same"


def test_tags_choose_kernels_and_keep_peers(results, tmp_path):
    assert invoke(results, "--tags", "split-kv,fa1", "--format", "svg", "--out", tmp_path).exit_code == 0
    text = (tmp_path / "run-throughput.svg").read_text()
    assert "mma(split-kv+stage1)" in text and "fa1(plain)" in text and "(cudnn)" in text and "split-q" not in text
    assert "--tags is nothing-like-it; no timed kernel of" in refused(results, "--tags", "nothing-like-it")


def test_a_fault_while_writing_keeps_the_old_picture(results, tmp_path, monkeypatch):
    old = tmp_path / "run-throughput.png"
    old.write_bytes(b"old")

    def full(figure, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(figures, "save", full)
    assert f"{old} cannot be written: No space left on device" in refused(results, "--out", tmp_path, status=3)
    assert old.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-throughput.png", "run.json"]


def test_without_matplotlib(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert 'pip install "flashlane[plots]"' in refused(results, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "cannot be read: No such file"),
        ("{", "is not valid JSON"),
        ("\x00\xff", "is not valid JSON"),
        ("[1]", "a JSON list"),
        ('{"format": "flashlane-bars/1"}', "format 'flashlane-bars/1'"),
        ('{"format": "flashlane-bench/1", "environment": {}}', "is damaged: KeyError 'rows'"),
        ('{"format": "flashlane-bench/1", "environment": {}, "rows": [{"status": "ok"}]}', "KeyError 'tflops'"),
        ('{"format": "flashlane-bench/1", "environment": {}, "rows": [3]}', "is damaged: TypeError"),
        ('{"format": "flashlane-bench/1", "environment": {}, "rows": []}', "has no timed row"),
    ],
)
def test_bad_files_are_named(tmp_path, text, words):
    file = tmp_path / "bad.json"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    message = refused(file, "--out", tmp_path / "out")
    assert str(file) in message and words in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--kind", "pie"), "--kind is 'pie'; throughput, speedup, memory, heatmap"),
        (("--format", "png,gif"), "--format is 'png,gif'"),
        (("--most", 0), "--most is 0"),
        (("--ceiling", -1), "--ceiling is -1"),
        (("--kind", "heatmap", "--ceiling", 5), "go with --kind throughput"),
    ],
)
def test_bad_options(results, arguments, words):
    assert words in refused(results, *arguments)


def test_no_peer_two_equal_names_and_no_folder(tmp_path):
    alone = write(tmp_path / "alone.json", [row("k", 5.0, None)])
    assert f"{alone} has no problem with a checked peer" in refused(alone, "--kind", "speedup", "--out", tmp_path)
    (tmp_path / "sub").mkdir()
    other = write(tmp_path / "sub" / "alone.json", [row("k", 5.0, None)])
    assert "the name of another file given" in refused(alone, other, "--out", tmp_path)
    assert "--out is" in refused(alone, "--out", alone)


def test_more_problems_than_a_picture_holds(tmp_path):
    rows = [row("k", 5.0, 1.0, batch=b) for b in range(1, plots.MOST_PROBLEMS + 2)]
    file = write(tmp_path / "many.json", rows)
    assert f"{file} asks for 121 problems" in refused(file, "--kind", "speedup", "--out", tmp_path)


@pytest.mark.parametrize("command", ["plot", "report", "regress"])
def test_a_sweeps_journal_is_told_from_its_results(tmp_path, command):
    journal = tmp_path / "sweep.jsonl"
    journal.write_text('{"a": 1}\n{"b": 2}\n')
    words = [command, str(journal), *([str(journal)] if command == "regress" else [])]
    done = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "is a sweep's journal; give sweep.json" in done.stderr, done.output
