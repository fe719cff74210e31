"""The description of a run and its folder: everything that is settled before a process starts."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from pathlib import Path
from typing import Literal

import msgspec

from megatron_recover import __version__
from megatron_recover.cluster.event_store import PART_BYTES
from megatron_recover.cluster.rank_process import TOLD_TO_ALL
from megatron_recover.cluster.streams import Stream, Streams
from megatron_recover.config import NumaBinding, RecoverConfig
from megatron_recover.control_plane.node_messages import NodePlace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.placement import Placement
from megatron_recover.faults import Fault
from megatron_recover.host.addresses import HOST, INTERFACE, Ports
from megatron_recover.observe.files import LOGS, filtered_log_name, log_name, stdout_log_name
from megatron_recover.observe.follow import launcher
from megatron_recover.trace import Layout, Level
from megatron_recover.trace.ring import RING_BYTES

TRAIN_LOG = "train.log"
"""Name of the file with the lines that the first and last rank of the writer replica print."""
LAUNCHER_LOG = "launcher.log"
"""Name of the file with the console's lines that come from megatron-recover itself."""


KILLED = 128
"""Added to the number of a signal: the exit code of a run that was killed on request."""

RankStart = Literal["fork", "warm"]
"""Source of the ranks' processes: forks, or warm processes (`cluster/warm.py`)."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run as its user requested it."""

    argv: tuple[str, ...]
    """The training script and its arguments; the script is a path, or two words: -m MODULE."""
    num_replicas: int
    layout: Layout
    """Layout of one replica."""
    config: RecoverConfig
    run_dir: Path
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    signals: tuple[int, ...] = TOLD_TO_ALL
    """Signals that request the end of the job."""
    shutdown_s: int | None = None
    """Seconds from such a signal until everything is killed, and from an end of the job with a code
    other than 0 until the ranks that are left are killed. None: no limit of its own after a signal;
    `end_s` after an end with a code of `policy.ENDED_TOGETHER`, and `stop_s` after any other."""
    numa_binding: NumaBinding | None = None
    run_id: str = "none"
    """TORCHELASTIC_RUN_ID of the ranks."""
    streams: Streams = Streams()
    """The logs and the console lines of all ranks."""
    save: Path | None = None
    """The folder of `--save`, which no other live job may use; None: no checkpoint is saved."""
    log_links: Path | None = None
    """Folder with links to the logs, as torchrun arranges logs; None: there are none."""
    runner: Path | None = None
    """Script that gets `argv` as its arguments and runs the training script: in ranks, and in the
    dry run up to where training would begin. None: the training script runs by itself."""
    preload: tuple[str, ...] = ()
    """Modules that every rank finds imported, and functions (`module:function`) called before."""
    rank_start: RankStart = "fork"
    num_microbatches: int | None = None
    """M of every training step, from the command line; None if it is unknown or changes."""
    least_microbatches: int | None = None
    """The smallest M of any training step, from the command line; None if unknown."""
    microbatch_samples: int | None = None
    """Samples of each microbatch, over all lanes; None if unknown."""
    trace_level: Level = "microbatches"
    trace_file_bytes: int = PART_BYTES
    """Size in bytes at which a trace file is put aside and compressed; 0: never."""
    ring_bytes: int = RING_BYTES
    """Bytes that each process has for events that are not in the trace yet."""
    node: int = 0
    """Number of this node."""
    not_healed_by: tuple[str, ...] = ()
    """Flags because of which no lost replica is replaced; empty: they are."""
    num_spares: int = 0
    """Slots of this node that have no rank at the start, if it is the only one."""
    placement: Placement | None = None
    """The slot of every rank. None: all ranks are on this node."""
    nodes: tuple[NodePlace, ...] = ()
    """All nodes of the job, if there may be several, as this node met them."""
    is_late: bool = False
    """True if this node came after the start: it has no rank of the start, and all of its slots are
    spares."""
    address: str = HOST
    """Address at which the processes of this node listen."""
    ports: Ports | None = None
    """First and last port of the listeners; None: any."""
    node_s: float | None = None
    """Seconds of silence after which a node is removed, if there are several."""

    @property
    def script(self) -> str:
        """Return the training script as its user named it."""
        return " ".join(self.argv[:2]) if self.argv[0] == "-m" else self.argv[0]

    @property
    def command(self) -> tuple[str, ...]:
        """Return the script that a process runs, and its arguments."""
        return self.argv if self.runner is None else (str(self.runner), *self.argv)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of one replica."""
        return self.layout.num_ranks

    def place_of(self, replica: int, rank: int) -> int:
        """Return the number of a rank among the ranks of all replicas, from 0."""
        return replica * self.num_ranks + rank

    def slots(self, replica: int) -> dict[int, int]:
        """Return the slot on this node of each rank of a replica that this node runs, by rank."""
        if self.placement is None:
            return {rank: self.place_of(replica, rank) for rank in range(self.num_ranks)}
        slots = self.placement.replicas[replica]
        return {rank: slot.slot for rank, slot in enumerate(slots) if slot.node == self.node}

    @property
    def spares(self) -> tuple[int, ...]:
        """Return the slots of this node that have no rank at the start, ascending."""
        if self.is_late:
            return tuple(range(self.nodes[self.node].slots))
        if self.placement is None:
            num_ranks = self.num_replicas * self.num_ranks
            return tuple(range(num_ranks, num_ranks + self.num_spares))
        return tuple(slot.slot for slot in self.placement.left_over if slot.node == self.node)

    def spans_nodes(self, replica: int) -> bool:
        """Return whether a replica has ranks on several nodes."""
        return self.placement is not None and len(self.placement.nodes_of(replica)) > 1

    @property
    def replicas_here(self) -> tuple[int, ...]:
        """Return the replicas that have ranks on this node, ascending."""
        return tuple(replica for replica in range(self.num_replicas) if self.slots(replica))

    @property
    def num_slots_here(self) -> int:
        """Return the number of slots of this node."""
        return self.num_ranks_here + len(self.spares)

    @property
    def ranks_here(self) -> list[tuple[int, int]]:
        """Return the ranks (replica, rank) that this node runs, in order."""
        return [(replica, rank) for replica in range(self.num_replicas) for rank in self.slots(replica)]

    @property
    def num_ranks_here(self) -> int:
        """Return the number of ranks of all replicas that this node runs."""
        return len(self.ranks_here)

    def log_of(self, replica: int, rank: int) -> Path:
        """Return the path of the log with a rank's stdout and stderr, or with stderr alone."""
        return self.run_dir / log_name(replica, rank)

    def stdout_log_of(self, replica: int, rank: int) -> Path:
        """Return the path of the log with a rank's stdout, which may be that of `log_of`."""
        is_split = self.streams.are_split(self.place_of(replica, rank))
        return self.run_dir / (stdout_log_name if is_split else log_name)(replica, rank)

    def filtered_log_of(self, stream: Stream) -> Path:
        """Return the path of the log with the selected lines of a stream of all teed ranks."""
        return self.run_dir / filtered_log_name("stdout" if stream is Stream.OUT else "stderr")


