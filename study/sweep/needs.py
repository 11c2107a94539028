"""What a cell must have at least, by arithmetic: for which memory it is too large before it starts."""

from __future__ import annotations

import dataclasses

from study.host.memory import LIBRARIES_BYTES
from study.launch.cell import Cell
from study.predict.floor import ANY_DEVICE, least_activation_bytes, least_device_bytes, state_bytes
from study.predict.request import Box
from study.predict.runs import request_for, unpredicted


@dataclasses.dataclass(frozen=True)
class Needs:
    """The device's of one rank, the host's of all processes."""

    processes: int
    device_bytes: float
    host_bytes: float


def needs_of(cell: Cell, on_gpu: bool = True) -> Needs | None:
    """None for what nobody predicts."""
    if unpredicted(cell.strategy, cell.config):
        return None
    plan, device = cell.plan, ANY_DEVICE if on_gpu else dataclasses.replace(ANY_DEVICE, memory_gib=0.0)
    request = request_for(
        cell.strategy, cell.config, Box(cell.strategy, device, cell.ranks), plan.per_device_train_batch_size,
        plan.gradient_accumulation_steps,
    )  # fmt: skip
    strategy, shape = request.strategy, request.shape
    state = state_bytes(strategy, request.precision, cell.ranks)
    frozen = state_bytes(strategy, request.precision, cell.ranks, trained=False)
    activations = least_activation_bytes(request)
    processes, parameters = cell.world_size, shape.parameters
    trained, still = shape.trained_parameters, shape.frozen_parameters
    # Outside stage 3 every process makes the whole model in fp32 on the host first, and moves it from there.
    loaded = 4 * parameters if strategy.zero_stage != 3 else 0
    return Needs(
        processes=processes,
        device_bytes=least_device_bytes(state, trained, activations) + still * frozen.device,
        host_bytes=processes * (LIBRARIES_BYTES + max(loaded, trained * state.host + still * frozen.host)),
    )
