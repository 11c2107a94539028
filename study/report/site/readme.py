"""The README's tables, generated from the records in git.

python -m study.report.site.readme            rewrites it
python -m study.report.site.readme --check    exit status 1 when it is stale
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pandas as pd

from study.report.questions.virtual_tables import GB, Summary, state_bytes, table1_rows
from study.report.records.frames import Records, only_virtual, read_parquet
from study.spec.strategies import REPOSITORY, STRATEGY_NAMES

MIB = 2**20
_BLOCK = re.compile(r"(<!-- table: (?P<folder>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_HEADINGS = (
    "strategy", "ranks", "eval loss, BERT", "eval loss, GPT", "parameters MiB", "gradients MiB", "optimizer MiB",
    "sent per step MiB", "step ms", "outcome",
)  # fmt: skip


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
    """One line per strategy; state, traffic and time are those of GPT on one rank."""
    lines = [f"| {' | '.join(_HEADINGS)} |", f"|{' --- |' * len(_HEADINGS)}"]
    for strategy in STRATEGY_NAMES:
        arm = runs[runs["strategy"] == strategy]
        gpt, bert = (_one(arm[arm["task"] == task]) for task in ("gpt-wikitext", "bert-imdb"))
        if gpt is None or bert is None:
            lines.append(f"| `{strategy}` |{' |' * (len(_HEADINGS) - 2)} no record |")
            continue
        cells = [
            f"`{strategy}`", f"{gpt['world_size']:.0f}", _number(bert["eval_loss_final"], 4),
            _number(gpt["eval_loss_final"], 4), *(_state(gpt, kind) for kind in ("params", "grads", "optimizer")),
            _number(gpt["comm_bytes_per_step"], 1, MIB), _number(gpt["step_time_s_median"], 0, 1e-3),
            gpt["status_state"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _one(rows: pd.DataFrame) -> pd.Series | None:
    return None if rows.empty else rows.sort_values("run").iloc[0]


def _state(run: pd.Series, kind: str) -> str:
    held = {place: run[f"{kind}_bytes_{place}"] for place in ("device", "host", "nvme")}
    parts = [
        _number(size, 1, MIB) + ("" if place == "device" else f" {place}") for place, size in held.items() if size > 0
    ]
    return " + ".join(parts) or "-"


def _number(value: float, digits: int, unit: float = 1) -> str:
    return "-" if pd.isna(value) else f"{value / unit:,.{digits}f}"


def rewritten(text: str, root: Path) -> str:
    """The text with every marked table made anew from the folder its marker names."""

    def fill(match: re.Match[str]) -> str:
        return match.group(1) + "\n" + table(read_parquet(root / match["folder"])) + "\n" + match.group(3)

    return _BLOCK.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when the table is stale")
    options = parser.parse_args()
    readme = REPOSITORY / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = rewritten(before, REPOSITORY)
    if options.check:
        if before != after:
            print("README.md is stale: run `make readme`", file=sys.stderr)
        return int(before != after)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
