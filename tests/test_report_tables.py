"""The tables: every cell is a row, every figure is the record's, and an empty table says why it is empty."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

from study.config.strategies import REPOSITORY, WITH_COPIES
from study.predictor.records import predicted
from study.records.frames import Records, read_parquet, read_records
from study.report.plots.scaling import efficiency
from study.report.questions import QUESTIONS, TABLES, answers, neighbours, nodes
from synthetic_records import PARAMETERS, state_bytes, told, write_run

MIB = 2**20
ALL = ("summary", "loss", "memory", "runtime", "single_vs_multi", "batch_size", "model_size", "offload")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Two seeds of plain training, stages and offload on two ranks; and what did not end well."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (42, 43):
        for strategy in ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu"):
            shift = 0.5 if strategy == "zero2" else 0.0
            write_run(root, strategy, seed=seed, loss_shift=shift)
    write_run(root, "zero3_nvme", state="unsupported", reason="libaio is missing")
    write_run(root, "zero3_nvme_optimizer", state="timeout", reason="ended after its 900 s")
    write_run(root, "fsdp2", state="oom", reason="CUDA out of memory (1)")
    write_run(root, "fsdp2", seed=43, state="failed", reason="<script>alert(1)</script>")
    return read_records(root)


def row(table: pd.DataFrame, arm: str) -> pd.Series:
    found = table[table["Arm"] == arm]
    assert len(found) == 1, table["Arm"].tolist()
    return found.iloc[0]


def test_there_is_every_table(records: Records) -> None:
    others = ("traffic", "controls", "slices", "left", "step_profile", "profile", "fits", "probes", "nodes",
              "neighbours", "virtual_runs", "table1", "settings", "setting_effects", "lines_beside_whole_models",
              "releases_to_avoid", "causes", "verdicts")  # fmt: skip
    assert sorted(TABLES) == sorted((*ALL, *others))


@pytest.mark.parametrize("name", ALL)
def test_every_table_has_its_common_columns_and_units_in_its_headings(name: str, tmp_path: Path) -> None:
    for batch in (16, 32):
        for model in ("gpt-tiny", "gpt2"):
            for strategy in ("single", "ddp", "zero3", "zero3_cpu"):
                write_run(tmp_path, strategy, config={"global_batch_size": batch, "model_name_or_path": model})
    records = read_records(tmp_path)
    table = TABLES[name](records)
    assert list(table)[:3] == ["Workload", "Arm", "Runs"]
    assert list(table)[-2:] == ["Outcome", "Comparable"]
    assert len(table) == (8 if name == "offload" else 16)
    units = ("MiB", "GiB", "KiB", "ms", "/s", ", s", "tokens", "millions", "baseline", "x one device", "x without")
    numbers = [column for column in table if table[column].dtype.kind == "f"]
    bare = {
        "Eval loss",
        "Train loss, first",
        "Train loss, last",
        "Perplexity",
        "Largest difference in a step",
        "at step",
    }
    bare |= {"Efficiency", "Calls per step", "Accumulation", "Global batch"}
    assert [column for column in numbers if column not in bare and not any(unit in column for unit in units)] == []


@pytest.mark.parametrize("name", ["summary", "loss", "memory", "runtime", "single_vs_multi"])
def test_runs_that_did_not_end_well_are_rows_with_their_reasons(name: str, records: Records) -> None:
    table = TABLES[name](records)
    assert row(table, "zero3_nvme")["Outcome"] == "unsupported: libaio is missing"
    assert row(table, "zero3_nvme_optimizer")["Outcome"] == "timeout: ended after its 900 s"
    assert row(table, "fsdp2")["Outcome"] == ("1 oom, 1 failed: CUDA out of memory (1); <script>alert(1)</script>")
    assert row(table, "zero3")["Outcome"] == "ok"
    assert (table["Runs"].sum(), len(table)) == (len(records.runs), 11)


def test_the_memory_table_holds_what_the_fullest_rank_held(records: Records) -> None:
    table = TABLES["memory"](records)
    held = state_bytes("zero3_cpu", 2)
    found = row(table, "zero3_cpu")
    assert found["Parameters (host), MiB"] == pytest.approx(held["params"]["host"] / MIB)
    assert found["Optimizer (host), MiB"] == pytest.approx(held["optimizer"]["host"] / MIB)
    assert found["Gradients, MiB"] == pytest.approx(held["grads"]["device"] / MIB)
    assert found["Optimizer, MiB"] == 0
    whole = sum(places["device"] for places in state_bytes("single", 1).values())
    assert found["State on the device, x baseline"] == pytest.approx(held["grads"]["device"] / whole)
    assert row(table, "single")["State on the device, x baseline"] == 1


def test_the_loss_table_pairs_by_seed_and_finds_the_largest_step(records: Records) -> None:
    table = TABLES["loss"](records)
    assert row(table, "single")["Equivalent"] == "baseline"
    same, shifted = row(table, "zero3"), row(table, "zero2")
    assert same["Largest difference in a step"] < 1e-6
    assert same["Equivalent"].startswith("equivalent (mean difference")
    assert "n = 2, p = " in same["Equivalent"]
    assert shifted["Largest difference in a step"] == pytest.approx(0.5, abs=1e-5)
    assert shifted["at step"] > 1
    assert shifted["Equivalent"].startswith("equivalence is not shown")


def test_one_run_each_is_said(tmp_path: Path) -> None:
    for strategy in ("single", "zero3"):
        write_run(tmp_path, strategy)
    records = read_records(tmp_path)
    assert row(TABLES["loss"](records), "zero3")["Equivalent"].startswith("one seed: no test")
    runtime = row(TABLES["runtime"](records), "zero3")
    assert "(n = 1)" in runtime["Step time, ms"]
    assert runtime["In words"] == "not told apart from noise (one run each)"


def test_speed_stands_beside_what_the_device_reached_in_plain_matrix_products(tmp_path: Path) -> None:
    rates = {"tflops": {"fp32": 50.0, "bf16": 0.5}}
    for strategy, noted in (("ddp", rates), ("zero2", {"error": "not measured"}), ("zero3", {})):
        run = write_run(tmp_path, strategy, config={"precision": "bf16"})
        attempts = [{"matmul_rates": {"tflops": {"bf16": 9.0}}}, {"matmul_rates": noted}]
        (run / "sweep.json").write_text(json.dumps({"attempts": attempts}))
    records = read_records(tmp_path)
    table = TABLES["runtime"](records)
    ddp = records.runs[records.runs["strategy"] == "ddp"].iloc[0]
    steps_per_s = ddp["tokens_per_s"] / (ddp["global_batch_size"] * ddp["seq_length"])
    assert row(table, "ddp")["Samples/s"] == pytest.approx(steps_per_s * ddp["global_batch_size"])
    # On two devices.
    share = ddp["model_flops_per_step"] * steps_per_s / 2 / 0.5e12
    assert row(table, "ddp")["Of the measured matmul rate"] == pytest.approx(share)
    for arm in ("zero2", "zero3"):
        assert pd.isna(row(table, arm)["Of the measured matmul rate"])


def test_the_runtime_table_tells_ratios_from_noise(tmp_path: Path) -> None:
    for seed in (42, 43, 44):
        for strategy, factor in (("single", 1.0), ("zero0", 1.8), ("zero3", 2.4)):
            for repeat in (1, 2):
                write_run(tmp_path, strategy, seed=seed, repeat=repeat, ranks=1, time_factor=factor)
    table = TABLES["runtime"](read_records(tmp_path))
    assert row(table, "zero0")["In words"] == "not told apart from noise (n = 3)"
    slower = row(table, "zero3")
    # Two repeats of each of three seeds.
    assert slower["In words"].startswith(("+99 % (n = 3, p = ", "+100 % (n = 3, p = ", "+101 % (n = 3, p = "))
    middle, low, high, *points = map(float, re.findall(r"[\d.]+\d", slower["Time, x baseline"]))
    assert low < 2 < high
    assert middle == pytest.approx(stats.gmean(points), abs=0.01)
    assert len(points) == 3


def test_scaling_stands_beside_the_ideal(tmp_path: Path) -> None:
    write_run(tmp_path, "single")
    for ranks in (2, 4, 8):
        write_run(tmp_path, "ddp", ranks=ranks, time_factor=2 / ranks)
    table = TABLES["single_vs_multi"](read_records(tmp_path))
    assert table["Arm"].tolist() == ["single", "ddp x2", "ddp x4", "ddp x8"]
    assert table["Ideal"].tolist() == [1, 2, 4, 8]
    assert table["x one device"].iloc[0] == "1 (one device)"
    assert table["Efficiency"].iloc[3] == pytest.approx(0.9, abs=0.02)


def test_a_larger_batch_pays_traffic_back_per_token(tmp_path: Path) -> None:
    for batch in (16, 64):
        for strategy in ("ddp", "zero3"):
            write_run(tmp_path, strategy, config={"global_batch_size": batch})
    table = TABLES["batch_size"](read_records(tmp_path))
    sent = table.set_index(["Arm", "Global batch"])["Ring bytes (NCCL) per token, KiB"]
    assert sent["zero3", 16] == pytest.approx(8 * PARAMETERS / (16 * 64) / 1024)
    assert sent["zero3", 16] == pytest.approx(4 * sent["zero3", 64])
    assert table["Throughput, x baseline"].tolist()[1].startswith("0.6")


def test_a_repeat_does_not_move_the_middle_of_a_loss(tmp_path: Path) -> None:
    """It computes the loss of its seed again, and counted twice."""
    for strategy in ("ddp", "zero2"):
        for seed in (42, 43):
            write_run(tmp_path, strategy, seed=seed)
    write_run(tmp_path, "ddp", seed=42, repeat=2)
    records = read_records(tmp_path)
    for name, column in (("summary", "Eval loss"), ("loss", "Train loss, last"), ("loss", "Perplexity")):
        table = TABLES[name](records)
        assert row(table, "ddp")[column] == pytest.approx(row(table, "zero2")[column], rel=1e-5)


def test_payload_stands_beside_ring_bytes_in_the_table_of_traffic_alone(records: Records) -> None:
    headings = {name: " ".join(map(str, table(records).columns)) for name, table in TABLES.items()}
    assert [name for name, text in headings.items() if "Payload" in text] == ["traffic"]
    assert "Ring bytes (NCCL) per step, MiB" in headings["traffic"]


def test_models_are_ordered_by_their_parameters(tmp_path: Path) -> None:
    for model in ("gpt2", "gpt-tiny"):
        for strategy in ("single", "zero2"):
            write_run(tmp_path, strategy, config={"model_name_or_path": model})
    table = TABLES["model_size"](read_records(tmp_path))
    assert table["Parameters, millions"].tolist() == [PARAMETERS / 1e6] * 4
    assert set(table["Model"]) == {"gpt2", "gpt-tiny"}


def test_offload_stands_beside_the_same_stage(records: Records) -> None:
    table = TABLES["offload"](records)
    assert set(table["Arm"]) == {
        "zero2", "zero3", "zero2_cpu", "zero3_cpu", "zero3_nvme", "zero3_nvme_optimizer"
    }  # fmt: skip
    moved = row(table, "zero3_cpu")
    assert (moved["Optimizer on"], moved["Parameters on"], moved["Without offload"]) == ("cpu", "cpu", "zero3")
    assert re.fullmatch(r"0\.6[678] \(n = 2: 0\.6[5-9], 0\.6[5-9]\)", moved["Time, x without"])
    assert row(table, "zero2_cpu")["Without offload"] == "zero2"
    assert row(table, "zero2")["Without offload"] == "this row"


@pytest.mark.parametrize("name", ALL)
def test_what_the_records_do_not_hold_is_no_row_and_no_answer(name: str, tmp_path: Path) -> None:
    nothing = read_records(tmp_path)
    (question,) = (question for question in QUESTIONS if name in question.tables)
    assert TABLES[name](nothing).empty
    assert question.answer(nothing) is None
    write_run(tmp_path, "ddp")
    one = read_records(tmp_path)
    has_rows = name in ("summary", "loss", "memory", "runtime")
    assert TABLES[name](one).empty is not has_rows
    # One arm alone has no loss that can be compared.
    assert (question.answer(one) is not None) is (has_rows and name != "loss")


def test_virtual_runs_have_memory_and_no_times(tmp_path: Path) -> None:
    write_run(tmp_path, "zero3", virtual=True, ranks=64, config={"global_batch_size": 64})
    records = read_records(tmp_path)
    assert len(TABLES["memory"](records)) == 1
    for name in ("summary", "loss", "runtime"):
        assert TABLES[name](records).empty


def test_what_is_predicted_of_many_machines_stands_beside_what_virtual_ranks_hold_and_send() -> None:
    table = TABLES["nodes"](read_parquet(REPOSITORY / "reports" / "virtual_scaling"))
    assert table["Ranks"].max() == 1024
    assert set(WITH_COPIES) <= set(table["Arm"].str.split(",").str[0])
    for what in ("State", "Ring bytes (NCCL)"):
        assert table[f"{what}, predicted"].tolist() == pytest.approx(table[f"{what} per rank, MiB"].tolist(), rel=1e-5)
    kept = table.pivot(index="Arm", columns="Ranks", values="Efficiency, predicted")
    assert (kept[1024] < kept[32]).all()
    # Over many machines those that send little between them keep more of their speed.
    assert kept.loc["hsdp", 1024] > kept.loc["fsdp2", 1024] / kept.loc["fsdp2", 16]
    assert "Tokens/s" not in table


def test_a_run_on_gpus_has_a_predicted_speed_and_peak(tmp_path: Path) -> None:
    write_run(tmp_path, "zero3", ranks=16, machines=2, config={"model_name_or_path": "gpt2"})
    run = read_records(tmp_path).runs.iloc[0]
    there = predicted(run.replace({run["devices"]: '["NVIDIA H100 80GB HBM3"]'}))
    assert there.tokens_per_s > 0
    assert there.peak_bytes > there.state_bytes
    here = predicted(run.replace({run["devices"]: "[]"}))
    assert (here.state_bytes, math.isnan(here.tokens_per_s)) == (there.state_bytes, True)
    unknown = predicted(run.replace({run["model_name_or_path"]: "somebody/else"}))
    assert math.isnan(unknown.state_bytes)


def test_records_where_nothing_ended_well_are_still_tables(tmp_path: Path) -> None:
    for strategy in ("single", "zero3"):
        write_run(tmp_path, strategy, state="oom", reason="out of memory")
    records = read_records(tmp_path)
    for name in ("summary", "loss", "memory", "runtime"):
        assert TABLES[name](records)["Outcome"].tolist() == ["oom: out of memory"] * 2


def test_more_machines_stand_beside_the_ideal_with_what_they_send_to_each_other(tmp_path: Path) -> None:
    write_run(tmp_path, "zero3", ranks=8, config={"global_batch_size": 32})
    # Strong: the same batch on twice the ranks, in two thirds of the time. Weak: twice the batch, in 1.25 times of it.
    write_run(tmp_path, "zero3", ranks=16, machines=2, config={"global_batch_size": 32}, time_factor=2 / 3)
    write_run(tmp_path, "zero3", ranks=16, machines=2, config={"global_batch_size": 64}, time_factor=1.25)
    batch = {"global_batch_size": 64, "task": "gpt-wikitext", "seq_length": 32}
    for strategy, ranks, machines in (
        ("zero2", 8, 1),
        ("zero2", 16, 2),
        ("zero2", 64, 8),
        ("ddp", 8, 1),
        ("ddp", 64, 8),
    ):
        name = f"{strategy}-{ranks}"
        write_run(tmp_path, strategy, ranks=ranks, machines=machines, virtual=True, name=name, config=batch)
    records = read_records(tmp_path)
    table = TABLES["nodes"](records)
    real = table[table["Scaling"] != "planned"].set_index(["Scaling", "Machines"])
    assert real.loc[("strong", 1), "Efficiency"] == 1
    assert real.loc[("strong", 2), "Efficiency"] == pytest.approx(0.75, rel=0.06)
    assert real.loc[("weak", 2), "Efficiency"] == pytest.approx(0.8, rel=0.06)
    sent = 8 * PARAMETERS / MIB
    columns = ["Ring bytes (NCCL) per rank, MiB", "Of it across machines, MiB"]
    assert real.loc[("weak", 2), columns].tolist() == [sent, 0.9 * sent]
    assert real.loc[("strong", 1), "Of it across machines, MiB"] == 0
    planned = table[table["Scaling"] == "planned"]
    # Two numbers of machines are no plan.
    assert planned[["Arm", "Machines"]].to_numpy().tolist() == [["zero2", 1], ["zero2", 2], ["zero2", 8]]
    assert planned["Efficiency"].isna().all()
    answer = told(nodes.answer(records))
    assert answer.sentence.startswith("On up to 2 machines a rank keeps 7")
    assert len(efficiency(records)) == 3


def test_a_percentile_and_a_share_of_the_ideal_are_those_of_the_records(tmp_path: Path) -> None:
    write_run(tmp_path, "single")
    write_run(tmp_path, "ddp", ranks=4, time_factor=0.5)
    records = read_records(tmp_path)
    runs = records.runs.set_index("strategy")
    for _, line in TABLES["runtime"](records).iterrows():
        run = runs.loc[line["Arm"].split()[0]]
        assert line["p10, ms"] == pytest.approx(1e3 * run["step_time_s_p10"])
        assert line["p90, ms"] == pytest.approx(1e3 * run["step_time_s_p90"])
        assert line["p10, ms"] < line["p90, ms"]
    share = runs.loc["ddp", "tokens_per_s"] / runs.loc["single", "tokens_per_s"] / 4
    (scaling,) = [answer for question, answer in answers(records).items() if question.name == "ranks"]
    assert scaling.table.set_index("Arm").loc["ddp", "Of the ideal"] == f"{100 * share:.0f} %"


def test_neighbours_stand_beside_the_stages_with_what_they_hold_keep_and_send() -> None:
    records = read_parquet(REPOSITORY / "reports" / "neighbours")
    found = neighbours.neighbours_table(records)
    mine = found[found["Workload"] == "gpt-wikitext, llama-tiny, fp32, clipping 1"].set_index("Arm")
    whole, kept = mine.loc["single", "Parameters, MiB"], mine.loc["single", "Kept for backward, MiB"]
    # Embeddings too, and all but the norms.
    assert mine.loc["tp", "Parameters, MiB"] == pytest.approx(whole / 2, rel=0.01)
    # Half of the samples, or half of each.
    for arm in ("zero1 x2", "ulysses_zero1 x2", "fsdp2 x2", "cp x2"):
        assert mine.loc[arm, "Kept for backward, MiB"] == pytest.approx(kept / 2, rel=0.08)
    # Counted wrong until 2026-11-23.
    planned = neighbours.neighbours_table(read_parquet(REPOSITORY / "reports" / "virtual_neighbours"))
    assert planned.loc[planned["Arm"].str.startswith("fsdp2"), "Kept for backward, MiB"].isna().all()
    assert "all_to_all" in mine.loc["ulysses_zero3 x2", "Payload by collective, MiB"]
    assert mine.loc["ulysses_zero3 x2", "Calls"] > mine.loc["zero3 x2", "Calls"]
    answer = neighbours.answer(records)
    assert answer is not None
    assert answer.sentence.startswith("gpt-wikitext, gpt-tiny: of 4 ranks each holds least state under `fsdp2 x4`")


@pytest.mark.parametrize("report", ["neighbours", "virtual_neighbours"])
def test_context_parallelism_sends_all_that_it_passes_on(report: str) -> None:
    """Records of before 2026-11-23 said (N-1)/N of it, and were corrected by arithmetic."""
    runs = read_parquet(REPOSITORY / "reports" / report).runs
    runs = runs[(runs["strategy"] == "cp") & (runs["status_state"] == "ok")]
    assert len(runs) >= 4
    for run in runs.itertuples():
        counted = json.loads(run.collectives)
        assert counted["all_to_all"]["wire_bytes_per_rank"] == counted["all_to_all"]["payload_bytes"] > 0
        assert run.sent_bytes_per_step == sum(each["wire_bytes_per_rank"] for each in counted.values())


def test_bytes_of_gloo_stand_beside_those_of_a_ring_where_a_record_has_them(tmp_path: Path) -> None:
    write_run(tmp_path, "zero3", gpu=False)
    table = TABLES["traffic"](read_records(tmp_path))
    assert (table["Sent by gloo per step, MiB"] == 1.5 * table["Ring bytes (NCCL) per step, MiB"]).all()
