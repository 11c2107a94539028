"""Find settings of a config that have no effect, are ignored, conflict, or end a run with an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from study.advisor.explain_case import (
    ACCUMULATION,
    MICRO_BATCH,
    SHARDINGS,
    ConfigCase,
    fsdp_settings,
    ranks_of_a_batch,
    read_sharding_strategy,
)
from study.advisor.user_settings import OFFLOADS, ZERO, Finding, known_settings
from study.config.errors import clip, did_you_mean
from study.config.text import format_number
from study.host.memory import GIB
from study.predictor.memory import predict_memory
from study.predictor.state import accumulation_error

_OPTIMIZER = f"{ZERO}.offload_optimizer"
# DEEPSPEED_OPTIMIZERS of DeepSpeed's config.py, and the classes of torch.optim.
ENGINES_OPTIMIZERS = ("adam", "adamw", "adagrad", "lamb", "lion", "muadam", "muadamw", "muon", "musgd")
TORCHS_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
# Names that create a class of ZERO_SUPPORTED_OPTIMIZERS (zero/utils.py); mup's Adam is torch's.
_ZEROS_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "muadam", "muadamw", "muon")


def findings(case: ConfigCase) -> list[Finding]:
    """Return all findings of a config, including those of parsing it."""
    if case.file.deepspeed is None:
        refusal = case.request.strategy.is_fsdp and case.shape.fsdp_refusal
        refused = [Finding("refused", "fsdp_version", refusal)] if refusal else []
        return [*case.findings, *_fsdp(case), *refused]
    results = [*case.findings, *_ineffective(case), *_optimizer(case), *_zero(case), *_batch(case)]
    if refusal := accumulation_error(case.request):
        results.append(Finding("refused", "data_types.grad_accum_dtype", refusal))
    return results


def _ineffective(case: ConfigCase) -> Iterator[Finding]:
    reference = known_settings()
    for key in case.file.explicit_keys:
        section, _, name = key.rpartition(".")
        section_settings = reference.get(section or "top", {})
        entry = section_settings.get(name) or section_settings.get(f"stage3_{name}")
        first = key.removeprefix(f"{ZERO}.").split(".")[0]
        # A disabled setting causes no finding.
        is_off = (first in OFFLOADS and case.offload(first) is None) or (
            key == f"{ZERO}.{first}" and case.zero.get(first) is False
        )
        if entry is None or is_off:
            continue
        stages = entry.get("stages", range(4))
        if "refused" in entry:
            yield Finding("refused", key, f"the engine ends with an error: {entry['refused']}")
        elif "ineffective" in entry:
            yield Finding("ineffective", key, entry["ineffective"])
        elif case.stage not in stages and (section == ZERO or section not in case.file.explicit_keys):
            message = f"stage {case.stage} does not use it; stage {' and '.join(map(str, stages))} would"
            yield Finding("ineffective", key, message)
        elif (needs := entry.get("needs")) and not _has(case, needs):
            yield Finding("ineffective", key, f"it has an effect only with {needs.replace('=', ' = ')}")


def _has(case: ConfigCase, needs: str) -> bool:
    if needs == "nvme":
        return any((case.offload(what) or {}).get("device") == "nvme" for what in OFFLOADS)
    key, _, value = needs.partition("=")
    what, _, name = key.partition(".")
    return str((case.zero.get(what) or {}).get(name)).lower() == value


def _type_of_optimizer(case: ConfigCase) -> Iterator[Finding]:
    """Yield findings about the optimizer. DeepSpeed ignores case in its names, but not in torch's (engine.py)."""
    section, key = case.top.get("optimizer"), "optimizer.type"
    name = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(name, str) or name.lower() in ("adam", "adamw"):
        return
    if name.lower() not in ENGINES_OPTIMIZERS and name not in TORCHS_OPTIMIZERS:
        message = f"the engine ends with an error: neither it nor torch.optim has {clip(name)}"
        guess = did_you_mean(name, TORCHS_OPTIMIZERS)
        yield Finding("refused", key, f"{message}; {guess}".rstrip("; "))
        return
    yield Finding("noted", key, f"{name}: bytes here are AdamW's, which keeps two moments of each parameter")
    is_allowed = case.file.launcher == "accelerate" or case.top.get("zero_allow_untested_optimizer")
    if case.stage and name.lower() not in _ZEROS_OPTIMIZERS and not is_allowed:
        yield Finding("refused", key, f"ZeRO accepts {name} only with zero_allow_untested_optimizer: true")


