"""What an operator is told at once: which events, with what in them, and always with the same numbers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from megatron_recover import trace
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.observe.follow import notices
from megatron_recover.observe.follow.notices import AnyNotice, Degraded, Ended, Lost, Notices
from tests.observe import traces


def made() -> Notices:
    return Notices(run_dir="/runs/x", host="node-1", began_at=1_700_000_000.0)


def told(events: Iterable[trace.Event]) -> list[AnyNotice]:
    run = made()
    return [notice for event in events for notice in run.take(event)]  # type: ignore[arg-type]


def test_a_run_with_two_losses_tells_each_loss_that_it_goes_on_and_its_end() -> None:
    found = told(traces.faulty_run().events)
    assert [(one.number, type(one).__name__) for one in found] == [
        (1, "Lost"), (2, "Degraded"), (3, "Lost"), (4, "Degraded"), (5, "Ended"),
    ]  # fmt: skip
    described = [msgspec.to_builtins(one) for one in found]
    assert {(one["v"], one["host"], one["run_dir"], one["dropped"]) for one in described} == {(1, "node-1", "/runs/x", 0)}
    assert described[0]["time"].startswith("2023-11-14T22:13:20.") and described[0]["time"].endswith("+00:00")
    assert [(one["event"], one.get("replicas_live"), one.get("replicas_configured")) for one in described] == [
        ("lost", 2, 3), ("degraded", 2, 3), ("lost", 1, 3), ("degraded", 1, 3), ("ended", None, None),
    ]  # fmt: skip
    lost, degraded, ended = described[0], described[1], described[4]
    assert (lost["generation"], lost["num_lost"], lost["losses"][0]["kind"]) == (2, 1, "process ended")
    assert (degraded["generation"], degraded["replicas_min"]) == (2, 1)
    assert (ended["exit_code"], ended["name"], ended["last_committed_iteration"]) == (0, "ok", 5)


def test_a_loss_between_two_steps_is_followed_by_the_next_commit() -> None:
    """Who has begun no step when the loss comes records no recovery of one."""
    lost = trace.Generation(generation=2, roster=(0,), losses=(trace.Loss(replica=1, kind=LossKind.HUNG),))
    older = trace.Committed(replica=0, generation=1, step=4, label="train 5", digest="d", adopted=False, versions=())
    newer = msgspec.structs.replace(older, generation=2, step=5, label="train 6")
    assert [type(one).__name__ for one in told([lost, older])] == ["Lost"]
    found = told([lost, older, newer, msgspec.structs.replace(newer, step=6, label="train 7")])
    assert [type(one).__name__ for one in found] == ["Lost", "Degraded"]
    assert isinstance(found[1], Degraded) and found[1].last_committed_iteration == 6


def test_a_generation_without_a_loss_between_a_loss_and_the_commit_hides_no_degraded_run() -> None:
    """As after a broken link: the replicas are fewer all the same."""
    lost = trace.Generation(generation=2, roster=(0,), losses=(trace.Loss(replica=1, kind=LossKind.HUNG),))
    again = trace.Generation(generation=3, roster=(0,))
    commit = trace.Committed(replica=0, generation=3, step=5, label="train 6", digest="d", adopted=False, versions=())
    assert [type(one).__name__ for one in told([lost, again, commit])] == ["Lost", "Degraded"]


def test_a_quiet_run_tells_its_end_only() -> None:
    assert [type(one) for one in told(traces.quiet_run(3).events)] == [Ended]


def test_a_failed_save_is_told_with_what_is_durable() -> None:
    def save(phase: str, iteration: int) -> trace.Checkpoint:
        return trace.Checkpoint(replica=0, rank=0, iteration=iteration, phase=phase, detail="x" * 5000)  # type: ignore[arg-type]

    found = told([save("loaded", 0), save("failed", 10), save("finished", 20), save("started", 30), save("failed", 30)])
    saves = [one for one in found if isinstance(one, notices.SaveFailed)]
    assert [(one.iteration, one.last_durable_iteration) for one in saves] == [(10, None), (30, 20)]
    assert len(found) == 2 and len(saves[0].detail) == notices.MAX_TEXT


def test_a_notice_is_small_however_much_is_lost() -> None:
    """A command gets a notice as a whole, and nobody waits for its writer."""
    losses = tuple(trace.Loss(replica=each, kind=LossKind.HUNG, detail="why " * 1000) for each in range(4000))
    [lost] = told([trace.Generation(generation=2, roster=(4000,), losses=losses)])
    assert isinstance(lost, Lost) and (lost.num_lost, len(lost.losses)) == (4000, notices.MAX_LOSSES)
    assert len(msgspec.json.encode(lost)) < 2**16


def test_the_end_of_a_killed_launcher_is_told_without_an_exit_code() -> None:
    run = made()
    assert not run.has_ended
    ended = run.ended(None, notices.KILLED, 3.0)
    assert (ended.exit_code, ended.name, ended.reason, run.has_ended) == (None, "killed", notices.KILLED, True)
