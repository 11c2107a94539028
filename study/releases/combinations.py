"""`study releases --features A,B`: the stored answer for a combination of features on a stack."""

from __future__ import annotations

import argparse
import re

from study.compositions.command import feature_table
from study.compositions.features import read_rows
from study.config.errors import UserError
from study.config.printing import print_result
from study.releases.feature_answers import FeatureAnswer, fill_releases, find_answer


def judge_features(options: argparse.Namespace) -> int:
    """Print the answer of the stored matrices for a combination, and return the exit status."""
    if options.features is None:
        rows = {name: dict(row.levels) for name, row in read_rows().items()}
        print_result(options.json, lambda: rows, [feature_table()])
        return 0
    answer = answer_features(options)
    print_result(options.json, lambda: answer.document | {"status": answer.status}, answer.lines)
    return answer.status


def answer_features(options: argparse.Namespace) -> FeatureAnswer:
    """Return the answer for a combination with the releases of a command line."""
    _check(options)
    versions = {"deepspeed": options.release, "accelerate": options.accelerate, "torch": options.torch}
    return find_answer(options.features, fill_releases(versions))


def _check(options: argparse.Namespace) -> None:
    """Raise UserError for a release that is none, and for arguments that the features name."""
    if options.release is not None and not re.fullmatch(r"[0-9]+(\.[0-9]+)*", options.release):
        raise UserError(f"{options.release!r} is not a release of DeepSpeed", "name one, such as 0.19.8")
    if getattr(options, "strategy", None) is not None:
        raise UserError(f"{options.strategy} is not used with --features", "name the engine in the features")
    if getattr(options, "precision", "fp32") != "fp32":
        raise UserError("--precision is not used with --features", "name bf16, autocast or fp16 in the features")
