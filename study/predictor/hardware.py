"""Hardware of a prediction: GPUs from study/predictor/hardware.yaml, their peak rates, and machines of them by name.

`8xH100` is one node, `4x8xH100` four nodes of eight GPUs, `A100-40` one GPU, `this` the local machine. The other forms
that people write are read too, such as `A100 80GB x8` and `4 nodes x 8 H100`. A GPU outside the table is given by its
figures: `memory=16GiB,tflops=44,bandwidth=288`. hardware_names.py takes a name apart, units.py reads figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from study.config.errors import UserError, clip, did_you_mean
from study.config.flags import add_fields, flag
from study.config.places import install_command
from study.config.precisions import computing_type
from study.config.strategies import DEFAULT_RANKS_PER_NODE
from study.config.yaml_sections import load_package_yaml
from study.host.memory import GIB, available_cores, host_memory, wsl_limit
from study.predictor.hardware_names import HardwareName, device_words, split_name
from study.predictor.units import NetworkSpeed, Quantity, parse_network_speed, parse_quantity, parse_speed

# Visible fraction of the memory if no source gives it: that of A100 and V100.
_SHOWN = 0.985


@dataclasses.dataclass(frozen=True)
class Device:
    """One entry of hardware.yaml: dense data-sheet figures of a GPU."""

    name: str
    pattern: str
    # Not hashed, only compared, so that a request can be a cache key.
    peak_tflops: dict[str, float | None] = dataclasses.field(hash=False)
    memory_bandwidth_gb_per_s: float
    memory_gib: float
    # Best measured matrix product by precision; unpublished precisions are missing.
    matmul_tflops: dict[str, float] = dataclasses.field(default_factory=dict, hash=False)
    # One direction, per device.
    pcie_gb_per_s: float | None = None
    nvlink_gb_per_s: float | None = None
    # Of NVLink to one other device of the node, if links join pairs of devices and no switch joins all.
    pair_gb_per_s: float | None = None
    # Part of memory_gib that the driver shows.
    visible_gib: float = 0.0
    # Common names, and one device's network bandwidth, one direction.
    names: tuple[str, ...] = ()
    network_gb_per_s: float = 6.25
    # Of CUDA; None if the device has none.
    compute_capability: float | None = None
    # Given by its figures, and not in the table.
    is_custom: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "visible_gib", self.visible_gib or _SHOWN * self.memory_gib)


CPU_CORE = Device(
    name="CPU core",
    pattern="CPU core",
    peak_tflops=dict.fromkeys(("fp32", "tf32", "bf16", "fp16")),
    memory_bandwidth_gb_per_s=0.0,
    memory_gib=0.0,
)
ANY_DEVICE = Device(name="any", pattern="any", peak_tflops={}, memory_bandwidth_gb_per_s=0.0, memory_gib=1.0)


@functools.cache
def known_devices() -> tuple[Device, ...]:
    """Return the devices of hardware.yaml, in order of precedence."""
    entries = load_package_yaml(Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8"))
    return tuple(Device(**{**entry, "names": tuple(entry["names"])}) for entry in entries)


def find_device(device_name: str) -> Device | None:
    """Return the device with a name as torch or NVML prints it; None if it is not listed, such as a CPU."""
    if "MIG" in device_name:  # A slice of a device; the name does not give its rates.
        return None
    return next((device for device in known_devices() if re.search(device.pattern, device_name)), None)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return peak dense FLOP/s of matrix products, or None if not known; fp32 is without tf32, as in the study."""
    device = find_device(device_name)
    tflops = device.peak_tflops[computing_type(precision)] if device else None
    return None if tflops is None else tflops * 1e12


def mfu(flops_per_step: float, step_time_s: float, world_size: int, device_name: str, precision: str) -> float | None:
    """Model FLOPs utilization: FLOPs of one step of all ranks over the peak FLOPs of all devices in that time; None if
    the peak is not known."""
    peak = peak_flops(device_name, precision)
    return None if peak is None else flops_per_step / (step_time_s * world_size * peak)


