"""The built-in corpora, their floors, and the samples of each step."""

from __future__ import annotations

import hashlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from study.config.errors import UserError
from study.config.flags import RunConfig, resolve_config
from study.config.places import REPOSITORY
from study.records.frames import read_parquet
from study.workloads import builtin
from study.workloads.tasks import Split, TaskData, epoch_order, load_data, sample_hashes, step_samples


def laptop(task: str, **options: object) -> RunConfig:
    return resolve_config(RunConfig.from_dict({"task": task, "scale": "laptop", **options}, "this test"), False)


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> TaskData:
    return load_data(laptop("gpt-wikitext"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> TaskData:
    return load_data(laptop("bert-imdb"), tmp_path_factory.mktemp("cache"))


def test_the_entropy_rate_is_the_loss_of_the_true_chain_on_a_long_walk() -> None:
    index = {word: number for number, word in enumerate(builtin.lexicon())}
    walk = np.array([index[word] for row in builtin.language_rows("eval") for word in row.split()])
    chain = builtin.language_chain()
    costs = chain.surprisal_nats[walk[:-1], walk[1:]]
    assert np.isfinite(costs).all(), "the walk took a step the chain does not allow"
    # Costs are autocorrelated: their means over 64 parts are nearly independent.
    means = costs[: len(costs) // 64 * 64].reshape(64, -1).mean(axis=1)
    assert costs.mean() == pytest.approx(chain.entropy_rate, abs=5 * float(means.std(ddof=1)) / 8)


def test_the_packed_blocks_are_the_stream_of_words(language: TaskData) -> None:
    ids = language.train.tensors["input_ids"]
    words = [word for row in itertools.islice(builtin.language_rows("train"), 1600) for word in row.split()]
    assert ids.shape == (1600, 64)
    assert [builtin.lexicon()[token - len(builtin.SPECIAL_TOKENS)] for token in ids.flatten().tolist()] == words
    assert torch.equal(ids, language.train.tensors["labels"])


def test_the_oracle_scores_exactly_the_blocks_that_a_model_is_scored_on(language: TaskData) -> None:
    chain = builtin.language_chain()
    blocks = (language.eval.tensors["input_ids"] - len(builtin.SPECIAL_TOKENS)).tolist()
    costs = [-math.log(chain.transition[a, b]) for block in blocks for a, b in itertools.pairwise(block)]
    assert language.floor is not None
    assert len(costs) == 200 * 63
    assert language.floor.oracle_eval_loss == pytest.approx(sum(costs) / len(costs))


def test_bayes_scores_agree_with_brute_force_over_every_possible_review(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "SHORTEST_REVIEW_WORDS", 2)
    monkeypatch.setattr(builtin, "LONGEST_REVIEW_WORDS", 6)
    fraction, agreement = builtin.SENTIMENT_SHARE, builtin.AGREEMENT
    loss = accuracy = 0.0
    for length in range(2, 7):
        visible = min(length, 5)  # --seq_length 7 leaves five words between [CLS] and [SEP]
        for words in itertools.product((1, 0, -1), repeat=visible):
            likelihood = {1: fraction * agreement, 0: 1 - fraction, -1: fraction * (1 - agreement)}
            if_true = math.prod(likelihood[word] for word in words)
            if_false = math.prod(likelihood[-word] for word in words)
            posterior = if_true / (if_true + if_false)
            loss += if_true / 5 * -math.log(posterior)
            tie = math.isclose(posterior, 0.5)
            accuracy += if_true / 5 * (0.5 if tie else float(posterior > 0.5))
    assert builtin.expected_review_scores(7) == pytest.approx((loss, accuracy))


def test_bayes_scores_agree_with_the_scores_of_all_reviews(tmp_path: Path) -> None:
    # Some reviews are longer, and are cut.
    seq_length = 64
    data = load_data(laptop("bert-imdb", seq_length=seq_length, eval_samples=0, train_samples=16), tmp_path)
    ids, labels = (data.eval.tensors[name].numpy() for name in ("input_ids", "labels"))
    margins = builtin.review_margins(ids, labels)
    loss, accuracy = builtin.expected_review_scores(seq_length)
    figures = [builtin.margin_losses(margins), builtin.margin_accuracies(margins), labels.astype(float)]
    for expected, observed in zip((loss, accuracy, 0.5), figures, strict=True):
        assert observed.mean() == pytest.approx(expected, abs=5 * observed.std() / math.sqrt(len(observed)))


def test_reviews_are_framed_padded_and_cut_as_bert_wants_them(reviews: TaskData) -> None:
    tokens, mask = (reviews.train.tensors[name] for name in ("input_ids", "attention_mask"))
    padding, start, end = (builtin.SPECIAL_TOKENS.index(name) for name in ("[PAD]", "[CLS]", "[SEP]"))
    texts, labels = builtin.reviews("train", 1600)
    assert tokens.shape == mask.shape == (1600, 64)
    assert reviews.train.tensors["labels"].tolist() == labels
    assert (tokens[:, 0] == start).all()
    assert torch.equal(mask.bool(), tokens != padding)
    assert [int(row.sum()) for row in mask] == [min(len(text.split()) + 2, 64) for text in texts]
    assert ((tokens == end).sum(dim=1) == 1).all()


def test_the_corpora_are_the_same_on_every_box_and_for_every_seed(language: TaskData, tmp_path: Path) -> None:
    texts, labels = builtin.reviews("eval", 100)
    rows = list(itertools.islice(builtin.language_rows("eval"), 100))
    assert hashlib.sha256("\n".join([*texts, *rows, repr(labels)]).encode()).hexdigest()[:16] == "1c41d57adb616c2a"
    few, many = builtin.reviews("train", 10), builtin.reviews("train", 500)
    assert (few[0], few[1]) == (many[0][:10], many[1][:10])
    other_seed = load_data(laptop("gpt-wikitext", seed=7), tmp_path)
    assert other_seed.source["tokens_sha256"] == language.source["tokens_sha256"]


def test_no_training_sample_comes_back_in_the_evaluation(reviews: TaskData, language: TaskData) -> None:
    for data in (reviews, language):
        rows = [{tuple(row) for row in split.tensors["input_ids"].tolist()} for split in (data.train, data.eval)]
        assert not rows[0] & rows[1]


def test_a_request_for_more_samples_than_exist_names_their_number(tmp_path: Path) -> None:
    for task, most in (("bert-imdb", 20000), ("gpt-wikitext", 16384)):
        with pytest.raises(UserError, match=rf"--train_samples.*{most}"):
            load_data(laptop(task, train_samples=most + 1), tmp_path)


def test_no_run_of_the_laptop_study_beats_the_floor() -> None:
    """An honest model's evaluation loss falls below the bound with probability 1e-9 at most.

    Let P be the process and Q a model that has not seen the evaluation targets, and x the n targets given their
    prefixes. Then E_P[prod Q(x)/P(x)] = sum over x of prod Q(x) <= 1, so by Markov's inequality the product exceeds
    1e9 with probability 1e-9 at most; taking logs, n (oracle loss - model loss) <= log(1e9) otherwise.
    """
    runs = read_parquet(REPOSITORY / "reports" / "laptop").runs
    for task, predictions in (("gpt-wikitext", 63), ("bert-imdb", 1)):
        judged_runs = runs[runs["task"].eq(task) & runs["status_state"].eq("ok")]
        assert len(judged_runs) >= 20
        slack = math.log(1e9) / (judged_runs["eval_samples"] * predictions)
        assert (judged_runs["eval_loss_final"] >= judged_runs["floor_eval_loss"] - slack).all()
    # Accuracy has no such bound: by chance a classifier may beat the best one, by this many standard errors.
    error = (judged_runs["floor_accuracy"] * (1 - judged_runs["floor_accuracy"]) / judged_runs["eval_samples"]) ** 0.5
    assert (judged_runs["eval_accuracy"] < judged_runs["floor_accuracy"] + 5 * error).all()


@pytest.mark.parametrize("step", [0, 3, 4, 41])
def test_every_world_size_and_accumulation_takes_the_same_samples(step: int) -> None:
    splits = Split({"input_ids": torch.arange(70 * 4).reshape(70, 4)})
    results = set()
    for world_size, micro in itertools.product((1, 2, 4), (1, 2, 4)):
        config = laptop("gpt-wikitext", global_batch_size=16, per_device_train_batch_size=micro)
        plan, samples = config.batch_plan(world_size), step_samples(config, len(splits), step)
        parts = [part for rank in range(world_size) for part in plan.micro_batches(samples, rank)]
        proof = sum(sum(sample_hashes(splits.__getitems__(part))) for part in parts) % 2**64
        results.add((proof, tuple(sorted(itertools.chain.from_iterable(parts)))))
    ((_, samples_of_step),) = results
    assert len(set(samples_of_step)) == 16


def test_an_epoch_uses_no_sample_twice_and_drops_the_incomplete_batch() -> None:
    config = laptop("gpt-wikitext", global_batch_size=16)
    epochs = [[index for step in range(4) for index in step_samples(config, 70, 4 * epoch + step)] for epoch in (0, 1)]
    assert [len(set(epoch)) for epoch in epochs] == [64, 64]
    assert epochs[0] == epoch_order(70, config.seed, 0)[:64].tolist()
    assert epochs[0] != epochs[1]
    assert step_samples(laptop("gpt-wikitext", seed=43), 70, 0) != step_samples(config, 70, 0)


def test_a_sample_hash_sees_every_tensor_and_nothing_but_its_own_row(reviews: TaskData) -> None:
    batch = reviews.train.__getitems__([5, 6, 7])
    hashes = sample_hashes(batch)
    assert len(set(hashes)) == 3
    assert all(0 <= value < 2**64 for value in hashes)
    assert sample_hashes(reviews.train.__getitems__([7, 5])) == [hashes[2], hashes[0]]
    for name in batch:
        changed = {key: tensor.clone() for key, tensor in batch.items()}
        changed[name][1].view(-1)[-1] += 1
        assert [a == b for a, b in zip(sample_hashes(changed), hashes, strict=True)] == [True, False, True]
