"""The figures of a receipt in the trackers of the Trainer and of Accelerate, under names that others use."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from engines import ROOT, printed_json
from forked import fork_ranks
from study.receipt.document import read_receipt
from study.receipt.figures import list_figures, plain_names

RECEIPTS = ROOT / "tests" / "data" / "receipts"


@functools.cache
def run_trackers() -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder of the events, and the output of two ranks."""
    folder = Path(tempfile.mkdtemp())
    return folder, printed_json(fork_ranks("ddp", "tests/probes/receipt_trackers.py", str(folder)))


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of each scalar in the event files below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = {}
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            scalars[name] = [(event.step, event.value) for event in events.Scalars(name)]
    return scalars


def test_the_trainer_logs_the_figures_once_and_its_own_losses_as_without_a_receipt() -> None:
    folder, ranks = run_trackers()
    receipt = read_receipt(str(folder / "logged"))
    assert receipt.failures == ()
    for rank in ranks:
        alone, logged = rank["histories"]["alone"], rank["histories"]["logged"]
        losses = [[(row["step"], row["loss"]) for row in rows if "loss" in row] for rows in (alone, logged)]
        # The tenth step is logged although the receipt logs there as well.
        assert [step for step, _ in losses[0]] == [5, 10]
        assert losses[0] == losses[1]
        with_figures = [row for row in logged if "memory/max_active(GiB)" in row]
        assert [row["step"] for row in with_figures] == [10]
    scalars = read_events(folder / "logged" / "events")
    figures = list_figures(receipt)
    assert set(figures) > {"throughput(tps)", "time_metrics/end_to_end(s)", "memory/optimizer(GiB)"}
    for name in figures:
        # The Trainer's trackers get its own prefix.
        assert [step for step, _ in scalars[f"train/{name}"]] == [10], name
    memory = receipt.memory
    assert memory is not None
    assert scalars["train/memory/max_active(GiB)"][0][1] == pytest.approx(memory.total_bytes / 2**30)
    assert "train/loss" in read_events(folder / "alone" / "events")


def test_trackers_of_accelerate_get_the_figures_of_rank_0_with_their_step() -> None:
    folder, ranks = run_trackers()
    receipt = read_receipt(str(folder / "loop"))
    assert receipt.failures == ()
    lines = [json.loads(line) for line in (folder / "loop" / "lines.jsonl").read_text().splitlines()]
    assert [row.pop("step") for row in lines] == [10]
    scalars = read_events(folder / "loop")
    assert {name: [10] for name in lines[0]} == {name: [step for step, _ in rows] for name, rows in scalars.items()}
    assert lines[0] == pytest.approx({name: rows[0][1] for name, rows in scalars.items()}, rel=1e-5)
    assert set(ranks[0]["figures"]) == set(lines[0])
    assert lines[0]["memory/parameters(GiB)"] == pytest.approx(4 * receipt.model.parameters / 2**30)
    assert lines[0]["communication/all_reduce(GiB)"] == pytest.approx(4 * receipt.model.parameters / 2**30, rel=0.01)


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


def test_the_docs_list_each_figure() -> None:
    names = set()
    for file in RECEIPTS.glob("*.json"):
        names |= set(list_figures(read_receipt(str(file))))
    page = (ROOT / "docs" / "receipt.md").read_text(encoding="utf-8")
    table = page.partition("## Trackers")[2].partition("\n## ")[0]
    patterns = [re.escape(name).replace("PART", r"\w+") for name in re.findall(r"`([^`]+\([^`]+\)|\w*tflops)`", table)]
    assert {name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)} == set()
