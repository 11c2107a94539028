"""DeepSpeed releases that compute the gradients of one process, under each strategy."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Iterator, Sequence

import pandas as pd

from study.config.text import percent
from study.host.stacks import release_key
from study.records.frames import Records
from study.records.workloads import strategy_order
from study.releases.causes import Cause, known_faults, read_causes
from study.releases.judge import DAGGER
from study.releases.judged_stack import NOT_RUN
from study.releases.release_cells import ReleaseCell, release_cells
from study.releases.verdict import ROUNDING
from study.report.document import Answer, Question
from study.report.facts import Headline, caption, footnotes

# Kinds of faults; each is a column of the table by strategy.
_OWN, _MISMATCH, _ON_CPUS = _FAULTS = "Faults of DeepSpeed", "Mismatch of releases", "Faults on CPUs only"
FAULTS_ON_GPUS = (_OWN, _MISMATCH)
_IN_HALF = "Faults of DeepSpeed's bf16 alone"
# The letter of a fault whose cause is not known.
UNKNOWN = "?"


def answer(records: Records) -> Answer | None:
    """Return the releases that are right under all strategies, and under each; None without records of releases."""
    if not (cells := release_cells(records)):
        return None
    verdicts = gpu_verdicts(cell for cell in clipped(cells) if not cell.is_contemporary)
    faults = _shown_faults(verdicts, faults_in_half(first_grid(cells)))
    has_gpu = bool((records.runs["devices"].dropna() != "[]").any())
    notes = (*_fault_notes(verdicts, faults), *case_notes(cells))
    return Answer(_strategy_table(verdicts, faults), tuple(_headlines(verdicts, has_gpu)), notes)


def _headlines(verdicts: pd.DataFrame, has_gpu: bool) -> Iterator[Headline]:
    """Yield the number of releases that are right by the source of the faults, and that of those measured so."""
    judged = verdicts[_is_judged(verdicts)]
    right, ran = right_releases(judged)
    if not ran:
        yield Headline("0", caption("releases", "none"))
        return
    accumulates = bool(judged["several"].any())
    bounds = ""
    plain_right, plain_ran = right_releases(verdicts[~verdicts["several"]])
    if accumulates and plain_ran:
        bounds = caption("releases", "plain", right=len(plain_right), ran=len(plain_ran))
    what = "right_accumulated" if accumulates else "right"
    yield Headline(f"{len(right)} of {len(ran)}", caption("releases", what), scope=spans(right, ran), bounds=bounds)
    faulty = {*verdicts["release"][verdicts["kind"].isin(_FAULTS)]}
    measured = [release for release in ran if release not in faulty]
    where = "measured" if has_gpu else "measured_on_cpus"
    yield Headline(f"{len(measured)} of {len(ran)}", caption("releases", where), scope=spans(measured, ran))


def _is_judged(verdicts: pd.DataFrame) -> pd.Series:
    """Return which verdicts judge a release: those with accumulation, if any has it."""
    is_several = verdicts["several"]
    return is_several if is_several.any() else ~is_several


def _fault_notes(verdicts: pd.DataFrame, faults: pd.DataFrame) -> tuple[str, ...]:
    """Return how many releases have faults, what each letter of the table is, and how a release is judged."""
    judged = verdicts[_is_judged(verdicts)]
    own, mixed = ({*judged["release"][judged["kind"] == kind]} for kind in (_OWN, _MISMATCH))
    ran = right_releases(judged)[1]
    crashed = spans({*verdicts["release"][verdicts["from_source"]]}, ran)
    shown_letters = {*faults["letter"]}
    accumulates = bool(judged["several"].any())
    counts = footnotes(
        "releases",
        {"faults": bool(own or mixed), "mismatch": bool(mixed), "half": _IN_HALF in {*faults["kind"]}},
        own=len(own),
        mixed=len(mixed),
        both=len(own & mixed),
    )
    letters = [
        caption("releases", "race" if cause.sometimes else "cause", letter=letter, title=cause.title)
        for cause, letter in lettered().items()
        if letter in shown_letters
    ]
    rules = footnotes(
        "releases",
        {
            "column": not accumulates,
            "column_accumulated": accumulates,
            "crashed": bool(crashed),
            "unknown": UNKNOWN in shown_letters,
        },
        releases=crashed,
    )
    return (*counts, *letters, *rules)


def first_grid(cells: Iterable[ReleaseCell]) -> list[ReleaseCell]:
    """Return the cases in fp32 with today's packages."""
    return [cell for cell in clipped(cells) if cell.precision == "fp32" and not cell.is_contemporary]


