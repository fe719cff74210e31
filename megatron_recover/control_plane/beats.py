"""Beats between the coordinator and the leaders: each end notices that the other is silent.

Each end reports a silence once; a leader also reports that its need of the coordinator changed. The
coordinator removes no member because of a silence.

Note [Beats]. The coordinator sends each leader a `Beat` every `Deadlines.beat_s`, and the leader's
control thread answers. The coordinator sends a beat only if the previous one was answered, so at
most one beat waits for a stopped process. A leader takes any message of the coordinator
as a sign of life. The coordinator takes only the answer to its beat as a leader's sign of life.
Neither a beat nor its answer shows that a training thread is alive.

Training needs no coordinator until something fails. From then on the replicas need the coordinator,
whose process may be stopped (SIGSTOP). A leader then reports what it waits for, and the process id
and state of the coordinator. The leader waits no longer than the one deadline that the user sets
(INV-8). Then its replica ends, because nobody could fence a broken replica.

Note [A lost coordinator]. A leader takes the coordinator for lost if its link to the coordinator
breaks, or after a silence of `node_s` if the process of the coordinator is not seen to live on this
host. A stopped process is not lost. Without a coordinator training goes on to its next save point
(`megatron/checkpoint/boundary.py`). Where a replica needs the coordinator before that, it waits for
`node_s` only. The wait counts anew with every committed step. A link that broke stays broken. A
silent coordinator may be heard again; it then counts as lost no more, unless the replica has said
in a vote that it has none. That binds the replica: it enters no newer generation, and ends at the
next save point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_recover import trace
from megatron_recover.control_plane.leader_messages import Beat, LeaderBeat
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import Link, encode
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import host_name
from megatron_recover.host.process_stat import STATES, state_of
from megatron_recover.host.speaker import Speaker

_ENDED = ("", "Z", "X")
"""States of a process that is not seen to live on this host."""


class CoordinatorWatch:
    """A leader's watch over its coordinator. All calls are made in the loop's thread."""

    def __init__(
        self,
        replica: int,
        *,
        loop: Loop,
        deadlines: Deadlines,
        answer: Callable[[], LeaderBeat],
        waits: Callable[[], str],
        lost: Callable[[bool], None],
        is_bound: Callable[[], bool],
        record: Callable[[trace.Event], None],
        give_up: Callable[[str], None],
    ) -> None:
        """Begin to watch.

        - `answer()` returns the leader's generation, step and waits.
        - `waits()` returns what the leader needs the coordinator for; empty if nothing.
        - `lost(True)` is called when the coordinator counts as lost, `lost(False)` when it is heard
          again.
        - `is_bound()` returns whether a vote of this replica has said that the coordinator is lost.
        - `give_up(reason)` is called once, when the leader has needed a silent coordinator for
          `Deadlines.deadline_s`, or a lost one for `Deadlines.node_s`.
        """
        self._replica, self._loop, self._deadlines = replica, loop, deadlines
        self._answer, self._waits, self._lost, self._record, self._give_up = answer, waits, lost, record, give_up
        self._is_bound = is_bound
        self._is_lost = False
        self._step = 0
        """Newest step of this replica, which shows progress."""
        self._heard_at = self._waiting_since = loop.time()
        self._waits_for = ""
        self.speaker = Speaker()
        self._said: str | None = None
        """Need of the replica at its last report of this silence, empty for no need. None: this
        silence was not reported."""
        self._host, self._pid = "", 0
        self._is_over = False
        loop.after(deadlines.beat_s, self._look)

    def heard(self, beat: Beat | None = None) -> None:
        """Note a message of the coordinator, and report the end of a silence that was reported.

        `beat` is the message if it is a beat.
        """
        now = self._loop.time()
        silent_s, self._heard_at = now - self._heard_at, now
        if beat is not None:
            self._host, self._pid = beat.host, beat.pid
        if self._is_lost and not self._is_bound():
            self._is_lost = False
            self._lost(False)
        if self._said is not None:
            self._said = None
            self._tell("over", silent_s)

    def link_lost(self, why: str) -> None:
        """Take the coordinator for lost, for good: the link to it broke."""
        if not self._is_over:
            self._take_for_lost(f"the link to it broke: {why}")

    def stop(self) -> None:
        """Stop watching: the job is over."""
        self._is_over = True

    def _take_for_lost(self, why: str) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._waiting_since = self._loop.time()
        where = self._answer()
        self._record(trace.CoordinatorLost(replica=self._replica, generation=where.generation, step=where.step, reason=why))
        if where.generation:
            follows = (
                "; training goes on to the next save point and ends there with exit code 15; a failure before that ends it "
                "with code 13 at the newest checkpoint"
            )  # fmt: skip
        else:
            follows = (
                ", before training began; once all its ranks are there, this replica waits for the coordinator for "
                f"{self._deadlines.node_s:g} s, and then ends with code 13"
            )
        self.speaker.say(f"megatron-recover: the coordinator ({self._who()}) is lost, {why}{follows}")
        self._lost(True)

    def _look(self) -> None:
        if self._is_over:
            return
        self._loop.after(self._deadlines.beat_s, self._look)
        now, waits_for, step = self._loop.time(), self._waits(), self._answer().step
        if bool(waits_for) != bool(self._waits_for) or step != self._step:
            self._waiting_since = now
        self._step = step
        self._waits_for = waits_for
        silent_s = now - self._heard_at
        if silent_s >= self._deadlines.silence_s and self._said != waits_for:
            self._said = waits_for
            self._tell("began", silent_s)
        if self._pid and silent_s >= self._deadlines.node_s and self._state() in _ENDED:
            self._take_for_lost(f"it was silent for {silent_s:.0f} s")
        waited_s = now - (self._waiting_since if self._is_lost else max(self._heard_at, self._waiting_since))
        is_silent = self._is_lost or silent_s >= self._deadlines.silence_s
        if waits_for and is_silent and waited_s >= (self._deadlines.node_s if self._is_lost else self._deadlines.deadline_s):
            self._is_over = True
            state = "lost" if self._is_lost else "silent all the time"
            self._give_up(
                f"waited {waited_s:.0f} s for {waits_for}, and the coordinator ({self._who()}) was {state}: nobody "
                "could fence a broken replica, so this one ends"
            )

    def _tell(self, phase: str, seconds: float) -> None:
        where = self._answer()
        self._record(
            trace.CoordinatorSilent(
                replica=self._replica,
                generation=where.generation,
                phase="began" if phase == "began" else "over",
                seconds=round(seconds, 3),
                waits=self._waits_for,
                waiting_for=where.waiting_for,
                pid=self._pid,
                state=self._state(),
            )  # fmt: skip
        )
        if phase == "over":
            text = f"the coordinator answers again, after {seconds:.0f} s"
        else:
            waits = (
                f"replica {self._replica} waits for {self._waits_for}, at most {self._deadlines.deadline_s:g} s"
                if self._waits_for
                else "training goes on until it is needed"
            )
            text = f"the coordinator ({self._who()}) has sent nothing for {seconds:.0f} s; {waits}"
        self.speaker.say(f"megatron-recover: {text}")

    def _who(self) -> str:
        """Return in words the coordinator's process and state, and the remedy if it is stopped.

        Without a beat so far its process is not known.
        """
        if not self._pid:
            return "not heard since the start"
        state = self._state()
        remedy = f": continue it with `kill -CONT {self._pid}`" if state == "T" else ""
        where = "" if self._host == host_name() else f" of {self._host}"
        return f"pid {self._pid}{where}, {STATES.get(state, 'not to be seen in /proc here')}{remedy}"

    def _state(self) -> str:
        """Return the state letter of the coordinator's process; empty if it is on another host."""
        return state_of(self._pid) if self._host == host_name() else ""


