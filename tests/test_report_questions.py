from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from report_folders import figures, row
from study.config.places import REPOSITORY
from study.config.text import percent
from study.records.frames import Records, read_parquet, read_records
from study.records.statistics import estimate_noise
from study.report.document import Answer
from study.report.questions import QUESTIONS, TABLES, answers
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
    ("shift", "precision", "sentence", "same"),
    [
        (0.1, "fp32", "Yes, in 1 of 6 comparisons: `zero2` differs from `single` by 2.7 %.", "5 of 6"),
        (0.001 * 3.75, "fp32", "No: in all 6", "6 of 6"),
        (0.003 * 3.75, "fp32", "Yes, in 1 of 6", "5 of 6"),
        # A difference below the spacing of bf16 numbers is none in bf16.
        (0.003 * 3.75, "bf16", "No: in all 6", "6 of 6"),
        (0.006 * 3.75, "bf16", "Yes, in 1 of 6", "5 of 6"),
    ],
)
def test_a_loss_is_the_same_within_the_margin_of_its_precision(tmp_path, shift, precision, sentence, same):
    for strategy in ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3_cpu"):
        write_run(tmp_path, strategy, loss_shift=shift * (strategy == "zero2"), config={"precision": precision})
    loss = Answers(tmp_path)["loss"]
    assert loss.sentence.startswith(sentence)
    assert (loss.table["Same loss"].item(), loss.table["Worst strategy"].item()) == (same, "zero2")


def test_a_step_is_compared_with_the_loss_of_that_step(tmp_path: Path) -> None:
    """0.1 % of a large early loss would be 2 % of the final loss, and the reverse."""
    for strategy, *losses in (("ddp", 5.0, 0.01), ("zero2", 5.005, 0.01), ("zero3", 5.001, 0.0101)):
        with_steps(write_run(tmp_path, strategy), (lambda by: lambda row: row | {"loss": by[row["step"] > 1]})(losses))
    loss = Answers(tmp_path)["loss"]
    assert loss.sentence == "Yes, in 1 of 2 comparisons: `zero3` differs from `ddp` by 1.00 %."
    assert row(TABLES["loss"](read_records(tmp_path)), "zero2")["of the loss there"] == "0.10 %"


def test_comparisons_with_plain_training_come_first(tmp_path: Path) -> None:
    write(tmp_path, {"ddp": 1.0, "zero2": 1.0}, (1,))
    for strategy in ("zero1", "zero3"):
        write_run(tmp_path, strategy, loss_shift=0.003 * (strategy == "zero3"), config={"seq_length": 32})
    loss = Answers(tmp_path)["loss"]
    words = (
        "`ddp` the loss is within 0.000006 % at every step (one seed each: no test), in 1 with `zero1` within 0.08 % ("
    )
    assert words in loss.sentence
    assert "from that of `zero1` at most 0.08 %" in loss.numbers[0][1]


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
    sentence, drawn = Answers(records)["loss"].sentence, figures("loss_curves", records)
    assert sentence == "Yes, in the only comparison: `zero2` differs from `ddp` by 2.7 %."
    assert drawn["loss_difference"].alt.partition(". ")[0].endswith("zero2 0.100")
    assert [text.get_text() for text in drawn["loss"].figure.axes[1].texts] == ["zero2\n2.7 %", "margin 0.12 %"]


@pytest.mark.parametrize("reason", ["the loss is NaN at step 3", "the evaluation loss is not a number: the step"])
def test_a_seed_that_diverges_under_one_strategy_only_is_another_loss(reason: str, tmp_path: Path) -> None:
    for strategy, seed in itertools.product(("ddp", "zero2", "zero3"), (1, 2)):
        has_failed = (strategy, seed) == ("zero3", 2)
        write_run(tmp_path, strategy, seed=seed, state="failed" if has_failed else "ok", reason=has_failed * reason)
    loss = Answers(tmp_path)["loss"]
    assert "`zero3` diverged to NaN, but `ddp` did not (seed 2)." in loss.sentence
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
    assert loss.sentence.startswith("Yes, in 1 of 3 comparisons: `zero3` differs"), loss.sentence
    assert loss.table["Same loss"].tolist() == ["0 of 3"]
    without_zero3 = dataclasses.replace(records, runs=records.runs[records.runs["strategy"] != "zero3"])
    assert Answers(without_zero3)["loss"].sentence.startswith("Inconclusive in 2 of 2 comparisons")
    once = Answers(dataclasses.replace(records, runs=without_zero3.runs.query("repeat == 1")))["loss"]
    assert once.sentence.startswith("Yes, in 2 of 2 comparisons")


