"""`study explain`: names, defaults and statements about settings, against the engines' own classes."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import is_fsdp_enabled
from transformers.models.auto import modeling_auto

from engines import ROOT
from study.advisor import explain_findings, explain_releases
from study.advisor.explain_answers import find_answers
from study.advisor.explain_case import ACCUMULATION, MICRO_BATCH, ConfigCase, ProgramSettings, resolve
from study.advisor.explain_check import check_file, is_config
from study.advisor.explain_combinations import ENDS_WITH_ERROR, WRONG_ARGUMENT, WRONG_TRAINING
from study.advisor.explain_costs import bucket_bytes, costs
from study.advisor.explain_findings import findings
from study.advisor.explain_releases import read_stack, with_releases
from study.advisor.other_programs import OF_LIGHTNING
from study.advisor.user_settings import OFFLOADS, SECTIONS, ZERO, known_settings, read_user_file, section_entries
from study.cli import main
from study.compositions.answers import newest_tested_stack
from study.config.errors import UserError
from study.config.text import rounded_seconds
from study.predictor.communication import predict_payload
from study.predictor.constants import FITTED
from study.predictor.hardware import to_box
from study.predictor.intervals import NOT_KNOWN
from study.predictor.memory import predict_memory
from study.predictor.models import model_shape
from study.predictor.request import Request
from study.predictor.state import persistent_params, predict_state, sub_groups
from study.predictor.time import predict_time
from study.releases.causes import least_sound_release, unsound_releases

KNOWN = known_settings()
EXPERTS = {name for _, _, _, _, *names in (*KNOWN["rules"], *KNOWN["requests"]) for name in names} - {WRONG_TRAINING}
PLAIN: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, ZERO: {"stage": 3}}
CPU = {"device": "cpu"}
LLAMA_8B = "layers=32,hidden=4096,heads=32,vocabulary=128256,inner=14336,key_value_heads=8"
REPLICAS = {"parallelism_config": {"parallelism_config_dp_replicate_size": 4, "parallelism_config_dp_shard_size": 8}}


def make_case(folder: Path, document: Any, model: str = "gpt2", ranks: int = 4, **program: Any) -> ConfigCase:
    # JSON is YAML.
    text = document if isinstance(document, str) else json.dumps(document)
    file = folder / ("user.yaml" if "distributed_type" in text else "user.json")
    # The file system writes a file that is replaced to the disk at once: a millisecond of each of a thousand cases.
    file.unlink(missing_ok=True)
    file.write_text(text)
    return resolve(read_user_file(str(file)), model_shape(model), ranks, ProgramSettings(**program))


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {**PLAIN, ZERO: {"stage": stage, **settings}}


def fsdp(**settings: Any) -> dict[str, Any]:
    wrapped = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **settings}
    return {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4, "fsdp_config": wrapped}


def name_findings(case: ConfigCase) -> dict[str, str]:
    """Return the findings without what test_what_an_expert_says checks."""
    others = [item for item in findings(case) if item.rule not in EXPERTS]
    return {f"{item.kind} {item.key.removeprefix(f'{ZERO}.')}": item.says for item in others}


def test_boundaries_of_thresholds_buckets_saving_and_sub_groups(tmp_path: Path) -> None:
    at, below = (make_case(tmp_path, zero(3, stage3_param_persistence_threshold=size)) for size in (768, 767))
    assert persistent_elements(at) > persistent_elements(below)
    # With overlap, stages 1 and 2 have a second bucket.
    for stage, settings, size in (
        (2, {"overlap_comm": False}, 1e9),
        (2, {"overlap_comm": True}, 2e9),
        (3, {"overlap_comm": True}, 1e9),
        (2, {"contiguous_gradients": False}, 0),
    ):
        assert bucket_bytes(make_case(tmp_path, zero(stage, **settings))) == size
    for gathers in (False, True):
        settings = zero(3, offload_optimizer=CPU, stage3_gather_16bit_weights_on_model_save=gathers)
        case = make_case(tmp_path, settings, LLAMA_8B, 8)
        assert case.memory.host_peak.value - case.memory.host_parts["train"] == case.shape.parameters * 2 * gathers
    # A ratio moves whole sub-groups.
    half = {"device": "cpu", "ratio": 0.5}
    single, many = (make_case(tmp_path, zero(3, offload_optimizer=half, sub_group_size=n)) for n in (10**9, 5_000_000))
    count = len(sub_groups(many.request))
    for case, stay in ((single, "0 of a rank's 1 "), (many, f"{count // 2} of a rank's {count} ")):
        assert [stay in cost.says for cost in costs(case) if cost.key.endswith("offload_optimizer.ratio")] == [True]


def test_the_peak_of_a_file_has_bound_and_moment_of_the_same_request(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for words in (
        ["explain", str(ROOT / "accelerate_configs/deepspeed/zero2.json")],
        ["predict", "--strategy", "zero2"],
    ):
        main([*words, "gpt2-xl", "--hardware", "8xH100", "--precision", "bf16"])
        printed.append(capsys.readouterr().out)
    line = r"^peak memory of a rank, (\S+) GiB \(90 % bound (\S+)\), ([^:]+): "
    ((peak, bound, moment),) = re.findall(line, printed[0], re.MULTILINE)
    assert f"Fits: {peak} of 78.8 GiB (90 % bound {bound})" in printed[1]
    assert f"memory of one GPU at its peak, {moment}, GiB" in printed[1]
    assert float(bound) > float(peak)


def persistent_elements(case: ConfigCase) -> int:
    return sum(param.elements for param in persistent_params(case.request))


def test_every_zero_setting_of_the_engine_is_listed_with_its_default() -> None:
    from deepspeed.runtime.zero import config, offload_config

    for section, engine in (
        (ZERO, config.DeepSpeedZeroConfig),
        (f"{ZERO}.offload_optimizer", offload_config.DeepSpeedZeroOffloadOptimizerConfig),
        (f"{ZERO}.offload_param", offload_config.DeepSpeedZeroOffloadParamConfig),
    ):
        fields = {field.alias or name: field for name, field in engine.model_fields.items()}
        assert KNOWN[section].keys() == fields.keys()
        for name, entry in KNOWN[section].items():
            if name != "leaf_module" and "is_now" not in entry:
                assert entry["default"] == fields[name].default, name


def test_every_key_that_the_engine_reads_is_listed() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    requested: set[str] = set()

    def watched(name: str) -> Any:
        def read(self: Any, key: str, *default: Any) -> Any:
            requested.add(key)
            return getattr(dict, name)(self, key, *default)

        return read

    reads = {name: watched(name) for name in ("get", "__contains__", "__getitem__")}
    # The engine reads some keys with `in param_dict.keys()`, and copies the rest.
    copies = {"keys": lambda self: self, "__copy__": lambda self: type(self)(self)}
    DeepSpeedConfig(type("Watched", (dict,), reads | copies)({"train_micro_batch_size_per_gpu": 1}))
    assert {"zero_optimization", "aio", "bf16", "optimizer"} < requested
    assert requested <= {*KNOWN["top"], *KNOWN["others"], *KNOWN["removed"]}


def test_the_keys_of_accelerate_and_the_optimizers_are_listed() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    # Accelerate converts two keys of an older form.
    assert set(KNOWN["accelerate"]) == {*ClusterConfig.__dataclass_fields__, "dynamo_backend", "fp16"}
    flags = {action.dest for action in launch_command_parser()._actions if action.dest.startswith("fsdp_")}
    assert set(KNOWN["fsdp"]) == flags | {"fsdp_ignored_modules"}
    assert set(KNOWN["optimizers"]["engine"]) == set(DEEPSPEED_OPTIMIZERS)
    torchs = {name for name, member in vars(torch.optim).items() if inspect.isclass(member)} - {"Optimizer"}
    assert set(KNOWN["optimizers"]["torch"]) == torchs


def test_the_arguments_of_optimizers_and_schedulers_are_those_of_their_classes() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime import lr_schedules

    def arguments(*classes: type) -> dict[str, str | None]:
        parameters = [item for kind in classes for item in list(inspect.signature(kind).parameters.values())[1:]]
        return {item.name: "required" if item.default is item.empty else None for item in parameters}

    optimizers, schedulers = KNOWN["arguments"]["optimizer"], KNOWN["arguments"]["scheduler"]
    adam = arguments(FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW)
    # The engine sets adamw_mode, and takes torch_adam out.
    assert {**adam, "torch_adam": None} == {**optimizers["adamw"], "adamw_mode": None}
    # The engine rejects max_grad_norm for every optimizer.
    assert arguments(FusedLamb) == {**optimizers["lamb"], "max_grad_norm": None}
    assert arguments(FusedLion, DeepSpeedCPULion) == optimizers["lion"]
    assert {name: arguments(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES} == schedulers


VALUED: dict[str, tuple[Any, ...]] = {
    "lr": (1, 0, 1e-3, True, "2e-5", -1, None, [1e-3]),
    "eps": (0, 1e-8, "1e-8", -1),
    "weight_decay": (0, 0.1, "0", -1),
    "betas": ([0.9, 0.95], [0.0, 0.0], 0.9, [0.9], [0.9, 1.999], [0.9, 1.0], [-0.1, 0.9], ["0.9", 0.9]),
    "warmup_min_lr": (0, 1e-5, "0"),
    "warmup_max_lr": (1e-3, "1e-3"),
    "warmup_num_steps": (1, 10, 0, -1, 10.5, "10"),
    "total_num_steps": (100, "100"),
}


@pytest.mark.parametrize("argument", VALUED)
def test_a_value_of_an_argument_is_in_conflict_if_no_step_succeeds_with_it(argument: str, tmp_path: Path) -> None:
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    is_scheduler = argument.endswith(("lr", "steps")) and argument != "lr"
    for value in VALUED[argument]:
        arguments: dict[str, Any] = {}
        schedule: dict[str, Any] = {"total_num_steps": 1000}
        (schedule if is_scheduler else arguments)[argument] = value
        error: Exception | None = None
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        try:
            optimizer = torch.optim.AdamW([weight], **arguments)
            scheduler = WarmupDecayLR(optimizer, **schedule)
            for _ in range(3):
                optimizer.step()
                scheduler.step()
        except (IndexError, TypeError, ValueError) as raised:
            error = raised
        document = {**PLAIN, "optimizer": {"type": "AdamW", "params": arguments}}
        case = make_case(tmp_path, {**document, "scheduler": {"type": "WarmupDecayLR", "params": schedule}})
        wrong = [item.key.rpartition(".")[2] for item in findings(case) if item.rule == "wrong-argument"]
        assert wrong == [argument] * (error is not None), (value, error)


@pytest.mark.parametrize("key", KNOWN["set_in_json"])
def test_keys_that_accelerate_rejects_next_to_a_deepspeed_file_are_refused(key, tmp_path, monkeypatch):
    from accelerate import DeepSpeedPlugin

    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", f"deepspeed_config_file,{key}")
    with pytest.raises(ValueError, match="will be ignored"):
        DeepSpeedPlugin(hf_ds_config=dict(PLAIN))
    (tmp_path / "inner.json").write_text(json.dumps(PLAIN))
    section: dict[str, Any] = {"deepspeed_config_file": str(tmp_path / "inner.json")}
    top: dict[str, Any] = {"distributed_type": "DEEPSPEED", "num_processes": 4}
    (top if key == "mixed_precision" else section)[key] = "bf16" if key == "mixed_precision" else 1
    assert f"refused {key}" in name_findings(make_case(tmp_path, {**top, "deepspeed_config": section}))


# Values of every type, as JSON may have them.
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, 3, -1, 0.5, 2.5, 1e9, "auto", "cpu", "1", "False", "1.0", " 2 ", "1e9", "nan", "", [],
    ["a"], [1], {}, "BF16", "sum", "warn",
)  # fmt: skip
# The program or another library fills it in; it depends on the machine; the engine, not its reader, raises.
BY_OTHERS = {"train_batch_size", MICRO_BATCH, ACCUMULATION, "use_gds", "sequence_parallel_size"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["top", *SECTIONS, *KNOWN["strict_sections"], *KNOWN["sections"]])
def test_explain_refuses_the_values_and_keys_that_deepspeed_refuses(place: str, tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    entries = KNOWN["strict_sections"].get(place) or KNOWN["sections"].get(place) or KNOWN[place]
    for key, value in itertools.product([*entries, "nonsense"], VALUES):
        if key in BY_OTHERS:
            continue
        document: dict[str, Any] = {MICRO_BATCH: 1, ZERO: {"stage": 3}, "optimizer": {"type": "AdamW"}}
        section = document
        for part in place.split(".") if place != "top" else ():
            section = section.setdefault(part, {})
        section[key] = value
        error: Exception | None = None
        try:
            DeepSpeedConfig(json.loads(json.dumps(document)))
        except Exception as raised:
            error = raised
        later = {"optimizer.type", f"{ZERO}.compute_grad_norm", f"{ZERO}.legacy_stage1"}
        later |= {f"{kind}.{kind}_master_weights_and_grads" for kind in ("bf16", "fp16")}
        later |= {f"{ZERO}.{what}.nvme_path" for what in OFFLOADS} | {f"{ZERO}.offload_param.buffer_size"}
        case = make_case(tmp_path, document, "gpt-tiny", 1)
        refusals = [
            finding.text
            for finding in findings(case)
            if finding.kind == "refused"
            and finding.rule != WRONG_ARGUMENT
            and (finding.key not in later or error is not None)
        ]
        assert bool(refusals) == (error is not None), (key, value, error, refusals)


@pytest.mark.parametrize("key", sorted(KNOWN["removed"]))
def test_a_removed_setting_is_named_with_its_release_and_what_stands_in_its_place(key: str, tmp_path: Path) -> None:
    from deepspeed.runtime import config

    engines = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS, *(f"{ZERO}.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS)}
    assert engines == {name for name in KNOWN["removed"] if not name.startswith(("onebit", "zeroone"))}
    document = zero(3, **{key.removeprefix(f"{ZERO}."): 1}) if key.startswith(ZERO) else {**PLAIN, key: {}}
    document = document if key in engines else {**PLAIN, "optimizer": {"type": key.upper()}}
    (removed,) = [finding for finding in findings(make_case(tmp_path, document)) if finding.kind == "refused"]
    assert re.match(r"DeepSpeed 0\.19\.[78] removed it", removed.message)
    assert removed.fix


@pytest.mark.parametrize(
    ("name", "stage", "fix"),
    [
        ("OneBitAdam", 0, "set AdamW"),
        ("OneBitAdam", 2, "set AdamW"),
        ("ZeroOneAdam", 3, "set AdamW, with zero_quantized_gradients for less communication"),
        ("OneBitLamb", 0, "set Lamb"),
        ("OneBitLamb", 1, "set AdamW, or Lamb at stage 0"),
    ],
)
def test_a_1_bit_optimizer_has_a_remedy_that_its_stage_has_and_no_release_with_zero(name, stage, fix, tmp_path) -> None:
    case = make_case(tmp_path, zero(stage) | {"optimizer": {"type": name}})
    (gone,) = [finding for finding in findings(case) if finding.key == "optimizer.type"]
    assert (gone.kind, gone.fix) == ("refused", fix)
    assert ("no 1-bit optimizer runs with ZeRO" in gone.message) == (stage > 0)
    assert "saves no memory" in gone.message
    # A release with it ends with an error at stages 1 to 3.
    older = [it for it in findings(with_releases(case, {"deepspeed": "0.16.9"})) if it.key == "optimizer.type"]
    assert [finding.kind for finding in older] == ["refused" if stage else "noted"]
    if stage:
        assert older[0].message.startswith("releases before 0.19.7 end with an AssertionError")


@pytest.mark.parametrize(("scale", "stage"), [(65536, 2), (1, 3), (128.0, 0), (0, 2), (None, 3)])
def test_a_static_loss_scale_is_named_and_a_dynamic_one_is_not(scale: float | None, stage: int, tmp_path: Path) -> None:
    document = {**zero(stage), "bf16": {"enabled": False}, "fp16": {"enabled": True}}
    if scale is not None:
        document["fp16"]["loss_scale"] = scale
    notes = [finding for finding in findings(make_case(tmp_path, document)) if finding.rule == "static-loss-scale"]
    assert [(note.kind, note.key) for note in notes] == [("noted", "fp16.loss_scale")] * bool(scale)
    assert all("nothing lowers it" in note.message and note.fix.startswith("set 0") for note in notes)
    # Without fp16 it scales nothing.
    document |= {"bf16": {"enabled": True}, "fp16": {**document["fp16"], "enabled": False}}
    assert "static-loss-scale" not in {finding.rule for finding in findings(make_case(tmp_path, document))}


def test_findings_hold_for_the_releases_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes named spans of releases before."""
    file = tmp_path / "program.json"
    file.write_text(json.dumps({**zero(1), "gradient_accumulation_steps": 4, "amp": {"enabled": False}}))

    def explain(*words: str) -> tuple[int, dict[str, str], dict[str, Any]]:
        status = main(["explain", str(file), "gpt2", "--world_size", "4", "--json", *words])
        document = json.loads(capsys.readouterr().out)
        return status, {item["id"]: item["message"] for item in document["findings"]}, document["releases"]

    status, by_default, releases = explain()
    assert status == 1
    assert releases == {"assumed": read_stack(make_case(tmp_path, zero(1))), "stated": {}}
    assert f"releases {unsound_releases('zero1', 4, 'bf16-engine')} compute wrong" in by_default["noted/releases"]
    # A release with a fault, and with a setting that a later one removed.
    status, faulty, releases = explain("--release", "deepspeed=0.16.9,accelerate=1.10")
    assert (status, releases["stated"]) == (0, {"deepspeed": "0.16.9", "accelerate": "1.10.0"})
    assert faulty["conflict/wrong-training"].endswith("not divided (study releases 0.16.9 zero1)")
    assert faulty["noted/removed"].startswith("DeepSpeed 0.16.9 has it, and 0.19.8 and later end with an error")
    assert not {"noted/releases", "refused/removed"} & faulty.keys()
    # A release without a fault: neither a conflict nor a note.
    sound = explain("--release", f"deepspeed={least_sound_release('zero1', 4, 'bf16-engine')}")[1]
    assert not any("wrong" in message for message in sound.values())
    # The check of files, too.
    assert main(["explain", "--strict", str(file), "--release", "deepspeed=0.16.9"]) == 3
    assert "conflict: deepspeed: 0.16.9 computes wrong gradients with these settings" in capsys.readouterr().out
    # A page names them, with their origins.
    monkeypatch.setattr(explain_releases, "_find_releases", lambda find: {"accelerate": "1.14.0"})
    main(["explain", str(file), "gpt2", "--world_size", "4", "--release", "deepspeed==0.17.5"])
    line = "findings hold for DeepSpeed 0.17.5 (--release), Accelerate 1.14.0 (installed), torch"
    assert f"\n{line} {newest_tested_stack()['torch']} (newest tested)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0.17.5", "'0.17.5' is not the release of deepspeed, accelerate, torch, transformers or trl"),
        ("peft=0.18.0", "'peft=0.18.0' is not the release"),
        ("deepspeed=new", "write them as deepspeed=0.17.5,accelerate=1.10"),
        ("torch=2.8,torch=2.9", "torch has two releases"),
    ],
)
def test_a_release_that_is_none_is_refused_with_the_form(
    text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "ds.json", "gpt2", "--release", text]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "name", "says"),
    [
        ({MICRO_BATCH: 1, ZERO: {"stage": 2}}, "no-precision", "32 bits"),
        (zero(3), "no-weights-saved", "Accelerate's save_model and get_state_dict end with an error"),
        (zero(3), "no-weights-saved", "zero_to_fp32.py joins"),
        ({**PLAIN, MICRO_BATCH: "auto"}, "auto-batch", "deepspeed.initialize alone ends with an error"),
        ({**PLAIN, MICRO_BATCH: None, "train_batch_size": "auto"}, "auto-batch", "deepspeed.initialize alone"),
        (zero(2), "default-changed", "1.0 by default since DeepSpeed 0.19.3"),
        ({**PLAIN, "gradient_clipping": 0.5}, "default-changed", "before clipping"),
        ({**PLAIN, "gradient_clipping": "auto"}, "auto-value", "deepspeed.initialize alone ends with an error"),
        ({**PLAIN, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "auto-value", "the Trainer fills it in"),
        (zero(2, offload_optimizer=CPU), "default-changed", "since DeepSpeed 0.19.5"),
    ],
)
def test_what_an_expert_says(document: dict[str, Any], name: str, says: str, tmp_path: Path) -> None:
    assert any(finding.rule == name and says in finding.says for finding in findings(make_case(tmp_path, document)))
    good = {**zero(3, stage3_gather_16bit_weights_on_model_save=True, overlap_comm=False), "gradient_clipping": 0}
    good["bf16"] = {"enabled": True, "check_grad_overflow": False}
    assert {finding.rule for finding in findings(make_case(tmp_path, good))} & EXPERTS == {"resume"}


