"""Each rule of the protocol, broken once: the explorer must find it and print the way to it.

A bug is planted by replacing one function, in the machines or in the world around them, for the time of a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recover.core import (
    blame,
    coordinator,
    generations,
    lateness,
    own_record,
    rank,
    recovery,
    replica,
    replica_generation,
    replica_step,
    tree,
    values,
    vote,
)
from megatron_recover.core.contribution import by_bucket
from megatron_recover.core.membership_messages import Loss, LossKind, Void
from megatron_recover.core.plan import Operation, plan_of
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.speed import Speeds
from megatron_recover.core.values import Ballot, Compute, Record, Status, Statuses, Vote, Votes
from megatron_recover.core.vote import ballot_of, gather, voters_of
from megatron_recover.sim.channels import card, link
from megatron_recover.sim.explore.explorer import Explorer, Scenario
from megatron_recover.sim.explore.node import Rank
from megatron_recover.sim.explore.threads import Threads
from megatron_recover.sim.multiset import Multiset, add
from tests.core.planting import caught, explore, handle, plant

TWO_BUCKETS = ((0,), (0,))
SHARED = ((0, 1),)

pytestmark = pytest.mark.timeout(120)


def test_a_replica_that_commits_without_votes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "tally", lambda votes, roster, unproven: next(iter(votes)))
    caught(explore(crashes=1), 6)


def test_a_replica_that_commits_in_a_generation_it_promised_to_leave_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original, on_vote = replica_generation.on_generation, replica_step.on_vote

    def keep_votes(state: replica.ReplicaState, new: Any) -> replica.Step:
        after, effects = original(state, new)
        return replace(after, votes=state.votes), effects

    def count_old(state: replica.ReplicaState, vote: Vote) -> replica.Step:
        if vote.generation == state.generation - 1 and state.phase is replica.ReplicaPhase.EXCHANGING:
            votes = gather(state.votes, (ballot_of(vote),))
            if voters_of(votes) >= {0, 1, 2}:
                return replica_step.commit(state, own_record.own_record(state), adopted=False)
            return replace(state, votes=votes), ()
        return on_vote(state, vote)

    handle(monkeypatch, replica.NewGeneration, keep_votes)
    handle(monkeypatch, Vote, count_old)
    caught(explore(suspicions=1), 2, 5, 6, 9)


def test_a_reduction_in_place_is_caught() -> None:
    """It shows where one rank of a replica completed and another did not: the bucket is withdrawn and read once more."""

    class InPlace(Threads):
        def local_gradient_after(self, before: Multiset, result: Multiset) -> Multiset:
            return result

    caught(explore(InPlace(), replicas=2, microbatches=2, num_ranks=2, bucket_ranks=SHARED, alarms=1), 1, 3)


def test_acting_on_the_local_outcome_of_a_reduction_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = plan_of

    def selfish(found: recovery.Recovery, number: int, generation: int, roster: Any) -> Plan:
        plan = original(found, number, generation, roster)
        lacking = tuple(item.bucket for item in plan.transfers if number in item.targets)
        return replace(plan, transfers=(), reduces=tuple(sorted((*plan.reduces, *lacking))))

    plant(monkeypatch, "plan_of", selfish)
    caught(explore(crashes=1), 4, 9)


def test_counting_the_votes_of_an_older_generation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation.on_generation

    def keep_votes(state: replica.ReplicaState, new: Any) -> replica.Step:
        after, effects = original(state, new)
        return replace(after, votes=state.votes), effects

    handle(monkeypatch, replica.NewGeneration, keep_votes)
    caught(explore(alarms=1), 6)


def test_recomputing_a_decided_bucket_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "decide", lambda *_: ())
    caught(explore(crashes=1), 4)


def test_half_a_replica_that_applies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = own_record.complete

    def any_rank(shape: Any, held: Any, buckets: Any) -> Any:
        merged = {item.bucket: item for items in held for item in items}
        return original(shape, [tuple(merged.values())] * shape.num_ranks, buckets)

    monkeypatch.setattr(own_record, "complete", any_rank)
    caught(explore(replicas=2, microbatches=2, num_ranks=2, bucket_ranks=SHARED, alarms=1), 2)


def test_a_status_before_all_ranks_promised_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation.on_promised

    def at_once(state: replica.ReplicaState, report: Any) -> replica.Step:
        if report.generation != state.generation or state.phase is not replica.ReplicaPhase.PROMISING:
            return state, ()
        everyone = tuple(number for number in range(state.shape.num_ranks) if number != report.rank)
        return original(replace(state, promised=everyone), report)

    handle(monkeypatch, replica.Promised, at_once)
    caught(explore(replicas=2, microbatches=2, num_ranks=2, bucket_ranks=SHARED, alarms=1), 3, 5, 9)


def test_tokens_summed_from_votes_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The votes are of the members; the ledger bucket may hold what a replica contributed that died since."""
    original = replica_step._vote

    def with_tokens(state: replica.ReplicaState) -> replica.Step:
        tokens = "tokens " + " ".join(str(i) for i in by_bucket(state.contributions).get(0, ()))
        return original(replace(state, requests=(tokens,)))

    class FromVotes(Threads):
        def applied(self, node: Rank, order: Any, bucket: int) -> Multiset:
            tokens = [int(word) for request in order.record.requests for word in request.split()[1:]]
            return tuple(tokens.count(i) for i in range(len(node.gradient[0])))

    plant(monkeypatch, "_vote", with_tokens)
    caught(explore(FromVotes(), crashes=1), 1)