# Upper limit of ranks, above that of any real job.
MAX_JOB_GPUS = 2**18


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A machine or a cluster: `nodes` machines of `gpus_per_node` devices."""

    name: str
    device: Device
    gpus_per_node: int
    nodes: int = 1
    # Per device, to other nodes.
    network_gb_per_s: float = 50.0
    host_gib_per_node: float | None = None
    # Bytes per second that all ranks of a node read and write in a host optimizer; None if neither measured nor given.
    host_memory_gb_per_s: float | None = None
    # Measured bus bandwidth within a node at large payloads, as nccl-tests define it; infinite: that of its links.
    bus_gb_per_s: float = math.inf
    # DeepSpeed's asynchronous I/O on four PCIe 4 NVMe drives: "up to 10 GB/sec reads and 5 GB/secs writes" (DeepSpeed's
    # blog deepnvme, 08-2024).
    nvme_read_gb_per_s: float = 10.0
    nvme_write_gb_per_s: float = 5.0
    # These two are of the machine, and not assumed.
    is_nvme_given: bool = False
    # gloo gathers into a copy of the full tensor, and scatters from one; NCCL does not.
    gloo_copies_gathers: bool = False

    @property
    def ranks(self) -> int:
        return self.gpus_per_node * self.nodes

    @functools.cached_property
    def with_any_network(self) -> Hardware:
        """This hardware with one network for all: memory does not depend on it."""
        return dataclasses.replace(self, network_gb_per_s=1.0)

    @property
    def is_cpu_only(self) -> bool:
        """Whether there is no GPU: ranks are CPU processes, and device memory is host memory."""
        return self.device.memory_gib == 0

    @property
    def links_gb_per_s(self) -> float | None:
        """Bandwidth of a device to the others of its node, one direction: of links in pairs, those to the others."""
        links, pair = self.device.nvlink_gb_per_s, self.device.pair_gb_per_s
        if links is not None and pair is not None:
            return min(links, pair * max(1, self.gpus_per_node - 1))
        return links or self.device.pcie_gb_per_s

    @property
    def uses_pcie_links(self) -> bool:
        """Whether several GPUs of a node communicate over PCIe, without NVLink."""
        return self.gpus_per_node > 1 and self.device.nvlink_gb_per_s is None and not self.is_cpu_only


def box_of_ranks(name: str, device: Device, ranks: int) -> Hardware:
    """Return hardware with a number of ranks: full machines, or a single one if they do not divide."""
    nodes, rest = divmod(ranks, DEFAULT_RANKS_PER_NODE)
    return Hardware(name, device, ranks) if rest or not nodes else Hardware(name, device, DEFAULT_RANKS_PER_NODE, nodes)


def parse_int(text: str, most: int = 10_000_000, what: str = "whole number") -> int:
    """Parse an integer from 1 to `most`, as an argparse type."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and 0 < int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a {what} from 1 to {most}")
    return int(text)


def parse_tokens(text: str) -> int:
    """Parse a number of tokens, as an argparse type: 4096, or 4k, whose k is 1024."""
    if match := re.fullmatch(r"([0-9]{1,5})k", text, re.IGNORECASE):
        return parse_int(str(1024 * int(match[1])))
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no length in tokens, such as 4096 or 4k")
    return parse_int(text)


def parse_gib(text: str) -> float:
    """Parse a size of memory in GiB, as an argparse type: 128, 128G and 128GiB are the same, and 128GB are 10^9 bytes
    each."""
    match = re.fullmatch(r"([0-9.]+) *(?:([GT])(i?B)?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a size of memory such as 128, 128GB or 1.5TB")
    is_tera, is_decimal = (match[2] or "").upper() == "T", (match[3] or "").upper() == "B"
    unit = (1000 if is_tera else 1) * 1e9 / GIB if is_decimal else (1024 if is_tera else 1)
    return real(match[1]) * unit


