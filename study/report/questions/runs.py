"""The runs of a report: their outcomes, their noise, the remaining part of a plan, and the claims that use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pandas as pd

from study.config.text import format_duration, percent
from study.records.frames import Records
from study.records.outcome import SliceProgress
from study.records.statistics import Noise, estimate_noise, repeat_noise
from study.records.strategy_runs import Row
from study.report.document import Answer, Question, paragraphs
from study.report.questions.comparison import arm_table, real_arms, workloads
from study.report.questions.memory import STEP, sent_mib, step_s


def _remaining_answer(records: Records) -> Answer | None:
    slices = records.remaining
    if not slices:
        return None
    planned, missing = sum(item.planned for item in slices), sum(len(item.left) for item in slices)
    time = format_duration(sum(item.seconds for item in slices))
    if not missing:
        sentence = f"All of it is measured: {planned} runs and searches."
    elif not any(item.ok + item.other for item in slices):
        sentence = f"None of it is measured yet: {planned} runs and searches remain, about {time}."
    else:
        sentence = f"{planned - missing} of {planned} runs and searches are measured; {missing} remain, about {time}."
    suites = {item.suite: [part for part in slices if part.suite == item.suite] for item in slices}
    begun = {suite: parts for suite, parts in suites.items() if any(part.ok + part.other for part in parts)}
    notes = ["Times are estimates from earlier records and the suites' arithmetic."]
    if begun and len(begun) < len(suites):
        untouched = [suite for suite in suites if suite not in begun]
        notes.insert(0, f"Without a run yet: {', '.join(untouched)}.")
    table = pd.DataFrame([_row(suite, parts) for suite, parts in (begun or suites).items()])
    return Answer(sentence, table, tuple(notes))


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


def claims_answer(rows: Sequence[Row], suite: str = "") -> Answer | None:  # noqa: PLR0914
    """Return the rows of the claims that depend on these records; None without claims."""
    if not rows:
        return None
    claims = [(str(row["Finding"]).partition(" (")[0], row) for row in rows]
    claims.sort(key=lambda item: _FINDINGS.index(item[0]))
    counts = Counter(finding for finding, _ in claims)
    texts = [str(row["Finding"]) for _, row in claims]
    # The page folds a table of more than 12 rows.
    noted = [text for text in texts if len(rows) > 12 and (not text.startswith("undecided") or "reproduced" in text)]
    notes = [
        f"{text[0].upper()}{text[1:]}: "
        + " ".join(f"{row['Claim']}, “{row['It says']}”" for _, row in claims if row["Finding"] == text)
        for text in dict.fromkeys(noted)
    ]
    rest = [str(row["Claim"]) for text, (_, row) in zip(texts, claims, strict=True) if text not in noted]
    notes += [f"Undecided for another reason: {', '.join(rest)}."] * bool(noted and rest)
    elsewhere = sum("other evidence" in text for text in texts)
    decided = len(rows) - counts["undecided"] - elsewhere
    undecided = [text.removeprefix("undecided (").removesuffix(")") for text in texts]
    reproduced = Counter(kind for kind in undecided if kind.endswith("reproduced at small scale"))
    kinds = ", ".join(f"{count} {words}" for words, count in reproduced.items())
    sentence = (
        f"These records decide {decided or 'none'} of the {len(rows)} published claims that they test; other evidence"
        f" decides {elsewhere or 'none'}. Undecided: {counts['undecided'] or 'none'}{kinds and f' ({kinds})'}."
    )
    if len(rows) == 1:
        lead = f"{'One' if decided else 'None'}: the only published claim that they test"
        sentence = f"{lead}, {rows[0]['Claim']}, is {texts[0]}."
    listed = ", ".join(f"{finding} {count}" for finding, count in counts.items())
    notes += paragraphs("claims_note.j2", findings="; ".join(texts))
    words = f"published claims that these records decide; by all evidence: {listed}"
    numbers = [(f"{decided} of {len(rows)}", words)] if "claims" in suite else []
    return Answer(sentence, pd.DataFrame(rows).astype(object), tuple(notes), numbers)


_FINDINGS = ("holds", "holds in part", "does not hold", "contradicts itself", "undecided")
CLAIMS = Question("claims", "Which published claims do these records decide?", lambda _records: None)


def _runs_answer(records: Records) -> Answer | None:
    runs = records.runs
    if runs.empty:
        return None
    lost = int((runs["status_state"] != "ok").sum())
    sentence = f"{len(runs) - lost} of {len(runs)} runs succeeded; excluded records: {len(records.refused)}."
    notes = []
    machines = runs[["cpu", "cpu_cores", "devices"]].dropna(subset=["cpu"]).drop_duplicates()
    if len(machines) > 1:
        notes.append(f"They come from {len(machines)} different machines; comparisons mark runs of another machine.")
    rows = []
    for outcome, group in runs.groupby("status_state", sort=False):
        reason = next((text for text in group["status_reason"] if isinstance(text, str) and text), None)
        rows.append({"Outcome": outcome, "Runs": len(group), "Such as": reason})
    return Answer(sentence, pd.DataFrame(rows).dropna(axis="columns", how="all"), tuple(notes))


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
