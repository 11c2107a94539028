"""`study explain`: names, defaults and statements about settings, against the real engine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engines import ROOT
from study.errors import UserError
from study.predict.explain import bucket_bytes, costs, gathered_elements, on_host_share, persistent_elements, sub_groups
from study.predict.explain_case import Case, settle
from study.predict.explain_findings import findings
from study.predict.shape import model_shape
from study.predict.user_settings import _SAID_TWICE, OFFLOADS, ZERO, known_settings, read_user_file

KNOWN = known_settings()
PLAIN: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, ZERO: {"stage": 3}}


def case_of(
    folder: Path, settings: Mapping[str, Any], model: str = "gpt2", ranks: int = 4, name: str = "user.json"
) -> Case:
    file = folder / name
    # JSON is YAML.
    file.write_text(json.dumps(settings))
    return settle(read_user_file(str(file)), model_shape(model), ranks, None)


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {**PLAIN, ZERO: {"stage": stage, **settings}}


def said(case: Case) -> dict[str, tuple[str, str]]:
    return {finding.key.removeprefix(f"{ZERO}."): (finding.kind, finding.says) for finding in findings(case)}


def test_every_setting_of_the_engines_zero_is_known_with_its_default() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    for section, engine in (
        (ZERO, DeepSpeedZeroConfig), (f"{ZERO}.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        (f"{ZERO}.offload_param", DeepSpeedZeroOffloadParamConfig),
    ):  # fmt: skip
        fields = {field.alias or name: field for name, field in engine.model_fields.items()}
        assert KNOWN[section].keys() == fields.keys()
        for name, entry in KNOWN[section].items():
            if name != "leaf_module" and "is_now" not in entry:
                assert entry["default"] == fields[name].default, name


def test_every_key_that_the_engine_looks_for_is_known() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    asked: set[str] = set()

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

        def __getitem__(self, key: str) -> Any:
            asked.add(key)
            return super().__getitem__(key)

        # `in param_dict.keys()` is how the engine asks for some.
        def keys(self) -> Any:
            return self

        def __copy__(self) -> Watched:
            return Watched(self)

    DeepSpeedConfig(Watched({"train_micro_batch_size_per_gpu": 1}))
    assert {"zero_optimization", "aio", "bf16", "optimizer"} < asked
    assert asked <= {*KNOWN["top"], *KNOWN["others"]}


def test_accelerates_keys_are_known() -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    # Two of an older form it turns into today's.
    assert set(KNOWN["accelerate"]) == {*ClusterConfig.__dataclass_fields__, "dynamo_backend", "fp16"}


@pytest.mark.parametrize("key", sorted(_SAID_TWICE))
def test_what_accelerate_refuses_beside_a_deepspeed_file_is_told(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import DeepSpeedPlugin

    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", f"deepspeed_config_file,{key}")
    with pytest.raises(ValueError, match="will be ignored"):
        DeepSpeedPlugin(hf_ds_config=dict(PLAIN))
    (tmp_path / "inner.json").write_text(json.dumps(PLAIN))
    section = {"deepspeed_config_file": str(tmp_path / "inner.json")}
    top: dict[str, Any] = {"distributed_type": "DEEPSPEED", "num_processes": 4}
    (top if key == "mixed_precision" else section)[key] = "bf16" if key == "mixed_precision" else 1
    case = case_of(tmp_path, {**top, "deepspeed_config": section}, name="accelerate.yaml")
    assert said(case)[key][0] == "refused"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({**PLAIN, "amp": {"enabled": True}}, "amp"),
        ({**PLAIN, "train_batch_size": 7, "gradient_accumulation_steps": 2}, "train_batch_size"),
        (zero(3, compute_grad_norm=False), "compute_grad_norm"),
        (zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "offload_optimizer.ratio"),
        ({**PLAIN, "fp16": {"enabled": True}}, "fp16"),
        (zero(2, cpu_offload=True, offload_optimizer={"device": "cpu"}), "cpu_offload"),
    ],
)
def test_what_the_engine_refuses_is_told(settings: dict[str, Any], key: str, tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    with pytest.raises(Exception):  # noqa: B017  # each refuses with an error of another kind
        DeepSpeedConfig(json.loads(json.dumps(settings)))
    assert said(case_of(tmp_path, settings))[key][0] in ("refused", "conflict")


def test_settings_that_do_nothing_are_named_with_the_reason(tmp_path: Path) -> None:
    told = said(
        case_of(
            tmp_path,
            zero(
                2, stage3_max_live_parameters=10, round_robin_gradients=True, allgather_bucket_size=5,
                offload_param={"device": "cpu"}, sub_group_size=7,
            )
            | {"activation_checkpointing": {"partition_activations": True}, "my_note": "hello"},
        )
    )  # fmt: skip
    assert {key: kind for key, (kind, _) in told.items()} == {
        "stage3_max_live_parameters": "nothing", "round_robin_gradients": "nothing", "offload_param": "nothing",
        "offload_param.device": "nothing", "allgather_bucket_size": "nothing", "sub_group_size": "nothing",
        "activation_checkpointing": "nothing", "my_note": "ignored",
    }  # fmt: skip
    assert told["sub_group_size"][1] == "stage 2 does not heed it; stage 3 would"


def test_a_file_that_has_nothing_wrong_has_no_findings(tmp_path: Path) -> None:
    assert said(case_of(tmp_path, zero(2, reduce_bucket_size=1000, overlap_comm=True))) == {}


_FILLED_BY_THE_ENGINE = """
import json, sys, torch, transformers
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
PartialState(cpu=True)
import deepspeed
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, init_method=f"file://{sys.argv[2]}",
                           rank=0, world_size=1)