def test_fsdp_with_accumulation_says_how_large_its_whole_gradients_are(tmp_path: Path) -> None:
    accumulated, plain = (
        make_case(tmp_path, fsdp(fsdp_version=2), LLAMA_8B, 8, accumulation=steps) for steps in (4, 1)
    )
    (note,) = [finding for finding in findings(accumulated) if finding.rule == "whole-gradients"]
    # 8.03 B gradients of 2 bytes.
    assert "the gradients stay whole, 15.0 GiB a rank" in note.says
    assert "whole-gradients" not in {finding.rule for finding in findings(plain)}


@pytest.mark.parametrize(
    ("document", "program", "rule", "says"),
    [
        # 8.03 B gradients of 2 bytes; in the second case reduced ones of 4 bytes over 8 ranks.
        (fsdp(fsdp_version=2), {"accumulation": 4}, "replica-gradients", None),
        (
            {**fsdp(fsdp_version=2), "num_processes": 32, **REPLICAS},
            {"accumulation": 4},
            "replica-gradients",
            "15.0 GiB a rank become 3.74 GiB",
        ),
        ({**fsdp(fsdp_version=2), "num_processes": 32, **REPLICAS}, {}, "replica-gradients", None),
    ],
)
def test_a_program_s_finding_is_there_if_it_applies(document, program, rule, says, tmp_path: Path) -> None:
    found = [item for item in findings(make_case(tmp_path, document, LLAMA_8B, 32, **program)) if item.rule == rule]
    assert [says in item.says for item in found] == [True] * (says is not None)


@pytest.mark.parametrize("entry", yaml.safe_load((ROOT / "tests/data/explain_findings.yaml").read_text()))
def test_a_file_has_these_findings_and_no_others(entry: dict[str, Any], tmp_path: Path) -> None:
    document: Any = entry.get("file")
    if "plain" in entry:
        document = PLAIN | entry["plain"]
    elif document is None:
        document = fsdp(**entry.get("fsdp", {"fsdp_version": 2}))
        if "mesh" in entry:
            sizes = {f"parallelism_config_{key}_size": size for key, size in entry["mesh"].items()}
            document["parallelism_config"] = sizes
    model, ranks = entry.get("model", "gpt2"), entry.get("ranks", 4)
    case = make_case(tmp_path, document, model, ranks)
    assert sorted(name_findings(case)) == sorted(entry["finds"])
    assert entry.get("says", "") in " ".join(name_findings(case).values())
    peak = predict_memory(case.request).peak_allocated.value
    assert peak > 0
    if "fsdp" in entry:
        ddp = make_case(tmp_path, {**document, "distributed_type": "MULTI_GPU", "fsdp_config": {}}, model, ranks)
        as_much = peak == predict_memory(ddp.request).peak_allocated.value
        assert as_much == (entry["fsdp"] == {"fsdp_sharding_strategy": "NO_SHARD"})


