"""docs/releases.md and reports/releases/causes.md, from the records there, the bare control and causes.yaml.

`make releases` writes both.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from study.config.places import REPOSITORY
from study.host.stacks import is_of_today, release_key
from study.records.frames import Records, read_parquet, steps_by_run
from study.records.workloads import strategy_order
from study.releases.causes import GRID, PACKAGES, Cause, Change
from study.releases.release_cells import ReleaseCell, release_cells
from study.report.document import Answer, PageSection, markdown_text, page_markdown
from study.report.pages.readme import gpu_faults, releases_document
from study.report.questions.releases import KINDS, QUESTION, clipped, lettered

NOT_RUN = "\N{MIDDLE DOT}"
Row = Mapping[str, Any]
INSTALLED = "installed"
# Rounding of a loss or a norm. The installed release differs by 1e-7, in bf16 by 3e-4; a fault by 4e-3.
_ROUNDING = {"fp32": 1e-5, "bf16": 2e-3}
Asked = Sequence[tuple[str, int]]
_ONE: Asked = [("bare", 4), ("boundary", 4), ("accelerate", 4)]
_SEVERAL_ASKED: Asked = [
    ("bare-losses", 1), ("bare-losses", 4), ("bare-forwards", 1), ("boundary-forwards", 1), ("accelerate-forwards", 1),
]  # fmt: skip
_CONTROL = """\
A small model on two ranks, four micro-steps in a step, without this project's trainer: `deepspeed.initialize` with a
step after each backward pass / the same with one step at the boundary, as Accelerate asks for it / through the stack's
own Accelerate. `=` is right, `!` wrong, `x` an error.
"""
_SEVERAL = """\
The same model with two losses that add up to the one above, and a backward pass for each. Nobody says which is the
step's last, as in DeepSpeed's guide: both of one forward pass, in one micro-step / in four / each of a forward pass of
its own / the same where `set_gradient_accumulation_boundary` names the last / the same through the stack's own
Accelerate.

- Stages 1 and 2, from 0.17.6 to 0.19.8: the last pass takes the place of those before it. In a
  step's last micro-step every pass is taken for its end, and what was summed is handed over and forgotten (deepspeed
  0.19.8, `deepspeed/runtime/zero/stage_1_and_2.py`, lines 1046-1059; up to 0.18.2 it ends in an error). Others met it:
  https://github.com/allenai/open-instruct/pull/1498, https://github.com/deepspeedai/DeepSpeed/pull/8135. No line of it
  knows the device, so a GPU shows it too.
- Stage 2 with the optimizer on the host: in one micro-step the same in every release, and before 0.19.0 also where the
  boundary is named (deepspeed 0.18.9, `deepspeed/runtime/zero/stage_1_and_2.py`, lines 1507-1508);
  https://github.com/deepspeedai/DeepSpeed/pull/7981 ended that, and measured it on GPUs.
- Stage 3 gathers weights for one backward pass through each forward pass (deepspeed 0.19.8,
  `deepspeed/runtime/zero/parameter_offload.py`, lines 461-463). A second one ends in an error, on GPUs too.
