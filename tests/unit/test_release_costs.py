"""Costs of a step under each release: the stored table, its changes and their causes."""

from __future__ import annotations

import argparse
import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from engines import run_without_torch
from study import cli
from study.compositions.features import Combination, make_combination
from study.config.errors import UserError
from study.host.stacks import release_key, stacks
from study.releases.costs import (
    COSTS,
    CombinationCost,
    CostTable,
    changed_figures,
    find_changes,
    group_changes,
    history,
    later_changes,
    overview,
    read_cost_causes,
    read_costs,
    read_list,
    run,
    select_table,
)
from tools import release_costs

TABLE = read_costs()
NEWEST = TABLE.names[-1]


def options(**fields: Any) -> argparse.Namespace:
    return argparse.Namespace(release="costs", strategy=None, measure=False, json=False, **fields)


def make_table(**costs: CombinationCost) -> CostTable:
    return CostTable({}, {f"0.1.{place}": {"zero3": cost} for place, cost in enumerate(costs.values())})


def cost(**fields: Any) -> CombinationCost:
    measured = CombinationCost(
        "measured",
        parameters=100,
        state_bytes=1600,
        peak_parts={"activations": 2000},
        sent_bytes=400,
        collectives={"all_gather": 2},
        host_time=2.0,
    )
    return dataclasses.replace(measured, **fields)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "costs.json")
    assert CostTable.read(tmp_path / "costs.json") == TABLE


@pytest.mark.parametrize("package", COSTS)
def test_every_release_has_every_combination(package: str) -> None:
    names = [make_combination(name.split(",")).name for name in read_list(package)]
    assert all(list(costs) == names for costs in read_costs(package).releases.values())


@pytest.mark.parametrize("package", COSTS)
def test_a_combination_is_looked_up_in_the_table_that_has_it(package: str) -> None:
    for name in read_list(package):
        assert select_table(make_combination(name.split(","))).package == package


def test_a_model_of_zero_init_kept_no_gathered_weights() -> None:
    """Rows of zero3 had been stored under this name: they had that change."""
    neighbours = ("0.19.2", "0.19.5")
    changes = [change for change in find_changes(TABLE) if (change.before, change.release) == neighbours]
    peaks = {change.combination.name for change in changes if change.figure == "peak"}
    assert "zero3" in peaks
    assert not {name for name in peaks if "zero_init" in name}
    sent = {change.combination.name for change in changes if change.figure == "sent"}
    assert {"zero3,accumulation", "zero3,accumulation,zero_init"} <= sent


@pytest.mark.parametrize(
    ("fields", "figures"),
    [
        ({}, []),
        ({"sent_bytes": 402}, ["sent"]),
        ({"peak_parts": {"activations": 2100}}, []),
        ({"peak_parts": {"activations": 2300}}, ["peak"]),
        ({"collectives": {"all_gather": 3}}, ["collectives"]),
        ({"host_time": 3.5}, []),
        ({"host_time": 4.2, "state_bytes": 1700}, ["state", "host_time"]),
    ],
)
def test_a_change_is_more_than_repeated_measurements_differ(fields: dict[str, Any], figures: list[str]) -> None:
    later = dataclasses.replace(cost(), **fields)
    changes = list(find_changes(make_table(old=cost(), new=later)))
    assert [change.figure for change in changes] == figures


def test_peaks_at_different_moments_are_compared_by_the_heap() -> None:
    later = cost(peak_moment="in the optimizer step", peak_parts={"activations": 3000}, peak_bytes=3000)
    assert changed_figures(cost(peak_bytes=2800), later) == []
    assert changed_figures(cost(peak_bytes=2000), later) == ["peak"]


def test_a_release_that_fails_is_no_change() -> None:
    failed = CombinationCost("crashes", "RuntimeError: no")
    assert not list(find_changes(make_table(old=cost(), failed=failed, new=cost(sent_bytes=800))))


def test_every_change_has_a_cause_and_every_cause_a_change() -> None:
    changes = [change for package in COSTS for change in find_changes(read_costs(package))]
    assert not [change for change in changes if change.cause is None]
    assert {change.cause for change in changes} == set(read_cost_causes())


def test_adapters_on_16_bits_need_no_more_under_fsdp2_since_accelerate_upcasts_trained_weights_alone() -> None:
    # https://github.com/huggingface/accelerate/issues/3844, mended in 1.13.0.
    table = read_costs("accelerate")
    larger = {}
    for release, costs in table.releases.items():
        fsdp1, fsdp2 = (costs[f"{engine},accelerate,bf16,lora"] for engine in ("fsdp1", "fsdp2"))
        larger[release] = "state" in changed_figures(fsdp1, fsdp2)
        # A rank has half of the frozen weights, with two bytes more each.
        assert fsdp2.figure("state") - fsdp1.figure("state") == pytest.approx(1.0 * larger[release], abs=0.02)
        in_fp32 = [costs[f"{engine},accelerate,autocast,lora"] for engine in ("fsdp1", "fsdp2")]
        assert "state" not in changed_figures(*in_fp32)
    assert larger == {release: release_key(release) < release_key("1.13.0") for release in table.releases}
    (change,) = (
        change
        for change in find_changes(table)
        if change.combination.name == "fsdp2,accelerate,bf16,lora" and change.figure == "state"
    )
    assert change.cause is not None
    assert change.cause.change.endswith("/pull/3848")


def test_the_page_of_a_combination_has_its_change_and_the_cause() -> None:
    name = "zero3,accumulation"
    text = "\n".join(str(part) for part in history(TABLE, make_combination(name.split(","))))
    (change,) = group_changes(
        change for change in find_changes(TABLE) if change.combination.name == name and change.figure == "sent"
    )
    assert change.reason in text
    assert "sent 20.2 to 21.6" in change.text


def test_the_overview_has_every_combination_of_the_newest_release() -> None:
    text = "\n".join(str(part) for part in overview(TABLE))
    assert all(name in text for name in TABLE.releases[NEWEST])


def test_a_release_names_what_a_step_costs_in_later_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["releases", "0.18.9", "zero3"]) == 0
    out = capsys.readouterr().out
    assert "in later releases a step from 0.19.2 to 0.19.5: peak -12% to -9%: linear layers" in out
    assert (
        "in later releases a step from 0.19.2 to 0.19.5: sent 20.2 to 21.6, collectives 126 to 121: weights that" in out
    )
    assert later_changes(TABLE, "0.19.5", "zero3", "fp32") == []
    (in_bf16,) = later_changes(TABLE, "0.19.2", "zero1", "bf16")
    assert "overflow" in in_bf16


def test_a_combination_without_figures_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options(features=make_combination(["zero1", "tied", "schedule"]))) == 3
    assert "study releases costs --measure --features zero1,tied,schedule" in capsys.readouterr().out


def test_a_strategy_is_refused() -> None:
    with pytest.raises(UserError, match="costs takes no 'zero3'"):
        run(argparse.Namespace(release="costs", strategy="zero3", measure=False))


def test_the_document_of_costs_has_the_figures_and_their_changes(capsys: pytest.CaptureFixture[str]) -> None:
    zero3 = make_combination(["zero3"])
    request = argparse.Namespace(**vars(options(features=zero3)) | {"json": True})
    assert run(request) == 0
    document = json.loads(capsys.readouterr().out)
    stored = {release: costs["zero3"] for release, costs in TABLE.releases.items() if "zero3" in costs}
    assert document["releases"] == {release: {"zero3": cost.document()} for release, cost in stored.items()}
    changes = [change for change in find_changes(TABLE) if change.combination == zero3]
    printed = [(change["figure"], change["release"], change["new"]) for change in document["changes"]]
    assert printed == [(change.figure, change.release, change.new) for change in changes]


def test_no_torch_is_imported_for_stored_costs() -> None:
    result = run_without_torch("releases", "costs")
    assert f"deepspeed {NEWEST}" in result.stdout


def test_the_tool_measures_what_a_file_lacks_and_keeps_the_order_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, requested = tmp_path / "costs.json", list[str]()
    CostTable({}, {"1.0.0": {"zero3,accumulation,lora": cost(sent_bytes=1)}}, "accelerate").write(file)

    def measure(combinations: list[Combination], **_: Any) -> dict[str, CombinationCost]:
        requested.extend(combination.name for combination in combinations)
        return {combination.name: cost() for combination in combinations}

    monkeypatch.setitem(COSTS, "accelerate", file)
    monkeypatch.setattr(release_costs, "install", lambda _: set())
    monkeypatch.setattr(release_costs, "measure_costs", measure)
    # Of the second one this is not the usual name.
    monkeypatch.setattr(release_costs, "read_list", lambda _: ["zero3", "zero3,lora,accumulation", "ddp"])
    assert release_costs.main(["accelerate", "--releases", "1.0.0"]) == 0
    assert requested == ["zero3", "ddp"]
    measured = CostTable.read(file).releases["1.0.0"]
    assert list(measured) == ["zero3", "zero3,accumulation,lora", "ddp"]
    assert measured["zero3,accumulation,lora"].sent_bytes == 1


def test_a_release_is_a_layer_unless_it_is_the_installed_one() -> None:
    installed = version("accelerate")
    assert release_costs._choose_stack("accelerate", installed).layers == []
    assert release_costs._choose_stack("accelerate", "1.10.1").layers == ["accelerate-1.10.1"]
    assert release_costs._choose_stack("deepspeed", "0.19.5") == stacks()["0.19.5"]
