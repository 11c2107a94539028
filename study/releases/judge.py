"""Whether DeepSpeed with its packages computes the gradients of DDP, by the tests and the recorded faults."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from study.compositions.features import combination_of_strategy, make_combination, name_with_engine, read_rows
from study.config.errors import UserError, clip
from study.config.other_names import PACKAGES as OTHER_PACKAGES
from study.config.strategies import STRATEGY_NAMES, STUDIED_STRATEGIES, read_strategy
from study.host.stacks import package_version, release_key
from study.releases.causes import GRID, PACKAGES, Cause, read_causes
from study.releases.feature_answers import FeatureAnswer, find_answer
from study.releases.judged_stack import FAULTY, NOT_RUN, PRECISIONS, UNTESTED, JudgedStack, find_untested
from study.releases.races import gpu_races

# Marks a verdict by DeepSpeed's source: a fault of CPUs crashed the run.
DAGGER = "\N{DAGGER}"
# What holds for every answer.
TESTED_WITH = "tested in Accelerate's loop, with AdamW and one backward call per micro-batch"
CPU_FAULTS = (
    f"faults that only CPUs have are left out; {DAGGER}: from DeepSpeed's source, since a CPU bug crashes the run"
)
_EVERY = "every tested strategy"
# Rows of the grid around a release, with its own.
_NEAREST_RELEASES = 5
# int() raises an error for thousands of digits.
_RELEASE = r"\d{1,9}(\.\d{1,9}){1,4}"


@dataclasses.dataclass(frozen=True)
class ReleaseVerdict:
    """The first line, the exit status, and the faults by letter."""

    text: str
    status: int
    faults: Mapping[str, Cause]
    # What of the stack was not tested; None if it was.
    untested: str | None = None
    # Combinations of features that are wrong, with the reason.
    wrong_combinations: Mapping[str, str] = dataclasses.field(default_factory=dict)


def add_stack_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the packages, the strategy and the precision."""
    add = parser.add_argument
    release = "a DeepSpeed release such as 0.18.9; default: the installed one"
    add("release", nargs="?", type=_plain_release, metavar="RELEASE", help=release)
    add("strategy", nargs="?", metavar="STRATEGY", help="judge this strategy alone; after the word bisect: bisect it")
    for package in ("accelerate", "torch"):
        add(f"--{package}", type=_release, metavar="RELEASE", help="default: the installed one, or else the tested one")
    bf16 = "bf16: DeepSpeed's bf16 section, 16-bit weights with fp32 masters; default: fp32"
    add("--precision", choices=tuple(PRECISIONS), default="fp32", help=bf16)


def _plain_release(text: str) -> str:
    """Return a release without the prefix of a tag or of a line of requirements.txt, and without the mark of a local
    build: 0.18.2+cu128 is built from the source of 0.18.2."""
    return re.sub(r"^(deepspeed==|v)(?=\d)|(?<=\d)\+[\w.]+$", "", text)


def _release(text: str) -> str:
    """Parse the release of a package, as an argparse type."""
    if not re.fullmatch(rf"{_RELEASE}(\+\w+)?", text):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a release such as 1.15.0")
    return text


def judge_request(options: argparse.Namespace) -> tuple[dict[str, Any], JudgedStack, ReleaseVerdict]:
    """Return the document of the tested releases, and the judged packages with their verdict."""
    if options.release and not re.fullmatch(_RELEASE, options.release):
        problem = f"{clip(options.release)} is not a release of DeepSpeed"
        if options.release in STRATEGY_NAMES:
            raise UserError(problem, f"write one before the strategy: study releases 0.18.9 {options.release}")
        newest = str(json.loads(GRID.read_text(encoding="utf-8"))["releases"][0]["DeepSpeed"])
        package = options.release.lower()
        if package in ("accelerate", "torch") and options.strategy:
            command = f"study releases {newest} --{package} {options.strategy}"
            raise UserError(problem, f"name one, and that of {package} as a flag: {command}")
        if package in ("latest", "newest", "main", "master"):
            raise UserError(problem, f"the newest tested one is {newest}: study releases {newest}")
        fix = "write a release such as 0.18.9 (`pip show deepspeed`); study releases --details prints the tested ones"
        if package in OTHER_PACKAGES:
            fix += f"; study explain FILE MODEL names the releases of {package} that a file depends on"
        raise UserError(problem, fix)
    if options.strategy:
        _check_strategy(options)
    document = json.loads(GRID.read_text(encoding="utf-8"))
    if any(row["DeepSpeed"] == f"{options.release}.0" for row in document["releases"]):
        options.release += ".0"
    stack = _stack(document, options)
    verdict = judge(document, stack, is_default=not options.release)
    return document, stack, verdict


