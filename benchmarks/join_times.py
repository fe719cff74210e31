"""What the trace of a job with newcomers says about how long coming back takes. Runs no job.

Events are dicts as in `events.jsonl`; their times are seconds since the start of the run. Jobs have
replicas of one rank, so that a replica computes one microbatch at a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Events = Sequence[Mapping[str, Any]]


def of(events: Events, *names: str) -> Iterator[Mapping[str, Any]]:
    """Yield the events with one of these names, in their order."""
    return (event for event in events if event["event"] in names)


# --- From the kill to full strength ---------------------------------------------------------------


class Return(NamedTuple):
    """A lost replica and the newcomer that became a member in its place. Times in seconds."""

    newcomer: int
    num_formed: int
    """Newcomers that were formed for it; more than 1 if the first one was lost."""
    kill: float
    ended: float
    """Every process of the lost replica was seen to have ended."""
    forming: float
    """The newcomer that became a member began to form."""
    formed: float
    read: float
    """Its last rank had read and digested the state with which it joined."""
    claimed: float
    announced: float
    """The generation was announced in which it became a member."""
    proven: float
    """The first step with its vote was committed."""
    tries: int
    """States that it began to read."""
    num_bytes: int
    """Bytes of the state that it read last, over all ranks."""
    read_s: float
    """Seconds of the reading alone, of the slowest rank."""

    @property
    def total_s(self) -> float:
        """Return the seconds from the kill to full strength."""
        return self.proven - self.kill

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds of each part, each from the end of the one before; they add up."""
        instants = {
            "processes ended": self.ended, "forming begun": self.forming, "formed": self.formed, "state read": self.read,
            "claimed": self.claimed, "announced": self.announced, "proven": self.proven,
        }  # fmt: skip
        before = (self.kill, *instants.values())
        return {name: instant - since for (name, instant), since in zip(instants.items(), before, strict=False)}


def returned(events: Events, victim: int, kill: float) -> Return | None:
    """Return how a replica came back that was killed at a time; None if it did not.

    A newcomer that is lost before it is a member may have another one in its place.
    """
    chain: dict[int, float] = {}
    for event in of(events, "forming"):
        if event["t"] >= kill and {victim, *chain} & {*event["in_place_of"]}:
            chain[event["newcomer"]] = event["t"]
    proven = next((event for event in of(events, "proven") if chain.keys() & {*event["newcomers"]}), None)
    if proven is None:
        return None
    newcomer = min(chain.keys() & {*proven["newcomers"]})
    announced = next(event["t"] for event in of(events, "generation") if event["generation"] == proven["generation"])
    claim = [e for e in of(events, "claimed") if e["replica"] == newcomer and e["t"] <= announced][-1]
    reads = [e for e in of(events, "state_read") if e["replica"] == newcomer and e["t"] <= claim["t"]]
    used = [event for event in reads if event["label"] == claim["label"]]
    ranks = {event["rank"] for event in reads}
    return Return(
        newcomer=newcomer, num_formed=len(chain), kill=kill,
        ended=max(event["t"] for event in of(events, "fenced") if event["replica"] == victim),
        forming=chain[newcomer],
        formed=next(event["t"] for event in of(events, "joined") if event["replica"] == newcomer),
        read=max(event["t"] for event in used), claimed=claim["t"], announced=announced, proven=proven["t"],
        tries=max(sum(event["num_tries"] for event in reads if event["rank"] == rank) for rank in ranks),
        num_bytes=sum(event["num_bytes"] for event in used), read_s=max(event["seconds"] for event in used),
    )  # fmt: skip


