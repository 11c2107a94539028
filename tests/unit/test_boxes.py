"""Machines with GPUs, as their driver and kernel report them: NVML's answers are invented, all else is real."""

from __future__ import annotations

import dataclasses
import os
import sys
from types import SimpleNamespace

import pynvml
import pytest
import torch

from study.advisor import doctor
from study.config.errors import Unsupported
from study.engine.setup import replace_available_memory
from study.host.environment import check_torch_supports_gpus, torch_for_driver
from study.host.machine import detect_machine, free_gpu_bytes, matmul_rates
from study.host.memory import available_cores, host_memory, wsl_limit
from study.metrics.clock import find_nvml_handle
from study.metrics.memory import MemoryMeter
from study.predictor import hardware
from study.predictor.hardware import to_box
from sweeps import write_files

GIB = 2**30
FIRST, SECOND = "GPU-8a56e0b1-0000-4000-8000-000000000001", "GPU-95c1f2a7-0000-4000-8000-000000000002"
SLICE = "MIG-1f2e3d4c-0000-4000-8000-000000000003"
FREE_GIB = {FIRST: 3, SECOND: 60, SLICE: 9}


@pytest.fixture(params=[pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT], ids=["unknown", "invalid"])
def two_gpus(request, monkeypatch):
    """Set up two GPUs of 80 GiB and a slice of one, with a driver for CUDA 12.4. A handle is a UUID."""
    by_place = {0: FIRST, 1: SECOND}

    def find_in(handles, error):
        def find(key):
            if key not in handles:
                raise pynvml.NVMLError(error)
            return handles[key]

        return find

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: len(by_place),
        "nvmlDeviceGetUUID": lambda uuid: uuid,
        "nvmlDeviceGetHandleByIndex": find_in(by_place, pynvml.NVML_ERROR_INVALID_ARGUMENT),
        "nvmlDeviceGetHandleByUUID": find_in({uuid: uuid for uuid in FREE_GIB}, request.param),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * GIB, free=FREE_GIB[handle] * GIB),
        "nvmlSystemGetDriverVersion": lambda: "550.54.15",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12040,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "free_gib"),
    [
        (None, [3, 60]),
        ("1,0", [60, 3]),
        (SECOND, [60]),
        (f"{SECOND},{FIRST}", [60, 3]),
        (SLICE, [9]),
        # CUDA accepts a prefix of a UUID if it is unique.
        ("GPU-95c1", [60]),
        ("GPU-", []),
        ("GPU-77", []),
        ("", []),
        # An entry that names no GPU hides itself and all later ones; earlier ones stay.
        ("0,1,2,3", [3, 60]),
        (f"{SECOND},GPU-77,0", [60]),
        ("1,-1,0", [60]),
        ("7", []),
    ],
)
def test_a_gpu_is_found_by_its_place_and_by_its_uuid(two_gpus, monkeypatch, visible, free_gib):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect_machine().gpu_memory_gib == (80.0,) * len(free_gib)
    assert [free_gpu_bytes(place) for place in range(len(free_gib))] == [gib * GIB for gib in free_gib]
    assert free_gpu_bytes(len(free_gib)) is None


