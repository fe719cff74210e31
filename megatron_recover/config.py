"""Settings of the trainer, and the context that the launcher gives each rank.

No other module reads or sets the environment.

`RecoverConfig` is the one definition of the trainer's resilience flags. Its fields are the
arguments of the Megatron argument group (field ``min_replicas`` is ``--recover-min-replicas``);
`RecoverConfig.check` checks them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from megatron_recover.core.tree import TREE_ABOVE
from megatron_recover.deadlines import DEFAULT_S, Deadlines

CONTEXT_VARIABLE = "MEGATRON_RECOVER_CONTEXT"
KEY_VARIABLE = "MEGATRON_RECOVER_KEY"
"""The variable with the text of a key, for a job of several nodes without `--key-file`. No process
that runs code of the user inherits it."""
CLOCK_OFFSET_VARIABLE = "MEGATRON_RECOVER_CLOCK_OFFSET_S"
"""The variable with seconds that are added to the clock of this node, for tests."""
_DESCRIPTORS_VARIABLE = "MEGATRON_RECOVER_DESCRIPTORS"
BAD_ARGUMENTS = "bad arguments: "
"""Prefix of each line in which a rank reports what it refuses; the launcher shows the rest."""
FOR_CONSOLE = "for the console: "
"""Prefix of each line of a dry run that the launcher shows, without the prefix."""
_MOST_TRIES = 2**63 - 1
"""Largest budget: a message has room for 64 bits."""
DRY_RUN_PASSED = 100
"""Exit code of a dry run that got to where training begins; 0: the script never got there."""


def below_one(numbers: Mapping[str, int | None]) -> list[str]:
    """Return one line for each flag whose number is given and below 1."""
    given = ((flag, number) for flag, number in numbers.items() if number is not None)
    return [f"{flag} is {number}; it must be at least 1" for flag, number in given if number < 1]


class RecoverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Resilience settings of a run; equal on every rank."""

    min_replicas: int = 1
    """Least number of replicas to train with. With fewer, but at least one, the run ends with exit
    code 10, with a checkpoint if it has trained and `--save` is set."""
    below_min: Literal["end", "wait"] = "end"
    """Behaviour with fewer replicas than `min_replicas` while a newcomer forms. `end`: the run ends
    at once. `wait`: it trains on until newcomers have joined; once none forms any more, and there
    are still too few, it ends as with `end`."""
    determinism: Literal["fast", "exact"] = "fast"
    """`exact`: gradients are accumulated on a grid in fp64, so that parameters are bit-identical to
    those of the failure-free run, whichever replica computed what. `fast`: all replicas are
    bit-identical to each other, and close to the failure-free run."""
    transport: Literal["auto", "direct", "gloo", "nccl"] = "auto"
    """Data plane between replicas. `auto`: direct sockets on CPU, NCCL on CUDA."""
    bucket_elements: int = 40_000_000
    """Target size of a reduction bucket, in elements."""
    deadline_s: float = DEFAULT_S
    """Longest wait of a run in seconds, at least 20, and at least 250 on a GPU, where NCCL takes
    longer to connect. All other waits are fixed or follow from it: `megatron-recover explain
    timeouts` prints them."""
    tree_above: int = TREE_ABOVE
    """Largest number of replicas whose leaders send status and vote directly to each other. With
    more replicas they use a tree: a leader then has links to at most 9 others, and a step takes a
    few more hops to commit."""
    ranks_per_gpu: int = 1
    """Ranks that share a GPU. More than 1 is for trials on few GPUs: it is slow, and NCCL uses
    sockets."""
    rebalance: Literal["on", "off"] = "on"
    """`on`: each replica computes as many microbatches of a step as its measured speed allows.
    `off`: equal shares whatever the speed, so that the assignment is the same in every run; use it
    where replicas share cores."""
    resume_data: Literal["same", "other"] = "same"
    """`same`: refuse to resume from a checkpoint that was trained on other data (content, weights,
    `--split`, `--seed`) than this run would read. `other`: resume; the data was changed on
    purpose."""
    heal: Literal["in-place", "off"] = "in-place"
    """`in-place`: a lost replica's slots are used again for a new replica, which reads its state
    from the others while they train. `off`: the others train on without it."""
    heal_backoff_s: float = 60.0
    """Seconds for which a slot is set aside that breaks of its own (not by a signal from outside)
    twice before a new replica there has committed 10 steps; twice as long each next time."""
    heal_budget: int = 3
    """Number of times that a slot is set aside before it is never used again. With `below_min`
    `wait`, also the number of times that a slot whose check fails, or whose newcomers are ended
    from outside before they have joined, is put off before nobody waits for it."""
    accept_unknown_megatron: bool = False
    """Train with a Megatron of which some functions have other bodies than those that were read for
    this release. What is guaranteed holds for the bodies that were read."""
    digest_interval: int = 1
    """Training steps after which the replicas compare their parameters again, and write the digest
    to the trace (0: only with the state digest)."""
    state_digest_interval: int = 16
    """Training steps after which the replicas compare all their state again, optimizer and buffers
    included. They also compare it before each save and at the end, which cannot be switched off."""

    @property
    def deadlines(self) -> Deadlines:
        """Return every wait of the run. Raises ValueError if `deadline_s` is out of range."""
        return Deadlines.of(self.deadline_s)

    def check(self) -> None:
        """Raise ValueError with a line for each value that cannot work: the flag and the remedy."""
        found = below_one(
            {
                "--recover-min-replicas": self.min_replicas,
                "--recover-bucket-elements": self.bucket_elements,
                "--recover-tree-above": self.tree_above,
                "--recover-ranks-per-gpu": self.ranks_per_gpu,
            }
        )
        try:
            Deadlines.of(self.deadline_s)
        except ValueError as error:
            found.append(str(error))
        if not 0 < self.heal_backoff_s < float("inf"):
            found.append(f"--recover-heal-backoff-s is {self.heal_backoff_s:g}; it must be a number of seconds above 0")
        if self.heal_budget < 0:
            found.append(f"--recover-heal-budget is {self.heal_budget}; it must be 0 (set aside for good at once) or more")
        if self.heal_budget > _MOST_TRIES:
            why = f"which does not fit into 64 bits; give {_MOST_TRIES} or less"
            found.append(f"--recover-heal-budget is {self.heal_budget}, {why}")
        if self.digest_interval < 0:
            found.append(f"--recover-digest-interval is {self.digest_interval}; it must be 0 (never) or more")
        if self.state_digest_interval < 1:
            found.append(
                f"--recover-state-digest-interval is {self.state_digest_interval}; it must be at least 1 (with a large number "
                "replicas compare their state before saves and at the end only)"
            )
        if found:
            raise ValueError("\n".join(found))


