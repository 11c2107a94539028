"""`study why`: each message is one of the installed code, and is found in a log as it is printed."""

from __future__ import annotations

import json
import random
import re
import shlex
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from study.advisor.full_gpu import find_logits, read_full_gpu
from study.advisor.full_gpu_moment import SAVING_FUNCTIONS, STATE_FUNCTIONS
from study.advisor.why_command import FirstError, find_messages, find_unknown_error, read_messages, read_text
from study.cli import COMMANDS, main
from study.config.errors import UserError

MESSAGES = read_messages()


def site_packages() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


DATA = Path(__file__).parents[1] / "data"


def source_texts(message) -> list[str]:
    """Return the constant parts of a message."""
    return [part for text in message.text for part in text.split(" ... ")]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda it: it.id)
def test_a_message_is_one_of_the_installed_code(message) -> None:
    assert bool(message.file) != bool(message.place)
    assert message.says
    assert message.fix
    if message.file.endswith(".py"):
        source = (site_packages() / message.file).read_text(encoding="utf-8")
        # Python joins adjacent texts.
        joined = re.sub('"f?"', "", "".join(source.split()))
        assert all("".join(text.split()) in joined for text in source_texts(message)), message.text
        assert all("".join(words.split()) in joined for words in message.unless), message.unless
    if message.see:
        assert shlex.split(message.see)[:2] == ["study", message.see.split()[1]]
        assert message.see.split()[1] in COMMANDS


def test_a_message_of_a_compiled_library_is_in_it() -> None:
    files = {message.file for message in MESSAGES if message.file.endswith(".so")}
    assert files == {f"torch/lib/{name}.so" for name in ("libc10", "libtorch_cpu", "libtorch_python")}
    for name in files:
        texts = {text.encode() for message in MESSAGES if message.file == name for text in source_texts(message)}
        with (site_packages() / name).open("rb") as file:
            end = b""
            # Half a gigabyte, and the texts are near its beginning.
            while texts and (block := file.read(2**24)):
                texts = {text for text in texts if text not in end + block}
                end = block[-1000:]
        assert not texts, name


def test_ids_are_unique_and_no_message_finds_another() -> None:
    assert len({message.id for message in MESSAGES}) == len(MESSAGES)
    for message in MESSAGES:
        for text in message.text:
            assert [item.message.id for item in find_messages(text)] == [message.id]


REPORTED = yaml.safe_load((DATA / "reported_messages.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("report", REPORTED, ids=lambda it: it["finds"][0])
def test_a_line_that_people_report_is_known(report) -> None:
    assert [item.message.id for item in find_messages(report["line"])] == report["finds"]


def test_a_log_has_its_messages_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "step 1\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "[rank0]: Watchdog caught collective operation timeout\n"
        "[rank0]: Watchdog caught collective\n  operation timeout"
    )
    assert main(["why", str(log)]) == 0
    page = capsys.readouterr().out
    assert page.index("line 2: [rank1]") < page.index("line 3, 2 times: [rank0]")
    assert "see: study advise MODEL" in page
    assert main(["why", str(log), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(item["id"], item["line"]) for item in document["messages"]] == [("out-of-memory", 2), ("watchdog", 3)]


def test_a_healthy_log_has_no_known_message() -> None:
    # A Trainer's run under DeepSpeed on a CPU, and lines of NCCL, Slurm, DeepSpeed and Accelerate as GPUs have them.
    text = (DATA / "healthy_train.log").read_text(encoding="utf-8")
    assert text.count("\n") >= 200
    assert [(item.message.id, item.first_text) for item in find_messages(text)] == []
    assert find_unknown_error(text, []) is None


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-30 [INFO] expected scalar type check passed",
        "Installed CUDA version 12.4 does not match the version torch was compiled with 12.1 but since the APIs are "
        "compatible, accepting this combination",
        "[WARNING] cpu_adam compatibility check failed (CUDA_HOME does not exist, unable to compile CUDA op(s)), "
        "treating the op as not compatible",
        "Process 7 exits with return code = -95",
        "loss: nano-gpt",
        "NCCL INFO NET/Plugin : Plugin load returned 2 : libnccl-net.so: cannot open shared object file: No such file",
        "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB ib0:10.0.1.12<0>",
        "NCCL WARN NET/IB : mlx5_0:1 Got async event : port active",
        # Code for 12.0 runs on 12.1.
        "Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.\n    Minimum and Maximum cuda capability supported "
        "by this version of PyTorch is\n    (8.0) - (12.0)",
    ],
)
def test_a_harmless_line_has_no_message(line: str) -> None:
    assert find_messages(line) == []


