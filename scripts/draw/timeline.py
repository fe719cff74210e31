"""Timelines of a pipeline: the real schedules, run without communication, on a model of time.

The order of operations comes from `megatron.schedule.pipeline` and `megatron.schedule.interleaved`.
Their code runs here for every stage with a real `WorkQueue`. In the model of time a forward on a
stage takes 1 unit and a backward takes 2 units. With several chunks an operation on one chunk takes
its share. Messages take no time. So all waiting in a timeline is the schedule's own: its bubbles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import Compute, Pipeline, Work
from megatron_recover.megatron.schedule.interleaved import InterleavedStage
from megatron_recover.megatron.schedule.pipeline import Stage
from megatron_recover.trainer.work_queue import Task, WorkQueue

FORWARD, BACKWARD = 1.0, 2.0
"""Units of time that a forward and a backward of one microbatch take on a whole stage."""


class Action(NamedTuple):
    """A forward or a backward of one microbatch on one chunk of a stage."""

    stage: int
    chunk: int
    microbatch: int
    is_backward: bool

    def needs(self, pipe: Pipeline) -> Action | None:
        """Return the action, on any stage, that must end first; None for a microbatch's first."""
        ahead = -1 if not self.is_backward else 1
        stage, chunk = self.stage + ahead, self.chunk
        if not 0 <= stage < pipe.num_stages:
            stage, chunk = stage % pipe.num_stages, chunk + ahead
        if 0 <= chunk < pipe.num_chunks:
            return self._replace(stage=stage, chunk=chunk)
        return self._replace(is_backward=False) if self.is_backward else None

    def seconds(self, pipe: Pipeline) -> float:
        """Return the duration of this action in units of time."""
        return (BACKWARD if self.is_backward else FORWARD) / pipe.num_chunks


class Timeline(NamedTuple):
    """The start of every action of every stage, in units of time."""

    pipe: Pipeline
    starts: Mapping[Action, float]
    asked: float
    """Time at which the first stage asked for the end of the (first) pass. Work known by then still
    joins the pass."""
    in_schedule: bool = False
    """True if microbatches that were dealt late joined the pass."""

    @property
    def end(self) -> float:
        """Return the time at which the last action ends."""
        return max(start + operation.seconds(self.pipe) for operation, start in self.starts.items())


def undisturbed(pipe: Pipeline, num: int) -> Timeline:
    """Return the timeline of a pass over `num` microbatches, all known when the pass begins."""
    operations, asked = _sequences(pipe, num)
    starts = _timed(pipe, operations)
    return Timeline(pipe, starts, starts[asked])


def disturbed(pipe: Pipeline, num: int, num_late: int, arrival: float) -> Timeline:
    """Return a timeline in which `num_late` further microbatches are dealt at the time `arrival`.

    They join the current pass if its end was not asked for before `arrival`, else they get a pass
    of their own.
    """
    alone = undisturbed(pipe, num)
    if arrival <= alone.asked:
        operations, asked = _sequences(pipe, num, num_late)
        starts = _timed(pipe, operations)
        return Timeline(pipe, starts, starts[asked], in_schedule=True)
    first, _ = _sequences(pipe, num)
    second, _ = _sequences(pipe, num_late)
    later = [[each._replace(microbatch=each.microbatch + num) for each in operations] for operations in second]
    earliest = {each: arrival for operations in later for each in operations}
    both = [[*one, *other] for one, other in zip(first, later, strict=True)]
    return Timeline(pipe, _timed(pipe, both, earliest), alone.asked)


def reopened(pipe: Pipeline, num: int, num_late: int, arrival: float) -> Timeline:
    """Return the timeline of the best possible re-opening of a pass.

    It is not built; docs/design/schedule.md has the comparison. Every stage runs the actions that
    are ready, backwards first, with at most as many microbatches in flight as 1F1B. The model
    assumes that all stages learn of the late microbatches at once, without any agreement. Only for
    pipelines without virtual stages.
    """
    alone = undisturbed(pipe, num)
    stages = range(pipe.num_stages)
    own = [[operation for operation in alone.starts if operation.stage == stage] for stage in stages]
    late = [
        [Action(stage, 0, num + each, is_backward) for is_backward in (True, False) for each in range(num_late)]
        for stage in stages
    ]
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    free, in_flight, time = [0.0] * pipe.num_stages, [0] * pipe.num_stages, 0.0
    while any(own) or any(late):
        for stage in stages:
            choices = own[stage][:1]
            if time >= arrival:
                choices += [each for each in late[stage] if each.is_backward or in_flight[stage] < pipe.num_stages - stage]
            ready = [each for each in choices if (need := each.needs(pipe)) is None or ends.get(need, math.inf) <= time]
            if ready and free[stage] <= time:
                chosen = min(ready, key=lambda each: (not each.is_backward, each.microbatch))
                (late if chosen in late[stage] else own)[stage].remove(chosen)
                in_flight[stage] += -1 if chosen.is_backward else 1
                starts[chosen], free[stage] = time, time + chosen.seconds(pipe)
                ends[chosen] = free[stage]
        time = min((instant for instant in (*free, arrival) if instant > time), default=time)
    return Timeline(pipe, starts, alone.asked, in_schedule=True)


