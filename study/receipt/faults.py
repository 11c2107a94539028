"""Faults of a training loop that the facts of its receipt show. It imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from study.advisor.explain_combinations import WRONG_TRAINING, stored_answer
from study.advisor.explain_findings import findings
from study.advisor.user_settings import Finding
from study.config.errors import UserError
from study.receipt.document import CombinationFacts, EngineFacts, Fault, ReceiptDocument
from study.receipt.forecast import config_case, settings_file
from study.receipt.host_optimizer import read_host_optimizer
from study.releases.causes import PACKAGES, known_faults

# Fractions of a step, of the parameters, and of a micro-batch's reductions from which something is a fault.
WAITING_FRACTION = 0.1
ROOT_FRACTION = 0.2
REDUCED_FRACTION = 0.5
# Of the reductions' bytes.
FP32_FRACTION = 0.2
_16_BITS = ("bfloat16", "float16")
# Of the peak.
KEPT_FRACTION = 0.02
_OFFLOADS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_PLACES = {"cpu": "the host", "nvme": "NVMe"}
# Class of DeepSpeed's Muon; torch has another one, and other faults.
DEEPSPEED_MUON = "MuonWithAuxAdam"
# Kinds of findings of settings that do nothing.
_WITHOUT_EFFECT = ("ineffective", "ignored")


def find_faults(receipt: ReceiptDocument) -> Iterator[Fault]:
    """Yield the faults that follow from the facts, the worst first."""
    settings = _setting_findings(receipt)
    yield from _wrong_gradients(receipt)
    yield from _wrong_combination(receipt, settings)
    yield from _unsharded(receipt)
    yield from _without_engine(receipt)
    yield from _data(receipt)
    yield from _forgotten_no_sync(receipt)
    yield from _offload_without_effect(receipt, settings)
    yield from _embedding_in_root(receipt)
    yield from _kept_outputs(receipt)
    yield from _reduced_in_fp32(receipt)
    yield from _slow_host_optimizer(receipt)


def find_combination(receipt: ReceiptDocument) -> CombinationFacts | None:
    """Return the stored answer for the combination of features of a run; None if its settings are not modelled."""
    try:
        answer = stored_answer(config_case(receipt))
    except UserError:
        return None
    return None if answer is None else CombinationFacts(**answer.document)


def _wrong_gradients(receipt: ReceiptDocument) -> Iterator[Fault]:
    """Yield the known faults of these releases that this configuration meets."""
    engine = receipt.engine
    row, gap = _matrix_row(engine), matrix_gap(engine)
    versions = {name: receipt.packages.get(name) for name in PACKAGES}
    if row is None or not versions["deepspeed"]:
        return
    weights = {"bfloat16": "bf16-engine", "float16": "fp16-engine"}.get(engine.param_dtype, "fp32")
    micro_batches = receipt.work.micro_batches or 1
    for cause in known_faults(versions, on_gpu=engine.device != "cpu", optimizer=_optimizer_of_matrix(engine)):
        if cause.shows_in(row, micro_batches, weights) and not cause.ends_training:
            fixed = (
                f"use DeepSpeed {cause.left.release} or later"
                if cause.left.release[:1].isdigit()
                else "run: study releases"
            )
            differs = "updates than Muon" if cause.optimizer == "muon" else "gradients than DDP"
            says = f"deepspeed {versions['deepspeed']} computes other {differs} here: {cause.title}"
            if gap is not None:
                says += f" (measured under {row})"
            yield Fault(id="wrong-gradients", says=says, fix=cause.instead or fixed)


def _matrix_row(engine: EngineFacts) -> str | None:
    """Return the strategy whose known faults are those of an engine; None if the matrix of releases has none."""
    if engine.engine == "ddp":
        # Only DeepSpeed's optimizer has a fault there.
        return "ddp" if engine.optimizer == DEEPSPEED_MUON else None
    if engine.engine != "deepspeed":
        return None
    return engine.strategy or f"zero{engine.zero_stage}"


def _optimizer_of_matrix(engine: EngineFacts) -> str:
    return "muon" if "muon" in (engine.optimizer or "").lower() else "adamw"


def matrix_gap(engine: EngineFacts) -> str | None:
    """Return how an engine of DeepSpeed differs from each strategy of the matrix of releases; None if it is one."""
    if engine.engine != "deepspeed" or engine.strategy is not None:
        return None
    offloads = [
        f"{what} on {_PLACES.get(device, device)}"
        for what, device in (("optimizer", engine.offload_optimizer), ("parameters", engine.offload_param))
        if device is not None
    ]
    where = f" with {' and '.join(offloads)}" if offloads else ""
    return f"stage {engine.zero_stage}{where}"


def _setting_findings(receipt: ReceiptDocument) -> Sequence[Finding]:
    """Return what `study explain` finds in the engine's settings; nothing without DeepSpeed."""
    if receipt.engine.engine != "deepspeed":
        return ()
    try:
        return findings(config_case(receipt))
    except UserError:
        # A model that is not modelled: the findings of the settings alone.
        return settings_file(receipt.engine).findings


