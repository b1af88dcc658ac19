"""flashlane report: one page, everything inside; its tables sort and filter in a browser."""

import html.parser
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashlane.bench.measure.device_rates import DeviceRates, Placed
from flashlane.bench.measure.memory import Memory
from flashlane.bench.measure.results import Results, Row, Skipped
from flashlane.bench.measure.timing import summarise
from flashlane.bench.present import figure_frame, plots, report
from flashlane.bench.present.points import Measured, Point
from flashlane.bench.present.roofline import roofline_figure
from flashlane.bench.present.styles import styles_of, styles_of_tags
from flashlane.bench.present.verdict import times
from flashlane.cli.main import app

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ENVIRONMENT = {
    "device": "NVIDIA <Test>",
    "torch": "2.99.1",
    "commit": "abcdef012345",
    "date": "2026-01-02T03:04:05+00:00",
    "ceilings": {"copy": 4000.0, "matrix": {"f16": 700.0}, "mma": {}},
}
TIMES = {"mma(split-q+stage1)": 0.3, "tiled": 12.0, "(flash)": 0.45, "(cudnn)": 0.0021}


def row(tag, ms, n=1024, status="ok", message=""):
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "seqlen_q": n, "seqlen_k": n, "head_dim": 64, "dtype": "f16"}
    kind = "peer" if tag.startswith("(") else "kernel"
    timing = None if ms is None else summarise([ms, ms * 1.1, ms * 0.9], 3, "m")
    figures = {} if ms is None else {"tflops": 2.1 / ms, "speedup": TIMES["(cudnn)"] / ms}
    memory = Memory(3 << 20, None, None, None, "m")
    return Row(f"B1 H8 N{n} D64 f16", sizes, tag, kind, status, message, timing=timing, memory=memory, **figures)


@pytest.fixture
def results(tmp_path):
    rows = [row(tag, ms * n / 1024, n) for n in (1024, 2048) for tag, ms in TIMES.items()]
    rows.append(row("mma(naive)", None, status="FAIL", message="output: <b>NaN</b>"))
    body = Results(ENVIRONMENT, {"rounds": 7}, rows, [Skipped("B1 H8 N1024 D64 f16", "(ffpa)", "not installed")])
    path = tmp_path / "run.json"
    path.write_text(body.to_json())
    return path


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, ["report", *map(str, words)])


class Page(html.parser.HTMLParser):
    """Addresses, and whether every tag is closed in order."""

    VOID = ("meta", "img", "input", "br", "hr")

    def __init__(self, text):
        super().__init__()
        self.addresses, self.open, self.images = [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "data")]
        self.images += tag == "img"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag


def test_everything_is_inside(results, invoke, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "0001.md").write_text(
        "# The first\n\nIt *lost*. <script>bad()</script>\n\n## A\n\n"
        "| a | b |\n| --- | --- |\n| 1 | 2 |\n\n## B\n\nnot quoted\n"
    )
    done = invoke("run.json", "--notebook", "notes", "--out", "page.html", "--title", "Mine & yours")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert not page.open, "every tag is closed"
    outside = [a for a in page.addresses if not a.startswith(("#", "data:image/svg+xml;base64,"))]
    assert not outside and "default-src 'none'" in text, outside
    assert not re.search(r"(?:https?:)?//\w+\.\w+", re.sub(r"base64,[^\"]+", "", text)), "no address of another place"
    assert page.images == 2 * 6, "heat map, roofline, a panel and a legend of throughput and memory, light and dark"
    for words in ("Mine &amp; yours", "NVIDIA &lt;Test&gt;", "abcdef012345", "2.99.1", "not installed", "(ffpa)"):
        assert words in text, words
    assert "&lt;b&gt;NaN&lt;/b&gt;" in text and "<b>NaN" not in text
    assert "<em>lost</em>" in text and "<td>1</td>" in text and "not quoted" not in text and "<script>bad" not in text
    assert "What bounds each problem" in text and "the matrix rate bounds it" in text


