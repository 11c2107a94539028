"""The loss and the memory of vLLM of a TRL file, by the release of TRL."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from study.advisor.explain_case import ConfigCase
from study.advisor.explain_combinations import WRONG_TRAINING
from study.advisor.explain_findings import NO_UNITS
from study.advisor.request_notes import ADAPTER_TYPES, ADAPTERS_IN_FP32, MIXED_ADAPTERS
from study.advisor.trainer_files import TrainerFile, converted, is_grpo, is_kto
from study.advisor.trainer_keys import (
    GRPO_COUNTS,
    GRPO_KEYS,
    GRPO_LENGTHS,
    NO_TRL_KEYS,
    OVER_TRL,
    REMOVED_GRPO_KEYS,
    REMOVED_HF_KEYS,
    REMOVED_TRL_KEYS,
    REWARD_KEY,
    to_count,
)
from study.advisor.user_settings import NOT_MODELLED, Finding
from study.config.errors import UserError, clip, did_you_mean
from study.config.precisions import computes_in_fp16
from study.config.text import rounded
from study.config.yaml_sections import load_package_yaml
from study.host.memory import GIB
from study.host.stacks import release_key
from study.predictor.hardware import ANY_DEVICE
from study.predictor.losses import LossKernel
from study.predictor.request import Request

# The newest one that was read, and the first whose trainers call add_fused_lm_head.
NEWEST_TRL, FUSED_SINCE = "1.16.0", "1.15.0"
# Of SFT's loss_type: chunked_nll, and its being the default.
_CHUNKED_SINCE, _CHUNKED_BY_DEFAULT_SINCE = "1.4.0", "1.7.0"
# The first release that gathers the output layer's weight at stage 3, by trainer.
_GATHERED_SINCE = {"sft": "1.6.0", "grpo": "1.6.0", "dpo": "1.9.0"}
# The first release that casts the adapters of a 4-bit or 8-bit model to bf16, by trainer: in its __init__, after
# get_peft_model. Before it peft's stay in fp32.
_CASTS_SINCE = {"sft": "0.26.0", "grpo": "0.26.0", "reward": "0.26.0", "dpo": "0.29.0", "kto": "1.8.0"}
# The first release that gives adapters the type of the weights at stage 3 (autocast_adapter_dtype=False).
_ONE_TYPE_SINCE = "1.7.0"
# vllm_gpu_memory_utilization without the key, and the first release whose vllm_mode is colocate without it.
_VLLM_SHARE, _COLOCATES_SINCE = 0.3, "1.0.0"
_SFT_LOSSES = ("nll", "dft", "chunked_nll")
_LIGER_KEYS = ("use_liger_kernel", "use_liger")


def trl_release(file: TrainerFile, stated: Mapping[str, str] | None) -> str | None:
    """Return the release of TRL that a file is read for; None for another trainer's.

    Raise UserError if --release names one for another trainer's file.
    """
    release = (stated or {}).get("trl")
    if file.trainer.name == "TRL":
        return release or NEWEST_TRL
    if release is not None:
        raise no_trl_file(file.name)
    return None


def _is_since(release: str, first: str) -> bool:
    return release_key(release) >= release_key(first)


def no_trl_file(name: str) -> UserError:
    return UserError(f"--release trl is for a file of TRL, and {name} is none", "leave it out")


def with_loss(file: TrainerFile, release: str) -> TrainerFile:
    """Return TRL's file with the loss and the type of adapters of a release, and findings of a loss_type that the
    release does not have."""
    values, findings = {**file.values, "loss_kernel": _loss(file, release)}, file.findings
    if values.get("peft") == "lora" and "quantization" in values and _makes_adapters_bf16(file, release):
        values["adapters_in_16_bits"] = True
    if is_grpo(file):
        if file.document.get("max_completion_length") is None:
            values["seq_length"] += completion_length(release) - GRPO_LENGTHS["max_completion_length"]
        # _with_vllm has the memory.
        findings = tuple(item for item in findings if item.key != "use_vllm")
    findings = (*findings, *_wrong_losses(file, release), *_removed_keys(file, release))
    return dataclasses.replace(file, values=values, findings=(*findings, *_unknown_keys(file, release, findings)))


def _removed_keys(file: TrainerFile, release: str) -> Iterator[Finding]:
    """Yield the keys that the release has no more."""
    for name, removed in {**REMOVED_TRL_KEYS, **(REMOVED_GRPO_KEYS if is_grpo(file) else {})}.items():
        if name in file.document and _is_since(release, removed.release):
            message = f"TRL has it no more since {removed.release}, and {release} ends with an error"
            yield file.conflict(name, message, removed.fix, "removed-key")


@functools.cache
def trl_keys() -> frozenset[str]:
    """Return the content of trl_keys.yaml."""
    document = load_package_yaml(Path(__file__).with_name("trl_keys.yaml").read_text(encoding="utf-8"))
    return frozenset(name for names in document.values() for name in names)


def _unknown_keys(file: TrainerFile, release: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the keys that TRL's parser takes for no field (parse_args_and_config in trl/scripts/utils.py), and that no
    other finding names. Programs over TRL have further ones."""
    if OVER_TRL & file.document.keys():
        return
    reported = {*(item.key for item in findings), *file.trainer.read - NO_TRL_KEYS.keys(), *file.trainer.similar}
    accepted = reported | trl_keys() | REMOVED_TRL_KEYS.keys() | REMOVED_HF_KEYS.keys() | {"env"}
    for name in file.document:
        if isinstance(name, str) and name not in accepted:
            message = f"TRL {release} has no such key: its parser ends with an error, Unknown arguments"
            hint = NO_TRL_KEYS.get(name) or did_you_mean(name, trl_keys()).strip()
            yield file.conflict(name, message, hint or "take it out, unless a script has a field for it", "unknown-key")