def test_fsdp_has_its_offload_in_host_memory(tmp_path) -> None:
    plain, offloaded = (make_case(tmp_path, fsdp(fsdp_version=2, fsdp_offload_params=value)) for value in (False, True))
    assert offloaded.state.device == plain.state.host == 0
    assert offloaded.state.host == plain.state.device
    memories = [predict_memory(case.request) for case in (plain, offloaded)]
    state = sum(memories[0].device_parts[part] for part in ("parameters", "optimizer"))
    assert memories[0].peak_allocated.value - memories[1].peak_allocated.value == pytest.approx(state, rel=0.01)
    assert memories[1].host_peak.value > memories[0].host_parts["train"] + state


def test_each_rank_loads_all_weights_whatever_cpu_ram_efficient_loading_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 4 leaves out the ranks of a machine other than the first."""
    files = fsdp(fsdp_version=2), fsdp(fsdp_version=2, fsdp_cpu_ram_efficient_loading=False)
    requests = [make_case(tmp_path, file).request for file in files]
    assert requests[0] == requests[1]
    loads = [
        predict_memory(dataclasses.replace(requests[0], reference_model=is_added)).host_parts["load"]
        for is_added in (False, True)
    ]
    assert loads[1] - loads[0] == 4 * 4 * requests[0].shape.parameters
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    saved = LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path / "model")
    for name, value in (
        ("ACCELERATE_USE_FSDP", "true"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
        ("LOCAL_RANK", "1"),
    ):
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert is_fsdp_enabled()
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    finally:
        torch.distributed.destroy_process_group()
    for name, weight in saved.state_dict().items():
        assert torch.equal(loaded[name], weight), name


def test_a_file_of_fsdp_keeps_weights_gathered_recomputes_and_shards_over_a_machine(tmp_path: Path) -> None:
    def request(**settings: Any) -> Request:
        return make_case(tmp_path, fsdp(**settings), LLAMA_8B, 16).request

    names = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    full, grad_op, hybrid, hybrid_grad_op = (request(fsdp_sharding_strategy=name) for name in names)
    not_resharded, resharded = (request(fsdp_version="2", fsdp_reshard_after_forward=value) for value in (False, True))
    assert request(fsdp_activation_checkpointing="yes") == dataclasses.replace(full, gradient_checkpointing=True)
    assert (full.fsdp_version, resharded.fsdp_version) == (1, 2)
    for gathered, freed in ((grad_op, full), (not_resharded, resharded), (hybrid_grad_op, hybrid)):
        assert gathered == dataclasses.replace(freed, fsdp_keeps_gathered=True)
    assert predict_state(hybrid).device == pytest.approx(2 * predict_state(full).device, rel=1e-4)
    # Its second machine adds an all-reduce of shards.
    assert predict_payload(hybrid)["all_reduce"] == pytest.approx(2 * full.shape.parameters / 8, rel=1e-3)
    more = predict_memory(grad_op).peak_allocated.value - predict_memory(full).peak_allocated.value
    assert 0.5 * 2 * full.shape.parameters < more < 2 * full.shape.parameters
    # Version 1 gathers the weights that it keeps once per step, version 2 in each micro-batch.
    for gathered, times in ((grad_op, 1), (not_resharded, 4)):
        sent = predict_payload(dataclasses.replace(gathered, accumulation=4))["all_gather"]
        assert sent == pytest.approx(2 * times * full.shape.parameters, rel=1e-3)


@pytest.mark.parametrize("most", [0, 250_000_000, 10**9])
def test_weights_stay_in_host_memory_up_to_max_in_cpu_by_sub_groups(most: int, tmp_path: Path) -> None:
    """The engine counts whole sub-groups of a rank (stage3.py, _create_fp16_partitions_with_defragmentation)."""
    section = {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": most}
    case = make_case(tmp_path, zero(3, offload_param=section, sub_group_size=100_000_000), LLAMA_8B, 8)
    groups = list(itertools.accumulate(sub_groups(case.request)))
    in_memory = max([size for size in groups if size <= most], default=0)
    # Shards under 1 MiB, those of norms, are never swapped.
    swapped = (groups[-1] - in_memory) * 2
    assert case.state.params_nvme <= swapped
    assert case.state.params_nvme == pytest.approx(swapped, rel=0.001)


@pytest.mark.parametrize("name", ["zero2_cpu", "zero3_cpu_optimizer", "zero3_cpu", "zero3_nvme", "zero3"])
def test_an_optimizer_with_an_offload_is_refused_by_the_engine_and_replaced_by_accelerate(name, capsys):
    """_configure_optimizer in DeepSpeed's engine.py, and map_pytorch_optim_to_deepspeed in Accelerate."""
    is_offloaded = name != "zero3"
    for file, status, says in ((f"{name}.yaml", 0, "replace it"), (f"deepspeed/{name}.json", 1, "refuses adamw_8bit")):
        command = ["explain", str(ROOT / f"accelerate_configs/{file}"), "gpt2-xl", "--world_size", "2", "--json"]
        assert main([*command, "--optimizer", "adamw_8bit"]) == (status if is_offloaded else 0)
        page = capsys.readouterr().out
        assert (says in page) == is_offloaded
        # In Accelerate's hands it is Adam, with eight bytes.
        assert main(command) == 0
        plain = json.loads(capsys.readouterr().out)["memory"]
        assert (json.loads(page)["memory"] == plain) == (is_offloaded and status == 0)
    flags = ["--strategy", name, "--model_name_or_path", "gpt2-xl", "--hardware", "2xA100", "--optimizer", "adamw_8bit"]
    assert main(["predict", *flags]) == 2 * is_offloaded
    assert ("use --optimizer adamw" in capsys.readouterr().err) == is_offloaded


def test_explain_counts_adapters_and_says_that_an_offload_is_not_needed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", str(ROOT / "accelerate_configs/zero3_cpu.yaml"), LLAMA_8B, "--hardware", "8xH100", "--json"]
    documents = []
    for flags in ((), ("--peft", "lora")):
        main([*command, "--world_size", "8", "--precision", "bf16", *flags])
        documents.append(json.loads(capsys.readouterr().out))
        assert any("not-needed" in finding["id"] for finding in documents[-1]["findings"])
    full, lora = documents
    assert lora["trained_parameters"] < full["trained_parameters"] / 100
    assert lora["memory"]["host_parts"]["state"] < full["memory"]["host_parts"]["state"] / 3


def test_plain_training_counts_fp32_weights_and_says_what_a_bf16_checkpoint_needs(tmp_path: Path, capsys) -> None:
    plain = {"distributed_type": "MULTI_GPU", "num_processes": 8}
    for model in ("qwen2.5-1.5b", "llama-3.1-8b"):
        main(["predict", model, "--strategy", "ddp", "--pure_bf16", "--hardware", "8xH100", "--details"])
        page = capsys.readouterr().out
        peak = re.search(r"([0-9.]+) of 78.8 GiB", page)
        host = re.search(r"host memory of one node +([0-9.]+) GiB", page)
        assert peak is not None
        assert host is not None
        for document in (plain, plain | {"mixed_precision": "bf16"}):
            (tmp_path / "user.yaml").write_text(json.dumps(document))
            main(["explain", str(tmp_path / "user.yaml"), model, "--hardware", "8xH100"])
            words = r"noted +weights: counted in fp32; .* a peak of ([0-9.]+) GiB, and host memory of ([0-9.]+) and not"
            message = re.search(words, capsys.readouterr().out)
            assert message is not None
            assert (message[1], message[2]) == (peak[1], host[1])
    # DeepSpeed has its own type, adapters have frozen 16-bit weights, and fp16 needs fp32 weights.
    in_bf16 = zero(0, bf16={"enabled": True})
    for document in (in_bf16, plain | {"mixed_precision": "fp16"}, fsdp(fsdp_version=2)):
        case = make_case(tmp_path, document, "llama-3.1-8b")
        assert "fp32-weights" not in {finding.rule for finding in findings(case)}
    (tmp_path / "user.yaml").write_text(json.dumps(plain | {"mixed_precision": "bf16"}))
    main(["explain", str(tmp_path / "user.yaml"), "llama-3.1-8b", "--peft", "lora", "--hardware", "8xH100"])
    assert "counted in fp32" not in capsys.readouterr().out
    assert "fp32-weights" not in {finding.rule for finding in findings(make_case(tmp_path, plain, "gpt2"))}


def test_without_bf16_a_model_that_overflows_in_fp16_has_one_choice_and_no_circle(tmp_path: Path, capsys) -> None:
    """The file in bf16 and the one in fp16 end with the same words: fp32, or fp16 with its risk and its speed."""

    step_s: dict[str, float] = {}

    def explain_choice(precision: str, model: str, box: str) -> str:
        (tmp_path / "user.yaml").write_text(json.dumps({"distributed_type": "NO", "mixed_precision": precision}))
        main(["explain", str(tmp_path / "user.yaml"), model, "--hardware", box, "--gradient_checkpointing", "--json"])
        rules = ("no-units", "trained-in-bf16", "reported-nan")
        document = json.loads(capsys.readouterr().out)
        step_s[precision] = document["answers"][0]["figures"]["compute"]
        listed = [finding for finding in document["findings"] if finding["id"].partition("/")[2] in rules]
        return "".join(f"{finding['message']}; {finding['fix']}" for finding in listed)

    choice = re.compile(r"use fp32; or fp16, ([0-9.]+) times as fast, if its loss scale stays above the minimum$")
    for precision in ("no", "fp16"):
        explain_choice(precision, "gemma-2-9b", "T4")
    factor = step_s["no"] / step_s["fp16"]
    for precision in ("bf16", "fp16"):
        words = choice.search(explain_choice(precision, "gemma-2-9b", "T4"))
        assert words is not None
        assert float(words[1]) == pytest.approx(factor, rel=0.01)
    assert explain_choice("fp16", "gemma-2-9b", "A100").endswith("skipped; set bf16")
    # Qwen2 is reported, not certain.
    reported = explain_choice("fp16", "qwen2.5-7b", "T4")
    assert reported.startswith("reported, not certain")
    # The faster one is first where nothing is certain.
    first = re.search(r"use fp16, ([0-9.]+) times as fast as fp32, while its losses are numbers; else fp32$", reported)
    explain_choice("no", "qwen2.5-7b", "T4")
    assert first is not None
    assert float(first[1]) == pytest.approx(step_s["no"] / step_s["fp16"], rel=0.01)
    assert explain_choice("bf16", "qwen2.5-7b", "T4").endswith("use fp16, or fp32")
    assert not explain_choice("fp16", "llama-3.1-8b", "T4")


