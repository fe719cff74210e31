"""Megatron's uses of rank and world size: each is judged, and what a verdict names is there."""

from __future__ import annotations

import ast
import importlib
from collections import Counter

import pytest

from megatron_recover.megatron.launch.arguments import ADAPTATIONS, REFUSALS
from megatron_recover.megatron.seams import seams
from scripts.study import ranks

SNIPPET = """
import os
import torch.distributed as dist
from torch.distributed import get_rank as place
from torch.distributed import get_world_size

class Writer:
    def __init__(self, args, group):
        self.rank, self.name = args.rank, f"{place()} of {dist.get_world_size()}"
        self.within = group.rank(), group.size(), dist.get_rank(group)

    def write(self):
        def inner():
            return int(os.getenv("RANK", "0")) % torch.cuda.device_count()
        return inner() or getattr(self, "world_size", 1) or get_world_size

ask = dist.get_rank
"""


def test_every_use_of_the_installed_megatron_is_judged_and_every_judged_use_is_there() -> None:
    assert ranks.differences() == [], "python -m scripts.study.ranks; docs/how_to/move_to_another_megatron.md"


def test_a_use_that_is_new_or_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = sum((each.counts() for each in ranks.judgements()), Counter[ranks.Use]())
    new, gone = ("megatron.core.utils", "fresh", "get_rank"), ("megatron.training.arguments", "parse_args", "$RANK")
    assert there[gone] == 1
    monkeypatch.setattr(ranks, "uses", lambda: (there - Counter([gone])) + Counter([new]))
    assert ranks.differences() == [
        "megatron.core.utils:fresh get_rank: 1 in Megatron, 0 judged",
        "megatron.training.arguments:parse_args $RANK: 0 in Megatron, 1 judged",
    ]
    assert ranks.main() == 1


def test_a_use_is_found_behind_aliases_strings_and_references_and_no_group_is_one() -> None:
    assert Counter(ranks.uses_in(ast.parse(SNIPPET))) == Counter({
        ("Writer.__init__", ".rank"): 2,
        ("Writer.__init__", "get_rank"): 2,
        ("Writer.__init__", "get_world_size"): 1,
        ("Writer.write.inner", "$RANK"): 1,
        ("Writer.write.inner", "device_count"): 1,
        ("Writer.write", ".world_size"): 1,
        ("Writer.write", "get_world_size"): 1,
        ("", "get_rank"): 1,
    })  # fmt: skip


def test_what_a_verdict_names_exists() -> None:
    refused = {each.flag for each in REFUSALS}
    adapted = {each.flag for each in ADAPTATIONS} | {each.name for each in seams.load()}
    judgements = ranks.judgements()
    assert {each.verdict for each in judgements} == {"harmless", "adapted", "refused"}
    for each in judgements:
        assert each.because and each.uses
        assert (each.verdict == "harmless") == (not each.by), each.because
        for name in each.by:
            module, _, path = name.partition(":")
            if path:
                found: object = importlib.import_module(module)
                for part in path.split("."):
                    found = getattr(found, part)
            else:
                assert name in (refused if each.verdict == "refused" else adapted), (name, each.because)
