"""`status` and `drain` of a running job, from its folder alone."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.cli import drain, status
from megatron_recover.cluster.requests import Requests
from megatron_recover.cluster.status import (
    ANSWERS,
    REQUESTS,
    STATUS_FILE,
    Answer,
    NodeStatus,
    Request,
    Seen,
    Status,
    StatusKeeper,
    ask,
    read,
    targets,
    write,
)
from megatron_recover.control_plane.node_messages import DrainAnswer, JobState, NodeState
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.label import label_of
from megatron_recover.host.addresses import host_name
from megatron_recover.observe.verify.check import check, describe
from tests.cluster.jobs import Spec
from tests.cluster.running import FOR_EVER, Start

pytestmark = pytest.mark.timeout(180)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `drain` prints where it refuses."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        drain.main(words)
    assert end.value.code == ExitCode.BAD_INPUT
    return capsys.readouterr().err


def test_a_replica_is_given_back_and_the_last_ones_are_not(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    job = start(Spec(run_dir=str(run_dir), steps=FOR_EVER))
    job.until(lambda: (now := read(run_dir)) and now.generation, "the state of the job")
    assert status.main([str(run_dir), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["roster"], told["losses"], told["exit_code"]) == ([0, 1, 2], 0, None)
    assert [(node["name"], node["state"], node["replicas"]) for node in told["nodes"]] == [(host_name(), "here", [0, 1, 2])]
    assert "7 is no replica and no node of the job; replicas are 0 1 2" in refusal(["7", str(run_dir)], capsys)
    assert drain.main(["0", str(run_dir)]) == ExitCode.OK
    assert "replica 0 has left; 2 replicas go on\n" in capsys.readouterr().out
    assert "no replica would stay" in refusal([host_name(), str(run_dir)], capsys)
    reached = len(job.output.read_text())
    job.launcher.terminate()
    outcome = job.end()
    assert outcome.exit_code == ExitCode.INTERRUPTED and len(outcome.output) > reached
    outcome.assert_exactly_once()
    assert [event.left for event in outcome.of(trace.Generation) if event.left] == [(0,)]
    assert not [loss for event in outcome.of(trace.Generation) for loss in event.losses], "nothing was lost"
    verdict = check(run_dir)
    assert verdict.holds, describe(verdict)
    assert status.main([str(run_dir)]) == 0
    told = capsys.readouterr().out
    newest = max(label_of(event.label).iteration for event in outcome.of(trace.Committed))
    assert "ended with exit code 15" in told, told
    assert f", iteration {newest}, 2 replicas (1 2), 2 wanted, 0 lost; " in told, told
    assert "no checkpoint: --save was not set" in told
    assert "no job trains in" in refusal(["1", str(run_dir)], capsys)
    assert not list((run_dir / REQUESTS).iterdir())
    job.assert_nothing_left()


def test_a_folder_without_a_job_has_no_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        status.main([str(tmp_path)])
    assert end.value.code == ExitCode.BAD_INPUT and "give the --run-dir of a job" in capsys.readouterr().err
    assert "no job trains in" in refusal(["1", str(tmp_path)], capsys)


def test_the_state_at_the_end_is_that_of_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The coordinator tells the state each beat. The events of the end are newer."""
    keeper = StatusKeeper(tmp_path, lambda request: None)
    keeper.take(running(step=200))
    keeper.see(Seen(step=260, iteration=249, iterations=4000, saved=249, checkpoint="newest checkpoint: iteration 249 in /c"))
    keeper.finish(30)
    assert status.main([str(tmp_path)]) == 0
    assert ", iteration 249 of 4000, 2 replicas (0 1), 2 wanted, 0 lost; newest checkpoint: iteration 249 in /c" in (
        capsys.readouterr().out
    )
    found = read(tmp_path)
    assert found is not None and (found.step, found.saved) == (260, 249)


