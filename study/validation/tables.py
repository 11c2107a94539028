"""Tables and the plot of the scores, for the committed summary and for the notebook, from scores.parquet alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from study.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES, LEAGUE = "scores.parquet", "league.parquet"
# What the code of an earlier commit said of suites that had not run then, and that the rules were mended by since.
FORETOLD = "foretold.csv"
# What the predictions were to reach against published rows, and with own records.
AIMS = {"peak": 0.10, "step": 0.15, "own peak": 0.05}
OWN = "own"
# Of own records, by `peak_kind`.
OWN_KINDS = {
    "resident": "own real ranks",
    "resident_returned": "own virtual ranks",
    "allocated": "own GPU runs",
}


def read(folder: Path) -> pd.DataFrame:
    file = folder / SCORES
    if not file.is_file():
        raise UserError(f"there is no {file}", "make it: python -m study.validation report")
    return pd.read_parquet(file)


def counted(scores: pd.DataFrame) -> pd.DataFrame:
    """Without what arithmetic refused."""
    return scores[scores["refused"].isna()]


def page(rows: pd.DataFrame) -> pd.Series:
    """One page may be several sources, which share a box, a code base and an author."""
    return rows["url"].str.split("#").str[0]


def foretold(folder: Path, scores: pd.DataFrame) -> pd.DataFrame:
    """Beside what today's rules say of the same ranks."""
    rows = pd.read_csv(folder / FORETOLD)
    now = scores[scores["source"] == OWN].set_index("name")["peak_error"].reindex(rows["suite"] + " " + rows["run"])
    rows = rows.assign(then=rows["predicted_gib"] / rows["measured_gib"] - 1, now=now.to_numpy())
    return pd.DataFrame([
        {
            "suite": suite, "predicted by": some["predicted_by"].iloc[0], "rows": len(some),
            "median error": _percent(some["then"].abs().median()), "worst": _percent(some["then"].abs().max()),
            "worst since": _percent(some["now"].abs().max()),
        }
        for suite, some in rows.groupby("suite", sort=False)
    ])  # fmt: skip


def headline(scores: pd.DataFrame) -> pd.DataFrame:
    rows = counted(scores)
    own, published = rows[rows["source"] == OWN], rows[rows["source"] != OWN]
    own_peaks = [
        (f"peak memory, {what}", own[own["peak_kind"] == kind]["peak_error"], AIMS["own peak"])
        for kind, what in OWN_KINDS.items()
    ]
    scored = published[published["use"] == "score"]
    offloaded, scored = (scored[scored["offloads"] == is_so] for is_so in (True, False))
    fitted = page(scored).isin(page(rows[rows["use"] == "fit"]))
    kinds = [
        ("peak memory, published", published[published["use_memory"] == "score"]["peak_error"], AIMS["peak"]),
        ("step time, published, rows that fitted nothing", scored["step_error"], AIMS["step"]),
        ("step time, pages that fitted nothing", scored[~fitted]["step_error"], AIMS["step"]),
        ("step time, published, offload: no interval", offloaded["step_error"], AIMS["step"]),
        *own_peaks,
        ("step time, own GPU runs", own["step_error"], AIMS["step"]),
    ]
    return pd.DataFrame([_line(what, errors, f"{aim:.0%}") for what, errors, aim in kinds if errors.notna().any()])


def fits(scores: pd.DataFrame) -> pd.DataFrame:
    """Said to fit and did not costs a run; said not to fit and did costs a chance."""
    found = []
    for what, rows in _parts(counted(scores)):
        known = rows[rows["fits"].notna() & rows["predicted_fits"].notna()]
        if len(known):
            said, was = known["predicted_fits"].astype(bool), known["fits"].astype(bool)
            found.append({
                "rows": what, "judged": len(known), "right": _percent((said == was).mean()),
                "of those that ran out, called": f"{int((~said & ~was).sum())} of {int((~was).sum())}",
                "said to fit, and did not": int((said & ~was).sum()),
                "said not to fit, and did": int((~said & was).sum()),
            })  # fmt: skip
    return pd.DataFrame(found)


