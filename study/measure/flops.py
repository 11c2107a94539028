"""The arithmetic of a model: counted from its shapes, not measured."""

from __future__ import annotations

import dataclasses

from study.host.releases import is_since
from study.spec.config import RunConfig


def model_flops_per_sample(config: RunConfig) -> int:
    """Matrix-multiply FLOPs, forward and backward, of one sample at the full sequence length.

    Counted on a meta-device copy, with eager attention, without gradient checkpointing and outside the engine: fused
    kernels, recomputation and sharding change what a device does and not what the model asks for, so every arm of a
    comparison gets the same figure, and MFU stays comparable. Causal masking saves nothing in this count.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from study.models.adapters import add_adapters
    from study.models.architecture import build_model
    from study.models.presets import FAMILY_OF_TASK

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
