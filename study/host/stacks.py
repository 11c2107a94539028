"""Stacks: releases of DeepSpeed and of what stands beside it, each in a folder that goes before the installed ones.

`study prepare releases` makes the folders (study/releases/prepare.py); a cell names its stack, and is launched with the
folders first on PYTHONPATH, with operators of its own. What is in no folder is the installed release.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from study.config.errors import Unsupported, UserError
from study.config.strategies import REPOSITORY, Strategy
from study.config.yaml_sections import Section, as_section, read_document
from study.host.folders import cache_directory
from study.records.directory import read_json
from study.records.schema import RecordError

# Which releases are installed, and which of Accelerate and DeepSpeed train together as DDP does.
# Some pairs divide the gradients of an accumulated step twice, or drop micro-batches, and say nothing: losses move, and
# nothing else shows it. So a pair counts once the suite `equivalence` has passed on it, with accumulation.

# Accelerate, DeepSpeed. pyproject.toml admits these and no others.
VERIFIED = (("1.15.0", "0.19.8"),)
# Where it is 1, another pair runs all the same, and its records say so.
UNVERIFIED_VARIABLE = "ZERO_STUDY_UNVERIFIED_PAIR"
# Its build fails where there is a GPU and no CUDA toolkit, unless it is kept from looking.
BUILDS_DEEPSPEED = "DS_IGNORE_CUDA_DETECTION=1"


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def is_since(name: str, release: str) -> bool:
    """Whether the installed release of a package is this one or a later one."""
    from packaging.version import Version

    found = package_version(name)
    return found is not None and Version(found) >= Version(release)


def unverified_pair() -> str | None:
    """What is installed here, where nothing shows that it trains as DDP does."""
    here = (package_version("accelerate"), package_version("deepspeed"))
    return None if here in VERIFIED else f"accelerate {here[0]} with deepspeed {here[1]}"


def pair_fix() -> str:
    accelerate, deepspeed = VERIFIED[-1]
    install = f"{BUILDS_DEEPSPEED} python -m pip install --no-build-isolation"
    return f"{install} accelerate=={accelerate} deepspeed=={deepspeed}"


def refuse_unverified_pair(strategy: Strategy) -> None:
    if strategy.deepspeed is None or os.environ.get(UNVERIFIED_VARIABLE) == "1":
        return
    if pair := unverified_pair():
        raise Unsupported(
            f"{pair} has not been shown to train as DDP does",
            f"{pair_fix()}; or set {UNVERIFIED_VARIABLE}=1 to run an experiment, which its record then is called",
        )


STACK_FILE = REPOSITORY / "study" / "releases" / "stacks.yaml"
# The stack of a run, by name: its record says it.
STACK_VARIABLE = "ZERO_STUDY_STACK"
# In a layer's folder once it is whole: what pip installed there, and from which archives.
LAYER_FILE = "layer.json"
# Behind the name of a stack that has more of its release's own time than DeepSpeed.
THEN = "-then"
PACKAGES = ("deepspeed", "accelerate", "transformers", "datasets", "torch")
_MOST = 1000
_VERSION = re.compile(r"\d+(\.\d+)+")


@dataclasses.dataclass(frozen=True)
class Stack:
    """`releases` differ from the installed ones; each is a layer of its own, which stacks share."""

    name: str
    releases: Mapping[str, str]

    @property
    def layers(self) -> list[str]:
        return [f"{package}-{version}" for package, version in self.releases.items()]

    def why_not(self) -> str | None:
        """What pip said where it could not install some layer; refuses a stack that nobody has made yet."""
        states = {layer: layer_state(cache_directory(), layer) for layer in self.layers}
        for layer, state in states.items():
            if state.problem:
                return f"{layer} is not installable: {state.problem}"
        if missing := [layer for layer, state in states.items() if not state.is_there]:
            raise UserError(f"the stack {self.name} lacks {', '.join(missing)}", "run: study prepare releases")
        return None

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What a launch under this stack has in its environment, beside or instead of what it inherits."""
        cache = cache_directory()
        folders = [str(layer_folder(cache, layer)) for layer in self.layers]
        # The repository too: a worktree's own study goes before the installed one.
        return {
            "PYTHONPATH": os.pathsep.join([*folders, str(REPOSITORY), *filter(None, [inherited.get("PYTHONPATH")])]),
            # Operators are compiled against one torch from one release's sources.
            "TORCH_EXTENSIONS_DIR": str(cache / "operators" / f"stack-{self.name}"),
            STACK_VARIABLE: self.name,
            UNVERIFIED_VARIABLE: "1",
        }


@dataclasses.dataclass(frozen=True)
class LayerState:
    """Of a layer's folder: the digest of the archive it was made from, or why it could not be."""

    sha256: str | None = None
    problem: str | None = None

    @property
    def is_there(self) -> bool:
        return self.sha256 is not None


def layer_state(cache: Path, layer: str) -> LayerState:
    try:
        document = read_json(layer_folder(cache, layer) / LAYER_FILE)
    except RecordError:
        return LayerState()
    return LayerState(document.get("sha256"), document.get("problem"))


def layer_folder(cache: Path, layer: str) -> Path:
    return cache / "stacks" / layer


@functools.cache
def stacks() -> dict[str, Stack]:
    """By name. `today` stacks differ from what is installed in DeepSpeed alone; `then` has more of its time."""
    top = as_section(read_document(STACK_FILE, Section, _MOST), str(STACK_FILE), ("today", "then"), Section)
    top.need("today", "then")
    found = {}
    if not isinstance(top["today"], list):
        raise top.refusal("today", "is no list", "list releases of DeepSpeed")
    for release in top["today"]:
        found[_version(top, "today", release)] = Stack(release, {"deepspeed": release})
    then = as_section(top["then"], top.place_of("then"), list(top["then"]), Section)
    for deepspeed in then:
        beside = as_section(then[deepspeed], then.place_of(deepspeed), PACKAGES[1:], Section)
        own = {package: _version(beside, package, version) for package, version in beside.items()}
        name = f"{_version(then, deepspeed, deepspeed)}{THEN}"
        found[name] = Stack(name, {"deepspeed": deepspeed, **own})
    return found


def _version(section: Section, key: str, version: Any) -> str:
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise section.refusal(key, f"is {version!r}", "write a release such as 0.18.9")
    return version


def release_order(name: str) -> tuple[int, ...]:
    """Of a release, or of a stack by name: what sorts it."""
    return tuple(map(int, re.findall(r"\d+", name)))


def describe_stack() -> dict[str, Any] | None:
    """Of this process, for its record: the layers, and the digests of the archives that they were made from."""
    stack = stacks().get(os.environ.get(STACK_VARIABLE, ""))
    if stack is None:
        return None
    cache = cache_directory()
    return {"name": stack.name, "sha256": {layer: layer_state(cache, layer).sha256 for layer in stack.layers}}
