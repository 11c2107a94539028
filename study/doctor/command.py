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

from study.doctor.checks import INSTALL, Check, memory, nvme_path, strategies, tools, versions
from study.spec.strategies import REPOSITORY

# torch and DeepSpeed are imported in seconds, an operator loaded in as many; a cold disk may take ten times that.
PROBE_LIMIT_S = 180
_PROBED = ("gpus", "nccl", "nvcc", "matmul", "libaio", "operators", "nvme bandwidth", "hub")
_ORDER = (
    "python", "packages", "versions", "gpus", "nccl", "matmul", "compiler", "nvcc", "ninja", "libaio", "operators",
    "nvme path", "nvme bandwidth", "host memory", "pinned memory", "shared memory", "open files", "hub", "strategies",
)  # fmt: skip


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
    missing = [check.name for check in checks if check.state == "missing"]
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
    on_drive, folder, file_system = nvme_path(path)
    checks.append(on_drive)
    locked = next(check for check in checks if check.name == "pinned memory").state == "ok"
    no_figure = Check("nvme bandwidth", "none", "not measured: see nvme path")
    if folder and file_system in ("tmpfs", "ramfs"):
        found = f"not measurable: {file_system} is memory, and no drive"
        no_figure = Check("nvme bandwidth", "none", found, "study doctor --nvme_path DIR, with a folder on a drive")
    elif folder and not locked:
        no_figure = Check("nvme bandwidth", "none", "not measured: see pinned memory")
    elif folder:
        # Here and not in the probe, so that a probe that is killed leaves no file behind.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".study-doctor-") as scratch:
            checks += _probe(["--measure_in", str(Path(scratch).absolute())], ask_hub)
    if not any(check.name in _PROBED for check in checks):
        checks += [*_probe([], ask_hub, without="nvme bandwidth"), no_figure]
    checks.append(strategies(checks))
    return sorted(checks, key=lambda check: _ORDER.index(check.name))


def _probe(arguments: list[str], ask_hub: bool, without: str = "") -> list[Check]:
    command = [sys.executable, "-m", "study.doctor.probe", *arguments, *["--hub"][: int(ask_hub)]]
    try:
        answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=PROBE_LIMIT_S)
        printed, status = answer.stdout, answer.returncode
        ending = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    except subprocess.TimeoutExpired as expired:
        printed, ending = expired.stdout or b"", f"did not end within {PROBE_LIMIT_S} s"
    # Every line is written whole, but for the last of a process that was killed.
    whole_lines = printed.decode().split("\n")[:-1]
    checks = {check.name: check for check in (Check(**json.loads(line)) for line in whole_lines)}
    for name in _PROBED:
        if name not in checks and name != without:
            checks[name] = Check(name, "missing", f"not answered: the process that checks it {ending}", INSTALL)
    return list(checks.values())
