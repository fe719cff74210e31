"""The state of a job for its readers, and the requests that they leave: the launcher's side.

The coordinator sends the state to node 0, whose recorder writes it (`cluster/status.py`) and finds
the requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import msgspec

from megatron_recover.cluster import status
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.recording import Recording
from megatron_recover.control_plane.node_messages import DrainAnswer, DrainAsked, JobState, ScaleAnswer, ScaleAsked

_LONGEST_NAME = 100
"""Characters of a target, and of who asks, that an answer or a reason repeats."""
_LONGEST_ANSWER = 1000
"""Characters of an answer."""
_REST = " ..."
"""Text for the rest of an answer that is longer."""


class Requests:
    """Keeps the state of a job on node 0, and has requests carried out."""

    def __init__(
        self, job: Job, recording: Recording, send: Callable[[DrainAsked | ScaleAsked], None], why_lost: Callable[[], str]
    ) -> None:
        """`send(message)` sends to the coordinator; `why_lost()` returns why it is lost, or ""."""
        self._job, self._recording, self._send, self._why_lost = job, recording, send, why_lost
        self._answers: tuple[status.Answer, ...] = ()
        """Answers to the newest requests."""
        self._known: dict[str, status.Answer | None] = {}
        """Request -> its answer; None while there is none. A new recorder passes requests again,
        and none is carried out twice."""
        self._early: list[status.Request] = []
        """Requests that came before the first state of the job."""
        self._state: JobState | None = None
        """Newest state of the job that the coordinator has sent."""

    def answered(self, answer: DrainAnswer | ScaleAnswer) -> None:
        """Keep the coordinator's answer to a request."""
        if isinstance(answer, ScaleAnswer):
            self._answer(status.Answer(answer.id, answer.refused, answer.text, answer.leaving))
            return
        refused = answer.why or "; ".join(f"replica {replica} does not leave: {why}" for replica, why in answer.refused)
        self._answer(status.Answer(answer.id, refused, answer.text, answer.leaving))

    def keep(self, state: JobState | None, exit_code: int | None = None, reason: str = "") -> None:
        """Have the state of the job written, on node 0. None: the newest one."""
        self._state = state = state or self._state
        if state is None or self._job.node:
            return
        account = self._recording.account
        self._recording.keep(
            status.Status(
                at=time.time(), replicas=self._job.num_replicas, roster=state.roster, generation=state.generation,
                step=state.step, losses=len(account.lost_members), lost=tuple(sorted(account.lost_members)),
                saved=account.saved, knows_saved=account.is_complete,
                exit_code=exit_code, reason=reason,
                answers=self._answers, wanted=state.wanted,
                nodes=tuple(status.NodeStatus(each.number, each.name, each.state, each.replicas) for each in state.nodes),
            ),
        )  # fmt: skip

    def hosts(self) -> dict[int, str]:
        """Return number and name of the nodes with ranks of replicas that live, by newest state."""
        if self._state is None:
            return {node.number: node.name for node in self._job.nodes}
        roster, nodes = frozenset(self._state.roster), self._state.nodes
        return {node.number: node.name for node in nodes if node.state != "lost" and roster.intersection(node.replicas)}

    def carry_out(self) -> None:
        """Give the coordinator the requests that were left in the run directory of node 0."""
        self._early += self._recording.requests()
        if self._state is None:
            return
        found, self._early = self._early, []
        if why := self._why_lost():
            self._refuse_all(found, f"{why}: nobody can change the job any more; it ends at the next save point")
            return
        for request in found:
            if request.id in self._known:
                self._repeat(request.id)
            else:
                self._known[request.id] = None
                self._give(request, self._state)

    def _refuse_all(self, found: Collection[status.Request], why: str) -> None:
        """Refuse requests without an answer; repeat the answers to the others of `found`."""
        for request in found:
            self._repeat(request.id)
        unanswered = [key for key, answer in self._known.items() if answer is None]
        for key in dict.fromkeys((*unanswered, *(each.id for each in found if each.id not in self._known))):
            self._answer(status.Answer(key, why))

    def _give(self, request: status.Request, state: JobState) -> None:
        target, by = request.drain[:_LONGEST_NAME], request.by[:_LONGEST_NAME]
        if request.replicas is not None:
            self._send(ScaleAsked(request.replicas, f"scale to {request.replicas} of {by}", request.id))
            return
        node = request.drain if status.is_node(request.drain, self._job.num_replicas, state.nodes, state.roster) else ""
        replicas = status.targets(request.drain, self._job.num_replicas, state.nodes, state.roster) if not node else ()
        if node or replicas:
            self._send(DrainAsked(replicas, f"drain {target} of {by}", request.id, node))
        else:
            self._answer(status.Answer(request.id, f"the job has no replica {target} and no node of that name"))

    def _repeat(self, request: str) -> None:
        """Give the answer to a request again, if newer answers have displaced it."""
        known = self._known.get(request)
        if known is not None and all(answer.id != request for answer in self._answers):
            self._answer(known)

    def _answer(self, answer: status.Answer) -> None:
        answer = msgspec.structs.replace(answer, refused=_cut(answer.refused), text=_cut(answer.text))
        self._known[answer.id] = answer
        self._answers = (*self._answers, answer)[-status.ANSWERS :]
        self.keep(None)


def _cut(text: str) -> str:
    """Return a text that is not longer than an answer may be."""
    return text if len(text) <= _LONGEST_ANSWER + len(_REST) else f"{text[:_LONGEST_ANSWER]}{_REST}"
