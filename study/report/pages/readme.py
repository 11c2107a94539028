"""The marked blocks of README.md and other pages: tables and answers of the reports in git, output of `study advise`.

python -m study.report.pages.readme            rewrites them
python -m study.report.pages.readme --check    exit status 1 when one is stale
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from study.advisor import advise_command
from study.advisor.fitted import precision_under
from study.benchmark.answers import shipped_predictors
from study.benchmark.questions import read_questions
from study.benchmark.scores import Figure, scores
from study.config.flags import Precision
from study.config.places import REPOSITORY
from study.config.strategies import read_strategy
from study.predictor.communication import sent_bytes
from study.predictor.hardware import to_box
from study.predictor.models import model_shape
from study.predictor.request import Request
from study.records.frames import read_parquet
from study.releases.command import LATEST_RELEASES
from study.releases.judge import shown_causes
from study.report.document import render_markdown, table_markdown
from study.report.pages.memory_figure import MEMORY_FIGURE, memory_svg
from study.report.pages.prediction import OURS, foretold_errors
from study.report.questions.virtual import state_by_stage
from study.virtual.summaries import table1_rows

# A block names its source: `<!-- releases: study/releases/grid.json -->` up to `<!-- end of releases -->`.
_BLOCK = re.compile(r"(<!-- (?P<name>\w+): (?P<source>[^>]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)
# The lines of the answer and of the fastest strategy.
_ADVISE_LINES = 10
# Columns of the bytes sent. Programs load a model in 16 bits for the second.
_SENDERS: dict[str, tuple[str, Precision | None]] = {
    "DDP, fp32 gradients": ("ddp", None),
    "DDP, 16 bits": ("ddp", "bf16-engine"),
    "ZeRO-1, 16 bits": ("zero1", None),
    "ZeRO-2, 16 bits": ("zero2", None),
    "ZeRO-3, 16 bits": ("zero3", None),
    "FSDP2, 16 bits": ("fsdp2", None),
}
# Suites of a GPU that were predicted before any ran.
_FORETOLD_ON_GPU = ("gpu", "gpu_fp16")
# Words of the errors table.
_FIGURES: dict[Figure, str] = {"memory": "peak", "time": "step"}
_SHORT_NAMES = {
    "accelerate estimate-memory": "Accelerate",
    "DeepSpeed estimate_zero2/3": "DeepSpeed",
    "EleutherAI calc_transformer_mem": "EleutherAI",
    "torch MemTracker": "torch",
}
# Documents with marked blocks.
DOCUMENTS = ("README.md", "docs/method.md", "reports/README.md")


def releases_table(document: dict[str, Any]) -> str:
    """Return the latest releases with the faults expected on a GPU, then one line per fault with its fix."""
    latest = document["releases"][:LATEST_RELEASES]
    return render_markdown(
        "readme_releases.md.j2",
        latest=_by_faults(pd.DataFrame(latest)),
        causes=shown_causes(document, latest),
        tested=document["tested"],
        by_source="†" in json.dumps(latest, ensure_ascii=False),
    ).rstrip()


def _by_faults(releases: pd.DataFrame) -> pd.DataFrame:
    """Return one row for neighbouring releases with the same faults."""
    name, faults = releases.columns[0], list(releases.columns[1:])
    is_new = (releases[faults] != releases[faults].shift()).any(axis=1)
    return releases.groupby(is_new.cumsum(), sort=False).agg({name: ", ".join, **dict.fromkeys(faults, "first")})


def sent_table(model: str, hardware: str, *accumulations: str) -> str:
    """Return the GB that one rank sends in a step by micro-batches and strategy, as `study advise` assumes them."""
    shape, box = model_shape(model), to_box(hardware)

    def gigabytes(name: str, precision: Precision | None, micro_batches: str) -> str:
        strategy = read_strategy(name)
        request = Request(
            shape,
            strategy,
            box,
            2048,
            1,
            int(micro_batches),
            precision or precision_under(strategy, "bf16"),
            False,
            "sdpa",
            pure=precision is not None,
            autocast=not strategy.is_fsdp,
        )
        return f"{sent_bytes(request) / 1e9:.0f}"

    rows = [
        {
            "micro-batches": micro_batches,
            **{title: gigabytes(name, precision, micro_batches) for title, (name, precision) in _SENDERS.items()},
        }
        for micro_batches in accumulations
    ]
    return table_markdown(pd.DataFrame(rows)).rstrip()


def advise_output(model: str, hardware: str) -> str:
    """Return the first lines that `study advise` prints."""
    parser, out = argparse.ArgumentParser(), io.StringIO()
    advise_command.add_arguments(parser)
    arguments = [model, "--hardware", hardware]
    with contextlib.redirect_stdout(out):
        advise_command.run(parser.parse_args(arguments))
    lines = out.getvalue().splitlines()
    excerpt = [*lines[:_ADVISE_LINES], "..."]
    return "\n".join(["```", f"$ study advise {' '.join(arguments)}", *excerpt, "```"])


def _figure_name(column: str) -> str:
    return column.partition(":")[0]


# Of the rows of the table of errors.
_RUNS = "published runs (full: all weights; -: no answer)"


def errors_table(folder: Path) -> str:
    """Return the median errors of every predictor against published training by kind, and ours on the first GPU."""
    questions = read_questions()
    medians: dict[str, dict[str, str]] = {}
    counts: dict[tuple[str, Figure], int] = {}
    for score in scores(questions, shipped_predictors(questions)):
        if score.answered.median is None:
            continue
        counts.setdefault((score.group, score.figure), score.answered.rows)
        column = f"{_FIGURES[score.figure]}: {_SHORT_NAMES.get(score.predictor, score.predictor)}"
        medians.setdefault(score.group, {})[column] = f"{score.answered.median:.0%}"
    # Peaks before steps, as the figures are named.
    columns = sorted(dict.fromkeys(column for cells in medians.values() for column in cells), key=_figure_name)
    rows = [
        {
            _RUNS: f"{kind} ({counts[kind, 'memory']} peaks, {counts[kind, 'time']} steps)",
            **{column: cells.get(column, "-") for column in columns},
        }
        for kind, cells in medians.items()
    ]
    rows.append(_foretold_row(folder, columns))
    return table_markdown(pd.DataFrame(rows)).rstrip()


def _foretold_row(folder: Path, columns: Sequence[str]) -> dict[str, str]:
    """Return the errors on the first GPU of this project, as a line of the table."""
    errors = foretold_errors(folder, _FORETOLD_ON_GPU)
    ours = dict.fromkeys(columns, "-") | {
        f"{figure}: {OURS}": f"{errors[figure]['median']:.0%}" for figure in _FIGURES.values()
    }
    counts = f"{errors['peak']['rows']} peaks, {errors['step']['rows']} steps"
    return {_RUNS: f"one H200, predicted before its first run ({counts})", **ours}


def reports_list(names: str, root: Path) -> str:
    """Return each report's question and its answer: the numbers at the head of its summary, or its bold sentence."""
    parts = []
    for name in names.split():
        text = (root / "reports" / name / "summary.md").read_text(encoding="utf-8")
        answer = re.search(r"^(?:- \*\*.+\n)+|^\*\*(?:.+\n)+", text, re.MULTILINE)
        assert answer, f"{name} has no answer"
        parts += [f"### [{text.splitlines()[0].removeprefix('# ')}]({name}/summary.md)", answer[0].strip()]
    return "\n\n".join(parts)


