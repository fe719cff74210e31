"""Quotas of real processes follow a replica that is slowed down by a fault: it loses a part of its share, and gets it back."""

from __future__ import annotations

import pathlib

import pytest

from tests.system.jobs import ROOT, Job, Outcome, check, run_job

SLOW_FROM, SLOW_FOR, STEPS = 3, 4, 12
KILLED_IN = 10
IN_PASSING = ("compute",)
"""Points of faults after which nothing has to be recovered."""
STRAGGLER = f"""
[[fault]]
replica = 1
rank = 0
point = "compute"
kind = "slow"
factor = 2.0
step = {SLOW_FROM}
steps = {SLOW_FOR}

[[fault]]
replica = 2
rank = 0
point = "backward"
step = {KILLED_IN}
"""
JOB = Job(replicas=3, microbatches=12, steps=STEPS, rebalance="on")


def quotas(outcome: Outcome) -> list[list[int]]:
    """Of each step, as its first plan has them."""
    found: dict[int, list[int]] = {}
    for plan in outcome.events("plan"):
        found.setdefault(plan["step"], plan["quotas"])
    return [found[step] for step in range(STEPS)]


@pytest.mark.timeout(300)
def test_a_straggler_loses_a_part_of_its_share_and_gets_it_back(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    script = ROOT / "tests" / "system" / "clocked_pretrain.py"
    outcome = run_job(JOB, tmp_path / "run", data, chaos=STRAGGLER, script=script).expect(0)
    assert [(each["kind"], each["step"]) for each in outcome.events("fault")] == [("slow", SLOW_FROM), ("kill", KILLED_IN)]
    even, cut = [4, 4, 4], [5, 2, 5]
    assert quotas(outcome) == [even] * (SLOW_FROM + 2) + [cut] * SLOW_FOR + [even] * 2 + [[6, 6]]
    assert outcome.summary["microbatches_wasted"] == 0
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, f"{outcome.command}\n{report}"
