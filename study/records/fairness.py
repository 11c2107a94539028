"""Fair comparison: check the invariants of each run against the baseline of its workload.

A run that breaks an invariant stays in all tables and plots, labelled with the invariant.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from study.records.workloads import BASELINES, read_arm, strategy_order

# Optimizer classes that implement AdamW; their settings are compared separately.
_ADAMW = {"torch.AdamW", "deepspeed.DeepSpeedCPUAdam", "deepspeed.FusedAdam"}
# The first loss precedes any update, so with the same weights and samples it is equal up to rounding.
_FIRST_LOSS_TOLERANCE = {"fp32": 0.01}
_ROUNDED_FIRST_LOSS_TOLERANCE = 0.05
_STEPS = ("lr", "tokens")
# Invariants with their column and its format; None for hashes, which are not printed.
_BY_COLUMN = (
    ("initial weights", "initial_weights_sha256", None),
    ("training data", "train_data_sha256", None),
    ("evaluation set", "eval_data_sha256", None),
    ("evaluation set", "eval_samples", "{} samples"),
    ("global batch", "global_batch_size", "{}"),
    ("sequence length", "seq_length", "{}"),
    ("steps", "steps", "{:g}"),
    ("clipping", "gradient_clipping", "{:g}"),
    ("learning rate", "learning_rate", "{:g}"),
    ("schedule", "lr_scheduler_type", "{}"),
    ("warm-up", "warmup_ratio", "{:g}"),
    ("weight decay", "weight_decay", "{:g}"),
    ("dropout", "dropout", "{:g}"),
    ("precision", "engine_precision", "{}"),
    ("parameter type", "param_dtype", "{}"),
    ("gradient checkpointing", "gradient_checkpointing", "{}"),
    ("threads per rank", "threads_per_rank", "{}"),
    ("another box: device", "devices", "{}"),
    ("another box: processor", "cpu", "{}"),
    ("another box: cores", "cpu_cores", "{}"),
    ("another box: driver", "driver", "{}"),
    ("torch", "torch_version", "{}"),
    ("deepspeed", "deepspeed_version", "{}"),
    ("accelerate", "accelerate_version", "{}"),
    ("transformers", "transformers_version", "{}"),
    ("machines", "machines", "{}"),
)


# Between the confounds in a cell; none of them has it.
_BETWEEN = "; "


class Confound(NamedTuple):
    """An invariant that a run breaks, with the values that show it."""

    name: str
    detail: str = ""

    @property
    def text(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


Row = dict[str, Any]
Steps = Mapping[str, Mapping[str, Any]]


def label_confounds(rows: Sequence[Row], steps: Steps) -> list[Row]:
    """Return each run with its `baseline`, `confounded`, `confounded_loss` and `notes`; None means not recorded."""
    workloads: dict[str, list[Row]] = {}
    for row in rows:
        workloads.setdefault(row["workload_key"], []).append(row)
    baselines_by_workload = {key: _baseline_runs(group) for key, group in workloads.items()}
    labelled: list[Row] = []
    for run in rows:
        if not (baselines := baselines_by_workload[run["workload_key"]]):
            labelled.append(run | {"baseline": "", "confounded": "", "confounded_loss": "", "notes": _notes(run)})
            continue
        same_seed = [row for (seed, _), row in baselines.items() if seed == run["seed"]]
        baseline = baselines.get((run["seed"], run["repeat"])) or next(iter(same_seed or baselines.values()))
        reasons = [*_run_reasons(run), *_differences(run, baseline, bool(same_seed))]
        notes, timing_reasons = _notes(run), list[Confound]()
        if not same_seed and run["seed"] is not None:
            # The run is in no pair. Weights and samples of another seed differ by design.
            lacks = f"no {baseline['arm']} with seed {run['seed']} ended ok, so it is in no ratio and no difference"
            notes = "; ".join(filter(None, [notes, lacks]))
        if run["status_state"] == "ok" and baseline["run"] != run["run"]:
            reasons += _step_reasons(run, baseline, steps, bool(same_seed))
            # Logging and checkpoints synchronize the device, but do not affect losses.
            timing_reasons += _code_reason(run, baseline)
            for name, column in (("logging", "logging_steps"), ("checkpoints", "checkpointing_steps")):
                value, baseline_value = run.get(column), baseline.get(column)
                if None not in (value, baseline_value) and value != baseline_value:
                    timing_reasons.append(Confound(name, f"every {value:g} steps, baseline {baseline_value:g}"))
        reasons = list(dict.fromkeys(reasons))
        # Another version of the code may be slower or count differently. An equal loss is still valid evidence.
        labelled.append(
            run
            | {
                "baseline": baseline["run"],
                "confounded": _as_cell([*reasons, *timing_reasons]),
                "confounded_loss": _as_cell(reasons),
                "notes": notes,
            }
        )
    return labelled


def _as_cell(confounds: Sequence[Confound]) -> str:
    return _BETWEEN.join(confound.text for confound in confounds)


def texts_of_confounds(cell: str) -> list[str]:
    """Return the texts of the confounds in a cell of `confounded` or `confounded_loss`."""
    return [text for text in cell.split(_BETWEEN) if text]


def baseline_arm(runs: pd.DataFrame) -> str | None:
    """Return the baseline strategy of one workload; None if all of its runs failed."""
    columns = ["status_state", "arm", "strategy", "world_size", "seed", "repeat"]
    ended = runs.loc[runs["status_state"] == "ok", columns]
    baselines = _baseline_runs(ended.to_dict("records"))
    return str(next(iter(baselines.values()))["arm"]) if baselines else None


def has_dropout(runs: pd.DataFrame) -> bool:
    """Whether runs use dropout. Strategies draw different masks, so only means over seeds are comparable."""
    return bool(runs["dropout"].fillna(0).ne(0).any())


def _baseline_runs(group: list[Row]) -> dict[tuple[Any, Any], Row]:
    ended = [row for row in group if row["status_state"] == "ok"]
    if not ended:
        return {}
    seeds: defaultdict[str, set[Any]] = defaultdict(set)
    for row in ended:
        seeds[row["arm"]].add(row["seed"])
    # Prefer a strategy without another trainer or an override, then plain training, then the most seeds: a run with a
    # seed that the baseline lacks is in no pair.
    best = min(
        ended,
        key=lambda row: (
            bool(read_arm(row["arm"]).settings),
            row["strategy"] not in BASELINES,
            -len(seeds[row["arm"]]),
            strategy_order(row["strategy"]),
            row["world_size"],
            row["arm"],
        ),
    )
    chosen = [row for row in ended if row["arm"] == best["arm"]]
    chosen.sort(key=lambda row: (-1 if pd.isna(row["seed"]) else row["seed"], row["repeat"]))
    return {(row["seed"], row["repeat"]): row for row in chosen}


def differences_between(run: Row, reference: Row, same_code: bool) -> list[Confound]:
    """Return the invariants that differ between two runs of one seed."""
    code = _code_reason(run, reference) if same_code else ()
    return [*_differences(run, reference, same_seed=True), *code]


def _code_reason(run: Row, baseline: Row) -> Iterator[Confound]:
    """Compare the code of two runs by digest, else commit, else release; yield nothing if it is the same."""
    code, baseline_code = _code_name(run), _code_name(baseline)
    if run["code_sha256"] and baseline["code_sha256"]:
        same = run["code_sha256"] == baseline["code_sha256"]
    elif run["git_dirty"] or baseline["git_dirty"]:
        yield Confound("commit", f"{code}, baseline {baseline_code}, and the changes are not recorded")
        return
    elif not code or not baseline_code:
        yield Confound("commit", f"{code or 'not recorded'}, baseline {baseline_code or 'not recorded'}")
        return
    else:
        same = code == baseline_code
    if not same:
        yield Confound("another commit", f"{code}, baseline {baseline_code}")


def _code_name(run: Row) -> str:
    if run["git_commit"]:
        return f"{run['git_commit'][:7]}{' with changes' if run['git_dirty'] else ''}"
    return f"release {run['study_version']}" if run["study_version"] else ""


def _run_reasons(run: Row) -> Iterator[Confound]:
    parts = [run[key] for key in ("micro_batch_size", "gradient_accumulation_steps", "world_size", "global_batch_size")]
    if None not in parts and run["group_ranks"]:
        parts[2] //= run["group_ranks"]
    if None not in parts and math.prod(parts[:3]) != parts[3]:
        yield Confound("global batch", f"{math.prod(parts[:3])} samples a step, {parts[3]} asked")
    ran, requested = run["engine_precision"], run["precision"]
    if ran is not None and requested is not None and ran != requested:
        yield Confound("precision", f"ran in {ran}, {requested} asked")
    on_nvme = run["nvme_param_dtype"]
    if on_nvme is not None and on_nvme != run["param_dtype"]:
        yield Confound("precision", f"DeepSpeed keeps the parameters on NVMe as {on_nvme}: they are rounded every step")


def _differences(run: Row, baseline: Row, same_seed: bool) -> Iterator[Confound]:
    yield from _differences_by_column(run, baseline, same_seed)
    yield from _differences_of_optimizers(run, baseline)


def _differences_by_column(run: Row, baseline: Row, same_seed: bool) -> Iterator[Confound]:
    for name, column, form in _BY_COLUMN:
        value, baseline_value = run[column], baseline[column]
        if column == "initial_weights_sha256" and not same_seed:
            continue
        if run["virtual"] and column == "train_data_sha256":
            continue  # virtual ranks load only their samples, and their figures do not depend on them
        if column == "machines" and run["world_size"] != baseline["world_size"]:
            continue  # more ranks may need more machines; the same ranks on more machines use another network
        if value is None or baseline_value is None:
            # Without an engine there is no version of it, and a run that failed early recorded little.
            if column == "initial_weights_sha256" and value != baseline_value and run["status_state"] == "ok":
                yield Confound(name, "not recorded")
        elif value != baseline_value:
            detail = "" if form is None else f"{form.format(value)}, baseline {form.format(baseline_value)}"
            yield Confound(name, detail)


def _differences_of_optimizers(run: Row, baseline: Row) -> Iterator[Confound]:
    """Yield differences in the optimizer's settings, and in its class if the settings cannot be compared."""
    name, baseline_name = run["optimizer_class"], baseline["optimizer_class"]
    if name is None or baseline_name is None:
        return
    has_settings = run["optimizer_settings"] is not None and baseline["optimizer_settings"] is not None
    if has_settings:
        settings, baseline_settings = json.loads(run["optimizer_settings"]), json.loads(baseline["optimizer_settings"])
        # The learning rate is compared by column.
        different = sorted(
            key for key in {*settings, *baseline_settings} - {"lr"} if settings.get(key) != baseline_settings.get(key)
        )
        for key in different:
            yield Confound("optimizer", f"{key} {settings.get(key)}, baseline {baseline_settings.get(key)}")
    if name != baseline_name and not (has_settings and {name, baseline_name} <= _ADAMW):
        yield Confound("optimizer", f"{name}, baseline {baseline_name}")


