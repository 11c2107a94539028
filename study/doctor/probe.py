"""The checks that need torch, DeepSpeed or the hub's library, as a process of their own: one JSON line per check.

`study doctor` starts it and never imports it: the `study` command works, and starts at once, where no torch is. What
ends this process (a library that aborts, an I/O that hangs) leaves the lines that were written before.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from study.doctor.checks import GIB, INSTALL, MIB, Check, shown
from study.host.folders import cache_directory
from study.host.operators import use_own_build

CHUNK_MIB, CHUNKS = 32, 8
# A slow drive gets no more than this for each direction.
TRANSFER_S = 2.0
BUILD = "python -m study.host.operators"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure_in", type=Path)
    parser.add_argument("--hub", action="store_true")
    options = parser.parse_args()
    use_own_build(cache_directory())
    # DeepSpeed prints to stdout from Python and from C++; what is written there after this goes to stderr.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)
        sections: dict[str, Callable[[], Check]] = {
            "gpus": _gpus,
            "nccl": _nccl,
            "nvcc": _nvcc,
            "matmul": _matmul,
            "hub": functools.partial(_hub, options.hub),
            "libaio": _libaio,
            "operators": _operators,
        }
        if options.measure_in:
            sections["nvme bandwidth"] = functools.partial(_nvme_bandwidth, options.measure_in)
        for name, section in sections.items():
            try:
                check = section()
            except Exception as error:  # whatever a library here raises is what the doctor found
                first_line = (str(error).strip().splitlines() or [""])[0]
                check = Check(name, "missing", f"{type(error).__name__}: {first_line[:200]}", INSTALL)
            print(json.dumps(dataclasses.asdict(check)), file=lines, flush=True)


def _gpus() -> Check:
    import torch

    from study.host.box import this_box
    from study.host.environment import describe_environment

    visible = this_box().gpus
    seen = describe_environment()
    devices = [f"{device['name']} {device['memory_gib']:.0f} GiB" for device in seen["devices"]]
    if len(devices) < visible:
        found = f"the driver ({seen['driver']}) shows {visible}, and torch {torch.__version__} sees {len(devices)}"
        return Check("gpus", "missing", found, "python -m pip install --force-reinstall -c constraints.txt torch")
    if not devices:
        return Check("gpus", "none", f"none; torch {torch.__version__} trains on the cores, bf16 and fp32, no fp16")
    counted = ", ".join(f"{devices.count(device)} x {device}" for device in dict.fromkeys(devices))
    return Check("gpus", "ok", f"{counted}; driver {seen['driver']}, CUDA {seen['cuda']}")


def _nccl() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("nccl", "none", "none; ranks talk over gloo")
    if not torch.distributed.is_nccl_available():
        fix = "python -m pip install --force-reinstall -c constraints.txt torch"
        return Check("nccl", "missing", f"torch {torch.__version__} is built without it", fix)
    return Check("nccl", "ok", ".".join(map(str, torch.cuda.nccl.version())))


def _nvcc() -> Check:
    """With a GPU, DeepSpeed compiles the offload operators with it, if its major version is that of torch's CUDA."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if not torch.cuda.is_available():
        return Check("nvcc", "none", "not needed without a GPU")
    try:
        from deepspeed.ops.op_builder.builder import installed_cuda_version

        version = installed_cuda_version()
    except (OSError, RuntimeError, subprocess.SubprocessError, AssertionError):
        version = None
    if CUDA_HOME is None or version is None:
        found = "no CUDA toolkit, with which DeepSpeed compiles the offload operators"
        return Check("nvcc", "missing", found, f"export CUDA_HOME=DIR, with the toolkit of CUDA {torch.version.cuda}")
    found = f"{'.'.join(map(str, version))} in {shown(Path(CUDA_HOME))}"
    if str(version[0]) != str(torch.version.cuda).partition(".")[0]:
        found += f", and torch is built for CUDA {torch.version.cuda}"
        return Check("nvcc", "missing", found, f"export CUDA_HOME=DIR, with the toolkit of CUDA {torch.version.cuda}")
    return Check("nvcc", "ok", found)


def _matmul() -> Check:
    from study.measure.matmul import measure

    measured = measure(seconds=0.2)
    rates = ", ".join(f"{rate:.3g} TFLOP/s {name}" for name, rate in measured["tflops"].items())
    where = f"{measured['threads']} threads" if measured["threads"] else measured["device"]
    return Check("matmul", "ok", f"{rates} (random matrices of {measured['size']}, {where})")


def _libaio() -> Check:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if AsyncIOBuilder().is_compatible(verbose=False):
        return Check("libaio", "ok", "headers and library: a program that calls it links")
    found = "a program that calls it does not link (libaio or a C compiler is missing)"
    return Check("libaio", "missing", found, "apt-get install gcc libaio-dev")


def _operators() -> Check:
    names: dict[str, list[str]] = {}
    for name, state in _operator_states():
        names.setdefault(state, []).append(name)
    found = "; ".join(f"{state}: {', '.join(its)}" for state, its in names.items())
    if set(names) <= {"built", "not buildable here"}:
        return Check("operators", "ok", found)
    return Check("operators", "none", found, BUILD)


