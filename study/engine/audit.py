"""The audit reads the live engine's settings from its objects, and compares them with the launched files and flags.

A run whose engine differs from its config fails before its first step. Changes that the engine makes by itself are
recorded as warnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from study.config.errors import NotFinite, RunFailed, Unsupported
from study.config.flags import BatchPlan, RunConfig
from study.config.launch_context import Launch
from study.config.precisions import computes_in_fp16, computing_type
from study.config.strategies import PARTITION_ACTIVATIONS_KEY, Strategy
from study.config.strategy_names import parse_overrides
from study.engine.model_parallel import read_fsdp_replicas, read_group, read_hpz_replicas
from study.engine.optimizer import LOSS_SCALER, expected_settings, live_settings, read_loss_scaler
from study.engine.tensor_parallel import count_elements, has_partitioned_activations
from study.host.stacks import package_version, unverified_pair
from study.workloads.architecture import find_adapters, requested_adapters
from study.workloads.presets import preset_layers

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


# Class names of transformers' linear layers, and of their replacements in DeepSpeed's AutoTP.
_LINEAR = ("Linear", "Conv1D", "LinearLayer", "LinearAllreduce")


class TrainingRun(Protocol):
    """Protocol of a run as the engine's setup and the audit read it."""

    config: RunConfig
    launch: Launch
    strategy: Strategy
    plan: BatchPlan
    output_dir: Path
    swap_folder: Path | None
    checkpoint: tuple[Path, dict[str, Any]] | None

    @property
    def first_step(self) -> int: ...


def audit(
    run: TrainingRun, accelerator: Accelerator, model: Any, optimizer: Any, plan: BatchPlan | None = None
) -> dict[str, Any]:
    """Return engine.json from the live objects; raise RunFailed if they differ, Unsupported without DeepSpeed's engine.

    `plan` is the engine's batch plan if it differs from the run's.
    """
    import torch

    from study.metrics.state import base_optimizer

    config, launch, plan = run.config, run.launch, plan or run.plan
    is_deepspeed = launch.strategy.deepspeed is not None
    if is_deepspeed and not hasattr(model, "zero_optimization_stage"):
        raise Unsupported(
            f"{launch.strategy.name} needs DeepSpeed, but accelerate {package_version('accelerate')} wrapped the model"
            f" in {type(model).__name__}",
            "use a later accelerate: early releases run DeepSpeed only on GPUs",
        )
    unwrapped, base = accelerator.unwrap_model(model), base_optimizer(optimizer)
    live = read_engine(accelerator, model, config, plan) | {
        "attn_implementation": getattr(unwrapped.config, "_attn_implementation", None),
        "gradient_checkpointing": bool(unwrapped.is_gradient_checkpointing),
        "strategy": launch.strategy.name,
        "own_settings": launch.strategy.custom_settings,
        "distributed_type": accelerator.distributed_type.value,
        "world_size": accelerator.num_processes,
        "optimizer_class": f"{type(base).__module__.split('.')[0]}.{type(base).__name__}",
        "optimizer_settings": live_settings(base),
        "adapters": find_adapters(unwrapped),
        "loss_scaler": read_loss_scaler(accelerator, model),
        "tf32": uses_tf32(),
    }
    if is_deepspeed and launch.strategy.group is not None:
        live["partitioned_activations"] = has_partitioned_activations(model)
    differences = [
        f"{key} is {live.get(key)!r}, requested {value!r}"
        for key, value in _expected_settings(run, accelerator, plan).items()
        if live.get(key) != value
    ]
    if differences:
        problem = f"the engine differs from {launch.strategy.name}'s settings: {'; '.join(differences)}"
        raise RunFailed(problem, "compare the strategy file with engine.json")
    live["nvme_param_dtype"] = _nvme_param_dtype(launch.strategy, model)
    live["warnings"] = _warnings(run, live)
    _check_swapped(run)
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return live | {
        "virtual": launch.virtual,
        "virtual_rank": launch.rank if launch.virtual else None,
        # Set if a large device emulates a smaller one.
        "emulated_device_memory_gib": config.device_memory_cap_gib,
        "model_parameters": count_elements(model.parameters(), launch.strategy.group_size),
        "trainable_parameters": count_elements(trained, launch.strategy.group_size),
        "model_layers": unwrapped.config.num_hidden_layers,
        # The preset's depth, which --model_name_or_path may have changed.
        "preset_layers": preset_layers(config.model_name_or_path),
        "torch": torch.__version__,
        "deepspeed": package_version("deepspeed"),
    }


