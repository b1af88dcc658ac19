"""The documentation site: it builds without a warning, every page is in it, and what it says of options is true."""

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_BROWSER = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "tools" / "docs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as CI builds it."""
    pytest.importorskip("mkdocs", reason="mkdocs is in the extra docs")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if "INFO" not in line)
    return folder


def test_it_builds_without_a_warning_and_holds_every_page(site):
    pages = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")}
    built = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    assert pages - built == set()
    index = (site / "index.html").read_text(encoding="utf-8")
    shown = {link.split("#")[0] for link in re.findall(r'href="([\w./-]+\.html)[^"]*"', index)}
    assert pages - shown - {"index.html"} == set(), "a page that is not in the navigation"


def test_it_needs_no_network(site):
    for name in ("index", "cli/sweep", "install"):
        text = (site / f"{name}.html").read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img)[^>]+src="([^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="([^"]+)"', text)
        assert loaded and not [a or b for a, b in loaded if re.match(r"(https?:)?//", a or b)]
    assert "https://unpkg" not in text, "the search's worker is the site's own"


def test_pages_lead_to_the_next_and_to_the_repository(site, hooks):
    text = (site / "install.html").read_text(encoding="utf-8")
    assert 'rel="prev"' in text and 'rel="next"' in text
    address = hooks.repository(ROOT)
    assert (f'href="{address}"' in text) == (address is not None)
    assert ("git clone REPOSITORY" in re.sub("<[^>]*>", "", text)) == (address is None)


def test_the_address_of_the_repository_is_found_or_left_out(hooks, tmp_path, monkeypatch):
    monkeypatch.delenv("FLASHLANE_REPOSITORY", raising=False)
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "x"\n')
    assert hooks.repository(tmp_path) is None, "a folder without git"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert hooks.repository(tmp_path) is None, "git without a remote"
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", "x"], check=True)
    remotes = {
        "https://example.org/a/b.git": "https://example.org/a/b",
        "git@example.org:a/b.git": "https://example.org/a/b",
        "ssh://git@example.org/a/b": "https://example.org/a/b",
        "/srv/git/b": None,
        "file:///srv/b": None,
        "https://name:secret@example.org/a/b": None,
    }
    for remote, address in remotes.items():
        subprocess.run(["git", "-C", str(tmp_path), "remote", "set-url", "origin", remote], check=True)
        assert hooks.repository(tmp_path) == address, remote
    project.write_text('[project]\nname = "x"\n\n[project.urls]\nHome = "h"\nRepository = "https://example.org/c"\n')
    assert hooks.repository(tmp_path) == "https://example.org/c"
    monkeypatch.setenv("FLASHLANE_REPOSITORY", "https://example.org/d/e")
    assert hooks.repository(tmp_path) == "https://example.org/d/e"
    (tmp_path / "docs").mkdir()
    config = hooks.on_config({"docs_dir": str(tmp_path / "docs"), "nav": []})
    assert (config["repo_url"], config["repo_name"]) == ("https://example.org/d/e", "d/e")

    class Page:
        class file:
            src_uri = "install.md"

    shown = hooks.on_page_markdown("```\ngit clone REPOSITORY x\n```", Page(), config, None)
    assert "git clone https://example.org/d/e x" in shown


WIDEST = 120
"""Columns of a code line; the style sheet makes them fit at 1280 pixels."""


def test_no_code_line_is_wider_than_its_page():
    wide = {}
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"^```.*?\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M):
            longest = max(map(len, block.splitlines()), default=0)
            if longest > WIDEST:
                wide[page.name] = longest
    assert not wide


def measured_in_browser(page: Path, script: str, width: int, scratch: Path) -> str:
    """The title that a script gives the page, in a window of so many pixels (headless Chromium has none below 500)."""
    tested = page.with_name(f"tested-{page.name}")
    tested.write_text(page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={scratch}", "--no-first-run"]
    command += [f"--window-size={width},900", "--virtual-time-budget=4000", "--dump-dom", tested.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False).stdout
    tested.unlink()
    return html.unescape(re.search(r"<title>(.*?)</title>", dom, re.S)[1])


@NEEDS_BROWSER
@pytest.mark.parametrize("name", ["index", "cli/bench", "suites", "hopper-backward", "tutorial"])
def test_code_and_tables_fit_at_1280_pixels(site, tmp_path, name):
    measure = """addEventListener('load', () => { const over = q => [...document.querySelectorAll(q)].filter(
      e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 60));
      document.title = JSON.stringify([over('pre > code'), over('.md-content .md-typeset__scrollwrap'),
      document.documentElement.scrollWidth - innerWidth]); })"""
    code, tables, page_over = json.loads(measured_in_browser(site / f"{name}.html", measure, 1280, tmp_path))
    assert not code and not tables and page_over <= 0


@NEEDS_BROWSER
@pytest.mark.parametrize("name", ["index", "performance", "e2e", "features"])
def test_pictures_of_a_page_can_be_read_on_a_telephone(site, tmp_path, name):
    measure = """addEventListener('load', () => { const of = e => e.offsetWidth / e.naturalWidth;
      document.title = JSON.stringify([[...document.querySelectorAll('.md-content img')].map(of),
      document.documentElement.scrollWidth - innerWidth]); })"""
    shrunk, page_over = json.loads(measured_in_browser(site / f"{name}.html", measure, 500, tmp_path))
    assert min(shrunk, default=1.0) > 0.9, "a picture keeps its size"
    assert page_over <= 0, "and scrolls, not the page"


CONTRAST = """document.head.append(Object.assign(document.createElement('style'),
  {textContent: '* { transition: none !important }'}));
addEventListener('load', () => {
  document.body.setAttribute('data-md-color-scheme', SCHEME);
  const pixel = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const read = colour => { pixel.clearRect(0, 0, 1, 1); pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1);
    const d = pixel.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255]; };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const behind = e => { const found = []; for (; e; e = e.parentElement) {
    const c = read(getComputedStyle(e).backgroundColor); if (c[3]) found.push(c); if (c[3] == 1) break; }
    return found.reverse().reduce((below, above) => over(above, below), [255, 255, 255, 1]); };
  const light = c => { const l = c.slice(0, 3).map(v => v / 255).map(
    v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * l[0] + .7152 * l[1] + .0722 * l[2]; };
  const seen = [], low = [];
  for (const e of document.querySelectorAll('.md-content *, .md-sidebar--primary *, .md-header *')) {
    if (!e.offsetWidth || ![...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())) continue;
    if (getComputedStyle(e).opacity == 0) continue;  // shown when the mouse is over it
    const back = behind(e), front = over(read(getComputedStyle(e).color), back);
    const [high, dark] = [light(front), light(back)].sort((a, b) => b - a), ratio = (high + .05) / (dark + .05);
    seen.push(light(back)); if (ratio < 4) low.push([e.innerText.slice(0, 30), ratio]); }
  document.title = JSON.stringify([seen.length, Math.min(...seen), low]); })"""
"""Of each element with text: its contrast to what is behind it, as WCAG 2 defines it."""


@NEEDS_BROWSER
@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize("name", ["index", "cli/bench", "api/functions", "troubleshooting"])
def test_text_is_readable_in_light_and_in_dark_mode(site, tmp_path, name, scheme):
    script = CONTRAST.replace("SCHEME", json.dumps(scheme))
    seen, darkest, low = json.loads(measured_in_browser(site / f"{name}.html", script, 1280, tmp_path))
    assert seen > 100 and not low, low
    assert (darkest < 0.05) == (scheme == "slate"), "the page is in the mode that was asked for"


def test_notebook_titles_have_one_form():
    """``# 0001: Title``, with a capital; the index names each page by its number and title."""
    index = (DOCS / "notebook" / "index.md").read_text(encoding="utf-8")
    for page in sorted((DOCS / "notebook").glob("0*.md")):
        first = page.read_text(encoding="utf-8").splitlines()[0]
        title = re.fullmatch(rf"# {page.name[:4]}: ([A-Z].*)", first)
        assert title, f"{page.name}: {first}"
        assert f"- [{page.name[:4]}]({page.name}): " in index


def test_the_site_has_what_a_newcomer_looks_for(site):
    navigation = (site / "index.html").read_text(encoding="utf-8")
    for name in ("install", "troubleshooting", "changelog", "contributing", "performance", "features", "limits"):
        assert f'href="{name}.html"' in navigation, name
    performance = (site / "performance.html").read_text(encoding="utf-8")
    for peer in ("cuDNN (SDPA)", "FlashAttention-4", "FlexAttention"):
        assert f"<td>{peer}</td>" in performance
    assert "paged key/value cache" in (site / "features.html").read_text(encoding="utf-8")


def test_a_default_is_given_as_it_is_typed(hooks):
    table = hooks.options_table("bench")
    assert "`True`" not in table and "Default: `--check`" in table


def test_options_and_docstrings_are_in_it(site):
    sweep = (site / "cli" / "sweep.html").read_text(encoding="utf-8")
    for words in ("--masks", "--retry", "--timeout", "Checking and timing", "[sweep]"):
        assert words in sweep, words
    bench = (site / "cli" / "bench.html").read_text(encoding="utf-8")
    for name in ("--B", "--batch", "--N", "--D", "--kv-heads", "--causal", "--no-causal", "--iters", "--qkv"):
        assert f"<code>{name}</code>" in bench, f"{name}: the names as they are typed, not those of Python"
    assert "<code>kv_heads</code>" not in bench
    functions = (site / "api" / "functions.html").read_text(encoding="utf-8")
    assert "flash_attn_varlen_func" in functions and "bottom-right" in functions
    returned = re.findall(r">Returns:<.*?<tbody>(.*?)</tbody>", functions, re.S)
    assert len(returned) >= 7 and all(rows.count("<tr") == 1 for rows in returned), "what is returned is one row"
    bench = (site / "api" / "bench.html").read_text(encoding="utf-8")
    assert ":class:" not in bench and ":func:" not in bench, "Sphinx's roles are names here"


def test_every_command_has_a_page():
    from flashlane.cli.main import app

    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    for command in app.registered_commands:
        assert f"flashlane {command.name}" in text, command.name
    documented = set(re.findall(r"<!-- options: ([\w -]+) -->", text))
    assert documented == {command.name for command in app.registered_commands}, "each has its table of options, once"


def test_the_changelog_names_every_command():
    from flashlane.cli.main import app_commands

    text = (DOCS / "changelog.md").read_text(encoding="utf-8")
    assert [name for name in app_commands() if f"`{name}`" not in text] == []


def test_links_that_lead_outside_become_paths(hooks, tmp_path):
    (tmp_path / "docs" / "cli").mkdir(parents=True)
    (tmp_path / "docs" / "a.md").touch()
    (tmp_path / "x.json").touch()

    class File:
        src_uri = "cli/page.md"

    class Page:
        file = File()

    def shown(text):
        return hooks.on_page_markdown(text, Page(), {"docs_dir": str(tmp_path / "docs")}, None)

    assert shown("[a](../a.md#b) [w](https://x.y/z)") == "[a](../a.md#b) [w](https://x.y/z)"
    assert shown("see [the file](../../x.json)") == "see the file (`x.json`)"
    assert shown("see [`x.json`](../../x.json)") == "see `x.json`"
    fenced = "```\n[the file](../../x.json)\n```"
    assert shown(fenced) == fenced


def test_the_navigation_has_what_is_there(hooks, tmp_path):
    (tmp_path / "a.md").touch()
    (tmp_path / "new.md").write_text("# Brand new\n")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "1.md").write_text("intro\n# The first\n")
    config = {"docs_dir": str(tmp_path), "nav": [{"A": "a.md"}, {"K": [{"B": "b.md"}]}, {"N": "notes/"}]}
    assert hooks.on_config(config)["nav"] == [
        {"A": "a.md"},
        {"N": [{"The first": "notes/1.md"}]},
        {"More": [{"Brand new": "new.md"}]},
    ]


# --- the generated parts of README that others' results fill


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
        yield importlib.import_module("readme_tables")


def row(problem, tag, ms):
    kind = "peer" if tag.startswith("(") else "kernel"
    return {"problem": problem, "tag": tag, "kind": kind, "status": "ok", "timing": {"median": ms}}


def test_where_it_is_behind_is_said(tables, tmp_path):
    rows = [row("P", "k", 2.0), row("P", "(a)", 1.0), row("P", "(b)", 4.0), row("Q", "k", 1.0), row("Q", "(a)", 1.5)]
    rows += [row("Q", "(b)", 3.0)]
    where = {"environment": {"device": "D", "date": "2026-01-02T03"}}
    files = {"baseline": {"format": "flashlane-bench/1", "rows": rows}}
    targets = [{"peer": "(flash)", "ratio": 1.2}, {"peer": "(flash)", "ratio": 0.8}, {"peer": "(flash)", "ratio": None}]
    files["mma_targets"] = {"format": "flashlane-mma-targets/3", "targets": targets}
    files["hopper_forward"] = {
        "format": "flashlane-hopper-forward/1",
        "rows": [{"tflops": {"flashlane": 600.0, "cudnn": 500.0, "fa4": 750.0}}, {"tflops": {"cudnn": 500.0}}],
    }
    cells = [("c", "decode(x)", 10.0, "ok"), ("c", "(cudnn)", 20.0, "ok"), ("c", "(flash)", 1.0, "wrong")]
    files["decode"] = {
        "format": "flashlane-decode/2",
        "rows": [{"cell": c, "tag": t, "microseconds": us, "check": check} for c, t, us, check in cells],
    }
    for name, body in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(body | where))
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables.standing(tmp_path).splitlines()[2:7]]
    assert shown == [
        ["`mma`, baseline grid", "a", "2", "1", "**0.87**", "**0.50**", "1.50"],
        ["`mma`, baseline grid", "b", "2", "2", "2.45", "2.00", "3.00"],
        ["`mma`, targets", "FlashAttention-2 (SDPA)", "2", "1", "**0.98**", "**0.80**", "1.20"],
        ["`hopper`, forward", "cuDNN (SDPA)", "1", "1", "1.20", "1.20", "1.20"],
        ["`hopper`, forward", "FlashAttention-4", "1", "0", "**0.80**", "**0.80**", "**0.80**"],
    ]
    assert "| `decode` | cuDNN (SDPA) | 1 | 1 | 2.00 |" in tables.standing(tmp_path)
    assert "Not in any of these files: plain PyTorch, SDPA efficient, FlexAttention, ffpa-attn." in tables.standing(
        tmp_path
    )
    assert tables.standing(tmp_path / "empty") == sys.modules["result_tables"].NOT_MEASURED


def test_our_features_are_asked_of_the_kernels(tables):
    assert "mma" in tables.ours({}).split(", ") and tables.ours({"head_dim": 1024}).startswith("mma")
    assert tables.ours(None) is None and "mma" not in tables.ours({"dtype": "f32"})
    features = json.loads((ROOT / "benchmarks" / "scripts" / "features.json").read_text(encoding="utf-8"))
    assert {"FlashAttention-2", "FlashAttention-3", "FlashAttention-4", "FlexAttention", "ffpa-attn"} < set(
        features["libraries"]
    )
    for line in features["features"]:
        assert ("ask" in line) != ("ours" in line), line["feature"]
        assert set(features["libraries"]) <= set(line), line["feature"]


# --- what the pages say of the code


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    module, attributes = name, []
    while module:
        try:
            value = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
            continue
        for attribute in attributes:
            if not hasattr(value, attribute):
                return False
            value = getattr(value, attribute)
        return True
    return False


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_dotted_names_of_the_package_resolve(page):
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"\bflashlane(?:\.[A-Za-z_]\w*)+", text))
    for module, imported in re.findall(r"from (flashlane[\w.]*) import ([\w, ]+)", text):
        names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    assert [name for name in sorted(names) if not resolves(name)] == []