def real(text: str, below: float = 1e9) -> float:
    """Parse a number above 0, as an argparse type."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < below:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number above 0")
    return number


BOX_NAMES = (*(name for device in known_devices() for name in device.names), "this")
# Figures of a GPU that is not in the table, with their units; the first three are needed.
_FIGURES: dict[str, tuple[Quantity, str]] = {
    "memory": ("memory", "GiB of device memory"),
    "tflops": ("rate", "dense TFLOP/s in 16 bits with sums in fp32"),
    "bandwidth": ("speed", "GB/s or TB/s of device memory"),
    "nvlink": ("speed", "GB/s of one device to its node, one direction"),
    "pcie": ("speed", "GB/s to the host, one direction"),
    "network": ("speed", "GB/s or Gb/s to other nodes"),
    "fp32": ("rate", "TFLOP/s in fp32"),
}
_NEEDED = ("memory", "tflops", "bandwidth")
# An RTX 4060 Ti of 16 GB.
CUSTOM_FORM = "--hardware memory=16GiB,tflops=44,bandwidth=288"
# Data sheets have up to four rates in 16 bits: with sparsity, dense, and each with sums in fp16 and in fp32.
WHICH_TFLOPS = "tflops: dense products in 16 bits with sums in fp32, of a GeForce RTX 30 to 50 twice its fp32 rate"
_FIGURES_FORM = f"give its figures as in {CUSTOM_FORM} (8x before memory: eight GPUs; {WHICH_TFLOPS})"
# Accelerators of other kinds and makers; then other cards of the table's makers.
_OTHER_KINDS = re.compile(
    r"\b(intel|gaudi\w*|arc|tpu\w*|v[2-6][ep]?-\d+|trn\w*|trainium|inf\d|inferentia|npu\w*|ascend\w*|cerebras|ipu\w*"
    r"|mac\w*|apple|mps|m[1-5](-(pro|max|ultra))?$)",
    re.IGNORECASE,
)
_OTHER_CARDS = re.compile(
    r"\b(amd|instinct|radeon|mi\d{2,3}\w*|gtx|titan|quadro|jetson|dgx-spark|gb10|[kmp]\d{2,4})\b", re.IGNORECASE
)
# Cards by number, such as 3060 and 2080-TI: another number is another card.
_NUMBERED = re.compile(r"([0-9]{4})(-?TI|-?SUPER)*")
# Words and numbers that name none: 8, 8xGPU, cuda:0.
_NO_NAME = re.compile(r"[0-9]+|([0-9]+ *x? *)?(gpus?|cuda(:[0-9]+)?|cards?|cpus?|nvidia|local(host)?)", re.IGNORECASE)
# Machine types of AWS, Azure and Google: p4d.24xlarge, g5.48xlarge, Standard_ND96asr_v4, a2-highgpu-8g; and services.
_INSTANCE = re.compile(
    r"[a-z]\w*\.\w*(large|metal)|standard_n\w+|[ag]\d-[a-z]+-\d+g?|colab|kaggle|runpod|sagemaker", re.IGNORECASE
)
# A service before the name of its GPUs: "kaggle 2xT4".
_OF_SERVICE = re.compile(r"(?:google[ -])?(?:colab|kaggle)(?:[ -]pro\+?)?[ ,:-]+(?=.*[0-9])", re.IGNORECASE)
# Larger machines exist, but a larger number is more often a cluster.
_MAX_MACHINE_GPUS = 16
# A DGX-2, and Google's a2-megagpu-16g; 72 of GB200 are one NVLink domain.
_OF_16_GPUS = ("V100 SXM2 32GB", "A100 SXM 40GB", "GB200")
# Of NVLink-C2C between CPU and GPU of one module, instead of PCIe.
_C2C_GB_PER_S = 450
# Words for a network, after the name of a device.
_OF_NETWORK = re.compile(r"IB[0-9]*|INFINIBAND|ROCE(V2)?|ETHERNET|EFA|[EFHNX]DR[0-9]*")
# Of a network, such as 100 Gb/s: a small b is a bit.
_RATE = re.compile(r"\b[0-9]+ ?G(b|bit|bits)(/s|ps)")


def to_box(name: str) -> Hardware:
    """Return the hardware with a name; UserError suggests similar names if it is unknown."""
    written = split_name(name, _is_listed)
    is_this = written.device.lower() == "this"
    if is_this and written.prefix:
        raise UserError(f"{clip(name)} is not valid hardware: `this` is the local machine", "leave the number out")
    if is_this:
        return _this()
    if not re.fullmatch(r"\w[\w .=,/-]*", written.device):
        raise _unknown(name, written)
    device = _custom_device(name, written.device) if "=" in written.device else _named_device(written.device)
    if device is None:
        raise _unknown(name, written)
    nodes, per_node = _count_gpus(name, written)
    if not 0 < nodes * per_node <= MAX_JOB_GPUS:
        problem = f"{clip(name)} is not valid hardware: a count is out of range"
        raise UserError(problem, f"use 1 to {MAX_JOB_GPUS:,} GPUs")
    return Hardware(name, device, per_node, nodes, network_gb_per_s=device.network_gb_per_s)


def _count_gpus(name: str, written: HardwareName) -> tuple[int, int]:
    """Return the nodes and the GPUs of each; UserError with the readings if a name has two that exist."""
    counts = written.before + written.after
    if written.nodes is not None and len(counts) < 2:
        nodes, count = written.nodes, (*counts, 1)[0]
        readings = [(nodes, count)]
        may_be_of_all = written.is_of_all or (written.is_of_all is None and count > DEFAULT_RANKS_PER_NODE)
        if may_be_of_all and nodes and count % nodes == 0:
            readings.insert(0, (nodes, count // nodes))
    elif written.nodes is None and len(counts) < 2:
        readings = [(1, (*counts, 1)[0])]
    elif written.nodes is None and len(counts) == 2:
        readings = [counts] if not written.after else sorted([counts, counts[::-1]])
    else:
        problem = f"unknown hardware {clip(name)}: it has {len(counts) + (written.nodes is not None)} counts"
        raise UserError(problem, "the form is 8xH100, or 4x8xH100 (4 nodes)")
    # A machine with more GPUs does not exist, so that the other reading is meant.
    likely = {reading for reading in readings if reading[1] <= _MAX_MACHINE_GPUS} or {readings[0]}
    if len(likely) > 1:
        ways = [
            f"{nodes}x{count}x{written.device} ({nodes} node{'s' * (nodes > 1)} of {count})"
            for nodes, count in dict.fromkeys(readings)
        ]
        raise UserError(f"{clip(name)} has two readings", f"write {' or '.join(ways)}")
    return likely.pop()


# Words in names of any device.
_WORDS = frozenset(
    ("NVIDIA", "AMD", "TESLA", "INSTINCT", "GPU", "GPUS", "CARD", "CARDS", "TENSOR", "CORE", "GENERATION")
)
_WORDS |= frozenset(("BLACKWELL", "HOPPER", "AMPERE", "TURING", "VOLTA", "HBM2", "HBM2E", "HBM3", "HBM3E"))
_OF_RTX = frozenset(("RTX", "GEFORCE"))


@functools.cache
def _device_names() -> dict[str, tuple[Device, frozenset[str], frozenset[str]]]:
    """Return by name the device, the words of the name, and further words that the device may have."""
    models = _model_words()
    by_name: dict[str, tuple[Device, frozenset[str], frozenset[str]]] = {}
    for device in known_devices():
        words = device_words(device.name, models) | _WORDS | {f"{device.memory_gib:g}"}
        is_rtx, has_nvlink = device.name.startswith("RTX"), device.nvlink_gb_per_s is not None
        words |= _OF_RTX if is_rtx else frozenset()
        if device.compute_capability is None:
            words |= {"OAM"}
        elif has_nvlink:
            words |= {"SXM", "NVLINK"}
        elif device.pcie_gb_per_s is not None and device.pcie_gb_per_s < _C2C_GB_PER_S:
            words |= {"PCIE"}
        by_name |= {name: (device, device_words(name, models), words) for name in device.names}
    return by_name


@functools.cache
def _model_words() -> tuple[str, ...]:
    names = (word for device in known_devices() for name in device.names for word in re.split("-", name))
    return tuple(sorted({word for word in names if not re.fullmatch("[0-9]{1,3}", word)} | _WORDS | _OF_RTX))


def _named_device(text: str) -> Device | None:
    """Return the device with all words of a name: a common one, or that of its driver; None if it is not listed."""
    words = device_words(text, _model_words())
    for device, needed, further in _device_names().values():
        if needed <= words <= needed | further:
            return device
    by_driver = "(?:(?:NVIDIA|AMD|Tesla|GeForce|Instinct) )*(?:{})"
    return next((device for device in known_devices() if re.fullmatch(by_driver.format(device.pattern), text)), None)


def _is_listed(text: str) -> bool:
    return _named_device(text) is not None


def _custom_device(name: str, figures: str) -> Device:
    """Return a GPU given by its figures, such as memory=16GiB,tflops=44,bandwidth=288."""
    values: dict[str, float] = {}
    for part in figures.split(","):
        key, _, text = part.strip().partition("=")
        value = parse_quantity(text, _FIGURES[key][0]) if key in _FIGURES else None
        if value is None or key in values or not 0 < value < 1e6:
            supported = ", ".join(f"{key} ({unit})" for key, (_, unit) in _FIGURES.items())
            raise UserError(f"{clip(name)}: {clip(part)} is not a figure of a GPU", f"use {supported}, each once")
        values[key] = value
    if missing := [key for key in _NEEDED if key not in values]:
        fix = f"write it as in {CUSTOM_FORM} ({WHICH_TFLOPS})"
        raise UserError(f"{clip(name)} does not set {', '.join(missing)}", fix)
    half = values["tflops"]
    # Without a figure for fp32, that of a data sheet is often a sixteenth (A100) of 16 bits.
    rates = {"fp32": values.get("fp32", half / 16), "tf32": half / 2, "bf16": half, "fp16": half}
    return Device(
        name=f"GPU of {values['memory']:g} GiB",
        pattern="(?!)",
        peak_tflops=dict(rates),
        memory_bandwidth_gb_per_s=values["bandwidth"],
        memory_gib=values["memory"],
        pcie_gb_per_s=values.get("pcie", 31.0),
        nvlink_gb_per_s=values.get("nvlink"),
        network_gb_per_s=values.get("network", Device.network_gb_per_s),
        is_custom=True,
    )


def _largest_machine(device: Device) -> int:
    """Return the most GPUs of one machine: links join eight, but for those of _OF_16_GPUS."""
    has_links = device.nvlink_gb_per_s is not None
    return DEFAULT_RANKS_PER_NODE if has_links and device.name not in _OF_16_GPUS else _MAX_MACHINE_GPUS


def box_notices(box: Hardware) -> Iterator[str]:
    """Yield notices of hardware that is more often meant otherwise, and of a link that is assumed."""
    if box.nodes == 1 and box.gpus_per_node > _largest_machine(box.device) and not box.is_cpu_only:
        nodes, rest = divmod(box.gpus_per_node, DEFAULT_RANKS_PER_NODE)
        device = split_name(box.name, _is_listed).device
        cluster = f"{nodes}x{DEFAULT_RANKS_PER_NODE}x{device} is {nodes} nodes of {DEFAULT_RANKS_PER_NODE}"
        yield f"{box.name} is one machine with {box.gpus_per_node} GPUs{f'; {cluster}' * (not rest)}"
    if box.name.lower() == "this" and (limit := wsl_limit()):
        yield limit
    network, fastest = box.network_gb_per_s, max(device.network_gb_per_s for device in known_devices())
    if box.nodes > 1 and network > fastest:
        meant = f"did you mean {network / 8:g} ({network:g} Gb/s)?"
        yield f"{network:g} GB/s of network per GPU, and the fastest adapters of the table have {fastest:g}: {meant}"
    if box.device.is_custom and box.uses_pcie_links and math.isinf(box.bus_gb_per_s):
        rate = f"{box.device.pcie_gb_per_s:g} GB/s"
        yield f"the GPUs of a node are assumed to be linked by PCIe ({rate}); nvlink=GB/s sets a faster link"


def pair_notes(box: Hardware) -> Iterator[str]:
    """Yield the assumed links between the GPUs of a node, if NVLink joins pairs: some nodes of these GPUs have none."""
    device = box.device
    is_nvidia = device.compute_capability is not None
    if is_nvidia and device.pair_gb_per_s is not None and box.gpus_per_node > 1 and math.isinf(box.bus_gb_per_s):
        pair = f"NVLink of {device.pair_gb_per_s:g} GB/s between two GPUs of a node"
        yield f"{pair} is assumed, as on boards of four {device.name}: --bus_gb_per_s sets the speed of others"


def box_from_device_name(device_name: str, ranks: int, nodes: int) -> Hardware:
    """Return hardware of GPUs by the name that their driver reports."""
    if (device := find_device(device_name)) is None:
        problem = f"{clip(device_name)} is not in the table of devices"
        raise UserError(problem, "add it to study/predictor/hardware.yaml")
    return Hardware(device.name, device, ranks // nodes, nodes, network_gb_per_s=device.network_gb_per_s)


def _two_speeds(text: str) -> tuple[float, float]:
    """Parse READ,WRITE, as an argparse type."""
    try:
        read, write = map(parse_speed, text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not two numbers above 0, such as 3.5,2") from None
    return read, write


@dataclasses.dataclass(frozen=True)
class HardwareFlags:
    """Flags of hardware: its name, and the speeds and the memory that the name does not set."""

    # Each command adds this flag itself.
    hardware: str = ""
    nvme_gb_per_s: tuple[float, float] | None = flag(
        f"bandwidth of a node's NVMe; by default {Hardware.nvme_read_gb_per_s:g},{Hardware.nvme_write_gb_per_s:g}",
        type=_two_speeds,
        metavar="READ,WRITE",
    )
    network_gb_per_s: NetworkSpeed | None = flag(
        "network bandwidth per GPU, one direction: 50 is 50 GB/s, as is 400Gb/s; 100Gb/s/node is that of a node",
        type=parse_network_speed,
        metavar="X",
    )
    bus_gb_per_s: float = flag(
        "bus bandwidth within a node, as nccl-tests print it, such as with NCCL_P2P_DISABLE=1",
        math.inf,
        type=parse_speed,
        metavar="X",
    )
    host_gb_per_s: float | None = flag(
        "memory bandwidth of Adam on the host, all ranks of a node", type=parse_speed, metavar="X"
    )
    host_memory: float | None = flag(
        "host memory of each node: 512 is GiB, and 512GB are 477 GiB; without it the host is not checked",
        type=parse_gib,
        metavar="GIB",
    )

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the flags for NVMe, network and host."""
        names = [field.name for field in dataclasses.fields(HardwareFlags) if field.name != "hardware"]
        add_fields(parser, HardwareFlags, names)

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> HardwareFlags:
        """Return the flags of a parsed command line."""
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})

    def box(self) -> Hardware:
        """Return the hardware that is named; print notices if it is more often meant otherwise."""
        box = to_box(self.hardware)
        network = self.network_gb_per_s
        read, write = self.nvme_gb_per_s or (box.nvme_read_gb_per_s, box.nvme_write_gb_per_s)
        box = dataclasses.replace(
            box,
            nvme_read_gb_per_s=read,
            nvme_write_gb_per_s=write,
            is_nvme_given=self.nvme_gb_per_s is not None,
            bus_gb_per_s=self.bus_gb_per_s,
            host_memory_gb_per_s=self.host_gb_per_s or box.host_memory_gb_per_s,
            network_gb_per_s=network.per_gpu(box.gpus_per_node) if network else box.network_gb_per_s,
            host_gib_per_node=self.host_memory or box.host_gib_per_node,
        )
        for notice in box_notices(box):
            print(f"notice: {notice}", file=sys.stderr)
        return box


