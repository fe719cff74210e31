"""Policies of a job at a loss, and their costs: ours, and the usual alternatives.

`recover` and its variants run the machines (`sim/timed/recover.py`). `recover` loses replicas for
good. `recover-in-place` forms them anew in healthy slots, and `recover-spares` has spare nodes too.
The others are baselines, computed in closed
form, step by step, over the same models, with losses drawn from the same seed at the same rates.
They pay nothing for votes, plans or membership: a baseline is simplified in its favour.

checkpoint-restart
    A blocking save every n steps, n by Daly's formula (Daly 2006; Young 1974 is its first term).
    A loss ends the job. `restart_s` after its detection the survivors continue from the last save,
    with quotas as even as integers allow. Megatron cannot do that.
    With `[repair]` each restart takes in all nodes that are healthy by then, spare ones included.
checkpoint-restart-equal
    The same with equal quotas only, which Megatron needs.
shrink
    Collectives survive, but the lost microbatches are left out. Every survivor continues with its
    own quota, so the batch shrinks (ReCoVer's ablation AdaptiveWorldPolicy).
drop-step
    All replicas drop the step of a loss, and the batch shrinks from then on (torchft without
    spares: `should_commit`).

If M is not a multiple of the replicas at the start, the last two leave the remainder out from the
first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron_recover.sim.timed.models import Losses, PolicyName, Scenario, Timing
from megatron_recover.sim.timed.outcome import Meter, Outcome
from megatron_recover.sim.timed.places import Restarts
from megatron_recover.sim.timed.recover import recover


def _begin_step(meter: Meter, losses: Losses, scenario: Scenario, seconds: float) -> float | None:
    """Begin a step of `seconds`; return the seconds until a loss strikes, None without a loss."""
    members = meter.outcome.replicas_end
    part = losses.in_step(members)
    if part is None:
        return losses.within(seconds, members)
    if scenario.failures.at == "anywhere":
        return part * seconds
    return seconds - scenario.compute.optimizer_s - part * meter.timing.reduction_s(members)


def checkpoint_restart(scenario: Scenario) -> Outcome:
    """Return the outcome of saves at Daly's interval, with quotas as even as integers allow."""
    return _checkpoint_restart(scenario, _interval(scenario), "checkpoint-restart")


def checkpoint_restart_equal(scenario: Scenario) -> Outcome:
    """Return the outcome of saves at Daly's interval with equal quotas, as Megatron has them.

    The largest number of living replicas that divides M computes. The others are idle.
    """
    return _checkpoint_restart(scenario, _interval(scenario), "checkpoint-restart-equal")


def best_checkpoint_restart(scenario: Scenario) -> Outcome:
    """Return the outcome of `checkpoint_restart` at the interval that is best for these losses.

    Nobody can know it before. The intervals tried are 1 to four times Young's, at most 1000 steps.
    """
    young, _ = young_daly(scenario)
    tried = [_checkpoint_restart(scenario, n, "checkpoint-restart") for n in range(1, min(4 * math.ceil(young), 1000) + 1)]
    return max(tried, key=lambda outcome: outcome.microbatches_per_gpu_hour)


def _interval(scenario: Scenario) -> int:
    return max(1, round(young_daly(scenario)[1]))


def young_daly(scenario: Scenario) -> tuple[float, float]:
    """Return the interval between saves in steps, by Young's formula and by Daly's, at full size.

    Daly's formula has higher-order terms. Without losses both are the steps of the job; if a save
    takes no time, both are 1.
    """
    assert scenario.checkpoint is not None
    job, save_s = scenario.job, scenario.checkpoint.save_s
    step_s = Timing.of(scenario).ideal_step_s(job.replicas, job.microbatches)
    every, hazard = scenario.failures.every_steps, Losses(scenario).hazard(job.replicas)
    between_s = every * step_s if every is not None else 1 / hazard if hazard else math.inf
    if math.isinf(between_s) or not save_s:
        length = float(job.steps) if save_s else 1.0
        return length, length
    young_s = math.sqrt(2 * save_s * between_s)
    ratio = save_s / (2 * between_s)
    daly_s = young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s if ratio < 1 else between_s
    return young_s / step_s, daly_s / step_s


