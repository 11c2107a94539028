"""Each feature of features.yaml changes the calls into an engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from study.compositions.answers import read_matrices
from study.compositions.features import Combination, make_combination, read_rows
from study.compositions.session import RankServer

pytestmark = pytest.mark.usefixtures("one_server")
# By family; the first one that a feature can be combined with is run.
ENGINES = {"deepspeed": ("zero3", "zero2", "zero1", "zero0"), "torch": ("fsdp2", "fsdp1", "ddp", "hsdp")}
# Without these some features conflict with a default.
COMPANIONS = ((), ("cpu_adam",), ("cpu_adam", "optimizer_cpu"), ("no_reduce_scatter",))
# Features whose ranks end before they can write their calls.
CRASHES = [
    set(combination.features)
    for combination, outcome in next(read_matrices()).findings.items()
    if outcome.kind == "crashes"
]
# Accelerate has one setting, mixed_precision, for both.
ALIKE = {("precision", "accelerate", "torch"): ["fsdp2,accelerate,autocast = fsdp2,accelerate,bf16"]}
# Whether a rank has the calls of the others depends on which of them fails first.
Calls = dict[str, dict[str, int]]


class CallServer(RankServer):
    """Records the calls into engines, each combination once."""

    def __init__(self) -> None:
        super().__init__("tests.probes.engine_calls")
        self._recorded = dict[Combination, Calls]()

    def record(self, combination: Combination) -> Calls:
        if combination not in self._recorded:
            self._recorded[combination] = self.repeat_record(combination)
        return self._recorded[combination]

    def repeat_record(self, combination: Combination) -> Calls:
        calls: Calls = self.ask({"features": list(combination.features)})["calls"]
        assert calls, combination.name
        return calls


@pytest.fixture(scope="module")
def server(one_server: None) -> Iterator[CallServer]:
    with CallServer() as running:
        yield running


def choose_combinations(row: str, loop: str, family: str) -> list[Combination]:
    """Return one combination for each level of a row but its default, if an engine of the family takes it."""
    chosen: list[Combination] = []
    for level in list(read_rows()[row].levels)[1:]:
        tried = [
            make_combination([engine, loop, level, *companions])
            for companions in COMPANIONS
            for engine in ENGINES[family]
            if row not in {_find_row(companion) for companion in companions}
        ]
        allowed = (run for run in tried if run.conflict is None and run.replaced(row).conflict is None)
        allowed = (run for run in allowed if not any(crash <= run.levels for crash in CRASHES))
        chosen += itertools.islice(allowed, 1)
    return chosen


def _find_row(level: str) -> str:
    return next(row.name for row in read_rows().values() if level in row.levels)


def differ(first: Calls, second: Calls) -> bool:
    """Whether a rank that both recorded made other calls, or the same with other arguments."""
    shared = first.keys() & second.keys()
    assert shared
    return any(first[rank] != second[rank] for rank in shared)


ROWS = [name for name in read_rows() if name not in ("engine", "loop")]
CASES = [(row, loop, family) for row in ROWS for loop in ("own_loop", "accelerate") for family in ENGINES]
CHOSEN = {case: runs for case in CASES if (runs := choose_combinations(*case))}


def find_idle_features(server: CallServer, row: str, combinations: list[Combination]) -> list[str]:
    """Return the combinations in which an engine gets the same with another level of a row, or without one."""
    runs = {*combinations, *(combination.replaced(row) for combination in combinations)}
    return [
        f"{first.name} = {second.name}"
        for first, second in itertools.combinations(sorted(runs, key=lambda run: run.name), 2)
        if first.replaced(row) == second.replaced(row) and not differ(server.record(first), server.record(second))
    ]


# Nine minutes; a feature without any code is found by test_the_code_of_a_run_reads_every_feature in a second.
@pytest.mark.long
@pytest.mark.parametrize(("row", "loop", "family"), CHOSEN)
def test_each_feature_changes_what_the_engine_gets(server: CallServer, row: str, loop: str, family: str) -> None:
    assert find_idle_features(server, row, CHOSEN[row, loop, family]) == ALIKE.get((row, loop, family), [])


def test_every_feature_is_compared() -> None:
    compared = {run.level(row) for (row, _, _), runs in CHOSEN.items() for run in runs}
    assert compared == {level for row in ROWS for level in list(read_rows()[row].levels)[1:]}


def test_each_engine_and_each_loop_changes_what_is_called(server: CallServer) -> None:
    names = [[engine] for engine in read_rows()["engine"].levels] + [["zero2", "accelerate"], ["fsdp2", "accelerate"]]
    for first, second in itertools.combinations(map(make_combination, names), 2):
        assert differ(server.record(first), server.record(second)), (first.name, second.name)


@pytest.mark.parametrize("features", ["zero3", "fsdp2,accelerate", "zero1,resume"])
def test_the_same_combination_has_the_same_calls(server: CallServer, features: str) -> None:
    combination = make_combination(features.split(","))
    assert not differ(server.record(combination), server.repeat_record(combination))


def test_a_feature_that_is_a_name_alone_is_found(server: CallServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop once had no code for zero_init."""
    alone = make_combination(["zero3", "zero_init"])
    monkeypatch.setitem(server._recorded, alone, server.repeat_record(make_combination(["zero3"])))
    assert find_idle_features(server, "zero", [alone]) == ["zero3 = zero3,zero_init"]


@pytest.mark.parametrize("loop", ["own_loop", "accelerate"])
def test_under_zero_init_deepspeed_gets_a_model_of_partitions_alone(server: CallServer, loop: str) -> None:
    plain, divided = (make_combination(["zero3", loop, level]) for level in ("zero_defaults", "zero_init"))
    for combination, partitions in ((plain, set[int]()), (divided, {53})):
        calls = server.record(combination)["calls-0"]
        # Accelerate calls `initialize` with the model that it gets.
        got = [call for call in calls if call.startswith(("initialize(", "Accelerator.prepare("))]
        models = [call.partition("OPTForCausalLM")[2] for call in got]
        # The model has 53 weights.
        assert {model.count("partition)") for model in models} - {0} == partitions
        assert models
