"""Analysis of the sessions: one row per arm, one effect per switch and seed, and the tests of each effect.

A response is log(ZeRO arm / standard arm) of a figure in one session; pages show it in percent. Null margins are in
study/autopsy/design.py, committed before the first session.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from study.autopsy.design import (
    AA,
    AA_DEVIATIONS,
    CORRECTED,
    EXPECTED,
    FACTORIAL,
    LETTERS,
    PRINTED,
    RESPONSES,
    Kind,
    Response,
)
from study.autopsy.run import SESSIONS
from study.config.errors import UserError
from study.records.directory import read_json
from study.records.statistics import (
    CONFIDENCE,
    POWER,
    Equivalence,
    Interval,
    apply_holm,
    equivalence_test,
    interval,
    t_quantile,
)

FILE = "arms.parquet"
# Columns of a session; the other columns are of its arms.
_ABOUT = ("session", "kind", "cell", "seed", "scale", "state", "reason", "started_at", "session_s", "lanes", "core")
_AS_JSON = ("environment", "options", "optimizer_classes")
_PAIRS = tuple(itertools.combinations(LETTERS, 2))


def read_sessions(runs: Path) -> pd.DataFrame:
    """Read the sessions as one row per arm; a session without arms is one row."""
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
    return with_responses(table.sort_values(["seed", "session", "process", "place_in_process"], ignore_index=True))


def with_responses(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with derived responses added."""
    return table.assign(
        less_eval_s=table["whole_s"] - table["eval_s"],
        less_eval_and_save_s=table["whole_s"] - table["eval_s"] - table["save_s"],
    )


def read_arms(folder: Path) -> pd.DataFrame:
    """Read the table of an earlier `study autopsy report`."""
    if not (folder / FILE).is_file():
        raise UserError(f"{folder / FILE} does not exist", "run: study autopsy run, and study autopsy report")
    return pd.read_parquet(folder / FILE)


def gaps(arms: pd.DataFrame, response: str, kind: Kind = "factorial") -> pd.DataFrame:
    """Return log(ZeRO / standard), a row per seed and a column per cell; NaN for failed sessions."""
    rows = arms[(arms["kind"] == kind) & (arms["state"] == "ok")]
    figures = rows.pivot_table(index=["seed", "cell"], columns="arm", values=response)
    if not {"zero", "standard"} <= set(figures):
        return pd.DataFrame(dtype=float)
    return np.log(figures["zero"] / figures["standard"]).unstack("cell")


def cell_gaps(arms: pd.DataFrame, response: str, kind: Kind, cell: str) -> np.ndarray:
    """Return the gaps of one cell, one per seed."""
    table = gaps(arms, response, kind)
    return table[cell].dropna().to_numpy() if cell in table else np.empty(0)


@dataclasses.dataclass(frozen=True)
class LinearModel:
    """Saturated linear model of one response for each seed with all 16 cells: mean, switches and pairs."""

    # A row per seed. Columns are "", one letter or two; a switch is coded +1 if it is corrected, else -1.
    terms: pd.DataFrame

    def at(self, places: Mapping[str, float]) -> np.ndarray:
        """Evaluate the model for each seed at these switch settings: -1 as printed, 1 corrected, 0 averaged."""
        return sum(
            (self.terms[term].to_numpy() * math.prod(places[letter] for letter in term) for term in self.terms),
            start=np.zeros(len(self.terms)),
        )

    def effect(self, letter: str) -> np.ndarray:
        """Return the effect of correcting a switch, averaged over the others, standard arm first (except for O)."""
        order = {"O": -1.0} if letter != "O" else {}
        averaged = dict.fromkeys(LETTERS, 0.0) | order
        return self.at(averaged | {letter: 1.0}) - self.at(averaged | {letter: -1.0})

    def average_effect(self, letter: str) -> np.ndarray:
        """Return the effect of correcting a switch, averaged over the others and over both orders."""
        return 2 * self.terms[letter].to_numpy()

    def shares(self) -> dict[str, np.ndarray]:
        """Attribute the change from the listing to a corrected protocol with both orders to the switches.

        A contribution is the mean over all sequences of switches: the main effect, and half of each of its pairs.
        """
        ends = {letter: (-1.0, 0.0 if letter == "O" else 1.0) for letter in LETTERS}
        contributions = {letter: np.zeros(len(self.terms)) for letter in LETTERS}
        sequences = list(itertools.permutations(LETTERS))
        for sequence in sequences:
            places = {letter: printed for letter, (printed, _) in ends.items()}
            before = self.at(places)
            for letter in sequence:
                places[letter] = ends[letter][1]
                after = self.at(places)
                contributions[letter] += (after - before) / len(sequences)
                before = after
        return contributions

    def printed(self) -> np.ndarray:
        """Evaluate each seed with all switches as printed."""
        return self.at(dict.fromkeys(LETTERS, -1.0))

    def corrected(self) -> np.ndarray:
        """Evaluate each seed with all switches corrected, averaged over the order."""
        return self.at(dict.fromkeys(LETTERS, 1.0) | {"O": 0.0})


