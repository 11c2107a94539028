"""One row for each strategy. Its files are accelerate_configs/NAME.yaml and, with DeepSpeed, deepspeed/NAME.json."""

from __future__ import annotations

from typing import Literal, NamedTuple

SOLID: tuple[float, ...] = ()


class StrategyEntry(NamedTuple):
    """Settings digest, kind, order of advice and plot style of one strategy."""

    # Hash of the settings in its files (study/config/strategy_names.py); a test prints the new one after a change.
    # Empty without an engine.
    digest: str
    # `studied`: the strategies of `strategy: all` in a suite; a fixed list, so that reports stay comparable.
    # `replicas`: hybrid sharding, several replicas, each sharded over some of the ranks. `tensor groups`,
    # `token groups`: model-parallel groups, whose ranks divide the tensors of each layer or the tokens of each sample.
    # `named`: later additions. A suite lists all but the studied ones by name.
    kind: Literal["studied", "replicas", "tensor groups", "token groups", "named"]
    # `study advise` tries the strategies with a rank, and prefers the lowest among equally fast ones; None: not tried.
    simplicity: int | None
    # For plots. A strategy with groups has the color of its counterpart without groups.
    colour: str
    marker: str
    dash: tuple[float, ...]


REGISTRY = {
    "single": StrategyEntry("", "studied", 1, "#000000", "o", SOLID),
    "ddp": StrategyEntry("", "studied", 2, "#767676", "s", SOLID),
    "zero0": StrategyEntry("9481e1f5", "studied", 3, "#2b98ff", "^", SOLID),
    "zero1": StrategyEntry("e51e6afa", "studied", 4, "#0a35b3", "v", (6, 1.5)),
    "zero2": StrategyEntry("a2f2c754", "studied", 5, "#018228", "D", SOLID),
    "zero3": StrategyEntry("156585ce", "studied", 7, "#db3502", "P", SOLID),
    "zero2_cpu": StrategyEntry("a71bb567", "studied", 10, "#6e9a78", "d", (3, 1.5)),
    "zero3_cpu_optimizer": StrategyEntry("6576381e", "studied", 11, "#c58b1a", "<", (3, 1.5)),
    "zero3_cpu": StrategyEntry("c697a613", "studied", 12, "#704731", ">", (4, 1.5, 1, 1.5)),
    "zero3_nvme_optimizer": StrategyEntry("9fb10f9d", "studied", 14, "#e557bb", "p", (1, 1.2)),
    "zero3_nvme": StrategyEntry("215f28b7", "studied", 15, "#9c1179", "h", (5, 1.5, 1, 1.5, 1, 1.5)),
    "zero3_cpu_nvme": StrategyEntry("e2779d97", "studied", 13, "#b328da", "*", (2, 2)),
    "fsdp2": StrategyEntry("0d15d130", "studied", 6, "#3e1665", "X", (8, 2)),
    "hsdp": StrategyEntry("afad6f4c", "replicas", 8, "#183c3c", "H", (8, 2, 1, 2)),
    "zero3_hpz": StrategyEntry("84b60480", "replicas", 9, "#6d1404", "8", (5, 1)),
    "tp": StrategyEntry("46005079", "tensor groups", None, "#767676", "4", (2, 1, 6, 1)),
    "cp": StrategyEntry("066098a5", "token groups", None, "#3e1665", "+", (4, 1, 2, 1)),
    "ulysses_zero1": StrategyEntry("0bc82649", "token groups", None, "#0a35b3", "1", (2, 1, 6, 1)),
    "ulysses_zero2": StrategyEntry("3505de4a", "token groups", None, "#018228", "2", (2, 1, 6, 1)),
    "ulysses_zero3": StrategyEntry("9d1a4285", "token groups", None, "#db3502", "3", (2, 1, 6, 1)),
    "zero1_tp": StrategyEntry("b5179013", "tensor groups", None, "#0a35b3", "_", (1, 1, 3, 1)),
    "zero2_tp": StrategyEntry("b26f666d", "tensor groups", None, "#018228", "x", (1, 1, 3, 1)),
    "zero3_tp": StrategyEntry("dc9095f8", "tensor groups", None, "#db3502", "|", (1, 1, 3, 1)),
}
