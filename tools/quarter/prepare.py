"""Fill a folder with what a GPU machine without a network lacks: wheels, this package's metadata, and its commit.

    python tools/quarter/prepare.py IMAGE.txt [--folder .quarter] [--python 3.12] [--carry NAME[==VERSION] ...]

IMAGE.txt is the output of `python3 -m pip list --format=freeze` on the GPU machine. A line without a version is taken
as any version. Wheels are those that the training extra needs and the machine lacks or has in another release, in the
versions of constraints.txt; torch and numpy are never among them. Wheels that are in the folder already are not fetched
again. Exit status 1 if something is still missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

REPOSITORY = Path(__file__).parents[2]
PROJECT = "zero-study"
# Their builds belong to the machine: others would replace CUDA libraries, or were compiled against another torch.
OF_THE_MACHINE = frozenset({"torch", "triton", "numpy"})
# The oldest and newest glibc whose wheels are accepted: manylinux_2_5 is manylinux1; Ubuntu 24.04 has 2.39.
GLIBC_MINORS = range(5, 40)
# DeepSpeed is a source distribution, whose build would fail on a machine with a GPU and without a CUDA toolkit.
BUILD_VARIABLES = {"DS_IGNORE_CUDA_DETECTION": "1"}


@dataclasses.dataclass(frozen=True)
class Target:
    """The GPU machine's Python."""

    python: str
    machine: str

    @property
    def platforms(self) -> list[str]:
        """Platform tags, the newest first."""
        names = [f"manylinux_2_{minor}_{self.machine}" for minor in reversed(GLIBC_MINORS)]
        return [*names, f"manylinux2014_{self.machine}", f"manylinux2010_{self.machine}", f"linux_{self.machine}"]

    @property
    def tags(self) -> frozenset[Tag]:
        """Tags of the wheels that it can import."""
        major, minor = map(int, self.python.split("."))
        own = cpython_tags((major, minor), platforms=self.platforms)
        pure = compatible_tags((major, minor), f"cp{major}{minor}", self.platforms)
        return frozenset([*own, *pure])

    @property
    def markers(self) -> Mapping[str, str]:
        """Environment markers of PEP 508."""
        return {
            **{name: str(value) for name, value in default_environment().items()},
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "platform_machine": self.machine,
            "sys_platform": "linux",
            "platform_system": "Linux",
            "extra": "",
        }


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A wheel in the folder."""

    file: Path
    name: str
    version: str
    tags: frozenset[Tag]
    requires_python: str
    requirements: tuple[str, ...]


def read_wheel(file: Path) -> Wheel:
    """Read the name and the metadata of a wheel."""
    name, version, _, tags = parse_wheel_filename(file.name)
    with zipfile.ZipFile(file) as archive:
        member = next(item for item in archive.namelist() if item.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(member).decode())
    requirements = tuple(metadata.get_all("Requires-Dist") or ())
    return Wheel(file, name, str(version), tags, metadata.get("Requires-Python") or "", requirements)


def read_versions(lines: Iterable[str]) -> dict[str, str]:
    """Read lines such as `name==version` and `name`, which has the version ""."""
    versions: dict[str, str] = {}
    for line in lines:
        name, _, version = line.partition(";")[0].partition("==")
        if name.strip() and not name.startswith("#"):
            versions[canonicalize_name(name.strip())] = version.strip()
    return versions


def read_pins(target: Target) -> dict[str, str]:
    """Read the versions of constraints.txt for this Python; a later line with a marker that holds wins."""
    pins: dict[str, str] = {}
    for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(dict(target.markers)):
                (pin,) = requirement.specifier
                pins[canonicalize_name(requirement.name)] = pin.version
    return pins


class Walk:
    """All requirements of the training extra, through the metadata of the wheels; the machine's are complete."""

    def __init__(self, image: Mapping[str, str], wheels: Mapping[str, Wheel], carry: Iterable[str], target: Target):
        self.image, self.wheels, self.carry, self.target = image, wheels, frozenset(carry), target
        # Names of wheels to fetch, each with the requirement that asks for it.
        self.missing: dict[str, str] = {}
        self.faults: list[str] = []
        self.used: set[str] = set()
        self._visit(PROJECT, distribution(PROJECT).requires or (), {**target.markers, "extra": "train"})

    def _visit(self, parent: str, requirements: Iterable[str], markers: Mapping[str, str]) -> None:
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(dict(markers)):
                self._require(parent, requirement)

    def _require(self, parent: str, requirement: Requirement) -> None:
        name = canonicalize_name(requirement.name)
        needs = f"{parent} needs {requirement.name}{requirement.specifier}"
        wheel = self.wheels.get(name)
        if wheel is not None:
            if not requirement.specifier.contains(wheel.version, prereleases=True):
                self.faults.append(f"{needs}, and the wheel is {wheel.version}")
            if name not in self.used:
                self.used.add(name)
                self._visit(name, wheel.requirements, self.target.markers)
            return
        version = self.image.get(name)
        is_there = version is not None and name not in self.carry
        if is_there and (not version or requirement.specifier.contains(version, prereleases=True)):
            return
        if name in OF_THE_MACHINE:
            self.faults.append(f"{needs}, and the machine has {version or 'none'}")
            return
        self.missing[name] = needs

    def check_files(self) -> Iterator[str]:
        """Yield a line for each wheel that the machine's Python cannot import or that would replace its own builds."""
        for wheel in self.wheels.values():
            if not wheel.tags & self.target.tags:
                yield f"{wheel.file.name} does not fit Python {self.target.python} on {self.target.machine}"
            elif wheel.name in OF_THE_MACHINE:
                yield f"{wheel.file.name} would replace the machine's own"
            elif not Requirement(f"python {wheel.requires_python}").specifier.contains(f"{self.target.python}.0"):
                yield f"{wheel.file.name} needs Python {wheel.requires_python}"


