"""The state of a job in a file of its run directory, and requests that others leave there for it.

The recorder of node 0 writes `status.json` while the job runs, and reads the folder `requests`, in
a thread of its own: no disk that stalls holds up anything else. So `status`, `drain` and `scale`
work from every host that sees the run directory, without the key and without a connection.

Note [Who may ask]. Only the user of the job and root may ask it for anything. Node 0 makes
the folder of requests for its user alone, and follows only regular files of that user or of root.
Others may write into a run directory (umask 002), and may have put anything at its name before or
since. So the folder is opened anew for each look, never through a link, and its files are reached
through its descriptor alone. Nothing is removed from a folder that is not the job's.
A request stays in the folder until the launcher has answered it, since a recorder may die with one
that the launcher has not got. The next recorder passes it again, and the launcher knows its id.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec

from megatron_recover.host.whole_file import replacing

STATUS_FILE = "status.json"
REQUESTS = "requests"
_SUFFIX = ".json"
_INTERVAL_S = 1.0
"""Seconds between two looks for requests, and between two writes of the state."""
_LONGEST = 4096
"""Bytes of a request; a longer file is none."""
MOST_REPLICAS = 2**31 - 1
"""Largest number of replicas that a request may name. Messages have room for 64 bits."""
ANSWERS = 16
"""Number of answers to requests that are kept for who asked."""
_AT_ONCE = ANSWERS // 2
"""Number of requests that wait for an answer of the launcher at the same time. Newer answers cannot
then displace an answer before the thread of the state has seen it."""


class NodeStatus(msgspec.Struct, frozen=True):
    """One node of a job."""

    number: int
    name: str
    state: Literal["here", "silent", "lost", "spare", "idle", "drained"]
    replicas: tuple[int, ...]


class Answer(msgspec.Struct, frozen=True):
    """The answer of a job to a request."""

    id: str
    refused: str
    """Reason why the request is refused, in whole or in part; empty if it is not."""
    text: str = ""
    """The consequences in words; empty for `drain` of a replica."""
    leaving: tuple[int, ...] = ()
    """The members that leave for it."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job at one time."""

    at: float
    """Time of the state in seconds since the epoch, by the clock of node 0."""
    replicas: int
    """Number of replicas at the start."""
    wanted: int | None = None
    """Number of replicas that the job wants by now: `scale` sets it, and `drain` lowers it. None:
    it is not known."""
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
    forming: tuple[int, ...] = ()
    """Newcomers that are formed or read a state, as far as node 0 knows; they may join the
    roster."""
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
    sees_iterations: bool = True
    """False if no member of the roster has its events here."""
    forming: tuple[int, ...] = ()

    def added_to(self, status: Status, before: Status | None) -> Status:
        """Return a state with what is newer here.

        `before`: the newest state that another recorder of this run has written, whose events are
        not seen again; None: there is none.
        """
        iteration = self.iteration
        if iteration is None and before is not None and self.sees_iterations:
            iteration = before.iteration
        return msgspec.structs.replace(
            status, step=max(status.step, self.step), iteration=iteration, iterations=self.iterations,
            saved=self.saved if status.knows_saved and self.saved is not None else status.saved, checkpoint=self.checkpoint,
            forming=tuple(replica for replica in self.forming if replica not in status.roster),
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


def is_node(name: str, num_replicas: int, nodes: Iterable[HasReplicas], roster: Sequence[int]) -> bool:
    """Return whether a target of `drain` names a node. The number of a replica goes first."""
    is_replica = any(name == str(replica) for replica in (*range(num_replicas), *roster))
    return not is_replica and any(node.name == name for node in nodes)


def targets(name: str, num_replicas: int, nodes: Iterable[HasReplicas], roster: Sequence[int]) -> tuple[int, ...]:
    """Return the members of the roster that a target of `drain` names.

    The target is the shortest form of the number of a replica, below `num_replicas` or in the
    roster, or else the name of a node.
    """
    if any(name == str(replica) for replica in (*range(num_replicas), *roster)):
        return tuple(replica for replica in roster if str(replica) == name)
    return members_on(name, nodes, roster)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a running job."""

    id: str
    """Name of the request, by which its answer is found."""
    drain: str = ""
    """Number of a replica or name of a node that is to be given back."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)] | None = None
    """Number of replicas that the job is to have; None: the request is for `drain`."""
    by: str
    """User and host that ask."""


class StatusKeeper:
    """The thread that writes the newest state of a job to its folder, and looks for requests."""

    def __init__(self, run_dir: Path, on_request: Callable[[Request], None], *, since: float = math.inf) -> None:
        """Begin to look for requests. `on_request` is called in this thread.

        `since`: start of the job in seconds since the epoch. A state in the folder that is not
        older was written for this job, by a recorder that has died.
        """
        self._run_dir, self._on_request, self._since = run_dir, on_request, since
        self._newest: Status | None = None
        self._seen: Seen | None = None
        self._written: Status | None = None
        self._waiting: set[str] = set()
        """Requests that the launcher has got and not answered."""
        self._refused: tuple[Answer, ...] = ()
        """Refusals of requests that the launcher does not get."""
        self._owner: int | None = None
        """User whose requests are followed; None until a look has found a folder of the job's."""
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
        before = self._written_before()
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(_INTERVAL_S)
            newest, seen = self._newest, self._seen
            answered = {answer.id for answer in newest.answers} if newest is not None else set()
            with contextlib.suppress(OSError):  # the next look may find a folder
                if self._owner is None:
                    make_folder(self._run_dir)
                with opened(self._run_dir, self._owner) as folder:
                    if not folder.why_closed:
                        self._owner = folder.owner
                    self._look(folder, answered, is_last=is_last)
            if newest is not None:
                newest = newest if seen is None else seen.added_to(newest, before)
                told = msgspec.structs.replace(newest, answers=(*newest.answers, *self._refused))
                if told != self._written:
                    self._written = told
                    write(self._run_dir, told)

    def _written_before(self) -> Status | None:
        """Return the state that another recorder of this job has left, if there is one."""
        try:
            found = read(self._run_dir)
        except (OSError, ValueError):
            return None
        return found if found is not None and found.at >= self._since else None

    def _look(self, folder: Folder, answered: set[str], *, is_last: bool) -> None:
        """Pass new requests to the launcher, and remove those that it has answered.

        At the end of the job all are removed.
        """
        self._waiting -= answered
        refused = {answer.id for answer in self._refused}
        for name in folder.names():
            if is_last or name in answered:
                folder.remove(name)
            elif name not in self._waiting and name not in refused and len(self._waiting) < _AT_ONCE:
                request = folder.take(name)
                if request is not None and folder.why_closed:
                    self._refused = (*self._refused, Answer(name, folder.why_closed))[-ANSWERS:]
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


class Folder(NamedTuple):
    """The folder of requests while it is open."""

    descriptor: int
    owner: int
    why_closed: str
    """Reason why no request in the folder is followed, and nothing removed; empty if it is good."""

    def names(self) -> list[str]:
        """Return the names that requests may have, without their suffix, oldest first."""
        return sorted(
            name.removesuffix(_SUFFIX) for name in os.listdir(self.descriptor) if fnmatchcase(name, f"[0-9]*{_SUFFIX}")
        )

    def take(self, name: str) -> Request | None:
        """Return the request of this name; None if there is none.

        A file that is no request of the folder's owner or of root is removed. A file that cannot be
        read stays.
        """
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(f"{name}{_SUFFIX}", flags, dir_fd=self.descriptor)
            try:
                found = os.fstat(file)
                is_request = stat.S_ISREG(found.st_mode) and (self.why_closed or found.st_uid in (0, self.owner))
                text = os.read(file, _LONGEST) if is_request else b""
            finally:
                os.close(file)
        except OSError:
            return None
        with contextlib.suppress(ValueError):
            if (request := msgspec.json.decode(text, type=Request)).id == name:
                return request
        self.remove(name)
        return None

    def remove(self, name: str) -> None:
        """Remove the file of this name, if it can be, from a good folder."""
        if not self.why_closed:
            with contextlib.suppress(OSError):
                os.unlink(f"{name}{_SUFFIX}", dir_fd=self.descriptor)


def make_folder(run_dir: Path) -> None:
    """Make the folder of requests, on node 0, if nothing has its name. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        (run_dir / REQUESTS).mkdir(0o700)


@contextlib.contextmanager
def opened(run_dir: Path, owner: int | None) -> Iterator[Folder]:
    """Open the folder of requests, and close it to others than its user.

    `owner` is the user that this process is in the run directory; None: not known yet. Raises
    OSError if there is no such folder, also if a link has its name.
    """
    folder = run_dir / REQUESTS
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found, own = os.fstat(descriptor), made_now(run_dir).st_uid if owner is None else owner
        why_closed = ""
        if found.st_uid != own:
            why_closed = f"{folder} belongs to user {found.st_uid}, and the job to user {own}: remove the folder, and ask again"
        elif stat.S_IMODE(found.st_mode) != 0o700:
            try:
                os.fchmod(descriptor, 0o700)
            except OSError as error:
                why_closed = f"{folder} is open to other users, and cannot be closed ({error.strerror}): use another --run-dir"
        yield Folder(descriptor, own, why_closed)
    finally:
        os.close(descriptor)


def ask(run_dir: Path, drain: str, by: str, replicas: int | None = None) -> str:
    """Leave a request for the job in its run directory; return its id.

    `drain`, `by` and `replicas` are as in `Request`. The job removes the file once it has answered.
    Raises OSError, and ValueError with the remedy if the folder is a link, which the job does not
    follow.
    """
    folder, name = run_dir / REQUESTS, f"{time.time_ns()}-{os.getpid()}-{secrets.token_hex(4)}"
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link, which the job does not follow: remove it, and ask again")
    with replacing(folder / f"{name}{_SUFFIX}") as file:
        file.write(msgspec.json.encode(Request(id=name, drain=drain, by=by, replicas=replicas)))
    return name
