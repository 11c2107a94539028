from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
import re
from typing import Any

import pytest

from study.cli import COMMANDS, PREDICTING, build_parser, main
from study.config import other_names
from study.config.errors import Unsupported, UserError, describe_cause
from study.config.flags import Parser, RunConfig, add_flags, parse_command_line, resolve_config
from study.config.places import REPOSITORY
from study.config.strategies import STRATEGY_NAMES
from study.config.strategy_names import apply_overrides, parse_overrides
from study.records.lock import LockHeldError

# Another value of every field, and the fields that make no other run.
OTHER_VALUES: dict[str, Any] = {
    "task": "gpt-wikitext",
    "scale": "paper",
    "model_name_or_path": "bert-base-uncased",
    "weights": "pretrained",
    "data": "hub",
    "dataset_config_name": "wikitext-103-raw-v1",
    "tokenizer_name": "gpt2",
    "seq_length": 65,
    "train_samples": 17,
    "eval_samples": 17,
    "global_batch_size": 32,
    "per_device_train_batch_size": 4,
    "num_train_epochs": 2,
    "max_steps": 3,
    "learning_rate": 0.5,
    "weight_decay": 0.5,
    "warmup_ratio": 0.5,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.0,
    "dropout": 0.5,
    "precision": "bf16-engine",
    "gradient_checkpointing": True,
    "attn_implementation": "eager",
    "torch_compile": True,
    "seed": 1,
    "eval_steps": 3,
    "logging_steps": 3,
    "device_memory_cap_gib": 3.0,
    "engine_override": ("a=1",),
    "checkpointing_steps": 3,
    "nvme_path": "elsewhere",
    "output_dir": "elsewhere",
    "overwrite_output_dir": True,
    "resume_from_checkpoint": "latest",
    "report_to": "tensorboard",
    "profile_steps": 3,
    "virtual_world_size": 8,
    "virtual_rank": 3,
    "group_size": 2,
    "optimizer": "muon",
    "bf16_states": True,
    "peft": "lora",
    "lora_rank": 4,
    "lora_alpha": 4,
}
NO_IDENTITY = {"nvme_path", "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to"}


def laptop(**changed: Any) -> RunConfig:
    return resolve_config(RunConfig(scale="laptop", **changed), accelerator_visible=False)


def as_command_line(config: RunConfig) -> list[str]:
    arguments: list[str] = []
    for key, value in dataclasses.asdict(config).items():
        if isinstance(value, bool):
            arguments.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, tuple):
            arguments += [part for item in value for part in (f"--{key}", item)]
        elif value is not None:
            arguments.append(f"--{key}={value}")
    return arguments


def test_the_command_line_sets_everything_of_a_config() -> None:
    config = dataclasses.replace(laptop(), **OTHER_VALUES)
    assert set(OTHER_VALUES) == {field.name for field in dataclasses.fields(RunConfig)}
    assert parse_command_line(as_command_line(config)) == config
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict())), "config.json") == config


def flag_row(action: argparse.Action) -> str:
    """Return a flag with its type and default, separated by tabs."""
    if isinstance(action, argparse.BooleanOptionalAction):
        kind = "switch"
    elif action.choices:
        kind = "|".join(action.choices)
    else:
        kind = str(action.metavar)
    if action.default == argparse.SUPPRESS:
        default = f"former name of --{action.dest}"
    else:
        default = "" if action.default in (None, []) else str(action.default)
    return "\t".join((", ".join(action.option_strings), kind, default))


