"""Hangs where a job has several nodes: no agent sees all, and nobody is condemned for what an agent cannot see."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recover.core import condemning, parts
from megatron_recover.core.condemning import Answered, Ask, CondemningState, Deaf, Rostered, Suspected, Tell
from megatron_recover.core.detector_state import DetectorState
from megatron_recover.core.progress import Phase, Progress
from megatron_recover.core.verdict import Known, Part, Verdict
from tests.core.hang_world import Nodes

Key = tuple[int, int]
ONE_EACH = {(0, 0): 0, (1, 0): 1}
"""Two replicas of one rank, each on a node of its own."""
SPREAD = {(0, 0): 0, (0, 1): 1, (1, 0): 2}
"""A replica on two nodes, and one on a third."""
TWO_ON_TWO = {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 1}
SLOWEST_S = 2.2 + 0.6
"""Time in which a hang in steps of 0.4 s is found, beside messages."""


def page(phase: Phase, begun: int, step: int = 20) -> Progress:
    ids = (3,) if phase in (Phase.FORWARD, Phase.BACKWARD, Phase.DATA) else ()
    return Progress(1, step, f"train {step + 1}", phase, ids, begun, begun - 1, 0)


def trained(places: Mapping[Key, int], *, late: int = 0, deadline_s: float = 1800.0) -> Nodes:
    """A job that has done 20 steps of 0.4 s."""
    nodes, begun = Nodes(places, late=late, deadline_s=deadline_s), 0
    for step in range(20):
        for phase in (Phase.FORWARD, Phase.REDUCTION):
            begun += 1
            for _ in range(2):
                nodes.look({key: page(phase, begun, step) for key in places})
    assert nodes.named == [] and nodes.sent == 0, "nothing is sent while nothing hangs"
    return nodes


def silent(nodes: Nodes, seconds: float, phases: Mapping[Key, Phase], states: Mapping[Key, str] | None = None) -> None:
    """Nobody makes progress for so long."""
    for _ in range(round(seconds / nodes.LOOK_S)):
        nodes.look({key: page(phase, 1000) for key, phase in phases.items()}, states)


@pytest.mark.parametrize("late", [0, 1, 10])
@pytest.mark.parametrize("places", [ONE_EACH, SPREAD], ids=["on one node", "on two nodes"])
def test_a_hang_is_found_and_charged_wherever_the_replica_is(places: Mapping[Key, int], late: int) -> None:
    nodes = trained(places, late=late)
    phases = dict.fromkeys(places, Phase.REDUCTION) | {(0, 0): Phase.FORWARD}
    silent(nodes, SLOWEST_S + 5 * late * nodes.LOOK_S, phases)
    [(node, condemned)] = nodes.condemned
    assert node == places[0, 0] and condemned.named.replica == 0 and nodes.named == [(0, 0, Verdict.HUNG)]
    assert condemned.failing is not None and condemned.failing.microbatches == (3,)
    assert nodes.sent <= 2 + 2 * (places is SPREAD) + 1


@pytest.mark.parametrize("late", [0, 1, 3, 30])
def test_two_replicas_on_two_nodes_that_hang_at_the_same_instant_are_both_waited_for(late: int) -> None:
    """Each agent alone saw that another replica lives, and the job ended."""
    nodes = trained(ONE_EACH, late=late)
    silent(nodes, 60.0, {(0, 0): Phase.FORWARD, (1, 0): Phase.BACKWARD})
    assert nodes.condemned == []
    assert sorted(nodes.named) == [(0, 0, Verdict.HUNG), (1, 0, Verdict.HUNG)]


@pytest.mark.parametrize("late", [0, 3])
def test_a_stall_of_all_that_strikes_some_a_little_later_ends_nobody(late: int) -> None:
    nodes = trained(ONE_EACH, late=late)
    for look in range(100):  # the second goes on for a second
        nodes.look({(0, 0): page(Phase.FORWARD, 1000), (1, 0): page(Phase.FORWARD, 1000 + min(look, 10))})
    assert nodes.condemned == [] and len(nodes.named) == 2


def test_the_first_is_condemned_and_then_the_second_is_the_last() -> None:
    nodes = trained(ONE_EACH)
    silent(nodes, SLOWEST_S, {(0, 0): Phase.FORWARD, (1, 0): Phase.REDUCTION})
    assert [each.named.replica for _, each in nodes.condemned] == [0]
    silent(nodes, 30.0, {(0, 0): Phase.FORWARD, (1, 0): Phase.BACKWARD})  # before anybody has seen the first one's end
    nodes.tell(Rostered((1,)))
    silent(nodes, 30.0, {(1, 0): Phase.BACKWARD})
    assert [each.named.replica for _, each in nodes.condemned] == [0]


def test_a_hang_that_another_replicas_return_to_life_makes_certain_is_ended_then() -> None:
    nodes = trained(ONE_EACH)
    silent(nodes, 10.0, {(0, 0): Phase.FORWARD, (1, 0): Phase.BACKWARD})
    for begun in range(1001, 1030):
        nodes.look({(0, 0): page(Phase.FORWARD, 1000), (1, 0): page(Phase.BACKWARD, begun)})
    assert [each.named.replica for _, each in nodes.condemned] == [0]


READS = [(Phase.DATA, "R"), (Phase.DATA, "D"), (Phase.COMPILING, "R"), (Phase.LOADING, "S"), (Phase.EVALUATION, "R")]


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize(("phase", "state"), READS)
def test_a_rank_that_waits_for_one_on_another_node_that_reads_is_neither_named_nor_condemned(
    phase: Phase, state: str, late: int
) -> None:
    """Its page shows a forward, in which it waits for the samples that the other one reads."""
    nodes = trained(SPREAD, late=late)
    silent(nodes, 60.0, {(0, 0): Phase.FORWARD, (0, 1): phase, (1, 0): Phase.REDUCTION}, {(0, 1): state})
    assert nodes.condemned == [] and nodes.named == []
    assert nodes.sent < 60.0 / 2.0 * 8, "asked once for each time after which a rank hangs"


@pytest.mark.parametrize("late", [0, 3])
def test_many_short_readings_on_another_node_excuse_as_one_long_one_does(late: int) -> None:
    nodes = trained(SPREAD, late=late)
    for look in range(600):
        reads = page(Phase.DATA if look % 5 else Phase.FORWARD, 1000 + look)
        nodes.look({(0, 0): page(Phase.FORWARD, 1000), (0, 1): reads, (1, 0): page(Phase.REDUCTION, 1000)})
    assert nodes.condemned == [] and nodes.named == []


@pytest.mark.parametrize("late", [0, 3])
def test_after_the_reading_the_whole_time_of_a_hang_has_to_pass(late: int) -> None:
    """What is left of a forward after the samples have come may take as long as any forward."""
    nodes = trained(SPREAD, late=late)
    silent(nodes, 20.0, {(0, 0): Phase.FORWARD, (0, 1): Phase.DATA, (1, 0): Phase.REDUCTION})
    silent(nodes, 2.0, {(0, 0): Phase.FORWARD, (0, 1): Phase.REDUCTION, (1, 0): Phase.REDUCTION})
    assert nodes.condemned == [] and nodes.named == []
    silent(nodes, 1.0 + 5 * late * nodes.LOOK_S, {(0, 0): Phase.FORWARD, (0, 1): Phase.REDUCTION, (1, 0): Phase.REDUCTION})
    assert [(each.named.replica, each.named.rank) for _, each in nodes.condemned] == [(0, 0)]


def test_one_torn_page_on_another_node_does_not_hide_that_its_rank_reads() -> None:
    nodes = trained(SPREAD)
    for look in range(600):
        reads = None if look % 2 else page(Phase.DATA, 1000)
        nodes.look({(0, 0): page(Phase.FORWARD, 1000), (0, 1): reads, (1, 0): page(Phase.REDUCTION, 1000)})
    assert nodes.condemned == [] and nodes.named == []


def test_a_rank_ahead_of_the_accused_one_on_another_node_excuses_nothing() -> None:
    nodes = trained(SPREAD)
    for _ in range(40):
        nodes.look(
            {(0, 0): page(Phase.FORWARD, 1000), (0, 1): page(Phase.DATA, 1000, step=21), (1, 0): page(Phase.REDUCTION, 1000)}
        )
    assert [(each.named.replica, each.named.rank) for _, each in nodes.condemned] == [(0, 0)]


def test_a_rank_ahead_that_logs_does_not_hide_one_behind_that_reads_now_and_then() -> None:
    nodes = trained({(0, 0): 0, (0, 1): 1, (0, 2): 1, (1, 0): 2})
    for look in range(300):
        reads = page(Phase.FORWARD if look % 5 else Phase.DATA, 1000 + look)
        logs = page(Phase.BETWEEN, 1000, step=21)
        nodes.look({(0, 0): page(Phase.FORWARD, 1000), (0, 1): reads, (0, 2): logs, (1, 0): page(Phase.REDUCTION, 1000)})
    assert nodes.condemned == [] and nodes.named == []


def test_ranks_that_wait_for_one_under_a_tracer_on_another_node_are_not_accused() -> None:
    nodes = trained(SPREAD)
    silent(
        nodes, 60.0, {(0, 0): Phase.FORWARD, (0, 1): Phase.FORWARD, (1, 0): Phase.REDUCTION}, {(0, 1): "t"}
    )  # fmt: skip
    assert nodes.condemned == [] and set(nodes.named) == {(0, 1, Verdict.TRACED)}


def test_a_stopped_rank_explains_its_siblings_on_other_nodes() -> None:
    nodes = trained(SPREAD)
    silent(nodes, 4.0, {(0, 0): Phase.FORWARD, (0, 1): Phase.FORWARD, (1, 0): Phase.REDUCTION}, {(0, 1): "T"})
    [(_, condemned)] = nodes.condemned
    assert (condemned.named.rank, condemned.named.verdict, condemned.failing) == (1, Verdict.STOPPED, None)


@pytest.mark.parametrize("gone", [1, 2], ids=["the node of its other rank", "the node of the other replica"])
def test_a_node_that_is_not_heard_gets_nobody_condemned(gone: int) -> None:
    """Whoever is there may read samples for the accused one, or be the other replica that lives."""
    nodes = trained(SPREAD)
    nodes.cut.add(gone)
    nodes.tell(Deaf(frozenset({gone})))
    silent(nodes, 60.0, {(0, 0): Phase.FORWARD, (0, 1): Phase.DATA, (1, 0): Phase.REDUCTION})
    assert nodes.condemned == []
    nodes.cut.clear()
    nodes.tell(Deaf(frozenset()))
    silent(nodes, 3.5, {(0, 0): Phase.FORWARD, (0, 1): Phase.REDUCTION, (1, 0): Phase.REDUCTION})
    assert [each.named.replica for _, each in nodes.condemned] == [0]


def test_an_answer_that_was_lost_with_its_agent_accuses_nobody() -> None:
    nodes = trained(SPREAD)
    nodes.cut.add(1)  # and nobody has noticed
    silent(nodes, 60.0, {(0, 0): Phase.FORWARD, (0, 1): Phase.DATA, (1, 0): Phase.REDUCTION})
    assert nodes.condemned == [] and nodes.named == []


def test_a_late_permission_condemns_no_rank_that_has_moved() -> None:
    nodes = trained(SPREAD, late=20)
    silent(nodes, 2.4, {(0, 0): Phase.FORWARD, (0, 1): Phase.REDUCTION, (1, 0): Phase.REDUCTION})
    for begun in range(1001, 1100):  # it moves, and is silent again when the answer comes
        nodes.look(
            {
                (0, 0): page(Phase.FORWARD, 1000 + begun // 20),
                (0, 1): page(Phase.REDUCTION, begun),
                (1, 0): page(Phase.FORWARD, begun),
            }
        )
    assert nodes.condemned == []


@pytest.mark.parametrize("places", [ONE_EACH, TWO_ON_TWO], ids=["one node each", "on two nodes"])
def test_what_hangs_is_ended_after_the_deadline_without_asking(places: Mapping[Key, int]) -> None:
    nodes = trained(places, deadline_s=20.0)
    nodes.cut.update(nodes.agents)
    silent(nodes, 19.0, dict.fromkeys(places, Phase.FORWARD))
    assert nodes.condemned == []
    silent(nodes, 2.0, dict.fromkeys(places, Phase.FORWARD))
    assert {each.named.replica for _, each in nodes.condemned} == {0, 1}


def test_the_last_replica_waits_for_itself_only_where_all_its_ranks_are_seen() -> None:
    for places, expected in (({(0, 0): 0, (0, 1): 0}, {0}), ({(0, 0): 0, (0, 1): 1}, set())):
        nodes = trained(places, deadline_s=20.0)
        silent(nodes, 30.0, dict.fromkeys(places, Phase.PIPELINE))
        assert {each.named.replica for _, each in nodes.condemned} == expected


def test_one_node_that_asks_gets_the_result_of_a_job_on_one_node() -> None:
    """With all ranks on one node the rules are those of `test_detector.py`, whatever the way to the verdict."""
    for phases in ({(0, 0): Phase.FORWARD, (1, 0): Phase.REDUCTION}, {(0, 0): Phase.FORWARD, (1, 0): Phase.FORWARD}):
        nodes = trained({(0, 0): 0, (1, 0): 0})
        silent(nodes, SLOWEST_S, phases)
        assert len(nodes.condemned) == (phases[1, 0] is Phase.REDUCTION)


# --- The coordinator's machine ----------------------------------------------------------------------

HOSTS = {0: frozenset({0, 1}), 1: frozenset({1, 2}), 2: frozenset({2})}


def suspicions(node: int) -> st.SearchStrategy[tuple[frozenset[int], frozenset[int]]]:
    mine = [replica for replica, nodes in HOSTS.items() if node in nodes]
    silent = st.frozensets(st.sampled_from(mine))
    return silent.flatmap(
        lambda found: st.tuples(st.just(found), st.frozensets(st.sampled_from(sorted(found))) if found else st.just(found))
    )


EVENTS = st.one_of(
    *(st.tuples(st.just(node), suspicions(node)) for node in range(3)),
    st.tuples(st.just("answer"), st.integers(0, 5)),
    st.tuples(st.just("deaf"), st.frozensets(st.integers(0, 2), max_size=1)),
    st.tuples(st.just("gone"), st.integers(0, 2)),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=30))
def test_whatever_comes_in_whatever_order_not_all_are_condemned_and_only_who_was_asked_about(events: list) -> None:
    """Nobody is permitted to be condemned while a node of it is not heard or did not answer, or while nobody else lives."""
    state, _ = condemning.step(CondemningState(HOSTS), Rostered((0, 1, 2)))
    numbers = dict.fromkeys(range(3), 0)
    asks: list[Ask] = []
    answered: dict[int, set[int]] = {}
    for what, value in events:
        if what == "answer":
            if value >= len(asks):
                continue
            ask = asks[value]
            answered.setdefault(ask.question, set()).add(ask.node)
            event: condemning.Input = Answered(ask.node, ask.question, Part())
        elif what == "deaf":
            event = Deaf(value)
        elif what == "gone":
            event = Rostered(tuple(each for each in state.roster if each != value))
        else:
            numbers[what] += 1
            event = Suspected(what, numbers[what], *value)
        questions = dict(state.questions)
        state, effects = condemning.step(state, event)
        for effect in effects:
            if isinstance(effect, Ask):
                asks.append(effect)
                continue
            assert isinstance(effect, Tell)
            replica, node = effect.known.replica, effect.node
            assert effect.report == numbers[node] and replica in state.reports[node].accused and replica in state.roster
            assert not HOSTS[replica] & state.deaf
            others = HOSTS[replica] - {node}
            assert len(effect.known.parts) == len(others)
            if others:
                assert answered[questions[node, replica].number] >= others
        if any(isinstance(effect, Tell) and effect.known.may_condemn for effect in effects):
            condemned = {replica for (_, replica), may in state.told.items() if may} & set(state.roster)
            assert condemned < set(state.roster), "whoever was to live was condemned as well"


@pytest.mark.parametrize("num_nodes", [1024])
def test_an_accusation_costs_the_same_in_a_job_of_1024_nodes(num_nodes: int) -> None:
    hosts = {replica: frozenset({2 * replica, 2 * replica + 1}) for replica in range(num_nodes // 2)}
    state, _ = condemning.step(CondemningState(hosts), Rostered(tuple(hosts)))
    state, effects = condemning.step(state, Suspected(0, 1, frozenset({0}), frozenset({0})))
    assert effects == (Ask(1, 1, 0),)
    state, effects = condemning.step(state, Answered(1, 1, Part()))
    assert effects == (Tell(0, 1, Known(0, (Part(),), may_condemn=True)),)


def test_all_of_1024_nodes_accuse_at_once_and_withdraw_when_a_stall_of_all_is_over() -> None:
    """Meanwhile the coordinator hears nobody. It took minutes with 256 nodes, and all of them seemed silent."""
    num_nodes, begin = 1024, time.process_time()
    state, _ = condemning.step(
        CondemningState({each: frozenset({each}) for each in range(num_nodes)}), Rostered(tuple(range(num_nodes)))
    )
    for number, is_accused, what in ((1, False, "silent"), (2, True, "hung"), (3, False, "well")):
        for node in range(num_nodes):
            mine = frozenset({node})
            silent_ones, accused = (mine if what != "well" else frozenset(), mine if is_accused else frozenset())
            state, effects = condemning.step(state, Suspected(node, number, silent_ones, accused))
            assert not any(isinstance(each, Tell) and each.known.may_condemn for each in effects) or what == "well"
    assert not condemning.accused(state) and not any(state.told.values())
    assert time.process_time() - begin < 20.0


# --- Bugs that were planted -------------------------------------------------------------------------


def fails(test: Callable[[], None]) -> bool:
    try:
        test()
    except AssertionError:
        return True
    return False


def test_planted_an_agent_that_decides_alone_condemns_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condemning, "another_lives", lambda living, replica: True)
    assert fails(lambda: test_two_replicas_on_two_nodes_that_hang_at_the_same_instant_are_both_waited_for(0))


def test_planted_an_agent_that_hears_nothing_of_other_nodes_condemns_who_waits_for_a_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "with_what_others_see", lambda state, others: state)
    assert fails(
        lambda: test_a_rank_that_waits_for_one_on_another_node_that_reads_is_neither_named_nor_condemned(Phase.DATA, "R", 0)
    )


def test_planted_a_node_that_tells_only_what_it_sees_at_that_instant_condemns_who_waits_for_short_readings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def part(state: DetectorState, replica: int, now_s: float) -> Part:
        return Part(tuple((place, 0.0) for place, seen_s in state.places.get(replica, {}).items() if seen_s == now_s))

    monkeypatch.setattr(parts, "part", part)
    assert fails(lambda: test_many_short_readings_on_another_node_excuse_as_one_long_one_does(0))
