"""The record has the live engine's settings, and two engines that differ have different records."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from engines import ROOT
from forked import fork_ranks
from runs import FLAGS, RunFactory, trained
from study.config.errors import Unsupported
from study.config.strategies import read_strategy
from study.engine.audit import audit
from study.predictor.shape import model_shape

GPT = ("--task", "gpt-wikitext")


def write_fsdp2(folder: Path, **settings: bool) -> str:
    """Write a config with other settings and return its name as a strategy."""
    document = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text())
    document["fsdp_config"] |= settings
    (folder / "own.yaml").write_text(yaml.safe_dump(document))
    return os.path.relpath(folder / "own", ROOT / "accelerate_configs")


def test_fsdp2_that_keeps_gathered_weights_has_another_record_than_the_shipped_one(get_run, tmp_path):
    strategy = write_fsdp2(tmp_path, fsdp_reshard_after_forward=False, fsdp_activation_checkpointing=True)
    runs = get_run("fsdp2", *GPT), trained(strategy, tmp_path / "run", *GPT)
    live = [{key: value for key, value in run.engine.items() if key.startswith("fsdp_")} for run in runs]
    as_shipped = {
        "fsdp_groups": 4, "fsdp_resharded_groups": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": False,
    }  # fmt: skip
    changed = {
        "fsdp_resharded_groups": 0, "fsdp_reshard_after_forward": False, "fsdp_activation_checkpointing": True,
    }  # fmt: skip
    assert live == [as_shipped, as_shipped | changed]
    # Layers are gathered once and not twice.
    shape = model_shape("gpt-tiny")
    sent = [run.traffic["collectives"]["all_gather"]["payload_bytes"] for run in runs]
    layers = sum(param.elements for param in shape.params if param.regathered)
    assert sent == [4 * (shape.parameters + layers), 4 * shape.parameters]


def test_fsdp2_offload_without_a_gpu_is_refused_and_not_a_traceback(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU to offload from")
    strategy = write_fsdp2(tmp_path, fsdp_offload_params=True)
    result = fork_ranks(strategy, "study/train.py", *GPT, *FLAGS, "--output_dir", str(tmp_path / "run"), ranks=1)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
    assert "fsdp_offload_params" in result.stderr


def test_the_zero_settings_that_change_traffic_are_read_back(get_run: RunFactory) -> None:
    buckets = get_run("zero1", *GPT).engine["buckets"]
    assert buckets["use_multi_rank_bucket_allreduce"] is True
    assert (buckets["zero_quantized_gradients"], buckets["zero_hpz_partition_size"]) == (False, 1)


def test_an_accelerate_that_uses_no_deepspeed_here_is_unsupported() -> None:
    """Early releases ignore DeepSpeed without a GPU; the run computes nothing wrong."""
    launch = SimpleNamespace(strategy=read_strategy("zero1"))
    run: Any = SimpleNamespace(config=None, plan=None, launch=launch)
    with pytest.raises(Unsupported, match=r"zero1 needs DeepSpeed, but accelerate .* wrapped the model in Linear"):
        audit(run, Any, torch.nn.Linear(1, 1), Any)


def test_one_rank_communicates_nothing(get_run: RunFactory) -> None:
    """DeepSpeed also calls its collectives on a group of one rank."""
    run = get_run("zero3", *GPT, ranks=1)
    collectives = run.traffic["collectives"].values()
    assert sum(counts["calls"] for counts in collectives) > 0
    assert sum(counts["wire_bytes_per_rank"] for counts in collectives) == 0
    assert any("shards nothing" in warning for warning in run.engine["warnings"])
