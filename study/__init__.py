"""What DeepSpeed ZeRO really does: one trainer, many strategies, evidence for every claim."""

__version__ = "0.1.0"
