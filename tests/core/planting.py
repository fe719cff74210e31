"""What tests need that plant a bug and let the explorer find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_recover.core import replica, replica_generation, replica_reports, replica_step
from megatron_recover.sim.explore.explorer import Exploration, Explorer, Scenario
from megatron_recover.sim.explore.threads import Threads


def explore(simulator: Threads | None = None, **scenario: Any) -> Exploration:
    return Explorer(Scenario("planted", **scenario), simulator).run(limit=500_000)


def caught(report: Exploration, *invariants: int) -> None:
    """The exploration found one of these invariants broken, and says how."""
    assert report.found is not None, f"the bug was not found in {report.states} states"
    print("\n".join(report.found.lines))
    print(report.found.detail)
    assert any(report.found.detail.startswith(f"INV-{number}:") for number in invariants), report.found.detail
    assert report.found.lines


def plant(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> None:
    """Replace a function wherever the machine of a replica uses it."""
    modules = [module for module in (replica_generation, replica_step, replica_reports) if hasattr(module, name)]
    assert modules, name
    for module in modules:
        monkeypatch.setattr(module, name, function)


def handle(monkeypatch: pytest.MonkeyPatch, kind: type, handler: Callable[[replica.ReplicaState, Any], replica.Step]) -> None:
    """Replace the handler of an input in every phase that has one; it may lead anywhere."""
    for rows in replica.TABLE.values():
        if kind in rows:
            monkeypatch.setitem(rows, kind, replica.Row(handler, frozenset(replica.ReplicaPhase)))  # type: ignore[arg-type]
