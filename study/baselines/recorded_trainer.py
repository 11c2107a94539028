"""transformers' Trainer with the study's samples, evaluation and record hooked in; its loop is untouched."""

from __future__ import annotations

import dataclasses
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from study.measure import Meters
from study.run.audit import audit, audit_end
from study.run.evaluation import evaluate
from study.run.session import Session, gather_measurements
from study.run.steps import StepLog
from study.tasks.blocks import sample_hashes, step_samples


class RecordedTrainer(Trainer):
    """Takes each step's samples in the study's order, and keeps what the step leaves behind."""

    control: Any

    def __init__(self, session: Session, model: PreTrainedModel, arguments: TrainingArguments, meters: Meters):
        self.session, self.meters = session, meters
        config = session.config
        # One group: by default the Trainer takes biases and norms out of the weight decay, which the study does not.
        adamw = {"params": list(model.parameters()), "lr": config.learning_rate, "weight_decay": config.weight_decay}
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=session.data.train,
            optimizer_cls_and_kwargs=(torch.optim.AdamW, adamw | {"fused": True}),
            callbacks=[StepRecorder(self)],
        )
        self.remove_callback(PrinterCallback)
        self.log_rows = StepLog(self.accelerator, session.record, config.global_batch_size * config.seq_length)
        self.step_losses: list[torch.Tensor] = []
        self.step_hash = 0
        self.step_grad_norm: Any = None
        self.evaluation: dict[str, float | None] = {}
        self.loop_started = 0.0

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This rank's micro-batches of all steps, as one epoch."""
        session, train = self.session, self.session.data.train
        micro_batches = [
            indices
            for step in range(session.total_steps)
            for indices in session.plan.micro_batches(
                step_samples(session.config, len(train), step), session.launch.rank
            )
        ]
        return DataLoader(train, batch_sampler=micro_batches, collate_fn=lambda batch: batch)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.step_hash += sum(sample_hashes(inputs))
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.step_losses.append(loss)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self.step_grad_norm = super()._get_grad_norm(model, grad_norm)
        return self.step_grad_norm

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float | None]:
        session = self.session
        with self.meters.interruption("eval"):
            batch_size = session.plan.per_device_train_batch_size
            self.evaluation = evaluate(
                self.accelerator, self.model_wrapped, session.config.task, session.data.eval, batch_size
            )
        session.write_evaluation(self.state.global_step, self.evaluation)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, self.evaluation)
        return self.evaluation

    def take_step(self) -> tuple[torch.Tensor, Any, int]:
        """Mean loss, gradient norm and samples of the step that just ended. The Trainer's losses are shares of it."""
        taken = torch.stack(self.step_losses).sum(), self.step_grad_norm, self.step_hash
        self.step_losses, self.step_grad_norm, self.step_hash = [], None, 0
        return taken

    def audited_engine(self) -> dict[str, Any]:
        """engine.json. The Trainer accumulates by itself and tells Accelerate 1, which is what is read back there."""
        session, plan = self.session, self.session.plan
        if session.launch.strategy.deepspeed is None:
            plan = dataclasses.replace(plan, gradient_accumulation_steps=1)
        live = audit(
            self.accelerator,
            self.model_wrapped,
            self.optimizer,
            session.config,
            session.launch,
            plan,
            session.swap_folder,
        )
        return live | {"gradient_accumulation_steps": self.args.gradient_accumulation_steps}

    def finish(self) -> None:
        session = self.session
        audit_end(self.accelerator, self.model_wrapped, session.config, session.launch.strategy, session.swap_folder)
        ranks = gather_measurements(self.accelerator, self.meters)
        self.session.finish(
            self.accelerator, ranks, self.meters.traffic, self.log_rows, self.evaluation, self.loop_started,
            self.meters.profile,
        )  # fmt: skip


class StepRecorder(TrainerCallback):
    """The study's meters and rows, at the moments where study/train.py has them."""

    def __init__(self, trainer: RecordedTrainer):
        self.trainer = trainer
        self.session = trainer.session
        self.progress: Any = None
        self.metered: AbstractContextManager[None] | None = None
        self.learning_rate = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, session = self.trainer, self.session
        session.write_engine(trainer.audited_engine())
        self.progress = session.console.progress(session.total_steps, 0)
        trainer.loop_started = time.time()
        trainer.model_wrapped.train()
        trainer.meters.start(trainer.model_wrapped, trainer.optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.learning_rate = objects["lr_scheduler"].get_last_lr()[0]
        self.metered = self.trainer.meters.step(state.global_step + 1)
        self.metered.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, session, step = self.trainer, self.session, state.global_step
        assert self.metered is not None
        self.metered.__exit__(None, None, None)
        loss, grad_norm, samples_hash = trainer.take_step()
        trainer.log_rows.add(step, loss, self.learning_rate, grad_norm, samples_hash)
        if session.flushes_after(step):
            with trainer.meters.paused():
                trainer.log_rows.flush(dict(trainer.meters.flush()))
                log = trainer.log_rows
                self.progress.show(step, log.last_loss, log.tokens_per_s, trainer.meters.peak_gib())
        control.should_evaluate = session.evaluates_after(step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All steps are one epoch, and they are done."""
        self.trainer.meters.finish()
        self.progress.close()
