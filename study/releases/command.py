"""`study releases [RELEASE]`: whether a release of DeepSpeed computes DDP's gradients, and the grid of tested releases.

It reads the document that `make releases` writes from the records, and imports neither pandas nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from study.compositions.answers import look_up_answer, read_matrices
from study.compositions.command import feature_table, parse_features
from study.compositions.matrix import Matrix
from study.config.errors import UserError
from study.config.printing import TextTable, print_page
from study.config.strategies import read_strategy
from study.host.stacks import package_version, release_key
from study.releases import bisect
from study.releases.causes import GRID, PACKAGES, Cause, known_faults, read_causes

# Marks strategies without a verdict in the grid.
NOT_RUN = "not run"
# Marks a verdict by DeepSpeed's source: a fault of CPUs crashed the run.
DAGGER = "\N{DAGGER}"
# Releases in README.md, and without a release on the command line.
LATEST_RELEASES = 8
# Rows around a release on the command line, with its own.
_NEAREST_RELEASES = 5
# Exit statuses, next to 0: no fault was found.
_FAULTY, _UNTESTED = 1, 3
# Precisions of the command line, as the records name them.
_PRECISIONS = {"fp32": "fp32", "bf16": "bf16-engine"}
_EVERY = "every tested strategy"
# Packages besides DeepSpeed whose releases decide whether a stack was tested.
_PAIRED = ("accelerate", "torch")
EPILOG = """\
`study releases bisect STRATEGY` finds the release that introduced or fixed a fault, by training. The exit status is 0
if no fault was found, 1 with a known fault, and 3 if this was not tested.
"""


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
        return self.precision.removesuffix("-engine")

    def known_faults(self, deepspeed: str) -> list[Cause]:
        """Return the faults of a release of DeepSpeed, with the other packages of this stack."""
        return [
            cause for cause in known_faults(self.versions | {"deepspeed": deepspeed}, on_gpu=True)
            if self.strategy in (None, *cause.strategies)
            and (not cause.precisions or self.precision in cause.precisions)
        ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ReleaseVerdict:
    """The first line, the exit status, and the faults by letter."""

    text: str
    status: int
    faults: Mapping[str, Cause]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("release", nargs="?", metavar="RELEASE", help="a DeepSpeed release such as 0.18.9; default: the installed one")
    add("strategy", nargs="?", metavar="STRATEGY", help="judge this strategy alone; after the word bisect: bisect it")
    for package in ("accelerate", "torch"):
        add(f"--{package}", type=_release, metavar="RELEASE", help="default: the installed one, or else the tested one")
    bf16 = "bf16: DeepSpeed's bf16 section, 16-bit weights with fp32 masters; default: fp32"
    add("--precision", choices=tuple(_PRECISIONS), default="fp32", help=bf16)
    add("--details", action="store_true", help="print all tested releases")
    add("--features", type=parse_features, metavar="A,B,...", default=argparse.SUPPRESS,
        help="judge a combination such as zero2,muon,accumulation; `--features list` prints all features")  # fmt: skip
    bisect.add_arguments(parser.add_argument_group("options of bisect"))


def _release(text: str) -> str:
    """Parse the release of a package, as an argparse type."""
    if not re.fullmatch(r"\d+(\.\d+)+(\+\w+)?", text):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a release such as 1.15.0")
    return text


def run(options: argparse.Namespace) -> int:
    """Print the verdict, the grid and the causes, and return the verdict's exit status; or bisect."""
    if options.release == "bisect":
        return bisect.run(options)
    if options.release and not re.fullmatch(r"\d+(\.\d+)+", options.release):
        raise UserError(f"{options.release!r} is not a release of DeepSpeed", "write a release such as 0.18.9")
    if options.strategy:
        read_strategy(options.strategy)
    if hasattr(options, "features"):
        return _judge_features(options)
    document = json.loads(GRID.read_text(encoding="utf-8"))
    if any(row["DeepSpeed"] == f"{options.release}.0" for row in document["releases"]):
        options.release += ".0"
    stack = _stack(document, options)
    verdict = judge(document, stack, is_default=not options.release)
    print_page(releases_text(document, stack, verdict, options.release, options.details))
    return verdict.status


