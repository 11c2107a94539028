"""One run around one training loop: its request is checked first, then a record is kept until it ends.

    with open_run("study") as run:           # checks request, machine and folder; an error exits with status 2
        run.begin()                          # loads data and weights; from here on there is a record
        for step, micro_batches in run.steps():
            ...
        run.finish(accelerator, meters, log, evaluation)
    return run.exit_status

The loop calls the run; the run never calls the loop.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config.errors import RunFailed, UserError, first_line, redact_secrets
from study.config.flags import parse_command_line
from study.config.launch_context import read_launch, read_launcher_environment, virtual_launch
from study.host import folders, stacks
from study.host.machine import free_memory
from study.records import directory, lock
from study.records.outcome import RETRY_HINT, Outcome, Terminated, outcome_from_exception, raise_on_signals
from study.run import checks, rendezvous
from study.run.console import Console
from study.run.context import RunContext, RunRequest

# torch and libraries that use it are imported in functions, so that a wrong flag is reported without their import time.
if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from study.metrics import Meters
    from study.run.steps import StepLog


@contextmanager
def open_run(
    trainer: str, arguments: Sequence[str] | None = None, check_trainer: checks.Refuse | None = None
) -> Iterator[OpenRun]:
    """Yield the run of a request that passes all checks, also the trainer's, and record its ending."""
    opened = time.perf_counter()
    try:
        folders.check_process()
        config, launch = parse_command_line(arguments), read_launch(shell=read_launcher_environment())
        if config.virtual_world_size:
            if trainer != "study":
                raise UserError(f"{trainer} does not run virtual ranks", "use study/train.py")
            launch = virtual_launch(launch, config.virtual_world_size, config.virtual_rank or 0)
        launch = dataclasses.replace(launch, strategy=launch.strategy.with_group_size(config.group_size))
        stacks.check_training_packages()
    except UserError as refusal:
        raise SystemExit(checks.report_refusal(refusal, lambda line: print(line, file=sys.stderr))) from None
    # The stack restores the terminal, the lock, signals and the swap folder at any end.
    with ExitStack() as stack:
        console = Console(speaks=launch.is_main)
        stack.callback(console.restore)
        try:
            request = checks.resolve_run_request(trainer, config, launch, check_trainer, console.print_from_any_rank)
        except UserError as refusal:
            raise SystemExit(checks.report_refusal(refusal, console.print_from_any_rank)) from None
        run = OpenRun(trainer, request, console, stack, opened)
        try:
            yield run
        except BaseException as error:
            if run.has_begun:
                # The launcher may send SIGTERM again while the record is being closed.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                run.record_failure(error)
                run.exit_status = 1
            elif isinstance(error, UserError):
                run.exit_status = checks.report_refusal(error, console.print_from_any_rank)
            else:
                rendezvous.publish_refusal(UserError(f"{type(error).__name__}: {first_line(error)}", "see its output"))
                raise


