"""`study doctor`: check the machine and print a row per check; exit status 1 if a requirement is missing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from study.config.errors import UserError
from study.config.places import IMPORT_ROOT, IS_CHECKOUT, REPOSITORY, WORKING_FOLDER, install_command
from study.config.printing import TextTable, print_result
from study.config.strategies import MIN_RANKS_WITH_REPLICAS, STRATEGY_NAMES, WITH_REPLICAS, read_strategy
from study.host.folders import cache_directory, check_writable, folder_argument, home_folder, nearest_existing
from study.host.machine import detect_machine, visible_gpus
from study.host.memory import GIB, MIB, can_lock, host_memory, required_pinned_bytes, wsl_limit
from study.host.slurm import Node, current_job, is_in_job, job_resources, query_nodes
from study.host.stacks import BUILDS_DEEPSPEED, VERIFIED, package_version, pair_fix, unverified_pair
from study.records.outcome import MORE_SHARED_MEMORY
from study.releases.causes import PACKAGES, known_faults

PINS = shlex.quote("constraints.txt" if IS_CHECKOUT else str(REPOSITORY / "constraints.txt"))
INSTALL = "make -B install" if IS_CHECKOUT else f"{BUILDS_DEEPSPEED} {install_command('train')}"
INSTALL_ALL = f"{BUILDS_DEEPSPEED} python -m {install_command('train,report,dev', f'--no-build-isolation -c {PINS}')}"
# Two ranks of 2.6 GiB each (host_peak_rss_gib of the laptop suite) with parameters on NVMe, and of 0.8 without.
LAPTOP_MEMORY_GIB = 6
# NCCL's ranks communicate through it; a container has 64 MiB by default. Ranks without a GPU do not use it.
NCCL_SHARED_MEMORY_MIB = 132
OPEN_FILES = 1024
NVME_FREE_GIB = 1
# Importing torch and DeepSpeed takes seconds, and so does loading an operator; a cold disk may need ten times that.
PROBE_LIMIT_S = 180
# Names of packages in one fact.
_MAX_LISTED = 8
# Letters of a fact in one line of a screen of 120 columns.
_ROOM = 98
_PROBED = ("gpus", "nccl", "nvcc", "hub", "libaio", "operators", "cpu adam", "nvme bandwidth")
_AS_ABOVE = "see the lines above"
# Requirements of every run; strategies, the hub, NVMe and a CUDA toolkit have their own.
_OF_EVERY_RUN = ("python", "packages", "host memory", "open files", "slurm")
_SHARE = "start from a folder that all nodes share"


@dataclasses.dataclass(frozen=True)
class Check:
    """Result of one check. `missing`: required by `study run laptop`, but absent; `none`: optional and absent."""

    name: str
    state: Literal["ok", "missing", "none"]
    found: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--details", action="store_true", help="print long facts completely on a terminal")
    add("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    nvme = WORKING_FOLDER / "nvme_offload"
    add("--nvme_path", type=folder_argument, default=nvme, metavar="DIR", help="measure NVMe bandwidth in this folder")
    add("--hub", action="store_true", help="send a request to the hub; by default nothing is sent")


def run(options: argparse.Namespace) -> int:
    """Print all checks; return 1 if a requirement is missing, else 0."""
    checks = [*versions(), *tools(), *memory()]
    can_pin = next(check.state for check in checks if check.name == "pinned memory") == "ok"
    nvme, folder = nvme_path(options.nvme_path)
    if package_version("torch") is None:
        # One cause has one fix: that of the packages.
        checks += [nvme, *(Check(name, "none", "not checked: torch is not installed") for name in _PROBED)]
    else:
        checks += [nvme, *_probe(options.hub, folder, can_pin)]
    try:
        gpus = job_resources().gpus
    except UserError:  # which the checks of the cluster report
        gpus = detect_machine().gpus
    checks += [*cluster(), strategies(checks, gpus)]
    missing = list(dict.fromkeys(check.name for check in checks if check.state == "missing"))
    rows: list[tuple[str, str, str]] = []
    is_short = sys.stdout.isatty() and not options.details
    for check in checks:
        is_cut = is_short and check.state != "missing" and len(check.found) > _ROOM
        rows.append((check.state, check.name, f"{check.found[: _ROOM - 3]}..." if is_cut else check.found))
        rows += [("", "", f"-> {check.fix}")] if check.fix else []
    page = (verdict(checks, missing), "", TextTable(("", "", ""), rows))
    print_result(options.json, lambda: {"checks": [dataclasses.asdict(check) for check in checks]}, page)
    return 1 if missing else 0


def verdict(checks: Sequence[Check], missing: Sequence[str]) -> str:
    """Say whether the study can run here; strategies that lack something end as unsupported, and the others run."""
    gpus = next(check for check in checks if check.name == "gpus")
    by_missing = _by_missing(checks, STRATEGY_NAMES)
    # Without packages nothing else can be checked, and GPUs are needed if the driver shows some.
    lacking = [name for name in missing if name in _OF_EVERY_RUN]
    lacking += ["gpus"] if gpus.state == "missing" and "packages" not in lacking else []
    ready = "Ready for study run laptop"
    if lacking or not by_missing.get(""):
        ready = f"Not ready for study run laptop: missing {', '.join(lacking or by_missing)}"
    elif lacks := "; ".join(f"{', '.join(names)} (missing: {lack})" for lack, names in by_missing.items() if lack):
        ready += f" without {lacks}"
    return f"{ready}; {'GPUs: ' + gpus.found if gpus.state == 'ok' else 'no GPU found'}"


def _by_missing(checks: Sequence[Check], names: Iterable[str]) -> dict[str, list[str]]:
    """Return strategies by the requirements that they lack; those that lack none under an empty text."""
    state, by_missing = {check.name: check.state for check in checks}, dict[str, list[str]]()
    on_gpu = state["gpus"] == "ok"
    for strategy in map(read_strategy, names):
        needs = ["pairing", "operators"]
        # Without a GPU, DeepSpeed's ranks communicate through a compiled operator, too.
        needs += ["compiler", "ninja"] if strategy.offloads or not on_gpu else []
        needs += ["nvcc"] if on_gpu and strategy.uses_nvme else []
        needs += ["shared memory"] if on_gpu else []
        needs += ["libaio", "nvme path", "pinned memory"] if strategy.uses_nvme else []
        lacks = [need for need in needs if strategy.deepspeed and state.get(need) == "missing"]
        by_missing.setdefault(", ".join(lacks), []).append(strategy.name)
    return by_missing


def needed(name: str, is_enough: bool, text: str, problem: str, fix: str) -> Check:
    """Return a check that is ok if `is_enough`, else missing with the problem and its fix."""
    return Check(name, "ok", text) if is_enough else Check(name, "missing", f"{text}; {problem}", fix)


def shown(path: Path) -> str:
    """Return the path relative to the repository or the home folder: shorter, and without the user's name."""
    absolute = path.absolute()
    for start, name in ((REPOSITORY, ""), (home_folder(), "~")):
        if start is not None and absolute.is_relative_to(start):
            return str(Path(name) / absolute.relative_to(start))
    return str(absolute)


