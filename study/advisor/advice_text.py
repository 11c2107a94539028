"""The page that `study advise` prints, of an `AdviceAnswer` alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from study.advisor import advise
from study.advisor.advice_answer import AdviceAnswer, Recommendation
from study.advisor.advise import AdviceRequest, Option
from study.advisor.advised_files import SAVES_SHARDS, AdvisedFiles, saves_shards
from study.advisor.prediction import is_measured
from study.advisor.request_notes import ADAPTERS_IN_FP32, OVERFLOWS, finding_notes
from study.advisor.request_text import (
    dpo_notes,
    host_text,
    optimizer_text,
    program_text,
    tokens_text,
    workload_text,
)
from study.config.precisions import computes_in_fp16, computing_type
from study.config.printing import TextTable
from study.config.text import format_parameters, rounded
from study.host.memory import GIB
from study.predictor.calibration import calibration_lines
from study.predictor.communication import network_notes, pcie_notes
from study.predictor.hardware import Hardware, pair_notes
from study.predictor.request import Request
from study.predictor.shape import trained_text
from study.predictor.state import REPLACED, unswapped_kind
from study.predictor.time import (
    device_bytes,
    excess_bytes,
    host_adam_note,
    host_limit,
    lora_note,
    max_offload_slowdown,
    unvalidated_notes,
    usable_bytes,
)
from study.releases.causes import least_sound_release, unsound_releases

_LARGE_HOST_BYTES = 256 * GIB
# An option that needs at most this fraction of the recommended one's host memory is named as well.
_LIGHTER = 0.75
_COLUMNS = (
    "strategy",
    "micro-\nbatch",
    "accumu-\nlation",
    "check-\npointing",
    "peak\nGiB",
    "90 %\nbound",
    "tokens/s,\nall ranks",
    "host\nGiB",
    "NVMe\nGiB",
    "cost/M\ntokens",
    "",
)
_DETAILS = """\
micro-batch: samples of one forward pass on one rank; accumulation: micro-batches of an optimizer step; peak: predicted,
of one GPU; 90 % bound: upper bound of the peak; tokens/s: of all ranks, ~ under offload, whose time is the host's;
host and NVMe: of one node.
"""
# Plain training of a model that was loaded in bf16.
_WITHOUT_MASTERS = (
    "AdamW then keeps weights and moments in 16 bits, and no fp32 masters: small updates are lost (OpenTau's issue 181:"
    " a policy that never succeeds). A model loaded with dtype=torch.bfloat16 is trained so, also with bf16=True of the"
    " Trainer"
)
_SYNCS_IN_TRAINER = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
_WIDTH = 120
# What stands for the reason of a missing part of the peak, after its first line.
_WITHOUT_VERDICT = "no verdict"


def page(answer: AdviceAnswer, details: bool) -> Iterator[str | TextTable]:
    """Yield the parts of the printed answer."""
    advice, recommendation = answer.advice, answer.recommendation
    yield from answer.safer
    yield _verdict(answer)
    if answer.training is not None:
        yield f"  {answer.training.line}"
    if recommendation is not None:
        # Before the table: a screen may cut the last lines.
        yield from dpo_notes(recommendation.best.request)
        yield f"why {recommendation.best.name}: {answer.how_sure}"
        yield from overflow_lines(recommendation)
        yield from release_lines(recommendation.best)
    yield ""
    yield _subject_line(advice.question)
    listed = [option for option in advice.options if option.fits or details or recommendation is None]
    yield _table(listed, recommendation)
    if details:
        yield f"\n{_DETAILS}"
    else:
        left_out = [option for option in advice.options if option not in listed]
        yield from _left_out_lines(left_out, advice.question.box)
        yield ""
    if recommendation is not None:
        # Before other notes: a screen may cut the last ones.
        yield from answer.adapters
        yield from recommendation_notes(recommendation)
        yield from _plain_lines(recommendation, answer.plain_predict_command)
    yield from calibration_lines(answer.measured)
    yield from answer.what_ifs
    if details:
        yield from answer.nearest
    yield from answer.longer.lines()
    if details and answer.optimizer_on_host is not None:
        yield answer.optimizer_on_host
    if recommendation is not None:
        yield from _last_lines(answer, recommendation.best.request, details)


def _subject_line(question: AdviceRequest) -> str:
    """Return model, hardware, batch and program."""
    shape, box = question.shape, question.box
    count = format_parameters(shape.parameters)
    return (
        f"{shape.name} ({count} parameters{trained_text(shape)}) on {box.name}:"
        f" {box.ranks} x {box.device.name}{_groups_text(question)}, global batch {question.global_batch},"
        f" {tokens_text(question)}, {question.precision}{program_text(question.trainer)}"
        f"{optimizer_text(question.optimizer)}\n"
    )


def _last_lines(answer: AdviceAnswer, request: Request, details: bool) -> Iterator[str]:
    """Yield the written files, or how to write them and the command with the parts of the figures."""
    if answer.files is not None:
        yield from file_lines(answer.files, request, answer.nvme_path)
        return
    more = "" if details else "; --details has similar measurements"
    yield f"--output DIR writes files with fitted buckets{more}; the parts of these figures:"
    yield f"  {answer.predict_command}"


def _verdict(answer: AdviceAnswer) -> str:
    best = answer.advice.best
    if best is None:
        return answer.how_sure[0].upper() + answer.how_sure[1:]
    request, memory = best.request, best.memory
    peak, bound = (rounded(device_bytes(memory, at_upper=upper) / GIB) for upper in (False, True))
    use = (
        f"Use {best.name}, micro-batch {request.micro_batch}, accumulation {request.accumulation},"
        f" {'' if request.gradient_checkpointing else 'no '}checkpointing:"
    )
    figures = [f"{peak} of {rounded(usable_bytes(request.box) / GIB)} GiB (90 % bound {bound})"]
    if not best.is_safe:
        figures.append("may not fit")
    if host := host_text(request, memory):
        figures.append(host)
    if memory.nvme:
        figures.append(f"{rounded(memory.nvme / GIB)} GiB on NVMe")
    if is_measured(request):
        figures.append(f"{rounded(best.tokens_per_s)} tokens/s, as measured")
    else:
        figures.append(f"about {rounded(best.tokens_per_s)} tokens/s{advise.speed_range(best)}, predicted")
    one_line = f"{use} {', '.join(figures)}"
    return one_line if len(one_line) <= _WIDTH else f"{use}\n  {', '.join(figures)}"


def _groups_text(question: AdviceRequest) -> str:
    """Return the ranks of a tensor-parallel group with a leading comma; empty without them."""
    return f" in tensor-parallel groups of {question.tensor_ranks}" * (question.tensor_ranks > 1)


def _left_out_lines(options: Sequence[Option], box: Hardware) -> Iterator[str]:
    """Yield the options that do not fit, and their needs, by the limit that they exceed."""
    usable, needs = usable_bytes(box), dict[str, list[str]]()
    a_rank = f"do not fit {rounded(usable / GIB)} GiB a rank"
    for option in options:
        limit, need = "do not fit for another reason", option.why
        if (peak := device_bytes(option.memory)) > usable:
            limit, need = a_rank, rounded(peak / GIB)
        elif (loading := option.memory.loading) > usable:
            limit, need = f"{a_rank} while weights are loaded", rounded(loading / GIB)
        elif box.host_gib_per_node and excess_bytes(option.memory, box) > 0 and unswapped_kind(option.request) is None:
            limit = f"do not fit {host_limit(box)} GiB of host memory a node"
            need = f"{rounded(option.memory.host_peak.value / GIB)}, {advise.host_flag(option)}"
            if box.is_cpu_only:
                # Its ranks are there, too.
                limit += ", all ranks together"
                need = rounded(box.host_gib_per_node + excess_bytes(option.memory, box) / GIB)
        elif option.memory.missing:
            # The first line has the reason, which is that of all.
            limit, need = _WITHOUT_VERDICT, f"{rounded(peak / GIB)} GiB without it"
        needs.setdefault(limit, []).append(f"{option.name} ({need})")
    yield from (f"{limit}: {', '.join(names)}" for limit, names in needs.items())


def overflow_lines(recommendation: Recommendation) -> Iterator[str]:
    """Yield that a recommendation in fp16 does not train the model: the notes are too far down for it."""
    for finding in recommendation.findings:
        if finding.rule == OVERFLOWS:
            yield f"but {finding.key}: {finding.says}"


def release_lines(best: Option) -> Iterator[str]:
    """Yield the release of DeepSpeed that a recommendation needs."""
    settings = best.name, best.request.accumulation, best.request.precision
    if release := least_sound_release(*settings):
        why = f"{unsound_releases(*settings)} compute wrong gradients with these settings (`study releases`)"
        yield f"needs DeepSpeed {release} or later: {why}"


def recommendation_notes(recommendation: Recommendation) -> Iterator[str]:
    """Yield the alternatives of a recommendation, and the assumptions of its figures."""
    best, question = recommendation.best, recommendation.advice.question
    if (roomier := recommendation.roomier) is not None:
        yield f"more room: {_named(roomier)}, {advise.roomier_text(roomier, best)}"
    yield from _alternative_notes(recommendation)
    yield from _program_notes(recommendation)
    if question.optimizer != "adamw":
        yield f"no optimizer on the host is compared: DeepSpeed refuses {question.optimizer} there, and {REPLACED}"
    if refusal := advise.why_no_fsdp(question):
        yield f"no FSDP is compared: {refusal}"
    yield from question.shape.notes()
    yield from finding_notes(finding for finding in recommendation.findings if finding.rule != OVERFLOWS)
    yield from recommendation.notes


def _alternative_notes(recommendation: Recommendation) -> Iterator[str]:
    """Yield the next option, one with less host memory, and a faster one whose bound does not fit."""
    advice, best, riskier = recommendation.advice, recommendation.best, recommendation.riskier
    if recommendation.slowdown and (runner_up := advice.runner_up) is not None:
        yield f"next {runner_up.name}, {advise.speed_text(runner_up, best)}{recommendation.slowdown}"
    limit = _LIGHTER * best.memory.host_peak.value
    lighter = [option for option in advice.fitting if option.memory.host_peak.value < limit]
    if best.request.strategy.offloads and advice.question.box.host_gib_per_node is None and lighter:
        option = max(lighter, key=lambda option: (option.is_safe, option.tokens_per_s))
        lower = f"{rounded(option.memory.host_peak.value / GIB)} GiB of host memory"
        yield f"with less host memory: {_named(option)}, {lower}, {advise.speed_text(option, best)}"
    if riskier is not None:
        faster = f"{advise.speed_text(riskier, best)}, but its 90 % bound does not fit: {_named(riskier)}"
        yield "; ".join([faster, *advise.unchecked_needs(riskier)])
    if (late := recommendation.late_replicas) is not None:
        # Gradients of a replica group's ranks, where between micro-batches all of them would not fit.
        plugin = f"GradientAccumulationPlugin(num_steps={late.request.accumulation}, sync_each_batch=True)"
        yield (
            f"{advise.speed_text(late, best)} in a custom loop: {_named(late)} with {plugin}, and"
            " model.set_requires_all_reduce(is_last) before each backward pass: replicas add up gradients once a step;"
            f" 90 % bound {rounded(device_bytes(late.memory, at_upper=True) / GIB)} GiB"
        )


def _program_notes(recommendation: Recommendation) -> Iterator[str]:
    """Yield assumptions about the user's program and machine."""
    best, request = recommendation.best, recommendation.best.request
    loading = best.memory.host_parts["load"]
    if loading > _LARGE_HOST_BYTES and advise.loads_whole_in_fp32(request):
        needed = f"{rounded(loading / GIB)} GiB of a node's host memory"
        yield f"loading needs {needed} if each process loads the full model in fp32"
    if (note := host_adam_note(request)) is not None:
        yield note
    if best.name in advise.PLAIN and request.autocast and request.precision == "bf16":
        yield f"{best.name} counts fp32 weights: load them with dtype=torch.float32, which transformers 5 does not"
    if best.name == "zero1" and request.box.ranks == 1:
        precision = "its weights are 16 bits with fp32 masters of trained parameters"
        yield f"ZeRO-1 on one GPU shards nothing, but {precision}; single keeps fp32 weights and autocasts"
    yield from _sync_notes(recommendation)
    yield from _link_notes(request)
    yield from unvalidated_notes(request.box)
    half = "float16" if computes_in_fp16(request.precision) else "bfloat16"
    if request.pure:
        how = "BitsAndBytesConfig(load_in_8bit=True)" if request.in_8_bits else f"dtype=torch.{half}"
        if request.quantized:
            how = f"BitsAndBytesConfig({_in_4_bits(request, half)})"
        if request.loads_on_host:
            how += " and device_map={'': 'cpu'}"
        yield f"load the model with {how}; peft keeps the adapters in fp32{_cast_by_trl(request)}"
    elif request.loads_16_bits and request.strategy.zero_stage != 3 and not request.quantized:
        yield f"load the model with dtype=torch.{half}: fp32 weights would take twice the host memory in each process"
    if request.shape.lora_rank:
        yield lora_note()


