"""docs/releases.md, from the records of reports/releases, the bare control beside them, and causes.yaml.

`make releases` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from study.host.stacks import THEN, release_order
from study.releases.bare import read_rows
from study.releases.causes import PACKAGES, Cause, Change
from study.releases.control import NOT_RUN, control
from study.releases.losses import losses
from study.releases.verdict import ROUNDING
from study.report.plots.releases import KINDS, clipped, lettered
from study.report.questions.releases import QUESTION, avoid_table
from study.report.records.frames import Records, read_parquet
from study.report.records.stacks import Cell, release_cells
from study.report.records.workloads import strategy_order
from study.report.site.page import markdown_text, table_markdown
from study.spec.strategies import REPOSITORY

PAGE, REPORT = REPOSITORY / "docs" / "releases.md", REPOSITORY / "reports" / "releases"
# DeepSpeed without this project's trainer, by study/releases/bare.py.
BARE = "bare.json"
_REASON, _OF_A_RANK = 160, re.compile(r"^rank \d+: ")
_HEAD = """# Releases: which of them train as one process does

<!-- Made by `make releases` from the records in reports/releases and study/releases/causes.yaml. Change those. -->

Some releases of DeepSpeed, alone or together with some releases of Accelerate, train otherwise than plain data
parallelism, and say nothing. Before you trust an image, run `study verify` in it: it trains a tiny model under the
studied strategies, in fp32 with one micro-step in a step and with four, in half precision with four, and says which of
them compute what one process computes there. It takes a rank for each GPU, or two without; `--world-size 8` asks for
another number. `study releases bisect zero3` finds between which two releases a strategy began to train wrongly; it
runs no more of them than that takes, and what has a record is not run again.
"""
_JUDGED = """
## How a cell is judged

Each run is held against `single` under the same stack, with the same weights and samples. Equal means: at every step
the loss and the reported norm are within a tolerance. That is what rounding allows, or four times what `ddp` was seen
to differ by, where that is more. What differs first says what is wrong: the loss of the first step is taken before any
update, so there the weights or the forward pass are wrong; the first norm tells of the gradient; AdamW's first update
is the same for a gradient of any scale, so a loss that goes wrong only behind the second update tells of a scale or of
clipping. A cell that ran several times is wrong where one of its runs is. A letter says that these releases have the
lines of that cause, and that such a cell runs through them; that the lines make the difference is shown by the
experiment that stands with the cause, not cell by cell.

