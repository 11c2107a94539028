"""DeepSpeed releases that compute the gradients of one process, under each strategy."""

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke

from study.config.text import percent
from study.host.stacks import release_key
from study.records.frames import Records, steps_by_run
from study.records.workloads import strategy_order
from study.releases.causes import Cause, read_causes
from study.releases.release_cells import ReleaseCell, release_cells
from study.releases.verdict import ROUNDING, Verdict
from study.report import canvas
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
            if matching:
                row[column] = _avoided(matching)
        rows.append(row)
    return pd.DataFrame(rows, columns=list(columns)).dropna(axis="columns", how="all").fillna("not run")


def _avoided(cells: Sequence[ReleaseCell]) -> str:
    if not any(cell.verdict.kind in ("equal", "different") for cell in cells):
        return "none of them runs"
    bad: dict[str, bool] = {}
    for cell in cells:
        if cell.verdict.kind == "different" or cell.is_equal_by_chance:
            bad[cell.release] = bad.get(cell.release, True) and (cell.is_equal_by_chance or cell.hides_on_gpu)
    everywhere, on_a_cpu = (", ".join(name for name in bad if bad[name] is hidden) for hidden in (False, True))
    return "; ".join(filter(None, [everywhere, on_a_cpu and f"on a CPU {on_a_cpu}"])) or "none"


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


_ROW_IN, _LETTERS = 0.21, string.ascii_lowercase + string.ascii_uppercase
_MAX_CURVES = 6
KINDS = {False: "with today's Accelerate and torch", True: "with contemporary Accelerate and torch"}
_WORDS = {
    "equal": "the same as one process, up to rounding",
    "lucky": "the same by chance: its releases have a race", "different": "diverges from one process",
    "cpu": "diverges on a CPU, and not on a GPU", "mismatch": "diverges by a mismatch of releases",
    "refuses": "refuses", "crashes": "crashes", "not installable": "not installable", "not judged": "not judged",
}  # fmt: skip


def clipped(cells: Iterable[ReleaseCell]) -> list[ReleaseCell]:
    """Return AdamW's cells with gradient clipping, or all if none clips: a figure shows one setting, the table both."""
    all_cells = [cell for cell in cells if cell.optimizer == "adamw"]
    return [cell for cell in all_cells if cell.max_norm] or all_cells


def lettered() -> dict[Cause, str]:
    """Return the known causes, each with its letter in all grids."""
    return dict(zip(read_causes(), _LETTERS, strict=False))


def release_grid(records: Records) -> list[canvas.Drawing]:
    """Draw a grid of releases and strategies for each precision and kind of stack."""
    cells = clipped(release_cells(records))
    letters = lettered()
    precisions = sorted({cell.precision for cell in cells}, key=lambda name: (name != "fp32", name))
    subjects = {
        f"{precision}, {KINDS[is_contemporary]}": [
            cell for cell in cells if cell.is_contemporary == is_contemporary and cell.precision == precision
        ]
        for precision, is_contemporary in itertools.product(precisions, KINDS)
    }
    filled = [item for item in subjects.items() if item[1]]
    return canvas.drawings("release_grid", filled, functools.partial(_grid, letters))


def _grid(letters: dict[Cause, str], subject: str, cells: Sequence[ReleaseCell]) -> canvas.Drawing:
    releases = sorted({cell.row for cell in cells}, key=release_key, reverse=True)
    strategies = sorted({cell.strategy for cell in cells}, key=strategy_order)
    steps = sorted({cell.micro_steps for cell in cells})
    width = 0.94 / len(steps)
    figure, (axes,) = canvas.sheet(_ROW_IN * len(releases) + 0.95)
    for cell in cells:
        x = strategies.index(cell.strategy) + 0.03 + width * steps.index(cell.micro_steps)
        row, fill = releases.index(cell.row), canvas.RELEASES[_kind(cell)]
        axes.add_patch(Rectangle((x, row + 0.06), width, 0.88, facecolor=fill.colour, hatch=fill.hatch,
                                 edgecolor="white", linewidth=0.5))  # fmt: skip
        text = "".join(letters[cause] for cause in cell.causes) or "?" * (cell.verdict.kind == "different")
        text += "'" * cell.differs_sometimes
        label = axes.text(x + width / 2, row + 0.52, text, ha="center", va="center", size=7.5, weight="bold",
                          color="white")  # fmt: skip
        label.set_path_effects([withStroke(linewidth=2.5, foreground=fill.colour)])
    axes.set(xlim=(0, len(strategies)), ylim=(len(releases), 0))
    axes.set_yticks([row + 0.5 for row in range(len(releases))], releases)
    axes.set_xticks([column + 0.5 for column in range(len(strategies))], strategies, rotation=40, ha="left",
                    rotation_mode="anchor")  # fmt: skip
    axes.tick_params(length=0, labelcolor=canvas.INK)
    axes.xaxis.tick_top()
    for side in axes.spines.values():
        side.set_visible(False)
    bad = [cell for cell in cells if cell.verdict.kind == "different"]
    halves = " and ".join(f"{count} micro-step{'s'[: count > 1]}" for count in steps)
    subtitle = f"In each cell, from the left: {halves} per step. {len(bad)} of {len(cells)} diverge from one process."
    words = "; ".join(
        f"{release}: {', '.join(sorted({cell.strategy for cell in bad if cell.row == release})) or 'none'}"
        for release in releases
    )
    kinds = {_kind(cell) for cell in cells}
    titles = sorted({f"{letters[cause]}  {cause.title}" for cell in cells for cause in cell.causes})
    if any(cell.differs_sometimes for cell in cells):
        titles.append("'  in some of its runs")
    legend = [
        *canvas.legend_of_fills({kind: canvas.RELEASES[kind] for kind in _WORDS if kind in kinds}, _WORDS),
        *(Patch(facecolor="none", edgecolor="none", label=title) for title in titles),
    ]
    return canvas.finish(figure, "Which releases compute the gradients of one process", subject, subtitle, words,
                         legend=legend, legend_columns=1, lead=f"Releases that diverge, {subject}")  # fmt: skip