def claim_folder(folder: Path, *inside: str, flag: str = "--run-dir") -> Path:
    """Create the folder of `flag` and the folders `inside` it; return its absolute path.

    A folder that exists must be empty. Raises ValueError with the remedy.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = sorted(each.name for each in folder.iterdir())
        for name in () if used else inside:
            (folder / name).mkdir()
    except OSError as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        why = "a file stands where a folder is meant" if in_the_way else error.strerror
        raise ValueError(f"{flag} {folder} cannot be used ({why}); give another folder") from error
    if used:
        raise ValueError(f"{flag} {folder} is not empty (it has {used[0]}); give another folder, as every run needs its own")
    return folder.absolute()


def claim_log_links(folder: Path, run_id: str) -> Path:
    """Create a folder for this run alone in `folder`, which `--log-dir` gives; return its path.

    The name is as torchrun makes it: the run id and some random characters. Raises ValueError with
    the remedy.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=folder)).absolute()
    except OSError as error:
        raise ValueError(f"--log-dir {folder} cannot be used ({error.strerror}); give another folder") from error


def link_logs(job: Job) -> None:
    """Make links to the logs where torchrun writes logs: `attempt_0/RANK/stdout.log`, `stderr.log`.

    RANK counts the ranks of all replicas. Where one log has both streams, in the order of printing,
    both links lead to it. The logs of `Streams.filters` get links in `attempt_0`. Does nothing
    without `--log-dir`. Raises ValueError with the remedy.
    """
    if job.log_links is None:
        return
    attempt = job.log_links / "attempt_0"
    try:
        for replica, rank in job.ranks_here:
            _link_logs_of(job, replica, rank, job.stdout_log_of(replica, rank))
        for log in map(job.filtered_log_of, job.streams.filters):
            (attempt / log.name).symlink_to(log)
    except OSError as error:  # some file systems have no links
        raise ValueError(
            f"--log-dir {job.log_links.parent} cannot have links to the logs ({error.strerror}); give another folder"
        ) from error


