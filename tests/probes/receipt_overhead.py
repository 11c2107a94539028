"""What does a receipt cost after its measured steps? Steps with and without it alternate in one process.

    python tests/probes/receipt_overhead.py [ENGINE ...] [--steps 200] [--document docs/receipt.md]
    accelerate launch ... tests/probes/receipt_overhead.py ENGINE ... --steps 200    one rank of it

Both kinds train the same model. In a step without the receipt the loop does not call it, and its hook is off. Pairs of
steps begin with either kind by turns; the figures are medians of the ratios within pairs, with 95 % intervals: of the
time, which two ranks on two cores make uncertain, and of the CPU time of the rank's threads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "probes"))
ENGINES = ("ddp", "fsdp2", "zero2", "zero3")
BEGIN, END = "<!-- table of the overhead -->", "<!-- /table of the overhead -->"
AFTER, MEASURED = 2, 3
HEAD = (
    "| engine | step, ms | with over without | 95 % interval | CPU time | 95 % interval | its own clock |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def make(engine: str) -> tuple[Any, Any]:
    import receipt_strategies as strategies  # type: ignore[import-not-found]  # found beside this file

    if engine == "ddp":
        return strategies.make_ddp(strategies.make_model())
    if engine == "fsdp2":
        model = strategies.make_model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, strategies.make_adamw(model)
    return strategies.make_deepspeed(engine)


def measure(engine: str, pairs: int) -> dict[str, Any]:
    import receipt_strategies as strategies

    from study import Receipt

    model, optimizer = make(engine)
    model.train()
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", {})
    others = set(hooks)
    with tempfile.TemporaryDirectory() as folder:
        receipt = Receipt(model, optimizer, path=Path(folder) / "receipt.json", after=AFTER, steps=MEASURED, quiet=True)
        own = [key for key in hooks if key not in others]

        def train_step() -> None:
            batch = torch.randint(strategies.VOCABULARY, (strategies.SAMPLES, strategies.LENGTH))
            strategies.train_step(model, optimizer, batch)

        def step_with() -> tuple[float, float]:
            began = read_clocks()
            with receipt.step():
                train_step()
            return seconds_since(began)

        def step_without() -> tuple[float, float]:
            taken = {key: hooks.pop(key) for key in own}
            began = read_clocks()
            train_step()
            seconds = seconds_since(began)
            hooks.update(taken)
            if hasattr(model, "global_steps"):
                # The receipt counts the engine's steps.
                receipt._engine_steps = model.global_steps
            return seconds

        for _ in range(AFTER + MEASURED + 5):
            step_with()
        rows = []
        for pair in range(pairs):
            first, second = (step_with, step_without) if pair % 2 else (step_without, step_with)
            times = {function.__name__: function() for function in (first, second)}
            rows.append((times["step_with"], times["step_without"]))
        receipt.close()
        cost = json.loads((Path(folder) / "receipt.json").read_text())["cost"] if dist.get_rank() == 0 else {}
    if hasattr(model, "global_steps"):
        model.destroy()
    dist.barrier()
    return {"engine": engine, "rows": rows, "later_fraction": cost.get("later_fraction")}


def read_clocks() -> tuple[float, float]:
    """Return the time, and the CPU time of this process."""
    return time.perf_counter(), time.process_time()


def seconds_since(began: tuple[float, float]) -> tuple[float, float]:
    now = read_clocks()
    return now[0] - began[0], now[1] - began[1]


def summarize(result: dict[str, Any]) -> str:
    """Return a row of the table."""
    step_ms = 1000 * statistics.median(without for _, (without, _cpu) in result["rows"])
    cells = [f"`{result['engine']}`", f"{step_ms:.1f}"]
    for clock in range(2):
        ratios = [with_receipt[clock] / without[clock] for with_receipt, without in result["rows"]]
        chooser = random.Random(5)
        medians = sorted(statistics.median(chooser.choices(ratios, k=len(ratios))) for _ in range(1000))
        cells += [f"{statistics.median(ratios):.4f}", f"{medians[25]:.4f} to {medians[974]:.4f}"]
    return f"| {' | '.join(cells)} | {result['later_fraction']:.4%} |"


def launch(options: argparse.Namespace) -> None:
    """Start two ranks, and print or write the table."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    arguments = [*options.engines, "--steps", str(options.steps)]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    document = json.loads(done.stdout.partition("PROBE ")[2].splitlines()[0])
    table = "\n".join([HEAD, *(summarize(result) for result in document["results"])])
    print(table)
    if options.document is not None:
        before, _, rest = options.document.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        options.document.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE")
    parser.add_argument("--steps", type=int, default=200, help="pairs of steps of each engine")
    parser.add_argument("--document", type=Path)
    options = parser.parse_args()
    options.engines = options.engines or list(ENGINES)
    if "RANK" not in os.environ:
        launch(options)
        return
    dist.init_process_group("gloo")
    results = [measure(engine, options.steps) for engine in options.engines]
    if dist.get_rank() == 0:
        print("PROBE " + json.dumps({"rank": 0, "results": results}), flush=True)


if __name__ == "__main__":
    main()