def _step_reasons(run: Row, baseline: Row, steps: Steps, same_seed: bool) -> Iterator[Confound]:
    if run["run"] not in steps or baseline["run"] not in steps:
        return
    run_steps, baseline_steps = (
        {key: np.asarray(steps[name][key]) for key in _STEPS} for name in (run["run"], baseline["run"])
    )
    count = min(len(run_steps["lr"]), len(baseline_steps["lr"]))
    if not count:
        return
    same_samples = same_seed
    if same_seed and run["samples_sha256"] != baseline["samples_sha256"] and not run["virtual"]:
        differs = steps[run["run"]]["samples_hash"][:count] != steps[baseline["run"]]["samples_hash"][:count]
        same_samples = not np.any(differs)
        if not same_samples:
            yield Confound("samples", f"others from step {int(np.argmax(differs)) + 1} on")
    if run_steps["tokens"][0] != baseline_steps["tokens"][0]:
        yield Confound(
            "global batch", f"{run_steps['tokens'][0]} tokens a step, baseline {baseline_steps['tokens'][0]}"
        )
    rate_differs = ~np.isclose(run_steps["lr"][:count], baseline_steps["lr"][:count], rtol=1e-5, atol=0)
    if rate_differs.any():
        yield Confound("schedule", f"another learning rate from step {int(np.argmax(rate_differs)) + 1} on")
    same = all(run[key] == baseline[key] for key in ("initial_weights_sha256", "engine_precision", "dropout"))
    loss, reference = run["train_loss_first"], baseline["train_loss_first"]
    if not (same_samples and same) or run["dropout"] != 0 or loss is None or reference is None:
        return
    tolerance = _FIRST_LOSS_TOLERANCE.get(run["engine_precision"], _ROUNDED_FIRST_LOSS_TOLERANCE)
    if not math.isclose(loss, reference, rel_tol=tolerance):
        yield Confound(
            "loss normalization", f"step 1 says {loss:.4g}, baseline {reference:.4g}, on the same weights and samples"
        )


def _notes(run: Row) -> str:
    """Return notes on a run that are not broken invariants."""
    notes = [] if run["warnings"] is None else list(json.loads(run["warnings"]))
    if run["steps_skipped"]:
        notes.append(f"{run['steps_skipped']:g} of {run['steps']:g} steps skipped, whose gradients were not finite")
    if run["zero_stage"] and run["world_size"] == 1:
        notes.append(f"with one rank stage {run['zero_stage']} shards nothing")
    return "; ".join(notes)
