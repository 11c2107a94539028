"""The check of host memory before a virtual rank starts: the predictor's figure, compared with recorded peaks."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from study.config.flags import RunConfig, resolve_config
from study.config.launch_context import Launch
from study.config.strategies import read_strategy
from study.engine.virtual_rank import RESERVE, max_layers_that_fit, predict_host_bytes
from study.host.memory import GIB
from study.predictor.recorded_runs import REPORTS
from study.records.plain_rows import is_missing, read_columns

_FLAGS = (
    "attn_implementation",
    "bf16_states",
    "dropout",
    "global_batch_size",
    "gradient_checkpointing",
    "group_size",
    "lora_rank",
    "model_name_or_path",
    "optimizer",
    "peft",
    "precision",
    "seq_length",
    "task",
    "torch_compile",
)
_OTHERS = ("engine_override", "host_peak_rss_gib", "status_state", "strategy", "trainer", "virtual", "world_size")
_INTEGERS = {"global_batch_size", "group_size", "lora_rank", "seq_length"}


def make_launch(name: str, ranks: int, group_size: int | None = None) -> Launch:
    return Launch(read_strategy(name).with_group_size(group_size), ranks, 0, 0, 1, virtual=True)


def recorded_ranks(suite: str) -> Iterator[tuple[Any, float]]:
    """Yield the record of each virtual rank, and its predicted peak without the reserve over the measured one."""
    for run in read_columns(REPORTS / suite, (*_FLAGS, *_OTHERS)):
        if run.trainer != "study" or run.status_state != "ok" or not run.virtual:
            continue
        values = {name: getattr(run, name) for name in _FLAGS if not is_missing(getattr(run, name))}
        values |= {name: int(values[name]) for name in _INTEGERS & values.keys()}
        config = RunConfig(engine_override=tuple(json.loads(run.engine_override)), **values)
        launch = make_launch(run.strategy, int(run.world_size), config.group_size)
        needed = predict_host_bytes(config, launch, launch.strategy.with_overrides(config), on_gpu=False)
        yield run, needed / RESERVE / GIB / run.host_peak_rss_gib


@pytest.mark.parametrize(
    ("suite", "ratio"),
    [("virtual_claims", 0.95), ("virtual_settings", 0.95), ("virtual_neighbours", 0.95), ("virtual_lora", 0.78)],
)
def test_the_predicted_peak_is_not_far_below_that_of_any_recorded_virtual_rank(suite: str, ratio: float) -> None:
    # A machine is not too small for ranks of fewer than 4 GiB; adapters have no larger ones.
    ratios = [peak for run, peak in recorded_ranks(suite) if run.host_peak_rss_gib > 4 or suite == "virtual_lora"]
    assert len(ratios) >= 8
    assert min(ratios) >= ratio
    assert statistics.median(ratios) == pytest.approx(1, abs=0.06)


def test_an_embedding_that_autotp_leaves_whole_is_not_divided() -> None:
    gemma = [
        (peak, run.host_peak_rss_gib)
        for run, peak in recorded_ranks("virtual_neighbours")
        if run.strategy.endswith("_tp") and run.model_name_or_path.startswith("gemma")
    ]
    # An embedding of 0.9 billion elements, with all of its optimizer's state: one group has every rank.
    assert max(measured for _, measured in gemma) > 20
    assert all(peak > 0.95 for peak, _ in gemma)


def test_offloaded_state_is_host_memory_on_a_gpu_machine_too() -> None:
    flags = {"task": "gpt-wikitext", "model_name_or_path": "gpt-20b", "precision": "bf16-engine"}
    config = resolve_config(RunConfig.from_dict(flags | {"virtual_world_size": 2}, "this test"), False)
    offloaded, on_device, on_nvme = (
        predict_host_bytes(config, make_launch(name, 2), read_strategy(name), on_gpu=True)
        for name in ("zero3_cpu", "zero3", "zero3_nvme")
    )
    # Half of the model in bf16, its gradients, and fp32 weights with two moments: 16 bytes per parameter.
    assert offloaded - on_device > 16 * 19.9e9 / 2
    assert on_device < on_nvme < offloaded


def test_the_largest_depth_fits_and_the_next_one_does_not() -> None:
    flags = {"task": "gpt-wikitext", "model_name_or_path": "gpt-20b", "precision": "bf16-engine"}
    config = resolve_config(RunConfig.from_dict(flags | {"virtual_world_size": 8}, "this test"), False)
    launch = make_launch("zero2", 8)
    layers = max_layers_that_fit(30 * GIB, config, launch, launch.strategy, on_gpu=False)

    def needed(depth: int) -> float:
        shallow = dataclasses.replace(config, model_name_or_path=f"gpt-20b-{depth}layers")
        return predict_host_bytes(shallow, launch, launch.strategy, on_gpu=False)

    assert needed(layers) <= 30 * GIB < needed(layers + 1)
    # The libraries alone need more.
    assert max_layers_that_fit(0.1 * GIB, config, launch, launch.strategy, on_gpu=False) == 0
    # Stage 3 has every layer on its GPU: fewer of them would need the same.
    assert max_layers_that_fit(100 * GIB, config, make_launch("zero3", 8), read_strategy("zero3"), on_gpu=True) == 0


def test_an_architecture_without_a_table_needs_its_state(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 60_000}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "stablelm", **sizes}))
    flags = {"task": "gpt-wikitext", "model_name_or_path": str(tmp_path), "seq_length": 64, "dropout": -1.0}
    config = resolve_config(RunConfig.from_dict(flags | {"virtual_world_size": 8}, "this test"), False)
    launch = make_launch("zero1", 8)
    needed = predict_host_bytes(config, launch, launch.strategy, on_gpu=False)
    # An embedding and an output layer, in fp32 with gradients; the moments are sharded.
    assert needed > 2 * 60_000 * 512 * (4 + 4 + 8 / 8)
    assert max_layers_that_fit(0.0, config, launch, launch.strategy, on_gpu=False) == 0
