"""Checks of a run's request before anything is written: a request that cannot run ends with one line."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from study.config.errors import REFUSAL_FILE_VARIABLE, Unsupported, UserError
from study.config.flags import BatchPlan, RunConfig, check_virtual_run_flags, resolve_config
from study.config.launch_context import Launch
from study.config.precisions import computes_in_bf16, computes_in_fp16, computing_type
from study.config.strategies import Strategy
from study.engine.model_parallel import check_group, check_replicas
from study.engine.setup import check_engine_settings
from study.host import folders, memory, operators, stacks
from study.predictor.hardware import ANY_DEVICE, box_of_ranks
from study.predictor.request import request_for, unsupported_reason
from study.predictor.state import bytes_per_parameter, unswapped_kind
from study.records import directory, lock, schema
from study.run import context, rendezvous

FIRST_RANK_GRACE_S = 10
# Enough for the rows and the log of a long run.
MIN_FREE_BYTES = 16 * 2**20
# Raises UserError for a request that one trainer does not support.
Refuse = Callable[[RunConfig, Launch], None]


def resolve_run_request(
    trainer: str, config: RunConfig, launch: Launch, check_trainer: Refuse | None, print_line: Callable[[str], None]
) -> context.RunRequest:
    """Return the request after all checks, the cheapest first; raise UserError at the first problem."""
    from study.engine.virtual_rank import check_host_memory
    from study.host.environment import prepare_devices
    from study.run.resume import find_checkpoint
    from study.workloads.architecture import model_config

    if check_trainer:
        check_trainer(config, launch)
    stacks.check_verified_pair(launch.strategy)
    if not config.torch_compile:
        # Importing DeepSpeed compiles parts of it, which takes a second of every rank's start-up.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    gpus = prepare_devices(launch)
    config = resolve_config(config, accelerator_visible=gpus > 0)
    if launch.virtual:
        check_virtual_run_flags(config)
    strategy = launch.strategy.with_overrides(config)
    check_replicas(launch, strategy, gpus)
    notice = check_devices(launch, gpus)
    plan = config.batch_plan(launch.world_size, launch.strategy.group_size)
    suffix = "" if trainer == "study" else f"-{trainer}"
    default = Path("runs") / config.run_id(f"{launch.strategy.name}{suffix}", launch.world_size)
    output_dir = folders.resolve_path(str(config.output_dir or default))
    check_output_dir(config, output_dir)
    if launch.is_main:
        # The other ranks may already see their main process's lock there.
        lock.check_not_active(output_dir, f"--output_dir {output_dir}")
    if launch.strategy.offload_device("param") == "nvme":
        launch, strategy = enlarge_swap_buffers(config, launch)
    if launch.strategy.uses_nvme:
        # Before the check of locked memory: a model that is too large for the NVMe has too large buffers as well.
        check_nvme_swap(config, strategy, launch.world_size)
        check_room_to_swap(config, launch, strategy)
    check_request(config, launch)
    check_launch_flags(config, plan)
    checkpoint = find_checkpoint(config, launch, output_dir)
    stacks.import_libraries(launch.strategy)
    if launch.strategy.deepspeed is not None and strategy.deepspeed is not None:
        check_engine_settings(config, launch.strategy.deepspeed, strategy.deepspeed)
    check_group(config, launch, model_config(config), checkpoint[1]["world_size"] if checkpoint else None)
    if launch.is_main:
        check_room_for_record(config, output_dir)
    cache = folders.cache_directory()
    operators.build_operators(launch.strategy, cache, print_line)
    if launch.virtual:
        check_host_memory(config, launch, strategy)
    return context.RunRequest(config, launch, strategy, plan, output_dir, checkpoint, cache, notice)


def check_nvme_swap(config: RunConfig, strategy: Strategy, ranks: int) -> None:
    """Raise UserError if the model is too small to swap. Cases without a prediction are left to the audit."""
    if strategy.zero_stage != 3 or strategy.group or unsupported_reason("single", config):
        return
    request = request_for("single", config, box_of_ranks("any", ANY_DEVICE, ranks), 1, 1)
    if (section := unswapped_kind(dataclasses.replace(request, strategy=strategy))) is not None:
        raise Unsupported(
            f"{strategy.name} would swap no {section} of {config.model_name} on {ranks} ranks: DeepSpeed"
            " keeps shards under 1 MiB in host memory",
            "use a larger model or fewer ranks",
        )


def enlarge_swap_buffers(config: RunConfig, launch: Launch) -> tuple[Launch, Strategy]:
    """Return launch and strategy with swap buffers for the model; raise UserError if an override is too small."""
    from study.workloads.architecture import model_size

    part = -(-model_size(config).largest_parameter // launch.world_size)
    strategy = launch.strategy.with_swap_buffers(part)
    if (overridden := strategy.with_overrides(config)) != overridden.with_swap_buffers(part):
        problem = f"--engine_override sets buffer_size below the {part:,} elements of the largest parameter on a rank"
        raise UserError(problem, "leave it out, or set it larger")
    return dataclasses.replace(launch, strategy=strategy), overridden


def report_refusal(refusal: UserError, print_line: Callable[[str], None]) -> int:
    """Print the error of a wrong request, once on each machine; return the exit status."""
    # A launcher exits with 1 for every status of a rank, so a sweep reads the reason from this file.
    if file := os.environ.get(REFUSAL_FILE_VARIABLE):
        directory.write_json(Path(file), refusal.to_json())
    rendezvous.publish_refusal(refusal)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The launcher stops all ranks when one exits: the first rank needs time to print the reason.
        time.sleep(FIRST_RANK_GRACE_S)
    print_line(f"error: {refusal.problem}. To fix it: {refusal.fix}.")
    rendezvous.wait_for_acknowledgements()
    return 2


def check_output_dir(config: RunConfig, output_dir: Path) -> None:
    """Raise UserError if the folder has a finished run, which would be overwritten, or is not a run directory."""
    folders.check_writable(output_dir, f"--output_dir {output_dir}", "name a folder that you may write")
    lock.check_is_run_directory(output_dir, f"--output_dir {output_dir}", "name a new folder")
    if not (output_dir / "status.json").exists() or config.overwrite_output_dir:
        return
    try:
        finished = directory.is_finished(output_dir)
    except schema.RecordError as error:
        problem = f"--output_dir is a damaged run ({error})"
        raise UserError(problem, "remove it, or add --overwrite_output_dir") from None
    if finished:
        problem = f"--output_dir {output_dir} has a finished run"
        raise UserError(problem, "name another, or add --overwrite_output_dir to replace it")


def check_devices(launch: Launch, gpus: int) -> str | None:
    """Return a notice if GPUs stay idle, else None; raise Unsupported for more ranks than GPUs, if there are any."""
    if gpus and launch.local_world_size > gpus:
        problem = f"{launch.local_world_size} ranks were launched on a machine with {gpus} GPU{'s'[: gpus > 1]}"
        raise Unsupported(problem, f"run: {launch.command(gpus, launch.machines)}")
    if launch.local_world_size < gpus and launch.strategy.name != "single" and not launch.virtual:
        command = launch.command(gpus, launch.machines)
        return f"{gpus - launch.local_world_size} of {gpus} GPUs stay idle; to use all: {command}"
    return None


def check_request(config: RunConfig, launch: Launch) -> None:
    """Raise UserError if this machine or this strategy does not support the request."""
    import torch

    strategy, on_gpu = launch.strategy, torch.cuda.is_available()
    has_fp16 = on_gpu or (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if computes_in_fp16(config.precision) and not has_fp16:
        raise Unsupported(f"--precision {config.precision}: this CPU has no fp16", "use --precision bf16")
    strategy.check_engine_flags(config)
    if not on_gpu and (strategy.custom_settings or {}).get("fsdp_offload_params"):
        raise Unsupported("fsdp_offload_params offloads from a GPU, and none is visible", "leave it out")
    has_bf16 = not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
    if computes_in_bf16(config.precision) and not has_bf16:
        raise Unsupported(f"{torch.cuda.get_device_name()} has no bf16", "use --precision fp16 or --precision fp32")
    if config.device_memory_cap_gib is not None:
        _check_memory_cap(config.device_memory_cap_gib, launch.local_rank)
    if config.report_to != "none":
        _check_tracker(config.report_to)
    if strategy.uses_nvme:
        _check_nvme(strategy, config.nvme_path)


def _check_memory_cap(cap_gib: float, local_rank: int) -> None:
    """Raise Unsupported if there is no GPU to cap, or if it has less memory than the cap."""
    import torch

    if not torch.cuda.is_available():
        raise Unsupported("--device_memory_cap_gib caps a GPU's memory; no GPU is visible", "leave the flag out")
    total_gib = torch.cuda.get_device_properties(local_rank).total_memory / 2**30
    if cap_gib > total_gib:
        problem = f"--device_memory_cap_gib {cap_gib} is more than the GPU's {total_gib:.0f} GiB"
        raise Unsupported(problem, "use a smaller cap")


def _check_tracker(name: str) -> None:
    """Raise UserError if Accelerate finds no such tracker."""
    from accelerate.tracking import get_available_trackers

    available = [tracker.value for tracker in get_available_trackers()]
    if name not in available:
        problem = f"--report_to {name}: no such tracker is installed"
        raise UserError(problem, f"install it, or use one of: {', '.join(['none', *available])}")


def _check_nvme(strategy: Strategy, nvme_path: str) -> None:
    """Raise if DeepSpeed cannot offload to NVMe here: it lacks a library, locked memory, or a writable folder."""
    if not operators.is_libaio_installed():
        problem = "DeepSpeed cannot build its asynchronous I/O: libaio is missing"
        raise Unsupported(problem, "run: apt-get install libaio-dev")
    locked = memory.required_pinned_bytes(strategy)
    if not memory.can_lock(locked):
        # Without this check DeepSpeed would abort the process.
        raise Unsupported(
            f"{strategy.name} locks at least {locked / 2**20:.0f} MiB of memory per rank, and `ulimit -l` allows less",
            "run: ulimit -l unlimited (as root, or docker run --ulimit memlock=-1)",
        )
    folder = folders.resolve_path(nvme_path)
    folders.check_writable(folder, f"--nvme_path {folder}", "name a folder on a local drive that you may write")


_OVERRULED_BY_DEEPSPEEDS_FILE = {
    **dict.fromkeys(
        ("DEEPSPEED_ZERO_STAGE", "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
        "launch with another file of accelerate_configs/, and without the flag",
    ),
    "GRADIENT_CLIPPING": "use --max_grad_norm, and not the launcher's flag",
}


def check_launch_flags(config: RunConfig, plan: BatchPlan, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if the Accelerate file or launcher flags set something that train.py's flags decide."""
    precision = computing_type(config.precision)
    for key, expected, flag in (
        ("mixed_precision", "no" if precision == "fp32" else precision, "precision"),
        ("dynamo_backend", "inductor" if config.torch_compile else "no", "torch_compile"),
        ("gradient_accumulation_steps", str(plan.gradient_accumulation_steps), "per_device_train_batch_size"),
    ):
        requested = environment.get(f"ACCELERATE_{key.upper()}", "no").lower()
        if requested not in ("no", expected):
            fix = f"remove {key} from the Accelerate file or the launcher's flags: only --{flag} sets it"
            raise UserError(f"the launch sets {key} {requested}, and --{flag} sets {expected}", fix)
    if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        # Accelerate exports these flags but uses DeepSpeed's file instead.
        for key, fix in _OVERRULED_BY_DEEPSPEEDS_FILE.items():
            if value := environment.get(f"ACCELERATE_{key}"):
                name = key.lower().removeprefix("deepspeed_")
                raise UserError(f"the launch sets {name} {value}, but DeepSpeed's file decides it", fix)


