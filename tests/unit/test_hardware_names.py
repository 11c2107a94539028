"""Names of hardware with words in any order, figures with units, and notices of assumed links."""

from __future__ import annotations

import itertools
import re

import pytest

from study.cli import main
from study.config.errors import UserError
from study.config.strategies import STRATEGY_DIRECTORY
from study.predictor.hardware import BOX_NAMES, Device, box_notices, to_box
from study.predictor.units import parse_speed

LISTED = [name for name in BOX_NAMES if name != "this"]
SUFFIXES = ("NVL", "PCIe", "SXM5", "40GB", "80GB", "141GB", "Ti", "D", "Laptop", "IB400", "FOO")


def find(name: str) -> Device | None:
    try:
        return to_box(name).device
    except UserError:
        return None


@pytest.mark.parametrize("name", LISTED)
def test_a_word_after_a_name_is_one_of_the_device_or_refused_however_it_is_joined(name: str) -> None:
    plain = to_box(name).device
    for suffix in SUFFIXES:
        spaced, hyphened, joined = (find(f"8x{name}{mark}{suffix}") for mark in (" ", "-", ""))
        assert spaced == hyphened, suffix
        # Two numbers in a row are not taken apart: A100-8080GB.
        assert joined in (spaced, None), suffix
        assert joined == spaced or suffix.endswith("GB"), suffix
        if spaced is None:
            continue
        assert suffix not in ("D", "Laptop", "IB400", "FOO")
        assert re.split("[ -]", spaced.name)[0] == re.split("[ -]", plain.name)[0]
        if suffix in ("NVL", "Ti"):
            assert suffix in spaced.name
        if suffix in ("PCIe", "SXM5"):
            assert (spaced.nvlink_gb_per_s is None) == (suffix == "PCIe")
        if suffix.endswith("GB"):
            assert f"{spaced.memory_gib:g}GB" == suffix


@pytest.mark.parametrize(
    ("model", "words"),
    [("A100", ["PCIE", "40GB"]), ("A100", ["SXM4", "40GB"]), ("V100", ["PCIE", "32GB"]), ("RTX", ["6000", "Ada"])],
)
def test_the_words_of_a_device_have_no_order_and_may_be_joined(model: str, words: list[str]) -> None:
    forms = [
        mark.join([model, *order])
        for order in itertools.permutations(words)
        for mark in (" ", "-", "_", "")
        # A number behind a number is not taken apart.
        if mark or not re.search(r"[0-9]\Z", model) or order[0] != "40GB"
    ]
    devices = {(device := find(form)) and device.name for form in forms}
    assert len(devices) == 1
    assert None not in devices


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ("memory=141GB,tflops=989,bandwidth=4.8TB/s", (141, 989, 4800)),
        ("memory=141000MB,tflops=0.989PF,bandwidth=4800GB/s", (141, 989, 4800)),
        ("memory=144384MiB,tflops=989TFLOPS,bandwidth=4800000MB/s", (141, 989, 4800)),
        ("memory=0.141TB,tflops=989000GFLOP/s,bandwidth=38.4Tbps", (141, 989, 4800)),
        ("memory=141GiB, tflops=989T, bandwidth=4.8TBps", (141, 989, 4800)),
    ],
)
def test_figures_of_a_gpu_have_the_units_that_are_written(figures: str, expected: tuple[float, ...]) -> None:
    device = to_box(figures).device
    assert (device.memory_gib, device.peak_tflops["bf16"], device.memory_bandwidth_gb_per_s) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["50", "50GB/s", "400Gb/s", "400Gbps", "400 Gbit/s", "400gbps", "0.4Tb/s", "5e1"])
def test_a_network_is_read_in_bytes_and_in_bits(text: str) -> None:
    assert parse_speed(text) == pytest.approx(50)


