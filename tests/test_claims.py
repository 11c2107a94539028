"""The claims ledger: what it takes, how figures become verdicts, and that verdicts rest on records and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from study.claims.board import REPORTS, Board, JudgedClaim, board, judge
from study.claims.evidence import Evidence
from study.claims.forms import FORMS
from study.claims.ledger import LEDGER, ClaimCheck, read_ledger
from study.claims.page import PAGE, page
from study.claims.verdicts import Figure, Part, Region, Verdict, combine
from study.cli import main
from study.config.errors import UserError
from study.host.box import Box
from study.records.frames import Records, read_parquet, read_runs, write_parquet
from study.sweep.cell import Cell
from study.sweep.notes import append_attempt, note_searches
from study.sweep.slices import plan_suite
from synthetic_records import write_run

ANSWERS = ("holds", "fails", "inside noise", "disputed", "not judged")
# How much each says; a record less never makes it more.
STRENGTH: dict[Verdict, int] = {
    "supported": 3, "contradicted": 3, "partly": 2, "inside noise": 1, "inconclusive": 0, "untestable": 0,
}  # fmt: skip
PARTS = tuple(itertools.starmap(Part, itertools.product(ANSWERS, (False, True), (False, True))))


@pytest.fixture(scope="module")
def made() -> Board:
    return board()


def of(made: Board, claim: str) -> JudgedClaim:
    (found,) = [each for each in made.judged if each.claim.id == claim]
    return found


def with_numbers(judged: JudgedClaim, place: int, **numbers: object) -> str:
    """The verdict with other numbers in one check."""
    checks = list(judged.claim.checks)
    checks[place] = dataclasses.replace(checks[place], numbers={**checks[place].numbers, **numbers})
    return judge(dataclasses.replace(judged.claim, checks=tuple(checks)), Evidence(REPORTS)).verdict


# ------------------------------------------------------------------------------------------------ figures and verdicts
def test_one_check_less_never_makes_a_verdict_say_more() -> None:
    for parts in itertools.chain.from_iterable(itertools.product(PARTS, repeat=n) for n in (1, 2, 3)):
        before = combine(parts)
        for place in range(len(parts)):
            less = [*parts[:place], dataclasses.replace(parts[place], answer="not judged"), *parts[place + 1 :]]
            after = combine(less)
            assert STRENGTH[after] <= STRENGTH[before], (before, after, parts)
            assert {before, after} != {"supported", "contradicted"}


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ([], "inconclusive"),
        ([Part("holds")], "supported"),
        ([Part("fails"), Part("fails")], "contradicted"),
        ([Part("holds"), Part("fails")], "partly"),
        ([Part("holds"), Part("not judged")], "partly"),
        ([Part("holds"), Part("fails", necessary=True)], "contradicted"),
        ([Part("holds", necessary=True)], "inconclusive"),
        ([Part("holds"), Part("not judged", necessary=True)], "partly"),
        ([Part("holds", elsewhere=True)], "partly"),
        ([Part("fails", elsewhere=True)], "partly"),
        ([Part("holds", elsewhere=True), Part("holds")], "supported"),
        ([Part("inside noise"), Part("not judged")], "inside noise"),
        ([Part("disputed")], "inconclusive"),
    ],
)
def test_the_rule_that_combines_checks(parts: list[Part], verdict: str) -> None:
    assert combine(parts) == verdict
    assert combine(parts, is_untestable=True) == ("untestable" if verdict == "inconclusive" else verdict)


def test_an_interval_that_spans_the_claim_never_holds_and_a_moved_one_does() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        edge, reach = draw.uniform(-5, 5), draw.uniform(1e-6, 3)
        region = draw.choice([Region(low=edge), Region(high=edge), Region(edge, edge + 100), Region(edge - 100, edge)])
        spans = Figure(edge, edge - reach * draw.random() - 1e-9, edge + reach * draw.random() + 1e-9)
        assert region.judge(spans) == "inside noise"
        inside = 1 if math.isfinite(region.low) and region.low == edge else -1
        assert spans.low is not None
        assert spans.high is not None
        for sign, answer in ((inside, "holds"), (-inside, "fails")):
            away = sign * 2 * (spans.high - spans.low)
            assert region.judge(Figure(edge + away, spans.low + away, spans.high + away)) == answer
    assert Region(high=1).judge(Figure(math.nan)) == "not judged"


@pytest.mark.parametrize(
    ("claim", "place", "numbers", "before", "after"),
    [
        ("S0-04", 0, {"to": 50}, "partly", "partly"),
        ("S0-06", 0, {"tokens_per_s": 3943}, "contradicted", "partly"),
        ("S0-10", 2, {"after": 26.6}, "partly", "supported"),
        ("S0-11", 0, {"parameters_b": 4.9}, "partly", "partly"),
        ("S1-03", 1, {"strategy": "zero3"}, "partly", "supported"),
        ("S1-05", 0, {"of": 15.2}, "contradicted", "untestable"),
        ("S1-15", 0, {"parameters_b": 5}, "contradicted", "partly"),
        ("S2-07", 0, {"value": 2}, "contradicted", "supported"),
    ],
)
def test_moved_inputs_move_the_verdict(
    made: Board, claim: str, place: int, numbers: dict[str, object], before: str, after: str
) -> None:
    judged = of(made, claim)
    assert judged.verdict == before
    assert with_numbers(judged, place, **numbers) == after
    answer = judged.findings[place].answer
    checks = dataclasses.replace(judged.claim.checks[place], numbers={**judged.claim.checks[place].numbers, **numbers})
    assert checks.find(Evidence(REPORTS)).answer not in (answer, "not judged")


# ---------------------------------------------------------------------------------------------------------- the ledger
def test_every_claim_has_its_number_and_a_verdict(made: Board) -> None:
    numbers = {"S0": 17, "S1": 30, "S2": 17, "S3": 12, "Z0": 6}
    assert [each.claim.id for each in made.judged] == [
        f"{code}-{number:02}" for code, last in numbers.items() for number in range(1, last + 1)
    ]
    assert dict(made.counts())["all"].total() == sum(numbers.values())
    rest = [each for each in made.judged if set(each.kinds) & {"arithmetic", "consistency", "virtual", "measured"}]
    assert len(rest) >= 45
    for each in made.judged:
        assert each.sentence.strip(". ")


def test_what_is_decided_by_arithmetic_alone(made: Board) -> None:
    verdicts = {each.claim.id: each.verdict for each in made.judged}
    assert {name: verdicts[name] for name in ("S0-02", "S0-06", "S1-06", "S1-11", "S1-22", "S2-07", "S3-01")} == {
        "S0-02": "partly", "S0-06": "contradicted", "S1-06": "contradicted", "S1-11": "partly",
        "S1-22": "contradicted", "S2-07": "contradicted", "S3-01": "partly",
    }  # fmt: skip
    figures = [finding.figure.value for finding in of(made, "S0-06").findings if finding.figure]
    assert [round(value) for value in figures] == [278, 263, 218]
    solved = of(made, "S0-02").findings[3].figure
    assert solved is not None
    # Put back, the solution gives the peaks: 76 GB, and 45 where an eighth of the sharded part is left.
    sharded = solved.value * 9.24
    assert 76 - sharded * 7 / 8 == pytest.approx(45)


def test_figures_that_rest_on_records_name_them(made: Board) -> None:
    known = {f"{report.name}/{run}" for report in REPORTS.iterdir()
             if (report / "runs.parquet").is_file() for run in read_parquet(report).runs["run"]}  # fmt: skip
    known |= {f"engine_keys/{probe}" for probe in Evidence(REPORTS).keys("engine_keys")}
    known |= {f"autopsy/{session}" for session in Evidence(REPORTS).arms()["session"]}
    for each in made.judged:
        for check, finding in zip(each.claim.checks, each.findings, strict=True):
            if finding.figure and FORMS[check.form].kind in ("virtual", "measured"):
                assert finding.figure.records
                assert set(finding.figure.records) <= known
                assert finding.figure.n


def minimal(**changes: str) -> str:
    claim = {"id": "S0-01", "place": "there", "says": "so", "holds_if": "so", "falls_if": "not so",
             "checks": "[{form: ratio, shows: it, of: 1, to: 2, at_most: 1}]",
             "settle": "{command: study doctor, minutes: 1, box: any}"} | changes  # fmt: skip
    lines = "\n".join(f"    {key}: {value}" for key, value in claim.items() if value)
    return f"documents:\n  - {{code: S0, title: a, scale: b}}\nclaims:\n  -\n{lines}\ncontradictions: []\n"


def checks(text: str) -> str:
    return minimal(checks=f"[{{shows: it, {text}}}]")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (minimal(sayz="so"), 12, "unknown key 'sayz'"),
        (minimal(says=""), 5, "says is missing"),
        (minimal(id="S1-01"), 5, "of no document"),
        (minimal(id="S0-1"), 5, "write it as S0-01"),
        (minimal(checks=""), 5, "checks are none"),
        (minimal(settle="{command: study doctor, box: any}"), 11, "minutes is missing"),
        (minimal(says="[so]"), 7, "write text"),
        (checks("form: guess, at_most: 1"), 10, "form is 'guess'"),
        (checks("form: ratio, of: 1, at_most: 1"), 10, "to is missing"),
        (checks("form: ratio, of: one, to: 2, at_most: 1"), 10, "write a number"),
        (checks("form: ratio, of: .nan, to: 2, at_most: 1"), 10, "write a number"),
        (checks("form: ratio, of: true, to: 2, at_most: 1"), 10, "write a number"),
        (checks("form: ratio, of: 1, to: 2, away: 3, at_most: 1"), 10, "unknown key 'away'"),
        (checks("form: ratio, of: 1, to: 2"), 10, "must be is unclear"),
        (checks("form: ratio, of: 1, to: 2, about: 3"), 10, "must be is unclear"),
        (checks("form: ratio, of: 1, to: 2, at_least: 3, at_most: 1"), 10, "both"),
        (checks("form: ratio, of: 1, to: 2, at_most: 1, against: S9-09"), 10, "name a claim"),
        (checks("form: ratio, of: 1, to: 2, at_most: 1, necessary: 1"), 10, "true or false"),
        (checks("form: state_gb, parameters_b: 1, strategy: zero4, gpus: 8, at_most: 1"), 10, "zero4"),
        (checks("form: state_gb, parameters_b: 1, strategy: zero3, gpus: 8.5, at_most: 1"), 10, "whole number"),
        (checks("form: ratio, of: 1, to: 0, at_most: 1"), 10, "divide by zero"),
        (checks("form: state_gb, parameters_b: 1, strategy: zero3, gpus: 0, at_most: 1"), 10, "divide by zero"),
        (checks("form: state_gb, parameters_b: 1, strategy: zero3, gpus: 8, precision: int8, at_most: 1"), 10, "int8"),
        (
            checks(
                "form: paired, report: laptop, task: t, strategy: zero1, over: ddp, figure: speed, least_pairs: 3,"
                " at_most: 1"
            ),
            10,
            "speed",
        ),
        (
            checks("form: counted, report: laptop, task: t, strategy: zero1, over: ddp, figure: stat, at_most: 1"),
            10,
            "stat",
        ),
        (checks("form: virtual, report: r, model: m, strategy: zero1, ranks: 8, figure: stat, at_most: 1"), 10, "stat"),
        (checks("form: virtual_furthest, report: r, model: m, printed: 4 x, at_most: 1"), 10, "4 x"),
        (checks("form: missing, needs: more, at_most: 1"), 10, "judges no figure"),
        (
            checks(
                "form: paired, report: r, task: t, strategy: zero1, over: ddp, figure: eval_loss_final,"
                " least_pairs: 3, where: size=1, at_most: 1"
            ),
            10,
            "size=1",
        ),
        (
            checks(
                "form: growth, report: r, task: t, strategy: zero1, over: ddp, figure: host_peak_rss_gib, along: time,"
                " levels: 2, least_pairs: 3, at_most: 1"
            ),
            10,
            "time",
        ),
        (minimal().replace("contradictions: []", "contradictions: [{between: [[S0-02]], why: so}]"), 12, "S0-02"),
        (minimal().replace("contradictions: []", "contradictions: [{between: [S0-01], why: so}]"), 12, "the sides"),
        (minimal(settle=""), 5, "settle is missing"),
        (minimal() + "claims: []\n", 13, "claims is there twice"),
    ],
)
def test_a_ledger_that_is_not_understood_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, said: str
) -> None:
    file = tmp_path / "ledger.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_ledger(file)
    assert said in str(refused.value)
    assert f"{file}:{line}:" in refused.value.problem


def test_the_smallest_ledger_is_read(tmp_path: Path) -> None:
    file = tmp_path / "ledger.yaml"
    file.write_text(minimal())
    (only,) = board(ledger=read_ledger(file)).judged
    assert (only.verdict, only.sentence) == ("supported", "It: 0.5; the claim needs at most 1.")


# --------------------------------------------------------------------------------------------------------- the records
def seeded(noise: float = 0.001, changed: Callable[[pd.DataFrame], None] | None = None) -> Records:
    """The committed laptop records with three seeds of each arm, and times and losses that scatter a little."""
    records = read_parquet(REPORTS / "laptop")
    one = records.runs.sort_values(["seed", "repeat"]).groupby(["workload_key", "arm"], sort=False).head(1)
    draw = np.random.default_rng(0)
    copies = []
    for seed in (42, 43, 44):
        copy = one.assign(seed=seed, repeat=1, run=one["run"] + f"-seed{seed}")
        copy["step_time_s_median"] *= 1 + noise * draw.standard_normal(len(copy))
        copy[["eval_loss_final", "train_loss_final"]] *= 1 + 0.02 * (seed - 43)
        copies.append(copy)
    runs = pd.concat(copies, ignore_index=True)
    if changed:
        changed(runs)
    return Records(runs.astype(records.runs.dtypes), records.steps)


def judged_with(records: Records, *claims: str) -> dict[str, str]:
    evidence = Evidence(REPORTS).instead("laptop", records)
    return {claim.id: judge(claim, evidence).verdict for claim in read_ledger().claims if claim.id in claims}


def scale(strategy: str, figure: str, factor: float) -> Callable[[pd.DataFrame], None]:
    def change(runs: pd.DataFrame) -> None:
        runs.loc[runs["strategy"] == strategy, figure] *= factor

    return change


def test_equal_losses_over_seeds_support_the_claim_and_one_that_is_off_does_not() -> None:
    assert judged_with(seeded(), "S3-03") == {"S3-03": "supported"}
    assert judged_with(seeded(changed=scale("zero3", "train_loss_final", 1.01)), "S3-03") == {"S3-03": "partly"}

    def all_off(runs: pd.DataFrame) -> None:
        for stage in ("zero1", "zero2", "zero3"):
            scale(stage, "train_loss_final", 0.99)(runs)

    assert judged_with(seeded(changed=all_off), "S3-03") == {"S3-03": "contradicted"}


def test_a_measured_verdict_shows_its_interval_and_its_pairs() -> None:
    evidence = Evidence(REPORTS).instead("laptop", seeded(0.01))
    (claim,) = [claim for claim in read_ledger().claims if claim.id == "S3-04"]
    judged = judge(claim, evidence)
    first = judged.document()["checks"][0]
    low, high = first["interval"]
    assert low < first["figure"] < high
    assert judged.document()["n"] == 3
    assert "], n = 3 (gpt-tiny on 2 ranks" in judged.sentence
    assert len(judged.document()["records"]) == 6


def test_fewer_seeds_than_the_ledger_asks_for_decide_nothing() -> None:
    records = seeded()
    two = Records(records.runs[records.runs["seed"] < 44].reset_index(drop=True), records.steps)
    assert judged_with(records, "S3-03", "S3-04") == {"S3-03": "supported", "S3-04": "partly"}
    assert judged_with(two, "S3-03", "S3-04") == {"S3-03": "inconclusive", "S3-04": "inconclusive"}


def test_a_time_within_noise_decides_nothing() -> None:
    def as_fast(runs: pd.DataFrame) -> None:
        times = runs[runs["strategy"] == "ddp"].set_index(["workload_key", "seed"])["step_time_s_median"]
        mine = runs["strategy"] == "zero1"
        runs.loc[mine, "step_time_s_median"] = [
            times[workload, seed] * {42: 0.9, 43: 1.0, 44: 1.1}[seed]
            for workload, seed in runs.loc[mine, ["workload_key", "seed"]].itertuples(index=False)
        ]

    assert judged_with(seeded(changed=as_fast), "S3-04") == {"S3-04": "inside noise"}
    # At another scale than the claim's, so never more than partly.
    assert judged_with(seeded(changed=scale("zero1", "step_time_s_median", 0.5)), "S3-04") == {"S3-04": "partly"}
    assert judged_with(seeded(changed=scale("zero1", "step_time_s_median", 2)), "S3-04") == {"S3-04": "partly"}


def test_gradients_that_differ_at_one_step_are_seen(made: Board) -> None:
    records = read_parquet(REPORTS / "laptop")
    found = of(made, "S2-09").findings[0]
    assert found.answer == "fails"
    assert found.figure is not None
    steps = records.steps.copy()
    steps.loc[steps["run"] == found.figure.records[-1].removeprefix("laptop/"), "grad_norm"] *= 1.05
    evidence = Evidence(REPORTS).instead("laptop", Records(records.runs, steps))
    assert judge(of(made, "S2-09").claim, evidence).findings[0].answer == "holds"


def test_runs_on_other_numbers_of_ranks_are_no_pair() -> None:
    def moved(runs: pd.DataFrame) -> None:
        runs.loc[runs["strategy"] == "zero3", "world_size"] = 4

    assert judged_with(seeded(changed=moved), "S3-03") == {"S3-03": "partly"}


def test_confounded_and_failed_runs_judge_nothing() -> None:
    def confound(runs: pd.DataFrame) -> None:
        runs.loc[runs["strategy"] == "zero3", "confounded_loss"] = "other samples"

    assert judged_with(seeded(changed=confound), "S3-03") == {"S3-03": "partly"}

    def fail(runs: pd.DataFrame) -> None:
        runs["status_state"] = "failed"

    assert judged_with(seeded(changed=fail), "S3-03", "S3-02", "S1-28") == {
        "S1-28": "inconclusive", "S3-02": "partly", "S3-03": "inconclusive",
    }  # fmt: skip


def test_a_changed_record_changes_the_verdict(made: Board) -> None:
    """S1-07 fails on one gradient that stays whole; were it split, the claim would hold."""
    records = read_parquet(REPORTS / "virtual_settings")
    runs = records.runs.copy()
    gemma = runs["model_name_or_path"].str.contains("gemma") & (runs["strategy"] == "zero3")
    for row in runs[gemma].index:
        share = int(2 * runs.loc[row, "model_parameters"] / runs.loc[row, "world_size"])
        held = {"device": share, "host": 0, "nvme": 0}
        runs.loc[row, "grads_bytes_device"] = share
        runs.loc[row, "grads_by_moment"] = json.dumps({"grads_after_backward": held, "grads_before_step": held})
    evidence = Evidence(REPORTS).instead("virtual_settings", Records(runs, records.steps))
    assert of(made, "S1-07").verdict == "partly"
    assert judge(of(made, "S1-07").claim, evidence).verdict == "supported"


@pytest.mark.parametrize(
    "report",
    [
        "claims", "virtual_claims",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("laptop", "paper_table1", "virtual_settings")),
    ],
)  # fmt: skip
def test_no_record_less_makes_a_verdict_say_more(report: str) -> None:
    records = seeded() if report == "laptop" else read_parquet(REPORTS / report)
    evidence = Evidence(REPORTS).instead(report, records)
    claims = [claim for claim in read_ledger().claims
              if any(check.numbers.get("report") == report for check in claim.checks)]  # fmt: skip
    before = {claim.id: judge(claim, evidence) for claim in claims}
    resting: dict[str, list[str]] = {}
    for name, judged in before.items():
        for finding in judged.findings:
            for run in finding.figure.records if finding.figure else ():
                if run.startswith(f"{report}/"):
                    resting.setdefault(run.removeprefix(f"{report}/"), []).append(name)
    assert resting
    # Any of the depths of one virtual rank ends its line; a sample of them is enough.
    for run, names in random.Random(0).sample(sorted(resting.items()), min(8, len(resting))):
        less = Records(records.runs[records.runs["run"] != run].reset_index(drop=True), records.steps)
        without = evidence.instead(report, less)
        for name in dict.fromkeys(names):
            after = judge(before[name].claim, without)
            assert STRENGTH[after.verdict] <= STRENGTH[before[name].verdict], (run, name)
            assert after.sentence


def test_no_probe_of_the_engine_less_makes_a_verdict_say_more(made: Board, tmp_path: Path) -> None:
    document = json.loads((REPORTS / "engine_keys" / "keys.json").read_text(encoding="utf-8"))
    claims = [each for each in made.judged if any(check.form == "probed" for check in each.claim.checks)]
    assert {each.claim.id for each in claims} == {"S1-24", "S1-29", "S3-10", "S3-11"}
    (tmp_path / "engine_keys").mkdir()
    for name in {check.numbers["probe"] for each in claims for check in each.claim.checks if check.form == "probed"}:
        probes = [probe for probe in document["probes"] if probe["name"] != name]
        (tmp_path / "engine_keys" / "keys.json").write_text(json.dumps({"probes": probes}))
        for each in claims:
            after = judge(each.claim, Evidence(tmp_path))
            assert STRENGTH[after.verdict] <= STRENGTH[each.verdict], (name, each.claim.id)
            assert after.sentence


# ------------------------------------------------------------------------------- runs that differ in what a check names
def planted(figure: str, of: Callable[[pd.Series], float]) -> Evidence:
    """The committed records with one figure made anew from the settings of each run."""
    records = read_parquet(REPORTS / "claims")
    runs = records.runs.copy()
    runs[figure] = runs.apply(of, axis=1)
    return Evidence(REPORTS).instead("claims", Records(runs.astype(records.runs.dtypes), records.steps))


def wobble(run: pd.Series) -> float:
    return 1 + 0.001 * int(np.random.default_rng(zlib.crc32(run["run"].encode())).integers(-5, 6))


@pytest.mark.parametrize("slope", [-0.3, 0.0, 0.2])
def test_the_slope_of_a_ratio_over_sizes_is_the_one_that_is_there(made: Board, slope: float) -> None:
    evidence = planted(
        "tokens_per_s",
        lambda run: 5e8 / run["model_parameters"] * wobble(run)
        * (1 if run["strategy"] == "single" else 0.8 * run["model_parameters"] ** slope),
    )  # fmt: skip
    check = next(each for each in of(made, "S2-02").claim.checks if each.form == "ratio_slope")
    found = check.find(evidence)
    assert found.figure is not None
    # Two speeds that wobble by 0.5 % at each end of sizes that lie a factor of five apart.
    assert found.figure.value == pytest.approx(slope, abs=4 * 0.005 / np.log(5))
    assert found.figure.n == 3
    assert found.answer == {-0.3: "fails", 0.0: "inside noise", 0.2: "holds"}[slope]


@pytest.mark.parametrize(("share", "answer"), [(1.0, "holds"), (0.5, "fails")])
def test_a_stage_that_split_activations_would_be_seen(made: Board, share: float, answer: str) -> None:
    evidence = planted(
        "host_peak_rss_gib",
        lambda run: 0.5 * wobble(run) + run["seq_length"] / 512 * (share if run["strategy"] == "zero3" else 1),
    )
    assert of(made, "S3-05").claim.checks[2].find(evidence).answer == answer


def test_a_loss_that_depends_on_its_micro_batches_would_be_seen(made: Board) -> None:
    def drifts(run: pd.Series) -> float:
        return float(run["train_loss_final"]) * (1.01 if run["micro_batch_size"] == 1 else 1)

    assert {each.answer for each in of(made, "S3-07").findings} == {"holds"}
    after = judge(of(made, "S3-07").claim, planted("train_loss_final", drifts))
    assert after.verdict == "contradicted"


def test_two_settings_are_compared_only_where_nothing_else_differs(made: Board) -> None:
    (check, *_) = of(made, "S3-07").claim.checks
    assert check.find(Evidence(REPORTS)).answer == "holds"
    for column, value in (("learning_rate", 0.5), ("initial_weights_sha256", "0" * 64), ("torch_version", "1.0")):

        def other(run: pd.Series, column: str = column, value: object = value) -> object:
            return value if run["micro_batch_size"] == 1 else run[column]

        records = read_parquet(REPORTS / "claims")
        runs = records.runs.assign(**{column: records.runs.apply(other, axis=1)}).astype(records.runs.dtypes)
        found = check.find(Evidence(REPORTS).instead("claims", Records(runs, records.steps)))
        assert found.answer == "not judged"
        assert "no fair pair" in found.sentence


def test_an_unfair_partner_takes_no_other_pair_of_its_seed_with_it(made: Board) -> None:
    (check, *_) = of(made, "S3-07").claim.checks
    records = read_parquet(REPORTS / "claims")
    others = records.runs[records.runs["micro_batch_size"] == 8]
    others = others.assign(run=others["run"] + "-other", learning_rate=0.5).astype(records.runs.dtypes)
    more = Records(pd.concat([records.runs, others], ignore_index=True), records.steps)
    found, before = check.find(Evidence(REPORTS).instead("claims", more)), check.find(Evidence(REPORTS))
    assert found.figure is not None
    assert found.figure == before.figure


def test_a_seed_that_lacks_one_size_has_no_slope(made: Board) -> None:
    check = next(each for each in of(made, "S2-02").claim.checks if each.form == "ratio_slope")
    assert check.find(Evidence(REPORTS)).answer != "not judged"
    records = read_parquet(REPORTS / "claims")
    gone = (records.runs["model_name_or_path"] == "gpt-tiny-14layers") & (records.runs["seed"] == 43)
    less = Records(records.runs[~gone].reset_index(drop=True), records.steps)
    assert check.find(Evidence(REPORTS).instead("claims", less)).answer == "not judged"


# ------------------------------------------------------------------------------------------- what a GPU is to decide
PARAMETERS = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}


def test_what_waits_for_a_gpu_is_judged_as_soon_as_its_suites_have_run(tmp_path: Path) -> None:
    """Every cell that one large GPU is to run has a record, with figures that nobody measured."""
    (tmp_path / "made").mkdir()
    for part in plan_suite("one_gpu", Box((141.0,), 128.0), tmp_path).slices:
        for item in part.cells:
            probes = [item] if isinstance(item, Cell) else [item.probe_of(place) for place in range(3)]
            for place, cell in enumerate(probes):
                if not (root := tmp_path / "made" / cell.id).exists() and cell.trainer == "study":
                    virtual, model = bool(cell.config.virtual_world_size), cell.config.model_name_or_path
                    asked = {key: value for key, value in cell.asked.to_dict().items() if key != "scale"} | {
                        "eval_steps": 4
                    }
                    known = {"model_layers": 24, "preset_layers": 24, "model_parameters": PARAMETERS.get(model, 10**8)}
                    write_run(
                        tmp_path / "made", cell.strategy, name=cell.id, ranks=cell.ranks, virtual=virtual,
                        steps=cell.config.max_steps or 9, state="oom" if len(probes) > 1 and place == 2 else "ok",
                        config=asked, engine=known, samples=f"{cell.config.train_samples}",
                    )  # fmt: skip
                    append_attempt(root, cell, ["accelerate"], {"attempt": 1})
        note_searches(part.cells, tmp_path / "made")
    records = read_runs(tmp_path / "made")
    records.runs["mfu"] = 0.1
    records.runs["energy_j"] = 10.0 * records.runs["runtime_s"]
    write_parquet(records, tmp_path / "gpu")
    waiting = [check for claim in read_ledger(LEDGER).claims for check in claim.checks if check.needs]
    assert {check.numbers["report"] for check in waiting} == {"gpu"}
    found = {(check.shows, check.find(Evidence(tmp_path)).sentence) for check in waiting
             if check.find(Evidence(tmp_path)).answer == "not judged"}  # fmt: skip
    assert not found
    for check in waiting:
        before = check.find(Evidence(tmp_path / "made"))
        assert (before.answer, before.sentence.endswith(f"it needs {check.needs}")) == ("not judged", True)


def test_without_any_record_verdicts_fall_back_to_arithmetic(made: Board, tmp_path: Path) -> None:
    bare = board(reports=tmp_path)
    for full, less in zip(made.judged, bare.judged, strict=True):
        assert STRENGTH[less.verdict] <= STRENGTH[full.verdict]
        assert not {"virtual", "measured"} & set(less.kinds)
        assert all(run.startswith("accelerate_configs/") for run in less.document()["records"])
    assert of(bare, "S0-06").verdict == "contradicted"
    assert of(bare, "S1-02").verdict == "inconclusive"
    assert "there are no records of paper_table1" in of(bare, "S1-02").sentence


# --------------------------------------------------------------------------------------------------- command and page
def test_the_command_prints_one_document_in_time_and_without_torch() -> None:
    code = (
        "import sys; from study.cli import main; status = main(['claims', '--json']);"
        " assert not {'torch', 'transformers', 'deepspeed'} & sys.modules.keys(); sys.exit(status)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert time.monotonic() - start < 60
    document = json.loads(done.stdout)
    claims = len(read_ledger().claims)
    assert (len(document["claims"]), sum(document["counts"]["all"].values())) == (claims, claims)
    first = document["claims"][0]
    assert {"id", "place", "says", "verdict", "sentence", "figure", "interval", "n", "records", "checks",
            "contradicts", "settle", "rests_on"} <= first.keys()  # fmt: skip


def test_the_command_prints_a_scoreboard_and_a_line_per_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["document", "supported", "contradicted", "partly", "inside", "noise", "inconclusive",
                                "untestable", "claims"]  # fmt: skip
    assert [line.split()[0] for line in lines[1:7]] == ["S0", "S1", "S2", "S3", "Z0", "all"]
    assert len([line for line in lines if line[4:5].isdigit() and line[2:3] == "-"]) == len(read_ledger().claims)


def test_the_page_is_made_of_the_ledger_and_the_records(made: Board) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(made), "run `make claims`"


def test_the_ledger_says_claims_in_its_own_words() -> None:
    assert LEDGER.is_file()
    claims = read_ledger().claims
    assert len({claim.says for claim in claims}) == len(claims)
    assert all(claim.says.endswith(".") and len(claim.says) < 300 for claim in claims)


def test_contradictions_name_the_other_side_alone(made: Board) -> None:
    assert [ids for ids, _ in made.contradictions_of("Z0-04")] == ["S0-07"]
    assert [ids for ids, _ in made.contradictions_of("S0-07")] == ["Z0-04, Z0-05"]
    assert [ids for ids, _ in made.contradictions_of("S1-06")] == ["S0-11", "itself"]


def test_a_virtual_rank_that_was_measured_whole_rests_on_one_run(made: Board) -> None:
    whole, line = of(made, "Z0-06").findings[3].figure, of(made, "Z0-06").findings[1].figure
    assert whole is not None
    assert line is not None
    assert (whole.n, line.n) == (1, 3)


def test_a_check_of_two_claims_does_not_say_which_is_wrong(made: Board) -> None:
    disputed = [(each, finding) for each in made.judged for finding in each.findings if finding.answer == "disputed"]
    assert {each.claim.id for each, _ in disputed} >= {"S1-04", "S1-10", "S1-11", "S1-18", "S1-19"}
    for each, finding in disputed:
        assert finding.kind == "consistency"
        assert each.verdict not in ("supported", "contradicted")


def test_a_check_that_is_not_there_yet_says_what_it_needs() -> None:
    check = ClaimCheck("missing", "the peak", {"needs": "a GPU"}, Region())
    found = check.find(Evidence(REPORTS))
    assert (found.answer, found.sentence) == (
        "not judged", "The peak: no record here can judge it yet: it needs a GPU"
    )  # fmt: skip
