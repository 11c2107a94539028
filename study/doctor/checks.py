"""The checks that need neither torch nor DeepSpeed: versions, compilers, memory and limits."""

from __future__ import annotations

import dataclasses
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from study.host.memory import host_memory
from study.host.pinned import can_lock, locked_bytes
from study.spec.strategies import REPOSITORY, STRATEGY_NAMES, read_strategy

INSTALL = "make -B install"
PIP = "python -m pip install --no-build-isolation -c constraints.txt"
GIB, MIB = 2**30, 2**20

# Two ranks of 2.6 GiB each (host_peak_rss_gib of the laptop suite) where parameters are on NVMe; 0.8 elsewhere.
LAPTOP_MEMORY_GIB = 6
# DeepSpeed's shared-memory collectives write a workspace of 2 x 32 MiB and 2 x 1 MiB for each of the two ranks.
LAPTOP_SHARED_MEMORY_MIB = 2 * 66
OPEN_FILES = 1024
NVME_FREE_GIB = 1


@dataclasses.dataclass(frozen=True)
class Check:
    """`missing` is what `study run laptop` needs and this box lacks; `none` is absent, and no fault."""

    name: str
    state: Literal["ok", "missing", "none"]
    found: str
    fix: str = ""


def shown(path: Path) -> str:
    """As seen from the repository or the home folder: shorter, and without the user's name."""
    absolute = path.absolute()
    for start, name in ((REPOSITORY, ""), (Path.home(), "~")):
        if absolute.is_relative_to(start):
            return str(Path(name) / absolute.relative_to(start))
    return str(absolute)


def versions() -> Iterator[Check]:
    found = platform.python_version()
    try:
        wanted = metadata.metadata("zero-study")["Requires-Python"]
        requirements = metadata.requires("zero-study") or []
        from packaging.requirements import Requirement
        from packaging.specifiers import SpecifierSet
    except ImportError as error:
        yield Check("python", "ok", found)
        yield Check("packages", "missing", f"{error.name} is not installed, so nothing can train", INSTALL)
        return
    if found in SpecifierSet(wanted):
        yield Check("python", "ok", f"{found} ({wanted} is asked)")
    else:
        yield Check("python", "missing", f"{found}, and {wanted} is asked", "make -B install PYTHON=python3.11")
    lacking = []
    needed = [Requirement(line) for line in requirements]
    needed = [one for one in needed if not one.marker or one.marker.evaluate({"extra": "train"})]
    for one in needed:
        installed = _version(one.name)
        if installed is None:
            lacking.append(f"{one.name} is not installed")
        elif not one.specifier.contains(installed, prereleases=True):
            lacking.append(f"{one.name} {installed} is not {one.specifier}")
    if lacking:
        yield Check("packages", "missing", "; ".join(lacking), f"{PIP} -e '.[train,report,dev]'")
    else:
        yield Check("packages", "ok", f"all {len(needed)} that training needs are installed, in the versions it asks")
    pins = [Requirement(line) for line in _pins()]
    pins = [one for one in pins if not one.marker or one.marker.evaluate()]
    installed_pins = [(one, installed) for one in pins if (installed := _version(one.name)) is not None]
    other = [
        f"{one.name} {installed} ({str(one.specifier).lstrip('=')})"
        for one, installed in installed_pins
        if not one.specifier.contains(installed, prereleases=True)
    ]
    absent = [one.name for one in pins if _version(one.name) is None]
    said = [f"{len(installed_pins) - len(other)} of {len(pins)} as in constraints.txt"]
    said += [f"another version than tested: {', '.join(other)}"] if other else []
    said += [f"not installed: {', '.join(absent)}"] if absent else []
    yield Check("versions", "ok", "; ".join(said), f"{PIP} -e '.[train,report,dev]'" * bool(other))


def _pins() -> list[str]:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tools() -> Iterator[Check]:
    # As torch chooses it.
    compiler = os.environ.get("CXX") or "c++"
    found = _first_line(compiler, "--version")
    if found:
        yield Check("compiler", "ok", f"{compiler}: {found}")
    else:
        yield Check("compiler", "missing", f"no {compiler}, and DeepSpeed compiles with it", "apt-get install g++")
    version = _first_line("ninja", "--version")
    beside = Path(sys.executable).parent / "ninja"
    if version:
        yield Check("ninja", "ok", version)
    elif beside.exists():
        # torch asks the shell's PATH alone.
        fix = f'export PATH="{beside.parent}:$PATH"'
        yield Check("ninja", "missing", "installed, and not on PATH, where torch looks for it", fix)
    else:
        yield Check("ninja", "missing", "no ninja, and DeepSpeed builds with it", "python -m pip install ninja")


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
    if host.available_gib >= LAPTOP_MEMORY_GIB:
        yield Check("host memory", "ok", found)
    else:
        fix = "end other programs, or give the container more: docker run --memory=8g"
        yield Check("host memory", "missing", f"{found}; {LAPTOP_MEMORY_GIB} GiB are needed", fix)
    yield _pinned_memory()
    yield _shared_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    found = f"{_limit(soft)} (can be raised to {_limit(hard)})"
    yield Check("open files", "ok" if enough else "missing", found, "" if enough else f"ulimit -n {OPEN_FILES}")


