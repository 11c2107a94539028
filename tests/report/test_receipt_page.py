"""Faults, pages, comparisons and the command of a receipt, from facts alone."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from study.cli import main
from study.config.places import REPOSITORY
from study.receipt.changes import predict_changes, repeat_prediction
from study.receipt.compare import confounded_by
from study.receipt.document import (
    TIME_PARTS,
    CollectiveTime,
    CollectiveTraffic,
    EngineFacts,
    Fault,
    ForecastRow,
    HostFacts,
    MeasuredForecast,
    ModelFacts,
    OwnCost,
    PeakFacts,
    RankFacts,
    ReceiptDocument,
    StateFacts,
    TimeFacts,
    WorkFacts,
    read_receipt,
    write_receipt,
)
from study.receipt.faults import find_faults, matrix_gap
from study.receipt.forecast import make_forecast
from study.receipt.page import HEIGHT, WIDTH, receipt_lines

MIB = 2**20
RECEIPTS = REPOSITORY / "tests" / "data" / "receipts"
# Loops on one H200, and the name of the engine on their screens.
GPU_LOOPS = {
    "plain": "no engine",
    "checkpointed": "no engine",
    "ddp": "DDP",
    "zero2": "DeepSpeed stage 2",
    "zero3": "DeepSpeed stage 3",
}
# GPT-2 in its smallest size.
GPT2: dict[str, object] = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
PARAMETERS = 124_439_808


def make_receipt(**changes: Any) -> ReceiptDocument:
    """Return a receipt of GPT-2 on two ranks of DDP, with some facts changed."""
    parts = {"forward": 0.3, "backward": 0.5, "communication": 0.1, "optimizer": 0.05, "data": 0.01, "rest": 0.04}
    facts: dict[str, Any] = {
        "made_at": "2026-11-27T12:00:00+00:00",
        "state": "complete",
        "packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "accelerate": "1.15.0", "transformers": "5.23.0"},
        "engine": EngineFacts(
            engine="ddp", strategy="ddp", ranks=2, backend="gloo", optimizer="AdamW", compute_dtype="float32"
        ),
        "model": ModelFacts(name="GPT2LMHeadModel", parameters=PARAMETERS, trained_parameters=PARAMETERS, config=GPT2),
        "work": WorkFacts(steps=20, measured_steps=(6, 7, 8, 9, 10), micro_batches=1, samples=2, sequence_length=64),
        "memory": PeakFacts(
            moment="in the backward pass",
            total_bytes=100 * MIB,
            process_peak_bytes=400 * MIB,
            parts={"parameters": 40 * MIB, "activations": 59 * MIB},
        ),
        "model_state": StateFacts(
            params={"device": 4 * PARAMETERS}, grads={"device": 4 * PARAMETERS}, optimizer={"device": 8 * PARAMETERS}
        ),
        "time": TimeFacts(
            step_s=1.0,
            steps=15,
            parts=parts,
            collectives={"all_reduce": CollectiveTime(in_flight_s=0.3, exposed_s=0.1)},
        ),
        "traffic": {
            "all_reduce": CollectiveTraffic(calls=5, payload_bytes=4 * PARAMETERS, ring_bytes=4.0 * PARAMETERS)
        },
        "reduced_bytes": (4 * PARAMETERS,),
        "ranks": (
            RankFacts(rank=0, busy_s=0.8, peak_bytes=100 * MIB),
            RankFacts(rank=1, busy_s=0.9, peak_bytes=90 * MIB),
        ),
    }
    return ReceiptDocument(**facts | changes)


def make_engine(stage: int, **changes: Any) -> EngineFacts:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": changes.pop("accumulation", 1),
        "zero_optimization": {"stage": stage, **changes.pop("zero", {})},
    }
    facts: dict[str, Any] = {
        "engine": "deepspeed",
        "strategy": f"zero{stage}",
        "ranks": 2,
        "zero_stage": stage,
        "settings": settings,
        "compute_dtype": "float32",
    }
    return EngineFacts(**facts | changes)


def list_faults(receipt: ReceiptDocument) -> dict[str, Fault]:
    return {fault.id: fault for fault in find_faults(receipt)}


def test_a_sound_run_has_no_fault() -> None:
    assert list_faults(make_receipt()) == {}
    accumulated = make_receipt(reduced_bytes=(0, 4 * PARAMETERS))
    assert list_faults(accumulated) == {}
    for stage in (1, 2, 3):
        assert list_faults(make_receipt(engine=make_engine(stage))) == {}


def test_a_release_with_known_wrong_gradients_is_named_only_where_they_are_wrong() -> None:
    work = WorkFacts(steps=20, measured_steps=(6,), micro_batches=2, samples=2, sequence_length=64)
    faulty = make_receipt(engine=make_engine(1, accumulation=2), work=work)
    old = {**faulty.packages, "deepspeed": "0.16.4"}
    sound = list_faults(faulty)
    assert "wrong-gradients" not in sound
    from study.releases.causes import read_causes

    # Each known cause that training survives is stages in a configuration that has it, and not in a release without it.
    checked = 0
    for cause in read_causes():
        if cause.ends_training or cause.gpu == "hidden" or cause.precisions:
            continue
        versions = _version_in(cause.releases)
        strategy = next((name for name in cause.strategies if name in ("zero0", "zero1", "zero2", "zero3")), None)
        if versions is None or strategy is None:
            continue
        receipt = faulty.model_copy(
            update={"packages": old | versions, "engine": make_engine(int(strategy[-1]), accumulation=2)}
        )
        if cause.optimizer == "muon":
            assert cause.title not in " ".join(fault.says for fault in find_faults(receipt))
            receipt = with_muon(receipt)
        assert cause.title in " ".join(fault.says for fault in find_faults(receipt) if fault.id == "wrong-gradients")
        checked += 1
    assert checked >= 5


def with_muon(receipt: ReceiptDocument) -> ReceiptDocument:
    return receipt.model_copy(update={"engine": receipt.engine.model_copy(update={"optimizer": "MuonWithAuxAdam"})})


def test_deepspeeds_muon_under_ddp_is_named_and_torchs_is_not() -> None:
    receipt = make_receipt(packages={**make_receipt().packages, "deepspeed": "0.19.6"})
    assert "wrong-gradients" not in list_faults(receipt)
    assert list_faults(with_muon(receipt))["wrong-gradients"].says == (
        "deepspeed 0.19.6 computes other updates than Muon here: Muon's step is that of SGD"
    )
    torchs_muon = receipt.engine.model_copy(update={"optimizer": "Muon"})
    assert "wrong-gradients" not in list_faults(receipt.model_copy(update={"engine": torchs_muon}))


def test_a_configuration_outside_of_the_matrix_has_the_faults_of_its_stage() -> None:
    packages = {**make_receipt().packages, "deepspeed": "0.19.5"}
    work = WorkFacts(steps=20, measured_steps=(6,), micro_batches=2, samples=2, sequence_length=64)
    offload = {"offload_optimizer": {"device": "cpu"}}
    engine = make_engine(1, strategy=None, accumulation=2, zero=offload, offload_optimizer="cpu")
    says = list_faults(make_receipt(engine=engine, packages=packages, work=work))["wrong-gradients"].says
    assert says.endswith("the gradient is divided by the accumulation steps twice (measured under zero1)")
    assert matrix_gap(engine) == "stage 1 with optimizer on the host"
    assert matrix_gap(make_engine(1)) is None
    assert matrix_gap(make_receipt().engine) is None


def test_a_combination_of_settings_that_trains_something_else_is_named_on_the_releases_that_have_it() -> None:
    offload = {"device": "cpu", "pin_memory": False}
    zenflow = make_engine(2, zero={"offload_optimizer": offload, "zenflow": {"topk_ratio": 0.1}})
    fault = list_faults(make_receipt(engine=zenflow))["wrong-combination"]
    assert "transposes" in fault.says
    assert fault.fix == "use DeepSpeed 0.19.5 with ZenFlow, or stage 3"
    earlier = make_receipt(engine=zenflow, packages={"deepspeed": "0.19.6", "torch": "2.13.0"})
    assert "wrong-combination" not in list_faults(earlier)
    # By the source, as `study releases` and `study explain` have it; 0.19.8 is right.
    on_host = make_engine(2, optimizer="MuonWithAuxAdam", offload_optimizer="cpu", zero={"offload_optimizer": offload})
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "gradient_clipping": 0.0}
    muon_engine = on_host.model_copy(update={"settings": {**(on_host.settings or {}), **muon}})
    packages = make_receipt().packages
    older, newest = (
        list_faults(make_receipt(engine=muon_engine, packages={**packages, "deepspeed": release}))
        for release in ("0.19.2", "0.19.8")
    )
    assert "Muon's step with the optimizer on the host is that of SGD" in older["wrong-combination"].says
    assert "wrong-combination" not in newest
    # A cause is a fault by itself.
    accumulating = make_receipt(
        engine=make_engine(1, accumulation=2),
        packages={**packages, "deepspeed": "0.19.5"},
        work=WorkFacts(steps=20, measured_steps=(6,), micro_batches=2, samples=2, sequence_length=64),
    )
    assert "divided by the accumulation steps twice" in list_faults(accumulating)["wrong-gradients"].says
    assert "wrong-combination" not in list_faults(accumulating)
    # Whether a run resumes is not in its settings.
    nvme = make_engine(3, zero={"offload_optimizer": {"device": "nvme", "nvme_path": "/local"}})
    assert "wrong-combination" not in list_faults(make_receipt(engine=nvme))


def _version_in(releases: Any) -> dict[str, str] | None:
    """Return tested releases that a cause is in; None if it names a package whose releases are not in the grid."""
    from packaging.specifiers import SpecifierSet

    from study.releases.causes import GRID

    rows = json.loads(GRID.read_text(encoding="utf-8"))["releases"]
    versions = {}
    for package, specifier in releases.items():
        candidates = [row["DeepSpeed"] for row in rows] if package == "deepspeed" else ["1.15.0", "2.13.0"]
        match = next((it for it in candidates if SpecifierSet(specifier).contains(it)), None)
        if match is None:
            return None
        versions[package] = match
    return versions


@pytest.mark.parametrize(
    ("stage", "zero", "facts", "says"),
    [
        (2, {"offload_param": {"device": "cpu"}}, {"offload_param": "cpu"}, "offload_param: stage 2 does not use it"),
        (0, {"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": "cpu"}, "offload_optimizer: "),
        (
            2,
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
            {"offload_optimizer": "nvme"},
            "stages 1 and 2 cannot use NVMe",
        ),
    ],
)
def test_an_offload_without_effect_is_named(stage: int, zero: Any, facts: Any, says: str) -> None:
    fault = list_faults(make_receipt(engine=make_engine(stage, zero=zero, **facts)))["offload-without-effect"]
    assert says in fault.says
    assert fault.fix
    used = make_engine(
        3,
        zero={"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        offload_param="cpu",
        offload_optimizer="cpu",
    )
    assert "offload-without-effect" not in list_faults(make_receipt(engine=used))


def test_each_stage_is_told_from_a_forgotten_no_sync() -> None:
    reduced = (4 * PARAMETERS,) * 3
    work = WorkFacts(steps=20, measured_steps=(6,), micro_batches=3, samples=2, sequence_length=64)
    stages = {
        stage: "forgotten-no-sync"
        in list_faults(make_receipt(engine=make_engine(stage), work=work, reduced_bytes=reduced))
        for stage in (0, 1, 2, 3)
    }
    # Stages 2 and 3 shard gradients, and reduce those of each micro-batch.
    assert stages == {0: True, 1: True, 2: False, 3: False}


def test_ranks_without_an_engine_are_named() -> None:
    engine = EngineFacts(engine="none", strategy="single", ranks=2)
    assert (
        "nothing keeps equal"
        in list_faults(make_receipt(engine=engine, traffic={}, reduced_bytes=()))["no-engine"].says
    )


def test_a_prediction_stands_beside_what_was_measured_and_a_difference_is_named() -> None:
    exact = make_forecast(make_receipt())
    assert {row.figure: row.is_outside for row in exact.comparisons if row.low is not None} == {
        "parameters": False,
        "optimizer state": False,
        "ring bytes of a step": False,
    }
    doubled = {"all_reduce": CollectiveTraffic(calls=5, payload_bytes=1, ring_bytes=8.0 * PARAMETERS)}
    receipt = make_receipt(traffic=doubled)
    receipt = receipt.model_copy(update={"forecast": make_forecast(receipt)})
    assert [row.figure for row in receipt.forecast.comparisons if row.is_outside] == ["ring bytes of a step"]
    page = " ".join(" ".join(receipt_lines(receipt, "r")).split())
    assert "OUTSIDE of its stated error: measured is 2 times the prediction" in page


def make_gpu_receipt(moment: str = "in the backward pass", **parts: int | None) -> ReceiptDocument:
    """Return the receipt of DDP on an H200 with its activations split as today; None: without this part."""
    receipt = read_receipt(str(RECEIPTS / "cuda_ddp.json"))
    assert receipt.memory is not None
    # Three tensors of logits in fp32, as its prediction has them.
    logits = 3 * 4 * 8 * 512 * 50257
    split = receipt.memory.parts | {"activations": receipt.memory.parts["activations"] - logits, "logits": logits}
    changed = {part: count for part, count in (split | parts).items() if count is not None}
    memory = receipt.memory.model_copy(update={"moment": moment, "parts": changed})
    receipt = receipt.model_copy(update={"memory": memory})
    return receipt.model_copy(update={"forecast": make_forecast(receipt)})


# Parts of the H200's forecast that are none of its memory.
OTHER_PARTS = {"time: forward and backward", "time: optimizer", "tokens/s"}


def test_a_prediction_of_each_part_stands_beside_it() -> None:
    receipt = make_gpu_receipt()
    parts = {row.figure: row for row in receipt.forecast.parts}
    in_memory = {"memory: buckets", "memory: activations", "memory: logits"}
    assert set(parts) == in_memory | OTHER_PARTS
    for figure in in_memory:
        assert parts[figure].predicted == pytest.approx(parts[figure].measured, rel=0.03), figure
    assert (parts["tokens/s"].unit, parts["tokens/s"].is_outside) == ("tokens/s", False)
    lines = receipt_lines(receipt, "r")
    logits = next(line for line in lines if line.startswith("  logits"))
    assert logits.split()[1:3] == ["2.30", "GiB"]
    assert logits.endswith("(predicted 2.30 GiB)")
    assert "93,542 tokens/s of all ranks (predicted 112," in " ".join(lines)
    assert len(lines) <= HEIGHT
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize(
    "changes",
    [
        {"moment": "in the optimizer step"},
        {"moment": "in the forward pass"},
        # A receipt from before logits were a part, and later moments of the backward pass.
        {"logits": None},
        {"logits": 0},
        {"gradients": 470 * MIB},
    ],
)
def test_a_part_of_another_moment_has_no_prediction(changes: dict[str, Any]) -> None:
    assert {row.figure for row in make_gpu_receipt(**changes).forecast.parts} == OTHER_PARTS


def test_gathered_parameters_and_buckets_have_one_prediction() -> None:
    receipt = make_gpu_receipt(buckets=173 * MIB, gathered=300 * MIB)
    row = next(row for row in receipt.forecast.parts if row.figure == "memory: gathered and buckets")
    assert row.measured == 473 * MIB
    line = next(line for line in receipt_lines(receipt, "r") if line.startswith("  gathered"))
    assert line.endswith("(predicted 473.20 MiB with buckets)")


def test_bytes_of_each_collective_stand_beside_their_prediction() -> None:
    traffic = {
        kind: CollectiveTraffic(calls=3, payload_bytes=1, ring_bytes=2.0 * PARAMETERS)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    engine = EngineFacts(
        engine="fsdp2", ranks=2, optimizer="AdamW", compute_dtype="float32", wrapped_groups=14, root_elements=1
    )
    receipt = make_receipt(engine=engine, traffic=traffic)
    receipt = receipt.model_copy(update={"forecast": make_forecast(receipt)})
    predicted = {row.figure: row.predicted for row in receipt.forecast.parts}
    # Half of the weights for each pass, and of the gradients; norms have no prediction.
    assert set(predicted) == {"ring bytes: all_gather", "ring bytes: reduce_scatter"}
    assert predicted["ring bytes: reduce_scatter"] == pytest.approx(2 * PARAMETERS, rel=0.01)
    total = next(row for row in receipt.forecast.comparisons if row.figure == "ring bytes of a step")
    assert sum(predicted.values()) == pytest.approx(total.predicted)
    page = " ".join(" ".join(receipt_lines(receipt, "r")).split())
    assert "reduce_scatter 237.35 MiB in 3 (predicted 237.35 MiB)" in page


def test_a_receipt_with_everything_fits_one_screen() -> None:
    receipt = make_gpu_receipt(gathered=300 * MIB, gradients=9 * MIB, other_tensors=100 * MIB)
    traffic = {
        kind: CollectiveTraffic(calls=300, payload_bytes=1, ring_bytes=4e11)
        for kind in ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter")
    }
    parts = dict.fromkeys(("forward", "backward", "communication", "offload", "optimizer", "data", "rest"), 0.1)
    rows = tuple(ForecastRow(figure=f"ring bytes: {it}", unit="bytes", predicted=4e11, measured=4e11) for it in traffic)
    forecast = receipt.forecast.model_copy(update={"parts": (*receipt.forecast.parts, *rows)})
    ranks = tuple(RankFacts(rank=rank, busy_s=0.1 + rank, peak_bytes=rank * MIB) for rank in (1, 2))
    changes: dict[str, Any] = {"traffic": traffic, "time": TimeFacts(step_s=1.0, steps=9, parts=parts)}
    changes |= {"forecast": forecast, "ranks": ranks}
    lines = receipt_lines(receipt.model_copy(update=changes), "receipt.json")
    assert len(lines) <= HEIGHT
    assert max(map(len, lines)) <= WIDTH
    assert "more lines" not in lines[-1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config": None}, "has no config of transformers"),
        ({"parameters": 5}, "and this one 5"),
        ({"config": {**GPT2, "model_type": "nobody-has-this"}}, "nobody-has-this"),
    ],
)
def test_what_cannot_be_predicted_has_its_reason(changes: dict[str, Any], reason: str) -> None:
    model = make_receipt().model.model_copy(update=changes)
    forecast = make_forecast(make_receipt(model=model))
    assert forecast.comparisons == ()
    assert forecast.missing is not None
    assert reason in forecast.missing


def test_on_a_gpu_step_time_is_predicted_and_a_card_without_a_name_is_refused() -> None:
    engine = EngineFacts(
        engine="ddp",
        strategy="ddp",
        ranks=2,
        device="NVIDIA H100 80GB HBM3",
        optimizer="AdamW",
        compute_dtype="bfloat16",
    )
    figures = {row.figure: row for row in make_forecast(make_receipt(engine=engine)).comparisons}
    assert figures["step"].unit == "s"
    assert figures["step"].low is not None
    assert figures["peak of tensors"].high is not None
    unknown = engine.model_copy(update={"device": "Unlisted card"})
    assert "is not in the table" in (make_forecast(make_receipt(engine=unknown)).missing or "")


def test_a_make_receipt_many_faults_fits_one_screen() -> None:
    faults = tuple(Fault(id=f"f{number}", says="word " * 60, fix="more " * 30) for number in range(9))
    failures = tuple(f"failure {number}: {'long ' * 50}" for number in range(9))
    lines = receipt_lines(make_receipt(faults=faults, failures=failures), "receipt.json")
    assert len(lines) == HEIGHT
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1] == f"and {lines[-1].split()[1]} more lines: study receipt --details receipt.json"


def test_the_command_prints_a_receipt_and_compares_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    write_receipt(first, make_receipt())
    fault = Fault(id="data-loader-waits", says="a step waits", fix="more num_workers")
    slower = make_receipt(time=TimeFacts(step_s=2.0, steps=15, parts=make_receipt().time.parts), faults=(fault,))
    write_receipt(second, slower)
    assert main(["receipt", str(first)]) == 0
    assert "receipt of DDP, 2 ranks on CPU, float32: GPT2LMHeadModel, 124.44 M parameters" in capsys.readouterr().out
    assert main(["receipt", str(first), str(second)]) == 0
    rows = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["time: step"][-1] == "2"
    assert rows["memory: peak"][-1] == "1"
    assert main(["receipt", str(first), "--strict"]) == 0
    assert main(["receipt", str(second), "--strict"]) == 1
    capsys.readouterr()
    assert main(["receipt", str(first), "--json"]) == 0
    assert ReceiptDocument.model_validate(json.loads(capsys.readouterr().out)) == repeat_prediction(make_receipt())


def test_two_receipts_of_other_work_are_confounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = make_receipt(work=make_receipt().work.model_copy(update={"samples": 4}))
    assert confounded_by(make_receipt(), make_receipt()) == []
    assert confounded_by(make_receipt(), second) == ["tokens of a step (256 and 512)"]
    names = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for name, receipt in zip(names, (make_receipt(), second), strict=True):
        write_receipt(Path(name), receipt)
    assert main(["receipt", *names, "--strict"]) == 3
    assert "confounded by: tokens of a step (256 and 512)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is missing"),
        ("{", "is not readable as JSON"),
        ("[]", "contains a list instead of an object"),
        ('{"version": 2}', "is not a receipt of version 1 (its version is 2)"),
        ('{"version": 1}', "is not a receipt: made_at: Field required"),
    ],
)
def test_what_is_no_receipt_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, problem: str
) -> None:
    file = tmp_path / "receipt.json"
    if content is not None:
        file.write_text(content)
    assert main(["receipt", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert problem in printed.err
    assert "To fix it: " in printed.err


def test_three_receipts_and_an_unmeasured_one_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "receipt.json"
    write_receipt(file, make_receipt(state="too_short"))
    assert main(["receipt", *[str(file)] * 3]) == 2
    assert "3 receipts are given" in capsys.readouterr().err
    assert main(["receipt", str(file), str(file)]) == 2
    assert "has no measured step" in capsys.readouterr().err


def block_of_docs(name: str) -> str:
    text = (REPOSITORY / "docs" / "receipt.md").read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]


def test_the_screen_of_the_docs_is_that_of_a_real_run() -> None:
    file = "tests/data/receipts/ddp.json"
    text = (REPOSITORY / "docs" / "receipt.md").read_text(encoding="utf-8")
    screen = block_of_docs("screen").removeprefix("```text\n").removesuffix("```\n")
    receipt = read_receipt(str(REPOSITORY / file))
    assert screen.splitlines() == receipt_lines(repeat_prediction(receipt), file)
    assert {fault.id for fault in receipt.faults} == {"data-loader-waits", "forgotten-no-sync"}
    # Faults and prediction of today's code are those in the file.
    assert tuple(find_faults(receipt)) == receipt.faults
    assert make_forecast(receipt) == receipt.forecast
    listed = re.findall(r"^\| `([a-z-]+)` \| ", text.partition("## Faults")[2].partition("##")[0], re.MULTILINE)
    source = (REPOSITORY / "study" / "receipt" / "faults.py").read_text(encoding="utf-8")
    assert set(listed) == set(re.findall(r'id="([a-z-]+)"', source))


def read_gpu_rows() -> dict[str, dict[str, Any]]:
    """Return the rows of the loops on an H200: the milliseconds of each micro-batch, with and without a receipt."""
    lines = (RECEIPTS / "cuda_rows.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


@pytest.mark.parametrize("loop", GPU_LOOPS)
def test_receipts_of_a_gpu_are_printed(loop: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"tests/data/receipts/cuda_{loop}.json"
    assert main(["receipt", "--strict", str(REPOSITORY / file)]) == 0
    printed = capsys.readouterr().out
    receipt = read_receipt(str(REPOSITORY / file))
    lines = receipt_lines(repeat_prediction(receipt), file)
    assert len(lines) <= HEIGHT
    assert max(map(len, lines)) <= WIDTH
    assert len(printed.splitlines()) == len(lines)
    assert f"receipt of {GPU_LOOPS[loop]}, 1 rank on NVIDIA H200, bfloat16" in printed
    assert "% attributed" in printed
    assert "of host memory at its peak" in printed
    assert "MFU" in printed or "HFU" in printed
    # The optimizer's step counters are on the host under DeepSpeed, and nothing is offloaded.
    assert "offloaded" not in printed
    # 36 bytes of other tensors have no line.
    assert ("other tensors" in printed) == (loop in ("zero2", "zero3"))
    assert receipt.failures == ()
    assert str(receipt.model_dump()).count("/root") == 0


def test_the_screen_and_the_table_of_a_gpu_are_those_of_its_receipts() -> None:
    file = "tests/data/receipts/cuda_ddp.json"
    screen = block_of_docs("screen of a GPU").removeprefix("```text\n").removesuffix("```\n")
    assert screen.splitlines() == receipt_lines(repeat_prediction(read_receipt(str(REPOSITORY / file))), file)
    assert block_of_docs("table of a GPU").splitlines() == list(gpu_table())
    assert not any(row["equal"] for row in read_gpu_rows().values())


PROGRAMS_OF_OTHERS = ("run_clm", "sft", "dpo", "peft_sft", "nlp_example", "nanogpt", "hello_deepspeed")


def test_programs_of_others_train_the_same_to_the_last_bit_with_and_without_a_receipt() -> None:
    """A row is kept only if all losses and weights are equal; programs with the callback have none."""
    rows = json.loads((RECEIPTS / "programs" / "equal_losses.json").read_text(encoding="utf-8"))
    assert sorted(rows) == ["hello_deepspeed", "nanogpt", "nlp_example"]
    table = [line for line in block_of_docs("foreign programs").splitlines() if line.startswith("| ")][2:]
    for line, row in zip(table, rows.values(), strict=True):
        assert row["losses_of_a_rank"] >= row["steps"] > 10
        assert f"| {row['steps']} | {row['losses_of_a_rank']}, {row['ranks']} ranks | equal to the last bit |" in line


def test_the_docs_have_the_whole_receipts_of_programs_of_others() -> None:
    screens = re.findall(r"```text\n(.*?)```\n", block_of_docs("foreign programs"), re.DOTALL)
    files = [RECEIPTS / "programs" / f"{name}.txt" for name in PROGRAMS_OF_OTHERS]
    assert screens == [file.read_text(encoding="utf-8") for file in files]
    for screen in screens:
        assert screen.startswith("receipt of ")
        assert "% attributed" in screen
        # To its last line.
        assert "in the measured steps" in " ".join(screen.split())
        assert len(screen.splitlines()) <= HEIGHT
        assert "failed inside the receipt" not in screen
        # No path of a machine.
        assert not re.search(r"(^|\s)/\w", screen)


def older_table() -> Iterator[str]:
    """Yield the rows of the table on older releases."""
    yield "| torch | DeepSpeed | Accelerate | transformers | engine | losses | attributed | not seen |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for line in (RECEIPTS / "older.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        releases = [
            row["packages"][name].partition("+")[0] for name in ("torch", "deepspeed", "accelerate", "transformers")
        ]
        missing = [text for text in row["missing"] if not text.startswith("the allocator's slack")]
        losses = "equal" if row["equal"] else "differ"
        cells = (*releases, row["engine"], losses, f"{100 * row['attributed']:.1f} %", "; ".join(missing) or "-")
        yield f"| {' | '.join(cells)} |"


def test_the_table_of_older_releases_is_that_of_its_rows() -> None:
    assert block_of_docs("table of older releases").splitlines() == list(older_table())
    rows = [json.loads(line) for line in (RECEIPTS / "older.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 23
    assert all(row["equal"] and row["attributed"] >= 0.95 and row["communication_s"] > 0 for row in rows)


def test_the_docs_show_the_logits_of_a_real_run_with_their_prediction() -> None:
    file = "tests/data/receipts/logits.json"
    receipt = read_receipt(str(REPOSITORY / file))
    block = block_of_docs("screen of logits").removeprefix("```text\n").removesuffix("```\n")
    assert block in "\n".join(receipt_lines(receipt, file))
    assert make_forecast(receipt) == receipt.forecast
    assert receipt.memory is not None
    assert receipt.memory.parts["logits"] == 3 * 4 * 2 * 64 * 8192
    assert "(predicted 12.00 MiB)" in block


def test_the_text_on_the_overhead_has_the_figures_of_its_table() -> None:
    rows = [line.split("|")[1:-1] for line in block_of_docs("table of the overhead").splitlines()[2:]]
    assert len(rows) == 4
    time_ends, cpu_ends = ([[float(end) for end in row[column].split(" to ")] for row in rows] for column in (3, 5))
    assert all(low < 1 < high for low, high in time_ends)
    low, high = min(low for low, _ in time_ends), max(high for _, high in time_ends)
    text = " ".join((REPOSITORY / "docs" / "receipt.md").read_text(encoding="utf-8").split())
    assert f"Each interval of the time includes 1; they reach from {low} to {high}." in text
    largest = max(abs(float(row[4]) - 1) for row in rows)
    assert f"CPU time differs by {largest:.1%} at most".replace("%", " %") in text
    assert [low <= 1 <= high for low, high in cpu_ends] == [False, True, True, True]
    (low, high), *_ = cpu_ends
    assert f"under DDP by more than its interval, {100 * (low - 1):.1f} to {100 * (high - 1):.1f} %." in text
    stated = max(float(row[6].strip(" %")) for row in rows)
    assert f"The receipt's clock states {stated} % at most." in text


def gpu_table() -> Iterator[str]:
    """Yield the rows of the table on overhead, attributed bytes and predictions on an H200."""
    yield (
        "| loop | step, ms | watched step, s | profiled step, ms | added, s | later steps | attributed"
        " | peak / predicted | step / predicted |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for loop, row in read_gpu_rows().items():
        receipt = read_receipt(str(RECEIPTS / f"cuda_{loop}.json"))
        memory, micro_batches = receipt.memory, receipt.work.micro_batches
        assert memory is not None
        assert micro_batches is not None
        with_one, without = (
            [sum(row[name][begin : begin + micro_batches]) for begin in range(0, len(row[name]), micro_batches)]
            for name in ("times_with_ms", "times_without_ms")
        )
        step, (profiled, watched) = statistics.median(without[5:]), with_one[8:10]
        other_bytes = memory.parts["other_tensors"]
        attributed = (sum(memory.parts.values()) - other_bytes) / (memory.total_bytes - other_bytes)
        # Of the predictor of that day.
        predicted = {it.figure: it.predicted for it in receipt.forecast.comparisons}
        peak = (memory.total_bytes - other_bytes) / predicted["peak of tensors"]
        cells = [
            f"{step:.3g}",
            f"{watched / 1e3:.2f}",
            f"{profiled:.0f}",
            f"{(watched + profiled - 2 * step) / 1e3:.2f}",
            f"{statistics.median(with_one[10:]) / statistics.median(without[10:]):.2f}",
            f"{100 * attributed:.1f} %",
            f"{peak:.2f}",
            f"{(receipt.time.step_s or 0) / predicted['step']:.2f}",
        ]
        yield f"| `{loop}` | {' | '.join(cells)} |"


def test_what_is_offloaded_is_told_from_counters_on_the_host() -> None:
    def optimizer_line(on_device: int, on_host: int) -> str:
        memory = PeakFacts(
            moment="in the backward pass",
            total_bytes=100 * MIB,
            process_peak_bytes=400 * MIB,
            parts={"optimizer": on_device, "activations": 59 * MIB},
            host_parts={"optimizer": on_host},
        )
        lines = receipt_lines(make_receipt(memory=memory), "r")
        return next((" ".join(line.split()) for line in lines if line.startswith("  optimizer  ")), "")

    assert optimizer_line(40 * MIB, 600).startswith("optimizer 40.00 MiB █")
    assert "offloaded" not in optimizer_line(40 * MIB, 600)
    assert optimizer_line(40 * MIB, 2 * MIB).endswith("(2.00 MiB offloaded)")
    # On a GPU the whole optimizer may be on the host.
    assert optimizer_line(0, 40 * MIB) == "optimizer 0 B (40.00 MiB offloaded)"


@pytest.mark.parametrize("loop", ["zero2", "zero3"])
def test_a_peak_with_tensors_of_an_earlier_engine_is_compared_without_them(loop: str) -> None:
    receipt = read_receipt(str(RECEIPTS / f"cuda_{loop}.json"))
    assert [row.figure for row in receipt.forecast.comparisons if row.is_outside] == ["peak of tensors", "step"]
    row = next(row for row in make_forecast(receipt).comparisons if row.figure.startswith("peak"))
    assert row.figure == "peak without others"
    assert not row.is_outside
    assert receipt.memory is not None
    assert row.measured == receipt.memory.total_bytes - receipt.memory.parts["other_tensors"]


def test_a_file_of_an_earlier_predictor_is_compared_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(RECEIPTS / "cuda_zero2.json")
    assert main(["receipt", file]) == 0
    page = capsys.readouterr().out
    assert "predicted again (the file has an earlier prediction) and measured:" in page
    peak = next(line for line in page.splitlines() if line.startswith("  peak "))
    assert peak.startswith("  peak without others")
    assert peak.endswith("within its stated error")
    # A file of this release has its prediction.
    new = tmp_path / "receipt.json"
    receipt = make_receipt()
    write_receipt(new, receipt.model_copy(update={"forecast": make_forecast(receipt)}))
    assert main(["receipt", str(new)]) == 0
    assert "\npredicted and measured:\n" in capsys.readouterr().out


def test_a_prediction_stays_if_todays_predictor_cannot_make_it() -> None:
    receipt = read_receipt(str(RECEIPTS / "cuda_zero2.json"))
    unknown = receipt.model_copy(update={"model": receipt.model.model_copy(update={"parameters": 5})})
    assert make_forecast(unknown).missing is not None
    assert repeat_prediction(unknown) == unknown


def test_changes_are_in_the_document_with_the_reason_for_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["receipt", "--json", str(RECEIPTS / "cuda_zero2.json")]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    first = changes["changes"][0]
    assert (first["says"], changes["missing"]) == ("single", None)
    assert 1 < first["low"] <= first["speedup"] <= first["high"]
    on_cpu = make_receipt()
    assert predict_changes(on_cpu).missing == "the time of a step is predicted for GPUs alone"
    for receipt, line in (
        (on_cpu, "no changes are proposed: the time of a step is predicted for GPUs alone"),
        (
            make_receipt(model=on_cpu.model.model_copy(update={"config": None})),
            "no changes are proposed: there is no prediction",
        ),
    ):
        document = repeat_prediction(receipt)
        assert line in receipt_lines(document, "r")
        assert ReceiptDocument.model_validate_json(document.model_dump_json()) == document
    # A file from before they were stored.
    assert read_receipt(str(RECEIPTS / "ddp.json")).changes is None


def test_adam_on_the_host_is_a_cause_where_a_step_is_longer_than_its_stated_error() -> None:
    engine = make_engine(2, strategy="zero2_cpu", offload_optimizer="cpu", optimizer="DeepSpeedCPUAdam", ranks=8)
    state = StateFacts(params={}, grads={}, optimizer={"host": 12 * 10**9})
    step = ForecastRow(figure="step", unit="s", predicted=1.0, low=0.5, high=2.0, measured=4.0)
    times = TimeFacts(step_s=4.0, parts={**dict.fromkeys(TIME_PARTS, 0.1), "optimizer": 3.0})

    def fault(row: ForecastRow, ranks: int = 8) -> Fault | None:
        receipt = make_receipt(
            engine=engine,
            model_state=state,
            time=times,
            host=HostFacts(cores=16, ranks=ranks),
            forecast=MeasuredForecast(comparisons=(row,)),
        )
        return list_faults(receipt).get("slow-host-optimizer")

    slow = fault(step)
    assert slow is not None
    assert slow.says == "Adam on the host moves 10 GB/s: 16 cores are shared by 8 ranks of this machine"
    assert fault(step.model_copy(update={"measured": 1.5})) is None
    assert fault(step, ranks=1) is None


def test_the_last_line_states_what_the_receipt_added() -> None:
    cost = OwnCost(measured_s=0.5, added_s=1.82, later_fraction=0.0033)
    page = " ".join(" ".join(receipt_lines(make_receipt(cost=cost), "r")).split())
    assert page.endswith(
        "the receipt added 1.82 s to the program; its functions took 500 ms in the measured steps, 0.330% of each"
        " later step"
    )
