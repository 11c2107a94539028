"""The files of `study advise` train on real ranks, with the settings that fitted."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import ONE_THREAD, ROOT
from study.advisor.advise import AdviceRequest
from study.advisor.advised_files import write_files
from study.config.strategies import WITH_REPLICAS
from study.predictor.hardware import to_box
from study.predictor.models import model_shape
from study.records.directory import read_run
from unit.test_advise import recommend

TINY = AdviceRequest(model_shape("gpt-tiny"), to_box("2xL4"), 32, "bf16", gradient_checkpointing=False, global_batch=4)


@pytest.mark.parametrize(
    "name",
    [
        "zero3",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("ddp", "fsdp2", "hsdp", "zero2", "zero2_cpu", "zero3_hpz")
        ),
    ],
)
def test_its_files_are_launched_as_they_are_and_train_with_the_fitted_settings(name: str, tmp_path: Path) -> None:
    has_replicas = name in WITH_REPLICAS
    question = dataclasses.replace(TINY, box=to_box("2x2xL4"), global_batch=8) if has_replicas else TINY
    if name in ("fsdp2", "hsdp"):
        question = dataclasses.replace(question, precision="fp32")
    option = recommend(question, name)
    assert option.request.micro_batch == 2
    words = (write_files(option, tmp_path / "files", "nvme_offload", "gpt-tiny").of_study or "").split()
    assert words[:2] == ["accelerate", "launch"]
    flags = ["--task", "gpt-wikitext", "--scale", "laptop", "--model_name_or_path", "gpt-tiny", "--max_steps", "2",
           "--train_samples", "16", "--eval_samples", "4", "--output_dir", str(tmp_path / "run")]  # fmt: skip
    # Both machines are this one.
    one_machine = ["--num_machines", "1", "--main_process_port", "0"] if has_replicas else []
    command = [sys.executable, "-m", "accelerate.commands.launch", *one_machine, *words[2:], *flags]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    run = read_run(tmp_path / "run")
    assert run.config["per_device_train_batch_size"] == 2
    if option.request.strategy.deepspeed is not None:
        settings = option.request.strategy.deepspeed["zero_optimization"]
        assert run.engine["strategy"].startswith(f"{name}-fitted-")
        assert run.engine["buckets"]["reduce_bucket_size"] == settings["reduce_bucket_size"] < 5e8
        assert run.engine["precision"] == "bf16-engine"
    if has_replicas:
        assert run.engine["copies"] == {"copies": 2, "ranks_of_a_copy": 2}
