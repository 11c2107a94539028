"""Memory of one GPU, of one node's host and of its NVMe under a strategy: every part, steady and at the peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from study.host.memory import GIB, LARGEST_KEPT_BYTES, LIBRARIES_BYTES
from study.predictor.activations import Activations, activations_of
from study.predictor.buckets import (
    Snapshot,
    has_tied_gradients,
    snapshots_of,
    standing_bucket,
)
from study.predictor.gathers import Gathers, calls_of, gathers_of
from study.predictor.request import FP32_BYTES, Estimate, Memory, Request, same_for_any_micro_batch
from study.predictor.state import accumulated_bytes, persistent_params, shard_elements, state_of, sub_groups, unswapped
from study.predictor.time import estimate

# LIBRARIES_BYTES where torch is built for CPUs: resident memory after three steps of a model of 16 by 1, measured
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


@same_for_any_micro_batch
def host_of(request: Request) -> tuple[dict[str, float], float]:
    """Return host memory by part, of all ranks of one node, and bytes on NVMe."""
    state, shape, strategy = state_of(request), request.shape, request.strategy
    ranks, weight, stage = request.box.gpus_per_node, request.weight_bytes, request.strategy.zero_stage
    buffers = pinned = saved = 0.0
    libraries = LIBRARIES_BYTES
    if request.box.in_host_memory:
        hooked = calls_of(shape, recomputes=False)[0] if stage == 3 else ()
        libraries = CPU_LIBRARIES_BYTES + (CPU_ENGINE_BYTES if strategy.deepspeed else 0.0)
        libraries += len(hooked) * HOOKED_MODULE_BYTES
    if stage:
        settings = request.settings
        optimizer, parameters = settings.optimizer, settings.parameters
        if stage == 3 and settings.gathers_to_save:
            # Without it Accelerate refuses, and the engine saves parts, as this study's checkpoints have them.
            saved = weight * float(shape.parameters)
        part = shard_elements(request, shape.trained_params)
        if stage < 3:
            part = -(-shape.trained_parameters // request.box.ranks)
        locked: list[float] = []
        # DeepSpeed's own, for what is swapped: locked page by page (page_alloc.cpp), and not rounded.
        swapped = 0.0
        if optimizer is not None and stage < 3:
            staged = shape.largest_trained * weight
            locked += [part * 4.0, part * 4.0, float(part * weight), float(staged)]
            buffers += part * weight + staged
        elif optimizer is not None:
            locked.append(part * float(weight))
            groups = sub_groups(request)
            if optimizer.device == "cpu":
                locked += [group * 4.0 for group in groups]
            else:
                swapped += optimizer.buffers * 4.0 * max(groups)
        if parameters is not None:
            locked.append(state.params_host)
            if parameters.device == "cpu" and parameters.pinned and not request.box.in_host_memory:
                # zero.Init pins each shard by itself. Copied into one buffer it is freed, and torch's pool keeps it.
                left = [
                    pinned_bytes(-(-param.elements // request.box.ranks) * weight) for param in shape.trained_params
                ]
                locked += left
                buffers += sum(left)
            if parameters.device == "nvme":
                swapped += float(parameters.buffers * parameters.buffer_size * weight)
        buffers += swapped
        pins = any(offload.pinned for offload in (optimizer, parameters) if offload is not None)
        if pins and not request.box.in_host_memory:
            rounded = sum(map(pinned_bytes, locked))
            pinned = rounded + swapped
            buffers += rounded - sum(locked)
    # Outside stage 3 every process makes the whole model in fp32 first, and then 16-bit weights, a tensor at a time;
    # stage 3 makes one tensor at a time, and rank 0 has another one, out of the file.
    loaded, read = 4.0 * shape.parameters + (shape.largest * weight if weight < FP32_BYTES else 0), 0.0
    if stage == 3:
        loaded = read = 4.0 * shape.largest
    load = ranks * (libraries + loaded + state.host) + read
    if not request.box.in_host_memory:
        # The engine makes its optimizer when the weights have left the host (_configure_distributed_model), or are
        # where stage 3 keeps them.
        weights = ranks * (libraries + loaded + state.params_host) + read
        load = max(weights, ranks * (libraries + state.host))
    train = ranks * (libraries + state.host + buffers)
    parts = {
        "state": ranks * state.host, "buffers": ranks * buffers, "libraries": ranks * libraries,
        "pinned": ranks * pinned, "load": load, "train": train, "rank": train / ranks, "save": train + saved,
    }  # fmt: skip
    return parts, ranks * state.nvme


# What the C library keeps of the blocks that a process without a GPU frees, as runs ask it to for the sake of their
# times (study/host/environment.py); blocks of 32 MiB and more always go back. A share of the most that lies in smaller
# blocks at once, for the gaps, and copies of all weights, flat as ranks with shards send them to each other: by least
# squares over validation/kept.yaml. Why so many copies is not known: with one heap for all threads
# (MALLOC_ARENA_MAX=1) there were more.
GAPS, COPIES = 0.54, 7.8


def small_blocks(request: Request, points: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Return the most bytes in small blocks at once, and weights that are sent in one: for GAPS and COPIES."""
    shape, tokens = request.shape, request.micro_batch * request.sequence_length
    widths = {"activations": shape.inner, "attention": shape.heads * request.sequence_length,
              "logits": shape.vocabulary}  # fmt: skip
    blocks = {name: FP32_BYTES * tokens * width for name, width in widths.items()}
    blocks |= dict.fromkeys(("gradients", "buffers"), shape.largest * request.weight_bytes)
    small = [name for name, size in blocks.items() if size < LARGEST_KEPT_BYTES]
    most = max(sum(parts.get(name, 0.0) for name in small) for parts in points)
    has_shards = request.box.ranks > 1 and (bool(request.strategy.zero_stage) or request.strategy.is_fsdp)
    # Stages 1 and 2 send what is trained, and leave frozen weights where they are.
    is_whole = request.strategy.zero_stage == 3 or request.strategy.is_fsdp
    sent = (shape.parameters if is_whole else shape.trained_parameters) * request.weight_bytes
    return most, float(sent) if has_shards and sent < LARGEST_KEPT_BYTES else 0.0


