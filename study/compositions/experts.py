"""The mixture of experts of a combination: DeepSpeed's layer on ranks, and plain experts in one process."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

EXPERTS = 2


class PlainExperts(nn.Module):
    """Each token goes to the expert with the largest gate, and is weighted by it."""

    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        # DeepSpeed's gate computes in fp32.
        logits = nn.functional.linear(tokens.float(), self.gate.weight.float())
        gates = torch.softmax(logits, dim=1)
        weight, chosen = gates.max(dim=1)
        outputs = torch.stack([expert(tokens) for expert in self.experts], dim=1)
        chosen_outputs = outputs[torch.arange(len(tokens)), chosen]
        return (chosen_outputs * weight[:, None].to(chosen_outputs.dtype)).reshape(hidden.shape)


class DeepSpeedExperts(nn.Module):
    """DeepSpeed's layer with one expert a rank, which starts with the weights of plain experts."""

    def __init__(self, plain: PlainExperts, rank: int):
        from deepspeed.moe.layer import MoE

        super().__init__()
        width = plain.gate.in_features
        self.mixture = MoE(
            width,
            nn.Linear(width, width),
            num_experts=EXPERTS,
            ep_size=EXPERTS,
            k=1,
            min_capacity=0,
            drop_tokens=False,
            use_rts=False,
        )
        layer: Any = self.mixture.deepspeed_moe
        expert = plain.experts[rank % EXPERTS]
        with torch.no_grad():
            layer.gate.wg.weight.copy_(plain.gate.weight)
            layer.experts.deepspeed_experts[0].weight.copy_(expert.weight)
            layer.experts.deepspeed_experts[0].bias.copy_(expert.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.mixture(hidden)[0]
        return output


def replace_experts(model: Any, rank: int) -> None:
    """Put DeepSpeed's layer in the place of the plain experts of a model."""
    layer = model.model.decoder.layers[-1]
    layer.fc1 = DeepSpeedExperts(layer.fc1, rank)


def plain_expert_name(name: str, rank: int) -> str:
    """Return the name that a weight of DeepSpeed's layer has in the plain model."""
    name = name.replace(".mixture.deepspeed_moe.gate.wg.", ".gate.")
    return re.sub(r"\.mixture\.deepspeed_moe\.experts\.deepspeed_experts\.0\.", f".experts.{rank % EXPERTS}.", name)