# --- The real schedules, without communication ----------------------------------------------------


class _Member:
    """Stands for a rank's driver whose leader deals `late` before the end of the pass, if any."""

    def __init__(self, operations: list[Action], late: Plan | None) -> None:
        self._operations, self._orders = operations, [late] if late is not None else []
        self.asked = 0
        """Number of operations that had begun when the pass was asked to close."""

    def has_order(self) -> bool:
        return bool(self._orders)

    def more_work(self) -> Plan | None:
        return self._orders.pop() if self._orders else None

    def ask_close(self) -> None:
        self.asked = len(self._operations)


class _Upstream:
    """Stands for `pipeline.MegatronPass` and only records the operations that a schedule calls."""

    forward_only = False

    def __init__(self, pipe: Pipeline, stage: int, operations: list[Action]) -> None:
        self._stage, self._operations, self.num_chunks = stage, operations, pipe.num_chunks
        self.config = SimpleNamespace(
            num_microbatches_with_partial_activation_checkpoints=None, deallocate_pipeline_outputs=False,
            microbatch_group_size_per_vp_stage=pipe.num_stages,
        )  # fmt: skip
        self.link = _Link(pipe.num_stages, stage)

    def forward(self, task: Task, received: Any, index: int, chunk: int, **_: Any) -> str:
        self._operations.append(Action(self._stage, chunk, index, False))
        return "output"

    def backward(self, task: Task, received: Any, output: Any, gradient: Any, chunk: int, **_: Any) -> str:
        self._operations.append(Action(self._stage, chunk, task.microbatch, True))
        return "gradient"

    def release(self, output: Any) -> None: ...
    def shape(self) -> list[int]:
        return [1, 1, 1]

    def shapes(self) -> tuple[list[Any], list[Any]]:
        return [(1, 1, 1)], [(1, 1, 1)]


class _Link:
    """Stands for a `P2PCommunicator` and sends nothing."""

    def __init__(self, num_stages: int, stage: int) -> None:
        self.total_stages, self.current_stage = num_stages, stage
        self.is_pp_first_stage, self.is_pp_last_stage = stage == 0, stage == num_stages - 1

    def __getattr__(self, name: str) -> Any:
        return lambda *_, overlap_p2p_comm=False, **__: (None, {}) if overlap_p2p_comm else None


def _sequences(pipe: Pipeline, num: int, num_late: int = 0) -> tuple[list[list[Action]], Action]:
    """Return the operations of every stage in order, and one operation of the first stage.

    The first stage asks for the end of the pass right before that operation.
    """
    found: list[list[Action]] = []
    asked = 0
    for stage in range(pipe.num_stages):
        operations: list[Action] = []
        member = _Member(operations, _plan(2, range(num, num + num_late)) if num_late else None)
        upstream: Any = _Upstream(pipe, stage, operations)
        queue = WorkQueue(member, _plan(1, range(num)))
        (Stage if pipe.num_chunks == 1 else InterleavedStage)(upstream, queue).run()
        found.append(operations)
        asked = member.asked if not stage else asked
    return found, found[0][asked]


def _plan(generation: int, microbatches: Iterable[int]) -> Plan:
    return Plan(0, generation, (0,), Work("train 1", 0, (0,)), (0,), (), (Compute(tuple(microbatches), (0,)),), (0,))


def _timed(
    pipe: Pipeline, sequences: Sequence[Sequence[Action]], earliest: Mapping[Action, float] | None = None
) -> dict[Action, float]:
    """Return the start of each operation.

    An operation starts after the operation before it on its stage, after the operation that it
    needs, and not before its time in `earliest`. Raises RuntimeError if the operations block each
    other.
    """
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    left = [list(reversed(operations)) for operations in sequences]
    free = [0.0] * pipe.num_stages
    while any(left):
        begun = 0
        for stage, operations in enumerate(left):
            while operations and ((need := operations[-1].needs(pipe)) is None or need in ends):
                operation = operations.pop()
                starts[operation] = max(free[stage], ends[need] if need else 0.0, (earliest or {}).get(operation, 0.0))
                free[stage] = ends[operation] = starts[operation] + operation.seconds(pipe)
                begun += 1
        if not begun:
            raise RuntimeError(f"the schedule stands still: {[operations[-1:] for operations in left]}")
    return starts
