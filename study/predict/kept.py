"""What the C library keeps of the blocks that a process without a GPU frees.

Runs tell it to, for the sake of their times (study/host/devices.py). Blocks of 32 MiB and more always go back; of
smaller ones it keeps what there ever was, with gaps between.
"""

from __future__ import annotations

from study.host.memory import LARGEST_KEPT_BYTES
from study.predict.request import Request
from study.predict.state import weight_bytes

# By least squares over study/validation/kept.yaml: gaps, as a share of the most that lies in small blocks at once, and
# copies of all weights, flat as ranks send them to each other where they have shards. Why so many is not known: with
# one heap for all threads (MALLOC_ARENA_MAX=1) there were more. Of a model of 204 MiB there were none.
GAPS, COPIES = 0.54, 8.4


def kept_by_c_library(size: float) -> float:
    return size if size < LARGEST_KEPT_BYTES else 0.0


def kept_bytes(request: Request, most_in_small_blocks: float) -> float:
    sends_shards = request.box.ranks > 1 and (bool(request.strategy.zero_stage) or request.strategy.is_fsdp)
    is_whole = request.strategy.zero_stage == 3 or request.strategy.is_fsdp
    # Stages 1 and 2 send what is trained, and leave frozen weights where they are.
    sent = request.shape.parameters if is_whole else request.shape.trained_parameters
    weights = float(sent * weight_bytes(request))
    return GAPS * most_in_small_blocks + (COPIES * kept_by_c_library(weights) if sends_shards else 0.0)


def small_activations(request: Request, parts: dict[str, float]) -> float:
    tokens, shape = request.micro_batch * request.sequence_length, request.shape
    widths = {
        "activations": shape.inner,
        "attention": shape.heads * request.sequence_length,
        "logits": shape.vocabulary,
    }
    return sum(parts.get(name, 0.0) for name, width in widths.items() if kept_by_c_library(4.0 * tokens * width))