def test_a_state_without_an_iteration_has_the_number_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, running(step=7))
    assert status.main([str(tmp_path)]) == 0
    assert "generation 1, 7 steps, evaluations and saves included, 2 replicas" in capsys.readouterr().out


def test_newcomers_that_form_are_told_and_can_be_named_once_they_are_members(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = StatusKeeper(tmp_path, lambda request: None)
    keeper.take(running(roster=(0, 3), losses=1))
    keeper.see(Seen(step=9, iteration=9, iterations=None, saved=None, checkpoint="no checkpoint", forming=(3, 4)))
    keeper.finish(30)
    assert status.main([str(tmp_path)]) == 0
    assert "2 replicas (0 3), 2 wanted, 1 lost, replica 4 forms; no checkpoint" in capsys.readouterr().out
    nodes = (NodeStatus(0, "n0", "here", (0, 3)),)
    assert [targets(name, 2, nodes, (0, 3)) for name in ("3", "1", "4", "n0")] == [(3,), (), (), (0, 3)]


def test_a_job_that_has_been_scaled_is_told_with_the_number_that_it_wants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = (NodeStatus(0, "n0", "here", (0, 1, 2)), NodeStatus(1, "n1", "here", (2,)), NodeStatus(2, "n2", "here", ()))
    for roster, wanted, said in (
        ((0, 1, 2), 3, "3 replicas (0 1 2), 3 wanted, 0 lost"),
        ((0, 1, 2), 2, "3 replicas (0 1 2), 2 wanted, 0 lost"),
        ((0,), 2, "1 replica (0), 2 wanted, 0 lost"),
        ((), 2, "0 replicas (none), 2 wanted, 0 lost"),
    ):
        write(tmp_path, running(step=1, roster=roster, wanted=wanted, nodes=nodes))
        assert status.main([str(tmp_path)]) == 0
        told = capsys.readouterr().out
        assert f"generation 1, 1 step, evaluations and saves included, {said}; " in told, told
    places = ["node 0  n0  here  replicas 0 1 2", "node 1  n1  here  replica 2", "node 2  n2  here  no replica"]
    assert told.splitlines()[2:5] == places


@pytest.mark.parametrize("target", ["", " "])
def test_an_empty_target_is_refused_with_the_reason(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, running())
    said = refusal([target, str(tmp_path)], capsys)
    assert "REPLICA|NODE is empty; give the number of a replica or the name of a node" in said
    assert not (tmp_path / REQUESTS).exists()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("4", "replica 4 is formed, and no member yet; ask again once it has joined"),
        ("n1", "node n1 is lost: nothing of it is in use"),
        ("5", "5 is no replica and no node of the job; replicas are 0 1, nodes are n0, n1"),
    ],
)
def test_why_nobody_has_to_leave_is_said(target: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, running(forming=(4,), nodes=(NodeStatus(0, "n0", "here", (0, 1)), NodeStatus(1, "n1", "lost", (2,)))))
    assert said in refusal([target, str(tmp_path)], capsys)


def running(**changes: Any) -> Status:
    """The state of a job with two replicas on one node."""
    state = Status(
        at=1.0, replicas=2, roster=(0, 1), generation=1, step=1, losses=0, saved=None,
        nodes=(NodeStatus(0, "n0", "here", (0, 1)),),
    )  # fmt: skip
    return msgspec.structs.replace(state, **changes)


