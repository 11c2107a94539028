"""`study releases bisect` names the first bad and the first good release, and the changes between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from study import cli
from study.compositions.command import installed_stack
from study.compositions.features import make_combination
from study.compositions.matrix import Matrix
from study.compositions.session import CombinationOutcome
from study.host.machine import detect_machine
from study.host.stacks import stacks
from study.releases.bisect import SUITE, bisect
from study.releases.bisect_features import FOLDER
from study.sweep.cell import Cell
from study.sweep.plan import plan_cells
from study.sweep.suite_file import find_suite, read_suite
from synthetic_records import with_steps, write_run

PULL = "https://github.com/deepspeedai/DeepSpeed/pull"


def write_records(root: Path, bad: set[str], strategy: str = "zero2", repeat: int = 1) -> None:
    """Write clipped fp32 runs of `single` and of a strategy with accumulation 4 for each stack; some differ."""
    for cell in plan_cells(read_suite(find_suite(SUITE)), detect_machine()):
        if not isinstance(cell, Cell) or cell.config.precision != "fp32" or not cell.config.max_grad_norm:
            continue
        if cell.strategy == "single" or (cell.strategy, cell.plan.gradient_accumulation_steps) == (strategy, 4):
            shift = 0.1 if cell.strategy == strategy and cell.stack in bad else 0.0
            name = cell.id if repeat == 1 else f"{cell.id[:-1]}{repeat}"
            path = write_run(root / SUITE, cell.strategy, name=name, loss_shift=shift)
            with_steps(path, lambda row: row | {"grad_norm": 1.0})


def bisected(root: Path, request: str) -> int:
    return cli.main(["releases", "bisect", *request.split(), "--runs_dir", str(root)])


def test_changes_between_the_releases_are_named_with_their_pull_requests(tmp_path, capsys):
    write_records(tmp_path, bad={"0.17.6", "0.18.0", "0.18.2"})
    assert bisected(tmp_path, "zero2 --between 0.17.5 0.18.3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("0.17.5: equal") for line in lines)
    cause = "only the last micro-step's gradient is used"
    assert {
        "first bad: 0.17.6; 0.17.5 is good",
        "first good after it: 0.18.3; 0.18.2 is bad",
        f"{cause}: introduced in 0.17.6 {PULL}/7509",
        f"{cause}: fixed in 0.18.3 {PULL}/7665",
    } <= set(lines)


def test_the_document_of_a_bisection_has_the_span_and_the_judged_releases(tmp_path, capsys):
    write_records(tmp_path, bad={"0.17.6", "0.18.0", "0.18.2"})
    assert bisected(tmp_path, "zero2 --between 0.17.5 0.18.3 --json") == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["span"] == {
        "last_good": "0.17.5",
        "first_bad": "0.17.6",
        "last_bad": "0.18.2",
        "first_good": "0.18.3",
    }
    assert (document["judged"]["0.17.5"], document["judged"]["0.18.2"]) == (False, True)
    # The progress of a search of hours.
    assert "0.17.5: equal" in printed.err


def test_a_release_that_differs_in_one_of_two_runs_is_bad(tmp_path, capsys):
    write_records(tmp_path, bad=set())
    write_records(tmp_path, bad={"0.18.4"}, repeat=2)
    assert bisected(tmp_path, "zero2 --between 0.18.3 0.18.6 --repeat 2") == 0
    assert "first bad: 0.18.4; 0.18.3 is good" in capsys.readouterr().out


def test_one_equal_run_does_not_make_a_release_with_a_known_race_good(tmp_path, capsys):
    write_records(tmp_path, bad=set(), strategy="zero3")
    assert bisected(tmp_path, "zero3 --between 0.18.3 0.18.6") == 1
    printed = capsys.readouterr().out
    assert printed.count("which proves nothing: the release has a known race condition") == 4
    assert "no release of 0.18.3 to 0.18.6 is bad; 0 were judged, 4 could not be" in printed


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        # g good, b bad, - neither: one letter for each release from the oldest on.
        ("ggbbbbgg", ("1", "2", "5", "6")),
        ("bbbbbbgg", (None, "0", "5", "6")),
        ("ggggggbb", ("5", "6", "7", None)),
        ("gg-b-b-g", ("1", "3", "5", "7")),
        ("-bbbbbg-", (None, "1", "5", "6")),
        ("gggggbgg", ("4", "5", "5", "6")),
        ("ggg", None),
    ],
)
def test_a_bisection_names_the_first_bad_and_the_first_good_release(verdicts, expected):
    answers = {str(place): {"g": False, "b": True, "-": None}[letter] for place, letter in enumerate(verdicts)}
    result = bisect(list(answers), answers.__getitem__)
    assert (result and (result.last_good, result.first_bad, result.last_bad, result.first_good)) == expected


def write_combinations(root: Path, features: str, kinds: dict[str, str]) -> None:
    """Write a run of a combination for releases of DeepSpeed, as an earlier call of bisect leaves it."""
    combination = make_combination(features.split(","))
    for release, kind in kinds.items():
        says = "" if kind == "equal" else "step 1, gradient of lm_head.weight: 0.25 times the reference"
        outcome = CombinationOutcome(combination, kind, says, "", 1.0)
        (root / FOLDER).mkdir(exist_ok=True)
        stack = {**installed_stack(), **stacks()[release].releases}
        Matrix(stack, {combination: outcome}).write(root / FOLDER / f"{release}.json")


def test_a_combination_is_bisected_over_releases_with_stored_runs_and_those_of_earlier_calls(tmp_path, capsys):
    # 0.18.6 and 0.19.5 are stored.
    differs = dict.fromkeys(("0.18.3", "0.18.4", "0.18.5", "0.18.9", "0.19.0", "0.19.2"), "differs")
    equal = dict.fromkeys(("0.18.0", "0.19.6", "0.19.7", "0.19.8"), "equal")
    write_combinations(tmp_path, "zero1,accumulation", {"0.18.2": "crashes"} | differs | equal)
    assert bisected(tmp_path, "--features zero1,accumulation --between 0.18.0 0.19.8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("0.19.5: differs: ") and line.endswith("(stored)") for line in lines)
    assert "0.18.2: crashes: step 1, gradient of lm_head.weight: 0.25 times the reference (of an earlier call)" in lines
    assert {
        "first bad: 0.18.3; 0.18.0 is good",
        "first good after it: 0.19.6; 0.19.5 is bad",
        f"the gradient is divided by the accumulation steps twice: introduced in 0.18.3 {PULL}/8245",
        f"the gradient is divided by the accumulation steps twice: fixed in 0.19.6 {PULL}/8245",
    } <= set(lines)


def test_a_release_that_is_not_prepared_is_named_with_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ZERO_STUDY_CACHE", str(tmp_path / "cache"))
    write_combinations(tmp_path, "zero1,accelerate,accumulation", {"0.18.3": "equal"})
    assert bisected(tmp_path, "--features zero1,accelerate,accumulation --between 0.18.3 0.18.4") == 2
    assert "the stack 0.18.4 lacks deepspeed-0.18.4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("request_text", "message"),
    [
        ("--features fsdp2", "fsdp2 does not run in DeepSpeed, whose releases are bisected"),
        ("zero1 --features zero1,muon", "zero1 is not used with --features"),
        ("--features zero1 --accumulation 4", "--accumulation is not used with --features"),
    ],
)
def test_what_a_bisection_of_features_does_not_take_is_refused(tmp_path, request_text, message, capsys):
    assert bisected(tmp_path, request_text) == 2
    assert message in capsys.readouterr().err