NumaBinding = Literal["node", "socket", "exclusive", "core-complex"]
"""CPUs near a GPU, as torch's `AffinityMode` selects them."""


class RankContext(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one rank in the run, given by the launcher; absent under plain torchrun."""

    replica: int
    rank: int
    """Position inside the replica, 0..num_ranks-1; rank 0 is the replica's leader."""
    num_ranks: int
    num_replicas: int
    """Replicas at the start of the run."""
    coordinator: str
    """`host:port` of the coordinator's control socket."""
    leader: str
    """`host:port` on which this replica's leader accepts its ranks and other leaders."""
    store: str = ""
    """`host:port` at which rank 0 serves the replica's store for `torch.distributed`. Empty if the
    replica is on one node: its ranks inherit a file then (`control_plane/rendezvous.py`)."""
    run_dir: str
    started_at: float
    """`time.monotonic()` of the launcher at the start of the run: zero of the trace's clock."""
    faults: tuple[str, ...] = ()
    """Faults for this rank, each as JSON of `faults.Fault`."""
    gpu: int = 0
    """Number of the rank's GPU on this node, if it has one; LOCAL_RANK."""
    numa_binding: NumaBinding | None = None
    """CPUs on which the rank runs; None: all that the launcher may use."""
    clock_place: int = 0
    """Place of this rank in the memory of the node's clock (`trace/node_clock.py`)."""
    address: str = "127.0.0.1"
    """Address of this node at which the other ranks reach this one (`host.addresses.HOST` is the
    default). All listeners of the rank listen on it."""
    ports: tuple[int, int] | None = None
    """First and last port that these listeners may have; None: any."""
    node_s: float | None = None
    """`--node-timeout`; None: the job has one node."""
    newcomer: bool = False
    """True: the replica is formed while others train, and reads its state from them instead of a
    checkpoint (`core/joining.py`)."""
    dry_run: bool = False
    """True: judge the arguments as this rank would, and end with exit code `DRY_RUN_PASSED` or 2.

    The launcher does this before it starts any rank.
    """


def rank_context() -> RankContext | None:
    """Return the context of this process, or None outside `megatron-recover run`."""
    text = os.environ.get(CONTEXT_VARIABLE)
    return msgspec.json.decode(text, type=RankContext) if text else None


def wandb_run_id() -> str:
    """Return the id that the user has given to the run at Weights & Biases, or ""."""
    return os.environ.get("WANDB_RUN_ID", "")


def key_text() -> bytes | None:
    """Return the value of `KEY_VARIABLE`; None if it is not set."""
    return os.environb.get(KEY_VARIABLE.encode())


def clock_offset_ms() -> int:
    """Return the milliseconds by which a test has the clock of this node be wrong; else 0."""
    return round(1000 * float(os.environ.get(CLOCK_OFFSET_VARIABLE, "0")))


def describe_descriptors(descriptors: Mapping[str, int]) -> dict[str, str]:
    """Return the environment by which a rank finds the descriptors that it inherits, by name."""
    return {_DESCRIPTORS_VARIABLE: msgspec.json.encode(descriptors).decode()}


def inherited_descriptor(name: str) -> int | None:
    """Return the number of the descriptor that this rank inherited under `name`, or None.

    All names and numbers are JSON in one variable of the environment. The number is returned also
    after somebody has closed the descriptor.
    """
    text = os.environ.get(_DESCRIPTORS_VARIABLE)
    return msgspec.json.decode(text, type=dict[str, int]).get(name) if text else None


def alone_without_gpu() -> dict[str, str]:
    """Return this environment, changed for a process that is a whole job and sees no GPU."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {name: value for name, value in inherited_environment().items() if name != CONTEXT_VARIABLE} | alone


def add_to_environment(variables: Mapping[str, str]) -> None:
    """Set variables of this process for code that reads the environment later (torch does)."""
    os.environ.update(variables)


@contextlib.contextmanager
def importing_without_driver(*, hide_devices: bool) -> Iterator[None]:
    """Have `torch.cuda.is_available` ask NVML instead of the CUDA driver inside this context.

    A process that has asked the driver anything cannot use CUDA in its forks. NVML opens no device.
    `hide_devices`: have torch see no device at all, which it then does without NVML. torch reads
    these variables at each call (torch/cuda/__init__.py, `is_available` and `_device_count_nvml`).
    """
    changed = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if hide_devices else {})
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_FLIGHT_RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_FLIGHT_RECORD_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


def separate_flight_records(path: str | None, replica: int, run_dir: str) -> str | None:
    """Give each replica files of its own for torch's flight recorder; return `path` changed alike.

    The files, and the pipe that requests them, end with the rank inside the replica, so those of
    two replicas would be the same. A folder gets files inside it. `path` is that of
    `--flight-recorder-dump-path`; None: not given, and None is returned. The variables of the
    environment are changed alike, if set. Without a place for the files they come into `run_dir`:
    torch's default is a folder of the user (getWriter in torch's FlightRecorder.cpp).
    """

    def separate(prefix: str) -> str:
        return f"{os.path.join(prefix, '') if os.path.isdir(prefix) else prefix}replica-{replica}-rank-"

    names = [name for name in (*_FLIGHT_RECORDS, _FLIGHT_RECORD_PIPE) if name in os.environ]
    os.environ.update({name: separate(os.environ[name]) for name in names})
    if path is None and not {*names} & {*_FLIGHT_RECORDS}:
        # For native code only. Megatron sees a variable in `os.environ` as the wish to record with
        # its own settings, which leave out stacks (megatron/training/initialize.py).
        os.putenv(_FLIGHT_RECORDS[0], separate(os.path.join(run_dir, "flight-record-")))
    return None if path is None else separate(path)


NCCL_ORDER = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""Defaults of a rank's environment on a GPU. Replicas stay bit-identical only if NCCL adds in the
same order in each of them. Upstream vouches for Ring, and not for Tree or NVLS, whose order depends
on the topology that NCCL finds (megatron/training/determinism.py)."""


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> str | None:
    """Return the value of `VISIBLE_GPUS`; None if it is not set."""
    return os.environ.get(VISIBLE_GPUS)