# Checks that need neither torch nor DeepSpeed: versions, compilers, memory and limits.


def versions() -> Iterator[Check]:
    """Yield the checks of Python, the packages and known faults of their versions."""
    python = platform.python_version()
    try:
        required = metadata.metadata("zero-study")["Requires-Python"]
        packages, packages_fix = _compare("that training needs", metadata.requires("zero-study") or [], "train")
    except ImportError as error:
        yield Check("python", "ok", python)
        yield Check("packages", "missing", f"{error.name} is not installed, so nothing can train", INSTALL)
        return
    fix = "make -B install PYTHON=python3.11" if IS_CHECKOUT else "install it into an environment of a newer Python"
    yield needed("python", python in SpecifierSet(required), python, f"{required} is needed", fix)
    yield Check("packages", "missing" if packages_fix else "ok", packages, packages_fix)
    if absent := [name for name in ("accelerate", "deepspeed") if package_version(name) is None]:
        are = "are" if len(absent) > 1 else "is"
        yield Check("pairing", "missing", f"{' and '.join(absent)} {are} not installed", _AS_ABOVE)
    else:
        pair = unverified_pair()
        text = pair or " with ".join(map(" ".join, zip(("accelerate", "deepspeed"), VERIFIED[-1], strict=True)))
        problem = "no run has shown that it computes the gradients of DDP"
        yield needed("pairing", pair is None, text, problem, pair_fix())
    for cause in known_faults({name: package_version(name) for name in PACKAGES}, bool(visible_gpus())):
        yield Check("known fault", "missing", f"{cause.where}: {cause.title}", cause.instead or pair_fix())
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    # Untested versions are not a fault.
    pinned = [line for line in pins if line and not line.startswith("#")]
    yield Check("versions", "ok", _compare("of constraints.txt", pinned)[0])


