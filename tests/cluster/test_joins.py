"""Jobs of toys whose lost replicas come back: real processes, launcher, coordinator and transfer of state."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.observe.verify.check import check, describe
from tests.cluster.jobs import Outcome, Spec, run
from tests.cluster.test_kills import fault

pytestmark = pytest.mark.timeout(180)
TOY = Path(__file__).with_name("joining_toy.py")
IN_PLACE = RecoverConfig(heal="in-place", heal_backoff_s=0.5, heal_budget=2)


def joining(tmp_path: Path, *faults: str, **others: object) -> Outcome:
    """A job of one rank a replica to its end, judged: whoever has trained in a step has applied the same as all others."""
    settings = {
        "replicas": 2,
        "ranks": 1,
        "steps": 60,
        "microbatches": 6,
        "pace_s": 0.02,
        "config": IN_PLACE,
        "heals": True,
        "script": str(TOY),
    } | others
    outcome = run(Spec(run_dir=str(tmp_path / "run"), faults=tuple(map(fault, faults)), **settings))
    assert outcome.exit_code == 0, outcome.output
    outcome.assert_exactly_once()
    verdict = check(tmp_path / "run")
    assert verdict.holds, describe(verdict)
    later = outcome.of(trace.Generation)[1:]
    assert all(each.losses or each.newcomers for each in later), "nobody asked for a generation because of a wait"
    by_step: dict[int, set[str]] = {}
    for replica in range(10):
        for line in outcome.sums(replica, 0):
            by_step.setdefault(line["step"], set()).add(line["digest"])
    assert sorted(by_step) == list(range(outcome.spec.steps)), "no step is left out"
    assert all(len(digests) == 1 for digests in by_step.values()), "replicas have applied alike"
    return outcome


def test_a_lost_replica_comes_back_under_a_new_id(tmp_path: Path) -> None:
    outcome = joining(tmp_path, "1 0 backward 3")
    assert outcome.roster == (0, 2), outcome.output
    first = outcome.sums(2, 0)[0]["step"]
    assert [line["step"] for line in outcome.sums(2, 0)] == list(range(first, outcome.spec.steps))


def test_a_newcomer_joins_in_the_very_step_of_the_loss(tmp_path: Path) -> None:
    """Its state is that with which the step began in which its predecessor has died."""
    outcome = joining(tmp_path, "1 0 backward 3", script=str(TOY.with_name("same_step_toy.py")))
    lost_in = outcome.sums(1, 0)[-1]["step"] + 1
    assert [line["step"] for line in outcome.sums(2, 0)] == list(range(lost_in, outcome.spec.steps))
    made = [(each.generation, [loss.replica for loss in each.losses], each.newcomers) for each in outcome.of(trace.Generation)]
    assert made == [(1, [], ()), (2, [1], ()), (3, [], (2,))]


def test_a_newcomer_that_comes_too_late_is_turned_away_and_the_others_go_on_without_it(tmp_path: Path) -> None:
    """Their sums leave out whom the common plan has turned away, although the generation names it."""
    outcome = joining(tmp_path, "2 0 backward 3", replicas=3, deadlines=Spec(run_dir="").deadlines | {"gather_s": 0.5})
    assert outcome.of(trace.TurnedAway), outcome.output
    assert set(outcome.roster) >= {0, 1}