A stack called *today* has one release of DeepSpeed, and beside it the Accelerate, torch and transformers that this
study uses. *Of its time* it has an Accelerate and a torch of the same months. What is wrong with the first alone is
called a mismatch of releases, and never DeepSpeed's fault.
"""


def page(records: Records, bare: Sequence[dict[str, Any]]) -> str:
    cells = release_cells(records)
    answer = QUESTION.answer(records)
    if answer is None:
        return f"{_HEAD}\n{QUESTION.nothing}\n"
    letters = lettered(clipped(cells))
    notes = "".join(f"- {markdown_text(note)}\n" for note in answer.notes)
    parts = [_HEAD, f"**{markdown_text(answer.sentence)}**\n\n{notes}", _grids(clipped(cells), letters)]
    parts.append(f"## Releases to avoid\n\n{table_markdown(avoid_table(records))}")
    parts.append("## Causes\n")
    parts += [
        _cause(cause, letter, [cell for cell in cells if cause in cell.causes]) for cause, letter in letters.items()
    ]
    parts += [
        _unexplained(cells),
        losses(records, cells, letters),
        _unclipped(cells),
        _not_run(cells),
        control(bare),
        _stacks(cells),
        _JUDGED.strip() + "\n",
        _tolerances(),
    ]
    return "\n".join(part for part in parts if part)


def _grids(cells: Sequence[Cell], letters: dict[Cause, str]) -> str:
    text = (
        "## The grid\n\n`=` is equal up to rounding, `(=)` equal by chance, in a release with a race; a letter is a"
        " [cause](#causes) below, `?` a difference whose cause is not known, `'` behind it a difference in some runs"
        " only, `x` a crash, `-` refused or not installable, a dot not run. Left of the bar: one micro-step; right of"
        " it: four.\n"
    )
    precisions = sorted({cell.precision for cell in cells}, key=lambda name: (name != "fp32", name))
    for precision in precisions:
        for of_its_time, words in KINDS.items():
            mine = [cell for cell in cells if cell.precision == precision and cell.is_of_its_time == of_its_time]
            if mine:
                text += f"\n### {precision}, {words}\n\n{table_markdown(_grid(mine, letters))}"
    return text


def _grid(cells: Sequence[Cell], letters: dict[Cause, str]) -> pd.DataFrame:
    rows = []
    for release in sorted({cell.release for cell in cells}, key=release_order):
        row = {"DeepSpeed": release}
        for strategy in sorted({cell.strategy for cell in cells}, key=strategy_order):
            mine = [cell for cell in cells if (cell.release, cell.strategy) == (release, strategy)]
            halves = [[cell for cell in mine if (cell.micro_steps > 1) == several] for several in (False, True)]
            row[f"`{strategy}`"] = " / ".join(_sign(half, letters) for half in halves)
        rows.append(row)
    return pd.DataFrame(rows)


def _sign(cells: Sequence[Cell], letters: dict[Cause, str]) -> str:
    if not cells:
        return NOT_RUN
    (cell,) = cells
    kind, why = cell.verdict.kind, "".join(letters[cause] for cause in cell.causes)
    if kind == "different":
        return (why or "?") + "'" * cell.differs_sometimes
    return {"equal": "(=)" if cell.is_lucky else "=", "crashes": "x"}.get(kind, "-") + why


def _cause(cause: Cause, letter: str, cells: Sequence[Cell]) -> str:
    seen = ", ".join(dict.fromkeys(cell.stack for cell in cells))
    strategies = ", ".join(f"`{name}`" for name in dict.fromkeys(cell.strategy for cell in cells))
    seen += " (in some runs only)" * cause.sometimes
    lines = [
        f"### {letter}: {markdown_text(cause.title)}\n",
        f"{markdown_text(cause.says)}\n",
        f"- Whose: {_WHOSE[cause.blame]}; {_seen_then(cells)}",
        f"- Seen here in {len(cells)} cells: DeepSpeed {seen}; {strategies}"
        + ("; only where steps are accumulated" if cause.accumulation == "several" else ""),
        *(f"- Read in {each.package} {each.release}, `{each.file}`, lines {each.lines}: {markdown_text(each.says)}"
          for each in cause.lines),
        *(f"- {word} {' '.join(filter(None, [change.release, change.change]))}"
          for word, change in (("Came with", cause.entered), ("Gone in", cause.left)) if change != Change()),
        *([f"- Shown by: {markdown_text(cause.proof)}"] if cause.proof else []),
        f"- On a GPU: {_GPU[cause.gpu]}; {markdown_text(cause.gpu_why)}",
    ]  # fmt: skip
    lines += [f"- Threads: {', '.join(cause.threads)}"] if cause.threads else []
    lines += [f"- Instead: {markdown_text(cause.instead)}"] if cause.instead else []
    return "\n".join(lines) + "\n"


_WHOSE = {
    "engine": "DeepSpeed's",
    "pairing": "a mismatch of releases; DeepSpeed alone does not do it, and with other releases beside it neither",
}


def _seen_then(cells: Sequence[Cell]) -> str:
    """Whether the releases of its own time do it too."""
    beside = "with Accelerate and torch of its time"
    if then := list(dict.fromkeys(cell.release for cell in cells if cell.is_of_its_time)):
        return f"seen in {', '.join(then)} {beside} too"
    return f"not seen {beside}" if any(cell.of_its_time for cell in cells) else f"not run {beside}"


_GPU = {"shows": "it shows there too", "hidden": "it does not show there", "unknown": "not known"}


def _unexplained(cells: Iterable[Cell]) -> str:
    rows = [
        {"Stack": cell.stack, "Strategy": cell.strategy, "Precision": cell.precision, "Micro-steps": cell.micro_steps,
         "Clips at": cell.max_norm or "-", "Says": cell.verdict.says}
        for cell in cells if cell.verdict.kind == "different" and not cell.causes
    ]  # fmt: skip
    return f"## Differences without a known cause\n\n{table_markdown(pd.DataFrame(rows))}" if rows else ""


def _not_run(cells: Iterable[Cell]) -> str:
    """By stack and reason, the strategies that it stopped."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell.verdict.kind in ("crashes", "refuses", "not installable"):
            reason = _OF_A_RANK.sub("", cell.verdict.reason)
            short = reason if len(reason) <= _REASON else f"{reason[:_REASON]}..."
            found.setdefault((cell.stack, cell.verdict.kind, short), []).append(f"`{cell.strategy}`")
    rows = [
        {"Stack": stack, "Strategies": ", ".join(dict.fromkeys(names)), "Outcome": kind, "Why": why}
        for (stack, kind, why), names in found.items()
    ]
    return f"## What does not run\n\n{table_markdown(pd.DataFrame(rows))}" if rows else ""


def _unclipped(cells: Sequence[Cell]) -> str:
    """Beside each cell without clipping the same one with it."""
    rows = []
    with_clipping = {_same(cell): cell for cell in cells if cell.max_norm}
    for cell in cells:
        clipping = with_clipping.get(_same(cell))
        if not cell.max_norm and clipping is not None and "different" in (cell.verdict.kind, clipping.verdict.kind):
            rows.append({
                "Stack": cell.stack, "Strategy": cell.strategy, "Micro-steps": cell.micro_steps,
                f"Clips at {clipping.max_norm:g}": clipping.verdict.says, "Does not clip": cell.verdict.says,
            })  # fmt: skip
    text = (
        "## With clipping and without\n\nWhere the loss is right without clipping, only what is clipped is wrong.\n\n"
    )
    return text + table_markdown(pd.DataFrame(rows)) if rows else ""


def _same(cell: Cell) -> tuple[object, ...]:
    return cell.stack, cell.strategy, cell.precision, cell.micro_steps, cell.trainer


def _stacks(cells: Sequence[Cell]) -> str:
    versions = {cell.stack: cell.versions for cell in cells}
    rows = [
        {"Stack": stack, "Kind": "of its time" if stack.endswith(THEN) else "today", **{
            name: versions[stack][name] or "not known" for name in PACKAGES}}
        for stack in sorted(versions, key=lambda name: (release_order(name), name))
    ]  # fmt: skip
    return f"## The stacks\n\n{table_markdown(pd.DataFrame(rows))}"


def _tolerances() -> str:
    rows = [{"Precision": name, "Loss, as a share": f"{each.loss:.1e}", "Norm, as a share": f"{each.norm:.1e}"}
            for name, each in ROUNDING.items()]  # fmt: skip
    return table_markdown(pd.DataFrame(rows))


def main() -> None:
    PAGE.write_text(page(read_parquet(REPORT), read_rows(REPORT / BARE)), encoding="utf-8")


if __name__ == "__main__":
    main()
