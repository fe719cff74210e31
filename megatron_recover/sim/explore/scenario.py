"""Scenarios for the explorer: sizes of a small job, and the faults that may hit it."""

from __future__ import annotations

from typing import Any

from megatron_recover.core.tree import TREE_ABOVE
from megatron_recover.core.values import Value
from megatron_recover.sim.channels import Channels, card, link


class Scenario(Value, frozen=True):
    """A small job, and the faults that may hit it.

    Each fault may come at any instant at which it is possible; `broken` holds from the start.
    """

    name: str
    replicas: int = 3
    microbatches: int = 3
    bucket_ranks: tuple[tuple[int, ...], ...] = ((0,),)
    """Ranks of a replica that hold each bucket."""
    num_ranks: int = 1
    """Ranks of a replica."""
    steps: int = 2
    crashes: int = 0
    """Replicas that die."""
    suspicions: int = 0
    """Replicas that the coordinator fences although they live. They continue to take steps."""
    alarms: int = 0
    """New generations without a loss, as after a broken link, a lost message or an expired wait."""
    drifts: int = 0
    """Replicas whose parameters change silently between two steps."""
    links: bool = False
    """Send announcements, statuses and votes over FIFO links that deliver once; those between
    members may break. If False, each of them may arrive at any time after it was sent. Reports
    reach the coordinator at once in both cases, except those of replicas that leave."""
    slow: bool = False
    """Let training threads take an order at any later time, not as soon as they can."""
    passes_last: bool = False
    """Let a pass run for any time and compute the microbatches of plans that arrive meanwhile. If
    False, a pass ends as soon as it can."""
    saves: int = 0
    """Checkpoint saves. Any replica may begin one at any instant, and end it at any later one."""
    late_saves: bool = False
    """Let the coordinator's `save` timer run out before a save is over."""
    tree_above: int = TREE_ABOVE
    """Number of members above which statuses and votes go over a tree."""
    paces: tuple[int, ...] = ()
    """Nanoseconds a microbatch that each replica measures of itself (`Threads.paces`); empty: none.

    Unequal paces bring new quotas in the third step.
    """
    late: int = 0
    """Follow timers that run out at any instant, also before any member has entered."""
    broken: Channels = frozenset()
    """Channels of the data plane that deliver nothing. An operation that needs one fails after all
    its data is sent."""
    miscounts: int = 0
    """Times that a replica counts a microbatch of a step twice. Several may hit the same step."""
    stops: int = 0
    """Times that the coordinator is stopped. What arrives meanwhile waits until it continues.
    Meanwhile no timer runs out, and no save or local work ends."""
    coordinator_dies: bool = False
    """Let the coordinator die at any instant. Each replica learns that at any later instant. A
    replica gives up only where nothing else can happen."""
    state_drifts: int = 0
    """Replicas whose state changes silently between two steps, in parts that no sum depends on.

    Only the state digest shows the change.
    """
    readers: int = 0
    """Times that a replica begins to read data, compile or compute, while no member has a result of
    the step. It continues at any later instant; meanwhile others may give up waiting for it."""
    hangs: bool = False
    """Let a replica that reads hang: it never continues. Nothing shows this before the
    coordinator's deadline has passed."""
    outlasts: bool = False
    """Let the coordinator's deadline pass before a replica that reads continues. The replica may
    then be fenced already."""
    waits: int = 0
    """Times that members give up on a replica that reads, before it continues or the deadline
    passes."""
    leaves: int = 0
    """Times that a member is asked to leave."""
    newcomers: int = 0
    """Newcomers that are formed, read a state and ask to join. Each may join in any later step, and
    dies and is fenced like a member."""
    asks: int = 0
    """Times that a newcomer asks a member to hold a step, at any instant. Only with `links`: else
    one request would arrive again and again."""
    newcomer_crashes: int = 0
    """Newcomers that die in their first step, in the roster. For each of them another one is formed
    at once, and only then."""
    exits: int = 0
    """Times that the job is asked to end."""
    waits_for_newcomers: bool = False
    """Let the job continue with fewer than `min_replicas` members while a newcomer forms."""
    min_replicas: int = 1
    """Least number of members that stay where others leave; with fewer the job ends."""
    digested: tuple[int, ...] = ()
    """Steps whose record has the state digest."""
    of_last_bucket: tuple[int, ...] = ()
    """Steps that reduce the last bucket only, as evaluations, saves and the end do. Not every rank
    holds a result in such a step."""