# Exit statuses of a combination's answer.
_STATUS_OF_ANSWER = {
    "right": 0, "by_design": 0, "wrong": _FAULTY, "error": _FAULTY, "pairs": _UNTESTED, "untested": _UNTESTED
}  # fmt: skip


def _judge_features(options: argparse.Namespace) -> int:
    """Print the answer of the stored matrices for a combination, and return the exit status."""
    if options.features is None:
        print_page([feature_table()])
        return 0
    matrices = list(read_matrices())
    versions = {
        "deepspeed": options.release or package_version("deepspeed") or matrices[0].stack["deepspeed"],
        "accelerate": options.accelerate or package_version("accelerate") or matrices[0].stack["accelerate"],
        "torch": options.torch or package_version("torch") or matrices[0].stack["torch"],
    }
    chosen = [
        matrix for matrix in matrices
        if all(_is_same(matrix.stack[name] or "0", version or "0") for name, version in versions.items())
    ]  # fmt: skip
    command = f"run: study verify --features {options.features.name}"
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    if not chosen:
        tested = "; ".join(", ".join(f"{name} {matrix.stack[name]}" for name in versions) for matrix in matrices)
        lines = [f"{options.features.name} with {packages}: not tested; {command}", f"tested: {tested}"]
        result = look_up_answer(options.features, matrices[0])
        print_page([*lines, f"with {_packages(matrices[0])}: {_ANSWERS[result.kind]}: {result.text}"])
        return _UNTESTED
    result = look_up_answer(options.features, chosen[0])
    lines = [f"{options.features.name} with {packages}: {_ANSWERS[result.kind]}: {result.text}"]
    lines += [command] * (_STATUS_OF_ANSWER[result.kind] == _UNTESTED)
    print_page([*lines, "tested on two CPU ranks, in a few steps of a tiny model"])
    return _STATUS_OF_ANSWER[result.kind]


_ANSWERS = {
    "right": "right", "by_design": "differs as documented", "wrong": "wrong", "error": "ends with an error",
    "pairs": "not tested as a whole", "untested": "not tested",
}  # fmt: skip


def _packages(matrix: Matrix) -> str:
    return ", ".join(f"{name} {matrix.stack[name]}" for name in ("deepspeed", "accelerate", "torch"))


def _stack(document: Mapping[str, Any], options: argparse.Namespace) -> JudgedStack:
    """Return the packages that the flags name, else the installed ones, else the tested ones."""
    requested = {"deepspeed": options.release, "accelerate": options.accelerate, "torch": options.torch}
    tested = {**document["versions"], "deepspeed": document["releases"][0]["DeepSpeed"]}
    versions = {name: requested.get(name) or package_version(name) or tested[name] for name in PACKAGES}
    versions["deepspeed"] = versions["deepspeed"].partition("+")[0]
    return JudgedStack(**versions, precision=_PRECISIONS[options.precision], strategy=options.strategy)


