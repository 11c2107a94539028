"""One process of a session, which trains its arms in order as the listing does and writes their figures.

python study/experiments/autopsy/session.py TASK.json
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from study.config.flags import RunConfig, resolve_config
from study.config.strategies import read_strategy
from study.experiments.autopsy.design import OPERATORS_OF, RESULT, AutopsyArm, Scale
from study.host.environment import describe_environment
from study.host.folders import cache_directory
from study.host.operators import build_operators
from study.metrics.clock import warmup_steps
from study.metrics.memory import MemoryMeter
from study.records.directory import write_json
from study.records.outcome import outcome_from_exception
from study.workloads.initial import load_initial_model, materialize_initial_weights
from study.workloads.tasks import Split, TaskData, load_data

WEIGHTS = "carried.safetensors"
# Stage 3 with the optimizer on the host, as in the listing's dictionary.
_ZERO = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
_BATCH = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
_KEYS = {
    "printed": _ZERO,
    "batch": _ZERO | _BATCH,
    "batch and clipping": _ZERO | _BATCH | {"gradient_clipping": "auto"},
}
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Clock:
    """Wall and CPU seconds per phase, with the device synchronized at each change of phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self._phase, self._since = "setup", self._now()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def enter(self, phase: str) -> str:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ended, now = self._phase, self._now()
        for seconds, before, after in zip((self.seconds, self.cpu_seconds), self._since, now, strict=True):
            seconds[ended] = seconds.get(ended, 0.0) + after - before
        self._phase, self._since = phase, now
        return ended

    @contextlib.contextmanager
    def interrupted_by(self, phase: str) -> Iterator[None]:
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


class WatchedTrainer(Trainer):
    """Trainer that times its evaluations and checkpoints separately."""

    clock: Clock
    live: dict[str, Any]

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        with self.clock.interrupted_by("eval"):
            return super().evaluate(*arguments, **options)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        with self.clock.interrupted_by("save"):
            super()._save_checkpoint(*arguments, **options)


class Watch(TrainerCallback):
    """Callback that switches the clock to the phases of the training."""

    def __init__(self, trainer: WatchedTrainer, warm_after: int):
        self.trainer, self.warm_after = trainer, warm_after

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.live = live_state(self.trainer)
        self.trainer.clock.enter("warm_up")

    def on_step_end(self, _arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self.warm_after:
            self.trainer.clock.enter("train")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.trainer.clock.enter("end")


def live_state(trainer: Trainer) -> dict[str, Any]:
    """Return the engine, optimizers and clipping that a trainer will actually use."""
    engine, optimizer = trainer.model_wrapped, trainer.optimizer
    chain = [type(optimizer).__name__]
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
        chain.append(type(optimizer).__name__)
    enabled = bool(trainer.is_deepspeed_enabled)
    return {
        "arguments_say_deepspeed": bool(trainer.args.deepspeed),
        "deepspeed_enabled": enabled,
        "wrapped_class": type(engine).__name__,
        "optimizer_classes": chain,
        "zero_stage": engine.zero_optimization_stage() if enabled else None,
        "clips_at": engine.gradient_clipping() if enabled else trainer.args.max_grad_norm,
        "distributed_type": trainer.accelerator.distributed_type.value,
    }


def training_arguments(arm: AutopsyArm, scale: Scale, config: RunConfig, folder: Path) -> TrainingArguments:
    """Return the listing's arguments. The late assignment of its dictionary is the error under test."""
    engine_options = {"deepspeed": _KEYS[arm.keys]} if arm.engine == "given" else {}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=arm.batch,
        per_device_eval_batch_size=arm.batch,
        num_train_epochs=1,
        learning_rate=config.learning_rate,
        eval_strategy="steps",
        eval_steps=scale.eval_steps,
        logging_strategy="steps",
        logging_steps=scale.logging_steps,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not scale.on_gpu,
        **engine_options,
    )
    # With several visible GPUs, the Trainer would use nn.DataParallel on all of them.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    if arm.engine == "late":
        arguments.deepspeed = _KEYS["printed"]
    return arguments


@contextlib.contextmanager
def launched(arm: AutopsyArm) -> Iterator[None]:
    """Set a launcher's environment of rank 0 of 1 for this arm, and remove what Accelerate leaves set."""
    before = dict(os.environ)
    if arm.launcher:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= dict(zip(_LAUNCHER, ("0", "0", "1", "127.0.0.1", str(port)), strict=True))
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


