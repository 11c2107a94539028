"""What the nodes of a Slurm job have together, each asked by a step over all of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from study.errors import UserError
from study.host.box import Box, this_box
from study.host.slurm import Job, run_on_nodes, this_job

# A cold file system may take its time to show Python on the last node.
_PATIENCE_S = 180
_MARK = "zero-study: node "
_LINE = 500


@dataclasses.dataclass(frozen=True)
class Node:
    """As `study/host/node.py` describes it."""

    place: int
    name: str
    gpus: list[str]
    gpu_memory_gib: list[float]
    host_memory_gib: float
    cores: int
    processor: str
    # Of the folders asked about, those that it sees.
    sees: list[str]
    cache: str
    operators: list[str]
    weights: list[str]
    networks: list[str]


def allocated_box() -> Box:
    """All nodes of the job, or this machine. As if each node had what the smallest has: a run takes the same of all."""
    if (job := this_job()) is None:
        return this_box()
    nodes = ask_nodes(job)
    fewest = min(len(node.gpu_memory_gib) for node in nodes)
    gpus = tuple(size for node in nodes for size in node.gpu_memory_gib[:fewest])
    return Box(gpus, min(node.host_memory_gib for node in nodes), len(nodes))


def refuse_unshared(job: Job, folder: Path) -> None:
    """Tried with a file whose name no node can have heard of before."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".zero-study-nodes-") as file:
        blind = [node.name for node in ask_nodes(job, (file.name,)) if not node.sees]
    if blind:
        raise UserError(
            f"{', '.join(blind)} does not see {folder}, where the records are kept",
            "let --runs-dir name a folder that all nodes of the job share",
        )


@functools.cache
def ask_nodes(job: Job, folders: Sequence[str] = ()) -> list[Node]:
    printed = run_on_nodes(job, [sys.executable, "-m", "study.host.node", *folders], _PATIENCE_S)
    said: dict[int, str] = {}
    for place, part in re.findall(rf"^{_MARK}(\d+) (.*)$", printed, re.MULTILINE):
        said[int(place)] = said.get(int(place), "") + part
    return [Node(**json.loads(said[place])) for place in sorted(said)]


def print_node(node: Node) -> None:
    """In short lines: srun mixes those of two nodes where they are longer than 1024 characters."""
    text = json.dumps(dataclasses.asdict(node))
    for start in range(0, len(text), _LINE):
        print(f"{_MARK}{node.place} {text[start : start + _LINE]}", flush=True)