@pytest.mark.parametrize(
    ("mixed_precision", "flag", "is_refused"),
    [
        ("bf16", "fp32", True),
        ("bf16", "no", True),
        ("bf16", "fp16", True),
        ("fp8", "fp16", True),
        ("fp8", "bf16", False),
        ("bf16", "bf16", False),
        # Accelerator(mixed_precision=...) of the program replaces it.
        ("no", "fp16", False),
        (None, "fp16", False),
    ],
)
def test_a_precision_that_contradicts_the_file_is_refused(
    mixed_precision: str | None, flag: str, is_refused: bool, tmp_path: Path, capsys
) -> None:
    for document in ({"distributed_type": "NO"}, {"distributed_type": "DEEPSPEED", "deepspeed_config": {}}):
        settings = {} if mixed_precision is None else {"mixed_precision": mixed_precision}
        (tmp_path / "user.yaml").write_text(json.dumps(document | settings | {"num_processes": 1}))
        status = main(["explain", str(tmp_path / "user.yaml"), "gpt2", "--precision", flag])
        error = f"user.yaml sets mixed_precision: {mixed_precision}, and --precision is {flag.replace('no', 'fp32')}"
        assert (status == 2, error in capsys.readouterr().err) == (is_refused, is_refused)


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_without_mixed_precision_keeps_the_type_of_a_bf16_checkpoint(version: int, tmp_path: Path, capsys) -> None:
    """Accelerate makes trained weights fp32 in mixed precision alone."""
    words = ["llama-3.1-8b", "--hardware", "8xH100"]
    main(["predict", *words, "--strategy", "fsdp2", "--pure_bf16", "--fsdp_version", str(version)])
    peak = re.search(r"([0-9.]+) of 78.8 GiB", capsys.readouterr().out)
    assert peak is not None
    for precision, is_said in (("no", True), ("bf16", False)):
        document = fsdp(fsdp_version=version, fsdp_reshard_after_forward=True) | {"mixed_precision": precision}
        (tmp_path / "user.yaml").write_text(json.dumps(document | {"num_processes": 8}))
        main(["explain", str(tmp_path / "user.yaml"), *words])
        page = capsys.readouterr().out
        assert (f"without fp32 masters, a peak of {peak[1]} GiB" in page) == is_said


def test_settings_with_the_same_finding_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = {"lr": "auto", "betas": "auto", "eps": "auto"}
    document = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": params}}
    (tmp_path / "user.json").write_text(json.dumps(document))
    main(["explain", str(tmp_path / "user.json"), "gpt2", "--world_size", "1"])
    page = capsys.readouterr().out
    keys = ", ".join(f"optimizer.params.{name}" for name in params)
    assert f"noted  {keys}: auto: the Trainer fills it in" in page
    assert page.count("the Trainer fills it in") == 1
    assert "6 settings noted" in page


@pytest.mark.parametrize(("key", "kind"), [("peft_type", "adapters"), ("model_type", "a model")])
def test_the_config_of_a_model_is_not_read_as_a_file_of_deepspeed(key: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"is the config of {kind}, not of an engine"):
        make_case(tmp_path, {key: "llama"})


TRAINER = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 1, "bf16": True}


@pytest.mark.parametrize(
    ("document", "fix"),
    [
        (TRAINER | {"deepspeed": "ds.json"}, "explain the file that it names: ds.json"),
        (TRAINER | {"deepspeed": {"zero_optimization": {"stage": 3}}}, "with its section deepspeed alone"),
        (TRAINER | {"fsdp": "full_shard auto_wrap"}, "an Accelerate YAML with distributed_type: FSDP"),
        ({"base_model": "gpt2", "fsdp_config": {"fsdp_version": 2}}, "an Accelerate YAML with distributed_type: FSDP"),
        (TRAINER, "study predict MODEL --strategy ddp"),
    ],
)
def test_a_trainer_s_file_is_not_read_as_one_of_deepspeed(document: dict[str, Any], fix: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is the file of a trainer, not of an engine") as refusal:
        make_case(tmp_path, document)
    assert fix in refusal.value.fix


def test_a_distributed_type_has_the_meaning_of_the_launcher(tmp_path: Path) -> None:
    from accelerate.utils import DistributedType

    alone: dict[str, Any] = {"distributed_type": "NO", "num_processes": 4}
    case = make_case(tmp_path, alone, ranks=1)
    assert (case.ranks, list(name_findings(case))) == (1, ["ignored num_processes"])
    with pytest.raises(UserError, match="starts one process, and --world_size is 4"):
        make_case(tmp_path, alone, ranks=4)
    plain = predict_memory(make_case(tmp_path, {"distributed_type": "MULTI_GPU"}).request)
    for kind in sorted(set(DistributedType.__members__) - {"NO", "DEEPSPEED", "FSDP"}):
        document = {"distributed_type": kind}
        if kind in ("XLA", "MEGATRON_LM"):
            with pytest.raises(UserError, match="which is not modelled"):
                make_case(tmp_path, document)
        else:
            assert predict_memory(make_case(tmp_path, document).request) == plain


PROBES = json.loads((ROOT / "reports/engine_keys/keys.json").read_text())["probes"]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe["name"])
def test_explain_matches_the_measured_settings(probe: dict[str, Any], tmp_path: Path) -> None:
    # The program causes these errors, not the config file.
    program_errors = {
        "zero_allow_untested_optimizer false": "noted zero_allow_untested_optimizer",
        "the guide's settings and AdamW": "noted zero_force_ds_cpu_optimizer",
    }
    case = make_case(tmp_path, probe["given"])
    names, by_the_file = name_findings(case), probe["name"] not in program_errors
    is_refused = bool(probe["error"]) and by_the_file and not probe["name"].startswith("pipeline")
    assert any(finding.startswith("refused") for finding in names) == is_refused
    assert by_the_file or program_errors[probe["name"]] in names
    for setting, expected in () if is_refused else probe["says"].items():
        if setting in ("bf16_enabled", "fp16_enabled"):
            assert case.request.precision == f"{setting[:4]}-engine"
        elif setting.startswith("zero."):
            value: Any = case.zero
            for part in setting.split(".")[1:]:
                value = value[part] if part in value else value[f"stage3_{part}"]
            assert value == expected
        elif setting in (ACCUMULATION, "gradient_clipping"):
            assert case.top[setting] == expected


def test_accumulation_that_the_file_leaves_open_is_reported_and_a_flag_that_contradicts_it_refused(tmp_path):
    def case(accumulation: int = 1, **settings: Any) -> ConfigCase:
        document = {**zero(1, reduce_bucket_size=525336576), **settings}
        return make_case(tmp_path, document, LLAMA_8B, 8, sequence_length=2048, accumulation=accumulation)

    auto: dict[str, Any] = {ACCUMULATION: "auto"}
    says = name_findings(case(**auto))[f"filled {ACCUMULATION}"]
    once, often = (predict_memory(case(count, **auto).request).peak_reserved.value / 2**30 for count in (1, 8))
    assert says.endswith(f"a rank reserves {often:.1f} GiB instead of {once:.1f}")
    assert often > once + 10
    assert name_findings(case(8, **auto)) == name_findings(case()) == name_findings(case(8, **{ACCUMULATION: 8})) == {}
    assert list(name_findings(case(8))) == [f"conflict {ACCUMULATION}"]
    for sizes, program, says in (
        ({ACCUMULATION: 4}, {"accumulation": 8}, f"{ACCUMULATION} 4, and --accumulation is 8"),
        ({ACCUMULATION: 4}, {"micro_batch": 2}, f"{MICRO_BATCH} 1, and --micro_batch is 2"),
        ({MICRO_BATCH: None, "train_batch_size": 8}, {"accumulation": 4}, f"{ACCUMULATION} 1, and --accumulation"),
    ):
        with pytest.raises(UserError, match=says):
            make_case(tmp_path, {**PLAIN, **sizes}, "gpt2", 4, **program)


@pytest.mark.parametrize(
    "name", ["zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu_optimizer", "zero3_cpu", "zero3_nvme", "zero3_cpu_nvme"]
)
def test_settings_by_key_state_and_offloads_add_up_to_the_state_of_a_rank(name: str, tmp_path: Path) -> None:
    case = make_case(tmp_path, json.loads((ROOT / f"accelerate_configs/deepspeed/{name}.json").read_text()))
    keys = {f"{ZERO}.stage", *(f"{ZERO}.{what}.{key}" for what in OFFLOADS for key in ("device", "ratio"))}
    state_costs = [cost for cost in costs(case) if cost.key in keys]
    for place in ("device", "host", "nvme"):
        assert sum(getattr(cost, place) for cost in state_costs) == pytest.approx(getattr(case.state, place))


@pytest.mark.parametrize(
    ("settings", "model", "ranks", "about", "answered", "figures", "least", "most"),
    [
        (
            zero(3, reduce_bucket_size=5_000_000),
            "bert-large-uncased",
            2,
            "Does stage 3",
            "yes",
            ("stage_3", "stage_2"),
            1.0,
            2.0,
        ),
        (zero(3), "gpt-13b", 8, "Does stage 3", "no", ("stage_3", "stage_2"), 0.0, 0.8),
        (zero(2), "bert-base-uncased", 2, "Does stage 2", "as much: ", ("stage_2", "stage_1"), 0.99, 1.01),
        (zero(2), "bert-base-uncased", 2, "more ranks", "", ("ranks_4", "ranks_2"), 0.8, 1.0),
        (zero(2, offload_optimizer=CPU), "gpt-7.5b", 8, "more host memory", "yes", ("stage_2", "stage_3"), 1.2, 9.0),
    ],
)
def test_a_question_is_answered_in_bytes(settings, model, ranks, about, answered, figures, least, most, tmp_path):
    answers = find_answers(make_case(tmp_path, settings, model, ranks))
    answer = next(answer for answer in answers if about in answer.question)
    assert answer.short.startswith(answered)
    assert least < answer.figures[figures[0]] / answer.figures[figures[1]] < most


@pytest.mark.parametrize("form", ["dynamo_config:\n  dynamo_backend: INDUCTOR", "dynamo_backend: inductor"])
@pytest.mark.parametrize(
    ("engine", "environment"),
    [
        ("FSDP", prepare_multi_gpu_env),
        ("MULTI_GPU", prepare_multi_gpu_env),
        ("DEEPSPEED", lambda options: prepare_deepspeed_cmd_env(options)[1]),
    ],
)
def test_a_model_counts_as_compiled_where_the_launcher_tells_its_processes(
    engine: str, environment: Callable[[argparse.Namespace], dict[str, str]], form: str, tmp_path: Path
) -> None:
    file = tmp_path / "launch.yaml"
    sections = {"FSDP": "fsdp_config:\n  fsdp_version: 2\n", "DEEPSPEED": "deepspeed_config:\n  zero_stage: 2\n"}
    top = f"compute_environment: LOCAL_MACHINE\ndistributed_type: {engine}\nmixed_precision: bf16\nnum_machines: 1\n"
    file.write_text(f"{top}num_processes: 2\n{form}\n{sections.get(engine, '')}")
    options = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    options, *_ = _validate_launch_command(options)
    # As deepspeed_launcher sets it.
    options.deepspeed_fields_from_accelerate_config = ""
    reaches_processes = environment(options).get("ACCELERATE_DYNAMO_BACKEND") == "INDUCTOR"
    case = resolve(read_user_file(str(file)), model_shape(LLAMA_8B), 2, ProgramSettings(), to_box("2xH100"))
    assert case.request.compiled == reaches_processes
    lost = [finding.key for finding in findings(case) if "dynamo" in finding.key]
    assert lost == ([] if reaches_processes else [form.partition(":")[0]])
    assert reaches_processes == (engine != "DEEPSPEED")


def test_muon_at_stage_3_is_refused_with_the_default_reduce_scatter_as_the_engine_does(tmp_path: Path) -> None:
    from deepspeed.runtime.zero import stage3

    error = 'if self.use_muon and self.reduce_scatter:\n            raise ValueError("Muon and reduce scatter cannot'
    assert error in inspect.getsource(stage3)
    for stage, settings, is_refused in ((3, {}, True), (3, {"reduce_scatter": False}, False), (2, {}, False)):
        document = {**PLAIN, "optimizer": {"type": "Muon"}, ZERO: {"stage": stage, **settings}}
        refusals = [finding for finding in findings(make_case(tmp_path, document)) if finding.kind == "refused"]
        assert [(finding.key, finding.rule) for finding in refusals] == [
            ("reduce_scatter", ENDS_WITH_ERROR)
        ] * is_refused


