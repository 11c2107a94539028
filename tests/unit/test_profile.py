"""Profile of a step: the category of a kernel, overlapping kernels of a GPU, and the table of a report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # public, and not declared so

from report_folders import figures
from study.config.errors import UserError
from study.config.flags import RunConfig, check_virtual_run_flags, resolve_config
from study.config.launch_context import Launch
from study.config.places import REPOSITORY
from study.config.strategies import read_strategy
from study.experiments.baselines.bare_loop import check_request
from study.metrics import Meters
from study.metrics.profiling import categorize, profile_document
from study.receipt.exposure import read_exposure
from study.receipt.timing import RANGE
from study.records.frames import read_records
from study.records.schema import validate
from study.report.document import table_html
from study.report.questions import TABLES
from study.report.questions.time import PROFILE
from synthetic_records import answered, write_run

KERNELS = yaml.safe_load((REPOSITORY / "tests/data/kernels.yaml").read_text())


NAMED = [[kind, name] for kind, names in KERNELS["names"].items() for name in names]


@pytest.mark.parametrize("kernel", [*NAMED, *KERNELS["called"]], ids=str)
def test_callers_decide_the_category_of_a_kernel_or_without_any_its_name(kernel: list[str]) -> None:
    kind, name, *callers = kernel
    assert categorize(name, callers) == kind


def test_a_bare_loop_and_a_virtual_rank_profile_nothing() -> None:
    launched = Launch(read_strategy("single"), 1, 0, 0, 1)
    with pytest.raises(UserError, match="bare_loop does not support --profile_steps"):
        check_request(RunConfig(profile_steps=3), launched)
    with pytest.raises(UserError, match="--profile_steps 3: a virtual run"):
        check_virtual_run_flags(resolve_config(RunConfig(profile_steps=3, virtual_world_size=4), False))


def test_the_watched_step_and_the_profiler_leave_compiled_code_in_use() -> None:
    graphs, used = 0, []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1

        def call(*arguments: Any) -> Any:
            used.append(step)
            return graph.forward(*arguments)

        return call

    torch._dynamo.reset()
    model = torch.nn.Linear(4, 4)
    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.1)
    meters = Meters(torch.device("cpu"), 4, profiled_steps=range(9, 11), records_profile=True)
    meters.start(model, optimizer)
    for step in range(1, 11):
        with meters.step(step):
            compiled(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 9:
            with meters.untimed_phase("eval"):
                torch.ones(64, 64).cholesky_inverse()
    meters.finish()
    torch._dynamo.reset()
    assert (used, graphs) == (list(range(1, 11)), 1)
    assert (meters.traffic or {})["step"] == 4
    assert meters.profile is not None
    assert meters.profile["steps"] == [9, 10]
    assert meters.clock.window_steps == 3
    # An evaluation between two profiled steps is in neither.
    assert not [entry for entry in meters.profile["top"] if "cholesky" in entry["name"]]


def event(
    name: str,
    start: int,
    end: int,
    on: DeviceType = DeviceType.CPU,
    id: int = 0,
    linked: int = 0,
    annotates: bool = False,
) -> SimpleNamespace:
    """Return an event as torch records it, for events that need a GPU."""
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: start,
        end_ns=lambda: end,
        device_type=lambda: on,
        correlation_id=lambda: id,
        linked_correlation_id=lambda: linked,
        is_user_annotation=lambda: annotates,
        is_hidden_event=lambda: False,
        is_async=lambda: False,
        start_thread_id=lambda: 1,
        end_thread_id=lambda: 1,
    )


def test_overlapping_gpu_kernels_count_once_and_belong_to_the_operator_that_launched_them() -> None:
    gpu = DeviceType.CUDA
    events = [
        event("zero-study: profiled steps", 1000, 3000, id=1, annotates=True),
        event("aten::mm", 1100, 1200, id=2),
        event("cudaLaunchKernel", 1110, 1120, id=77, linked=2),
        event("Optimizer.step#AdamW.step", 1300, 1500, id=3, annotates=True),
        event("aten::mul_", 1310, 1320, id=4),
        event("aten::mm", 500, 600, id=5),
        # Before the steps; in them; overlapping on another stream; and past their end.
        event("early", 700, 900, gpu, id=76, linked=5),
        event("unknown_kernel", 1200, 1700, gpu, id=77, linked=2),
        event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1600, 1900, gpu, id=78),
        event("void at::native::vectorized_elementwise_kernel<4>", 2000, 2100, gpu, id=79, linked=4),
        event("Memcpy DtoH (Device -> Pinned)", 2900, 3500, gpu, id=80),
        event("Optimizer.step#AdamW.step", 1200, 2100, gpu, id=3, annotates=True),
    ]
    profile = profile_document(events, range(7, 9), "cuda")
    names = ("wall", "busy", "idle", "summed")
    assert [round(profile[f"{name}_s_per_step"] * 2e9) for name in names] == [2000, 900, 1100, 1000]
    parts = {kind: round(time * 2e9) for kind, time in profile["categories_s_per_step"].items() if time}
    assert parts == {"matmul": 500, "collectives": 300, "optimizer": 100, "copies": 100}
    validate(Path("profile.json"), json.loads(json.dumps(profile)))


def as_in_torch_2_4(events: list[SimpleNamespace]) -> list[SimpleNamespace]:
    """Return the events as torch 2.4 has them: with their durations, and without a mark of ranges."""
    older = []
    for event in events:
        methods = {name: value for name, value in vars(event).items() if name not in ("end_ns", "is_user_annotation")}
        duration = event.end_ns() - event.start_ns()
        older.append(SimpleNamespace(**methods, duration_ns=lambda duration=duration: duration))
    return older


@pytest.mark.parametrize("is_older", [False, True])
def test_on_a_gpu_communication_and_copies_are_exposed_where_no_kernel_computes(is_older: bool) -> None:
    gpu = DeviceType.CUDA
    events = [
        event(f"{RANGE}forward", 1000, 2000, id=1, annotates=True),
        event(f"{RANGE}optimizer", 2000, 3000, id=2, annotates=True),
        event("aten::copy_", 1100, 1110, id=3),
        event("aten::mm", 1200, 1210, id=4),
        event("c10d::allreduce_", 1300, 1310, id=5),
        event("nccl:all_reduce", 1301, 1309, id=8, annotates=True),
        event("aten::copy_", 2100, 2110, id=6),
        # torch also shows ranges on the GPU: labels, and no kernels.
        event(f"{RANGE}forward", 1000, 2000, gpu, id=1, annotates=True),
        event("nccl:all_reduce", 1400, 1900, gpu, id=5, annotates=True),
        event("Memcpy HtoD (Pinned -> Device)", 1100, 1300, gpu, id=13, linked=3),
        event("gemm", 1200, 1500, gpu, id=14, linked=4),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1400, 1900, gpu, id=15, linked=5),
        event("Memcpy DtoH (Device -> Pinned)", 2100, 2400, gpu, id=16, linked=6),
        event("Memcpy DtoD (Device -> Device)", 2350, 2400, gpu, id=17, linked=6),
    ]
    exposure = read_exposure(as_in_torch_2_4(events) if is_older else events, "cuda")
    in_flight = {kind: round(seconds * 1e9) for kind, seconds in exposure.in_flight.items()}
    assert in_flight == {"to_device": 200, "all_reduce": 500, "to_host": 300}
    exposed = {place: round(seconds * 1e9) for place, seconds in exposure.exposed.items()}
    assert exposed == {
        ("forward", "to_device"): 100,
        ("forward", "all_reduce"): 400,
        ("optimizer", "to_host"): 250,
    }


def test_a_report_shows_profiles_with_kernels_names_as_text_and_states_that_none_was_recorded(tmp_path: Path) -> None:
    for strategy, profile_steps in (("single", 3), ("ddp", 3), ("zero3", 0)):
        write_run(tmp_path / "runs", strategy, config={"profile_steps": profile_steps})
    records = read_records(tmp_path / "runs")
    drawing = figures("runtime", records)["step_profile"]
    assert "ddp, profiled 100 ms: matrix products 40, attention 10," in drawing.alt
    assert "zero3" not in drawing.alt
    shares = TABLES["step_profile"](records).set_index("Strategy").loc["ddp, profiled"]
    columns = ["Profiled step, ms", "Idle, ms", "Of it counted twice, ms"]
    assert shares[columns].tolist() == pytest.approx([100, 20, 10])
    # 1e10 FLOPs on two devices in the 50 ms of matrix products and attention.
    assert shares["TFLOP/s in matrix products and attention"] == pytest.approx(0.1)
    # That time includes recomputation, which is not part of the model's FLOPs.
    checkpointed = dataclasses.replace(records, runs=records.runs.assign(gradient_checkpointing=True))
    assert "TFLOP/s in matrix products and attention" not in TABLES["step_profile"](checkpointed)
    nothing = dataclasses.replace(records, runs=records.runs[records.runs["strategy"] == "zero3"])
    assert PROFILE.answer(nothing) is None
    assert answered(PROFILE.answer(records)).headlines[0].value == "50 %"
    html = table_html(TABLES["profile"](records))
    assert ("&lt;script&gt;alert(1)&lt;/script&gt;" in html, "<script" in html) == (True, False)
