"""Settings of the trainer and the context that the launcher hands to each rank. Nothing else reads or sets the environment.

`RecoverConfig` is the one definition of the trainer's resilience flags: its fields are the `--recover-*` arguments of the
Megatron argument group (field ``min_replicas`` is ``--recover-min-replicas``), checked by `RecoverConfig.check`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import msgspec

from megatron_recover.core.tree import TREE_ABOVE
from megatron_recover.deadlines import DEFAULT_S, Deadlines

CONTEXT_VARIABLE = "MEGATRON_RECOVER_CONTEXT"
_DESCRIPTORS_VARIABLE = "MEGATRON_RECOVER_DESCRIPTORS"
BAD_ARGUMENTS = "bad arguments: "
"""How a rank begins each line that says what it does not accept; the launcher shows what follows."""
DRY_RUN_PASSED = 100
"""Exit code of a dry run that got to where training begins; with 0 ends a script that never gets there."""


class RecoverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Resilience settings of a run; equal on every rank."""

    min_replicas: int = 1
    """Train on while at least this many replicas live; below it, save a checkpoint and exit with code 10."""
    determinism: Literal["fast", "exact"] = "fast"
    """`exact`: gradients are accumulated on a grid in fp64, so that parameters are bit-identical to the failure-free
    run's whoever computed what. `fast`: all replicas bit-identical to each other, close to the failure-free run."""
    transport: Literal["auto", "direct", "gloo", "nccl"] = "auto"
    """Data plane between replicas; `auto` is direct sockets on CPU and NCCL on CUDA."""
    bucket_elements: int = 40_000_000
    """Target size of a reduction bucket in elements."""
    deadline_s: float = DEFAULT_S
    """The longest that anything in a run waits, in seconds, from 20 up. All other waits follow from it:
    `megatron-recover explain timeouts` prints them."""
    tree_above: int = TREE_ABOVE
    """With more replicas than this their leaders tell each other status and vote along a tree instead of each to each. A leader
    then has links to at most 9 others, and a step takes a few more hops to commit."""
    ranks_per_gpu: int = 1
    """Ranks that share a GPU. More than 1 is for trying things out on few GPUs: it is slow, and NCCL goes through sockets."""
    rebalance: Literal["on", "off"] = "on"
    """`on`: each replica computes as many microbatches of a step as its measured speed allows. `off`: all as many, whatever
    they take; then who computes what is the same in every run."""
    resume_data: Literal["same", "other"] = "same"
    """`same`: refuse to resume from a checkpoint that was trained on other data (content, weights, `--split`, `--seed`) than
    this run would read. `other`: the data was changed on purpose."""
    digest_interval: int = 1
    """Compare parameters between replicas, and write their digest to the trace, every so many steps (0: only with the state
    digest)."""
    state_digest_interval: int = 16
    """Compare all state of the replicas, optimizer and buffers included, every so many training steps, and besides before each
    save and at the end, which cannot be switched off."""

    @property
    def deadlines(self) -> Deadlines:
        """Every wait of the run."""
        return Deadlines.of(self.deadline_s)

    def check(self) -> None:
        """Raise ValueError with one line for each value that cannot work: the flag and the remedy."""
        found = []
        if self.min_replicas < 1:
            found.append(f"--recover-min-replicas is {self.min_replicas}; it must be at least 1")
        if self.bucket_elements < 1:
            found.append(f"--recover-bucket-elements is {self.bucket_elements}; it must be at least 1")
        try:
            Deadlines.of(self.deadline_s)
        except ValueError as error:
            found.append(str(error))
        if self.tree_above < 1:
            found.append(f"--recover-tree-above is {self.tree_above}; it must be at least 1")
        if self.ranks_per_gpu < 1:
            found.append(f"--recover-ranks-per-gpu is {self.ranks_per_gpu}; it must be at least 1")
        if self.digest_interval < 0:
            found.append(f"--recover-digest-interval is {self.digest_interval}; it must be 0 (never) or more")
        if self.state_digest_interval < 1:
            found.append(
                f"--recover-state-digest-interval is {self.state_digest_interval}; it must be at least 1 (with a large number "
                "replicas compare their state before saves and at the end only)"
            )
        if found:
            raise ValueError("\n".join(found))


class RankContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher tells one rank process about its place; absent when a script runs under plain torchrun."""

    replica: int
    rank: int
    """Position inside the replica, 0..num_ranks-1; rank 0 is the replica's leader."""
    num_ranks: int
    num_replicas: int
    """At the start of the run."""
    coordinator: str
    """`host:port` of the coordinator's control socket."""
    leader: str
    """`host:port` on which this replica's leader accepts its ranks and other leaders."""
    run_dir: str
    started_at: float
    """`time.monotonic()` of the launcher at the start of the run: zero of the trace's clock."""
    faults: tuple[str, ...] = ()
    """Faults for this rank, each as JSON of `faults.Fault`."""
    dry_run: bool = False
    """Judge the arguments as this rank would and end, with code `DRY_RUN_PASSED` or 2: the launcher asks before there is any
    rank."""


def rank_context() -> RankContext | None:
    """The context of this process, or None outside `megatron-recover run`."""
    text = os.environ.get(CONTEXT_VARIABLE)
    return msgspec.json.decode(text, type=RankContext) if text else None


def describe_descriptors(descriptors: Mapping[str, int]) -> dict[str, str]:
    """Return the environment by which a rank finds open descriptors that it inherits, by name."""
    return {_DESCRIPTORS_VARIABLE: msgspec.json.encode(descriptors).decode()}


def inherited_descriptor(name: str) -> int | None:
    """Return the descriptor that the agent handed down to this rank under `name`, or None if there is none."""
    text = os.environ.get(_DESCRIPTORS_VARIABLE)
    return msgspec.json.decode(text, type=dict[str, int]).get(name) if text else None


def add_to_environment(variables: Mapping[str, str]) -> None:
    """Set variables of this process, for all that read the environment later (torch does)."""
    os.environ.update(variables)


def inherited_environment() -> dict[str, str]:
    """The environment of this process, to be handed on to those that it starts."""
    return dict(os.environ)
