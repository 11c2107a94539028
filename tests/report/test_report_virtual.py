"""Reports of virtual ranks: what is not extrapolated over layers. Those in git have what is: test_report_build.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from study.config.places import REPOSITORY
from study.predictor.state import paper_traffic
from study.records.frames import Records, read_parquet, read_records
from study.report.questions import TABLES
from study.report.questions.virtual import LAYERS
from study.virtual.summaries import summaries
from synthetic_records import answered, as_never_started, write_run


@pytest.fixture(scope="module")
def depths() -> Records:
    """Return the records of ranks of a model with 2, 3 and 4 of its 36 layers, under stage 2."""
    records = read_parquet(REPOSITORY / "reports" / "paper_table1")
    shape = records.runs["model_name_or_path"].str.fullmatch(r"gpt-7\.5b-[234]layers")
    chosen = shape & (records.runs["strategy"] == "zero2") & (records.runs["virtual_world_size"] == 16)
    return Records(records.runs[chosen].reset_index(drop=True), records.steps.iloc[:0])


def with_last(records: Records, column: str, value: object) -> Records:
    """Return the records with another value in a column of the last one."""
    runs = records.runs.copy()
    runs.loc[runs.index[-1], column] = value
    return Records(runs, records.steps)


def test_the_paper_sends_half_as_much_again_under_stage_3() -> None:
    # Section 7 of the ZeRO paper: 2 x the weights for plain data parallelism, stages 1 and 2, and 3 x for stage 3.
    assert [paper_traffic(stage, 4) for stage in range(4)] == [1.5, 1.5, 1.5, 2.25]


def test_depths_of_different_settings_are_never_extrapolated_together(depths: Records) -> None:
    def lines(records: Records) -> int:
        return sum(summary["extrapolated"] is not None for summary in summaries(records))

    assert lines(depths) == 1
    assert lines(with_last(depths, "engine_override", '["zero_optimization.reduce_bucket_size=5"]')) == 0
    assert lines(with_last(depths, "seq_length", 32)) == 0
    assert lines(Records(depths.runs.iloc[:2], depths.steps)) == 0


def test_a_figure_that_is_not_linear_in_layers_is_not_extrapolated(depths: Records) -> None:
    (column,) = depths.runs.tail(1)["collectives"]
    bent = {kind: {name: 1.5 * count for name, count in counts.items()} for kind, counts in json.loads(column).items()}
    records = with_last(depths, "collectives", json.dumps(bent))
    table = TABLES["settings"](records)
    assert table["Ring bytes (NCCL), x weights"].isna().all()
    assert all(text.endswith("?") for text in table["Payload, x weights"])
    (line,) = answered(LAYERS.answer(records)).table.to_dict("records")
    assert (line["Measured completely"], line["Extrapolated"]) == (0, 1)
    assert line["Not linear in layers"].startswith("collective.")


def test_a_cell_that_did_not_fit_is_a_virtual_row_of_its_world_size(tmp_path: Path) -> None:
    cell = write_run(tmp_path, "zero1", state="unsupported", reason="takes about 55 GiB", virtual=True)
    as_never_started(cell)
    command = [
        "accelerate",
        "launch",
        "study/train.py",
        "--task",
        "gpt-wikitext",
        "--scale",
        "laptop",
        "--model_name_or_path",
        "gpt-1t",
        "--virtual_world_size",
        "1024",
    ]
    (cell / "sweep.json").write_text(json.dumps({"strategy": "zero1", "world_size": 1, "command": command}))
    (line,) = TABLES["virtual_runs"](read_records(tmp_path)).to_dict("records")
    assert (line["Model"], line["Rank"]) == ("gpt-1t", "0 of 1024")
    assert line["Outcome"] == "unsupported: takes about 55 GiB"