class Folder:
    """A run directory, and the requests in it that a recorder's thread has passed."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("megatron_recover.cluster.status._INTERVAL_S", 0.01)
        self.run_dir, self.passed, self.keepers = run_dir, list[Request](), list[StatusKeeper]()
        self.begin()

    def begin(self) -> None:
        """Start the thread, in the place of one before."""
        self.keeper = StatusKeeper(self.run_dir, self.passed.append)
        self.keepers.append(self.keeper)
        self.keeper.take(running())
        self.until(lambda: (now := read(self.run_dir)) and now.exit_code is None)

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)

    def die(self) -> None:
        """End the thread as a kill does: nothing is passed, written or removed any more."""
        self.keeper._look = lambda folder, answered, is_last: None  # type: ignore[method-assign,misc,assignment]
        self.keeper._newest = None
        self.keeper.finish(30)

    @property
    def names(self) -> list[str]:
        return sorted(os.listdir(self.run_dir / REQUESTS))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    made = Folder(tmp_path, monkeypatch)
    yield made
    for keeper in made.keepers:
        keeper.finish(30)


def test_requests_come_in_their_order_once_and_what_is_none_is_removed(folder: Folder) -> None:
    place = folder.run_dir / REQUESTS
    assert place.stat().st_mode & 0o777 == 0o700
    (place / "0-no-request.json").write_text("{")
    (place / "1-partial").write_text("{")
    (place / "1-long.json").write_text(json.dumps({"id": "1-long", "drain": "1" * 5000, "by": "a@b"}))
    (place / "1-other.json").write_text(json.dumps({"id": "1-another", "drain": "1", "by": "a@b"}))
    for name, vast in (("1-vast", 10**30), ("1-negative", -(10**30))):  # no message has room for such a number
        (place / f"{name}.json").write_text(json.dumps({"id": name, "replicas": vast, "by": "a@b"}))
    (place / "1-unreadable.json").mkdir()
    first, second = ask(folder.run_dir, "1", "a@b"), ask(folder.run_dir, "2", "a@b")
    folder.until(lambda: len(folder.passed) == 2)
    assert folder.passed == [Request(id=first, drain="1", by="a@b"), Request(id=second, drain="2", by="a@b")]
    folder.until(lambda: folder.names == sorted(["1-partial", "1-unreadable.json", f"{first}.json", f"{second}.json"]))
    folder.keeper.take(running(answers=(Answer(first, ""),)))
    folder.until(lambda: f"{first}.json" not in folder.names)
    folder.keeper.finish(30)
    assert len(folder.passed) == 2 and folder.names == ["1-partial", "1-unreadable.json"]


def test_a_request_that_a_recorder_dies_with_is_passed_by_the_next(folder: Folder) -> None:
    asked = ask(folder.run_dir, "1", "a@b")
    folder.until(lambda: folder.passed)
    folder.die()
    folder.begin()
    folder.until(lambda: len(folder.passed) == 2)
    assert {each.id for each in folder.passed} == {asked}


def test_a_fifo_a_link_or_a_file_of_somebody_else_holds_up_and_asks_for_nothing(folder: Folder, tmp_path: Path) -> None:
    place = folder.run_dir / REQUESTS
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"id": "1-link", "drain": "1", "by": "a@b"}))
    os.mkfifo(place / "0.json")
    (place / "1-link.json").symlink_to(other)
    foreign = tmp_path / "2-foreign.json"
    foreign.write_text(json.dumps({"id": "2-foreign", "drain": "1", "by": "a@b"}))
    if os.geteuid() == 0:
        os.chown(foreign, 12345, 12345)
        os.rename(foreign, place / "2-foreign.json")
    asked = ask(folder.run_dir, "1", "a@b")
    folder.until(lambda: folder.passed)
    assert [each.id for each in folder.passed] == [asked]
    folder.until(lambda: folder.names == ["1-link.json", f"{asked}.json"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of somebody else")
def test_a_folder_of_somebody_else_has_requests_refused_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / REQUESTS).mkdir()
    os.chown(tmp_path / REQUESTS, 12345, 12345)
    folder = Folder(tmp_path, monkeypatch)
    (tmp_path / REQUESTS / "0-no-request.json").touch()
    asked = ask(tmp_path, "1", "a@b")
    folder.until(lambda: (now := read(tmp_path)) and now.answers)
    folder.keeper.take(running(step=2))
    folder.until(lambda: (now := read(tmp_path)) and now.step == 2)
    now = read(tmp_path)
    assert now is not None and [each.id for each in now.answers] == [asked]
    assert "belongs to user 12345, and the job to user 0: remove the folder" in now.answers[0].refused
    assert not folder.passed
    folder.keeper.finish(30)
    assert folder.names == ["0-no-request.json", f"{asked}.json"], "the folder is not the job's"


def test_a_folder_that_cannot_be_closed_to_others_has_requests_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may have one mode for all files."""
    (tmp_path / REQUESTS).mkdir(mode=0o755)

    def is_fixed(descriptor: int, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", is_fixed)
    folder = Folder(tmp_path, monkeypatch)
    ask(tmp_path, "1", "a@b")
    folder.until(lambda: (now := read(tmp_path)) and now.answers)
    now = read(tmp_path)
    assert now is not None and "is open to other users, and cannot be closed" in now.answers[0].refused
    assert not folder.passed
    folder.keeper.finish(30)


def test_no_file_is_removed_through_a_link_at_the_name_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_dir.mkdir()
    elsewhere.mkdir()
    for name in ("0-none.json", "1-other.json"):
        (elsewhere / name).write_text(json.dumps({"id": "1-other", "drain": "1", "by": "a@b"}))
    (run_dir / REQUESTS).symlink_to(elsewhere)
    folder = Folder(run_dir, monkeypatch)
    folder.keeper.take(running(step=2))
    folder.until(lambda: (now := read(run_dir)) and now.step == 2)
    assert "requests is a link, which the job does not follow: remove it" in refusal(["1", str(run_dir)], capsys)
    folder.keeper.finish(30)
    assert not folder.passed and folder.names == ["0-none.json", "1-other.json"]


def test_a_folder_that_has_made_room_for_the_jobs_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / REQUESTS).symlink_to(tmp_path / "nowhere")
    folder = Folder(tmp_path, monkeypatch)
    (tmp_path / REQUESTS).unlink()
    folder.until((tmp_path / REQUESTS).is_dir)
    asked = ask(tmp_path, "1", "a@b")
    folder.until(lambda: folder.passed)
    folder.keeper.finish(30)
    assert [each.id for each in folder.passed] == [asked] and not folder.names


