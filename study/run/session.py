"""Around every loop: one request checked whole, then one run, and a record of whatever happened to it."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.errors import REFUSAL_FILE_VARIABLE, RunFailed, UserError
from study.host.folders import folder_named
from study.host.swap import SwapFolder
from study.record.directory import RunWriter, end_interrupted_run, write_json
from study.record.folder import is_taken_by_this_launch, refuse_folder_at_work, take_folder
from study.record.lock import FileLock
from study.run.console import Console
from study.spec.config import (
    BatchPlan,
    RunConfig,
    default_output_dir,
    parse_command_line,
    refuse_what_no_virtual_run_has,
    resolved,
)
from study.spec.strategies import Launch, this_launch, virtual_launch

# Torch and the libraries above it are imported where they are used: a wrong flag is refused before they cost seconds.
if TYPE_CHECKING:
    from accelerate import Accelerator

    from study.measure import Meters
    from study.models.initial import InitialWeights
    from study.run.steps import StepLog
    from study.tasks.blocks import TaskData

SECONDS_FOR_THE_MAIN_PROCESS_TO_SPEAK = 10


@dataclasses.dataclass
class Session:
    """A checked request, and what a loop needs to serve it. `record` is the main process's alone."""

    trainer: str
    config: RunConfig
    launch: Launch
    plan: BatchPlan
    data: TaskData
    # A virtual rank has none.
    initial: InitialWeights | None
    checkpoint: tuple[Path, dict[str, Any]] | None
    output_dir: Path
    console: Console
    started: float
    record: RunWriter | None = None
    # The main process's hold on the run directory.
    lock: FileLock | None = None
    # This process's own, on the drive of --nvme_path.
    swap: SwapFolder | None = None

    @property
    def swap_folder(self) -> Path | None:
        return self.swap.path if self.swap else None

    @property
    def total_steps(self) -> int:
        return self.config.total_steps(len(self.data.train))

    @property
    def first_step(self) -> int:
        """Steps done before this run began."""
        return self.checkpoint[1]["step"] if self.checkpoint else 0

    @property
    def profiled_steps(self) -> range:
        """The last ones, so that none of the run's own is slowed down by what was recorded before it."""
        return range(self.total_steps - self.config.profile_steps + 1, self.total_steps + 1)

    def evaluates_after(self, step: int) -> bool:
        if self.launch.virtual:
            return False
        return step == self.total_steps or bool(self.config.eval_steps and step % self.config.eval_steps == 0)

    def saves_after(self, step: int) -> bool:
        return bool(self.config.checkpointing_steps and step % self.config.checkpointing_steps == 0)

    def flushes_after(self, step: int) -> bool:
        is_due = step == self.total_steps or step % self.config.logging_steps == 0
        return is_due or self.evaluates_after(step) or self.saves_after(step)

    def write_engine(self, audited: dict[str, Any]) -> None:
        if self.record is not None:
            floor = dataclasses.asdict(self.data.floor) if self.data.floor else None
            sha256 = self.initial.sha256 if self.initial else None
            provenance = {"initial_weights_sha256": sha256, "data": self.data.source, "floor": floor}
            self.record.write("engine.json", audited | provenance | {"trainer": self.trainer})

    def write_evaluation(self, step: int, evaluation: dict[str, float | None]) -> None:
        if self.record is not None:
            self.record.append("evals.jsonl", {"step": step, **evaluation})
            self.record.flush()

    def finish(
        self,
        accelerator: Accelerator,
        ranks: list[dict[str, Any]],
        traffic: dict[str, Any] | None,
        log: StepLog,
        evaluation: dict[str, float | None],
        loop_started: float,
        profile: dict[str, Any] | None = None,
    ) -> None:
        """The documents of a run that ended well."""
        from study.run.summary import memory_document, summarize

        if self.record is None:
            return
        timing = {"runtime_s": time.time() - loop_started, "startup_s": loop_started - self.started}
        watched = traffic or {"step": None, "world_size": self.launch.world_size, "collectives": {}}
        self.record.write("memory.json", memory_document(ranks))
        self.record.write("traffic.json", watched)
        if profile is not None:
            self.record.write("profile.json", profile)
        world_size = accelerator.num_processes
        self.record.write("summary.json", summarize(world_size, self.config, ranks, traffic, log, evaluation, timing))
        self.record.close("ok")
        figures = {"loss": log.last_loss, **evaluation}
        told = ", ".join(f"{name} {value:.4f}" for name, value in figures.items() if value is not None)
        if self.launch.virtual:
            told = "state, memory and traffic of a virtual rank; its losses mean nothing and are not kept"
        self.console.say(f"done: {told} -> {self.output_dir}")


def run_session(
    trainer: str,
    train: Callable[[Session], None],
    arguments: list[str] | None = None,
    refuse: Callable[[RunConfig, Launch], None] = lambda config, launch: None,
) -> int:
    """Exit status: 0 done, 1 the run failed, 2 the request itself is wrong."""
    started = time.time()
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        config = parse_command_line(arguments)
        launch = this_launch()
        if config.virtual_world_size:
            if trainer != "study":
                raise UserError(f"{trainer} runs no virtual rank", "use study/train.py")
            launch = virtual_launch(launch, config.virtual_world_size, config.virtual_rank or 0)
    except UserError as refusal:
        return _refused(refusal, is_main, lambda line: print(line, file=sys.stderr))
    console = Console(speaks=is_main)
    try:
        session, notice = _check(trainer, config, launch, console, started, refuse)
    except UserError as refusal:
        return _refused(refusal, is_main, console.shout)
    else:
        return _record(session, notice, train)
    finally:
        console.restore()