def completion_length(release: str) -> int:
    """Return the tokens of a completion of GRPO without the key."""
    return GRPO_LENGTHS["max_completion_length"] if _is_since(release, "1.10.0") else 256


def trained_by(file: TrainerFile) -> str:
    """Return the trainer of TRL: sft, dpo, grpo or reward."""
    if file.document.get(REWARD_KEY) is not None:
        return "reward"
    if is_grpo(file):
        return "grpo"
    # KTO's trainer has the losses of DPO's.
    return "dpo" if is_kto(file) or file.values.get("objective") in ("dpo", "pairs") else "sft"


def _loss(file: TrainerFile, release: str) -> LossKernel:
    """Return the kernel of the loss. Since the fused head Liger's kernels are those of layers alone
    (fused_linear_cross_entropy: False in each trainer), and a reward model has no logits in any release."""
    trainer = trained_by(file)
    if trainer == "reward" or _is_since(release, FUSED_SINCE):
        return "trl"
    if file.values.get("loss_kernel") == "liger":
        return "liger"
    if trainer != "sft":
        return "log_softmax"
    kernels: dict[Any, LossKernel] = {"dft": "log_softmax", "nll": "transformers", "chunked_nll": "chunked_nll"}
    default: LossKernel = "chunked_nll" if _is_since(release, _CHUNKED_BY_DEFAULT_SINCE) else "transformers"
    loss_type = file.document.get("loss_type")
    return kernels.get(loss_type if isinstance(loss_type, str) else None, default)


def _wrong_losses(file: TrainerFile, release: str) -> Iterator[Finding]:
    """Yield a finding if SFT ends with an error for its loss_type."""
    loss_type = file.document.get("loss_type")
    if loss_type is None or trained_by(file) != "sft":
        return
    ends = f"TRL {release} ends with an error"
    if loss_type not in _SFT_LOSSES:
        yield file.refused("loss_type", f"{ends}: SFT has no loss {clip(loss_type)}", f"set {' or '.join(_SFT_LOSSES)}")
    elif loss_type == "chunked_nll" and not _is_since(release, _CHUNKED_SINCE):
        yield file.refused("loss_type", f"{ends}: SFT has it since {_CHUNKED_SINCE}", "set nll")
    elif _is_since(release, FUSED_SINCE):
        return
    elif loss_type == "chunked_nll" and any(file.keys.get("loss_kernel") == name for name in _LIGER_KEYS):
        yield file.refused("loss_type", f"{ends}: it does not run with use_liger_kernel", "take one of them out")


