"""What this node has: `srun python -m study.host.node [FOLDER...]` asks every node of a job."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from study.host.box import gpu_names, this_box
from study.host.environment import processor
from study.host.folders import cache_directory
from study.host.memory import available_cores
from study.host.operators import own_build_folder
from study.host.slurm import Node, print_node


def main(folders: list[str]) -> None:
    box, cache = this_box(), cache_directory()
    node = Node(
        place=int(os.environ.get("SLURM_NODEID", "0")),
        name=os.environ.get("SLURMD_NODENAME", platform.node()),
        gpus=gpu_names(),
        gpu_memory_gib=list(box.gpu_memory_gib),
        host_memory_gib=box.host_memory_gib,
        cores=available_cores(),
        processor=processor().get("model name", platform.machine()),
        sees=[folder for folder in folders if Path(folder).exists()],
        cache=str(cache),
        operators=sorted(file.stem for file in own_build_folder(cache).glob("*/*.so")),
        weights=sorted(file.parent.name for file in (cache / "initial_weights").glob("*/initial_weights.json")),
        networks=networks(),
    )
    print_node(node)


def networks(root: Path = Path("/sys/class")) -> list[str]:
    """InfiniBand and RoCE ports that are up, with their rates; where there is none, Ethernet. `root` is sysfs."""
    ports = [
        f"{port.parents[1].name} {_text(port / 'rate')}"
        for port in sorted(root.glob("infiniband/*/ports/*"))
        if "ACTIVE" in _text(port / "state")
    ]
    links = [
        f"{link.name} {int(speed) / 1000:g} Gb/s"
        for link in sorted(root.glob("net/*"))
        if (speed := _text(link / "speed")).isdecimal() and _text(link / "operstate") == "up"
    ]
    return ports or links


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1:])
