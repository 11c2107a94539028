"""Initial weights: one set per (task, model, weights, seed), created once and loaded by every strategy.

The comparison of strategies depends on equal weights. `python -m study.workloads.initial`, with the flags of
study/train.py, creates them in advance: large models take minutes, which `study weights SUITE` keeps out of the sweep.
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
from study.config.flags import RunConfig, parse_command_line, resolve_config
from study.config.strategies import Strategy, read_strategy
from study.host.folders import atomic_folder, cache_directory, check_disk_space, content_digest, with_digest
from study.host.stacks import import_libraries, is_at_least
from study.records.outcome import Terminated, raise_on_signals
from study.workloads import presets
from study.workloads.architecture import (
    add_adapters,
    build_model,
    model_class,
    model_config,
    model_size,
    select_attention,
    with_run_settings,
)
from study.workloads.presets import FAMILY_OF_TASK, OTHER_MODEL, Preset, find_model
from study.workloads.tensor_plans import build_stand_in_shards, is_sharded_on_load, keep_own_shards, loading_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECORD_NAME = "initial_weights.json"
# Version of that record. Folders of another version are ignored.
FORMAT = 2
STAND_IN_WEIGHT = 0.01
# Bytes on disk per parameter: fp32, and a margin for the other files.
WEIGHT_FILE_BYTES = 4.2


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """A weights folder in transformers' format, and the sha256 of its safetensors files in order of name."""

    path: Path
    sha256: str


def materialize_initial_weights(config: RunConfig, cache_dir: Path) -> InitialWeights:
    """Return the initial weights of a run, which are equal for every strategy; create or download missing ones.

    Call it before the Accelerator exists: with ZeRO-3 transformers would load into partitions.
    """
    from filelock import FileLock
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    assert not is_deepspeed_zero3_enabled(), "materialize_initial_weights comes before ZeRO-3 is set up"
    # Dropout and attention do not change weights: one set serves all their values.
    config = dataclasses.replace(config, dropout=-1.0, attn_implementation="eager")
    made_from = _made_from(config)
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]
    name = f"{config.task}-{config.model_name}-{config.weights}-seed{config.seed}-{digest}"
    folder = cache_dir / "initial_weights" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{name}.lock")):
        if not folder.exists():
            _write_weights(config, made_from, folder)
    # Every rank checks the files concurrently: 0.13 s per GiB.
    if damage := _find_damage(folder):
        raise UserError(f"the initial weights in {folder} are damaged ({damage})", "delete the folder, and run again")
    return InitialWeights(folder, json.loads((folder / RECORD_NAME).read_text())["sha256"])


def load_initial_model(
    config: RunConfig, initial: InitialWeights | None, strategy: Strategy | None = None
) -> PreTrainedModel:
    """Load the model with adapters and gradient checkpointing; only this rank's shards if the strategy shards on load.

    With an active ZeRO-3 configuration transformers partitions the model while it loads.
    """
    import torch
    from transformers import AutoConfig

    if initial is None:
        model = _build_stand_in(config, strategy)
    else:
        saved = AutoConfig.from_pretrained(initial.path, attn_implementation=select_attention(config))
        dtype_option = "dtype" if is_at_least("transformers", "4.56") else "torch_dtype"
        architecture = with_run_settings(saved, config)
        model, keys = model_class(config, architecture).from_pretrained(
            initial.path,
            config=architecture,
            use_safetensors=True,
            output_loading_info=True,
            **{dtype_option: torch.float32},
            **loading_options(architecture, strategy),
        )
        if is_sharded_on_load(strategy):
            keep_own_shards(model)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if keys.get(kind):
                problem = f"the initial weights in {initial.path} do not fit: {kind} {sorted(map(str, keys[kind]))[:3]}"
                raise UserError(problem, "delete the folder and run again")
        if FAMILY_OF_TASK[config.task] == "causal-lm":
            # transformers' fallback for class names that do not imply a loss, such as GPT-2's. Set here, since its
            # warning in the forward pass would break the compiled graph.
            model.loss_type = "ForCausalLM"
    add_adapters(model, config)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _build_stand_in(config: RunConfig, strategy: Strategy | None) -> PreTrainedModel:
    """Build a virtual rank's model with a constant for every weight, since values do not matter.

    Like from_pretrained it builds module by module, partitioned immediately with ZeRO-3, but without a checkpoint.
    """
    import torch
    from transformers.initialization import no_init_weights
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.utils.generic import ContextManagers

    architecture = model_config(config)
    cls = model_class(config, architecture)
    architecture.dtype = torch.float32
    if is_sharded_on_load(strategy):
        model = build_stand_in_shards(cls, architecture, strategy)
    else:
        contexts = cls.get_init_context(torch.float32, False, False, False) if is_deepspeed_zero3_enabled() else []
        with ContextManagers([*contexts, no_init_weights()]):
            model = cls(architecture)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            # Uninitialized memory may have NaN, and DeepSpeed skips steps with NaN. With ZeRO-3 this fills the rank's
            # shard, which may be on NVMe by now.
            shard = getattr(parameter, "ds_tensor", parameter)
            is_on_nvme = getattr(shard, "final_location", None) == "nvme"
            if is_on_nvme:
                parameter.nvme_swapper.swap_in([parameter], async_op=False)
            shard.fill_(STAND_IN_WEIGHT)
            if (secondary := getattr(parameter, "ds_secondary_tensor", None)) is not None:
                secondary.fill_(STAND_IN_WEIGHT)
            if is_on_nvme:
                parameter.nvme_swapper.swap_out_and_release([parameter])
    return model.eval()


