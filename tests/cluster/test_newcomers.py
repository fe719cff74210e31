"""Real processes of newcomers: where and when they start after a loss, and what they cost nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.observe.files import log_name
from tests.cluster.jobs import Outcome, Spec, run
from tests.cluster.test_kills import fault

pytestmark = pytest.mark.timeout(180)
TOY = Path(__file__).with_name("newcomer_toy.py")
IN_PLACE = RecoverConfig(heal="in-place", heal_backoff_s=0.5, heal_budget=2)


def heal(tmp_path: Path, mode: str, *faults: str, config: RecoverConfig = IN_PLACE, **others: object) -> Outcome:
    (tmp_path / "mode").write_text(mode)
    given = {"replicas": 3, "steps": 12, "pace_s": 0.1, **others}
    return run(
        Spec(
            run_dir=str(tmp_path / "run"),
            faults=tuple(map(fault, faults)),
            config=config,
            script=str(TOY),
            sums_dir=str(tmp_path),
            **given,
        )  # fmt: skip
    )


def notes(tmp_path: Path) -> dict[tuple[int, int], dict]:
    """(replica, slot) -> what the rank there has noted."""
    found = {}
    for file in tmp_path.glob("slot-*.json"):
        _, slot, replica = file.stem.split("-")
        found[int(replica), int(slot)] = json.loads(file.read_text())
    return found


def test_a_newcomer_starts_in_the_slots_of_the_lost_replica_once_all_of_it_has_ended(tmp_path: Path) -> None:
    outcome = heal(tmp_path, "wait", "1 0 forward 1")
    found = notes(tmp_path)
    assert sorted(found) == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 2), (3, 3)], outcome.events
    assert all(note["lived"] == [] for note in found.values())
    for rank in (0, 1):
        mine, former = found[3, 2 + rank], found[1, 2 + rank]
        told, before = mine["context"], former["context"]
        assert told["newcomer"] and (told["replica"], told["rank"]) == (3, rank)
        changed = {name for name in told if told[name] != before.get(name)}
        assert changed <= {"newcomer", "replica", "leader", "faults"}, "else it is a rank like any other"
        assert mine["descriptors"] == former["descriptors"]
        log = tmp_path / "run" / log_name(3, rank)
        assert log.read_text() == f"newcomer 3 rank {rank}\n"
    assert len({note["context"]["leader"] for (replica, _), note in found.items() if replica == 3}) == 1
    outcome.assert_finished([0, 2])
    assert [each.roster for each in outcome.of(trace.Generation)] == [(0, 1, 2), (0, 2)], "a newcomer alone makes no generation"


def test_off_forms_nobody(tmp_path: Path) -> None:
    outcome = heal(tmp_path, "wait", "1 0 forward 1", config=RecoverConfig(), steps=4)
    assert {replica for replica, _ in notes(tmp_path)} == {0, 1, 2}
    outcome.assert_finished([0, 2])


def test_several_losses_are_healed_at_once(tmp_path: Path) -> None:
    outcome = heal(tmp_path, "wait", "1 0 forward 1", "2 1 forward 1", replicas=4)
    found = notes(tmp_path)
    assert {slot for replica, slot in found if replica > 3} == {2, 3, 4, 5}
    assert {replica for replica, _ in found} == {0, 1, 2, 3, 4, 5}
    assert all(note["lived"] == [] for note in found.values())
    outcome.assert_finished([0, 3])


def test_newcomers_that_break_again_and_again_cost_their_slots_and_not_the_job(tmp_path: Path) -> None:
    """Killed from outside, the first loss is no break of the slot; the aborts are: two, then one after each back-off."""
    outcome = heal(tmp_path, "abort", "1 0 forward 1", steps=40)
    newcomers = sorted({replica for replica, _ in notes(tmp_path)} - {0, 1, 2})
    assert newcomers == [3, 4, 5, 6], "two breaks, and a try after 0.5 s and after 1 s"
    launcher_log = (tmp_path / "run" / "launcher.log").read_text()
    assert "set aside for 0.5 s (1 of 2)" in launcher_log and "never used again" in launcher_log
    outcome.assert_finished([0, 2])


def test_a_newcomer_that_exits_with_code_0_before_it_is_a_member_has_broken(tmp_path: Path) -> None:
    outcome = heal(tmp_path, "exit 0", "1 0 forward 1", steps=40)
    assert sorted({replica for replica, _ in notes(tmp_path)} - {0, 1, 2}) == [3, 4, 5, 6]
    outcome.assert_finished([0, 2])


@pytest.mark.parametrize(("check", "why"), [("refuse", "a test says so"), ("hang", "its check has not ended within 0.4 s")])
def test_slots_that_fail_their_check_are_set_aside_and_nobody_is_started(tmp_path: Path, check: str, why: str) -> None:
    waits = {**Spec(run_dir="").deadlines, "slots_s": 0.4}
    outcome = heal(tmp_path, "wait", "1 0 forward 1", steps=30, slot_check=check, deadlines=waits)
    assert {replica for replica, _ in notes(tmp_path)} == {0, 1, 2}
    launcher_log = (tmp_path / "run" / "launcher.log").read_text()
    for line in (f"set aside for 0.5 s (1 of 2): {why}", f"never used again, as it was set aside 2 times before: {why}"):
        assert line in launcher_log
    outcome.assert_finished([0, 2])
