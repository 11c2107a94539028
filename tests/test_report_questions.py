"""Answers of a report: every figure is in the records, no unknown value is stated, and one file makes a question."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from scipy import stats

from report_folders import figures
from study.records.frames import Records, read_parquet, read_records
from study.records.statistics import estimate_noise
from study.report import questions
from study.report.document import Answer, Question, cell_text
from study.report.questions import QUESTIONS, TABLES, answers
from study.report.questions.loss import largest_step_difference
from study.report.questions.runs import DependentClaim
from study.report.site.build import NOTEBOOKS, build
from synthetic_records import REPOSITORY, with_steps, write_run

STAGES = ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3_cpu")


def read_answers(records: Path | Records) -> dict[str, Answer]:
    read = read_records(records) if isinstance(records, Path) else records
    return {question.name: answer for question, answer in answers(read).items()}


def write(root: Path, factors: dict[str, float], seeds: tuple[int, ...] = (1,), **more: Any) -> None:
    """Write one run for each strategy and seed, with the strategy's time factor."""
    for seed, (strategy, factor) in itertools.product(seeds, factors.items()):
        write_run(root, strategy, seed=seed, time_factor=factor, **more)


def row(table: pd.DataFrame, name: str) -> pd.Series:
    (match,) = [item for _, item in table.iterrows() if item["Strategy"] == name]
    return match


def notes(answer: Answer) -> str:
    return "\n".join(answer.notes)


def test_questions_have_unique_names_and_notebooks() -> None:
    assert len({question.name for question in QUESTIONS}) == len(QUESTIONS)
    assert len(TABLES) == sum(len(question.tables) for question in QUESTIONS)
    for question in QUESTIONS:
        assert question.title.endswith("?")
        if question.notebook is not None:
            assert (NOTEBOOKS / f"{question.notebook}.ipynb").is_file()
        else:
            assert not question.figures


def test_a_new_question_is_one_file_and_its_place_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables are on the first page without a notebook, and the page's head has the noise of repeated runs."""
    steps = Question(
        name="steps",
        title="How many steps ran?",
        answer=lambda records: Answer(f"{len(records.steps)} steps.", pd.DataFrame({"Runs": [len(records.runs)]})),
        tables={"steps_of_runs": lambda records: records.runs[["run", "steps"]]},
    )
    monkeypatch.setattr(questions, "QUESTIONS", (steps,))
    write(tmp_path / "runs", {"ddp": 1.0, "zero2": 1.0}, (1, 2, 3))
    build(read_records(tmp_path / "runs"), "mine", tmp_path / "report")
    page, markdown = ((tmp_path / "report" / name).read_text() for name in ("index.html", "summary.md"))
    for text in (page, markdown):
        assert "How many steps ran?" in text
        assert "48 steps." in text
    assert "Steps of runs in full" in page
    assert "Residual SD of like runs" in page.partition("</header>")[0]
    assert [file.name for file in (tmp_path / "report").glob("*.html")] == ["index.html"]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    root = tmp_path_factory.mktemp("stages")
    write(root, dict.fromkeys(STAGES, 1.0), (42,))
    return read_answers(root)


