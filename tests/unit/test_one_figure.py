"""One request has one figure: `advise`, `predict` and `explain` predict the same of the same settings."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from commands import parse
from study.advisor import advise_command, explain, predict_command
from study.advisor.advise import AdviceRequest, Option, advise, candidates
from study.advisor.advise_command import AdviseFlags
from study.advisor.advised_files import write_files
from study.advisor.explain_case import ConfigCase, resolve
from study.advisor.explain_combinations import WRONG_TRAINING
from study.advisor.predict_command import PredictFlags, make_request
from study.advisor.prediction import adapted_notes
from study.advisor.user_settings import read_user_file
from study.advisor.workload import FSDP_FLAGS, Workload
from study.cli import main
from study.config.errors import UserError
from study.config.strategies import STRATEGY_DIRECTORY, STRATEGY_NAMES, WITH_GROUPS
from study.predictor.hardware import HardwareFlags, to_box
from study.predictor.memory import predict_memory
from study.predictor.models import model_shape
from study.predictor.request import Request
from study.predictor.time import device_bytes, predict_time
from study.workloads.presets import PRESETS

COUNT = 200
BOXES = ("A100-40", "2xRTX4090", "4xA100-40", "4xV100-32", "8xT4", "8xH100", "8xH200", "2x8xH100", "8x8xA100-80")
MODELS = [name for name in PRESETS if "tiny" not in name and PRESETS[name].layers <= 40]
STOCK = (
    "ddp",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2_cpu",
    "zero3_cpu_optimizer",
    "zero3_cpu",
    "zero3_nvme_optimizer",
    "zero3_nvme",
    "zero3_cpu_nvme",
    "fsdp2",
)


class Figures(NamedTuple):
    """Figures of one configuration that the three commands print."""

    peak: float
    bound: float
    host: float
    nvme: float
    step_s: float


def figures(request: Request) -> Figures:
    memory = predict_memory(request)
    return Figures(
        device_bytes(memory),
        device_bytes(memory, at_upper=True),
        memory.host_peak.value,
        memory.nvme,
        predict_time(request).step_s.value,
    )


def explained(file: Path, model: str, flags: Sequence[str]) -> ConfigCase:
    """Return the case whose figures `study explain FILE MODEL` prints."""
    options = parse(explain, [str(file), model, *flags])
    workload = Workload.from_options(options, usual_fsdp_version=1)
    shape = workload.adapt(model_shape(model))
    settings, box = explain.program_settings(workload, shape), HardwareFlags.from_options(options).box()
    return resolve(read_user_file(str(file)), shape, options.world_size, settings, box)


# Flags of a request that change a prediction, one choice of each kind, mostly none.
KINDS: tuple[tuple[str, ...], ...] = (
    ("--precision bf16", "--precision fp16", "--precision fp32"),
    (
        "--peft lora",
        "--peft lora --lora_rank 64 --lora_targets all-linear",
        "--peft lora --lora_dropout 0.05",
        "--peft lora --adapters_in_16_bits",
        "--peft lora --quantization 4bit",
        "--peft lora --quantization 4bit --double_quant",
        "--peft lora --quantization 8bit",
        "--peft lora --quantization 4bit --quantized_on_host",
        "--peft lora --fsdp_version 1",
        "--peft lora --fsdp_version 1 --reentrant_units",
        "--peft lora --fsdp_version 1 --fsdp_mixed_units",
        "--fsdp_version 1",
        "--sync_each_batch",
        "--with_reference",
        "--peft lora --with_reference",
    ),
    ("--optimizer adamw_8bit", "--optimizer paged_adamw_8bit", "--optimizer lion", "--optimizer adafactor"),
    (
        "--chunked_loss",
        "--loss_kernel same_type",
        "--loss_kernel flash --keeps_outputs",
        "--loss_kernel cut",
        "--keeps_outputs",
        "--compile",
    ),
    ("--attn_implementation eager", "--attn_implementation flash_attention_2"),
    ("--host_memory 512", "--host_memory 64"),
    ("--network_gb_per_s 3", "--bus_gb_per_s 5", "--host_gb_per_s 20", "--nvme_gb_per_s 3,2"),
)


def draws() -> Iterator[tuple[str, list[str], random.Random]]:
    """Yield models and flags of drawn requests, the same in each run."""
    draw = random.Random(20)
    for _ in itertools.count():
        model = draw.choice(MODELS)
        flags = ["--hardware", draw.choice(BOXES)]
        positions = model_shape(model).positions or 4096
        flags += ["--seq_length", str(min(positions, draw.choice((128, 512, 1024, 2048, 4096))))]
        for kind in KINDS:
            if draw.random() < 0.3:
                flags += draw.choice(kind).split()
        yield model, flags, draw


def questions() -> Iterator[tuple[str, list[str], str, AdviseFlags, AdviceRequest]]:
    """Yield drawn requests that `study advise` accepts, each with a strategy that it tries."""
    for model, flags, draw in draws():
        batch = draw.choice((1, 2, 4, 8)) * to_box(flags[1]).ranks
        words = [model, *flags, "--global_batch_size", str(batch)]
        words += draw.choice(([], [], ["--gradient_checkpointing", "on"], ["--gradient_checkpointing", "off"]))
        options = parse(advise_command, words)
        # A GPU without bf16, or an optimizer that an engine does not take.
        with contextlib.suppress(UserError):
            requested = AdviseFlags.from_options(options)
            question = advise_command.build_advice_request(requested)
            yield model, flags, draw.choice(candidates(question)), requested, question


def work_flags(request: Request) -> list[str]:
    flags = ["--micro_batch", str(request.micro_batch), "--accumulation", str(request.accumulation)]
    return flags + ["--gradient_checkpointing"] * request.gradient_checkpointing


def predicted(words: Sequence[str]) -> Request:
    """Return the request whose figures `study predict` prints."""
    return make_request(PredictFlags.from_options(parse(predict_command, words)))


def flags_of_file(flags: Sequence[str], option: Option) -> list[str]:
    """Return the flags of `study explain` for the file of an option, which has the precision and the engine itself."""
    left_out = ("--precision",) if option.request.strategy.is_fsdp else ("--precision", "--fsdp_version")
    flags_of_engine = list[str]()
    for before, word in zip(["", *flags], flags, strict=False):
        is_switch = word.removeprefix("--") in FSDP_FLAGS and not option.request.strategy.is_fsdp
        if not is_switch and word not in left_out and before not in left_out:
            flags_of_engine.append(word)
    if option.request.loads_on_host and "--quantized_on_host" not in flags:
        flags_of_engine.append("--quantized_on_host")
    if option.request.sync_each_batch and "--sync_each_batch" not in flags:
        flags_of_engine.append("--sync_each_batch")
    return flags_of_engine


def figures_of_advised_files(
    option: Option, model: str, flags: list[str], requested: AdviseFlags, folder: Path
) -> dict[str, Figures]:
    """Return each command's figures of the settings that are advised: of the printed command and the written files."""
    work = work_flags(option.request)
    files = write_files(option, folder, "nvme", model)
    command = shlex.split(advise_command.predict_words(option.request, requested))
    return {
        "advise": figures(option.request),
        "predict": figures(predicted(command[2:])),
        "explain": figures(explained(files.accelerate, model, [*flags_of_file(flags, option), *work]).request),
    }