class OpenRun:
    """A checked request with the methods that a training loop calls."""

    # Set by `begin`.
    context: RunContext
    # A folder under --nvme_path for this process only.
    swap_folder: Path | None = None
    has_begun = False
    # False on another machine whose --output_dir is not the main process's folder.
    _sees_record = True
    exit_status = 0

    def __init__(self, trainer: str, request: RunRequest, console: Console, stack: ExitStack, opened: float):
        self.trainer, self.console, self._stack = trainer, console, stack
        self._opened = self._loop_started = opened
        self._request, self.config, self.launch = request, request.config, request.launch
        self.strategy, self.plan, self.checkpoint = request.strategy, request.plan, request.checkpoint
        self.output_dir, self.cache = request.output_dir, request.cache

    def begin(self) -> None:
        """Load the samples, create the initial weights, lock the folder, and open the record.

        Missing data and weights are wrong requests, too. All strategies share one set of weights, created before the
        Accelerator: under an active stage-3 configuration transformers would shard them.
        """
        from study.host.environment import describe_environment
        from study.host.folders import swap_folder
        from study.metrics.profiling import check_profiled_steps
        from study.run.checkpoint import remove_incomplete_checkpoints
        from study.run.resume import check_continues
        from study.workloads.initial import materialize_initial_weights
        from study.workloads.tasks import load_data

        config, launch, console = self.config, self.launch, self.console
        # A virtual rank reads only its own samples.
        samples = self.plan.global_batch_size // self.plan.groups if launch.virtual else None
        data = load_data(config, self.cache, samples)
        initial = None if launch.virtual else materialize_initial_weights(config, self.cache)
        self.context = RunContext(**vars(self._request), data=data, initial=initial)
        if self.checkpoint and launch.is_main:
            check_continues(self.context)
        check_profiled_steps(config, self.total_steps - self.first_step)
        environment = describe_environment() if launch.is_main or rendezvous.machine_count() > 1 else {}
        if rendezvous.machine_count() > 1:
            with raise_on_signals(Terminated(), signal.SIGTERM):
                environment |= self._sync_machines(environment)
        elif launch.is_main:
            self._take_folder()
        self.has_begun = True
        if self._request.notice:
            console.print_from_main(f"notice: {self._request.notice}")
        ranks = f"{launch.world_size} rank{'s'[: launch.world_size > 1]}"
        place = f"as virtual rank {launch.rank} of {ranks}" if launch.virtual else f"on {ranks}"
        loop = "" if self.trainer == "study" else f"{self.trainer}: "
        console.print_from_main(
            f"{loop}{launch.strategy.name} {place}: {config.task} at {config.scale} scale,"
            f" {config.model_name_or_path}, {config.precision} -> {self.output_dir}"
        )
        if launch.local_rank == 0 and not launch.is_main:
            console.print_from_any_rank(
                f"rank {launch.rank} of {launch.world_size}: rank 0's machine shows the run's progress"
            )
        self._stack.enter_context(raise_on_signals(Terminated(), signal.SIGTERM))
        if launch.is_main:
            record = directory.RunWriter(self.output_dir, rows_from=self.checkpoint[0] if self.checkpoint else None)
            self.context = dataclasses.replace(self.context, record=record)
            record.write("config.json", config.to_dict())
            record.write("environment.json", environment)
            remove_incomplete_checkpoints(self.output_dir)
            interval, done = config.checkpointing_steps, self.first_step
            if interval and self.total_steps // interval == done // interval:
                steps = f"steps {done + 1} to {self.total_steps}"
                console.print_from_main(f"notice: --checkpointing_steps {interval} saves no checkpoint in {steps}")
        if launch.strategy.uses_nvme:
            self.swap_folder = self._stack.enter_context(swap_folder(folders.resolve_path(config.nvme_path)))

    def _take_folder(self) -> dict[str, Any]:
        """Lock the folder; return the lock's holder."""
        self._stack.enter_context(lock.lock_run_directory(self.output_dir, f"--output_dir {self.output_dir}"))
        # Another run may have begun and ended since the first check.
        checks.check_output_dir(self.config, self.output_dir)
        return lock.read_lock_owner(self.output_dir / lock.LOCK_NAME)

    def _sync_machines(self, environment: dict[str, Any]) -> dict[str, Any]:
        """Wait until every rank can begin; return environment.json's entry for the other machines."""
        flags, initial = self.config.to_dict(), self.context.initial
        agreed = {
            **{f"--{key}": value for key, value in flags.items() if key not in rendezvous.FLAGS_OF_A_MACHINE},
            "the strategy": dataclasses.asdict(self.launch.strategy),
            "the trainer": self.trainer,
            "the initial weights' digest": initial.sha256 if initial else None,
            "the samples' digest": self.context.data.source["tokens_sha256"],
            "the checkpoint's step": self.first_step,
            **{key: environment[key] for key in ("packages", "code_sha256")},
        }
        if self.launch.is_main:
            return {"other_machines": rendezvous.sync_as_main(agreed, self._take_folder, self.console.print_from_main)}

        def look_for_the_record(holder: Mapping[str, Any]) -> None:
            self._sees_record = lock.read_lock_owner(self.output_dir / lock.LOCK_NAME) == holder
            if (interval := self.config.checkpointing_steps) and not self._sees_record:
                raise UserError(
                    f"--checkpointing_steps {interval}: rank {self.launch.rank} does not see the folder that rank 0"
                    " writes to",
                    "use an --output_dir that all machines share",
                )

        rendezvous.sync_with_main(
            agreed, {key: environment[key] for key in rendezvous.MACHINE_FIELDS}, look_for_the_record
        )
        return {}

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run, including those before a resumed checkpoint."""
        return self.config.total_steps(len(self.context.data.train))

    @property
    def first_step(self) -> int:
        """Number of steps before this run began: those of its checkpoint, else 0."""
        return self.checkpoint[1]["step"] if self.checkpoint else 0

    @property
    def profiled_steps(self) -> range:
        """The last steps, so that the profiler slows down no other step of the run."""
        return range(self.total_steps - self.config.profile_steps + 1, self.total_steps + 1)

    @property
    def warmup_steps(self) -> int:
        """Number of this run's first steps that are excluded from statistics of time."""
        from study.metrics.clock import warmup_steps

        return warmup_steps(self.total_steps - self.first_step)

    @property
    def watched_step(self) -> int:
        """The step after the warm-up: its communication and model state are measured, and its time is not."""
        return min(self.first_step + self.warmup_steps + 1, self.total_steps)

    @property
    def step_numbers(self) -> range:
        return range(self.first_step + 1, self.total_steps + 1)

    def steps(self) -> Iterator[tuple[int, list[dict[str, Tensor]]]]:
        """Yield the number and this rank's micro-batches of each remaining step."""
        from study.workloads.tasks import pin_batch

        self.start_clock()
        for step in self.step_numbers:
            yield step, [pin_batch(self.context.data.train.__getitems__(indices)) for indices in self.indices(step)]

    def indices(self, step: int) -> list[list[int]]:
        """Return the indices of this rank's samples in a step, a list for each micro-batch."""
        from study.workloads.tasks import step_samples

        return self.plan.micro_batches(
            step_samples(self.config, len(self.context.data.train), step - 1), self.launch.group_index
        )

    def start_clock(self) -> None:
        self._loop_started = time.perf_counter()

    def evaluates_after(self, step: int) -> bool:
        is_due = step == self.total_steps or bool(self.config.eval_steps and step % self.config.eval_steps == 0)
        return is_due and not self.launch.virtual and not stacks.is_engines_only()

    def saves_after(self, step: int) -> bool:
        return bool(self.config.checkpointing_steps and step % self.config.checkpointing_steps == 0)

    def flushes_after(self, step: int) -> bool:
        is_due = step == self.total_steps or step % self.config.logging_steps == 0
        return is_due or self.evaluates_after(step) or self.saves_after(step)

    def redirect_output_to_log(self) -> None:
        """Redirect all output to log.txt; other machines have separate files, because NFS may lose lines."""
        if self._sees_record:
            machine = os.environ.get("GROUP_RANK", "0") if rendezvous.machine_count() > 1 else "0"
            self.console.log_to(self.output_dir / ("log.txt" if machine == "0" else f"log.{machine}.txt"))

    def write_engine(self, audited: dict[str, Any]) -> None:
        data, initial = self.context.data, self.context.initial
        if (record := self.context.record) is not None:
            floor = dataclasses.asdict(data.floor) if data.floor else None
            sha256 = initial.sha256 if initial else None
            provenance = {"initial_weights_sha256": sha256, "data": data.source, "floor": floor}
            record.write("engine.json", audited | provenance | {"trainer": self.trainer})

    def write_evaluation(self, step: int, evaluation: dict[str, float | None]) -> None:
        if (record := self.context.record) is not None:
            record.append("evals.jsonl", {"step": step, **evaluation})
            record.flush()

    def finish(
        self, accelerator: Accelerator, meters: Meters, log: StepLog, evaluation: dict[str, float | None]
    ) -> None:
        """Write the documents of a successful run. Called on every rank, as it gathers their measurements."""
        from study.run.steps import gather_ranks, summarize

        ranks, world_size = gather_ranks(self.launch.virtual, accelerator, meters), self.launch.world_size
        if (record := self.context.record) is None:
            return
        ended = time.perf_counter()
        timing = {"runtime_s": ended - self._loop_started, "startup_s": self._loop_started - self._opened}
        record.write("memory.json", {"unit": "GiB", "ranks": ranks})
        record.write("traffic.json", meters.traffic or {"step": None, "world_size": world_size, "collectives": {}})
        if meters.profile is not None:
            record.write("profile.json", meters.profile)
        summary = summarize(world_size, self.config, ranks, meters.traffic, log, evaluation, timing)
        record.write("summary.json", summary)
        record.close(Outcome("ok"))
        figures = {"loss": log.last_loss, **evaluation}
        result = ", ".join(f"{name} {value:.4f}" for name, value in figures.items() if value is not None)
        if self.launch.virtual:
            result = "state, memory and traffic of a virtual rank; its losses are meaningless and are not recorded"
        self.console.print_from_main(f"done: {result} -> {self.output_dir}")

    def record_failure(self, error: BaseException) -> None:
        """Write the ending of a failed run to the record, the log and the terminal."""
        from study.run.checkpoint import latest_checkpoint, resume_hint

        launch, console, record = self.launch, self.console, self.context.record
        output_dir = record.folder if record else self.output_dir
        local_ending = outcome_from_exception(
            error, launch.virtual or launch.world_size == 1, free_memory(launch.local_rank)
        )
        # Every rank raises the same RunFailed; other errors are reported with their rank.
        if not (launch.is_main or isinstance(error, RunFailed)):
            local_ending = dataclasses.replace(local_ending, reason=f"rank {launch.rank}: {local_ending.reason}")
        ending = rendezvous.publish_outcome(local_ending)
        if RETRY_HINT in ending.hint:
            with suppress(UserError):  # without a checkpoint
                hint = ending.hint.replace(RETRY_HINT, resume_hint(latest_checkpoint(output_dir)))
                ending = dataclasses.replace(ending, hint=hint)
        if not self._sees_record:
            # This machine has no log, and no other process prints on it.
            console.restore()
            console.print_from_any_rank(f"{local_ending.state}: {local_ending.why}")
        with suppress(OSError):  # the log may be on a full disk
            print(redact_secrets("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        # If the main process failed its checks, the folder may belong to another launch.
        if self._sees_record and (
            launch.is_main or rendezvous.machine_count() > 1 or lock.is_locked_by_current_launch(output_dir)
        ):
            if console.log_path is None and (output_dir / "status.json").exists():
                self.redirect_output_to_log()
            directory.end_interrupted_run(output_dir, ending)
        console.print_from_main(f"{ending.state}: {ending.why}")