def case_notes(cells: Sequence[ReleaseCell]) -> tuple[str, ...]:
    """Return what a case is, when it is equal, and how many are by chance."""
    lucky = sum(cell.is_equal_by_chance for cell in cells)
    full, half, engine = (ROUNDING[precision] for precision in ("fp32", "bf16", "bf16-engine"))
    return footnotes(
        "releases",
        {"case": True, "equal": True, "lucky": lucky > 0},
        grid=len(first_grid(cells)),
        cells=len(cells),
        runs=sum(len(cell.runs) for cell in cells),
        loss=f"{full.loss:.0e}",
        norm=f"{full.norm:.0e}",
        half_loss=percent(half.loss),
        half_norm=percent(half.norm),
        engine_loss=percent(engine.loss),
        engine_norm=percent(engine.norm),
        lucky=lucky,
    )


def gpu_verdicts(cells: Iterable[ReleaseCell]) -> pd.DataFrame:
    """Return a row per case and fault, ? if unknown; without one the row has the kind "right" or "not run"."""
    rows: list[tuple[str, str, bool, bool, str, str]] = []
    for cell in sorted(cells, key=lambda cell: strategy_order(cell.strategy)):
        kind = cell.verdict.kind
        causes = cell.races if kind == "equal" else {*cell.causes, *gpu_faults(cell)}
        faults = [
            (letter, _ON_CPUS if cause.gpu == "hidden" else _MISMATCH if cause.blame == "pairing" else _OWN)
            for cause, letter in lettered().items()
            if cause in causes
        ]
        if kind == "different" and not cell.causes:
            faults = [(UNKNOWN, _MISMATCH if cell.is_mismatch else _OWN)]
        case = (cell.strategy, cell.release, cell.micro_steps > 1, kind == "crashes" and cell.hides_on_gpu)
        rows += [(*case, *fault) for fault in faults or [("", "right") if kind == "equal" else (NOT_RUN, NOT_RUN)]]
    columns = ["strategy", "release", "several", "from_source", "letter", "kind"]
    return pd.DataFrame(rows, columns=columns).astype({"several": bool, "from_source": bool})


def faults_in_half(cells: Iterable[ReleaseCell]) -> pd.DataFrame:
    """Return a row per fault of DeepSpeed's bf16 without accumulation that is none in fp32, by the source."""
    rows = []
    for cell in cells:
        for cause in known_faults(cell.versions, on_gpu=True):
            is_of_half = cause.shows_in(cell.strategy, 1, "bf16-engine") and not cause.shows_in(
                cell.strategy, 1, "fp32"
            )
            if is_of_half and cause.gpu != "hidden":
                rows.append({"strategy": cell.strategy, "release": cell.release, "letter": lettered()[cause]})
    return pd.DataFrame(rows, columns=["strategy", "release", "letter"]).drop_duplicates()


