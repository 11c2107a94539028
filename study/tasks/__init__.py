"""What is trained on which data: from a resolved RunConfig to tokenized tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.spec.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from study.tasks.blocks import Split, TaskData


def load_data(config: RunConfig, cache_dir: Path) -> TaskData:
    """The run's training and evaluation samples; what is converted on the way is kept under `cache_dir`."""
    from study.tasks import bert_imdb, gpt_wikitext

    task = {"bert-imdb": bert_imdb, "gpt-wikitext": gpt_wikitext}[config.task]
    return task.load_data(config, cache_dir)


def uses_builtin_tokenizer(config: RunConfig) -> bool:
    """Published weights know their own vocabulary alone, so only a random draw can read the built-in corpora's."""
    return config.data == "builtin" and config.weights == "random" and config.tokenizer_name is None


def load_task_tokenizer(config: RunConfig, frame: bool) -> PreTrainedTokenizerBase:
    """The built-in corpora's own, or the model's; `frame` asks the former for [CLS] and [SEP]."""
    if uses_builtin_tokenizer(config):
        from study.tasks.builtin import builtin_tokenizer

        return builtin_tokenizer(frame)
    from study.models.tokenizer import load_tokenizer

    return load_tokenizer(config)


def describe(train: Split, evaluation: Split, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What was made of the raw data, for the record: two runs with these alike trained on the same tokens."""
    return {
        "samples": {"train": len(train), "eval": len(evaluation)},
        "tokens_sha256": {"train": train.sha256(), "eval": evaluation.sha256()},
        "tokenizer": {
            "name": tokenizer.name_or_path or "builtin",
            "class": type(tokenizer).__name__,
            "entries": len(tokenizer),
        },
    }
