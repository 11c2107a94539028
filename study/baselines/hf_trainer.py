"""transformers' Trainer with the study's samples, evaluation and record hooked in; its loop is untouched."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from study.baselines import refuse_what_only_the_study_does
from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.launched import Launch
from study.engine import setup as engine
from study.engine.audit import audit
from study.engine.optimizer import SkippedSteps
from study.metrics import Meters
from study.run.exit import exit_status_of
from study.run.open import OpenRun, open_run
from study.run.steps import StepLog, evaluate


class RecordedTrainer(Trainer):
    """Takes each step's samples in the study's order, and keeps what the step leaves behind."""

    # Of the step that is under way.
    step_losses: list[torch.Tensor]
    step_batches: list[dict[str, torch.Tensor]]
    step_grad_norm: Any

    def __init__(self, run: OpenRun, model: PreTrainedModel, arguments: TrainingArguments, meters: Meters):
        self.run, self.meters = run, meters
        config = run.config
        # One group: by default the Trainer takes biases and norms out of the weight decay, which the study does not.
        adamw = {"params": list(model.parameters()), "lr": config.learning_rate, "weight_decay": config.weight_decay}
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=run.data.train,
            optimizer_cls_and_kwargs=(torch.optim.AdamW, adamw | {"fused": True}),
            callbacks=[StepRecorder(self)],
        )
        self.remove_callback(PrinterCallback)
        self.log_rows = StepLog(run, self.accelerator)
        self.evaluation: dict[str, float | None] = {}

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This rank's micro-batches of all steps, as one epoch."""
        train = self.run.data.train
        micro_batches = [part for step in self.run.step_numbers for part in self.run.indices(step)]
        pinned = self.args.dataloader_pin_memory and torch.cuda.is_available()
        return DataLoader(train, batch_sampler=micro_batches, collate_fn=lambda batch: batch, pin_memory=pinned)

    def create_optimizer(self, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*arguments, **options)
        # A fused step leaves itself out where gradients are not finite, and the Trainer's schedule would not know:
        # without this torch's GradScaler does not call it then.
        optimizer._step_supports_amp_scaling = False
        return optimizer

    def get_batch_samples(self, *arguments: Any) -> tuple[list[Any], Any]:
        """A step's batches move before its first forward pass, as the Trainer's own loader does it."""
        self.step_batches, items = super().get_batch_samples(*arguments)
        return [send_to_device(batch, self.args.device) for batch in self.step_batches], items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.step_losses.append(loss)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self.step_grad_norm = super()._get_grad_norm(model, grad_norm)
        return self.step_grad_norm


class StepRecorder(TrainerCallback):
    """The study's meters and rows, at the moments where study/train.py has them."""

    def __init__(self, trainer: RecordedTrainer):
        self.trainer = trainer
        self.run = trainer.run
        self.progress: Any = None
        self.metered: AbstractContextManager[None] | None = None
        self.learning_rate = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, run = self.trainer, self.run
        plan = run.plan
        if run.launch.strategy.deepspeed is None:
            # The Trainer accumulates by itself and tells Accelerate 1, which is what is read back there.
            plan = dataclasses.replace(plan, gradient_accumulation_steps=1)
        live = audit(run, trainer.accelerator, trainer.model_wrapped, trainer.optimizer, plan)
        run.write_engine(live | {"gradient_accumulation_steps": args.gradient_accumulation_steps})
        self.progress = run.console.progress(run.total_steps, 0)
        engine.forget_first_step(trainer.model_wrapped)
        # Called by no other hook before the first step, and DeepSpeed's engine is there by now.
        self.skips = SkippedSteps(trainer.accelerator)
        run.loop_starts()
        trainer.model_wrapped.train()
        trainer.meters.start(trainer.model_wrapped, trainer.optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.learning_rate = objects["lr_scheduler"].get_last_lr()[0]
        self.trainer.step_losses, self.trainer.step_grad_norm = [], None
        self.metered = self.trainer.meters.step(state.global_step + 1)
        self.metered.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, run, step = self.trainer, self.run, state.global_step
        assert self.metered is not None
        self.metered.__exit__(None, None, None)
        log = trainer.log_rows
        # The Trainer's losses are shares of the step's mean.
        loss = torch.stack(trainer.step_losses).sum()
        skipped = self.skips.last_was_skipped()
        log.add(step, loss, self.learning_rate, trainer.step_grad_norm, trainer.step_batches, skipped)
        if run.flushes_after(step):
            with trainer.meters.paused():
                log.flush(dict(trainer.meters.flush()))
                self.progress.show(step, log.last_loss, log.tokens_per_s, trainer.meters.peak_gib())
        if run.evaluates_after(step):
            with trainer.meters.interruption("eval"):
                trainer.evaluation = evaluate(run, trainer.accelerator, trainer.model_wrapped)
            run.write_evaluation(step, trainer.evaluation)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All steps are one epoch, and they are done."""
        self.trainer.meters.finish()
        self.progress.close()


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
