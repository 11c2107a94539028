"""What the real engine makes of the settings that the studied documents print, each given as a user would give it.

    python -m study.advisor.engine_keys [--output reports/engine_keys/keys.json]

Every probe is a launch of its own, with an Accelerate file or a DeepSpeed file that holds the setting. It reads back
what the live engine says, or keeps the line with which it was refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study.host.environment import describe_environment
from study.host.folders import cache_directory
from study.host.operators import use_own_build

MARK = "engine says: "
LIMIT_S = 180
_EXCEPTION = re.compile(r"^(?:\[rank0\]: )?([\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)
_STAGE3 = {"stage": 3}
_BASE = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": _STAGE3}
_ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_machines": 1, "num_processes": 1,
    "mixed_precision": "no",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Probe:
    """One setting, and what it does by the document: what the engine should say, or the error that it should give."""

    name: str
    # What the child does: give a DeepSpeed file to deepspeed.initialize, go through Accelerate, or measure a start.
    through: str
    deepspeed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    accelerate: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reads: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refuses: str = ""
    optimizer: str = "AdamW"
    # The peak of a process differs by a third from start to start.
    repeats: int = 1


def _zero(**settings: Any) -> dict[str, Any]:
    # DeepSpeed refuses torch's AdamW beside an offload unless told that it is meant.
    return {**_BASE, "zero_force_ds_cpu_optimizer": False, "zero_optimization": {**_STAGE3, **settings}}


def _plugin(**settings: Any) -> dict[str, Any]:
    return {**_ACCELERATE, "deepspeed_config": {"zero_stage": 3, **settings}}


def _start(init: bool, save: bool, precision: str = "no") -> dict[str, Any]:
    given = _plugin(zero3_init_flag=init, zero3_save_16bit_model=save)
    return {**given, "num_processes": 2, "mixed_precision": precision}


PROBES = (
    # Article S1.
    Probe("overlap_comm", "deepspeed", _zero(overlap_comm=True), reads={"zero.overlap_comm": True}),
    Probe("reduce_bucket_size default", "deepspeed", _zero(), reads={"zero.reduce_bucket_size": 500_000_000}),
    Probe(
        "pin_memory increased", "deepspeed",
        _zero(offload_optimizer={"device": "cpu", "pin_memory": 4}), reads={"zero.offload_optimizer.pin_memory": 4},
    ),
    Probe(
        "pin_memory true", "deepspeed", _zero(offload_optimizer={"device": "cpu", "pin_memory": True}),
        reads={"zero.offload_optimizer.pin_memory": True},
    ),
    Probe("aio true", "deepspeed", {**_BASE, "aio": True}, reads={"aio": True}),
    Probe(
        "zero_allow_untested_optimizer false", "deepspeed",
        {**_BASE, "zero_allow_untested_optimizer": False}, refuses="untested ZeRO Optimizer", optimizer="SGD",
    ),
    Probe(
        "the guide's settings and AdamW", "deepspeed",
        {**_BASE, "zero_optimization": {**_STAGE3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                                        "offload_param": {"device": "cpu", "pin_memory": True}}},
        reads={"zero.offload_optimizer.device": "cpu", "zero.offload_param.device": "cpu"},
    ),
    *(
        Probe(f"pipeline with stage {stage}", "pipeline",
              {**_BASE, "zero_optimization": {"stage": stage}}, reads={"zero.stage": stage})
        for stage in (0, 1, 2, 3)
    ),
    # Article S3.
    *(
        Probe(f"zero_stage {stage}", "accelerate",
              accelerate={**_ACCELERATE, "deepspeed_config": {"zero_stage": stage}}, reads={"zero.stage": stage})
        for stage in (1, 2, 3)
    ),
    Probe(
        "gradient_accumulation_steps", "accelerate", accelerate=_plugin(gradient_accumulation_steps=4),
        reads={"gradient_accumulation_steps": 4},
    ),
    Probe(
        "gradient_clipping", "accelerate", accelerate=_plugin(gradient_clipping=0.5), reads={"gradient_clipping": 0.5}
    ),
    Probe(
        "offload_optimizer_device", "accelerate", accelerate=_plugin(offload_optimizer_device="cpu"),
        reads={"zero.offload_optimizer.device": "cpu"},
    ),
    Probe(
        "offload_param_device", "accelerate",
        accelerate=_plugin(offload_optimizer_device="cpu", offload_param_device="cpu"),
        reads={"zero.offload_param.device": "cpu"},
    ),
    Probe(
        "zero3_save_16bit_model", "accelerate", accelerate=_plugin(zero3_save_16bit_model=True),
        reads={"zero.gather_16bit_weights_on_model_save": True},
    ),
    *(
        Probe(precision, "accelerate", accelerate={**_plugin(), "mixed_precision": precision},
              reads={f"{precision}_enabled": True})
        for precision in ("bf16", "fp16")
    ),
    *(
        Probe(f"distributed_type {name}", "accelerate",
              accelerate={**_ACCELERATE, "distributed_type": name}, reads={"distributed_type": name})
        for name in ("MPI", "NCCL")
    ),
    Probe("distributed_type DEEPSPEED", "accelerate", accelerate=_plugin(), reads={"distributed_type": "DEEPSPEED"}),
    # What its two flags do to the start and to the saved file, on two ranks.
    Probe("start, both flags off", "start", accelerate=_start(False, False), repeats=5),
    Probe("start, both flags on", "start", accelerate=_start(True, True), repeats=5),
    Probe("start, both flags on, bf16", "start", accelerate=_start(True, True, "bf16")),
)  # fmt: skip


def run(probe: Probe) -> dict[str, Any]:
    """What every start of it said; the figures are lists of as many."""
    first, *others = [_run(probe) for _ in range(probe.repeats)]
    figures = {key: [one["figures"].get(key) for one in (first, *others)] for key in first["figures"]}
    return first | {"figures": figures}


def _run(probe: Probe) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "deepspeed.json").write_text(json.dumps(probe.deepspeed))
        command = [sys.executable, "-m"]
        if probe.accelerate:
            launcher = folder / "accelerate.yaml"
            # JSON is YAML.
            launcher.write_text(json.dumps(probe.accelerate))
            command += ["accelerate.commands.launch", "--config_file", str(launcher), "--main_process_port", "0", "-m"]
        command += ["study.advisor.engine_keys", "--child", probe.name, "--folder", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    # Where there are two ranks, both say the same but for a little of their memory.
    lines = done.stdout.splitlines()
    says = next((json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)), None)
    error = "" if says is not None else _error(done.stderr)
    figures = dict(says.pop("figures", {})) if says is not None else {}
    if probe.refuses:
        figures["as_said"] = int(probe.refuses in error)
    elif probe.reads:
        figures["as_said"] = int(says is not None and all(says.get(key) == value for key, value in probe.reads.items()))
    return {
        "name": probe.name, "given": dict(probe.deepspeed or probe.accelerate), "expected": dict(probe.reads),
        "says": {key: value for key, value in (says or {}).items() if key in probe.reads}, "error": error,
        "figures": figures, "said": _said(probe, says, error),
    }  # fmt: skip


def _said(probe: Probe, says: Mapping[str, Any] | None, error: str) -> str:
    if says is None:
        return f"refused: {error}"
    heard = ", ".join(f"{key} {says.get(key)}" for key in probe.reads)
    return f"the engine says {heard}" if heard else "measured on two ranks"


def _error(text: str) -> str:
    """The line of the exception of the first process that failed; nothing of this machine's paths."""
    found = _EXCEPTION.findall(text)
    own = [line for line in found if not line.startswith(("subprocess.", "torch.distributed.elastic"))]
    return (own or found or ["ended without a word"])[0][:300]


