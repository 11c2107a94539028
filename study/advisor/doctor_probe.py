"""Run the checks that need torch, DeepSpeed or huggingface_hub, and print one JSON line per check.

`study doctor` starts this as a separate process and never imports it, so the `study` command starts fast, and works
without torch. If this process ends early (a library aborts, an I/O hangs), its earlier lines still count.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import time
import timeit
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from study.advisor.doctor import INSTALL, PINS, Check, needed, shown
from study.config.errors import UserError, first_line
from study.host import operators
from study.host.environment import check_torch_supports_gpus
from study.host.folders import cache_directory
from study.host.memory import GIB, MIB
from study.predictor.time import CPU_ADAM_BYTES

CHUNK_MIB, CHUNKS, ADAM_ELEMENTS = 32, 8, 2**24
# Time limit per direction, for slow disks.
TRANSFER_S = 2.0
ANOTHER_DRIVE = "study doctor --nvme_path DIR, with a folder on a local disk"
BUILD = "python -m study.host.operators"
REINSTALL_TORCH = f"python -m pip install --force-reinstall -c {PINS} torch"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure_in", type=Path)
    parser.add_argument("--not_measured", default="", help="reason why NVMe is not measured")
    parser.add_argument("--hub", action="store_true")
    options = parser.parse_args()
    configure = functools.cache(lambda: operators.configure_build_environment(cache_directory()))
    # DeepSpeed prints to stdout from Python and from C++; from here on that goes to stderr.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)
        sections: dict[str, Callable[[], Check]] = {
            "gpus": _gpus,
            "nccl": _nccl,
            "nvcc": _nvcc,
            "hub": functools.partial(_hub, options.hub),
            "libaio": _libaio,
            "operators": _operators,
            "cpu adam": _cpu_adam,
            "nvme bandwidth": functools.partial(_nvme_bandwidth, options.measure_in, options.not_measured),
        }
        for name, section in sections.items():
            try:
                configure()
                check = section()
            except UserError as refusal:
                check = Check(name, "missing", refusal.problem, refusal.fix)
            except Exception as error:  # any exception of a library is the result of its check
                check = Check(name, "missing", f"{type(error).__name__}: {first_line(error)[:200]}", INSTALL)
            print(json.dumps(dataclasses.asdict(check)), file=lines, flush=True)


def _gpus() -> Check:
    import torch

    from study.host.environment import describe_environment
    from study.host.machine import detect_machine

    check_torch_supports_gpus()
    visible = detect_machine().gpus
    environment = describe_environment()
    devices = [f"{device['name']} {device['memory_gib']:.0f} GiB" for device in environment["devices"]]
    if not devices and not visible:
        return Check("gpus", "none", f"none; torch {torch.__version__} trains on the cores")
    counted = ", ".join(f"{devices.count(device)} x {device}" for device in dict.fromkeys(devices))
    text = f"{counted or 'none'}; driver {environment['driver']}, CUDA {environment['cuda']}, torch {torch.__version__}"
    return needed("gpus", len(devices) >= visible, text, f"the driver shows {visible}", REINSTALL_TORCH)


def _nccl() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("nccl", "none", "none; ranks communicate over gloo")
    if not torch.distributed.is_nccl_available():
        return Check("nccl", "missing", f"torch {torch.__version__} is built without it", REINSTALL_TORCH)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if slow := [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if os.environ.get(name, "0") != "0"]:
        return Check("nccl", "none", f"{version}; slower by {' and '.join(slow)}", f"unset {' '.join(slow)}")
    return Check("nccl", "ok", version)


def _nvcc() -> Check:
    """Check the CUDA toolkit: with a GPU, DeepSpeed's asynchronous I/O links CUDA, and uses the library of torch."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if not torch.cuda.is_available():
        return Check("nvcc", "none", "not needed without a GPU")
    version = operators.toolkit_version()
    same = version is not None and str(version[0]) == str(torch.version.cuda).partition(".")[0]
    text = f"{'.'.join(map(str, version))} in {shown(Path(CUDA_HOME))}" if CUDA_HOME and version else "no CUDA toolkit"
    problem = f"operators of NVMe strategies are built with it, for torch's CUDA {torch.version.cuda}"
    return needed("nvcc", same, text, problem, operators.toolkit_fix())


def _libaio() -> Check:
    links = operators.is_libaio_installed()
    problem, fix = "libaio or a C compiler is missing", "apt-get install gcc libaio-dev"
    return needed("libaio", links, f"a program that calls it {'links' if links else 'does not link'}", problem, fix)


def _operators() -> Check:
    from study.config.strategies import STRATEGY_NAMES, read_strategy

    needed = {item.name: item for name in STRATEGY_NAMES for item in operators.builders(read_strategy(name))}
    names: dict[str, list[str]] = {}
    for name, builder in needed.items():
        names.setdefault(_operator_state(builder), []).append(name)
    text = "; ".join(f"{state}: {', '.join(operators)}" for state, operators in names.items())
    is_settled = set(names) <= {"built", "not buildable here"}
    return Check("operators", "ok", text) if is_settled else Check("operators", "none", text, BUILD)


