"""The same run through transformers' Trainer: its loop, its accumulation and its engine set-up, the study's record.

accelerate launch --config_file accelerate_configs/zero3.yaml study/baselines/hf_trainer.py
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from study.baselines import refuse_what_only_the_study_does
from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.launched import Launch
from study.run.exit import exit_status_of
from study.run.open import OpenRun, open_run

if TYPE_CHECKING:
    from transformers import TrainingArguments


def refuse(config: RunConfig, launch: Launch) -> None:
    refuse_what_only_the_study_does("hf_trainer", config)
    if config.precision == "fp16" and launch.strategy.name == "zero0":
        raise UserError(
            "hf_trainer cannot tell which steps DeepSpeed's stage 0 skips under fp16", "use study/train.py, or bf16"
        )
    if launch.strategy.team is not None:
        raise UserError(
            f"hf_trainer gives each rank its own samples, and those of {launch.strategy.name} share them",
            "use study/train.py, or launch hf_trainer with another file",
        )
    if launch.strategy.is_fsdp:
        raise UserError(
            f"hf_trainer does not run {launch.strategy.name}: what Accelerate's FSDP2 needs around it is in"
            " study/engine/setup.py",
            "use study/train.py, or launch hf_trainer with another file",
        )


def training_arguments(run: OpenRun) -> TrainingArguments:
    """The RunConfig in the Trainer's words; what a user would leave alone is left alone."""
    import torch
    from transformers import TrainingArguments

    from study.engine import setup as engine

    config, launch, plan = run.config, run.launch, run.plan
    deepspeed = None
    if launch.strategy.deepspeed is not None:
        # As an argument: the engine's plugin is built while TrainingArguments is, and never again.
        deepspeed = engine.deepspeed_settings(run)
    # DeepSpeed's torch_autocast, in its settings, is what `bf16` means there.
    mixed = "no" if config.precision == "bf16" and deepspeed else config.precision.removesuffix("-engine")
    arguments = TrainingArguments(
        output_dir=str(run.output_dir),
        # Without it the Trainer looks for a GPU backend, finds none, and every rank believes that it is alone.
        use_cpu=not torch.cuda.is_available(),
        deepspeed=deepspeed,
        bf16=mixed == "bf16",
        fp16=mixed == "fp16",
        optim="adamw_torch_fused",
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=round(config.warmup_ratio * run.total_steps),
        max_grad_norm=config.max_grad_norm,
        max_steps=run.total_steps,
        per_device_train_batch_size=plan.per_device_train_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        torch_compile=config.torch_compile,
        # By default the Trainer turns TF32 on where it compiles, and so does Accelerate after it.
        tf32=False,
        seed=config.seed,
        # Every parameter is used; by default the Trainer walks the graph for unused ones in every step.
        ddp_find_unused_parameters=False,
        # By default the Trainer waits for each loss to see whether it is a number. The record sees that later.
        logging_nan_inf_filter=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # A single process that sees several GPUs would otherwise train with nn.DataParallel on all of them.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def main(arguments: Sequence[str] | None = None) -> int:
    with open_run("hf_trainer", arguments, refuse) as run:
        import torch
        from transformers import set_seed

        from study.baselines.recorded_trainer import RecordedTrainer
        from study.engine import setup as engine
        from study.engine.audit import audit_end, check_compute_dtype
        from study.metrics import Meters
        from study.workloads import load_data
        from study.workloads.initial import load_initial_model, materialize_initial_weights

        config, launch = run.config, run.launch
        data = load_data(config, run.cache)
        initial = materialize_initial_weights(config, run.cache)
        run.begin(data, initial)

        engine.cap_device_memory(config, launch)
        training = training_arguments(run)
        if launch.strategy.deepspeed is not None and launch.world_size > 1 and not torch.cuda.is_available():
            import deepspeed

            # On a GPU the Trainer does this; left out, zero.Init sees a world of one.
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        training.distributed_state.wait_for_everyone()
        run.keep_log()
        set_seed(config.seed)
        meters = Meters(
            training.device,
            run.watched_step,
            run.warmup_steps,
            profiled_steps=run.profiled_steps,
            records_profile=launch.is_main,
        )
        model = load_initial_model(config, initial)
        check_compute_dtype(model, config)
        # The model's forward takes **kwargs, so the Trainer believes that it divides its loss by the items of the whole
        # step. BERT does not, and its loss would grow with accumulation steps and ranks; this asks for plain means.
        model.accepts_loss_kwargs = False
        trainer = RecordedTrainer(run, model, training, meters)
        engine.hold_to_precision(trainer.accelerator, config)
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
    os._exit(exit_status_of(main))