# A CUDA context after one torch tensor (https://discuss.pytorch.org/t/73021), and NCCL's buffers on A100s for two ranks
# and for more (https://github.com/NVIDIA/nccl/issues/964).
CONTEXT_BYTES, COMMUNICATOR_OF_TWO_BYTES, COMMUNICATOR_BYTES = 723 * 2**20, 544 * 2**20, 688 * 2**20
# Assumed, and no record of this project can tell: what the allocator reserves beyond what is allocated at the peak.
RESERVED_SHARE = 0.04


class Point(NamedTuple):
    """A snapshot of a step with all that is on the device then."""

    parts: dict[str, float]
    # After the backward pass.
    step: bool = False

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def without(self, *names: str) -> float:
        return self.total - sum(self.parts[name] for name in names)


def predict_memory(request: Request) -> Memory:
    state = state_of(request)
    always = {"parameters": state.params_device, "optimizer": state.optimizer_device}
    if request.strategy.zero_stage == 3 and request.strategy.offload_device("optimizer"):
        # Where `ratio` leaves sub-groups on the device, the fp32 gradients that they are stepped with are made at the
        # start and stay (initialize_optimizer_states).
        always["optimizer"] += state_of(request, waiting=False).grads_device
    points = points_of(request)
    highest = max(points, key=lambda point: point.total)
    peak = Point({**always, **highest.parts}, highest.step)
    # Between two steps: weights, optimizer, and buffers that stay. Stage 3's gradients have one buffer, for good
    # (stage3.py, grad_partitions_flat_buffer).
    steady = state.params_device + state.optimizer_device
    steady += state_of(request, waiting=False).grads_device if request.strategy.zero_stage == 3 else 0.0
    steady += _standing(request)
    host_parts, nvme = host_of(request)
    # Weights and the optimizer have no error.
    certain = sum(always.values())
    in_host_memory, process = request.box.in_host_memory, None
    reserved = peak.total * RESERVED_SHARE
    if in_host_memory:
        most, sent = small_blocks(request, [point.parts for point in points])
        reserved = GAPS * most + COPIES * sent
        process = estimate("process", peak.total + reserved + host_parts["rank"])
    allocated, pool = (
        # What was published is of GPUs, and so is the interval.
        Estimate(size) if in_host_memory else estimate("above_state", size, certain)
        for size in (peak.total, peak.total + reserved)
    )
    parts = {
        **{name: peak.parts.get(name, 0.0) for name in PARTS},
        "context": 0.0 if in_host_memory else _outside_torch(request.box.ranks),
        "fragmentation": reserved,
    }
    return Memory(
        device_parts=parts,
        steady_allocated=estimate("state", steady),
        peak_allocated=allocated,
        peak_reserved=pool,
        pool_with_room=_pool_with_room(request, points, certain, peak.total + reserved),
        process_peak=process,
        host_parts=host_parts,
        host_peak=estimate("host", max(host_parts["load"], host_parts["train"], host_parts["save"])),
        nvme=nvme,
        notes=tuple(_notes(request, peak)),
    )


