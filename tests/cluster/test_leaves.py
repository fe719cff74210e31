"""Replicas of a real toy job are asked to leave: the others go on, no microbatch is lost, and the ranks end with code 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.observe.summary import summarize
from megatron_recover.observe.verify.check import check, describe
from tests.cluster.jobs import Spec, run

pytestmark = pytest.mark.timeout(180)


def test_replicas_that_are_asked_to_leave_end_with_code_0_and_cost_no_microbatch(tmp_path: Path) -> None:
    """Two of a node at once, the writer among them; later the last but one; an unknown, a gone and the last one are refused."""
    drains = ((8, (0, 2)), (20, (0, 7, 3)), (30, (1,)))
    outcome = run(Spec(run_dir=str(tmp_path / "run"), replicas=4, steps=60, pace_s=0.01, drains=drains))
    outcome.assert_finished([1])
    left = [event.left for event in outcome.of(trace.Generation) if event.left]
    assert left == [(0, 2), (3,)], "both of the node in one generation"
    assert len(outcome.of(trace.Generation)) == 3, "nothing else made one"
    assert not outcome.of(trace.Failure) and not outcome.of(trace.Fenced), outcome.output
    assert "replica 0 does not leave, asked by drain: it has left already" in outcome.output
    assert "replica 7 does not leave, asked by drain: there is no such replica: the run has replicas 0 to 3" in outcome.output
    assert "replica 1 does not leave, asked by drain: no replica would stay" in outcome.output
    assert "replicas 0 2 leave after a common step, asked by drain" in outcome.output
    assert "1 of 4 replicas left, no losses, 3 asked to leave" in outcome.output
    verdict = check(outcome.spec.run_dir)
    assert (verdict.summary.microbatches_lost, verdict.summary.microbatches_redone, verdict.summary.microbatches_wasted) == (
        0,
        0,
        0,
    )
    told = describe(verdict)
    assert "replica 2 left after train " in told and ", asked by drain: no microbatch lost" in told
    assert "replica 1 did not leave, asked by drain: no replica would stay" in told
    for replica in (0, 2, 3):
        applied = {len(outcome.sums(replica, rank)) for rank in range(2)}
        assert len(applied) == 1, "the ranks of a replica end after the same step"
    assert summarize(verdict.history).leaves == verdict.summary.leaves
