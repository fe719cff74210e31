"""The values that all checks return."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal

import msgspec

from megatron_recover.core.wording import counted

Level = Literal["ok", "warn", "fail"]
"""fail: the job cannot work here, and waiting does not help. warn: it may fail or be slow, or the
cause may be gone in a minute."""


class Check(enum.StrEnum):
    """The subject of a finding. docs/how_to/doctor.md has a row for each."""

    INTERPRETER = "interpreter"
    PACKAGES = "packages"
    MEGATRON = "Megatron"
    GPUS = "GPUs"
    CORES = "cores"
    MEMORY = "memory"
    OPEN_FILES = "open files"
    LOCKED_MEMORY = "locked memory"
    SHARED_MEMORY = "/dev/shm"
    HOST_NAME = "host name"
    ADDRESS = "address"
    CLOCK = "clock"
    SLURM = "Slurm"
    SAVE = "--save"
    LOAD = "--load"
    RUN_DIR = "--run-dir"
    CACHE = "--data-cache-path"
    TENSORBOARD = "--tensorboard-dir"
    PORTS = "ports"
    PACKETS = "packets"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check on one node."""

    check: Check
    level: Level
    value: str
    """The observation, as a person reads it."""
    remedy: str = ""
    """The change that a person has to make; empty where there is none."""

    def line(self, node: str) -> str:
        """Return the finding as one line for the node of that name."""
        return f"{self.level:<4}  {node}  {self.check}: {self.value}" + (f"; {self.remedy}" if self.remedy else "")


def ok(check: Check, value: str) -> Finding:
    """Return a finding with which the job can work."""
    return Finding(check, "ok", value)


def warn(check: Check, value: str, remedy: str) -> Finding:
    """Return a finding with which the job may fail later, or be slow."""
    return Finding(check, "warn", value, remedy)


def fail(check: Check, value: str, remedy: str) -> Finding:
    """Return a finding with which the job cannot work."""
    return Finding(check, "fail", value, remedy)


class Folder(msgspec.Struct, frozen=True):
    """A folder that a flag names."""

    check: Check
    path: str


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The demands of a job on one node."""

    num_ranks: int | None = None
    """Ranks on this node, spares included; None: not known, where no number of processes is
    given."""
    num_spares: int = 0
    """Slots of `--spares`, whose ranks start later."""
    is_rank_per_gpu: bool = False
    """True if this node has as many ranks as it has GPUs; `num_ranks` is then None."""
    on_gpus: bool = False
    ranks_per_gpu: int = 1
    num_nodes: int = 1
    folders: tuple[Folder, ...] = ()
    has_later_ranks: bool = False
    """True if a replica has ranks here, and on another node its rank 0, which builds the index
    cache for all of them."""
    address: str | None = None
    """Address under which the other nodes are to find this one; None: there are none, all are on
    this machine, or `address_mistake` says why there is no address."""
    address_mistake: str = ""
    environment: Mapping[str, str] = {}
    """Variables of the environment of this process; those of Slurm and the visible GPUs are
    judged."""

    @property
    def ranks(self) -> str:
        """Return the number of ranks in words."""
        return counted(self.num_ranks or 1, "rank")
