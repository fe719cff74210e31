"""A whole job under random faults, larger than what can be explored: all invariants at every step, then progress.

Hypothesis chooses sizes, the order of everything, and the faults (safety). At the end the faults stop, everything that can
happen happens, and all members must have finished the same steps (liveness), unless half of them have drifted. A failure
shrinks to a short list of steps.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from megatron_recover.sim.explore.explorer import Explorer
from megatron_recover.sim.explore.scenario import Scenario

MAX_STEPS = 20_000
"""Of the way to the end; far more than any of these jobs needs."""

SHAPES = {
    "one rank": (1, ((0,), (0,), (0,))),
    "two stages": (2, ((0,), (1,), (1,))),
    "two ranks share": (2, ((0, 1), (0, 1))),
    "two by two": (4, ((0, 1), (2, 3), (2, 3))),
}


class Job(RuleBasedStateMachine):
    """Every step is one thing that can happen, chosen among all; INV-1..7 are observed inside `Explorer`."""

    links = False

    def __init__(self) -> None:
        super().__init__()
        self.explorer: Explorer | None = None

    @initialize(
        replicas=st.integers(1, 5),
        microbatches=st.integers(1, 7),
        shape=st.sampled_from(sorted(SHAPES)),
        slow=st.booleans(),
        tree_above=st.sampled_from([64, 1, 2, 3]),
        faults=st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)),
    )
    def start(self, replicas: int, microbatches: int, shape: str, slow: bool, tree_above: int, faults: tuple[int, ...]) -> None:
        num_ranks, bucket_ranks = SHAPES[shape]
        scenario = Scenario(
            "random", replicas, microbatches, bucket_ranks, num_ranks, 3, *faults, self.links, slow, tree_above=tree_above,
            digested=(1, 2), of_last_bucket=(1,), state_drifts=faults[1] % 2,
        )  # fmt: skip
        self.explorer = Explorer(scenario, reduced=False)
        self.world = self.explorer.tidy(self.explorer.initial())

    @rule(choices=st.lists(st.integers(0, 10_000), min_size=1, max_size=30))
    def go_on(self, choices: list[int]) -> None:
        assert self.explorer is not None
        for choice in choices:
            steps = [] if self.explorer.over(self.world) else list(self.explorer.steps(self.world))
            if steps:
                self.world = self.explorer.tidy(steps[choice % len(steps)][1])

    @precondition(lambda self: self.explorer is not None and self.explorer.may_fail(self.world))
    @rule(choice=st.integers(0, 10_000))
    def fault(self, choice: int) -> None:
        assert self.explorer is not None
        faults = [] if self.explorer.over(self.world) else list(self.explorer.faults(self.world))
        if faults:
            self.world = self.explorer.tidy(faults[choice % len(faults)][1])

    def teardown(self) -> None:
        """INV-8, INV-9: without further faults the job ends, and ends well."""
        if self.explorer is None:
            return
        for _ in range(MAX_STEPS):
            if self.explorer.over(self.world):
                break
            after = next(self.explorer.steps(self.world), None)
            assert after is not None, "INV-9: nothing can happen any more, and the job is not over"
            self.world = self.explorer.tidy(after[1])
        else:
            pytest.fail(f"INV-8: not over after {MAX_STEPS} steps")
        history = self.explorer.histories[self.world.history]
        members = self.explorer.coordinators[self.world.coordinator].roster
        assert self.explorer.tied(self.world) or all(dict(history.committed)[replica] == 3 for replica in members)


class JobOnLinks(Job):
    """The same over FIFO links that deliver once, and may break."""

    links = True


TestJob = pytest.mark.timeout(200)(Job.TestCase)
TestJobOnLinks = pytest.mark.timeout(200)(JobOnLinks.TestCase)
TestJob.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)
TestJobOnLinks.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)


def test_a_job_may_stop_where_the_last_two_have_drifted_each_in_its_own_way() -> None:
    explorer = Explorer(
        Scenario(
            "drifted apart", 2, 1, ((0,), (0,), (0,)), 1, 3, drifts=1, state_drifts=1, digested=(1, 2), of_last_bucket=(1,)
        ),
        reduced=False,
    )
    world = explorer.tidy(explorer.initial())
    for wanted in ("the parameters of replica 0 drift", "other state of replica 1 drifts"):
        world = explorer.tidy(next(after for label, after in explorer.faults(world) if label == wanted))
    for _ in range(MAX_STEPS):
        if explorer.over(world):
            break
        world = explorer.tidy(next(explorer.steps(world))[1])
    assert explorer.tied(world)
