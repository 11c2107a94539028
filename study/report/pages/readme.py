"""The marked blocks of README.md and docs/: tables of the records in git, and output of `study advise`.

python -m study.report.pages.readme            rewrites them
python -m study.report.pages.readme --check    exit status 1 when one is stale
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from study.advisor import advise_command
from study.config.places import REPOSITORY
from study.host.stacks import release_key
from study.records.frames import read_parquet
from study.releases.causes import PACKAGES, Cause, known_faults
from study.releases.command import LATEST_RELEASES, NOT_RUN, shown_causes
from study.releases.release_cells import ReleaseCell, release_cells
from study.report.document import table_markdown
from study.report.pages.prediction import LEAGUE, headline, read
from study.report.questions.releases import clipped, lettered
from study.report.questions.virtual import state_by_stage
from study.virtual.summaries import table1_rows

# A block names its source: `<!-- releases: reports/releases -->` up to `<!-- end of releases -->`.
_BLOCK = re.compile(r"(<!-- (?P<name>\w+): (?P<source>[^>]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)
_HELD_OUT = ("peak memory, published", "step time, published, rows that fitted nothing",
             "step time, published, offload: no interval")  # fmt: skip
# The lines of the answer and of the strategies without offload.
_ADVISE_LINES = 11
# Documents with marked blocks.
DOCUMENTS = ("README.md", "docs/method.md")


def latest_release_cells(cells: list[ReleaseCell], count: int = LATEST_RELEASES) -> list[ReleaseCell]:
    """Return the fp32 cells of DeepSpeed in the latest tested releases with the study's other packages; 0: in all."""
    today = [
        cell for cell in clipped(cells)
        if cell.precision == "fp32" and not cell.is_contemporary and cell.strategy != "ddp"
    ]  # fmt: skip
    latest = sorted({cell.release for cell in today}, key=release_key)[-count:]
    return [cell for cell in today if cell.release in latest]


def gpu_faults(cell: ReleaseCell) -> list[Cause]:
    """Return the faults of a cell that a GPU shows too; those by source if its CPU run crashes from another fault."""
    faults = cell.causes
    if cell.verdict.kind == "crashes":
        candidates = known_faults(cell.versions, on_gpu=True)
        faults = tuple(cause for cause in candidates if cause.shows_in(cell.strategy, cell.micro_steps, cell.precision))
    return [cause for cause in faults if cause.gpu != "hidden"]


def _by_source(cell: ReleaseCell) -> str:
    return "\N{DAGGER}" * (cell.verdict.kind == "crashes")


def muon_faults(cells: list[ReleaseCell], letters: dict[Cause, str]) -> dict[str, str]:
    """Return the faults of Muon by release, the newest first."""
    muon = [cell for cell in cells if cell.optimizer == "muon"]
    result = {}
    for release in sorted({cell.release for cell in muon}, key=release_key, reverse=True):
        struck: dict[str, dict[str, None]] = {}
        for cell in muon:
            if cell.release == release and cell.verdict.kind != "equal":
                sign = "".join(letters[cause] for cause in cell.causes) or "?"
                struck.setdefault(sign, {})[f"`{cell.strategy}`"] = None
        result[release] = "; ".join(f"{sign}: {', '.join(names)}" for sign, names in struck.items()) or "no fault"
    return result


def releases_document(folder: Path) -> dict[str, Any]:
    """Return what `study releases` prints: tested releases with the faults expected on a GPU, the newest first."""
    records = read_parquet(folder)
    cells = release_cells(records)
    tested, letters = latest_release_cells(cells, 0), lettered()
    lines = []
    for release in sorted({cell.release for cell in tested}, key=release_key, reverse=True):
        line = {"DeepSpeed": release}
        for column, several in (("no accumulation", False), ("accumulation", True)):
            column_cells = [cell for cell in tested if cell.release == release and (cell.micro_steps > 1) == several]
            struck: dict[str, list[str]] = {}
            for cell in column_cells:
                is_known = cell.causes or cell.verdict.kind in ("equal", "different")
                if not is_known:
                    struck.setdefault(NOT_RUN, []).append(f"`{cell.strategy}`")
                for cause in gpu_faults(cell) if is_known else ():
                    struck.setdefault(letters[cause], []).append(f"`{cell.strategy}`{_by_source(cell)}")
            faults = [f"{letter}: {', '.join(names)}" for letter, names in struck.items()]
            if column_cells and len(struck.get(NOT_RUN, ())) == len(column_cells):
                faults = [NOT_RUN]
            line[column] = "; ".join(faults) or f"no fault{max(map(_by_source, column_cells))}"
        lines.append(line)
    runs = records.runs[records.runs["run"].isin({run for cell in latest_release_cells(cells) for run in cell.runs})]
    started = runs["status_started_at"].dropna().str[:10]
    versions = {name: cell.versions[name] for cell in latest_release_cells(cells) for name in PACKAGES[1:]}
    return {
        "tested": f"Tested {' to '.join(dict.fromkeys((started.min(), started.max())))} on two CPU ranks in fp32 with "
        f"gradient clipping; {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}",
        "versions": versions, "letters": {cause.id: letter for cause, letter in letters.items()}, "releases": lines,
        "muon": muon_faults(cells, letters),
    }  # fmt: skip


