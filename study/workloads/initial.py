"""The initial weights: one set per (task, model, weights, seed), drawn once and loaded by every arm.

A comparison of arms is fair only because of this. `python -m study.workloads.initial`, with flags of study/train.py,
draws those of a run that comes later: for models of gigabytes this takes minutes, which `study weights SUITE` spends
before a sweep's time is counted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config.errors import Unsupported, UserError, first_line
from study.config.flags import RunConfig, parse_command_line, resolved
from study.config.strategies import Strategy, read_strategy
from study.host.folders import cache_directory, content_digest, refuse_full_disk, sealed, whole_or_nothing
from study.host.imports import import_libraries
from study.host.stacks import is_since
from study.records.outcome import Terminated, raising_on
from study.workloads.architecture import (
    add_adapters,
    attention,
    build_model,
    model_class,
    model_config,
    shape_of,
    with_run_settings,
)
from study.workloads.hub import NO_NETWORK, OTHER_MODEL, hub_files, hub_place, load_from
from study.workloads.presets import FAMILY_OF_TASK, Preset, find_model
from study.workloads.tensor_plans import divided_stand_in, divides_while_loading, keep_own_parts, loading_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECORD_NAME = "initial_weights.json"
# Of that record. Folders of another one are not looked at.
FORMAT = 2
_SUFFIXES = (".json", ".safetensors")
STAND_IN_WEIGHT = 0.01
# On disk, for each parameter: fp32, and a little for the files around it.
WEIGHT_FILE_BYTES = 4.2


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """A folder in transformers' format, and the sha256 of its safetensors files in order of name."""

    path: Path
    sha256: str
    # Said to the user: set in the one process that had to make them anew.
    remark: str = dataclasses.field(default="", compare=False)


def materialize_initial_weights(config: RunConfig, cache_dir: Path) -> InitialWeights:
    """The one set of weights that every arm of this run starts from, drawn or downloaded if it is not there yet.

    Call it before the Accelerator exists: under ZeRO-3 transformers would load into partitions.
    """
    from filelock import FileLock
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        raise ValueError("materialize_initial_weights must run before the Accelerator sets up ZeRO-3")
    # Dropout and attention change no weight: one set serves every value of them.
    config = dataclasses.replace(config, dropout=-1.0, attn_implementation="eager")
    made_from = _made_from(config)
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]
    name = config.model_name
    folder = cache_dir / "initial_weights" / f"{config.task}-{name}-{config.weights}-seed{config.seed}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    with lock:
        if not folder.exists():
            _write_weights(config, made_from, folder)
    # Every rank looks for itself, beside the others: for a GiB that takes 0.13 s.
    if not _damage(folder):
        return _written(folder)
    with lock:
        # Another rank may have made them anew by now.
        if not (damage := _damage(folder)):
            return _written(folder)
        problem = f"the initial weights in {folder} are damaged ({damage})"
        if others := sorted(file.name for file in folder.iterdir() if file.suffix not in _SUFFIXES):
            raise UserError(f"{problem}, and {others[0]} beside them is none of them", "move it away and run again")
        try:
            _write_weights(config, made_from, folder)
        except UserError as refusal:
            raise UserError(f"{problem}, and cannot be made anew: {refusal.problem}", refusal.fix) from refusal
    remark = f"the initial weights in {folder} were damaged ({damage}) and have been made anew"
    return dataclasses.replace(_written(folder), remark=remark)


def load_initial_model(
    config: RunConfig, initial: InitialWeights | None, strategy: Strategy | None = None
) -> PreTrainedModel:
    """The model of every arm; a part of each tensor, where the strategy divides them before there is an engine.

    Under a live ZeRO-3 configuration transformers partitions it while it loads.
    """
    import torch
    from transformers import AutoConfig

    if initial is None:
        model = _stand_in(config, strategy)
    else:
        saved = AutoConfig.from_pretrained(initial.path, attn_implementation=attention(config))
        in_type = "dtype" if is_since("transformers", "4.56") else "torch_dtype"
        architecture = with_run_settings(saved, config)
        model, keys = model_class(config, architecture).from_pretrained(
            initial.path, config=architecture, use_safetensors=True, output_loading_info=True,
            **{in_type: torch.float32}, **loading_options(architecture, strategy),
        )  # fmt: skip
        if divides_while_loading(strategy):
            keep_own_parts(model)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if keys.get(kind):
                raise UserError(
                    f"the initial weights in {initial.path} do not fit the model:"
                    f" {kind.replace('_', ' ')}: {sorted(map(str, keys[kind]))[:3]}",
                    "delete the folder and run again",
                )
        if FAMILY_OF_TASK[config.task] == "causal-lm":
            # The loss that transformers falls back to where a class's name does not tell, as GPT-2's; it warns of it
            # inside the forward pass, which cuts a compiled graph in two.
            model.loss_type = "ForCausalLM"
    add_adapters(model, config)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _stand_in(config: RunConfig, strategy: Strategy | None) -> PreTrainedModel:
    """A virtual rank's model: the right shapes, and one constant for every weight, since no value of it matters.

    Made as from_pretrained makes one, module by module and partitioned at once under ZeRO-3, but from no checkpoint.
    """
    import torch
    from transformers.initialization import no_init_weights
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.utils.generic import ContextManagers

    architecture = model_config(config)
    cls = model_class(config, architecture)
    architecture.dtype = torch.float32
    if divides_while_loading(strategy):
        model = divided_stand_in(cls, architecture, strategy)
    else:
        contexts = cls.get_init_context(torch.float32, False, False, False) if is_deepspeed_zero3_enabled() else []
        with ContextManagers([*contexts, no_init_weights()]):
            model = cls(architecture)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            _fill(parameter)
    return model.eval()


