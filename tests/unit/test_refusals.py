"""Requests that are rejected before a rank starts: flags, launches, settings, and commands without torch."""

from __future__ import annotations

import dataclasses
import os
import pwd
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement

from engines import ROOT
from study.advisor.doctor import shown
from study.cli import main
from study.config.errors import Unsupported, UserError
from study.config.flags import RunConfig, resolve_config
from study.config.launch_context import Launch
from study.config.strategies import read_strategy
from study.engine.model_parallel import check_replicas
from study.engine.setup import check_engine_settings
from study.host.folders import cache_directory, home_folder
from study.host.stacks import ENGINES_ONLY_VARIABLE, UNVERIFIED_VARIABLE
from study.run.checks import check_devices, check_launch_flags, check_room_to_swap

LAPTOP = resolve_config(RunConfig(scale="laptop"), accelerator_visible=False)


def make_launch(strategy: str, ranks: int) -> Launch:
    return Launch(read_strategy(strategy), ranks, 0, 0, ranks)


@pytest.fixture(scope="module")
def base_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packages of the base installation, as the quick start has them."""
    _, _, project = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")
    waiting = re.findall(r'^  "([\w-]+)', project.partition("\n]")[0], re.MULTILINE)
    folder, names = tmp_path_factory.mktemp("base"), set[str]()
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        distribution = metadata.distribution(name)
        assert distribution.files is not None
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            (folder / top).symlink_to(str(distribution.locate_file(top)))
        needed = (Requirement(line) for line in distribution.requires or ())
        waiting += [item.name for item in needed if item.marker is None or item.marker.evaluate({"extra": ""})]
    return folder


def call_base(base_packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `study` with the base packages alone."""
    code = f"import sys; sys.path[:0] = {[str(ROOT), str(base_packages)]}; sys.argv[0] = 'study'"
    code += "; from study.cli import main; sys.exit(main())"
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "command",
    [
        "advise gpt2 --hardware 4xA100",
        "predict gpt2 --strategy zero3 --hardware 8xH100",
        "explain accelerate_configs/zero3.yaml gpt2",
        "releases 0.19.8 zero2",
        "releases 0.19.8 --features zero2,clipping",
        "releases costs",
        "claims S1",
        "benchmark",
    ],
)
def test_a_question_needs_no_torch(command: str, base_packages: Path) -> None:
    result = call_base(base_packages, *command.split())
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "verify --quick",
        "verify --features zero2,muon",
        "releases costs --measure",
        "run laptop",
        "prepare laptop",
        "autopsy run",
        "virtual --model_name_or_path gpt2 --strategy zero3 --world_size 8",
        "advise gpt2 --hardware this",
        "predict gpt2 --strategy zero3 --hardware 8xH100 --traced",
    ],
)
def test_a_command_that_needs_torch_names_the_tested_release_to_install(command: str, base_packages: Path) -> None:
    result = call_base(base_packages, *command.split())
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    (pin,) = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert re.search(r"torch.* not installed|not installed here: .*torch", result.stderr)
    assert re.search(rf"pip install -e '\.\[train\]' .*{re.escape(pin)}", result.stderr)


