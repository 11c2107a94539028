"""Build the DeepSpeed operators that a strategy needs, once and before a run uses them.

torch guards a build with a lock file, which stays after a killed build, so that every later run waits forever. Here one
process builds under a lock that is released with the process, and deletes such a file first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from study.config import errors, strategies
from study.host.folders import COMPILES, cache_directory, check_writable
from study.host.machine import cpu_info, operator_build_folder
from study.records import directory, schema

# Messages of a compiler or a linker, and of a shell that does not find them.
_CAUSE = re.compile(r"\berror: |cannot find|undefined reference|command not found")
# GPUs to build for: torch and DeepSpeed read it. torch also accepts 9.0a, 10.0f and names such as Hopper.
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
_PARSABLE = re.compile(r"\d+\.\d+(\+PTX)?")
_SHORT_HEADERS = {
    "torch/extension.h": """#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>
#if __INCLUDE_LEVEL__ == 1  // by a source, of which that of shared memory registers its operators
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>
#endif
namespace torch {
using namespace at;
constexpr auto kFloat16 = at::kHalf, kFloat32 = at::kFloat;
}
""",
    "ATen/ATen.h": "#include <torch/extension.h>\n",
    # Headers of ATen/ops that none of its functions needs: a quarter of the compilation.
    **dict.fromkeys((f"ATen/{name}.h" for name in ("Context", "DeviceGuard", "TensorUtils", "TracerMode")), ""),
}
_print = functools.partial(print, flush=True)
_LAST_FIRST = "--last_first"


def build_operators(
    strategy: strategies.Strategy, cache: Path, say: Callable[[str], None] = _print, last_first: bool = False
) -> float:
    """Build and load a strategy's operators; return the seconds (near 0 if they were built)."""
    if strategy.deepspeed is None:
        return 0.0
    import torch

    started = time.perf_counter()
    configure_build_environment(cache)
    _cache_cpu_info(cache)
    if strategy.uses_nvme and torch.cuda.is_available():
        # torch may have found the GPU by NVML, without loading CUDA.
        torch.cuda.init()
        symlink_loaded_libraries(cache / "operators" / "loaded", ("libcuda", "libcudart"))
    needed = builders(strategy)
    # Checked before any of them is compiled, which takes minutes.
    for builder in needed:
        if lacks_toolkit(builder, torch.cuda.is_available()):
            problem = f"DeepSpeed links its operator {builder.name} with CUDA: there is no toolkit"
            raise errors.Unsupported(problem, toolkit_fix())
    for builder in reversed(needed) if last_first else needed:
        try:
            load_operator(builder, say)
        except Exception as error:  # of the compiler, the linker or ninja
            # The first message of the compiler or the linker; ninja's last line never has the cause.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            cause = next(filter(_CAUSE.search, lines), lines[-1])[:300]
            problem, fix = f"DeepSpeed's operator {builder.name} does not build ({cause})", "install python3-dev"
            if (unparsable := _unparsable_architectures(builder)) is not None:
                problem = (
                    f"DeepSpeed cannot parse {ARCHITECTURES}={unparsable} for its operator {builder.name} ({cause})"
                )
                fix = f"export {ARCHITECTURES}=9.0 for Hopper, 8.0 for A100, and so on; or unset it"
            elif "Python.h" not in cause:
                fix = "install g++, ninja and, for NVMe, libaio-dev"
            raise errors.Unsupported(problem, fix) from error
    return time.perf_counter() - started


def load_operator(builder: Any, say: Callable[[str], None] = _print) -> Any:
    """Return the operator's module, built under a lock of this study, so that parallel runs do not use torch's."""
    from filelock import FileLock

    if builder.name == "async_io":
        # DeepSpeed loads this operator first, without our lock, and would wait forever for a stale lock of torch.
        for first in _pin_memory():
            load_operator(first, say)
    folder = build_folder(builder.name)
    # Next to the folder, so that all users of the folder share the lock.
    with FileLock(folder.with_suffix(".build.lock")), _parsable_architectures(builder, say):
        _clear_dead_build(folder)
        if not is_built(builder):
            minutes = "1 to 5" if builder.name == "async_io" else "1 to 2"
            say(f"{COMPILES} {builder.name}: once per installation, usually {minutes} minutes on two cores")
            try:
                with _short_torch_header(folder):
                    return builder.load(verbose=False)
            except Exception:
                from torch.utils.cpp_extension import JIT_EXTENSION_VERSIONER

                # Otherwise torch does not compile it a second time in this process.
                JIT_EXTENSION_VERSIONER.entries.pop(builder.name, None)
        return builder.load(verbose=False)


