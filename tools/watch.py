"""Repeat the stored combinations on the installed releases, if one is newer, and report what changed.

    python tools/watch.py --runs_dir runs/watch [--minutes 120] [--pretend deepspeed=99.0]
    python tools/watch.py --runs_dir runs/again --equal_with bf16 autocast

RUNS_DIR gets compositions.json, which a later call continues, changes.md, and newer.txt with the newer releases.
--pretend gives an installed package another release, to see the whole without a new one. --equal_with repeats equal
runs whatever the releases, as after a change of the limits of rounding. The exit status is 0 if nothing is newer or
nothing changed, 1 if an outcome changed, and 3 if the time was over before.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

from study.compositions.answers import STACK_PACKAGES, read_matrices
from study.compositions.changes import (
    changes_page,
    combinations_to_repeat,
    equal_runs_with,
    find_changes,
    repeat,
)
from study.compositions.command import installed_stack
from study.compositions.features import read_rows
from study.compositions.matrix import Matrix
from study.compositions.session import CombinationSession

_SAME, _CHANGED, _INCOMPLETE = 0, 1, 3


def main(arguments: list[str] | None = None) -> int:
    """Compare the installed stack with the newest stored matrix, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--pretend", type=_package_and_release, action="append", default=[])
    parser.add_argument(
        "--equal_with",
        nargs="+",
        choices=[level for row in read_rows().values() for level in row.levels],
        metavar="FEATURE",
        help="repeat the equal runs that have one of these, newer or not",
    )
    options = parser.parse_args(arguments)
    stack = {**installed_stack(), **dict(options.pretend)}
    stored = next(read_matrices())
    newer = [f"{name} {version}" for name, version in stack.items() if is_newer(version, stored.stack[name])]
    combinations = combinations_to_repeat(stored)
    if options.equal_with:
        combinations = equal_runs_with(stored, options.equal_with)
    elif not newer:
        print(f"no package is newer than those of the stored matrix: {_text(stored.stack)}")
        return _SAME
    print(f"newer than the stored matrix: {', '.join(newer) or 'nothing'}")
    matrix = Matrix(stack)
    options.runs_dir.mkdir(parents=True, exist_ok=True)
    (options.runs_dir / "newer.txt").write_text(", ".join(newer) + "\n", encoding="utf-8")
    file = options.runs_dir / "compositions.json"
    if file.exists():
        matrix = Matrix.read(file)
        if matrix.stack != stack:
            parser.error(f"{file} has runs of another stack: {_text(matrix.stack)}")
    with CombinationSession() as session:
        is_complete = repeat(
            stored,
            matrix,
            session,
            minutes=options.minutes,
            report=print,
            file=file,
            combinations=combinations,
        )
    missing = sum(combination not in matrix.outcomes for combination in combinations)
    page = changes_page(stored, matrix, missing=missing)
    (options.runs_dir / "changes.md").write_text(page, encoding="utf-8")
    print(page)
    if next(find_changes(stored, matrix), None) is not None:
        return _CHANGED
    return _SAME if is_complete else _INCOMPLETE


def _package_and_release(text: str) -> tuple[str, str]:
    package, _, release = text.partition("=")
    try:
        Version(release)
    except InvalidVersion:
        release = ""
    if package not in STACK_PACKAGES or not release:
        raise argparse.ArgumentTypeError(f"{text!r} is not PACKAGE=RELEASE with one of {', '.join(STACK_PACKAGES)}")
    return package, release


def is_newer(version: str | None, stored: str | None) -> bool:
    """Whether a version is of a later release; a local label, such as +cpu, makes none."""
    if version is None or stored is None:
        return version is not None
    return Version(Version(version).public) > Version(Version(stored).public)


def _text(stack: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in stack.items())


if __name__ == "__main__":
    sys.exit(main())
