"""`study virtual`: one rank of N under one strategy or several; a line over layers where the model does not fit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from study.errors import CannotBeHeld, Unsupported, UserError
from study.host.box import Box, this_box
from study.launch.cell import Cell
from study.launch.lock import only_sweep
from study.record.directory import write_json
from study.virtual import show
from study.virtual.execute import VirtualRunFailed, run_rank
from study.virtual.lines import extrapolate
from study.virtual.request import Request, add_arguments, base_model, depth_of, read_request
from study.virtual.summary import RankSummary

__all__ = ["add_arguments", "run"]
EPILOG = """\
One process runs the real Accelerate and the real engine on PyTorch's fake process group. What the rank holds and sends
is real. What it receives is not, so there are no losses. Any flag of study/train.py may be added. The plain command
behind it: accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 1 study/train.py
--virtual_world_size 64
"""


# For a model too large for this box: the first that fits.
_DEPTHS = ((2, 4, 6), (2, 3, 4), (1, 2, 3))


@dataclasses.dataclass(frozen=True)
class _Study:
    request: Request
    box: Box

    def summary(self, strategy: str) -> RankSummary:
        """Of the whole model where this box holds it, else of a line over three depths."""
        cell = self.request.cell(strategy, self.box)
        if self.request.depths:
            return self.kept(cell, self.line(cell, self.request.depths))
        error: Exception
        try:
            return self.run(cell)
        except CannotBeHeld as refusal:
            largest = refusal.layers_that_fit
            error, ended = refusal, {"state": "unsupported", "reason": refusal.problem}
        except VirtualRunFailed as failure:
            if failure.state != "oom" or not self.box.gpus:
                raise
            # How many layers the GPU holds is not known, so the smallest depths are tried first.
            largest = (depth_of(cell.config) or 0) - 1
            error, ended = failure, {"state": failure.state, "reason": failure.reason}
        depths = next((depths for depths in _DEPTHS if depths[2] <= largest), None)
        if depths is None:
            raise error
        _say(f"{ended['reason']}: extrapolating over {depths[0]}, {depths[1]} and {depths[2]} layers")
        return self.kept(cell, self.straighter(cell, self.line(cell, depths, ended), largest))

    def straighter(self, cell: Cell, summary: RankSummary, largest: int) -> RankSummary:
        """Where thresholds lie between the depths and the model, over deeper ones if they fit."""
        how = summary.extrapolated
        assert how is not None
        beyond = {name: at for name, at in how.depths_beyond.items() if at + 2 <= largest}
        if not beyond:
            return summary
        start, crossed = max(beyond.values()), " and ".join(beyond)
        _say(f"{crossed} between {how.depths[0]} layers and the model: again over {start} to {start + 2} layers")
        try:
            deeper = self.line(cell, (start, start + 1, start + 2), how.whole_model)
        except (VirtualRunFailed, CannotBeHeld) as failure:
            _say(f"{failure}: keeping the line over {how.depths[0]} to {how.checked_at_depth} layers")
            return summary
        return min(deeper, summary, key=lambda one: len(one.not_linear))

    def line(self, cell: Cell, depths: tuple[int, int, int], ended: dict[str, str] | None = None) -> RankSummary:
        base, layers = base_model(cell.config), depth_of(cell.config)
        assert layers is not None
        _folder_of_lines(self.request.runs_dir)
        cells = [self.request.cell(cell.strategy, self.box, f"{base}-{depth}layers") for depth in depths]
        return extrapolate([self.run(one) for one in cells], cell.config.model_name_or_path, layers, ended)

    def kept(self, cell: Cell, summary: RankSummary) -> RankSummary:
        write_json(_folder_of_lines(self.request.runs_dir) / f"{cell.id}.json", summary.document())
        return summary

    def run(self, cell: Cell) -> RankSummary:
        started = time.monotonic()
        run = run_rank(cell, self.request.runs_dir)
        _say(f"{cell.strategy}, {cell.config.model_name_or_path}: {time.monotonic() - started:.0f} s -> {run.path}")
        return RankSummary.of_run(run)


def run(options: argparse.Namespace) -> int:
    request = read_request(options)
    study = _Study(request, this_box())
    # Whatever is wrong with the request is found before the first of several runs.
    for strategy in request.strategies:
        cell = request.cell(strategy, study.box)
        if request.depths:
            base_model(cell.config)
    summaries: list[RankSummary] = []
    failed: list[dict[str, str]] = []
    with only_sweep(request.runs_dir):
        for strategy in request.strategies:
            try:
                summaries.append(study.summary(strategy))
            except VirtualRunFailed as failure:
                hint = f" ({failure.hint})" if failure.hint else ""
                _say(f"{strategy}: {failure.state}: {failure.reason}{hint}")
                failed.append({"strategy": strategy, "state": failure.state, "reason": failure.reason})
            except UserError as refusal:
                if len(request.strategies) == 1:
                    raise
                # What is wrong with one strategy is no reason to leave the others out.
                state = "unsupported" if isinstance(refusal, Unsupported) else "refused"
                _say(f"{strategy}: {state}: {refusal.problem}. To fix it: {refusal.fix}.")
                failed.append({"strategy": strategy, "state": state, "reason": refusal.problem})
            except KeyboardInterrupt:
                _say(f"{strategy}: stopped from the keyboard; nothing of it runs on")
                failed.append({"strategy": strategy, "state": "interrupted", "reason": "stopped from the keyboard"})
                break
    _print(request, summaries, failed, options.json)
    return 1 if failed else 0


def _folder_of_lines(runs_dir: Path) -> Path:
    """Asked for before the runs: without it their line would be lost."""
    folder = runs_dir / "extrapolated"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be a folder ({error.strerror})", "move it away, or name another --runs-dir"
        ) from None
    return folder


def _print(request: Request, summaries: list[RankSummary], failed: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        runs: list[dict[str, Any]] = [summary.document() for summary in summaries]
        one = len(request.strategies) == 1
        print(json.dumps((runs + failed)[0] if one else {"runs": runs, "failed": failed}, indent=2))
    elif summaries:
        for summary in summaries:
            print("\n".join(show.describe(summary)), end="\n\n")
        if len(summaries) > 1:
            print("\n".join(show.table(summaries)), end="\n\n")
        print(show.LEGEND)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
