"""`offload_optimizer_nvme_path` of an Accelerate YAML does not reach the workers: DeepSpeed swaps into a folder "none".

`prepare_deepspeed_cmd_env` exports the devices and not the two paths, and `DeepSpeedPlugin` reads the environment.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

zero = {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/nvme"}
settings = {"distributed_type": "DEEPSPEED", "mixed_precision": "no", "num_processes": 1, "deepspeed_config": zero}
with tempfile.TemporaryDirectory() as folder:
    file, worker = Path(folder) / "zero3_nvme.yaml", Path(folder) / "worker.py"
    file.write_text(yaml.safe_dump(settings))
    worker.write_text(
        "from accelerate import DeepSpeedPlugin\n"
        "print('workers swap into', DeepSpeedPlugin().deepspeed_config['zero_optimization']['offload_optimizer'])\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), str(worker)]
    launched = subprocess.run(command, capture_output=True, text=True, check=True)
(line,) = (line for line in launched.stdout.splitlines() if line.startswith("workers swap"))
print(f"the YAML has {zero['offload_optimizer_nvme_path']}; {line}")
sys.exit(0 if "'/nvme'" in line else 1)
