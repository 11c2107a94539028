"""Answers of other estimators to the rows of `study benchmark`, of which each needs only the estimator's own package.

    study benchmark --rows > rows.csv
    python tools/benchmark_estimators.py accelerate rows.csv study/benchmark/answers/accelerate.csv

Estimators: accelerate and deepspeed (their packages), eleutherai (its formula is here), and llm-analysis, for which
`pip install --no-deps llm-analysis==0.2.2 fire==0.5.0 termcolor six` in a separate environment is enough. None supports
adapters. A row without an answer has the reason in `note`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_GIB = 2**30
# The share of a GPU's peak that llm-analysis' constant.py names for Megatron-LM; its default is all of it.
_LLM_ANALYSIS_EFFICIENCY = 0.5
Row = Mapping[str, str]
# A peak in bytes, the seconds of a step, and why there is none.
Answer = tuple[float | None, float | None, str]


def ask_accelerate(row: Row) -> Answer:
    """Return the largest stage of `accelerate estimate-memory`'s "Training using Adam"; it has no ranks."""
    from accelerate.commands.estimate import estimate_training_usage

    kind = {"bf16": "bfloat16", "fp16": "float16"}.get(row["precision"].removesuffix("-engine"), "float32")
    stages = estimate_training_usage(4 * int(row["parameters"]), kind)
    return float(max(stages.values())), None, ""


