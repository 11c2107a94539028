"""DeepSpeed's own operators: which ones a strategy needs, built once, before they are needed.

torch guards a build with a lock file. A killed build leaves it behind, and every later run then waits for ever. Here
one process builds under a lock that ends with the process, and first deletes such a file.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from study.config.errors import Unsupported, UserError
from study.config.strategies import STRATEGY_NAMES, Strategy, read_strategy
from study.host.box import visible_gpus
from study.host.environment import processor
from study.host.folders import COMPILES, refuse_unwritable
from study.records.directory import read_json, write_json
from study.records.schema import RecordError

# Of a compiler or a linker, and of a shell without one.
_TELLING = re.compile(r"\berror: |cannot find|undefined reference|command not found")


def _print(line: str) -> None:
    print(line, flush=True)


def build_operators(strategy: Strategy, cache: Path, say: Callable[[str], None] = _print) -> float:
    """Build and load what the strategy needs; returns the seconds it took (near 0 if all was there)."""
    if strategy.deepspeed is None:
        return 0.0
    import torch

    started = time.perf_counter()
    use_own_build(cache)
    _remember_the_processor(cache)
    if strategy.uses_nvme and torch.cuda.is_available():
        # Asked whether there is a GPU, torch may have asked NVML alone.
        torch.cuda.init()
        name_for_the_linker(cache / "operators" / "loaded", ("libcuda", "libcudart"))
    needed = builders(strategy)
    # Before any of them is compiled, which takes minutes.
    for builder in needed:
        if lacks_toolkit(builder, torch.cuda.is_available()):
            raise Unsupported(
                f"DeepSpeed links its operator {builder.name} with CUDA: no toolkit is here", toolkit_fix()
            )
    for builder in needed:
        try:
            load_operator(builder, say)
        except Exception as error:  # the compiler's, the linker's or ninja's
            cause = _cause(error)
            fix = "python3-dev" if "Python.h" in cause else "g++, ninja and, for NVMe, libaio-dev"
            raise Unsupported(
                f"DeepSpeed's operator {builder.name} does not build ({cause})", f"install {fix}"
            ) from error
    return time.perf_counter() - started


def load_operator(builder: Any, say: Callable[[str], None] = _print) -> Any:
    """The operator's module. Whoever loads without this lock loses torch's to a run that starts beside it."""
    from filelock import FileLock

    if builder.name == "async_io":
        # It loads that one first, by itself: past this lock, and for ever behind a dead one of torch's.
        for first in _pin_memory():
            load_operator(first, say)
    folder = build_folder(builder.name)
    # Beside the folder it guards, so that all who share the folder share the lock.
    with FileLock(folder.with_suffix(".build.lock")):
        _clear_dead_build(folder)
        if not is_built(builder):
            minutes = "4 to 10" if builder.name == "async_io" else "1 to 3"
            say(f"{COMPILES} {builder.name}: once per installation, usually {minutes} minutes on two cores")
        return builder.load(verbose=False)


def is_built(builder: Any) -> bool:
    from deepspeed.git_version_info import installed_ops

    return installed_ops.get(builder.name, False) or (build_folder(builder.name) / f"{builder.name}.so").exists()


def use_own_build(cache: Path) -> None:
    """A folder of its own, and its own ninja: two installations with one folder rebuild it in turns."""
    folder = os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(own_build_folder(cache)))
    refuse_unwritable(Path(folder), f"TORCH_EXTENSIONS_DIR {folder}", "unset it, or name a folder that you may write")
    # ninja is looked for on PATH, where the environment may be missing. Another version of it would build all again.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def own_build_folder(cache: Path) -> Path:
    """One per installation, kind of processor, and whether GPUs are visible: the compiler uses whatever instructions it
    finds, DeepSpeed links with CUDA where it finds a GPU, and machines that share a cache need not have the same."""
    kind = [sys.prefix, platform.machine(), processor().get("flags"), *["CUDA"] * bool(visible_gpus())]
    return cache / "operators" / hashlib.sha256(repr(kind).encode()).hexdigest()[:12]


def name_for_the_linker(folder: Path, names: Sequence[str]) -> None:
    """Let a linker find by its plain name what this process has loaded, where nothing else has that name.

    DeepSpeed's asynchronous I/O is linked with the driver's library and CUDA's, which a box that only runs CUDA has as
    libcuda.so.1 and inside torch's packages. And where nvcc is a script in /usr/local/bin, torch takes /usr/local for
    the toolkit.
    """
    import psutil

    folder.mkdir(parents=True, exist_ok=True)
    for library in {Path(mapped.path) for mapped in psutil.Process().memory_maps()}:
        if (name := library.name.partition(".so")[0]) in names:
            link, new = folder / f"{name}.so", folder / f"{name}.{os.getpid()}"
            new.symlink_to(library)
            new.replace(link)
    if str(folder) not in (known := os.environ.get("LIBRARY_PATH", "").split(os.pathsep)):
        os.environ["LIBRARY_PATH"] = os.pathsep.join([*filter(None, known), str(folder)])


def _remember_the_processor(cache: Path) -> None:
    """Keep the answer: DeepSpeed asks py-cpuinfo twice per operator at every load, a second of CPU time each."""
    import cpuinfo

    ask = cpuinfo.get_cpu_info

    @functools.cache
    def get_cpu_info() -> dict[str, Any]:
        # Several machines may share a cache.
        kind = [platform.platform(), platform.machine(), *map(processor().get, ("model name", "flags"))]
        file = cache / "operators" / f"processor-{hashlib.sha256(repr(kind).encode()).hexdigest()[:12]}.json"
        try:
            return read_json(file)
        except RecordError:
            answer = ask()
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, answer)
            return answer

    cpuinfo.get_cpu_info = get_cpu_info


def _cause(error: Exception) -> str:
    """What the compiler or the linker said first; ninja's own last line never tells why."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next(filter(_TELLING.search, lines), lines[-1])[:300]


