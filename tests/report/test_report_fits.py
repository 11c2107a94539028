from __future__ import annotations

import json
from collections import Counter

import pytest
import yaml

from report_folders import drawn
from study.config.places import REPOSITORY
from study.records.frames import Records, probe_runs, read_parquet, read_runs, real_runs, write_parquet
from study.report.questions import TABLES, answers
from study.report.questions.fits import answer, fits_table, probes_table
from synthetic_records import answered, write_run

LADDER = [8, 16, 32, 64, 128]
TOO_LARGE = "CUDA out of memory (tried to allocate 2.00 GiB)"
SEARCHES = yaml.safe_load((REPOSITORY / "tests" / "data" / "searches.yaml").read_text())
PROBES = [(strategy, cap, *probe) for strategy, cap, ends, *_ in SEARCHES for probe in ends.items()]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    root = tmp_path_factory.mktemp("searches")
    for strategy, cap, size, state in PROBES:
        config = {
            "device_memory_cap_gib": cap,
            "per_device_train_batch_size": size,
            "global_batch_size": size,
            "train_samples": 512,
            "max_steps": 3,
        }
        reason = {"oom": TOO_LARGE, "failed": "lost", "timeout": "slow"}.get(state, "")
        run = write_run(root, strategy, ranks=1, steps=3, state=state, reason=reason, config=config)
        search = {"id": f"{strategy}-{cap}-r1", "axis": "largest_micro_batch", "place": LADDER.index(size), "last": 4}
        note = {"strategy": "single", "world_size": 1, "command": [], "searches": [search], "probe": True}
        (run / "sweep.json").write_text(json.dumps(note))
    write_run(root, "single", ranks=1)
    write_parquet(read_runs(root), root / "kept")
    return read_parquet(root / "kept")


def test_the_outcomes_of_its_probes_answer_each_search(records):
    table = fits_table(records)
    limits = [None if limit == "the whole device" else 16.0 for limit in table["Memory limit"]]
    rows = zip(table["Strategy"], limits, table["Largest that fits"], table["Why not more"], strict=True)
    assert sorted(rows, key=str) == sorted(((*search[:2], *search[3:]) for search in SEARCHES), key=str)
    # A ratio needs two final answers.
    ratios = table.set_index(["Strategy", "Memory limit"])["x plain"].dropna()
    assert ratios.to_dict() == {("single", "16 GiB"): 1, ("zero2_cpu", "16 GiB"): 0, ("zero3", "16 GiB"): 2}
    fit_answer = answered(answer(records))
    (headline,) = fit_answer.headlines
    assert (headline.value, headline.strategy, headline.bounds) == ("2.0 x", "zero3", "32 within 16 GiB")
    answers_by_limit = fit_answer.table.set_index("Strategy")[["16 GiB", "the whole device"]]
    assert answers_by_limit.loc["single"].tolist() == ["16", "at least 8"]
    assert answers_by_limit.loc["zero3"].tolist() == ["32", "-"]
    (drawing,) = drawn("what_fits", records)
    for words in ("single within 16 GiB 16", "zero3_cpu within 16 GiB at least 128", "zero2_cpu within 16 GiB none"):
        assert words in drawing.alt
    labels = [text.get_text() for axes in drawing.figure.axes for text in axes.texts]
    assert sorted(labels) == sorted(["16", "32", "≥ 128", "none", "≥ 8", "≥ 8"])


def test_every_probe_is_a_row_and_not_a_workload_of_trained_models(records):
    table = probes_table(records)
    assert table["Outcome"].value_counts().to_dict() == Counter(state for *_, state in PROBES)
    assert set(table.loc[table["Outcome"] == "oom", "Why"]) == {TOO_LARGE}
    assert (len(real_runs(records).runs), len(probe_runs(records).runs)) == (1, len(PROBES))
    assert [len(TABLES[name](records)) for name in ("summary", "loss", "memory", "runtime")] == [1, 1, 1, 1]
    # Probes do not make the names of other workloads longer.
    assert real_runs(records).runs["workload"].unique().tolist() == ["gpt-tiny, built-in text"]
    assert "fits" in {question.name for question in answers(records)}