NCCL_NOT_BY_FILES = {"NCCL_COMM_BLOCKING": ""}
"""Defaults of a rank's environment on a GPU that keep NCCL's files (/etc/nccl.conf, ~/.nccl.conf,
NCCL_CONF_FILE) from setting a variable. The environment comes before the files, and NCCL ignores an
empty value (src/misc/param.cc). 0 would change torch's communicators, whose calls have to block."""


def nccl_order() -> dict[str, str]:
    """Return the variables of `NCCL_ORDER` as they are set here; empty where one is not set."""
    return {name: os.environ.get(name, "") for name in NCCL_ORDER}


class DeviceQueues(NamedTuple):
    """Settings of the environment for the order of kernels on a GPU, and for NCCL's calls."""

    number: str
    """CUDA_DEVICE_MAX_CONNECTIONS: hardware queues that the streams of the process share; empty:
    CUDA's default of 8. At most 32."""
    is_ordered: bool
    """True if NCCL runs the collectives of all communicators in the order of their calls
    (NCCL_LAUNCH_ORDER_IMPLICIT)."""
    is_blocking: bool
    """True if every call of NCCL waits until it is done, whatever the caller asks for
    (NCCL_COMM_BLOCKING)."""


def device_queues() -> DeviceQueues:
    """Return these settings of the environment; the user may have set them."""
    return DeviceQueues(
        os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") != "0",
        os.environ.get("NCCL_COMM_BLOCKING", "0") == "1",
    )


def module_command(module: str) -> list[str]:
    """Return the words that start a process which runs a module as `__main__`.

    By itself the process imports nothing from the working directory (`-P`), as no process of
    torchrun's does.
    """
    return [sys.executable, "-P", "-m", module]


def import_first(folder: str) -> None:
    """Have this process, and those that it starts, look in a folder first when they import."""
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))


def import_path() -> list[str]:
    """Return the folders of PYTHONPATH, in their order; an empty one is the working directory."""
    found = os.environ.get("PYTHONPATH")
    return [os.path.abspath(folder) for folder in found.split(os.pathsep)] if found else []


def inherited_environment() -> dict[str, str]:
    """Return the environment of this process, without `KEY_VARIABLE`, for processes it starts."""
    return {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