def _wrong_combination(receipt: ReceiptDocument, results: Sequence[Finding]) -> Iterator[Fault]:
    """Yield combinations that train something else on the releases of this run, by runs or by the source."""
    if not receipt.packages.get("deepspeed"):
        return
    for finding in results:
        # Causes of `study releases` are faults by themselves.
        if finding.rule == WRONG_TRAINING and finding.kind == "conflict" and not finding.cause:
            says = f"{finding.key}: {finding.message}"
            yield Fault(id="wrong-combination", says=says, fix=finding.fix or "run: study verify --features")


def _unsharded(receipt: ReceiptDocument) -> Iterator[Fault]:
    engine = receipt.engine
    if engine.ranks == 1 or not engine.unsharded_elements:
        return
    where, fix = "fully_shard", "call fully_shard(model) after its layers"
    if engine.engine == "fsdp1":
        where, fix = "FSDP", "leave their module out of ignored_modules"
    says = (
        f"{engine.unsharded_elements:,} trained parameters are outside of {where}, such as"
        f" {engine.largest_unsharded}: no rank shards them, and nothing reduces their gradients"
    )
    yield Fault(id="outside-wrapping", says=says, fix=fix)


def _without_engine(receipt: ReceiptDocument) -> Iterator[Fault]:
    engine = receipt.engine
    copies = engine.sample_ranks
    if engine.engine == "none" and copies > 1 and receipt.state == "complete" and not sum(receipt.reduced_bytes):
        says = f"{copies} ranks train copies of the model that nothing keeps equal"
        yield Fault(id="no-engine", says=says, fix="wrap the model, or give Receipt the wrapped one")
    sent = sum(row.ring_bytes for row in (receipt.traffic or {}).values())
    if engine.engine == "fsdp1" and copies > 1 and receipt.traffic and not sent:
        # With one rank in a shard group torch's hybrid strategies become NO_SHARD, which reduces within that group.
        says = f"{copies} ranks train copies of the model that nothing keeps equal: FSDP's groups have one rank each"
        yield Fault(id="no-engine", says=says, fix="shard over two ranks or more, or use ShardingStrategy.FULL_SHARD")


def _data(receipt: ReceiptDocument) -> Iterator[Fault]:
    parts = receipt.time.parts
    total = sum(parts.values())
    if total and parts["data"] >= WAITING_FRACTION * total:
        says = f"a step waits {parts['data'] / total:.0%} of its time for the data loader"
        yield Fault(
            id="data-loader-waits", says=says, fix="more num_workers, or prepare the samples once before training"
        )


def _forgotten_no_sync(receipt: ReceiptDocument) -> Iterator[Fault]:
    """Yield gradients that are reduced in every micro-batch, although one reduction a step is enough."""
    engine, reduced = receipt.engine, receipt.reduced_bytes
    # Stages 2 and 3 shard gradients, and have to reduce those of each micro-batch.
    needs_each = engine.engine == "deepspeed" and (engine.zero_stage or 0) >= 2
    if len(reduced) < 2 or needs_each or not reduced[-1]:
        return
    early = reduced[:-1]
    if min(early) >= REDUCED_FRACTION * reduced[-1]:
        says = f"gradients are reduced in each of {len(reduced)} micro-batches: {_size(sum(early))} a step for nothing"
        fix = {
            "ddp": "accelerator.accumulate(model), or model.no_sync() in all micro-batches but the last",
            "fsdp2": "model.set_requires_gradient_sync(False) in all but the last; it takes memory for whole gradients",
        }.get(engine.engine, "model.no_sync() in all micro-batches but the last")
        yield Fault(id="forgotten-no-sync", says=says, fix=fix)


