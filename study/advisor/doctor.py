"""`study doctor`: runs the checks, prints a row for each, and ends with 1 when something needed is missing."""

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
from study.config.printing import TextTable, print_page
from study.config.strategies import (
    MIN_RANKS_WITH_REPLICAS,
    REPOSITORY,
    STRATEGY_NAMES,
    WITH_REPLICAS,
    Strategy,
    read_strategy,
)
from study.host.folders import cache_directory, check_writable, folder_argument, home_folder
from study.host.machine import detect_machine, visible_gpus
from study.host.memory import GIB, MIB, can_lock, host_memory, required_pinned_bytes
from study.host.slurm import Node, current_job, is_in_job, job_resources, query_nodes
from study.host.stacks import BUILDS_DEEPSPEED, VERIFIED, package_version, pair_fix, unverified_pair
from study.records.outcome import MORE_SHARED_MEMORY
from study.releases.causes import PACKAGES, known_faults

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
# torch and DeepSpeed are imported in seconds, an operator loaded in as many; a cold disk may take ten times that.
PROBE_LIMIT_S = 180
_PROBED = ("gpus", "nccl", "nvcc", "matmul", "hub", "libaio", "operators", "nvme bandwidth")
_AS_ABOVE = "as the lines above say"
_SHARE = "start from a folder that all nodes share"
_BUILD = "srun --ntasks-per-node=1 python -m study.host.operators"


@dataclasses.dataclass(frozen=True)
class Check:
    """`missing` is what `study run laptop` needs and this box lacks; `none` is absent, and not a fault."""

    name: str
    state: Literal["ok", "missing", "none"]
    found: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    nvme = REPOSITORY / "nvme_offload"
    add("--nvme_path", type=folder_argument, default=nvme, metavar="DIR", help="measure the drive of this folder")
    add("--hub", action="store_true", help="ask the hub whether it answers; else nothing is sent")