def faults_of_advised_files(option: Option, model: str, flags: list[str], file: Path) -> list[str]:
    """Return the messages of `study explain` on settings that silently train something else."""
    case = explained(file, model, [*flags_of_file(flags, option), *work_flags(option.request)])
    return [it.message for it in case.findings if it.rule == WRONG_TRAINING and it.kind == "conflict"]


def figures_of_shipped_file(option: Option, model: str, flags: list[str]) -> dict[str, Figures]:
    """Return the figures of the strategy's file in accelerate_configs/, which is predicted without --fitted."""
    work, engine_flags = work_flags(option.request), flags_of_file(flags, option)
    precision = option.request.precision.removesuffix("-engine")
    stock = predicted([model, *engine_flags, "--precision", precision, "--strategy", option.name, *work])
    # study/train.py adapts these two settings of its files at the launch; a page of `predict` names them.
    if [*adapted_notes(stock)]:
        return {"predict": figures(stock)}
    half = ["--precision", "no" if precision == "fp32" else precision]
    ranks = ["--world_size", str(stock.box.ranks)]
    file = STRATEGY_DIRECTORY / f"{option.name}.yaml"
    case = explained(file, model, [*engine_flags, *work, *half, *ranks])
    return {"predict": figures(stock), "explain": figures(case.request)}


