"""What is promised for each kind of scenario, and the verdict on a run of one.

An expectation looks at the evidence of a run and returns what is wrong with it, or nothing. `EXPECTATIONS` says which hold for
which kind; a kind that is not in it is not drawn.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.hybrid_clock import milliseconds
from megatron_recover.faults import FaultKind
from megatron_recover.observe.verify import check as verify
from tests.nodes.history import Applied, History, Named
from tests.system import comeback_judging as back
from tests.system import comebacks
from tests.system.evidence import Event, Evidence, Expectation, in_short
from tests.system.jobs import check
from tests.system.placing import placement
from tests.system.plans import DEADLINE_S, STEPS, Scenario
from tests.system.strikes import StrikeKind

_UNJUDGED = re.compile(r"not judged are steps ([^;\n]*)")
TRACKER = "latest_checkpointed_iteration.txt"
_SLACK_STEPS = 2
"""A gap also touches the steps that were under way with it, and replicas may be a step apart."""


def judge(evidence: Evidence) -> str:
    """`passed`, or what is wrong first."""
    for expectation in expectations_of(evidence.plan):
        if wrong := expectation(evidence):
            return f"FAILED: {wrong}"
    return "passed"


def expectations_of(plan: Scenario) -> tuple[Expectation, ...]:
    """Return what is promised for a scenario: that of its kind; if a plain job heals, also what holds with newcomers."""
    return (*EXPECTATIONS[plan.kind], *(WITH_NEWCOMERS if plan.heals and plan.kind not in comebacks.KINDS else ()))


# --- Runs that end well --------------------------------------------------------------------------------------------------


def ends_well(evidence: Evidence) -> str:
    """The run ends with exit code 0."""
    code = evidence.outcome.exit_code
    return f"exit code {code}" if code else ""


def makes_all_steps(evidence: Evidence) -> str:
    """All training steps were committed."""
    steps = evidence.outcome.summary["steps"]
    return f"{steps} steps" if steps != evidence.plan.job.steps else ""


def counts_well(evidence: Evidence) -> str:
    """No step was computed anew."""
    return "a step was miscounted, and computed anew" if evidence.outcome.events("miscounted") else ""


def is_proven(evidence: Evidence) -> str:
    """`check` judges all steps and finds no broken invariant. An `exact` run is bit-identical to its reference.

    A `fast` run is compared with no reference.
    """
    code, report = evidence.check()
    return in_short(report) if code else ""


def loses_only_the_dead(evidence: Evidence) -> str:
    """No replica was removed except those that a fault killed, and those with ranks on a node that was lost."""
    killed = {event["replica"] for event in evidence.faults() if event["kind"] == FaultKind.KILL.value} | evidence.plan.lost
    removed = {replica for replica, _ in evidence.losses()}
    return f"removed were {sorted(removed)}, killed {sorted(killed)}" if removed - killed else ""


def is_struck(evidence: Evidence) -> str:
    """The strike from outside has happened."""
    return "" if evidence.has_struck else "the strike has not come"


# --- Disks ---------------------------------------------------------------------------------------------------------------


def ends_with_the_parameters_of_the_reference(evidence: Evidence) -> str:
    """After the last step, each rank of one replica that nothing has hit has the parameters of the reference.

    A `fast` run is compared with no reference: all these ranks have made the last step. The ranks' own copies of their
    events show this, whatever the trace has.
    """
    plan, kept = evidence.plan, evidence.kept()
    label = f"train {plan.job.steps}"
    mine = {rank: _digest(events, label) for (replica, rank), events in kept.items() if replica == plan.spared}
    if not mine or None in mine.values():
        return f"{label} is not the end of all ranks: {mine}"
    if evidence.reference is None:
        return ""
    theirs: dict[int, list[Event]] = defaultdict(list)
    for line in (evidence.reference / "events.jsonl").read_text().splitlines():
        if (event := json.loads(line))["event"] == "applied":
            theirs[event["rank"]].append(event)
    return "" if mine == {rank: _digest(events, label) for rank, events in theirs.items()} else "the parameters differ"


def _digest(events: list[Event], label: str) -> str | None:
    found = [event["parameter_digest"] for event in events if event["event"] == "applied" and event["label"] == label]
    return found[-1] if found else None


def leaves_out_what_it_says(evidence: Evidence) -> str:
    """The steps that `check` leaves unjudged are exactly those of which the trace misses events."""
    code, report = evidence.check()
    unfinished = "UNFINISHED" in report
    told = _unjudged(report)
    missing, holes = _missing(evidence)
    if not missing and not unfinished and told is None:
        return in_short(report) if code else ""
    if code != ExitCode.UNFINISHED:
        return f"events are missing, and check ends with {code}: {in_short(report)}"
    if not unfinished and told is None:
        return f"events of steps {sorted(missing)} are missing, and check does not say so"
    if untold := {step for step in holes if not (told and told(step))}:
        return f"events of steps {sorted(untold)} are missing inside the trace, and check vouches for them"
    if unfinished and told is None:
        return ""
    allowed = range(min(missing, default=0) - _SLACK_STEPS, max(missing, default=-1) + _SLACK_STEPS + 1)
    of_launcher = "the launcher (" in report  # it keeps no copy of what it has lost
    wrongly = [step for step in range(evidence.plan.job.steps) if told and told(step) and step not in allowed]
    return f"nothing of steps {wrongly} is missing, and check does not vouch for them" if wrongly and not of_launcher else ""


def tells_of_the_disk(evidence: Evidence) -> str:
    """Where events are missing, the console reports this."""
    said = re.search(
        r"WARNING: the trace cannot be written|the end of the trace is missing|events of this run are lost",
        evidence.outcome.output,
    )
    return "events are missing, and no line says so" if _missing(evidence)[0] and not said else ""


def _unjudged(report: str) -> Callable[[int], bool] | None:
    """Whether `check` has said that it does not judge a step; None: it has not said so of any."""
    if (match := _UNJUDGED.search(report)) is None:
        return None
    ranges = []
    for words in match[1].split(", "):
        numbers = [int(word) for word in re.findall(r"\d+", words)]
        after = words.startswith("any after")
        ranges.append(range(numbers[0] + after, 10**9 if after else numbers[-1] + 1))
    return lambda step: any(step in each for each in ranges)


def _missing(evidence: Evidence) -> tuple[set[int], set[int]]:
    """Steps of which an event is missing in the trace; and those of which one is missing before the end of its rank's."""
    written = Counter(_unstamped(json.loads(line)) for line in evidence.outcome.lines())
    missing, holes = set[int](), set[int]()
    for events in evidence.kept().values():
        since = set[int]()
        step = 0
        for event in events:
            step, key = event.get("step") or step, _unstamped(event)
            if written[key]:
                written[key] -= 1
                holes |= since
                since = set()
            else:
                since.add(step)
                missing.add(step)
    return missing, holes


