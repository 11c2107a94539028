"""The launched script: the loop every strategy shares, readable top to bottom. It knows nothing of ZeRO.

    accelerate launch --config_file accelerate_configs/zero3.yaml study/train.py

Which strategy runs is decided by the launched file alone, so the loop below is provably the same for every arm.
What stands around it (checking the request, the record, failures) is study/run/session.py.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from study.run.session import Session, gather_measurements, run_session

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def train(session: Session) -> None:
    import torch
    from accelerate.utils import set_seed
    from transformers import get_scheduler

    from study.measure import WARMUP_STEPS, Meters
    from study.models.initial import load_initial_model
    from study.run import engine
    from study.run.audit import audit, audit_end
    from study.run.checkpoint import load_checkpoint, save_checkpoint
    from study.run.evaluation import evaluate
    from study.run.steps import StepLog
    from study.tasks.blocks import sample_hashes, step_samples

    config, launch, plan, data = session.config, session.launch, session.plan, session.data
    first_step, total_steps = session.first_step, session.total_steps
    accelerator = engine.make_accelerator(config, launch, plan, session.output_dir, session.swap_folder)
    accelerator.wait_for_everyone()
    session.console.log_to(session.output_dir / "log.txt")
    set_seed(config.seed)

    # One step after the warm-up is watched: what it sends and holds is counted, and its time is not.
    meters = Meters(
        accelerator.device, watched_step=min(first_step + WARMUP_STEPS + 1, total_steps),
        profiled_steps=session.profiled_steps, records_profile=launch.is_main,
    )  # fmt: skip
    model = load_initial_model(config, session.initial)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    model, optimizer = engine.prepare(accelerator, model, optimizer, config)
    schedule = get_scheduler(config.lr_scheduler_type, optimizer, round(config.warmup_ratio * total_steps), total_steps)
    session.write_engine(audit(accelerator, model, optimizer, config, launch, plan, session.swap_folder))
    accelerator.init_trackers("zero-study", config=config.scalars())
    if session.checkpoint:
        load_checkpoint(accelerator, schedule, *session.checkpoint)

    log = StepLog(accelerator, session.record, config.global_batch_size * config.seq_length, launch.virtual)
    progress = session.console.progress(total_steps, first_step)
    evaluation: dict[str, float | None] = {}
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

        if session.flushes_after(step):
            with meters.paused():
                log.flush(dict(meters.flush()))
                progress.show(step, log.last_loss, log.tokens_per_s, meters.peak_gib())
                accelerator.log({"loss": log.last_loss, "lr": learning_rate}, step=step)
        if session.evaluates_after(step):
            with meters.interruption("eval"):
                evaluation = evaluate(accelerator, model, config.task, data.eval, plan.per_device_train_batch_size)
                session.write_evaluation(step, evaluation)
                accelerator.log(evaluation, step=step)
        if session.saves_after(step):
            with meters.paused():
                save_checkpoint(accelerator, schedule, config, launch, session.output_dir, step)
    meters.finish()
    progress.close()

    audit_end(accelerator, model, config, launch.strategy, session.swap_folder)
    ranks = gather_measurements(accelerator, meters, launch.virtual)
    session.finish(accelerator, ranks, meters.traffic, log, evaluation, loop_started, meters.profile)
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
    exit_status = run_session("study", train)
    # Everything is closed by now. Leaving without the interpreter's own teardown keeps threads of the engine's native
    # libraries from aborting a run that has finished ("terminate called without an active exception").
    os._exit(exit_status)
