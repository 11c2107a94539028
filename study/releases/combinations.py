"""`study releases --features A,B`: the stored answer for a combination of features on a stack."""

from __future__ import annotations

import argparse

from study.compositions.answers import look_up_answer, read_matrices
from study.compositions.command import feature_table
from study.compositions.matrix import Matrix
from study.config.printing import print_page
from study.host.stacks import package_version
from study.releases.judge import FAULTY, UNTESTED, is_same_release

# Packages that decide whether a stack was tested.
_PACKAGES = ("deepspeed", "accelerate", "torch")
# Exit status and words of each kind of answer.
_STATUS = {"right": 0, "by_design": 0, "wrong": FAULTY, "error": FAULTY, "pairs": UNTESTED, "untested": UNTESTED}
_WORDS = {
    "right": "right", "by_design": "differs as documented", "wrong": "wrong", "error": "ends with an error",
    "pairs": "not tested as a whole", "untested": "not tested",
}  # fmt: skip
_HOW = "tested on two CPU ranks, in three steps of a tiny model"


def judge_features(options: argparse.Namespace) -> int:
    """Print the answer of the stored matrices for a combination, and return the exit status."""
    if options.features is None:
        print_page([feature_table()])
        return 0
    matrices = list(read_matrices())
    newest = matrices[0]
    versions = {"deepspeed": options.release, "accelerate": options.accelerate, "torch": options.torch}
    for name in _PACKAGES:
        versions[name] = versions[name] or package_version(name) or newest.stack[name]
    request = f"{options.features.name} with {', '.join(f'{name} {version}' for name, version in versions.items())}"
    command = f"run: study verify --features {options.features.name}"
    tested = next((matrix for matrix in matrices if _has_releases(matrix, versions)), None)
    if tested is None:
        answer = look_up_answer(options.features, newest)
        nearest = f"with {_stack_text(newest)}: {_WORDS[answer.kind]}: {answer.text}"
        print_page([f"{request}: not tested; {command}", nearest, _HOW])
        return UNTESTED
    answer = look_up_answer(options.features, tested)
    status = _STATUS[answer.kind]
    print_page([f"{request}: {_WORDS[answer.kind]}: {answer.text}", *[command] * (status == UNTESTED), _HOW])
    return status


def _has_releases(matrix: Matrix, versions: dict[str, str | None]) -> bool:
    return all(is_same_release(matrix.stack[name] or "0", version or "0") for name, version in versions.items())


def _stack_text(matrix: Matrix) -> str:
    return ", ".join(f"{name} {matrix.stack[name]}" for name in _PACKAGES)
