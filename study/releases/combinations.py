"""`study releases --features A,B`: the stored answer for a combination of features on a stack."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence

from study.compositions.answers import (
    fault_under_accelerate,
    look_up_answer,
    other_loop_line,
    read_matrices,
    read_other_matrices,
)
from study.compositions.command import feature_table
from study.compositions.features import Combination
from study.compositions.matrix import Matrix
from study.config.errors import UserError
from study.config.printing import print_page
from study.config.strategies import STRATEGY_NAMES
from study.host.stacks import package_version, release_key
from study.releases.causes import GRID, Cause, read_causes
from study.releases.judge import FAULTY, UNTESTED, JudgedStack, find_untested, has_releases

# Packages that decide whether a stack was tested.
_PACKAGES = ("deepspeed", "accelerate", "torch")
# Exit status and words of each kind of answer.
_STATUS = {"right": 0, "by_design": 0, "wrong": FAULTY, "error": FAULTY, "pairs": UNTESTED, "untested": UNTESTED}
_WORDS = {
    "right": "right",
    "by_design": "differs as documented",
    "wrong": "wrong",
    "error": "ends with an error",
    "pairs": "not tested as a whole",
    "untested": "not tested",
}
# Features of the trainings of the grid of releases, besides the stage; all of them clip.
_IN_GRID = {"accelerate", "accumulation", "clipping", "bf16", "cpu_adam", "optimizer_cpu", "all_cpu"}
_HOW = "tested on two to four CPU ranks, in three steps of a tiny model"


def judge_features(options: argparse.Namespace) -> int:
    """Print the answer of the stored matrices for a combination, and return the exit status."""
    if options.features is None:
        print_page([feature_table()])
        return 0
    status, lines = answer_features(options)
    print_page(lines)
    return status


def answer_features(options: argparse.Namespace) -> tuple[int, list[str]]:
    """Return the exit status and the lines of the answer for a combination."""
    _check(options)
    matrices = list(read_matrices())
    newest = matrices[0]
    versions = {"deepspeed": options.release, "accelerate": options.accelerate, "torch": options.torch}
    for name in _PACKAGES:
        versions[name] = versions[name] or package_version(name) or newest.stack[name]
    request = f"{options.features.name} with {', '.join(f'{name} {version}' for name, version in versions.items())}"
    command = f"run: study verify --features {options.features.name}"
    if causes := _known_causes(options.features, versions, newest):
        described = "; ".join(f"{cause.title}{_fixed_in(cause)}" for cause in causes)
        only_errors = all(cause.ends_training for cause in causes)
        outcome = _WORDS["error" if only_errors else "wrong"]
        source = "by the causes of `study releases`, which has their sources"
        return FAULTY, [f"{request}: {outcome}: {described}", source]
    every_matrix = [*matrices, *read_other_matrices()]
    tested = next((matrix for matrix in every_matrix if has_releases(matrix, versions)), None)
    if tested is None and _is_in_grid(options.features, versions, newest):
        return 0, [f"{request}: right", "by the grid of `study releases`: two CPU ranks, with clipping"]
    if tested is None:
        nearest = _format_answer(options.features, _next_newer(every_matrix, versions, newest))
        return UNTESTED, [f"{request}: not tested; {command}", nearest, _HOW]
    answer = look_up_answer(options.features, tested)
    status = _STATUS[answer.kind]
    lines = [f"{request}: {_WORDS[answer.kind]}: {answer.text}", *(f"besides: {text}" for text in answer.besides)]
    if answer.kind not in ("wrong", "error"):
        lines += _with_accelerate(options.features, tested)
    lines += [*[command] * (status == UNTESTED), _HOW]
    return status, lines


def _format_answer(combination: Combination, matrix: Matrix) -> str:
    answer = look_up_answer(combination, matrix)
    return f"with {_stack_text(matrix)}: {_WORDS[answer.kind]}: {answer.text}"


def _next_newer(matrices: Sequence[Matrix], versions: dict[str, str | None], newest: Matrix) -> Matrix:
    """Return the matrix of the oldest DeepSpeed that is not older than the request's; the newest if there is none."""
    requested = release_key(versions["deepspeed"] or "0")
    releases = {
        release_key(matrix.stack["deepspeed"] or "0"): matrix
        for matrix in matrices
        if all(matrix.stack[name] == newest.stack[name] for name in _PACKAGES if name != "deepspeed")
    }
    newer = [release for release in releases if release >= requested]
    return releases[min(newer)] if newer else newest


