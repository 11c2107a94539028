"""The cases of the bare control: what each asks of DeepSpeed, and the plain loop that all of them should come to."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RANKS, BATCH, STEPS, LEARNING_RATE = 2, 16, 6, 1e-2
# `zero1_cpu` is no strategy of this study: it tells what of zero2_cpu is the offload's.
STRATEGIES = ("zero0", "zero1", "zero1_cpu", "zero2", "zero2_cpu", "zero3", "zero3_cpu_optimizer", "zero3_cpu")


@dataclasses.dataclass(frozen=True)
class ControlCase:
    caller: str
    strategy: str
    accumulation: int
    # Where the loss is made: inside the model, which returns it beside its outputs as those of transformers do, or not.
    loss: str = "inside"
    # `bf16-fp32` accumulates its gradients in fp32.
    precision: str = "fp32"
    clipping: float = 1.0

    @property
    def has_two_losses(self) -> bool:
        return "-" in self.caller

    @property
    def stage(self) -> int:
        return int(self.strategy[4])

    def settings(self) -> dict[str, Any]:
        """For `deepspeed.initialize`. torch's AdamW everywhere, so that no operator of a release is needed."""
        zero: dict[str, Any] = {"stage": self.stage, "overlap_comm": self.stage == 3}
        if "_cpu" in self.strategy:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.strategy == "zero3_cpu":
            zero["offload_param"] = {"device": "cpu"}
        if self.stage == 3:
            # By default a rank keeps parameters of under 1e5 elements whole, which here would be all.
            zero["stage3_param_persistence_threshold"] = 0
        settings = {
            "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // RANKS // self.accumulation,
            "gradient_accumulation_steps": self.accumulation, "gradient_clipping": self.clipping,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero, "bf16": {"enabled": self.precision != "fp32"},
        }  # fmt: skip
        return settings | ({"data_types": {"grad_accum_dtype": "fp32"}} if self.precision == "bf16-fp32" else {})


def cases() -> Iterator[ControlCase]:
    for strategy in STRATEGIES:
        yield ControlCase("bare", strategy, 1)
        yield ControlCase("bare", strategy, 4)
        yield ControlCase("bare", strategy, 4, loss="outside")
        yield ControlCase("accelerate", strategy, 4)
    for strategy in ("zero1", "zero2"):
        yield ControlCase("boundary", strategy, 4)
        yield ControlCase("bare", strategy, 4, clipping=0.0)
    # Several backward passes in one micro-step, which is no accumulation: nothing is to be divided.
    for strategy in ("zero0", "zero1", "zero2", "zero2_cpu", "zero3"):
        yield ControlCase("bare-losses", strategy, 1, loss="outside")
        yield ControlCase("bare-losses", strategy, 4, loss="outside")
        yield ControlCase("bare-forwards", strategy, 1, loss="outside")
        yield ControlCase("boundary-forwards", strategy, 1, loss="outside")
    for strategy in ("zero1", "zero3"):
        yield ControlCase("accelerate-forwards", strategy, 1, loss="outside")
    yield ControlCase("bare", "zero2_cpu", 2)
    yield ControlCase("bare", "zero0", 1, precision="bf16")
    yield ControlCase("bare", "zero2", 4, precision="bf16")
    yield ControlCase("bare", "zero1", 4, precision="bf16-fp32")


def build_model() -> torch.nn.Module:
    from torch import manual_seed, nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
            outputs = self.layers(inputs)
            return outputs if targets is None else {"loss": _loss(outputs, targets), "outputs": outputs}

    manual_seed(0)
    return Model()


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    import torch

    # So large that the right gradient is clipped, and a quarter of it is not.
    return torch.nn.functional.mse_loss(outputs.float(), targets) / 8


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 32, generator=generator) * 3
        yield inputs, inputs[:, :4] * 4


