from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest
import yaml

from study.config.places import REPOSITORY
from study.host.memory import GIB
from study.predictor import intervals, recorded_runs, run_predictions
from study.predictor.communication import leaving_bytes
from study.predictor.constants import FITTED
from study.predictor.memory import kept_for_backward
from study.predictor.nearest import describe_nearest
from study.predictor.time import offload_range
from study.predictor.validation import (
    CAUSES,
    fit,
    implausibility,
    predicted_peak,
    predicted_step_s,
    published_rows,
    score,
)
from study.predictor.zero3_gathers import simulate_gathers
from study.report.pages import prediction as report
from study.report.pages import prediction_intervals
from study.report.site.build import NOTEBOOKS, execute

ROWS = published_rows()
COUNTED = [row for row in ROWS if not implausibility(row)]


@functools.cache
def score_all() -> pd.DataFrame:
    """Return the scores of all rows, which take seconds; no test changes them."""
    return report.scores_frame(report.all_rows())


@functools.cache
def coverage() -> pd.DataFrame:
    return prediction_intervals.coverage_table(pd.read_parquet(report.FOLDER / report.SCORES))


@functools.cache
def score_counted_steps() -> pd.DataFrame:
    return report.scores_frame([row for row in COUNTED if row.step_s])


def test_no_row_both_fits_a_constant_and_scores_it() -> None:
    fitting, scoring = fit.fit_rows(), [row for row in COUNTED if row.use == "score"]
    # The name of a row does not state its optimizer.
    fitted, scored = ({(row.source, row.name, row.step_s) for row in rows if row.step_s} for rows in (fitting, scoring))
    assert not fitted & scored
    # No constant is fitted on one row alone.
    assert len(fitting) >= 4 * len(dataclasses.fields(FITTED))
    assert len({row.url for row in fitting}) > 3


def test_a_peak_that_is_predicted_as_state_alone_has_no_ratio() -> None:
    scores = score_all()
    before, _ = prediction_intervals.published_ratios(scores, "above_state", ["full"])
    changed = scores.copy()
    first = before.index[0]
    changed.loc[first, "predicted_peak_gib"] = changed.loc[first, "state_gib"]
    after, _ = prediction_intervals.published_ratios(changed, "above_state", ["full"])
    assert after.to_dict() == before.drop(first).to_dict()


def test_arithmetic_rejects_impossible_rows() -> None:
    row = next(row for row in COUNTED if row.step_s and row.peak_bytes)
    fast = dataclasses.replace(row, step_s=(row.step_s or 0) / 1000)
    assert "TFLOP/s, but the device's peak is" in (implausibility(fast) or "")
    assert "weights and optimizer alone are" in (implausibility(dataclasses.replace(row, peak_bytes=GIB)) or "")
    assert implausibility(row) is None


def test_the_committed_constants_are_those_of_the_fit() -> None:
    """A search from the committed constants finds no better ones; a full search takes minutes."""
    rows = fit.fit_rows()
    least = fit.mean_error(rows, fit.minimize_error(rows, FITTED))
    assert fit.mean_error(rows, FITTED) == pytest.approx(least, abs=0.005)


def test_offload_counts_in_no_interval_and_the_two_boxes_differ_by_their_hosts() -> None:
    rows = [row for row in COUNTED if row.step_s and row.request.strategy.offloads]
    assert {row.source for row in rows} == {"a800-gist", "deepspeed-corebinding", "open-llama"}
    for row in rows:
        slow = dataclasses.replace(row.request.box, host_memory_gb_per_s=10.0)
        on_its_host = dataclasses.replace(row, request=dataclasses.replace(row.request, box=slow))
        ratio = predicted_step_s(on_its_host if row.source == "a800-gist" else row) / (row.step_s or 1.0)
        assert ratio == pytest.approx(1, abs=0.15), row.name
    frame = score_counted_steps()
    ends = [
        yaml.safe_load(prediction_intervals.intervals_text(rows))["step_s"]
        for rows in (frame, frame[~frame["offloads"]])
    ]
    assert ends[0] == ends[1]