def check_words(options: argparse.Namespace) -> None:
    """Raise UserError for features in the place of a release, and for words after the strategy."""
    words = [word for word in (options.release, options.strategy, *options.more) if word]
    if options.release not in (None, "bisect", "costs") and not options.release[0].isdecimal():
        _check_combination("study releases", ",".join(words).split(","))
    if options.more:
        # The features of costs are also a flag; bisect has a strategy alone.
        if options.release != "bisect":
            _check_combination(f"study releases {options.release}", words[1:])
        raise UserError(
            f"unrecognized arguments: {' '.join(options.more)}",
            "study releases takes a release and a strategy; a combination of features is --features zero2,muon",
        )


def _check_strategy(options: argparse.Namespace) -> None:
    """Raise UserError for an unknown strategy, with the command for a feature or a combination."""
    _check_combination(f"study releases {options.release}", options.strategy.split(","))
    read_strategy(options.strategy)


def _check_combination(command: str, names: list[str]) -> None:
    """Raise UserError with the complete command for a combination, or for one feature that is not a strategy."""
    levels = {level for row in read_rows().values() for level in row.levels}
    is_combination = len(names) > 1 or (names[0] in levels and names[0] not in STRATEGY_NAMES)
    if is_combination and levels.issuperset(names):
        what = "a feature" if len(names) == 1 else "a combination of features"
        problem = f"{','.join(names)} is {what}, and not a strategy"
        raise UserError(problem, f"{command} --features {name_with_engine(names)}")


def _stack(document: Mapping[str, Any], options: argparse.Namespace) -> JudgedStack:
    """Return the packages that the flags name, else the installed ones, else the tested ones."""
    requested = {"deepspeed": options.release, "accelerate": options.accelerate, "torch": options.torch}
    tested = {**document["versions"], "deepspeed": document["releases"][0]["DeepSpeed"]}
    versions = {name: requested.get(name) or package_version(name) or tested[name] for name in PACKAGES}
    versions["deepspeed"] = versions["deepspeed"].partition("+")[0]
    return JudgedStack(**versions, precision=PRECISIONS[options.precision], strategy=options.strategy)


def judge(document: Mapping[str, Any], stack: JudgedStack, is_default: bool = False) -> ReleaseVerdict:
    """Judge a stack by the tests and the known faults; `is_default`: no release was asked for."""
    letters, tested = document["letters"], [row["DeepSpeed"] for row in document["releases"]]
    faults = {letters[cause.id]: cause for cause in stack.known_faults(stack.deepspeed)}
    untested = find_untested(document, stack)
    notes = [untested] if untested else []
    if untested and stack.deepspeed not in tested and not faults:
        # A release of the grid may not run with these packages, or without this strategy.
        ran = [name for name in tested if find_untested(document, dataclasses.replace(stack, deepspeed=name)) is None]
        notes += _neighbours_note(stack, ran)
    if is_default and not package_version("deepspeed"):
        notes.append("not installed here, but the newest tested")
    daggered = {name for row in _fault_rows(document, stack) for name in row["from_source"]}
    wrong_combinations = _wrong_combinations(stack)
    notes += _fault_notes(stack, faults, daggered, is_right_without=not wrong_combinations)
    for cause in faults_in_bf16(stack):
        notes.append(f"in bf16 also wrong under {', '.join(cause.strategies)} ({letters[cause.id]})")
    notes += [f"{where}: {title}" for title, where in wrong_combinations.items()]
    right = _right_combinations(stack) if untested and not faults and not wrong_combinations else []
    if right:
        untested, notes = None, [f"right with --features {' and '.join(right)}"]
    elif untested:
        notes += _notes_of_untested(stack)
    elif not faults and not wrong_combinations:
        notes += _notes_of_right(stack, tested[: tested.index(stack.deepspeed)])
    if stack.deepspeed in tested and not right:
        notes += _muon_note(document, stack)
    notes += [f"use {tested[0]}"] * bool(faults)
    packages = f"deepspeed {stack.deepspeed} with accelerate {stack.accelerate} and torch {stack.torch}"
    text = f"{packages}, {stack.strategy or _EVERY}, {stack.short_precision}: {'; '.join(notes)}"
    judged = {name for cause in faults.values() for name in ([stack.strategy] if stack.strategy else cause.strategies)}
    text += f" ({DAGGER}: from its source, not from a run)" * bool(judged & daggered)
    status = FAULTY if faults or wrong_combinations else UNTESTED if untested else 0
    return ReleaseVerdict(text, status, faults, untested, wrong_combinations)