def link_logs_of_newcomer(job: Job, replica: int, rank: int, stdout: Path) -> None:
    """Have the links of one rank of a newcomer made, if that works.

    `stdout`: its log of stdout. A thread makes them: the launcher of a job waits for no disk.
    """

    def make() -> None:
        with contextlib.suppress(OSError):  # it is no reason to start nobody
            _link_logs_of(job, replica, rank, stdout)

    if job.log_links is not None:
        with contextlib.suppress(RuntimeError):  # no thread is left
            threading.Thread(target=make, name=f"links-{replica}.{rank}", daemon=True).start()


def _link_logs_of(job: Job, replica: int, rank: int, stdout: Path) -> None:
    assert job.log_links is not None
    folder = job.log_links / "attempt_0" / str(job.place_of(replica, rank))
    folder.mkdir(parents=True)
    (folder / "stdout.log").symlink_to(stdout)
    (folder / "stderr.log").symlink_to(job.log_of(replica, rank))


def new_folder(prefix: str = "") -> Path:
    """Create and return `runs/<prefix><time>`; if that name is taken, with `-2`, `-3` and so on.

    Raises ValueError with the remedy if no folder can be made.
    """
    runs = Path("runs")
    name = prefix + time.strftime("%Y%m%d-%H%M%S")
    try:
        runs.mkdir(exist_ok=True)
        for number in itertools.count(1):
            folder = runs / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise ValueError(f"no folder can be made in {runs.absolute()} ({error.strerror}); give one with --run-dir") from error
    raise AssertionError("unreachable: numbers do not end")


def create_run_dir(run_dir: Path | None) -> Path:
    """Create the folder of a run, `runs/<time>` by default, and return its absolute path.

    It has an empty folder for logs. Raises ValueError with the remedy.
    """
    return claim_folder(run_dir if run_dir is not None else new_folder(), LOGS)


def leaves_files(exit_code: int, *, has_begun: bool) -> bool:
    """Return whether the run directory is kept at the end, and gets summary and report.

    It is discarded after bad input, and after a signal before training began. A user who asked for
    an immediate end does not wait for a report.
    """
    return exit_code != ExitCode.BAD_INPUT and exit_code < KILLED and (exit_code != ExitCode.INTERRUPTED or has_begun)


def write_description(job: Job) -> None:
    """Write `run.json`: the run's settings, for its readers and to repeat the run.

    Raises OSError.
    """
    description = {
        "version": __version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "launcher": launcher.this_process(),
        "argv": job.argv,
        "replicas": job.num_replicas,
        "layout": job.layout,
        "recover": job.config,
        "faults": job.faults,
        "seed": job.seed,
    }
    if job.nodes:
        description["nodes"] = [{"number": node.number, "name": node.name} for node in job.nodes]
    text = msgspec.json.format(msgspec.json.encode(description), indent=2)
    (job.run_dir / launcher.RUN_FILE).write_bytes(text + b"\n")


def sharing_a_gpu(place: int) -> dict[str, str]:
    """Return the environment with which NCCL accepts several ranks on one device.

    NCCL refuses two ranks of one host on one device, so each rank claims a host of its own, and all
    use sockets. `place`: the rank's number among all ranks of the job, from 0. Without `NCCL_NET`
    NCCL would take a plugin or InfiniBand first where there is one.
    """
    return {
        "NCCL_HOSTID": f"rank-{place}",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_MAX_CTAS": "2",
        "NCCL_NVLS_ENABLE": "0",
    }