def right_releases(verdicts: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return the releases without a fault that a GPU shows, and all that run."""
    wrong = {*verdicts["release"][verdicts["kind"].isin(FAULTS_ON_GPUS)]}
    ran = sorted({*verdicts["release"][verdicts["kind"] != NOT_RUN]}, key=release_key)
    return [release for release in ran if release not in wrong], ran


def spans(releases: Iterable[str], tested: Iterable[str]) -> str:
    """Return releases as spans of the tested ones, such as "0.14.5, 0.19.6 to 0.19.8"."""
    groups = [list(group) for is_in, group in itertools.groupby(tested, key={*releases}.__contains__) if is_in]
    return ", ".join(f"{group[0]} to {group[-1]}" if len(group) > 2 else ", ".join(group) for group in groups)


def _in_table(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return the verdicts that the table by strategy is made of."""
    return verdicts[_is_judged(verdicts) | (verdicts["kind"] == _ON_CPUS)]


def _shown_faults(verdicts: pd.DataFrame, in_half: pd.DataFrame) -> pd.DataFrame:
    """Return a row per fault in the table by strategy, with its column as the kind."""
    judged = _in_table(verdicts)
    columns = ["strategy", "release", "letter", "kind"]
    faults = judged.loc[judged["kind"].isin(_FAULTS), columns]
    half_faults = in_half[in_half["strategy"].isin(judged["strategy"])].assign(kind=_IN_HALF)
    return pd.concat([faults, half_faults[columns]], ignore_index=True)


def _strategy_table(verdicts: pd.DataFrame, faults: pd.DataFrame) -> pd.DataFrame:
    """Return a row per strategy: how many releases are right on GPUs with accumulation, and those with each fault."""
    tested = right_releases(verdicts)[1]
    kinds = [*_FAULTS, *[_IN_HALF] * (_IN_HALF in {*faults["kind"]})]
    rows = []
    for strategy, group in _in_table(verdicts).groupby("strategy", sort=False):
        right, ran = right_releases(group)
        same = faults[faults["strategy"] == strategy]
        by_kind = {kind: _spans_by_letter(same[same["kind"] == kind], tested) for kind in kinds}
        rows.append({"Strategy": strategy, "Right on GPUs": f"{len(right)} of {len(ran)}", **by_kind})
    return pd.DataFrame(rows, columns=["Strategy", "Right on GPUs", *kinds])


def _spans_by_letter(faults: pd.DataFrame, tested: Sequence[str]) -> str:
    """Return the releases with each fault as text; "none" without one."""
    groups = faults.groupby("letter")["release"]
    return "; ".join(f"{letter}: {spans(releases, tested)}" for letter, releases in groups) or "none"


def faults_on_gpu(verdicts: pd.DataFrame) -> str:
    """Return the faults of a release, each with its strategies; a dagger marks those whose run a CPU bug crashes."""
    daggers = verdicts["from_source"].map({True: DAGGER, False: ""})
    if (verdicts["kind"] == NOT_RUN).all():
        return NOT_RUN
    faults = verdicts.assign(name="`" + verdicts["strategy"] + "`" + daggers)[
        ~verdicts["kind"].isin(("right", _ON_CPUS))
    ]
    return by_letter(zip(faults["letter"], faults["name"], strict=True)) or f"no fault{max(daggers)}"


def by_letter(struck: Iterable[tuple[str, str]]) -> str:
    """Return pairs of a letter and a strategy as text, each letter once."""
    groups = pd.DataFrame(struck, columns=["letter", "name"]).groupby("letter", sort=False)["name"]
    return "; ".join(f"{letter}: {', '.join(names.unique())}" for letter, names in groups)


def gpu_faults(cell: ReleaseCell) -> list[Cause]:
    """Return the faults of a cell that a GPU shows too; those by source if its CPU run crashes from another fault."""
    faults = cell.causes
    if faults and cell.verdict.kind == "crashes":
        candidates = known_faults(cell.versions, on_gpu=True)
        faults = tuple(cause for cause in candidates if cause.shows_in(cell.strategy, cell.micro_steps, cell.precision))
    return [cause for cause in faults if cause.gpu != "hidden"]


def verdict_table(records: Records) -> pd.DataFrame:
    """Return a row per case with its verdict."""
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
            "Difference of the loss": f"{size:.1e}"
            if (size := cell.verdict.size) is not None
            else "NaN"
            if cell.verdict.kind == "different"
            else "-",
            "Norm, x the right one": "-" if cell.verdict.norm_ratio is None else f"{cell.verdict.norm_ratio:.3g}",
            "Runs": len(cell.runs),
            "Cause": ", ".join(lettered()[cause] for cause in cell.causes) or "-",
            "With contemporary ones": "-" if cell.is_contemporary else cell.contemporary or "not run",
        }
        for cell in release_cells(records)
    )


