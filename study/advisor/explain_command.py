"""`study explain CONFIG MODEL`: a user's own settings, read against a model and a number of ranks."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

from study.advisor.explain import Cost, Explanation, answers, costs, gib
from study.advisor.explain_case import ConfigCase, Workload, settle
from study.advisor.explain_findings import findings
from study.advisor.user_settings import ZERO, read_user_file
from study.config.errors import printable
from study.predictor.boxes import whole
from study.predictor.memory import predict_memory
from study.predictor.request import Memory
from study.predictor.shape import model_shape, sequence_length

_COUNT = functools.partial(whole, most=1_000_000, what="number")
EPILOG = """\
CONFIG is a DeepSpeed JSON or an Accelerate YAML, with any setting that DeepSpeed 0.19.8 knows, "auto" too. Nothing is
run, and nothing is fetched without --hub. GiB are 2**30 bytes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", metavar="CONFIG", help="a DeepSpeed JSON or an Accelerate YAML")
    add("model", metavar="MODEL", help="a preset, a folder with config.json, or its sizes: layers=..,hidden=..,..")
    add("--world-size", type=_COUNT, metavar="N", help="ranks of the whole job; else what an Accelerate file says")
    add("--precision", choices=("no", "bf16", "fp16"), help="what mixed precision is where the file leaves it open")
    add("--micro-batch", type=_COUNT, metavar="B", help="samples of one pass, where the file says auto; by default 1")
    add("--accumulation", type=_COUNT, metavar="N", help="passes of a step, where the file says auto; by default 1")
    add(
        "--seq-length",
        type=_COUNT,
        metavar="T",
        help="tokens of a sample; by default 1024, or all that it takes",
    )
    add("--gradient-checkpointing", action="store_true", help="the program makes activations again")
    add("--hub", action="store_true", help="ask the hub for the model's config.json")
    add("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")


def run(options: argparse.Namespace) -> int:
    file = read_user_file(options.config)
    shape = model_shape(options.model, ask_hub=options.hub)
    length = sequence_length(shape, options.seq_length, 1024)
    work = Workload(
        length, options.micro_batch, options.accumulation, options.gradient_checkpointing, options.precision
    )
    case = settle(file, shape, options.world_size, work)
    case = dataclasses.replace(case, findings=tuple(findings(case)))
    asked, whole, settings = answers(case), predict_memory(case.request), costs(case)
    if options.json:
        print(json.dumps(_document(case, settings, asked, whole), indent=2))
    else:
        # Keys and values are the file's.
        print(printable("\n".join(_page(case, settings, asked, whole))))
    return 1 if any(finding.kind == "refused" for finding in case.findings) else 0


def _document(case: ConfigCase, settings: list[Cost], asked: list[Explanation], whole: Memory) -> dict[str, Any]:
    return {
        "file": case.file.name, "launcher": case.file.launcher, "distributed_type": case.file.distributed_type,
        "model": case.shape.name, "parameters": case.shape.parameters, "world_size": case.ranks,
        "precision": case.request.precision, "zero_stage": case.stage if case.file.deepspeed is not None else None,
        "sequence_length": case.request.sequence_length, "micro_batch": case.request.micro_batch,
        "accumulation": case.request.accumulation, "gradient_checkpointing": case.request.gradient_checkpointing,
        "settings": [dataclasses.asdict(cost) for cost in settings],
        "findings": [dataclasses.asdict(finding) for finding in case.findings],
        "answers": [dataclasses.asdict(answer) for answer in asked], "memory": dataclasses.asdict(whole),
    }  # fmt: skip


def _page(case: ConfigCase, settings: list[Cost], asked: list[Explanation], whole: Memory) -> Iterator[str]:
    engine = f"DeepSpeed, stage {case.stage}" if case.file.deepspeed is not None else case.request.strategy.name
    yield f"{case.file.name}: {engine}, {case.request.precision}, one of {case.ranks} ranks"
    yield f"{case.shape.name}: {case.shape.parameters:,} parameters, the largest tensor {case.largest.elements:,}"
    request = case.request
    yield (
        f"{request.micro_batch} x {request.sequence_length} tokens, {request.accumulation} pass(es) a step"
        f"{', checkpointed' if request.gradient_checkpointing else ''}"
    )
    if settings:
        yield "\nwhat each setting costs a rank (device, host, drive; - is none; * your file does not say it)"
    for cost in settings:
        sizes = "  ".join(f"{_size(size):>10}" for size in (cost.device, cost.host, cost.nvme))
        name = cost.key.removeprefix(f"{ZERO}.")
        yield f"  {sizes}  {name}={json.dumps(cost.value)}{'' if cost.is_said else '*'}: {cost.says}"
    if case.findings:
        yield "\nwhat does not do what it says"
    for finding in case.findings:
        yield f"  {finding.kind:<8}  {finding.key}: {finding.says}"
    yield "\nwhat a rank holds together, at its peak"
    for part, size in sorted(whole.device_parts.items(), key=lambda item: -item[1]):
        if size > 2**20:
            yield f"  {gib(size):>10}  {part}"
    yield f"  {gib(whole.peak_allocated.value):>10}  allocated at the peak, {gib(whole.peak_reserved.value)} reserved"
    yield f"  {gib(whole.host_peak.value):>10}  of host memory on its machine"
    yield from (f"  {note}" for note in whole.notes)
    for answer in asked:
        yield f"\n{answer.question}\n  {answer.short}"
        yield from (f"  - {line}" for line in answer.because)


def _size(size: float) -> str:
    return "-" if abs(size) < 2**20 / 2 else gib(size) if abs(size) >= 2**29 else f"{size / 2**20:.0f} MiB"
