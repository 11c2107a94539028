"""Combinations of settings that train something else, or end with an error, on the tested releases. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from study.advisor.explain_case import ConfigCase
from study.advisor.explain_releases import ENGINES, is_in_program, loops_of_cause, read_stack
from study.advisor.user_settings import ZERO, Finding
from study.compositions.answers import (
    KnownFinding,
    has_same_releases,
    is_known_in,
    newest_tested_stack,
    read_known_findings,
    read_releases,
    stored_evidence,
    stored_files,
)
from study.compositions.features import Combination, make_combination
from study.config.errors import UserError
from study.releases.causes import read_causes
from study.releases.feature_answers import FeatureAnswer, find_answer

# Features that no run on CPUs has.
_OF_GPUS = ("quantized_weights", "quantized_gradients", "super_offload")

# Features that only the program has, each with the condition that a finding names.
_PROGRAM_FEATURES = {
    "resume": "training is resumed from a checkpoint",
    "frozen": "weights are frozen",
    "cpu_adam": "the program creates DeepSpeedCPUAdam",
    "ep": "the model has DeepSpeed's MoE layers on several ranks",
    "schedule": "Accelerate prepares the program's schedule",
    "evaluation": "Accelerate prepares the loader of an evaluation together with the model",
}
# Those of a loop of the user's: transformers' Trainer prepares neither its schedule nor, together with the model, the
# loader of an evaluation (Trainer._prepare_for_training).
_OF_OWN_LOOPS = ("schedule", "evaluation")
# Ranks share samples by deepspeed.initialize, for which a config has both sizes, or by the program's mpu.
_BY_MPU = "the program passes an mpu, as ALST does"
# Rules of combinations that were tried, and that no reader of settings refuses.
WRONG_TRAINING = "wrong-training"
ENDS_WITH_ERROR = "ends-with-error"
WRONG_ARGUMENT = "wrong-argument"
# A note that holds under more conditions of the program concerns few of a file's users.
_MAX_CONDITIONS = 1
# Boolean settings of ZeRO that are features, with the value other than the default.
_SWITCHES = {
    "no_reduce_scatter": ("reduce_scatter", False),
    "no_contiguous": ("contiguous_gradients", False),
    "round_robin": ("round_robin_gradients", True),
    "quantized_weights": ("zero_quantized_weights", True),
    "quantized_gradients": ("zero_quantized_gradients", True),
}


def combination_findings(case: ConfigCase) -> Iterator[Finding]:
    """Yield the known faults in the combination of a config's settings, each at a setting to change."""
    keys = feature_keys(case)
    stack = read_stack(case)
    known_by = f"{'tested with' if _is_tested(stack) else 'by the source, for'} {_releases_text(stack)}"
    for entry, conditions in _entries(case):
        key = entry.setting[0][0] if entry.setting else _key(entry, keys)
        if _BY_MPU in conditions:
            key = "sequence_parallel_size"
        if entry.verdict == "refused":
            # An error names itself, so that one under a condition is not worth a note.
            if not conditions:
                message = f"{entry.title}: the run ends with an error ({known_by})"
                yield Finding("refused", key, message, entry.instead, rule=ENDS_WITH_ERROR)
            continue
        if len(conditions) > _MAX_CONDITIONS:
            continue
        holds_if = f"if {' and '.join(conditions)}: " if conditions else ""
        message = f"{holds_if}{entry.title}{loops_of_cause(case, entry.cause)}, without an error ({known_by})"
        # A condition may not hold, and a note does not fail a check.
        kind: Literal["noted", "conflict"] = "noted" if conditions else "conflict"
        yield Finding(kind, key, message, entry.instead, rule=WRONG_TRAINING, cause=entry.cause)


def _entries(case: ConfigCase) -> Iterator[tuple[KnownFinding, list[str]]]:
    """Yield the known faults and errors that a config has on its releases, each with its conditions."""
    keys, stack = feature_keys(case), read_stack(case)
    elsewhere = {cause.id for cause in read_causes() if not is_in_program(case, cause)}
    for entry in read_known_findings():
        if entry.cause in elsewhere:
            continue
        conditions = _conditions(entry, keys, _program_features(case))
        if entry.verdict not in ("wrong", "refused") or entry.needs_program or not _is_in(entry, stack):
            continue
        if conditions is not None and _has_settings(case, entry):
            yield entry, conditions