def with_release(file: TrainerFile, release: str, case: ConfigCase) -> ConfigCase:
    """Return the case of TRL's file with the errors and the memory that depend on the release and the engine."""
    errors = (*_unsharded_head(file, release, case.stage), *_scaled_adapters(file, release, case))
    errors += tuple(_divided_samples(file, release, case.file.group_sizes))
    errors += (*_partial_groups(file, release, case.request), *_unplaced_model(file, release, case))
    findings = [*_fixed_for_adapters(file, release, case), *errors]
    if _is_since(release, _ONE_TYPE_SINCE):
        findings = [finding for finding in findings if finding.rule not in (ADAPTER_TYPES, MIXED_ADAPTERS)]
    case = dataclasses.replace(
        case, trl=release, findings=tuple(findings), generated_tokens=_generated_tokens(file, release)
    )
    return _with_vllm(file, release, case)


def _generated_tokens(file: TrainerFile, release: str) -> int | None:
    """Return the tokens of a completion that GRPO generates; None for other trainers."""
    if not is_grpo(file):
        return None
    if file.document.get("max_completion_length") is None:
        return completion_length(release)
    return int(converted(file, "max_completion_length", to_count))


def casts_adapters(file: TrainerFile, release: str, request: Request) -> bool:
    """Whether the release casts the adapters of a quantized model to bf16."""
    is_quantized = request.quantized or request.in_8_bits
    return bool(request.shape.lora_rank) and is_quantized and _makes_adapters_bf16(file, release)


def _makes_adapters_bf16(file: TrainerFile, release: str) -> bool:
    """Whether the release casts adapters to bf16 if the model is quantized."""
    return _is_since(release, _CASTS_SINCE["kto" if is_kto(file) else trained_by(file)])


# Without a loss scaler. TRL's notebook for a T4, sft_trl_lora_qlora.ipynb, has this type, and bf16 that torch emulates.
_UNSCALED = "fp16: false, bf16: false and dtype: float16"


def _scaled_adapters(file: TrainerFile, release: str, case: ConfigCase) -> Iterator[Finding]:
    """Yield a finding if fp16's loss scaler gets gradients of adapters in bf16; DeepSpeed has a separate scaler."""
    request = case.request
    if case.file.deepspeed is not None or not computes_in_fp16(request.precision):
        return
    if file.values.get("precision") == "no" or not casts_adapters(file, release, request):
        return
    message = (
        f"TRL {release} casts the adapters of a quantized model to bf16, and the first step ends with an error of"
        " fp16's loss scaler: \"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
    )
    fix = f"{ADAPTERS_IN_FP32}; in the file alone {_UNSCALED}, without a loss scale"
    yield file.refused(file.keys.get("precision", "use_peft"), message, fix)


def _fixed_for_adapters(file: TrainerFile, release: str, case: ConfigCase) -> Iterator[Finding]:
    """Yield the findings of a case; a GPU without bf16 is not sent to fp16 if that ends with an error."""
    is_refused = case.file.deepspeed is None and casts_adapters(file, release, case.request)
    for finding in case.findings:
        is_of_bf16 = finding.rule == NO_UNITS and finding.key in ("bf16", "mixed_precision")
        yield dataclasses.replace(finding, fix=f"set {_UNSCALED}") if is_refused and is_of_bf16 else finding


# The first release whose DPO prepares the model before it precomputes with it under DeepSpeed.
_PREPARED_SINCE = "1.9.0"