def test_nothing_is_compared_with_a_ddp_that_breaks_an_invariant(tmp_path: Path) -> None:
    write(tmp_path, {"single": 1.0, "zero3": 1.0}, (1, 2, 3))
    write(tmp_path, {"ddp": 1.0}, (1, 2, 3), environment={"threads_per_rank": 8})
    by_name = Answers(tmp_path)
    assert re.match("With `zero3` one of 2 ranks needs .* less model state than `single`", by_name["memory"].sentence)
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
        assert "zero3" not in answer.sentence
        assert row(answer.table, "zero3")[column].endswith(" †")
        assert row(answer.table, "zero3_cpu").tolist()[1:] == ["oom", "-"]
        assert "`zero3`: not a fair comparison †, threads per rank: 8, baseline 1." in notes(answer)
        assert "`zero3_cpu`: ended oom, CUDA out of memory." in notes(answer)
    assert "zero3" not in by_name["advice"].sentence


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
    sentence = r"the least significant difference is ([\d.]+) %, which is found half of the time"
    (least,) = re.findall(sentence, notes(by_name["time"]))
    assert f"{least} %" == percent(math.expm1(beyond * spread.log_sd * math.sqrt(2 / 4)))


def test_advice_names_a_significantly_faster_strategy_and_counts_no_profiled_run(tmp_path: Path) -> None:
    # Reports in git have the other sentences: nothing is faster, `ddp` is among those with three seeds, one run each.
    write(tmp_path, {"ddp": 1.0, "zero2": 0.4, "zero3": 1.0}, (1, 2, 3))
    write_run(tmp_path, "ddp", config={"profile_steps": 3, "max_steps": 8}, name="profiled", time_factor=0.01)
    advice = Answers(tmp_path)["advice"]
    assert advice.sentence == "`zero2` is the fastest (gpt-tiny, built-in text, 2.50 M parameters)."
    assert advice.table["Fastest, or not shown to be slower"].tolist() == ["zero2"]
    assert advice.table["Least model state, no offload"].item().startswith("zero3, ")


def test_advice_on_memory_is_that_of_the_judged_workloads(tmp_path: Path) -> None:
    """A workload of few seeds may lack the strategy that is the fastest elsewhere."""
    write(tmp_path, {"ddp": 1.0, "zero2": 3.0}, (1, 2, 3))
    write(tmp_path, {"zero2": 1.0, "zero3": 1.0}, (1,), config={"seq_length": 32})
    advice = Answers(tmp_path)["advice"]
    assert advice.table["Fastest, or not shown to be slower"].tolist() == ["not judged", "ddp"]
    assert advice.sentence.startswith("`ddp` is the fastest in every workload with three seeds (")


def test_one_rank_is_called_the_only_rank(tmp_path: Path) -> None:
    for strategy in ("single", "zero3"):
        write_run(tmp_path, strategy, ranks=1)
    memory = Answers(tmp_path)["memory"]
    assert memory.sentence.startswith("With `zero3` the only rank needs ")
    assert "on the only rank (`zero3`)" in " ".join(memory.numbers[0])


def test_a_headline_is_of_the_main_workload_and_of_zero(tmp_path: Path) -> None:
    """FSDP2 has less state than stage 3, and four ranks have less than two: a side workload has both."""
    write(tmp_path, {"ddp": 1.0, "zero1": 1.1, "zero3": 1.5, "fsdp2": 1.2}, (1, 2, 3))
    write(tmp_path, {"ddp": 1.0, "zero3": 9.0}, (1, 2, 3), ranks=4, config={"seq_length": 32})
    by_name, main = Answers(tmp_path), "gpt-tiny, built-in text, 64 tokens"
    memory = by_name["memory"]
    percentage = memory.table.set_index(("", "Strategy")).loc["zero3", (main, "State, % of ddp")]
    saved = f"{100 - int(percentage.removesuffix(' %'))} % less model state than `ddp` on each of 2 ranks (`zero3`)"
    peak = "1.1 % less peak memory than `ddp` (device; `zero3`)"
    assert [" ".join(number) for number in memory.numbers] == [saved, peak]
    for name in ("memory", "time", "traffic"):
        assert by_name[name].subject == main
        assert f"({main}, 2.50 M parameters)" in by_name[name].sentence
    assert max(float(text) for text in re.findall(r"[\d.]+", by_name["time"].numbers[0][0])) < 3


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
    assert by_name["runs"].sentence == "1 of 2 runs succeeded; excluded records: 1."
    assert "2 different machines" in notes(by_name["runs"])
    assert "there is no loss, no accuracy and no throughput" in by_name["layers"].sentence


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
    assert answer.sentence == "`zero3` has 33 % of the speed of `ddp` at batch 8 and 66 % at batch 32."
    finding = figures("batch_size", read_records(tmp_path))["batch_size"].alt
    assert "zero3 changes most, from 33 to 66 %. Speed in percent of ddp at the same place" in finding


