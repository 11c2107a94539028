"""Counts words that this project avoids, by room, against a budget that may only fall.

    python tools/words.py                 matches by room, and the budget of each
    python tools/words.py --list ROOM     each match: file, line, text, and what to write instead
    python tools/words.py --check         the rooms over their budget; the exit status is 1 if there are any

tools/words.tsv has a pattern a line with its scope: `prose` is comments, docstrings, strings of several words, and the
text of Markdown and YAML comments; `docstring` is the beginning of one; `name` is what the code defines.
A room is what stands directly in study/; then tests, tools, docs (with README.md and CONTRIBUTING.md).
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

PATTERNS = Path("tools/words.tsv")
BUDGETS = Path("tools/words_budget.yaml")


class Text(NamedTuple):
    scope: str
    line: int  # Where it begins.
    text: str  # In one line, however it is wrapped in the file.


class Match(NamedTuple):
    room: str
    file: Path
    line: int
    text: str
    instead: str


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", metavar="ROOM", help="print each match of a room, or of one file")
    parser.add_argument("--check", action="store_true", help="compare each room with its budget")
    options = parser.parse_args()
    matches = find_matches(Path())
    budgets: dict[str, int] = yaml.safe_load(BUDGETS.read_text(encoding="utf-8"))
    if options.list:
        for match in matches:
            if options.list in (match.room, str(match.file)):
                print(f"{match.file}:{match.line}: {match.text}   [{match.instead}]")
        return
    counts = dict.fromkeys(budgets, 0)
    for match in matches:
        counts[match.room] = counts.get(match.room, 0) + 1
    if options.check:
        sys.exit("\n".join(compare_with_budgets(counts, budgets)) or 0)
    for room, count in counts.items():
        print(f"{room:12} {count:6} of {budgets.get(room, 0):6}")
    print(f"{'together':12} {sum(counts.values()):6} of {sum(budgets.values()):6}")


def compare_with_budgets(counts: dict[str, int], budgets: dict[str, int]) -> list[str]:
    """Lines about the rooms over their budget."""
    return [
        f"{room}: {count} matches of tools/words.tsv, {budgets.get(room, 0)} allowed: tools/words.py --list {room}"
        for room, count in counts.items()
        if count > budgets.get(room, 0)
    ]


def find_matches(root: Path) -> list[Match]:
    with (root / PATTERNS).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    patterns = [(row["scope"], re.compile(row["pattern"]), row["instead"]) for row in rows]
    matches = []
    for room, file_path in _files(root):
        texts = list(_read(file_path))
        for scope, pattern, instead in patterns:
            for text in texts:
                if text.scope == scope:
                    for found in pattern.finditer(text.text):
                        excerpt = text.text[max(0, found.start() - 40) : found.end() + 40]
                        matches.append(Match(room, file_path.relative_to(root), text.line, excerpt, instead))
    return sorted(matches, key=lambda match: (match.room, str(match.file), match.line))


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted([*root.glob("study/**/*.py"), *root.glob("study/**/*.yaml")]):
        yield file.relative_to(root).parts[1].removesuffix(".py"), file
    for room in ("tests", "tools"):
        for file in sorted([*root.glob(f"{room}/*.py"), *root.glob(f"{room}/*/test_*.py")]):
            yield room, file
    pages = sorted([*root.glob("docs/*.md"), *root.glob("docs/decisions/*.md")])
    for file in [*pages, root / "README.md", root / "CONTRIBUTING.md"]:
        yield "docs", file


def _read(file: Path) -> Iterator[Text]:
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        yield from _read_python(source)
        return
    if file.suffix == ".yaml":
        source = "\n".join(line.partition("#")[2] for line in source.split("\n"))
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", source):
        if paragraph.strip():
            yield Text("prose", line, " ".join(paragraph.split()))
        line += paragraph.count("\n")


def _read_python(source: str) -> Iterator[Text]:
    yield from _read_comments(source)
    yield from _read_code(ast.parse(source))


def _read_comments(source: str) -> Iterator[Text]:
    """Yield the comments; those on consecutive lines are one text."""
    comments: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comments and token.start[0] != comments[-1].start[0] + 1:
                yield _join_comments(comments)
                comments = []
            comments.append(token)
    if comments:
        yield _join_comments(comments)


def _read_code(tree: ast.Module) -> Iterator[Text]:
    """Yield the strings, names and docstrings."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if " " in text.strip() and id(node) not in inside:
                yield Text("prose", node.lineno, " ".join(text.split()))
            case ast.JoinedStr(values=parts, lineno=line):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)
                if " " in text.strip():
                    yield Text("prose", line, " ".join(text.split()))
            case ast.Name(id=name, ctx=ast.Store(), lineno=line) | ast.arg(arg=name, lineno=line):
                yield Text("name", line, name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Text("name", node.lineno, node.name)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        if docstring := ast.get_docstring(node):
            yield Text("docstring", node.body[0].lineno, " ".join(docstring.split()))


def _join_comments(comments: list[tokenize.TokenInfo]) -> Text:
    return Text("prose", comments[0].start[0], " ".join(comment.string.lstrip("# ") for comment in comments))


if __name__ == "__main__":
    main()
