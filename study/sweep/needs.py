"""What a cell must have at least, by arithmetic: for which memory it is too large before it starts."""

from __future__ import annotations

import dataclasses

from study.launch.cell import Cell
from study.models.presets import find_preset
from study.predict.adapters import trained_shape
from study.predict.floor import ANY_DEVICE, least_activation_bytes, least_device_bytes, state_bytes
from study.predict.request import Box, Request
from study.predict.shape import shape_of_preset
from study.spec.options import has_known_state
from study.spec.strategies import WITH_TEAMS, read_strategy

# Interpreter, torch and the engine, of each process.
_LIBRARIES_BYTES = 1.2 * 2**30


@dataclasses.dataclass(frozen=True)
class Needs:
    """The device's of one rank; the host's and what goes through the drive, of all ranks on a box."""

    device_bytes: float
    host_bytes: float
    # In each optimizer step.
    nvme_bytes_per_step: float


def needs_of(cell: Cell) -> Needs | None:
    """None for a model of which only its name is known."""
    config = cell.config
    preset = find_preset(config.model_name_or_path)
    if preset is None or not has_known_state(config) or cell.strategy in WITH_TEAMS:
        return None
    shape, plan = trained_shape(shape_of_preset(preset), config), cell.plan
    strategy = read_strategy(cell.strategy).overridden(config)
    state = state_bytes(strategy, config.precision, cell.ranks)
    frozen = state_bytes(strategy, config.precision, cell.ranks, trained=False)
    request = Request(
        shape=shape, strategy=strategy, box=Box(cell.strategy, ANY_DEVICE, cell.ranks),
        sequence_length=config.seq_length, micro_batch=plan.per_device_train_batch_size,
        accumulation=plan.gradient_accumulation_steps, precision=config.precision,
        gradient_checkpointing=config.gradient_checkpointing, attention=config.attn_implementation,
    )  # fmt: skip
    activations = least_activation_bytes(request)
    processes, parameters = cell.world_size, shape.parameters
    trained, still = shape.trained_parameters, shape.frozen_parameters
    # Outside stage 3 every process makes the whole model in fp32 on the host first, and moves it from there.
    loaded = 4 * parameters if strategy.zero_stage != 3 else 0
    # The parameters pass forward and backward, for each micro-batch.
    passed = plan.gradient_accumulation_steps * (2 * parameters + request.gathered_again)
    return Needs(
        device_bytes=least_device_bytes(state, trained, activations) + still * frozen.device,
        host_bytes=processes * (_LIBRARIES_BYTES + max(loaded, trained * state.host + still * frozen.host)),
        nvme_bytes_per_step=processes * (trained * state.nvme_per_step + passed * state.nvme_per_pass),
    )
