"""Ranks that work on the same samples together. To all other strategies a rank is alone with its samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from study.errors import UserError

# What the ranks of a team divide among themselves: the tensors of each layer, or the tokens of each sample, which
# attention then brings together by all-to-all (sequence) or by passing keys and values around (context).
Divided = Literal["tensors", "sequence", "context"]
_DIVIDED_BY: dict[str, Divided] = {"tp_size": "tensors", "sp_size": "sequence", "cp_size": "context"}


@dataclasses.dataclass(frozen=True)
class Team:
    """Consecutive ranks, as the engines lay them out."""

    divides: Divided
    ranks: int


def team_of(asked: Mapping[str, Any]) -> Team | None:
    """From what a launched file asks for: the sizes of its parallelism_config, or DeepSpeed's `tensor_parallel`."""
    sizes = {key: asked[key] for key in _DIVIDED_BY if asked.get(key, 1) > 1}
    section = asked.get("tensor_parallel")
    if isinstance(section, Mapping) and isinstance(size := section.get("autotp_size"), int) and size > 1:
        sizes["tp_size"] = size
    if len(sizes) > 1:
        raise UserError(f"the launched files have {' and '.join(sizes)}", "keep one of them")
    return next((Team(_DIVIDED_BY[key], size) for key, size in sizes.items()), None)
