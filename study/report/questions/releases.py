"""Does a release of DeepSpeed compute what one process computes, under each strategy?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from study.host.stacks import release_order
from study.records.frames import Records
from study.records.statistics import percent
from study.records.workloads import strategy_order
from study.releases.stacks import ReleaseCell, release_cells
from study.releases.verdict import ROUNDING, Verdict
from study.report.plots.releases import KINDS, clipped, fault_curves, lettered, release_grid
from study.report.questions.question import Answer, Question


def answer(records: Records) -> Answer | None:
    cells = release_cells(records)
    if not cells:
        return None
    today = [cell for cell in clipped(cells) if not cell.is_of_its_time]
    bad = _bad(today)
    ran = {cell.release for cell in today if cell.verdict.kind in ("equal", "different")}
    wrong = {cell.release for cell in bad}
    good = sorted(ran - wrong, key=release_order)
    # A cause of one cell may be hidden on a GPU, and that of another not.
    hidden = wrong - {cell.release for cell in bad if not cell.gpu_hides_it}
    sentence = (
        f"With today's Accelerate and torch, on CPU ranks, {len(wrong)} of {len(ran)} releases that run train otherwise"
        f" than one process under some strategy, {len(hidden)} of them by what a GPU does not show."
        f" As it does under all of them train: {', '.join(good) or 'none'}."
    )
    # What is a matter of luck may be right anywhere.
    steady = [cell for cell in bad if not any(cause.sometimes for cause in cell.causes)]
    compared = [cell.of_its_time for cell in steady if cell.of_its_time in ("equal", "different")]
    half, own = ROUNDING["bf16"], ROUNDING["bf16-engine"]
    notes = [
        f"{sum(len(cell.runs) for cell in cells)} runs in {len(cells)} cells, beside `single` under the same stack."
        f" Equal is within {ROUNDING['fp32'].loss:.0e} of a loss and {ROUNDING['fp32'].norm:.0e} of a norm in fp32,"
        f" {percent(half.loss)} and {percent(half.norm)} in bf16, and {percent(own.loss)} and {percent(own.norm)} in"
        " DeepSpeed's own bf16.",
    ]
    if compared:
        right = compared.count("equal")
        why = "; those are a mismatch between releases, and no fault of the engine alone" if right else ""
        notes.append(
            f"Of {len(compared)} cells that are wrong today and ran with Accelerate and torch of their time too,"
            f" {right} are right there{why}."
        )
    if bad:
        kinds = [{cause.gpu for cause in cell.causes} for cell in bad]
        notes.append(
            f"Of {len(bad)} cells that are wrong today {sum('shows' in kind for kind in kinds)} have a cause that a GPU"
            f" shows too, as its source reads; {kinds.count({'hidden'})} have one that a GPU does not show, and"
            f" the cause of {kinds.count(set())} is not known."
        )
    if lucky := sum(cell.is_lucky for cell in cells):
        notes.append(f"{lucky} cells agree that run through a fault which strikes by chance: they are no proof.")
    return Answer(sentence, avoid_table(records), tuple(notes))


def _bad(cells: Iterable[ReleaseCell]) -> list[ReleaseCell]:
    return [cell for cell in cells if cell.verdict.kind == "different"]


def avoid_table(records: Records) -> pd.DataFrame:
    """By strategy: the releases to avoid, with and without accumulation."""
    cells = clipped(release_cells(records))
    rows: list[dict[str, str]] = []
    columns = ["Strategy"]
    for strategy in sorted({cell.strategy for cell in cells}, key=strategy_order):
        row = {"Strategy": strategy}
        for of_its_time, words in KINDS.items():
            for several in (False, True):
                mine = [cell for cell in cells if cell.strategy == strategy and cell.is_of_its_time == of_its_time
                        and (cell.micro_steps > 1) == several]  # fmt: skip
                column = f"{'Accumulating' if several else 'One micro-step'}, {words}"
                columns += [column] * (column not in columns)
                if mine:
                    row[column] = _avoided(mine)
        rows.append(row)
    return pd.DataFrame(rows, columns=columns).dropna(axis="columns", how="all").fillna("not run")


def _avoided(cells: Sequence[ReleaseCell]) -> str:
    if not any(cell.verdict.kind in ("equal", "different") for cell in cells):
        return "none of them runs"
    bad: dict[str, bool] = {}
    for cell in cells:
        if cell.verdict.kind == "different" or cell.is_lucky:
            bad[cell.release] = bad.get(cell.release, True) and (cell.is_lucky or cell.gpu_hides_it)
    everywhere, on_a_cpu = (", ".join(name for name in bad if bad[name] is hidden) for hidden in (False, True))
    return "; ".join(filter(None, [everywhere, on_a_cpu and f"on a CPU {on_a_cpu}"])) or "none"


def _size_text(verdict: Verdict) -> str:
    if verdict.size is not None:
        return f"{verdict.size:.1e}"
    return "no number" if verdict.kind == "different" else "-"


def verdict_table(records: Records) -> pd.DataFrame:
    cells = release_cells(records)
    letters = lettered(clipped(cells))
    return pd.DataFrame(
        {
            "Release": cell.release,
            "Beside": "of its time" if cell.is_of_its_time else "today",
            "Strategy": cell.strategy,
            "Precision": cell.precision,
            "Micro-steps": cell.micro_steps,
            "Clips at": cell.max_norm or "-",
            "Verdict": cell.verdict.kind + (", sometimes" if cell.differs_sometimes else ""),
            "Differs first": cell.verdict.what or "-",
            "At step": cell.verdict.first_step or "-",
            "Loss off by, as a share": _size_text(cell.verdict),
            "Norm, x the right one": "-" if cell.verdict.norm_ratio is None else f"{cell.verdict.norm_ratio:.3g}",
            "Runs": len(cell.runs),
            "Cause": ", ".join(letters[cause] for cause in cell.causes if cause in letters) or "-",
            "With its time": "-" if cell.is_of_its_time else cell.of_its_time or "not run",
        }
        for cell in cells
    )


def cause_table(records: Records) -> pd.DataFrame:
    cells = release_cells(records)
    rows = []
    for cause, letter in lettered(clipped(cells)).items():
        mine = [cell for cell in cells if cause in cell.causes]
        rows.append({
            "": letter, "Cause": cause.title, "Whose": cause.blame, "Releases seen": ", ".join(
                dict.fromkeys(cell.stack for cell in mine)), "Strategies": ", ".join(
                dict.fromkeys(cell.strategy for cell in mine)),
            "On a GPU": f"{cause.gpu}: {cause.gpu_why}", "Instead": cause.instead or "-",
        })  # fmt: skip
    return pd.DataFrame(rows)


QUESTION = Question(
    name="releases",
    title="Does ZeRO leave the loss alone in the release I run?",
    answer=answer,
    nothing="No run here names the releases of its stack: `study run releases` compares them.",
    tables={"releases_to_avoid": avoid_table, "causes": cause_table, "verdicts": verdict_table},
    figures={"release_grid": release_grid, "fault_curves": fault_curves},
    first_figure="release_grid",
    notebook="releases",
)
