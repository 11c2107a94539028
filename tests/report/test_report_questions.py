from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy import stats

from report_folders import figures, row
from study.config.places import REPOSITORY
from study.config.text import percent
from study.records.frames import Records, read_parquet, read_records
from study.records.statistics import NOT_SIGNIFICANT_MARK, NOT_TESTED_MARK, estimate_noise
from study.records.workloads import read_arm
from study.report.document import Answer
from study.report.facts import CAPTIONS, caption, captions
from study.report.questions import QUESTIONS, TABLES, answers
from study.report.questions.comparison import MarkedText, mark_notes
from synthetic_records import answered, with_steps, write_run


class Answers(dict[str, Answer]):
    """The answers of records by the names of their questions, each found when it is first read."""

    def __init__(self, records: Path | Records) -> None:
        self.records = read_records(records) if isinstance(records, Path) else records

    def __missing__(self, name: str) -> Answer:
        (question,) = (question for question in QUESTIONS if question.name == name)
        return self.setdefault(name, answered(question.answer(self.records)))


def write(root: Path, factors: dict[str, float], seeds: tuple[int, ...] = (1,), **more: Any) -> None:
    """Write one run for each strategy and seed, with the strategy's time factor."""
    for seed, (strategy, factor) in itertools.product(seeds, factors.items()):
        write_run(root, strategy, seed=seed, time_factor=factor, **more)


def notes(answer: Answer) -> str:
    return "\n".join(answer.notes)


# The loss ends at 1.7 + 4 exp(-8/12) plus a little noise: a shift of 0.1 is largest relative to the smallest loss.
@pytest.mark.parametrize(
    ("shift", "precision", "largest", "same"),
    [
        (0.1, "fp32", "2.7 %", "5 of 6"),
        (0.001 * 3.75, "fp32", "0.10 %", "6 of 6"),
        (0.003 * 3.75, "fp32", "0.30 %", "5 of 6"),
        # A difference below the spacing of bf16 numbers is none in bf16.
        (0.003 * 3.75, "bf16", "0.30 %", "6 of 6"),
        (0.006 * 3.75, "bf16", "0.60 %", "5 of 6"),
    ],
)
def test_a_loss_is_the_same_within_the_margin_of_its_precision(tmp_path, shift, precision, largest, same):
    for strategy in ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3_cpu"):
        write_run(tmp_path, strategy, loss_shift=shift * (strategy == "zero2"), config={"precision": precision})
    loss = Answers(tmp_path)["loss"]
    assert [headline.value for headline in loss.headlines] == [largest, same]
    assert (loss.headlines[0].strategy, loss.headlines[0].n) == ("zero2", 1)
    assert (loss.table["Same loss"].item(), loss.table["Worst strategy"].item()) == (same, "zero2")


def test_a_step_is_compared_with_the_loss_of_that_step(tmp_path: Path) -> None:
    """0.1 % of a large early loss would be 2 % of the final loss, and the reverse."""
    for strategy, *losses in (("ddp", 5.0, 0.01), ("zero2", 5.005, 0.01), ("zero3", 5.001, 0.0101)):
        with_steps(write_run(tmp_path, strategy), (lambda by: lambda row: row | {"loss": by[row["step"] > 1]})(losses))
    loss = Answers(tmp_path)["loss"]
    (largest, same), (line,) = loss.headlines, loss.table.to_dict("records")
    assert (largest.value, largest.strategy, same.value) == ("1.00 %", "zero3", "1 of 2")
    assert (line["Baseline"], line["At step"]) == ("ddp", "2")
    assert row(TABLES["loss"](read_records(tmp_path)), "zero2")["of the loss there"] == "0.10 %"


def test_comparisons_with_plain_training_come_first(tmp_path: Path) -> None:
    write(tmp_path, {"ddp": 1.0, "zero2": 1.0}, (1,))
    for strategy in ("zero1", "zero3"):
        write_run(tmp_path, strategy, loss_shift=0.003 * (strategy == "zero3"), config={"seq_length": 32})
    loss = Answers(tmp_path)["loss"]
    assert loss.headlines[0].value == "0.000006 %"
    assert loss.headlines[0].what.endswith("from that of `ddp`")
    by_baseline = loss.table.set_index("Baseline")["Max difference"]
    assert by_baseline.to_dict() == {"ddp": "0.000006 %", "zero1": "0.08 %"}


