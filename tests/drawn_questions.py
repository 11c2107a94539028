"""Questions of `study advise` that are drawn, for tests of its page."""

from __future__ import annotations

import random
from collections.abc import Iterator


def drawn_questions(count: int, seed: int = 82) -> Iterator[list[str]]:
    """Yield words of `study advise` for small models on few GPUs."""
    draw = random.Random(seed)
    choices = {
        "seq_length": ("256", "512"),
        "precision": ("bf16", "fp32"),
        "gradient_checkpointing": ("on", "off"),
        "global_batch_size": ("32", "64", "128"),
        "micro_batch": ("1", "2", "3"),
        "accumulation": ("1", "4"),
        "optimizer": ("adamw_8bit", "paged_adamw_8bit", "lion", "adafactor"),
        "attn_implementation": ("eager", "flash_attention_2"),
        "loss_kernel": ("liger", "flash"),
        "host_memory": ("16", "64"),
        "network_gb_per_s": ("1", "12.5"),
        "host_gb_per_s": ("1.9", "150"),
        "bus_gb_per_s": ("0.8", "20"),
        "lora_rank": ("8", "16"),
    }
    models = (
        "gpt2",
        "gpt2-medium",
        "gpt2-xl",
        "bert-base-uncased",
        "bert-large-uncased",
        "llama-3.2-1b",
        "qwen2.5-0.5b",
    )
    hardware = ("1x4090", "2x4090", "4xA100-40", "8xH100", "2x8xH100", "2xA10", "8xL4")
    for _ in range(count):
        words = [draw.choice(models), "--hardware", draw.choice(hardware)]
        for name in draw.sample(sorted(choices), draw.randint(0, 4)):
            words += ["--peft", "lora"] if name == "lora_rank" else []
            words += [f"--{name}", draw.choice(choices[name])]
        yield words
