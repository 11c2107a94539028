"""Expected values of every file in accelerate_configs/: those that all share, and those that its name implies.

A new strategy needs one line in STRATEGIES. accelerate_configs/README.md lists its other parts.
"""

from __future__ import annotations

from typing import Any

from study.config.strategies import WITH_REPLICAS

# Meaning of each name: ZeRO stage, place of the optimizer's state, place of the parameters.
STRATEGIES: dict[str, tuple[int | None, str | None, str | None]] = {
    "single": (None, None, None), "ddp": (None, None, None), "fsdp2": (None, None, None),
    "hsdp": (None, None, None), "zero3_hpz": (3, None, None), "tp": (None, None, None), "cp": (None, None, None),
    "ulysses_zero1": (1, None, None), "ulysses_zero2": (2, None, None), "ulysses_zero3": (3, None, None),
    "zero1_tp": (1, None, None), "zero2_tp": (2, None, None), "zero3_tp": (3, None, None),
    "zero0": (0, None, None), "zero1": (1, None, None), "zero2": (2, None, None), "zero3": (3, None, None),
    "zero2_cpu": (2, "cpu", None), "zero3_cpu_optimizer": (3, "cpu", None), "zero3_cpu": (3, "cpu", "cpu"),
    "zero3_nvme_optimizer": (3, "nvme", None), "zero3_nvme": (3, "nvme", "nvme"), "zero3_cpu_nvme": (3, "cpu", "nvme"),
}  # fmt: skip
WITH_DEEPSPEED = [name for name, (stage, _, _) in STRATEGIES.items() if stage is not None]
_DISTRIBUTED_TYPES = {
    "single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "hsdp": "FSDP", "tp": "MULTI_GPU", "cp": "FSDP",
}  # fmt: skip
_YAML = {
    "compute_environment": "LOCAL_MACHINE", "num_machines": 1, "machine_rank": 0, "main_process_port": 0,
    "main_training_function": "main", "rdzv_backend": "static", "same_network": True,
}  # fmt: skip
_FSDP = {
    "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False, "fsdp_cpu_ram_efficient_loading": False, "fsdp_activation_checkpointing": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}  # fmt: skip
_SEQUENCE = {"parallelism_config_sp_size": 2, "parallelism_config_sp_backend": "deepspeed"}
_MESHES = {
    # Two replicas of two ranks.
    "hsdp": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2},
    "tp": {"parallelism_config_tp_size": 2},
    "cp": {"parallelism_config_cp_size": 2, "parallelism_config_cp_comm_strategy": "allgather"},
    "ulysses_zero1": _SEQUENCE, "ulysses_zero2": _SEQUENCE, "ulysses_zero3": _SEQUENCE,
}  # fmt: skip
# Every value whose DeepSpeed default would otherwise affect a comparison; the run's flags set each `auto`.
_JSON = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0, "zero_force_ds_cpu_optimizer": True,
}  # fmt: skip
_ZERO = {
    "contiguous_gradients": True, "reduce_scatter": True, "reduce_bucket_size": 500_000_000,
    "allgather_partitions": True, "allgather_bucket_size": 500_000_000, "round_robin_gradients": False,
}  # fmt: skip
_STAGE3 = {
    "sub_group_size": 1_000_000_000, "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000, "stage3_max_live_parameters": 1_000_000_000,
    "stage3_gather_16bit_weights_on_model_save": False,
}  # fmt: skip
_CPU = {"device": "cpu", "pin_memory": True}
_NVME = {"device": "nvme", "pin_memory": True, "nvme_path": "nvme_offload"}
_OPTIMIZER = {"cpu": _CPU, "nvme": _NVME | {"buffer_count": 4}}
_PARAMETERS = {"cpu": _CPU, "nvme": _NVME | {"buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 0}}
_AIO = {
    "block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True,
}  # fmt: skip


def default_ranks(name: str) -> int:
    """Return the number of processes in the strategy's file."""
    return 1 if name == "single" else 4 if name in WITH_REPLICAS else 2


def expected_yaml(name: str) -> dict[str, Any]:
    """Return the values that accelerate_configs/NAME.yaml must have."""
    values = _YAML | {
        "distributed_type": _DISTRIBUTED_TYPES.get(name, "DEEPSPEED"),
        "num_processes": default_ranks(name),
    }
    if name in WITH_DEEPSPEED:
        values["deepspeed_config"] = {
            "deepspeed_config_file": f"accelerate_configs/deepspeed/{name}.json",
            "deepspeed_multinode_launcher": "standard",
            # transformers cannot load a model in parts if its layers are tensor-parallel.
            "zero3_init_flag": STRATEGIES[name][0] == 3 and not name.endswith("_tp"),
        }
    values |= {"fsdp_config": _FSDP} if values["distributed_type"] == "FSDP" else {}
    return values | ({"parallelism_config": _MESHES[name]} if name in _MESHES else {})


def expected_json(name: str) -> dict[str, Any]:
    """Return the values that accelerate_configs/deepspeed/NAME.json must have."""
    stage, optimizer, parameters = STRATEGIES[name]
    # DeepSpeed's default for this stage.
    zero: dict[str, Any] = {**_ZERO, "stage": stage, "overlap_comm": stage == 3}
    if stage == 3:
        # A parameter from NVMe occupies one of few swap buffers until its release, so none may stay for its next use.
        zero |= _STAGE3 | {"stage3_max_reuse_distance": 0 if parameters == "nvme" else 1_000_000_000}
    zero |= {"zero_hpz_partition_size": 2} if name == "zero3_hpz" else {}
    zero |= {"offload_optimizer": _OPTIMIZER[optimizer]} if optimizer else {}
    zero |= {"offload_param": _PARAMETERS[parameters]} if parameters else {}
    extra = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": False}} if name.endswith("_tp") else {}
    return {**_JSON, "zero_optimization": zero, **extra, **({"aio": _AIO} if "nvme" in (optimizer, parameters) else {})}
