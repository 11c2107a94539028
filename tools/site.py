"""Hooks of mkdocs for `make site`: pages and reports at their places in the repository, and a reference of commands."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from study.cli import COMMANDS as SUBCOMMANDS
from study.cli import build_parser
from study.config.flags import Parser, add_flags
from study.report.site.publishing import PAGES_LIST

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = "docs/commands.md"
# Static files that run `study advise` in a browser; SITE_CALCULATOR=0 leaves them out. Pages of the site with this
# comment link them there.
CALCULATOR = "docs/calculator"
_WITH_CALCULATOR = os.environ.get("SITE_CALCULATOR", "1") != "0"
_CALCULATOR_LINK = "<!-- The site links the calculator here. -->"
_LIST = re.compile(r"\s*([-*]|\d+\.) ")
_LINK = re.compile(r"\]\(([^)\s:#]+)(?=[)#])")
_IMAGE = re.compile(r'<img src="([^":]+)"')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the addresses of the site and of its source, which the workflow sets, and GitHub's anchors."""
    from pymdownx.slugs import slugify

    config.site_url, config.repo_url = os.environ.get("SITE_URL"), os.environ.get("REPO_URL")
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the committed pages, the reports with their built pages, and the files that pages link to."""
    from mkdocs.structure.files import File, Files

    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # The summary of a report has its reading, with the numbers.
    committed = {name for name in listed.split("\0") if (ROOT / name).is_file() and Path(name).name != "reading.md"}
    pages = {
        name for name in committed if re.fullmatch(r"([A-Z]+|accelerate_configs/README|(docs|reports)/.*)\.md", name)
    }
    linked = linked_files(pages)
    names = {name for name in committed if name in pages | linked or name.startswith("reports/")}
    names |= built_pages() | {*config.extra_css}
    theme = [file for file in files if file.src_dir != config.docs_dir]
    places = [File.generated(config, name, abs_src_path=str(ROOT / name)) for name in sorted(names)]
    if _WITH_CALCULATOR:
        from tools.calculator.build import build

        built = ROOT / "runs" / "calculator"
        build(built)
        places += [
            File.generated(config, f"{CALCULATOR}/{file.relative_to(built).as_posix()}", abs_src_path=str(file))
            for file in sorted(built.rglob("*"))
            if file.is_file()
        ]
    return Files([*theme, *places, File.generated(config, COMMANDS, content=commands_markdown())])


def linked_files(pages: Iterable[str]) -> set[str]:
    """Return the files that pages link to or show."""
    linked = set()
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        linked |= {os.path.normpath(Path(page).parent / link) for link in _LINK.findall(text) + _IMAGE.findall(text)}
    return linked


def built_pages() -> set[str]:
    """Return the pages, notebooks and images of reports that git ignores."""
    names = set()
    for pages in ROOT.glob(f"reports/*/{PAGES_LIST}"):
        files = json.loads(pages.read_text(encoding="utf-8"))["files"]
        names |= {(pages.parent / file).relative_to(ROOT).as_posix() for file in files}
    return names


def on_page_markdown(markdown: str, page: Page, **_arguments: Any) -> str:
    """Link reports by their pages with figures, and indent lists as Python-Markdown wants them."""
    folder = (ROOT / page.file.src_uri).parent
    if Path(page.file.src_uri).name == "summary.md" and (folder / "index.html").exists():
        markdown = re.sub(r"\n", "\n\n[All figures and tables](index.html)\n", markdown, count=1)

    if _WITH_CALCULATOR and _CALCULATOR_LINK in markdown:
        place = os.path.relpath(ROOT / CALCULATOR / "index.html", folder)
        markdown = markdown.replace(_CALCULATOR_LINK, f"[Ask it here, in this browser]({place})")

    def with_figures(match: re.Match[str]) -> str:
        link = re.sub(r"summary\.md$", "index.html", match[1])
        return f"]({link if (folder / link).exists() else match[1]}"

    return "\n".join(_reindented(_LINK.sub(with_figures, markdown)))


def _reindented(markdown: str) -> Iterator[str]:
    """Yield the lines of GitHub's Markdown, with four spaces per level of a list and an empty line before it."""
    fence, in_list, above = "", False, ""
    for line in markdown.splitlines():
        is_fence = line.lstrip().startswith("```")
        indent = len(line) - len(line.lstrip())
        if not fence and line.strip():
            is_item = bool(_LIST.match(line))
            if is_item and not in_list and above.strip():
                yield ""
            in_list = is_item or (in_list and (indent > 0 or bool(above.strip())))
        yield " " * (indent // 2 * 2) * in_list + line if indent and not (fence and not in_list) else line
        fence, above = ("" if fence else "```") if is_fence else fence, line


def on_post_build(config: MkDocsConfig) -> None:
    """Lead links of the reports' pages to pages of the site; warn of every link of the site without a target."""
    site = Path(config.site_dir)
    for file in site.glob("reports/*/*.html"):
        text = file.read_text(encoding="utf-8")
        changed = re.sub(r'(href="[^":]+)\.md(?=[#"])', r"\1.html", text)
        if changed != text:
            file.write_text(changed, encoding="utf-8")
    for file in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"]+)"', file.read_text(encoding="utf-8")):
            parts = urlsplit(link)
            is_local = parts.path and not parts.scheme and not parts.netloc and file.name != "404.html"
            if is_local and not (file.parent / unquote(parts.path)).exists():
                logging.getLogger("mkdocs.hooks").warning("%s links %s", file.relative_to(site), link)


def commands_markdown() -> str:
    """Return the arguments of every subcommand and of the training script, from their parsers."""
    train = Parser(prog="study/train.py", description="train under the strategy of the Accelerate file")
    add_flags(train)
    _, subparsers = build_parser(SUBCOMMANDS)
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    sections = [part for name, parser in subparsers.choices.items() for part in _sections(parser, helps[name])]
    return "\n\n".join(["# Commands and flags", *sections, *_sections(train, train.description or "")]) + "\n"


def _sections(parser: argparse.ArgumentParser, words: str) -> Iterator[str]:
    formatter = parser._get_formatter()
    lines = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _sections(child, f"{words}: {name}")
        elif action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            meaning = f": {_literal(formatter._expand_help(action))}" if action.help else ""
            lines.append(f"- `{formatter._format_action_invocation(action)}`{meaning}")
    if lines:
        yield f"## {parser.prog}\n\n{_literal(words[:1].upper() + words[1:])}."
        yield "\n".join(lines)
        yield _literal(parser.epilog or "")


def _literal(text: str) -> str:
    return re.sub(r"([\\|<*_`\[$~])", r"\\\1", " ".join(text.split()))
