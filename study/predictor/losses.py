"""Losses by name: bytes that a logit, or the loss without logits, takes until the backward pass.

Each row names the code that allocates them. `width` is the bytes per element of the model's logits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

LossKernel = Literal["transformers", "same_type", "flash", "unsloth", "fast", "liger", "cut"]
FP32 = 4


class LogitBytes(NamedTuple):
    """Bytes per logit: saved until the loss is computed, and temporary ones forward and backward."""

    saved: float
    forward: float
    backward: float


# With logits. transformers: ForCausalLMLoss (loss/loss_utils.py) upcasts them; log-softmax is in fp32, and backward its
# gradient and that of the logits.
# same_type: torch's cross_entropy of the logits as they are.
# flash: flash-attention's CrossEntropyLoss(inplace_backward=True). unsloth: Fast_CrossEntropyLoss
# (kernels/cross_entropy_loss.py) saves the logits, too, and its backward pass writes the gradient over them.
# fast: that kernel in FastForCausalLMLoss of fms-acceleration's foak (the same file there): logits.float(), and a
# contiguous copy of their shift; backward the gradient of the shift is as large as the copy.
def logit_bytes(kernel: LossKernel, width: int) -> LogitBytes | None:
    """Return the bytes per logit; None if the loss has no logits of all tokens."""
    rows = {
        "transformers": LogitBytes(FP32, width + (FP32 if width == 2 else 0), 2 * FP32),
        "same_type": LogitBytes(width, width, 2 * width),
        "flash": LogitBytes(width, width, width),
        "unsloth": LogitBytes(width, width, width),
        "fast": LogitBytes(FP32, FP32, FP32),
    }
    return rows.get(kernel)


# Without logits. liger: fused_linear_cross_entropy.py computes the gradients of its input and of a trained matrix in
# the forward pass; temporaries are a chunk's logits, about as large as the input, and its gradient of the matrix.
# cut: cut cross entropy (https://arxiv.org/abs/2411.09009) has logits in the kernel's blocks alone, and saves a
# number per token; backward the gradients of its input and of a trained matrix.
def bytes_without_logits(kernel: LossKernel, tokens: int, stream: int, matrix: int) -> LogitBytes:
    """Return bytes by the size of the output layer's input and of its matrix's gradient, 0 of a frozen one."""
    if kernel == "cut":
        return LogitBytes(FP32 * tokens, 0, stream + matrix)
    return LogitBytes(matrix + stream, matrix + 2 * stream, 0)


# Fused with the output layer: the model returns no logits.
WITHOUT_LOGITS: tuple[LossKernel, ...] = ("liger", "cut")
# torch's cross_entropy, of which each rank of a tensor-parallel group can have a part of the vocabulary.
DIVIDED_LOSSES: tuple[LossKernel, ...] = ("transformers", "same_type")
# Kernels whose backward pass writes over the logits: fewer passes over them.
IN_PLACE = ("flash", "unsloth", "fast", "cut")