def test_an_argument_that_ends_a_run_is_an_error_of_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    optimizer = {"type": "Adam", "params": {"lr": 3e-5, "max_grad_norm": 1.0}}
    file.write_text(json.dumps({**PLAIN, "optimizer": optimizer, ZERO: {"stage": 1}}))
    assert main(["explain", str(file), "gpt2", "--world_size", "2"]) == 1
    assert capsys.readouterr().out.startswith("Ends with an error: optimizer.params.max_grad_norm.")
    assert main(["explain", "--strict", str(file)]) == 1
    assert "errors: 1, warnings: 0" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["MULTI_GPU", "DEEPSPEED"])
def test_an_accelerate_file_of_2021_has_its_precision(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    sections = {"deepspeed_config": {"zero_stage": 2}} if engine == "DEEPSPEED" else {}
    for keys, precision in (({"fp16": True}, "fp16"), ({"fp16": True, "mixed_precision": "bf16"}, "bf16")):
        document = {"distributed_type": engine, "num_processes": 2, **keys, **sections}
        file.write_text(yaml.safe_dump(document))
        assert load_config_from_file(str(file)).mixed_precision == precision
        case = resolve(read_user_file(str(file)), model_shape("gpt2"), 2, ProgramSettings())
        assert case.request.precision.removesuffix("-engine") == precision


def test_a_comparison_of_stages_names_what_it_leaves_out(tmp_path: Path) -> None:
    cpu: dict[str, Any] = {"device": "cpu"}
    for offloads, text in (
        ({"offload_optimizer": cpu}, ""),
        ({"offload_optimizer": cpu | {"ratio": 0.5}}, ", with offload_optimizer.ratio=1"),
        ({"offload_optimizer": cpu, "offload_param": cpu}, ", without offload_param"),
    ):
        answers = find_answers(make_case(tmp_path, zero(3, **offloads), LLAMA_8B, 8))
        (short,) = [answer.short for answer in answers if "more memory than stage 2" in answer.question]
        assert short.endswith(text)
        assert ("offload" in short) == bool(text)


@pytest.mark.parametrize(
    ("name", "text", "program", "strategy"),
    [
        (
            "a.yaml",
            "trainer: {devices: 4, strategy: deepspeed_stage_2_offload}\nmodel: {x: 1}",
            "Lightning",
            "zero2_cpu",
        ),
        (
            "a.yaml",
            "trainer: {strategy: {class_path: a.DeepSpeedStrategy, init_args: {stage: 3, offload_optimizer: true}}}",
            "Lightning",
            "zero3_cpu_optimizer",
        ),
        ("a.yaml", "trainer: {strategy: fsdp, precision: bf16-mixed}", "Lightning", "fsdp2 --fsdp_version 1"),
        ("a.yaml", "optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}\nbatch_size: 2", "torchtune", "fsdp2"),
        (
            "a.yaml",
            "model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_rank: 16}",
            "torchtune",
            "fsdp2 --peft lora --lora_rank 16 --adapters_in_16_bits",
        ),
        (
            "a.yaml",
            "model: {_component_: torchtune.models.llama3_2.qlora_llama3_2_1b}",
            "torchtune",
            "fsdp2 --peft lora --adapters_in_16_bits --quantization 4bit",
        ),
        ("a.json", '{"optimizer": {"_target_": "torch.optim.Adam"}}', "NeMo or another program of Hydra", "fsdp2"),
        ("a.yaml", "device_train_microbatch_size: 1\nfsdp_config: {mixed_precision: PURE}", "Composer", "fsdp2"),
    ],
)
def test_a_file_of_another_program_is_not_explained(
    name: str, text: str, program: str, strategy: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UserError, match=f"is a file of {program}, which is not read") as refused:
        read_user_file(str(file))
    assert f"--strategy {strategy} --hardware BOX" in refused.value.fix


_TITAN = """
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 8
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        (
            {},
            "study predict llama-3.1-70b --strategy fsdp2 --seq_length 8192 --micro_batch 8 --tensor_parallel 8"
            " --tensor_plan sequence --precision bf16 --compile --gradient_checkpointing --hardware BOX",
        ),
        ({"local_batch_size": "batch_size", "enable = true": ""}, "--micro_batch 8 --tensor_parallel 8"),
        ({"enable = true": 'enable = true\ncomponents = ["loss"]'}, "--precision bf16 --gradient_checkpointing"),
        ({'mode = "full"': ""}, "--compile --hardware BOX; selective checkpointing is between"),
        ({"shard_degree = -1": "replicate_degree = 8\ndata_parallel_shard_degree = 1"}, "--strategy ddp"),
        ({"shard_degree = -1": "replicate_degree = 8\ndata_parallel_shard_degree = 4"}, "--strategy hsdp"),
        ({"tensor_parallel_degree": "context_parallel_degree"}, "not predicted: tokens over ranks"),
        ({'"70B"': '"70B"\nconverters = ["float8"]'}, "not predicted: products in 8 bits"),
        ({"llama3": "somebody"}, "study predict MODEL --strategy fsdp2"),
        ({"[training]": "[somewhere]"}, "with its batch and degrees as flags"),
    ],
)
def test_a_file_of_torchtitan_is_refused_with_its_question(
    changes: dict[str, str], command: str, tmp_path: Path
) -> None:
    pytest.importorskip("tomllib")
    text = _TITAN
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "llama3.toml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_user_file(str(file))
    assert command in refused.value.fix


def test_the_question_of_a_torchtitan_file_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tomllib")
    file = tmp_path / "llama3.toml"
    file.write_text(_TITAN)
    with pytest.raises(UserError) as refused:
        read_user_file(str(file))
    words = refused.value.fix.partition(";")[0].replace("BOX", "8x8xA100").split()
    assert main(words[1:]) == 0
    assert "llama-3.1-70b (70.6 B)" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "says"), [("a.toml", "is TOML"), ("a.yaml", "has no setting of DeepSpeed")])
def test_a_file_without_a_setting_is_refused(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("seed_everything = 42" if name.endswith("toml") else "seed_everything: 42")
    with pytest.raises(UserError, match=says):
        read_user_file(str(tmp_path / name))


def test_strategies_of_lightning_are_those_that_it_registers() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    names = {name for name in StrategyRegistry.available_strategies() if name.startswith("deepspeed")}
    assert names == {name for name in OF_LIGHTNING if name.startswith("deepspeed")}


def test_reducing_in_each_micro_batch_is_named_where_it_saves_memory(tmp_path: Path) -> None:
    for ranks, is_named in ((2, False), (8, True)):
        case = make_case(tmp_path, fsdp(fsdp_version=2), LLAMA_8B, ranks, accumulation=8)
        assert ("whole-gradients" in {finding.rule for finding in findings(case)}) == is_named


def test_an_offload_that_a_stage_ignores_takes_no_time_and_no_memory(tmp_path: Path) -> None:
    hardware = to_box("8xA100")
    for stage, what in ((2, "offload_param"), (1, "offload_param"), (0, "offload_optimizer")):
        cases = []
        for settings in ({}, {what: {"device": "cpu"}}):
            (tmp_path / "ds.json").write_text(json.dumps({**PLAIN, ZERO: {"stage": stage, **settings}}))
            file = read_user_file(str(tmp_path / "ds.json"))
            cases.append(resolve(file, model_shape(LLAMA_8B), 8, ProgramSettings(), hardware))
        plain, ignored = cases
        assert any(finding.kind == "ineffective" and what in finding.key for finding in findings(ignored))
        assert predict_time(ignored.request) == predict_time(plain.request)
        assert predict_memory(ignored.request) == predict_memory(plain.request)
        answers = [[answer.short for answer in find_answers(case) if "time" in answer.question] for case in cases]
        assert answers[0] == answers[1] != []


def test_a_setting_under_its_deprecated_name_is_no_default(capsys, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    for settings, is_default in (({"cpu_offload": True}, False), ({"offload_optimizer": CPU}, False), ({}, True)):
        file.write_text(json.dumps({**PLAIN, ZERO: {"stage": 2, **settings}}))
        main(["explain", str(file), "gpt2", "--world_size", "2", "--json"])
        settings_by_key = {cost["key"]: cost for cost in json.loads(capsys.readouterr().out)["settings"]}
        offload = settings_by_key.get(f"{ZERO}.offload_optimizer.device")
        assert (offload is None) == is_default
        assert offload is None or offload["is_said"]
        assert not settings_by_key[f"{ZERO}.reduce_bucket_size"]["is_said"]


def test_the_answer_on_more_ranks_says_whether_memory_falls(tmp_path: Path) -> None:
    for settings, model, falls in (
        (zero(3), "gpt-13b", "yes"),
        (zero(2), "bert-base-uncased", "hardly"),
        (zero(0), "gpt2", "no"),
    ):
        answers = find_answers(make_case(tmp_path, settings, model, 8))
        (answer,) = (answer for answer in answers if "more ranks" in answer.question)
        assert answer.question == "Does memory per rank fall with more ranks?"
        assert answer.short.startswith(f"{falls}: 4 ranks "), answer.short
        assert (answer.figures["ranks_16"] < 0.95 * answer.figures["ranks_8"]) == (falls == "yes")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_explain_names_the_release_from_which_the_settings_compute_right_gradients(stage: int, tmp_path: Path) -> None:
    for accumulation, settings in ((1, {}), (4, {}), (4, {"offload_optimizer": CPU})):
        case = make_case(tmp_path, {**zero(stage, **settings), ACCUMULATION: accumulation})
        says = [finding.message for finding in findings(case) if finding.rule == "releases"]
        name = "zero2_cpu" if settings and stage == 2 else f"zero{stage}"
        release = least_sound_release(name, accumulation, "bf16-engine")
        unsound = unsound_releases(name, accumulation, "bf16-engine")
        assert unsound.endswith(f"to before {release}" * bool(release))
        assert says == [f"releases {unsound} compute wrong gradients with these settings (study releases)"] * bool(
            release
        )
        assert bool(release) or stage == 3 or accumulation == 1


# Each line has ten references to the line before.
NESTED = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "{", "not readable as JSON: line 1 has"),
        ("a.json", '{"train_batch_size": 8,\n "bf16": {"enabled": True}}', "line 2 has True, as Python writes it"),
        ("a.json", " \n", "a.json is empty"),
        ("a.yaml", "", "a.yaml is empty"),
        ("a.json", '{"a":' * 3000 + "1" + "}" * 3000, "is nested more than 50 levels deep"),
        ("a.json", '{"a": ' + "[" * 3000, "is nested more than 50 levels deep"),
        ("a.json", json.dumps({"deepspeed_config": PLAIN}), "has its settings under deepspeed_config"),
        ("a.json", '{"transformer_layer_cls_to_wrap": ["GPT2Block"], "xla": false}', "an fsdp_config of TrainingArgum"),
        ("a.yaml", "- a\n- b\n", "not a mapping"),
        ("a.yaml", "a: [", "a.yaml:1: not YAML"),
        ("a.yaml", f"a0: &a0 {{k: 1}}\n{NESTED}", "has more than 20000 values"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as refusal:
        resolve(read_user_file(str(tmp_path / name)), model_shape("gpt2"), 2, ProgramSettings())
    assert says in refusal.value.problem
    assert "\n" not in str(refusal.value)


def test_comments_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    file, outer = tmp_path / "ds.json", tmp_path / "outer.yaml"
    file.write_text('{"train_batch_size": 8, # samples\n "zero_optimization": {"stage": 2 /* gradients */},}')
    assert DeepSpeedConfig(str(file)).zero_config.stage == 2
    user_file = read_user_file(str(file))
    assert user_file.deepspeed == {"train_batch_size": 8, ZERO: {"stage": 2}}
    assert [(finding.kind, "is Hjson" in finding.says) for finding in user_file.findings] == [("conflict", True)]
    for text, line, mistake, fix in (
        ("8, // samples\n}", 1, "a comment", "take it out"),
        ("8,\n}", 2, "a comma before", "take it out"),
        ('8\n"bf16": {}}', 2, "no comma", "add one"),
    ):
        (tmp_path / "wrong.json").write_text('{"train_batch_size": ' + text)
        (finding,) = (item for item in read_user_file(str(tmp_path / "wrong.json")).findings if "Hjson" in item.message)
        # Python 3.13 names the comma itself.
        assert (finding.line in (line, line - ("comma before" in mistake)), finding.fix) == (True, fix)
        assert mistake in finding.message
    # Accelerate reads JSON alone.
    section = {"deepspeed_config_file": str(file)}
    outer.write_text(json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": section}))
    assert [finding.kind for finding in read_user_file(str(outer)).findings] == ["refused"]
    # The quick start installs DeepSpeed's reader without DeepSpeed.
    _, _, project = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")
    assert '"hjson>=' in project.partition("\n]")[0]


@pytest.mark.parametrize(
    ("outer", "inner", "line", "says"),
    [
        # The mistake of the inner file is in its third line.
        ("{section}:\n  zero3_init_flag: false\n  {named}", '{"a": 1,\n\n "b": True}', 4, "line 3 has True"),
        ("{section}: {zero_stage: 2}\nis: 1\nnot: 2", "", 1, "has distributed_type: XLA, which is not modelled"),
        ("compute_environment: AMAZON_SAGEMAKER\nis: 1", "", 2, "is for SageMaker, which is not modelled"),
        ("{section}: {zero_stage: [}", "", 2, "not YAML (expected the node content"),
    ],
)
def test_a_refusal_is_at_the_line_or_the_key_that_it_has(outer, inner, line, says, tmp_path: Path) -> None:
    """Words of its message may be keys of the file, too."""
    kind = "XLA" if "XLA" in says else "DEEPSPEED"
    inner_line = f"deepspeed_config_file: {tmp_path / 'ds.json'}"
    body = outer.replace("{section}", "deepspeed_config").replace("{named}", inner_line)
    (tmp_path / "ds.json").write_text(inner)
    file = tmp_path / "outer.yaml"
    file.write_text(f"distributed_type: {kind}\n{body}\n")
    *_, finding = check_file(str(file), None, None, ProgramSettings())
    assert (finding.line, says in finding.message, finding.file) == (line, True, str(file))


HJSON = """\
# samples
train_batch_size: 8
zero_optimization: {
  stage: 3 // parameters
  offload_param: {
    device: cpu
  }
}
"""


@pytest.mark.parametrize("name", ["ds.json", "ds.jsonc", "ds.hjson"])
@pytest.mark.parametrize("text", [HJSON, f"/* of\nours */ {{\n{HJSON}}}", "# ours\n" + json.dumps(PLAIN)])
def test_a_file_that_deepspeed_reads_as_hjson_is_read_under_any_of_its_names(name, text, tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    file = tmp_path / name
    file.write_text(text)
    expected = DeepSpeedConfig(str(file))
    user_file = read_user_file(str(file))
    assert user_file.deepspeed is not None
    assert user_file.deepspeed[ZERO]["stage"] == expected.zero_config.stage
    assert is_config(str(file))
    (finding,) = (item for item in user_file.findings if item.kind == "conflict")
    assert (finding.line, "Accelerate and the Trainer end with an error" in finding.message) == (1, True)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (HJSON.replace("cpu\n  }", "cpu }"), 6, "a text without quotes, which ends with its line"),
        ("{\n  # ours\n  bf16: {enabled: True}\n}", 3, "a text without quotes, which ends with its line"),
        ('{ # ours\n  "zero_optimization": {"stage": 2\n}\n', 4, "the end of the file before its last bracket"),
        ('{"train_batch_size": 8,\n "bf16": {"enabled": True}}', 2, "True, as Python writes it"),
    ],
)
def test_a_file_that_deepspeed_does_not_read_either_is_refused_with_the_line(text, line, says, tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"line|Extra data|Expected"):
        DeepSpeedConfig(str(file))
    with pytest.raises(UserError) as refusal:
        read_user_file(str(file))
    assert f": line {line} has {says}" in refusal.value.problem
    assert refusal.value.problem.endswith("DeepSpeed ends with an error, too")


def test_yaml_and_the_file_that_it_names_are_read_as_accelerate_reads_them(tmp_path, monkeypatch) -> None:
    """A bare `no` is false, which is no precision, and an explicit key overrides a merged one."""
    file = tmp_path / "a.yaml"
    for line, key in (("mixed_precision: no", "mixed_precision"), ("num_proceses: 2", "num_proceses")):
        file.write_text(f"distributed_type: no\n{line}\n")
        read = read_user_file(str(file))
        assert (read.distributed_type, [finding.key for finding in read.findings]) == ("NO", [key])
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  <<: {zero_stage: 2}\n  zero_stage: 3\n")
    assert resolve(read_user_file(str(file)), model_shape("gpt2"), 2, ProgramSettings()).stage == 3
    # A file that another one names is searched for in the working directory.
    config = ROOT / "accelerate_configs" / "zero3_cpu.yaml"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"deepspeed_config_file: .*zero3_cpu.json', and there is no file") as refusal:
        read_user_file(str(config))
    assert refusal.value.fix.endswith(f"path starts: {ROOT}")
    monkeypatch.chdir(ROOT)
    assert read_user_file(str(config)).launcher == "accelerate"


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP"])
@pytest.mark.parametrize(
    "extra", [{}, {"use_cpu": True}, {"num_machines": 2, "main_process_ip": "a", "main_process_port": 1}]
)
def test_a_text_of_num_processes_is_refused_where_the_launcher_ends_with_an_error(kind, extra, tmp_path):
    """It compares and divides the value in some cases, and gives it to torchrun in the others."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )
    from torch.distributed.run import determine_local_world_size

    file = tmp_path / "a.yaml"
    for text in ("8", " 8", "auto", "cpu", "abc", "8.0"):
        document = {"distributed_type": kind, "num_processes": text, "num_machines": 1, "machine_rank": 0, **extra}
        file.write_text(yaml.safe_dump(document))
        try:
            command = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
            options, _, _ = _validate_launch_command(command)
            options.deepspeed_fields_from_accelerate_config = ""
            if options.use_deepspeed:
                prepare_deepspeed_cmd_env(options)
            elif options.multi_gpu or options.use_fsdp:
                prepare_multi_gpu_env(options)
            else:
                prepare_simple_launcher_cmd_env(options)
            count = determine_local_world_size(options.nproc_per_node)
        except (TypeError, ValueError):
            count = 0
        read = read_user_file(str(file))
        is_refused = any(finding.key == "num_processes" and finding.kind == "refused" for finding in read.findings)
        assert is_refused == (count == 0), (text, count)
        assert read.num_processes == (8 if count and text.strip() == "8" else None)


@pytest.mark.parametrize(
    ("machines", "settings", "kind"),
    [
        (16, {}, "conflict"),
        (2, {"deepspeed_multinode_launcher": "nossh"}, "refused"),
        (16, {"deepspeed_hostfile": "hosts"}, "noted"),
        (2, {"deepspeed_hostfile": "hosts", "deepspeed_multinode_launcher": "slurm"}, "noted"),
        (2, {"deepspeed_multinode_launcher": "nossh", "deepspeed_hostfile": "hosts"}, None),
        (16, {"deepspeed_multinode_launcher": "standard"}, None),
        (1, {}, None),
    ],
)
def test_a_launcher_that_starts_other_ranks_than_srun_expects_is_named(machines, settings, kind, tmp_path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    engine = {"zero_stage": 2, "gradient_accumulation_steps": 1, **settings}
    ranks = 4 * machines
    launch = {"num_machines": machines, "num_processes": ranks, "machine_rank": 1, "main_process_ip": "a"}
    document = {"distributed_type": "DEEPSPEED", **launch, "main_process_port": 29500, "deepspeed_config": engine}
    case = make_case(tmp_path, document, ranks=ranks)
    launch_findings = [finding for finding in findings(case) if finding.rule == "launcher"]
    keys = {"conflict": "deepspeed_hostfile", "refused": "deepspeed_hostfile", "noted": "deepspeed_multinode_launcher"}
    assert [(finding.kind, finding.key) for finding in launch_findings] == ([(kind, keys[kind])] if kind else [])
    assert all("standard" in finding.fix for finding in launch_findings)
    # Accelerate starts DeepSpeed's launcher, with the hosts or without any.
    command = launch_command_parser().parse_args(["--config_file", str(tmp_path / "user.yaml"), "train.py"])
    options, _, _ = _validate_launch_command(command)
    options.deepspeed_fields_from_accelerate_config = ""
    words = prepare_deepspeed_cmd_env(options)[0] or []
    hosts = words[words.index("--hostfile") + 1] if "--hostfile" in words else None
    assert (hosts == "None") == (kind in ("conflict", "refused"))
    assert ("--no_ssh" in words and hosts == "None") == (kind == "refused")
    assert ("--launcher" in words and hosts == "hosts") == (kind == "noted")
    # Without hosts it takes the GPUs of localhost.
    assert fetch_hostfile("None") is None


def test_a_global_batch_is_divided_by_the_ranks_that_do_not_share_samples(tmp_path: Path) -> None:
    """The sizes of the micro-batch and accumulation that DeepSpeed 0.19.8 computes on 8 ranks; None is an error."""
    for settings, sizes in (
        ({"sequence_parallel_size": 4, "data_parallel_size": 2, "train_batch_size": 8}, [4, 1]),
        ({"sequence_parallel_size": 4, "train_batch_size": 8, ACCUMULATION: 2}, [2, 2]),
        ({"sequence_parallel_size": 4, "data_parallel_size": 4, "train_batch_size": 8}, None),
        ({"sequence_parallel_size": 4, "data_parallel_size": 2, "train_batch_size": 9}, None),
        ({"train_batch_size": 64}, [8, 1]),
        ({"train_batch_size": 64, MICRO_BATCH: 1}, [1, 8]),
        ({"train_batch_size": 64, ACCUMULATION: 2}, [4, 2]),
    ):
        case = make_case(tmp_path, {**settings, ZERO: {"stage": 2}}, ranks=8)
        is_refused = any(finding.startswith("refused") for finding in name_findings(case))
        assert is_refused == (sizes is None), settings
        assert is_refused or [case.request.micro_batch, case.request.accumulation] == sizes, settings


def test_settings_that_are_not_modelled_are_noted(tmp_path: Path) -> None:
    """Every unmodelled setting of known_settings.yaml is noted if it is on, and not otherwise; and a setting with
    a name of sharding or offloading is never ignored."""
    places = {place: KNOWN[place] for place in ("top", *SECTIONS)} | KNOWN["strict_sections"] | KNOWN["sections"]
    features = re.compile("offload|quantiz|parallel_size|partition|zenflow|deepcompile|activation|lation$")
    # Settings of the cases below, older names, and effects outside of a step.
    silent = {
        "offload_activation_pin_memory",
        "cpu_offload_use_pin_memory",
        "free_activation_threshold",
        "offload",
        "data_parallel_size",
        "tp_gather_partition_size",
        "allgather_partitions",
    }
    values: dict[str, Any] = {
        "communication_data_type": "bf16",
        "zenflow": {"topk_ratio": 0.5},
        "tensor_parallel": {"autotp_size": 2},
        "pipeline": {"stages": 2},
        "weight_quantization": {"num_bits": 8},
        "leaf_module": {"names": ["mlp"]},
    }
    baseline = predict_memory(make_case(tmp_path, zero(3), "gpt-tiny").request)
    for place, key in ((place, key) for place, entries in places.items() for key in entries):
        entry, is_feature = section_entries(place)[key], features.search(key) and key not in silent
        if place.split(".")[0] in {*values, "activation_checkpointing"} or not ("not_modelled" in entry or is_feature):
            continue
        default = entry.get("default", False)
        on: Any = {entry["switch"]: True} if "switch" in entry else CPU if key in OFFLOADS else not default
        on = values.get(key, 2 if key.endswith(("size", "threshold")) else on)
        off = {entry["switch"]: False} if "switch" in entry else default
        for value, is_on in ((on, True), (off, False)):
            document = zero(entry.get("stages", [3])[-1])
            section: dict[str, Any] = document
            for part in place.split(".") if place != "top" else ():
                section = section.setdefault(part, {"device": "cpu"} if part in OFFLOADS else {})
            section[key] = value
            case = make_case(tmp_path, document, "gpt-tiny")
            name = f"{place}.{key}".removeprefix("top.")
            notes = [finding.says for finding in findings(case) if finding.key == name]
            if "not_modelled" in entry:
                assert any(text.endswith("not modelled: the figures are without it") for text in notes) == is_on, name
            elif is_on:
                assert notes or predict_memory(case.request) != baseline, name


def test_the_precision_that_auto_and_fp8_become_is_named_and_stage_2_sends_nothing_to_nvme(tmp_path: Path) -> None:
    """The config file in Hugging Face's documentation names fp16 alone."""
    plain = {key: value for key, value in PLAIN.items() if key != "bf16"}
    assert make_case(tmp_path, {**plain, "fp16": {"enabled": "auto"}}).request.precision == "fp16-engine"
    assert make_case(tmp_path, {**plain, "fp16": {"enabled": False}}).request.precision == "fp32"
    accelerate = {"distributed_type": "DEEPSPEED", "mixed_precision": "fp8"}
    sections = [{"zero_stage": 2, "offload_optimizer_device": device} for device in ("cpu", "nvme")]
    on_cpu, on_nvme = (make_case(tmp_path, {**accelerate, "deepspeed_config": section}) for section in sections)
    assert on_cpu.request.precision == "bf16-engine"
    assert "noted mixed_precision" in name_findings(on_cpu)
    assert predict_memory(on_cpu.request) == predict_memory(on_nvme.request)


def test_a_setting_that_accelerate_drops_fails_a_strict_check_alone(tmp_path, capsys):
    file = tmp_path / "accelerate.yaml"
    for key, status in (("offload_optimizer_device", 0), ("offload_optimizer_devise", 3)):
        section = {"zero_stage": 2, key: "cpu"}
        document = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section}
        file.write_text(yaml.safe_dump(document))
        assert [main(["explain", str(file), "gpt2", *flags]) for flags in ((), ("--strict",))] == [0, status]
    assert "did you mean offload_optimizer_device" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["zero2", "zero3_cpu", "zero3_nvme", "fsdp2"])
