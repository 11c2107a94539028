"""`study explain`: names, defaults and statements about settings, against the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engines import ROOT
from study.advisor.explain import Explanation, answers, bucket_bytes, costs, on_host, whole_elements
from study.advisor.explain_case import ACCUMULATION, MICRO_BATCH, ConfigCase, Workload, settle
from study.advisor.explain_findings import ENGINES_OPTIMIZERS, TORCHS_OPTIMIZERS, findings
from study.advisor.user_settings import _SAID_TWICE, OFFLOADS, ZERO, known_settings, read_user_file
from study.cli import main
from study.config.errors import UserError
from study.predictor.memory import predict_memory
from study.predictor.shape import model_shape
from study.predictor.state import kept_whole, sub_groups

KNOWN = known_settings()
WORK = Workload()
PLAIN: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, ZERO: {"stage": 3}}


def case_of(
    folder: Path, settings: Mapping[str, Any], model: str = "gpt2", ranks: int = 4, name: str = "user.json"
) -> ConfigCase:
    file = folder / name
    # JSON is YAML.
    file.write_text(json.dumps(settings))
    return settle(read_user_file(str(file)), model_shape(model), ranks, WORK)


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {**PLAIN, ZERO: {"stage": stage, **settings}}


def kept_elements(case: ConfigCase) -> int:
    return sum(piece.elements for piece in kept_whole(case.request, case.settings))


def groups_of(case: ConfigCase) -> int:
    return len(sub_groups(case.request, case.settings))


def said(case: ConfigCase) -> dict[str, tuple[str, str]]:
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
    section: dict[str, Any] = {"deepspeed_config_file": str(tmp_path / "inner.json")}
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
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    # Each with an error of another kind.
    with pytest.raises((ValueError, AssertionError, DeepSpeedConfigError)):
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
        "allgather_bucket_size": "nothing", "sub_group_size": "nothing",
        "activation_checkpointing": "nothing", "my_note": "ignored",
    }  # fmt: skip
    assert told["sub_group_size"][1] == "stage 2 does not heed it; stage 3 would"


def test_fsdp_settings_that_version_2_drops_or_refuses_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import launch_command_parser

    flags = {action.dest for action in launch_command_parser()._actions if action.dest.startswith("fsdp_")}
    assert set(KNOWN["fsdp"]) == flags | {"fsdp_ignored_modules"}
    section = {
        "fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": True, "fsdp_offload_params": False, "reshard": 3,
    }  # fmt: skip
    file = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8, "fsdp_config": section}
    told = said(case_of(tmp_path, file, "gpt2-xl", ranks=8, name="fsdp.yaml"))
    assert {key: kind for key, (kind, _) in told.items()} == {
        "fsdp_backward_prefetch": "ignored", "fsdp_forward_prefetch": "refused", "fsdp_reshard": "ignored",
        "fsdp_reshard_after_forward": "noted",
    }  # fmt: skip
    # 1.56 B weights, gathered in 16 bits.
    assert "2.90 GiB more" in told["fsdp_reshard_after_forward"][1]
    with pytest.raises(ValueError, match="not yet implemented in FSDP2"):
        FullyShardedDataParallelPlugin(fsdp_version=2, forward_prefetch=True)
    assert FullyShardedDataParallelPlugin(fsdp_version=2, backward_prefetch="BACKWARD_PRE").backward_prefetch is None


def test_copies_of_a_mesh_are_told_and_one_that_is_not_the_ranks_is_refused(tmp_path: Path) -> None:
    def case(ranks: int, **sizes: int) -> ConfigCase:
        mesh = {f"parallelism_config_{key}_size": size for key, size in sizes.items()}
        file = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": mesh}
        return case_of(tmp_path, file, "gpt2-xl", ranks=ranks, name="mesh.yaml")

    four, two = case(8, dp_replicate=2, dp_shard=4), case(8, dp_replicate=4, dp_shard=2)
    assert said(four) == said(two) == {}
    assert two.state.params_device == pytest.approx(2 * four.state.params_device, rel=0.001)
    assert four.state.params_device == pytest.approx(case(4).state.params_device, rel=0.001)
    assert "copies of 4 ranks are 16" in said(case(8, dp_replicate=4, dp_shard=4))["parallelism_config"][1]
    assert said(case(8, dp_replicate=8))["parallelism_config.dp_shard_size"][0] == "refused"
    assert said(case(8, tp=2))["parallelism_config.tp_size"][0] == "noted"
    with pytest.raises(UserError, match="dp_shard_size: 0"):
        case(8, dp_replicate=2, dp_shard=0)


@pytest.mark.parametrize(
    ("name", "key"), [("ulysses_zero2", "parallelism_config.sp_size"), ("zero3_tp", "tensor_parallel")]
)
def test_a_team_that_is_not_read_is_noted_under_deepspeed_too(name: str, key: str) -> None:
    file = read_user_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"))
    assert [finding.key for finding in file.findings if finding.kind == "noted"] == [key]


def test_a_file_that_has_nothing_wrong_has_no_findings(tmp_path: Path) -> None:
    assert said(case_of(tmp_path, zero(2, reduce_bucket_size=1000, overlap_comm=True))) == {}


PROBES = json.loads((ROOT / "reports/engine_keys/keys.json").read_text())["probes"]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe["name"])
def test_what_was_measured_of_a_setting_is_what_is_told(probe: dict[str, Any], tmp_path: Path) -> None:
    name = "a.yaml" if "distributed_type" in probe["given"] else "a.json"
    # These end a run because of the program beside the file.
    beside = {
        "zero_allow_untested_optimizer false": "zero_allow_untested_optimizer",
        "the guide's settings and AdamW": "zero_force_ds_cpu_optimizer",
    }
    if probe["error"] and probe["name"] not in beside and not probe["name"].startswith("pipeline"):
        with pytest.raises(UserError):
            case_of(tmp_path, probe["given"], name=name)
        return
    case = case_of(tmp_path, probe["given"], name=name)
    told = said(case)
    assert not [finding for finding in told.values() if finding[0] == "refused"]
    if key := beside.get(probe["name"]):
        assert told[key][0] == "noted"
    for setting, value in probe["says"].items():
        if setting in ("bf16_enabled", "fp16_enabled"):
            assert case.request.precision == f"{setting[:4]}-engine"
        elif setting.startswith("zero."):
            assert told_of(case, setting.removeprefix("zero.")) == value
        elif setting in ("gradient_accumulation_steps", "gradient_clipping"):
            assert case.top[setting] == value


def told_of(case: ConfigCase, name: str) -> Any:
    value: Any = case.zero
    for part in name.split("."):
        value = value[part] if part in value else value[f"stage3_{part}"]
    return value


_FILLED_BY_THE_ENGINE = """
import json, sys, torch, transformers
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
PartialState(cpu=True)
import deepspeed
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
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
        "persistent": kept_elements(case), "sub_groups": groups_of(case),
        "bucket": bucket_bytes(case) / case.weight,
    }  # fmt: skip
    assert engine["reduce_bucket_size"] == 48 * 48
    assert groups_of(case) > 2