def test_a_lost_run_of_the_baseline_takes_no_strategy_out_of_the_answer(tmp_path: Path) -> None:
    """One seed has another repeat; the other has none, so the strategy is in no pair of that seed."""
    for seed, repeat in ((1, 1), (1, 2), (2, 1)):
        state = "failed" if repeat == 2 or seed == 2 else "ok"
        write_run(tmp_path, "ddp", seed=seed, repeat=repeat, state=state, reason="" if state == "ok" else "node lost")
        write_run(tmp_path, "zero2", seed=seed, repeat=repeat, loss_shift=0.1)
    records = read_records(tmp_path)
    assert set(records.runs["confounded"]) == {""}
    lacks = "no ddp with seed 2 ended ok, so it is in no ratio and no difference"
    assert {*records.runs["notes"]} == {"", lacks}
    (largest, same), drawn = Answers(records)["loss"].headlines, figures("loss_curves", records)
    assert (largest.value, largest.strategy, same.value) == ("2.7 %", "zero2", "0 of 1")
    assert drawn["loss_difference"].alt.partition(". ")[0].endswith("zero2 0.100")
    assert [text.get_text() for text in drawn["loss"].figure.axes[1].texts] == ["zero2\n2.7 %", "margin 0.12 %"]


@pytest.mark.parametrize("reason", ["the loss is NaN at step 3", "the evaluation loss is not a number: the step"])
def test_a_seed_that_diverges_under_one_strategy_only_is_another_loss(reason: str, tmp_path: Path) -> None:
    for strategy, seed in itertools.product(("ddp", "zero2", "zero3"), (1, 2)):
        has_failed = (strategy, seed) == ("zero3", 2)
        write_run(tmp_path, strategy, seed=seed, state="failed" if has_failed else "ok", reason=has_failed * reason)
    loss = Answers(tmp_path)["loss"]
    assert (loss.headlines[0].value, loss.headlines[0].strategy) == ("NaN", "zero3")
    assert "where `ddp` trained to its end" in loss.headlines[0].what
    (line,) = loss.table.to_dict("records")
    assert (line["Same loss"], line["Worst strategy"], line["Max difference"]) == ("1 of 2", "zero3", "NaN")


def test_a_difference_that_reruns_have_too_is_not_another_loss(tmp_path: Path) -> None:
    """Steps differ by 0.3 % at random, twice the margin and more; one strategy differs in truth."""
    chance = random.Random(1)
    for strategy, shift in (("ddp", 0.0), ("zero1", 0.0), ("zero2", 0.0), ("zero3", 0.2)):
        for seed, repeat in itertools.product((1, 2, 3), (1, 2)):
            path = write_run(tmp_path, strategy, seed=seed, repeat=repeat, loss_shift=shift)
            with_steps(path, lambda row: row | {"loss": row["loss"] * math.exp(chance.gauss(0, 0.003))})
    records = read_records(tmp_path)
    loss = Answers(records)["loss"]
    assert loss.headlines[0].strategy == "zero3"
    assert loss.table[["Same loss", "Inconclusive"]].to_numpy().tolist() == [["0 of 3", 2]]
    without_zero3 = dataclasses.replace(records, runs=records.runs[records.runs["strategy"] != "zero3"])
    assert Answers(without_zero3)["loss"].table["Inconclusive"].tolist() == [2]
    once = Answers(dataclasses.replace(records, runs=without_zero3.runs.query("repeat == 1")))["loss"]
    assert once.headlines[1].value == "0 of 2"
    assert "Inconclusive" not in once.table
    assert "There are no reruns" in notes(once)


def test_nothing_is_compared_with_a_ddp_that_breaks_an_invariant(tmp_path: Path) -> None:
    write(tmp_path, {"single": 1.0, "zero3": 1.0}, (1, 2, 3))
    write(tmp_path, {"ddp": 1.0}, (1, 2, 3), environment={"threads_per_rank": 8})
    by_name = Answers(tmp_path)
    state = by_name["memory"].headlines[0]
    assert (state.value[0], state.strategy, state.bounds) == ("-", "zero3", "ranks: 2")
    assert state.what.endswith("relative to that of `single`")
    assert "n.s." not in row(by_name["time"].table, "ddp")["x single"]
    assert row(TABLES["runtime"](read_records(tmp_path)), "ddp")["In words"] == "not judged"


