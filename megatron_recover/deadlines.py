"""Every wait of a run, fixed or derived from the user's one deadline, in a proven order. No clock.

A wait that is inside another one, or whose end explains the other's, is strictly shorter. Otherwise
the outer wait would end first and blame the wrong party. `ORDER` has each such pair with its
reason, and a property test proves all of them for every deadline. `megatron-recover explain
timeouts` prints the waits and the pairs.

Some waits do not grow with the deadline. Their docstrings give the reason (`Fixed:`), and their
value is the default of the field, unless `Deadlines.of` derives other waits from it. Some of them
are constants too, for code that has no `Deadlines`. With the field `ORDER` proves the wait, and
`megatron-recover explain timeouts` prints it.

Intervals of polling are not here, since no one waits for them. `tests/core/test_constant_waits.py`
lists them, and finds any other number of seconds in the package.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

SHORTEST_S, LONGEST_S = 20.0, 1e6
"""Range of the user's deadline in seconds, without `LONGEST_S` itself.

Below, start-up alone takes longer. The upper end is eleven days, and excludes infinity.
"""
DEFAULT_S = 1800.0
NCCL_CONNECTS_S = 10.0
"""Least seconds that a run on a GPU leaves NCCL to connect the replicas, in every generation.

Published logs of nodes with 8 GPUs show 0.7 to 3.7 s ("Init timings" of `ncclCommInitRankConfig`),
and once 55 s (NVIDIA/nccl#1646). Not measured here.
"""

NODE_S, LEAST_NODE_S = 10.0, 2.0
"""Seconds of silence after which a node is removed: the default of `--node-timeout`, and its least.

The least is twice the time between two beats of a node, so that one late beat costs no node.
"""
STILL_S = 0.5
OOM_S = 1.0
STUCK_S = 3.0
INTRODUCTION_S = 5.0
"""Waits in seconds that are the same for every deadline, for code that has no `Deadlines`.

The fields of `Deadlines` with the same names give the reasons.
"""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """All waits of a run in seconds, each with its waiting party and what ends the wait."""

    gap_s: float = 0.25
    """Most time that the detector counts between two looks at a rank. Fixed: the agent looks every
    0.1 s, and a longer gap is the agent's own."""
    stacks_s: float = 0.4
    """Longest wait of the agent for the ranks of a hung replica to write their stacks. Then the
    agent kills them. Fixed: a stopped rank is to be gone within 1 s (`stopped_s` and this)."""
    still_s: float = STILL_S
    """Shortest time without running that a process leaves out of its timers. The launcher also
    takes a recorder for stopped that has not looked at the output of ranks for this long. Fixed:
    the scheduler of a busy machine takes less."""
    stopped_s: float = 0.5
    """Least time that the detector waits for a stopped process; two typical steps if these are
    longer. Then the replica is killed, if another one is neither silent nor stopped. Fixed: a
    stopped rank is to be gone within 1 s or three steps."""
    hung_s: float = 2.2
    """Least time that the detector waits for a rank that shows no progress. The wait is longer
    where four typical steps, or twice the longest operation of its kind, are longer. Then the
    replica is killed, if another one is neither silent nor stopped. Fixed: an endless loop is to be
    ended within 3 s or five steps."""
    after_work_s: float = 1.0
    """Time for which a replica still counts as at work after it was last seen at work. Meanwhile
    the replica is not blamed for keeping others waiting. Fixed: this bridges the instants between
    two computations, and the way of a request that the others have just made."""
    oom_s: float = OOM_S
    """Longest time between a kill for want of memory and a death that the kill explains. Fixed:
    dying takes a process that long."""
    introduction_s: float = INTRODUCTION_S
    """Longest wait of a listener for a connection to prove the job's key. Then the listener closes
    the connection, and an honest peer dials again. Fixed: strangers must not hold a place for
    longer because a user is patient."""
    beat_s: float
    """Time between two beats that the coordinator sends to a leader, which answers each. The
    answers renew the lease of `lease_s`, and no replica is removed for their absence. Also the time
    between two beats of a node: the coordinator removes a node that sends nothing for `node_s`."""
    grace_s: float = 0.25
    """Longest wait of the coordinator for the agent to see a death that would explain a member's
    request, if at most one generation without a committed step came before; later requests wait
    `follow_s`. Then the coordinator makes a generation with the same roster. Fixed: the agent sees
    a death within 0.1 s, and every repair that a member requests waits for this."""
    gather_s: float = 0.02
    """Time that the coordinator waits for further newcomers once a member has vouched for one, so
    that they join together. Fixed: it delays a join, and the members wait for it where their step
    is shorter (`hold_s`)."""
    hold_s: float
    """Longest time for which a member keeps its pass open for a newcomer, so that the step is not
    over before the newcomer is announced. Then the member ends its pass, and the newcomer reads a
    later state. Nobody is blamed for it: all waits of the others are longer."""
    reset_s: float = 0.05
    """Time after the reset of a node's link in which resets of others count as resets at the same
    time, before the coordinator removes the node. Fixed: what resets many links does it at once."""
    name_s: float = 0.1
    """Time that a rank whose gradient is not finite leaves the other ranks of its replica to name
    the microbatch, before it reports all of the pass. Fixed: they find it in the same moment."""
    silence_s: float
    """Time without a message of the coordinator, or without a leader's answer to a beat, after
    which the other end reports the silence. The launcher also reports a standstill of its own that
    lasts so long. The reports end nothing."""
    words_s: float
    """Longest wait of a rank that raised, or of a leader that was ordered to stop, until its last
    messages were read. Also the longest wait of a rank for stderr to take the reason of its end.
    Then the process ends."""
    sigkill_s: float
    """Longest wait of the agent for a killed process to take the signal. Then the launcher sets the
    process aside. The launcher waits as long for the process of `report_s` that it has killed."""
    node_s: float = NODE_S
    """Longest silence of a node before the coordinator removes the node, and of the coordinator
    before a leader on another host takes the coordinator for lost. Until ranks are started, nodes
    and coordinator wait for each other six times as long. Also the longest wait of a replica for
    what only a lost coordinator could give it. Then the replica ends (code 13). Fixed: a network
    heals in less, or not soon. With several nodes `--node-timeout` gives it (`with_node`)."""
    lease_s: float = 12.0
    """Longest time for which a replica may begin to name a checkpoint without a new proof that it
    is a member. Fixed: a leader that is only slow answers beats in less."""
    lapse_s: float = 13.0
    """Longest wait of the coordinator for the death of a lost replica that may name a checkpoint.
    Then its lease has lapsed, and the next writer may name one. Fixed: this is `lease_s` on the
    clock of another host, which may differ by 5 %."""
    follow_s: float
    """Longest wait of the coordinator for the members to enter a generation. Then the coordinator
    removes and kills the members that have not, if another has; it waits on for members at work. A
    rank whose replica is broken waits as long for the agent to kill the rank. Then the rank ends
    itself: it stops its training thread, and ends the process after as long again."""
    lock_s: float
    """Longest wait of a writer for the lock of the save folder, which a killed writer holds until
    it is dead. Then the save fails. The next save point, or the end of training, tries again."""
    probe_s: float
    """Longest wait of a rank for its peers to answer a probe, after a sum by `gloo` or `nccl` that
    ran out of time or failed without a culprit. Then the rank names the peers that did not."""
    connect_s: float
    """Longest wait of a rank inside a sum or a transfer for the connection to a member. Then the
    sum fails, and the leader requests a generation. A newcomer waits as long for the connection to
    a member whose state it reads, and then reads from others. On a GPU a run refuses a deadline
    below 250 s, which leaves NCCL less than 10 s to connect the members."""
    sum_s: float
    """Longest wait of a rank inside a sum that all members have entered without any byte of any of
    them (`gloo`: without a finished piece of 1 MiB; `nccl`: without a finished tensor). Then the
    sum fails, and the leader requests a generation. Transfers wait as long, and so do both ends
    while a newcomer reads the state of a member."""
    slowest_s: float
    """Longest wait of a rank inside a sum for the slowest member to enter the sum, without any byte
    of anyone. Then the sum fails, and the leader requests a generation. Longer while a job without
    a coordinator saves its last checkpoint (`while_the_last_writer_saves`)."""
    stall_s: float
    """Longest wait of a leader for the status or vote of other members. Then the leader requests a
    generation. A member that does not enter that generation is removed by `follow_s`. Also the
    longest time for which a leader tries to connect to another one."""
    blame_s: float
    """Longest wait of the coordinator for a committed step, from the first generation that a member
    requested without a save or work to excuse it. At the next request the coordinator removes the
    member that the evidence names. After as long again, if there are two members and the evidence
    names neither, the coordinator removes the one with the higher id."""
    finish_s: float
    """Longest wait of the coordinator for the last members to finish once one has. Then the
    coordinator removes and kills them."""
    reap_s: float
    """Longest wait of the fork server, at the end, for the ranks that it has killed. Then the fork
    server ends without the ranks that are left."""
    close_s: float
    """Longest wait of the launcher for the fork server to kill and reap the ranks at the end. Then
    the launcher kills the fork server, too. Also the longest wait of a rank for the thread that
    reads ahead to end, for an NCCL communicator to come to rest, and for wandb to finish. Then the
    rank continues without them, and keeps the communicator."""
    stop_s: float
    """Longest wait of the launcher for the ranks to end by themselves after a job that failed. Then
    the launcher kills them. Before generation 1 it kills them at once."""
    end_s: float
    """Longest wait of the launcher for the ranks to end by themselves after a job whose replicas
    ended together (codes 0, 10, 15, 16), threads of upstream that delete old checkpoints included.
    Then the launcher kills them. Also its longest wait for the kernel to take down a process that
    took its SIGKILL. Then the launcher sets the process aside."""
    fork_s: float
    """Longest wait of the launcher for the fork server to start a rank. Then the run ends with code
    1. Also the time after which the console names a process that still imports."""
    slots_s: float
    """Longest time for the check of the slots of a newcomer; half of it for what former ranks have
    left there to end. Then the slots are set aside."""
    notice_s: float = 1.0
    """Longest wait of the launcher for stderr to take one of its own lines. Then the launcher
    continues. Fixed: see `trace_s`."""
    renew_s: float
    """Longest wait of the launcher before it starts another recorder or monitor where one has died.
    The first starts at once, each next one after twice as long. After one that lived so long the
    next starts at once again. The launcher gives up only at the end of the run."""
    store_s: float
    """Longest wait of the recorder for the files of the trace to close, and for those of the logs.
    Then the recorder ends all the same. Also the longest wait of the launcher, at its end, for the
    disk to take that the job no longer holds the folder of `--save`. Fixed: see `trace_s`."""
    orphan_s: float
    """Time for which the recorder of a launcher that is gone still records events of ranks, which
    are being killed. Fixed: see `trace_s`."""
    replies_s: float
    """Longest wait of the recorder, at its end, for the launcher to take its messages. Then the
    recorder ends. Fixed: see `trace_s`."""
    refused_s: float = 2.5
    """Longest time, at the end, for which the recorder tries to write events to a disk that
    refuses, and then as long to write logs. What is left is lost, and the recorder reports it.
    Fixed: see `trace_s`."""
    abandoned_s: float
    """Longest wait of a launcher that raises for the recorder, or for a new one if there is none.
    The recorder does then what it does without a launcher. After the wait the launcher kills the
    recorder, and reports it. Fixed: see `trace_s`."""
    stuck_s: float = STUCK_S
    """Longest wait of the events of all processes for one that a process has begun to record. Then
    that event is lost, and reported as a gap. Fixed: recording takes microseconds, and a process
    that takes longer is stopped."""
    slow_disk_s: float = 5.0
    """Longest wait of the recorder for the disk without a warning. The warning ends nothing. Fixed:
    see `trace_s`."""
    screen_s: float
    """Longest wait of the recorder for the terminal to take how the run ended. Then the launcher
    prints it on stderr. Fixed: see `trace_s`."""
    terminal_s: float
    """Longest wait of the launcher, after `trace_s`, for the recorder to have shown the end of the
    run. Then the launcher prints the end on stderr, and kills the recorder. Fixed: see
    `trace_s`."""
    trace_s: float
    """Longest wait of the recorder, at the end, for the disk to take the rest of the trace. Then
    the rest is lost, and the recorder reports it. Fixed: the exit code is known by then, and a
    scheduler that asked for the end kills soon (Slurm after 30 s). With `terminal_s` this is over
    before."""
    traces_s: float = 12.0
    """Longest wait of node 0, at the end, for the traces of the other nodes to have their end in
    the run directory, without a part of one that node 0 gathers. Then node 0 makes summary and
    report without the traces that are missing, and names them. Fixed: see `trace_s`."""
    offer_s: float
    """Longest wait of another node, at the end, for node 0 to ask for a part of its trace, or to
    have all. Then the node ends; its files stay on its disk."""
    scrape_s: float = 5.0
    """Longest time that a connection to the port of `--metrics-port` is kept. Then the monitor
    closes it. Fixed: Prometheus itself waits for 10 s by default, and an answer takes
    milliseconds."""
    last_events_s: float
    """Longest wait of the monitor, at the end, for the end of the run in the trace, which the
    recorder has written by then. Then the monitor gives the end without the trace. Fixed: see
    `trace_s`."""
    command_s: float
    """Longest time that the command of `--on-event` may take. Then the monitor kills the command.
    At the end of a run the end itself is given to the command after this time, and what came before
    it is dropped. Fixed: see `trace_s`."""
    monitor_s: float
    """Longest wait of the launcher, at the end, for the monitor to have given the end of the run to
    the command of `--on-event`. Then the launcher kills the monitor. Without a command the monitor
    ends at once. Fixed: see `trace_s`."""
    report_s: float
    """Longest wait of the launcher for the process that makes summary and plot. Then the launcher
    ends that process, and prints how to make them."""
    build_s: float
    """Longest wait of a rank for another process that builds the data index, or compiles Megatron's
    index builder. Then the rank does so, too."""
    start_s: float
    """Longest wait of the coordinator from the first replica that is ready to the last. Then the
    coordinator continues without the others."""
    leader_s: float
    """Longest time for which a rank tries to connect to its leader at the start. Also its longest
    wait for each key in torch's store of its replica. Then the rank ends, and its replica is lost.
    A leader tries as long to connect to the coordinator."""
    save_s: float
    """Longest wait of members for one that saves a checkpoint. Then the coordinator suspects that
    member. Also the longest time for which the last save of a run is tried again after a failure.
    Then the run ends with code 16."""
    deadline_s: float
    """The user's deadline. Longest wait of the launcher for the imports, for the dry run, and for
    the first replica to be ready. Longest wait of a replica for a coordinator that is silent, such
    as a stopped one (code 13), and of members where nobody can be blamed. Longest time for which
    the work of a member excuses the waits of others. A rank that hangs where nothing distinguishes
    a hang from slow work is ended after this time, and so is a collective inside a replica."""

    def with_node(self, node_s: float | None) -> Deadlines:
        """Return the waits of a job whose nodes are removed after `node_s` of silence; None: these.

        That is `--node-timeout`. What depends on it keeps its proportions. With a short one, beats
        are as short: if a coordinator is cut off from several nodes at once, no node may have been
        silent for `node_s` while the last beat of another still counts (`core/node_silence.py`).
        """
        if node_s is None:
            return self
        factor = node_s / self.node_s
        return msgspec.structs.replace(
            self,
            node_s=node_s,
            beat_s=min(self.beat_s, node_s / 8),
            silence_s=min(self.silence_s, 0.75 * node_s),
            lease_s=factor * self.lease_s,
            lapse_s=factor * self.lapse_s,
        )

    def while_the_last_writer_saves(self) -> Deadlines:
        """Return the waits of the data plane at the end of a job without a coordinator.

        Nobody can excuse the writer, and nobody could replace it. So the others wait for it as long
        as a coordinator would have them wait for a member at work.
        """
        return msgspec.structs.replace(self, slowest_s=0.8 * self.deadline_s)

    @staticmethod
    def of(deadline_s: float = DEFAULT_S) -> Deadlines:
        """Return the waits that follow from the user's deadline.

        Raises ValueError with the remedy if the deadline is out of range.
        """
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
        last_events_s, command_s = 2.0, 7.0
        shown_s = 2 * store_s + screen_s + 1.0  # the last is to spare
        return Deadlines(
            beat_s=beat_s,
            hold_s=min(1.0, 0.2 * stall_s),
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
            slots_s=end_s,
            renew_s=_between(0.5, deadline_s / 60, 30.0),
            store_s=store_s,
            orphan_s=orphan_s,
            replies_s=replies_s,
            abandoned_s=orphan_s + trace_s + shown_s,
            screen_s=screen_s,
            terminal_s=shown_s + replies_s,
            trace_s=trace_s,
            offer_s=min(90.0, 0.9 * deadline_s),
            last_events_s=last_events_s,
            command_s=command_s,
            monitor_s=last_events_s + store_s + 2 * command_s + 1.0,  # the last is to spare
            report_s=max(15.0, deadline_s / 2),
            build_s=deadline_s / 3,
            start_s=deadline_s / 2,
            leader_s=0.75 * deadline_s,
            save_s=deadline_s * 5 / 6,
            deadline_s=deadline_s,
        )


def shortest_on_gpu_s() -> float:
    """Return the shortest deadline in seconds that leaves NCCL `NCCL_CONNECTS_S` to connect.

    With a shorter one, members that only connect would be taken for members at fault.
    """
    return DEFAULT_S * NCCL_CONNECTS_S / Deadlines.of().connect_s


def figure(seconds: float) -> str:
    """Return a wait in seconds as short text: at most two decimals, never an exponent."""
    return f"{round(seconds, 2 if seconds < 10 else 1 if seconds < 100 else 0):.6f}".rstrip("0").rstrip(".")


def _between(least: float, value: float, most: float) -> float:
    return min(most, max(least, value))


class Below(NamedTuple):
    """Two waits of which `inner` must be shorter than `outer`, and the reason."""

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
    Below("gather_s", "grace_s", "newcomers that gather are announced before a request of the same moment"),
    Below("gather_s", "hold_s", "newcomers that gather are announced before a member ends the pass that it keeps open"),
    Below("hold_s", "hung_s", "a rank whose pass is kept open is taken for no hung one"),
    Below("hold_s", "connect_s", "a member that keeps its pass open is not taken for one that cannot be reached"),
    Below("hold_s", "slowest_s", "a member that keeps its pass open is called late by nobody"),
    Below("hold_s", "stall_s", "a member that keeps its pass open keeps nobody waiting for a vote for too long"),
    Below("reset_s", "grace_s", "the loss of a node whose link was reset explains what members report of it"),
    Below("name_s", "grace_s", "the death of a rank that waits for a name still explains the requests of others"),
    Below("words_s", "follow_s", "a rank's last messages leave before anyone kills the rest of its replica"),
    Below("sigkill_s", "follow_s", "a rank that does not die of SIGKILL is named before the next member could be late"),
    Below("silence_s", "follow_s", "a silent coordinator is named before a replica that nobody can fence gives itself up"),
    Below("silence_s", "node_s", "a coordinator is reported as silent before it is taken for lost"),
    Below("node_s", "lease_s", "a silence that is too short to take anybody for lost lets no lease lapse"),
    Below("lease_s", "lapse_s", "a holder stops to name checkpoints before another one may begin"),
    Below(
        "lapse_s", "deadline_s", "a checkpoint that waits for the lease of a lost writer gets its name before the run gives up"
    ),
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
    Below("stop_s", "end_s", "ranks that ended together may have more to write than ranks after a failure"),
    Below("end_s", "deadline_s", "an end is shorter than a run's longest wait"),
    Below("fork_s", "deadline_s", "a fork server that hangs is named before a replica is late"),
    Below("slots_s", "deadline_s", "a disk or driver that hangs keeps no newcomer from other slots"),
    Below("notice_s", "terminal_s", "a line on stderr waits no longer for a terminal than the end of a run does"),
    Below("renew_s", "deadline_s", "a recorder is tried anew while people may still mend what ends recorders"),
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
    Below("trace_s", "traces_s", "node 0 waits for a node whose disk is slow"),
    Below("traces_s", "report_s", "summary and report are made also where a trace never comes"),
    Below("end_s", "offer_s", "a node offers its trace until the ranks of node 0 have ended"),
    Below("monitor_s", "offer_s", "a node offers its trace until node 0 has given its last event"),
    Below("traces_s", "offer_s", "a node does not leave while node 0 still waits for its trace"),
    Below("offer_s", "deadline_s", "an end is shorter than a run's longest wait"),
    Below("scrape_s", "deadline_s", "a client that stalls gives its place to the next one"),
    Below("last_events_s", "monitor_s", "the end of a run is given without its trace before the launcher gives the monitor up"),
    Below("command_s", "monitor_s", "a command that hangs is killed, and the end is given, before the monitor is given up"),
    Below("monitor_s", "deadline_s", "an end is shorter than a run's longest wait"),
    Below("report_s", "deadline_s", "an end is shorter than a run's longest wait"),
    Below("build_s", "start_s", "a replica that waits for the data index builds it itself before it is late for the start"),
    Below("start_s", "leader_s", "the coordinator goes on without a replica before its ranks give up on their own leader"),
    Below(
        "leader_s", "deadline_s", "a rank without a leader ends, and explains the loss, before the launcher's wait ends the run"
    ),
    Below("save_s", "deadline_s", "a saver that is too slow is suspected before the run gives up"),
)
