"""The files of accelerate_configs/, read and refused where they are none."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import yaml

from study.errors import UserError


def read_yaml(file: Path) -> dict[str, Any]:
    try:
        document = copy.deepcopy(_parsed(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file} is not readable as YAML ({error})", "fix the file") from None
    if not isinstance(document, dict):
        raise UserError(f"{file} is not a mapping", "fix the file")
    return document


@functools.cache
def _parsed(text: str) -> Any:
    """Advice and validation ask for the same few files a thousand times, and YAML is slow to read."""
    return yaml.safe_load(text)


def read_deepspeed_json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} is not there", "run from the repository root, where accelerate_configs/ is") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable as JSON ({error})", "fix the file") from None
    zero = document.get("zero_optimization") if isinstance(document, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if type(stage) is not int or stage not in range(4):
        raise UserError(f"{file} names no ZeRO stage", "set zero_optimization.stage to 0, 1, 2 or 3")
    assert isinstance(zero, dict)
    for what in ("offload_optimizer", "offload_param"):
        section = zero.get(what)
        device = section.get("device") if isinstance(section, dict) else None
        if section is not None and device not in ("none", "cpu", "nvme"):
            raise UserError(
                f"{file}: zero_optimization.{what} names no device", 'write it as {"device": "cpu"}, nvme or none'
            )
    return document