def test_memory_traffic_and_time_are_compared_with_ddp(stages: dict[str, Answer]) -> None:
    # Bytes per parameter: 4 + 4 + 8 with DDP; stage 1 halves 12 of optimizer, 2 also gradients, 3 also parameters.
    memory, traffic, time, offload = (stages[name] for name in ("memory", "traffic", "time", "offload"))
    assert memory.sentence == "Sharding reduces the model state of a rank to 62 % of `ddp`'s (`zero3`)."
    shares = {arm: row(memory.table, arm)["State, % of ddp"] for arm in ("ddp", "zero1", "zero2", "zero3")}
    assert shares == {"ddp": "100 %", "zero1": "88 %", "zero2": "75 %", "zero3": "62 %"}
    assert traffic.sentence == (
        "Sharding sends 1.00 to 2.00 times the ring bytes (NCCL) of `ddp` per step, most with `zero3`."
    )
    assert row(traffic.table, "zero3")["x ddp"] == "2.00"
    assert "gathered" not in notes(traffic)
    assert row(traffic.table, "single")["Ring bytes (NCCL), MiB"] == "0"
    assert time.sentence == "The step time of sharding strategies differs from `ddp`, but is not significant."
    assert float(row(time.table, "zero3")["x ddp"].removeprefix("~ ")) == pytest.approx(1.5, abs=0.1)
    assert float(row(time.table, "zero1")["x ddp"].removeprefix("~ ")) == pytest.approx(1.1, abs=0.06)
    assert "~: not significant.\nOne run of each strategy: the noise is not known" in notes(time)
    # Offload is a separate question.
    assert "zero3_cpu" not in {*memory.table["Strategy"], *traffic.table["Strategy"], *time.table["Strategy"]}
    assert row(offload.table, "zero3_cpu")["Freed"] == "80 %"
    assert offload.sentence.startswith("Offload frees 80 % of the model state on the device")


def test_the_traffic_of_zero3_is_explained_where_parameters_stay_gathered() -> None:
    traffic = read_answers(read_parquet(REPOSITORY / "reports" / "laptop"))["traffic"]
    assert list(row(traffic.table.droplevel(0, axis=1), "zero3")["x ddp"]) == ["0.99", "1.00"]
    assert "`stage3_param_persistence_threshold`" in notes(traffic)


# The loss ends at 1.7 + 4 exp(-8/12) plus a little noise: a shift of 0.1 is largest relative to the smallest loss.
@pytest.mark.parametrize(
    ("shift", "config", "sentence", "same"),
    [
        (0.1, {}, "Yes, under 1 of 6 strategies: `zero2` differs from its baseline by 2.7 %.", "5 of 6"),
        (0.001 * 3.75, {}, "No: in all 6", "6 of 6"),
        (0.003 * 3.75, {}, "Yes, under 1 of 6", "5 of 6"),
        # A difference below the spacing of bf16 numbers is none in bf16.
        (0.003 * 3.75, {"precision": "bf16"}, "No: in all 6", "6 of 6"),
        (0.006 * 3.75, {"precision": "bf16"}, "Yes, under 1 of 6", "5 of 6"),
    ],
)
def test_a_loss_is_the_same_within_the_margin_of_its_precision(
    tmp_path: Path, shift: float, config: dict[str, str], sentence: str, same: str
) -> None:
    for strategy in STAGES:
        write_run(tmp_path, strategy, loss_shift=shift if strategy == "zero2" else 0.0, config=config)
    loss = read_answers(tmp_path)["loss"]
    assert loss.sentence.startswith(sentence)
    assert (loss.table["Same loss"].item(), loss.table["Worst strategy"].item()) == (same, "zero2")
    assert ("was widened after that" in notes(loss)) is bool(config)


def test_a_step_is_compared_with_the_loss_of_that_step(tmp_path: Path) -> None:
    """0.1 % of a large early loss would be 2 % of the final loss, and the reverse."""

    def change(step: dict[str, Any], first: float, later: float) -> dict[str, Any]:
        return step | {"loss": first if step["step"] == 1 else later}

    for strategy, first, later in (("ddp", 5.0, 0.01), ("zero2", 5.005, 0.01), ("zero3", 5.0, 0.0101)):
        path = write_run(tmp_path, strategy, name=strategy)
        with_steps(path, functools.partial(change, first=first, later=later))
    loss = read_answers(tmp_path)["loss"]
    assert loss.sentence == "Yes, under 1 of 2 strategies: `zero3` differs from its baseline by 1.00 %."
    assert row(TABLES["loss"](read_records(tmp_path)), "zero2")["of the loss there"] == "0.10 %"


