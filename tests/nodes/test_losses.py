"""Nodes of a toy job die, freeze, are cut off and come back: what is left goes on, is one history, and loses nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from megatron_recover import trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.host.addresses import TCP_RTO_MAX_MS
from tests.nodes.jobs import NodesJob
from tests.nodes.nodes import Network, Node

pytestmark = pytest.mark.timeout(180)
Start = Callable[..., NodesJob]


@pytest.fixture
def start(make_network: Callable[..., Network]) -> Start:
    """Starts a job on nodes of its own, one replica of two ranks a node by default, and waits until it trains."""

    def starting(num_nodes: int = 3, *, clock_offsets_s: Iterable[float] = (), **settings: Any) -> NodesJob:
        network = make_network(num_nodes, clock_offsets_s=tuple(clock_offsets_s))
        job = NodesJob(network, **{"num_nodes": num_nodes, "replicas": num_nodes, "steps": 300, "pace_s": 0.003, **settings})
        job.until_training()
        return job

    return starting


def assert_survived(job: NodesJob, survivors: Iterable[int], *, losses: int, alive: Iterable[Node] | None = None) -> None:
    """The survivors have applied all steps, alike, each microbatch once; so many generations were made for losses.

    `alive`: the nodes whose agents end by themselves, with code 0.
    """
    alive, survivors = [*(job.nodes if alive is None else alive)], [*survivors]
    assert job.end(alive) == {node.name: 0 for node in alive}, job.output()
    outcome = job.outcome()
    assert job.history().faults() == []
    outcome.assert_exactly_once()
    for rank in range(job.spec.ranks):
        lines = [outcome.sums(replica, rank) for replica in survivors]
        assert [line["step"] for line in lines[0]] == list(range(job.spec.steps))
        assert all(each == lines[0] for each in lines)
    generations = outcome.of(trace.Generation)
    assert (len(generations), outcome.roster) == (1 + losses, tuple(survivors)), job.output()
    assert job.mistakes(set(range(job.spec.replicas)) - set(survivors)) == []
    job.network.assert_nothing_left()


def _has_short_pauses() -> bool:
    """Return whether this kernel can be asked to try again soon (`addresses.outlast_cuts`)."""
    with socket.socket() as sock:
        try:
            sock.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
        except OSError:
            return False
    return True


def test_a_node_that_loses_its_power_costs_its_microbatches(start: Start) -> None:
    """Its link goes down first: nobody is told. Clocks of the nodes are a minute apart."""
    job = start(clock_offsets_s=(0.0, 30.0, -30.0))
    job.nodes[2].power_off()
    job.until_going_on([0, 1])
    assert_survived(job, [0, 1], losses=1, alive=job.nodes[:2])
    assert job.history().pause_s([0, 1]) < job.node_silence_s + 2.0


def test_processes_of_a_node_that_are_killed_at_once(start: Start) -> None:
    """Two replicas are on the node: that is one loss, and its peers see it at once."""
    job = start(replicas=6, ranks=1)
    for process in job.nodes[1].processes():
        process.kill()
    job.until_going_on([0, 1, 4, 5])
    assert_survived(job, [0, 1, 4, 5], losses=1, alive=[job.nodes[0], job.nodes[2]])
    assert job.history().pause_s([0, 1, 4, 5]) < 1.0


def test_two_losses_at_once(start: Start) -> None:
    job = start(4)
    job.nodes[1].power_off()
    job.nodes[3].power_off()
    job.until_going_on([0, 2])
    job.nodes[1].power_on()  # it comes back, and nobody starts an agent
    generations = job.outcome().of(trace.Generation)
    assert_survived(job, [0, 2], losses=len(generations) - 1, alive=[job.nodes[0], job.nodes[2]])
    assert len(generations) <= 3


def test_short_faults_remove_nobody(start: Start) -> None:
    """After a cut of 7 s an older kernel lets nothing through before 12.6 s: it waits twice as long after each try."""
    job = start(node_silence_s=10.0)
    job.nodes[2].cut()
    job.nodes[1].freeze()
    with pytest.raises(AssertionError, match="steps more"):
        job.until_going_on([0], 5, deadline_s=1.0)
    job.nodes[1].thaw()
    with pytest.raises(AssertionError, match="steps more"):
        job.until_going_on([0], 5, deadline_s=7.0 if _has_short_pauses() else 4.0)
    job.nodes[2].heal()
    job.until_going_on([0, 1, 2])
    assert_survived(job, [0, 1, 2], losses=0)


@pytest.mark.parametrize("one_way", [None, "in", "out"])
def test_a_node_that_is_cut_off_stops_and_returns_after_its_fence(start: Start, one_way: str | None) -> None:
    job = start()
    job.nodes[2].cut(one_way=one_way)
    job.until_going_on([0, 1])
    there = len(job.history().by_rank()[2, 0])
    job.nodes[2].heal()
    job.until_going_on([0, 1])
    assert len(job.history().by_rank()[2, 0]) == there, "it went on behind the cut"
    # On a busy machine the cut may last longer than the node waits for a coordinator.
    assert set(job.end([job.nodes[2]]).values()) <= {ExitCode.OK, ExitCode.NO_REPLICA_LEFT}, job.output()
    assert_survived(job, [0, 1], losses=1, alive=job.nodes[:2])


def test_two_nodes_that_do_not_reach_each_other_cost_one_of_them_in_one_generation(start: Start) -> None:
    """Both reach the coordinator, so neither is silent: their replicas report each other."""
    job = start(replicas=6, ranks=1)
    job.nodes[1].cut(job.nodes[2])
    job.until(lambda: any(event.losses for event in job.outcome().of(trace.Generation)), "a loss", deadline_s=100.0)
    [lost] = [tuple(loss.replica for loss in event.losses) for event in job.outcome().of(trace.Generation) if event.losses]
    assert lost in ((2, 3), (4, 5)), job.output()
    generations = len(job.outcome().of(trace.Generation))
    assert_survived(job, [replica for replica in range(6) if replica not in lost], losses=generations - 1)


def test_a_node_that_freezes_is_fenced_when_it_thaws(start: Start) -> None:
    job = start()
    job.nodes[1].freeze()
    job.until_going_on([0, 2])
    job.nodes[1].thaw()
    assert_survived(job, [0, 2], losses=1)


def test_a_coordinator_that_hears_fewer_than_half_removes_nobody(start: Start) -> None:
    job = start(4)
    job.nodes[0].cut()
    job.end(deadline_s=60.0)
    assert job.history().faults() == []
    generations = job.outcome().of(trace.Generation)
    assert len(generations) == 1, generations
    job.outcome().assert_exactly_once()
    job.network.assert_nothing_left()


def test_the_coordinators_node_is_lost_with_its_replica(start: Start) -> None:
    """Its replica was needed: nobody can make a generation without it."""
    job = start()
    job.nodes[0].power_off()
    codes = job.end(job.nodes[1:])
    assert set(codes.values()) == {ExitCode.NO_REPLICA_LEFT}, job.output()
    assert job.history().faults() == []
    job.network.assert_nothing_left()
