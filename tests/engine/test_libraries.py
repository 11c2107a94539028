from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import ROOT
from forked import fork_script

IMPORT = """
import gc, sys
from study.host.stacks import import_libraries
from study.config.strategies import read_strategy
import_libraries(read_strategy("{strategy}"))
"""


def run_python(strategy: str, code: str, *path: Path) -> str:
    """Import a run's libraries, with the folders first on Python's path; then run the code."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
    command = [sys.executable, "-c", IMPORT.format(strategy=strategy) + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize(("strategy", "with_deepspeed"), [("ddp", False), ("zero2", True)])
def test_a_run_imports_its_own_engine_and_nothing_of_the_reports(strategy: str, with_deepspeed: bool) -> None:
    printed = run_python(
        strategy,
        "from study.config.flags import RunConfig\nfrom study.workloads.sources import load_reviews\n"
        "load_reviews(RunConfig(data='builtin', train_samples=8, eval_samples=8), None)\n"
        "assert 'datasets' not in sys.modules\n"
        "from transformers import GPT2LMHeadModel\nimport evaluate\nimport study.run.open, study.run.steps\n"
        "print(sorted({name.partition('.')[0] for name, module in sys.modules.items() if module is not None}))\n"
        "print(gc.isenabled())",
    )
    packages, collects = printed.splitlines()[-2:]
    assert collects == "True"
    assert "'transformers'" in packages
    assert ("'deepspeed'" in packages) is with_deepspeed
    # Memory of a run without DeepSpeed has no part of it.
    assert ("'pydantic'" in packages) is with_deepspeed
    assert importlib.util.find_spec("sklearn") or "'scipy'" not in packages
    assert "'matplotlib'" not in packages


def test_optional_libraries_are_neither_hidden_from_each_other_nor_in_the_way(tmp_path: Path) -> None:
    """scikit-learn finds its scipy; a torchvision of another torch raises, and transformers would import it."""
    for package, text in (
        ("sklearn", ""),
        ("torchvision", "raise RuntimeError('operator torchvision::nms is missing')"),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    (tmp_path / "sklearn" / "metrics.py").write_text("import scipy.sparse\n")
    metadata = tmp_path / "torchvision-0.25.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.25.0\n")
    models = "import transformers; transformers.BertForSequenceClassification; transformers.Trainer"
    run_python("ddp", f"import sklearn.metrics\n{models}", tmp_path)


ONCE = """
import os, sys, cpuinfo
from deepspeed.runtime.zero.muon import muon_optimizer
print("torch._inductor.compile_fx" in sys.modules, cpuinfo.get_cpu_info.cache_info().currsize)
print(os.environ.get("TORCHDYNAMO_DISABLE"))
"""


def test_a_rank_of_a_probe_neither_imports_torch_s_compiler_for_zero_nor_asks_for_the_cpu(tmp_path: Path) -> None:
    """They take five seconds of each rank, and the server of the tests has done both."""
    script, environment = tmp_path / "once.py", dict(os.environ)
    environment.pop("TORCHDYNAMO_DISABLE", None)
    script.write_text(ONCE)
    done = fork_script(script, folder=tmp_path, environment=environment, read_at_import={})
    assert done.stdout.splitlines()[-2:] == ["False 1", "None"], done.stderr
