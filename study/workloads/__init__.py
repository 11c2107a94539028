"""What is trained on which data: from a resolved RunConfig to tokenized tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from study.config.errors import UserError
from study.config.flags import RunConfig

if TYPE_CHECKING:
    from study.workloads.blocks import TaskData


def load_data(config: RunConfig, cache_dir: Path, own_samples: int | None = None) -> TaskData:
    """The run's training and evaluation samples. Converted files are kept under `cache_dir`.

    `own_samples` is how many of a step's samples a virtual rank takes itself.
    """
    import torch

    from study.workloads.blocks import Split

    if own_samples is None:
        return _load(config, cache_dir)
    # Those are real, and every other rank's are repeats that nobody reads.
    data = _load(dataclasses.replace(config, train_samples=own_samples), cache_dir)
    rows = torch.arange(config.train_samples or config.global_batch_size) % len(data.train)
    # No floor: it is a loss, and a virtual run has none to compare it with.
    return dataclasses.replace(data, train=Split(data.train.__getitems__(rows.tolist())), floor=None)


def _load(config: RunConfig, cache_dir: Path) -> TaskData:
    from study.workloads import bert_imdb, gpt_wikitext
    from study.workloads.architecture import load_tokenizer, model_config
    from study.workloads.blocks import TaskData
    from study.workloads.builtin import builtin_tokenizer

    task = {"bert-imdb": bert_imdb, "gpt-wikitext": gpt_wikitext}[config.task]
    # Only with random weights: published ones know no vocabulary but their own.
    builtin_words = config.data == "builtin" and config.weights == "random" and config.tokenizer_name is None
    # Read first: data that is not there is refused before a tokenizer is looked for.
    raw = task.read(config, cache_dir)
    tokenizer = builtin_tokenizer(task.FRAMED) if builtin_words else load_tokenizer(config)
    train, evaluation = task.tokenized(raw, tokenizer, config)
    largest = max(int(split.tensors["input_ids"].max()) for split in (train, evaluation))
    vocabulary = model_config(config).vocab_size
    if largest >= vocabulary:
        raise UserError(
            f"the data has tokens up to {largest}, and {config.model_name_or_path} knows {vocabulary}",
            "use the model's own --tokenizer_name, or a model with a larger vocabulary",
        )
    # Two runs for which all this is equal trained on the same tokens.
    source = {
        **raw.provenance,
        "samples": {"train": len(train), "eval": len(evaluation)},
        "tokens_sha256": {"train": train.sha256(), "eval": evaluation.sha256()},
        "tokenizer": {
            "name": tokenizer.name_or_path or "builtin",
            "class": type(tokenizer).__name__,
            "entries": len(tokenizer),
        },
    }
    return TaskData(train, evaluation, task.floor(evaluation) if builtin_words else None, source)
