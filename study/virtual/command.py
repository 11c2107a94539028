"""`study virtual`: one rank of N under one strategy or several; a line over layers where the model does not fit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from study.errors import CannotBeHeld, Unsupported, UserError
from study.launch.cell import Cell
from study.launch.lock import only_sweep
from study.launch.run import run_cell
from study.models.presets import find_preset
from study.record.directory import read_run, write_json
from study.record.folder import take_folder
from study.record.outcome import Ending
from study.virtual import show
from study.virtual.lines import extrapolate
from study.virtual.request import Request, add_arguments, preset_of, read_request
from study.virtual.summary import RankSummary

__all__ = ["add_arguments", "run"]
EPILOG = """\
One process runs the real Accelerate and the real engine on PyTorch's fake process group. What the rank holds and sends
is real. What it receives is not, so there are no losses. Flags of study/train.py may be added, but for those of
evaluations, checkpoints and profiles. The plain command behind it: accelerate launch --config_file
accelerate_configs/zero3.yaml --num_processes 1 study/train.py --virtual_world_size 64
Unless asked otherwise it takes one sample of 16 tokens, on which peaks depend, and state and bytes do not.
"""
# For a model too large for this box: the first that fits.
_DEPTHS = ((2, 4, 6), (2, 3, 4), (1, 2, 3))


class VirtualRunFailed(Exception):
    """A rank that started and did not finish."""

    def __init__(self, ending: Ending):
        self.ending = ending
        super().__init__(f"{ending.state}: {ending.reason}")


def run(options: argparse.Namespace) -> int:
    request = read_request(options)
    summaries: list[RankSummary] = []
    failed: list[dict[str, str]] = []
    state: str
    with only_sweep(request.runs_dir):
        for strategy in request.strategies:
            try:
                summaries.append(_summary(request, strategy))
                continue
            except VirtualRunFailed as failure:
                state, reason = failure.ending.state, failure.ending.reason
                said = f"{state}: {failure.ending.why}"
            except UserError as refusal:
                if len(request.strategies) == 1:
                    raise
                # What is wrong with one strategy is no reason to leave the others out.
                state = "unsupported" if isinstance(refusal, Unsupported) else "refused"
                reason, said = refusal.problem, f"{state}: {refusal.problem}. To fix it: {refusal.fix}."
            except KeyboardInterrupt:
                state, reason = "interrupted", "stopped from the keyboard"
                said = f"{reason}; nothing of it runs on"
            _say(f"{strategy}: {said}")
            failed.append({"strategy": strategy, "state": state, "reason": reason})
            if state == "interrupted":
                break
    if options.json:
        runs = [summary.document() for summary in summaries]
        one = len(request.strategies) == 1
        print(json.dumps((runs + failed)[0] if one else {"runs": runs, "failed": failed}, indent=2))
    elif summaries:
        print("\n".join(show.page(summaries)))
    return 1 if failed else 0


def _summary(request: Request, strategy: str) -> RankSummary:
    """Of the whole model where this box holds it, else of a line over three depths."""
    cell = request.cell(strategy)
    if request.depths:
        return _kept(request, cell, _line(request, cell, request.depths))
    error: Exception
    try:
        return _measured(request, cell)
    except CannotBeHeld as refusal:
        largest = refusal.layers_that_fit
        error, ended = refusal, {"state": "unsupported", "reason": refusal.problem}
    except VirtualRunFailed as failure:
        if failure.ending.state != "oom" or not request.box.gpus:
            raise
        # How many layers the GPU holds is not known, so the smallest depths are tried first.
        preset = find_preset(cell.config.model_name_or_path)
        largest = preset.layers - 1 if preset else 0
        error, ended = failure, {"state": failure.ending.state, "reason": failure.ending.reason}
    depths = next((depths for depths in _DEPTHS if depths[2] <= largest), None)
    if depths is None:
        raise error
    _say(f"{ended['reason']}: extrapolating over {depths[0]}, {depths[1]} and {depths[2]} layers")
    return _kept(request, cell, _straighter(request, cell, _line(request, cell, depths, ended), largest))


def _straighter(request: Request, cell: Cell, summary: RankSummary, largest: int) -> RankSummary:
    """Where thresholds lie between the depths and the model, over deeper ones if they fit."""
    how = summary.extrapolated
    assert how is not None
    beyond = {name: at for name, at in how.depths_beyond.items() if at + 2 <= largest}
    if not beyond:
        return summary
    start, crossed = max(beyond.values()), " and ".join(beyond)
    _say(f"{crossed} between {how.depths[0]} layers and the model: again over {start} to {start + 2} layers")
    try:
        deeper = _line(request, cell, (start, start + 1, start + 2), how.whole_model)
    except (VirtualRunFailed, CannotBeHeld) as failure:
        _say(f"{failure}: keeping the line over {how.depths[0]} to {how.checked_at_depth} layers")
        return summary
    return min(deeper, summary, key=lambda one: len(one.not_linear))


def _line(
    request: Request, cell: Cell, depths: tuple[int, int, int], ended: dict[str, str] | None = None
) -> RankSummary:
    preset = preset_of(cell)
    _folder_of_lines(request)
    cells = [request.cell(cell.strategy, preset.with_layers(depth).name) for depth in depths]
    summaries = [_measured(request, one) for one in cells]
    return extrapolate(summaries, cell.config.model_name_or_path, preset.layers, ended)


def _kept(request: Request, cell: Cell, summary: RankSummary) -> RankSummary:
    write_json(_folder_of_lines(request) / f"{cell.id}.json", summary.document())
    return summary


def _folder_of_lines(request: Request) -> Path:
    """Asked for before the runs: without it their line would be lost."""
    folder = request.runs_dir / "extrapolated"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be a folder ({error.strerror})", "move it away, or name another --runs-dir"
        ) from None
    return folder


def _measured(request: Request, cell: Cell) -> RankSummary:
    """One virtual rank, run anew; raises UserError where it is refused."""
    directory = request.runs_dir / cell.id
    ended = run_cell(cell, request.runs_dir)
    if ended.refusal is not None:
        raise ended.refusal
    with take_folder(directory, str(directory)):
        ended.write_end(directory)
    if ended.stopped_by == "user":
        raise KeyboardInterrupt
    if ended.ending.state == "oom":
        raise VirtualRunFailed(dataclasses.replace(ended.ending, hint="extrapolate over layers: --layers-fit A,B,C"))
    if ended.ending.state != "ok":
        raise VirtualRunFailed(ended.ending)
    _say(f"{cell.strategy}, {cell.config.model_name_or_path}: {ended.wall_s:.0f} s -> {directory}")
    return RankSummary.of_run(read_run(directory))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