def _unstamped(event: Event) -> str:
    return json.dumps({key: value for key, value in event.items() if key not in ("t", "h")})


# --- The launcher --------------------------------------------------------------------------------------------------------


def says_that_it_was_stopped(evidence: Evidence) -> str:
    """A launcher that stood still for long reports this, if anything was left to do when it continued."""
    strike = evidence.plan.strike
    assert strike is not None and strike.seconds is not None
    long = strike.seconds >= DEADLINE_S / 30 and evidence.faults()
    return "it does not say that it stood still" if long and "stood still for" not in evidence.outcome.output else ""


# --- Drift and miscounts -------------------------------------------------------------------------------------------------


def _found_at(plan: Scenario) -> tuple[int, int]:
    """The record by which a drift is found at the latest: (iteration, 0 for training or 1 for a save)."""
    assert plan.drift is not None
    iteration, every = plan.drift.step, plan.job.save_interval
    if iteration % every == 0 or iteration == STEPS:
        return iteration, 1
    while True:
        iteration += 1
        if iteration % plan.drift.interval == 0:
            return iteration, 0
        if iteration % every == 0 or iteration == STEPS:
            return iteration, 1


def _committed(evidence: Evidence) -> Iterator[tuple[int, tuple[int, int]]]:
    for event in evidence.outcome.events("committed"):
        kind, _, number = str(event["label"]).partition(" ")
        if kind in ("train", "save"):
            yield event["replica"], (int(number), int(kind == "save"))


def finds_the_drift_in_time(evidence: Evidence) -> str:
    """The replica with the drift commits no record that compares the state.

    Of two replicas neither commits such a record.
    """
    plan = evidence.plan
    assert plan.drift is not None
    latest = _found_at(plan)
    suspects = {plan.drift.replica} if plan.job.replicas > 2 else {0, 1}
    late = sorted({record for replica, record in _committed(evidence) if replica in suspects and record >= latest})
    return f"it was to be found in {latest}, and {late} were committed" if late else ""


