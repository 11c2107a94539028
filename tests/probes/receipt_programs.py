"""Programs as people write them, with the two lines of a receipt, on tiny models that need no hub.

receipt_programs.py FOLDER PROGRAM...    each PROGRAM is a function below; its receipt is written to FOLDER/PROGRAM.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from study import Receipt, ReceiptCallback

LENGTH, VOCABULARY = 32, 256


def make_rows(count: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(VOCABULARY, (count, LENGTH), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def make_llama(hidden: int = 64) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def run_trainer(path: Path, model: Any, rows: Any = None, **settings: Any) -> None:
    """transformers' Trainer as in run_clm.py: accumulation, an evaluation in the middle, a scheduler."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    arguments = TrainingArguments(
        output_dir=str(path.with_suffix("")),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=14,
        eval_strategy="steps",
        eval_steps=7,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        learning_rate=1e-3,
        **settings,
    )
    rows = rows or make_rows(128)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8], data_collator=default_data_collator
    )
    trainer.add_callback(ReceiptCallback(path=path))
    trainer.train()


def trainer(path: Path) -> None:
    run_trainer(path, make_llama())


def trainer_with_adapters(path: Path) -> None:
    """peft's LoRA with gradient checkpointing, as most scripts of fine-tuning have it."""
    import peft

    model = peft.get_peft_model(make_llama(), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    run_trainer(path, model, gradient_checkpointing=True)


def trainer_with_some_adapters(path: Path) -> None:
    """Adapters of two modules of each layer, DoRA's, and a trained copy of the output layer."""
    import peft

    settings = peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], use_dora=True)
    run_trainer(path, peft.get_peft_model(make_llama(), settings))


def trainer_with_a_frozen_beginning(path: Path) -> None:
    """The embedding and the first layer are frozen, so that the backward pass ends at the second."""
    # Stage 3 gathers the matrices of this width, and keeps smaller ones.
    model = make_llama(512)
    for module in (model.model.embed_tokens, model.model.layers[0]):
        module.requires_grad_(False)
    run_trainer(path, model)


def make_llava() -> tuple[Any, list[dict[str, Any]]]:
    """Return a LLaVA whose tower of images is frozen, and samples of one image of 16 patches."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    side, image_token, patches = 28, 1, 16
    vision = CLIPVisionConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=side,
        patch_size=7,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=make_llama(512).config,
        image_token_index=image_token,
        vision_feature_layer=-1,
    )
    model: Any = LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    rows = list[dict[str, Any]]()
    for row in make_rows(128):
        words = [max(image_token + 1, token) for token in row["input_ids"][patches:]]
        rows.append(
            {
                "input_ids": [image_token] * patches + words,
                "labels": row["labels"],
                "pixel_values": torch.zeros(3, side, side),
            }
        )
    return model, rows


def trainer_with_a_frozen_tower(path: Path) -> None:
    model, rows = make_llava()
    run_trainer(path, model, rows=rows)


def trainer_recomputing_a_frozen_tower(path: Path) -> None:
    model, rows = make_llava()
    run_trainer(path, model, rows=rows, gradient_checkpointing=True)


def loop_with_a_frozen_tower(path: Path) -> None:
    """Accelerate's own loop."""
    from accelerator_on_cores import make_accelerator  # type: ignore[import-not-found]  # found beside this file
    from transformers import default_data_collator

    # Without it Accelerate looks for classes of CLIP's model of text, too, and ends with an error.
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "CLIPEncoderLayer,LlamaDecoderLayer"
    accelerator = make_accelerator(1)
    model, rows = make_llava()
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=default_data_collator)  # type: ignore[arg-type]
    optimizer: Any = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    receipt = Receipt(model, optimizer, path=path)
    for batch in loader:
        with receipt.step():
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    receipt.close()


