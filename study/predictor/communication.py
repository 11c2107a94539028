"""Communication of one rank per optimizer step: ring bytes as study/metrics/traffic.py counts them, and seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from study.config.text import rounded
from study.config.yaml_sections import load_package_yaml
from study.predictor.adapters import computes_adapters_in_fp32
from study.predictor.hardware import Hardware
from study.predictor.request import FP32_BYTES, Request
from study.predictor.shape import BEFORE
from study.predictor.state import flat_elements, flat_units, fsdp_shards, persistent_params, shard_elements
from study.predictor.tensor_group import GroupAdapters, TensorGroup, group_adapters
from study.predictor.zero3_gathers import reference_gathers, simulate_gathers

# Time of a collective, interpolated in measured tables: no single latency and bandwidth fits them.

Collective = Literal["all_reduce", "all_gather", "reduce", "reduce_scatter"]

_TABLES = load_package_yaml(Path(__file__).with_name("collectives.yaml").read_text(encoding="utf-8"))
# NVLink bandwidth in GB/s of each device with a table; other devices are scaled by their link bandwidth.
_LINKS_OF_TABLE = {"A100": 300.0, "H200": 450.0}
# Between nodes: the share of the cards' line rate at which bytes are sent, and the seconds that each call adds.
LINE_SHARE: float = _TABLES["between_nodes"]["line_share"]
CALL_S: float = _TABLES["between_nodes"]["call_s"]
ASSUMED_OF_LINE = f"of which {LINE_SHARE:.0%} is assumed, and {1000 * CALL_S:g} ms a call"
# Published steps of several pages have up to this many nodes.
_MANY_NODES = 16
# Without in-switch reduction (NVLS), all eight GPUs of an H200 node are as fast as four.
_SWITCHES_ADD_ABOVE = 4


def collective_s(box: Hardware, collective: Collective, payload_bytes: float) -> float:
    """Seconds of one call over all ranks; the payload is the full tensor that is reduced, gathered or scattered."""
    if box.ranks == 1 or payload_bytes <= 0:
        return 0.0
    rate = bus_bandwidth_gb_per_s(box, collective, payload_bytes)
    return _sent_fraction(box.ranks, collective) * payload_bytes / (1e9 * rate)


def _sent_fraction(ranks: int, collective: Collective) -> float:
    """Return the bytes that a rank sends over those of the payload, as nccl-tests defines bus bandwidth: a reduction to
    one rank sends the payload over every link of a chain."""
    return 1.0 if collective == "reduce" else (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def bus_bandwidth_gb_per_s(box: Hardware, collective: Collective, payload_bytes: float) -> float:
    """Bus bandwidth of a collective at a payload: the slower of the links within a node and between nodes."""
    if (links := box.links_gb_per_s) is None:
        raise ValueError(f"{box.device.name} has no links in hardware.yaml")
    # The table of the most similar NVLink.
    has_fast_links = not box.uses_pcie_links and (box.device.nvlink_gb_per_s or 0) >= _LINKS_OF_TABLE["H200"]
    name = "H200" if has_fast_links else "A100"
    table = _TABLES["one_node"][name]
    if box.uses_pcie_links or not math.isinf(box.bus_gb_per_s):
        full = box.bus_gb_per_s
        if math.isinf(full):
            full = links * _interpolated(_TABLES["pcie"], max(box.gpus_per_node, min(_TABLES["pcie"])))
        # A call takes as much longer than its bytes as on the node of the table, however slow the links are.
        overhead = 1 / _interpolated(table, payload_bytes) - 1 / max(table.values())
        node_rate: float = 1 / (1 / full + overhead)
    else:
        measured = _interpolated(table, payload_bytes)
        if collective != "all_reduce" or box.gpus_per_node <= _SWITCHES_ADD_ABOVE:
            measured = min(measured, _TABLES["ring_limit"].get(name, math.inf))
        node_rate = measured * min(1.0, links / _LINKS_OF_TABLE[name])
    if box.nodes == 1:
        return node_rate
    line = box.network_gb_per_s * box.gpus_per_node
    return min(node_rate, _network_gb_per_s(line, box.ranks, collective, payload_bytes))


def network_notes(box: Hardware) -> Iterator[str]:
    """Yield the speed of the network between machines."""
    if box.nodes > 1:
        gpu, node = (float(f"{box.network_gb_per_s * gpus:.3g}") for gpus in (1, box.gpus_per_node))
        per_node = f", {node:g} per node" * (box.gpus_per_node > 1)
        yield f"{gpu:g} GB/s of network bandwidth per GPU{per_node} (--network_gb_per_s), {ASSUMED_OF_LINE}"


def pcie_notes(request: Request) -> Iterator[str]:
    """Yield the assumed speed of PCIe between the GPUs of a machine."""
    box = request.box
    if not box.uses_pcie_links or not math.isinf(box.bus_gb_per_s):
        return
    payload, machine = request.stored.parameters * request.weight_bytes, dataclasses.replace(box, nodes=1)
    rate = rounded(bus_bandwidth_gb_per_s(machine, "all_gather", payload))
    yield f"ranks are assumed to communicate at {rate} GB/s over PCIe (--bus_gb_per_s): without peer-to-peer less"


# Gathered elements over those of the model, from which on the padding is named.
_NOTED_PADDING = 1.1


def padding_notes(request: Request) -> Iterator[str]:
    """Yield the padding of FSDP2's collectives if large tensors have fewer rows than there are ranks: an expert is one,
    in a tensor of experts."""
    if not request.strategy.is_fsdp or request.fsdp_version == 1:
        return
    ranks, shape = request.fsdp_ranks, request.stored
    times = fsdp_shards(request).stored * ranks / shape.parameters
    if times < _NOTED_PADDING:
        return
    widest = max(shape.params, key=lambda param: param.gathered_by_rows(ranks) - param.elements)
    yield (
        f"FSDP2 pads the rows of each tensor to a multiple of {ranks} ranks: it gathers and reduces {rounded(times)}"
        f" times the model's parameters ({widest.name} has {widest.rows} rows)"
    )


def _network_gb_per_s(line: float, ranks: int, collective: Collective, payload_bytes: float) -> float:
    """Return the bus bandwidth between nodes whose cards have a line rate of `line` GB/s together."""
    sent_gb = _sent_fraction(ranks, collective) * payload_bytes / 1e9
    return sent_gb / (sent_gb / (LINE_SHARE * line) + CALL_S)


def falling_network(nodes: int) -> tuple[float, int] | None:
    """Return the smallest published fraction of the bandwidth that the prediction assumes, and its nodes; None for as
    many nodes as published steps of several pages have."""
    if nodes <= _MANY_NODES:
        return None
    cluster = _TABLES["falling_cluster"]
    measured = max(count for count in cluster["gb_per_s"] if count <= max(nodes, 2 * _MANY_NODES))
    assumed = _network_gb_per_s(cluster["line_gb_per_s"], 8 * measured, "all_reduce", cluster["payload"])
    return cluster["gb_per_s"][measured] / assumed, measured


def _interpolated(table: Mapping[float, float], payload: float) -> float:
    """Interpolate linearly on log-log axes; constant above the last row, and constant time below the first."""
    points = sorted(table)
    if payload <= points[0]:
        return table[points[0]] * payload / points[0]
    if payload >= points[-1]:
        return table[points[-1]]
    index = next(index for index, point in enumerate(points) if point >= payload)
    low, high = points[index - 1], points[index]
    position = math.log(payload / low) / math.log(high / low)
    return math.exp((1 - position) * math.log(table[low]) + position * math.log(table[high]))


_DDP_BUCKET_BYTES = 25 * 2**20


@dataclasses.dataclass(frozen=True)
class CommunicationTime:
    """Communication seconds of an optimizer step: overlapped with compute, and exposed."""

    overlapped: float
    exposed: float

    def __add__(self, other: CommunicationTime) -> CommunicationTime:
        return CommunicationTime(self.overlapped + other.overlapped, self.exposed + other.exposed)


def communication_time(request: Request, forward: float, backward: float) -> CommunicationTime:
    """Return communication time; `forward` and `backward` are a micro-batch's compute seconds, which can overlap it.

    The traffic within a tensor-parallel group is exposed, as the next operation needs its result.
    """
    return _data_time(request, forward, backward) + CommunicationTime(0.0, _tensor_s(request))


def data_box(request: Request) -> Hardware:
    """Return the hardware of the ranks with different samples: one of each tensor-parallel group."""
    return _across(request.box, request.tensor_ranks)


def _tensor_s(request: Request) -> float:
    """Return seconds of a step's collectives within a tensor-parallel group."""
    box = _within(request.box, request.tensor_ranks)
    parts = tensor_parts(request)
    return request.accumulation * sum(
        part.calls * collective_s(box, part.collective, part.call_bytes) for part in parts
    )


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """Collectives of one size in a micro-batch of a tensor-parallel group; a gather's bytes are those of its output."""

    collective: Collective
    calls: float
    call_bytes: float


