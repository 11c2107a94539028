"""Calls of study.compositions into engines in a run of a combination: `python -m tests.probes.engine_calls FOLDER`.

Two combinations with equal calls and equal arguments train alike: a feature without a difference is a name alone.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from study.compositions.features import Combination, make_combination
from study.compositions.forks import answer_requests, run_ranks

_STUDY = "/study/compositions/"
_ENGINE = re.compile(r"/(?:site|dist)-packages/(deepspeed|accelerate|torch|transformers|peft)/")
# A step before the checkpoint of `resume`, and one after it.
_STEPS, _RESUMED_AFTER = 2, 1
# Configurations are nested four times.
_DEEPEST = 6


def serve(folder: Path) -> None:
    """Answer requests until standard input closes."""
    answer_requests(lambda request: _calls(make_combination(request["features"]), folder / "run"))


def _calls(combination: Combination, folder: Path) -> dict[str, Any]:
    failure = run_ranks(_record_rank, combination, folder)
    calls = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("calls-*.json"))}
    return {"calls": calls, "failure": failure}


def _record_rank(combination: Combination, rank: int, folder: Path) -> None:
    """Train as `run_rank` does, without reading figures: how they are read depends on features, too."""
    from study.compositions import tiny_model
    from study.compositions.engines import make_loop

    tiny_model.STEPS, tiny_model.RESUMED_AFTER = _STEPS, _RESUMED_AFTER
    recorder = CallRecorder()
    sys.setprofile(recorder)
    try:
        loop: Any = make_loop(combination, rank, folder)
        loop.notes_figures = False
        loop.read = lambda kind: {}
        loop.train()
    finally:
        sys.setprofile(None)
        (folder / f"calls-{rank}.json").write_text(json.dumps(recorder.calls), encoding="utf-8")


class CallRecorder:
    """A profile function that counts the calls, by function and arguments."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or _STUDY not in caller.f_code.co_filename:
            return
        if _ENGINE.search(frame.f_code.co_filename) is not None:
            arguments = ", ".join(f"{name}={_describe(value)}" for name, value in frame.f_locals.items())
            self.calls[f"{frame.f_code.co_qualname}({arguments})"] += 1


def _describe(value: Any, depth: int = 0) -> str:
    """Return what an engine can see of an argument: no address, and no element of a tensor."""
    import torch

    if depth > _DEEPEST:
        return "..."
    if isinstance(value, torch.Tensor):
        parts = [str(tuple(value.shape)), str(value.dtype), "trained" * value.requires_grad]
        return f"tensor({', '.join([*parts, 'partition' * hasattr(value, 'ds_id')])})"
    # Its own __init__ is called without parameters.
    if isinstance(value, torch.nn.Module) and "_parameters" in vars(value):
        weights = ", ".join(f"{name}: {_describe(weight)}" for name, weight in value.named_parameters())
        return f"{type(value).__name__}({weights})"
    if isinstance(value, (str, bool, int, type(None), torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, float):
        # A norm or a loss differs in its last place from run to run.
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_describe(item, depth + 1)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_describe(item, depth + 1) for item in value) + "]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}{_describe(vars(value), depth + 1)}"
    if isinstance(value, (type, FunctionType)):
        return value.__qualname__
    return type(value).__name__


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
