"""What replicas compare before they start: arguments, packages, device, and what is in the data."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_recover.core.alike import differences
from megatron_recover.megatron.data import alike


def of(parts: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(parts.items())


def test_an_argument_that_differs_is_named_with_both_values() -> None:
    one = Namespace(seed=1, lr=0.5, save=None, rank=0, local_rank=0, data_path=["x" * 500])
    other = Namespace(**{**vars(one), "seed": 2, "save": "here", "rank": 3})
    found = differences(of(alike.arguments(one, 0)), of(alike.arguments(other, 0)))
    assert [each for each in found if each[0].startswith("argument")] == [
        ("argument seed", "1", "2"), ("argument save", "not there", "'here'"),
    ]  # fmt: skip
    assert len(found) == 3 and found[0][0] == "argument seed", "a digest says less than what it is of"
    assert max(map(len, alike.arguments(one, 0).values())) < 200, "a long value is sent in full"
    assert alike.arguments(one, 1).keys() == {"the digest of all arguments"}, "ranks besides the leader send a digest only"


def test_a_newcomer_is_not_compared_by_how_far_the_others_have_come() -> None:
    one = Namespace(seed=1, iteration=3, curr_iteration=3, consumed_train_samples=12, finetune=True, rank=0)
    other = Namespace(seed=1, iteration=0, curr_iteration=0, consumed_train_samples=0, finetune=False, rank=5)
    for rank in (0, 1):
        assert alike.arguments(one, rank, unchanging=True) == alike.arguments(other, rank, unchanging=True)
        assert alike.arguments(one, rank) != alike.arguments(other, rank)
    unlike = Namespace(**{**vars(other), "seed": 2})
    found = differences(of(alike.arguments(one, 0, unchanging=True)), of(alike.arguments(unlike, 0, unchanging=True)))
    assert [name for name, *_ in found] == ["argument seed", "the digest of the arguments that do not change"]


def test_packages_are_compared_and_devices_where_exactness_rests_on_them() -> None:
    fast, exact = alike.software(exact=False), alike.software(exact=True)
    assert fast["the version of torch"] == torch.__version__.split("+")[0] or fast["the version of torch"] == torch.__version__
    assert exact.keys() - fast.keys() == {"the device"} and exact["the device"]


@pytest.mark.parametrize("changed", ["index", "samples", "length"])
@pytest.mark.parametrize("blocks", [1, 200], ids=["small", "large"])
def test_data_of_another_content_differs(changed: str, blocks: int, tmp_path: Path) -> None:
    content = bytearray(blocks * 2**16)
    for name in ("one", "other"):
        (tmp_path / f"{name}.idx").write_bytes(b"index")
        (tmp_path / f"{name}.bin").write_bytes(content)
    prefix = str(tmp_path / "one")
    args = Namespace(data_path=["0.5", prefix, prefix], train_data_path=None, valid_data_path=str(tmp_path / "gone"))
    before = alike.data(args)
    assert before.keys() == {f"the data of {prefix}"} and before == alike.data(args)
    if changed == "index":
        (tmp_path / "one.idx").write_bytes(b"inDex")
    else:
        content[-1:] = b"\1" if changed == "samples" else b""
        (tmp_path / "one.bin").write_bytes(content)
    assert alike.data(args) != before