def _nvme_param_dtype(strategy: Strategy, model: Any) -> str | None:
    """Return the type in which DeepSpeed keeps the parameters on NVMe; None if they are elsewhere."""
    if strategy.offload_device("param") != "nvme":
        return None
    swappers = (getattr(parameter, "nvme_swapper", None) for parameter in model.module.parameters())
    return dtype_name(next(swapper.dtype for swapper in swappers if swapper is not None))


def _warnings(run: TrainingRun, live: Mapping[str, Any]) -> list[str]:
    """Return warnings about settings that the engine changed and about emulated parts of this run."""
    return [*_warnings_of_engine(run, live), *_warnings_of_run(run)]


def _warnings_of_engine(run: TrainingRun, live: Mapping[str, Any]) -> Iterator[str]:
    launch = run.launch
    if launch.strategy.deepspeed is not None and (pair := unverified_pair()):
        yield f"experiment: {pair}, which has not been shown to train as DDP does"
    if "DeepSpeedCPUAdam" in live["optimizer_class"]:
        yield "DeepSpeed replaced torch's AdamW by DeepSpeedCPUAdam, because the optimizer is offloaded"
    if live["zero_stage"] and live.get("model_parallel_group", {}).get("state_over") == 1:
        yield f"with one model-parallel group stage {live['zero_stage']} shards nothing"
    if run.config.optimizer == "muon" and live["zero_stage"]:
        yield "DeepSpeed reports the gradient norm after Muon has orthogonalized the gradients"


def _warnings_of_run(run: TrainingRun) -> Iterator[str]:
    import torch

    config, launch = run.config, run.launch
    if launch.virtual:
        yield (
            f"virtual: rank {launch.rank} of {launch.world_size} without the others; all its weights start from one"
            " constant, and collectives return its own data"
        )
        if torch.cuda.is_available():
            yield "virtual: the device's peaks exclude the communicators and buffers of NCCL"
    if run.checkpoint and (saved_by := run.checkpoint[1]["world_size"]) != launch.world_size:
        yield f"resumed: the steps up to {run.first_step} ran on {saved_by} ranks"
    if run.checkpoint:
        yield f"resumed: the run's time, energy and peaks exclude the steps up to {run.first_step}"
    if config.device_memory_cap_gib is not None:
        yield (
            f"emulated: torch's allocations on {torch.cuda.get_device_name()} are capped at"
            f" {config.device_memory_cap_gib} GiB, which excludes the context and communicators"
        )


