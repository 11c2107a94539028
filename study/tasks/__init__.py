"""What is trained on which data: from a resolved RunConfig to tokenized tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.spec.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from study.tasks.blocks import Split, TaskData


def load_data(config: RunConfig, cache_dir: Path) -> TaskData:
    """The run's training and evaluation samples. Converted files are kept under `cache_dir`."""
    from study.tasks import bert_imdb, gpt_wikitext

    task = {"bert-imdb": bert_imdb, "gpt-wikitext": gpt_wikitext}[config.task]
    return task.load_data(config, cache_dir)


def uses_builtin_tokenizer(config: RunConfig) -> bool:
    """Only with random weights: published ones know no vocabulary but their own."""
    return config.data == "builtin" and config.weights == "random" and config.tokenizer_name is None


def load_task_tokenizer(config: RunConfig, frame: bool) -> PreTrainedTokenizerBase:
    """That of the built-in corpora, with [CLS] and [SEP] if `frame`, or the model's own."""
    if uses_builtin_tokenizer(config):
        from study.tasks.builtin import builtin_tokenizer

        return builtin_tokenizer(frame)
    from study.models.tokenizer import load_tokenizer

    return load_tokenizer(config)


def describe(train: Split, evaluation: Split, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """For the record: two runs for which all this is equal trained on the same tokens."""
    return {
        "samples": {"train": len(train), "eval": len(evaluation)},
        "tokens_sha256": {"train": train.sha256(), "eval": evaluation.sha256()},
        "tokenizer": {
            "name": tokenizer.name_or_path or "builtin",
            "class": type(tokenizer).__name__,
            "entries": len(tokenizer),
        },
    }
