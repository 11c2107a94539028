"""A verdict names the first difference of two runs, and `study verify` the missing packages."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from study.config.errors import UserError
from study.host import stacks
from study.host.machine import detect_machine
from study.records.directory import read_json
from study.records.outcome import Outcome
from study.releases import verify as verify_module
from study.releases.causes import PACKAGES, known_faults
from study.releases.verdict import ROUNDING, Reference, TrainingTrace, Verdict, judge
from study.releases.verify import _check_packages, _check_same_stack
from synthetic_records import write_run

STACK = {"deepspeed": "0.19.8", "accelerate": "1.15.0", "torch": "2.13.0", "transformers": "5.23.0"}
FP32 = ROUNDING["fp32"]
# DeepSpeed 0.19.8, which matches one process: two ranks, gpt-wikitext, four micro-batches per step.
SINGLE = TrainingTrace(
    [5.57902, 5.47629, 5.40563, 5.33389],
    [1.867, 1.742, 1.665, 1.531],
    [4e-3, 3.5e-3, 3e-3, 2.5e-3],
    weights="a",
    samples=("1", "2", "3", "4"),
    max_norm=1.0,
)
DIVERGED = Outcome("failed", "the loss is NaN", cause="not finite", not_finite_step=3)


def differing(**changed: object) -> Verdict:
    return judge(dataclasses.replace(SINGLE, **changed), SINGLE, FP32)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "extras", "says"),
    [
        ({"peft": None}, ("lora",), "here: peft -> install peft next to the releases under test"),
        ({"datasets": None}, (), None),
        ({"peft": None}, ("muon",), None),
        ({"deepspeed": "0.19.6"}, ("muon",), "deepspeed 0.19.6 has no Muon outside ZeRO"),
        # It names nothing that would replace the others.
        ({"accelerate": None, "torch": None}, (), "accelerate, torch -> install accelerate and torch next to"),
        (dict.fromkeys(STACK), (), "here: deepspeed, accelerate, torch, transformers -> .* pip install"),
    ],
)
def test_what_is_not_installed_is_named_if_it_is_needed(monkeypatch, changed, extras, says):
    versions = STACK | changed
    for module in (stacks, verify_module):
        monkeypatch.setattr(module, "package_version", lambda name: versions.get(name, "1"))
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        _check_packages(["zero1"], {name: versions[name] for name in PACKAGES}, extras)


def test_records_of_another_device_or_stack_are_not_continued(tmp_path: Path) -> None:
    write_run(tmp_path, "ddp", gpu=True)
    packages = read_json(next(tmp_path.glob("*/environment.json")))["packages"]
    stack, machine = {name: packages.get(name) for name in PACKAGES}, detect_machine()
    with pytest.raises(UserError, match="has runs on GPUs, unlike this machine"):
        _check_same_stack(tmp_path, stack, dataclasses.replace(machine, gpu_memory_gib=()))
    on_gpus = dataclasses.replace(machine, gpu_memory_gib=(80.0,))
    _check_same_stack(tmp_path, stack, on_gpus)
    with pytest.raises(UserError, match=r"has runs of another stack \(deepspeed not installed\)"):
        _check_same_stack(tmp_path, stack | {"deepspeed": "9.0"}, on_gpus)


@pytest.mark.parametrize(
    ("changed", "what", "first_step"),
    [
        # DeepSpeed 0.17.6, zero3_cpu_optimizer; 0.18.6, zero2_cpu; 0.18.6, zero1; 0.17.6, zero1.
        ({"losses": [5.58576, 5.5, 5.4, 5.3]}, "weights", 1),
        ({"losses": [5.57902, 5.53338, 5.51719, 5.4], "norms": [0.313, 0.3, 0.3, 0.3]}, "gradient", 1),
        ({"losses": [5.57902, 5.47627, 5.44453, 5.4], "norms": [0.467, 0.4, 0.4, 0.4]}, "scale", 1),
        ({"losses": [5.57902, 5.49649, 5.4, 5.3], "norms": [6.504, 6.0, 6.0, 6.0]}, "gradient", 1),
        ({"losses": [5.57902, 5.47629, 5.44453, 5.4], "norms": [1.867, 1.742, 1.6, 1.5]}, "clipping", 3),
        ({"losses": [5.57902, 5.47629, 5.44453, 5.4], "norms": [None] * 4}, "scale", 3),
        ({"losses": [5.57902, 5.53338, 5.51719, 5.4], "norms": [None] * 4}, "update", 2),
        ({"norms": [0.467, 0.436, 0.416, 0.383]}, "norm", 1),
    ],
)
def test_the_first_figure_that_differs_shows_the_fault(changed: dict, what: str, first_step: int) -> None:
    verdict = differing(**changed)
    assert (verdict.kind, verdict.what, verdict.first_step) == ("different", what, first_step)
    # At learning rate 0, no loss depends on an update.
    warm = dataclasses.replace(SINGLE, rates=[0.0, 4e-3, 3e-3, 2e-3])
    for losses, expected in (([5.57902, 5.48, 5.4, 5.3], "weights"), ([5.57902, 5.47629, 5.5, 5.3], "update")):
        assert judge(dataclasses.replace(warm, losses=losses), warm, FP32).what == expected
    assert f"from step {first_step} on" in verdict.describe
    rounded = differing(losses=[5.57902, 5.47629, 5.40563, 5.33390], norms=[None] * 4)
    assert (rounded.kind, rounded.describe) == ("equal", "equal (to 2e-06)")


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"ending": Outcome("unsupported", "no libaio")}, "refuses"),
        ({"ending": Outcome("unsupported", "torch-2.1: no wheel", cause="not installable")}, "not installable"),
        ({"ending": Outcome("failed", "AttributeError: x")}, "crashes"),
        # The machine had too little memory or time.
        ({"ending": Outcome("oom", "out of memory")}, "not judged"),
        ({"ending": Outcome("timeout", "ended after its 900 s")}, "not judged"),
        ({"ending": DIVERGED, "losses": [5.57902, 5.47629]}, "different"),
        ({"weights": "b"}, "not judged"),
        ({"samples": ("1", "2", "4", "3")}, "not judged"),
    ],
)
def test_a_run_that_cannot_be_compared_has_a_reason(changed: dict, kind: str) -> None:
    verdict = differing(**changed)
    assert verdict.kind == kind
    # A loss that is not finite differs from its step on.
    assert verdict.first_step == (3 if kind == "different" else None)


def test_varying_sums_of_a_machine_are_no_fault_and_a_wrong_ddp_is_no_noise() -> None:
    noisy = dataclasses.replace(SINGLE, losses=[loss * (1 + 5e-5) for loss in SINGLE.losses if loss])
    assert Reference("fp32", SINGLE, (noisy,)).tolerance.loss == pytest.approx(2e-4)
    assert Reference("fp32", SINGLE, (noisy,)).tolerance.norm == FP32.norm
    assert Reference("fp32", SINGLE, (SINGLE,)).tolerance == FP32
    wrong = dataclasses.replace(SINGLE, losses=[loss * 1.01 for loss in SINGLE.losses if loss])
    assert Reference("fp32", SINGLE, (wrong,)).tolerance == FP32
    assert judge(wrong, SINGLE, FP32).kind == "different"


def test_a_race_that_gpus_do_not_show_is_no_known_fault_on_a_gpu() -> None:
    def ids(release: str, on_gpu: bool) -> set[str]:
        return {cause.id for cause in known_faults(STACK | {"deepspeed": release}, on_gpu=on_gpu)}

    assert (ids("0.19.7", False), ids("0.19.7", True)) == ({"gather-race"}, set())
    assert ids("0.18.9", False) - ids("0.18.9", True) == {"gather-race", "flat-buffer-view"}
