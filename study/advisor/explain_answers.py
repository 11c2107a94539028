"""Answers to frequent questions about a user's config: what takes time, whether another stage or more ranks help."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from study.advisor.explain_case import ConfigCase
from study.advisor.explain_costs import bucket_bytes
from study.advisor.prediction import PredictedStep
from study.advisor.request_text import about, gib
from study.config.text import rounded, rounded_seconds
from study.predictor.communication import bus_bandwidth_gb_per_s, calls_s, leaving_bytes, network_notes, sent_bytes
from study.predictor.constants import FITTED
from study.predictor.hardware import ANY_DEVICE
from study.predictor.request import Request
from study.predictor.state import persistent_params
from study.predictor.time import device_bytes
from study.predictor.zero3_gathers import simulate_gathers

_MAX_RANKS = 1024
# Part of a step that another setting has to save, to be named.
_MIN_GAIN = 0.1
# A part that does not fall to this fraction on twice as many ranks is not sharded.
_FALLS_TO = 2 / 3
# The peak falls with more ranks if twice as many have less than this fraction of it.
_FALLS = 0.95


@dataclasses.dataclass(frozen=True)
class FrequentAnswer:
    """Answer to a frequent question about a config, in bytes of this case."""

    question: str
    short: str
    because: tuple[str, ...]
    # Bytes, or counts of ranks.
    figures: Mapping[str, float]


def find_answers(case: ConfigCase) -> Iterator[FrequentAnswer]:
    """Yield the answers to the frequent questions that apply to this case."""
    if case.step is not None:
        yield _explain_time(case, case.step)
    if case.stage in (1, 2) and case.data_ranks > 1:
        yield _compare_stages(case, 1, 2)
    if case.stage and case.data_ranks > 1:
        yield _compare_stages(case, 2, 3)
    if case.stage == 3:
        yield from _explain_loading(case)
    if case.generated_tokens:
        yield _explain_generation(case, case.generated_tokens)
    if case.file.distributed_type != "NO" and case.request.strategy.name != "tp":
        yield _compare_ranks(case)
    if case.stage >= 2 and case.offload("offload_optimizer"):
        yield _compare_host_memory(case)


def _explain_time(case: ConfigCase, step: PredictedStep) -> FrequentAnswer:
    """Name the parts of a step's time, and the time with a lower stage or without an offload."""
    request, time, text = case.request, step.time, _time_text(case, step, has_ends=True)
    parts = sorted(time.parts.items(), key=lambda part: -part[1])
    shares = [f"{name.replace('_', ' ')} {rounded_seconds(size)}" for name, size in parts if size > parts[0][1] / 50]
    short = f"{text}: {', '.join(shares)}"
    short += "".join(f"; {alternative}" for alternative in _other_times(case, time.step_s.value))
    short += "".join(f"; {note}" for note in network_notes(request.box))
    because = list(time.notes[1:])
    if case.ranks > 1 and not request.box.is_cpu_only:
        rate = bus_bandwidth_gb_per_s(request.box, "all_gather", request.shape.parameters * case.weight)
        slower = "PCIe, NCCL_P2P_DISABLE=1, GPUs of several kinds and slow networks lower it"
        because.append(f"ranks communicate at {rounded(rate)} GB/s; {slower} (--bus_gb_per_s, --network_gb_per_s)")
    return FrequentAnswer("What takes the time of a step?", short, tuple(because), dict(parts))


