"""`study explain` names each wrong combination of the stored runs, and nothing in the equal ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from study.advisor.explain_case import ProgramSettings, resolve
from study.advisor.explain_combinations import ENDS_WITH_ERROR, combination_findings, feature_keys
from study.advisor.user_settings import Finding, known_settings, read_user_file
from study.cli import main
from study.compositions.answers import match_known_finding, read_matrices, stored_evidence
from study.compositions.engines import deepspeed_settings
from study.compositions.features import Combination, make_combination
from study.compositions.matrix import Matrix
from study.predictor.models import model_shape
from study.predictor.shape import with_adapters

MATRIX = next(read_matrices())
# Features that a file does not show: `study explain` names them as conditions, or not at all.
OF_PROGRAM = {"frozen", "lora", "resume", "cpu_adam", "sgd", "fused_adamw", "tied", "checkpointing", "reentrant"}


def find(combination: Combination, folder: Path) -> list[Finding]:
    """Return the findings in the settings of a combination, as a DeepSpeed file."""
    settings = deepspeed_settings(combination, folder)
    if combination.has("muon"):
        settings["optimizer"] = {"type": "Muon", "params": {"lr": 1e-3}}
    return find_in(settings, folder, combination)


def find_in(settings: dict[str, Any], folder: Path, combination: Combination) -> list[Finding]:
    file = folder / "ds.json"
    file.write_text(json.dumps(settings))
    work = ProgramSettings(accumulation=None)
    shape = model_shape("gpt2")
    if combination.has("lora"):
        shape = with_adapters(shape, 8)
    case = resolve(read_user_file(str(file)), shape, combination.ranks, work)
    assert combination.level("engine") in feature_keys(case)
    return list(combination_findings(case))


def test_every_wrong_combination_of_the_matrix_that_settings_show_is_named(tmp_path: Path) -> None:
    certain, conditional = set[str](), set[str]()
    for outcome in MATRIX.findings.values():
        entry = match_known_finding(outcome, MATRIX.stack)
        combination = outcome.combination
        if entry is None or entry.verdict != "wrong" or combination.has("accelerate") or combination.stage is None:
            continue
        findings = [finding for finding in find(combination, tmp_path) if entry.title in finding.message]
        if entry.needs_program:
            assert findings == []
            continue
        if combination.has("frozen") and combination.has("resume"):
            # Two conditions of the program: adapters, which a flag of explain has, leave one.
            assert findings == []
            continue
        assert len(findings) == 1, combination.name
        assert findings[0].fix == entry.instead
        assert findings[0].key in str(read_keys(deepspeed_settings(combination, tmp_path))) or combination.has("muon")
        (conditional if findings[0].kind == "noted" else certain).add(entry.title)
    assert certain == {
        "ZenFlow at stages 1 and 2 transposes the model's matrices before training",
        "stage 0 in bf16 takes a step with gradients of zero before training",
        "stage 0 in fp16 divides the gradients by the loss scale, and does not multiply the loss by it",
        "clipping judges by the norm of Muon's updates",
        "gradients of weights that AdamW steps with Muon are lost",
        "Muon orthogonalizes each rank's part of a matrix instead of the matrix",
        "hpZ gathers layers from a rank with another part of them",
    }
    assert conditional == {
        "Adam's bias correction begins again after a resume with ZenFlow",
        "the checkpoint does not restore the weights with the optimizer on NVMe",
        "after a checkpoint is loaded frozen weights are the old ones",
        "gradients of different experts are mixed",
        # The matrix passes an mpu.
        "gradients are too large by the number of ranks that share a sequence",
        "without reduce_scatter gradients are too large by the number of ranks that share a sequence",
    }


def test_combinations_that_end_with_an_error_are_refused_with_their_remedy(tmp_path: Path) -> None:
    refused_titles = set[str]()
    for outcome in MATRIX.findings.values():
        entry = match_known_finding(outcome, MATRIX.stack)
        combination = outcome.combination
        if entry is None or entry.verdict != "refused" or combination.has("accelerate") or combination.stage is None:
            continue
        errors = [finding for finding in find(combination, tmp_path) if finding.rule == ENDS_WITH_ERROR]
        if errors:
            (finding,) = errors
            assert finding.message.startswith(f"{entry.title}: the run ends with an error")
            assert (finding.severity, finding.fix) == ("error", entry.instead)
            refused_titles.add(entry.title)
    assert refused_titles == {
        "AutoTP divides an adapter's matrices so that they do not fit each other",
        "ZenFlow at stage 3 trains no adapters",
        "a copy of the weights within a node cannot be made with parameters on NVMe",
        "fp32 accumulation needs stage 1 or more",
    }


def test_adapters_with_autotp_are_no_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1},
    }
    file.write_text(json.dumps(settings))
    command = ["explain", str(file), "gpt2", "--hardware", "4xA100"]
    main([*command, "--peft", "lora"])
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith("Ends with an error: tensor_parallel.autotp_size. Apart from that: ")
    assert "train adapters without AutoTP" in output
    main(command)
    assert "Ends with an error" not in capsys.readouterr().out


def read_keys(settings: dict[str, Any], place: str = "") -> list[str]:
    keys = []
    for name, value in settings.items():
        keys += [place + name, *(read_keys(value, f"{place}{name}.") if isinstance(value, dict) else [])]
    return keys


def test_no_combination_that_was_equal_is_called_wrong(tmp_path: Path) -> None:
    equal = [outcome.combination for outcome in MATRIX.outcomes.values() if outcome.is_equal]
    checked = [combination for combination in equal if combination.uses_deepspeed]
    for combination in checked:
        wrong = [finding for finding in find(combination, tmp_path) if finding.kind != "noted"]
        assert not wrong, combination.name
    assert len(checked) > 50


def test_features_of_a_file_are_those_of_the_combination_that_it_was_made_from(tmp_path: Path) -> None:
    hidden = OF_PROGRAM | {"accelerate", "schedule", "evaluation", "uneven", "ep", "no_sync", "persistent"}
    # Sizes of buckets, zero.Init and the compiler have no finding, so that nothing reads them.
    hidden |= {"small_buckets", "zero_init", "deepcompile", "overlap", "autocast", "autocast_modules"}
    hidden |= {"warmup_lr", "warmup_cosine_lr"}
    for outcome in MATRIX.outcomes.values():
        combination = outcome.combination
        if not combination.uses_deepspeed or combination.has("muon"):
            continue
        file = tmp_path / "ds.json"
        file.write_text(json.dumps(deepspeed_settings(combination, tmp_path)))
        case = resolve(read_user_file(str(file)), model_shape("gpt2"), combination.ranks, ProgramSettings())
        features = {name.replace("config_accumulation", "accumulation") for name in combination.features}
        if combination.has("accelerate"):
            # The size is in Accelerate's own file.
            features.discard("ulysses")
        if combination.has("ulysses"):
            # The matrix passes an mpu, which no config shows.
            features.discard("ulysses")
        assert set(feature_keys(case)) == features - hidden, combination.name


@pytest.mark.parametrize(
    ("stage", "sizes", "top", "expected"),
    [
        (
            2,
            {"sp_size": 2},
            {},
            [
                ("conflict", "gradients are too large by the number of ranks that share a sequence"),
                ("noted", "if Accelerate prepares the program's schedule: the schedule takes a step for each process"),
                ("noted", "if Accelerate prepares the loader of an evaluation together with the model: attention sees"),
            ],
        ),
        (
            3,
            {"sp_size": 2},
            {},
            [
                ("noted", "if Accelerate prepares the program's schedule: the schedule takes a step for each process"),
                ("noted", "if Accelerate prepares the loader of an evaluation together with the model: attention sees"),
            ],
        ),
        (3, {"sp_size": 1}, {}, []),
        (
            3,
            {},
            {"tensor_parallel": {"autotp_size": 2}},
            [("noted", "if Accelerate prepares the program's schedule: the schedule takes a step for each process")],
        ),
        (3, {}, {"tensor_parallel": {"autotp_size": 1}}, []),
    ],
)
def test_groups_that_share_samples_are_named_in_a_file_of_accelerate(
    stage: int, sizes: dict[str, int], top: dict[str, Any], expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    engine = tmp_path / "ds.json"
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    engine.write_text(json.dumps(settings | top))
    launch = tmp_path / "accelerate.yaml"
    document: dict[str, Any] = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 4,
        "deepspeed_config": {"deepspeed_config_file": str(engine)},
    }
    if sizes:
        document["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    launch.write_text(yaml.safe_dump(document))
    case = resolve(read_user_file(str(launch)), model_shape("gpt2"), 4, ProgramSettings())
    findings = [(finding.kind, finding.message) for finding in combination_findings(case)]
    assert len(findings) == len(expected), findings
    for (kind, message), (expected_kind, text) in zip(findings, expected, strict=True):
        assert kind == expected_kind
        assert message.startswith(text)


def test_the_first_line_says_that_something_else_is_trained_and_what_is_not_modelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "sequence_parallel_size": 2,
        "data_parallel_size": 2,
        "zero_optimization": {"stage": 2},
    }
    file.write_text(json.dumps(settings))
    assert main(["explain", "--world_size", "4", str(file), "gpt2"]) == 0
    assert (
        "Trains something else, silently: sequence_parallel_size. Apart from that: without sequence_parallel_size"
        " (not modelled): peak" in " ".join(capsys.readouterr().out.split())
    )
    settings["zero_optimization"] = {"stage": 3}
    file.write_text(json.dumps(settings))
    assert main(["explain", "--world_size", "4", str(file), "gpt2"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Without sequence_parallel_size (not modelled): peak" in output
    assert "Trains something else" not in output
    # Without the other size the ranks share samples by an mpu alone.
    del settings["data_parallel_size"]
    settings["zero_optimization"] = {"stage": 2}
    file.write_text(json.dumps(settings))
    assert main(["explain", "--world_size", "4", str(file), "gpt2"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith("Peak")
    assert "sequence_parallel_size: if the program passes an mpu, as ALST does: gradients are too large" in output
    assert "a step has 2 times the samples of train_batch_size" in output


def test_a_key_of_the_mesh_without_its_prefix_is_dropped_and_makes_no_groups(tmp_path: Path) -> None:
    engine = tmp_path / "ds.json"
    engine.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}))
    launch = tmp_path / "accelerate.yaml"
    document: dict[str, Any] = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "deepspeed_config": {"deepspeed_config_file": str(engine)},
        "parallelism_config": {"sp_size": 2, "parallelism_config_sp_backend": "deepspeed", "foo": 1},
    }
    launch.write_text(yaml.safe_dump(document))
    findings: list[Finding] = []
    file = read_user_file(str(launch), findings)
    assert file.group_sizes == {}
    dropped = {finding.key: finding.says for finding in findings if finding.kind == "ignored"}
    assert dropped["sp_size"] == "Accelerate drops it silently; did you mean parallelism_config_sp_size?"
    assert dropped["foo"] == "Accelerate drops it silently"
    assert set(dropped) == {"sp_size", "foo"}
    # Accelerate's launcher does not pass it on.
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_extend_env_parallelism_config

    arguments = launch_command_parser().parse_args(["--config_file", str(launch), "train.py"])
    arguments, *_ = _validate_launch_command(arguments)
    environment: Any = prepare_extend_env_parallelism_config(arguments, {})
    assert environment["PARALLELISM_CONFIG_SP_SIZE"] == "1"


def test_the_known_keys_of_the_mesh_are_those_of_accelerates_launcher() -> None:
    from accelerate.commands.launch import launch_command_parser

    flags = {action.dest for action in launch_command_parser()._actions}
    prefix = "parallelism_config_"
    assert {flag.removeprefix(prefix) for flag in flags if flag.startswith(prefix)} == set(
        known_settings()["parallelism_config"]
    )


def test_context_parallelism_is_named_in_a_file_of_fsdp(tmp_path: Path) -> None:
    file = tmp_path / "fsdp.yaml"
    mesh = {"parallelism_config_cp_size": 2, "parallelism_config_dp_shard_size": 2}
    document = {
        "distributed_type": "FSDP",
        "num_processes": 4,
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": mesh,
    }
    file.write_text(yaml.safe_dump(document))
    case = resolve(read_user_file(str(file)), model_shape("gpt2"), 4, ProgramSettings())
    assert feature_keys(case)["cp"] == "parallelism_config.cp_size"
    (finding,) = combination_findings(case)
    assert finding.key == "parallelism_config.cp_size"
    assert "the schedule takes a step for each process" in finding.message


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_the_optimizer_of_a_program_is_a_condition_under_accelerate_only_without_one_in_the_file(
    has_optimizer: bool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    if has_optimizer:
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    engine = tmp_path / "ds.json"
    engine.write_text(json.dumps(settings))
    launch = tmp_path / "accelerate.yaml"
    launch.write_text(
        yaml.safe_dump(
            {
                "distributed_type": "DEEPSPEED",
                "num_processes": 2,
                "deepspeed_config": {"deepspeed_config_file": str(engine)},
            }
        )
    )
    case = resolve(read_user_file(str(launch)), model_shape("gpt2"), 2, ProgramSettings())
    messages = [finding.message for finding in combination_findings(case)]
    expected = [] if has_optimizer else ["if the program creates DeepSpeedCPUAdam: "]
    assert [message[:41] for message in messages] == expected


@pytest.mark.parametrize(("stage", "is_on_nvme"), [(1, False), (2, False), (3, True)])
def test_a_fault_of_nvme_is_of_stage_3_alone(stage: int, is_on_nvme: bool, tmp_path: Path) -> None:
    """Stages 1 and 2 keep the state on the host, and a checkpoint restores the weights there."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
    }
    messages = [finding.message for finding in find_in(settings, tmp_path, make_combination([f"zero{stage}"]))]
    assert any("the optimizer on NVMe" in message for message in messages) == is_on_nvme


