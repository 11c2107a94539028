"""What a cell must have at least, by arithmetic: for which memory it is too large before it starts."""

from __future__ import annotations

import dataclasses

from study.launch.cell import Cell
from study.models.presets import find_preset
from study.spec.strategies import read_strategy
from study.theory.memory import activation_bytes, least_device_bytes, sizes_of, state_bytes

# Interpreter, torch and the engine, of each process.
_LIBRARIES_BYTES = 1.2 * 2**30


@dataclasses.dataclass(frozen=True)
class Needs:
    """The device's of one rank; the host's and the drive's of all ranks on a box."""

    device_bytes: float
    host_bytes: float
    nvme_bytes: float
    # Through the drive of the box in each optimizer step.
    nvme_bytes_per_step: float


def needs_of(cell: Cell) -> Needs | None:
    """None for a model of which only its name is known."""
    config = cell.config
    preset = find_preset(config.model_name_or_path)
    if preset is None:
        return None
    sizes, plan = sizes_of(preset.model_type, preset.architecture), config.batch_plan(cell.ranks)
    strategy = read_strategy(cell.strategy).overridden(config)
    state = state_bytes(strategy, config.precision, cell.ranks)
    activations = activation_bytes(
        sizes, plan.per_device_train_batch_size, config.seq_length, config.precision, config.gradient_checkpointing
    )
    processes, parameters = cell.world_size, sizes.parameters
    # Outside stage 3 every process makes the whole model in fp32 on the host first, and moves it from there.
    loaded = 4 * parameters if strategy.zero_stage != 3 else 0
    # The parameters pass forward and backward, for each micro-batch.
    passes = 2 * plan.gradient_accumulation_steps
    return Needs(
        device_bytes=least_device_bytes(state, parameters, activations),
        host_bytes=processes * (_LIBRARIES_BYTES + max(loaded, parameters * state.host)),
        nvme_bytes=processes * parameters * state.nvme,
        nvme_bytes_per_step=processes * parameters * (state.nvme_per_step + passes * state.nvme_per_pass),
    )