def test_a_lost_run_of_the_baseline_takes_no_strategy_out_of_the_answer(tmp_path: Path) -> None:
    """One seed has another repeat; the other has none, so the strategy is in no pair of that seed."""
    for seed, repeat in ((1, 1), (1, 2), (2, 1)):
        state = "failed" if repeat == 2 or seed == 2 else "ok"
        write_run(tmp_path, "ddp", seed=seed, repeat=repeat, state=state, reason="" if state == "ok" else "node lost")
        write_run(tmp_path, "zero2", seed=seed, repeat=repeat, loss_shift=0.1)
    records = read_records(tmp_path)
    assert set(records.runs["confounded"]) == {""}
    (lacks,) = {note for note in records.runs["notes"] if note}
    assert lacks == "no ddp with seed 2 ended ok, so it is in no ratio and no difference"
    assert (
        "under 1 of 1 strategies: `zero2` differs from its baseline by 2.7 %" in read_answers(records)["loss"].sentence
    )
    assert figures("loss_curves", records)["loss_difference"].alt.endswith("zero2 0.100.")


def test_strategies_without_a_common_seed_are_named(tmp_path: Path) -> None:
    for strategy, seed in (("ddp", 1), ("ddp", 2), ("zero2", 1), ("zero3", 3)):
        write_run(tmp_path, strategy, seed=seed)
    loss = read_answers(tmp_path)["loss"]
    assert loss.table["Same loss"].tolist() == ["1 of 1"]
    assert "Not compared, because the baseline has no run with any of their seeds: `zero3`." in notes(loss)


@pytest.mark.parametrize(
    "reason", ["the loss is NaN at step 3", "the evaluation loss is not a number: the step", "lost"]
)
def test_a_seed_that_diverges_under_one_strategy_only_is_another_loss(reason: str, tmp_path: Path) -> None:
    for strategy, seed in itertools.product(("ddp", "zero2", "zero3"), (1, 2)):
        has_failed = (strategy, seed) == ("zero3", 2)
        write_run(tmp_path, strategy, seed=seed, state="failed" if has_failed else "ok", reason=has_failed * reason)
    loss = read_answers(tmp_path)["loss"]
    (line,) = loss.table.to_dict("records")
    if reason == "lost":
        assert line["Same loss"] == "2 of 2"
        return
    assert "`zero3` diverged to NaN, but its baseline did not (seed 2)." in loss.sentence
    assert (line["Same loss"], line["Worst strategy"], line["Max difference"]) == ("1 of 2", "zero3", "NaN")


def test_a_difference_that_reruns_have_too_is_not_another_loss(tmp_path: Path) -> None:
    """Steps differ by 0.3 % at random, twice the margin and more; one strategy differs in truth."""
    chance = random.Random(1)
    for strategy, shift in (("ddp", 0.0), ("zero1", 0.0), ("zero2", 0.0), ("zero3", 0.2)):
        for seed, repeat in itertools.product((1, 2, 3), (1, 2)):
            path = write_run(tmp_path, strategy, seed=seed, repeat=repeat, loss_shift=shift)
            with_steps(path, lambda row: row | {"loss": row["loss"] * math.exp(chance.gauss(0, 0.003))})
    records = read_records(tmp_path)
    loss = read_answers(records)["loss"]
    assert loss.sentence.startswith("Yes, under 1 of 3 strategies: `zero3` differs"), loss.sentence
    assert loss.table["Same loss"].tolist() == ["0 of 3"]
    assert "Inconclusive: above the margin, but below 2 times the difference of reruns." in notes(loss)
    without_zero3 = dataclasses.replace(records, runs=records.runs[records.runs["strategy"] != "zero3"])
    assert read_answers(without_zero3)["loss"].sentence.startswith("Inconclusive under 2 of 2 strategies")
    runs = without_zero3.runs[without_zero3.runs["repeat"] == 1]
    once = read_answers(dataclasses.replace(without_zero3, runs=runs))["loss"]
    assert once.sentence.startswith("Yes, under 2 of 2 strategies")
    assert "There are no reruns, so the run-to-run variation of the loss is unknown." in notes(once)


