"""The answers of a report: each figure is the records', nothing unknown is asserted, and one file makes a question."""

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

from study.records.frames import read_parquet, read_records
from study.records.statistics import noise
from study.report import questions
from study.report.plots.loss import loss_differences
from study.report.questions import QUESTIONS, TABLES, answers
from study.report.questions.claims import Resting
from study.report.questions.loss import largest_step_difference
from study.report.questions.question import Answer, Question, cell_text
from study.report.site.build import NOTEBOOKS, build
from synthetic_records import REPOSITORY, with_steps, write_run

STAGES = ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3_cpu")


def said(root: Path) -> dict[str, Answer]:
    return {question.name: answer for question, answer in answers(read_records(root)).items()}


def row(table: pd.DataFrame, name: str, column: str = "Arm") -> pd.Series:
    (found,) = [line for _, line in table.iterrows() if line[column] == name]
    return found


def notes(answer: Answer) -> str:
    return "\n".join(answer.notes)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    root = tmp_path_factory.mktemp("stages")
    for strategy in STAGES:
        write_run(root, strategy)
    return said(root)


def test_questions_have_names_of_their_own_and_notebooks_that_are_there() -> None:
    assert len({question.name for question in QUESTIONS}) == len(QUESTIONS)
    assert len(TABLES) == sum(len(question.tables) for question in QUESTIONS)
    for question in QUESTIONS:
        assert question.title.endswith("?")
        assert question.nothing.endswith(".")
        assert question.first_figure is None or question.first_figure in question.figures
        if question.notebook is not None:
            text = (NOTEBOOKS / f"{question.notebook}.ipynb").read_text()
            shown = [*(f'figure(\\"{name}\\")' for name in question.figures)]
            shown += [f'table(\\"{name}\\")' for name in question.tables]
            assert f'show.question(\\"{question.name}\\"' in text
            assert [call for call in shown if call not in text] == []
        else:
            assert not question.figures


