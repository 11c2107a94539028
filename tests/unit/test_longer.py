"""Features for longer samples: the rows of the advice, and published runs against the predicted peaks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines import ROOT
from study.advisor import advise as rules
from study.advisor.advise import AdviceRequest, advise
from study.advisor.fitted import fit_settings
from study.advisor.long_features import HOST, LOSS, RANKS, SETTINGS, TILES
from study.advisor.longer import LongerRow, LongerSamples, longer_rows
from study.cli import main
from study.config.strategies import read_strategy
from study.config.text import rounded
from study.host.memory import GIB
from study.predictor.hardware import to_box
from study.predictor.memory import checkpoints_on_host_bytes, device_snapshots, pinned_bytes, predict_memory
from study.predictor.micro_batch import predict_activations
from study.predictor.models import model_shape
from study.predictor.request import Request, TrainerSettings
from study.predictor.time import device_bytes, fits, usable_bytes

PUBLISHED = yaml.safe_load((ROOT / "tests" / "data" / "long_samples.yaml").read_text(encoding="utf-8"))
GUIDE = ROOT / "docs" / "advice.md"
LENGTH = 131072
WORDS = {
    "loss_kernel": "Liger's loss and kernels",
    "sequence_ranks": "Ulysses",
    "checkpoints_on_host": "checkpoints on the host",
    "tiled_mlp": "tiled MLP",
}


def make_question(length: int, model: str = "llama-3.1-8b", hardware: str = "8xH100", **changes: Any) -> AdviceRequest:
    usual = {"global_batch": 64, "sequence_length": length, "precision": "bf16"}
    return AdviceRequest(shape=model_shape(model), box=to_box(hardware), **{**usual, **changes})


@functools.cache
def find_rows(length: int) -> tuple[LongerRow, ...]:
    return tuple(longer_rows(advise(make_question(length))))


def make_request(run: dict[str, Any], tokens: int) -> Request:
    ranks = run["features"].get("sequence_ranks", 1)
    return Request(
        shape=model_shape(run["model"]),
        strategy=read_strategy(run["strategy"]),
        box=to_box(run["hardware"]),
        sequence_length=tokens // ranks,
        micro_batch=1,
        accumulation=1,
        precision="bf16-engine",
        gradient_checkpointing=True,
        attention="flash_attention_2",
        expandable_segments=run["page"] == "recipes",
        **run["features"],
    )


def predicted_gib(run: dict[str, Any]) -> float:
    memory = predict_memory(make_request(run, run["tokens"]))
    return (memory.peak_allocated.value if "allocated" in run else device_bytes(memory)) / GIB


@functools.cache
def predicted_length(place: int) -> int:
    """Return the most tokens whose predicted peak fits, in steps of 10,000."""
    run = PUBLISHED["lengths"][place]
    low, high = 0, 4096
    while high - low > 1:
        middle = (low + high) // 2
        request = make_request(run, middle * 10_000)
        fitting = device_bytes(predict_memory(request)) <= usable_bytes(request.box)
        low, high = (middle, high) if fitting else (low, middle)
    return low * 10_000


def make_name(run: dict[str, Any]) -> str:
    features = [words for key, words in WORDS.items() if key in run["features"]] or ["logits"]
    tokens = "" if run in PUBLISHED["lengths"] else f", {run['tokens']:,} tokens"
    return f"{run['model']}, {run['hardware']}{tokens}: {', '.join(features)}"


def published_rows() -> list[str]:
    rows = list[str]()
    for run in PUBLISHED["peaks"]:
        kind = "allocated" if "allocated" in run else "device"
        figures = f"{run[kind]:.1f} GiB {kind} | {predicted_gib(run):.1f}"
        rows.append(f"| [{run['page']}] | {make_name(run)} | {figures} |")
    for place, run in enumerate(PUBLISHED["lengths"]):
        figures = f"{run['tokens']:,} tokens | {predicted_length(place):,}"
        rows.append(f"| [{run['page']}] | {make_name(run)} | {figures} |")
    return [*rows, *(f"[{page}]: {address}" for page, address in PUBLISHED["pages"].items())]


def test_the_guide_has_the_figures_of_published_long_samples() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    missing = [row for row in published_rows() if row not in text]
    assert missing == [], "\n".join(missing)


@pytest.mark.parametrize("run", PUBLISHED["peaks"], ids=make_name)
def test_published_peaks_of_long_samples_are_within_a_sixth(run: dict[str, Any]) -> None:
    assert predicted_gib(run) / (run.get("allocated") or run["device"]) == pytest.approx(1, abs=1 / 6)


def test_a_divided_sample_grows_by_the_published_bytes_per_token() -> None:
    """The difference of two lengths has neither the state nor another constant in it."""
    runs = [run for run in PUBLISHED["peaks"] if run["features"] == {"sequence_ranks": 4}]
    published = runs[-1]["allocated"] - runs[0]["allocated"]
    # The figures have one decimal.
    assert predicted_gib(runs[-1]) - predicted_gib(runs[0]) == pytest.approx(published, abs=0.1)


@pytest.mark.parametrize("place", range(len(PUBLISHED["lengths"])), ids=map(make_name, PUBLISHED["lengths"]))
def test_published_lengths_ran_and_are_near_the_longest_that_fits(place: int) -> None:
    ran = PUBLISHED["lengths"][place]["tokens"]
    assert ran <= predicted_length(place) <= 1.4 * ran


def test_each_row_has_the_features_above_it_and_needs_less() -> None:
    rows = find_rows(LENGTH)
    assert [row.feature for row in rows] == [None, LOSS, RANKS, HOST, TILES]
    settings = [
        (it.loss_kernel, it.sequence_ranks > 1, it.checkpoints_on_host, it.tiled_mlp)
        for it in (row.request for row in rows)
    ]
    assert settings == [
        ("transformers", False, False, False),
        ("liger", False, False, False),
        ("liger", True, False, False),
        ("liger", True, True, False),
        ("liger", True, True, True),
    ]
    peaks, longest = [device_bytes(row.memory) for row in rows], [row.longest for row in rows]
    assert peaks == sorted(peaks, reverse=True)
    assert longest == sorted(longest)
    # Samples over ranks fit without an offload, and that stays.
    assert [row.is_safe for row in rows] == [False, False, True, True, True]
    assert {row.strategy for row in rows[2:]} == {"zero3"}


def test_the_longest_sample_of_a_row_is_the_longest_that_fits() -> None:
    for row in find_rows(LENGTH):
        assert row.longest % 1024 == 0
        for length, is_fitting in ((row.longest, True), (round(1.02 * row.longest), False)):
            longer = dataclasses.replace(row.request, sequence_length=length // row.request.sequence_ranks)
            request = fit_settings(dataclasses.replace(longer, strategy=read_strategy(row.strategy)))
            assert fits(predict_memory(request), request.box, at_upper=True) is is_fitting


def test_checkpoints_on_the_host_leave_three_and_are_pinned_there() -> None:
    above, row = find_rows(LENGTH)[2:4]
    checkpoint = predict_activations(row.request).checkpoint
    # At the loss all of them are there, and later fewer.
    stored = [device_snapshots(it.request)[0].parts["activations"] for it in (above, row)]
    assert stored[0] - stored[1] == (row.request.shape.layers - 3) * checkpoint
    assert checkpoints_on_host_bytes(row.request) == row.request.shape.layers * pinned_bytes(checkpoint)
    more = row.memory.host_parts["train"] - above.memory.host_parts["train"]
    assert more == 8 * checkpoints_on_host_bytes(row.request)


def test_a_host_that_is_too_small_for_checkpoints_is_counted() -> None:
    (row,) = [row for row in find_rows(LENGTH) if row.feature == HOST]
    needed = row.memory.host_peak.value / GIB
    for size, is_enough in ((0.95 * needed, False), (1.05 * needed, True)):
        box = dataclasses.replace(row.request.box, host_gib_per_node=size)
        assert fits(predict_memory(dataclasses.replace(row.request, box=box)), box) is is_enough


def test_the_page_and_the_document_have_the_rows_and_their_settings() -> None:
    words = ["advise", "llama-3.1-8b", "--hardware", "8xH100", "--seq_length", str(LENGTH)]
    page, document = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(page):
        assert main(words) == 1
    with contextlib.redirect_stdout(document):
        main([*words, "--json"])
    entries = json.loads(document.getvalue())["longer"]
    assert [entry["feature"] for entry in entries] == [None, LOSS, RANKS, HOST, TILES]
    text = page.getvalue()
    for entry, row in zip(entries, find_rows(LENGTH), strict=True):
        assert entry["device_bytes"] == device_bytes(row.memory)
        assert entry["longest"] == row.longest
        assert f"{rounded(device_bytes(row.memory) / GIB)}" in text
        assert f"{row.longest:,}" in text
        if row.feature is not None:
            assert f"{row.feature}: {SETTINGS[row.feature]}\n" in text
    assert re.search(r"PCIe copies those of a micro-batch out and back in \d+ ms", text)


@pytest.mark.parametrize(
    ("length", "changes"),
    [
        # The state is the largest part.
        (2048, {}),
        # Two samples fit.
        (2048, {"hardware": "64xH100"}),
        (512, {"model": "bert-base-uncased"}),
    ],
)
def test_no_row_is_printed_if_a_sample_is_not_what_fills_the_memory(length: int, changes: dict[str, Any]) -> None:
    assert list(LongerSamples.find(advise(make_question(length, **changes), ["zero3"])).lines()) == []


@pytest.mark.parametrize("changes", [{"reference_model": True}, {"attention": "eager"}, {"tensor_ranks": 2}])
def test_without_a_prediction_the_settings_are_named_alone(changes: dict[str, Any]) -> None:
    advice = advise(make_question(65536, **changes), ["zero3"])
    first, *lines = map(str, LongerSamples.find(advice).lines())
    assert first == "for longer samples, without a predicted peak for this model or program:"
    assert lines == [f"{feature}: {setting}" for feature, setting in SETTINGS.items()]


def test_features_that_change_nothing_or_that_attention_does_not_allow_have_no_row() -> None:
    def features(length: int, **changes: Any) -> list[str | None]:
        return [row.feature for row in longer_rows(advise(make_question(length, **changes)))]

    chunked = TrainerSettings(loss_kernel="chunked_nll")
    assert features(LENGTH, trainer=chunked) == [None, RANKS, HOST, TILES]
    assert features(65536, hardware="H100") == [None, LOSS, HOST, TILES]
    # Ulysses ignores the window of every second layer.
    assert RANKS not in features(65536, model="gemma-2-9b")
    assert RANKS in features(LENGTH)


def test_ranks_of_a_sample_divide_the_heads() -> None:
    """Qwen2.5-1.5B has 12 query and 2 key heads: 4 ranks repeat these, 8 do not divide those."""
    rows = longer_rows(advise(make_question(1_048_576, model="qwen2.5-1.5b")))
    (row,) = [row for row in rows if row.feature == RANKS]
    assert row.request.sequence_ranks == 4
    shape, tokens = row.request.shape, row.request.sequence_length
    alone = dataclasses.replace(row.request, sequence_ranks=1)
    more = predict_activations(row.request).layer - predict_activations(alone).layer
    # Attention's output a second time, and each of two key heads twice.
    assert more == 2 * tokens * (shape.heads + 2 * shape.key_value_heads) * shape.head_dim


def test_longer_samples_than_the_configuration_names_are_a_scenario_for_rotary_positions() -> None:
    def labels(model: str, length: int) -> list[str]:
        return list(rules._scenarios(make_question(length, model=model)))

    assert model_shape("tinyllama-1.1b").positions == 2048
    assert "4096 tokens per sample" in labels("tinyllama-1.1b", 2048)
    assert model_shape("gpt2").positions == 1024
    assert "2048 tokens per sample" not in labels("gpt2", 1024)


def predict_words(row: LongerRow, length: int, model: str, hardware: str) -> list[str]:
    """Return the command that predicts a row."""
    request = row.request
    words = ["predict", model, "--strategy", row.strategy, "--hardware", hardware, "--seq_length", str(length)]
    words += ["--fitted", "--gradient_checkpointing", "--accumulation", str(request.accumulation)]
    words += ["--loss_kernel", request.loss_kernel]
    words += ["--sp", str(request.sequence_ranks)] * (request.sequence_ranks > 1)
    words += ["--offload_checkpoints"] * request.checkpoints_on_host
    return words + ["--tiled_mlp"] * request.tiled_mlp


def read_document(words: list[str]) -> dict[str, Any]:
    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        assert main([*words, "--json"]) == 0
    document: dict[str, Any] = json.loads(page.getvalue())
    return document


def drawn_questions() -> list[tuple[str, str, int]]:
    draw = random.Random(3)
    models = ("llama-3.1-8b", "qwen2.5-1.5b", "qwen3-4b", "tinyllama-1.1b")
    boxes = ("4xH100", "8xH100", "2x8xH100", "8xA100-40")
    return [(draw.choice(models), draw.choice(boxes), 1024 * draw.randrange(64, 1024)) for _ in range(6)]


@pytest.mark.parametrize(("model", "hardware", "length"), drawn_questions())
def test_the_flags_of_predict_give_the_rows_of_advice_to_the_digit(model: str, hardware: str, length: int) -> None:
    rows = longer_rows(advise(make_question(length, model, hardware), ["zero3", "zero3_cpu"]))
    assert any(row.request.sequence_ranks > 1 and row.request.tiled_mlp for row in rows)
    for row in rows:
        document, expected = read_document(predict_words(row, length, model, hardware)), row.document
        assert document["sequence_length"] == length
        for name in ("strategy", "sequence_ranks", "fits", "device_bytes"):
            assert document[name] == expected[name]
        assert document["memory"] == json.loads(json.dumps(dataclasses.asdict(row.memory)))
        has_time = row.feature in (None, LOSS)
        assert (document["time"] is not None, document["sent_bytes_per_step"] is not None) == (has_time, has_time)


def test_the_page_of_a_divided_sample_has_its_ranks_and_no_speed() -> None:
    page = io.StringIO()
    words = ["predict", "llama-3.1-8b", "--strategy", "zero3", "--hardware", "2x8xH100", "--seq_length", str(LENGTH)]
    with contextlib.redirect_stdout(page):
        main([*words, "--gradient_checkpointing", "--sp", "8", "--tiled_mlp", "--details"])
    text = page.getvalue()
    assert re.match(r"Fits: \S+ of \S+ GiB \(90 % bound \S+\); no step time; predicted\n", text)
    assert f"{LENGTH} tokens per sample over 8 ranks, {TILES}" in text
    assert re.search(r"communication of one rank per step +not predicted\n", text)
    assert f"\n{RANKS}: {SETTINGS[RANKS]}\n{TILES}: {SETTINGS[TILES]}\n" in text
    assert HOST not in text
    assert "tokens/s" not in text
    assert "network traffic" not in text
    assert "MFU" not in text
    assert not re.search(r"^ +step ", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("llama-3.1-8b --sp 3", "--sp 3 does not divide 8 ranks"),
        ("llama-3.1-8b --sp 8 --seq_length 1001", "--sp 8 does not divide 1001 tokens per sample"),
        ("qwen2.5-1.5b --sp 8", "--sp 8 does not divide the 12 query and 2 key heads of qwen2.5-1.5b"),
        (
            "mistral-7b-v0.1 --sp 2 --seq_length 8192",
            "--sp 2 would train mistral-7b-v0.1 without the window of its attention",
        ),
        ("llama-3.1-8b --sp 2 --strategy zero2", "--sp is not predicted with zero2"),
        ("llama-3.1-8b --sp 2 --strategy zero3_hpz", "--sp is not predicted with zero3_hpz"),
        ("llama-3.1-8b --tiled_mlp --strategy fsdp2", "--tiled_mlp is not predicted with fsdp2"),
        ("llama-3.1-8b --sp 2 --with_reference", "--sp is not predicted: there is a reference model"),
        ("llama-3.1-8b --sp 2 --attn_implementation eager", "--sp is not predicted: eager is not a fused attention of"),
        ("llama-3.1-8b --tiled_mlp --tensor_parallel 2", "--tiled_mlp is not predicted: ranks share the tensors of a"),
        ("bert-base-uncased --sp 2", "--sp is not predicted: bert-base-uncased is not a language model of the table"),
        ("llama-3.1-8b --offload_checkpoints", "--offload_checkpoints has no effect without gradient checkpointing"),
        ("llama-3.1-8b --tiled_mlp --peft lora", "--tiled_mlp is not predicted with adapters"),
        ("llama-3.1-8b --sp 2 --measured strategy=zero3,step_s=1", "a measured run is not predicted with features"),
    ],
)
def test_features_that_are_impossible_or_not_predicted_are_refused_in_one_line(
    words: str, refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "--strategy", "zero3", "--hardware", "8xH100", *shlex.split(words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {refusal}")
    assert error.count("\n") == 1


def test_one_rank_of_a_sample_is_no_division() -> None:
    words = ["predict", "llama-3.1-8b", "--strategy", "zero2", "--hardware", "8xH100"]
    assert read_document([*words, "--sp", "1"]) == read_document(words)


ULYSSES = """\
distributed_type: DEEPSPEED
num_processes: 8
mixed_precision: bf16
deepspeed_config: {{deepspeed_config_file: {file}}}
parallelism_config: {{parallelism_config_sp_size: {ranks}, parallelism_config_sp_backend: deepspeed}}
"""


def explain_ulysses(folder: Path, model: str, ranks: int, stage: int = 3, **settings: Any) -> dict[str, Any]:
    inner, outer = folder / "ds.json", folder / "ulysses.yaml"
    zero = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 1, **settings}
    inner.write_text(json.dumps({"bf16": {"enabled": True}, **zero}), encoding="utf-8")
    outer.write_text(ULYSSES.format(file=inner, ranks=ranks), encoding="utf-8")
    words = ["explain", str(outer), model, "--hardware", "8xH100", "--seq_length", str(LENGTH)]
    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        main([*words, "--gradient_checkpointing", "--json"])
    document: dict[str, Any] = json.loads(page.getvalue())
    return document


def ulysses_findings(document: dict[str, Any]) -> list[str]:
    """Return the messages about the figures."""
    names = ("noted/sp_size", "noted/not-modelled")
    findings = [item for item in document["findings"] if item["key"] == "parallelism_config.sp_size"]
    return [item["message"] for item in findings if item["id"] in names]


def test_a_file_with_ulysses_is_explained_as_the_flag_predicts_it(tmp_path: Path) -> None:
    document = explain_ulysses(tmp_path, "llama-3.1-8b", 8)
    assert (document["sequence_length"], document["sequence_ranks"]) == (LENGTH, 8)
    words = ["predict", "llama-3.1-8b", "--strategy", "zero3", "--hardware", "8xH100", "--seq_length", str(LENGTH)]
    predicted = read_document([*words, "--gradient_checkpointing", "--sp", "8"])
    for name in ("activations", "logits"):
        assert document["memory"]["device_parts"][name] == predicted["memory"]["device_parts"][name]
    (message,) = ulysses_findings(document)
    text = "8 ranks divide the tokens of each sample: a step trains on the samples of 1 rank"
    assert message == f"{text}; no step time is predicted"
    assert "What takes the time of a step?" not in [answer["question"] for answer in document["answers"]]


def test_a_global_batch_under_ulysses_is_that_of_its_groups(tmp_path: Path) -> None:
    assert explain_ulysses(tmp_path, "llama-3.1-8b", 4, train_batch_size=8)["micro_batch"] == 4
    assert explain_ulysses(tmp_path, "llama-3.1-8b", 1, train_batch_size=8)["micro_batch"] == 1


@pytest.mark.parametrize(
    ("model", "ranks", "stage", "reason"),
    [
        ("llama-3.1-8b", 3, 3, "sp_size 3 does not divide 8 ranks"),
        ("qwen2.5-1.5b", 8, 3, "sp_size 8 does not divide the 12 query and 2 key heads of qwen2.5-1.5b"),
        ("llama-3.1-8b", 8, 2, "at stage 2"),
    ],
)
def test_a_file_with_ulysses_that_is_not_predicted_says_why(
    tmp_path: Path, model: str, ranks: int, stage: int, reason: str
) -> None:
    document = explain_ulysses(tmp_path, model, ranks, stage)
    assert document["sequence_ranks"] == 1
    (message,) = ulysses_findings(document)
    assert message.startswith(reason)
    assert message.endswith("; not modelled: the figures are without it")


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("predict llama-3.1-8b --strategy zero3 --sp_size 8", "it is --sp here"),
        ("predict llama-3.1-8b --strategy zero3 --activation_offloading", "it is --offload_checkpoints here"),
        ("advise llama-3.1-8b --sp_size 8", "study predict has --sp"),
        ("advise llama-3.1-8b --tiled_mlp", "study predict has --tiled_mlp"),
    ],
)
def test_names_of_other_programs_and_commands_lead_to_the_flag(
    command: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main([*command.split(), "--hardware", "8xH100"]) == 2
    assert f"To fix it: {fix};" in capsys.readouterr().err
