"""From a launched strategy to a live engine, and back: what was asked, and what really runs.

This is the only module that translates a RunConfig into engine settings. `audit` reads the answer from the live
objects, never from the files: a run that does not do what its file says fails before its first step.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config import BatchPlan, RunConfig, parse_overrides
from study.errors import RunFailed, UserError
from study.strategies import Launch, Strategy

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

BUCKET_KEYS = (
    "reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "prefetch_bucket_size",
    "param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "sub_group_size",
)  # fmt: skip


def check_devices(launch: Launch, gpus: int) -> str | None:
    """Refuse more ranks than GPUs; return a notice when GPUs stay idle. A box without a GPU takes any number."""
    if gpus and launch.local_world_size > gpus:
        raise UserError(
            f"{launch.local_world_size} ranks were launched on a box with {gpus} GPU{'s'[: gpus > 1]}",
            f"run: {launch.command(gpus)}",
        )
    if launch.local_world_size < gpus and launch.strategy.name != "single":
        return f"{gpus - launch.local_world_size} of {gpus} GPUs stay idle; to use all: {launch.command(gpus)}"
    return None


def check_request(config: RunConfig, strategy: Strategy) -> None:
    """What this box or this strategy cannot do is refused before anything is written."""
    import torch

    on_gpu = torch.cuda.is_available()
    if config.precision == "fp16" and not on_gpu:
        raise UserError("--precision fp16 needs a GPU: Accelerate trains no fp16 on a CPU", "use --precision bf16")
    if config.precision == "bf16-engine" and strategy.deepspeed is None:
        raise UserError(
            f"--precision bf16-engine is DeepSpeed's own bf16, and {strategy.name} runs without DeepSpeed",
            "use --precision bf16, or a zero* strategy",
        )
    if (
        config.precision in ("bf16", "bf16-engine")
        and on_gpu
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UserError(f"{torch.cuda.get_device_name()} has no bf16", "use --precision fp16 or --precision fp32")
    if config.device_memory_cap_gib is not None and not on_gpu:
        raise UserError("--device_memory_cap_gib caps a GPU's memory, and no GPU is visible", "leave the flag out")
    if config.engine_override and strategy.deepspeed is None:
        raise UserError(
            f"--engine_override sets DeepSpeed keys, and {strategy.name} runs without DeepSpeed", "leave it out"
        )
    if strategy.uses_nvme:
        _check_nvme(Path(config.nvme_path))


def _check_nvme(folder: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise UserError(
            "DeepSpeed cannot build its asynchronous I/O: libaio is missing", "run: apt-get install libaio-dev"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"--nvme_path {folder} is not writable ({error.strerror})",
            "name a folder on a local drive that you may write",
        ) from None


def nvme_folder(config: RunConfig, output_dir: Path) -> Path:
    """Each run swaps into a folder of its own: DeepSpeed empties the folder it is given."""
    return Path(config.nvme_path).absolute() / output_dir.absolute().name


def remove_nvme_folder(config: RunConfig, launch: Launch, output_dir: Path) -> None:
    if launch.strategy.uses_nvme and launch.is_local_main:
        shutil.rmtree(nvme_folder(config, output_dir), ignore_errors=True)


def deepspeed_settings(strategy: Strategy, config: RunConfig, plan: BatchPlan, nvme: Path) -> dict[str, Any]:
    """The strategy's DeepSpeed JSON with the run's own values: batch, clipping, precision, NVMe folder."""
    assert strategy.deepspeed is not None
    settings = _deep_copy(strategy.deepspeed)
    settings["train_batch_size"] = plan.global_batch_size
    settings["train_micro_batch_size_per_gpu"] = plan.per_device_train_batch_size
    settings["gradient_accumulation_steps"] = plan.gradient_accumulation_steps
    settings["gradient_clipping"] = config.max_grad_norm
    if config.precision == "bf16":
        # Like for like with Accelerate's DDP: autocast over fp32 weights, and gradients travel in fp32. DeepSpeed's
        # own default would reduce the gradients of every nn.Linear in bf16.
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    for what in ("offload_optimizer", "offload_param"):
        section = settings["zero_optimization"].get(what)
        if section and section["device"] == "nvme":
            # The Accelerate YAML's own NVMe keys never reach the workers; the JSON's do.
            section["nvme_path"] = str(nvme)
    for key, value in parse_overrides(config.engine_override).items():
        *sections, last = key.split(".")
        node = settings
        for section_name in sections:
            node = node.setdefault(section_name, {})
        node[last] = value
    return settings


def make_accelerator(config: RunConfig, launch: Launch, plan: BatchPlan, output_dir: Path) -> Accelerator:
    """The Accelerator that the launched file describes, on whatever this box has."""
    import torch
    from accelerate import Accelerator, DistributedType, PartialState

    if not torch.cuda.is_available():
        # Without this line Accelerate finds no backend for a GPU strategy on a box without one, and every rank
        # would believe that it is alone.
        state = PartialState(cpu=True)
        if launch.strategy.name == "fsdp2":
            # Accelerate turns MULTI_GPU into FSDP and never MULTI_CPU: it would train DDP here and say nothing.
            state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        if launch.strategy.deepspeed is not None and launch.world_size > 1:
            import deepspeed

            # On a GPU Accelerate does this. Left out, zero.Init sees a world of one while transformers loads the weights.
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    elif config.device_memory_cap_gib is not None:
        _cap_device_memory(config.device_memory_cap_gib, launch.local_rank)
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "mixed_precision": {"fp32": "no", "bf16": "bf16", "bf16-engine": "bf16", "fp16": "fp16"}[config.precision],
        "log_with": None if config.report_to == "none" else config.report_to,
        "project_dir": str(output_dir),
        # The study's loop steps its schedule itself, once per optimizer step.
        "step_scheduler_with_optimizer": False,
    }
    if launch.strategy.deepspeed is not None:
        from accelerate import DeepSpeedPlugin

        settings = deepspeed_settings(launch.strategy, config, plan, nvme_folder(config, output_dir))
        arguments["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=settings)
        if config.precision == "bf16":
            # DeepSpeed's own bf16 is another training (bf16 weights, fp32 masters); autocast is in the settings.
            arguments["mixed_precision"] = "no"
    elif launch.strategy.name == "fsdp2" and config.precision == "bf16":
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # An empty policy keeps parameters, gathers and reductions in fp32; autocast does the rest, as under DDP.
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy())
    return Accelerator(**arguments)


def _cap_device_memory(cap_gib: float, local_rank: int) -> None:
    import torch

    total = torch.cuda.get_device_properties(local_rank).total_memory
    if cap_gib * 2**30 > total:
        raise UserError(
            f"--device_memory_cap_gib {cap_gib} is more than the GPU's {total / 2**30:.0f} GiB", "use a smaller cap"
        )
    torch.cuda.set_per_process_memory_fraction(cap_gib * 2**30 / total, local_rank)


def audit(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    launch: Launch,
    plan: BatchPlan,
    output_dir: Path,
) -> dict[str, Any]:
    """engine.json from the live objects. Raises RunFailed where they differ from what was asked."""
    import torch

    live = (
        _read_deepspeed(model)
        if launch.strategy.deepspeed is not None
        else _read_plain(accelerator, model, config, plan)
    )
    base = base_optimizer(optimizer)
    live |= {
        "attn_implementation": getattr(accelerator.unwrap_model(model).config, "_attn_implementation", None),
        "strategy": launch.strategy.name,
        "distributed_type": accelerator.distributed_type.value,
        "world_size": accelerator.num_processes,
        "optimizer_class": f"{type(base).__module__.split('.')[0]}.{type(base).__name__}",
        "optimizer_settings": _optimizer_settings(base),
    }
    asked = _asked(config, launch, plan, output_dir)
    differences = [f"{key} is {live[key]!r}, asked was {value!r}" for key, value in asked.items() if live[key] != value]
    if differences:
        raise RunFailed(
            f"the engine does not do what {launch.strategy.name} asks: {'; '.join(differences)}",
            "compare the strategy file with engine.json",
        )
    live["warnings"] = _forced_differences(launch.strategy, live, model)
    check_swapped(launch.strategy, nvme_folder(config, output_dir))
    from importlib.metadata import PackageNotFoundError, version

    try:
        deepspeed_version = version("deepspeed")
    except PackageNotFoundError:
        deepspeed_version = None
    return live | {"virtual": False, "torch": torch.__version__, "deepspeed": deepspeed_version}


def _asked(config: RunConfig, launch: Launch, plan: BatchPlan, output_dir: Path) -> dict[str, Any]:
    strategy = launch.strategy
    asked: dict[str, Any] = {
        "distributed_type": _expected_distributed_type(strategy),
        "world_size": launch.world_size,
        "zero_stage": strategy.zero_stage,
        "offload_optimizer": strategy.offload_device("optimizer"),
        "offload_param": strategy.offload_device("param"),
        "precision": config.precision,
        "gradient_clipping": config.max_grad_norm,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "nvme_path": str(nvme_folder(config, output_dir)) if strategy.uses_nvme else None,
        "optimizer_settings": {
            "lr": config.learning_rate, "weight_decay": config.weight_decay, "betas": [0.9, 0.999], "eps": 1e-8,
            "decoupled_weight_decay": True,
        },
    }  # fmt: skip
    if strategy.deepspeed is None:
        asked["fully_sharded"] = strategy.name == "fsdp2"
    for key, value in parse_overrides(config.engine_override).items():
        if key.startswith("zero_optimization.") and key.count(".") == 1 and key.split(".")[1] in asked:
            asked[key.split(".")[1]] = value
    return asked


def _expected_distributed_type(strategy: Strategy) -> str:
    import torch

    if strategy.distributed_type == "MULTI_GPU" and not torch.cuda.is_available():
        return "MULTI_CPU"
    return strategy.distributed_type


def base_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that does the arithmetic, under Accelerate's and DeepSpeed's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _optimizer_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    # torch.optim.AdamW decouples by its class, DeepSpeedCPUAdam by a switch that defaults to on.
    decoupled = getattr(optimizer, "adam_w_mode", type(optimizer).__name__ == "AdamW")
    return {
        "lr": group["initial_lr"] if "initial_lr" in group else group["lr"],
        "weight_decay": group["weight_decay"],
        "betas": list(group["betas"]),
        "eps": group["eps"],
        "decoupled_weight_decay": bool(decoupled),
    }


def _read_deepspeed(engine: Any) -> dict[str, Any]:
    zero = engine._config.zero_config
    offload = {}
    for what in ("optimizer", "param"):
        section = getattr(zero, f"offload_{what}")
        device = getattr(section.device, "value", section.device) if section is not None else "none"
        offload[what] = (None if device == "none" else device, section)
    paths = {str(section.nvme_path) for device, section in offload.values() if device == "nvme"}
    parameters = list(engine.module.parameters())
    if engine.bfloat16_enabled():
        precision = "bf16-engine"
    elif engine.fp16_enabled():
        precision = "fp16"
    elif engine.torch_autocast_enabled():
        precision = {"torch.bfloat16": "bf16"}.get(
            str(engine.torch_autocast_dtype()), str(engine.torch_autocast_dtype())
        )
    else:
        precision = "fp32"
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        "offload_optimizer": offload["optimizer"][0],
        "offload_param": offload["param"][0],
        "nvme_path": paths.pop() if len(paths) == 1 else (sorted(paths) or None),
        "precision": precision,
        "param_dtype": str(parameters[0].dtype).removeprefix("torch."),
        "gradient_clipping": float(engine.gradient_clipping()),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "per_device_train_batch_size": engine.train_micro_batch_size_per_gpu(),
        "buckets": {key: getattr(zero, key) for key in BUCKET_KEYS},
    }


def _read_plain(accelerator: Accelerator, model: torch.nn.Module, config: RunConfig, plan: BatchPlan) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    buckets: dict[str, Any] = {}
    if isinstance(model, DistributedDataParallel):
        buckets = {"ddp_bucket_bytes": int(model.bucket_bytes_cap)}
    return {
        "zero_stage": None,
        "offload_optimizer": None,
        "offload_param": None,
        "nvme_path": None,
        "precision": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "param_dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "buckets": buckets,
        "fully_sharded": any(isinstance(parameter, DTensor) for parameter in model.parameters()),
        # Without an engine these two are the loop's own doing; there is no second opinion to read back.
        "gradient_clipping": config.max_grad_norm,
        "per_device_train_batch_size": plan.per_device_train_batch_size,
    }


def _forced_differences(strategy: Strategy, live: Mapping[str, Any], model: Any) -> list[str]:
    """What the engine insists on, said aloud: it bears on the comparison and cannot be switched off."""
    warnings = []
    if "DeepSpeedCPUAdam" in live["optimizer_class"]:
        warnings.append("DeepSpeed replaced torch's AdamW by DeepSpeedCPUAdam, because the optimizer is offloaded")
    if strategy.offload_device("param") == "nvme":
        swapped = _nvme_parameter_dtype(model)
        if swapped != live["param_dtype"]:
            warnings.append(f"DeepSpeed keeps the parameters on NVMe as {swapped}: they are rounded every step")
    if live["world_size"] == 1 and live["zero_stage"]:
        warnings.append(f"with one rank stage {live['zero_stage']} shards nothing")
    return warnings


def _nvme_parameter_dtype(engine: Any) -> str:
    swappers = [getattr(parameter, "nvme_swapper", None) for parameter in engine.module.parameters()]
    return next(str(swapper.dtype).removeprefix("torch.") for swapper in swappers if swapper is not None)


def _deep_copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _deep_copy(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def check_swapped(strategy: Strategy, folder: Path) -> None:
    """NVMe offload that leaves no file where it was asked to did not happen."""
    for what, pattern in (("optimizer", "optimizer/**/*.swp"), ("param", "*params/**/*.swp")):
        if strategy.offload_device(what) == "nvme" and not any(folder.rglob(pattern)):
            raise RunFailed(
                f"{strategy.name} swapped no {what} to {folder}",
                "DeepSpeed keeps tensors in host memory whose shard is under 1 MiB: use a larger model or fewer ranks",
            )


def tear_down(accelerator: Accelerator, model: Any) -> None:
    """Engine first, then the process group it talks through; the other order aborts now and then."""
    destroy = getattr(model, "destroy", None)
    if destroy is not None:
        destroy()
    accelerator.end_training()
