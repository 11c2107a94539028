"""transformers' Trainer with hooks for the study's samples, evaluation and record; its loop is unchanged."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from study.config.precisions import computing_type
from study.engine import setup as engine
from study.engine.audit import audit
from study.engine.optimizer import SkippedSteps
from study.metrics import Meters
from study.run.open import OpenRun
from study.run.steps import StepLog, evaluate


def training_arguments(run: OpenRun) -> TrainingArguments:
    """Translate the RunConfig to TrainingArguments; all other settings keep the Trainer's defaults."""
    config, launch, plan = run.config, run.launch, run.plan
    # Passed as an argument, because TrainingArguments creates the plugin only when it is constructed.
    deepspeed = engine.deepspeed_settings(run) if launch.strategy.deepspeed is not None else None
    # bf16 is torch_autocast in DeepSpeed's settings.
    mixed = "no" if config.precision == "bf16" and deepspeed else computing_type(config.precision)
    arguments = TrainingArguments(
        output_dir=str(run.output_dir),
        # Without it the Trainer finds no GPU backend, and every rank runs as a single process.
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
        # By default the Trainer and Accelerate enable TF32 if they compile the model.
        tf32=False,
        seed=config.seed,
        # Every parameter is used; by default the Trainer searches the graph for unused ones in every step.
        ddp_find_unused_parameters=False,
        # By default the Trainer synchronizes for each loss to check that it is finite. The record checks that later.
        logging_nan_inf_filter=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # Otherwise a single process with several visible GPUs would use nn.DataParallel on all of them.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


class RecordedTrainer(Trainer):
    """Trainer on the study's samples in their order; it stores the current step's losses, batches and norm."""

    step_losses: list[torch.Tensor]
    step_batches: list[dict[str, torch.Tensor]]
    step_grad_norm: Any

    def __init__(self, run: OpenRun, model: PreTrainedModel, arguments: TrainingArguments, meters: Meters):
        self.run, self.meters = run, meters
        config = run.config
        # One group: by default the Trainer excludes biases and norms from weight decay, unlike the study.
        adamw = {"params": list(model.parameters()), "lr": config.learning_rate, "weight_decay": config.weight_decay}
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=run.context.data.train,
            optimizer_cls_and_kwargs=(torch.optim.AdamW, adamw | {"fused": True}),
            callbacks=[StepRecorder(self)],
        )
        self.remove_callback(PrinterCallback)
        self.log_rows = StepLog(run.context, self.accelerator)
        self.evaluation: dict[str, float | None] = {}

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's micro-batches of all steps as one epoch."""
        train = self.run.context.data.train
        micro_batches = [part for step in self.run.step_numbers for part in self.run.indices(step)]
        pinned = self.args.dataloader_pin_memory and torch.cuda.is_available()
        return DataLoader(train, batch_sampler=micro_batches, collate_fn=lambda batch: batch, pin_memory=pinned)

    def create_optimizer(self, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
        """Create the optimizer, with skipped fp16 steps visible to the Trainer."""
        optimizer = super().create_optimizer(*arguments, **options)
        # A fused step skips an update with non-finite gradients itself, and the Trainer's schedule does not notice.
        # Without this flag torch's GradScaler skips the call instead.
        optimizer._step_supports_amp_scaling = False
        return optimizer

    def get_batch_samples(self, *arguments: Any) -> tuple[list[Any], Any]:
        """Move a step's batches before its first forward pass, as the Trainer's own loader does."""
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
    """Callbacks that run the study's meters and write its rows at the same points as study/train.py."""

    learning_rate: float
    metered: AbstractContextManager[None]

    def __init__(self, trainer: RecordedTrainer):
        self.trainer, self.run = trainer, trainer.run

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Audit the live engine, then start the clock and the meters."""
        trainer, run, plan = self.trainer, self.run, self.run.plan
        if run.launch.strategy.deepspeed is None:
            # The Trainer accumulates itself and configures Accelerate with 1, which the audit reads.
            plan = dataclasses.replace(plan, gradient_accumulation_steps=1)
        live = audit(run, trainer.accelerator, trainer.model_wrapped, trainer.optimizer, plan)
        run.write_engine(live | {"gradient_accumulation_steps": args.gradient_accumulation_steps})
        self.progress = run.console.progress(run.total_steps, 0)
        engine.reset_initial_optimizer_step(trainer.model_wrapped)
        # This is the last hook before the first step, and DeepSpeed's engine exists by now.
        self.skips = SkippedSteps(trainer.accelerator)
        run.start_clock()
        trainer.model_wrapped.train()
        trainer.meters.start(trainer.model_wrapped, trainer.optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Reset the step's figures and enter its meter."""
        self.learning_rate = objects["lr_scheduler"].get_last_lr()[0]
        self.trainer.step_losses, self.trainer.step_grad_norm = [], None
        self.metered = self.trainer.meters.step(state.global_step + 1)
        self.metered.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the step's meter, add its row, and flush or evaluate if due."""
        trainer, run, log, step = self.trainer, self.run, self.trainer.log_rows, state.global_step
        self.metered.__exit__(None, None, None)
        # The Trainer divides each loss by the accumulation steps, so their sum is the step's mean.
        loss = torch.stack(trainer.step_losses).sum()
        skipped = self.skips.last_was_skipped()
        log.add(step, loss, self.learning_rate, trainer.step_grad_norm, trainer.step_batches, skipped)
        if run.flushes_after(step):
            with trainer.meters.paused():
                log.flush(dict(trainer.meters.flush()))
                self.progress.show(step, log.last_loss, log.tokens_per_s, trainer.meters.peak_gib())
        if run.evaluates_after(step):
            with trainer.meters.untimed_phase("eval"):
                trainer.evaluation = evaluate(run.context, trainer.accelerator, trainer.model_wrapped)
            run.write_evaluation(step, trainer.evaluation)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the meters: all steps are one epoch."""
        self.trainer.meters.finish()
        self.progress.close()
