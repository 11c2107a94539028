"""Reports of virtual ranks: what is not extrapolated over layers. Those in git have what is: test_report_build.py."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from study.config.places import REPOSITORY
from study.predictor.state import paper_traffic
from study.records.frames import Records, read_parquet, read_records
from study.report.questions import TABLES, gpu_ranks
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


@pytest.fixture(scope="module")
def gpu() -> Records:
    return read_parquet(REPOSITORY / "reports" / "gpu")


def test_a_rank_on_a_gpu_is_compared_with_its_prediction_and_with_cpus(gpu: Records) -> None:
    answer = answered(gpu_ranks.QUESTION.answer(gpu))
    by_strategy = answer.table.set_index("Strategy")
    assert set(by_strategy["Model"] + by_strategy["Ranks"].astype(str)) == {"gemma-2-9b8"}
    stage_3 = by_strategy.loc["zero3"]
    # reports/gpu: 27.595 GiB, 1.5536 s and 42 layers; reports/virtual_settings: from 6 and 7 of 42 layers.
    assert stage_3["State, GB"] == "20.32 (predicted 20.32, CPUs ~ 20.32)"
    assert stage_3["Gathered, GB"] == "2.026 (predicted 2.026)"
    assert stage_3["Peak, GB"].startswith("29.63 (predicted 29.6")
    assert stage_3[gpu_ranks._LAYER_MS].startswith("37 (predicted ")
    assert by_strategy.loc["zero2", "State, GB"] == "34.67 (predicted 34.67, CPUs ~ 34.66)"


def test_ranks_on_cpus_and_real_runs_on_a_gpu_are_no_virtual_ranks_on_one(gpu: Records) -> None:
    assert gpu_ranks.QUESTION.answer(read_parquet(REPOSITORY / "reports" / "virtual_settings")) is None
    complete = gpu.runs[~gpu.runs["virtual"]].reset_index(drop=True)
    assert len(complete) > 20
    assert gpu_ranks.QUESTION.answer(Records(complete, gpu.steps)) is None


def test_another_setting_on_cpus_is_not_compared_with_a_rank_on_a_gpu(gpu: Records) -> None:
    def state_on_cpus(records: Records) -> list[float]:
        return [case.state.on_cpus for case in gpu_ranks.cases(records) if case.run.strategy == "zero3"]

    assert state_on_cpus(gpu) == [pytest.approx(20_319_631_364)]
    override = '["zero_optimization.stage3_param_persistence_threshold=0"]'
    # reports/virtual_settings has that setting, too: no parameter persists.
    assert state_on_cpus(with_override(gpu, override)) == [pytest.approx(20_318_419_972)]
    (unknown,) = state_on_cpus(with_override(gpu, '["zero_optimization.reduce_bucket_size=7"]'))
    assert math.isnan(unknown)


def with_override(records: Records, override: str) -> Records:
    """Return the records with an engine setting of the virtual ranks."""
    engine = records.runs["engine_override"].mask(records.runs["virtual"], override)
    return Records(records.runs.assign(engine_override=engine), records.steps)
