"""Rate of an optimizer that steps on the host, with the cores and ranks that share it. It imports no torch."""

from __future__ import annotations

import dataclasses

from study.predictor.time import CPU_ADAM_BYTES
from study.receipt.document import ReceiptDocument

_ADAMS = ("AdamW", "Adam", "DeepSpeedCPUAdam")
# DeepSpeed's state has masters and two moments in fp32, FSDP's two moments in the type of the weights, of which torch's
# AdamW reads and writes all three, and reads the gradient.
_STATE_BYTES_OF_DEEPSPEED = 12
_MOVED_PER_STATE = {"deepspeed": CPU_ADAM_BYTES / _STATE_BYTES_OF_DEEPSPEED, "fsdp1": 3.5, "fsdp2": 3.5}


@dataclasses.dataclass(frozen=True)
class HostOptimizer:
    """Adam on the host in one step of rank 0."""

    moved_bytes: float
    step_s: float
    cores: int
    ranks: int

    @property
    def gb_per_s(self) -> float:
        return self.moved_bytes / self.step_s / 1e9


def read_host_optimizer(receipt: ReceiptDocument) -> HostOptimizer | None:
    """Return the rate of the optimizer's step; None if it is not Adam on the host, or was not measured."""
    engine, state, host = receipt.engine, receipt.model_state, receipt.host
    step_s = receipt.time.parts.get("optimizer")
    is_on_host = engine.offload_optimizer is not None and engine.optimizer in _ADAMS
    if not is_on_host or not step_s or state is None or host is None:
        return None
    places = state.optimizer
    # On CPU ranks FSDP's state on the host is in the memory that computes.
    is_all = engine.engine != "deepspeed" and engine.device == "cpu"
    on_host = sum(places.values()) if is_all else places.get("host", 0) + places.get("nvme", 0)
    moved = on_host * _MOVED_PER_STATE.get(engine.engine, 0.0)
    return HostOptimizer(moved, step_s, host.cores, host.ranks) if moved else None
