"""Names of a receipt's figures in trackers."""

from __future__ import annotations

import re

import pytest

from engines import ROOT
from study.receipt.document import HostFacts, ReceiptDocument, StateFacts, read_receipt
from study.receipt.figures import list_figures, log_figures, plain_names

RECEIPTS = ROOT / "tests" / "data" / "receipts"


def test_figures_of_a_gpu_have_the_names_of_torchtitan_and_axolotl() -> None:
    receipt = read_receipt(str(RECEIPTS / "cuda_ddp.json"))
    figures = list_figures(receipt)
    assert receipt.memory is not None
    assert receipt.speed.mfu is not None
    assert figures["memory/max_active(GiB)"] == receipt.memory.total_bytes / 2**30
    assert figures["memory/max_allocated (GiB)"] == (receipt.memory.allocator_peak_bytes or 0) / 2**30
    assert figures["memory/max_active(GiB)"] < figures["memory/max_reserved(GiB)"]
    assert figures["mfu(%)"] == 100 * receipt.speed.mfu
    # Peak rate of the card in bfloat16, by its data sheet.
    assert figures["tflops"] == pytest.approx(receipt.speed.mfu * 989, rel=0.01)
    percents = [value for name, value in figures.items() if re.fullmatch(r"time_metrics/.*\(%\)", name)]
    assert sum(percents) == pytest.approx(100)
    recomputing = list_figures(read_receipt(str(RECEIPTS / "cuda_checkpointed.json")))
    assert {"hfu(%)", "hardware_tflops"} <= set(recomputing)
    assert not {"mfu(%)", "tflops"} & set(recomputing)


def test_throughput_is_that_of_one_device() -> None:
    receipt = read_receipt(str(RECEIPTS / "ddp.json"))
    assert receipt.engine.ranks == 2
    assert list_figures(receipt)["throughput(tps)"] == (receipt.speed.tokens_per_s or 0) / 2
    assert list_figures(receipt.model_copy(update={"state": "too_short"})) == {}


def test_plain_names_are_those_that_mlflow_takes() -> None:
    figures = list_figures(read_receipt(str(RECEIPTS / "cuda_ddp.json")))
    plain = plain_names(figures)
    assert list(plain.values()) == list(figures.values())
    assert "memory/max_active_GiB_" in plain
    assert all(re.fullmatch(r"[\w\-. :/]+", name) for name in plain)


class Tracker:
    """A tracker as Accelerate has them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, figures: dict[str, float], step: int) -> None:
        self.logged.append((dict(figures), step))


class Accelerator:
    """Accelerate's, with its logging alone: all trackers get the same names."""

    def __init__(self, *names: str, is_main_process: bool = True) -> None:
        self.trackers = [Tracker(name) for name in names]
        self.is_main_process = is_main_process

    def log(self, figures: dict[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(figures, step)


def test_of_the_trackers_of_accelerate_mlflow_alone_gets_plain_names() -> None:
    figures = {"mfu(%)": 7.0}
    for names in (("mlflow",), ("wandb", "mlflow"), ("wandb", "trackio")):
        accelerator = Accelerator(*names)
        log_figures(accelerator.log, figures, 10)
        for tracker in accelerator.trackers:
            assert tracker.logged == [({"mfu___": 7.0} if tracker.name == "mlflow" else figures, 10)]
    elsewhere = Accelerator("mlflow", is_main_process=False)
    log_figures(elsewhere.log, figures, 10)
    assert elsewhere.trackers[0].logged == []


def offloading_receipt() -> ReceiptDocument:
    """Return a receipt of several ranks whose optimizer is on the host."""
    receipt = read_receipt(str(RECEIPTS / "zero3.json"))
    assert receipt.memory is not None
    memory = receipt.memory.model_copy(update={"host_parts": {"optimizer": 3 * 2**30, "parameters": 2**20}})
    engine = receipt.engine.model_copy(update={"offload_optimizer": "cpu"})
    state = StateFacts(params={}, grads={}, optimizer={"host": 12 * 10**6})
    time = receipt.time.model_copy(update={"parts": receipt.time.parts | {"offload": 0.01}})
    update = {"engine": engine, "memory": memory, "model_state": state, "time": time}
    return receipt.model_copy(update=update | {"host": HostFacts(cores=2, ranks=2)})


def test_trackers_get_ranks_offloaded_parts_and_predictions() -> None:
    receipt = offloading_receipt()
    figures = list_figures(receipt)
    assert figures["memory/offloaded_optimizer(GiB)"] == 3
    assert "memory/offloaded_gradients(GiB)" not in figures
    assert (
        figures["memory/heap_without_tensors(GiB)"]
        == ((receipt.memory and receipt.memory.outside_torch_bytes) or 0) / 2**30
    )
    busy = {row.rank: row.busy_s for row in receipt.ranks}
    assert figures["ranks/slowest_busy(s)"] == max(it for it in busy.values() if it is not None)
    assert busy[int(figures["ranks/slowest"])] == figures["ranks/slowest_busy(s)"]
    peaks = {row.rank: row.peak_bytes for row in receipt.ranks}
    assert figures["ranks/fullest_peak(GiB)"] == (peaks[int(figures["ranks/fullest"])] or 0) / 2**30
    assert figures["host_optimizer(GB/s)"] == pytest.approx(0.03 / receipt.time.parts["optimizer"])
    predicted = {row.figure: row.predicted for row in receipt.forecast.comparisons}
    assert figures["predicted/ring_bytes_of_a_step(GiB)"] == predicted["ring bytes of a step"] / 2**30
    on_gpu = list_figures(read_receipt(str(RECEIPTS / "cuda_ddp.json")))
    assert on_gpu["memory/outside_torch(GiB)"] > 1
    assert on_gpu["predicted/step(s)"] == pytest.approx(0.0363, rel=0.01)
    # Without an answer of the other rank the slowest is not known.
    alone = list_figures(receipt.model_copy(update={"ranks": receipt.ranks[:1]}))
    assert not any(name.startswith("ranks/") for name in alone)


def test_the_docs_list_each_figure() -> None:
    names = set(list_figures(offloading_receipt()))
    for file in RECEIPTS.glob("*.json"):
        names |= set(list_figures(read_receipt(str(file))))
    page = (ROOT / "docs" / "receipt.md").read_text(encoding="utf-8")
    table = page.partition("## Trackers")[2].partition("\n## ")[0]
    listed = re.findall(r"`([^`]+\([^`]+\)|\w*tflops|ranks/\w+)`", table)
    patterns = [re.escape(name).replace("PART", r"\w+") for name in listed]
    # Parts whose names the docs list.
    parts = re.findall(r"`time_metrics/PART\(s\)`, `time_metrics/PART\(%\)`: ([^|]+)", table)[0].strip().split(", ")
    in_steps = {name for name in names if re.fullmatch(r"time_metrics/\w+\(%\)", name)}
    assert in_steps == {f"time_metrics/{part}(%)" for part in (*parts, "data_loading")}
    assert {name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)} == set()
