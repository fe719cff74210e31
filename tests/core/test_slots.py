"""Who forms where: golden plans of newcomers after losses, and what happens to slots that break again and again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recover.core import slots
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.core.placement import Slot
from megatron_recover.core.slots import Newcomer, Pasts, Settings

SETTINGS = Settings(backoff_s=60.0, budget=3, patience_s=10.0, num_ranks=2)


def seat(node: int, first: int, num: int = 2) -> tuple[Slot, ...]:
    return tuple(Slot(node, first + each) for each in range(num))


def killed(pasts: Pasts, *replicas: int, now_s: float = 100.0, is_gone: bool = True) -> Pasts:
    for replica in replicas:
        pasts = slots.lost(pasts, replica, LossKind.PROCESS_ENDED, "rank 0: SIGKILL", SETTINGS, now_s=now_s)
        pasts = slots.gone(pasts, replica) if is_gone else pasts
    return pasts


def crashed(pasts: Pasts, replica: int, *, now_s: float = 100.0, rank: int | None = None) -> Pasts:
    pasts = slots.lost(pasts, replica, LossKind.CRASHED, "rank 1: SIGSEGV", SETTINGS, now_s=now_s, rank=rank)
    return slots.gone(pasts, replica)


def line(newcomer: Newcomer) -> str:
    where = " ".join(f"{slot.node}.{slot.slot}" for slot in newcomer.slots)
    of = f"for {' '.join(map(str, newcomer.in_place_of))} " if newcomer.in_place_of else ""
    return f"{where} {of}{newcomer.reason}"


def plan(pasts: Pasts, wanted: int, *, now_s: float = 100.0, settings: Settings = SETTINGS) -> str:
    """The plan in words, a line for each newcomer and each slot that is left out."""
    found = slots.plan(pasts, wanted=wanted, settings=settings, now_s=now_s)
    lines = list(map(line, found.newcomers))
    lines += [f"not {each.slot.node}.{each.slot.slot} {each.reason} [{each.again_at_s}]" for each in found.left_out]
    return "\n".join(lines)


THREE = slots.seated({0: seat(0, 0), 1: seat(0, 2), 2: seat(0, 4)})


def test_nothing_is_formed_while_nobody_is_lost() -> None:
    assert plan(THREE, 0) == ""
    assert plan(slots.seated({0: seat(0, 0)}, spares=seat(0, 2)), 0) == "", "a spare waits"


def test_several_losses_at_once_are_healed_in_place() -> None:
    assert plan(killed(THREE, 0, 2), 2) == (
        "0.0 0.1 for 0 in the slots of replica 0 (node 0: slots 0 and 1)\n"
        "0.4 0.5 for 2 in the slots of replica 2 (node 0: slots 4 and 5)"
    )


def test_no_more_newcomers_are_formed_than_are_missing() -> None:
    assert plan(killed(THREE, 0, 2), 1) == "0.0 0.1 for 0 in the slots of replica 0 (node 0: slots 0 and 1)"


def test_a_slot_waits_for_the_end_of_every_former_process() -> None:
    pasts = killed(THREE, 1, is_gone=False)
    assert plan(pasts, 1) == (
        "not 0.2 a process of replica 1 may live [110.0]\nnot 0.3 a process of replica 1 may live [110.0]"
    )
    with pytest.raises(ValueError, match="node 0 slot 2 is not free for replica 3: replica 1 is there"):
        slots.taken(pasts, 3, seat(0, 2))
    assert plan(slots.gone(pasts, 1), 1) == "0.2 0.3 for 1 in the slots of replica 1 (node 0: slots 2 and 3)"


def test_who_waits_for_a_process_to_end_knows_whether_that_is_usual() -> None:
    pasts = killed(THREE, 1, is_gone=False)
    found = [slots.plan(pasts, wanted=1, settings=SETTINGS, now_s=now_s).left_out for now_s in (109.0, 111.0)]
    assert [[each.is_usual for each in left_out] for left_out in found] == [[True, True], [False, False]]


def test_nobody_takes_the_slot_of_a_replica_that_lives() -> None:
    with pytest.raises(ValueError, match="replica 0 is there"):
        slots.taken(THREE, 3, seat(0, 0))


def test_a_spare_replaces_only_a_process_that_does_not_end() -> None:
    pasts = killed(slots.seated({0: seat(0, 0), 1: seat(0, 2)}, spares=seat(0, 4)), 1, is_gone=False)
    assert plan(pasts, 1, now_s=109.0).startswith("not 0.2 a process of replica 1 may live [110.0]\n")
    assert plan(pasts, 1, now_s=111.0) == (
        "0.4 0.5 in healthy and spare slots (node 0: slots 4 and 5)\n"
        "not 0.2 a process of replica 1 may live [None]\nnot 0.3 a process of replica 1 may live [None]"
    )


def test_fewer_spares_than_losses() -> None:
    pasts = slots.seated({replica: seat(replica, 0) for replica in range(3)}, spares=seat(3, 0))
    pasts = slots.node_lost(slots.node_lost(killed(pasts, 1, 2, is_gone=False), 1), 2)
    assert plan(pasts, 2) == (
        "3.0 3.1 in healthy and spare slots (node 3: slots 0 and 1)\n"
        "not 1.0 node 1 is lost [None]\nnot 1.1 node 1 is lost [None]\n"
        "not 2.0 node 2 is lost [None]\nnot 2.1 node 2 is lost [None]"
    )


def test_a_spare_that_is_dead_before_its_use_is_not_used() -> None:
    pasts = slots.seated({0: seat(0, 0), 1: seat(1, 0)}, spares=(*seat(2, 0), *seat(3, 0)))
    pasts = slots.node_lost(killed(slots.node_lost(pasts, 2), 1), 1)
    assert plan(pasts, 1).splitlines()[0] == "3.0 3.1 in healthy and spare slots (node 3: slots 0 and 1)"
    assert "not 2.0 node 2 is lost [None]" in plan(pasts, 1)


def test_a_replica_over_two_nodes_that_loses_one_comes_back_with_a_spare() -> None:
    over_two = (Slot(0, 2), Slot(1, 0))
    pasts = slots.seated({0: seat(0, 0), 1: over_two}, spares=(Slot(2, 5),))
    pasts = slots.lost(slots.node_lost(pasts, 1), 1, LossKind.NODE_LOST, "node b", SETTINGS, now_s=100.0)
    pasts = slots.gone(pasts, 1)
    assert plan(pasts, 1) == (
        "0.2 2.5 in healthy and spare slots (node 0: slot 2; node 2: slot 5)\nnot 1.0 node 1 is lost [None]"
    )
    without_spare = tuple(each for each in pasts if each.slot.node < 2)
    assert plan(without_spare, 1) == (
        "not 0.2 free, but too few for a replica of 2 ranks (1 such slot) [None]\nnot 1.0 node 1 is lost [None]"
    )


def test_halves_of_two_replicas_and_no_spare_form_one_together() -> None:
    pasts = slots.seated({0: seat(0, 0), 1: (Slot(0, 2), Slot(1, 0)), 2: (Slot(0, 3), Slot(1, 1))})
    pasts = slots.node_lost(killed(pasts, 1, 2), 1)
    assert plan(pasts, 2).splitlines()[0] == "0.2 0.3 in healthy and spare slots (node 0: slots 2 and 3)"


def test_a_slot_that_breaks_twice_before_ten_steps_is_set_aside_for_longer_each_time_and_then_for_good() -> None:
    pasts, now_s, told = crashed(THREE, 1), 100.0, []
    assert plan(pasts, 1) == "0.2 0.3 for 1 in the slots of replica 1 (node 0: slots 2 and 3)", (
        "the first break of its own is healed"
    )
    for replica in range(3, 8):
        pasts = crashed(slots.taken(pasts, replica, seat(0, 2)), replica, now_s=now_s)
        found = slots.plan(pasts, wanted=1, settings=SETTINGS, now_s=now_s)
        assert not found.newcomers
        told.append(found.left_out[0].reason)
        if found.again_at_s is None:
            break
        now_s = found.again_at_s
        assert plan(pasts, 1, now_s=now_s).startswith("0.2 0.3 for ")
    assert told == [
        "set aside for 60 s (1 of 3): replica 3: crashed (rank 1: SIGSEGV)",
        "set aside for 120 s (2 of 3): replica 4: crashed (rank 1: SIGSEGV)",
        "set aside for 240 s (3 of 3): replica 5: crashed (rank 1: SIGSEGV)",
        "never used again, as it was set aside 3 times before: replica 6: crashed (rank 1: SIGSEGV)",
    ]


def test_a_newcomer_that_commits_ten_steps_ends_the_row_of_breaks() -> None:
    pasts = slots.proven(slots.taken(crashed(THREE, 1), 3, seat(0, 2)), 3)
    assert plan(crashed(pasts, 3), 1) == "0.2 0.3 for 3 in the slots of replica 3 (node 0: slots 2 and 3)"


@pytest.mark.parametrize("kind", [LossKind.PROCESS_ENDED, LossKind.NODE_LOST])
def test_a_signal_from_outside_is_no_break_of_the_slot_however_often(kind: LossKind) -> None:
    pasts = killed(THREE, 1)
    for replica in range(3, 9):
        pasts = slots.lost(slots.taken(pasts, replica, seat(0, 2)), replica, kind, "", SETTINGS, now_s=100.0)
        pasts = slots.gone(pasts, replica)
        assert plan(pasts, 1) == f"0.2 0.3 for {replica} in the slots of replica {replica} (node 0: slots 2 and 3)"


def test_only_the_slot_of_the_rank_that_broke_is_set_aside_and_a_spare_takes_its_place() -> None:
    pasts = slots.seated({0: seat(0, 0), 1: seat(0, 2)}, spares=(Slot(0, 4),))
    pasts = crashed(slots.taken(crashed(pasts, 1, rank=1), 2, seat(0, 2)), 2, rank=1)
    assert plan(pasts, 1) == (
        "0.2 0.4 for 2 in healthy and spare slots (node 0: slots 2 and 4)\n"
        "not 0.3 set aside for 60 s (1 of 3): replica 2: crashed (rank 1: SIGSEGV) [160.0]"
    )


def test_a_crash_loop_that_ends_another_rank_each_time_is_no_longer() -> None:
    pasts = crashed(THREE, 1, rank=0)
    pasts = crashed(slots.taken(pasts, 3, seat(0, 2)), 3, rank=1)
    assert plan(pasts, 1) == "\n".join(
        f"not 0.{slot} set aside for 60 s (1 of 3): replica 3: crashed (rank 1: SIGSEGV) [160.0]" for slot in (2, 3)
    )


def test_a_crash_loop_of_one_rank_does_not_use_up_the_spares() -> None:
    pasts = slots.seated({0: seat(0, 0), 1: seat(0, 2)}, spares=seat(0, 4, 3))
    pasts = crashed(slots.taken(crashed(pasts, 1, rank=1), 2, seat(0, 2)), 2, rank=1)
    pasts = crashed(slots.taken(pasts, 3, (Slot(0, 2), Slot(0, 4))), 3, rank=1)
    assert plan(pasts, 1) == (
        "0.4 0.5 for 3 in healthy and spare slots (node 0: slots 4 and 5)\n"
        "not 0.2 set aside for 60 s (1 of 3): replica 3: crashed (rank 1: SIGSEGV) [160.0]\n"
        "not 0.3 set aside for 60 s (1 of 3): replica 2: crashed (rank 1: SIGSEGV) [160.0]"
    )


def test_a_slot_that_fails_its_check_is_put_off_at_once() -> None:
    pasts = slots.taken(killed(THREE, 1), 3, seat(0, 2))
    pasts = slots.unfit(pasts, {Slot(0, 2)}, "no room on the disk of the run directory", SETTINGS, now_s=100.0)
    pasts = slots.gone(slots.lost(pasts, 3, LossKind.PROCESS_ENDED, "", SETTINGS, now_s=100.0), 3)
    assert plan(pasts, 1) == (
        "not 0.2 put off for 60 s: no room on the disk of the run directory [160.0]\n"
        "not 0.3 free, but too few for a replica of 2 ranks (1 such slot) [None]"
    )


def test_checks_that_fail_put_a_slot_off_for_longer_each_time_and_use_up_no_budget() -> None:
    pasts, now_s, told, hopes = killed(THREE, 1), 100.0, [], []
    for _ in range(5):
        pasts = slots.unfit(pasts, {Slot(0, 2)}, "no disk", SETTINGS, now_s=now_s)
        found = slots.plan(pasts, wanted=1, settings=SETTINGS, now_s=now_s)
        assert found.again_at_s is not None
        told.append(found.left_out[0].reason)
        hopes.append(found.may_form_later)
        now_s = found.again_at_s
    assert told == [f"put off for {seconds} s: no disk" for seconds in (60, 120, 240, 480, 960)]
    assert plan(pasts, 1, now_s=now_s).startswith("0.2 0.3 for 1 "), "it is tried again however often"
    assert hopes == [True] * 3 + [False] * 2, "but nobody waits for it beyond the budget"
    pasts = slots.taken(pasts, 3, seat(0, 2))
    pasts = crashed(slots.taken(crashed(pasts, 3, now_s=now_s), 4, seat(0, 2)), 4, now_s=now_s)
    assert "(1 of 3): replica 4: crashed" in plan(pasts, 1, now_s=now_s), "no check counts as a break"


def test_a_newcomer_that_is_ended_early_from_outside_puts_its_slots_off_from_the_second_time_on() -> None:
    pasts, told, now_s = killed(THREE, 1), [], 100.0
    for replica in range(3, 8):
        pasts = slots.taken(pasts, replica, seat(0, 2))
        pasts = slots.lost(pasts, replica, LossKind.PROCESS_ENDED, "rank 0: SIGKILL", SETTINGS, now_s=now_s, is_early=True)
        found = slots.plan(slots.gone(pasts, replica), wanted=1, settings=SETTINGS, now_s=now_s)
        told.append(found.left_out[0].reason if found.left_out else "at once")
        pasts, now_s = slots.gone(pasts, replica), found.again_at_s or now_s
    assert told == ["at once"] + [
        f"put off for {seconds} s: replica {replica}: process ended (rank 0: SIGKILL)"
        for seconds, replica in ((60, 4), (120, 5), (240, 6), (480, 7))
    ]
    assert plan(pasts, 1, now_s=now_s).startswith("0.2 0.3 for 7 ")
    pasts = slots.proven(slots.taken(pasts, 8, seat(0, 2)), 8)
    pasts = slots.lost(pasts, 8, LossKind.PROCESS_ENDED, "", SETTINGS, now_s=now_s, is_early=True)
    assert plan(slots.gone(pasts, 8), 1, now_s=now_s).startswith("0.2 0.3 for 8 "), "a newcomer that was proven ends the row"


def test_a_newcomer_that_is_lost_with_a_node_puts_no_slot_off() -> None:
    pasts = THREE
    for replica in (1, 3, 4):
        pasts = slots.lost(pasts, replica, LossKind.NODE_LOST, "", SETTINGS, now_s=100.0, is_early=replica > 1)
        pasts = slots.gone(pasts, replica)
        assert plan(pasts, 1).startswith(f"0.2 0.3 for {replica} ")
        pasts = slots.taken(pasts, replica + 1 if replica > 1 else 3, seat(0, 2))


def test_the_slots_of_a_replica_that_has_left_are_given_back() -> None:
    assert plan(slots.gone(slots.given_back(THREE, 1, now_s=100.0), 1), 1) == ""


def test_a_node_that_joins_replaces_what_a_lost_one_had_and_gives_room_for_more() -> None:
    pasts = slots.seated({0: seat(0, 0), 1: seat(1, 0)})
    lost = slots.node_lost(killed(pasts, 1), 1)
    assert slots.room(lost, {0}, SETTINGS).num_replicas == 1
    joined = slots.node_joined(lost, 2, 5)
    assert plan(joined, 1).splitlines()[0] == "2.0 2.1 in healthy and spare slots (node 2: slots 0 and 1)"
    assert slots.room(joined, {0}, SETTINGS).num_replicas == 3
    assert plan(slots.node_joined(pasts, 2, 2), 0) == "", "it waits while nobody is missing"
    for known in (0, 1, 2):
        with pytest.raises(ValueError, match=f"node {known} is a node of the job already"):
            slots.node_joined(joined, known, 1)
    assert "node 2 is lost" in plan(slots.node_lost(joined, 2), 1), "nor does a number come back"


def test_no_slot_of_a_drained_node_is_used_again_whatever_was_in_it() -> None:
    """Node 1 has a replica that was lost, one that has left, one that lives, and spares."""
    pasts = slots.seated({0: seat(0, 0), 1: seat(1, 0), 2: seat(1, 2), 3: seat(1, 4)}, spares=(*seat(1, 6), *seat(2, 0)))
    pasts = killed(slots.gone(slots.given_back(pasts, 2, now_s=100.0), 2), 1)
    pasts = slots.drained(pasts, {1})
    assert plan(pasts, 3) == "\n".join(
        ["2.0 2.1 in healthy and spare slots (node 2: slots 0 and 1)"]
        + [f"not 1.{slot} node 1 is drained [None]" for slot in (0, 1, 6, 7)]
    )
    assert slots.room(pasts, {0, 3}, SETTINGS) == slots.Room(3, ()), "nor for another number of replicas"
    assert slots.room(pasts, {0}, SETTINGS) == slots.Room(2, ()), "replica 3 leaves"
    pasts = slots.lent_again(killed(pasts, 3), {2})
    assert "1." not in "".join(line for line in plan(pasts, 3).splitlines() if not line.startswith("not "))
    with pytest.raises(ValueError, match="node 1 slot 6 is not free for replica 4: the node is drained"):
        slots.taken(pasts, 4, seat(1, 6))


def test_slots_that_were_given_back_are_used_again_once_more_replicas_are_wanted_and_every_former_process_has_ended() -> None:
    pasts = slots.lent_again(slots.given_back(THREE, 1, now_s=100.0), {1})
    assert plan(pasts, 1).startswith("not 0.2 a process of replica 1 may live [110.0]\n")
    assert plan(slots.gone(pasts, 1), 1) == "0.2 0.3 for 1 in the slots of replica 1 (node 0: slots 2 and 3)"


def test_the_room_of_a_job_is_what_stays_and_what_is_free_apart_from_what_was_given_back() -> None:
    pasts = slots.seated({0: seat(0, 0), 1: seat(0, 2), 2: seat(1, 0), 3: seat(1, 2)}, spares=seat(1, 4, 3))
    pasts = slots.given_back(pasts, 3, now_s=100.0)
    assert slots.room(pasts, {0, 2}, SETTINGS) == slots.Room(3, (3, 1)), "replica 1 leaves, and has not left"
    assert slots.room(killed(pasts, 0), {1, 2}, SETTINGS) == slots.Room(4, (3,)), "what is lost is free"
    assert slots.room(slots.node_lost(pasts, 1), {0, 1}, SETTINGS) == slots.Room(2, ())
    broken = replace(SETTINGS, budget=0)
    pasts = slots.unfit(pasts, seat(1, 4), "no disk", broken, now_s=100.0)
    assert slots.room(pasts, {0, 1, 2}, broken).own == 3, "one spare is left"
    assert slots.room(pasts, {0, 1, 2}, SETTINGS).own == 4, "the others are tried again later"


def test_without_a_budget_the_second_break_is_the_last() -> None:
    settings = replace(SETTINGS, budget=0)
    pasts = crashed(THREE, 1)
    pasts = slots.lost(slots.taken(pasts, 3, seat(0, 2)), 3, LossKind.EXCEPTION, "", settings, now_s=1.0)
    assert plan(slots.gone(pasts, 3), 1, settings=settings).startswith("not 0.2 never used again, as no try is left: ")


@given(st.data())
def test_whatever_happens_nobody_sits_where_a_former_process_may_live_or_on_a_lost_node(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 3))
    all_slots = [Slot(node, slot) for node in range(3) for slot in range(4)]
    num_replicas = data.draw(st.integers(1, len(all_slots) // num_ranks))
    seats = {each: tuple(all_slots[each * num_ranks : (each + 1) * num_ranks]) for each in range(num_replicas)}
    pasts = slots.seated(seats, all_slots[num_replicas * num_ranks :])
    living, dying, lost_nodes, now_s, newest = set(seats), set[int](), set[int](), 0.0, num_replicas
    for _ in range(data.draw(st.integers(1, 25))):
        now_s += data.draw(st.sampled_from([0.0, 1.0, 100.0]))
        match data.draw(st.sampled_from(["lose", "gone", "node", "proven"])):
            case "lose" if living:
                replica = data.draw(st.sampled_from(sorted(living)))
                kind = data.draw(st.sampled_from([LossKind.CRASHED, LossKind.PROCESS_ENDED]))
                pasts = slots.lost(pasts, replica, kind, "", SETTINGS, now_s=now_s)
                living.discard(replica)
                dying.add(replica)
            case "gone" if dying:
                replica = data.draw(st.sampled_from(sorted(dying)))
                pasts = slots.gone(pasts, replica)
                dying.discard(replica)
            case "node":
                node = data.draw(st.integers(0, 2))
                lost_nodes.add(node)
                pasts = slots.node_lost(pasts, node)
            case "proven" if living:
                pasts = slots.proven(pasts, data.draw(st.sampled_from(sorted(living))))
        found = slots.plan(
            pasts, wanted=max(0, num_replicas - len(living)), settings=replace(SETTINGS, num_ranks=num_ranks), now_s=now_s
        )
        assert len(found.newcomers) <= max(0, num_replicas - len(living))
        for each in found.newcomers:
            assert len(each.slots) == len(set(each.slots)) == num_ranks
            assert not {slot.node for slot in each.slots} & lost_nodes
            occupied = {past.slot for past in pasts if past.user in living | dying}
            assert not occupied & set(each.slots)
            pasts = slots.taken(pasts, newest, each.slots)
            living.add(newest)
            newest += 1
        assert found.again_at_s is None or found.again_at_s > now_s


@given(st.lists(st.tuples(st.sampled_from(["lose", "join", "lose node", "end", "heal"]), st.integers(0, 7)), max_size=40))
def test_whatever_nodes_come_and_go_no_slot_has_two_users_and_none_of_a_lost_node_is_used(deeds: list[tuple[str, int]]) -> None:
    """Two nodes with one replica each; every node that comes gets the next number, also one that was lost before."""
    pasts, num_nodes, num_replicas = slots.seated({0: seat(0, 0), 1: seat(1, 0)}), 2, 2
    lost_nodes: set[int] = set()
    for deed, which in deeds:
        living = sorted({each.user for each in pasts if each.user is not None and each.is_taken})
        match deed:
            case "join":
                pasts, num_nodes = slots.node_joined(pasts, num_nodes, 2), num_nodes + 1
            case "lose" if living:
                pasts = killed(pasts, living[which % len(living)], is_gone=False)
            case "end":
                for user in {each.user for each in pasts if each.user is not None and not each.is_taken}:
                    pasts = slots.gone(pasts, user)
            case "lose node":
                lost_nodes.add(which % num_nodes)
                pasts = slots.node_lost(pasts, which % num_nodes)
                there = {each.user for each in pasts if each.slot.node == which % num_nodes and each.is_taken}
                for user in there - {None}:
                    pasts = slots.gone(killed(pasts, user), user)
            case "heal":
                for newcomer in slots.plan(pasts, wanted=2 - len(living), settings=SETTINGS, now_s=1e6).newcomers:
                    free = {each.slot for each in pasts if not each.is_taken and each.is_gone}
                    assert {*newcomer.slots} <= free and not lost_nodes & {slot.node for slot in newcomer.slots}
                    pasts, num_replicas = slots.taken(pasts, num_replicas, newcomer.slots), num_replicas + 1
        users = [each.user for each in pasts if each.is_taken]
        assert len({each.slot for each in pasts}) == len(pasts) == 2 * num_nodes
        assert len(users) == 2 * len({*users}), "a replica has two slots, and a slot one replica"
    here = [each for each in pasts if each.slot.node not in lost_nodes and not each.is_taken and each.is_gone]
    assert slots.room(pasts, {each.user for each in pasts if each.is_taken}, SETTINGS).own >= len(here) // 2
