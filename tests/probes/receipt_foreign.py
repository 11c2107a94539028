"""Receipts of programs that nobody here wrote: copies of other projects' files, with two lines added, on two CPU ranks.

    python tests/probes/receipt_foreign.py COPIES FOLDER [PROGRAM ...] [--compare] [--store]
    python tests/probes/receipt_foreign.py --document docs/receipt.md

COPIES has the files as PROGRAMS below names them. Each program gets a folder in FOLDER with its changed copy, small
data under the names that it asks for, and a tiny model. Nothing is downloaded. With --store the receipts that they
print are kept in tests/data/receipts/programs. With --document the marked block there gets those that are kept.
With --compare each program also runs without its receipt, with the same edits for CPU ranks. With the callback the
losses that both print and the weights that both save have to be equal; in the other loops the loss of each rank and
micro-batch to the last bit, and a checksum of the weights, and with --store the number of equal ones is kept, too.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from study.host import folders, operators
from study.receipt.document import read_receipt
from study.receipt.page import receipt_lines

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- foreign programs -->", "<!-- /foreign programs -->"
WORDS = [f"w{number}" for number in range(200)]
LENGTH = 24
STORE = ROOT / "tests" / "data" / "receipts" / "programs"
EQUAL_LOSSES = STORE / "equal_losses.json"
# Of a module in a program's folder: a line for each micro-batch, in one file a rank: its loss to the last bit, and a
# checksum of the weights.
RECORDER = """
import hashlib
import os

import torch


def record(loss, model):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    with open(f"losses_{os.environ['RANK']}.txt", "a") as file:
        file.write(f"{float(loss.detach()).hex()}_{digest.hexdigest()[:16]}\\n")
"""


class Program(NamedTuple):
    """A program of another project: its files, what is changed in the first one, its arguments and its data."""

    source: str
    files: tuple[str, ...]
    # The receipt's: text of the file, and what stands there instead.
    lines: tuple[tuple[str, str], ...]
    arguments: str
    make_data: Callable[[Path], None]
    # For CPU ranks, with and without a receipt.
    cpu_lines: tuple[tuple[str, str], ...] = ()
    # Behind which the micro-batch has its loss, in a loop of its own.
    line_of_loss: str | None = None


def sentences(count: int) -> list[str]:
    chooser = random.Random(7)
    return [" ".join(chooser.choices(WORDS, k=LENGTH)) for _ in range(count)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "[CLS]", "[SEP]", *WORDS]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=64,
    )
    fast.save_pretrained(folder)


def write_llama(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=256, max_position_embeddings=64, pad_token_id=1)
    # The same weights with and without a receipt.
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)


def text_file(folder: Path) -> None:
    (folder / "text.txt").write_text("\n".join(sentences(400)))
    write_tokenizer(folder / "tokenizer")


def texts(folder: Path) -> None:
    write_llama(folder / "llama")
    for split in ("train", "test"):
        write_rows(folder / "texts" / f"{split}.jsonl", [{"text": text} for text in sentences(120)])


def preferences(folder: Path) -> None:
    write_llama(folder / "llama")
    rows = [
        {"prompt": text, "chosen": " " + " ".join(WORDS[:8]), "rejected": " " + " ".join(WORDS[8:16])}
        for text in sentences(120)
    ]
    write_rows(folder / "preferences" / "train.jsonl", rows)


METRIC = """
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="accuracy", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(predictions)}
"""


def sentence_pairs(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**sizes, vocab_size=256, max_position_embeddings=64, pad_token_id=1)
    # The same weights with and without a receipt.
    torch.manual_seed(7)
    BertForSequenceClassification(config).save_pretrained(folder / "bert-base-cased")
    write_tokenizer(folder / "bert-base-cased")
    glue = folder / "nyu-mll" / "glue"
    for split, count in (("train", 320), ("validation", 16)):
        pairs = zip(sentences(count), reversed(sentences(count)), strict=True)
        rows = [
            {"sentence1": one, "sentence2": two, "label": number % 2, "idx": number}
            for number, (one, two) in enumerate(pairs)
        ]
        write_rows(glue / "mrpc" / f"{split}.jsonl", rows)
    write_card(glue, "mrpc", {"train": "mrpc/train.jsonl", "validation": "mrpc/validation.jsonl"})
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)


def write_card(folder: Path, name: str, files: Mapping[str, str]) -> None:
    """Write the card by which the datasets library finds a configuration's files in a folder."""
    lines = "".join(f"  - split: {split}\n    path: {path}\n" for split, path in files.items())
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{lines}---\n")


