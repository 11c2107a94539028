from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import forked
from engines import print_screen
from study import cli
from study.config.errors import UserError
from study.config.flags import parse_command_line, resolve_config
from study.config.strategies import STUDIED_STRATEGIES
from study.host.machine import Machine
from study.metrics.profiling import check_profiled_steps
from study.sweep.cell import launch_command
from study.sweep.command import duration
from study.sweep.forecast import pending_items
from study.sweep.plan import missing_requirement, plan_cells, plan_suite, runs_left_out
from study.sweep.search import Search
from study.sweep.suite_file import find_suite, read_suite, shrink_suite
from study.workloads.initial import materialize_initial_weights
from sweeps import ROOT, TINY, shipped, write_suite

CPU_BOX = Machine((), 16.0)
SHIPPED = [name for name, suite in shipped().items() if not suite.slices]


def box_with(gpus: int) -> Machine:
    return Machine((80.0,) * gpus, 1024.0)


def plan(file, box=CPU_BOX, only=()):
    (part,) = plan_suite(str(file), box, Path("runs"), only).slices
    return part.cells


HEAD = "name: x\ndescription: y\n"
WRONG_SUITES = yaml.safe_load((ROOT / "tests" / "data" / "wrong_suites.yaml").read_text())


@pytest.mark.parametrize(("says", "line", "text"), WRONG_SUITES)
def test_a_mistake_in_a_suite_is_refused_with_file_and_line(tmp_path, says, line, text):
    file = tmp_path / "suite.yaml"
    file.write_text(HEAD + text)
    with pytest.raises(UserError) as refusal:
        read_suite(file)
    assert f"{file}:{line}" in refusal.value.problem
    assert says in refusal.value.problem


BILLION = "".join(f"  - &a{n + 1} [*a{n}, *a{n}, *a{n}, *a{n}]\n" for n in range(15))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", r"suite\.yaml"),
        ("a: !!python/object:os.system {}\n", r"suite\.yaml"),
        ("name: a/b\ndescription: y\ngrids: []", "name is 'a/b'"),
        ("", r"suite\.yaml: expected a mapping, got nothing -> .*grids, name"),
        ("loss: 0.7\n" * 110_000, "has more than 1,048,576 bytes"),
        (f"{HEAD}grids:\n  - &a0 [x, x]\n{BILLION}", "has more than 20000 values after its aliases are expanded"),
        (f"{HEAD}grids: &itself [*itself]\n", "recursive"),
    ],
    ids=lambda text: text[:9],
)
def test_a_file_that_is_not_a_suite_is_refused(tmp_path, text, says):
    file = tmp_path / "suite.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        read_suite(file)


WRONG_PLANS = yaml.safe_load((ROOT / "tests" / "data" / "wrong_plans.yaml").read_text())


@pytest.mark.parametrize(("says", "cell", "rules"), WRONG_PLANS)
def test_rules_that_match_no_run_and_cells_that_cannot_run_are_refused_before_any_run(tmp_path, says, cell, rules):
    axes = {"strategy": [cell.get("strategy", "zero2")], "dropout": [0.0, 0.1]}
    fixed = {key: value for key, value in cell.items() if key != "strategy"}
    with pytest.raises(UserError, match=says):
        plan(write_suite(tmp_path, axes, TINY | fixed, **rules))


def test_every_combination_but_the_excluded_ones_is_a_cell_with_the_overrides_that_match(tmp_path):
    file = write_suite(
        tmp_path,
        {"strategy": ["ddp", "zero3"], "seed": [1, 2], "dropout": [0.0, 0.1]},
        exclude=[{"strategy": "ddp", "dropout": 0.1, "seed": [1, 2]}],
        overrides=[{"where": {"strategy": "zero3"}, "fixed": {"max_steps": 7, "time_limit_s": 9}}],
    )
    cells = plan(file)
    assert len({cell.id for cell in cells}) == 6
    assert Counter(
        (cell.strategy, cell.config.dropout, cell.config.max_steps, cell.time_limit_s) for cell in cells
    ) == {("ddp", 0.0, 2, 540.0): 2, ("zero3", 0.0, 7, 9.0): 2, ("zero3", 0.1, 7, 9.0): 2}