def test_confounded_and_failed_strategies_are_named_and_in_no_answer(tmp_path: Path) -> None:
    write(tmp_path, {"single": 1.0, "ddp": 1.0, "zero2": 1.0}, (42,))
    write_run(tmp_path, "zero3", time_factor=0.01, environment={"threads_per_rank": 8})
    write_run(tmp_path, "zero3_cpu", state="oom", reason="CUDA out of memory")
    by_name = Answers(tmp_path)
    assert by_name["loss"].table["Same loss"].tolist() == ["2 of 2"]
    for name, column in (("memory", "State, % of ddp"), ("time", "Step, ms"), ("traffic", "Ring bytes (NCCL), MiB")):
        answer = by_name[name]
        assert "zero3" not in " ".join(headline.words for headline in answer.headlines)
        assert row(answer.table, "zero3")[column].endswith(" †")
        outcome, *figures_of_row = row(answer.table, "zero3_cpu").tolist()[1:]
        assert (outcome, {*figures_of_row}) == ("oom", {"-"})
        assert "`zero3`: not a fair comparison †, threads per rank: 8, baseline 1." in notes(answer)
        assert "`zero3_cpu`: ended oom, CUDA out of memory." in notes(answer)
    assert "zero3" not in repr(by_name["advice"].headlines)


def test_the_least_significant_difference_and_the_seeds_needed_are_by_the_t_test_s_power(tmp_path: Path) -> None:
    for seed, factor in ((1, 0.94), (2, 1.0), (3, 1.06), (4, 1.0)):
        write(tmp_path, {"ddp": factor, "zero2": 2 - factor, "zero0": 1.0}, (seed,))
    by_name, spread = Answers(tmp_path), estimate_noise(read_records(tmp_path).runs, "step_time_s_median")
    assert spread is not None

    def power(seeds: int) -> float:
        """Return the power of a paired test at 5 %: a difference has sqrt(2) times the noise of one strategy."""
        beyond = stats.t.ppf(0.975, seeds - 1)
        shift = math.log(1.05) / (spread.log_sd * math.sqrt(2)) * math.sqrt(seeds)
        return float(1 - stats.nct.cdf(beyond, seeds - 1, shift) + stats.nct.cdf(-beyond, seeds - 1, shift))

    needed = next(seeds for seeds in range(2, 1000) if power(seeds) >= 0.8)
    assert by_name["advice"].table["Seeds to find a 5 % difference of two"].tolist() == [str(needed)]
    # Bonferroni's level for the three pairs.
    beyond = stats.t.ppf(1 - 0.05 / 2 / 3, 4 / (1 / 3 + 1 / spread.df))
    (least,) = re.findall(r"least significant difference with 4 seeds ([\d.]+) %", notes(by_name["time"]))
    assert f"{least} %" == percent(math.expm1(beyond * spread.log_sd * math.sqrt(2 / 4)))


def test_without_a_significant_ratio_of_step_times_the_answer_is_what_was_tested(tmp_path: Path) -> None:
    for seed, factor in ((1, 0.94), (2, 1.0), (3, 1.06)):
        write(tmp_path / "equal", {"ddp": factor, "zero2": 2 - factor}, (seed,))
    write(tmp_path / "alone", {"ddp": 1.0}, (1, 2, 3))
    equal, alone = (Answers(tmp_path / name)["time"] for name in ("equal", "alone"))
    ((none,), (reference,)) = (answer.headlines for answer in (equal, alone))
    assert (none.value, none.bounds[:29]) == ("0 of 1", "least significant difference ")
    assert row(equal.table, "zero2")["x ddp"].endswith("] n.s.")
    assert "n.s.: not significant." in equal.notes
    milliseconds = float(row(alone.table, "ddp")["Step, ms"])
    assert float(reference.value.removesuffix(" ms")) == pytest.approx(milliseconds, rel=1e-2)
    assert not any(answer.leads for answer in (equal, alone))