def _checkpoint_restart(scenario: Scenario, interval: int, policy: PolicyName) -> Outcome:
    assert scenario.checkpoint is not None
    job, table = scenario.job, scenario.checkpoint
    meter, losses = Meter(policy, scenario), Losses(scenario)
    outcome = meter.outcome
    restarts = Restarts(scenario) if scenario.repair is not None else None
    outcome.interval_steps, outcome.young_daly_steps = interval, young_daly(scenario)
    saved = meter.done
    while outcome.steps < job.steps:
        workers = outcome.replicas_end
        if policy == "checkpoint-restart-equal":
            workers = next(count for count in range(workers, 0, -1) if job.microbatches % count == 0)
        seconds = meter.ideal_s(workers, job.microbatches)
        at = _begin_step(meter, losses, scenario, seconds)
        if at is None:
            meter.spend(seconds)
            meter.commit(outcome.replicas_end, job.microbatches)
            if outcome.steps % interval or outcome.steps == job.steps:
                continue
            at = losses.within(table.save_s, outcome.replicas_end)
            if at is None:
                meter.spend(table.save_s)
                saved = meter.done
                continue
        while at is not None:
            meter.spend(at)
            meter.lose()
            if restarts is not None:
                restarts.lost(outcome.seconds)
            meter.spend(scenario.failures.detect_s)
            at = losses.within(table.restart_s, outcome.replicas_end)
        meter.spend(table.restart_s)
        if restarts is not None:
            outcome.replicas_end = restarts.restarted(outcome.seconds)
        meter.done = saved
    return outcome


def shrink(scenario: Scenario) -> Outcome:
    """Return the outcome where survivors finish the step without the lost share.

    They continue with a smaller batch. Each replica has M // replicas microbatches from the start.
    """
    return _smaller(scenario, "shrink", keep_step=True)


def drop_step(scenario: Scenario) -> Outcome:
    """Return the outcome where all drop the step of a loss, and continue with a smaller batch.

    Each replica has M // replicas microbatches from the start.
    """
    return _smaller(scenario, "drop-step", keep_step=False)


def _smaller(scenario: Scenario, policy: PolicyName, *, keep_step: bool) -> Outcome:
    assert scenario.drop is not None
    job, failures = scenario.job, scenario.failures
    meter, losses = Meter(policy, scenario), Losses(scenario)
    outcome, quota = meter.outcome, job.microbatches // job.replicas
    while outcome.steps < job.steps:
        seconds = meter.ideal_s(outcome.replicas_end, quota * outcome.replicas_end)
        at = _begin_step(meter, losses, scenario, seconds)
        if at is None:
            meter.spend(seconds)
            meter.commit(outcome.replicas_end, quota * outcome.replicas_end)
            continue
        meter.spend(at)
        meter.lose()
        meter.spend(failures.detect_s + scenario.drop.regroup_s)
        if keep_step:  # sums that ran at the loss are repeated, without the lost share
            meter.spend(max(seconds - at, meter.timing.reduction_s(outcome.replicas_end)))
            meter.commit(outcome.replicas_end, quota * outcome.replicas_end)
    return outcome


_BASELINES: Mapping[PolicyName, Callable[[Scenario], Outcome]] = MappingProxyType({
    "shrink": shrink, "drop-step": drop_step,
    "checkpoint-restart": checkpoint_restart, "checkpoint-restart-equal": checkpoint_restart_equal,
})  # fmt: skip


def simulate(scenario: Scenario, on_step: Callable[[int], None] | None = None) -> dict[PolicyName, Outcome]:
    """Return the outcomes of all policies of a scenario.

    `on_step`: as of `RecoverJob`, for `recover` and its variants only, which take nearly all of the
    time.

    Raise ValueError in these cases:

    - The simulated job of `recover` or a variant is too slow for its own timeouts.
    - A fault of the scenario takes the last replica.
    - Faults never struck although the job ended; the error has one line for each.

    Raise RuntimeError as `run_recover` does.
    """
    return {
        policy: _BASELINES[policy](scenario) if policy in _BASELINES else recover(scenario, on_step, policy)
        for policy in scenario.policies
    }
