"""The same run with a bare PyTorch loop and no measurement inside the steps: an upper bound for speed.

    accelerate launch --config_file accelerate_configs/ddp.yaml study/experiments/baselines/bare_loop.py

It supports a single process and DDP. Accelerate only sets up the processes and gathers figures between steps: model,
optimizer and schedule are not prepared, and no step calls Accelerate.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from study.config import errors, flags, launch_context
from study.experiments.baselines import check_baseline_flags
from study.run.console import run_for_exit_status
from study.run.open import open_run

if TYPE_CHECKING:
    import torch


def check_request(config: flags.RunConfig, launch: launch_context.Launch) -> None:
    """Raise UserError for flags and strategies that the bare loop does not support."""
    check_baseline_flags("bare_loop", config)
    if config.profile_steps:
        raise errors.UserError(
            "bare_loop does not support --profile_steps, because it does not measure inside the steps",
            "leave --profile_steps out, or use study/train.py or study/experiments/baselines/hf_trainer.py",
        )
    if launch.strategy.name not in ("single", "ddp"):
        raise errors.UserError(
            f"bare_loop supports only single and ddp, not {launch.strategy.name}",
            "launch it with accelerate_configs/single.yaml or ddp.yaml",
        )


def synchronized_time(device: torch.device) -> float:
    """Wall-clock time in seconds, after the device has finished its queued work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> int:  # noqa: C901, PLR0914, PLR0915
    """Train with the bare loop and write the record; return the exit status."""
    with open_run("bare_loop", arguments, check_request) as run:
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from transformers import get_scheduler, set_seed

        from study.engine import setup as engine
        from study.engine.audit import audit, check_compute_dtype
        from study.engine.optimizer import GRAD_SCALER, SkippedSteps
        from study.metrics import Meters
        from study.metrics.clock import STEPS_BETWEEN_EVALUATIONS
        from study.run.steps import StepLog, evaluate
        from study.workloads.initial import load_initial_model

        config, launch = run.config, run.launch
        run.begin()

        accelerator = engine.make_accelerator(run)
        device = accelerator.device
        accelerator.wait_for_everyone()
        run.redirect_output_to_log()
        set_seed(config.seed)
        # Only peaks are read, between steps: torch and Linux track them at no cost to the loop.
        meters = Meters(device, None, run.warmup_steps)

        model: Any = load_initial_model(config, run.context.initial).to(device)
        check_compute_dtype(model, config)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        if launch.world_size > 1:
            model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        # The audit precedes compilation: to inspect a compiled module, Accelerate would remove its DDP wrapper.
        run.write_engine(audit(run, accelerator, model, optimizer))
        if config.torch_compile:
            model = torch.compile(model)
        warmup_steps = round(config.warmup_ratio * run.total_steps)
        schedule = get_scheduler(config.lr_scheduler_type, optimizer, warmup_steps, run.total_steps)
        scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16", **GRAD_SCALER)
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
        autocast = torch.autocast(device.type, dtype=half, enabled=half is not None)

        log, skips = StepLog(run.context, accelerator), SkippedSteps(accelerator, scaler)
        progress = run.console.progress(run.total_steps, 0)
        evaluation: dict[str, float | None] = {}
        rows: list[tuple[int, Any, float, Any, list[Any], bool]] = []
        # The study's timing window excludes the warm-up and the instrumented step after it.
        uncounted = run.warmup_steps + 1
        started = 0.0
        model.train()
        meters.memory.enter_phase("steady")
        for step, micro_batches in run.steps():
            learning_rate = schedule.get_last_lr()[0]
            losses = []
            for number, micro_batch in enumerate(micro_batches, start=1):
                batch = {name: tensor.to(device, non_blocking=True) for name, tensor in micro_batch.items()}
                if launch.world_size > 1:
                    model.require_backward_grad_sync = number == len(micro_batches)
                with autocast:
                    loss = model(**batch).loss
                scaler.scale(loss / len(micro_batches)).backward()
                losses.append(loss.detach())
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped = skips.last_was_skipped()
            if not skipped:
                schedule.step()
            rows.append((step, torch.stack(losses).mean(), learning_rate, grad_norm, micro_batches, skipped))

            if step == uncounted:
                started = synchronized_time(device)
            if run.flushes_after(step):
                if (counted := min(len(rows), step - uncounted)) > 0:
                    meters.clock.window_s += synchronized_time(device) - started
                    meters.clock.window_steps += counted
                for row in rows:
                    log.add(*row)
                rows.clear()
                log.flush({})
                progress.show(step, log.last_loss, None, meters.peak_gib())
                if run.evaluates_after(step):
                    with autocast, meters.memory.phase("eval"):
                        evaluation = evaluate(run.context, accelerator, model)
                    run.write_evaluation(step, evaluation)
                    # As in the study's clock, which excludes the step after an evaluation.
                    if step - uncounted >= STEPS_BETWEEN_EVALUATIONS:
                        uncounted = step + 1
                started = synchronized_time(device)
        progress.close()

        run.finish(accelerator, meters, log, evaluation)
        accelerator.wait_for_everyone()
        engine.tear_down(accelerator, model)
    return run.exit_status


if __name__ == "__main__":
    # As in study/train.py: native threads must not abort a run that has finished.
    os._exit(run_for_exit_status(main))
