"""Names of flags, values and strategies in other programs: refusals name the ones of this project.

A value or strategy without a name here has an empty tuple, so that nothing that is only spelled like it is suggested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def _by_name(table: Mapping[str, str], *absent: str) -> dict[str, tuple[str, ...]]:
    """Return each name of a table `meanings in this project, by |: names elsewhere` with its meanings."""
    names = {name: tuple(meant.split(" | ")) for meant, elsewhere in table.items() for name in elsewhere.split()}
    return names | dict.fromkeys(absent, ())


# Of the Trainer, TRL, peft, DeepSpeed, Accelerate and launchers. The first flag that the command has is meant.
FLAGS = _by_name(
    {
        "--micro_batch": "per_device_train_batch_size train_micro_batch_size_per_gpu batch_size",
        "--accumulation": "gradient_accumulation_steps grad_accum",
        "--global_batch_size | --accumulation": "train_batch_size global_batch global_batch_size",
        "--seq_length": "max_seq_length max_length context context_length block_size model_max_length cutoff_len"
        " max_source_length",
        "--target_length": "max_target_length target_max_length decoder_length max_decoder_length",
        "--hardware 8xH100": "num_processes num_gpus gpus gpu ngpus nproc_per_node world_size",
        "--hardware 4x8xH100": "nodes num_nodes nnodes num_machines",
        "--strategy zero3 | --features zero3": "zero_stage stage zero zero3",
        "--strategy zero2 | --features zero2": "zero2",
        "--strategy zero1 | --features zero1": "zero1",
        "--features zero2": "strategy",
        "--strategy zero2_cpu": "cpu_offload offload offload_optimizer zero_offload",
        "--strategy fsdp2": "fsdp use_fsdp",
        "--optimizer": "optim",
        "--precision bf16": "bf16 dtype torch_dtype",
        "--precision fp16": "fp16",
        "--peft lora": "lora use_peft use_lora",
        "--lora_targets": "target_modules lora_target_modules",
        "--lora_modules_to_save": "modules_to_save additional_target",
        "--peft lora --lora_dora": "dora use_dora",
        "--peft lora --quantization 4bit": "qlora load_in_4bit",
        "--peft lora --quantization 8bit": "load_in_8bit",
        "--host_memory 512GB": "ram cpu_memory host_ram memory",
        "--attn_implementation flash_attention_2": "flash_attn flash_attention flash_attention_2 use_flash_attention_2",
        "--chunked_loss": "liger use_liger use_liger_kernel",
        "--with_reference": "dpo grpo ref_model",
        "--gradient_checkpointing": "activation_checkpointing recompute",
        "--compile": "torch_compile",
        "--attn_implementation sdpa": "attention attn attn_impl",
        "--tensor_parallel": "tp tp_size autotp_size tensor_parallel_size tensor_model_parallel_size",
        "--tensor_plan sequence": "sequence_parallel sequence_parallelism",
        "--sp": "sp_size ulysses sequence_parallel_size",
        "--offload_checkpoints": "activation_offloading enable_activation_offloading offload_activations",
    }
)
VALUES = {
    "--peft": _by_name(
        {"lora --quantization 4bit": "qlora", "lora --lora_dora": "dora"}, "adalora", "ia3", "prefix", "prompt"
    ),
    "--quantization": _by_name({"4bit": "4 nf4 fp4 int4 bnb qlora", "8bit": "8 int8 llm.int8"}, "fp8", "gptq", "awq"),
    "--precision": _by_name(
        {"bf16": "bf16 bfloat16 mixed", "fp16": "fp16 float16 half", "fp32 | no": "fp32 float32 full no none 32"},
        *("fp8", "int8", "tf32", "16"),
    ),
    "--optimizer": _by_name(
        {
            "adamw": "adam adamw_torch adamw_torch_fused adamw_hf fusedadam",
            # trainer_keys.py counts it as that, too.
            "adamw (its state is counted on the GPU)": "paged_adamw paged_adamw_32bit",
            "adamw_8bit": "adam8bit adamw8bit adamw_bnb_8bit",
        },
        "sgd",
    ),
    "--attn_implementation": _by_name(
        {"flash_attention_2": "flash fa2 flash_attn flash_attn_2 flash_attention"}, "flash_attention_3", "fa3"
    ),
}
_STRATEGIES = _by_name(
    {
        "zero1 | zero2 | zero3": "deepspeed zero ds",
        "zero2_cpu": "zerooffload offload cpuoffload",
        "zero3_hpz": "zero++ zeropp hpz",
        "zero3_nvme": "zeroinfinity infinity nvme",
        "fsdp2": "fsdp fullshard fullyshard",
        "hsdp": "hybridshard",
        "ddp": "dp dataparallel distributeddataparallel multigpu",
        "single": "none no baseline plain",
    },
    *(
        "megatron",
        "pp",
        "pipeline",
        "ep",
        "shardgradop",
        "zero1cpu",
        "fsdpcpu",
        "fsdp2cpu",
        "fsdpoffload",
        "fsdp2offload",
    ),
)
# Settings on which neither memory nor time depends, and those that are not modelled.
_WITHOUT_EFFECT = (
    *("lora_alpha", "lr", "learning_rate", "weight_decay", "warmup_ratio", "warmup_steps", "seed", "max_steps"),
    *("epochs", "num_train_epochs", "logging_steps", "packing"),
)
# They name a file of an engine.
_FILES = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "ds_config", "config_file", "fsdp_config")
# The calculator's page lists them, too.
NOT_MODELLED = _by_name(
    {
        "fp8": "fp8",
        "context parallelism": "cp cp_size context_parallel_size context_parallel_degree",
        "pipeline parallelism": "pp pp_size pipeline pipeline_parallel_size",
        "expert parallelism": "ep ep_size expert_parallel expert_parallel_size expert_parallel_degree"
        " expert_model_parallel_size",
    }
)
# Parts of a rank, and its communication, with each of them.
_CHANGES = {
    "fp8": "products in fp8 take less time, and the weights and gradients of mixed precision stay",
    "context parallelism": "a rank has its part of each sample, and sends keys and values; --sp has Ulysses",
    "pipeline parallelism": "a rank has the weights of some layers, and sends their inputs",
    "expert parallelism": "a rank has the weights of some experts, and sends tokens, not these weights and gradients",
}


# Families of tuned models by the family whose sizes they have.
_FAMILIES = _by_name(
    {
        "llama": "alpaca koala",
        "llama-2": "vicuna wizardlm orca-2",
        "llama-3.1": "deepseek-r1-distill-llama",
        "mistral": "zephyr openhermes",
        "qwen2.5": "deepseek-r1-distill-qwen",
    }
)
# Other packages of a training, whose releases people ask for in the place of DeepSpeed's.
PACKAGES = ("accelerate", "transformers", "trl", "peft", "torch", "lightning", "pytorch-lightning", "bitsandbytes")


def find_family(name: str) -> tuple[str, str]:
    """Return the family of a tuned model, such as vicuna, and the one whose sizes it has; both empty for any other."""
    tuned = next((family for family in _FAMILIES if re.match(rf"{family}(?![a-z])", name.lower())), "")
    return (tuned, _FAMILIES[tuned][0]) if tuned else ("", "")


def find_flag(flag: str, flags: Mapping[str, object]) -> str:
    """Return the flag of a command, with a value, that has the meaning of another program's; empty for a word and
    without one."""
    meant = FLAGS.get(flag[2:], ()) if flag[:2] == "--" else ()
    return next((text for text in meant if text.partition(" ")[0] in flags), "")


def judge_flag(flag: str, flags: Mapping[str, object]) -> str:
    """Return the effect of another program's flag on a prediction, to put before a fix; empty if unknown."""
    if "--seq_length" not in flags:
        return ""
    name = flag.removeprefix("--")
    if name in _WITHOUT_EFFECT:
        return "memory and time do not depend on it: leave it out; "
    if name in _FILES:
        return "a file of DeepSpeed or Accelerate is read by study explain FILE MODEL; "
    if name not in NOT_MODELLED:
        return ""
    kind = NOT_MODELLED[name][0]
    return f"{kind} is not modelled ({_CHANGES[kind]}); "


def find_strategies(name: str) -> tuple[str, ...] | None:
    """Return the strategies that another program's name may mean; None for an unknown name."""
    return _STRATEGIES.get(re.sub(r"[\s_-]", "", name).lower())
