"""`make install` and `make test` on machines with a GPU: the arguments for pip, and the device of the tests."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from engines import FAKE_GPU, ROOT
from study.advisor.doctor import INSTALL_ALL
from study.host.environment import torch_for_driver
from study.host.stacks import VERIFIED, pair_fix
from tools.quarter import prepare

# Without the index, cache and constraints of the user who runs the tests.
NO_PIP = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}


def recipe(word: str, *variables: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the arguments of the line of `make install` with this word."""
    printed = subprocess.run(
        ["make", "-nB", "install", *variables], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (line,) = (line for line in printed.splitlines() if " tools/install.py " in line and word in shlex.split(line))
    return split_command(line.replace("tools/install.py", "-m pip install"))


def split_command(line: str) -> tuple[dict[str, str], list[str]]:
    words = shlex.split(line)
    start = words.index("-m")
    return dict(word.split("=", 1) for word in words[: start - 1]), words[start:]


@pytest.mark.parametrize("is_kept_from_looking", [pytest.param(False, marks=pytest.mark.long), True])
def test_deepspeed_builds_on_a_gpu_machine_without_a_toolkit(is_kept_from_looking: bool, tmp_path: Path) -> None:
    """pip runs the first part of the build to find an archive's dependencies."""
    variables, _ = recipe(".[train]")
    flags = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(tmp_path)]
    on_a_gpu = os.environ | {"PYTHONPATH": str(FAKE_GPU), "CUDA_VISIBLE_DEVICES": "0"}
    result = subprocess.run(
        [sys.executable, "-m", "pip", "download", *flags, f"deepspeed=={VERIFIED[-1][1]}"],
        env=on_a_gpu | (variables if is_kept_from_looking else {}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "No matching distribution" in result.stderr:
        pytest.skip("pip does not reach its index")
    # Once DeepSpeed builds there by itself, the variables are no longer needed.
    assert ("MissingCUDAException" in result.stdout + result.stderr) is not is_kept_from_looking
    assert (result.returncode == 0) is is_kept_from_looking, result.stderr


def test_other_builds_of_deepspeed_set_the_variables_of_make_install() -> None:
    variables, _ = recipe(".[train]")
    assert [split_command(line)[0] for line in (pair_fix(), INSTALL_ALL)] == [variables] * 2
    assert variables == prepare.BUILD_VARIABLES


def wheel(index: Path, name: str, version: str, needs: str = "") -> None:
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs and f'Requires-Dist: {needs}'}\n"
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", about)
        archive.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
    links = "".join(f'<a href="{file.name}">{file.name}</a>' for file in folder.glob("*.whl"))
    (folder / "index.html").write_text(links)


@pytest.mark.parametrize("line", ["make install", "make install, by uv", "the doctor's"])
def test_a_torch_of_another_index_comes_with_the_pins_of_pypi(line: str, tmp_path: Path) -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    pypi, pytorch = tmp_path / "pypi", tmp_path / "other"
    for index, local in ((pypi, ""), (pytorch, "+cu129")):
        wheel(index, "torch", pins["torch"] + local, "sympy")
    wheel(pypi, "sympy", pins["sympy"])
    # PyTorch's index has some release of each dependency of torch.
    wheel(pytorch, "sympy", "1.13.3")
    if line.startswith("make install"):
        _, words = recipe("torch", f"TORCH_INDEX={pytorch.as_uri()}")
        assert "constraints.txt" in words
    else:
        _, words = split_command(torch_for_driver("12.8", f"{pins['torch']}+cu130"))
        words = [word.replace("https://download.pytorch.org/whl/cu129", pytorch.as_uri()) for word in words]
    # An environment in which an earlier `make install` has PyPI's torch.
    earlier = tmp_path / "earlier"
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", earlier], check=True)
    (packages,) = earlier.glob("lib/*/site-packages")
    for file in pypi.glob("*/*.whl"):
        zipfile.ZipFile(file).extractall(packages)
    python, settings = earlier / "bin" / "python", {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": pypi.as_uri()}
    command: list[str | Path] = ["pip", "--python", python, *words[2:], "--dry-run"]
    if line == "make install, by uv":
        listing = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(listing, env=NO_PIP | settings, capture_output=True, text=True).stdout
        settings = runpy.run_path(str(ROOT / "tools" / "install.py"))["settings_for_uv"](listed)
        command = ["uv", "pip", "install", "--python", python, "--dry-run", *words[3:]]
    command = [word for word in command if word != "--quiet"]
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=NO_PIP | settings, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    # pip writes `Would install torch-...`, uv `+ torch==...`.
    printed = result.stdout + result.stderr
    assert re.search(rf"torch(-|==){re.escape(pins['torch'])}\+cu129", printed), printed
    assert not re.search(r"(Would install.*|\+ )sympy(-|==)", printed), printed


@pytest.mark.parametrize("python", ["3.10.0", "3.11.2", "3.12.0"])
def test_each_pin_for_a_python_supports_that_python(python: str) -> None:
    """Debian's Python 3.11.2 once had a pinned release that needs 3.11.5."""
    meant = {"python_version": python.rsplit(".", 1)[0], "python_full_version": python}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    installed = {
        (canonicalize_name(item.name), f"=={item.version}"): item.metadata["Requires-Python"]
        for item in metadata.distributions()
    }
    # A package whose newest release has dropped this Python has an older pin for it.
    meant_pins = [(pin.name, str(pin.specifier)) for pin in pins if pin.marker is None or pin.marker.evaluate(meant)]
    requirements = {pin: installed[pin] for pin in meant_pins if pin in installed}
    assert len(requirements) > 100
    assert {pin: text for pin, text in requirements.items() if text and python not in SpecifierSet(text)} == {}


def program(file: Path, script: str) -> Path:
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


FIRST_PAGE = ["run task=gpt-wikitext seed=42 *-r1", "report"]
ALL_PAGES = [*FIRST_PAGE, "run seed=42 *-r1", "report", "run seed=43", "report", "run", "report"]


@pytest.mark.parametrize(
    ("run", "status", "calls"),
    [
        ("exit 0", 0, ALL_PAGES),
        ("exit 1", 2, ALL_PAGES),
        ("exit 2", 2, FIRST_PAGE[:1]),
        # Ctrl-C: the shell of the recipe and the command both get it.
        ("kill -INT $PPID; exit 1", 2, FIRST_PAGE),
    ],
)
def test_a_page_is_built_after_a_task_each_seed_and_ctrl_c(run, status, calls, tmp_path):
    program(tmp_path / "study", f'echo "$@" >> {tmp_path}/calls\n[ "$1" = report ] || {{ {run}; }}')
    # A background job of a shell ignores Ctrl-C, and so would make.
    command = ["env", "--default-signal=INT", "make", "-o", "install", "study", f"BIN={tmp_path}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (tmp_path / "calls").read_text().replace("--only ", "").replace(" laptop", "").splitlines()
    assert (ended.returncode, [line.split(" --output")[0] for line in lines]) == (status, calls), ended.stderr


def pytest_on_a_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    visible = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    path = os.pathsep.join([str(FAKE_GPU), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=visible | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_tests_see_no_gpu_on_a_gpu_machine() -> None:
    # On a GPU it would be skipped.
    result = pytest_on_a_gpu("tests/experiments/test_autopsy.py", "-k", "a100_scale_is_refused_without_a_gpu")
    assert result.returncode == 0, result.stdout
    assert "skipped" not in result.stdout


def test_gpu_tests_see_the_gpus() -> None:
    result = pytest_on_a_gpu("-m", "gpu", "tests/engine/test_measure.py", "-k", "test_gpu_energy_grows_over_the_window")
    # The failure is that of torch's CPU build, which the fake GPU cannot change.
    assert "1 failed" in result.stdout
    assert "skipped" not in result.stdout