def test_steps_with_offload_lie_between_the_ends_of_published_hosts() -> None:
    """The slowest rank is DeepSpeed's issue 1635 (not a row), the fastest node Lambda's page (a row), and the rest has
    the interval of steps without offload."""
    rows = [row for row in COUNTED if row.step_s and row.request.offloads]
    assert {row.request.fsdp_offloads for row in rows} == {True, False}
    for row in rows:
        assert row.step_s is not None
        ends = offload_range(row.request, predicted_step_s(row))
        assert ends is not None
        assert ends[0] < row.step_s < ends[1], row.name


def test_steps_of_several_nodes_do_not_grow_with_the_nodes_of_one_cluster() -> None:
    """The bandwidth of that cluster falls with the nodes: with it the median error was 6.3 %, and the mean 10.9 %."""
    rows = [row for row in COUNTED if row.step_s and row.request.box.nodes > 1]
    errors = pd.Series([predicted_step_s(row) / (row.step_s or 1.0) - 1 for row in rows]).abs()
    assert len({row.url for row in rows}) > 10
    assert errors.median() < 0.055
    assert errors.mean() < 0.095
    # InternEvo, four cards of 100 Gbit/s: 4.03 s on one node, and 4.59 s on 16; predicted were 3.25 s and 5.57 s.
    steps = {
        row.request.box.nodes: predicted_step_s(row) for row in COUNTED if row.source == "internevo" and row.step_s
    }
    assert steps[16] / steps[1] < 1.4


def test_steps_that_composer_took_fit_since_fsdp_reduces_in_each_micro_batch() -> None:
    """Its no_sync is for DDP alone. With gradients unsharded between micro-batches 13 of these rows would not fit."""
    rows = [row for row in COUNTED if row.source.startswith("llm-foundry")]
    assert len(rows) == 108
    assert sum(row.request.accumulation > 1 for row in rows) == 67
    assert all(score(row)["predicted_fits"] for row in rows if row.request.accumulation > 1)
    unsharded = [
        dataclasses.replace(row, request=dataclasses.replace(row.request, sync_each_batch=False)) for row in rows
    ]
    assert sum(not score(row)["predicted_fits"] for row in unsharded) == 13


def test_foreach_adam_decides_whether_stage_3_fits_in_24_gb() -> None:
    rows = [row for row in COUNTED if row.source in ("llamafactory-5977", "h2o-llmstudio-288")]
    assert [score(row)["predicted_fits"] for row in rows] == [row.fits for row in rows]
    fused = [dataclasses.replace(row, request=dataclasses.replace(row.request, step_copies=0)) for row in rows]
    fitting = [score(row)["predicted_fits"] for row in fused]
    changed = [row.request.strategy.name for row, fits in zip(rows, fitting, strict=True) if fits != row.fits]
    assert changed == ["zero3", "zero3"]


@pytest.mark.parametrize(
    ("names", "rel"), [(("fms-bf16", "fms-bf16-foak", "torchao-optimizers"), 0.04), (("deepspeed-bf16-states",), 0.015)]
)
def test_states_of_16_and_8_bits_have_the_published_sizes(names: tuple[str, ...], rel: float) -> None:
    """Those of DeepSpeed are of stage 3, which has its gradients in the forward pass as well. One of them is 1.3 % too
    low since the head's gather buffer is not counted next to the logits, as measured on an H200 (virtual_gemma)."""
    rows = [row for row in COUNTED if row.source in names]
    assert {row.source for row in rows} == set(names)
    for row in rows:
        assert predicted_peak(row) == pytest.approx(row.peak_bytes, rel=rel), row.name


def test_bucketed_gradients_and_gathered_parameters_are_freed_once_they_are_copied() -> None:
    rows = [row for row in run_predictions.study_rows() if row.name.startswith(("virtual_models ", "virtual_tuning "))]
    assert all(row.step_s is None for row in rows), "a time without a GPU"
    assert {row.request.strategy.zero_stage for row in rows} == {1, 2, 3}
    # The embedding table of these models is 0.25 to 1.2 GiB, which a second time would be 7 to 22 % of a peak. Partly
    # offloaded, its fp64 norm is 4 %.
    for row in rows:
        assert predicted_peak(row) == pytest.approx(row.peak_bytes, rel=0.01), row.name


