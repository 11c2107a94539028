"""Faults, pages, comparisons and the command of a receipt, from facts alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from study.cli import main
from study.config.places import REPOSITORY
from study.receipt.compare import confounded_by
from study.receipt.document import (
    CollectiveTime,
    CollectiveTraffic,
    EngineFacts,
    Fault,
    ModelFacts,
    PeakFacts,
    RankFacts,
    ReceiptDocument,
    StateFacts,
    TimeFacts,
    WorkFacts,
    read_receipt,
    write_receipt,
)  # fmt: skip
from study.receipt.faults import find_faults
from study.receipt.forecast import make_forecast
from study.receipt.page import HEIGHT, WIDTH, receipt_lines

MIB = 2**20
# GPT-2 in its smallest size.
GPT2: dict[str, object] = {
    "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
PARAMETERS = 124_439_808


def make_receipt(**changes: Any) -> ReceiptDocument:
    """Return a receipt of GPT-2 on two ranks of DDP, with some facts changed."""
    parts = {"forward": 0.3, "backward": 0.5, "communication": 0.1, "optimizer": 0.05, "data": 0.01, "rest": 0.04}
    facts: dict[str, Any] = {
        "made_at": "2026-11-27T12:00:00+00:00",
        "state": "complete",
        "packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "accelerate": "1.15.0", "transformers": "5.23.0"},
        "engine": EngineFacts(engine="ddp", strategy="ddp", ranks=2, backend="gloo", optimizer="AdamW",
                              compute_dtype="float32"),
        "model": ModelFacts(name="GPT2LMHeadModel", parameters=PARAMETERS, trained_parameters=PARAMETERS, config=GPT2),
        "work": WorkFacts(steps=20, measured_steps=(6, 7, 8, 9, 10), micro_batches=1, samples=2, sequence_length=64),
        "memory": PeakFacts(moment="in the backward pass", total_bytes=100 * MIB, process_peak_bytes=400 * MIB,
                            parts={"parameters": 40 * MIB, "activations": 59 * MIB}),
        "model_state": StateFacts(params={"device": 4 * PARAMETERS}, grads={"device": 4 * PARAMETERS},
                                  optimizer={"device": 8 * PARAMETERS}),
        "time": TimeFacts(step_s=1.0, steps=15, parts=parts,
                          collectives={"all_reduce": CollectiveTime(in_flight_s=0.3, exposed_s=0.1)}),
        "traffic": {"all_reduce": CollectiveTraffic(calls=5, payload_bytes=4 * PARAMETERS,
                                                    ring_bytes=4.0 * PARAMETERS)},
        "reduced_bytes": (4 * PARAMETERS,),
        "ranks": (RankFacts(rank=0, busy_s=0.8, peak_bytes=100 * MIB),
                  RankFacts(rank=1, busy_s=0.9, peak_bytes=90 * MIB)),
    }  # fmt: skip
    return ReceiptDocument(**facts | changes)


def make_engine(stage: int, **changes: Any) -> EngineFacts:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": changes.pop("accumulation", 1),
        "zero_optimization": {"stage": stage, **changes.pop("zero", {})},
    }
    facts: dict[str, Any] = {
        "engine": "deepspeed", "strategy": f"zero{stage}", "ranks": 2, "zero_stage": stage, "settings": settings,
        "compute_dtype": "float32",
    }  # fmt: skip
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
        if cause.optimizer != "adamw" or cause.ends_training or cause.gpu == "hidden" or cause.precisions:
            continue
        versions = _version_in(cause.releases)
        strategy = next((name for name in cause.strategies if name in ("zero0", "zero1", "zero2", "zero3")), None)
        if versions is None or strategy is None:
            continue
        receipt = faulty.model_copy(
            update={"packages": old | versions, "engine": make_engine(int(strategy[-1]), accumulation=2)}
        )
        assert cause.title in " ".join(fault.says for fault in find_faults(receipt) if fault.id == "wrong-gradients")
        checked += 1
    assert checked >= 2


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
        (2, {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}, {"offload_optimizer": "nvme"},
         "stages 1 and 2 cannot use NVMe"),
    ],
)  # fmt: skip
def test_an_offload_without_effect_is_named(stage: int, zero: Any, facts: Any, says: str) -> None:
    fault = list_faults(make_receipt(engine=make_engine(stage, zero=zero, **facts)))["offload-without-effect"]
    assert says in fault.says
    assert fault.fix
    used = make_engine(3, zero={"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
                     offload_param="cpu", offload_optimizer="cpu")  # fmt: skip
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
        "parameters": False, "optimizer state": False, "ring bytes of a step": False,
    }  # fmt: skip
    doubled = {"all_reduce": CollectiveTraffic(calls=5, payload_bytes=1, ring_bytes=8.0 * PARAMETERS)}
    receipt = make_receipt(traffic=doubled)
    receipt = receipt.model_copy(update={"forecast": make_forecast(receipt)})
    assert [row.figure for row in receipt.forecast.comparisons if row.is_outside] == ["ring bytes of a step"]
    page = " ".join(" ".join(receipt_lines(receipt, "r")).split())
    assert "OUTSIDE of its stated error: measured is 2 times the prediction" in page


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
    engine = EngineFacts(engine="ddp", strategy="ddp", ranks=2, device="NVIDIA H100 80GB HBM3", optimizer="AdamW",
                         compute_dtype="bfloat16")  # fmt: skip
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
    assert ReceiptDocument.model_validate(json.loads(capsys.readouterr().out)) == make_receipt()


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


def test_the_screen_of_the_docs_is_that_of_a_real_run() -> None:
    file = "tests/data/receipts/ddp.json"
    text = (REPOSITORY / "docs" / "receipt.md").read_text(encoding="utf-8")
    screen = text.partition("<!-- screen -->\n```text\n")[2].partition("```\n<!-- /screen -->")[0]
    receipt = read_receipt(str(REPOSITORY / file))
    assert screen.splitlines() == receipt_lines(receipt, file)
    assert {fault.id for fault in receipt.faults} == {"data-loader-waits", "forgotten-no-sync"}
    # Faults and prediction of today's code are those in the file.
    assert tuple(find_faults(receipt)) == receipt.faults
    assert make_forecast(receipt) == receipt.forecast
    listed = re.findall(r"^\| `([a-z-]+)` \| ", text.partition("## Faults")[2].partition("##")[0], re.MULTILINE)
    source = (REPOSITORY / "study" / "receipt" / "faults.py").read_text(encoding="utf-8")
    assert set(listed) == set(re.findall(r'id="([a-z-]+)"', source))
