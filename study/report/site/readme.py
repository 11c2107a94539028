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
from study.report.questions.table1 import state_beside_paper
from study.report.site.page import table_markdown
from study.virtual.records import sent_bytes, table1_rows

_BLOCK = re.compile(r"(<!-- table: (?P<folder>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_ADVICE = re.compile(r"(<!-- advice -->\n).*?(<!-- end of advice -->)", re.DOTALL)
_ASKED = (
    ("bert-large-uncased", "T4"), ("gpt2-xl", "RTX4090"), ("gemma-2-9b", "4xRTX4090"), ("gemma-2-9b", "8xH100"),
    ("llama-3.1-8b", "4xA100"), ("llama-3.1-70b", "8xH100"),
)  # fmt: skip
_PLACES = {"device": "on the device, MiB", "host": "on the host", "nvme": "on NVMe"}
# The documents that hold such a table.
DOCUMENTS = ("README.md", "docs/virtual-ranks.md")


def table(records: Records) -> str:
    frame = state_beside_paper(table1_rows(records)) if only_virtual(records) else arms_table(records.runs)
    return table_markdown(frame)


def arms_table(runs: pd.DataFrame) -> pd.DataFrame:
    """One line per strategy: GPT's loss, model state by place, ring bytes, and time, on one rank.

    Of the first run with the lowest seed: a strategy that ran with more of them shows nothing else here.
    """
    lines = []
    for strategy in STUDIED_STRATEGIES:
        arm = runs[(runs["strategy"] == strategy) & (runs["task"] == "gpt-wikitext")].sort_values(["seed", "run"])
        lines.append({"strategy": f"`{strategy}`", **({"ranks": "no record"} if arm.empty else _cells(arm.iloc[0]))})
    return pd.DataFrame(lines).astype(object)


def _cells(run: pd.Series) -> dict[str, str]:
    held = {place: sum(run[f"{kind}_bytes_{place}"] for kind in STATE_KINDS) for place in STATE_PLACES}
    outcome = "" if run["status_state"] == "ok" else f" ({run['status_state']})"
    return {
        "ranks": f"{run['world_size']:.0f}",
        "eval loss": _number(run["eval_loss_final"], 4) + outcome,
        **{_PLACES[place]: _number(size or math.nan, 1, MIB) for place, size in held.items()},
        "ring bytes (NCCL) per step, MiB": _number(sent_bytes(run["collectives"]), 1, MIB),
        "step, ms": _number(run["step_time_s_median"], 0, 1e-3),
    }


def _number(value: float, digits: int, unit: float = 1) -> str:
    return "-" if pd.isna(value) else f"{value / unit:,.{digits}f}"


def advice_table() -> str:
    """What `study advise` takes where it is asked nothing but a model and a box."""
    parser, lines = argparse.ArgumentParser(), []
    add_arguments(parser)
    for model, hardware in _ASKED:
        options = parser.parse_args(["--model_name_or_path", model, "--hardware", hardware])
        best = advise(question_of(options)).best
        assert best is not None
        host, upper = best.memory.host_peak.value, device_bytes(best.memory, at_upper_end=True)
        lines.append({
            "model": f"`{model}`", "box": f"`{hardware}`", "take": f"`{best.name}`",
            "samples of a rank": best.batches,
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