def test_a_new_question_is_one_file_and_its_place_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file of the folder would define; without a notebook its tables are on the first page."""
    steps = Question(
        name="steps",
        title="How many steps ran?",
        answer=lambda records: Answer(f"{len(records.steps)} steps.", pd.DataFrame({"Runs": [len(records.runs)]})),
        nothing="No step ran.",
        tables={"steps_of_runs": lambda records: records.runs[["run", "steps"]]},
    )
    for module in (questions, build.__globals__):
        place = module if isinstance(module, dict) else module.__dict__
        monkeypatch.setitem(place, "QUESTIONS", (steps,))
    write_run(tmp_path / "runs", "ddp", steps=8)
    build(read_records(tmp_path / "runs"), "mine", tmp_path / "report")
    page, markdown = ((tmp_path / "report" / name).read_text() for name in ("index.html", "summary.md"))
    for text in (page, markdown):
        assert "How many steps ran?" in text
        assert "8 steps." in text
    assert "Steps of runs in full" in page
    assert [file.name for file in (tmp_path / "report").glob("*.html")] == ["index.html"]


def test_losses_that_agree_are_said_to(stages: dict[str, Answer]) -> None:
    loss = stages["loss"]
    assert loss.sentence.startswith("No: the loss of all 6 arms that can be compared stays within ")
    (line,) = loss.table.to_dict("records")
    assert (line["Same loss"], line["Margin"]) == ("6 of 6", "0.12 %")
    assert line["Equivalent"] == "one seed"


def test_a_loss_that_differs_is_not_called_the_same(tmp_path: Path) -> None:
    for strategy in STAGES:
        write_run(tmp_path, strategy, loss_shift=0.1 if strategy == "zero2" else 0.0)
    loss = said(tmp_path)["loss"]
    # The loss ends at 1.7 + 4 exp(-8/12), and a little noise: 0.1 is most where the baseline's loss is least.
    assert loss.sentence == "Yes, in 1 of 6 arms: `zero2` is 2.7 % off the loss of its baseline."
    assert loss.table["Same loss"].tolist() == ["5 of 6"]
    assert loss.table["Furthest arm"].tolist() == ["zero2"]


def test_a_lost_run_of_the_baseline_takes_no_arm_out_of_the_answer(tmp_path: Path) -> None:
    """Of one seed another repeat is left; of the other none, and there the arm is in no pair."""
    for seed, repeat in ((1, 1), (1, 2), (2, 1)):
        state = "failed" if repeat == 2 or seed == 2 else "ok"
        write_run(tmp_path, "ddp", seed=seed, repeat=repeat, state=state, reason="" if state == "ok" else "node lost")
        write_run(tmp_path, "zero2", seed=seed, repeat=repeat, loss_shift=0.1)
    records = read_records(tmp_path)
    assert set(records.runs["confounded"]) == {""}
    (lacks,) = {note for note in records.runs["notes"] if note}
    assert lacks == "no ddp with seed 2 ended ok, so it is in no ratio and no difference"
    loss = said(tmp_path)["loss"]
    assert loss.sentence.startswith("Yes, in 1 of 1 arms: `zero2` is 2.7 % off")
    (drawing,) = loss_differences(records)
    assert drawing.alt.endswith("zero2 0.100.")


def test_arms_without_a_seed_in_common_are_named(tmp_path: Path) -> None:
    for strategy, seed in (("ddp", 1), ("ddp", 2), ("zero2", 1), ("zero3", 3)):
        write_run(tmp_path, strategy, seed=seed)
    loss = said(tmp_path)["loss"]
    assert loss.table["Same loss"].tolist() == ["1 of 1"]
    assert "Not compared, since no seed of theirs ended well under the baseline too: `zero3`." in notes(loss)


@pytest.mark.parametrize(
    "reason", ["the loss is NaN at step 3", "the evaluation loss is not a number: the step", "lost"]
)
def test_a_seed_that_diverges_under_one_arm_alone_is_another_loss(reason: str, tmp_path: Path) -> None:
    for strategy in ("ddp", "zero2", "zero3"):
        for seed in (1, 2):
            has_failed = (strategy, seed) == ("zero3", 2)
            write_run(tmp_path, strategy, seed=seed, state="failed" if has_failed else "ok", reason=has_failed * reason)
    loss = said(tmp_path)["loss"]
    (line,) = loss.table.to_dict("records")
    if reason == "lost":
        assert line["Same loss"] == "2 of 2"
        return
    assert loss.sentence == (
        "Yes, in 1 of 2 arms: `zero3` ended on a loss that is no number where its baseline trained (seed 2)."
    )
    assert (line["Same loss"], line["Furthest arm"], line["Off by"]) == ("1 of 2", "zero3", "no number")


def test_a_difference_that_chance_makes_too_is_none(tmp_path: Path) -> None:
    """Steps are off by 0.3 % of their own, twice the margin and more; one arm is off in truth."""
    noise = random.Random(1)
    for strategy, shift in (("ddp", 0.0), ("zero1", 0.0), ("zero2", 0.0), ("zero3", 0.2)):
        for seed, repeat in itertools.product((1, 2, 3), (1, 2)):
            path = write_run(tmp_path, strategy, seed=seed, repeat=repeat, loss_shift=shift)
            with_steps(path, lambda row: row | {"loss": row["loss"] * math.exp(noise.gauss(0, 0.003))})
    loss = said(tmp_path)["loss"]
    assert loss.sentence.startswith("Yes, in 1 of 3 arms: `zero3` is "), loss.sentence
    assert loss.table["Same loss"].tolist() == ["0 of 3"]
    assert "Not known: off by more than the margin, and by no more than 2 times what one arm is" in notes(loss)
    records = read_records(tmp_path)
    alike = dataclasses.replace(records, runs=records.runs[records.runs["strategy"] != "zero3"])
    (loss,) = (answer for question, answer in answers(alike).items() if question.name == "loss")
    assert loss.sentence.startswith("Not known of 2 of 2 arms")
    once = dataclasses.replace(alike, runs=alike.runs[alike.runs["repeat"] == 1])
    (loss,) = (answer for question, answer in answers(once).items() if question.name == "loss")
    assert loss.sentence.startswith("Yes, in 2 of 2 arms")
    assert "Nothing ran twice, so how far chance alone moves a loss is not known." in notes(loss)


def test_nothing_is_held_against_a_ddp_that_breaks_an_invariant(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        for strategy in ("single", "zero3"):
            write_run(tmp_path, strategy, seed=seed)
        write_run(tmp_path, "ddp", seed=seed, environment={"threads_per_rank": 8})
    found = said(tmp_path)
    assert found["memory"].sentence.endswith("(`zero3`) of what it holds under `single`.")
    assert "x single" in found["time"].table
    assert "~" not in row(found["time"].table, "ddp")["x single"]
    table = TABLES["runtime"](read_records(tmp_path))
    assert row(table, "ddp")["In words"] == "not judged"


def test_memory_traffic_and_time_stand_beside_ddp(stages: dict[str, Answer]) -> None:
    # 4 + 4 + 8 bytes per parameter under DDP; stage 1 halves 12 of optimizer, stage 2 the gradients, stage 3 all.
    memory = stages["memory"]
    assert memory.sentence == "With its state sharded a rank keeps down to 62 % (`zero3`) of what it holds under `ddp`."
    shares = {arm: row(memory.table, arm)["State, % of ddp"] for arm in ("ddp", "zero1", "zero2", "zero3")}
    assert shares == {"ddp": "100 %", "zero1": "88 %", "zero2": "75 %", "zero3": "62 %"}
    traffic = stages["traffic"]
    assert traffic.sentence == (
        "With sharded state a step sends 1.00 to 2.00 times the ring bytes (NCCL) of `ddp`, most with `zero3`."
    )
    assert row(traffic.table, "zero3")["x ddp"] == "2.00"
    assert row(traffic.table, "single")["Ring bytes (NCCL), MiB"] == "0"
    time = stages["time"]
    assert time.sentence == "The time of a step with sharded state is not told apart from noise, beside `ddp`."
    assert float(row(time.table, "zero3")["x ddp"].removeprefix("~ ")) == pytest.approx(1.5, abs=0.1)
    assert float(row(time.table, "zero1")["x ddp"].removeprefix("~ ")) == pytest.approx(1.1, abs=0.06)
    assert "~: not told apart from noise.\nOne run of each arm: how far like runs differ is not known" in notes(time)
    # Offload has a question of its own, and its arms are there.
    assert "zero3_cpu" not in {*memory.table["Arm"], *traffic.table["Arm"], *time.table["Arm"]}
    assert row(stages["offload"].table, "zero3_cpu")["Freed"] == "80 %"
    assert stages["offload"].sentence.startswith("Offload frees 80 % of the model state on the device")


def test_confounded_and_failed_arms_are_named_and_in_no_answer(tmp_path: Path) -> None:
    for strategy in ("single", "ddp", "zero2"):
        write_run(tmp_path, strategy)
    write_run(tmp_path, "zero3", time_factor=0.01, environment={"threads_per_rank": 8})
    write_run(tmp_path, "zero3_cpu", state="oom", reason="CUDA out of memory")
    found = said(tmp_path)
    assert found["loss"].table["Same loss"].tolist() == ["2 of 2"]
    for name, column in (("memory", "State, % of ddp"), ("time", "Step, ms"), ("traffic", "Ring bytes (NCCL), MiB")):
        answer = found[name]
        assert "zero3" not in answer.sentence
        assert row(answer.table, "zero3")[column].endswith(" †")
        assert row(answer.table, "zero3_cpu").tolist()[1:] == ["oom", "-"]
        assert "`zero3`: not a fair comparison †, threads per rank: 8, baseline 1." in notes(answer)
        assert "`zero3_cpu`: ended oom, CUDA out of memory." in notes(answer)
    assert "zero3" not in found["advice"].sentence
    assert "`zero3_cpu`: ended oom" in notes(found["advice"])
    failed = row(TABLES["summary"](read_records(tmp_path)), "zero3_cpu")
    assert failed["Outcome"] == "oom: CUDA out of memory"
    assert cell_text(failed["Comparable"]) == "-"


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Four seeds; stage 0 is as fast as DDP, stage 3 takes 1.5 times as long."""
    root = tmp_path_factory.mktemp("seeds")
    for seed in (42, 43, 44, 45):
        for strategy in ("single", "ddp", "zero0", "zero3"):
            write_run(root, strategy, seed=seed)
    write_run(root, "ddp", seed=42, repeat=2)
    return said(root)


