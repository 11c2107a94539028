"""What the ZeRO paper says (Rajbhandari et al., SC20, sections 3 and 7 and Table 1), as its formulas."""

from __future__ import annotations

# Bytes of a parameter, the optimizer's being fp32 weights, momentum and variance (the paper's K); and the first stage
# that splits them.
KINDS = {"params": (2, 3), "grads": (2, 2), "optimizer": (12, 1)}


def split_by(kind: str, stage: int, ranks: int) -> int:
    return ranks if stage >= KINDS[kind][1] else 1


def papers_state_bytes(parameters: float, stage: int, ranks: int) -> float:
    """Model state per device under mixed-precision Adam; stage 0 is plain data parallelism."""
    return parameters * sum(size / split_by(kind, stage, ranks) for kind, (size, _) in KINDS.items())


def papers_traffic(stage: int, ranks: int) -> float:
    """What one rank sends in a step, as multiples of the model's weights, its gradients being of the same type.

    An all-reduce is a reduce-scatter and an all-gather. Stages 1 and 2 gather the updated weights instead of the
    gradients; stage 3 gathers them twice, for the forward and the backward pass.
    """
    return (3 if stage == 3 else 2) * (ranks - 1) / ranks
