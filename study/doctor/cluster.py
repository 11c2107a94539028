"""Inside a Slurm job: its nodes, what lies between them, and whether each finds what a run needs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from study.doctor.checks import Check, needed, shown
from study.errors import UserError
from study.host.folders import cache_directory
from study.host.nodes import Node, ask_nodes
from study.host.slurm import is_in_job, this_job
from study.spec.strategies import REPOSITORY

_SHARE = "start from a folder that all nodes share"
_BUILD = "srun --ntasks-per-node=1 python -m study.host.operators"


def cluster() -> list[Check]:
    """Nothing outside of a job."""
    if not is_in_job():
        return []
    try:
        if (job := this_job()) is None:
            return [Check("slurm", "ok", "a job of one node, on which runs start as they do without Slurm")]
        with ExitStack() as held:
            runs = Path("runs").absolute()
            marks = {
                folder: held.enter_context(tempfile.NamedTemporaryFile(dir=_existing(folder))).name
                for folder in (REPOSITORY, runs, cache_directory())
            }
            nodes = ask_nodes(job, tuple(marks.values()))
        blind = {folder: [node.name for node in nodes if mark not in node.sees] for folder, mark in marks.items()}
    except (UserError, OSError) as problem:
        fix = problem.fix if isinstance(problem, UserError) else _SHARE
        return [Check("slurm", "missing", getattr(problem, "problem", str(problem)), fix)]
    return [
        Check("slurm", "ok", f"job {job.id} has {len(nodes)} nodes; each run is one step over them"),
        Check("nodes", "ok", _each(nodes, _has)),
        Check("interconnect", "ok", _each(nodes, lambda node: ", ".join(node.networks) or "no link is told")),
        *(_shared(what, folder, blind[folder]) for what, folder in (("repository", REPOSITORY), ("runs", runs))),
        _cache(blind[cache_directory()]),
        _everywhere("operators of nodes", nodes, lambda node: node.operators, _BUILD),
        _everywhere("weights of nodes", nodes, lambda node: node.weights, "study weights SUITE"),
    ]


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def _has(node: Node) -> str:
    gpus = f"{len(node.gpus)} x {node.gpus[0]} {node.gpu_memory_gib[0]:.0f} GiB" if node.gpus else "no GPU"
    return f"{gpus}, {node.cores} cores of {node.processor}, {node.host_memory_gib:.0f} GiB"


def _each(nodes: Sequence[Node], tell: Callable[[Node], str]) -> str:
    """Once for all nodes of which the same is to be said."""
    said: dict[str, list[str]] = {}
    for node in nodes:
        said.setdefault(tell(node), []).append(node.name)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in said.items())


def _shared(what: str, folder: Path, blind: list[str]) -> Check:
    found = shown(folder) if blind else f"{shown(folder)}, on all nodes"
    return needed(f"shared {what}", not blind, found, f"{', '.join(blind)} sees another one", _SHARE)


def _cache(blind: list[str]) -> Check:
    if not blind:
        return Check("shared cache", "ok", f"{shown(cache_directory())}, on all nodes")
    found = f"{', '.join(blind)} has one of its own, and draws weights, prepares data and builds operators there"
    return Check("shared cache", "none", found, "let ZERO_STUDY_CACHE name a folder that all nodes share")


def _everywhere(name: str, nodes: Sequence[Node], of: Callable[[Node], list[str]], fix: str) -> Check:
    every = {each for node in nodes for each in of(node)}
    lacking = [f"{node.name} lacks {len(every) - len(of(node))}" for node in nodes if len(of(node)) < len(every)]
    found = f"{len(every)} on some node; {', '.join(lacking)}" if lacking else f"{len(every)} on each node"
    is_fine = bool(every) and not lacking
    return Check(name, "ok" if is_fine else "none", found, "" if is_fine else fix)