def _unplaced_model(file: TrainerFile, release: str, case: ConfigCase) -> Iterator[Finding]:
    """Yield a finding if DPO precomputes log-probabilities with a model that DeepSpeed does not have yet
    (_precompute_ref_logps in trl/trainer/dpo_trainer.py, get_train_dataloader before 0.29).

    A quantized model is on the GPU from its loading on.
    """
    is_quantized = case.request.quantized or case.request.in_8_bits
    if case.file.deepspeed is None or is_quantized or is_kto(file) or trained_by(file) != "dpo":
        return
    if not _is_on(file, "precompute_ref_log_probs") or _is_since(release, _PREPARED_SINCE):
        return
    where = "in shards" if case.stage == 3 else "on the CPU"
    message = f"TRL {release} ends with an error before the first step: the model's weights are {where} then"
    yield file.refused("precompute_ref_log_probs", message, f"TRL {_PREPARED_SINCE} prepares the model first")


# The first release whose completions of one generation may be those of several micro-batches: before it they are those
# of one on each rank, and before the second of all micro-batches of a step.
_GENERATES_FOR_STEPS_SINCE, _HAS_STEPS_SINCE = "0.17.0", "0.18.0"
# num_generations without the key.
_GENERATIONS = 8


def _partial_groups(file: TrainerFile, release: str, request: Request) -> Iterator[Finding]:
    """Yield a finding if the completions of a generation are not whole groups of a prompt, which GRPO compares
    (GRPOConfig.__post_init__ in trl/trainer/grpo_config.py, and GRPOTrainer before 0.18)."""
    if not is_grpo(file):
        return
    counts = {name: converted(file, name, to_count) for name in GRPO_COUNTS if file.document.get(name) is not None}
    generations, ends = counts.get("num_generations", _GENERATIONS), f"TRL {release} ends with an error"
    key = next(name for name in ("num_generations", *GRPO_KEYS) if file.document.get(name) is not None)
    micro_batch, steps, batch = request.micro_batch * request.box.ranks, request.accumulation, None
    if _is_since(release, _HAS_STEPS_SINCE):
        steps, batch = counts.get("steps_per_generation", steps), counts.get("generation_batch_size")
    elif not _is_since(release, _GENERATES_FOR_STEPS_SINCE):
        steps = 1
    total = batch or micro_batch * steps
    if generations < 2:
        yield file.refused(key, f"{ends}: GRPO compares at least 2 completions of a prompt", "set 2 or more")
    elif batch and "steps_per_generation" in counts:
        yield file.refused("generation_batch_size", f"{ends} with steps_per_generation", "take one of them out")
    elif batch and batch % micro_batch:
        message = f"{ends}: {batch} is not divisible by {micro_batch}, the completions of a micro-batch on all ranks"
        yield file.refused("generation_batch_size", message, f"set a multiple of {micro_batch}")
    elif total % generations:
        factors = [f"{request.micro_batch} a micro-batch"]
        factors += [f"{count} {what}" for count, what in ((request.box.ranks, "ranks"), (steps, "steps")) if count > 1]
        message = f"{ends}: a generation has {total} completions" + f" ({' x '.join(factors)})" * (batch is None)
        fix = f"make them a multiple of {generations}, or num_generations a divisor of {total}"
        yield file.refused(key, f"{message}, which do not make groups of {generations}", fix)


# The first releases of TRL that refuse: ranks that divide samples as an argument of GRPO, losses of SFT that are not
# the model's own under Ulysses, and its packed samples under context parallelism (sft_trainer.py, grpo_config.py).
_NO_DIVIDED_GRPO_SINCE, _OWN_LOSS_SINCE, _NO_PACKED_RINGS_SINCE = "1.4.0", "1.15.0", "1.16.0"


