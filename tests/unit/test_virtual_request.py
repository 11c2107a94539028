"""Requests of `study virtual`, and its refusals before the first rank starts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from study.config.flags import RunConfig, check_virtual_run_flags, resolve_config
from study.config.launch_context import Launch
from study.config.strategies import read_strategy
from study.engine.virtual_rank import needed_host_bytes
from study.host.machine import Machine
from study.metrics.clock import MIN_WARMUP_STEPS
from study.virtual.command import VirtualRequest, _with_absolute_paths, add_arguments, read_request
from study.workloads.architecture import model_size

NO_GPU = Machine((), 16)
ZERO3 = ("--strategy", "zero3", "--world_size", "4")


def test_a_gpus_step_time_is_of_steps_after_the_warm_up_and_the_watched_one() -> None:
    config = RunConfig(virtual_world_size=8, scale="laptop")
    assert resolve_config(config, accelerator_visible=True).max_steps > MIN_WARMUP_STEPS + 1
    # Without a GPU no time is measured, and three steps are the fewest whose last one is like all later ones.
    shortest = resolve_config(config, accelerator_visible=False)
    assert shortest.max_steps == 3
    check_virtual_run_flags(shortest)
    epoch = RunConfig(virtual_world_size=4, max_steps=0, num_train_epochs=1, train_samples=12, global_batch_size=4)
    check_virtual_run_flags(resolve_config(epoch, accelerator_visible=False))


def test_a_relative_path_starts_where_the_command_was_typed_and_a_preset_is_not_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mymodel", "mydata", "builtin", "reviews", "gpt-tiny"):
        (tmp_path / name).mkdir()
    config = RunConfig(model_name_or_path="./mymodel", data="mydata", nvme_path="nvme", tokenizer_name="some/hub-id")
    absolute = _with_absolute_paths(config)
    assert (absolute.model_name_or_path, absolute.data) == (str(tmp_path / "mymodel"), str(tmp_path / "mydata"))
    assert (absolute.nvme_path, absolute.tokenizer_name) == (str(tmp_path / "nvme"), "some/hub-id")
    for config in (RunConfig(data="builtin"), RunConfig(data="reviews"), RunConfig(model_name_or_path="gpt-tiny")):
        assert _with_absolute_paths(config) == config


def test_of_two_flags_for_one_key_each_setting_is_kept(tmp_path: Path) -> None:
    overrides = ("zero_optimization.reduce_bucket_size=5", "zero_optimization.stage3_max_live_parameters=7")
    # As argparse returns it: `study virtual` has another name for bf16 than study/train.py.
    config = RunConfig(engine_override=overrides, virtual_world_size=4, virtual_rank=1, precision="bf16")
    cell = VirtualRequest(("zero3",), config, None, tmp_path, NO_GPU).cell("zero3")
    assert [f"--engine_override={item}" in cell.flags(tmp_path / "run") for item in overrides] == [True, True]
    assert (cell.config.virtual_world_size, cell.config.virtual_rank) == (4, 1)
    assert cell.config.precision == "bf16-engine"


def test_offloaded_state_is_host_memory_on_a_gpu_machine_too() -> None:
    flags = {"task": "gpt-wikitext", "model_name_or_path": "gpt-20b", "precision": "bf16-engine"}
    config = resolve_config(RunConfig.from_dict(flags | {"virtual_world_size": 2}, "this test"), False)
    strategies = [read_strategy(name) for name in ("zero3_cpu", "zero3", "zero3_nvme")]
    offloaded, on_device, on_nvme = (
        needed_host_bytes(config, Launch(item, 2, 0, 0, 1, virtual=True), item, model_size(config), on_gpu=True)
        for item in strategies
    )
    # Half of the model in bf16, its gradients, and fp32 weights with two moments: 16 bytes per parameter.
    assert offloaded - on_device > 16 * 19.9e9 / 2
    assert on_device < on_nvme < offloaded


@pytest.mark.parametrize(("model_type", "task"), [("llama", "gpt-wikitext"), ("bert", "bert-imdb")])
def test_the_task_is_that_of_the_model_in_a_folder(tmp_path: Path, model_type: str, task: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args([*ZERO3, "--model_name_or_path", str(tmp_path)])
    assert read_request(options).config.task == task