def test_dealing_a_lost_microbatch_to_everyone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = plan_of

    def for_all(found: recovery.Recovery, number: int, generation: int, roster: Any) -> Plan:
        return original(
            replace(found, dealt=tuple((number, i, into) for _, i, into in found.dealt)), number, generation, roster
        )

    plant(monkeypatch, "plan_of", for_all)
    caught(explore(crashes=1), 7)


def test_a_recomputed_gradient_outside_the_dump_is_caught() -> None:
    class NoDump(Threads):
        def computes(self, plan: Plan, machine: rank.RankState) -> tuple[Compute, ...]:
            return tuple(replace(item, into=plan.work.buckets) for item in plan.computes)

    caught(explore(NoDump(), bucket_ranks=TWO_BUCKETS, crashes=2), 1, 3)


def test_skipping_the_passes_of_an_overtaken_plan_is_caught() -> None:
    class Skips(Threads):
        def computes(self, plan: Plan, machine: rank.RankState) -> tuple[Compute, ...]:
            return plan.computes if plan.generation == machine.promised else ()

    caught(explore(Skips(slow=True), replicas=2, microbatches=2, alarms=1), 1, 3)


def test_a_result_that_counts_after_the_promise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Threads):
        def retired(self, operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
            return operations

    monkeypatch.setattr(rank, "may_run", lambda state, generation: True)
    caught(explore(Late(), replicas=2, microbatches=2, alarms=2), 5)


def test_dropping_an_early_status_is_caught_on_links(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation.on_status

    def strict(state: replica.ReplicaState, status: Status) -> replica.Step:
        return original(state, status) if status.generation == state.generation else (state, ())

    handle(monkeypatch, Status, strict)
    caught(explore(crashes=1, links=True), 9)


def test_forgetting_what_was_asked_for_during_a_save_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lateness, "_saved", lambda state: (state, ()))
    caught(explore(replicas=2, microbatches=2, steps=1, alarms=2, saves=1), 9)


def test_a_timeout_that_removes_the_last_members_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_that_are_late(state: coordinator.CoordinatorState) -> coordinator.Step:
        late = [number for number in state.roster if number not in state.entered]
        return generations.remove(state, tuple(Loss(number, LossKind.SUSPECTED, "late") for number in late), "late")

    monkeypatch.setattr(lateness, "_followed_late", all_that_are_late)
    caught(explore(replicas=2, microbatches=2, crashes=1, late=1), 9)


def test_a_replica_that_waits_for_the_end_of_a_job_without_a_coordinator_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "_ends_alone", lambda state: (state, ()))
    caught(explore(replicas=2, microbatches=2, steps=1, coordinator_dies=True), 9)


