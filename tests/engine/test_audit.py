"""The record has the live engine's settings, and two engines that differ have different records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forked import fork_ranks
from runs import FLAGS, FP32_RELATIVE, RunFactory, losses, trained, write_strategy
from study.config.errors import Unsupported
from study.config.strategies import read_strategy
from study.engine.audit import audit, read_fsdp
from study.metrics.inventory import fsdp_groups
from study.predictor.models import model_shape

GPT = ("--task", "gpt-wikitext")


def test_the_settings_of_an_own_fsdp2_file_take_effect_and_are_in_the_record(get_run, tmp_path):
    settings: dict[str, Any] = {"fsdp_reshard_after_forward": False, "fsdp_activation_checkpointing": True}
    settings["fsdp_transformer_layer_cls_to_wrap"] = "GPT2MLP, GPT2Attention"
    strategy = write_strategy(tmp_path, "own", "fsdp2", "fsdp_config", **settings)
    runs = get_run("fsdp2", *GPT), trained(strategy, tmp_path / "run", *GPT)
    assert re.fullmatch(r"fsdp2-custom-[0-9a-f]{8}", runs[1].engine["strategy"])
    assert runs[1].engine["own_settings"]["fsdp_transformer_layer_cls_to_wrap"] == ["GPT2Attention", "GPT2MLP"]
    live = [{key: value for key, value in run.engine.items() if key.startswith("fsdp_")} for run in runs]
    as_shipped = {
        "fsdp_groups": 4,
        "fsdp_resharded_groups": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": False,
    }
    # Each of the two layers is two groups instead of one.
    changed = {"fsdp_groups": 6, "fsdp_resharded_groups": 0, "fsdp_reshard_after_forward": False}
    assert live == [as_shipped, as_shipped | changed | {"fsdp_activation_checkpointing": True}]
    once, twice = (run.traffic["collectives"]["reduce_scatter"]["calls"] for run in runs)
    assert twice - once == runs[0].engine["model_layers"]
    # Layers are gathered once and not twice.
    shape = model_shape("gpt-tiny")
    sent = [run.traffic["collectives"]["all_gather"]["payload_bytes"] for run in runs]
    layers = sum(param.elements for param in shape.params if param.regathered)
    assert sent == [4 * (shape.parameters + layers), 4 * shape.parameters]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=FP32_RELATIVE)


@pytest.fixture
def sharded_model() -> Iterator[Any]:
    """Yield a model with two groups of FSDP2. The inner one is resharded after its forward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    yield model
    torch.distributed.destroy_process_group()


def test_fsdp2_is_read_from_the_states_of_torch_2_11_too(sharded_model: Any) -> None:
    """Its states have one group in the attribute that later releases made a property of the list of groups."""
    expected = read_fsdp(sharded_model)
    assert (expected["fsdp_groups"], expected["fsdp_resharded_groups"]) == (2, 1)
    groups = list(fsdp_groups(sharded_model))
    for module in (sharded_model, sharded_model[0]):
        state = module._get_fsdp_state()
        earlier = SimpleNamespace(**vars(state))
        (earlier._fsdp_param_group,) = vars(earlier).pop("_fsdp_param_groups")
        module._get_fsdp_state = lambda earlier=earlier: earlier
    assert read_fsdp(sharded_model) == expected
    assert list(fsdp_groups(sharded_model)) == groups


def test_fsdp2_offload_without_a_gpu_is_refused_and_not_a_traceback(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU to offload from")
    strategy = write_strategy(tmp_path, "own", "fsdp2", "fsdp_config", fsdp_offload_params=True)
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
