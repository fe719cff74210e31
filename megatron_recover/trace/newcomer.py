"""The events of newcomers: replicas that are formed while the others train (`core/joining.py`).

Events about a newcomer that another process writes name it in `newcomer` or `newcomers`. In
`replica` an event has the replica that writes it.
"""

from __future__ import annotations

from megatron_recover.core.membership_messages import LossKind
from megatron_recover.trace.event import Event


class Forming(Event, frozen=True, kw_only=True):
    """Coordinator: it has a newcomer formed, under an id that was never used."""

    newcomer: int
    in_place_of: tuple[int, ...] = ()
    """Replicas whose slots its ranks get. Every process of theirs has ended."""
    reason: str = ""
    """Reason or place of the forming, for people; may be empty."""


class StateRead(Event, frozen=True, kw_only=True):
    """Rank of a newcomer: it has read its part of the state with which a step begins.

    Recorded when the rank has digested what it has read, and before its leader can claim it.
    """

    replica: int
    rank: int
    label: str
    """Label of the step."""
    digest: str
    """Digest of all state of this rank, computed from what it has read; as in `state_digested`."""
    num_bytes: int = 0
    seconds: float = 0.0
    """Seconds of the reading alone."""
    num_sources: int = 0
    """Number of members from which parts were read."""
    num_tries: int = 1
    """Number of states of which the rank has begun to read since the last that it has read."""


class Claimed(Event, frozen=True, kw_only=True):
    """Leader of a newcomer: it is about to ask a member to vouch for the state that was read."""

    replica: int
    member: int
    """The member that is asked."""
    label: str
    digest: str
    """Digest over all ranks, in rank order; as `state_digest` of a record."""


class ClaimRefused(Event, frozen=True, kw_only=True):
    """Coordinator, or leader of the newcomer: a claim does not join; a later state is read."""

    newcomer: int
    label: str
    reason: str
    member: int | None = None
    """The member that refused, as the newcomer's leader records; None: the coordinator did."""


class NewcomerLost(Event, frozen=True, kw_only=True):
    """Coordinator: a newcomer outside the roster is lost, for which no generation is made."""

    newcomer: int
    kind: LossKind
    detail: str


class PassHeld(Event, frozen=True, kw_only=True):
    """Leader of a member: it has kept its pass of a training step open for newcomers, until now."""

    replica: int
    label: str
    """Label of the step."""
    newcomers: tuple[int, ...]
    """The newcomers for which it did."""
    is_asked: bool
    """True if a newcomer had asked for it before the step; False if it came with a claim."""
    seconds: float
    """Time for which the end of the pass was kept back; 0 if the pass was not at its end."""


class TurnedAway(Event, frozen=True, kw_only=True):
    """Coordinator: the common plan of a generation does not admit newcomers that it announced.

    The roster without them is the *working roster* of the generation.
    """

    generation: int
    newcomers: tuple[int, ...]
    reason: str
    """The reason for the one; for several "replica K: WHY", joined by "; "."""

    def why(self, newcomer: int) -> str:
        """Return the part of the reason that is about one newcomer, or all of it."""
        begin = f"replica {newcomer}: "
        return next((part.removeprefix(begin) for part in self.reason.split("; ") if part.startswith(begin)), self.reason)


class Proven(Event, frozen=True, kw_only=True):
    """Coordinator: a step was committed with the votes of newcomers, so they are members."""

    generation: int
    newcomers: tuple[int, ...]
