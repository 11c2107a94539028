"""Checks of a run's request before anything is written: a request that cannot run ends with one line."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from study.config.errors import REFUSAL_FILE_VARIABLE, Unsupported, UserError
from study.config.flags import BatchPlan, RunConfig, parse_command_line, refuse_what_no_virtual_run_has, resolved
from study.config.launched import Launch, shell_environment, this_launch, virtual_launch
from study.config.names import override
from study.engine.groups import check_group, check_replicas
from study.engine.setup import check_engine_settings
from study.host.folders import cache_directory, folder_named, free_bytes, refuse_full_nvme, refuse_unwritable
from study.host.memory import can_lock, locked_bytes
from study.host.operators import libaio_is_there
from study.host.stacks import refuse_unverified_pair
from study.predictor.hardware import ANY_DEVICE, box_of_ranks
from study.predictor.request import request_for, unpredicted
from study.predictor.state import state_bytes, unswapped
from study.records.directory import is_finished, write_json
from study.records.lock import refuse_files_of_others, refuse_folder_at_work
from study.records.schema import RecordError
from study.run import machines

SECONDS_FOR_THE_FIRST_RANK_TO_SPEAK = 10
# Enough for the rows and the log of a long run.
LEAST_ROOM_BYTES = 16 * 2**20
# Raises UserError for a request that one trainer does not support.
Refuse = Callable[[RunConfig, Launch], None]


@dataclasses.dataclass(frozen=True)
class RunRequest:
    """A request that passed every check that needs no data."""

    config: RunConfig
    launch: Launch
    plan: BatchPlan
    output_dir: Path
    # The folder to resume from, and its manifest.
    checkpoint: tuple[Path, dict[str, Any]] | None
    cache: Path
    notice: str | None


def read_request(trainer: str, arguments: Sequence[str] | None) -> tuple[RunConfig, Launch]:
    """Return the flags and the launch, without importing torch."""
    config = parse_command_line(arguments)
    launch = this_launch(shell=shell_environment())
    if config.virtual_world_size:
        if trainer != "study":
            raise UserError(f"{trainer} does not run virtual ranks", "use study/train.py")
        launch = virtual_launch(launch, config.virtual_world_size, config.virtual_rank or 0)
    return config, dataclasses.replace(launch, strategy=launch.strategy.with_group_size(config.group_size))


def checked(
    trainer: str, config: RunConfig, launch: Launch, check_trainer: Refuse | None, print_line: Callable[[str], None]
) -> RunRequest:
    """Return the request after all checks, the cheapest first; raise UserError at the first problem.

    `print_line` prints on the terminal.
    """
    from study.engine.virtual_rank import check_can_be_held
    from study.host.environment import prepare_devices
    from study.host.operators import build_operators
    from study.host.stacks import import_libraries
    from study.run.resume import find_checkpoint
    from study.workloads.architecture import model_config

    if check_trainer:
        check_trainer(config, launch)
    refuse_unverified_pair(launch.strategy)
    if not config.torch_compile:
        # Importing DeepSpeed compiles parts of it, which takes a second of every rank's start-up.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    gpus = prepare_devices(launch)
    config = resolved(config, accelerator_visible=gpus > 0)
    if launch.virtual:
        refuse_what_no_virtual_run_has(config)
    check_replicas(config, launch, gpus)
    notice = check_devices(launch, gpus)
    plan = config.batch_plan(launch.world_size, launch.strategy.group_size)
    suffix = "" if trainer == "study" else f"-{trainer}"
    default = Path("runs") / config.run_id(f"{launch.strategy.name}{suffix}", launch.world_size)
    output_dir = folder_named(str(config.output_dir or default))
    check_output_dir(config, output_dir)
    if launch.is_main:
        # The other ranks may already see their main process's lock there.
        refuse_folder_at_work(output_dir, f"--output_dir {output_dir}")
    if launch.strategy.offload_device("param") == "nvme":
        launch = enlarge_swap_buffers(config, launch)
    if launch.strategy.uses_nvme:
        # Before the check of locked memory: a model that is too large for the NVMe has too large buffers as well.
        check_swaps(config, launch)
        check_room_to_swap(config, launch)
    check_request(config, launch)
    check_launch_flags(config, plan)
    checkpoint = find_checkpoint(config, launch, output_dir)
    import_libraries(launch.strategy)
    if launch.strategy.deepspeed is not None:
        check_engine_settings(config, launch.strategy)
    check_group(config, launch, model_config(config), checkpoint[1]["world_size"] if checkpoint else None)
    if launch.is_main:
        check_room_for_record(config, output_dir)
    cache = cache_directory()
    build_operators(launch.strategy, cache, print_line)
    if launch.virtual:
        check_can_be_held(config, launch)
    return RunRequest(config, launch, plan, output_dir, checkpoint, cache, notice)


def check_swaps(config: RunConfig, launch: Launch) -> None:
    """Raise UserError if the model is too small to swap. Cases without a prediction are left to the audit."""
    strategy = launch.strategy.overridden(config)
    if strategy.zero_stage != 3 or strategy.group or unpredicted("single", config):
        return
    request = request_for("single", config, box_of_ranks("any", ANY_DEVICE, launch.world_size), 1, 1)
    if (section := unswapped(dataclasses.replace(request, strategy=strategy))) is not None:
        raise Unsupported(
            f"{strategy.name} would swap no {section} of {config.model_name} on {launch.world_size} ranks: DeepSpeed"
            " keeps shards under 1 MiB in host memory",
            "use a larger model or fewer ranks",
        )


def enlarge_swap_buffers(config: RunConfig, launch: Launch) -> Launch:
    """Return the launch with swap buffers as large as the model needs.

    Raise UserError if --engine_override makes them too small.
    """
    from study.workloads.architecture import shape_of

    part = -(-shape_of(config).largest_parameter // launch.world_size)
    strategy = launch.strategy.with_swap_buffers(part)
    if (overridden := strategy.overridden(config)) != overridden.with_swap_buffers(part):
        raise UserError(
            f"--engine_override sets buffer_size below the {part:,} elements of the largest parameter on a rank",
            "leave it out, or set it larger",
        )
    return dataclasses.replace(launch, strategy=strategy)


def refused(refusal: UserError, print_line: Callable[[str], None]) -> int:
    """Print the error of a wrong request, once on each machine; return the exit status."""
    # A launcher exits with 1 for every status of a rank, so a sweep reads the reason from this file.
    if file := os.environ.get(REFUSAL_FILE_VARIABLE):
        write_json(Path(file), refusal.to_json())
    machines.publish_refusal(refusal)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The launcher stops all ranks when one exits: the first rank needs time to print the reason.
        time.sleep(SECONDS_FOR_THE_FIRST_RANK_TO_SPEAK)
    print_line(f"error: {refusal.problem}. To fix it: {refusal.fix}.")
    machines.wait_until_heard()
    return 2


def check_output_dir(config: RunConfig, output_dir: Path) -> None:
    """Raise UserError if the folder has a finished run, which would be overwritten, or is not a run directory."""
    refuse_unwritable(output_dir, f"--output_dir {output_dir}", "name a folder that you may write")
    refuse_files_of_others(output_dir, f"--output_dir {output_dir}", "name a new folder")
    if not (output_dir / "status.json").exists() or config.overwrite_output_dir:
        return
    try:
        finished = is_finished(output_dir)
    except RecordError as error:
        raise UserError(
            f"--output_dir is a damaged run ({error})", "remove it, or add --overwrite_output_dir"
        ) from None
    if finished:
        raise UserError(
            f"--output_dir {output_dir} has a finished run",
            "name another, or add --overwrite_output_dir to replace it",
        )


def check_devices(launch: Launch, gpus: int) -> str | None:
    """Return a notice if GPUs stay idle, else None; raise Unsupported for more ranks than GPUs.

    Without a GPU any number of ranks is allowed.
    """
    if gpus and launch.local_world_size > gpus:
        raise Unsupported(
            f"{launch.local_world_size} ranks were launched on a machine with {gpus} GPU{'s'[: gpus > 1]}",
            f"run: {launch.command(gpus, launch.machines)}",
        )
    if launch.local_world_size < gpus and launch.strategy.name != "single" and not launch.virtual:
        command = launch.command(gpus, launch.machines)
        return f"{gpus - launch.local_world_size} of {gpus} GPUs stay idle; to use all: {command}"
    return None


def check_request(config: RunConfig, launch: Launch) -> None:
    """Raise UserError if this machine or this strategy does not support the request."""
    import torch

    strategy, on_gpu = launch.strategy, torch.cuda.is_available()
    has_fp16 = on_gpu or (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if config.precision.startswith("fp16") and not has_fp16:
        raise Unsupported(f"--precision {config.precision}: this CPU has no fp16", "use --precision bf16")
    strategy.check_engine_flags(config)
    if not on_gpu and (strategy.own_settings or {}).get("fsdp_offload_params"):
        raise Unsupported("fsdp_offload_params offloads from a GPU, and none is visible", "leave it out")
    has_bf16 = not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
    if config.precision in ("bf16", "bf16-engine") and not has_bf16:
        raise Unsupported(f"{torch.cuda.get_device_name()} has no bf16", "use --precision fp16 or --precision fp32")
    if (cap_gib := config.device_memory_cap_gib) is not None:
        if not on_gpu:
            raise Unsupported("--device_memory_cap_gib caps a GPU's memory; no GPU is visible", "leave the flag out")
        total_gib = torch.cuda.get_device_properties(launch.local_rank).total_memory / 2**30
        if cap_gib > total_gib:
            raise Unsupported(
                f"--device_memory_cap_gib {cap_gib} is more than the GPU's {total_gib:.0f} GiB", "use a smaller cap"
            )
    if strategy.deepspeed is not None:
        override(strategy.deepspeed, config.engine_override)
    if config.report_to != "none":
        from accelerate.tracking import get_available_trackers

        available = [tracker.value for tracker in get_available_trackers()]
        if config.report_to not in available:
            raise UserError(
                f"--report_to {config.report_to}: no such tracker is installed",
                f"install it, or use one of: {', '.join(['none', *available])}",
            )
    if strategy.uses_nvme:
        if not libaio_is_there():
            raise Unsupported(
                "DeepSpeed cannot build its asynchronous I/O: libaio is missing", "run: apt-get install libaio-dev"
            )
        locked = locked_bytes(strategy)
        if not can_lock(locked):
            # Without this check DeepSpeed would abort the process.
            raise Unsupported(
                f"{strategy.name} locks at least {locked / 2**20:.0f} MiB of memory per rank, and `ulimit -l` allows"
                " less",
                "run: ulimit -l unlimited (as root, or docker run --ulimit memlock=-1)",
            )
        folder = folder_named(config.nvme_path)
        refuse_unwritable(folder, f"--nvme_path {folder}", "name a folder on a local drive that you may write")


_OVERRULED_BY_DEEPSPEEDS_FILE = {
    **dict.fromkeys(
        ("DEEPSPEED_ZERO_STAGE", "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
        "launch with another file of accelerate_configs/, and without the flag",
    ),
    "GRADIENT_CLIPPING": "use --max_grad_norm, and not the launcher's flag",
}


def check_launch_flags(config: RunConfig, plan: BatchPlan, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if the Accelerate file or launcher flags set something that train.py's flags decide."""
    precision = config.precision.removesuffix("-engine")
    for key, expected, flag in (
        ("mixed_precision", "no" if precision == "fp32" else precision, "precision"),
        ("dynamo_backend", "inductor" if config.torch_compile else "no", "torch_compile"),
        ("gradient_accumulation_steps", str(plan.gradient_accumulation_steps), "per_device_train_batch_size"),
    ):
        requested = environment.get(f"ACCELERATE_{key.upper()}", "no").lower()
        if requested not in ("no", expected):
            raise UserError(
                f"the launch sets {key} {requested}, and --{flag} sets {expected}",
                f"remove {key} from the Accelerate file or the launcher's flags: only --{flag} sets it",
            )
    if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        # Accelerate exports these flags but uses DeepSpeed's file instead.
        for key, fix in _OVERRULED_BY_DEEPSPEEDS_FILE.items():
            if value := environment.get(f"ACCELERATE_{key}"):
                name = key.lower().removeprefix("deepspeed_")
                raise UserError(f"the launch sets {name} {value}, but DeepSpeed's file decides it", fix)


