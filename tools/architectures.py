"""Compare predictions for any config.json with tiny models of many architectures on two ranks, real and virtual.

    python tools/architectures.py measure [KIND ...]     10 launches, about 10 minutes on two cores
    python tools/architectures.py page

`measure` trains each model under each strategy on random inputs, with this study's engines and meters, and writes
reports/architectures/measured.json. Both actions predict the same jobs and write summary.md in the same folder. A
rank's peak is what its allocator hands out, as torch.cuda.max_memory_allocated counts it on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers

from study.config.errors import first_line
from study.config.flags import BatchPlan, RunConfig
from study.config.launch_context import Launch, read_launch, virtual_launch
from study.config.places import REPOSITORY
from study.config.strategies import STRATEGY_DIRECTORY, read_strategy
from study.predictor.communication import sent_bytes
from study.predictor.hardware import ANY_DEVICE, box_of_ranks
from study.predictor.live import live_shape
from study.predictor.memory import predict_memory
from study.predictor.request import Request
from study.predictor.state import predict_state
from study.records.schema import STATE_KINDS

OUTPUT = REPOSITORY / "reports" / "architectures"
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
RANKS, SAMPLES, LENGTH = 2, 2, 64
# Gloo's threads may free the copy of a gather late, so the peak is the least of these steps.
PROFILED_STEPS = 3
# Sizes for tiny models: several buckets, and parameters that are gathered.
_SETTINGS = {
    None: (),
    1: ("reduce_bucket_size=32768",),
    2: ("reduce_bucket_size=32768",),
    3: ("reduce_bucket_size=32768", "stage3_param_persistence_threshold=1000", "stage3_prefetch_bucket_size=20000"),
}

TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
SEQ2SEQ = {
    "vocab_size": 256,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": TEXT | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 64},
    "qwen3_moe": TEXT | EXPERTS | {"num_experts": 4, "head_dim": 16},
    "deepseek_v2": TEXT | EXPERTS | MLA,
    "deepseek_v3": TEXT | EXPERTS | MLA,
    "gpt_oss": TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
    "t5": {
        "vocab_size": 256,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "architectures": ["T5ForConditionalGeneration"],
    },
    "bart": SEQ2SEQ | {"max_position_embeddings": 128, "architectures": ["BartForConditionalGeneration"]},
    "whisper": SEQ2SEQ
    | {
        "max_source_positions": 50,
        "max_target_positions": 64,
        "num_mel_bins": 16,
        "architectures": ["WhisperForConditionalGeneration"],
    },
    "vit": IMAGE | {"architectures": ["ViTForImageClassification"]},
    "siglip": {"text_config": TEXT | {"hidden_size": 32}, "vision_config": IMAGE, "architectures": ["SiglipModel"]},
    # Of CLIP's tower, LLaVA's usual one, a norm has no gradient, and DDP raises an error.
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "image_token_index": 255,
        "vision_feature_layer": -1,
        "vision_config": IMAGE | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "vision_feature_select_strategy": "full",
        "architectures": ["LlavaForConditionalGeneration"],
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 64,
            # Of 8 x 8 patches.
            "image_size": 112,
        },
        "image_token_id": 255,
        "vision_start_token_id": 254,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    },
    "gemma3": {
        "text_config": TEXT | {"head_dim": 16},
        "vision_config": IMAGE | {"vision_use_head": False},
        "mm_tokens_per_image": 16,
        "image_token_id": 255,
        "architectures": ["Gemma3ForConditionalGeneration"],
    },
    "gemma3_text": TEXT | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": TEXT,
    "olmo2": TEXT,
    "falcon": {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    "opt": {
        "vocab_size": 256,
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 64,
    },
    "bloom": {"vocab_size": 256, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "roberta": TEXT | {"pad_token_id": 1},
    "modernbert": TEXT | {"global_attn_every_n_layers": 2, "local_attention": 16},
    "smollm3": TEXT | {"no_rope_layer_interval": 2},
    "mamba2": {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "albert": TEXT | {"embedding_size": 32},
}
CLASSIFIERS = ("roberta", "modernbert", "albert")
# Modules of two FSDP2 groups share the embedding.
WITHOUT_FSDP = ("t5", "bart")


def make_config(zero_stage: int | None, virtual: bool = False) -> RunConfig:
    """Return the settings of a run under a strategy of this stage."""
    return RunConfig(
        precision="fp32",
        attn_implementation="sdpa",
        optimizer="adamw",
        learning_rate=1e-4,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        torch_compile=False,
        report_to="none",
        peft="none",
        virtual_world_size=RANKS if virtual else None,
        engine_override=tuple(f"zero_optimization.{setting}" for setting in _SETTINGS[zero_stage]),
    )


def make_request(kind: str, strategy: str) -> Request:
    """Return the request of a prediction for this tool's job. ANY_DEVICE counts allocations as a GPU does."""
    shape, launched = live_shape(kind, {**CONFIGS[kind], "model_type": kind}), read_strategy(strategy)
    box = dataclasses.replace(box_of_ranks("ranks", ANY_DEVICE, RANKS), gloo_copies_gathers=True)
    launched = launched.with_overrides(make_config(launched.zero_stage))
    return Request(shape, launched, box, LENGTH, SAMPLES, 1, "fp32", False, "sdpa", dropout=True)