def _with_accelerate(combination: Combination, matrix: Matrix) -> Iterator[str]:
    """Yield the faults under Accelerate's loop, if the combination has another one, which is right."""
    fault = fault_under_accelerate(combination, matrix)
    if fault is not None:
        yield other_loop_line(combination, fault)
        yield from (f"besides: {text}" for text in fault.besides)


def _check(options: argparse.Namespace) -> None:
    """Raise UserError for a release that is none, and for arguments that the features name."""
    if options.release is not None and not re.fullmatch(r"[0-9]+(\.[0-9]+)*", options.release):
        raise UserError(f"{options.release!r} is not a release of DeepSpeed", "name one, such as 0.19.8")
    if getattr(options, "strategy", None) is not None:
        raise UserError(f"{options.strategy} is not used with --features", "name the engine in the features")
    if getattr(options, "precision", "fp32") != "fp32":
        raise UserError("--precision is not used with --features", "name bf16, autocast or fp16 in the features")


def _known_causes(combination: Combination, versions: dict[str, str | None], newest: Matrix) -> list[Cause]:
    """Return the causes of wrong gradients that these releases have in the combination, on GPUs."""
    stack = _with_transformers(versions, newest)
    optimizer = "muon" if combination.has("muon") else "adamw"
    precision = _precision(combination)
    return [
        cause
        for cause in read_causes()
        if cause.optimizer == optimizer
        and cause.gpu != "hidden"
        and cause.is_in(stack)
        and cause.shows_in(_strategy(combination), combination.micro_steps, precision)
    ]


def _is_in_grid(combination: Combination, versions: dict[str, str | None], newest: Matrix) -> bool:
    """Whether the grid of releases trained the combination with these packages."""
    strategy, features = _strategy(combination), combination.features[1:]
    if strategy not in STRATEGY_NAMES or not _IN_GRID.issuperset(features):
        return False
    # Accelerate makes DeepSpeedCPUAdam of AdamW; in the engine's own loop the program does.
    if combination.has("optimizer_cpu", "all_cpu") and combination.has("cpu_adam") == combination.has("accelerate"):
        return False
    packages = {name: version or "0" for name, version in _with_transformers(versions, newest).items()}
    stack = JudgedStack(**packages, precision=_precision(combination), strategy=strategy)
    return find_untested(json.loads(GRID.read_text(encoding="utf-8")), stack) is None


def _with_transformers(versions: dict[str, str | None], newest: Matrix) -> dict[str, str | None]:
    return {**versions, "transformers": package_version("transformers") or newest.stack["transformers"]}


def _precision(combination: Combination) -> str:
    return "bf16-engine" if combination.has("bf16", "fp32_accumulation") else "fp32"


def _strategy(combination: Combination) -> str:
    """Return the studied strategy of an engine with its offload."""
    engine = combination.level("engine")
    if combination.has("optimizer_cpu"):
        return "zero3_cpu_optimizer" if engine == "zero3" else f"{engine}_cpu"
    return f"{engine}_cpu" if combination.has("all_cpu") else engine


def _fixed_in(cause: Cause) -> str:
    return f" (fixed in {cause.left.release})" * bool(cause.left.release)


def _stack_text(matrix: Matrix) -> str:
    return ", ".join(f"{name} {matrix.stack[name]}" for name in _PACKAGES)
