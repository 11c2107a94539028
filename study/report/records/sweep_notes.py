"""What a sweep noted beside a run: what it was to be, the searches that it answers, and how fast the box is."""

from __future__ import annotations

import json
import re
import shlex
import typing
from pathlib import Path
from typing import Any

from study.errors import UserError
from study.record.directory import read_json
from study.record.schema import RecordError
from study.spec.checks import LARGEST
from study.spec.config import RunConfig, parse_command_line, resolved
from study.spec.strategies import STRATEGY_NAMES
from study.sweep.suite_file import SearchAxis

_STACK = re.compile(r"[\w.-]{1,40}")
_NAMED = re.compile(rf"-({'|'.join(sorted(STRATEGY_NAMES, key=len, reverse=True))})-(\d{{1,6}})x-[0-9a-f]{{8}}")


def planned_cell(path: Path) -> dict[str, Any]:
    """What a run was asked to be, where it ended before it could record that: from sweep.json, else from its name."""
    notes = path / "sweep.json"
    if not notes.is_file():
        found = _NAMED.search(path.name)
        return {"strategy": found[1], "world_size": int(found[2])} if found else {}
    note = read_json(notes)
    kinds: dict[str, type] = {"strategy": str, "world_size": int, "command": list}
    for key, kind in kinds.items():
        if type(note.get(key)) is not kind or (key == "strategy" and note[key] not in STRATEGY_NAMES):
            raise RecordError(notes, f"{key} is {note.get(key)!r}"[:300])
    return {"strategy": note["strategy"], "world_size": note["world_size"], "config": _asked(notes, note["command"])}


def noted_searches(file: Path, noted: Any) -> str | None:
    if noted is None:
        return None
    kinds: dict[str, type] = {"id": str, "axis": str, "place": int, "last": int}
    axes = typing.get_args(SearchAxis)
    for entry in noted if type(noted) is list and noted else [noted]:
        known = type(entry) is dict and all(type(entry.get(key)) is kind for key, kind in kinds.items())
        if not (known and entry["axis"] in axes and 0 <= entry["place"] <= entry["last"]):
            raise RecordError(file, f"searches is {noted!r}"[:300])
    return json.dumps([{key: entry[key] for key in kinds} for entry in noted])


def noted_stack(file: Path, noted: Any) -> str | None:
    if noted is not None and not (type(noted) is str and _STACK.fullmatch(noted)):
        raise RecordError(file, f"stack is {noted!r}"[:300])
    return noted


def matmul_tflops(notes: dict[str, Any], precision: str) -> float | None:
    """None where the sweep could not measure it, or had no GPU to measure."""
    try:
        rate = notes["attempts"][-1]["matmul_rates"]["tflops"][precision.removesuffix("-engine")]
    except (KeyError, IndexError, TypeError):
        return None
    return float(rate) if type(rate) in (int, float) and 0 < rate < LARGEST else None


def _asked(notes: Path, command: list[Any]) -> RunConfig:
    """The flags of study/train.py in a launch command, every default resolved; its --scale is never `auto`."""
    words = [str(word) for word in command]
    if "study/train.py" not in words:
        raise RecordError(notes, f"command is {shlex.join(words)!r}, which launches no run"[:300])
    try:
        flags = words[words.index("study/train.py") + 1 :]
        return resolved(parse_command_line(flags), accelerator_visible=False)
    except UserError as error:
        raise RecordError(notes, f"command: {error.problem}") from None