@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_a_ratio_of_fewer_than_three_seeds_is_not_tested_and_is_the_headline(tmp_path: Path, seeds: tuple[int, ...]):
    """It is not "not significant", which would be the result of a test."""
    write(tmp_path, {"ddp": 1.0, "zero2": 3.0, "zero3": 4.0}, seeds)
    time = Answers(tmp_path)["time"]
    (ratio,) = time.headlines
    cells = {name: row(time.table, name)["x ddp"] for name in ("ddp", "zero2", "zero3")}
    assert ratio.value == " to ".join(cells[name].removesuffix(" n.t.") for name in ("zero2", "zero3")) + " x"
    assert (cells["ddp"], {text[-5:] for name, text in cells.items() if name != "ddp"}) == ("1.00", {" n.t."})
    assert (ratio.strategy, ratio.n) == ("zero2 to zero3", len(seeds))
    assert ratio.bounds == "not tested: fewer than three seeds"
    assert "significant" not in ratio.words
    assert "n.t.: not tested, since there are fewer than three seeds." in time.notes
    assert "n.s.: not significant." not in time.notes
    assert not time.leads


def test_untested_comparisons_are_counted_beside_the_tested_ones(tmp_path: Path) -> None:
    """Of three comparisons one has one seed: it is neither significant nor not significant."""
    for seed, factor in ((1, 0.94), (2, 1.0), (3, 1.06)):
        write(tmp_path, {"ddp": factor, "zero1": 2 - factor, "zero2": 9.0}, (seed,))
    write(tmp_path, {"zero3": 1.0}, (1,))
    ratio, count = Answers(tmp_path)["time"].headlines
    assert (ratio.strategy, ratio.bounds) == ("zero2", "")
    assert (count.value, count.bounds.partition("; ")[2]) == ("1 of 2", "1 of 3 comparisons not tested")


def test_the_question_on_step_time_of_one_gpu_begins_with_its_ratio() -> None:
    time = Answers(read_parquet(REPOSITORY / "reports" / "gpu"))["time"]
    (ratio,) = time.headlines
    assert (ratio.value, ratio.strategy, ratio.n) == ("4.87 x", "zero3", 1)
    assert ratio.bounds == "not tested: fewer than three seeds"


def test_advice_names_a_significantly_faster_strategy_and_counts_no_profiled_run(tmp_path: Path) -> None:
    # Reports in git have the other sentences: nothing is faster, `ddp` is among those with three seeds, one run each.
    write(tmp_path, {"ddp": 1.0, "zero2": 0.4, "zero3": 1.0}, (1, 2, 3))
    write_run(tmp_path, "ddp", config={"profile_steps": 3, "max_steps": 8}, name="profiled", time_factor=0.01)
    advice = Answers(tmp_path)["advice"]
    (fastest,) = advice.headlines
    assert (fastest.value, fastest.scope) == ("zero2", "gpt-tiny, built-in text, 2.50 M parameters")
    assert advice.table["Fastest, or not shown to be slower"].tolist() == ["zero2"]
    assert advice.table["Least model state, no offload"].item().startswith("zero3, ")


def test_advice_on_memory_is_that_of_the_judged_workloads(tmp_path: Path) -> None:
    """A workload of few seeds may lack the strategy that is the fastest elsewhere."""
    write(tmp_path, {"ddp": 1.0, "zero2": 3.0}, (1, 2, 3))
    write(tmp_path, {"zero2": 1.0, "zero3": 1.0}, (1,), config={"seq_length": 32})
    advice = Answers(tmp_path)["advice"]
    assert advice.table["Fastest, or not shown to be slower"].tolist() == ["not judged", "ddp"]
    assert [headline.value for headline in advice.headlines] == ["ddp"]


def test_nothing_is_divided_by_one_rank() -> None:
    memory = Answers(read_parquet(REPOSITORY / "reports" / "gpu"))["memory"]
    assert (memory.headlines[0].value, memory.headlines[0].bounds) == ("+25 %", "ranks: 1")
    assert "second copy of the weights: on a rank 25 % of the state of `single`" in notes(memory)
    assert "would need 1/" not in notes(memory)
    # One seed: the peak is a number without a test.
    peak = memory.headlines[1]
    assert (peak.value, peak.bounds, peak.n) == ("+41 %", "not tested: fewer than three seeds", 1)
    assert "141 % n.t." in memory.table.to_numpy()


