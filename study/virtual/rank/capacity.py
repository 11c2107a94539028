"""Can this box hold one virtual rank? Estimated before anything is allocated, since a host that runs full kills others.

Rough, and on the safe side. What a rank really takes is measured by running it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from study.errors import CannotBeHeld
from study.host.memory import GIB, LIBRARIES_BYTES, host_memory, locked_bytes
from study.models.architecture import Shape, shape_of
from study.models.presets import LARGEST_LAYERS, find_preset
from study.spec.config import RunConfig
from study.spec.launched import Launch
from study.spec.overrides import override
from study.spec.strategies import Strategy

# What is left to the rest of the box.
USABLE_SHARE = 0.85


def check_can_be_held(config: RunConfig, launch: Launch) -> None:
    """Refuse a model that this box's memory cannot hold, and say how many of its layers it can."""
    import torch

    on_gpu = torch.cuda.is_available()
    needed = needed_host_bytes(config, launch, shape_of(config), on_gpu)
    available = USABLE_SHARE * host_memory().available_bytes
    if needed <= available:
        return
    layers = layers_within(available, config, launch, on_gpu)
    raise CannotBeHeld(
        f"one rank of {launch.strategy.name} on {launch.world_size} takes about {needed / GIB:.1f} GiB of host memory"
        f" for {config.model_name_or_path}, and {available / GIB:.1f} GiB may be used here",
        "extrapolate over layers with `study virtual --layers-fit A,B,C` and depths that fit: "
        + (f"here up to {layers}" if layers else "here not even one layer does, so use a box with more memory"),
        layers,
    )


def layers_within(available: float, config: RunConfig, launch: Launch, on_gpu: bool) -> int:
    """How deep the model could be; 0 where no layer fits, or where it is no preset whose depth can be changed."""
    preset = find_preset(config.model_name_or_path)
    if preset is None:
        return 0
    names = [preset.with_layers(depth).name for depth in (1, 2)]
    shallow = [shape_of(dataclasses.replace(config, model_name_or_path=name)) for name in names]
    first, second = (needed_host_bytes(config, launch, shape, on_gpu) for shape in shallow)
    # Where every layer goes to the GPU, what the host needs is the same at any depth.
    return min(LARGEST_LAYERS, max(0, 1 + int((available - first) // (second - first)))) if second > first else 0


def needed_host_bytes(config: RunConfig, launch: Launch, shape: Shape, on_gpu: bool) -> float:
    strategy, model = launch.strategy, shape.architecture
    per_weight = 2 if config.precision.endswith("-engine") else 4
    # Outside ZeRO-3, and where its layers are to be divided, the whole model is made in fp32 on the host first.
    in_parts = strategy.zero_stage == 3 and _ranks_of_a_layer(strategy) == 1
    built = 3 * 4 * shape.largest_parameter if in_parts else 4 * shape.parameters
    always = LIBRARIES_BYTES + locked_bytes(strategy)
    if on_gpu:
        return always + built + _offloaded_bytes(config, launch, shape, per_weight)
    tokens = config.seq_length * config.batch_plan(launch.world_size, strategy.team_size).per_device_train_batch_size
    # Activations as counted for a transformer layer in "Reducing Activation Recomputation" (34 and 5 bytes), in fp32.
    per_layer = 2 * 34 * model.hidden_size + 2 * 5 * model.num_attention_heads * config.seq_length
    per_token = model.num_hidden_layers * per_layer + 3 * 4 * model.vocab_size
    return always + _state_and_working_bytes(config, launch, shape, per_weight, built) + tokens * per_token


def _offloaded_bytes(config: RunConfig, launch: Launch, shape: Shape, per_weight: int) -> float:
    """What of this rank's state is in host memory where there is a GPU for the rest."""
    strategy, elements = launch.strategy, shape.parameters / launch.world_size
    per_element = per_weight if strategy.offload_device("param") == "cpu" else 0
    optimizer = strategy.offload_device("optimizer") if _trains_all(config) else None
    if optimizer is not None:
        # Gradients as they come, and in fp32 for the step.
        per_element += per_weight + 4
    if optimizer == "cpu":
        per_element += 12
    size = per_element * elements
    if optimizer == "nvme":
        zero = _zero_settings(strategy, config)
        size += 4 * zero["offload_optimizer"]["buffer_count"] * min(elements, zero["sub_group_size"])
    return size


def _state_and_working_bytes(
    config: RunConfig, launch: Launch, shape: Shape, per_weight: int, built_bytes: float
) -> float:
    strategy = launch.strategy
    divided = _ranks_of_a_layer(strategy)
    elements, ranks = shape.parameters / divided, launch.world_size / divided
    if config.peft != "none" and strategy.zero_stage != 3:
        return built_bytes + per_weight * elements
    if divided > 1 and strategy.deepspeed is None:
        # Weights, gradients and two moments, and some copies of the largest, which is divided as well.
        return 16 * elements + 4 * 4 * shape.largest_parameter / divided
    if strategy.name == "ddp":
        # Weights, gradients, the reducer's copy of them, and two moments.
        return 20 * elements
    if strategy.deepspeed is None:
        shards = launch.ranks_of_a_copy(config) or ranks
        return built_bytes + 4 * elements + 20 * elements / shards + 4 * 4 * shape.largest_parameter
    zero = _zero_settings(strategy, config)
    # A gradient that is larger than the bucket is held beside it.
    bucket = 2 * per_weight * max(shape.largest_parameter, min(elements, zero["reduce_bucket_size"]))
    if strategy.zero_stage == 0:
        return bucket + (16 if per_weight == 4 else 20) * elements
    shard = (per_weight + _trains_all(config) * (per_weight + 16)) * elements / ranks
    shard += per_weight * elements / (launch.ranks_of_a_copy(config) or float("inf"))
    if strategy.zero_stage == 3:
        # Gloo scatters out of a copy, and group.py holds one as large.
        bucket *= 1.5
        live = min(elements, zero["stage3_max_live_parameters"] + 2 * shape.largest_parameter)
        return shard + max(built_bytes, bucket + per_weight * (live + 3 * shape.largest_parameter))
    return shard + max(built_bytes + per_weight * elements, 2 * per_weight * elements + bucket)


def _trains_all(config: RunConfig) -> bool:
    """Frozen weights have no gradients and no states, and adapters are small."""
    return config.peft == "none"


def _ranks_of_a_layer(strategy: Strategy) -> int:
    return strategy.team.ranks if strategy.team and strategy.team.divides == "tensors" else 1


def _zero_settings(strategy: Strategy, config: RunConfig) -> dict[str, Any]:
    assert strategy.deepspeed is not None
    settings: dict[str, Any] = override(strategy.deepspeed, config.engine_override)["zero_optimization"]
    return settings
