"""Repair in the simulator: lost replicas come back in place and on spares, and what that costs is told."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_recover.cli import main
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.core.placement import Slot
from megatron_recover.faults import Fault
from megatron_recover.sim.timed import newcomer, scenario_file
from megatron_recover.sim.timed.course import Course
from megatron_recover.sim.timed.healing import spread
from megatron_recover.sim.timed.job import TimedJob
from megatron_recover.sim.timed.models import PolicyName, Scenario, Timing
from megatron_recover.sim.timed.newcomer import Newcomer
from megatron_recover.sim.timed.places import Cause, Places, Restarts
from megatron_recover.sim.timed.policies import simulate
from megatron_recover.sim.timed.recover import RecoverJob, recover
from megatron_recover.trainer.state_reader import MAX_SOURCES
from scripts.study import repair as study
from tests.sim.build import job_of, kill, scenario, step_seconds

REPAIR: dict[str, Any] = {
    "vacate_s": 5.0, "forming_s": 60.0, "state_bytes": 1e9, "state_bytes_per_s": 1e9, "digest_s": 0.1, "node_gpus": 1,
}  # fmt: skip


def repaired(steps: int = 60, per_gpu_hour: float = 0.0, replicas: int = 4, **changes: Any) -> Scenario:
    """A small job of steps of about 19 s, whose replicas have two nodes each."""
    failures = {"per_gpu_hour": per_gpu_hour, "until_replicas": 2} if per_gpu_hour else {}
    job = {"steps": steps, "replicas": replicas, "microbatches": 16 * replicas}
    return scenario(job=job, failures=failures, repair=REPAIR | changes)


class Killed(RecoverJob):
    """A job in which a scenario's `[repair]` heals, and replicas die at given times of given causes."""

    def __init__(self, what: Scenario, deaths: list[tuple[float, int, bool]], policy: PolicyName = "recover-in-place") -> None:
        """`deaths`: time, replica, and whether the node of its rank 0 is gone with it."""
        super().__init__(what, policy=policy)
        assert self.healing is not None
        self.healer = self.healing
        causes = {replica: Cause(0, is_hardware) for _, replica, is_hardware in deaths}
        order = [causes[replica] for _, replica, _ in sorted(deaths)]
        self.healer.places.cause = lambda: order.pop(0)  # type: ignore[method-assign]
        for time, replica, _ in deaths:
            self.later(time, lambda replica=replica: self.kill(replica))  # type: ignore[misc]
        assert self.run().exit_code == 0
        self.new = self.healer.account


class Whole(Killed):
    """The same job, with every step simulated."""

    def _leave_out(self, step: int) -> None: ...


@pytest.mark.parametrize(("time", "num_refused"), [(100.0, 1), (113.0, 0), (119.0, 1)])
def test_a_replica_that_dies_comes_back_in_its_slots(time: float, num_refused: int) -> None:
    """The step that runs when it is formed has time enough left, or not."""
    job = Killed(repaired(), [(time, 2, False)])
    new, outcome = job.new, job.meter.outcome
    assert (new.num_asked, new.num_formed, new.num_joined, new.num_refused, new.num_open) == (1, 1, 1, num_refused, 0)
    assert (outcome.losses, outcome.replicas_end, outcome.microbatches) == (1, 4, 60 * 64)
    step_s = job.meter.ideal_s(3, 64)
    (to_full,) = new.to_full_s
    rest_s = 2 * step_s + 1 if num_refused else step_s
    assert 5 + 60 < to_full < 5 + 60 + rest_s, "it takes part in the step that runs, or in the next one"
    assert 0.95 < outcome.ettr < outcome.goodput_of_ideal <= 1


