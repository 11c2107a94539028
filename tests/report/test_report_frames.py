from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.records import frames
from study.records.directory import read_run
from study.records.frames import Records, read_parquet, read_records, write_parquet
from study.records.models import SummaryRecord
from study.records.rows import RUN_COLUMNS, STEP_COLUMNS
from study.records.schema import NEW_NAMES
from study.report.document import cell_text
from study.report.questions import TABLES, answers
from synthetic_records import as_never_started, required_keys, reseal, state_bytes, write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for strategy in ("single", "ddp", "zero3"):
        write_run(root, strategy)
    write_run(root, "zero3_cpu", state="oom", reason="CUDA out of memory <b>")
    return root


def assert_same_records(records: Records, expected: Records) -> None:
    pd.testing.assert_frame_equal(records.runs, expected.runs)
    pd.testing.assert_frame_equal(records.steps, expected.steps)
    assert records.refused == expected.refused


def test_keys_and_columns_of_older_records_are_read_under_todays_names(tmp_path: Path) -> None:
    group = {"divides": "tensors", "ranks": 2, "state_over": 1}
    run = write_run(tmp_path / "runs", "tp", config={"group_size": 2}, engine={"model_parallel_group": group})
    today = read_records(tmp_path / "runs")
    for name in ("config.json", "engine.json"):
        text = (run / name).read_text()
        (run / name).write_text(text.replace('"group_size"', '"team_size"').replace('"model_parallel_group"', '"team"'))
    reseal(run)
    assert_same_records(read_records(tmp_path / "runs"), today)
    write_parquet(today, tmp_path)
    runs = table_of_runs(tmp_path / frames.RUNS_FILE)
    write_with_digest(runs.rename(columns={new: old for old, new in NEW_NAMES.items()}), tmp_path)
    assert_same_records(read_parquet(tmp_path), today)


def test_a_column_without_a_value_is_in_no_file_and_is_read_as_empty(runs: Path, tmp_path: Path) -> None:
    records = read_records(runs)
    empty = [name for name in RUN_COLUMNS if records.runs[name].isna().all()]
    assert {"energy_j", "status_cause"} <= {*empty}
    write_parquet(records, tmp_path)
    written = {*table_of_runs(tmp_path / frames.RUNS_FILE)}
    assert {*empty} & written == {"status_cause", "nvme_param_dtype"}
    assert_same_records(read_parquet(tmp_path), records)


def table_of_runs(file: Path) -> pd.DataFrame:
    return pq.read_table(file).to_pandas(types_mapper=frames._NULLABLE.get)


def write_with_digest(runs: pd.DataFrame, folder: Path) -> None:
    """Write a table of runs as a version with other columns does."""
    table = pa.Table.from_pandas(runs, preserve_index=False)
    digest = {frames._DIGEST: frames._digest(runs, folder / frames.STEPS_FILE)}
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **digest}), folder / frames.RUNS_FILE)


def test_every_figure_of_a_record_is_in_its_row(runs: Path) -> None:
    records = read_records(runs)
    assert list(records.runs) == list(RUN_COLUMNS)
    row = records.runs.set_index("strategy").loc["zero3"]
    run = read_run(next(runs.glob("*-zero3-*")))
    for key in {*required_keys(SummaryRecord)} - {"state_bytes_per_rank"}:
        assert run.summary[key] == row[key] or (run.summary[key] is None and pd.isna(row[key]))
    for kind, places in state_bytes("zero3", 2).items():
        assert {place: row[f"{kind}_bytes_{place}"] for place in places} == places
    config = RunConfig.from_dict(run.config, "")
    for key in ("seed", "learning_rate", "global_batch_size", "task", "dropout"):
        assert row[key] == getattr(config, key)
    assert row["memory_steady_allocated_gib"] == run.memory["ranks"][0]["phases"]["steady"]["allocated"]
    assert (row["floor_loss"], row["floor_eval_loss"], pd.isna(row["floor_accuracy"])) == (1.7, 1.71, True)
    assert json.loads(row["collectives"]) == run.traffic["collectives"]
    assert (row["repeat"], row["engine_precision"], row["zero_stage"]) == (1, "fp32", 3)


def test_a_row_has_the_memory_of_the_fullest_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path, "zero3")
    memory = read_run(run).memory
    memory["ranks"][1]["phases"]["steady"]["host"] = 77.0
    (run / "memory.json").write_text(json.dumps(memory))
    reseal(run)
    assert read_records(tmp_path).runs["memory_steady_host_gib"].tolist() == [77.0]


def test_steps_carry_the_evaluation_that_followed_them(runs: Path) -> None:
    records = read_records(runs)
    assert list(records.steps) == list(STEP_COLUMNS)
    run = read_run(next(runs.glob("*-ddp-*")))
    steps = frames.steps_by_run(records)[run.path.name]
    for key in ("loss", "samples_hash"):
        assert steps[key].tolist() == [row[key] for row in run.steps]
    evaluated = steps[steps["eval_loss"].notna()]
    assert evaluated["step"].tolist() == [row["step"] for row in run.evals]
    assert evaluated["eval_perplexity"].tolist() == [row["perplexity"] for row in run.evals]
    assert steps["eval_accuracy"].isna().all()


