"""Built-in corpora, generated from a seed without a network, and the best possible score on each.

Language (replaces Wikitext): a walk of an order-1 Markov chain over artificial words. The lowest possible loss is the
chain's entropy rate.
Reviews (replace IMDB): each sentiment word agrees with the label with probability `AGREEMENT`. The optimal classifier
is Bayes' rule on their count.

The seed is constant and independent of the run's: otherwise the variance over seeds would include the corpus.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from study.workloads.presets import BUILTIN_VOCABULARY_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SplitName = Literal["train", "eval"]

CORPUS_SEED = 20191004
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = BUILTIN_VOCABULARY_SIZE - len(SPECIAL_TOKENS)

SUCCESSORS_PER_WORD = 8
WORDS_PER_ROW = 64
LANGUAGE_ROWS = {"train": 16384, "eval": 2048}

REVIEWS = {"train": 20000, "eval": 5000}
SHORTEST_REVIEW_WORDS, LONGEST_REVIEW_WORDS = 32, 80
SENTIMENT_SHARE = 0.25
AGREEMENT = 0.7
WORDS_PER_SENTIMENT = 24

# One independent random stream per purpose, so that a change of one does not affect the others.
_STREAMS = {"lexicon": 0, "chain": 1, "language-train": 2, "language-eval": 3, "reviews-train": 4, "reviews-eval": 5}


@dataclasses.dataclass(frozen=True)
class LossFloor:
    """Best possible scores: `expected` over the distribution, `oracle` on these evaluation samples."""

    expected_loss: float
    oracle_eval_loss: float
    expected_accuracy: float | None = None
    oracle_eval_accuracy: float | None = None


def _stream(purpose: str) -> np.random.Generator:
    return np.random.default_rng([CORPUS_SEED, _STREAMS[purpose]])


@functools.cache
def lexicon() -> tuple[str, ...]:
    """Return words of two syllables; the first are praise, the next blame, the others neutral."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    picks = _stream("lexicon").permutation(len(syllables) ** 2)[:WORDS]
    return tuple(syllables[pick // len(syllables)] + syllables[pick % len(syllables)] for pick in picks)


def builtin_tokenizer(frame: bool = True, words: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """Build a tokenizer of one token per word of the lexicon or of `words`. `frame` adds [CLS] and [SEP], like BERT."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *(words or lexicon())))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if frame:
        framing = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=framing)
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@dataclasses.dataclass(frozen=True)
class MarkovChain:
    """Markov chain: the possible successors of each word, and their probabilities."""

    successors: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]

    @functools.cached_property
    def transition(self) -> npt.NDArray[np.float64]:
        """P(next | previous) as a matrix; a successor listed twice gets both probabilities."""
        matrix = np.zeros((len(self.successors), len(self.successors)))
        np.add.at(matrix, (np.arange(len(matrix))[:, None], self.successors), self.probabilities)
        return matrix

    @functools.cached_property
    def stationary(self) -> npt.NDArray[np.float64]:
        """Stationary distribution p over words: p = p @ transition, with sum 1."""
        size = len(self.transition)
        equations = self.transition.T - np.eye(size)
        equations[-1] = 1.0
        return np.linalg.solve(equations, np.eye(size)[-1])

    @functools.cached_property
    def surprisal_nats(self) -> npt.NDArray[np.float64]:
        """-log P(next | previous) in nats; infinite if P is 0."""
        with np.errstate(divide="ignore"):
            return -np.log(self.transition)

    @property
    def entropy_rate(self) -> float:
        """Entropy rate of the chain in nats per word."""
        finite = np.where(self.transition > 0, self.surprisal_nats, 0)
        return float(self.stationary @ (self.transition * finite).sum(axis=1))


@functools.cache
def language_chain() -> MarkovChain:
    generator = _stream("chain")
    # Permutations, so that every word has equally many predecessors and none is a dead end.
    successors = np.stack([generator.permutation(WORDS) for _ in range(SUCCESSORS_PER_WORD)], axis=1)
    return MarkovChain(successors, generator.dirichlet(np.ones(SUCCESSORS_PER_WORD), size=WORDS))


def language_rows(split: SplitName) -> Iterator[str]:
    """Generate the corpus row by row: one walk, cut into lines."""
    chain, words = language_chain(), lexicon()
    successors = chain.successors.tolist()
    thresholds = np.cumsum(chain.probabilities, axis=1)
    thresholds[:, -1] = 1.0  # Rounding must not leave a draw without a successor.
    bounds = thresholds.tolist()
    generator = _stream(f"language-{split}")
    word = int(generator.choice(WORDS, p=chain.stationary))
    for _ in range(LANGUAGE_ROWS[split]):
        row = []
        for draw in generator.random(WORDS_PER_ROW).tolist():
            row.append(words[word])
            word = successors[word][bisect.bisect_right(bounds[word], draw)]
        yield " ".join(row) + "\n"


def language_floor(eval_blocks: npt.NDArray[np.int64]) -> LossFloor:
    """Return the best scores on evaluation blocks: every position but the first is scored given the previous word."""
    chain = language_chain()
    words = eval_blocks - len(SPECIAL_TOKENS)
    realized = float(chain.surprisal_nats[words[:, :-1], words[:, 1:]].mean())
    return LossFloor(expected_loss=chain.entropy_rate, oracle_eval_loss=realized)


def reviews(split: SplitName, count: int) -> tuple[list[str], list[int]]:
    """Generate the first `count` reviews and their labels; a larger count does not change the first ones."""
    assert count <= REVIEWS[split]
    words = np.array(lexicon())
    draws = _stream(f"reviews-{split}").random((count, 2 + 3 * LONGEST_REVIEW_WORDS))
    labels = (draws[:, 0] < 0.5).astype(np.int64)
    span = LONGEST_REVIEW_WORDS - SHORTEST_REVIEW_WORDS + 1
    lengths = SHORTEST_REVIEW_WORDS + (draws[:, 1] * span).astype(np.int64)
    carries, agrees, which = np.split(draws[:, 2:], 3, axis=1)
    praise = (agrees < AGREEMENT) == (labels[:, None] == 1)
    polar = (which * WORDS_PER_SENTIMENT).astype(np.int64) + np.where(praise, 0, WORDS_PER_SENTIMENT)
    neutral = 2 * WORDS_PER_SENTIMENT + (which * (WORDS - 2 * WORDS_PER_SENTIMENT)).astype(np.int64)
    written = words[np.where(carries < SENTIMENT_SHARE, polar, neutral)].tolist()
    texts = [" ".join(row[:length]) for row, length in zip(written, lengths.tolist(), strict=True)]
    return texts, labels.tolist()


def margin_losses(margins: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the Bayes loss for `margins` (agreeing minus disagreeing words), each worth log q/(1-q)."""
    return np.logaddexp(0.0, -margins * math.log(AGREEMENT / (1 - AGREEMENT)))


def margin_accuracies(margins: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the Bayes accuracy for margins; a tie is a coin toss."""
    return np.where(margins > 0, 1.0, np.where(margins == 0, 0.5, 0.0))


def expected_review_scores(seq_length: int) -> tuple[float, float]:
    """Return the expected Bayes loss and accuracy on reviews truncated to seq_length - 2 words ([CLS] and [SEP]).

    The margin of a review is a sum of independent words (+1 agrees, -1 disagrees, 0 neutral), so its distribution
    grows by one convolution per word; the sum over lengths and margins is exact.
    """
    word = np.array([SENTIMENT_SHARE * (1 - AGREEMENT), 1 - SENTIMENT_SHARE, SENTIMENT_SHARE * AGREEMENT])
    lengths = range(SHORTEST_REVIEW_WORDS, LONGEST_REVIEW_WORDS + 1)
    kept_lengths = [min(length, max(seq_length - 2, 0)) for length in lengths]
    distribution, loss, accuracy = np.ones(1), 0.0, 0.0
    for words in range(max(kept_lengths) + 1):
        margins = np.arange(-words, words + 1)
        fraction = kept_lengths.count(words) / len(kept_lengths)
        loss += fraction * float(distribution @ margin_losses(margins))
        accuracy += fraction * float(distribution @ margin_accuracies(margins))
        distribution = np.convolve(distribution, word)
    return loss, accuracy


def review_margins(input_ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Count words that agree with the label minus words that disagree, after truncation."""
    words = input_ids - len(SPECIAL_TOKENS)
    praise = ((words >= 0) & (words < WORDS_PER_SENTIMENT)).sum(axis=1)
    blame = ((words >= WORDS_PER_SENTIMENT) & (words < 2 * WORDS_PER_SENTIMENT)).sum(axis=1)
    return np.where(labels == 1, praise - blame, blame - praise)


def review_floor(eval_input_ids: npt.NDArray[np.int64], eval_labels: npt.NDArray[np.int64]) -> LossFloor:
    expected_loss, expected_accuracy = expected_review_scores(eval_input_ids.shape[1])
    margins = review_margins(eval_input_ids, eval_labels)
    return LossFloor(
        expected_loss=expected_loss,
        oracle_eval_loss=float(margin_losses(margins).mean()),
        expected_accuracy=expected_accuracy,
        oracle_eval_accuracy=float(margin_accuracies(margins).mean()),
    )
