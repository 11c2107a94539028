"""Notes on a request: assumptions and effects of its settings, by the rules of known_settings.yaml.

`study advise` and `study predict` print them, and start without the modules that explain files.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from study.advisor.user_settings import ZERO, Finding, flatten, known_settings
from study.config.precisions import computes_in_fp16, in_engine
from study.config.text import format_number, rounded
from study.host.memory import GIB
from study.predictor.activations import computing_mode, is_fused
from study.predictor.hardware import Device
from study.predictor.losses import LossKernel, logit_bytes
from study.predictor.request import Request
from study.predictor.shape import ModelShape
from study.predictor.state import accumulated_bytes, frozen_gradients_bytes, reduced_bytes, unsharded_4_bit_bytes
from study.predictor.table_shape import has_head, named_class
from study.predictor.time import predict_time

_COMPARE = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}


def request_findings(request: Request, facts: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Yield the findings about model, program and hardware; without the facts of a file those of the strategy."""
    if facts is None:
        settings = request.strategy.deepspeed or {}
        facts = {**flatten(settings.get(ZERO, {})), "launcher": "accelerate", "set": set(flatten(settings))}
        facts |= {f"offload_{what}": request.strategy.offload_device(what) or "none" for what in ("optimizer", "param")}
    for finding in holding_rules(known_settings()["requests"], {**facts, **request_facts(request)}):
        if finding.rule in (OVERFLOWS, _REPORTED) and lacks_bf16(request):
            choice = choice_without_bf16(request, is_certain=finding.rule == OVERFLOWS)
            yield replace(finding, fix=f"{request.box.device.name} has no bf16: {choice}")
        else:
            yield finding


# Undoes the cast of TRL's trainers, whose adapters of a quantized model are in bf16.
ADAPTERS_IN_FP32 = "before train(): for p in trainer.model.parameters(): if p.requires_grad: p.data = p.data.float()"

# Rules of adapters in fp32 next to 16-bit weights at stage 3: of any release, and of the one that ends with an error.
ADAPTER_TYPES, MIXED_ADAPTERS = "adapter-types", "mixed-adapters"
# Rules of models whose activations exceed fp16's largest number: certain, and reported.
OVERFLOWS, _REPORTED = "trained-in-bf16", "reported-nan"


def lacks_bf16(request: Request) -> bool:
    """Whether the GPU has no units for bf16."""
    return not request.box.is_cpu_only and request.box.device.peak_tflops.get("bf16", 0.0) is None


def overflows_in_fp16(request: Request) -> bool:
    """Whether activations of the model exceed fp16's largest number."""
    in_fp16 = replace(request, precision="fp16-engine" if in_engine(request.precision) else "fp16")
    return any(finding.rule == OVERFLOWS for finding in request_findings(in_fp16))


# kernels-community, pull request 313: sinks need Hopper. FLASH_ATTENTION_COMPATIBILITY_MATRIX of transformers 5.23.
_KERNELS_WITH_SINKS = {"kernels-community/vllm-flash-attn3": "Hopper", "flash_attention_4": "Hopper and later"}
_FIRST_WITH_SINKS = 9.0


def lacks_flash(shape: ModelShape, device: Device) -> bool:
    """Whether no kernel of flash attention computes the model's sinks on this GPU; unknown of one without CUDA."""
    capability = device.compute_capability
    return bool(shape.flash_kernels) and capability is not None and capability < _FIRST_WITH_SINKS


def kernels_text(shape: ModelShape) -> str:
    """Return the kernels of flash attention that compute the sinks of a model, and their GPUs; empty without sinks."""
    listed = [f"{name} ({gpus})" for name, gpus in _KERNELS_WITH_SINKS.items() if name in shape.flash_kernels]
    return f"its sinks need {' or '.join(listed)}" if listed else ""


