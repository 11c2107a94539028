"""DeepSpeed releases that compute the gradients of one process, under each strategy."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable

import pandas as pd

from study.config.text import percent
from study.host.stacks import release_key
from study.records.frames import Records
from study.records.workloads import strategy_order
from study.releases.causes import Cause, read_causes
from study.releases.release_cells import ReleaseCell, release_cells
from study.releases.verdict import ROUNDING, Verdict
from study.report.document import Answer, Question


def answer(records: Records) -> Answer | None:
    """Return the number of releases that diverge, and the releases to avoid; None without records of releases."""
    cells = release_cells(records)
    if not cells:
        return None
    today = [cell for cell in clipped(cells) if not cell.is_contemporary]
    bad = [cell for cell in today if cell.verdict.kind == "different"]
    ran = {cell.release for cell in today if cell.verdict.kind in ("equal", "different")}
    wrong = {cell.release for cell in bad}
    good = sorted(ran - wrong, key=release_key)
    # A release counts as hidden only if a GPU hides the causes of all its cases.
    hidden = wrong - {cell.release for cell in bad if not cell.hides_on_gpu}
    on_a_gpu = sorted(ran - wrong | hidden, key=release_key)
    sentence = (
        f"On a GPU, by the source of each fault, these releases compute the gradients of one process under all"
        f" strategies: {', '.join(on_a_gpu) or 'none'}."
        f" With today's Accelerate and torch, on CPU ranks, {len(wrong)} of {len(ran)} releases that run diverge from"
        f" one process under some strategy, {len(hidden)} of them by a fault that a GPU does not show."
        f" Equal to it there under all strategies: {', '.join(good) or 'none'}."
    )
    # A race condition may be absent from any run.
    steady = [cell for cell in bad if not any(cause.sometimes for cause in cell.causes)]
    compared = [cell.contemporary for cell in steady if cell.contemporary in ("equal", "different")]
    full, half, engine = (ROUNDING[precision] for precision in ("fp32", "bf16", "bf16-engine"))
    notes = [
        f"{sum(len(cell.runs) for cell in cells)} runs of {len(cells)} cases, each against `single` with the"
        f" same releases. Equal: within {full.loss:.0e} of a loss and {full.norm:.0e} of a norm in fp32,"
        f" {percent(half.loss)} and {percent(half.norm)} in bf16,"
        f" {percent(engine.loss)} and {percent(engine.norm)} in DeepSpeed's own bf16."
    ]
    if compared:
        right = compared.count("equal")
        why = "; those are a mismatch between releases, not a fault of the engine alone" if right else ""
        notes.append(
            f"Of {len(compared)} cases that are wrong today and also ran with contemporary Accelerate and torch,"
            f" {right} are right with those{why}."
        )
    if bad:
        kinds = [{cause.gpu for cause in cell.causes} for cell in bad]
        notes.append(
            f"Of {len(bad)} cases that are wrong today, {sum('shows' in kind for kind in kinds)} have a cause that a"
            f" GPU shows too, according to its source; {kinds.count({'hidden'})} have one that a GPU does not show; the"
            f" cause of {kinds.count(set())} is not known."
        )
    if lucky := sum(cell.is_equal_by_chance for cell in cells):
        notes.append(f"{lucky} cases agree although a fault strikes them by chance: they are no evidence.")
    return Answer(sentence, avoid_table(records), tuple(notes))


def avoid_table(records: Records) -> pd.DataFrame:
    """Return the releases to avoid, by strategy, with and without accumulation."""
    cells = clipped(release_cells(records))
    rows: list[dict[str, str]] = []
    columns = {"Strategy": None}
    for strategy in sorted({cell.strategy for cell in cells}, key=strategy_order):
        row = {"Strategy": strategy}
        for is_contemporary, several in itertools.product(KINDS, (False, True)):
            matching = [cell for cell in cells if cell.strategy == strategy and cell.is_contemporary == is_contemporary
                    and (cell.micro_steps > 1) == several]  # fmt: skip
            column = f"{'Accumulating' if several else 'One micro-step'}, {KINDS[is_contemporary]}"
            columns[column] = None
            is_hidden: dict[str, bool] = {}
            for cell in matching:
                if cell.verdict.kind == "different" or cell.is_equal_by_chance:
                    hides = is_hidden.get(cell.release, True) and (cell.is_equal_by_chance or cell.hides_on_gpu)
                    is_hidden[cell.release] = hides
            parts = [", ".join(name for name in is_hidden if not is_hidden[name])]
            if any(is_hidden.values()):
                parts.append(f"on a CPU {', '.join(name for name in is_hidden if is_hidden[name])}")
            if any(cell.verdict.kind in ("equal", "different") for cell in matching):
                row[column] = "; ".join(filter(None, parts)) or "none"
            elif matching:
                row[column] = "none of them runs"
        rows.append(row)
    return pd.DataFrame(rows, columns=list(columns)).dropna(axis="columns", how="all").fillna("not run")


def verdict_table(records: Records) -> pd.DataFrame:
    """Return a row per case with its verdict."""
    cells = release_cells(records)
    letters = lettered()

    def size_text(verdict: Verdict) -> str:
        if verdict.size is not None:
            return f"{verdict.size:.1e}"
        return "NaN" if verdict.kind == "different" else "-"

    return pd.DataFrame(
        {
            "Release": cell.release,
            "Accelerate and torch": "contemporary" if cell.is_contemporary else "today's",
            "Strategy": f"{cell.strategy}{', Muon' * (cell.optimizer == 'muon')}",
            "Precision": cell.precision,
            "Micro-steps": cell.micro_steps,
            "Clips at": cell.max_norm or "-",
            "Verdict": cell.verdict.kind + (", sometimes" if cell.differs_sometimes else ""),
            "Differs first": cell.verdict.what or "-",
            "At step": cell.verdict.first_step or "-",
            "Difference of the loss": size_text(cell.verdict),
            "Norm, x the right one": "-" if cell.verdict.norm_ratio is None else f"{cell.verdict.norm_ratio:.3g}",
            "Runs": len(cell.runs),
            "Cause": ", ".join(letters[cause] for cause in cell.causes) or "-",
            "With contemporary ones": "-" if cell.is_contemporary else cell.contemporary or "not run",
        }
        for cell in cells
    )


def cause_table(records: Records) -> pd.DataFrame:
    """Return a row per cause with its releases and strategies."""
    cells = release_cells(records)
    rows = []
    for cause, letter in lettered().items():
        matching = [cell for cell in cells if cause in cell.causes]
        rows.append({
            "": letter, "Cause": cause.title, "Whose": cause.blame,
            "Releases seen": ", ".join(dict.fromkeys(cell.stack for cell in matching)) or "none",
            "Strategies": ", ".join(dict.fromkeys(cell.strategy for cell in matching)) or cause.where,
            "On a GPU": f"{cause.gpu}: {cause.gpu_why}", "Instead": cause.instead or "-",
        })  # fmt: skip
    return pd.DataFrame(rows)


_LETTERS = string.ascii_lowercase + string.ascii_uppercase
KINDS = {False: "with today's Accelerate and torch", True: "with contemporary Accelerate and torch"}


def clipped(cells: Iterable[ReleaseCell]) -> list[ReleaseCell]:
    """Return AdamW's cells with gradient clipping, or all if none clips: a figure shows one setting, the table both."""
    all_cells = [cell for cell in cells if cell.optimizer == "adamw"]
    return [cell for cell in all_cells if cell.max_norm] or all_cells


def lettered() -> dict[Cause, str]:
    """Return the known causes, each with its letter in all grids."""
    return dict(zip(read_causes(), _LETTERS, strict=False))


QUESTION = Question(
    "releases", "Which releases compute the gradients of one process?", answer,
    tables={"releases_to_avoid": avoid_table, "causes": cause_table, "verdicts": verdict_table},
    figures=("release_grid", "fault_curves"), notebook="releases",
)  # fmt: skip