def test_two_hundred_requests_have_one_figure_in_every_command(tmp_path: Path) -> None:
    different, wrong, drawn_names, drawn_flags, drawn_work = [], [], set(), set(), set()
    for number, (model, flags, name, requested, question) in enumerate(itertools.islice(questions(), COUNT)):
        (option,) = advise(question, [name]).options
        advised = figures_of_advised_files(option, model, flags, requested, tmp_path / str(number))
        (file,) = (tmp_path / str(number)).glob("*.yaml")
        if faults := faults_of_advised_files(option, model, flags, file):
            wrong.append((model, flags, name, faults))
        by_file = [advised]
        if option.request.fsdp_version == 2:
            # The file of FSDP is one of version 2.
            by_file.append(figures_of_shipped_file(option, model, flags))
        for by_command in by_file:
            if len(set(by_command.values())) > 1:
                different.append((model, flags, name, work_flags(option.request), by_command))
        drawn_names.add(name)
        drawn_flags.update(flags)
        drawn_work.add((option.request.accumulation > 1, option.request.gradient_checkpointing))
    assert different == []
    # Nothing is a candidate that the tested combinations call wrong.
    assert wrong == []
    assert drawn_names >= {*STOCK, "hsdp", "zero3_hpz", "single"}
    assert drawn_work == set(itertools.product((False, True), repeat=2))
    assert drawn_flags >= {word for kind in KINDS for flag in kind for word in flag.split()}


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("qwen2.5-7b", ["--hardware", "2xRTX4090", "--host_memory", "128"]),
        ("llama-3.1-8b", ["--hardware", "4xA100-40", "--seq_length", "4096"]),
        ("gpt2-xl", ["--hardware", "8xT4", "--peft", "lora"]),
    ],
)
def test_the_printed_figures_of_a_recommendation_are_those_of_the_command_that_it_prints(
    model: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures_of_memory = r"([\d.,]+) of ([\d.]+) GiB \(90 % bound ([\d.,]+)\)"

    def first_line(*words: str) -> str:
        assert main([*words]) == 0
        return capsys.readouterr().out

    advised_page = first_line("advise", model, *flags)
    command = next(line for line in advised_page.splitlines() if line.startswith("  study predict "))
    predicted = first_line(*shlex.split(command)[1:])
    files = first_line("advise", model, *flags, "--output", str(tmp_path))
    config = next(line for line in files.splitlines() if line.startswith("written: ")).split()[1]
    words = shlex.split(command)
    work = words[words.index("--micro_batch") :]
    shared = [word for word in work if word != "--hub"]
    hardware = ["--hardware", flags[1]]
    explained_page = first_line("explain", config, model, *hardware, *shared)
    by_command = [re.search(figures_of_memory, page) for page in (advised_page, predicted, explained_page)]
    assert by_command[0] is not None
    assert by_command[1] is not None
    assert by_command[2] is not None
    assert by_command[0].groups() == by_command[1].groups() == by_command[2].groups()
    step = re.search(r"about ([\d.,]+ m?s) a step", predicted)
    assert step is not None
    assert f"What takes the time of a step? {step[1]}" in explained_page
    host = re.search(r"host ([\d.,]+) GiB a node, predicted", explained_page)
    assert host is not None
    assert f"{host[1]} GiB" in predicted
    if "host memory" in advised_page.splitlines()[1]:
        assert f"{host[1]} GiB of host memory" in advised_page


@pytest.mark.parametrize(
    ("model", "count"),
    [("gpt-1t", "1,010 B"), ("llama-3.1-8b", "8.03 B"), ("gpt2", "0.124 B"), ("bert-tiny", "2.76 M")],
)
def test_advice_and_prediction_print_one_number_of_parameters(
    model: str, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["advise", model, "--hardware", "8x8xH100"])
    assert f"{model} ({count} parameters)" in capsys.readouterr().out
    main(["predict", model, "--strategy", "zero3", "--hardware", "8x8xH100"])
    assert f"{model} ({count}), zero3" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", [name for name in STRATEGY_NAMES if name not in {"single", *WITH_GROUPS}])
def test_a_prediction_names_the_moment_and_the_parts_of_its_peak(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["predict", "llama-3.2-1b", "--strategy", strategy, "--hardware", "2x8xH100"])
    page = capsys.readouterr().out
    assert re.search(r"at its peak, (in|at|after|before) (the )?[a-z' ]+, GiB$", page, re.MULTILINE)
    peak = re.search(r"([\d.]+) of 78.8 GiB", page)
    parts = re.findall(r"^  (\w[\w ]*?) +([\d.,]+)  .*█", page, re.MULTILINE)
    assert peak is not None
    # Each part is printed with three digits.
    total = sum(float(size.replace(",", "")) for _, size in parts)
    assert total == pytest.approx(float(peak[1]), rel=0.01)


@pytest.mark.parametrize("written", ["128", "128G", "128 GiB", "0.125TiB", "137.438953472 GB"])
def test_sizes_are_read_as_people_write_them(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "qwen2.5-1.5b", "--strategy", "zero3_cpu", "--hardware", "2xH100"]
    assert main([*words, "--seq_length", "4k", "--host_memory", written]) == 0
    as_written = capsys.readouterr().out
    assert main([*words, "--seq_length", "4096", "--host_memory", "128"]) == 0
    assert as_written == capsys.readouterr().out


@pytest.mark.parametrize(
    ("box", "notice"),
    [("32xH100", "notice: 32xH100 is one machine with 32 GPUs; 4x8xH100 is 4 nodes of 8\n"), ("4x8xH100", "")],
)
def test_a_machine_with_more_gpus_than_most_is_named(box: str, notice: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "gpt2", "--strategy", "zero3", "--hardware", box])
    assert capsys.readouterr().err == notice