def test_steps_that_are_left_out_change_nothing() -> None:
    """Whatever is due later comes at the same time, seen from the start of the job."""
    deaths = [(100.0, 2, False), (400.0, 1, True), (1200.0, 3, False)]
    what = repaired(150, repair_h=0.25)
    short, whole = Killed(what, deaths), Whole(what, deaths)
    assert short.num_left_out > 50 and whole.num_left_out == 0
    assert short.new.num_joined == whole.new.num_joined == 3
    for mine, other in (
        (short.meter.outcome.seconds, whole.meter.outcome.seconds), (short.meter.outcome.ettr, whole.meter.outcome.ettr),
        (short.meter.outcome.gpu_seconds, whole.meter.outcome.gpu_seconds),
        (short.new.to_full_s, whole.new.to_full_s), (short.new.entries_s, whole.new.entries_s),
    ):  # fmt: skip
        assert mine == pytest.approx(other, rel=1e-6)


def test_a_node_that_is_gone_is_waited_for_or_replaced_by_a_spare() -> None:
    never = Killed(repaired(), [(100.0, 2, True)])
    assert (never.new.num_asked, never.new.num_open, never.new.to_full_s) == (0, 1, [])
    later = Killed(repaired(repair_h=0.1), [(100.0, 2, True)])
    assert 360 + 60 < later.new.to_full_s[0] < 360 + 60 + 45
    spare = Killed(repaired(repair_h=0.1, spares=1), [(100.0, 2, True)], "recover-spares")
    assert 5 + 60 < spare.new.to_full_s[0] < 5 + 60 + 45
    assert spare.healer.places.living == {0, 1, 3, 4}
    assert never.meter.outcome.ettr < later.meter.outcome.ettr < spare.meter.outcome.ettr


def test_healthy_nodes_of_two_broken_replicas_form_one() -> None:
    job = Killed(repaired(), [(100.0, 2, True), (101.0, 1, True)])
    assert (job.new.num_joined, job.new.num_open, job.meter.outcome.replicas_end) == (1, 2, 3)
    seats = sorted(past.slot for past in job.healer.places.pasts if past.user == 4)
    assert seats == [Slot(3, 0), Slot(5, 0)]


def test_a_newcomer_that_dies_is_formed_again_and_costs_nobody_a_generation() -> None:
    job = Killed(repaired(), [(100.0, 2, False), (140.0, 4, False)])
    assert (job.new.num_asked, job.new.num_formed, job.new.num_joined, job.new.num_lost) == (2, 1, 1, 1)
    assert job.meter.outcome.losses == 1 and len(job.new.to_full_s) == 1
    assert job.coordinator.state.generation == 3, "the first, one without replica 2, one with replica 5"


@pytest.mark.parametrize(
    ("state_s", "reason"), [(22.5, "it is too late in train"), (40.0, "a step ended while its state was read")]
)
def test_a_newcomer_that_reads_too_slowly_gives_up_and_holds_nobody_up(state_s: float, reason: str) -> None:
    job = Killed(repaired(40, state_bytes=state_s * 1e9), [(100.0, 2, False)])
    new = job.new
    assert new.num_gave_up >= 1 and new.num_joined == 0 and new.num_open == 1
    assert new.num_refused >= newcomer.TRIES
    others = sum(count for each, count in new.refusals.items() if reason not in each)
    assert others <= new.num_formed, "the step that runs when a newcomer is formed has less time left"
    off = recover(scenario(job={"steps": 40, "microbatches": 64}))
    assert off.goodput_of_ideal == pytest.approx(job.meter.outcome.goodput_of_ideal, abs=0.01)


def test_the_tries_are_those_of_a_real_newcomer() -> None:
    from megatron_recover.trainer import entering

    assert newcomer.TRIES == entering.NUM_TRIES


def test_healing_keeps_a_job_whole_that_loses_replicas_at_random() -> None:
    what = repaired(1500, 0.2, replicas=6, hardware_share=0.5, repair_h=1.0, spares=4)
    what = scenario_with(what, ("recover", "recover-in-place", "recover-spares", "checkpoint-restart"))
    off, in_place, spares, restart = simulate(what).values()
    assert off.losses == 4 and off.replicas_end == 2 and off.newcomers is None
    assert off.ettr < in_place.ettr < spares.ettr and restart.ettr < spares.ettr and spares.ettr > 0.97
    assert in_place.newcomers is not None and spares.newcomers is not None
    assert spares.newcomers.num_joined >= spares.losses - 1 > 5
    for outcome in (off, in_place, spares):
        assert outcome.goodput_of_ideal > 0.99 and outcome.microbatches == 1500 * 96


