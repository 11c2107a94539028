from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from study.config.flags import RunConfig, Task, resolve_config
from study.config.places import REPOSITORY
from study.metrics.flops import model_flops_per_sample
from study.predictor.hardware import find_device, known_devices, mfu, peak_flops
from study.predictor.micro_batch import model_flops
from study.workloads.architecture import build_model
from tools.architectures import CLASSIFIERS, CONFIGS, LENGTH, SAMPLES, make_request

# The names that torch.cuda.get_device_name prints, each with its device. Other cards, slices and virtual GPUs, whose
# names resemble those, have none.
DEVICES = dict(line.split("\t") for line in (REPOSITORY / "tests" / "data" / "devices.tsv").read_text().splitlines())


def run_config(task: Task, model: str, **flags: Any) -> RunConfig:
    return resolve_config(RunConfig(task=task, scale="laptop", model_name_or_path=model, **flags), False)


@pytest.mark.parametrize(("task", "name"), [("bert-imdb", "bert-tiny"), ("gpt-wikitext", "gpt-tiny")])
def test_the_count_is_that_of_a_real_step(task: Task, name: str) -> None:
    config = run_config(task, name, attn_implementation="eager", seq_length=48)
    model = build_model(config).train()
    tokens = torch.randint(5, 100, (3, 48))
    labels = tokens if task == "gpt-wikitext" else torch.tensor([0, 1, 1])
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss.backward()
    assert counter.get_total_flops() == 3 * model_flops_per_sample(config) > 0


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "opt", "bloom", "roberta", "mamba2"])
def test_the_count_of_any_class_is_that_of_its_prediction(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[kind], "model_type": kind}))
    task: Task = "bert-imdb" if kind in CLASSIFIERS else "gpt-wikitext"
    config = run_config(task, str(tmp_path), seq_length=LENGTH, dropout=-1.0)
    assert SAMPLES * model_flops_per_sample(config) == model_flops(make_request(kind, "ddp"))


def test_every_strategy_gets_the_same_figure() -> None:
    plain = model_flops_per_sample(run_config("gpt-wikitext", "gpt-tiny"))
    changes = {"gradient_checkpointing": True, "attn_implementation": "eager", "precision": "bf16", "dropout": 0.1}
    for name, value in changes.items():
        assert model_flops_per_sample(run_config("gpt-wikitext", "gpt-tiny", **{name: value})) == plain


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_matches_one_pattern_by_the_name_of_its_driver_and_an_unknown_one_has_no_mfu(name: str) -> None:
    if DEVICES[name]:
        assert [device.name for device in known_devices() if re.search(device.pattern, name)] == [DEVICES[name]]
    else:
        assert find_device(name) is None
        assert peak_flops(name, "bf16") is None
        assert mfu(1e15, 1.0, 1, name, "bf16") is None


def test_every_listed_device_is_reached_and_its_figures_are_in_order() -> None:
    assert {device.name for device in known_devices()} == set(DEVICES.values()) - {""}
    for device in known_devices():
        rates = device.peak_tflops
        fp32, fp16 = rates["fp32"] or 0, rates["fp16"] or 0
        # Without tensor cores fp16 is summed at fp32's rate.
        has_tensor_cores = device.compute_capability is None or device.compute_capability >= 7
        assert 0 < fp32 <= (rates["tf32"] or fp32)
        assert fp32 < fp16 if has_tensor_cores else fp32 == fp16
        assert (rates["tf32"] is None, rates["bf16"]) in ((True, None), (False, fp16))


def test_mfu_is_the_fraction_of_all_devices_peak() -> None:
    assert mfu(8 * 312e12, 2.0, 8, "NVIDIA A100-SXM4-80GB", "bf16") == pytest.approx(0.5)
    assert mfu(19.5e12, 2.0, 1, "NVIDIA A100-SXM4-80GB", "fp32") == pytest.approx(0.5)