def test_deepspeed_accepts_no_other_minor_release_of_cuda_13() -> None:
    source = (site_packages() / "deepspeed/ops/op_builder/builder.py").read_text(encoding="utf-8")
    table = re.search(r"cuda_minor_mismatch_ok = \{(.*?)\n\}", source, re.DOTALL)
    assert table is not None
    assert re.findall(r"^ +(\d+):", table[1], re.MULTILINE) == ["10", "11", "12"]
    (message,) = find_messages(
        "Installed CUDA version 13.1 does not match the version torch was compiled with 13.0, unable"
    )
    assert "13.0 with 13.1 is rejected, too" in message.message.says


def test_a_gpu_before_turing_needs_the_build_for_cuda_12_6() -> None:
    import torch.cuda

    builds = {cuda: build["x86_64"] for cuda, build in torch.cuda.PYTORCH_RELEASES_CODE_CC.items()}
    for capability in (60, 70):
        assert [cuda for cuda, has in builds.items() if capability in has] == ["12.6"]
    assert all(75 in has and 86 in has for has in builds.values())
    source = (site_packages() / "torch/cuda/__init__.py").read_text(encoding="utf-8")
    form = "{} with CUDA capability sm_{} is not compatible with the current PyTorch installation."
    assert form in source
    assert "which is of compute capability (CC) {device_cc // 10}.{device_cc % 10}." in source
    answers = {capability: find_messages(form.format("GPU", capability)) for capability in (35, 60, 61, 70, 80, 120)}
    assert [messages[0].message.id for messages in answers.values()] == ["gpu-older-than-torch"] * 4 + [
        "gpu-newer-than-torch"
    ] * 2
    assert all(len(messages) == 1 for messages in answers.values())
    assert "/whl/cu126" in answers[70][0].message.fix
    assert "cu128 or newer" in answers[120][0].message.fix


def test_a_weight_that_stage_3_did_not_gather_is_printed_as_its_summary() -> None:
    zero = site_packages() / "deepspeed/runtime/zero"
    coordinator = (zero / "partitioned_param_coordinator.py").read_text(encoding="utf-8")
    assert "assert param.ds_status == ZeroParamStatus.AVAILABLE, param.ds_summary()" in coordinator
    assert "still have inflight params" not in coordinator
    assert '"status": slf.ds_status.name' in (zero / "partition_parameters.py").read_text(encoding="utf-8")


def test_a_warning_of_healthy_runs_is_known_if_it_is_asked_for() -> None:
    line = (
        "Detected kernel version 4.18.0, which is below the recommended minimum of 5.5.0; this can cause the process "
        "to hang."
    )
    (message,) = find_messages(line)
    assert message.message.fix.startswith("nothing, if the run goes on")
    assert find_messages(line + "\nstep" * 20) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("UserWarning: 'pin_memory' argument is set as true but no accelerator is found, then", "no GPU"),
        ("Trainer.tokenizer is now deprecated. You should use `Trainer.processing_class` instead.", "processing_class"),
        (
            "Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused"
            " parameters in the forward pass.",
            "without a gradient",
        ),
        ("`torch_dtype` is deprecated! Use `dtype` instead!", "the name dtype"),
    ],
)
def test_a_log_with_warnings_of_healthy_runs_alone_has_nothing_that_ends_a_run(line, says, tmp_path, capsys) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"{line}\n" + "step\n" * 20)
    assert main(["why", str(log)]) == 3
    page = " ".join(capsys.readouterr().out.split())
    assert page.startswith("nothing in this text that is known ends a run")
    assert "look for the first Traceback" in page
    assert "do: nothing" in page
    assert says in page
    main(["why", str(log), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["messages"], len(document["warnings_of_healthy_runs"])) == ([], 1)
    # With an error the warning is not named.
    log.write_text(f"{line}\nCUDA out of memory\n" + "step\n" * 20)
    assert main(["why", str(log)]) == 0
    assert says not in capsys.readouterr().out


def test_a_watchdog_names_the_setting_of_the_trainer_and_the_test_of_pcie() -> None:
    (message,) = find_messages(
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE)"
    )
    assert "ddp_timeout" in message.message.fix
    assert "NCCL_P2P_DISABLE=1" in message.message.fix
    trainer = (site_packages() / "transformers/training_args.py").read_text(encoding="utf-8")
    assert "ddp_timeout: int" in trainer


