"""Is it that line? Each cause of causes.yaml is taken out of its release, and the control is run with it and without.

python -m study.releases.proofs [CAUSE ...] [--output reports/releases/proofs.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from study.errors import UserError
from study.host.folders import cache_directory
from study.host.operators import use_own_build
from study.host.stacks import layer_folder
from study.releases import bare

_ZERO = "deepspeed/runtime/zero"


@dataclasses.dataclass(frozen=True)
class Proof:
    """The lines as the release has them, and what they should be; `only` names the cases of the control."""

    cause: str
    release: str
    only: str
    edits: tuple[tuple[str, str, str], ...]
    repeats: int = 1


PROOFS = (
    Proof(
        "last-micro-step-only", "0.17.6", "bare zero2 4 outside",
        ((f"{_ZERO}/stage_1_and_2.py",
          "if not i in self.averaged_gradients or self.averaged_gradients[i] is None:",
          "if i not in self.all_grad_tensors or self.all_grad_tensors[i] is None:"),),
    ),
    Proof(
        "unscaled-in-no-sync", "0.17.6", "accelerate zero1 4",
        (("deepspeed/runtime/engine.py",
          "do_gradient_reduction = self.enable_backward_allreduce and not self.inside_no_sync_ctxt and not",
          "do_gradient_reduction = self.enable_backward_allreduce and not"),),
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


def write_edits(proof: Proof, folder: Path) -> None:
    """A folder that, first on PYTHONPATH, gives the release the lines that it should have."""
    for path, as_is, _ in proof.edits:
        count = (layer_folder(cache_directory(), f"deepspeed-{proof.release}") / path).read_text().count(as_is)
        if count != 1:
            raise UserError(f"{path} of {proof.release} has {count} times {as_is!r}", "correct PROOFS")
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(edits=json.dumps(proof.edits)))


def prove(proof: Proof) -> list[dict[str, Any]]:
    """Rows of the control as the release is, then with its lines as they should be."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        write_edits(proof, Path(name))
        for is_edited in (False, True):
            for _ in range(proof.repeats):
                found = bare.under(proof.release, proof.only, Path(name) if is_edited else None)
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
