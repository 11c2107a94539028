"""Set-up of the live engine of a launched strategy: the only module that translates a RunConfig into its settings."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from study.config.errors import Unsupported, UserError
from study.config.flags import RunConfig
from study.config.launch_context import Launch
from study.config.precisions import computing_type, in_autocast
from study.config.strategies import PARTITION_ACTIVATIONS_KEY, settings_of_options
from study.config.strategy_names import BATCH_KEYS, apply_overrides, parse_overrides
from study.engine import sequence_parallel, tensor_parallel
from study.engine.audit import TrainingRun, check_compute_dtype
from study.engine.optimizer import FP16_SECTION, GRAD_SCALER
from study.engine.virtual_rank import answer_ddp, join_virtual_group
from study.host.machine import free_gpu_bytes
from study.host.stacks import package_version
from study.workloads.tensor_plans import is_sharded_on_load

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel


# The dtype of autocast over fp32 weights, by --precision.
_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


def deepspeed_settings(run: TrainingRun) -> dict[str, Any]:
    """Return the strategy's DeepSpeed JSON with the run's values: batch, clipping, precision and swap folder.

    DeepSpeed empties the swap folder, so no other process uses it.
    """
    config, plan, strategy = run.config, run.plan, run.launch.strategy
    assert strategy.deepspeed is not None
    settings = copy.deepcopy(dict(strategy.deepspeed))
    if (per_replica := run.launch.ranks_per_replica(run.strategy)) is not None:
        settings["zero_optimization"]["zero_hpz_partition_size"] = per_replica
    if strategy.group:
        # It follows from the next two settings. While DeepSpeed starts it changes whether it counts the ranks of a
        # group as data-parallel ranks.
        settings.pop("train_batch_size", None)
        if strategy.group.divides == "tensors":
            settings["tensor_parallel"]["autotp_size"] = strategy.group.ranks
    else:
        settings["train_batch_size"] = plan.global_batch_size
    settings["train_micro_batch_size_per_gpu"] = plan.per_device_train_batch_size
    settings["gradient_accumulation_steps"] = plan.gradient_accumulation_steps
    settings["gradient_clipping"] = config.max_grad_norm
    if config.precision in _AUTOCAST:
        # Like Accelerate's DDP: autocast over fp32 weights, with gradients reduced in fp32. DeepSpeed's default would
        # reduce the gradients of every nn.Linear in the lower precision.
        dtype = _AUTOCAST[config.precision]
        settings["torch_autocast"] = {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
    elif config.precision == "fp16-engine":
        settings["fp16"] = dict(FP16_SECTION)
    settings |= settings_of_options(config, settings)
    for key in ("offload_optimizer", "offload_param"):
        section = settings["zero_optimization"].get(key)
        if section and section["device"] == "nvme":
            # The NVMe keys of the Accelerate YAML never reach the workers; those of the JSON do.
            section["nvme_path"] = str(run.swap_folder)
    return apply_overrides(settings, config.engine_override)


def make_accelerator(run: TrainingRun) -> Accelerator:
    """Return the Accelerator that the launched file describes, with or without a GPU."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import GradScalerKwargs

    config, launch = run.config, run.launch
    if launch.virtual:
        join_virtual_group(launch)
    if not torch.cuda.is_available():
        _join_cpu_group(launch)
    cap_device_memory(config, launch)
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": run.plan.gradient_accumulation_steps,
        "mixed_precision": "no" if config.precision == "fp32" else computing_type(config.precision),
        "kwargs_handlers": [GradScalerKwargs(**GRAD_SCALER)],
        "log_with": None if config.report_to == "none" else config.report_to,
        "project_dir": str(run.output_dir),
        "dynamo_backend": "inductor" if config.torch_compile else "no",
        # The training loop steps its schedule itself, once per optimizer step.
        "step_scheduler_with_optimizer": False,
    }
    if launch.strategy.deepspeed is not None:
        from accelerate import DeepSpeedPlugin

        arguments["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=deepspeed_settings(run))
        if config.precision in _AUTOCAST:
            # DeepSpeed's bf16 mode (bf16 weights, fp32 masters) computes different gradients; autocast is in the
            # settings.
            arguments["mixed_precision"] = "no"
    elif launch.strategy.is_fsdp and config.precision in _AUTOCAST:
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # An empty policy leaves parameters, gathers and reductions in fp32; the compute dtype is autocast's, as in DDP.
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy())
    if sizes := _parallelism_sizes(run):
        # Imported here, because older releases of Accelerate, which run the other strategies, do not have it.
        from accelerate import ParallelismConfig

        arguments["parallelism_config"] = ParallelismConfig(**sizes)
    accelerator = Accelerator(**arguments)
    if tensor_parallel.autotp_size(accelerator) > 1:
        from transformers.integrations import unset_hf_deepspeed_config

        # At stage 3 transformers does not load a model with divided layers under zero.Init. It reads the stage from
        # this config, whatever the launched file's zero3_init_flag is.
        unset_hf_deepspeed_config()
    correct_precision(accelerator, config)
    return accelerator