def test_losses_with_dropout_are_compared_by_their_seeds(tmp_path: Path) -> None:
    """Dropout masks differ between strategies, so steps differ although the training is equivalent."""
    for seed, (strategy, shift) in itertools.product((1, 2, 3, 4), {"ddp": 0.0, "zero2": 0.002, "zero3": 0.3}.items()):
        shift *= 1 if seed % 2 else 0.9
        write_run(tmp_path, strategy, seed=seed, config={"dropout": -1.0}, loss_shift=shift)
    records = read_records(tmp_path)
    loss = read_answers(records)["loss"]
    assert loss.sentence.startswith("Yes, under 1 of 2 strategies: `zero3` differs from its baseline by 7.")
    assert loss.table["Same loss"].tolist() == ["1 of 2"]
    assert "masks differ between strategies" in notes(loss)
    line = row(TABLES["loss"](records), "zero2")
    assert line["Equivalent"].startswith("equivalent (")
    assert line["of the loss there"] == "-"
    seed_1 = dataclasses.replace(records, runs=records.runs[records.runs["seed"] == 1])
    loss = read_answers(seed_1)["loss"]
    assert loss.sentence.startswith("Inconclusive under 2 of 2 strategies: their differences are neither")


def test_runs_without_a_loss_in_every_step_are_not_compared() -> None:
    steps = {"mine": pd.DataFrame({"loss": [1.0, math.nan, math.nan]}), "its": pd.DataFrame({"loss": [1.0, 1.0, 1.0]})}
    assert math.isnan(largest_step_difference([("mine", "its")], steps).ratio)
    steps["mine"]["loss"] = [1.0, 1.5, 1.0]
    assert largest_step_difference([("mine", "its")], steps).ratio == 0.5


def test_nothing_is_compared_with_a_ddp_that_breaks_an_invariant(tmp_path: Path) -> None:
    write(tmp_path, {"single": 1.0, "zero3": 1.0}, (1, 2, 3))
    write(tmp_path, {"ddp": 1.0}, (1, 2, 3), environment={"threads_per_rank": 8})
    by_name = read_answers(tmp_path)
    assert by_name["memory"].sentence.endswith("of `single`'s (`zero3`).")
    assert "~" not in row(by_name["time"].table, "ddp")["x single"]
    assert row(TABLES["runtime"](read_records(tmp_path)), "ddp")["In words"] == "not judged"


