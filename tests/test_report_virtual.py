"""Reports of virtual ranks: what is not extrapolated over layers. Those in git have what is: test_report_build.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from study.config.places import REPOSITORY
from study.predictor.state import paper_traffic
from study.records.frames import Records, read_parquet, read_records
from study.report.questions import TABLES
from study.report.questions.memory import NEIGHBOURS
from study.report.questions.virtual import LAYERS, LORA
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
    command = ["accelerate", "launch", "study/train.py", "--task", "gpt-wikitext", "--scale", "laptop",
               "--model_name_or_path", "gpt-1t", "--virtual_world_size", "1024"]  # fmt: skip
    (cell / "sweep.json").write_text(json.dumps({"strategy": "zero1", "world_size": 1, "command": command}))
    (line,) = TABLES["virtual_runs"](read_records(tmp_path)).to_dict("records")
    assert (line["Model"], line["Rank"]) == ("gpt-1t", "0 of 1024")
    assert line["Outcome"] == "unsupported: takes about 55 GiB"


def test_the_sentence_on_alternatives_has_the_figures_of_one_strategy() -> None:
    for report, model in (("virtual_neighbours", "1 layer of gpt-7.5b"), ("virtual_scaling", "gpt2")):
        answer = answered(NEIGHBOURS.answer(read_parquet(REPOSITORY / "reports" / report)))
        strategies = [str(name) for name in re.findall(r"`(\w+)`(?! with)", answer.sentence)]
        assert (len(strategies), strategies[1]) == (2, "zero3")
        assert f"({model}, built-in text" in answer.sentence
        cells = answer.table.set_index(("", "Strategy"))[answer.subject].drop(columns="Calls").loc[strategies]
        shown = [float(str(cell).replace(",", "")) for cell in cells.to_numpy().ravel() if cell != "-"]
        figures = [float(text.replace(",", "")) for text in re.findall(r"([\d,.]+) MiB", answer.sentence)]
        assert figures == pytest.approx(shown, rel=0.01)


def test_with_lora_only_the_last_stage_divides_what_is_large() -> None:
    records = read_parquet(REPOSITORY / "reports" / "virtual_tuning")
    # In bf16 the weights take 2 bytes; a rank has all of them under stage 2, and one of eight parts under stage 3.
    answer = answered(LORA.answer(records))
    sizes = re.findall(r"([\d,.]+) MiB (?:of model state )?with `(zero\d)`", answer.sentence)
    case = answer.table[answer.table["Setting"] == "lora"].set_index("Strategy")
    weights = 1.488211968e9 * 2 / 2**20
    assert [name for _, name in sizes] == ["zero2", "zero3"]
    undivided, divided = (float(size.replace(",", "")) for size, _ in sizes)
    assert undivided == pytest.approx(weights, rel=0.01)
    assert divided == pytest.approx(weights / 8, rel=0.02)
    assert case["Params, GB"].sum() == pytest.approx(weights * 9 / 8 * 2**20 / 1e9, rel=0.01)