def _join_cpu_group(launch: Launch) -> None:
    """Join the ranks of a machine without a GPU, as Accelerate itself does on GPUs alone."""
    from accelerate import DistributedType, PartialState

    # Without this line Accelerate finds no backend for a GPU strategy on a machine without a GPU, and every rank
    # would run as if it were alone.
    state = PartialState(cpu=True)
    if launch.strategy.is_fsdp or is_sharded_on_load(launch.strategy):
        # Accelerate turns MULTI_GPU into FSDP, but not MULTI_CPU: it would silently train DDP here, and reject a
        # parallelism_config.
        state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if launch.strategy.deepspeed is not None and launch.world_size > 1:
        import deepspeed

        # On a GPU Accelerate does this. Without it zero.Init uses a world size of one while weights are loaded.
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        # DeepSpeed's launcher sets this too. Otherwise releases before 0.16 call `numactl`, which few machines
        # have. If it is set before ranks join the group, each rank leaves 64 MiB in /dev/shm.
        if deepspeed.__version__.startswith(("0.14.", "0.15.")):
            os.environ.setdefault("LOCAL_SIZE", str(launch.local_world_size))


def _parallelism_sizes(run: TrainingRun) -> dict[str, Any]:
    strategy, group = run.launch.strategy, run.launch.strategy.group
    if strategy.mesh is not None:
        per_replica = run.launch.ranks_per_replica(run.strategy)
        assert per_replica is not None
        return {"dp_replicate_size": run.launch.world_size // per_replica, "dp_shard_size": per_replica}
    if is_sharded_on_load(strategy):
        return {"tp_size": strategy.group_size}
    if group is not None and group.divides == "context":
        return {"dp_shard_size": run.plan.groups, "cp_size": group.ranks}
    if group is not None and group.divides == "sequence":
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation=run.config.attn_implementation
        )
        return {"dp_shard_size": run.plan.groups, "sp_size": group.ranks, "sp_handler": handler}
    return {}


def correct_precision(accelerator: Accelerator, config: RunConfig) -> None:
    """Undo the changes that Accelerate and the machine make to a precision. Call it before `prepare`."""
    import torch

    without_engine = accelerator.distributed_type.value != "DEEPSPEED"
    if config.precision == "fp16" and without_engine and accelerator.device.type == "cpu":
        # By default Accelerate would train in fp32 here and report "fp16".
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", **GRAD_SCALER)
    # Accelerate turns TF32 on if it compiles without autocast, and NVIDIA's containers always do. torch's other
    # switches for TF32 could contradict each other afterwards, and torch.compile would fail.
    torch.set_float32_matmul_precision("highest")


