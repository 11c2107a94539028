"""The answers in plain words: each figure is the records', each claim has its n, and nothing unknown is asserted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from study.report.questions.finding import Finding
from study.report.questions.findings import QUESTIONS, findings
from study.report.records.frames import read_records
from synthetic_records import REPOSITORY, write_run


def answers(root: Path) -> dict[str, Finding]:
    found = findings(read_records(root))
    assert [finding.question for finding in found[:3]] == list(QUESTIONS)
    return dict(zip(("effects", "claims", "advice"), found, strict=False))


def whole(finding: Finding) -> str:
    return "\n".join([finding.answer, *finding.details])


STAGES = ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3_cpu")


def test_the_effects_are_the_records_own(tmp_path: Path) -> None:
    for strategy in STAGES:
        write_run(tmp_path, strategy)
    found = answers(tmp_path)["effects"]
    assert found.answer.startswith(
        "Loss: unchanged. All 6 arms that can be compared follow their baseline step for step"
    )
    assert "all 6 arms that can be compared with `single` follow the loss of `single` step for step" in whole(found)
    assert "One run each: no interval" in found.answer
    # 4 + 4 + 8 bytes per parameter under DDP; stage 1 halves 12 of optimizer, stage 2 the gradients, stage 3 all.
    assert "`zero1`, `zero2` and `zero3` hold 88, 75 and 62 % of the model state of `ddp`" in found.answer
    assert "send 1.00, 1.00 and 2.00 times its bytes" in found.answer
    assert re.search(r"take 1\.\d\d, 1\.\d\d and 1\.\d\d times its step time \(n = 1 each\)", found.answer)
    assert "Moving state off the device (`zero3_cpu`) frees 80 % of the state there" in found.answer
    text = whole(found)
    assert "stage 0 against no engine: up to" in text
    assert "the same arm twice: not run" in text


def test_a_loss_that_differs_is_not_called_the_same(tmp_path: Path) -> None:
    for strategy in STAGES:
        write_run(tmp_path, strategy, loss_shift=0.1 if strategy == "zero2" else 0.0)
    found = answers(tmp_path)["effects"]
    assert "5 of 6 arms follow their baseline step for step; not so `zero2`" in found.answer
    assert "5 of 6 arms follow the loss of `single` step for step, and `zero2` not" in whole(found)
    assert re.search(r"largest difference in any step is 0\.1, \d\.\d % of the loss \(`zero2`", whole(found))


def test_confounded_and_failed_arms_are_named_and_support_no_claim(tmp_path: Path) -> None:
    for strategy in ("single", "ddp", "zero2"):
        write_run(tmp_path, strategy)
    write_run(tmp_path, "zero3", time_factor=0.01, environment={"threads_per_rank": 8})
    write_run(tmp_path, "zero3_cpu", state="oom", reason="CUDA out of memory")
    found = answers(tmp_path)
    assert "All 2 arms that can be compared" in found["effects"].answer
    assert "`zero3` is confounded: threads per rank: 8, baseline 1." in whole(found["effects"])
    assert "`zero3_cpu` ended oom (1 run): CUDA out of memory." in whole(found["effects"])
    assert "`zero3`" not in found["advice"].answer
    assert "not known, because no run ended well: `zero3_cpu`." in whole(found["advice"])


def test_many_seeds_are_tested_and_the_test_has_its_n(tmp_path: Path) -> None:
    for seed in (42, 43, 44, 45):
        for strategy in ("single", "ddp", "zero3"):
            write_run(tmp_path, strategy, seed=seed)
    answer = answers(tmp_path)["effects"].answer
    assert "Two one-sided tests with a margin of 0.12 % show 2 of 2 arms equivalent (n = 4 pairs)." in answer


@pytest.mark.parametrize(("faster", "chosen"), [(0.999, "ddp"), (0.5, "zero2")])
def test_the_plain_way_wins_what_is_inside_noise(faster: float, chosen: str, tmp_path: Path) -> None:
    for repeat in (1, 2, 3):
        for strategy, factor in (("ddp", 1.0), ("zero2", faster / 1.1), ("zero3", 1.0)):
            write_run(tmp_path, strategy, repeat=repeat, time_factor=factor)
    found = answers(tmp_path)["advice"]
    assert f"use `{chosen}`" in found.answer
    assert "(n = 3)" in found.answer
    assert "like runs differ by up to" in found.answer


def test_advice_from_one_run_each_says_that_chance_is_unknown(tmp_path: Path) -> None:
    for strategy in ("ddp", "zero2"):
        write_run(tmp_path, strategy, gpu=False)
    found = answers(tmp_path)["advice"]
    assert "No arm ran twice, so how much of that is chance is not known." in found.answer
    assert "there is no GPU on this box" in whole(found)


def test_claims_stand_beside_what_was_measured_here(tmp_path: Path) -> None:
    for strategy in STAGES:
        write_run(tmp_path, strategy)
    found = answers(tmp_path)["claims"]
    text = whole(found)
    assert "S3-02 says that Adam's states are as large as the parameters. Here, gpt-wikitext, gpt-tiny:" in text
    assert "`ddp` 2.0x, `zero0` 2.0x, `zero1` 3.0x" in text
    assert "`zero2` holds 50% of the gradients of `ddp`, on 2 ranks." in text
    assert "`zero1` on 2 ranks holds 1.14x less state than `ddp`." in text
    # On two ranks nothing is known of one device.
    assert "S2-03" not in text


def test_claims_about_one_device_take_one_device(tmp_path: Path) -> None:
    for strategy in ("single", "zero2", "zero3_cpu"):
        write_run(tmp_path, strategy, ranks=1)
    text = whole(answers(tmp_path)["claims"])
    assert "S2-03 says that ZeRO trains faster on one GPU. Here" in text
    assert "step time on one device beside `single`: `zero2`" in text


def test_nothing_is_answered_from_nothing(tmp_path: Path) -> None:
    found = answers(tmp_path)
    assert found["effects"].answer == "There is no run here that can be read."
    assert found["claims"].answer == "No published claim can be held against these records."
    assert found["advice"].answer.startswith("Nothing can be recommended")
    write_run(tmp_path, "zero3", state="failed", reason="x")
    assert answers(tmp_path)["effects"].answer == "No run ended well (1 failed)."
    write_run(tmp_path / "v", "zero3", virtual=True, ranks=64, config={"global_batch_size": 64})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "status.json").write_text("{")
    assert any("1 run cannot be believed" in said for said in answers(tmp_path)["effects"].details)
    # Virtual ranks have questions of their own, alone and beside real runs.
    alone = findings(read_records(tmp_path / "v"))
    assert alone[2].answer.startswith("A virtual rank receives nothing that is real")
    assert findings(read_records(tmp_path))[3:] == alone


def test_the_committed_records_have_answers_with_their_n() -> None:
    found = findings(read_records(REPOSITORY / "reports" / "laptop"))
    for finding in found:
        assert "nan" not in whole(finding).split()
        assert "<NA>" not in whole(finding)
    assert found[0].answer.startswith("Loss: unchanged. All 24 arms")
    assert found[0].answer.count("\n") == 2
    assert "(n = 1 each)" in found[0].answer
    assert found[2].answer.count("use `") == 2


@pytest.mark.parametrize(
    ("precision", "share", "follows"),
    [("fp32", 0.001, True), ("fp32", 0.003, False), ("bf16", 0.003, True), ("bf16", 0.006, False)],
)
def test_what_lies_between_two_numbers_of_bf16_is_no_difference_in_bf16(
    tmp_path: Path, precision: str, share: float, follows: bool
) -> None:
    """The loss ends at 1.7 + 4 exp(-8/12), and a little noise."""
    for strategy, shift in (("ddp", 0.0), ("zero2", share * 3.75)):
        write_run(tmp_path, strategy, loss_shift=shift, config={"precision": precision})
    assert answers(tmp_path)["effects"].answer.startswith("Loss: unchanged." if follows else "Loss: 0 of 1 arms follow")


def test_nobody_is_told_to_train_under_the_profiler(tmp_path: Path) -> None:
    write_run(tmp_path, "ddp", config={"profile_steps": 3})
    assert answers(tmp_path)["advice"].answer.startswith("Nothing can be recommended")
    write_run(tmp_path, "zero2")
    assert "use `zero2`" in answers(tmp_path)["advice"].answer
