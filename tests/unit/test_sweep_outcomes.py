from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from study.config.errors import ModelTooLarge, Unsupported, UserError, refusal_from_json
from study.host.machine import detect_machine
from study.host.memory import GIB, HOST_MEMORY_VARIABLE, OomCounts, host_memory, oom_counts
from study.records.lock import LockHeldError
from study.records.outcome import FreeMemory, Terminated, outcome_from_exception, outcome_from_log
from study.sweep.cell_outcome import ExitEvidence
from study.sweep.plan import missing_requirement
from study.sweep.suite_file import Requirements, Suite
from sweeps import ROOT, write_files

MESSAGES = yaml.safe_load((ROOT / "tests" / "data" / "messages.yaml").read_text())
ENDINGS = yaml.safe_load((ROOT / "tests" / "data" / "endings.yaml").read_text())
OPEN, TERMINATED = ENDINGS["statuses"]
FULL = "the disk is full ("


def evidence(
    *, printed: str = "", ooms: Sequence[int] = (0, 0), refusal: dict[str, Any] | None = None, **more: Any
) -> ExitEvidence:
    base = {"launcher_status": 1, "stopped_by": None, "time_limit_s": 5.0, "status": None, "log": ""}
    return ExitEvidence(
        **base | more,
        printed=MESSAGES.get(printed, printed),
        ooms=OomCounts(*ooms),
        refusal=refusal_from_json(refusal) if refusal else None,
    )


@pytest.mark.parametrize("case", ENDINGS["cases"], ids=lambda case: f"{case['is']} {case['says']}")
def test_the_evidence_decides_how_a_run_ended(case: dict[str, Any]) -> None:
    ending = evidence(**{key: value for key, value in case.items() if key not in ("is", "says")}).ending
    assert ending.state == case["is"]
    assert case["says"] in ending.reason
    assert ending.hint or case["is"] in ("ok", "failed", "oom")


@pytest.mark.parametrize(
    ("error", "state", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to get 2 GiB"), "oom", "CUDA out of memory. Tried to get"),
        (torch.distributed.DistBackendError(MESSAGES["nccl_oom"]), "oom", "Cuda failure 2 'out of memory'"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "oom", "CUBLAS"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "oom", "the device's memory ran out"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "oom", "device's memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), "oom", "the host's memory"),
        (torch.distributed.DistBackendError(MESSAGES["nccl_no_room"]), "failed", "/dev/shm is full"),
        (RuntimeError("unable to write to file </torch_7_8_9>: No space left on device (28)"), "failed", "/dev/shm is"),
        (RuntimeError("no\nDefaultCPUAllocator: can't allocate memory: you tried"), "oom", "the host's memory"),
        (RuntimeError("NCCL error: unhandled system error"), "failed", "RuntimeError: NCCL error"),
        (ValueError("CUDA out of memory"), "failed", "ValueError"),
        (ImportError(f"no name 'log' in 'x' ({sys.prefix}/lib/x.py)"), "failed", "no name 'log' in 'x' (lib/"),
        (OSError(28, "No space left on device"), "failed", FULL),
        (Terminated(), TERMINATED["state"], TERMINATED["reason"]),
        # Messages of libraries on a full tmpfs.
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "failed", FULL),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), "failed", FULL),
        (
            CheckpointException(
                "",
                {
                    0: (
                        RuntimeError("[enforce fail at inline_container.cc:1] . unexpected pos 7"),
                        traceback.StackSummary(),
                    )
                },
            ),
            "failed",
            FULL,
        ),
    ],
)
def test_an_exception_of_any_library_is_out_of_memory_if_memory_ran_out(error, state, says):
    ending = outcome_from_exception(error)
    assert ending.state == state
    assert says in ending.reason
    assert "\n" not in ending.reason
    assert says != FULL or ending.hint == "free some space, and run it again"


@pytest.mark.parametrize(
    "message",
    [
        "[pair.cc:547] Connection closed by peer [127.0.0.1]:1",
        "[pair.cc:1] Read error: Connection reset by peer GLHF!",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ],
)
def test_a_lost_connection_to_a_rank_is_that_rank_s_death_and_not_this_one_s_error(message):
    ending = outcome_from_exception(RuntimeError(message))
    assert ending.reason.startswith("another rank died, and this one lost its connection (RuntimeError: ")
    assert (ending.state, ending.hint) == ("failed", "run it again")
    # A single process has no other rank, and a download has none.
    for error, alone in ((RuntimeError(message), True), (ConnectionResetError(104, "Connection reset by peer"), False)):
        assert "another rank" not in outcome_from_exception(error, alone).reason