def tensor_parts(request: Request) -> list[TensorPart]:
    """Return the collectives of a micro-batch in a tensor-parallel group. Gradients of norms of heads (a few bytes) are
    left out.

    A matrix by rows all-reduces its output, in the type of the product, and one by columns the gradient of its input,
    in the type of the residual stream: each by itself, so that queries, keys and values make three (RowParallel and
    ColumnParallel in DeepSpeed's layers.py, RowwiseParallel and ColwiseParallel in transformers' tensor_parallel.py).
    Recomputation stops before the output of the last matrix of a layer, which no gradient needs
    (set_checkpoint_early_stop in torch's checkpoint.py).
    """
    group, shape = request.tensor_group, request.shape
    if group is None:
        return []
    if group.divides_stream:
        return _sequence_parts(request, group)
    tokens, width = request.micro_batch * request.sequence_length, request.computing_bytes
    hidden = tokens * shape.hidden
    stream_bytes = float(hidden * request.loose_bytes)
    repeated = 1 / request.checkpoint_every if request.gradient_checkpointing else 0.0
    outputs, gradients = group.rows + (group.rows - 1) * repeated, float(shape.layers * group.columns)
    parts = []
    if shape.lora_rank is not None:
        adapters = group_adapters(group)
        # The last matrix's adapter saves a tensor after that matrix's output.
        outputs += repeated * adapters.on_last
        gradients -= _without_gradient(request, adapters, group)
        exchanged = adapters.columns + adapters.rows * (1 + repeated)
        inner_bytes = tokens * shape.lora_rank * (FP32_BYTES if computes_adapters_in_fp32(request) else width)
        parts.append(TensorPart("all_reduce", shape.layers * exchanged, float(inner_bytes)))
    parts += [
        TensorPart("all_reduce", shape.layers * outputs, float(hidden * width)),
        TensorPart("all_reduce", gradients, stream_bytes),
    ]
    if group.divides_embedding:
        parts.append(TensorPart("all_reduce", 1, float(hidden * request.gathered_bytes)))
    if group.head != "replicated":
        parts.append(TensorPart("all_reduce", 1, stream_bytes))
    if group.head == "gathered":
        parts.append(TensorPart("all_gather", 1, float(tokens * shape.vocabulary * width)))
    if group.head == "sharded":
        parts.append(_loss_part(tokens))
    return parts