def _other_times(case: ConfigCase, seconds: float) -> Iterator[str]:
    """Yield the time without an offload or at a lower stage; of several machines what takes less, with its memory."""
    request = case.request
    if request.strategy.offloads:
        bare = case.at(offload_param=None, offload_optimizer=None)
        text = _time_text(bare, PredictedStep.predict(bare.request))
        yield f"without an offload {text}, {about(device_bytes(bare.memory))}"
    elif case.stage == 3:
        lower = case.at(stage=2)
        yield f"stage 2 {_time_text(lower, PredictedStep.predict(lower.request))}"
    machines, group = request.box.nodes, request.box.gpus_per_node
    if machines == 1 or request.tensor_ranks > group:
        return
    if case.stage == 3 and group > 1 and request.tensor_group is None and case.zero["zero_hpz_partition_size"] == 1:
        within = case.at(zero_hpz_partition_size=group)
        step = PredictedStep.predict(within.request)
        if step.time.step_s.value < (1 - _MIN_GAIN) * seconds:
            text = _time_text(within, step)
            yield f"zero_hpz_partition_size={group} {text}, {about(device_bytes(within.memory))}"
    alone = dataclasses.replace(request, box=dataclasses.replace(request.box, nodes=1))
    one_machine = dataclasses.replace(case, request=alone)
    step = PredictedStep.predict(alone)
    if step.time.step_s.value * machines < seconds:
        text, memory = _time_text(one_machine, step), about(device_bytes(one_machine.memory))
        yield f"faster on one machine alone, {text} for 1/{machines} of the batch, {memory}"
    if request.shape.active_experts and (tokens := _expert_tokens_bytes(request)) < sent_bytes(request):
        sizes = f"at most {rounded(tokens / 1e9)} GB of tokens in place of the experts' weights and gradients"
        yield f"expert parallelism, which is not predicted, sends {sizes}"


def _expert_tokens_bytes(request: Request) -> float:
    """Return the bytes that a rank sends at most in a step if each expert has its own rank: a token's states reach its
    experts in each layer and return, and so do their gradients; a recomputed layer sends the states again."""
    shape = request.shape
    tokens = request.micro_batch * request.accumulation * request.sequence_length
    states = tokens * shape.active_experts * shape.hidden * request.computing_bytes * shape.layers
    exchanges = 6 if request.gradient_checkpointing else 4
    return states * exchanges * (request.box.ranks - 1) / request.box.ranks


def _time_text(case: ConfigCase, step: PredictedStep, *, has_ends: bool = False) -> str:
    """Return the seconds of a step, and the bytes that a rank and a node send in it."""
    request = case.request
    sent = sent_bytes(request)
    sends = f" and {rounded(sent / 1e9)} GB sent by a rank" if sent else ""
    if sent and request.box.nodes > 1:
        sends += f" ({rounded(leaving_bytes(request) / 1e9)} leave each node)"
    ends = step.range_text if has_ends else ""
    return f"{rounded_seconds(step.time.step_s.value)}{ends}{sends}"


def _explain_loading(case: ConfigCase) -> Iterator[FrequentAnswer]:
    """Compare loading a model in shards, as stage 3 does, and whole in each process."""
    shards, full = (variant.memory.host_parts["load"] for variant in (case, case.at(stage=2)))
    because = (
        "from_pretrained creates shards only if transformers has the configuration: create TrainingArguments, or"
        " HfDeepSpeedConfig in a custom loop, before the model, and keep the object",
        f"otherwise each of a node's {case.request.box.gpus_per_node} processes creates the whole model, in fp32 or in"
        " the checkpoint's type, next to the weights that it reads; more GPUs in a node do not help",
    )
    short = f"{gib(shards)} a node; {gib(full)} if the model is created before TrainingArguments"
    if full > shards:
        figures = {"shards": shards, "whole": full}
        yield FrequentAnswer("How much host memory does loading need?", short, because, figures)


def _explain_generation(case: ConfigCase, tokens: int) -> FrequentAnswer:
    """Compare gathering the weights for each token and once."""
    shape, box, batch = case.shape, case.request.box, case.request.micro_batch
    weights = float(case.request.stored.parameters * case.weight)
    cache = 2.0 * 2 * shape.layers * shape.key_value_heads * shape.head_dim * batch * tokens
    short = f"a KV cache of {gib(cache)} for {batch} x {tokens:,} tokens in 16 bits"
    figures = {"weights": weights, "cache": cache}
    if case.vllm is not None:
        where = "these GPUs" if case.vllm == "colocate" else "its server"
        short = f"vLLM generates on {where}, with its own weights: {gib(weights)} leave the training after each step"
        if case.stage == 3 and not shape.lora_rank:
            largest = gib(max(param.elements for param in shape.params) * float(case.weight))
            short += f", gathered one parameter after another, at most {largest} at once"
    elif case.stage == 3 or case.request.strategy.is_fsdp:
        short = f"each token gathers {gib(weights)}; if that is gathered once (TRL's default), as much more and {short}"
        if box.device is not ANY_DEVICE:
            # Each layer is gathered by its hooks, and its kernels are launched.
            per_token = calls_s(box, "all_gather", weights, weights / (shape.layers + 1))
            launches = shape.layers * FITTED.launch_s + len(shape.params) * FITTED.gather_hook_s
            figures["gather_s"] = tokens * (per_token + launches)
            short = f"at least {figures['gather_s'] / 60:,.1f} min for each batch: {short}"
    because: tuple[str, ...] = (
        "a sharded model gathers each layer for each token of a batch, with TRL's ds3_gather_for_generation once (since"
        " 0.15.0 in GRPO)",
        "vLLM next to the training (TRL's use_vllm; vllm_mode=colocate since 0.18.0) keeps a copy of the weights that"
        " ZeRO does not shard; vllm_enable_sleep_mode, since 0.23.0, moves it to the host during a step",
    )
    if case.stage == 3 and shape.lora_rank:
        # sync_weights in trl/generation/vllm_generation.py.
        gathered = f"all weights gathered on each rank, {gib(weights)} next to the rest"
        parts = "ms-swift does it in parts with --move_model_batches"
        because = (*because, f"with LoRA TRL merges adapters for it with {gathered}; {parts}")
    return FrequentAnswer(f"What does generating {tokens:,} tokens cost?", short, because, figures)


