"""Keys of trainers' files for longer samples: groups of ranks that share them, and memory that features save."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from study.advisor.explain_case import ConfigCase
from study.advisor.long_features import over_ranks, with_features
from study.advisor.trainer_files import Engine, TrainerFile, converted
from study.advisor.trainer_keys import LONG_KEYS, MESH_KEY, RING_KEYS, to_count
from study.advisor.user_settings import (
    MESH_PREFIX,
    NOT_MODELLED,
    Finding,
    known_settings,
    read_mesh,
    read_mesh_sizes,
    sample_groups,
)
from study.advisor.workload import Workload
from study.config.errors import UserError, clip
from study.config.text import rounded
from study.host.memory import GIB
from study.predictor.memory import predict_memory
from study.predictor.time import device_bytes

# The error of Accelerator(parallelism_config={...}): the Trainer passes the mapping of the file.
NO_MAPPING = "'dict' object has no attribute 'get_device_mesh'"
_FLASH = ("attn_implementation", "flash_attention")


def with_groups(file: TrainerFile, engine: Engine) -> Engine:
    """Return the engine with the groups of a trainer's file, and findings about them."""
    section = file.document.get(MESH_KEY)
    if not file.trainer.has_mesh or not section:
        return engine
    if not isinstance(section, Mapping):
        message = f"the trainer ends with an error: {clip(section)} is no ParallelismConfig"
        refused = file.refused(MESH_KEY, message, "set its sizes in Accelerate's file, and name that with --engine")
        return dataclasses.replace(engine, findings=(*engine.findings, refused))
    plain, problems = engine.file, list[Finding]()
    settings = {f"{MESH_PREFIX}{key}": size for key, size in section.items() if key in known_settings()[MESH_KEY]}
    sizes = read_mesh_sizes({MESH_KEY: settings}, problems)
    mesh, mesh_ranks = read_mesh(sizes, plain.distributed_type, problems)
    divided = dataclasses.replace(
        plain,
        mesh=mesh or plain.mesh,
        mesh_ranks=mesh_ranks,
        group_sizes=sample_groups(sizes),
        findings=[*plain.findings, *problems],
    )
    moved = [f"{MESH_PREFIX}{key}: {size}" for key, size in sizes.items() if size > 1]
    fix = f"set {' and '.join(moved) or 'its sizes'} in Accelerate's file, and name that with --engine"
    findings = (*engine.findings, file.refused(MESH_KEY, f"the trainer ends with an error: {NO_MAPPING}", fix))
    keys = {**engine.keys, **{name: name for name in (MESH_KEY, *(f"{MESH_KEY}.{key}" for key in section))}}
    return dataclasses.replace(engine, file=divided, keys=keys, findings=findings)


def with_long_features(file: TrainerFile, case: ConfigCase) -> ConfigCase:
    """Return the case with the features for longer samples of the flags of `study predict`, and findings that name
    them, or why they are not modelled."""
    flags, findings = dict[str, Any](), list[Finding]()
    for flag, (key, effect) in LONG_KEYS.items():
        value = file.document.get(key)
        if key not in file.trainer.read or value in (None, False, "false"):
            continue
        reason = "" if value in (True, "true") else f" ({key}: {clip(value)})"
        tried: dict[str, Any] = {**flags, flag: True}
        if not reason and case.request.gradient_checkpointing:
            try:
                request = with_features(case.request, Workload(**tried))
            except UserError as refusal:
                reason = f" ({refusal.problem.replace(f'--{flag}', key)})"
            else:
                flags, case = tried, dataclasses.replace(case, request=request)
                findings.append(file.noted(key, f"{effect}; no step time is predicted", "long-feature"))
                continue
        findings.append(file.not_counted(key, f"{effect}{reason}; {NOT_MODELLED}"))
    return dataclasses.replace(case, findings=(*case.findings, *findings))


def with_rings(file: TrainerFile, case: ConfigCase) -> ConfigCase:
    """Return the case with the findings of axolotl's ring attention."""
    return dataclasses.replace(case, findings=(*case.findings, *_ring_findings(file, case)))


def _ring_findings(file: TrainerFile, case: ConfigCase) -> Iterator[Finding]:
    """Yield what axolotl's ring attention changes, and its errors (check_context_parallel_size in axolotl's
    utils/schemas/validation.py)."""
    stated = next((key for key in RING_KEYS if file.document.get(key) is not None), None)
    if file.trainer.name != "axolotl" or stated is None:
        return
    size, document = converted(file, stated, to_count), file.document
    if size == 1:
        return
    message = f"{size} ranks divide the tokens of each sample by ring attention"
    if case.ranks % size == 0:
        message += f", and a step trains on the samples of {case.ranks // size}"
    yield file.not_counted(stated, f"{message}; {NOT_MODELLED}{_by_ulysses(case, size)}")
    ends = "axolotl ends with an error"
    if not any(_is_flash(document.get(key)) for key in _FLASH):
        yield file.refused(stated, f"{ends} without flash attention", "set attn_implementation: flash_attention_2")
    if document.get("sample_packing") is True and file.values.get("micro_batch", 1) > 1:
        yield file.refused("micro_batch_size", f"{ends} with {stated} and sample_packing", "set 1")


def _is_flash(value: Any) -> bool:
    return value is True or "flash" in str(value)


def _by_ulysses(case: ConfigCase, size: int) -> str:
    """Return the peak of as many ranks that divide samples by DeepSpeed's Ulysses; empty if it is not predicted."""
    if case.stage != 3:
        return ""
    try:
        divided = over_ranks(case.request, size, "sp_size")
    except UserError:
        return ""
    return f"; by Ulysses (sp_size) a peak of {rounded(device_bytes(predict_memory(divided)) / GIB)} GiB"