def test_a_replica_that_stops_training_without_a_coordinator_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must vote on, or nobody gets to the next save point."""
    original = replica_step._vote

    def silent(state: replica.ReplicaState) -> replica.Step:
        return (state, ()) if state.is_alone else original(state)

    plant(monkeypatch, "_vote", silent)
    caught(explore(replicas=2, microbatches=2, steps=1, coordinator_dies=True), 9)


MISCOUNT: dict[str, Any] = {"replicas": 2, "microbatches": 2, "steps": 1, "miscounts": 1}
TWICE: dict[str, Any] = MISCOUNT | {"miscounts": 2}


def miscounting(kind: type[Threads] = Threads) -> Threads:
    return kind(miscounts=True)


def test_a_member_that_does_not_give_up_its_contributions_to_a_void_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks empty their local gradients all the same: nobody computes anew what was in there."""
    original = replica_generation._voided

    def forgets(state: replica.ReplicaState, new: Any) -> replica.ReplicaState:
        after = original(state, new)
        return replace(after, contributions=state.contributions) if state.replica == 1 else after

    plant(monkeypatch, "_voided", forgets)
    caught(explore(miscounting(), **MISCOUNT), 1, 3, 9)


def test_a_rank_that_keeps_the_local_gradient_of_a_void_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeps(Threads):
        def emptied(self, gradient: tuple[Multiset, ...]) -> tuple[Multiset, ...]:
            return gradient

    caught(explore(miscounting(Keeps), **MISCOUNT), 1, 3)


def test_results_of_a_void_step_that_are_kept_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation._voided

    def keeps(state: replica.ReplicaState, new: Any) -> replica.ReplicaState:
        return replace(original(state, new), held=state.held)

    plant(monkeypatch, "_voided", keeps)
    caught(explore(miscounting(), **MISCOUNT, bucket_ranks=TWO_BUCKETS), 1, 2, 4, 9)


def test_hearing_of_a_void_step_only_in_its_own_generation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member may hear of the next generation first."""
    original = replica_generation._voided

    def once(state: replica.ReplicaState, new: Any) -> replica.ReplicaState:
        is_late = new.void is not None and new.generation != new.void.since
        return replace(state, void=new.void) if is_late else original(state, new)

    plant(monkeypatch, "_voided", once)
    caught(explore(miscounting(), replicas=3, microbatches=3, steps=1, miscounts=1, crashes=1), 1, 3, 4, 7, 9)


def test_making_a_step_void_for_every_later_generation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that has obeyed must not begin anew again: what it has computed since counts."""

    def again(state: replica.ReplicaState, new: Any) -> replica.ReplicaState:
        if new.void is None or state.work is None or new.void.step != state.step:
            return state
        return replace(state, void=new.void, must_void=True, contributions=(), held=())

    plant(monkeypatch, "_voided", again)
    caught(explore(miscounting(), replicas=3, microbatches=3, steps=1, miscounts=1, crashes=1), 1, 3, 4, 7, 9)


def test_computing_a_step_a_third_time_instead_of_giving_it_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation._voided

    def stubborn(state: replica.ReplicaState, new: Any) -> replica.ReplicaState:
        return replace(original(state, new), work=state.work)

    plant(monkeypatch, "_voided", stubborn)
    caught(explore(miscounting(), **TWICE), 1)


def test_giving_a_step_up_at_the_first_miscount_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "Void", lambda step, since: Void(step, since, gives_up=True))
    caught(explore(miscounting(), **MISCOUNT), 9)


def test_keeping_results_of_a_step_that_is_given_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other bucket may be held complete by then: a record that names it would apply half a step."""
    original = values.Work.given_up

    def with_buckets(work: values.Work) -> values.Work:
        return replace(original(work), buckets=work.buckets)

    monkeypatch.setattr(values.Work, "given_up", with_buckets)
    caught(explore(miscounting(), **TWICE, bucket_ranks=TWO_BUCKETS), 1)


def test_a_step_that_is_given_up_without_the_digest_that_was_due_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = values.Work.given_up
    monkeypatch.setattr(values.Work, "given_up", lambda work: replace(original(work), digests=False))
    caught(explore(miscounting(), **TWICE, digested=(0,)), 2)


def test_ending_as_if_nothing_were_wrong_after_a_step_was_given_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "exit_code", lambda requests: 15 if requests else 0)
    caught(explore(miscounting(), **TWICE), 9)


BAD_CARD: dict[str, Any] = {"microbatches": 1, "steps": 1, "broken": card(0, range(3), "both")}


def test_blaming_the_highest_id_of_all_who_are_accused_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def highest(evidence: blame.Evidence, roster: tuple[int, ...]) -> int | None:
        return max((accused for _, accused in evidence.pairs), default=None)

    monkeypatch.setattr(lateness, "culprit", highest)
    caught(explore(**BAD_CARD), 9)


def test_blaming_who_reports_without_a_name_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for what the owner of the card does not send, and can name it; its own waits have no name."""
    original = lateness.with_report

    def itself(evidence: blame.Evidence, accuser: int, accused: Any, generation: int, **kind: Any) -> blame.Evidence:
        told = original(evidence, accuser, accused, generation, **kind)
        return told if accused else blame.with_missed_deadline(told, accuser)

    monkeypatch.setattr(lateness, "with_report", itself)
    caught(explore(microbatches=1, steps=1, broken=link(0, 1, "both")), 9)


