"""Read the file of a trainer (axolotl, LLaMA-Factory, TRL, TrainingArguments) as flags and an engine's file.

Its keys are in trainer_keys.py, a line each.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from study.advisor.explain_case import ACCUMULATION, MICRO_BATCH
from study.advisor.explain_check import find_line, in_file
from study.advisor.explain_findings import saves_whole_model
from study.advisor.other_programs import check_program
from study.advisor.trainer_keys import (
    CHANGE_THE_PEAK,
    FREEZES,
    FROZEN_PARTS,
    GRPO_KEYS,
    GRPO_LENGTHS,
    HF_OPTIMIZERS,
    KTO_KEYS,
    KTO_LOSSES,
    LANGUAGE_MODEL,
    OF_CLASSIFIERS,
    OTHER_FIELDS,
    REMOVED_HF_KEYS,
    SHARED_WITH_TRL,
    TRAINERS,
    Convert,
    Counted,
    Trainer,
    is_on,
    to_count,
    to_loaded,
    to_optimizer,
)
from study.advisor.user_settings import (
    FILLED_BY_TRAINER,
    NOT_MODELLED,
    ZERO,
    Finding,
    UserFile,
    deepspeed_file,
    is_of_a_trainer,
    read_fsdp,
    read_mapping,
    read_user_file,
    run_by_trainer,
    section_entries,
)
from study.config.errors import MissingFile, UserError, WrongFile, clip, did_you_mean
from study.config.yaml_sections import load_package_yaml
from study.host.folders import resolve_path
from study.predictor.live import has_towers
from study.predictor.lora_targets import ALL_LINEAR
from study.predictor.shape import ModelShape, can_adapt
from study.releases.causes import Loop
from study.workloads.presets import find_base, find_known, find_preset, hub_id, published_type, split_4_bits

# Rule of the findings without whose settings the verdict is.
WITHOUT = "peak-not-modelled"
# Names whose ratio (difflib) is at least this are the same one, misspelt.
_MISSPELLED = 0.8
# Rule of the findings that are errors of the trainer, not of the engine.
BY_TRAINER = "trainer"
# Fields of adapters alone.
_OF_LORA = (
    *("lora_rank", "lora_targets", "lora_modules_to_save", "lora_dropout", "lora_dora", "adapters_in_16_bits"),
    *("quantization", "double_quant"),
)
# Keys of TrainingArguments' fsdp_config that Accelerate has under no name, or that change no byte of a rank.
_OTHER_FSDP_KEYS = {
    *("version", "limit_all_gathers", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "cpu_offload"),
    *("final_state_dict_type", "mixed_precision_policy", "cpu_offload_pin_memory", "transformer_cls_to_wrap"),
}
# Keys of LLaMA-Factory's v1, whose files have other names for all.
_OF_OTHER_FORMATS = {"dist_config", "train_dataset", "model_class"}
_SHARDINGS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_SHARDING, _RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"


class Unset(str):
    """A default of a flag, which a trainer's file replaces; a word of the command line is not replaced."""


@dataclasses.dataclass(frozen=True)
class TrainerFile:
    """A trainer's file, with the values of its keys by field of Workload."""

    name: str
    trainer: Trainer
    document: Mapping[str, Any]
    text: str
    values: Mapping[str, Any]
    # The key that set a field; a default has none.
    keys: Mapping[str, str]
    findings: tuple[Finding, ...]

    @property
    def recomputes_by_hf(self) -> bool:
        """Whether gradient checkpointing is on by a key of TrainingArguments, or by a trainer's default of it."""
        has_key = any(key.theirs == "gradient_checkpointing" for key in self.trainer.keys)
        return self.trainer.has_hf_keys and has_key and bool(self.values.get("gradient_checkpointing"))

    @property
    def loop(self) -> Loop | None:
        """The loop of transformers' Trainer, of which these trainers derive theirs; LLaMA-Factory's PPO has its own."""
        return None if self.document.get("stage") == "ppo" else "trainer"

    def noted(self, key: str, message: str, rule: str = "not-modelled") -> Finding:
        return self._finding("noted", key, message, "", rule)

    def not_counted(self, key: str, message: str) -> Finding:
        """Return the finding of an effect that the figures lack."""
        return self.noted(key, message, WITHOUT if key in CHANGE_THE_PEAK else "not-modelled")

    def refused(self, key: str, message: str, fix: str) -> Finding:
        return self._finding("refused", key, message, fix, BY_TRAINER)

    def ignored(self, key: str, message: str, fix: str) -> Finding:
        return self._finding("ignored", key, message, fix, BY_TRAINER)

    def filled(self, key: str, message: str) -> Finding:
        return self._finding("filled", key, message, "", "")

    def conflict(self, key: str, message: str, fix: str, rule: str) -> Finding:
        return self._finding("conflict", key, message, fix, rule)

    def _finding(self, kind: Any, key: str, message: str, fix: str, rule: str) -> Finding:
        return Finding(kind, key, message, fix, rule, self.name, find_line(self.text, key) or 1)


