from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from engine.test_refusals import assert_is_one_line
from engines import ONE_THREAD, ROOT
from forked import fork_ranks, fork_script
from runs import FLAGS as RUN_FLAGS
from study.config.errors import UserError
from study.host.folders import swap_folder
from study.records.directory import read_run, read_status
from study.records.lock import LOCK_NAME, SWAP_PREFIX, check_is_run_directory, lock_run_directory
from sweeps import TINY, contents, run, wait_until, write_suite
from synthetic_records import write_run

FLAGS = (*RUN_FLAGS, "--task", "gpt-wikitext")
PHOTO = b"not a swap file"


def write_photo(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "photo.jpg"
    file.write_bytes(PHOTO)
    return file


def train_alone(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run `single` without a launcher, so that the exit status is the script's."""
    script, environment = ROOT / "study/train.py", os.environ | ONE_THREAD
    return fork_script(script, *FLAGS, *flags, folder=ROOT, environment=environment, read_at_import={})


def test_simultaneous_runs_share_no_swap_files_train_as_if_alone_and_leave_the_users_files_on_their_drive(tmp_path):
    drive, user_folders = tmp_path / "drive", ("kept", "failing", "zero-study-swap-holiday")
    for name in user_folders:
        write_photo(drive / name)
    # Two folders of one name, one of them on the disk that both swap to.
    on_drive, elsewhere = drive / "run", tmp_path / "elsewhere" / "run"
    alone, failing = tmp_path / "alone", tmp_path / "runs" / "failing"

    def train(output_dir: Path) -> subprocess.CompletedProcess[str]:
        if output_dir == alone:
            return train_alone("--output_dir", str(alone))
        # A process locks five buffers of the shipped size in 2 GB of memory, which takes seconds.
        small_buffers = "--engine_override=zero_optimization.offload_param.buffer_size=2097152"
        flags = ["--output_dir", str(output_dir), "--nvme_path", str(drive), small_buffers]
        if output_dir == failing:
            # No tensor is as large, so nothing is swapped.
            flags += ["--engine_override", "aio.block_size=16777216"]
        return fork_ranks("zero3_nvme", "study/train.py", *FLAGS, *flags, ranks=1)

    with ThreadPoolExecutor() as pool:
        *succeeded, failed = pool.map(train, (alone, on_drive, elsewhere, failing))
    assert [result.returncode for result in succeeded] == [0, 0, 0], [result.stderr[-1000:] for result in succeeded]
    assert failed.returncode != 0
    assert "swapped no optimizer" in read_status(failing)["reason"]
    expected = [row["loss"] for row in read_run(alone).steps]
    records = [read_run(folder) for folder in (on_drive, elsewhere)]
    for record in records:
        assert [row["loss"] for row in record.steps] == pytest.approx(expected, rel=1e-5)
    swapped_to = {Path(record.engine["nvme_path"]) for record in records}
    assert (len(swapped_to), {path.parent for path in swapped_to}) == (2, {drive})
    assert {path.name for path in drive.iterdir()} == {*user_folders, "run"}
    for name in user_folders:
        assert contents(drive / name) == {"photo.jpg": PHOTO}


def test_a_folder_with_another_program_s_status_json_is_not_overwritten(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "deployed"}')
    (tmp_path / "config.json").write_text("mine")
    before = contents(tmp_path)
    result = train_alone("--output_dir", str(tmp_path), "--overwrite_output_dir")
    assert_is_one_line(result.stderr, ("is not a run directory",), "name a new folder")
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "is_written"),
    [
        ("log.txt", True),
        ("checkpoints/step_0000001", True),
        ("checkpoints/step_0000001/model", True),
        ("checkpoints/best", False),
    ],
)
def test_a_link_where_a_run_writes_in_place_is_refused(tmp_path, name, is_written):
    """A copied folder of runs may contain a link to the user's files."""
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / "status.json").write_text("{}")
    (tmp_path / "run" / LOCK_NAME).touch()
    (tmp_path / "run" / name).symlink_to(tmp_path)
    refusal = pytest.raises(UserError, match=f"contains {name}, a link") if is_written else contextlib.nullcontext()
    with refusal:
        check_is_run_directory(tmp_path / "run", "the folder", "")