def cause_letters(cell: ReleaseCell) -> str:
    """Return the letters of the causes of a cell; empty if none is known."""
    return "".join(lettered()[cause] for cause in cell.causes)


def _grid_kind(cell: ReleaseCell) -> str:
    """Return the kind of a cell in the figure of verdicts: its verdict, or the kind of its fault."""
    if cell.is_equal_by_chance:
        return "lucky"
    if cell.verdict.kind != "different":
        return cell.verdict.kind
    if cell.is_mismatch:
        return "mismatch"
    return "cpu" if cell.hides_on_gpu else "different"


def _grid_stack(cell: ReleaseCell) -> str:
    return f"{cell.precision}, {KINDS[cell.is_contemporary]}"


def grid_table(records: Records) -> pd.DataFrame:
    """Return a row per case of the figure of verdicts; of its stacks fp32 with today's packages is the first."""
    cells = clipped(release_cells(records))
    in_order = sorted(cells, key=lambda cell: (cell.precision != "fp32", cell.is_contemporary, cell.precision))
    stacks = list(dict.fromkeys(map(_grid_stack, in_order)))
    rows = [
        {
            "release": cell.row,
            "stack": _grid_stack(cell),
            "strategy": cell.strategy,
            "micro_steps": cell.micro_steps,
            "verdict": cell.verdict.kind,
            "kind": _grid_kind(cell),
            "letters": (cause_letters(cell) or UNKNOWN * (cell.verdict.kind == "different"))
            + "'" * cell.differs_sometimes,
            "sometimes": cell.differs_sometimes,
        }
        for cell in cells
    ]
    columns = ["release", "stack", "strategy", "micro_steps", "verdict", "kind", "letters", "sometimes"]
    table = pd.DataFrame(rows, columns=columns)
    return table.astype({"stack": pd.CategoricalDtype(stacks, ordered=True)})


def worst_cells(records: Records, strategy: str = "") -> list[ReleaseCell]:
    """Return the cell in fp32 with the largest difference of each cause, or all of a strategy; the largest first."""
    wrong = [
        cell
        for cell in clipped(release_cells(records))
        if cell.precision == "fp32" and cell.verdict.kind == "different" and (cell.verdict.size or 0) > 0
    ]
    wrong.sort(key=lambda cell: cell.verdict.size or 0, reverse=True)
    if strategy:
        return [cell for cell in wrong if cell.strategy == strategy]
    by_cause: dict[object, ReleaseCell] = {}
    for cell in wrong:
        by_cause.setdefault(cell.causes or (cell.strategy, cell.verdict.what), cell)
    return list(by_cause.values())


def cause_table() -> pd.DataFrame:
    """Return a row per known cause with its letter; reports/releases/causes.md has its lines and its proof."""
    return pd.DataFrame(
        {
            "": letter,
            "Fault": ", ".join(filter(None, (cause.title, cause.loops_text))),
            "Whose": "mismatch of releases" if cause.blame == "pairing" else "DeepSpeed",
            "On a GPU": ON_GPU[cause.gpu],
            "Since": cause.entered.release or "-",
            "Fixed in": f"{cause.left.release} {cause.left.change}".strip() or "-",
        }
        for cause, letter in lettered().items()
    )


ON_GPU = {"shows": "it shows there too", "hidden": "it does not show there", "unknown": "not known"}
KINDS = {False: "with today's Accelerate and torch", True: "with contemporary Accelerate and torch"}


def clipped(cells: Iterable[ReleaseCell]) -> list[ReleaseCell]:
    """Return AdamW's cells with gradient clipping, or all if none clips: a figure shows one setting, the table both."""
    all_cells = [cell for cell in cells if cell.optimizer == "adamw"]
    return [cell for cell in all_cells if cell.max_norm] or all_cells


def lettered() -> dict[Cause, str]:
    """Return the known causes, each with its letter in all grids."""
    return dict(zip(read_causes(), string.ascii_letters, strict=False))


QUESTION = Question(
    "releases",
    "Which releases compute the same gradients as one process?",
    answer,
    tables={"causes": lambda _records: cause_table(), "verdicts": verdict_table},
    figures=("release_grid", "fault_curves"),
    notebook="releases",
)