def read_trainer_file(name: str, trainer: Trainer | None = None) -> TrainerFile | None:
    """Return a trainer's file; None for one of another program, or of a trainer that is not known. `trainer`: whose it
    is, in place of the one that its keys name.

    Raise UserError if it is unreadable, or for a value that the trainer does not take.
    """
    set_twice = list[Finding]()
    document = read_mapping(name, set_twice, None)
    if not is_of_a_trainer(document):
        return None
    check_program(name, document)
    trainer = trainer or next((trainer for trainer in TRAINERS if trainer.matches(document)), None)
    if trainer is None or _OF_OTHER_FORMATS & document.keys():
        return None
    text = resolve_path(name).read_text(encoding="utf-8")
    values, keys = dict[str, Any](), dict[str, str]()
    file = TrainerFile(name, trainer, document, text, values, keys, ())
    findings = [file.noted(item.key, "is set twice: the last one is read", item.rule) for item in set_twice if item.key]
    for key in trainer.keys:
        if document.get(key.theirs) is None:
            continue
        value = converted(file, key.theirs, key.convert)
        if isinstance(value, Counted):
            findings.append(file.not_counted(key.theirs, value.text))
            value = value.value
        if key.ours and value is not None and key.ours not in values:
            values[key.ours], keys[key.ours] = value, key.theirs
    for theirs, what in trainer.not_modelled.items():
        value = document.get(theirs)
        # A size of 1 is off.
        if value and (value is True or value not in (1, "1", "false", "none")):
            findings.append(file.not_counted(theirs, f"{what}; {NOT_MODELLED}"))
    findings += _read_kto(file, values, keys)
    if values.get("objective") == "grpo":
        _read_grpo(file, values, keys)
    findings += [*_trainer_findings(file, values), *_both_precisions(file), *_hf_findings(file), *_misspelled(file)]
    return dataclasses.replace(file, findings=tuple(findings), values=_settle(trainer, document, values))


def reread_for(file: TrainerFile, model: ModelShape) -> TrainerFile | None:
    """Return the file as that of a classifier's own script, if the model is a classifier of tokens and no key is TRL's
    alone; else None."""
    marks = file.trainer.marks & file.document.keys()
    if file.trainer.name != "TRL" or model.family != "sequence-classification" or not marks <= SHARED_WITH_TRL:
        return None
    return read_trainer_file(file.name, OF_CLASSIFIERS) if model.encoder_reads_tokens else None


def converted(file: TrainerFile, name: str, convert: Convert) -> Any:
    """Return the converted value of a key; raise UserError if the trainer does not take it."""
    try:
        return convert(file.document[name])
    except ValueError as error:
        line = find_line(file.text, name) or 1
        problem = f"{file.name}:{line}: {name} is {clip(file.document[name])}"
        raise UserError(problem, f"it should be {error}") from None


def is_grpo(file: TrainerFile) -> bool:
    """Whether a file is for TRL's GRPOTrainer."""
    return file.trainer.name == "TRL" and any(file.document.get(name) is not None for name in GRPO_KEYS)


def _read_grpo(file: TrainerFile, values: dict[str, Any], keys: dict[str, str]) -> None:
    """Set the tokens of a sample, prompt and completion, and the reference model, which TRL loads unless beta is 0."""
    document, is_set = file.document, [name for name in GRPO_LENGTHS if file.document.get(name) is not None]
    lengths = {**GRPO_LENGTHS, **{name: converted(file, name, to_count) for name in is_set}}
    values["seq_length"] = sum(lengths.values())
    if is_set:
        keys["seq_length"] = is_set[0]
    if document.get("beta"):
        keys["objective"] = "beta"
    else:
        del values["objective"]


def is_kto(file: TrainerFile) -> bool:
    """Whether a file is for TRL's KTOTrainer."""
    has_its_key = any(file.document.get(name) is not None for name in KTO_KEYS)
    return file.trainer.name == "TRL" and (has_its_key or str(file.document.get("loss_type")) in KTO_LOSSES)


def _read_kto(file: TrainerFile, values: dict[str, Any], keys: dict[str, str]) -> Iterator[Finding]:
    """Set KTO's reference model, which TRL loads unless its log-probabilities are precomputed, and yield needs of its
    loss (KTOTrainer in trl/trainer/kto_trainer.py); nothing for other trainers."""
    if not is_kto(file):
        return
    keys["objective"] = next(name for name in (*KTO_KEYS, "loss_type") if file.document.get(name) is not None)
    if file.document.get("precompute_ref_log_probs"):
        values.pop("objective", None)
    else:
        values["objective"] = "kto"
    if file.document.get("loss_type", "kto") != "kto":
        return
    if values.get("micro_batch") == 1:
        message = "TRL ends with an error at 1: the loss compares completions with others of the micro-batch"
        yield file.refused(keys["micro_batch"], message, "set 2 or more")
    passes = "forward passes of mismatched completions, whose time is not counted"
    yield file.noted(keys["objective"], f"a step has further {passes}; {NOT_MODELLED}")


# Rule of losses that other samples of a micro-batch take part in.
CONTRASTIVE = "contrastive"


