"""An installed wheel, outside the checkout: its commands find the files that the checkout has at its top level."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

from study.claims.scoreboard import Scoreboard
from study.config.places import REPOSITORY, install_command, project_with_extras
from study.config.strategies import STRATEGY_NAMES
from study.report.site.build import NOTEBOOKS

Command = Callable[..., subprocess.CompletedProcess[str]]


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Without this environment's packages and its `accelerate`.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = os.defpath
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of the source distribution of the files in git, as a release and pip build it.

    Both are built from copies, because setuptools writes next to the files.
    """
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPOSITORY, capture_output=True, check=True
    ).stdout
    for name in map(os.fsdecode, filter(None, names.split(b"\0"))):
        if (file := REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, source / name)
    for kind, folder in (("sdist", source), ("wheel", target / "source")):
        build = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
        built = call(sys.executable, "-c", build, target, cwd=folder)
        assert built.returncode == 0, built.stderr
        if kind == "sdist":
            (archive,) = target.glob("*.tar.gz")
            shutil.unpack_archive(archive, target)
            (target / archive.name.removesuffix(".tar.gz")).rename(target / "source")
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def study(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Yield the command of a new environment without extras, whose packages cannot be written."""
    environment, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere")
    assert call(sys.executable, "-m", "venv", environment, cwd=folder).returncode == 0
    installed = call(environment / "bin" / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    package = next(environment.glob("lib/*/site-packages/study"))
    before = {path: path.stat().st_mtime_ns for path in package.rglob("*") if "__pycache__" not in path.parts}
    for path in (package, *before):
        path.chmod(path.stat().st_mode & ~0o222)
    yield lambda *arguments, program="study": call(environment / "bin" / program, *arguments, cwd=folder)
    # root writes everywhere.
    after = {path: path.stat().st_mtime_ns for path in package.rglob("*") if "__pycache__" not in path.parts}
    for path in (package, *after):
        path.chmod(path.stat().st_mode | 0o200)
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("predict --model_name_or_path gpt2 --strategy zero3 --hardware 8xH100", "MFU"),
        ("advise --model_name_or_path gpt2 --hardware 8xH100", "Use fsdp2"),
        ("benchmark", "full, FSDP           torch MemTracker"),
        ("status laptop", "0 of 52 cells done (there is no folder "),
        ("releases", "deepspeed 0.19.8 with accelerate 1.15.0 and torch 2.13.0"),
        ("doctor", "pip install '{wheel}[train]'"),
    ],
)
def test_a_command_needs_no_checkout(study: Command, wheel: Path, arguments: str, printed: str) -> None:
    result = study(*arguments.split())
    assert printed.replace("{wheel}", str(wheel)) in result.stdout
    assert result.returncode == (1 if arguments == "doctor" else 0), result.stderr
    assert result.stderr == ""


def test_the_served_page_needs_no_checkout(study: Command, wheel: Path) -> None:
    code = """
import json
from study.advisor.serve import make_server
with make_server() as server:
    for name in ("index.html", "page.js", "question.js", "transport.js", "style.css", "stored.json"):
        print(name, server.find_file(name) is not None)
    folder = json.loads(server.answer("a", "keep_config", ["mine", '{"model_type": "olmo2"}']))["folder"]
    print(json.loads(server.answer("a", "ask", [json.dumps([folder, "--hardware", "2x4090"])]))["fix"])
"""
    result = study("-c", code, program="python")
    assert result.returncode == 0, result.stderr
    *files, fix = result.stdout.splitlines()
    assert len(files) == 6
    assert all(line.endswith(" True") for line in files)
    assert fix.startswith(f"run: pip install '{wheel}[train]'")


def test_the_colab_notebook_installs_the_wheel_of_its_kernel(study: Command, wheel: Path, tmp_path: Path) -> None:
    cells = {cell.id: cell.source for cell in nbformat.read(NOTEBOOKS / "colab.ipynb", as_version=4).cells}
    # Nothing is installed: the install commands are printed.
    recorder = f"work_dir = {str(tmp_path)!r}\ndef call(*command):\n    print('ASKED', *command)\n    return 0"
    code = "\n".join(f"{cells[name]}\n{recorder}" for name in ("parameters", "gpu", "project", "install"))
    result = study("-c", code, program="python")
    assert result.returncode == 0, result.stderr
    rebuilt, target = tmp_path / wheel.name, tmp_path / "again"
    assert f"--no-build-isolation {rebuilt}[train,report]\n" in result.stdout
    # The file that was installed is not needed.
    install = ("-m", "pip", "install", "--no-deps", "--target", str(target), str(rebuilt))
    assert study(*install, program="python").returncode == 0
    with zipfile.ZipFile(wheel) as built:
        files = [name for name in built.namelist() if name.startswith("study/") or "entry_points" in name]
        assert all((target / name).read_bytes() == built.read(name) for name in files)
    assert (tmp_path / "constraints.txt").read_text() == (REPOSITORY / "constraints.txt").read_text().rstrip("\n")


def test_explain_accepts_every_written_config(study: Command, tmp_path: Path) -> None:
    assert study("configs", str(tmp_path)).returncode == 0
    # In one process, since most of its time is imports.
    code = "import sys; from study.cli import main; sys.exit(any(main(['explain', f, 'gpt2']) for f in sys.argv[1:]))"
    files = [str(tmp_path / f"{name}.yaml") for name in STRATEGY_NAMES]
    result = study("-c", code, *files, program="python")
    assert result.returncode == 0, result.stderr + result.stdout


def test_claims_without_pandas_are_the_recorded_findings(study: Command, full_board: Scoreboard) -> None:
    result, anew = study("claims", "--json"), full_board.judged
    # The wheel has the records that were judged.
    assert result.stderr == ""
    claims = [(claim["id"], claim["finding_text"], claim["sentence"]) for claim in json.loads(result.stdout)["claims"]]
    assert claims == [(judged.claim.id, judged.finding.text, judged.sentence) for judged in anew]
    assert f"{len(anew)} claims: " in study("claims").stdout


def test_a_sweep_that_cannot_train_leaves_nothing(study: Command, wheel: Path, tmp_path: Path) -> None:
    refused = study("run", "laptop", "--runs_dir", str(tmp_path / "runs"))
    assert (refused.returncode, list(tmp_path.iterdir())) == (2, [])
    assert f"pip install '{wheel}[train]'" in refused.stderr


def test_the_doctor_counts_missing_packages_and_names_few(study: Command) -> None:
    checks = {check["name"]: check["found"] for check in json.loads(study("doctor", "--json").stdout)["checks"]}
    right, pinned = map(int, re.findall(r"(\d+) of (\d+) packages of constraints.txt", checks["versions"])[0])
    absent, more = re.findall(r"not installed: (.*) and (\d+) more", checks["versions"])[0]
    lists = re.findall(r"in another one: ([^;]*)", checks["versions"])
    mismatched = len(lists[0].split(", ")) if lists else 0
    assert len(absent.split(", ")) == 8
    assert right + mismatched + 8 + int(more) == pinned


EXTRAS = {
    "report": ("report laptop", "claims --before_records", "autopsy report"),
    "train": (
        "virtual --strategy zero3 --world_size 8 --model_name_or_path gpt2",
        "run laptop",
        "predict --model_name_or_path gpt2 --strategy zero3 --hardware 8xH100 --traced",
        "weights laptop",
        "prepare laptop",
        "verify",
        "releases bisect zero1",
        "autopsy run",
        "-m study.train",
    ),
}


@pytest.mark.parametrize(("extra", "arguments"), [(extra, line) for extra in EXTRAS for line in EXTRAS[extra]])
def test_a_missing_extra_is_named_with_its_install_command(
    study: Command, wheel: Path, arguments: str, extra: str
) -> None:
    module = "python" if arguments.startswith("-m ") else "study"
    result = study(*arguments.split(), program=module)
    assert result.returncode == 2
    # Of no registry: the file from which it was installed has the extra.
    assert result.stderr.count(f"pip install '{wheel}[{extra}]'") == 1, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr


def test_a_class_outside_the_table_needs_transformers_to_be_predicted(
    study: Command, wheel: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "olmo2"}')
    result = study("predict", str(tmp_path), "--strategy", "zero3", "--hardware", "8xH100")
    assert (result.returncode, f"pip install '{wheel}[train]'" in result.stderr) == (2, True), result.stderr
    reason = "olmo2 is not in the table of families, so transformers' code is traced: torch is not installed here"
    assert reason in result.stderr


def test_extras_are_installed_from_where_the_project_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As pip 25 writes direct_url.json.
    folder, gone = tmp_path / "a clone", tmp_path / "gone"
    folder.mkdir()
    git = {"url": "https://example.org/zero-study", "vcs_info": {"vcs": "git", "commit_id": "0a16c68"}}
    for origin, project in (
        (None, "zero-study[train]"),
        ({"url": folder.as_uri(), "dir_info": {}}, f"{folder}[train]"),
        ({"url": gone.as_uri(), "dir_info": {}}, ".[train]"),
        (git, "zero-study[train] @ git+https://example.org/zero-study@0a16c68"),
        ({"url": "https://example.org/a.whl", "archive_info": {}}, "zero-study[train] @ https://example.org/a.whl"),
    ):
        assert project_with_extras(origin, "train") == project
    # From any folder a checkout names itself.
    monkeypatch.chdir(REPOSITORY)
    assert install_command("train", missing=["psutil"]).startswith("pip install -e '.[train]'")
    monkeypatch.chdir(tmp_path)
    assert install_command("train").startswith(f"pip install -e '{REPOSITORY}[train]'")
