"""What one rank sends in an optimizer step, by collective, as study/measure/traffic.py counts it: the ring's bytes."""

from __future__ import annotations

import math

from study.predict.gathers import gathers_of
from study.predict.request import Request
from study.predict.settings import engine_settings
from study.predict.state import (
    FP32_BYTES,
    flat_elements,
    kept_whole,
    part_elements,
    pieces_of,
    trained_of,
    weight_bytes,
)


def payload_of(request: Request) -> dict[str, float]:
    """Bytes by collective: an all-reduce counts once, a gather by what it puts out. Without a few bytes of norms."""
    strategy, ranks = request.strategy, request.box.ranks
    if ranks == 1:
        return {}
    weight, total = weight_bytes(request), request.shape.trained_parameters
    if strategy.is_fsdp:
        return _fsdp(request)
    if strategy.zero_stage is None:
        # Accelerate's accumulation skips the all-reduce until the last micro-batch. Buffers of whole numbers, BERT's
        # positions and types, go out at every forward pass.
        buffers = 2 * 8 * _positions(request) * request.accumulation if request.shape.model_type == "bert" else 0
        return {"all_reduce": float(total * FP32_BYTES)} | ({"broadcast": float(buffers)} if buffers else {})
    if strategy.zero_stage == 0:
        return {"all_reduce": float(total * weight)}
    settings = engine_settings(strategy, request.shape.hidden)
    # Stage 1 reduces once a step, the later ones each micro-batch.
    times = 1 if settings.stage == 1 else request.accumulation
    if settings.stage < 3:
        reduced = float(total * weight * times)
        return {settings.gradients_by: reduced, "all_gather": float(flat_elements(request) * weight)}
    whole = part_elements(request, kept_whole(request, settings)) * ranks
    # What is kept whole is gathered once, after the optimizer has changed it: frozen or not, since a step begins by
    # letting go of all of it (stage3.py, _partition_all_parameters).
    gathered = gathers_of(request, settings).elements * request.accumulation + whole
    scattered = part_elements(request, trained_of(request.shape)) * ranks * request.accumulation
    return {"all_gather": float(gathered * weight), settings.gradients_by: float(scattered * weight)}


def _positions(request: Request) -> int:
    return next(tensor.rows for tensor in request.shape.tensors if tensor.name.startswith("position_embeddings"))


def _fsdp(request: Request) -> dict[str, float]:
    """Each layer is gathered twice in a micro-batch, and so is an untied embedding: it has a group of its own."""
    ranks, pieces = request.ranks_of_a_copy or request.box.ranks, pieces_of(request.shape)
    padded = [math.ceil(piece.rows / ranks) * ranks * (piece.elements // piece.rows) for piece in pieces]
    reduced = sum(size for piece, size in zip(pieces, padded, strict=True) if piece.trained)
    again = sum(
        size
        for piece, size in zip(pieces, padded, strict=True)
        if 0 <= piece.place < request.shape.layers or (piece is pieces[0] and not request.shape.tied)
    )
    times, width = request.accumulation, 2 if request.fsdp_gathers_16_bits else FP32_BYTES
    # Gradients are reduced in the last micro-batch alone.
    found = {"all_gather": float((sum(padded) + again) * width * times), "reduce_scatter": float(reduced * width)}
    if ranks < request.box.ranks:
        # Copies agree on the part of each rank.
        found["all_reduce"] = float(reduced / ranks * width)
    return found


def sent_bytes(request: Request) -> float:
    """Ring bytes. hsdp gathers within a copy, and sums over copies."""
    ranks, copy, payload = request.box.ranks, request.ranks_of_a_copy, payload_of(request)
    if ranks == 1:
        return 0.0
    gathering = summing = ranks
    near = 0.0
    if copy is not None and request.strategy.is_fsdp:
        gathering, summing = copy, ranks // copy
    elif copy is not None:
        # Under hpz a step's first gather of a tensor takes all ranks, and later ones those of a machine. What the
        # optimizer does not change keeps its second copy; what is kept whole is not gathered from that.
        whole = kept_whole(request, engine_settings(request.strategy, request.shape.hidden))
        frozen = [piece for piece in whole if not piece.trained]
        first = part_elements(request, [*trained_of(request.shape), *frozen])
        again = payload["all_gather"] - first * ranks * weight_bytes(request)
        payload["all_gather"] -= again
        near = again * (copy - 1) / copy
    share = (gathering - 1) / gathering
    factor = {"all_reduce": 2 * (summing - 1) / summing, "reduce": 1.0, "broadcast": 1.0}
    return near + sum(size * factor.get(name, share) for name, size in payload.items())
