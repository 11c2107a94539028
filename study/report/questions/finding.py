"""What opens a report: a question, and what its records answer."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """One question, its answer in a few sentences (a line per workload), and what stands behind it."""

    question: str
    answer: str
    details: tuple[str, ...] = ()