def _without_gradient(request: Request, adapters: GroupAdapters, group: TensorGroup) -> int:
    """Return the matrices by columns of the first layer whose input has no gradient, as the embedding is frozen;
    recomputation makes its output require one (enable_input_require_grads in transformers' modeling_utils.py)."""
    if request.gradient_checkpointing:
        return 0
    return adapters.attention_columns if adapters.in_attention else group.columns


def _sequence_parts(request: Request, group: TensorGroup) -> list[TensorPart]:
    """Return the collectives of a group that divides the residual stream. Gradients of norms are left out.

    A layer gathers the input of attention and that of the feed-forward block, and scatters the sums of both outputs; a
    gradient goes the other way, once for all matrices that read the same input (PrepareModuleInput and RowwiseParallel
    in torch's parallel/style.py). So do the embedding, which scatters, and the output layer, which gathers.
    """
    shape, layers, pairs = request.shape, request.shape.layers, group.rows
    tokens, width = request.micro_batch * request.sequence_length, request.computing_bytes
    hidden = tokens * shape.hidden
    stream_bytes, output_bytes = float(hidden * request.loose_bytes), float(hidden * width)
    repeated = 1 / request.checkpoint_every if request.gradient_checkpointing else 0.0
    return [
        # Inputs, and their gradients.
        TensorPart("all_gather", layers * pairs * (1 + repeated) + 1, stream_bytes),
        TensorPart("reduce_scatter", layers * pairs + 1, stream_bytes),
        # Outputs, without the last of a recomputed layer, and their gradients.
        TensorPart("reduce_scatter", layers * (pairs + (pairs - 1) * repeated), output_bytes),
        TensorPart("all_gather", layers * pairs, output_bytes),
        # The embedding's.
        TensorPart("reduce_scatter", 1, float(hidden * request.gathered_bytes)),
        TensorPart("all_gather", 1, float(hidden * request.gathered_bytes)),
        _loss_part(tokens),
    ]