def known_causes(case: ConfigCase) -> set[str]:
    """Return the causes of `study releases` that the findings about combinations already have."""
    return {entry.cause for entry, _ in _entries(case) if entry.cause}


def _is_in(entry: KnownFinding, stack: Mapping[str, str | None]) -> bool:
    """Whether a stack has an entry, by its own runs or those of others and by the source."""
    if has_same_releases(stack, newest_tested_stack(), ENGINES):
        return entry.is_in(stack)
    return is_known_in(entry, stack, stored_evidence())


def _is_tested(stack: Mapping[str, str | None]) -> bool:
    return any(has_same_releases(read_releases(file), stack, ENGINES) for file in stored_files())


def _releases_text(stack: Mapping[str, str | None]) -> str:
    return f"DeepSpeed {stack['deepspeed']}, Accelerate {stack['accelerate']}"


def stored_answer(case: ConfigCase) -> FeatureAnswer | None:
    """Return the answer of `study releases --features` for a config's combination; None if no run can have it."""
    combination = _combination(case)
    if combination is None or combination.has(*_OF_GPUS):
        return None
    return find_answer(combination, read_stack(case))


def untested_line(case: ConfigCase, answer: FeatureAnswer | None, *, details: bool = False) -> str | None:
    """Return that no stored run has a config's combination on its stack, and the command that tests it; else None.

    `answer` is that of `stored_answer`. With `details` also where each pair of its features was equal in a run.
    """
    if any(_wrong_or_refused(case)):
        return None
    combination = _combination(case)
    if combination is not None and case.request.precision == "fp16":
        return "autocast in fp16 is in no stored run; run: study verify --precision fp16"
    if answer is None or (answer.kind != "untested" and not (details and answer.kind == "pairs")):
        return None
    together = "each pair of these features is tested, and not all together" * (answer.kind == "pairs")
    releases = ", ".join(f"{name} {release}" for name, release in answer.releases.items())
    what = together or f"these features are not tested together with {releases}"
    return f"{what}; run: {answer.test}"


def _wrong_or_refused(case: ConfigCase) -> Iterator[Finding]:
    rules = (WRONG_TRAINING, ENDS_WITH_ERROR)
    yield from (finding for finding in case.findings if finding.kind == "refused" or finding.rule in rules)


def _combination(case: ConfigCase) -> Combination | None:
    """Return the combination of a config's features; None if no run can have it."""
    names = list(feature_keys(case))
    if case.request.gradient_checkpointing:
        names.append("checkpointing")
    if case.request.precision == "bf16":
        names.append("autocast")
    is_offloaded = any(name.startswith(("optimizer_", "all_")) for name in names)
    if is_offloaded and not {"accelerate", "muon", "config_muon"} & set(names):
        # DeepSpeed makes it of the AdamW in its configuration, and asks the program for it.
        names.append("cpu_adam")
    try:
        combination = make_combination(names)
    except UserError:
        # No engine, or two settings of one row.
        return None
    return combination if combination.conflict is None else None


def feature_keys(case: ConfigCase) -> dict[str, str]:
    """Return a config's features, under the names of `study verify --features`, each with its setting."""
    keys = dict(_engine(case))
    if case.file.launcher == "accelerate" and not case.top.get("optimizer"):
        keys["accelerate"] = ""
    if case.request.accumulation > 1:
        keys["accumulation"] = "gradient_accumulation_steps"
    if case.shape.lora_rank:
        keys["lora"] = ""
    if case.file.deepspeed is not None:
        keys |= dict(_deepspeed(case))
    return keys | dict(group_keys(case))


def group_keys(case: ConfigCase) -> Iterator[tuple[str, str]]:
    """Yield the features of groups of ranks that share samples, each with its setting."""
    sizes = case.file.group_sizes
    if case.file.deepspeed is not None:
        section = case.top.get("tensor_parallel")
        if isinstance(section, Mapping) and whole_number(section.get("autotp_size")) > 1:
            yield "autotp", "tensor_parallel.autotp_size"
        if "sp_size" in sizes:
            yield "ulysses", "parallelism_config.sp_size"
        elif whole_number(case.top.get("sequence_parallel_size")) > 1 and "data_parallel_size" in case.top:
            # deepspeed.initialize makes groups of ranks with both keys alone.
            yield "ulysses", "sequence_parallel_size"
        return
    if "tp_size" in sizes:
        yield "tp", "parallelism_config.tp_size"
    if "cp_size" in sizes:
        yield "cp", "parallelism_config.cp_size"


