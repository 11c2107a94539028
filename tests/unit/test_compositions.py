"""Combinations of features: designs, differences, answers, and refused requests."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from engines import run_without_torch
from study.cli import main
from study.compositions.answers import (
    Evidence,
    KnownFinding,
    collect_evidence,
    faults_by_source,
    look_up_answer,
    match_known_finding,
    read_known_findings,
    read_matrices,
    read_other_matrices,
    stored_evidence,
    stored_matrices,
)
from study.compositions.changes import combinations_over_releases, combinations_to_repeat
from study.compositions.command import exit_status, locate_combinations, parse_features
from study.compositions.covering import Design, list_pairs, list_triples
from study.compositions.engines import check_partitions
from study.compositions.features import (
    Combination,
    combination_of_strategy,
    find_row,
    make_combination,
    rarity,
    read_chosen,
    read_common_groups,
    read_reports,
    read_rows,
    read_rules,
)
from study.compositions.forks import _described
from study.compositions.groups import ContextRing, make_group
from study.compositions.locate import first_difference, largest_share_of_limit, locate_differences
from study.compositions.matrix import Matrix
from study.compositions.reference import PlainReference, make_reference, reference_key
from study.compositions.session import CombinationOutcome
from study.compositions.tiny_model import make_batch, make_model
from study.compositions.trace import STAGES, FigureTrace, LocalGradients, Place, plain_name
from study.config.errors import UserError
from study.config.places import REPOSITORY
from study.config.strategies import STUDIED_STRATEGIES
from study.host.stacks import release_key
from study.receipt.document import CombinationFacts
from study.releases.causes import GRID, read_causes
from study.releases.combinations import judge_features
from study.releases.feature_answers import fill_releases, find_answer
from study.releases.judge import judge
from study.releases.judged_stack import PRECISIONS, JudgedStack
from study.report.pages import compositions
from tools.clean_runs import draw_equal_runs, plan_runs

REPLANTED = json.loads(compositions.RECALL.read_text(encoding="utf-8"))
CLEAN = json.loads(compositions.CLEAN_RUNS.read_text(encoding="utf-8"))
QUICK = json.loads(compositions.QUICK.read_text(encoding="utf-8"))


def test_a_combination_has_one_level_of_every_row() -> None:
    combination = make_combination(["accumulation", "zero2", "muon"])
    assert combination.features == ("zero2", "muon", "accumulation")
    assert len(combination.levels) == len(read_rows())
    assert (combination.stage, combination.micro_steps, combination.ranks) == (2, 4, 2)
    assert make_combination(["hsdp"]).ranks == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zero2,accumulatoin", "did you mean accumulation?"),
        ("muon", "the features lack an engine"),
        ("zero1,zero2", "exclude each other"),
        ("ddp,hpz", "cannot be combined"),
        ("zero2,no_sync", "DeepSpeed refuses no_sync"),
        ("", "the features lack an engine"),
    ],
)
def test_a_wrong_combination_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        parse_features(text)


def test_every_exclusion_has_a_reason_and_the_engine_s_line_is_in_its_source() -> None:
    rules = read_rules()
    assert all(rule.reason for rule in rules)
    # A comma that is not quoted would end a reason.
    listed = REPOSITORY / "study" / "compositions" / "features.yaml"
    entries = yaml.safe_load(listed.read_text(encoding="utf-8"))["never"]
    assert set().union(*entries) == {"if", "and", "unless", "reason", "line"}
    with_line = [rule for rule in rules if rule.line]
    assert len(with_line) >= 16
    for rule in with_line:
        file, text = rule.line
        package = importlib.util.find_spec(file.partition("/")[0])
        assert package is not None
        assert package.origin is not None
        source = (Path(package.origin).parent.parent / file).read_text(encoding="utf-8")
        assert text in source, rule.line


def test_each_limit_of_cpus_names_the_engine_s_line() -> None:
    stored = next(read_matrices())
    limits = [
        finding
        for finding in stored.findings.values()
        if (entry := match_known_finding(finding, stored.stack)) is not None and entry.verdict == "cpu"
    ]
    assert limits
    for finding in limits:
        file, _, number = finding.line.partition(":")
        assert file.startswith(("deepspeed/", "accelerate/", "torch/")), finding.combination.name
        assert number.isdecimal()


@pytest.mark.parametrize("features", ["lora,autotp", "tp", "cp", "muon,clipping", ""])
def test_features_without_an_engine_are_answered_with_a_combination_that_parses(features: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_features(features)
    engines, example = refusal.value.fix.removeprefix("add one of ").split(", such as --features ")
    assert set(features.split(",")) - {""} < set(example.split(","))
    assert all(parse_features(f"{engine},{features}") for engine in engines.split(", "))
    assert parse_features(example)


def test_a_design_covers_every_pair_that_can_meet_in_about_a_hundred_runs() -> None:
    design, runs = Design(), list[Combination]()
    while (combination := design.draw()) is not None:
        runs.append(combination)
        design.cover(combination)
    covered = set[frozenset[str]]().union(*map(list_pairs, runs))
    assert design.pairs <= covered
    assert len(design.pairs) > 1500
    assert len(runs) < 150
    assert all(combination.conflict is None for combination in runs)
    # The same design every time: a matrix can be resumed.
    assert Design().draw() == runs[0]


def test_a_design_per_engine_covers_every_pair_under_every_engine() -> None:
    levels = {"zero1", "zero2", "fsdp2", "muon", "cpu_adam", "optimizer_cpu", "bf16", "accelerate", "accumulation"}
    design, runs = Design(levels=levels, per_engine=True), list[Combination]()
    while (combination := design.draw()) is not None:
        runs.append(combination)
        design.cover(combination)
    covered = set[frozenset[str]]().union(*map(list_triples, runs))
    # What cannot be completed is no longer counted.
    assert design.pairs <= covered
    assert frozenset(("zero2", "muon", "bf16")) in covered
    assert frozenset(("fsdp2", "muon", "bf16")) not in covered
    assert len(runs) < 60


def test_a_design_leaves_out_what_was_found() -> None:
    design = Design()
    design.forbid(["zero2", "muon"])
    runs = []
    for _ in range(40):
        drawn = design.draw()
        if drawn is None:
            break
        design.cover(drawn)
        runs.append(drawn)
    assert runs
    assert not any(run.levels >= {"zero2", "muon"} for run in runs)


def test_names_of_wrapped_parameters_are_those_of_the_plain_model() -> None:
    name = "model.decoder.layers.1.fc1.weight"
    for prefix in ("module.", "_fsdp_wrapped_module.", "_forward_module.module.", "module.base_model.model."):
        assert plain_name(prefix + name) == name
    assert plain_name("model.decoder.layers.0._fsdp_wrapped_module.fc1.weight") == "model.decoder.layers.0.fc1.weight"


@pytest.fixture(scope="module")
def reference() -> PlainReference:
    return make_reference(make_combination(["zero2", "accumulation"]))


def test_the_reference_allows_little_where_a_gradient_is_not_zero(reference: PlainReference) -> None:
    allowed = {place: value for place, value in reference.allowed[0].items() if place.stage == "gradient"}
    # The bias of the keys has no gradient but rounding.
    first = [value for place, value in allowed.items() if place.step == 1 and "k_proj.bias" not in place.tensor]
    assert max(first) < 1e-4
    assert reference.allowed[0][Place(1, "gradient", "model.decoder.layers.0.self_attn.k_proj.bias")] > 0.1


def test_equal_figures_have_no_difference(reference: PlainReference) -> None:
    assert first_difference(reference.traces, reference) is None


def test_the_largest_difference_is_a_share_of_what_rounding_allows(reference: PlainReference) -> None:
    assert largest_share_of_limit(reference.traces, reference) == 0
    place = Place(1, "gradient", "model.decoder.layers.1.fc2.weight")
    value, allowed = reference.traces[0].figures[place], reference.allowed[0][place]
    for times in (0.5, 2):
        traces = changed(reference, place.stage, {place.tensor: value * (1 + times * allowed)})
        assert largest_share_of_limit(traces, reference) == pytest.approx(times, rel=1e-6)
        assert (first_difference(traces, reference) is None) == (times < 1)


def test_a_weight_is_allowed_less_than_a_sum() -> None:
    allowed = make_reference(make_combination(["zero3", "bf16"])).allowed[0]
    limits = {
        stage: [limit for place, limit in allowed.items() if place.stage == stage] for stage in ("weight", "loss")
    }
    half_ulp = 2**-9
    assert min(limits["loss"]) == 16 * half_ulp
    assert 4 * half_ulp <= min(limits["weight"]) < 10 * half_ulp


def test_another_seed_has_other_weights_and_other_samples(reference: PlainReference) -> None:
    combination = make_combination(["zero2", "accumulation"])
    traces = make_reference(combination, seed=1).traces
    weights, losses = Place(1, "weight", "model.decoder.layers.1.fc2.weight"), Place(1, "loss", "micro-batch 1")
    for place in (weights, losses):
        assert not np.allclose(traces[0].figures[place], reference.traces[0].figures[place], rtol=1e-3)
    batches = [make_batch(combination, 1, 0, 0, 2, seed=seed)["input_ids"] for seed in (0, 1)]
    assert not torch.equal(*batches)


def changed(reference: PlainReference, stage: str, change: dict[str, np.ndarray]) -> dict[int, FigureTrace]:
    traces = {rank: FigureTrace(dict(trace.figures)) for rank, trace in reference.traces.items()}
    for tensor, value in change.items():
        for trace in traces.values():
            trace.figures[Place(1, stage, tensor)] = value
    return traces


def gradients(reference: PlainReference) -> dict[str, np.ndarray]:
    figures = reference.traces[0].figures
    return {place.tensor: value for place, value in figures.items() if (place.step, place.stage) == (1, "gradient")}


def test_figures_are_read_as_they_were_written_in_one_array(reference: PlainReference, tmp_path: Path) -> None:
    file, trace = tmp_path / "trace.npz", reference.traces[0]
    trace.save(file)
    figures = FigureTrace.load(file).figures
    assert [*figures] == [*trace.figures]
    assert {value.ndim for value in figures.values()} >= {0, 1, 2}
    assert all(np.array_equal(figures[place], value) for place, value in trace.figures.items())
    with np.load(file) as saved:
        assert saved.files == ["shapes", "values"]


def test_a_gradient_of_a_quarter_is_named_with_its_factor(reference: PlainReference) -> None:
    mismatch = first_difference(
        changed(reference, "gradient", {name: value / 4 for name, value in gradients(reference).items()}), reference
    )
    assert mismatch is not None
    assert (mismatch.step, mismatch.stage) == (1, "gradient")
    assert mismatch.factor == pytest.approx(0.25, rel=1e-3)
    assert "0.25 times the reference" in mismatch.describe


def with_reduction_type(reference: PlainReference, half_ulp: float = 2.0**-24) -> dict[int, FigureTrace]:
    """Return the traces of an engine that is right."""
    traces = {rank: FigureTrace(dict(trace.figures)) for rank, trace in reference.traces.items()}
    for trace in traces.values():
        for step in (1, 2, 3):
            trace.figures[Place(step, "reduction rounding")] = np.array(half_ulp)
    return traces


def test_gradients_before_reduction_precede_those_after_it(reference: PlainReference) -> None:
    order = ["forward", "local gradient", "gradient", "norm", "update", "weight"]
    assert [stage for stage in STAGES if stage in order] == order
    combination = make_combination(["zero2", "accumulation"])
    assert locate_differences(with_reduction_type(reference), reference, combination) == []
    assert largest_share_of_limit(with_reduction_type(reference), reference, combination) < 1
    tensor = "model.decoder.layers.1.fc2.weight"
    # A backward pass that is wrong on rank 1, and a reduction that is right.
    traces = with_reduction_type(reference)
    wrong = 3 * traces[1].figures[Place(1, "local gradient", tensor)]
    traces[1].figures[Place(1, "local gradient", tensor)] = wrong
    mean = (traces[0].figures[Place(1, "local gradient", tensor)] + wrong) / 2
    for trace in traces.values():
        trace.figures[Place(1, "gradient", tensor)] = mean
    backward, *further = locate_differences(traces, reference, combination)
    assert (backward.stage, backward.rank, further) == ("local gradient", 1, [])
    assert backward.describe == f"step 1, local gradient of {tensor}: 3 times the reference"
    # The same gradients, reduced wrongly besides.
    for trace in traces.values():
        trace.figures[Place(1, "gradient", tensor)] = 2 * mean
    backward, reduction = locate_differences(traces, reference, combination)
    assert backward.stage == "local gradient"
    assert reduction.describe == f"step 1, gradient of {tensor}: 2 times the mean of the ranks' gradients"


def test_a_rounding_that_the_reduction_s_type_does_not_have_is_a_difference(reference: PlainReference) -> None:
    """Below the limit of the reference in 16 bits, and above that of fp32."""
    combination = make_combination(["zero2", "accumulation"])
    tensor = "model.decoder.layers.1.fc2.weight"
    for half_ulp, count in ((2.0**-24, 1), (2.0**-9, 0)):
        traces = with_reduction_type(reference, half_ulp)
        allowed = {rank: dict.fromkeys(by_place, 2.0 ** (-5)) for rank, by_place in reference.allowed.items()}
        for trace in traces.values():
            trace.figures[Place(1, "gradient", tensor)] = trace.figures[Place(1, "gradient", tensor)] * (1 + 2.0**-9)
        coarse = PlainReference(reference.traces, allowed, reference.shares)
        located = locate_differences(traces, coarse, combination)
        assert [(mismatch.stage, mismatch.tensor) for mismatch in located] == [("gradient", tensor)] * count


def test_a_frozen_weight_that_moves_is_found_besides_a_wrong_update() -> None:
    combination = make_combination(["zero1", "frozen"])
    reference = make_reference(combination)
    traces = with_reduction_type(reference)
    frozen, trained = "model.decoder.layers.0.fc1.weight", "model.decoder.layers.1.fc1.weight"
    for trace in traces.values():
        trace.figures[Place(1, "update", trained)] = 2 * trace.figures[Place(1, "update", trained)]
        # Less than rounding allows of a trained weight.
        trace.figures[Place(1, "weight", frozen)] = trace.figures[Place(1, "weight", frozen)] * (1 + 1e-7)
    first, besides = locate_differences(traces, reference, combination)
    assert (first.stage, first.tensor) == ("update", trained)
    assert besides.describe.startswith(f"step 1, weight of {frozen}: ")
    assert besides.basis == "the first weights"


def test_a_checkpoint_that_loses_weights_is_found_besides_a_wrong_update() -> None:
    combination = make_combination(["zero1", "resume"])
    reference = make_reference(combination)
    tensor = "model.decoder.layers.1.fc1.weight"
    for loaded, names in ((1.0, []), (1.5, ["resumed master"])):
        traces = with_reduction_type(reference)
        for trace in traces.values():
            trace.figures[Place(1, "update", tensor)] = 2 * trace.figures[Place(1, "update", tensor)]
            saved = trace.figures[Place(2, "weight", tensor)]
            trace.figures[Place(2, "saved master", tensor)] = saved
            trace.figures[Place(2, "resumed master", tensor)] = loaded * saved
        first, *besides = locate_differences(traces, reference, combination)
        assert first.stage == "update"
        assert [mismatch.stage for mismatch in besides] == names


@pytest.mark.parametrize("replaces_weights", [False, True])
def test_local_gradients_of_a_tied_weight_are_added_once_per_backward_pass(replaces_weights: bool) -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.Linear(2, 2, bias=False))
    model[2].weight = layer.weight
    gradients = LocalGradients(model, replaces_weights=replaces_weights)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    (sums,) = gradients.take().values()
    assert layer.weight.grad is not None
    assert torch.equal(sums, layer.weight.grad.double())
    assert gradients.take() == {}


def test_a_rank_whose_micro_batches_are_missing_is_named(reference: PlainReference) -> None:
    only_rank_0 = {
        name: np.sum([reference.shares[0, micro_step][name] for micro_step in range(4)], axis=0) / 8
        for name in gradients(reference)
    }
    mismatch = first_difference(changed(reference, "gradient", only_rank_0), reference)
    assert mismatch is not None
    assert mismatch.weights is not None
    assert np.allclose(mismatch.weights, [[1, 1, 1, 1], [0, 0, 0, 0]], atol=1e-3)
    assert "rank 1: " in mismatch.describe


def test_the_last_micro_batch_alone_is_named(reference: PlainReference) -> None:
    last = {name: (reference.shares[0, 3][name] + reference.shares[1, 3][name]) / 2 for name in gradients(reference)}
    mismatch = first_difference(changed(reference, "gradient", last), reference)
    assert mismatch is not None
    assert mismatch.weights is not None
    assert np.allclose(mismatch.weights, [[0, 0, 0, 4], [0, 0, 0, 4]], atol=1e-2)


def test_one_wrong_tensor_is_found_and_named(reference: PlainReference) -> None:
    tensor = "model.decoder.layers.1.fc2.weight"
    value = reference.traces[0].figures[Place(2, "update", tensor)]
    traces = {rank: FigureTrace(dict(trace.figures)) for rank, trace in reference.traces.items()}
    traces[1].figures[Place(2, "update", tensor)] = -value
    mismatch = first_difference(traces, reference)
    assert mismatch is not None
    assert (mismatch.step, mismatch.stage, mismatch.tensor, mismatch.rank) == (2, "update", tensor, 1)
    assert mismatch.factor == pytest.approx(-1)


def test_a_figure_that_is_not_finite_is_a_difference(reference: PlainReference) -> None:
    mismatch = first_difference(changed(reference, "norm", {"": np.array(np.nan)}), reference)
    assert mismatch is not None
    assert mismatch.stage == "norm"
    assert "not finite" in mismatch.describe


def test_a_transposed_figure_is_not_called_infinite(reference: PlainReference) -> None:
    name, value = next(
        (place.tensor, value)
        for place, value in reference.traces[0].figures.items()
        if place.stage == "update" and value.ndim == 2 and value.shape[0] != value.shape[1]
    )
    mismatch = first_difference(changed(reference, "update", {name: value.T}), reference)
    assert mismatch is not None
    assert mismatch.what == f"has the shape {value.T.shape}, the reference {value.shape}"


def test_what_changes_no_figure_shares_a_reference() -> None:
    plain = reference_key(make_combination(["zero2", "accumulation"]))
    for features in (["fsdp2", "no_sync"], ["zero3", "accumulation", "checkpointing", "evaluation", "hpz"]):
        assert reference_key(make_combination(features)) == plain
    for feature in ("clipping", "bf16", "sgd", "tied", "uneven", "lora"):
        assert reference_key(make_combination(["zero2", "accumulation", feature])) != plain


@pytest.mark.parametrize("feature", ["zero2,autotp", "fsdp2,tp", "zero3,ulysses", "fsdp2,cp"])
def test_two_ranks_of_a_group_have_the_samples_of_one_rank_without_groups(feature: str) -> None:
    combination = make_combination(feature.split(","))
    assert combination.ranks == 4
    assert [combination.data_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    plain = make_combination([combination.level("engine")])
    assert [plain.data_rank(rank) for rank in range(plain.ranks)] == [0, 1]
    assert reference_key(combination) == reference_key(plain)


def test_a_reference_has_the_trace_of_its_samples_for_every_rank_of_a_group(reference: PlainReference) -> None:
    expanded = reference.expand_ranks(make_combination(["zero3", "ulysses"]))
    assert [expanded.traces[rank] is reference.traces[rank // 2] for rank in range(4)] == [True] * 4
    assert reference.traces[0] is not reference.traces[1]
    assert first_difference(dict(expanded.traces), expanded) is None
    swapped = {**expanded.traces, 1: expanded.traces[2]}
    assert first_difference(swapped, expanded) is not None


def test_parts_of_a_ring_are_put_in_the_order_of_the_sequence() -> None:
    tokens = torch.arange(8).reshape(1, 8)
    quarters = tokens.chunk(4, dim=1)
    parts = [torch.cat([quarters[0], quarters[3]], 1), torch.cat([quarters[1], quarters[2]], 1)]
    ring = make_group(make_combination(["fsdp2", "cp"]), 0)
    assert isinstance(ring, ContextRing)
    assert torch.equal(torch.cat(ring.in_order(parts), 1), tokens)


def test_labels_of_a_divided_sequence_are_those_of_the_next_token_of_the_whole() -> None:
    tokens = torch.arange(16).reshape(2, 8)
    group = make_group(make_combination(["zero3", "ulysses"]), 1)
    with group.divided({"input_ids": tokens, "labels": tokens}) as inputs:
        assert inputs["input_ids"].tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]
        assert inputs["position_ids"].tolist() == [[4, 5, 6, 7]] * 2
        assert inputs["shift_labels"].tolist() == [[5, 6, 7, -100], [13, 14, 15, -100]]
        # Of 16 tokens 14 have a next one, and each of two ranks divides by half of these.
        assert float(inputs["num_items_in_batch"]) == 7


def outcome(features: str, kind: str = "equal") -> CombinationOutcome:
    return CombinationOutcome(make_combination(features.split(",")), kind, "", "", 1.0)


def test_the_answer_of_a_matrix() -> None:
    matrix = Matrix({"deepspeed": "0.0.1"})
    for run in (
        outcome("zero1,accumulation,clipping"),
        outcome("zero1,lora"),
        outcome("zero1,accumulation,tied"),
        outcome("zero1,clipping,tied"),
        outcome("zero1,resume", "differs"),
    ):
        matrix.outcomes[run.combination] = run
    matrix.findings[make_combination(["zero1", "resume"])] = outcome("zero1,resume", "differs")
    kinds = {
        features: look_up_answer(make_combination(features.split(",")), matrix).kind
        for features in (
            "zero1,accumulation,clipping",
            "zero1,accumulation",
            "zero1,accumulation,clipping,tied",
            "zero1,resume,lora",
            "zero1,lora,tied",
            "zero2",
        )
    }
    assert kinds == {
        "zero1,accumulation,clipping": "right",
        "zero1,accumulation": "right",
        "zero1,accumulation,clipping,tied": "pairs",
        "zero1,resume,lora": "wrong",
        "zero1,lora,tied": "untested",
        "zero2": "untested",
    }


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        (["equal"], 0),
        (["equal", "differs"], 1),
        (["crashes"], 1),
        (["hangs"], 1),
        (["refuses"], 3),
        (["equal", "refuses"], 3),
        (["no reference"], 3),
    ],
)
def test_the_exit_status_of_outcomes(kinds: list[str], status: int) -> None:
    assert exit_status([outcome("zero1", kind) for kind in kinds]) == status


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["zero1"], ["zero1,accelerate", "zero1,accelerate,accumulation"]),
        (
            ["fsdp2", "ddp"],
            ["fsdp2,accelerate", "fsdp2,accelerate,accumulation", "ddp,accelerate", "ddp,accelerate,accumulation"],
        ),
        (None, [f"zero{stage},accelerate{more}" for stage in (1, 2, 3) for more in ("", ",accumulation")]),
    ],
)
def test_locate_trains_each_engine_under_accelerate_with_and_without_accumulation(
    only: list[str] | None, names: list[str]
) -> None:
    combinations = locate_combinations(only)
    assert [combination.name for combination in combinations] == names
    assert all(combination.conflict is None for combination in combinations)


def test_locate_refuses_a_strategy_that_is_no_engine() -> None:
    with pytest.raises(UserError, match="--locate does not support zero2_cpu") as refusal:
        locate_combinations(["zero1", "zero2_cpu"])
    assert refusal.value.fix == f"use {', '.join(read_rows()['engine'].levels)}"


def test_every_finding_of_a_stored_matrix_is_explained_and_every_explanation_is_used() -> None:
    matrices = [*read_matrices(), *read_other_matrices()]
    findings = [(finding, matrix.stack) for matrix in matrices for finding in matrix.findings.values()]
    assert findings
    unexplained = [
        f"{stack['deepspeed']} {finding.combination.name}: {finding.says}"
        for finding, stack in findings
        if match_known_finding(finding, stack) is None
    ]
    assert not unexplained
    used = {match_known_finding(finding, stack) for finding, stack in findings}
    # The stored runs had a CPU with fp16.
    assert [entry.title for entry in read_known_findings() if entry not in used] == ["fp16"]


def test_the_features_of_known_findings_exist() -> None:
    for entry in read_known_findings():
        for level in itertools.chain(*entry.features, *entry.unless):
            assert find_row(level)


def test_a_finding_is_lifted_by_all_features_of_a_list() -> None:
    stack = next(read_matrices()).stack
    clipping = match_known_finding(outcome("zero2,muon,clipping", "differs"), stack)
    assert clipping is not None
    assert clipping.title.startswith("clipping judges by the norm of Muon")
    assert match_known_finding(outcome("zero2,muon,fp32_accumulation,clipping", "differs"), stack) == clipping
    assert match_known_finding(outcome("zero1,muon,fp32_accumulation,clipping", "differs"), stack) is None


def test_a_stored_matrix_covers_nearly_every_pair_that_is_not_a_finding() -> None:
    for matrix in read_matrices():
        assert matrix.pairs > 1300
        # The others are in findings alone: ZenFlow, for one, is right under stage 3 only, and Ulysses under one engine.
        assert len(matrix.open_pairs) < 0.07 * matrix.pairs
        assert matrix.triples > 4500
        assert len(matrix.open_triples) < 0.10 * matrix.triples
        features = set[str]().union(*(combination.features for combination in matrix.findings))
        engines = read_rows()["engine"].levels
        for levels in [*matrix.open_pairs, *matrix.open_triples]:
            assert (set(levels) - engines.keys()) & features, levels
        # Each run is of a combination that the features still allow.
        assert all(combination.conflict is None for combination in matrix.outcomes)
        assert set(read_chosen()) <= set(matrix.outcomes)


def test_the_code_of_a_run_reads_every_feature() -> None:
    """A feature in no line of these modules would be a name alone, as zero_init was."""
    read = set[object]()
    for module in ("engines", "tiny_model", "groups"):
        tree = ast.parse((REPOSITORY / "study" / "compositions" / f"{module}.py").read_text(encoding="utf-8"))
        read.update(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    levels = {level for row in read_rows().values() for level in list(row.levels)[1:]}
    # `Combination` has these, as micro_steps and stage.
    assert levels - read == {"accumulation", "zero0", "zero1", "zero2"}


def test_an_error_of_a_compiler_has_no_folder_of_the_machine() -> None:
    error = RuntimeError("Error building extension 'dc': [1/7] c++ -isystem /home/user/include/python3.11")
    assert _described(error)["says"] == "RuntimeError: Error building extension 'dc'"


def test_a_run_whose_model_is_not_built_under_zero_init_ends_with_an_error() -> None:
    """Its outcome would be that of another combination."""
    with pytest.raises(RuntimeError, match=r"^zero\.Init left 53 weights whole, such as model\.decoder\."):
        check_partitions(make_model(make_combination(["zero3", "zero_init"])))


def test_a_rebuilt_model_has_the_adapters_of_the_plain_one() -> None:
    """Whatever a rebuilding draws: the reference has the plain model."""

    def rebuild(model: torch.nn.Module) -> torch.nn.Module:
        torch.rand(3)
        return model

    combination = make_combination(["zero3", "lora"])
    plain, rebuilt = make_model(combination).state_dict(), make_model(combination, rebuild=rebuild).state_dict()
    assert all(torch.equal(plain[name], rebuilt[name]) for name in plain)


def test_a_matrix_is_read_as_it_was_written(tmp_path: Path) -> None:
    matrix = next(read_matrices())
    matrix.write(tmp_path / "matrix.json")
    assert Matrix.read(tmp_path / "matrix.json") == matrix
    document = json.loads((tmp_path / "matrix.json").read_text(encoding="utf-8"))
    # Each finding is a run, too, and is stored once.
    assert len(document["runs"]) + len(document["findings"]) == len(matrix.outcomes)


def test_the_recorded_recall() -> None:
    faults = REPLANTED["faults"]
    assert len(faults) >= 25
    assert not any(row["alarm"] for row in faults)
    assert sum(row["found"] for row in faults) >= 0.9 * len(faults)
    assert sum(row["located"] for row in faults) >= 0.9 * len(faults)
    assert [row["name"] for row in faults if not row["located"]] == []
    # Each group of ranks that share samples has one: tensors, sequences by Ulysses, sequences by a ring.
    divided = {level for row in faults for level in row["features"].split(",") if level in ("tp", "ulysses", "cp")}
    assert divided == {"tp", "ulysses", "cp"}


def test_the_recorded_clean_runs_are_equal_runs_of_the_newest_matrix_with_other_seeds() -> None:
    matrix, rows = next(read_matrices()), CLEAN["runs"]
    assert CLEAN["stack"] == matrix.stack
    assert len(rows) >= 200
    combinations = [make_combination(row["features"].split(",")) for row in rows]
    assert len(set(combinations)) == len(rows)
    outcomes = [matrix.outcomes[combination] for combination in combinations]
    assert all(outcome.is_equal for outcome in outcomes)
    # Each has the comparison of the gradients before they are reduced.
    assert all(row["local_gradients"] for row in rows)
    assert {combination.level("engine") for combination in combinations} == set(read_rows()["engine"].levels)
    # The stored runs have 0.
    assert sorted(row["seed"] for row in rows) == list(range(1, len(rows) + 1))
    assert all(0 <= row["share_of_limit"] <= 1 for row in rows if row["kind"] == "equal")


def test_the_pages_have_the_false_alarms_of_the_clean_runs() -> None:
    assert {row["kind"] for row in CLEAN["runs"]} == {"equal"}
    for file in (compositions.PAGE, compositions.RESTORED_FAULTS_PAGE):
        assert f" 0 of {len(CLEAN['runs'])} " in file.read_text(encoding="utf-8").replace("**", " ").replace(";", " ")


def test_clean_runs_are_drawn_from_all_engines_alike() -> None:
    matrix = next(read_matrices())
    orders = {seed: list(draw_equal_runs(matrix, seed)) for seed in (7, 8)}
    assert orders[7] == list(draw_equal_runs(matrix, seed=7)) != orders[8]
    equal = Counter(run.level("engine") for run, outcome in matrix.outcomes.items() if outcome.is_equal)
    counts = Counter(combination.level("engine") for combination in orders[7][:200])
    most = max(counts.values())
    assert all(counts[engine] in (equal[engine], most, most - 1) for engine in equal)


def test_clean_runs_of_an_earlier_call_stay_whatever_the_matrix_is_now() -> None:
    matrix = next(read_matrices())
    rows = {row["features"]: row for row in CLEAN["runs"]}
    assert plan_runs(matrix, 200, CLEAN["seed"], rows) == {}
    # Half of the rows, with gaps, and a matrix without the runs that were drawn first.
    odd_rows = {name: row for name, row in rows.items() if row["seed"] % 2}
    drawn = list(draw_equal_runs(matrix, CLEAN["seed"]))
    smaller = Matrix(matrix.stack, {run: matrix.outcomes[run] for run in drawn[20:]})
    planned = plan_runs(smaller, 202, CLEAN["seed"], odd_rows)
    assert sorted(planned.values()) == [*range(2, 201, 2), 201, 202]
    assert odd_rows.keys().isdisjoint(run.name for run in planned)


def test_an_interrupted_draw_goes_on_where_it_ended() -> None:
    matrix = next(read_matrices())
    planned = plan_runs(matrix, 30, 5, {})
    rows = {run.name: {"seed": seed} for run, seed in planned.items() if seed <= 12}
    assert plan_runs(matrix, 30, 5, rows) == {run: seed for run, seed in planned.items() if seed > 12}


def test_the_page_names_what_is_wrong_in_the_newest_release_of_each_package() -> None:
    matrices = [next(read_matrices()), *read_other_matrices()]
    table = compositions._newest_releases_table(matrices)
    newest = {
        name: max((f"{matrix.stack[name]}".partition("+")[0] for matrix in matrices), key=release_key)
        for name in ("deepspeed", "accelerate", "torch")
    }
    assert [row.split()[1] for row in table["Newest release"]] == list(newest.values())
    wrong = {
        match_known_finding(finding, matrices[0].stack)
        for finding in matrices[0].findings.values()
        if finding.kind == "differs"
    }
    titles = {entry.title for entry in wrong if entry is not None and entry.verdict == "wrong"}
    # Each once; torch has none, by the runs of its newest release.
    assert list(table["Wrong without an error"]) == [len(titles) - 5, 5, 0]
    assert all(count > 50 for count in table["Combinations run"])


def test_the_page_has_the_minutes_of_the_quick_design() -> None:
    assert QUICK["stack"] == next(read_matrices()).stack
    assert 10 <= QUICK["minutes"] < 11.5
    assert QUICK["unknown"] == 0
    assert f"{QUICK['minutes']} minutes: {QUICK['runs']} runs" in compositions.PAGE.read_text(encoding="utf-8")


def test_a_restored_fault_of_2024_is_told_from_those_of_2025_and_2026() -> None:
    older = [row["pull"] for row in REPLANTED["faults"] if row["pull"] in (6546, 125708, 128685)]
    counted = compositions._recall_counts(REPLANTED)
    assert counted["recent"] == counted["faults"] - len(older) >= 25


def test_the_page_is_that_of_the_records() -> None:
    assert compositions.PAGE.read_text(encoding="utf-8") == compositions.page(
        next(read_matrices()), REPLANTED, CLEAN, QUICK, list(read_other_matrices())
    )
    faults_page = compositions.restored_faults_page(REPLANTED, CLEAN)
    assert compositions.RESTORED_FAULTS_PAGE.read_text(encoding="utf-8") == faults_page


def test_the_page_adds_up_the_time_of_all_runs_which_is_less_than_six_hours() -> None:
    text = compositions.PAGE.read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("| time of all runs on two cores, in minutes: ")]
    parts = [int(number) for number in re.findall(r"(?:matrix|releases|weights|faults) (\d+)", line)]
    seconds = [sum(item.seconds for item in matrices) for matrices in (read_matrices(), read_other_matrices())]
    assert parts[:2] == [round(part / 60) for part in seconds]
    # 200 runs and 2 x 36 runs of a few seconds.
    assert 5 < parts[2] < 20
    assert 1 < parts[3] < 10
    hours = float(line.rsplit("|", 2)[1].removesuffix(" hours "))
    assert hours == pytest.approx(sum(parts) / 60, abs=0.1)
    assert hours < 6


def test_every_feature_is_in_one_group_of_how_common_it_is() -> None:
    grouped = [level for group in read_common_groups() for level in group.levels]
    assert sorted(grouped) == sorted(level for row in read_rows().values() for level in row.levels)


def test_a_combination_is_as_rare_as_its_rarest_feature() -> None:
    names = [
        "zero3,muon,no_reduce_scatter",
        "zero3,autotp",
        "zero2,muon,clipping",
        "zero2,accumulation,clipping",
        "zero2,bf16",
    ]
    ordered = sorted(names, key=lambda name: rarity(make_combination(name.split(","))))
    assert ordered == names[::-1]


def test_the_page_begins_with_the_faults_of_the_commonest_features() -> None:
    text = compositions.PAGE.read_text(encoding="utf-8")
    groups = [group.title for group in read_common_groups()]
    places = [text.index(f"### {title}") for title in groups]
    assert places == sorted(places)
    assert places[0] < text.index("`fsdp1,accelerate,resume`") < places[1] < text.index("`zero3,hpz,autotp`")


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("zero0", "--precision", "bf16"), 1, "wrong with --features zero0,bf16: stage 0 in bf16 takes a step"),
        (("--precision", "bf16"), 1, "wrong with --features zero0,bf16: stage 0 in bf16 takes a step"),
        (("zero0",), 0, "no fault found"),
        (("zero1", "--precision", "bf16"), 0, "no fault found"),
    ],
)
def test_the_grid_knows_what_the_runs_of_combinations_say_of_a_stage(
    words: tuple[str, ...], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = next(read_matrices()).stack
    packages = ["--accelerate", f"{stack['accelerate']}", "--torch", f"{stack['torch']}"]
    assert main(["releases", "0.19.8", *words, *packages]) == status
    first_line = capsys.readouterr().out.splitlines()[0]
    assert text in first_line
    assert ("wrong with" in first_line) == bool(status)


def test_an_unknown_feature_has_a_hint() -> None:
    with pytest.raises(UserError, match="no feature is called"):
        find_row("zero5")


@pytest.mark.parametrize(
    ("release", "features", "status", "text"),
    [
        ("0.19.8", "zero2,accumulation", 0, "right: equal in"),
        ("0.19.8", "zero2,muon,clipping", 1, "wrong: zero2,muon,clipping"),
        ("0.18.4", "zero2,accumulation", 1, "divided by the accumulation steps twice (fixed in 0.19.6)"),
        ("0.18.4", "zero2,cpu_adam,optimizer_cpu,accumulation", 1, "only the first and the last count"),
        ("0.18.4", "zero3,lora", 3, "not tested; run: study verify --features zero3,lora"),
        # The grid of releases has trained these.
        ("0.18.4", "zero3,accumulation", 0, "right\nby the grid"),
        ("0.17.5", "zero2,accumulation", 0, "right\nby the grid"),
        ("0.17.5", "zero2,cpu_adam,optimizer_cpu", 0, "right\nby the grid"),
        # Accelerate's fault, whatever the release of DeepSpeed.
        ("0.17.5", "zero2,accelerate,cpu_adam,optimizer_cpu", 1, "by runs of other releases, in accelerate 1.7.0"),
        # A fault of Accelerate's loop, which the grid trains in, and not of the engine's own.
        ("0.17.6", "zero1,accumulation", 3, "not tested"),
        ("0.17.6", "zero1,accelerate,accumulation", 1, "but the last are not divided (fixed in 0.18.3)"),
        ("0.17.5", "zero2,bf16", 3, "not tested"),
        ("0.17.3", "zero2,accumulation", 3, "not tested"),
        ("0.19.6", "zero2,muon", 3, "not tested"),
        ("0.19.7", "zero2,muon", 1, "keeps the momentum of one matrix"),
    ],
)
def test_the_answer_of_a_release_agrees_with_its_known_causes(
    release: str, features: str, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = next(read_matrices()).stack
    options = argparse.Namespace(
        release=release,
        features=parse_features(features),
        accelerate=stack["accelerate"],
        torch=stack["torch"],
        json=False,
    )
    assert judge_features(options) == status
    assert text in capsys.readouterr().out
    options.json = True
    assert judge_features(options) == status
    document = json.loads(capsys.readouterr().out)
    assert set(document["features"]) == set(features.split(","))
    assert document["releases"]["deepspeed"] == release
    assert document["status"] == status
    # An answer without a test has the command that makes one.
    is_untested = document["answer"] in ("pairs", "untested")
    assert is_untested == (status == 3)
    command = f"study verify --features {features}"
    assert document["test"] == command if is_untested else document["test"] in (None, command)


def test_an_equal_run_with_what_lifts_a_fault_does_not_answer_for_combinations_without_it() -> None:
    matrix = next(read_matrices())
    smaller = make_combination(["zero2", "muon", "fp32_accumulation", "schedule"])
    lifted = [
        outcome.combination
        for outcome in matrix.outcomes.values()
        if outcome.is_equal and set(smaller.features) - {"schedule"} <= set(outcome.combination.features)
    ]
    assert lifted, "no equal run to mislead"
    without_finding = dataclasses.replace(
        matrix,
        findings={
            combination: finding
            for combination, finding in matrix.findings.items()
            if not set(combination.features) <= set(smaller.features)
        },
    )
    # Another finding of the same fault.
    larger = make_combination(["zero2", "muon", "fp32_accumulation", "round_robin"])
    finding = next(f for f in matrix.findings.values() if f.combination.name == "zero2,muon,fp32_accumulation")
    without_finding.findings[larger] = dataclasses.replace(finding, combination=larger)
    assert look_up_answer(smaller, without_finding).kind == "wrong"


@pytest.mark.parametrize(
    ("features", "kind", "text"),
    [
        # Features that lift a fault or a refusal.
        ("zero2,muon,fp32_accumulation,no_reduce_scatter", "pairs", ""),
        ("zero2,muon,fp32_accumulation,small_buckets", "pairs", ""),
        ("zero2,muon,fp32_accumulation,frozen", "wrong", "gradients of weights that AdamW steps with Muon are lost"),
        ("zero1,accelerate,sgd,optimizer_cpu", "wrong", "silently become Adam"),
        ("zero1,sgd,optimizer_cpu", "error", "DeepSpeed refuses other optimizers"),
        # A fault before a documented difference, and a refusal before a fault.
        ("zero2,muon,clipping_unset", "wrong", "clipping judges by the norm of Muon's updates"),
        ("zero2,clipping_unset", "by_design", ""),
        ("zero2,accelerate,cpu_adam,optimizer_cpu,zenflow", "error", "ZenFlow takes no optimizer of Accelerate's"),
        # A feature of GPUs.
        ("zero3,quantized_weights", "untested", "needs a GPU"),
        # Groups that share samples.
        ("zero2,ulysses,clipping", "wrong", "too large by the number of ranks that share a sequence"),
        ("zero3,ulysses,no_reduce_scatter", "wrong", "too large by the number of ranks that share a sequence"),
        ("zero1,muon,autotp", "wrong", "Muon orthogonalizes each rank's part"),
        ("zero3,accelerate,autotp,schedule", "wrong", "the schedule takes a step for each process"),
        ("zero3,accelerate,ulysses,evaluation", "wrong", "attention sees only the rank's part"),
    ],
)
def test_an_answer_knows_what_lifts_a_finding_and_which_finding_comes_first(
    features: str, kind: str, text: str
) -> None:
    answer = look_up_answer(make_combination(features.split(",")), next(read_matrices()))
    assert answer.kind == kind, answer.text
    assert text in answer.text


@pytest.mark.parametrize(
    ("features", "shown_by", "fault"),
    [
        ("zero3,accelerate,autotp,schedule", "zero3,accelerate,schedule,autotp", "the schedule takes a step for each"),
        # By the source, as no run of these releases has it.
        ("zero0,cpu_adam,fp32_accumulation", None, "stage 0 in bf16 takes a step with gradients of zero"),
        ("zero2,accelerate,bf16,schedule,ulysses", None, "the schedule takes a step for each process"),
    ],
)
def test_a_fault_is_whole_without_the_combination_that_shows_it(
    features: str, shown_by: str | None, fault: str
) -> None:
    answer = find_answer(make_combination(features.split(",")), next(read_matrices()).stack)
    explanations = (answer.explanation, *answer.besides)
    assert answer.source == "runs"
    assert answer.faults == tuple(explanation.why for explanation in explanations)
    (match,) = [explanation for explanation in explanations if explanation.why.startswith(fault)]
    assert (None if match.shown_by is None else match.shown_by.name) == shown_by
    assert str(match).endswith(match.why)


def answer_lines(features: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    stack = next(read_matrices()).stack
    packages = ["--accelerate", f"{stack['accelerate']}", "--torch", f"{stack['torch']}"]
    main(["releases", "0.19.8", "--features", features, *packages])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("torch_release", "features", "status", "text"),
    [
        ("2.10.0", "fsdp2,frozen,tp", 1, "wrong: fsdp2,frozen,tp: frozen layers are trained"),
        ("2.15.0", "fsdp2,frozen,tp", 0, "right: equal"),
        ("2.10.0", "fsdp2,lora", 0, "right: equal"),
        ("2.10.0", "zero2,lora", 3, "not tested: no equal run"),
        ("2.9.0", "fsdp2,lora", 3, "not tested; run: study verify"),
    ],
)
def test_another_release_of_torch_is_answered_by_its_runs(
    torch_release: str, features: str, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--features", features, "--torch", torch_release]
    words += ["--accelerate", f"{next(read_matrices()).stack['accelerate']}"]
    assert main(["releases", "0.19.8", *words]) == status
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("accelerate_release", "features", "status"),
    [
        ("1.12.0", "fsdp2,accelerate,resume", 1),
        ("1.14.0", "fsdp2,accelerate,resume", 0),
        ("1.12.0", "zero3,accelerate,evaluation,ulysses", 0),
        ("1.14.0", "zero3,accelerate,evaluation,ulysses", 1),
        ("1.14.0", "fsdp2,accelerate,tied", 1),
        # Without Accelerate, whose release then decides nothing.
        ("1.14.0", "zero1,no_sync,round_robin", 0),
        ("1.14.0", "zero1,accelerate,muon,round_robin", 3),
        ("1.10.1", "zero3,accelerate,evaluation,ulysses", 1),
        ("1.10.1", "fsdp2,accelerate,cp", 0),
        ("1.7.0", "fsdp2,accelerate,cp", 1),
        ("1.7.0", "zero2,accelerate,accumulation", 1),
        ("1.7.0", "zero2,accelerate,clipping", 0),
    ],
)
def test_another_release_of_accelerate_is_answered_by_its_runs(
    accelerate_release: str, features: str, status: int
) -> None:
    words = ["--features", features, "--accelerate", accelerate_release]
    words += ["--torch", f"{next(read_matrices()).stack['torch']}"]
    assert main(["releases", "0.19.8", *words]) == status


def test_every_fault_of_a_combination_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    first, *besides, how = answer_lines("zero2,accelerate,schedule,evaluation,ulysses", capsys)
    assert "wrong: zero2,ulysses: gradients are too large" in first
    assert [line.split()[1:4] for line in besides] == [["the", "schedule", "takes"], ["attention", "sees", "only"]]
    assert how.startswith("tested on")
    assert "besides: zero2,muon,autotp: Muon orthogonalizes" in "\n".join(
        answer_lines("zero2,muon,autotp,clipping", capsys)
    )


def test_a_combination_that_is_right_names_what_accelerate_makes_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, _ = answer_lines("fsdp1,resume", capsys)
    assert ": right: " in first
    assert second.startswith("this is the engine's own loop; with Accelerate: wrong: fsdp1,accelerate,resume: ")
    assert second.endswith("; test: study verify --features fsdp1,accelerate,resume")
    # Nothing where Accelerate is right, too, or is named.
    assert len(answer_lines("zero2,clipping", capsys)) == 2
    assert len(answer_lines("fsdp1,accelerate,resume", capsys)) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("abc", "--features", "zero2"), "'abc' is not a release"),
        (("0.19.8", "zero0", "--features", "zero0"), "zero0 is not used with --features"),
        (("0.19.8", "--features", "zero0", "--precision", "bf16"), "--precision is not used with --features"),
        (("0.19.8", "--features", "zero2,MoE"), "did you mean ep?"),
        (("0.19.8", "--features", "ZERO2"), "did you mean zero2?"),
        (("0.19.8", "--features", "zero2,cpp"), "did you mean cp? study verify --features list prints all"),
        (("0.19.8", "--features", "ddp,hpz"), "study verify --features list prints all"),
        (("0.19.8", "zero3,ulysses"), "To fix it: study releases 0.19.8 --features zero3,ulysses."),
        (("0.19.8", "muon"), "To fix it: study releases 0.19.8 --features zero2,muon."),
        (("0.19.8", "zero3,foo"), "there is no strategy 'zero3,foo'"),
        (("0.19.8", "--features", "zero2,muon", "--accumulation", "4"), "add the feature accumulation"),
        (("0.19.8", "zero2", "--accumulation", "4"), "the answer has both"),
        (("costs", "--repeat", "3"), "--repeat is for study releases bisect"),
    ],
)
def test_a_wrong_request_of_features_is_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["releases", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def equal_combinations(matrix: Matrix) -> list[Combination]:
    return [combination for combination, run in matrix.outcomes.items() if run.is_equal]


def visible(faults: Iterable[KnownFinding], combination: Combination) -> list[str]:
    """Return the titles of faults that a run of a combination has to show."""
    # It is smaller than the rounding of 16 bits.
    evaluation = "attention sees only the rank's part of a sequence in evaluations"
    in_16_bits = combination.has("bf16", "fp32_accumulation")
    return [fault.title for fault in faults if not (fault.title == evaluation and in_16_bits)]


def test_a_known_fault_applies_to_no_equal_run() -> None:
    for matrix in [*read_matrices(), *read_other_matrices()]:
        faults = [entry for entry in read_known_findings() if entry.verdict == "wrong" and entry.is_in(matrix.stack)]
        for combination in equal_combinations(matrix):
            wrong = [entry for entry in faults if entry.arises_with(combination.levels)]
            assert not visible(wrong, combination), combination.name


def test_a_fault_that_a_release_mends_is_in_no_later_stack() -> None:
    entry = next(entry for entry in read_known_findings() if entry.before == (("torch", "2.11.0"),))
    begun = next(entry for entry in read_known_findings() if entry.since == (("accelerate", "1.13.0"),))
    assert [begun.is_in({"accelerate": version}) for version in ("1.12.0", "1.13.0", "1.15.0")] == [False, True, True]
    assert [entry.is_in({"torch": version}) for version in ("2.6.0", "2.10.0+cu128", "2.11.0", "2.13.0+cpu")] == [
        True,
        True,
        False,
        False,
    ]


def test_no_torch_is_imported_for_an_answer() -> None:
    run_without_torch("releases", "--features", "zero2,clipping")


def test_each_report_is_about_a_combination_that_was_run_or_is_part_of_one() -> None:
    matrix, page_of_reports = next(read_matrices()), compositions.PAGE.read_text(encoding="utf-8")
    for report in read_reports():
        assert report.address in page_of_reports
        if report.combination.conflict is not None:
            # The page has the reason.
            assert f"not run: {report.combination.conflict.reason}; {report.because}" in page_of_reports
            continue
        kind = look_up_answer(report.combination, matrix).kind
        assert kind in {"right", "wrong", "error"}
        # An equal run needs a reason.
        assert report.because or kind != "right", report.report
    numbers = {report.report.rsplit("#", 1)[1] for report in read_reports()}
    assert numbers >= {"6545", "7861", "7164", "7606", "7409", "7759", "8437", "8463", "1059", "3844", "10211"}
    page = compositions.PAGE.read_text(encoding="utf-8")
    assert (
        "(https://github.com/deepspeedai/DeepSpeed/issues/6545) | `zero2,ep` | does not arise: equal; mended in 0.15.4"
        in page
    )


def stacks_with_the_others() -> list[tuple[Matrix, Evidence]]:
    """Return each stored matrix, with the releases that the runs of the others show to be wrong."""
    matrices = [*read_matrices(), *read_other_matrices()]
    return [(matrix, collect_evidence(item for item in matrices if item is not matrix)) for matrix in matrices]


def test_no_equal_run_is_called_wrong_by_the_source() -> None:
    counts = Counter[bool]()
    for matrix, without_it in stacks_with_the_others():
        # Also as if its own runs were missing.
        for evidence in (stored_evidence(), without_it):
            for combination in equal_combinations(matrix):
                alarms = visible(faults_by_source(combination, matrix.stack, evidence), combination)
                assert not alarms, (matrix.stack, combination.name)
                counts[bool(alarms)] += 1
    assert counts[False] > 2 * 1500


def test_wrong_runs_are_known_without_them_if_older_and_newer_releases_were_run() -> None:
    right, missed, at_ends = list[str](), list[str](), list[bool]()
    for matrix, evidence in stacks_with_the_others():
        is_end = (matrix.stack["deepspeed"], matrix.stack["accelerate"], matrix.stack["torch"]) in {
            ("0.19.8", "1.15.0", "2.13.0+cpu"),
            ("0.18.6", "1.15.0", "2.13.0+cpu"),
            ("0.19.8", "1.7.0", "2.13.0+cpu"),
        }
        for finding in matrix.findings.values():
            entry = match_known_finding(finding, matrix.stack)
            if entry is None or entry.verdict != "wrong":
                continue
            is_known = entry in faults_by_source(finding.combination, matrix.stack, evidence)
            if is_end:
                at_ends.append(is_known)
            else:
                (right if is_known else missed).append(f"{matrix.stack['deepspeed']} {finding.combination.name}")
    assert len(right) >= 100
    # The first release that shows it, and the last one before it is mended.
    assert sorted(missed) == ["0.19.5 zero3,hpz,autotp", "0.19.8 fsdp2,frozen,tp"]
    # Releases at an end are called wrong by `since` and `before` alone.
    assert 0 < sum(at_ends) < len(at_ends)


def test_each_known_fault_names_the_packages_that_decide_it() -> None:
    causes = {cause.id for cause in read_causes()}
    for entry in read_known_findings():
        if entry.verdict in ("wrong", "refused"):
            assert entry.packages, entry.title
            assert set(entry.packages) <= {"deepspeed", "accelerate", "torch", "transformers"}
            # Runs are evidence of a release of a package if their stack has one.
            assert all(matrix.stack[name] for matrix in stored_matrices() for name in entry.packages)
        assert entry.cause in causes | {""}


@pytest.mark.parametrize(
    ("release", "features", "accelerate_release", "lines"),
    [
        *(
            (
                release,
                "zero2,cpu_adam,optimizer_cpu,zenflow",
                None,
                (
                    ": wrong: every weight becomes NaN in the first step",
                    "by the source, in deepspeed 0.18.3 to before 0.19.2",
                ),
            )
            for release in ("0.18.3", "0.18.9", "0.19.1")
        ),
        (
            "0.19.8",
            "fsdp2,accelerate,resume",
            "1.11.0",
            (": wrong: the optimizer's state is not loaded", "by the source, in accelerate 1.7.0 to before 1.13.0 ("),
        ),
        (
            "0.18.4",
            "zero2,muon,accumulation",
            None,
            (
                "with deepspeed 0.18.4, torch 2.13.0+cpu: wrong: the gradient is divided by the accumulation steps",
                "besides: Muon steps matrices that two ranks divide with gradients that were not all reduced; use",
                "by the source, in deepspeed 0.17.6 to before 0.19.3 (",
                "these releases were not run; run: study verify --features zero2,muon,accumulation",
            ),
        ),
        *(
            (
                release,
                f"{stage},config_muon,optimizer_cpu{extra}",
                None,
                (f": {answer}; use DeepSpeed 0.19.8 or newer", f"by the source, in deepspeed {span} (https"),
            )
            for stage in ("zero1", "zero2")
            for release, extra, answer, span in (
                (
                    "0.19.2",
                    "",
                    "wrong: Muon's step with the optimizer on the host is that of SGD",
                    "0.17.6 to before 0.19.3",
                ),
                (
                    "0.19.4",
                    "",
                    "ends with an error: Muon refuses the optimizer on the host with reduce_scatter",
                    "0.19.3 to before 0.19.8",
                ),
                (
                    "0.19.7",
                    ",no_reduce_scatter",
                    "wrong: Muon's step with the optimizer on the host and without reduce_scatter is that of SGD",
                    "0.19.3 to before 0.19.8",
                ),
            )
        ),
        (
            "0.18.9",
            "zero0,bf16",
            None,
            (": wrong: stage 0 in bf16 takes a step", "by runs of other releases, in deepspeed 0.18.6 to 0.19.8"),
        ),
        (
            "0.18.7",
            "zero3,lora,checkpointing",
            None,
            (": ends with an error: checkpointing recomputes", "in deepspeed 0.18.6 to before 0.19.3"),
        ),
        (
            "0.18.5",
            "zero2,cpu_adam,accumulation,optimizer_cpu,zenflow",
            None,
            (
                ": wrong: the gradient is divided by the accumulation steps twice (fixed in 0.19.6)",
                "besides: every weight becomes NaN in the first step with ZenFlow at stages 1 and 2; use",
                "by the causes of `study releases`",
            ),
        ),
    ],
)
def test_a_release_that_was_not_run_is_answered_by_the_source(
    release: str,
    features: str,
    accelerate_release: str | None,
    lines: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert releases(release, features, accelerate_release) == 1
    printed = capsys.readouterr().out
    assert [line for line in lines if line not in printed] == []
    # A fault that both files have is named once.
    assert printed.count("divided by the accumulation steps twice") <= 1 or "by the source" in printed


def releases(release: str, features: str, accelerate: str | None = None, torch_release: str | None = None) -> int:
    """Run `study releases` with the packages of the newest matrix, apart from those named."""
    stack = next(read_matrices()).stack
    packages = ["--accelerate", accelerate or f"{stack['accelerate']}", "--torch", torch_release or f"{stack['torch']}"]
    return main(["releases", release, "--features", features, *packages])


@pytest.mark.parametrize(
    ("release", "features", "lines"),
    [
        # Before the first release with the fault; after the last one that was run; before the first one.
        ("0.18.2", "zero2,cpu_adam,optimizer_cpu,zenflow", ("with deepspeed 0.18.6, torch 2.13.0+cpu: wrong: ",)),
        (
            "0.20.0",
            "zero2,muon,clipping",
            (
                "with deepspeed 0.19.8, torch 2.13.0+cpu: wrong: ",
                "known of deepspeed 0.18.6 to 0.19.8, not known of these releases: clipping judges by the norm of Muon",
            ),
        ),
        (
            "0.17.0",
            "zero0,clipping,ep",
            ("known of deepspeed 0.18.6 to 0.19.8, not known of these releases: the norm is the mean",),
        ),
    ],
)
def test_a_release_without_a_known_fault_is_answered_with_what_is_known_of_others(
    release: str, features: str, lines: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert releases(release, features) == 3
    first, *further = capsys.readouterr().out.splitlines()
    assert first.endswith(f"not tested; run: study verify --features {features}")
    assert [line for line in lines if not any(text.startswith(line) for text in further)] == []


@pytest.mark.parametrize(
    ("features", "packages"),
    [
        ("zero2", ("deepspeed", "torch")),
        ("zero2,accelerate", ("deepspeed", "accelerate", "torch")),
        ("fsdp2,accelerate", ("accelerate", "torch")),
        ("fsdp2,cpu_adam", ("deepspeed", "torch")),
        ("ddp", ("torch",)),
    ],
)
def test_the_packages_of_a_combination_are_those_that_it_runs_in(features: str, packages: tuple[str, ...]) -> None:
    assert make_combination(features.split(",")).packages == packages


@pytest.mark.parametrize(
    ("release", "features", "accelerate_release", "status"),
    [
        ("0.18.4", "fsdp2,accelerate", None, 0),
        ("0.18.4", "ddp,accumulation", "1.0.0", 0),
        ("0.19.8", "zero2,accumulation", "1.0.0", 0),
        ("0.18.6", "zero2,accumulation,clipping", "1.0.0", 1),
        ("0.19.8", "zero2,accelerate,clipping", "1.0.0", 3),
        ("0.18.8", "fsdp2,cpu_adam", None, 3),
    ],
)
def test_only_the_packages_of_a_combination_decide(
    release: str, features: str, accelerate_release: str | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert releases(release, features, accelerate_release) == status
    first_line = capsys.readouterr().out.splitlines()[0]
    assert (f"accelerate {accelerate_release}" in first_line) == (status == 3 and accelerate_release is not None)
    # Also of the combinations that the grid of strategies names.
    packages = ["--accelerate", "1.0.0", "--torch", "2.13.0"]
    main(["releases", "0.19.8", "zero0", "--precision", "bf16", *packages])
    assert "wrong with --features zero0,bf16" in capsys.readouterr().out


def test_older_releases_have_their_own_faults(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [
        main(["releases", release, "--features", "zero3,lora,checkpointing"]) for release in ("0.18.6", "0.19.5")
    ]
    assert answers == [1, 0]
    assert "use reentrant checkpointing, or DeepSpeed 0.19.3 or newer" in capsys.readouterr().out


def test_the_combinations_over_releases_have_the_pairs_of_common_features() -> None:
    stored = next(read_matrices())
    chosen = combinations_over_releases(stored)
    assert all(combination.uses_deepspeed for combination in chosen)
    assert len(chosen) < len(combinations_to_repeat(stored)) / 2
    equal = [run for run, outcome in stored.outcomes.items() if outcome.is_equal and run.uses_deepspeed]
    common = set().union(*(list_triples(run) for run in equal if rarity(run)[0] == 0))
    assert common <= set().union(*(list_triples(run) for run in chosen))
    assert {"zero2,muon", "zero2,muon,clipping", "zero3,lora,resume,hpz"} <= {run.name for run in chosen}


@pytest.mark.parametrize(
    ("name", "features"), [("zero2_cpu", "zero2,optimizer_cpu,cpu_adam"), ("zero3_nvme", "zero3,all_nvme,cpu_adam")]
)
def test_a_strategy_with_an_offload_is_suggested_as_features(name: str, features: str) -> None:
    with pytest.raises(UserError) as refusal:
        make_combination([name, "accumulation"])
    assert f"did you mean {features}?" in refusal.value.fix
    # The suggestion is a combination.
    assert make_combination(features.split(",")).conflict is None


def variants(stack: JudgedStack) -> list[Combination]:
    """Return the combinations that a request of `study releases RELEASE STRATEGY --precision` asks about."""
    precision = ["bf16"] if stack.short_precision == "bf16" else []
    combinations = [
        combination_of_strategy(str(stack.strategy), *precision, *loop, *accumulation)
        for loop in ([], ["accelerate"])
        for accumulation in ([], ["accumulation"])
    ]
    return [combination for combination in combinations if combination is not None]


# One of each span of causes and of stored runs, releases between those that were run, and one to come.
@pytest.mark.parametrize("release", ["0.15.1", "0.17.6", "0.18.2", "0.18.4", "0.18.9", "0.19.1", "0.19.8", "0.20.0"])
@pytest.mark.parametrize("precision", PRECISIONS.values())
def test_one_request_has_one_answer_by_its_strategy_and_by_its_features(release: str, precision: str) -> None:
    grid = json.loads(GRID.read_text(encoding="utf-8"))
    packages = {name: f"{grid['versions'][name]}" for name in ("accelerate", "torch", "transformers")}
    for strategy in STUDIED_STRATEGIES:
        stack = JudgedStack(release, **packages, precision=precision, strategy=strategy)
        verdict = judge(grid, stack)
        answers = [find_answer(combination, stack.versions) for combination in variants(stack)]
        if not answers:
            continue
        where = (release, strategy, precision, verdict.text)
        faults = {fault for answer in answers for fault in answer.faults if answer.source != "causes"}
        assert all(fault in verdict.text for fault in faults), where
        if any(answer.status == 1 for answer in answers):
            assert verdict.status == 1, where
        elif all(answer.status == 0 for answer in answers):
            assert verdict.status == 0, where
        if verdict.status == 1:
            assert any(answer.status == 1 for answer in answers), where


def test_an_untested_combination_has_one_typed_answer_in_releases_explain_and_the_receipt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "zero_optimization": {"stage": 1}}
    file.write_text(json.dumps(settings | {"gradient_accumulation_steps": 4, "bf16": {"enabled": True}}))
    main(["explain", str(file), "gpt2", "--world_size", "2", "--json"])
    explained = json.loads(capsys.readouterr().out)["combination"]
    combination = make_combination(explained["features"])
    answer = find_answer(combination, fill_releases({"deepspeed": None, "accelerate": None, "torch": None}))
    assert explained == json.loads(json.dumps(answer.document))
    main(["releases", f"{answer.releases['deepspeed']}", "--features", combination.name])
    assert capsys.readouterr().out.splitlines() == answer.lines
    # The receipt has the same fields.
    assert CombinationFacts(**explained).model_dump(mode="json") == explained
    older = find_answer(combination, {"deepspeed": "0.16.1", "accelerate": "1.15.0", "torch": "2.13.0"})
    assert older.document["test"] == f"study verify --features {combination.name}"
    assert older.lines[0].endswith(f"not tested; run: {older.document['test']}")
