"""One step of transformers' Trainer with accumulation, by SGD with a rate of 1: rank 0 prints norms of gradients.

trainer_gradients.py STAGE    STAGE of ZeRO, or ddp
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments, default_data_collator

ACCUMULATION, SAMPLES, LENGTH, VOCABULARY = 4, 2, 12, 96


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 80, "num_hidden_layers": 2}
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            num_attention_heads=4,
            max_position_embeddings=2 * LENGTH,
            dropout=0.0,
            attention_dropout=0.0,
            init_std=0.1,
            **sizes,
        )
    )


def make_settings(stage: str) -> dict[str, Any] | None:
    if stage == "ddp":
        return None
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(stage), "reduce_bucket_size": 10_000},
    }


def main() -> None:
    settings = make_settings(sys.argv[1])
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(VOCABULARY, (16 * SAMPLES, LENGTH), generator=generator).tolist()
    samples: Any = [{"input_ids": row, "labels": row} for row in rows]
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=SAMPLES,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=1,
            save_strategy="no",
            report_to="none",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            disable_tqdm=True,
            deepspeed=settings,
        )
        Trainer(model=model, args=arguments, train_dataset=samples, data_collator=default_data_collator).train()
    if dist.get_rank() == 0:
        weights, first = dict(model.named_parameters()), make_model()
        norms = {name: (weights[name].detach() - weight).norm().item() for name, weight in first.named_parameters()}
        print("PROBE " + json.dumps({"rank": 0, "norms": norms}), flush=True)


if __name__ == "__main__":
    main()