def _limit(value: int, unit: int = 1) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // unit}"


def _pinned_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = f"ulimit -l is {'unlimited' if soft == resource.RLIM_INFINITY else f'{soft / MIB:.0f} MiB'}"
    wanted = max(locked_bytes(strategy) for strategy in map(read_strategy, STRATEGY_NAMES))
    if can_lock(wanted):
        return Check("pinned memory", "ok", f"{limit}; {wanted / GIB:.1f} GiB can be locked")
    found = f"{limit}; {wanted / GIB:.1f} GiB cannot be locked, as each rank's buffers for parameters on NVMe must be"
    fix = "ulimit -l unlimited (as root, or docker run --ulimit memlock=-1)"
    return Check("pinned memory", "missing", found, fix)


def _shared_memory() -> Check:
    if not Path("/dev/shm").is_dir():
        return Check("shared memory", "missing", "no /dev/shm", "docker run --shm-size=1g")
    size = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm: {size.total / GIB:.2f} GiB, {size.free / GIB:.2f} GiB free"
    if size.free >= LAPTOP_SHARED_MEMORY_MIB * MIB:
        return Check("shared memory", "ok", found)
    fix = "mount -o remount,size=1g /dev/shm (or docker run --shm-size=1g)"
    return Check("shared memory", "missing", f"{found}; {LAPTOP_SHARED_MEMORY_MIB} MiB are needed", fix)


def nvme_path(path: Path) -> tuple[Check, Path | None, str]:
    """The check, the folder to measure in (None where there is none), and its file system."""
    fix = "study doctor --nvme_path DIR, with a folder on a local drive that you may write"
    try:
        folder = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not folder.is_dir():
            found = f"{shown(path)} cannot be a folder: {shown(folder)} is a file"
            return Check("nvme path", "missing", found, fix), None, ""
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return Check("nvme path", "missing", f"{shown(path)} is not writable ({error.strerror})", fix), None, ""
    kind = _file_system(folder.resolve())
    found = f"{shown(path)}: writable, {free:.1f} GiB free, {kind}"
    if free < NVME_FREE_GIB:
        return Check("nvme path", "missing", f"{found}; {NVME_FREE_GIB} GiB are needed", fix), None, kind
    return Check("nvme path", "ok", found), folder, kind


def _file_system(folder: Path) -> str:
    mounts = [one for one in psutil.disk_partitions(all=True) if folder.is_relative_to(one.mountpoint)]
    # Of two mounts on one place the later one is seen.
    return max(reversed(mounts), key=lambda one: len(one.mountpoint)).fstype if mounts else "unknown file system"


def strategies(checks: list[Check]) -> Check:
    """Which strategies the lines above leave, and what each of the others waits for."""
    state = {check.name: check.state for check in checks}
    # NCCL is only absent, and not missing, wherever torch can be imported and has no GPU.
    missing = [name for name in ("packages", "python", "nccl") if state[name] == "missing"]
    if missing:
        return Check("strategies", "missing", f"none trains here ({', '.join(missing)}: see above)", INSTALL)
    on_gpu = state["gpus"] == "ok"
    left: list[str] = []
    waiting: dict[str, list[str]] = {}
    for name in STRATEGY_NAMES:
        strategy = read_strategy(name)
        offloads = any(strategy.offload_device(what) for what in ("optimizer", "param"))
        # Without a GPU DeepSpeed's ranks talk through an operator that is compiled, too.
        needs = ["compiler", "ninja"] if strategy.deepspeed and (offloads or not on_gpu) else []
        needs += ["operators"] if strategy.deepspeed else []
        needs += ["nvcc"] if on_gpu and offloads else []
        needs += ["shared memory"] if strategy.deepspeed and not on_gpu else []
        needs += ["libaio", "nvme path", "pinned memory"] if strategy.uses_nvme else []
        if lacks := [need for need in needs if state[need] == "missing"]:
            waiting.setdefault(", ".join(lacks), []).append(name)
        else:
            left.append(name)
    devices = "on its GPUs" if on_gpu else "on its cores, over gloo; suites that require GPUs are refused"
    if not waiting:
        return Check("strategies", "ok", f"all {len(left)} train {devices}")
    found = f"{len(left)} of {len(STRATEGY_NAMES)} train {devices} ({', '.join(left)}); not "
    found += "; not ".join(f"{', '.join(names)}, for want of: {lacks}" for lacks, names in waiting.items())
    return Check("strategies", "missing", found, "as the lines above say")