def _divided_samples(file: TrainerFile, release: str, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Yield the settings that a trainer of TRL does not support where ranks divide the tokens of a sample."""
    trainer, document, ends = trained_by(file), file.document, f"TRL {release} ends with an error"
    key = next((name for name in ("cp_size", "sp_size") if name in sizes), None)
    if key is None:
        return
    if trainer == "grpo":
        name = next(name for name in GRPO_KEYS if document.get(name) is not None)
        message = f"{key} does not divide samples that GRPO generates; since TRL {_NO_DIVIDED_GRPO_SINCE} a run with it"
        message += " among its arguments ends with an error"
        yield file.conflict(name, message, f"take {key} out", "divided-samples")
    if trainer != "sft":
        return
    packed = next((name for name in ("packing", "eval_packing") if _is_on(file, name)), None)
    if key == "cp_size" and packed and _is_since(release, _NO_PACKED_RINGS_SINCE):
        yield file.refused(packed, f"{ends} with cp_size", f"set {packed}: false")
    elif key == "cp_size" and packed:
        message = (
            f"with cp_size attention crosses the samples of a row, without an error before {_NO_PACKED_RINGS_SINCE}"
        )
        yield file.conflict(packed, message, f"set {packed}: false", WRONG_TRAINING)
    if key == "sp_size" and _is_since(release, _OWN_LOSS_SINCE):
        for name in [name for name in ("loss_type", "label_smoothing_factor") if _replaces_loss(name, document)]:
            yield file.refused(name, f"{ends} with sp_size, whose loss is the model's own", "take it out")


def _replaces_loss(name: str, document: Mapping[str, Any]) -> bool:
    """Whether a key makes SFT's loss another than the model's own."""
    value = document.get(name)
    return value == "dft" if name == "loss_type" else isinstance(value, int | float) and value > 0


def _unsharded_head(file: TrainerFile, release: str, stage: int) -> Iterator[Finding]:
    """Yield a finding if the release reads the output layer's weight, which stage 3 shards, without gathering it."""
    trainer, kernel = trained_by(file), file.values["loss_kernel"]
    reads_weight = kernel == "chunked_nll" or (kernel == "liger" and trainer != "sft")
    if stage != 3 or not reads_weight or _is_since(release, _GATHERED_SINCE[trainer]):
        return
    key = "loss_type" if kernel == "chunked_nll" else file.keys["loss_kernel"]
    message = f"at stage 3 TRL {release} ends with a size mismatch: it reads the head's weight without gathering it"
    yield file.refused(key, message, f"TRL {_GATHERED_SINCE[trainer]} gathers it")


def _with_vllm(file: TrainerFile, release: str, case: ConfigCase) -> ConfigCase:
    """Return the case with the memory of GRPO's vLLM: in the mode colocate it has a fraction of each GPU, which its
    sleep mode frees for a step (trl/generation/vllm_generation.py)."""
    document = file.document
    if not is_grpo(file) or not _is_on(file, "use_vllm"):
        return case
    usual = "colocate" if _is_since(release, _COLOCATES_SINCE) else "server"
    if str(document.get("vllm_mode") or usual).lower() == "server":
        note = file.noted("use_vllm", "vLLM generates on the GPUs of its server: none of these bytes are here", "vllm")
        return dataclasses.replace(case, vllm="server", findings=(*case.findings, note))
    fraction = document.get("vllm_gpu_memory_utilization")
    fraction = _VLLM_SHARE if fraction is None else fraction
    size = 0.0 if case.request.box.device is ANY_DEVICE else fraction * case.request.box.device.visible_gib * GIB
    note = _vllm_note(file, fraction, size)
    vllm_bytes = 0.0 if _is_on(file, "vllm_enable_sleep_mode") else size
    request = dataclasses.replace(case.request, vllm_bytes=vllm_bytes)
    return dataclasses.replace(case, vllm="colocate", request=request, findings=(*case.findings, note))


def _is_on(file: TrainerFile, name: str) -> bool:
    return str(file.document.get(name)).lower() == "true"


def _vllm_note(file: TrainerFile, fraction: float, size: float) -> Finding:
    key = "vllm_gpu_memory_utilization"
    key = key if file.document.get(key) is not None else "use_vllm"
    if _is_on(file, "vllm_enable_sleep_mode"):
        of = f", {rounded(size / GIB)} GiB," * bool(size)
        message = f"vLLM's {fraction:g} of each GPU{of} is free during a step, and taken while it generates"
        return file.noted(key, f"{message}, next to weights and optimizer", "vllm")
    if not size:
        return file.not_counted(
            "use_vllm", f"vLLM takes {fraction:g} of each GPU: --hardware BOX adds it; {NOT_MODELLED}"
        )
    return file.noted(key, f"vLLM takes {fraction:g} of each GPU, {rounded(size / GIB)} GiB: the peak has them", "vllm")