def builders(strategy: Strategy) -> list[Any]:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    names = []
    if accelerator.device_name() == "cpu":
        names.append("ShareMemCommBuilder")
    if strategy.offload_device("optimizer"):
        names.append("CPUAdamBuilder")
    found = [accelerator.create_op_builder(name) for name in names]
    return [*found, *_pin_memory(), accelerator.create_op_builder("AsyncIOBuilder")] if strategy.uses_nvme else found


def _pin_memory() -> list[Any]:
    """An operator that later releases of DeepSpeed have, and link their asynchronous I/O with."""
    from deepspeed.ops import op_builder

    return [op_builder.PinMemoryBuilder()] if hasattr(op_builder, "PinMemoryBuilder") else []


def lacks_toolkit(builder: Any, on_gpu: bool) -> bool:
    """DeepSpeed dies of a TypeError then. Its optimizers on the host are not linked with CUDA, and want none."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    is_to_be_built = isinstance(builder, CUDAOpBuilder) and not installed_ops.get(builder.name, False)
    return on_gpu and is_to_be_built and toolkit_version() is None


def toolkit_fix() -> str:
    import torch

    return f"install the toolkit of CUDA {torch.version.cuda}, nvcc included, and export CUDA_HOME=DIR"


def toolkit_version() -> tuple[int, ...] | None:
    """Of the CUDA toolkit that torch finds; None without one, or without an nvcc in it."""
    from deepspeed.ops.op_builder.builder import installed_cuda_version

    try:
        return tuple(installed_cuda_version())
    except Exception:  # DeepSpeed's own kinds, which differ between its releases
        return None


def build_folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def _clear_dead_build(folder: Path) -> None:
    """Delete torch's lock. The caller holds the lock beside the folder, so no living process holds torch's.

    Every load takes torch's lock for a moment, so any killed run may leave it. Compilers that a killed build started
    may still run: they are left to finish first.
    """
    lock = folder / "lock"
    while lock.exists() and _works_in(folder):
        time.sleep(0.2)
    lock.unlink(missing_ok=True)


def _works_in(folder: Path) -> bool:
    import psutil

    # ninja and the compilers it runs work inside the folder.
    return any(process.info["cwd"] == str(folder) for process in psutil.process_iter(["cwd"]))


def main(names: Sequence[str] = STRATEGY_NAMES) -> None:
    """Build every operator the strategies need, so that no run's start-up pays for it."""
    from study.host.folders import cache_directory

    for name in names:
        if read_strategy(name).uses_nvme and not libaio_is_there():
            continue
        try:
            seconds = build_operators(read_strategy(name), cache_directory())
        except Unsupported as refusal:
            print(f"{name} will not run here: {refusal.problem}. To fix it: {refusal.fix}.")
            if refusal.__cause__ is not None:
                print(refusal.__cause__, file=sys.stderr)
            continue
        if seconds > 10:
            print(f"{name}: operators built in {seconds:.0f} s")


def libaio_is_there() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


if __name__ == "__main__":
    try:
        main(sys.argv[1:] or STRATEGY_NAMES)
    except UserError as refusal:
        sys.exit(f"error: {refusal.problem}. To fix it: {refusal.fix}.")