def _spelled(text: str) -> str:
    """Normalize a device name: `a100-80gb` is A100-80, `H100 SXM5` is H100, and `GeForce RTX_4090` is 4090."""
    spelled = re.sub(r"[ _]+", "-", text.upper())
    spelled = re.sub(r"^(NVIDIA-)?(TESLA-)?(GEFORCE-)?(RTX-?)?|-GENERATION$", "", spelled)
    spelled = re.sub(r"-(BLACKWELL|HOPPER|AMPERE|TURING|VOLTA)$", "", spelled)
    return re.sub(r"-SXM\d?(?=-|$)|(?<=-\d\d)-?GI?B?$|(?<=-\d\d\d)-?GI?B?$", "", spelled)


def _unknown(name: str, written: HardwareName) -> UserError:
    if (service := _OF_SERVICE.match(name)) is not None:
        rest = name[service.end() :]
        try:
            to_box(rest)
        except UserError as unknown_rest:
            return unknown_rest
        fix = f"did you mean {rest}? nvidia-smi -L prints the names of its GPUs"
        return UserError(f"{clip(name)} has the name of a service, and the table has GPUs", fix)
    if (refusal := _names_no_single_gpu(name, written)) is not None:
        return refusal
    counts, spelled = written.prefix, _spelled(written.device)
    # The letter O is often typed for a zero.
    device = spelled.replace("O", "0")
    if (refusal := _other_words(name, written)) is not None:
        return refusal
    if size := re.search(r"(?:^|[ -])([0-9]{2,3})[ -]?GI?B?\b(?!.*[0-9])", device):
        sized = [
            f"{counts}{item.names[0]}" for item in known_devices() if item.names and item.memory_gib == float(size[1])
        ]
        choices = f"name one, as {', '.join(sized)}; or " if sized else ""
        return UserError(f"{clip(name)} names no GPU", f"{choices}{_FIGURES_FORM}")
    if _OTHER_KINDS.search(spelled):
        problem = f"{clip(name)} is not in the table of GPUs, and no TPU, NPU or other accelerator is modelled"
        return UserError(problem, f"for a GPU like it {_FIGURES_FORM}")
    number = _NUMBERED.fullmatch(re.sub(r"-[0-9]{1,3}(GI?B?)?$", "", device))
    is_typo = number is not None and any(sorted(number[1]) == sorted(re.sub(r"\D", "", box)) for box in BOX_NAMES)
    if _OTHER_CARDS.search(spelled) or (number is not None and not is_typo):
        return UserError(f"{clip(name)} is not in the table of GPUs", _FIGURES_FORM)
    similar = [counts + box for box in BOX_NAMES if box[0] == device[:1]]
    suggestion = did_you_mean(counts + device, similar, cutoff=0.5)
    fix = f"{suggestion}`study predict --help` lists the devices; the form is 8xH100, or 4x8xH100 (4 nodes);"
    return UserError(f"unknown hardware {clip(name)}", f"{fix} or {_FIGURES_FORM}")


