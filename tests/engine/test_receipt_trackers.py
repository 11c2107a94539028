"""The figures of a receipt in the trackers of the Trainer and of Accelerate."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from engines import printed_json
from forked import fork_ranks
from study.receipt.document import read_receipt
from study.receipt.figures import list_figures, plain_names


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
        # Rank 1 has answered late: its figures are in the receipt, and were not there to be logged.
        is_of_all_ranks = name.startswith("ranks/")
        # The Trainer's trackers get its own prefix.
        steps = [step for step, _ in scalars.get(f"train/{name}", ())]
        assert steps == [10] or (is_of_all_ranks and steps == []), name
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
    # On a busy machine another rank answers after the figures were logged.
    assert {name for name in set(ranks[0]["figures"]) ^ set(lines[0]) if not name.startswith("ranks/")} == set()
    assert lines[0]["memory/parameters(GiB)"] == pytest.approx(4 * receipt.model.parameters / 2**30)
    assert lines[0]["communication/all_reduce(GiB)"] == pytest.approx(4 * receipt.model.parameters / 2**30, rel=0.01)


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "mlflow"])
def test_another_tracker_gets_keys_and_figures_and_nothing_leaves_the_machine(tracker: str, tmp_path: Path) -> None:
    pytest.importorskip(tracker, reason=f"{tracker} is not installed; docs/receipt.md has the release that ran")
    ranks = printed_json(fork_ranks("ddp", "tests/probes/receipt_trackers.py", str(tmp_path), tracker))
    assert [rank["requests"] for rank in ranks] == [[], []]
    runs: defaultdict[str, dict[str, dict[int, float]]] = defaultdict(dict)
    for run, name, step, value in ranks[0]["rows"]:
        steps = runs[run].setdefault(name, {})
        # Each figure is logged once; the Trainer adds its epoch and step to each of its logs.
        assert step not in steps or name.endswith(("epoch", "global_step")), name
        steps[step] = value
    by_trainer, by_loop = sorted(runs.values(), key=lambda names: all("loss" not in name for name in names))
    # MLflow refuses parentheses, and the Trainer gives it no prefix.
    rename_figures = plain_names if tracker == "mlflow" else dict
    prefix = "" if tracker == "mlflow" else "train/"
    # Accelerate's tracker has the figures of tensorboard in the same loop, which keeps the receipt's own names.
    scalars = {name: rows[0][1] for name, rows in read_events(tmp_path / "loop").items()}
    assert set(scalars) > {"memory/max_active(GiB)", "time_metrics/end_to_end(s)", "communication/all_reduce(GiB)"}
    assert {name: steps.get(10) for name, steps in by_loop.items()} == pytest.approx(rename_figures(scalars), rel=1e-5)
    # The Trainer's has the figures and the losses of the program.
    receipts = [read_receipt(str(tmp_path / name)) for name in ("loop", "logged")]
    assert [receipt.failures for receipt in receipts] == [(), ()]
    memory = receipts[1].memory
    assert memory is not None
    for name, value in rename_figures({"memory/max_active(GiB)": memory.total_bytes / 2**30}).items():
        assert by_trainer[prefix + name] == {10: pytest.approx(value)}
    assert set(by_trainer[f"{prefix}loss"]) == {5, 10}
    assert {prefix + name for name in rename_figures(list_figures(receipts[1])) if "ranks/" not in name} <= set(
        by_trainer
    )
