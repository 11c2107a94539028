"""Print the size of `study/` and the imports between its rooms, as one row of the table in docs/maintain.md.

    python tools/house.py            for the checkout in the current folder
    python tools/house.py --arrows   also every arrow, one per line
    python tools/house.py --check    only problems: a class name that is in several files, more exceptions from the
                                     formatter or from ruff's limits than there are today; exit status 1 if any

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
    return several + too_many_exceptions(root)


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
