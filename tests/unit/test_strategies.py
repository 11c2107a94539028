from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from engines import ROOT
from runs import default_ranks, write_strategy
from study.config import strategies
from study.config.errors import Unsupported, UserError
from study.config.flags import RunConfig, resolve_config
from study.config.launch_context import Launch, read_launch
from study.config.strategies import STRATEGY_NAMES, WITH_REPLICAS, Strategy, read_strategy, read_yaml
from study.config.strategy_names import SHIPPED
from study.run.checks import check_nvme_swap, enlarge_swap_buffers

DIRECTORY = ROOT / "accelerate_configs"
# Meaning of each name: ZeRO stage, place of the optimizer's state, place of the parameters.
STRATEGIES: dict[str, tuple[int | None, str | None, str | None]] = {
    "single": (None, None, None), "ddp": (None, None, None), "fsdp2": (None, None, None),
    "hsdp": (None, None, None), "zero3_hpz": (3, None, None), "tp": (None, None, None), "cp": (None, None, None),
    "ulysses_zero1": (1, None, None), "ulysses_zero2": (2, None, None), "ulysses_zero3": (3, None, None),
    "zero1_tp": (1, None, None), "zero2_tp": (2, None, None), "zero3_tp": (3, None, None),
    "zero0": (0, None, None), "zero1": (1, None, None), "zero2": (2, None, None), "zero3": (3, None, None),
    "zero2_cpu": (2, "cpu", None), "zero3_cpu_optimizer": (3, "cpu", None), "zero3_cpu": (3, "cpu", "cpu"),
    "zero3_nvme_optimizer": (3, "nvme", None), "zero3_nvme": (3, "nvme", "nvme"), "zero3_cpu_nvme": (3, "cpu", "nvme"),
}  # fmt: skip
WITH_DEEPSPEED = [name for name, (stage, _, _) in STRATEGIES.items() if stage is not None]


