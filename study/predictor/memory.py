"""What one GPU, one node's host and its drive hold under a strategy: every part, steady and at the peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from study.host.memory import GIB, LIBRARIES_BYTES
from study.predictor.activations import Activations, activations_of
from study.predictor.buckets import (
    Moment,
    accumulated_bytes,
    has_tied_gradients,
    kept_bytes,
    moments_of,
    small_activations,
    standing_bucket,
)
from study.predictor.gathers import Gathers, calls_of, gathers_of
from study.predictor.request import Estimate, Memory, Request, same_for_any_micro_batch
from study.predictor.state import (
    FP32_BYTES,
    State,
    engine_settings,
    kept_whole,
    part_elements,
    pieces_of,
    state_of,
    sub_groups,
    trained_of,
    unswapped,
    weight_bytes,
)
from study.predictor.time import estimate

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


# A CUDA context after one torch tensor (https://discuss.pytorch.org/t/73021), and NCCL's buffers on A100s for two ranks
# and for more (https://github.com/NVIDIA/nccl/issues/964).
CONTEXT_BYTES, COMMUNICATOR_OF_TWO_BYTES, COMMUNICATOR_BYTES = 723 * 2**20, 544 * 2**20, 688 * 2**20
# Assumed, and no record of this project can tell: what the allocator reserves beyond what is allocated at the peak.
RESERVED_SHARE = 0.04


class Point(NamedTuple):
    """A moment of a step with all that is on the device then, and how much of it lies in small blocks."""

    parts: dict[str, float]
    small: float = 0.0
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
    peak = Point({**always, **highest.parts}, highest.small, highest.step)
    steady = _steady(request, state)
    host_parts, nvme = host_of(request)
    # Weights and the optimizer have no error.
    certain = sum(always.values())
    in_host_memory, process = request.box.in_host_memory, None
    reserved = peak.total * RESERVED_SHARE
    if in_host_memory:
        reserved = kept_bytes(request, max(point.small + small_activations(request, point.parts) for point in points))
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
    """What torch's pool grows to where nothing makes it give blocks back.

    Blocks that one phase of a step freed are too small, or split, for the next: what a pass makes, the gradients, and
    what the optimizer makes lie beside each other; but in expandable segments. A block serves its own stream alone, and
    FSDP and stage 3 gather and reduce on others. Before it fails for want of memory torch lets go of all free blocks
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
    """What makes a part as large as it is, where that is not plain."""
    shape, logits = request.shape, peak.parts.get("logits", 0.0)
    if logits > 0.2 * peak.total:
        tokens = request.micro_batch * request.sequence_length
        yield f"logits and their loss: {tokens:,} tokens by {shape.vocabulary:,} words, three times in fp32"
    if not request.strategy.zero_stage:
        return
    settings, pieces = engine_settings(request.strategy, shape.hidden), pieces_of(shape)
    largest = max(trained_of(shape), key=lambda piece: piece.elements)
    if largest.elements > settings.reduce_bucket:
        yield f"the gradient of {largest.name} ({largest.elements:,} numbers) is larger than the bucket and waits whole"
    if has_tied_gradients(shape):
        yield f"{pieces[0].name} is tied: the head's gradient waits, then both are there and their sum"
    if (what := unswapped(request)) is not None:
        yield f"no part of the {what} has the 1 MiB that DeepSpeed swaps to a drive: a run fails for it"
    if settings.stage == 3:
        persistent = sum(piece.elements for piece in kept_whole(request, settings))
        most = gathers_of(request, settings).gathered_at_once + persistent
        yield f"at most {most:,} of {shape.parameters:,} parameters are unsharded at once"


def _steady(request: Request, state: State) -> float:
    """Between two steps: weights, optimizer, and buffers that stay."""
    stays = 0.0
    if request.strategy.zero_stage == 3:
        # Its gradients have one buffer, for good (stage3.py, grad_partitions_flat_buffer).
        stays = state_of(request, waiting=False).grads_device
    return state.params_device + state.optimizer_device + stays + _standing(request, state)


def _standing(request: Request, state: State) -> float:
    """Buffers, and gradients, that are there in the forward pass as well."""
    strategy = request.strategy
    if strategy.name == "ddp":
        return float(request.shape.trained_parameters * weight_bytes(request))
    stage = strategy.zero_stage
    if stage is None or stage == 0:
        return 0.0
    settings = engine_settings(strategy, request.shape.hidden)
    standing = 0.0
    if stage == 3:
        standing = standing_bucket(request, settings)
    elif settings.optimizer is not None:
        standing = request.shape.largest_trained * float(weight_bytes(request))
    return standing