def test_the_first_line_is_the_verdict_and_details_have_the_reasons(strategy, capsys):
    def page(*flags: str) -> str:
        file = str(ROOT / "accelerate_configs" / f"{strategy}.yaml")
        assert main(["explain", file, "gpt2", "--world_size", "2", *flags]) == 0
        return str(capsys.readouterr().out)

    short, detailed, document = page(), page("--details"), json.loads(page("--json"))
    counted = next(line for line in short.splitlines() if re.match(r"\d+ settings? |every setting", line))
    schema = ("id", "severity", "file", "line", "key", "message", "fix")
    assert all(tuple(finding) == schema for finding in document["findings"])
    ids = [finding["id"].split("/") for finding in document["findings"]]
    kinds = [kind for kind, name in ids if name not in KNOWN["details"]]
    counts = [int(count) for count in re.findall(r"\d+(?= settings?)", counted)]
    assert sorted(counts) == sorted(kinds.count(kind) for kind in set(kinds))
    peak = document["memory"]["peak_reserved"]["value"] + document["memory"]["device_parts"]["context"]
    assert re.match(r"Peak ([\d.]+) GiB a GPU in fp32 \(in bf16 [\d.]+ GiB\); host", short)
    assert float(short.split()[1]) == pytest.approx(peak / 2**30, rel=0.05)
    reasons = [line for answer in document["answers"] for line in answer["because"]]
    assert [{line in text for line in reasons} for text in (short, detailed)] == [{False}, {True}]


