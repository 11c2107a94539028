"""The measurements that advice quotes: nearest first, and with the prediction's own error there."""

from __future__ import annotations

import dataclasses

from study.predictor.validation.measured import impossible, predicted_step_s
from study.predictor.validation.nearest import distance, nearest, told
from study.predictor.validation.published import published_rows

ROWS = published_rows()


def test_a_row_is_nearest_to_itself_and_a_differing_one_further_away() -> None:
    row = next(each for each in ROWS if each.use == "score" and each.step_s and impossible(each) is None)
    assert distance(row.request, row.request) == 0
    assert distance(row.request, nearest(row.request, ROWS)[0].request) == 0
    twice = dataclasses.replace(row.request, micro_batch=2 * row.request.micro_batch)
    again = dataclasses.replace(twice, gradient_checkpointing=not twice.gradient_checkpointing)
    assert 0 < distance(row.request, twice) < distance(row.request, again)


def test_no_row_that_a_constant_was_fitted_on_or_that_cannot_be_true_is_quoted() -> None:
    quoted = nearest(ROWS[0].request, ROWS, count=len(ROWS))
    assert {row.use for row in quoted} == {"score"}
    assert not [row for row in quoted if impossible(row)]
    assert 10 < len(quoted) < len(ROWS)


def test_a_line_tells_the_measurement_the_prediction_and_where_it_is_from() -> None:
    row = nearest(ROWS[-1].request, ROWS)[0]
    line = next(told(ROWS[-1].request))
    assert row.name in line
    assert row.url in line
    if row.step_s is not None:
        assert f"{predicted_step_s(row) / row.step_s - 1:+.0%}" in line
