"""Predicted figures of a measured configuration, next to the measured ones. It imports no torch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from study.advisor.explain_case import ConfigCase, ProgramSettings, resolve
from study.advisor.user_settings import UserFile, check_deepspeed, flatten
from study.config.errors import UserError
from study.config.flags import Precision
from study.config.strategies import DEFAULT_RANKS_PER_NODE, STRATEGY_NAMES, Strategy, read_strategy
from study.predictor.calibration import MeasuredRun
from study.predictor.communication import sent_by_collective, sent_bytes
from study.predictor.hardware import CPU_CORE, Hardware, box_from_device_name
from study.predictor.intervals import Ends
from study.predictor.live import with_frozen
from study.predictor.memory import predict_memory
from study.predictor.models import shape_of_document
from study.predictor.request import Estimate, MemoryUse, Request, StepTime
from study.predictor.shape import ModelShape, with_adapters
from study.predictor.state import frozen_bytes, predict_state
from study.predictor.time import predict_time, speed_ends, step_ends
from study.receipt.document import (
    BUFFERS,
    PASSES,
    PRECISIONS,
    EngineFacts,
    ForecastRow,
    MeasuredForecast,
    PeakFacts,
    ReceiptDocument,
    read_receipt,
    sum_parts,
)
from study.receipt.unexplained import FAR_FACTOR, explain_peak, explain_step

# State and traffic are counted exactly: only buffers of a few bytes may be missing.
_EXACT = 0.01
# Fraction of the peak from which other tensors, which no prediction includes, are left out of the comparison.
_OTHER_FRACTION = 0.05
_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adamw", "FusedAdam": "adamw", "DeepSpeedCPUAdam": "adamw", "Lion": "lion"}
_FILE = "this engine"
# Ends of keys of a config of transformers, those of attention, and the beginnings of those of a classifier's head.
_DROPOUT = ("dropout", "pdrop", "dropout_prob")
_ATTENTION_DROPOUT = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
_HEADS = ("summary_", "classifier_", "qa_", "seq_classif_")
# Phases of the predictor's moments. A reference model's pass is in none.
_PHASES = {
    "at the loss": "in the forward pass",
    "in the forward pass": "in the forward pass",
    "at the loss's gradient": "in the backward pass",
    "in the backward pass": "in the backward pass",
    "in the optimizer step": "in the optimizer step",
}
# Two moments of one phase are the same if logits and gradients of one are at most this many times those of the other,
# or both are below this fraction of the peak.
_MOMENT_PARTS = ("gradients", "logits")
_SAME_FACTOR, _SMALL_FRACTION = 2, 0.02


def make_forecast(receipt: ReceiptDocument) -> MeasuredForecast:
    """Return the predicted figures next to the measured ones, or why there are none."""
    try:
        case = config_case(receipt)
        rows = tuple(_compare(receipt, case.request))
        return MeasuredForecast(comparisons=rows, parts=tuple(_compare_parts(receipt, case.request)))
    except UserError as refusal:
        return MeasuredForecast(missing=refusal.problem)


def read_run(name: str) -> MeasuredRun:
    """Return the measured run of a receipt's file; UserError if it cannot be predicted."""
    receipt = read_receipt(name)
    try:
        return measured_run(receipt, name)
    except UserError as refusal:
        raise UserError(f"{name}: {refusal.problem}", "use another receipt, or --measured") from None


def measured_run(receipt: ReceiptDocument, name: str) -> MeasuredRun:
    """Return step and peak of a receipt; UserError if its configuration cannot be predicted."""
    request = config_case(receipt).request
    # Questions have neither dropout nor a cache, whose bytes are in the measured excess, and so in each answer.
    without: dict[str, Any] = {"dropout": False, "attention_dropout": False, "uses_cache": False}
    request = dataclasses.replace(request, strategy=_named_strategy(request.strategy), **without)
    memory, step_s = receipt.memory, receipt.time.step_s
    if step_s is not None:
        # The data loader waits as long with any strategy.
        step_s -= receipt.time.parts.get("data", 0.0)
    peak = None if memory is None else memory.total_bytes - memory.parts.get("other_tensors", 0)
    return MeasuredRun(name, request, step_s, peak)


