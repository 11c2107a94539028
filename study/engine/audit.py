"""What really runs, read back from the live engine: never from the files, always against what they ask.

A run that does not do what its file says fails before its first step; what the engine insists on is a warning in the
record.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from study.config.errors import RunFailed
from study.config.flags import BatchPlan, RunConfig
from study.config.launched import Launch
from study.config.names import override, parse_overrides
from study.engine import activations, autotp
from study.engine.groups import asked_team, live_team
from study.engine.live import asked_of_fsdp, dtype_name, read_deepspeed, read_plain, uses_tf32
from study.engine.optimizer import LOSS_SCALER, asked_settings, live_settings, read_loss_scaler
from study.host.stacks import package_version, unverified_pair
from study.workloads.architecture import adapters_in, asked_adapters
from study.workloads.presets import preset_layers

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


# By name: transformers', and what DeepSpeed's AutoTP makes of them.
_LINEAR = ("Linear", "Conv1D", "LinearLayer", "LinearAllreduce")


class TrainingRun(Protocol):
    """What the engine is set up from, and what is held against it."""

    config: RunConfig
    launch: Launch
    plan: BatchPlan
    output_dir: Path
    swap_folder: Path | None
    checkpoint: tuple[Path, dict[str, Any]] | None

    @property
    def first_step(self) -> int: ...


def audit(
    run: TrainingRun, accelerator: Accelerator, model: Any, optimizer: Any, plan: BatchPlan | None = None
) -> dict[str, Any]:
    """engine.json from the live objects. Raises RunFailed where they differ from what was asked.

    `plan` is the engine's, where that is not the run's.
    """
    import torch

    from study.metrics.state import base_optimizer

    config, launch, plan = run.config, run.launch, plan or run.plan
    is_deepspeed = launch.strategy.deepspeed is not None
    if is_deepspeed and not hasattr(model, "zero_optimization_stage"):
        raise RunFailed(
            f"{launch.strategy.name} asks for DeepSpeed, and accelerate {package_version('accelerate')} made"
            f" {type(model).__name__} of the model",
            "use a later accelerate: early ones know DeepSpeed on GPUs alone",
        )
    live = read_deepspeed(model) if is_deepspeed else read_plain(accelerator, model, config, plan)
    base = base_optimizer(optimizer)
    live |= {
        "attn_implementation": getattr(accelerator.unwrap_model(model).config, "_attn_implementation", None),
        "gradient_checkpointing": bool(accelerator.unwrap_model(model).is_gradient_checkpointing),
        "strategy": launch.strategy.name,
        "own_settings": launch.strategy.own_settings,
        "distributed_type": accelerator.distributed_type.value,
        "world_size": accelerator.num_processes,
        "optimizer_class": f"{type(base).__module__.split('.')[0]}.{type(base).__name__}",
        "optimizer_settings": live_settings(base),
        "adapters": adapters_in(accelerator.unwrap_model(model)),
        "loss_scaler": read_loss_scaler(accelerator, model),
        "tf32": uses_tf32(),
    }
    if is_deepspeed and launch.strategy.team is not None:
        live["partitioned_activations"] = activations.live_partition(model)
    if (team := live_team(accelerator, model)) is not None:
        live["team"] = team
    asked = _asked(run, plan) | asked_of_fsdp(accelerator)
    found = {key: live.get(key) for key in asked}
    differences = [
        f"{key} is {found[key]!r}, asked was {value!r}" for key, value in asked.items() if found[key] != value
    ]
    if differences:
        raise RunFailed(
            f"the engine does not do what {launch.strategy.name} asks: {'; '.join(differences)}",
            "compare the strategy file with engine.json",
        )
    live["warnings"] = _warnings(run, live, model)
    _check_swapped(run)
    trained = (one for one in model.parameters() if one.requires_grad)
    return live | {
        "virtual": launch.virtual,
        "virtual_rank": launch.rank if launch.virtual else None,
        # A large device that stands in for a smaller one, where this is a number.
        "emulated_device_memory_gib": config.device_memory_cap_gib,
        "model_parameters": autotp.elements(model.parameters(), launch.strategy.team_size),
        "trainable_parameters": autotp.elements(trained, launch.strategy.team_size),
        "model_layers": accelerator.unwrap_model(model).config.num_hidden_layers,
        # Where the model is a preset at another depth, the depth it has by itself.
        "preset_layers": preset_layers(config.model_name_or_path),
        "torch": torch.__version__,
        "deepspeed": package_version("deepspeed"),
    }


def _warnings(run: TrainingRun, live: Mapping[str, Any], model: Any) -> list[str]:
    """What the engine insists on, which bears on the comparison; and what of this run was not the thing itself."""
    import torch

    config, launch = run.config, run.launch
    warnings = []
    if launch.strategy.deepspeed is not None and (pair := unverified_pair()):
        warnings.append(f"experiment: {pair}, which has not been shown to train as DDP does")
    if "DeepSpeedCPUAdam" in live["optimizer_class"]:
        warnings.append("DeepSpeed replaced torch's AdamW by DeepSpeedCPUAdam, because the optimizer is offloaded")
    if launch.strategy.offload_device("param") == "nvme":
        swappers = [getattr(parameter, "nvme_swapper", None) for parameter in model.module.parameters()]
        swapped = dtype_name(next(swapper.dtype for swapper in swappers if swapper is not None))
        if swapped != live["param_dtype"]:
            warnings.append(f"DeepSpeed keeps the parameters on NVMe as {swapped}: they are rounded every step")
    if live["zero_stage"] and live.get("team", {}).get("state_over", live["world_size"]) == 1:
        alone = "team" if "team" in live else "rank"
        warnings.append(f"with one {alone} stage {live['zero_stage']} shards nothing")
    if config.optimizer == "muon" and live["zero_stage"]:
        warnings.append("DeepSpeed reports the norm of what Muon makes of the gradients, and not theirs")
    if launch.virtual:
        warnings.append(
            f"virtual: rank {launch.rank} of {launch.world_size} without the others; it starts from one constant for"
            " every weight, and what it receives is its own data"
        )
        if torch.cuda.is_available():
            warnings.append("virtual: the peaks of the device are without the communicators and buffers of NCCL")
    if run.checkpoint and (saved_by := run.checkpoint[1]["world_size"]) != launch.world_size:
        warnings.append(f"resumed: the steps up to {run.first_step} ran on {saved_by} ranks")
    if run.checkpoint:
        warnings.append(f"resumed: time, energy and peaks of the run are of what came after step {run.first_step}")
    if config.device_memory_cap_gib is not None:
        warnings.append(
            f"emulated: {torch.cuda.get_device_name()} held to {config.device_memory_cap_gib} GiB of what torch"
            " allocates; context and communicators come on top"
        )
    return warnings


def _asked(run: TrainingRun, plan: BatchPlan) -> dict[str, Any]:
    import torch

    config, strategy = run.config, run.launch.strategy
    on_cores = strategy.distributed_type == "MULTI_GPU" and not strategy.team and not torch.cuda.is_available()
    asked: dict[str, Any] = {
        "distributed_type": "MULTI_CPU" if on_cores else strategy.distributed_type,
        "world_size": run.launch.world_size,
        "zero_stage": strategy.zero_stage,
        "offload_optimizer": strategy.offload_device("optimizer"),
        "offload_param": strategy.offload_device("param"),
        "precision": config.precision,
        "gradient_clipping": config.max_grad_norm,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "nvme_path": str(run.swap_folder) if strategy.uses_nvme else None,
        "loss_scaler": LOSS_SCALER if config.precision.startswith("fp16") else None,
        "tf32": False,
        "gradient_checkpointing": config.gradient_checkpointing,
        "optimizer_settings": asked_settings(config),
        "adapters": asked_adapters(config),
    }  # fmt: skip
    if config.bf16_states:
        asked["bf16_states"] = True
    if strategy.deepspeed is None:
        asked["fully_sharded"] = strategy.is_fsdp
    if (of_a_copy := run.launch.ranks_of_a_copy(config)) is not None:
        asked["copies"] = {"copies": run.launch.world_size // of_a_copy, "ranks_of_a_copy": of_a_copy}
    if strategy.team is not None:
        asked["team"] = asked_team(run.launch)
        if strategy.deepspeed is not None:
            settings = override(strategy.deepspeed, config.engine_override)
            asked["partitioned_activations"] = activations.are_partitioned(settings)
    for key, value in parse_overrides(config.engine_override).items():
        if key.startswith("zero_optimization.") and key.count(".") == 1 and key.split(".")[1] in asked:
            asked[key.split(".")[1]] = value
    return asked


def audit_end(run: TrainingRun, accelerator: Accelerator, skipped: int, steps: int) -> None:
    """Did the engine do what it was given to do? Asked once all ranks are through, since one that ends ends all.

    `skipped` of the `steps` changed no weights.
    """
    accelerator.wait_for_everyone()
    # DeepSpeed leaves out a step whose gradients are not finite, in every precision, and trains on with old weights.
    # Under fp16 the loss scale is found that way. Elsewhere other strategies would have gone on with what they got.
    if skipped and (not run.config.precision.startswith("fp16") or skipped == steps):
        raise RunFailed(
            f"{skipped} of {steps} optimizer steps were skipped, whose gradients were not finite",
            "lower --learning_rate, or use a precision with more range",
        )
    _check_swapped(run)


def _check_swapped(run: TrainingRun) -> None:
    """NVMe offload that leaves no file where it was asked to did not happen."""
    strategy, folder = run.launch.strategy, run.swap_folder
    for what, pattern in (("optimizer", "optimizer/**/*.swp"), ("param", "*params/**/*.swp")):
        if strategy.offload_device(what) == "nvme" and (folder is None or not any(folder.rglob(pattern))):
            raise RunFailed(
                f"{strategy.name} swapped no {what} to {folder}",
                "DeepSpeed keeps tensors in host memory whose shard is under 1 MiB: use a larger model or fewer ranks",
            )


def check_compute_dtype(model: torch.nn.Module, config: RunConfig) -> None:
    """Fail in the first forward pass, before any step, where a linear layer computes in another type than asked."""
    import torch

    if config.torch_compile:
        # A hook would cut the compiled graph in pieces; the same run without compilation makes the check.
        return
    precision = config.precision
    expected = {"fp32": torch.float32, "fp16": torch.float16}.get(precision.removesuffix("-engine"), torch.bfloat16)
    layer = next(module for module in model.modules() if type(module).__name__ in _LINEAR)

    def look(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        handle.remove()
        if output.dtype != expected:
            raise RunFailed(
                f"the model computes in {output.dtype}, --precision {precision} asks for {expected}",
                "the engine ignored the precision it was given",
            )

    handle = layer.register_forward_hook(look)