def _trainer_findings(file: TrainerFile, values: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield bytes of a trainer that are not predicted, and that accumulation changes a contrastive loss."""
    method = file.document.get("quantization_method")
    if "quantization" in file.keys and method is not None and str(method).lower() != "bnb":
        message = f"{clip(method)}: counted as the weights of bitsandbytes"
        yield file.not_counted("quantization_method", message)
    if file.trainer.uncounted:
        mark = next(name for name in file.document if name in file.trainer.marks)
        yield file.noted(mark, f"{file.trainer.uncounted}; {NOT_MODELLED}", WITHOUT)
    accumulation = values.get("accumulation", 1)
    if file.trainer.is_contrastive and accumulation > 1:
        message = f"a loss with in-batch negatives has those of one micro-batch, not of {accumulation}: a larger"
        remedy = "micro-batch, or CachedMultipleNegativesRankingLoss of sentence-transformers, has more"
        yield file.noted("gradient_accumulation_steps", f"{message} {remedy}", CONTRASTIVE)


def _both_precisions(file: TrainerFile) -> Iterator[Finding]:
    """Yield that TrainingArguments, of which all trainers here derive theirs, takes one of bf16 and fp16."""
    if all(str(file.document.get(name)).lower() == "true" for name in ("bf16", "fp16")):
        yield file.refused(
            "fp16", "at most one of fp16 and bf16 can be true: the trainer ends with an error", "take one"
        )


def _hf_findings(file: TrainerFile) -> Iterator[Finding]:
    """Yield the keys and optimizers that TrainingArguments has no more, and a best model without its evaluation."""
    document = file.document
    if not file.trainer.has_hf_keys:
        return
    for name, removed in REMOVED_HF_KEYS.items():
        if name in document and name not in file.trainer.kept_keys:
            message = f"transformers {removed.release} removed it, so that newer ones end with an error"
            yield file.conflict(name, message, removed.fix, "removed-key")
    optimizer = document.get("optim")
    if isinstance(optimizer, str) and optimizer not in HF_OPTIMIZERS:
        message = f"transformers 5.23 has no optimizer {clip(optimizer)}, and ends with an error"
        fix = (
            "set adamw_torch" if to_optimizer(optimizer) == "adamw" else did_you_mean(optimizer, HF_OPTIMIZERS).strip()
        )
        yield file.conflict("optim", message, fix or "set adamw_torch", "unknown-optimizer")
    evaluates = document.get("eval_strategy", document.get("evaluation_strategy", "no"))
    saves = document.get("save_strategy", "steps")
    if document.get("load_best_model_at_end") is True and saves != "best" and evaluates != saves:
        message = f"the trainer ends with an error: eval_strategy is {clip(evaluates)}, save_strategy {clip(saves)}"
        yield file.refused("load_best_model_at_end", message, "make them equal")


def _misspelled(file: TrainerFile) -> Iterator[Finding]:
    """Yield a finding for each key that the trainer does not have and that resembles one that is read."""
    trainer = file.trainer
    for name in file.document:
        if not isinstance(name, str) or name in trainer.read or name in trainer.similar or name in REMOVED_HF_KEYS:
            continue
        if hint := did_you_mean(name, trainer.read, _MISSPELLED).strip():
            message = f"{trainer.name} has no such key"
            if trainer.refuses_unknown:
                yield file.refused(name, f"{message}, and ends with an error", hint)
            else:
                yield file.ignored(name, message, hint)


def _settle(trainer: Trainer, document: Mapping[str, Any], set_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the trainer's defaults, and without those that another value makes void."""
    values = {**trainer.defaults, **set_values}
    if "precision" not in set_values and any(document.get(key) is not None for key in ("bf16", "fp16")):
        # Both are off.
        values["precision"] = "no"
    if values.get("peft") != "lora":
        values = {name: value for name, value in values.items() if name not in _OF_LORA}
    else:
        values = {**trainer.lora_defaults, **values}
    if values.get("quantization") != "4bit":
        values.pop("double_quant", None)
    if document.get("stage") in trainer.stages_with_logits:
        values.pop("loss_kernel", None)
        if values.get("objective") == "dpo":
            values["loss_kernel"] = trainer.preference_loss
    return values


def find_model(file: TrainerFile, ask_hub: bool) -> str:
    """Return the model that a trainer's file names: a preset, a folder, or the preset of that name without its owner or
    its folders; raise UserError if it names none, or one that is not known."""
    example = f"name one after the file: study explain {file.name} llama-3.1-8b"
    name = file.values.get("model_name_or_path")
    if name is None:
        raise UserError(f"{file.name} names no model", example)
    plain, _ = split_4_bits(hub_id(name))
    # Of weights in 4 bits.
    ending = hub_id(name)[len(plain) :]
    if ask_hub or resolve_path(name).exists() or find_preset(plain) or find_base(plain) or find_known(plain):
        return str(name)
    parts = plain.strip("/").split("/")
    for candidate in ("/".join(parts[-2:]), parts[-1]):
        if preset := find_preset(candidate) or find_base(candidate) or find_known(candidate):
            return f"{preset.name}{ending}"
    return str(name)


def model_error(file: TrainerFile, refusal: UserError) -> UserError:
    """Return the refusal of a model that a trainer's file names."""
    key = file.keys["model_name_or_path"]
    fix = f"name a model after the file: study explain {file.name} llama-3.1-8b; {refusal.fix}"
    return UserError(f"{file.name}: {key}: {refusal.problem}", fix)


def values_error(file: TrainerFile, refusal: UserError) -> UserError:
    """Return the refusal of values of flags and a trainer's file, with the keys of the file for the flags."""
    is_of_file = isinstance(refusal, WrongFile) and refusal.file == file.name
    problem = refusal.problem if is_of_file else f"{file.name}: {refusal.problem}"
    for name, key in file.keys.items():
        problem = re.sub(rf"--{name}\b", key, problem)
    return UserError(problem, refusal.fix)


def merge(file: TrainerFile, options: argparse.Namespace) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Return a command line with the values of a trainer's file for flags that are not set, and the names of those that
    replace a value of the file."""
    merged = argparse.Namespace(**vars(options))
    values = {name: value for name, value in file.values.items() if name not in (*OTHER_FIELDS, "model_name_or_path")}
    if not isinstance(options.peft, Unset) and options.peft != "lora":
        values = {name: value for name, value in values.items() if name not in _OF_LORA}
    objective = file.values.get("objective")
    if objective in ("dpo", "pairs"):
        values["micro_batch"] = 2 * values["micro_batch"]
    replaced = []
    for name, value in values.items():
        flag_value = getattr(options, name)
        if isinstance(flag_value, Unset) or flag_value is None or flag_value is False:
            setattr(merged, name, value)
        elif flag_value != value:
            replaced.append(name)
    if merged.quantization != "4bit":
        merged.double_quant = options.double_quant
    merged.with_reference = merged.with_reference or objective in ("dpo", "grpo", "kto")
    merged.precision = merged.precision or "no"
    return merged, tuple(replaced)


def without_value(file: TrainerFile, field: str) -> TrainerFile:
    """Return the file without a field."""
    return dataclasses.replace(file, values={name: value for name, value in file.values.items() if name != field})


def with_value(file: TrainerFile, field: str, value: Any) -> TrainerFile:
    """Return the file with a field."""
    return dataclasses.replace(file, values={**file.values, field: value})


def fit_length(file: TrainerFile, model: ModelShape) -> TrainerFile:
    """Return the file with a default length that the model has, to which scripts cut it; without one if the model reads
    no tokens."""
    length = file.values.get("seq_length")
    if length is None or "seq_length" in file.keys:
        return file
    if not (model.encoder_reads_tokens or model.has_decoder):
        return without_value(file, "seq_length")
    length = min(length, model.positions or length)
    return with_value(file, "seq_length", length)


def frozen_parts(file: TrainerFile, model: ModelShape) -> tuple[str, ...]:
    """Return the modules that full training leaves frozen, of a model of images and text."""
    is_whole = file.trainer.freezes_parts and file.values.get("peft") != "lora"
    if not is_whole or "vision_config" not in json.loads(model.document or "{}"):
        return ()
    parts = zip(FREEZES.items(), FROZEN_PARTS.get(model.model_type, FROZEN_PARTS[""]), strict=True)
    listed = [modules for (key, default), modules in parts if is_on(file.document.get(key, default))]
    # A tied output layer is the embedding.
    names = {part for param in model.params for part in param.name.split(".")}
    return tuple(name for modules in listed for name in modules if set(name.split(".")) <= names)


def with_checkpoint_type(file: TrainerFile, model: ModelShape) -> TrainerFile:
    """Return the file with the type of the checkpoint in place of "auto", and its finding; with "auto" if neither
    config.json nor the list of published weights has the type."""
    if file.values.get("loaded") != "auto":
        return file
    document = json.loads(model.document or "{}")
    stated = document.get("dtype", document.get("torch_dtype"))
    loaded = to_loaded(stated) if isinstance(stated, str) else published_type(model.name)
    if loaded is None:
        return file
    where = "of its config.json" if isinstance(stated, str) else f"in which {model.name} is published"
    filled = file.filled(file.keys["loaded"], f"auto: {loaded}, the type {where}")
    return dataclasses.replace(with_value(file, "loaded", loaded), findings=(*file.findings, filled))


def language_targets(file: TrainerFile, model: ModelShape) -> tuple[str, ...] | None:
    """Return a pattern of the modules with adapters that LLaMA-Factory leaves of a model of images and text: those of
    the language model (patch_target_modules in its model_utils/visual.py); None if all have them."""
    document = json.loads(model.document or "{}")
    if not file.trainer.freezes_parts or file.values.get("peft") != "lora" or "vision_config" not in document:
        return None
    if [is_on(file.document.get(key, default)) for key, default in FREEZES.items()] != [True, True, False]:
        return None
    targets = file.values.get("lora_targets") or (ALL_LINEAR,)
    paths = [model.module_path(param) for param in model.params if can_adapt(model, param)]
    inside = [path for path in paths if LANGUAGE_MODEL in path]
    adapted = [path for path in inside if ALL_LINEAR in targets or any(target in path for target in targets)]
    ends = dict.fromkeys(path.rpartition(".")[2] for path in adapted)
    return (rf".*{LANGUAGE_MODEL}.*\.({'|'.join(ends)})",) if ends and len(inside) < len(paths) else None


def with_all_linear(file: TrainerFile, refusal: UserError) -> TrainerFile:
    """Return the file with adapters on all linear layers in place of a pattern, and a finding with its refusal."""
    key = file.keys["lora_targets"]
    problem = refusal.problem.replace("--lora_targets", "the pattern")
    note = file.not_counted(key, f"{problem}: counted as all linear layers")
    file = with_value(file, "lora_targets", (ALL_LINEAR,))
    return dataclasses.replace(file, findings=(*file.findings, note))


def has_text_alone(file: TrainerFile, model: ModelShape) -> bool:
    """Whether samples have no images: axolotl reads images only with the key processor_type."""
    return file.trainer.name == "axolotl" and not file.document.get("processor_type") and has_towers(model)


def trained_type(file: TrainerFile, engine: UserFile, precision: str) -> Literal["bf16", "fp16"] | None:
    """Return the 16-bit type of the weights that a program without DeepSpeed loads and trains, or freezes next to
    adapters; None: another, or that of mixed precision. Accelerate makes trained weights of FSDP fp32 in mixed
    precision (fsdp2_prepare_model), unless the trainer has a function in its place."""
    loaded: Any = file.values.get("loaded")
    if loaded not in ("bf16", "fp16") or engine.deepspeed is not None:
        return None
    if precision == "no":
        # A type that only the trainer's defaults set is one of bf16.
        return loaded if "loaded" in file.keys else None
    is_mixed = any(file.keys.get("precision") == key for key in ("bf16", "bfloat16")) or "precision" not in file.keys
    keeps = file.trainer.keeps_16_bits and engine.sharding is None and file.values.get("peft") != "lora"
    is_cast = engine.fsdp is not None and is_mixed and not keeps
    return "bf16" if loaded == precision == "bf16" and not is_cast else None


def loads_fp32(file: TrainerFile) -> bool:
    """Whether the weights are loaded in fp32 whatever the checkpoint's type, as TRL does by default."""
    return file.values.get("loaded") == "fp32"


def loads_for_engine(file: TrainerFile) -> bool:
    """Whether a program loads weights in bf16 for DeepSpeed: LLaMA-Factory does with bf16, and casts trained ones to
    fp32."""
    is_bf16 = file.values.get("precision") == "bf16"
    return is_bf16 and (file.values.get("loaded") == "bf16" or file.trainer.casts_to_fp32)


def workload_lines(file: TrainerFile, model: str, options: argparse.Namespace, replaced: tuple[str, ...]) -> list[str]:
    """Return the values of a trainer's file, and the names of those that it does not set."""
    values, pairs = file.values, file.values.get("objective") in ("dpo", "pairs")
    file_model = values.get("model_name_or_path")
    batch = f"micro-batch {values['micro_batch']}{' pairs' if pairs else ''} x accumulation {values['accumulation']}"
    parts = [model if file_model in (None, model) else f"{file_model} as {model}"]
    parts += [f"{values['seq_length']} tokens"] if "seq_length" in values else []
    parts += [f"{values['target_length']} in the decoder"] if "target_length" in values else []
    parts += [batch, _adapters_text(values), values.get("precision", "fp32").replace("no", "fp32")]
    parts += ["gradient checkpointing"] if values.get("gradient_checkpointing") else []
    parts += [values[name] for name in ("optimizer", "attn_implementation") if name in values]
    parts += [f"loss: {values['loss_kernel']}"] if "loss_kernel" in values else []
    parts += [f"compiled ({file.keys['compile']})"] if values.get("compile") else []
    parts += [values["objective"].upper()] if values.get("objective") in ("dpo", "grpo", "kto") else []
    lines = [f"read from {file.name} ({file.trainer.name}): {', '.join(parts)}"]
    assumed = {**file.trainer.defaults, **(file.trainer.lora_defaults if values.get("peft") == "lora" else {})}
    names = [name for name in assumed if name not in (*file.keys, *OTHER_FIELDS) and name in values]
    if is_grpo(file):
        names = [name for name in names if name != "seq_length"]
        names += [f"{name} {tokens}" for name, tokens in _assumed_lengths(file)]
    if names:
        lines[0] += f"; of these assumed, as {file.trainer.name} does without a key: {', '.join(names)}"
    if replaced:
        lines.append(f"set by flags in its place: {', '.join(f'{name} {getattr(options, name)}' for name in replaced)}")
    return lines


def _assumed_lengths(file: TrainerFile) -> Iterator[tuple[str, int]]:
    """Yield the lengths of GRPO without a key; that of completions depends on the release."""
    prompt = converted(file, "max_prompt_length", to_count) if file.document.get("max_prompt_length") else None
    if prompt is None:
        yield "max_prompt_length", GRPO_LENGTHS["max_prompt_length"]
    if file.document.get("max_completion_length") is None:
        prompt = GRPO_LENGTHS["max_prompt_length"] if prompt is None else prompt
        yield "max_completion_length", file.values["seq_length"] - prompt


def _adapters_text(values: Mapping[str, Any]) -> str:
    if values.get("peft") != "lora":
        return "not all weights trained" if values.get("freeze") else "all weights trained"
    kind = {"4bit": "QLoRA", "8bit": "LoRA on 8-bit weights"}.get(values.get("quantization", ""), "LoRA")
    kind = kind.replace("LoRA", "DoRA") if values.get("lora_dora") else kind
    targets = values.get("lora_targets")
    where = "peft's default modules" if targets is None else ", ".join(targets)
    where = "all linear layers" if targets is not None and ALL_LINEAR in targets else where
    if saved := values.get("lora_modules_to_save"):
        where += f" and copies of {', '.join(saved)}"
    rank = f" of rank {values['lora_rank']}" if "lora_rank" in values else ""
    return f"{kind}{rank} on {where}"


# Fields of Workload, by the names that findings give them.
_FIELDS = {
    "optimizer": "optimizer",
    "peft": "peft",
    "quantization": "quantization",
    "reference_model": "objective",
    "seq_length": "seq_length",
    "weights": "loaded",
    "mixed_precision": "precision",
    "attn_implementation": "attn_implementation",
    ACCUMULATION: "accumulation",
    MICRO_BATCH: "micro_batch",
}


def place_findings(file: TrainerFile, engine: Engine, results: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings of a trainer's file, and those of its engine with the names and lines of the engine's file."""
    yield from engine.findings
    yield from _refused_with(file, engine.file)
    path, is_inside = resolve_path(engine.file.name), engine.file.name == file.name
    text = path.read_text(encoding="utf-8") if not is_inside and path.is_file() else ""
    for finding in results:
        # LLaMA-Factory casts loaded weights, and the Trainer fills in settings that DeepSpeed alone refuses.
        if (finding.rule == "fp32-weights" and file.trainer.casts_to_fp32) or finding.rule in FILLED_BY_TRAINER:
            continue
        if finding.rule == CONTRASTIVE and file.trainer.is_contrastive:
            continue
        if finding.rule == "fsdp-frozen" and file.trainer.keeps_16_bits:
            # Accelerate's function that makes weights fp32 does not run.
            continue
        field = _FIELDS.get(finding.key, "")
        if field in file.keys and not _is_of_the_json(finding.key, engine):
            key = file.keys[field]
        elif is_inside or finding.key in engine.keys:
            prefix = "deepspeed." if engine.file.deepspeed is not None else ""
            key = engine.keys.get(finding.key, f"{prefix}{finding.key}")
        else:
            yield in_file(finding, engine.file, text)
            continue
        yield dataclasses.replace(finding, key=key, file=file.name, line=find_line(file.text, key) or 1)
    yield from file.findings


def _refused_with(file: TrainerFile, engine: UserFile) -> Iterator[Finding]:
    """Yield a finding for each key that the trainer refuses with the engine."""
    names = {"DeepSpeed"} if engine.deepspeed is not None else set()
    if ((engine.deepspeed or {}).get(ZERO) or {}).get("stage") == 3:
        names.add("stage 3")
    if engine.fsdp is not None:
        names.add("FSDP")
        if engine.sharding is None:
            names.add("FSDP2")
        elif engine.fsdp.get("fsdp_offload_params") is True:
            names.add("FSDP1 with offload")
    yield from _scaled_weights(file, engine)
    if file.recomputes_by_hf and engine.is_on("fsdp_activation_checkpointing"):
        message = "the trainer ends with an error: FSDP's own activation checkpointing is on, too"
        yield file.refused(file.keys.get("gradient_checkpointing", "fsdp_config"), message, "leave one of them out")
    if engine.distributed_type != "NO":
        names.add("distributed training")
        if names.isdisjoint({"stage 3"}):
            names.add("distributed training without stage 3")
    yield from _refused_keys(file, names)
    if file.trainer.has_hf_keys:
        yield from _checkpoint_findings(file, engine, names)


# Errors of torch's loss scaler on gradients of a type (torch/amp/grad_scaler.py, and its CUDA kernel).
_UNSCALED_ERRORS = {
    "fp16": "Attempting to unscale FP16 gradients",
    "bf16": "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'",
}


def _scaled_weights(file: TrainerFile, engine: UserFile) -> Iterator[Finding]:
    """Yield that fp16's loss scaler takes no gradients of trained 16-bit weights. Accelerate makes those of FSDP fp32
    (fsdp2_prepare_model, and prepare_model for version 1), and DeepSpeed has a separate scaler."""
    values, loaded = file.values, file.values.get("loaded")
    is_scaled = values.get("precision") == "fp16" and engine.deepspeed is None and engine.fsdp is None
    if "loaded" not in file.keys or values.get("peft") == "lora" or not is_scaled:
        return
    key, fix = file.keys["loaded"], "set float32, or use DeepSpeed or adapters"
    if loaded in _UNSCALED_ERRORS:
        yield file.refused(key, f"the run ends with an error, {_UNSCALED_ERRORS[loaded]}", fix)
    elif loaded == "auto":
        message = (
            f"the run ends with an error unless the checkpoint is in fp32: of one in bf16 {_UNSCALED_ERRORS['bf16']}"
        )
        yield file.conflict(key, message, fix, BY_TRAINER)


def _refused_keys(file: TrainerFile, names: set[str]) -> Iterator[Finding]:
    """Yield the keys that the trainer refuses with an engine that has these names, or with another key."""
    for refusal in file.trainer.refusals:
        value, also = file.document.get(refusal.key), file.document.get(refusal.also)
        if value is None or not refusal.values(value) or (refusal.engine and refusal.engine not in names):
            continue
        if refusal.also and not refusal.also_values(also):
            continue
        causes = [f"{refusal.also}: {clip(also)}"] if refusal.also and also is not None else []
        causes += [refusal.engine] if refusal.engine else []
        message = f"{file.trainer.name} ends with an error: {clip(value)} with {' and '.join(causes)}"
        fix = "take it out, or use another engine" if refusal.engine else "take one of them out"
        yield file.refused(refusal.key, message, fix)


def _checkpoint_findings(file: TrainerFile, engine: UserFile, names: set[str]) -> Iterator[Finding]:
    """Yield settings of checkpoints and the batch that transformers' Trainer refuses with an engine (trainer.py), and
    the effect of checkpoints without the optimizer."""
    document, ends = file.document, "the trainer ends with an error"
    if document.get("auto_find_batch_size") is True and "stage 3" in names:
        yield file.refused("auto_find_batch_size", f"{ends} at stage 3", "set the batch size, or use another engine")
    if document.get("save_only_model") is not True:
        return
    sharding = names & {"DeepSpeed", "FSDP"}
    if sharding and document.get("load_best_model_at_end") is True:
        message = f"{ends} under {min(sharding)} with load_best_model_at_end"
        yield file.refused("save_only_model", message, "take one of them out")
    elif engine.fsdp is not None and not saves_whole_model(engine.fsdp):
        message = f"{ends} with SHARDED_STATE_DICT"
        yield file.refused("save_only_model", message, "set fsdp_state_dict_type: FULL_STATE_DICT, or take it out")
    elif "DeepSpeed" in names:
        message = "checkpoints have no optimizer: a resumed run ends with an error, Can't find a valid checkpoint"
        yield file.noted("save_only_model", message, "model-only")
    else:
        message = "checkpoints have no optimizer: a resumed run begins with new moments and a new schedule"
        yield file.noted("save_only_model", message, "model-only")


def _is_of_the_json(key: str, engine: Engine) -> bool:
    """Whether a finding is about a size that DeepSpeed's file sets or lacks, and the Trainer does not fill in."""
    return key in (MICRO_BATCH, ACCUMULATION) and engine.file.deepspeed is not None and key not in engine.filled


# The engine of a trainer's file.


@dataclasses.dataclass(frozen=True)
class Engine:
    """The engine's settings that a trainer's file amounts to."""

    file: UserFile
    # Lines about their file.
    lines: tuple[str, ...] = ()
    # Names of settings in the trainer's file, by the engine's.
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    # Sizes that are "auto" in DeepSpeed's file.
    filled: frozenset[str] = frozenset()


def read_engine(file: TrainerFile, options: argparse.Namespace, engine_name: str | None, ranks: int | None) -> Engine:
    """Return the engine of --engine, of the key deepspeed or of FSDP's keys; else plain data parallelism.

    The options are those of `merge`, with which the Trainer fills in each "auto".
    """
    document = file.document
    if engine_name is not None:
        user_file = read_user_file(engine_name)
        if options.precision == "no" and user_file.mixed_precision in ("bf16", "fp16"):
            # TrainingArguments takes that of the launcher if it sets none.
            options.precision = user_file.mixed_precision
        findings = tuple(_mismatches(file, user_file, options))
        engine = Engine(_filled(user_file, options), (), {}, findings, _open_sizes(user_file))
    elif document.get("deepspeed"):
        engine = _deepspeed(file, options)
    elif _has_fsdp(file):
        return _fsdp(file, options)
    else:
        kind = "NO" if ranks == 1 else "MULTI_GPU"
        plain = UserFile(file.name, "accelerate", kind, None, (), options.precision)
        line = f"{file.name} names no engine" + ("" if ranks == 1 else ": DDP; --engine FILE adds that of the launcher")
        unused = []
        if document.get("fsdp_config"):
            unused = [
                file.ignored("fsdp_config", "the Trainer drops it without fsdp", "set fsdp: full_shard auto_wrap")
            ]
        return Engine(plain, (line,), {}, tuple(unused))
    if _has_fsdp(file) and engine.file.deepspeed is not None:
        message = "DeepSpeed and FSDP cannot be used together; the figures are those of DeepSpeed"
        refusal = file.refused("fsdp" if document.get("fsdp") else "fsdp_config", message, "take one of them out")
        return dataclasses.replace(engine, findings=(*engine.findings, refusal))
    return engine


def _has_fsdp(file: TrainerFile) -> bool:
    """Whether FSDP is on: axolotl takes fsdp_config alone for it, too (utils/trainer.py, prepare_optim_env)."""
    is_axolotl = file.trainer.name == "axolotl"
    return bool(file.document.get("fsdp") or (is_axolotl and file.document.get("fsdp_config")))


@functools.cache
def shipped_engines() -> dict[str, Any]:
    """Return the content of shipped_engines.yaml."""
    text = Path(__file__).with_name("shipped_engines.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = load_package_yaml(text)
    return document


def _deepspeed(file: TrainerFile, options: argparse.Namespace) -> Engine:
    setting, lines = file.document["deepspeed"], list[str]()
    if isinstance(setting, Mapping):
        user_file = deepspeed_file(file.name, _copied(setting), [])
    elif not isinstance(setting, str):
        raise UserError(
            f"{file.name} sets deepspeed: {clip(setting)}", "it should be the path of a file, or its settings"
        )
    elif (path := _find(file, setting)) is not None:
        user_file = read_user_file(str(path))
    elif (shipped := _shipped(setting)) is not None:
        trainer, place, settings, commit = shipped
        user_file = deepspeed_file(f"{trainer}'s {place}", _copied(settings), [])
        lines = [
            f"{clip(setting)} is not here: {trainer}'s own file of that name is taken, of commit {commit[:8]};"
            " --engine FILE names another"
        ]
    else:
        raise _no_engine(file, setting)
    if user_file.deepspeed is None:
        raise UserError(
            f"{file.name} sets deepspeed: {clip(setting)}, which is not a file of DeepSpeed", "name its JSON"
        )
    findings = tuple(_mismatches(file, user_file, options))
    return Engine(_filled(user_file, options), tuple(lines), {}, findings, _open_sizes(user_file))


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in settings.items()}


def _find(file: TrainerFile, path_text: str) -> Path | None:
    """Return a file that a trainer's file names, relative to its folder, else to the working directory."""
    places = (resolve_path(file.name).parent / path_text, resolve_path(path_text))
    return next((place for place in places if place.is_file()), None)


def _shipped(path_text: str) -> tuple[str, str, Mapping[str, Any], str] | None:
    """Return trainer, path, settings and commit of the file that a path means, if a trainer ships it."""
    for trainer, entry in shipped_engines().items():
        for place, settings in entry["files"].items():
            if Path(path_text).parts[-len(Path(place).parts) :] == Path(place).parts:
                return trainer, place, settings, entry["commit"]
    return None


def _no_engine(file: TrainerFile, path_text: str) -> MissingFile:
    problem = f"sets deepspeed: {clip(path_text)}, and there is no file of that name"
    places = [place for entry in shipped_engines().values() for place in entry["files"]]
    same = next((f", or write {place}" for place in places if Path(place).name == Path(path_text).name), "")
    return MissingFile(file.name, problem, f"name it with --engine FILE{same}", key="deepspeed")


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    return {MICRO_BATCH: options.micro_batch, ACCUMULATION: options.accumulation}


def _open_sizes(user_file: UserFile) -> frozenset[str]:
    return frozenset(key for key in (MICRO_BATCH, ACCUMULATION) if (user_file.deepspeed or {}).get(key) == "auto")


def _filled(user_file: UserFile, options: argparse.Namespace) -> UserFile:
    """Return an engine's file with the values that the Trainer fills in for "auto" (trainer_config_process in
    transformers' integrations/deepspeed.py)."""
    if user_file.deepspeed is None:
        return user_file
    settings = _copied(user_file.deepspeed)
    for key, value in _sizes(options).items():
        if settings.get(key) == "auto":
            settings[key] = value
    for kind in ("bf16", "fp16"):
        if isinstance(settings.get(kind), dict) and settings[kind].get("enabled") == "auto":
            settings[kind]["enabled"] = options.precision == kind
    return run_by_trainer(dataclasses.replace(user_file, deepspeed=settings))


def _mismatches(file: TrainerFile, user_file: UserFile, options: argparse.Namespace) -> Iterator[Finding]:
    """Yield a finding for each setting of a DeepSpeed file that contradicts the trainer's, and take the file's own."""
    settings, error = user_file.deepspeed or {}, "the Trainer ends with an error"
    for (key, value), name in zip(_sizes(options).items(), ("micro_batch", "accumulation"), strict=True):
        is_number = type(settings.get(key)) is int
        if is_number and settings[key] != value and value == _batch_value(file, name):
            key_in_file = file.keys.get(name, "per_device_train_batch_size")
            message = f"{value}, and {user_file.name} sets {key}: {settings[key]}: {error}"
            yield file.refused(key_in_file, message, 'write "auto" there')
            setattr(options, name, settings[key])
    for kind in ("bf16", "fp16"):
        section = settings.get(kind)
        is_set = isinstance(section, Mapping) and section.get("enabled") is True
        if is_set and options.precision != kind and "precision" in file.keys:
            message = f"{options.precision}, and {user_file.name} sets {kind}.enabled: true: {error}"
            yield file.refused(file.keys["precision"], message, f'set {kind} here, or write "auto" there')


def _batch_value(file: TrainerFile, name: str) -> Any:
    pairs = file.values.get("objective") in ("dpo", "pairs") and name == "micro_batch"
    return file.values[name] * (2 if pairs else 1)


def _fsdp(file: TrainerFile, options: argparse.Namespace) -> Engine:
    """Return FSDP's settings of a trainer's file, with the defaults of the Trainer (_process_fsdp_args in transformers'
    training_args.py)."""
    words = _fsdp_words(file)
    section, place = _fsdp_section(file)
    plain_settings = {key.removeprefix("fsdp_"): value for key, value in section.items()}
    keys = {f"fsdp_{key.removeprefix('fsdp_')}": f"{place}{key}" for key in section}
    strategies = [word for word in words if word in _SHARDINGS]
    version, lines = file.document.get("fsdp_version", plain_settings.get("version")), list[str]()
    if file.document.get("fsdp_version") is not None or version is None:
        keys["fsdp_version"] = "fsdp_version"
    if version is None:
        version = options.fsdp_version or file.trainer.fsdp_version
    if version is None:
        version = 1 if any(word.startswith("hybrid") for word in strategies) else 2
        lines.append(f"FSDP's version is not set: {version} is read; it is 2 in transformers 5, and 1 before")
    settings: dict[str, Any] = {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        **{
            f"fsdp_{key}": value
            for key, value in plain_settings.items()
            if key not in _OTHER_FSDP_KEYS and value is not None
        },
        "fsdp_version": version,
    }
    if "offload" in words or plain_settings.get("cpu_offload"):
        settings["fsdp_offload_params"] = True
        keys["fsdp_offload_params"] = "fsdp" if "offload" in words else f"{place}cpu_offload"
    _set_sharding(settings, keys, strategies, str(version))
    findings = list[Finding]()
    for name in [name for name in settings if name not in section_entries("fsdp")]:
        findings.append(file.noted(keys[name], "is not a setting of FSDP", "unknown-key"))
        del settings[name]
    read = read_fsdp({"fsdp_config": settings}, findings)
    precision = None if file.keys.get("precision") == "pure_bf16" else options.precision
    user_file = UserFile(file.name, "accelerate", "FSDP", None, (), precision, read, findings=findings)
    return Engine(user_file, tuple(lines), keys)


def _set_sharding(settings: dict[str, Any], keys: dict[str, str], strategies: list[str], version: str) -> None:
    """Set the strategy that the words of the key fsdp name for a version."""
    for word in strategies:
        if version == "1":
            settings[_SHARDING], keys[_SHARDING] = word.upper(), "fsdp"
        elif _RESHARD not in settings:
            settings[_RESHARD], keys[_RESHARD] = word != "shard_grad_op", "fsdp"
    if version == "1" and isinstance(strategy := settings.pop(_RESHARD, None), str):
        settings.setdefault(_SHARDING, strategy.upper())
        keys.setdefault(_SHARDING, keys[_RESHARD])


def _fsdp_words(file: TrainerFile) -> list[str]:
    """Return the words of the key fsdp; raise UserError for one that the Trainer does not support."""
    value = file.document.get("fsdp")
    words = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
    allowed = (*_SHARDINGS, "offload", "auto_wrap", "true", "false")
    for word in words:
        if not isinstance(word, str) or word.lower() not in allowed:
            line = find_line(file.text, "fsdp") or 1
            raise UserError(f"{file.name}:{line}: fsdp has {clip(word)}", f"it should be of {', '.join(allowed[:-2])}")
    return [word.lower() for word in words]


def _fsdp_section(file: TrainerFile) -> tuple[Mapping[str, Any], str]:
    """Return the settings of fsdp_config, a mapping or the name of a JSON, and their prefix in the trainer's file."""
    section = file.document.get("fsdp_config")
    if isinstance(section, str):
        if (path := _find(file, section)) is None:
            problem = f"sets fsdp_config: {clip(section)}, and there is no file of that name"
            raise MissingFile(file.name, problem, "write its settings under fsdp_config", key="fsdp_config")
        return read_mapping(str(path), [], None), ""
    if section is not None and not isinstance(section, Mapping):
        raise UserError(f"{file.name} sets fsdp_config: {clip(section)}", "write its settings under fsdp_config")
    return section or {}, "fsdp_config."
