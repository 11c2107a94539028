"""Answers of torch's memory trackers to the rows of `study benchmark`: a step of the live model on fake tensors.

    python tools/benchmark_torch.py study/benchmark/answers/torch_mem_tracker.csv [--only SOURCE] [--seconds 600]

A row of one GPU or of DDP is asked of torch.distributed._tools.mem_tracker.MemTracker, one of FSDP of
fsdp2_mem_tracker.FSDPMemTracker over a process group of fakes. The model is transformers' own, of the row's config, and
trains one step that begins with the moments of an earlier one. The fakes are of a CPU, since a build of torch without
CUDA aborts at the first gradient of a fake CUDA tensor. Dropout and autocast have a GPU's operations (AsGpu), and fused
attention no mask: transformers makes one of fake tensors alone, for which it copies keys and values to all heads. Rows
that are not traced have the reason in `note`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from study.benchmark.questions import BenchmarkQuestion, read_questions
from study.config.errors import first_line
from study.config.precisions import computing_type, in_autocast, in_engine
from study.host.memory import GIB
from study.predictor.live_trace import _IN_FP32, build_model, register_fused
from study.predictor.request import Request

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class AsGpu(TorchFunctionMode):
    """Runs dropout with a mask of bytes, and in fp32 what CUDA's autocast computes in fp32; a CPU does neither."""

    def __init__(self, autocasts: bool) -> None:
        super().__init__()
        self.autocasts = autocasts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.dropout:
            return _dropout(*args, **kwargs)
        if self.autocasts and func in _IN_FP32:
            args = tuple(map(_widen, args))
            kwargs = {name: _widen(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _dropout(tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(tensor, p, True)[0] if training and p > 0 else tensor


def _widen(value: Any) -> Any:
    is_narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value


def why_not(question: BenchmarkQuestion) -> str | None:
    """Return why the trackers cannot be asked this row; None if they can."""
    request = question.measurement.request
    if question.engine == "DeepSpeed":
        return "DeepSpeed's engine does not run on fake tensors"
    if request.quantized:
        return "bitsandbytes' kernels have no fake"
    if request.optimizer != "adamw":
        return f"{request.optimizer} has no fake kernels"
    if question.inputs["checkpointing"] == "selective":
        return "which operations are kept is not on the page"
    if in_engine(request.precision) and not request.pure:
        return "the engine of the page, with fp32 copies of 16-bit weights, is not torch's"
    return None


def trace_peak(request: Request) -> float:
    """Return the peak of the traced steps in bytes."""
    is_fsdp, ranks = request.strategy.is_fsdp, request.box.ranks
    if is_fsdp:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _traced(request, is_fsdp, ranks)
    finally:
        if is_fsdp:
            dist.destroy_process_group()
        gc.collect()


def _traced(request: Request, is_fsdp: bool, ranks: int) -> float:
    shape, computing = request.shape, _DTYPES[computing_type(request.precision)]
    torch.set_default_dtype(computing if request.pure else torch.float32)
    attention = "eager" if request.attention == "eager" else register_fused()
    model = build_model(
        json.loads(shape.document),
        shape.lora_rank,
        attention,
        dropout=request.dropout,
        targets=shape.lora_targets,
        lora_dropout=request.lora_dropout,
    )
    torch.set_default_dtype(torch.float32)
    if shape.lora_rank is not None:
        _prepare_adapters(model, is_fsdp)
    autocasts = in_autocast(request.precision) and request.autocast
    if request.gradient_checkpointing:
        _checkpoint(model, request.checkpoint_every, autocasts)
    if is_fsdp:
        _shard(model, request, computing, ranks)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    foreach = request.step_copies > 0
    optimizer = torch.optim.AdamW(trained, foreach=foreach, fused=not foreach)
    # The moments of an earlier step.
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tokens = torch.zeros(request.micro_batch, request.sequence_length, dtype=torch.long)
    labels = tokens if shape.family == "causal-lm" else torch.zeros(request.micro_batch, dtype=torch.long)
    if is_fsdp:
        fsdp_tracker = FSDPMemTracker(model, optimizer)
        fsdp_tracker.track_inputs((tokens, labels))
        tracker: MemTracker = fsdp_tracker
    else:
        tracker = MemTracker()
        tracker.track_external(model, optimizer, tokens, labels)
    with AsGpu(autocasts), tracker:
        for micro_batch in range(min(2, request.accumulation)):
            if micro_batch:
                # FSDP's tracker refuses a second pass of its modules otherwise.
                tracker.reset_mod_stats()
            with torch.autocast("cpu", computing, enabled=autocasts):
                loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
        optimizer.step()
    snapshot: dict[Any, dict[Any, int]] = tracker.get_tracker_snapshot("peak")
    return float(max(figures["Total"] for figures in snapshot.values()))


def _prepare_adapters(model: Any, is_fsdp: bool) -> None:
    """Make the adapters fp32, as peft does; in groups of FSDP2, which have one type, they stay in 16 bits."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and not is_fsdp:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().float())
    model.enable_input_require_grads()


def _checkpoint(model: Any, interval: int, autocasts: bool) -> None:
    # Recomputation enters the mode again, since a mode has no effect inside the backward pass.
    contexts = {"context_fn": lambda: (contextlib.nullcontext(), AsGpu(autocasts))}
    model.gradient_checkpointing_enable({"use_reentrant": False, **contexts})
    for number, layer in enumerate(_layers(model)):
        layer.gradient_checkpointing = number % interval == 0


def _layers(model: Any) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _shard(model: Any, request: Request, computing: torch.dtype, ranks: int) -> None:
    with unset_fake_temporarily():
        mesh = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy()
    if request.fsdp_gathers_16_bits:
        policy = MixedPrecisionPolicy(param_dtype=computing, reduce_dtype=computing)
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", metavar="SOURCE", default="", help="rows of sources that begin so")
    parser.add_argument(
        "--seconds", type=float, default=600, help="rows that are not reached by then are named as such"
    )
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    questions = [
        question
        for question in read_questions()
        if question.source.startswith(options.only) and (question.peak_gib is not None or question.fits is False)
    ]
    start, answers = time.monotonic(), dict[Request, tuple[str, str]]()
    with options.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "peak_gib", "note"])
        for question in questions:
            request = question.measurement.request
            if (note := why_not(question)) is not None:
                writer.writerow([question.id, "", note])
                continue
            if request not in answers:
                if time.monotonic() - start > options.seconds:
                    answers[request] = "", "not reached in time"
                else:
                    answers[request] = _answer(request)
            writer.writerow([question.id, *answers[request]])
            file.flush()
            measured = f"{question.peak_gib:.2f}" if question.peak_gib else "-"
            print(
                f"{time.monotonic() - start:6.0f} s {question.id}: {answers[request]}, measured {measured}", flush=True
            )


def _answer(request: Request) -> tuple[str, str]:
    try:
        with contextlib.redirect_stdout(None):
            return f"{trace_peak(request) / GIB:.4f}", ""
    except Exception as error:
        return "", f"{type(error).__name__}: {first_line(error)}"[:160]


if __name__ == "__main__":
    main()
