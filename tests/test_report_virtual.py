"""Reports of virtual ranks: compared with the paper's Table 1, extrapolated over layers, and setting by setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from report_folders import drawn, figures, laptop
from study.predictor.state import paper_traffic
from study.records.frames import Records, read_records, read_runs
from study.report.questions import TABLES
from study.report.questions.virtual import LAYERS, TABLE1
from study.virtual.summaries import summaries
from synthetic_records import answered, as_never_started, write_run

# A model of 36 layers named 7.5 B, with exactly that many parameters for round figures.
AROUND, PER_LAYER, DEPTH = 300_000_000, 200_000_000, 36
PARTS = {"params": 2, "grads": 2, "optimizer": 12}
SHARDED_FROM = {"optimizer": 1, "grads": 2, "params": 3}


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Return one virtual record, whose row the tests fill in."""
    root = tmp_path_factory.mktemp("virtual")
    write_run(root, "zero3", virtual=True, ranks=64, gpu=False, config={"global_batch_size": 64})
    return read_runs(root)


def test_the_paper_sends_half_as_much_again_under_stage_3() -> None:
    # Section 7 of the ZeRO paper: 2 x the weights for plain data parallelism, stages 1 and 2, and 3 x for stage 3.
    assert [paper_traffic(stage, 4) for stage in range(4)] == [1.5, 1.5, 1.5, 2.25]


def row(
    blank: Records, strategy: str, ranks: int, layers: int = DEPTH, setting: str = "", traffic: float = 2.0,
    **more: Any,
) -> pd.DataFrame:  # fmt: skip
    parameters = AROUND + PER_LAYER * layers
    stage = int(strategy[-1])
    state = {
        f"{kind}_bytes_device": size * parameters / (ranks if stage >= SHARDED_FROM[kind] else 1)
        for kind, size in PARTS.items()
    }
    wire = traffic * 2 * parameters
    name = "gpt-7.5b" if layers == DEPTH else f"gpt-7.5b-{layers}layers"
    figures = {
        "run": f"{strategy}-{ranks}-{layers}-{setting}", "strategy": strategy, "zero_stage": stage, "world_size": ranks,
        "model_name_or_path": name, "model_parameters": parameters, "model_layers": layers, "preset_layers": DEPTH,
        "engine_precision": "bf16-engine", "precision": "bf16-engine", "virtual_world_size": ranks, "virtual_rank": 0,
        "engine_override": json.dumps([setting] if setting else []), "comm_calls_per_step": 10.0 * layers,
        "collectives": json.dumps({"all_gather": {
            "calls": 10 * layers, "payload_bytes": wire, "wire_bytes_per_rank": wire,
        }}), **state,
    }  # fmt: skip
    return blank.runs.assign(**(figures | more)).astype(blank.runs.dtypes)


def together(*rows: pd.DataFrame) -> Records:
    runs = pd.concat(rows, ignore_index=True)
    return Records(runs, laptop().steps.iloc[:0])


def lines(records: Records) -> int:
    return sum(summary["extrapolated"] is not None for summary in summaries(records))


def test_depths_of_different_settings_are_never_extrapolated_together(blank: Records) -> None:
    rows = [row(blank, "zero2", 16, layers) for layers in (2, 3)]
    assert lines(together(*rows, row(blank, "zero2", 16, 4, "zero_optimization.reduce_bucket_size=5"))) == 0
    assert lines(together(*rows, row(blank, "zero2", 16, 4, seq_length=32))) == 0
    assert lines(together(*rows, row(blank, "zero2", 16, 4))) == 1
    four = TABLES["table1"](together(*rows, *(row(blank, "zero2", 16, layers) for layers in (4, 5))))
    assert four[["Made by", "Line off by"]].to_numpy().tolist() == [["layers 2, 3 of 36", "0.00 % at 4"]]


def test_a_figure_that_is_not_linear_in_layers_is_not_extrapolated(blank: Records) -> None:
    bent = row(blank, "zero3", 64, 4, traffic=3.0)
    records = together(row(blank, "zero3", 64, 2), row(blank, "zero3", 64, 3), bent)
    table = TABLES["settings"](records)
    assert table["Ring bytes (NCCL), x weights"].isna().all()
    assert table["Payload, x weights"].tolist() == ["all_gather ?"]
    (line,) = answered(LAYERS.answer(records)).table.to_dict("records")
    assert (line["Measured completely"], line["Extrapolated"]) == (0, 1)
    assert line["Not linear in layers"].startswith("collective.all_gather")
    changed = row(blank, "zero3", 64, setting="zero_optimization.overlap_comm=true")
    drawing = figures("virtual_cluster", together(records.runs, changed))["settings"]
    assert "as shipped" not in drawing.alt


def test_a_cell_that_did_not_fit_is_a_virtual_row_of_its_world_size(tmp_path: Path) -> None:
    cell = write_run(tmp_path, "zero1", state="unsupported", reason="takes about 55 GiB", virtual=True)
    as_never_started(cell)
    command = ["accelerate", "launch", "study/train.py", "--task", "gpt-wikitext", "--scale", "laptop",
               "--model_name_or_path", "gpt-1t", "--virtual_world_size", "1024"]  # fmt: skip
    (cell / "sweep.json").write_text(json.dumps({"strategy": "zero1", "world_size": 1, "command": command}))
    records = read_records(tmp_path)
    (line,) = TABLES["virtual_runs"](records).to_dict("records")
    assert (line["Model"], line["Rank"]) == ("gpt-1t", "0 of 1024")
    assert line["Outcome"] == "unsupported: takes about 55 GiB"


def test_another_model_is_compared_by_the_papers_formula_for_its_number_of_parameters(blank: Records) -> None:
    bert = together(row(blank, "zero2", 8, model_name_or_path="bert-large-uncased"))
    assert TABLES["table1"](bert).empty
    assert drawn("virtual_cluster", bert) == []
    assert answered(TABLE1.answer(bert)).table.to_numpy().tolist() == [
        ["zero2", "1 of 1", "+0.00 %", "bert-large-uncased at 8"]
    ]
