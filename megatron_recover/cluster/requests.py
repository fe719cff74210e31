"""The state of a job for its readers, and the requests that they leave: the launcher's side.

The coordinator sends the state to node 0, whose recorder writes it (`cluster/status.py`) and finds
the requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_recover.cluster import status
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.recording import Recording
from megatron_recover.control_plane.node_messages import DrainAnswer, DrainAsked, JobState

_ANSWERS = 16
"""Number of answers to requests that are kept for who asked."""


class Requests:
    """Keeps the state of a job on node 0, and has requests carried out."""

    def __init__(self, job: Job, recording: Recording, send: Callable[[DrainAsked], None]) -> None:
        """`send(message)` sends to the coordinator."""
        self._job, self._recording, self._send = job, recording, send
        self._answers: tuple[status.Answer, ...] = ()
        """Answers to the newest requests."""
        self._state: JobState | None = None
        """Newest state of the job that the coordinator has sent."""

    def answered(self, answer: DrainAnswer) -> None:
        """Keep the coordinator's answer to a request."""
        refused = "; ".join(f"replica {replica} does not leave: {why}" for replica, why in answer.refused)
        self._answer(answer.id, refused)

    def keep(self, state: JobState | None, exit_code: int | None = None, reason: str = "") -> None:
        """Have the state of the job written, on node 0. None: the newest one."""
        self._state = state = state or self._state
        if state is None or self._job.node:
            return
        account = self._recording.account
        self._recording.keep(
            status.Status(
                at=time.time(), replicas=self._job.num_replicas, roster=state.roster, generation=state.generation,
                step=state.step, losses=len(account.lost), saved=account.saved, knows_saved=account.is_complete,
                exit_code=exit_code, reason=reason,
                answers=self._answers,
                nodes=tuple(status.NodeStatus(each.number, each.name, each.state, each.replicas) for each in state.nodes),
            ),
        )  # fmt: skip

    def carry_out(self) -> None:
        """Give the coordinator the requests that were left in the run directory of node 0."""
        for request in self._recording.requests():
            named = tuple(replica for replica in range(self._job.num_replicas) if str(replica) == request.drain)
            state = self._state
            replicas = named or (status.members_on(request.drain, state.nodes, state.roster) if state is not None else ())
            if replicas:
                self._send(DrainAsked(replicas, f"drain {request.drain} of {request.by}", request.id))
            else:
                self._answer(request.id, f"the job has no replica and no node {request.drain}")

    def _answer(self, request: str, refused: str) -> None:
        self._answers = (*self._answers, status.Answer(request, refused))[-_ANSWERS:]
        self.keep(None)