@pytest.mark.parametrize(("box", "expected"), [(CPU_BOX, 2), (box_with(1), 1), (box_with(4), 4)])
def test_the_world_follows_the_box_unless_the_suite_fixes_it_and_single_is_one_rank(tmp_path, box, expected):
    file = write_suite(tmp_path, {"strategy": ["single", "zero1"]})
    assert {cell.strategy: cell.world_size for cell in plan(file, box)} == {"single": 1, "zero1": expected}
    file = write_suite(tmp_path, {"strategy": ["single", "zero1"], "world_size": [2, 4]})
    worlds = sorted((cell.strategy, cell.world_size) for cell in plan(file, box))
    assert worlds == [("single", 1), ("zero1", 2), ("zero1", 4)]


def test_each_repeat_and_seed_is_a_block_with_every_strategy_once_in_random_order(tmp_path):
    strategies = ["single", "ddp", "zero1", "zero2", "zero3", "fsdp2"]
    file = write_suite(tmp_path, {"strategy": strategies, "seed": [1, 2]}, repeats=3)
    cells = plan(file)
    blocks = [cells[start : start + len(strategies)] for start in range(0, len(cells), len(strategies))]
    places = [{(cell.repeat, cell.config.seed) for cell in block} for block in blocks]
    assert places == [{(repeat, seed)} for repeat in (1, 2, 3) for seed in (1, 2)]
    orders = [tuple(cell.strategy for cell in block) for block in blocks]
    assert all(sorted(order) == sorted(strategies) for order in orders)
    assert len(set(orders)) > 1
    assert plan(file) == cells
    file.write_text(file.read_text() + "order_seed: 1\n")
    before, after = ([cell.id for cell in planned] for planned in (cells, plan(file)))
    assert (before == after, sorted(before) == sorted(after)) == (False, True)


def test_only_keeps_the_order_and_accepts_ids_and_a_flag_s_values(tmp_path):
    axes = {"strategy": ["ddp", "zero3", "zero3_cpu"], "seed": [1, 2], "precision": ["fp32", "bf16"]}
    file = write_suite(tmp_path, axes, repeats=2)
    assert plan(file, only=["*-zero3*"]) == [cell for cell in plan(file) if "-zero3" in cell.id]
    chosen = plan(file, only=["seed=2", "strategy=zero3*", "repeat=1", "precision=BF16"])
    assert [(cell.config.seed, cell.repeat, cell.config.precision) for cell in chosen] == [(2, 1, "bf16")] * 2
    assert {cell.strategy for cell in chosen} == {"zero3", "zero3_cpu"}
    wrong = {("sead=2",): "no run has a sead", ("*-ddp-*", "seed=3"): "--only seed=3 matches no cell"}
    for only, says in wrong.items():
        with pytest.raises(UserError, match=says):
            plan(file, only=only)


def test_a_virtual_rank_is_launched_alone_and_divides_its_batch_over_the_ranks_it_stands_for(tmp_path):
    fixed = {**TINY, "virtual_world_size": 8, "world_size": 1, "global_batch_size": 16}
    (cell,) = plan(write_suite(tmp_path, {"strategy": "zero3"}, fixed))
    assert "-zero3-virtual-8x-" in cell.id
    command = launch_command(cell, tmp_path)
    assert command[command.index("--num_processes") + 1] == "1"
    assert command[command.index("--virtual_world_size") + 1] == "8"


def test_each_trainer_has_its_own_script_and_the_flags_of_a_cell_ask_for_exactly_that_run(tmp_path):
    trainers = {
        "study": "train.py",
        "hf_trainer": "experiments/baselines/hf_trainer.py",
        "bare_loop": "experiments/baselines/bare_loop.py",
    }
    cells = plan(write_suite(tmp_path, {"strategy": "single", "trainer": list(trainers)}))
    assert len({cell.id for cell in cells}) == 3
    for cell in cells:
        assert f"study/{trainers[cell.trainer]}" in launch_command(cell, tmp_path)
    fixed = {
        **TINY,
        "gradient_checkpointing": False,
        "dropout": -1,
        "learning_rate": "1e-5",
        "engine_override": ["zero_optimization.sub_group_size=7"],
    }
    (cell,) = plan(write_suite(tmp_path, {"strategy": "zero3"}, fixed))
    config = parse_command_line(cell.flags(tmp_path / "out dir"))
    assert config.output_dir == str(tmp_path / "out dir")
    assert resolve_config(config, False).run_id("zero3", 2) == cell.config.run_id("zero3", 2)


