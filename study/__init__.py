"""A study of DeepSpeed ZeRO on Accelerate: one trainer, many strategies, evidence for every claim."""

__version__ = "0.1.0"
