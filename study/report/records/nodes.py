"""Runs that are alike but for the number of their machines; virtual ones have no time, and the rest of it."""

from __future__ import annotations

import pandas as pd

from study.host.memory import GIB
from study.report.records.arms import NAN, state_bytes
from study.report.records.frames import Records, real, virtual
from study.report.records.predicted import predicted
from study.report.records.virtual_ranks import sent_bytes

STRONG, WEAK, PLANNED = "strong", "weak", "planned"
_ALIKE = ["task", "model_name_or_path", "line", "engine_precision", "seq_length"]
_COLUMNS = [
    "model", "line", "strategy", "scaling", "machines", "fewest", "world_size", "tokens_per_s", "efficiency", "state",
    "sent", "across", "peak", "predicted_state", "predicted_sent", "predicted_peak", "predicted_tokens_per_s",
    "predicted_efficiency",
]  # fmt: skip


def over_nodes(records: Records) -> pd.DataFrame:
    """A row for each arm and number of machines. Strong scaling keeps the global batch, weak scaling a rank's share."""
    found = [
        *_rows(real(records).runs, "global_batch_size", STRONG),
        *_rows(real(records).runs, "share", WEAK),
        # What a virtual rank holds and sends does not depend on the batch.
        *_rows(virtual(records).runs, "virtual", PLANNED),
    ]
    return pd.DataFrame(found, columns=_COLUMNS)


def _rows(runs: pd.DataFrame, kept: str, scaling: str) -> list[dict[str, object]]:
    ended = runs[(runs["status_state"] == "ok") & (runs["confounded"].isna() | (runs["confounded"] == ""))]
    # Of an older record nobody knows what of it went from one machine to another.
    ended = ended[(ended["machines"] == 1) | ended["across_machines_bytes_per_step"].notna()]
    if ended.empty:
        return []
    ended = ended.assign(
        line=ended["arm"].str.replace(r" x\d+", "", regex=True),
        share=ended["global_batch_size"].astype(float) / ended["world_size"].astype(float),
    )
    rows = []
    for (_, model, line, *_), alike in ended.groupby([*_ALIKE, kept], dropna=False, sort=False):
        # Two numbers of machines are no plan: suites that vary settings have one small and one large job.
        if alike["machines"].nunique() < (3 if scaling == PLANNED else 2):
            continue
        first = alike[alike["machines"] == alike["machines"].min()]
        # Of several counts of ranks on so few machines the largest, which fills them.
        first = first[first["world_size"] == first["world_size"].max()]
        per_rank = (first["tokens_per_s"] / first["world_size"].astype(float)).median()
        told = predicted(first.iloc[0]).tokens_per_s / int(first["world_size"].iloc[0])
        for (machines, ranks), some in alike.groupby(["machines", "world_size"]):
            # The wall time of a virtual rank is no figure.
            speed = NAN if scaling == PLANNED else some["tokens_per_s"].median()
            said = predicted(some.iloc[0])
            rows.append({
                "model": str(model).rsplit("/", 1)[-1], "line": str(line), "strategy": some["strategy"].iloc[0],
                "scaling": scaling, "machines": int(machines), "fewest": int(first["machines"].iloc[0]),
                "world_size": int(ranks), "tokens_per_s": speed, "efficiency": speed / ranks / per_rank,
                "state": state_bytes(some), "sent": some["collectives"].map(sent_bytes).median(),
                "across": 0.0 if machines == 1 else some["across_machines_bytes_per_step"].median(),
                "peak": some["peak_memory_gib_allocated"].median(), "predicted_state": said.state_bytes,
                "predicted_sent": said.sent_bytes, "predicted_peak": said.peak_bytes / GIB,
                "predicted_tokens_per_s": said.tokens_per_s, "predicted_efficiency": said.tokens_per_s / ranks / told,
            })  # fmt: skip
    return rows
