"""Hardware of a prediction: GPUs from study/predictor/hardware.yaml, their peak rates, and machines of them by name.

`8xH100` is one node, `4x8xH100` four nodes of eight GPUs, `A100-40` one GPU, `this` the local machine. The other forms
that people write are read too, such as `A100 80GB x8` and `4 nodes x 8 H100`. A GPU outside the table is given by its
figures: `8xmemory=192GiB,tflops=1300,bandwidth=5300`.
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
from pathlib import Path

from study.config.errors import UserError, clip, did_you_mean
from study.config.flags import add_fields, flag
from study.config.places import install_command
from study.config.strategies import DEFAULT_RANKS_PER_NODE
from study.config.yaml_sections import load_package_yaml
from study.host.memory import available_cores, host_memory

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
    # Part of memory_gib that the driver shows.
    visible_gib: float = 0.0
    # Common names, and one device's network bandwidth, one direction.
    names: tuple[str, ...] = ()
    network_gb_per_s: float = 6.25
    # Of CUDA; None if the device has none.
    compute_capability: float | None = None

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
    tflops = device.peak_tflops[precision.removesuffix("-engine")] if device else None
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
    """Parse a size of memory in GiB, as an argparse type: 128, 128GB and 128GiB are the same, as machines are sold."""
    match = re.fullmatch(r"([0-9.]+) *(?:(T)|G)?(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a size of memory such as 128, 128GB or 1.5TB")
    return real(match[1]) * (1024 if match[2] else 1)


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
_SPEED = functools.partial(real, below=1e6)
_COUNT = r"([0-9]{1,99}) *x *"
# Figures of a GPU that is not in the table, with their units; the first three are needed.
_FIGURES = {
    "memory": "GiB of device memory",
    "tflops": "dense TFLOP/s in 16 bits",
    "bandwidth": "GB/s of device memory",
    "nvlink": "GB/s of one device to its node, one direction",
    "pcie": "GB/s to the host, one direction",
    "network": "GB/s to other nodes",
    "fp32": "TFLOP/s in fp32",
}
_NEEDED = ("memory", "tflops", "bandwidth")
CUSTOM_FORM = "--hardware 8xmemory=192GiB,tflops=1300,bandwidth=5300"
_FIGURES_FORM = f"give its figures as in {CUSTOM_FORM}"
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
# Larger machines exist, but a larger number is more often a cluster.
_MAX_MACHINE_GPUS = 16


def to_box(name: str) -> Hardware:
    """Return the hardware with a name; UserError suggests similar names if it is unknown."""
    count = re.fullmatch(
        rf"(?:{_COUNT})?(?:{_COUNT})?(?!{_COUNT})(?P<device>\w[\w .=,/-]*)", _usual_form(name), re.IGNORECASE
    )
    if count is None:
        raise _unknown(name)
    numbers = [int(number) for number in count.groups()[:2] if number is not None]
    nodes, per_node = ([1] * (2 - len(numbers)) + numbers)[-2:]
    if not 0 < nodes * per_node <= MAX_JOB_GPUS:
        problem = f"{clip(name)} is not valid hardware: a count is out of range"
        raise UserError(problem, f"use 1 to {MAX_JOB_GPUS:,} GPUs")
    if "=" in count["device"]:
        custom = _custom_device(name, count["device"])
        return Hardware(name, custom, per_node, nodes, network_gb_per_s=custom.network_gb_per_s)
    if count["device"].lower() == "this":
        if numbers:
            raise UserError(f"{clip(name)} is not valid hardware: `this` is the local machine", "leave the number out")
        return _this()
    spelled = _spelled(count["device"])
    model, _, size = spelled.rpartition("-")
    joined = spelled.replace("-", "")
    by_name = next(
        (
            device
            for device in known_devices()
            if joined in (listed.replace("-", "") for listed in device.names)
            or (model in device.names and device.memory_gib and size == f"{device.memory_gib:g}")
        ),
        None,
    )
    if (device := by_name or find_device(count["device"])) is None:
        raise _unknown(name)
    return Hardware(name, device, per_node, nodes, network_gb_per_s=device.network_gb_per_s)


def _usual_form(name: str) -> str:
    """Return a name in the form COUNTxDEVICE: `A100 80GB x8`, `8 A100`, `8x RTX 3090 (24GB)`, `4 nodes x 8 H100`,
    `8H100`, `H100:8`."""
    text = re.sub(r"[()]", " ", re.sub(r"[\N{MULTIPLICATION SIGN}*:]", "x", name)).strip()
    text = re.sub(r"^([0-9]+) *(?:nodes?|machines?|servers?) *(?:x|of|with)? *", r"\1x", text, flags=re.IGNORECASE)
    # The x of RTX 3090 is part of its name.
    if not re.match(r"[0-9]+ *x", text, re.IGNORECASE):
        text = re.sub(r"^(.*(?:[0-9]|[0-9]GI?B?|\s)) *x *([0-9]+)$", r"\2x\1", text, flags=re.IGNORECASE)
    # A number and a name with a letter first: "8 A100", "4x8 H100"; "8 3090" stays unknown.
    text = re.sub(r"^((?:[0-9]+ *x *)?[0-9]+) +(?=[a-z])(?!x)", r"\1x", text, flags=re.IGNORECASE)
    # Or a letter and a number: "8H100".
    text = re.sub(r"^((?:[0-9]+ *x *)?[0-9]{1,3})(?=[abhlv][0-9])", r"\1x", text, flags=re.IGNORECASE)
    return " ".join(text.split())


def _custom_device(name: str, figures: str) -> Device:
    """Return a GPU given by its figures, such as memory=192GiB,tflops=1300,bandwidth=5300."""
    values: dict[str, float] = {}
    for part in figures.split(","):
        key, _, text = part.strip().partition("=")
        number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *[a-z/]*", text.strip(), re.IGNORECASE)
        if key not in _FIGURES or number is None or key in values or not 0 < float(number[1]) < 1e6:
            supported = ", ".join(f"{key} ({unit})" for key, unit in _FIGURES.items())
            raise UserError(f"{clip(name)}: {clip(part)} is not a figure of a GPU", f"use {supported}, each once")
        values[key] = float(number[1])
    if missing := [key for key in _NEEDED if key not in values]:
        raise UserError(f"{clip(name)} does not set {', '.join(missing)}", f"write it as in {CUSTOM_FORM}")
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
    )


def machine_notice(box: Hardware) -> str | None:
    """Return a notice if one machine has more GPUs than most: a cluster was meant more often."""
    if box.nodes > 1 or box.gpus_per_node <= _MAX_MACHINE_GPUS or box.is_cpu_only:
        return None
    nodes, rest = divmod(box.gpus_per_node, DEFAULT_RANKS_PER_NODE)
    device = re.sub(r"^[0-9]+ *x *", "", box.name)
    several = f"; {nodes}x{DEFAULT_RANKS_PER_NODE}x{device} is {nodes} nodes of {DEFAULT_RANKS_PER_NODE}" * (not rest)
    return f"{box.name} is one machine with {box.gpus_per_node} GPUs{several}"


def box_from_device_name(device_name: str, ranks: int, nodes: int) -> Hardware:
    """Return hardware of GPUs by the name that their driver reports."""
    if (device := find_device(device_name)) is None:
        problem = f"{clip(device_name)} is not in the table of devices"
        raise UserError(problem, "add it to study/predictor/hardware.yaml")
    return Hardware(device.name, device, ranks // nodes, nodes, network_gb_per_s=device.network_gb_per_s)


def _two_speeds(text: str) -> tuple[float, float]:
    """Parse READ,WRITE, as an argparse type."""
    try:
        read, write = map(_SPEED, text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not two numbers above 0, such as 3.5,2") from None
    return read, write


@dataclasses.dataclass(frozen=True)
class HardwareFlags:
    """Flags of hardware: its name, and the speeds and the memory that the name does not set."""

    # Each command adds this flag itself.
    hardware: str = ""
    nvme_gb_per_s: tuple[float, float] = flag(
        f"bandwidth of a node's NVMe; by default {Hardware.nvme_read_gb_per_s:g},{Hardware.nvme_write_gb_per_s:g}",
        (Hardware.nvme_read_gb_per_s, Hardware.nvme_write_gb_per_s),
        type=_two_speeds,
        metavar="READ,WRITE",
    )
    network_gb_per_s: float | None = flag("network bandwidth per GPU, one direction", type=_SPEED, metavar="X")
    bus_gb_per_s: float = flag(
        "bus bandwidth within a node, as nccl-tests print it, such as with NCCL_P2P_DISABLE=1",
        math.inf,
        type=_SPEED,
        metavar="X",
    )
    host_gb_per_s: float | None = flag(
        "memory bandwidth of Adam on the host, all ranks of a node", type=_SPEED, metavar="X"
    )
    host_memory: float | None = flag(
        "host memory of each node; without it the host is not checked", type=parse_gib, metavar="GIB"
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
        """Return the hardware that is named; print a notice if its name is more often written for another one."""
        box, (read, write) = to_box(self.hardware), self.nvme_gb_per_s
        if notice := machine_notice(box):
            print(f"notice: {notice}", file=sys.stderr)
        return dataclasses.replace(
            box,
            nvme_read_gb_per_s=read,
            nvme_write_gb_per_s=write,
            bus_gb_per_s=self.bus_gb_per_s,
            host_memory_gb_per_s=self.host_gb_per_s or box.host_memory_gb_per_s,
            network_gb_per_s=self.network_gb_per_s or box.network_gb_per_s,
            host_gib_per_node=self.host_memory or box.host_gib_per_node,
        )


def _spelled(text: str) -> str:
    """Normalize a device name: `a100-80gb` is A100-80, `H100 SXM5` is H100, and `GeForce RTX_4090` is 4090."""
    spelled = re.sub(r"[ _]+", "-", text.upper())
    spelled = re.sub(r"^(NVIDIA-)?(TESLA-)?(GEFORCE-)?(RTX-?)?|-GENERATION$", "", spelled)
    spelled = re.sub(r"-(BLACKWELL|HOPPER|AMPERE|TURING|VOLTA)$", "", spelled)
    return re.sub(r"-SXM\d?(?=-|$)|(?<=-\d\d)-?GI?B?$|(?<=-\d\d\d)-?GI?B?$", "", spelled)


def _unknown(name: str) -> UserError:
    written, name = name, _usual_form(name)
    if (refusal := _names_no_single_gpu(written, name)) is not None:
        return refusal
    counts = re.match(rf"(?:{_COUNT})*", name, flags=re.IGNORECASE)[0]  # type: ignore[index]
    spelled = _spelled(name[len(counts) :])
    # The letter O is often typed for a zero.
    device = spelled.replace("O", "0")
    if size := re.search(r"(?:^|[ -])([0-9]{2,3})[ -]?GI?B?\b(?!.*[0-9])", device):
        sized = [
            f"{counts}{item.names[0]}" for item in known_devices() if item.names and item.memory_gib == float(size[1])
        ]
        choices = f"name one, as {', '.join(sized)}; or " if sized else ""
        return UserError(f"{clip(name)} names no GPU", f"{choices}{_FIGURES_FORM}")
    if _OTHER_KINDS.search(spelled):
        problem = f"{clip(name)} is not in the table of GPUs, and no TPU, NPU or other accelerator is modelled"
        return UserError(problem, f"for a GPU like it {_FIGURES_FORM} (data sheet, without sparsity)")
    number = _NUMBERED.fullmatch(re.sub(r"-[0-9]{1,3}(GI?B?)?$", "", device))
    is_typo = number is not None and any(sorted(number[1]) == sorted(re.sub(r"\D", "", box)) for box in BOX_NAMES)
    if _OTHER_CARDS.search(spelled) or (number is not None and not is_typo):
        return UserError(f"{clip(name)} is not in the table of GPUs", f"{_FIGURES_FORM} (data sheet, without sparsity)")
    similar = [counts + box for box in BOX_NAMES if box[0] == device[:1]]
    suggestion = did_you_mean(counts + device, similar, cutoff=0.5)
    fix = f"{suggestion}`study predict --help` lists the devices; the form is 8xH100, or 4x8xH100 (4 nodes);"
    return UserError(f"unknown hardware {clip(name)}", f"{fix} or {_FIGURES_FORM}")


def _names_no_single_gpu(written: str, name: str) -> UserError | None:
    """Return the refusal of a slice of a GPU, of no GPU, of several kinds, and of a machine; None for other names."""
    if re.search(r"\bMIG\b|\b\dg\.\d+gb", written, re.IGNORECASE):
        return UserError(f"{clip(written)}: the speed of a MIG slice is not known", "name a whole GPU")
    if _NO_NAME.fullmatch(written.strip()):
        fix = "name the GPUs, such as 8xH100 (nvidia-smi -L prints theirs), or `this` for this machine"
        return UserError(f"{clip(written)} names no GPU", f"{fix}; or {_FIGURES_FORM}")
    kinds = [_spelled(re.sub(_COUNT, "", kind.strip())) for kind in re.split(r"[,+&/]|\band\b", name)]
    if sum(kind in BOX_NAMES for kind in kinds) > 1:
        problem = f"{clip(name)} are several kinds of GPU, and a prediction is of one"
        return UserError(problem, "name the kind with the least memory, with the number of all")
    if _INSTANCE.fullmatch(name):
        problem = f"{clip(name)} is a cloud's name of a machine, and the table has GPUs"
        fix = "name its GPUs with their number, such as 8xA100-40 (nvidia-smi -L prints them)"
        return UserError(problem, f"{fix}; or {_FIGURES_FORM}")
    machine = re.fullmatch(r"(?:DGX|HGX)-(.+)", _spelled(name))
    if machine is not None and machine[1] in BOX_NAMES:
        return UserError(f"{clip(name)} is a machine, and the table has GPUs", f"name its GPUs: 8x{machine[1]}")
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
                raise _unknown(gpus[0])
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
