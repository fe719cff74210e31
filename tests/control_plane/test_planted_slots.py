"""Slots used while a process of their former user lives: planted in the driver, and found by `check` in the trace."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.control_plane.node_messages import FenceDone, FormReplica, SlotsReady, StartReplica
from megatron_recover.core import slots
from megatron_recover.observe.history import History
from megatron_recover.observe.verify.check import violations
from tests.control_plane.test_healing import Start, lose, one_node
from tests.control_plane.test_healing import start as start  # the fixture
from tests.control_plane.test_nodes_driver import Agent, Town

pytestmark = pytest.mark.timeout(120)
STARTED = trace.RunStarted(t=0.0, replicas=2, layout=trace.Layout(tp=1, pp=2), determinism="fast", seed=1, argv=())


def end(town: Town, agent: Agent, replica: int) -> None:
    """All ranks of a replica have ended: its agent records that and reports it."""
    town.events.append(trace.Fenced(t=0.0, replica=replica, ranks=(0, 1)))
    agent.say(FenceDone(replica))


def found(town: Town) -> list[str]:
    """Print the history, and return what `check` says of it and INV-5."""
    events = [STARTED, *town.events]
    print(*events, sep="\n")
    broken = [each for each in violations(History(enumerate(events, start=1))) if each.invariant == "INV-5"]
    print(*(f"VIOLATED {each.invariant} at line {each.line}: {each.message}" for each in broken), sep="\n")
    return [each.message for each in broken]


def heal_twice(town: Town, agent: Agent, *, slowly: bool) -> None:
    """Member 1 is lost, then newcomer 2, which was ready. `slowly`: a process ends only after its slots were used again."""
    for replica, newcomer in ((1, 2), (2, 3)):
        lose(town, agent, replica)
        if not slowly:
            end(town, agent, replica)
        town.until(lambda newcomer=newcomer: [one for one in agent.of(FormReplica) if one.replica == newcomer])
        agent.say(SlotsReady(newcomer, "a:33"))
        town.until(lambda newcomer=newcomer: [one for one in agent.of(StartReplica) if one.replica == newcomer])
        town.events.append(trace.Joined(t=0.0, replica=newcomer, fingerprint="f", bucket_ranks=((0, 1),)))
        if slowly:
            end(town, agent, replica)


def test_slots_that_are_used_again_after_the_end_of_every_process_break_nothing(start: Start) -> None:
    town, [agent] = start(one_node(0, 1))
    heal_twice(town, agent, slowly=False)
    assert found(town) == []


def test_a_slot_that_is_used_while_its_former_process_lives_is_caught(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver does not wait for the ends, of a member and of a newcomer."""
    original = slots.lost

    def lost(*arguments: object, **others: object) -> slots.Pasts:
        pasts = original(*arguments, **others)  # type: ignore[arg-type]
        return tuple(replace(each, is_gone=each.is_gone or not each.is_taken) for each in pasts)

    monkeypatch.setattr(slots, "lost", lost)
    town, [agent] = start(one_node(0, 1))
    heal_twice(town, agent, slowly=True)
    assert found(town) == [
        "replica 2 forms in the place of replica 1, whose ranks [0, 1] are not confirmed dead",
        "replica 3 forms in the place of replica 2, whose ranks [0, 1] are not confirmed dead",
    ]


def test_a_slot_of_a_member_that_lives_is_caught(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver takes the slots of replica 0, which trains, for those of replica 1."""
    original = slots.plan

    def plan(*arguments: object, **others: object) -> slots.Plan:
        made = original(*arguments, **others)  # type: ignore[arg-type]
        return replace(made, newcomers=tuple(replace(each, in_place_of=(0,)) for each in made.newcomers))

    monkeypatch.setattr(slots, "plan", plan)
    town, [agent] = start(one_node(0, 1))
    lose(town, agent, 1)
    end(town, agent, 1)
    town.until(lambda: agent.of(FormReplica))
    assert found(town) == ["replica 2 forms in the place of replica 0, which is neither lost nor has left"]