def _other_words(name: str, written: HardwareName) -> UserError | None:
    """Return the refusal of a listed device with words that it lacks, with the nearest names; None for other names."""
    words = device_words(_RATE.sub(" ", written.device), _model_words())
    listed = {
        name: (len(needed & words), -len(needed))
        for name, (_, needed, _) in _device_names().items()
        if name.partition("-")[0] in words
    }
    if not listed:
        return None
    nearest = [name for name in listed if listed[name] == max(listed.values())]
    _, needed, further = _device_names()[nearest[0]]
    unread = sorted(words - needed - further, key=written.device.upper().find)
    # Another size is a matter of spelling, and another model is another card.
    if unread and (not needed <= words or all(re.fullmatch("[0-9]{1,3}", word) for word in unread)):
        return None
    problem = f"unknown hardware {clip(name)}"
    if unread:
        problem += f": {clip(' '.join(unread))} is not part of the name of {nearest[0]}"
    network = "--network_gb_per_s sets the network; " if any(map(_OF_NETWORK.fullmatch, unread)) else ""
    if "NVLINK" in unread:
        network += "--bus_gb_per_s sets the speed of a bridge between cards; "
    similar = " or ".join(f"{written.prefix}{name}" for name in nearest[:3])
    return UserError(problem, f"{network}did you mean {similar}? For another card {_FIGURES_FORM}")


