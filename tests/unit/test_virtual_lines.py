"""Extrapolation over layers: its results, the figures that it must leave out, and how both are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from study.records.directory import read_run
from study.records.models import SummaryRecord
from study.records.schema import PEAKS, STATE_PLACES
from study.records.virtual_summary import Summary, summarize_record, with_total
from study.virtual.command import describe, table
from study.virtual.extrapolation import STEP_TIMES, extrapolate
from synthetic_records import required_keys, write_run

AROUND, PER_LAYER, RANKS = 100, 10, 4
# Larger than every model below, unless a test sets another value.
LARGE = {
    "reduce_bucket_size": 10**9,
    "max_live_parameters": 10**9,
    "max_reuse_distance": 10**9,
    "prefetch_bucket_size": 10**9,
    "sub_group_size": 10**9,
}


def peaks(host: float | None) -> dict[str, float | None]:
    return {"allocated": None, "reserved": None, "device": None, "host": host}


def at_depth(layers: int, strategy: str = "zero3", **changed: Any) -> Summary:
    """Return a summary in which every figure is linear in the layers."""
    elements = AROUND + PER_LAYER * layers
    collectives = {
        "all_gather": {"calls": 5 * layers, "payload_bytes": 2 * elements, "wire_bytes_per_rank": 1.5 * elements},
        "reduce_scatter": {"calls": layers, "payload_bytes": 2 * elements, "wire_bytes_per_rank": 1.5 * elements},
    }
    nothing = dict.fromkeys(STATE_PLACES, 0)
    fields: dict[str, Any] = {
        "strategy": strategy,
        "world_size": RANKS,
        "rank": 0,
        "task": "gpt-wikitext",
        "model_name_or_path": f"gpt-tiny-{layers}layers",
        "model_layers": layers,
        "model_parameters": elements,
        "precision": "bf16-engine",
        "seq_length": 16,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "emulated_device_memory_gib": None,
        "state_bytes_per_rank": {
            "params": nothing | {"device": 2 * elements},
            "grads": nothing,
            "optimizer": nothing | {"host": elements},
        },
        "comm_bytes_per_step": 4 * elements,
        "comm_calls_per_step": 6 * layers,
        "sent_bytes_per_step": 3.0 * elements,
        "collectives": collectives,
        "buffer_bytes": {"bucket.device": 7},
        "grads_in_bucket_bytes": None,
        "forward_gathers_bytes": 2 * elements,
        "forward_holds_bytes": 3 * layers,
        "group_ranks": 4,
        "kept_whole_bytes": None,
        "grads_by_moment": {},
        "memory_gib_by_phase": {"init": peaks(1.0 * layers), "steady": peaks(0.5 * layers)},
        "buckets": LARGE,
        "run_dir": f"runs/{layers}",
        "extrapolated": None,
        **dict.fromkeys((*PEAKS, *STEP_TIMES)),
        "host_peak_rss_gib": 1.0 * layers,
    }
    return with_total(fields | changed)


def line(*summaries: Summary, layers: int = 40) -> Summary:
    return extrapolate(summaries, f"gpt-tiny-{layers}layers", layers)


def line_at(strategy: str = "zero3", layers: int = 40, **buckets: int) -> Summary:
    return line(*(at_depth(depth, strategy, buckets=LARGE | buckets) for depth in (2, 3, 4)), layers=layers)


def test_an_extrapolation_equals_the_figures_of_the_model_itself() -> None:
    full, result = at_depth(40), line_at()
    assert (result["extrapolated"]["crossed"], result["extrapolated"]["not_linear"]) == ([], [])
    assert result | {"run_dir": full["run_dir"], "extrapolated": None} == full


@pytest.mark.parametrize("name", ["max_live_parameters", "max_reuse_distance"])
def test_if_stage_3_begins_to_release_between_depths_and_model_there_is_no_traffic(name: str) -> None:
    result = line_at("zero3", 40, **{name: 300})
    assert result["extrapolated"]["crossed"] == [name]
    assert set(result["extrapolated"]["residual"].values()) == {0.0}
    assert set(result["collectives"]["all_gather"].values()) == {None}
    for figure in ("comm_bytes_per_step", "comm_calls_per_step", "sent_bytes_per_step", "host_peak_rss_gib"):
        assert result[figure] is None
        assert figure in result["extrapolated"]["not_linear"]
    # Neither reduced gradients nor model state depends on it.
    full = at_depth(40)
    assert result["collectives"]["reduce_scatter"] == full["collectives"]["reduce_scatter"]
    assert result["state_bytes_total"] == full["state_bytes_total"]


def test_depths_that_are_all_beyond_a_threshold_are_extrapolated() -> None:
    beyond = line_at(max_live_parameters=300)["extrapolated"]["depths_beyond"]["max_live_parameters"]
    assert AROUND + PER_LAYER * beyond > 1.25 * 300
    # The smallest depths beyond the threshold are used, since each costs memory.
    assert AROUND + PER_LAYER * (beyond - 1) <= 1.25 * 300
    deeper = line(*(at_depth(beyond + more, buckets=LARGE | {"max_live_parameters": 300}) for more in range(3)))
    assert deeper["extrapolated"]["crossed"] == []
    assert deeper["comm_bytes_per_step"] == at_depth(40)["comm_bytes_per_step"]


@pytest.mark.parametrize(
    ("strategy", "buckets", "crossed", "beyond"),
    [
        # The model of 40 layers has 500 parameters. Between two uses of one there are at most both passes, and of an
        # embedding that is the head too only the 400 of the layers; tensor parallelism divides them by four.
        ("zero3", {"max_live_parameters": 700}, [], {}),
        ("zero3", {"max_reuse_distance": 700}, ["max_reuse_distance"], {"max_reuse_distance": 88}),
        ("zero3", {"max_live_parameters": 110}, [], {}),
        ("zero3", {"max_reuse_distance": 110}, ["max_reuse_distance"], {"max_reuse_distance": 14}),
        ("ulysses_zero3", {"max_live_parameters": 300}, ["max_live_parameters"], {"max_live_parameters": 28}),
        ("zero3_tp", {"max_live_parameters": 110}, ["max_live_parameters"], {"max_live_parameters": 46}),
        ("zero3", {"max_reuse_distance": 1000}, [], {}),
        # A sub-group is compared with the shard of one rank.
        ("zero3", {"sub_group_size": 120}, ["sub_group_size"], {"sub_group_size": 51}),
        ("zero3", {"sub_group_size": 130}, [], {}),
        ("zero2", {"reduce_bucket_size": 300}, ["reduce_bucket_size"], {"reduce_bucket_size": 28}),
        *(
            (name, {"max_live_parameters": 300, "max_reuse_distance": 300, "sub_group_size": 120}, [], {})
            for name in ("ddp", "zero0", "zero1", "zero2_cpu", "fsdp2")
        ),
    ],
)
def test_a_threshold_between_depths_and_model_is_crossed_under_its_strategies(strategy, buckets, crossed, beyond):
    result = line_at(strategy, **buckets)
    assert (result["extrapolated"]["crossed"], result["extrapolated"]["depths_beyond"]) == (crossed, beyond)
    assert strategy != "zero2" or result["host_peak_rss_gib"] is None


def test_a_state_with_a_nonlinear_part_has_no_sum_and_shows_none() -> None:
    state = at_depth(4)["state_bytes_per_rank"]
    bent = dict(state) | {"params": dict(state["params"]) | {"device": 2 * 2 * (AROUND + PER_LAYER * 4)}}
    result = line(at_depth(2), at_depth(3), at_depth(4, state_bytes_per_rank=bent))
    assert (result["state_bytes_per_rank"]["params"]["device"], result["state_bytes_total"]) == (None, None)
    # The residual of a figure that is not shown does not count.
    assert result["extrapolated"]["largest_residual_of_state"] < 1e-9
    assert {"  model state  ?", "    params     ? on device", "    grads      0"} <= {*describe(result)}
    assert table([result]).rows[0][:5] == ["zero3", "bf16-engine", "?", "0 B", "500 B"]


def test_the_residual_of_the_third_depth_grows_on_the_way_to_the_model() -> None:
    """A residual of 0.5 % at 4 layers becomes 0.6 of 20 GiB at 40."""

    def bent(host: float, layers: int = 40) -> Summary:
        deviating = at_depth(4, memory_gib_by_phase={"init": peaks(4.0), "steady": peaks(host)})
        return line(at_depth(2), at_depth(3), deviating, layers=layers)

    key, shallow, deep = "phase.steady.host", bent(2.01, 5)["extrapolated"], bent(2.01)["extrapolated"]
    assert shallow["residual"][key] == deep["residual"][key] == pytest.approx(0.01 / 2.01)
    assert deep["residual_at_target"][key] == pytest.approx(0.01 * 38 / 2 / 20)
    assert shallow["largest_residual_at_target"] == pytest.approx(0.01 * 3 / 2 / 2.5)
    assert shallow["furthest_figure"] == key
    worse = bent(2.03)
    assert worse["extrapolated"]["residual"][key] < 0.02 < worse["extrapolated"]["residual_at_target"][key]
    assert worse["memory_gib_by_phase"] == {"init": peaks(40.0), "steady": peaks(None)}
    assert worse["host_peak_rss_gib"] is None


def test_an_extrapolated_document_has_the_keys_of_a_measured_one(tmp_path: Path) -> None:
    engine = {
        "virtual_rank": 0,
        "model_parameters": 2_500_000,
        "model_layers": 2,
        "preset_layers": 2,
        "emulated_device_memory_gib": None,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
    }
    config = {"global_batch_size": 64}
    run = read_run(write_run(tmp_path, "zero3", virtual=True, ranks=64, gpu=False, config=config, engine=engine))
    run.memory["ranks"][1:] = []
    measured = summarize_record(run)
    assert set(required_keys(SummaryRecord)) <= set(measured)
    result = line(*(measured | {"model_layers": layers} for layers in (2, 3, 4)))
    assert set(result) == set(measured)
    assert measured["sent_bytes_per_step"] == run.traffic["collectives"]["all_reduce"]["wire_bytes_per_rank"]
    assert (measured["seq_length"], measured["per_device_train_batch_size"]) == (64, 1)


@pytest.mark.parametrize(
    ("after_backward", "expected"),
    # One unpartitioned gradient is larger than the shards of three shallow models, but not than those of forty layers.
    # The part that is reduced after backward varies, which matters only if it is the larger one.
    [((100, 100, 100), 400), ((0, 0, 17), 400), ((0, 0, 45), None)],
)
def test_gradients_are_the_larger_of_two_readings_also_if_the_other_is_in_the_full_model(after_backward, expected):
    nothing, depths = dict.fromkeys(STATE_PLACES, 0), []
    for layers, after, before in zip((2, 3, 4), after_backward, (20, 30, 40), strict=True):
        state = at_depth(layers)["state_bytes_per_rank"] | {"grads": nothing | {"device": max(after, before)}}
        sizes = {"grads_after_backward": after, "grads_before_step": before}
        readings = {name: nothing | {"device": size} for name, size in sizes.items()}
        depths.append(at_depth(layers, state_bytes_per_rank=state, grads_by_moment=readings))
    result = line(*depths)
    assert result["state_bytes_per_rank"]["grads"]["device"] == expected
    assert ("state.grads.device" in result["extrapolated"]["not_linear"]) == (expected is None)