def _named_strategy(strategy: Strategy) -> Strategy:
    """Return a strategy under the name of the one with the same stage and offload, if there is one."""
    for name in STRATEGY_NAMES:
        candidate = read_strategy(name)
        has_groups = candidate.mesh is not None or candidate.group is not None
        if not has_groups and _placement(candidate) == _placement(strategy):
            return dataclasses.replace(strategy, name=name)
    return strategy


def _placement(strategy: Strategy) -> tuple[object, ...]:
    """Return the sharded parts of the state, and their devices."""
    offload = (strategy.offload_device("optimizer"), strategy.offload_device("param"))
    return strategy.deepspeed is not None, strategy.zero_stage, strategy.is_fsdp, offload, strategy.name == "ddp"


def config_case(receipt: ReceiptDocument) -> ConfigCase:
    """Return the engine's settings as `study explain` resolves a file; UserError if they are not modelled."""
    engine, work = receipt.engine, receipt.work
    if not work.micro_batches or not work.samples or not work.sequence_length:
        raise UserError("no tokens were seen", "give the model its tokens as input_ids")
    if engine.sample_ranks < engine.ranks:
        raise UserError("tensor-, context- and sequence-parallel groups are not predicted", "train without them")
    optimizer = _OPTIMIZERS.get(engine.optimizer or "AdamW")
    if optimizer is None and engine.engine != "deepspeed":
        raise UserError(f"the predictor does not support {engine.optimizer}", "use AdamW")
    shape = _shape(receipt)
    program = ProgramSettings(
        sequence_length=work.sequence_length,
        micro_batch=work.samples,
        accumulation=work.micro_batches,
        gradient_checkpointing=engine.gradient_checkpointing,
        optimizer=cast(Any, optimizer or "adamw"),
        attention=cast(Any, receipt.model.attention if receipt.model.attention in ("eager", "sdpa") else "sdpa"),
    )
    case = resolve(settings_file(engine), shape, engine.ranks, program, _box(engine))
    request = dataclasses.replace(
        case.request,
        strategy=_with_replicas(case.request.strategy, engine),
        **_precision(engine, case.request),
        **_wrapping(receipt, shape),
        keeps_outputs=bool(receipt.memory is not None and receipt.memory.kept_output_bytes),
        compiled=engine.compiled,
        adapters_in_16_bits=receipt.model.lora_dtype in ("bfloat16", "float16"),
        quantized=receipt.model.quantized,
        double_quantized=receipt.model.double_quantized,
        uses_cache=bool((receipt.model.config or {}).get("use_cache")),
    )
    return dataclasses.replace(case, request=request, releases=receipt.packages)


