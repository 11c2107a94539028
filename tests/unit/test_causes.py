"""Each cause of a divergence has a proof, and together they explain all divergences in the control and nothing else."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
import pytest
import transformers
from packaging.specifiers import SpecifierSet

from study.cli import main
from study.config.places import REPOSITORY
from study.config.strategies import STRATEGY_NAMES
from study.releases.causes import Cause, least_sound_release, read_causes, unsound_releases
from study.releases.races import read_races
from study.report.pages.releases import is_right, read_control

REPORT = REPOSITORY / "reports" / "releases"
# No cause describes several backward passes per micro-batch: study/report/pages/releases.py does.
# A release that cannot be imported has no case.
CONTROL = [row for row in read_control() if "caller" in row]
ROWS = [row for row in CONTROL if "-" not in row["caller"]]
PROOF_ROWS = json.loads((REPORT / "proofs.json").read_text(encoding="utf-8"))
EVERY = {cause.id: cause for cause in read_causes()}
# For causes that end a run, the rows of the control have only an error.
CAUSES = {name: cause for name, cause in EVERY.items() if set(cause.differs) != {"crash"}}
# The control trains with AdamW.
IN_CONTROL = {name: cause for name, cause in CAUSES.items() if cause.optimizer == "adamw"}


def visible_causes(row: Mapping[str, Any]) -> list[Cause]:
    """Return the causes that must show in a row of the control, without the race, which may show."""
    precision = {"fp32": "fp32"}.get(row["precision"], "bf16-engine")
    candidates = [
        cause
        for cause in IN_CONTROL.values()
        if cause.is_in(row) and cause.shows_in(row["strategy"], row["accumulation"], precision) and not cause.sometimes
    ]
    is_visible = {
        # AdamW hides a scale, and stage 0 reports no norm, which would show it.
        "divided-twice": row["loss"] == "inside" and bool(row["clipping"] or row.get("norm")),
        "unscaled-in-no-sync": row["caller"] == "accelerate",
        "offload-drops-micro-steps": row["accumulation"] > 2,
    }
    return [cause for cause in candidates if is_visible.get(cause.id, True)]


def test_a_race_of_gpu_streams_ends_with_its_fix_and_is_named_where_a_release_or_a_file_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for race in read_races():
        assert race.releases["deepspeed"] == f"<{race.fix.release}"
        assert set(race.strategies) <= set(STRATEGY_NAMES)
        assert "/pull/" in race.fix.change
    assert main(["releases", "0.18.0", "zero3"]) == 0
    page = capsys.readouterr().out
    assert "no fault found on CPU ranks, and a race on GPUs below" in page.splitlines()[0]
    assert "(torch >=2.10; fixed in 0.18.8 by deepspeedai/DeepSpeed#7898)" in page
    assert main(["releases", "0.18.0", "zero3", "--json"]) == 0
    (race,) = json.loads(capsys.readouterr().out)["races"]
    assert (race["fixed_in"], race["releases"]["torch"]) == ("0.18.8", ">=2.10")
    # With an older torch and with a newer DeepSpeed there is none.
    for words in (["0.18.0", "zero3", "--torch", "2.6.0"], ["0.19.8", "zero2"]):
        main(["releases", *words])
        assert "on GPUs" not in capsys.readouterr().out
    file = tmp_path / "ds.json"
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    for overlaps, says in (
        (True, "on GPUs releases before 0.19.0 (0.19.3 with torch.compile) may compute NaN with it"),
        (False, ""),
    ):
        file.write_text(json.dumps(settings | {"zero_optimization": {"stage": 2, "overlap_comm": overlaps}}))
        assert main(["explain", str(file), "gpt2", "--hardware", "8xH100"]) == 0
        page = capsys.readouterr().out
        assert says in page
        assert ("on GPUs" in page) == overlaps


def test_releases_name_the_loops_that_have_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    main(["releases", "0.17.5", "zero1"])
    page = capsys.readouterr().out
    assert f"c: {EVERY['unscaled-in-no-sync'].title}, in Accelerate's loop; in transformers' Trainer only" in page
    assert "\ntested in Accelerate's loop, with AdamW" in page
    main(["releases", "0.19.5", "zero1", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["causes"]["a"]["loops"] == ["accelerate", "engine"]
    for cause in EVERY.values():
        # A fault of Accelerate's alone is in no loop of DeepSpeed's own.
        assert ("engine" in cause.loops) == (cause.blame == "engine"), cause.id
        assert ("trainer" in cause.loops) != bool(cause.trainer_before), cause.id
    # The Trainer of that release enters no no_sync under DeepSpeed, and divides the loss itself.
    source = inspect.getsource(transformers.Trainer)
    assert 'kwargs["scale_wrt_gas"] = False' in source
    assert "self.accelerator.accumulate(" not in source
    assert least_sound_release("zero2", 4, "fp32") == "0.19.6"
    assert least_sound_release("zero2", 4, "fp32", "trainer") == "0.18.4"
    assert unsound_releases("zero1", 4, "fp32", "trainer") == "0.18.3 to before 0.18.4"
    assert unsound_releases("zero2_cpu", 4, "fp32", "trainer") == "0.15.2 to before 0.19.0"


@pytest.mark.parametrize(("release", "is_wrong"), [("0.17.5", True), ("0.18.2", True), ("0.18.3", False)])
def test_stale_weights_of_hpz_are_named_before_the_release_that_mends_them(
    release: str, is_wrong: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both commands passed them."""
    for words in (["zero3_hpz"], ["--features", "zero3,hpz"]):
        packages = ["--accelerate", "1.15.0", "--torch", "2.13.0"]
        assert main(["releases", release, *words, *packages]) == (1 if is_wrong else 3)
        page = capsys.readouterr().out
        assert ("the first loss with hpZ, and the first after a checkpoint, is too large" in page) == is_wrong
        assert ("mended in deepspeed 0.18.3" in page) == is_wrong
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "zero_hpz_partition_size": 4, "stage3_gather_16bit_weights_on_model_save": True}
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    file.write_text(json.dumps(settings))
    for package in ("deepspeed", "accelerate"):
        status = main(["explain", "--strict", str(file), "--release", f"{package}={release}"])
        # A release of another package leaves the installed DeepSpeed.
        shows = is_wrong and package == "deepspeed"
        assert ("DeepSpeed/issues/7606" in capsys.readouterr().out, status == 3) == (shows, shows)