def _expected_settings(run: TrainingRun, accelerator: Accelerator, plan: BatchPlan) -> dict[str, Any]:
    import torch

    config, strategy = run.config, run.launch.strategy
    on_cores = strategy.distributed_type == "MULTI_GPU" and not strategy.group and not torch.cuda.is_available()
    requested: dict[str, Any] = {
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
        "loss_scaler": LOSS_SCALER if computes_in_fp16(config.precision) else None,
        "tf32": False,
        "gradient_checkpointing": config.gradient_checkpointing,
        "optimizer_settings": expected_settings(config),
        "adapters": requested_adapters(config),
    }
    if config.bf16_states:
        requested["bf16_states"] = True
    if strategy.deepspeed is None:
        requested["fully_sharded"] = strategy.is_fsdp
    if (per_replica := run.launch.ranks_per_replica(run.strategy)) is not None:
        requested["copies"] = {"copies": run.launch.world_size // per_replica, "ranks_of_a_copy": per_replica}
    if strategy.group is not None:
        divides, ranks = strategy.group.divides, run.launch.world_size
        sharded_over = ranks // strategy.group_size if divides == "tensors" else ranks
        shards = strategy.is_fsdp or bool(strategy.zero_stage)
        requested["model_parallel_group"] = {
            "divides": divides,
            "ranks": strategy.group_size,
            "state_over": sharded_over if shards else 1,
        }
        if run.strategy.deepspeed is not None:
            section, key = PARTITION_ACTIVATIONS_KEY.split(".")
            requested["partitioned_activations"] = bool(run.strategy.deepspeed.get(section, {}).get(key))
    for key, value in parse_overrides(config.engine_override).items():
        if key.startswith("zero_optimization.") and key.count(".") == 1 and key.split(".")[1] in requested:
            requested[key.split(".")[1]] = value
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(accelerator, "is_fsdp2", False):
        from torch.distributed.fsdp import CPUOffloadPolicy

        requested["fsdp_offload_params"] = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        requested["fsdp_activation_checkpointing"] = bool(plugin.activation_checkpointing)
        # Only wrapped blocks are resharded.
        if plugin.auto_wrap_policy:
            requested["fsdp_reshard_after_forward"] = bool(plugin.reshard_after_forward)
    return requested


def audit_end(run: TrainingRun, accelerator: Accelerator, skipped: int, steps: int) -> None:
    """Raise RunFailed if the engine skipped steps or swapped no tensor.

    It waits for all ranks first, as the launcher stops all of them when one ends.
    """
    accelerator.wait_for_everyone()
    # DeepSpeed skips a step whose gradients are not finite, in every precision, and keeps the old weights. Under fp16
    # this is how it adapts the loss scale. In other precisions DDP would have applied such gradients.
    if skipped and (not computes_in_fp16(run.config.precision) or skipped == steps):
        problem = f"{skipped} of {steps} optimizer steps were skipped because their gradients were not finite"
        raise NotFinite(problem, "lower --learning_rate, or use a precision with more range")
    _check_swapped(run)


def _check_swapped(run: TrainingRun) -> None:
    strategy, folder = run.launch.strategy, run.swap_folder
    for section, pattern in (("optimizer", "optimizer/**/*.swp"), ("param", "*params/**/*.swp")):
        if strategy.offload_device(section) == "nvme" and (folder is None or not any(folder.rglob(pattern))):
            fix = "use a larger model or fewer ranks: DeepSpeed keeps shards under 1 MiB in host memory"
            raise RunFailed(f"{strategy.name} swapped no {section} to {folder}", fix)


def check_compute_dtype(model: torch.nn.Module, config: RunConfig) -> None:
    """Register a check of the first forward pass: it raises RunFailed if a linear layer computes in a wrong dtype."""
    import torch

    if config.torch_compile:
        # A hook would break the compiled graph; the same run without compilation performs the check.
        return
    precision = config.precision
    expected = {"fp32": torch.float32, "fp16": torch.float16}.get(computing_type(precision), torch.bfloat16)
    layer = next(module for module in model.modules() if type(module).__name__ in _LINEAR)

    def check_output(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        handle.remove()
        if output.dtype != expected:
            problem = f"the model computes in {output.dtype}, but --precision {precision} requests {expected}"
            raise RunFailed(problem, "use another --precision: the engine ignores this one")

    handle = layer.register_forward_hook(check_output)


# DeepSpeed's ZeRO settings that change memory and communication.
BUCKET_KEYS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "overlap_comm",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
    "reduce_scatter",
    "contiguous_gradients",
    "round_robin_gradients",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
)


def read_engine(accelerator: Accelerator, model: Any, config: RunConfig, plan: BatchPlan) -> dict[str, Any]:
    """Return the live settings of DeepSpeed, FSDP or DDP as entries of engine.json."""
    group = read_group(accelerator, model)
    live = {} if group is None else {"model_parallel_group": group}
    if hasattr(model, "zero_optimization_stage"):
        return live | read_deepspeed(model)
    from torch.nn.parallel import DistributedDataParallel

    from study.metrics.inventory import dtensor_type

    # Tensor parallelism divides parameters too, but never gathers them.
    is_tensor_parallel = group is not None and group["divides"] == "tensors"
    has_shards = any(isinstance(parameter, dtensor_type()) for parameter in model.parameters())
    return {
        **live,
        **dict.fromkeys(("zero_stage", "offload_optimizer", "offload_param", "nvme_path")),
        "precision": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "param_dtype": dtype_name(next(model.parameters()).dtype),
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "buckets": {"ddp_bucket_bytes": model.bucket_bytes_cap} if isinstance(model, DistributedDataParallel) else {},
        **read_fsdp(model),
        "fully_sharded": has_shards and not is_tensor_parallel,
        **(read_fsdp_replicas(model) if group is None else {}),
        # Without an engine the training loop sets these two: there is no second source to read.
        "gradient_clipping": config.max_grad_norm,
        "per_device_train_batch_size": plan.per_device_train_batch_size,
    }


def read_deepspeed(engine: Any) -> dict[str, Any]:
    zero = engine._config.zero_config
    # None: this release has no such setting.
    buckets = {key: getattr(zero, key, None) for key in BUCKET_KEYS}
    offload, nvme_paths = {}, set()
    for key in ("offload_optimizer", "offload_param"):
        section = getattr(zero, key)
        device = getattr(section.device, "value", section.device) if section is not None else "none"
        offload[key] = None if device == "none" else device
        if device == "nvme":
            nvme_paths.add(str(section.nvme_path))
            if key == "offload_param":
                # The run enlarges the file's value if a rank's part of the largest parameter needs it.
                buckets["offload_param.buffer_size"] = section.buffer_size
    if engine.bfloat16_enabled():
        precision = "bf16-engine"
    elif engine.fp16_enabled():
        precision = "fp16-engine"
    elif hasattr(engine, "torch_autocast_enabled") and engine.torch_autocast_enabled():
        autocast = dtype_name(engine.torch_autocast_dtype())
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(autocast, autocast)
    else:
        precision = "fp32"
    # Master weights are fp32 or bf16; Adam creates its moments in the same dtype.
    groups = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    masters = {dtype_name(master.dtype) for name in groups for master in getattr(engine.optimizer, name, [])}
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        **offload,
        "nvme_path": ", ".join(sorted(nvme_paths)) or None,
        "precision": precision,
        "param_dtype": dtype_name(next(engine.module.parameters()).dtype),
        "bf16_states": masters == {"bfloat16"},
        "gradient_clipping": float(engine.gradient_clipping()),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "per_device_train_batch_size": engine.train_micro_batch_size_per_gpu(),
        "buckets": buckets,
        **read_hpz_replicas(engine),
    }