def fit_linear_model(table: pd.DataFrame) -> LinearModel:
    """Fit the model to `gaps` of the factorial."""
    complete = table.reindex(columns=list(FACTORIAL)).dropna()
    signs = {letter: np.array([1.0 if letter in cell else -1.0 for cell in FACTORIAL]) for letter in LETTERS}
    terms = ["", *LETTERS, *("".join(pair) for pair in _PAIRS)]
    columns = [np.prod([signs[letter] for letter in term], axis=0) if term else np.ones(len(FACTORIAL))
               for term in terms]  # fmt: skip
    # The design is orthogonal: each term is a mean of signed cells.
    values = complete.to_numpy() @ np.array(columns).T / len(FACTORIAL)
    return LinearModel(pd.DataFrame(values, index=complete.index, columns=terms))


def mean_ratio(logs: np.ndarray) -> Interval:
    """Return the mean ratio with a t interval over seeds."""
    return interval(np.exp(logs))


def sign_flip_p(values: np.ndarray) -> float:
    """Return the exact two-sided p of the sign-flip permutation test; NaN without values."""
    if not len(values):
        return math.nan
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(values))))
    means = np.abs(signs @ values)
    return float((means >= abs(values.sum()) - 1e-12).mean())


@dataclasses.dataclass(frozen=True)
class Effect:
    """Effect of correcting one switch on one response."""

    letter: str
    response: Response
    ratio: Interval
    average: Interval
    # Holm-corrected over the five switches.
    p: float
    expected: str
    margin: float

    @property
    def outcome(self) -> str:
        """`0` if the interval is inside the null margin, a sign if it excludes zero, else `?`."""
        low, high = self.ratio.low, self.ratio.high
        if low is None or high is None:
            return "?"
        if max(abs(math.log(low)), abs(math.log(high))) < self.margin:
            return "0"
        return "+" if low > 1 else "-" if high < 1 else "?"

    @property
    def verdict(self) -> str:
        """Comparison of the expected sign with the outcome."""
        if "?" in (self.expected, self.outcome):
            return "open" if self.expected == "?" else "not decided"
        return "as expected" if self.expected == self.outcome else "not as expected"


def null_margin(arms: pd.DataFrame, response: Response) -> float:
    """Return the null margin: the larger of a fixed fraction and twice the SD of the A/A sessions."""
    equal = cell_gaps(arms, response.name, "aa", AA)
    return max(response.margin, AA_DEVIATIONS * float(np.std(equal, ddof=1))) if len(equal) > 1 else response.margin


def effects(arms: pd.DataFrame, response: Response) -> list[Effect]:
    """Return the effect of each switch; empty if no seed has all its sessions."""
    fitted = fit_linear_model(gaps(arms, response.name))
    if fitted.terms.empty:
        return []
    values = {letter: fitted.effect(letter) for letter in LETTERS}
    ps = apply_holm(sign_flip_p(value) for value in values.values())
    margin = null_margin(arms, response)
    return [
        Effect(letter, response, mean_ratio(values[letter]), mean_ratio(fitted.average_effect(letter)), p,
               EXPECTED[letter][response.name], margin)
        for letter, p in zip(LETTERS, ps, strict=True)
    ]  # fmt: skip


def measured_responses(arms: pd.DataFrame) -> list[Response]:
    """Return the responses that have values; a laptop has no device peak."""
    return [response for response in RESPONSES if response.name in arms and arms[response.name].notna().any()]


def engine_equivalence(arms: pd.DataFrame, response: Response) -> Equivalence:
    """Test the engine's effect on a loss, over both orders, for equivalence (TOST)."""
    values = 1 + fit_linear_model(gaps(arms, response.name)).average_effect("E")
    return equivalence_test(values.tolist(), np.ones(len(values)).tolist(), null_margin(arms, response))


def minimum_detectable_effect(arms: pd.DataFrame, response: Response) -> float:
    """Return the effect that these seeds detect with a power of 80 %, from the SD of the A/A sessions.

    In each seed, an effect is a difference of two means of four cells.
    """
    equal = cell_gaps(arms, response.name, "aa", AA)
    if len(equal) < 2:
        return math.nan
    deviation, n = float(np.std(equal, ddof=1)), len(equal)
    t = t_quantile((1 + CONFIDENCE) / 2, n - 1) + t_quantile(POWER, n - 1)
    return float(t * deviation * math.sqrt(2 / 4 / n))


def engine_was_on(arms: pd.DataFrame, where: Callable[[pd.DataFrame], pd.Series]) -> tuple[int, int]:
    """Return the number of sessions with an active DeepSpeed engine, and of all sessions."""
    rows = arms[arms["arm"].astype(str).str.startswith("zero") & where(arms) & (arms["state"] == "ok")]
    is_on = rows.groupby("session")["deepspeed_enabled"].any()
    return int(is_on.sum()), len(is_on)


def sets_it_as_printed(arms: pd.DataFrame) -> pd.Series:
    """Select sessions whose engine switch is as printed."""
    return arms["cell"].str.startswith("e") & (arms["kind"] != "gate")


def is_as_printed(arms: pd.DataFrame) -> pd.Series:
    """Select sessions with all switches as printed."""
    return (arms["cell"] == PRINTED) & arms["kind"].isin(["factorial", "listing"])


def printed_ratio(arms: pd.DataFrame, response: str) -> Interval:
    """Return the ratio of ZeRO to standard in the cell as printed."""
    return mean_ratio(cell_gaps(arms, response, "factorial", PRINTED))


def corrected_ratio(arms: pd.DataFrame, response: str) -> Interval:
    """Return the ratio of ZeRO to standard with all switches corrected."""
    return mean_ratio(cell_gaps(arms, response, "corrected", CORRECTED))
