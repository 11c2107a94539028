"""`study doctor`: runs the checks, prints a line for each, and ends with 1 when something needed is missing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from study.config.errors import UserError
from study.config.strategies import (
    LEAST_RANKS_WITH_COPIES,
    REPOSITORY,
    STRATEGY_NAMES,
    WITH_COPIES,
    Strategy,
    read_strategy,
)
from study.host.box import this_box, visible_gpus
from study.host.folders import cache_directory, home_folder, refuse_unwritable
from study.host.memory import GIB, MIB, can_lock, host_memory, locked_bytes
from study.host.slurm import Node, allocated_box, ask_nodes, is_in_job, this_job
from study.host.stacks import BUILDS_DEEPSPEED, VERIFIED, package_version, pair_fix, unverified_pair
from study.records.outcome import MORE_SHARED_MEMORY
from study.releases.causes import PACKAGES, known_faults

# The checks that need neither torch nor DeepSpeed: versions, compilers, memory and limits.

INSTALL = "make -B install"
INSTALL_ALL = (
    f"{BUILDS_DEEPSPEED} python -m pip install --no-build-isolation -c constraints.txt -e '.[train,report,dev]'"
)

# Two ranks of 2.6 GiB each (host_peak_rss_gib of the laptop suite) where parameters are on NVMe; 0.8 elsewhere.
LAPTOP_MEMORY_GIB = 6
# Where NCCL's ranks meet; in a container it is 64 MiB unless asked otherwise. Ranks without a GPU take none of it.
NCCL_SHARED_MEMORY_MIB = 132
OPEN_FILES = 1024
NVME_FREE_GIB = 1
_AS_ABOVE = "as the lines above say"


@dataclasses.dataclass(frozen=True)
class Check:
    """`missing` is what `study run laptop` needs and this box lacks; `none` is absent, and no fault."""

    name: str
    state: Literal["ok", "missing", "none"]
    found: str
    fix: str = ""


def needed(name: str, is_enough: bool, found: str, problem: str, fix: str) -> Check:
    return Check(name, "ok", found) if is_enough else Check(name, "missing", f"{found}; {problem}", fix)


def shown(path: Path) -> str:
    """As seen from the repository or the home folder: shorter, and without the user's name."""
    absolute = path.absolute()
    for start, name in ((REPOSITORY, ""), (home_folder(), "~")):
        if start is not None and absolute.is_relative_to(start):
            return str(Path(name) / absolute.relative_to(start))
    return str(absolute)


def versions() -> Iterator[Check]:
    python = platform.python_version()
    try:
        from packaging.specifiers import SpecifierSet

        wanted = metadata.metadata("zero-study")["Requires-Python"]
        packages, packages_fix = _compare("that training needs", metadata.requires("zero-study") or [], "train")
    except ImportError as error:
        yield Check("python", "ok", python)
        yield Check("packages", "missing", f"{error.name} is not installed, so nothing can train", INSTALL)
        return
    fix = "make -B install PYTHON=python3.11"
    yield needed("python", python in SpecifierSet(wanted), python, f"{wanted} is asked", fix)
    yield Check("packages", "missing" if packages_fix else "ok", packages, packages_fix)
    pair = unverified_pair()
    found = pair or " with ".join(map(" ".join, zip(("accelerate", "deepspeed"), VERIFIED[-1], strict=True)))
    yield needed("pairing", pair is None, found, "no run has shown that it trains as DDP does", pair_fix())
    for cause in known_faults({name: package_version(name) for name in PACKAGES}, bool(visible_gpus())):
        yield Check("known fault", "missing", f"{cause.where}: {cause.title}", cause.instead or pair_fix())
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    # Other versions than those that were tested are no fault.
    pinned = [line for line in pins if line and not line.startswith("#")]
    yield Check("versions", "ok", *_compare("of constraints.txt", pinned))


