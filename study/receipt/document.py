"""receipt.json: its schema, reading and writing. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pydantic

from study.config.errors import UserError
from study.host.folders import resolve_path
from study.records.directory import read_json, write_json
from study.records.schema import RecordError

VERSION = 1
# Parts of the memory of a rank at its peak, in the order of the page.
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "gathered", "buckets", "activations", "logits", "other_tensors")
# Fraction of a part on the host from which it is offloaded.
_OFFLOADED_FRACTION = 0.001
# Short names of the types of matrix products, as hardware.yaml has them.
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Parts of a step's time. Communication is the part in which nothing is computed. Offload is waiting for NVMe, and a
# GPU's copies to and from the host while it computes nothing.
TIME_PARTS = ("forward", "backward", "communication", "offload", "optimizer", "data", "rest")
# Two parts may have one prediction, whose row has both names.
_AND = " and "
BUFFERS, PASSES = f"gathered{_AND}buckets", f"forward{_AND}backward"
# DeepSpeed, two versions of FSDP, DDP, or a model on one rank.
Engine = Literal["deepspeed", "fsdp2", "fsdp1", "ddp", "none"]
State = Literal["complete", "too_short", "interrupted"]
# Part of a step that memory is shown over.
Phase = Literal["forward", "backward", "optimizer", "between"]


class Part(pydantic.BaseModel):
    """A part of a receipt: it has no unknown keys, and it is frozen."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EngineFacts(Part):
    """Engine and settings, read from live objects."""

    engine: Engine
    # Name of the study's strategy with these settings; None if it has none.
    strategy: str | None = None
    ranks: int = 1
    # Ranks of the groups that divide a layer, and of those that divide a sequence or its context.
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    backend: str | None = None
    device: str = "cpu"
    zero_stage: int | None = None
    offload_optimizer: str | None = None
    offload_param: str | None = None
    # DeepSpeed's settings as the engine has them.
    settings: dict[str, object] | None = None
    # Of matrix products and of weights: float32, bfloat16 or float16; None if it could not be seen.
    compute_dtype: str | None = None
    param_dtype: str = "float32"
    optimizer: str | None = None
    gradient_checkpointing: bool = False
    compiled: bool = False
    # FSDP: groups, and elements of the outermost one, for parameters that no inner group wraps.
    wrapped_groups: int | None = None
    root_elements: int | None = None
    reshard_after_forward: bool | None = None
    # FSDP: type of gathered parameters, and of reduced gradients; None: no cast.
    cast_dtype: str | None = None
    reduce_dtype: str | None = None
    # FSDP1: torch's name of its strategy, such as FULL_SHARD; None: another engine, or an older receipt.
    sharding: str | None = None
    # FSDP: replicas of the state, each sharded over a part of the ranks.
    replicas: int = 1
    # Trained elements by the type of the weights, and the largest such parameter in fp32.
    trained_elements: dict[str, int] = {}
    largest_fp32: str | None = None
    # Trained elements that a sharding engine does not shard, and the largest such parameter.
    unsharded_elements: int = 0
    largest_unsharded: str | None = None
    embedding: str | None = None
    embedding_elements: int | None = None
    # Whether the embedding is in FSDP's outermost group, and could be in another.
    embedding_in_root: bool = False

    @property
    def sample_ranks(self) -> int:
        """Ranks with different samples."""
        return self.ranks // (self.tensor_parallel * self.sequence_parallel)

    @property
    def input_ranks(self) -> int:
        """Ranks with different tokens: those that share a sequence have each a part of it."""
        return self.ranks // self.tensor_parallel


class ModelFacts(Part):
    name: str
    parameters: int
    trained_parameters: int
    # config.json of a transformers model.
    config: dict[str, object] | None = None
    lora_rank: int | None = None
    # Ends of the names of the modules with adapters, which no other module has; empty: a receipt from before they were
    # read, whose adapters are taken to be on all linear layers.
    lora_targets: tuple[str, ...] = ()
    # Modules with a trained copy next to adapters, and whether these are DoRA's.
    lora_saved: tuple[str, ...] = ()
    lora_dora: bool = False
    lora_dtype: str | None = None
    # Without adapters: full names of the modules whose weights are all frozen, and of other frozen weights.
    frozen_modules: tuple[str, ...] = ()
    # Weights in 4 bits of bitsandbytes, and whether their scales are quantized, too.
    quantized: bool = False
    double_quantized: bool = False
    attention: str | None = None


