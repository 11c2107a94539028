"""`study doctor` as a user starts it: its findings, missing requirements, and secrets that it must never print."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from engines import FAKE_GPU, ROOT
from study.advisor.doctor import Check, strategies, verdict
from study.config.strategies import STRATEGY_NAMES, WITH_GROUPS, WITH_REPLICAS
from study.host.operators import toolkit_version

SECRET = "hf_thisIsNobodysToken"
STATES = {"ok", "missing", "none"}


def doctor(*arguments: str, before: Callable[[], None] | None = None, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "study.cli", "doctor", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        text=True,
        capture_output=True,
        timeout=120,
        preexec_fn=before,
    )


def read_checks(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    assert result.stdout, result.stderr
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drive")


@pytest.fixture(scope="module")
def normal(drive: Path) -> subprocess.CompletedProcess[str]:
    return doctor("--json", "--nvme_path", str(drive), HF_TOKEN=SECRET, HF_HUB_OFFLINE="1")


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Run it without programs on PATH, with low limits and no privilege, and with an NVMe folder below a file."""
    folder = tmp_path_factory.mktemp("poor")
    (folder / "file").touch()

    def lower_limits() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**20, 2**20))
        # PR_CAPBSET_DROP of CAP_IPC_LOCK: the limit then applies to root, too; it always applies to other users.
        ctypes.CDLL(None).prctl(24, 14)

    nvme = str(folder / "file" / "nvme")
    return doctor("--json", "--nvme_path", nvme, before=lower_limits, PATH=str(folder), HF_TOKEN=SECRET)


def test_json_is_one_document_with_every_check_in_a_known_state(normal, poor):
    checks = read_checks(normal)
    assert {
        "python",
        "packages",
        "pairing",
        "versions",
        "gpus",
        "nccl",
        "compiler",
        "ninja",
        "libaio",
        "operators",
        "nvme path",
        "nvme bandwidth",
        "host memory",
        "pinned memory",
        "shared memory",
        "open files",
        "hub",
        "strategies",
    } <= set(checks)
    for check in checks.values():
        assert set(check) == {"name", "state", "found", "fix"}
        assert check["state"] in STATES
        assert check["found"]
        assert check["fix"] or check["state"] != "missing", check
    missing = [name for name, check in checks.items() if check["state"] == "missing"]
    assert (normal.returncode, poor.returncode) == (1 if missing else 0, 1), missing
    # No secret and no host name is printed.
    host = os.uname().nodename
    for text in (result.stdout + result.stderr for result in (normal, poor)):
        assert SECRET not in text
        assert len(host) < 4 or host not in text


def test_packages_and_the_hub_are_as_they_are_here(normal: subprocess.CompletedProcess[str]) -> None:
    checks = read_checks(normal)
    assert checks["packages"]["state"] == "ok"
    assert f"{sys.version_info[0]}.{sys.version_info[1]}." in checks["python"]["found"]
    # Every pin of the file counts, but not the comment above them.
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    meant = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    assert f"of {len(meant)} " in checks["versions"]["found"]
    # The hub is contacted only with --hub.
    for text in ("HF_HUB_OFFLINE set", "a login exists", "no request was sent"):
        assert text in checks["hub"]["found"]


def test_a_drive_is_measured_and_nothing_stays_on_it(normal: subprocess.CompletedProcess[str], drive: Path) -> None:
    checks = read_checks(normal)
    assert checks["nvme path"]["state"] == "ok"
    assert list(drive.iterdir()) == []
    bandwidth = checks["nvme bandwidth"]
    if bandwidth["state"] != "ok":
        pytest.skip(bandwidth["found"])
    rates = [float(part.split()[1]) for part in bandwidth["found"].split(" (")[0].split(", ")]
    # Higher rates are those of memory copies, or of data that was not really written.
    assert [0 < rate < 100 for rate in rates] == [True, True]


# A run also looks for ninja next to this Python.
NINJA = "ok" if (Path(sys.executable).parent / "ninja").exists() else "missing"


@pytest.mark.parametrize(
    ("name", "state", "found", "fix"),
    [
        ("compiler", "missing", "not found", "apt-get install g++"),
        ("ninja", NINJA, "", ""),
        # Without a compiler nothing that calls libaio links, so asynchronous I/O cannot be built.
        ("libaio", "missing", "", ""),
        ("strategies", "missing", r"zero3_cpu, zero3_hpz(, \w+)*, missing: compiler(, ninja)?;", ""),
        ("strategies", "missing", r"\(single, ddp", ""),
        ("nvme path", "missing", "is a file", "--nvme_path DIR"),
        ("nvme bandwidth", "none", "", ""),
        ("open files", "missing", "^256 ", "ulimit -n 1024"),
        ("pinned memory", "missing", "ulimit -l is 1 MiB", "ulimit -l unlimited"),
    ],
)
def test_each_missing_requirement_is_listed_with_its_fix(poor, name, state, found, fix):
    check = read_checks(poor)[name]
    assert (check["state"], fix in check["fix"]) == (state, True)
    assert re.search(found, check["found"])


