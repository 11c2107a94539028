"""The values of a run that its training loop and its checkpoints read: the request, the samples and the record."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config import flags, launch_context, strategies
from study.records.directory import RunWriter

if TYPE_CHECKING:
    from study.workloads.initial import InitialWeights
    from study.workloads.tasks import TaskData


@dataclasses.dataclass(frozen=True)
class RunRequest:
    """A request that passed every check that needs no data."""

    config: flags.RunConfig
    launch: launch_context.Launch
    # The launched strategy with the settings that flags override.
    strategy: strategies.Strategy
    plan: flags.BatchPlan
    output_dir: Path
    # The folder to resume from, and its manifest.
    checkpoint: tuple[Path, dict[str, Any]] | None
    cache: Path
    notice: str | None


@dataclasses.dataclass(frozen=True)
class RunContext(RunRequest):
    """The request of a run that has begun, with its samples, initial weights and record."""

    data: TaskData
    # None for a virtual rank.
    initial: InitialWeights | None
    # Only on the main process.
    record: RunWriter | None = None
