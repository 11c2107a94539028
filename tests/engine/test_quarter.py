"""tools/quarter.sh and its tools: a GPU machine without a network, rehearsed without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement

from engines import ROOT
from tools.quarter.prepare import write_commit

# The parts of the repository that a run reads.
TRAVELS = ("study", "accelerate_configs", "tools", "pyproject.toml", "constraints.txt")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY = {
    "name": "tiny",
    "description": "One cell.",
    "fixed": {"scale": "laptop", "task": "gpt-wikitext", "max_steps": 2, "eval_steps": 0, "eval_samples": 8},
    "grids": [{"axes": {"strategy": "single"}}],
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of these parts, without .git."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in TRAVELS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    (copy / ".quarter").mkdir()
    (copy / ".quarter" / "commit.txt").write_text(f"{COMMIT}\n")
    (copy / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return copy


def call(checkout: Path, *words: str, machine: str = "first") -> subprocess.CompletedProcess[str]:
    """Call the script as on a machine; each has its own temporary folder."""
    temporary = checkout.parent / machine
    temporary.mkdir(exist_ok=True)
    environment = os.environ | {
        "PYTHON": sys.executable,
        "TMPDIR": str(temporary),
        "OUT": str(checkout.parent / "out"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # Whatever asks the network, through any of the libraries, fails at once.
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    return subprocess.run(
        ["bash", "tools/quarter.sh", *words], cwd=checkout, env=environment, text=True, capture_output=True
    )


def states(checkout: Path, suite: str) -> list[str]:
    """Return the states of all attempts at the cells of a suite."""
    files = sorted((checkout / "runs" / suite).glob("*/sweep.json"))
    return [attempt["state"] for file in files for attempt in json.loads(file.read_text())["attempts"]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "'' is not a time in seconds"),
        (["soon"], "'soon' is not a time in seconds"),
        (["60", "--only", "smoke,steps"], "'steps' is not one of the steps smoke gradients doctor measure"),
        (["60", "--suite"], "--suite has no value"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(words: list[str], says: str, checkout: Path) -> None:
    result = call(checkout, *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {says}. To fix it: bash tools/quarter.sh SECONDS ")


@pytest.mark.timeout(1300)
def test_every_check_works_and_a_call_on_a_fresh_machine_resumes_from_the_archive(checkout: Path) -> None:
    tiny = ("--rehearse", "--suite", "tiny.yaml")
    result = call(checkout, "900", *tiny)
    log = (checkout.parent / "out" / "log.txt").read_text()
    assert result.returncode == 0, log[-3000:]
    assert "smoke ok after" in log
    assert "PASS: zero3: gradients equal those of one process in bf16; one rank exchanges nothing" in log
    for lane in ("verify_rehearsal", "fp16", "fits_single"):
        assert f"{lane}: status 0" in log
    assert "doctor: status 0" in log
    assert "cpu adam" in (checkout / "runs" / "quarter-rehearsal" / "doctor.txt").read_text()
    (record,) = (checkout / "runs" / "tiny-rehearsal").glob("*/sweep.json")
    assert states(checkout, "tiny-rehearsal") == ["ok"]
    assert record.parent.name in (checkout.parent / "out" / "table.txt").read_text()

    shutil.rmtree(checkout / "runs")
    shutil.move(checkout.parent / "out" / "records.tgz", checkout / ".quarter" / "records.tgz")
    second = call(checkout, "300", *tiny, "--only", "gradients", machine="second")
    assert second.returncode == 0, second.stdout[-3000:]
    # Nothing ran again.
    assert states(checkout, "tiny-rehearsal") == ["ok"]
    assert "verify_rehearsal: status" not in second.stdout
    assert (checkout.parent / "out" / "records.tgz").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_its_gpu_ends_the_call_at_once_with_what_was_seen(checkout: Path) -> None:
    result = call(checkout, "100", "--only", "smoke")
    assert result.returncode == 3, result.stdout[-3000:]
    assert "RuntimeError: torch.cuda.is_available() is False" in result.stdout
    assert "stopped: nothing would run" in result.stdout
    assert (checkout.parent / "out" / "records.tgz").exists()


@pytest.mark.long
@pytest.mark.timeout(4000)
def test_every_cell_of_the_quarter_runs_with_tiny_models(checkout: Path) -> None:
    result = call(checkout, "3600", "--rehearse")
    assert result.returncode == 0, result.stdout[-3000:]
    assert "doctor: status 0" in result.stdout
    suites = sorted(
        folder.name for folder in (checkout / "runs").glob("*-rehearsal") if any(folder.glob("*/sweep.json"))
    )
    ended = {suite: set(states(checkout, suite)) for suite in suites}
    assert len(ended) > 7
    assert set().union(*ended.values()) <= {"ok", "unsupported"}, ended


def write_wheel(folder: Path, name: str, version: str, *requirements: str, tags: str = "py3-none-any") -> None:
    """Write a wheel without modules."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requirements]
    with zipfile.ZipFile(folder / f"{stem}-{tags}.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata) + "\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tags}\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")


