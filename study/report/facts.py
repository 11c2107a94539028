"""Facts of an answer: a headline is a value and its meaning, in the fixed words of captions.yaml."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CAPTIONS = Path(__file__).with_name("captions.yaml")


@functools.cache
def captions() -> Mapping[str, Mapping[str, str]]:
    """Return every fixed text by the name of its question and its own."""
    texts: dict[str, dict[str, str]] = yaml.safe_load(CAPTIONS.read_text(encoding="utf-8"))
    terms = texts.pop("terms")
    return {
        question: {name: _with_terms(text, terms) for name, text in by_name.items()}
        for question, by_name in texts.items()
    }


def _with_terms(text: str, terms: Mapping[str, str]) -> str:
    for name, term in terms.items():
        text = text.replace(f"{{terms.{name}}}", term)
    return text


def caption(question: str, name: str, **values: object) -> str:
    """Return a fixed text with its values."""
    return captions()[question][name].format(**values)


def footnotes(question: str, needed: Mapping[str, bool], **values: object) -> tuple[str, ...]:
    """Return the fixed texts that a table needs, by whether it does."""
    return tuple(caption(question, name, **values) for name, is_needed in needed.items() if is_needed)


@dataclasses.dataclass(frozen=True)
class Headline:
    """A number of an answer. Texts of records are escaped when it is rendered."""

    # With its unit.
    value: str
    what: str
    strategy: str = ""
    # The workload, or the model and its ranks.
    scope: str = ""
    # Figures that the value is to be compared with, such as an interval or a margin.
    bounds: str = ""
    # Number of seeds.
    n: int = 0

    @property
    def words(self) -> str:
        """Return the meaning of the value, and in brackets its strategy, scope, bounds and seeds."""
        strategy = f"`{self.strategy}`" if self.strategy else ""
        seeds = f"n = {self.n}" if self.n else ""
        about = [text for text in (strategy, self.scope, self.bounds, seeds) if text]
        return f"{self.what} ({'; '.join(about)})" if about else self.what


@dataclasses.dataclass(frozen=True)
class ClaimRow:
    """A published claim that depends on the records of a report, as a row of its table."""

    cells: Mapping[str, Any]
    # holds, holds in part, does not hold, contradicts itself, or undecided
    kind: str
    # The kind with its evidence.
    finding: str
    # Whether these records decide the claim, alone or with others.
    is_decided: bool
    # Names of the footnotes that the finding needs.
    notes: frozenset[str]