def test_never_giving_up_where_nobody_is_named_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas and one bad link: generations without end, until the explorer has more states than there can be."""
    monkeypatch.setattr(lateness, "_same_roster", lambda state: generations.announce(state, (), state.reason))
    with pytest.raises(MemoryError):
        Explorer(Scenario("planted", replicas=2, microbatches=1, steps=1, broken=link(0, 1, "both"))).run(limit=2000)


def test_keeping_what_an_outvoted_replica_took_part_in_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = recovery.recover
    plant(monkeypatch, "recover", lambda statuses, _, **known: original(statuses, 0, **known))
    caught(explore(drifts=1), 2)


DIGESTED = {"replicas": 2, "microbatches": 2, "num_ranks": 2, "bucket_ranks": ((0,), (1,)), "of_last_bucket": (0, 1)}
"""Rank 0 holds no result of these steps, so nothing but its digest makes a vote wait for a follower."""


def test_voting_without_the_digests_of_all_ranks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_step._vote

    def hasty(state: replica.ReplicaState) -> replica.Step:
        if state.work is None or not state.work.digests:
            return original(state)
        known = dict.fromkeys(range(state.shape.num_ranks), 0) | dict(state.digests)
        return original(replace(state, digests=tuple(sorted(known.items()))))

    plant(monkeypatch, "_vote", hasty)
    caught(explore(**DIGESTED, digested=(0,), crashes=1), 2)


def test_the_digest_of_another_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_step.commit

    def keeps(state: replica.ReplicaState, record: Any, *, adopted: bool) -> replica.Step:
        after, effects = original(state, record, adopted=adopted)
        return replace(after, digests=state.digests), effects

    plant(monkeypatch, "commit", keeps)
    caught(explore(**DIGESTED, digested=(0, 1), crashes=1), 2)


def test_a_record_without_the_digest_that_is_due_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_record, "Record", lambda *fields, **_: Record(*fields))
    caught(explore(steps=1, digested=(0,), state_drifts=1), 2)


def test_telling_of_an_outvoted_replica_only_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member may hear of the next generation first."""
    original = generations.announce

    def once(state: coordinator.CoordinatorState, *arguments: Any) -> coordinator.Step:
        is_told = state.trusted_from <= state.generation  # by the generation that was made for the outvoted one
        return original(replace(state, trusted_from=0) if is_told else state, *arguments)

    monkeypatch.setattr(generations, "announce", once)
    caught(explore(drifts=1, crashes=1), 2)


UNLIKE = {"replicas": 2, "steps": 3, "alarms": 1, "paces": (2500, 1000)}


