"""The tables of README.md and docs/, generated from the records in git.

python -m study.report.site.readme            rewrites them
python -m study.report.site.readme --check    exit status 1 when one is stale
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import pandas as pd

from study.record.schema import STATE_KINDS, STATE_PLACES
from study.report.questions.virtual_tables import GB, Summary, state_bytes, table1_rows
from study.report.records.frames import Records, only_virtual, read_parquet
from study.spec.strategies import REPOSITORY, STRATEGY_NAMES

MIB = 2**20
_BLOCK = re.compile(r"(<!-- table: (?P<folder>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_HEADINGS = (
    "strategy", "ranks", "eval loss", "on the device, MiB", "on the host", "on NVMe", "sent per step, MiB", "step, ms",
)  # fmt: skip
# The documents that hold such a table.
DOCUMENTS = ("README.md", "docs/virtual-ranks.md")


def table(records: Records) -> str:
    return table1(records) if only_virtual(records) else arms_table(records.runs)


def table1(records: Records) -> str:
    """One line per model and number of ranks: GB of model state per stage, and in brackets what the paper says."""
    rows = {(one["model"], one["world_size"], one["strategy"]): one for one in table1_rows(records)}
    places = dict.fromkeys((model, world) for model, world, _ in rows)
    lines = ["| model | ranks | `zero1`, GB | `zero2`, GB | `zero3`, GB |", "| --- | --- | --- | --- | --- |"]
    for model, world in places:
        cells = [_held(rows.get((model, world, strategy))) for strategy in ("zero1", "zero2", "zero3")]
        lines.append(f"| `{model}` | {world} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _held(one: Summary | None) -> str:
    if one is None:
        return "-"
    about = "" if one["extrapolated"] is None else "~ "
    return f"{about}{state_bytes(one) / GB:.4g} ({one['paper_bytes'] / GB:.4g})"


def arms_table(runs: pd.DataFrame) -> str:
    """One line per strategy: GPT's loss, model state by place, bytes on the wire, and time, on one rank."""
    lines = [f"| {' | '.join(_HEADINGS)} |", f"|{' --- |' * len(_HEADINGS)}"]
    for strategy in STRATEGY_NAMES:
        arm = runs[(runs["strategy"] == strategy) & (runs["task"] == "gpt-wikitext")].sort_values("run")
        cells = ["no record", *[""] * (len(_HEADINGS) - 2)] if arm.empty else _cells(arm.iloc[0])
        lines.append(f"| `{strategy}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(run: pd.Series) -> list[str]:
    held = [sum(run[f"{kind}_bytes_{place}"] for kind in STATE_KINDS) for place in STATE_PLACES]
    collectives = {} if pd.isna(run["collectives"]) else json.loads(run["collectives"])
    sent = sum(one["wire_bytes_per_rank"] for one in collectives.values())
    outcome = "" if run["status_state"] == "ok" else f" ({run['status_state']})"
    return [
        f"{run['world_size']:.0f}", _number(run["eval_loss_final"], 4) + outcome,
        *(_number(size, 1, MIB) if size else "-" for size in held),
        _number(sent, 1, MIB) if collectives else "-", _number(run["step_time_s_median"], 0, 1e-3),
    ]  # fmt: skip


def _number(value: float, digits: int, unit: float = 1) -> str:
    return "-" if pd.isna(value) else f"{value / unit:,.{digits}f}"


def rewritten(text: str, root: Path) -> str:
    """The text with every marked table made anew from the folder its marker names."""

    def fill(match: re.Match[str]) -> str:
        return match.group(1) + "\n" + table(read_parquet(root / match["folder"])) + "\n" + match.group(3)

    return _BLOCK.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
