"""A cell: one run of a study, as a command line can ask for it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Literal

from study.spec.config import RunConfig
from study.spec.strategies import read_strategy

Trainer = Literal["study", "hf_trainer", "bare_loop"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a suite."""

    strategy: str
    world_size: int
    config: RunConfig
    # What the suite says of it, without the defaults of study/train.py.
    asked: RunConfig
    repeat: int
    time_limit_s: float
    # The suite's own estimate, which holds until a record says better.
    expected_s: float | None = None
    trainer: Trainer = "study"

    @functools.cached_property
    def id(self) -> str:
        return f"{self.config.run_id(self.arm, self.ranks)}-r{self.repeat}"

    @property
    def ranks(self) -> int:
        """How many ranks the measured job has; of a virtual one a single process is launched."""
        return self.config.virtual_world_size or self.world_size

    @property
    def arm(self) -> str:
        """The strategy, with the trainer where it is not the study's own, and with `virtual` for a virtual rank."""
        marks = [self.trainer] * (self.trainer != "study") + ["virtual"] * bool(self.config.virtual_world_size)
        return "-".join([self.strategy, *marks])

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps; None where only the data tells."""
        known = self.config.max_steps or self.config.train_samples
        return self.config.total_steps(self.config.train_samples or self.config.global_batch_size) if known else None

    def flags(self, output_dir: Path) -> list[str]:
        """The command line of study/train.py that asks for exactly this run."""
        flags = []
        for field in dataclasses.fields(RunConfig):
            value = getattr(self.asked, field.name)
            if value == field.default and field.name != "task":
                continue
            if isinstance(value, bool):
                flags.append(f"--{field.name}" if value else f"--no-{field.name}")
            elif isinstance(value, tuple):
                flags += [f"--{field.name}={item}" for item in value]
            else:
                flags += [f"--{field.name}", str(value)]
        return [*flags, "--output_dir", str(output_dir)]

    @property
    def uses_nvme(self) -> bool:
        return read_strategy(self.strategy).uses_nvme