def points_of(request: Request) -> list[Point]:
    """The moments of a step, without the weights and the optimizer, which are always there."""
    state, kept = state_of(request), activations_of(request)
    strategy, layers = request.strategy, request.shape.layers
    gathers = Gathers()
    if strategy.zero_stage == 3:
        gathers = gathers_of(request, engine_settings(strategy, request.shape.hidden))
    weight = weight_bytes(request)
    moments = moments_of(request)
    standing = _standing(request, state)
    # Stage 3's buffer of gradients is there from the start, where an offload has not taken it to the host.
    has_earlier = not strategy.offload_device("optimizer") if strategy.zero_stage == 3 else request.accumulation > 1
    if strategy.is_fsdp:
        earlier = accumulated_bytes(request)
    else:
        earlier = state_of(request, waiting=False).grads_device if has_earlier else 0.0
    stored = _stored(request, kept, layers)
    begun, recomputed = max(standing, moments[0].buffers), request.gradient_checkpointing
    # Until the forward pass has ended, autocast keeps its copies of all weights.
    cached = kept.cast_cached / request.checkpoint_every if recomputed else 0.0

    def point(whole: tuple[int, int], **parts: float) -> Point:
        live, small = whole
        held = {**stored, "gradients": earlier, **parts}
        return Point({**held, "buffers": held.get("buffers", standing) + live * weight}, small * weight)

    # The end of the forward pass, where the logits are made into a loss.
    activations, logits = stored["activations"] + cached * layers, kept.logits + kept.logits_forward
    points = [point(gathers.live_at_end, activations=activations, logits=logits)]
    # In it, a layer whose tensors are not kept.
    for place, whole in (gathers.live_forward or {layers - 1: _NOTHING}).items():
        so_far = min(layers, place + 1)
        before = _stored(request, kept, so_far)
        working = kept.layer_forward if recomputed and so_far else 0.0
        points.append(point(whole, **before | {"activations": before["activations"] + cached * so_far + working}))
    # The loss's gradient.
    points.append(point(gathers.live_at_end, buffers=begun, logits=kept.logits + kept.logits_backward))
    for moment in _telling(request):
        parts = {"gradients": moment.grads, "buffers": moment.buffers}
        if not moment.step:
            stored = _stored(request, kept, min(layers, moment.place + 1), working=0 <= moment.place < layers)
            if moment.place < layers:
                # The head's gradient is there by then, and autograd has let go of autocast's copy.
                stored["activations"] -= kept.cast_head
            parts = {**stored, **parts}
        points.append(Point(parts, moment.small, moment.step))
    return points


# Of what is gathered, and of that in small tensors.
_NOTHING = (0, 0)


@same_for_any_micro_batch
def _telling(request: Request) -> list[Moment]:
    """With all buffers. Of each layer, and of the step, what holds most in some respect: the rest of what is there then
    is the same for all moments of it, so the others cannot be the largest, and there are thousands."""
    standing, gathers = _standing(request, state_of(request)), Gathers()
    if request.strategy.zero_stage == 3:
        gathers = gathers_of(request, engine_settings(request.strategy, request.shape.hidden))
    weight = weight_bytes(request)
    moments = list[Moment]()
    for moment in moments_of(request):
        at_place = _NOTHING if moment.step else gathers.live_backward.get(moment.place, _NOTHING)
        moments.append(_with_gathered(moment, gathers.live_at.get(id(moment.piece), at_place), standing, weight))
        if moment.arrival and moment.piece is not None and id(moment.piece) in gathers.live_before:
            # Tied, the gradients of both and their sum are there; before that, the head's alone.
            came = 2 if moment.piece is pieces_of(request.shape)[0] and has_tied_gradients(request.shape) else 1
            before = moment._replace(grads=moment.grads - float(came * moment.piece.elements * weight))
            moments.append(_with_gathered(before, gathers.live_before[id(moment.piece)], standing, weight))
    # By layer, and None for the step: the most in each respect, and the moment it is of.
    most: dict[int | None, list[tuple[float, int]]] = {}
    for at, moment in enumerate(moments):
        respects = (moment.grads + moment.buffers, moment.grads, moment.buffers, moment.small)
        layer = None if moment.step else moment.place
        if (so_far := most.get(layer)) is None:
            most[layer] = [(size, at) for size in respects]
            continue
        for respect, size in enumerate(respects):
            if size > so_far[respect][0]:
                so_far[respect] = (size, at)
    return [moments[at] for at in sorted({at for several in most.values() for _, at in several})]


def _with_gathered(moment: Moment, live: tuple[int, int], standing: float, weight: int) -> Moment:
    whole, small = live
    buffers = max(standing, moment.buffers) + whole * weight
    return moment._replace(buffers=buffers, small=moment.small + small * weight)


def _stored(request: Request, kept: Activations, layers: int, working: bool = False) -> dict[str, float]:
    """What so many first layers keep, and what the last of them makes in its backward pass."""
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
