"""Host lists are expanded as Slurm does it: known cases, and random ones against `scontrol show hostnames`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_recover.cluster.slurm.node_list import HOSTS_MAX, expand
from tests.slurm.machine import Machine

GOLDEN = {
    "": "",
    "n1": "n1",
    "a,b[1-3],a": "a b1 b2 b3 a",
    "n[001-004,7]": "n001 n002 n003 n004 n7",
    "n[08-12]": "n08 n09 n10 n11 n12",
    "n[9-011]": "n9 n10 n11",
    "n[099-101]": "n099 n100 n101",
    "n[1,1,01]": "n1 n1 n01",
    "[1-3]": "1 2 3",
    "a,,b, c d,": "a b c d",
    "n[1-2]x[3-4]": "n1x3 n1x4 n2x3 n2x4",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    "a[1-2]b[1-2]c[1-2],z": "a1b1c1 a1b1c2 a2b1c1 a2b1c2 a1b2c1 a1b2c2 a2b2c1 a2b2c2 z",
    "10.0.0.[1-2]": "10.0.0.1 10.0.0.2",
}
"""What `scontrol show hostnames` of Slurm 22.05.8 prints."""
OURS = {"n[001-003,7]-ib": "n001-ib n002-ib n003-ib n7-ib", "n[1-2]x[1,3]y": "n1x1y n1x3y n2x1y n2x3y"}
"""Names with text behind the last bracket, which Slurm refuses."""
WRONG = [
    "n[1",
    "n]",
    "n[]",
    "n[3-1]",
    "n[1-2,]",
    "n[a]",
    "n[[1-2]]",
    "n[1--2]",
    "n[1-2]-[x]",
    f"n[1-{HOSTS_MAX + 1}]",
    "n[1-400]x[1-400]",
]


@pytest.mark.parametrize(("text", "hosts"), [*GOLDEN.items(), *OURS.items()])
def test_a_host_list_is_expanded_in_slurms_order(text: str, hosts: str) -> None:
    assert expand(text) == tuple(hosts.split())


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_host_list_is_refused_and_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no host list|names more than") as refused:
        expand(text)
    assert repr(text) in str(refused.value)


_RANGES = st.tuples(st.integers(0, 120), st.integers(0, 6), st.integers(1, 4)).map(
    lambda each: f"{each[0]:0{each[2]}d}" + (f"-{each[0] + each[1]}" if each[1] else "")
)
_BRACKETS = st.lists(_RANGES, min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
_NAMES = st.lists(st.tuples(st.sampled_from(["n", "rack-", "x1y", "a.b"]), _BRACKETS), min_size=1, max_size=3).map(
    lambda pieces: "".join(literal + bracket for literal, bracket in pieces)
)
LISTS = st.lists(st.one_of(st.sampled_from(["login", "n07", "a-b.c"]), _NAMES), min_size=1, max_size=3).map(",".join)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LISTS)
def test_random_lists_are_expanded_as_scontrol_does_it(machine: Machine, text: str) -> None:
    assert expand(text) == tuple(machine.run("scontrol", "show", "hostnames", text).stdout.split())
