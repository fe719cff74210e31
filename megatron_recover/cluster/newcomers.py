"""The newcomers of a node: replicas that are formed while the others train (`core/joining.py`).

The coordinator chooses their slots (`control_plane/healing.py`). This node checks them, starts the
ranks, and kills newcomers that are no members when the job ends or has lost its coordinator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from megatron_recover.cluster import slot_check
from megatron_recover.cluster.fences import Fences
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.node import Node, NodeLost, ProcessEnd
from megatron_recover.cluster.recording import Recording
from megatron_recover.cluster.seats import Seats
from megatron_recover.cluster.starting import Starting
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import FormReplica, SlotsReady, SlotsUnfit, StartReplica
from megatron_recover.deadlines import Deadlines, figure


class Newcomers:
    """Starts newcomers on one node. Everything but checks runs in the launcher's thread."""

    def __init__(
        self, job: Job, node: Node, seats: Seats, *, recording: Recording, starting: Starting, fences: Fences, loop: Loop,
        deadlines: Deadlines, send: Callable[[SlotsReady | SlotsUnfit], None], check: slot_check.Check,
    ) -> None:  # fmt: skip
        """`send(message)` sends to the coordinator. `check` judges slots before their use."""
        self._job, self._node, self._seats, self._check = job, node, seats, check
        self._recording, self._starting, self._fences = recording, starting, fences
        self._loop, self._deadlines, self._send = loop, deadlines, send
        self._checked: set[int] = set()
        """Newcomers whose check has ended, or is waited for no longer."""
        self._is_over = False
        self._joining: frozenset[int] = frozenset()
        """Newcomers of the newest generation: nobody here knows whether the members admit them."""

    def announced(self, newcomers: Collection[int]) -> None:
        """Note the newcomers that a generation names."""
        self._joining = frozenset(newcomers)

    def forming(self, roster: Collection[int]) -> set[int]:
        """Return the newcomers here that are not fenced and not in the roster."""
        return {*self._seats.newcomers} - {*roster} - self._fences.gone

    def handle(self, message: FormReplica | StartReplica) -> None:
        """Carry out what the coordinator asks, unless the newcomer is fenced or the job over."""
        if self._is_over or message.replica in self._fences.gone:
            return
        if isinstance(message, FormReplica):
            self._form(message)
        else:
            self._start(message)

    def _form(self, asked: FormReplica) -> None:
        """Take and check the slots of a newcomer, and listen for it."""
        replica, slots = asked.replica, dict(asked.seats)
        former = [user for slot in slots.values() for user in self._seats.users(slot)]
        groups = self._node.former_groups(former)
        try:
            self._seats.take(replica, slots, self._node.lives)
        except ValueError as error:
            self._send(SlotsUnfit(replica, tuple(slots.values()), str(error)))
            return
        if not self._recording.has_room(len(slots)):
            self._send(SlotsUnfit(replica, tuple(slots.values()), "no more processes can be recorded in this run"))
            return
        is_alone = self._job.rank_start == "warm" and self._job.config.ranks_per_gpu == 1
        wanted = slot_check.Wanted(
            run_dir=self._job.run_dir, num_ranks=len(slots), gpus=tuple(sorted(slots.values())) if is_alone else (),
            former_groups=groups, until_s=time.monotonic() + 0.5 * self._deadlines.slots_s,
        )  # fmt: skip

        def judge() -> None:
            try:
                why = self._check(wanted)
            except Exception as error:  # of whoever has written the check
                why = f"its check failed ({type(error).__name__}: {error})"
            self._loop.post(lambda: self._judged(asked, why))

        try:
            threading.Thread(target=judge, name=f"check-{replica}", daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            self._judged(asked, f"its check cannot be started ({error}); raise `ulimit -u`")
        late = f"its check has not ended within {figure(self._deadlines.slots_s)} s"
        self._loop.after(self._deadlines.slots_s, lambda: self._judged(asked, late))

    def _judged(self, asked: FormReplica, why: str) -> None:
        """Listen for a newcomer whose slots are fit, or report that they are not."""
        replica = asked.replica
        if replica in self._checked:
            return
        self._checked.add(replica)
        if self._is_over or replica in self._fences.gone:
            return
        try:
            leader, store = ("", "") if why else self._starting.listen_for(replica, spans_nodes=asked.spans_nodes)
        except (OSError, NodeLost) as error:
            why = f"its leader cannot listen ({error})"
        if why:
            self._send(SlotsUnfit(replica, tuple(slot for _, slot in asked.seats), why))
        else:
            self._send(SlotsReady(replica, leader, store))

    def _start(self, told: StartReplica) -> None:
        """Start the ranks of a newcomer here. If one cannot be started, end the others again."""
        try:
            self._starting.newcomer(told)
        except (OSError, RuntimeError) as error:  # of a fork server that is gone, the next poll says so, too
            self._fences.fence(told.replica)
            self._send(SlotsUnfit(told.replica, tuple(self._seats.slots(told.replica).values()), str(error)))

    def may_be_outside(self, end: ProcessEnd) -> bool:
        """Return whether a failing rank is of a newcomer of the newest generation; end it then.

        For a node without its coordinator. The members may have turned the newcomer away, of which
        only the coordinator would have told. If they need it, they end by themselves after
        `node_s`, since they cannot get a generation without it.
        """
        if end.replica not in self._joining:
            return False
        self._recording.says(
            f"replica {end.replica} is ended (rank {end.rank}: {end.cause}), which joined before the coordinator was lost: the "
            "others go on without it, unless they had admitted it"
        )
        self._fences.fence(end.replica)
        return True

    def end(self, roster: Collection[int]) -> None:
        """Kill the newcomers that are no members, and form none any more."""
        self._is_over = True
        for replica in self.forming(roster):
            self._fences.fence(replica)
