from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines import ROOT, launch
from forked import fork_ranks, fork_script
from study.config.errors import UserError
from study.config.flags import RunConfig, resolve_config
from study.config.strategies import read_strategy
from study.host.environment import describe_environment
from study.host.folders import with_digest
from study.records.directory import read_json, write_json
from study.records.lock import lock_run_directory
from study.run.checkpoint import file_digests
from study.run.resume import find_checkpoint
from study.workloads.initial import materialize_initial_weights
from study.workloads.tasks import load_data
from sweeps import contents
from unit.test_records import write_run
from unit.test_refusals import make_launch

LAPTOP = resolve_config(RunConfig(scale="laptop"), accelerator_visible=False)
NOBODY = "~nobody-of-this-name/x"


def assert_refused(
    box: Path, *arguments: str, says: tuple[str, ...], fix: str = "", forked: bool = True, **environment: str
) -> None:
    """Run study/train.py in an empty folder without a hub, in a fork unless imports matter; assert that it is refused
    in one line and leaves nothing.
    """
    cwd, command = box / "cwd", [str(ROOT / "study/train.py"), *arguments]
    cwd.mkdir(exist_ok=True)
    before = sorted(box.rglob("*")), contents(box)
    launchers = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"}
    starts = ("HF_", "ACCELERATE_", "FSDP_", "TRANSFORMERS_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(starts) and key not in launchers}
    # Libraries read these at import: a fork has those of all tests. They would try an unreachable hub for minutes.
    hub = {"HF_HOME": str(box.parent / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    caches = {key: str(box.parent / "cache") for key in ("ZERO_STUDY_CACHE", "XDG_CACHE_HOME")}
    environment = inherited | hub | caches | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    if forked:
        result = fork_script(*command, folder=cwd, environment=environment, read_at_import=hub, timeout=60)
    else:
        command = [sys.executable, *command]
        result = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=120)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert_is_one_line(result.stderr, says, fix)
    assert (sorted(box.rglob("*")), contents(box)) == before


def assert_is_one_line(stderr: str, says: tuple[str, ...], fix: str) -> None:
    (line,) = stderr.splitlines()
    problem, _, advice = line.partition(". To fix it: ")
    assert problem.startswith("error: ")
    assert all(part in problem for part in says), line
    assert advice
    assert fix in advice


def write_checkpoint(folder: Path, step: int, **flags: Any) -> Path:
    """Write the files of a checkpoint except its tensors."""
    write_run(folder, steps=step, end=False)
    config = dataclasses.replace(LAPTOP, **flags)
    tokens, weights = {"train": "0" * 64, "eval": "0" * 64}, "0" * 64
    write_manifest(
        folder,
        step=step,
        strategy="single",
        world_size=1,
        config=config.to_dict(),
        schedule={},
        tokens_sha256=tokens,
        initial_weights_sha256=weights,
        environment={},
        deepspeed=None,
        files=file_digests(folder, ("steps.jsonl", "evals.jsonl")),
    )
    return folder


def write_manifest(folder: Path, **values: Any) -> None:
    """Write a sealed manifest with these values, as the study does."""
    file = folder / "checkpoint.json"
    write_json(file, with_digest((read_json(file) if file.exists() else {}) | values))


def text(name: str, content: str) -> Callable[[Path], object]:
    def write(box: Path) -> None:
        (box / name).parent.mkdir(exist_ok=True)
        (box / name).write_text(content)

    return write


def damaged_run(box: Path) -> None:
    lock_run_directory(write_run(box / "run"), "it").release()
    (box / "run/status.json").write_text("{")


def matching_checkpoint(box: Path, packages: Sequence[tuple[str, str]] = (), **manifest: Any) -> None:
    """Write a checkpoint that matches this run except for the given values."""
    tokens = load_data(LAPTOP, box.parent / "cache").source["tokens_sha256"]
    weights = materialize_initial_weights(LAPTOP, box.parent / "cache").sha256
    environment = describe_environment() | {"threads_per_rank": 1}
    environment["packages"].update(packages)
    values = {"tokens_sha256": tokens, "initial_weights_sha256": weights, "environment": environment, **manifest}
    write_manifest(write_checkpoint(box / "checkpoint", step=3), **values)


STARS = text("rows.jsonl", '{"text": "good", "label": 7}\n' * 64)
TEN_WORDS = text(
    "model/config.json", '{"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 10}'
)
AGAIN, RUN, MINE = "--overwrite_output_dir", ("--output_dir", "{box}/run"), ("--output_dir", "{box}/thesis")
RESUME = ("--resume_from_checkpoint", "{box}/checkpoint")
OWN_MODEL = ("--task", "gpt-wikitext", "--seq_length", "32", "--model_name_or_path", "{box}/model")
# Preparation of the folder, flags, words of the problem, words of the fix.
REQUESTS: list[tuple[Callable[[Path], object] | None, tuple[str, ...], tuple[str, ...], str]] = [
    (None, ("--global_batch_size", "64", "--train_samples", "32"), ("64", "32"), "--train_samples 64"),
    (None, ("--model_name_or_path", "bert-tinny"), ("bert-tinny",), "bert-tiny"),
    (
        None,
        ("--max_steps", "11", "--profile_steps", "4"),
        ("--profile_steps 4 needs 12 steps", "11"),
        "--max_steps 12 or more",
    ),
    (None, ("--data", "hub"), ("--data hub", "stanfordnlp/imdb"), "--data builtin"),
    (None, ("--engine_override", "gradient_clipping=2"), ("--engine_override", "single"), "zero*"),
    (None, ("--device_memory_cap_gib", "8"), ("--device_memory_cap_gib", "no GPU"), "leave"),
    (None, ("--resume_from_checkpoint", "nonsense"), ("--resume_from_checkpoint nonsense",), "`latest`"),
    (None, ("--resume_from_checkpoint", "latest"), ("checkpoint",), "--resume_from_checkpoint"),
    (None, ("--report_to", "carrier-pigeon"), ("--report_to carrier-pigeon",), "none"),
    (None, ("--output_dir", NOBODY), (NOBODY,), "full path"),
    # Of wrong data and models, one each that is seen late; the others are in test_sources.py and test_models.py.
    (STARS, ("--data", "{box}/rows.jsonl"), ("rows.jsonl", "`label`", "7"), "0 (bad) or 1"),
    (TEN_WORDS, OWN_MODEL, ("/model", "10"), ""),
    # Folders of other programs, and finished or damaged runs, are overwritten only on request.
    (lambda box: write_run(box / "run"), RUN, ("/run",), "--overwrite_output_dir"),
    (text("thesis/chapter.txt", "years of work"), MINE, ("thesis",), "new folder"),
    (text("thesis/chapter.txt", "years of work"), (*MINE, AGAIN), ("thesis",), "new folder"),
    (lambda box: (box / "run").symlink_to(box / "not mounted"), RUN, ("link",), "name a folder"),
    (text("file", ""), ("--output_dir", "{box}/file/far/below"), ("{box}/file/far/below",), "name a folder"),
    (damaged_run, RUN, ("status.json",), AGAIN),
    # Checkpoints of another run.
    (lambda box: matching_checkpoint(box, tokens_sha256={}), RESUME, ("eval samples",), "start from scratch"),
    (
        lambda box: matching_checkpoint(box, initial_weights_sha256="0" * 64),
        RESUME,
        ("initial weights",),
        "start from scratch",
    ),
    (lambda box: matching_checkpoint(box, [("torch", "2.0.0")]), RESUME, ("torch was 2.0.0",), "where it was saved"),
    (lambda box: matching_checkpoint(box, deepspeed={"stage": 1}), RESUME, ("DeepSpeed",), "start from scratch"),
    (lambda box: write_checkpoint(box / "checkpoint", step=3, seed=7), RESUME, ("with seed 7", "42"), "--seed 7"),
    (
        lambda box: write_checkpoint(box / "checkpoint", step=3, max_steps=3),
        (*RESUME, "--max_steps", "3"),
        ("3 of 3",),
        "earlier",
    ),
]


@pytest.mark.parametrize(
    ("prepare", "flags", "names", "fix"), REQUESTS, ids=[" ".join(request[1])[:60] for request in REQUESTS]
)
def test_a_bad_request_ends_in_one_line_and_leaves_nothing(prepare, flags, names, fix, tmp_path):
    if prepare:
        prepare(tmp_path)
    arguments, words = ([part.replace("{box}", str(tmp_path)) for part in parts] for parts in (flags, names))
    assert_refused(tmp_path, "--scale", "laptop", *arguments, says=tuple(words), fix=fix)


def test_an_unknown_flag_and_a_wrong_variable_are_refused_before_imports(tmp_path):
    wrong = {"OMP_NUM_THREADS": "abc"}
    assert_refused(tmp_path, "--nonsense", "1", says=("--nonsense",), fix="--help", forked=False)
    assert_refused(tmp_path, "--help", says=("OMP_NUM_THREADS", "abc"), fix="unset it", forked=False, **wrong)


def test_a_changed_manifest_another_strategy_and_another_world_size_with_nvme_or_muon_are_refused(tmp_path):
    """test_resume.py resumes with other world sizes."""
    saved = write_checkpoint(tmp_path / "checkpoint", step=3)
    muon: dict[str, Any] = {"optimizer": "muon", "max_grad_norm": 0.0}
    for saver, strategy, flags, says in (
        ("ddp", "single", {}, "saved by ddp, but this run is single"),
        ("zero3_nvme", "zero3_nvme", {}, "zero3_nvme cannot resume"),
        ("zero3", "zero3", muon, r"saved by 8 ranks, .* not Muon's momentum"),
    ):
        config = dataclasses.replace(LAPTOP, resume_from_checkpoint=str(saved), **flags)
        launch = make_launch(strategy, 1 if strategy == "single" else 4)
        deepspeed = read_strategy(saver).deepspeed
        write_manifest(saved, world_size=8, strategy=saver, deepspeed=deepspeed, config=config.to_dict())
        with pytest.raises(UserError, match=says):
            find_checkpoint(config, launch, tmp_path)
    manifest, sealed = saved / "checkpoint.json", read_json(saved / "checkpoint.json")
    for changed, says in ((sealed | {"schedule": {"a": 1}}, "changed"), (with_digest(sealed | {"step": "3"}), "step")):
        write_json(manifest, changed)
        with pytest.raises(UserError, match=says):
            find_checkpoint(config, launch, tmp_path)


def test_ranks_of_one_launch_print_an_error_once(tmp_path: Path) -> None:
    # A launcher ends all ranks as soon as one has exited, so rank 0 must print first. Which rank exits first is random.
    flags = ("--scale", "laptop", "--global_batch_size", "7", "--output_dir", str(tmp_path / "run"))
    result = launch("ddp", "study/train.py", *flags)
    assert (result.returncode != 0, result.stdout, list(tmp_path.iterdir())) == (True, "", [])
    # torch's launcher prints the ranks and their exit status; no traceback of the study is in its output.
    assert 'study/train.py", line' not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert_is_one_line(line, ("--global_batch_size 7", "2 ranks"), "such as 8")


def test_an_nvme_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("libaio is not installed")
    (tmp_path / "file").write_text("a regular file")
    folders = ("--nvme_path", str(tmp_path / "file" / "nvme"), "--output_dir", str(tmp_path / "run"))
    result = fork_ranks("zero3_nvme", "study/train.py", "--scale", "laptop", *folders, ranks=1)
    assert result.returncode == 2
    assert_is_one_line(result.stderr.splitlines()[-1], ("--nvme_path", folders[1]), "a local drive")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
