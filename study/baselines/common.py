"""What both baselines share: a request checked, and a record kept of whatever happens, as study/train.py does it."""

from __future__ import annotations

import dataclasses
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config import BatchPlan, RunConfig, default_output_dir, parse_command_line, resolved
from study.console import Console
from study.errors import UserError
from study.records import RunWriter, end_interrupted_run
from study.strategies import Launch, this_launch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from study.steplog import StepLog
    from study.tasks.blocks import TaskData
    from study.tasks.models import InitialWeights


@dataclasses.dataclass(frozen=True)
class Session:
    """One checked request, and what training it needs."""

    trainer: str
    config: RunConfig
    launch: Launch
    plan: BatchPlan
    data: TaskData
    initial: InitialWeights
    record: RunWriter | None
    output_dir: Path
    console: Console
    started: float

    @property
    def total_steps(self) -> int:
        return self.config.total_steps(len(self.data.train))

    def evaluates_after(self, step: int) -> bool:
        return step == self.total_steps or bool(self.config.eval_steps and step % self.config.eval_steps == 0)

    def flushes_after(self, step: int) -> bool:
        return self.evaluates_after(step) or step % self.config.logging_steps == 0

    def write_engine(self, audited: dict[str, Any]) -> None:
        if self.record is not None:
            added = {"trainer": self.trainer, "initial_weights_sha256": self.initial.sha256, "data": self.data.source}
            self.record.write("engine.json", audited | added)

    def write_evaluation(self, step: int, evaluation: dict[str, float]) -> None:
        if self.record is not None:
            self.record.append("evals.jsonl", {"step": step, **evaluation})

    def close_record(
        self,
        accelerator: Accelerator,
        ranks: list[dict[str, Any]],
        traffic: dict[str, Any] | None,
        log: StepLog,
        evaluation: dict[str, float],
        loop_started: float,
    ) -> None:
        """The documents of a run that ended well."""
        from study.summary import memory_document, summarize

        timing = {"runtime_s": time.time() - loop_started, "startup_s": loop_started - self.started}
        if self.record is None:
            return
        watched = traffic or {"step": None, "world_size": self.launch.world_size, "collectives": {}}
        summary = summarize(accelerator, self.config, ranks, watched, log, evaluation, timing)
        if traffic is None:
            # Nobody watched a step: that is no figure, and not zero bytes.
            summary |= {"comm_bytes_per_step": None, "comm_calls_per_step": None}
        self.record.write("memory.json", memory_document(ranks))
        self.record.write("traffic.json", watched)
        self.record.write("summary.json", summary)
        self.record.close("ok")
        self.console.say(f"done: {log.last_step} steps, loss {log.last_loss:.4f} -> {self.output_dir}")


def main(
    trainer: str,
    train: Callable[[Session], None],
    refuse: Callable[[RunConfig, Launch], None],
    arguments: list[str] | None = None,
) -> int:
    """Exit status: 0 done, 1 the run failed, 2 the request itself is wrong."""
    started = time.time()
    console = Console(speaks=os.environ.get("RANK", "0") == "0")
    try:
        config, launch = parse_command_line(arguments), this_launch()
        _refuse_for_every_baseline(trainer, config)
        refuse(config, launch)
        return _run(trainer, train, config, launch, console, started)
    except UserError as refusal:
        console.say(f"error: {refusal.problem}. To mend it: {refusal.mend}.")
        return 2
    finally:
        console.restore()


def _refuse_for_every_baseline(trainer: str, config: RunConfig) -> None:
    for flag, asked in {
        "checkpointing_steps": config.checkpointing_steps,
        "resume_from_checkpoint": config.resume_from_checkpoint,
        "report_to": config.report_to not in (None, "none"),
    }.items():
        if asked:
            raise UserError(f"{trainer} is a baseline and knows no --{flag}", "leave it out, or use study/train.py")


def _run(
    trainer: str,
    train: Callable[[Session], None],
    config: RunConfig,
    launch: Launch,
    console: Console,
    started: float,
) -> int:
    from study import engine, preflight
    from study.environment import describe_environment
    from study.outcome import classify, raise_on_termination
    from study.tasks import load_data
    from study.tasks.models import materialize_initial_weights

    gpus = preflight.prepare_devices(launch)
    config = resolved(config, accelerator_visible=gpus > 0)
    notice = engine.check_devices(launch, gpus)
    plan = config.batch_plan(launch.world_size)
    default = default_output_dir(config, launch.strategy.name, launch.world_size)
    output_dir = Path(config.output_dir or default.with_name(f"{default.name}-{trainer}"))
    preflight.check_output_dir(config, output_dir)
    engine.check_request(config, launch.strategy)
    data = load_data(config, preflight.cache_directory())
    config.total_steps(len(data.train))
    initial = materialize_initial_weights(config, preflight.cache_directory())

    if notice:
        console.say(f"notice: {notice}")
    console.say(f"{trainer}, {launch.strategy.name} on {launch.world_size}: {config.task} -> {output_dir}")
    record = None
    if launch.is_main:
        record = RunWriter.open(output_dir)
        record.write("config.json", config.to_dict())
        record.write("environment.json", describe_environment())
    session = Session(trainer, config, launch, plan, data, initial, record, output_dir, console, started)
    try:
        with raise_on_termination():
            train(session)
    except BaseException as error:
        state, reason, hint = classify(error)
        traceback.print_exc()
        end_interrupted_run(output_dir, state, reason if launch.is_main else f"rank {launch.rank}: {reason}", hint)
        console.say(f"{state}: {reason}{f' ({hint})' if hint else ''}")
        return 1
    finally:
        engine.remove_nvme_folder(config, launch, output_dir)
    return 0
