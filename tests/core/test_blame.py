"""Who is fenced for what network fault: any single card, any single link, in either direction, and nobody else.

A fault is a set of directed channels that deliver nothing (`sim/channels.py`). The coordinator hears some of the reports that
follow from it in each generation, in any order, and is judged by whom it fences.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_recover.core import blame, coordinator, lateness
from megatron_recover.core.blame import (
    Evidence,
    Report,
    culprit,
    on_its_nodes,
    with_missed_deadline,
    with_report,
    without_reports,
)
from megatron_recover.core.coordinator import CoordinatorState, MembershipSettings, TimerFired
from megatron_recover.core.membership_messages import Entered, Hello, Loss, LossKind, ReplicaBlocked
from megatron_recover.sim.channels import Channels, card, link, stuck_in_a_sum

Nodes = tuple[tuple[int, ...], ...]


def told(evidence: Evidence, accuser: int, accused: Iterable[int], generation: int = 1, *, for_votes: bool = False) -> Evidence:
    """The evidence with one more report; of the first generation, unless said."""
    return with_report(evidence, accuser, accused, generation, for_votes=for_votes)


def started(num_replicas: int, nodes: Nodes = ()) -> CoordinatorState:
    state = CoordinatorState(MembershipSettings(num_replicas, nodes=nodes))
    for number in range(num_replicas):
        state, _ = coordinator.step(state, Hello(number, "same"))
    return state


class Net:
    """The coordinator, told in each generation what some members report."""

    def __init__(self, num_replicas: int, broken: Channels, draw: st.DataObject, nodes: Nodes = ()) -> None:
        self.state, self.broken, self.draw = started(num_replicas, nodes), broken, draw

    def fenced(self) -> list[int]:
        return [loss.replica for loss in self.state.losses if loss.kind is LossKind.SUSPECTED]

    def feed(self, message: coordinator.Input) -> None:
        self.state, _ = coordinator.step(self.state, message)

    def generation(self, *, all_report: bool = False) -> None:
        """All enter, and those that the fault holds up, or some of them, report it: in time, or when the generation is over."""
        number, stuck = self.state.generation, stuck_in_a_sum(self.state.roster, self.broken)
        for member in self.state.roster:
            self.feed(Entered(member, number, 0))
        if not stuck:
            return
        order = self.draw.draw(st.permutations(sorted(stuck)))
        num_reports = len(order) if all_report else self.draw.draw(st.integers(1, len(order)))
        num_in_time = self.draw.draw(st.integers(1, num_reports))
        for member in order[:num_in_time]:
            self.feed(ReplicaBlocked(member, number, "no progress", stuck[member], True))
        self.feed(TimerFired(f"grace {number}"))
        for member in order[num_in_time:num_reports]:
            self.feed(ReplicaBlocked(member, number, "no progress", stuck[member], True))
        if self.state.trouble and number > 2 and (all_report or self.draw.draw(st.booleans())):
            self.feed(TimerFired(self.state.trouble))

    def run(self, max_generations: int = 12) -> list[int]:
        """Generations until nobody is stuck; who was fenced."""
        for number in range(max_generations):
            if self.state.over or not stuck_in_a_sum(self.state.roster, self.broken):
                break
            self.generation(all_report=number > 4)
        assert not self.state.over
        return self.fenced()


WAYS = st.sampled_from(["in", "out", "both"])


def with_a_bad_card(num_replicas: int, ways: str, data: st.DataObject) -> None:
    owner = data.draw(st.integers(0, num_replicas - 1))
    nodes = data.draw(st.sampled_from([(), (tuple(range(num_replicas)),), (tuple(range(2)), tuple(range(2, num_replicas)))]))
    assert Net(num_replicas, card(owner, range(num_replicas), ways), data, nodes).run() == [owner]


@given(st.integers(3, 6), WAYS, st.data())
def test_a_bad_network_card_fences_its_owner_and_nobody_else(num_replicas: int, ways: str, data: st.DataObject) -> None:
    with_a_bad_card(num_replicas, ways, data)


@given(st.integers(3, 6), WAYS, st.data())
def test_a_bad_link_fences_one_of_its_ends_and_nobody_else(num_replicas: int, ways: str, data: st.DataObject) -> None:
    one, other = data.draw(st.sampled_from(list(combinations(range(num_replicas), 2))))
    fenced = Net(num_replicas, link(one, other, ways), data).run()
    assert len(fenced) == 1 and fenced[0] in (one, other)


@given(st.integers(4, 6), WAYS, st.booleans(), st.data())
def test_a_death_beside_it_changes_nothing(num_replicas: int, ways: str, is_card: bool, data: st.DataObject) -> None:
    """In any generation; until it is known, the dead one is missing from every sum, and all whose sum it is in say so."""
    one, other, dead = data.draw(st.permutations(range(num_replicas)))[:3]
    fault = card(one, range(num_replicas), ways) if is_card else link(one, other, ways)
    net = Net(num_replicas, fault | card(dead, range(num_replicas), "both"), data)
    for _ in range(data.draw(st.integers(0, 1))):
        net.generation()
    net.feed(coordinator.ReplicaLost(Loss(dead, LossKind.PROCESS_ENDED)))
    net.broken = fault
    fenced = net.run()
    assert len(fenced) == 1 and fenced[0] in ((one,) if is_card else (one, other))


@given(WAYS, st.data())
def test_with_two_replicas_nobody_is_named_for_the_link_and_one_goes_on(ways: str, data: st.DataObject) -> None:
    net = Net(2, link(0, 1, ways), data)
    both = stuck_in_a_sum((0, 1), net.broken)
    assert set(both) == {0, 1}
    for number in range(6):
        assert net.state.roster == (0, 1)
        if number in (2, 5):
            net.feed(TimerFired(net.state.trouble))
        for member, named in both.items():
            net.feed(ReplicaBlocked(member, net.state.generation, "no progress", named, True))
        net.feed(TimerFired(f"grace {net.state.generation}"))
    assert net.state.roster == (0,) and not net.state.over
    assert "the evidence does not show which of the two" in net.state.losses[0].detail


def between(one: Iterable[int], others: Iterable[int], ways: str) -> Channels:
    """What is broken where no replica of one node reaches, or is reached by, those of others."""
    return frozenset().union(*(link(mine, other, ways) for mine in one for other in others))


@given(st.integers(2, 4), st.integers(1, 6), WAYS, st.data())
def test_what_parts_a_node_from_others_costs_that_node_at_once_and_a_link_one_of_its_ends(
    num_nodes: int, num_mates: int, ways: str, data: st.DataObject
) -> None:
    """Once all have reported. Two nodes with one replica each are two replicas (below)."""
    nodes = tuple(tuple(range(node * num_mates, (node + 1) * num_mates)) for node in range(num_nodes))
    bad, other = data.draw(st.permutations(range(num_nodes)))[:2]
    is_card = data.draw(st.booleans()) and num_nodes > 2
    others = [replica for node in nodes if node != nodes[bad] for replica in node] if is_card else nodes[other]
    net = Net(num_nodes * num_mates, between(nodes[bad], others, ways), data, nodes)
    if num_nodes * num_mates == 2:
        return
    while not net.fenced():
        net.generation(all_report=True)
    assert tuple(net.fenced()) in ((nodes[bad],) if is_card else (nodes[bad], nodes[other]))
    if ways == "both" and not is_card:
        assert tuple(net.fenced()) == max(nodes[bad], nodes[other]), "the writer has the lowest id"
    assert not stuck_in_a_sum(net.state.roster, net.broken)


def test_nobody_goes_along_by_the_reports_of_some() -> None:
    """What the third node sends is lost; of those that miss it three have reported."""
    nodes = [tuple(range(low, low + 4)) for low in (0, 4, 8)]
    evidence = Evidence()
    for member in nodes[2]:
        evidence = told(evidence, member, ())
    for member in (0, 1, 2):
        evidence = told(evidence, member, nodes[2])
    named = culprit(evidence, range(12))
    assert named is not None and not on_its_nodes(named, evidence, range(12), nodes)


def test_a_save_that_is_overdue_costs_its_member_alone() -> None:
    evidence = with_missed_deadline(told(told(Evidence(), 0, [2, 3]), 1, [2, 3]), 2)
    assert culprit(evidence, range(4)) == 2 and not on_its_nodes(2, evidence, range(4), [(0, 1), (2, 3)])


@pytest.mark.parametrize("names_from", [max, min])
def test_a_rule_that_takes_an_end_without_looking_at_the_others_is_caught(
    monkeypatch: pytest.MonkeyPatch, names_from: object
) -> None:
    """As it was: of all that anybody suspects, the highest id (or any other fixed one)."""

    def by_id(evidence: Evidence, roster: tuple[int, ...]) -> int | None:
        return names_from((accused for _, accused in evidence.pairs), default=None)  # type: ignore[operator]

    monkeypatch.setattr(lateness, "culprit", by_id)
    any_failure = settings(phases=[Phase.generate], database=None)  # the smallest one would take a minute to find
    with pytest.raises(AssertionError):
        any_failure(given(st.integers(3, 6), WAYS, st.data())(with_a_bad_card))()


def test_the_end_of_a_row_of_waits_is_at_fault() -> None:
    evidence = told(told(Evidence(), 2, [1]), 1, [0])
    assert culprit(evidence, (0, 1, 2)) == 0


def test_who_waits_for_several_that_say_nothing_is_early() -> None:
    evidence = told(Evidence(), 0, [1, 2, 3])
    assert culprit(evidence, (0, 1, 2, 3)) is None
    assert culprit(told(evidence, 1, ()), (0, 1, 2, 3)) == 0, "one of them waits itself, so it has come"


def test_of_two_bad_cards_one_is_named_at_a_time() -> None:
    evidence = Evidence()
    for member, named in stuck_in_a_sum(range(6), card(1, range(6), "both") | card(4, range(6), "both")).items():
        evidence = told(evidence, member, named)
    assert culprit(evidence, range(6)) in (1, 4)


def test_a_deadline_of_its_own_counts_more_than_what_others_report() -> None:
    assert culprit(with_missed_deadline(told(Evidence(), 1, [0]), 2), (0, 1, 2)) == 2


def test_only_members_are_named() -> None:
    assert culprit(told(Evidence(), 0, [3]), (0, 1, 2)) is None
    assert culprit(told(Evidence(), 3, [0]), (0, 1, 2)) is None


def test_large_rosters_take_no_exponential_time() -> None:
    evidence = told(Evidence(), 500, [member for member in range(1000) if member != 500])
    for member in range(1000):
        evidence = told(evidence, member, [500] if member != 500 else ())
    assert culprit(evidence, range(1000)) == 500
    ring = Evidence()
    for member in range(60):
        ring = told(ring, member, [(member + 1) % 60])
    assert culprit(ring, range(60)) is not None


def test_two_halves_of_256_that_do_not_reach_each_other_are_judged_before_anybody_misses_the_coordinator() -> None:
    """All report half of the others. It took 14 s, in which the coordinator read and sent nothing."""
    begin, evidence = time.process_time(), Evidence()
    for member in range(256):
        evidence = told(evidence, member, range(128, 256) if member < 128 else range(128))
    assert len(evidence.pairs) == 2 * 128**2 and list(evidence.pairs) == sorted(evidence.pairs)
    assert culprit(evidence, range(256)) == 255
    assert on_its_nodes(255, evidence, range(256), [(each,) for each in range(256)]) == ()
    assert time.process_time() - begin < 5.0


def test_the_smallest_sets_are_all_found() -> None:
    assert blame._smallest_covers([(0, 1), (1, 0), (1, 2)]) == [frozenset({1})]
    assert blame._smallest_covers([(0, 1), (2, 3)]) == [
        frozenset(pair) for pair in ((0, 2), (0, 3), (1, 2), (1, 3))
    ]  # fmt: skip


# --- Chains of waits -----------------------------------------------------------------------------------------------------


def test_who_was_held_up_in_one_attempt_is_not_at_fault_in_the_next() -> None:
    """What 2 sends is lost. In one generation 6 alone needs a copy from it, and all others wait for 6 in a sum."""
    evidence = Evidence()
    for member in range(6):
        evidence = told(evidence, member, [6])
    evidence = told(evidence, 6, [2])
    assert culprit(evidence, range(7)) in (2, 6), "so far it may be either, or the link between them"
    for member in (0, 1, 3, 4, 5, 6):
        evidence = told(evidence, member, [2], 2)
    evidence = told(evidence, 2, [], 2)
    assert {pair for pair in evidence.pairs if 6 in pair} == {(2, 6), (6, 2), *((member, 6) for member in (0, 1, 3, 4, 5))}
    assert culprit(evidence, range(7)) == 2
    assert on_its_nodes(2, evidence, range(7), [(2, 6)]) == ()


def test_who_says_nothing_of_an_attempt_is_held_up_as_in_the_others() -> None:
    """Its report of the first generation was lost, or only says that a wait has expired."""
    for own in (Evidence(), told(Evidence(), 1, [], for_votes=True)):
        evidence = told(told(told(own, 2, [1]), 2, [1], 2), 1, [0], 2)
        assert culprit(evidence, range(3)) == 0


def in_a_tree(card_of: int, sources: Iterable[int]) -> Evidence:
    """A tree of 4: the root 0 waits for the vote of `card_of`, which needs a copy; the others wait for the root."""
    evidence = Evidence()
    for generation, source in enumerate(sources, 1):
        evidence = told(evidence, card_of, [source], generation)
        for member in {0, 1, 2, 3} - {card_of}:
            evidence = told(evidence, member, [0 if member else card_of], generation, for_votes=True)
    return evidence


@pytest.mark.parametrize("card_of", [1, 2, 3])
def test_a_wait_for_votes_that_a_member_passes_on_is_no_evidence_against_it(card_of: int) -> None:
    """The root of a tree has most accusers. The one that gets no copy from anybody is at fault, from two sources on."""
    others = [member for member in range(4) if member != card_of]
    for sources in (others, others[:2], others[1:], others * 3):
        assert culprit(in_a_tree(card_of, sources), range(4)) == card_of


def test_a_member_that_waits_for_a_status_is_not_at_fault_for_what_others_wait_for_in_a_sum() -> None:
    """Unlike one that waits for votes: it has not begun the sum."""
    evidence = told(told(Evidence(), 1, [0]), 0, ())
    for member in (2, 3):
        evidence = told(evidence, member, [1])
    assert culprit(evidence, range(4)) in (0, 1) and blame._counted(evidence, evidence.pairs) == {(1, 0)}


def test_reports_of_one_generation_are_united_and_what_concerns_a_newcomer_can_be_dropped() -> None:
    evidence = told(told(told(Evidence(), 1, [3]), 1, [0, 2]), 1, [2], 2)
    assert evidence.reports == (Report(1, 1, False, (0, 2, 3)), Report(1, 2, False, (2,)))
    evidence = with_missed_deadline(told(evidence, 2, [1]), 2)
    assert without_reports(evidence, (2,)) == Evidence((Report(1, 1, False, (0, 3)), Report(1, 2, False, ())))


@pytest.mark.parametrize("fields", [{"generation": 0}, {"for_votes": False}])
def test_a_rule_that_does_not_tell_generations_or_kinds_of_waits_apart_is_caught(fields: dict[str, Any]) -> None:
    """As it was."""
    attempts = Evidence()
    for member in range(6):
        attempts = told(told(attempts, member, [6]), member, [2] if member != 2 else [], 2)
    attempts = told(told(attempts, 6, [2]), 6, [2], 2)
    evidence, at_fault = (attempts, 2) if "generation" in fields else (in_a_tree(3, (0, 1)), 3)
    assert culprit(evidence, range(7)) == at_fault
    blurred = Evidence()
    for report in evidence.reports:
        kept = report._replace(**fields)
        blurred = told(blurred, kept.accuser, kept.accused, kept.generation, for_votes=kept.for_votes)
    assert culprit(blurred, range(7)) != at_fault
