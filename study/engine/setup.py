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
from study.engine import activations, autotp
from study.engine import context_parallel as context
from study.engine import ulysses as sequence
from study.engine.audit import TrainingRun, check_compute_dtype
from study.engine.optimizer import FP16_SECTION, GRAD_SCALER
from study.engine.virtual_rank import join_virtual_group, let_ddp_go_on
from study.host.box import free_gpu_bytes
from study.host.stacks import package_version
from study.workloads.tensor_plans import divides_while_loading

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel


# By --precision: what autocast computes in, over fp32 weights.
_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


def deepspeed_settings(run: TrainingRun) -> dict[str, Any]:
    """The strategy's DeepSpeed JSON with the run's own values: batch, clipping, precision, and where to swap to.

    DeepSpeed empties the folder it is given, so that is one which nobody else knows.
    """
    config, plan, strategy = run.config, run.plan, run.launch.strategy
    assert strategy.deepspeed is not None
    settings = copy.deepcopy(dict(strategy.deepspeed))
    if (of_a_copy := run.launch.ranks_of_a_copy(config)) is not None:
        settings["zero_optimization"]["zero_hpz_partition_size"] = of_a_copy
    if strategy.team:
        # Follows from the next two. DeepSpeed counts the ranks of a team as if each had its own samples, or not, by
        # how far it has come.
        settings.pop("train_batch_size", None)
        if strategy.team.divides == "tensors":
            settings["tensor_parallel"]["autotp_size"] = strategy.team.ranks
    else:
        settings["train_batch_size"] = plan.global_batch_size
    settings["train_micro_batch_size_per_gpu"] = plan.per_device_train_batch_size
    settings["gradient_accumulation_steps"] = plan.gradient_accumulation_steps
    settings["gradient_clipping"] = config.max_grad_norm
    if config.precision in _AUTOCAST:
        # Like for like with Accelerate's DDP: autocast over fp32 weights, and gradients travel in fp32. DeepSpeed's
        # own default would reduce the gradients of every nn.Linear in the lower precision.
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
    """The Accelerator that the launched file describes, on whatever this box has."""
    import torch
    from accelerate import Accelerator, DistributedType, PartialState
    from accelerate.utils import GradScalerKwargs

    config, launch = run.config, run.launch
    if launch.virtual:
        join_virtual_group(launch)
    if not torch.cuda.is_available():
        # Without this line Accelerate finds no backend for a GPU strategy on a box without one, and every rank
        # would believe that it is alone.
        state = PartialState(cpu=True)
        if launch.strategy.is_fsdp or divides_while_loading(launch.strategy):
            # Accelerate turns MULTI_GPU into FSDP and never MULTI_CPU: it would train DDP here and say nothing. Nor
            # does it take a parallelism_config there.
            state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        if launch.strategy.deepspeed is not None and launch.world_size > 1:
            import deepspeed

            # On a GPU Accelerate does this. Left out, zero.Init sees a world of one while the weights are loaded.
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
            # As DeepSpeed's own launcher sets it. Releases before 0.16 else ask `numactl`, which few boxes have. Set
            # before they join, each rank leaves 64 MiB in /dev/shm that nobody deletes.
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
            # DeepSpeed's own is another training (weights in it, fp32 masters); autocast is in the settings.
            arguments["mixed_precision"] = "no"
    elif launch.strategy.is_fsdp and config.precision in _AUTOCAST:
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # An empty policy keeps parameters, gathers and reductions in fp32; autocast does the rest, as under DDP.
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy())
    if launch.strategy.mesh is not None:
        of_a_copy = launch.ranks_of_a_copy(config)
        assert of_a_copy is not None
        arguments["parallelism_config"] = _parallelism(
            dp_replicate_size=launch.world_size // of_a_copy, dp_shard_size=of_a_copy
        )
    elif launch.strategy.team is not None and launch.strategy.team.divides == "context":
        arguments["parallelism_config"] = context.parallelism(run.plan, launch.strategy.team)
    elif launch.strategy.team is not None and launch.strategy.team.divides == "sequence":
        arguments["parallelism_config"] = sequence.parallelism(run.plan, launch.strategy.team, config)
    elif divides_while_loading(launch.strategy):
        arguments["parallelism_config"] = _parallelism(tp_size=launch.strategy.team_size)
    accelerator = Accelerator(**arguments)
    if autotp.divides(accelerator):
        autotp.load_whole()
    hold_to_precision(accelerator, config)
    return accelerator


def _parallelism(**sizes: int) -> Any:
    # Older releases of Accelerate, beside which other strategies run, do not have it.
    from accelerate import ParallelismConfig

    return ParallelismConfig(**sizes)


def hold_to_precision(accelerator: Accelerator, config: RunConfig) -> None:
    """What Accelerate and the box make of a precision by themselves, put right: before anything is prepared."""
    import torch

    without_engine = accelerator.distributed_type.value != "DEEPSPEED"
    if config.precision == "fp16" and without_engine and accelerator.device.type == "cpu":
        # Left to itself Accelerate would train in fp32 here, and still say "fp16".
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", **GRAD_SCALER)
    # Accelerate turns TF32 on where it compiles without autocast, and NVIDIA's containers do everywhere. After torch's
    # other switches for it some are at odds, and torch.compile stops there.
    torch.set_float32_matmul_precision("highest")