def _made_from(config: RunConfig) -> dict[str, Any]:
    architecture = model_config(config)
    described = {key: value for key, value in architecture.to_dict().items() if key != "transformers_version"}
    settings: dict[str, Any] = {"format": FORMAT, "task": config.task, "weights": config.weights, "seed": config.seed}
    source = find_model(config.model_name_or_path)
    if config.weights == "pretrained":
        if isinstance(source, Preset):
            settings |= {"hub_id": source.hub_id, "revision": source.revision}
        elif isinstance(source, Path):
            # By content: a file may be replaced by another one of the same name, size and time.
            try:
                settings["files"] = {file.name: content_digest(file) for file in _safetensors_in(source)}
            except OSError as error:
                raise UserError(f"cannot read the weights in {source} ({error.strerror})", OTHER_MODEL) from error
        else:
            settings |= {"hub_id": source, "revision": getattr(architecture, "_commit_hash", None)}
    return json.loads(json.dumps(settings | {"architecture": described}))


def _safetensors_in(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder; UserError if there are none."""
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if not files:
        raise UserError(f"there is no safetensors file in {folder}", "convert the weights: pickle files are not loaded")
    return files


def _write_weights(config: RunConfig, made_from: dict[str, Any], folder: Path) -> None:
    import torch
    import transformers

    assert torch.get_default_dtype() == torch.float32
    with atomic_folder(folder) as partial:
        # Checked first: creating the weights can take minutes.
        needed = WEIGHT_FILE_BYTES * model_size(config).parameters
        check_disk_space(folder.parent, needed, f"keeping the initial weights of {config.model_name_or_path}")
        # The random state is restored, so that ranks that create weights and ranks that do not continue equally.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(config.seed)
            model = _pretrained(config) if config.weights == "pretrained" else build_model(config)
        # Small shards: saving copies one shard at a time, so host memory is little more than the model.
        model.save_pretrained(partial, max_shard_size="2GB")
        sha256 = hashlib.sha256()
        for file in _safetensors_in(partial):
            with file.open("rb") as stream:
                while block := stream.read(1 << 22):
                    sha256.update(block)
        record = {
            "sha256": sha256.hexdigest(),
            "files": {file.name: content_digest(file) for file in sorted(partial.iterdir())},
            "made_from": made_from,
            "made_by": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        (partial / RECORD_NAME).write_text(json.dumps(with_digest(record), indent=1) + "\n")


def _pretrained(config: RunConfig) -> PreTrainedModel:
    """Load the published weights; UserError if any are missing outside the task's head."""
    import torch

    architecture = model_config(config)
    cls = model_class(config, architecture)
    source = find_model(config.model_name_or_path)
    if not isinstance(source, Path):
        name, revision = presets.hub_place(source)
        files = presets.hub_files(name, revision)
        if files is not None and not any(file.endswith(".safetensors") for file in files):
            raise UserError(f"{name} publishes no safetensors, and pickle files are not loaded", presets.NO_NETWORK)
    options = {"config": architecture, "dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, keys = presets.load_from(source, cls.from_pretrained, "weights", **options)
    # The task's head is new and initialized from the seed; a missing tensor elsewhere would be a random layer.
    holes = [key for key in keys["missing_keys"] if key.startswith(f"{cls.base_model_prefix}.")]
    if holes:
        raise UserError(f"{config.model_name_or_path} lacks weights: {', '.join(sorted(holes)[:3])}", OTHER_MODEL)
    return model


def _find_damage(folder: Path) -> str:
    try:
        record = json.loads((folder / RECORD_NAME).read_text())
        if with_digest(record) != record:
            return f"{RECORD_NAME} was changed"
        digests = record["files"]
        return next((f"{name} was changed" for name in digests if content_digest(folder / name) != digests[name]), "")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return first_line(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Create the weights; return the exit status: 0 they exist, 1 they do not fit this machine, 2 invalid request."""
    started = time.monotonic()
    try:
        config = resolve_config(parse_command_line(arguments), accelerator_visible=False)
        import_libraries(read_strategy("single"))
        # SIGTERM (as of `timeout`) raises, so that no partial model stays on the disk.
        with raise_on_signals(Terminated(), signal.SIGTERM):
            initial = materialize_initial_weights(config, cache_directory())
    except Terminated:
        return 128 + signal.SIGTERM
    except UserError as refusal:
        print(f"error: {refusal.problem}. To fix it: {refusal.fix}.", file=sys.stderr)
        return 1 if isinstance(refusal, Unsupported) else 2
    size = sum(file.stat().st_size for file in initial.path.glob("*.safetensors"))
    took = time.monotonic() - started
    print(f"{config.model_name_or_path}, seed {config.seed}: {size / 1e9:.2f} GB in {took:.0f} s, {initial.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
