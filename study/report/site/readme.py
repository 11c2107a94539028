"""The tables of README.md and docs/, generated from the records in git, and what is advised for some boxes.

python -m study.report.site.readme            rewrites them
python -m study.report.site.readme --check    exit status 1 when one is stale
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

import pandas as pd

from study.advisor.advise import advise
from study.advisor.advise_command import add_arguments, question_of
from study.config.strategies import REPOSITORY, STUDIED_STRATEGIES
from study.host.memory import GIB, MIB
from study.predictor.time import device_bytes
from study.records.frames import Records, only_virtual, read_parquet
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.report.document import table_markdown
from study.report.questions.virtual import state_by_stage
from study.virtual.records import ring_bytes_of, table1_rows

_BLOCK = re.compile(r"(<!-- table: (?P<folder>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_ADVICE = re.compile(r"(<!-- advice -->\n).*?(<!-- end of advice -->)", re.DOTALL)
_ASKED = (
    ("bert-large-uncased", "T4"), ("gpt2-xl", "RTX4090"), ("gemma-2-9b", "4xRTX4090"), ("gemma-2-9b", "8xH100"),
    ("llama-3.1-8b", "4xA100"), ("llama-3.1-70b", "8xH100"),
)  # fmt: skip
_PLACES = {"device": "on the device, MiB", "host": "on the host", "nvme": "on NVMe"}
# The documents that hold such a table.
DOCUMENTS = ("README.md", "docs/method.md")


def table(records: Records) -> str:
    """Return the table of a report: of virtual ranks next to the paper, of real runs by strategy."""
    return table_markdown(
        state_by_stage(table1_rows(records)) if only_virtual(records) else strategy_table(records.runs)
    )


def strategy_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one line per strategy: GPT's loss, and model state by memory, ring bytes and time of one rank.

    It is the first run with the lowest seed: a strategy that ran with more of them shows nothing else here.
    """
    lines = []
    for strategy in STUDIED_STRATEGIES:
        mine = runs[(runs["strategy"] == strategy) & (runs["task"] == "gpt-wikitext")].sort_values(["seed", "run"])
        line = {"strategy": f"`{strategy}`", "ranks": "no record"}
        if not mine.empty:
            run = mine.iloc[0]
            state = {place: sum(run[f"{kind}_bytes_{place}"] for kind in STATE_KINDS) for place in STATE_PLACES}
            outcome = "" if run["status_state"] == "ok" else f" ({run['status_state']})"
            line |= {
                "ranks": f"{run['world_size']:.0f}",
                "eval loss": _number(run["eval_loss_final"], 4) + outcome,
                **{_PLACES[place]: _number(size or math.nan, 1, MIB) for place, size in state.items()},
                "ring bytes (NCCL) per step, MiB": _number(ring_bytes_of(run["collectives"]), 1, MIB),
                "step, ms": _number(run["step_time_s_median"], 0, 1e-3),
            }
        lines.append(line)
    return pd.DataFrame(lines).astype(object)


def _number(value: float, digits: int, unit: float = 1) -> str:
    return "-" if pd.isna(value) else f"{value / unit:,.{digits}f}"


def advice_table() -> str:
    """Return the default advice for several models and boxes."""
    parser, lines = argparse.ArgumentParser(), []
    add_arguments(parser)
    for model, hardware in _ASKED:
        options = parser.parse_args(["--model_name_or_path", model, "--hardware", hardware])
        best = advise(question_of(options)).best
        assert best is not None
        host, upper = best.memory.host_peak.value, device_bytes(best.memory, at_upper_end=True)
        lines.append({
            "model": f"`{model}`", "box": f"`{hardware}`", "take": f"`{best.name}`",
            "micro-batch": f"{best.request.micro_batch}", "accumulation": f"{best.request.accumulation}",
            "checkpointing": "yes" if best.request.gradient_checkpointing else "no",
            "peak of a GPU, GiB": f"{_number(device_bytes(best.memory), 1, GIB)} (to {_number(upper, 0, GIB)})",
            "host, GiB": _number(host, 0, GIB), "tokens/s": _number(best.tokens_per_s, 0),
        })  # fmt: skip
    return table_markdown(pd.DataFrame(lines))


def rewritten(text: str, root: Path) -> str:
    """The text with every marked table made anew, of records from the folder its marker names."""

    def fill(match: re.Match[str]) -> str:
        return match.group(1) + "\n" + table(read_parquet(root / match["folder"])) + "\n" + match.group(3)

    text = _BLOCK.sub(fill, text)
    return _ADVICE.sub(lambda match: f"{match[1]}\n{advice_table()}\n{match[2]}", text)


def main() -> int:
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
