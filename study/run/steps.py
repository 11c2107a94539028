"""One row per optimizer step, without a device synchronization in every step, and the figures of summary.json.

Losses stay on the device until a flush, in which one reduction over all ranks covers the rows of many steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from study.config.errors import NotFinite
from study.config.flags import RunConfig
from study.host.memory import GIB
from study.records.directory import finite_or_none, read_rows
from study.records.schema import PEAKS, STATE_KINDS, STATE_PLACES
from study.records.virtual_summary import largest
from study.workloads import metrics, tasks

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from study.metrics import Meters
    from study.run.context import RunContext

DIVERGED_FIX = "lower --learning_rate, or use another --precision"


class StepLog:
    """Collector of each step's figures, which it writes as rows of steps.jsonl."""

    def __init__(self, run: RunContext, accelerator: Accelerator):
        self._accelerator, self._record = accelerator, run.record
        self._is_group_leader = run.launch.rank % run.launch.strategy.group_size == 0
        self._tokens_per_step = run.config.global_batch_size * run.config.seq_length
        # A virtual rank computes on data that no rank sent: its losses and norms are not recorded.
        self._virtual = run.launch.virtual
        self._pending: list[tuple[int, torch.Tensor, float, Any, int, bool]] = []
        # Rows before the steps of a resumed run.
        earlier = read_rows(run.record.folder)[0] if run.record else []
        self.first_loss: float | None = earlier[0]["loss"] if earlier else None
        self.skipped_before = sum("skipped" in row for row in earlier)
        self.skipped_steps = 0
        self.last_loss: float | None = None
        self.last_step = 0
        self.tokens_per_s: float | None = None

    def add(
        self,
        step: int,
        loss: torch.Tensor,
        learning_rate: float,
        grad_norm: Any,
        micro_batches: list[dict[str, torch.Tensor]],
        skipped: bool = False,
    ) -> None:
        """Store a step's figures until the next flush; the hash of `micro_batches` (on the host) proves its samples."""
        # The sum over all ranks counts each sample once.
        samples_hash = sum(sum(tasks.sample_hashes(batch)) for batch in micro_batches) if self._is_group_leader else 0
        self._pending.append((step, loss, learning_rate, grad_norm, samples_hash, skipped))
        self.skipped_steps += skipped

    def flush(self, step_times_s: dict[int, float]) -> None:
        """Write the pending rows; raise NotFinite at the first loss that is not finite."""
        import torch

        if not self._pending:
            return
        losses = torch.stack([loss.reshape(()).double() for _, loss, *_ in self._pending])
        # A 64-bit hash is split into two numbers, whose sums over ranks are exact in float64.
        halves = [divmod(samples_hash % 2**64, 2**32) for *_, samples_hash, _ in self._pending]
        rows = torch.column_stack([losses, torch.tensor(halves, dtype=torch.float64, device=losses.device)])
        loss_is_on_host = rows.device.type == "cpu"
        reduced = self._accelerator.reduce(rows, reduction="sum").tolist()
        pending, self._pending = self._pending, []
        not_finite = None
        for (step, _, learning_rate, grad_norm, _, skipped), (loss_sum, high, low) in zip(
            pending, reduced, strict=True
        ):
            loss = None if self._virtual else finite_or_none(loss_sum / self._accelerator.num_processes)
            if loss is None and not_finite is None and not self._virtual:
                not_finite = (step, loss_sum)
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.last_loss, self.last_step = loss, step
            row = {
                "step": step,
                "loss": loss,
                "lr": learning_rate,
                "grad_norm": finite_or_none(None if grad_norm is None or self._virtual else float(grad_norm)),
                # Without a GPU a virtual rank mostly copies memory, so its time means nothing.
                "step_time_s": None if self._virtual and loss_is_on_host else step_times_s.get(step),
                "tokens": self._tokens_per_step,
                "samples_hash": f"{(int(high) * 2**32 + int(low)) % 2**64:016x}",
            }
            if skipped:
                row["skipped"] = True
            if self._record is not None:
                self._record.append("steps.jsonl", row)
            if not_finite is not None:
                break
        seconds = sum(step_times_s.values())
        timed = seconds and not self._virtual
        self.tokens_per_s = self._tokens_per_step * len(step_times_s) / seconds if timed else None
        if self._record is not None:
            self._record.flush()
        if not_finite is not None:
            step, value = not_finite
            name = "NaN" if math.isnan(value) else "infinite"
            raise NotFinite(f"the loss is {name} at step {step}", DIVERGED_FIX, step)


