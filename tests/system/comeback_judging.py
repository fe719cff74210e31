"""What is promised for the kinds of scenarios in which what is lost comes back (`comebacks.py`)."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import defaultdict

import psutil

from megatron_recover.cluster import status
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.faults import FaultKind
from tests.system.evidence import Event, Evidence, Expectation
from tests.system.kills import is_rank

_SCALED = re.compile(r"scale to (\d+) of \S+: ")
TIME_S, NUM_STEPS = 20.0, 10
"""A replica that is lost so long before the last step, and so many steps, has time to come back."""


def _generations(evidence: Evidence) -> list[tuple[Event, set[int]]]:
    """Each generation, and its roster without the newcomers that it turned away."""
    out = defaultdict(set)
    for event in evidence.outcome.events("turned_away"):
        out[event["generation"]] |= {*event["newcomers"]}
    return [(event, {*event["roster"]} - out[event["generation"]]) for event in evidence.outcome.events("generation")]


def _is_done(evidence: Evidence, what: str) -> bool:
    return any(act.rpartition(": ")[2].startswith(what) for act in evidence.acts())


def keeps_replicas_equal(evidence: Evidence) -> str:
    """After each step, all replicas have the same parameters, bit for bit, newcomers and `fast` runs included."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for event in evidence.outcome.events("applied"):
        found[event["label"], event["rank"]].add(event["parameter_digest"])
    differ = sorted(key for key, digests in found.items() if len(digests) > 1)
    return f"parameters differ after {differ[0][0]}" if differ else ""


def makes_no_generation_for_outsiders(evidence: Evidence) -> str:
    """Each generation follows from a member, a newcomer that joins, or a request; no loss outside the roster makes one."""
    for (_, before), (event, _) in itertools.pairwise(_generations(evidence)):
        lost, joins = {loss["replica"] for loss in event["losses"]}, {*event.get("newcomers", ())} - before
        if outsiders := lost - before:
            return f"generation {event['generation']} has the losses of {sorted(outsiders)}, which were not in the roster"
        if not (lost or joins or event.get("left") or event.get("reason") or event.get("void")):
            return f"generation {event['generation']} follows from nothing"
    return ""


def loses_no_member_that_nothing_hit(evidence: Evidence) -> str:
    """No member was removed except those that were hit; a newcomer counts from the commit of its first step on."""
    proven = {*range(evidence.plan.job.replicas)}
    for event in evidence.outcome.events("proven"):
        proven |= {*event["newcomers"]}
    removed = {replica for replica, _ in evidence.losses()} & proven
    return f"removed were {sorted(removed)}, hit {sorted(evidence.hit())}" if removed - evidence.hit() else ""


def comes_back(evidence: Evidence) -> str:
    """At the end all replicas are there again, but those that are not to come back, and no more; if there was time for it.

    Time is so much: 20 s and 10 steps since the last loss.
    """
    plan, (_, roster) = evidence.plan, _generations(evidence)[-1]
    full = plan.job.replicas
    has_all_happened = all(_is_done(evidence, act.do) for act in plan.acts if not act.do.startswith("sleep"))
    has_all_happened = has_all_happened and len(evidence.faults()) >= len(plan.faults)
    most = full - plan.missing if has_all_happened else full
    if len(roster) > most:
        return f"at the end there are {sorted(roster)}, more than {most}"
    return (
        "" if len(roster) >= full - plan.missing or not _had_time(evidence) else f"at the end there are only {sorted(roster)}"
    )


def never_has_more(evidence: Evidence) -> str:
    """There are never more replicas than at the start."""
    most = evidence.plan.job.replicas
    more = [sorted(roster) for _, roster in _generations(evidence) if len(roster) > most]
    return f"at some time there are {more[0]}, more than {most}" if more else ""


def _had_time(evidence: Evidence) -> bool:
    outcome = evidence.outcome
    steps = {(act.at.replica, act.at.step) for act in evidence.plan.acts if act.do.startswith("scale")}
    asked = [event for event in outcome.events("applied") if (event["replica"], event["step"]) in steps] if steps else []
    changes = (*outcome.events("fenced"), *outcome.events("newcomer_lost"), *asked)
    changed_at = max((event["t"] for event in changes), default=0.0)
    since = [event for event in outcome.events("committed") if event["t"] > changed_at]
    return len({event["label"] for event in since}) >= NUM_STEPS and since[-1]["t"] - changed_at > TIME_S