def _loss_part(tokens: int) -> TensorPart:
    """Return the largest logit, the target's logit and the sum of exponentials of each token, of a divided loss."""
    return TensorPart("all_reduce", 3, float(tokens * FP32_BYTES))


def _data_time(request: Request, forward: float, backward: float) -> CommunicationTime:
    """Return the communication time of ranks with different samples."""
    strategy, stage, box = request.strategy, request.strategy.zero_stage, data_box(request)
    if request.data_ranks == 1 or strategy.name == "single":
        return CommunicationTime(0.0, 0.0)
    if strategy.is_fsdp or stage == 3:
        return _sharded(request, forward, backward)
    total = request.shape.trained_parameters * request.adapter_bytes
    if stage is None:
        last = calls_s(box, "all_reduce", _DDP_BUCKET_BYTES, _DDP_BUCKET_BYTES)
        return _overlap(calls_s(box, "all_reduce", total, _DDP_BUCKET_BYTES), backward, last)
    settings = request.settings
    bucket = settings.reduce_bucket_size * request.weight_bytes
    if stage == 0:
        return CommunicationTime(0.0, calls_s(box, "all_reduce", total, bucket))
    times = request.accumulation if stage == 2 else 1
    reduced = times * calls_s(box, settings.gradients_by, total, bucket)
    room = times * backward if settings.overlap_comm else 0.0
    # One call; DeepSpeed ignores allgather_bucket_size here.
    return _overlap(reduced, room, 0.0) + CommunicationTime(0.0, collective_s(box, "all_gather", total))


@dataclasses.dataclass(frozen=True)
class _Layered:
    """Bytes that are sent layer by layer: all of them, and those of one call."""

    total: float
    call: float


@dataclasses.dataclass(frozen=True)
class _Sharding:
    """Bytes that FSDP and stage 3 send, and the ranks among which they do."""

    weights: _Layered
    grads: _Layered
    # The ranks that gather for the backward pass: of hsdp's replica group, or of hpz's group within a machine.
    backward: Hardware
    # The ranks that gather for the first forward pass of a step, and reduce gradients.
    forward: Hardware


def _sharding(request: Request) -> _Sharding:
    shape, width = request.stored, float(request.gathered_bytes)
    stored, trained = shape.parameters, shape.trained_parameters
    if request.strategy.is_fsdp:
        stored, trained = (shard * request.fsdp_ranks for shard in fsdp_shards(request))
    weights = stored * width
    grads = trained * float(request.reduced_bytes_per_element)
    # A call for each layer, and one for the tensors outside.
    calls = shape.layers + 1
    box = data_box(request)
    group = _within(box, request.ranks_per_replica)
    return _Sharding(
        weights=_Layered(weights, weights / calls),
        grads=_Layered(grads, grads / calls),
        backward=group,
        forward=group if request.strategy.is_fsdp else box,
    )