def launch_kind(cell):
    first = cell.first if isinstance(cell, Search) else cell
    config = first.config
    return first.arm, config.task, config.torch_compile, config.engine_override, getattr(cell, "axis", None)


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "laptop"])
def test_every_suite_can_be_rehearsed_with_tiny_models_on_two_cores(name):
    suite = shrink_suite(shipped()[name])
    assert suite.name == f"{name}-rehearsal"
    assert missing_requirement(suite, CPU_BOX) is None
    cells = plan_cells(suite, CPU_BOX)
    for first in (cell.first if isinstance(cell, Search) else cell for cell in cells):
        config = first.config
        # A hanging cell costs at most this much rented time.
        assert (config.scale, first.time_limit_s <= 180) == ("laptop", True)
        assert config.model_name_or_path.startswith(("bert-tiny", "gpt-tiny"))
        assert (config.data, config.weights, config.device_memory_cap_gib) == ("builtin", "random", None)
        # A profile needs more steps, and is rejected with fewer.
        assert 0 < config.max_steps <= (12 if config.profile_steps else 6)
        check_profiled_steps(config, config.max_steps)
    # Each probe is a launch.
    assert {len(search.rungs) for search in cells if isinstance(search, Search)} <= {2}
    # The rehearsal launches the same: every strategy with every trainer, and every search.
    full = plan_cells(shipped()[name], box_with(8))
    assert {launch_kind(cell) for cell in cells} == {launch_kind(cell) for cell in full}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_arm_of_a_suite_that_trains_can_be_judged_by_its_loss(name):
    """Masks differ between strategies with dropout, so only means over seeds are comparable."""
    seeds = defaultdict(set)
    for cell in plan_cells(shipped()[name], box_with(8)):
        if not isinstance(cell, Search) and not cell.config.virtual_world_size:
            workload = dataclasses.replace(cell.config, seed=0, dropout=0.0), cell.world_size, cell.strategy
            seeds[workload, cell.config.dropout].add(cell.config.seed)
    for (workload, dropout), seeds_of_arm in list(seeds.items()):
        assert not dropout or (len(seeds_of_arm) >= 3 and (workload, 0.0) in seeds), workload


def test_suites_have_the_cells_that_claims_rest_on():
    accumulations, seeds = defaultdict(set), defaultdict(set)
    for cell in plan(find_suite("equivalence")):
        accumulations[cell.config.task, cell.strategy].add(cell.plan.gradient_accumulation_steps)
    for cell in plan(find_suite("laptop")):
        seeds[cell.config.task, cell.strategy].add(cell.config.seed)
        assert cell.world_size == (1 if cell.strategy == "single" else 2)
    pairs = {(task, strategy) for task in ("bert-imdb", "gpt-wikitext") for strategy in STUDIED_STRATEGIES}
    assert accumulations == {key: {1, 2, 4} for key in pairs}
    assert seeds.keys() == pairs
    timed = ("ddp", "zero1", "zero2", "zero3")
    assert all(values == {42, 43, 44} for (_, strategy), values in seeds.items() if strategy in timed)


def test_the_docs_state_the_estimated_minutes_of_each_rented_suite(tmp_path):
    page = (ROOT / "docs" / "gpus.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) min \|$", page, re.MULTILINE))
    assert set(rows) == {part.suite for part in read_suite(find_suite("one_gpu")).slices}
    for name, minutes in rows.items():
        remaining = pending_items(plan_cells(read_suite(find_suite(name)), box_with(1)), tmp_path)
        assert int(minutes) == round(sum(seconds for _, seconds in remaining) / 60), name


