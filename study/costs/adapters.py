"""LoRA under Accelerate's FSDP as its users load it, for the costs of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from study.compositions.engines import AccelerateTorchLoop

if TYPE_CHECKING:
    import torch

    from study.compositions.features import Combination


def loads_adapters(combination: Combination) -> bool:
    """Whether the costs of a combination are those of `AdapterLoop`."""
    is_fsdp = combination.has("accelerate") and combination.has("fsdp1", "fsdp2")
    return is_fsdp and combination.has("lora") and combination.has("bf16", "autocast")


class AdapterLoop(AccelerateTorchLoop):
    """Accelerate's bf16 with adapters in fp32, and frozen weights in bf16, or with `autocast` in fp32.

    FSDP1 flattens weights of one type together, and casts a flat tensor to fp32 if any part of it is trained. PEFT's
    policy wraps each adapter by itself.
    """

    def make_model(self, seed: int) -> torch.nn.Module:
        model = super().make_model(seed)
        if self.combination.has("bf16"):
            for weight in model.parameters():
                if not weight.requires_grad:
                    weight.data = weight.data.bfloat16()
        return model

    def set_up(self, plain: torch.nn.Module) -> None:
        from peft.utils.other import fsdp_auto_wrap_policy

        self.accelerator = self.make_accelerator()
        if self.combination.has("fsdp1"):
            self.accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(plain)
        super().set_up(plain)