def read_wheels(folder: Path) -> dict[str, Wheel]:
    """Read the wheels of a folder by name; raises SystemExit for two of one package."""
    wheels: dict[str, Wheel] = {}
    for file in sorted(folder.glob("*.whl")):
        wheel = read_wheel(file)
        if wheel.name in wheels:
            sys.exit(f"error: {folder} has two wheels of {wheel.name}. To fix it: remove one.")
        wheels[wheel.name] = wheel
    return wheels


def fetch(names: Sequence[str], folder: Path, target: Target, versions: Mapping[str, str]) -> None:
    """Fetch these wheels from the package registry; build those of which it has only the source."""
    for name in names:
        pinned = f"{name}=={versions[name]}" if versions.get(name) else name
        platforms = [word for platform_tag in target.platforms for word in ("--platform", platform_tag)]
        minor = target.python.replace(".", "")
        python = ["--python-version", target.python, "--implementation", "cp", "--abi", f"cp{minor}", "--abi", "abi3"]
        quiet = ["--quiet", "--no-deps"]
        binary = ["download", *quiet, "--only-binary=:all:", *python, "--abi", "none", *platforms]
        pip = [sys.executable, "-m", "pip"]
        with tempfile.TemporaryDirectory() as scratch:
            result = subprocess.run(
                [*pip, *binary, "-d", scratch, pinned],
                capture_output=True,
                text=True,
                check=False,
            )
            if result.returncode:
                # In an isolated build without torch DeepSpeed compiles no operator, so that its wheel fits any Python.
                build = [*pip, "wheel", *quiet, "-w", scratch, pinned]
                result = subprocess.run(
                    build, capture_output=True, text=True, check=False, env=os.environ | BUILD_VARIABLES
                )
            if result.returncode:
                reason = (result.stderr.strip() or "pip failed").splitlines()[-1]
                sys.exit(
                    f"error: {pinned} cannot be fetched: {reason}. To fix it: check the network, or name a version."
                )
            (file,) = Path(scratch).glob("*.whl")
            (folder / file.name).write_bytes(file.read_bytes())
            print(f"fetched {file.name}", flush=True)


def write_metadata(folder: Path) -> None:
    """Write the metadata of the installed package, whose code travels as a checkout that nothing installs."""
    package = distribution(PROJECT)
    text = package.read_text("METADATA") or package.read_text("PKG-INFO")
    target = folder / f"{PROJECT.replace('-', '_')}-{package.version}.dist-info"
    target.mkdir(parents=True, exist_ok=True)
    (target / "METADATA").write_text(text or "", encoding="utf-8")


def write_commit(repository: Path, folder: Path) -> None:
    """Write the commit of a checkout; raises SystemExit if a tracked file is changed."""

    def git(*words: str) -> str:
        result = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"error: {repository} has no commit: {result.stderr.strip()}. To fix it: use a checkout of git.")
        return result.stdout

    changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
    if changed:
        file = changed[0].split()[-1]
        sys.exit(f"error: {file} is not committed, so records would name a wrong commit. To fix it: commit it.")
    (folder / "commit.txt").write_text(git("rev-parse", "HEAD"))


def main(words: Sequence[str] | None = None) -> int:
    """Fetch what is missing, check the folder, and print what is in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("image", type=Path, metavar="IMAGE.txt", help="`pip list --format=freeze` of the GPU machine")
    add("--folder", type=Path, default=REPOSITORY / ".quarter", help="default: .quarter in this checkout")
    add("--python", default="3.12", help="Python of the GPU machine, such as 3.12")
    add("--machine", default=platform.machine(), help="processor of the GPU machine, such as x86_64")
    carry = "also these, although the machine has them"
    add("--carry", nargs="+", default=[], metavar="NAME", help=f"{carry}; NAME==VERSION sets another version")
    options = parser.parse_args(words)
    if not re.fullmatch(r"3\.\d+", options.python):
        parser.error(f"--python {options.python} is not a version such as 3.12")
    target = Target(options.python, options.machine)
    image = read_versions(options.image.read_text(encoding="utf-8").splitlines())
    carried = read_versions(options.carry)
    versions = read_pins(target) | {name: version for name, version in carried.items() if version}
    wheels_folder = options.folder / "wheels"
    wheels_folder.mkdir(parents=True, exist_ok=True)
    while True:
        # A fetched wheel may need further ones.
        wheels = read_wheels(wheels_folder)
        walk = Walk(image, wheels, carried, target)
        if not walk.missing:
            break
        fetch(list(walk.missing), wheels_folder, target, versions)
    faults = [*walk.faults, *walk.check_files()]
    size = sum(wheel.file.stat().st_size for wheel in wheels.values())
    for name in sorted(set(wheels) - walk.used):
        print(f"note: nothing needs {wheels[name].file.name}")
    for fault in dict.fromkeys(faults):
        print(f"fault: {fault}")
    print(f"{wheels_folder}: {len(wheels)} wheels, {size / 2**20:.1f} MiB, faults: {len(faults)}", flush=True)
    write_metadata(options.folder)
    write_commit(REPOSITORY, options.folder)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
