"""Rows that receipts give the open benchmark: they have nothing private, and impossible ones are named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from engines import ROOT
from study.benchmark import command
from study.benchmark.contributed import (
    FOLDER,
    BenchmarkRow,
    PredictedRow,
    contributed_page,
    predict_contributed,
    request_of_row,
)
from study.cli import main
from study.config.errors import UserError
from study.host.memory import GIB
from study.predictor.memory import predict_memory
from study.predictor.time import predict_time
from study.receipt.contribution import (
    check_rows,
    file_name,
    least_state_bytes,
    list_problems,
    make_row,
    row_text,
)
from study.receipt.document import ReceiptDocument, read_receipt, write_receipt
from study.receipt.forecast import config_case

RECEIPT = "tests/data/receipts/cuda_ddp.json"
ROWS = sorted((ROOT / FOLDER).iterdir())


def read_example() -> ReceiptDocument:
    return read_receipt(str(ROOT / RECEIPT))


def make_example(**changes: Any) -> BenchmarkRow:
    return make_row(read_example(), RECEIPT).model_copy(update=changes)


@pytest.mark.parametrize("file", ROWS, ids=lambda file: file.name)
def test_each_contributed_row_has_the_schema_and_can_be_true(file: Path) -> None:
    assert dict(check_rows([str(file)])) == {str(file): []}
    row = BenchmarkRow.model_validate_json(file.read_text(encoding="utf-8"))
    assert file.name == file_name(row)


def test_no_two_contributed_rows_are_equal() -> None:
    assert len(ROWS) >= 3
    assert [problems for _, problems in check_rows(list(map(str, ROWS)))] == [[]] * len(ROWS)


@pytest.mark.parametrize("loop", ["plain", "checkpointed", "ddp"])
def test_the_rows_of_the_h200_are_those_of_its_receipts(loop: str) -> None:
    name = f"tests/data/receipts/cuda_{loop}.json"
    row = make_row(read_receipt(str(ROOT / name)), name)
    assert (ROOT / FOLDER / file_name(row)).read_text(encoding="utf-8") == row_text(row)


@pytest.mark.parametrize("loop", ["plain", "checkpointed", "ddp"])
def test_a_row_is_predicted_as_its_receipt(loop: str) -> None:
    name = f"tests/data/receipts/cuda_{loop}.json"
    receipt = read_receipt(str(ROOT / name))
    row = make_row(receipt, name)
    # A row has neither the model's dropout nor its cache of keys and values.
    without: dict[str, Any] = {"dropout": False, "attention_dropout": False, "uses_cache": False}
    request = dataclasses.replace(config_case(receipt).request, **without)
    memory = predict_memory(request)
    item = next(item for item in predict_contributed() if item.file == file_name(row))
    assert item.row == row
    assert item.missing is None
    assert item.peak_gib == pytest.approx(memory.peak_allocated.value / GIB)
    assert item.step_s == pytest.approx(predict_time(request, memory).step_s.value)
    # Peaks of the three rows were predicted within 3 %.
    assert item.peak_gib == pytest.approx(row.peak_gib, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": None}, "no strategy of the study has its settings"),
        ({"strategy": "zero3_tp"}, "no strategy of the study has its settings"),
        ({"optimizer": "Muon"}, "the predictor does not support Muon"),
        ({"params": 10**9}, "has no GPT2LMHeadModel of 1,000,000,000 parameters with its sizes"),
        ({"model_type": None}, "has no GPT2LMHeadModel of 124,046,592 parameters with its sizes"),
    ],
)
def test_a_row_that_is_not_predicted_has_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        request_of_row(make_example(**changes))


def test_other_models_and_engines_of_rows_are_predicted() -> None:
    llama = make_example(
        model_type="llama",
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        intermediate=128,
        vocab=256,
        framework="fsdp1",
        strategy="fsdp2",
        gpus=8,
        weights="bfloat16",
        params=106816,
        trained_params=106816,
    )
    request = request_of_row(llama)
    assert (request.shape.parameters, request.shape.tied) == (106816, False)
    assert (request.precision, request.pure, request.fsdp_version) == ("bf16-engine", True, 1)
    assert (request.box.ranks, request.box.nodes) == (8, 1)
    tied = request_of_row(llama.model_copy(update={"params": 90432, "trained_params": 90432, "framework": "fsdp2"}))
    assert (tied.shape.tied, tied.fsdp_version) == (True, 2)


def test_the_benchmark_has_a_table_of_contributed_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "shipped_predictors", lambda _: [])
    assert main(["benchmark"]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("contributed ") :].splitlines()
    assert len([line for line in table if line.startswith("GPT2LMHeadModel 124 M, ")]) == len(ROWS)
    assert any(line.startswith("GPT2LMHeadModel 124 M, ddp, 8 x 512 x 1  ") for line in table)
    assert main(["benchmark", "--json"]) == 0
    contributed = json.loads(capsys.readouterr().out)["contributed"]
    assert [item["file"] for item in contributed] == [path.name for path in ROWS]
    assert all(item["predicted_peak_gib"] > 0 and item["row"]["step_s"] > 0 for item in contributed)
    unknown = PredictedRow("a.json", make_example(), missing="the predictor does not support Muon")
    assert list(contributed_page([unknown])) == ["a.json is not predicted: the predictor does not support Muon"]
    assert list(contributed_page([])) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"state_gib": 0.5}, "its model state of 0.5 GiB is below the formula's 1.386"),
        ({"state_on_gpu_gib": 2.0}, "of its state are on the GPU"),
        ({"peak_gib": 1.2}, "its peak of 1.2 GiB is below the 1.386 of its state on the GPU"),
        ({"peak_gib": 200.0}, "above the 141 GiB of H200 SXM"),
        ({"gpu_type": "Unlisted card"}, "is not in study/predictor/hardware.yaml"),
        ({"mfu": 1.2}, "its MFU of 1.2 is above 1"),
        ({"mfu": 0.5}, "its MFU is not the 0.07635"),
        ({"mfu": None}, "its MFU is not the 0.07635"),
        ({"tflop_per_step": 100.0}, "above the peak rate of NVIDIA H200 in bfloat16"),
        ({"step_s": 0.02}, "tokens/s in 0.02 s are not the 4,096 of its step"),
        ({"params": 10**9}, "below the formula's"),
    ],
)
def test_a_row_that_cannot_be_true_has_its_reason(changes: dict[str, Any], problem: str) -> None:
    assert list_problems(make_example()) == []
    assert any(problem in text for text in list_problems(make_example(**changes))), list_problems(
        make_example(**changes)
    )


def test_the_least_state_is_that_of_the_stage() -> None:
    facts = {"params": 8, "trained_params": 8, "gpus": 4, "weights": "bfloat16", "optimizer": "AdamW"}

    def least(**changes: Any) -> float:
        return least_state_bytes(make_example(**facts, **changes))

    assert least(framework="ddp") == 8 * (2 + 4)
    assert least(framework="deepspeed", zero_stage=0) == 8 * (2 + 4)
    assert least(framework="deepspeed", zero_stage=2) == 8 * 2 + 8 * 4 / 4
    assert least(framework="deepspeed", zero_stage=3) == least(framework="fsdp2") == 8 * (2 + 4) / 4
    assert least_state_bytes(make_example(**facts | {"optimizer": "SGD"})) == 8 * 2
    # Frozen weights of a quantized model.
    assert least_state_bytes(make_example(**facts | {"trained_params": 2, "lora_rank": 4})) == 8 + 2 * 4


def test_nothing_of_the_machine_or_its_owner_is_in_a_row() -> None:
    receipt = read_example()
    secrets = [
        "/home/alice/llama-private",
        "hf_ABCDEFabcdef",
        "node17.cluster.example.com",
        "/mnt/nvme/alice",
        "alices",
    ]
    config = (receipt.model.config or {}) | {"_name_or_path": secrets[0], "token": secrets[1], "host": secrets[2]}
    settings = {"zero_optimization": {"offload_param": {"nvme_path": secrets[3]}}}
    packages = receipt.packages | {"torch": "2.11.0+cu130", "accelerate": f"1.15.0+{secrets[4]}", "other": secrets[0]}
    receipt = receipt.model_copy(
        update={
            "model": receipt.model.model_copy(update={"config": config, "attention": "alice/kernels"}),
            "engine": receipt.engine.model_copy(update={"settings": settings, "largest_unsharded": secrets[0]}),
            "packages": packages,
            "unavailable": tuple(secrets),
        }
    )
    text = row_text(make_row(receipt, "receipt.json"))
    assert not [secret for secret in (*secrets, "alice") if secret in text]
    row = json.loads(text)
    assert (row["packages"]["torch"], row["packages"]["accelerate"]) == ("2.11.0+cu130", "1.15.0")
    # The day, without the time.
    assert row["date"] == receipt.made_at[:10]


@pytest.mark.parametrize(
    ("part", "update", "problem"),
    [
        ("model", {"name": "/home/alice/model"}, "gives no row: model: "),
        ("engine", {"device": "node17.example.com/gpu"}, "gives no row: gpu_type: "),
        ("engine", {"device": "cpu"}, "is of CPU ranks"),
        ("work", {"sequence_length": None}, "gives no row: seq_length: "),
        ("engine", {"compute_dtype": None}, "gives no row: precision: "),
        ("time", {"step_s": None}, "has no peak, model state or step time"),
        ("memory", {"parts": {"other_tensors": 2**32}}, "has tensors of something else"),
    ],
)
def test_a_receipt_without_a_figure_or_with_other_names_gives_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, update: dict[str, Any], problem: str
) -> None:
    receipt = read_example()
    changed = receipt.model_copy(update={part: getattr(receipt, part).model_copy(update=update)})
    write_receipt(tmp_path / "receipt.json", changed)
    assert main(["receipt", str(tmp_path), "--contribute", "--output", str(tmp_path / "row.json")]) == 2
    assert problem in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["receipt.json"]


def test_the_command_shows_the_row_and_writes_it_only_where_that_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["receipt", str(ROOT / RECEIPT), "--contribute"]
    row = make_example()
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(row_text(row))
    assert "nothing is written" in printed
    assert main([*command, "--json", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == row_text(row)
    written = tmp_path / file_name(row)
    assert written.read_text(encoding="utf-8") == row_text(row)
    assert main(["receipt", "--check_rows", str(written)]) == 0
    assert capsys.readouterr().out == f"{written}: ok\n"
    assert main(["receipt", str(ROOT / RECEIPT), "--output", str(tmp_path)]) == 2
    assert "--output is without --contribute" in capsys.readouterr().err


def test_an_impossible_row_is_shown_and_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt = read_example()
    speed = receipt.speed.model_copy(update={"mfu": 1.5})
    write_receipt(tmp_path / "receipt.json", receipt.model_copy(update={"speed": speed}))
    assert main(["receipt", str(tmp_path), "--contribute", "--output", str(tmp_path / "row.json")]) == 1
    assert "this row cannot be true: its MFU of 1.5 is above 1" in capsys.readouterr().out
    assert not (tmp_path / "row.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("row.json", "{", "is not readable as JSON"),
        ("row.json", "{}", "is not a row: date: Field required"),
        ("row.json", {"host": "node17"}, "is not a row: host: Extra inputs are not permitted"),
        ("row.json", {"packages": {"numpy": "2.0"}}, "is not a row: packages"),
        ("row.json", {"packages": {"torch": "../../etc/passwd"}}, "is not a row: packages.torch"),
        ("row.json", {"peak_gib": float("inf")}, "peak_gib: Input should be a finite number"),
        ("row.json", " " * 9000, "is larger than 8,192 bytes"),
        ("Alice's row.json", {}, "has a name with other characters"),
    ],
)
def test_a_damaged_file_of_a_row_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: Any, problem: str
) -> None:
    file = tmp_path / name
    document = json.loads(row_text(make_example()))
    file.write_text(content if isinstance(content, str) else json.dumps(document | content))
    assert main(["receipt", "--check_rows", str(file)]) == 1
    assert problem in capsys.readouterr().out


def test_two_files_with_one_row_are_named(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file in files:
        Path(file).write_text(row_text(make_example()))
    assert dict(check_rows(files)) == {files[0]: [], files[1]: [f"it has the row of {files[0]}"]}


def test_the_form_of_a_pull_request_names_the_folder_and_the_check() -> None:
    form = (ROOT / ".github" / "PULL_REQUEST_TEMPLATE" / "receipt.md").read_text(encoding="utf-8")
    assert f"`{FOLDER}/`" in form
    assert f"study receipt --check_rows {FOLDER}/*.json" in form