def trl_sft(path: Path) -> None:
    """TRL's SFTTrainer, which is derived from the Trainer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w1", eos_token="w2")
    from datasets import Dataset

    texts = [" ".join(f"w{token}" for token in row["input_ids"]) for row in make_rows(128)]
    arguments = SFTConfig(
        output_dir=str(path.with_suffix("")),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        max_steps=12,
        report_to="none",
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=False,
        max_length=LENGTH,
    )
    trainer = SFTTrainer(
        model=make_llama(), args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=fast
    )
    trainer.add_callback(ReceiptCallback(path=path))
    trainer.train()


def nlp_example(path: Path) -> None:
    """The loop of accelerate's nlp_example.py: a classifier, a scheduler, two epochs with an evaluation after each."""
    from accelerate import Accelerator
    from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

    accelerator = Accelerator(cpu=True)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: Any = BertForSequenceClassification(BertConfig(**sizes, vocab_size=VOCABULARY))
    rows = [{"input_ids": torch.tensor(row["input_ids"]), "labels": torch.tensor(1)} for row in make_rows(56)]
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]  # a list is a data set
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule: Any = get_linear_schedule_with_warmup(optimizer, 2, 14)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    receipt = Receipt(model, optimizer, path=path)
    for _ in range(2):
        model.train()
        for batch in receipt.steps(loader):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            accelerator.gather(model(**batch).logits)
    receipt.close()


class Gpt(nn.Module):
    """A model as in nanoGPT: no transformers, and the loss is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.h = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(64, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.lm_head(self.h(self.wte(idx)))
        return logits, nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def nanogpt(path: Path) -> None:
    """The loop of nanoGPT's train.py under DDP: accumulation without reductions, autocast, a batch from a function."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model: Any = nn.parallel.DistributedDataParallel(Gpt())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.tensor([row["input_ids"] for row in make_rows(64)]).flatten()
    accumulation, samples = 3, 4

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.randint(len(data) - LENGTH - 1, (samples,))
        x = torch.stack([data[place : place + LENGTH] for place in places])
        return x, torch.stack([data[place + 1 : place + 1 + LENGTH] for place in places])

    receipt = Receipt(model, optimizer, path=path)
    for _ in range(12):
        with receipt.step():
            for micro_step in range(accumulation):
                model.require_backward_grad_sync = micro_step == accumulation - 1
                x, y = get_batch()
                with torch.autocast("cpu", torch.bfloat16):
                    _, loss = model(x, y)
                (loss / accumulation).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    receipt.close()


def wide_layers(path: Path) -> None:
    """Layers whose memory peaks while DDP's reducer copies gradients, with its lock held."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    layers = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    receipt = Receipt(model, optimizer, path=path)
    for _ in range(12):
        with receipt.step():
            model(torch.randn(32, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    receipt.close()


def import_lightning() -> Any:
    # Runs hide scipy from transformers (study/host/stacks.py), and Lightning's metrics import it.
    sys.modules.pop("scipy", None)
    import lightning

    return lightning


def make_lightning_module(lightning: Any) -> Any:
    class Program(lightning.LightningModule):
        """A module as in Lightning's guide: its model is an attribute, and the loss is that of training_step."""

        def __init__(self) -> None:
            super().__init__()
            self.model = make_llama()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            logits = self.model(input_ids=batch["input_ids"]).logits
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

        def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Program()


def fit_with_lightning(path: Path, ranks: int) -> None:
    """Lightning's Trainer: accumulation, clipping, an evaluation in the middle, a logger."""
    lightning = import_lightning()
    from lightning.pytorch.loggers import CSVLogger

    from study import LightningReceiptCallback

    rows: Any = [{name: torch.tensor(row) for name, row in sample.items()} for sample in make_rows(128)]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=14,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=14,
        limit_val_batches=1,
        logger=CSVLogger(path.with_suffix("")),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LightningReceiptCallback(path=path, log=True)],
    )
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)
    trainer.fit(make_lightning_module(lightning), loader, loader)


def lightning_trainer(path: Path) -> None:
    fit_with_lightning(path, ranks=2)


def lightning_alone(path: Path) -> None:
    fit_with_lightning(path, ranks=1)


def fabric(path: Path) -> None:
    """A loop of Lightning's Fabric, as in LitGPT's pretrain.py."""
    fabric = import_lightning().Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = fabric.setup(make_llama())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    rows = [torch.tensor(row["input_ids"]) for row in make_rows(128)]
    loader: Any = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    receipt = Receipt(model, optimizer, path=path)
    for number, tokens in enumerate(receipt.steps(loader), start=1):
        is_accumulating = number % 2 != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(model(input_ids=tokens, labels=tokens).loss / 2)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    receipt.close()


def main() -> None:
    folder, *programs = sys.argv[1:]
    for program in programs:
        torch.manual_seed(1)
        globals()[program](Path(folder) / f"{program}.json")
    print("PROBE " + json.dumps({"rank": int(os.environ.get("RANK", "0"))}), flush=True)


main()
