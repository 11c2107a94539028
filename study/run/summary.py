"""The figures of summary.json from the ranks' measurements: memory is the maximum over ranks, units are in names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from study.config.flags import RunConfig
from study.host.memory import GIB
from study.records.schema import PEAKS, STATE_KINDS, STATE_PLACES, SUMMARY_KEYS, SUMMARY_OPTIONAL
from study.records.virtual_summary import largest

if TYPE_CHECKING:
    from accelerate import Accelerator

    from study.metrics import Meters
    from study.run.steps import StepLog


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
    expected_keys = {*SUMMARY_KEYS, *SUMMARY_OPTIONAL}
    assert set(summary) == expected_keys, set(summary) ^ expected_keys
    return summary


def _gib(size: float | None) -> float | None:
    return None if size is None else size / GIB
