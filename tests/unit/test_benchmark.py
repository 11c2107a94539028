"""`study benchmark`: rows, scores of answers, refusals of wrong files, and the league of the committed answers."""

from __future__ import annotations

import csv
import datetime
import functools
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from study.benchmark import answers, questions
from study.benchmark.answers import OURS, PredictedAnswer, Predictor, shipped_predictors
from study.benchmark.command import score_cells
from study.benchmark.questions import BenchmarkQuestion, read_questions
from study.benchmark.scores import Score, compare_pairs, judge_fits, predicted_fit, scores
from study.cli import main
from study.config.places import REPOSITORY
from study.predictor.validation import published_entries

QUESTIONS = read_questions()
WITH_PEAK = [row for row in QUESTIONS if row.peak_gib is not None]
WITH_STEP = [row for row in QUESTIONS if row.step_s is not None]


@functools.cache
def league() -> list[Predictor]:
    """Return the shipped predictors with their answers; this study's take seconds, and no test changes them."""
    return shipped_predictors(QUESTIONS)


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "answers.csv"
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    return file


def score_file(file: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["benchmark", "--answers", str(file), "--json", *flags]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def find_lines(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [line for line in document["scores"] if line["predictor"] == name]


def refusal(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    file = tmp_path / "answers.csv"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert main(["benchmark", "--answers", str(file), *flags]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    lines = printed.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert ". To fix it: " in lines[0]
    return lines[0].replace(str(file), "FILE")


def test_each_row_has_one_id_its_inputs_and_its_measurement_apart_from_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "--rows"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len({row["id"] for row in rows}) == len(rows) == len(QUESTIONS) > 300
    measured = [name for name in rows[0] if name.startswith("measured_")]
    assert list(rows[0])[-len(measured) :] == measured
    for row, question in zip(rows, QUESTIONS, strict=True):
        assert row["address"].startswith("https://")
        assert bool(row["measured_peak_gib"]) == (question.peak_gib is not None)
        # A rate of the page is the rate of the row, whatever its unit was there.
        if question.step_s is not None:
            tokens = int(row["micro_batch"]) * int(row["accumulation"]) * int(row["sequence"])
            assert tokens / float(row["measured_step_s"]) == pytest.approx(float(row["measured_tokens_per_s_per_gpu"]))
        assert {"true": "adapters"}.get(str(bool(row["lora_rank"])).lower(), row["kind"]) == row["kind"]
        if row["kind"] != "adapters":
            assert (row["kind"] == "offload") == bool(row["offload_optimizer"])
        assert (row["engine"] == "DeepSpeed") == bool(row["zero_stage"])


def test_inputs_do_not_change_with_a_measured_figure() -> None:
    entries = list(published_entries())
    measured = {"memory_gib", "memory_mib", "memory_bytes", "tokens_per_s_per_gpu", "samples_per_s", "step_s", "mfu"}
    keys = next(entry[1] for entry in entries if measured & entry[1].keys())
    changed = {name: value if name not in measured else 2 * value for name, value in keys.items()}
    assert questions._digest(changed) == questions._digest(keys)
    assert questions._digest({**keys, "micro_batch": 3}) != questions._digest(keys)


def test_a_row_has_the_words_of_its_page_and_its_own_day() -> None:
    quoted = {row.source: row for row in QUESTIONS if row.quote}
    assert {"fms-lora", "fms-qlora", "fms-bf16-foak", "torchtitan-929", "h2o-llmstudio-288"} <= quoted.keys()
    row = next(row for row in QUESTIONS if row.source == "fms-bf16-foak")
    assert row.peak_gib is not None
    assert f",{row.peak_gib * 2**30:.0f}," in row.row()["quote"]
    threads = [row for row in QUESTIONS if row.source == "threads"]
    late = {row.address.removeprefix("https://github.com/") for row in threads if row.read_on.day != 21}
    assert late == {"OpenRLHF/OpenRLHF/issues/597", "hiyouga/LlamaFactory/issues/3631"}


def test_quotes_and_days_are_no_inputs() -> None:
    keys = next(entry[1] for entry in published_entries())
    changed = {**keys, "quote": "as printed", "read_on": datetime.date(2026, 1, 1)}
    assert questions._digest(changed) == questions._digest(keys)


def test_the_page_has_the_number_of_rows_and_an_answer_to_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs" / "benchmark.md").read_text(encoding="utf-8")
    assert f"has {len(QUESTIONS)} configurations" in page
    example = re.findall(r"^```\n(id,.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    (tmp_path / "answers.csv").write_text(example, encoding="utf-8")
    assert main(["benchmark", "--answers", str(tmp_path / "answers.csv")]) == 0
    assert "your answers, peak memory: 1 of " in capsys.readouterr().out


def test_rows_are_written_to_a_file_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.csv"
    assert main(["benchmark", "--output", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{len(QUESTIONS)} rows in {file}; ")
    rows = list(csv.DictReader(file.open(encoding="utf-8")))
    assert main(["benchmark", "--rows", "--json"]) == 0
    documents = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == [row["id"] for row in documents]
    assert float(rows[0]["measured_step_s"]) == pytest.approx(documents[0]["measured_step_s"], rel=1e-6)


def test_perfect_answers_have_no_error_and_doubled_peaks_have_100_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for factor in (1, 2):
        rows = [
            {
                "id": row.id,
                "peak_gib": factor * row.peak_gib if row.peak_gib else "",
                "tokens_per_s_per_gpu": row.tokens_per_step / row.step_s if row.step_s else "",
                "fits": row.fits,
            }
            for row in QUESTIONS
        ]
        document = score_file(write(tmp_path, rows), capsys, "--name", "perfect")
        for line in find_lines(document, "perfect"):
            error = float(factor == 2 and line["figure"] == "memory")
            assert line["answered"]["rows"] == line["measured"]
            assert line["answered"]["median"] == pytest.approx(error, abs=1e-9)
            assert line["answered"]["worst"] == pytest.approx(error, abs=1e-9)
        assert document["fits"]["perfect"]["right"] == document["fits"]["perfect"]["judged"]
        assert document["fits"]["perfect"]["called"] == document["fits"]["perfect"]["ran_out"] == 38


def test_an_answer_of_easy_rows_alone_is_compared_on_these_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the answers of `study predict` to its ten best held-out rows, a little worse: no better than that."""
    ours = league()[0].answers
    held_out = [row for row in WITH_PEAK if "memory" not in ours[row.id].fitted]

    def size(row: BenchmarkQuestion) -> float:
        return abs((ours[row.id].peak_gib or 0) / (row.peak_gib or 1) - 1)

    easy = sorted(held_out, key=size)[:10]
    rows = [{"id": row.id, "peak_gib": (ours[row.id].peak_gib or 0) * 1.03} for row in easy]
    document = score_file(write(tmp_path, rows), capsys, "--name", "easy")
    alone = max(line["answered"]["median"] for line in find_lines(document, "easy"))
    worst_kind = max(line["answered"]["median"] for line in find_lines(document, OURS) if line["figure"] == "memory")
    assert alone < worst_kind, "alone it looks better"
    pair = next(pair for pair in document["pairs"] if pair["second"] == OURS)
    assert pair["first_errors"]["rows"] == pair["second_errors"]["rows"] == 10
    assert pair["second_errors"]["worst"] == pytest.approx(size(easy[-1]))
    assert pair["second_errors"]["median"] < pair["first_errors"]["median"]
    assert pair["closer"] == 0
    # Rows without an answer are counted, and are right in no column.
    assert sum(line["answered"]["rows"] for line in find_lines(document, "easy")) == 10
    fits = document["fits"]["easy"]
    assert fits["judged"] == len([row for row in QUESTIONS if row.fits is not None])
    assert fits["right"] <= fits["answered"] == 10
    main(["benchmark", "--answers", str(tmp_path / "answers.csv")])
    assert f"your answers, peak memory: 10 of {len(WITH_PEAK)} rows answered, {len(WITH_PEAK) - 10} not" in (
        capsys.readouterr().out
    )


def test_a_row_that_fitted_a_predictor_does_not_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"id": row.id, "peak_gib": row.peak_gib, "fitted": "memory" if number % 2 else ""}
        for number, row in enumerate(WITH_PEAK)
    ]
    document = score_file(write(tmp_path, rows), capsys, "--name", "half")
    assert sum(line["answered"]["rows"] for line in find_lines(document, "half")) == (len(WITH_PEAK) + 1) // 2
    # `study predict` has its rules for adapters from some of these rows, and its constants of time from others.
    held_out = {(line["group"], line["figure"]): line["held_out"] for line in find_lines(document, OURS)}
    assert held_out["adapters, FSDP", "memory"]
    assert held_out["adapters, FSDP", "time"]
    scored = sum(
        line["answered"]["rows"] for line in find_lines(document, OURS) if line["figure"] == "time" and line["held_out"]
    )
    assert scored == sum(row.measurement.use == "score" for row in WITH_STEP) < len(WITH_STEP)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "id,peak_gib\nqwen-7b-000000,3\n",
            "line 2: no row has the id 'qwen-7b-000000'. To fix it: did you mean qwen-7b-",
        ),
        ("id,peak\nX,3\n", "FILE has the column 'peak'. To fix it: did you mean peak_gib? "),
        ("id,peak_gib,peak_gib\nX,3,4\n", "has the column 'peak_gib' twice"),
        ("peak_gib\n3\n", "FILE has no column of ids or none of figures"),
        ("id,note\nX,\n", "FILE has no column of ids or none of figures"),
        ("", "FILE has no column of ids or none of figures"),
        ("id,peak_gib\nX,much\n", "line 2: peak_gib is 'much'. To fix it: write a number above 0, or nothing"),
        ("id,peak_gib\nX,nan\n", "line 2: peak_gib is 'nan'"),
        ("id,peak_gib\nX,-3\n", "line 2: peak_gib is '-3'"),
        ("id,step_s\nX,0\n", "line 2: step_s is '0'"),
        (
            "id,fits\nX,maybe\n",
            "line 2: fits is 'maybe'. To fix it: write one of true, yes, 1, 1.0, false, no, 0, 0.0, or nothing",
        ),
        ("id,peak_gib,fitted\nX,3,speed\n", "line 2: fitted is 'speed'"),
        ("id,peak_gib\nX,3\nX,4\n", " is answered twice. To fix it: leave one of the two lines"),
        ("id,step_s,tokens_per_s_per_gpu\nX,3,4\n", "line 2 has step_s and tokens_per_s_per_gpu"),
        ("id,peak_gib\nX\n", "line 2 has not as many fields as the header"),
        ("id,peak_gib\nX,3,4\n", "line 2 has not as many fields as the header"),
        ("id,peak_gib\nX,\n", "FILE answers no row. To fix it: fill peak_gib, step_s or fits; study benchmark --rows"),
        ('id,peak_gib\n"X,3\n', "is no CSV"),
        ("id,peak_gib\n\udcff,3\n", "is not text in UTF-8"),
    ],
)
def test_a_wrong_file_is_one_line(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(text.replace("X", WITH_PEAK[0].id), tmp_path, capsys)


def test_flags_that_contradict_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = f"id,peak_gib\n{WITH_PEAK[0].id},3\n"
    assert "answers no row of this split" in refusal(good, tmp_path, capsys, "--split", "later")
    assert f"{OURS} is a predictor of the league" in refusal(good, tmp_path, capsys, "--name", OURS)
    assert "leave one of them out" in refusal(good, tmp_path, capsys, "--rows")
    assert main(["benchmark", "--name", "x"]) == 2
    assert main(["benchmark", "--answers", str(tmp_path / "none.csv")]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_control_characters_of_a_name_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, [{"id": row.id, "peak_gib": row.peak_gib} for row in WITH_PEAK[:3]])
    assert main(["benchmark", "--answers", str(file), "--name", "a\x1b[31mb"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_later_rows_are_those_read_after_the_day_of_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    day = yaml.safe_load(questions.FILE.read_text(encoding="utf-8"))["public_until"]
    entries = list(published_entries())
    assert {entry[0] for entry in entries} >= {datetime.date(2026, 11, 21), datetime.date(2026, 11, 27)}
    assert all(row.split == "public" for row in QUESTIONS) == all(entry[0] <= day for entry in entries)
    next_day = day + datetime.timedelta(days=1)
    monkeypatch.setattr(
        "study.benchmark.questions.published_entries", lambda: [(next_day, *entry[1:]) for entry in entries[:3]]
    )
    assert [row.split for row in read_questions()] == ["later"] * 3
    assert read_questions("public") == []
    assert main(["benchmark", "--split", "public"]) == 0
    assert "no row was read after" in capsys.readouterr().out


def test_the_league_has_the_errors_of_the_committed_answers() -> None:
    """Errors are computed here from the files and the rows."""
    measured = {row.id: row for row in QUESTIONS}
    entries = yaml.safe_load(questions.FILE.read_text(encoding="utf-8"))["predictors"]
    assert [item.name for item in league()[1:]] == [entry["name"] for entry in entries]
    by_name = {(line.predictor, line.figure, line.group): line for line in scores(QUESTIONS, league())}
    for entry in entries:
        rows = list(csv.DictReader((answers.FOLDER / entry["file"]).open(encoding="utf-8")))
        assert {row["id"] for row in rows} <= measured.keys(), (
            "answers to rows that have changed: run its command again"
        )
        assert entry["file"] in entry["made_by"]
        assert (REPOSITORY / entry["made_by"].split()[1]).is_file()
        # A row without an answer has its reason.
        assert all(row["peak_gib"] or row["note"] for row in rows)
        sizes: dict[str, list[float]] = {}
        for row in rows:
            question = measured[row["id"]]
            if row["peak_gib"] and question.peak_gib:
                sizes.setdefault(question.group, []).append(abs(float(row["peak_gib"]) / question.peak_gib - 1))
        for group, errors in sizes.items():
            line: Score = by_name[entry["name"], "memory", group]
            assert line.answered.rows == len(errors)
            assert line.answered.worst == pytest.approx(max(errors))
            assert (
                sorted(errors)[(len(errors) - 1) // 2]
                <= (line.answered.median or 0)
                <= sorted(errors)[len(errors) // 2]
            )


def test_the_committed_page_has_the_league() -> None:
    """Those of other predictors; predictions of `study predict` may have changed since."""
    page = (REPOSITORY / "reports" / "prediction" / "summary.md").read_text(encoding="utf-8")
    lines = [line for line in scores(QUESTIONS, league()) if line.predictor != OURS]
    assert len(lines) >= 20
    for line in lines:
        cells = [line.figure, line.group, line.predictor, *score_cells(line)]
        assert f"| {' | '.join(cells)} |" in page


def test_common_rows_are_those_that_every_predictor_of_a_kind_answers() -> None:
    rows = [row for row in WITH_PEAK if row.group == "full, FSDP"][:3]
    first = Predictor("first", {row.id: PredictedAnswer(peak_gib=row.peak_gib) for row in rows[:2]})
    second = Predictor("second", {row.id: PredictedAnswer(peak_gib=2 * (row.peak_gib or 0)) for row in rows[1:]})
    for line in scores(rows, [first, second, Predictor("silent", {})]):
        assert line.measured == 3
        assert (line.answered.rows, line.common.rows) == (2, 1)
        assert line.common.median == (line.predictor == "second")
    pair = compare_pairs(rows, first, [second])[0]
    assert (pair.first_errors.rows, pair.closer) == (1, 1)


def test_a_peak_above_the_memory_of_the_gpu_does_not_fit() -> None:
    row = WITH_PEAK[0]
    for factor, fits in ((0.9, True), (1.1, False)):
        predictor = Predictor("x", {row.id: PredictedAnswer(peak_gib=factor * row.gpu_memory_gib)})
        assert predicted_fit(row, predictor) is fits
        assert judge_fits([row], predictor).right == (fits is row.fits)
    explicit = Predictor("x", {row.id: PredictedAnswer(peak_gib=2 * row.gpu_memory_gib, fits=True)})
    assert predicted_fit(row, explicit) is True


def test_the_benchmark_imports_neither_torch_nor_pandas() -> None:
    code = (
        "import sys; from study.cli import main; main(['benchmark']); assert not {'torch', 'pandas'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"{len(QUESTIONS)} rows: ")
    for item in league():
        assert item.name in result.stdout


@pytest.mark.parametrize("by", ["source", "code", "memory_kind", "checkpointing"])
def test_rows_are_grouped_by_another_column(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "--by", by, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    ours = [line for line in document["scores"] if line["predictor"] == OURS and line["figure"] == "memory"]
    assert sum(line["measured"] for line in ours) == len(WITH_PEAK)


def test_a_tool_answers_rows_as_its_formula_has_it(tmp_path: Path) -> None:
    """EleutherAI's formula by hand: GPT-2 on one GPU, with everything kept."""
    rows, out = tmp_path / "rows.csv", tmp_path / "answers.csv"
    assert main(["benchmark", "--output", str(rows)]) == 0
    tool = [sys.executable, "tools/benchmark_estimators.py", "eleutherai", str(rows), str(out)]
    subprocess.run(tool, cwd=REPOSITORY, check=True)
    assert out.read_text(encoding="utf-8") == (answers.FOLDER / "eleutherai.csv").read_text(encoding="utf-8")
    row = next(row for row in QUESTIONS if row.source == "nanogpt")
    parameters = 2 * 50257 * 768 + 768 * 1024 + 8 * 768 * 12 + 2 * 768 + 4 * 12 * 768**2 + 2 * 12 * 768 * 3072
    activations = 1024 * 12 * 768 * 12 * (34 + 5 * 12 * 1024 / 768)
    expected = (parameters * (2 + 4 + 12) + activations) / 2**30
    lines = csv.DictReader(out.open(encoding="utf-8"))
    answer = next(line for line in lines if line["id"] == row.id)
    assert float(answer["peak_gib"]) == pytest.approx(expected, abs=1e-3)


def test_every_shipped_answer_is_of_a_row() -> None:
    """A corrected row has another id, and an answer to the old one would silently be none."""
    ids = {question.id for question in read_questions()}
    files = sorted(answers.FOLDER.glob("*.csv"))
    assert len(files) == len(league()) - 1
    for file in files:
        assert answers.parse_answers(file.read_text(encoding="utf-8"), file.name, QUESTIONS, ids)
