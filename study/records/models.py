"""Models of the files of a run directory: every key with the kind of its values.

From them follow what `study.records.schema.validate` refuses, the columns of study/records/rows.py, and the keys of a
summary. A null is a figure that could not be measured, never 0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, Field

from study.config.registry import REGISTRY
from study.records.schema import (
    PEAKS,
    PROFILE_CATEGORIES,
    SEAL,
    STATE_KINDS,
    STATE_PLACES,
    EndCause,
    ProfileCategory,
    SearchAxis,
    State,
)

# Default of a key that older records lack. In a record such a key is null only if its kind has null.
LACKING: Any = None
_MAX_LEVELS = 20


def _must(is_valid: Callable[[Any], bool], requirement: str) -> AfterValidator:
    """Return a rule for values, with the text of its error."""

    def check(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError(requirement)
        return value

    return AfterValidator(check)


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _is_tree(value: Any, levels: int = _MAX_LEVELS) -> bool:
    if isinstance(value, (dict, list)):
        branches = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_is_tree(branch, levels - 1) for branch in branches)
    return value is None or (type(value) in (int, float) and 0 <= value <= sys.float_info.max)


def _require_keys(keys: tuple[str, ...]) -> AfterValidator:
    """Return a rule for an object that has these keys and no other."""

    def check(value: dict[str, Any]) -> dict[str, Any]:
        if value.keys() != set(keys):
            raise ValueError(f"has the keys {', '.join(value)}, and must have {', '.join(keys)}")
        return value

    return AfterValidator(check)


# Kinds of values.
Object = dict[str, Any]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Time = Annotated[str, _must(_is_time, "must be a time with its zone")]
Name = Annotated[str, Field(max_length=200), _must(str.isprintable, "must be printable")]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
SampleHash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
# A choice of numbers would accept true and 1.0.
ZeroStage = Annotated[int, Field(ge=0, le=3)]
OffloadDevice = Literal["cpu", "nvme"]
StrategyName = Annotated[str, _must(lambda name: name in REGISTRY, f"must be one of {', '.join(REGISTRY)}")]
ConsecutiveSteps = Annotated[
    list[Positive],
    Field(min_length=1),
    _must(lambda steps: steps == [*range(steps[0], steps[0] + len(steps))], "must be consecutive steps"),
]
_FIGURES = f"must be a tree of at most {_MAX_LEVELS} levels whose every leaf is a number from 0 up"
Figures = Annotated[Any, _must(_is_tree, _FIGURES)]
Amounts = dict[str, Amount | None]
FigureTrees = dict[str, Figures]
PlaceBytes = Annotated[Amounts, _require_keys(STATE_PLACES)]
StateBytes = Annotated[dict[str, PlaceBytes], _require_keys(STATE_KINDS)]
PhasePeaks = Annotated[Amounts, _require_keys(tuple(PEAKS.values()))]
CategorySeconds = Annotated[dict[str, Amount], _require_keys(PROFILE_CATEGORIES)]


class Record(pydantic.BaseModel):
    """A file of a run directory, or an object in it. An unknown key is an error, such as a typo."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class OpenRecord(Record):
    """A record that may have other keys, with any values."""

    model_config = pydantic.ConfigDict(extra="allow")


class StatusRecord(Record):
    state: State
    reason: str
    hint: str
    started_at: Time
    ended_at: Time | None
    attempt: Positive
    cause: EndCause | None = LACKING
    # The step of the first training loss that is not finite.
    not_finite_step: Positive | None = LACKING
    # The seal: of a run that closed its record.
    files_sha256: Object = LACKING
    status_sha256: Sha256 = LACKING

    @pydantic.model_validator(mode="after")
    def _has_ended_as_it_says(self) -> StatusRecord:
        sealed = self.model_fields_set & SEAL
        if sealed and (missing := SEAL - sealed):
            raise ValueError(f"lacks {', '.join(missing)}")
        if self.ended_at is None and self.state != "interrupted":
            raise ValueError(f"ended_at is null, and the state is {self.state}")
        return self


