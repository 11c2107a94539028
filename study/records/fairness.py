"""Fair comparison: every invariant that a record shows, against the baseline of its workload.

A run that breaks one stays in every table and plot, and carries the invariant's name.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from study.records.workloads import BASELINES, strategy_order

# Classes that are AdamW when their settings say so; any other class is other mathematics.
_ADAMW = {"torch.AdamW", "deepspeed.DeepSpeedCPUAdam", "deepspeed.FusedAdam"}
# The first loss is taken before any update: the same weights and samples give it up to rounding.
_FIRST_LOSS_TOLERANCE = {"fp32": 0.01}
_ROUNDED_FIRST_LOSS_TOLERANCE = 0.05
_STEPS = ("lr", "tokens")
# Invariants that one column shows, and how its value is printed; None for hashes, which say nothing to a reader.
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
)


Row = dict[str, Any]
Steps = Mapping[str, Mapping[str, Any]]


def label_confounds(rows: Sequence[Row], steps: Steps) -> list[Row]:
    """Return every run with its `baseline`, `confounded`, `confounded_loss` and `notes`. None is not recorded."""
    workloads: dict[str, list[Row]] = {}
    for row in rows:
        workloads.setdefault(row["workload_key"], []).append(row)
    baselines = {key: _baseline_runs(group) for key, group in workloads.items()}
    return [row | _labels(row, baselines[row["workload_key"]], steps) for row in rows]


def baseline_arm(runs: pd.DataFrame) -> str | None:
    """Return the baseline of one workload; None if no run of it ended ok."""
    columns = ["status_state", "arm", "strategy", "world_size", "seed", "repeat"]
    ended = runs.loc[runs["status_state"] == "ok", columns]
    baselines = _baseline_runs(ended.to_dict("records"))
    return str(next(iter(baselines.values()))["arm"]) if baselines else None


def has_dropout(runs: pd.DataFrame) -> bool:
    """Whether strategies draw different dropout masks, so that only means over seeds compare losses."""
    return bool(runs["dropout"].fillna(0).ne(0).any())


def _baseline_runs(group: list[Row]) -> dict[tuple[Any, Any], Row]:
    """Return the baseline's runs of one workload by seed and repeat."""
    ended = [row for row in group if row["status_state"] == "ok"]
    if not ended:
        return {}
    seeds: defaultdict[str, set[Any]] = defaultdict(set)
    for row in ended:
        seeds[row["arm"]].add(row["seed"])
    # A plain strategy first: one with another trainer or an override is a variant. Then plain training with
    # most seeds: the others of a seed that it lacks would have no partner.
    best = min(
        ended,
        key=lambda row: (
            ", " in row["arm"], row["strategy"] not in BASELINES, -len(seeds[row["arm"]]),
            strategy_order(row["strategy"]), row["world_size"], row["arm"],
        ),
    )  # fmt: skip
    chosen = [row for row in ended if row["arm"] == best["arm"]]
    chosen.sort(key=lambda row: (-1 if pd.isna(row["seed"]) else row["seed"], row["repeat"]))
    return {(row["seed"], row["repeat"]): row for row in chosen}


def _labels(run: Row, baselines: dict[tuple[Any, Any], Row], steps: Steps) -> dict[str, str]:
    if not baselines:
        return {"baseline": "", "confounded": "", "confounded_loss": "", "notes": _notes(run)}
    same_seed = [row for (seed, _), row in baselines.items() if seed == run["seed"]]
    baseline = baselines.get((run["seed"], run["repeat"])) or next(iter(same_seed or baselines.values()))
    reasons = [*_own_reasons(run), *_differences(run, baseline, bool(same_seed))]
    notes, code = _notes(run), ""
    if not same_seed and run["seed"] is not None:
        # It is in no pair. Another seed's weights and samples are others by design.
        lacks = f"no {baseline['arm']} with seed {run['seed']} ended ok, so it is in no ratio and no difference"
        notes = "; ".join(filter(None, [notes, lacks]))
    if run["status_state"] == "ok" and baseline["run"] != run["run"]:
        reasons += _step_reasons(run, baseline, steps, bool(same_seed))
        code = "; ".join(filter(None, [_code_reason(run, baseline), *_interruptions(run, baseline)]))
    reasons = list(dict.fromkeys(reasons))
    # Other code may be slower or count otherwise. A loss that it computes the same is no weaker evidence.
    return {
        "baseline": baseline["run"], "confounded": "; ".join([*reasons, *filter(None, [code])]),
        "confounded_loss": "; ".join(reasons), "notes": notes,
    }  # fmt: skip


def differences_between(run: Row, other: Row, same_code: bool) -> list[str]:
    """Return every invariant that two runs of one seed do not share."""
    return [*_differences(run, other, same_seed=True), *filter(None, [_code_reason(run, other) if same_code else ""])]


def _code_reason(run: Row, baseline: Row) -> str:
    """Compare the code that ran: by its digest, else its commit, else its release; empty if it is the same."""
    here, there = _code_name(run), _code_name(baseline)
    if run["code_sha256"] and baseline["code_sha256"]:
        same = run["code_sha256"] == baseline["code_sha256"]
    elif run["git_dirty"] or baseline["git_dirty"]:
        return f"commit: {here}, baseline {there}, and nothing says what the changes were"
    elif not here or not there:
        return f"commit: {here or 'not recorded'}, baseline {there or 'not recorded'}"
    else:
        same = here == there
    return "" if same else f"another commit: {here}, baseline {there}"