def _pool_with_room(request: Request, points: Sequence[Point], always: float, needed: float) -> float:
    """Return the size of torch's pool where nothing makes it give blocks back.

    Blocks that one phase of a step freed are too small, or split, for the next: what a pass makes, the gradients, and
    what the optimizer makes are there together; but in expandable segments. A block serves its own stream alone, and
    FSDP and stage 3 gather and reduce on others. Before it fails for want of memory torch frees all cached blocks
    (release_cached_blocks in CUDACachingAllocator.cpp), so this decides nothing.
    """
    if not request.box.device.memory_gib:
        return needed
    passing = [point for point in points if not point.step]
    steps = max((point.total for point in points if point.step), default=0.0)
    other_streams, apart = 0.0, tuple[str, ...]()
    if request.box.ranks > 1 and (request.strategy.is_fsdp or request.strategy.zero_stage == 3):
        other_streams, apart = max(point.parts["buffers"] for point in passing), ("buffers",)
    if request.expandable_segments:
        return max(needed, always + other_streams + max(steps, *(point.without(*apart) for point in passing)))
    passes = other_streams + max(point.without("gradients", *apart) for point in passing)
    room = request.box.device.visible_gib * 2**30 - _outside_torch(request.box.ranks)
    return max(needed, min(always + passes + steps, room))


def _outside_torch(ranks: int) -> float:
    return float(CONTEXT_BYTES + (0 if ranks == 1 else COMMUNICATOR_OF_TWO_BYTES if ranks == 2 else COMMUNICATOR_BYTES))


PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "logits", "attention")


def _notes(request: Request, peak: Point) -> Iterator[str]:
    """Explain parts whose size is not plain."""
    shape, logits = request.shape, peak.parts.get("logits", 0.0)
    if logits > 0.2 * peak.total:
        tokens = request.micro_batch * request.sequence_length
        yield f"logits and their loss: {tokens:,} tokens by {shape.vocabulary:,} words, three times in fp32"
    if not request.strategy.zero_stage:
        return
    settings, params = request.settings, shape.params
    largest = max(shape.trained_params, key=lambda param: param.elements)
    if largest.elements > settings.reduce_bucket:
        yield f"gradient of {largest.name} ({largest.elements:,} elements) exceeds the bucket and stays unpartitioned"
    if has_tied_gradients(shape):
        yield f"{params[0].name} is tied: the head's gradient waits, then both are there and their sum"
    if (what := unswapped(request)) is not None:
        yield f"no part of the {what} has the 1 MiB that DeepSpeed swaps to NVMe: all of it stays in host memory"
    if settings.stage == 3:
        persistent = sum(param.elements for param in persistent_params(request))
        most = gathers_of(request).gathered_at_once + persistent
        yield f"at most {most:,} of {shape.parameters:,} parameters are unsharded at once"


def _standing(request: Request) -> float:
    """Buffers, and gradients, that are there in the forward pass as well."""
    shape = request.shape
    if request.strategy.name == "ddp":
        return float(shape.trained_parameters * request.weight_bytes)
    if request.strategy.zero_stage == 3:
        return standing_bucket(request)
    if request.strategy.zero_stage and request.settings.optimizer is not None:
        return shape.largest_trained * float(request.weight_bytes)
    return 0.0