def prepare(
    accelerator: Accelerator, model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: RunConfig
) -> tuple[Any, Any]:
    """Accelerate's `prepare`, with what its FSDP2 path leaves undone; the first forward pass proves the precision."""
    if getattr(accelerator, "is_fsdp2", False):
        _prepare_for_fsdp2(accelerator, model)
    check_compute_dtype(model, config)
    if context.divides(accelerator):
        context.make_ready(model)
    if sequence.divides(accelerator):
        sequence.make_ready(model)
    if autotp.divides(accelerator):
        autotp.make_ready(accelerator, model)
    prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
    if sequence.divides(accelerator):
        sequence.put_right(prepared_model)
    if autotp.divides(accelerator):
        autotp.put_right(prepared_model, virtual=config.virtual_world_size is not None)
        if activations.are_partitioned(accelerator.state.deepspeed_plugin.deepspeed_config):
            activations.partition_activations(model)
        # Its layers are other ones by now.
        check_compute_dtype(prepared_model, config)
    if config.virtual_world_size:
        let_ddp_go_on(prepared_model)
    forget_first_step(prepared_model)
    # DeepSpeed's stage 0 under fp16 autocast has one of its own, and leaves it out of its checkpoints.
    accelerator.scaler = getattr(prepared_model, "torch_autocast_z0_gradscaler", None) or accelerator.scaler
    return prepared_model, prepared_optimizer


def forget_first_step(model: Any) -> None:
    """DeepSpeed's stage 0 in half precision takes a step with gradients of zero, to make the optimizer's state.

    Adam would count it, and correct its first moments too little; weight decay has moved the fp32 weights already.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if type(optimizer).__name__ != "FP16_UnfusedOptimizer":
        return
    for state in optimizer.optimizer.state.values():
        # Muon counts no steps, and what it calls its auxiliary Adam counts in plain numbers.
        if "step" in state:
            state["step"] *= 0
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def _prepare_for_fsdp2(accelerator: Accelerator, model: PreTrainedModel) -> None:
    # Accelerate gives the input embedding a shard group of its own, and fails where a block around it has one too.
    embedding = model.get_input_embeddings()
    holds_embedding = {type(module).__name__ for module in model.modules() if embedding in module.modules()}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = [
        name for name in model._no_split_modules or [] if name not in holds_embedding
    ]
    if accelerator.native_amp:
        # Under DDP Accelerate runs the forward pass under autocast. Under FSDP2 it does not, and still says "bf16".
        forward = model.forward

        def forward_under_autocast(*args: Any, **kwargs: Any) -> Any:
            with accelerator.autocast():
                return forward(*args, **kwargs)

        model.forward = forward_under_autocast


def cap_device_memory(config: RunConfig, launch: Launch) -> None:
    """To what --device_memory_cap_gib says; without it, not at all. DeepSpeed is told the same."""
    import torch

    if config.device_memory_cap_gib is not None:
        total = torch.cuda.get_device_properties(launch.local_rank).total_memory
        torch.cuda.set_per_process_memory_fraction(config.device_memory_cap_gib * 2**30 / total, launch.local_rank)
    if launch.strategy.deepspeed is not None:
        from deepspeed.accelerator import get_accelerator

        tell_what_is_free(get_accelerator(), config.device_memory_cap_gib)


def tell_what_is_free(accelerator: Any, cap_gib: float | None) -> None:
    """Stages 1 and 2 ask DeepSpeed how much memory is free, to choose where they flatten the parameters.

    Its own answer dies of a CUDA_VISIBLE_DEVICES that names GPUs by their UUID, and knows nothing of the cap.
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
    """Engine first, then the process group it talks through; the other order aborts now and then."""
    destroy = getattr(model, "destroy", None)
    if destroy is not None:
        destroy()
    accelerator.end_training()


_DEEPCOMPILE = "compile.deepcompile"
# Left to itself DeepSpeed fails in the first step, each time in other words.
_WANT_A_GPU = (
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.offload_optimizer.super_offload",
    _DEEPCOMPILE,
)


def check_engine_settings(config: RunConfig, strategy: Strategy) -> None:
    """By DeepSpeed's own types. A key of the outermost level that it does not know it would leave out in silence."""
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
    known |= {"aio", "compile", "timers", "zero_optimization", KEEPS_PARTS.split(".")[0], *strategy.deepspeed}
    for key in parse_overrides(config.engine_override):
        section = key.split(".")[0]
        if section not in known:
            raise UserError(f"--engine_override {key}: DeepSpeed has no setting {section}", "fix the key")
        if section in BATCH_KEYS:
            raise UserError(
                f"--engine_override {key}: the batch of the run decides it",
                "use --global_batch_size and --per_device_train_batch_size",
            )
    settings = override(strategy.deepspeed, config.engine_override)
    if _value(settings, _DEEPCOMPILE) and not config.torch_compile:
        raise UserError(f"{_DEEPCOMPILE} does nothing in a model that is not compiled", "add --torch_compile")
    _refuse_what_wants_a_gpu(settings)
    zero = settings["zero_optimization"]
    if isinstance(zero, dict):
        # Accelerate fills these in.
        zero = {key: value for key, value in zero.items() if value != "auto"}
    # Before 0.15 its types are those of the first pydantic, whose errors are a ValueError too.
    validate = getattr(DeepSpeedZeroConfig, "model_validate", None) or DeepSpeedZeroConfig.parse_obj
    try:
        validate(zero)
    except ValueError as error:
        found = error.errors()[0]  # type: ignore[attr-defined]
        raise UserError(
            f"DeepSpeed refuses {'.'.join(['zero_optimization', *map(str, found['loc'])])}: {found['msg']}",
            "fix --engine_override, or the strategy's file",
        ) from None


def _refuse_what_wants_a_gpu(settings: Mapping[str, Any]) -> None:
    import torch

    asked = [key for key in _WANT_A_GPU if _value(settings, key)]
    if asked and not torch.cuda.is_available():
        raise Unsupported(f"{asked[0]} runs on GPUs alone, and none is visible", "leave it out")


def _value(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings
