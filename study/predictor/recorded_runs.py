"""Records of this project as requests, and their measurements; without pandas, for commands that answer in a second."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.places import REPOSITORY
from study.config.strategies import WITH_GROUPS, read_strategy
from study.host.memory import GIB
from study.predictor.communication import sent_bytes
from study.predictor.hardware import CPU_CORE, box_from_device_name, box_of_ranks
from study.predictor.memory import predict_memory
from study.predictor.request import Request, request_for, tensor_request_for
from study.predictor.state import predict_state
from study.predictor.validation import Measurement
from study.records.plain_rows import RUNS_FILE, is_missing, read_columns, read_row
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.virtual_summary import ring_bytes

REPORTS = REPOSITORY / "reports"
SUITES = (
    "laptop",
    "claims",
    "paper_table1",
    "neighbours",
    "virtual_scaling",
    "virtual_settings",
    "virtual_claims",
    "virtual_neighbours",
    "virtual_lora",
    "virtual_models",
    "virtual_tuning",
)
# Suite of GPU records, if there are any.
GPU = "gpu"
ALL_STATE, SENT = "state, all", "ring bytes (NCCL) of a step"
# Commits whose recorded peaks follow an older rule: virtual ranks did not make gloo's copies, and the phase of steps
# included the last evaluation. Without these 284 peaks only 78 real ones would remain.
_WITHOUT_COPIES, _WITH_LAST_EVALUATION = ("1f63150", "771d7fe"), ("dd505bf", "6edd112")
# Options that change the memory of a rank. Older records lack some.
_OPTIONS = (
    "model_name_or_path",
    "seq_length",
    "precision",
    "gradient_checkpointing",
    "attn_implementation",
    "dropout",
    "torch_compile",
    "peft",
    "lora_rank",
    "optimizer",
    "bf16_states",
)
# Other columns of a request, and those of the end of a run.
_COLUMNS = (
    *_OPTIONS,
    "strategy",
    "engine_override",
    "devices",
    "world_size",
    "machines",
    "git_commit",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "virtual",
    "trainer",
    "status_state",
    "params_bytes_device",
)


def request_if_any(run: Any) -> Request | None:
    """Return a record's request; None if it cannot be predicted."""
    try:
        return request_from_record(run)
    except UserError:
        return None


def _config(run: Any) -> RunConfig:
    """Return the flags of a record that change the memory of a rank."""
    options = {name: value for name in _OPTIONS if not is_missing(value := getattr(run, name))}
    # pandas reads an integer column with missing values as floats.
    options |= {name: int(options[name]) for name in ("seq_length", "lora_rank") if name in options}
    return RunConfig(engine_override=tuple(json.loads(run.engine_override)), **options)


def request_from_record(run: Any) -> Request:
    """Return a record's request; UserError if its model or settings cannot be predicted."""
    config = _config(run)
    devices, ranks = json.loads(run.devices) if isinstance(run.devices, str) else [], int(run.world_size)
    if devices:
        box = box_from_device_name(devices[0], ranks, 1 if is_missing(run.machines) else int(run.machines))
    else:
        copies = not str(run.git_commit).startswith(_WITHOUT_COPIES)
        box = dataclasses.replace(box_of_ranks("processes", CPU_CORE, ranks), gloo_copies_gathers=copies)
    return request_for(run.strategy, config, box, int(run.micro_batch_size), int(run.gradient_accumulation_steps))


def read_tensor_runs() -> Iterator[tuple[Any, Request]]:
    """Yield the records that succeeded whose ranks divide the tensors of each layer, with their requests; without those
    with changed settings of the engine."""
    for suite in suites():
        for place, run in enumerate(read_columns(REPORTS / suite, (*_COLUMNS, "group_ranks"))):
            group = read_strategy(run.strategy).group if run.strategy in WITH_GROUPS else None
            is_ended = run.status_state == "ok" and not is_missing(run.params_bytes_device)
            if group is None or group.divides != "tensors" or not is_ended or json.loads(run.engine_override):
                continue
            box = dataclasses.replace(
                box_of_ranks("processes", CPU_CORE, int(run.world_size)), gloo_copies_gathers=True
            )
            config = dataclasses.replace(_config(run), group_size=int(run.group_ranks))
            batch = int(run.micro_batch_size), int(run.gradient_accumulation_steps)
            request = tensor_request_for(run.strategy, config, box, *batch)
            run.suite, run.place = suite, place
            yield run, request


def suites() -> Iterator[str]:
    """Yield the suites that have records."""
    yield from SUITES
    if (REPORTS / GPU / RUNS_FILE).is_file():
        yield GPU


def read_ended_runs() -> Iterator[tuple[Any, Request]]:
    """Yield the records that succeeded, with their requests; each has its suite, its place in the table, and of the
    other columns those that a request needs."""
    for suite in suites():
        for place, run in enumerate(read_columns(REPORTS / suite, _COLUMNS)):
            is_study = run.trainer == "study" and not is_missing(run.micro_batch_size)
            # Runs without measured state changed the engine, and are none of the study's strategies.
            is_ended = run.status_state == "ok" and not is_missing(run.params_bytes_device)
            if is_study and is_ended and (request := request_if_any(run)) is not None:
                run.suite, run.place = suite, place
                yield run, request


def read_whole_run(run: Any) -> Any:
    """Return a record of `read_ended_runs` with all columns."""
    row = read_row(REPORTS / run.suite, run.place)
    row.suite = run.suite
    return row


def read_measurement(run: Any, request: Request) -> Measurement:
    """Return a record's measured peak and step time."""
    name = f"{run.suite} {run.run}"
    if not request.box.device.memory_gib:
        evaluated: Literal["never", "between", "last"] = "never"
        if 0 < run.eval_steps < run.steps:
            evaluated = "between"
        elif not is_missing(run.eval_loss_final) and str(run.git_commit).startswith(_WITH_LAST_EVALUATION):
            evaluated = "last"
        return Measurement(
            "own",
            name,
            request,
            run.memory_steady_host_gib * GIB,
            "resident_returned" if run.virtual else "resident",
            evaluated,
        )
    if not is_missing(run.device_memory_cap_gib):
        # A cap limits the allocator, which does not include the context.
        context = predict_memory(request).device_parts["context"] / GIB
        device = dataclasses.replace(request.box.device, visible_gib=run.device_memory_cap_gib + context)
        request = dataclasses.replace(request, box=dataclasses.replace(request.box, device=device))
    if run.status_state != "ok":
        return Measurement("own", name, request, fits=False)
    figures = (run.memory_first_step_allocated_gib, run.memory_steady_allocated_gib)
    peak = max(float(figure) for figure in figures if not is_missing(figure)) * GIB
    # Profiling slows a run down, and no record has the bandwidth of its NVMe.
    is_timed = not (run.virtual or run.profile_steps or request.strategy.uses_nvme)
    return Measurement("own", name, request, peak, step_s=run.step_time_s_median if is_timed else None, fits=True)


@dataclasses.dataclass(frozen=True)
class FigureComparison:
    """One figure of one record and its prediction, in bytes."""

    suite: str
    run: str
    figure: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted > 0)


def compare_run_figures(run: Any) -> Iterator[FigureComparison]:
    """Yield one record's state by kind and place, its total state, and the bytes sent per step."""
    yield from compare_request(run, request_from_record(run))


def compare_request(run: Any, request: Request) -> Iterator[FigureComparison]:
    """Yield the same figures of a record with this request."""
    state, all_measured, all_predicted = predict_state(request), 0.0, 0.0
    for kind in STATE_KINDS:
        for place in STATE_PLACES:
            value = getattr(run, f"{kind}_bytes_{place}")
            measured, expected = 0.0 if is_missing(value) else value, getattr(state, f"{kind}_{place}")
            all_measured, all_predicted = all_measured + measured, all_predicted + expected
            if measured or expected:
                yield FigureComparison(run.suite, run.run, f"{kind}, {place}", measured, expected)
    yield FigureComparison(run.suite, run.run, ALL_STATE, all_measured, all_predicted)
    yield FigureComparison(run.suite, run.run, SENT, ring_bytes(json.loads(run.collectives)), sent_bytes(request))