def _names_no_single_gpu(written: str, name: HardwareName) -> UserError | None:
    """Return the refusal of a slice of a GPU, of no GPU, of several kinds, and of a machine; None for other names."""
    if re.search(r"\bMIG\b|\b\dg\.\d+gb", written, re.IGNORECASE):
        return UserError(f"{clip(written)}: the speed of a MIG slice is not known", "name a whole GPU")
    if _NO_NAME.fullmatch(written.strip()):
        fix = "name the GPUs, such as 8xH100 (nvidia-smi -L prints theirs), or `this` for this machine"
        return UserError(f"{clip(written)} names no GPU", f"{fix}; or {_FIGURES_FORM}")
    kinds = [_spelled(split_name(kind, _is_listed).device) for kind in re.split(r"[,+&/]|\band\b", written)]
    if sum(kind in BOX_NAMES for kind in kinds) > 1:
        problem = f"{clip(written)} are several kinds of GPU, and a prediction is of one"
        return UserError(problem, "name the kind with the least memory, with the number of all")
    if _INSTANCE.fullmatch(name.device):
        problem = f"{clip(written)} is a cloud's name of a machine, and the table has GPUs"
        fix = "name its GPUs with their number, such as 8xA100-40 (nvidia-smi -L prints them)"
        return UserError(problem, f"{fix}; or {_FIGURES_FORM}")
    machine = re.fullmatch(r"(?:DGX|HGX)-(.+)", _spelled(name.device))
    if machine is not None and machine[1] in BOX_NAMES:
        return UserError(f"{clip(written)} is a machine, and the table has GPUs", f"name its GPUs: 8x{machine[1]}")
    return None