@contextlib.contextmanager
def _parsable_architectures(builder: Any, print_line: Callable[[str], None]) -> Iterator[None]:
    """Load an operator with a TORCH_CUDA_ARCH_LIST without letters: DeepSpeed cannot parse 9.0a, which images set.

    A letter adds instructions that none of the operators uses. Loaded operators stay in a cache of DeepSpeed.
    """
    exported = os.environ.get(ARCHITECTURES, "")
    parsable = without_letters(exported)
    if parsable == exported or not _reads_architectures(builder):
        yield
        return
    if not is_built(builder):
        text = f"{ARCHITECTURES}={exported} has letters that DeepSpeed cannot parse"
        print_line(f"{text}: {builder.name} is built for {parsable}")
    os.environ[ARCHITECTURES] = parsable
    try:
        yield
    finally:
        os.environ[ARCHITECTURES] = exported


def without_letters(architectures: str) -> str:
    """Return a TORCH_CUDA_ARCH_LIST without the letters of 9.0a and 10.0f+PTX; names such as Hopper stay."""
    numeric = re.sub(r"(\d+\.\d+)[a-z]+", r"\1", architectures)
    if numeric == architectures:
        return architectures
    # 9.0;9.0a is one architecture now.
    return ";".join(dict.fromkeys(re.split(r"[;\s]+", numeric.strip())))


def _unparsable_architectures(builder: Any) -> str | None:
    """Return the TORCH_CUDA_ARCH_LIST if DeepSpeed parses it for this operator and cannot."""
    exported = os.environ.get(ARCHITECTURES, "").strip()
    parts = filter(None, re.split(r"[;\s]+", without_letters(exported)))
    return exported if _reads_architectures(builder) and not all(map(_PARSABLE.fullmatch, parts)) else None


def _reads_architectures(builder: Any) -> bool:
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    return isinstance(builder, CUDAOpBuilder)


@contextlib.contextmanager
def _short_torch_header(folder: Path) -> Iterator[None]:
    """Compile with headers that have only the part of torch's that the operators use: half of the compilation.

    An operator that uses more fails, and is compiled with torch's headers. DeepSpeed's flags do not change.
    """
    from filelock import FileLock

    headers = folder.parent / "headers"
    # The compiler of another operator may read them.
    with FileLock(headers.with_suffix(".lock")):
        for name, text in _SHORT_HEADERS.items():
            (headers / name).parent.mkdir(parents=True, exist_ok=True)
            # A new header would make every operator that was compiled with it out of date.
            if not (headers / name).exists() or (headers / name).read_text() != text:
                (headers / name).write_text(text)
    before = os.environ.get("CPATH")
    os.environ["CPATH"] = os.pathsep.join(filter(None, [str(headers), before]))
    try:
        yield
    finally:
        os.environ.pop("CPATH")
        os.environ |= {"CPATH": before} if before else {}


def is_built(builder: Any) -> bool:
    """Whether an operator is installed with DeepSpeed or already built."""
    from deepspeed.git_version_info import installed_ops

    return installed_ops.get(builder.name, False) or (build_folder(builder.name) / f"{builder.name}.so").exists()