def plain_loop(is_bf16: bool, clipping: float) -> dict[str, Any]:
    """What every case should come to: one process, the whole batch, torch alone."""
    import torch

    # Under bf16 an engine computes in it, and keeps and steps weights in fp32.
    masters, model = build_model(), build_model()
    kind = torch.bfloat16 if is_bf16 else torch.float32
    model.to(kind)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for inputs, targets in batches():
        pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
        for weight, master in pairs:
            weight.data.copy_(master.data)
        model.zero_grad()
        loss = model(inputs.to(kind), targets)["loss"]
        loss.backward()
        for weight, master in pairs:
            master.grad = None if weight.grad is None else weight.grad.float()
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.parameters(), clipping or float("inf"))))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "weights": _flat(masters.parameters()).tolist()}


def train(case: ControlCase, rank: int, store: Path) -> dict[str, Any]:
    """One case, on this rank of a group of its own."""
    import deepspeed
    import torch

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    through = _through_accelerate if case.caller.startswith("accelerate") else _through_engine
    engine, micro_step = through(case, model, optimizer)
    kind = torch.float32 if case.precision == "fp32" else torch.bfloat16
    micro = BATCH // RANKS // case.accumulation
    losses, norms, readings = [], [], []
    for inputs, targets in batches():
        total = torch.zeros(())
        for index in range(case.accumulation):
            start = (index * RANKS + rank) * micro
            given, wanted = inputs[start : start + micro].to(kind), targets[start : start + micro]
            parts = _parts(case, engine, given, wanted)
            total += micro_step(parts, index == case.accumulation - 1) / case.accumulation / RANKS
        torch.distributed.all_reduce(total)
        losses.append(float(total))
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=case.stage == 3):
            weights = _flat(engine.module.parameters())
        readings.append(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    return {"losses": losses, "norms": norms, "weights": weights.tolist(), "readings": readings}


def _parts(case: ControlCase, engine: Any, given: torch.Tensor, wanted: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a micro-step goes backward from: its loss, or two losses that add up to it, as of two tasks."""
    if case.loss == "inside":
        yield engine(given, wanted)["loss"]
        return
    if not case.has_two_losses:
        yield _loss(engine(given), wanted)
        return
    outputs, middle = None, wanted.shape[1] // 2
    for columns in (slice(middle), slice(middle, None)):
        if outputs is None or case.caller.endswith("forwards"):
            outputs = engine(given)
        yield _loss(outputs[:, columns], wanted[:, columns]) / 2


MicroStep = Callable[[Iterator[Any], bool], Any]


def _through_engine(case: ControlCase, model: Any, optimizer: Any) -> tuple[Any, MicroStep]:
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case.settings())

    says_boundary = case.caller.startswith("boundary")

    def micro_step(parts: Iterator[Any], is_last: bool) -> Any:
        def backward(part: Any, is_last_part: bool, **how: bool) -> None:
            if says_boundary:
                engine.set_gradient_accumulation_boundary(is_boundary=is_last and is_last_part)
            engine.backward(part, **how)

        total = _backward(case, backward, parts)
        if is_last or not says_boundary:
            engine.step()
        return total

    return engine, micro_step


def _through_accelerate(case: ControlCase, model: Any, optimizer: Any) -> tuple[Any, MicroStep]:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    PartialState(cpu=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=case.accumulation, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=case.settings())
    )
    engine, _ = accelerator.prepare(model, optimizer)

    def micro_step(parts: Iterator[Any], is_last: bool) -> Any:
        with accelerator.accumulate(engine):
            return _backward(case, lambda part, is_last_part, **how: accelerator.backward(part, **how), parts)

    return engine, micro_step


def _backward(case: ControlCase, backward: Callable[..., Any], parts: Iterator[Any]) -> Any:
    """A backward pass from each part; returns their sum. A graph is kept for the second one that goes through it."""
    total = 0.0
    for number, part in enumerate(parts):
        is_last = number == case.has_two_losses
        keeps_graph = not is_last and case.caller.endswith("losses")
        backward(part, is_last, **({"retain_graph": True} if keeps_graph else {}))
        total += part.detach()
    return total


def _flat(parameters: Iterator[Any]) -> torch.Tensor:
    import torch

    return torch.cat([one.detach().float().cpu().flatten() for one in parameters])