def child(probe: Probe, folder: Path) -> dict[str, Any]:
    if probe.through == "start":
        return _measured_start(folder)
    import torch
    from accelerate import Accelerator, PartialState

    if probe.through == "accelerate":
        PartialState(cpu=True)
    else:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = getattr(torch.optim, probe.optimizer)(model.parameters(), lr=1e-3)
    if probe.through == "accelerate":
        accelerator = Accelerator()
        data: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 8)), batch_size=2)
        engine, *_ = accelerator.prepare(model, optimizer, data)
        return {"distributed_type": accelerator.distributed_type.value, **_read(engine)}
    import deepspeed

    if probe.through == "pipeline":
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        model = deepspeed.pipe.PipelineModule(list(model), num_stages=1, loss_fn=torch.nn.functional.mse_loss)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=str(folder / "deepspeed.json"))
    return _read(engine)


def _read(engine: Any) -> dict[str, Any]:
    """Every setting that a probe asks for, by its name in PROBES."""
    if not hasattr(engine, "zero_optimization_stage"):
        return {}
    zero = json.loads(engine._config.zero_config.model_dump_json())
    found = {f"zero.{key}": value for key, value in zero.items()}
    found |= {
        f"zero.{section}.{key}": value for section in ("offload_optimizer", "offload_param")
        for key, value in (zero[section] or {}).items()
    }  # fmt: skip
    return found | {
        "aio": engine._config.aio_config, "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "gradient_clipping": engine.gradient_clipping(), "bf16_enabled": engine.bfloat16_enabled(),
        "fp16_enabled": engine.fp16_enabled(),
    }  # fmt: skip


def _measured_start(folder: Path) -> dict[str, Any]:
    """The peak that making GPT-2 (124 M parameters) adds to this process, and the size of the file that is saved."""
    import resource

    import deepspeed
    import torch
    from accelerate import Accelerator, PartialState
    from transformers import AutoModelForCausalLM, GPT2Config

    state = PartialState(cpu=True)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    accelerator = Accelerator()
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    # A small one first, so that libraries and connections are not counted.
    AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=1, n_embd=64, vocab_size=64))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = AutoModelForCausalLM.from_config(GPT2Config())
    made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = [(getattr(each, "ds_numel", each.numel()), each.numel()) for each in model.parameters()]
    parameters, held = (sum(column) for column in zip(*sizes, strict=True))
    engine = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))[0]
    is_saved = bool(engine.save_16bit_model(str(folder), "model.bin"))
    state.wait_for_everyone()
    figures: dict[str, float] = {
        "peak_of_start_mib": (made - before) / 1024, "whole_parameters_held": held / parameters,
        "is_saved": int(is_saved),
    }  # fmt: skip
    if is_saved:
        size = sum(file.stat().st_size for file in folder.glob("model*.bin"))
        figures["bytes_per_parameter"] = size / parameters
    return {"figures": figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("reports/engine_keys/keys.json"))
    parser.add_argument("--child", choices=[probe.name for probe in PROBES], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        use_own_build(cache_directory())
        said = child(next(probe for probe in PROBES if probe.name == options.child), options.folder)
        print(MARK + json.dumps(said, default=str), flush=True)
        return 0
    found = []
    for probe in PROBES:
        found.append(run(probe))
        print(f"{probe.name}: {found[-1]['said']}", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    document = {"environment": describe_environment(), "probes": found}
    options.output.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
