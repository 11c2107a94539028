"""Check what git keeps: nothing that a command makes of something else, and no large file. `make quality` runs it.

python tools/tree.py            one line for each file that does not belong there; exit status 1 if there is one
python tools/tree.py --sizes    also the size of the tree and its largest folders
"""

from __future__ import annotations

import argparse
import collections
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from study.report.site.publishing import FIGURES, is_page

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_BYTES = 400 * 1024
MAX_FIGURE_BYTES = 60_000
MAX_TREE_BYTES = 12_000_000
_LINKED = re.compile(rf"(?:\]\(|src=\")([^)\"]*{FIGURES}/[^)\"]+)")
_SHOWN_FOLDERS = 8


def tracked() -> dict[str, int]:
    """Return the size of each file in git's index that is in the work tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {name: ROOT / name for name in filter(None, listed.split("\0"))}
    return {name: file.stat().st_size for name, file in files.items() if file.is_file()}


def linked_figures(names: Iterable[str]) -> set[str]:
    """Return the figures of reports that a Markdown page shows."""
    figures = set()
    for name in names:
        if name.endswith(".md"):
            page = ROOT / name
            for link in _LINKED.findall(page.read_text(encoding="utf-8")):
                figures.add((page.parent / link).resolve().relative_to(ROOT).as_posix())
    return figures


def problems(sizes: Mapping[str, int], figures: set[str]) -> list[str]:
    """Return a line for each file that git should not keep, with the reason and the remedy."""
    lines = []
    for name, size in sizes.items():
        folder, _, rest = name.removeprefix("reports/").partition("/")
        in_report = name.startswith("reports/") and bool(rest)
        if in_report and (is_page(rest) or rest == "pages.json"):
            lines.append(f"{name}: `make reports` makes it of the records. To fix it: git rm --cached {name}")
        elif in_report and rest.startswith(f"{FIGURES}/") and name not in figures:
            lines.append(f"{name}: no page in git shows it. To fix it: rebuild reports/{folder}, or git rm {name}")
        elif in_report and rest.startswith(f"{FIGURES}/") and size > MAX_FIGURE_BYTES:
            lines.append(f"{name}: {size:,} bytes, {MAX_FIGURE_BYTES:,} at most. To fix it: draw fewer elements")
        elif size > MAX_FILE_BYTES:
            lines.append(
                f"{name}: {size:,} bytes, {MAX_FILE_BYTES:,} at most, since every version stays in each clone. "
                "To fix it: commit the records it is made of, or a compact form"
            )
    total = sum(sizes.values())
    if total > MAX_TREE_BYTES:
        lines.append(f"the tree has {total:,} bytes, {MAX_TREE_BYTES:,} at most. To fix it: see --sizes")
    return lines


def main() -> int:
    """Print the problems; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", action="store_true", help="print the size of the tree and of its largest folders")
    options = parser.parse_args()
    sizes = tracked()
    if options.sizes:
        folders: collections.Counter[str] = collections.Counter()
        for name, size in sizes.items():
            folders["/".join(Path(name).parts[:-1][:2]) or "."] += size
        print(f"{sum(sizes.values()) / 1e6:.1f} MB in {len(sizes):,} files")
        for folder, size in folders.most_common(_SHOWN_FOLDERS):
            print(f"{size / 1e6:8.2f} MB  {folder}")
    lines = problems(sizes, linked_figures(sizes))
    for line in lines:
        print(line, file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
