"""A real job that reads ahead, and loses a replica, ends bit for bit as one in which the training thread reads."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from tests.system.jobs import ROOT, Job, Outcome, chaos_text, run_job

pytestmark = pytest.mark.timeout(300)


def applied(outcome: Outcome) -> list[tuple[object, ...]]:
    """Loss and digest of the parameters of each step on replica 0."""
    events = [event for event in outcome.events("applied") if event["replica"] == 0]
    return [tuple(event.get(name) for name in ("label", "loss", "parameter_digest")) for event in events]


def has_read_ahead(outcome: Outcome) -> bool:
    """Whether a rank said so (`reading_pretrain.py`)."""
    return any("reads ahead" in log.read_text() for log in (outcome.run_dir / "logs").iterdir())


def test_num_workers_changes_when_samples_are_read_and_nothing_else(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    script = ROOT / "tests" / "system" / "reading_pretrain.py"
    job = Job(replicas=1, steps=4, microbatches=8, eval_interval=3, extra=("--num-workers", "0"))
    plain = run_job(job, tmp_path / "plain", data, script=script).expect(0)
    job = dataclasses.replace(job, replicas=2, extra=("--num-workers", "3"))
    kill = chaos_text("1 0 backward step=2 microbatch=5")
    ahead = run_job(job, tmp_path / "ahead", data, script=script, chaos=kill).expect(0)
    assert ahead.summary["replicas_end"] == 1
    assert has_read_ahead(ahead) and not has_read_ahead(plain)
    assert applied(ahead) == applied(plain) and len(applied(plain)) >= 5