@pytest.mark.parametrize("text", ["400gb/s", "50x", "0", "-1", "nan", "inf", "50GT/s"])
def test_a_network_in_an_unclear_unit_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "gpt2", "--strategy", "zero3", "--hardware", "2x8xH100", f"--network_gb_per_s={text}"]
    assert main(command) == 2
    assert "is not a bandwidth such as 50, 50GB/s or 400Gb/s" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["HDR200", "EDR", "ndr"])
def test_a_kind_of_infiniband_leads_to_the_rate_that_a_gpu_has(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "gpt2", "--strategy", "zero3", "--hardware", "2x4xA100-40", f"--network_gb_per_s={text}"]
    assert main(command) == 2
    assert f"{text} is a kind of InfiniBand: write the rate of a card, divided by" in capsys.readouterr().err
    # HDR has 200 Gb/s, which are 25 GB/s, for four GPUs.
    assert parse_speed("50Gb/s") == 25 / 4


@pytest.mark.parametrize("command", ["predict", "advise", "explain"])
def test_a_network_of_a_node_is_shared_by_its_gpus(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """100 GbE of a machine with eight GPUs is 1.56 GB/s of each, and not 12.5."""
    words = {
        "predict": ["predict", "gpt2", "--strategy", "zero3"],
        "advise": ["advise", "gpt2"],
        "explain": ["explain", str(STRATEGY_DIRECTORY / "zero3.yaml"), "gpt2", "--world_size", "16"],
    }[command]
    pages = []
    for text in ("100Gb/s/node", "1.5625", "12.5GB/s/node"):
        assert main([*words, "--hardware", "2x8xA100", "--network_gb_per_s", text]) == 0
        pages.append(capsys.readouterr().out)
    assert "1.56 GB/s of network bandwidth per GPU, 12.5 per node (--network_gb_per_s)" in " ".join(pages[0].split())
    # Only the command that an answer prints has the flag's own words.
    assert len({re.sub(r"--network_gb_per_s \S+", "", page) for page in pages}) == 1


FIGURES = "memory=141GB,tflops=989,bandwidth=4.8TB/s"


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        (
            ["2x8xH200", "--network_gb_per_s", "400"],
            "400 GB/s of network per GPU, and the fastest adapters of the table have 100: did you mean 50 (400 Gb/s)?",
        ),
        (["2x8xH200", "--network_gb_per_s", "400Gb/s"], ""),
        (["2x8xB300", "--network_gb_per_s", "100"], ""),
        (["8xH200", "--network_gb_per_s", "400"], ""),
        (
            [f"8x{FIGURES}"],
            "the GPUs of a node are assumed to be linked by PCIe (31 GB/s); nvlink=GB/s sets a faster link",
        ),
        ([f"8x{FIGURES},nvlink=450"], ""),
        ([FIGURES], ""),
        ([f"8x{FIGURES}", "--bus_gb_per_s", "40"], ""),
        (["H200:32"], "H200:32 is one machine with 32 GPUs; 4x8xH200 is 4 nodes of 8"),
        (["16xH100"], "16xH100 is one machine with 16 GPUs; 2x8xH100 is 2 nodes of 8"),
        # Such machines exist.
        (["16xA100-40"], ""),
        (["16xV100"], ""),
        (["10x4090"], ""),
    ],
)
def test_a_speed_that_is_unlikely_or_assumed_is_named(
    words: list[str], notice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "gpt2", "--strategy", "zero3", "--hardware", *words]) == 0
    assert capsys.readouterr().err == f"notice: {notice}\n" * bool(notice)


def test_a_listed_machine_has_no_notice_and_the_help_names_every_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert not [notice for name in LISTED for notice in box_notices(to_box(f"2x8x{name}"))]
    with pytest.raises(SystemExit):
        main(["predict", "--help"])
    page = " ".join(capsys.readouterr().out.split())
    assert all(f"{key}=" in page for key in ("memory", "tflops", "bandwidth", "nvlink", "pcie", "network", "fp32"))