def choice_without_bf16(request: Request, *, is_certain: bool = True) -> str:
    """Return the choice between fp32 and fp16 for a model whose activations exceed fp16's largest number, or are
    reported to do so in some runs: those begin with the faster one."""
    fp16, fp32 = (predict_time(replace(request, precision=name)).step_s.value for name in ("fp16", "fp32"))
    factor = rounded(fp32 / fp16)
    if is_certain:
        return f"use fp32; or fp16, {factor} times as fast, if its loss scale stays above the minimum"
    return f"use fp16, {factor} times as fast as fp32, while its losses are numbers; else fp32"


def request_notes(request: Request, without: str) -> list[str]:
    """Return the usual notes on a request, without those of one rule."""
    findings = (item for item in request_findings(request) if item.rule != without)
    return [*finding_notes(findings), *input_gradient_notes(request)]


def finding_notes(findings: Iterable[Finding], details: bool = False) -> Iterator[str]:
    """Yield findings about a request as text: the usual ones, or with details all."""
    hidden = [] if details else known_settings()["details"]
    yield from (f"{item.key}: {item.says}" for item in findings if item.rule not in hidden)


def input_gradient_notes(request: Request) -> Iterator[str]:
    """Yield that frozen modules before the first trained one have a backward pass, if they have one for nothing."""
    shape = request.shape
    if shape.has_input_gradients(request.gradient_checkpointing) and shape.gathered_once(recomputes=False):
        yield (
            "freeze: gradient checkpointing of transformers makes the outputs of all input embeddings require"
            " gradients, so that frozen modules before the first trained one have a backward pass; with"
            " model.disable_input_require_grads() they have none (--frozen_without_backward)"
        )


# Models of pairs whose loss compares each sample with the others of a batch.
_OF_PAIRS = {
    *("align", "altclip", "blip", "chinese_clip", "clap", "clip", "clvp", "groupvit", "siglip", "siglip2", "x_clip"),
    "vision-text-dual-encoder",
}


def _may_be_contrastive(shape: ModelShape, architecture: str) -> bool:
    """Whether a model is usually trained with the other samples of a batch as negatives: one of pairs, and one without
    an output layer, whose embeddings are compared."""
    is_text = shape.is_traced is False or shape.family == "sequence-classification"
    is_base = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return shape.model_type in _OF_PAIRS or (is_text and is_base)


def _is_unread(shape: ModelShape, architecture: str) -> bool:
    """Whether config.json names a class of a decoder of the table that is none of those whose output layer is known."""
    if shape.is_traced or shape.family != "causal-lm" or shape.headless_class or not architecture:
        return False
    return not architecture.endswith(("ForCausalLM", "LMHeadModel"))


def _masked_logits_bytes(request: Request) -> float:
    """Return the bytes of the logits of a masked language model, whose loss is torch's cross entropy of them, which
    autocast computes in fp32 (BertForMaskedLM.forward, autocast_mode.h)."""
    kernel: LossKernel = "transformers" if computing_mode(request) == "autocast" else "same_type"
    per_logit = logit_bytes(kernel, request.computing_bytes)
    assert per_logit is not None
    columns = request.output_tokens * request.shape.vocabulary
    return columns * (per_logit.saved + max(per_logit.forward, per_logit.backward))