def build(kind: str) -> Any:
    """Return the model with random weights: an encoder as a classifier, others as the config states."""
    config = transformers.CONFIG_MAPPING[kind].from_dict(dict(CONFIGS[kind]))
    config.use_cache = False
    if kind in CLASSIFIERS:
        config.num_labels = 2
        return transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)](config)
    if names := CONFIGS[kind].get("architectures"):
        return getattr(transformers, names[0])(config)
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def make_inputs(kind: str, model: Any) -> dict[str, torch.Tensor]:
    """Return random samples for a model of text, of sound, of images or of both."""
    config, image = model.config, torch.randn(SAMPLES, 3, IMAGE["image_size"], IMAGE["image_size"])
    ids = torch.randint(3, 200, (SAMPLES, LENGTH))
    if kind == "vit":
        return {"pixel_values": image, "labels": ids[:, 0] % 2}
    if kind == "siglip":
        return {"pixel_values": image, "input_ids": ids, "return_loss": True}  # type: ignore[dict-item]
    if kind == "whisper":
        return {
            "input_features": torch.randn(SAMPLES, config.num_mel_bins, 2 * config.max_source_positions),
            "labels": ids,
        }
    inputs = {"input_ids": ids, "labels": ids[:, 0] % 2 if kind in CLASSIFIERS else ids}
    if (token := getattr(config, "image_token_id", None)) is not None:
        ids[:, :16] = token
        inputs["pixel_values"] = image
        if kind == "gemma3":
            inputs["token_type_ids"] = (ids == token).long()
        if kind == "qwen2_5_vl":
            vision, side = config.vision_config, 8
            inputs["image_grid_thw"] = torch.tensor([[1, side, side]] * SAMPLES)
            width = 3 * vision.temporal_patch_size * vision.patch_size**2
            inputs["pixel_values"] = torch.randn(SAMPLES * side**2, width)
            inputs["mm_token_type_ids"] = (ids == token).int()
    return inputs


def measure(kind: str, launch: Launch, virtual: bool) -> dict[str, Any]:
    """Train a few steps and return state, traffic and peak of this rank in bytes."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations import unset_hf_deepspeed_config

    from study.engine import setup
    from study.engine.optimizer import make_optimizer
    from study.metrics.state import StateWatch, model_state_bytes
    from study.metrics.traffic import TrafficWatch
    from study.train import train_step

    config = make_config(launch.strategy.zero_stage, virtual)
    run = types.SimpleNamespace(
        config=config,
        launch=launch,
        strategy=launch.strategy.with_overrides(config),
        output_dir=Path(),
        plan=BatchPlan(RANKS * SAMPLES, RANKS, SAMPLES, 1),
        swap_folder=None,
    )
    torch.manual_seed(1)
    # Under the last model's configuration of stage 3 transformers would shard the towers of this one.
    unset_hf_deepspeed_config()
    model = build(kind)
    inputs = make_inputs(kind, model)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = setup.make_accelerator(run)
    model, optimizer = setup.prepare(accelerator, model, make_optimizer(model, config), config)
    model.train()

    def step() -> None:
        train_step(accelerator, model, optimizer, [dict(inputs)], config.max_grad_norm)

    try:
        step()
        step()
        with TrafficWatch(3) as traffic, StateWatch(model, optimizer, accelerator.device) as watch:
            step()
        gc.collect()
        between = model_state_bytes(model, optimizer, accelerator.device, scan=False)
        standing = sum(place["device"] for place in between["state_bytes"].values())
        peaks = [measure_peak(step) for _ in range(PROFILED_STEPS)]
        assert watch.report is not None
        return {
            "state": {name: watch.report["state_bytes"][name]["device"] for name in STATE_KINDS},
            "sent": sum(item["wire_bytes_per_rank"] for item in traffic.report()["collectives"].values()),
            "peak": standing + sum(between["buffer_bytes"].values()) + min(peaks),
        }
    finally:
        if hasattr(model, "destroy"):
            model.destroy()
        accelerator.free_memory()


def measure_peak(step: Any) -> int:
    """Return the most bytes that a step has allocated at once, including the copies in gloo's threads."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in profile.kineto_results.events() if event.name() == "[memory]"
    )
    return int(pd.Series([size for _, size in changes]).cumsum().max())


