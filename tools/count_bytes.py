"""Compare the bytes that records count with the counters of the loopback interface, for each strategy.

    python tools/count_bytes.py --strategy ddp zero3 --ranks 2 --accumulation 1 --csv /tmp/bytes.csv
    python tools/count_bytes.py --markdown          every strategy, 20 to 40 minutes on two cores

Each case trains for 3 and for 13 steps: start, evaluation and end cancel in the difference, and ten steps remain. The
runs have a separate network namespace, whose loopback no other process uses. If none can be created, the counters are
the machine's and include other processes. They always include TCP's headers and acknowledgements. Therefore packets are
counted too, and segments that TCP retransmits when a busy machine answers late (at most 64 KiB each). Rows that are
already in the CSV file are not measured; --markdown writes summary.md in its folder.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from study.config.flags import RunConfig
from study.config.places import REPOSITORY
from study.config.strategies import MIN_RANKS_WITH_REPLICAS, STRATEGY_NAMES, WITH_REPLICAS, read_strategy
from study.host.memory import MIB
from study.records.directory import read_run
from study.report.document import table_markdown
from study.sweep.cell import Cell
from study.sweep.fork_server import ForkServer
from study.sweep.launch import run_cell

_CASE = ["strategy", "ranks", "accumulation"]
_STEPS = (3, 13)
_MICRO_BATCH = 4
# Size of an acknowledgement, and of the TCP and IP headers of any packet.
_HEADER_BYTES = 52
_IN_OWN_NAMESPACE = "ZERO_STUDY_OWN_LOOPBACK"
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def measured(
    strategy: str, ranks: int, accumulation: int, seq_length: int, root: Path, forks: ForkServer
) -> dict[str, Any]:
    """Return the counted and the recorded bytes of one rank's step, or the ending of a failed run."""
    # Tensor parallelism without ZeRO needs all ranks in one group.
    group_size = ranks if strategy == "tp" else None
    groups = ranks // read_strategy(strategy).with_group_size(group_size).group_size
    counters = [transmitted()]
    for steps in _STEPS:
        config = RunConfig(
            task="gpt-wikitext",
            scale="laptop",
            precision="fp32",
            dropout=0.0,
            weights="random",
            data="builtin",
            model_name_or_path="gpt-tiny",
            seq_length=seq_length,
            per_device_train_batch_size=_MICRO_BATCH,
            global_batch_size=_MICRO_BATCH * accumulation * groups,
            max_steps=steps,
            eval_steps=0,
            eval_samples=8,
            group_size=group_size,
            nvme_path=str(root / "nvme"),
        )
        cell = Cell(strategy, ranks, config, config, repeat=1, time_limit_s=600)
        ended = run_cell(cell, root, forks=forks).ending
        counters.append(transmitted())
        if ended.state != "ok":
            return {"state": ended.state, "reason": ended.reason}
    run = read_run(root / cell.id)
    start, middle, end = counters
    rank_steps = (_STEPS[1] - _STEPS[0]) * ranks
    long_less_short = [last - 2 * between + first for first, between, last in zip(start, middle, end, strict=True)]
    return {
        "counted_bytes": long_less_short[0] / rank_steps,
        "counted_packets": long_less_short[1] / rank_steps,
        # The sum over both runs, because repeats in the short run make the difference smaller.
        "repeated_segments": (end[2] - start[2]) / rank_steps,
        "gloo_bytes": run.summary["gloo_sent_bytes_per_step"],
        "ring_bytes": run.summary["sent_bytes_per_step"],
        "state": "ok",
        "own_loopback": _IN_OWN_NAMESPACE in os.environ,
        "torch": run.engine["torch"],
        "deepspeed": run.environment["packages"]["deepspeed"],
        "accelerate": run.environment["packages"]["accelerate"],
    }