def _interruptions(run: Row, baseline: Row) -> Iterator[str]:
    """Yield differences in logging and checkpoints: each synchronizes the device, and changes no loss."""
    for name, column in (("logging", "logging_steps"), ("checkpoints", "checkpointing_steps")):
        here, there = run.get(column), baseline.get(column)
        if None not in (here, there) and here != there:
            yield f"{name}: every {here:g} steps, baseline {there:g}"


def _code_name(run: Row) -> str:
    if run["git_commit"]:
        return f"{run['git_commit'][:7]}{' with changes' if run['git_dirty'] else ''}"
    return f"release {run['study_version']}" if run["study_version"] else ""


def _own_reasons(run: Row) -> Iterator[str]:
    """Yield the invariants that one record breaks by itself."""
    parts = [run[key] for key in ("micro_batch_size", "gradient_accumulation_steps", "world_size", "global_batch_size")]
    if None not in parts and run["group_ranks"]:
        parts[2] //= run["group_ranks"]
    if None not in parts and math.prod(parts[:3]) != parts[3]:
        yield f"global batch: {math.prod(parts[:3])} samples a step, {parts[3]} asked"
    ran, asked = run["engine_precision"], run["precision"]
    if ran is not None and asked is not None and ran != asked:
        yield f"precision: ran in {ran}, {asked} asked"
    for warning in _warnings(run):
        if "are rounded" in warning:
            yield f"precision: {warning}"


def _differences(run: Row, baseline: Row, same_seed: bool) -> Iterator[str]:
    for name, column, form in _BY_COLUMN:
        here, there = run[column], baseline[column]
        if column == "initial_weights_sha256" and not same_seed:
            continue
        if run["virtual"] and column == "train_data_sha256":
            continue  # each loads its own samples alone, and nothing that it counts depends on them
        if here is None or there is None:
            # An engine that is absent has no version, and a run that failed early recorded little.
            if column == "initial_weights_sha256" and here != there and run["status_state"] == "ok":
                yield f"{name}: not recorded"
        elif here != there:
            yield name if form is None else f"{name}: {form.format(here)}, baseline {form.format(there)}"
    here, there = (row.get("machines") for row in (run, baseline))
    # More ranks may need more machines. As many ranks have another network on more of them.
    if run["world_size"] == baseline["world_size"] and None not in (here, there) and here != there:
        yield f"machines: {here}, baseline {there}"
    yield from _optimizer_difference(run, baseline)


def _optimizer_difference(run: Row, baseline: Row) -> Iterator[str]:
    here, there = run["optimizer_class"], baseline["optimizer_class"]
    if here is None or there is None:
        return
    known = run["optimizer_settings"] is not None and baseline["optimizer_settings"] is not None
    if known:
        mine, its = json.loads(run["optimizer_settings"]), json.loads(baseline["optimizer_settings"])
        # The learning rate has a column of its own.
        different = sorted(key for key in {*mine, *its} - {"lr"} if mine.get(key) != its.get(key))
        for key in different:
            yield f"optimizer: {key} {mine.get(key)}, baseline {its.get(key)}"
    if here != there and not (known and {here, there} <= _ADAMW):
        yield f"optimizer: {here}, baseline {there}"


def _step_reasons(run: Row, baseline: Row, steps: Steps, same_seed: bool) -> Iterator[str]:
    if run["run"] not in steps or baseline["run"] not in steps:
        return
    mine, its = ({key: np.asarray(steps[name][key]) for key in _STEPS} for name in (run["run"], baseline["run"]))
    count = min(len(mine["lr"]), len(its["lr"]))
    if not count:
        return
    same_samples = same_seed
    if same_seed and run["samples_sha256"] != baseline["samples_sha256"] and not run["virtual"]:
        others = steps[run["run"]]["samples_hash"][:count] != steps[baseline["run"]]["samples_hash"][:count]
        same_samples = not np.any(others)
        if not same_samples:
            yield f"samples: others from step {int(np.argmax(others)) + 1} on"
    if mine["tokens"][0] != its["tokens"][0]:
        yield f"global batch: {mine['tokens'][0]} tokens a step, baseline {its['tokens'][0]}"
    far = ~np.isclose(mine["lr"][:count], its["lr"][:count], rtol=1e-5, atol=0)
    if far.any():
        yield f"schedule: another learning rate from step {int(np.argmax(far)) + 1} on"
    if same_samples and run["initial_weights_sha256"] == baseline["initial_weights_sha256"]:
        yield from _first_loss_reason(run, baseline)


def _first_loss_reason(run: Row, baseline: Row) -> Iterator[str]:
    """Compare the first losses: a share or a multiple of the baseline's shows another normalization."""
    same = all(run[column] == baseline[column] for column in ("engine_precision", "dropout"))
    here, there = run["train_loss_first"], baseline["train_loss_first"]
    if not same or run["dropout"] != 0 or here is None or there is None:
        return
    tolerance = _FIRST_LOSS_TOLERANCE.get(run["engine_precision"], _ROUNDED_FIRST_LOSS_TOLERANCE)
    if not math.isclose(here, there, rel_tol=tolerance):
        yield f"loss normalization: step 1 says {here:.4g}, baseline {there:.4g}, on the same weights and samples"


def _warnings(run: Row) -> list[str]:
    return [] if run["warnings"] is None else list(json.loads(run["warnings"]))


def _notes(run: Row) -> str:
    """Notes on a run that break no invariant."""
    notes = [warning for warning in _warnings(run) if "are rounded" not in warning]
    if run["steps_skipped"]:
        notes.append(f"{run['steps_skipped']:g} of {run['steps']:g} steps skipped, whose gradients were not finite")
    if run["zero_stage"] and run["world_size"] == 1 and not any("shards nothing" in note for note in notes):
        notes.append(f"with one rank stage {run['zero_stage']} shards nothing")
    return "; ".join(notes)
