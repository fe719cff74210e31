"""The faults of random jobs, each of which a job of `sim/timed/fuzz.py` may draw.

A fault is a function of the job, which draws from the job's dice what it hits, and for how long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_recover.core import coordinator, rank
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.core.values import ReplicaId
from megatron_recover.sim import channels
from megatron_recover.sim.timed.actors import TimedReplica
from megatron_recover.sim.timed.rank import TimedRank

if TYPE_CHECKING:
    from megatron_recover.sim.timed.fuzz import RandomJob


def kill(job: RandomJob) -> None:
    one = job.some_rank()
    if one is not None:
        kill_rank(job, one)


def kill_rank(job: RandomJob, one: TimedRank) -> None:
    if one.alive:
        number = one.replica.number
        job.note(f"replica {number} rank {one.position} is killed", number, network=job.is_unproven(number))
        job.bury(one.replica.number, one.position)
        job.lose(one.replica.number, LossKind.PROCESS_ENDED, job.dice.expovariate(1 / 0.1))


def kill_two(job: RandomJob) -> None:
    kill(job)
    kill(job)


def suspect(job: RandomJob) -> None:
    """Fence a replica although it lives; it continues for a while."""
    suspect_one(job, job.dice.randrange(len(job.replicas)))


def suspect_one(job: RandomJob, number: ReplicaId) -> None:
    job.note(f"replica {number} is fenced, but lives", number, network=job.is_unproven(number))
    job.lose(number, LossKind.SUSPECTED, 0.0)


def stop(job: RandomJob) -> None:
    """Stop a rank (SIGSTOP), and continue it (SIGCONT) before or after the time to fence it."""
    one = job.some_rank()
    if one is not None:
        stop_rank(job, one, job.dice.choice((0.1, 1.0, 4.0, 15.0)))


def stop_rank(job: RandomJob, one: TimedRank, seconds: float) -> None:
    number = one.replica.number
    what = f"replica {number} rank {one.position} stands still for {seconds} s"
    job.note(what, number, network=job.is_unproven(number))
    job.freezer.freeze(one, job.clock.now + seconds)


def break_link(job: RandomJob) -> None:
    if len(job.replicas) > 1:
        break_between(job, *job.dice.sample(range(len(job.replicas)), 2))


def break_between(job: RandomJob, a: ReplicaId, b: ReplicaId) -> None:
    job.note(f"the link between replicas {a} and {b} breaks", a, b)
    job.break_link(a, b)


def fail_operation(job: RandomJob) -> None:
    """Let a sum or copy fail at one rank, whatever it does elsewhere."""
    busy = [meeting for meeting in job.meetings.open.values() if meeting.here]
    if busy:
        meeting = job.dice.choice(busy)
        one = job.dice.choice(list(meeting.here.values()))
        job.note(f"bucket {meeting.operation.bucket} fails on replica {one.replica.number} rank {one.position}")
        job.hit.add(one.replica.number)
        job.meetings.fail(one, meeting.operation, ())


def drift(job: RandomJob) -> None:
    """Change a replica's parameters, or state that no sum depends on, from its next step on."""
    one = job.dice.choice(job.replicas)
    if not one.ranks[0].has_entered:
        misread(job, one)
        return
    of_state = job.other_dice.random() < 0.5
    job.note(f"{'other state' if of_state else 'the parameters'} of replica {one.number} drift", one.number)
    drifted = job.counts.state_drifted if of_state else job.counts.drifted
    drifted.setdefault(one.number, max(each.machine.step for each in one.ranks) + 1)


def raise_in_pass(job: RandomJob) -> None:
    """Let a random rank raise, if it runs a pass. The rank names a random microbatch and ends."""
    one = job.some_rank()
    if one is not None and one.passing is not None:
        job.note(f"replica {one.replica.number} rank {one.position} raises", one.replica.number)
        job.num_raised += 1
        one.feed(rank.Fail((job.dice.randrange(job.table.microbatches),), "not finite"))
        job.bury(one.replica.number, one.position)
        job.lose(one.replica.number, LossKind.EXCEPTION, 1.0)


def save(job: RandomJob) -> None:
    """Let a replica save a checkpoint before its next step."""
    one = job.dice.choice(job.replicas)
    job.note(f"replica {one.number} saves", one.number)
    job.saves.add((one.number, one.ranks[0].machine.step + 1))


def kill_in_save(job: RandomJob) -> None:
    """Let the next writer die during the save on which all have agreed, or just before it."""
    job.num_deaths_in_saves += 1


def ask_exit(job: RandomJob) -> None:
    """Request the end of the job, as a signal to the launcher does."""
    job.note("the job is asked to exit")
    job.exit_asked = True
    job.clock.after(0.0, job.coordinator.feed, coordinator.ExitAsked("SIGTERM"))  # the clock holds it back from a stopped one


def stop_everybody(job: RandomJob) -> None:
    """Stop all ranks, so that no member follows a generation in time."""
    seconds = job.dice.choice((4.0, 15.0))
    job.note(f"everybody stands still for {seconds} s", *range(len(job.replicas)))
    for one in job.replicas:
        for each in one.ranks:
            job.freezer.freeze(each, job.clock.now + seconds)