LOCKED, EITHER = "no more host memory could be locked", "the device's memory, or host memory that can be locked"


@pytest.mark.parametrize(
    ("frames", "free", "says", "hint"),
    [
        ("", FreeMemory(61.3, 2.5), LOCKED, "offloads less"),
        (MESSAGES["frames"], None, LOCKED, "offloads less"),
        (MESSAGES["frames"], FreeMemory(0.2, 2.5), LOCKED, "offloads less"),
        ("", FreeMemory(0.2, 90.0), EITHER, "offloads more"),
        ("", None, EITHER, "offloads more"),
    ],
)
def test_host_memory_that_cannot_be_locked_is_not_the_device_s(frames, free, says, hint):
    ending = outcome_from_log(MESSAGES["cuda_error"], frames, free)
    assert ending is not None
    assert (ending.state, ending.reason.startswith(says), hint in ending.hint) == ("oom", True, True)
    log = f"Traceback (most recent call last):\n{frames}torch.AcceleratorError: {MESSAGES['cuda_error']}"
    # A log does not include the free memory.
    assert evidence(status=OPEN, log=log).ending.reason.startswith(LOCKED if frames else EITHER)


def test_free_memory_is_in_the_reason_and_decides_why_cublas_does_not_start():
    words = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    full = outcome_from_log(words, free=FreeMemory(0.1, 90.0))
    assert full is not None
    assert (full.state, full.reason.partition(" (")[0]) == ("oom", "the device's memory ran out")
    assert outcome_from_log(words, free=FreeMemory(40.0, 90.0)) is outcome_from_log(words) is None
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to get 2 GiB")
    reason = outcome_from_exception(error, free=FreeMemory(0.21, 90.04)).reason
    assert reason.endswith("; 0.2 GiB of the device and 90.0 GiB of the host were free)")


CGROUPS = yaml.safe_load((ROOT / "tests" / "data" / "cgroups.yaml").read_text())


@pytest.mark.parametrize("files", CGROUPS["counters"], ids=["v2", "v1", "parent"])
def test_the_kernels_counters_are_found_in_both_kinds_of_cgroup(tmp_path, files):
    write_files(tmp_path, files)
    assert oom_counts(tmp_path) == OomCounts(killed=1, cgroup_limit_hit=2)


@pytest.mark.parametrize(
    "refusal", [UserError("a", "b"), Unsupported("a", "b"), ModelTooLarge("a", "b", 3), LockHeldError("a", {})]
)
def test_a_refusal_is_read_as_it_was_written(refusal):
    read = refusal_from_json(json.loads(json.dumps(refusal.to_json())))
    assert type(read) is (UserError if isinstance(refusal, LockHeldError) else type(refusal))
    assert vars(read) == vars(refusal)


@pytest.mark.parametrize("version", CGROUPS["limits"])
def test_a_container_has_the_memory_that_the_tightest_cgroup_above_it_allows(tmp_path, monkeypatch, version):
    monkeypatch.delenv(HOST_MEMORY_VARIABLE, raising=False)
    write_files(tmp_path, CGROUPS["limits"][version])
    memory = host_memory(tmp_path)
    # Memory that is only a cache counts as available.
    assert (memory.total_gib, memory.available_gib) == (1, 0.75)
    box = detect_machine(tmp_path)
    missing = missing_requirement(Suite("x", "y", Requirements(host_memory_gib=2)), box)
    assert missing is not None
    assert "needs 2 GiB of host memory, and here are 1" in missing.problem
    assert missing_requirement(Suite("x", "y", Requirements(host_memory_gib=1)), box) is None


def test_without_a_cgroup_limit_a_machine_has_its_visible_memory_unless_the_user_states_more(tmp_path, monkeypatch):
    monkeypatch.delenv(HOST_MEMORY_VARIABLE, raising=False)
    write_files(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert host_memory(tmp_path).total_gib == psutil.virtual_memory().total / GIB
    monkeypatch.setenv(HOST_MEMORY_VARIABLE, "2048")
    assert detect_machine().host_memory_gib == 2048
    monkeypatch.setenv(HOST_MEMORY_VARIABLE, "much")
    with pytest.raises(UserError, match="HOST_MEMORY_GIB is 'much'"):
        detect_machine()
