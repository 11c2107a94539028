"""Measure a step of each combination under releases of a package: study/releases/costs.json, accelerate_costs.json.

    python tools/release_costs.py deepspeed [--releases 0.19.7 0.19.8] [--all]
    python tools/release_costs.py accelerate --releases 1.14.0 1.15.0

The other packages are the installed ones. Each release is a layer before them, which is installed first if it is
missing. Without releases those of the file are measured. Combinations in the file are left out; with --all they are
measured again. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from study.compositions.features import make_combination
from study.host.folders import cache_directory
from study.host.stacks import Stack, is_of_today, package_version, release_key, stacks
from study.releases.costs import COSTS, CostTable, measure_costs, other_packages, read_list
from study.releases.prepare import install
from study.sweep.launch import clean_environment


def main(arguments: list[str] | None = None) -> int:
    """Measure the releases, the newest first; each is written when it is whole. Return 1 if one cannot be installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("package", choices=list(COSTS))
    parser.add_argument("--releases", nargs="+", default=None, metavar="RELEASE")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args(arguments)
    file = COSTS[options.package]
    table = CostTable.read(file) if file.exists() else CostTable({}, {}, options.package)
    table.packages = other_packages(options.package)
    releases = sorted(options.releases or table.names, key=release_key, reverse=True)
    chosen = [_choose_stack(options.package, release) for release in releases]
    if install(layer for stack in chosen for layer in stack.layers):
        return 1
    for release, stack in zip(releases, chosen, strict=True):
        stored = {} if options.all else table.releases.get(release, {})
        listed = [make_combination(name.split(",")) for name in read_list(options.package)]
        combinations = [combination for combination in listed if combination.name not in stored]
        if not combinations:
            continue
        began = time.monotonic()
        environment = clean_environment(cache_directory(), Path(os.devnull)) | stack.environment(os.environ)
        measured = stored | measure_costs(
            combinations, environment=environment, report=lambda line: print(line, flush=True)
        )
        # In the order of the list, whenever they were measured.
        table.releases[release] = {combination.name: measured[combination.name] for combination in listed}
        table.write(file)
        print(f"{release}: {len(combinations)} combinations in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _choose_stack(package: str, release: str) -> Stack:
    """Return the stack of a release with the installed packages; the installed release needs no layer."""
    if package_version(package) == release:
        return Stack(f"costs-{package}-{release}", {})
    if package == "deepspeed" and release in stacks() and is_of_today(release):
        # With the operators that runs of the grid have compiled.
        return stacks()[release]
    return Stack(f"costs-{package}-{release}", {package: release})


if __name__ == "__main__":
    sys.exit(main())
