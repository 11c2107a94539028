"""Measure a step of each combination under the installed releases of DeepSpeed: study/releases/costs.json.

    python tools/release_costs.py [--stacks 0.19.7,0.19.8] [--all]

The stacks are those of study/releases/stacks.yaml with today's other packages; `study prepare releases` installs them.
Without flags combinations in the file are left out; with --all they are measured again. Nothing else should run
meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from study.compositions.features import make_combination
from study.host.folders import cache_directory
from study.host.stacks import Stack, is_of_today, layer_state, package_version, stacks
from study.releases.costs import COSTS, OTHER_PACKAGES, CostTable, measure_costs, read_list
from study.sweep.launch import clean_environment


def main(arguments: list[str] | None = None) -> int:
    """Measure the stacks, the newest first; each is written when it is whole."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stacks", type=lambda text: text.split(","), default=None)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args(arguments)
    table = CostTable.read(COSTS) if COSTS.exists() else CostTable({}, {})
    table.packages = {name: package_version(name) or "" for name in OTHER_PACKAGES}
    for stack in _choose_stacks(options.stacks):
        release = stack.releases["deepspeed"]
        stored = {} if options.all else table.releases.get(release, {})
        combinations = [make_combination(name.split(",")) for name in read_list() if name not in stored]
        if not combinations:
            continue
        began = time.monotonic()
        environment = clean_environment(cache_directory(), Path(os.devnull)) | stack.environment(os.environ)
        measured = measure_costs(combinations, environment=environment, report=lambda line: print(line, flush=True))
        table.releases[release] = {**stored, **measured}
        table.write(COSTS)
        print(f"{release}: {len(measured)} combinations in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _choose_stacks(names: Sequence[str] | None) -> list[Stack]:
    of_today = [stack for name, stack in stacks().items() if is_of_today(name)]
    chosen = of_today if names is None else [stack for stack in of_today if stack.name in names]
    cache = cache_directory()
    installed = [stack for stack in chosen if all("sha256" in layer_state(cache, layer) for layer in stack.layers)]
    for stack in chosen:
        if stack not in installed:
            print(f"{stack.name}: not installed; run: study prepare releases")
    return installed[::-1]


if __name__ == "__main__":
    sys.exit(main())
