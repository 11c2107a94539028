"""What a rank computes of its team's samples: the one seam between the loop and strategies that divide a sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor


@contextmanager
def own_part(accelerator: Accelerator, micro_batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The model's inputs on its device, for a forward and a backward pass within the block.

    Where each rank has all of its samples, or shares whole samples with its team, that is all of the micro-batch.
    """
    from accelerate.utils import send_to_device

    from study.run import context, sequence

    inputs = send_to_device(micro_batch, accelerator.device, non_blocking=True)
    if context.divides(accelerator):
        with context.own_tokens(accelerator, inputs) as own:
            yield own
    else:
        yield sequence.own_tokens(inputs) if sequence.divides(accelerator) else inputs