def releases_text(
    document: Mapping[str, Any], stack: JudgedStack, verdict: ReleaseVerdict, release: str | None, details: bool = False
) -> list[str | TextTable]:
    """Return the verdict, then rows and causes: those around a release that was asked for, else the latest."""
    rows = document["releases" if stack.precision == "fp32" else "bf16"]
    if not details:
        rows = _nearest(rows, release) if release else rows[:LATEST_RELEASES]
    printed = {row["DeepSpeed"] for row in rows}
    muon = {name: faults.replace("`", "") for name, faults in document["muon"].items() if name in printed}
    by_letter = dict(shown_causes(document, [*rows, muon])) | dict(verdict.faults)
    # These matter for one release.
    elsewhere = _faults_of_other_pairs(stack) if release or details else []
    in_bf16 = _faults_in_bf16(stack)
    by_letter |= {document["letters"][cause.id]: cause for cause in (*elsewhere, *in_bf16)}
    notes = [
        f"with accelerate {cause.releases['accelerate']} also {document['letters'][cause.id]}"
        f" under {', '.join([stack.strategy] if stack.strategy else cause.strategies)}"
        for cause in elsewhere
    ]
    notes += [
        "tested with AdamW and one backward call per micro-batch",
        *["bf16-engine: DeepSpeed's bf16 section, 16-bit weights with fp32 masters"]
        * any("bf16-engine" in cause.precisions for cause in by_letter.values()),
        *(["with Muon: " + "; ".join(f"{name} {faults}" for name, faults in muon.items())] if muon else []),
        f"faults that only CPUs have are left out; {DAGGER}: from DeepSpeed's source, since a CPU bug crashes the run",
    ]
    table = TextTable(list(rows[0]), [[text.replace("`", "") for text in row.values()] for row in rows])
    causes = []
    for letter, cause in sorted(by_letter.items()):
        # The grid has its strategies.
        change = re.sub(r"https://github.com/([^/]+/[^/]+)/(?:pull|issues)/(\d+)", r" by \1#\2", cause.left.change)
        fixed = f" (fixed in {cause.left.release}{change})" if cause.left.release else ""
        causes.append(f"{letter}: {cause.title}{_precisions(cause)}{fixed}")
    tested = document["tested" if stack.precision == "fp32" else "tested_in_bf16"]
    more = [] if details else ["--details prints all tested releases"]
    return [verdict.text, "", table, "", *causes, *notes, tested, *more]