def _notes_of_untested(stack: JudgedStack) -> Iterator[str]:
    """Yield the commands that answer for a strategy that the grid does not have."""
    features = _features_that_test(stack.strategy)
    if features:
        yield f"see: study releases {stack.deepspeed} --features {features}"
        yield f"run: study verify --features {features}"
    else:
        yield f"run: study verify {f'--only {stack.strategy}' if stack.strategy else '--quick'}"


def _notes_of_right(stack: JudgedStack, newer: Sequence[str]) -> Iterator[str]:
    """Yield that no fault was found, with the races on GPUs, and a newer release that is right, too."""
    races = gpu_races(stack.versions, stack.strategy)
    yield "no fault found" + f" on CPU ranks, and {_count(races)} on GPUs below" * bool(races)
    # An upgrade may stop at a release that is worse.
    if stack.strategy and (worse := [name for name in newer if stack.known_faults(name)]):
        stay = "stay, or " * (not races)
        yield f"{stay}use {newer[0]} ({worse[-1]} to {worse[0]} are wrong)"
    elif stack.strategy and races and newer:
        without = (name for name in newer if not gpu_races({**stack.versions, "deepspeed": name}, stack.strategy))
        yield from (f"use {name}, which has none" for name in itertools.islice(without, 1))


def _count(races: Sequence[object]) -> str:
    return f"{len(races)} races" if len(races) > 1 else "a race"


def _neighbours_note(stack: JudgedStack, tested: Sequence[str]) -> list[str]:
    """Return that the tested releases on either side of an untested one have no fault; nothing if one has."""
    key = release_key(stack.deepspeed)
    older = next((name for name in tested if release_key(name) < key), None)
    newer = next((name for name in reversed(tested) if release_key(name) > key), None)
    names = [name for name in (older, newer) if name is not None]
    if len(names) < 2 or any(stack.known_faults(name) for name in names):
        return []
    return [f"{' and '.join(names)} on either side were, without a fault"]


def _fault_rows(document: Mapping[str, Any], stack: JudgedStack, optimizer: str = "adamw") -> list[Mapping[str, Any]]:
    """Return the faults of a release in the tests of a precision; those of Muon are of fp32."""
    precision = stack.precision if optimizer == "adamw" else "fp32"
    stack_keys = {"release": stack.deepspeed, "optimizer": optimizer, "precision": precision}
    return [row for row in document["faults"] if all(row[key] == value for key, value in stack_keys.items())]


def _muon_note(document: Mapping[str, Any], stack: JudgedStack) -> list[str]:
    """Return under which strategies DeepSpeed's Muon is wrong, or that it was not tested; nothing if it is right."""
    if stack.deepspeed not in document["muon"]:
        return ["Muon not tested"]
    faults = _fault_rows(document, stack, "muon")
    places = [f"{', '.join(row['strategies'])} ({row['letter']})" for row in faults]
    return [f"Muon wrong under {', '.join(places)}"] if places else []