def test_a_link_that_takes_the_place_of_the_folder_leads_nowhere(folder: Folder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "0-none.json").touch()
    (folder.run_dir / REQUESTS).rename(tmp_path / "first")
    (folder.run_dir / REQUESTS).symlink_to(elsewhere)
    folder.keeper.take(running(step=2))
    folder.until(lambda: (now := read(folder.run_dir)) and now.step == 2)
    folder.keeper.finish(30)
    assert folder.names == ["0-none.json"]


def carrier(found: list[Request], why_lost: Callable[[], str] = str) -> tuple[Requests, list[Any], list[Status]]:
    """The launcher's side of a job with two replicas, the messages that it sends and the states that it has written."""
    sent: list[Any] = []
    kept: list[Status] = []

    def take() -> list[Request]:
        taken = found[:]
        found.clear()
        return taken

    account = SimpleNamespace(lost_members={1}, saved=None, is_complete=True)
    recording: Any = SimpleNamespace(requests=take, account=account, keep=kept.append)
    job: Any = SimpleNamespace(num_replicas=2, node=0)
    return Requests(job, recording, sent.append, why_lost), sent, kept


STATE = JobState(1, (0, 1), 1, (NodeState(0, "n0", "here", (0, 1)),))


def test_a_request_is_carried_out_once_when_the_state_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Request(id="i", drain="9" * 3000, by="a@b"), Request(id="k", drain="n0", by="b" * 4000)]
    made, sent, kept = carrier(found)
    made.carry_out()
    assert not sent and not kept
    made.keep(STATE)
    made.carry_out()
    assert kept[0].lost == (1,)
    assert [(each.node, each.replicas, each.id) for each in sent] == [("n0", (), "k")] and len(sent[0].reason) < 250
    assert kept[-1].answers == (Answer("i", f"the job has no replica {'9' * 100} and no node of that name"),)
    found += [Request(id="k", drain="n0", by="b"), Request(id="i", drain="9", by="b")]
    made.carry_out()
    assert len(sent) == 1 and len(kept[-1].answers) == 1
    made.answered(DrainAnswer("k", tuple((each, "no replica would stay") for each in range(1000))))
    assert len(kept[-1].answers[1].refused) < 1100
    for number in range(ANSWERS):
        found.append(Request(id=str(number), drain="none", by="a@b"))
    made.carry_out()
    assert "i" not in {each.id for each in kept[-1].answers}
    found.append(Request(id="i", drain="none", by="a@b"))
    made.carry_out()
    assert kept[-1].answers[-1] == Answer("i", f"the job has no replica {'9' * 100} and no node of that name"), (
        "a recorder asks for it again"
    )


