# mypy: ignore-errors
"""What a box answers that has one GPU, its driver and torch's build for CUDA, and no toolkit: a Python whose PYTHONPATH
begins with this folder hears it. Nothing can be computed on that GPU."""

import functools
import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar


@functools.cache
def gpus() -> int:
    # A driver reads it once, when it is first asked.
    return int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").startswith("0"))


def torch(module: ModuleType) -> None:
    module.version.cuda = "13.0"
    module.cuda.device_count = gpus
    module.cuda.is_available = lambda: gpus() > 0
    module.cuda.is_bf16_supported = lambda *args, **kwargs: True
    module.cuda.init = lambda: None
    module.cuda.get_device_name = lambda *args: "Fake GPU"
    module.cuda.get_device_properties = lambda *args: SimpleNamespace(total_memory=80 * 2**30, major=9, minor=0)
    module.cuda.nccl.version = lambda: (2, 29, 7)
    module.distributed.is_nccl_available = lambda: True


def pynvml(module: ModuleType) -> None:
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetCount = lambda: 1
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetMigMode = lambda handle: [0, 0]
    module.nvmlDeviceGetName = lambda handle: "Fake GPU"
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=80 * 2**30, free=80 * 2**30)
    module.nvmlDeviceGetComputeRunningProcesses = lambda handle: []
    module.nvmlSystemGetDriverVersion = lambda: "580.95.05"
    module.nvmlSystemGetCudaDriverVersion_v2 = lambda: 13000


class After(importlib.abc.MetaPathFinder):
    """Changes a module once it is loaded."""

    changes: ClassVar = {"torch": torch, "pynvml": pynvml}

    def find_spec(self, name, path, target=None):
        if (change := self.changes.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), change(module))
        return spec


sys.meta_path.insert(0, After())