def test_the_directory_holds_the_strategies_and_nothing_else_and_its_readme_describes_each() -> None:
    assert {file.stem for file in DIRECTORY.glob("*.yaml")} == set(STRATEGIES) == set(STRATEGY_NAMES)
    assert {file.stem for file in (DIRECTORY / "deepspeed").iterdir()} == set(WITH_DEEPSPEED)
    rows = [line.split("`")[1] for line in (DIRECTORY / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert rows == [f"{name}.yaml" for name in STRATEGY_NAMES]
    # `strategy: all` of a suite.
    assert set(STRATEGY_NAMES) >= {*strategies.STUDIED_STRATEGIES, *WITH_REPLICAS, *strategies.WITH_GROUPS}
    assert len(strategies.STUDIED_STRATEGIES) == 13


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_file_has_the_shared_values_and_those_of_its_name_and_both_libraries_take_them(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    strategy = read_strategy(name)
    places = (strategy.offload_device("optimizer"), strategy.offload_device("param"))
    assert (strategy.name, strategy.zero_stage, *places) == (name, *STRATEGIES[name])
    assert strategy.uses_nvme is ("nvme" in name)
    loaded = load_config_from_file(str(DIRECTORY / f"{name}.yaml"))
    assert (loaded.distributed_type.value, loaded.num_processes) == (strategy.distributed_type, default_ranks(name))
    own = {"distributed_type", "num_processes", "deepspeed_config", "fsdp_config", "parallelism_config"}
    documents = (read_yaml(DIRECTORY / f"{file}.yaml") for file in (name, "ddp"))
    shared, of_ddp = ({key: value for key, value in each.items() if key not in own} for each in documents)
    assert shared == of_ddp
    if name not in WITH_DEEPSPEED:
        return
    stage = strategy.zero_stage
    settings, base = (
        strategies.read_deepspeed_json(DIRECTORY / "deepspeed" / f"{file}.json")
        for file in (name, f"zero{1 if name == f'zero{stage}' else stage}")
    )
    section, stage_section = settings.pop("zero_optimization"), base.pop("zero_optimization")
    assert settings.keys() - base.keys() <= {"aio", "tensor_parallel"}
    assert as_text({key: settings[key] for key in base}) == as_text(base)
    implied = {f"offload_{what}" for what, place in zip(("optimizer", "param"), places, strict=True) if place}
    implied |= {"zero_hpz_partition_size"} if name == "zero3_hpz" else set()
    # A parameter from NVMe occupies one of few swap buffers until its release, so none may stay for its next use.
    implied |= {"stage3_max_reuse_distance"} if places[1] == "nvme" else set()
    changed = {
        key for key in {*section, *stage_section} if as_text(section.get(key)) != as_text(stage_section.get(key))
    }
    changed -= {"stage"}
    if stage != stage_section["stage"]:
        changed = {key for key in changed if not key.startswith("stage3_")} - {"sub_group_size", "overlap_comm"}
    assert changed == implied
    understood = DeepSpeedZeroConfig(**section).model_dump(mode="json", by_alias=True)
    for key, value in section.items():
        # DeepSpeed adds more keys to a section.
        assert understood[key].items() >= value.items() if isinstance(value, dict) else understood[key] == value, key
    with pytest.raises(ValueError, match="not_a_key"):
        DeepSpeedZeroConfig(**section, not_a_key=1)


def as_text(value: Any) -> str:
    """Return the value as JSON, in which True is not 1 and 5e8 not an integer."""
    return json.dumps(value, sort_keys=True)


def test_a_rank_on_the_second_machine_is_main_only_there_and_without_a_launcher_it_is_single() -> None:
    second = read_launch({"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    assert (second.strategy.name, second.is_main, second.local_rank) == ("ddp", False, 0)
    assert read_launch({}) == Launch(Strategy("single", "NO"), 1, 0, 0, 1)


def launched_with(file: Path) -> Strategy:
    return read_launch({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}).strategy


def write_variant(folder: Path, name: str, shipped: str, **zero: Any) -> Path:
    """Write a shipped DeepSpeed JSON under another name, with changed keys of its zero_optimization."""
    settings = json.loads((DIRECTORY / "deepspeed" / f"{shipped}.json").read_text())
    settings["zero_optimization"] |= zero
    file = folder / f"{name}.json"
    file.write_text(json.dumps(settings))
    return file


@pytest.mark.parametrize(
    ("name", "shipped", "zero", "run"),
    [
        ("zero3", "zero1", {}, "zero1"),
        ("mine", "zero2", {"reduce_bucket_size": 5e8}, "zero2"),
        ("zero3_fast", "zero2", {"reduce_bucket_size": 7}, r"zero2-custom-[0-9a-f]{8}"),
        ("zero3_fast", "zero3", {"reduce_bucket_size": 7}, r"zero3_fast-[0-9a-f]{8}"),
        ("ddp", "zero3", {"overlap_comm": False}, r"zero3-custom-[0-9a-f]{8}"),
    ],
)
def test_a_run_is_named_after_the_settings_of_its_file_and_not_after_the_file(name, shipped, zero, run, tmp_path):
    strategy = launched_with(write_variant(tmp_path, name, shipped, **zero))
    assert re.fullmatch(run, strategy.name)
    assert strategy.zero_stage == STRATEGIES[shipped][0]
    assert (strategy.custom_settings is None) == (strategy.name in STRATEGY_NAMES)
    if strategy.custom_settings:
        assert strategy.custom_settings["zero_optimization"].items() >= zero.items()
        # Two versions of one file have two names.
        renamed = launched_with(write_variant(tmp_path, name, shipped, **zero, sub_group_size=8))
        assert renamed.name != strategy.name


def test_an_offload_that_swaps_nothing_and_buffers_that_nothing_fits_in_are_refused_before_the_run() -> None:
    for size, problem in ((0, "of zero3_nvme is 0"), (1000, "below the 1,048,576 elements of the largest parameter")):
        config = RunConfig(engine_override=(f"zero_optimization.offload_param.buffer_size={size}",))
        with pytest.raises(UserError, match=rf"buffer_size .*{problem}"):
            enlarge_swap_buffers(resolve_config(config, False), Launch(read_strategy("zero3_nvme"), 1, 0, 0, 1))
    config = resolve_config(RunConfig(task="gpt-wikitext", scale="laptop"), accelerator_visible=False)
    for name, what in (("zero3_cpu_nvme", "parameters"), ("zero3_nvme_optimizer", "optimizer")):
        strategy = read_strategy(name)
        check_nvme_swap(config, strategy, 2)
        ranks = 8 if what == "parameters" else 64
        with pytest.raises(Unsupported, match=f"{name} would swap no {what} of gpt-tiny on {ranks} ranks"):
            check_nvme_swap(config, strategy, ranks)
    # 16-bit weights are half as large.
    half = dataclasses.replace(config, precision="bf16-engine")
    with pytest.raises(Unsupported, match="no parameters of gpt-tiny on 4 ranks: DeepSpeed keeps shards under 1 MiB"):
        check_nvme_swap(half, read_strategy("zero3_nvme"), 4)


@pytest.mark.parametrize(
    ("shipped", "section", "key", "value"),
    [
        ("fsdp2", "fsdp_config", "fsdp_version", 2),
        ("fsdp2", "fsdp_config", "fsdp_auto_wrap_policy", "NO_WRAP"),
        ("zero3", "deepspeed_config", "zero3_init_flag", False),
        ("hsdp", "parallelism_config", "parallelism_config_dp_replicate_size", 4),
    ],
)
def test_a_changed_accelerate_file_has_another_name_than_the_shipped_one(shipped, section, key, value, tmp_path):
    """Accelerate's launcher passes the file on."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    strategy = write_strategy(tmp_path, shipped, shipped, section, **{key: value})
    words = ["--config_file", f"{strategy}.yaml", "--num_processes", "1", "study/train.py"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, variables = prepare_deepspeed_cmd_env(arguments)
    else:
        variables = prepare_multi_gpu_env(arguments)
    name = read_launch(variables).strategy.name
    assert re.fullmatch(shipped if key == "fsdp_version" else rf"{shipped}-custom-[0-9a-f]{{8}}", name)


def test_a_strategy_whose_shipped_file_was_changed_is_refused_by_name(tmp_path, monkeypatch):
    shutil.copytree(DIRECTORY, tmp_path / "accelerate_configs")
    monkeypatch.setattr("study.config.strategies.REPOSITORY", tmp_path)
    monkeypatch.setattr("study.config.strategies.STRATEGY_DIRECTORY", tmp_path / "accelerate_configs")
    assert read_strategy("zero3").zero_stage == 3
    write_variant(tmp_path / "accelerate_configs" / "deepspeed", "zero3", "zero3", reduce_bucket_size=7)
    write_strategy(tmp_path / "accelerate_configs", "fsdp2", "fsdp2", "fsdp_config", fsdp_offload_params=True)
    for name in ("zero3", "fsdp2"):
        with pytest.raises(UserError, match=f"the files of {name} in"):
            read_strategy(name)
    assert read_strategy("zero2").zero_stage == 2


def test_the_json_of_a_strategy_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("zero2", "zero3_cpu"):
        file = read_yaml(DIRECTORY / f"{name}.yaml")["deepspeed_config"]["deepspeed_config_file"]
        assert launched_with(Path(file)).name == name


def test_the_table_of_shipped_settings_is_that_of_the_files() -> None:
    names = {name: strategies.exported_variables(read_yaml(DIRECTORY / f"{name}.yaml")) for name in SHIPPED}
    # A name that is not that of its file ends with the new digest.
    assert {name: strategies.launched_strategy(exported, True).name for name, exported in names.items()} == {
        name: name for name in {*STRATEGY_NAMES} - {"single", "ddp"}
    }


def test_a_deepspeed_json_that_asks_for_no_strategy_or_can_name_no_run_is_refused(tmp_path: Path) -> None:
    for text, words in (
        ("", "JSON"),
        ("[]", "no ZeRO stage"),
        ('{"zero_optimization": {"stage": 3, "offload_param": "cpu"}}', "offload_param"),
        ('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "tape"}}}', "offload_optimizer"),
    ):
        (tmp_path / "mine.json").write_text(text)
        with pytest.raises(UserError, match=words):
            launched_with(tmp_path / "mine.json")
    for name in ("my file", "..", "x" * 41, "zürich"):
        with pytest.raises(UserError, match="would be named after"):
            launched_with(write_variant(tmp_path, name, "zero3", reduce_bucket_size=7))


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
HSDP = FSDP2 | {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed_config_file"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "not/there.json"}, "not/there.json"),
        (FSDP2 | {"FSDP_VERSION": "1"}, "FSDP version 1"),
        (FSDP2 | {"FSDP_RESHARD_AFTER_FORWARD": "full_shard"}, "fsdp_reshard_after_forward"),
        # As `accelerate launch` exports a SIZE_BASED_WRAP config without a size.
        (
            FSDP2 | {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "100000000.0"},
            "no whole fsdp_min_num_params",
        ),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config"),
        (HSDP | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1"}, "parallelism_config of one replica"),
        (HSDP | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "-1"}, "dp_shard_size: -1"),
        (HSDP | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size: 2"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "megatron_lm"),
    ],
)
def test_a_launch_that_is_none_of_the_study_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_launch(environment)


@pytest.mark.parametrize("name", WITH_REPLICAS)
@pytest.mark.parametrize(
    ("world_size", "per_machine", "per_replica"),
    # Half of one machine; each machine; half of all if machines have one rank or do not divide the job evenly.
    [(4, 4, 2), (8, 8, 4), (16, 8, 8), (32, 8, 8), (4, 1, 2), (12, 8, 6)],
)
def test_a_copy_stays_on_its_machine(name: str, world_size: int, per_machine: int, per_replica: int) -> None:
    launch = Launch(read_strategy(name), world_size, 0, 0, per_machine)
    assert launch.ranks_per_replica(launch.strategy) == per_replica


def test_explicit_groups_are_not_fitted_to_the_machines(tmp_path: Path) -> None:
    config = RunConfig(engine_override=("zero_optimization.zero_hpz_partition_size=2",))
    hpz, zero3 = read_strategy("zero3_hpz").with_overrides(config), read_strategy("zero3")
    custom = launched_with(write_variant(tmp_path, "mine", "zero3_hpz", zero_hpz_partition_size=4))
    for strategy, ranks in ((hpz, 2), (custom, 4), (zero3, None)):
        assert Launch(strategy, 16, 0, 0, 8).ranks_per_replica(strategy) == ranks, strategy.name