def _this() -> Hardware:
    """Return the hardware of the local machine: its GPUs, or without any its CPU cores, one per rank."""
    # The driver's library, which no other hardware needs, takes a tenth of the start-up.
    from study.host.machine import MEASUREMENT_ERRORS, detect_machine, gpu_names, matmul_rates, measured_rates

    # Memory bandwidth of a copy, read plus written: the best of three.
    source, seconds = b"1" * (256 * 2**20), math.inf
    target = memoryview(bytearray(source))
    for _ in range(3):
        started = time.perf_counter()
        target[:] = source
        seconds = min(seconds, time.perf_counter() - started)
    gpus, copied = gpu_names(), 2 * len(source) / seconds / 1e9
    box = Hardware("this", CPU_CORE, len(gpus), host_gib_per_node=host_memory().total_gib, host_memory_gb_per_s=copied)
    if gpus:
        if len(names := sorted(set(gpus))) > 1:
            raise UserError(f"this machine has several kinds of GPU: {', '.join(names)}", "name one, as 2xA100-40")
        if (device := find_device(gpus[0])) is None:
            if "MIG" in gpus[0]:
                raise _unknown(gpus[0], HardwareName(gpus[0]))
            problem = f"this machine's {gpus[0]} is not in study/predictor/hardware.yaml"
            raise UserError(problem, "add its data sheet's figures there")
        rates = device.matmul_tflops | matmul_rates(detect_machine()).get("tflops", {})
        device = dataclasses.replace(device, memory_gib=detect_machine().gpu_memory_gib[0], matmul_tflops=rates)
        return dataclasses.replace(box, device=device)
    if importlib.util.find_spec("torch") is None:
        problem = "torch is not installed here, and this machine's compute rate is measured with it"
        raise UserError(problem, f"run: {install_command('train', missing=['torch'])}; or name the hardware")
    try:
        rates = dict(measured_rates(OMP_NUM_THREADS="1")["tflops"])
    except MEASUREMENT_ERRORS as error:
        problem = f"this machine's compute rate could not be measured ({type(error).__name__})"
        raise UserError(problem, "run `study doctor`, or name the hardware") from error
    cores = available_cores()
    # Ranks communicate through host memory: the sender, the kernel and the receiver each read and write every byte.
    device = dataclasses.replace(
        CPU_CORE, memory_bandwidth_gb_per_s=copied / cores, matmul_tflops=rates, pcie_gb_per_s=copied / 6
    )
    return dataclasses.replace(box, device=device, gpus_per_node=cores, gloo_copies_gathers=True)
