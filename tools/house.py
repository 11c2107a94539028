"""How large `study/` is and how its rooms hang together, as one row of the table in CONTRIBUTING.md.

    python tools/house.py            of the checkout in the current folder
    python tools/house.py --arrows   and every arrow, one per line

A room is what stands directly in `study/`: a folder or a module. An arrow is a room that imports another one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import grimp

PACKAGE = "study"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arrows", action="store_true", help="list every arrow below the row")
    options = parser.parse_args()
    root = Path.cwd()
    if not (root / PACKAGE).is_dir():
        parser.error(f"no {PACKAGE}/ in {root}: start it at the root of a checkout")
    # The checkout in the current folder, also where another one is installed.
    sys.path.insert(0, str(root))

    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    rooms = sorted(graph.find_children(PACKAGE))
    arrows = [pair for pair in permutations(rooms, 2) if graph.direct_import_exists(
        importer=pair[0], imported=pair[1], as_packages=True)]  # fmt: skip
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


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