def _cpu_adam() -> Check:
    """Measure DeepSpeed's Adam on the host, in the bytes that study/predictor/time.py counts."""
    import torch

    from study.config.strategies import read_strategy

    builder, threads, rates = operators.builders(read_strategy("zero2_cpu"))[-1], torch.get_num_threads(), []
    if _operator_state(builder) != "built":
        return Check("cpu adam", "none", "not measured: its operator is not built yet", f"{BUILD} && study doctor")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = torch.nn.Parameter(torch.zeros(ADAM_ELEMENTS))
    weights.grad = torch.ones_like(weights)
    optimizer = DeepSpeedCPUAdam([weights])
    for count in dict.fromkeys((threads, 1)):
        torch.set_num_threads(count)
        seconds = min(timeit.repeat(optimizer.step, number=1, repeat=4))
        rates.append(f"{CPU_ADAM_BYTES * ADAM_ELEMENTS / seconds / 1e9:.1f} GB/s on {count}")
    text = f"{', '.join(rates)} of {threads} threads; accelerate launch and torchrun give a rank one (OMP_NUM_THREADS)"
    return Check("cpu adam", "ok", f"{text}; study predict --host_gb_per_s uses a rate")


def _operator_state(builder: Any) -> str:
    import torch

    if (operators.build_folder(builder.name) / "lock").exists():
        return "being built, or left half-built"
    if operators.is_built(builder):
        return "built"
    if not builder.is_compatible(verbose=False) or operators.lacks_toolkit(builder, torch.cuda.is_available()):
        return "not buildable here"
    return "to be built on first use"


def _nvme_bandwidth(folder: Path | None, reason: str) -> Check:
    """Measure with DeepSpeed's asynchronous I/O, the strategies' settings and pinned buffers, past the page cache."""
    import torch

    from study.config.strategies import read_strategy

    name, strategy = "nvme bandwidth", read_strategy("zero3_nvme")
    if folder is None:
        return Check(name, "none", reason, ANOTHER_DRIVE)
    # Loading would compile it, which takes a minute, and would hang after a build that was killed.
    asynchronous_io = operators.builders(strategy)[-1]
    if any(_operator_state(builder) != "built" for builder in operators.builders(strategy)):
        return Check(name, "none", "not measured: its operators are not built yet", f"{BUILD} && study doctor")
    try:
        # A file without a name leaves nothing in that folder, even if this process is killed.
        file = f"/proc/self/fd/{os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)}"
    except OSError as error:
        text = f"not measurable: this file system refuses O_TMPFILE or O_DIRECT ({error.strerror})"
        return Check(name, "none", text, ANOTHER_DRIVE)
    settings = (strategy.deepspeed or {})["aio"]
    order = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
    handle = operators.load_operator(asynchronous_io).aio_handle(*(settings[key] for key in order))
    example = torch.empty(0, dtype=torch.uint8)
    source, target = (handle.new_cpu_locked_tensor(CHUNK_MIB * MIB, example) for _ in range(2))
    # Random data, because some disks compress.
    source.random_()
    written, write_rate = _transfer(lambda offset: handle.sync_pwrite(source, file, offset), CHUNKS)
    _, read_rate = _transfer(lambda offset: handle.sync_pread(target, file, offset), written)
    if not torch.equal(source, target):
        return Check(name, "missing", "the data read back differs from the data written", "use another disk")
    text = f"write {write_rate:.2f} GiB/s, read {read_rate:.2f} GiB/s ({written * CHUNK_MIB} MiB, DeepSpeed's"
    return Check(name, "ok", f"{text} asynchronous I/O, past the page cache with O_DIRECT)")


def _transfer(step: Callable[[int], int], chunks: int) -> tuple[int, float]:
    """Return the number of transferred chunks, and GiB/s."""
    started = time.perf_counter()
    for index in range(chunks):
        if step(index * CHUNK_MIB * MIB) != 1:
            raise OSError("DeepSpeed's asynchronous I/O failed")
        if (seconds := time.perf_counter() - started) > TRANSFER_S:
            break
    return index + 1, (index + 1) * CHUNK_MIB * MIB / GIB / seconds


def _hub(ask: bool) -> Check:
    from huggingface_hub import HfApi, constants, get_token, try_to_load_from_cache

    from study.workloads.presets import PROBE_TIMEOUT_S
    from study.workloads.sources import IMDB, IMDB_FILES, IMDB_REVISION, WIKITEXT, WIKITEXT_FILES, WIKITEXT_REVISION

    # Each data set at the revision that runs use, and its files.
    pinned = [(IMDB, IMDB, IMDB_REVISION, file) for file in chain(*IMDB_FILES.values())]
    for name, splits in WIKITEXT_FILES.items():
        files = [f"{name}/{file}" for file in chain(*splits.values())]
        pinned += [(f"{WIKITEXT} {name}", WIKITEXT, WIKITEXT_REVISION, file) for file in files]
    absent = dict.fromkeys(
        title
        for title, name, revision, file in pinned
        if not isinstance(try_to_load_from_cache(name, file, revision=revision, repo_type="dataset"), str)
    )
    offline, is_needed = constants.is_offline_mode(), bool(absent)
    # The addresses of a mirror or a proxy, and the token, are not printed.
    facts = [
        f"HF_HOME {shown(Path(constants.HF_HOME))}",
        f"HF_HUB_OFFLINE {'set' if offline else 'not set'}",
        f"a login {'exists' if get_token() else 'is missing'}",
        f"pinned data that is not in the cache: {', '.join(absent)}" if absent else "all pinned data is in the cache",
    ]
    if offline or not ask:
        facts.append("no request was sent to the hub")
    else:
        try:
            HfApi().dataset_info(IMDB, revision=IMDB_REVISION, timeout=PROBE_TIMEOUT_S)
            facts.append("the hub responds")
            is_needed = False
        except Exception as error:  # name resolution, proxy, HTTP; its text names hosts
            facts.append(f"the hub does not respond ({type(error).__name__})")
    if not is_needed:
        return Check("hub", "ok", "; ".join(facts))
    facts.append("--data hub needs the hub, --data builtin does not")
    return Check("hub", "none", "; ".join(facts), "" if ask or offline else "study doctor --hub")


if __name__ == "__main__":
    main()
