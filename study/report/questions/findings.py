"""The answers: what a directory of records says to the three questions of the study, in plain words.

Every figure is computed from the records, and stands beside the number of runs it rests on.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from study.report.questions.advice import recommendation, unknowns
from study.report.questions.bearing import claims_touched
from study.report.questions.effects import (
    headline,
    memory_sentences,
    offload_sentences,
    time_sentence,
    traffic_sentence,
)
from study.report.questions.finding import Finding
from study.report.questions.fits import fits_finding
from study.report.questions.losses import compare_losses, losses_in_short
from study.report.questions.remaining import remaining_finding
from study.report.questions.virtual_findings import virtual_findings
from study.report.records.arms import Arm, arms
from study.report.records.frames import Records, real, virtual
from study.report.records.statistics import noise_floor

# More workloads than this are for the details.
_MOST_LINES = 5
QUESTIONS = (
    "What do ZeRO stages and offload do to loss, memory, traffic and time, beside plain and DDP training?",
    "Which of the published claims do these records bear on, and what do they show?",
    "Which configuration should I use on this box, and how sure is that?",
)


def findings(records: Records) -> list[Finding]:
    found = remaining_finding(records.remaining)
    if records.runs.empty and found:
        return found
    others = [*fits_finding(records), *(virtual_findings(virtual(records)) if len(virtual(records).runs) else ())]
    if len(real(records).runs) or not others:
        answers = (_effects, _claims, _advice)
        found += [answer(question, records) for question, answer in zip(QUESTIONS, answers, strict=True)]
    return found + others


def _workloads(records: Records) -> dict[str, list[Arm]]:
    """The arms of each workload that has at least one run that ended well."""
    grouped: dict[str, list[Arm]] = {}
    for arm in arms(records.runs):
        grouped.setdefault(arm.workload, []).append(arm)
    return {workload: found for workload, found in grouped.items() if any(len(arm.ended) for arm in found)}


def _effects(question: str, records: Records) -> Finding:
    workloads = _workloads(real(records))
    if not workloads:
        return Finding(question, _nothing(records), _about_records(records))
    comparisons, lines, details = [], [], []
    for workload, found in workloads.items():
        compared = compare_losses(found, records.steps)
        comparisons += [compared] if compared else []
        if told := headline(found):
            lines.append(f"{workload}: {told}" if len(workloads) > 1 else told)
        sentences = [
            f"{compared.text()}" if compared else "no arm can be compared in loss with another.",
            *memory_sentences(found), traffic_sentence(found), time_sentence(found), *offload_sentences(found),
            *_limits(found),
        ]  # fmt: skip
        details += [f"{workload}: {sentence}" for sentence in sentences if sentence]
    if len(lines) > _MOST_LINES:
        more = len(lines) - _MOST_LINES
        lines[_MOST_LINES:] = [f"{more} more workload{'s stand' if more > 1 else ' stands'} in the details."]
    answer = "\n".join([losses_in_short(comparisons), *lines])
    return Finding(question, answer, (*details, *_about_records(records)))


def _limits(found: list[Arm]) -> Iterable[str]:
    """How many runs an arm has, what noise is known, and which rows cannot be compared."""
    counts = sorted({len(arm.ended) for arm in found if len(arm.ended)})
    yield "one run each: no interval." if counts == [1] else f"{counts[0]} to {counts[-1]} runs an arm."
    beside = found[0].beside
    for figure, name in (("eval_loss_final", "evaluation loss"), ("step_time_s_median", "step time")):
        floor = noise_floor(beside, figure)
        yield f"controls for the {name}: {floor.text()}."
    for arm in found:
        reasons = [reason for reason in arm.runs["confounded_loss"].dropna().unique() if reason]
        if reasons:
            yield f"`{arm.name}` is confounded: {'; '.join(reasons)}."
        for state, group in arm.runs[arm.runs["status_state"] != "ok"].groupby("status_state"):
            why = next((reason for reason in group["status_reason"].dropna() if reason), "no reason recorded")
            yield f"`{arm.name}` ended {state} ({_runs(len(group))}): {why}."


def _claims(question: str, records: Records) -> Finding:
    workloads = _workloads(real(records))
    details = [
        f"{claim} Here, {workload}: {measured}"
        for workload, found in workloads.items()
        for claim, measured in claims_touched(found)
    ]
    if not details:
        return Finding(question, "No published claim can be held against these records.")
    names = sorted({detail.split(" ", 1)[0] for detail in details})
    answer = (
        f"These records bear on {len(names)} published claims ({', '.join(names)}), at the scale of this box. What was"
        " measured stands below, beside what each claim says; a verdict takes the scale the claim was made at."
    )
    return Finding(question, answer, tuple(details))


def _advice(question: str, records: Records) -> Finding:
    runs = real(records).runs
    # A profiled run tells where time goes; nobody should train so.
    workloads = _workloads(dataclasses.replace(records, runs=runs[~runs["profile_steps"].fillna(0).gt(0)]))
    if not workloads:
        return Finding(question, "Nothing can be recommended: no run with a time and a loss ended well.")
    answers = [f"{workload}: {recommendation(found)}" for workload, found in workloads.items()]
    details = [f"{workload}: {sentence}" for workload, found in workloads.items() for sentence in unknowns(found)]
    return Finding(question, "\n".join(answers), tuple(details))


def _nothing(records: Records) -> str:
    if records.runs.empty:
        return "There is no run here that can be read."
    states = Counter(records.runs["status_state"])
    return f"No run ended well ({', '.join(f'{count} {state}' for state, count in states.most_common())})."


def _about_records(records: Records) -> tuple[str, ...]:
    said = []
    unsealed = records.runs[(records.runs["status_state"] == "ok") & ~records.runs["sealed"].astype(bool)]
    if len(unsealed):
        said.append(
            f"{_runs(len(unsealed))} closed without a digest of their record: a figure that was changed later, and"
            " stands in one file only, could not be noticed."
        )
    if records.refused:
        said.append(f"{_runs(len(records.refused))} cannot be believed and are left out; the list says which and why.")
    boxes = records.runs[["cpu", "cpu_cores", "devices"]].dropna(subset=["cpu"]).drop_duplicates()
    if len(boxes) > 1:
        said.append(f"The runs come from {len(boxes)} different boxes; times are compared with that label only.")
    return tuple(said)


def _runs(count: int) -> str:
    return f"{count} run{'s'[: count > 1]}"


__all__ = ["QUESTIONS", "findings"]