def _compare(which: str, requirements: list[str], extra: str = "") -> tuple[str, str]:
    """What is installed in the version asked for, in another one, and not at all; and the fix."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    meant = [one for one in map(Requirement, requirements) if not one.marker or one.marker.evaluate({"extra": extra})]
    # Of several under one name Python takes the first on its path.
    packages = reversed(list(metadata.distributions()))
    # What a pip that was interrupted leaves has no name.
    installed = {canonicalize_name(package.name): package.version for package in packages if package.name}
    versions = [(one, installed.get(canonicalize_name(one.name))) for one in meant]
    other = [f"{one.name} {here}" for one, here in versions if here and not one.specifier.contains(here, True)]
    absent = [one.name for one, here in versions if here is None]
    found = f"{len(meant) - len(other) - len(absent)} of {len(meant)} packages {which} are here in the version asked"
    found += f"; in another one: {', '.join(other)}" if other else ""
    found += f"; not installed: {', '.join(absent)}" if absent else ""
    return found, INSTALL_ALL if other or (absent and extra) else ""


def tools() -> Iterator[Check]:
    # As torch chooses it.
    compiler = os.environ.get("CXX") or "c++"
    version = _first_line(compiler, "--version") or "not found"
    found = f"{compiler}: {version}"
    problem, fix = "DeepSpeed compiles with it", "apt-get install g++"
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    if version != "not found" and not headers:
        problem, fix = "Python.h, which DeepSpeed's operators include, is not here", "apt-get install python3-dev"
    yield needed("compiler", version != "not found" and headers, found, problem, fix)
    # A run has this Python's own folder on its PATH (study/host/operators.py).
    beside = Path(sys.executable).parent / "ninja"
    found = _first_line("ninja", "--version") or _first_line(str(beside), "--version") or "not found"
    yield needed("ninja", found != "not found", found, "DeepSpeed builds with it", "python -m pip install ninja")


def _first_line(*command: str) -> str | None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (answer.stdout.strip().splitlines() or [""])[0]


def memory() -> Iterator[Check]:
    host = host_memory()
    found = f"{host.total_gib:.1f} GiB, {host.available_gib:.1f} GiB available, "
    found += "as a cgroup allows" if host.cgroup_limit_bytes else "no cgroup limit"
    fix = "end other programs, or give the container more: docker run --memory=8g"
    is_enough = host.available_gib >= LAPTOP_MEMORY_GIB
    yield needed("host memory", is_enough, found, f"{LAPTOP_MEMORY_GIB} GiB are needed", fix)

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = f"ulimit -l is {'unlimited' if limit == resource.RLIM_INFINITY else f'{limit / MIB:.0f} MiB'}"
    wanted = max(locked_bytes(strategy) for strategy in map(read_strategy, STRATEGY_NAMES))
    problem = f"{wanted / GIB:.1f} GiB cannot be locked, as each rank's buffers for parameters on NVMe must be"
    fix = "ulimit -l unlimited (as root, or docker run --ulimit memlock=-1)"
    yield needed("pinned memory", can_lock(wanted), found, problem, fix)

    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    is_enough = len(visible_gpus()) < 2 or free >= NCCL_SHARED_MEMORY_MIB * MIB
    found = f"/dev/shm: {free / GIB:.2f} GiB free"
    yield needed("shared memory", is_enough, found, f"{NCCL_SHARED_MEMORY_MIB} MiB are needed", MORE_SHARED_MEMORY)

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_enough = limit == resource.RLIM_INFINITY or limit >= OPEN_FILES
    found = f"{'unlimited' if limit == resource.RLIM_INFINITY else limit} files"
    yield needed("open files", is_enough, found, f"{OPEN_FILES} are needed", f"ulimit -n {OPEN_FILES}")


def nvme_path(path: Path) -> tuple[Check, Path | None]:
    """The check, and the folder to measure in."""
    fix = "study doctor --nvme_path DIR, with a folder on a local drive that you may write"
    try:
        refuse_unwritable(path, shown(path), fix)
    except UserError as refusal:
        return Check("nvme path", "missing", refusal.problem.replace(f"{home_folder()}/", "~/"), fix), None
    folder = next(place for place in (path, *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(folder).free / GIB
    found = f"{shown(path)}: writable, {free:.1f} GiB free, {file_system(folder)}"
    check = needed("nvme path", free >= NVME_FREE_GIB, found, f"{NVME_FREE_GIB} GiB are needed", fix)
    return check, folder if check.state == "ok" else None


def file_system(folder: Path) -> str:
    folder = folder.resolve()
    mounts = [one for one in psutil.disk_partitions(all=True) if folder.is_relative_to(one.mountpoint)]
    # Of two mounts on one place the later one is seen.
    return max(reversed(mounts), key=lambda one: len(one.mountpoint)).fstype if mounts else "unknown file system"


def strategies(checks: list[Check], gpus: int) -> Check:
    """Which strategies can train here, and what each of the others lacks. `gpus` are all that a run may take."""
    state = {check.name: check.state for check in checks}
    # NCCL is only absent, and not missing, wherever torch can be imported and has no GPU.
    if missing := [name for name in ("packages", "python", "nccl") if state[name] == "missing"]:
        return Check("strategies", "missing", f"none trains here ({', '.join(missing)}: see above)", _AS_ABOVE)
    on_gpu = state["gpus"] == "ok"
    waiting: dict[str, list[str]] = {}
    too_large: dict[int, list[str]] = {}
    for name in STRATEGY_NAMES:
        strategy = read_strategy(name)
        if on_gpu and gpus < (least := _least_ranks(strategy)):
            too_large.setdefault(least, []).append(name)
            continue
        lacks = [need for need in _needs(strategy, on_gpu) if state[need] == "missing"]
        waiting.setdefault(", ".join(lacks), []).append(name)
    able = waiting.pop("", [])
    found = f"{len(able)} of {len(STRATEGY_NAMES)} train "
    found += "on its GPUs" if on_gpu else "on its cores, over gloo; suites that require GPUs are refused"
    # No fault of the box: the studied ones are all there.
    others = "".join(f"; from {least} GPUs: {', '.join(names)}" for least, names in sorted(too_large.items()))
    if not waiting:
        return Check("strategies", "ok", found + others)
    not_here = "; not ".join(f"{', '.join(names)}, for want of: {lacks}" for lacks, names in waiting.items())
    found += f" ({', '.join(able)}); not {not_here}{others}"
    return Check("strategies", "missing", found, _AS_ABOVE)


def _least_ranks(strategy: Strategy) -> int:
    if strategy.name in WITH_COPIES:
        return LEAST_RANKS_WITH_COPIES
    return strategy.team.ranks if strategy.team else 1


def _needs(strategy: Strategy, on_gpu: bool) -> list[str]:
    if not strategy.deepspeed:
        return []
    needs = ["pairing", "operators"]
    # Without a GPU DeepSpeed's ranks talk through an operator that is compiled, too.
    needs += ["compiler", "ninja"] if strategy.offloads or not on_gpu else []
    needs += ["nvcc"] if on_gpu and strategy.uses_nvme else []
    needs += ["shared memory"] if on_gpu else []
    needs += ["libaio", "nvme path", "pinned memory"] if strategy.uses_nvme else []
    return needs


# Inside a Slurm job: its nodes, what lies between them, and whether each finds what a run needs.

_SHARE = "start from a folder that all nodes share"
_BUILD = "srun --ntasks-per-node=1 python -m study.host.operators"


def cluster() -> list[Check]:
    """Nothing outside of a job."""
    if not is_in_job():
        return []
    try:
        if (job := this_job()) is None:
            return [Check("slurm", "ok", "a job of one node, on which runs start as they do without Slurm")]
        with ExitStack() as held:
            runs = Path("runs").absolute()
            marks = {
                folder: held.enter_context(tempfile.NamedTemporaryFile(dir=_existing(folder))).name
                for folder in (REPOSITORY, runs, cache_directory())
            }
            nodes = ask_nodes(job, tuple(marks.values()))
        blind = {folder: [node.name for node in nodes if mark not in node.sees] for folder, mark in marks.items()}
    except (UserError, OSError) as problem:
        fix = problem.fix if isinstance(problem, UserError) else _SHARE
        return [Check("slurm", "missing", getattr(problem, "problem", str(problem)), fix)]
    return [
        Check("slurm", "ok", f"job {job.id} has {len(nodes)} nodes; each run is one step over them"),
        Check("nodes", "ok", _each(nodes, _has)),
        Check("interconnect", "ok", _each(nodes, lambda node: ", ".join(node.networks) or "no link is known")),
        *(_shared(what, folder, blind[folder]) for what, folder in (("repository", REPOSITORY), ("runs", runs))),
        _cache(blind[cache_directory()]),
        _everywhere("operators of nodes", nodes, lambda node: node.operators, _BUILD),
        _everywhere("weights of nodes", nodes, lambda node: node.weights, "study weights SUITE"),
    ]


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def _has(node: Node) -> str:
    gpus = f"{len(node.gpus)} x {node.gpus[0]} {node.gpu_memory_gib[0]:.0f} GiB" if node.gpus else "no GPU"
    return f"{gpus}, {node.cores} cores of {node.processor}, {node.host_memory_gib:.0f} GiB"


def _each(nodes: Sequence[Node], tell: Callable[[Node], str]) -> str:
    """Once for all nodes of which the same is to be said."""
    said: dict[str, list[str]] = {}
    for node in nodes:
        said.setdefault(tell(node), []).append(node.name)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in said.items())


def _shared(what: str, folder: Path, blind: list[str]) -> Check:
    found = shown(folder) if blind else f"{shown(folder)}, on all nodes"
    return needed(f"shared {what}", not blind, found, f"{', '.join(blind)} sees another one", _SHARE)


def _cache(blind: list[str]) -> Check:
    if not blind:
        return Check("shared cache", "ok", f"{shown(cache_directory())}, on all nodes")
    found = f"{', '.join(blind)} has one of its own, and draws weights, prepares data and builds operators there"
    return Check("shared cache", "none", found, "let ZERO_STUDY_CACHE name a folder that all nodes share")


def _everywhere(name: str, nodes: Sequence[Node], of: Callable[[Node], list[str]], fix: str) -> Check:
    every = {each for node in nodes for each in of(node)}
    lacking = [f"{node.name} lacks {len(every) - len(of(node))}" for node in nodes if len(of(node)) < len(every)]
    found = f"{len(every)} on some node; {', '.join(lacking)}" if lacking else f"{len(every)} on each node"
    is_fine = bool(every) and not lacking
    return Check(name, "ok" if is_fine else "none", found, "" if is_fine else fix)


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
    command = [sys.executable, "-m", "study.advisor.doctor_probe", *["--hub"] * ask_hub]
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
