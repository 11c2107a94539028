"""A form of check: it makes one figure of a claim's own numbers, or of records. Ledger entries fill it in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from study.claims.verdicts import Figure, Kind


class Form(NamedTuple):
    kind: Kind
    figure: Callable[..., Figure]


FORMS: dict[str, Form] = {}


def form(kind: Kind) -> Callable[[Callable[..., Figure]], Callable[..., Figure]]:
    def register(figure: Callable[..., Figure]) -> Callable[..., Figure]:
        FORMS[figure.__name__] = Form(kind, figure)
        return figure

    return register
