"""The events of nodes: which take part, which come later, fall silent, and are lost."""

from __future__ import annotations

from typing import Literal

from megatron_recover.trace.event import Event, Part


class NodePlace(Part, frozen=True, kw_only=True):
    """One node of the job."""

    number: int
    name: str
    slots: int


class NodesMet(Event, frozen=True, kw_only=True):
    """Coordinator: the nodes of the job are complete. Recorded for several nodes only."""

    nodes: tuple[NodePlace, ...]


class NodeJoined(Event, frozen=True, kw_only=True):
    """Coordinator: a node that came after the start is ready. All of its slots are spares."""

    node: int
    name: str
    slots: int


class NodeSilent(Event, frozen=True, kw_only=True):
    """Coordinator: nothing is heard of a node's agent, or it is heard again."""

    node: int
    name: str
    phase: Literal["began", "over"]
    seconds: float
    """Duration of the silence until now."""


class CoordinatorLeft(Event, frozen=True, kw_only=True):
    """Coordinator: it gives up. The job goes on to its next save point without one."""

    reason: str


class NodeLost(Event, frozen=True, kw_only=True):
    """Coordinator: a node is removed with all replicas that have ranks on it.

    Without replicas it has never had a rank, and no event of it is missing.
    """

    node: int
    name: str
    replicas: tuple[int, ...]
    detail: str