def stop_coordinator(job: RandomJob) -> None:
    """Stop the coordinator. Its inputs and timers wait, and arrive all at once."""
    seconds = job.dice.choice((0.1, 1.0, 4.0, 60.0))
    job.note(f"the coordinator stands still for {seconds} s")
    job.freezer.freeze(job.coordinator, job.clock.now + seconds)


def bad_card(job: RandomJob) -> None:
    """Break the channels from a replica, those to it, or both, from now on."""
    owner, ways = job.dice.randrange(len(job.replicas)), job.dice.choice(_WAYS)
    job.bad_cards.append((owner, ways))
    job.note(f"the network card of replica {owner} is bad ({ways})", owner, network=True)
    job.broken |= channels.card(owner, range(len(job.replicas)), ways)


def bad_link(job: RandomJob) -> None:
    """Break the channels between two replicas, in one direction or both, from now on."""
    if len(job.replicas) < 2:
        return
    a, b = job.dice.sample(range(len(job.replicas)), 2)
    ways = job.dice.choice(_WAYS)
    job.note(f"the network between replicas {a} and {b} is bad ({ways})", a, b, network=True)
    job.broken |= channels.link(a, b, ways)


def miscount(job: RandomJob) -> None:
    """Let a replica count a microbatch of its current step twice."""
    one = job.dice.choice(job.replicas)
    job.note(f"replica {one.number} miscounts", one.number)
    job.counts.flawed.add((one.number, one.state.step))
    job.num_miscounts += 1


def read_data(job: RandomJob) -> None:
    """Let a rank read data for 4 to 900 s before its next step. It may exceed the deadline."""
    one, seconds = job.reader_dice.choice(job.replicas), job.reader_dice.choice((4.0, 30.0, 100.0, 900.0))
    position = job.reader_dice.randrange(job.table.ranks)
    late = (one.number,) if seconds > job.coordinator.timers_s["deadline_s"] else ()
    job.note(f"replica {one.number} rank {position} reads for {seconds} s", *late, network=True)
    job.readings[one.number, position] = seconds


def ask_leave(job: RandomJob) -> None:
    """Ask one or two replicas to leave. Whether they can is up to the coordinator."""
    numbers = job.leave_dice.sample(range(len(job.replicas)), min(len(job.replicas), job.leave_dice.choice((1, 1, 2))))
    job.note(f"replicas {numbers} are asked to leave", network=True)
    job.clock.after(0.0, job.coordinator.feed, coordinator.LeaveAsked(tuple(numbers), "drain"))


def form(job: RandomJob, num_newcomers: int) -> None:
    """Ask for newcomers."""
    job.note(f"newcomers are formed: {num_newcomers}", network=True)
    job.clock.after(0.0, job.coordinator.feed, coordinator.FormAsked(num_newcomers))


# --- faults that are aimed at a newcomer ---


def misread(job: RandomJob, one: TimedReplica) -> None:
    """Let the next reading of a newcomer bring another state, unless it trains."""
    job.note(f"what newcomer {one.number} reads next drifts", network=True)
    job.counts.misread.add(one.number)


def kill_newcomer(job: RandomJob, one: TimedReplica) -> None:
    kill_rank(job, job.newcomer_dice.choice(one.ranks))


def stop_newcomer(job: RandomJob, one: TimedReplica) -> None:
    stop_rank(job, job.newcomer_dice.choice(one.ranks), job.newcomer_dice.choice((0.1, 1.0, 4.0, 15.0)))


def suspect_newcomer(job: RandomJob, one: TimedReplica) -> None:
    suspect_one(job, one.number)


def kill_member(job: RandomJob, one: TimedReplica) -> None:
    """Kill a member, often one from which the newcomer reads."""
    kill_rank(job, job.newcomer_dice.choice(job.replicas[_other(job, one)].ranks))


def stop_member(job: RandomJob, one: TimedReplica) -> None:
    stop_rank(job, job.newcomer_dice.choice(job.replicas[_other(job, one)].ranks), job.newcomer_dice.choice((0.1, 1.0, 4.0)))


def break_link_of_newcomer(job: RandomJob, one: TimedReplica) -> None:
    break_between(job, one.number, _other(job, one))


def _other(job: RandomJob, one: TimedReplica) -> ReplicaId:
    others = [number for number in job.coordinator.state.roster if number != one.number]
    return job.newcomer_dice.choice(sorted(one.newcomer.sources) or others or [0])


STRIKES: tuple[Callable[[RandomJob, TimedReplica], None], ...] = (
    kill_newcomer, kill_newcomer, kill_newcomer, stop_newcomer, stop_newcomer, suspect_newcomer, kill_member,
    kill_member, stop_member, break_link_of_newcomer, misread, misread,
    lambda job, _: save(job), lambda job, _: ask_exit(job), lambda job, _: ask_leave(job), lambda job, _: miscount(job),
    lambda job, _: fail_operation(job), lambda job, _: stop_coordinator(job), lambda job, _: form(job, 1),
)  # fmt: skip
_WAYS: tuple[channels.Ways, ...] = ("out", "in", "both")
FAULTS = (
    kill, kill, kill, kill_two, suspect, stop, stop, break_link, break_link, fail_operation, drift, raise_in_pass, save,
    ask_exit, stop_everybody, stop_coordinator, bad_card, bad_link, miscount,
    kill_in_save,
)  # fmt: skip
