"""Reading from the Hugging Face hub or its local cache, with an answer in seconds when neither has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from study.config.errors import UserError, first_line
from study.workloads.presets import Preset

Loaded = TypeVar("Loaded")

# The libraries retry an unreachable hub for 15 s and more per file; one question settles it for all files.
PROBE_TIMEOUT_S = 5.0

OTHER_MODEL = "give another --model_name_or_path, or a local folder that holds it"
NO_NETWORK = "give --model_name_or_path a local folder, or for a run a preset and --weights random"
OTHER_TOKENIZER = "give --tokenizer_name a hub id or local folder that has one, or use --data builtin"


@functools.cache
def hub_files(repo_id: str, revision: str | None) -> tuple[str, ...] | None:
    """The repository's file names; None when the hub cannot be reached or HF_HUB_OFFLINE is set."""
    from huggingface_hub import HfApi

    # HTTPError is that of whichever http library this huggingface_hub is built on.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(repo_id, revision=revision, timeout=PROBE_TIMEOUT_S)
    except GatedRepoError as error:
        raise UserError(*_gated(repo_id)) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise UserError(
            f"the hub has no model {repo_id} at revision {revision or 'main'} that this login may read",
            "check owner/name, log in with `hf auth login`, or give a preset or a local folder",
        ) from error
    except (OfflineModeIsEnabled, HTTPError, OSError):
        return None
    return tuple(sibling.rfilename for sibling in info.siblings or ())


def load_from(source: Preset | Path | str, load: Callable[..., Loaded], what: str, **options: Any) -> Loaded:
    """`load(...)` from a folder, without the network; or from the hub, or its cache when it cannot be reached."""
    fix, no_network = (OTHER_TOKENIZER, OTHER_TOKENIZER) if what == "tokenizer" else (OTHER_MODEL, NO_NETWORK)
    if isinstance(source, Path):
        if what == "config" and not (source / "config.json").is_file():
            raise UserError(f"there is no config.json in {source}", fix)
        try:
            return load(str(source), local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:  # each format has its own errors
            raise UserError(f"cannot load the {what} in {source}: {first_line(error)}", fix) from error
    from huggingface_hub.errors import GatedRepoError

    repo_id, revision = hub_place(source)
    reachable = hub_files(repo_id, revision) is not None
    try:
        return load(
            repo_id, revision=revision or "main", local_files_only=not reachable, trust_remote_code=False, **options
        )
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error.__cause__, GatedRepoError):
            raise UserError(*_gated(repo_id)) from error
        if reachable:
            raise UserError(f"cannot load the {what} of {repo_id}: {first_line(error)}", no_network) from error
        raise UserError(
            f"the hub cannot be reached (or HF_HUB_OFFLINE is set) and the local cache has no {what} of {repo_id}",
            no_network,
        ) from error


def hub_place(source: Preset | str) -> tuple[str, str | None]:
    """Repository and revision; None is the newest."""
    if isinstance(source, str):
        return source, None
    assert source.hub_id is not None
    return source.hub_id, source.revision


def _gated(repo_id: str) -> tuple[str, str]:
    return (
        f"{repo_id} on the hub is gated and this login may not read it",
        "accept its licence on its hub page, then run `hf auth login` or set HF_TOKEN; or give a local folder",
    )
