"""A run of the campaign that has ended, with everything that the judge looks at."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_recover.faults import FaultKind
from tests.system.jobs import Outcome, check
from tests.system.joining_pretrain import ACTS
from tests.system.plans import Scenario

Event = dict[str, Any]


@dataclass
class Evidence:
    """A run that has ended, and what it is compared with."""

    plan: Scenario
    outcome: Outcome
    reference: pathlib.Path | None
    """The failure-free run that an exact one has to end like; None: the run is `fast`, and is compared with nothing."""
    copies: pathlib.Path | None = None
    """Where its ranks have kept their events for themselves (`struck_pretrain.py`)."""
    save: pathlib.Path | None = None
    has_struck: bool = True
    """Whether what was to come from outside has come."""
    struck_at: float = 0.0
    """When, on the monotonic clock of the machine."""
    unfenced: str = ""
    """Ranks that are left on a node that was removed and has returned."""
    resume: Callable[[], Outcome] | None = None
    """Goes on from the newest checkpoint, without any fault."""
    killed: tuple[str, ...] = ()
    """REPLICA.RANK of each rank that was killed from outside at any time (`kills.py`)."""
    verdicts: dict[pathlib.Path | None, tuple[int, str]] = field(default_factory=dict)
    """Of `check`, by what it was to compare with."""

    def check(self, *, alone: bool = False) -> tuple[int, str]:
        """The exit code and the words of `check` against the reference, or of `check` alone."""
        against = None if alone else self.reference
        if against not in self.verdicts:
            self.verdicts[against] = check(self.outcome.run_dir, against)
        return self.verdicts[against]

    def kept(self) -> dict[tuple[int, int], list[Event]]:
        """All events of each rank, as it has kept them itself."""
        found = {}
        for file in sorted(self.copies.glob("events.*") if self.copies is not None else ()):
            _, replica, rank = file.name.split(".")
            lines = file.read_bytes().split(b"\n")[:-1]  # one that was killed may have left half a line
            found[int(replica), int(rank)] = [json.loads(line) for line in lines]
        return found

    def faults(self) -> list[Event]:
        """Those that struck inside ranks."""
        kept = [event for events in self.kept().values() for event in events if event["event"] == "fault"]
        return kept if self.copies is not None else self.outcome.events("fault")

    def acts(self) -> list[str]:
        """What ranks did to others or asked for, in words that end with the act (`joining_pretrain.py`)."""
        file = self.outcome.run_dir / ACTS
        return file.read_text().splitlines() if file.exists() else []

    def hit(self) -> set[int]:
        """The replicas that something struck that ends them, or may do so."""
        acts = [act.rpartition(": ")[2].split() for act in self.acts()]
        return {
            *(event["replica"] for event in self.faults() if event["kind"] != FaultKind.SLOW.value),
            *(int(who) for what, *whom in acts if what == "kill" for who in whom[:1]),
            *(int(who.split(".")[0]) for who in self.killed),
        }

    def losses(self) -> set[tuple[int, str]]:
        """Who was removed, and why."""
        return {
            (loss["replica"], loss["kind"]) for event in self.outcome.events("generation") for loss in event["losses"]
        }  # fmt: skip


Expectation = Callable[[Evidence], str]
"""What is wrong, in words; empty: nothing."""


def in_short(report: str) -> str:
    """What `check` found wrong, or else its last line."""
    lines = report.splitlines()
    wrong = [line.strip() for line in lines if "BROKEN" in line or line.startswith("PROBLEM")]
    return "; ".join(wrong or lines[-1:])