def outvotes_the_odd_one(evidence: Evidence) -> str:
    """Of three or more replicas only the drifted one is removed. A job of two replicas ends with exit code 12."""
    plan, code = evidence.plan, evidence.outcome.exit_code
    assert plan.drift is not None
    if plan.job.replicas == 2:
        return f"exit code {code}" if code != ExitCode.DIVERGED else ""
    if code:
        return f"exit code {code}"
    expected = {(plan.drift.replica, "diverged")}
    return f"removed were {sorted(evidence.losses())}" if evidence.losses() != expected else ""


def names_only_what_was_agreed(evidence: Evidence) -> str:
    """The newest checkpoint is the last one before the drift; where the others continue, the last of the run."""
    plan = evidence.plan
    assert plan.drift is not None and evidence.save is not None
    every = plan.job.save_interval
    expected = STEPS if plan.job.replicas > 2 else (plan.drift.step - 1) // every * every
    named = (evidence.save / TRACKER).read_text().strip()
    return f"the newest checkpoint is {named}, not {expected}" if named != str(expected) else ""


def is_proven_as_far_as_it_went(evidence: Evidence) -> str:
    """`check` finds no broken invariant. A run that ended early is not compared with its reference."""
    code, report = evidence.check(alone=evidence.outcome.exit_code != 0)
    return in_short(report) if code else ""


def goes_on_like_the_reference(evidence: Evidence) -> str:
    """If the job ended, a run that resumes from the newest checkpoint ends like the reference.

    If that is the last one, it is loaded, and the run ends well. A `fast` run is compared with no reference: the resumed
    run ends well, and `check` finds no broken invariant.
    """
    is_over = evidence.save is not None and not names_its_last(evidence)
    return _resumes_like_the_reference(evidence, is_over=is_over) if evidence.outcome.exit_code else ""


def _resumes_like_the_reference(evidence: Evidence, *, is_over: bool = False) -> str:
    assert evidence.resume is not None
    resumed = evidence.resume()
    if resumed.exit_code:
        return f"resumed from the newest checkpoint, it ends with {resumed.exit_code}"
    if is_over:
        return ""
    code, report = check(resumed.run_dir, evidence.reference)
    return f"resumed from the newest checkpoint: {in_short(report)}" if code else ""


def counts_anew_once(evidence: Evidence) -> str:
    """Only the step with the miscount was computed anew, and no replica was removed for the miscount."""
    miscount = evidence.plan.miscount
    assert miscount is not None
    steps = {event["step"] for event in evidence.outcome.events("miscounted")}
    if steps != {miscount.step}:
        return f"computed anew were {sorted(steps)}, not {miscount.step}"
    return "" if f"computed anew: step {miscount.step}," in evidence.check()[1] else "check does not say what was computed anew"


# --- Nodes ---------------------------------------------------------------------------------------------------------------


def ends_with_named_codes(evidence: Evidence) -> str:
    """The launchers on all nodes but the lost one end, with code 0.

    A node that is cut off for long may take the coordinator for lost, and end with 13; for ever, it does. The loss of the
    coordinator's node ends all with 13; if no rank was there, with 15 at the next save, or with 0 if they learn of the loss
    when all is trained, and have saved that.
    """
    plan, codes = evidence.plan, dict(evidence.outcome.codes)
    strike = plan.strike
    assert strike is not None
    named: dict[int, set[int]] = {node: {ExitCode.OK} for node in codes}
    if strike.kind is StrikeKind.LOSS:
        del codes[strike.node]
        if strike.node == 0:
            ends = {ExitCode.NO_REPLICA_LEFT} if plan.lost else {ExitCode.INTERRUPTED}
            if not plan.lost and set(codes.values()) == {ExitCode.OK} and not names_its_last(evidence):
                ends = {ExitCode.OK}
            named = dict.fromkeys(codes, ends)
    elif not strike.is_short:
        named[strike.node] = {ExitCode.NO_REPLICA_LEFT} | ({ExitCode.OK} if strike.seconds is not None else set())
    return "" if all(code in named[node] for node, code in codes.items()) else f"exit codes {codes}"


def leaves_nothing(evidence: Evidence) -> str:
    """Nothing is left on any node: no process, no port, no file in /dev/shm or /tmp."""
    return evidence.outcome.left[:200]