def _offload_without_effect(receipt: ReceiptDocument, results: Sequence[Finding]) -> Iterator[Fault]:
    if receipt.engine.engine != "deepspeed":
        return
    keys = set()
    for finding in results:
        if finding.kind in _WITHOUT_EFFECT and finding.key.startswith(_OFFLOADS):
            keys.add(finding.key)
            yield Fault(
                id="offload-without-effect", says=f"{finding.key}: {finding.says}", fix=finding.fix or "remove it"
            )
    yield from _offload_of_a_lower_stage(receipt, keys)


def _offload_of_a_lower_stage(receipt: ReceiptDocument, listed_keys: set[str]) -> Iterator[Fault]:
    engine = receipt.engine
    stage = engine.zero_stage or 0
    for key, device, least in (
        (_OFFLOADS[0], engine.offload_optimizer, 1),
        (_OFFLOADS[1], engine.offload_param, 3),
    ):
        if device is not None and stage < least and key not in listed_keys:
            says = f"{key}: stage {stage} does not use it; stage {least} would"
            yield Fault(id="offload-without-effect", says=says, fix=f"use stage {least}, or remove it")


def _embedding_in_root(receipt: ReceiptDocument) -> Iterator[Fault]:
    engine, model = receipt.engine, receipt.model
    if not engine.embedding_in_root or not engine.embedding_elements or not model.parameters:
        return
    fraction = engine.embedding_elements / model.parameters
    if fraction >= ROOT_FRACTION:
        says = (
            f"{engine.embedding} has {fraction:.0%} of the parameters and has no separate group: the outermost"
            " group gathers it for the whole of the passes"
        )
        fix = f"fully_shard(model.{engine.embedding}) before the model"
        if engine.engine == "fsdp1":
            fix = "wrap nn.Embedding as well: auto_wrap_policy=ModuleWrapPolicy({Layer, nn.Embedding})"
        yield Fault(id="embedding-outside-wrapping", says=says, fix=fix)


def _kept_outputs(receipt: ReceiptDocument) -> Iterator[Fault]:
    memory = receipt.memory
    if memory is None or not memory.kept_output_bytes:
        return
    fraction = memory.kept_output_bytes / memory.total_bytes
    if fraction >= KEPT_FRACTION:
        says = (
            f"the program keeps the model's outputs through the backward pass and the update:"
            f" {_size(memory.kept_output_bytes)}, {fraction:.0%} of the peak"
        )
        yield Fault(id="kept-outputs", says=says, fix="take the loss alone, or delete the outputs before backward()")


def _reduced_in_fp32(receipt: ReceiptDocument) -> Iterator[Fault]:
    """Yield gradients of 16-bit weights that are reduced in twice the bytes, unless FSDP's policy sets it."""
    engine, reduced = receipt.engine, receipt.reduced_by_dtype
    in_16_bits = sum(engine.trained_elements.get(dtype, 0) for dtype in _16_BITS)
    in_fp32 = engine.trained_elements.get("float32", 0)
    full, total = reduced.get("float32", 0), sum(reduced.values())
    if in_16_bits <= in_fp32 or engine.reduce_dtype == "float32" or not total or full < FP32_FRACTION * total:
        return
    which, fix = "gradients", "reduce them in 16 bits, if that is enough"
    if engine.engine == "deepspeed":
        fix = 'communication_data_type: "bf16", if that is enough'
    if engine.largest_fp32 is not None:
        is_embedding = engine.embedding is not None and engine.largest_fp32.startswith(engine.embedding)
        which = f"gradients of {'the embedding' if is_embedding else 'weights in fp32'} ({engine.largest_fp32})"
        fix = f"load {engine.largest_fp32} in 16 bits as the others, if that is enough"
    says = f"{which} are reduced in fp32: {_size(full)} a step, {full / total:.0%} of all"
    yield Fault(id="reduced-in-fp32", says=says, fix=fix)


def _slow_host_optimizer(receipt: ReceiptDocument) -> Iterator[Fault]:
    """Yield the rate of Adam on the host, if a step is longer than its stated error and Adam is a part of it."""
    host, parts = read_host_optimizer(receipt), receipt.time.parts
    step = next((row for row in receipt.forecast.comparisons if row.figure == "step"), None)
    if host is None or step is None or step.high is None or step.measured <= step.high or host.ranks == 1:
        return
    if host.step_s >= WAITING_FRACTION * sum(parts.values()):
        cores = f"{host.cores} core{'s are' if host.cores > 1 else ' is'} shared by {host.ranks} ranks"
        says = f"Adam on the host moves {host.gb_per_s:.3g} GB/s: {cores} of this machine"
        yield Fault(id="slow-host-optimizer", says=says, fix="more cores, or fewer ranks on a machine")


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"
