"""A model's FLOPs counted from its shapes; and, as a program, what Accelerate's and DeepSpeed's estimators say.

    python -m study.metrics.flops < requests.json

One JSON document in, one out: for each request the bytes of a GPU by estimator, null where it has nothing to say.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from study.config.flags import RunConfig
from study.host.stacks import is_since


def model_flops_per_sample(config: RunConfig) -> int:
    """Matrix-multiply FLOPs, forward and backward, of one sample at the full sequence length.

    Counted on a meta-device copy, with eager attention, without gradient checkpointing and outside the engine: fused
    kernels, recomputation and sharding change what a device does and not what the model asks for, so every arm of a
    comparison gets the same figure, and MFU stays comparable. Causal masking saves nothing in this count.
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
        # A mask of this shape is used as it is; any other makes transformers look for padding in values meta lacks.
        # Releases before 4.56 cannot take such a mask for every model, and make their own without looking.
        is_taken = is_since("transformers", "4.56")
        mask = torch.zeros(1, 1, config.seq_length, config.seq_length) if is_taken else None
    labels = tokens if FAMILY_OF_TASK[config.task] == "causal-lm" else one_class
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
    return counter.get_total_flops()


def accelerate_bytes(parameters: int, precision: str) -> int:
    """`accelerate estimate-memory`'s "Training using Adam": the largest of its stages; it is asked of no ranks."""
    from accelerate.commands.estimate import estimate_training_usage

    kind = {"bf16": "bfloat16", "fp16": "float16"}.get(precision.removesuffix("-engine"), "float32")
    return int(max(estimate_training_usage(4 * parameters, kind).values()))


def deepspeed_bytes(
    parameters: int, largest_layer: int, gpus: int, nodes: int, stage: int | None, optimizer: bool, weights: bool
) -> int | None:
    """estimate_zero2_ and estimate_zero3_model_states_mem_needs; there is none for stages 0 and 1."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if stage == 2:
        return int(estimate_zero2_model_states_mem_needs(parameters, gpus, nodes, cpu_offload=optimizer)[1])
    if stage == 3:
        asked = {"cpu_offload": optimizer, "cpu_offload_params": weights}
        return int(estimate_zero3_model_states_mem_needs(parameters, largest_layer, gpus, nodes, **asked)[1])
    return None


def main() -> None:
    requests: list[dict[str, Any]] = json.load(sys.stdin)
    # DeepSpeed prints to stdout while it is imported.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        said = [
            {
                "accelerate": accelerate_bytes(request["parameters"], request.pop("precision")),
                "deepspeed": deepspeed_bytes(**request),
            }
            for request in requests
        ]
        json.dump(said, answers)


if __name__ == "__main__":
    main()