def run_ranks(file: Path, virtual: bool, kinds: Sequence[str]) -> None:
    """Measure in a launched process; rank 0 writes the file."""
    from study.engine.virtual_rank import join_virtual_group
    from study.host.folders import cache_directory
    from study.host.operators import build_operators

    launch = read_launch()
    build_operators(launch.strategy, cache_directory())
    if virtual:
        join_virtual_group(virtual_launch(launch, RANKS, 0))
        launch = dataclasses.replace(launch, world_size=RANKS)
    results = dict[str, Any]()
    # Takes the libraries' objects out of each collection and scan, which are half of a model's time.
    gc.freeze()
    for kind in kinds:
        try:
            results[kind] = measure(kind, launch, virtual)
        except Exception as error:
            traceback.print_exc()
            results[kind] = {"refused": f"{type(error).__name__}: {first_line(error):.90}"}
        gc.collect()
    if launch.rank == 0:
        file.write_text(json.dumps(results), encoding="utf-8")


def compare(measured: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Return a row per kind, strategy and sort of rank with the errors of its prediction. `measured` is keyed by
    "STRATEGY" or "STRATEGY, virtual", and then by kind."""
    rows = []
    for name, kinds in measured.items():
        strategy, _, virtual = name.partition(", ")
        for kind, figures in kinds.items():
            request = make_request(kind, strategy)
            refusal = request.shape.fsdp_refusal if strategy == "fsdp2" else None
            row = {
                "kind": kind,
                "strategy": strategy,
                "ranks": virtual or "real",
                "refused": figures.get("refused"),
                "predicted refusal": refusal,
            }
            if "refused" not in figures and refusal is None:
                state, memory = predict_state(request), predict_memory(request)
                row |= {
                    "state": sum(
                        abs(getattr(state, f"{what}_device") - size) for what, size in figures["state"].items()
                    ),
                    "sent": sent_bytes(request) / figures["sent"] - 1,
                    "peak": None if memory.missing else memory.peak_allocated.value / figures["peak"] - 1,
                }
            rows.append(row)
    return pd.DataFrame(rows)


def to_json(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the record as JSON with a line per model."""
    parts = (
        f'"{name}": {{\n' + ",\n".join(f'"{kind}": {json.dumps(figures)}' for kind, figures in kinds.items()) + "}"
        for name, kinds in measured.items()
    )
    return "{" + ",\n".join(parts) + "}\n"


def page(rows: pd.DataFrame) -> str:
    """Return summary.md: errors by strategy, and a row per architecture."""
    # Not imported in the ranks.
    from study.report.document import table_markdown

    ran = rows[rows["sent"].notna()].assign(peak=lambda frame: frame["peak"].astype(float))
    sizes = ran.assign(sent=ran["sent"].abs(), peak=ran["peak"].abs(), equal=ran["state"] == 0)
    by_strategy = sizes.groupby(["strategy", "ranks"], sort=False).agg(
        runs=("kind", "size"),
        equal=("equal", "sum"),
        sent=("sent", "max"),
        median=("peak", "median"),
        worst=("peak", "max"),
    )
    table = pd.DataFrame(
        {
            "runs": by_strategy["runs"],
            "state equal to the byte": by_strategy["equal"],
            "sent bytes, worst error": by_strategy["sent"].map("{:.2%}".format),
            "peak, median error": by_strategy["median"].map("{:.1%}".format),
            "worst": by_strategy["worst"].map("{:.1%}".format),
        }
    ).reset_index()
    cells = rows.assign(cell=rows.apply(_cell, axis=1))
    tables = {
        sort: cells[cells["ranks"] == sort].pivot_table("cell", "kind", "strategy", "first", sort=False)
        for sort in ("real", "virtual")
    }
    kinds, reals = rows["kind"].nunique(), sizes[sizes["ranks"] == "real"]
    return f"""# How exact is a prediction for any config.json?

**Of {len(reals)} runs of real ranks the state of {reals["equal"].sum()} is equal to the byte, sent bytes are within
{reals["sent"].max():.2%}, and peaks within {reals["peak"].max():.1%}, median {reals["peak"].median():.1%}.**

Tiny models of {kinds} architectures on {RANKS} ranks without a GPU, in fp32, compared with predictions from
config.json alone; a sample has {LENGTH} tokens, an image or a sound. The models are in `tools/architectures.py`, the
measured bytes in [measured.json](measured.json). Made by `python tools/architectures.py page`.

{table_markdown(table)}
A cell is the error of the peak. If the state differs, or the sent bytes by more than 0.05 %, this is before it.

## Real ranks

{table_markdown(tables["real"].fillna("").rename_axis(columns=None).reset_index())}
## One virtual rank of {RANKS}

{table_markdown(tables["virtual"].fillna("").rename_axis(columns=None).reset_index())}
- A peak is the most bytes that the allocator has handed out, as on a GPU. It is the least of {PROFILED_STEPS} steps,
  since gloo's threads free their copies late.
- torch refuses the shared embedding of `t5` and `bart` under `fsdp2`; the prediction gives the same reason.
- The features of `qwen2_5_vl`'s images are added to the loss in the trace, and copied into the tokens by the model:
  a tenth of so small a peak.
- A norm of `llava`'s tower has no gradient. DDP refuses that, which is not predicted.
- The gradients of a model with a tower do not arrive in the order of its parameters, as is predicted: under `zero2`
  the last bucket of `siglip` and `qwen2_5_vl` has other tensors.
- On a CPU torch has no fused attention for the narrow values of `deepseek_v2` and `deepseek_v3`; the prediction is that
  of a GPU, which has.
"""


def _cell(row: Any) -> str:
    if isinstance(row["refused"], str):
        return "refused, as predicted" if isinstance(row["predicted refusal"], str) else "refused, not as predicted"
    parts = [
        f"{row['state']:,.0f} B" if row["state"] else "",
        f"{row['sent']:+.2%} sent" if abs(row["sent"]) > 5e-4 else "",
        "no peak" if pd.isna(row["peak"]) else f"{row['peak']:+.1%}",
    ]
    return ", ".join(filter(None, parts))


def launch_ranks(strategy: str, virtual: bool, kinds: Sequence[str], file: Path) -> None:
    """Launch one strategy's ranks, which write the file."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(STRATEGY_DIRECTORY / f"{strategy}.yaml"),
        "--num_processes",
        str(1 if virtual else RANKS),
        "--main_process_port",
        "0",
        __file__,
        "ranks",
        *kinds,
        "--file",
        str(file),
        *(["--virtual"] if virtual else []),
    ]
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "page", "ranks"))
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="default: all")
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--virtual", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, default=OUTPUT / "measured.json", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = options.kinds or list(CONFIGS)
    if options.action == "ranks":
        run_ranks(options.file, options.virtual, kinds)
        return
    OUTPUT.mkdir(exist_ok=True)
    measured = json.loads(options.file.read_text(encoding="utf-8")) if options.file.exists() else {}
    if options.action == "measure":
        for strategy in options.strategy:
            for name, virtual in ((strategy, False), (f"{strategy}, virtual", True)):
                part = OUTPUT / "part.json"
                launch_ranks(strategy, virtual, kinds, part)
                measured[name] = measured.get(name, {}) | json.loads(part.read_text(encoding="utf-8"))
                part.unlink()
                options.file.write_text(to_json(measured), encoding="utf-8")
    (OUTPUT / "summary.md").write_text(page(compare(measured)), encoding="utf-8")


if __name__ == "__main__":
    main()
