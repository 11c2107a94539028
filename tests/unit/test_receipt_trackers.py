"""Names of a receipt's figures in trackers."""

from __future__ import annotations

import re

import pytest

from engines import ROOT
from study.receipt.document import read_receipt
from study.receipt.figures import list_figures, plain_names

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


def test_the_docs_list_each_figure() -> None:
    names = set()
    for file in RECEIPTS.glob("*.json"):
        names |= set(list_figures(read_receipt(str(file))))
    page = (ROOT / "docs" / "receipt.md").read_text(encoding="utf-8")
    table = page.partition("## Trackers")[2].partition("\n## ")[0]
    patterns = [re.escape(name).replace("PART", r"\w+") for name in re.findall(r"`([^`]+\([^`]+\)|\w*tflops)`", table)]
    assert {name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)} == set()
