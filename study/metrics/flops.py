"""Count a model's FLOPs, and measure the rate of matrix products on this machine.

python -m study.metrics.flops rates    print the rates as one JSON document
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from study.config.flags import RunConfig
from study.host.stacks import is_at_least

if TYPE_CHECKING:
    import torch

TIME_PER_PRECISION_S = 0.5
# Large enough to keep a GPU busy; on a CPU, small enough to be quick.
_SIZE = {"cuda": 8192, "cpu": 1024}


def model_flops_per_sample(config: RunConfig) -> int:
    """Count matrix-multiply FLOPs, forward and backward, of one sample at the full sequence length.

    The count uses a copy on the meta device with eager attention, without gradient checkpointing and without an engine,
    since fused kernels, recomputation and sharding do not change the model's FLOPs. Therefore every strategy has the
    same figure, and MFU is comparable. Causal masking saves nothing in this count.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from study.workloads.architecture import add_adapters, build_model
    from study.workloads.presets import FAMILY_OF_TASK

    with torch.device("meta"):
        model = build_model(dataclasses.replace(config, attn_implementation="eager")).train()
        if hasattr(model, "set_experts_implementation"):
            # torch's grouped products of experts have no meta kernel for fp32; batched ones have the same FLOPs.
            model.set_experts_implementation("batched_mm")
        add_adapters(model, config)
        tokens = torch.zeros(1, config.seq_length, dtype=torch.long)
        one_class = torch.zeros(1, dtype=torch.long)
        # transformers uses a mask of this shape unchanged; in any other it searches for padding, which needs values.
        # Releases before 4.56 do not support such a mask in every model, and create one without searching.
        # OPT and BLOOM count positions in a mask of tokens, and create one without values.
        is_supported = is_at_least("transformers", "4.56") and model.config.model_type not in ("opt", "bloom")
        mask = torch.zeros(1, 1, config.seq_length, config.seq_length) if is_supported else None
    labels = tokens if FAMILY_OF_TASK[config.task] == "causal-lm" else one_class
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
    return counter.get_total_flops()


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int, seconds: float = TIME_PER_PRECISION_S) -> float:
    """Return the median rate of square matrix products, with torch's current settings."""
    import torch
    from torch.utils.benchmark import Timer

    # Random matrices: a GPU runs at a higher clock on zeros.
    a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    # It synchronizes the device at both ends, and warms up while it determines the number of repetitions.
    timer = Timer("torch.mm(a, b)", globals={"torch": torch, "a": a, "b": b})
    return float(2 * size**3 / timer.blocked_autorange(min_run_time=seconds).median / 1e12)


def measure_matmul_rates(seconds: float = TIME_PER_PRECISION_S) -> dict[str, Any]:
    """Return the rate of matrix products in each precision that the device supports, with the device and the size."""
    import torch

    # NVIDIA's containers enable TF32 by an environment variable; runs disable it (study/engine/setup.py).
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    dtypes = {"fp32": torch.float32}
    if not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False):
        dtypes["bf16"] = torch.bfloat16
    if on_gpu:  # a CPU emulates fp16 products, which takes many times as long
        dtypes["fp16"] = torch.float16
    size = _SIZE[device.type]
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "threads": None if on_gpu else torch.get_num_threads(),
        "torch": torch.__version__,
        "size": size,
        "tflops": {
            # bf16 on an old CPU is slower than 0.001 TFLOP/s.
            name: float(f"{matmul_tflops(device, dtype, size, seconds):.3g}")
            for name, dtype in dtypes.items()
        },
    }


if __name__ == "__main__":
    json.dump(measure_matmul_rates(), sys.stdout)