def test_the_launcher_s_own_flag_is_not_ignored() -> None:
    def check(**variables: str) -> None:
        environment = {f"ACCELERATE_{name}": value for name, value in variables.items()}
        check_launch_flags(LAPTOP, LAPTOP.batch_plan(2), environment)

    for key, value, says in (
        ("GRADIENT_ACCUMULATION_STEPS", "4", "accumulation_steps 4, and --per_device_train_batch_size sets 1"),
        ("MIXED_PRECISION", "bf16", "mixed_precision bf16, and --precision sets no"),
        ("DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend inductor, and --torch_compile sets no"),
    ):
        with pytest.raises(UserError, match=says):
            check(**{key: value})
    check(DEEPSPEED_CONFIG_FILE="zero3.json")
    for variable in ("DEEPSPEED_ZERO_STAGE", "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "GRADIENT_CLIPPING"):
        with pytest.raises(UserError, match="2, but DeepSpeed's file decides it"):
            check(DEEPSPEED_CONFIG_FILE="zero3.json", **{variable: "2"})


def test_the_cache_is_in_the_user_s_home_and_a_user_without_one_must_name_it(tmp_path, monkeypatch):
    """It is never in the folder where the command was typed. A container may run under an id that has no account."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ZERO_STUDY_CACHE", "")
    for invalid in ("not/absolute", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", invalid)
        assert cache_directory() == tmp_path / ".cache" / "zero-study"
    monkeypatch.setenv("ZERO_STUDY_CACHE", "~/mine")
    assert cache_directory() == tmp_path / "mine"
    monkeypatch.delenv("ZERO_STUDY_CACHE")
    monkeypatch.setenv("HOME", "")
    assert home_folder() == Path(pwd.getpwuid(os.getuid()).pw_dir)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(UserError, match=r"this user has no home folder.*ZERO_STUDY_CACHE"):
        cache_directory()
    assert shown(tmp_path) == str(tmp_path)


# Per parameter 16 bytes of optimizer state and gradients and 4 of the parameter itself, for both ranks together.
@pytest.mark.parametrize(("peft", "needed_gb"), [("none", 1443), ("lora", 288.6)])
def test_nvme_that_is_too_small_for_the_swapped_state_is_refused(peft: str, needed_gb: float, tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free > needed_gb * 1e9:
        pytest.skip("this disk is large enough")
    flags = {"task": "gpt-wikitext", "model_name_or_path": "gpt-1t-9layers", "nvme_path": str(tmp_path), "peft": peft}
    config = resolve_config(RunConfig.from_dict(flags, "this test"), False)
    with pytest.raises(Unsupported, match=f"zero3_nvme with 72 billion parameters needs {needed_gb} GB"):
        check_room_to_swap(config, make_launch("zero3_nvme", 2), read_strategy("zero3_nvme"))


def test_ranks_that_differ_from_the_gpus_get_the_command_that_fits() -> None:
    for strategy, ranks, gpus in (("zero3", 2, 1), ("ddp", 9, 8)):
        with pytest.raises(UserError, match=rf"{ranks} ranks.*{gpus} GPU.*{strategy}\.yaml --num_processes {gpus} "):
            check_devices(make_launch(strategy, ranks), gpus)
    notice = check_devices(make_launch("zero2", 2), 8) or ""
    assert ("6 of 8 GPUs" in notice, "--num_processes 8" in notice) == (True, True)
    # Without a GPU any number of ranks is possible: they are processes.
    for strategy, ranks, gpus in (("zero2", 8, 8), ("single", 1, 8), ("zero2", 4, 0)):
        assert check_devices(make_launch(strategy, ranks), gpus) is None


def test_two_replicas_need_four_ranks_and_copies_divide_them() -> None:
    check_replicas(make_launch("zero3_hpz", 6), read_strategy("zero3_hpz"), 0)
    for strategy, ranks, gpus, fix in (
        ("zero3_hpz", 1, 0, "--num_processes 4"),
        ("hsdp", 5, 8, "--num_processes 4"),
        # On a machine with two GPUs the fix names a strategy that runs there.
        ("hsdp", 2, 2, "use fsdp2"),
        ("zero3_hpz", 2, 2, "use zero3"),
    ):
        with pytest.raises(Unsupported, match=f"{strategy} needs an even number of ranks from 4 up.*{fix}"):
            check_replicas(make_launch(strategy, ranks), read_strategy(strategy), gpus)
    hsdp = dataclasses.replace(read_strategy("hsdp"), name="hsdp-custom-12345678")
    for mesh in ((2, 3), (4, 1), (2, 4)):
        custom = dataclasses.replace(hsdp, custom_settings={"dp_replicate_size": mesh[0]}, mesh=mesh)
        with pytest.raises(UserError, match=f"needs {mesh[0]} replicas of {mesh[1]} ranks, but the world size is 4"):
            check_replicas(Launch(custom, 4, 0, 0, 4), custom, 0)
    config = RunConfig(engine_override=("zero_optimization.zero_hpz_partition_size=3",))
    with pytest.raises(UserError, match="zero3 needs 3 ranks, but the world size is 4"):
        check_replicas(make_launch("zero3", 4), read_strategy("zero3").with_overrides(config), 0)


def test_study_alone_and_a_model_before_its_file_are_told_a_whole_command(tmp_path, capsys) -> None:
    assert main([]) == 2
    says = "missing: COMMAND. To fix it: for instance: study advise llama-3.1-8b --hardware 8xH100; study --help lists"
    assert says in capsys.readouterr().err
    file = tmp_path / "mine.yaml"
    file.write_text("distributed_type: DEEPSPEED\n")
    assert main(["explain", "gpt2", str(file)]) == 2
    assert f"name the file first: study explain {file} gpt2" in capsys.readouterr().err


def test_what_is_missing_is_named_with_a_command_of_what_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "gpt2", "--hardware", "T4"]) == 2
    command = "study predict gpt2 --strategy zero3 --hardware T4; to choose one: study advise gpt2 --hardware T4."
    assert f"--strategy is missing. To fix it: for instance: {command}" in capsys.readouterr().err
    assert main(["advise", "my model"]) == 2
    command = "study advise 'my model' --hardware 8xH100."
    assert f"--hardware is missing. To fix it: for instance: {command}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "strategy"),
    [
        ("lightning.py", 'Trainer(strategy="deepspeed_stage_3", devices=8)', "zero3"),
        ("lightning.py", "Trainer(strategy = 'deepspeed_stage_3_offload')", "zero3_cpu"),
        ("lightning.ipynb", r'"trainer = L.Trainer(strategy=\"fsdp\")\n"', "fsdp2 --fsdp_version 1"),
        ("lightning.py", "DeepSpeedStrategy(\n    stage=3, offload_optimizer=True)", "zero3_cpu_optimizer"),
        ("lightning.py", "DeepSpeedStrategy()", "zero2"),
        ("lightning.py", "DeepSpeedStrategy(config=settings)", "STRATEGY"),
        ("lightning.py", "DDPStrategy()", "ddp"),
        ("lightning.py", "strategy='ddp' if small else x; Trainer(strategy='fsdp')", "STRATEGY"),
        # No words of Lightning.
        ("train.py", "evaluate(strategy='steps')", "single"),
    ],
)
def test_a_script_of_lightning_leads_to_the_strategy_that_it_names(name, text, strategy, tmp_path, capsys) -> None:
    (tmp_path / name).write_text(text)
    assert main(["explain", str(tmp_path / name), "gpt2"]) == 2
    assert f"study predict MODEL --strategy {strategy} --hardware BOX" in capsys.readouterr().err


def test_a_file_that_explain_cannot_read_leads_to_the_one_that_is_meant(tmp_path, capsys) -> None:
    (tmp_path / "zero3.json").write_text("{}")
    (tmp_path / "notes.md").write_text("```\nmodel: [\n")
    for name, fix in (
        ("zero3.jsn", "did you mean zero3.json?"),
        ("notes.md", "give a DeepSpeed JSON or an Accelerate YAML, or fix the file."),
    ):
        assert main(["explain", str(tmp_path / name), "gpt2"]) == 2
        assert capsys.readouterr().err.endswith(f"To fix it: {fix}\n")


@pytest.mark.parametrize("name", ["train.py", "notebook.ipynb", "train.sh", "job.sbatch", "job"])
def test_a_program_that_explain_is_given_leads_to_what_reads_its_settings(name, tmp_path, capsys) -> None:
    # A script without a suffix is one by its first line.
    (tmp_path / name).write_text("#!/bin/bash\n#SBATCH --nodes 16\nsrun train\n" if name == "job" else '{"cells": []}')
    for model in ([], ["gpt2"]):
        assert main(["explain", str(tmp_path / name), *model]) == 2
        err = capsys.readouterr().err
        assert f"{name} is a program, and its settings are not read" in err
        for way in (
            "the file that it launches with (--config_file, --deepspeed)",
            "YAML or JSON of its TrainingArguments",
            "study predict MODEL --strategy single",
            "docs/receipt.md",
        ):
            assert way in err


# The words of each command, and those of its error.
COMMANDS = yaml.safe_load((ROOT / "tests/data/refused_commands.yaml").read_text())


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (f"{words.removeprefix('study')} {rest}".strip(), says)
        for words, rows in COMMANDS.items()
        for rest, says in rows.items()
    ],
)
def test_a_command_that_cannot_be_served_ends_in_one_line(command, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "accelerate_configs").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (UNVERIFIED_VARIABLE, ENGINES_ONLY_VARIABLE):
        # `study verify` sets them for its process.
        monkeypatch.setenv(name, "")
    assert main(command.split(" ")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: .+\. To fix it: .+\n", err)
    assert all(part in err for part in ([says] if isinstance(says, str) else says)), err
    assert [path.name for path in tmp_path.iterdir()] == ["accelerate_configs"]


PARTITIONED = ("activation_checkpointing.partition_activations=true",)

ON_CPU = ("activation_checkpointing.cpu_checkpointing=true",)


@pytest.mark.parametrize(
    ("strategy", "flags", "says"),
    [
        ("zero0", {"precision": "fp16-engine"}, "use --precision fp16,"),
        ("zero1", {"precision": "fp16"}, "use --precision fp16-engine"),
        ("zero2_cpu", {"bf16_states": True, "precision": "bf16-engine"}, "--bf16_states needs DeepSpeed's"),
        ("zero3_cpu", {"optimizer": "muon"}, "--optimizer muon: zero3_cpu"),
        (
            "zero1",
            {"gradient_checkpointing": True, "engine_override": PARTITIONED},
            "under zero1 no ranks share a layer's activations",
        ),
        ("zero1_tp", {"engine_override": PARTITIONED}, "without checkpoints there are no activations to partition"),
        ("zero1_tp", {"engine_override": (*PARTITIONED, *ON_CPU)}, "supports only its key partition_activations"),
    ],
)
def test_flags_that_a_strategy_does_not_support_are_refused_by_name(strategy, flags, says):
    config = dataclasses.replace(LAPTOP, task="gpt-wikitext", max_grad_norm=0.0, **flags)
    with pytest.raises(UserError) as refusal:
        read_strategy(strategy).check_engine_flags(config)
    assert says in f"{refusal.value.problem}. To fix it: {refusal.value.fix}"


def check_overridden(config: RunConfig, strategy: str = "zero2") -> None:
    launched = read_strategy(strategy)
    check_engine_settings(config, launched.deepspeed or {}, launched.with_overrides(config).deepspeed or {})


def test_an_engine_setting_that_deepspeed_does_not_have_is_refused() -> None:
    for setting, says in (
        ("zero_optimization.nonsense=1", "zero_optimization.nonsense: Extra inputs"),
        ("zero_optimization.reduce_bucket_size=-5", "greater than 0"),
        ('zero_optimization.offload_optimizer="cpu"', "zero_optimization.offload_optimizer"),
        # DeepSpeed ignores it silently, and the record would list it as set.
        ("zero_optimisation.reduce_bucket_size=5e6", "no setting zero_optimisation"),
        ("train_batch_size=7", "the run's batch flags set it"),
        ("compile.deepcompile=true", "has no effect on a model that is not compiled"),
    ):
        with pytest.raises(UserError, match=says):
            check_overridden(RunConfig(engine_override=(setting,)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_a_setting_for_gpus_alone_is_unsupported_without_one() -> None:
    zero = "zero_optimization"
    for key in (f"{zero}.zero_quantized_weights", f"{zero}.offload_optimizer.super_offload", "compile.deepcompile"):
        on, off = (RunConfig(engine_override=(f"{key}={value}",), torch_compile=True) for value in ("true", "false"))
        with pytest.raises(Unsupported, match=f"{key} runs only on GPUs"):
            check_overridden(on, "zero3_cpu")
        check_overridden(off, "zero3_cpu")