def tokens_of_nanogpt(folder: Path) -> None:
    import numpy

    places = folder / "data" / "openwebtext"
    places.mkdir(parents=True)
    for split in ("train", "val"):
        numpy.random.default_rng(3).integers(0, 256, 4000).astype(numpy.uint16).tofile(places / f"{split}.bin")


def wikitext(folder: Path) -> None:
    write_tokenizer(folder / "roberta-base")
    write_rows(folder / "wikitext" / "train.jsonl", [{"text": text} for text in sentences(200)])
    write_card(folder / "wikitext", "wikitext-2-v1", {"train": "train.jsonl"})
    (folder / "checkpoints").mkdir()


IMPORT = "from study import Receipt\n"
CALLBACK = "    from study import ReceiptCallback\n    trainer.add_callback(ReceiptCallback())\n"
TRAINING = (
    "--max_steps 14 --per_device_train_batch_size 2 --use_cpu True --ddp_backend gloo --output_dir out"
    " --save_strategy no --report_to none --logging_steps 5"
)
TRL = f"{TRAINING} --bf16 False --gradient_checkpointing False"
PROGRAMS = {
    "run_clm": Program(
        "transformers, examples/pytorch/language-modeling/run_clm.py",
        ("run_clm.py",),
        (("    # Training\n", CALLBACK),),
        (
            "--model_type gpt2 --config_overrides"
            " n_embd=64,n_layer=2,n_head=4,n_positions=64,vocab_size=256 --tokenizer_name tokenizer"
            f" --train_file text.txt --do_train --block_size 32 --gradient_accumulation_steps 2 {TRAINING}"
        ),
        text_file,
    ),
    "sft": Program(
        "TRL, trl/scripts/sft.py",
        ("sft.py",),
        (("    # Train the model\n", CALLBACK),),
        f"--model_name_or_path llama --dataset_name texts --max_length 32 {TRL}",
        texts,
    ),
    "dpo": Program(
        "TRL, trl/scripts/dpo.py",
        ("dpo.py",),
        (("    # Train the model\n", CALLBACK),),
        f"--model_name_or_path llama --dataset_name preferences --max_length 48 {TRL}",
        preferences,
    ),
    "peft_sft": Program(
        "PEFT, examples/sft/train.py with --use_peft_lora",
        ("peft_sft/train.py", "peft_sft/utils.py"),
        (("    # train\n", CALLBACK),),
        (
            "--model_name_or_path llama --dataset_name texts --max_length 32 --use_peft_lora True"
            f" --lora_r 4 --lora_target_modules all-linear --dataset_text_field text {TRL}"
        ),
        texts,
    ),
    "nlp_example": Program(
        "accelerate, examples/nlp_example.py",
        ("nlp_example.py",),
        (
            ("import evaluate\n", f"import evaluate\n{IMPORT}"),
            ("    # Now we train the model\n", "    receipt = Receipt(model, optimizer)\n"),
            ("step, batch in enumerate(train_dataloader)", "step, batch in enumerate(receipt.steps(train_dataloader))"),
        ),
        "--cpu",
        sentence_pairs,
        line_of_loss="            loss = loss / gradient_accumulation_steps\n",
    ),
    "nanogpt": Program(
        "nanoGPT, train.py under DDP",
        ("nanoGPT/train.py", "nanoGPT/model.py", "nanoGPT/configurator.py"),
        (
            ("import numpy as np\n", f"import numpy as np\n{IMPORT}"),
            ("local_iter_num = 0 # ", "receipt = Receipt(model, optimizer)\nlocal_iter_num = 0 # "),
            ("    for micro_step in", "    receipt.begin_step()\n    for micro_step in"),
            ("    # timing and logging\n", "    receipt.end_step()\n    # timing and logging\n"),
        ),
        (
            "--backend=gloo --device=cpu --compile=False --dtype=float32 --batch_size=4"
            " --block_size=32 --n_layer=2 --n_head=4 --n_embd=64 --max_iters=13 --eval_iters=1"
            " --eval_interval=7 --gradient_accumulation_steps=4"
        ),
        tokens_of_nanogpt,
        cpu_lines=(
            ("    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n", ""),
            ("DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
        ),
        line_of_loss="            loss = loss / gradient_accumulation_steps #"
        " scale the loss to account for gradient accumulation\n",
    ),
    "hello_deepspeed": Program(
        "DeepSpeedExamples, training/HelloDeepSpeed/train_bert_ds.py",
        ("HelloDeepSpeed/train_bert_ds.py",),
        (
            ("import deepspeed\n", f"import deepspeed\n{IMPORT}"),
            ("    model.train()\n", "    model.train()\n    receipt = Receipt(model)\n"),
            ("enumerate(data_iterator, start=start_step)", "enumerate(receipt.steps(data_iterator), start=start_step)"),
        ),
        (
            "--checkpoint_dir=checkpoints --num_layers=2 --num_heads=4 --ff_dim=128 --h_dim=64"
            " --max_seq_length=64 --num_iterations=15 --batch_size=4"
        ),
        wikitext,
        line_of_loss="        loss = model(**batch)\n",
    ),
}


def change(program: Program, copies: Path, folder: Path, has_receipt: bool, records_losses: bool) -> str:
    """Copy a program's files, with its lines changed, and return the name of the first one."""
    for name in program.files:
        shutil.copy(copies / name, folder)
    file = folder / Path(program.files[0]).name
    text = file.read_text()
    lines = [*program.cpu_lines, *(program.lines if has_receipt else ())]
    if records_losses and program.line_of_loss is not None:
        (folder / "recorder.py").write_text(RECORDER)
        indent = " " * (len(program.line_of_loss) - len(program.line_of_loss.lstrip()))
        record = f"{indent}__import__('recorder').record(loss, model)\n"
        lines.append((program.line_of_loss, program.line_of_loss + record))
    for old, new in lines:
        if text.count(old) != 1:
            sys.exit(f"{copies / program.files[0]} has {old.strip()!r} {text.count(old)} times: take another version")
        text = text.replace(old, new)
    file.write_text(text)
    return file.name


def run(name: str, copies: Path, parent: Path, has_receipt: bool = True, records_losses: bool = False) -> None:
    """Run a program with or without its receipt; its output is kept in its folder."""
    program, folder = PROGRAMS[name], parent / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script = change(program, copies, folder, has_receipt, records_losses)
    program.make_data(folder)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths, "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        [*launcher, script, *shlex.split(program.arguments)],
        cwd=folder,
        env=os.environ | offline | fixed,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    (folder / "output.txt").write_text(f"{done.stdout}\n{done.stderr}")
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")


def compare_weights(name: str, copies: Path, parent: Path) -> None:
    """Run a program without its callback, too; exit unless it prints the same losses and saves the same weights."""
    run(name, copies, parent / "without", has_receipt=False)
    folders_of_weights = (parent / name / "out", parent / "without" / name / "out")
    contents = [[file.read_bytes() for file in sorted(out.glob("*.safetensors"))] for out in folders_of_weights]
    if not contents[0] or contents[0] != contents[1]:
        sys.exit(f"{name} saves no weights, or others with a receipt")
    losses, without = [re.findall(r"'loss': '?([\d.]+)", text) for text in read_outputs(name, parent)]
    if not losses or losses != without:
        sys.exit(f"{name} prints no losses, or others with a receipt: {losses} and {without}")
    print(f"{name} has the same losses {losses} and saves the same weights with and without a receipt", flush=True)


def compare_losses(name: str, copies: Path, parent: Path) -> dict[str, Any]:
    """Run a program with and without its receipt, and return the number of its losses; exit if one differs in its last
    bit, or if weights differ."""
    folders_of_losses = (parent / "recorded" / "with", parent / "recorded" / "without")
    for folder in folders_of_losses:
        run(name, copies, folder, has_receipt=folder.name == "with", records_losses=True)
    receipt = read_receipt(str(folders_of_losses[0] / name))
    if receipt.state != "complete" or (folders_of_losses[1] / name / "receipt.json").exists():
        sys.exit(f"{name} has no whole receipt, or one in the run without it")
    losses, without = [read_losses(folder / name) for folder in folders_of_losses]
    for rank, (ours, theirs) in enumerate(zip(losses, without, strict=True)):
        # The weights change in each step.
        if len(set(ours)) < receipt.work.steps or ours != theirs:
            sys.exit(f"{name} has too few losses on rank {rank}, or other ones with a receipt: {ours} and {theirs}")
    row = {"steps": receipt.work.steps, "losses_of_a_rank": len(losses[0]), "ranks": len(losses)}
    print(f"{name} has the same losses and weights with and without a receipt to the last bit: {row}", flush=True)
    return row


def read_losses(folder: Path) -> list[list[str]]:
    """Return the losses of each rank in a program's folder."""
    return [file.read_text().split() for file in sorted(folder.glob("losses_*.txt"))]


def keep_equal_losses(name: str, row: dict[str, Any]) -> None:
    rows = json.loads(EQUAL_LOSSES.read_text()) if EQUAL_LOSSES.exists() else {}
    EQUAL_LOSSES.write_text(json.dumps({**rows, name: row}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_outputs(name: str, parent: Path) -> tuple[str, str]:
    """Return what a program has printed with and without its receipt."""
    with_one, without = ((folder / name / "output.txt").read_text() for folder in (parent, parent / "without"))
    return with_one, without


def read_screen(name: str, parent: Path) -> str:
    """Return a program's receipt as the program has printed it."""
    lines = receipt_lines(read_receipt(str(parent / name)), "receipt.json")
    screen = "\n".join(lines) + "\n"
    if screen not in (parent / name / "output.txt").read_text():
        sys.exit(f"{name} has not printed the receipt that it has written")
    return screen


def equality_table() -> str:
    """Return a table of the programs whose losses were compared to the last bit."""
    rows = [
        "| program | steps | losses of each rank | losses and weights with and without a receipt |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in json.loads(EQUAL_LOSSES.read_text(encoding="utf-8")).items():
        losses = f"{row['losses_of_a_rank']}, {row['ranks']} ranks"
        rows.append(f"| {PROGRAMS[name].source} | {row['steps']} | {losses} | equal to the last bit |")
    return "\n".join(rows) + "\n"


def fold_screens() -> str:
    """Return the receipts that are kept, each below its program's name."""
    blocks = []
    for name, program in PROGRAMS.items():
        screen = (STORE / f"{name}.txt").read_text(encoding="utf-8")
        blocks.append(
            f'<details markdown="1">\n<summary>{html.escape(program.source)}</summary>\n\n'
            f"```text\n{screen}```\n\n</details>\n"
        )
    return "\n".join(blocks)


def main() -> None:
    """Run the programs and print their receipts, or write those that are kept into a document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("copies", type=Path, nargs="?")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", choices=[*PROGRAMS, []])
    parser.add_argument("--document", type=Path)
    parser.add_argument("--store", action="store_true", help="keep the receipts that the programs print")
    parser.add_argument("--compare", action="store_true", help="also run the programs without a receipt")
    parser.add_argument("--keep", action="store_true", help="do not run again the programs with an output in FOLDER")
    options = parser.parse_args()
    if options.copies is not None and options.folder is None:
        parser.error("give it COPIES and FOLDER, or --document alone")
    if options.copies is not None:
        # Programs of DeepSpeed find its operators.
        operators.configure_build_environment(folders.cache_directory())
        for name in options.programs or PROGRAMS:
            run_and_read(name, options)
    if options.document is not None:
        before, _, rest = options.document.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
        _, _, after = rest.partition(END)
        options.document.write_text(
            f"{before}{BEGIN}\n{equality_table()}\n{fold_screens()}{END}{after}", encoding="utf-8"
        )


def run_and_read(name: str, options: argparse.Namespace) -> None:
    copies, folder = options.copies.resolve(), options.folder.resolve()
    if not (options.keep and (folder / name / "output.txt").exists()):
        run(name, copies, folder)
    screen = read_screen(name, folder)
    print(f"# {PROGRAMS[name].source}\n{screen}", flush=True)
    if options.store:
        STORE.mkdir(exist_ok=True)
        (STORE / f"{name}.txt").write_text(screen, encoding="utf-8")
    if options.compare:
        compare(name, copies, folder, options.store)


def compare(name: str, copies: Path, folder: Path, stores: bool) -> None:
    """Run a program without its receipt, too, and compare what it trains; exit if that differs."""
    if PROGRAMS[name].line_of_loss is None:
        compare_weights(name, copies, folder)
        return
    row = compare_losses(name, copies, folder)
    if stores:
        keep_equal_losses(name, row)


if __name__ == "__main__":
    main()