def test_a_forward_pass_keeps_and_gathers_what_the_prediction_says() -> None:
    """Stage 3 saves no autocast copies of the weights of linear layers, whose function it replaces."""
    runs = [
        (run, request)
        for run, request in run_predictions.ended_runs()
        if (run.suite in ("virtual_tuning", "virtual_scaling") and run.strategy != "zero3_hpz")
        or (run.suite == "gpu" and run.virtual)
    ]
    assert sum(not request.box.is_cpu_only and request.strategy.zero_stage == 3 for _, request in runs) == 1
    assert {request.strategy.zero_stage for _, request in runs if request.autocast} >= {1, 2, 3}
    for run, request in runs:
        assert kept_for_backward(request) == pytest.approx(run.forward_holds_bytes, rel=0.015), run.run
        if request.strategy.zero_stage == 3 and run.engine_override == "[]":
            gathered = simulate_gathers(request).live_at_end * request.gathered_bytes
            assert gathered == pytest.approx(run.forward_gathers_bytes, rel=1e-6), run.run


def test_the_bytes_that_leave_a_machine_are_those_of_every_record() -> None:
    strategies = set()
    for run, request in run_predictions.ended_runs():
        across = run.across_machines_bytes_per_step
        if request.box.nodes == 1 or pd.isna(across):
            continue
        # A ring over all ranks leaves a machine once, and hsdp has one ring for each rank of a machine.
        rings = request.box.gpus_per_node if run.strategy == "hsdp" else 1
        # Small reductions, such as those of a norm, are not predicted.
        assert leaving_bytes(request) == pytest.approx(across * rings, rel=0.006), run.run
        strategies.add(run.strategy)
    assert {"ddp", "zero1", "zero2", "zero3", "zero3_hpz", "fsdp2", "hsdp"} <= strategies


def test_the_stated_error_of_host_memory_is_of_the_committed_runs() -> None:
    runs = run_predictions.host_memory_table()
    stated = yaml.safe_load(intervals.FILE.read_text())["host_error"]
    errors = (runs["predicted"] / runs["measured"] - 1).abs()
    assert stated == {
        "median": pytest.approx(errors.median(), abs=5e-4),
        "worst": pytest.approx(errors.max(), abs=5e-4),
        "rows": len(runs),
    }
    # With and without an optimizer on the host.
    assert {"single", "zero3_cpu_optimizer"} <= {*runs["strategy"]}


def test_the_committed_report_is_of_these_rows() -> None:
    """Predictions may have changed since; measurements and the choice of rows may not."""
    committed = pd.read_parquet(report.FOLDER / report.SCORES)
    frame = score_all()
    columns = ["source", "name", "refused", "use", "peak_gib", "step_s", "url"]
    pd.testing.assert_frame_equal(committed[columns], frame[columns], check_exact=False)
    # The committed league has other tools, which stay, next to `study predict`.
    league = pd.read_parquet(report.FOLDER / report.LEAGUE)
    others = league["tool"] != report.OURS
    new = report.league_frame(report.all_rows(), frame)
    pd.testing.assert_frame_equal(new[others], league[others])
    assert new[~others]["peaks"].tolist() == league[~others]["peaks"].tolist()
    drawing, rows = (
        report.errors_figure(frame),
        prediction_intervals.by_origin(frame)["published"][["peak_error", "step_error"]],
    )
    points = (line.get_ydata() for axes in drawing.figure.axes for line in axes.get_lines()[:-1])
    assert sum(pd.notna(ratios).sum() for ratios in points) == rows.count().sum() > 250
    assert drawing.alt in (report.FOLDER / "summary.md").read_text(encoding="utf-8")


def test_intervals_cover_the_stated_fraction() -> None:
    frame = score_all()
    rows = prediction_intervals.by_origin(frame)["published"]
    rows = rows[(rows["use"] == "score") & ~rows["offloads"]].dropna(subset=["step_s"])
    interval = yaml.safe_load(prediction_intervals.intervals_text(frame))["step_s"]
    is_covered = (rows["step_s"] / rows["predicted_step_s"]).between(interval["low"], interval["high"])
    assert interval["pages"] == prediction_intervals.page(rows).nunique() > 10
    assert is_covered.groupby(prediction_intervals.page(rows)).mean().mean() == pytest.approx(
        prediction_intervals.INTERVAL_COVERAGE, abs=0.05
    )