def test_no_flag_of_the_trainer_appears_disappears_or_changes_unseen() -> None:
    """A flag, its type and its default are an interface: the list changes in the commit that changes one."""
    parser = Parser(prog="study/train.py", add_help=False)
    add_flags(parser)
    rows = ["flag\ttype\tdefault", *map(flag_row, parser._actions)]
    assert rows == (REPOSITORY / "tests/data/train_flags.tsv").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("stray", "stray"),
        ("--task bert", "--task"),
        ("--seq_length", "--seq_length"),
        ("--seq_len 64", "--seq_len"),  # no abbreviations
        ("--seq_length 1.5", "--seq_length"),
        (f"--seed {2**32}", "--seed"),
        ("--learning_rate nan", "--learning_rate nan"),
        ("--warmup_ratio 2", "--warmup_ratio 2"),
        ("--warmup_ratio 0.1 --lr_scheduler_type constant", "--warmup_ratio 0.1"),
        ("--dropout 1", "--dropout 1"),
        ("--device_memory_cap_gib 0", "--device_memory_cap_gib 0"),
        ("--engine_override a", "'a'"),
        ("--data x\udcff", "--data 'x\\udcff'"),
        ("--data ", "--data is empty"),
        ("--output_dir two\nlines", "--output_dir 'two\\nlines'"),
        ("--bf16_states --precision bf16", "--bf16_states"),
        ("--optimizer muon --max_grad_norm 1", "--max_grad_norm 1"),
    ],
)
def test_a_wrong_flag_is_refused_by_name_on_one_line(flags: str, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_command_line(flags.split(" "))
    assert words in refusal.value.problem
    assert refusal.value.fix
    assert "\n" not in str(refusal.value)


def test_every_flag_has_the_lower_bound_that_it_states() -> None:
    for field in dataclasses.fields(RunConfig):
        if (least := field.metadata["at_least"]) is not None:
            with pytest.raises(UserError, match=f"--{field.name} {least - 1}.* is out of range"):
                parse_command_line([f"--{field.name}={least - 1}"])
            parse_command_line([f"--{field.name}={least}"])


@pytest.mark.parametrize("task", ["bert-imdb", "gpt-wikitext"])
@pytest.mark.parametrize("scale", ["paper", "laptop"])
def test_every_default_is_resolved_at_every_scale(task: Any, scale: Any) -> None:
    optional = {
        "tokenizer_name",
        "per_device_train_batch_size",
        "device_memory_cap_gib",
        "output_dir",
        "resume_from_checkpoint",
        "virtual_world_size",
        "virtual_rank",
        "group_size",
    }
    config = resolve_config(RunConfig(task=task, scale=scale), accelerator_visible=False)
    assert {key for key, value in dataclasses.asdict(config).items() if value is None} == optional
    assert RunConfig.from_dict(config.to_dict(), "the test") == config


def test_auto_is_paper_with_an_accelerator_and_has_the_settings_of_the_studied_documents() -> None:
    assert [resolve_config(RunConfig(), visible).scale for visible in (True, False)] == ["paper", "laptop"]
    bert = resolve_config(RunConfig(scale="paper"), accelerator_visible=False)
    assert (bert.model_name_or_path, bert.weights, bert.data) == ("bert-large-uncased", "pretrained", "hub")
    assert (bert.train_samples, bert.eval_samples, bert.seq_length, bert.global_batch_size) == (800, 200, 128, 8)
    assert (bert.learning_rate, bert.lr_scheduler_type, bert.precision, bert.seed) == (5e-5, "linear", "fp32", 42)
    gemma = resolve_config(RunConfig(task="gpt-wikitext", scale="paper", model_name_or_path="google/gemma-2-9b"), True)
    assert (gemma.seq_length, gemma.precision) == (2048, "bf16")


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("micro", [None, 1, 2, 3, 5, 16])
def test_a_batch_divides_or_is_refused_with_a_fix_that_works(world_size: int, micro: int | None) -> None:
    refused = 0
    for batch in range(1, 50):
        config = laptop(global_batch_size=batch, per_device_train_batch_size=micro)
        try:
            plan = config.batch_plan(world_size)
        except UserError as error:
            refused += 1
            pattern = r"use (?:a multiple of \d+, such as|(\d+), or --global_batch_size) (\d+)"
            ((other_micro, other_batch),) = re.findall(pattern, error.fix)
            dataclasses.replace(config, global_batch_size=int(other_batch)).batch_plan(world_size)
            if other_micro:
                dataclasses.replace(config, per_device_train_batch_size=int(other_micro)).batch_plan(world_size)
        else:
            cut = plan.groups * plan.per_device_train_batch_size * plan.gradient_accumulation_steps
            assert cut == plan.global_batch_size == batch
            assert micro in (None, plan.per_device_train_batch_size)
    assert refused or (world_size, micro or 1) == (1, 1)


def test_micro_batches_partition_the_global_batch_at_every_cut() -> None:
    samples = random.Random(0).sample(range(1000), 48)
    for world_size in (1, 2, 3, 4, 6, 8, 16):
        for micro in (n for n in range(1, 49) if (48 // world_size) % n == 0):
            plan = laptop(global_batch_size=48, per_device_train_batch_size=micro).batch_plan(world_size)
            ranks = [plan.micro_batches(samples, rank) for rank in range(world_size)]
            assert {len(part) for parts in ranks for part in parts} == {micro}
            assert {len(parts) for parts in ranks} == {plan.gradient_accumulation_steps}
            # Interleaved by turn and rank, the samples of a step are in their order.
            rejoined = [index for turn in zip(*ranks, strict=True) for part in turn for index in part]
            assert rejoined == samples


def test_an_epoch_drops_its_incomplete_batch_and_max_steps_wins() -> None:
    assert laptop(global_batch_size=16, num_train_epochs=2).total_steps(50) == 6
    assert laptop(global_batch_size=16, max_steps=5).total_steps(50) == 5
    with pytest.raises(UserError, match="more than the 15 training samples"):
        laptop(global_batch_size=16).total_steps(15)


@pytest.mark.parametrize("field", sorted(OTHER_VALUES))
def test_the_run_id_changes_with_what_changes_the_run_and_with_nothing_else(field: str) -> None:
    config = laptop()
    assert getattr(config, field) != OTHER_VALUES[field]
    changed = dataclasses.replace(config, **{field: OTHER_VALUES[field]})
    assert (changed.run_id("zero3", 2) == config.run_id("zero3", 2)) is (field in NO_IDENTITY)


def test_the_run_id_names_the_strategy_and_the_world_and_no_folder() -> None:
    config = laptop(model_name_or_path="owner/some-model/")
    ids = {config.run_id(strategy, world) for strategy in ("zero2", "zero3") for world in (1, 2)}
    assert (len(ids), "/" in "".join(ids)) == (4, False)
    # A flag under its old name gives the id of its records.
    renamed = resolve_config(parse_command_line(["--scale=laptop", "--team_size=4"]), accelerator_visible=False)
    assert (renamed.group_size, renamed.run_id("tp", 4)) == (4, "bert-imdb-bert-tiny-tp-4x-e443afbd")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rte": 1.0}, "learning_rte"),
        ({"seq_length": "64"}, "seq_length"),
        ({"seq_length": 64.0}, "seq_length"),
        ({"seq_length": True}, "seq_length"),
        ({"learning_rate": "1e-3"}, "learning_rate"),
        ({"gradient_checkpointing": 1}, "gradient_checkpointing"),
        ({"precision": "bf8"}, "precision"),
        ({"precision": ["bf16"]}, "precision"),
        ({"engine_override": "a=1"}, "engine_override"),
        ({"engine_override": [1]}, "engine_override"),
        ({"output_dir": 3}, "output_dir"),
        ({3: 1}, "unknown key 3"),
        # As many values as a suite may have.
        ({"engine_override": [["x"] * 20_000]}, "engine_override"),
        ({"seed": ["x"] * 20_000}, "seed"),
    ],
)
def test_a_record_or_suite_with_an_unknown_key_or_a_wrong_type_is_refused_by_name(values, words):
    with pytest.raises(UserError, match=words) as refusal:
        RunConfig.from_dict(values, "suite.yaml")
    assert "suite.yaml" in refusal.value.problem
    assert len(refusal.value.problem) < 1000


def test_null_and_an_integer_for_a_float_are_accepted() -> None:
    config = RunConfig.from_dict({"learning_rate": 1, "seq_length": None, "engine_override": ["a=1"]}, "suite.yaml")
    assert config == RunConfig(learning_rate=1.0, engine_override=("a=1",))
    assert type(config.learning_rate) is float


def test_overrides_are_json_and_whole_floats_become_integers_and_other_settings_stay() -> None:
    # The second key has the beginning of the first.
    parsed = parse_overrides(["a.bc=5e6", "a.b=2", "c=true", 'd="x"', "e=0.5", "f=[1]"])
    assert json.dumps(parsed) == '{"a.bc": 5000000, "a.b": 2, "c": true, "d": "x", "e": 0.5, "f": [1]}'
    settings = {"zero_optimization": {"stage": 2}}
    assert apply_overrides(settings, ["zero_optimization.stage=3"]) == {"zero_optimization": {"stage": 3}}
    assert settings == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    "overrides",
    [["a"], ["=1"], ["a="], ["a=b"], ["a=null"], [".a=1"], ["a..b=1"], ["a.=1"], ["a=NaN"], ["a=1e999"],
     ["a=[Infinity]"], ['a={"b": 1e999}'], ["a=1", "a=2"], ["a=1", "a.b=2"], ["a.b=2", "a=1"]],
)  # fmt: skip
def test_an_empty_or_contradictory_override_is_refused(overrides: list[str]) -> None:
    with pytest.raises(UserError, match="--engine_override"):
        parse_overrides(overrides)


