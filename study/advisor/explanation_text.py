"""The page that `study explain` prints, of a `ConfigExplanation` alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from study.advisor import trainer_files
from study.advisor.explain_combinations import ENDS_WITH_ERROR, WRONG_ARGUMENT, group_keys, untested_line
from study.advisor.explain_costs import SettingCost
from study.advisor.explanation import ConfigExplanation
from study.advisor.request_notes import MIXED_ADAPTERS, lacks_bf16
from study.advisor.request_text import (
    about,
    dpo_notes,
    gib,
    loading_remedy,
    need_text,
    precision_name,
    program_text,
    tokens_text,
)
from study.advisor.user_settings import ZERO, Finding, known_settings
from study.config.precisions import computes_in_bf16, computing_type
from study.config.printing import TextTable
from study.config.text import rounded
from study.host.memory import GIB, MIB
from study.predictor.hardware import Hardware
from study.predictor.request import MemoryUse, Request
from study.predictor.shape import trained_text
from study.predictor.time import device_bytes, excess_on_host, fits, usable_bytes, why

# Kinds of findings, the most important first, with the words that count them in the first line.
_FINDINGS = {
    "refused": "refused by the engine",
    "conflict": "in conflict",
    "ignored": "ignored",
    "ineffective": "without effect",
    "noted": "noted",
    "filled": 'filled in for "auto"',
}
# --details prints the others, too, and those below this fraction of the largest.
_MAX_COST_ROWS, _MIN_COST = 5, 0.001
_STATES = {"optimizer": "optimizer state", "parameters": "weights"}
_MAX_ALONE = 3
# Rules of settings that DeepSpeed's reader accepts and with which a run ends all the same.
LATE_ERRORS = (WRONG_ARGUMENT, ENDS_WITH_ERROR, MIXED_ADAPTERS)


def page(explanation: ConfigExplanation, details: bool) -> Iterator[str | TextTable]:
    """Yield the parts of the printed answer."""
    case = explanation.case
    yield first_line(explanation)
    yield from subject_lines(explanation)
    listed = [finding for finding in case.findings if details or finding.rule not in known_settings()["details"]]
    yield _counts_text(listed)
    if listed:
        listed.sort(key=lambda finding: [*_FINDINGS].index(finding.kind))
        yield TextTable(("", ""), finding_rows(listed), indent=2)
    if (untested := untested_line(case, explanation.combination, details=details)) is not None:
        yield untested
    if explanation.costs:
        legend = "" if all(cost.is_said for cost in explanation.costs) else "; * a default, not in your file"
        yield f"\nmemory of a rank by setting (- none{legend}{'' if details else '; --details has the reasons'})"
        yield TextTable(("device", "host", "NVMe", ""), cost_rows(explanation, details), indent=2)
    yield peak_line(explanation)
    yield from (f"  {note}" for note in (explanation.memory.notes if details else case.shape.notes()))
    for answer in explanation.answers:
        yield f"\n{answer.question}\n  {answer.short}" if details else f"{answer.question} {answer.short}"
        yield from (f"  - {line}" for line in answer.because if details)


def _counts_text(listed: Sequence[Finding]) -> str:
    """Return how many settings have a finding of each kind."""
    counts = Counter[str](finding.kind for finding in listed)
    counted = [
        f"{counts[kind]} {'setting' if counts[kind] == 1 else 'settings'} {words}"
        for kind, words in _FINDINGS.items()
        if counts[kind]
    ]
    return ", ".join(counted) or "every setting takes effect"


def first_line(explanation: ConfigExplanation) -> str:
    """Return what ends a run, then the peak of a rank and whether it fits."""
    case, verdict = explanation.case, _verdict(explanation)
    if explanation.is_too_large_to_load:
        loaded = rounded(explanation.memory.loading / GIB)
        room = about(usable_bytes(case.request.box))
        remedy = loading_remedy(case.request)
        problem = f"Does not fit while quantized weights are loaded: {loaded} of {room}{remedy}"
        verdict = f"{problem}. After that: {verdict[0].lower()}{verdict[1:]}"
    has_groups = case.request.tensor_group is not None or case.request.sequence_ranks > 1
    left_out = [] if has_groups else [key for _, key in group_keys(case)]
    left_out += [item.key for item in case.findings if item.rule == trainer_files.WITHOUT]
    if left_out:
        verdict = f"Without {', '.join(left_out)} (not modelled): {verdict[0].lower()}{verdict[1:]}"
    refusals = [item for item in case.findings if item.kind == "refused" and item.rule not in LATE_ERRORS]
    refused = [item.key for item in refusals if item.rule != trainer_files.BY_TRAINER]
    refused_by_trainer = [item.key for item in refusals if item.rule == trainer_files.BY_TRAINER]
    late_errors = [item.key for item in case.findings if item.rule in LATE_ERRORS]
    wrong_training = [item.key for item in case.findings if item.rule == "wrong-training" and item.kind == "conflict"]
    for problem, keys in (
        ("Refused by the engine", refused),
        ("Refused by the trainer", refused_by_trainer),
        ("Ends with an error", late_errors),
        ("Trains something else, silently", wrong_training),
    ):
        if keys:
            causes = ", ".join(dict.fromkeys(keys))
            return f"{problem}: {causes}. Apart from that: {verdict[0].lower()}{verdict[1:]}"
    return verdict


def _verdict(explanation: ConfigExplanation) -> str:
    """Return the peak of a rank in training, and whether it fits."""
    request, box, memory = explanation.case.request, explanation.hardware, explanation.training_memory
    precision, in_half = computing_type(request.precision), _in_half_text(explanation)
    host = f"host {about(memory.host_peak.value)} a node, predicted"
    if box is None:
        return f"Peak {about(device_bytes(memory))} a GPU in {precision}{in_half}; {host}"
    if memory.missing:
        verdict = why(memory, box)
        return f"{verdict[0].upper()}{verdict[1:]}; {host}"
    if computes_in_bf16(request.precision) and lacks_bf16(request):
        precision = f"{precision}, which {box.device.name} emulates slowly"
    if not fits(memory, box):
        remedies = in_half or _remedies_text(explanation)
        return f"Does not fit in {precision}: {_excess(memory, box)}{remedies}; predicted"
    bound, is_certain = device_bytes(memory, at_upper=True), fits(memory, box, at_upper=True)
    return (
        f"{'Fits' if is_certain else 'May not fit'} in {precision}: {_peak_text(request, device_bytes(memory))} of"
        f" {about(usable_bytes(box))} (90 % bound {rounded(bound / GIB)}){in_half * (not is_certain)}; {host}"
    )


def _in_half_text(explanation: ConfigExplanation) -> str:
    """Return the peak in 16 bits of a program in fp32: on any device, or if it fits the hardware."""
    in_half, box = explanation.in_half, explanation.hardware
    if in_half is None:
        return ""
    peak = about(device_bytes(in_half.memory))
    if box is None:
        return f" (in {in_half.precision} {peak})"
    return f"; in {in_half.precision} it fits: {peak}" if fits(in_half.memory, box, at_upper=True) else ""


def _remedies_text(explanation: ConfigExplanation) -> str:
    """Return at most two changes of the program with which the same file fits."""
    request = explanation.case.request
    remedies = [f"{remedy.says} ({need_text(request, remedy.memory)})" for remedy in explanation.remedies]
    return f"; it fits with {' or '.join(remedies[:2])}" if remedies else ""


def _peak_text(request: Request, peak: float) -> str:
    """Return the GiB of a peak, those of vLLM apart."""
    if not request.vllm_bytes:
        return rounded(peak / GIB)
    return f"{rounded((peak - request.vllm_bytes) / GIB)} + {rounded(request.vllm_bytes / GIB)} of vLLM"


def _excess(memory: MemoryUse, box: Hardware) -> str:
    """Return the few parts of the peak that exceed the device by themselves, or else why it does not fit."""
    usable, parts = usable_bytes(box), sorted(memory.device_parts.items(), key=lambda part: -part[1])
    for count in range(1, _MAX_ALONE + 1):
        size = sum(size for _, size in parts[:count])
        if size > usable and not box.is_cpu_only:
            names = " and ".join(_STATES.get(name, name) for name, _ in parts[:count])
            needs = "need" if names.endswith("s") or count > 1 else "needs"
            needed = f"alone {needs} {rounded(size / GIB)} of {about(usable)}"
            on_host = f", and {excess}" if (excess := excess_on_host(memory, box)) else ""
            return f"{names} {needed}, all together {about(device_bytes(memory))}{on_host}"
    return why(memory, box)


def subject_lines(explanation: ConfigExplanation) -> Iterator[str]:
    """Yield which engine, model and training the file is explained for."""
    case, request = explanation.case, explanation.case.request
    engine = f"FSDP{1 if case.file.sharding else 2}" if request.strategy.is_fsdp else request.strategy.name
    if case.file.deepspeed is not None:
        engine = f"DeepSpeed, stage {case.stage}"
    yield from case.read_from
    if not case.read_from:
        # The line of a trainer's file counts pairs.
        yield from dpo_notes(request)
    unset = " by default" if request.precision == "fp32" else ""
    ranks = f"one of {case.ranks} ranks" if case.ranks > 1 else "1 rank"
    if request.tensor_group is not None:
        ranks += f" in tensor-parallel groups of {request.tensor_ranks}"
    yield f"{case.file.name}: {engine}, {precision_name(request)}{unset}, {ranks}"
    yield (
        f"{case.shape.name}: {request.full_shape.parameters:,} parameters{trained_text(case.shape)}, micro-batch"
        f" {request.micro_batch} x accumulation {request.accumulation}, {tokens_text(request)}"
        f"{program_text(request)}"
        f"{', gradient checkpointing' if request.gradient_checkpointing else ''}"
    )
    yield explanation.release_line


def finding_rows(listed: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return a row per finding; settings with the same text, such as those that are "auto", are one row."""
    keys: dict[tuple[str, str], list[str]] = {}
    for finding in listed:
        keys.setdefault((finding.kind, finding.says), []).append(finding.key)
    return [(kind, f"{', '.join(names)}: {says}") for (kind, says), names in keys.items()]