def _at_stage(case: ConfigCase, stage: int, ranks: int | None = None, **zero: Any) -> ConfigCase:
    """Return the case at a stage, without offloading parameters or a part of the optimizer, as stage 2 cannot."""
    optimizer = case.offload("offload_optimizer")
    zero = {"offload_param": None, "offload_optimizer": optimizer and {**optimizer, "ratio": 1.0}, **zero}
    return case.at(ranks, stage=stage, **zero)


def _compared_text(case: ConfigCase) -> str:
    """Return the settings of the file that a comparison of stages leaves out, with a leading comma."""
    optimizer = case.offload("offload_optimizer")
    texts = ["without offload_param"] if case.offload("offload_param") is not None else []
    if optimizer and optimizer.get("ratio", 1.0) != 1.0:
        texts.append("with offload_optimizer.ratio=1")
    return "".join(f", {text}" for text in texts)


def _compare_stages(case: ConfigCase, lower: int, higher: int) -> FrequentAnswer:
    at_lower, at_higher = (_at_stage(case, stage, case.ranks).memory for stage in (lower, higher))
    before, after = device_bytes(at_lower), device_bytes(at_higher)
    if about(after) == about(before):
        short = f"as much: {about(after)}"
    else:
        short = f"{'yes' if after > before else 'no'}: {about(after)}, stage {lower} {about(before)}"
    short += _compared_text(case)
    figures: dict[str, float] = {f"stage_{lower}": before, f"stage_{higher}": after}
    count = case.ranks
    while after >= before and count < _MAX_RANKS and "less_from_ranks" not in figures:
        count *= 2
        lower_bytes, higher_bytes = (device_bytes(_at_stage(case, stage, count).memory) for stage in (lower, higher))
        if higher_bytes < lower_bytes:
            short += f"; no from {count} ranks"
            figures["less_from_ranks"] = count
    parts = ("parameters", "gradients", "optimizer", "buffers")
    shares = (f"{part} {gib(at_lower.device_parts[part])} and {gib(at_higher.device_parts[part])}" for part in parts)
    reasons = _stage_reasons(_at_stage(case, higher))
    because = (f"at the peaks of stage {lower} and stage {higher}: {', '.join(shares)}", *reasons)
    return FrequentAnswer(f"Does stage {higher} need more memory than stage {lower}?", short, because, figures)


def _stage_reasons(case: ConfigCase) -> Iterator[str]:
    """Yield what decides whether the higher stage of a comparison saves memory, from the case at that stage."""
    elements, bucket = case.shape.parameters, case.zero["reduce_bucket_size"]
    if case.stage == 2:
        parts = case.memory.device_parts
        sizes = (elements * case.weight, bucket_bytes(case), parts["activations"] + parts["logits"])
        saved = "stage 2 shards {} of gradients as buckets of {} fill; few exist where activations and logits need {}"
        yield saved.format(*map(gib, sizes))
    elif gathered := (gathers := simulate_gathers(case.request)).gathered_at_once:
        yield (
            f"stage 3 gathers {gathered:,} elements at once, {gathered / elements:.1%} of the model:"
            " prefetching goes ahead up to stage3_max_live_parameters, and stage3_max_reuse_distance keeps reused"
            f" ones; with their buffers that is {gib(gathers.max_live_elements * case.weight)}"
        )
    largest = case.largest.elements
    if bucket >= elements:
        yield f"all of this model's gradients fit into reduce_bucket_size ({bucket:,.0f}), so neither stage saves any"
    elif largest > bucket:
        yield (
            f"{case.largest.name} ({largest:,}) does not fit into reduce_bucket_size ({bucket:,.0f}): its gradient"
            f" stays unpartitioned, {gib(largest * case.weight)}; a bucket of {largest:,} has room for it"
        )
    if case.stage == 3 and (fixed := sum(param.elements for param in persistent_params(case.request))):
        yield f"{fixed:,} elements in small tensors stay unpartitioned, {gib(fixed * case.weight)} on every rank"


