"""Several machines: a launcher on each, with a separate working directory. Here two launchers on one machine."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from engines import ONE_THREAD, ROOT, launch
from runs import FLAGS, losses
from study.config.errors import Unsupported, UserError
from study.config.launch_context import Launch, read_launch
from study.config.strategies import read_strategy
from study.records.directory import read_json, read_run
from study.records.outcome import Outcome
from study.run import rendezvous
from study.run.checks import check_devices
from sweeps import wait_until

GPT = ("--task", "gpt-wikitext")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def on_two(tmp_path: Path, strategy: str, *flags_by_machine: tuple[str, ...]) -> list[tuple[int, str]]:
    """Run the README's command for several machines, each in its own checkout; the second has a separate cache."""
    port, launchers = str(free_port()), []
    for machine, flags in enumerate(flags_by_machine):
        checkout = tmp_path / f"machine{machine}"
        shutil.copytree(ROOT / "accelerate_configs", checkout / "accelerate_configs")
        (checkout / "study").symlink_to(ROOT / "study")
        command = [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{strategy}.yaml",
            "--num_machines", "2", "--machine_rank", str(machine), "--main_process_ip", "127.0.0.1",
            "--main_process_port", port, "--num_processes", "2", "study/train.py", *FLAGS, *GPT, *flags,
        ]  # fmt: skip
        environment = os.environ | ONE_THREAD | ({"ZERO_STUDY_CACHE": str(tmp_path / "cache")} if machine else {})
        launchers.append(
            subprocess.Popen(
                command, cwd=checkout, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    try:
        printed = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                # Its ranks run in separate sessions.
                for process in psutil.Process(launcher.pid).children(recursive=True):
                    process.kill()
                launcher.kill()
    return [(launcher.returncode, text) for launcher, text in zip(launchers, printed, strict=True)]


@pytest.mark.parametrize(
    ("strategy", "shares_folder"), [("ddp", False), pytest.param("zero3", True, marks=pytest.mark.long)]
)
def test_two_machines_train_as_one_does(strategy, shares_folder, tmp_path, get_run):
    shared = tmp_path / "shared"
    flags = [("--output_dir", str(shared))] * 2 if shares_folder else [(), ("--output_dir", "runs/of_my_own")]
    (status, first), (other_status, second) = on_two(tmp_path, strategy, *flags)
    assert (status, other_status) == (0, 0), first + second
    (folder,) = [shared] if shares_folder else (tmp_path / "machine0" / "runs").iterdir()
    run, expected = read_run(folder), get_run(strategy, *GPT)
    assert losses(run) == pytest.approx(losses(expected), rel=1e-6)
    for key in ("lr", "samples_hash"):
        assert [row[key] for row in run.steps] == [row[key] for row in expected.steps]
    assert (run.engine["world_size"], len(run.memory["ranks"])) == (2, 2)
    assert run.engine["initial_weights_sha256"] == expected.engine["initial_weights_sha256"]
    # Rank 0 writes the record, which includes the other machine.
    assert [machine.keys() >= {"cpu", "devices"} for machine in run.environment["other_machines"]] == [True]
    assert not (tmp_path / "machine1" / "runs").exists()
    assert "rank 0's machine shows the run's progress" in second


def gather(monkeypatch: pytest.MonkeyPatch, works: list[Callable[[], Any]]) -> list[Any]:
    """Return what each rank's function returns or raises, in one process per rank, as if on separate machines."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(len(works)),
        "GROUP_WORLD_SIZE": str(len(works)),
        "LOCAL_RANK": "0",
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    fork = multiprocessing.get_context("fork")
    answers = [fork.SimpleQueue() for _ in works]
    # The store's thread resolves the name of each client: a fork at that time would copy a locked lock.
    all_started = fork.Event()

    def run_rank(rank: int) -> None:
        all_started.wait()
        os.environ |= {"RANK": str(rank), "GROUP_RANK": str(rank)}
        try:
            answers[rank].put(works[rank]())
        except UserError as refusal:
            rendezvous.publish_refusal(refusal)
            answers[rank].put(refusal.to_json())
            rendezvous.wait_for_acknowledgements()

    ranks = [fork.Process(target=run_rank, args=(rank,)) for rank in range(len(works))]
    for rank in ranks:
        rank.start()
    all_started.set()
    for rank in ranks:
        rank.join(20)
        if rank.is_alive():
            rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * len(works)
    return [answer.get() for answer in answers]


def as_main(agreed: dict[str, Any]) -> Callable[[], Any]:
    return lambda: rendezvous.sync_as_main(agreed, lambda: {"pid": 7}, print)


def as_other(agreed: dict[str, Any], machine: str = "", look: Callable[[Any], object] = id) -> Callable[[], Any]:
    return lambda: rendezvous.sync_with_main(agreed, {"cpu": machine}, look)


def raise_unsupported(*_: Any) -> None:
    raise Unsupported("the folder is not here", "share it")


def test_ranks_that_agree_all_begin_and_the_main_process_has_the_other_machines(monkeypatch) -> None:
    agreed = {"the initial weights' digest": "a", "--seed": 1, "nested": {"tuple": (1, 2)}}
    answers = gather(monkeypatch, [as_main(agreed), as_other(agreed, "x"), as_other(agreed, "y")])
    assert answers == [[{"cpu": "x"}, {"cpu": "y"}], None, None]


@pytest.mark.parametrize(
    ("ranks", "problem", "who"),
    [
        (
            [as_main({"weights": "a"}), as_other({"weights": "a"}), as_other({"weights": "b"})],
            'weights is "b" on rank 2, and "a" on rank 0',
            2,
        ),
        ([as_main({}), as_other({}), as_other({}, look=raise_unsupported)], "the folder is not here", 2),
        # Before it reaches the other ranks.
        ([raise_unsupported, as_other({}), as_other({})], "the folder is not here", 0),
        ([as_main({}), raise_unsupported, as_other({})], "the folder is not here", 1),
    ],
    ids=["other weights", "another folder", "the first", "the second"],
)
def test_a_refusal_of_one_rank_reaches_all(ranks: list[Any], problem: str, who: int, monkeypatch) -> None:
    answers = gather(monkeypatch, ranks)
    expected = [problem if rank == who else f"rank {who}, on another machine: {problem}" for rank in range(3)]
    assert [answer["problem"] for answer in answers] == expected
    assert len({answer["kind"] for answer in answers}) == 1


def test_a_rank_whose_main_process_has_left_does_not_wait_for_it(monkeypatch) -> None:
    port = free_port()
    monkeypatch.setattr(rendezvous, "_CONNECT_S", 1)

    def alone() -> None:
        os.environ["MASTER_PORT"] = str(port)
        as_other({})()

    _, refusal = gather(monkeypatch, [lambda: None, alone])
    assert refusal["problem"] == "the main process exited before this run began"


def test_the_ending_is_that_of_the_rank_that_failed_first(monkeypatch) -> None:
    def fail(after_s: float, ending: Outcome) -> Callable[[], Outcome]:
        def late() -> Outcome:
            time.sleep(after_s)
            return rendezvous.publish_outcome(ending)

        return late

    cause, consequence = Outcome("oom", "rank 1: out of memory", "use less"), Outcome("failed", "connection closed")
    endings = gather(monkeypatch, [fail(1.0, consequence), fail(0, cause)])
    assert endings == [cause, cause]


def test_the_command_for_fewer_gpus_is_for_all_machines(monkeypatch) -> None:
    for name, value in {"GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refusal:
        check_devices(Launch(read_strategy("zero3"), 32, 16, 0, 16), 8)
    place = "--num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29500"
    assert f"accelerate_configs/zero3.yaml {place} --num_processes 16 study/train.py" in refusal.value.fix


def test_variables_left_over_from_another_launch_or_of_no_launcher_are_refused_and_those_of_a_launch_with_cpu() -> None:
    launched = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert read_launch(launched, shell={"HOME": "/root"}).strategy.name == "ddp"
    fsdp, deepspeed = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "old"}
    # Without a launcher they are also left over.
    for environment, shell in ((launched | fsdp, fsdp), (launched | deepspeed, deepspeed), (fsdp, fsdp)):
        with pytest.raises(UserError, match=f"not by the launched file.*unset {' '.join(shell)}"):
            read_launch(environment, shell=shell)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE"):
        with pytest.raises(UserError, match=name):
            read_launch({name: "2"}, shell={name: "2"})
    # `accelerate launch --cpu` exports these to its only process, and there is no variable to unset.
    exported = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"}
    with pytest.raises(UserError, match="the launch asks for --cpu") as refusal:
        read_launch(exported, shell={"HOME": "/root"})
    assert "unset" not in refusal.value.fix
    with pytest.raises(UserError, match=r"ACCELERATE_USE_CPU is set, .*run: unset ACCELERATE_USE_CPU$"):
        read_launch(exported, shell={"ACCELERATE_USE_CPU": "1"})


def test_a_left_over_variable_is_found_among_those_of_the_launcher(tmp_path, monkeypatch):
    """The launcher passes its environment to the ranks, including the left-over variable."""
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    result = launch("fsdp2", "study/train.py", *FLAGS, *GPT, "--output_dir", str(tmp_path / "run"))
    assert result.returncode != 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "FSDP_RESHARD_AFTER_FORWARD is set, but not by the launched file" in line
    assert not (tmp_path / "run").exists()


@pytest.fixture
def small_disk(tmp_path: Path):
    """Mount a real file system of 24 MiB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a disk here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.long
def test_a_full_disk_is_named_before_a_run_and_at_its_end(small_disk: Path) -> None:
    command = [sys.executable, "study/train.py", *FLAGS, *GPT, "--output_dir", str(small_disk / "run")]
    environment = os.environ | ONE_THREAD
    checkpoints = [*command, "--checkpointing_steps", "4"]
    early = subprocess.run(checkpoints, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert early.returncode == 2
    assert f"{small_disk}/run has 25.17 MB free" in early.stderr

    long = [*command, "--max_steps", "100000", "--eval_steps", "0", "--logging_steps", "1"]
    with subprocess.Popen(long, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE) as running:
        rows = small_disk / "run" / "steps.jsonl"
        wait_until(lambda: rows.exists() and rows.stat().st_size)
        (small_disk / "filler").write_bytes(b"x" * shutil.disk_usage(small_disk).free)
        _, printed = running.communicate(timeout=120)
    assert running.returncode == 1
    status = read_json(small_disk / "run" / "status.json")
    assert (status["state"], status["hint"]) == ("failed", "free some space, and run it again")
    assert "the disk is full" in status["reason"]
    assert "failed: the disk is full" in printed
    assert not list((small_disk / "run").glob(".status.json.*"))
