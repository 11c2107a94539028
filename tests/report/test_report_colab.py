from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import nbformat
import pytest

from study.config.places import REPOSITORY
from study.report.site.build import NOTEBOOKS

COLAB = NOTEBOOKS / "colab.ipynb"
# The interpreter of this environment's own environment.
BASE = sys._base_executable  # type: ignore[attr-defined]


def write_archive(file: Path, **members: str) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in members.items():
            # A fixed time, since a rebuilt archive with another time would be another project.
            archive.writestr(zipfile.ZipInfo(name.replace("__", "/")), text)
    return file


def find_project(source: str | Path, work: Path, *further: str, **run: Any) -> subprocess.CompletedProcess[str]:
    """Run the notebook's cells up to the one that finds the project, then the given cells or code."""
    cells = {cell.id: cell.source for cell in nbformat.read(COLAB, as_version=4).cells}
    code = "\n".join([cells["parameters"], f"source, work_dir = {str(source)!r}, {str(work)!r}"])
    # As IPython shows an error.
    hook = "sys.excepthook = lambda kind, error, trace: print(*error._render_traceback_(), file=sys.stderr)"
    code = "\n".join([code, cells["gpu"], hook, cells["project"], *(cells.get(name, name) for name in further)])
    python = run.pop("python", sys.executable)
    return subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=work.parent, check=False, **run)


def test_each_source_is_the_project_that_is_installed(tmp_path: Path) -> None:
    source, work = tmp_path / "zero-study.zip", tmp_path / "work"
    projects = []
    for text in ("old", "new", "new"):
        write_archive(source, **{"zero-study__study__train.py": text, "zero-study__docs__study__train.py": "a copy"})
        result = find_project(source, work)
        assert result.returncode == 0, result.stderr
        projects.append(Path(result.stdout.split("the project is ")[1].strip()))
        assert (projects[-1] / "study" / "train.py").read_text() == text
        assert ("fetched before" in result.stdout) is (len(projects) == 3)
    assert projects[1] == projects[2] != projects[0]
    # A folder is used in place.
    assert find_project(projects[0], work).stdout.endswith(f"the project is {projects[0]}\n")
    missing = find_project("http://127.0.0.1:9/no.whl", work)
    assert "/no.whl cannot be downloaded: " in missing.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("torch", "driver"), [("2.12.1", "12.4"), ("2.10.0", "12.4"), ("2.10.0", "13.0"), (None, None)]
)
def test_packages_of_the_runtime_stay_and_a_new_enough_torch_is_reused(torch, driver, tmp_path):
    packages, work = tmp_path / "packages", tmp_path / "work"
    if torch:
        about = packages / f"torch-{torch}.dist-info"
        about.mkdir(parents=True)
        (packages / "torch.py").touch()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    shell = tmp_path / "nvidia-smi"
    shell.write_text(f"#!/bin/sh\necho 'CUDA Version: {driver}'\n")
    shell.chmod(0o755 if driver else 0o644)
    # Nothing is installed: the install commands are printed. The base interpreter, since a virtual environment has
    # nothing to lend.
    recorder = "import json\ndef call(*command):\n    print('ASKED', json.dumps(command))\n    return 0"
    path = {"PYTHONPATH": str(packages), "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])}
    result = find_project(REPOSITORY, work, recorder, "install", python=BASE, env=os.environ | path)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line[6:]) for line in result.stdout.splitlines() if line.startswith("ASKED")]
    venv_command, *installs, built = lines
    assert ("--system-site-packages" in venv_command) is (torch == "2.12.1")
    assert built == [str(work / "venv" / "bin" / "python"), "-m", "study.host.operators"]
    cuda_12 = int((torch, driver) == ("2.10.0", "12.4"))
    assert [" ".join(command).count("whl/cu129") for command in installs] == [0, cuda_12, 0]
    pins, used = ((folder / "constraints.txt").read_text().splitlines() for folder in (REPOSITORY, work))
    assert {pin.partition("==")[0] for pin in pins if pin not in used} == ({"torch"} if torch == "2.12.1" else set())


@pytest.mark.parametrize("damage", ["other", "torn", "text"])
def test_a_source_without_the_project_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    source, work = tmp_path / "zero-study.zip", tmp_path / "work"
    write_archive(source, **{"thesis" if damage == "other" else "zero-study__study__train.py": "x" * 1000})
    content = source.read_bytes()
    source.write_bytes({"torn": content[: len(content) // 2], "text": b"not an archive"}.get(damage, content))
    result = find_project(source, work)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert str(source) in line
    assert ("holds no study/train.py" if damage == "other" else "no whole .zip") in line
    # A rejected source is no project on the next call.
    assert list(work.iterdir()) == []