def _optimizer(case: ConfigCase) -> Iterator[Finding]:
    yield from _type_of_optimizer(case)
    top, in_accelerate = case.top, case.file.launcher == "accelerate"
    if in_accelerate and "optimizer" in top:
        message = "Accelerate accepts it only if the program's optimizer is an accelerate.utils.DummyOptim"
        yield Finding("conflict", "optimizer", message)
    elif in_accelerate and "scheduler" in top:
        message = "Accelerate accepts it only if the program's scheduler is an accelerate.utils.DummyScheduler"
        yield Finding("conflict", "scheduler", message)
    if "zero_allow_untested_optimizer" in top:
        if in_accelerate:
            yield Finding("ignored", "zero_allow_untested_optimizer", "Accelerate always sets it to true")
        elif not top["zero_allow_untested_optimizer"]:
            message = "false: DeepSpeed refuses an optimizer that ZeRO was not tested with, such as torch's SGD"
            yield Finding("noted", "zero_allow_untested_optimizer", message)
    optimizer = case.offload("offload_optimizer")
    if optimizer is None:
        return
    if case.stage == 0:
        yield Finding("ineffective", _OPTIMIZER, "stage 0 keeps its optimizer on the device")
    if top.get("zero_force_ds_cpu_optimizer", True) is False:
        message = "false lets torch's own AdamW step on the host, which is slower than DeepSpeed's"
        yield Finding("conflict", "zero_force_ds_cpu_optimizer", message)
    elif not in_accelerate and "optimizer" not in top:
        message = (
            "deepspeed.initialize refuses torch's AdamW with an offload; Accelerate and the Trainer use DeepSpeed's"
        )
        yield Finding("noted", "zero_force_ds_cpu_optimizer", message)
    if optimizer["device"] == "nvme" and case.stage in (1, 2):
        message = f"nvme: stage {case.stage} cannot use NVMe, and keeps the state in host memory"
        yield Finding("ignored", f"{_OPTIMIZER}.device", message)
    if optimizer["ratio"] < 1 and case.stage != 3:
        yield Finding("refused", f"{_OPTIMIZER}.ratio", "the engine refuses a ratio below 1 without stage 3")


