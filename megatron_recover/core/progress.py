"""The progress of a rank: what its progress page says that it does, and the kinds of that."""

from __future__ import annotations

import enum

from megatron_recover.core.values import Generation, MicrobatchId, Value


class Phase(enum.IntEnum):
    """The activity of a rank's training thread, as numbered in the progress page."""

    LOADING = 1
    """Loading script, arguments, process groups, model, optimizer and checkpoint."""
    BUILDING_DATA = 2
    """Building data sets and their index."""
    ORDERS = 3
    """Waiting for an order of the leader: a plan, the votes of all, the end of the job."""
    DATA = 4
    """Reading the samples of a microbatch."""
    FIRST_STEPS = 5
    """A forward or backward of the first steps, in which libraries compile, tune and allocate."""
    COMPILING = 6
    """Compiling inside a forward or backward."""
    FORWARD = 7
    BACKWARD = 8
    EVALUATION = 9
    """A forward of an evaluation step."""
    PIPELINE = 10
    """Between two computations of a pass, in which stages of the replica exchange data."""
    REDUCTION = 11
    """Summing buckets over lanes and replicas, and waiting for the others in it."""
    OPTIMIZER = 12
    """Applying a step, from the order `Apply` to the end of the optimizer."""
    SAVE = 13
    BETWEEN = 14
    """Logging and other code of the script between two steps."""
    DIGEST = 15
    """Computing the digest of all state, between two steps."""


COMPUTES = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.FIRST_STEPS, Phase.EVALUATION})
"""Phases that compute the microbatches of the page."""
WAITS = frozenset({Phase.ORDERS, Phase.PIPELINE, Phase.REDUCTION})
"""Phases whose length other ranks decide."""
LEANS_ON_OTHERS = frozenset({Phase.LOADING, Phase.BUILDING_DATA, Phase.DATA, Phase.SAVE, Phase.BETWEEN})
"""Phases whose length a shared disk or service may decide."""

BOUNDED_BY_NOTHING_SEEN = LEANS_ON_OTHERS | {Phase.COMPILING}
"""Phases in which silence is no evidence before the deadline: compile times differ by graph."""

AFTER_A_STEP = frozenset({Phase.BETWEEN, Phase.DIGEST, Phase.SAVE})
"""Phases that come after all others of the step that the page shows."""

EVERY_STEP = frozenset(
    {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCTION, Phase.OPTIMIZER, Phase.BETWEEN},
)
"""Phases of every training step. One that no look saw took less than a gap. The step's time would
be no bound: the first step of a generation contains the hang that led to the generation."""


class Progress(Value, frozen=True):
    """The content of a progress page."""

    generation: Generation
    step: int
    """Number of the step; -1 before the first."""
    label: str
    """Name of the step, such as ``train 17``."""
    phase: Phase
    microbatches: tuple[MicrobatchId, ...]
    """Microbatches in work: being computed, or enqueued on a device and not known complete."""
    begun: int
    """Operations that the training thread has begun since the process started."""
    ended: int
    """Those of them that have ended."""
    since_ns: int
    """Start of the newest operation, in nanoseconds of CLOCK_MONOTONIC."""
    ahead: MicrobatchId | None = None
    """Microbatch whose samples another thread of the rank reads ahead now; None: none."""