def test_without_matplotlib_the_tables_stand(results, invoke, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert invoke("run.json").exit_code == 0
    text = (tmp_path / "report.html").read_text()
    assert "No pictures: plots need matplotlib" in text and "<img" not in text and "mma(naive)" in text


def fast(tag, ms, n, direction="forward"):
    """A row whose peer takes 1 ms."""
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "seqlen_q": n, "seqlen_k": n, "head_dim": 64, "dtype": "f16"}
    kind, name = ("peer" if tag.startswith("(") else "kernel"), f"B1 H8 N{n} D64 f16"
    name += "" if direction == "forward" else f", {direction}"
    timing = summarise([ms], 3, "m")
    figures = {"tflops": 1 / ms, "speedup": 1 / ms, "direction": direction}
    return Row(name, sizes, tag, kind, "ok", timing=timing, **figures)


def test_the_verdict_comes_first(invoke, tmp_path):
    rows = [fast("k", 0.5, 64), fast("(p)", 1.0, 64), fast("k", 2.0, 128), fast("(p)", 1.0, 128), fast("k", 1.0, 256)]
    rows += [fast("k", 0.25, 64, "backward"), fast("(p)", 1.0, 64, "backward")]
    rows.append(replace(rows[0], tag="bad", status="FAIL", message="m" * 300, timing=None, speedup=None))
    found = Results(ENVIRONMENT, {"directions": ["forward", "backward"], "check": True}, rows)
    words = report.verdict_words(found)
    assert "ahead of the fastest peer in 2 of 3 problems; geometric mean 1.59×, least 0.50× (B1 H8 N128 D64" in words
    assert "most 4.00× (B1 H8 N64 D64 f16, backward)" in words and "1 further problem had no" in words
    assert "1 row failed: 1 of kernels, 0 of peers" in words
    (tmp_path / "run.json").write_text(found.to_json())
    assert invoke("run.json").exit_code == 0
    text = (tmp_path / "report.html").read_text()
    first = min(text.index(mark) for mark in ("<img", "<table>", "<details"))
    assert 0 < text.index('class="verdict"') < first, "before any picture, table or detail"
    assert "directions: forward, backward" in text and "check: yes" in text and "True" not in text
    body = text[text.index("<tbody>") :]
    assert body.index("backward") < body.index("</tbody>"), "a line for each direction"
    assert report.verdict_words(Results({}, {}, rows[:1])).startswith("No problem has both")


def test_bars_of_every_problem_are_in_the_page(invoke, tmp_path):
    rows = [fast(tag, ms, n) for n in range(1, 41) for tag, ms in (("k", 0.5), ("(p)", 1.0))]
    rows += [fast(f"k{index:02}", 2.0, 1) for index in range(20)]
    (tmp_path / "run.json").write_text(Results(ENVIRONMENT, {}, rows).to_json())
    assert invoke("run.json").exit_code == 0
    text = (tmp_path / "report.html").read_text()
    shown = re.findall(r'<details class="bars"( open)?><summary>(.*?)</summary>', text)
    assert [name for _, name in shown] == [f"B1 H8 N{n} D64 f16" for n in range(1, 41)]
    assert sum(bool(opened) for opened, _ in shown) == report.OPEN_PROBLEMS
    assert f"The first {report.OPEN_PROBLEMS} of 40 problems are open" in text
    assert "9 slower kernels are in the table of every row" in text


@pytest.mark.parametrize("theme", [figure_frame.LIGHT, figure_frame.DARK], ids=["light", "dark"])
def test_a_tag_has_one_colour_and_marker_in_every_picture(theme):
    pytest.importorskip("matplotlib")
    points = tuple(
        Point(
            f"N{n} f16", tag, not tag.startswith("("), rate, rate / 9, 1, "8", n, n, "64", "f16", n << extra, 99.0 + n
        )
        for n in (256, 512)
        for tag, rate, extra in (("slow", 5.0, 0), ("(p)", 9.0, 1), ("fast", 7.0, 12), ("(q)", 4.0, 14))
    )
    measured = Measured(Path("x.json"), ENVIRONMENT, points)
    styles = styles_of([measured])
    few = Measured(Path("x.json"), ENVIRONMENT, tuple(p for p in points if p.tag != "fast"))
    ceilings = DeviceRates(4000.0, {"f16": 700.0})
    places = [
        Placed(p.problem, p.tag, "kernel" if p.ours else "peer", "f16", 9.0, p.tflops, 36.0, 175.0) for p in points
    ]
    pictures = [
        plots.throughput_figure(measured, styles=styles, theme=theme),
        plots.throughput_figure(few, styles=styles, theme=theme),
        plots.memory_figure(measured, styles=styles, theme=theme),
        roofline_figure(places[::-1], ceilings, ENVIRONMENT, styles=styles, theme=theme),
    ]
    looks = {}
    for axis in (axis for figure in pictures for axis in figure.axes):
        for line in axis.lines:
            if line.get_label()[0] != "_":
                looks.setdefault(line.get_label(), set()).add((line.get_color(), line.get_marker()))
    assert set(looks) == {"slow", "fast", "(p)", "(q)"} and all(len(look) == 1 for look in looks.values()), looks
    assert len({next(iter(look)) for look in looks.values()}) == 4
    bars = plots.speedup_figure(measured, styles=styles, theme=theme).axes[0]
    names = [label.get_text() for label in bars.get_yticklabels()]
    for name, bar in zip(names, bars.patches, strict=True):
        assert pytest.importorskip("matplotlib.colors").to_hex(bar.get_facecolor()) == next(iter(looks[name]))[0]