def test_a_headline_is_of_the_main_workload_and_of_zero(tmp_path: Path) -> None:
    """FSDP2 has less state than stage 3, and four ranks have less than two: a side workload has both."""
    write(tmp_path, {"ddp": 1.0, "zero1": 1.1, "zero3": 1.5, "fsdp2": 1.2}, (1, 2, 3))
    write(tmp_path, {"ddp": 1.0, "zero3": 9.0}, (1, 2, 3), ranks=4, config={"seq_length": 32})
    by_name, main = Answers(tmp_path), "gpt-tiny, built-in text, 64 tokens"
    memory = by_name["memory"]
    percentage = memory.table.set_index(("", "Strategy")).loc["zero3", (main, "State, % of ddp")]
    scope = f"{main}, 2.50 M parameters"
    saved = f"{int(percentage.removesuffix(' %')) - 100} % model state of a rank, relative to that of `ddp`"
    peak = "-1.1 % peak memory of a rank (device), relative to that of `ddp` (`zero3`)"
    assert [f"{headline.value} {headline.words}" for headline in memory.headlines] == [
        f"{saved} (`zero3`; {scope}; ranks: 2)",
        peak,
    ]
    for name in ("memory", "time", "traffic"):
        assert by_name[name].subject == main
    assert any(f"{scope})" in headline.words for headline in by_name["time"].headlines)
    assert by_name["traffic"].headlines[0].scope == scope
    ratios, significant = by_name["time"].headlines
    assert (ratios.strategy, significant.value) == ("zero1 to zero3", "3 of 3")
    assert max(float(text) for text in re.findall(r"[\d.]+", by_name["time"].headlines[0].value)) < 3


def test_nothing_is_answered_from_nothing(tmp_path: Path) -> None:
    assert answers(read_records(tmp_path)) == {}
    write_run(tmp_path, "zero3", state="failed", reason="x")
    assert [question.name for question in answers(read_records(tmp_path))] == ["runs"]
    virtual: dict[str, Any] = {"ranks": 64, "config": {"global_batch_size": 64}, "environment": {"cpu": "Another"}}
    write_run(tmp_path / "v", "zero3", virtual=True, **virtual)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "status.json").write_text("{")
    by_name = {question.name: answer for question, answer in answers(read_records(tmp_path)).items()}
    assert list(by_name) == ["layers", "runs"]
    assert [headline.value for headline in by_name["runs"].headlines] == ["1 of 2", "1"]
    assert "2 different machines" in notes(by_name["runs"])
    assert [headline.value for headline in by_name["layers"].headlines] == ["0 of 0"]
    assert "there is no loss, no accuracy and no throughput" in notes(by_name["layers"])


def test_speeds_at_several_batches_have_one_baseline(tmp_path: Path) -> None:
    """A ratio to another strategy would look like a change of speed if the baseline did not run."""
    for batch, factors in {
        8: {"ddp": 1.0, "zero2": 1.25, "zero3": 2.0},
        16: {"zero2": 1.0, "zero3": 0.5},
        32: {"ddp": 1.0, "zero2": 1.25, "zero3": 1.0},
    }.items():
        write(tmp_path, factors, (1, 2, 3), config={"global_batch_size": batch, "per_device_train_batch_size": 4})
    answer = Answers(tmp_path)["batch_size"]
    assert [*answer.table] == ["Strategy", "batch 8", "batch 32"]
    assert [(headline.value, headline.what, headline.strategy) for headline in answer.headlines] == [
        ("33 %", "of the speed of `ddp` at batch 8", "zero3"),
        ("66 %", "of the speed of `ddp` at batch 32", "zero3"),
    ]
    drawn = figures("batch_size", read_records(tmp_path))["batch_size"].alt
    assert "in percent of ddp: ddp 100 % at 8, 100 % at 32; zero2 " in drawn
    assert "; zero3 33.3 % at 8, 66.3 % at 32. Speed in percent of ddp at the same place" in drawn


def test_with_a_gpu_offload_frees_its_memory(tmp_path: Path) -> None:
    """Bytes per parameter and rank under DDP: 20. The committed records are of machines without a GPU."""
    write(tmp_path, dict.fromkeys(("ddp", "zero3", "zero3_cpu"), 1.0), (42,))
    by_name = Answers(tmp_path)
    assert row(by_name["offload"].table, "zero3_cpu")["Freed"] == "80 %"
    freed, times = by_name["offload"].headlines
    assert f"{freed.value} {freed.what}" == "80 % of the model state on the device is freed"
    assert (times.what, times.strategy) == ("change of the step time", "zero3_cpu")
    assert (times.bounds, times.n) == ("not tested: fewer than three seeds", 1)
    assert row(by_name["offload"].table, "zero3_cpu")["Step time, x without"].endswith(" n.t.")
    assert row(by_name["memory"].table, "zero3")["State, % of ddp"] == "62 %"
    assert "zero3_cpu" not in {*by_name["memory"].table["Strategy"], *by_name["time"].table["Strategy"]}


