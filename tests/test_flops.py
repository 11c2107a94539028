from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from study.config.flags import RunConfig, Task, resolve_config
from study.metrics.flops import model_flops_per_sample
from study.predictor.activations import model_flops
from study.predictor.hardware import find_device, known_devices, mfu, peak_flops
from study.workloads.architecture import build_model
from tools.architectures import CLASSIFIERS, CONFIGS, LENGTH, SAMPLES, make_request

# The names that torch.cuda.get_device_name prints.
DEVICE_NAMES = {
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB", "NVIDIA A100-SXM4-40GB": "A100 SXM 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB", "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A800-SXM4-80GB": "A800 SXM 80GB", "NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H800": "H800 SXM",
    "NVIDIA H20": "H20", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA H100 NVL": "H100-NVL 94GB",
    "NVIDIA H200": "H200 SXM", "NVIDIA GH200 120GB": "GH200 96GB", "NVIDIA GH200 480GB": "GH200 96GB",
    "NVIDIA GH200 144G HBM3e": "GH200 144GB", "NVIDIA B200": "B200 SXM", "NVIDIA B300 SXM6 AC": "B300 SXM",
    "NVIDIA L4": "L4", "Tesla T4": "T4", "Tesla V100-SXM2-16GB": "V100 SXM2 16GB",
    "Tesla V100-SXM2-32GB": "V100 SXM2 32GB", "Tesla V100-PCIE-16GB": "V100 PCIe 16GB",
    "Tesla V100-PCIE-32GB": "V100 PCIe 32GB", "NVIDIA A10": "A10", "NVIDIA A10G": "A10G", "NVIDIA A30": "A30",
    "NVIDIA A40": "A40", "NVIDIA L40": "L40", "NVIDIA L40S": "L40S", "NVIDIA RTX A5000": "RTX A5000",
    "NVIDIA RTX A6000": "RTX A6000", "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000", "NVIDIA GeForce RTX 3080": "RTX 3080",
    "NVIDIA GeForce RTX 3080 Ti": "RTX 3080 Ti", "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 3090 Ti": "RTX 3090 Ti", "NVIDIA GeForce RTX 4080": "RTX 4080",
    "NVIDIA GeForce RTX 4080 SUPER": "RTX 4080 SUPER", "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5080": "RTX 5080", "NVIDIA GeForce RTX 5090": "RTX 5090",
}  # fmt: skip


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
    for flags in (
        {"gradient_checkpointing": True},
        {"attn_implementation": "eager"},
        {"precision": "bf16"},
        {"dropout": 0.1},
    ):
        assert model_flops_per_sample(run_config("gpt-wikitext", "gpt-tiny", **flags)) == plain
    assert model_flops_per_sample(run_config("gpt-wikitext", "gpt-tiny", seq_length=128)) > 2 * plain


@pytest.mark.parametrize("device_name", DEVICE_NAMES)
def test_a_device_matches_one_pattern_by_the_name_of_its_driver(device_name: str) -> None:
    matches = [device.name for device in known_devices() if re.search(device.pattern, device_name)]
    assert matches == [DEVICE_NAMES[device_name]]


def test_every_listed_device_is_reached_and_its_figures_are_in_order() -> None:
    assert {device.name for device in known_devices()} == set(DEVICE_NAMES.values())
    for device in known_devices():
        rates = device.peak_tflops
        assert set(rates) == {"fp32", "tf32", "bf16", "fp16"}
        assert rates["fp32"] is not None
        assert rates["fp16"] is not None
        assert (rates["tf32"] is None) == (rates["bf16"] is None)
        assert rates["fp32"] <= (rates["tf32"] or rates["fp32"]) < rates["fp16"]
        assert rates["bf16"] in (None, rates["fp16"])


def test_precision_chooses_the_rate() -> None:
    a100 = "NVIDIA A100-SXM4-80GB"
    assert peak_flops(a100, "bf16") == peak_flops(a100, "bf16-engine") == peak_flops(a100, "fp16") == 312e12
    assert peak_flops(a100, "fp32") == 19.5e12
    assert peak_flops("Tesla T4", "fp32") == 8.1e12
    assert peak_flops("Tesla T4", "bf16") is None


@pytest.mark.parametrize(
    "device_name",
    [
        "cpu",
        "Intel(R) Xeon(R) Platinum 8480+",
        # Other cards, slices and virtual GPUs whose names share a prefix or suffix with known ones.
        *("NVIDIA H100", "NVIDIA H800 NVL", "NVIDIA H200 NVL", "NVIDIA GB200", "NVIDIA GB300", "NVIDIA H20-3e"),
        *("NVIDIA A800 80GB PCIe", "NVIDIA H800 PCIe", "NVIDIA L40G", "NVIDIA A10M", "NVIDIA A16", "NVIDIA A2"),
        *("NVIDIA RTX A400", "NVIDIA RTX A4000", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"),
        *("Quadro RTX 6000", "NVIDIA RTX 5000 Ada Generation"),
        *("NVIDIA GeForce RTX 3070 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 5090 D"),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 5090 Laptop GPU"),
        *("NVIDIA A10-24Q", "NVIDIA A40-48Q", "NVIDIA L40S-48Q", "GRID T4-16Q", "NVIDIA L4-24Q", "NVIDIA A10G-24Q"),
        *("NVIDIA H200 MIG 1g.18gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
    ],
)
def test_an_unknown_device_has_no_peak_and_no_mfu(device_name: str) -> None:
    assert find_device(device_name) is None
    assert peak_flops(device_name, "bf16") is None
    assert mfu(1e15, 1.0, 1, device_name, "bf16") is None


def test_mfu_is_the_fraction_of_all_devices_peak() -> None:
    assert mfu(8 * 312e12, 2.0, 8, "NVIDIA A100-SXM4-80GB", "bf16") == pytest.approx(0.5)
    assert mfu(19.5e12, 2.0, 1, "NVIDIA A100-SXM4-80GB", "fp32") == pytest.approx(0.5)