def leaves_no_rank(evidence: Evidence) -> str:
    """No rank lives after the end of the job, newcomers included."""
    for file in sorted(evidence.outcome.run_dir.glob("pid.*")):
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_rank(psutil.Process(int(file.read_text()))):
                return f"{file.name.removeprefix('pid.')} lives"
    return ""


def replaces_all(evidence: Evidence) -> str:
    """None of the replicas of the start is left, where there was time to end them one after the other."""
    plan, (_, roster) = evidence.plan, _generations(evidence)[-1]
    are_ended = {*range(plan.job.replicas)} <= evidence.hit()
    left = sorted(roster & {*range(plan.job.replicas)})
    return f"{left} are left" if are_ended and left else ""


def sets_slots_aside(evidence: Evidence) -> str:
    """A slot that breaks twice of its own is set aside, which is said. A crash loop forms no more newcomers than that takes."""
    raised = [event["replica"] for event in evidence.faults() if event["kind"] == FaultKind.RAISE.value]
    if len(raised) >= 2 and "set aside" not in evidence.outcome.output:
        return "nobody says that a slot was set aside"
    formed = [event["newcomer"] for event in evidence.outcome.events("forming")]
    most = len(raised) + (not evidence.plan.missing)
    return f"formed were {formed}, of which {raised} broke" if len(raised) >= 2 and len(formed) > most else ""


def gives_back_what_is_drained(evidence: Evidence) -> str:
    """Who is drained leaves without a loss."""
    if not _is_done(evidence, "drain"):
        return ""
    asked = {int(act.do.split()[1]) for act in evidence.plan.acts if act.do.startswith("drain")}
    left = {replica for event in evidence.outcome.events("generation") for replica in event["left"]}
    return f"drained was {sorted(asked)}, and {sorted(left)} have left" if left != asked else ""


def _accepted(evidence: Evidence) -> list[int]:
    """The number at the start, and those that the job has accepted since, in their order."""
    return [evidence.plan.job.replicas, *(int(number) for number in _SCALED.findall(evidence.outcome.output))]


def answers_requests_to_scale(evidence: Evidence) -> str:
    """Each request for another number is accepted. The job may refuse one in the first step of a newcomer, or at its end."""
    found = status.read(evidence.outcome.run_dir)
    refused = [answer.refused for answer in found.answers if answer.refused] if found is not None else []
    if wrong := [why for why in refused if not why.endswith("ask again") and not why.startswith("the job ends")]:
        return f"it refuses to scale: {wrong[0]}"
    asked = [act.rpartition(" ")[2] for act in evidence.acts() if act.rpartition(": ")[2].startswith("scale")]
    answered = len(_accepted(evidence)) - 1 + len(refused)
    is_wrong = answered < len(asked) and _had_time(evidence)
    return f"asked for was {', '.join(asked)}, and {answered} were answered" if is_wrong else ""


def has_what_it_was_asked_for(evidence: Evidence) -> str:
    """There are never more replicas than the largest number that was wanted. At the end there are as many as were wanted last.

    They are if there was time for it since the last request and the last loss: 20 s and 10 steps.
    """
    wanted, generations = _accepted(evidence), _generations(evidence)
    for event, roster in generations:
        if len(roster) > max(wanted):
            return f"in generation {event['generation']} there are {sorted(roster)}, more than {max(wanted)}"
    _, roster = generations[-1]
    is_wrong = len(roster) != wanted[-1] and _had_time(evidence)
    return f"at the end there are {sorted(roster)}, and wanted were {wanted[-1]}" if is_wrong else ""


def leaves_only_as_asked(evidence: Evidence) -> str:
    """No more replicas leave than requests for fewer have made too many."""
    left = [replica for event in evidence.outcome.events("generation") for replica in event["left"]]
    most = sum(max(0, before - after) for before, after in itertools.pairwise(_accepted(evidence)))
    return f"{left} have left, and {most} were too many" if len(left) > most else ""


def ends_as_asked(evidence: Evidence) -> str:
    """The run that is asked to end does so, with exit code 15, after a save."""
    code = evidence.outcome.exit_code
    wanted = ExitCode.INTERRUPTED if _is_done(evidence, "term") else ExitCode.OK
    if code != wanted:
        return f"exit code {code}"
    return "" if evidence.outcome.saves()[-1:] and evidence.outcome.saves()[-1][1] == "finished" else "it has saved nothing"


AT_ANY_END: tuple[Expectation, ...] = (
    keeps_replicas_equal, makes_no_generation_for_outsiders, loses_no_member_that_nothing_hit, leaves_no_rank,
)  # fmt: skip
ALWAYS = (*AT_ANY_END, comes_back)
