"""The code and the pages use the field's words: what was renamed does not come back (docs/glossary.md maps it)."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "tools", "benchmarks/scripts", "docs", "README.md", "Makefile", "mkdocs.yml")
OWN_WORDS = ("docs/notebook/", "docs/glossary.md", "tests/docs/test_vocabulary.py")
"""Notebooks keep the words of their time, and the glossary maps them."""

FORBIDDEN = {
    r"blk/SM|blocks? (?:an|per|each) SM|blocks? of threads|thread blocks?": "CTA; block is a block of rows or keys",
    r"chores?": "in-kernel zeroing of dq_accum, in-kernel postprocess",
    r"tellers?|takers?": "scheduler warp",
    r"finishers?|finish_inside": "postprocess warp, in-kernel postprocess",
    r"adders?": "dQ-store warp",
    r"feeders?|fillers?": "producer warp",
    r"crews?": "warps",
    r"slabs?": "dq_accum, or a tile's rows of it",
    r"patience": "spin limit",
    r"(?<!tflops_)(?<!--)(?<!bench )foundings?": "baseline grid",
    r"rungs?": "design, step",
    r"heads_together": "heads_per_section",
    r"multiply_(?:keys|values|queries)": "gemm_qk, gemm_pv, gemm_dq",
    r"(?:give|take)_registers": "setmaxnreg",
    r"(?:wait|pass)_turn|pass_on": "semaphore_acquire, semaphore_release; named barriers",
    r"TALL|MIDDLE|CRAMPED": "tile names by size, such as M128N64S3",
    r"backward_(?:pair|cut|chores|sums)": "two_cta, split_q, in_kernel_dq, dq_accumulate",
    r"dq_direct|direct_dq": "register atomics",
    r"copy engine": "TMA",
    r"house|public face": "project, public API",
    r"BR|BC": "BLOCK_M, BLOCK_N; block_m, block_n",
    r"(?<![\"-])roofs?": "ceiling, ceilings; roofline",
    r"goals?|ladders?": "target; designs",
}
"""A pattern of whole words (``_`` joins words and separates them), and what to write."""


def tracked() -> list[Path]:
    """Text files that the rule is for."""
    done = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False)
    paths = done.stdout.split() if done.returncode == 0 else []
    if not paths:  # a tree without git
        found = [ROOT / folder for folder in FOLDERS]
        paths = [
            path.relative_to(ROOT).as_posix()
            for top in found
            for path in ([top] if top.is_file() else sorted(top.rglob("*")))
            if path.is_file()
        ]
    suffixes = (".py", ".cu", ".cuh", ".md", ".yml", ".toml", ".ipynb", "Makefile")
    return [ROOT / path for path in paths if path.endswith(suffixes) and not path.startswith(OWN_WORDS)]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in tracked() if path.exists()}


def lines_with(pattern: re.Pattern[str], texts: dict[str, str]) -> list[str]:
    """Place and beginning of each line that the pattern is found in."""
    return [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("words", FORBIDDEN)
def test_a_word_that_was_renamed_does_not_occur(words, texts):
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])")
    found = lines_with(pattern, texts)
    found += [path for path in texts if pattern.search(path)]
    assert not found, f"write {FORBIDDEN[words]}:\n" + "\n".join(found[:40])


def test_the_rule_sees_files(texts):
    assert len(texts) > 300 and any(path.endswith(".cuh") for path in texts)


TERMS = (
    *("CTA", "thread block", "warpgroup", "warp", "lane", "2-CTA cluster", "peer CTA", "distributed shared memory"),
    *("persistent kernel", "work tile", "tile scheduler", "scheduler warp", "producer warp", "consumer warpgroup"),
    *("dQ-store warp", "postprocess warp", "pipeline", "stage", "producer state", "consumer state", "index, phase"),
    *("acquire", "commit", "wait", "release", "mbarrier", "named barrier", "semaphore", "ping-pong", "preprocess"),
    *("delta", "dq_accum", "postprocess", "in-kernel zeroing", "in-kernel postprocess", "split-Q", "split-KV"),
    *("stream-K", "combine", "L2 head swizzle", "heads per section", "register atomics", "red.global", "reduce-add"),
    *("software pipelining across tiles", "setmaxnreg", "TMA load, store", "cp.async", "gemm_qk", "gemm_pv", "gemm_dp"),
    *("gemm_dv", "gemm_dk", "gemm_dq", "rescale threshold", "M128N64S3", "vector (16 bytes)", "out-of-bounds rows"),
    *("baseline grid", "course tables", "target", "roofline"),
)
"""What the pages and the code call things, each of which the glossary explains."""
FORMER = (
    *("block of threads", "team", "crew", "pair of blocks", "stay", "feeder", "filler", "adder", "finisher", "teller"),
    *("taker", "ring", "place", "slot", "handed", "used", "made", "turn", "tell", "announce", "prepare", "sums"),
    *("slab", "finish", "chores", "shares", "cut", "piece", "part", "join", "heads together", "direct", "carried"),
    *("give, take", "copy engine", "bring", "multiply", "lazy", "TALL", "MIDDLE", "CRAMPED", "KEPT", "stale"),
    *("founding", "goals", "bars", "faces", "rooms", "house", "roofs"),
)
"""What notebooks may call them, each of which the glossary's last table maps."""