def by(scores: pd.DataFrame, column: str) -> pd.DataFrame:
    """Errors by source, by strategy, by device; rows that fitted a constant are left out of time."""
    lines = []
    for name, rows in counted(scores).groupby(column, sort=False):
        scored = rows[rows["use"] == "score"]
        peaks = rows[rows["use_memory"] == "score"]
        for what, errors in (("step time", scored["step_error"]), ("peak memory", peaks["peak_error"])):
            if errors.notna().any():
                lines.append({column: name, **_line(what, errors, None)})
    return pd.DataFrame(lines)


def each(scores: pd.DataFrame) -> pd.DataFrame:
    rows = counted(scores)
    return pd.DataFrame({
        "source": rows["source"], "run": rows["name"], "precision": rows["precision"],
        "peak, GiB": rows["peak_gib"].map(_number), "predicted": rows["predicted_peak_gib"].map(_number),
        "error": rows["peak_error"].map(_signed),
        "step, s": rows["step_s"].map(_number), "predicted ": rows["predicted_step_s"].map(_number),
        "error ": rows["step_error"].map(_signed),
        "fits": rows["fits"].map(_said), "said": rows["predicted_fits"].map(_said), "use": rows["use"],
    })  # fmt: skip


def refused(scores: pd.DataFrame) -> pd.DataFrame:
    rows = scores[scores["refused"].notna()]
    return pd.DataFrame({"source": rows["source"], "run": rows["name"], "why": rows["refused"]})


def league(folder: Path) -> pd.DataFrame:
    return league_table(pd.read_parquet(folder / LEAGUE))


def league_table(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({
        "rows": rows["rows"], "tool": rows["tool"], "peaks it speaks of": rows["peaks"],
        "median error": rows["median_error"].map(_percent), "worst": rows["worst_error"].map(_percent),
        "fit or not, right": rows["right"].astype(str) + " of " + rows["judged"].astype(str),
        "of those that ran out, called": rows["called"].astype(str) + " of " + rows["ran_out"].astype(str),
    })  # fmt: skip


def drawing(scores: pd.DataFrame) -> Figure:
    """Predicted over measured, for each figure; the line is agreement."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    drawn = {"peak_gib": "GiB at the peak", "step_s": "seconds of a step"}
    for place, (name, unit) in zip(axes, drawn.items(), strict=True):
        rows = counted(scores).dropna(subset=[name])
        for source, some in rows.groupby(rows["source"] == OWN):
            label = "own records" if source else "published"
            place.scatter(some[name], some[f"predicted_{name}"], s=14, alpha=0.6, label=label)
        if len(rows):
            ends = [rows[name].min(), rows[name].max()]
            place.plot(ends, ends, color="grey", linewidth=1)
            place.legend()
        place.set(xscale="log", yscale="log", xlabel=f"measured, {unit}", ylabel="predicted")
    plt.close(figure)
    return figure


def _parts(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    yield "published", rows[rows["source"] != OWN]
    yield "own records", rows[rows["source"] == OWN]


def _line(what: str, errors: pd.Series, aim: str | None) -> dict[str, object]:
    sizes = errors.dropna().abs()
    line: dict[str, object] = {"figure": what, "rows": len(sizes), "median error": _percent(sizes.median())}
    if aim is not None:
        line["aim"] = aim
    return {**line, "worst": _percent(sizes.max()), "leans": _signed(errors.dropna().median())}


def _percent(share: float) -> str:
    return "not measured" if pd.isna(share) else f"{share:.1%}"


def _signed(share: float) -> str:
    return "" if pd.isna(share) else f"{share:+.0%}"


def _number(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.3g}"


def _said(value: object) -> str:
    return "" if value is None or pd.isna(value) else "fits" if value else "out of memory"
