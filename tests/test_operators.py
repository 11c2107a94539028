"""DeepSpeed's operators: nothing that a killed run leaves behind holds up the next one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time

import cpuinfo
import pytest
from torch.utils.cpp_extension import load

from study.errors import UserError
from study.host.operators import (
    _cause,
    _clear_dead_build,
    _remember_the_processor,
    build_folder,
    lacks_toolkit,
    libaio_is_there,
    name_for_the_linker,
    own_build_folder,
    toolkit_version,
    use_own_build,
)  # fmt: skip
from study.record.directory import read_json

LOAD = """
import sys
from study.host.operators import build_operators
from study.host.folders import cache_directory
from study.spec.strategies import read_strategy
build_operators(read_strategy(sys.argv[1]), cache_directory())
"""


@pytest.mark.parametrize("libraries", [["-lnowhere"], []])
def test_a_build_that_fails_says_what_the_linker_or_the_compiler_said(tmp_path, libraries):
    source = tmp_path / "op.cpp"
    source.write_text("int answer() { return 42; }" if libraries else "int answer() { return nothing; }")
    with pytest.raises(RuntimeError) as failed:
        load(name="op", sources=[str(source)], extra_ldflags=libraries, build_directory=str(tmp_path))
    assert ("cannot find -lnowhere" if libraries else "error: ") in _cause(failed.value)


@pytest.mark.alone
# The last one is loaded by DeepSpeed itself, before its asynchronous I/O.
@pytest.mark.parametrize(("strategy", "operator"), [("zero0", "deepspeed_shm_comm"), ("zero3_nvme", "pin_memory")])
def test_a_lock_that_a_killed_run_left_holds_up_nobody(strategy, operator):
    if strategy == "zero3_nvme" and not libaio_is_there():
        pytest.skip("libaio is not installed")
    folder = build_folder(operator)
    (folder / "lock").touch()
    subprocess.run([sys.executable, "-c", LOAD, strategy], check=True, timeout=240)
    assert not (folder / "lock").exists()


def test_machines_that_share_a_cache_build_for_the_processor_that_each_has(tmp_path, monkeypatch):
    here = own_build_folder(tmp_path)
    assert own_build_folder(tmp_path) == here
    monkeypatch.setattr("study.host.operators.processor", lambda: {"flags": "fpu avx512f"})
    assert own_build_folder(tmp_path) != here


def test_a_folder_for_builds_that_cannot_be_one_is_named_and_no_compiler_asked_for(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "builds"))
    with pytest.raises(UserError, match=r"TORCH_EXTENSIONS_DIR .*/file/builds cannot be a folder") as refused:
        use_own_build(tmp_path)
    assert "unset it" in refused.value.fix


def test_on_a_gpu_asynchronous_io_alone_wants_the_toolkit_of_cuda():
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    if toolkit_version() is not None:
        pytest.skip("a CUDA toolkit is here")
    asked = {name: CUDA_Accelerator().create_op_builder(f"{name}Builder") for name in ("AsyncIO", "CPUAdam")}
    asked["AsyncIO"].build_for_cpu = False
    with pytest.raises(TypeError):
        asked["AsyncIO"].include_paths()
    assert {name: lacks_toolkit(builder, on_gpu=True) for name, builder in asked.items()} == {
        "AsyncIO": True, "CPUAdam": False
    }  # fmt: skip
    assert not lacks_toolkit(asked["AsyncIO"], on_gpu=False)


def test_what_is_linked_with_cuda_finds_the_library_that_is_loaded(tmp_path, monkeypatch):
    """As on a box that only runs CUDA: libcuda.so.1 is there, and no libcuda.so."""
    library, source = tmp_path / "libdriverlike.so.1", tmp_path / "main.c"
    source.write_text("int answer(void); int main(void) { return answer() - 42; }")
    compiler = ["gcc", "-x", "c", "-shared", "-Wl,-soname,libdriverlike.so.1", "-o", str(library), "-"]
    subprocess.run(compiler, input="int answer(void) { return 42; }", text=True, check=True)
    ctypes.CDLL(str(library))
    monkeypatch.delenv("LIBRARY_PATH", raising=False)
    link = ["gcc", str(source), "-ldriverlike", "-o", str(tmp_path / "main")]
    assert subprocess.run(link, capture_output=True).returncode
    for _ in range(2):
        name_for_the_linker(tmp_path / "loaded", ["libdriverlike"])
    subprocess.run(link, check=True)
    subprocess.run([str(tmp_path / "main")], check=True, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert [file.name for file in (tmp_path / "loaded").iterdir()] == ["libdriverlike.so"]


def test_a_compiler_that_outlived_its_run_is_left_to_finish(tmp_path):
    (tmp_path / "lock").touch()
    compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"], cwd=tmp_path)
    started = time.monotonic()
    _clear_dead_build(tmp_path)
    assert time.monotonic() - started > 0.5
    # It is a zombie until it is waited for, and works nowhere by then.
    assert compiler.wait() == 0
    assert not (tmp_path / "lock").exists()


def test_the_processor_is_asked_once_and_again_where_the_answer_is_damaged(tmp_path, monkeypatch):
    asked = []
    ask = cpuinfo.get_cpu_info

    def ask_and_count():
        asked.append(1)
        return ask()

    monkeypatch.setattr(cpuinfo, "get_cpu_info", ask_and_count)

    counting = cpuinfo.get_cpu_info

    def answer() -> dict:
        """As a new process would get it."""
        monkeypatch.setattr(cpuinfo, "get_cpu_info", counting)
        _remember_the_processor(tmp_path)
        return cpuinfo.get_cpu_info()

    info = answer()
    assert info["arch"] == ask()["arch"]
    (file,) = (tmp_path / "operators").glob("processor-*.json")
    assert read_json(file) == info
    assert answer() == info
    assert len(asked) == 1
    file.write_text("{")
    assert answer()["flags"] == info["flags"]
    assert len(asked) == 2