def _compare_ranks(case: ConfigCase) -> FrequentAnswer:
    """Compare the peak at half, the same and twice the number of ranks."""
    half = max(case.data_ranks // 2, 1) * case.request.tensor_ranks
    counts = sorted({half, case.ranks, 2 * case.ranks})
    memories = {count: case.at(count).memory for count in counts}
    now, twice = memories[case.ranks], memories[2 * case.ranks]
    fixed = ", ".join(
        f"{part} {gib(size)}"
        for part, size in sorted(now.device_parts.items(), key=lambda item: -item[1])
        if size > 2**20 and twice.device_parts.get(part, 0) > _FALLS_TO * size
    )
    activations = "activations depend on the micro-batch of one rank, which more ranks do not change"
    because = [f"parts that do not fall with more ranks: {fixed}", activations]
    bucket = case.zero.get("reduce_bucket_size", 0)
    if case.stage and bucket >= case.shape.parameters:
        because.append(f"the bucket is {bucket:,.0f} elements wide for any model and number of ranks")
    if not case.stage and not case.request.strategy.is_fsdp:
        because.append("without ZeRO every rank has a copy of the whole state")
    if case.request.strategy.mesh is not None:
        because.append(f"each replica has {case.request.ranks_per_replica} ranks: more ranks are more replicas")
    peaks = {count: device_bytes(memory) for count, memory in memories.items()}
    fraction = peaks[2 * case.ranks] / peaks[case.ranks]
    falls = "hardly" if fraction < 1 else "no"
    if fraction < _FALLS:
        falls = "yes"
    short = ", ".join(f"{count} rank{'s'[: count > 1]} {gib(peak)}" for count, peak in peaks.items())
    short = f"{falls}: {short}"
    figures = {f"ranks_{count}": peak for count, peak in peaks.items()}
    return FrequentAnswer("Does memory per rank fall with more ranks?", short, tuple(because), figures)


def _compare_host_memory(case: ConfigCase) -> FrequentAnswer:
    optimizer = {**(case.offload("offload_optimizer") or {}), "device": "cpu", "ratio": 1.0}
    at_2, at_3 = (_at_stage(case, stage, offload_optimizer=optimizer).memory for stage in (2, 3))
    peaks = [at_2.host_peak.value, at_3.host_peak.value]
    per_node, largest, phases = case.request.box.gpus_per_node, case.largest.elements, ("load", "train", "save")
    because = (
        ", ".join(f"{name} {gib(at_2.host_parts[name])} and {gib(at_3.host_parts[name])}" for name in phases),
        f"outside stage 3 each of a node's {per_node} processes creates the full model, assumed in fp32"
        f" ({gib(4 * case.request.full_shape.parameters)} each; transformers 5 loads in the checkpoint's type)",
        f"stage 2 has a pinned copy of the largest tensor, {gib(largest * case.weight)} a rank, next to its shard and,"
        " with accumulation, the gradients of its shard as full tensors",
        "pinned memory is allocated in powers of two, so a tensor just above one needs twice as much",
        f"state alone is {gib(at_2.host_parts['state'])} and {gib(at_3.host_parts['state'])} on a node",
    )
    compared = _compared_text(case) or " on a node"
    short = f"{'yes' if peaks[0] > peaks[1] else 'no'}: {gib(peaks[0])} and {gib(peaks[1])}{compared}"
    question = "Does offload need more host memory with stage 2 than with stage 3?"
    return FrequentAnswer(question, short, because, {"stage_2": peaks[0], "stage_3": peaks[1]})
