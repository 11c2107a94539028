"""DeepSpeed's operators: no leftover of a killed run delays the next one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time

import pytest

from engines import FAKE_GPU, ROOT
from forked import run_module
from study.config.errors import Unsupported, UserError
from study.config.strategies import read_strategy
from study.host import operators
from study.host.folders import COMPILES
from study.host.machine import operator_build_folder
from study.host.stacks import Stack


# DeepSpeed itself loads the last one, before its asynchronous I/O.
@pytest.mark.parametrize(("strategy", "operator"), [("zero0", "deepspeed_shm_comm"), ("zero3_nvme", "pin_memory")])
def test_a_lock_of_a_killed_run_delays_no_other_run(strategy, operator, tmp_path, monkeypatch):
    if strategy == "zero3_nvme" and not operators.is_libaio_installed():
        pytest.skip("libaio is not installed")
    # Runs of other tests use the folder itself at the same time.
    built = shutil.copytree(os.environ["TORCH_EXTENSIONS_DIR"], tmp_path / "operators")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(built))
    lock = built / operator / "lock"
    lock.touch()
    loaded = run_module([sys.executable, "-m", "study.host.operators", strategy], check=True)
    assert (loaded.returncode, "will not run" in loaded.stdout, lock.exists()) == (0, False, False)


def test_the_installation_compiles_the_last_operator_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = subprocess.run(["make", "-nB", "install"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m study.host.operators --last_first zero3_nvme &" in recipe
    if not operators.is_libaio_installed():
        pytest.skip("libaio is not installed")
    loaded: list[str] = []
    monkeypatch.setattr(operators, "load_operator", lambda builder, _: loaded.append(builder.name))
    operators.main(["zero3_nvme"])
    operators.main(["zero3_nvme"], last_first=True)
    first, last = loaded[: len(loaded) // 2], loaded[len(loaded) // 2 :]
    assert (first[0], first[-1], last) == ("deepspeed_shm_comm", "async_io", first[::-1])


def test_machines_that_share_a_cache_build_for_the_cpu_that_each_has(tmp_path, monkeypatch):
    folder, older_folder = operator_build_folder(tmp_path), operator_build_folder(tmp_path, "deepspeed-0.16.9")
    assert operator_build_folder(tmp_path) == folder != older_folder
    monkeypatch.setattr("study.host.machine.cpu_info", lambda: {"flags": "fpu avx512f"})
    assert operator_build_folder(tmp_path) != folder
    assert operator_build_folder(tmp_path, "deepspeed-0.16.9") not in (folder, older_folder)


def test_a_stack_with_the_installed_torch_and_deepspeed_takes_the_installed_operators(tmp_path, monkeypatch):
    monkeypatch.setenv("ZERO_STUDY_CACHE", str(tmp_path))
    variable = "TORCH_EXTENSIONS_DIR"
    assert Stack("a", {"accelerate": "1.7.0"}).environment({})[variable] == str(operator_build_folder(tmp_path))
    for package in ("torch", "deepspeed"):
        expected = operator_build_folder(tmp_path, "b")
        assert Stack("b", {package: "0.1", "accelerate": "1.7.0"}).environment({})[variable] == str(expected)


def with_a_gpu(*command: str, **environment: str) -> str:
    environment = {"PYTHONPATH": os.pathsep.join([str(FAKE_GPU), str(ROOT)]), **environment}
    replaced = {"CUDA_VISIBLE_DEVICES", "TORCH_EXTENSIONS_DIR"}
    result = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={name: value for name, value in os.environ.items() if name not in replaced} | environment,
    )
    return result.stdout


def test_builds_with_visible_gpus_are_separate_and_nothing_compiles_without_the_toolkit(tmp_path):
    """DeepSpeed links asynchronous I/O with CUDA on a GPU: a common folder would be rebuilt at each change."""
    ask = "import sys, pathlib, study.host.machine as box; print(box.operator_build_folder(pathlib.Path(sys.argv[1])))"
    without_gpus = with_a_gpu("-c", ask, str(tmp_path), CUDA_VISIBLE_DEVICES="").strip()
    assert without_gpus == str(operator_build_folder(tmp_path))
    assert with_a_gpu("-c", ask, str(tmp_path)).strip() not in ("", without_gpus)
    if operators.toolkit_version() is not None or not operators.is_libaio_installed():
        pytest.skip("a CUDA toolkit is here, or libaio is not installed")
    printed = with_a_gpu("-m", "study.host.operators", "zero3_nvme", ZERO_STUDY_CACHE=str(tmp_path))
    says = "zero3_nvme will not run here: DeepSpeed links its operator async_io with CUDA: there is no toolkit."
    assert says in printed
    assert "nvcc included" in printed
    assert COMPILES not in printed
    assert not [*tmp_path.rglob("*.o")]


@pytest.mark.parametrize(
    ("text", "says", "fix"),
    [
        ("#include <nowhere/Python.h>", "error: ", "python3-dev"),
        ("int x = y;", "error: ", "g++, ninja"),
        ("int x;", "cannot find -lnowhere", "g++, ninja"),
    ],
)
def test_an_operator_that_does_not_build_is_refused_with_the_cause_and_the_package(
    monkeypatch, tmp_path, text, says, fix
):
    from deepspeed.ops.op_builder.builder import OpBuilder

    class Own(OpBuilder):
        def absolute_name(self) -> str:
            return self.name

        def sources(self) -> list[str]:
            return [str(tmp_path / "own.cpp")]

        def extra_ldflags(self) -> list[str]:
            return ["-lnowhere"]

    (tmp_path / "own.cpp").write_text(text)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr("study.host.operators.builders", lambda strategy: [Own(name="own_operator")])
    with pytest.raises(Unsupported, match="own_operator does not build") as refused:
        operators.build_operators(read_strategy("zero1"), tmp_path)
    assert says in refused.value.problem
    assert refused.value.fix.startswith(f"install {fix}")


def make_cuda_operator(tmp_path, monkeypatch):
    """Return the builder of an operator that compiles for the CPU, and parses the architectures as on a GPU."""
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder, OpBuilder

    class Own(CUDAOpBuilder):
        def absolute_name(self) -> str:
            return self.name

        def sources(self) -> list[str]:
            return [str(tmp_path / "own.cpp")]

        def cxx_args(self) -> list[str]:
            return ["-std=c++20"]

        def nvcc_args(self) -> list[str]:
            return self.compute_capability_args()

    # A module of Python without torch's headers, which take a minute.
    (tmp_path / "own.cpp").write_text(
        "#include <Python.h>\n"
        'static PyModuleDef own = {PyModuleDef_HEAD_INIT, "own", nullptr, -1, nullptr};\n'
        "PyMODINIT_FUNC PyInit_own_cuda_operator() { return PyModule_Create(&own); }\n"
    )
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    builder = Own(name="own_cuda_operator")
    monkeypatch.setattr("study.host.operators.builders", lambda strategy: [builder])
    return builder


def test_an_operator_builds_with_architectures_that_torch_accepts_and_deepspeed_cannot_parse(tmp_path, monkeypatch):
    builder = make_cuda_operator(tmp_path, monkeypatch)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    with pytest.raises(ValueError, match=r"invalid literal for int\(\) with base 10: '0a'"):
        builder.load(verbose=False)
    printed: list[str] = []
    operators.build_operators(read_strategy("zero1"), tmp_path, printed.append)
    assert builder.name in builder._loaded_ops
    assert [line for line in printed if "TORCH_CUDA_ARCH_LIST=9.0a" in line] == [
        "TORCH_CUDA_ARCH_LIST=9.0a has letters that DeepSpeed cannot parse: own_cuda_operator is built for 9.0"
    ]
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0a"
    # DeepSpeed's engine loads it from its cache, and parses nothing again.
    assert builder.load(verbose=False) is builder._loaded_ops[builder.name]
    # Another process loads the built one, and prints no line.
    builder._loaded_ops.clear()
    printed.clear()
    operators.build_operators(read_strategy("zero1"), tmp_path, printed.append)
    assert printed == []


def test_architectures_that_no_letter_explains_are_named_instead_of_a_missing_compiler(tmp_path, monkeypatch):
    make_cuda_operator(tmp_path, monkeypatch)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(Unsupported) as refused:
        operators.build_operators(read_strategy("zero1"), tmp_path, print)
    assert refused.value.problem == (
        "DeepSpeed cannot parse TORCH_CUDA_ARCH_LIST=Hopper for its operator own_cuda_operator"
        " (invalid literal for int() with base 10: 'Hopper')"
    )
    assert refused.value.fix.startswith("export TORCH_CUDA_ARCH_LIST=9.0")
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "Hopper"


@pytest.mark.parametrize(
    ("exported", "parsable"),
    [
        ("9.0a", "9.0"),
        ("10.0a+PTX", "10.0+PTX"),
        ("8.0 9.0a;10.3f+PTX", "8.0;9.0;10.3+PTX"),
        ("9.0;9.0a", "9.0"),
        ("8.0 9.0+PTX", "8.0 9.0+PTX"),
        ("Hopper", "Hopper"),
        ("", ""),
    ],
)
def test_only_letters_leave_the_list_of_architectures(exported, parsable):
    assert operators.without_letters(exported) == parsable


def test_an_invalid_build_folder_is_named_instead_of_a_missing_compiler(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "builds"))
    with pytest.raises(UserError, match=r"TORCH_EXTENSIONS_DIR .*/file/builds cannot be a folder") as refused:
        operators.configure_build_environment(tmp_path)
    assert "unset it" in refused.value.fix


def test_an_operator_linked_with_cuda_finds_the_loaded_library(tmp_path, monkeypatch):
    """A machine that only runs CUDA has libcuda.so.1, but not libcuda.so."""
    library, source = tmp_path / "libdriverlike.so.1", tmp_path / "main.c"
    source.write_text("int answer(void); int main(void) { return answer() - 42; }")
    compiler = ["gcc", "-x", "c", "-shared", "-Wl,-soname,libdriverlike.so.1", "-o", str(library), "-"]
    subprocess.run(compiler, input="int answer(void) { return 42; }", text=True, check=True)
    ctypes.CDLL(str(library))
    monkeypatch.delenv("LIBRARY_PATH", raising=False)
    link = ["gcc", str(source), "-ldriverlike", "-o", str(tmp_path / "main")]
    assert subprocess.run(link, capture_output=True).returncode
    for _ in range(2):
        operators.symlink_loaded_libraries(tmp_path / "loaded", ["libdriverlike"])
    subprocess.run(link, check=True)
    subprocess.run([str(tmp_path / "main")], check=True, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert [file.name for file in (tmp_path / "loaded").iterdir()] == ["libdriverlike.so"]


def test_a_compiler_that_outlived_its_run_is_left_to_finish(tmp_path):
    (tmp_path / "lock").touch()
    compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"], cwd=tmp_path)
    started = time.monotonic()
    operators._clear_dead_build(tmp_path)
    assert time.monotonic() - started > 0.5
    # The compiler is a zombie until `wait`, and no longer works then.
    assert compiler.wait() == 0
    assert not (tmp_path / "lock").exists()