def test_each_setting_that_deepspeed_removed_has_its_message_known() -> None:
    from deepspeed.runtime import config

    removed = {**config._REMOVED_TOP_LEVEL_CONFIG_KEYS, **config._REMOVED_ZERO_CONFIG_KEYS}
    assert len(removed) >= 14
    for key, text in removed.items():
        line = f"deepspeed.runtime.config.DeepSpeedConfigError: {text}"
        assert [item.message.id for item in find_messages(line)] == ["removed-setting"], key


def test_a_loss_scale_of_1_is_not_waited_for_and_a_static_one_is_named() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=2, scale_window=1000, min_scale=1, delayed_shift=1, consecutive_hysteresis=False
    )
    assert (scaler.min_scale, scaler.raise_error_at_min_scale) == (1, True)
    (message,) = find_messages("[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1")
    assert message.message.fix.startswith("at a scale of 1 at once")
    (static,) = find_messages(
        "[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated."
    )
    assert "static (fp16.loss_scale above 0)" in static.message.says
    assert '"loss_scale": 0' in static.message.fix


def test_a_full_disk_may_be_that_of_swap_files() -> None:
    (message,) = find_messages("OSError: [Errno 28] No space left on device: '/local_nvme/zero_stage_3/optimizer'")
    assert "the swap files in nvme_path" in message.message.says
    assert "For nvme_path: " in message.message.fix


def test_messages_of_infiniband_and_slurm_are_in_the_order_of_the_log() -> None:
    log = (
        f"{WATCHDOG}node7:99:120 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : port error\n"
        "node7:99:120 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.8<4000> with status=12 opcode=0 len=0 "
        "vendor err 129 (Send)\nslurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n"
        "slurmstepd: error: *** JOB 7 ON node7 CANCELLED AT 2026-11-30T10:00:00 DUE TO TIME LIMIT ***\n"
    )
    places = [(item.message.id, item.line) for item in find_messages(log)]
    ids = ("watchdog", "ib-port", "ib-completion", "killed", "slurm-time-limit")
    assert places == [(name, line) for line, name in enumerate(ids, start=1)]


WATCHDOG = "[E ProcessGroupNCCL.cpp:475] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2)\n"
FRAME = '  File "train.py", line 640, in main\n    step()\n'


