"""What the ZeRO paper says (Rajbhandari et al., SC20, sections 3 and 7 and Table 1), as its formulas."""

from __future__ import annotations

PARAMETER_BYTES = 2
GRADIENT_BYTES = 2
# fp32 weights, momentum and variance: the paper's K.
OPTIMIZER_BYTES = 12


def papers_state_bytes(parameters: float, stage: int, ranks: int) -> float:
    """Model state per device under mixed-precision Adam; stage 0 is plain data parallelism."""
    held = (
        PARAMETER_BYTES / (ranks if stage >= 3 else 1),
        GRADIENT_BYTES / (ranks if stage >= 2 else 1),
        OPTIMIZER_BYTES / (ranks if stage >= 1 else 1),
    )
    return parameters * sum(held)


def papers_traffic(stage: int, ranks: int) -> float:
    """What one rank sends in a step, as multiples of the model's weights, its gradients being of the same type.

    An all-reduce is a reduce-scatter and an all-gather. Stages 1 and 2 gather the updated weights instead of the
    gradients; stage 3 gathers them twice, for the forward and the backward pass.
    """
    return (3 if stage == 3 else 2) * (ranks - 1) / ranks
