"""The machine of membership: who is in the job. The only place where generations are made.

`step(state, input) -> (state, effects)`. It knows no address, clock or process: the driver maps replica ids to links, arms
timers and kills. What a loss leads to is `core/policy.py`.

Caller's contract
-----------------
* One coordinator, one state, inputs in any order; effects carried out in order before the next input.
* A link to a leader that breaks is no input by itself (the agent reports the end of the process as `Lost`); if the agent
  itself is gone, the driver feeds `Lost(SUSPECTED)` for its replicas.
* `Announce`: send `NewGeneration` to all leaders of its roster (with the addresses of all, which core does not know).
* `Fence`: kill all ranks of the replica, for certain; never wait for it.
* `Arm(timer, seconds)`: feed `Expired(timer)` once after the setting named `seconds`; timers are never disarmed (stale ones
  are dropped by name).
* `EndJob`: send `Stop(exit_code, reason)` to all leaders, end the run with that code. Nothing follows it.
"""

from __future__ import annotations

from megatron_recover.core.values import (
    Failing,
    Finished,
    Generation,
    Hello,
    Loss,
    NewGeneration,
    ReplicaId,
    ToCoordinator,
    Value,
)


class Policy(Value, frozen=True):
    """Settings of membership."""

    num_replicas: int
    min_replicas: int = 1
    max_fruitless: int = 3
    """Generations in a row without a loss and without a committed step, after which the most suspected replica is fenced."""


class CoordinatorState(Value, frozen=True):
    """What the coordinator knows. Start with `CoordinatorState(policy)`."""

    policy: Policy
    generation: Generation = 0
    roster: tuple[ReplicaId, ...] = ()
    hellos: tuple[Hello, ...] = ()
    losses: tuple[Loss, ...] = ()
    """All losses of the run."""
    entered: tuple[ReplicaId, ...] = ()
    """Members that entered the current generation."""
    reason: str = ""
    """Why a newer generation is due (a grace runs), or empty."""
    suspects: tuple[ReplicaId, ...] = ()
    """Who was suspected, once per suspicion, since a step was committed."""
    fruitless: int = 0
    """Generations in a row without a loss or a committed step."""
    step: int = 0
    """Highest uncommitted step reported."""
    requests: tuple[str, ...] = ()
    failing: tuple[Failing, ...] = ()
    """Computations that raised, one per replica and microbatch."""
    finished: tuple[Finished, ...] = ()
    over: bool = False


# --- Inputs: ToCoordinator messages of leaders, and: -------------------------------------------------------------------


class Lost(Value, frozen=True):
    """A replica is gone or must be treated as gone."""

    loss: Loss


class Expired(Value, frozen=True):
    """A timer armed with `Arm` ran out."""

    timer: str


class ExitAsked(Value, frozen=True):
    """The whole job is asked to end at a common step with a checkpoint (signal to the launcher, time limit)."""

    reason: str


Input = ToCoordinator | Lost | Expired | ExitAsked


# --- Effects -------------------------------------------------------------------------------------------------------------


class Announce(Value, frozen=True):
    """Tell every member of the roster."""

    generation: NewGeneration


class Fence(Value, frozen=True):
    """Kill what is left of a replica."""

    replica: ReplicaId


class Arm(Value, frozen=True):
    """Start a timer. `seconds` names the setting: `follow_timeout_s` or `grace_s`."""

    timer: str
    seconds: str


class EndJob(Value, frozen=True):
    """The run is over."""

    exit_code: int
    reason: str


Effect = Announce | Fence | Arm | EndJob