_WEIGHTS_THAT_ARE_LEFT = """
import sys, torch, transformers, weakref
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
PartialState(cpu=True)
import deepspeed
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=48, vocab_size=64))
left = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
configure = deepspeed.DeepSpeedEngine._configure_optimizer
def watched(engine, *given):
    types = {parameter.dtype for parameter in engine.module.parameters()}
    print("SAYS", sum(each() is not None for each in left), types == {torch.bfloat16})
    return configure(engine, *given)
deepspeed.DeepSpeedEngine._configure_optimizer = watched
print("SAYS", sum(each() is not None for each in left) == len(left))
accelerator.prepare(model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(torch.zeros(4, 2)))
"""


@pytest.mark.long
def test_no_fp32_weights_are_left_when_the_engine_makes_the_optimizer(tmp_path: Path) -> None:
    """Why loading and an optimizer on the host are not added up: on a GPU the 16-bit weights are not there either."""
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "ACCELERATE_USE_DEEPSPEED": "true"}
    done = subprocess.run(
        [sys.executable, "-c", _WEIGHTS_THAT_ARE_LEFT, str(tmp_path / "store")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert [each for each in done.stdout.splitlines() if each.startswith("SAYS")] == ["SAYS True", "SAYS 0 True"], (
        done.stderr[-3000:]
    )


LLAMA_8B = "layers=32,hidden=4096,heads=32,vocabulary=128256,inner=14336,key_value_heads=8"


def test_passes_of_a_step_that_the_file_leaves_open_are_told_and_asked_for(tmp_path: Path) -> None:
    def case(work: Workload = WORK, **settings: Any) -> ConfigCase:
        file = tmp_path / "a.json"
        file.write_text(json.dumps({**zero(1, reduce_bucket_size=525336576), **settings}))
        return settle(read_user_file(str(file)), model_shape(LLAMA_8B), 8, work)

    def reserved(case: ConfigCase) -> str:
        return f"{predict_memory(case.request).peak_reserved.value / 2**30:.2f}"

    one, eight = Workload(2048, accumulation=1), Workload(2048, accumulation=8)
    auto = {ACCUMULATION: "auto"}
    assert said(case(one, **auto))[ACCUMULATION] == (
        "filled", "auto: 1 is taken, and --accumulation says another; with more passes gradients wait beside the"
        " activations, and a rank reserves 59.66 GiB and not 44.11",
    )  # fmt: skip
    assert said(case(eight, **auto)) == said(case(one)) == said(case(eight, gradient_accumulation_steps=8)) == {}
    assert [reserved(case(one, **auto)), reserved(case(eight, **auto))] == ["44.11", "59.66"]
    assert said(case(eight))[ACCUMULATION][0] == "missing"
    # By the engine's own division.
    assert case(train_batch_size=64).request.accumulation == 8
    for work, key, says in (
        (eight, ACCUMULATION, "gradient_accumulation_steps 4, and --accumulation says 8"),
        (Workload(micro_batch=2), MICRO_BATCH, "train_micro_batch_size_per_gpu 1, and --micro-batch says 2"),
    ):
        with pytest.raises(UserError, match=says) as refusal:
            case(work, gradient_accumulation_steps=4)
        assert refusal.value.fix.endswith(f'make {key} "auto"')


def test_weights_are_gathered_on_the_first_host_where_the_file_says_so(tmp_path: Path) -> None:
    offload = {"device": "cpu"}
    whole = model_shape(LLAMA_8B).parameters * 2
    for gathers in (False, True):
        settings = zero(3, offload_optimizer=offload, stage3_gather_16bit_weights_on_model_save=gathers)
        case = case_of(tmp_path, settings, LLAMA_8B, 8)
        memory = predict_memory(case.request)
        assert memory.host_peak.value - memory.host_parts["train"] == whole * gathers


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


@pytest.mark.long
@pytest.mark.timeout(600)
def test_costs_and_what_is_gathered_twice_are_those_of_a_virtual_rank(tmp_path: Path) -> None:
    shipped = json.loads((ROOT / "accelerate_configs/deepspeed/zero3.json").read_text())[ZERO]
    sent = {}
    for name, changed in {
        "kept": {},
        # Alone neither lets go of anything: prefetching keeps what the distance would not, and the other way round.
        "no distance": {"stage3_max_reuse_distance": 0},
        "none live": {"stage3_max_live_parameters": 0},
        "let go": {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0, "reduce_bucket_size": 100_000},
    }.items():
        case = case_of(tmp_path, {**PLAIN, ZERO: shipped | changed}, "gpt-tiny")
        rank = virtual(tmp_path / name, *(f"{key}={value}" for key, value in changed.items()))
        assert rank["buffer_bytes"]["reduce_bucket.device"] == bucket_bytes(case)
        assert rank["kept_whole_bytes"] == kept_elements(case) * case.weight
        sent[name] = rank["sent_bytes_per_step"]
        waits = case.largest.elements > case.zero["reduce_bucket_size"]
        assert any("waits outside it" in cost.says for cost in costs(case)) == waits == (name == "let go")
        if not waits:
            assert rank["grads_in_bucket_bytes"] == case.shape.parameters * case.weight
        is_all_whole = whole_elements(case) + kept_elements(case) >= case.shape.parameters
        assert is_all_whole == (name != "let go")
    assert sent["kept"] == sent["no distance"] == sent["none live"] < 0.7 * sent["let go"]


@pytest.mark.parametrize(
    "name", ["zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu_optimizer", "zero3_cpu", "zero3_nvme", "zero3_cpu_nvme"]
)
def test_state_and_offloads_add_up_to_what_a_rank_holds(name: str, tmp_path: Path) -> None:
    case = case_of(tmp_path, json.loads((ROOT / f"accelerate_configs/deepspeed/{name}.json").read_text()))
    keys = {f"{ZERO}.stage", *(f"{ZERO}.{what}.{key}" for what in OFFLOADS for key in ("device", "ratio"))}
    of_state = [cost for cost in costs(case) if cost.key in keys]
    for place in ("device", "host", "nvme"):
        assert sum(getattr(cost, place) for cost in of_state) == pytest.approx(getattr(case.state, place))


def test_a_ratio_moves_whole_sub_groups(tmp_path: Path) -> None:
    one = case_of(tmp_path, zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}))
    assert (groups_of(one), on_host(one)) == (1, 1)
    several = case_of(tmp_path, zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}, sub_group_size=5_000_000))
    assert groups_of(several) > 4
    assert on_host(several) == groups_of(several) - groups_of(several) // 2
    assert answer(one, "ratio").figures == {
        "ratio_0": 0, "ratio_0.25": 1, "ratio_0.5": 1, "ratio_0.75": 1, "ratio_1": 1,
    }  # fmt: skip