def test_an_unknown_first_error_is_printed_before_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"step 1\nTraceback (most recent call last):\n{FRAME}ValueError: my loss has no rows\n{WATCHDOG}")
    assert main(["why", str(log)]) == 0
    page = capsys.readouterr().out
    assert page.startswith("first error in the log, unknown: line 5: ValueError: my loss has no rows\nline 6: [E ")
    assert main(["why", str(log), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["unknown_first_error"] == {"line": 5, "text": "ValueError: my loss has no rows"}
    # Also where nothing is known.
    assert main(["why", f"Traceback (most recent call last):\n{FRAME}ValueError: my loss has no rows"]) == 3
    assert "unknown: line 4: ValueError: my loss has no rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "error"),
    [
        # Another rank prints between, and the error of a chain is its last.
        (
            '[rank0]: Traceback (most recent call last):\n[rank0]:   File "a.py"\n[rank1]: KeyError: 1\n'
            "[rank0]: KeyError: 'x'\n\n[rank0]: During handling of the above exception, another exception occurred:\n\n"
            '[rank0]: Traceback (most recent call last):\n[rank0]:   File "b.py"\n[rank0]: my.DataError: no x\n',
            FirstError(10, "[rank0]: my.DataError: no x"),
        ),
        # The second error is another one.
        (
            f"Traceback (most recent call last):\n{FRAME}KeyError: 1\n"
            f"Traceback (most recent call last):\n{FRAME}OSError: 2\n",
            FirstError(4, "KeyError: 1"),
        ),
        # A known message, also on an indented line that goes on.
        (f"Traceback (most recent call last):\n{FRAME}RuntimeError: CUDA out of memory. Tried\n", None),
        (
            f"Traceback (most recent call last):\n{FRAME}RuntimeError: Error(s) in loading state_dict for T5:\n"
            "\tsize mismatch: copying a param with shape torch.Size([0]) from checkpoint\n",
            None,
        ),
        # Launchers name the process.
        (f"Traceback (most recent call last):\n{FRAME}subprocess.CalledProcessError: Command 'x' returned\n", None),
        ("step 1\nno error\n", None),
        ("Traceback (most recent call last):\n  File", None),
    ],
)
def test_the_first_error_is_the_end_of_the_first_traceback(text: str, error: FirstError | None) -> None:
    assert find_unknown_error(text + WATCHDOG, find_messages(text + WATCHDOG)) == error


ENGINE_CORE = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
SPAWNED = (
    "Traceback (most recent call last):\n"
    '  File "/env/torch/multiprocessing/spawn.py", line 215, in join\n'
    "    raise ProcessRaisedException(msg, error_index, failed_process.pid)\n"
    "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated with the following error:\n"
)


def print_page(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["why", text]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "prefix",
    ["", "ERROR 11-30 10:00:00 [core.py:718] ", "(EngineCore_0 pid=71) ERROR 11-30 10:00:00 [core.py:718] ", "1: "],
)
def test_the_error_before_a_report_of_it_is_the_cause(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = f"{prefix}ValueError: head_dim 72 has no kernel"
    assert print_page(f"{unknown}\n{ENGINE_CORE}", capsys).startswith(
        f"first error in the log, unknown: line 1: {unknown}\nline 2: RuntimeError: Engine core"
    )
    # The cause is also first if the report is printed before it.
    cause = f"{prefix}ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0."
    assert print_page(f"{cause}\n{ENGINE_CORE}", capsys).startswith("line 1: ")
    assert print_page(f"{ENGINE_CORE}{cause}\n", capsys).startswith("line 2: ")
    assert "unknown" not in print_page(f"{ENGINE_CORE}{cause}\n", capsys)


def test_the_error_of_a_spawned_process_is_the_cause_and_not_that_of_its_launcher(capsys) -> None:
    inner = f"Traceback (most recent call last):\n{FRAME}"
    page = print_page(f"{SPAWNED}{inner}ValueError: my loss has no rows\n", capsys)
    assert page.startswith("first error in the log, unknown: line 10: ValueError: my loss has no rows\n")
    page = print_page(f"{SPAWNED}{inner}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", capsys)
    assert page.startswith("line 10: torch.OutOfMemoryError")
    # notebook_launcher repeats it, and a chain ends with the launcher's error.
    repeated = (
        "\nThe above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "launchers.py"\n'
        "RuntimeError: An issue was found when launching the training: \n\n-- Process 1 terminated with the following "
        f"error:\n{inner}KeyError: 'text'\n"
    )
    page = print_page(f"{SPAWNED}{inner}KeyError: 'text'\n{repeated}", capsys)
    assert page.startswith("first error in the log, unknown: line 10: KeyError: 'text'\n")


def test_the_error_of_a_notebook_has_no_colon_after_its_traceback() -> None:
    notebook = (
        "KeyError                                  Traceback (most recent call last)\n"
        "Cell In[3], line 2\n----> 2 d['x']\n\nKeyError: 'x'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "ValueError                                Traceback (most recent call last)\n----> 4 f()\n\n"
        "ValueError: no column x\n"
    )
    assert find_unknown_error(notebook, []) == FirstError(12, "ValueError: no column x")
    # A warning of a logger after a known cause is none of it.
    log = "CUDA out of memory\nValueError: mine\n"
    assert find_unknown_error(log, find_messages(log)) is None


def test_a_rank_that_reports_anothers_error_does_not_hide_it() -> None:
    text = (
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "a.py"\n[rank1]: torch.distributed.'
        "DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value "
        "store by key '0', but store->get('0') got error: Connection reset by peer\n"
        '[rank0]: Traceback (most recent call last):\n[rank0]:   File "b.py"\n[rank0]: OSError: no config.json\n'
    )
    assert find_unknown_error(text, find_messages(text)) == FirstError(6, "[rank0]: OSError: no config.json")
    # Ranks print at the same time.
    lines = text.splitlines()
    mixed = "\n".join(lines[index] for index in (0, 3, 1, 4, 5, 2)) + "\n"
    assert find_unknown_error(mixed, find_messages(mixed)) == FirstError(5, "[rank0]: OSError: no config.json")


def test_what_is_a_report_says_where_to_look() -> None:
    reports = {message.id for message in MESSAGES if message.is_consequence}
    assert reports >= {"child-failed", "engine-core", "spawned-process", "dump-signal", "no-unique-id"}
    text = "Received a dump signal due to a collective timeout from this local rank\nexitcode: -9\n"
    assert [item.message.id for item in find_messages(text)] == ["killed", "dump-signal"]


@pytest.mark.parametrize(
    "text",
    ["no name Error: x\n" * 600_000, "DistBackendError: NCCL communicator was aborted on rank 1\n" * 100_000],
    ids=["names", "reports"],
)
def test_a_long_log_of_one_line_is_searched_for_its_first_error_in_a_second(text: str) -> None:
    began = time.process_time()
    assert find_unknown_error(text, []) is None
    # Minutes, if each line were searched to the end of the log.
    assert time.process_time() - began < 3


def test_a_known_message_before_an_unknown_traceback_does_not_hide_it() -> None:
    text = f"OVERFLOW! Rank 0 Skipping step.\nTraceback (most recent call last):\n{FRAME}ValueError: mine\n"
    assert find_unknown_error(text, find_messages(text)) == FirstError(5, "ValueError: mine")


def test_an_unknown_message_ends_with_3_and_a_missing_log_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "nothing", "of", "this", "kind"]) == 3
    assert "no message of this text is known" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"there is no file train\.log"):
        read_text(["train.log"])
    assert main(["why", "Attempting", "to", "unscale", "FP16", "gradients."]) == 0
    assert "do:  load the model in fp32" in " ".join(capsys.readouterr().out.split("\n"))