def _sharded(request: Request, forward: float, backward: float) -> CommunicationTime:
    """Communication time of FSDP and stage 3, which gather each layer for both passes unless stage 3 still has it."""
    is_fsdp, times = request.strategy.is_fsdp, request.accumulation
    sharding = _sharding(request)
    # Without units there is no other one to compute meanwhile.
    can_hide = not request.fsdp_unwrapped if is_fsdp else request.settings.overlap_comm
    first_call = sharding.weights.call
    one_call = calls_s(sharding.forward, "all_gather", first_call, first_call)
    ahead = _overlap(_forward_gathers_s(request, sharding), times * forward * can_hide, one_call)
    sent = times * _backward_gathers_s(request, sharding) + _reductions_s(request, sharding)
    return ahead + _overlap(sent, times * backward * can_hide, one_call)


def _forward_gathers_s(request: Request, sharding: _Sharding) -> float:
    """Return seconds of a step's gathers for forward passes, those of a reference model among them. With hpz each rank
    keeps a secondary shard from the first pass to the end of the step."""
    weights = sharding.weights
    first, later = (
        calls_s(box, "all_gather", weights.total, weights.call) for box in (sharding.forward, sharding.backward)
    )
    trained = first + later * (gather_passes(request) - 1)
    reference = reference_gathers(request).elements * float(request.gathered_bytes)
    return trained + request.accumulation * calls_s(sharding.backward, "all_gather", reference, weights.call)


def _backward_gathers_s(request: Request, sharding: _Sharding) -> float:
    """Return seconds of a micro-batch's gathers for the backward pass: in stage 3 of the weights that it has freed."""
    if request.fsdp_keeps_gathered or request.fsdp_unwrapped:
        return 0.0
    weights = sharding.weights
    regathered_bytes = weights.total
    if not request.strategy.is_fsdp:
        gathered = simulate_gathers(request).elements * float(request.gathered_bytes)
        regathered_bytes = max(0.0, gathered - weights.total)
    return calls_s(sharding.backward, "all_gather", regathered_bytes, weights.call)


def _reductions_s(request: Request, sharding: _Sharding) -> float:
    """Return seconds of a step's reductions, within a replica group and then over all of them."""
    grads, group = sharding.grads, sharding.forward
    collective: Collective = "reduce_scatter" if request.strategy.is_fsdp else request.settings.gradients_by
    times = request.reductions if request.strategy.is_fsdp else request.accumulation
    reduced = times * calls_s(group, collective, grads.total, grads.call)
    replicas = request.data_ranks // group.ranks
    if replicas == 1:
        return reduced
    across = _across(data_box(request), group.ranks)
    once = calls_s(across, "all_reduce", grads.total / group.ranks, grads.call / group.ranks)
    return reduced + request.replica_reductions * once


