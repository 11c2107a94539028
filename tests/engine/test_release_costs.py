"""Costs of a step, measured with the installed release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from study import cli
from study.compositions.features import Combination, make_combination
from study.compositions.session import RankServer
from study.config.errors import UserError
from study.releases import costs
from study.releases.costs import changed_figures, measure_costs, read_costs, select_table

pytestmark = pytest.mark.usefixtures("one_server", "each_measured_once")
TABLE = read_costs()
NEWEST = TABLE.names[-1]
COMPARED = ("zero1", "zero3,accumulation", "zero3,zero_init", "fsdp2,accelerate", "fsdp2,accelerate,bf16,lora")


@pytest.fixture(scope="module")
def each_measured_once() -> Iterator[None]:
    """Give a combination that an earlier test has measured the answers of then: DDP is the unit of every test.

    No test here judges the time of a step, so that one step is timed, and only the peaks of combinations that are
    compared with stored ones are measured repeatedly.
    """
    measure, answers = costs._ask_repeatedly, dict[Combination, list[dict[str, Any]]]()

    def ask(combination: Combination, server: RankServer) -> list[dict[str, Any]]:
        if combination not in answers:
            with pytest.MonkeyPatch.context() as once:
                if combination.name not in COMPARED:
                    once.setattr(costs, "_REPEATS", 1)
                answers[combination] = measure(combination, server)
        return answers[combination]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "_ask_repeatedly", ask)
        patch.setattr(costs, "_TIMED_STEPS", 1)
        yield


def test_the_installed_release_costs_what_is_stored() -> None:
    measured = measure_costs([make_combination(name.split(",")) for name in COMPARED])
    for name, installed in measured.items():
        table = select_table(make_combination(name.split(",")))
        stored = table.releases[table.names[-1]][name]
        assert not set(changed_figures(stored, installed)) - {"host_time"}, (name, installed)


def test_a_unit_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("study.releases.costs._UNIT", "zero3,muon,no_reduce_scatter,optimizer_cpu")
    with pytest.raises(UserError, match="the unit of host time"):
        measure_costs([make_combination(["zero1"])])


def test_an_engine_that_refuses_says_so() -> None:
    measured = measure_costs([make_combination(["zero3", "muon", "no_reduce_scatter", "optimizer_cpu"])])
    (failed,) = measured.values()
    assert not failed.is_measured
    assert failed.says


def test_a_measurement_is_printed_beside_the_stored_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["releases", "costs", "--measure", "--features", "zero2"]) == 0
    rows = capsys.readouterr().out
    assert "here" in rows
    assert NEWEST in rows