@pytest.mark.parametrize(
    ("settings", "is_named"),
    [
        ({"fsdp_version": 1, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}, True),
        ({"fsdp_state_dict_type": "sharded_state_dict"}, True),
        ({"fsdp_version": 1, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}, True),
        ({"fsdp_version": 1, "fsdp_state_dict_type": 3}, True),
        ({"fsdp_version": 1, "fsdp_state_dict_type": "FULL_STATE_DICT"}, False),
        ({"fsdp_version": 1}, False),
        ({"fsdp_version": 2, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}, False),
    ],
)
def test_fsdp1_with_sharded_checkpoints_is_named_for_runs_that_resume(
    settings: dict[str, Any], is_named: bool, tmp_path: Path
) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": settings}))
    case = resolve(read_user_file(str(file)), model_shape("gpt2"), 2, ProgramSettings())
    findings = list(combination_findings(case))
    assert [(finding.kind, finding.key) for finding in findings] == [("noted", "fsdp_state_dict_type")] * is_named
    if is_named:
        assert findings[0].message.startswith(
            "if training is resumed from a checkpoint: the optimizer's state is not loaded"
        )
        assert findings[0].fix == "set fsdp_version: 2, or fsdp_state_dict_type: FULL_STATE_DICT"


def test_strict_prints_a_fault_of_resumed_runs_as_a_note_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"fsdp_version": 1, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    document = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": settings}
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "--strict", "fsdp.yaml"]) == 0
    note, total = capsys.readouterr().out.splitlines()
    assert note.startswith("fsdp.yaml:5: note: noted: fsdp_state_dict_type: if training is resumed")
    assert total.startswith("errors: 0, warnings: 0, notes: 1; ")
    assert main(["explain", "--strict", "--output_format", "github", "fsdp.yaml"]) == 0
    assert capsys.readouterr().out.startswith("::notice file=fsdp.yaml,line=5,")