class EngineRecord(OpenRecord):
    strategy: str
    distributed_type: str
    world_size: Positive
    virtual: bool
    zero_stage: ZeroStage | None
    offload_optimizer: OffloadDevice | None
    offload_param: OffloadDevice | None
    nvme_path: str | None
    optimizer_class: str
    precision: str
    param_dtype: str
    gradient_clipping: Amount
    buckets: Object
    torch: str
    deepspeed: str | None
    initial_weights_sha256: Sha256 | None
    warnings: list[str]
    trainer: str = LACKING
    # Losses that no training of the task can be below.
    floor: Amounts | None = LACKING
    attn_implementation: str | None = LACKING
    tf32: bool = LACKING
    gradient_checkpointing: bool = LACKING
    data: Object | None = LACKING
    optimizer_settings: Object | None = LACKING
    loss_scaler: Object | None = LACKING
    # The type in which DeepSpeed keeps the parameters on NVMe; null if they are elsewhere.
    nvme_param_dtype: str | None = LACKING
    own_settings: Object | None = LACKING
    gradient_accumulation_steps: Positive | None = LACKING
    per_device_train_batch_size: Positive | None = LACKING
    model_layers: Count | None = LACKING
    preset_layers: Count | None = LACKING
    model_parameters: Count | None = LACKING


class DeviceRecord(OpenRecord):
    name: str


class EnvironmentRecord(OpenRecord):
    cpu: str | None = LACKING
    driver: str | None = LACKING
    cuda: str | None = LACKING
    git_commit: str | None = LACKING
    cpu_cores: Positive | None = LACKING
    threads_per_rank: Positive | None = LACKING
    host_memory_gib: Amount | None = LACKING
    git_dirty: bool = LACKING
    code_sha256: Sha256 | None = LACKING
    packages: dict[str, str] = LACKING
    devices: list[DeviceRecord] = LACKING
    other_machines: list[Object] = LACKING
    stack: Object | None = LACKING


class SummaryRecord(Record):
    steps: Count
    tokens: Count
    train_loss_first: float | None
    train_loss_final: float | None
    eval_loss_final: float | None
    eval_accuracy: Share | None
    eval_perplexity: Amount | None
    runtime_s: Amount | None
    startup_s: Amount | None
    step_time_s_median: Amount | None
    step_time_s_p10: Amount | None
    step_time_s_p90: Amount | None
    tokens_per_s: Amount | None
    tokens_per_s_per_device: Amount | None
    samples_per_s: Amount | None
    model_flops_per_step: Amount | None
    mfu: Amount | None
    peak_memory_gib_allocated: Amount | None
    peak_memory_gib_reserved: Amount | None
    peak_memory_gib_device: Amount | None
    avg_memory_gib_device: Amount | None
    host_peak_rss_gib: Amount | None
    state_bytes_per_rank: StateBytes
    comm_bytes_per_step: Amount | None
    comm_calls_per_step: Amount | None
    energy_j: Amount | None
    sent_bytes_per_step: Amount | None = LACKING
    gloo_sent_bytes_per_step: Amount | None = LACKING
    steps_skipped: Count = LACKING
    warmup_steps: Count = LACKING


class RankFigures(Record):
    """A record of a rank that may have other keys, with trees of figures."""

    model_config = pydantic.ConfigDict(extra="allow")

    @pydantic.model_validator(mode="after")
    def _has_only_figures_in_other_keys(self) -> RankFigures:
        for key, value in (self.model_extra or {}).items():
            if not _is_tree(value):
                raise ValueError(f"{key} {_FIGURES}")
        return self


class RankState(RankFigures):
    state_bytes: StateBytes
    pieces: FigureTrees = LACKING
    buffer_bytes: FigureTrees = LACKING
    kept_whole: FigureTrees = LACKING
    grads_in_bucket_bytes: Amount | None = LACKING
    other_tensor_bytes: Amount | None = LACKING
    forward_holds_bytes: Amount | None = LACKING
    forward_gathers_bytes: Amount | None = LACKING
    grads_before_step: Amounts | None = LACKING
    grads_after_backward: Amounts | None = LACKING


class RankMemory(RankFigures):
    rank: Count
    phases: dict[str, PhasePeaks]
    device_mean_over_steps: Amount | None
    state: RankState | None
    time: FigureTrees | None = LACKING