def test_a_flag_is_accepted_with_hyphens_and_listed_with_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--max{}steps", "3", "--no-gradient{}checkpointing", "--engine{}override=a-b.c-d=1"]
    hyphens, underscores = (parse_command_line([word.format(mark) for word in words]) for mark in "-_")
    assert hyphens == underscores
    assert hyphens.engine_override == ("a-b.c-d=1",)
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        flags = re.findall(r"--[a-z][a-z_-]+", capsys.readouterr().out.partition("options:")[2])
        assert not [flag for flag in flags if "-" in flag[2:].removeprefix("no-")], name


def test_a_refusal_is_copied_with_its_problem_and_its_fix() -> None:
    """Test a copy in place of a pickle between processes: both call __reduce__."""
    locked = LockHeldError("runs/laptop", {"pid": 12, "host": "elsewhere"})
    for error in (UserError("a is wrong", "use b"), Unsupported("no GPU", "use a CPU"), locked):
        copied = copy.copy(error)
        assert isinstance(copied, UserError)
        assert (copied.problem, copied.fix, str(copied)) == (error.problem, error.fix, str(error))
    assert isinstance(copy.copy(Unsupported("no GPU", "use a CPU")), Unsupported)


def test_what_other_programs_call_something_leads_to_what_exists_here() -> None:
    parsers = build_parser((*PREDICTING, "releases"))[1].choices
    flags = {flag for parser in parsers.values() for flag in parser._option_string_actions}
    for name, meant in other_names.FLAGS.items():
        # None is a flag of every command: a name that is known is never refused.
        assert not all(f"--{name}" in parsers[command]._option_string_actions for command in PREDICTING), name
        assert {word for text in meant for word in text.split() if word[:2] == "--"} <= flags, name
    for flag, names in other_names.VALUES.items():
        choices = {value for name in PREDICTING for value in parsers[name]._option_string_actions[flag].choices or ()}
        for name, meant in names.items():
            assert {text.split()[0] for text in meant} <= choices, (flag, name)
    for name in ("zero++", "ZeRO-Infinity", "FULL_SHARD", "hybrid shard", "DataParallel", "none"):
        (strategy,) = other_names.find_strategies(name) or ()
        assert strategy in STRATEGY_NAMES


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("no file /home/someone/.cache/hub/model.py", "ValueError: no file model.py"),
        ("(/usr/lib/python3/torch/nn.py:12) and/or [2/3]", "ValueError: (nn.py:12) and/or [2/3]"),
        (r"C:\Users\me\x.py is bad", "ValueError: x.py is bad"),
        ("see https://huggingface.co/docs/hub", "ValueError: see https://huggingface.co/docs/hub"),
        ("first\nsecond", "ValueError: first"),
        ("", "ValueError"),
    ],
)
def test_a_cause_has_its_type_and_no_folder_of_this_machine(message: str, cause: str) -> None:
    assert describe_cause(ValueError(message)) == cause
    assert len(describe_cause(ValueError("x" * 999))) < 200
