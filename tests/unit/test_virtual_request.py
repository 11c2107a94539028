"""Requests of `study virtual`, and its refusals before the first rank starts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from study.config.flags import RunConfig, check_virtual_run_flags, resolve_config
from study.host.machine import Machine
from study.metrics.clock import MIN_WARMUP_STEPS
from study.virtual.command import VirtualRequest, _with_absolute_paths, add_arguments, read_request

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


@pytest.mark.parametrize(("model_type", "task"), [("llama", "gpt-wikitext"), ("bert", "bert-imdb")])
def test_the_task_is_that_of_the_model_in_a_folder(tmp_path: Path, model_type: str, task: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args([*ZERO3, "--model_name_or_path", str(tmp_path)])
    assert read_request(options).config.task == task
