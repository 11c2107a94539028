"""Questions of `study advise` that are drawn, for tests of its page."""

from __future__ import annotations

import random
from collections.abc import Iterator

SMALL_MODELS = (
    "gpt2",
    "gpt2-medium",
    "gpt2-xl",
    "bert-base-uncased",
    "bert-large-uncased",
    "llama-3.2-1b",
    "qwen2.5-0.5b",
)
LARGE_MODELS = ("mistral-7b-v0.3", "llama-3.1-8b", "gemma-2-9b", "qwen2.5-14b", "qwen3-32b", "llama-3.1-70b")
# Values of flags; the flags in one text go together.
FLAGS = {
    "--seq_length": ("256", "512"),
    "--precision": ("bf16", "fp32"),
    "--gradient_checkpointing": ("on", "off"),
    "--global_batch_size": ("32", "64", "128"),
    "--micro_batch": ("1", "2", "3"),
    "--accumulation": ("1", "4"),
    "--optimizer": ("adamw_8bit", "paged_adamw_8bit", "lion", "adafactor"),
    "--attn_implementation": ("eager", "sdpa_causal", "flash_attention_2"),
    "--loss_kernel": ("liger", "flash", "same_type", "unsloth", "fast", "cut"),
    "--host_memory": ("16", "64", "512GB"),
    "--network_gb_per_s": ("1", "12.5"),
    "--host_gb_per_s": ("1.9", "150"),
    "--nvme_gb_per_s": ("1,0.5", "7,3"),
    "--bus_gb_per_s": ("0.8", "20"),
    "--price_per_gpu_hour": ("0.4", "2.5"),
    "--with_reference": ("",),
    "--compile": ("",),
    "--tensor_parallel": ("2", "8"),
    "--peft lora --lora_rank": ("8", "16"),
    "--peft lora --lora_targets": ("all-linear", "q_proj,v_proj"),
    "--peft lora --quantization": ("4bit", "8bit"),
}
HARDWARE = ("1x4090", "2x4090", "4xA100-40", "8xH100", "2x8xH100", "2xA10", "8xL4")


def drawn_questions(count: int, seed: int = 82) -> Iterator[list[str]]:
    """Yield words of `study advise`, every third about a model of 7 B parameters or more."""
    draw = random.Random(seed)
    for place in range(count):
        words = [draw.choice(SMALL_MODELS if place % 3 else LARGE_MODELS), "--hardware", draw.choice(HARDWARE)]
        for flag in draw.sample(sorted(FLAGS), draw.randint(0, 4)):
            value = draw.choice(FLAGS[flag])
            words += [*flag.split(), *filter(None, [value])]
        yield words