def test_many_seeds_are_tested_and_the_test_has_its_n(seeds: dict[str, Answer]) -> None:
    (line,) = seeds["loss"].table.to_dict("records")
    assert line["Equivalent"] == "3 of 3"
    assert "seed by seed (n = 4)." in notes(seeds["loss"])
    assert notes(seeds["runs"]) == "4 to 5 runs of an arm."


def test_a_difference_in_time_that_survives_noise_is_named_with_its_interval(seeds: dict[str, Answer]) -> None:
    time = seeds["time"]
    middle, low, high = map(float, re.findall(r"[\d.]+\d", row(time.table, "zero3")["x ddp"]))
    assert time.sentence == f"A step with sharded state takes {middle:.2f} times as long as one of `ddp`."
    assert low < 1.5 < high
    assert middle == pytest.approx(1.5, abs=0.05)
    assert row(time.table, "zero0")["x ddp"].startswith("~ ")
    assert re.search(
        r"Like runs differ by [\d.]+ % \(standard deviation, \d+ degrees of freedom\)\. With 4 seeds", notes(time)
    )


def test_the_divergence_of_one_arm_from_itself_stands_beside_the_margin(seeds: dict[str, Answer]) -> None:
    (line,) = seeds["loss"].table.to_dict("records")
    # Its two runs differ by what a synthetic record draws: 1e-7 of a loss of about 4.
    assert 0 < float(line["One arm twice"].removesuffix(" %")) < 1e-4
    # The margin is 0.12 % of a loss of which 1.7 is the floor.
    (share,) = re.findall(r"The margin is ([\d.]+) % at most of what", notes(seeds["loss"]))
    assert 0.12 < float(share) < 0.25