def _features_that_test(name: str | None) -> str:
    """Return the features of a strategy that `study verify` has no name for; empty for another one and without one."""
    if name is None or name in STUDIED_STRATEGIES:
        return ""
    strategy = read_strategy(name)
    features = [f"zero{strategy.zero_stage}" if strategy.deepspeed else "fsdp2"]
    if strategy.group is not None and strategy.deepspeed:
        features.append("ulysses" if strategy.group.divides == "sequence" else "autotp")
    elif strategy.group is not None:
        features.append(name)
    else:
        # Sharded within each of several replicas.
        features = [*features, "hpz"] if strategy.deepspeed else [name]
    return ",".join(features)


def _answers(stack: JudgedStack, *features: str) -> Iterator[FeatureAnswer]:
    """Yield the answers of `--features` for the strategy, or for every stage, in this precision.

    Each without and with accumulation, in the engine's own loop; `features` may name Accelerate's.
    """
    precision = {"fp32": (), "bf16": ("bf16",)}[stack.short_precision]
    for strategy in (stack.strategy,) if stack.strategy else ("zero0", "zero1", "zero2", "zero3"):
        for accumulation in ((), ("accumulation",)):
            combination = combination_of_strategy(strategy, *precision, *accumulation, *features)
            if combination is not None:
                yield find_answer(combination, stack.versions)


def _wrong_combinations(stack: JudgedStack) -> dict[str, str]:
    """Return what `--features` finds wrong besides the causes of the grid, each with the first features that show
    it."""
    places: dict[str, str] = {}
    for answer in (*_answers(stack), *_answers(stack, "accelerate"), *_answer_of_features(stack)):
        for fault in answer.faults[1:] if answer.source == "causes" else answer.faults:
            places.setdefault(fault, f"{_OUTCOMES[answer.kind]} with --features {answer.combination.name}")
    return places


def _answer_of_features(stack: JudgedStack) -> Iterator[FeatureAnswer]:
    """Yield the answer for the features of a strategy that the grid does not have."""
    if features := _features_that_test(stack.strategy):
        try:
            yield find_answer(make_combination(features.split(",")), stack.versions)
        except UserError:
            # Of tensor-parallel strategies under FSDP no features are known.
            return


# Of a faulty answer.
_OUTCOMES = {"wrong": "wrong", "error": "an error"}


def _right_combinations(stack: JudgedStack) -> list[str]:
    """Return the combinations of a strategy if stored runs have them all, and none is wrong."""
    answers = list(_answers(stack)) if stack.strategy else []
    is_right = bool(answers) and all(answer.status == 0 for answer in answers)
    return [answer.combination.name for answer in answers] if is_right else []


def _fault_notes(
    stack: JudgedStack, faults: Mapping[str, Cause], daggered: set[str], *, is_right_without: bool
) -> Iterator[str]:
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
    needs_accumulation = all(cause.accumulation == "several" for cause in faults.values())
    if stack.strategy and faults and needs_accumulation and is_right_without:
        yield "without accumulation no fault" + DAGGER * (stack.strategy in daggered)


def faults_in_bf16(stack: JudgedStack) -> list[Cause]:
    """Return the faults that a stack in fp32 would have in bf16 only."""
    in_bf16 = dataclasses.replace(stack, precision=PRECISIONS["bf16"])
    faults = stack.known_faults(stack.deepspeed)
    return [cause for cause in in_bf16.known_faults(stack.deepspeed) if cause not in faults]


def faults_of_other_pairs(stack: JudgedStack) -> list[Cause]:
    """Return the faults of this DeepSpeed that only other releases of Accelerate have."""
    return [
        cause
        for cause in read_causes()
        if cause.optimizer == "adamw"
        and cause.gpu != "hidden"
        and "accelerate" in cause.releases
        and not cause.is_in(stack.versions)
        and stack.strategy in (None, *cause.strategies)
        and (not cause.precisions or stack.precision in cause.precisions)
        and dataclasses.replace(cause, releases={"deepspeed": cause.releases["deepspeed"]}).is_in(stack.versions)
    ]