def test_confounded_and_failed_strategies_are_named_and_in_no_answer(tmp_path: Path) -> None:
    write(tmp_path, {"single": 1.0, "ddp": 1.0, "zero2": 1.0}, (42,))
    write_run(tmp_path, "zero3", time_factor=0.01, environment={"threads_per_rank": 8})
    write_run(tmp_path, "zero3_cpu", state="oom", reason="CUDA out of memory")
    by_name = read_answers(tmp_path)
    assert by_name["loss"].table["Same loss"].tolist() == ["2 of 2"]
    for name, column in (("memory", "State, % of ddp"), ("time", "Step, ms"), ("traffic", "Ring bytes (NCCL), MiB")):
        answer = by_name[name]
        assert "zero3" not in answer.sentence
        assert row(answer.table, "zero3")[column].endswith(" †")
        assert row(answer.table, "zero3_cpu").tolist()[1:] == ["oom", "-"]
        assert "`zero3`: not a fair comparison †, threads per rank: 8, baseline 1." in notes(answer)
        assert "`zero3_cpu`: ended oom, CUDA out of memory." in notes(answer)
    assert "zero3" not in by_name["advice"].sentence
    assert "`zero3_cpu`: ended oom" in notes(by_name["advice"])
    failed = row(TABLES["summary"](read_records(tmp_path)), "zero3_cpu")
    assert failed["Outcome"] == "oom: CUDA out of memory"
    assert cell_text(failed["Comparable"]) == "-"


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Return answers for four seeds: stage 0 is as fast as DDP, stage 3 takes 1.5 times as long."""
    root = tmp_path_factory.mktemp("seeds")
    write(root, dict.fromkeys(("single", "ddp", "zero0", "zero3"), 1.0), (42, 43, 44, 45))
    write_run(root, "ddp", seed=42, repeat=2)
    return read_answers(root)


def test_seeds_are_tested_for_equivalence_and_reruns_measure_chance(seeds: dict[str, Answer]) -> None:
    (line,) = seeds["loss"].table.to_dict("records")
    assert line["Equivalent"] == "3 of 3"
    assert "seed by seed (n = 4)." in notes(seeds["loss"])
    assert notes(seeds["runs"]) == "4 to 5 runs of each strategy."
    # Two reruns differ by the noise of a synthetic record: 1e-7 of a loss of about 4.
    assert 0 < float(line["Rerun"].removesuffix(" %")) < 1e-4
    # The margin is 0.12 % of the loss, whose floor is 1.7.
    (margin_percent,) = re.findall(r"The margin is at most ([\d.]+) %", notes(seeds["loss"]))
    assert 0.12 < float(margin_percent) < 0.25


def test_a_significant_difference_in_time_is_named_with_its_interval(seeds: dict[str, Answer]) -> None:
    time = seeds["time"]
    middle, low, high = map(float, re.findall(r"[\d.]+\d", row(time.table, "zero3")["x ddp"]))
    assert time.sentence == f"A step with sharded state takes {middle:.2f} times as long as one of `ddp`."
    assert low < 1.5 < high
    assert middle == pytest.approx(1.5, abs=0.05)
    assert row(time.table, "zero0")["x ddp"].startswith("~ ")
    assert re.search(r"Residual SD of like runs: [\d.]+ % \(\d+ degrees of freedom\)\. With 4 seeds", notes(time))


def test_the_least_significant_difference_and_the_seeds_needed_are_by_the_t_test_s_power(tmp_path: Path) -> None:
    for seed, factor in ((1, 0.94), (2, 1.0), (3, 1.06), (4, 1.0)):
        write(tmp_path, {"ddp": factor, "zero2": 2 - factor, "zero0": 1.0}, (seed,))
    by_name, spread = read_answers(tmp_path), estimate_noise(read_records(tmp_path).runs, "step_time_s_median")
    assert spread is not None

    def power(seeds: int) -> float:
        """Return the power of a paired test at 5 %: a difference has sqrt(2) times the noise of one strategy."""
        beyond = stats.t.ppf(0.975, seeds - 1)
        shift = math.log(1.05) / (spread.log_sd * math.sqrt(2)) * math.sqrt(seeds)
        return float(1 - stats.nct.cdf(beyond, seeds - 1, shift) + stats.nct.cdf(-beyond, seeds - 1, shift))

    needed = next(seeds for seeds in range(2, 1000) if power(seeds) >= 0.8)
    assert by_name["advice"].table["Seeds to find a 5 % difference of two"].tolist() == [str(needed)]
    # Bonferroni's level for the two tests against the baseline.
    beyond = stats.t.ppf(1 - 0.05 / 2 / 2, 4 / (1 / 3 + 1 / spread.df))
    sentence = r"the least significant difference is ([\d.]+) %, which is found half of the time"
    (least,) = re.findall(sentence, notes(by_name["time"]))
    assert float(least) == pytest.approx(100 * math.expm1(beyond * spread.log_sd * math.sqrt(2 / 4)), rel=0.02)


def test_strategies_with_three_seeds_are_judged_where_others_have_one(tmp_path: Path) -> None:
    """The laptop suite is such a case: with `single` as baseline, the other seeds would have no partner."""
    several = ("ddp", "zero0", "zero1", "zero2", "zero3")
    write(tmp_path, dict.fromkeys((*several, "single", "zero3_cpu", "fsdp2"), 1.0), (42,))
    write(tmp_path, dict.fromkeys(several, 1.0), (43, 44))
    for repeat in (2, 3):
        write_run(tmp_path, "ddp", seed=42, repeat=repeat)
    records = read_records(tmp_path)
    assert set(records.runs["confounded"]) == {""}
    assert set(records.runs["baseline"].str.split("-2x-").str[0]) == {"gpt-wikitext-gpt-tiny-ddp"}
    by_name = read_answers(records)
    assert re.fullmatch(
        r"A step with sharded state takes 1\.[01]\d to 1\.[45]\d times as long as one of `ddp`; 1 of 4 strategies are"
        r" not significant\.", by_name["time"].sentence,
    ), by_name["time"].sentence  # fmt: skip
    assert row(by_name["time"].table, "fsdp2")["x ddp"].startswith("~ ")
    assert "Fewer than three seeds, so not judged: `single`, `zero3_cpu` and `fsdp2`." in notes(by_name["advice"])
    (line,) = by_name["loss"].table.to_dict("records")
    assert (line["Same loss"], line["Equivalent"]) == ("7 of 7", "4 of 4")


THREE = (1, 2, 3)
ADVICE: dict[str, tuple[list[tuple[dict[str, float], tuple[int, ...]]], str, str, str]] = {
    "as fast": ([({"ddp": 1.0, "zero0": 1.0, "zero3": 1.0}, (42, 43, 44, 45))],
                "Nothing is significantly faster than `ddp` and `zero0`.", "ddp, zero0", ""),
    "faster": ([({"ddp": 1.0, "zero2": 0.4, "zero3": 1.0}, THREE)], "`zero2` is the fastest.", "zero2", ""),
    "one ran once": ([({"ddp": 1.0, "zero2": 2.0}, THREE), ({"zero0": 0.5}, (1,))],
                     "Of the strategies with three seeds, `ddp` is the fastest.", "ddp",
                     "Fewer than three seeds, so not judged: `zero0`."),
    "one run each": ([({"ddp": 1.0, "zero2": 0.1}, (1,))],
                     "No advice on time: with fewer than three seeds, differences are not significant.", "not judged",
                     "This machine has no GPU"),
}  # fmt: skip


@pytest.mark.parametrize("case", ADVICE)
def test_advice_names_the_strategies_that_none_is_significantly_faster_than(case: str, tmp_path: Path) -> None:
    written, sentence, fastest, note = ADVICE[case]
    for factors, seed_group in written:
        write(tmp_path, factors, seed_group, gpu="no GPU" not in note)
    # A profiled run is too slow to count.
    write_run(tmp_path, "ddp", config={"profile_steps": 3, "max_steps": 8}, name="profiled", time_factor=0.01)
    advice = read_answers(tmp_path)["advice"]
    (line,) = advice.table.to_dict("records")
    assert (advice.sentence, line["Fastest, or not significantly slower"]) == (sentence, fastest)
    assert ("Step, ms" in line) is (fastest != "not judged")
    assert note in notes(advice)
    least = {"as fast": "zero3, ", "faster": "zero3, "}.get(case, "zero2, ")
    assert line["Least model state"].startswith(least)


def test_without_a_gpu_cpu_offload_frees_nothing(tmp_path: Path) -> None:
    """Host memory replaces the device's. NVMe offload frees the optimizer's 12 of 20 bytes per parameter."""
    write(tmp_path, dict.fromkeys(("zero3", "zero3_cpu", "zero3_nvme_optimizer"), 1.0), gpu=False)
    offload = read_answers(tmp_path)["offload"]
    assert row(offload.table, "zero3_cpu")["Freed"] == "0.00 %"
    assert row(offload.table, "zero3_nvme_optimizer")["Freed"] == "60 %"
    assert offload.sentence.startswith(
        "Without a GPU, CPU offload frees nothing; NVMe offload frees 60 % of the model state; offload changes"
    )


def test_speed_by_batch_is_relative_to_the_baseline_of_the_same_batch(tmp_path: Path) -> None:
    def write_seed(seed: int) -> None:
        for batch, factor in ((16, 1.0), (64, 0.8)):
            write(tmp_path, {"ddp": 1.0, "zero3": factor}, (seed,), config={"global_batch_size": batch})

    write_seed(42)
    sentence = read_answers(tmp_path)["batch_size"].sentence
    assert sentence == "The speed of `zero3` differs from `ddp`, but at both ends it is not significant."
    write_seed(43)
    write_seed(44)
    records = read_records(tmp_path)
    answer = read_answers(records)["batch_size"]
    small, large = (int(cell.removesuffix(" %")) for cell in row(answer.table, "zero3").tolist()[1:])
    assert (small, large) == (pytest.approx(100 / 1.5, abs=3), pytest.approx(100 / 1.2, abs=4))
    assert row(answer.table, "ddp").tolist() == ["ddp", "100 %", "100 %"]
    assert answer.sentence == (
        f"The speed of `zero3` in percent of `ddp`: {small} % at batch 16 and {large} % at batch 64."
    )
    runs = records.runs
    runs.loc[(runs["strategy"] == "zero3") & (runs["global_batch_size"] == 64), "confounded"] = "clipping"
    answer = read_answers(records)["batch_size"]
    assert row(answer.table, "zero3").tolist()[2].endswith(" †")
    assert answer.sentence == "No strategy is comparable with `ddp` at more than one place."


def test_claims_that_depend_on_the_records_have_links(tmp_path: Path) -> None:
    # Without an answer that has a notebook.
    write_run(tmp_path / "runs", "ddp", state="failed", reason="x")
    evil = "<img src=x onerror=alert(1)> | *x*"
    resting = [
        DependentClaim("S9-01", "../docs/claims.md#s9-01", "holds (derived)", "It is so.", f"It was so. {evil}"),
        DependentClaim("S9-02", "", "holds in part (derived)", "It may be so.", "It was."),
    ]
    records = read_records(tmp_path / "runs")
    assert "claims" not in read_answers(records)
    build(records, "mine", tmp_path / "report", claims=resting)
    summary, page = ((tmp_path / "report" / name).read_text() for name in ("summary.md", "index.html"))
    assert "| [S9-01](../docs/claims.md#s9-01) | holds (derived) | It is so. |" in summary
    assert "| S9-02 | holds in part (derived) | It may be so. | It was. |" in summary
    assert '<a href="../docs/claims.md#s9-01">S9-01</a>' in page
    assert "The findings on 2 published claims depend on these records" in page
    assert "<img src=x" not in page
    assert "<img" not in summary


def test_nothing_is_answered_from_nothing(tmp_path: Path) -> None:
    assert read_answers(tmp_path) == {}
    write_run(tmp_path, "zero3", state="failed", reason="x")
    assert list(read_answers(tmp_path)) == ["runs"]
    virtual: dict[str, Any] = {
        "virtual": True,
        "ranks": 64,
        "config": {"global_batch_size": 64},
        "environment": {"cpu": "Another"},
    }
    write_run(tmp_path / "v", "zero3", **virtual)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "status.json").write_text("{")
    by_name = read_answers(tmp_path)
    assert list(by_name) == ["layers", "runs"]
    assert by_name["runs"].sentence == "1 runs succeeded and 1 did not; 1 records were excluded."
    outcomes = by_name["runs"].table
    assert dict(zip(outcomes["Outcome"], outcomes["Runs"], strict=True)) == {"failed": 1, "ok": 1}
    assert "2 different machines" in notes(by_name["runs"])
    assert "there is no loss, no accuracy, and no throughput" in notes(by_name["layers"])


def test_the_committed_records_have_short_answers() -> None:
    by_name = read_answers(read_parquet(REPOSITORY / "reports" / "laptop"))
    assert set(by_name) == {"loss", "memory", "time", "traffic", "offload", "advice", "ranks", "runs"}
    for name, answer in by_name.items():
        text = "\n".join([answer.sentence, answer.table.to_csv(), *answer.notes])
        assert "nan" not in text, name
        assert "<NA>" not in text, name
        assert len(answer.sentence) < 160, name
        assert len(answer.table) <= 10, name