def test_all_questions_on_time_agree_about_a_pair() -> None:
    """Throughputs tested with three other strategies alone made zero1 significantly faster than `single`."""
    by_name, workload = Answers(read_parquet(REPOSITORY / "reports" / "reviews")), "gpt-4k, film reviews"
    speeds = by_name["ranks"].table.set_index(("", "Strategy"))[workload, "x one device"]
    assert speeds["zero1"] == "1.36 [0.95, 1.94] n.s."
    assert {*by_name["advice"].table.iloc[1, 1].split(", ")} == {"single", "ddp", "zero1", "zero2"}
    least = " to ".join(sorted(re.findall(r"significant difference with \d seeds (\d+ %)", notes(by_name["time"]))))
    assert by_name["time"].headlines[1].bounds == f"least significant difference {least}"
    assert " to ".join(sorted(by_name["advice"].table["Least significant difference"])) == least
    assert "are not distinguishable here" in notes(by_name["advice"])
    assert [headline.value for headline in by_name["advice"].headlines] == ["single, ddp, zero1, zero2", "ddp"]
    for words in ("Small tensors, of", "a second copy of the weights", "would need 1/2 of the state of `ddp`, 50 %"):
        assert words in notes(by_name["memory"])


def test_a_difference_near_its_margin_has_its_step_and_a_footnote() -> None:
    records = read_parquet(REPOSITORY / "reports" / "reviews")
    runs = records.runs.query("workload == 'gpt-4k, film reviews' and repeat == 1")[["run", "arm", "seed"]]
    losses = runs.merge(records.steps.astype({"run": str})).set_index(["arm", "seed", "step"])["loss"]
    differences = (losses["zero3"] / losses["single"] - 1).abs()
    seed, step = differences.idxmax()
    loss = Answers(records)["loss"]
    line = loss.table.set_index("Workload").loc["gpt-4k, film reviews"]
    assert (line["Worst strategy"], line["At step"]) == ("zero3", f"{step}")
    assert line["Median of its steps"] == percent(differences[seed].median())
    assert loss.headlines[0].value == "0.118 %"
    assert "a norm that DeepSpeed sums in float64" in notes(loss)
    assert "a norm that DeepSpeed sums" not in notes(Answers(read_parquet(REPOSITORY / "reports" / "laptop"))["loss"])


def test_bytes_of_stage_3_as_few_as_plain_training_s_are_of_weights_gathered_once() -> None:
    """Small tensors are whole on each rank, and gathered after a step instead of in it: they are among these bytes."""
    records = read_parquet(REPOSITORY / "reports" / "reviews")
    runs = records.runs.query("workload == 'gpt-4k, film reviews'").drop_duplicates("strategy").set_index("strategy")
    gathered = json.loads(runs.loc["zero3", "collectives"])["all_gather"]["payload_bytes"]
    assert gathered == runs.loc["single", "params_bytes_device"] > runs.loc["zero3", "kept_whole_bytes"] > 0
    traffic = Answers(records)["traffic"]
    assert [headline.value for headline in traffic.headlines] == ["0.99 to 1.50 x"]
    assert "`zero3` sends less than `zero1` here, since it gathers once" in notes(traffic)


def test_memory_comes_first_where_model_state_is_most_of_it_and_a_few_steps_say_nothing_of_loss_and_time() -> None:
    """GPT-2 of the laptop has three steps; of a tiny model's process, libraries are most."""
    records = read_parquet(REPOSITORY / "reports" / "laptop")
    is_timed = records.runs["steps"] > records.runs["warmup_steps"]
    trained = dataclasses.replace(records, runs=records.runs[is_timed])
    full, without = ({question.name: answer for question, answer in answers(of).items()} for of in (records, trained))
    assert (next(iter(full)), next(iter(without))) == ("memory", "loss")
    state, peak = full["memory"].headlines
    # Plain training on one rank is in the table alone.
    by_strategy = full["memory"].table.set_index("Strategy").drop(index="single")
    assert [*by_strategy.index] == ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
    states, peaks = (by_strategy[f"{figure}, GiB"].astype(float) for figure in ("State", "Peak"))
    assert [*states] == sorted(states, reverse=True)
    assert state.value == f"{states['ddp']:.3g} to {states['fsdp2']:.3g} GiB"
    assert peak.value == f"{peaks.min():.3g} to {peaks.max():.3g} GiB"
    assert (state.strategy, peak.strategy) == ("ddp to fsdp2", f"{peaks.idxmin()} to {peaks.idxmax()}")
    assert (full["memory"].subject, "124 M parameters" in state.scope) == ("gpt2, built-in text", True)
    for name in ("loss", "advice", "time"):
        assert full[name].headlines == without[name].headlines
        assert full[name].table.equals(without[name].table)


