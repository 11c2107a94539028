"""How fast this box multiplies matrices: measured, where the data sheet gives a peak.

    python -m study.metrics.matmul

prints one JSON document. The matrices are random: a GPU runs at a higher clock on zeros, and nobody trains on zeros.
"""

from __future__ import annotations

import json
from typing import Any

import torch

SECONDS_PER_PRECISION = 0.5
# Large enough to keep a GPU busy; on a CPU, small enough to be quick.
_SIZE = {"cuda": 8192, "cpu": 1024}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int, seconds: float = SECONDS_PER_PRECISION) -> float:
    """Median rate of square products, with torch's own settings."""
    from torch.utils.benchmark import Timer

    left, right = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    # Synchronizes the device at both ends, and warms up while it looks for the number of repetitions.
    timer = Timer("torch.mm(left, right)", globals={"torch": torch, "left": left, "right": right})
    return float(2 * size**3 / timer.blocked_autorange(min_run_time=seconds).median / 1e12)


def measure(seconds: float = SECONDS_PER_PRECISION) -> dict[str, Any]:
    # NVIDIA's containers turn TF32 on by an environment variable, and a run here turns it off (study/engine/setup.py).
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    size = _SIZE[device.type]
    lacks_bf16 = on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False)
    # On a CPU its products are emulated, and take many times as long.
    names = [name for name in _DTYPES if not (name == "bf16" and lacks_bf16) and (on_gpu or name != "fp16")]
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "threads": None if on_gpu else torch.get_num_threads(),
        "torch": torch.__version__,
        "size": size,
        "tflops": {name: round(matmul_tflops(device, _DTYPES[name], size, seconds), 3) for name in names},
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