def peak_line(explanation: ConfigExplanation) -> str:
    """Return the peak of a rank, its 90 % bound if peaks are validated there, its moment and its larger parts."""
    memory = explanation.memory
    parts = sorted(memory.device_parts.items(), key=lambda part: -part[1])
    peak = ", ".join(f"{part} {rounded(size / GIB)}" for part, size in parts if size > GIB / 20)
    bound = f" (90 % bound {_bound_text(memory)})" if _has_bound(memory) else ""
    return f"peak memory of a rank, {about(device_bytes(memory))}{bound}, {memory.moment}: {peak}"


def costs_error(explanation: ConfigExplanation) -> str:
    """Return the bound of memory by setting as a sentence: the bound of the peak, if peaks are validated there."""
    if not _has_bound(explanation.memory):
        return "memory by setting is computed; no peak was measured that could bound it"
    bound = _bound_text(explanation.memory)
    return f"memory by setting is computed, as parts of the peak, whose 90 % bound is {bound} GiB"


def _has_bound(memory: MemoryUse) -> bool:
    """Whether peaks are validated on such a device."""
    return (memory.process_peak or memory.peak_reserved).high is not None


def _bound_text(memory: MemoryUse) -> str:
    return rounded(device_bytes(memory, at_upper=True) / GIB)