ONE_RANK_TWO_BUCKETS = ((0,), (0,))
TWO_RANKS_ONE_BUCKET = ((0, 1),)
TWO_STAGES = ((0,), (1,))

NEWCOMER: dict[str, Any] = {"replicas": 1, "microbatches": 1, "newcomers": 1, "passes_last": True}
NEWCOMERS: dict[str, Any] = {**NEWCOMER, "steps": 1, "newcomers": 2}
BESIDE_TWO: dict[str, Any] = {**NEWCOMER, "replicas": 2, "steps": 1}

CONFIGS: dict[str, tuple[Scenario, ...]] = {
    "ci": (
        Scenario("3 replicas, 2 crashes and a false suspicion", crashes=2, suspicions=1),
        Scenario("2 buckets, 2 crashes", bucket_ranks=ONE_RANK_TWO_BUCKETS, crashes=2),
        Scenario("2 buckets, a crash and a false suspicion", bucket_ranks=ONE_RANK_TWO_BUCKETS, crashes=1, suspicions=1),
        Scenario("2 buckets, a failed operation or lost message", bucket_ranks=ONE_RANK_TWO_BUCKETS, alarms=1),
        Scenario("a failed operation or lost message, and a crash", crashes=1, alarms=1),
        Scenario("slow training threads, a crash", crashes=1, slow=True),
        Scenario("passes that take in what is dealt, 2 crashes", crashes=2, passes_last=True),
        Scenario("passes, 2 buckets, a crash", bucket_ranks=ONE_RANK_TWO_BUCKETS, crashes=1, passes_last=True),
        Scenario("passes of 2 stages, a crash", num_ranks=2, bucket_ranks=TWO_STAGES, crashes=1, passes_last=True),
        Scenario("links that break", alarms=1, links=True),
        Scenario("links and a crash", crashes=1, links=True),
        Scenario("2 replicas, links that break and a crash", replicas=2, microbatches=2, crashes=1, alarms=1, links=True),
        Scenario("2 ranks share a bucket, a crash", num_ranks=2, bucket_ranks=TWO_RANKS_ONE_BUCKET, crashes=1),
        Scenario("2 ranks share a bucket, a false suspicion", num_ranks=2, bucket_ranks=TWO_RANKS_ONE_BUCKET, suspicions=1),
        Scenario(
            "2 ranks share a bucket, 2 failed operations or lost messages",
            replicas=2, microbatches=2, num_ranks=2, bucket_ranks=TWO_RANKS_ONE_BUCKET, alarms=2,
        ),
        Scenario(
            "2 replicas, a save, 2 failed operations or lost messages and a crash",
            replicas=2, microbatches=2, steps=1, crashes=1, alarms=2, saves=1,
        ),
        Scenario("2 pipeline stages, a crash", num_ranks=2, bucket_ranks=TWO_STAGES, crashes=1),
        Scenario("unlike speeds, a crash", microbatches=4, steps=3, crashes=1, paces=(1000, 3000, 1000)),
        Scenario(
            "2 replicas of unlike speeds, a failed operation or lost message, and a crash",
            replicas=2, steps=3, crashes=1, alarms=1, paces=(2500, 1000),
        ),
        Scenario("2 buckets, parameters that drift", bucket_ranks=ONE_RANK_TWO_BUCKETS, drifts=1),
        Scenario("parameters that drift, and a crash", crashes=1, drifts=1),
        Scenario("parameters that drift, and a false suspicion", suspicions=1, drifts=1),
        Scenario("links, and parameters that drift", drifts=1, links=True),
        Scenario("state that drifts, a digest in the last step, and a crash", state_drifts=1, digested=(1,), crashes=1),
        Scenario(
            "2 replicas, state that drifts, a digest in every step, a failed operation or lost message",
            replicas=2, microbatches=2, state_drifts=1, digested=(0, 1), alarms=1,
        ),
        Scenario(
            "2 stages, a digest in a step of the last bucket, state that drifts, and a crash",
            num_ranks=2, bucket_ranks=TWO_STAGES, state_drifts=1, digested=(1,), of_last_bucket=(1,), crashes=1,
        ),
        Scenario(
            "a row of 3 replicas of unlike speeds, a crash",
            microbatches=4, steps=3, tree_above=1, crashes=1, paces=(1000, 3000, 1000),
        ),
        Scenario("a tree of 4 replicas, a crash", replicas=4, microbatches=4, tree_above=2, crashes=1),
        Scenario("a tree of 4 replicas, a false suspicion", replicas=4, microbatches=4, tree_above=2, suspicions=1),
        Scenario("a tree of 4 replicas, parameters that drift", replicas=4, microbatches=4, tree_above=2, drifts=1),
        Scenario("a tree of 4 replicas on links, a crash", replicas=4, steps=1, tree_above=2, crashes=1, links=True),
        Scenario("a row of 3 replicas, links that break", tree_above=1, alarms=1, links=True),
        Scenario("a tree, a failed operation or lost message, and a crash", steps=1, tree_above=2, crashes=1, alarms=1),
        Scenario("2 replicas, a crash, and a survivor that is late twice", replicas=2, microbatches=2, crashes=1, late=2),
        Scenario("a false suspicion, and survivors that are late", steps=1, suspicions=1, late=1),
        Scenario("2 replicas, a stopped coordinator, and a crash", replicas=2, microbatches=2, crashes=1, stops=1),
        Scenario("2 replicas, a coordinator that dies, a crash, and a false suspicion",
                 replicas=2, microbatches=2, crashes=1, suspicions=1, coordinator_dies=True),
        Scenario("2 replicas, links, a coordinator that dies, and a crash",
                 replicas=2, microbatches=2, steps=1, crashes=1, links=True, coordinator_dies=True),
        Scenario("a row of 3 replicas, and a coordinator that dies", tree_above=1, coordinator_dies=True),
        Scenario("a miscount", miscounts=1, steps=1),
        Scenario("a miscount and a crash", crashes=1, miscounts=1),
        Scenario("2 replicas, a miscount and a crash", replicas=2, microbatches=2, crashes=1, miscounts=1),
        Scenario("2 replicas, 2 miscounts", replicas=2, microbatches=2, miscounts=2),
        Scenario(
            "2 ranks share a bucket, passes, and a miscount",
            replicas=2, microbatches=2, steps=1, num_ranks=2, bucket_ranks=TWO_RANKS_ONE_BUCKET, miscounts=1, passes_last=True,
        ),
        Scenario("a late reader", microbatches=1, steps=1, readers=1, waits=1),
        Scenario("2 replicas, a late reader, and a stopped coordinator",
                 replicas=2, microbatches=1, steps=1, readers=1, waits=3, stops=1),
        Scenario("2 replicas, 2 late readers, and a crash", replicas=2, microbatches=2, readers=2, waits=2, crashes=1),
        Scenario("a reader that hangs", microbatches=1, steps=1, readers=1, hangs=True, waits=1),
        Scenario("2 replicas, a reader that hangs, and a crash",
                 replicas=2, microbatches=2, readers=1, hangs=True, waits=2, crashes=1),
        Scenario("2 replicas, a reader that hangs, for which others wait three times",
                 replicas=2, microbatches=1, steps=1, readers=1, hangs=True, waits=3),
        Scenario("a reader that hangs, and a bad link",
                 microbatches=1, steps=1, readers=1, hangs=True, waits=1, broken=link(1, 2, "both")),
        Scenario("2 readers that hang", microbatches=1, steps=1, readers=2, hangs=True, waits=1),
        Scenario("a late reader that goes on after the deadline", microbatches=1, steps=1, readers=1, waits=1, outlasts=True),
        Scenario("2 replicas, 2 late readers that go on after the deadline",
                 replicas=2, microbatches=1, readers=2, waits=1, outlasts=True),
        Scenario("2 replicas, links, and a late reader that goes on after the deadline",
                 replicas=2, microbatches=1, steps=1, readers=1, waits=1, outlasts=True, links=True),
        Scenario("2 replicas, a late reader, and late members",
                 replicas=2, microbatches=1, steps=1, readers=1, waits=1, late=1),
        Scenario("2 replicas, a late reader, and a save that may be overdue",
                 replicas=2, microbatches=1, steps=1, readers=1, waits=3, saves=1, late_saves=True),
        Scenario("a bad network card", microbatches=1, steps=1, broken=card(0, range(3), "both")),
        Scenario("a card that does not send, and a crash", microbatches=1, steps=1, crashes=1, broken=card(1, range(3), "out")),
        Scenario("a card that does not receive", microbatches=1, steps=1, broken=card(2, range(3), "in")),
        Scenario("a bad link", microbatches=1, steps=1, broken=link(0, 1, "both")),
        Scenario("a link that is bad one way, and a crash", microbatches=1, steps=1, crashes=1, broken=link(0, 2, "out")),
        Scenario("2 replicas, a bad link", replicas=2, microbatches=1, steps=1, broken=link(0, 1, "both")),
        Scenario(
            "2 replicas, a stopped coordinator, a failed operation or lost message, and late members",
            replicas=2, microbatches=2, steps=1, alarms=1, stops=1, late=1,
        ),
        Scenario("2 miscounts, and a crash", steps=1, crashes=1, miscounts=2),
        Scenario("2 replicas, 3 miscounts", replicas=2, microbatches=2, steps=1, miscounts=3),
        Scenario(
            "2 ranks share a bucket, slow training threads, and 2 miscounts",
            replicas=2, microbatches=2, steps=1, num_ranks=2, bucket_ranks=TWO_RANKS_ONE_BUCKET, slow=True, miscounts=2,
        ),
        Scenario("a row of 3 replicas, a leave, and a crash", microbatches=2, tree_above=1, leaves=1, crashes=1),
        Scenario("2 leaves", microbatches=2, leaves=2),
        Scenario("a leave, and a crash, where 2 replicas have to stay", microbatches=2, leaves=1, crashes=1, min_replicas=2),
        Scenario("2 replicas, 2 leaves, and a crash", replicas=2, microbatches=2, leaves=2, crashes=1),
        Scenario(
            "2 replicas, a leave, a failed operation or lost message, and a crash",
            replicas=2, microbatches=2, leaves=1, alarms=1, crashes=1,
        ),
        Scenario(
            "2 replicas, a leave, a stopped coordinator, and a crash",
            replicas=2, microbatches=2, leaves=1, stops=1, crashes=1,
        ),
        Scenario("2 replicas, a leave, and a save", replicas=2, microbatches=2, leaves=1, saves=1),
        Scenario("links, and a leave", leaves=1, links=True),
        Scenario(
            "2 ranks share a bucket, a leave, and a crash",
            replicas=2, microbatches=2, num_ranks=2, bucket_ranks=TWO_RANKS_ONE_BUCKET, leaves=1, crashes=1,
        ),
        Scenario("unlike speeds, and a leave", microbatches=4, steps=3, leaves=1, paces=(1000, 3000, 1000)),
        Scenario("a leave, and parameters that drift", microbatches=2, leaves=1, drifts=1),
        # A member vouches for a newcomer only during a pass, so passes have to last.
        Scenario("1 replica, a newcomer, and a crash", **NEWCOMER, crashes=1),
        Scenario("1 replica, a newcomer, 2 failed operations or lost messages", **NEWCOMER, alarms=2),
        Scenario("1 replica, a newcomer, and a false suspicion", **NEWCOMER, suspicions=1),
        Scenario("1 replica, 2 newcomers, and a failed operation or lost message", **NEWCOMERS, alarms=1),
        Scenario("1 replica, 2 newcomers, and a crash", **NEWCOMERS, crashes=1),
        Scenario("2 ranks share a bucket, a newcomer, and a crash",
                 **NEWCOMER, num_ranks=2, bucket_ranks=TWO_RANKS_ONE_BUCKET, crashes=1),
        Scenario("1 replica, a newcomer of another speed", **{**NEWCOMER, "steps": 3}, paces=(1000, 3000)),
        Scenario("1 replica, a newcomer, and a miscount", **NEWCOMER, miscounts=1),
        Scenario("1 replica, a newcomer, and a leave", **NEWCOMER, leaves=1),
        Scenario("1 replica, a newcomer, and a save", **NEWCOMER, saves=1),
        Scenario("1 replica, links, a newcomer that asks for a hold, and a crash", **NEWCOMER, asks=1, links=True, crashes=1),
        Scenario("1 replica, a newcomer, and an evaluation",
                 **{**NEWCOMER, "steps": 3}, bucket_ranks=ONE_RANK_TWO_BUCKETS, of_last_bucket=(1,)),
        Scenario("1 replica, a newcomer, and state that drifts", **NEWCOMER, state_drifts=1),
        Scenario("1 replica, a newcomer, a digest in the last step, and state that drifts",
                 **NEWCOMER, digested=(1,), state_drifts=1),
        Scenario("1 replica, a newcomer, and parameters that drift", **NEWCOMER, drifts=1),
        Scenario("1 replica, a newcomer, and a coordinator that dies", **NEWCOMER, coordinator_dies=True),
        Scenario("1 replica, a newcomer, a late reader, and a crash",
                 **{**NEWCOMER, "steps": 1}, readers=1, waits=1, crashes=1),
        Scenario("1 replica, a newcomer, late members, and a crash", **NEWCOMER, late=1, crashes=1),
        Scenario("2 replicas, links, a newcomer, and a crash", **BESIDE_TWO, links=True, crashes=1),
        Scenario("2 replicas, a newcomer, and links that break", **BESIDE_TWO, links=True, alarms=1),
        Scenario("2 replicas, links, and a newcomer that asks for a hold", **BESIDE_TWO, asks=1, links=True),
        Scenario("a row of 2 replicas, and a newcomer", **{**BESIDE_TWO, "microbatches": 2}, tree_above=1),
        Scenario("1 replica, a newcomer, and a request to end", **{**NEWCOMER, "steps": 1}, exits=1),
        Scenario("2 replicas, links, a bad network card, and newcomers that die in the roster",
                 **{**BESIDE_TWO, "newcomers": 2}, newcomer_crashes=2, broken=card(1, range(4), "both"), links=True),
    ),
    "full": (
        # The longest first: the last of several processes to end determines the total time.
        Scenario("4 replicas, 2 crashes and a false suspicion", replicas=4, microbatches=4, crashes=2, suspicions=1),
        Scenario("4 replicas, 3 crashes and a false suspicion", replicas=4, microbatches=4, steps=1, crashes=3, suspicions=1),
        Scenario(
            "4 replicas, passes, a crash and a false suspicion",
            replicas=4, microbatches=4, steps=1, crashes=1, suspicions=1, passes_last=True,
        ),
        Scenario("4 replicas, 2 buckets, 2 crashes", replicas=4, microbatches=4, bucket_ranks=ONE_RANK_TWO_BUCKETS, crashes=2),
        Scenario("a failed operation or lost message, a crash and a false suspicion", crashes=1, alarms=1, suspicions=1),
        Scenario(
            "a tree of 4 replicas, 2 crashes and a false suspicion",
            replicas=4, microbatches=4, tree_above=2, crashes=2, suspicions=1,
        ),
        Scenario(
            "a tree of 4 replicas, a failed operation or lost message, and a crash",
            replicas=4, microbatches=4, steps=1, tree_above=2, crashes=1, alarms=1,
        ),
        Scenario("a tree of 5 replicas, a crash", replicas=5, microbatches=5, tree_above=2, crashes=1),
        Scenario("a row of 3 replicas, links that break and a crash", tree_above=1, crashes=1, alarms=1, links=True),
        Scenario("passes of 2 stages, 2 crashes", num_ranks=2, bucket_ranks=TWO_STAGES, crashes=2, passes_last=True),
        Scenario(
            "passes, 2 buckets, 2 crashes and a false suspicion",
            bucket_ranks=ONE_RANK_TWO_BUCKETS, crashes=2, suspicions=1, passes_last=True,
        ),
        Scenario("passes, a failed operation or lost message, and a crash", crashes=1, alarms=1, passes_last=True),
        Scenario("2 buckets, a failed operation or lost message, and a crash",
                 bucket_ranks=ONE_RANK_TWO_BUCKETS, crashes=1, alarms=1),
        Scenario("2 buckets, 2 crashes and a false suspicion", bucket_ranks=ONE_RANK_TWO_BUCKETS, crashes=2, suspicions=1),
        Scenario("2 replicas, links that break twice and a crash", replicas=2, microbatches=2, crashes=1, alarms=2, links=True),
        Scenario("2 buckets, parameters that drift, and a crash", bucket_ranks=ONE_RANK_TWO_BUCKETS, crashes=1, drifts=1),
        Scenario("4 replicas, parameters that drift, and a crash", replicas=4, microbatches=4, steps=1, crashes=1, drifts=1),
        Scenario("unlike speeds, 2 crashes", microbatches=4, steps=3, crashes=2, paces=(1000, 3000, 1000)),
        Scenario("2 stages, a crash and a false suspicion", num_ranks=2, bucket_ranks=TWO_STAGES, crashes=1, suspicions=1),
        Scenario("a crash, a failed operation or lost message, and late members", crashes=1, alarms=1, late=1),
        Scenario("passes, a miscount and a crash", steps=1, crashes=1, miscounts=1, passes_last=True),
        Scenario(
            "passes, a miscount, and a failed operation or lost message", steps=1, miscounts=1, alarms=1, passes_last=True,
        ),
        Scenario(
            "4 replicas, a bad network card, and a crash",
            replicas=4, microbatches=1, steps=1, crashes=1, broken=card(0, range(4), "both"),
        ),
        Scenario(
            "4 replicas, a link that is bad one way, and a crash",
            replicas=4, microbatches=1, steps=1, crashes=1, broken=link(1, 2, "in"),
        ),
        Scenario("a stopped coordinator, a crash, and a failed operation or lost message", crashes=1, alarms=1, stops=1),
        Scenario("2 miscounts, a digest, and a crash", steps=1, miscounts=2, digested=(0,), crashes=1),
        Scenario("2 miscounts, a digest, and state that drifts", steps=1, miscounts=2, digested=(0,), state_drifts=1),
        Scenario("2 miscounts, and parameters that drift", steps=1, miscounts=2, drifts=1),
        Scenario("2 miscounts, and a false suspicion", steps=1, miscounts=2, suspicions=1),
        Scenario(
            "2 replicas, 2 miscounts, a save, and a failed operation or lost message",
            replicas=2, microbatches=2, steps=1, miscounts=2, saves=1, alarms=1,
        ),
        Scenario(
            "2 replicas, 2 miscounts, a stopped coordinator, and a crash",
            replicas=2, microbatches=2, steps=1, miscounts=2, stops=1, crashes=1,
        ),
        Scenario("a row of 3 replicas, 2 miscounts, and a crash", steps=1, tree_above=1, miscounts=2, crashes=1),
        Scenario("2 buckets, 2 miscounts, and a crash", steps=1, bucket_ranks=ONE_RANK_TWO_BUCKETS, miscounts=2, crashes=1),
        Scenario("2 stages, 2 miscounts", steps=1, num_ranks=2, bucket_ranks=TWO_STAGES, miscounts=2),
        Scenario("3 miscounts, and a crash", steps=1, miscounts=3, crashes=1),
        Scenario(
            "2 ranks share a bucket, slow training threads, 2 miscounts, and a crash", replicas=2, microbatches=2, steps=1,
            num_ranks=2, bucket_ranks=TWO_RANKS_ONE_BUCKET, slow=True, miscounts=2, crashes=1,
        ),
        Scenario("a late reader that goes on after the deadline, and a crash",
                 microbatches=1, steps=1, readers=1, waits=1, outlasts=True, crashes=1),
        Scenario("a late reader that goes on after the deadline, and late members",
                 microbatches=1, steps=1, readers=1, waits=1, outlasts=True, late=1),
        Scenario("2 replicas, 2 late readers that go on after the deadline, and a crash",
                 replicas=2, microbatches=1, readers=2, waits=1, outlasts=True, crashes=1),
        Scenario("2 replicas, 2 late readers that go on after the deadline, and late members",
                 replicas=2, microbatches=1, steps=1, readers=2, waits=1, outlasts=True, late=1),
        Scenario("a leave, and 2 crashes", leaves=1, crashes=2),
        Scenario("2 leaves, and a crash", leaves=2, crashes=1),
        Scenario("a leave, and a false suspicion", leaves=1, suspicions=1),
        Scenario("a leave, and a failed operation or lost message", leaves=1, alarms=1),
        Scenario("a leave, and a miscount", microbatches=2, leaves=1, miscounts=1),
        Scenario(
            "2 replicas, a leave, a save, and a failed operation or lost message",
            replicas=2, microbatches=2, leaves=1, saves=1, alarms=1,
        ),
        Scenario("2 ranks share a bucket, and a leave", num_ranks=2, bucket_ranks=TWO_RANKS_ONE_BUCKET, leaves=1),
        Scenario("2 replicas, and a newcomer in any of 2 steps", **{**BESIDE_TWO, "steps": 2}),
        Scenario("2 replicas, a newcomer, and 3 crashes", **BESIDE_TWO, crashes=3),
        Scenario("2 replicas, a newcomer, and a false suspicion", **{**BESIDE_TWO, "microbatches": 2}, suspicions=1),
        Scenario("2 replicas, a newcomer, a failed operation or lost message", **{**BESIDE_TWO, "microbatches": 2}, alarms=1),
        Scenario("2 replicas, a newcomer, links that break, and a crash", **BESIDE_TWO, links=True, alarms=1, crashes=1),
        Scenario("2 replicas, a newcomer, and a leave", **{**BESIDE_TWO, "microbatches": 2}, leaves=1),
        Scenario("2 replicas, a newcomer, and a save", **{**BESIDE_TWO, "microbatches": 2}, saves=1),
        Scenario("a tree that a newcomer makes necessary, and a crash",
                 **{**BESIDE_TWO, "microbatches": 2}, tree_above=2, crashes=1),
        Scenario("2 replicas that both are needed, a newcomer, and a crash",
                 **{**BESIDE_TWO, "steps": 2}, links=True, min_replicas=2, crashes=1),
        Scenario("2 replicas that both are needed, a newcomer for which they wait, and a crash",
                 **{**BESIDE_TWO, "steps": 2}, links=True, min_replicas=2, waits_for_newcomers=True, crashes=1),
        Scenario("1 replica, 2 newcomers, and 2 crashes", **NEWCOMERS, crashes=2),
        Scenario("1 replica, 2 newcomers in any of 2 steps", **{**NEWCOMERS, "steps": 2}),
        Scenario("1 replica, a newcomer in any of 2 steps, and a request to end", **NEWCOMER, exits=1),
    ),
}  # fmt: skip
