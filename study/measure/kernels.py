"""What a kernel or an operator is for: one of the few kinds of work in a training step.

The operator that launched a kernel says it best. Compiled code launches kernels without one, and then the kernel's
own name has to do. Whatever neither tells is `other`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from itertools import chain

# What lies inside one of these belongs to it, whatever it does there.
_REGIONS = (
    ("collectives", re.compile(r"^(c10d|_c10d_functional(_autograd)?)::|^record_param_comms$|^nccl|^gloo:")),
    ("optimizer", re.compile(r"^Optimizer\.step#|^aten::_fused_(adam|adamw|adagrad|sgd)_?$")),
    ("attention", re.compile(r"scaled_dot_product|ScaledDotProduct|(flash|efficient|flex)_attention")),
)
_OPERATOR = re.compile(r"^aten::_?(?:foreach_)?(\w+?)_?$")
_COPY_INSIDE_FSDP = re.compile(r"^fsdp::(chunk_cat|split_with_sizes_copy|all_gather_copy_in|copy_)")
_BACKWARD = re.compile(r"_backward(_data|_input|_weight)?$")
_OPERATORS = {
    "matmul": {
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "matmul", "addmm_activation",
        "scaled_mm", "mkldnn_linear", "convolution", "conv1d", "conv2d", "cudnn_convolution", "mkldnn_convolution",
    },
    "copies": {
        "copy", "to", "to_copy", "clone", "contiguous", "cat", "stack", "pin_memory", "zero", "zeros", "zeros_like",
        "fill", "ones", "ones_like", "full", "full_like", "new_zeros", "new_ones", "new_full", "repeat",
        "split_with_sizes_copy", "chunk_cat", "constant_pad_nd", "arange",
    },
    "elementwise": {
        "add", "sub", "rsub", "mul", "div", "neg", "abs", "sign", "reciprocal", "pow", "sqrt", "rsqrt", "exp", "log",
        "log1p", "expm1", "sin", "cos", "tanh", "erf", "sigmoid", "relu", "gelu", "silu", "elu", "threshold",
        "softplus", "lerp", "addcmul", "addcdiv", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where",
        "masked_fill", "eq", "ne", "lt", "gt", "le", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and",
        "bitwise_or", "bitwise_not", "isnan", "isinf", "isfinite", "floor_divide", "remainder", "dropout",
        "native_dropout", "bernoulli", "tril", "triu", "softmax", "log_softmax", "layer_norm", "native_layer_norm",
        "rms_norm", "fused_rms_norm", "batch_norm", "native_batch_norm", "group_norm", "native_group_norm", "sum",
        "mean", "var", "var_mean", "std", "prod", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin",
        "norm", "linalg_vector_norm", "logsumexp", "cumsum", "nll_loss", "nll_loss_forward", "nll_loss_nd",
        "cross_entropy_loss", "mse_loss", "sgn", "masked_scale", "amp_update_scale",
        "amp_foreach_non_finite_check_and_unscale",
    },
}  # fmt: skip
_KIND_OF_OPERATOR = {name: kind for kind, names in _OPERATORS.items() for name in names}

# Inductor names a kernel after the operators it has fused; one that only moves numbers is a copy.
_MOVES = (
    "unsafe_view|_?to_copy|clone|copy|cat|stack|view|transpose|permute|expand|unsqueeze|squeeze|slice_scatter|slice|"
    "select|constant_pad_nd|zeros_like|zeros|ones|full_like|full|new_zeros|empty_like|empty|t"
)
# In this order: the first that is found in a kernel's name says what it is for.
_KERNELS = (
    ("copies", re.compile(rf"^triton_(poi|for)_fused(_+({_MOVES}))+(_\d+)*$")),
    ("attention", re.compile(r"flash|fmha|sdpa|flex_attention|efficient_attention|AttentionKernel", re.I)),
    ("matmul", re.compile(r"^triton_(mm|bmm|tem_fused_\w*(mm|bmm|addmm|baddbmm))")),
    ("elementwise", re.compile(r"^triton_(poi|per|red|for|spl)(_|\d)")),
    ("optimizer", re.compile(r"Adam\w*Functor|FusedSgdMathFunctor")),
    ("copies", re.compile(r"^(Memcpy|Memset)|copy_kernel|CatArrayBatchedCopy|FillFunctor|chunk_cat|split_with_sizes")),
    ("matmul", re.compile(
        r"gemm|^nvjet|cublas|cutlass\w*::(Kernel2?|device_kernel)\b|splitK|gemv|xmma|\bdot_kernel|wgrad|dgrad", re.I
    )),
    ("elementwise", re.compile(
        r"elementwise_kernel|reduce_kernel|multi_tensor_apply_kernel|layer_norm|LayerNorm|GammaBeta|RMSNorm|rms_norm|"
        r"[sS]oft_?[mM]ax|dropout|nll_loss|RowwiseMoments|ComputeGradInput|ComputeInternalGradients|triu_tril"
    )),
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def category_of_operator(name: str) -> str | None:
    """What an operator of torch is for by itself; None where its name does not say."""
    if _COPY_INSIDE_FSDP.match(name):
        return "copies"
    if (found := _OPERATOR.match(name)) is None:
        return None
    plain = found[1].removesuffix("_")
    return _KIND_OF_OPERATOR.get(plain) or _KIND_OF_OPERATOR.get(_BACKWARD.sub("", plain))


@functools.lru_cache(maxsize=4096)
def category_of_kernel(name: str) -> str | None:
    """What a kernel is for by its own name alone; None where that does not say."""
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), None)


def category(name: str, callers: Sequence[str] = ()) -> str:
    """What a kernel or operator is for; `callers` are the operators around it, the innermost first."""
    in_regions = map(_region, (name, *reversed(callers)))
    as_operators = map(category_of_operator, (name, *callers))
    return next(filter(None, chain(in_regions, as_operators)), None) or category_of_kernel(name) or "other"


@functools.lru_cache(maxsize=4096)
def _region(name: str) -> str | None:
    return next((kind for kind, pattern in _REGIONS if pattern.search(name)), None)