BF16 = ("--precision", "bf16")


@pytest.mark.parametrize(
    ("strategy", "hardware", "flags", "says"),
    [
        ("zero3", "8xA100", BF16, r"Fits in bf16: 35\.8 of 79\.2 GiB \(90 % bound 4\d\.\d\); host"),
        (
            "zero2",
            "8xA100",
            (),
            r"May not fit in fp32: 73\.7 of 79\.2 GiB \(90 % bound 80\.4\); in bf16 it fits: \d+\.\d GiB; host",
        ),
        ("ddp", "8xA100-40", BF16, r"Does not fit in bf16: optimizer state alone needs 59\.8 of 39\.6 GiB"),
        (
            "zero3",
            "8xA100-40",
            (*BF16, "--micro_batch", "8"),
            r"Does not fit in bf16: .*; it fits with both --gradient_checkpointing and micro-batch 1 \(2\d\.\d GiB\)",
        ),
        (
            "zero3",
            "8xT4",
            (),
            r"Does not fit in fp32: activations alone need \d+\.\d of 14\.6 GiB, all together \d+\.\d GiB",
        ),
    ],
)
def test_with_hardware_the_first_line_says_whether_it_fits_and_in_which_precision(
    strategy, hardware, flags, says, capsys
):
    file = str(ROOT / "accelerate_configs" / f"{strategy}.yaml")
    command = ["explain", file, LLAMA_8B, "--world_size", "8", "--hardware", hardware, *flags]
    main(command)
    verdict = capsys.readouterr().out.splitlines()[0]
    assert re.match(says, verdict), verdict
    main([*command, "--json"])
    assert json.loads(capsys.readouterr().out)["fits"] is not verdict.startswith("Does not")
    assert main([*command, "--world_size", "16"]) == 2
    assert "16 ranks, and" in capsys.readouterr().err


def test_a_first_line_does_not_call_emulated_bf16_fitting_and_no_more(capsys) -> None:
    file = str(ROOT / "accelerate_configs" / "zero2.yaml")
    for hardware, device in (("4xV100-16", "V100 SXM2 16GB"), ("4xT4", "T4"), ("4xA100", None)):
        main(["explain", file, "bert-large-uncased", "--world_size", "4", "--hardware", hardware, *BF16])
        emulates = "" if device is None else f", which {device} emulates slowly"
        assert capsys.readouterr().out.startswith(f"Fits in bf16{emulates}: ")


def test_the_assumed_network_is_named_where_several_machines_train(capsys) -> None:
    file = str(ROOT / "accelerate_configs" / "zero3.yaml")
    says = "25 GB/s of network bandwidth per GPU, 200 per node (--network_gb_per_s), of which 60% is assumed"
    for hardware, is_named in (("2x8xA100", True), ("16xA100", False)):
        main(["explain", file, LLAMA_8B, "--world_size", "16", "--hardware", hardware, *BF16])
        assert (says in " ".join(capsys.readouterr().out.split())) == is_named