class WorkFacts(Part):
    """Batch of one rank and one step."""

    steps: int = 0
    measured_steps: tuple[int, ...] = ()
    micro_batches: int | None = None
    # Samples and tokens of the first input of a micro-batch, padding included.
    samples: int | None = None
    sequence_length: int | None = None


class PeakFacts(Part):
    """Memory of one rank at the moment of a step with the most bytes in use."""

    moment: str
    # Bytes of tensors in use: those of torch's allocator, or on a CPU the growth of the process's heap.
    total_bytes: int
    # `logits` is missing if other tensors are as wide, and in receipts from before that part.
    parts: dict[str, int]
    # On the host.
    host_parts: dict[str, int] = {}
    allocator_slack_bytes: int | None = None
    outside_torch_bytes: int | None = None
    process_peak_bytes: int
    # The allocator's own peak since the program has last reset it, loading included; None on a CPU.
    allocator_peak_bytes: int | None = None
    # Outputs of the model that the program keeps through the backward pass; None: a receipt from before it was read.
    kept_output_bytes: int | None = None
    # Why less than 95 % of the bytes are attributed; None: more are, nothing counts them, or an earlier receipt.
    low_attribution: str | None = None

    @property
    def attributed(self) -> float:
        """Fraction of the bytes in use that the parts explain; parts of more bytes than are in use count as errors."""
        if not self.total_bytes:
            return 0.0
        return 1 - abs(self.total_bytes - sum(self.parts.values())) / self.total_bytes

    def offloaded_bytes(self, part: str) -> int:
        """Return the bytes of a part that are offloaded; the optimizer's step counters are on the host anyway."""
        count = self.host_parts.get(part, 0)
        return count if count >= _OFFLOADED_FRACTION * (count + self.parts.get(part, 0)) else 0


class PhaseSpan(Part):
    phase: Phase
    begin_s: float
    end_s: float


class MemoryTimeline(Part):
    """Memory over the time of the watched step, without the time of the receipt's own work."""

    peak_at_s: float
    at_s: tuple[float, ...]
    total_bytes: tuple[int, ...]
    # Bytes at each time; a part that is missing has none.
    parts: dict[str, tuple[int, ...]]
    phases: tuple[PhaseSpan, ...] = ()

    @pydantic.model_validator(mode="after")
    def _has_a_value_for_each_time(self) -> MemoryTimeline:
        if self.peak_at_s not in self.at_s or sorted(self.at_s) != list(self.at_s):
            raise ValueError("the times are not in their order, or the peak is at none of them")
        columns = {"total_bytes": self.total_bytes, **self.parts}
        for name, column in columns.items():
            if len(column) != len(self.at_s):
                raise ValueError(f"{name} has {len(column)} values for {len(self.at_s)} times")
        return self


class StateFacts(Part):
    """Model state of one rank: bytes by place, of parameters, gradients and optimizer."""

    params: dict[str, int]
    grads: dict[str, int]
    optimizer: dict[str, int]


class HostFacts(Part):
    """The machine of rank 0."""

    # That this rank may use, and ranks that the launcher has started on the machine.
    cores: int
    ranks: int


class CollectiveTraffic(Part):
    calls: int
    payload_bytes: int
    ring_bytes: float


class CollectiveTime(Part):
    # Time with at least one such collective or transfer in flight, and of that the time in which nothing else ran.
    in_flight_s: float
    exposed_s: float


class TimeFacts(Part):
    # Median of all steps but the first and the disturbed ones, and their number.
    step_s: float | None = None
    steps: int = 0
    # Of one measured step, that with the median time.
    parts: dict[str, float] = {}
    collectives: dict[str, CollectiveTime] = {}
    # Traffic of the host and NVMe, of the same kind: nvme, to_device, to_host.
    offload: dict[str, CollectiveTime] = {}


class SpeedFacts(Part):
    tokens_per_s: float | None = None
    # Counted in the watched step on one rank, recomputation included.
    flops_per_step: int | None = None
    mfu: float | None = None
    mfu_missing: str | None = None


class RankFacts(Part):
    rank: int
    # Time in which the rank computes: neither waits for others nor for data.
    busy_s: float | None = None
    peak_bytes: int | None = None
    process_peak_bytes: int | None = None


class ForecastRow(Part):
    """A predicted figure and the measured one."""

    figure: str
    unit: Literal["bytes", "s", "tokens/s"]
    predicted: float
    # Ends of the stated error; None: none is stated.
    low: float | None = None
    high: float | None = None
    measured: float
    # Why a measured peak is more than twice the predicted one, or a step outside of its stated error; None: it is
    # neither, or an earlier receipt.
    cause: str | None = None

    @property
    def is_outside(self) -> bool:
        """Whether the measured figure is outside of the stated error."""
        return self.low is not None and self.high is not None and not self.low <= self.measured <= self.high


