"""A metric of the `evaluate` library that writes nothing."""

from __future__ import annotations

import evaluate


class InMemory(evaluate.Metric):
    def __init__(self) -> None:
        super().__init__(keep_in_memory=True)

    def _build_data_dir(self) -> str:
        """The library makes a folder in HF_HOME for what it would keep on disk, also where it keeps nothing there."""
        return ""
