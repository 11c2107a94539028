"""`study virtual`: one rank of N under one strategy or all of them, extrapolated over layers where it does not fit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

from study.errors import CannotBeHeld, Unsupported
from study.records import write_json
from study.sweep.box import Box, this_box
from study.sweep.lock import only_sweep
from study.sweep.plan import Cell
from study.virtual import show
from study.virtual.execute import VirtualRunFailed, run_rank
from study.virtual.request import Request, add_arguments, base_model, read_request
from study.virtual_figures import extrapolate, summary_of

__all__ = ["add_arguments", "run"]
EPILOG = """\
One process, through the real Accelerate and the real engine, on PyTorch's fake process group: what the rank holds and
sends is real, what it receives is not, so there are no losses. Any flag of study/train.py may be added. The plain
command behind it: accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 1 study/train.py
--virtual_world_size 64
"""


@dataclasses.dataclass(frozen=True)
class _Study:
    request: Request
    box: Box

    def figures(self, strategy: str) -> dict[str, Any]:
        """Of the whole model where this box holds it, else of the line over three depths."""
        cell = self.request.cell(strategy, self.box)
        if self.request.depths:
            return self.extrapolated(cell, self.request.depths)
        try:
            return self.measured(cell)
        except CannotBeHeld as refusal:
            depths = _depths_up_to(refusal.layers_that_fit)
            if depths is None:
                raise
            _say(f"{refusal.problem}: extrapolating over {depths[0]}, {depths[1]} and {depths[2]} layers")
            return self.extrapolated(cell, depths)
        except VirtualRunFailed as failure:
            if failure.state != "oom" or not self.box.gpus:
                raise
            _say(f"{cell.config.model_name_or_path} does not fit on the device: extrapolating over 2, 4 and 6 layers")
            return self.extrapolated(cell, (2, 4, 6))

    def measured(self, cell: Cell) -> dict[str, Any]:
        return summary_of(self.run(cell))

    def extrapolated(self, cell: Cell, depths: tuple[int, int, int]) -> dict[str, Any]:
        base, said = base_model(cell.config)
        cells = [self.request.cell(cell.strategy, self.box, f"{base}-{depth}layers") for depth in depths]
        runs = [self.run(one) for one in cells]
        layers = int(said) if said else runs[0].engine["preset_layers"]
        summary = extrapolate([summary_of(run) for run in runs], depths, layers)
        summary["model_name_or_path"] = cell.config.model_name_or_path
        folder = self.request.runs_dir / "extrapolated"
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{cell.id}.json", summary)
        return summary

    def run(self, cell: Cell) -> Any:
        started = time.monotonic()
        run = run_rank(cell, self.request.runs_dir)
        _say(f"{cell.strategy}, {cell.config.model_name_or_path}: {time.monotonic() - started:.0f} s -> {run.path}")
        return run


def run(options: argparse.Namespace) -> int:
    request = read_request(options)
    study = _Study(request, this_box())
    # Whatever is wrong with the request is found before the first of several runs.
    for strategy in request.strategies:
        request.cell(strategy, study.box)
    summaries, failed = [], []
    with only_sweep(request.runs_dir):
        for strategy in request.strategies:
            try:
                summaries.append(study.figures(strategy))
            except VirtualRunFailed as failure:
                hint = f" ({failure.hint})" if failure.hint else ""
                _say(f"{strategy}: {failure.state}: {failure.reason}{hint}")
                failed.append({"strategy": strategy, "state": failure.state, "reason": failure.reason})
            except Unsupported as refusal:
                if len(request.strategies) == 1:
                    raise
                # What this box lacks for one strategy is no reason to leave the others out.
                _say(f"{strategy}: unsupported: {refusal.problem}. To mend it: {refusal.mend}.")
                failed.append({"strategy": strategy, "state": "unsupported", "reason": refusal.problem})
    _print(request, summaries, failed, options.json)
    return 1 if failed else 0


def _print(request: Request, summaries: list[dict[str, Any]], failed: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        one = len(request.strategies) == 1
        document = (summaries + failed)[0] if one else {"runs": summaries, "failed": failed}
        print(json.dumps(document, indent=2))
        return
    for summary in summaries:
        print("\n".join(show.describe(summary)), end="\n\n")
    if len(summaries) > 1:
        print("\n".join(show.table(summaries)), end="\n\n")
    if summaries:
        print("GB are 1e9 bytes, GiB 2**30. Losses of a virtual rank mean nothing and are not kept.")


def _depths_up_to(layers: int) -> tuple[int, int, int] | None:
    return next((depths for depths in ((2, 4, 6), (2, 3, 4), (1, 2, 3)) if depths[2] <= layers), None)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
