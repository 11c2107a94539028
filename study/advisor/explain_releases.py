"""The releases of a program's packages, which `study explain --release` sets, and the findings that depend on them."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from study.advisor.explain_case import ACCUMULATION, ConfigCase
from study.advisor.user_settings import Finding, known_settings
from study.compositions.answers import newest_tested_stack
from study.config.flags import Precision
from study.config.precisions import computing_type, in_engine
from study.host.stacks import package_version, release_key
from study.releases.causes import PACKAGES, Cause, Loop, known_faults, least_sound_release, read_causes

# Packages whose releases make a difference to combinations of features.
ENGINES = ("deepspeed", "accelerate", "torch")
# Packages that --release takes.
_STATED = (*PACKAGES, "trl")
_NAMES = {"deepspeed": "DeepSpeed", "accelerate": "Accelerate", "torch": "torch", "transformers": "transformers"}
_PARTS = 3
# The release of Accelerate whose no_sync() calls set_requires_gradient_sync of FSDP2 (pull request 3762).
_DEFERS_REDUCTION = "1.11.0"
# The release whose fsdp2_prepare_model leaves frozen weights in the type that they are loaded in.
_FREEZES_16_BITS = "1.13.0"
# Of DeepSpeed's releases with 1-bit optimizers, at stages 1 to 3.
REFUSE_1_BIT = "end with an AssertionError: no 1-bit optimizer runs with ZeRO"
NO_MEMORY_OF_1_BIT = "it sends less and saves no memory"


def parse_releases(text: str) -> dict[str, str]:
    """Return the releases of --release by package, such as deepspeed=0.17.5,accelerate=1.10.

    Raise ArgumentTypeError for another form.
    """
    releases = dict[str, str]()
    for item in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z]+)\s*==?\s*v?(\d{1,9}(?:\.\d{1,9}){1,3})(?:\+[\w.]+)?\s*", item)
        if match is None or match[1].lower() not in _STATED:
            example = "deepspeed=0.17.5,accelerate=1.10"
            problem = f"{item.strip()[:40]!r} is not the release of {', '.join(_STATED[:-1])} or {_STATED[-1]}"
            raise argparse.ArgumentTypeError(f"{problem}; write them as {example}")
        name, numbers = match[1].lower(), match[2].split(".")
        if name in releases:
            raise argparse.ArgumentTypeError(f"{name} has two releases; name one")
        releases[name] = ".".join([*numbers, *["0"] * (_PARTS - len(numbers))])
    return releases


def read_stack(case: ConfigCase) -> dict[str, str | None]:
    """Return the releases of --release, else of a case's run or the installed ones; the newest tested ones of missing
    packages."""
    newest = newest_tested_stack()
    releases = _find_releases(package_version) if case.releases is None else case.releases
    stack = {name: case.stated_releases.get(name) or releases.get(name) or newest[name] for name in ENGINES}
    transformers = case.stated_releases.get("transformers")
    return stack | ({"transformers": transformers} if transformers else {})


@functools.cache
def _find_releases(find_release: Callable[[str], str | None]) -> dict[str, str | None]:
    """Return the installed releases, whose files take longer to read than a config to judge."""
    return {name: find_release(name) for name in ENGINES}


def release_line(case: ConfigCase) -> str:
    """Return the releases that findings hold for, with the origin of each."""
    installed = _find_releases(package_version) if case.releases is None else case.releases
    by_origin = dict[str, list[str]]()
    for name, release in read_stack(case).items():
        if name == "deepspeed" and case.file.deepspeed is None:
            continue
        origin = "installed" if installed.get(name) else "newest tested"
        if name in case.stated_releases:
            origin = "--release"
        if name == "deepspeed" and case.required_by:
            origin = f"the newest that {case.required_by} requires; nothing checks it, so newer ones run, too"
        by_origin.setdefault(origin, []).append(f"{_NAMES[name]} {release}")
    if case.trl is not None:
        origin = "--release" if "trl" in case.stated_releases else "newest read"
        by_origin.setdefault(origin, []).append(f"TRL {case.trl}")
    listed = ", ".join(f"{', '.join(names)} ({origin})" for origin, names in by_origin.items())
    return f"findings hold for {listed}" + ", unless --release names others" * (not _named(case))


def _named(case: ConfigCase) -> dict[str, str]:
    """Return the releases of --release."""
    required = {"deepspeed"} if case.required_by else set()
    return {name: release for name, release in case.stated_releases.items() if name not in required}


def release_document(case: ConfigCase) -> dict[str, Any]:
    """Return the releases that findings hold for, and those of --release."""
    trl = {} if case.trl is None else {"trl": case.trl}
    return {"assumed": read_stack(case) | trl, "stated": _named(case)}


def with_trainer(case: ConfigCase, trainer: str, newest: str, loop: Loop | None) -> ConfigCase:
    """Return the case of a trainer's file with its loop, and with the newest DeepSpeed that the trainer's requirements
    take, unless --release names one."""
    case = dataclasses.replace(case, loop=loop)
    if not newest or case.file.deepspeed is None or "deepspeed" in case.stated_releases:
        return case
    releases = {**case.stated_releases, "deepspeed": newest}
    return dataclasses.replace(case, stated_releases=releases, required_by=trainer)


def with_releases(case: ConfigCase, releases: Mapping[str, str] | None, keeps_16_bits: bool = False) -> ConfigCase:
    """Return the case with the releases of --release, and with the weights and gradients that FSDP2 keeps under them.

    `keeps_16_bits`: the program has its own function in place of Accelerate's that makes weights fp32.
    """
    if not releases:
        return case
    case = dataclasses.replace(case, stated_releases=releases)
    accelerate, request = releases.get("accelerate"), case.request
    if not request.strategy.is_fsdp or request.fsdp_version != 2:
        return case
    transformers = releases.get("transformers")
    if transformers and release_key(transformers) < (5,) and request.shape.active_experts:
        message = (
            f"in most mixtures of transformers {transformers} each expert is a module, and in those of 5 all experts"
        )
        message += " of a layer are one tensor: groups and padding are counted with the latter"
        finding = Finding("noted", "transformers", message, rule="experts-of-older-release")
        case = dataclasses.replace(case, findings=(*case.findings, finding))
    if accelerate is None:
        return case
    if release_key(accelerate) < release_key(_FREEZES_16_BITS) and not keeps_16_bits:
        case = _with_fp32_frozen(case, accelerate)
    if release_key(accelerate) < release_key(_DEFERS_REDUCTION):
        case = _with_reductions(case, accelerate)
    return case


def _with_fp32_frozen(case: ConfigCase, accelerate: str) -> ConfigCase:
    """Return a case whose frozen 16-bit weights next to adapters Accelerate makes fp32."""
    request = case.request
    if not request.shape.lora_rank or request.quantized or not in_engine(request.precision):
        return case
    message = f"Accelerate {accelerate} makes frozen weights fp32 under FSDP2, and the figures have them so"
    finding = Finding("noted", "peft", message, f"since {_FREEZES_16_BITS} they stay in 16 bits", "fsdp-frozen")
    precision = cast(Precision, computing_type(request.precision))
    request = dataclasses.replace(request, precision=precision, pure=False, loads_16_bits=True)
    return dataclasses.replace(case, request=request, findings=(*case.findings, finding))


def _with_reductions(case: ConfigCase, accelerate: str) -> ConfigCase:
    """Return a case whose gradients FSDP2 reduces in each micro-batch."""
    request = case.request
    if request.accumulation == 1 or request.sync_each_batch:
        return case
    message = f"Accelerate {accelerate} reduces FSDP2's gradients in each micro-batch: its no_sync has no effect there"
    finding = Finding("noted", ACCUMULATION, message, f"since {_DEFERS_REDUCTION} it has")
    request = dataclasses.replace(request, sync_each_batch=True)
    return dataclasses.replace(case, request=request, findings=(*case.findings, finding))


def release_facts(case: ConfigCase) -> dict[str, str | None]:
    """Return what rules may ask of releases: those of --release; without it a rule holds for any. `assumed`: the
    DeepSpeed that findings hold for."""
    return {f"{name}_release": case.stated_releases.get(name) for name in PACKAGES} | {
        "assumed_deepspeed_release": read_stack(case)["deepspeed"]
    }


def release_faults(case: ConfigCase, strategy: str, named_causes: Iterable[str]) -> Iterator[Finding]:
    """Yield the faults of the releases of --release in a strategy with this case's settings, as `study releases` has
    them, without the `named_causes`."""
    if not case.stated_releases:
        return
    stack, request, listed = _all_releases(case), case.request, set(named_causes)
    is_open = case.top.get(ACCUMULATION, "auto") == "auto"
    command = f"study releases {stack['deepspeed']} {strategy}"
    elsewhere = list[str]()
    for cause in known_faults(stack, on_gpu=True):
        if cause.id in listed or cause.ends_training or cause.sometimes or not cause.releases.get("deepspeed"):
            continue
        shows = cause.shows_in(strategy, request.accumulation, request.precision)
        fix = _fix_of_fault(case, cause, strategy)
        if not is_in_program(case, cause):
            elsewhere += [cause.title] if shows else []
        elif shows:
            loops = loops_of_cause(case, cause.id)
            message = f"{stack['deepspeed']} computes wrong gradients with these settings{loops}: {cause.title}"
            yield Finding("conflict", "deepspeed", f"{message} ({command})", fix, "wrong-training")
        elif is_open and cause.shows_in(strategy, max(2, request.accumulation), request.precision):
            message = f"with accumulation, which the program sets, {stack['deepspeed']} computes wrong gradients"
            yield Finding("noted", "deepspeed", f"{message}: {cause.title} ({command})", fix, "releases")
    if elsewhere:
        message = f"transformers' Trainer does not have this fault of {stack['deepspeed']}: {'; '.join(elsewhere)}"
        yield Finding("noted", "deepspeed", f"{message} ({command})", "", "other-loop")


def is_in_program(case: ConfigCase, cause: Cause) -> bool:
    """Whether the loop of a case has a fault; one that is not known may be any."""
    return case.loop is None or cause.is_in_loop(case.loop, _all_releases(case))


def loops_of_cause(case: ConfigCase, name: str) -> str:
    """Return the loops that have a fault, after a space; empty if the file shows its loop, or if all have it."""
    if case.loop is not None:
        return ""
    words = next((cause.loop_words(_all_releases(case)) for cause in read_causes() if cause.id == name), "")
    return f" {words}" if words else ""


def _all_releases(case: ConfigCase) -> dict[str, str | None]:
    """Return a case's releases, with that of transformers."""
    return {"transformers": newest_tested_stack()["transformers"], **read_stack(case)}