def ask_deepspeed(row: Row) -> Answer:
    """Return the estimate of stage 2 or 3; FSDP shards what stage 3 shards. There is none for stages 0 and 1."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    stage = "3" if row["engine"] == "FSDP" else row["zero_stage"]
    parameters, nodes = int(row["parameters"]), int(row["nodes"])
    gpus_per_node = int(row["gpus"]) // nodes
    is_optimizer_offloaded, are_weights_offloaded = row["offload_optimizer"] != "", row["offload_parameters"] != ""
    if stage == "2":
        needs = estimate_zero2_model_states_mem_needs(parameters, gpus_per_node, nodes, is_optimizer_offloaded)
    elif stage == "3":
        # Its "largest layer" is the largest module's own tensors: the embedding, or a matrix of the feed-forward block.
        largest = int(row["hidden"]) * max(int(row["vocabulary"]), int(row["inner"]))
        needs = estimate_zero3_model_states_mem_needs(
            parameters, largest, gpus_per_node, nodes, is_optimizer_offloaded, are_weights_offloaded
        )
    else:
        return None, None, "DeepSpeed has no estimator for stages 0 and 1 and without ZeRO"
    return float(needs[1]), None, ""


def ask_eleutherai(row: Row) -> Answer:
    """Return bytes of a GPU by EleutherAI/cookbook's calc/calc_transformer_mem.py with its default settings.

    https://github.com/EleutherAI/cookbook/blob/827ee3b293a63f14403f1467d08c91fda213f4e6/calc/calc_transformer_mem.py
    It counts an untied output layer and a position table always, has no offload, and takes gradients as fp32.
    """
    ranks, length = int(row["gpus"]), int(row["sequence"])
    parameters = _eleutherai_parameters(row)
    stage = 3 if row["engine"] == "FSDP" else int(row["zero_stage"] or 0)
    low = 2
    weight = 4 if row["precision"] == "fp32" else low
    weights = parameters * weight / (ranks if stage == 3 else 1)
    gradients = parameters * 4 / (ranks if stage >= 2 else 1)
    optimizer = parameters * 12 / (ranks if stage >= 1 else 1)
    buckets = (5e8 * weight if stage >= 1 else 0.0) + (1e9 * weight if stage == 3 else 0.0)
    bytes_per_element: float = 16 * low + 2
    if row["checkpointing"] != "true":
        bytes_per_element += (2 * low + 1) * (int(row["heads"]) * length / int(row["hidden"]))
    activations = length * int(row["micro_batch"]) * int(row["hidden"]) * int(row["layers"]) * bytes_per_element
    return weights + gradients + optimizer + (buckets if ranks > 1 else 0.0) + activations, None, ""


def _eleutherai_parameters(row: Row) -> float:
    hidden, layers = int(row["hidden"]), int(row["layers"])
    embeddings = 2 * int(row["vocabulary"]) * hidden + hidden * int(row["sequence"])
    norms = 8 * hidden * layers + 2 * hidden
    attention = 2 * (1 + int(row["key_value_heads"]) / int(row["heads"])) * layers * hidden**2
    matrices = 3 if row["gated"] == "true" else 2
    return embeddings + norms + attention + matrices * layers * hidden * int(row["inner"])


def ask_llm_analysis(row: Row) -> Answer:
    """Return the memory of weights, optimizer, gradients and activations, and the latency of a step."""
    from llm_analysis import analysis, config  # type: ignore[import-not-found]

    if row["offload_optimizer"]:
        return None, None, "llm-analysis has no offload"
    if row["precision"] == "fp32":
        return None, None, "llm-analysis has products of 16 bits and fewer"
    hidden, inner, length = int(row["hidden"]), int(row["inner"]), int(row["sequence"])
    recomputations = analysis.ActivationRecomputation
    recomputes = {"true": recomputations.FULL, "selective": recomputations.SELECTIVE}
    stage = 3 if row["engine"] == "FSDP" else int(row["zero_stage"] or 0)
    analyzed = analysis.LLMAnalysis(
        config.ModelConfig(
            name=row["model"],
            num_layers=int(row["layers"]),
            n_head=int(row["heads"]),
            hidden_dim=hidden,
            vocab_size=int(row["vocabulary"]),
            max_seq_len=length,
            num_key_value_heads=int(row["key_value_heads"]),
            ffn_embed_dim=inner,
            expansion_ratio=inner / hidden,
            model_type=row["model_type"],
        ),
        config.GPUConfig(
            name=row["gpu"],
            # It rejects a micro-batch that by its figures does not fit, and then returns none.
            mem_per_GPU_in_GB=1e6,
            hbm_bandwidth_in_GB_per_sec=float(row["gpu_bandwidth_gb_per_s"]),
            # Of a link between GPUs that nothing here uses: there is no tensor parallelism.
            intra_node_bandwidth_in_GB_per_sec=float(row["nvlink_gb_per_s"] or 1),
            intra_node_min_message_latency=8e-6,
            peak_fp16_TFLOPS=float(row["gpu_tflops"]),
        ),
        config.DtypeConfig(),
        config.ParallelismConfig(dp_size=int(row["gpus"])),
        flops_efficiency=_LLM_ANALYSIS_EFFICIENCY,
    )
    # Without masters, the bytes of the masters are those of gradients, and with `other_op_bytes` of two 16-bit moments.
    state = {"master_weights_dtype_bytes": 2, "other_op_bytes": 2} if row["pure"] == "true" else {}
    answer = analyzed.training(
        batch_size_per_gpu=int(row["micro_batch"]),
        gradient_accumulation_steps=int(row["accumulation"]),
        seq_len=length,
        activation_recomputation=recomputes.get(row["checkpointing"], recomputations.NONE),
        ds_zero=analysis.DSZeRO(stage),
        flash_attn=row["attention"] != "eager",
        softmax_dropout=row["dropout"] == "true",
        mlp_gated_linear_units=row["gated"] == "true",
        **state,
    )
    peak = answer["(weight+op_state+grad+act)_memory_per_gpu"]
    return float(peak), float(answer["latency_per_micro_batch"] * int(row["accumulation"])), ""


ESTIMATORS: dict[str, Callable[[Row], Answer]] = {
    "accelerate": ask_accelerate,
    "deepspeed": ask_deepspeed,
    "eleutherai": ask_eleutherai,
    "llm-analysis": ask_llm_analysis,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("estimator", choices=ESTIMATORS)
    parser.add_argument("rows", type=Path, help="the file that `study benchmark --rows` wrote")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    ask = ESTIMATORS[options.estimator]
    with options.rows.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with options.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "peak_gib", "step_s", "note"])
        for row in rows:
            # The libraries print to stdout.
            with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
                answer: Any = (None, None, "it has no adapters") if row["kind"] == "adapters" else ask(row)
            peak, step, note = answer
            writer.writerow(
                [row["id"], "" if peak is None else f"{peak / _GIB:.4f}", f"{step:.5g}" if step else "", note]
            )


if __name__ == "__main__":
    main()