def test_advice_is_the_set_that_is_not_told_apart_from_the_fastest(seeds: dict[str, Answer]) -> None:
    advice = seeds["advice"]
    assert advice.sentence == "Nothing is faster than `ddp` and `zero0` beyond noise."
    (line,) = advice.table.to_dict("records")
    assert line["Fastest, or as fast for all that is known"] == "ddp, zero0"
    assert line["Least model state"].startswith("zero3, ")
    assert line["Seeds to tell two arms alone 5 % apart"].isdigit()


def test_what_a_difference_needs_to_be_seen_is_by_the_t_test_s_power(tmp_path: Path) -> None:
    for seed, factor in ((1, 0.94), (2, 1.0), (3, 1.06), (4, 1.0)):
        for strategy, other in (("ddp", factor), ("zero2", 2 - factor), ("zero0", 1.0)):
            write_run(tmp_path, strategy, seed=seed, time_factor=other)
    found, spread = said(tmp_path), noise(read_records(tmp_path).runs, "step_time_s_median")
    assert spread is not None

    def power(seeds: int) -> float:
        """Of a paired test on the level of 5 %: two arms differ by sqrt(2) times what one scatters."""
        beyond = stats.t.ppf(0.975, seeds - 1)
        shift = math.log(1.05) / (spread.share * math.sqrt(2)) * math.sqrt(seeds)
        return float(1 - stats.nct.cdf(beyond, seeds - 1, shift) + stats.nct.cdf(-beyond, seeds - 1, shift))

    needed = next(seeds for seeds in range(2, 1000) if power(seeds) >= 0.8)
    assert found["advice"].table["Seeds to tell two arms alone 5 % apart"].tolist() == [str(needed)]
    # Bonferroni's level for the two tests beside the baseline.
    beyond = stats.t.ppf(1 - 0.05 / 2 / 2, 4 / (1 / 3 + 1 / spread.df))
    (least,) = re.findall(r"a difference below ([\d.]+) %", notes(found["time"]))
    assert float(least) == pytest.approx(100 * math.expm1(beyond * spread.share * math.sqrt(2 / 4)), rel=0.02)


