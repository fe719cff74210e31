"""A history with one mistake is not taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.nodes.history import Applied, History, Latest, Named, Naming


def applied(*texts: str) -> list[Applied]:
    """Each text: `replica generation first-step last-step`, in order of time."""
    found = []
    for text in texts:
        replica, generation, first, last = map(int, text.split())
        found += [Applied(len(found) + step / 1000, replica, 0, generation, step) for step in range(first, last + 1)]
    return found


def test_survivors_that_go_on_are_one_history() -> None:
    """A removed replica may have applied the step that the new generation begins with."""
    assert History(applied("0 1 0 4", "1 1 0 5", "2 1 0 4", "0 2 5 9", "2 2 5 9")).faults() == []


@pytest.mark.parametrize(
    ("texts", "fault"),
    [
        (
            ("0 1 0 4", "1 1 0 6", "0 2 5 9"),
            "replicas [1] applied step 6 in generation 1, when generation 2 had begun with step 5",
        ),
        (("0 1 0 4", "1 1 0 4", "0 2 5 9", "1 3 5 9"), "replicas [0] applied step 9 in generation 2, when generation 3"),
        (("0 1 0 4", "0 1 6 9"), "replica 0 rank 0 applied step 6 after step 4"),
        (("0 1 0 4", "0 1 4 9"), "replica 0 rank 0 applied step 4 after step 4"),
        (("0 2 0 4", "0 1 5 9"), "replica 0 rank 0 went back from generation 2 to 1"),
    ],
)
def test_a_broken_history_is_found(texts: tuple[str, ...], fault: str) -> None:
    assert any(fault in each for each in History(applied(*texts)).faults())


def test_a_writer_that_wakes_up_is_found() -> None:
    """It begins to name when a later writer has begun; it may write that down late, if it stood still meanwhile."""
    naming = [Naming(1.0, 1.1, 0, 20), Naming(2.0, 2.1, 1, 40), Naming(3.0, 3.1, 1, 60)]
    assert History([], naming=naming).faults() == []
    assert History([], naming=[*naming, Naming(1.5, 5.0, 0, 20)]).faults() == [], "it began before, and was frozen then"
    [fault] = History([], naming=[*naming, Naming(2.5, 2.6, 0, 40)]).faults()
    assert fault.startswith("replica 0 began to name the checkpoint of iteration 40 after replica 1")


def test_a_name_that_goes_back_is_found() -> None:
    """Two writers may name the same one, and what ranks wrote down late counts for nothing."""
    latest = [Latest(1.0, 20), Latest(2.0, 40)]
    assert History([], named=[Named(5.0, 0, 20), Named(2.0, 1, 40)], latest=latest).faults() == []
    assert History([], latest=[*latest, Latest(3.0, 20)]).faults() == ["the newest name went back from iteration 40 to 20"]
    assert len(History([], latest=[*latest, Latest(3.0, -1)]).faults()) == 1


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    line = json.dumps({"at": 1.0, "node": "n1", "generation": 1, "step": 0})
    (tmp_path / "applied-2-1.jsonl").write_text(f'{line}\n{{"at": 2.0, "no')
    (tmp_path / "applied-0-0.jsonl").write_text(line.replace("n1", "n0") + "\n")
    history = History.read(tmp_path)
    assert [(each.replica, each.rank, each.node) for each in history.applied] == [(0, 0, "n0"), (2, 1, "n1")]
    assert history.replicas(0.5) == {0, 2}
    assert history.pause_s([0, 2]) == 0.0
