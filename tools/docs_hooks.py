"""What mkdocs runs next to the pages: navigation, links that leave docs/, tables of a command's options.

A page of the navigation that is not written yet is left out; a page that is not in it comes last, under More. A link
to a file of the repository outside docs/ becomes its path. ``<!-- options: NAME -->`` becomes the table of the options
of ``flashlane NAME``, read from the command itself. The link to the repository, and ``REPOSITORY`` in the commands of
the pages, are the address that :func:`repository` finds.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.flashlane")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
OPTIONS = re.compile(r"<!-- options: ([\w -]+) -->")
ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):<code>~?([^<]*)</code>")


VARIABLE, PLACE = "FLASHLANE_REPOSITORY", "REPOSITORY"
PROJECT_URL = re.compile(r"^\[project\.urls\]\n(?:.*\n)*?Repository *= *\"([^\"]+)\"", re.MULTILINE)


def repository(root: Path) -> str | None:
    """Where the repository can be read, as a web address: of the environment, pyproject.toml, or the remote of git.

    A remote that is a folder, or that holds a name or a password, is not published.
    """
    if found := os.environ.get(VARIABLE):
        return found
    if found := PROJECT_URL.search((root / "pyproject.toml").read_text(encoding="utf-8")):
        return found[1]
    try:
        words = ["git", "-C", str(root), "remote", "get-url", "origin"]
        remote = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    remote = re.sub(r"^(?:ssh://)?git@([\w.-]+\.\w+)[:/]", r"https://\1/", remote)
    return remote.removesuffix(".git") if re.fullmatch(r"https://[\w.-]+\.\w+/[^@\s]+", remote) else None


def on_config(config: Any) -> Any:
    """Complete the navigation, and say where the repository is."""
    docs = Path(config["docs_dir"])
    address = repository(docs.parent) if (docs.parent / "pyproject.toml").is_file() else None
    if address is not None:
        config["repo_url"], config["repo_name"] = address, "/".join(address.rstrip("/").split("/")[-2:])
    nav = list(_present(config["nav"], docs))
    shown = set(_targets(nav))
    rest = [page for page in sorted(docs.rglob("*.md")) if page.relative_to(docs).as_posix() not in shown]
    config["nav"] = nav + ([{"More": [{_heading(p): p.relative_to(docs).as_posix()} for p in rest]}] if rest else [])
    return config


def _targets(items: list[Any]) -> Any:
    for item in items:
        ((_, target),) = item.items()
        yield from _targets(target) if isinstance(target, list) else (target,)


def _present(items: list[Any], docs: Path) -> Any:
    for item in items:
        ((title, target),) = item.items()
        if isinstance(target, list):
            inside = list(_present(target, docs))
            if inside:
                yield {title: inside}
        elif target.endswith("/"):
            pages = sorted((docs / target).glob("*.md"), key=lambda page: (page.name != "index.md", page.name))
            yield {title: [{_heading(page): f"{target}{page.name}"} for page in pages]}
        elif (docs / target).is_file():
            yield item
        else:
            LOG.info("%s is in the navigation and not written yet", target)


def _heading(page: Path) -> str:
    lines = page.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), page.stem)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in options, and take out links that lead outside."""
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        image, text, target, _ = match.groups()
        if "://" in target or target.startswith(("mailto:", "/")):
            return match[0]
        path = (folder / target).resolve()
        if path.is_relative_to(docs) and path.suffix != ".ipynb":
            return match[0]
        if not path.exists():
            LOG.warning("%s links to %s, which does not exist", page.file.src_uri, target)
        shown = path.relative_to(docs.parent).as_posix() if path.is_relative_to(docs.parent) else target
        return match[0] if image else (f"`{shown}`" if text.strip("`") in shown else f"{text} (`{shown}`)")

    if address := config.get("repo_url"):
        markdown = markdown.replace(f"git clone {PLACE} ", f"git clone {address} ")
    return OPTIONS.sub(lambda match: options_table(match[1]), _outside_code(markdown, link))


def _outside_code(markdown: str, link: Any) -> str:
    """Replace links, but not in fenced code."""
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Sphinx's roles in docstrings become plain names."""
    return ROLE.sub(lambda match: f"<code>{match[1].rpartition('.')[2] or match[1]}</code>", html)


def options_table(name: str) -> str:
    """The options of a command as a Markdown table, in its groups."""
    from typer.main import get_command

    from flashlane.cli.main import app

    groups: dict[str, list[str]] = {}
    for parameter in get_command(app).commands[name].params:
        words = (*parameter.opts, *parameter.secondary_opts)
        option = parameter.param_type_name == "option"
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        shown = ", ".join(f"`{word}`" for word in words) if option else f"`{parameter.metavar or parameter.name}`"
        default = parameter.opts[0] if parameter.default is True else parameter.default
        said = "" if default in (None, "", False, ()) or not option else f" Default: `{default}`."
        text = (getattr(parameter, "help", None) or "").replace("\\[", "[").replace("|", "\\|")
        group = getattr(parameter, "rich_help_panel", None) or ("Options" if option else "Arguments")
        groups.setdefault(group, []).append(f"| {shown} | {text}{'' if 'Default' in text else said} |")
    head = "| option | meaning |\n| --- | --- |\n"
    return "\n\n".join(f"**{group}**\n\n{head}" + "\n".join(lines) for group, lines in groups.items())