def settings_file(engine: EngineFacts) -> UserFile:
    """Return the engine's settings as a file that a user could have launched."""
    if engine.engine == "deepspeed":
        settings = copy.deepcopy(dict(engine.settings or {}))
        file = UserFile(_FILE, "deepspeed", "DEEPSPEED", settings, tuple(flatten(settings)))
        check_deepspeed(file)
        return file
    if engine.engine in ("fsdp1", "fsdp2"):
        version = 2 if engine.engine == "fsdp2" else 1
        # Whether layers are wrapped is read from the groups (_wrapping).
        fsdp: dict[str, Any] = {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        fsdp["fsdp_offload_params"] = engine.offload_param == "cpu"
        if version == 2:
            fsdp["fsdp_reshard_after_forward"] = engine.reshard_after_forward is not False
        elif engine.sharding is not None:
            fsdp["fsdp_sharding_strategy"] = engine.sharding
        return UserFile(_FILE, "accelerate", "FSDP", None, (), fsdp=fsdp)
    return UserFile(_FILE, "accelerate", "MULTI_GPU" if engine.engine == "ddp" else "NO", None, ())


def _shape(receipt: ReceiptDocument) -> ModelShape:
    model = receipt.model
    if model.config is None:
        raise UserError(f"{model.name} has no config of transformers", "give one")
    if model.config.get("architectures") is None and model.config.get("model_type") is None:
        raise UserError(f"{model.name} has no model_type", "give one")
    shape = shape_of_document(model.config, model.name)
    if model.lora_rank is not None:
        shape = with_adapters(shape, model.lora_rank, model.lora_targets, model.lora_saved, dora=model.lora_dora)
    if model.frozen_modules:
        shape = with_frozen(shape, model.frozen_modules)
    for what, predicted, counted in (
        ("parameters", shape.parameters, model.parameters),
        ("trained parameters", shape.trained_parameters, model.trained_parameters),
    ):
        if predicted != counted:
            problem = f"the predictor's {model.name} has {predicted:,} {what}, and this one {counted:,}"
            raise UserError(problem, "leave the prediction out")
    return shape


def _box(engine: EngineFacts) -> Hardware:
    nodes = max(1, engine.ranks // DEFAULT_RANKS_PER_NODE)
    if engine.device == "cpu":
        return Hardware("CPU cores", CPU_CORE, engine.ranks, gloo_copies_gathers=True)
    return box_from_device_name(engine.device, engine.ranks, nodes if engine.ranks % nodes == 0 else 1)


def _with_replicas(strategy: Strategy, engine: EngineFacts) -> Strategy:
    """Return a strategy of FSDP with the replicas of the live engine."""
    if engine.replicas == 1 or not strategy.is_fsdp:
        return strategy
    mesh = (engine.replicas, engine.ranks // engine.replicas)
    return dataclasses.replace(strategy, mesh=mesh, custom_settings={"mesh": mesh})


def _precision(engine: EngineFacts, request: Request) -> dict[str, Any]:
    """Return the precision of the request: products and weights as they were seen, and FSDP's casts as it has them."""
    computes = PRECISIONS.get(engine.compute_dtype or engine.param_dtype, "fp32")
    weights = PRECISIONS.get(engine.param_dtype, "fp32")
    casts = PRECISIONS.get(engine.cast_dtype or engine.param_dtype, "fp32")
    reduces = PRECISIONS.get(engine.reduce_dtype or "", casts)
    if reduces not in ("fp32", casts) or weights not in ("fp32", casts):
        problem = f"weights in {weights} that FSDP gathers in {casts} and reduces in {reduces} are not predicted"
        raise UserError(problem, "give MixedPrecisionPolicy one type")
    in_fp32 = {"fsdp_reduces_fp32": casts != "fp32" and reduces == "fp32"}
    if weights != "fp32":
        return {"precision": cast(Precision, f"{weights}-engine"), "pure": engine.engine != "deepspeed", **in_fp32}
    if casts != "fp32":
        return {"precision": cast(Precision, casts), "pure": False, "autocast": False, **in_fp32}
    # What FSDP does not cast, autocast does.
    return {"precision": cast(Precision, computes), "pure": False, "autocast": True}


def _wrapping(receipt: ReceiptDocument, shape: ModelShape) -> dict[str, Any]:
    engine = receipt.engine
    whole_root = engine.engine == "fsdp2" and engine.embedding_in_root and not shape.tied
    # Without wrapped layers there are at most three groups: of the embedding, of norm and head, and the root.
    is_unwrapped = engine.wrapped_groups is not None and engine.wrapped_groups <= shape.layers
    return {"fsdp_whole_root": whole_root, "fsdp_unwrapped": is_unwrapped, **_dropout(receipt)}


def _dropout(receipt: ReceiptDocument) -> dict[str, bool]:
    """Return whether attention has dropout, and other outputs in the layers."""
    config = receipt.model.config or {}
    is_on = {key for key, value in config.items() if key.endswith(_DROPOUT) and value}
    in_layers = {key for key in is_on if key not in _ATTENTION_DROPOUT and not key.startswith(_HEADS)}
    return {"dropout": bool(in_layers), "attention_dropout": not is_on.isdisjoint(_ATTENTION_DROPOUT)}


def _compare(receipt: ReceiptDocument, request: Request) -> Iterator[ForecastRow]:
    memory = predict_memory(request)
    if memory.missing:
        raise UserError(f"the predictor does not support {memory.missing}", "leave it out")
    if receipt.model_state is not None:
        state, live = predict_state(request), receipt.model_state
        for figure, predicted, places in (
            ("parameters", state.params_device + state.params_host + sum(frozen_bytes(request)), live.params),
            ("optimizer state", state.optimizer_device + state.optimizer_host, live.optimizer),
        ):
            measured = places.get("device", 0) + places.get("host", 0)
            yield _exact(figure, predicted, measured)
    if receipt.traffic is not None:
        yield _exact("ring bytes of a step", sent_bytes(request), sum(it.ring_bytes for it in receipt.traffic.values()))
    if receipt.memory is not None and not _measures_other_bytes(request):
        total, other_bytes = receipt.memory.total_bytes, receipt.memory.parts.get("other_tensors", 0)
        if other_bytes < _OTHER_FRACTION * total:
            row = _compared("peak of tensors", "bytes", memory.peak_allocated, total)
        else:
            row = _compared("peak without others", "bytes", memory.peak_allocated, total - other_bytes)
        is_far = row.measured > FAR_FACTOR * row.predicted
        yield row.model_copy(update={"cause": explain_peak(receipt, memory.device_parts)}) if is_far else row
    if receipt.time.step_s is not None and not request.box.is_cpu_only:
        time = predict_time(request, memory)
        step = _with_ends(time.step_s, step_ends(request, time))
        row = _compared("step", "s", step, receipt.time.step_s)
        cause = explain_step(receipt, row, _pair_times(receipt, time))
        yield row.model_copy(update={"cause": cause})


def _measures_other_bytes(request: Request) -> bool:
    """Whether a CPU's measured memory has bytes that a prediction does not count: most of DeepSpeed's bucket, which
    nothing writes to, or state that FSDP offloads."""
    return request.box.is_cpu_only and (bool(request.strategy.zero_stage) or request.fsdp_offloads)


def _compare_parts(receipt: ReceiptDocument, request: Request) -> Iterator[ForecastRow]:
    """Yield predictions of measured parts, with the names of `study receipt a.json b.json`. They state no error, but
    for tokens/s. Times are predicted on GPUs alone."""
    memory = predict_memory(request)
    if receipt.memory is not None and not _measures_other_bytes(request):
        yield from _compare_peaks(receipt.memory, memory)
    for kind, predicted in sorted(sent_by_collective(request).items()):
        if (measured := (receipt.traffic or {}).get(kind)) is not None:
            yield _without_error(f"ring bytes: {kind}", "bytes", predicted, measured.ring_bytes)
    if request.box.is_cpu_only:
        return
    time = predict_time(request, memory)
    yield from _compare_times(receipt, time)
    if receipt.speed.tokens_per_s is not None:
        all_ranks = Estimate(receipt.engine.input_ranks * time.tokens_per_s_per_gpu.value)
        predicted_speed = _with_ends(all_ranks, speed_ends(request, time))
        yield _compared("tokens/s", "tokens/s", predicted_speed, receipt.speed.tokens_per_s)


def _compare_peaks(memory: PeakFacts, prediction: MemoryUse) -> Iterator[ForecastRow]:
    """Yield the parts of the peak if it is predicted at the same moment, and the parts are those of the predictor."""
    if "logits" not in memory.parts or _PHASES.get(prediction.moment) != memory.moment:
        return
    measured = {part: float(count) for part, count in memory.parts.items()}
    predicted = dict(prediction.device_parts)
    if not all(_is_similar(measured.get(part, 0), predicted[part], memory.total_bytes) for part in _MOMENT_PARTS):
        return
    gathered, buckets = measured.get("gathered", 0), measured.get("buckets", 0)
    buffers = "buckets" if not gathered else "gathered" if not buckets else BUFFERS
    for part, predicted_bytes, measured_bytes in (
        ("gradients", predicted["gradients"], measured.get("gradients", 0)),
        (buffers, predicted["buffers"], gathered + buckets),
        ("activations", predicted["activations"] + predicted["attention"], measured.get("activations", 0)),
        ("logits", predicted["logits"], measured["logits"]),
    ):
        if max(predicted_bytes, measured_bytes) >= _SMALL_FRACTION * memory.total_bytes:
            yield _without_error(f"memory: {part}", "bytes", predicted_bytes, measured_bytes)


def _is_similar(first: float, second: float, peak_bytes: float) -> bool:
    low, high = sorted((first, second))
    return high < _SMALL_FRACTION * peak_bytes or high <= _SAME_FACTOR * low


def _compare_times(receipt: ReceiptDocument, prediction: StepTime) -> Iterator[ForecastRow]:
    """Yield the parts of a step's time that both have."""
    total = sum(receipt.time.parts.values())
    for part, (predicted_s, measured_s) in _pair_times(receipt, prediction).items():
        if max(predicted_s, measured_s) >= _SMALL_FRACTION * total:
            yield _without_error(f"time: {part}", "s", predicted_s, measured_s)


def _pair_times(receipt: ReceiptDocument, prediction: StepTime) -> dict[str, tuple[float, float]]:
    """Return the predicted and the measured seconds of each part of a step that both have; empty if collectives or
    copies are predicted, and the profiler has separated none from the parts in which they are."""
    predicted, measured = _predicted_times(prediction), receipt.time.parts
    transfers = {"communication": receipt.time.collectives, "offload": receipt.time.offload}
    is_separated = all(rows or not predicted[part] for part, rows in transfers.items())
    if not measured or not is_separated:
        return {}
    return {part: (seconds, sum_parts(measured, part)) for part, seconds in predicted.items()}


def _predicted_times(prediction: StepTime) -> dict[str, float]:
    """Return the predicted seconds of a step under the names of a receipt's parts. They add up to the step."""
    compute, parts = dict(prediction.compute_parts), prediction.parts
    optimizer = compute.pop("optimizer") + parts["cpu_adam"]
    # Two parts may have one prediction.
    passes = {PASSES if name == "passes" else name: seconds for name, seconds in compute.items()}
    return {
        **passes,
        "communication": parts["communication_exposed"],
        "offload": parts["offload"] + parts["nvme"],
        "optimizer": optimizer,
    }


def _without_error(figure: str, unit: Any, predicted: float, measured: float) -> ForecastRow:
    return ForecastRow(figure=figure, unit=unit, predicted=predicted, measured=measured)


def _exact(figure: str, predicted: float, measured: float) -> ForecastRow:
    low, high = predicted * (1 - _EXACT), predicted * (1 + _EXACT)
    return ForecastRow(figure=figure, unit="bytes", predicted=predicted, low=low, high=high, measured=measured)


def _with_ends(predicted: Estimate, ends: Ends | None) -> Estimate:
    """Return a figure with its ends: with offload they are those of published hosts."""
    return predicted if ends is None else Estimate(predicted.value, *ends)


def _compared(figure: str, unit: Any, predicted: Estimate, measured: float) -> ForecastRow:
    return ForecastRow(
        figure=figure, unit=unit, predicted=predicted.value, low=predicted.low, high=predicted.high, measured=measured
    )