def test_a_prediction_of_nothing_is_an_error_and_no_part_of_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank on a GPU may send bytes without a predicted byte."""
    sent = [
        recorded_runs.FigureComparison("one_gpu", name, recorded_runs.SENT, 2000.0, predicted)
        for name, predicted in (("a", 0.0), ("b", 1600.0))
    ]
    monkeypatch.setattr(prediction_intervals, "compare_figures", lambda: iter(sent))
    frame = score_counted_steps()
    assert yaml.safe_load(prediction_intervals.intervals_text(frame))["sent"] == {"low": 1.25, "high": 1.25, "rows": 1}
    assert [row.error for row in sent] == [-1.0, pytest.approx(-0.2)]


def test_the_notebook_of_predictions_runs_with_one_source(tmp_path: Path) -> None:
    execute(NOTEBOOKS / "prediction.ipynb", tmp_path / "ran.ipynb", {"source": "qwen-7b"}, REPOSITORY, 120)
    text = (tmp_path / "ran.ipynb").read_text(encoding="utf-8")
    assert "qwen-7b 2xA100-80" in text
    assert "mpt-7b" not in text
    # The answer is that of the chosen rows.
    scores = pd.read_parquet(report.FOLDER / report.SCORES).query("source == 'qwen-7b'")
    median = scores["peak_error"].abs().median()
    cells = re.findall(r"<td>([^<]*)</td>", text)
    place = cells.index("peak memory, published")
    assert cells[place + 1 : place + 3] == [str(len(scores)), f"{median:.1%}"]


def test_intervals_cover_pages_that_did_not_make_them() -> None:
    table = coverage().set_index(["kind", "figure"])
    assert {*table.index.get_level_values("kind")} == {*get_args(intervals.Kind), "measured setup"}
    many = table[table["sources"] >= prediction_intervals.MIN_PAGES]
    assert len(many) == 6
    for figure, line in many.iterrows():
        within, below = (float(text.rstrip("%")) / 100 for text in line.iloc[-2:])
        # Wanted of a page that was never seen.
        assert 0.75 <= within <= 0.85, figure
        assert 0.87 <= below <= 0.95, figure
    # The bounds of few pages are wider, and their steps have none.
    few = table.drop(many.index)
    peaks, steps = (few.xs(figure, level="figure") for figure in ("peak memory", "step time"))
    assert {*peaks.index} == {"offload", "scale"}
    assert all(float(text.rstrip("%")) >= 87 for text in peaks.iloc[:, -1])
    assert {*steps.index} == {"adapters", "offload"}
    assert {*steps["measured / predicted"]} == {intervals.NOT_KNOWN}


def test_a_kind_of_few_pages_has_the_wider_of_the_general_interval_and_of_its_own_rows() -> None:
    table = yaml.safe_load(intervals.FILE.read_text(encoding="utf-8"))
    frame = pd.read_parquet(report.FOLDER / report.SCORES)
    general = table["above_state"]
    for kind in ("offload", "scale"):
        values, pages = prediction_intervals.published_ratios(frame, "above_state", (kind,))
        line = table[f"{kind}_above_state"]
        assert pages.nunique() == line["pages"] < prediction_intervals.MIN_PAGES
        assert line["low"] == pytest.approx(min(general["low"], values.min()), abs=5e-4)
        assert line["high"] == pytest.approx(max(general["high"], values.max()), abs=5e-4)
    assert table["offload_above_state"]["high"] > general["high"]
    assert {*table["too_few_pages"]} == {"adapters_step_s", "offload_step_s", "calibrated_offload_step_s"}


def test_the_committed_summary_is_that_of_the_committed_records() -> None:
    frame = pd.read_parquet(report.FOLDER / report.SCORES)
    text = report.summary(frame, report.FOLDER, *report.draw(frame).alts)
    assert (report.FOLDER / "summary.md").read_text(encoding="utf-8") == text, "run the report of predictions"
    assert len(text.encode()) <= 60_000


def test_the_worst_rows_have_causes() -> None:
    frame = pd.read_parquet(report.FOLDER / report.SCORES)
    for figure, use in zip(get_args(report.WorstFigure), ("use_memory", "use"), strict=True):
        table = report.worst_rows_table(frame, figure)
        assert len(table) == table["source"].nunique() == 5
        assert table["cause"].str.len().min() > 20
        rows = prediction_intervals.counted(frame)
        rows = rows[(rows["source"] != prediction_intervals.OWN) & (rows[use] == "score")]
        assert table["run"].iloc[0] == rows.loc[rows[f"{figure}_error"].abs().idxmax(), "name"]
    # No cause is left of a source that is no longer among the worst.
    causes = yaml.safe_load(CAUSES.read_text(encoding="utf-8"))
    for figure, by_source in causes.items():
        assert {*by_source} == {*report.worst_rows_table(frame, figure)["source"]}


def test_an_interval_contains_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    table = yaml.safe_load(intervals.FILE.read_text(encoding="utf-8"))
    figures = [name for name, row in table.items() if isinstance(row, dict) and "low" in row]
    assert len(figures) > 10
    # Measurements that are all above their predictions.
    table["high"] = {"low": 1.2, "high": 1.5}
    monkeypatch.setattr(intervals, "_INTERVALS", table)
    figures.append("high")
    for name in figures:
        estimate = intervals.estimate(name, 10.0, 4.0)
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low <= 10.0 <= estimate.high
        assert (estimate.low - 4) / 6 == pytest.approx(min(table[name]["low"], 1.0))
        assert (estimate.high - 4) / 6 == pytest.approx(max(table[name]["high"], 1.0))


def test_the_readme_has_the_fractions_of_peaks_below_their_bounds() -> None:
    table = coverage().set_index(["kind", "figure"]).iloc[:, -1]
    full, adapters = (table[kind, "peak memory"].rstrip("%") for kind in ("full", "adapters"))
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert f"above {full} % of the peaks of pages that it had not seen (adapters: {adapters} %)." in text


def test_similar_records_are_sought_among_all_that_ended() -> None:
    light, complete = list(recorded_runs.read_ended_runs()), run_predictions.ended_runs()
    assert len(light) > 600
    assert [(run.suite, request) for run, request in light] == [(run.suite, request) for run, request in complete]
    for (run, _), (row, _) in list(zip(light, complete, strict=True))[::60]:
        record = recorded_runs.read_whole_run(run)
        assert record.run == row.run
        figures = [list(recorded_runs.compare_run_figures(either)) for either in (record, row)]
        assert figures[0] == figures[1]


def test_similar_measurements_are_named_without_pandas() -> None:
    code = (
        "import sys; from study.cli import main;"
        " assert main(['advise', 'gpt2', '--hardware', '8xH100', '--json']) == 0; assert 'pandas' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    nearest = json.loads(done.stdout)["nearest"]
    assert sum(line.startswith("similar measurement: ") for line in nearest) == 3
    assert sum(line.startswith("similar record of this project, ") for line in nearest) == 3


def test_rows_and_records_to_compare_with_are_read_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    request = COUNTED[0].request
    assert published_rows()[0] is ROWS[0]
    lines = list(describe_nearest(request))
    monkeypatch.setattr("study.predictor.nearest.published_entries", None)
    monkeypatch.setattr(recorded_runs, "read_ended_runs", None)
    assert list(describe_nearest(request)) == lines
    assert len(lines) == 6


def test_a_record_without_a_step_time_is_named_without_one() -> None:
    request = next(
        request
        for run, request in recorded_runs.read_ended_runs()
        if run.suite == recorded_runs.GPU and recorded_runs.read_whole_run(run).step_time_s_median is None
    )
    (line,) = (line for line in describe_nearest(request) if line.startswith("similar record of this project, a GPU: "))
    assert "GiB, predicted" in line
    assert "nan" not in line
    assert "s per step" not in line
