"""The pre-commit hook, the check of the action, and the pins of workflows."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml

from engines import ROOT
from study.cli import main

GOOD = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
# Configuration files with and without faults, and files of other programs, which it skips.
HOOKED = ROOT / "tests" / "data" / "hook"


def check(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Run the hook's entry with these arguments; return the status and the lines."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    command, *words = hook["entry"].split()
    assert command == "study"
    return main([*words, *arguments]), capsys.readouterr().out.splitlines()


def test_the_hook_annotates_wrong_lines_and_skips_other_files(monkeypatch, capsys):
    monkeypatch.chdir(HOOKED)
    status, lines = check(*sorted(file.name for file in HOOKED.iterdir()), "--output_format", "github", capsys=capsys)
    assert status == 1
    assert lines[-1] == "errors: 2, warnings: 7; 7 configuration files checked, 7 other files skipped"
    start = re.compile(r"::(error|warning) file=(.+),line=(\d+),title=(\w+)::([\w.]+)")
    assert [match.groups() for line in lines[:-1] if (match := start.match(line))] == [
        ("error", "comma.json", "3", "refused", "is"),
        ("warning", "misspelt.json", "3", "ignored", "zero_optimisation"),
        ("warning", "one_line.json", "1", "conflict", "one_line.json"),
        ("warning", "wrong%2C too.yaml", "5", "ineffective", "zero3_init_flag"),
        ("warning", "wrong%2C too.yaml", "6", "ignored", "stage3_max_live_parameters"),
        ("warning", "wrong%2C too.yaml", "7", "ineffective", "offload_param_device"),
        ("error", "wrong.json", "6", "refused", "zero_optimization.offload_param.nvme_path"),
        ("warning", "wrong.json", "9", "ineffective", "zero_optimization.round_robin_gradients"),
        ("warning", "wrong.json", "11", "ignored", "monitor_config"),
    ]
    assert check("good.json", "good.yaml", "tpu.yaml", capsys=capsys)[0] == 0
    status, lines = check("wrong.json", "--json", capsys=capsys)
    document = json.loads("\n".join(lines))
    assert (status, document["checked"], len(document["findings"])) == (1, ["wrong.json"], 3)


PARTIAL = yaml.safe_load((ROOT / "tests" / "data" / "partial_configs.yaml").read_text())


@pytest.mark.parametrize(("settings", "arguments", "kinds"), PARTIAL)
def test_without_a_model_and_a_number_of_ranks_only_what_holds_for_any_is_found(
    settings, arguments, kinds, tmp_path, capsys
):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(GOOD | settings))
    _, lines = check(str(file), *arguments, "--json", capsys=capsys)
    findings = json.loads("\n".join(lines))["findings"]
    assert [finding["id"].partition("/")[0] for finding in findings] == kinds


def test_actions_are_pinned_to_commits_with_their_release() -> None:
    files = [ROOT / "action.yml", *(ROOT / ".github" / "workflows").glob("*.yml")]
    uses = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if " uses: " in line]
    assert len(uses) > 5
    for line in uses:
        assert re.search(r"uses: (\./|[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+)$", line), line


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository with a good configuration file and one that the engine refuses."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "good.json").write_text(json.dumps(GOOD))
    (folder / "wrong.json").write_text(json.dumps({**GOOD, "zero_optimization": {"stage": 9}}))
    for command in ("git init --quiet", "git add --all"):
        subprocess.run(shlex.split(command), cwd=folder, check=True)
    return folder


def check_one(name: str, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Check one file as a workflow does; return the status and the printed lines."""
    status = main(["explain", "--strict", "--output_format", "github", *flags, name])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    "place", ["../outside/secret.json", "absolute", "linked.json", "linked/secret.json", ".git/x.json"]
)
def test_a_strict_check_reads_nothing_outside_of_the_repository(place, checkout, monkeypatch, capsys):
    """A pull request may name any file of the runner, and its author sees the annotations."""
    secret = {"train_batch_size": "SECRET3", "zero_optimization": {"stage": 9}}
    outside = checkout.parent / "outside" / "secret.json"
    outside.parent.mkdir()
    for file in (outside, checkout / ".git" / "x.json"):
        file.write_text(json.dumps(secret))
    (checkout / "linked.json").symlink_to(outside)
    (checkout / "linked").symlink_to(outside.parent)
    path = str(outside) if place == "absolute" else place
    section = {"deepspeed_config_file": path}
    document = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section}
    (checkout / "outer.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    monkeypatch.chdir(checkout)
    status, printed = check_one("outer.yaml", capsys=capsys)
    assert (status, printed.count("::error")) == (1, 1)
    assert f"line=4,title=refused::sets deepspeed_config_file: '{path}', which is outside of the checked rep" in printed
    # Not even whether it exists.
    (checkout / "outer.yaml").write_text(yaml.safe_dump(document, sort_keys=False).replace("secret", "no"))
    assert check_one("outer.yaml", capsys=capsys)[1] == printed.replace("secret", "no")
    # Nor through the names of a repository, among which links are.
    if place == "linked.json":
        status, printed = check_one(place, "--skip_others", capsys=capsys)
        assert (status, "::is outside of the checked rep" in printed) == (1, True)
        assert "SECRET" not in printed
        # Without --strict a user may read any file.
        assert main(["explain", place, "gpt2", "--world_size", "1"]) == 1
        assert "SECRET3" in capsys.readouterr().out


def test_a_strict_check_without_a_repository_reads_only_the_folder_of_the_file(tmp_path, monkeypatch, capsys):
    folder, secret = tmp_path / "checked", tmp_path / "secret.json"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    secret.write_text(json.dumps({"train_batch_size": "SECRET3"}))
    (folder / "linked.json").symlink_to(secret)
    for path in ("../secret.json", str(secret), "linked.json"):
        section = {"deepspeed_config_file": path}
        document = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section}
        (folder / "outer.yaml").write_text(yaml.safe_dump(document))
        # From the folder, from elsewhere, and from the home, which has the secret.
        for place in (folder, Path("/"), tmp_path):
            monkeypatch.chdir(place)
            status, printed = check_one(str(folder / "outer.yaml"), capsys=capsys)
            assert (status, "SECRET" in printed, "which is outside of the checked rep" in printed) == (1, False, True)