def test_the_glossary_explains_every_term_and_maps_every_former_word():
    terms, former = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").split("## Words of the notebooks")
    first = [row.split("|")[1] for row in terms.splitlines() if row.startswith("| ")]
    old = [row.split("|")[1] for row in former.splitlines() if row.startswith("| ")]
    assert [term for term in TERMS if not any(term in cell for cell in first)] == []
    assert [word for word in FORMER if not any(word in cell for cell in old)] == []


# --- wordings of every line, comments and docstrings too

SPOKEN = {
    r"[Bb]eside": "next to, with, against; besides",
    r"[Aa]new": "again",
    r"[Ll]ikewise": "the same, in the same way",
    r"leanest": "lowest memory",
    r"sign of life": "is unresponsive",
    r"preferred less": "ranked lower",
}


@pytest.mark.parametrize("words", SPOKEN)
def test_a_wording_that_sounds_foreign_is_in_no_line(words, texts):
    pattern = re.compile(rf"(?<![\w./-])(?:{words})(?![\w-])")
    found = lines_with(pattern, texts)
    assert not found, f"write {SPOKEN[words]}:\n" + "\n".join(found[:40])


def test_titles_of_the_notebooks_have_none_of_these_words():
    """Their pages keep the words of their time; their titles are in the navigation of the site."""
    pages = sorted((ROOT / "docs" / "notebook").glob("*.md"))
    titles = {page.name: page.read_text(encoding="utf-8").splitlines()[0] for page in pages}
    titles |= {line: line for line in (ROOT / "docs" / "notebook" / "index.md").read_text("utf-8").splitlines()}
    pattern = re.compile(rf"(?<![\w./-])(?:{'|'.join((*SPOKEN, 'bars?'))})(?![\w.-])")
    assert {name: title for name, title in titles.items() if pattern.search(re.sub(r"\(.*?\)", "", title))} == {}


# --- wordings of what a reader sees: the pages, and the strings of the code that are not docstrings

READ = ("docs/", "README.md", "Makefile", "mkdocs.yml")
FOREIGN = {
    r"is no (?:valid )?(?:JSON|TOML|results file|journal|file of|number|rate|speed|kernel|option|tensor)": "is not …",
    r"each missing thing costs": "what you lose without each",
    r"[Bb]egin no row": "stop starting rows",
    r"how it comes": "distribution",
    r"half the distance": "half the interquartile range",
    r"visible pairs, gemm|gemm count of visible pairs": "4·B·H·N·M·D over unmasked pairs",
    r"plain MiB": "× less MiB",
    r"kernel of ours": "our best kernel",
    r"ladder|goals": "the designs of a family; targets",
    r"in a wider terminal": "hidden: … (widen the terminal, or see the JSON file)",
    r"TFLOPS": "TFLOP/s",
    r"baselines": "peers",
    r"the baselines? (?:row|timing|is behind)|which no baseline": "peer",
}
NAMES = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->")
"""Names in code marks, targets of links and marks of generated parts are no wordings."""


def strings_of(source: str) -> list[tuple[int, str]]:
    """String constants that are not docstrings, with their lines."""
    tree = ast.parse(source)
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    alone = {id(item.value) for body in bodies for item in body if isinstance(item, ast.Expr)}
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [(n.lineno, n.value) for n in found if id(n) not in alone]


@pytest.fixture(scope="module")
def shown(texts) -> list[tuple[str, int, str]]:
    """(file, line, text) of what a reader sees."""
    passages = []
    for path, text in texts.items():
        if path.startswith(READ):
            passages += [(path, number, NAMES.sub("", line)) for number, line in enumerate(text.splitlines(), 1)]
        elif path.startswith("src/") and path.endswith(".py"):
            passages += [(path, line, string) for line, string in strings_of(text) if " " in string]
    return passages


@pytest.mark.parametrize("words", FOREIGN)
def test_a_foreign_wording_does_not_occur(words, shown):
    pattern = re.compile(rf"(?<![\w.-])(?:{words})(?![\w(-])")
    found = [f"{path}:{line}: {text.strip()[:100]}" for path, line, text in shown if pattern.search(text)]
    assert not found, f"write {FOREIGN[words]}:\n" + "\n".join(found)


def test_the_rule_sees_messages(shown):
    assert sum(path.startswith("src/") for path, _, _ in shown) > 1000
    assert any("is not valid JSON" in text for _, _, text in shown)


# --- characters that a Windows console's font has

CODEPAGES = ("cp437", "cp850", "cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1257")
MORE = "−≤≥≈√∞∂∑∏∫◊ΩΔ←↑→↓↔↕▲►▼◄○●■□ⁿ℃Å"
"""Of Windows Glyph List 4, what the code pages do not have."""
PRINTED = (
    "src/flashlane/cli/",
    "src/flashlane/bench/present/",
    "src/flashlane/bench/suites/",
    "src/flashlane/inspect/",
)


def test_terminals_get_characters_that_their_fonts_have(texts):
    characters = {bytes([b]).decode(page, "ignore") for page in CODEPAGES for b in range(256)} | set(MORE)
    outside = [
        f"{path}:{line}: {sorted(set(text) - characters)} in {text[:60]!r}"
        for path, source in texts.items()
        if path.startswith(PRINTED) and path.endswith(".py")
        for line, text in strings_of(source)
        if any(ord(c) > 127 for c in set(text) - characters)
    ]
    assert not outside, "\n".join(outside)
