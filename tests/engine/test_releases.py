"""Pairs of Accelerate and DeepSpeed releases that were not shown to train as DDP does."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from engines import ROOT
from runs import trained
from study.advisor.doctor import versions
from study.config.errors import Unsupported
from study.config.flags import RunConfig
from study.config.launch_context import Launch
from study.config.strategies import read_strategy
from study.host.environment import describe_environment
from study.host.stacks import UNVERIFIED_VARIABLE, VERIFIED, release_key
from study.records.frames import read_parquet
from study.run.checks import resolve_run_request

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUN = f"runpy.run_path({str(ROOT / 'study' / 'train.py')!r}, run_name='__main__')\n"


@pytest.fixture
def another_release(tmp_path) -> Path:
    """Make a folder that, first on the path, reports the installed DeepSpeed as 0.19.0."""
    folder = tmp_path / "another" / "deepspeed-0.19.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.0\n")
    return folder.parent


def test_the_installation_admits_the_releases_that_trained_in_the_records():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = map(Requirement, project["optional-dependencies"]["train"])
    requirements = {requirement.name: requirement for requirement in needed}
    runs = read_parquet(ROOT / "reports" / "releases").runs
    runs = runs[runs["status_state"].eq("ok") & runs["strategy"].astype(str).str.startswith("zero")]
    runs = runs[runs["transformers_version"].map(requirements["transformers"].specifier.contains)]
    for name, newest in zip(("accelerate", "deepspeed"), VERIFIED[-1], strict=True):
        trained_with = sorted(runs[f"{name}_version"].unique(), key=release_key)
        assert requirements[name].specifier == SpecifierSet(f">={trained_with[0]},<={trained_with[-1]}")
        assert trained_with[-1] == newest, "a new environment has a verified pair"
    newest_torch = max(release_key(version)[:2] for version in runs["torch_version"])
    assert requirements["torch"].specifier == SpecifierSet(f">=2.11,<2.{newest_torch[1] + 1}")
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert {f"accelerate=={VERIFIED[-1][0]}", f"deepspeed=={VERIFIED[-1][1]}"} <= set(constraints)


def test_training_requires_a_psutil_that_reads_the_heap_and_records_which_it_was():
    """heap_info and heap_trim are of psutil 7.2. `study verify` takes an older one, with less memory measured."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for listed, is_old in ((project["dependencies"], True), (project["optional-dependencies"]["train"], False)):
        (allowed,) = (requirement.specifier for requirement in map(Requirement, listed) if requirement.name == "psutil")
        assert [allowed.contains(version) for version in ("5.9", "7.1.3", "7.2.0")] == [is_old, is_old, True]
    assert describe_environment()["packages"]["psutil"] == psutil.__version__


def test_another_pair_is_refused_by_name_wherever_deepspeed_trains(another_release, monkeypatch):
    assert not [check for check in versions() if check.name == "known fault"]
    monkeypatch.syspath_prepend(another_release)
    monkeypatch.delenv(UNVERIFIED_VARIABLE, raising=False)
    with pytest.raises(Unsupported) as refusal:
        resolve_run_request("study", RunConfig(), Launch(read_strategy("zero1"), 1, 0, 0, 1), None, print)
    assert refusal.value.problem.startswith("accelerate 1.15.0 with deepspeed 0.19.0 has not been shown")
    assert "deepspeed==0.19.8" in refusal.value.fix
    assert f"{UNVERIFIED_VARIABLE}=1" in refusal.value.fix
    (check,) = [check for check in versions() if check.name == "pairing"]
    assert check.state == "missing"
    assert check.found.startswith("accelerate 1.15.0 with deepspeed 0.19.0; no run has shown")
    assert "deepspeed==0.19.8" in check.fix
    faults = {check.found: check for check in versions() if check.name == "known fault"}
    divided = next(title for title in faults if "divided by the accumulation steps twice" in title)
    assert divided.startswith("zero0, zero1, zero2, zero2_cpu, with accumulation")
    assert (faults[divided].state, "0.19.6 or later" in faults[divided].fix) == ("missing", True)

    # A release outside the tested range is another one.
    (metadata,) = another_release.glob("*/METADATA")
    metadata.write_text(metadata.read_text().replace("0.19.0", "0.13.0"))
    (packages,) = [check for check in versions() if check.name == "packages"]
    assert "in another one: deepspeed 0.13.0" in packages.found


def test_another_pair_runs_and_its_record_is_called_an_experiment(another_release, tmp_path, monkeypatch):
    monkeypatch.setenv(UNVERIFIED_VARIABLE, "1")
    script = tmp_path / "train.py"
    script.write_text(f"import runpy, sys\nsys.path.insert(0, {str(another_release)!r})\n{RUN}")
    run = trained("zero1", tmp_path / "run", "--max_steps", "2", ranks=1, script=str(script))
    warning = "experiment: accelerate 1.15.0 with deepspeed 0.19.0, which has not been shown to train as DDP does"
    assert warning in run.engine["warnings"]
