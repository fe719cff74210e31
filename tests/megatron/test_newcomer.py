"""A newcomer that has the state of another replica goes on bit by bit as that one does."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.newcomers import ENTERS, Copied, go_on

pytestmark = pytest.mark.timeout(300)


def assert_equal(found: Copied, wanted: Copied) -> None:
    assert found.scalars == wanted.scalars
    assert [name for name, _ in found.tensors] == [name for name, _ in wanted.tensors]
    unlike = [
        name for (name, a), (_, b) in zip(found.tensors, wanted.tensors, strict=True)
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    ]  # fmt: skip
    assert not unlike
    assert (found.layout, found.digest) == (wanted.layout, wanted.digest)


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [("--global-batch-size 2", 1)],
    ids=["fp32"],
)  # fmt: skip
def test_it_goes_on_as_the_replica_whose_state_it_has(flags: str, num_ranks: int) -> None:
    donors, newcomers = go_on(flags, num_ranks)
    for donor, newcomer in zip(donors, newcomers, strict=True):
        assert_equal(newcomer.at_entrance, donor.at_entrance)
        assert newcomer.steps == donor.steps
        assert newcomer.steps[0][0] == f"train {ENTERS}" and len(newcomer.steps) > 5
        assert_equal(newcomer.at_end, donor.at_end)
        assert newcomer.operations == donor.operations