def test_a_message_that_no_file_name_can_have_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    # 255 bytes are the most, and these are 300 letters of three.
    assert main(["why", "内" * 300 + " CUDA out of memory"]) == 0
    assert "why: the peak of a rank exceeds the GPU" in capsys.readouterr().out


def test_a_log_with_a_message_in_each_of_many_lines_is_read_in_seconds() -> None:
    text = "".join(f"step {step} {'.' * 60}\nOVERFLOW! Rank 0 Skipping step.\n" for step in range(100_000))
    began = time.process_time()
    (message,) = find_messages(text)
    assert (message.line, message.count) == (2, 100_000)
    # Minutes, if each line were counted from the beginning.
    assert time.process_time() - began < 5


def test_what_a_log_has_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "\x1b[31mCUDA out of memory\x07"]) == 0
    assert "\x1b" not in capsys.readouterr().out


# torch's texts, by release.
FULL_GPU_FORMS = {
    "new": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {0}. GPU 0 has a total capacity of {1} of which "
        "{2} is free. {processes} Of the allocated memory {3} is allocated by PyTorch, {private}and {4} is reserved by "
        "PyTorch but unallocated."
    ),
    "old": (
        "RuntimeError: CUDA out of memory. Tried to allocate {0} (GPU 0; {1} total capacity; {3} already allocated; "
        "{2} free; {4} reserved in total by PyTorch)"
    ),
    "oldest": (
        "RuntimeError: CUDA out of memory. Tried to allocate {0} (GPU 0; {1} total capacity; {3} already allocated; "
        "{2} free; {4} cached)"
    ),
}
FULL_GPU_FORMS["typo"] = FULL_GPU_FORMS["new"].replace("capacity", "capacty")
FULL_GPUS = yaml.safe_load((DATA / "full_gpus.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("report", FULL_GPUS, ids=lambda it: "-".join(it["source"].split("/")[-3::2]))
def test_the_figures_of_a_full_gpu_say_what_to_do(report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pools = report.get("private", "0 bytes")
    private = f"with {pools} allocated in private pools (e.g., CUDA Graphs), "
    form = FULL_GPU_FORMS[report["form"]]
    text = form.format(*report["sizes"], processes=report.get("processes", ""), private=private)
    log = tmp_path / "train.log"
    # The next rank's figures are not of this message.
    another = FULL_GPU_FORMS["old"].format("1 GiB", "2 GiB", "9 GiB", "3 GiB", "4 GiB")
    log.write_text(f"[rank3]: {text}\n[rank0]: {another}")
    # A message in quotes is longer than a file's name may be.
    assert main(["why", text]) == 0
    assert "why: the peak of a rank exceeds the GPU" in capsys.readouterr().out
    assert main(["why", str(log), "--json"]) == 0
    (message,) = json.loads(capsys.readouterr().out)["messages"]
    assert len(message["do"]) == len(report["says"])
    for remedy, words in zip(message["do"], report["says"], strict=True):
        assert remedy.startswith(words)
    gpu = message["full_gpu"]
    assert gpu["capacity"] >= gpu["free"] + gpu["allocated"] + gpu["unused"]
    assert main(["why", str(log)]) == 0
    assert " in torch's pool without a tensor" in " ".join(capsys.readouterr().out.split())


def test_the_size_of_the_logits_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    # 32,768 tokens x 128,256 x 4 bytes = 15.656 GiB.
    text = FULL_GPU_FORMS["new"].format(
        "15.66 GiB", "79.10 GiB", "10.00 GiB", "60.00 GiB", "1.00 GiB", processes="", private=""
    )
    assert main(["why", text]) == 0
    page = capsys.readouterr().out
    assert "32,768 tokens in fp32 with a vocabulary of 128,256" in page
    assert any(item.tokens == 8192 and item.vocabulary == 151936 for item in find_logits(8192 * 151936 * 2))
    # Weights and pools have such sizes, and few micro-batches as many tokens.
    assert find_logits(3 * 2**30 + 5 * 2**20) == []
    assert find_logits(20 * 2**20) == []


def test_few_other_sizes_are_taken_for_logits() -> None:
    random_sizes = random.Random(1)
    sizes = [round(random_sizes.uniform(0.25, 40), 2) for _ in range(1000)]
    assert sum(bool(find_logits(round(size * 2**30), 2**30 // 200)) for size in sizes) < 0.12 * len(sizes)


def test_a_message_without_its_figures_has_no_parts() -> None:
    assert read_full_gpu("torch.OutOfMemoryError: CUDA out of memory.") is None
    assert read_full_gpu("Tried to allocate 2.00 GiB") is None
    (message,) = find_messages("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert message.memory is None
    assert message.remedies == [message.message.fix]


@pytest.mark.parametrize(
    ("before", "is_alone"),
    [
        ("", True),
        ("step 1, lora rank of 16, cuda:0\n[rank0]: ", True),
        ("[rank1]: ", False),
        ("world_size=2\n", False),
        ("tensors on cuda:1\n", False),
    ],
)
def test_a_gpu_alone_is_not_told_to_shard(before: str, is_alone: bool, capsys: pytest.CaptureFixture[str]) -> None:
    text = before + FULL_GPU_FORMS["new"].format(
        "500.00 MiB", "14.74 GiB", "200.00 MiB", "14.00 GiB", "100.00 MiB", processes="", private=""
    )
    assert main(["why", text]) == 0
    page = capsys.readouterr().out
    assert ("ZeRO" in page, "adapters on 4-bit weights" in page) == (not is_alone, is_alone)
    # Its strategies depend on the number of GPUs.
    assert "see: study advise MODEL --hardware BOX" in page
    assert "zero3" not in page


# File and function of each call, the innermost last.
OPTIMIZER_CALLS = [("accelerate/optimizer.py", "step"), ("torch/optim/adamw.py", "_init_group")]
CLOSURE_CALLS = [("torch/optim/adamw.py", "step"), ("lightning/pytorch/core/module.py", "training_step"), ("x.py", "f")]
CLOSURE_CALLS += [("torch/nn/functional.py", "linear")]
SAVING_CALLS = [("transformers/trainer.py", "save_model"), ("accelerate/accelerator.py", "get_state_dict")]
SAVING_CALLS += [("deepspeed/runtime/engine.py", "_zero3_consolidated_16bit_state_dict"), ("x.py", "all_gather")]
FSDP_CALLS = [("torch/distributed/fsdp/_state_dict_utils.py", "_full_pre_state_dict_hook"), ("x.py", "_alloc_storage")]
OPTIMIZER = "a smaller micro-batch and gradient checkpointing do little. State over more GPUs"


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (OPTIMIZER_CALLS, OPTIMIZER),
        ([("bitsandbytes/optim/optimizer.py", "init_state"), ("bitsandbytes/functional.py", "zeros")], OPTIMIZER),
        ([("deepspeed/runtime/zero/stage_1_and_2.py", "initialize_optimizer_states")], OPTIMIZER),
        (SAVING_CALLS, '"stage3_gather_16bit_weights_on_model_save": false'),
        (FSDP_CALLS, "fsdp_state_dict_type SHARDED_STATE_DICT"),
        ([("torch/autograd/graph.py", "_engine_run_backward")], ": a smaller micro-batch, gradient checkpointing"),
        (CLOSURE_CALLS, ": a smaller micro-batch, gradient checkpointing"),
        ([], ": a smaller micro-batch, gradient checkpointing"),
    ],
)
@pytest.mark.parametrize("rank", ["", "[rank1]: ", "3: "])
def test_the_remedy_of_a_full_gpu_follows_from_its_traceback(
    calls: list[tuple[str, str]], words: str, rank: str, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = [f'  File "/opt/site-packages/{file}", line 7, in {name}\n    call()\n    ^^^^^^' for file, name in calls]
    message = FULL_GPU_FORMS["new"].format(
        "520.00 MiB", "39.39 GiB", "300.00 MiB", "37.80 GiB", "200.00 MiB", processes="", private=""
    )
    lines = "\n".join(["Traceback (most recent call last):", *frames, message]).split("\n")
    # Another rank prints between the lines of this one. Without a launcher's prefix they are one text.
    between = '\n[rank0]:   File "torch/optim/adam.py", line 1, in step\n' if rank else "\n"
    assert main(["why", "world_size=2\n" + between.join(rank + line for line in lines)]) == 0
    assert words in capsys.readouterr().out


def test_the_gather_of_a_save_is_not_taken_for_logits() -> None:
    # 1.96 GiB: an embedding of 128,256 x 4,096 in fp32, or logits of 4,096 tokens.
    sizes = ("1.96 GiB", "31.74 GiB", "512.00 MiB", "29.50 GiB", "300.00 MiB")
    message = FULL_GPU_FORMS["new"].format(*sizes, processes="", private="")
    (full,) = find_messages(message)
    assert any("the size of the logits" in remedy for remedy in full.remedies)
    (full,) = find_messages(f'  File "a.py", line 7, in save_model\n{message}')
    assert [remedy[:12] for remedy in full.remedies] == ["while saving"]


def test_functions_that_save_or_make_state_are_those_of_the_installed_code() -> None:
    files = [
        *("torch/optim/adam.py", "torch/distributed/fsdp/_state_dict_utils.py", "transformers/trainer.py"),
        *("torch/distributed/fsdp/fully_sharded_data_parallel.py", "torch/distributed/checkpoint/state_dict.py"),
        *("accelerate/accelerator.py", "accelerate/utils/fsdp_utils.py", "deepspeed/runtime/engine.py"),
        *("deepspeed/runtime/zero/stage3.py", "deepspeed/runtime/zero/stage_1_and_2.py"),
    ]
    source = "".join((site_packages() / file).read_text(encoding="utf-8") for file in files)
    assert {name for name in SAVING_FUNCTIONS | STATE_FUNCTIONS if f"def {name}(" not in source} == set()
