"""Boxes by name: `8xH100`, `4x8xH100` for four nodes of eight, `A100-40`, or `this` for the box it runs on."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import re
import time

from study.config.errors import UserError, brief
from study.host.box import NOT_MEASURED, gpu_names, matmul_rates, measured_rates, this_box
from study.host.memory import available_cores, host_memory
from study.predictor.hardware import Device, find_device, known_devices
from study.predictor.request import LARGEST_JOB, Hardware


def whole(text: str, most: int = 10_000_000, what: str = "whole number") -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and 0 < int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no {what} from 1 to {most}")
    return int(text)


def real(text: str, below: float = 1e9) -> float:
    """Above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < below:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no number above 0")
    return number


# What people call the devices of hardware.yaml, and the network of one device to other nodes where several are common,
# GB/s: eight cards of 800 Gbit/s for eight B300, of 400 for eight H100, of 200 for eight A100 (DGX), four of 100 for
# eight V100 (DGX-1).
_NAMES: dict[str, tuple[str, float]] = {
    "T4": ("T4", 6.25),
    "L4": ("L4", 6.25),
    "A10": ("A10", 6.25),
    "A10G": ("A10G", 6.25),
    "A30": ("A30", 6.25),
    "A40": ("A40", 6.25),
    "L40": ("L40", 6.25),
    "L40S": ("L40S", 6.25),
    "3080": ("RTX 3080", 6.25),
    "3080-TI": ("RTX 3080 Ti", 6.25),
    "3090": ("RTX 3090", 6.25),
    "3090-TI": ("RTX 3090 Ti", 6.25),
    "4080": ("RTX 4080", 6.25),
    "4080-SUPER": ("RTX 4080 SUPER", 6.25),
    "4090": ("RTX 4090", 6.25),
    "5080": ("RTX 5080", 6.25),
    "5090": ("RTX 5090", 6.25),
    "A5000": ("RTX A5000", 6.25),
    "A6000": ("RTX A6000", 6.25),
    "6000-ADA": ("RTX 6000 Ada", 6.25),
    "PRO-6000": ("RTX PRO 6000", 6.25),
    "V100": ("V100 SXM2 32GB", 6.25),
    "V100-16": ("V100 SXM2 16GB", 6.25),
    "V100-32": ("V100 SXM2 32GB", 6.25),
    "V100-PCIE-16": ("V100 PCIe 16GB", 6.25),
    "V100-PCIE-32": ("V100 PCIe 32GB", 6.25),
    "A100": ("A100 SXM 80GB", 25.0),
    "A100-40": ("A100 SXM 40GB", 25.0),
    "A100-80": ("A100 SXM 80GB", 25.0),
    "A100-PCIE-40": ("A100 PCIe 40GB", 25.0),
    "A100-PCIE-80": ("A100 PCIe 80GB", 25.0),
    "A800": ("A800 SXM 80GB", 25.0),
    "H20": ("H20", 50.0),
    "H800": ("H800 SXM", 50.0),
    "H100": ("H100 SXM", 50.0),
    "H100-PCIE": ("H100 PCIe", 25.0),
    "H100-NVL": ("H100-NVL 94GB", 25.0),
    "H200": ("H200 SXM", 50.0),
    "GH200": ("GH200 96GB", 50.0),
    "GH200-144": ("GH200 144GB", 50.0),
    "B200": ("B200 SXM", 50.0),
    "B300": ("B300 SXM", 100.0),
}
BOX_NAMES = (*_NAMES, "this")
_SPEED = functools.partial(real, below=1e6)
_COUNT = r"([0-9]{1,99}) *x *"


def box_of(name: str) -> Hardware:
    """What a name means; refused with names like it where it means nothing."""
    count = re.fullmatch(rf"(?:{_COUNT})?(?:{_COUNT})?(?!{_COUNT})(?P<device>\w[\w .-]*)", name.strip(), re.IGNORECASE)
    if count is None:
        raise _unknown(name)
    numbers = [int(number) for number in count.groups()[:2] if number is not None]
    nodes, per_node = ([1] * (2 - len(numbers)) + numbers)[-2:]
    if not 0 < nodes * per_node <= LARGEST_JOB:
        raise UserError(f"{brief(name)} is no box: a count is out of range", f"use 1 to {LARGEST_JOB:,} GPUs")
    if count["device"].lower() == "this":
        if numbers:
            raise UserError(f"{brief(name)} is no box: `this` is one box as it is", "leave the number out")
        return _this()
    if (device := _device_of(count["device"])) is None:
        raise _unknown(name)
    return Hardware(name, device, per_node, nodes, network_gb_per_s=_network_gb_per_s(device))