def test_the_second_bucket_is_that_of_overlap_at_stages_1_and_2(tmp_path: Path) -> None:
    alone, overlapped = (case_of(tmp_path, zero(2, overlap_comm=value)) for value in (False, True))
    assert bucket_bytes(overlapped) == 2 * bucket_bytes(alone) == 2e9
    assert bucket_bytes(case_of(tmp_path, zero(3, overlap_comm=True))) == 1e9
    assert bucket_bytes(case_of(tmp_path, zero(2, contiguous_gradients=False))) == 0


def answer(case: ConfigCase, about: str) -> Explanation:
    return next(each for each in answers(case) if about in each.question)


def test_a_small_model_holds_more_under_stage_3_and_is_told_why(tmp_path: Path) -> None:
    small = case_of(tmp_path, zero(3, reduce_bucket_size=5_000_000), "bert-large-uncased", ranks=2)
    said = answer(small, "Does stage 3")
    assert said.figures["stage_3"] > said.figures["stage_2"]
    assert said.short.startswith("yes")
    assert any("elements at once" in line for line in said.because)
    assert any("its gradient waits whole" in line for line in said.because)
    assert (
        answer(small.at(reduce_bucket_size=500_000_000), "Does stage 3").because[2].endswith("neither stage saves any")
    )
    large = answer(case_of(tmp_path, zero(3), "gpt-13b", ranks=8), "Does stage 3")
    assert large.figures["stage_3"] < 0.8 * large.figures["stage_2"]
    assert large.short.startswith("no")