def prepare(
    accelerator: Accelerator, model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: RunConfig
) -> tuple[Any, Any]:
    """Return the model and optimizer of Accelerate's `prepare`, with this study's patches of the engines."""
    if getattr(accelerator, "is_fsdp2", False):
        _prepare_for_fsdp2(accelerator, model)
    check_compute_dtype(model, config)
    has_autotp = tensor_parallel.autotp_size(accelerator) > 1
    if sequence_parallel.uses_context_parallelism(accelerator):
        sequence_parallel.prepare_context_parallelism(model)
    if sequence_parallel.uses_ulysses(accelerator):
        sequence_parallel.prepare_ulysses(model)
    if has_autotp:
        tensor_parallel.prepare_autotp(accelerator, model)
    prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
    if sequence_parallel.uses_ulysses(accelerator):
        sequence_parallel.correct_ulysses(prepared_model)
    if has_autotp:
        if config.virtual_world_size is not None:
            # This check compares samples over the ranks of a group, which a virtual rank does not have.
            prepared_model.first_dataloader_check.remove()
        if _nested(accelerator.state.deepspeed_plugin.deepspeed_config, PARTITION_ACTIVATIONS_KEY):
            tensor_parallel.partition_activations(model)
        # AutoTP has replaced the layers.
        check_compute_dtype(prepared_model, config)
    if config.virtual_world_size:
        answer_ddp(prepared_model)
    reset_initial_optimizer_step(prepared_model)
    # DeepSpeed's stage 0 under fp16 autocast has a separate scaler, and leaves it out of its checkpoints.
    accelerator.scaler = getattr(prepared_model, "torch_autocast_z0_gradscaler", None) or accelerator.scaler
    return prepared_model, prepared_optimizer


def reset_initial_optimizer_step(model: Any) -> None:
    """Undo the step with zero gradients in which DeepSpeed's stage 0 in half precision creates the optimizer state.

    Adam would count this step in its bias correction, and its weight decay has changed the fp32 weights.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if type(optimizer).__name__ != "FP16_UnfusedOptimizer":
        return
    for state in optimizer.optimizer.state.values():
        # Muon counts no steps, and its auxiliary Adam counts in a Python number.
        if "step" in state:
            state["step"] *= 0
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def _prepare_for_fsdp2(accelerator: Accelerator, model: PreTrainedModel) -> None:
    # Accelerate gives the input embedding a separate shard group, and fails if a block around it has one too.
    embedding = model.get_input_embeddings()
    around_embedding = {type(module).__name__ for module in model.modules() if embedding in module.modules()}
    possible = {type(module).__name__ for module in model.modules()} - around_embedding
    # A model of text and images lists the blocks of towers that it does not have.
    blocks = [name for name in model._no_split_modules or [] if name in possible]
    plugin = accelerator.state.fsdp_plugin
    requested = [name.strip() for name in plugin.transformer_cls_names_to_wrap or []]
    if wrong := [name for name in requested if name not in possible]:
        raise UserError(
            f"fsdp_transformer_layer_cls_to_wrap: {type(model).__name__} has no module {wrong[0]} outside its"
            " embedding",
            f"use {' or '.join(blocks) or 'a module of the model'}, or leave it out",
        )
    plugin.transformer_cls_names_to_wrap = requested or blocks
    if accelerator.native_amp:
        # Under DDP Accelerate runs the forward pass under autocast. Under FSDP2 it does not, and still reports "bf16".
        forward = model.forward

        def forward_under_autocast(*args: Any, **kwargs: Any) -> Any:
            with accelerator.autocast():
                return forward(*args, **kwargs)

        model.forward = forward_under_autocast


def cap_device_memory(config: RunConfig, launch: Launch) -> None:
    """Cap torch's GPU memory at --device_memory_cap_gib, if it is set, and report the cap to DeepSpeed."""
    import torch

    if config.device_memory_cap_gib is not None:
        total = torch.cuda.get_device_properties(launch.local_rank).total_memory
        torch.cuda.set_per_process_memory_fraction(config.device_memory_cap_gib * 2**30 / total, launch.local_rank)
    if launch.strategy.deepspeed is not None:
        from deepspeed.accelerator import get_accelerator

        replace_available_memory(get_accelerator(), config.device_memory_cap_gib)