def box_of_devices(device_name: str, ranks: int, nodes: int) -> Hardware:
    """Of GPUs by the name that their driver gives."""
    if (device := find_device(device_name)) is None:
        raise UserError(f"{brief(device_name)} is in no table of devices", "add it to study/predictor/hardware.yaml")
    return Hardware(device.name, device, ranks // nodes, nodes, network_gb_per_s=_network_gb_per_s(device))


def add_speed_arguments(parser: argparse.ArgumentParser) -> None:
    """What no name of a box says."""
    parser.add_argument(
        "--nvme_gb_per_s",
        type=_two_speeds,
        default=(Hardware.nvme_read_gb_per_s, Hardware.nvme_write_gb_per_s),
        metavar="READ,WRITE",
        help=f"what a node's drives do; by default {Hardware.nvme_read_gb_per_s:g},{Hardware.nvme_write_gb_per_s:g}",
    )
    parser.add_argument(
        "--network_gb_per_s", type=_SPEED, metavar="X", help="one GPU's share of its node's network, one direction"
    )
    parser.add_argument(
        "--host_gb_per_s", type=_SPEED, metavar="X", help="what the host's Adam reads and writes, all ranks of a node"
    )


def box_asked(options: argparse.Namespace) -> Hardware:
    """By the name, with the speeds that were given."""
    box, (read, write) = box_of(options.hardware), options.nvme_gb_per_s
    return dataclasses.replace(
        box, nvme_read_gb_per_s=read, nvme_write_gb_per_s=write,
        host_memory_gb_per_s=options.host_gb_per_s or box.host_memory_gb_per_s,
        network_gb_per_s=options.network_gb_per_s or box.network_gb_per_s,
    )  # fmt: skip


def _two_speeds(text: str) -> tuple[float, float]:
    try:
        read, write = map(_SPEED, text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no two numbers above 0, such as 3.5,2") from None
    return read, write


def _device_of(text: str) -> Device | None:
    """By the name that people use, or by the driver's."""
    if (known := _NAMES.get(_spelled(text))) is None:
        return find_device(text)
    return next(device for device in known_devices() if device.name == known[0])


def _network_gb_per_s(device: Device) -> float:
    return next(speed for name, speed in _NAMES.values() if name == device.name)


def _spelled(text: str) -> str:
    """`a100-80gb` is A100-80, `H100 SXM5` is H100, and `GeForce RTX_4090` is 4090."""
    spelled = re.sub(r"[ _]+", "-", text.upper())
    spelled = re.sub(r"^(NVIDIA-)?(TESLA-)?(GEFORCE-)?(RTX-?)?|-GENERATION$", "", spelled)
    return re.sub(r"-SXM\d?(?=-|$)|(?<=-\d\d)GB?$|(?<=-\d\d\d)GB?$", "", spelled)


def _unknown(name: str) -> UserError:
    if re.search(r"\bMIG\b|\b\dg\.\d+gb", name, re.IGNORECASE):
        return UserError(f"{brief(name)}: a MIG slice's speed is not known", "name a whole GPU")
    device = _spelled(re.sub(rf"^(?:{_COUNT})*", "", name.strip(), flags=re.IGNORECASE))
    near = [known for known in difflib.get_close_matches(device, BOX_NAMES, cutoff=0.5) if known[0] == device[0]]
    known = f"did you mean {' or '.join(near)}? a box is" if near else f"use one of {', '.join(BOX_NAMES)}, as in"
    return UserError(f"unknown box {brief(name)}", f"{known} 8xH100, or 4x8xH100 for four nodes")


def _this() -> Hardware:
    """The GPUs that a run would see, or, without any, its cores: a core is a device there, as `study` trains."""
    host_gib = host_memory().total_gib
    if gpus := gpu_names():
        if len(names := sorted(set(gpus))) > 1:
            raise UserError(f"this box has several kinds of GPU: {', '.join(names)}", "name one, as 2xA100-40")
        device = _measured(gpus[0], this_box().gpu_memory_gib[0])
        return Hardware("this", device, len(gpus), host_gib_per_node=host_gib, host_memory_gb_per_s=_copy_gb_per_s())
    cores, copied = available_cores(), _copy_gb_per_s()
    rates = _rates_of_a_core()
    device = Device(
        name="CPU core", pattern="CPU core", peak_tflops=dict.fromkeys(("fp32", "tf32", "bf16", "fp16")),
        memory_bandwidth_gb_per_s=copied / cores, memory_gib=0, matmul_tflops=rates,
        # Ranks meet in the host's memory: each byte is read and written by the sender, the kernel and the receiver.
        pcie_gb_per_s=copied / 6,
    )  # fmt: skip
    return Hardware(
        "this", device, cores, gathers_into_copies=True, host_gib_per_node=host_gib, host_memory_gb_per_s=copied
    )


def _measured(name: str, memory_gib: float) -> Device:
    device = find_device(name)
    if device is None and "MIG" in name:
        raise _unknown(name)
    if device is None:
        raise UserError(
            f"this box's {name} is not in study/predictor/hardware.yaml", "add its data sheet's figures there"
        )
    rates = matmul_rates(this_box()).get("tflops", {})
    return dataclasses.replace(device, memory_gib=memory_gib, matmul_tflops=device.matmul_tflops | rates)


def _rates_of_a_core() -> dict[str, float]:
    try:
        return dict(measured_rates(OMP_NUM_THREADS="1")["tflops"])
    except NOT_MEASURED as error:
        raise UserError(
            f"this box's rate could not be measured ({type(error).__name__})", "run `study doctor`, or name a box"
        ) from error


def _copy_gb_per_s(mebibytes: int = 256) -> float:
    """Read plus written, the best of three."""
    source, best = b"1" * (mebibytes * 2**20), math.inf
    target = memoryview(bytearray(source))
    for _ in range(3):
        started = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - started)
    return 2 * len(source) / best / 1e9
