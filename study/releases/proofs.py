"""Is it that line? Each cause of causes.yaml is taken out of its release, and the control is run with it and without.

python -m study.releases.proofs [CAUSE ...] [--output reports/releases/proofs.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study.config.errors import UserError
from study.host.folders import cache_directory
from study.host.operators import use_own_build
from study.host.stacks import layer_folder, stacks
from study.releases import bare

_ZERO = "deepspeed/runtime/zero"


# The file, the lines as its release has them, and what they should be.
Edit = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Proof:
    """Lines of a stack that should be others; `only` names the cases of the control."""

    cause: str
    stack: str
    only: str
    edits: tuple[Edit, ...]
    # Put right in both runs: faults of their own in the same cases.
    beside: tuple[Edit, ...] = ()
    repeats: int = 1


_UNSCALED_IN_NO_SYNC = (
    "deepspeed/runtime/engine.py",
    "do_gradient_reduction = self.enable_backward_allreduce and not self.inside_no_sync_ctxt and not",
    "do_gradient_reduction = self.enable_backward_allreduce and not",
)
_UNFUSED = "deepspeed/runtime/fp16/unfused_optimizer.py"
PROOFS = (
    Proof(
        "last-micro-step-only", "0.17.6", "bare zero2 4 outside",
        ((f"{_ZERO}/stage_1_and_2.py",
          "if not i in self.averaged_gradients or self.averaged_gradients[i] is None:",
          "if i not in self.all_grad_tensors or self.all_grad_tensors[i] is None:"),),
    ),
    Proof(
        "unscaled-in-no-sync", "0.17.6", "accelerate zero1 4", (_UNSCALED_IN_NO_SYNC,),
    ),
    Proof(
        "divided-twice", "0.18.6", "bare zero2 4 inside fp32 1.0",
        (("deepspeed/runtime/engine.py",
          "if grad is not None and self._scale_wrt_gas:",
          "if grad is not None and self._scale_wrt_gas and not self._running_engine_backward:"),
         ("deepspeed/runtime/engine.py",
          "        # TODO: handle these scaling with direct calls to loss.backward()\n",
          "        loss = gas_scaled_loss\n")),
    ),
    Proof(
        "offload-drops-micro-steps", "0.18.6", "bare zero2_cpu 4 outside",
        ((f"{_ZERO}/stage_1_and_2.py",
          "            accumulate_gradients()\n        else:\n            copy_gradients_to_cpu()\n",
          "            accumulate_gradients()\n        copy_gradients_to_cpu()\n"),),
    ),
    Proof(
        "gather-race", "0.19.0", "bare zero3 ",
        ((f"{_ZERO}/partition_parameters.py", "        launch_handles[-1].wait()\n",
          "        for handle in launch_handles:\n            handle.wait()\n"),),
        repeats=3,
    ),
    Proof(
        "stage0-bf16-keeps-gradients", "0.18.3", "bare zero0 1 inside bf16",
        (("deepspeed/runtime/engine.py",
          'if self.zero_optimization() and hasattr(self.optimizer, "zero_grad"):',
          'if hasattr(self.optimizer, "zero_grad"):'),
         (_UNFUSED, "self.cur_scale = dynamic_loss_args[INITIAL_LOSS_SCALE]", "self.cur_scale = 1.0")),
        # A first step of gradients of zero, which the newest release takes too.
        beside=((_UNFUSED, "        self.initialize_optimizer_states()\n", ""),),
    ),
    Proof(
        "no-sync-refused", "0.16.9-then", "accelerate zero2 4",
        (("accelerate/accelerator.py",
          'context = getattr(model, "no_sync", context)',
          'context = getattr(model, "no_sync", context) if self.state.deepspeed_plugin.zero_stage < 2 else context'),),
    ),
    Proof(
        "step-in-no-sync", "0.16.9-then", "accelerate zero1 4",
        (("accelerate/utils/deepspeed.py",
          "        self.engine.backward(loss, **kwargs)\n",
          "        is_last = not self.engine.inside_no_sync_ctxt\n"
          "        self.engine.set_gradient_accumulation_boundary(is_boundary=is_last)\n"
          "        self.engine.backward(loss, **kwargs)\n"),
         ("accelerate/utils/deepspeed.py",
          "        self.engine.step()\n", "        if is_last:\n            self.engine.step()\n")),
        # What Accelerate's own correction then ran into.
        beside=(_UNSCALED_IN_NO_SYNC,),
    ),
    Proof(
        "flat-buffer-view", "0.18.9", "bare zero1 1",
        ((f"{_ZERO}/stage_1_and_2.py", "use_cpu_data=False)\n", "use_cpu_data=False).detach()\n"),),
    ),
)  # fmt: skip


# Python runs it before anything else, and with it reads these files otherwise than they are on the disk.
_SITECUSTOMIZE = """
import importlib.machinery, json
edits = json.loads({edits!r})
plain = importlib.machinery.SourceFileLoader.get_code
def get_code(self, name):
    path = self.get_filename(name)
    mine = [edit for edit in edits if path.endswith(edit[0])]
    if not mine:
        return plain(self, name)
    text = self.get_data(path).decode()
    for _, as_is, as_it_should_be in mine:
        text = text.replace(as_is, as_it_should_be)
    return compile(text, path, "exec")
importlib.machinery.SourceFileLoader.get_code = get_code
"""


def write_edits(stack: str, edits: Sequence[Edit], folder: Path) -> None:
    """A folder that, first on PYTHONPATH, gives the stack the lines that it should have."""
    for path, as_is, _ in edits:
        (file,) = (
            file for layer in stacks()[stack].layers if (file := layer_folder(cache_directory(), layer) / path).exists()
        )
        if (count := file.read_text().count(as_is)) != 1:
            raise UserError(f"{path} of {stack} has {count} times {as_is!r}", "correct PROOFS")
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(edits=json.dumps(edits)))


def prove(proof: Proof) -> list[dict[str, Any]]:
    """Rows of the control as the stack is, then with its lines as they should be."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for is_edited in (False, True):
            write_edits(proof.stack, (*proof.beside, *(proof.edits if is_edited else ())), Path(name))
            for _ in range(proof.repeats):
                found = bare.under(proof.stack, proof.only, Path(name))
                rows += [{"cause": proof.cause, "is_edited": is_edited, **row} for row in found]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("causes", nargs="*", metavar="CAUSE")
    parser.add_argument("--output", type=Path, default=Path("reports/releases/proofs.json"))
    options = parser.parse_args()
    use_own_build(cache_directory())
    kept = bare.read_rows(options.output)
    for proof in PROOFS:
        if not options.causes or proof.cause in options.causes:
            kept = [row for row in kept if row["cause"] != proof.cause] + prove(proof)
            bare.write_rows(options.output, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