def test_a_strict_check_reports_all_findings_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of a file that cannot be resolved. tests/unit/test_ship.py has the lines of findings."""

    def findings_by_key(name: str, text: str) -> dict[str, str]:
        (tmp_path / name).write_text(text)
        assert main(["explain", "--strict", str(tmp_path / name)]) == 1
        return {line.split(": ")[3]: line for line in capsys.readouterr().out.splitlines()[:-1]}

    section = {"stage": 3, "stge": 2, "reduce_bucket_size": -1, "offload_optimizer": {"device": "disk", "pin": True}}
    wrong = {"train_batch_size": 30, MICRO_BATCH: 7, ACCUMULATION: 2, "bf16": True, "grad_clip": 1.0, ZERO: section}
    lines = findings_by_key("ds.json", json.dumps(wrong))
    in_section = ("stge", "reduce_bucket_size", "offload_optimizer.pin", "offload_optimizer.device")
    assert set(lines) == {"train_batch_size", "grad_clip", "bf16", *(f"{ZERO}.{key}" for key in in_section)}
    assert "on any number of ranks: 30 is not a multiple of 7 x 2" in lines["train_batch_size"]
    assert main(["explain", str(tmp_path / "ds.json"), "gpt2"]) == 2
    assert "and has wrong settings, which study explain --strict" in capsys.readouterr().err
    inner = "deepspeed_config: {zero_stge: 2, deepspeed_config_file: no.json}"
    lines = findings_by_key("a.yaml", f"distributed_type: DEEPSPEED\nnum_proceses: 2\n{inner}\n")
    assert list(lines)[:2] == ["num_proceses", "zero_stge"]


def test_a_given_host_memory_is_checked_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    file, model = str(ROOT / "accelerate_configs/zero3_cpu.yaml"), "llama-2-70b"
    flags = ["--hardware", "8xA100", "--gradient_checkpointing", "--host_memory"]
    for command in (["explain", file, model], ["predict", model, "--strategy", "zero3_cpu"]):
        lines = []
        for size in ("512", "4000"):
            main([*command, *flags, size])
            lines.append(capsys.readouterr().out.splitlines()[0])
        assert re.match(r"Does not fit.*: needs [0-9.,]+ GiB of host memory, of 512, in training", lines[0])
        assert lines[1].startswith("Fits")


def test_a_step_with_adam_on_the_host_has_its_range_without_details_and_its_rate_with_them(tmp_path, capsys) -> None:
    """DeepSpeed's rate has clipping and copies in it, FSDP's is Adam alone: of the same host both are named."""
    offloaded = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    both = f"{FITTED.host_gb_per_s:.0f} GB/s"
    for document, rate in (
        (
            fsdp(fsdp_version=2, fsdp_offload_params=True),
            "118 GB/s for all ranks of a node, as published for Adam alone",
        ),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": offloaded}, f"{both} for all ranks of a node"),
    ):
        (tmp_path / "user.yaml").write_text(json.dumps(document | {"num_processes": 2, "mixed_precision": "fp16"}))
        words = [
            "explain",
            str(tmp_path / "user.yaml"),
            "llama-3.2-3b",
            "--hardware",
            "2xT4",
            "--gradient_checkpointing",
        ]
        main(words)
        page = capsys.readouterr().out
        assert re.search(rf"time of a step\? \S+ s \({NOT_KNOWN}\) and .* GB sent by a rank: ", page)
        main([*words, "--details"])
        details = capsys.readouterr().out
        main([*words, "--json"])
        step = json.loads(capsys.readouterr().out)["step_s"]
        assert not step["within_factor_2"]
        ends = f"{rounded_seconds(step['low'])} to {rounded_seconds(step['high'])} a step"
        assert f"{ends}: Adam on published hosts had 1.77 GB/s a rank to 178 a node" in details
        (note,) = [line for line in details.splitlines() if "the host's Adam: " in line]
        assert f"the host's Adam: {rate}" in note
        assert all(words in note for words in (both, "clipping and copies in it", "OMP_NUM_THREADS"))


def test_the_first_line_names_the_host_s_need_of_training_first_and_also_if_the_gpu_is_full(tmp_path, capsys) -> None:
    def first_line(*words: str) -> str:
        main([*words, "--hardware", "T4", "--precision", "fp16"])
        return capsys.readouterr().out.splitlines()[0]

    predict = ["predict", "gemma-2-9b", "--strategy", "zero3_cpu", "--gradient_checkpointing"]
    unchecked = r"May not fit: 11.4 of 14.6 .*, 227 GiB of host memory \(unchecked\); about"
    assert re.match(unchecked, first_line(*predict))
    assert re.match(r"May not fit: .*, 227 of 512 GiB on the host; about", first_line(*predict, "--host_memory", "512"))
    # Saving needs all weights in addition to the shards; switched off, training would still not fit.
    engine = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    plain: dict[str, Any] = {"num_processes": 1, "distributed_type": "NO"}
    saving = plain | {"distributed_type": "DEEPSPEED", "deepspeed_config": engine | {"zero3_save_16bit_model": True}}
    (tmp_path / "user.yaml").write_text(json.dumps(saving))
    explain = ["explain", str(tmp_path / "user.yaml"), "gemma-2-9b", "--host_memory"]
    in_training = "227 GiB of host memory, of 12, in training, and 244 while the model is saved"
    assert f": needs {in_training}; " in first_line(*explain, "12", "--gradient_checkpointing")
    only_saving = "needs 244 GiB of host memory, of 230, while the model is saved"
    assert only_saving in first_line(*explain, "230", "--gradient_checkpointing")
    # Without checkpointing the GPU is full, too.
    assert re.search(f"activations alone need .* GiB, and {in_training}", first_line(*explain, "12"))
    (tmp_path / "user.yaml").write_text(json.dumps(plain))
    loading = r" and 35\.4 GiB of host memory, of 12, while the model is loaded; predicted"
    assert re.search(rf"optimizer state alone .* GiB,{loading}", first_line(*explain, "12"))
    single = ["predict", "gemma-2-9b", "--strategy", "single", "--host_memory", "12"]
    assert re.match(rf"Does not fit: 180 of .*\),{loading}", first_line(*single))


def test_a_model_is_named_as_a_word_or_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "accelerate_configs" / "zero3.yaml")
    rest = ["--hardware", "8xH100", "--json"]
    answers = []
    for model in (["gpt2"], ["--model", "gpt2"], ["--model_name_or_path", "gpt2"]):
        assert main(["explain", file, *model, *rest]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[1:] == answers[:1] * 2
    assert main(["explain", file]) == 2
    assert "the model is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "keys"),
    [
        (zero(3) | {"prescale_gradients": True}, ["prescale_gradients"]),
        (zero(2) | {"gradient_predivide_factor": 2.0}, ["gradient_predivide_factor"]),
        (zero(2) | {"prescale_gradients": True, "gradient_allreduce_op": "sum"}, []),
        (zero(2, reduce_scatter=False) | {"prescale_gradients": True}, []),
        (zero(1) | {"prescale_gradients": True}, []),
        (zero(3) | {"gradient_predivide_factor": 1.0}, []),
    ],
)
def test_scaling_before_the_reduction_is_refused_where_the_engine_asserts_it(document, keys, tmp_path: Path) -> None:
    refused = [item.key for item in findings(make_case(tmp_path, document)) if item.kind == "refused"]
    assert refused == keys


@pytest.mark.parametrize(
    ("box", "size", "fix"),
    [("4x8xH100", 16, "set 8"), ("4x8xH100", 8, None), ("8xH100", 8, "leave it out"), ("8xH100", 4, None)],
)
def test_a_secondary_partition_that_shortens_no_gather_is_in_conflict(box, size, fix, tmp_path: Path) -> None:
    file = tmp_path / "hpz.json"
    file.write_text(json.dumps(zero(3, zero_hpz_partition_size=size)))
    case = resolve(read_user_file(str(file)), model_shape("gpt2"), None, ProgramSettings(), to_box(box))
    fixes = [item.fix for item in findings(case) if item.key.endswith("zero_hpz_partition_size")]
    assert fixes == ([] if fix is None else [fix])


def test_blocks_are_those_of_the_installed_transformers() -> None:
    mappings = (
        "CAUSAL_LM MASKED_LM SEQ_TO_SEQ_CAUSAL_LM IMAGE_TEXT_TO_TEXT SEQUENCE_CLASSIFICATION SPEECH_SEQ_2_SEQ"
        " IMAGE_CLASSIFICATION MULTIMODAL_LM"
    )
    classes = dict[str, str]()
    for name in mappings.split():
        for model_type, cls in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").items():
            classes.setdefault(model_type, cls[0] if isinstance(cls, tuple) else cls)
    blocks = dict[str, list[str]]()
    for file in Path(transformers.__path__[0]).glob("models/*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        lists = re.findall(r"_no_split_modules = \[(.*?)\]", text, re.DOTALL)
        names = list(dict.fromkeys(re.findall(r'"(\w+)"', "".join(lists))))
        blocks |= dict.fromkeys(re.findall(r"^class (\w+)\(", text, re.MULTILINE), names)
    expected = {model_type: blocks[cls] for model_type, cls in classes.items() if blocks.get(cls)}
    assert explain_findings._blocks() == expected


@pytest.mark.parametrize(
    ("model", "names", "fix"),
    [
        ("qwen2.5-0.5b", "LlamaDecoderLayer", "set Qwen2DecoderLayer, or leave it out"),
        ("qwen2.5-0.5b", "Qwen2Decoder", "set Qwen2DecoderLayer, or leave it out"),
        ("qwen2.5-0.5b", "Qwen2DecoderLayer", None),
        # Other classes of a model may be wrapped, too.
        ("qwen2.5-0.5b", "Qwen2DecoderLayer,Embedding,Qwen2MLP", None),
        ("bert-large-uncased", "BertLayers", "set BertLayer, or leave it out"),
    ],
)
def test_a_class_that_the_model_does_not_have_is_refused(model, names, fix, tmp_path: Path, capsys) -> None:
    document = fsdp(fsdp_version=2, fsdp_transformer_layer_cls_to_wrap=names)
    case = make_case(tmp_path, document, model)
    wrong_blocks = [item for item in findings(case) if item.rule == "wrong-block"]
    assert [item.fix for item in wrong_blocks] == ([] if fix is None else [fix])
    file = str(tmp_path / "user.yaml")
    # Without a model no class is wrong.
    assert main(["explain", file, "--strict"]) == 0
    assert main(["explain", file, model, "--strict"]) == (0 if fix is None else 1)
    assert bool(wrong_blocks) == ("cls_to_wrap" in capsys.readouterr().out)


def test_accelerate_ends_with_an_error_for_a_class_that_the_model_does_not_have() -> None:
    class Plugin:
        auto_wrap_policy = staticmethod(transformer_auto_wrap_policy)
        transformer_cls_names_to_wrap = ("Qwen2DecoderLayer",)

    tiny = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=8))
    with pytest.raises(ValueError, match="Could not find the transformer layer class Qwen2DecoderLayer"):
        fsdp2_prepare_auto_wrap_policy(Plugin(), tiny)


def test_ranks_are_on_as_many_machines_as_the_file_says(tmp_path: Path) -> None:
    box, times = to_box("4x8xH100"), dict[int, float]()
    for machines in (1, 4):
        document = fsdp(fsdp_version=2) | {"num_processes": 8, "num_machines": machines}
        file = tmp_path / "accelerate.yaml"
        file.write_text(json.dumps(document))
        case = resolve(read_user_file(str(file)), model_shape("gpt2-xl"), None, ProgramSettings(), box)
        assert (case.request.box.nodes, case.request.box.gpus_per_node) == (machines, 8 // machines)
        (noted,) = [item.message for item in findings(case) if item.key == "num_processes"]
        assert noted.startswith("8 is the number of all machines together: 8 of the 32 GPUs are used")
        times[machines] = predict_time(case.request).step_s.value
    assert times[4] > 1.5 * times[1]


@pytest.mark.parametrize(("gpus", "refused"), [("0,1", True), ("0,1,2,3", False), ("all", False)])
def test_fewer_gpus_than_processes_are_refused(gpus: str, refused: bool, tmp_path: Path) -> None:
    document = fsdp(fsdp_version=2) | {"gpu_ids": gpus}
    keys = [item.key for item in findings(make_case(tmp_path, document)) if item.kind == "refused"]
    assert keys == ["gpu_ids"] * refused


def test_a_strict_check_has_both_errors_of_one_key_with_their_lines(tmp_path: Path, capsys) -> None:
    file = tmp_path / "accelerate.yaml"
    section = "deepspeed_config:\n  zero_stage: 3\n  gradient_accumulation_steps: -1\n"
    file.write_text(f"distributed_type: DEEPSPEED\nnum_processes: 8\ngradient_accumulation_steps: 4\n{section}")
    assert main(["explain", str(file), "--strict"]) == 1
    lines = re.findall(r":(\d+): error: refused: gradient_accumulation_steps: (.{8})", capsys.readouterr().out)
    assert lines == [("3", "is not a"), ("6", "the engi")]


@pytest.mark.parametrize(
    ("size", "count", "device", "says"),
    [
        # 8.03 B / 4 elements of 4 bytes in one sub-group, and at most 1e9 in the default ones.
        (10**14, 4, "nvme", ("2,007,565,312 elements: its 4 buffers", "pin 29.9 GiB")),
        (10**14, 8, "nvme", ("its 8 buffers", "pin 59.8 GiB")),
        (10**9, 4, "nvme", None),
        (10**8, 4, "nvme", None),
        (10**14, 4, "cpu", None),
    ],
)
def test_a_large_sub_group_has_the_host_memory_that_the_default_saves(size, count, device, says, tmp_path) -> None:
    offload = {"device": device, "nvme_path": "/nvme", "buffer_count": count}
    case = make_case(tmp_path, zero(3, sub_group_size=size, offload_optimizer=offload), LLAMA_8B, 4)
    notes = [finding for finding in findings(case) if finding.rule == "large-sub-groups"]
    assert [note.kind for note in notes] == ["noted"] * (says is not None)
    if says:
        assert all(words in notes[0].message for words in says)
        assert notes[0].fix == "set 1000000000, or leave it out"
        default = make_case(tmp_path, zero(3, offload_optimizer=offload), LLAMA_8B, 4)
        saved = count * 4 * (max(sub_groups(case.request)) - max(sub_groups(default.request)))
        assert case.memory.host_peak.value - default.memory.host_peak.value == pytest.approx(4 * saved, rel=0.01)


@pytest.mark.parametrize("stage", range(4))
def test_a_pipeline_is_in_conflict_with_the_stages_that_its_engine_rejects(stage: int, tmp_path: Path) -> None:
    from deepspeed.runtime.pipe import engine

    source = "".join(inspect.getsource(engine.PipelineEngine.__init__).split())
    assert "self.zero_optimization_stage()<ZeroStageEnum.gradients" in source
    case = make_case(tmp_path, {**zero(stage), "pipeline": {"stages": 2}})
    conflicts = [finding for finding in findings(case) if finding.rule == "pipeline-stage"]
    assert [(finding.kind, finding.key) for finding in conflicts] == [("conflict", "pipeline")] * (stage >= 2)
    assert all(finding.fix == "set stage 1, or take it out" for finding in conflicts)
    assert "pipeline-stage" not in {finding.rule for finding in findings(make_case(tmp_path, zero(stage)))}


def test_scaling_that_stage_1_does_not_read_and_a_narrow_reduction_are_named(tmp_path: Path) -> None:
    scaling = {"prescale_gradients": True, "gradient_predivide_factor": 8.0}
    for reduce_scatter, kinds in ((True, ["ineffective"] * 2), (False, [])):
        case = make_case(tmp_path, {**zero(1, reduce_scatter=reduce_scatter), **scaling})
        assert [item.kind for item in findings(case) if item.key in scaling] == kinds
    for sections, is_narrow in (({"bf16": {"enabled": True}}, True), ({"fp16": {"enabled": True}}, False)):
        settings = {ZERO: {"stage": 2}, MICRO_BATCH: 1, **sections, "communication_data_type": "fp16"}
        narrow = [item for item in findings(make_case(tmp_path, settings)) if item.rule == "narrow-reduction"]
        assert len(narrow) == is_narrow