def scenario_with(what: Scenario, policies: tuple[PolicyName, ...]) -> Scenario:
    """The scenario with these policies."""
    return msgspec.structs.replace(what, policies=policies)


def test_a_rank_can_stand_for_several_gpus() -> None:
    """Only a message inside a replica may take less: its first stage has no other rank."""
    one = scenario(job={"ranks": 4, "stages": 2})
    four = scenario(job={"ranks": 2, "stages": 2, "gpus_a_rank": 2})
    mine, other = recover(one), recover(four)
    assert mine.seconds == pytest.approx(other.seconds, abs=2 * 4 * one.network.local_latency_s)
    assert mine.gpu_seconds == pytest.approx(other.gpu_seconds, rel=1e-5)


def test_one_rank_can_stand_for_a_replica_of_many_stages() -> None:
    """All of it takes as long, with a loss too: the first stage is the last to end its pass."""
    job = {"stages": 4, "steps": 4}
    per_stage, alone = (
        step_seconds(ended(scenario(job=job | {"ranks": ranks}), kill(2, 0, "forward", 2, occurrence=4))) for ranks in (4, 1)
    )
    assert alone == pytest.approx(per_stage, rel=2e-3)
    assert alone[3] > 1.1 * alone[1], "a replica is lost"


def ended(what: Scenario, *faults: Fault) -> TimedJob:
    """The job of a scenario with these faults, at its end."""
    job = job_of(what, *faults)
    assert job.run().exit_code == 0
    return job


def test_a_restart_takes_in_the_nodes_that_are_healthy() -> None:
    what = repaired(repair_h=1.0, spares=1, hardware_share=1.0)
    restarts = Restarts(what)
    restarts.lost(100.0)
    assert restarts.restarted(200.0) == 4, "the spare"
    restarts.lost(300.0)
    assert restarts.restarted(400.0) == 3
    assert restarts.restarted(100.0 + 3600.0) == 4, "the first node is back"


def test_a_slot_is_not_used_before_its_processes_have_ended() -> None:
    places = Places(repaired(), num_spares=0)
    places.lost(2, LossKind.EXCEPTION, Cause(0, is_hardware=False), 1.0)
    assert places.plan(2.0).newcomers == ()
    places.vacated(2)
    (newcomer,) = places.plan(3.0).newcomers
    assert newcomer.slots == (Slot(4, 0), Slot(5, 0))


def test_a_spread_is_median_95_percent_and_maximum() -> None:
    assert spread([]) is None
    assert spread([3.0]) == {"median": 3.0, "95 %": 3.0, "max": 3.0}
    assert spread([*map(float, range(1, 101))]) == {"median": 50.5, "95 %": 95.0, "max": 100.0}


