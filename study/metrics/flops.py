"""Count a model's FLOPs, measure the rate of matrix products on this machine, and run other memory estimators.

    python -m study.metrics.flops rates
    python -m study.metrics.flops estimates < requests.json

Both print one JSON document. `estimates` has the bytes per GPU of Accelerate's and DeepSpeed's estimators for each
request, null if there is no estimator.
"""

from __future__ import annotations

import dataclasses
import json
import os
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
        add_adapters(model, config)
        tokens = torch.zeros(1, config.seq_length, dtype=torch.long)
        one_class = torch.zeros(1, dtype=torch.long)
        # transformers uses a mask of this shape unchanged; in any other it searches for padding, which needs values.
        # Releases before 4.56 do not support such a mask in every model, and create one without searching.
        is_supported = is_at_least("transformers", "4.56")
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
        "tflops": {name: round(matmul_tflops(device, dtype, size, seconds), 3) for name, dtype in dtypes.items()},
    }


def accelerate_bytes(parameters: int, precision: str) -> int:
    """Return `accelerate estimate-memory`'s "Training using Adam", for one rank: the largest of its phases."""
    from accelerate.commands.estimate import estimate_training_usage

    kind = {"bf16": "bfloat16", "fp16": "float16"}.get(precision.removesuffix("-engine"), "float32")
    return int(max(estimate_training_usage(4 * parameters, kind).values()))


def deepspeed_bytes(
    parameters: int, largest_layer: int, gpus: int, nodes: int, stage: int | None, optimizer: bool, weights: bool
) -> int | None:
    """Return DeepSpeed's estimate_zero2_ or estimate_zero3_model_states_mem_needs; None for stages 0 and 1."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if stage == 2:
        return int(estimate_zero2_model_states_mem_needs(parameters, gpus, nodes, cpu_offload=optimizer)[1])
    if stage == 3:
        offloads = {"cpu_offload": optimizer, "cpu_offload_params": weights}
        return int(estimate_zero3_model_states_mem_needs(parameters, largest_layer, gpus, nodes, **offloads)[1])
    return None


def main() -> None:
    # DeepSpeed prints to stdout when it is imported.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        if sys.argv[1] == "rates":
            json.dump(measure_matmul_rates(), answers)
            return
        estimates = [
            {
                "accelerate": accelerate_bytes(request["parameters"], request.pop("precision")),
                "deepspeed": deepspeed_bytes(**request),
            }
            for request in json.load(sys.stdin)
        ]
        json.dump(estimates, answers)


if __name__ == "__main__":
    main()
