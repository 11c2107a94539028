"""Run directories as the study writes them, made without training: fast, in any number, with known figures."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from study.config.flags import RunConfig, resolve_config
from study.config.places import REPOSITORY
from study.config.strategies import read_strategy
from study.records.directory import seal
from study.records.models import Record
from study.records.schema import SEAL
from study.report.document import Answer

Rows = list[dict[str, Any]]
GIB = 2**30
PARAMETERS = 2_500_000
# Cost of each strategy relative to DDP, and the place of its state; round figures keep the expected values simple.
SLOWER = {"single": 1.8, "zero1": 1.1, "zero2": 1.1, "zero3": 1.5, "fsdp2": 1.4}
STARTED = "2026-03-01T10:{:02d}:{:02d}+00:00"
# Of a step of 100 ms: 90 ms of operations in 80 ms, so one tenth of the step is overlap.
PROFILE = json.loads((REPOSITORY / "tests" / "data" / "profile.json").read_text())


def write_run(
    root: Path,
    strategy: str = "zero3",
    *,
    name: str | None = None,
    seed: int = 42,
    repeat: int = 1,
    ranks: int | None = None,
    steps: int = 8,
    state: str = "ok",
    reason: str = "",
    loss_shift: float = 0.0,
    time_factor: float = 1.0,
    gpu: bool = True,
    virtual: bool = False,
    started: str | None = None,
    config: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    samples: str = "",
    machines: int = 1,
) -> Path:
    """Write one consistent record. `config`, `engine` and `environment` override single values."""
    ranks = ranks or (1 if strategy == "single" else 2)
    flags = {"task": "gpt-wikitext", "max_steps": steps, "seed": seed, "eval_steps": max(1, steps // 2)}
    run_config = resolve_config(RunConfig.from_dict(flags | dict(config or {}), "synthetic"), accelerator_visible=False)
    path = root / (name or f"{run_config.run_id(strategy, ranks)}-r{repeat}")
    path.mkdir(parents=True)
    rng = random.Random(f"{path.name}")
    documents: dict[str, Any] = {
        "config.json": run_config.to_dict() | {"output_dir": f"runs/synthetic/{path.name}"},
        "environment.json": _environment(gpu, 1 if virtual else machines) | dict(environment or {}),
        "engine.json": _engine(run_config, strategy, ranks, virtual) | dict(engine or {}),
    }
    rows: Rows = []
    evals: Rows = []
    if state == "ok":
        rows = list(_rows(run_config, strategy, steps, loss_shift, time_factor, samples, virtual, rng))
        evaluated = [row for row in rows if row["step"] % run_config.eval_steps == 0 or row["step"] == steps]
        losses = {row["step"]: 1.01 * (row["loss"] or 1) for row in evaluated}
        evals = [{"step": step, "eval_loss": loss, "perplexity": math.exp(loss)} for step, loss in losses.items()]
        documents |= _measurements(run_config, strategy, ranks, gpu, rows, evals)
        if machines > 1:
            # 90 % of the traffic crosses machines; the rest stays within one.
            across = 0.9 * documents["summary.json"]["sent_bytes_per_step"]
            documents["traffic.json"] |= {
                "ranks_per_machine": ranks // machines,
                "across_machines_bytes_per_rank": across,
            }
        if run_config.profile_steps:
            last = list(range(steps - run_config.profile_steps + 1, steps + 1))
            documents["profile.json"] = PROFILE | {"device": "cuda" if gpu else "cpu", "steps": last}
    for file, document in documents.items():
        (path / file).write_text(json.dumps(document, indent=2) + "\n")
    for file, lines in (("steps.jsonl", rows), ("evals.jsonl", evals)):
        (path / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = {
        "state": state,
        "reason": reason,
        "hint": "use less" if reason else "",
        "attempt": 1,
        "started_at": started or STARTED.format(rng.randrange(60), rng.randrange(60)),
        "ended_at": "2026-03-01T12:00:00+00:00",
    }
    (path / "status.json").write_text(json.dumps(seal(path, status), indent=2) + "\n")
    return path


def without_seal(path: Path) -> dict[str, Any]:
    """Remove the seal, which a killed run lacks too, and return the status."""
    status = json.loads((path / "status.json").read_text())
    status = {key: value for key, value in status.items() if key not in SEAL}
    (path / "status.json").write_text(json.dumps(status, indent=2) + "\n")
    return status


def reseal(path: Path) -> None:
    """Seal the record with its present contents."""
    (path / "status.json").write_text(json.dumps(seal(path, without_seal(path)), indent=2) + "\n")


def with_steps(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Rewrite the rows of all steps, update the summary, and seal the record."""
    rows = [change(json.loads(line)) for line in (path / "steps.jsonl").read_text().splitlines()]
    (path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = json.loads((path / "summary.json").read_text())
    summary |= {"train_loss_first": rows[0]["loss"], "train_loss_final": rows[-1]["loss"]}
    (path / "summary.json").write_text(json.dumps(summary))
    reseal(path)


def as_never_started(cell: Path) -> None:
    """Reduce a cell to the files that a sweep writes before the run starts."""
    for name in ("config.json", "engine.json", "environment.json"):
        (cell / name).unlink()
    without_seal(cell)


def _rows(
    config: RunConfig, strategy: str, steps: int, shift: float, factor: float, samples: str, virtual: bool, rng: Any
) -> Iterator[dict[str, Any]]:
    noise = random.Random(f"{config.seed}")
    for step in range(1, steps + 1):
        loss = 1.7 + 4 * math.exp(-step / 12) + noise.gauss(0, 0.02) + rng.gauss(0, 1e-7) + (shift if step > 1 else 0)
        key = hashlib.sha256(f"{config.seed} {config.global_batch_size} {samples} {step}".encode()).hexdigest()[:16]
        yield {
            "step": step,
            "loss": None if virtual else loss,
            "lr": config.learning_rate * (steps - step + 1) / steps,
            "grad_norm": None if strategy == "zero0" else 1 + rng.random(),
            "step_time_s": factor * SLOWER.get(strategy, 1.0) * 0.1 * (1 + 0.05 * rng.random()),
            "tokens": config.global_batch_size * config.seq_length,
            "samples_hash": key,
        }


def _environment(gpu: bool, machines: int) -> dict[str, Any]:
    machine = {"cpu": "Synthetic processor", "devices": [{"name": "Synthetic GPU"}] if gpu else []}
    return ({"other_machines": [machine] * (machines - 1)} if machines > 1 else {}) | {
        "python": "3.11.7",
        "packages": {"torch": "2.13.0", "accelerate": "1.15.0", "transformers": "5.23.0"},
        "git_commit": "0" * 40,
        "cpu": "Synthetic processor",
        "cpu_cores": 8,
        "threads_per_rank": 1,
        "host_memory_gib": 64.0,
        "devices": [{"name": "Synthetic GPU", "memory_gib": 24.0}] if gpu else [],
        "cuda": "13.0" if gpu else None,
        "driver": "600.1" if gpu else None,
    }


def _engine(config: RunConfig, strategy: str, ranks: int, virtual: bool) -> dict[str, Any]:
    file = read_strategy(strategy)
    offload = file.offload_device("optimizer")
    return {
        "strategy": strategy,
        "distributed_type": file.distributed_type,
        "world_size": ranks,
        "virtual": virtual,
        "zero_stage": file.zero_stage,
        "offload_optimizer": offload,
        "offload_param": file.offload_device("param"),
        "nvme_path": "/nvme/offload" if file.uses_nvme else None,
        "optimizer_class": "deepspeed.DeepSpeedCPUAdam" if offload else "torch.AdamW",
        "optimizer_settings": {
            "lr": config.learning_rate,
            "weight_decay": config.weight_decay,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "decoupled_weight_decay": True,
        },
        "precision": config.precision,
        "param_dtype": "float32",
        "gradient_clipping": config.max_grad_norm,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": config.global_batch_size // ranks,
        "buckets": {"reduce_bucket_size": 500_000_000},
        "torch": "2.13.0",
        "deepspeed": "0.19.8",
        "initial_weights_sha256": hashlib.sha256(f"weights {config.seed}".encode()).hexdigest(),
        "warnings": [],
        "floor": {"expected_loss": 1.7, "oracle_eval_loss": 1.71, "expected_accuracy": None},
        "trainer": "study",
    }


def state_bytes(strategy: str, ranks: int) -> dict[str, dict[str, float]]:
    """Return a rank's state bytes: optimizer 12 per parameter with ZeRO, else 8; sharded kinds divided by the ranks."""
    file = read_strategy(strategy)
    stage = 3 if strategy == "fsdp2" else file.zero_stage or 0
    optimizer = (12 if file.zero_stage else 8) * PARAMETERS
    offloads = {"params": file.offload_device("param"), "optimizer": file.offload_device("optimizer")}
    state: dict[str, dict[str, float]] = {}
    for kind, size, least in (("params", 4 * PARAMETERS, 3), ("grads", 4 * PARAMETERS, 2), ("optimizer", optimizer, 1)):
        place = {"cpu": "host", "nvme": "nvme"}.get(offloads.get(kind) or "", "device")
        state[kind] = {"device": 0, "host": 0, "nvme": 0, place: size // (ranks if stage >= least else 1)}
    return state


def _measurements(config: RunConfig, strategy: str, ranks: int, gpu: bool, rows: Rows, evals: Rows) -> dict[str, Any]:
    state = state_bytes(strategy, ranks)
    state_gib = sum(kinds["device"] for kinds in state.values()) / GIB
    activations = 0.5 * config.global_batch_size / ranks / 16
    allocated = state_gib + activations
    used = {"allocated": allocated, "reserved": allocated + 0.2, "device": allocated + 1.0}
    phase = {
        **(used if gpu else dict.fromkeys(used)),
        "host": 1.5 + sum(kinds["host"] for kinds in state.values()) / GIB,
    }
    times = sorted(row["step_time_s"] for row in rows)
    timing = {
        "step_time_s_median": times[len(times) // 2],
        "step_time_s_p10": times[len(times) // 10],
        "step_time_s_p90": times[-1 - len(times) // 10],
    }
    sent = {"single": 0, "zero3": 8 * PARAMETERS, "fsdp2": 10 * PARAMETERS}.get(strategy, 4 * PARAMETERS)
    # Differs from the sent bytes, also in its ratio between strategies, so that a test notices a mix-up.
    payload = sent * (3 if strategy == "zero3" else 2)
    collectives = (
        {"all_reduce": {"calls": 2, "payload_bytes": payload, "wire_bytes_per_rank": float(sent)}} if sent else {}
    )
    tokens_per_s = config.global_batch_size * config.seq_length / timing["step_time_s_median"]
    summary = {
        "steps": len(rows), "tokens": sum(row["tokens"] for row in rows), "train_loss_first": rows[0]["loss"],
        "train_loss_final": rows[-1]["loss"], "eval_loss_final": evals[-1]["eval_loss"], "eval_accuracy": None,
        "eval_perplexity": evals[-1]["perplexity"], "runtime_s": sum(times), "startup_s": 5.0, **timing,
        "tokens_per_s": tokens_per_s, "tokens_per_s_per_device": tokens_per_s / ranks,
        "samples_per_s": tokens_per_s / config.seq_length, "model_flops_per_step": 10**10, "mfu": None,
        "peak_memory_gib_allocated": phase["allocated"], "peak_memory_gib_reserved": phase["reserved"],
        "peak_memory_gib_device": phase["device"], "avg_memory_gib_device": phase["device"],
        "host_peak_rss_gib": phase["host"], "state_bytes_per_rank": state, "comm_bytes_per_step": payload,
        "sent_bytes_per_step": float(sent), "gloo_sent_bytes_per_step": None if gpu else 1.5 * sent,
        "comm_calls_per_step": 2 if payload else 0, "energy_j": None,
    }  # fmt: skip
    memory = {
        "unit": "GiB",
        "ranks": [
            {
                "rank": rank,
                "phases": dict.fromkeys(("init", "first_step", "steady", "eval"), phase),
                "device_mean_over_steps": phase["device"],
                "state": {
                    "state_bytes": state,
                    "buffer_bytes": {"reduce_bucket.device": 1000},
                    "other_tensor_bytes": 10,
                },
                "time": timing,
            }
            for rank in range(ranks)
        ],
    }
    traffic = {"step": min(4, len(rows)), "world_size": ranks, "collectives": collectives}
    return {"memory.json": memory, "traffic.json": traffic, "summary.json": summary}


def required_keys(model: type[Record]) -> tuple[str, ...]:
    """Return the keys that every record of this version and of older ones has."""
    return tuple(key for key, field in model.model_fields.items() if field.is_required())


def answered(answer: Answer | None) -> Answer:
    """Return the answer, which must be there."""
    assert answer is not None
    return answer
