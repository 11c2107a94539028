"""The runs of a report: their outcomes, their noise, the remaining part of a plan, and the claims that use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pandas as pd

from study.config.text import format_duration, percent
from study.records.frames import Records
from study.records.outcome import SliceProgress
from study.records.statistics import Noise, estimate_noise, repeat_noise
from study.report.document import Answer, Question
from study.report.facts import ClaimRow, Headline, caption, footnotes
from study.report.questions.comparison import STEP, arm_table, real_arms, step_s, workloads
from study.report.questions.memory import sent_mib


def _remaining_answer(records: Records) -> Answer | None:
    slices = records.remaining
    if not slices:
        return None
    planned, missing = sum(item.planned for item in slices), sum(len(item.left) for item in slices)
    suites = {item.suite: [part for part in slices if part.suite == item.suite] for item in slices}
    begun = {suite: parts for suite, parts in suites.items() if any(part.ok + part.other for part in parts)}
    shown = begun or suites
    untouched = [suite for suite in suites if suite not in shown]
    headlines = [Headline(f"{planned - missing} of {planned}", caption("remaining", "measured"))]
    if missing:
        time = format_duration(sum(item.seconds for item in slices))
        headlines.append(Headline(time, caption("remaining", "left", missing=missing)))
    notes = footnotes(
        "remaining", {"untouched": bool(untouched), "estimates": missing > 0}, suites=", ".join(untouched)
    )
    table = pd.DataFrame([_row(suite, parts) for suite, parts in shown.items()])
    return Answer(table, headlines, notes, leads=False)


def _row(suite: str, slices: Sequence[SliceProgress], part: str = "") -> dict[str, object]:
    """Return a row of a suite; it may have more runs than planned, because every probe of a search is a run."""
    missing = sum(len(item.left) for item in slices)
    return {
        "Suite": suite,
        **({"Part": part} if part else {}),
        "Planned": sum(item.planned for item in slices),
        "Runs that ended ok": sum(item.ok for item in slices),
        "Runs that did not": sum(item.other for item in slices),
        "Left": missing,
        "Time for it": format_duration(sum(item.seconds for item in slices)) if missing else "-",
    }


def _parts(records: Records) -> list[tuple[SliceProgress, str]]:
    """Return each slice with the name of its part of the suite."""
    first = {item.suite: item for item in reversed(records.remaining)}
    return [(item, item.only or ("all" if first[item.suite] is item else "the rest")) for item in records.remaining]


REMAINING = Question(
    "remaining",
    "How much of this study is measured, and what remains?",
    _remaining_answer,
    tables={
        "slices": lambda records: pd.DataFrame([_row(item.suite, [item], part) for item, part in _parts(records)]),
        "left": lambda records: pd.DataFrame(
            [
                {"Suite": item.suite, "Part": part, "Left": "; ".join(item.left)}
                for item, part in _parts(records)
                if item.left
            ]
        ),
    },
    tables_in_summary=False,
)


def claims_answer(rows: Sequence[ClaimRow], suite: str = "") -> Answer | None:
    """Return the rows of the claims that depend on these records; None without claims."""
    if not rows:
        return None
    counts = Counter(row.kind for row in rows)
    decided = sum(row.is_decided for row in rows)
    listed = ", ".join(f"{finding} {counts[finding]}" for finding in _FINDINGS if counts[finding])
    headline = Headline(f"{decided} of {len(rows)}", caption("claims", "decided", listed=listed))
    needed = frozenset[str]().union(*(row.notes for row in rows))
    notes = footnotes("claims", {"documents": True, **{name: name in needed for name in _NOTED}})
    table = pd.DataFrame([row.cells for row in rows]).astype(object)
    return Answer(table, (headline,), (*_by_finding(rows), *notes), leads="claims" in suite)


def _by_finding(rows: Sequence[ClaimRow]) -> Iterator[str]:
    """Yield the claims of each finding, if there are more than the 12 rows above which the page folds the table."""
    if len(rows) <= _UNFOLDED:
        return
    claims = dict[str, list[str]]()
    for row in sorted(rows, key=lambda row: _FINDINGS.index(row.kind)):
        claims.setdefault(row.finding, []).append(str(row.cells["Claim"]))
    for finding in claims:
        yield caption("claims", "finding", finding=finding, claims=", ".join(claims[finding]))


# Footnotes of findings, in their order.
_NOTED = ("at_scale", "published", "derived", "small_scale", "in_part", "reading", "noise", "necessary")
_UNFOLDED = 12
_FINDINGS = ("holds", "holds in part", "does not hold", "contradicts itself", "undecided")
CLAIMS = Question("claims", "Which published claims do these records decide?", lambda _records: None)


def _runs_answer(records: Records) -> Answer | None:
    runs = records.runs
    if runs.empty:
        return None
    succeeded = int((runs["status_state"] == "ok").sum())
    headlines = (
        Headline(f"{succeeded} of {len(runs)}", caption("runs", "ok")),
        Headline(f"{len(records.refused)}", caption("runs", "refused")),
    )
    machines = runs[["cpu", "cpu_cores", "devices"]].dropna(subset=["cpu"]).drop_duplicates()
    notes = footnotes("runs", {"machines": len(machines) > 1}, count=len(machines))
    rows = []
    for outcome, group in runs.groupby("status_state", sort=False):
        reason = next((text for text in group["status_reason"] if isinstance(text, str) and text), None)
        rows.append({"Outcome": outcome, "Runs": len(group), "Such as": reason})
    table = pd.DataFrame(rows).dropna(axis="columns", how="all")
    return Answer(table, headlines, notes, leads=False)


def summary_table(records: Records) -> pd.DataFrame:
    """Return the main figures of each strategy."""
    return arm_table(
        real_arms(records),
        lambda arm: {
            "Eval loss": arm.median_over_seeds("eval_loss_final"),
            "State per rank, MiB": arm.state_mib(),
            "Peak memory, GiB": arm.peak_gib[0],
            "Peak of": arm.peak_gib[1],
            "Ring bytes (NCCL) per step, MiB": sent_mib(arm),
            "Step time, ms": 1e3 * step_s(arm),
            "Time, x baseline": arm.format_baseline_ratio(STEP),
        },
    )


def controls_table(records: Records) -> pd.DataFrame:
    """Return the noise of each workload; DeepSpeed's overhead is the ratio of `zero0` in the other tables."""
    rows = []
    for workload, strategies in workloads(records).items():
        runs = strategies[0].workload_runs
        for figure, words in (("eval_loss_final", "evaluation loss"), (STEP, "step time")):
            rows.append(
                {
                    "Workload": workload,
                    "Figure": words,
                    "Residual SD after removing strategy and seed effects": _noise_text(estimate_noise(runs, figure)),
                    "SD of reruns of the same strategy and seed": _noise_text(repeat_noise(runs, figure)),
                }
            )
    return pd.DataFrame(rows)


def _noise_text(estimate: Noise | None) -> str:
    return "not run" if estimate is None else f"{percent(estimate.log_sd)} ({estimate.df} df)"


RUNS = Question(
    "runs",
    "Which runs is this report based on?",
    _runs_answer,
    tables={"summary": summary_table, "controls": controls_table},
)
