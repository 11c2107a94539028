"""From a launched strategy to a live engine: the only module that translates a RunConfig into engine settings."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from study.config.errors import Unsupported, UserError
from study.config.flags import RunConfig
from study.config.launched import Launch
from study.config.names import BATCH_KEYS, override, parse_overrides
from study.config.strategies import KEEPS_PARTS, Strategy, settings_of_options
from study.engine import sequence_parallel, tensor_parallel
from study.engine.audit import TrainingRun, check_compute_dtype
from study.engine.optimizer import FP16_SECTION, GRAD_SCALER
from study.engine.virtual_rank import answer_ddp, join_virtual_group
from study.host.box import free_gpu_bytes
from study.host.stacks import package_version
from study.workloads.tensor_plans import is_sharded_on_load

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel


# By --precision: the type that autocast computes in, over fp32 weights.
_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


def deepspeed_settings(run: TrainingRun) -> dict[str, Any]:
    """Return the strategy's DeepSpeed JSON with the run's own values: batch, clipping, precision, and swap folder.

    DeepSpeed empties the folder that it is given, so it is one of this process alone.
    """
    config, plan, strategy = run.config, run.plan, run.launch.strategy
    assert strategy.deepspeed is not None
    settings = copy.deepcopy(dict(strategy.deepspeed))
    if (per_replica := run.launch.ranks_per_replica(config)) is not None:
        settings["zero_optimization"]["zero_hpz_partition_size"] = per_replica
    if strategy.group:
        # It follows from the next two settings. Whether DeepSpeed counts a group's ranks as if each had its own samples
        # changes while it starts.
        settings.pop("train_batch_size", None)
        if strategy.group.divides == "tensors":
            settings["tensor_parallel"]["autotp_size"] = strategy.group.ranks
    else:
        settings["train_batch_size"] = plan.global_batch_size
    settings["train_micro_batch_size_per_gpu"] = plan.per_device_train_batch_size
    settings["gradient_accumulation_steps"] = plan.gradient_accumulation_steps
    settings["gradient_clipping"] = config.max_grad_norm
    if config.precision in _AUTOCAST:
        # As Accelerate's DDP does: autocast over fp32 weights, and gradients are reduced in fp32. DeepSpeed's default
        # would reduce the gradients of every nn.Linear in the lower precision.
        dtype = _AUTOCAST[config.precision]
        settings["torch_autocast"] = {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
    elif config.precision == "fp16-engine":
        settings["fp16"] = dict(FP16_SECTION)
    settings |= settings_of_options(config, settings)
    for what in ("offload_optimizer", "offload_param"):
        section = settings["zero_optimization"].get(what)
        if section and section["device"] == "nvme":
            # The Accelerate YAML's own NVMe keys never reach the workers; the JSON's do.
            section["nvme_path"] = str(run.swap_folder)
    return override(settings, config.engine_override)


def make_accelerator(run: TrainingRun) -> Accelerator:
    """Return the Accelerator that the launched file describes, with or without a GPU."""
    import torch
    from accelerate import Accelerator, DistributedType, PartialState
    from accelerate.utils import GradScalerKwargs

    config, launch = run.config, run.launch
    if launch.virtual:
        join_virtual_group(launch)
    if not torch.cuda.is_available():
        # Without this line Accelerate finds no backend for a GPU strategy on a box without one, and every rank would
        # run as if it were alone.
        state = PartialState(cpu=True)
        if launch.strategy.is_fsdp or is_sharded_on_load(launch.strategy):
            # Accelerate turns MULTI_GPU into FSDP and never MULTI_CPU: it would train DDP here without an error, and
            # reject a parallelism_config.
            state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        if launch.strategy.deepspeed is not None and launch.world_size > 1:
            import deepspeed

            # On a GPU Accelerate does this. Without it zero.Init sees a world of one while the weights are loaded.
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
            # As DeepSpeed's launcher does. Otherwise releases before 0.16 call `numactl`, which few boxes have. If it
            # is set before they join, each rank leaves 64 MiB in /dev/shm.
            if deepspeed.__version__.startswith(("0.14.", "0.15.")):
                os.environ.setdefault("LOCAL_SIZE", str(launch.local_world_size))
    cap_device_memory(config, launch)
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": run.plan.gradient_accumulation_steps,
        "mixed_precision": "no" if config.precision == "fp32" else config.precision.removesuffix("-engine"),
        "kwargs_handlers": [GradScalerKwargs(**GRAD_SCALER)],
        "log_with": None if config.report_to == "none" else config.report_to,
        "project_dir": str(run.output_dir),
        "dynamo_backend": "inductor" if config.torch_compile else "no",
        # The study's loop steps its schedule itself, once per optimizer step.
        "step_scheduler_with_optimizer": False,
    }
    if launch.strategy.deepspeed is not None:
        from accelerate import DeepSpeedPlugin

        arguments["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=deepspeed_settings(run))
        if config.precision in _AUTOCAST:
            # DeepSpeed's own bf16 (weights in it, fp32 masters) computes other gradients; autocast is in the settings.
            arguments["mixed_precision"] = "no"
    elif launch.strategy.is_fsdp and config.precision in _AUTOCAST:
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # An empty policy leaves parameters, gathers and reductions in fp32; autocast does the rest, as under DDP.
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy())
    if sizes := _parallelism_sizes(run):
        # Imported here, as older releases of Accelerate, which run the other strategies, do not have it.
        from accelerate import ParallelismConfig

        arguments["parallelism_config"] = ParallelismConfig(**sizes)
    accelerator = Accelerator(**arguments)
    if tensor_parallel.autotp_size(accelerator) > 1:
        from transformers.integrations import unset_hf_deepspeed_config

        # At stage 3 transformers refuses to load a model under zero.Init whose layers are to be divided. It looks for
        # stage 3 here, whatever the launched file's zero3_init_flag is.
        unset_hf_deepspeed_config()
    correct_precision(accelerator, config)
    return accelerator


def _parallelism_sizes(run: TrainingRun) -> dict[str, Any]:
    strategy, group = run.launch.strategy, run.launch.strategy.group
    if strategy.mesh is not None:
        per_replica = run.launch.ranks_per_replica(run.config)
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
    """Before `prepare`: undo what Accelerate and the box change about a precision by themselves."""
    import torch

    without_engine = accelerator.distributed_type.value != "DEEPSPEED"
    if config.precision == "fp16" and without_engine and accelerator.device.type == "cpu":
        # By default Accelerate would train in fp32 here, and report "fp16".
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", **GRAD_SCALER)
    # Accelerate turns TF32 on where it compiles without autocast, and NVIDIA's containers do everywhere. torch's other
    # switches for it may contradict each other afterwards, and torch.compile fails then.
    torch.set_float32_matmul_precision("highest")


def prepare(
    accelerator: Accelerator, model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: RunConfig
) -> tuple[Any, Any]:
    """Call Accelerate's `prepare`, and do what it leaves undone; the first forward pass checks the precision."""
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
            # It compares samples over the ranks of a group, which a virtual rank does not have.
            prepared_model.first_dataloader_check.remove()
        if _nested(accelerator.state.deepspeed_plugin.deepspeed_config, KEEPS_PARTS):
            tensor_parallel.partition_activations(model)
        # AutoTP has replaced the layers.
        check_compute_dtype(prepared_model, config)
    if config.virtual_world_size:
        answer_ddp(prepared_model)
    forget_first_step(prepared_model)
    # DeepSpeed's stage 0 under fp16 autocast has a scaler of its own, and leaves it out of its checkpoints.
    accelerator.scaler = getattr(prepared_model, "torch_autocast_z0_gradscaler", None) or accelerator.scaler
    return prepared_model, prepared_optimizer


