"""Samples for a virtual rank: its own are real, and every other rank's are repeats that nobody reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from study.spec.config import BatchPlan, RunConfig
from study.tasks import load_data
from study.tasks.blocks import Split, TaskData


def load_virtual_data(config: RunConfig, plan: BatchPlan, cache_dir: Path) -> TaskData:
    """As many samples as the job of many ranks asks for; made of those that one rank takes in a step."""
    own = plan.per_device_train_batch_size * plan.gradient_accumulation_steps
    data = load_data(dataclasses.replace(config, train_samples=own), cache_dir)
    rows = torch.arange(config.train_samples or config.global_batch_size) % len(data.train)
    train = Split({name: tensor[rows] for name, tensor in data.train.tensors.items()})
    # No floor: it is a loss, and a virtual run has none to compare it with.
    return dataclasses.replace(data, train=train, floor=None)