def evaluate(run: RunContext, accelerator: Accelerator, model: Any) -> dict[str, float | None]:
    """Return loss, and accuracy or perplexity, over the whole split on the main process; empty on other ranks.

    The result does not depend on the number of ranks.
    """
    was_training = model.training
    model.eval()
    sample_losses, predictions = _score_samples(run, accelerator, model)
    model.train(was_training)
    if not sample_losses.isfinite().all():
        raise NotFinite("the evaluation loss is not a number: the step before it left unusable weights", DIVERGED_FIX)
    if not accelerator.is_main_process:
        return {}
    labels = None if predictions is None else run.data.eval.tensors["labels"]
    figures = metrics.summarize_evaluation(run.config.task, sample_losses, predictions, labels)
    # JSON has no infinite perplexity.
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _score_samples(run: RunContext, accelerator: Accelerator, model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the loss of each sample of the split, and a classifier's prediction of it, on every rank."""
    import torch

    cross_entropy = torch.nn.CrossEntropyLoss(reduction="none")
    losses, predictions = [], []

    def gathered(local: torch.Tensor) -> torch.Tensor:
        """Return one entry per model-parallel group, whose ranks all have the same values."""
        by_rank = accelerator.gather(local).unflatten(0, (run.plan.groups, -1, run.plan.per_device_train_batch_size))
        return by_rank[:, 0].flatten(0, 1)

    # Without gradients a compiled model would be compiled again.
    eager = torch.compiler.set_stance("force_eager") if run.config.torch_compile else contextlib.nullcontext()
    with torch.no_grad(), eager:
        for indices in _batches_of_this_rank(run):
            samples = run.data.eval.__getitems__(indices)
            batch = {name: tensor.to(accelerator.device) for name, tensor in samples.items()}
            logits, labels = model(**batch).logits, batch["labels"]
            if run.config.task == "bert-imdb":
                losses.append(gathered(cross_entropy(logits.float(), labels)))
                predictions.append(gathered(logits.argmax(-1)))
            else:
                # All samples score the same number of tokens, so the mean of their means is the token mean.
                losses.append(gathered(cross_entropy(logits[:, :-1].float().transpose(1, 2), labels[:, 1:]).mean(1)))
    # Without the repeated samples of the last batches.
    count = len(run.data.eval)
    predicted = torch.cat(predictions)[:count].cpu() if predictions else None
    return torch.cat(losses)[:count].double().cpu(), predicted


def _batches_of_this_rank(run: RunContext) -> Iterator[list[int]]:
    """Yield the indices of each batch that this rank evaluates.

    Every rank makes the same number of equal forward passes, as a sharded engine would hang otherwise: the last batches
    are padded with repeated samples.
    """
    count, batch_size, groups = len(run.data.eval), run.plan.per_device_train_batch_size, run.plan.groups
    turns = -(-count // (batch_size * groups))
    for turn in range(turns):
        first = (turn * groups + run.launch.group_index) * batch_size
        yield [index % count for index in range(first, first + batch_size)]


def gather_ranks(virtual: bool, accelerator: Accelerator, meters: Meters) -> list[dict[str, Any]]:
    """Return each rank's entry of memory.json: memory in GiB, state in bytes. Called on every rank."""
    from accelerate.utils import gather_object

    times = meters.summary()
    if virtual and accelerator.device.type == "cpu":
        # Copies in memory replace the network, and would dominate these times.
        times = {key: None if key.startswith("step_time_s_") else value for key, value in times.items()}
    memory = meters.memory.report()
    entry = {
        "rank": accelerator.process_index,
        "phases": {
            phase: {figure: _gib(size) for figure, size in sizes.items()} for phase, sizes in memory["phases"].items()
        },
        "device_mean_over_steps": _gib(memory["device_mean_over_steps"]),
        "state": meters.state,
        "time": times,
    }
    return [entry] if virtual else list(gather_object([entry]))


def summarize(
    world_size: int,
    config: RunConfig,
    ranks: list[dict[str, Any]],
    traffic: dict[str, Any] | None,
    log: StepLog,
    evaluation: dict[str, float | None],
    timing: dict[str, float],
) -> dict[str, Any]:
    """Return every key of summary.json; a value is None if this machine could not measure it."""
    import torch

    from study.metrics.flops import model_flops_per_sample
    from study.predictor.hardware import mfu

    # pydantic, so not before the memory of the run is measured.
    from study.records.models import SummaryRecord

    time = ranks[0]["time"]
    virtual = bool(config.virtual_world_size)
    # A virtual rank's time excludes communication, so no throughput follows from it.
    steps_per_s = time["window_steps"] / time["window_s"] if time["window_steps"] and not virtual else None
    flops_per_step = model_flops_per_sample(config) * config.global_batch_size
    tokens_per_step = config.global_batch_size * config.seq_length
    tokens_per_s = None if steps_per_s is None else tokens_per_step * steps_per_s
    collectives = traffic["collectives"].values() if traffic else ()
    by_gloo = [entry["gloo_bytes_per_rank"] for entry in collectives if "gloo_bytes_per_rank" in entry]
    # One virtual rank does not give the sum over all ranks.
    energies: list[Any] = [None] if virtual else [rank["time"]["energy_j"] for rank in ranks]
    summary = {
        "steps": log.last_step,
        "tokens": log.last_step * tokens_per_step,
        "train_loss_first": log.first_loss,
        "train_loss_final": log.last_loss,
        "eval_loss_final": evaluation.get("eval_loss"),
        "eval_accuracy": evaluation.get("accuracy"),
        "eval_perplexity": evaluation.get("perplexity"),
        **timing,
        "step_time_s_median": time["step_time_s_median"],
        "step_time_s_p10": time["step_time_s_p10"],
        "step_time_s_p90": time["step_time_s_p90"],
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": None if tokens_per_s is None else tokens_per_s / world_size,
        "samples_per_s": None if steps_per_s is None else config.global_batch_size * steps_per_s,
        "model_flops_per_step": flops_per_step,
        "mfu": mfu(flops_per_step, 1 / steps_per_s, world_size, torch.cuda.get_device_name(), config.precision)
        if steps_per_s is not None and torch.cuda.is_available()
        else None,
        **{
            key: largest(phase[figure] for rank in ranks for phase in rank["phases"].values())
            for key, figure in PEAKS.items()
        },
        "avg_memory_gib_device": largest(rank["device_mean_over_steps"] for rank in ranks),
        "state_bytes_per_rank": {
            kind: {
                # None if a loss scaler skipped the watched step and all later ones.
                place: largest(rank["state"]["state_bytes"][kind][place] for rank in ranks if rank["state"])
                for place in STATE_PLACES
            }
            for kind in STATE_KINDS
        },
        "comm_bytes_per_step": sum(entry["payload_bytes"] for entry in collectives) if traffic else None,
        # Ring bytes, as NCCL would send them; then gloo's bytes, if gloo ran.
        "sent_bytes_per_step": sum(entry["wire_bytes_per_rank"] for entry in collectives) if traffic else None,
        "gloo_sent_bytes_per_step": sum(by_gloo) if by_gloo else None,
        "comm_calls_per_step": sum(entry["calls"] for entry in collectives) if traffic else None,
        "energy_j": None if None in energies else sum(energies),
        "steps_skipped": log.skipped_before + log.skipped_steps,
        "warmup_steps": time["warmup_steps"],
    }
    expected_keys = SummaryRecord.model_fields.keys()
    assert summary.keys() == expected_keys, summary.keys() ^ expected_keys
    return summary


def _gib(size: float | None) -> float | None:
    return None if size is None else size / GIB
