"""The exit code of a run, which names how the run has ended."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """The ends of a run (docs/reference/exit_codes.md)."""

    OK = 0
    FAILED = 1
    """The run failed for a reason that no other code names. Examples: a defect, an exception on
    every replica, replicas that do not start alike, no committed step and nobody proven at
    fault."""
    BAD_INPUT = 2
    UNFINISHED = 3
    """`check` only: all that was judged holds, but the trace has no end or lacks events."""
    TOO_FEW_REPLICAS = 10
    """Fewer than `--recover-min-replicas` are left, and a survivor saves if `--save` is set. Or
    fewer have started, and nothing was trained."""
    POISONED_MICROBATCH = 11
    """Computing one microbatch has ended two replicas. The message names the microbatch."""
    DIVERGED = 12
    """Replicas disagree on results, and no majority decides."""
    NO_REPLICA_LEFT = 13
    INVARIANT_VIOLATED = 14
    """The checker or a rank found a broken invariant, or a step was miscounted twice."""
    INTERRUPTED = 15
    """A signal or time limit ended all replicas at a common step, which is saved with `--save`, or
    a signal ended the run before training began."""
    UNSAVED = 16
    """Training ended, but its last checkpoint could not be written."""

    @classmethod
    def words(cls, code: int) -> str:
        """Return a name for the exit code of a run; codes that are not listed are of signals."""
        return cls(code).name.lower().replace("_", " ") if code in list(cls) else "killed"


GOES_ON_ELSEWHERE = "the job goes on without this node"
"""End of the reason with which a node without replicas leaves a job (`INTERRUPTED`)."""
