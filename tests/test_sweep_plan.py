"""Suites are read strictly, and what they plan is complete, interleaved and the same every time."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pynvml
import pytest
import yaml

from study import cli
from study.config.errors import UserError
from study.config.flags import parse_command_line, resolved
from study.config.strategies import STUDIED_STRATEGIES
from study.host.box import Box, _visible, gpu_processes, this_box
from study.host.memory import host_memory
from study.metrics.profiling import check_profiled_steps
from study.sweep.cell import launch_command
from study.sweep.command import duration
from study.sweep.notes import PROBES_OF_A_SEARCH, expected_s
from study.sweep.plan import plan_cells
from study.sweep.search import Search
from study.sweep.slices import missing_here, plan_suite, rehearsed
from study.sweep.suite_file import find_suite, read_suite
from sweeps import ROOT, TINY, shipped, write_suite

CPU_BOX = Box((), 16.0)
SHIPPED = [name for name, suite in shipped().items() if not suite.slices]


def box_with(gpus: int) -> Box:
    return Box((80.0,) * gpus, 1024.0)


def plan(file, box=CPU_BOX, only=()):
    (part,) = plan_suite(str(file), box, Path("runs"), only).slices
    return part.cells


HEAD = "name: x\ndescription: y\n"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (HEAD + "grid: []\ngrids: [{axes: {strategy: ddp}}]\n", 3, "unknown key 'grid'"),
        (HEAD + "grids:\n  - axes:\n      strategy: ddp\n      batch: [1, 2]\n", 6, "unknown key 'batch'"),
        (HEAD + "grids:\n  - axes:\n      strategy: [ddp, zero4]\n", 5, "strategy is 'zero4'"),
        (HEAD + "fixed:\n  seed: 1\n  seed: 2\ngrids: []\n", 5, "seed is there twice"),
        (HEAD + "fixed: {output_dir: here}\ngrids: []\n", 3, "unknown key 'output_dir'"),
        (HEAD + "fixed:\n  max_steps: many\ngrids: []\n", 4, "max_steps"),
        (HEAD + "grids:\n  - axes: {strategy: []}\n", 4, "empty list"),
        (HEAD + "grids:\n  - axes: {strategy: ddp}\n    repeats: 0\n", 5, "repeats is 0"),
        (HEAD + "grids:\n  - axes: {strategy: ddp, world_size: two}\n", 4, "world_size is 'two'"),
        (HEAD + "requires: {gpus: some}\ngrids: [{axes: {strategy: ddp}}]\n", 3, "gpus is 'some'"),
        (HEAD + "grids:\n  - fixed: {seed: 1}\n    axes: {strategy: ddp, seed: [1, 2]}\n", 5, "fixed and an axis"),
        (HEAD + "grids:\n  - axes: {strategy: ddp}\n    exclude: [{stage: 3}]\n", 5, "unknown key 'stage'"),
        (HEAD + "grids:\n  - axes: {strategy: ddp\n", 5, "not YAML"),
        (HEAD + "grids:\n  - 7\n", 3, "mapping"),
        (HEAD + "grids:\n  - axes: {strategy: ddp}\n    search: {smallest: 3}\n", 5, "unknown key 'smallest'"),
        (HEAD + "grids:\n  - axes: {strategy: ddp}\n    search: {}\n", 5, "names 0 things to find"),
        (
            HEAD + "grids:\n  - axes: {strategy: ddp}\n    search:\n      largest_model: [a, b]\n"
            "      largest_micro_batch: [1, 2]\n",
            5,
            "names 2 things to find",
        ),
        (HEAD + "grids:\n  - axes: {strategy: ddp}\n    search:\n      largest_model: [a]\n", 6, "is ['a']"),
        (HEAD + "grids:\n  - axes: {strategy: ddp}\n    search: {largest_model: [a, b, a]}\n", 5, "is ['a', 'b', 'a']"),
        (HEAD + "grids:\n  - search: {largest_micro_batch: {from: 4, to: 2}}\n", 4, "is {'from': 4, 'to': 2}"),
        (HEAD + "grids:\n  - search: {largest_micro_batch: {from: 1}}\n", 4, "to is missing"),
        (HEAD + "grids:\n  - search: {largest_micro_batch: [1, 4, 2]}\n", 4, "is [1, 4, 2]"),
        (HEAD + "grids:\n  - search: {largest_micro_batch: [1, two]}\n", 4, "is [1, 'two']"),
        (
            HEAD + "grids:\n  - axes: {global_batch_size: 8}\n    search: {largest_micro_batch: [1, 2]}\n",
            4,
            "global_batch_size is what largest_micro_batch decides",
        ),
        (
            HEAD + "grids:\n  - search: {largest_model: [gpt2, gpt2-xl]}\n    overrides:\n"
            "      - {where: {strategy: ddp}, fixed: {model_name_or_path: gpt2}}\n",
            6,
            "is what largest_model decides",
        ),
        (HEAD + "grids:\n  - axes: {strategy: ddp, trainer: keras}\n", 4, "trainer is 'keras'"),
        (HEAD + "grids:\n  - axes: {strategy: ddp, expected_s: 0}\n", 4, "expected_s is 0"),
        (HEAD + "grids:\n  - axes: {strategy: ddp, time_limit_s: .inf}\n", 4, "time_limit_s is inf"),
        (HEAD + "requires: {gpus: 1000000000000}\ngrids: []\n", 3, "gpus is 1000000000000"),
        (f"name: {'a' * 101}\ndescription: y\ngrids: []\n", 1, "name is 'aaa"),
        (HEAD + "requires: {host_memory_gib: .inf}\ngrids: []\n", 3, "host_memory_gib is inf"),
        (HEAD + "grids:\n  - axes: {strategy: ddp}\n    repeats: 1000000000\n", 3, "grids have 1000000000 runs"),
        (
            HEAD + f"grids:\n  - axes: {{seed: &s {list(range(99))}, max_steps: *s, eval_samples: *s}}\n",
            3,
            "970299 runs",
        ),
        (
            HEAD + "grids:\n  - search: {largest_micro_batch: {from: 1, to: 1000000000000}}\n",
            4,
            "more than 10000 sizes",
        ),
        ("name: a/b\ndescription: y\ngrids: []\n", 1, "name is 'a/b'"),
        ("name: x\ngrids: []\n", 1, "description is missing"),
    ],
)
def test_what_a_suite_gets_wrong_is_refused_with_file_and_line(tmp_path, text, line, says):
    file = tmp_path / "suite.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refusal:
        read_suite(file)
    assert f"{file}:{line}" in refusal.value.problem
    assert says in refusal.value.problem


def test_a_suite_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UserError) as refusal:
        find_suite("labtop")
    assert "laptop" in refusal.value.fix


@pytest.mark.parametrize("text", ["- a\n", "", "a: !!python/object:os.system {}\n", "\x00"])
def test_what_is_no_suite_at_all_is_refused(tmp_path, text):
    file = tmp_path / "suite.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"suite\.yaml"):
        read_suite(file)


def test_a_file_that_is_too_large_for_a_suite_is_not_read(tmp_path):
    file = tmp_path / "log.txt"
    file.write_text("loss: 0.7\n" * 110_000)
    with pytest.raises(UserError, match="larger than any suite"):
        read_suite(file)


def test_aliases_that_make_a_billion_values_of_a_line_are_refused(tmp_path):
    doubled = "".join(f"  - &a{n + 1} [*a{n}, *a{n}, *a{n}, *a{n}]\n" for n in range(15))
    file = tmp_path / "suite.yaml"
    file.write_text(f"{HEAD}grids:\n  - &a0 [x, x]\n{doubled}")
    with pytest.raises(UserError, match="holds more than 10000 values, its aliases written out"):
        read_suite(file)
    file.write_text(f"{HEAD}grids: &itself [*itself]\n")
    with pytest.raises(UserError, match="recursive"):
        read_suite(file)


def test_a_suite_whose_every_cell_is_excluded_is_refused(tmp_path, capsys):
    file = write_suite(tmp_path, {"strategy": ["ddp", "zero3"]}, exclude=[{"strategy": ["ddp", "zero3"]}])
    for command in ("run", "status", "weights"):
        assert cli.main([command, str(file)]) == 2
        assert capsys.readouterr().err.startswith("error: the suite tiny has no cell: its grids exclude all of them.")


@pytest.mark.parametrize(
    "rules",
    [
        {"exclude": [{"strategy": "ddp", "dropout": 0.2}]},
        {"overrides": [{"where": {"strategy": "zero3_cpu"}, "fixed": {"learning_rate": 0.1}}]},
    ],
)
def test_a_rule_that_meets_no_run_is_refused(tmp_path, capsys, rules):
    file = write_suite(tmp_path, {"strategy": ["ddp", "zero3"], "dropout": [0.0, 0.1]}, **rules)
    assert cli.main(["run", str(file), "--dry-run"]) == 2
    assert "no run of the grid has " in capsys.readouterr().err
    # Ranks that nobody asked for are the box's.
    file = write_suite(tmp_path, {"strategy": ["ddp", "zero3"]}, exclude=[{"world_size": 8}])
    assert len(plan(file)) == 2
    assert plan(file, box_with(4))


def test_every_combination_is_a_cell_but_the_excluded_ones(tmp_path):
    file = write_suite(
        tmp_path, {"strategy": ["ddp", "zero3"], "seed": [1, 2], "dropout": [0.0, 0.1]},
        exclude=[{"strategy": "ddp", "dropout": 0.1, "seed": [1, 2]}],
    )  # fmt: skip
    cells = plan(file)
    assert Counter((cell.strategy, cell.config.dropout) for cell in cells) == {
        ("ddp", 0.0): 2, ("zero3", 0.0): 2, ("zero3", 0.1): 2
    }  # fmt: skip
    assert len({cell.id for cell in cells}) == 6


def test_an_override_holds_for_what_it_matches_alone(tmp_path):
    file = write_suite(
        tmp_path, {"strategy": ["ddp", "zero3"]},
        overrides=[{"where": {"strategy": "zero3"}, "fixed": {"max_steps": 7, "time_limit_s": 9}}],
    )  # fmt: skip
    found = {cell.strategy: (cell.config.max_steps, cell.time_limit_s) for cell in plan(file)}
    assert found == {"ddp": (2, 540.0), "zero3": (7, 9.0)}


@pytest.mark.parametrize(("box", "expected"), [(CPU_BOX, 2), (box_with(1), 1), (box_with(4), 4)])
def test_the_world_follows_the_box(tmp_path, box, expected):
    file = write_suite(tmp_path, {"strategy": ["single", "zero1"]})
    assert {cell.strategy: cell.world_size for cell in plan(file, box)} == {"single": 1, "zero1": expected}


def test_a_suite_can_fix_the_world_and_single_stays_one_rank(tmp_path):
    file = write_suite(tmp_path, {"strategy": ["single", "zero1"], "world_size": [2, 4]})
    worlds = sorted((cell.strategy, cell.world_size) for cell in plan(file, box_with(8)))
    assert worlds == [("single", 1), ("zero1", 2), ("zero1", 4)]


def test_each_repeat_and_seed_is_a_block_with_every_arm_once_in_its_own_order(tmp_path):
    arms = ["single", "ddp", "zero1", "zero2", "zero3", "fsdp2"]
    file = write_suite(tmp_path, {"strategy": arms, "seed": [1, 2]}, repeats=3)
    cells = plan(file)
    blocks = [cells[start : start + len(arms)] for start in range(0, len(cells), len(arms))]
    assert [{(cell.repeat, cell.config.seed) for cell in block} for block in blocks] == [
        {(repeat, seed)} for repeat in (1, 2, 3) for seed in (1, 2)
    ]
    orders = [tuple(cell.strategy for cell in block) for block in blocks]
    assert all(sorted(order) == sorted(arms) for order in orders)
    assert len(set(orders)) > 1
    assert [cell.id for cell in plan(file)] == [cell.id for cell in cells]


def test_another_order_seed_is_another_order(tmp_path):
    file = write_suite(tmp_path, {"strategy": "all"})
    before = [cell.id for cell in plan(file)]
    file.write_text(file.read_text() + "order_seed: 1\n")
    after = [cell.id for cell in plan(file)]
    assert before != after
    assert sorted(before) == sorted(after)


def test_only_keeps_the_order_and_refuses_what_matches_nothing(tmp_path):
    file = write_suite(tmp_path, {"strategy": "all"})
    everything = plan(file)
    assert plan(file, only=["*-zero3*"]) == [cell for cell in everything if "-zero3" in cell.id]
    with pytest.raises(UserError, match="matches no cell"):
        plan(file, only=["zero9"])


def test_only_takes_a_flag_s_value_and_several_patterns_at_once(tmp_path):
    file = write_suite(
        tmp_path, {"strategy": ["ddp", "zero3", "zero3_cpu"], "seed": [1, 2], "precision": ["fp32", "bf16"]}, repeats=2
    )
    chosen = plan(file, only=["seed=2", "strategy=zero3*", "repeat=1", "precision=BF16"])
    assert [(cell.config.seed, cell.repeat, cell.config.precision) for cell in chosen] == [(2, 1, "bf16")] * 2
    assert {cell.strategy for cell in chosen} == {"zero3", "zero3_cpu"}
    assert plan(file, only=["*-ddp-*", "seed=2"]) == [cell for cell in plan(file, only=["*-ddp-*"])
                                                      if cell.config.seed == 2]  # fmt: skip
    with pytest.raises(UserError, match="no run has a sead"):
        plan(file, only=["sead=2"])
    with pytest.raises(UserError, match=r"--only \*-ddp-\* --only seed=3 matches no cell"):
        plan(file, only=["*-ddp-*", "seed=3"])


@pytest.mark.parametrize("gpus", [0, 4])
def test_an_accumulation_is_the_same_on_every_number_of_ranks(tmp_path, gpus):
    axes = {"strategy": ["single", "zero1"], "gradient_accumulation_steps": [2, 4], "global_batch_size": 32}
    cells = plan(write_suite(tmp_path, axes), box_with(gpus) if gpus else CPU_BOX)
    found = [cell.config.batch_plan(cell.ranks).gradient_accumulation_steps for cell in cells]
    assert sorted(found) == [2, 2, 4, 4]


@pytest.mark.parametrize("other", [{"global_batch_size": 6}, {"per_device_train_batch_size": 1}])
def test_an_accumulation_that_cannot_be_is_refused(tmp_path, other):
    file = write_suite(tmp_path, {"strategy": "zero1", "gradient_accumulation_steps": 4, **other})
    with pytest.raises(UserError, match=r"tiny\.yaml:\d+: zero1 on 2 ranks: gradient_accumulation_steps"):
        plan(file)


def test_the_equivalence_suite_cuts_each_step_of_every_arm_into_one_two_and_four():
    found: dict[tuple[str, str], set[int]] = {}
    for cell in plan(find_suite("equivalence")):
        steps = cell.config.batch_plan(cell.ranks).gradient_accumulation_steps
        found.setdefault((cell.config.task, cell.strategy), set()).add(steps)
    assert len(found) == 2 * len(STUDIED_STRATEGIES)
    assert set(map(frozenset, found.values())) == {frozenset({1, 2, 4})}


def test_a_batch_that_does_not_divide_is_refused_before_anything_runs(tmp_path):
    file = write_suite(tmp_path, {"strategy": "ddp", "world_size": 3})
    with pytest.raises(UserError, match=r"tiny\.yaml:.*ddp on 3 ranks.*does not divide"):
        plan(file)


def test_a_batch_of_which_no_divisor_is_near_is_refused_at_once(tmp_path):
    huge = {"global_batch_size": 1_000_000_000_039, "per_device_train_batch_size": 999_999_999_999, "world_size": 1}
    with pytest.raises(UserError, match="does not divide --global_batch_size") as refusal:
        plan(write_suite(tmp_path, {"strategy": ["ddp"]}, {**TINY, **huge}))
    assert refusal.value.fix.startswith("use 1,")


def test_what_only_deepspeed_has_is_refused_for_other_strategies(tmp_path):
    file = write_suite(tmp_path, {"strategy": ["ddp", "zero2"]}, {**TINY, "precision": "bf16-engine"})
    with pytest.raises(UserError, match="ddp runs without it"):
        plan(file)


@pytest.mark.parametrize(("trainer", "strategy"), [("hf_trainer", "fsdp2"), ("bare_loop", "zero2")])
def test_what_a_trainer_does_not_run_is_refused_before_anything_runs(tmp_path, trainer, strategy):
    file = write_suite(tmp_path, {"strategy": strategy, "trainer": trainer})
    with pytest.raises(UserError, match=f"{trainer} does not run {strategy}"):
        plan(file)


def test_a_trainer_is_launched_by_its_own_script_under_its_own_id(tmp_path):
    file = write_suite(tmp_path, {"strategy": "single", "trainer": ["study", "hf_trainer", "bare_loop"]})
    cells = {cell.trainer: cell for cell in plan(file)}
    assert len({cell.id for cell in cells.values()}) == 3
    assert "-single-hf_trainer-1x-" in cells["hf_trainer"].id
    assert "-single-1x-" in cells["study"].id
    for trainer, script in (("hf_trainer", "study/baselines/hf_trainer.py"), ("study", "study/train.py")):
        assert script in launch_command(cells[trainer], tmp_path)


def test_a_virtual_rank_is_launched_alone_and_divides_its_batch_over_the_ranks_it_stands_for(tmp_path):
    fixed = {**TINY, "virtual_world_size": 8, "world_size": 1, "global_batch_size": 16}
    (cell,) = plan(write_suite(tmp_path, {"strategy": "zero3"}, fixed))
    assert "-zero3-virtual-8x-" in cell.id
    command = launch_command(cell, tmp_path)
    assert command[command.index("--num_processes") + 1] == "1"
    assert command[command.index("--virtual_world_size") + 1] == "8"
    with pytest.raises(UserError, match="does not divide over 8 ranks"):
        plan(write_suite(tmp_path, {"strategy": "zero3"}, {**fixed, "global_batch_size": 4}))


def test_a_number_written_as_1e_5_is_a_number(tmp_path):
    file = tmp_path / "suite.yaml"
    file.write_text(HEAD + "fixed: {scale: laptop, learning_rate: 1e-5}\ngrids: [{axes: {strategy: ddp}}]\n")
    assert plan(file)[0].config.learning_rate == 1e-5


def test_the_flags_of_a_cell_ask_for_exactly_that_run(tmp_path):
    fixed = {
        **TINY, "gradient_checkpointing": False, "dropout": -1,
        "engine_override": ["zero_optimization.sub_group_size=7"],
    }  # fmt: skip
    (cell,) = plan(write_suite(tmp_path, {"strategy": "zero3"}, fixed))
    asked = parse_command_line(cell.flags(tmp_path / "out dir"))
    assert asked.output_dir == str(tmp_path / "out dir")
    assert resolved(asked, False).run_id("zero3", 2) == cell.config.run_id("zero3", 2)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_suite_plans_on_every_box_that_meets_it(name):
    suite = read_suite(find_suite(name))
    assert suite.name == name
    box = Box((max(suite.requires.gpu_memory_gib, 16.0),) * max(suite.requires.gpus, 0), 4096.0)
    assert missing_here(suite, box) is None
    assert plan_cells(suite, box)


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "laptop"])
def test_every_suite_can_be_rehearsed_with_tiny_models_on_two_cores(name):
    suite = rehearsed(read_suite(find_suite(name)))
    assert suite.name == f"{name}-rehearsal"
    assert missing_here(suite, CPU_BOX) is None
    cells = plan_cells(suite, CPU_BOX)
    full = plan_cells(read_suite(find_suite(name)), box_with(8))
    for cell in cells:
        one = cell.first if isinstance(cell, Search) else cell
        config = one.config
        assert config.scale == "laptop"
        # One that hangs costs a rented box no more.
        assert one.time_limit_s <= 180
        assert config.model_name_or_path.startswith(("bert-tiny", "gpt-tiny"))
        assert (config.data, config.weights, config.device_memory_cap_gib) == ("builtin", "random", None)
        # A profile wants more steps, and is refused with fewer.
        assert 0 < config.max_steps <= (12 if config.profile_steps else 6)
        check_profiled_steps(config, config.max_steps)
    # What is launched is the same: every strategy by every trainer, and a search where there is one.
    assert {kind_of(cell) for cell in cells} == {kind_of(cell) for cell in full}


def kind_of(cell):
    one = cell.first if isinstance(cell, Search) else cell
    return one.arm, one.config.task, one.config.torch_compile, one.config.engine_override, getattr(cell, "axis", None)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_arm_of_a_suite_that_trains_can_be_judged_by_its_loss(name):
    """Without dropout step by step; with it, masks differ between arms, and only means over seeds can be compared."""
    alike = defaultdict(list)
    for cell in plan_cells(read_suite(find_suite(name)), box_with(8)):
        if not isinstance(cell, Search) and not cell.config.virtual_world_size:
            same = dataclasses.replace(cell.config, seed=0, dropout=0.0)
            alike[same, cell.world_size].append(cell)
    for cells in alike.values():
        seeds: dict[tuple[str, float], set[int]] = {(cell.strategy, cell.config.dropout): set() for cell in cells}
        for cell in cells:
            seeds[cell.strategy, cell.config.dropout].add(cell.config.seed)
        assert {strategy for strategy, _ in seeds} == {strategy for strategy, dropout in seeds if dropout == 0}
        assert all(len(of_it) >= 3 for (_, dropout), of_it in seeds.items() if dropout), seeds


@pytest.mark.parametrize("name", ["a100", "one_gpu_bert_epochs"])
def test_the_document_that_saw_another_loss_is_repeated_with_its_dropout(name):
    """S2-01: stage 3 on one GPU ends with a loss 1.2 % lower, with the dropout that the model has by itself."""
    cells = [cell for cell in plan_cells(read_suite(find_suite(name)), box_with(1)) if not isinstance(cell, Search)]
    own = {cell.strategy for cell in cells if cell.config.dropout == -1 and cell.config.num_train_epochs == 5}
    assert own == {"single", "zero3_cpu_optimizer"}


def estimated_minutes(name):
    cells = plan_cells(read_suite(find_suite(name)), box_with(1))
    seconds = sum(expected_s(cell, {}) for cell in cells if not isinstance(cell, Search))
    seconds += sum(PROBES_OF_A_SEARCH * expected_s(cell.first, {}) for cell in cells if isinstance(cell, Search))
    return round(seconds / 60)


def test_the_docs_say_what_each_rented_suite_takes_as_it_estimates_it():
    page = (ROOT / "docs" / "offline-gpu.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) min \|$", page, re.MULTILINE))
    assert set(rows) == {part.suite for part in read_suite(find_suite("one_gpu")).slices}
    assert {name: int(minutes) for name, minutes in rows.items()} == {name: estimated_minutes(name) for name in rows}


def test_the_laptop_suite_holds_both_tasks_under_every_strategy():
    cells = plan(find_suite("laptop"))
    assert {(cell.config.task, cell.strategy) for cell in cells} == {
        (task, strategy) for task in ("bert-imdb", "gpt-wikitext") for strategy in STUDIED_STRATEGIES
    }
    assert {cell.world_size for cell in cells if cell.strategy != "single"} == {2}
    seeds: dict[tuple[str, str], set[int]] = {}
    for cell in cells:
        seeds.setdefault((cell.config.task, cell.strategy), set()).add(cell.config.seed)
    compared_in_time = [seeds[task, arm] for task, arm in seeds if arm in ("ddp", "zero1", "zero2", "zero3")]
    assert compared_in_time == [{42, 43, 44}] * 8
    assert {cell.repeat for cell in cells if cell.strategy == "ddp"} == {1, 2}


def test_a_box_that_lacks_what_the_suite_needs_is_told_so():
    missing = missing_here(read_suite(find_suite("h100x8")), box_with(1))
    assert missing is not None
    assert "needs 8 GPUs, and this box shows 1" in missing.problem


def test_the_user_may_say_how_much_memory_a_box_that_grows_will_have(monkeypatch):
    monkeypatch.setenv("ZERO_STUDY_HOST_MEMORY_GIB", "2048")
    assert this_box().host_memory_gib == 2048
    assert host_memory().available_gib == 2048
    monkeypatch.setenv("ZERO_STUDY_HOST_MEMORY_GIB", "much")
    with pytest.raises(UserError, match="HOST_MEMORY_GIB is 'much'"):
        this_box()


def test_a_driver_that_names_no_processes_ends_no_sweep(monkeypatch):
    # Asked without nvmlInit, or of no GPU, NVML itself refuses.
    monkeypatch.setattr("study.host.box.visible_gpus", lambda: [None])
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlDeviceGetComputeRunningProcesses(None)
    assert gpu_processes() == []


@pytest.mark.parametrize(
    ("visible", "gpus"), [("0,1", ["0", "1"]), ("", []), ("1,-1,0", ["1"]), ("-1", []), ("GPU-ab, 3", ["GPU-ab", "3"])]
)
def test_the_gpus_counted_are_those_a_run_would_see(monkeypatch, visible, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _visible() == gpus


def test_a_dry_run_prints_one_command_per_cell_and_writes_nothing(tmp_path, capsys):
    file = write_suite(tmp_path, {"strategy": "all"})
    assert cli.main(["run", str(file), "--runs-dir", str(tmp_path / "runs"), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(STUDIED_STRATEGIES)
    for line in lines:
        words = shlex.split(line)
        assert words[1:3] == ["launch", "--config_file"]
        assert "study/train.py" in words
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["walk"], ["run"], ["run", "no-such-suite"], ["run", "laptop", "--time-budget", "soon"],
        ["run", "laptop", "--only", "nothing-like-this"], ["status", "laptop", "--flag"],
    ],
)  # fmt: skip
def test_a_wrong_request_ends_in_one_line_and_status_2(capsys, arguments):
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert "To fix it: " in said


@pytest.mark.parametrize(("text", "seconds"), [("9m", 540), ("90s", 90), ("90", 90), ("1h30m", 5400), ("2h", 7200)])
def test_a_time_budget_is_read_as_people_write_it(text, seconds):
    assert duration(text) == seconds


def test_the_weights_of_a_suite_are_drawn_once_for_each_model_and_seed_it_may_come_by(tmp_path, monkeypatch, capfd):
    cache = tmp_path / "cache"
    monkeypatch.setenv("ZERO_STUDY_CACHE", str(cache))
    file = write_suite(tmp_path, {"strategy": ["single", "zero3"], "precision": ["fp32", "bf16"]})
    document = yaml.safe_load(file.read_text())
    document["grids"].append(
        {"axes": {"strategy": "single"}, "search": {"largest_model": ["gpt-tiny-1layers", "gpt-tiny"]}}
    )
    file.write_text(yaml.safe_dump(document))
    assert cli.main(["weights", str(file)]) == 0
    folders = sorted(folder.name for folder in (cache / "initial_weights").iterdir() if folder.is_dir())
    assert [re.sub(r"-[0-9a-f]{12}$", "", name) for name in folders] == [
        "gpt-wikitext-gpt-tiny-1layers-random-seed42", "gpt-wikitext-gpt-tiny-random-seed42"
    ]  # fmt: skip
    assert len([line for line in capfd.readouterr().out.splitlines() if line.startswith("gpt-tiny")]) == 2


def test_a_suite_of_virtual_ranks_starts_from_no_weights(tmp_path, capsys):
    fixed = {**TINY, "virtual_world_size": 4, "world_size": 1}
    assert cli.main(["weights", str(write_suite(tmp_path, {"strategy": "zero3"}, fixed))]) == 0
    assert "no cell that tiny would run now starts from weights" in capsys.readouterr().out


def test_a_rehearsal_has_the_cells_that_rules_for_the_large_box_leave(tmp_path):
    axes = {"strategy": ["ddp", "zero2"], "device_memory_cap_gib": [16, 40], "seed": [41, 42]}
    rules = [{"device_memory_cap_gib": 16, "strategy": "ddp"}, {"seed": 41}]
    override = {"where": {"device_memory_cap_gib": 16}, "fixed": {"gradient_checkpointing": True}}
    fixed = {**TINY, "train_samples": None}
    file = write_suite(tmp_path, axes, fixed, exclude=rules, overrides=[override])
    cells = plan_cells(rehearsed(read_suite(file)), CPU_BOX)
    assert [cell.id.split("-")[4] for cell in cells] == ["ddp", "zero2"]


@pytest.mark.parametrize("fixed", [{"stack": ["today"]}, {"stack": {"a": "b"}}])
def test_a_stack_that_is_no_word_is_refused(fixed, tmp_path):
    with pytest.raises(UserError, match="stack"):
        read_suite(write_suite(tmp_path, {"strategy": ["ddp"]}, {**TINY, **fixed}))


def test_a_damaged_record_tells_no_time_and_a_narrow_terminal_is_written_to(tmp_path):
    damaged = tmp_path / "语" / "laptop" / "cell"
    damaged.mkdir(parents=True)
    (damaged / "config.json").write_text("{}")
    attempt = {"state": "ok", "wall_s": "long"}
    (damaged / "sweep.json").write_text(json.dumps({"strategy": "ddp", "world_size": 2, "attempts": [attempt]}))
    command = [sys.executable, "-m", "study.cli", "run", "laptop", "--dry-run", "--runs-dir", str(tmp_path / "语")]
    narrow = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=ROOT, env=narrow, capture_output=True, encoding="latin-1")
    assert done.returncode == 0, done.stderr
    assert r"\u8bed" in done.stdout
