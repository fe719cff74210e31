"""Results of a simulation, for programs and for people: a JSON object, a table, CSV."""

from __future__ import annotations

import csv
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_recover.sim.timed.healing import Newcomers, spread
from megatron_recover.sim.timed.models import HOUR_S, PolicyName, Scenario
from megatron_recover.sim.timed.outcome import Outcome
from megatron_recover.sim.timed.policies import best_checkpoint_restart

RESULT_FILE = "result.json"
"""Name of the file with the JSON object."""
STEPS_FILE = "throughput.csv"
"""Name of the file with the entries of `Outcome.curve`."""


def summary(scenario: Scenario, outcomes: Mapping[PolicyName, Outcome]) -> dict[str, Any]:
    """Return the JSON object: first the measures of `recover`, then all policies."""
    found: dict[str, Any] = {}
    ours, theirs = outcomes.get("recover"), outcomes.get("checkpoint-restart")
    if ours is not None:
        found["goodput_of_ideal"] = ours.goodput_of_ideal
    if ours is not None and theirs is not None:
        found["speedup_over_checkpoint_restart"] = ours.microbatches_per_gpu_hour / theirs.microbatches_per_gpu_hour
        best = best_checkpoint_restart(scenario)
        found["speedup_over_checkpoint_restart_by_hindsight"] = (
            ours.microbatches_per_gpu_hour / best.microbatches_per_gpu_hour
        )  # fmt: skip
        if scenario.equal_gpu_hours is not None:
            mine, other = (each.microbatches_at(scenario.equal_gpu_hours) for each in (ours, theirs))
            if mine is not None and other is not None:
                found["more_microbatches_at_equal_gpu_hours"] = mine / other - 1
    equal = outcomes.get("checkpoint-restart-equal")
    if ours is not None and equal is not None:
        found["speedup_over_checkpoint_restart_equal"] = ours.microbatches_per_gpu_hour / equal.microbatches_per_gpu_hour
    found["policies"] = {policy: _policy(scenario, outcome) for policy, outcome in outcomes.items()}
    return found


def _policy(scenario: Scenario, outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {
        "steps": outcome.steps, "microbatches": outcome.microbatches, "seconds": outcome.seconds,
        "gpu_hours": outcome.gpu_seconds / HOUR_S, "losses": outcome.losses, "replicas_end": outcome.replicas_end,
        "goodput_of_ideal": outcome.goodput_of_ideal, "microbatches_per_gpu_hour": outcome.microbatches_per_gpu_hour,
    }  # fmt: skip
    if scenario.repair is not None:
        found["ettr"] = outcome.ettr
    if outcome.newcomers is not None:
        found["newcomers"] = _newcomers(outcome.newcomers)
    if scenario.tokens_per_microbatch is not None:
        found["tokens_per_gpu_hour"] = outcome.microbatches_per_gpu_hour * scenario.tokens_per_microbatch
    if scenario.equal_gpu_hours is not None:
        found["microbatches_at_equal_gpu_hours"] = outcome.microbatches_at(scenario.equal_gpu_hours)
    for name in (
        "interval_steps",
        "young_daly_steps",
        "microbatches_redone",
        "in_schedule",
        "kill_to_plan_s",
        "steps_left_out",
    ):
        value = getattr(outcome, name)
        if value is not None:
            found[name] = value
    return found


def _newcomers(account: Newcomers) -> dict[str, Any]:
    entries, to_full = (spread(values) for values in (account.entries_s, account.to_full_s))
    return {
        "begun": account.num_asked, "formed": account.num_formed, "joined": account.num_joined,
        "refused": account.num_refused, "gave_up": account.num_gave_up, "lost": account.num_lost,
        "refusals": account.refusals, "formed_to_joined_s": entries, "loss_to_full_strength_s": to_full,
        "losses_to_full_strength": len(account.to_full_s), "losses_not_made_up": account.num_open,
    }  # fmt: skip


def lines(found: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines of a summary for people: a table of policies, and the comparisons."""
    yield f"{'policy':<26}{'steps':>7}{'losses':>8}{'hours':>9}{'goodput of ideal':>18}{'microbatches per GPU-hour':>27}"
    for policy, each in found["policies"].items():
        yield (
            f"{policy:<26}{each['steps']:>7}{each['losses']:>8}{each['seconds'] / HOUR_S:>9.2f}"
            f"{each['goodput_of_ideal']:>18.4f}{each['microbatches_per_gpu_hour']:>27.1f}"
        )
    yield from _repair_lines(found["policies"])
    for key, value in found.items():
        if key != "policies":
            yield f"{key.replace('_', ' ')}: {value:.4f}"


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table of numbers."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)


def make_folder(parser: ArgumentParser, folder: Path) -> None:
    """Make the folder of `--out`, before there are results to lose.

    Where it cannot be made, the command ends with a usage error.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {folder}: cannot be made ({error.strerror}); give another folder")


def _repair_lines(policies: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """Yield the table of a scenario with `[repair]`."""
    if not any("ettr" in each for each in policies.values()):
        return
    head = "loss to full strength, s: median, 95 %, max"
    yield f"{'policy':<26}{'ETTR':>8}{'formed':>8}{'joined':>8}{'refused':>9}{head:>46}"
    for policy, each in policies.items():
        counts = f"{'-':>8}{'-':>8}{'-':>9}"
        times = "-"
        if (new := each.get("newcomers")) is not None:
            counts = f"{new['formed']:>8}{new['joined']:>8}{new['refused']:>9}"
            if (found := new["loss_to_full_strength_s"]) is not None:
                times = f"{found['median']:.0f}, {found['95 %']:.0f}, {found['max']:.0f}"
            if new["losses_not_made_up"]:
                times += f" (not made up: {new['losses_not_made_up']})"
        yield f"{policy:<26}{each['ettr']:>8.4f}{counts}{times:>46}"


def throughput(outcomes: Mapping[PolicyName, Outcome]) -> Iterable[tuple[str, float, int]]:
    """Yield (policy, GPU-hours spent, microbatches committed) for each entry of `Outcome.curve`."""
    for policy, outcome in outcomes.items():
        for spent, done in outcome.curve:
            yield policy, round(spent / HOUR_S, 4), done


def comparison(simulated_s: Sequence[float], real_s: Sequence[float]) -> dict[str, Any]:
    """Return the times of a scenario's steps, simulated and real.

    The first step, in which processes warm up, is left out.
    """
    steps = [
        {"step": step, "simulated_s": simulated, "real_s": real, "simulated_over_real": simulated / real}
        for step, (simulated, real) in enumerate(zip(simulated_s, real_s, strict=True))
        if step
    ]
    total = sum(step["simulated_s"] for step in steps) / sum(step["real_s"] for step in steps)
    worst = max((step["simulated_over_real"] for step in steps), key=lambda ratio: abs(ratio - 1))
    return {"steps": steps, "simulated_over_real": total, "worst_step_simulated_over_real": worst}


def comparison_lines(found: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines of a comparison for people."""
    yield f"{'step':>5}{'simulated, s':>14}{'real, s':>10}{'simulated over real':>21}"
    for step in found["steps"]:
        ratio = step["simulated_over_real"]
        yield f"{step['step']:>5}{step['simulated_s']:>14.3f}{step['real_s']:>10.3f}{ratio:>21.3f}"
    yield f"all of these: {found['simulated_over_real']:.3f}, the worst: {found['worst_step_simulated_over_real']:.3f}"
    yield "step 0 is left out: in it real processes warm up"