def test_every_caption_is_used_and_is_the_only_place_of_its_words() -> None:
    texts = {(question, name): text for question, by_name in captions().items() for name, text in by_name.items()}
    assert len({*texts.values()}) == len(texts)
    folder = REPOSITORY / "study" / "report"
    files = [*folder.glob("questions/*.py"), *folder.glob("site/*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    unused = [place for place in texts if f'"{place[1]}"' not in code]
    assert not unused
    places = [*folder.rglob("*.j2"), *folder.glob("pages/*.py"), *REPOSITORY.glob("notebooks/*.ipynb")]
    assert len(places) > 20
    other_texts = "\n".join(file.read_text(encoding="utf-8") for file in places)
    # Placeholders end the words that are compared.
    starts = {place: text.partition("{")[0] for place, text in texts.items()}
    repeated = [place for place, words in starts.items() if len(words) > 40 and words in code + other_texts]
    assert not repeated


def test_a_part_of_several_captions_is_written_once() -> None:
    texts = yaml.safe_load(CAPTIONS.read_text(encoding="utf-8"))
    terms = texts.pop("terms")
    written = [*terms.values(), *(text for by_name in texts.values() for text in by_name.values())]
    assert [name for name in terms if sum(f"{{terms.{name}}}" in text for text in written) < 2] == []
    # More words in a row than any fixed expression has.
    length = 10
    places: dict[tuple[str, ...], set[str]] = {}
    for text in written:
        words = text.split()
        for start in range(len(words) - length + 1):
            places.setdefault(tuple(words[start : start + length]), set()).add(text)
    assert [" ".join(words) for words, several in places.items() if len(several) > 1] == []
    assert caption("lora", "held") == "model state + weights gathered at the end of the forward pass with LoRA"


def test_a_mark_is_explained_where_a_difference_has_it() -> None:
    unsure, few = (caption("comparison", name) for name in ("unsure", "few"))
    assert mark_notes(["1.02", 1.02, MarkedText("1.02")]) == ()
    # Texts of records may contain the letters of a mark.
    assert mark_notes([f"run {NOT_TESTED_MARK}, {NOT_SIGNIFICANT_MARK}"]) == ()
    cell = MarkedText("1.02", NOT_SIGNIFICANT_MARK)
    assert str(cell) == "1.02 n.s."
    assert mark_notes(["n.t.", cell]) == (unsure,)
    assert mark_notes([cell, MarkedText("1.02", NOT_TESTED_MARK)]) == (unsure, few)


@pytest.mark.parametrize("report", ["laptop", "releases", "virtual_settings", "virtual_scaling"])
def test_the_name_of_a_strategy_has_its_parts(report: str) -> None:
    runs = read_parquet(REPOSITORY / "reports" / report).runs.drop_duplicates("arm")
    names = [read_arm(name) for name in runs["arm"]]
    assert list(map(str, names)) == list(runs["arm"])
    assert [name.strategy for name in names] == list(runs["strategy"])
    for name, ranks, overrides in zip(names, runs["world_size"], runs["engine_override"], strict=True):
        assert name.ranks in (None, ranks)
        assert {*name.settings} >= {*json.loads(overrides if isinstance(overrides, str) else "[]")}


@pytest.mark.parametrize("report", ["reviews", "laptop", "virtual_tuning", "virtual_scaling"])
def test_an_answer_has_a_table_and_at_most_two_headlines(report: str) -> None:
    for question, answer in answers(read_parquet(REPOSITORY / "reports" / report)).items():
        assert len(answer.headlines) <= 2, question.name
        assert len(answer.table), question.name