plugin = DeepSpeedPlugin(hf_ds_config=json.load(open(sys.argv[1])))
accelerator = Accelerator(deepspeed_plugin=plugin)
config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=48, vocab_size=64, n_positions=32)
model = transformers.GPT2LMHeadModel(config)
loader = torch.utils.data.DataLoader(torch.zeros(4, 2), batch_size=2)
engine, *_ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
zero = engine._config.zero_config
names = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "overlap_comm",
         "gather_16bit_weights_on_model_save", "max_reuse_distance")
print("SAYS", json.dumps({name: getattr(zero, name) for name in names}
                         | {"persistent": sum(each.ds_numel for each in engine.optimizer.persistent_parameters),
                            "sub_groups": len(engine.optimizer.fp16_groups),
                            "bucket": sum(each.buffer.numel() for each in engine.optimizer.ipg_buckets.values())}))
"""


def test_auto_is_what_accelerate_fills_in_and_the_engine_holds_what_is_told(tmp_path: Path) -> None:
    settings = zero(
        3, reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto", stage3_param_persistence_threshold="auto",
        stage3_gather_16bit_weights_on_model_save="auto", sub_group_size=9_000,
    )  # fmt: skip
    settings |= {"bf16": {"enabled": "auto"}, "train_batch_size": "auto", "gradient_accumulation_steps": "auto"}
    model = "layers=1,hidden=48,heads=2,vocabulary=64,positions=32"
    case = case_of(tmp_path, settings, model, ranks=1)
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "ACCELERATE_USE_DEEPSPEED": "true"}
    done = subprocess.run(
        [sys.executable, "-c", _FILLED_BY_THE_ENGINE, str(tmp_path / "user.json"), str(tmp_path / "store")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    line = next((each for each in done.stdout.splitlines() if each.startswith("SAYS")), None)
    assert line is not None, done.stderr[-3000:]
    engine = json.loads(line.removeprefix("SAYS"))
    assert engine == {
        "reduce_bucket_size": case.zero["reduce_bucket_size"],
        "prefetch_bucket_size": case.zero["stage3_prefetch_bucket_size"],
        "param_persistence_threshold": case.zero["stage3_param_persistence_threshold"],
        "overlap_comm": case.zero["overlap_comm"],
        "gather_16bit_weights_on_model_save": case.zero["stage3_gather_16bit_weights_on_model_save"],
        "max_reuse_distance": case.zero["stage3_max_reuse_distance"],
        "persistent": persistent_elements(case), "sub_groups": sub_groups(case),
        "bucket": bucket_bytes(case) / case.weight,
    }  # fmt: skip
    assert engine["reduce_bucket_size"] == 48 * 48 and sub_groups(case) > 2


def test_an_auto_that_nobody_fills_in_is_refused_by_accelerate(tmp_path: Path) -> None:
    from accelerate import DeepSpeedPlugin

    settings = zero(3, stage3_max_live_parameters="auto")
    with pytest.raises(ValueError, match="not found in kwargs"):
        DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(settings))).deepspeed_config_process(must_match=False)
    (tmp_path / "inner.json").write_text(json.dumps(settings))
    section = {"deepspeed_config_file": str(tmp_path / "inner.json")}
    case = case_of(tmp_path, {"distributed_type": "DEEPSPEED", "deepspeed_config": section}, name="a.yaml")
    assert said(case)["stage3_max_live_parameters"][0] == "refused"
    assert said(case_of(tmp_path, settings))["stage3_max_live_parameters"][0] == "filled"


def virtual(folder: Path, *settings: str, ranks: int = 4) -> dict[str, Any]:
    """Of stage 3 with these settings; the rank is real, and its peers are not there."""
    overrides = [part for setting in settings for part in ("--engine_override", f"{ZERO}.{setting}")]
    done = subprocess.run(
        [
            sys.executable, "-m", "study.cli", "virtual", "--strategy", "zero3", "--world-size", str(ranks),
            "--model_name_or_path", "gpt-tiny", "--precision", "bf16", "--seq_length", "16", "--max_steps", "3",
            "--per_device_train_batch_size", "1", "--json", "--runs-dir", str(folder), *overrides,
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(600)
def test_costs_and_what_is_gathered_twice_are_those_of_a_virtual_rank(tmp_path: Path) -> None:
    shipped = json.loads((ROOT / "accelerate_configs/deepspeed/zero3.json").read_text())[ZERO]
    sent = {}
    for name, changed in {
        "kept": {},
        # Alone neither lets go of anything: prefetching keeps what the reuse distance would not, and the other way round.
        "no distance": {"stage3_max_reuse_distance": 0},
        "none live": {"stage3_max_live_parameters": 0},
        "let go": {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0, "reduce_bucket_size": 100_000},
    }.items():
        case = case_of(tmp_path, {**PLAIN, ZERO: shipped | changed}, "gpt-tiny")
        rank = virtual(tmp_path / name, *(f"{key}={value}" for key, value in changed.items()))
        assert rank["buffer_bytes"]["reduce_bucket.device"] == bucket_bytes(case)
        assert rank["kept_whole_bytes"] == persistent_elements(case) * case.weight
        sent[name] = rank["sent_bytes_per_step"]
        in_bucket = rank["grads_in_bucket_bytes"]
        whole = case.largest > case.zero["reduce_bucket_size"]
        assert any("waits outside it" in cost.says for cost in costs(case)) == whole
        assert in_bucket == (case.shape.parameters * case.weight if not whole else in_bucket)
        all_of_it = gathered_elements(case) == case.shape.parameters
        assert all_of_it == (name != "let go")
    assert sent["kept"] == sent["no distance"] == sent["none live"] < 0.7 * sent["let go"]


def test_state_and_offloads_add_up_to_the_engines_arithmetic(tmp_path: Path) -> None:
    for name in (
        "zero1",
        "zero2",
        "zero3",
        "zero2_cpu",
        "zero3_cpu_optimizer",
        "zero3_cpu",
        "zero3_nvme",
        "zero3_cpu_nvme",
    ):
        shipped = json.loads((ROOT / f"accelerate_configs/deepspeed/{name}.json").read_text())
        case = case_of(tmp_path, shipped)
        keys = {f"{ZERO}.stage", *(f"{ZERO}.{what}.device" for what in OFFLOADS)}
        of_state = [cost for cost in costs(case) if cost.key in keys]
        assert sum(cost.device for cost in of_state) == pytest.approx(case.state.device * case.shape.parameters, abs=8)
        assert sum(cost.host for cost in of_state) == pytest.approx(case.state.host * case.shape.parameters, abs=8)


def test_a_ratio_moves_whole_sub_groups(tmp_path: Path) -> None:
    one = case_of(tmp_path, zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}))
    assert (sub_groups(one), on_host_share(one)) == (1, 1.0)
    several = case_of(tmp_path, zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}, sub_group_size=5_000_000))
    assert sub_groups(several) > 4
    assert on_host_share(several) == pytest.approx(0.5, abs=1 / sub_groups(several))


def test_the_second_bucket_is_that_of_overlap_at_stages_1_and_2(tmp_path: Path) -> None:
    alone, overlapped = (case_of(tmp_path, zero(2, overlap_comm=value)) for value in (False, True))
    assert bucket_bytes(overlapped) == 2 * bucket_bytes(alone) == 2e9
    assert bucket_bytes(case_of(tmp_path, zero(3, overlap_comm=True))) == 1e9
    assert bucket_bytes(dataclasses.replace(alone, zero={**alone.zero, "contiguous_gradients": False})) == 0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", '{"zero_optimization": {"stage": 2, "stage": 3}}', "says stage twice"),
        ("a.yaml", "distributed_type: NO\ndistributed_type: FSDP\n", "says distributed_type twice"),
        ("a.json", '{"zero_optimization": {"stge": 2}}', "stge is no setting"),
        ("a.json", '{"zero_optimisation": {"stage": 2}}', "zero_optimisation is no setting"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', "stage is 4"),
        ("a.json", '{"zero_optimization": {"reduce_bucket_size": -1}}', "reduce_bucket_size is -1"),
        ("a.json", '{"zero_optimization": {"overlap_comm": true, "contiguous_gradients": 7}}', "contiguous_gradients is 7"),
        ("a.json", '{"zero_optimization": {"offload_optimizer": "cpu"}}', "offload_optimizer is 'cpu'"),
        ("a.json", '{"zero_optimization": {"offload_param": {"device": "disk"}}}', "device is 'disk'"),
        ("a.json", "[1, 2]", "not a mapping"),
        ("a.yaml", "- a\n- b\n", "not a mapping"),
        ("a.json", "{", "not readable as JSON"),
        ("a.yaml", "a: [", "not readable as YAML"),
        ("a.yaml", "distributed_type: NCCL\n", "NCCL"),
        ("a.yaml", "distributed_type: DEEPSPEED\n", "has no deepspeed_config"),
        ("a.yaml", "distributed_type: NO\nnum_proceses: 2\n", "num_proceses is no setting"),
        ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: none.json}\n", "no file"),
        ("a.json", "[" * 100_000, "not readable as JSON"),
        ("a.json", '{"bf16": true}', "bf16 is True"),
    ],
)  # fmt: skip
def test_a_file_that_nobody_can_read_is_refused_in_one_line(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as refusal:
        settle(read_user_file(str(tmp_path / name)), model_shape("gpt2"), 2, None)
    assert says in refusal.value.problem and "\n" not in str(refusal.value)


def test_a_folder_a_pipe_and_a_misspelt_name_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "mine.json").write_text("{}")
    for name, says in (("", "is a folder"), ("pipe", "no plain file"), ("mnie.json", "there is no file")):
        with pytest.raises(UserError, match=says) as refusal:
            read_user_file(str(tmp_path / name))
    assert "mine.json" in refusal.value.fix