def forget_first_step(model: Any) -> None:
    """Undo the step with zero gradients by which DeepSpeed's stage 0 in half precision creates the optimizer state.

    Adam would count it in its bias correction, and weight decay has changed the fp32 weights.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if type(optimizer).__name__ != "FP16_UnfusedOptimizer":
        return
    for state in optimizer.optimizer.state.values():
        # Muon counts no steps, and its auxiliary Adam counts in plain numbers.
        if "step" in state:
            state["step"] *= 0
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def _prepare_for_fsdp2(accelerator: Accelerator, model: PreTrainedModel) -> None:
    # Accelerate gives the input embedding a shard group of its own, and fails where a block around it has one too.
    embedding = model.get_input_embeddings()
    around_embedding = {type(module).__name__ for module in model.modules() if embedding in module.modules()}
    possible = {type(module).__name__ for module in model.modules()} - around_embedding
    blocks = [name for name in model._no_split_modules or [] if name not in around_embedding]
    plugin = accelerator.state.fsdp_plugin
    own = [name.strip() for name in plugin.transformer_cls_names_to_wrap or []]
    if wrong := [name for name in own if name not in possible]:
        raise UserError(
            f"fsdp_transformer_layer_cls_to_wrap: {type(model).__name__} has no module {wrong[0]} beside its embedding",
            f"use {' or '.join(blocks) or 'a module of the model'}, or leave it out",
        )
    plugin.transformer_cls_names_to_wrap = own or blocks
    if accelerator.native_amp:
        # Under DDP Accelerate runs the forward pass under autocast. Under FSDP2 it does not, and still reports "bf16".
        forward = model.forward

        def forward_under_autocast(*args: Any, **kwargs: Any) -> Any:
            with accelerator.autocast():
                return forward(*args, **kwargs)

        model.forward = forward_under_autocast


def cap_device_memory(config: RunConfig, launch: Launch) -> None:
    """Cap torch's memory at --device_memory_cap_gib, if it is set, and report the cap to DeepSpeed."""
    import torch

    if config.device_memory_cap_gib is not None:
        total = torch.cuda.get_device_properties(launch.local_rank).total_memory
        torch.cuda.set_per_process_memory_fraction(config.device_memory_cap_gib * 2**30 / total, launch.local_rank)
    if launch.strategy.deepspeed is not None:
        from deepspeed.accelerator import get_accelerator

        replace_available_memory(get_accelerator(), config.device_memory_cap_gib)


