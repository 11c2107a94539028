"""Read the releases of a run's libraries, import them, and define stacks of other releases.

A stack is releases of DeepSpeed and other packages, each in a folder that precedes the installed ones. `study prepare
releases` makes the folders (study/releases/prepare.py); a cell names its stack, and is launched with the folders first
on PYTHONPATH and with its own operators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from study.config import errors, strategies, yaml_sections
from study.config.places import IMPORT_ROOT, PACKAGE, install_command
from study.host.folders import cache_directory
from study.host.machine import operator_build_folder
from study.records import directory, schema

# Pairs of Accelerate and DeepSpeed that compute the gradients of DDP; pyproject.toml allows more, so that pip keeps the
# installed ones. Some pairs divide gradients of an accumulated step twice, or drop micro-batches, without a message:
# only the losses differ. Therefore a pair is listed once the suite `equivalence` has passed with it, with accumulation.
VERIFIED = (("1.15.0", "0.19.8"),)
# 1 allows other pairs; their records contain it.
UNVERIFIED_VARIABLE = "ZERO_STUDY_UNVERIFIED_PAIR"
# 1 in the runs of `study verify`, which import the engines and base packages only, and so evaluate nothing.
ENGINES_ONLY_VARIABLE = "ZERO_STUDY_ENGINES_ONLY"
# Packages that every run imports, whatever its strategy, and those that an evaluation imports as well.
ENGINE_PACKAGES = ("accelerate", "torch", "transformers", "filelock")
TRAINING_PACKAGES = (*ENGINE_PACKAGES, "datasets", "evaluate")
# DeepSpeed's build fails with a GPU and without a CUDA toolkit, unless this prevents the check.
BUILDS_DEEPSPEED = "DS_IGNORE_CUDA_DETECTION=1"


def package_version(name: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def is_engines_only() -> bool:
    """Whether runs import nothing besides the engines and base packages."""
    return os.environ.get(ENGINES_ONLY_VARIABLE) == "1"


def check_training_packages() -> None:
    """Raise UserError if a package that every run imports is not installed."""
    needed = ENGINE_PACKAGES if is_engines_only() else TRAINING_PACKAGES
    if missing := [name for name in needed if package_version(name) is None]:
        fix = f"run: {install_command('train', missing=missing)}"
        raise errors.UserError(f"not installed here: {', '.join(missing)}", fix)


def is_at_least(name: str, release: str) -> bool:
    """Whether the installed release of a package is at least this one."""
    from packaging.version import Version

    installed = package_version(name)
    return installed is not None and Version(installed) >= Version(release)


def unverified_pair() -> str | None:
    """Return the installed pair as text; None if it is verified."""
    pair = (package_version("accelerate"), package_version("deepspeed"))
    return None if pair in VERIFIED else f"accelerate {pair[0]} with deepspeed {pair[1]}"


def pair_fix() -> str:
    """Return the command that installs the newest verified pair."""
    accelerate, deepspeed = VERIFIED[-1]
    install = f"{BUILDS_DEEPSPEED} python -m pip install --no-build-isolation"
    return f"{install} accelerate=={accelerate} deepspeed=={deepspeed}"


def check_verified_pair(strategy: strategies.Strategy) -> None:
    """Raise Unsupported for DeepSpeed in an unverified pair, unless UNVERIFIED_VARIABLE allows it."""
    if strategy.deepspeed is None or os.environ.get(UNVERIFIED_VARIABLE) == "1":
        return
    if pair := unverified_pair():
        fix = f"{pair_fix()}; or set {UNVERIFIED_VARIABLE}=1 to run an experiment, as which its record is marked"
        raise errors.Unsupported(f"{pair} has not been shown to train as DDP does", fix)


STACK_FILE = PACKAGE / "releases" / "stacks.yaml"
# Name of a run's stack, which its record contains.
STACK_VARIABLE = "ZERO_STUDY_STACK"
# Marks a complete layer: the packages that pip installed there, and their archives.
LAYER_FILE = "layer.json"


@dataclasses.dataclass(frozen=True)
class Stack:
    """Releases that differ from the installed ones. Each is a layer, which several stacks can share."""

    name: str
    releases: Mapping[str, str]

    @property
    def layers(self) -> list[str]:
        return [f"{package}-{version}" for package, version in self.releases.items()]

    def install_error(self) -> str | None:
        """Return pip's message if it could not install a layer; raise UserError if a layer is not prepared."""
        states = {layer: layer_state(cache_directory(), layer) for layer in self.layers}
        for layer, state in states.items():
            if problem := state.get("problem"):
                return f"{layer} is not installable: {problem}"
        if missing := [layer for layer, state in states.items() if "sha256" not in state]:
            raise errors.UserError(f"the stack {self.name} lacks {', '.join(missing)}", "run: study prepare releases")
        return None

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that a launch under this stack sets, in addition to inherited ones."""
        cache = cache_directory()
        folders = [str(layer_folder(cache, layer)) for layer in self.layers]
        # Compiled operators depend on the releases of torch and DeepSpeed alone.
        operators = self.name if self.releases.keys() & {"torch", "deepspeed"} else ""
        # With this package's root, so that a worktree's `study` precedes the installed one.
        return {
            "PYTHONPATH": os.pathsep.join([*folders, str(IMPORT_ROOT), *filter(None, [inherited.get("PYTHONPATH")])]),
            "TORCH_EXTENSIONS_DIR": str(operator_build_folder(cache, operators)),
            STACK_VARIABLE: self.name,
            UNVERIFIED_VARIABLE: "1",
        }


def layer_state(cache: Path, layer: str) -> dict[str, Any]:
    """Return the digest of a layer's archive, or why its installation failed; empty if it is not prepared."""
    try:
        return directory.read_json(layer_folder(cache, layer) / LAYER_FILE)
    except schema.RecordError:
        return {}