def test_the_verb_tells_the_ratio_and_the_newcomers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.toml"
    text = (
        'policies = ["recover", "recover-in-place"]\n[job]\nreplicas = 4\nranks = 2\nmicrobatches = 64\nsteps = 300\n'
        "[compute]\nmicrobatch_s = 1.0\n[network]\nbytes_per_s = 1e9\ngradient_bytes = 1e8\n[failures]\nper_gpu_hour = 0.5\n"
        "until_replicas = 2\n[repair]\nforming_s = 30\nstate_bytes = 1e9\nstate_bytes_per_s = 1e9\nnode_gpus = 2\n"
    )
    path.write_text(text)
    assert main(["simulate", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["policies"]
    assert found["recover"]["ettr"] < found["recover-in-place"]["ettr"] < 1 and "newcomers" not in found["recover"]
    new = found["recover-in-place"]["newcomers"]
    assert new["joined"] == new["formed"] > 1 and 40 < new["loss_to_full_strength_s"]["median"] < 90
    assert main(["simulate", str(path)]) == 0
    said = capsys.readouterr().out
    assert "loss to full strength, s: median, 95 %, max" in said
    path.write_text(text.replace("node_gpus = 2", "node_gpus = 3"))
    with pytest.raises(SystemExit):
        main(["simulate", str(path)])
    assert "node_gpus is 3; it must divide ranks x gpus_a_rank of [job], which is 2" in capsys.readouterr().err


def growth(few: int, many: int) -> list[str]:
    """What a newcomer needs more of in a job of `many` replicas than in one of `few`, beyond the one announcement to each."""
    small, large = study.join_job(few), study.join_job(many)
    first, last = ([one.asked_at - one.read_at, one.admitted_at - one.asked_at] for one in (small, large))
    grows = {
        "messages of the newcomer": large.num_of_newcomer - small.num_of_newcomer,
        "messages of the coordinator before it announces": large.num_of_coordinator - small.num_of_coordinator,
        "members that are read": large.num_sources > MAX_SOURCES,
        "reading and digesting": last[0] - first[0] > 1e-6,
        "from the claim to the admission": last[1] - first[1] > 4 * study.MESSAGE_S * (many - few),
        "from the begin of the window to the admission": sum(last) / sum(first) > 1.2,
    }
    assert small.num_of_newcomer and small.num_of_coordinator and small.num_sources and first[0] > 0
    return [name for name, does in grows.items() if does]


def test_the_work_of_a_join_does_not_grow_with_the_job() -> None:
    assert growth(4, 128) == []


@pytest.mark.parametrize(
    ("defect", "grows"),
    [
        ("greets all", "messages of the newcomer"),
        ("reads all", "members that are read"),
        ("digests all", "reading and digesting"),
    ],
)
def test_work_for_each_replica_is_noticed(defect: str, grows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the whole takes hardly longer by any of these, so a ratio of the times alone does not show it."""
    form = RecoverJob.form

    def greeting(self: RecoverJob, number: int) -> None:
        form(self, number)
        for _ in self.coordinator.state.roster:
            self.send(self.replicas[number], self.coordinator, self.clock.now, self.hello(number))

    def digested(self: Newcomer, step: int, course: Course) -> None:
        job = self.job
        job.clock.after(1e-3 * len(job.replicas), all_have_read, self, step, course)

    all_have_read = Newcomer._all_have_read
    if defect == "greets all":
        monkeypatch.setattr(RecoverJob, "form", greeting)
    elif defect == "reads all":
        monkeypatch.setattr(RecoverJob, "sources", lambda self, serving: serving)
    else:
        monkeypatch.setattr(Newcomer, "_all_have_read", digested)
    assert growth(4, 16) == [grows]


def test_the_study_writes_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "REPLICAS", (4, 8))
    monkeypatch.setattr(study, "SETTINGS", study.SETTINGS[2:3])
    monkeypatch.setattr(study, "VARIATIONS", ((study.META, "spares", (0, 8)),))
    folder = Path(__file__).parents[2] / "scenarios"
    assert study.main(["--out", str(tmp_path), "--days", "0.1", "--scenarios", str(folder)]) == 0
    said = capsys.readouterr().out
    for name, head in study.HEADS.items():
        with (tmp_path / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert tuple(rows[0]) == head and f"{name}:" in said
    assert rows[-1]["replicas"] == "last over first"


@pytest.mark.parametrize("name", [name for name, _, _ in study.SETTINGS])
def test_the_published_settings_have_the_size_that_their_names_say(name: str) -> None:
    what = scenario_file.load(Path(__file__).parents[2] / "scenarios" / f"{name}.toml")
    assert what.job.replicas * what.job.gpus == int(name.rsplit("-", 1)[1])
    timing = Timing.of(what)
    assert timing.state_s() + timing.digest_s() < timing.ideal_step_s(what.job.replicas, what.job.microbatches)
