from __future__ import annotations

from pathlib import Path
from typing import Any

import grimp
import pandas as pd
import pytest
import yaml

from study.config import places, strategies
from study.config.places import REPOSITORY
from study.host import environment
from study.records.fairness import baseline_arm
from study.records.frames import read_records
from study.report.questions import TABLES
from synthetic_records import with_steps, write_run


def labels(root: Path, column: str = "confounded") -> dict[str, str]:
    records = read_records(root)
    assert records.refused == ()
    return dict(zip(records.runs["run"], records.runs[column], strict=True))


def write(root: Path, *strategies: str, **more: Any) -> None:
    for strategy in strategies:
        write_run(root, strategy, name=strategy, **more)


BROKEN = yaml.safe_load((REPOSITORY / "tests" / "data" / "unfair_runs.yaml").read_text())


@pytest.mark.parametrize("invariant", BROKEN)
def test_a_broken_invariant_is_named_for_that_run_alone(invariant: str, tmp_path: Path) -> None:
    label, change = BROKEN[invariant]
    scale, factor = (change.get(name, 1) for name in ("scale_first", "lr_factor"))
    broken = {key: value for key, value in change.items() if key not in ("scale_first", "lr_factor")}
    data = {"data": {"tokens_sha256": {"train": "a", "eval": "b"}}} if invariant == "evaluation tokens" else {}
    write(tmp_path, "single", "ddp", "zero2", engine=data)
    path = write_run(tmp_path, "zero3", name="zero3", **broken)
    with_steps(
        path,
        lambda row: (
            row
            | {
                "loss": row["loss"] * scale,
                "lr": row["lr"] * (factor if row["step"] > 1 else 1),
            }
        ),
    )
    by_strategy = labels(tmp_path)
    assert label in by_strategy.pop("zero3")
    assert set(by_strategy.values()) == {""}
    for name in ("summary", "loss", "memory", "runtime", "single_vs_multi") if invariant == "clipping" else ():
        table = TABLES[name](read_records(tmp_path))
        rows = table[table["Strategy"].str.startswith("zero3")]
        assert len(rows) == 1, f"{name} has {len(rows)} rows"
        assert label in rows["Comparable"].iloc[0]
        assert (table[~table["Strategy"].str.startswith("zero3")]["Comparable"] == "yes").all()


def test_a_strategy_without_a_successful_run_is_not_comparable(tmp_path: Path) -> None:
    write(tmp_path, "single", "ddp")
    write_run(tmp_path, "ddp", name="again", repeat=2, state="timeout")
    write_run(tmp_path, "zero3", name="oom", state="oom", reason="out of memory")
    write_run(tmp_path, "zero2", name="other", state="oom", config={"max_grad_norm": 0.5})
    table = TABLES["summary"](read_records(tmp_path))
    comparable = {name.split(",")[0]: value for name, value in zip(table["Strategy"], table["Comparable"], strict=True)}
    assert pd.isna(comparable.pop("zero3"))
    assert comparable == {"single": "yes", "ddp": "yes", "zero2": "clipping: 0.5, baseline 1"}


OTHER_CODE = yaml.safe_load((REPOSITORY / "tests" / "data" / "other_code.yaml").read_text())


def test_the_code_that_trains_has_a_digest_and_reports_are_not_in_it(tmp_path, monkeypatch):
    for name, folder in {"PACKAGE": "study", "REPOSITORY": "", "IMPORT_ROOT": ""}.items():
        monkeypatch.setattr(places, name, tmp_path / folder)
    monkeypatch.setattr(strategies, "STRATEGY_DIRECTORY", tmp_path / "accelerate_configs")
    digests = []
    for place in (
        "nothing",
        "study/train.py",
        "study/engine/setup.py",
        "accelerate_configs/deepspeed/zero3.json",
        "study/advisor/explain.py",
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("a change")
        digests.append(environment.code_sha256())
    assert len({*digests[:4]}) == 4
    assert digests[4] == digests[3]


def test_the_digest_is_of_the_rooms_that_a_run_imports() -> None:
    graph = grimp.build_graph("study", cache_dir=None)
    trainers = ("study.train", "study.experiments.baselines.hf_trainer", "study.experiments.baselines.bare_loop")
    modules = {module for trainer in trainers for module in (trainer, *graph.find_upstream_modules(trainer))}
    rooms_of_a_run = {module.split(".")[1] for module in modules - {"study"}}
    rooms = {room.split(".")[1] for room in graph.find_children("study")}
    assert {name.removesuffix(".py") for name in environment._NOT_RUN} == rooms - rooms_of_a_run


@pytest.mark.parametrize("case", OTHER_CODE)
def test_times_of_other_code_are_confounded_and_losses_are_not(case: str, tmp_path: Path) -> None:
    label, baseline, changed = OTHER_CODE[case]
    write_run(tmp_path, "single", name="single", environment=baseline)
    write_run(tmp_path, "zero3", name="zero3", environment=changed)
    assert labels(tmp_path) == {"single": "", "zero3": label}
    assert set(labels(tmp_path, "confounded_loss").values()) == {""}
    assert TABLES["runtime"](read_records(tmp_path))["Comparable"].tolist() == ["yes", label or "yes"]


def test_more_machines_than_the_baseline_s_confound_times(tmp_path: Path) -> None:
    write(tmp_path, "ddp")
    machine = {"cpu": "Synthetic processor", "devices": [{"name": "Synthetic GPU"}]}
    write(tmp_path, "zero2", environment={"other_machines": [machine]})
    assert labels(tmp_path) == {"ddp": "", "zero2": "machines: 2, baseline 1"}


def test_without_plain_training_the_first_strategy_is_the_baseline(tmp_path: Path) -> None:
    strategies = ("zero3", "zero3_cpu", "zero3_nvme")
    write(tmp_path, *strategies)
    assert labels(tmp_path, "baseline") == dict.fromkeys(strategies, "zero3")
    # Only plain training is called the baseline.
    assert TABLES["runtime"](read_records(tmp_path))["In words"].iloc[0] == "reference"
    write(tmp_path, "ddp")
    assert TABLES["runtime"](read_records(tmp_path))["In words"].iloc[0] == "baseline"


def test_a_baseline_that_failed_is_none(tmp_path: Path) -> None:
    write(tmp_path, "single", state="oom", reason="out of memory")
    write(tmp_path, "ddp")
    assert labels(tmp_path, "baseline") == {"single": "ddp", "ddp": "ddp"}
    write_run(tmp_path / "other", "zero3", state="oom", config={"task": "bert-imdb"})
    records = read_records(tmp_path)
    assert baseline_arm(records.runs[records.runs["task"] == "bert-imdb"]) is None
    table = TABLES["summary"](records)
    bert_labels = table[table["Workload"].str.startswith("bert")]["Comparable"].tolist()
    assert bert_labels == ["no baseline: no run of this workload ended ok"]