def test_arms_with_three_seeds_are_judged_in_a_study_where_others_have_one(tmp_path: Path) -> None:
    """As the laptop suite is: `single` would leave the other seeds without a partner."""
    for strategy in ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3_cpu", "fsdp2"):
        write_run(tmp_path, strategy, seed=42)
    for seed in (43, 44):
        for strategy in ("ddp", "zero0", "zero1", "zero2", "zero3"):
            write_run(tmp_path, strategy, seed=seed)
    for repeat in (2, 3):
        write_run(tmp_path, "ddp", seed=42, repeat=repeat)
    records = read_records(tmp_path)
    assert set(records.runs["confounded"]) == {""}
    assert set(records.runs["baseline"].str.split("-2x-").str[0]) == {"gpt-wikitext-gpt-tiny-ddp"}
    found = said(tmp_path)
    assert re.fullmatch(
        r"A step with sharded state takes 1\.[01]\d to 1\.[45]\d times as long as one of `ddp`; 1 of 4 arms are not"
        r" told apart from noise\.", found["time"].sentence,
    ), found["time"].sentence  # fmt: skip
    assert row(found["time"].table, "fsdp2")["x ddp"].startswith("~ ")
    assert "Fewer than three seeds, so not judged: `single`, `zero3_cpu` and `fsdp2`." in notes(found["advice"])
    (line,) = found["loss"].table.to_dict("records")
    assert (line["Same loss"], line["Equivalent"]) == ("7 of 7", "4 of 4")


