"""What a run of this study asks of a prediction, by its own options."""

from __future__ import annotations

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.strategies import WITH_TEAMS, read_strategy
from study.predictor.request import Hardware, Request
from study.predictor.shape import model_shape, with_adapters


def unpredicted(strategy: str, config: RunConfig) -> str | None:
    """What nobody has arithmetic for; None where there is."""
    if strategy in WITH_TEAMS:
        return f"{strategy}, whose ranks share their samples"
    if config.optimizer != "adamw":
        return config.optimizer
    try:
        model_shape(config.model_name_or_path)
    except UserError:
        return f"{config.model_name_or_path}, of which only the name is known"
    return None


def request_for(strategy: str, config: RunConfig, box: Hardware, micro_batch: int, accumulation: int) -> Request:
    """Refuses what `unpredicted` says."""
    if what := unpredicted(strategy, config):
        raise UserError(f"nobody predicts {what}", "leave it out")
    shape = model_shape(config.model_name_or_path)
    buffered = read_strategy(strategy).with_swap_buffers(-(-shape.largest // box.ranks))
    return Request(
        shape=shape if config.peft == "none" else with_adapters(shape, config.lora_rank),
        strategy=buffered.overridden(config), box=box, sequence_length=config.seq_length,
        micro_batch=micro_batch, accumulation=accumulation, precision=config.precision,
        gradient_checkpointing=config.gradient_checkpointing, attention=config.attn_implementation,
        dropout=config.dropout != 0, compiled=config.torch_compile,
    )  # fmt: skip