def run(options: argparse.Namespace) -> int:
    checks = [*versions(), *tools(), *memory()]
    can_pin = next(check.state for check in checks if check.name == "pinned memory") == "ok"
    nvme, folder = nvme_path(options.nvme_path)
    checks += [nvme, *_probe(options.hub, folder, can_pin)]
    try:
        gpus = job_resources().gpus
    except UserError:  # which the checks of the cluster report
        gpus = detect_machine().gpus
    checks += [*cluster(), strategies(checks, gpus)]
    missing = list(dict.fromkeys(check.name for check in checks if check.state == "missing"))
    if options.json:
        print(json.dumps({"checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    else:
        rows: list[tuple[str, str, str]] = []
        for check in checks:
            rows.append((check.state, check.name, check.found))
            rows += [("", "", f"-> {check.fix}")] if check.fix else []
        print_page([_verdict(checks, missing), "", TextTable(("", "", ""), rows)])
    return 1 if missing else 0


def _verdict(checks: Sequence[Check], missing: Sequence[str]) -> str:
    gpus = next(check for check in checks if check.name == "gpus")
    ready = f"Not ready for study run laptop: missing {', '.join(missing)}" if missing else "Ready for study run laptop"
    return f"{ready}; {'GPUs: ' + gpus.found if gpus.state == 'ok' else 'no GPU found'}"


def needed(name: str, is_enough: bool, found: str, problem: str, fix: str) -> Check:
    return Check(name, "ok", found) if is_enough else Check(name, "missing", f"{found}; {problem}", fix)


def shown(path: Path) -> str:
    """Return the path as seen from the repository or the home folder: shorter, and without the user's name."""
    absolute = path.absolute()
    for start, name in ((REPOSITORY, ""), (home_folder(), "~")):
        if start is not None and absolute.is_relative_to(start):
            return str(Path(name) / absolute.relative_to(start))
    return str(absolute)


# The checks that need neither torch nor DeepSpeed: versions, compilers, memory and limits.


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
    yield needed("python", python in SpecifierSet(wanted), python, f"{wanted} is needed", fix)
    yield Check("packages", "missing" if packages_fix else "ok", packages, packages_fix)
    pair = unverified_pair()
    found = pair or " with ".join(map(" ".join, zip(("accelerate", "deepspeed"), VERIFIED[-1], strict=True)))
    yield needed("pairing", pair is None, found, "no run has shown that it trains as DDP does", pair_fix())
    for cause in known_faults({name: package_version(name) for name in PACKAGES}, bool(visible_gpus())):
        yield Check("known fault", "missing", f"{cause.where}: {cause.title}", cause.instead or pair_fix())
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    # Untested versions are not a fault.
    pinned = [line for line in pins if line and not line.startswith("#")]
    yield Check("versions", "ok", _compare("of constraints.txt", pinned)[0])


def _compare(which: str, requirements: list[str], extra: str = "") -> tuple[str, str]:
    """Return what is installed in the version asked for, in another one, and not at all; and the fix."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    meant = [one for one in map(Requirement, requirements) if not one.marker or one.marker.evaluate({"extra": extra})]
    # Python imports the first of several under one name on its path. What an interrupted pip leaves has no name.
    packages = reversed(list(metadata.distributions()))
    installed = {canonicalize_name(package.name): package.version for package in packages if package.name}
    versions = [(one, installed.get(canonicalize_name(one.name))) for one in meant]
    other = [f"{one.name} {here}" for one, here in versions if here and not one.specifier.contains(here, True)]
    absent = [one.name for one, here in versions if here is None]
    found = f"{len(meant) - len(other) - len(absent)} of {len(meant)} packages {which} are here in the version asked"
    found += f"; in another one: {', '.join(other)}" if other else ""
    found += f"; not installed: {', '.join(absent)}" if absent else ""
    return found, INSTALL_ALL if extra and (other or absent) else ""


def tools() -> Iterator[Check]:
    # torch chooses it so.
    compiler = os.environ.get("CXX") or "c++"
    version = _first_line(compiler, "--version")
    problem, fix = "DeepSpeed compiles with it", "apt-get install g++"
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    if version and not has_headers:
        problem, fix = "Python.h, which DeepSpeed's operators include, is not here", "apt-get install python3-dev"
    found = f"{compiler}: {version or 'not found'}"
    yield needed("compiler", bool(version) and has_headers, found, problem, fix)
    # A run has this Python's own folder on its PATH (study/host/operators.py).
    own_ninja = Path(sys.executable).parent / "ninja"
    ninja = _first_line("ninja", "--version") or _first_line(str(own_ninja), "--version")
    fix = "python -m pip install ninja"
    yield needed("ninja", bool(ninja), ninja or "not found", "DeepSpeed builds with it", fix)


def _first_line(*command: str) -> str | None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (answer.stdout.strip().splitlines() or [""])[0]


def memory() -> Iterator[Check]:
    host = host_memory()
    limited = "within a cgroup's limit" if host.cgroup_limit_bytes else "no cgroup limit"
    found = f"{host.total_gib:.1f} GiB, {host.available_gib:.1f} GiB available, {limited}"
    fix = "end other programs, or give the container more: docker run --memory=8g"
    is_enough = host.available_gib >= LAPTOP_MEMORY_GIB
    yield needed("host memory", is_enough, found, f"{LAPTOP_MEMORY_GIB} GiB are needed", fix)

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = f"ulimit -l is {'unlimited' if limit == resource.RLIM_INFINITY else f'{limit / MIB:.0f} MiB'}"
    wanted = max(required_pinned_bytes(strategy) for strategy in map(read_strategy, STRATEGY_NAMES))
    problem = f"{wanted / GIB:.1f} GiB cannot be pinned, as each rank's buffers for parameters on NVMe must be"
    fix = "ulimit -l unlimited (as root, or docker run --ulimit memlock=-1)"
    yield needed("pinned memory", can_lock(wanted), found, problem, fix)

    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    is_enough = len(visible_gpus()) < 2 or free >= NCCL_SHARED_MEMORY_MIB * MIB
    found = f"/dev/shm: {free / GIB:.2f} GiB free"
    yield needed("shared memory", is_enough, found, f"{NCCL_SHARED_MEMORY_MIB} MiB are needed", MORE_SHARED_MEMORY)

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found = f"{'unlimited' if limit == resource.RLIM_INFINITY else limit} files"
    is_enough = limit == resource.RLIM_INFINITY or limit >= OPEN_FILES
    yield needed("open files", is_enough, found, f"{OPEN_FILES} are needed", f"ulimit -n {OPEN_FILES}")


def nvme_path(path: Path) -> tuple[Check, Path | None]:
    """Return the check, and the folder to measure in."""
    fix = "study doctor --nvme_path DIR, with a folder on a local drive that you may write"
    try:
        check_writable(path, shown(path), fix)
    except UserError as refusal:
        return Check("nvme path", "missing", refusal.problem.replace(f"{home_folder()}/", "~/"), fix), None
    folder = _nearest(path)
    free = shutil.disk_usage(folder).free / GIB
    found = f"{shown(path)}: writable, {free:.1f} GiB free, {_file_system(folder)}"
    check = needed("nvme path", free >= NVME_FREE_GIB, found, f"{NVME_FREE_GIB} GiB are needed", fix)
    return check, folder if check.state == "ok" else None


def _nearest(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _file_system(folder: Path) -> str:
    folder = folder.resolve()
    mounts = [one for one in psutil.disk_partitions(all=True) if folder.is_relative_to(one.mountpoint)]
    # The later of two mounts on one place is seen.
    return max(reversed(mounts), key=lambda one: len(one.mountpoint)).fstype if mounts else "unknown file system"


# The checks that need torch, DeepSpeed or the hub's library, in a process of their own (doctor_probe.py).


def _probe(ask_hub: bool, folder: Path | None, can_pin: bool) -> list[Check]:
    command = [sys.executable, "-m", "study.advisor.doctor_probe", *["--hub"] * ask_hub]
    why_not = ""
    if folder is None or not can_pin:
        why_not = f"not measured: see {'pinned memory' if folder else 'nvme path'}"
    elif (kind := _file_system(folder)) in ("tmpfs", "ramfs"):
        why_not = f"not measurable: {kind} is memory, not a drive"
    command += ["--measure_in", str(folder.absolute())] if folder and not why_not else ["--not_measured", why_not]
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


# Inside a Slurm job: its nodes, what lies between them, and whether each finds what a run needs.


def cluster() -> list[Check]:
    """Return nothing outside of a job."""
    if not is_in_job():
        return []
    folders = {"repository": REPOSITORY, "runs": Path("runs").absolute(), "cache": cache_directory()}
    try:
        if (job := current_job()) is None:
            return [Check("slurm", "ok", "a job of one node, on which runs start as they do without Slurm")]
        with ExitStack() as held:
            marks = {
                what: held.enter_context(tempfile.NamedTemporaryFile(dir=_nearest(folder))).name
                for what, folder in folders.items()
            }
            nodes = query_nodes(job, tuple(marks.values()))
        blind = {what: ", ".join(node.name for node in nodes if mark not in node.paths) for what, mark in marks.items()}
    except (UserError, OSError) as problem:
        fix = problem.fix if isinstance(problem, UserError) else _SHARE
        return [Check("slurm", "missing", getattr(problem, "problem", str(problem)), fix)]
    checks = [
        Check("slurm", "ok", f"job {job.id} has {len(nodes)} nodes; each run is one step over them"),
        Check("nodes", "ok", _by_node(nodes, _hardware_text)),
        Check("interconnect", "ok", _by_node(nodes, lambda node: ", ".join(node.networks) or "no link is known")),
    ]
    for what in ("repository", "runs"):
        found = shown(folders[what]) if blind[what] else f"{shown(folders[what])}, on all nodes"
        checks.append(needed(f"shared {what}", not blind[what], found, f"{blind[what]} sees another one", _SHARE))
    if blind["cache"]:
        found = f"{blind['cache']} has one of its own, and draws weights, prepares data and builds operators there"
        fix = "let ZERO_STUDY_CACHE name a folder that all nodes share"
        checks.append(Check("shared cache", "none", found, fix))
    else:
        checks.append(Check("shared cache", "ok", f"{shown(folders['cache'])}, on all nodes"))
    return [
        *checks,
        _on_each_node("operators of nodes", nodes, lambda node: node.operators, _BUILD),
        _on_each_node("weights of nodes", nodes, lambda node: node.weights, "study weights SUITE"),
    ]


def _hardware_text(node: Node) -> str:
    gpus = f"{len(node.gpus)} x {node.gpus[0]} {node.gpu_memory_gib[0]:.0f} GiB" if node.gpus else "no GPU"
    return f"{gpus}, {node.cores} cores of {node.cpu}, {node.host_memory_gib:.0f} GiB"


def _by_node(nodes: Sequence[Node], describe: Callable[[Node], str]) -> str:
    """Describe nodes that are alike once."""
    names: dict[str, list[str]] = {}
    for node in nodes:
        names.setdefault(describe(node), []).append(node.name)
    return "; ".join(f"{', '.join(alike)}: {text}" for text, alike in names.items())


def _on_each_node(name: str, nodes: Sequence[Node], files: Callable[[Node], list[str]], fix: str) -> Check:
    every = {each for node in nodes for each in files(node)}
    lacking = [f"{node.name} lacks {len(every) - len(files(node))}" for node in nodes if len(files(node)) < len(every)]
    found = f"{len(every)} on some node; {', '.join(lacking)}" if lacking else f"{len(every)} on each node"
    return Check(name, "ok", found) if every and not lacking else Check(name, "none", found, fix)


def strategies(checks: list[Check], gpus: int) -> Check:
    """Say which strategies can train here, and what each of the others lacks. `gpus` are all that a run may use."""
    state = {check.name: check.state for check in checks}
    # NCCL is only absent, and not missing, wherever torch can be imported and has no GPU.
    if missing := [name for name in ("packages", "python", "nccl") if state[name] == "missing"]:
        return Check("strategies", "missing", f"none trains here ({', '.join(missing)}: see above)", _AS_ABOVE)
    on_gpu = state["gpus"] == "ok"
    waiting: dict[str, list[str]] = {}
    too_large: dict[int, list[str]] = {}
    for strategy in map(read_strategy, STRATEGY_NAMES):
        least = strategy.group.ranks if strategy.group else 1
        if strategy.name in WITH_REPLICAS:
            least = MIN_RANKS_WITH_REPLICAS
        if on_gpu and gpus < least:
            too_large.setdefault(least, []).append(strategy.name)
            continue
        lacks = [need for need in _needs(strategy, on_gpu) if state[need] == "missing"]
        waiting.setdefault(", ".join(lacks), []).append(strategy.name)
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