def other_pair_lines(document: Mapping[str, Any], stack: JudgedStack, causes: Iterable[Cause]) -> list[str]:
    """Return a line for each fault that this DeepSpeed has with other releases of Accelerate."""
    return [
        f"with accelerate {cause.releases['accelerate']} also {document['letters'][cause.id]}"
        f" under {', '.join([stack.strategy] if stack.strategy else cause.strategies)}"
        for cause in causes
    ]


def nearest_rows(rows: Sequence[Mapping[str, str]], release: str) -> Sequence[Mapping[str, str]]:
    """Return the rows around a release, the newest first, whether or not it is one of them."""
    newer = sum(release_key(row["DeepSpeed"]) > release_key(release) for row in rows)
    first = max(0, min(newer - _NEAREST_RELEASES // 2, len(rows) - _NEAREST_RELEASES))
    return rows[first : first + _NEAREST_RELEASES]


def strategy_cells(
    document: Mapping[str, Any], stack: JudgedStack, releases: Iterable[str]
) -> tuple[list[list[str]], set[str]]:
    """Return rows of releases with the faults of one strategy, without and with accumulation, and their letters."""
    cells, printed_letters = [], set[str]()
    for release in releases:
        judged = dataclasses.replace(stack, deepspeed=release)
        daggered = any(stack.strategy in row["from_source"] for row in _fault_rows(document, judged))
        letters: dict[bool, list[str]] = {False: [], True: []}
        for cause in judged.known_faults(release):
            letter = document["letters"][cause.id]
            printed_letters.add(letter)
            letters[True].append(letter)
            if cause.accumulation != "several":
                letters[False].append(letter)
        is_trained = any(
            case["deepspeed"] == release and stack.strategy in case["strategies"] for case in document["trained"]
        )
        otherwise = "no fault" if is_trained or daggered else NOT_RUN
        texts = (", ".join(sorted(letters[accumulates])) or otherwise for accumulates in (False, True))
        cells.append([release, *(text + DAGGER * daggered for text in texts)])
    return cells, printed_letters


def judge_rows(
    document: Mapping[str, Any], stack: JudgedStack, rows: Sequence[Mapping[str, str]]
) -> tuple[list[list[str]], dict[str, Cause]]:
    """Return the texts of rows of the grid, of one strategy if one was asked for, and their faults by letter."""
    if not stack.strategy:
        return grid_cells(rows), dict(shown_causes(document, rows, stack.precision, with_muon=True))
    cells, letters = strategy_cells(document, stack, [row["DeepSpeed"] for row in rows])
    # Also those of precisions that the grid does not have.
    by_cause = {document["letters"].get(cause.id): cause for cause in read_causes()}
    return cells, {letter: by_cause[letter] for letter in sorted(letters)}


def grid_cells(rows: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return the texts of rows, without the marks of Markdown."""
    return [[text.replace("`", "") for text in row.values()] for row in rows]


def shown_causes(
    document: Mapping[str, Any], rows: Sequence[Mapping[str, str]], precision: str = "fp32", *, with_muon: bool = False
) -> Iterator[tuple[str, Cause]]:
    """Yield the letter and the cause of each fault in these rows of the grid of a precision."""
    names = {row["DeepSpeed"] for row in rows}
    tests = {("adamw", precision), *([("muon", "fp32")] if with_muon else [])}
    faults = (row for row in document["faults"] if row["release"] in names)
    letters = {row["letter"] for row in faults if (row["optimizer"], row["precision"]) in tests}
    for cause in read_causes():
        if (letter := document["letters"].get(cause.id)) in letters:
            yield letter, cause


def cause_line(letter: str, cause: Cause) -> str:
    """Return a fault with its precisions and its loops, and the release and the change that fixed it; the grid has its
    strategies."""
    change = re.sub(r"https://github.com/[^/]+/([^/]+)/(?:pull|issues)/(\d+)", r" by \1#\2", cause.left.change)
    fixed = f" (fixed in {cause.left.release}{change})" if cause.left.release else ""
    loops = f", {cause.loops_text}" if cause.loops_text else ""
    return f"{letter}: {cause.title}{_precisions(cause)}{loops}{fixed}"


def _precisions(cause: Cause) -> str:
    return f" in {', '.join(cause.precisions)}" if cause.precisions else ""