def _kind(cell: ReleaseCell) -> str:
    if cell.verdict.kind != "different":
        return "lucky" if cell.is_equal_by_chance else cell.verdict.kind
    if cell.is_mismatch:
        return "mismatch"
    return "cpu" if cell.hides_on_gpu else "different"


def fault_curves(records: Records) -> list[canvas.Drawing]:
    """Draw the loss curves of faults in fp32 next to the right ones: of each cause the largest difference."""
    cells = clipped(release_cells(records))
    worst_by_cause: dict[str, ReleaseCell] = {}
    for cell in cells:
        if cell.verdict.kind == "different" and cell.precision == "fp32" and cell.verdict.size:
            name = " ".join(cause.id for cause in cell.causes) or f"{cell.strategy} {cell.verdict.what}"
            if name not in worst_by_cause or (worst_by_cause[name].verdict.size or 0) < cell.verdict.size:
                worst_by_cause[name] = cell
    worst = sorted(worst_by_cause.values(), key=lambda cell: -(cell.verdict.size or 0))[:_MAX_CURVES]
    steps = steps_by_run(records)
    drawn = [cell for cell in worst if cell.worst_run in steps and cell.single in steps]
    subjects = [("fp32, one run each", drawn)] if drawn else []
    return canvas.drawings("fault_curves", subjects, functools.partial(_curves, lettered(), steps))


def _curves(
    letters: dict[Cause, str], steps: Mapping[str, pd.DataFrame], subject: str, drawn: Sequence[ReleaseCell]
) -> canvas.Drawing:
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, _ = canvas.sheet(1.75 * rows)
    figure.clear()
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    for axes in grid[len(drawn) :]:
        axes.set_visible(False)
    looks: dict[str, Any] = {"one process": {"color": canvas.INK},
             "this release": {"color": canvas.RELEASES["different"].colour, "linestyle": (0, (4, 1.5))}}  # fmt: skip
    for axes, cell in zip(grid, drawn, strict=False):
        for run, look in zip((cell.single, cell.worst_run), looks.values(), strict=True):
            axes.plot(steps[run]["step"], steps[run]["loss"], linewidth=1.6, **look)
        causes = ", ".join(letters[cause] for cause in cell.causes)
        axes.set_title(f"{cell.release} {cell.strategy}{f' ({causes})' if causes else ''}", size=8.5, pad=15)
        about = f"{cell.micro_steps} micro-step{'s'[: cell.micro_steps > 1]}: {cell.verdict.what}"
        axes.text(0, 1.03, about, transform=axes.transAxes, size=8, color=canvas.QUIET)
        axes.grid(axis="y")
        canvas.plain_ticks(axes.yaxis)
    grid[0].set_ylabel("loss, nats")
    for axes in grid[len(drawn) - columns : len(drawn)]:
        axes.set_xlabel("step")
    words = "; ".join(f"{cell.release} {cell.strategy} differs by {cell.verdict.size:.2g}" for cell in drawn)
    legend = [Patch(facecolor=look["color"], label=label) for label, look in looks.items()]
    subtitle = "The same samples and the same initial weights; each run ended without an error."
    return canvas.finish(figure, "Loss curves of the faults", subject, subtitle, words, legend=legend)


QUESTION = Question(
    "releases", "Which releases compute the gradients of one process?", answer,
    no_data="No run here is of a release under test: `study run releases` compares them.",
    tables={"releases_to_avoid": avoid_table, "causes": cause_table, "verdicts": verdict_table},
    figures={"release_grid": release_grid, "fault_curves": fault_curves}, first_figure="release_grid",
    notebook="releases",
)  # fmt: skip
