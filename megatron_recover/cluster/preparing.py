"""The way of one node to its first rank: imports, the dry run, and the readiness of all nodes.

If any of it fails, takes too long or is interrupted, the run ends. Everything runs in the
launcher's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_recover.cluster import dry_run
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.membership import Membership
from megatron_recover.cluster.node import Node
from megatron_recover.cluster.recording import Recording
from megatron_recover.cluster.run_end import RunEnd
from megatron_recover.cluster.starting import Starting
from megatron_recover.config import FOR_CONSOLE
from megatron_recover.control_plane.loop import Loop
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.wording import counted
from megatron_recover.deadlines import Deadlines


class Preparation:
    """Decides whether the ranks of a node may be started."""

    def __init__(
        self, job: Job, node: Node, starting: Starting, recording: Recording, *, loop: Loop, deadlines: Deadlines, end: RunEnd,
        membership: Membership, turn: Callable[[], None],
    ) -> None:  # fmt: skip
        """Prepare the start of ranks by `starting`.

        `turn()` waits for messages for a moment, and does what the launcher always does.
        """
        self._job, self._node, self._starting, self._recording = job, node, starting, recording
        self._loop, self._deadline_s, self._news_s = loop, deadlines.deadline_s, deadlines.fork_s
        self._end, self._membership, self._turn = end, membership, turn

    def may_launch(self) -> bool:
        """Return whether the ranks of all nodes may be started, once that is known.

        Otherwise the run ends. Raises `NodeLost` if an import fails.
        """
        return self._have_imported() and self._accepts_arguments() and self._is_allowed()

    def _have_imported(self) -> bool:
        """Return whether the modules are imported."""
        job = self._job
        modules = ", ".join(name for name in job.preload if ":" not in name) or "nothing"
        how = "once for" if job.rank_start == "fork" else "in each of"
        who = counted(job.num_slots_here, "spare slot") if job.is_late else counted(job.num_ranks_here, "rank")
        self._recording.says(f"importing {modules} {how} {who}")
        begun = said_at = self._loop.time()
        said = ""

        def are_imported() -> bool:
            nonlocal said_at, said
            if self._node.is_ready():
                return True
            if self._loop.time() - said_at >= self._news_s and (text := self._node.importing()) != said:
                self._recording.says(
                    f"still importing after {self._loop.time() - begun:.0f} s, of {self._deadline_s:.0f} s at most: {text}"
                )
                said_at, said = self._loop.time(), text
            return False

        def late() -> str:
            return f"importing took more than {self._deadline_s:.0f} s: {self._node.importing()}"

        if not self._until(are_imported, late):
            return False
        self._loop.watch_readable(self._node.fileno(), lambda: None)
        return True

    def _accepts_arguments(self) -> bool:
        """Return whether the script accepts its arguments, and show its lines for the console.

        One process runs the script with its own parser and Megatron's, and ends before it trains.
        """
        script = self._job.script
        output = self._starting.dry_run()
        late = f"in {self._deadline_s:.0f} s {script} never {dry_run.CALLS_PRETRAIN}; see {output.log}"
        ends = self._until(self._node.poll, lambda: late)
        if not ends:
            return False
        [end] = ends
        if failure := dry_run.failure(script, end, output):
            self._end.fail(*failure)
            return False
        for line in output.end().splitlines():
            if line.startswith(FOR_CONSOLE):
                self._recording.says(line.removeprefix(FOR_CONSOLE))
        return True

    def _is_allowed(self) -> bool:
        """Report this node ready; return whether all nodes are. A late node waits for no other."""
        self._membership.send(self._starting.listen())
        whose = "the coordinator did not answer" if self._job.is_late else "not all nodes were ready"
        late = f"{whose} {self._deadline_s:.0f} s after this one"
        return self._until(lambda: self._starting.is_allowed, lambda: late) is not None

    def _until[Answer](self, answer: Callable[[], Answer], late: Callable[[], str]) -> Answer | None:
        """Return the first truthy result of `answer`.

        Return None if a signal, the deadline or the end of the job is first, or the coordinator of
        several nodes is silent for too long. Then the run ends. `late()` is the reason if the
        deadline has passed.
        """
        self._membership.listen_anew()
        deadline = self._loop.time() + self._deadline_s
        while not self._end.is_requested:
            if self._end.has_come:
                return None
            if found := answer():
                return found
            if self._loop.time() > deadline:
                self._membership.note_silence()
                self._end.fail(ExitCode.FAILED, late())
                return None
            self._turn()
            if self._job.nodes and (silence := self._membership.silence):
                self._membership.note_silence()
                self._end.fail(ExitCode.FAILED, silence)
        self._membership.note_silence()
        here = f"{self._job.nodes[self._job.node].name}: " if self._job.nodes else ""
        self._end.begin(
            ExitCode.INTERRUPTED, f"{here}{self._end.signal_name} before training began"
        )  # as the coordinator words it
        return None
