"""The tables of a report: one row per arm of a workload, headings with units, no gap where a run failed."""

from __future__ import annotations

from collections.abc import Callable, Sized

import numpy as np
import pandas as pd

from study.record.schema import STATE_KINDS, STATE_PLACES
from study.report.questions.fits import NO_PROBES, fits_table, probes_table
from study.report.questions.profile_tables import NO_PROFILE, PROFILE_TABLES, has_profile
from study.report.questions.scaling_tables import (
    SCALING_TABLES,
    batch_size_table,
    has_offload,
    has_several_batches,
    has_several_models,
    has_several_worlds,
    model_size_table,
    offload_table,
    single_vs_multi_table,
)
from study.report.questions.virtual_tables import (
    changes,
    setting_effects_table,
    settings_table,
    summaries,
    table1_rows,
    table1_table,
    virtual_runs_table,
)
from study.report.records.arms import MIB, NAN, Arm, Row, against, arms, frame, peak_gib, state_bytes, state_mib
from study.report.records.frames import Records, probes, real, steps_by_run, virtual, without_probes
from study.report.records.statistics import NoiseFloor, effect, equivalence, interval, noise_floor, paired

__all__ = [
    "TABLES", "absent", "batch_size_table", "largest_step_difference", "loss_table", "memory_table", "model_size_table",
    "offload_table", "runtime_table", "single_vs_multi_table", "summary_table",
]  # fmt: skip
_KINDS = {"params": "Parameters", "grads": "Gradients", "optimizer": "Optimizer"}
_AWAY = {"device": "", "host": " (host)", "nvme": " (NVMe)"}


def summary_table(records: Records) -> pd.DataFrame:
    """Everything at a glance: one row per arm and workload."""
    rows = []
    for arm in arms(real(records).runs):
        figures: Row = {
            "Eval loss": arm.median("eval_loss_final"),
            "State per rank, MiB": state_mib(arm),
            "Peak memory, GiB": peak_gib(arm)[0],
            "Peak of": peak_gib(arm)[1],
            "Sent per step, MiB": arm.median("comm_bytes_per_step") / MIB,
            "Step time, ms": 1e3 * arm.median("step_time_s_median"),
            "Time, x baseline": against(arm, "step_time_s_median"),
        }
        rows.append(arm.row(figures))
    return frame(rows)


def loss_table(records: Records) -> pd.DataFrame:
    """Do the arms train the same model? Paired by seed and repeat against the workload's baseline."""
    rows = []
    records = real(records)
    steps = steps_by_run(records)
    for arm in arms(records.runs):
        figures: Row = {
            "Train loss, first": arm.median("train_loss_first"),
            "Train loss, last": arm.median("train_loss_final"),
            "Eval loss": arm.median("eval_loss_final"),
            "Accuracy": arm.median("eval_accuracy"),
            "Perplexity": arm.median("eval_perplexity"),
            **_against_baseline(arm, steps),
        }
        rows.append(arm.row(figures, "confounded_loss"))
    return frame(rows)


def _against_baseline(arm: Arm, steps: dict[str, pd.DataFrame]) -> Row:
    if arm.baseline is None or arm.name == arm.baseline:
        word = "baseline" if arm.name == arm.baseline else "no baseline"
        return {"Largest difference in a step": NAN, "at step": NAN, "Equivalent": word}
    largest, at = largest_step_difference(arm, steps)
    pairs = paired(arm.beside, "eval_loss_final", arm.name, arm.baseline)
    tested = equivalence(pairs["value"].tolist(), pairs["baseline"].tolist())
    return {"Largest difference in a step": largest, "at step": at, "Equivalent": tested.text()}


def largest_step_difference(arm: Arm, steps: dict[str, pd.DataFrame]) -> tuple[float, float]:
    """Over all pairs of runs of a seed and repeat, and the step where it was; NaN without a pair."""
    assert arm.baseline is not None
    pairs = paired(arm.beside, "steps", arm.name, arm.baseline)
    found: list[tuple[float, float]] = []
    for mine, other in zip(pairs["run"], pairs["run_baseline"], strict=True):
        if mine in steps and other in steps:
            one, two = (steps[run]["loss"].to_numpy() for run in (mine, other))
            count = min(len(one), len(two))
            differences = np.abs(one[:count] - two[:count])
            if count and not np.isnan(differences).all():
                found.append((float(np.nanmax(differences)), float(np.nanargmax(differences)) + 1))
    return max(found, default=(NAN, NAN))


def memory_table(records: Records) -> pd.DataFrame:
    """Per rank, the fullest one: what the model's state takes where, and what the process took at its peak."""
    rows = []
    for arm in arms(without_probes(records).runs):
        figures: Row = {
            f"{_KINDS[kind]}{_AWAY[place]}, MiB": arm.median(f"{kind}_bytes_{place}") / MIB
            for kind in STATE_KINDS
            for place in STATE_PLACES
        }
        figures |= {
            "Engine buffers, MiB": arm.median("buffer_bytes_device") / MIB,
            "Peak allocated, GiB": arm.median("peak_memory_gib_allocated"),
            "Peak reserved, GiB": arm.median("peak_memory_gib_reserved"),
            "Peak of the device, GiB": arm.median("peak_memory_gib_device"),
            "Average of the device, GiB": arm.median("avg_memory_gib_device"),
            "Peak of the host process, GiB": arm.median("host_peak_rss_gib"),
            "State on the device, x baseline": _state_ratio(arm),
        }
        rows.append(arm.row(figures))
    return frame(rows)


