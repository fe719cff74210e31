"""The state of a job in a file of its run directory, and requests that others leave there for it.

The recorder of node 0 writes `status.json` while the job runs, and reads the folder `requests`, in
a thread of its own: no disk that stalls holds up anything else. So `status` and
`drain` work from every host that sees the run directory, without the key and without a connection.

Note [Who may ask]. Only the user of the job and root may ask it to give replicas back. Node 0 makes
the folder of requests for its user alone, and follows only regular files of that user or of root.
Others may write into a run directory (umask 002), and may have put anything at its name before.
A request stays in the folder until the launcher has answered it, since a recorder may die with one
that the launcher has not got. The next recorder passes it again, and the launcher knows its id.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
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
ANSWERS = 16
"""Number of answers to requests that are kept for who asked."""
_AT_ONCE = ANSWERS // 2
"""Number of requests that wait for an answer of the launcher at the same time. Newer answers cannot
then displace an answer before the thread of the state has seen it."""


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
    iteration: int | None = None
    """Newest iteration that was trained; None where the events of node 0 do not show it."""
    iterations: int | None = None
    """Number of iterations to train; None if the command line does not give it."""
    losses: int
    """Number of lost replicas."""
    lost: tuple[int, ...] = ()
    """The lost replicas."""
    saved: int | None
    """Newest iteration that the job has saved, as far as node 0 knows."""
    knows_saved: bool = True
    """False if another node sees what is saved; the folder of `--save` then names the newest."""
    checkpoint: str = "no checkpoint is known yet"
    """The newest checkpoint, or why there is none, in words."""
    nodes: tuple[NodeStatus, ...]
    answers: tuple[Answer, ...] = ()
    """Answers to the newest requests."""
    exit_code: int | None = None
    """Exit code of the job, once it is over."""
    reason: str = ""


class Seen(msgspec.Struct, frozen=True):
    """The part of a job's state that its events show, up to the last one."""

    step: int
    iteration: int | None
    iterations: int | None
    saved: int | None
    checkpoint: str

    def added_to(self, status: Status) -> Status:
        """Return a state with what is newer here."""
        return msgspec.structs.replace(
            status, step=max(status.step, self.step), iteration=self.iteration, iterations=self.iterations,
            saved=self.saved if status.knows_saved and self.saved is not None else status.saved, checkpoint=self.checkpoint,
        )  # fmt: skip


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


def targets(name: str, num_replicas: int, nodes: Iterable[HasReplicas], roster: Sequence[int]) -> tuple[int, ...]:
    """Return the members of the roster that a target of `drain` names.

    The target is the shortest form of the number of a replica, below `num_replicas`,
    or else the name of a node.
    """
    if any(name == str(replica) for replica in range(num_replicas)):
        return tuple(replica for replica in roster if str(replica) == name)
    return members_on(name, nodes, roster)


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
        self._seen: Seen | None = None
        self._written: Status | None = None
        self._waiting: set[str] = set()
        """Requests that the launcher has got and not answered."""
        self._refused: tuple[Answer, ...] = ()
        """Refusals of requests that the launcher does not get."""
        self._owner: int | None = None
        """User whose requests are followed; None while none are, which `_why_closed` explains."""
        self._why_closed = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="status", daemon=True)
        self._thread.start()

    def take(self, status: Status) -> None:
        """Have this state written soon."""
        self._newest = status

    def see(self, seen: Seen) -> None:
        """Have this added to the newest state."""
        self._seen = seen

    def finish(self, wait_s: float) -> None:
        """Write the newest state, and end the thread; wait for that for at most `wait_s`."""
        self._is_over.set()
        self._thread.join(wait_s)

    def _keep(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(_INTERVAL_S)
            newest, seen = self._newest, self._seen
            if self._owner is None:
                try:
                    self._owner = open_folder(self._run_dir)
                except ValueError as error:
                    self._why_closed = str(error)
            self._look({answer.id for answer in newest.answers} if newest is not None else set(), is_last=is_last)
            if newest is not None:
                newest = newest if seen is None else seen.added_to(newest)
                told = msgspec.structs.replace(newest, answers=(*newest.answers, *self._refused))
                if told != self._written:
                    self._written = told
                    write(self._run_dir, told)

    def _look(self, answered: set[str], *, is_last: bool) -> None:
        """Pass new requests to the launcher, and remove those that it has answered.

        At the end of the job all are removed.
        """
        self._waiting -= answered
        refused = {answer.id for answer in self._refused}
        for place in _places(self._run_dir):
            name = place.stem
            if is_last or name in answered:
                _remove(place)
            elif name not in self._waiting and name not in refused and len(self._waiting) < _AT_ONCE:
                request = take(place, self._owner)
                if request is not None and self._owner is None:
                    self._refused = (*self._refused, Answer(name, self._why_closed))[-ANSWERS:]
                elif request is not None:
                    self._waiting.add(name)
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


def made_now(folder: Path) -> os.stat_result:
    """Return the state of a file that is made in a folder now, and does not stay there.

    It has the time by the clock of the file system, and the owner that this process is there (NFS
    may take root for somebody else). Raises OSError.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno())


def open_folder(run_dir: Path) -> int:
    """Make the folder of requests for this user alone, on node 0; return the number of the user.

    Raises ValueError with the reason if no request in the folder can be followed.
    """
    folder = run_dir / REQUESTS
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            owner, own = os.fstat(descriptor).st_uid, made_now(run_dir).st_uid
            if owner == own:
                os.fchmod(descriptor, 0o700)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(f"the job cannot use {folder} ({error.strerror})") from error
    if owner != own:
        raise ValueError(f"{folder} belongs to user {owner}, and the job to user {own}: remove the folder, and ask again")
    return own


def ask(run_dir: Path, drain: str, by: str) -> str:
    """Leave a request for the job in its run directory; return its id. Raises OSError.

    The job removes the file once it has answered.
    """
    folder, name = run_dir / REQUESTS, f"{time.time_ns()}-{os.getpid()}-{secrets.token_hex(4)}"
    with replacing(folder / f"{name}.json") as file:
        file.write(msgspec.json.encode(Request(id=name, drain=drain, by=by)))
    return name


def take(place: Path, owner: int | None) -> Request | None:
    """Return the request in a file; None if there is none.

    A file that is no request of this owner or of root is removed (None: of anybody). A file that
    cannot be read stays.
    """
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            is_request = stat.S_ISREG(found.st_mode) and (owner is None or found.st_uid in (0, owner))
            text = os.read(descriptor, _LONGEST) if is_request else b""
        finally:
            os.close(descriptor)
    except OSError:
        return None
    with contextlib.suppress(ValueError):
        if (request := msgspec.json.decode(text, type=Request)).id == place.stem:
            return request
    _remove(place)
    return None


def _places(run_dir: Path) -> list[Path]:
    """Return the files that may be requests, oldest first."""
    try:
        return sorted((run_dir / REQUESTS).glob("[0-9]*.json"))
    except OSError:
        return []


def _remove(place: Path) -> None:
    with contextlib.suppress(OSError):
        place.unlink()