def points_of(request: Request) -> list[Point]:
    """The snapshots of a step, without the weights and the optimizer, which are always there."""
    kept, strategy, layers = activations_of(request), request.strategy, request.shape.layers
    gathers = gathers_of(request) if strategy.zero_stage == 3 else Gathers()
    weight, snapshots, standing = request.weight_bytes, snapshots_of(request), _standing(request)
    # Stage 3's buffer of gradients is there from the start, where an offload has not taken it to the host.
    has_earlier = not strategy.offload_device("optimizer") if strategy.zero_stage == 3 else request.accumulation > 1
    if strategy.is_fsdp:
        earlier = accumulated_bytes(request)
    else:
        earlier = state_of(request, waiting=False).grads_device if has_earlier else 0.0
    stored = _stored(request, kept, layers)
    begun, recomputed = max(standing, snapshots[0].buffers), request.gradient_checkpointing
    # Until the forward pass has ended, autocast keeps its copies of all weights.
    cached = kept.cast_cached / request.checkpoint_every if recomputed else 0.0

    def point(live: int, **parts: float) -> Point:
        all_parts = {**stored, "gradients": earlier, **parts}
        return Point({**all_parts, "buffers": all_parts.get("buffers", standing) + live * weight})

    # The end of the forward pass, where the logits are made into a loss.
    activations, logits = stored["activations"] + cached * layers, kept.logits + kept.logits_forward
    points = [point(gathers.live_at_end, activations=activations, logits=logits)]
    # In it, a layer whose tensors are not kept.
    for place, live in (gathers.live_forward or {layers - 1: 0}).items():
        so_far = min(layers, place + 1)
        before = _stored(request, kept, so_far)
        working = kept.layer_forward if recomputed and so_far else 0.0
        points.append(point(live, **before | {"activations": before["activations"] + cached * so_far + working}))
    # The loss's gradient.
    points.append(point(gathers.live_at_end, buffers=begun, logits=kept.logits + kept.logits_backward))
    for snapshot in _decisive_snapshots(request):
        parts = {"gradients": snapshot.grads, "buffers": snapshot.buffers}
        if not snapshot.step:
            stored = _stored(request, kept, min(layers, snapshot.place + 1), working=0 <= snapshot.place < layers)
            if snapshot.place < layers:
                # The head's gradient is there by then, and autograd has freed autocast's copy.
                stored["activations"] -= kept.cast_head
            parts = {**stored, **parts}
        points.append(Point(parts, snapshot.step))
    return points


@same_for_any_micro_batch
def _decisive_snapshots(request: Request) -> list[Snapshot]:
    """Snapshots with all buffers: of each layer, and of the step, the largest in some respect. All else that is there
    then is the same for all snapshots of it, so the others cannot be the largest, and there are thousands."""
    standing, weight = _standing(request), request.weight_bytes
    gathers = gathers_of(request) if request.strategy.zero_stage == 3 else Gathers()
    snapshots = list[Snapshot]()
    for snapshot in snapshots_of(request):
        param = snapshot.param
        live = 0 if snapshot.step else gathers.live_backward.get(snapshot.place, 0)
        live = live if param is None else gathers.live_at.get(param.index, live)
        snapshots.append(snapshot._replace(buffers=max(standing, snapshot.buffers) + live * weight))
        if snapshot.arrival and param is not None and param.index in gathers.live_before:
            # Tied, the gradients of both and their sum are there; before that, the head's alone.
            came = 2 if param.index == 0 and has_tied_gradients(request.shape) else 1
            before = gathers.live_before[param.index] * weight
            snapshots.append(snapshot._replace(
                grads=snapshot.grads - float(came * param.elements * weight),
                buffers=max(standing, snapshot.buffers) + before,
            ))  # fmt: skip
    # By layer, and None for the step: the most in each respect, and the snapshot it is of.
    most: dict[int | None, list[tuple[float, int]]] = {}
    for at, snapshot in enumerate(snapshots):
        respects = (snapshot.grads + snapshot.buffers, snapshot.grads, snapshot.buffers)
        layer = None if snapshot.step else snapshot.place
        if (so_far := most.get(layer)) is None:
            most[layer] = [(size, at) for size in respects]
            continue
        for respect, size in enumerate(respects):
            if size > so_far[respect][0]:
                so_far[respect] = (size, at)
    return [snapshots[at] for at in sorted({at for several in most.values() for _, at in several})]


def _stored(request: Request, kept: Activations, layers: int, working: bool = False) -> dict[str, float]:
    """Bytes that so many first layers keep, and working memory of the last of them in its backward pass."""
    recomputed = request.gradient_checkpointing
    again = layers / request.checkpoint_every if recomputed else 0.0
    whole = layers - again
    scores = whole * kept.scores
    # Autocast's copies live as long as the graph; recomputed layers make theirs again.
    casts = kept.cast_layer * whole + kept.cast_head
    activations = again * kept.checkpoint + whole * (kept.layer - kept.scores) + kept.outside + casts
    if working:
        activations += kept.layer_working
        if recomputed:
            activations += kept.layer - kept.scores + kept.cast_layer
            scores += kept.scores
    return {"activations": activations, "attention": scores}
