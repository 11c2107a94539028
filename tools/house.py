"""Print the size of `study/` and the imports between its rooms, as one row of the table in docs/maintain.md.

    python tools/house.py            for the checkout in the current folder
    python tools/house.py --arrows   also every arrow, one per line
    python tools/house.py --check    only problems: a class name that is in several files, more exceptions from the
                                     formatter or from ruff's limits than there are today, a comparison with words of
                                     a text; exit status 1 if any

A room is a folder or module directly in `study/`. An arrow is a room that imports another one.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import grimp

PACKAGE = "study"
# By pattern: the number of exceptions that are allowed, their name, and the mend. The number never rises.
EXCEPTIONS = {
    r"# fmt: (?:skip|off)$": (16, "lines that ruff does not format", "only tables of constants gain by it"),
    r"# noqa: [^#]*(?:C901|PLR09)": (2, "functions above ruff's limits of size", "divide the function"),
}
# Files with comparisons that look for words in a text, their number, and the reason. The number never rises: a new
# reader of a message compares a field of the object that has the message.
WORDS_READ = {
    "study/advisor/trainer_files.py": (1, "a name of a set of engines"),
    "study/advisor/user_settings.py": (3, "messages of json and pydantic, which have no field for it"),
    "study/claims/verdicts.py": (3, "names of a list of statuses"),
    "study/config/flags.py": (2, "messages of argparse, which have no field for it"),
    "study/predictor/families.py": (1, "a formula that is part of another one"),
}
# Two words: a separator such as ", " is none.
_WORDS = re.compile(r"\w\W* \W*\w")
_TEXT_METHODS = {"startswith", "endswith", "partition", "rpartition", "split", "find", "index", "replace"}
_TEXT_METHODS |= {"removeprefix", "removesuffix"}


def main() -> None:
    """Print the row, the arrows, or the problems."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arrows", action="store_true", help="list every arrow below the row")
    parser.add_argument("--check", action="store_true", help="check class names and the number of exceptions")
    options = parser.parse_args()
    root = Path.cwd()
    if not (root / PACKAGE).is_dir():
        parser.error(f"no {PACKAGE}/ in {root}: start it at the root of a checkout")
    if options.check:
        sys.exit("\n".join(problems(root)) or 0)
    # Imports the checkout in the current folder, even if another one is installed.
    sys.path.insert(0, str(root))

    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    rooms = sorted(graph.find_children(PACKAGE))
    arrows = [
        pair
        for pair in permutations(rooms, 2)
        if graph.direct_import_exists(importer=pair[0], imported=pair[1], as_packages=True)
    ]
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in (root / PACKAGE).rglob("*.py")}
    longest = max(lines, key=lambda file: (lines[file], file))

    print("| commit | lines | modules | rooms | arrows | longest module |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(
        f"| {_commit()} | {sum(lines.values()):,} | {len(lines)} | {len(rooms)} | {len(arrows)} |"
        f" {longest.relative_to(root)}, {lines[longest]} |"
    )
    if options.arrows:
        for importer, imported in arrows:
            print(f"{importer.removeprefix(f'{PACKAGE}.')} -> {imported.removeprefix(f'{PACKAGE}.')}")


def problems(root: Path) -> list[str]:
    """Return a line for each class name in several files, and for each kind of exception of which there are more."""
    places: dict[str, list[str]] = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(file.relative_to(root).as_posix())
    several = [f"class {name} is in {' and '.join(files)}" for name, files in places.items() if len(files) > 1]
    return several + too_many_exceptions(root) + words_read(root)


def words_read(root: Path) -> list[str]:
    """Return a line for each file whose number of comparisons with words of a text is not that of WORDS_READ."""
    wrong = []
    for file in sorted((root / PACKAGE).rglob("*.py")):
        place = file.relative_to(root).as_posix()
        allowed, _ = WORDS_READ.get(place, (0, ""))
        nodes = ast.walk(ast.parse(file.read_bytes()))
        lines = sorted(node.lineno for node in nodes if isinstance(node, ast.expr) and _reads_words(node))
        if len(lines) > allowed:
            listed = ", ".join(map(str, lines))
            wrong.append(
                f"{place} looks for words in a text in line {listed}, {allowed} are allowed: give the object that has"
                " the text a field"
            )
        elif len(lines) < allowed:
            wrong.append(f"{place}: write {len(lines)} for {allowed} in WORDS_READ of tools/house.py")
    return wrong


def _reads_words(node: ast.expr) -> bool:
    """Whether an expression is `"two words" in text`, or `text.startswith("two words")` or another such method."""
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], (ast.In, ast.NotIn)) and _is_words(node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT_METHODS:
        return bool(node.args) and any(_is_words(part) for part in ast.walk(node.args[0]))
    return False


def _is_words(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and _WORDS.search(node.value) is not None


def too_many_exceptions(root: Path) -> list[str]:
    """Return a line for each kind of exception whose number differs from the one in EXCEPTIONS."""
    files = [file for folder in (PACKAGE, "tests", "tools") for file in (root / folder).rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    wrong = []
    for pattern, (allowed, what, instead) in EXCEPTIONS.items():
        count = len(re.findall(pattern, text, flags=re.MULTILINE))
        if count > allowed:
            wrong.append(f"{count} {what}, {allowed} are allowed: {instead}")
        elif count < allowed:
            wrong.append(
                f"{count} {what}: write {count} for {allowed} in EXCEPTIONS of tools/house.py, so that none return"
            )
    return wrong


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