def test_the_file_has_valid_values_and_the_control_both_sides_of_a_cause_and_the_installed_release() -> None:
    for cause in EVERY.values():
        pydantic.TypeAdapter(Cause).validate_python(dataclasses.asdict(cause))
        assert set(cause.strategies) <= set(STRATEGY_NAMES), cause.id
        for specifier in cause.releases.values():
            SpecifierSet(specifier)
    assert len(EVERY) == len(read_causes()), "an id is there twice"
    assert {row["cause"] for row in PROOF_ROWS} == set(EVERY)
    assert {"0.17.6", "0.18.6", "0.19.0", "0.19.6"} <= {row["deepspeed"] for row in ROWS}
    assert any(row["stack"] == "installed" for row in ROWS)


@pytest.mark.parametrize("release", sorted({row["deepspeed"] for row in ROWS}))
def test_a_row_of_the_control_is_wrong_exactly_if_a_cause_applies(release: str) -> None:
    rows = [
        row
        for row in ROWS
        if row["deepspeed"] == release and row["strategy"] != "zero1_cpu" and row["precision"] == "fp32"
    ]
    unexplained = [row for row in rows if is_right(row) is False and not visible_causes(row)]
    unseen = [row for row in rows if is_right(row) and visible_causes(row)]
    assert (unexplained, unseen) == ([], [])


@pytest.mark.parametrize("name", sorted(IN_CONTROL))
def test_a_cause_shows_in_the_control(name: str) -> None:
    cause = CAUSES[name]
    rows = [row for row in ROWS if cause.is_in(row) and row["strategy"] in cause.strategies]
    if cause.sometimes:
        assert any(row.get("readings_apart") for row in rows)
    else:
        assert any(is_right(row) is False and cause in visible_causes(row) for row in rows)
    # DeepSpeed alone does not have the fault of a pairing.
    if cause.blame == "pairing":
        assert all(is_right(row) for row in rows if row["caller"] == "bare" and row["precision"] == "fp32")


@pytest.mark.parametrize("name", sorted(EVERY))
def test_without_its_lines_a_cause_is_gone(name: str) -> None:
    rows = [row for row in PROOF_ROWS if row["cause"] == name]
    as_released, edited = ([row for row in rows if row["is_edited"] == value] for value in (False, True))
    if EVERY[name].sometimes:
        assert sum(row["readings_apart"] for row in as_released) > 0
        assert [row["readings_apart"] for row in edited] == [0] * len(as_released)
    else:
        assert [is_right(row) for row in as_released] == [False if name in CAUSES else None]
        assert [is_right(row) for row in edited] == [True]


def test_a_neighbour_that_did_not_run_proves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    # 0.14.0 does not run with the packages of the test.
    for release, is_between in (("0.14.4", False), ("0.17.3", True)):
        packages = ["--accelerate", "1.15.0", "--torch", "2.13.0"]
        assert main(["releases", release, "zero3", *packages]) == 3
        assert ("on either side were, without a fault" in capsys.readouterr().out) == is_between