def test_a_gpu_without_a_toolkit_is_named_with_the_strategies_that_do_not_run_and_memory_is_no_nvme(tmp_path):
    if toolkit_version() is not None:
        pytest.skip("a CUDA toolkit is here")
    path = os.pathsep.join([str(FAKE_GPU), str(ROOT)])
    on_a_gpu = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        result = doctor("--json", "--nvme_path", f"{memory}/new/folder", **on_a_gpu)  # type: ignore[arg-type]
        assert list(Path(memory).iterdir()) == []
    checks = read_checks(result)
    assert "tmpfs" in checks["nvme path"]["found"]
    is_measurable = {checks[name]["state"] for name in ("nvme path", "pinned memory")} == {"ok"}
    why = "not measurable: tmpfs is memory, not a disk" if is_measurable else "not measured: see "
    assert checks["nvme bandwidth"]["found"].startswith(why)
    assert [checks[name]["state"] for name in ("gpus", "nvcc")] == ["ok", "missing"]
    assert checks["gpus"]["found"].startswith("1 x Fake GPU 80 GiB; driver 580.95.05, CUDA 13.0, ")
    assert checks["nvcc"]["fix"].startswith("install the toolkit of CUDA 13.0, nvcc included")
    assert "zero3_nvme, zero3_cpu_nvme, missing: nvcc" in checks["strategies"]["found"]
    assert "Traceback" not in result.stderr


def test_on_a_gpu_only_nvme_strategies_need_the_cuda_toolkit() -> None:
    names = ["pairing", "packages", "python", "nccl", "operators", "compiler", "ninja", "libaio", "nvme path", "gpus"]
    names += ["pinned memory", "shared memory"]
    checks = [*(Check(name, "ok", "") for name in names), Check("nvcc", "missing", "")]
    on_four, on_two, alone = (strategies(checks, gpus=gpus).found for gpus in (4, 2, 1))
    nvme, total = "zero3_nvme_optimizer, zero3_nvme, zero3_cpu_nvme", len(STRATEGY_NAMES)
    assert on_four.endswith(f"; not {nvme}, missing: nvcc")
    without = f"without {nvme} (missing: nvcc); GPUs: "
    assert verdict(checks, ["nvcc", "strategies"]) == f"Ready for study run laptop {without}"
    assert verdict(checks, ["nvcc", "host memory"]).startswith("Not ready for study run laptop: missing host memory; ")
    assert on_two.startswith(f"{total - 3 - len(WITH_REPLICAS)} of {total} train on its GPUs (single, ")
    assert on_two.endswith("missing: nvcc; from 4 GPUs: hsdp, zero3_hpz")
    assert alone.endswith(f"; from 2 GPUs: {', '.join(WITH_GROUPS)}; from 4 GPUs: hsdp, zero3_hpz")
    # CPU cores set no such limit: four ranks share two of them.
    on_cores = [Check(check.name, "none" if check.name == "gpus" else "ok", "") for check in checks]
    assert strategies(on_cores, gpus=0).found.startswith(f"{total} of {total} train on its cores")


def test_the_study_lacks_only_what_it_needs() -> None:
    needed = ["python", "packages", "pairing", "compiler", "ninja", "host memory", "operators", "open files"]
    optional_names = ["gpus", "nccl", "nvcc", "hub", "libaio", "nvme path", "pinned memory", "shared memory"]
    absent = ["packages", "pairing", "hub", "nvcc", "nccl"]
    checks = [Check(name, "missing" if name in absent else "ok", "") for name in (*needed, *optional_names)]
    assert verdict(checks, absent).startswith("Not ready for study run laptop: missing packages; ")
    optional = [Check(name, "missing" if name in ("hub", "nvcc") else "ok", "") for name in (*needed, *optional_names)]
    assert verdict(optional, ["hub", "nvcc"]).startswith("Ready for study run laptop")


def test_without_torch_one_cause_has_one_fix_and_a_dry_run_prints_its_commands(tmp_path: Path) -> None:
    """An installation of the advisor alone: its packages, without those of training."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "import importlib.util as util\n"
        "HIDDEN = {'torch', 'accelerate', 'deepspeed', 'transformers', 'datasets', 'evaluate'}\n"
        "version, find_spec, distributions = metadata.version, util.find_spec, metadata.distributions\n"
        "def hidden_version(name):\n"
        "    if name in HIDDEN: raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = hidden_version\n"
        "metadata.distributions = lambda: [it for it in distributions() if it.name not in HIDDEN]\n"
        "util.find_spec = lambda name, *rest: None if name in HIDDEN else find_spec(name, *rest)\n"
    )
    path = os.pathsep.join([str(site), str(ROOT)])
    without = {"PYTHONPATH": path}
    result = doctor("--json", "--nvme_path", str(tmp_path), PYTHONPATH=path)
    checks = read_checks(result)
    missing = [name for name, check in checks.items() if check["state"] == "missing"]
    assert missing == ["packages", "pairing", "strategies"]
    assert len({check["fix"] for check in checks.values() if "pip" in check["fix"] or "make" in check["fix"]}) == 1
    assert checks["pairing"]["found"] == "accelerate and deepspeed are not installed"
    assert len(checks["versions"]["found"]) < 300
    assert doctor(PYTHONPATH=path).stdout.startswith("Not ready for study run laptop: missing packages; ")
    this = subprocess.run(
        [sys.executable, "-m", "study.cli", "advise", "gpt2", "--hardware", "this"],
        cwd=ROOT,
        text=True,
        env=os.environ | without,
        capture_output=True,
    )
    assert "torch is not installed here" in this.stderr
    # Nothing named accelerate next to Python or on PATH.
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run = "import sys; sys.executable = sys.argv.pop(1); from study.cli import main; sys.exit(main(sys.argv[1:]))"
    dry = subprocess.run(
        [sys.executable, "-c", run, str(python), "run", "h100x8", "--dry_run", "--hardware", "8xH100"],
        cwd=ROOT,
        env=os.environ | without | {"PATH": str(python.parent)},
        text=True,
        capture_output=True,
    )
    assert dry.returncode == 0, dry.stderr
    assert "\naccelerate launch " in f"\n{dry.stdout}"
