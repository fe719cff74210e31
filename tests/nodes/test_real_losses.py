"""A node of a real Megatron job is lost or cut off: the job keeps what the campaign promises for that."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.nodes.nodes import Cage
from tests.system.campaign import Campaign
from tests.system.scenarios import scenario

MOST_RANKS = 6


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["lost node of the writer", "lost node of the coordinator", "long cut"])
def test_a_real_job_keeps_what_is_promised(kind: str, cage: Cage, tmp_path: Path) -> None:
    plans = ((seed, scenario(seed)) for seed in itertools.count(1))
    seed = next(seed for seed, plan in plans if plan.kind == kind and sum(plan.slots) <= MOST_RANKS)
    row = Campaign(tmp_path, tmp_path / "failed", lambda: cage).attempt(seed)
    assert row.passed, row