def prepare(
    folder: Path, registry: Path, image: Mapping[str, str], flags: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Call prepare.py for a machine with these packages, with a folder instead of the package registry."""
    listed = folder.parent / "image.txt"
    listed.write_text("\n".join(f"{name}=={version}" if version else name for name, version in image.items()))
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(registry), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "tools/quarter/prepare.py", str(listed), "--folder", str(folder), *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)


def pinned(name: str) -> str:
    """Return the version of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (version,) = (line.partition("==")[2] for line in lines if line.startswith(f"{name}=="))
    return version


@pytest.fixture
def image() -> dict[str, str]:
    """Return a machine that has every requirement but shtab, and a peft that is too old."""
    requirements = [Requirement(text) for text in distribution("zero-study").requires or ()]
    needed = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": "train"})]
    versions = {item.name: "" for item in needed if item.name != "shtab"}
    return versions | {"peft": "0.18.1", "torch": "2.11.0"}


def test_the_folder_has_what_the_machine_lacks_in_the_versions_of_the_constraints(tmp_path, image):
    registry = tmp_path / "registry"
    registry.mkdir()
    write_wheel(registry, "shtab", pinned("shtab"))
    write_wheel(registry, "shtab", "99.0")
    # A wheel may need what neither the machine nor the project has.
    write_wheel(registry, "peft", pinned("peft"), "dill", "torch>=1.13")
    write_wheel(registry, "dill", pinned("dill"))
    folder = tmp_path / "quarter"
    result = prepare(folder, registry, image)
    names = sorted(file.name.partition("-")[0] for file in (folder / "wheels").iterdir())
    assert names == ["dill", "peft", "shtab"], result.stdout + result.stderr
    assert f"shtab-{pinned('shtab')}-py3-none-any.whl" in [file.name for file in (folder / "wheels").iterdir()]
    assert "3 wheels" in result.stdout
    assert "faults: 0" in result.stdout
    (metadata,) = folder.glob("zero_study-*.dist-info/METADATA")
    assert "Requires-Dist: shtab" in metadata.read_text()
    # The second call fetches nothing.
    shutil.rmtree(registry)
    assert "fetched" not in prepare(folder, registry, image).stdout


def test_a_folder_that_would_not_work_there_is_refused_with_its_faults(tmp_path, image):
    folder = tmp_path / "quarter"
    (folder / "wheels").mkdir(parents=True)
    write_wheel(folder / "wheels", "shtab", "1.0")
    write_wheel(folder / "wheels", "peft", pinned("peft"), tags="cp39-cp39-manylinux_2_17_x86_64")
    write_wheel(folder / "wheels", "numpy", "2.0.0")
    result = prepare(folder, tmp_path, image | {"torch": "2.5.0"}, ["--machine", "x86_64"])
    faults = {line for line in result.stdout.splitlines() if line.startswith("fault: ")}
    assert faults == {
        "fault: zero-study needs shtab>=1.9, and the wheel is 1.0",
        "fault: zero-study needs torch<2.16,>=2.11, and the machine has 2.5.0",
        f"fault: peft-{pinned('peft')}-cp39-cp39-manylinux_2_17_x86_64.whl does not fit Python 3.12 on x86_64",
        "fault: numpy-2.0.0-py3-none-any.whl would replace the machine's own",
    }
    assert result.returncode == 1


def test_records_name_a_commit_only_if_nothing_is_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    with pytest.raises(SystemExit, match=r"has no commit: .*To fix it: use a checkout of git\."):
        write_commit(tmp_path, tmp_path)
    git("init")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "a")
    write_commit(tmp_path, tmp_path)
    assert (tmp_path / "commit.txt").read_text() == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("b")
    with pytest.raises(SystemExit, match="error: file is not committed"):
        write_commit(tmp_path, tmp_path)


def test_a_package_that_cannot_be_fetched_is_named(tmp_path: Path, image: dict[str, str]) -> None:
    result = prepare(tmp_path / "quarter", tmp_path, image)
    assert result.returncode == 1
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: shtab=={pinned('shtab')} cannot be fetched: ") or line.startswith("error: peft==")