def _operator_states() -> Iterator[tuple[str, str]]:
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import _get_build_directory

    from study.host.operators import builders
    from study.spec.strategies import STRATEGY_NAMES, read_strategy

    strategies = [strategy for name in STRATEGY_NAMES if (strategy := read_strategy(name)).deepspeed]
    needed = {builder.name: builder for strategy in strategies for builder in builders(strategy)}
    for name, builder in needed.items():
        folder = Path(_get_build_directory(name, verbose=False))
        if (folder / "lock").exists():
            yield name, "being built, or left half-built"
        elif installed_ops.get(name, False) or (folder / f"{name}.so").exists():
            yield name, "built"
        else:
            yield name, "to be built on first use" if builder.is_compatible(verbose=False) else "not buildable here"


def _nvme_bandwidth(folder: Path) -> Check:
    """Through DeepSpeed's own asynchronous I/O, with the settings that the strategies use and locked buffers as there.

    It opens with O_DIRECT, so the page cache is not what is measured.
    """
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    from study.spec.strategies import read_strategy

    name = "nvme bandwidth"
    # Loading would build it, which takes a minute and is not a doctor's; and would wait for ever for a dead build.
    if dict(_operator_states())["async_io"] != "built":
        return Check(name, "none", "not measured: the operator async_io is not built yet", f"{BUILD} && study doctor")
    file = folder / "bandwidth"
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as error:
        found = f"not measurable: this file system refuses O_DIRECT ({error.strerror})"
        return Check(name, "none", found, "study doctor --nvme_path DIR, with a folder on a local drive")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        return Check(name, "none", "not measured: see libaio")
    settings = (read_strategy("zero3_nvme").deepspeed or {})["aio"]
    order = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
    handle = AsyncIOBuilder().load(verbose=False).aio_handle(*(settings[key] for key in order))
    example = torch.empty(0, dtype=torch.uint8)
    source, target = (handle.new_cpu_locked_tensor(CHUNK_MIB * MIB, example) for _ in range(2))
    # Random, because some drives compress.
    source.random_()
    written, write_s = _transfer(lambda offset: handle.sync_pwrite(source, str(file), offset), CHUNKS)
    read, read_s = _transfer(lambda offset: handle.sync_pread(target, str(file), offset), written)
    if not torch.equal(source, target):
        return Check(name, "missing", "what was read back is not what was written", "use another drive")
    rates = [chunks * CHUNK_MIB * MIB / GIB / seconds for chunks, seconds in ((written, write_s), (read, read_s))]
    found = "write {:.2f} GiB/s, read {:.2f} GiB/s".format(*rates)
    found += f" ({written * CHUNK_MIB} MiB, DeepSpeed's asynchronous I/O, past the page cache with O_DIRECT)"
    return Check(name, "ok", found)


def _transfer(step: Callable[[int], int], chunks: int) -> tuple[int, float]:
    """How many chunks were moved, and in what time."""
    started = time.perf_counter()
    for index in range(chunks):
        if step(index * CHUNK_MIB * MIB) != 1:
            raise OSError("DeepSpeed's asynchronous I/O failed")
        if time.perf_counter() - started > TRANSFER_S:
            break
    return index + 1, time.perf_counter() - started


def _hub(ask: bool) -> Check:
    from huggingface_hub import constants, get_token, try_to_load_from_cache

    from study.tasks.sources import IMDB, IMDB_FILES, IMDB_REVISION, WIKITEXT, WIKITEXT_FILES, WIKITEXT_REVISION

    offline = constants.is_offline_mode()
    # Where a mirror or a proxy stands, and whose token it is, is not said.
    said = [
        f"HF_HOME {shown(Path(constants.HF_HOME))}",
        f"HF_HUB_OFFLINE {'set' if offline else 'not set'}",
        f"a login {'is there' if get_token() else 'is not there'}",
    ]
    wanted = {IMDB: (IMDB_REVISION, [file for files in IMDB_FILES.values() for file in files])}
    for name, splits in WIKITEXT_FILES.items():
        files = [f"{name}/{file}" for files in splits.values() for file in files]
        wanted[f"{WIKITEXT} {name}"] = (WIKITEXT_REVISION, files)
    absent = []
    for title, (revision, files) in wanted.items():
        cached: Any = [
            try_to_load_from_cache(title.split()[0], file, revision=revision, repo_type="dataset") for file in files
        ]
        if not all(isinstance(file, str) for file in cached):
            absent.append(title)
    there = [title for title in wanted if title not in absent]
    said.append(f"pinned data in the cache: {', '.join(there) or 'none'}")
    if not ask or offline:
        said.append("the hub was not asked" if offline else "the hub was not asked (--hub asks it)")
    reachable = ask and not offline and _reachable(said)
    if reachable or not absent:
        return Check("hub", "ok", "; ".join(said))
    said.append("--data hub needs the hub, --data builtin does not")
    return Check("hub", "none", "; ".join(said), "study doctor --hub" if not ask and not offline else "")


def _reachable(said: list[str]) -> bool:
    from huggingface_hub import HfApi

    from study.models.hub import PROBE_TIMEOUT_S
    from study.tasks.sources import IMDB, IMDB_REVISION

    try:
        HfApi().dataset_info(IMDB, revision=IMDB_REVISION, timeout=PROBE_TIMEOUT_S)
    except Exception as error:  # name resolution, proxy, HTTP; its text names hosts
        said.append(f"the hub does not answer ({type(error).__name__})")
        return False
    said.append("the hub answers")
    return True


if __name__ == "__main__":
    main()