def _compare(which: str, requirements: list[str], extra: str = "") -> tuple[str, str]:
    """Return a summary of the packages in the required version, in another one and missing; and the fix."""
    evaluated = {"extra": extra}
    applicable = [item for item in map(Requirement, requirements) if not item.marker or item.marker.evaluate(evaluated)]
    # Python imports the first of several with one name on its path. Remains of an interrupted pip have no name.
    packages = reversed(list(metadata.distributions()))
    installed = {canonicalize_name(package.name): package.version for package in packages if package.name}
    mismatched, absent = list[str](), list[str]()
    for item in applicable:
        version = installed.get(canonicalize_name(item.name))
        if version is None:
            absent.append(item.name)
        elif not item.specifier.contains(version, True):
            mismatched.append(f"{item.name} {version}")
    right = len(applicable) - len(mismatched) - len(absent)
    text = f"{right} of {len(applicable)} packages {which} are installed in the required version"
    text += f"; in another one: {_list(mismatched)}" if mismatched else ""
    text += f"; not installed: {_list(absent)}" if absent else ""
    if not extra or not (mismatched or absent):
        return text, ""
    # A build without isolation needs the torch of this environment.
    return text, INSTALL if "torch" in absent else INSTALL_ALL


def _list(packages: list[str]) -> str:
    """Return the first of the packages, and how many more there are."""
    hidden = len(packages) - _MAX_LISTED
    more = f" and {hidden} more" if hidden > 0 else ""
    return f"{', '.join(packages[:_MAX_LISTED])}{more}"


def tools() -> Iterator[Check]:
    """Yield the checks of the C++ compiler and of ninja."""
    # As torch selects it.
    compiler = os.environ.get("CXX") or "c++"
    version = _first_line(compiler)
    problem, fix = "DeepSpeed compiles with it", "apt-get install g++"
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    if version and not has_headers:
        problem, fix = "Python.h, which DeepSpeed's operators include, is missing", "apt-get install python3-dev"
    text = f"{compiler}: {version or 'not found'}"
    yield needed("compiler", bool(version) and has_headers, text, problem, fix)
    # A run adds the folder of this Python to its PATH (study/host/operators.py).
    ninja = _first_line("ninja") or _first_line(str(Path(sys.executable).parent / "ninja"))
    problem, fix = "DeepSpeed builds with it", "python -m pip install ninja"
    yield needed("ninja", bool(ninja), ninja or "not found", problem, fix)


def _first_line(program: str) -> str:
    try:
        result = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip().partition("\n")[0]