class MeasuredForecast(Part):
    comparisons: tuple[ForecastRow, ...] = ()
    # Predictions on the lines of the measured figures: parts of peak and step, collectives and tokens/s.
    parts: tuple[ForecastRow, ...] = ()
    # Why there is no prediction.
    missing: str | None = None
    # The file has another comparison, of an earlier predictor, which this one replaces.
    differs_from_file: bool = False


class PredictedChange(Part):
    """One change of a configuration, with its predicted effect."""

    says: str
    # Over the measured speed, and its interval.
    speedup: float
    low: float
    high: float
    device_bytes: float


class PredictedChanges(Part):
    """The fastest changes that fit and are faster at both ends of their intervals, calibrated by the run."""

    changes: tuple[PredictedChange, ...] = ()
    # Why none were predicted.
    missing: str | None = None


class Fault(Part):
    id: str
    says: str
    fix: str


class CombinationFacts(Part):
    """The answer of `study releases --features` for the features and releases of the run."""

    features: tuple[str, ...]
    releases: dict[str, str | None]
    answer: Literal["right", "wrong", "error", "by_design", "pairs", "untested"]
    why: str
    besides: tuple[str, ...]
    by: Literal["runs", "causes", "source", "grid", "none"]
    # The command that tests it; None if stored runs of these releases decide.
    test: str | None


class OwnCost(Part):
    """Cost of the receipt itself."""

    # Seconds of the receipt's functions in the measured steps.
    measured_s: float = 0.0
    # Seconds that it added to the program: the profiled and the watched step beyond the median step, and its end.
    added_s: float | None = None
    # Of the host's time in each later step.
    later_fraction: float | None = None


class ReceiptDocument(Part):
    """The content of receipt.json."""

    version: Literal[1] = 1
    made_at: str
    state: State
    packages: dict[str, str | None]
    engine: EngineFacts
    model: ModelFacts
    work: WorkFacts
    memory: PeakFacts | None = None
    model_state: StateFacts | None = None
    time: TimeFacts = TimeFacts()
    traffic: dict[str, CollectiveTraffic] | None = None
    # Payload of the reductions of gradients in each micro-batch of a step.
    reduced_bytes: tuple[int, ...] = ()
    # That of all reductions of a step by the type of their elements.
    reduced_by_dtype: dict[str, int] = {}
    speed: SpeedFacts = SpeedFacts()
    ranks: tuple[RankFacts, ...] = ()
    forecast: MeasuredForecast = MeasuredForecast()
    # None: a receipt from before they were stored, or without a measured step.
    changes: PredictedChanges | None = None
    faults: tuple[Fault, ...] = ()
    # None: a receipt from before it was looked up, or settings that no stored run can have.
    combination: CombinationFacts | None = None
    # Figures that are not measurable here, and failures inside the receipt.
    unavailable: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    cost: OwnCost = OwnCost()
    # None: a receipt from before there were timelines, or no peak was measured.
    timeline: MemoryTimeline | None = None
    # None: a receipt from before it was read.
    host: HostFacts | None = None

    @property
    def counts_bytes_in_use(self) -> bool:
        """Whether the bytes at the peak were counted: on a CPU before psutil 7.2 they are the sum of the parts."""
        memory = self.memory
        return memory is None or self.engine.device != "cpu" or memory.outside_torch_bytes is not None


def sum_parts(parts: Mapping[str, float], names: str) -> float:
    """Return the sum of parts such as PASSES; 0 for one that is missing."""
    return sum(parts.get(name, 0.0) for name in names.split(_AND))


def write_receipt(path: Path, receipt: ReceiptDocument) -> None:
    write_json(path, receipt.model_dump(mode="json"))


def read_receipt(name: str) -> ReceiptDocument:
    """Return the receipt in a file; UserError if it is none, or one of another version."""
    path = resolve_path(name)
    if path.is_dir():
        path /= "receipt.json"
    try:
        document = read_json(path)
    except RecordError as error:
        raise UserError(str(error), "name a receipt.json that study.Receipt wrote") from None
    if (version := document.get("version")) != VERSION:
        fix = "print it with the release of zero-study that wrote it"
        raise UserError(f"{name} is not a receipt of version {VERSION} (its version is {version!r})", fix)
    try:
        return ReceiptDocument.model_validate(document)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{name} is not a receipt: {place}: {first['msg']}", "name an unchanged receipt.json") from None