def test_without_its_coordinator_a_job_refuses_what_nobody_can_carry_out_any_more() -> None:
    found, why = [Request(id="i", drain="1", by="a@b")], [""]
    made, sent, kept = carrier(found, lambda: why[0])
    made.keep(STATE)
    made.carry_out()
    assert [each.id for each in sent] == ["i"] and not kept[-1].answers
    why[0] = "the coordinator is gone (its process has ended)"
    found += [Request(id="k", drain="", by="a@b", replicas=1)]
    for _ in range(2):
        made.carry_out()
    refused = f"{why[0]}: nobody can change the job any more; it ends at the next save point"
    assert len(sent) == 1 and kept[-1].answers == (Answer("i", refused), Answer("k", refused))


def test_drain_says_whether_the_job_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / REQUESTS).mkdir()
    write(tmp_path, running())
    monkeypatch.setattr(drain, "_LOOK_S", 0.01)
    assert drain.main(["1", str(tmp_path), "--wait", "0.1"]) == ExitCode.UNFINISHED
    assert "the job has not answered within 0.1 s; the request stays in" in capsys.readouterr().out
    monkeypatch.setattr("megatron_recover.cluster.status.ask", lambda *arguments: "i")
    write(tmp_path, running(answers=(Answer("i", ""),)))
    assert drain.main(["1", str(tmp_path), "--wait", "0.1"]) == ExitCode.UNFINISHED
    assert "replica 1 has not left within 0.1 s; it leaves after the next common step" in capsys.readouterr().out


def test_the_age_of_a_state_is_not_taken_from_the_clocks_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, running(at=time.time() + 3600))
    os.utime(tmp_path / STATUS_FILE, (0.0, time.time() - 500))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert status.main([str(tmp_path)]) == 0
    assert "running, as of 500 s ago: it changes with each step, so look" in capsys.readouterr().out
    os.utime(tmp_path / STATUS_FILE)
    assert status.main([str(tmp_path)]) == 0
    assert "running, as of 0 s ago\n" in capsys.readouterr().out


def test_a_folder_that_accepts_no_file_has_the_age_by_this_hosts_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(folder: Path) -> os.stat_result:
        raise PermissionError

    write(tmp_path, running())
    os.utime(tmp_path / STATUS_FILE, (0.0, time.time() - 500))
    monkeypatch.setattr("megatron_recover.cluster.status.made_now", refuse)
    assert status.main([str(tmp_path)]) == 0
    assert "running, as of 500 s ago" in capsys.readouterr().out


def test_a_target_means_the_same_to_drain_and_to_the_job() -> None:
    nodes = (NodeStatus(0, "42", "here", (0, 1)), NodeStatus(1, "1", "here", (2,)), NodeStatus(2, "07", "here", (2, 3)))
    for target, members in {"1": (1,), "3": (), "07": (2,), "42": (0, 1), "7": (), "n": (), "9" * 5000: ()}.items():
        assert targets(target, 4, nodes, (0, 1, 2)) == members, target