def read_fsdp(model: torch.nn.Module) -> dict[str, Any]:
    """Return FSDP2's settings from its private states, as torch has no public access; empty without FSDP2."""
    from torch.distributed import fsdp
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

    from study.metrics.inventory import fsdp_state_groups

    if not hasattr(fsdp, "FSDPModule"):
        return {}  # an older torch

    # Modules that are sharded together share a state. The first is the whole model's. By default torch leaves it
    # gathered after the forward pass, and sets that flag only when the first pass begins.
    module_states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, fsdp.FSDPModule))
    states = list({id(state): state for state in module_states}.values())
    if not states:
        return {}
    groups = [group for state in states for group in fsdp_state_groups(state)]
    gathered = fsdp_state_groups(states[0]) if states[0]._auto_reshard_after_forward else []
    resharded = [group for group in groups if group.post_forward_mesh_info is not None and group not in gathered]
    return {
        "fsdp_groups": len(groups),
        "fsdp_resharded_groups": len(resharded),
        "fsdp_reshard_after_forward": bool(resharded),
        "fsdp_offload_params": any(isinstance(group.offload_policy, fsdp.CPUOffloadPolicy) for group in groups),
        "fsdp_activation_checkpointing": any(isinstance(module, ActivationWrapper) for module in model.modules()),
    }


def uses_tf32() -> bool:
    """Whether torch computes fp32 matrix products in TF32."""
    import torch

    matmul = torch.backends.cuda.matmul
    # Before 2.9 torch has only the older switch; from 2.9 on the older one may contradict the newer.
    return bool(matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