@pytest.mark.parametrize(
    ("visible", "cap_gib", "expected_gib"),
    [(f"{SECOND},{FIRST}", None, 60), (SLICE, None, 9), ("1", None, 60), ("1", 16.0, 16), (SECOND, 16.0, 16)],
)
def test_deepspeed_gets_the_free_memory_of_a_gpu_by_any_name_and_within_the_cap(
    two_gpus, monkeypatch, visible, cap_gib, expected_gib
):
    from deepspeed.accelerator import cuda_accelerator

    monkeypatch.setattr(cuda_accelerator, "pynvml", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    accelerator = cuda_accelerator.CUDA_Accelerator()
    if not visible.isdigit():
        with pytest.raises(ValueError, match="invalid literal for int"):
            accelerator.available_memory(0)
    replace_available_memory(accelerator, cap_gib)
    assert accelerator.available_memory(0) == expected_gib * GIB


def test_gpus_of_this_machine_are_predicted_without_torch(two_gpus, monkeypatch):
    """The process that measures their matrix products fails, as it does without torch: the table's rates are taken."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    matmul_rates.cache_clear()
    local, listed = to_box("this"), to_box("2xH100")
    matmul_rates.cache_clear()
    assert (local.gpus_per_node, local.device.memory_gib) == (2, 80.0)
    assert (local.device.name, local.device.matmul_tflops) == (listed.device.name, listed.device.matmul_tflops)
    assert local.host_gib_per_node == pytest.approx(host_memory().total_gib, rel=0.01)


def test_gpus_that_this_torch_cannot_use_are_refused_with_the_build_for_their_driver(two_gpus, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("torch can use a GPU here")
    says = (
        r"2 GPUs are visible.*the driver 550\.54\.15 supports CUDA 12\.4 .*-> .*https://download.pytorch.org/whl/cu129"
    )
    with pytest.raises(Unsupported, match=says):
        check_torch_supports_gpus()
    for runs, says in {"11.8": "update the driver", "12.0": "cu129", "13.0": "torch==2.13.0"}.items():
        assert says in torch_for_driver(runs, "2.13.0+cu130")
    # A V100 next to an A100: no other build has code for it.
    capabilities = {FIRST: [8, 0], SECOND: [7, 0]}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", capabilities.__getitem__)
    with pytest.raises(
        Unsupported, match=r"torch==[\d.]+\+cu126 --extra-index-url https://download.pytorch.org/whl/cu126"
    ):
        check_torch_supports_gpus()
    for capability, build in (((7, 0), "cu126"), ((7, 5), "cu129")):
        assert build in torch_for_driver("12.8", "2.13.0+cu130", capability)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_torch_supports_gpus()


@pytest.mark.parametrize(
    ("uuid", "divided", "expected"),
    # Some versions of CUDA report the UUID of the card for a slice, whose figures differ from the card's.
    [(FIRST, [0, 0], FIRST), (SLICE, [1, 1], SLICE), ("GPU-77", [0, 0], None), (FIRST, [1, 1], None)],
)
def test_a_slice_does_not_have_the_figures_of_its_card(two_gpus, monkeypatch, uuid, divided, expected):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda handle: divided)
    assert find_nvml_handle(uuid.partition("-")[2]) == expected


def test_a_driver_that_stops_answering_ends_no_run(two_gpus, monkeypatch):
    meter = MemoryMeter(torch.device("cpu"))
    meter._nvml = FIRST
    answers = iter([SimpleNamespace(used=5 * GIB)])

    def used(handle, version=None):
        if answer := next(answers, None):
            return answer
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", used)
    assert [meter._sample_device() for _ in range(3)] == [5 * GIB, None, None]
    assert (detect_machine().gpu_memory_gib, free_gpu_bytes(0)) == ((0, 0), None)


V1 = {
    "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2), ("50000", 1), ("max", 64), ("v1", 4), ("none", 64)])
def test_threads_are_as_many_as_the_container_gives_time_for(tmp_path, monkeypatch, quota, cores):
    v2 = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": f"{quota} 100000\n"}
    write_files(tmp_path, {"v1": V1, "none": {}}.get(quota, v2))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert available_cores(tmp_path) == cores


def test_without_a_selection_only_the_first_slice_of_divided_cards_is_visible(two_gpus, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda handle: [1, 1])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", lambda handle, place: SLICE)
    assert len(detect_machine().gpu_memory_gib) == 1
    assert free_gpu_bytes(0) == FREE_GIB[SLICE] * GIB
    assert free_gpu_bytes(1) is None


def test_the_memory_that_windows_gives_its_linux_is_named(tmp_path, monkeypatch):
    version = tmp_path / "proc" / "version"
    version.parent.mkdir()
    assert not wsl_limit(tmp_path)
    for text, is_wsl in (("Linux version 6.8.0-generic", False), ("Linux 5.15.167.4-microsoft-standard-WSL2", True)):
        version.write_text(text)
        limit = wsl_limit(tmp_path)
        assert ("[wsl2] in its .wslconfig" in limit) == is_wsl
        for module in (doctor, hardware):
            monkeypatch.setattr(module, "wsl_limit", lambda limit=limit: limit)
        (check,) = (check for check in doctor.memory() if check.name == "host memory")
        assert ("WSL2" in check.found) == is_wsl
        box = to_box("2x4090")
        assert [*hardware.box_notices(dataclasses.replace(box, name="this"))] == [limit] * is_wsl
        assert not [*hardware.box_notices(box)]
