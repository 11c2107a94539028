"""Questions, figures and pages of a report. A notebook starts with `load_frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def load_frames(folder: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return one row per run and one per step, read from a runs directory or a report here or in the checkout."""
    # Imported here because commands import this package, and most of them need no tables.
    from study.config.errors import UserError
    from study.config.strategies import resolve_repository_path
    from study.records.frames import read_records

    if not (path := resolve_repository_path(folder)).exists():
        raise UserError(f"there is no folder {folder}, neither here nor in the checkout", "name another records_dir")
    records = read_records(path)
    return records.runs, records.steps