def replace_available_memory(accelerator: Any, cap_gib: float | None) -> None:
    """Replace DeepSpeed's query of free GPU memory, which decides where stages 1 and 2 flatten the parameters.

    DeepSpeed's version fails if CUDA_VISIBLE_DEVICES names GPUs by their UUID, and ignores the cap.
    """
    if accelerator.device_name() != "cuda":
        return
    import torch

    def available_memory(device_index: int | None = None) -> int:
        device = accelerator.current_device() if device_index is None else device_index
        free = free_gpu_bytes(device)
        if free is None:
            free = torch.cuda.mem_get_info(device)[0]
        return free if cap_gib is None else min(free, int(cap_gib * 2**30) - torch.cuda.memory_reserved(device))

    accelerator.available_memory = available_memory


def tear_down(accelerator: Accelerator, model: Any) -> None:
    """Destroy the engine and then its process group; the reverse order sometimes aborts."""
    if hasattr(model, "destroy"):
        model.destroy()
    accelerator.end_training()


_DEEPCOMPILE = "compile.deepcompile"
# Without a GPU DeepSpeed fails in the first step, with a different message for each.
_NEED_A_GPU = (
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.offload_optimizer.super_offload",
    _DEEPCOMPILE,
)


def check_engine_settings(config: RunConfig, launched: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise UserError if DeepSpeed's types reject a setting, or if a top-level key is unknown, which it ignores."""
    import torch
    from deepspeed.runtime import config as constants
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    if in_autocast(config.precision) and not hasattr(DeepSpeedEngine, "torch_autocast_enabled"):
        raise Unsupported(
            f"--precision {config.precision} is autocast, which DeepSpeed {package_version('deepspeed')} does not have",
            f"use --precision {config.precision}-engine, or a later release",
        )
    section_names = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    section_names |= {"aio", "compile", "timers", "zero_optimization", "activation_checkpointing", *launched}
    for key in parse_overrides(config.engine_override):
        section = key.split(".")[0]
        if section not in section_names:
            raise UserError(f"--engine_override {key}: DeepSpeed has no setting {section}", "fix the key")
        if section in BATCH_KEYS:
            problem = f"--engine_override {key}: the run's batch flags set it"
            raise UserError(problem, "use --global_batch_size and --per_device_train_batch_size")
    if _nested(settings, _DEEPCOMPILE) and not config.torch_compile:
        raise UserError(f"{_DEEPCOMPILE} has no effect on a model that is not compiled", "add --torch_compile")
    need_a_gpu = [key for key in _NEED_A_GPU if _nested(settings, key)]
    if need_a_gpu and not torch.cuda.is_available():
        raise Unsupported(f"{need_a_gpu[0]} runs only on GPUs, and none is visible", "leave it out")
    zero = settings["zero_optimization"]
    if isinstance(zero, dict):
        # Accelerate replaces "auto" values.
        zero = {key: value for key, value in zero.items() if value != "auto"}
    # Before 0.15 DeepSpeed uses pydantic 1, whose errors are a ValueError too.
    validate = getattr(DeepSpeedZeroConfig, "model_validate", None) or DeepSpeedZeroConfig.parse_obj
    try:
        validate(zero)
    except ValueError as error:
        detail = error.errors()[0]  # type: ignore[attr-defined]
        problem = f"DeepSpeed rejects {'.'.join(['zero_optimization', *map(str, detail['loc'])])}: {detail['msg']}"
        raise UserError(problem, "fix --engine_override or the strategy's file") from None


def _nested(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings
