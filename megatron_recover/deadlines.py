"""Derives every wait of a run from the one deadline that the user sets, in an order that is proven. Pure: no clock, no waiting.

A wait that is inside another one, or whose end explains the other's, is strictly shorter: else the outer wait ends first and
blames the wrong party. `ORDER` has each such pair with its reason, and a property test proves all of them for every deadline.
`megatron-recover explain timeouts` prints both.

Some waits do not grow with the deadline. Their docstrings say why (`Fixed:`), and objects that are made without any settings
import them as constants. Such a constant is a field as well, though nobody reads it there: `ORDER` proves it, and
`megatron-recover explain timeouts` prints it.

Not here: intervals at which something is looked at (polling), which no one waits for. `tests/core/test_constant_waits.py` lists
them, and finds any other number of seconds in the package.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

SHORTEST_S, LONGEST_S = 20.0, 1e6
"""The range of the user's deadline. Below, start-up alone takes longer; above are eleven days, and no infinity."""
DEFAULT_S = 1800.0

STILL_S = 0.5
OOM_S = 1.0
NOTICE_S = 1.0
STUCK_S = 3.0
INTRODUCTION_S = 5.0
"""Waits that are the same for every deadline (`Deadlines` says why), for objects that are made without any settings."""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """All waits of a run in seconds. The docstring of each says who waits for whom, and who ends the wait."""

    gap_s: float
    """The detector counts so much of the time between two looks at a rank, at most. Fixed: the agent looks every 0.1 s, and a
    longer gap is the agent's own."""
    stacks_s: float
    """The agent waits so long for the ranks of a hung replica to write their stacks. Then it kills them. Fixed: a stopped rank
    is to be gone within 1 s (`stopped_s` and this)."""
    still_s: float
    """A process that did not run for so long leaves that time out of its timers. Fixed: the scheduler of a busy machine takes
    less."""
    stopped_s: float
    """The detector waits at least so long for a stopped process, or two typical steps. Then the replica is killed. Fixed: a
    stopped rank is to be gone within 1 s or three steps."""
    hung_s: float
    """The detector waits at least so long for a rank that shows no progress, or four typical steps, or twice the longest
    operation of its kind. Then the replica is killed. Fixed: an endless loop is to be ended within 3 s or five steps."""
    after_work_s: float
    """A replica counts as at work so long after it was last seen at work, and is not blamed for keeping others waiting. Fixed:
    it bridges the instants between two computations, and the way of a request that the others have just made."""
    oom_s: float
    """A kill for want of memory explains a death that is seen so long after it. Fixed: dying takes a process that long."""
    introduction_s: float
    """A listener waits so long for a connection to prove the job's key. Then it closes the connection, and an honest peer dials
    again. Fixed: strangers must not hold a place for longer because a user is patient."""
    beat_s: float
    """The coordinator sends each leader a beat so often, and the leader answers. Nobody is judged by beats."""
    grace_s: float
    """The coordinator waits so long for the agent to see a death, which would explain a member's request. Then it makes a
    generation with the same roster. Fixed: the agent sees a death within 0.1 s, and every repair waits for this."""
    silence_s: float
    """Leader and coordinator call each other silent after so long without a message. They say so and end nothing."""
    words_s: float
    """A rank that raised, or a leader that was told to stop, waits so long until its last messages were read. Then it ends."""
    sigkill_s: float
    """The agent waits so long for a killed process to take the signal. Then the launcher sets its slot aside."""
    follow_s: float
    """The coordinator waits so long for the members to enter a generation. Then it removes and kills those that have not, if
    another has. A rank whose replica is broken waits as long for the agent to kill it; then it ends itself."""
    lock_s: float
    """A new writer waits so long for the lock of the save folder, which a killed writer holds until it is dead. Then the save
    fails and is tried at the next save point."""
    probe_s: float
    """A rank whose sum ran out waits so long for its peers to answer a probe. Then it names those that did not."""
    connect_s: float
    """A rank inside a sum waits so long for the connection to a member. Then the sum fails, and its leader requests a
    generation."""
    sum_s: float
    """A rank inside a sum that all members have entered waits so long without any byte of any of them (`gloo`: without a
    finished piece of 1 MiB). Then the sum fails, and its leader requests a generation."""
    slowest_s: float
    """A rank inside a sum waits so long, without any byte of anyone, for the slowest member to enter the sum. Then the sum
    fails, and its leader requests a generation."""
    stall_s: float
    """A leader waits so long for the status or vote of other members. Then it requests a generation; who does not enter that
    one is removed by `follow_s`."""
    blame_s: float
    """The coordinator waits so long from the first generation that was made without a loss for a step to be committed. Then it
    removes the member that the evidence names; after as long again, of two members that accuse each other the higher id."""
    finish_s: float
    """The coordinator waits so long for the last members to finish once one has. Then it removes and kills them."""
    reap_s: float
    """The fork server waits so long at the end for the ranks that it has killed. Then it ends without those that are left."""
    close_s: float
    """The launcher waits so long for the fork server to kill and reap the ranks at the end. Then it kills the server, too."""
    stop_s: float
    """The launcher waits so long for the ranks to end by themselves after a job that did not end well. Then it kills them."""
    end_s: float
    """The launcher waits so long for the ranks to end by themselves after a job that ended well, and for the kernel to take
    down a process that took its SIGKILL. Then it kills them, or sets their slots aside."""
    fork_s: float
    """The launcher waits so long for the fork server to start a rank. Then the run ends with code 1."""
    notice_s: float
    """The launcher waits so long for stderr to take one of its own lines. Then it goes on. Fixed: see `trace_s`."""
    renew_s: float
    """The launcher waits at most so long before it starts another recorder where one has died: the first at once, each next one
    after twice as long, and again at once after a recorder that lived so long. It never gives up."""
    store_s: float
    """The recorder waits so long for the files of the trace to close, and for those of the logs. Then it ends all the
    same. Fixed: see `trace_s`."""
    orphan_s: float
    """The recorder of a launcher that is gone waits so long for the last events of ranks, which are being killed. Fixed: see
    `trace_s`."""
    replies_s: float
    """The recorder waits so long at its end for the launcher to take what it says. Then it ends. Fixed: see `trace_s`."""
    refused_s: float
    """The recorder tries so long at the end to write to a disk that refuses. Then the events are lost, and it says so. Fixed:
    see `trace_s`."""
    abandoned_s: float
    """A launcher that raises waits so long for the recorder, or for a new one if there is none, which does then what it does
    without a launcher. Then it kills the recorder, and says so. Fixed: see `trace_s`."""
    stuck_s: float
    """The events of all processes wait so long for one that a process has begun to record. Then that event is lost, and told as
    a gap. Fixed: recording takes microseconds, and a process that takes longer is stopped."""
    slow_disk_s: float
    """The recorder waits so long for the disk before it warns. It ends nothing. Fixed: see `trace_s`."""
    screen_s: float
    """The recorder waits so long for the terminal to take how the run ended. Then the launcher says it on stderr. Fixed:
    see `trace_s`."""
    terminal_s: float
    """The launcher waits so long, after `trace_s`, for the recorder to have shown the end of the run. Fixed: see
    `trace_s`."""
    trace_s: float
    """The recorder waits so long at the end for the disk to take the rest of the trace. Then the rest is lost, and it says so.
    Fixed: the exit code is known by then, and a scheduler that asked for the end kills soon (Slurm after 30 s); with
    `terminal_s` this is over before."""
    report_s: float
    """The launcher waits so long for the process that makes summary and plot. Then it ends that process, and says how to make
    them."""
    build_s: float
    """A rank waits so long for another process that builds the data index. Then it builds the index beside it."""
    start_s: float
    """The coordinator waits so long from the first replica that is ready to the last. Then it goes on without the others."""
    leader_s: float
    """A rank tries so long to connect to its leader at the start, and waits so long for each key in torch's store of its
    replica. Then it ends, and its replica is lost."""
    save_s: float
    """Members wait so long for one that saves a checkpoint. Then the coordinator suspects it. The last save of a run is tried
    again for so long where there is no room. Then the run ends with code 16."""
    deadline_s: float
    """The user's deadline. The launcher waits so long for the imports, for the dry run, and for the first replica to be ready.
    A replica waits so long for a launcher that is stopped (code 13), and members wait so long where nobody can be blamed. A
    rank that hangs where nothing tells a hang from slow work is ended after it, and so is a collective inside a replica."""

    @staticmethod
    def of(deadline_s: float = DEFAULT_S) -> Deadlines:
        """Return the waits that follow from the user's deadline. Raises ValueError with the remedy if it is out of range."""
        if not SHORTEST_S <= deadline_s < LONGEST_S:  # also where it is no number
            raise ValueError(
                f"--recover-deadline-s is {deadline_s:g}; it must be at least {SHORTEST_S:g} and below {LONGEST_S:.0f} seconds"
            )
        beat_s = _between(0.25, deadline_s / 300, 1.0)
        follow_s = _between(1.0, deadline_s / 30, 10.0)
        stall_s = max(2.0, deadline_s / 15)
        close_s = _between(2.0, deadline_s / 6, 10.0)
        end_s = _between(6.0, deadline_s / 3, 60.0)
        slowest_s, sum_s = 0.8 * stall_s, 0.6 * stall_s
        store_s, orphan_s, replies_s, screen_s, trace_s = 0.5, 1.0, 2.0, 5.0, 10.0
        shown_s = 2 * store_s + screen_s + 1.0  # the last is to spare
        return Deadlines(
            gap_s=0.25,
            stacks_s=0.4,
            still_s=STILL_S,
            stopped_s=0.5,
            hung_s=2.2,
            after_work_s=1.0,
            oom_s=OOM_S,
            introduction_s=INTRODUCTION_S,
            beat_s=beat_s,
            grace_s=0.2,
            silence_s=3 * beat_s,
            words_s=follow_s / 2,
            sigkill_s=_between(0.8, 0.3 * follow_s, 3.0),
            follow_s=follow_s,
            lock_s=min(60.0, 0.75 * stall_s),
            probe_s=min(2.0, sum_s / 4),
            connect_s=sum_s,
            sum_s=sum_s,
            slowest_s=slowest_s,
            stall_s=stall_s,
            blame_s=1.5 * stall_s,
            finish_s=stall_s + 2 * follow_s,
            reap_s=close_s / 2,
            close_s=close_s,
            stop_s=close_s,
            end_s=end_s,
            fork_s=end_s,
            notice_s=NOTICE_S,
            renew_s=_between(0.5, deadline_s / 60, 30.0),
            store_s=store_s,
            orphan_s=orphan_s,
            replies_s=replies_s,
            refused_s=2.5,
            abandoned_s=orphan_s + trace_s + shown_s,
            stuck_s=STUCK_S,
            slow_disk_s=5.0,
            screen_s=screen_s,
            terminal_s=shown_s + replies_s,
            trace_s=trace_s,
            report_s=max(15.0, deadline_s / 2),
            build_s=deadline_s / 3,
            start_s=deadline_s / 2,
            leader_s=0.75 * deadline_s,
            save_s=deadline_s * 5 / 6,
            deadline_s=deadline_s,
        )


def figure(seconds: float) -> str:
    """Return a wait in seconds as people read it: three figures at most behind which nothing counts, never an exponent."""
    return f"{round(seconds, 2 if seconds < 10 else 1 if seconds < 100 else 0):.6f}".rstrip("0").rstrip(".")


def _between(least: float, value: float, most: float) -> float:
    return min(most, max(least, value))


class Below(NamedTuple):
    """A wait that must end before another one would."""

    inner: str
    outer: str
    why: str


ORDER = (
    Below("gap_s", "stopped_s", "one gap between two looks, which may be the agent's own, condemns nobody"),
    Below("gap_s", "hung_s", "one gap between two looks, which may be the agent's own, condemns nobody"),
    Below("stacks_s", "follow_s", "a hung replica is killed by its agent before the others call it late"),
    Below("still_s", "follow_s", "a standstill that is too short to be left out removes nobody"),
    Below("stopped_s", "follow_s", "a stopped process is named as stopped before its replica is late for a generation"),
    Below("hung_s", "deadline_s", "a hang that evidence shows does not wait for the end of all patience"),
    Below("after_work_s", "stall_s", "a replica that has done its work is not excused for the next wait of the others"),
    Below("oom_s", "stall_s", "a kill explains the deaths of its own moment, and none that a wait of others leads to"),
    Below("introduction_s", "leader_s", "an honest peer whose connection was closed unproven has time to dial again"),
    Below("beat_s", "silence_s", "a beat or two may be late before anyone is called silent"),
    Below("grace_s", "follow_s", "the agent reports a death before a member is judged late for the next generation"),
    Below("words_s", "follow_s", "a rank's last messages leave before anyone kills the rest of its replica"),
    Below("sigkill_s", "follow_s", "a slot is set aside before the loss of the next member could ask for it"),
    Below("silence_s", "follow_s", "a stopped launcher is named before a replica that it cannot fence gives itself up"),
    Below("follow_s", "lock_s", "a writer that is only slow is removed and killed before the next one gives the lock up"),
    Below("follow_s", "stall_s", "who does not enter a generation is removed before the others request one more"),
    Below("follow_s", "connect_s", "a member that is gone is removed before a sum that needs it fails"),
    Below("follow_s", "sum_s", "a member that is gone is removed before a sum that needs it fails"),
    Below("stall_s", "blame_s", "members wait once more in a new generation before one of them is removed for it"),
    Below("blame_s", "deadline_s", "a member at fault is removed before the run gives up for want of evidence"),
    Below("probe_s", "introduction_s", "an echo server does not take a slow probe for a stranger"),
    Below("probe_s", "sum_s", "finding out who is out of reach takes less time than the wait that it explains"),
    Below("connect_s", "slowest_s", "who cannot be reached is named before anyone is called slow"),
    Below("sum_s", "slowest_s", "a sum that stalls is told from a member that is late: the late one has longer"),
    Below("slowest_s", "stall_s", "a rank inside a sum names who is slow before others blame its replica for a vote"),
    Below("lock_s", "save_s", "a save that waits for its lock fails by itself before its replica is suspected"),
    Below(
        "stall_s", "finish_s", "the last step of a run may need one more generation, and its follow time, before anyone is late"
    ),
    Below("stall_s", "save_s", "a save may outlast the wait for a vote, which is then excused"),
    Below("finish_s", "deadline_s", "a member that does not finish is removed before the whole run gives up"),
    Below("reap_s", "close_s", "the fork server ends by itself before it is killed"),
    Below("sigkill_s", "close_s", "what does not die of SIGKILL is known before the fork server is given up"),
    Below("sigkill_s", "stop_s", "what does not die of SIGKILL is known before ranks are no longer waited for"),
    Below("close_s", "deadline_s", "an end is shorter than a run's longest wait"),
    Below("stop_s", "end_s", "ranks that ended well may have more to write than ranks that did not"),
    Below("end_s", "deadline_s", "an end is shorter than a run's longest wait"),
    Below("fork_s", "deadline_s", "a fork server that hangs is named before a replica is late"),
    Below("notice_s", "terminal_s", "a line on stderr waits no longer for a terminal than the end of a run does"),
    Below("renew_s", "deadline_s", "a recorder is tried anew while people may still mend what ends them"),
    Below("store_s", "terminal_s", "the recorder ends by itself before the launcher gives it up"),
    Below("replies_s", "terminal_s", "the recorder ends by itself before the launcher gives it up"),
    Below("screen_s", "terminal_s", "the recorder ends by itself before the launcher gives it up"),
    Below("trace_s", "abandoned_s", "a recorder that was not asked for the end has the disk's time, too"),
    Below("abandoned_s", "deadline_s", "an end is shorter than a run's longest wait"),
    Below("orphan_s", "trace_s", "the last events are there before the disk's time for them is over"),
    Below("refused_s", "trace_s", "a disk that refuses is given up before one that is only slow"),
    Below("stuck_s", "trace_s", "an event that a stopped process has begun does not cost the end of the trace"),
    Below("slow_disk_s", "trace_s", "people hear of a slow disk before events are given up"),
    Below("terminal_s", "report_s", "the end of the run is shown before anyone waits for its plot"),
    Below("trace_s", "report_s", "summary and plot take longer than the trace that they are made from"),
    Below("report_s", "deadline_s", "an end is shorter than a run's longest wait"),
    Below("build_s", "start_s", "a replica that waits for the data index builds it itself before it is late for the start"),
    Below("start_s", "leader_s", "the coordinator goes on without a replica before its ranks give up on their own leader"),
    Below(
        "leader_s", "deadline_s", "a rank without a leader ends, and explains the loss, before the launcher's wait ends the run"
    ),
    Below("save_s", "deadline_s", "a saver that is too slow is suspected before the run gives up"),
)