def test_each_file_of_a_page_draws_its_own_fastest_kernels(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    for name, kernel in (("a", "ka"), ("b", "kb")):
        rows = [fast(f"{kernel}{index}", 0.5 + index / 10, 64) for index in range(7)] + [fast("(p)", 1.0, 64)]
        (tmp_path / f"{name}.json").write_text(Results(ENVIRONMENT, {}, rows).to_json())
    assert invoke("a.json", "b.json").exit_code == 0
    text = (tmp_path / "report.html").read_text()
    bars = re.findall(r'<div class="bar"><span>(k.\d)</span>.*?var\(--([\w-]+)\)', text)
    colours = dict(bars)
    assert len(bars) == 14 and len({colours[f"ka{index}"] for index in range(5)}) == 5
    assert {tag for tag, colour in bars if colour == "other"} == {"ka5", "ka6", "kb5", "kb6"}
    styles = report._styles([tmp_path / "a.json", tmp_path / "b.json"])
    lines = plots.throughput_lines(plots.read_results(tmp_path / "b.json"), styles=styles)
    assert lines.tags == ("kb0", "kb1", "kb2", "kb3", "kb4", "(p)")


def test_sixty_kernels_look_different():
    styles = styles_of_tags([f"k{index}" for index in range(60)], [])
    looks = {(s["color"], s["marker"]) for s in (styles.point(tag, figure_frame.LIGHT) for tag in styles.kernels)}
    assert len(looks) == 60


def test_ratios_have_one_form():
    assert [times(x) for x in (None, 1.0, 0.117, 0.0385, 0.0049)] == ["–", "1.00", "0.12", "0.04", "<0.01"]


def test_figures_sort_as_figures():
    text = report.table(("a", "b"), [("x", report.Cell("1.2e-05", 1.2e-5)), ("y", "3.5"), ("z", "–")])
    assert 'data-v="1.2e-05"' in text and 'data-v="3.5"' in text and "<td>–</td>" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.json"], "absent.json cannot be read"),
        (["bad.json"], "bad.json is not valid JSON"),
        (["other.json"], "is not a results file"),
        (["run.json", "--notebook", "absent"], "--notebook is 'absent'"),
        (["run.json", "--out", "/dev/null/x.html"], "--out is '/dev/null'"),
        (["run.json", "--out", "."], "which is a folder"),
    ],
)
def test_bad_input(results, invoke, tmp_path, words, message):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text(json.dumps({"format": "x"}))
    done = invoke(*words)
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


# --- in a browser

NEEDS_BROWSER = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]


def browse(tmp_path, page, *words):
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *words, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False).stdout


