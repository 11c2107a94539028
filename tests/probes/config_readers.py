"""Print the errors of the engines' own readers for files, for 1 and for 8 ranks: config_readers.py STORE FOLDER NAMES.

A JSON goes through the Trainer, which fills in "auto", a YAML through Accelerate's launcher and the plugins that read
its environment; both then go to DeepSpeedConfig. Values that the file leaves to the program are such that they fit.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin, patch_environment
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from deepspeed.runtime.config import DeepSpeedConfig
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

MICRO_BATCH, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def read_json(file: Path, ranks: int) -> object:
    if '"auto"' not in file.read_text():
        return str(file)
    config = HfTrainerDeepSpeedConfig(json.loads(file.read_text()))
    given = [config.get_value(key) for key in ("train_batch_size", MICRO_BATCH, ACCUMULATION)]
    batch, micro, steps = (size if type(size) is int else 0 for size in given)
    steps = steps or (batch and micro and batch // (micro * ranks)) or 1
    bf16, fp16 = (config.get_value(f"{kind}.enabled") for kind in ("bf16", "fp16"))
    program = SimpleNamespace(
        world_size=ranks,
        per_device_train_batch_size=micro or batch // (ranks * steps) or 1,
        max_grad_norm=1.0,
        gradient_accumulation_steps=steps,
        bf16=bf16 == "auto" and fp16 is not True,
        bf16_full_eval=False,
        fp16=fp16 == "auto" and bf16 not in (True, "auto"),
        fp16_full_eval=False,
        learning_rate=5e-5,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        save_on_each_node=False,
        get_warmup_steps=lambda _: 1,
    )
    config.trainer_config_process(program)
    # What the file sets, the program sets to the same.
    config.fill_match, config.mismatches = config.fill_only, []
    config.trainer_config_finalize(program, SimpleNamespace(config=SimpleNamespace(hidden_size=768)), 1000)
    return config.config


def read_yaml(file: Path, ranks: int) -> object:
    command = ["--config_file", str(file), "--num_processes", str(ranks), "train.py"]
    args, defaults, sets_precision = _validate_launch_command(launch_command_parser().parse_args(command))
    fields = [*defaults.deepspeed_config, *["mixed_precision"] * sets_precision]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    is_one = not (args.use_deepspeed or args.use_fsdp or args.multi_gpu)
    prepare = prepare_deepspeed_cmd_env if args.use_deepspeed else prepare_simple_launcher_cmd_env
    environment = prepare(args)[1] if is_one or args.use_deepspeed else prepare_multi_gpu_env(args)
    with patch_environment(**environment):
        if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG"):
            launch: dict[str, object] = {"num_processes": 1 if is_one else ranks, "multi_device": args.multi_gpu}
            launch |= {"is_fsdp2": args.use_fsdp and str(args.fsdp_version) == "2", "is_main_process": False}
            launch["distributed_type"] = DistributedType(defaults.distributed_type)
            ParallelismConfig()._validate_accelerator(SimpleNamespace(**launch))
        if args.use_fsdp:
            FullyShardedDataParallelPlugin()
        if not args.use_deepspeed:
            return None
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(os.environ["ACCELERATE_MIXED_PRECISION"])
        # Accelerator._prepare_deepspeed.
        plugin.fill_match(ACCUMULATION, must_match=False, **{ACCUMULATION: 1})
        micro = 1 if plugin.is_auto(MICRO_BATCH) else plugin.get_value(MICRO_BATCH)
        values = {"gradient_clipping": 1.0, "optimizer.params.lr": 1e-4, "zero_optimization.reduce_bucket_size": 768**2}
        if micro is not None:
            values |= {MICRO_BATCH: micro, "train_batch_size": micro * plugin.get_value(ACCUMULATION) * ranks}
        plugin.deepspeed_config_process(must_match=False, **values)
        return plugin.deepspeed_config


store, folder, names = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
os.chdir(folder)
for name in json.loads(names):
    errors = []
    for ranks in (1, 8):
        try:
            config = (read_json if name.endswith(".json") else read_yaml)(Path(name), ranks)
            if config is not None:
                DeepSpeedConfig(config, mpu=SimpleNamespace(get_data_parallel_world_size=lambda n=ranks: n))
            errors.append("")
        except Exception as error:
            # The last step of Accelerate's FSDP, after its checks, asks for a device, which this machine may lack.
            errors.append("" if "no available devices" in str(error) else f"{type(error).__name__}: {error}")
    print("SAYS", json.dumps(errors))