def request_facts(request: Request) -> dict[str, Any]:
    """Return what rules may ask of a request, by name."""
    shape, strategy = request.shape, request.strategy
    architecture = named_class(json.loads(shape.document)) if shape.document else ""
    is_encoder = shape.family == "sequence-classification"
    is_masked = is_encoder and architecture.endswith("ForMaskedLM")
    unreduced = accumulated_bytes(replace(request, sync_each_batch=False)) / GIB
    scores = request.micro_batch * shape.heads * request.sequence_length**2 * request.computing_bytes / GIB
    reduced = reduced_bytes(replace(request, sync_each_batch=True, fsdp_offloads=False)) / GIB
    return {
        "gathered": f"{format_number(request.stored.parameters * request.gathered_bytes / GIB)} GiB",
        "unreduced": f"{rounded(unreduced)} GiB" if strategy.is_fsdp else "none",
        # Reduced within a replica alone, to the type of the shards.
        "reduced": f"{rounded(reduced)} GiB",
        "sync_saves": reduced < unreduced,
        "sync_each_batch": request.sync_each_batch,
        "replicas": request.data_ranks // request.fsdp_ranks,
        "ranks": request.box.ranks,
        "precision": request.precision,
        "pure": request.pure,
        "stage": strategy.zero_stage or 0,
        "loaded": f"{format_number(unsharded_4_bit_bytes(request) / GIB)} GiB",
        "on_host": request.loads_on_host,
        "fsdp2": strategy.is_fsdp and request.fsdp_version == 2,
        "mixed_units": request.has_mixed_units,
        "frozen_gradients": f"{format_number(frozen_gradients_bytes(request) / GIB)} GiB",
        # Two bytes more of each frozen weight.
        "frozen": f"{format_number(2 * request.stored.frozen_parameters / request.fsdp_ranks / GIB)} GiB",
        "engine": "fsdp" if strategy.is_fsdp else "none" if strategy.deepspeed is None else "deepspeed",
        "model": shape.model_type,
        "built": shape.built_class,
        "vocabulary": f"{shape.vocabulary:,}",
        "stand_in": shape.is_stand_in,
        "other_head": architecture if is_masked else "none",
        "masked_logits": f"{rounded(_masked_logits_bytes(request) / GIB)} GiB" if is_masked else "none",
        "headless": shape.headless_class or "none",
        "has_head": has_head(shape),
        "unread_class": architecture if _is_unread(shape, architecture) else "none",
        "contrastive": _may_be_contrastive(shape, architecture),
        "experts": shape.active_experts,
        "towers": any(f'"{kind}_config"' in shape.document for kind in ("vision", "audio")),
        "weights": shape.quantized_by or "none",
        "peft": "lora" if shape.lora_rank else "none",
        "quantized": request.quantized,
        "storage": "float16" if computes_in_fp16(request.precision) else "bfloat16",
        "in_8_bits": request.in_8_bits,
        "reference_model": request.has_reference_copy,
        "optimizer_name": request.optimizer,
        "positions": f"{shape.positions or 0:,}",
        "beyond": not shape.has_position_table and 0 < (shape.positions or 0) < request.sample_tokens,
        "attention": request.attention,
        "fused": is_fused(request),
        "flash": "flash_attention_2" in shape.fused_attentions,
        "flex": "flex_attention" in shape.fused_attentions,
        "lacks_flash": lacks_flash(shape, request.box.device),
        "kernels": kernels_text(shape) or "with any of its kernels",
        "traced": shape.is_traced,
        "device": request.box.device.name,
        "scores": f"{rounded(scores)} GiB",
        "loss_kernel": request.loss_kernel,
        "accumulation": request.accumulation,
        "gradient_checkpointing": request.gradient_checkpointing,
    }


def holding_rules(rules: Sequence[Any], facts: Mapping[str, Any]) -> Iterator[Finding]:
    for kind, key, conditions, says, *rule in rules:
        if all(is_met(condition.format_map(facts), facts) for condition in conditions):
            message, _, fix = says.format_map(facts).partition(" -> ")
            yield Finding(kind, key, message, fix, rule="".join(rule))


def is_met(condition: str, facts: Mapping[str, Any]) -> bool:
    name, sign, *value = condition.split()
    if name in ("set", "unset"):
        return (sign in facts["set"]) == (name == "set")
    fact, text = facts.get(name), str(facts.get(name)).lower()
    if name.endswith("_release") and sign in _COMPARE:
        return fact is None or _is_release(fact, sign, value[0])
    if sign in _COMPARE:
        # "auto" is neither more nor less than a number.
        return bool(_COMPARE[sign](fact if isinstance(fact, int | float) else math.nan, float(value[0])))
    return (text in value[0].split("|")) == (sign != "!=")


def _is_release(release: str, sign: str, limit: str) -> bool:
    """Whether a release is before or after another one, by the sign of a condition."""
    # Imported here, since advice and predictions do not need it.
    from study.host.stacks import release_key

    return bool(_COMPARE[sign](release_key(release), release_key(limit)))
