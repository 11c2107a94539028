"""DeepSpeed releases that compute the gradients of one process, under each strategy."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Sequence

import pandas as pd

from study.config.text import percent
from study.host.stacks import release_key
from study.records.frames import Records
from study.releases.causes import Cause, known_faults, read_causes
from study.releases.command import DAGGER, NOT_RUN
from study.releases.release_cells import ReleaseCell, release_cells
from study.releases.verdict import ROUNDING, Verdict
from study.report.document import Answer, Question, paragraphs


def answer(records: Records) -> Answer | None:
    """Return the number of releases that diverge, and the releases to avoid; None without records of releases."""
    cells = release_cells(records)
    if not cells:
        return None
    today = [cell for cell in clipped(cells) if not cell.is_contemporary]
    bad = [cell for cell in today if cell.verdict.kind == "different"]
    ran = {cell.release for cell in today if cell.verdict.kind in ("equal", "different")}
    on_a_gpu = sorted(ran - {cell.release for cell in bad if not cell.hides_on_gpu}, key=release_key)
    plain = ran - {cell.release for cell in bad if cell.micro_steps == 1 and not cell.hides_on_gpu}
    good = sorted(ran - {cell.release for cell in bad}, key=release_key)
    table = fault_table(cells)
    sentence, on_gpus, on_cpus, *notes = paragraphs(
        "releases_answer.j2", cells=cells, ran=ran, plain=plain, rounding=ROUNDING,
        no_gpu=(records.runs["devices"].dropna() == "[]").all(), percent=percent, good=good, on_a_gpu=on_a_gpu,
        letters={cause: letter for cause, letter in lettered().items() if f"{letter}: " in table.to_string()},
    )  # fmt: skip
    numbers = ((f"{len(on_a_gpu)} of {len(ran)}", on_gpus), (f"{len(good)} of {len(ran)}", on_cpus))
    return Answer(sentence, table, tuple(notes), numbers)


def fault_table(cells: Iterable[ReleaseCell]) -> pd.DataFrame:
    """Return one row per group of successive releases that have the same faults in fp32, the newest first."""
    today = cells_of_today(cells)

    def faults(release: str) -> tuple[str, ...]:
        group = [cell for cell in today if cell.release == release]
        if all(cell.verdict.kind == "crashes" and not cell.causes for cell in group):
            return ("crashes",) * 3
        on_gpu = [faults_on_gpu([cell for cell in group if (cell.micro_steps > 1) == many]) for many in (False, True)]
        hidden = by_letter(
            (lettered()[cause], f"`{cell.strategy}`") for cell in group
            for cause in (cell.races if cell.is_equal_by_chance else cell.causes) if cause.gpu == "hidden"
        )  # fmt: skip
        return *on_gpu, hidden or (NOT_RUN if {*on_gpu} == {NOT_RUN} else "no fault")

    rows = itertools.groupby(dict.fromkeys(cell.release for cell in today), key=faults)
    columns = ("One micro-batch a step", "Accumulation", "Only on CPUs")
    return pd.DataFrame(
        {"DeepSpeed": ", ".join(releases), **dict(zip(columns, texts, strict=True))} for texts, releases in rows
    ).iloc[::-1]


def faults_on_gpu(cells: Sequence[ReleaseCell]) -> str:
    """Return the faults of a release, each with its strategies; a dagger marks those found in the source only."""
    struck: list[tuple[str, str]] = []
    for cell in cells:
        kind = cell.verdict.kind
        if not cell.causes and kind != "equal":
            struck.append(("?" if kind == "different" else NOT_RUN, f"`{cell.strategy}`"))
        # A CPU bug ends a crashed run before the faults that a GPU shows.
        struck += [(lettered()[cause], f"`{cell.strategy}`{DAGGER * (kind == 'crashes')}")
                   for cause in (gpu_faults(cell) if cell.causes else ())]  # fmt: skip
    if [letter for letter, _ in struck].count(NOT_RUN) == len(cells):
        return NOT_RUN
    return by_letter(struck) or f"no fault{DAGGER * any(cell.verdict.kind == 'crashes' for cell in cells)}"


def by_letter(struck: Iterable[tuple[str, str]]) -> str:
    """Return pairs of a letter and a strategy as text, each letter once."""
    names: dict[str, dict[str, None]] = {}
    for letter, name in struck:
        names.setdefault(letter, {})[name] = None
    return "; ".join(f"{letter}: {', '.join(group)}" for letter, group in names.items())


def gpu_faults(cell: ReleaseCell) -> list[Cause]:
    """Return the faults of a cell that a GPU shows too; those by source if its CPU run crashes from another fault."""
    faults = cell.causes
    if cell.verdict.kind == "crashes":
        candidates = known_faults(cell.versions, on_gpu=True)
        faults = tuple(cause for cause in candidates if cause.shows_in(cell.strategy, cell.micro_steps, cell.precision))
    return [cause for cause in faults if cause.gpu != "hidden"]


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


def cause_table() -> pd.DataFrame:
    """Return a row per known cause with its letter; reports/releases/causes.md has its lines and its proof."""
    return pd.DataFrame(
        {"": letter, "Fault": cause.title, "On a GPU": ON_GPU[cause.gpu], "Since": cause.entered.release or "-",
         "Fixed in": f"{cause.left.release} {cause.left.change}".strip() or "-"}
        for cause, letter in lettered().items()
    )  # fmt: skip


_LETTERS = string.ascii_lowercase + string.ascii_uppercase
ON_GPU = {"shows": "it shows there too", "hidden": "it does not show there", "unknown": "not known"}
KINDS = {False: "with today's Accelerate and torch", True: "with contemporary Accelerate and torch"}


def clipped(cells: Iterable[ReleaseCell]) -> list[ReleaseCell]:
    """Return AdamW's cells with gradient clipping, or all if none clips: a figure shows one setting, the table both."""
    all_cells = [cell for cell in cells if cell.optimizer == "adamw"]
    return [cell for cell in all_cells if cell.max_norm] or all_cells


def cells_of_today(cells: Iterable[ReleaseCell]) -> list[ReleaseCell]:
    """Return the fp32 cells with the other packages of this study."""
    return [cell for cell in clipped(cells) if cell.precision == "fp32" and not cell.is_contemporary]


def lettered() -> dict[Cause, str]:
    """Return the known causes, each with its letter in all grids."""
    return dict(zip(read_causes(), _LETTERS, strict=False))


QUESTION = Question(
    "releases", "Which releases compute the same gradients as one process?", answer,
    tables={"causes": lambda _records: cause_table(), "verdicts": verdict_table},
    figures=("release_grid", "fault_curves"), notebook="releases",
)  # fmt: skip