def test_strict_fails_on_a_wrong_combination_and_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = deepspeed_settings(make_combination(["zero2", "zenflow", "optimizer_cpu", "cpu_adam"]), tmp_path)
    file = tmp_path / "zenflow.json"
    file.write_text(json.dumps(settings, indent=1))
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "--strict", "--world_size", "2", "zenflow.json", "gpt2"]) == 3
    line = file.read_text().splitlines().index('  "zenflow": {') + 1
    assert f"zenflow.json:{line}: " in capsys.readouterr().out


def install(monkeypatch: pytest.MonkeyPatch, **releases: str | None) -> None:
    """Pretend that these releases are installed, and the tested ones of other packages."""
    versions = {**MATRIX.stack, **releases}
    monkeypatch.setattr("study.advisor.explain_releases.package_version", versions.get)


@pytest.mark.parametrize(
    ("release", "message"),
    [
        (
            "0.19.8",
            "ZenFlow at stages 1 and 2 transposes the model's matrices before training, without an error (tested with",
        ),
        ("0.19.5", None),
        # Not run: by the source.
        (
            "0.18.4",
            "every weight becomes NaN in the first step with ZenFlow at stages 1 and 2, without an error (by the",
        ),
        ("0.18.2", None),
        (
            None,
            "ZenFlow at stages 1 and 2 transposes the model's matrices before training, without an error (tested with",
        ),
    ],
)
def test_the_installed_release_decides_else_the_newest_tested(
    release: str | None, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, deepspeed=release)
    wrong = [item for item in find(make_combination(ZENFLOW.split(",")), tmp_path) if item.kind == "conflict"]
    assert len(wrong) == (message is not None)
    if message is not None:
        assert wrong[0].message.startswith(message)
        assert wrong[0].message.endswith(f" DeepSpeed {release or '0.19.8'}, Accelerate 1.15.0)")