class Process:
    """State of the process: the listing's shared model, and the highest memory peaks so far."""

    def __init__(self, scale: Scale, seed: int, folder: Path):
        self.scale, self.folder = scale, folder
        samples = {"train_samples": scale.train_samples, "eval_samples": scale.wide_samples}
        options = {"task": "bert-imdb", "seed": seed, **samples, **scale.options}
        self.config = resolve_config(RunConfig(**options), accelerator_visible=scale.on_gpu)
        self.data: TaskData = load_data(self.config, cache_directory())
        self.initial = materialize_initial_weights(self.config, cache_directory())
        self.model: PreTrainedModel | None = None
        self.highest: dict[str, int] = {}

    def model_for(self, arm: AutopsyArm) -> PreTrainedModel:
        if arm.start == "same model" and self.model is not None:
            return self.model
        # The listing assigns every model to one name, so a new model frees the previous one.
        self.model = load_initial_model(self.config, self.initial)
        if arm.start == "file":
            self.model.load_state_dict(load_file(self.folder / WEIGHTS))
        return self.model

    def train(self, arm: AutopsyArm) -> dict[str, Any]:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        model = self.model_for(arm)
        checksum = float(sum(parameter.detach().double().abs().sum() for parameter in model.parameters()))
        with launched(arm):
            arguments = training_arguments(arm, self.scale, self.config, self.folder / arm.name)
            trainer = WatchedTrainer(
                model=model,
                args=arguments,
                train_dataset=_samples(self.data.train, self.scale.train_samples),
                eval_dataset=_samples(self.data.eval, self.scale.eval_samples),
            )
            steps = self.scale.train_samples // arm.batch
            warm_up = warmup_steps(steps)
            trainer.add_callback(Watch(trainer, warm_up))
            meter = MemoryMeter(arguments.device)
            trainer.clock, started = Clock(), time.perf_counter()
            trainer.train()
            whole_s = time.perf_counter() - started
            peaks = meter.report()["phases"]["init"]
            trainer.clock.enter("after")
            read = {
                "arm": arm.name,
                "batch": arm.batch,
                "steps": trainer.state.global_step,
                "start": arm.start,
                "start_weights_abs_sum": checksum,
                "whole_s": whole_s,
                **_times(trainer.clock, warm_samples=(steps - warm_up) * arm.batch),
                **_losses(trainer.state.log_history),
                **self._peaks(peaks),
                **trainer.live,
            }
            read["eval_loss"], read["eval_accuracy"] = wide_evaluation(trainer, self.data.eval, arm.batch)
            if arm.leaves_file:
                save_file(_whole_weights(trainer), self.folder / WEIGHTS)
            if trainer.is_deepspeed_enabled:
                # Remove the engine, so that it does not affect the next arm of this process.
                trainer.model_wrapped.destroy()
                torch.distributed.destroy_process_group()
                unset_hf_deepspeed_config()
        return read

    def _peaks(self, peaks: dict[str, int | None]) -> dict[str, int | None]:
        """Return the peaks of this arm, and the highest since the process began, which the listing reports."""
        results: dict[str, int | None] = {}
        for place, kind in (("device", "allocated"), ("host", "host")):
            peak = peaks[kind]
            if peak is not None:
                self.highest[place] = max(peak, self.highest.get(place, 0))
            results |= {f"{place}_peak_reset": peak, f"{place}_peak_never_reset": self.highest.get(place)}
        return results


def _times(clock: Clock, warm_samples: int) -> dict[str, float]:
    """Return the time of each phase of an arm, and the time of a sample after the warm-up."""
    seconds, cpu = clock.seconds, clock.cpu_seconds
    return {
        **{f"{phase}_s": seconds.get(phase, 0.0) for phase in ("setup", "warm_up", "train", "eval", "save")},
        "whole_cpu_s": sum(cpu.values()),
        "warm_s_per_sample": seconds["train"] / warm_samples,
        "warm_cpu_s_per_sample": cpu["train"] / warm_samples,
    }


def _losses(log: list[dict[str, float]]) -> dict[str, float | None]:
    """Return the losses and the largest gradient norm of the Trainer's log."""
    losses, evaluations, norms = ([row[key] for row in log if key in row] for key in ("loss", "eval_loss", "grad_norm"))
    return {
        "first_train_loss": losses[0] if losses else None,
        "train_loss": losses[-1] if losses else None,
        "eval_loss_200": evaluations[-1] if evaluations else None,
        "evaluations": len(evaluations),
        "largest_grad_norm": max(norms, default=None),
    }


def _samples(split: Split, count: int) -> Any:
    return [split[place] for place in range(count)]


def wide_evaluation(trainer: Trainer, split: Split, batch: int) -> tuple[float, float]:
    """Return loss and accuracy on all evaluation samples, outside the listing's clock."""
    model, device = trainer.model_wrapped, trainer.args.device
    model.eval()
    losses, right = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(split), batch):
            rows = {name: tensor[start : start + batch].to(device) for name, tensor in split.tensors.items()}
            out = model(**rows)
            losses += float(out.loss) * len(rows["labels"])
            right += int((out.logits.argmax(-1) == rows["labels"]).sum())
    return losses / len(split), right / len(split)


def _whole_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    model = trainer.model
    assert isinstance(model, PreTrainedModel)
    with contextlib.ExitStack() as gathered:
        if trainer.is_deepspeed_enabled:
            import deepspeed

            gathered.enter_context(deepspeed.zero.GatheredParameters(list(model.parameters())))
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}


def main(task_file: Path) -> int:
    """Run the task and write RESULT next to it, also after any Python exception."""
    task = json.loads(task_file.read_text(encoding="utf-8"))
    scale = Scale(**task["scale"])
    if task["core"] >= 0:
        os.sched_setaffinity(0, {task["core"]})
    if scale.threads:
        torch.set_num_threads(scale.threads)
    arms: list[dict[str, Any]] = []
    result: dict[str, Any] = {"arms": arms, "state": "ok", "reason": ""}
    try:
        build_operators(read_strategy(OPERATORS_OF), cache_directory())
        process = Process(scale, task["seed"], task_file.parent)
        for place, arm in enumerate(task["arms"]):
            arms.append(process.train(AutopsyArm(**arm)) | {"place_in_process": place})
    except Exception as error:  # an error of any library is a result
        ending = outcome_from_exception(error, alone=True)
        result |= {"state": ending.state, "reason": ending.reason}
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    result["environment"] = describe_environment()
    write_json(task_file.with_name(RESULT), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
