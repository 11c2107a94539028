"""Prints what a launched process reads back about its launch, as study/train.py would."""

from __future__ import annotations

import dataclasses
import json
import os

from study.config.launch_context import read_launch

print("PROBE " + json.dumps(dataclasses.asdict(read_launch()) | {"environment": dict(os.environ)}), flush=True)
