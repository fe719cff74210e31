"""What routers count belongs to the microbatch whose forward or backward has just ended, and goes where that one is counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_recover.megatron.router_counts import RouterCounts


class Router:
    """What is read of upstream's."""

    def __init__(self) -> None:
        self.local_tokens_per_expert = torch.zeros(4)

    def counts(self, *tokens: int) -> None:
        self.local_tokens_per_expert += torch.tensor(tokens)


@pytest.fixture
def group(world: None) -> object:
    return torch.distributed.group.WORLD


@pytest.fixture
def world() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def region(group: object) -> tuple[RouterCounts, list[Router]]:
    routers = [Router(), Router()]
    counts = RouterCounts(routers, chunk=0, group=group, bucket_elements=4)
    for number, bucket in enumerate(counts.buckets):
        bucket.id = 10 + number
    return counts, routers


def test_microbatches_in_flight_keep_their_own_counts(group: object) -> None:
    counts, routers = region(group)
    counts.begin()
    routers[0].counts(1, 0, 0, 0)
    counts.forward_ended(5)
    routers[1].counts(0, 2, 0, 0)
    counts.forward_ended(7)
    counts.backward_ended(7, {10, 11})
    assert counts.local.tolist() == [0, 0, 0, 0, 0, 2, 0, 0]
    routers[0].counts(0, 0, 0, 3)  # a forward that runs again in the backward
    counts.backward_ended(5, {10, 11})
    assert counts.local.tolist() == [1, 0, 0, 3, 0, 2, 0, 0]
    assert not any(router.local_tokens_per_expert.any() for router in routers)


def test_a_bucket_that_a_microbatch_must_not_add_to_stays_as_it_is(group: object) -> None:
    counts, routers = region(group)
    counts.begin()
    for router in routers:
        router.counts(1, 1, 1, 1)
    counts.forward_ended(0)
    counts.backward_ended(0, {11})
    assert counts.local.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_routers_get_the_counts_of_all_and_a_new_step_begins_with_none(group: object) -> None:
    counts, routers = region(group)
    counts.local.copy_(torch.arange(8.0))
    counts.applied()
    assert [router.local_tokens_per_expert.tolist() for router in routers] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    counts.begin()
    assert not counts.local.any()
