"""`study prepare SUITE`: install the stacks of a suite, build operators and draw initial weights before its runs.

Each layer of a stack is one `pip install` into a separate folder. The first installation pins the digests of the
layer's archives in stacks.lock.json; later installations accept no other archives.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from study.config.errors import UserError
from study.config.places import IMPORT_ROOT
from study.config.strategies import read_strategy
from study.host import stacks
from study.host.folders import cache_directory, check_disk_space
from study.host.machine import detect_machine
from study.records.directory import read_json, write_json
from study.sweep import command as sweep
from study.sweep.cell import Cell
from study.sweep.launch import clean_environment
from study.sweep.plan import plan_suite
from study.sweep.search import one_of_each_model

LOCK_FILE = stacks.STACK_FILE.with_name("stacks.lock.json")
# Disk space per package: older torch releases include CUDA libraries; everything else is small.
_ROOM_BYTES = {"torch": 12 * 2**30}
# Packages that pip installs with their dependencies: torch with its linked libraries, transformers with contemporary
# tokenizers and hub. Other packages are installed without.
_WITH_THEIRS = ("torch", "transformers")
_ALONE = ("--no-deps", "--no-build-isolation")
_NO_NETWORK = re.compile(
    r"(?i)\(from versions: none\)|connection (broken|refused|error)|NewConnectionError|NameResolution|timed out"
)
# Problems of this machine, not of a release.
_OF_THE_BOX = re.compile(r"No module named pip|\[Errno (13|28|30)\]")
Pins = dict[str, dict[str, str]]


class NotInstallable(Exception):
    """A release that pip cannot install here, so no stack that contains it can run."""


def prepare(options: argparse.Namespace) -> int:
    """Prepare a suite; return exit status 1 if a stack or initial weights are missing."""
    stacks.check_training_packages()
    plan = plan_suite(options.suite, detect_machine(), options.runs_dir, options.only, rehearse=options.rehearse)
    cells = [cell for part in plan.slices for item in part.cells for cell in one_of_each_model(item)]
    names = list(dict.fromkeys(cell.stack for cell in cells if cell.stack))
    requested = [stacks.stacks()[name] for name in names]
    not_installable = install(dict.fromkeys(layer for stack in requested for layer in stack.layers))
    runnable = [stack for stack in requested if not not_installable & set(stack.layers)]
    for stack in runnable:
        build_operators(stack, (cell for cell in cells if cell.stack == stack.name))
    if any(cell.stack is None for cell in cells):
        subprocess.run([sys.executable, "-m", "study.host.operators"], cwd=IMPORT_ROOT, check=False)
    status = sweep.weights(options)
    ready = f"{len(runnable)} of {len(requested)} stacks are ready"
    print(ready if requested else f"{plan.name} uses the installed packages")
    return 1 if not_installable or status else 0


def install(layers: Iterable[str]) -> set[str]:
    """Install the missing layers; return those that pip could not install. Their folders record the reason."""
    cache, pins, failed = cache_directory(), read_pins(), set()
    for layer in layers:
        folder = stacks.layer_folder(cache, layer)
        if "sha256" in stacks.layer_state(cache, layer):
            continue
        try:
            digests = install_layer(layer, folder, pins.get(layer))
        except NotInstallable as problem:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / stacks.LAYER_FILE, {"layer": layer, "problem": str(problem)})
            print(f"{layer} is not installable: {problem}")
            failed.add(layer)
            continue
        if layer not in pins:
            pins[layer] = digests
            write_json(LOCK_FILE, dict(sorted(pins.items())))
            print(f"{layer}: pinned in {LOCK_FILE.name}")
    return failed


def read_pins() -> Pins:
    """Read the pinned digests of each layer; empty without a lock file."""
    return dict(read_json(LOCK_FILE)) if LOCK_FILE.exists() else {}


def install_layer(layer: str, folder: Path, pins: Mapping[str, str] | None) -> dict[str, str]:
    """Install one layer; return the digests of the archives that pip used, by `name==version`."""
    package, _, version = layer.partition("-")
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_disk_space(folder.parent, _ROOM_BYTES.get(package, 2**28), layer)
    print(f"{layer}: installing", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{layer}.") as scratch:
        target, requirements, report = (Path(scratch) / name for name in ("layer", "wanted.txt", "report.json"))
        lines = [f"{archive} --hash=sha256:{digest}" for archive, digest in (pins or {}).items()]
        requirements.write_text("\n".join(lines or [f"{package}=={version}"]) + "\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--target",
            str(target),
            *(() if package in _WITH_THEIRS else _ALONE),
            *(["--require-hashes", "--no-deps"] if pins else []),
            "--report",
            str(report),
            "-r",
            str(requirements),
        ]
        name, _, value = stacks.BUILDS_DEEPSPEED.partition("=")
        environment = os.environ | {name: value}
        result = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise _failure(layer, result.stderr)
        archives = json.loads(report.read_text())["install"]
        digests = {
            f"{archive['metadata']['name']}=={archive['metadata']['version']}": archive["download_info"][
                "archive_info"
            ]["hashes"]["sha256"]
            for archive in archives
        }
        record = {"layer": layer, "sha256": digests[f"{package}=={version}"], "archives": digests}
        write_json(target / stacks.LAYER_FILE, record)
        shutil.rmtree(folder, ignore_errors=True)
        target.replace(folder)
    return digests


def _failure(layer: str, stderr: str) -> UserError | NotInstallable:
    """Return the error of a layer that pip did not install: a UserError if it is the machine's."""
    if _NO_NETWORK.search(stderr):
        problem = f"{layer} cannot be installed: pip does not reach its index"
        return UserError(problem, "run it on a machine with a network")
    if fault := _OF_THE_BOX.search(stderr):
        line = next(line for line in stderr.splitlines() if fault[0] in line)
        problem = f"{layer} cannot be installed: {line[:200]}"
        return UserError(problem, "fix this problem, then run `study prepare` again")
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: pip failed"]
    return NotInstallable(errors[-1].removeprefix("ERROR: ")[:300])


def build_operators(stack: stacks.Stack, cells: Iterable[Cell]) -> None:
    """Build DeepSpeed operators in a separate process, which imports the stack's libraries."""
    strategies = [strategy for cell in cells if (strategy := read_strategy(cell.strategy)).deepspeed is not None]
    # A strategy with a CPU optimizer needs the operators of all others, except those of NVMe.
    strategies.sort(key=lambda strategy: (strategy.offload_device("optimizer") is not None, strategy.name))
    needed = {strategy.uses_nvme: strategy.name for strategy in strategies}
    if not needed:
        return
    environment = clean_environment(cache_directory(), Path(os.devnull)) | stack.environment(os.environ)
    command = [sys.executable, "-m", "study.host.operators", *needed.values()]
    print(f"{stack.name}: operators", flush=True)
    subprocess.run(command, cwd=IMPORT_ROOT, env=environment, check=False)