def layer_folder(cache: Path, layer: str) -> Path:
    return cache / "stacks" / layer


@functools.cache
def stacks() -> dict[str, Stack]:
    """Return the stacks by name. `today` stacks differ from the installation in DeepSpeed, the others in more."""
    file = yaml_sections.load_package_yaml(STACK_FILE.read_text(encoding="utf-8"))
    result = {release: Stack(release, {"deepspeed": release}) for release in file["today"]}
    for deepspeed, packages in file["then"].items():
        result[f"{deepspeed}-then"] = Stack(f"{deepspeed}-then", {"deepspeed": deepspeed, **packages})
    for deepspeed, releases in file["newer_torch"].items():
        for torch in releases:
            name = f"{deepspeed}-torch{torch}"
            result[name] = Stack(name, {"deepspeed": deepspeed, "torch": torch})
    return result


def deepspeed_release(name: str) -> str:
    """Return the release of DeepSpeed in a stack."""
    return name.partition("-")[0]


def is_of_today(name: str) -> bool:
    """Whether a stack has the installed releases of all packages but DeepSpeed."""
    return name == deepspeed_release(name)


def release_key(name: str) -> tuple[int, ...]:
    """Return the sort key of a release or of a stack's name."""
    return tuple(map(int, re.findall(r"\d+", name)))


def describe_stack() -> dict[str, Any] | None:
    """Return this process's stack for its record: the layers, and the digests of their archives."""
    stack = stacks().get(os.environ.get(STACK_VARIABLE, ""))
    if stack is None:
        return None
    cache = cache_directory()
    return {"name": stack.name, "sha256": {layer: layer_state(cache, layer).get("sha256") for layer in stack.layers}}


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection, which would visit the million objects of imports and free none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        # Later collections do not visit these objects.
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def import_libraries(strategy: strategies.Strategy) -> None:
    """Import a run's libraries at once: most of its start-up time, on every rank."""
    # transformers and evaluate import parts of scipy, which no run here uses. Therefore it is hidden from them, unless
    # scikit-learn is installed, which needs scipy, and which some versions of transformers import.
    if importlib.util.find_spec("sklearn") is None:
        sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]
    # transformers imports it, and it fails with a torch that it was not built for, as in a notebook whose torch was
    # replaced. No text model uses it.
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    with without_gc():
        for library in ("accelerate", "transformers.modeling_utils", "transformers.generation"):
            importlib.import_module(library)
        if strategy.deepspeed is not None:
            importlib.import_module("deepspeed")