def _refused(refusal: UserError, is_main: bool, say: Callable[[str], None]) -> int:
    # A launcher turns every exit status into its own 1: whoever launched this may have the reason in a file.
    if file := os.environ.get(REFUSAL_FILE_VARIABLE):
        write_json(Path(file), refusal.to_json())
    if not is_main:
        # The launcher ends all ranks as soon as one has ended: leave the main process the time to say why.
        time.sleep(SECONDS_FOR_THE_MAIN_PROCESS_TO_SPEAK)
    say(f"error: {refusal.problem}. To fix it: {refusal.fix}.")
    return 2


def _check(
    trainer: str,
    config: RunConfig,
    launch: Launch,
    console: Console,
    started: float,
    refuse: Callable[[RunConfig, Launch], None],
) -> tuple[Session, str | None]:
    """Everything that can be refused is, cheapest first, before anything is written."""
    from study.host.devices import prepare_devices
    from study.host.folders import cache_directory
    from study.host.imports import import_libraries
    from study.host.operators import build_operators
    from study.measure.profiling import check_profiled_steps
    from study.models.initial import materialize_initial_weights, model_config
    from study.run import checks
    from study.run.checkpoint import check_steps_are_left, find_checkpoint
    from study.tasks import load_data
    from study.virtual.rank.capacity import check_can_be_held

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
    default = default_output_dir(config, f"{launch.strategy.name}{own}", launch.world_size)
    output_dir = folder_named(str(config.output_dir or default))
    checks.check_output_dir(config, output_dir)
    if launch.is_main:
        # To the other ranks it may be their own main process that is at work there by now.
        with _locks_are_known(output_dir):
            refuse_folder_at_work(output_dir, f"--output_dir {output_dir}")
    checks.check_request(config, launch)
    checkpoint = find_checkpoint(config, launch, output_dir)
    import_libraries(launch.strategy)
    model_config(config)
    build_operators(launch.strategy, cache_directory())
    initial = None
    if launch.virtual:
        from study.virtual.rank.data import load_virtual_data

        check_can_be_held(config, launch)
        data = load_virtual_data(config, plan, cache_directory())
    else:
        data = load_data(config, cache_directory())
        # Before the Accelerator exists: under an active stage-3 configuration transformers would shard these too.
        initial = materialize_initial_weights(config, cache_directory())
    check_steps_are_left(config, checkpoint, len(data.train))
    session = Session(trainer, config, launch, plan, data, initial, checkpoint, output_dir, console, started)
    check_profiled_steps(config, session.total_steps - session.first_step)
    if launch.is_main:
        with _locks_are_known(output_dir):
            session.lock = take_folder(output_dir, f"--output_dir {output_dir}")
        try:
            # Another run may have come and gone since the first look.
            checks.check_output_dir(config, output_dir)
        except UserError:
            session.lock.release()
            raise
    return session, notice


@contextmanager
def _locks_are_known(output_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--output_dir {output_dir} cannot be locked for one run alone ({error.strerror})",
            "make room, or name a folder that you may write, on a drive with file locks",
        ) from None


def _record(session: Session, notice: str | None, train: Callable[[Session], None]) -> int:
    from study.host.environment import describe_environment
    from study.record.outcome import classify, raise_on_termination

    config, launch, console, output_dir = session.config, session.launch, session.console, session.output_dir
    if notice:
        console.say(f"notice: {notice}")
    loop = "" if session.trainer == "study" else f"{session.trainer}: "
    ranks = f"{launch.world_size} rank{'s'[: launch.world_size > 1]}"
    where = f"as rank {launch.rank} of {ranks} that are not there" if launch.virtual else f"on {ranks}"
    console.say(
        f"{loop}{launch.strategy.name} {where}: {config.task} at"
        f" {config.scale} scale, {config.model_name_or_path}, {config.precision} -> {output_dir}"
    )
    try:
        with raise_on_termination():
            if launch.is_main:
                session.record = RunWriter.open(
                    output_dir, rows_from=session.checkpoint[0] if session.checkpoint else None
                )
                session.record.write("config.json", config.to_dict())
                session.record.write("environment.json", describe_environment())
            if launch.strategy.uses_nvme:
                session.swap = SwapFolder.make(folder_named(config.nvme_path))
            train(session)
    except BaseException as error:
        state, reason, hint = classify(error, alone=launch.virtual or launch.world_size == 1)
        traceback.print_exc()
        # Where the main process was refused, the folder is another launch's.
        if launch.is_main or is_taken_by_this_launch(output_dir):
            if console.log_path is None and (output_dir / "status.json").exists():
                console.log_to(output_dir / "log.txt")
            # What the study itself finds wrong, every rank finds; anything else is worth knowing whose it was.
            told = reason if launch.is_main or isinstance(error, RunFailed) else f"rank {launch.rank}: {reason}"
            end_interrupted_run(output_dir, state, told, hint)
        console.say(f"{state}: {reason}{f' ({hint})' if hint else ''}")
        return 1
    finally:
        if session.swap is not None:
            session.swap.remove()
        if session.lock is not None:
            session.lock.release()
    return 0


def gather_measurements(accelerator: Accelerator, meters: Meters, virtual: bool = False) -> list[dict[str, Any]]:
    """What every rank measured, one entry per rank, on every rank; of a virtual job there is only this one."""
    from accelerate.utils import gather_object

    took = meters.summary()
    if virtual and accelerator.device.type == "cpu":
        # Copies in memory stand in for receiving there, and would be most of what such a time says.
        took = {key: None if key.startswith("step_time_s_") else value for key, value in took.items()}
    mine = {
        "rank": accelerator.process_index,
        "memory": meters.memory.report(),
        "time": took,
        "state": meters.state,
    }
    return [mine] if virtual else list(gather_object([mine]))
