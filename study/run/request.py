"""What a run is asked for, checked before anything is written: what cannot be served is refused in one line."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from study.errors import REFUSAL_FILE_VARIABLE, UserError
from study.host.folders import cache_directory, folder_named
from study.record.directory import write_json
from study.record.folder import refuse_folder_at_work
from study.spec.checks import refuse_what_no_virtual_run_has
from study.spec.config import BatchPlan, RunConfig, parse_command_line, resolved
from study.spec.strategies import Launch, this_launch, virtual_launch

SECONDS_FOR_THE_MAIN_PROCESS_TO_SPEAK = 10
# What one trainer cannot do.
Refuse = Callable[[RunConfig, Launch], None]


@dataclasses.dataclass(frozen=True)
class Request:
    """One that this box can serve, as far as that can be told before the data is there."""

    config: RunConfig
    launch: Launch
    plan: BatchPlan
    output_dir: Path
    # The folder to go on from, and its manifest.
    checkpoint: tuple[Path, dict[str, Any]] | None
    cache: Path
    notice: str | None


def read_request(trainer: str, arguments: Sequence[str] | None) -> tuple[RunConfig, Launch]:
    """The flags and the launch. Torch is not imported for it."""
    config = parse_command_line(arguments)
    launch = this_launch()
    if config.virtual_world_size:
        if trainer != "study":
            raise UserError(f"{trainer} runs no virtual rank", "use study/train.py")
        launch = virtual_launch(launch, config.virtual_world_size, config.virtual_rank or 0)
    return config, launch


def checked(trainer: str, config: RunConfig, launch: Launch, refuse: Refuse | None) -> Request:
    """Cheapest first."""
    from study.host.devices import prepare_devices
    from study.host.imports import import_libraries
    from study.host.operators import build_operators
    from study.models.architecture import model_config
    from study.run import checks
    from study.run.checkpoint import find_checkpoint
    from study.virtual.rank.capacity import check_can_be_held

    if refuse:
        refuse(config, launch)
    if not config.torch_compile:
        # Parts of DeepSpeed compile themselves while they are imported: a second of every rank's start-up.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    gpus = prepare_devices(launch)
    config = resolved(config, accelerator_visible=gpus > 0)
    if launch.virtual:
        refuse_what_no_virtual_run_has(config)
    notice = checks.check_devices(launch, gpus)
    plan = config.batch_plan(launch.world_size)
    own = "" if trainer == "study" else f"-{trainer}"
    default = Path("runs") / config.run_id(f"{launch.strategy.name}{own}", launch.world_size)
    output_dir = folder_named(str(config.output_dir or default))
    checks.check_output_dir(config, output_dir)
    if launch.is_main:
        # To the other ranks it may be their own main process that is at work there by now.
        refuse_folder_at_work(output_dir, f"--output_dir {output_dir}")
    checks.check_request(config, launch)
    checkpoint = find_checkpoint(config, launch, output_dir)
    import_libraries(launch.strategy)
    model_config(config)
    cache = cache_directory()
    build_operators(launch.strategy, cache)
    if launch.virtual:
        check_can_be_held(config, launch)
    return Request(config, launch, plan, output_dir, checkpoint, cache, notice)


def refused(refusal: UserError, is_main: bool, say: Callable[[str], None]) -> int:
    """The exit status of a wrong request, and its one line."""
    # A launcher turns every exit status into its own 1: whoever launched this may have the reason in a file.
    if file := os.environ.get(REFUSAL_FILE_VARIABLE):
        write_json(Path(file), refusal.to_json())
    if not is_main:
        # The launcher ends all ranks as soon as one has ended: leave the main process the time to say why.
        time.sleep(SECONDS_FOR_THE_MAIN_PROCESS_TO_SPEAK)
    say(f"error: {refusal.problem}. To fix it: {refusal.fix}.")
    return 2