def test_a_dry_run_prints_one_command_per_cell_and_writes_nothing(tmp_path, capsys, monkeypatch):
    file, runs = write_suite(tmp_path, {"strategy": "all"}), str(tmp_path / "runs")
    assert cli.main(["run", str(file), "--runs_dir", runs, "--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(STUDIED_STRATEGIES)
    assert all(re.match(r"\S+ launch --config_file .* study/train\.py ", line) for line in lines)
    screen = print_screen(f"run one_gpu_bert --dry_run --runs_dir {runs}", monkeypatch)
    assert (len(screen) <= 25, max(map(len, screen)) <= 120) == (True, True)
    assert "and 36 more; --details prints all" in screen
    # With a time budget it has the cells that would start.
    assert cli.main(["run", "one_gpu", "--dry_run", "--time_budget", "9m", "--runs_dir", runs]) == 0
    out, err = capsys.readouterr()
    ((starts, total),) = re.findall(r"^# within 9m00s (\d+) of (\d+) would start: ", err, re.MULTILINE)
    assert 0 < out.count(" launch ") == int(starts) < int(total)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("text", "seconds"), [("9m", 540), ("90s", 90), ("90", 90), ("1h30m", 5400), ("2h", 7200)])
def test_a_time_budget_is_read_as_people_write_it(text, seconds):
    assert duration(text) == seconds


def test_the_weights_of_a_suite_are_drawn_once_for_each_model_and_seed_it_may_come_by(tmp_path, monkeypatch, capfd):
    cache = tmp_path / "cache"
    monkeypatch.setenv("ZERO_STUDY_CACHE", str(cache))
    monkeypatch.setattr("study.sweep.command.subprocess", SimpleNamespace(run=forked.run_module))
    file = write_suite(tmp_path, {"strategy": ["single", "zero3"], "precision": ["fp32", "bf16"]})
    searched = {"axes": {"strategy": "single"}, "search": {"largest_model": ["gpt-tiny-1layers", "gpt-tiny"]}}
    document = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(document | {"grids": [*document["grids"], searched]}))
    assert cli.main(["weights", str(file)]) == 0
    folders = sorted(folder.name for folder in (cache / "initial_weights").iterdir() if folder.is_dir())
    assert [re.sub(r"-[0-9a-f]{12}$", "", name) for name in folders] == [
        "gpt-wikitext-gpt-tiny-1layers-random-seed42",
        "gpt-wikitext-gpt-tiny-random-seed42",
    ]
    assert len([line for line in capfd.readouterr().out.splitlines() if line.startswith("gpt-tiny")]) == 2
    # Each run starts from them.
    configs = [cell.config for cell in plan(file) if not isinstance(cell, Search)]
    assert {materialize_initial_weights(config, cache).path.name for config in configs} == {folders[1]}


def test_a_machine_with_too_little_memory_leaves_a_grid_out_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    small = "grids:\n  - fixed: {task: gpt-wikitext}\n    axes: {strategy: [single, ddp]}\n"
    large = "  - requires: {host_memory_gib: 12}\n    fixed: {task: gpt-wikitext, model_name_or_path: gpt2}\n"
    large += "    axes: {strategy: [ddp, zero1, zero2]}\n"
    file.write_text(HEAD + small + large)
    suite = read_suite(file)
    assert len(plan_cells(suite, Machine((), 12.0))) == 5
    assert runs_left_out(suite, Machine((), 12.0)) is None
    little = Machine((), 7.5)
    assert len(plan_cells(suite, little)) == 2
    assert runs_left_out(suite, little) == "3 runs of gpt2 need 12 GiB of host memory, and here are 8: left out"
    # In a rehearsal the models are small, and both runs of ddp are one.
    assert len(plan_cells(shrink_suite(suite), little)) == 4
    file.write_text(HEAD + "grids:\n" + large)
    with pytest.raises(UserError, match="x needs 12 GiB of host memory, and here are 8"):
        plan_cells(read_suite(file), little)
    file.write_text(HEAD + "grids:\n" + large.replace("host_memory_gib", "gpus"))
    with pytest.raises(UserError, match="gpus"):
        read_suite(file)
