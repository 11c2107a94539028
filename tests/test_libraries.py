"""What a run imports before it starts, and that it costs no more than it must."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import ROOT
from study.host.imports import importing

pytestmark = pytest.mark.engine

SHOWN = """
import gc, sys
from study.host.imports import import_libraries
from study.config.strategies import read_strategy
import_libraries(read_strategy(sys.argv[1]))
from transformers import GPT2LMHeadModel
import evaluate
print(sorted({name.partition(".")[0] for name, module in sys.modules.items() if module is not None}), gc.isenabled())
"""


def test_collection_rests_while_libraries_are_imported_and_only_then():
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()


@pytest.mark.parametrize(("strategy", "with_deepspeed"), [("ddp", False), ("zero2", True)])
def test_a_run_imports_its_own_engine_and_nothing_of_the_reports(strategy, with_deepspeed):
    result = subprocess.run(
        [sys.executable, "-c", SHOWN, strategy], capture_output=True, text=True, timeout=120, check=True
    )
    packages, collects = result.stdout.splitlines()[-1].rsplit(" ", 1)
    assert collects == "True"
    assert "'transformers'" in packages
    assert ("'deepspeed'" in packages) is with_deepspeed
    assert importlib.util.find_spec("sklearn") or "'scipy'" not in packages
    assert "'matplotlib'" not in packages


def test_scikit_learn_finds_the_scipy_that_it_is_built_on(tmp_path):
    """Some versions of transformers import it with their generation code, wherever they find it."""
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn/__init__.py").write_text("")
    (tmp_path / "sklearn/metrics.py").write_text("import scipy.sparse\n")
    code = (
        "from study.host.imports import import_libraries\nfrom study.config.strategies import read_strategy\n"
        "import_libraries(read_strategy('single'))\nimport sklearn.metrics"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=120, check=True)


def test_a_torchvision_of_another_torch_is_left_alone(tmp_path: Path) -> None:
    """As where a notebook's torch was replaced: it raises, and transformers imports it wherever it is."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms is missing')")
    metadata = tmp_path / "torchvision-0.25.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.25.0\n")
    code = (
        "from study.host.imports import import_libraries; from study.config.strategies import read_strategy;"
        " import_libraries(read_strategy('ddp')); import transformers; transformers.BertForSequenceClassification;"
        " transformers.Trainer"
    )
    found = os.pathsep.join([str(tmp_path), str(ROOT)])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": found}, check=True, timeout=120)
