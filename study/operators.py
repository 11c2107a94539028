"""DeepSpeed's own operators: which ones a strategy needs, built once and in good time.

torch guards a build with a lock file that a killed build leaves behind; every later run then waits for it for ever.
Here one process builds under a lock that dies with its holder, and clears such leftovers first.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from study.errors import Unsupported
from study.strategies import STRATEGY_NAMES, Strategy, read_strategy


def build_operators(strategy: Strategy, lock_directory: Path) -> float:
    """Build and load what the strategy needs; returns the seconds it took (near 0 when all was built)."""
    if strategy.deepspeed is None:
        return 0.0
    from filelock import FileLock

    started = time.perf_counter()
    use_own_build(lock_directory)
    lock_directory.mkdir(parents=True, exist_ok=True)
    for builder in builders(strategy):
        with FileLock(lock_directory / f"{builder.name}.build.lock"):
            _clear_dead_build(builder.name)
            try:
                builder.load(verbose=False)
            except Exception as error:  # the compiler's, the linker's or ninja's: all end the same way here
                raise Unsupported(
                    f"DeepSpeed's operator {builder.name} does not build ({_last_line(error)})",
                    "install g++, ninja and, for NVMe, libaio-dev",
                ) from error
    return time.perf_counter() - started


def use_own_build(cache: Path) -> None:
    """One folder per installation, and its own ninja: two that share one rebuild everything in turns."""
    installation = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache / "operators" / installation))
    # Looked for on PATH, and the environment need not be activated. Another version of ninja does not trust this one's
    # log, and starts over.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


def builders(strategy: Strategy) -> list[Any]:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    names = []
    if accelerator.device_name() == "cpu":
        names.append("ShareMemCommBuilder")
    if strategy.offload_device("optimizer"):
        names.append("CPUAdamBuilder")
    if strategy.uses_nvme:
        names.append("AsyncIOBuilder")
    return [accelerator.create_op_builder(name) for name in names]


def _clear_dead_build(name: str) -> None:
    import psutil
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(name, verbose=False))
    lock = folder / "lock"
    if not lock.exists():
        return
    for process in psutil.process_iter(["cmdline", "cwd"]):
        # ninja works inside the folder; a compiler that runs for somebody else is left to finish.
        if process.info["cwd"] == str(folder):
            return
    # Its maker may still be writing build.ninja, which takes it no more than seconds.
    if time.time() - lock.stat().st_mtime > 30:
        lock.unlink(missing_ok=True)


def main() -> None:
    """Build every operator the shipped strategies need, so that no run's start-up pays for it."""
    from study.preflight import cache_directory

    for name in STRATEGY_NAMES:
        if read_strategy(name).uses_nvme and not _libaio_is_there():
            continue
        try:
            seconds = build_operators(read_strategy(name), cache_directory())
        except Unsupported as refusal:
            print(f"{name} will not run here: {refusal.problem}. To mend it: {refusal.mend}.")
            continue
        if seconds > 10:
            print(f"{name}: operators built in {seconds:.0f} s")


def _libaio_is_there() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


if __name__ == "__main__":
    main()
