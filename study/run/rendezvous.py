"""Rendezvous of ranks on several machines before init_process_group: an error on one rank reaches all of them.

A launcher stops only the ranks of its own machine. Ranks on other machines would block in their first collective until
its timeout, up to half an hour. Therefore all ranks first synchronize through the TCPStore that their launchers share.
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
from study.records.outcome import Outcome

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Say = Callable[[str], None]
_POLL_S = 0.1
_CONNECT_S = 20
# Delay of the line that names the missing ranks, which may still download weights.
_SILENCE_S = 30.0
REFUSAL_ACK_TIMEOUT_S = 8
# Flags that may differ between the machines of one run; environment.json's entries for each machine.
FLAGS_OF_A_MACHINE = {"output_dir", "overwrite_output_dir", "nvme_path", "resume_from_checkpoint"}
MACHINE_FIELDS = ("cpu", "cpu_cores", "threads_per_rank", "host_memory_gib", "devices", "driver")


def machine_count() -> int:
    """Return the number of machines of this launch."""
    groups = os.environ.get("GROUP_WORLD_SIZE", "1")
    # If the ranks create the store themselves, there is none before init_process_group.
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return int(groups) if shared and groups.isdecimal() and "RANK" in os.environ else 1


def _store() -> Store:
    if (store := _connected_store()) is None:
        raise RuntimeError("the store of the launchers is gone")
    return store


@functools.cache
def _connected_store() -> Store | None:
    """Return the launchers' store; None if it is gone. It connects once, as a failed attempt takes _CONNECT_S."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return PrefixStore("zero-study", TCPStore(address, port, timeout=timedelta(seconds=_CONNECT_S)))
    except RuntimeError:
        return None


def publish_refusal(refusal: UserError) -> None:
    """Publish a refusal to the ranks on other machines, which read it in the rendezvous; only the first is stored."""
    if machine_count() == 1:
        return
    with contextlib.suppress(RuntimeError):
        rank, machine = int(os.environ["RANK"]), os.environ.get("GROUP_RANK")
        source = {"rank": rank, "machine": machine, "refusal": refusal.to_json()}
        _store().compare_set("refusal", "", json.dumps(source))
        if os.environ.get("LOCAL_RANK") == "0":
            _store().add("heard", 1)


def wait_for_acknowledgements() -> None:
    """Wait on the main process until every machine has read the refusal: the store ends with its launcher."""
    if machine_count() == 1 or os.environ["RANK"] != "0":
        return
    deadline = time.monotonic() + REFUSAL_ACK_TIMEOUT_S
    with contextlib.suppress(RuntimeError):
        while _store().add("heard", 0) < machine_count() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def sync_as_main(agreed: Mapping[str, Any], take_folder: Callable[[], Mapping[str, Any]], print_line: Say) -> list[Any]:
    """Return the environments of the other machines once all their ranks are ready. Called on the main process.

    The folder is locked after every rank has accepted the request, and the run begins after all have seen the lock.
    """
    ranks = range(1, int(os.environ["WORLD_SIZE"]))
    with _lost_store_as_refusal():
        _publish("main", agreed)
        ready = _get_all([f"ready {rank}" for rank in ranks], print_line)
        _publish("folder", take_folder())
        _get_all([f"seen {rank}" for rank in ranks], print_line)
        _publish("go", True)
    return [machine for machine in ready if machine is not None]


def sync_with_main(
    agreed: Mapping[str, Any], machine: Mapping[str, Any], look_at_folder: Callable[[Mapping[str, Any]], object]
) -> None:
    """Wait for the main process to begin; raise UserError if requests differ. Called on all other ranks."""
    rank = int(os.environ["RANK"])
    with _lost_store_as_refusal():
        (expected,) = _get_all(["main"])
        for field, value in json.loads(json.dumps(agreed)).items():
            if value != expected.get(field):
                local, main = (json.dumps(item) for item in (value, expected.get(field)))
                short = [text if len(text) <= 80 else f"{text[:77]}..." for text in (local, main)]
                raise UserError(
                    f"{field} is {short[0]} on rank {rank}, and {short[1]} on rank 0",
                    "use the same command, files and packages on every machine; ZERO_STUDY_CACHE may name a folder that"
                    " they share",
                )
        _publish(f"ready {rank}", machine if os.environ.get("LOCAL_RANK") == "0" else None)
        look_at_folder(*_get_all(["folder"]))
        _publish(f"seen {rank}", True)
        _get_all(["go"])


def publish_outcome(local_ending: Outcome) -> Outcome:
    """Return the ending of the rank that failed first: the others report only a lost connection."""
    if machine_count() == 1:
        return local_ending
    try:
        first = _store().compare_set("ending", "", json.dumps(dataclasses.asdict(local_ending)))
        return Outcome(**json.loads(first))
    except RuntimeError:
        return local_ending


def _publish(key: str, value: Any) -> None:
    _store().set(key, json.dumps(value))


def _get_all(keys: list[str], print_line: Say | None = None) -> list[Any]:
    """Return the values of the keys once all ranks have set them; raise the refusal of a rank if there is one."""
    store, started = _store(), time.monotonic()
    while not store.check(keys):
        if store.check(["refusal"]):
            source = json.loads(store.get("refusal"))
            refusal = refusal_from_json(source["refusal"])
            if source["machine"] != os.environ.get("GROUP_RANK"):
                refusal.problem = f"rank {source['rank']}, on another machine: {refusal.problem}"
            raise refusal
        if print_line is not None and time.monotonic() - started > _SILENCE_S:
            missing = [key.split()[1] for key in keys if not store.check([key])]
            print_line(f"waiting for rank{'s'[: len(missing) > 1]} {', '.join(missing)}"[:100])
            print_line = None
        time.sleep(_POLL_S)
    return [json.loads(store.get(key)) for key in keys]


@contextlib.contextmanager
def _lost_store_as_refusal() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        problem = "the main process exited before this run began"
        raise UserError(problem, "read the output of its machine, and restart all") from None