def check_room_for_record(config: RunConfig, output_dir: Path) -> None:
    """Raise UserError if the disk has no room for a record, and for a checkpoint if the run saves any."""
    from study.workloads.architecture import model_size

    needed, what = MIN_FREE_BYTES, "a record"
    if config.checkpointing_steps:
        # Weights and Adam's two moments, in fp32; frozen weights have no moments.
        bytes_per_weight = 12 if config.peft == "none" else 4
        needed, what = needed + bytes_per_weight * model_size(config).parameters, "a record with a checkpoint"
    folders.check_disk_space(
        output_dir, needed, f"--output_dir: {what}", "make room, or name a folder on a larger disk"
    )


def check_room_to_swap(config: RunConfig, launch: Launch, strategy: Strategy) -> None:
    """Raise UserError if the NVMe folder is too small for all ranks of this machine, without LoRA's small adapters."""
    from study.workloads.architecture import model_size

    parameters = model_size(config).parameters
    state = bytes_per_parameter(strategy, config.precision, launch.world_size, trained=config.peft == "none")
    processes = 1 if launch.virtual else launch.local_world_size
    what = f"{strategy.name} with {parameters / 1e9:.2g} billion parameters"
    folder = folders.resolve_path(config.nvme_path)
    folders.remove_stale_swap_folders(folder)
    # DeepSpeed aborts the process when a write fails.
    swapped_bytes, fix = processes * parameters * state.nvme, "use a folder on a larger disk, or free some space"
    folders.check_disk_space(folder, swapped_bytes, f"--nvme_path: {what}", fix, Unsupported)
