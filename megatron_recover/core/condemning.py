"""The machine of the coordinator that decides which replica an agent may condemn for a hang.

The agent of a node judges its own ranks (`core/detector.py`). Two facts are not on its node:

- whether another replica lives, without which nobody is condemned before the deadline
  (`core/detector.py`, Note [Who may be fenced for a hang]);
- what the ranks of the same replica do on other nodes, for which its own may wait.

So an agent that would condemn a replica only accuses it (`Suspected`). This machine asks the other
nodes of the accused replica what their ranks do (`Ask`), and tells the agent that and whether
another member lives (`Tell`). The agent judges once more with these facts. It then condemns, or
withdraws by its next `Suspected`.

Note [Nobody is accused for want of news]
    Each message may be late or lost with its agent.

    - The agent ignores a `Tell` that does not answer its newest suspicions, and judges anew by one
      that does. So nobody is condemned whose rank has moved.
    - An accusation waits for as long as a node that has ranks of the accused replica does not
      answer or is not heard.
    - A member with a node that is not heard does not count as one that lives. Nor does one that is
      silent for half the time after which it hangs: each agent measures limits of its own, so one
      stall of all may reach the limits of some first.
    - Two replicas that are accused at the same instant are both silent, so neither is condemned.

    What is not condemned is ended by its agent after the user's deadline, without asking.

Note [No message without an accusation]
    Nobody reports what its ranks do unless it is asked. Nobody is asked but for a replica that is
    accused and has ranks on several nodes. So 1,024 agents cost the coordinator nothing while
    nothing hangs.

Note [Figures of one node]
    An agent learns limits from its own ranks, and judges only those. Every step involves every
    rank, so all agents measure the same times of steps. A phase through which no rank of the node
    goes, such as the loss on the last stage, is one in which no rank of the node is judged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from megatron_recover.core.values import ReplicaId, Value
from megatron_recover.core.verdict import Known, Part

NodeNumber = int


class Suspected(Value, frozen=True):
    """Input: the newest suspicions of the agent of a node; they replace the ones before."""

    node: NodeNumber
    number: int
    """Number of the report, which increases; the answers name it."""
    silent: frozenset[ReplicaId]
    """The same as in `Suspects`."""
    accused: frozenset[ReplicaId]


class Answered(Value, frozen=True):
    """Input: what the ranks of a replica do on a node, as `question` asked."""

    node: NodeNumber
    question: int
    part: Part


class Deaf(Value, frozen=True):
    """Input: the nodes that are not heard at present, or are lost."""

    nodes: frozenset[NodeNumber]


class Rostered(Value, frozen=True):
    """Input: the members of the newest generation."""

    roster: tuple[ReplicaId, ...]


class Hosted(Value, frozen=True):
    """Input: the nodes that have ranks of a newcomer, which may become a member."""

    replica: ReplicaId
    nodes: frozenset[NodeNumber]


Input = Suspected | Answered | Deaf | Rostered | Hosted


class Ask(Value, frozen=True):
    """Effect: ask the agent of a node what its ranks of a replica do."""

    node: NodeNumber
    question: int
    replica: ReplicaId


class Tell(Value, frozen=True):
    """Effect: tell the agent of a node what is known about a replica that it accuses."""

    node: NodeNumber
    report: int
    """Number of the report that accuses."""
    known: Known


Effect = Ask | Tell


class Question(Value, frozen=True):
    """An accusation of which the other nodes of the replica are asked."""

    number: int
    missing: frozenset[NodeNumber]
    """Nodes that have not answered."""
    parts: tuple[Part, ...] = ()


Accusation = tuple[NodeNumber, ReplicaId]
"""The node that accuses, and the replica."""


class CondemningState(Value, frozen=True):
    """Everything that the machine knows. Start with `CondemningState(hosts)`."""

    hosts: Mapping[ReplicaId, frozenset[NodeNumber]]
    """The nodes that have ranks of each replica."""
    roster: tuple[ReplicaId, ...] = ()
    deaf: frozenset[NodeNumber] = frozenset()
    reports: Mapping[NodeNumber, Suspected] = MappingProxyType({})
    """The newest report of each node."""
    questions: Mapping[Accusation, Question] = MappingProxyType({})
    told: Mapping[Accusation, bool] = MappingProxyType({})
    """Accusations that were answered, and whether their node may condemn the replica."""
    asked: int = 0
    """Number of the newest question."""


def accused(state: CondemningState) -> frozenset[ReplicaId]:
    """Return the replicas that any node accuses: they are not at work, whatever other nodes see."""
    return frozenset(replica for report in state.reports.values() for replica in report.accused)


def step(state: CondemningState, event: Input) -> tuple[CondemningState, tuple[Effect, ...]]:
    """Return the next state and the effects of an input."""
    match event:
        case Suspected(node):
            state = replace(
                state,
                reports={**state.reports, node: event},
                questions={key: each for key, each in state.questions.items() if key[0] != node},
                told={key: each for key, each in state.told.items() if key[0] != node},
            )
        case Deaf(nodes):
            state = replace(state, deaf=nodes)
        case Rostered(roster):
            state = replace(state, roster=roster)
        case Hosted(replica, nodes):
            state = replace(state, hosts={**state.hosts, replica: nodes})
        case Answered(node, number, part):
            questions = {
                key: replace(each, missing=each.missing - {node}, parts=(*each.parts, part))
                if each.number == number and node in each.missing
                else each
                for key, each in state.questions.items()
            }
            state = replace(state, questions=questions)
    return _advance(state)


def _living(state: CondemningState, condemned: set[ReplicaId]) -> set[ReplicaId]:
    """Return the members that are heard, not silent, and not being condemned."""
    out = condemned.union(*(report.silent for report in state.reports.values()))
    return {each for each in state.roster if each not in out and state.hosts[each].isdisjoint(state.deaf)}


def another_lives(living: Collection[ReplicaId], replica: ReplicaId) -> bool:
    """Return whether a member besides `replica` lives."""
    return len(living) > (replica in living)


def _condemned(state: CondemningState) -> set[ReplicaId]:
    """Return the replicas that a node was permitted to condemn, and has not withdrawn."""
    return {replica for (_, replica), may_condemn in state.told.items() if may_condemn}


def _advance(state: CondemningState) -> tuple[CondemningState, tuple[Effect, ...]]:
    """Ask what is not known of the accused, and tell what is.

    An accusation that was answered while nobody else lived is answered once more when somebody
    does, by a new question. All nodes may accuse at once, so the effort for each input grows with
    the number of nodes, and not with its square.
    """
    if not any(report.accused for report in state.reports.values()):
        return state, ()
    effects: list[Effect] = []
    condemned, roster, asked = _condemned(state), set(state.roster), state.asked
    living, questions, told = _living(state, condemned), dict(state.questions), dict(state.told)
    for node, report in sorted(state.reports.items()):
        for replica in sorted(report.accused & roster):
            key, lives = (node, replica), another_lives(living, replica)
            if not state.hosts[replica].isdisjoint(state.deaf) or replica in condemned or (key in told and not lives):
                questions.pop(key, None)  # what was answered may be old when it is needed
                continue
            question = questions.get(key)
            if question is None:
                asked += 1
                question = questions[key] = Question(asked, state.hosts[replica] - {node})
                effects += [Ask(other, question.number, replica) for other in sorted(question.missing)]
            if not question.missing:
                del questions[key]
                told[key] = lives
                effects.append(Tell(node, report.number, Known(replica, question.parts, lives)))
                if lives:
                    condemned.add(replica)
                    living.discard(replica)
    return replace(state, questions=questions, told=told, asked=asked), tuple(effects)