def _cast_by_trl(request: Request) -> str:
    """Return what TRL's trainers make of the adapters of a quantized model; empty for other models."""
    if not (request.quantized or request.in_8_bits):
        return ""
    cast = ", and TRL since 0.26.0 casts them to bf16"
    if not computes_in_fp16(request.precision):
        return cast
    return f"{cast}, which fp16's loss scaler refuses: {ADAPTERS_IN_FP32}"


def _in_4_bits(request: Request, half: str) -> str:
    """Return arguments of BitsAndBytesConfig, whose own defaults are FP4 and products in float32."""
    arguments = f'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.{half}'
    arguments += ", bnb_4bit_use_double_quant=True" * request.double_quantized
    return arguments + f", bnb_4bit_quant_storage=torch.{half}" * request.strategy.is_fsdp


def _sync_notes(recommendation: Recommendation) -> Iterator[str]:
    """Yield the setting with which FSDP reduces in each micro-batch, and the size of gradients without it."""
    if recommendation.unsharded_gradient_bytes is not None:
        unsharded = rounded(recommendation.unsharded_gradient_bytes / GIB)
        steps = recommendation.best.request.accumulation
        plugin = f"GradientAccumulationPlugin(num_steps={steps}, sync_each_batch=True)"
        yield f"without Accelerator(gradient_accumulation_plugin={plugin}) gradients stay unsharded, {unsharded} GiB"


def _link_notes(request: Request) -> Iterator[str]:
    """Yield the assumed speed of the network, and of PCIe between the GPUs of a machine."""
    yield from network_notes(request.box)
    yield from pcie_notes(request)
    yield from pair_notes(request.box)


def plain_note(plain: Option, best: Option) -> str:
    """Return the gain and the loss by plain training of 16-bit weights."""
    peak, bound = (rounded(device_bytes(plain.memory, at_upper=upper) / GIB) for upper in (False, True))
    settings = f"{workload_text(plain.request)}; {peak} GiB, 90 % bound {bound}"
    return f"{_plain_title(plain)}: {advise.speed_text(plain, best)} ({settings}), but {_WITHOUT_MASTERS}"


def _plain_lines(recommendation: Recommendation, command: str) -> Iterator[str]:
    """Yield the note on plain training of 16-bit weights, and the command that predicts it."""
    if recommendation.plain is not None:
        yield plain_note(recommendation.plain, recommendation.best)
        yield f"  {command}"


def _plain_title(plain: Option) -> str:
    return f"{plain.name}, bf16 weights"


def _table(options: Sequence[Option], recommendation: Recommendation | None) -> TextTable:
    """Return a row per option, and one for plain training of 16-bit weights below the recommendation, without the
    columns that none fills."""
    rows = _rows(options, recommendation)
    filled = [place for place in range(len(_COLUMNS)) if not place or any(row[place] not in ("", "-") for row in rows)]
    return TextTable([_COLUMNS[place] for place in filled], [[row[place] for place in filled] for row in rows])