def _fill(parameter: Any) -> None:
    """Fresh memory may hold NaN, and DeepSpeed skips steps with NaN: every part gets a number."""
    # Under ZeRO-3 this rank's part of the parameter, which may be on the drive by now.
    held = getattr(parameter, "ds_tensor", parameter)
    on_drive = getattr(held, "final_location", None) == "nvme"
    if on_drive:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    held.fill_(STAND_IN_WEIGHT)
    if (second_copy := getattr(parameter, "ds_secondary_tensor", None)) is not None:
        second_copy.fill_(STAND_IN_WEIGHT)
    if on_drive:
        parameter.nvme_swapper.swap_out_and_release([parameter])


def _made_from(config: RunConfig) -> dict[str, Any]:
    """Everything that decides the weights."""
    architecture = model_config(config)
    described = {key: value for key, value in architecture.to_dict().items() if key != "transformers_version"}
    made: dict[str, Any] = {"format": FORMAT, "task": config.task, "weights": config.weights, "seed": config.seed}
    source = find_model(config.model_name_or_path)
    if config.weights == "pretrained":
        if isinstance(source, Preset):
            made |= {"hub_id": source.hub_id, "revision": source.revision}
        elif isinstance(source, Path):
            # By what they hold: a file may be replaced by another one of its name, size and time.
            try:
                made["files"] = {file.name: content_digest(file) for file in _safetensors_in(source)}
            except OSError as error:
                raise UserError(f"cannot read the weights in {source} ({error.strerror})", OTHER_MODEL) from error
        else:
            made |= {"hub_id": source, "revision": getattr(architecture, "_commit_hash", None)}
    return json.loads(json.dumps(made | {"architecture": described}))


def _safetensors_in(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if not files:
        raise UserError(f"there is no safetensors file in {folder}", "convert the weights: pickled ones are not loaded")
    return files


def _write_weights(config: RunConfig, made_from: dict[str, Any], folder: Path) -> None:
    import torch
    import transformers

    assert torch.get_default_dtype() == torch.float32
    with whole_or_nothing(folder) as partial:
        # Before minutes are spent on weights that cannot be kept.
        needed = WEIGHT_FILE_BYTES * shape_of(config).parameters
        refuse_full_disk(folder.parent, needed, f"keeping the initial weights of {config.model_name_or_path}")
        # The random state is put back: a rank that draws and one that does not must continue in the same way.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(config.seed)
            model = _pretrained(config) if config.weights == "pretrained" else build_model(config)
        # Small shards: saving copies one shard at a time, so the host needs little more than the model once.
        model.save_pretrained(partial, max_shard_size="2GB")
        record = {
            "sha256": _sha256(_safetensors_in(partial)),
            "files": {file.name: content_digest(file) for file in sorted(partial.iterdir())},
            "made_from": made_from,
            "made_by": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        (partial / RECORD_NAME).write_text(json.dumps(sealed(record), indent=1) + "\n")


def _pretrained(config: RunConfig) -> PreTrainedModel:
    import torch

    architecture = model_config(config)
    cls = model_class(config, architecture)
    source = find_model(config.model_name_or_path)
    if not isinstance(source, Path):
        files = hub_files(*hub_place(source))
        if files is not None and not any(file.endswith(".safetensors") for file in files):
            name = hub_place(source)[0]
            raise UserError(f"{name} publishes no safetensors, and pickled weights are not loaded", NO_NETWORK)
    options = {"config": architecture, "dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, keys = load_from(source, cls.from_pretrained, "weights", **options)
    # The task's head is new and drawn from the seed; a missing tensor elsewhere would be a random layer.
    holes = [key for key in keys["missing_keys"] if key.startswith(f"{cls.base_model_prefix}.")]
    if holes:
        raise UserError(f"{config.model_name_or_path} lacks weights: {', '.join(sorted(holes)[:3])}", OTHER_MODEL)
    return model


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _written(folder: Path) -> InitialWeights:
    return InitialWeights(folder, json.loads((folder / RECORD_NAME).read_text())["sha256"])


def _damage(folder: Path) -> str:
    """What is not as it was written, or nothing."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text())
        if sealed(record) != record:
            return f"{RECORD_NAME} was changed"
        written = record["files"]
        return next((f"{name} was changed" for name in written if content_digest(folder / name) != written[name]), "")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return first_line(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 the weights are there, 1 this box cannot hold them, 2 the request itself is wrong."""
    started = time.monotonic()
    try:
        config = resolved(parse_command_line(arguments), accelerator_visible=False)
        import_libraries(read_strategy("single"))
        # So that `timeout` leaves no half of a large model on the drive.
        with raising_on(Terminated(), signal.SIGTERM):
            initial = materialize_initial_weights(config, cache_directory())
    except Terminated:
        return 128 + signal.SIGTERM
    except UserError as refusal:
        print(f"error: {refusal.problem}. To fix it: {refusal.fix}.", file=sys.stderr)
        return 1 if isinstance(refusal, Unsupported) else 2
    size = sum(file.stat().st_size for file in initial.path.glob("*.safetensors"))
    took = time.monotonic() - started
    if initial.remark:
        print(f"notice: {initial.remark}")
    print(f"{config.model_name_or_path}, seed {config.seed}: {size / 1e9:.2f} GB in {took:.0f} s, {initial.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