def test_the_runs_of_a_matrix_are_read_at_most_once_whatever_the_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They take ten times as long to read as a config to judge."""
    read, reads = Matrix.read, list[Path]()

    def count(file: Path) -> Matrix:
        reads.append(file)
        return read(file)

    monkeypatch.setattr(Matrix, "read", count)
    stored_evidence()
    reads.clear()
    combination = make_combination(ZENFLOW.split(","))
    (first,) = (item for item in find(combination, tmp_path) if item.kind == "conflict")
    assert "(tested with DeepSpeed" in first.message
    assert reads == []
    file = tmp_path / "plain.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}))
    for _ in range(2):
        assert main(["explain", "--world_size", "2", str(file), "gpt2"]) == 0
    capsys.readouterr()
    assert len(reads) <= 1


ZENFLOW = "zero2,cpu_adam,optimizer_cpu,zenflow"


def test_the_releases_of_a_run_precede_the_installed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, deepspeed="0.18.4")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(deepspeed_settings(make_combination(ZENFLOW.split(",")), tmp_path)))
    case = resolve(read_user_file(str(file)), model_shape("gpt2"), 2, ProgramSettings())
    run = dataclasses.replace(case, releases={"deepspeed": "0.19.8", "accelerate": None, "torch": "2.13.0"})
    titles = [[item.message.split(",")[0] for item in combination_findings(settings)] for settings in (case, run)]
    assert titles == [
        ["every weight becomes NaN in the first step with ZenFlow at stages 1 and 2"],
        ["ZenFlow at stages 1 and 2 transposes the model's matrices before training"],
    ]


@pytest.mark.parametrize(
    ("release", "stage", "details", "line"),
    [
        ("0.19.8", 3, False, None),
        # A larger equal run has all of these.
        ("0.19.8", 3, True, None),
        (
            "0.18.4",
            3,
            False,
            "these features are not tested together with deepspeed 0.18.4, torch 2.13.0+cpu;"
            " run: study verify --features zero3,bf16,accumulation,clipping",
        ),
        (
            "0.19.8",
            1,
            True,
            "each pair of these features is tested, and not all together;"
            " run: study verify --features zero1,cpu_adam,bf16,accumulation,clipping,optimizer_cpu",
        ),
        ("0.19.8", 1, False, None),
    ],
)
def test_a_combination_that_was_not_tested_has_one_line_with_the_command_that_tests_it(
    release: str,
    stage: int,
    details: bool,
    line: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(monkeypatch, deepspeed=release)
    file = tmp_path / "ds.json"
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if stage == 1 else {})},
    }
    file.write_text(json.dumps(settings))
    assert main(["explain", str(file), "gpt2", "--world_size", "2", *["--details"] * details]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("study verify --features") == (line is not None)
    assert line is None or line in printed
