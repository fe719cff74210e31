"""What a run says: only what is known, with its time, in the order in which it happened."""

from __future__ import annotations

import ast
import inspect
import random
import re
import textwrap
from collections.abc import Callable
from datetime import datetime
from typing import Any

from megatron_recover import trace
from megatron_recover.cluster.narrator import Narrator
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.observe.ending import Account
from megatron_recover.observe.follow.progress import RunProgress
from tests.observe import traces

BEGAN_AT = 1_700_000_000.25
PREFIX = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] megatron-recover: "
BEGUN = trace.Generation(t=1.0, generation=1, roster=(0, 1), losses=(), reason="start")


class Told:
    """A narrator, with what it shows and what it logs."""

    def __init__(self, num_replicas: int = 2, roster: tuple[int, ...] = (), *, of_several: bool = False) -> None:
        self.shown: list[str] = []
        self.logged: list[str] = []
        account = Account(replicas=num_replicas, run_dir="runs/a")
        self.narrator = Narrator(
            account, began_at=BEGAN_AT, show=self.shown.append, log=self.logged.append, roster=roster, of_several=of_several
        )  # fmt: skip

    def after(self, *events: trace.AnyEvent) -> Told:
        for event in events:
            self.narrator.take(event)
        self.narrator.tell()
        return self

    @property
    def texts(self) -> list[str]:
        """What is shown, without times."""
        return [re.sub(PREFIX, "", line) for line in self.shown]


def plan(label: str, quotas: tuple[int, ...]) -> trace.Plan:
    return trace.Plan(
        replica=0, generation=1, step=0, label=label, num_microbatches=sum(quotas), roster=(0, 1), quotas=quotas, transfers=(),
        computes=(), reduces=(), decided=(),
    )  # fmt: skip


def test_at_the_start_nothing_is_claimed() -> None:
    assert Told().narrator.progress.line() == "starting"


def test_quotas_are_those_of_training() -> None:
    told = Told().after(BEGUN, plan("train 1", (3, 2)), plan("end 0", (0, 0)))
    assert told.narrator.progress.line() == "starting | replicas 2/2 | gen 1 | quotas 3 2"


def test_a_request_to_end_is_not_told_as_a_new_generation() -> None:
    asked = trace.Generation(t=2.0, generation=2, roster=(0, 1), losses=(), reason="exit: SIGINT")
    told = Told().after(BEGUN, asked)
    assert told.narrator.progress.line() == "starting | ending (SIGINT) | replicas 2/2 | gen 2"
    assert told.texts == ["generation 1: replicas 0 1"]


def test_every_event_that_is_told_is_one_that_the_narrator_is_given() -> None:
    """The recorder gives it the events of `WANTED` only. An event is told where a `case` names its class."""
    for tells in (Narrator._event, RunProgress.take, Account.take):
        [function] = ast.parse(textwrap.dedent(inspect.getsource(tells))).body
        classes = [each.cls for each in ast.walk(function) if isinstance(each, ast.MatchClass)]
        names = [each.attr for each in classes if isinstance(each, ast.Attribute)]
        assert len(names) > 4, f"no `case` was found in {tells.__qualname__}"
        told = {getattr(trace, name).__struct_config__.tag for name in names}
        assert told <= Narrator.WANTED, f"{tells.__qualname__} would tell {sorted(told - Narrator.WANTED)} too"


def test_what_the_run_waits_for_is_told() -> None:
    waits = trace.Waiting(replicas=(1,), reason="replica 1 alone has the state")
    silent = trace.LeaderSilent(member=1, generation=2, phase="began", seconds=4.0, waiting_for=())
    at_work = trace.Waiting(replicas=(0, 1), reason="it reads data", limit_s=1800.0)
    assert Told().after(waits, at_work, silent).texts == [
        "WARNING: waiting for replica 1: replica 1 alone has the state",
        "WARNING: waiting for replicas 0 1: it reads data (excused for 1800 s at most, then judged)",
        "the leader of replica 1 has not answered for 4 s",
    ]