def start_interruptible(*flags: str) -> subprocess.Popen[str]:
    """Start a run that Ctrl-C reaches: a background shell ignores SIGINT, and its children inherit that."""
    return subprocess.Popen(
        [sys.executable, "study/train.py", *FLAGS, *flags],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_prints_the_command_that_resumes_from_the_last_checkpoint(tmp_path):
    run = tmp_path / "run"
    process = start_interruptible("--max_steps", "2000", "--checkpointing_steps", "3", "--output_dir", str(run))
    wait_until(lambda: any(run.glob("checkpoints/step_*/checkpoint.json")))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    last = max(file.parent.name for file in run.glob("checkpoints/step_*/checkpoint.json"))
    hint = f"--resume_from_checkpoint latest resumes from {last}"
    assert (process.returncode, read_status(run)["hint"]) == (1, hint)


def test_a_rank_that_is_killed_after_a_checkpoint_is_told_of_and_the_run_resumes(tmp_path):
    run = tmp_path / "run"
    flags = [*FLAGS, "--max_steps", "2000", "--checkpointing_steps", "3", "--output_dir", str(run)]
    command = ["accelerate.commands.launch", "--config_file", "accelerate_configs/ddp.yaml", "--main_process_port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "study/train.py", *flags],
        cwd=ROOT,
        env=os.environ | ONE_THREAD,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: any(run.glob("checkpoints/step_*/checkpoint.json")))
    (killed,) = (
        rank
        for rank in psutil.Process(process.pid).children(recursive=True)
        if rank.environ().get("RANK") == "1" and "study/train.py" in rank.cmdline()
    )
    killed.kill()
    assert process.wait(timeout=120) != 0
    last = max(file.parent.name for file in run.glob("checkpoints/step_*/checkpoint.json"))
    status = read_status(run)
    # Either it loses the connection first, or the launcher ends it.
    assert status["state"] in ("failed", "interrupted")
    assert "another rank died" in status["reason"]
    assert status["hint"] == f"--resume_from_checkpoint latest resumes from {last}"


def test_ctrl_c_before_there_is_a_record_is_one_line_and_leaves_nothing(tmp_path):
    process = start_interruptible("--output_dir", str(tmp_path / "run"))
    # During the import of torch, which takes seconds, an interruption may end in any error.
    wait_until(lambda: "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert (process.returncode, printed) == (1, "interrupted: stopped from the keyboard. To continue: run it again.\n")
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_refused_to_every_rank_of_another_launch(tmp_path):
    folder = write_run(tmp_path, "single")
    flags = ("--output_dir", str(folder), "--overwrite_output_dir")
    with lock_run_directory(folder, "it"):
        before = contents(folder)
        alone, launched = train_alone(*flags), fork_ranks("ddp", "study/train.py", *FLAGS, *flags, grace_s=5)
        says = f"another run is active in --output_dir {folder}: pid {os.getpid()} on"
        assert_is_one_line(alone.stderr, (says,), f"wait for it, end it (kill {os.getpid()})")
        # The other rank prints and writes nothing.
        assert (alone.returncode, launched.returncode != 0, launched.stderr.count(says)) == (2, True, 1)
        assert contents(folder) == before
    assert train_alone(*flags).returncode == 0
    assert (read_run(folder).state, read_status(folder)["attempt"]) == ("ok", 2)


def test_a_sweep_skips_folders_with_other_files_or_another_run_and_continues(tmp_path):
    suite, runs = write_suite(tmp_path, {"strategy": "single", "seed": [1, 2, 3]}, TINY), tmp_path / "runs"
    commands = run(suite, runs, "--dry_run").stdout.splitlines()
    cells = [words for line in commands if "--output_dir" in (words := shlex.split(line))]
    noted, locked, free = [ROOT / words[words.index("--output_dir") + 1] for words in cells]
    write_photo(noted)
    with lock_run_directory(locked, "it"):
        result = run(suite, runs)
    assert contents(noted) == {"photo.jpg": PHOTO}
    assert f"{noted} contains files, but no run (move them away, or name another --runs_dir)" in result.stderr
    assert [path.name for path in locked.iterdir()] == [".zero-study-run.lock"]
    assert f"another run is active in {locked}: pid {os.getpid()} on" in result.stderr
    assert read_run(free).state == "ok"
    assert result.returncode == 1
    assert "Traceback" not in result.stderr


def leave_swap_folder(drive: Path) -> None:
    """Use a swap folder in a process that is killed."""
    if (child := os.fork()) == 0:
        with swap_folder(drive) as folder:
            (folder / "0.tensor.swp").write_bytes(b"state")
            os._exit(9)
    os.waitpid(child, 0)


def test_a_dead_process_s_swap_folder_is_cleared_away_and_a_living_one_s_and_a_likeness_are_not(tmp_path):
    likeness, link = write_photo(tmp_path / f"{SWAP_PREFIX}mine"), tmp_path / f"{SWAP_PREFIX}link"
    with swap_folder(tmp_path) as theirs:
        (theirs / "0.tensor.swp").write_bytes(b"state")
        link.symlink_to(theirs)
        leave_swap_folder(tmp_path)
        assert len(list(tmp_path.iterdir())) == 4
        with swap_folder(tmp_path) as swap:
            assert set(tmp_path.iterdir()) == {theirs, likeness.parent, link, swap}
            assert (theirs / "0.tensor.swp").read_bytes() == b"state"
            # Another rank of the same run, which fails on a full disk, for example.
            leave_swap_folder(tmp_path)
        assert set(tmp_path.iterdir()) == {theirs, likeness.parent, link}
    # A link to a folder is not a folder.
    assert set(tmp_path.iterdir()) == {likeness.parent, link}
    assert likeness.read_bytes() == PHOTO


def test_the_swap_folder_of_another_machine_is_left_to_it(tmp_path):
    with swap_folder(tmp_path) as swap:
        theirs = shutil.copytree(swap, tmp_path / f"{swap.name}-theirs")
        (marker,) = theirs.iterdir()
        marker.write_text('{"host": "another"}')
    assert list(tmp_path.iterdir()) == [theirs]


def test_a_child_does_not_hold_the_lock_of_a_parent_that_is_gone(tmp_path):
    from study.records.lock import FileLock, LockHeldError

    file = tmp_path / "lock"
    lock = FileLock(file, "held")
    reader, writer = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as started:
        for create in (False, True):
            with pytest.raises(LockHeldError, match=f"pid {os.getpid()} on this machine, since 20"):
                FileLock(file, "held", create=create)
        lock.release()
        FileLock(file, "held", create=False).release()
        FileLock(file, "held").release()
        assert started.poll() is None
        started.kill()
    os.close(writer)
    os.close(reader)
    os.waitpid(forked, 0)
