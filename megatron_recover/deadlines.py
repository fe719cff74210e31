"""Derives every wait of a run from the one deadline that the user sets, in an order that is proven. Pure: no clock, no waiting.

A wait that is inside another one, or whose end explains the other's, is strictly shorter: else the outer wait ends first and
blames the wrong party. `ORDER` has each such pair with its reason, and a property test proves all of them for every deadline.
`megatron-recover explain timeouts` prints both.

Not here: intervals at which something is looked at (polling), which no one waits for.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

SHORTEST_S, LONGEST_S = 20.0, 1e6
"""The range of the user's deadline. Below, start-up alone takes longer; above are eleven days, and no infinity."""
DEFAULT_S = 1800.0


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """All waits of a run in seconds. The docstring of each says who waits for whom, and who ends the wait."""

    beat_s: float
    """The coordinator sends each leader a beat so often, and the leader answers. Nobody is judged by beats."""
    grace_s: float
    """The coordinator waits so long for the agent to see a death, which would explain a member's request. Then it makes a
    generation with the same roster."""
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
    sum_s: float
    """A rank inside a sum waits so long for the slowest member to send anything. Then the sum fails, and its leader requests a
    generation."""
    stall_s: float
    """A leader waits so long for the status or vote of other members. Then it requests a generation; who does not enter that
    one is removed by `follow_s`."""
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
    build_s: float
    """A rank waits so long for another process that builds the data index. Then it builds the index beside it."""
    start_s: float
    """The coordinator waits so long from the first replica that is ready to the last. Then it goes on without the others."""
    leader_s: float
    """A rank waits so long to find its leader at the start. Then it ends, and its replica is lost."""
    save_s: float
    """Members wait so long for one that saves a checkpoint. Then the coordinator suspects it. The last save of a run is tried
    again for so long where there is no room. Then the run ends with code 16."""
    deadline_s: float
    """The user's deadline. The launcher waits so long for the imports, for the dry run, and for the first replica to be ready.
    A replica waits so long for a launcher that is stopped (code 13), and members wait so long where nobody can be blamed."""

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
        return Deadlines(
            beat_s=beat_s,
            grace_s=0.2,
            silence_s=3 * beat_s,
            words_s=follow_s / 2,
            sigkill_s=_between(0.8, 0.3 * follow_s, 3.0),
            follow_s=follow_s,
            lock_s=min(60.0, 0.75 * stall_s),
            sum_s=0.8 * stall_s,
            stall_s=stall_s,
            finish_s=stall_s + 2 * follow_s,
            reap_s=close_s / 2,
            close_s=close_s,
            stop_s=close_s,
            end_s=end_s,
            fork_s=end_s,
            build_s=deadline_s / 3,
            start_s=deadline_s / 2,
            leader_s=0.75 * deadline_s,
            save_s=deadline_s * 5 / 6,
            deadline_s=deadline_s,
        )


def _between(least: float, value: float, most: float) -> float:
    return min(most, max(least, value))


class Below(NamedTuple):
    """A wait that must end before another one would."""

    inner: str
    outer: str
    why: str


ORDER = (
    Below("beat_s", "silence_s", "a beat or two may be late before anyone is called silent"),
    Below("grace_s", "follow_s", "the agent reports a death before a member is judged late for the next generation"),
    Below("words_s", "follow_s", "a rank's last messages leave before anyone kills the rest of its replica"),
    Below("sigkill_s", "follow_s", "a slot is set aside before the loss of the next member could ask for it"),
    Below("silence_s", "follow_s", "a stopped launcher is named before a replica that it cannot fence gives itself up"),
    Below("follow_s", "lock_s", "a writer that is only slow is removed and killed before the next one gives the lock up"),
    Below("follow_s", "stall_s", "who does not enter a generation is removed before the others request one more"),
    Below("follow_s", "sum_s", "a member that is gone is removed before a sum that needs it fails"),
    Below("lock_s", "save_s", "a save that waits for its lock fails by itself before its replica is suspected"),
    Below("sum_s", "stall_s", "a rank inside a sum names who is slow before others blame its replica for a vote"),
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
    Below("build_s", "start_s", "a replica that waits for the data index builds it itself before it is late for the start"),
    Below("start_s", "leader_s", "the coordinator goes on without a replica before its ranks give up on their own leader"),
    Below(
        "leader_s", "deadline_s", "a rank without a leader ends, and explains the loss, before the launcher's wait ends the run"
    ),
    Below("save_s", "deadline_s", "a saver that is too slow is suspected before the run gives up"),
)