def test_what_does_not_fall_with_more_ranks_is_named(tmp_path: Path) -> None:
    case = case_of(tmp_path, zero(2), "bert-base-uncased", ranks=2)
    said = answer(case, "more ranks")
    assert said.figures["ranks_4"] > 0.8 * said.figures["ranks_2"]
    assert "buffers" in said.because[0]
    assert "500,000,000 elements wide whatever" in said.because[2]


def test_offload_under_stage_2_wants_the_more_host_memory_for_loading(tmp_path: Path) -> None:
    said = answer(
        case_of(tmp_path, zero(2, offload_optimizer={"device": "cpu"}), "gpt-7.5b", ranks=8), "more host memory"
    )
    assert said.figures["stage_2"] > 1.2 * said.figures["stage_3"]
    assert said.short.startswith("yes")


# Each line holds ten of the one before it.
MERGED = "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", '{"zero_optimization": {"stage": 2, "stage": 3}}', "says stage twice"),
        ("a.yaml", "distributed_type: NO\ndistributed_type: FSDP\n", "says distributed_type twice"),
        ("a.json", '{"zero_optimization": {"stge": 2}}', "stge is no setting"),
        ("a.json", '{"zero_optimisation": {"stage": 2}}', "zero_optimisation is no setting"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', "stage is 4"),
        ("a.json", '{"zero_optimization": {"reduce_bucket_size": -1}}', "reduce_bucket_size is -1"),
        ("a.json", '{"zero_optimization": {"contiguous_gradients": 7}}', "contiguous_gradients is 7"),
        ("a.json", '{"zero_optimization": {"offload_optimizer": "cpu"}}', "offload_optimizer is 'cpu'"),
        ("a.json", '{"zero_optimization": {"offload_param": {"device": "disk"}}}', "device is 'disk'"),
        ("a.json", "[1, 2]", "not a mapping"),
        ("a.yaml", "- a\n- b\n", "not a mapping"),
        ("a.json", "{", "not readable as JSON"),
        ("a.yaml", "a: [", "not readable as YAML"),
        ("a.yaml", f"a0: &a0 {{k: 1}}\n{MERGED}", "its aliases make more than 10000 values of it"),
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
        settle(read_user_file(str(tmp_path / name)), model_shape("gpt2"), 2, WORK)
    assert says in refusal.value.problem
    assert "\n" not in str(refusal.value)


def test_a_file_that_another_one_names_is_looked_for_where_accelerate_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ROOT / "accelerate_configs" / "zero3_cpu.yaml"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"deepspeed_config_file: .*zero3_cpu.json', and there is no file") as refusal:
        read_user_file(str(own))
    assert refusal.value.fix.endswith("the root of the repository")
    monkeypatch.chdir(ROOT)
    assert read_user_file(str(own)).launcher == "accelerate"


