"""The parts of a step's time have their predictions next to them, on GPUs that the predictor has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from study.cli import main
from study.config.places import REPOSITORY
from study.predictor.time import predict_time
from study.receipt.document import (
    CollectiveTime,
    EngineFacts,
    ForecastRow,
    HostFacts,
    ReceiptDocument,
    StateFacts,
    TimeFacts,
    read_receipt,
    write_receipt,
)
from study.receipt.faults import find_faults
from study.receipt.figures import list_figures
from study.receipt.forecast import config_case, make_forecast
from study.receipt.page import receipt_lines

RECEIPTS = REPOSITORY / "tests" / "data" / "receipts"
# A step of eight ranks under DDP, whose passes are longer than the launches of their kernels.
PARTS = {"forward": 0.09, "backward": 0.16, "communication": 0.005, "offload": 0.0, "optimizer": 0.008}
PARTS |= {"data": 0.001, "rest": 0.002}
ALL_REDUCE = {"all_reduce": CollectiveTime(in_flight_s=0.03, exposed_s=0.005)}


def make(
    parts: Mapping[str, float] = PARTS,
    step_s: float | None = None,
    samples: int = 64,
    times: Mapping[str, Any] | None = None,
    **engine: Any,
) -> ReceiptDocument:
    """Return the receipt of GPT-2 on eight H200 with these times, and its forecast."""
    receipt = read_receipt(str(RECEIPTS / "cuda_ddp.json"))
    facts: dict[str, Any] = {
        "step_s": sum(parts.values()) if step_s is None else step_s,
        "steps": 9,
        "parts": dict(parts),
    }
    facts |= {"collectives": ALL_REDUCE, **(times or {})}
    update = {
        "engine": receipt.engine.model_copy(update={"ranks": 8, **engine}),
        "work": receipt.work.model_copy(update={"samples": samples, "micro_batches": 2}),
        "time": TimeFacts(**facts),
    }
    receipt = receipt.model_copy(update=update)
    return receipt.model_copy(update={"forecast": make_forecast(receipt)})


def list_times(receipt: ReceiptDocument) -> dict[str, ForecastRow]:
    rows = {row.figure: row for row in receipt.forecast.parts}
    return {figure.removeprefix("time: "): row for figure, row in rows.items() if figure.startswith("time: ")}


def step_row(receipt: ReceiptDocument) -> ForecastRow:
    return next(row for row in receipt.forecast.comparisons if row.figure == "step")


def test_parts_of_a_step_stand_beside_predictions_that_add_up_to_the_predicted_step() -> None:
    receipt = make()
    rows = list_times(receipt)
    assert {part: row.measured for part, row in rows.items()} == {
        "forward": 0.09,
        "backward": 0.16,
        "optimizer": 0.008,
    }
    prediction = predict_time(config_case(receipt).request)
    exposed_s = prediction.parts["communication_exposed"]
    assert sum(row.predicted for row in rows.values()) + exposed_s == pytest.approx(prediction.step_s.value)
    # A backward pass has twice the products.
    assert rows["backward"].predicted == pytest.approx(2 * rows["forward"].predicted, rel=0.1)
    # No published step has parts.
    assert {(row.low, row.high) for row in rows.values()} == {(None, None)}
    line = next(line for line in receipt_lines(receipt, "r") if line.startswith("  forward"))
    assert line.endswith(" (predicted 81.3 ms)")


def test_exposed_communication_stands_beside_its_prediction() -> None:
    receipt = make(PARTS | {"communication": 0.02}, times={"collectives": ALL_REDUCE})
    row = list_times(receipt)["communication"]
    exposed_s = predict_time(config_case(receipt).request).parts["communication_exposed"]
    assert (row.predicted, row.measured) == (exposed_s, 0.02)
    page = " ".join(" ".join(receipt_lines(receipt, "r")).split())
    assert "communication 20.0 ms 7% (predicted 2.99 ms) exposed of in flight: all_reduce 5.00 ms of 30.0 ms" in page


def test_parts_that_contain_communication_have_no_prediction() -> None:
    # Without the profiler's step.
    assert list_times(make(times={"collectives": {}})) == {}
    # One rank has none.
    assert set(list_times(make(times={"collectives": {}}, ranks=1))) == {"forward", "backward", "optimizer"}


def test_passes_that_wait_for_launches_have_one_prediction() -> None:
    receipt = make({"forward": 0.03, "backward": 0.04, "optimizer": 0.003, "data": 0.0, "rest": 0.0}, samples=8)
    rows = list_times(receipt)
    assert set(rows) == {"forward and backward", "optimizer", "communication"}
    row = rows["forward and backward"]
    assert (row.measured, row.predicted) == (0.07, pytest.approx(0.0679, rel=0.01))
    lines = receipt_lines(receipt, "r")
    assert next(line for line in lines if line.startswith("  forward")).endswith("(predicted 67.9 ms with backward)")
    assert not next(line for line in lines if line.startswith("  backward")).endswith(")")


@pytest.mark.parametrize(
    ("parts", "step_s", "cause"),
    [
        ({"backward": 0.9}, None, "most of the difference, 737 ms, is in the backward pass"),
        ({"optimizer": 0.5}, None, "most of the difference, 498 ms, is in the optimizer"),
        ({"communication": 0.4}, None, "most of the difference, 397 ms, is in exposed communication"),
        ({"data": 0.3}, None, "most of the difference, 300 ms, is in waiting for data, which no prediction has"),
        ({"rest": 0.3}, None, "most of the difference, 300 ms, is in the rest of a step, which no prediction has"),
        ({}, 0.8, "most of the difference, 534 ms, is in other steps than the one with these parts"),
        ({"backward": 0.05}, None, "most of the difference, 113 ms, is in the backward pass"),
        # Within the stated error nothing is named, however a part differs.
        ({"backward": 0.2, "forward": 0.04}, None, None),
    ],
)
def test_a_step_outside_of_its_stated_error_has_the_part_that_differs(
    parts: dict[str, float], step_s: float | None, cause: str | None
) -> None:
    receipt = make({**PARTS, **parts}, step_s)
    row = step_row(receipt)
    assert (row.is_outside, row.cause) == (cause is not None, cause)
    screen = " ".join(" ".join(receipt_lines(receipt, "r")).split())
    assert cause is None or f"times the prediction: {cause}" in screen


@pytest.mark.parametrize("device", ["cpu", "Unlisted card"])
def test_a_device_that_the_predictor_does_not_have_has_no_predicted_time(device: str) -> None:
    receipt = make(device=device)
    assert list_times(receipt) == {}
    assert "step" not in {row.figure for row in receipt.forecast.comparisons}


def make_offloaded(parts: dict[str, float], **times: Any) -> ReceiptDocument:
    """Return the receipt of stage 2 with its optimizer on the host of eight H200."""
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    settings = {"train_micro_batch_size_per_gpu": 64, "gradient_accumulation_steps": 2, **offload}
    engine: dict[str, Any] = {"engine": "deepspeed", "strategy": "zero2_cpu", "zero_stage": 2}
    engine |= {"offload_optimizer": "cpu", "settings": {**settings, "bf16": {"enabled": True}}}
    return make(PARTS | parts, times=times, optimizer="DeepSpeedCPUAdam", **engine)


COPIES = {"to_host": CollectiveTime(in_flight_s=0.02, exposed_s=0.01)}


def test_an_offloaded_step_has_its_copies_and_the_hosts_adam() -> None:
    receipt = make_offloaded({"offload": 0.01, "optimizer": 0.1}, offload=COPIES)
    prediction = predict_time(config_case(receipt).request)
    rows = list_times(receipt)
    assert rows["optimizer"].predicted >= prediction.parts["cpu_adam"] > 0.05
    assert rows["offload"].predicted == prediction.parts["offload"] > 0
    assert sum(row.predicted for row in rows.values()) == pytest.approx(prediction.step_s.value, rel=0.02)
    # Copies that were not seen are in the other parts.
    assert list_times(make_offloaded({})) == {}


def test_a_slow_host_is_a_fault_where_a_step_is_longer_than_on_published_hosts() -> None:
    usual, slow = (make_offloaded({"offload": 0.01, "optimizer": s}, offload=COPIES) for s in (0.1, 3.0))
    for receipt, is_slow in ((usual, False), (slow, True)):
        row = step_row(receipt)
        assert row.low is not None
        assert row.high is not None
        assert row.low < row.predicted < row.high < 3
        speed = next(row for row in receipt.forecast.parts if row.figure == "tokens/s")
        assert speed.low is not None
        assert row.is_outside == is_slow
        state = StateFacts(params={}, grads={}, optimizer={"host": 12 * 10**8})
        receipt = receipt.model_copy(update={"model_state": state, "host": HostFacts(cores=16, ranks=8)})
        faults = {fault.id: fault.says for fault in find_faults(receipt)}
        assert ("slow-host-optimizer" in faults) == is_slow
    assert step_row(slow).cause == "most of the difference, 2.92 s, is in the optimizer"
    assert faults["slow-host-optimizer"] == (
        "Adam on the host moves 1 GB/s: 16 cores are shared by 8 ranks of this machine"
    )


def test_trackers_get_the_predicted_parts_under_the_names_of_the_measured_ones() -> None:
    receipt = make(PARTS | {"communication": 0.02})
    figures, rows = list_figures(receipt), list_times(receipt)
    assert figures["predicted/time_metrics/forward(s)"] == rows["forward"].predicted
    assert figures["predicted/time_metrics/exposed_communication(s)"] == rows["communication"].predicted
    speed = next(row for row in receipt.forecast.parts if row.figure == "tokens/s")
    assert figures["predicted/throughput(tps)"] == speed.predicted / 8
    assert {name.removeprefix("predicted/") for name in figures if name.startswith("predicted/time_")} <= set(figures)
    on_cpu = read_receipt(str(RECEIPTS / "zero3.json"))
    on_cpu = on_cpu.model_copy(update={"forecast": make_forecast(on_cpu)})
    gathered = {row.figure: row.predicted for row in on_cpu.forecast.parts}["ring bytes: all_gather"]
    assert list_figures(on_cpu)["predicted/communication/all_gather(GiB)"] == gathered / 2**30


def test_a_comparison_of_two_receipts_has_the_predictions_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large, small = tmp_path / "a.json", tmp_path / "b.json"
    write_receipt(large, make())
    write_receipt(small, make({"forward": 0.03, "backward": 0.04, "optimizer": 0.003, "data": 0.0}, samples=8))
    assert main(["receipt", str(large), str(small)]) == 0
    header, *lines = [line for line in capsys.readouterr().out.splitlines() if "predicted" in line or ": " in line][
        -20:
    ]
    rows = {line.split("  ")[0].strip(): line.split() for line in lines}
    assert "predicted" in " ".join([header, *lines])
    # Measured and predicted of both, and the ratio of the measured ones.
    assert rows["time: step"][2:] == ["266", "ms", "250", "ms", "73.0", "ms", "73.3", "ms", "0.274"]
    assert rows["time: forward"][2:] == ["90.0", "ms", "81.3", "ms", "30.0", "ms", "0.333"]
    assert rows["time: forward and backward"][4:] == ["250", "ms", "70.0", "ms", "67.9", "ms", "0.28"]
    # Without predictions there are no columns of them.
    unknown = {"engine": EngineFacts(engine="ddp", ranks=8, device="Unlisted card")}
    for file in (large, small):
        write_receipt(file, read_receipt(str(file)).model_copy(update=unknown))
        document = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(document | {"forecast": {}}), encoding="utf-8")
    assert main(["receipt", str(large), str(small)]) == 0
    assert "predicted" not in capsys.readouterr().out