def _engine(case: ConfigCase) -> Iterator[tuple[str, str]]:
    strategy = case.request.strategy
    if case.file.deepspeed is not None:
        yield f"zero{case.stage}", f"{ZERO}.stage"
    elif strategy.is_fsdp:
        yield f"fsdp{case.request.fsdp_version}", "fsdp_version"
    elif case.ranks > 1:
        yield "ddp", "distributed_type"


def _deepspeed(case: ConfigCase) -> Iterator[tuple[str, str]]:
    top, zero = case.top, case.zero
    yield from _muon(case)
    if case.request.precision == "bf16-engine":
        in_fp32 = case.request.settings.accumulates_in_fp32
        yield ("fp32_accumulation", "data_types.grad_accum_dtype") if in_fp32 else ("bf16", "bf16.enabled")
    if case.request.precision == "fp16-engine":
        yield "fp16", "fp16.enabled"
    if "gradient_clipping" not in top:
        yield "clipping_unset", "gradient_clipping"
    elif top["gradient_clipping"]:
        yield "clipping", "gradient_clipping"
    yield from _offload(case)
    for feature, (name, value) in _SWITCHES.items():
        if zero.get(name) is value:
            yield feature, f"{ZERO}.{name}"
    if whole_number(zero.get("zero_hpz_partition_size")) > 1:
        yield "hpz", f"{ZERO}.zero_hpz_partition_size"
    if zero.get("zenflow"):
        yield "zenflow", f"{ZERO}.zenflow"
    if (case.offload("offload_optimizer") or {}).get("super_offload"):
        yield "super_offload", f"{ZERO}.offload_optimizer.super_offload"


def _muon(case: ConfigCase) -> Iterator[tuple[str, str]]:
    section = case.top.get("optimizer")
    if section:
        if str(section.get("type")).lower() == "muon":
            yield "config_muon", "optimizer.type"
    elif str(case.request.optimizer).lower() == "muon":
        yield "muon", "optimizer.type"


def _offload(case: ConfigCase) -> Iterator[tuple[str, str]]:
    """Yield the feature of the offloads that this stage performs."""
    optimizer = case.offload("offload_optimizer") if case.stage else None
    parameters = case.offload("offload_param") if case.stage == 3 else None
    if optimizer is not None:
        what = "all" if parameters is not None else "optimizer"
        # Stages 1 and 2 read nvme as the host.
        device = "nvme" if optimizer["device"] == "nvme" and case.stage == 3 else "cpu"
        yield f"{what}_{device}", f"{ZERO}.offload_optimizer.device"


def _has_settings(case: ConfigCase, entry: KnownFinding) -> bool:
    """Whether a file has the settings that a finding needs besides its features."""
    settings = case.file.fsdp or {}
    return all(str(settings.get(key)).upper() in value.split("|") for key, value in entry.setting)


def whole_number(value: Any) -> int:
    return value if type(value) is int else 0


def _program_features(case: ConfigCase) -> dict[str, str]:
    """Return the features that the program of a config may have, each with its condition."""
    features = dict(_PROGRAM_FEATURES)
    if case.loop == "trainer":
        features = {name: condition for name, condition in features.items() if name not in _OF_OWN_LOOPS}
    is_alone = "data_parallel_size" not in case.top and "sp_size" not in case.file.group_sizes
    if case.file.deepspeed is not None and is_alone and whole_number(case.top.get("sequence_parallel_size")) > 1:
        features["ulysses"] = _BY_MPU
    return features


def _conditions(entry: KnownFinding, keys: Mapping[str, str], program_features: Mapping[str, str]) -> list[str] | None:
    """Return the conditions under which a config has a finding; None if its settings exclude it."""
    if entry.is_lifted(keys.keys()):
        return None
    conditions = []
    for alternatives in entry.features:
        if alternatives & keys.keys():
            continue
        possible = sorted(alternatives & program_features.keys())
        if not possible:
            return None
        conditions.append(" or ".join(program_features[name] for name in possible))
    return conditions


def _key(entry: KnownFinding, keys: Mapping[str, str]) -> str:
    """Return the setting to change: the last of the finding's features that a setting of the file decides."""
    levels = set[str]().union(*entry.features)
    return next((keys[name] for name in reversed(list(keys)) if name in levels and keys[name]), "")