def test_one_is_told_otherwise_than_several() -> None:
    told = Told(of_several=True).after(
        trace.LeaveAsked(replicas=(1,), reason="drain 1 of ann@n0"),
        trace.LeaveAsked(replicas=(1, 2), reason="drain n1 of ann@n0"),
        trace.NodeJoined(node=4, name="n5", slots=1),
        trace.NodeJoined(node=5, name="n6", slots=8),
        trace.Generation(generation=2, roster=(0,), left=(1,), reason="replica 1 leaves"),
        trace.Generation(generation=3, roster=(), losses=(trace.Loss(replica=0, kind=LossKind.PROCESS_ENDED),)),
    )
    assert told.texts == [
        "replica 1 leaves after a common step, asked by drain 1 of ann@n0",
        "replicas 1 2 leave after a common step, asked by drain n1 of ann@n0",
        "node n5 has come late, as node 4: its 1 slot is spare",
        "node n6 has come late, as node 5: its 8 slots are spare",
        "generation 2: replica 0 (replica 1 leaves)",
        "generation 3: no replica (replica 0 lost: process ended )",
    ]


def test_a_silent_node_is_told_in_a_run_of_several() -> None:
    silence = [
        trace.NodeSilent(node=2, name="n2", phase="began", seconds=1.62),
        trace.NodeSilent(node=2, name="n2", phase="over", seconds=5.0),
    ]
    told = Told(of_several=True)
    for event in (BEGUN, *silence):
        told.narrator.take(event)
    assert told.texts == [
        "node n2 is silent: nothing was heard of it for 1.6 s",
        "node n2 is heard again, after 5.0 s",
    ], "it is told at once, before lines that are kept for their order"
    assert Told().after(*silence).texts == []


def test_each_step_of_a_newcomer_is_told() -> None:
    told = Told(num_replicas=3).after(*traces.joining_run().events)  # type: ignore[arg-type]
    mine = [text for text in told.texts if "replica 3" in text or "replicas 3" in text]
    assert mine == [
        "replica 3 forms in the place of replica 2",
        "generation 3: replicas 0 1 3 (replica 3 is to join)",
        "replica 3 is turned away: its state digest differs",
        "replica 3 does not join in train 4: a save is in progress; it reads again, as often as needed",
        "generation 4: replicas 0 1 3 (replica 3 is to join)",
        "replica 3 joins at train 5: 3 replicas train",
    ]
    assert told.narrator.seen.forming == ()


def test_a_newcomer_that_ends_before_it_joins_is_told() -> None:
    formed = trace.Forming(t=2.0, newcomer=2, reason="on spare node b")
    told = Told().after(BEGUN, formed)
    assert told.narrator.seen.forming == (2,)
    lost = trace.NewcomerLost(t=3.0, newcomer=2, kind=LossKind.PROCESS_ENDED, detail="rank 1: SIGKILL")
    told.after(trace.Failure(t=3.0, replica=2, rank=1, cause="SIGKILL"), lost, trace.Fenced(t=3.1, replica=2, ranks=(0, 1)))
    assert told.texts[1:] == [
        "replica 2 forms on spare node b", "replica 2 is lost before it has joined: process ended rank 1: SIGKILL",
    ]  # fmt: skip
    assert told.narrator.seen.forming == ()
    closing = told.narrator.account.lines(ExitCode.OK, "training finished")
    assert "2 of 2 replicas left, no losses; " in closing[1], "it was no member"


def test_a_refused_newcomer_is_told_once_and_two_that_join_together_in_one_line() -> None:
    refused = trace.ClaimRefused(t=2.0, newcomer=2, label="train 3", reason="it is too late in train 3", member=0)
    joined = trace.Generation(t=4.0, generation=2, roster=(0, 1, 2, 3), newcomers=(2, 3), reason="replicas 2, 3 are to join")
    told = Told().after(BEGUN, refused, refused, joined, trace.Proven(t=5.0, generation=2, newcomers=(2, 3)))
    assert [text for text in told.texts if "does not join" in text] == [
        "replica 2 does not join in train 3: it is too late in train 3; it reads again, as often as needed"
    ]
    assert told.texts[-1] == "replicas 2 3 join in generation 2: 4 replicas train"
    assert (
        "4 replicas at the end, 2 at the start, no losses, 2 joined; "
        in told.narrator.account.lines(ExitCode.OK, "training finished")[1]
    )


def test_lines_have_the_time_of_what_they_tell_in_the_format_of_megatrons() -> None:
    told = Told().after(BEGUN)
    when = datetime.fromtimestamp(BEGAN_AT + 1.0).strftime("%Y-%m-%d %H:%M:%S.%f")
    assert told.shown == [f"[{when}] megatron-recover: generation 1: replicas 0 1"]


