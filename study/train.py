"""The launched script: one run, from flags to a run directory. It knows nothing of ZeRO.

    accelerate launch --config_file accelerate_configs/zero3.yaml study/train.py

Which strategy runs is decided by the launched file alone, so the loop below is provably the same for every arm.
"""

from __future__ import annotations

import dataclasses
import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config import BatchPlan, RunConfig, default_output_dir, parse_command_line, resolved
from study.console import Console
from study.errors import UserError
from study.records import RunWriter, end_interrupted_run
from study.strategies import Launch, this_launch

# Torch and the libraries above it are imported where they are used: a wrong flag is refused before they cost seconds.
if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from study.tasks.blocks import TaskData
    from study.tasks.models import InitialWeights


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 the run failed, 2 the request itself is wrong."""
    started = time.time()
    console = Console(speaks=os.environ.get("RANK", "0") == "0")
    try:
        config = parse_command_line(arguments)
        return run(config, this_launch(), console, started)
    except UserError as refusal:
        console.say(f"error: {refusal.problem}. To mend it: {refusal.mend}.")
        return 2
    finally:
        console.restore()


def run(config: RunConfig, launch: Launch, console: Console, started: float) -> int:
    """Check the whole request, then train and leave a record of whatever happened."""
    from study import engine, preflight
    from study.checkpoint import find_checkpoint
    from study.environment import describe_environment
    from study.outcome import classify, raise_on_termination
    from study.tasks import load_data
    from study.tasks.models import materialize_initial_weights

    gpus = preflight.prepare_devices(launch)
    config = resolved(config, accelerator_visible=gpus > 0)
    notice = engine.check_devices(launch, gpus)
    plan = config.batch_plan(launch.world_size)
    output_dir = Path(config.output_dir or default_output_dir(config, launch.strategy.name, launch.world_size))
    preflight.check_output_dir(config, output_dir)
    engine.check_request(config, launch.strategy)
    checkpoint = find_checkpoint(config, launch, output_dir)
    data = load_data(config, preflight.cache_directory())
    config.total_steps(len(data.train))
    # Before the Accelerator exists: under an active stage-3 configuration transformers would shard these too.
    initial = materialize_initial_weights(config, preflight.cache_directory())

    if notice:
        console.say(f"notice: {notice}")
    console.say(
        f"{launch.strategy.name} on {launch.world_size} rank{'s'[: launch.world_size > 1]}: {config.task} at"
        f" {config.scale} scale, {config.model_name_or_path}, {config.precision} -> {output_dir}"
    )
    record = None
    if launch.is_main:
        record = RunWriter.open(output_dir, keep_rows_up_to_step=checkpoint[1]["step"] if checkpoint else 0)
        record.write("config.json", config.to_dict())
        record.write("environment.json", describe_environment())
    try:
        with raise_on_termination():
            train(config, launch, plan, data, initial, checkpoint, record, output_dir, console, started)
    except BaseException as error:
        state, reason, hint = classify(error)
        traceback.print_exc()
        end_interrupted_run(output_dir, state, reason if launch.is_main else f"rank {launch.rank}: {reason}", hint)
        console.say(f"{state}: {reason}{f' ({hint})' if hint else ''}")
        return 1
    finally:
        engine.remove_nvme_folder(config, launch, output_dir)
    return 0


def train(
    config: RunConfig,
    launch: Launch,
    plan: BatchPlan,
    data: TaskData,
    initial: InitialWeights,
    checkpoint: tuple[Path, dict[str, Any]] | None,
    record: RunWriter | None,
    output_dir: Path,
    console: Console,
    started: float,
) -> None:
    """The loop every strategy shares."""
    import torch
    from accelerate.utils import set_seed
    from transformers import get_scheduler

    from study import engine
    from study.checkpoint import load_checkpoint, save_checkpoint
    from study.evaluation import evaluate
    from study.measure import WARMUP_STEPS, Meters
    from study.steplog import StepLog
    from study.summary import gather_measurements, memory_document, summarize
    from study.tasks.blocks import sample_hashes, step_samples
    from study.tasks.models import load_initial_model

    accelerator = engine.make_accelerator(config, launch, plan, output_dir)
    accelerator.wait_for_everyone()
    console.log_to(output_dir / "log.txt")
    set_seed(config.seed)

    total_steps = config.total_steps(len(data.train))
    first_step = checkpoint[1]["step"] if checkpoint else 0
    meters = Meters(accelerator.device, watched_step=min(first_step + WARMUP_STEPS + 1, total_steps))
    model = load_initial_model(config, initial)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    warmup_steps = round(config.warmup_ratio * total_steps)
    schedule = get_scheduler(config.lr_scheduler_type, optimizer, warmup_steps, total_steps)
    engine_record = engine.audit(accelerator, model, optimizer, config, launch, plan, output_dir)
    if record is not None:
        floor = dataclasses.asdict(data.floor) if data.floor else None
        provenance = {"initial_weights_sha256": initial.sha256, "data": data.source, "floor": floor, "trainer": "study"}
        record.write("engine.json", engine_record | provenance)
    accelerator.init_trackers("zero-study", config=config.to_dict())
    if checkpoint:
        load_checkpoint(accelerator, schedule, *checkpoint)

    log = StepLog(accelerator, record, tokens_per_step=config.global_batch_size * config.seq_length)
    progress = console.progress(total_steps, first_step)
    evaluation: dict[str, float] = {}
    loop_started = time.time()
    model.train()
    meters.start(model, optimizer)
    for step in range(first_step + 1, total_steps + 1):
        samples = step_samples(config, len(data.train), step - 1)
        micro_batches = [data.train.__getitems__(part) for part in plan.micro_batches(samples, launch.rank)]
        samples_hash = sum(sum(sample_hashes(batch)) for batch in micro_batches)
        learning_rate = schedule.get_last_lr()[0]
        with meters.step(step):
            loss, grad_norm = train_step(accelerator, model, optimizer, schedule, micro_batches, config.max_grad_norm)
        log.add(step, loss, learning_rate, grad_norm, samples_hash)

        evaluates = step == total_steps or (config.eval_steps and step % config.eval_steps == 0)
        saves = config.checkpointing_steps and step % config.checkpointing_steps == 0
        if evaluates or saves or step % config.logging_steps == 0:
            with meters.paused():
                log.flush(dict(meters.flush()))
                progress.show(step, log.last_loss, log.tokens_per_s, meters.peak_gib())
                accelerator.log({"loss": log.last_loss, "lr": learning_rate}, step=step)
        if evaluates:
            with meters.interruption("eval"):
                evaluation = evaluate(accelerator, model, config.task, data.eval, plan.per_device_train_batch_size)
            if record is not None:
                accelerator.log(evaluation, step=step)
                record.append("evals.jsonl", {"step": step, **evaluation})
        if saves:
            with meters.paused():
                save_checkpoint(accelerator, schedule, config, launch, output_dir, step)
    meters.finish()
    progress.close()

    timing = {"runtime_s": time.time() - loop_started, "startup_s": loop_started - started}
    ranks = gather_measurements(accelerator, meters)
    engine.check_swapped(launch.strategy, engine.nvme_folder(config, output_dir))
    if record is not None:
        record.write("memory.json", memory_document(ranks))
        record.write("traffic.json", meters.traffic)
        record.write("summary.json", summarize(accelerator, config, ranks, meters.traffic, log, evaluation, timing))
        record.close("ok")
        figures = {"loss": log.last_loss, **evaluation}
        console.say(f"done: {', '.join(f'{name} {value:.4f}' for name, value in figures.items())} -> {output_dir}")
    accelerator.wait_for_everyone()
    engine.tear_down(accelerator, model)


def train_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    micro_batches: list[dict[str, torch.Tensor]],
    max_grad_norm: float,
) -> tuple[torch.Tensor, Any]:
    """One optimizer step over this rank's micro-batches; returns this rank's mean loss and the gradient norm."""
    import torch
    from accelerate.utils import send_to_device

    losses = []
    grad_norm = None
    for micro_batch in micro_batches:
        with accelerator.accumulate(model):
            loss = model(**send_to_device(micro_batch, accelerator.device)).loss
            # Scales by the accumulation steps where the engine does not; doing it here too would be once too often.
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                # An engine that clips by itself ignores the argument and only reports the norm.
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    if not accelerator.optimizer_step_was_skipped:
        schedule.step()
    return torch.stack(losses).mean(), grad_norm


if __name__ == "__main__":
    exit_status = main()
    # Everything is closed by now. Leaving without the interpreter's own teardown keeps threads of the engine's native
    # libraries from aborting a run that has finished ("terminate called without an active exception").
    os._exit(exit_status)
