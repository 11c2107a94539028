"""Groups of ranks that share samples: layers or sequences divided over them, and the full figures."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from study.compositions import tiny_model
from study.compositions.features import GROUP_SIZE, Combination
from study.compositions.trace import plain_name
from study.host.cpu_ring import register_cpu_ring
from study.host.divided_sequence import TOKENS, context_parallel_part, leave_out_masks, ulysses_part

if TYPE_CHECKING:
    import torch

ATTENTION = "sdpa"


def make_group(combination: Combination, rank: int) -> RankGroup:
    """Return the group of a rank."""
    if combination.has("autotp", "tp"):
        return DividedLayers(combination, rank)
    if combination.has("ulysses"):
        return UlyssesGroup(combination, rank)
    if combination.has("cp"):
        return ContextRing(combination, rank)
    return RankGroup(combination, rank)


class RankGroup:
    """A rank alone; the groups below share samples."""

    def __init__(self, combination: Combination, rank: int):
        self.combination, self.rank = combination, rank

    @property
    def place(self) -> int:
        """The rank within its group."""
        return self.rank % GROUP_SIZE

    def prepare(self, model: torch.nn.Module) -> None:
        """Change a plain model before an engine takes it."""

    @contextlib.contextmanager
    def divided(self, batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's inputs of a batch, for the forward and backward pass within the block."""
        yield batch

    def full_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of the samples."""
        return loss.detach()

    def full_output(self, output: torch.Tensor) -> torch.Tensor:
        """Return a layer's output for whole sequences."""
        return output

    def full_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor of a weight's shape."""
        return tensor

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of the group's ranks."""
        import torch

        parts = [torch.empty_like(tensor) for _ in range(GROUP_SIZE)]
        torch.distributed.all_gather(parts, tensor.detach().contiguous(), group=self._process_group)
        return parts

    @functools.cached_property
    def _process_group(self) -> Any:
        """The group's communicator, made by all ranks at the first figure that needs it."""
        import torch

        starts = range(0, self.combination.ranks, GROUP_SIZE)
        groups = [torch.distributed.new_group(list(range(start, start + GROUP_SIZE))) for start in starts]
        return groups[self.rank // GROUP_SIZE]


class DividedLayers(RankGroup):
    """Each rank has a part of the matrices."""

    def prepare(self, model: torch.nn.Module) -> None:
        # A partition of zero.Init has the shape of its weight as ds_shape.
        self._shapes = {
            plain_name(name): getattr(weight, "ds_shape", weight.shape) for name, weight in model.named_parameters()
        }

    def full_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        shape = self._shapes[name]
        divided = [axis for axis, size in enumerate(shape) if tensor.shape[axis] != size]
        return torch.cat(self._gathered(tensor), dim=divided[0]) if divided else tensor


class DividedSequence(RankGroup):
    """Each rank has a part of every sequence."""

    # Of the last batch.
    _samples: int

    def full_loss(self, loss: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.stack(self._gathered(loss)).mean()

    def full_output(self, output: torch.Tensor) -> torch.Tensor:
        import torch

        # Some layers of OPT see the tokens of all samples in one axis.
        by_sample = output.reshape(self._samples, -1, output.shape[-1])
        full = torch.cat(self.in_order(self._gathered(by_sample)), dim=TOKENS)
        return full if output.ndim > 2 else full.flatten(0, 1)

    def in_order(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the ranks' parts in the order of the sequence."""
        return parts


class UlyssesGroup(DividedSequence):
    """Ulysses: whole sequences for some heads in attention, a part of each sequence for all other layers."""

    # The groups that DeepSpeed takes; Accelerate makes them itself.
    mpu: Any = None

    def prepare(self, model: torch.nn.Module) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config: Any = model.config
        # OPT's configuration has no such entry.
        config.num_key_value_heads = config.num_attention_heads
        if not hasattr(self, "_plain_attention"):
            self._plain_attention = ALL_ATTENTION_FUNCTIONS[ATTENTION]
        else:
            self._unregister()
        if not self.combination.has("accelerate"):
            self._register(model)

    def _register(self, model: torch.nn.Module) -> None:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        self.mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=ATTENTION,
            sequence_parallel_size=GROUP_SIZE,
            micro_batch_size=tiny_model.SAMPLES,
            seq_length_is_variable=True,
        )

    def _unregister(self) -> None:
        """Forget the registration of earlier objects, for which DeepSpeed has no function."""
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS[ATTENTION] = self._plain_attention
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = None
        parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None

    @contextlib.contextmanager
    def divided(self, batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        self._samples = len(batch["input_ids"])
        yield ulysses_part(batch, GROUP_SIZE, self.place)


class ContextRing(DividedSequence):
    """torch's context parallelism: keys and values go around a ring."""

    # Accelerate's, if it divides sequences.
    accelerator: Any = None
    mesh: Any = None

    def prepare(self, model: torch.nn.Module) -> None:
        register_cpu_ring()
        if self.combination.has("accelerate"):
            return
        leave_out_masks(module for name, module in model.named_modules() if name.endswith("self_attn"))

    @contextlib.contextmanager
    def divided(self, batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        self._samples = len(batch["input_ids"])
        with context_parallel_part(batch, GROUP_SIZE, self._ring) as inputs:
            yield inputs

    def _ring(self, **arguments: Any) -> contextlib.AbstractContextManager[Any]:
        if self.accelerator is not None:
            ring: contextlib.AbstractContextManager[Any] = self.accelerator.maybe_context_parallel(**arguments)
            return ring
        from torch.distributed.tensor.experimental import context_parallel

        return context_parallel(self.mesh["cp"], **arguments)

    def in_order(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """A rank has a part from the front and one from the back, which balances causal attention."""
        halves = [part.chunk(2, TOKENS) for part in parts]
        return [front for front, _ in halves] + [back for _, back in reversed(halves)]


def divide_layers(blocks: list[torch.nn.Module], mesh: Any) -> None:
    """Divide the matrices of decoder layers by torch's tensor parallelism."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"], ["self_attn.out_proj", "fc2"]
    for block in blocks:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {
            name: RowwiseParallel() for name in rows
        }
        parallelize_module(block, mesh, plan)
        attention: Any = block.self_attn
        attention.num_heads //= GROUP_SIZE