def replace_available_memory(accelerator: Any, cap_gib: float | None) -> None:
    """Replace DeepSpeed's query of free memory, by which stages 1 and 2 choose where they flatten the parameters.

    Its own fails where CUDA_VISIBLE_DEVICES names GPUs by their UUID, and ignores the cap.
    """
    if accelerator.device_name() != "cuda":
        return
    import torch

    def available_memory(device_index: int | None = None) -> int:
        place = accelerator.current_device() if device_index is None else device_index
        free = free_gpu_bytes(place)
        if free is None:
            free = torch.cuda.mem_get_info(place)[0]
        return free if cap_gib is None else min(free, int(cap_gib * 2**30) - torch.cuda.memory_reserved(place))

    accelerator.available_memory = available_memory


def tear_down(accelerator: Accelerator, model: Any) -> None:
    """Destroy the engine first, then its process group; the other order sometimes aborts."""
    if hasattr(model, "destroy"):
        model.destroy()
    accelerator.end_training()


_DEEPCOMPILE = "compile.deepcompile"
# Without a GPU DeepSpeed fails in the first step, each time with another message.
_NEED_A_GPU = (
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.offload_optimizer.super_offload",
    _DEEPCOMPILE,
)


def check_engine_settings(config: RunConfig, strategy: Strategy) -> None:
    """Refuse wrong DeepSpeed settings, by its own types. It ignores unknown keys of the outermost level."""
    import torch
    from deepspeed.runtime import config as constants
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    if config.precision in ("bf16", "fp16") and not hasattr(DeepSpeedEngine, "torch_autocast_enabled"):
        raise Unsupported(
            f"--precision {config.precision} is autocast, which DeepSpeed {package_version('deepspeed')} does not have",
            f"use --precision {config.precision}-engine, or a later release",
        )
    assert strategy.deepspeed is not None
    known = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    known |= {"aio", "compile", "timers", "zero_optimization", "activation_checkpointing", *strategy.deepspeed}
    for key in parse_overrides(config.engine_override):
        section = key.split(".")[0]
        if section not in known:
            raise UserError(f"--engine_override {key}: DeepSpeed has no setting {section}", "fix the key")
        if section in BATCH_KEYS:
            raise UserError(
                f"--engine_override {key}: the run's batch flags set it",
                "use --global_batch_size and --per_device_train_batch_size",
            )
    settings = override(strategy.deepspeed, config.engine_override)
    if _nested(settings, _DEEPCOMPILE) and not config.torch_compile:
        raise UserError(f"{_DEEPCOMPILE} does nothing in a model that is not compiled", "add --torch_compile")
    need_a_gpu = [key for key in _NEED_A_GPU if _nested(settings, key)]
    if need_a_gpu and not torch.cuda.is_available():
        raise Unsupported(f"{need_a_gpu[0]} runs on GPUs alone, and none is visible", "leave it out")
    zero = settings["zero_optimization"]
    if isinstance(zero, dict):
        # Accelerate fills these in.
        zero = {key: value for key, value in zero.items() if value != "auto"}
    # Before 0.15 its types are pydantic 1's, whose errors are a ValueError too.
    validate = getattr(DeepSpeedZeroConfig, "model_validate", None) or DeepSpeedZeroConfig.parse_obj
    try:
        validate(zero)
    except ValueError as error:
        found = error.errors()[0]  # type: ignore[attr-defined]
        raise UserError(
            f"DeepSpeed refuses {'.'.join(['zero_optimization', *map(str, found['loc'])])}: {found['msg']}",
            "fix --engine_override, or the strategy's file",
        ) from None


def _nested(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings
