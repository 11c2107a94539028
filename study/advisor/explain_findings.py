"""Settings that do nothing here, that nobody hears, that are in each other's way, or that end a run."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping

from study.advisor.explain_case import ACCUMULATION, MICRO_BATCH, SHARDINGS, ConfigCase, fsdp_settings, sharding_of
from study.advisor.user_settings import OFFLOADS, ZERO, Finding, known_settings
from study.config.errors import brief
from study.host.memory import GIB
from study.predictor.memory import predict_memory
from study.predictor.state import refused_accumulation

_OPTIMIZER = f"{ZERO}.offload_optimizer"
# DEEPSPEED_OPTIMIZERS of its config.py, and the classes of torch.optim.
ENGINES_OPTIMIZERS = ("adam", "adamw", "adagrad", "lamb", "lion", "muadam", "muadamw", "muon", "musgd")
TORCHS_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
# Those that make a class of ZERO_SUPPORTED_OPTIMIZERS (zero/utils.py); mup's Adam is torch's.
_ZEROS_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "muadam", "muadamw", "muon")


def findings(case: ConfigCase) -> list[Finding]:
    """With those of reading the file."""
    if case.file.deepspeed is None:
        return [*case.findings, *_fsdp(case)]
    found = [*case.findings, *_unheard(case), *_optimizer(case), *_zero(case), *_batch(case)]
    if case.file.deepspeed is not None and (refusal := refused_accumulation(case.request)):
        found.append(Finding("refused", "data_types.grad_accum_dtype", refusal))
    return found


def _unheard(case: ConfigCase) -> Iterator[Finding]:
    known = known_settings()
    for key in case.file.given:
        section, _, name = key.rpartition(".")
        of_section = known.get(section or "top", {})
        entry = of_section.get(name) or of_section.get(f"stage3_{name}")
        if entry is None or not _is_on(case, key):
            continue
        stages = entry.get("stages", range(4))
        if "refused" in entry:
            yield Finding("refused", key, f"the engine ends with an error: {entry['refused']}")
        elif "nothing" in entry:
            yield Finding("nothing", key, entry["nothing"])
        elif case.stage not in stages:
            heard = " and ".join(map(str, stages))
            yield Finding("nothing", key, f"stage {case.stage} does not heed it; stage {heard} would")
        elif (needs := entry.get("needs")) and not _has(case, needs):
            yield Finding("nothing", key, f"it is heeded with {needs.replace('=', ' = ')} alone")


def _is_on(case: ConfigCase, key: str) -> bool:
    """What is off does nothing anywhere, and nobody expects it to."""
    first = key.removeprefix(f"{ZERO}.").split(".")[0]
    if first in OFFLOADS and case.offload(first) is None:
        return False
    return key != f"{ZERO}.{first}" or case.zero.get(first) is not False


def _has(case: ConfigCase, needs: str) -> bool:
    if needs == "nvme":
        return any((case.offload(what) or {}).get("device") == "nvme" for what in OFFLOADS)
    key, _, wanted = needs.partition("=")
    what, _, name = key.partition(".")
    return str((case.zero.get(what) or {}).get(name)).lower() == wanted


def _type_of_optimizer(case: ConfigCase) -> Iterator[Finding]:
    """The engine's own have names in any case; others are torch's, as they are written there (engine.py)."""
    section, key = case.top.get("optimizer"), "optimizer.type"
    name = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(name, str) or name.lower() in ("adam", "adamw"):
        return
    if name.lower() not in ENGINES_OPTIMIZERS and name not in TORCHS_OPTIMIZERS:
        near = difflib.get_close_matches(name, ("AdamW", "Adam", *TORCHS_OPTIMIZERS), n=1)
        says = f"the engine ends with an error: neither it nor torch.optim has {brief(name)}"
        yield Finding("refused", key, says + (f"; did you mean {near[0]}?" if near else ""))
        return
    yield Finding("noted", key, f"{name}: what is told here is AdamW's, which keeps two moments of each parameter")
    is_asked = case.file.launcher == "accelerate" or case.top.get("zero_allow_untested_optimizer")
    if case.stage and name.lower() not in _ZEROS_OPTIMIZERS and not is_asked:
        yield Finding("refused", key, f"ZeRO takes {name} with zero_allow_untested_optimizer: true alone")


def _optimizer(case: ConfigCase) -> Iterator[Finding]:
    yield from _type_of_optimizer(case)
    top, in_accelerate = case.top, case.file.launcher == "accelerate"
    if "optimizer" in top and in_accelerate:
        says = "Accelerate refuses it beside an optimizer of the program: make that an accelerate.utils.DummyOptim"
        yield Finding("conflict", "optimizer", says)
    if "scheduler" in top and "optimizer" not in top and in_accelerate:
        says = "Accelerate refuses it beside a schedule of the program: make that an accelerate.utils.DummyScheduler"
        yield Finding("conflict", "scheduler", says)
    if "zero_allow_untested_optimizer" in top:
        if in_accelerate:
            yield Finding("ignored", "zero_allow_untested_optimizer", "Accelerate says true, whatever the file does")
        elif not top["zero_allow_untested_optimizer"]:
            says = "false: DeepSpeed refuses an optimizer that it does not know, such as torch's SGD"
            yield Finding("noted", "zero_allow_untested_optimizer", says)
    optimizer = case.offload("offload_optimizer")
    if optimizer is None:
        return
    if case.stage == 0:
        yield Finding("nothing", _OPTIMIZER, "stage 0 keeps its optimizer on the device")
    forced = top.get("zero_force_ds_cpu_optimizer", True)
    if forced is False:
        says = "false lets torch's own AdamW step on the host, which is slower than DeepSpeed's"
        yield Finding("conflict", "zero_force_ds_cpu_optimizer", says)
    elif not in_accelerate and "optimizer" not in top:
        says = (
            "deepspeed.initialize refuses torch's AdamW beside an offload; Accelerate and the Trainer take DeepSpeed's"
        )
        yield Finding("noted", "zero_force_ds_cpu_optimizer", says)
    if optimizer["device"] == "nvme" and case.stage in (1, 2):
        says = f"nvme: stage {case.stage} has no drive, and keeps the state in host memory"
        yield Finding("ignored", f"{_OPTIMIZER}.device", says)
    if optimizer["ratio"] < 1 and case.stage != 3:
        yield Finding("refused", f"{_OPTIMIZER}.ratio", "the engine refuses a ratio below 1 without stage 3")


def _zero(case: ConfigCase) -> Iterator[Finding]:
    zero, stage = case.zero, case.stage
    for what in OFFLOADS:
        section = case.offload(what)
        if section and section["device"] == "nvme" and section["nvme_path"] is None and stage == 3:
            yield Finding("missing", f"{ZERO}.{what}.nvme_path", "the engine ends with an error without this folder")
    parameters, part = case.offload("offload_param"), -(-case.shape.largest // case.ranks)
    if parameters and parameters["device"] == "nvme" and stage == 3 and parameters["buffer_size"] < part:
        says = f"the engine ends with an error: a rank's part of {case.largest.name} has {part:,} elements"
        yield Finding("refused", f"{ZERO}.offload_param.buffer_size", says)
    has_offload = case.offload("offload_optimizer") is not None
    if stage in (1, 2) and not zero["contiguous_gradients"]:
        if has_offload:
            yield Finding("ignored", f"{ZERO}.contiguous_gradients", "an offload turns it on")
        elif zero["overlap_comm"]:
            says = "without contiguous_gradients each bucket's gradients stay until the next bucket is reduced"
            yield Finding("conflict", f"{ZERO}.overlap_comm", says)
    if stage in (1, 2) and zero["round_robin_gradients"] and not has_offload:
        yield Finding("nothing", f"{ZERO}.round_robin_gradients", "it is for gradients that go to the host")
    if not zero["compute_grad_norm"] and (stage not in (1, 2) or has_offload):
        says = "the engine refuses false but at stages 1 and 2 without an offload"
        yield Finding("refused", f"{ZERO}.compute_grad_norm", says)
    if zero["legacy_stage1"]:
        yield Finding("refused", f"{ZERO}.legacy_stage1", "the engine ends with an error: it has been removed")
    # The engine takes as many as there are, if it is more (groups.py).
    if stage == 3 and (group := min(zero["zero_hpz_partition_size"], case.ranks)) > 1 and case.ranks % group:
        says = f"the engine ends with an error: {group:,.0f} does not divide {case.ranks} ranks"
        yield Finding("refused", f"{ZERO}.zero_hpz_partition_size", says)
    live, ahead = zero["stage3_max_live_parameters"], zero["stage3_prefetch_bucket_size"]
    if stage == 3 and f"{ZERO}.stage3_max_live_parameters" in case.file.given and not ahead:
        yield Finding("nothing", f"{ZERO}.stage3_max_live_parameters", "it bounds prefetching alone, which is off")
    elif stage == 3 and live < case.shape.parameters <= zero["stage3_max_reuse_distance"] / 2:
        # From its forward to its backward pass a parameter waits for as many as the model has, twice.
        says = f"{live:,.0f} does not bound what is whole: stage3_max_reuse_distance keeps every parameter"
        yield Finding("conflict", f"{ZERO}.stage3_max_live_parameters", says)


def _fsdp(case: ConfigCase) -> Iterator[Finding]:
    said, known, sharding = fsdp_settings(case.file), known_settings()["fsdp"], sharding_of(case.file)
    is_second = sharding is None
    more = f"up to {case.shape.parameters * (2 if case.request.fsdp_gathers_16_bits else 4) / GIB:.2f} GiB more a rank"
    if sharding == "NO_SHARD":
        yield Finding("noted", "fsdp_sharding_strategy", "NO_SHARD is plain data parallelism, as it is told here")
    elif sharding is not None:
        if sharding not in SHARDINGS:
            yield Finding("refused", "fsdp_sharding_strategy", f"Accelerate ends with an error: no {brief(sharding)}")
        yield Finding("noted", "fsdp_version", "1, the default: what is told here is of version 2")
        if sharding.endswith(("SHARD_GRAD_OP", "ZERO2")):
            says = f"{sharding}: weights stay whole from the forward to the backward pass, {more}"
            yield Finding("noted", "fsdp_sharding_strategy", says)
        if "HYBRID" in sharding:
            says = f"{sharding} divides over the ranks of a machine, and what is told here over all"
            yield Finding("noted", "fsdp_sharding_strategy", says)
    if case.file.fsdp is not None and sharding != "NO_SHARD" and said.get("fsdp_auto_wrap_policy") == "NO_WRAP":
        yield Finding("noted", "fsdp_auto_wrap_policy", f"NO_WRAP: all weights are gathered at once, {more}")
    for key, value in said.items():
        if key not in known:
            yield Finding("ignored", key, "Accelerate drops it without a word")
        elif (effect := known[key]) is not None and str(value).lower() not in ("false", "none"):
            kind, _, says = effect.partition(": ")
            # What version 2 drops or refuses, version 1 does.
            if is_second or kind == "noted":
                yield Finding(kind, key, says)
    if is_second and str(said.get("fsdp_reshard_after_forward", True)).lower() == "false":
        says = f"false: weights stay whole from the forward to the backward pass, {more}"
        yield Finding("noted", "fsdp_reshard_after_forward", says)


def _batch(case: ConfigCase) -> Iterator[Finding]:
    keys = ("train_batch_size", MICRO_BATCH, ACCUMULATION)
    whole, micro, steps = (case.top.get(key) for key in keys)
    wrong = [
        key for key, value in zip(keys, (whole, micro, steps), strict=True)
        if value not in (None, "auto") and (type(value) is not int or value < 1)
    ]  # fmt: skip
    if wrong:
        yield Finding("refused", wrong[0], "the engine wants a whole number from 1 up")
    elif type(whole) is int and type(micro) is int:
        if type(steps) is int and whole != micro * steps * case.ranks:
            product = f"{micro} x {steps} x {case.ranks} ranks is {micro * steps * case.ranks}, and not {whole}"
            yield Finding("refused", "train_batch_size", f"the engine ends with an error: {product}")
        elif steps is None and whole % (micro * case.ranks):
            yield Finding("refused", "train_batch_size", f"{whole} is no multiple of {micro} x {case.ranks} ranks")
    elif type(whole) is int and micro is None:
        passes = 1 if steps is None else case.request.accumulation
        if whole % (passes * case.ranks):
            says = f"the engine ends with an error: {whole} is no multiple of {passes} x {case.ranks} ranks"
            yield Finding("refused", "train_batch_size", says)
    if whole is None and micro is None and case.file.launcher == "deepspeed":
        says = "the engine ends with an error without it or train_batch_size"
        yield Finding("missing", MICRO_BATCH, says)
    yield from _passes(case)


def _passes(case: ConfigCase) -> Iterator[Finding]:
    """Without the key Accelerate (DeepSpeedPlugin) and the engine take 1; what is "auto" is the program's."""
    asked = case.request.accumulation
    if ACCUMULATION not in case.top:
        by_batch = all(type(case.top.get(key)) is int for key in ("train_batch_size", MICRO_BATCH))
        if asked > 1 and not (by_batch and case.file.launcher == "deepspeed"):
            says = f"without it Accelerate and the engine make one pass a step, and not {asked}"
            yield Finding("missing", ACCUMULATION, says)
    elif case.top[ACCUMULATION] == "auto" and asked == 1:
        says = "auto: 1 is taken, and --accumulation says another"
        one, more = (
            predict_memory(dataclasses.replace(case.request, accumulation=passes)).peak_reserved.value
            for passes in (1, 2)
        )
        if more - one >= 2**20:
            says += "; with more passes gradients wait beside the activations, and a rank reserves"
            says += f" {more / GIB:.2f} GiB and not {one / GIB:.2f}"
        yield Finding("filled", ACCUMULATION, says)
