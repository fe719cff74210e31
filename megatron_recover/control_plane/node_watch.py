"""The coordinator's watch over the nodes of a job: which are heard, and which are lost.

Note [What shows that a node is lost]
    - Its agent has closed the link. Only the end of the agent does that, so the node is lost at
      once; its driver handles that without this watch.
    - Nothing was heard of it for `--node-timeout`.
    - Its link was reset. That may also be the work of a machine in between. If it resets the links
      of many nodes, all of them are well. So the watch waits for `Deadlines.reset_s`. If those of
      more than half were reset by then, it removes none and gives up: the ranks go on to the next
      save point without a coordinator.

    It removes nobody while it hears fewer than half (`core/node_silence.py`). Then a node whose
    link was reset counts as silent. If it hears nothing for long, the job ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from megatron_recover import trace
from megatron_recover.control_plane.loop import Loop
from megatron_recover.core import node_silence
from megatron_recover.core.wording import verb
from megatron_recover.deadlines import Deadlines

SEEN_BEATS = 1.5
"""Beats without a message of an agent after which its node is reported as silent."""
_LOOKS_A_BEAT = 8
"""Looks at all nodes in a beat. A silence is on the console in less than 2 beats, so seeing it and
telling it share half a beat."""
_TOGETHER_BEATS = 2
"""Resets within so many beats may have one cause: each agent sends once a beat."""
PREPARING_SILENCES = 6
"""Until all nodes have started their ranks, one is waited for as many times `--node-timeout` of
silence: it may be busy with a slow disk."""


class _Node:
    """One living node, as the coordinator hears it."""

    def __init__(self, name: str, now: float, *, is_unused: bool) -> None:
        self.name, self.heard_at = name, now
        self.is_unused = is_unused
        """True if it came after the start and has had no rank: it counts in no majority."""
        self.is_silent = False
        self.reset = ""
        """Description of the reset of its link; empty: it was not reset."""


class NodeWatch:
    """Watches the nodes of one job. Everything runs in the loop's thread."""

    def __init__(
        self,
        *,
        loop: Loop,
        deadlines: Deadlines,
        limit_s: float,
        record: Callable[[trace.Event], None],
        remove: Callable[[int, str], None],
        changed: Callable[[], None],
        cut_off: Callable[[str], None],
        give_up: Callable[[str], None],
    ) -> None:
        """Watch the nodes that `watch` adds.

        - `limit_s`: a node that is silent for so long is removed, once `allow` was called. Before,
          one is removed after `PREPARING_SILENCES` times as long.
        - `remove(number, why)` removes a node, which is then no longer watched.
        - `changed()` is called after a node has fallen silent or is heard again.
        - `cut_off(reason)` ends the job, since this node is cut off, and stops this watch.
        - `give_up(reason)` leaves the job without a coordinator.
        """
        self._loop, self._deadlines, self._limit_s, self._record = loop, deadlines, limit_s, record
        self._remove, self._changed, self._cut_off, self._give_up = remove, changed, cut_off, give_up
        self._nodes: dict[int, _Node] = {}
        self._is_over = self._has_given_up = False
        self._removed_at: list[float] = []
        """Times of the loop's clock of the newest removals for a reset."""
        self._patience_s = PREPARING_SILENCES * limit_s
        """A node is removed after so long a silence at present."""
        loop.after(deadlines.beat_s, self._look)

    @property
    def silent(self) -> frozenset[int]:
        """Return the numbers of the nodes that are silent at present."""
        return frozenset(number for number, node in self._nodes.items() if node.is_silent)

    @property
    def heard(self) -> frozenset[int]:
        """Return the numbers of the nodes that are watched and heard."""
        return frozenset(self._nodes) - self.silent

    def watch(self, number: int, name: str, *, is_unused: bool = False) -> None:
        """Watch a node that was heard just now.

        `is_unused`: it came after the start, and counts in no majority before `use`.
        """
        self._nodes[number] = _Node(name, self._loop.time(), is_unused=is_unused)

    def use(self, number: int) -> None:
        """Note that a node is to have ranks: it counts like any other from now on."""
        if (node := self._nodes.get(number)) is not None:
            node.is_unused = False

    def is_unused(self, number: int) -> bool:
        """Return whether a node came after the start and has had no rank."""
        return number in self._nodes and self._nodes[number].is_unused

    def forget(self, number: int) -> None:
        """Watch a node no longer: it is lost or has left."""
        self._nodes.pop(number, None)

    def allow(self) -> None:
        """Remove a node that is silent for `limit_s` from now on: the ranks are started."""
        self._patience_s = self._limit_s

    def stop(self) -> None:
        """Report and remove nobody any more: the job is over.

        A node that sends nothing for `limit_s` and `traces_s` is silent: nobody waits for it.
        """
        self._is_over = True

    def heard_of(self, number: int) -> None:
        """Note that a node has sent something; nothing happens for one that is not watched."""
        if (node := self._nodes.get(number)) is None:
            return
        now = self._loop.time()
        silent_s, node.heard_at, was_silent = now - node.heard_at, now, node.is_silent
        node.is_silent = False
        if was_silent and not self._is_over:
            self._tell(number, "over", silent_s)
            self._changed()

    def was_reset(self, number: int, why: str) -> None:
        """Note that the link of a node was reset, and judge that after `reset_s`.

        The node is removed then, or the coordinator gives up.
        """
        self._nodes[number].reset = why
        self._loop.after(self._deadlines.reset_s, self._judge_resets)

    def _judge_resets(self) -> None:
        reset = {number: node.reset for number, node in self._nodes.items() if node.reset}
        if not reset or self._has_given_up:
            return
        since = self._loop.time() - _TOGETHER_BEATS * self._deadlines.beat_s
        self._removed_at = [at for at in self._removed_at if at > since]
        num_used = sum(not node.is_unused for node in self._nodes.values())
        num_nodes, num_reset = num_used + len(self._removed_at), len(reset) + len(self._removed_at)
        silent_s = self._silent_s()
        silent_s |= {number: math.inf for number in reset if number in silent_s}
        if 2 * num_reset > num_nodes and not self._is_over:
            self._is_over = self._has_given_up = True
            self._give_up(
                f"the links of {num_reset} of {num_nodes} nodes were reset at once, "
                "so too few are heard for the others to be called lost"
            )
        elif self._is_over or node_silence.hears_enough(silent_s, self._seen_s):
            for number in reset:
                self._nodes[number].reset = ""
            for number, why in reset.items():
                self._removed_at.append(self._loop.time())
                self._remove(number, why)
        else:  # until enough are heard again, or the job ends
            self._loop.after(self._deadlines.beat_s, self._judge_resets)

    @property
    def _seen_s(self) -> float:
        return SEEN_BEATS * self._deadlines.beat_s

    def _silent_s(self) -> dict[int, float]:
        """Return the silence of each node that counts.

        This node does not if the link to its agent was reset: nothing is between them, so that
        agent has ended.
        """
        now = self._loop.time()
        return {
            number: now - node.heard_at
            for number, node in self._nodes.items()
            if not (node.is_unused or (number == node_silence.OWN and node.reset))
        }

    def _spare_s(self) -> dict[int, float]:
        """Return the silence of each node that came after the start and has had no rank."""
        now = self._loop.time()
        return {number: now - node.heard_at for number, node in self._nodes.items() if node.is_unused}

    def _look(self) -> None:
        self._loop.after(self._deadlines.beat_s / _LOOKS_A_BEAT, self._look)
        silent_s, spare_s, seen_s = self._silent_s(), self._spare_s(), self._seen_s
        all_s = silent_s | spare_s
        if self._is_over:
            for number, seconds in all_s.items():
                self._nodes[number].is_silent |= seconds >= self._limit_s + self._deadlines.traces_s
            return
        for number, seconds in all_s.items():
            if seconds >= seen_s and not self._nodes[number].is_silent:
                self._nodes[number].is_silent = True
                self._tell(number, "began", seconds)
                self._changed()
        for number in node_silence.to_remove(silent_s, spare_s, seen_s=seen_s, limit_s=self._patience_s):
            self._remove(number, f"nothing was heard of it for {all_s[number]:.1f} s")
        if node_silence.is_cut_off(silent_s, seen_s=seen_s, limit_s=self._patience_s):
            num_heard = sum(seconds < seen_s for seconds in silent_s.values())
            are = verb(num_heard, "is", "are")
            self._cut_off(f"{num_heard} of {len(silent_s)} nodes {are} heard, too few for the others to be called lost")

    def _tell(self, number: int, phase: Literal["began", "over"], seconds: float) -> None:
        name = self._nodes[number].name
        self._record(trace.NodeSilent(node=number, name=name, phase=phase, seconds=round(seconds, 3)))