def loses_the_node(evidence: Evidence) -> str:
    """All replicas with ranks on the node are removed."""
    removed = {replica for replica, _ in evidence.losses()}
    missing = evidence.plan.lost - removed
    return f"removed were {sorted(removed)}, and not {sorted(missing)}" if missing else ""


def ends_its_ranks_on_return(evidence: Evidence) -> str:
    """A node that returns after it was removed ends its ranks, while the job goes on."""
    return f"left on the node are {evidence.unfenced}" if evidence.unfenced else ""


def is_one_history(evidence: Evidence) -> str:
    """By the ranks' own copies of their events, at most one side goes on, and names of checkpoints do not go back.

    At most one replica names. The writer is the lowest of the roster, so none names after one with a higher id.
    """
    applied, named = [], []
    for (replica, rank), events in evidence.kept().items():
        for event in events:
            if event["event"] == "applied":
                applied.append(Applied(event["t"], replica, rank, event["generation"], event["step"]))
            elif event["event"] == "checkpoint" and event["phase"] == "finished":
                named.append(Named(event["t"], replica, event["iteration"]))
    named.sort(key=lambda each: each.at)
    for earlier, later in itertools.pairwise(named):
        is_back = later.iteration <= earlier.iteration and later.replica != earlier.replica
        if is_back or later.replica < earlier.replica:
            return (
                f"replica {later.replica} named the checkpoint of iteration {later.iteration} after replica "
                f"{earlier.replica} had named that of iteration {earlier.iteration}"
            )
    return next(iter(History(applied).faults()), "")


def names_its_last(evidence: Evidence) -> str:
    """If the job saves, the newest checkpoint is that of its last step."""
    if evidence.save is None:
        return ""
    named = (evidence.save / TRACKER).read_text().strip()
    return f"the newest checkpoint is {named}" if named != str(evidence.plan.job.steps) else ""


def is_proven_with_what_ranks_kept(evidence: Evidence) -> str:
    """With what its ranks have kept of their events, so that a lost node has taken none along, the trace is proven as above."""
    verdict = verify.check(_whole(evidence), evidence.reference)
    # Nobody could fence a node that was lost, and nothing was there to fence.
    is_lost = evidence.plan.strike is not None and evidence.plan.strike.kind is StrikeKind.LOSS
    ended = tuple(f"replica {replica} was lost, and its ranks " for replica in evidence.plan.lost if is_lost)
    broken = [f"{each.invariant}: {each.message}" for each in verdict.violations if not each.message.startswith(ended or "?")]
    return next(iter([*broken, *verdict.problems, *verdict.not_judged]), "")


def _whole(evidence: Evidence) -> pathlib.Path:
    """Return a copy of the trace that also has the events that a node has taken along, and its end."""
    plan, run_dir = evidence.plan, evidence.outcome.run_dir
    whole = run_dir.with_name("whole")
    shutil.copytree(run_dir, whole, ignore=shutil.ignore_patterns("logs"))
    kept, placed = evidence.kept(), placement(plan.job, plan.slots)
    for node in range(len(plan.slots)):
        file = (whole / "nodes" / str(node) if node else whole) / "events.jsonl"
        events = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
        if events[-1]["event"] == "run_finished":
            continue
        written = Counter(map(_unstamped, events))
        missing = [
            event
            for (replica, rank), of_rank in kept.items()
            if placed.replicas[replica][rank].node == node
            for event in _beyond(of_rank, written)
        ]
        base = next(event["clock"] for event in events if event["event"] == "node_started")
        leads_s = max(milliseconds(base + event["h"]) / 1e3 - event["t"] for event in events if "h" in event)
        added = [event | {"t": milliseconds(event["h"]) / 1e3 - leads_s, "h": event["h"] - base}
                 for event in sorted(missing, key=lambda event: event["t"])]  # fmt: skip
        last = [*events, *added][-1]
        added.append({"event": "run_finished", "v": 2, "t": last["t"], "h": last["h"], "exit_code": 0, "reason": "lost"})
        with open(file, "wb") as rewritten:
            rewritten.writelines(json.dumps(event).encode() + b"\n" for event in [*events, *added])
    return whole


def _beyond(events: list[Event], written: Counter[str]) -> Iterator[Event]:
    """Yield the events that were not written, each as often."""
    for event in events:
        if written[_unstamped(event)]:
            written[_unstamped(event)] -= 1
        else:
            yield event


