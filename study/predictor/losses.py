"""Losses by name: bytes that a logit, or the loss without logits, takes until the backward pass.

Each row names the code that allocates them. `width` is the bytes per element of the model's logits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

LossKernel = Literal[
    "transformers",
    "same_type",
    "log_softmax",
    "batch_logps",
    "flash",
    "unsloth",
    "fast",
    "liger",
    "cut",
    "chunked_nll",
    "trl",
]
FP32 = 4


class LogitBytes(NamedTuple):
    """Bytes per logit: saved until the loss is computed, and temporary ones forward and backward."""

    saved: float
    forward: float
    backward: float


# With logits. transformers: ForCausalLMLoss (loss/loss_utils.py) upcasts them; log-softmax is in fp32, and backward its
# gradient and that of the logits.
# same_type: torch's cross_entropy of the logits as they are.
# log_softmax: selective_log_softmax of TRL's DPO and GRPO before 1.15 upcasts nothing. Its log-probabilities are saved;
# at the loss there are the logits, too, and those of the reference with the log-probabilities of one of its samples.
# batch_logps: get_batch_logps of LLaMA-Factory's DPO (train/trainer_utils.py) copies logits to fp32, and again without
# the last token of each sample. Its log-probabilities are saved; the logits stay during the reference's forward pass,
# which has three of these tensors.
# flash: flash-attention's CrossEntropyLoss(inplace_backward=True). unsloth: Fast_CrossEntropyLoss
# (kernels/cross_entropy_loss.py) saves the logits, too, and its backward pass writes the gradient over them.
# fast: that kernel in FastForCausalLMLoss of fms-acceleration's foak (the same file there): logits.float(), and a
# contiguous copy of their shift; backward the gradient of the shift is as large as the copy.
def logit_bytes(kernel: LossKernel, width: int) -> LogitBytes | None:
    """Return the bytes per logit; None if the loss has no logits of all tokens."""
    rows = {
        "transformers": LogitBytes(FP32, width + (FP32 if width == 2 else 0), 2 * FP32),
        "same_type": LogitBytes(width, width, 2 * width),
        "log_softmax": LogitBytes(width, 2.5 * width, width),
        "batch_logps": LogitBytes(FP32, 4 * FP32, 2 * FP32),
        "flash": LogitBytes(width, width, width),
        "unsloth": LogitBytes(width, width, width),
        "fast": LogitBytes(FP32, FP32, FP32),
    }
    return rows.get(kernel)


class Head(NamedTuple):
    """Sizes of an output layer: tokens, elements, and bytes per element of its input and of its matrix."""

    tokens: int
    hidden: int
    vocabulary: int
    width: int
    matrix_width: int
    is_trained: bool

    @property
    def stream(self) -> int:
        """Bytes of the input."""
        return self.tokens * self.hidden * self.width

    def gradient(self, width: int) -> int:
        """Bytes of the matrix's gradient; 0 of a frozen one."""
        return self.vocabulary * self.hidden * width * self.is_trained


# Tokens and words of a tile of TRL's kernel, and the tokens of a chunk of its chunked_nll.
_TILE_TOKENS, _TILE_WORDS, _CHUNK_TOKENS = 4096, 32768, 256
# Bytes per logit of a chunk of chunked_nll: logits in fp32, log-probabilities, and two temporaries of their entropy.
_CHUNK_WIDTH = 4 * FP32


# Without logits. liger: fused_linear_cross_entropy.py computes the gradients of its input and of a trained matrix in
# the forward pass; temporaries are a chunk's logits, about as large as the input, and its gradient of the matrix.
# cut: cut cross entropy (https://arxiv.org/abs/2411.09009) has logits in the kernel's blocks alone, and saves a
# number per token; backward the gradients of its input and of a trained matrix.
# trl: ChunkedLogProbFunction of TRL since 1.15 (trl/kernels/chunked_logprob.py), which add_fused_lm_head of its
# trainers calls: a copy of the input's tokens with labels, and four numbers of each; a tile of logits; backward the
# gradients in fp32, and copies of them in the types of input and matrix.
# chunked_nll: _chunked_cross_entropy_loss of TRL's SFT from 1.4 to 1.14, a checkpoint of each chunk: the input in
# another order; a chunk of logits; backward the gradients of a chunk, as large as those of all, and their sum.
def bytes_without_logits(kernel: LossKernel, head: Head) -> LogitBytes:
    """Return bytes by the sizes of the output layer."""
    stream, matrix = head.stream, head.gradient(head.width)
    if kernel == "cut":
        return LogitBytes(FP32 * head.tokens, 0, stream + matrix)
    if kernel == "trl":
        tile = min(head.tokens, _TILE_TOKENS) * _TILE_WORDS * head.width
        in_fp32 = head.tokens * head.hidden * FP32 + head.gradient(FP32)
        copies = (stream if head.width != FP32 else 0) + head.gradient(head.matrix_width) * (head.matrix_width != FP32)
        return LogitBytes(stream + 4 * FP32 * head.tokens, tile, tile + in_fp32 + copies)
    if kernel == "chunked_nll":
        chunk = min(head.tokens, _CHUNK_TOKENS) * head.vocabulary * _CHUNK_WIDTH
        return LogitBytes(stream, chunk, chunk + 2 * stream + matrix + head.gradient(head.matrix_width))
    return LogitBytes(matrix + stream, matrix + 2 * stream, 0)


# Fused with the output layer: the model returns no logits.
WITHOUT_LOGITS: tuple[LossKernel, ...] = ("liger", "cut", "chunked_nll", "trl")
# Their backward pass multiplies by the matrix of the output layer once more, for the logits.
RECOMPUTED: tuple[LossKernel, ...] = ("chunked_nll", "trl")
# torch's cross_entropy, of which each rank of a tensor-parallel group can have a part of the vocabulary.
DIVIDED_LOSSES: tuple[LossKernel, ...] = ("transformers", "same_type")
# Kernels whose backward pass writes over the logits: fewer passes over them.
IN_PLACE = ("flash", "unsloth", "fast", "cut")
