from __future__ import annotations

import json
from pathlib import Path

import pytest

from report_folders import drawn, laptop, row
from study.config.text import percent
from study.records.frames import Records, read_records
from study.report.questions import TABLES
from study.report.questions.scaling import NODES
from synthetic_records import PARAMETERS, answered, write_run

MIB = 2**20


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Return two seeds of plain training, stages and offload on two ranks; plus failed runs."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (42, 43):
        for strategy in ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu"):
            write_run(root, strategy, seed=seed, loss_shift=0.5 if strategy == "zero2" else 0.0)
    write_run(root, "zero3_nvme", state="unsupported", reason="libaio is missing")
    write_run(root, "zero3_nvme_optimizer", state="timeout", reason="ended after its 900 s")
    write_run(root, "fsdp2", state="oom", reason="CUDA out of memory (1)")
    write_run(root, "fsdp2", seed=43, state="failed", reason="<script>alert(1)</script>")
    return read_records(root)


def test_failed_runs_are_rows_with_their_reasons(records: Records) -> None:
    outcomes = {
        "zero3": "ok",
        "zero3_nvme": "unsupported: libaio is missing",
        "zero3_nvme_optimizer": "timeout: ended after its 900 s",
        "fsdp2": "1 oom, 1 failed: CUDA out of memory (1); <script>alert(1)</script>",
    }
    for name in ("summary", "loss", "memory", "runtime", "single_vs_multi"):
        table = TABLES[name](records)
        assert {arm: row(table, arm)["Outcome"] for arm in outcomes} == outcomes, name
        assert (table["Runs"].sum(), len(table)) == (len(records.runs), 11)
        lost = TABLES[name](Records(records.runs[records.runs["status_state"] == "oom"], records.steps.iloc[:0]))
        assert lost.empty or lost["Outcome"].tolist() == ["oom: CUDA out of memory (1)"]


def test_times_of_slow_and_fast_steps_are_those_of_the_records() -> None:
    records = laptop()
    table = TABLES["runtime"](records)
    runs = records.runs[records.runs["strategy"] == "zero3"]
    workload = runs["workload"].iloc[0]
    (line,) = [line for _, line in table.iterrows() if (line["Strategy"], line["Workload"]) == ("zero3", workload)]
    for name in ("p10", "p90"):
        measured = runs[runs["workload"] == workload][f"step_time_s_{name}"].median()
        assert line[f"{name}, ms"] == pytest.approx(1e3 * measured)


def test_speed_is_a_fraction_of_the_measured_matmul_rate(tmp_path: Path) -> None:
    rates = {"tflops": {"fp32": 50.0, "bf16": 0.5}}
    for strategy, noted in (("ddp", rates), ("zero2", {"error": "not measured"}), ("zero3", {})):
        run = write_run(tmp_path, strategy, config={"precision": "bf16"})
        attempts = [{"matmul_rates": {"tflops": {"bf16": 9.0}}}, {"matmul_rates": noted}]
        (run / "sweep.json").write_text(json.dumps({"attempts": attempts}))
    records = read_records(tmp_path)
    table = TABLES["runtime"](records).set_index("Strategy")["Of the measured matmul rate"]
    ddp = records.runs[records.runs["strategy"] == "ddp"].iloc[0]
    steps_per_s = ddp["tokens_per_s"] / (ddp["global_batch_size"] * ddp["seq_length"])
    # The run has two devices.
    assert table["ddp"] == pytest.approx(ddp["model_flops_per_step"] * steps_per_s / 2 / 0.5e12)
    assert table[["zero2", "zero3"]].isna().all()


def test_more_machines_are_relative_to_the_ideal_with_their_traffic(tmp_path: Path) -> None:
    write_run(tmp_path, "zero3", ranks=8, config={"global_batch_size": 32})
    # Strong: the same batch on twice the ranks in 2/3 of the time. Weak: twice the batch in 1.25 times the time.
    write_run(tmp_path, "zero3", ranks=16, machines=2, config={"global_batch_size": 32}, time_factor=2 / 3)
    write_run(tmp_path, "zero3", ranks=16, machines=2, config={"global_batch_size": 64}, time_factor=1.25)
    batch = {"global_batch_size": 64, "task": "gpt-wikitext", "seq_length": 32}
    for strategy, machines in (("zero2", 1), ("zero2", 2), ("zero2", 8), ("ddp", 1), ("ddp", 8)):
        name = f"{strategy}-{machines}"
        write_run(tmp_path, strategy, ranks=8 * machines, machines=machines, virtual=True, name=name, config=batch)
    records = read_records(tmp_path)
    table = TABLES["nodes"](records)
    measured = table[table["Scaling"] != "virtual ranks"].set_index(["Scaling", "Machines"])
    efficiencies = [measured.loc[place, "Efficiency"] for place in (("strong", 1), ("strong", 2), ("weak", 2))]
    assert efficiencies == pytest.approx([1, 0.75, 0.8], rel=0.06)
    sent = 8 * PARAMETERS / MIB
    columns = ["Ring bytes (NCCL) per rank, MiB", "Of it across machines, MiB", "Out of a machine, MiB"]
    assert measured.loc[("weak", 2), columns].tolist() == [sent, 0.9 * sent, 0.9 * sent]
    assert measured.loc[("strong", 1), "Of it across machines, MiB"] == 0
    planned = table[table["Scaling"] == "virtual ranks"]
    # Two machine counts do not make a plan.
    assert planned[["Strategy", "Machines"]].to_numpy().tolist() == [["zero2", 1], ["zero2", 2], ["zero2", 8]]
    assert planned["Efficiency"].isna().all()
    strong, weak = answered(NODES.answer(records)).headlines
    assert [headline.value for headline in (strong, weak)] == [
        percent(measured.loc[(scaling, 2), "Efficiency"]) for scaling in ("strong", "weak")
    ]
    assert [drawing.name for drawing in drawn("scaling", records)] == ["nodes"] * 3