def runtime_table(records: Records) -> pd.DataFrame:
    """Time of an optimizer step, and what it makes of a whole run."""
    rows = []
    floors: dict[str, NoiseFloor] = {}
    for arm in arms(real(records).runs):
        if arm.workload not in floors:
            floors[arm.workload] = noise_floor(arm.beside, "step_time_s_median")
        floor = floors[arm.workload]
        words = "baseline" if arm.name == arm.baseline else "no baseline"
        if arm.baseline is not None and arm.name != arm.baseline:
            words = effect(arm.beside, "step_time_s_median", arm.name, arm.baseline, floor).words
        figures: Row = {
            "Step time, ms": interval((1e3 * arm.ended["step_time_s_median"]).tolist()).text(1),
            "p10, ms": 1e3 * arm.median("step_time_s_p10"),
            "p90, ms": 1e3 * arm.median("step_time_s_p90"),
            "Tokens/s": arm.median("tokens_per_s"),
            "Tokens/s per device": arm.median("tokens_per_s_per_device"),
            "Samples/s": _median(arm.ended["tokens_per_s"] / arm.ended["seq_length"].astype(float)),
            "Start-up, s": arm.median("startup_s"),
            "Run, s": arm.median("runtime_s"),
            "Sent per step, MiB": arm.median("comm_bytes_per_step") / MIB,
            "Calls per step": arm.median("comm_calls_per_step"),
            "Model FLOP utilization": arm.median("mfu"),
            "Of the measured matmul rate": _of_the_matmul_rate(arm),
            "Energy, J": arm.median("energy_j"),
            "Time, x baseline": against(arm, "step_time_s_median"),
            "In words": words,
        }
        rows.append(arm.row(figures))
    return frame(rows)


def _of_the_matmul_rate(arm: Arm) -> float:
    """The model's FLOPs per second beside what the device reached in plain matrix products."""
    runs = arm.ended
    steps_per_s = runs["tokens_per_s"] / (runs["global_batch_size"] * runs["seq_length"]).astype(float)
    flops_per_s = runs["model_flops_per_step"] * steps_per_s / runs["world_size"].astype(float)
    return _median(flops_per_s / (1e12 * runs["matmul_tflops"]))


def _median(values: pd.Series) -> float:
    return float(values.median()) if values.notna().any() else NAN


def _state_ratio(arm: Arm) -> float:
    its = arm.beside[(arm.beside["arm"] == arm.baseline) & (arm.beside["status_state"] == "ok")]
    whole = state_bytes(its, ("device",))
    return state_bytes(arm.ended, ("device",)) / whole if whole else NAN


TABLES: dict[str, Callable[[Records], pd.DataFrame]] = {
    "summary": summary_table,
    "loss": loss_table,
    "memory": memory_table,
    "runtime": runtime_table,
    **SCALING_TABLES,
    **PROFILE_TABLES,
    "fits": fits_table,
    "probes": probes_table,
    "virtual_runs": virtual_runs_table,
    "table1": table1_table,
    "settings": settings_table,
    "setting_effects": setting_effects_table,
}
_VIRTUAL: dict[str, tuple[Callable[[Records], Sized], str]] = {
    "virtual_runs": (lambda records: virtual(records).runs, "can be read"),
    "settings": (summaries, "ended well, whole or at three depths"),
    "table1": (table1_rows, "is of a size in the paper's Table 1 (gpt-7.5b, gpt-128b, gpt-1t)"),
    "setting_effects": (changes, "changed a setting of its strategy beside one as shipped"),
}
_ABSENT: dict[str, tuple[Callable[[pd.DataFrame], bool], str]] = {
    "single_vs_multi": (has_several_worlds, "ran on more than one number of ranks"),
    "batch_size": (has_several_batches, "ran with more than one global batch"),
    "model_size": (has_several_models, "ran with more than one model of a task"),
    "offload": (has_offload, "moved state off the device"),
}


def absent(name: str, records: Records) -> str:
    """Why a table is empty, in a sentence; nothing where it is not."""
    if records.runs.empty:
        return "There is no run here that can be read."
    if name == "memory":
        return ""
    if name in ("fits", "probes"):
        return NO_PROBES if probes(records).runs.empty else ""
    if name in _VIRTUAL:
        found, said = _VIRTUAL[name]
        if virtual(records).runs.empty:
            return "No run here is virtual."
        return "" if len(found(records)) else f"No virtual run here {said}."
    runs = real(records).runs
    if runs.empty:
        return "All runs here are virtual: they have memory and traffic, and neither losses nor times."
    if name in PROFILE_TABLES:
        return "" if has_profile(runs) else NO_PROFILE
    holds, what = _ABSENT.get(name, (lambda runs: True, ""))
    return "" if holds(runs) else f"No workload among these records {what}, so there is nothing to compare."
