"""The bare control on the page of releases: which of its callers come to what a plain loop does, by stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from study.host.stacks import release_order
from study.releases.bare import INSTALLED, is_right
from study.report.site.page import table_markdown

NOT_RUN = "\N{MIDDLE DOT}"
Row = Mapping[str, Any]
Asked = Sequence[tuple[str, int]]
_ONE: Asked = [("bare", 4), ("boundary", 4), ("accelerate", 4)]
_SEVERAL_ASKED: Asked = [
    ("bare-losses", 1), ("bare-losses", 4), ("bare-forwards", 1), ("boundary-forwards", 1), ("accelerate-forwards", 1),
]  # fmt: skip
_CONTROL = """## The bare control

A small model on two ranks, four micro-steps in a step, without this project's trainer: `deepspeed.initialize` with a
step after each backward pass / the same with one step at the boundary, as Accelerate asks for it / through the stack's
own Accelerate. `=` is right, `!` wrong, `x` an error.
"""
_SEVERAL = """## Several backward passes in a step

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
  `deepspeed/runtime/zero/parameter_offload.py`, lines 461-463). A second one finds none, there or on a GPU, and ends in
  an error about sizes.
- Accelerate steps the engine in every `backward` (accelerate 1.15.0, `accelerate/utils/deepspeed.py`, lines 264-281;
  https://github.com/huggingface/accelerate/issues/2951): two losses are two steps in every release, and this study's
  runs, which go through it, cannot ask for anything else. Add the losses up, and go backward once.
"""


def control(rows: Sequence[Row]) -> str:
    """Markdown; empty where the control was not run."""
    told = [row for row in rows if row.get("precision") == "fp32" and row.get("clipping")]
    one = [row for row in told if row["loss"] == "inside"]
    several = [row for row in told if "-" in row["caller"]]
    parts = ((_CONTROL, one, _ONE), (_SEVERAL, several, _SEVERAL_ASKED))
    return "\n".join(f"{head}\n{_table(mine, asked)}" for head, mine, asked in parts if mine)


def _table(rows: Sequence[Row], asked: Asked) -> str:
    """A line for each stack; in each cell a sign for each caller and number of micro-steps that is asked for."""
    signs = {(row["stack"], row["strategy"], row["caller"], row["accumulation"]): _sign(row) for row in rows}
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    stacks = sorted({row["stack"] for row in rows}, key=lambda name: (name == INSTALLED, release_order(name), name))
    lines = [
        {"Stack": stack, **{
            f"`{name}`": " / ".join(signs.get((stack, name, *each), NOT_RUN) for each in asked) for name in strategies}}
        for stack in stacks
    ]  # fmt: skip
    return table_markdown(pd.DataFrame(lines))


def _sign(row: Row) -> str:
    return {True: "=", False: "!", None: "x"}[is_right(row)]