def test_with_a_gpu_offload_frees_its_memory(tmp_path: Path) -> None:
    """Bytes per parameter and rank under DDP: 20. The committed records are of machines without a GPU."""
    write(tmp_path, dict.fromkeys(("ddp", "zero3", "zero3_cpu"), 1.0), (42,))
    by_name = Answers(tmp_path)
    assert row(by_name["offload"].table, "zero3_cpu")["Freed"] == "80 %"
    assert by_name["offload"].sentence.startswith("Offload frees 80 % of the model state on the device")
    assert row(by_name["memory"].table, "zero3")["State, % of ddp"] == "62 %"
    assert "zero3_cpu" not in {*by_name["memory"].table["Strategy"], *by_name["time"].table["Strategy"]}


def test_all_questions_on_time_agree_about_a_pair() -> None:
    """Throughputs tested with three other strategies alone made zero1 significantly faster than `single`."""
    by_name, workload = Answers(read_parquet(REPOSITORY / "reports" / "reviews")), "gpt-4k, film reviews"
    speeds = by_name["ranks"].table.set_index(("", "Strategy"))[workload, "x one device"]
    assert speeds["zero1"] == "1.36 [0.95, 1.94] n.s."
    assert {*by_name["advice"].table.iloc[1, 1].split(", ")} == {"single", "ddp", "zero1", "zero2"}
    least = " to ".join(sorted(re.findall(r"significant difference is (\d+ %)", notes(by_name["time"]))))
    assert by_name["advice"].sentence.endswith(f"less than {least}, by workload, are not distinguishable here.")
    assert "; 50 % less if it sharded small tensors and" in by_name["memory"].numbers[0][1]


def test_a_difference_near_its_margin_is_explained() -> None:
    records = read_parquet(REPOSITORY / "reports" / "reviews")
    runs = records.runs.query("workload == 'gpt-4k, film reviews' and repeat == 1")[["run", "arm", "seed"]]
    steps = runs.merge(records.steps.astype({"run": str})).set_index(["arm", "seed", "step"])[["loss", "grad_norm"]]
    zero3, ddp = ((steps.loc[arm] / steps.loc["single"] - 1).abs() for arm in ("zero3", "ddp"))
    *_, (second, _), (_, seed) = sorted((losses.max(), seed) for seed, losses in zero3["loss"].groupby("seed"))
    worst, text = zero3.loc[seed], repr(Answers(records)["loss"])
    figures = worst["loss"].median(), second, ddp["loss"].max(), *worst[["grad_norm", "loss"]].iloc[:20].max()
    printed = re.findall(r"(?: at step| steps is|seeds are within|`ddp` is within|by up to) ([\d.]+)", text)
    assert printed == [f"{worst['loss'].idxmax()}", *(percent(figure).removesuffix(" %") for figure in figures)]


def test_memory_comes_first_where_model_state_is_most_of_it_and_a_few_steps_say_nothing_of_loss_and_time() -> None:
    """GPT-2 of the laptop has three steps; of a tiny model's process, libraries are most."""
    records = read_parquet(REPOSITORY / "reports" / "laptop")
    is_timed = records.runs["steps"] > records.runs["warmup_steps"]
    trained = dataclasses.replace(records, runs=records.runs[is_timed])
    full, without = ({question.name: answer for question, answer in answers(of).items()} for of in (records, trained))
    assert (next(iter(full)), next(iter(without))) == ("memory", "loss")
    (number, words), (_, peaks) = full["memory"].numbers
    sizes = [float(size) for size in re.findall(r"[\d.]+(?= \(`)", words)]
    assert re.findall(r"`(\w+)`", words) == re.findall(r"`(\w+)`", peaks) == ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
    assert sizes == sorted(sizes, reverse=True)
    assert number == f"{sizes[0]} to {sizes[-1]} GiB"
    assert (full["memory"].subject, "124 M parameters" in words) == ("gpt2, built-in text", True)
    for name in ("loss", "advice", "time"):
        assert full[name].sentence == without[name].sentence
        assert full[name].table.equals(without[name].table)
