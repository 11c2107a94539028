"""Faults of a training loop that the facts of its receipt show. It imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from study.advisor.explain_findings import findings
from study.advisor.user_settings import Finding
from study.compositions.answers import newest_tested_stack
from study.config.errors import UserError
from study.receipt.document import Fault, ReceiptDocument
from study.receipt.forecast import config_case, settings_file
from study.releases.causes import PACKAGES, known_faults
from study.releases.judge import is_same_release

# Fractions of a step, of the parameters, and of a micro-batch's reductions from which something is a fault.
WAITING_FRACTION = 0.1
ROOT_FRACTION = 0.2
REDUCED_FRACTION = 0.5
# Of the peak.
KEPT_FRACTION = 0.02
_OFFLOADS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
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


def _wrong_gradients(receipt: ReceiptDocument) -> Iterator[Fault]:
    """Yield the known faults of these releases that this configuration meets."""
    engine, strategy = receipt.engine, receipt.engine.strategy
    if engine.engine != "deepspeed" or strategy is None:
        return
    versions = {name: receipt.packages.get(name) for name in PACKAGES}
    if not versions["deepspeed"]:
        return
    weights = {"bfloat16": "bf16-engine", "float16": "fp16-engine"}.get(engine.param_dtype, "fp32")
    micro_batches = receipt.work.micro_batches or 1
    for cause in known_faults(versions, on_gpu=engine.device != "cpu"):
        if cause.shows_in(strategy, micro_batches, weights) and not cause.ends_training:
            fixed = (
                f"use DeepSpeed {cause.left.release} or later"
                if cause.left.release[:1].isdigit()
                else "run: study releases"
            )
            says = f"deepspeed {versions['deepspeed']} computes other gradients than DDP here: {cause.title}"
            yield Fault(id="wrong-gradients", says=says, fix=cause.instead or fixed)


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
    """Yield combinations of settings that train something else on the release of this run."""
    tested = newest_tested_stack()["deepspeed"]
    release = receipt.packages.get("deepspeed")
    if not tested or not release or not is_same_release(tested, release):
        return
    for finding in results:
        if finding.rule == "wrong-training" and finding.kind == "conflict":
            says = f"{finding.key}: {finding.message}"
            yield Fault(id="wrong-combination", says=says, fix=finding.fix or "run: study verify --features")


def _unsharded(receipt: ReceiptDocument) -> Iterator[Fault]:
    engine = receipt.engine
    if engine.engine == "fsdp2" and engine.ranks > 1 and engine.unsharded_elements:
        says = (
            f"{engine.unsharded_elements:,} trained parameters are outside of fully_shard, such as"
            f" {engine.largest_unsharded}: no rank shards them, and nothing reduces their gradients"
        )
        yield Fault(id="outside-wrapping", says=says, fix="call fully_shard(model) after its layers")


def _without_engine(receipt: ReceiptDocument) -> Iterator[Fault]:
    engine = receipt.engine
    copies = engine.sample_ranks
    if engine.engine == "none" and copies > 1 and receipt.state == "complete" and not sum(receipt.reduced_bytes):
        says = f"{copies} ranks train copies of the model that nothing keeps equal"
        yield Fault(id="no-engine", says=says, fix="wrap the model, or give Receipt the wrapped one")


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
        yield Fault(
            id="embedding-outside-wrapping", says=says, fix=f"fully_shard(model.{engine.embedding}) before the model"
        )


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


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"
