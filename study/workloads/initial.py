"""The initial weights: one set per (task, model, weights, seed), drawn once and loaded under every strategy.

Strategies can be compared only because of this. `python -m study.workloads.initial`, with flags of study/train.py,
draws those of a later run: for models of gigabytes this takes minutes, which `study weights SUITE` spends before a
sweep's time is counted.
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
from study.host.stacks import import_libraries, is_since
from study.records.outcome import Terminated, raising_on
from study.workloads.architecture import (
    add_adapters,
    build_model,
    model_class,
    model_config,
    select_attention,
    shape_of,
    with_run_settings,
)
from study.workloads.presets import (
    FAMILY_OF_TASK,
    NO_NETWORK,
    OTHER_MODEL,
    Preset,
    find_model,
    hub_files,
    hub_place,
    load_from,
)
from study.workloads.tensor_plans import build_stand_in_shards, is_sharded_on_load, keep_own_shards, loading_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECORD_NAME = "initial_weights.json"
# The format of that record. Folders of another format are ignored.
FORMAT = 2
STAND_IN_WEIGHT = 0.01
# Bytes on disk per parameter: fp32, and a little for the files around it.
WEIGHT_FILE_BYTES = 4.2


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """A folder in transformers' format, and the sha256 of its safetensors files in order of name."""

    path: Path
    sha256: str
    # A notice for the user, set in the one process that had to write them again.
    remark: str = dataclasses.field(default="", compare=False)


def materialize_initial_weights(config: RunConfig, cache_dir: Path) -> InitialWeights:
    """Return the set of weights that every strategy starts from; draw or download it if it is not there yet.

    Call it before the Accelerator exists: under ZeRO-3 transformers would load into partitions.
    """
    from filelock import FileLock
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    assert not is_deepspeed_zero3_enabled(), "materialize_initial_weights comes before ZeRO-3 is set up"
    # Dropout and attention change no weight: one set serves every value of them.
    config = dataclasses.replace(config, dropout=-1.0, attn_implementation="eager")
    made_from = _made_from(config)
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]
    name = f"{config.task}-{config.model_name}-{config.weights}-seed{config.seed}-{digest}"
    folder = cache_dir / "initial_weights" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock, remark = FileLock(folder.with_name(f"{name}.lock")), ""
    with lock:
        if not folder.exists():
            _write_weights(config, made_from, folder)
    # Every rank checks for itself, concurrently: 0.13 s per GiB.
    if _find_damage(folder):
        with lock:
            # Unless another rank has written them again by now.
            if damage := _find_damage(folder):
                remark = f"the initial weights in {folder} were damaged ({damage}) and have been written again"
                try:
                    _write_weights(config, made_from, folder)
                except UserError as refusal:
                    problem = f"the initial weights in {folder} are damaged ({damage}), and cannot be written again"
                    raise UserError(f"{problem}: {refusal.problem}", refusal.fix) from refusal
    return InitialWeights(folder, json.loads((folder / RECORD_NAME).read_text())["sha256"], remark)


def load_initial_model(
    config: RunConfig, initial: InitialWeights | None, strategy: Strategy | None = None
) -> PreTrainedModel:
    """Load the model; only this rank's shards, where the strategy shards tensors before there is an engine.

    Under a live ZeRO-3 configuration transformers partitions it while it loads.
    """
    import torch
    from transformers import AutoConfig

    if initial is None:
        model = _build_stand_in(config, strategy)
    else:
        saved = AutoConfig.from_pretrained(initial.path, attn_implementation=select_attention(config))
        dtype_option = "dtype" if is_since("transformers", "4.56") else "torch_dtype"
        architecture = with_run_settings(saved, config)
        model, keys = model_class(config, architecture).from_pretrained(
            initial.path, config=architecture, use_safetensors=True, output_loading_info=True,
            **{dtype_option: torch.float32}, **loading_options(architecture, strategy),
        )  # fmt: skip
        if is_sharded_on_load(strategy):
            keep_own_shards(model)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if keys.get(kind):
                raise UserError(
                    f"the initial weights in {initial.path} do not fit the model:"
                    f" {kind.replace('_', ' ')}: {sorted(map(str, keys[kind]))[:3]}",
                    "delete the folder and run again",
                )
        if FAMILY_OF_TASK[config.task] == "causal-lm":
            # The loss that transformers falls back to where a class's name does not say which, as GPT-2's. Its warning
            # about that, inside the forward pass, would cut a compiled graph in two.
            model.loss_type = "ForCausalLM"
    add_adapters(model, config)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _build_stand_in(config: RunConfig, strategy: Strategy | None) -> PreTrainedModel:
    """Build a virtual rank's model: the right shapes, and one constant for every weight, since no value of it matters.

    It is made as from_pretrained makes one, module by module and partitioned at once under ZeRO-3, but from no
    checkpoint.
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
            # Fresh memory may have NaN, and DeepSpeed skips steps with NaN. Under ZeRO-3 this fills the rank's shard,
            # which may be on NVMe by now.
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
    """Describe everything that decides the weights."""
    architecture = model_config(config)
    described = {key: value for key, value in architecture.to_dict().items() if key != "transformers_version"}
    made: dict[str, Any] = {"format": FORMAT, "task": config.task, "weights": config.weights, "seed": config.seed}
    source = find_model(config.model_name_or_path)
    if config.weights == "pretrained":
        if isinstance(source, Preset):
            made |= {"hub_id": source.hub_id, "revision": source.revision}
        elif isinstance(source, Path):
            # By content: a file may be replaced by another one of its name, size and time.
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
        raise UserError(f"there is no safetensors file in {folder}", "convert the weights: pickle files are not loaded")
    return files


def _write_weights(config: RunConfig, made_from: dict[str, Any], folder: Path) -> None:
    import torch
    import transformers

    assert torch.get_default_dtype() == torch.float32
    with whole_or_nothing(folder) as partial:
        # Before minutes are spent on weights that cannot be kept.
        needed = WEIGHT_FILE_BYTES * shape_of(config).parameters
        refuse_full_disk(folder.parent, needed, f"keeping the initial weights of {config.model_name_or_path}")
        # The random state is restored: a rank that draws and one that does not must continue in the same way.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(config.seed)
            model = _pretrained(config) if config.weights == "pretrained" else build_model(config)
        # Small shards: saving copies one shard at a time, so the host needs little more than the model once.
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
            raise UserError(f"{name} publishes no safetensors, and pickle files are not loaded", NO_NETWORK)
    options = {"config": architecture, "dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, keys = load_from(source, cls.from_pretrained, "weights", **options)
    # The task's head is new and drawn from the seed; a missing tensor elsewhere would be a random layer.
    holes = [key for key in keys["missing_keys"] if key.startswith(f"{cls.base_model_prefix}.")]
    if holes:
        raise UserError(f"{config.model_name_or_path} lacks weights: {', '.join(sorted(holes)[:3])}", OTHER_MODEL)
    return model


def _find_damage(folder: Path) -> str:
    """Name what is not as it was written; empty if all is."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text())
        if sealed(record) != record:
            return f"{RECORD_NAME} was changed"
        written = record["files"]
        return next((f"{name} was changed" for name in written if content_digest(folder / name) != written[name]), "")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return first_line(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the weights. Exit status: 0 they are there, 1 they do not fit on this machine, 2 the request is wrong."""
    started = time.monotonic()
    try:
        config = resolved(parse_command_line(arguments), accelerator_visible=False)
        import_libraries(read_strategy("single"))
        # So that `timeout` leaves no half-written model on the disk.
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