def transmitted() -> tuple[int, int, int]:
    """Return the bytes, packets and repeated TCP segments that this network namespace has sent through its loopback."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    counters = next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text("ascii").splitlines() if "Tcp:" in line)
    return int(counters[8]), int(counters[9]), int(values[names.index("RetransSegs")])


def take_own_loopback() -> None:
    """Restart this command in a separate network namespace if one can be created."""
    if _IN_OWN_NAMESPACE in os.environ:
        with socket.socket() as control:
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
        return
    unshare = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if shutil.which("unshare") and subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode == 0:
        os.execvpe("unshare", [*unshare, sys.executable, *sys.argv], os.environ | {_IN_OWN_NAMESPACE: "1"})
    print("no network namespace can be created: other traffic on this machine's loopback is included", file=sys.stderr)


def summary(rows: pd.DataFrame) -> str:
    """Return the page of reports/traffic for the measured rows."""
    ended = rows[rows["state"] == "ok"]
    counted = ended["counted_bytes"]
    over, without = (
        f"{ratio.min():.2%} to {ratio.max():.2%}"
        for ratio in (
            ended["gloo_bytes"] / counted,
            ended["gloo_bytes"] / (counted - _HEADER_BYTES * ended["counted_packets"]),
        )
    )
    versions = ", ".join(f"{name} {'/'.join(ended[name].unique())}" for name in ("torch", "deepspeed", "accelerate"))
    where = "a network namespace of their own" if ended["own_loopback"].all() else "the network of the box"
    return f"""# Are the bytes in a record those that a network interface counts?

**Yes: recorded gloo bytes are {over} of the counted bytes** in {len(ended)} cases. The rest are headers:
those of gloo's messages, and {_HEADER_BYTES} bytes of TCP and IP in each packet, without which it is {without}.
The start of a run differs by some packets from that of the next one.

What one rank sends in an optimizer step, by the counters of `lo` and in the record: `gpt-tiny` in fp32, no GPU, gloo;
{versions}. The counters are means over ranks and ten steps (13 less 3), of
runs in {where}. Made by `python tools/count_bytes.py --markdown`; the bytes are in
[bytes.csv](bytes.csv).

{table_markdown(pd.DataFrame(_line(row) for row in rows.itertuples()))}
- *gloo / counted*: what the record says that gloo sends (`gloo_sent_bytes_per_step`), over the counted bytes.
- *ring (NCCL) / counted*: what a ring would send (`sent_bytes_per_step`, the figure of all other tables), over them.
  It is less where a strategy reduce-scatters: gloo sends a whole all-reduce for that. So `zero3` sends 1.5 times what
  `ddp` sends on gloo, and as much on NCCL, as long as this small model stays gathered between forward and backward.
"""


def _line(row: Any) -> dict[str, str]:
    line = {"strategy": f"`{row.strategy}`", "ranks": str(row.ranks), "micro-batches": str(row.accumulation)}
    if row.state != "ok":
        return line | {"counted, MiB": f"{row.state}: {row.reason}"}
    ratios = {
        f"{name} / counted": f"{size / row.counted_bytes:.4f}"
        for name, size in (("gloo", row.gloo_bytes), ("ring (NCCL)", row.ring_bytes))
    }
    return line | {"counted, MiB": f"{row.counted_bytes / MIB:.2f}"} | ratios


def main() -> int:
    """Measure the missing cases and write the CSV file, and the page if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [name for name in STRATEGY_NAMES if name != "single"]
    parser.add_argument("--strategy", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--ranks", nargs="+", type=int, choices=[2, 4], default=[2, 4])
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4])
    tokens = "tokens per sample (default: 128, as in reports/traffic)"
    parser.add_argument("--seq_length", type=int, default=128, help=tokens)
    parser.add_argument("--csv", type=Path, default=REPOSITORY / "reports" / "traffic" / "bytes.csv")
    parser.add_argument("--markdown", action="store_true", help="write summary.md to the folder of the CSV file")
    options = parser.parse_args()
    take_own_loopback()
    rows = pd.read_csv(options.csv).to_dict("records") if options.csv.exists() else []
    done = {tuple(row[key] for key in _CASE) for row in rows}
    cases = [
        (strategy, ranks, accumulation)
        for strategy in options.strategy
        for ranks in options.ranks
        for accumulation in options.accumulation
        if ranks >= MIN_RANKS_WITH_REPLICAS or strategy not in WITH_REPLICAS
    ]
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    forks = ForkServer()
    try:
        with tempfile.TemporaryDirectory() as root:
            for case in cases:
                if case in done:
                    continue
                rows.append(
                    dict(zip(_CASE, case, strict=True)) | measured(*case, options.seq_length, Path(root), forks)
                )
                print(rows[-1], flush=True)
                pd.DataFrame(rows).to_csv(options.csv, index=False)
    finally:
        forks.close()
    if options.markdown:
        options.csv.with_name("summary.md").write_text(summary(pd.DataFrame(rows)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
