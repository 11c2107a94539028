"""The packages that `study releases` judges, and whether the grid of releases has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from study.compositions.matrix import Matrix
from study.config.precisions import computing_type
from study.config.strategies import read_strategy
from study.releases.causes import PACKAGES, Cause, known_faults

# Exit statuses, next to 0: no fault was found.
FAULTY, UNTESTED = 1, 3
# Precisions of the command line, as the records name them.
PRECISIONS = {"fp32": "fp32", "bf16": "bf16-engine"}
# Marks strategies without a verdict in the grid.
NOT_RUN = "not run"
# Packages besides DeepSpeed whose releases decide whether a stack was tested.
_PAIRED = ("accelerate", "torch")


@dataclasses.dataclass(frozen=True)
class JudgedStack:
    """The packages, the precision and the strategy that are judged; without a strategy every tested one."""

    deepspeed: str
    accelerate: str
    torch: str
    transformers: str
    precision: str
    strategy: str | None = None

    @property
    def versions(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in PACKAGES}

    @property
    def short_precision(self) -> str:
        """The precision as the command line names it."""
        return computing_type(self.precision)

    def known_faults(self, deepspeed: str) -> list[Cause]:
        """Return the faults of a release of DeepSpeed, with the other packages of this stack."""
        return [
            cause
            for cause in known_faults(self.versions | {"deepspeed": deepspeed}, on_gpu=True)
            if self.strategy in (None, *cause.strategies)
            and (not cause.precisions or self.precision in cause.precisions)
        ]


def find_untested(document: Mapping[str, Any], stack: JudgedStack) -> str | None:
    """Return what of a stack was not tested, and the nearest that was; None if it was tested."""
    if stack.strategy and read_strategy(stack.strategy).deepspeed is None:
        return f"not tested: {stack.strategy} runs without DeepSpeed"
    trained = [case for case in document["trained"] if case["deepspeed"] == stack.deepspeed]
    if not trained:
        is_in_grid = any(row["DeepSpeed"] == stack.deepspeed for row in document["releases"])
        return "does not run with the packages of the test" if is_in_grid else "not tested"
    if stack.strategy:
        trained = [case for case in trained if stack.strategy in case["strategies"]]
    if not trained:
        return f"{stack.strategy} was not tested"
    same = [case for case in trained if all(is_same_release(case[name], getattr(stack, name)) for name in _PAIRED)]
    if not same:
        pairs = dict.fromkeys(" and ".join(f"{name} {case[name]}" for name in _PAIRED) for case in trained)
        return f"not tested with these packages, but with {', or '.join(pairs)}"
    precisions = {case["precision"] for case in same}
    if stack.precision not in precisions:
        elsewhere = " and ".join(name for name, recorded in PRECISIONS.items() if recorded in precisions)
        return f"not tested in {stack.short_precision}, but in {elsewhere}"
    return None


def is_same_release(tested: str, requested: str) -> bool:
    """Whether two versions are of one release; a local label, such as +cu129, does not change it."""
    from packaging.version import Version

    return Version(tested).public == Version(requested).public


def has_releases(matrix: Matrix, versions: Mapping[str, str | None]) -> bool:
    """Whether a matrix was run with these releases of packages."""
    return all(is_same_release(matrix.stack[name] or "0", version or "0") for name, version in versions.items())
