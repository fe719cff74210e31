"""The state of a job in a file of its run directory, and requests that others leave there for it.

The recorder of node 0 writes `status.json` while the job runs, and reads the folder `requests`, in
a thread of its own: no disk that stalls holds up anything else. So `status` and
`drain` work from every host that sees the run directory, without the key and without a connection.
Whoever may write into the folder may ask the job to give replicas back.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from megatron_recover.host.whole_file import replacing

STATUS_FILE = "status.json"
REQUESTS = "requests"
_INTERVAL_S = 1.0
"""Seconds between two looks for requests, and between two writes of the state."""
_LONGEST = 4096
"""Bytes of a request; a longer file is none."""


class NodeStatus(msgspec.Struct, frozen=True):
    """One node of a job."""

    number: int
    name: str
    state: Literal["here", "silent", "lost", "idle"]
    replicas: tuple[int, ...]


class Answer(msgspec.Struct, frozen=True):
    """The answer of a job to a request."""

    id: str
    refused: str
    """Reason why the request is refused, in whole or in part; empty if it is not."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job at one time."""

    at: float
    """Time of the state in seconds since the epoch, by the clock of node 0."""
    replicas: int
    """Number of replicas at the start."""
    roster: tuple[int, ...]
    generation: int
    step: int
    """Number of committed steps, evaluation and saves included."""
    losses: int
    """Number of lost replicas."""
    saved: int | None
    """Newest iteration that the job has saved, as far as node 0 knows."""
    knows_saved: bool = True
    """False if another node sees what is saved; the folder of `--save` then names the newest."""
    nodes: tuple[NodeStatus, ...]
    answers: tuple[Answer, ...] = ()
    """Answers to the newest requests."""
    exit_code: int | None = None
    """Exit code of the job, once it is over."""
    reason: str = ""


class HasReplicas(Protocol):
    """A node of a job, as a `Status` or a message of the coordinator has it."""

    @property
    def name(self) -> str:
        """Return the name of its host."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """Return the replicas that have ranks there."""


def members_on(name: str, nodes: Iterable[HasReplicas], roster: Sequence[int]) -> tuple[int, ...]:
    """Return the members of the roster that have ranks on the nodes of this name."""
    on_node = {replica for node in nodes if node.name == name for replica in node.replicas}
    return tuple(replica for replica in roster if replica in on_node)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a running job."""

    id: str
    """Name of the request, by which its answer is found."""
    drain: str
    """Number of a replica or name of a node that is to be given back."""
    by: str
    """User and host that ask."""


class StatusKeeper:
    """The thread that writes the newest state of a job to its folder, and looks for requests."""

    def __init__(self, run_dir: Path, on_request: Callable[[Request], None]) -> None:
        """Begin to look for requests. `on_request` is called in this thread."""
        self._run_dir, self._on_request = run_dir, on_request
        self._newest: Status | None = None
        self._written: Status | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="status", daemon=True)
        self._thread.start()

    def take(self, status: Status) -> None:
        """Have this state written soon."""
        self._newest = status

    def finish(self, wait_s: float) -> None:
        """Write the newest state, and end the thread; wait for that for at most `wait_s`."""
        self._is_over.set()
        self._thread.join(wait_s)

    def _keep(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(_INTERVAL_S)
            if (newest := self._newest) is not self._written and newest is not None:
                self._written = newest
                write(self._run_dir, newest)
            for request in requests(self._run_dir):
                self._on_request(request)


def write(run_dir: Path, status: Status) -> None:
    """Write the state of a job. A folder that accepts no file is passed over."""
    with contextlib.suppress(OSError), replacing(run_dir / STATUS_FILE) as file:
        file.write(msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n")


def read(run_dir: Path) -> Status | None:
    """Return the state that a job has written; None if it has written none.

    Raises OSError and ValueError if the file cannot be read.
    """
    try:
        return msgspec.json.decode((run_dir / STATUS_FILE).read_bytes(), type=Status)
    except FileNotFoundError:
        return None


def ask(run_dir: Path, drain: str, by: str) -> str:
    """Leave a request for the job in its run directory; return its id. Raises OSError.

    The job removes the file once it has read it.
    """
    folder, name = run_dir / REQUESTS, f"{time.time_ns()}-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(exist_ok=True)
    with replacing(folder / f"{name}.json") as file:
        file.write(msgspec.json.encode(Request(id=name, drain=drain, by=by)))
    return name


def requests(run_dir: Path) -> Iterator[Request]:
    """Yield the requests that were left for the job, oldest first, and remove them.

    What is no request is removed, too. A file that cannot be read or removed hides no other.
    """
    places: list[Path] = []
    with contextlib.suppress(OSError):
        places = sorted((run_dir / REQUESTS).glob("[0-9]*.json"))
    for place in places:
        with contextlib.suppress(OSError, ValueError):
            with open(place, "rb") as file:
                text = file.read(_LONGEST)
            place.unlink()
            yield msgspec.json.decode(text, type=Request)