def test_a_cell_without_files_is_read_from_the_note_of_its_sweep(runs: Path) -> None:
    cell = runs / "gpt-wikitext-gpt-tiny-zero3_nvme-2x-00000000-r1"
    write_run(runs, "zero3_nvme", name=cell.name, state="unsupported", reason="libaio is missing")
    as_never_started(cell)
    command = ["accelerate", "launch", "study/train.py", "--task", "gpt-wikitext", "--scale", "laptop"]
    note = {"strategy": "zero3_nvme", "world_size": 2, "command": [*command, "--max_steps", "8", "--eval_steps", "4"]}
    (cell / "sweep.json").write_text(json.dumps(note))
    rows = read_records(runs).runs.set_index("strategy")
    assert (rows.loc["zero3_nvme", "workload"], rows.loc["zero3_nvme", "world_size"]) == ("gpt-tiny, built-in text", 2)
    (cell / "sweep.json").unlink()
    assert read_records(runs).runs.set_index("strategy").loc["zero3_nvme", "workload"] == "workload not recorded"
    (cell / "sweep.json").write_text(json.dumps(note | {"command": ["rm", "-rf"]}))
    assert read_records(runs).refused[0].startswith(f"{cell.name}/sweep.json: command is 'rm -rf'")


def test_parquet_gives_the_same_tables_findings_and_refusals(runs: Path, tmp_path: Path) -> None:
    (runs / next(runs.glob("*-zero3-*")).name / "summary.json").write_text("{")
    records = read_records(runs)
    assert len(records.refused) == 1
    write_parquet(records, tmp_path / "kept")
    # It is kept in git: 170 columns of few rows need no more, without what Arrow and pandas note on each.
    assert (tmp_path / "kept" / frames.RUNS_FILE).stat().st_size < 40_000
    reread = read_records(tmp_path / "kept")
    assert_same_records(records, reread)
    for (question, answer), (copied, second) in zip(answers(records).items(), answers(reread).items(), strict=True):
        assert (question.name, answer.notes) == (copied.name, second.notes)
        assert [*answer.headlines] == [*second.headlines]
        pd.testing.assert_frame_equal(answer.table.map(cell_text), second.table.map(cell_text))
    for table in TABLES.values():
        pd.testing.assert_frame_equal(table(records).map(cell_text), table(reread).map(cell_text))


def test_an_empty_folder_is_valid_and_a_missing_or_mixed_one_is_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    empty = read_records(tmp_path / "empty")
    assert (list(empty.runs), list(empty.steps)) == (list(RUN_COLUMNS), list(STEP_COLUMNS))
    assert (len(empty.runs), len(empty.steps), empty.refused) == (0, 0, ())
    write_parquet(empty, tmp_path / "kept")
    assert_same_records(empty, read_parquet(tmp_path / "kept"))
    with pytest.raises(UserError, match="is not a folder"):
        read_records(tmp_path / "nowhere")
    write_parquet(empty, runs)
    with pytest.raises(UserError, match="contains both"):
        read_records(runs)


def test_parquet_that_is_damaged_or_was_changed_after_the_report_was_made_is_refused(runs, tmp_path):
    """Two rows of one run, for example, would count as two repeats, with a false interval."""
    records, folder = read_records(runs), tmp_path / "kept"
    write_parquet(records, folder)
    assert_same_records(read_parquet(folder), records)
    file, steps = folder / frames.RUNS_FILE, folder / frames.STEPS_FILE
    table, contents = pq.read_table(file), {name: name.read_bytes() for name in (file, steps)}
    repeated = pa.concat_tables([table, table.slice(1, 1)]).replace_schema_metadata(table.schema.metadata)
    damages: tuple[tuple[str, Callable[[], object]], ...] = (
        ("is not readable", lambda: file.write_bytes(contents[file][:-100])),
        ("has no digest", lambda: pd.read_parquet(file).to_parquet(file)),
        ("was changed", lambda: pq.write_table(repeated, file)),
        ("was changed", lambda: pq.write_table(pq.read_table(steps).slice(1), steps)),
        # A newer version wrote it.
        ("has other columns", lambda: write_with_digest(table_of_runs(file).assign(new_column=1), folder)),
        ("is not readable", file.unlink),
    )
    for words, damage in damages:
        damage()
        with pytest.raises(UserError, match=rf"runs\.parquet .*{words}") as refusal:
            read_records(folder)
        assert refusal.value.fix.startswith("remove it, and rebuild it from its runs: study report ")
        for name, content in contents.items():
            name.write_bytes(content)


def test_text_columns_are_text_for_any_record(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "ddp", state="failed", reason="half a pair \ud83d, a bell \x07, <i>")
    write_parquet(read_records(tmp_path / "runs"), tmp_path)
    assert read_parquet(tmp_path).runs["status_reason"].tolist() == ["half a pair \ufffd, a bell \ufffd, <i>"]
