"""`study doctor`: runs the checks, prints a line for each, and ends with 1 when something needed is missing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from study.doctor.checks import INSTALL, Check, file_system, memory, nvme_path, strategies, tools, versions
from study.doctor.cluster import cluster
from study.errors import UserError
from study.host.box import this_box
from study.host.nodes import allocated_box
from study.spec.strategies import REPOSITORY

# torch and DeepSpeed are imported in seconds, an operator loaded in as many; a cold disk may take ten times that.
PROBE_LIMIT_S = 180
_PROBED = ("gpus", "nccl", "nvcc", "matmul", "hub", "libaio", "operators", "nvme bandwidth")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    parser.add_argument(
        "--nvme_path",
        type=_folder_name,
        default=REPOSITORY / "nvme_offload",
        metavar="DIR",
        help="measure the drive of this folder",
    )
    parser.add_argument("--hub", action="store_true", help="ask the hub whether it answers; else nothing is sent")


def run(options: argparse.Namespace) -> int:
    checks = _all_checks(options.nvme_path, options.hub)
    missing = list(dict.fromkeys(check.name for check in checks if check.state == "missing"))
    if options.json:
        print(json.dumps({"checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.state:<7}  {check.name:<{width}}  {check.found}")
            if check.fix:
                print(f"{'':<7}  {'':<{width}}  -> {check.fix}")
        print(f"\nmissing for `study run laptop`: {', '.join(missing) or 'nothing'}")
    return 1 if missing else 0


def _folder_name(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of a folder is empty")
    return Path(text)


def _all_checks(path: Path, ask_hub: bool) -> list[Check]:
    checks = [*versions(), *tools(), *memory()]
    on_drive, folder = nvme_path(path)
    can_lock = next(check.state for check in checks if check.name == "pinned memory") == "ok"
    checks += [on_drive, *_probe(ask_hub, folder, can_lock)]
    return [*checks, *cluster(), strategies(checks, _gpus())]


def _gpus() -> int:
    try:
        return allocated_box().gpus
    except UserError:  # which the checks of the cluster tell
        return this_box().gpus


def _probe(ask_hub: bool, folder: Path | None, can_lock: bool) -> list[Check]:
    command = [sys.executable, "-m", "study.doctor.probe", *["--hub"] * ask_hub]
    if folder is None or not can_lock:
        return _answers([*command, "--not_measured", f"not measured: see {'pinned memory' if folder else 'nvme path'}"])
    if (kind := file_system(folder)) in ("tmpfs", "ramfs"):
        return _answers([*command, "--not_measured", f"not measurable: {kind} is memory, and no drive"])
    # Here and not in the probe, so that a probe that is killed leaves no file behind.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".study-doctor-") as scratch:
        return _answers([*command, "--measure_in", str(Path(scratch).absolute())])


def _answers(command: list[str]) -> list[Check]:
    try:
        answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=PROBE_LIMIT_S)
        printed, status = answer.stdout, answer.returncode
        ending = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    except subprocess.TimeoutExpired as expired:
        printed, ending = expired.stdout or b"", f"did not end within {PROBE_LIMIT_S} s"
    # Every line is written whole, but for the last of a process that was killed.
    lines = printed.decode().split("\n")[:-1]
    checks = {name: Check(name, "missing", f"not answered: its process {ending}", INSTALL) for name in _PROBED}
    return list((checks | {check.name: check for check in (Check(**json.loads(line)) for line in lines)}).values())