def breaks_nothing(evidence: Evidence) -> str:
    """`check` finds no broken invariant in what the trace has."""
    code, report = evidence.check(alone=True)
    return in_short(report) if code not in (ExitCode.OK, ExitCode.UNFINISHED) else ""


def goes_on_from_what_it_named(evidence: Evidence) -> str:
    """A run that resumes from the first checkpoint that was named after the strike ends like the reference.

    If that is the last one, it is loaded, and the run ends well.
    """
    assert evidence.save is not None
    finished = [(event["t"], event["iteration"]) for events in evidence.kept().values() for event in events
                if event["event"] == "checkpoint" and event["phase"] == "finished"]  # fmt: skip
    after = sorted(each for each in finished if each[0] > evidence.struck_at)
    if not after:
        return "no checkpoint was named after the strike"
    iteration = after[0][1]
    (evidence.save / TRACKER).write_text(str(iteration))
    return _resumes_like_the_reference(evidence, is_over=iteration == evidence.plan.job.steps)


ORDINARY = (ends_well, makes_all_steps, counts_well, is_proven)
STOPPED = (is_struck, *ORDINARY, loses_only_the_dead, says_that_it_was_stopped)
WITHOUT_DISK = (
    is_struck, ends_well, counts_well, ends_with_the_parameters_of_the_reference, leaves_out_what_it_says, tells_of_the_disk,
    loses_only_the_dead,
)  # fmt: skip
ON_NODES = (is_struck, ends_with_named_codes, leaves_nothing, is_one_history)
WITHOUT_NODE = (
    *ON_NODES, makes_all_steps, counts_well, loses_only_the_dead, loses_the_node, breaks_nothing,
    is_proven_with_what_ranks_kept, ends_with_the_parameters_of_the_reference, names_its_last,
)  # fmt: skip
COMEBACK = (*ORDINARY, *back.ALWAYS)
WITH_NEWCOMERS = (*back.AT_ANY_END, back.never_has_more)
"""Of a plain job that heals. Its newcomers come in time or not: its steps are as short as they are."""
EXPECTATIONS: Mapping[str, tuple[Expectation, ...]] = {
    "faults in steps": ORDINARY,
    "death at the start": ORDINARY,
    "fault in an evaluation": ORDINARY,
    "death of a writer": ORDINARY,
    "fault in a transfer": ORDINARY,
    "death in a running pass": ORDINARY,
    "stopped launcher": STOPPED,
    "stopped launcher and a death": STOPPED,
    "stalled disk": (is_struck, *ORDINARY, loses_only_the_dead, ends_with_the_parameters_of_the_reference),
    "full disk": WITHOUT_DISK,
    "failing disk": WITHOUT_DISK,
    "drift": (
        finds_the_drift_in_time, outvotes_the_odd_one, names_only_what_was_agreed, is_proven_as_far_as_it_went,
        goes_on_like_the_reference,
    ),
    "lost node": WITHOUT_NODE,
    "lost node of the writer": (*WITHOUT_NODE, goes_on_from_what_it_named),
    "lost node of the coordinator": (*ON_NODES, breaks_nothing, goes_on_like_the_reference),
    "short cut": (*ON_NODES, *ORDINARY, loses_only_the_dead, names_its_last),
    "long cut": (*WITHOUT_NODE, ends_its_ranks_on_return),
    "miscount": (ends_well, makes_all_steps, counts_anew_once, is_proven, loses_only_the_dead),
    "comeback": COMEBACK,
    "comeback of two at once": COMEBACK,
    "death before admission": COMEBACK,
    "death in a first step": COMEBACK,
    "death beside a newcomer": COMEBACK,
    "death after admission": COMEBACK,
    "all replaced": (*COMEBACK, back.replaces_all),
    "spare slots": (*COMEBACK, back.sets_slots_aside),
    "drain beside a newcomer": (*COMEBACK, back.gives_back_what_is_drained),
    "scale": (
        *ORDINARY, *back.AT_ANY_END, back.answers_requests_to_scale, back.has_what_it_was_asked_for, back.leaves_only_as_asked,
    ),
    "comeback between saves": (*COMEBACK, names_its_last),
    "end beside a newcomer": (
        back.ends_as_asked, counts_well, is_proven_as_far_as_it_went, *back.AT_ANY_END, goes_on_like_the_reference,
    ),
    "kills at any time": COMEBACK,
}  # fmt: skip
"""What is promised, in the order in which it is looked at."""
