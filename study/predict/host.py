"""Host memory of one node and bytes on its drive: while the model is loaded, in training, and while it is saved."""

from __future__ import annotations

from study.host.memory import GIB, LIBRARIES_BYTES
from study.predict.modules import calls_of
from study.predict.request import Request, same_for_any_micro_batch
from study.predict.settings import engine_settings
from study.predict.state import (
    FP32_BYTES,
    part_elements,
    state_of,
    sub_groups,
    trained_of,
    weight_bytes,
)

# LIBRARIES_BYTES where torch is built for processors: resident memory after three steps of a model of 16 by 1, measured
# with torch 2.13, transformers 5.17 and deepspeed 0.19.8; with DeepSpeed it is 0.48.
CPU_LIBRARIES_BYTES, CPU_ENGINE_BYTES = 0.402 * GIB, 0.007 * GIB
# Of each module that stage 3 hooks, Python's objects: by what virtual ranks of models with 31 to 1002 modules held more
# than predicted.
HOOKED_MODULE_BYTES = 70 * 2**10
# What the first evaluation imports, `evaluate` and `datasets`, and keeps.
EVALUATION_BYTES = 0.09 * GIB


def pinned_bytes(size: float) -> float:
    """torch's pinned allocator rounds up to a power of two (CachingHostAllocator)."""
    return float(1 << (int(size) - 1).bit_length()) if size >= 1 else 0.0


def libraries_bytes(request: Request) -> float:
    if not request.box.in_host_memory:
        return LIBRARIES_BYTES
    hooked = calls_of(request.shape, recomputes=False)[0] if request.strategy.zero_stage == 3 else ()
    engine = CPU_ENGINE_BYTES if request.strategy.deepspeed else 0.0
    return CPU_LIBRARIES_BYTES + engine + len(hooked) * HOOKED_MODULE_BYTES


@same_for_any_micro_batch
def host_of(request: Request) -> tuple[dict[str, float], float]:
    """By part, of all ranks of one node, and the drive's bytes."""
    state = state_of(request)
    strategy, ranks = request.strategy, request.box.gpus_per_node
    weight, parameters = weight_bytes(request), request.shape.parameters
    stage = strategy.zero_stage
    buffers = pinned = whole = 0.0
    libraries = libraries_bytes(request)
    largest, trained = request.shape.largest, trained_of(request.shape)
    if stage is not None and stage > 0:
        settings = engine_settings(strategy, request.shape.hidden)
        if stage == 3 and settings.gathers_to_save:
            # Without it Accelerate refuses, and the engine saves parts, as this study's checkpoints have them.
            whole = weight * float(parameters)
        part = (
            part_elements(request, trained) if stage == 3 else -(-request.shape.trained_parameters // request.box.ranks)
        )
        locked: list[float] = []
        # DeepSpeed's own, for what is swapped: locked page by page (page_alloc.cpp), and not rounded.
        swapped = 0.0
        if settings.optimizer is not None and stage < 3:
            staged = request.shape.largest_trained * weight
            locked += [part * 4.0, part * 4.0, float(part * weight), float(staged)]
            buffers += part * weight + staged
        elif settings.optimizer is not None:
            locked.append(part * float(weight))
            if settings.optimizer.device == "cpu":
                locked += [group * 4.0 for group in sub_groups(request, settings)]
            else:
                group = max(sub_groups(request, settings))
                swapped += settings.optimizer.buffers * 4.0 * group
        if settings.parameters is not None:
            locked.append(state.params_host)
            if settings.parameters.device == "cpu" and settings.parameters.pinned and not request.box.in_host_memory:
                # zero.Init pins each part by itself. Copied into one buffer it is let go of, and torch's pool keeps it.
                left = [-(-piece.elements // request.box.ranks) * weight for piece in trained]
                locked += map(pinned_bytes, left)
                buffers += sum(map(pinned_bytes, left))
            if settings.parameters.device == "nvme":
                swapped += float(settings.parameters.buffers * settings.parameters.buffer_size * weight)
        buffers += swapped
        pins = [offload.pinned for offload in (settings.optimizer, settings.parameters) if offload is not None]
        if any(pins) and not request.box.in_host_memory:
            rounded = sum(map(pinned_bytes, locked))
            pinned = rounded + swapped
            buffers += rounded - sum(locked)
    # Outside stage 3 every process makes the whole model in fp32 first, and then 16-bit weights, a tensor at a time;
    # stage 3 makes one tensor at a time, and rank 0 has another one, out of the file.
    loaded, read = 4.0 * parameters + (largest * weight if weight < FP32_BYTES else 0), 0.0
    if stage == 3:
        loaded = read = 4.0 * largest
    load = ranks * (libraries + loaded + state.host) + read
    if not request.box.in_host_memory:
        # The engine makes its optimizer when the weights have left the host (_configure_distributed_model), or are
        # where stage 3 keeps them.
        weights = ranks * (libraries + loaded + state.params_host) + read
        load = max(weights, ranks * (libraries + state.host))
    train = ranks * (libraries + state.host + buffers)
    parts = {
        "state": ranks * state.host, "buffers": ranks * buffers, "libraries": ranks * libraries,
        "pinned": ranks * pinned, "load": load, "train": train,
        "rank": train / ranks, "save": train + whole,
    }  # fmt: skip
    return parts, ranks * state.nvme