def _nearest(rows: Sequence[Mapping[str, str]], release: str) -> Sequence[Mapping[str, str]]:
    """Return the rows around a release, the newest first, whether or not it is one of them."""
    newer = sum(release_key(row["DeepSpeed"]) > release_key(release) for row in rows)
    first = max(0, min(newer - _NEAREST_RELEASES // 2, len(rows) - _NEAREST_RELEASES))
    return rows[first : first + _NEAREST_RELEASES]


def _faults_of_other_pairs(stack: JudgedStack) -> list[Cause]:
    """Return the faults of this DeepSpeed that only other releases of Accelerate have."""
    return [
        cause for cause in read_causes()
        if cause.optimizer == "adamw" and cause.gpu != "hidden" and "accelerate" in cause.releases
        and not cause.is_in(stack.versions) and stack.strategy in (None, *cause.strategies)
        and (not cause.precisions or stack.precision in cause.precisions)
        and dataclasses.replace(cause, releases={"deepspeed": cause.releases["deepspeed"]}).is_in(stack.versions)
    ]  # fmt: skip


def shown_causes(document: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, Cause]]:
    """Yield the letter and the cause of each fault in these rows of the grid."""
    letters = {match for row in rows for text in row.values() for match in re.findall(r"\b(\w): ", text)}
    for cause in read_causes():
        if (letter := document["letters"].get(cause.id)) in letters:
            yield letter, cause


def _faults_in_bf16(stack: JudgedStack) -> list[Cause]:
    """Return the faults that a stack in fp32 would have in bf16 only."""
    in_bf16 = dataclasses.replace(stack, precision=_PRECISIONS["bf16"])
    faults = stack.known_faults(stack.deepspeed)
    return [cause for cause in in_bf16.known_faults(stack.deepspeed) if cause not in faults]


def judge(document: Mapping[str, Any], stack: JudgedStack, is_default: bool = False) -> ReleaseVerdict:
    """Judge a stack by the tests and the known faults; `is_default`: no release was asked for."""
    letters, tested = document["letters"], [row["DeepSpeed"] for row in document["releases"]]
    faults = {letters[cause.id]: cause for cause in stack.known_faults(stack.deepspeed)}
    untested = _untested(document, stack)
    notes = [untested] if untested else []
    if is_default and not package_version("deepspeed"):
        notes.append("not installed here, but the newest tested")
    row: Mapping[str, str] = next((row for row in document["releases"] if row["DeepSpeed"] == stack.deepspeed), {})
    daggered = set(re.findall(rf"(\w+)`{DAGGER}", " ".join(row.values())))
    notes += _fault_notes(stack, faults, daggered)
    for cause in _faults_in_bf16(stack):
        notes.append(f"in bf16 also wrong under {', '.join(cause.strategies)} ({letters[cause.id]})")
    if untested:
        notes.append("run: study verify --quick")
    elif not faults:
        notes.append("no fault found")
        # An upgrade may stop at a release that is worse.
        newer = tested[: tested.index(stack.deepspeed)]
        if stack.strategy and (worse := [name for name in newer if stack.known_faults(name)]):
            notes.append(f"stay, or use {newer[0]}: wrong in {worse[-1]} to {worse[0]}")
    muon = document["muon"].get(stack.deepspeed, "not tested").replace("`", "")
    muon = re.sub(r"(\w): ([^;]+)", r"\2 (\1)", muon).replace(";", ",")
    if stack.deepspeed in tested and muon != "no fault":
        notes.append(f"Muon {muon if muon == 'not tested' else f'wrong under {muon}'}")
    notes += [f"use {tested[0]}"] * bool(faults)
    packages = f"deepspeed {stack.deepspeed} with accelerate {stack.accelerate} and torch {stack.torch}"
    text = f"{packages}, {stack.strategy or _EVERY}, {stack.short_precision}: {'; '.join(notes)}"
    text += f" ({DAGGER}: from its source, not from a run)" * (DAGGER in text)
    return ReleaseVerdict(text, _FAULTY if faults else _UNTESTED if untested else 0, faults)


def _fault_notes(stack: JudgedStack, faults: Mapping[str, Cause], daggered: set[str]) -> Iterator[str]:
    """Yield the strategies that compute wrong gradients, and those that end with an error, by condition."""
    for outcome in ("wrong gradients", "an error"):
        places: dict[str, list[str]] = {}
        for letter, cause in sorted(faults.items()):
            if cause.ends_training == (outcome == "an error"):
                names = [stack.strategy] if stack.strategy else cause.strategies
                marked = ", ".join(name + DAGGER * (name in daggered) for name in names)
                condition = " with accumulation" * (cause.accumulation == "several")
                places.setdefault(condition, []).append(f"{marked} ({letter})")
        if places:
            by_condition = (f"{condition} under {', '.join(where)}" for condition, where in sorted(places.items()))
            yield f"{outcome}{';'.join(by_condition)}"
    if stack.strategy and faults and all(cause.accumulation == "several" for cause in faults.values()):
        yield "without accumulation no fault" + DAGGER * (stack.strategy in daggered)


def _untested(document: Mapping[str, Any], stack: JudgedStack) -> str | None:
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
    same = [case for case in trained if all(_is_same(case[name], getattr(stack, name)) for name in _PAIRED)]
    if not same:
        pairs = dict.fromkeys(" and ".join(f"{name} {case[name]}" for name in _PAIRED) for case in trained)
        return f"not tested with these packages, but with {', or '.join(pairs)}"
    precisions = {case["precision"] for case in same}
    if stack.precision not in precisions:
        elsewhere = " and ".join(name for name, recorded in _PRECISIONS.items() if recorded in precisions)
        return f"not tested in {stack.short_precision}, but in {elsewhere}"
    return None


def _is_same(tested: str, requested: str) -> bool:
    """Whether two versions are of one release; a local label, such as +cu129, does not change it."""
    from packaging.version import Version

    return Version(tested).public == Version(requested).public


def _precisions(cause: Cause) -> str:
    return f" in {', '.join(cause.precisions)}" if cause.precisions else ""
