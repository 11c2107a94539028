"""Which releases are installed, and which of Accelerate and DeepSpeed train together as DDP does.

Some pairs divide the gradients of an accumulated step twice, or drop micro-batches, and say nothing: losses move, and
nothing else shows it. So a pair counts once the suite `equivalence` has passed on it, with accumulation.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from study.errors import Unsupported
from study.spec.strategies import Strategy

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
