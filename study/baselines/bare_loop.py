"""The same run through a bare PyTorch loop, without Accelerate and with no measurement inside: the floor for speed.

    accelerate launch --config_file accelerate_configs/ddp.yaml study/baselines/bare_loop.py

Any launcher that sets RANK and its kin will do. One device or DDP; a sharded engine is somebody else's loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from study.baselines import refuse_what_only_the_study_does
from study.errors import UserError
from study.record.schema import STATE_KINDS, STATE_PLACES
from study.run.open import exit_status_of, open_run
from study.spec.config import RunConfig
from study.spec.strategies import Launch

if TYPE_CHECKING:
    import torch

# Nobody reads the tensors' sizes off a bare loop.
_UNREAD_STATE = {"state_bytes": {kind: dict.fromkeys(STATE_PLACES) for kind in STATE_KINDS}}


def refuse(config: RunConfig, launch: Launch) -> None:
    refuse_what_only_the_study_does("bare_loop", config)
    if config.profile_steps:
        raise UserError(
            f"bare_loop measures nothing inside, and profiles no {config.profile_steps} steps",
            "leave --profile_steps out, or use study/train.py or study/baselines/hf_trainer.py",
        )
    if launch.strategy.name not in ("single", "ddp"):
        raise UserError(
            f"bare_loop runs single and ddp, and was launched with {launch.strategy.name}",
            "launch it with accelerate_configs/single.yaml or ddp.yaml",
        )


class TorchProcess:
    """What the study's evaluation, step rows and audit ask of an Accelerator, by torch.distributed alone."""

    def __init__(self, config: RunConfig, launch: Launch):
        import torch
        from accelerate.utils import DistributedType

        on_gpu = torch.cuda.is_available()
        self.num_processes, self.process_index = launch.world_size, launch.rank
        self.is_main_process = launch.is_main
        self.device = torch.device("cuda", launch.local_rank) if on_gpu else torch.device("cpu")
        self.mixed_precision = "no" if config.precision == "fp32" else config.precision
        # How often the loop below accumulates is its own doing; like the batch, there is nothing to read back.
        self.gradient_accumulation_steps = config.batch_plan(launch.world_size).gradient_accumulation_steps
        self.distributed_type = DistributedType.NO
        if on_gpu:
            torch.cuda.set_device(self.device)
        if self.num_processes > 1:
            self.distributed_type = DistributedType.MULTI_GPU if on_gpu else DistributedType.MULTI_CPU
            torch.distributed.init_process_group("nccl" if on_gpu else "gloo")

    def unwrap_model(self, model: Any) -> Any:
        return model.module if self.num_processes > 1 else model

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        if self.num_processes == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        torch.distributed.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        import torch

        assert reduction == "sum"
        if self.num_processes > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def gather_object(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        import torch

        if self.num_processes == 1:
            return [mine]
        everyone: list[Any] = [None] * self.num_processes
        torch.distributed.all_gather_object(everyone, mine)
        return everyone

    def wait_for_everyone(self) -> None:
        import torch

        if self.num_processes > 1:
            torch.distributed.barrier()

    def end(self) -> None:
        import torch

        if self.num_processes > 1:
            torch.distributed.destroy_process_group()


class Stopwatch:
    """Seconds of the counted steps, the device synchronized at both ends; the study's window without its clock."""

    def __init__(self, device: torch.device):
        self._device, self._started = device, 0.0
        self.seconds, self.steps = 0.0, 0

    def start(self) -> None:
        self._synchronize()
        self._started = time.perf_counter()

    def stop(self, steps: int) -> None:
        self._synchronize()
        if steps:
            self.seconds += time.perf_counter() - self._started
            self.steps += steps

    def report(self) -> dict[str, float | None]:
        """As a clock's summary: the window, and nothing of its steps."""
        unread = ("step_time_s_p10", "step_time_s_median", "step_time_s_p90", "self_cost_s", "energy_j")
        return {**dict.fromkeys(unread), "window_s": self.seconds or None, "window_steps": self.steps or None}

    def _synchronize(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main(arguments: Sequence[str] | None = None) -> int:
    with open_run("bare_loop", arguments, refuse) as run:
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from transformers import get_scheduler, set_seed

        from study.measure import WARMUP_STEPS, Meters
        from study.models.initial import load_initial_model, materialize_initial_weights
        from study.run import engine
        from study.run.audit import audit, check_compute_dtype
        from study.run.evaluation import evaluate
        from study.run.steps import StepLog
        from study.run.summary import Measurements
        from study.tasks import load_data

        config, launch, plan = run.config, run.launch, run.plan
        data = load_data(config, run.cache)
        initial = materialize_initial_weights(config, run.cache)
        run.begin(data, initial)

        if config.device_memory_cap_gib is not None:
            engine.cap_device_memory(config.device_memory_cap_gib, launch.local_rank)
        process = TorchProcess(config, launch)
        process.wait_for_everyone()
        run.keep_log()
        set_seed(config.seed)
        # Only its peaks are read, and only between steps: peaks are kept by torch and by Linux, at no cost to the loop.
        meters = Meters(process.device, watched_step=None)

        model: Any = load_initial_model(config, initial).to(process.device)
        if not config.torch_compile:
            # As in study/run/engine.py: a hook would cut the compiled graph in pieces.
            check_compute_dtype(model, config.precision)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        if launch.world_size > 1:
            device_ids = [process.device] if process.device.type == "cuda" else None
            model = DistributedDataParallel(model, device_ids=device_ids)
        if config.torch_compile:
            model = torch.compile(model)
        warmup_steps = round(config.warmup_ratio * run.total_steps)
        schedule = get_scheduler(config.lr_scheduler_type, optimizer, warmup_steps, run.total_steps)
        scaler = torch.amp.GradScaler(enabled=config.precision == "fp16")
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
        autocast = torch.autocast(process.device.type, dtype=dtype, enabled=dtype is not None)
        run.write_engine(audit(process, model, optimizer, config, launch, plan, run.swap_folder))

        log = StepLog(process, run.record, tokens_per_step=config.global_batch_size * config.seq_length)
        progress = run.console.progress(run.total_steps, 0)
        evaluation: dict[str, float | None] = {}
        done: list[tuple[int, Any, float, Any, list[Any]]] = []
        # The study warms up for WARMUP_STEPS and then watches one step, which its window leaves out too.
        uncounted = WARMUP_STEPS + 1
        stopwatch = Stopwatch(process.device)
        model.train()
        meters.memory.enter_phase("steady")
        for step, micro_batches in run.steps():
            learning_rate = schedule.get_last_lr()[0]
            losses = []
            for turn, micro_batch in enumerate(micro_batches, start=1):
                batch = {name: tensor.to(process.device) for name, tensor in micro_batch.items()}
                if launch.world_size > 1:
                    model.require_backward_grad_sync = turn == len(micro_batches)
                with autocast:
                    loss = model(**batch).loss
                scaler.scale(loss / len(micro_batches)).backward()
                losses.append(loss.detach())
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            # A step that overflowed was skipped, and halved the scale.
            if scaler.get_scale() >= scale:
                schedule.step()
            done.append((step, torch.stack(losses).mean(), learning_rate, grad_norm, micro_batches))

            if step == uncounted:
                stopwatch.start()
            if run.flushes_after(step):
                stopwatch.stop(min(len(done), max(0, step - uncounted)))
                for row in done:
                    log.add(*row)
                done.clear()
                log.flush({})
                progress.show(step, log.last_loss, None, meters.peak_gib())
                if run.evaluates_after(step):
                    with autocast, meters.memory.phase("eval"):
                        evaluation = evaluate(process, model, config.task, data.eval, plan.per_device_train_batch_size)
                    run.write_evaluation(step, evaluation)
                stopwatch.start()
        progress.close()

        mine = {"memory": meters.memory.report(), "time": stopwatch.report(), "state": _UNREAD_STATE}
        run.finish(log, evaluation, Measurements(process.gather_object({"rank": launch.rank, **mine})))
        process.wait_for_everyone()
        process.end()
    return run.exit_status


if __name__ == "__main__":
    # As in study/train.py: native threads must not abort a run that has finished.
    os._exit(exit_status_of(main))