def test_an_arm_that_ran_once_is_not_judged_and_hinders_no_advice(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        for strategy, factor in (("ddp", 1.0), ("zero2", 2.0)):
            write_run(tmp_path, strategy, seed=seed, time_factor=factor)
    write_run(tmp_path, "zero0", seed=1, time_factor=0.5)
    advice = said(tmp_path)["advice"]
    assert advice.sentence == "Of the arms with three seeds, `ddp` is the fastest."
    assert "Fewer than three seeds, so not judged: `zero0`." in notes(advice)


def test_an_arm_that_is_faster_beyond_noise_is_the_advice(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        for strategy, factor in (("ddp", 1.0), ("zero2", 0.4), ("zero3", 1.0)):
            write_run(tmp_path, strategy, seed=seed, time_factor=factor)
    assert said(tmp_path)["advice"].sentence == "`zero2` is the fastest."


def test_advice_from_one_run_each_names_no_arm(tmp_path: Path) -> None:
    for strategy, factor in (("ddp", 1.0), ("zero2", 0.1)):
        write_run(tmp_path, strategy, gpu=False, time_factor=factor)
    advice = said(tmp_path)["advice"]
    assert advice.sentence == (
        "No advice on time: arms that ran with fewer than three seeds are not told apart from noise."
    )
    assert advice.table["Fastest, or as fast for all that is known"].tolist() == ["not judged"]
    assert "Step, ms" not in advice.table
    assert "There is no GPU on this box" in notes(advice)


def test_noise_stands_on_the_first_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (questions.__dict__, build.__globals__):
        monkeypatch.setitem(module, "QUESTIONS", ())
    for seed in (1, 2, 3):
        for strategy in ("ddp", "zero2"):
            write_run(tmp_path / "runs", strategy, seed=seed)
    build(read_records(tmp_path / "runs"), "mine", tmp_path / "report")
    assert "Like runs differ by" in (tmp_path / "report" / "index.html").read_text().partition("</header>")[0]


def test_without_a_gpu_the_host_frees_nothing(tmp_path: Path) -> None:
    """Its memory stands in for the device's. A drive takes the optimizer's 12 of 20 bytes per parameter."""
    for strategy in ("zero3", "zero3_cpu", "zero3_nvme_optimizer"):
        write_run(tmp_path, strategy, gpu=False)
    offload = said(tmp_path)["offload"]
    assert row(offload.table, "zero3_cpu")["Freed"] == "0.00 %"
    assert row(offload.table, "zero3_nvme_optimizer")["Freed"] == "60 %"
    assert offload.sentence == (
        "Without a GPU the host frees nothing, a drive takes 60 % of the model state out of memory, and offload has a"
        " cost in time not told apart from noise."
    )


def test_losses_under_dropout_are_compared_by_their_seeds(tmp_path: Path) -> None:
    """Masks differ between arms, so steps lie far apart in arms that train alike."""
    shifts = {"ddp": 0.0, "zero2": 0.002, "zero3": 0.3}
    for seed in (1, 2, 3, 4):
        for strategy, shift in shifts.items():
            write_run(
                tmp_path, strategy, seed=seed, config={"dropout": -1.0}, loss_shift=shift * (1 if seed % 2 else 0.9)
            )
    found = said(tmp_path)
    assert found["loss"].sentence.startswith("Yes, in 1 of 2 arms: `zero3` is 7.")
    assert found["loss"].table["Same loss"].tolist() == ["1 of 2"]
    assert "masks differ between arms and no step is compared" in notes(found["loss"])
    table = TABLES["loss"](read_records(tmp_path))
    assert row(table, "zero2")["Equivalent"].startswith("equivalent (")
    assert row(table, "zero2")["of the loss there"] == "-"
    one = read_records(tmp_path)
    one = dataclasses.replace(one, runs=one.runs[one.runs["seed"] == 1])
    (loss,) = (answer for question, answer in answers(one).items() if question.name == "loss")
    assert loss.sentence.startswith(
        "Not known of 2 of 2 arms: their losses are neither told apart from noise nor shown"
    )


def test_claims_that_rest_on_the_records_are_told_with_links(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "ddp")
    evil = "<img src=x onerror=alert(1)> | *x*"
    resting = [
        Resting("S9-01", "../docs/claims.md#s9-01", "supported", "It is so.", f"It was so. {evil}"),
        Resting("S9-02", "", "partly", "It may be so.", "It was."),
    ]
    records = read_records(tmp_path / "runs")
    assert "claims" not in {question.name for question in answers(records)}
    build(records, "mine", tmp_path / "report", resting=resting)
    summary = (tmp_path / "report" / "summary.md").read_text()
    assert "| [S9-01](../docs/claims.md#s9-01) | supported | It is so. |" in summary
    assert "| S9-02 | partly | It may be so. | It was. |" in summary
    html = (tmp_path / "report" / "index.html").read_text()
    assert '<a href="../docs/claims.md#s9-01">S9-01</a>' in html
    assert "The verdicts of 2 published claims rest on these records" in html
    assert "<img src=x" not in html
    assert "<img" not in summary


def test_nothing_is_answered_from_nothing(tmp_path: Path) -> None:
    assert said(tmp_path) == {}
    write_run(tmp_path, "zero3", state="failed", reason="x")
    assert list(said(tmp_path)) == ["runs"]
    write_run(tmp_path / "v", "zero3", virtual=True, ranks=64, config={"global_batch_size": 64})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "status.json").write_text("{")
    found = said(tmp_path)
    assert list(found) == ["layers", "runs"]
    assert found["runs"].sentence == (
        "1 runs ended well and 1 did not; 1 records are left out because they cannot be believed."
    )
    assert dict(zip(found["runs"].table["Outcome"], found["runs"].table["Runs"], strict=True)) == {"failed": 1, "ok": 1}
    assert "here is no loss, no accuracy, and no throughput" in notes(found["layers"])


def test_runs_of_several_boxes_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, "ddp")
    write_run(tmp_path, "zero2", environment={"cpu": "Another"})
    assert "2 different boxes" in notes(said(tmp_path)["runs"])


def test_the_committed_records_have_short_answers() -> None:
    found = answers(read_parquet(REPOSITORY / "reports" / "laptop"))
    assert {question.name for question in found} == {
        "loss", "memory", "time", "traffic", "offload", "advice", "ranks", "runs"
    }  # fmt: skip
    for question, answer in found.items():
        text = "\n".join([answer.sentence, answer.table.to_csv(), *answer.notes])
        assert "nan" not in text, question.name
        assert "<NA>" not in text, question.name
        assert len(answer.sentence) < 160, question.name
        assert len(answer.table) <= 10, question.name


