"""Ranks on several machines, while they have no process group: what one of them finds wrong, all hear.

A launcher ends the ranks of its own machine as soon as one has left, and knows nothing of the others', which would wait
in their first collective for up to half an hour. So ranks meet before it, in the store that their launchers share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from study.config.errors import UserError, refusal_from_json
from study.records.outcome import Ending

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from study.run.open import OpenRun

Say = Callable[[str], None]
_POLL_S = 0.1
_CONNECT_S = 20
# Until a user is told what this machine waits for. The others may still download weights.
_SILENCE_S = 30.0
SECONDS_FOR_OTHER_MACHINES_TO_HEAR = 8
# What may differ between the machines of one run; and what the record tells of each.
_OF_EACH_MACHINE = {"output_dir", "overwrite_output_dir", "nvme_path", "resume_from_checkpoint"}
OF_A_MACHINE = ("cpu", "cpu_cores", "threads_per_rank", "host_memory_gib", "devices", "driver")


def count() -> int:
    """How many machines the launchers of this run stand on."""
    told = os.environ.get("GROUP_WORLD_SIZE", "1")
    # Where ranks make a store of their own there is none to meet in.
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return int(told) if shared and told.isdecimal() and "RANK" in os.environ else 1


def _rank() -> int:
    return int(os.environ["RANK"])


def _store() -> Store:
    if (store := _found_store()) is None:
        raise RuntimeError("there is no store to meet in")
    return store


@functools.cache
def _found_store() -> Store | None:
    """Looked for once: where it is gone, a look takes as long as the patience allows."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return PrefixStore("zero-study", TCPStore(address, port, timeout=timedelta(seconds=_CONNECT_S)))
    except RuntimeError:
        return None


def tell_refusal(refusal: UserError) -> None:
    """To the ranks on other machines, which come to hear it where they meet; the first word counts."""
    if count() == 1:
        return
    with contextlib.suppress(RuntimeError):
        place = {"rank": _rank(), "machine": os.environ.get("GROUP_RANK")}
        _store().compare_set("refusal", "", json.dumps(place | {"refusal": refusal.to_json()}))
        if os.environ.get("LOCAL_RANK") == "0":
            _store().add("heard", 1)


def wait_until_heard() -> None:
    """On the main process, with whose launcher the store ends."""
    if count() == 1 or _rank():
        return
    deadline = time.monotonic() + SECONDS_FOR_OTHER_MACHINES_TO_HEAR
    with contextlib.suppress(RuntimeError):
        while _store().add("heard", 0) < count() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def what_must_agree(run: OpenRun, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Of this rank's request and machine, what has to be the main process's as well."""
    return {
        **{f"--{key}": value for key, value in run.config.to_dict().items() if key not in _OF_EACH_MACHINE},
        "the strategy": dataclasses.asdict(run.launch.strategy), "the trainer": run.trainer,
        "the initial weights' digest": run.initial.sha256 if run.initial else None,
        "the samples' digest": run.data.source["tokens_sha256"], "the checkpoint's step": run.first_step,
        **{key: environment[key] for key in ("packages", "code_sha256")},
    }  # fmt: skip


def meet_others(agreed: Mapping[str, Any], take_folder: Callable[[], Mapping[str, Any]], say: Say) -> list[Any]:
    """For the main process: what the other machines are, when all their ranks are ready to do just this.

    The folder is taken when nobody has anything against it any more, and all have seen who holds it.
    """
    ranks = range(1, int(os.environ["WORLD_SIZE"]))
    with _as_a_refusal():
        _put("main", agreed)
        ready = _of_all("ready", ranks, say)
        _put("folder", take_folder())
        _of_all("seen", ranks, say)
        _put("go", True)
    return [machine for machine in ready if machine is not None]


def meet_main(
    agreed: Mapping[str, Any], machine: Mapping[str, Any], look_at_folder: Callable[[Mapping[str, Any]], object]
) -> None:
    """For every other rank, which may refuse the folder that the main process has taken."""
    rank = _rank()
    with _as_a_refusal():
        asked = _get("main")
        for what, mine in json.loads(json.dumps(agreed)).items():
            if mine != asked.get(what):
                raise UserError(
                    f"{what} is {_short(mine)} on rank {rank}, and {_short(asked.get(what))} on rank 0",
                    "give every machine the same command, files and packages; ZERO_STUDY_CACHE may name a folder that"
                    " they share",
                )
        is_its_machines_first = os.environ.get("LOCAL_RANK") == "0"
        _put(f"ready {rank}", machine if is_its_machines_first else None)
        look_at_folder(_get("folder"))
        _put(f"seen {rank}", True)
        _get("go")


def first_ending(mine: Ending) -> Ending:
    """Of all that fail together, the one that failed first: the others tell of nothing but a lost connection."""
    if count() == 1:
        return mine
    try:
        told = _store().compare_set("ending", "", json.dumps([mine.state, mine.reason, mine.hint]))
        return Ending(*json.loads(told))
    except RuntimeError:
        return mine


def _put(key: str, value: Any) -> None:
    _store().set(key, json.dumps(value))


def _get(key: str) -> Any:
    _wait([key])
    return json.loads(_store().get(key))


def _of_all(what: str, ranks: range, say: Say) -> list[Any]:
    _wait([f"{what} {rank}" for rank in ranks], say)
    return [json.loads(_store().get(f"{what} {rank}")) for rank in ranks]


def _wait(keys: list[str], say: Say | None = None) -> None:
    store, started = _store(), time.monotonic()
    while not store.check(keys):
        if store.check(["refusal"]):
            raise _heard(json.loads(store.get("refusal")))
        if say is not None and time.monotonic() - started > _SILENCE_S:
            missing = [key.split()[1] for key in keys if not store.check([key])]
            say(f"waiting for rank{'s'[: len(missing) > 1]} {', '.join(missing)}"[:100])
            say = None
        time.sleep(_POLL_S)


def _heard(said: Mapping[str, Any]) -> UserError:
    refusal = refusal_from_json(said["refusal"])
    if said["machine"] != os.environ.get("GROUP_RANK"):
        refusal.problem = f"rank {said['rank']}, on another machine: {refusal.problem}"
    return refusal


@contextlib.contextmanager
def _as_a_refusal() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        raise UserError(
            "the main process has left before this run began", "see what its machine says, and start all of them again"
        ) from None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
