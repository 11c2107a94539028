"""The pre-commit hook, the check of the action, and the pins of workflows."""

from __future__ import annotations

import json
import re

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