def _rows(options: Sequence[Option], recommendation: Recommendation | None) -> list[list[str]]:
    if recommendation is None:
        return [_row(option, None) for option in options]
    best, plain = recommendation.best, recommendation.plain
    rows = [_row(option, best) for option in options]
    if plain is not None:
        without_masters = f"{advise.speed_text(plain, best)}, without fp32 masters"
        rows.insert(1, [_plain_title(plain), *_row(plain, best)[1:-1], without_masters])
    return rows


def _row(option: Option, best: Option | None) -> list[str]:
    request, memory, cost = option.request, option.memory, option.cost_per_million_tokens
    return [
        option.name,
        *((f"{request.micro_batch}", f"{request.accumulation}") if option.fits else "--"),
        "yes" if request.gradient_checkpointing else "no",
        rounded(device_bytes(memory) / GIB),
        rounded(device_bytes(memory, at_upper=True) / GIB),
        f"{'~' * option.request.strategy.offloads}{rounded(option.tokens_per_s)}" if option.fits else "-",
        rounded(memory.host_peak.value / GIB),
        rounded(memory.nvme / GIB) if memory.nvme else "-",
        "-" if cost is None else f"{cost:.3f}",
        remark(option, best),
    ]


def remark(option: Option, best: Option | None) -> str:
    """Return why an option does not fit, or why it is not recommended although it is as fast."""
    if option.memory.missing and excess_bytes(option.memory, option.request.box) <= 0:
        return _WITHOUT_VERDICT
    if not option.fits or best is None:
        return option.why
    if option is best:
        return "recommended" + ", with sync_each_batch" * option.request.sync_each_batch
    gap, text = advise.speed_gap(option, best), advise.speed_text(option, best)
    if gap <= 0:
        # Without this the row looks as if the same work took longer.
        keeps_fp32 = option.request.weight_bytes > best.request.weight_bytes and option.request.autocast
        text = "fp32 weights under autocast, not 16-bit ones with fp32 masters" if keeps_fp32 else ""
        text = "; ".join(filter(None, [text, "sync_each_batch" * option.request.sync_each_batch]))
    if best.is_safe and not option.is_safe:
        return f"may not fit; {text}".removesuffix("; ")
    if gap <= 0:
        return text
    if option.request.strategy.offloads and not best.request.strategy.offloads:
        slowdown = max_offload_slowdown(option.request.correction)
        return f"predicted {text}; measured offload steps took up to {slowdown:.1f} x as long"
    return f"{text}, but {best.name} {advise.reason_against(option, best)}"


def _named(option: Option) -> str:
    return f"{option.name} ({workload_text(option.request)})"


def file_lines(files: AdvisedFiles, request: Request, nvme_path: str) -> Iterator[str]:
    """Yield the written files, and how to launch them."""
    yield f"\nwritten: {files.accelerate}" + (f" and {files.deepspeed}" if files.deepspeed else "")
    # Settings that the prediction assumes and that no file contains.
    program = program_text(request)
    yield f"  {files.command}    ({workload_text(request)}{program})"
    yield f"  with the Trainer: {_trainer_arguments(request)}"
    if files.of_study is not None and not request.reference_model:
        yield f"  {files.of_study}"
    if request.strategy.deepspeed is not None and saves_shards(request.strategy.deepspeed):
        yield f"  {SAVES_SHARDS}"
    if request.strategy.uses_nvme and not Path(nvme_path).is_absolute():
        yield f"  nvme_path is {nvme_path} in the folder of the launch; --nvme_path DIR names a folder on NVMe"
    if files.of_study is None and request.fsdp_gathers_16_bits and not request.pure:
        yield "  study/train.py does not train this: under FSDP it gathers fp32 weights (study predict --autocast)"


def _kernel_arguments(request: Request) -> dict[str, bool]:
    """Return the arguments of fused kernels; those of Liger have its loss, too."""
    if request.loss_kernel == "liger":
        return {"use_liger_kernel": True}
    return {"torch_compile": True} if request.compiled else {}


def _trainer_arguments(request: Request) -> str:
    """Return the arguments of the Trainer, or of TRL's DPO, of the predicted configuration."""
    precision = computing_type(request.precision)
    optimizer = {"lion": "lion_32bit"}.get(request.optimizer, request.optimizer)
    # TRL counts pairs.
    samples = request.micro_batch // 2 if request.reference_model else request.micro_batch
    values = {
        "per_device_train_batch_size": max(samples, 1),
        "gradient_accumulation_steps": request.accumulation,
        "gradient_checkpointing": request.gradient_checkpointing,
        **({precision: True} if precision != "fp32" else {}),
        **({"optim": optimizer} if optimizer != "adamw" else {}),
        **_kernel_arguments(request),
        **({"accelerator_config": _SYNCS_IN_TRAINER} if request.sync_each_batch else {}),
    }
    config = "DPOConfig" if request.reference_model else "TrainingArguments"
    return f"{config}({', '.join(f'{name}={value!r}' for name, value in values.items())})"
