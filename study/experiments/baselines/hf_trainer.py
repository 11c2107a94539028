"""The same run with transformers' Trainer: its loop, accumulation and engine setup, with the study's record.

accelerate launch --config_file accelerate_configs/zero3.yaml study/experiments/baselines/hf_trainer.py
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from study.config import errors, flags, launch_context
from study.experiments.baselines import check_baseline_flags
from study.run.console import run_for_exit_status
from study.run.open import open_run


def check_request(config: flags.RunConfig, launch: launch_context.Launch) -> None:
    """Raise UserError for flags and strategies that the Trainer baseline does not support."""
    check_baseline_flags("hf_trainer", config)
    if config.precision == "fp16" and launch.strategy.name == "zero0":
        raise errors.UserError(
            "hf_trainer cannot detect the steps that DeepSpeed's stage 0 skips under fp16",
            "use study/train.py, or bf16",
        )
    why = None
    if launch.strategy.group is not None:
        why = "its ranks share samples, but hf_trainer gives each rank different ones"
    elif launch.strategy.is_fsdp:
        why = "Accelerate's FSDP2 needs the setup in study/engine/setup.py"
    if why is not None:
        raise errors.UserError(
            f"hf_trainer does not support {launch.strategy.name}: {why}",
            "use study/train.py, or launch hf_trainer with another config",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with the Trainer and write the record; return the exit status."""
    with open_run("hf_trainer", arguments, check_request) as run:
        import torch
        from transformers import set_seed

        from study.engine import setup as engine
        from study.engine.audit import audit_end, check_compute_dtype
        from study.experiments.baselines.recorded_trainer import RecordedTrainer, training_arguments
        from study.metrics import Meters
        from study.workloads.initial import load_initial_model

        config, launch = run.config, run.launch
        run.begin()

        engine.cap_device_memory(config, launch)
        training = training_arguments(run)
        if launch.strategy.deepspeed is not None and launch.world_size > 1 and not torch.cuda.is_available():
            import deepspeed

            # The Trainer does this on a GPU only; without it zero.Init uses a world size of 1.
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        training.distributed_state.wait_for_everyone()
        run.redirect_output_to_log()
        set_seed(config.seed)
        meters = Meters(
            training.device,
            run.watched_step,
            run.warmup_steps,
            profiled_steps=run.profiled_steps,
            records_profile=launch.is_main,
        )
        model = load_initial_model(config, run.context.initial)
        check_compute_dtype(model, config)
        # The model's forward accepts **kwargs, so the Trainer assumes that its loss is divided by the items of the
        # whole step. BERT does not do that, and its loss would grow with accumulation and ranks; this selects means.
        model.accepts_loss_kwargs = False
        trainer = RecordedTrainer(run, model, training, meters)
        engine.correct_precision(trainer.accelerator, config)
        trainer.train()

        accelerator, wrapped = trainer.accelerator, trainer.model_wrapped
        log = trainer.log_rows
        audit_end(run, accelerator, log.skipped_steps, log.last_step - run.first_step)
        run.finish(accelerator, meters, log, trainer.evaluation)
        accelerator.wait_for_everyone()
        engine.tear_down(accelerator, wrapped)
    return run.exit_status


if __name__ == "__main__":
    # As in study/train.py: native threads must not abort a run that has finished.
    os._exit(run_for_exit_status(main))