def memory() -> Iterator[Check]:
    """Yield the checks of host memory, pinned memory, shared memory and open files."""
    host = host_memory()
    limited = "within a cgroup's limit" if host.is_limited else "no cgroup limit"
    text = f"{host.total_gib:.1f} GiB, {host.available_gib:.1f} GiB available, {limited}"
    text += f"; {wsl}" if (wsl := wsl_limit()) else ""
    fix = "end other programs, or give the container more: docker run --memory=8g"
    is_enough = host.available_gib >= LAPTOP_MEMORY_GIB
    yield needed("host memory", is_enough, text, f"{LAPTOP_MEMORY_GIB} GiB are needed", fix)

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = f"ulimit -l is {'unlimited' if limit == resource.RLIM_INFINITY else f'{limit / MIB:.0f} MiB'}"
    required = max(required_pinned_bytes(strategy) for strategy in map(read_strategy, STRATEGY_NAMES))
    problem = f"{required / GIB:.1f} GiB cannot be pinned, which each rank needs for parameters on NVMe"
    fix = "ulimit -l unlimited (as root, or docker run --ulimit memlock=-1)"
    yield needed("pinned memory", can_lock(required), text, problem, fix)

    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    is_enough = len(visible_gpus()) < 2 or free >= NCCL_SHARED_MEMORY_MIB * MIB
    text = f"/dev/shm: {free / GIB:.2f} GiB free"
    yield needed("shared memory", is_enough, text, f"{NCCL_SHARED_MEMORY_MIB} MiB are needed", MORE_SHARED_MEMORY)

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = f"{'unlimited' if limit == resource.RLIM_INFINITY else limit} files"
    is_enough = limit == resource.RLIM_INFINITY or limit >= OPEN_FILES
    yield needed("open files", is_enough, text, f"{OPEN_FILES} are needed", f"ulimit -n {OPEN_FILES}")


def nvme_path(path: Path) -> tuple[Check, Path | None]:
    """Return the check, and the folder to measure in; None if it is not usable."""
    fix = "study doctor --nvme_path DIR, with a writable folder on a local disk"
    try:
        check_writable(path, shown(path), fix)
    except UserError as refusal:
        return Check("nvme path", "missing", refusal.problem.replace(f"{home_folder()}/", "~/"), fix), None
    folder = nearest_existing(path)
    free = shutil.disk_usage(folder).free / GIB
    access = "writable" if path.exists() else "can be created"
    text = f"{shown(path)}: {access}, {free:.1f} GiB free, {_file_system(folder)}"
    check = needed("nvme path", free >= NVME_FREE_GIB, text, f"{NVME_FREE_GIB} GiB are needed", fix)
    return check, folder if check.state == "ok" else None


def _file_system(folder: Path) -> str:
    folder = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    # The later of two mounts on one path hides the earlier one.
    return max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype if mounts else "unknown file system"


# Checks that need torch, DeepSpeed or huggingface_hub, which run in a separate process (doctor_probe.py).


def _probe(ask_hub: bool, folder: Path | None, can_pin: bool) -> list[Check]:
    command = [sys.executable, "-m", "study.advisor.doctor_probe", *["--hub"] * ask_hub]
    reason = ""
    if folder is None or not can_pin:
        reason = f"not measured: see {'pinned memory' if folder else 'nvme path'}"
    elif (kind := _file_system(folder)) in ("tmpfs", "ramfs"):
        reason = f"not measurable: {kind} is memory, not a disk"
    command += ["--measure_in", str(folder.absolute())] if folder and not reason else ["--not_measured", reason]
    try:
        result = subprocess.run(command, cwd=IMPORT_ROOT, capture_output=True, timeout=PROBE_LIMIT_S)
        printed, status = result.stdout, result.returncode
        ending = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    except subprocess.TimeoutExpired as expired:
        printed, ending = expired.stdout or b"", f"did not end within {PROBE_LIMIT_S} s"
    # All lines are complete, except the last one of a killed process.
    lines = printed.decode().split("\n")[:-1]
    checks = {name: Check(name, "missing", f"no result: its process {ending}", INSTALL) for name in _PROBED}
    return list((checks | {check.name: check for check in (Check(**json.loads(line)) for line in lines)}).values())


# Checks of a Slurm job: its nodes, their interconnect, and the folders and files that each node must have.