# --- Steps ----------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A training step as the members see it that have committed it and the step before."""

    step: int
    label: str
    begin: float
    """The last of these members had committed the step before."""
    end: float
    """The last of these members had committed the step."""
    members: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Return the seconds of the step."""
        return self.end - self.begin


def steps(events: Events) -> list[Step]:
    """Return the training steps in their order, without those before which nothing is known."""
    ends: dict[int, dict[int, float]] = {}
    labels: dict[int, str] = {}
    for event in of(events, "committed"):
        ends.setdefault(event["step"], {})[event["replica"]] = event["t"]
        labels[event["step"]] = event["label"]
    found = []
    for step in sorted(ends):
        both = sorted(ends[step].keys() & ends.get(step - 1, {}).keys())
        if both and labels[step].startswith("train "):
            begin, end = (max(ends[at][member] for member in both) for at in (step - 1, step))
            found.append(Step(step, labels[step], begin, end, tuple(both)))
    return found


def at(found: Sequence[Step], t: float) -> Step | None:
    """Return the step that ran at a time; None if none did that is known."""
    return next((step for step in found if step.begin <= t < step.end), None)


def mostly_within(found: Sequence[Step], begin: float, end: float) -> list[Step]:
    """Return the steps of which at least half ran within an interval."""
    return [step for step in found if 2 * (min(step.end, end) - max(step.begin, begin)) >= step.seconds]


def held_s(events: Events, label: str) -> float:
    """Return for how long a member has kept its pass of a step open for newcomers, at the most."""
    return max((event["seconds"] for event in of(events, "pass_held") if event["label"] == label), default=0.0)


def idle_s(events: Events, step: Step) -> float:
    """Return the seconds between the microbatches of a step, of the member with the most.

    They count from the first microbatch of the member to its last, so before the sums.
    """
    longest = 0.0
    for member in step.members:
        mine = [
            event for event in of(events, "microbatch_finished") if (event["replica"], event["step"]) == (member, step.step)
        ]
        if mine:
            begin = min(event["t"] - event["seconds"] for event in mine)
            longest = max(longest, max(event["t"] for event in mine) - begin - sum(event["seconds"] for event in mine))
    return longest


class Usual(NamedTuple):
    """The time of a step of the same members without a newcomer, in seconds."""

    step_s: float
    idle_s: float


def usual(events: Events, found: Collection[Step]) -> Usual:
    """Return the medians of some steps."""
    return Usual(
        statistics.median(step.seconds for step in found), statistics.median(idle_s(events, step) for step in found)
    )  # fmt: skip


class Cost(NamedTuple):
    """The costs of a newcomer for the members in one step, as fractions of their usual step."""

    step: float
    """The step without the hold, over a usual one."""
    in_pass: float
    """Time between microbatches, beyond what is usual."""
    hold: float
    hold_s: float
    """Seconds for which the pass was held open; `hold` is this over a usual step."""


def cost(events: Events, step: Step, normal: Usual) -> Cost:
    """Return what a step took beside a usual one. What was held is no pause and is told apart."""
    hold = held_s(events, step.label)
    return Cost(
        step=(step.seconds - hold) / normal.step_s, in_pass=(idle_s(events, step) - normal.idle_s) / normal.step_s,
        hold=hold / normal.step_s, hold_s=hold,
    )  # fmt: skip


def moving(events: Events, found: Sequence[Step], newcomer: int) -> list[Step]:
    """Return the steps in which a newcomer has read state and was not announced."""
    reads = [(event["t"] - event["seconds"], event["t"]) for event in of(events, "state_read") if event["replica"] == newcomer]
    announced = [event["t"] for event in of(events, "generation") if newcomer in event["newcomers"]]
    return [
        step for step in found
        if any(begin < step.end and step.begin < end for begin, end in reads)
        and not any(step.begin <= t < step.end for t in announced)
    ]  # fmt: skip


# --- Useful work ----------------------------------------------------------------------------------


def members(events: Events) -> tuple[int, ...]:
    """Return the proven members that have not ended, as far as the trace tells by now."""
    roster: set[int] = set()
    for event in of(events, "generation", "turned_away", "proven", "fenced"):
        match event["event"]:
            case "generation":
                roster = {*event["roster"]} - {*event["newcomers"]}
            case "proven":
                roster |= {*event["newcomers"]}
            case "turned_away":
                roster -= {*event["newcomers"]}
            case "fenced":
                roster -= {event["replica"]}
    return tuple(sorted(roster))


def num_steps(events: Events, begin: float, seconds: float) -> int:
    """Return the number of training steps that were committed within an interval."""
    first: dict[int, float] = {}
    for event in of(events, "committed"):
        if event["label"].startswith("train "):
            first[event["step"]] = min(event["t"], first.get(event["step"], event["t"]))
    return sum(begin < t <= begin + seconds for t in first.values())
