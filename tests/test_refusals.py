"""What a user sees who asks for something that cannot be: one line that says what and how to fix it, and no trace."""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_records import write_run

from engines import ROOT
from forked import fork_ranks, fork_script
from study.advisor.doctor import shown
from study.config.errors import Unsupported, UserError
from study.config.flags import RunConfig, resolved
from study.config.launched import Launch
from study.config.strategies import read_strategy
from study.engine.live import check_copies
from study.host.environment import describe_environment
from study.host.folders import cache_directory, home_folder, sealed
from study.records.directory import read_json, write_json
from study.records.lock import take_folder
from study.run.checkpoint import digests_of, find_checkpoint
from study.run.checks import check_devices, check_launch_flags, check_room_to_swap
from study.workloads import load_data
from study.workloads.initial import materialize_initial_weights

NO_HUB = "http://127.0.0.1:9"
CACHES = ("hf", "cache", "xdg")
# One that is refused before anything is imported, and two after.
WITH_ITS_IMPORTS = (["--nonsense", "1"], ["--data", "hub"], ["--precision", "bf16-engine"])


def refuse(
    box: Path, *arguments: str, launched_with: tuple[str, int] | None = None, forked: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """study/train.py in an empty folder, with empty caches and no hub; in a fork where imports are not the point."""
    cwd = box / "cwd"
    cwd.mkdir(exist_ok=True)
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HF_", "ACCELERATE_", "FSDP_", "TRANSFORMERS_"))
        and key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    }
    folders = {"HF_HOME": "hf", "ZERO_STUDY_CACHE": "cache", "XDG_CACHE_HOME": "xdg"}
    environment = (
        inherited
        | {key: str(box / folder) for key, folder in folders.items()}
        | {"HF_ENDPOINT": NO_HUB, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | environment
    )
    if forked:
        # Read when it is imported, and so the same for all of a session.
        hub = {"HF_HOME": str(box.parent / "hf"), "HF_ENDPOINT": NO_HUB}
        script = ROOT / "study/train.py"
        return fork_script(script, *arguments, folder=cwd, environment=environment, read_at_import=hub)
    command = [sys.executable]
    if launched_with:
        strategy, ranks = launched_with
        if not (cwd / "accelerate_configs").exists():
            (cwd / "accelerate_configs").symlink_to(ROOT / "accelerate_configs")
        command += ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{strategy}.yaml"]
        command += ["--num_processes", str(ranks), "--main_process_port", "0"]
    process = subprocess.Popen(
        [*command, str(ROOT / "study/train.py"), *arguments], cwd=cwd, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=120)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def contents(box: Path) -> dict[str, bytes | None]:
    """Everything in the box but the caches."""
    return {
        str(path.relative_to(box)): path.read_bytes() if path.is_file() else None
        for path in sorted(box.rglob("*"))
        if path.relative_to(box).parts[0] not in CACHES
    }


def assert_refused(
    box: Path, *arguments: str, says: tuple[str, ...], fix: str, forked: bool = True, **environment: str
) -> None:
    (box / "cwd").mkdir(exist_ok=True)
    before = contents(box)
    result = refuse(box, *arguments, launched_with=None, forked=forked, **environment)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert_is_one_line(result.stderr, says, fix)
    assert contents(box) == before


def assert_is_one_line(stderr: str, says: tuple[str, ...], fix: str) -> None:
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    problem, found, how = lines[0].partition(". To fix it: ")
    assert found
    assert problem.startswith("error: ")
    for part in says:
        assert part in problem
    assert fix in how


@pytest.mark.parametrize(
    ("arguments", "says", "fix"),
    [
        (["--nonsense", "1"], ("--nonsense",), "--help"),
        (
            ["--global_batch_size", "64", "--train_samples", "32"],
            ("--global_batch_size 64", "32 training samples"), "--global_batch_size 32",
        ),
        (["--model_name_or_path", "bert-tinny"], ("unknown model", "bert-tinny"), "did you mean bert-tiny?"),
        (["--model_name_or_path", "nobody/nothing"], ("nobody/nothing", "hub"), "local folder"),
        (["--data", "hub"], ("--data hub", "stanfordnlp/imdb"), "--data builtin"),
        (["--task", "gpt-wikitext", "--data", "hub"], ("--data hub", "wikitext"), "--data builtin"),
        (
            ["--weights", "pretrained", "--model_name_or_path", "bert-large-uncased"],
            ("bert-large-uncased", "hub cannot be reached"), "",
        ),
        (["--data", "not/there"], ("not/there", "no such file"), "--data builtin"),
        (["--precision", "bf16-engine"], ("bf16-engine", "single"), "use --precision bf16,"),
        (["--engine_override", "gradient_clipping=2"], ("--engine_override", "single"), "or use a zero* strategy"),
        (["--device_memory_cap_gib", "8"], ("--device_memory_cap_gib", "no GPU"), "leave the flag out"),
        (["--resume_from_checkpoint", "nonsense"], ("--resume_from_checkpoint nonsense",), "`latest`"),
        (["--resume_from_checkpoint", "latest"], ("no whole checkpoint",), "--resume_from_checkpoint"),
        (["--report_to", "carrier-pigeon"], ("--report_to carrier-pigeon",), "none"),
        (["--attn_implementation", "flash_attention_9"], ("--attn_implementation", "flash_attention_9"), "--help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_bad_request_ends_in_one_line_and_leaves_nothing(
    arguments: list[str], says: tuple[str, ...], fix: str, tmp_path: Path
) -> None:
    forked = arguments not in WITH_ITS_IMPORTS
    assert_refused(tmp_path, "--scale", "laptop", *arguments, says=says, fix=fix, forked=forked)


@pytest.mark.parametrize(
    ("variable", "value", "says", "fix"),
    [
        ("MIXED_PRECISION", "bf16", ("mixed_precision bf16", "--precision"), "--precision alone"),
        ("DYNAMO_BACKEND", "INDUCTOR", ("dynamo_backend inductor", "--torch_compile"), "--torch_compile alone"),
        # No file says this: the shell does, or the launcher's own flag.
        ("GRADIENT_ACCUMULATION_STEPS", "4", ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS is set",), "unset"),
    ],
)
def test_what_the_launched_file_asks_of_training_is_never_left_unheard(
    tmp_path: Path, variable: str, value: str, says: tuple[str, ...], fix: str
) -> None:
    asked: dict[str, Any] = {f"ACCELERATE_{variable}": value}
    assert_refused(tmp_path, "--scale", "laptop", says=says, fix=fix, **asked)


def test_the_launcher_s_own_flag_for_accumulation_is_not_left_unheard() -> None:
    config = resolved(RunConfig(task="gpt-wikitext", scale="laptop"), accelerator_visible=False)
    asked = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    with pytest.raises(UserError, match="gradient_accumulation_steps 4, and --per_device_train_batch_size for 1"):
        check_launch_flags(config, config.batch_plan(2), asked)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("DEEPSPEED_ZERO_STAGE", "2", "zero_stage 2"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", "offload_optimizer_device cpu"),
        ("GRADIENT_CLIPPING", "0.5", "gradient_clipping 0.5"),
    ],
)
def test_a_launcher_s_flag_that_deepspeed_s_file_overrules_is_refused(variable: str, value: str, says: str) -> None:
    config = resolved(RunConfig(task="gpt-wikitext", scale="laptop"), accelerator_visible=False)
    asked = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero3.json"}
    check_launch_flags(config, config.batch_plan(2), asked)
    with pytest.raises(UserError, match=f"the launch asks for {says}, and DeepSpeed's file decides that"):
        check_launch_flags(config, config.batch_plan(2), asked | {f"ACCELERATE_{variable}": value})


def test_a_hub_that_is_switched_off_is_refused_like_one_that_is_away(tmp_path: Path) -> None:
    off = {"HF_HUB_OFFLINE": "1"}
    assert_refused(tmp_path, "--data", "hub", says=("--data hub",), fix="--data builtin", forked=False, **off)


@pytest.mark.parametrize(
    ("task", "rows", "says", "fix"),
    [
        ("bert-imdb", [{"review": "good", "sentiment": 1}], ("review, sentiment", "text, label"), "schema"),
        ("bert-imdb", [{"text": "good", "label": 7}], ("`label`", "7"), "0 (bad) or 1 (good)"),
        ("bert-imdb", [{"text": 3, "label": 1}], ("`text`",), "schema"),
        ("gpt-wikitext", [{"content": "words"}], ("content", "text"), "schema"),
    ],
    ids=["other columns", "other labels", "no text", "no text column"],
)
def test_local_data_of_another_schema_is_refused(
    task: str, rows: list[dict[str, object]], says: tuple[str, ...], fix: str, tmp_path: Path
) -> None:
    file = tmp_path / "reviews.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 64))
    arguments = ("--scale", "laptop", "--task", task, "--data", str(file))
    assert_refused(tmp_path, *arguments, says=(str(file), *says), fix=fix)


def test_a_finished_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert_refused(tmp_path, "--output_dir", str(run), says=(str(run), "finished run"), fix="--overwrite_output_dir")


def test_a_folder_that_is_no_run_directory_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    for flags in ((), ("--overwrite_output_dir",)):
        arguments = ("--output_dir", str(tmp_path / "thesis"), *flags)
        assert_refused(tmp_path, *arguments, says=("thesis", "none is a run's"), fix="new folder")


def test_an_output_dir_that_is_a_link_to_nothing_is_said_to_be_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "drive that is not mounted")
    arguments = ("--scale", "laptop", "--output_dir", str(link))
    assert_refused(tmp_path, *arguments, says=("a link that leads nowhere",), fix="name a folder")


def test_an_output_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a regular file")
    for output_dir in ("file", "file/below", "file/far/below"):
        arguments = ("--output_dir", str(tmp_path / output_dir))
        assert_refused(tmp_path, *arguments, says=(str(tmp_path / output_dir), "file"), fix="name a folder")


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a regular file")
    cache = str(tmp_path / "file" / "cache")
    assert_refused(tmp_path, says=(cache,), fix="ZERO_STUDY_CACHE", ZERO_STUDY_CACHE=cache)


@pytest.mark.parametrize("empty", ["ZERO_STUDY_CACHE", "XDG_CACHE_HOME"])
def test_the_cache_is_never_in_the_folder_where_the_command_was_typed(
    empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    for name, value in {"HOME": str(tmp_path), "XDG_CACHE_HOME": "not/absolute", "ZERO_STUDY_CACHE": ""}.items():
        monkeypatch.setenv(name, "" if name == empty else value)
    assert cache_directory() == tmp_path / ".cache" / "zero-study"
    monkeypatch.setenv("ZERO_STUDY_CACHE", "~/mine")
    assert cache_directory() == tmp_path / "mine"


def test_an_empty_home_is_none_and_a_user_without_one_is_told_to_name_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that was given the number of a user alone."""
    monkeypatch.delenv("ZERO_STUDY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    known = Path(pwd.getpwuid(os.getuid()).pw_dir)
    monkeypatch.setenv("HOME", "")
    assert home_folder() == known
    monkeypatch.delenv("HOME")
    assert home_folder() == known
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(UserError, match="this user has no home folder") as refused:
        cache_directory()
    assert "ZERO_STUDY_CACHE" in refused.value.fix
    assert shown(tmp_path) == str(tmp_path)


def test_a_python_without_docstrings_is_refused_before_a_library_fails_for_it(tmp_path: Path) -> None:
    flags = ("--scale", "laptop")
    says = ("docstrings",)
    assert_refused(tmp_path, *flags, says=says, fix="unset PYTHONOPTIMIZE", forked=False, PYTHONOPTIMIZE="2")


@pytest.mark.parametrize("damage", ["{", "[]", '{"state": "ok"}', "\0"])
def test_a_damaged_status_is_refused_and_its_run_kept(damage: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    take_folder(run, "it").release()
    (run / "status.json").write_text(damage)
    arguments = ("--output_dir", str(run))
    assert_refused(tmp_path, *arguments, says=("damaged run", "status.json"), fix="--overwrite_output_dir")


def write_checkpoint(folder: Path, step: int, **asked: Any) -> Path:
    """What a checkpoint holds beside its tensors."""
    write_run(folder, steps=step, end=False)
    config = resolved(RunConfig(scale="laptop", **asked), accelerator_visible=False)
    tokens, weights = {"train": "0" * 64, "eval": "0" * 64}, "0" * 64
    write_manifest(
        folder, step=step, strategy="single", world_size=1, config=config.to_dict(), schedule={},
        tokens_sha256=tokens, initial_weights_sha256=weights, environment={}, deepspeed=None,
        files=digests_of(folder, ("steps.jsonl", "evals.jsonl")),
    )  # fmt: skip
    return folder


def write_manifest(folder: Path, **values: Any) -> None:
    """As the study writes it, with other values in it."""
    file = folder / "checkpoint.json"
    write_json(file, sealed((read_json(file) if file.exists() else {}) | values))


@pytest.mark.parametrize("rows", ["", '{"step": 1}\n', "torn", None])
def test_a_checkpoint_whose_rows_are_damaged_is_refused(rows: str | None, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", step=3)
    (checkpoint / "steps.jsonl").unlink()
    if rows is not None:
        (checkpoint / "steps.jsonl").write_text(rows)
    arguments = ("--scale", "laptop", "--resume_from_checkpoint", str(checkpoint))
    assert_refused(tmp_path, *arguments, says=("not a whole checkpoint", "steps.jsonl"), fix="checkpoint.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", None), ("step", "3"), ("step", -1), ("step", True), ("config", []), ("world_size", []), ("schedule", 3)],
)
def test_a_checkpoint_with_a_damaged_manifest_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", step=3)
    write_manifest(checkpoint, **{key: value})
    arguments = ("--scale", "laptop", "--resume_from_checkpoint", str(checkpoint))
    said = f"{key} is {value!r}, not a value of type" if value != -1 else "3 rows at step -1"
    assert_refused(tmp_path, *arguments, says=("is not a whole checkpoint", said), fix="name a folder that holds")


def test_a_manifest_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", step=3)
    write_json(checkpoint / "checkpoint.json", read_json(checkpoint / "checkpoint.json") | {"schedule": {"a": 1}})
    arguments = ("--scale", "laptop", "--resume_from_checkpoint", str(checkpoint))
    assert_refused(tmp_path, *arguments, says=("checkpoint.json", "was changed"), fix="name a folder that holds")


def test_a_checkpoint_of_other_data_or_other_initial_weights_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", step=3)
    config = resolved(RunConfig(scale="laptop"), accelerator_visible=False)
    tokens = load_data(config, tmp_path / "cache").source["tokens_sha256"]
    arguments = ("--scale", "laptop", "--resume_from_checkpoint", str(checkpoint))
    write_manifest(checkpoint, tokens_sha256=tokens | {"eval": "0" * 64})
    assert_refused(tmp_path, *arguments, says=("the eval samples are not those", str(checkpoint)), fix="start anew")
    write_manifest(checkpoint, tokens_sha256=tokens)
    assert_refused(tmp_path, *arguments, says=("other initial weights", str(checkpoint)), fix="start anew")


def test_a_checkpoint_of_another_stack_or_other_engine_settings_is_refused(tmp_path: Path) -> None:
    config = resolved(RunConfig(scale="laptop"), accelerator_visible=False)
    initial = materialize_initial_weights(config, tmp_path / "cache")
    here = describe_environment() | {"threads_per_rank": 1}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", step=3)
    write_manifest(
        checkpoint, tokens_sha256=load_data(config, tmp_path / "cache").source["tokens_sha256"],
        initial_weights_sha256=initial.sha256, environment=here | {"packages": here["packages"] | {"torch": "2.0.0"}},
    )  # fmt: skip
    arguments = ("--scale", "laptop", "--resume_from_checkpoint", str(checkpoint))
    assert_refused(tmp_path, *arguments, says=("torch was 2.0.0", str(checkpoint)), fix="where it was saved")
    write_manifest(checkpoint, deepspeed={"zero_optimization": {"stage": 1}})
    assert_refused(tmp_path, *arguments, says=("DeepSpeed settings of single",), fix="start anew")


def test_a_checkpoint_of_another_run_is_refused_with_the_flag_that_differs(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", step=3, seed=7)
    arguments = ("--scale", "laptop", "--resume_from_checkpoint", str(checkpoint))
    assert_refused(tmp_path, *arguments, says=("--seed 7", "42"), fix="--seed 7")


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("zero3", 4), ("zero3_nvme", 2)])
def test_other_ranks_are_taken_and_another_strategy_is_refused(strategy: str, ranks: int, tmp_path: Path) -> None:
    saved, launch = write_checkpoint(tmp_path / "checkpoint", step=3), launch_of(strategy, ranks)
    config = resolved(RunConfig(scale="laptop", resume_from_checkpoint=str(saved)), accelerator_visible=False)
    write_manifest(saved, world_size=8, strategy=strategy, deepspeed=launch.strategy.deepspeed)
    if strategy == "zero3_nvme":
        with pytest.raises(UserError, match="zero3_nvme cannot resume"):
            find_checkpoint(config, launch, tmp_path)
        return
    assert find_checkpoint(config, launch, tmp_path) is not None
    with pytest.raises(UserError, match=f"saved by {strategy}, this run is single"):
        find_checkpoint(config, launch_of("single", 1), tmp_path)


def test_a_checkpoint_with_nothing_left_to_do_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", step=3, max_steps=3)
    arguments = ("--scale", "laptop", "--max_steps", "3", "--resume_from_checkpoint", str(checkpoint))
    assert_refused(tmp_path, *arguments, says=("step 3 of 3",), fix="earlier")


def test_ranks_of_one_launch_say_it_once(tmp_path: Path) -> None:
    # A launcher ends all ranks as soon as one has left: rank 0 must have spoken by then. Which is first is chance.
    result = refuse(tmp_path, "--scale", "laptop", "--global_batch_size", "7", launched_with=("ddp", 2))
    assert result.returncode != 0
    ours = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1, result.stderr
    assert_is_one_line(ours[0], ("--global_batch_size 7", "2 ranks"), "such as 8")
    assert result.stdout == ""
    # What torch's launcher adds names the ranks and their exit status; no traceback of the study is in it.
    assert 'study/train.py", line' not in result.stderr
    assert sorted(path.name for path in (tmp_path / "cwd").iterdir()) == ["accelerate_configs"]


def test_an_nvme_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("libaio is not installed")
    (tmp_path / "file").write_text("a regular file")
    nvme_path = str(tmp_path / "file" / "nvme")
    before = contents(tmp_path)
    result = refuse(tmp_path, "--scale", "laptop", "--nvme_path", nvme_path, launched_with=("zero3_nvme", 1))
    assert result.returncode != 0
    ours = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1, result.stderr
    assert_is_one_line(ours[0], ("--nvme_path", nvme_path), "a local drive")
    created = {name for name in contents(tmp_path) if name not in before}
    assert created == {"cwd", "cwd/accelerate_configs"}


def test_a_drive_that_is_too_small_for_what_would_be_swapped_is_refused(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free > 1343 * 2**30:
        pytest.skip("the drive here is large enough")
    model = ("--scale", "laptop", "--task", "gpt-wikitext", "--model_name_or_path", "gpt-1t-9layers")
    folders = ("--nvme_path", str(tmp_path / "drive"), "--output_dir", str(tmp_path / "run"))
    result = fork_ranks("zero3_nvme", "study/train.py", *model, *folders)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2
    assert len(lines) == 1, result.stderr
    # 16 bytes of each for the optimizer's state and gradients, and 4 for the parameter itself, on both ranks together.
    assert "zero3_nvme with 72 billion parameters takes 1343.8 GiB there" in lines[0]
    assert list(tmp_path.iterdir()) == []


def launch_of(strategy: str, ranks: int) -> Launch:
    return Launch(read_strategy(strategy), ranks, 0, 0, ranks)


@pytest.mark.parametrize(("peft", "takes_gib"), [("none", 1343.8), ("lora", 268.8)])
def test_a_drive_need_not_hold_an_optimizer_of_frozen_weights(tmp_path: Path, peft: Any, takes_gib: float) -> None:
    if shutil.disk_usage(tmp_path).free > takes_gib * 2**30:
        pytest.skip("the drive here is large enough")
    config = RunConfig(task="gpt-wikitext", model_name_or_path="gpt-1t-9layers", nvme_path=str(tmp_path), peft=peft)
    with pytest.raises(Unsupported, match=f" takes {takes_gib} GiB there"):
        check_room_to_swap(resolved(config, accelerator_visible=False), launch_of("zero3_nvme", 2))


@pytest.mark.parametrize(("strategy", "ranks", "gpus"), [("zero3", 2, 1), ("ddp", 9, 8), ("fsdp2", 2, 1)])
def test_more_ranks_than_gpus_are_refused_with_the_command_that_fits(strategy: str, ranks: int, gpus: int) -> None:
    with pytest.raises(UserError) as refusal:
        check_devices(launch_of(strategy, ranks), gpus)
    assert f"{ranks} ranks" in refusal.value.problem
    assert f"{gpus} GPU" in refusal.value.problem
    command = f"accelerate launch --config_file accelerate_configs/{strategy}.yaml --num_processes {gpus} "
    assert command in refusal.value.fix


@pytest.mark.parametrize(
    ("strategy", "ranks", "gpus", "fix"),
    [
        ("hsdp", 2, 0, "--num_processes 4"), ("zero3_hpz", 1, 0, "--num_processes 4"),
        ("hsdp", 5, 8, "--num_processes 4"), ("hsdp", 4, 4, None), ("zero3_hpz", 6, 0, None),
        # A box of two GPUs is told what it can run.
        ("hsdp", 2, 2, "use fsdp2"), ("zero3_hpz", 2, 2, "use zero3"),
    ],
)  # fmt: skip
def test_two_copies_take_four_ranks(strategy: str, ranks: int, gpus: int, fix: str | None) -> None:
    if fix is None:
        check_copies(RunConfig(), launch_of(strategy, ranks), gpus)
        return
    with pytest.raises(Unsupported, match=f"{strategy} takes an even number of ranks from 4 up") as refusal:
        check_copies(RunConfig(), launch_of(strategy, ranks), gpus)
    assert fix in refusal.value.fix


@pytest.mark.parametrize("mesh", [(2, 3), (4, 1), (2, 4)])
def test_a_mesh_of_your_own_must_be_the_ranks(mesh: tuple[int, int]) -> None:
    asked = {"dp_replicate_size": mesh[0]}
    own = dataclasses.replace(read_strategy("hsdp"), name="hsdp-custom-12345678", own_settings=asked, mesh=mesh)
    launch = Launch(own, 4, 0, 0, 4)
    with pytest.raises(UserError, match=f"asks for {mesh[0]} copies of {mesh[1]} ranks, which 4 ranks are not"):
        check_copies(RunConfig(), launch, 0)


def test_a_second_copy_over_ranks_that_do_not_divide_is_refused() -> None:
    config = RunConfig(engine_override=("zero_optimization.zero_hpz_partition_size=3",))
    with pytest.raises(UserError, match="zero3 asks for 3 ranks, which 4 ranks are not"):
        check_copies(config, launch_of("zero3", 4), 0)


def test_idle_gpus_get_a_notice_with_the_command_that_uses_them() -> None:
    notice = check_devices(launch_of("zero2", 2), 8)
    assert notice is not None
    assert "6 of 8 GPUs" in notice
    assert "--num_processes 8" in notice


def test_ranks_that_fit_the_box_get_neither() -> None:
    assert check_devices(launch_of("zero2", 8), 8) is None
    assert check_devices(launch_of("single", 1), 8) is None
    # Without a GPU the ranks are processes, as many as wanted.
    assert check_devices(launch_of("zero2", 4), 0) is None


def test_help_reaches_the_terminal(tmp_path: Path) -> None:
    result = refuse(tmp_path, "--help")
    assert result.returncode == 0
    assert "--resume_from_checkpoint" in result.stdout
    assert result.stderr == ""
