"""The launched script: one run from its request to its end, readable top to bottom, and independent of ZeRO.

    accelerate launch --config_file accelerate_configs/zero3.yaml study/train.py

Only the launched file decides which strategy runs, so the loop below is the same for every strategy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from study.run.console import run_for_exit_status
from study.run.open import open_run

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def main(arguments: Sequence[str] | None = None) -> int:  # noqa: PLR0914, PLR0915
    """Return the exit status: 0 done, 1 the run failed, 2 the request is wrong."""
    # A wrong request ends here with one line, and nothing is written. Later errors are in the record.
    with open_run("study", arguments) as run:
        # Imported here, so that a wrong flag is reported before the seconds that torch's import takes.
        from accelerate.utils import set_seed
        from transformers import get_scheduler

        from study.engine import setup as engine
        from study.engine.audit import audit, audit_end
        from study.engine.optimizer import SkippedSteps, make_optimizer
        from study.metrics import Meters
        from study.run.checkpoint import save_checkpoint
        from study.run.resume import load_checkpoint
        from study.run.steps import StepLog, evaluate
        from study.workloads.initial import load_initial_model

        config, launch = run.config, run.launch
        run.begin()

        accelerator = engine.make_accelerator(run)
        accelerator.wait_for_everyone()
        run.redirect_output_to_log()
        set_seed(config.seed)
        meters = Meters(
            accelerator.device,
            run.watched_step,
            run.warmup_steps,
            profiled_steps=run.profiled_steps,
            records_profile=launch.is_main,
            ranks_per_machine=launch.ranks_per_machine,
        )

        model = load_initial_model(config, run.context.initial, launch.strategy)
        model, optimizer = engine.prepare(accelerator, model, make_optimizer(model, config), config)
        warmup_steps = round(config.warmup_ratio * run.total_steps)
        schedule = get_scheduler(config.lr_scheduler_type, optimizer, warmup_steps, run.total_steps)
        run.write_engine(audit(run, accelerator, model, optimizer))
        accelerator.init_trackers("zero-study", config=config.tracker_config())
        if run.checkpoint:
            with meters.memory.phase("load"):
                load_checkpoint(run.context, accelerator, schedule)

        log, skips = StepLog(run.context, accelerator), SkippedSteps(accelerator)
        progress = run.console.progress(run.total_steps, run.first_step)
        evaluation: dict[str, float | None] = {}
        model.train()
        meters.start(model, optimizer)
        for step, micro_batches in run.steps():
            learning_rate = schedule.get_last_lr()[0]
            with meters.step(step):
                loss, grad_norm = train_step(accelerator, model, optimizer, micro_batches, config.max_grad_norm)
                # The schedule does not advance if the engine skipped the step because its gradients were not finite.
                skipped = skips.last_was_skipped()
                if not skipped:
                    schedule.step()
            log.add(step, loss, learning_rate, grad_norm, micro_batches, skipped)

            if run.flushes_after(step):
                with meters.paused():
                    log.flush(dict(meters.flush()))
                    progress.show(step, log.last_loss, log.tokens_per_s, meters.peak_gib())
                    accelerator.log({"loss": log.last_loss, "lr": learning_rate}, step=step)
            if run.evaluates_after(step):
                with meters.untimed_phase("eval"):
                    evaluation = evaluate(run.context, accelerator, model)
                    run.write_evaluation(step, evaluation)
                    accelerator.log(evaluation, step=step)
            if run.saves_after(step):
                with meters.paused(), meters.memory.phase("save"):
                    save_checkpoint(run.context, accelerator, schedule, step)
        meters.finish()
        progress.close()

        audit_end(run, accelerator, log.skipped_steps, log.last_step - run.first_step)
        run.finish(accelerator, meters, log, evaluation)
        accelerator.wait_for_everyone()
        engine.tear_down(accelerator, model)
    return run.exit_status


def train_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[dict[str, torch.Tensor]],
    max_grad_norm: float,
) -> tuple[torch.Tensor, Any]:
    """Train on one step's micro-batches; return this rank's mean loss and the gradient norm."""
    import torch

    from study.engine.sequence_parallel import shard_sequence

    losses = []
    grad_norm = None
    for micro_batch in micro_batches:
        with accelerator.accumulate(model), shard_sequence(accelerator, micro_batch) as inputs:
            loss = model(**inputs).loss
            # Accelerate divides the loss by the accumulation steps, unless the engine does.
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                # DeepSpeed clips by itself. Accelerate would convert its norm to a number, which waits for the device.
                if wrapped := getattr(accelerator, "deepspeed_engine_wrapped", None):
                    grad_norm = wrapped.engine.get_global_grad_norm()
                else:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).mean(), grad_norm


if __name__ == "__main__":
    # The run has closed everything. The interpreter's teardown is skipped, because threads of the engine's native
    # libraries sometimes abort a finished run in it ("terminate called without an active exception").
    os._exit(run_for_exit_status(main))