def test_lines_are_told_in_the_order_of_the_trace_however_they_arrive() -> None:
    signals = [f"SIG{number}: asked" for number in range(3)]
    lines = [(3.0, " iteration 1/ 9 | lm loss: 1"), (5.5, "saving checkpoint at iteration 9")]
    for seed in range(50):
        told = Told()
        narrator = told.narrator
        arriving: list[tuple[Callable[..., None], Any]] = [
            *((narrator.take_lines, ([text], seconds)) for seconds, text in lines),
            *((narrator.says, (text, 4.0 + number)) for number, text in enumerate(signals)),
            (narrator.take, (BEGUN,)),
        ]
        random.Random(seed).shuffle(arriving)
        for takes, what in arriving:
            takes(*what)
        narrator.tell(until=3.5)
        assert told.texts == ["generation 1: replicas 0 1", "iteration 1/ 9 | lm loss: 1"], "the rest may still get company"
        narrator.tell()
        assert told.texts[2:] == [*signals[:2], "saving checkpoint at iteration 9", signals[2]]


def test_what_was_said_at_one_instant_stays_in_its_order() -> None:
    told = Told()
    for number in range(20):
        told.narrator.says(str(number), 1.0)
    told.narrator.tell()
    assert told.texts == [str(number) for number in range(20)]


def test_lines_of_the_writer_that_are_worth_it_are_shown_and_are_not_in_the_log_of_ours() -> None:
    told = Told(3, roster=(1, 2))
    narrator = told.narrator
    assert [narrator.is_writer(replica) for replica in range(3)] == [False, True, False]
    narrator.take_lines([" iteration 1/ 3 | lm loss: 1.0", "noise"], 1.0)
    told.after(trace.Generation(t=2.0, generation=2, roster=(2,), losses=(), reason="loss"))
    assert narrator.is_writer(2)
    assert told.texts == ["iteration 1/ 3 | lm loss: 1.0", "generation 2: replica 2 (loss)"]
    assert told.logged == told.shown[1:]


def loaded(iteration: int, replica: int = 0) -> trace.Checkpoint:
    return trace.Checkpoint(replica=replica, rank=0, iteration=iteration, phase="loaded", detail="X")


def test_where_a_run_begins_is_told_once() -> None:
    assert Told().after(loaded(40), loaded(40, 1)).texts == ["resumes after iteration 40 of --load X"]
    assert Told().after(loaded(0)).texts == ["begins anew: no checkpoint was loaded from --load X"]


def test_what_was_saved_is_known_before_it_is_told() -> None:
    told = Told()
    told.narrator.take(BEGUN)
    told.narrator.take(trace.Checkpoint(t=2.0, replica=0, rank=0, iteration=40, phase="finished"))
    assert told.narrator.account.saved == 40 and told.narrator.account.has_begun and told.shown == []


def test_the_end_is_in_the_log_behind_all_that_was_held_back() -> None:
    told = Told()
    told.narrator.take(BEGUN)
    lines = told.narrator.end(ExitCode.INTERRUPTED, "SIGTERM", 7.0)
    assert told.texts == ["generation 1: replicas 0 1"] and told.logged == [*told.shown, *lines]
    assert re.match(PREFIX + r"exit code 15 \(interrupted\): SIGTERM$", lines[0])


def test_a_cut_that_silences_hundreds_of_nodes_takes_few_lines() -> None:
    def silent(phase: Any, nodes: range) -> list[trace.AnyEvent]:
        return [trace.NodeSilent(node=node, name=f"n{node}", phase=phase, seconds=1.6) for node in nodes]

    leaders = [
        trace.LeaderSilent(member=member, generation=1, phase="began", seconds=3.0, waiting_for=()) for member in range(500)
    ]
    told = Told(500, of_several=True).after(BEGUN, *silent("began", range(500)), *leaders)
    assert len([text for text in told.texts if "is silent" in text]) == 8
    assert len([text for text in told.texts if "has not answered" in text]) == 8
    assert [text for text in told.texts if "more" in text] == [
        "more nodes are silent: `megatron-recover status` with the run directory names all",
        "the leaders of more replicas have not answered",
    ]
    told.after(trace.NodeLost(node=0, name="n0", replicas=(0,), detail=""), *silent("over", range(1, 500)))
    assert len([text for text in told.texts if "is heard again" in text]) == 7
    before = len(told.texts)
    told.after(*silent("began", range(3)))
    assert len(told.texts) == before + 3, "all are heard, so each is told again"