class _CostRow(NamedTuple):
    """A setting in the table of costs, with its largest size in bytes."""

    is_of_stage: bool
    size: float
    cells: tuple[str, ...]


def cost_rows(explanation: ConfigExplanation, details: bool) -> list[tuple[str, ...]]:
    """Return a row per cost with its reason or, without details, a row for each of the most expensive settings."""
    by_key: dict[str, list[SettingCost]] = {}
    for cost in explanation.costs:
        by_key.setdefault(f"{cost.key} {cost.says if details else ''}", []).append(cost)
    rows = list[_CostRow]()
    for group in by_key.values():
        sizes = [sum(getattr(cost, place) for cost in group) for place in ("device", "host", "nvme")]
        cost = group[0]
        text = f"{cost.key.removeprefix(f'{ZERO}.')}={json.dumps(cost.value)}{'' if cost.is_said else '*'}"
        columns = ("-" if abs(size) < MIB / 2 else gib(size) for size in sizes)
        cells = (*columns, f"{text}: {cost.says}" if details else text)
        rows.append(_CostRow(cost.key == f"{ZERO}.stage", max(map(abs, sizes)), cells))
    if rows and not details:
        # The state comes first: the offloads move parts of it.
        largest = max(row.size for row in rows)
        rows = [row for row in rows if row.size >= _MIN_COST * largest]
        rows = sorted(rows, key=lambda row: (not row.is_of_stage, -row.size))[:_MAX_COST_ROWS]
    return [row.cells for row in rows]
