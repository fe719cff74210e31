"""Follow who is a member of a run, and which newcomers form, from its events one by one.

A newcomer counts as a member once it is proven: until then nobody waits for it, and it may still be
turned away.
"""

from __future__ import annotations

from megatron_recover import trace


class Members:
    """The members of the newest generation, and the newcomers of the run."""

    WANTED = frozenset(
        {"generation", "forming", "newcomer_lost", "turned_away", "claim_refused", "proven", "failure", "fenced"}
    )
    """Names of the events that have an effect here."""

    def __init__(self, roster: tuple[int, ...] = ()) -> None:
        """Start before the first event; `roster` is that of a reader before, if there was one."""
        self.announced = roster
        """The newest announced roster, without newcomers that were turned away since."""
        self.forming: tuple[int, ...] = ()
        """Newcomers that are formed or read a state, ascending: they live and are not announced."""
        self.unproven: frozenset[int] = frozenset()
        """Newcomers in `announced` that are not proven."""
        self.num_joins = self.num_refused = 0
        """Number of newcomers that became members, and of claims that did not join."""

    @property
    def roster(self) -> tuple[int, ...]:
        """Return the members: without unproven newcomers, unless there are no others."""
        return tuple(replica for replica in self.announced if replica not in self.unproven) or self.announced

    def take(self, event: trace.AnyEvent) -> None:
        """Take the next event of the run."""
        match event:
            case trace.Forming():
                self._form({event.newcomer})
            case trace.Generation():
                gone = {loss.replica for loss in event.losses} | {*event.left, *event.roster}
                self.forming = tuple(replica for replica in self.forming if replica not in gone)
                self.announced, self.unproven = event.roster, frozenset(event.newcomers)
            case trace.TurnedAway():
                self.num_refused += len(event.newcomers)
                self.announced = tuple(replica for replica in self.announced if replica not in event.newcomers)
                self.unproven -= {*event.newcomers}
                self._form({*event.newcomers})
            case trace.ClaimRefused():
                self.num_refused += 1
            case trace.Proven():
                self.num_joins += len(event.newcomers)
                self.unproven -= {*event.newcomers}
            case trace.NewcomerLost():
                self.forming = tuple(replica for replica in self.forming if replica != event.newcomer)
            case trace.Failure() | trace.Fenced():
                self.forming = tuple(replica for replica in self.forming if replica != event.replica)

    def _form(self, newcomers: set[int]) -> None:
        self.forming = tuple(sorted({*self.forming, *newcomers}))