def cluster() -> list[Check]:
    """Return the checks of a Slurm job's nodes; empty outside of a job."""
    if not is_in_job():
        return []
    folders = {"repository": WORKING_FOLDER.absolute(), "runs": Path("runs").absolute(), "cache": cache_directory()}
    try:
        if (job := current_job()) is None:
            return [Check("slurm", "ok", "a job of one node, on which runs start as without Slurm")]
        with ExitStack() as stack:
            places = map(nearest_existing, folders.values())
            markers = [stack.enter_context(tempfile.NamedTemporaryFile(dir=place)).name for place in places]
            nodes = query_nodes(job, tuple(markers))
    except (UserError, OSError) as problem:
        fix = problem.fix if isinstance(problem, UserError) else _SHARE
        return [Check("slurm", "missing", getattr(problem, "problem", str(problem)), fix)]
    checks = [
        Check("slurm", "ok", f"job {job.id} has {len(nodes)} nodes; each run is one step over them"),
        Check("nodes", "ok", _by_node(nodes, _hardware_text)),
        Check("interconnect", "ok", _by_node(nodes, lambda node: ", ".join(node.networks) or "no link was found")),
    ]
    for (what, folder), marker in zip(folders.items(), markers, strict=True):
        blind_nodes = ", ".join(node.name for node in nodes if marker not in node.paths)
        if not blind_nodes:
            checks.append(Check(f"shared {what}", "ok", f"{shown(folder)}, on all nodes"))
        elif what == "cache":
            text = f"{blind_nodes} has another one, and draws weights, prepares data and builds operators there"
            checks.append(Check("shared cache", "none", text, "set ZERO_STUDY_CACHE to a folder that all nodes share"))
        else:
            checks.append(Check(f"shared {what}", "missing", f"{shown(folder)}; {blind_nodes} has another one", _SHARE))
    for what, fix in (
        ("operators", "srun --ntasks-per-node=1 python -m study.host.operators"),
        ("weights", "study weights SUITE"),
    ):
        on_nodes: dict[str, list[str]] = {node.name: getattr(node, what) for node in nodes}
        count = len(set().union(*on_nodes.values()))
        lacking = [f"{node} lacks {count - len(names)}" for node, names in on_nodes.items() if len(names) < count]
        text = f"{count} on some node; {', '.join(lacking)}" if lacking else f"{count} on each node"
        is_ok = count > 0 and not lacking
        checks.append(Check(f"{what} of nodes", "ok" if is_ok else "none", text, "" if is_ok else fix))
    return checks


def _hardware_text(node: Node) -> str:
    gpus = f"{len(node.gpus)} x {node.gpus[0]} {node.gpu_memory_gib[0]:.0f} GiB" if node.gpus else "no GPU"
    return f"{gpus}, {node.cores} cores of {node.cpu}, {node.host_memory_gib:.0f} GiB"


def _by_node(nodes: Sequence[Node], describe: Callable[[Node], str]) -> str:
    """Return each distinct description with the names of its nodes."""
    names: dict[str, list[str]] = {}
    for node in nodes:
        names.setdefault(describe(node), []).append(node.name)
    return "; ".join(f"{', '.join(group)}: {text}" for text, group in names.items())


def strategies(checks: list[Check], gpus: int) -> Check:
    """Return the check of the strategies that can train on `gpus` GPUs, with the missing requirements of the others."""
    state = {check.name: check.state for check in checks}
    # NCCL is `none`, not `missing`, if torch can be imported and has no GPU.
    if missing := [name for name in ("packages", "python", "nccl") if state[name] == "missing"]:
        return Check("strategies", "missing", f"none trains here ({', '.join(missing)}: see above)", _AS_ABOVE)
    on_gpu, by_least = state["gpus"] == "ok", dict[int, list[str]]()
    for name in STRATEGY_NAMES:
        least = MIN_RANKS_WITH_REPLICAS if name in WITH_REPLICAS else read_strategy(name).group_size
        by_least.setdefault(least if on_gpu and gpus < least else 0, []).append(name)
    by_missing = _by_missing(checks, by_least.pop(0, []))
    trainable = by_missing.pop("", [])
    text = f"{len(trainable)} of {len(STRATEGY_NAMES)} train "
    text += "on its GPUs" if on_gpu else "on its cores, over gloo; suites that require GPUs do not run"
    # Not an error of the machine: the strategies of the study need fewer GPUs.
    larger = "".join(f"; from {least} GPUs: {', '.join(names)}" for least, names in sorted(by_least.items()))
    if not by_missing:
        return Check("strategies", "ok", text + larger)
    untrainable = "; not ".join(f"{', '.join(names)}, missing: {lacks}" for lacks, names in by_missing.items())
    text += f" ({', '.join(trainable)}); not {untrainable}{larger}"
    return Check("strategies", "missing", text, _AS_ABOVE)