def test_planning_with_ones_own_speed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures itself slow before the others have its word for it."""
    original = replica_step.fresh_plan

    def selfish(number: int, *arguments: Any, speeds: Speeds, **others: Any) -> Plan:
        own = dict.fromkeys(range(2), 1000) | {number: UNLIKE["paces"][number]}
        return original(number, *arguments, speeds=replace(speeds, believed=tuple(sorted(own.items()))), **others)

    plant(monkeypatch, "fresh_plan", selfish)
    caught(explore(**UNLIKE), 1, 7)


def test_not_learning_from_an_adopted_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_step.commit

    def forgets(state: replica.ReplicaState, record: Any, *, adopted: bool) -> replica.Step:
        after, effects = original(state, record, adopted=adopted)
        return (replace(after, speeds=state.speeds) if adopted else after), effects

    plant(monkeypatch, "commit", forgets)
    caught(explore(**UNLIKE), 1, 7)


def test_dealing_before_the_adopted_step_is_learned_from_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "learn", lambda speeds, record: speeds)
    caught(explore(**UNLIKE, crashes=1, microbatches=4), 1, 7)


def test_paces_in_the_order_of_the_votes_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = vote._united

    def as_they_came(said: Any) -> Any:
        return replace(original(said), paces=tuple(pace for ballot, _ in said for pace in ballot.paces))

    monkeypatch.setattr(vote, "_united", as_they_came)
    caught(explore(**UNLIKE), 2)


# --- In a tree: replica 0 is above 1, replica 1 above 2 -------------------------------------------------------------------

IN_A_ROW = {"steps": 1, "tree_above": 1}


def hand_on(monkeypatch: pytest.MonkeyPatch, forge: Callable[[replica.ReplicaState, Any], Any]) -> None:
    """Have inner members hand on something else."""
    original = replica_step.forwarded

    def forged(state: replica.ReplicaState, before: frozenset[int], message: Any) -> tuple[replica.Effect, ...]:
        return original(state, before, forge(state, message) if state.replica == 1 else message)

    plant(monkeypatch, "forwarded", forged)


def test_handing_on_an_incomplete_word_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decided without the word of all: the others wait, until nothing can happen any more."""

    def alone(state: replica.ReplicaState, message: Statuses | Votes) -> Statuses | Votes:
        if isinstance(message, Votes):
            return message
        return replace(message, statuses=tuple(item for item in message.statuses if item.replica != 2))

    hand_on(monkeypatch, alone)
    caught(explore(**IN_A_ROW), 9)


def test_not_waiting_for_all_below_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word of the grandchild is then never told to the root."""
    monkeypatch.setattr(tree, "_all_below", lambda roster, number, heard, above: number in heard)
    caught(explore(**IN_A_ROW), 9)


def test_taking_the_votes_of_those_below_as_those_of_all_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_step.tally

    def hasty(votes: tuple[Ballot, ...], roster: tuple[int, ...], unproven: tuple[int, ...]) -> Any:
        return original(votes, tuple(number for number in roster if number in voters_of(votes)), unproven)

    plant(monkeypatch, "tally", hasty)
    caught(explore(**IN_A_ROW), 6)


def test_mixing_generations_in_what_is_handed_on_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation.on_generation

    def keep_votes(state: replica.ReplicaState, new: Any) -> replica.Step:
        after, effects = original(state, new)
        if after.generation == state.generation:
            return after, effects
        of_child = [replace(ballot, voters=(2,)) for ballot in state.votes if 2 in ballot.voters]
        return replace(after, votes=tuple(of_child) if state.replica == 1 else ()), effects

    handle(monkeypatch, replica.NewGeneration, keep_votes)
    caught(explore(**IN_A_ROW, alarms=1), 6)


def test_dropping_the_vote_of_a_minority_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had voted like the others: these would commit a step in which a replica took part that has drifted."""

    def one_opinion(state: replica.ReplicaState, message: Statuses | Votes) -> Statuses | Votes:
        if isinstance(message, Statuses) or len(message.ballots) == 1:
            return message
        largest = max(message.ballots, key=lambda ballot: (len(ballot.voters), 0 in ballot.voters))
        return replace(message, ballots=(replace(largest, voters=tuple(sorted(voters_of(message.ballots)))),))

    hand_on(monkeypatch, one_opinion)
    caught(explore(**IN_A_ROW, drifts=1), 6)


def test_dropping_what_comes_before_its_generation_is_caught_in_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation.on_status

    def strict(state: replica.ReplicaState, said: Statuses) -> replica.Step:
        return original(state, said) if said.generation == state.generation else (state, ())

    handle(monkeypatch, Statuses, strict)
    caught(explore(**IN_A_ROW, crashes=1, links=True), 9)


def test_keeping_silent_about_a_link_that_broke_is_caught_in_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "neighbours", lambda roster, number, above: ())
    caught(explore(**IN_A_ROW, alarms=1, links=True), 9)


def test_the_sum_of_multisets_is_what_the_checks_rest_on() -> None:
    assert add([(1, 0, 0), (0, 1, 1)]) == (1, 1, 1)