class LeaderWatch:
    """The coordinator's watch over its leaders. All calls are made in the loop's thread."""

    def __init__(
        self, *, loop: Loop, deadlines: Deadlines, beat: Callable[[], Beat], record: Callable[[trace.Event], None]
    ) -> None:
        """Begin to send beats to the leaders given to `watch`.

        `beat()` returns the beat to send now.
        """
        self._loop, self._deadlines, self._beat, self._record = loop, deadlines, beat, record
        self._links: dict[int, Link] = {}
        self._unanswered_since: dict[int, float] = {}
        self._newest: dict[int, LeaderBeat] = {}
        self._silent: set[int] = set()
        self._is_over = False
        loop.after(deadlines.beat_s, self._send)

    def watch(self, replica: int, link: Link) -> None:
        """Send beats to this leader too, the first one at once."""
        self._links[replica] = link
        self._send_to([replica])

    def answered(self, beat: LeaderBeat) -> None:
        """Note a leader's answer to a beat, and report the end of a silence that was reported."""
        self._newest[beat.replica] = beat
        since = self._unanswered_since.pop(beat.replica, self._loop.time())
        if beat.replica in self._silent:
            self._silent.discard(beat.replica)
            self._tell(beat.replica, "over", self._loop.time() - since)

    def forget(self, replica: int) -> None:
        """Stop sending beats to this leader: its replica is lost."""
        self._links.pop(replica, None)
        self._unanswered_since.pop(replica, None)
        self._silent.discard(replica)

    def stop(self) -> None:
        """Stop sending beats: the job is over."""
        self._is_over = True

    def _send(self) -> None:
        if self._is_over:
            return
        self._loop.after(self._deadlines.beat_s, self._send)
        now = self._loop.time()
        for replica, since in self._unanswered_since.items():
            if now - since >= self._deadlines.silence_s and replica not in self._silent:
                self._silent.add(replica)
                self._tell(replica, "began", now - since)
        self._send_to([replica for replica in self._links if replica not in self._unanswered_since])

    def _send_to(self, replicas: Sequence[int]) -> None:
        body = encode(self._beat())
        for replica in replicas:
            self._unanswered_since[replica] = self._loop.time()
            self._loop.put(self._links[replica], body)

    def _tell(self, replica: int, phase: str, seconds: float) -> None:
        beat = self._newest.get(replica)
        self._record(
            trace.LeaderSilent(
                member=replica,
                generation=beat.generation if beat is not None else 0,
                phase="began" if phase == "began" else "over",
                seconds=round(seconds, 3),
                waiting_for=beat.waiting_for if beat is not None else (),
            )  # fmt: skip
        )