def releases_table(folder: Path) -> str:
    """Return the latest releases with the faults expected on a GPU, then one line per fault with its fix."""
    document = releases_document(folder)
    latest = document["releases"][:LATEST_RELEASES]
    fixes = [
        f"- {letter}: {cause.title}; fixed in {cause.left.release} by"
        f" [#{cause.left.change.rpartition('/')[2]}]({cause.left.change})"
        for letter, cause in shown_causes(document, latest)
    ]
    return "\n".join([table_markdown(pd.DataFrame(latest)), *fixes, f"- {document['tested']}"])


def advise_output(model: str, hardware: str) -> str:
    """Return the first lines that `study advise` prints."""
    parser, out = argparse.ArgumentParser(), io.StringIO()
    advise_command.add_arguments(parser)
    arguments = ["--model_name_or_path", model, "--hardware", hardware]
    with contextlib.redirect_stdout(out):
        advise_command.run(parser.parse_args(arguments))
    lines = out.getvalue().splitlines()[:_ADVISE_LINES]
    return "\n".join(["```", f"$ study advise {' '.join(arguments)}", *lines, "...", "```"])


def errors_table(folder: Path) -> str:
    """Return the errors of each estimator of peak memory against published measurements, and those of step times."""
    league = pd.read_parquet(folder / LEAGUE)
    rows = league[league["rows"] == "published"]
    table = pd.DataFrame({
        "peak memory of GPU runs that others published": rows["tool"].map("`{}`".format), "runs": rows["peaks"],
        "median error": rows["median_error"].map("{:.0%}".format), "worst": rows["worst_error"].map("{:.0%}".format),
        "OOMs foreseen": rows["called"].astype(str) + " of " + rows["ran_out"].astype(str),
        "OOMs predicted of runs that fit": (
            (rows["judged"] - rows["right"] - rows["ran_out"] + rows["called"]).astype(str)
            + " of " + (rows["judged"] - rows["ran_out"]).astype(str)
        ),
    })  # fmt: skip
    errors = headline(read(folder)).set_index("figure")
    peaks, steps, offload = (errors.loc[name] for name in _HELD_OUT)
    short = "short" if offload["leans"].startswith("-") else "long"
    return (
        f"{table_markdown(table)}\n"
        f"Held out, by `study predict`: median error {peaks['median error']} of peak memory over the {peaks['rows']} of"
        f" these runs not used to tune it, and {steps['median error']} of step time (worst {steps['worst']}) over"
        f" {steps['rows']} runs not used to fit it. Offload steps are predicted too {short}: median error"
        f" {offload['median error']} over {offload['rows']} runs."
    )


_BLOCKS: dict[str, Callable[[str, Path], str]] = {
    "table": lambda folder, root: table_markdown(state_by_stage(table1_rows(read_parquet(root / folder)))),
    "releases": lambda folder, root: releases_table(root / folder),
    "errors": lambda folder, root: errors_table(root / folder),
    "advise": lambda arguments, _root: advise_output(*arguments.split()),
}


def rewritten(text: str, root: Path) -> str:
    """Return the text with every marked block regenerated from the folder that its marker names."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_BLOCKS[match['name']](match['source'], root)}\n{match[4]}", text)


def main() -> int:
    """Rewrite the blocks; return 1 if `--check` finds a stale one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when a table is stale")
    options = parser.parse_args()
    stale = 0
    for name in DOCUMENTS:
        document = REPOSITORY / name
        before = document.read_text(encoding="utf-8")
        after = rewritten(before, REPOSITORY)
        if before == after:
            continue
        stale = 1
        if options.check:
            print(f"{name} is stale: run `make readme`", file=sys.stderr)
        else:
            document.write_text(after, encoding="utf-8")
    return stale if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