def _zero(case: ConfigCase) -> Iterator[Finding]:
    zero, stage = case.zero, case.stage
    for what in OFFLOADS:
        section = case.offload(what)
        if section and section["device"] == "nvme" and section["nvme_path"] is None and stage == 3:
            yield Finding("refused", f"{ZERO}.{what}.nvme_path", "the engine ends with an error without this folder")
    parameters, shard = case.offload("offload_param"), -(-case.shape.largest // case.ranks)
    if parameters and parameters["device"] == "nvme" and stage == 3 and parameters["buffer_size"] < shard:
        message = f"the engine ends with an error: a rank's shard of {case.largest.name} has {shard:,} elements"
        yield Finding("refused", f"{ZERO}.offload_param.buffer_size", message)
    has_offload = case.offload("offload_optimizer") is not None
    if stage in (1, 2) and not zero["contiguous_gradients"]:
        if has_offload:
            yield Finding("ignored", f"{ZERO}.contiguous_gradients", "an offload turns it on")
        elif zero["overlap_comm"]:
            message = "without contiguous_gradients each bucket's gradients stay until the next bucket is reduced"
            yield Finding("conflict", f"{ZERO}.overlap_comm", message)
    if stage in (1, 2) and zero["round_robin_gradients"] and not has_offload:
        yield Finding(
            "ineffective", f"{ZERO}.round_robin_gradients", "it affects only gradients that are offloaded to the host"
        )
    if not zero["compute_grad_norm"] and (stage not in (1, 2) or has_offload):
        message = "the engine accepts false only at stages 1 and 2 without an offload"
        yield Finding("refused", f"{ZERO}.compute_grad_norm", message)
    if zero["legacy_stage1"]:
        yield Finding("refused", f"{ZERO}.legacy_stage1", "the engine ends with an error: it has been removed")
    if stage != 3:
        return
    # The engine limits it to the number of ranks (groups.py).
    if (group := min(zero["zero_hpz_partition_size"], case.ranks)) > 1 and case.ranks % group:
        message = f"the engine ends with an error: {group:,.0f} does not divide {case.ranks} ranks"
        yield Finding("refused", f"{ZERO}.zero_hpz_partition_size", message)
    key, live = f"{ZERO}.stage3_max_live_parameters", zero["stage3_max_live_parameters"]
    if key in case.file.explicit_keys and not zero["stage3_prefetch_bucket_size"]:
        yield Finding("ineffective", key, "it limits only prefetching, which is off")
    elif live < case.shape.parameters <= zero["stage3_max_reuse_distance"] / 2:
        # The reuse distance of a parameter, from its forward to its backward pass, is at most twice the model.
        message = f"{live:,.0f} does not limit gathering: stage3_max_reuse_distance keeps every parameter"
        yield Finding("conflict", key, message)


def _fsdp(case: ConfigCase) -> Iterator[Finding]:
    settings, effects, sharding = fsdp_settings(case.file), known_settings()["fsdp"], read_sharding_strategy(case.file)
    size = case.shape.parameters * (2 if case.request.fsdp_gathers_16_bits else 4)
    more = f"up to {format_number(size / GIB)} GiB more a rank"
    unsharded = f"weights stay unsharded from the forward to the backward pass, {more}"
    key, version = "fsdp_sharding_strategy", settings.get("fsdp_version", 1)
    if str(version) not in ("1", "2"):
        yield Finding("refused", "fsdp_version", f"Accelerate has versions 1 and 2, not {clip(version)}")
    if sharding == "NO_SHARD":
        yield Finding("noted", key, "NO_SHARD is plain data parallelism, and is counted as such")
    elif sharding is not None:
        if sharding not in SHARDINGS:
            yield Finding("refused", key, f"Accelerate ends with an error: no {clip(sharding)}")
        default = "" if "fsdp_version" in settings else ", the default"
        yield Finding("noted", "fsdp_version", f"1{default}: bytes here are those of version 2")
        if sharding.endswith(("SHARD_GRAD_OP", "ZERO2")):
            yield Finding("noted", key, f"{sharding}: {unsharded}")
        if "HYBRID" in sharding:
            yield Finding(
                "noted", key, f"{sharding} shards over the ranks of one machine, but bytes here are for all ranks"
            )
    if case.file.fsdp is not None and sharding != "NO_SHARD" and settings.get("fsdp_auto_wrap_policy") == "NO_WRAP":
        yield Finding("noted", "fsdp_auto_wrap_policy", f"NO_WRAP: all weights are gathered at once, {more}")
    for name, value in settings.items():
        if name not in effects:
            guess = did_you_mean(name, effects, cutoff=0.75)
            yield Finding("ignored", name, f"Accelerate drops it silently; {guess}".rstrip("; "))
        elif (effect := effects[name]) is not None and str(value).lower() not in ("false", "none"):
            kind, _, message = effect.partition(": ")
            # Version 1 supports the settings that version 2 ignores or rejects.
            if sharding is None or kind == "noted":
                yield Finding(kind, name, message)
    if sharding is None and str(settings.get("fsdp_reshard_after_forward", True)).lower() == "false":
        yield Finding("noted", "fsdp_reshard_after_forward", f"false: {unsharded}")


def _batch(case: ConfigCase) -> Iterator[Finding]:
    keys, ranks = ("train_batch_size", MICRO_BATCH, ACCUMULATION), ranks_of_a_batch(case.top, case.ranks)
    if (sequence := case.top.get("sequence_parallel_size")) is not None:
        data = case.top.get("data_parallel_size")
        if any(type(size) is not int or size < 1 for size in (sequence, data or 1)) or (
            data is not None and data * sequence != case.ranks
        ):
            message = f"{clip(data)} groups of {clip(sequence)} ranks are not {case.ranks}"
            yield Finding("refused", "sequence_parallel_size", f"the engine ends with an error: {message}")
            return
    global_batch, micro, steps = (case.top.get(key) for key in keys)
    wrong = [
        key for key, value in zip(keys, (global_batch, micro, steps), strict=True)
        if value not in (None, "auto") and (type(value) is not int or value < 1)
    ]  # fmt: skip
    message, error, count = "", "the engine ends with an error", f"{ranks:g} rank{'s'[: ranks != 1]}"
    if wrong:
        yield Finding("refused", wrong[0], "the engine requires a whole number from 1 up")
    elif type(global_batch) is int and type(micro) is int:
        if type(steps) is int and global_batch != micro * steps * ranks:
            message = f"{error}: {micro} x {steps} x {count} is {micro * steps * ranks}, not {global_batch}"
        elif steps is None and global_batch // (micro * ranks) * micro * ranks != global_batch:
            message = f"{error}: {global_batch} is not a multiple of {micro} x {count}"
    elif type(global_batch) is int and micro is None:
        steps = 1 if steps is None else case.request.accumulation
        if global_batch // (steps * ranks) * steps * ranks != global_batch:
            message = f"{error}: {global_batch} is not a multiple of {steps} x {count}"
    if message:
        yield Finding("refused", "train_batch_size", message)
    if global_batch is None and micro is None and case.file.launcher == "deepspeed":
        yield Finding("refused", MICRO_BATCH, f"{error} without it or train_batch_size")
    # Without the key Accelerate (DeepSpeedPlugin) and the engine set 1; with "auto" the program sets it.
    accumulation = case.request.accumulation
    if ACCUMULATION not in case.top:
        by_batch = all(type(case.top.get(key)) is int for key in ("train_batch_size", MICRO_BATCH))
        if accumulation > 1 and not (by_batch and case.file.launcher == "deepspeed"):
            message = f"without it Accelerate and the engine use accumulation 1, not {accumulation}"
            yield Finding("missing", ACCUMULATION, message)
    elif case.top[ACCUMULATION] == "auto" and accumulation == 1:
        reserved, reserved_by_two = (
            predict_memory(dataclasses.replace(case.request, accumulation=count)).peak_reserved.value
            for count in (1, 2)
        )
        message = "auto: assumed to be 1; --accumulation sets another value"
        if reserved_by_two - reserved >= 2**20:
            message += "; with more, gradients stay in memory during the next micro-batch, and a rank reserves"
            message += f" {format_number(reserved_by_two / GIB)} GiB instead of {format_number(reserved / GIB)}"
        yield Finding("filled", ACCUMULATION, message)