class MemoryRecord(Record):
    unit: Literal["GiB"]
    ranks: list[RankMemory]


class CollectiveRecord(Record):
    calls: Count
    payload_bytes: Count
    # Bytes that NCCL's ring algorithm sends.
    wire_bytes_per_rank: Amount
    gloo_bytes_per_rank: Amount = LACKING


class TrafficRecord(Record):
    step: Positive | None
    world_size: Positive
    collectives: dict[str, CollectiveRecord]
    ranks_per_machine: Positive = LACKING
    across_machines_bytes_per_rank: Amount = LACKING


class ProfiledOperation(Record):
    name: Name
    category: ProfileCategory
    calls_per_step: Amount
    s_per_step: Amount


class ProfileRecord(Record):
    device: Literal["cuda", "cpu"]
    steps: ConsecutiveSteps
    wall_s_per_step: Amount
    busy_s_per_step: Amount
    idle_s_per_step: Amount
    summed_s_per_step: Amount
    calls_per_step: Amount
    categories_s_per_step: CategorySeconds
    top: list[ProfiledOperation]


class SearchRecord(Record):
    id: str
    axis: SearchAxis
    place: Count
    last: Count


class MatmulRates(OpenRecord):
    # By precision.
    tflops: dict[str, Amount] = LACKING


class AttemptRecord(OpenRecord):
    matmul_rates: MatmulRates = LACKING


class SweepRecord(OpenRecord):
    """Notes of a sweep in the folder of each run."""

    strategy: StrategyName = LACKING
    world_size: Positive = LACKING
    command: list[str] = LACKING
    stack: Name | None = LACKING
    searches: list[SearchRecord] = LACKING
    probe: bool = LACKING
    attempts: list[AttemptRecord] = LACKING


class CheckpointRecord(OpenRecord):
    step: Positive
    strategy: str
    world_size: Positive
    config: Object
    schedule: Object
    tokens_sha256: Object
    initial_weights_sha256: str
    environment: Object
    files: Object


class StepRow(Record):
    step: Positive
    loss: float | None
    lr: Amount
    grad_norm: Amount | None
    step_time_s: Amount | None
    tokens: Count
    samples_hash: SampleHash
    # The engine skipped the step because of non-finite gradients.
    skipped: Annotated[bool, _must(bool, "must be true, or left out")] = LACKING


class EvaluationRow(Record):
    step: Positive
    eval_loss: float
    accuracy: Share = LACKING
    perplexity: Amount | None = LACKING


class ConfigRecord(OpenRecord):
    """Any object: study/config/flags.py checks the keys of config.json."""


FILES: dict[str, type[Record]] = {
    "sweep.json": SweepRecord,
    "checkpoint.json": CheckpointRecord,
    "status.json": StatusRecord,
    "config.json": ConfigRecord,
    "environment.json": EnvironmentRecord,
    "engine.json": EngineRecord,
    "summary.json": SummaryRecord,
    "memory.json": MemoryRecord,
    "traffic.json": TrafficRecord,
    "profile.json": ProfileRecord,
    "steps.jsonl": StepRow,
    "evals.jsonl": EvaluationRow,
}


def refusal(error: pydantic.ValidationError) -> str:
    """Return the first error in a line, with its place, value and rule."""
    errors = error.errors(include_url=False)
    first = errors[0]
    outer, key = first["loc"][:-1], first["loc"][-1] if first["loc"] else ""
    inside = "".join(f"{part}." for part in outer)
    if first["type"] == "missing":
        missing = [entry["loc"] for entry in errors if entry["type"] == "missing"]
        return f"{inside}lacks {', '.join(str(place[-1]) for place in missing if place[:-1] == outer)}"
    if first["type"] == "extra_forbidden":
        return f"{inside}has the unknown key {key!r}"
    rule = re.sub(r"^\w+ should", "must", first["msg"])
    if first["type"] in ("model_type", "dict_type"):
        rule = "must be an object"
    if first["type"] == "value_error":
        rule = str(first["ctx"]["error"])
        if isinstance(first["input"], dict):
            # It names the keys of the object itself.
            return f"{inside}{key}: {rule}".removeprefix(": ")
    return f"{inside}{key} is {first['input']!r:.200}: {rule}".strip()