def test_a_folder_a_pipe_and_a_misspelt_name_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "mine.json").write_text("{}")
    for name, says in (("", "is a folder"), ("pipe", "no plain file"), ("mnie.json", "there is no file")):
        with pytest.raises(UserError, match=says) as refusal:
            read_user_file(str(tmp_path / name))
    assert "mine.json" in refusal.value.fix


@pytest.mark.parametrize(
    ("batch", "samples", "passes"),
    [
        ({"train_batch_size": 64}, 16, 1),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 8, 2),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}, 4, 4),
    ],
)
def test_a_whole_batch_is_cut_as_the_engine_cuts_it(
    batch: dict[str, int], samples: int, passes: int, tmp_path: Path
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    case = case_of(tmp_path, {"bf16": {"enabled": True}, **batch})
    assert (case.request.micro_batch, case.request.accumulation) == (samples, passes)
    engine = DeepSpeedConfig.__new__(DeepSpeedConfig)
    engine.world_size = case.ranks
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        setattr(engine, key, batch.get(key))
    engine._configure_train_batch_size()
    assert (engine.train_micro_batch_size_per_gpu, engine.gradient_accumulation_steps) == (samples, passes)


def test_what_auto_is_taken_for_is_what_is_told(tmp_path: Path) -> None:
    """The file of Hugging Face's documents names fp16 alone."""
    plain = {key: value for key, value in PLAIN.items() if key != "bf16"}
    assert case_of(tmp_path, {**plain, "fp16": {"enabled": "auto"}}).request.precision == "bf16-engine"
    assert case_of(tmp_path, {**plain, "fp16": {"enabled": False}}).request.precision == "fp32"
    accelerate = {"distributed_type": "DEEPSPEED", "mixed_precision": "fp8", "num_processes": 4,
                  "deepspeed_config": {"zero_stage": 2}}  # fmt: skip
    case = case_of(tmp_path, accelerate, name="fp8.yaml")
    assert case.request.precision == "bf16-engine"
    assert said(case)["mixed_precision"][0] == "noted"


def test_an_optimizer_that_is_not_adam_is_told_or_refused(tmp_path: Path) -> None:
    import inspect

    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    assert set(ENGINES_OPTIMIZERS) == set(DEEPSPEED_OPTIMIZERS)
    torchs = {name for name, found in vars(torch.optim).items() if inspect.isclass(found)} - {"Optimizer"}
    assert set(TORCHS_OPTIMIZERS) == torchs

    def kinds(name: str, **settings: Any) -> list[str]:
        case = case_of(tmp_path, {**PLAIN, "optimizer": {"type": name}, **settings})
        return [finding.kind for finding in findings(case) if finding.key == "optimizer.type"]

    assert kinds("AdamW") == []
    assert kinds("Lion") == ["noted"]
    assert kinds("SGD") == ["noted", "refused"]
    assert kinds("SGD", zero_allow_untested_optimizer=True) == ["noted"]
    assert kinds("Lamb") == ["noted", "refused"]
    assert kinds("Adam8bit") == kinds("OneBitAdam") == ["refused"]


def test_a_second_copy_that_does_not_divide_the_ranks_is_refused(tmp_path: Path) -> None:
    assert said(case_of(tmp_path, zero(3, zero_hpz_partition_size=3)))["zero_hpz_partition_size"][0] == "refused"
    for size in (2, 8):
        assert "zero_hpz_partition_size" not in said(case_of(tmp_path, zero(3, zero_hpz_partition_size=size)))


def test_buffers_that_do_not_hold_the_largest_parameter_are_refused(tmp_path: Path) -> None:
    """DeepSpeed asserts it while the weights are loaded: 50,400 tokens by 4096, and 1e8 elements by default."""
    file = zero(3, offload_param={"device": "nvme", "nvme_path": "/nvme"})
    alone = said(case_of(tmp_path, file, "gpt-j-6b", ranks=1))
    assert alone["offload_param.buffer_size"][0] == "refused"
    assert alone["offload_param.buffer_size"][1].endswith("has 206,438,400 elements")
    assert "offload_param.buffer_size" not in said(case_of(tmp_path, file, "gpt-j-6b"))


@pytest.mark.parametrize(
    ("asked", "key", "says"),
    [
        ({"fsdp_sharding_strategy": "NO_SHARD"}, "fsdp_sharding_strategy", "plain data parallelism"),
        ({"fsdp_sharding_strategy": 2}, "fsdp_sharding_strategy", "weights stay whole"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "fsdp_sharding_strategy", "the ranks of a machine"),
        ({"fsdp_reshard_after_forward": "NO_SHARD"}, "fsdp_version", "of version 2"),
        ({"fsdp_sharding_strategy": 9}, "fsdp_sharding_strategy", "ends with an error"),
        ({"fsdp_offload_params": True}, "fsdp_offload_params", "in host memory"),
        ({"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP"}, "fsdp_auto_wrap_policy", "gathered at once"),
    ],
)
def test_what_fsdp_does_otherwise_than_it_is_told_here_is_said(
    asked: dict[str, Any], key: str, says: str, tmp_path: Path
) -> None:
    file = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4, "fsdp_config": asked}
    case = case_of(tmp_path, file, name="fsdp.yaml")
    assert says in said(case)[key][1]
    ddp = case_of(tmp_path, {**file, "distributed_type": "MULTI_GPU", "fsdp_config": {}}, name="ddp.yaml")
    whole = predict_memory(ddp.request).peak_allocated.value
    is_whole = predict_memory(case.request).peak_allocated.value == whole
    assert is_whole == (asked == {"fsdp_sharding_strategy": "NO_SHARD"})


def test_passes_that_the_file_does_not_let_be_are_refused_as_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "whole.json"
    file.write_text(json.dumps({"train_batch_size": 8, "bf16": {"enabled": True}, MICRO_BATCH: None}))
    user = read_user_file(str(file))
    with pytest.raises(UserError, match="gradient_accumulation_steps 1, and --accumulation says 4"):
        settle(user, model_shape("gpt2"), 4, Workload(accumulation=4))
    assert settle(user, model_shape("gpt2"), 4, WORK).request.micro_batch == 2


def test_no_control_character_of_a_file_reaches_the_terminal(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW\x1b[31m\x07"}}))
    main(["explain", str(file), "gpt2", "--world-size", "2"])
    assert "\x1b" not in "".join(capsys.readouterr())


def test_a_job_larger_than_any_is_refused(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert main(["explain", str(file), "gpt2", "--world-size", str(10**12)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_full_output_is_one_line(tmp_path):
    command = [sys.executable, "-m", "study.cli", "predict", "--model_name_or_path", "gpt2", "--strategy", "zero2"]
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        result = subprocess.run(
            [*command, "--hardware", "H100"], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            cwd=ROOT,
        )  # fmt: skip
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "No space left on device. To fix it: make room there." in result.stderr
