"""Repeat stored combinations with other releases of DeepSpeed, torch or Accelerate: study/compositions/results/other.

    python tools/other_releases.py torch 2.15.0 2.10.0 [--minutes 30]
    python tools/other_releases.py accelerate 1.14.0
    python tools/other_releases.py deepspeed 0.18.4

For DeepSpeed about 200 combinations are repeated, for torch those with its engines, for Accelerate those with its loop.
Each release is a layer before the installed packages, which is installed first if it is missing. A file of an earlier
call is continued.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from study.compositions.answers import OTHER_RESULTS, read_matrices
from study.compositions.changes import combinations_over_releases, combinations_to_repeat, find_changes, repeat
from study.compositions.command import installed_stack
from study.compositions.features import Combination
from study.compositions.matrix import Matrix
from study.compositions.session import CombinationSession
from study.config.places import IMPORT_ROOT
from study.host.folders import cache_directory
from study.host.stacks import Stack
from study.releases.prepare import install
from study.sweep.launch import clean_environment


def main(arguments: list[str] | None = None) -> int:
    """Run the releases, each into its file; return 1 if one cannot be installed, or the time was over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("package", choices=["deepspeed", "torch", "accelerate"])
    parser.add_argument("releases", nargs="+", metavar="RELEASE")
    parser.add_argument("--minutes", type=float, default=30.0, help="for each release")
    options = parser.parse_args(arguments)
    done = [_run_release(options.package, release, options.minutes) for release in options.releases]
    return 0 if all(done) else 1


def _run_release(package: str, release: str, minutes: float) -> bool:
    """Repeat the combinations with one release, and return whether all were run."""
    stack = Stack(f"combinations-{package}-{release}", {package: release})
    if install(stack.layers):
        return False
    stored = next(read_matrices())
    file = OTHER_RESULTS / f"{package}-{release}.json"
    file.parent.mkdir(exist_ok=True)
    matrix = Matrix.read(file) if file.exists() else Matrix({**installed_stack(), package: release})
    combinations = _choose_combinations(package, stored)
    environment = clean_environment(cache_directory(), Path(os.devnull)) | stack.environment(os.environ)
    # Not in a run, whose time is limited.
    subprocess.run([sys.executable, "-m", "study.host.operators"], cwd=IMPORT_ROOT, env=environment, check=False)
    with CombinationSession(environment) as session:
        is_complete = repeat(
            stored, matrix, session, minutes=minutes, report=print, file=file, combinations=combinations
        )
    changes = list(find_changes(stored, matrix))
    print(f"{package} {release}: {len(matrix.outcomes)} runs, {len(changes)} changes", flush=True)
    for change in changes:
        print(f"  {change.kind}: {change.now.combination.name}: {change.now.says}", flush=True)
    return is_complete


def _choose_combinations(package: str, stored: Matrix) -> list[Combination]:
    if package == "deepspeed":
        return combinations_over_releases(stored)
    return [combination for combination in combinations_to_repeat(stored) if depends_on(package, combination)]


def depends_on(package: str, combination: Combination) -> bool:
    """Whether a release of a package may change a combination's outcome."""
    if package == "accelerate":
        return combination.has("accelerate")
    # Of the operators of DeepSpeed nothing is torch's.
    return not combination.uses_deepspeed and not combination.has("accelerate", "cpu_adam")


if __name__ == "__main__":
    sys.exit(main())