- Accelerate steps the engine in every `backward` (accelerate 1.15.0, `accelerate/utils/deepspeed.py`, lines 264-281;
  https://github.com/huggingface/accelerate/issues/2951): two losses are two steps in every release, also
  in this study's runs, which go through it. Add the losses up, and go backward once.
"""


def control(rows: Sequence[Row]) -> Iterator[PageSection]:
    """Yield a table per control that ran: one row per stack, one sign per caller and number of micro-batches."""
    judged = [row for row in rows if row.get("precision") == "fp32" and row.get("clipping")]
    single_pass = [row for row in judged if row["loss"] == "inside"]
    several = [row for row in judged if "-" in row["caller"]]
    for title, text, matching, cases in (
        ("The bare control", _CONTROL, single_pass, _ONE),
        ("Several backward passes in a step", _SEVERAL, several, _SEVERAL_ASKED),
    ):
        if matching:
            signs = {
                (row["stack"], row["strategy"], row["caller"], row["accumulation"]):
                {True: "=", False: "!", None: "x"}[is_right(row)] for row in matching
            }  # fmt: skip
            strategies = list(dict.fromkeys(row["strategy"] for row in matching))
            lines = [
                {"Stack": stack, **{f"`{name}`": " / ".join(signs.get((stack, name, *case), NOT_RUN) for case in cases)
                                    for name in strategies}}
                for stack in sorted({row["stack"] for row in matching}, key=_stack_order)
            ]  # fmt: skip
            yield PageSection(title, text, table=pd.DataFrame(lines))


def _stack_order(name: str) -> tuple[Any, ...]:
    return name == INSTALLED, release_key(name), name


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON file."""
    return list(json.loads(file.read_text(encoding="utf-8")))


def is_right(row: Row) -> bool | None:
    """Whether a case of the control equals a plain loop up to rounding; None if it raised an error."""
    if row.get("error"):
        return None
    most = _ROUNDING["fp32" if row["precision"] == "fp32" else "bf16"]
    # Stage 0 reports no norm in fp32.
    norm_off = 0.0 if row["norm"] is None else abs(row["norm"] - row["right_norm"]) / abs(row["right_norm"])
    return max(row["losses_off"], norm_off) <= most


_SHOWN = 3
_LOSSES_HEAD = """\
\
In fp32 with four micro-steps in a step, clipped: the first three losses and the last, and the first norm that the
engine reported. Releases and strategies that agree in all of these digits are one line; of a cell that ran several
times it is the worst run. A cause that strikes by chance does something else in every run.
"""


def losses(records: Records, cells: Sequence[ReleaseCell], letters: Mapping[Cause, str]) -> Iterator[PageSection]:
    """Yield the table of losses and norms of the cells that diverge."""
    accumulated = [cell for cell in cells if cell.precision == "fp32" and cell.micro_steps > 1 and cell.max_norm]
    wrong = [cell for cell in accumulated if cell.verdict.kind == "different"]
    if not wrong:
        return
    steps = steps_by_run(records)
    right = sorted({_figures(steps[cell.single]) for cell in accumulated if cell.single})
    rows: list[tuple[str, ...]] = [("any", "single", *figures, "") for figures in right]
    groups: dict[tuple[str, ...], list[ReleaseCell]] = {}
    for cell in wrong:
        signs = "".join(letters[cause] for cause in cell.causes) or "?"
        # A run whose first loss is NaN has no recorded steps.
        worst_steps = steps.get(cell.worst_run)
        figures = (cell.verdict.reason, "none") if worst_steps is None else _figures(worst_steps)
        groups.setdefault((*figures, signs), []).append(cell)
    for line, group in groups.items():
        stacks, strategies = ({getattr(cell, name): None for cell in group} for name in ("stack", "strategy"))
        rows.append((", ".join(stacks), ", ".join(strategies), *line))
    table = pd.DataFrame(rows, columns=["Stack", "Strategy", "Losses", "First norm", "Cause"])
    yield PageSection("Losses and norms", _LOSSES_HEAD, table=table)


def _figures(steps: pd.DataFrame) -> tuple[str, str]:
    values = steps["loss"].tolist()
    texts = [*map(_short, values[:_SHOWN]), *(["..."] if len(values) > _SHOWN + 1 else []), _short(values[-1])]
    norm = steps["grad_norm"].iloc[0]
    return ", ".join(texts), "not reported" if pd.isna(norm) else f"{norm:.4g}"


def _short(loss: float) -> str:
    return "NaN" if math.isnan(loss) else f"{loss:.6g}"


PAGE, REPORT = REPOSITORY / "docs" / "releases.md", REPOSITORY / "reports" / "releases"
DETAILS = REPORT / "causes.md"
# DeepSpeed without this project's trainer: records of study/releases/bare.py, in the history up to 7ff8d96.
BARE = "bare.json"
_MADE = """\
<!-- Made by `make releases` from the records in reports/releases and study/releases/causes.yaml. Change those. -->
"""
_COMMANDS = """\
```
study verify --quick           # tests ZeRO-1, 2 and 3 with the packages that are installed here, in 1 to 2 minutes
study releases                 # judges the installed DeepSpeed, and prints the latest releases; study releases 0.18.9
study releases bisect zero3    # finds the release in which a strategy began to diverge
```
"""
_GRID = f"""\
In fp32, on two CPU ranks, with the Accelerate, torch and transformers of this study. A letter is a [cause](#causes).
"none": no fault was found; \N{DAGGER}: from the source, since a fault of CPUs ends the run. Whether a GPU shows a fault
is read in the source; no release has run on a GPU yet.
Half precision, contemporary releases of Accelerate and torch, and each strategy's own column are in the
[full grid](../reports/releases/{DETAILS.name}).
"""
_MUON = """\
DeepSpeed's Muon, in fp32 without clipping; one micro-batch a step / four. The reference is one process under the newest
release. `=` is equal up to rounding, `x` a crash. The source has two more faults, which these runs do not meet:

- Before 0.19.3 stages 1 and 2 with `reduce_scatter`, the default, do not reduce all gradients of a matrix that spans
  two ranks, and orthogonalize the rest too ([7807](https://github.com/deepspeedai/DeepSpeed/issues/7807)).
- Before 0.19.8 a model built under `zero.Init`, with Muon named in DeepSpeed's configuration, trains with AdamW
  ([8438](https://github.com/deepspeedai/DeepSpeed/pull/8438)).
"""
_VERIFY = """\
Install this checkout where your engines are: `pip install .` adds the packages that `study verify` needs and keeps your
torch, DeepSpeed, Accelerate and transformers. `study verify --quick` trains a tiny model for a few steps under `zero1`,
`zero2` and `zero3`, in fp32 with accumulation 1 and 4, and compares each with one process. It installs nothing, and
imports neither `datasets` nor `evaluate`. The first line of its output is the answer, such as

```
FAIL: zero1, zero2 with accumulation (cause a: the gradient is divided by the accumulation steps twice; fixed in 0.19.6)
```

The exit status is 0 for PASS, 1 for FAIL, and 2 if nothing could be tested. Without `--quick` it tests all studied
strategies, and half precision with accumulation 4. By default it uses one rank per GPU, or two ranks without a GPU;
`--world_size 8` sets another number, `--only zero2` selects strategies. A race does not show in every run: if a release
has one, an equal run is `equal, by chance`, and the first line names the race. On CPU ranks `zero3` usually fails
before 0.19.8, by a race that GPUs do not have (cause e).

`--optimizer muon` and `--peft lora` add runs with DeepSpeed's Muon and with LoRA adapters, each compared with one
process that trains alike. Before 0.19.7 DeepSpeed's Muon without ZeRO trains as SGD ([above](#muon)): there is nothing
to compare with.

The bisection runs only the releases that its search needs, and reuses finished records.
[Each cause](../reports/releases/causes.md#causes) cites its source lines and names a release that avoids it.
"""
_NOTHING = Answer(QUESTION.no_data, pd.DataFrame())
_JUDGED = """\
Each run is compared with `single` under the same stack, with the same weights and samples. Equal means: at every step
the loss and the reported norm are within a tolerance. That is what rounding allows, or four times what `ddp` was seen
to differ by, where that is more. What differs first shows what is wrong: the loss of the first step is computed before
any update, so there the weights or the forward pass are wrong; the first norm shows the gradient; AdamW's first update
is the same for a gradient of any scale, so a loss that is wrong only after the second update points to a scale or to
clipping. A cell that ran several times is wrong where one of its runs is. A letter says that these releases have the
lines of that cause, and that such a cell runs through them; that the lines make the difference is shown by the
experiment listed with the cause, not cell by cell.

A stack of kind *today* has one release of DeepSpeed with the Accelerate, torch and transformers of this study. A
*contemporary* one has an Accelerate and a torch of the same months. A fault of the first alone is a mismatch of
releases, not a fault of DeepSpeed. [The report](releases.html) lists every cell, also those without clipping.
"""
_LEGEND = """\
`=` is equal up to rounding, `(=)` equal by chance, in a release with a race; a letter is a [cause](#causes), `?` a
difference whose cause is not known, `'` after it a difference in some runs only, `x` a crash, `-` refused or not
installable, a dot not run. Left of the bar: one micro-step; right of it: four.
"""


def page(records: Records) -> str:
    """Return docs/releases.md: the faults of each release, one row per group of releases with the same ones."""
    every_cell, answer = release_cells(records), QUESTION.answer(records) or _NOTHING
    cells, muon = clipped(every_cell), [cell for cell in every_cell if cell.optimizer == "muon"]
    letters = lettered()
    today = [cell for cell in cells if cell.precision == "fp32" and not cell.is_contemporary]
    causes = [
        {"": letter, "Fault": cause.title, "On a GPU": _GPU[cause.gpu], "Since": cause.entered.release or "-",
         "Fixed in": " ".join(filter(None, [cause.left.release, cause.left.change])) or "-"}
        for cause, letter in letters.items()
    ]  # fmt: skip
    return page_markdown("Which DeepSpeed releases compute the gradients of DDP?", [
        PageSection(text=_MADE), PageSection(text=f"**{markdown_text(answer.sentence)}**"), PageSection(text=_COMMANDS),
        PageSection("What each release does", _GRID, table=_brief(today, letters)),
        *([PageSection("Muon", _MUON, table=_grid(muon, letters))] if muon else []),
        PageSection("Causes", table=pd.DataFrame(causes)), PageSection("Test your own stack", _VERIFY),
    ])  # fmt: skip


def _brief(cells: Sequence[ReleaseCell], letters: Mapping[Cause, str]) -> pd.DataFrame:
    """One row per group of successive releases that have the same faults."""

    def faults(release: str) -> tuple[str, ...]:
        by_column: list[dict[str, list[str]]] = [{}, {}, {}]
        for cell in (cell for cell in cells if cell.release == release):
            kind, causes = cell.verdict.kind, cell.races if cell.is_equal_by_chance else cell.causes
            name = f"`{cell.strategy}`"
            if kind == "crashes" and causes:
                # A CPU bug ends this run before the faults that a GPU shows.
                for cause in gpu_faults(cell):
                    by_column[int(cell.micro_steps > 1)].setdefault(letters[cause], []).append(f"{name}\N{DAGGER}")
            if kind in ("different", "crashes") or cell.is_equal_by_chance:
                column = 2 if causes and all(cause.gpu == "hidden" for cause in causes) else int(cell.micro_steps > 1)
                sign = "crashes " * (kind == "crashes") + "".join(letters[cause] for cause in causes)
                names = by_column[column].setdefault(sign.strip() or "?", [])
                names += [name] * (name not in names)
        return tuple("; ".join(f"{', '.join(names)}: {sign}" for sign, names in entries.items()) or "none"
                     for entries in by_column)  # fmt: skip

    rows = itertools.groupby(sorted({cell.release for cell in cells}, key=release_key), key=faults)
    columns = ("One micro-batch a step", "Accumulation", "On a CPU alone")
    return pd.DataFrame(
        {"DeepSpeed": ", ".join(releases), **dict(zip(columns, texts, strict=True))} for texts, releases in rows
    ).iloc[::-1]


def details(records: Records, bare: Sequence[dict[str, Any]]) -> str:
    """Return reports/releases/causes.md: the grid, the causes and the control."""
    return page_markdown("Releases: grid, causes and records", [PageSection(text=_MADE), *_sections(records, bare)])


def _sections(records: Records, bare: Sequence[Row]) -> Iterator[PageSection]:
    cells, answer = release_cells(records), QUESTION.answer(records) or _NOTHING
    letters, visible = lettered(), clipped(cells)
    yield PageSection(text=f"**{markdown_text(answer.sentence)}**", notes=answer.notes)
    yield PageSection("The grid", _LEGEND)
    for precision in sorted({cell.precision for cell in visible}, key=lambda name: (name != "fp32", name)):
        for is_contemporary, words in KINDS.items():
            group = [
                cell for cell in visible if cell.precision == precision and cell.is_contemporary == is_contemporary
            ]
            if group:
                yield PageSection(f"{precision}, {words}", table=_grid(group, letters), level=3)
    if muon := [cell for cell in cells if cell.optimizer == "muon"]:
        yield PageSection("fp32, Muon, with today's Accelerate and torch", table=_grid(muon, letters), level=3)
    yield PageSection("Causes")
    for cause, letter in letters.items():
        yield PageSection(text=_cause(cause, letter, [cell for cell in cells if cause in cell.causes]))
    yield from losses(records, cells, letters)
    # Strategies that do not run, by stack and reason.
    stopped: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell.verdict.kind in ("crashes", "refuses", "not installable"):
            reason = re.sub(r"^rank \d+: ", "", cell.verdict.reason)
            short = reason if len(reason) <= 160 else f"{reason[:160]}..."
            stopped.setdefault((cell.stack, cell.verdict.kind, short), []).append(f"`{cell.strategy}`")
    rows = [(stack, ", ".join(dict.fromkeys(names)), kind, why) for (stack, kind, why), names in stopped.items()]
    yield PageSection("What does not run", table=pd.DataFrame(rows, columns=["Stack", "Strategies", "Outcome", "Why"]))
    yield from control(bare)
    versions = {cell.stack: cell.versions for cell in cells}
    stacks = pd.DataFrame([
        {"Stack": stack, "Kind": "today" if is_of_today(stack) else "contemporary",
         **{name: versions[stack][name] or "not known" for name in PACKAGES}}
        for stack in sorted(versions, key=_stack_order)
    ])  # fmt: skip
    yield PageSection("The stacks", table=stacks)
    yield PageSection("How a cell is judged", _JUDGED)


def _grid(cells: Sequence[ReleaseCell], letters: dict[Cause, str]) -> pd.DataFrame:
    rows = []
    for release in sorted({cell.row for cell in cells}, key=release_key):
        row = {"DeepSpeed": release}
        for strategy in sorted({cell.strategy for cell in cells}, key=strategy_order):
            matching = [cell for cell in cells if (cell.row, cell.strategy) == (release, strategy)]
            halves = [[cell for cell in matching if (cell.micro_steps > 1) == several] for several in (False, True)]
            row[f"`{strategy}`"] = " / ".join(_sign(half, letters) for half in halves)
        rows.append(row)
    return pd.DataFrame(rows)


def _sign(cells: Sequence[ReleaseCell], letters: dict[Cause, str]) -> str:
    if not cells:
        return NOT_RUN
    (cell,) = cells
    kind, why = cell.verdict.kind, "".join(letters[cause] for cause in cell.causes)
    if kind == "different":
        return (why or "?") + "'" * cell.differs_sometimes
    return {"equal": "(=)" if cell.is_equal_by_chance else "=", "crashes": "x"}.get(kind, "-") + why


def _cause(cause: Cause, letter: str, cells: Sequence[ReleaseCell]) -> str:
    stacks, suffix = ", ".join(dict.fromkeys(cell.stack for cell in cells)), "with Accelerate and torch of its time"
    then = f"not seen {suffix}" if any(cell.contemporary for cell in cells) else f"not run {suffix}"
    if releases := dict.fromkeys(cell.release for cell in cells if cell.is_contemporary):
        then = f"seen in {', '.join(releases)} {suffix} too"
    strategies = ", ".join(f"`{name}`" for name in dict.fromkeys(cell.strategy for cell in cells))
    stacks += " (in some runs only)" * cause.sometimes
    place = f"Seen here in {len(cells)} cells: DeepSpeed {stacks}; {strategies}"
    place += "; only where steps are accumulated" * (cause.accumulation == "several")
    if not cells:
        then, place = "in no run of the grids", f"Strategies: {cause.where}"
    lines = [
        f"### {letter}: {markdown_text(cause.title)}\n",
        f"{markdown_text(cause.says)}\n",
        f"- Whose: {_WHOSE[cause.blame]}; {then}",
        f"- {place}",
        *(f"- Read in {line.package} {line.release}, `{line.file}`, lines {line.lines}: {markdown_text(line.says)}"
          for line in cause.lines),
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
_GPU = {"shows": "it shows there too", "hidden": "it does not show there", "unknown": "not known"}


def main() -> None:
    """Write both pages, and the document of `study releases`."""
    records = read_parquet(REPORT)
    GRID.write_text(json.dumps(releases_document(REPORT), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(records), encoding="utf-8")
    DETAILS.write_text(details(records, read_rows(REPORT / BARE)), encoding="utf-8")


if __name__ == "__main__":
    main()
