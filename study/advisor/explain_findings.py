"""Find settings of a config that have no effect, are ignored, conflict, or end a run with an error."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from study.advisor.explain_case import ACCUMULATION, MICRO_BATCH, ConfigCase, ranks_of_a_batch
from study.advisor.explain_combinations import (
    ENDS_WITH_ERROR,
    WRONG_ARGUMENT,
    combination_findings,
    known_causes,
    whole_number,
)
from study.advisor.explain_releases import (
    NO_MEMORY_OF_1_BIT,
    REFUSE_1_BIT,
    judge_by_release,
    release_facts,
    release_faults,
)
from study.advisor.fitted import usual_weights
from study.advisor.request_notes import (
    choice_without_bf16,
    holding_rules,
    is_met,
    lacks_bf16,
    overflows_in_fp16,
    request_facts,
    request_findings,
)
from study.advisor.user_settings import (
    AUTO_VALUE,
    FILLED_BY_TRAINER,
    OFFLOADS,
    ZERO,
    Finding,
    flatten,
    known_settings,
    removed,
    section_entries,
)
from study.config.errors import clip, did_you_mean
from study.config.precisions import computes_in_bf16, in_autocast
from study.config.text import format_number, rounded
from study.config.yaml_sections import load_package_yaml
from study.host.memory import GIB
from study.predictor.memory import predict_memory
from study.predictor.request import FP32_BYTES, MemoryUse, Request
from study.predictor.state import engine_refusal, quantization_refusal, sub_groups
from study.predictor.time import device_bytes, fits, usable_bytes
from study.releases.causes import unsound_releases
from study.releases.races import read_races

# Rule of the findings that only a model has.
WRONG_BLOCK = "wrong-block"
# Names whose ratio (difflib) is at least this are the same one, misspelt.
_SAME_NAME = 0.8
# Rule of the precision that a GPU has no units for.
NO_UNITS = "no-units"
# Less memory than this, in bytes, decides nothing.
_WORTH_NOTING = 2 * GIB
# Names of torch.
_TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def findings(case: ConfigCase) -> list[Finding]:
    """Return all findings of a config, including those of parsing it, for its releases."""
    dropped = FILLED_BY_TRAINER if case.loop == "trainer" else ()
    return [judge_by_release(case, finding) for finding in _findings(case) if finding.rule not in dropped]


def _findings(case: ConfigCase) -> list[Finding]:
    facts, reference = _facts(case), known_settings()
    combinations = list(combination_findings(case))
    if case.file.deepspeed is None:
        rules = holding_rules(reference["rules_without_deepspeed"], facts)
        weights = _loaded_weights(case.request, case.loads_fp32)
        blocks = list(_wrong_blocks(case))
        return [
            *case.findings,
            *rules,
            *_quantization(case.request),
            *_missing_units(case),
            *blocks,
            *weights,
            *request_findings(case.request, facts),
            *combinations,
        ]
    results = [
        *case.findings,
        *_ineffective(case, facts),
        *_type_of_optimizer(case),
        *_arguments(case),
        *holding_rules(reference["rules"], facts),
        *request_findings(case.request, facts),
        *_batch(case),
        *combinations,
        *release_faults(case, _tested_strategy(case), known_causes(case)),
    ]
    if case.stage and case.request.strategy.offloads and case.request.box.device.memory_gib:
        used = [what for what in OFFLOADS if case.offload(what)]
        # All offloads, else that of the parameters alone.
        for without in (used, ["offload_param"] if len(used) > 1 else []):
            memory, box = case.at(**dict.fromkeys(without)).memory, case.request.box
            if without and fits(memory, box, at_upper=True):
                sizes = device_bytes(memory, at_upper=True) / GIB, usable_bytes(box) / GIB
                why = "none is needed" if without == used else "the optimizer's offload is enough"
                message = (
                    f"without it the 90 % bound of the peak is {rounded(sizes[0])} of {rounded(sizes[1])} GiB: {why}"
                )
                results.append(Finding("noted", f"{ZERO}.{without[0]}", message, rule="offload-not-needed"))
                break
    results += [*_large_sub_groups(case), *_quantization(case.request), *_missing_units(case)]
    if refusal := engine_refusal(case.request):
        results.append(Finding("refused", *refusal))
    return results


def _large_sub_groups(case: ConfigCase) -> Iterator[Finding]:
    """Yield the pinned host memory that the default sub_group_size would save in swapping the optimizer."""
    optimizer, key = case.offload("offload_optimizer"), "sub_group_size"
    if optimizer is None or optimizer["device"] != "nvme" or case.stage != 3:
        return
    default = section_entries(ZERO)[key]["default"]
    largest = [max(sub_groups(it.request)) for it in (case, case.at(sub_group_size=default))]
    pinned, by_default = (optimizer["buffer_count"] * elements * FP32_BYTES for elements in largest)
    if pinned - by_default < _WORTH_NOTING:
        return
    message = (
        f"a sub-group of {largest[0]:,} elements: its {optimizer['buffer_count']} buffers (buffer_count) pin"
        f" {rounded(pinned / GIB)} GiB of host memory a rank, and with the default {rounded(by_default / GIB)} GiB"
    )
    yield Finding("noted", f"{ZERO}.{key}", message, f"set {default}, or leave it out", "large-sub-groups")


def _quantization(request: Request) -> list[Finding]:
    """Return the finding of 8-bit weights that the engine would shard."""
    problem = quantization_refusal(request)
    fix = "use stage 2 or DDP, or 4 bits"
    return [] if problem is None else [Finding("conflict", "quantization", problem, fix, "quantized")]


def _missing_units(case: ConfigCase) -> Iterator[Finding]:
    """Yield types and kernels that the GPU lacks: torch emulates bf16, and flash attention ends with an error."""
    device, request = case.request.box.device, case.request
    if not lacks_bf16(request):
        return
    if computes_in_bf16(request.precision):
        message = f"{device.name} has no units for bf16, which torch emulates at the rate of fp32 at best"
        fix = "use fp16, or fp32"
        if overflows_in_fp16(request):
            message += f", and activations of {case.shape.name} exceed fp16's largest number"
            fix = choice_without_bf16(request)
        yield Finding("conflict", _precision_key(case), message, fix, NO_UNITS)
    if request.attention == "flash_attention_2":
        message = f"ends with an error: {device.name} has no flash_attention_2"
        yield Finding("refused", "attn_implementation", message, "use sdpa", ENDS_WITH_ERROR)


def _precision_key(case: ConfigCase) -> str:
    """Return the setting that makes a run one in bf16."""
    section = case.top.get("bf16") or case.top.get("bfloat16")
    if isinstance(section, Mapping) and section.get("enabled") is True and case.file.launcher == "deepspeed":
        return "bf16.enabled"
    return "mixed_precision"


@functools.cache
def _blocks() -> dict[str, list[str]]:
    """Return the content of blocks.yaml."""
    text = Path(__file__).with_name("blocks.yaml").read_text(encoding="utf-8")
    document: dict[str, list[str]] = load_package_yaml(text)
    return document


def _wrong_blocks(case: ConfigCase) -> Iterator[Finding]:
    """Yield a finding for a class that is to be wrapped and that the model does not have: a block of another type, or a
    misspelt one of this model. Any other class may be there."""
    key, settings = "fsdp_transformer_layer_cls_to_wrap", case.file.fsdp or {}
    model_blocks = _blocks().get(case.shape.model_type)
    # A model of several has blocks of other types.
    is_single = '_config"' not in case.shape.document
    policy = str(settings.get("fsdp_auto_wrap_policy")).upper()
    if model_blocks is None or not is_single or policy != "TRANSFORMER_BASED_WRAP":
        return
    value = settings.get(key) or []
    listed = value if isinstance(value, list) else str(value).split(",")
    names = [str(name).strip() for name in listed]
    all_blocks = {block for blocks in _blocks().values() for block in blocks}
    layers = [block for block in model_blocks if block.endswith(("Layer", "Block"))] or model_blocks
    for name in [name for name in names if name and name not in model_blocks]:
        if name in all_blocks or did_you_mean(name, model_blocks, _SAME_NAME):
            message = f"Accelerate ends with an error: {case.shape.name} has no {clip(name)}"
            yield Finding("refused", key, message, f"set {' and '.join(layers)}, or leave it out", WRONG_BLOCK)


def _loaded_weights(request: Request, loads_fp32: bool) -> Iterator[Finding]:
    """Yield that fp32 weights are counted in plain training, whose program loads them in this type, or whose file does
    not set the type."""
    rates, strategy = request.box.device.peak_tflops, request.strategy
    is_loaded_in_fp32 = in_autocast(request.precision) and not request.loads_16_bits
    if strategy.deepspeed is None and request.shape.lora_rank and is_loaded_in_fp32:
        yield from _frozen_in_fp32(request)
    # Under FSDP Accelerate makes trained weights fp32 in mixed precision (fsdp2_prepare_model).
    precisions = ("fp32",) if strategy.is_fsdp else ("fp32", "bf16")
    is_plain = strategy.deepspeed is None and not request.shape.lora_rank
    if not is_plain or request.precision not in precisions or rates.get("bf16", 0.0) is None:
        return
    # Weights, gradients and two moments of half the bytes.
    if 8 * request.shape.parameters / (request.fsdp_ranks if strategy.is_fsdp else 1) < _WORTH_NOTING:
        return
    in_16_bits = predict_memory(dataclasses.replace(request, precision="bf16-engine", pure=True, autocast=False))
    peak = f"{rounded(device_bytes(in_16_bits) / GIB)} GiB{_format_host(predict_memory(request), in_16_bits)}"
    if loads_fp32:
        message = f"weights are loaded and trained in fp32; in bf16, without fp32 masters, a peak of {peak}"
        yield Finding("noted", "weights", message, rule="fp32-weights")
        return
    loads = "transformers 5 loads a bf16 checkpoint in bf16 and trains it without fp32 masters"
    message = f"counted in fp32; {loads}, a peak of {peak}"
    fix = "dtype=torch.float32 loads fp32"
    if strategy.is_fsdp:
        fix += ", and in mixed precision Accelerate makes trained weights fp32"
    yield Finding("noted", "weights", message, fix, rule="fp32-weights")


def _frozen_in_fp32(request: Request) -> Iterator[Finding]:
    """Yield the bytes that frozen weights in fp32 take, and 16 bits would save."""
    if request.quantized or request.in_8_bits:
        yield from _computes_in_fp32(request)
        return
    wide = request.stored.frozen_parameters * FP32_BYTES / (request.fsdp_ranks if request.strategy.is_fsdp else 1)
    if wide < _WORTH_NOTING:
        return
    name = _TYPES[request.precision]
    in_fp32, in_16_bits = map(predict_memory, (request, _in_usual_type(request)))
    message = f"frozen weights are loaded in fp32, {rounded(wide / GIB)} GiB a rank; {name} takes half"
    message += _format_host(in_fp32, in_16_bits)
    yield Finding("noted", "weights", message, f"set dtype: {name}", rule="fp32-weights")


def _in_usual_type(request: Request) -> Request:
    """Return the request of a program that loads the weights next to adapters in the type of mixed precision."""
    precision, is_pure = usual_weights(request.shape, request.strategy, request.precision)
    return dataclasses.replace(request, precision=precision, pure=is_pure, autocast=False)


def _format_host(in_fp32: MemoryUse, in_16_bits: MemoryUse) -> str:
    """Return the host memory of weights in both types. Each process has its own fp32 weights, and those in the type of
    their file are pages that all of them share (_materialize_copy in transformers' core_model_loading.py)."""
    wide, narrow = in_fp32.host_peak.value, in_16_bits.host_peak.value
    if wide - narrow < _WORTH_NOTING:
        return ""
    return f", and host memory of {rounded(narrow / GIB)} and not {rounded(wide / GIB)} GiB a node"


def _computes_in_fp32(request: Request) -> Iterator[Finding]:
    """Yield the peaks of quantized weights whose other tensors are loaded in fp32, and in 16 bits."""
    wide, narrow = (device_bytes(predict_memory(variant)) for variant in (request, _in_usual_type(request)))
    if wide - narrow < _WORTH_NOTING:
        return
    name = _TYPES[request.precision]
    message = (
        "tensors that are not quantized are loaded in fp32, which autocast leaves to norms and residuals: a peak"
        f" of {rounded(wide / GIB)} GiB, {rounded(narrow / GIB)} in {name}"
    )
    yield Finding("noted", "weights", message, f"set dtype: {name}", rule="fp32-weights")


def _ineffective(case: ConfigCase, facts: Mapping[str, Any]) -> Iterator[Finding]:
    for key in case.file.explicit_keys:
        section, _, name = key.rpartition(".")
        entry = section_entries(section or "top").get(name, {})
        first = key.removeprefix(f"{ZERO}.").split(".")[0]
        # A disabled setting causes no finding.
        is_false = key == f"{ZERO}.{first}" and case.zero.get(first) is False
        if case.offload(first) is None if first in OFFLOADS else is_false:
            continue
        stages = entry.get("stages", range(4))
        if "ineffective" in entry:
            yield Finding("ineffective", key, entry["ineffective"])
        elif case.stage not in stages and (section == ZERO or section not in case.file.explicit_keys):
            message = f"stage {case.stage} does not use it; stage {' and '.join(map(str, stages))} would"
            yield Finding("ineffective", key, message)
        elif (needs := entry.get("needs")) and not is_met(needs, facts):
            yield Finding("ineffective", key, f"it has an effect only with {needs.replace('==', '=')}")


def _type_of_optimizer(case: ConfigCase) -> Iterator[Finding]:
    """Yield findings about the optimizer. DeepSpeed ignores case in its names, but not in torch's (engine.py)."""
    key, optimizers = "optimizer.type", known_settings()["optimizers"]
    name = (case.top.get("optimizer") or {}).get("type")
    if name is None or name.lower() in ("adam", "adamw"):
        return
    if name.lower() not in optimizers["engine"] and name not in optimizers["torch"]:
        message = f"the engine ends with an error: neither it nor torch.optim has {clip(name)}"
        gone = known_settings()["removed"].get(name.lower())
        refused = Finding("refused", key, message, did_you_mean(name, optimizers["torch"]).strip())
        yield _removed_optimizer(case, name, removed(key, gone)) if gone else refused
        return
    if case.request.optimizer not in name.lower():
        yield Finding("noted", key, f"{name}: bytes here are AdamW's, which keeps two moments of each parameter")
    is_allowed = case.file.launcher != "deepspeed" or case.top.get("zero_allow_untested_optimizer")
    if case.stage and name.lower() not in optimizers["zero"] and not is_allowed:
        yield Finding("refused", key, f"ZeRO accepts {name} only with zero_allow_untested_optimizer: true")


def _removed_optimizer(case: ConfigCase, name: str, finding: Finding) -> Finding:
    """Return the finding of a 1-bit optimizer, which no release has with ZeRO ("1bit-Adam is not compatible with ZeRO",
    _configure_basic_optimizer in engine.py before 0.19.7)."""
    if case.stage == 0:
        return dataclasses.replace(finding, message=f"{finding.message}; {NO_MEMORY_OF_1_BIT}")
    message = f"{finding.message}; earlier releases {REFUSE_1_BIT}, and {NO_MEMORY_OF_1_BIT}"
    fix = "set AdamW"
    if case.stage in section_entries(ZERO)["zero_quantized_gradients"]["stages"]:
        fix += ", with zero_quantized_gradients for less communication"
    elif name.lower() == "onebitlamb":
        # Its norms are those of whole tensors, of which ZeRO has shards.
        fix += ", or Lamb at stage 0"
    return dataclasses.replace(finding, message=message, fix=fix)


def _arguments(case: ConfigCase) -> Iterator[Finding]:
    """Yield arguments that an optimizer or scheduler does not take or lacks.

    DeepSpeed's reader does not check them, and its engine does not create the optimizer or the scheduler, or fails in a
    step.
    """
    clipping = case.top.get("gradient_clipping", 1.0)
    if clipping != "auto" and type(clipping) not in (int, float, bool):
        message = f"is {clip(clipping)}, with which no step succeeds"
        yield Finding("refused", "gradient_clipping", message, "write a number without quotes", WRONG_ARGUMENT)
    for name, classes in known_settings()["arguments"].items():
        section = case.top.get(name) or {}
        kind, params = section.get("type"), section.get("params") or {}
        if isinstance(params, Mapping):
            yield from _argument_values(case, f"{name}.params", params)
        signature = classes.get(kind.lower() if name == "optimizer" else kind) if isinstance(kind, str) else None
        if signature is None or not isinstance(params, Mapping):
            continue
        for key in params:
            if key not in signature:
                message = f"{kind} takes no such argument: the run ends with an error"
                fix = "set gradient_clipping" if key == "max_grad_norm" else did_you_mean(str(key), signature).strip()
                yield Finding("refused", f"{name}.params.{key}", message, fix, WRONG_ARGUMENT)
        missing = [key for key, need in signature.items() if need == "required" and key not in params]
        if missing:
            message = f"{kind} needs {' and '.join(missing)}: without it the run ends with an error"
            yield Finding("refused", f"{name}.params", message, rule=WRONG_ARGUMENT)


def _argument_values(case: ConfigCase, place: str, params: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield arguments whose values end a run, or keep the optimizer from a finite step; and those that are "auto"."""
    reference = known_settings()
    for argument, value in params.items():
        key = f"{place}.{argument}"
        if value == "auto":
            if case.file.launcher == "accelerate":
                # Reading the file refused those that Accelerate does not fill in.
                continue
            if key in reference["filled_by_trainer"]:
                message = "auto: the Trainer fills it in; deepspeed.initialize alone ends with an error"
                yield Finding("noted", key, message, rule=AUTO_VALUE)
            else:
                yield Finding("refused", key, "auto: nothing fills it in", "set a value", WRONG_ARGUMENT)
        elif argument == "betas" and not _are_betas(value):
            message = f"is {clip(value)}, with which no step succeeds"
            yield Finding("refused", key, message, "write two numbers from 0 to below 1", WRONG_ARGUMENT)
        elif argument in reference["argument_numbers"]:
            least = reference["argument_numbers"][argument]
            is_whole = argument == "warmup_num_steps"
            if not isinstance(value, int if is_whole else int | float) or value < least:
                message = f"is {clip(value)}, with which no step succeeds"
                fix = f"write a {'whole ' * is_whole}number from {least} up, without quotes"
                yield Finding("refused", key, message, fix, WRONG_ARGUMENT)


def _are_betas(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(type(beta) in (int, float) and 0 <= beta < 1 for beta in value)


def _facts(case: ConfigCase) -> dict[str, Any]:
    """Return what rules may ask of a config, by name."""
    file, shape = case.file, case.shape
    facts: dict[str, Any] = {
        "launcher": file.launcher,
        "type": file.distributed_type,
        "mixed_precision": file.mixed_precision,
        "num_processes": file.num_processes,
        "mesh_ranks": file.mesh_ranks,
        "tp_ranks": file.group_sizes.get("tp_size", 1),
        "cp_ranks": file.group_sizes.get("cp_size", 1),
        **request_facts(case.request),
        **release_facts(case),
        "has_stated_release": bool(case.stated_releases),
    }
    if file.deepspeed is None:
        settings = file.fsdp or {}
        saved_gib = case.request.stored.parameters * case.request.weight_bytes / GIB
        return facts | {
            **settings,
            "saves_whole": saves_whole_model(settings),
            # peft saves adapters alone.
            "saved_gib": 0.0 if shape.lora_rank else saved_gib,
            "saved": f"{rounded(saved_gib)} GiB",
            "set": set(settings),
            "version": str(settings.get("fsdp_version", 1))[:60],
            "shown_version": clip(settings.get("fsdp_version", 1)),
            "sharding": file.sharding and file.sharding[:60],
            "refusal": shape.why_no_fsdp(case.request.fsdp_version),
            "machine_ranks": case.request.box.gpus_per_node,
        }
    defaults = {key: entry["default"] for key, entry in section_entries("top").items() if "default" in entry}
    top = dict(case.top) if case.top.get("bf16") else {**case.top, "bf16": case.top.get("bfloat16")}
    devices = {what: (case.offload(what) or {"device": "none"})["device"] for what in OFFLOADS}
    # The engine limits the secondary partition to the number of ranks (groups.py).
    group = min(case.zero["zero_hpz_partition_size"], case.ranks)
    request, tested = case.request, _tested_strategy(case)
    parallel = case.top.get("tensor_parallel")
    autotp_ranks = whole_number(parallel.get("autotp_size")) if isinstance(parallel, Mapping) else 0
    return {**flatten(defaults), **flatten(top), **flatten(case.zero), **flatten(file.plugin, "plugin."), **facts} | {
        "unsound": unsound_releases(tested, request.accumulation, request.precision, case.loop or "accelerate")
        or "none",
        "unsound_accumulating": _unsound_accumulating(case, tested) or "none",
        **_race_facts(case),
        "divides_batch": all(type(case.top.get(key)) is int for key in ("train_batch_size", MICRO_BATCH)),
        **devices,
        **{
            f"no_{what.partition('_')[2]}_path": (case.offload(what) or {}).get("nvme_path") is None
            for what in OFFLOADS
        },
        "offload": "nvme" if "nvme" in devices.values() else "none",
        "set": {*file.explicit_keys, *flatten(case.top)},
        "autotp_ranks": autotp_ranks,
        "autotp_groups": case.ranks // max(autotp_ranks, 1),
        "group": group,
        "machine_ranks": case.request.box.gpus_per_node,
        "machines": file.num_machines or 1,
        # prepare_deepspeed_cmd_env of accelerate/utils/launch.py.
        "node_launcher": str(file.plugin.get("deepspeed_multinode_launcher") or "pdsh")[:60],
        "ungrouped_ranks": case.ranks % max(group, 1),
        "shard": -(-shape.largest // case.data_ranks),
        "largest": case.largest.name,
        "nvme_weights": case.state.params_nvme,
        "parameters": shape.parameters,
        "twice_parameters": 2 * shape.parameters,
        "max_in_cpu": (case.offload("offload_param") or {}).get("max_in_cpu"),
    }


def _tested_strategy(case: ConfigCase) -> str:
    """Return the strategy that `study releases` tested of a stage and its offload."""
    return "zero2_cpu" if case.stage == 2 and case.offload("offload_optimizer") else f"zero{case.stage}"


def saves_whole_model(settings: Mapping[str, Any]) -> bool:
    """Whether FSDP saves the weights of all ranks as one, as version 1 does by default (set_state_dict_type)."""
    usual = "full_state_dict" if str(settings.get("fsdp_version", 1)) == "1" else "sharded_state_dict"
    return str(settings.get("fsdp_state_dict_type") or usual).lower() in ("full_state_dict", "1")


def _race_facts(case: ConfigCase) -> dict[str, str]:
    """Return the release that has no race of GPU streams at this stage, and the one for compiled models."""
    # Imported here, as every user of it does: it is slow.
    from packaging.version import Version

    races = [race for race in read_races() if f"zero{case.stage}" in race.strategies]
    plain = [race for race in races if race.condition != "torch.compile"]
    releases = [max((race.fix.release for race in listed), key=Version, default="none") for listed in (plain, races)]
    torch = next((f" with torch {race.releases['torch']}" for race in plain if "torch" in race.releases), "")
    compiled = f" ({releases[1]} with torch.compile)" if releases[1] != releases[0] else ""
    return {"race_release": releases[0], "race_condition": f"{compiled}{torch}"}


def _unsound_accumulating(case: ConfigCase, tested: str) -> str:
    """Return the releases with a known fault if the program accumulates; empty if the file sets the number."""
    if case.top.get(ACCUMULATION, "auto") != "auto":
        return ""
    steps = max(2, case.request.accumulation)
    return unsound_releases(tested, steps, case.request.precision, case.loop or "accelerate")


def _batch(case: ConfigCase) -> Iterator[Finding]:
    keys, ranks = ("train_batch_size", MICRO_BATCH, ACCUMULATION), ranks_of_a_batch(case.top, case.ranks)
    if (sequence := case.top.get("sequence_parallel_size")) is not None:
        data = case.top.get("data_parallel_size")
        if any(type(size) is not int or size < 1 for size in (sequence, data or 1)) or (
            data is not None and data * sequence != case.ranks
        ):
            message = f"{clip(data)} groups of {clip(sequence)} ranks are not {case.ranks}"
            yield Finding("refused", "sequence_parallel_size", f"the engine ends with an error: {message}")
            return
    sizes = [None if case.top.get(key) == "auto" else case.top.get(key) for key in keys]
    is_open = [case.top.get(key) == "auto" for key in keys]
    # The Trainer fills in each "auto" by itself; Accelerate multiplies train_batch_size from the micro-batch.
    if sizes[0] is None and (is_open[1] or (is_open[0] and case.file.launcher == "deepspeed")):
        sizes[1] = sizes[1] or case.request.micro_batch
    if case.file.launcher != "deepspeed" or any(is_open[1:]):
        sizes[2] = sizes[2] or case.request.accumulation
    if problem := _batch_problem(sizes, ranks):
        yield Finding("refused", *problem)
    # With "auto" the program sets it.
    if case.top.get(ACCUMULATION) == "auto" and case.request.accumulation == 1:
        by_two = predict_memory(dataclasses.replace(case.request, accumulation=2))
        reserved, reserved_by_two = (format_number(it.peak_reserved.value / GIB) for it in (case.memory, by_two))
        message = "auto: assumed to be 1; --accumulation sets another value"
        if reserved_by_two != reserved:
            message += "; with more, gradients stay in memory during the next micro-batch, and a rank reserves"
            message += f" {reserved_by_two} GiB instead of {reserved}"
        yield Finding("filled", ACCUMULATION, message)


def _batch_problem(sizes: Sequence[Any], ranks: float) -> tuple[str, str, str] | None:
    """Return the key, the error of DeepSpeedConfig's arithmetic (_set_batch_related_parameters) and the fix; None
    without one."""
    error, count = "the engine ends with an error", f"{ranks:g} rank{'s'[: ranks != 1]}"
    for key, size in zip(("train_batch_size", MICRO_BATCH, ACCUMULATION), sizes, strict=True):
        if size is not None and (not isinstance(size, int | float) or not size > 0):
            return key, f"{error}: it is {clip(size)}", "set a whole number from 1 up"
    batch, micro, steps = sizes
    if batch is None:
        return None if micro else (MICRO_BATCH, f"{error} without it or train_batch_size", "set one of them")
    unit = (micro or 1) * (steps or 1) * ranks
    fix = f"set {max(round(batch / unit), 1) * unit:g}, or another number of ranks"
    if None not in sizes and batch != unit:
        message = f"{micro} x {steps} x {count} is {unit:g}, not {batch}"
        fix = f"set {unit:g}, or leave it out"
    elif steps is None and micro and batch // micro // ranks * micro * ranks != batch:
        message = f"{batch} is not a multiple of {micro} x {count}"
    elif micro is None and batch // ranks // (steps or 1) * (steps or 1) * ranks != batch:
        message = f"{batch} is not a multiple of {steps or 1} x {count}"
    else:
        return None
    return "train_batch_size", f"{error}: {message}", fix