def test_a_replica_that_is_lost_before_it_leaves_has_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [running(), running(), running(roster=(0,), losses=1, lost=(1,))]
    monkeypatch.setattr("megatron_recover.cluster.status.read", lambda run_dir: states.pop(0))
    monkeypatch.setattr("megatron_recover.cluster.status.ask", lambda *arguments: "i")
    monkeypatch.setattr(drain, "_LOOK_S", 0.01)
    assert drain.main(["1", str(tmp_path)]) == ExitCode.FAILED
    assert "replica 1 was lost before it left; 1 replica goes on\n" in capsys.readouterr().out


def test_several_replicas_that_have_left_are_told_as_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = (NodeStatus(0, "n0", "here", (0,)), NodeStatus(1, "n1", "here", (1, 2)))
    states = [running(replicas=3, roster=(0, 1, 2), nodes=nodes), running(replicas=3, roster=(0,), nodes=nodes)]
    monkeypatch.setattr("megatron_recover.cluster.status.read", lambda run_dir: states.pop(0))
    monkeypatch.setattr("megatron_recover.cluster.status.ask", lambda *arguments: "i")
    assert drain.main(["n1", str(tmp_path)]) == ExitCode.OK
    assert capsys.readouterr().out == "replicas 1 2 have left; 1 replica goes on\n"


def test_a_node_without_members_is_drained_once_the_job_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = (NodeStatus(0, "n0", "here", (0, 1)), NodeStatus(1, "n1", "spare", ()))
    states = [running(nodes=nodes), running(nodes=nodes), running(nodes=nodes, answers=(Answer("i", "", "no new replica"),))]
    monkeypatch.setattr("megatron_recover.cluster.status.read", lambda run_dir: states.pop(0))
    monkeypatch.setattr("megatron_recover.cluster.status.ask", lambda *arguments: "i")
    monkeypatch.setattr(drain, "_LOOK_S", 0.01)
    assert drain.main(["n1", str(tmp_path)]) == ExitCode.OK
    assert capsys.readouterr().out == "no new replica\nno replica had to leave; 2 replicas go on\n" and not states


def test_drain_waits_for_the_members_that_the_job_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newcomer may have become a member there since the state was read."""
    nodes = (NodeStatus(0, "n0", "here", (0,)), NodeStatus(1, "n1", "here", (1,)))
    answers = (Answer("i", "", "replicas 1 2 leave", (1, 2)),)
    rosters = [(0, 1), (0, 1, 2), (0, 2), (0,)]
    states = [running(nodes=nodes, roster=roster, answers=answers if number else ()) for number, roster in enumerate(rosters)]
    monkeypatch.setattr("megatron_recover.cluster.status.read", lambda run_dir: states.pop(0))
    monkeypatch.setattr("megatron_recover.cluster.status.ask", lambda *arguments: "i")
    monkeypatch.setattr(drain, "_LOOK_S", 0.01)
    assert drain.main(["n1", str(tmp_path)]) == ExitCode.OK
    assert "replicas 1 2 have left; 1 replica goes on\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the folder of a job, or --jobid"),
        (["RUN", "--jobid", "7"], "give only one of RUN_DIR and --jobid"),
        (["--jobid", "abc"], "--jobid is abc; give the number of a Slurm job, such as 4711"),
        ([__file__], f"{__file__} is no folder; give the --run-dir of a job"),
    ],
)
def test_status_and_drain_want_either_the_folder_or_the_slurm_job(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb, line in ((status, words), (drain, ["3", *words])):
        with pytest.raises(SystemExit) as end:
            verb.main(line)
        assert (end.value.code, capsys.readouterr().err.endswith(f": {said}\n")) == (ExitCode.BAD_INPUT, True)