def _fix_of_fault(case: ConfigCase, cause: Cause, strategy: str) -> str:
    """Return the workaround of a fault; in a known loop the release without any."""
    request = case.request
    if case.loop is not None:
        settings = (strategy, max(2, request.accumulation), request.precision, case.loop)
        if release := least_sound_release(*settings):
            return f"use DeepSpeed {release} or later"
    return cause.instead[:1].lower() + cause.instead[1:].removesuffix(".")


def judge_by_release(case: ConfigCase, finding: Finding) -> Finding:
    """Return a finding for the releases of --release: a setting that a later DeepSpeed removed is read."""
    stated, gone = case.stated_releases.get("deepspeed"), known_settings()["removed"]
    if stated is None or finding.rule != "removed":
        return finding
    removed = gone.get(finding.key) or gone.get(str((case.top.get("optimizer") or {}).get("type")).lower(), "")
    release = removed.partition(";")[0]
    if release_key(stated) >= release_key(release):
        return finding
    if finding.key == "optimizer.type" and case.stage:
        return dataclasses.replace(finding, message=f"releases before {release} {REFUSE_1_BIT}")
    message = f"DeepSpeed {stated} has it, and {release} and later end with an error; the figures are without it"
    if finding.key == "optimizer.type":
        message += f"; {NO_MEMORY_OF_1_BIT}"
    return dataclasses.replace(finding, kind="noted", message=message)