def test_texts_of_a_file_that_are_no_words_of_a_setting_are_not_repeated(tmp_path, capsys):
    """A workflow may have written credentials next to the files that a pull request names."""
    section = {"stage": "9", "offload_optimizer": {"device": "SECRET_A"}, "overlap_comm": "SECRET_B"}
    lines = {"train_batch_size": "SECRET_C", "zero_optimization": section, "optimizer": {"type": "SECRET_D"}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(lines))
    status, printed = check_one(str(file), "--world_size", "1", capsys=capsys)
    assert (status, printed.count("::error"), "SECRET" in printed) == (1, 5, False)
    assert "offload_optimizer.device: is a text; it should be 'none', 'cpu' or 'nvme'" in printed
    assert "zero_optimization.stage: is '9'; it should be 0, 1, 2 or 3" in printed


WRONG_ANYWHERE = {
    "lower.yaml": ("distributed_type: deepspeed\nnum_processes: 2\n", "is 'deepspeed'; did you mean DEEPSPEED?", 1),
    "merged.yaml": (
        "debug: &d\n  distributed_type: NCCL\n  num_processes: 2\n<<: *d\n",
        "distributed_type: is a text",
        1,
    ),
    "json.yaml": (json.dumps({**GOOD, "bf16": 3}), "bf16: is 3", 1),
    "json.conf": (json.dumps({**GOOD, "bf16": 3}), "bf16: is 3", 1),
    "package.json": ('{"scripts": {}}', "has no setting of DeepSpeed or Accelerate", 0),
    "values.yaml": ("replicas: 3\n", "has no setting of DeepSpeed or Accelerate", 0),
    "tpu.yaml": ("compute_environment: LOCAL_MACHINE\ndistributed_type: XLA\n", "XLA, which is not modelled", 0),
    "hydra.yaml": ("distributed_type: ddp\nseed: 1\n", "distributed_type: is a text", 0),
    "image.json": ("\0\udcff", "is not readable", 0),
    "list.json": ("[1]", "is not a mapping", 0),
}


@pytest.mark.parametrize("name", WRONG_ANYWHERE)
def test_a_file_that_is_named_is_checked_or_refused_and_left_out_only_on_request(name, tmp_path, monkeypatch, capsys):
    text, says, among_others = WRONG_ANYWHERE[name]
    (tmp_path / name).write_text(text, errors="surrogateescape")
    monkeypatch.chdir(tmp_path)
    status, printed = check_one(name, capsys=capsys)
    assert (status, says in printed) == (1, True), printed
    assert check_one(name, "--skip_others", capsys=capsys)[0] == among_others


def write_wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    """Write a wheel with these files, which pip installs without an index."""
    wheel, info = folder / f"{name}-1-py3-none-any.whl", f"{name}-1.dist-info"
    described = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content = {**files, **described}
    record = "".join(f"{file},,\n" for file in [*content, f"{info}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in [*content.items(), (f"{info}/RECORD", record)]:
            archive.writestr(file, text)
    return wheel


def run_the_action(checkout: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the action's steps in a checkout as a runner does, with a wheel that installs this environment's packages."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    inputs = {f"inputs.{name}": entry["default"] for name, entry in action["inputs"].items()}
    packages = f"{ROOT}\n{sysconfig.get_path('purelib')}\n"
    commands = "[console_scripts]\nstudy = study.cli:main\n"
    files = {"these_packages.pth": packages, "zero_study-1.dist-info/entry_points.txt": commands}
    values = {**inputs, "steps.python.outputs.python-path": sys.executable}
    (step,) = [step for step in action["runs"]["steps"] if "run" in step]
    assert step["shell"] == "bash"
    step_inputs = {
        name: re.sub(r"\$\{\{ (.+?) \}\}", lambda item: values[item[1]], text) for name, text in step["env"].items()
    }
    variables = {
        "RUNNER_TEMP": str(folder),
        "GITHUB_ACTION_PATH": str(write_wheel(folder, "zero_study", files)),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=checkout,
        text=True,
        env={**os.environ, **variables, **step_inputs, **environment},
        capture_output=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("path", [None, "."])
def test_the_action_checks_a_pull_request_and_runs_nothing_of_it(path, checkout: Path, tmp_path: Path) -> None:
    """Modules in the root of a checkout have the names of those that the steps import."""
    marker = tmp_path / "was-run"
    code = f"open({str(marker)!r}, 'a').write(__name__ + '\\n')\n"
    for name in ("venv", "pip", "ensurepip", "logging", "types", "runpy", "sitecustomize", "study", "hjson", "yaml"):
        (checkout / f"{name}.py").write_text(code)
    subprocess.run(["git", "add", "--all"], cwd=checkout, check=True)
    environment = {} if path is None else {"PYTHONPATH": path}
    done = run_the_action(checkout, tmp_path, **environment)
    assert not marker.exists(), marker.read_text()
    first, last = done.stdout.splitlines()
    assert first.startswith("::error file=wrong.json,line=1,title=refused::zero_optimization.stage: is 9"), done.stderr
    assert last == "errors: 1, warnings: 0; 2 configuration files checked, 0 other files skipped"
    # That of xargs, if a command ends with another status than 0.
    assert done.returncode == 123