@NEEDS_BROWSER
def test_tables_sort_and_filter_in_a_browser(results, invoke, tmp_path):
    assert invoke("run.json").exit_code == 0
    text = (tmp_path / "report.html").read_text()
    steps = """
    const box = [...document.querySelectorAll('.table')].find(b => b.querySelector('input'));
    const heads = [...box.querySelectorAll('th')].map(h => h.textContent);
    const click = name => box.querySelectorAll('th button')[heads.indexOf(name)].click();
    const shown = name => [...box.querySelectorAll('tbody tr')].filter(r => !r.hidden)
      .map(r => r.cells[heads.indexOf(name)].textContent);
    const found = {};
    click('ms'); found.up = shown('tag');
    click('ms'); found.down = shown('tag');
    click('tag'); found.tags = shown('tag');
    const field = box.querySelector('input');
    field.value = 'n2048 mma'; field.dispatchEvent(new Event('input')); found.filtered = shown('problem');
    const image = document.querySelector('img.light');
    found.image = [image.complete, image.naturalWidth > 300];
    document.documentElement.classList.remove('dark'); document.getElementById('theme').click();
    found.dark = [getComputedStyle(image).display, getComputedStyle(document.querySelector('img.dark')).display];
    document.title = JSON.stringify(found);
    """
    tested = tmp_path / "tested.html"
    tested.write_text(text.replace("</body>", f"<script>addEventListener('load', () => {{{steps}}})</script></body>"))
    dom = browse(tmp_path, tested, "--virtual-time-budget=5000", "--dump-dom")
    page = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1]))
    order = sorted(((ms * scale, tag) for scale in (1, 2) for tag, ms in TIMES.items()))
    assert page["up"] == [tag for _, tag in order] + ["mma(naive)"], "rows without a time come last"
    assert page["down"] == ["mma(naive)"] + [tag for _, tag in reversed(order)]
    assert page["tags"] == sorted(page["tags"], key=str.lower) or set(page["tags"]) == {*TIMES, "mma(naive)"}
    assert page["filtered"] == ["B1 H8 N2048 D64 f16"]
    assert page["dark"] == ["none", "inline"]
    if "<img" in text:
        assert page["image"] == [True, True], "the picture is drawn from the page itself"


@NEEDS_BROWSER
def test_rows_are_one_line_high_and_a_phone_is_wide_enough(results, invoke, tmp_path):
    body = json.loads(results.read_text())
    body["rows"][-1]["message"] = "far from the formula: " + "one more word " * 60
    results.write_text(json.dumps(body))
    assert invoke("run.json").exit_code == 0
    steps = """
    const rows = [...document.querySelectorAll('.table tbody tr')].filter(r => r.offsetHeight);
    const high = rows.map(r => r.offsetHeight);
    const letters = [...document.querySelectorAll('.panels img.light, .panels img.dark')].filter(i => i.offsetWidth)
      .map(i => i.offsetWidth / i.naturalWidth);
    const more = [...document.querySelectorAll('.scroll')].filter(e => e.offsetWidth).map(e =>
      [e.scrollWidth > e.clientWidth + 1, e.parentElement.querySelector('.more').offsetHeight > 0]);
    document.title = JSON.stringify({high: Math.max(...high), low: Math.min(...high), letters: Math.min(...letters),
      more, wide: document.documentElement.scrollWidth - innerWidth});
    """
    page = tmp_path / "tested.html"
    text = (tmp_path / "report.html").read_text()
    page.write_text(text.replace("</body>", f"<script>addEventListener('load', () => {{{steps}}})</script></body>"))
    for width in (500, 1280):  # headless Chromium has no window below 500
        dom = browse(tmp_path, page, f"--window-size={width},900", "--virtual-time-budget=5000", "--dump-dom")
        sizes = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1]))
        assert sizes["high"] < 1.5 * sizes["low"] < 60, "a row of the tables is one line"
        assert sizes["wide"] <= 0, "the page itself does not scroll sideways"
        assert all(wider == told for wider, told in sizes["more"]), "what scrolls says so, and nothing else"
        if width == 500:
            assert any(wider for wider, _ in sizes["more"])
        assert sizes["letters"] > 0.6, "letters of 9 points stay above 7 pixels"


@NEEDS_BROWSER
def test_the_page_is_drawn(results, invoke, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    assert invoke("run.json").exit_code == 0
    shot = tmp_path / "shot.png"
    browse(tmp_path, tmp_path / "report.html", "--window-size=1200,1600", f"--screenshot={shot}")
    pixels = image.imread(shot)
    assert pixels.shape[:2] == (1600, 1200)
    assert (pixels[..., :3].min(axis=-1) < 0.5).mean() > 0.005, "there is text"
    blue = (abs(pixels[..., :3] - (0.0, 0.447, 0.698)).max(axis=-1) < 0.02).sum()
    assert blue > 50, "and a line of a picture in the palette's blue"