def _across(box: Hardware, group: int) -> Hardware:
    """Return the hardware of ranks with the same position in every group of adjacent ones: some per machine if it has
    several groups, whose rings share its network cards, and else one."""
    if box.nodes == 1 or box.gpus_per_node % group == 0:
        return dataclasses.replace(box, gpus_per_node=box.gpus_per_node // group)
    return dataclasses.replace(box, nodes=box.ranks // group, gpus_per_node=1)


def gather_passes(request: Request) -> int:
    """Return how often a step gathers for the forward pass: FSDP1 frees kept weights when it reduces their gradients
    (_should_free_in_backward in torch's _runtime_utils.py), usually in the last micro-batch."""
    is_kept = request.fsdp_keeps_gathered and request.fsdp_version == 1
    return request.reductions if is_kept else request.accumulation


def _within(box: Hardware, ranks: int | None) -> Hardware:
    """Return the hardware that a group of adjacent ranks occupies."""
    if ranks is None or ranks >= box.ranks:
        return box
    if ranks <= box.gpus_per_node:
        return dataclasses.replace(box, nodes=1, gpus_per_node=ranks)
    return dataclasses.replace(box, nodes=ranks // box.gpus_per_node)


def calls_s(box: Hardware, collective: Collective, total: float, chunk: float) -> float:
    """Seconds to send `total` bytes in calls of `chunk` bytes."""
    chunk = min(chunk, total)
    return total / chunk * collective_s(box, collective, chunk) if chunk else 0.0


def _overlap(sent: float, room: float, last: float) -> CommunicationTime:
    """Split communication time into overlapped and exposed; the last call cannot overlap."""
    hidden = max(0.0, min(sent - last, room))
    return CommunicationTime(hidden, sent - hidden)


def predict_payload(request: Request) -> dict[str, float]:
    """Return payload bytes by collective: an all-reduce counts once, a gather its output. Norms (a few bytes) are left
    out."""
    payload = _data_payload(request)
    for name, size in _tensor_payload(request).items():
        payload[name] = payload.get(name, 0.0) + size
    return payload


def _tensor_payload(request: Request) -> dict[str, float]:
    """Return payload bytes of a step by collective of a tensor-parallel group."""
    payload = dict[str, float]()
    for part in tensor_parts(request):
        size = request.accumulation * part.calls * part.call_bytes
        payload[part.collective] = payload.get(part.collective, 0.0) + size
    return payload


def _data_payload(request: Request) -> dict[str, float]:
    """Return payload bytes by collective of ranks with different samples."""
    strategy, ranks = request.strategy, request.data_ranks
    if ranks == 1:
        return {}
    weight, total = request.weight_bytes, request.shape.trained_parameters
    if strategy.is_fsdp:
        return _fsdp(request)
    if strategy.zero_stage is None:
        # Accelerate's accumulation skips the all-reduce until the last micro-batch. DDP broadcasts buffers in the first
        # one only: a forward pass without gradient sync unsets require_forward_param_sync (torch, distributed.py).
        buffers = request.shape.buffer_bytes
        return {"all_reduce": float(total * request.adapter_bytes)} | ({"broadcast": float(buffers)} if buffers else {})
    if strategy.zero_stage == 0:
        return {"all_reduce": float(total * weight)}
    settings = request.settings
    # Stage 1 reduces once a step, stages 2 and 3 in each micro-batch.
    times = 1 if settings.stage == 1 else request.accumulation
    if settings.stage < 3:
        reduced = float(total * weight * times)
        return {settings.gradients_by: reduced, "all_gather": float(flat_elements(request) * weight)}
    persistent = shard_elements(request, persistent_params(request)) * ranks
    # Persistent parameters are gathered once per step, after the optimizer's update: frozen ones as well, since a step
    # begins by freeing all of them (stage3.py, _partition_all_parameters).
    gathered = persistent + times * (simulate_gathers(request).elements + reference_gathers(request).elements)
    scattered = shard_elements(request, request.shape.trained_params) * ranks * request.accumulation
    return {"all_gather": float(gathered * weight), settings.gradients_by: float(scattered * weight)}


def _fsdp(request: Request) -> dict[str, float]:
    """Payload bytes of FSDP: each layer, and an untied embedding as its group, is gathered twice per micro-batch, or
    once if FSDP keeps it for the backward pass."""
    ranks = request.fsdp_ranks
    padded = [(param, param.gathered_by_rows(ranks)) for param in request.stored.params]
    total, reduced = (shard * ranks for shard in fsdp_shards(request))
    # The root stays gathered, and an embedding that no group divides from it.
    kept_place = BEFORE if request.fsdp_whole_root else None
    once = request.shape.gathered_once(request.gradient_checkpointing)
    regathered = sum(
        size for param, size in padded if param.regathered and param.place != kept_place and param.index not in once
    )
    if request.fsdp_version == 1:
        regathered = total - flat_units(request)[BEFORE].size
    elif request.fsdp_unwrapped:
        # The layers are the root's, which stays gathered.
        regathered = sum(size for param, size in padded if param.regathered and param.place == BEFORE)
    gathered = total + (0 if request.fsdp_keeps_gathered else regathered)
    width, sent = request.gathered_bytes, request.reduced_bytes_per_element
    reference = reference_gathers(request).elements * request.accumulation
    payload = {
        "all_gather": float(width * (gathered * gather_passes(request) + reference)),
        "reduce_scatter": float(reduced * sent * request.reductions),
    }
    if ranks < request.data_ranks:
        # Replica groups all-reduce the shard of each rank.
        payload["all_reduce"] = float(reduced / ranks * sent * request.replica_reductions)
    return payload


def sent_bytes(request: Request) -> float:
    """Return ring bytes per step and rank."""
    return float(sum(sent_by_collective(request).values()))


def sent_by_collective(request: Request) -> dict[str, float]:
    """Return ring bytes per step and rank by collective."""
    sent = dict[str, float]()
    for part in _ring_parts(request):
        sent[part.collective] = sent.get(part.collective, 0.0) + part.ring_bytes
    return sent


def leaving_bytes(request: Request) -> float:
    """Return ring bytes per step that the ranks of a node send to other nodes."""
    return sum(part.ring_bytes * part.rings_between_machines for part in _ring_parts(request))


@dataclasses.dataclass(frozen=True)
class _RingPart:
    """Ring bytes that a rank sends per step in one collective of one group."""

    collective: str
    ring_bytes: float
    # Rings that leave a machine: a ring over adjacent ranks leaves each machine once, and those over the same rank of
    # each replica group once for each such rank.
    rings_between_machines: int


def _ring_parts(request: Request) -> Iterator[_RingPart]:
    """Yield the bytes of a rank by group. The ranks of a tensor-parallel group have different rings with the ranks of
    other groups."""
    group, per_node = request.tensor_ranks, request.box.gpus_per_node
    for part in _data_rings(request):
        yield dataclasses.replace(part, rings_between_machines=part.rings_between_machines * min(group, per_node))
    for name, size in _tensor_payload(request).items():
        yield _RingPart(name, size * _ring_factor(name, group), int(group > per_node))


def _data_rings(request: Request) -> Iterator[_RingPart]:
    """Yield the bytes of a rank in groups of ranks with different samples: hsdp gathers within a replica group, and
    all-reduces over groups."""
    box, replica, payload = data_box(request), request.ranks_per_replica, _data_payload(request)
    ranks = box.ranks
    spans_machines = int(box.nodes > 1)
    if replica is None:
        for name, size in payload.items():
            yield _RingPart(name, size * _ring_factor(name, ranks), spans_machines)
        return
    replica_spans_machines = int(replica > box.gpus_per_node)
    if request.strategy.is_fsdp:
        for name, size in payload.items():
            if name == "all_reduce":
                rings = spans_machines * min(replica, box.gpus_per_node)
                yield _RingPart(name, size * _ring_factor(name, ranks // replica), rings)
            else:
                yield _RingPart(name, size * _ring_factor(name, replica), replica_spans_machines)
        return
    # With hpz the first gather of a tensor in a step is over all ranks, later ones are within a machine. A frozen
    # parameter keeps its secondary shard; persistent parameters are not gathered from it.
    persistent = persistent_params(request)
    frozen = [param for param in persistent if not param.trained]
    first = shard_elements(request, [*request.shape.trained_params, *frozen])
    first_bytes = first * ranks * request.weight_bytes
    for name, size in payload.items():
        over_all = size if name != "all_gather" else first_bytes
        yield _RingPart(name, over_all * _ring_factor(name, ranks), spans_machines)
        if name == "all_gather":
            regathered = size - first_bytes
            yield _RingPart(name, regathered * _ring_factor(name, replica), replica_spans_machines)


def _ring_factor(collective: str, ranks: int) -> float:
    """Return the share of its payload that a rank sends in a ring."""
    if collective in ("reduce", "broadcast"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks
