"""GPUs from study/predictor/hardware.yaml, their peak rates, and boxes of them by name.

`8xH100` is a box, `4x8xH100` four nodes of eight, `A100-40` one GPU, `this` the box it runs on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import time
from pathlib import Path
from typing import get_args

from study.config.errors import UserError, brief, did_you_mean
from study.config.flags import Precision
from study.config.strategies import RANKS_OF_A_MACHINE
from study.config.yaml_sections import read_own
from study.host.box import NOT_MEASURED, gpu_names, matmul_rates, measured_rates, this_box
from study.host.memory import available_cores, host_memory

# Share that the driver shows where no data sheet gives it: that of A100 and V100.
_SHOWN = 0.985


@dataclasses.dataclass(frozen=True)
class Device:
    """One entry of hardware.yaml; data-sheet figures, dense."""

    name: str
    pattern: str
    # Left out of the hash, and equality compares it: a request can be a key of a cache.
    peak_tflops: dict[str, float | None] = dataclasses.field(hash=False)
    memory_bandwidth_gb_per_s: float
    memory_gib: float
    # Best matrix product that was measured, by precision; what is missing was not published.
    matmul_tflops: dict[str, float] = dataclasses.field(default_factory=dict, hash=False)
    # One direction, of one device.
    pcie_gb_per_s: float | None = None
    nvlink_gb_per_s: float | None = None
    # What the driver shows of memory_gib.
    visible_gib: float = 0.0
    # What people call it, and its share of a node's network, one direction.
    names: tuple[str, ...] = ()
    network_gb_per_s: float = 6.25

    def __post_init__(self) -> None:
        object.__setattr__(self, "visible_gib", self.visible_gib or _SHOWN * self.memory_gib)


CPU_CORE = Device(
    name="CPU core", pattern="CPU core", peak_tflops=dict.fromkeys(("fp32", "tf32", "bf16", "fp16")),
    memory_bandwidth_gb_per_s=0.0, memory_gib=0.0,
)  # fmt: skip
ANY_DEVICE = Device(name="any", pattern="any", peak_tflops={}, memory_bandwidth_gb_per_s=0.0, memory_gib=1.0)


@functools.cache
def known_devices() -> tuple[Device, ...]:
    entries = read_own(Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8"))
    return tuple(Device(**{**entry, "names": tuple(entry["names"])}) for entry in entries)


def find_device(device_name: str) -> Device | None:
    """Return a device by its name in torch or NVML; None if it is not listed, as any CPU."""
    if "MIG" in device_name:  # a slice of a device; its share of the figures is not published with the name
        return None
    return next((device for device in known_devices() if re.search(device.pattern, device_name)), None)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak dense FLOP/s for the matrix multiplications of a run in `precision`; None where it is not known.

    fp32 means the CUDA cores: study/engine/setup.py keeps tf32 off.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"unknown precision {precision!r}")
    device = find_device(device_name)
    if device is None:
        return None
    tflops = device.peak_tflops[precision.removesuffix("-engine")]
    return None if tflops is None else tflops * 1e12


def mfu(flops_per_step: float, step_time_s: float, world_size: int, device_name: str, precision: str) -> float | None:
    """Model FLOPs utilization: the model's FLOPs of one step over all ranks, against all devices' peak in that time."""
    peak = peak_flops(device_name, precision)
    return None if peak is None else flops_per_step / (step_time_s * world_size * peak)


# More ranks than any job has had.
LARGEST_JOB = 2**18


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A box or a cluster: `nodes` machines of `gpus_per_node` devices."""

    name: str
    device: Device
    gpus_per_node: int
    nodes: int = 1
    # Of one device to other nodes.
    network_gb_per_s: float = 50.0
    host_gib_per_node: float | None = None
    # What all ranks of a node read and write together in an optimizer on the host, where it was measured or given.
    host_memory_gb_per_s: float | None = None
    # DeepSpeed's asynchronous I/O on four drives of PCIe 4: "up to 10 GB/sec reads and 5 GB/secs writes" (DeepSpeed's
    # blog deepnvme, 08-2024).
    nvme_read_gb_per_s: float = 10.0
    nvme_write_gb_per_s: float = 5.0
    # gloo gathers into a copy of the whole, and scatters out of one; NCCL does neither.
    gathers_into_copies: bool = False

    @property
    def ranks(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def in_host_memory(self) -> bool:
        """No GPU: the ranks are processes, and compute where their offloaded state lies as well."""
        return self.device.memory_gib == 0

    @property
    def meets_over_pcie(self) -> bool:
        """Several GPUs of one node, none of which has NVLink."""
        return self.gpus_per_node > 1 and self.device.nvlink_gb_per_s is None and not self.in_host_memory


def box_of_ranks(name: str, device: Device, ranks: int) -> Hardware:
    """Return a box of so many ranks: full machines, or one."""
    nodes, rest = divmod(ranks, RANKS_OF_A_MACHINE)
    return Hardware(name, device, ranks) if rest or not nodes else Hardware(name, device, RANKS_OF_A_MACHINE, nodes)


def whole(text: str, most: int = 10_000_000, what: str = "whole number") -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and 0 < int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a {what} from 1 to {most}")
    return int(text)


def real(text: str, below: float = 1e9) -> float:
    """Parse a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < below:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number above 0")
    return number


BOX_NAMES = (*(name for device in known_devices() for name in device.names), "this")
_SPEED = functools.partial(real, below=1e6)
_COUNT = r"([0-9]{1,99}) *x *"


def box_of(name: str) -> Hardware:
    """Return the box of a name; an unknown one is refused with names like it."""
    count = re.fullmatch(rf"(?:{_COUNT})?(?:{_COUNT})?(?!{_COUNT})(?P<device>\w[\w .-]*)", name.strip(), re.IGNORECASE)
    if count is None:
        raise _unknown(name)
    numbers = [int(number) for number in count.groups()[:2] if number is not None]
    nodes, per_node = ([1] * (2 - len(numbers)) + numbers)[-2:]
    if not 0 < nodes * per_node <= LARGEST_JOB:
        raise UserError(f"{brief(name)} is not a box: a count is out of range", f"use 1 to {LARGEST_JOB:,} GPUs")
    if count["device"].lower() == "this":
        if numbers:
            raise UserError(f"{brief(name)} is not a box: `this` is one box as it is", "leave the number out")
        return _this()
    spelled = _spelled(count["device"])
    by_name = next((device for device in known_devices() if spelled in device.names), None)
    if (device := by_name or find_device(count["device"])) is None:
        raise _unknown(name)
    return Hardware(name, device, per_node, nodes, network_gb_per_s=device.network_gb_per_s)


def box_of_devices(device_name: str, ranks: int, nodes: int) -> Hardware:
    """Return a box of GPUs by the name that their driver gives."""
    if (device := find_device(device_name)) is None:
        raise UserError(f"{brief(device_name)} is in no table of devices", "add it to study/predictor/hardware.yaml")
    return Hardware(device.name, device, ranks // nodes, nodes, network_gb_per_s=device.network_gb_per_s)


def add_speed_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the speeds that no name of a box gives."""
    parser.add_argument(
        "--nvme_gb_per_s",
        type=_two_speeds,
        default=(Hardware.nvme_read_gb_per_s, Hardware.nvme_write_gb_per_s),
        metavar="READ,WRITE",
        help=f"bandwidth of a node's NVMe; by default {Hardware.nvme_read_gb_per_s:g},{Hardware.nvme_write_gb_per_s:g}",
    )
    parser.add_argument(
        "--network_gb_per_s", type=_SPEED, metavar="X", help="one GPU's share of its node's network, one direction"
    )
    parser.add_argument(
        "--host_gb_per_s", type=_SPEED, metavar="X", help="what the host's Adam reads and writes, all ranks of a node"
    )


def box_asked(options: argparse.Namespace) -> Hardware:
    """Return the box that options name, with the speeds that they give."""
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
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not two numbers above 0, such as 3.5,2") from None
    return read, write


def _spelled(text: str) -> str:
    """`a100-80gb` is A100-80, `H100 SXM5` is H100, and `GeForce RTX_4090` is 4090."""
    spelled = re.sub(r"[ _]+", "-", text.upper())
    spelled = re.sub(r"^(NVIDIA-)?(TESLA-)?(GEFORCE-)?(RTX-?)?|-GENERATION$", "", spelled)
    return re.sub(r"-SXM\d?(?=-|$)|(?<=-\d\d)GB?$|(?<=-\d\d\d)GB?$", "", spelled)


def _unknown(name: str) -> UserError:
    if re.search(r"\bMIG\b|\b\dg\.\d+gb", name, re.IGNORECASE):
        return UserError(f"{brief(name)}: a MIG slice's speed is not known", "name a whole GPU")
    device = _spelled(re.sub(rf"^(?:{_COUNT})*", "", name.strip(), flags=re.IGNORECASE))
    near = did_you_mean(device, [known for known in BOX_NAMES if known[0] == device[:1]], cutoff=0.5)
    known = f"{near}a box is" if near else f"use one of {', '.join(BOX_NAMES)}, as in"
    return UserError(f"unknown box {brief(name)}", f"{known} 8xH100, or 4x8xH100 for four nodes")


def _this() -> Hardware:
    """The GPUs that a run would see, or, without any, its cores: a core is a device there, as `study` trains."""
    gpus, copied = gpu_names(), _copy_gb_per_s()
    box = Hardware("this", CPU_CORE, len(gpus), host_gib_per_node=host_memory().total_gib, host_memory_gb_per_s=copied)
    if gpus:
        if len(names := sorted(set(gpus))) > 1:
            raise UserError(f"this box has several kinds of GPU: {', '.join(names)}", "name one, as 2xA100-40")
        if (device := find_device(gpus[0])) is None:
            if "MIG" in gpus[0]:
                raise _unknown(gpus[0])
            raise UserError(
                f"this box's {gpus[0]} is not in study/predictor/hardware.yaml", "add its data sheet's figures there"
            )
        rates = device.matmul_tflops | matmul_rates(this_box()).get("tflops", {})
        device = dataclasses.replace(device, memory_gib=this_box().gpu_memory_gib[0], matmul_tflops=rates)
        return dataclasses.replace(box, device=device)
    try:
        rates = dict(measured_rates(OMP_NUM_THREADS="1")["tflops"])
    except NOT_MEASURED as error:
        raise UserError(
            f"this box's rate could not be measured ({type(error).__name__})", "run `study doctor`, or name a box"
        ) from error
    cores = available_cores()
    # Ranks meet in the host's memory: each byte is read and written by the sender, the kernel and the receiver.
    device = dataclasses.replace(
        CPU_CORE, memory_bandwidth_gb_per_s=copied / cores, matmul_tflops=rates, pcie_gb_per_s=copied / 6
    )
    return dataclasses.replace(box, device=device, gpus_per_node=cores, gathers_into_copies=True)


def _copy_gb_per_s(mebibytes: int = 256) -> float:
    """Read plus written, the best of three."""
    source, best = b"1" * (mebibytes * 2**20), math.inf
    target = memoryview(bytearray(source))
    for _ in range(3):
        started = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - started)
    return 2 * len(source) / best / 1e9
