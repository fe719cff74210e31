"""Real processes of newcomers: where and when they start after a loss, and what they cost nobody."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cluster.meeting import Meeting
from megatron_recover.config import RecoverConfig
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.request import TOO_FEW
from megatron_recover.observe.files import log_name
from megatron_recover.observe.verify.check import check, describe
from tests import forks
from tests.cluster.jobs import ROOT, Outcome, Spec, command, run
from tests.cluster.running import FOR_EVER, Running, Start
from tests.cluster.test_kills import fault
from tests.cluster.waiting import until_ended

pytestmark = pytest.mark.timeout(180)
NEXT_NODE = 100
TOY = Path(__file__).with_name("newcomer_toy.py")
JOINING = TOY.with_name("joining_toy.py")
IN_PLACE = RecoverConfig(heal="in-place", heal_backoff_s=0.5, heal_budget=2)


class Healed:
    """A toy job whose newcomers do as `mode` says (`newcomer_toy.py`); it ends when a test has seen enough."""

    def __init__(
        self, start: Start, tmp_path: Path, mode: str, *faults: str, config: RecoverConfig = IN_PLACE, **others: object
    ):
        self.folder = tmp_path
        (tmp_path / "mode").write_text(mode)
        spec = Spec(
            run_dir=str(tmp_path / "run"), faults=tuple(map(fault, faults)), config=config, heals=True,
            sums_dir=str(tmp_path), **{"replicas": 3, "steps": FOR_EVER, "pace_s": 0.02, "script": str(TOY), **others},
        )  # fmt: skip
        self.job: Running = start(spec)

    @property
    def notes(self) -> dict[tuple[int, int], dict]:
        return notes(self.folder)

    @property
    def newcomers(self) -> list[int]:
        return sorted({replica for replica, _ in self.notes if replica >= self.job.spec.replicas})

    @property
    def said(self) -> str:
        log = self.folder / "run" / "launcher.log"
        return log.read_text() if log.exists() else ""

    def end(self, roster: list[int]) -> Outcome:
        """End the job; the survivors trained on alike, and no process ever met a former one in its slot."""
        self.job.launcher.terminate()
        outcome = self.job.end()
        assert outcome.exit_code == ExitCode.INTERRUPTED and outcome.roster == tuple(roster), outcome.output
        outcome.assert_exactly_once()
        verdict = check(self.folder / "run")
        assert verdict.holds, describe(verdict)
        assert all(note["lived"] == [] for note in self.notes.values())
        return outcome


def notes(folder: Path) -> dict[tuple[int, int], dict]:
    """(replica, slot) -> what the rank there has noted; slots of node 1 are numbered from `NEXT_NODE`."""
    found = {}
    for file in folder.glob("slot-*.json"):
        _, node, slot, replica = file.stem.split("-")
        found[int(replica), int(slot) + NEXT_NODE * int(node)] = json.loads(file.read_text())
    return found


def test_a_newcomer_starts_in_the_slots_of_the_lost_replica_once_all_of_it_has_ended(start: Start, tmp_path: Path) -> None:
    healed = Healed(start, tmp_path, "wait", "1 0 forward 1")
    logs = [tmp_path / "run" / log_name(3, rank) for rank in (0, 1)]
    healed.job.until(lambda: all(log.exists() and log.stat().st_size for log in logs), "the lines of the newcomer")
    begun = healed.job.num_applied()
    healed.job.until(lambda: healed.job.num_applied() > begun + 5, "the others to train on")
    outcome = healed.end([0, 2])
    found = healed.notes
    assert sorted(found) == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 2), (3, 3)], outcome.events
    for rank in (0, 1):
        mine, former = found[3, 2 + rank], found[1, 2 + rank]
        told, before = mine["context"], former["context"]
        assert told["newcomer"] and (told["replica"], told["rank"]) == (3, rank)
        changed = {name for name in told if told[name] != before.get(name)}
        assert changed <= {"newcomer", "replica", "leader", "faults"}, "else it is a rank like any other"
        assert mine["descriptors"] == former["descriptors"]
        assert logs[rank].read_text() == f"newcomer 3 rank {rank}\n"
    assert found[3, 2]["context"]["leader"] == found[3, 3]["context"]["leader"]
    announced = [each.roster for each in outcome.of(trace.Generation)]
    assert announced[:2] == [(0, 1, 2), (0, 2)] and set(announced[2:]) <= {(0, 2)}, "a newcomer alone is in no roster"


def test_off_forms_nobody(start: Start, tmp_path: Path) -> None:
    healed = Healed(start, tmp_path, "wait", "1 0 forward 1", config=RecoverConfig(heal="off"))
    healed.job.until(lambda: healed.job.num_applied() > 30, "training")
    healed.end([0, 2])
    assert healed.newcomers == [] and "newcomer" not in healed.said


def test_several_losses_are_healed_at_once(start: Start, tmp_path: Path) -> None:
    healed = Healed(start, tmp_path, "wait", "1 0 forward 1", "2 1 forward 1", replicas=4)
    healed.job.until(lambda: len(healed.notes) == 12, "two newcomers")
    healed.end([0, 3])
    assert {slot for replica, slot in healed.notes if replica > 3} == {2, 3, 4, 5} and healed.newcomers == [4, 5]


@pytest.mark.parametrize("mode", ["abort", "exit 0", "exit 7"])
def test_newcomers_that_break_again_and_again_cost_their_slots_and_not_the_job(start: Start, tmp_path: Path, mode: str) -> None:
    """Killed from outside, the first loss is no break of the slot; two are, and then one after each back-off."""
    healed = Healed(start, tmp_path, mode, "1 0 forward 1")
    healed.job.until(lambda: "never used again" in healed.said, "the end of the budget")
    healed.end([0, 2])
    assert healed.newcomers in ([3, 4, 5, 6], [3, 4, 5, 6, 7]), "two breaks, then tries after 0.5 s and 1 s, by either rank"
    assert "set aside for 0.5 s (1 of 2): replica 4: " in healed.said and "set aside for 1 s (2 of 2)" in healed.said
    assert "may live" not in healed.said, "that is so for an instant after every loss"


def test_a_spare_slot_takes_the_place_of_one_that_breaks_every_rank(start: Start, tmp_path: Path) -> None:
    healed = Healed(start, tmp_path, "abort 0-3", "1 0 forward 1", num_spares=1, config=RecoverConfig(heal="in-place"))
    healed.job.until(lambda: (5, 6) in healed.notes, "a newcomer in the spare slot")
    healed.end([0, 2])
    assert {slot for replica, slot in healed.notes if replica == 5} == {2, 6} and healed.newcomers == [3, 4, 5]
    assert "no newcomer is formed on node 0: slot 3: set aside for 60 s (1 of 3): replica 4: crashed" in healed.said


@pytest.mark.parametrize(("check", "why"), [("refuse", "a test says so"), ("hang", "its check has not ended within 0.4 s")])
def test_slots_that_fail_their_check_are_put_off_and_nobody_is_started(
    start: Start, tmp_path: Path, check: str, why: str
) -> None:
    waits = {**Spec(run_dir="").deadlines, "slots_s": 0.4}
    healed = Healed(start, tmp_path, "wait", "1 0 forward 1", slot_check=check, deadlines=waits)
    healed.job.until(lambda: f"put off for 2 s: {why}" in healed.said, "more tries than the budget has")
    healed.end([0, 2])
    assert healed.newcomers == [] and f"put off for 0.5 s: {why}" in healed.said and "set aside" not in healed.said


def test_a_newcomer_that_nobody_can_admit_any_more_ends_with_the_coordinator(start: Start, tmp_path: Path) -> None:
    healed = Healed(start, tmp_path, "wait", "1 0 forward 1")
    healed.job.until(lambda: len(healed.notes) == 8, "the newcomer")
    newcomer = [psutil.Process(note["pid"]) for (replica, _), note in healed.notes.items() if replica == 3]
    healed.job.coordinator.kill()
    until_ended(newcomer)
    begun = healed.job.num_applied()
    healed.job.until(lambda: healed.job.num_applied() > begun + 5, "the others to train on")


def test_the_others_train_to_their_end_without_a_newcomer_that_is_turned_away_as_the_coordinator_is_lost(
    tmp_path: Path,
) -> None:
    """The launchers take it for a member: only the members know that they go on without it."""
    toy = str(TOY.with_name("turning_away_toy.py"))
    spec = Spec(
        run_dir=str(tmp_path / "run"), faults=(fault("1 0 backward 3"),), config=IN_PLACE, heals=True, ranks=1, steps=FOR_EVER,
        pace_s=0.02, script=toy, deadlines=Spec(run_dir="").deadlines | {"node_s": 1.0, "stall_s": 4.0},
    )  # fmt: skip
    outcome = run(spec)
    assert outcome.exit_code == ExitCode.OK and outcome.roster == (0, 2, 3), outcome.output
    assert "replica 3 is ended (rank 0: exit code 13), which joined before the coordinator was lost" in outcome.output
    outcome.assert_exactly_once()
    assert outcome.sums(0, 0)[-1] == outcome.sums(2, 0)[-1] and not outcome.sums(3, 0)
    verdict = check(tmp_path / "run")
    assert verdict.holds, describe(verdict)


def test_a_stopped_newcomer_holds_up_neither_the_job_nor_its_end(start: Start, tmp_path: Path) -> None:
    healed = Healed(start, tmp_path, "wait", "1 0 forward 1")
    healed.job.until(lambda: len(healed.notes) == 8, "the newcomer")
    for (replica, _), note in healed.notes.items():
        if replica == 3:
            os.kill(note["pid"], signal.SIGSTOP)
    begun = healed.job.num_applied()
    healed.job.until(lambda: healed.job.num_applied() > begun + 5, "the others to train on")
    asked = time.monotonic()
    healed.end([0, 2])
    assert time.monotonic() - asked < IN_PLACE.deadlines.end_s / 2


def test_ranks_from_warm_processes_are_replaced_too(start: Start, tmp_path: Path) -> None:
    """No process is left that has imported in advance: one more imports, and is the rank when it is done."""
    healed = Healed(start, tmp_path, "wait", "1 0 forward 1", replicas=2, ranks=1, rank_start="warm")
    healed.job.until(lambda: healed.newcomers, "the newcomer")
    healed.end([0])
    assert sorted(healed.notes) == [(0, 0), (1, 1), (2, 1)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_replica_over_two_nodes_is_replaced_on_both(tmp_path: Path) -> None:
    """Three slots each: replica 1 has one rank on each node, and loses the one on node 1."""
    (key := tmp_path / "key").write_text("a key that only this test knows of\n")
    key.chmod(0o600)
    (tmp_path / "mode").write_text("wait")
    port, nodes = free_port(), list[forks.Program]()
    with contextlib.ExitStack() as stack:
        for node in range(2):
            meeting = Meeting(
                least_nodes=2, most_nodes=2, node_rank=node, host="127.0.0.1", port=port, flag="--master-addr", join_s=60
            )
            spec = Spec(
                run_dir=str(tmp_path / "run"), replicas=3, steps=20, pace_s=0.1, config=IN_PLACE, heals=True, script=str(TOY),
                slots=3, sums_dir=str(tmp_path), faults=(fault("1 1 forward 1"),), meeting=meeting, key_file=str(key),
            )  # fmt: skip
            output = stack.enter_context(open(tmp_path / f"{node}.out", "wb"))
            nodes.append(forks.start(command(spec), cwd=ROOT, environment=os.environ, output=output.fileno()))
            stack.callback(nodes[-1].kill)
        codes = [each.wait(100) for each in nodes]
    assert codes == [0, 0], [(tmp_path / f"{node}.out").read_text() for node in range(2)]
    found = notes(tmp_path)
    assert sorted(slot for replica, slot in found if replica == 1) == sorted(slot for replica, slot in found if replica == 3)
    mine = [note["context"] for (replica, _), note in found.items() if replica == 3]
    assert {each["rank"] for each in mine} == {0, 1} and len({(each["leader"], each["store"]) for each in mine}) == 1
    assert all(each["store"] and each["newcomer"] for each in mine)
    assert all(note["lived"] == [] for note in found.values())


# --- Fewer replicas than --recover-min-replicas ------------------------------------------------------------------------

TWO_OR_WAIT = msgspec.structs.replace(IN_PLACE, min_replicas=2, below_min="wait", heal_backoff_s=0.1, heal_budget=1)


def test_a_job_with_too_few_replicas_trains_on_while_a_newcomer_forms_and_ends_once_none_can(
    start: Start, tmp_path: Path
) -> None:
    healed = Healed(start, tmp_path, "wait", "1 0 forward 1", replicas=2, ranks=1, config=TWO_OR_WAIT)
    healed.job.until(lambda: healed.newcomers == [2], "the newcomer")
    begun = healed.job.num_applied()
    healed.job.until(lambda: healed.job.num_applied() > begun + 5, "the other to train on")
    (tmp_path / "mode").write_text("abort")
    os.kill(healed.notes[2, 1]["pid"], signal.SIGKILL)
    outcome = healed.job.end()
    assert outcome.exit_code == ExitCode.TOO_FEW_REPLICAS and outcome.roster == (0,), outcome.output
    outcome.assert_exactly_once()
    *before, last = outcome.of(trace.Committed)
    assert last.requests == (TOO_FEW,) and not any(each.requests for each in before), "nobody is asked to end before"
    assert len(healed.newcomers) > 1, "others were tried"
    verdict = check(tmp_path / "run")
    assert verdict.holds, describe(verdict)


def test_a_job_that_has_waited_for_a_newcomer_goes_on_with_it(start: Start, tmp_path: Path) -> None:
    healed = Healed(start, tmp_path, "join", "1 0 forward 1", replicas=2, ranks=1, config=TWO_OR_WAIT, script=str(JOINING))
    healed.job.until(lambda: (tmp_path / "sums-2-0.jsonl").exists(), "a step of the newcomer")
    begun = healed.job.num_applied()
    healed.job.until(lambda: healed.job.num_applied() > begun + 2, "steps of both")
    outcome = healed.end([0, 2])
    assert [each.roster for each in outcome.of(trace.Generation)][:2] == [(0, 1), (0,)]
    assert not any(TOO_FEW in each.requests for each in outcome.of(trace.Committed))


def test_by_default_a_job_with_too_few_replicas_ends_in_the_step_of_the_loss(tmp_path: Path) -> None:
    config = msgspec.structs.replace(TWO_OR_WAIT, below_min=RecoverConfig().below_min)
    outcome = run(
        Spec(run_dir=str(tmp_path / "run"), faults=(fault("1 0 forward 1"),), config=config, heals=True, replicas=2, ranks=1,
             steps=FOR_EVER, pace_s=0.02, script=str(JOINING))
    )  # fmt: skip
    assert outcome.exit_code == ExitCode.TOO_FEW_REPLICAS and outcome.roster == (0,), outcome.output
    assert [each.step for each in outcome.of(trace.Committed) if TOO_FEW in each.requests] == [1], "the step of the loss"
    assert len(outcome.sums(0, 0)) == 2
