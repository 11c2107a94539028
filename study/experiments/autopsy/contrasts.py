"""Analysis of the sessions: one row per arm, one effect per switch and seed, and the tests of each effect.

A response is log(ZeRO arm / standard arm) of a figure in one session; pages show it in percent. Null margins are in
study/experiments/autopsy/design.py, committed before the first session.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from study.config.errors import UserError
from study.config.text import percent
from study.experiments.autopsy.design import (
    AA,
    AA_DEVIATIONS,
    FACTORIAL,
    LETTERS,
    PRINTED,
    RESPONSES,
    Kind,
    Response,
)
from study.experiments.autopsy.run import SESSIONS
from study.records.directory import read_json
from study.records.shares import CONFIDENCE
from study.records.statistics import POWER, SIGNIFICANCE, Interval, apply_holm, interval, t_quantile

FILE = "arms.parquet"
# Columns of a session; the other columns are of its arms.
_ABOUT = ("session", "kind", "cell", "seed", "scale", "state", "reason", "started_at", "session_s", "lanes", "core")
_AS_JSON = ("environment", "options", "optimizer_classes")


def read_sessions(runs: Path) -> pd.DataFrame:
    """Read the sessions as one row per arm, with derived responses; a session without arms is one row."""
    rows = []
    for file in sorted((runs / SESSIONS).glob("*.json")):
        record = read_json(file)
        about = {key: record.get(key) for key in (*_ABOUT, "environment", "options")}
        rows += [about | arm for arm in record["arms"] or [{"arm": None}]]
    if not rows:
        raise UserError(f"there are no sessions in {runs}", "run: study autopsy run")
    if all(row["state"] != "ok" for row in rows):
        raise UserError(f"no session in {runs} succeeded", "run: study autopsy run --retry")
    table = pd.DataFrame(rows)
    for name in set(_AS_JSON) & set(table):
        table[name] = table[name].map(lambda value: json.dumps(value, sort_keys=True))
    return table.sort_values(["seed", "session", "process", "place_in_process"], ignore_index=True).assign(
        less_eval_s=lambda arms: arms["whole_s"] - arms["eval_s"],
        less_eval_and_save_s=lambda arms: arms["whole_s"] - arms["eval_s"] - arms["save_s"],
    )


def read_arms(folder: Path) -> pd.DataFrame:
    """Read the table of an earlier `study autopsy report`."""
    if not (folder / FILE).is_file():
        raise UserError(f"{folder / FILE} does not exist", "run: study autopsy run, and study autopsy report")
    return pd.read_parquet(folder / FILE)


def is_as_printed(arms: pd.DataFrame) -> pd.Series:
    """Select sessions with all switches as printed."""
    return (arms["cell"] == PRINTED) & arms["kind"].isin(["factorial", "listing"])


@dataclasses.dataclass(frozen=True)
class LinearModel:
    """Saturated linear model of one response for each seed with all 16 cells: mean, switches and pairs."""

    # A row per seed. Columns are "", one letter or two; a switch is coded +1 if it is corrected, else -1.
    terms: pd.DataFrame

    def at(self, places: Mapping[str, float]) -> np.ndarray:
        """Evaluate the model for each seed at these switch settings: -1 as printed, 1 corrected, 0 averaged."""
        return self.terms.to_numpy() @ [math.prod(places.get(letter, 0.0) for letter in term) for term in self.terms]

    def effect(self, letter: str) -> np.ndarray:
        """Return the effect of correcting a switch, averaged over the others, standard arm first (except for O)."""
        return self.at({"O": -1.0, letter: 1.0}) - self.at({"O": -1.0, letter: -1.0})

    def shares(self) -> dict[str, np.ndarray]:
        """Attribute the change from the listing to a corrected protocol with both orders to the switches.

        A contribution is the mean over all sequences of switches: the main effect, and half of each of its pairs.
        """
        # Each switch goes from -1 to 1, the order to 0: on average the others are at 0, and the order at -0.5.
        middle = {"O": -0.5}
        halves = {letter: self.at({**middle, letter: 1.0}) - self.at({**middle, letter: 0.0}) for letter in LETTERS}
        return {letter: half if letter == "O" else 2 * half for letter, half in halves.items()}

    def printed(self) -> np.ndarray:
        return self.at(dict.fromkeys(LETTERS, -1.0))

    def corrected(self) -> np.ndarray:
        """Evaluate each seed with all switches corrected, averaged over the order."""
        return self.at(dict.fromkeys(LETTERS, 1.0) | {"O": 0.0})


@dataclasses.dataclass(frozen=True)
class Effect:
    """Effect of correcting one switch on one response."""

    letter: str
    response: Response
    ratio: Interval
    # Over both orders.
    average: Interval
    # Holm-corrected over the five switches.
    p: float
    margin: float

    @property
    def is_significant(self) -> bool:
        """Whether p, corrected for the number of switches, is below the level of all tests here."""
        return self.p < SIGNIFICANCE

    @property
    def expected(self) -> str:
        return self.response.expected[self.letter]

    @property
    def outcome(self) -> str:
        """`0` if the interval is inside the null margin, a sign if it excludes zero and p is significant, else `?`."""
        low, high = self.ratio.low, self.ratio.high
        if low is None or high is None:
            return "?"
        if max(abs(math.log(low)), abs(math.log(high))) < self.margin:
            return "0"
        if not self.is_significant:
            return "?"
        return "+" if low > 1 else "-" if high < 1 else "?"

    @property
    def verdict(self) -> str:
        if "?" in (self.expected, self.outcome):
            return "open" if self.expected == "?" else "not decided"
        return "as expected" if self.expected == self.outcome else "not as expected"


@dataclasses.dataclass(frozen=True, eq=False)
class Autopsy:
    """The arms of all sessions, with the responses, models and effects that the page and its figures show."""

    arms: pd.DataFrame

    @functools.cached_property
    def responses(self) -> dict[str, Response]:
        """The responses that have values, by name; a laptop has no device peak."""
        return {item.name: item for item in RESPONSES if item.name in self.arms and self.arms[item.name].notna().any()}

    @functools.cached_property
    def models(self) -> dict[str, LinearModel]:
        terms, models = ["", *LETTERS, *map("".join, itertools.combinations(LETTERS, 2))], {}
        # The design is orthogonal: each term is a mean of signed cells.
        signs = [
            [math.prod(1.0 if letter in cell else -1.0 for letter in term) for term in terms] for cell in FACTORIAL
        ]
        for name in self.responses:
            complete = self.gaps(name).reindex(columns=list(FACTORIAL)).dropna()
            effects = complete.to_numpy() @ signs / len(FACTORIAL)
            models[name] = LinearModel(pd.DataFrame(effects, complete.index, terms))
        return models

    @functools.cached_property
    def effects(self) -> dict[str, list[Effect]]:
        """The effect of each switch on each response; none if no seed has all its sessions."""
        effects: dict[str, list[Effect]] = {}
        for name, response in self.responses.items():
            model, margin = self.models[name], self.null_margin(name)
            values = [model.effect(letter) for letter in LETTERS]
            effects[name] = [
                Effect(letter, response, mean_ratio(value), mean_ratio(2 * model.terms[letter].to_numpy()), p, margin)
                for letter, value, p in zip(LETTERS, values, apply_holm(map(sign_flip_p, values)), strict=True)
                if len(value)
            ]
        return effects

    def gaps(self, response: str, kind: Kind = "factorial") -> pd.DataFrame:
        """Return log(ZeRO / standard), a row per seed and a column per cell; NaN for failed sessions."""
        rows = self.arms[(self.arms["kind"] == kind) & (self.arms["state"] == "ok")]
        figures = rows.pivot_table(index=["seed", "cell"], columns="arm", values=response)
        if not {"zero", "standard"} <= set(figures):
            return pd.DataFrame(dtype=float)
        return np.log(figures["zero"] / figures["standard"]).unstack("cell")

    def cell_gaps(self, response: str, kind: Kind, cell: str) -> np.ndarray:
        table = self.gaps(response, kind)
        return table[cell].dropna().to_numpy() if cell in table else np.empty(0)

    def ratio(self, response: str, kind: Kind, cell: str) -> Interval:
        return mean_ratio(self.cell_gaps(response, kind, cell))

    def null_margin(self, response: str) -> float:
        """Return the null margin: the larger of a fixed fraction and twice the SD of the A/A sessions."""
        fixed, equal = self.responses[response].margin, self.cell_gaps(response, "aa", AA)
        return max(fixed, AA_DEVIATIONS * float(np.std(equal, ddof=1))) if len(equal) > 1 else fixed

    def minimum_detectable_effect(self, response: str) -> float:
        """Return the effect that these seeds detect with a power of 80 %, from the SD of the A/A sessions.

        In each seed, an effect is a difference of two means of four cells.
        """
        equal = self.cell_gaps(response, "aa", AA)
        if len(equal) < 2:
            return math.nan
        deviation, n = float(np.std(equal, ddof=1)), len(equal)
        t = t_quantile((1 + CONFIDENCE) / 2, n - 1) + t_quantile(POWER, n - 1)
        return float(t * deviation * math.sqrt(2 / 4 / n))

    def engine_was_on(self, *, all_as_printed: bool = False) -> tuple[int, int]:
        """Return how many sessions had an active engine, and how many set it, or every switch, as printed."""
        arms = self.arms
        sets_it_as_printed = arms["cell"].str.startswith("e") & (arms["kind"] != "gate")
        chosen = is_as_printed(arms) if all_as_printed else sets_it_as_printed
        rows = arms[arms["arm"].astype(str).str.startswith("zero") & chosen & (arms["state"] == "ok")]
        is_on = rows.groupby("session")["deepspeed_enabled"].any()
        return int(is_on.sum()), len(is_on)


def mean_ratio(logs: np.ndarray) -> Interval:
    """Return the mean ratio with a t interval over seeds."""
    return interval(np.exp(logs))


def share_text(estimate: Interval) -> str:
    """Return a ratio as a change in percent, with its interval."""
    return estimate.brief(lambda value: percent(value - 1, signed=True)) if estimate.n else "-"


def sign_flip_p(values: np.ndarray) -> float:
    """Return the exact two-sided p of the sign-flip permutation test; NaN without values."""
    if not len(values):
        return math.nan
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(values))))
    means = np.abs(signs @ values)
    return float((means >= abs(values.sum()) - 1e-12).mean())
