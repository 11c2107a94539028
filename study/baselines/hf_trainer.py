"""The same run through transformers' Trainer: its loop, its accumulation and its engine set-up, the study's record.

accelerate launch --config_file accelerate_configs/zero3.yaml study/baselines/hf_trainer.py
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from study.baselines import refuse_what_only_the_study_does
from study.errors import UserError
from study.run.session import Session, run_session
from study.spec.config import RunConfig
from study.spec.strategies import Launch

if TYPE_CHECKING:
    from transformers import TrainingArguments


def refuse(config: RunConfig, launch: Launch) -> None:
    refuse_what_only_the_study_does("hf_trainer", config)
    if launch.strategy.name == "fsdp2":
        raise UserError(
            "hf_trainer does not run fsdp2: what Accelerate's FSDP2 needs around it is in study/run/engine.py",
            "use study/train.py, or launch hf_trainer with another file",
        )


def training_arguments(session: Session) -> TrainingArguments:
    """The RunConfig in the Trainer's words; what a user would leave alone is left alone."""
    import torch
    from transformers import TrainingArguments

    from study.run import engine

    config, launch, plan = session.config, session.launch, session.plan
    deepspeed = None
    if launch.strategy.deepspeed is not None:
        # As an argument: the engine's plugin is built while TrainingArguments is, and never again.
        deepspeed = engine.deepspeed_settings(launch.strategy, config, plan, session.swap_folder)
    # DeepSpeed's torch_autocast, in its settings, is what `bf16` means there.
    autocast = config.precision == "bf16" and deepspeed is None
    arguments = TrainingArguments(
        output_dir=str(session.output_dir),
        # Without it the Trainer looks for a GPU backend, finds none, and every rank believes that it is alone.
        use_cpu=not torch.cuda.is_available(),
        deepspeed=deepspeed,
        bf16=autocast or config.precision == "bf16-engine",
        fp16=config.precision == "fp16",
        optim="adamw_torch_fused",
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=round(config.warmup_ratio * session.total_steps),
        max_grad_norm=config.max_grad_norm,
        max_steps=session.total_steps,
        per_device_train_batch_size=plan.per_device_train_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        torch_compile=config.torch_compile,
        # By default the Trainer turns TF32 on where it compiles; no other loop here multiplies fp32 that way.
        tf32=False,
        seed=config.seed,
        # Every parameter is used; by default the Trainer walks the graph for unused ones in every step.
        ddp_find_unused_parameters=False,
        # By default a NaN loss is replaced by the mean of earlier ones; here it ends the run.
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


def train(session: Session) -> None:
    import torch
    from transformers import set_seed

    from study.baselines.recorded_trainer import RecordedTrainer
    from study.measure import WARMUP_STEPS, Meters
    from study.models.initial import load_initial_model
    from study.run import engine
    from study.run.audit import check_compute_dtype

    config, launch = session.config, session.launch
    if config.device_memory_cap_gib is not None:
        engine.cap_device_memory(config.device_memory_cap_gib, launch.local_rank)
    arguments = training_arguments(session)
    if launch.strategy.deepspeed is not None and launch.world_size > 1 and not torch.cuda.is_available():
        import deepspeed

        # On a GPU the Trainer does this; left out, zero.Init sees a world of one.
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    arguments.distributed_state.wait_for_everyone()
    session.console.log_to(session.output_dir / "log.txt")
    set_seed(config.seed)
    meters = Meters(
        arguments.device, watched_step=min(WARMUP_STEPS + 1, session.total_steps),
        profiled_steps=session.profiled_steps, records_profile=launch.is_main,
    )  # fmt: skip
    model = load_initial_model(config, session.initial)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not config.torch_compile:
        # As in study/run/engine.py: a hook would cut the compiled graph in pieces.
        check_compute_dtype(model, config.precision)
    # The model's forward takes **kwargs, so the Trainer believes that it divides its loss by the items of the whole
    # step. BERT does not, and its loss would grow with accumulation steps and ranks; this asks for plain means.
    model.accepts_loss_kwargs = False
    trainer = RecordedTrainer(session, model, arguments, meters)
    trainer.train()
    trainer.finish()
    trainer.accelerator.wait_for_everyone()
    engine.tear_down(trainer.accelerator, trainer.model_wrapped)


if __name__ == "__main__":
    exit_status = run_session("hf_trainer", train, refuse=refuse)
    # As study/train.py does: the engine's native threads must not abort a run that has finished.
    os._exit(exit_status)