def test_a_step_is_held_against_the_loss_of_that_step(tmp_path: Path) -> None:
    """0.1 % off where the loss is large would be 2 % of the loss that training ends at, and the other way round."""

    def told(step: dict[str, Any], first: float, later: float) -> dict[str, Any]:
        return step | {"loss": first if step["step"] == 1 else later}

    for strategy, first, later in (("ddp", 5.0, 0.01), ("zero2", 5.005, 0.01), ("zero3", 5.0, 0.0101)):
        path = write_run(tmp_path, strategy, name=strategy)
        with_steps(path, functools.partial(told, first=first, later=later))
    loss = said(tmp_path)["loss"]
    assert loss.sentence == "Yes, in 1 of 2 arms: `zero3` is 1.00 % off the loss of its baseline."
    table = TABLES["loss"](read_records(tmp_path))
    assert row(table, "zero2")["of the loss there"] == "0.10 %"


@pytest.mark.parametrize(
    ("precision", "share", "follows"),
    [("fp32", 0.001, True), ("fp32", 0.003, False), ("bf16", 0.003, True), ("bf16", 0.006, False)],
)
def test_what_lies_between_two_numbers_of_bf16_is_no_difference_in_bf16(
    tmp_path: Path, precision: str, share: float, follows: bool
) -> None:
    """The loss ends at 1.7 + 4 exp(-8/12), and a little noise."""
    for strategy, shift in (("ddp", 0.0), ("zero2", share * 3.75)):
        write_run(tmp_path, strategy, loss_shift=shift, config={"precision": precision})
    loss = said(tmp_path)["loss"]
    assert loss.table["Same loss"].tolist() == ["1 of 1" if follows else "0 of 1"]
    assert ("was widened after that" in notes(loss)) is (precision == "bf16")


def test_nobody_is_told_to_train_under_the_profiler(tmp_path: Path) -> None:
    write_run(tmp_path, "ddp", config={"profile_steps": 3})
    assert "advice" not in said(tmp_path)
    write_run(tmp_path, "zero2")
    assert said(tmp_path)["advice"].table["Least model state"].iloc[0].startswith("zero2, ")


def test_speed_by_batch_stands_beside_the_baseline_of_the_same_batch(tmp_path: Path) -> None:
    for batch in (16, 64):
        for strategy, factor in (("ddp", 1.0), ("zero3", 1.0 if batch == 16 else 0.8)):
            write_run(tmp_path, strategy, config={"global_batch_size": batch}, time_factor=factor)
    answer = said(tmp_path)["batch_size"]
    assert answer.sentence == "The speed of `zero3` is not told apart from noise at either end, beside `ddp`."
    for batch, seed in itertools.product((16, 64), (43, 44)):
        for strategy, factor in (("ddp", 1.0), ("zero3", 1.0 if batch == 16 else 0.8)):
            write_run(tmp_path, strategy, config={"global_batch_size": batch}, time_factor=factor, seed=seed)
    answer = said(tmp_path)["batch_size"]
    small, large = (int(cell.removesuffix(" %")) for cell in row(answer.table, "zero3").tolist()[1:])
    assert (small, large) == (pytest.approx(100 / 1.5, abs=3), pytest.approx(100 / 1.2, abs=4))
    assert row(answer.table, "ddp").tolist() == ["ddp", "100 %", "100 %"]
    assert answer.sentence == (
        f"Of the speed of `ddp` `zero3` reaches {small} % at a batch of 16 and {large} % at a batch of 64."
    )
    confounded = dataclasses.replace(read_records(tmp_path))
    runs = confounded.runs
    runs.loc[(runs["strategy"] == "zero3") & (runs["global_batch_size"] == 64), "confounded"] = "clipping"
    answer = next(found for question, found in answers(confounded).items() if question.name == "batch_size")
    assert row(answer.table, "zero3").tolist()[2].endswith(" †")
    assert answer.sentence == "No arm beside `ddp` can be compared at more than one place."


def test_runs_without_a_loss_in_every_step_are_not_compared():
    steps = {"mine": pd.DataFrame({"loss": [1.0, math.nan, math.nan]}), "its": pd.DataFrame({"loss": [1.0, 1.0, 1.0]})}
    assert math.isnan(largest_step_difference([("mine", "its")], steps).share)
    steps["mine"]["loss"] = [1.0, 1.5, 1.0]
    assert largest_step_difference([("mine", "its")], steps).share == 0.5