def configure_build_environment(cache: Path) -> None:
    """Set this installation's build folder and ninja: two installations with one folder would rebuild it in turns."""
    folder = os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(operator_build_folder(cache)))
    check_writable(Path(folder), f"TORCH_EXTENSIONS_DIR {folder}", "unset it, or name a folder that you may write")
    # The virtual environment may not be on PATH. Another version of ninja would rebuild everything.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def symlink_loaded_libraries(folder: Path, names: Sequence[str]) -> None:
    """Link loaded libraries by their plain names into `folder`, and append it to the linker's search path.

    DeepSpeed links its asynchronous I/O with the driver's library and CUDA's. A machine without the toolkit has them
    as libcuda.so.1 and inside torch's packages. If nvcc is a script in /usr/local/bin, torch uses /usr/local as the
    toolkit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for library in {Path(mapped.path) for mapped in psutil.Process().memory_maps()}:
        if (name := library.name.partition(".so")[0]) in names:
            link, new = folder / f"{name}.so", folder / f"{name}.{os.getpid()}"
            new.symlink_to(library)
            new.replace(link)
    if str(folder) not in (search_path := os.environ.get("LIBRARY_PATH", "").split(os.pathsep)):
        os.environ["LIBRARY_PATH"] = os.pathsep.join([*filter(None, search_path), str(folder)])


def _cache_cpu_info(cache: Path) -> None:
    """Cache py-cpuinfo on disk: DeepSpeed calls it twice per operator at every load, a second of CPU time each."""
    import cpuinfo

    original = cpuinfo.get_cpu_info

    @functools.cache
    def get_cpu_info() -> dict[str, Any]:
        # Several machines may share a cache.
        kind = [platform.platform(), platform.machine(), *map(cpu_info().get, ("model name", "flags"))]
        file = cache / "operators" / f"cpu-{hashlib.sha256(repr(kind).encode()).hexdigest()[:12]}.json"
        try:
            return directory.read_json(file)
        except schema.RecordError:
            info = original()
            file.parent.mkdir(parents=True, exist_ok=True)
            directory.write_json(file, info)
            return info

    cpuinfo.get_cpu_info = get_cpu_info


def builders(strategy: strategies.Strategy) -> list[Any]:
    """Return DeepSpeed's builders of the operators that a strategy needs."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    names = ["ShareMemCommBuilder"] if accelerator.device_name() == "cpu" else []
    if strategy.offload_device("optimizer"):
        names.append("CPUAdamBuilder")
    result = [accelerator.create_op_builder(name) for name in names]
    return [*result, *_pin_memory(), accelerator.create_op_builder("AsyncIOBuilder")] if strategy.uses_nvme else result


def _pin_memory() -> list[Any]:
    """Return the builder of an operator with which later releases of DeepSpeed link their asynchronous I/O."""
    from deepspeed.ops import op_builder

    return [op_builder.PinMemoryBuilder()] if hasattr(op_builder, "PinMemoryBuilder") else []


def lacks_toolkit(builder: Any, on_gpu: bool) -> bool:
    """Whether a build needs the missing CUDA toolkit, a TypeError in DeepSpeed. Its CPU optimizers do not need it."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    is_to_be_built = isinstance(builder, CUDAOpBuilder) and not installed_ops.get(builder.name, False)
    return on_gpu and is_to_be_built and toolkit_version() is None


def toolkit_fix() -> str:
    """Return the fix for a missing CUDA toolkit."""
    import torch

    return f"install the toolkit of CUDA {torch.version.cuda}, nvcc included, and export CUDA_HOME=DIR"


def toolkit_version() -> tuple[int, ...] | None:
    """Return the version of the CUDA toolkit that torch finds; None without it or its nvcc."""
    from deepspeed.ops.op_builder.builder import installed_cuda_version

    try:
        return tuple(installed_cuda_version())
    except Exception:  # exceptions of DeepSpeed, which differ between releases
        return None


def build_folder(name: str) -> Path:
    """Return the folder in which torch builds an operator."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def _clear_dead_build(folder: Path) -> None:
    """Delete a stale lock of torch, which any killed run can leave. The caller has the lock next to the folder."""
    lock = folder / "lock"
    # ninja and its compilers work inside the folder. Those of a killed build may still run.
    while lock.exists() and any(process.info["cwd"] == str(folder) for process in psutil.process_iter(["cwd"])):
        time.sleep(0.2)
    lock.unlink(missing_ok=True)


def main(names: Sequence[str] = strategies.STRATEGY_NAMES, last_first: bool = False) -> None:
    """Build all operators of the strategies, so that no run's start-up includes it.

    Most have one source that takes most of the time of a compiler, on one core. A second process that begins with the
    last operator uses another core: each is built by the process that comes to it first.
    """
    for name in names:
        if strategies.read_strategy(name).uses_nvme and not is_libaio_installed():
            continue
        try:
            seconds = build_operators(strategies.read_strategy(name), cache_directory(), last_first=last_first)
        except errors.Unsupported as refusal:
            print(f"{name} will not run here: {refusal.problem}. To fix it: {refusal.fix}.")
            if refusal.__cause__ is not None:
                print(refusal.__cause__, file=sys.stderr)
            continue
        if seconds > 10:
            print(f"{name}: operators built in {seconds:.0f} s")


def is_libaio_installed() -> bool:
    """Whether a program that uses libaio can be linked."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


if __name__ == "__main__":
    words = sys.argv[1:]
    chosen = [word for word in words if word != _LAST_FIRST]
    try:
        main(chosen or strategies.STRATEGY_NAMES, last_first=_LAST_FIRST in words)
    except errors.UserError as refusal:
        sys.exit(f"error: {refusal.problem}. To fix it: {refusal.fix}.")
