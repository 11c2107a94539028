"""What a suite needs of a box, against what a box has."""

from __future__ import annotations

from study.errors import UserError
from study.host.box import Box
from study.host.memory import HOST_MEMORY_VARIABLE
from study.sweep.suite_file import Suite


def missing_here(suite: Suite, box: Box) -> UserError | None:
    """The first thing that the suite needs and the box lacks."""
    wanted = suite.requires
    if box.gpus < wanted.gpus:
        return UserError(
            f"{suite.name} needs {wanted.gpus} GPU{'s'[: wanted.gpus > 1]}, and this box shows {box.gpus}",
            "run it where they are, or use --dry-run to see what it would do",
        )
    smallest = min(box.gpu_memory_gib[: wanted.gpus], default=0.0)
    if wanted.gpus and smallest < wanted.gpu_memory_gib:
        return UserError(
            f"{suite.name} needs GPUs of {wanted.gpu_memory_gib:g} GiB, and one here has {smallest:.0f}",
            "run it on larger ones, or use --dry-run to see what it would do",
        )
    if box.host_memory_gib < wanted.host_memory_gib:
        return UserError(
            f"{suite.name} needs {wanted.host_memory_gib:g} GiB of host memory, and here are {box.host_memory_gib:.0f}",
            f"run it where there is more, or let {HOST_MEMORY_VARIABLE} say how much this box can have",
        )
    return None


def smallest_box_for(suite: Suite, box: Box) -> Box:
    """This box, or where it shows fewer GPUs than the suite needs, one that has them: a plan is for where it runs."""
    wanted = suite.requires
    if box.gpus >= wanted.gpus:
        return box
    return Box((wanted.gpu_memory_gib,) * wanted.gpus, max(box.host_memory_gib, wanted.host_memory_gib))