_BLOCKS: dict[str, Callable[[str, Path], str]] = {
    "table": lambda folder, root: table_markdown(state_by_stage(table1_rows(read_parquet(root / folder)))),
    "releases": lambda file, root: releases_table(json.loads((root / file).read_text(encoding="utf-8"))),
    "errors": lambda folder, root: errors_table(root / folder),
    "reports": reports_list,
    "advise": lambda arguments, _root: advise_output(*arguments.split()),
    "sent": lambda arguments, _root: sent_table(*arguments.split()),
}


def rewritten(text: str, root: Path) -> str:
    """Return the text with every marked block regenerated from the folder that its marker names."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_BLOCKS[match['name']](match['source'], root)}\n{match[4]}", text)


def main() -> int:
    """Rewrite the blocks; return 1 if `--check` finds a stale one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when a table is stale")
    options = parser.parse_args()
    texts = {REPOSITORY / name: (REPOSITORY / name).read_text(encoding="utf-8") for name in DOCUMENTS}
    stale = {file: new for file, text in texts.items() if (new := rewritten(text, REPOSITORY)) != text}
    figure = REPOSITORY / MEMORY_FIGURE
    if (drawn := memory_svg()) != figure.read_text(encoding="utf-8"):
        stale[figure] = drawn
    for file, text in stale.items():
        if options.check:
            print(f"{file.name} is stale: run `make readme`", file=sys.stderr)
        else:
            file.write_text(text, encoding="utf-8")
    return int(bool(stale) and options.check)


if __name__ == "__main__":
    sys.exit(main())
