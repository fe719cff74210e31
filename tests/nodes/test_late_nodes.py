"""Nodes of a toy job are lost, and others that came later take their places; what was cut off returns under a new number."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_recover import trace
from megatron_recover.cluster import status
from megatron_recover.config import RecoverConfig
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.verify.check import check, describe
from tests.cluster.running import FOR_EVER
from tests.nodes.jobs import NodesJob
from tests.nodes.nodes import Network

pytestmark = pytest.mark.timeout(300)
Start = Callable[..., NodesJob]


@pytest.fixture
def start(make_network: Callable[..., Network]) -> Start:
    """Starts a job with a replica of one rank on each of three nodes, and a fourth node that comes when they train."""

    def starting(**settings: Any) -> NodesJob:
        job = NodesJob(
            make_network(4), num_nodes=3, replicas=3, ranks=1, steps=FOR_EVER, pace_s=0.02, heals=True,
            config=RecoverConfig(heal="in-place"), script=str(Path(__file__).with_name("joining.py")), **settings,
        )  # fmt: skip
        job.until_training()
        job.start_late(job.network[3])
        until_state(job, 3, "spare")
        return job

    return starting


def states(job: NodesJob) -> dict[int, str]:
    """Number and state of each node, as `status` shows them."""
    found = status.read(Path(job.spec.run_dir))
    return {} if found is None else {each.number: each.state for each in found.nodes}


def until_state(job: NodesJob, number: int, word: str) -> None:
    job.until(lambda: states(job).get(number) == word, f"node {number} is {word}")


def until_joined(job: NodesJob, replica: int) -> None:
    job.until(lambda: job.steps().get((replica, 0), 0) >= 10, f"10 steps of replica {replica}")


def assert_healed(job: NodesJob, roster: tuple[int, ...], *alive: int) -> None:
    """The job ends by a signal, alike on all nodes that are `alive`; each step is applied alike by all who were in it."""
    job.agents["n0"].send_signal(signal.SIGTERM)
    codes = job.end([job.network[number] for number in alive])
    assert set(codes.values()) == {ExitCode.INTERRUPTED}, job.output()
    assert job.history().faults() == []
    outcome = job.outcome()
    outcome.assert_exactly_once()
    assert outcome.roster == roster, job.output()
    verdict = check(job.spec.run_dir)
    assert verdict.holds, describe(verdict)
    digests: dict[int, set[str]] = {}
    for replica in range(10):
        for line in outcome.sums(replica, 0):
            digests.setdefault(line["step"], set()).add(line["digest"])
    assert sorted(digests) == [*range(len(digests))] and all(len(each) == 1 for each in digests.values())
    job.network.assert_nothing_left()


def test_a_spare_node_takes_the_place_of_one_that_loses_its_power(start: Start) -> None:
    job = start()
    job.nodes[2].power_off()
    until_joined(job, 3)
    assert_healed(job, (0, 1, 3), 0, 1, 3)
    assert {event.node for event in job.history().applied if event.replica == 3} == {"n3"}


@pytest.mark.parametrize("is_long", [False, True])
def test_a_node_that_is_cut_off_is_healed_on_another_and_returns_as_a_spare(start: Start, is_long: bool) -> None:
    """After a short cut its launcher lives, and comes anew by itself. After a long one it has ended, and is started again."""
    job = start()
    job.nodes[2].cut()
    job.until(lambda: any(event.losses for event in job.outcome().of(trace.Generation)), "its loss")
    if is_long:
        until_joined(job, 3)
        job.end([job.nodes[2]])
    job.nodes[2].heal()
    until_joined(job, 3)

    def is_back() -> bool:
        if job.agents["n2"].poll() is not None:  # on a busy machine also after the short cut
            job.start_late(job.nodes[2])
        return states(job).get(4) == "spare"

    job.until(is_back, "its return")
    assert states(job) == {0: "here", 1: "here", 2: "lost", 3: "here", 4: "spare"}
    job.network[3].power_off()
    until_joined(job, 4)
    assert_healed(job, (0, 1, 4), 0, 1, 2)
    assert {event.node for event in job.history().applied if event.replica == 4} == {"n2"}


def test_late_nodes_that_freeze_or_lose_their_power_before_they_are_used_cost_nobody_anything(start: Start) -> None:
    job = start()
    job.network[3].freeze()
    job.until_going_on([0, 1, 2])
    until_state(job, 3, "lost")
    job.network[3].thaw()
    until_state(job, 4, "spare")
    job.network[3].power_off()
    job.until_going_on([0, 1, 2])
    assert_healed(job, (0, 1, 2), 0, 1, 2)
    assert not any(event.losses or event.newcomers for event in job.outcome().of(trace.Generation))