def check_room_for_record(config: RunConfig, output_dir: Path) -> None:
    """Raise UserError if the disk has no room for a record, and for a checkpoint if the run saves any."""
    from study.workloads.architecture import shape_of

    needed, what = LEAST_ROOM_BYTES, "a record"
    if config.checkpointing_steps:
        # Weights and Adam's two moments, in fp32; frozen weights have no moments.
        bytes_per_weight = 12 if config.peft == "none" else 4
        needed, what = needed + bytes_per_weight * shape_of(config).parameters, "a record with a checkpoint"
    free = free_bytes(output_dir)
    if free < needed:
        # Not `Unsupported`, which a sweep does not retry: the disk may have room later.
        raise UserError(
            f"--output_dir {output_dir} has {free / 2**20:,.0f} MiB free, and {what} needs {needed / 2**20:,.0f} MiB",
            "make room, or name a folder on a larger disk",
        )


def check_room_to_swap(config: RunConfig, launch: Launch) -> None:
    """Raise UserError if the NVMe folder is too small for all ranks of this machine, without LoRA's small adapters."""
    from study.workloads.architecture import shape_of

    parameters, strategy = shape_of(config).parameters, launch.strategy.overridden(config)
    state = state_bytes(strategy, config.precision, launch.world_size, trained=config.peft == "none")
    processes = 1 if launch.virtual else launch.local_world_size
    what = f"{launch.strategy.name} with {parameters / 1e9:.2g} billion parameters"
    refuse_full_nvme(folder_named(config.nvme_path), processes * parameters * state.nvme, what)
