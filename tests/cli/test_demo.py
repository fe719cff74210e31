"""The demo's verdict: it claims what the traces prove, and fails when any of it is missing. The runs are prepared ones."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cli import demo
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.data_plane.nccl import MOST_QUEUES
from megatron_recover.megatron.launch.preflight import preflight
from megatron_recover.observe.gaps import LAUNCHER
from tests.observe import traces

Events = list[trace.Event]


def _faulty(*, steps: int = 20, is_healed: bool = True, exit_code: int = ExitCode.INTERRUPTED) -> traces.Run:
    """A run that loses replica 0 and then replica 2, which come back as replicas 3 and 4."""
    run = traces.Run()
    run.quiet_step()
    run.step_with_kill_in_reduction(0)
    if is_healed:
        run.form(3, in_place_of=(0,))
    run.quiet_step()
    run.add(trace.Fault, replica=1, rank=1, point="compute", kind="slow", step=run.trained)
    run.step_with_kill_in_backward(2, in_schedule=True)
    if is_healed:
        run.form(4, in_place_of=(2,))
        run.step_with_join(3)
        run.step_with_join(4)
    while run.trained < steps:
        run.quiet_step()
    return run.finish(exit_code)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Callable[[Events, Events], None]:
    """Make the demo's training runs leave these traces."""

    def prepare(reference: Events, faulty: Events) -> None:
        def train(self: demo._Demo, run_dir: Path, steps: int) -> None:
            traces.write(run_dir, reference)

        def train_and_kill(self: demo._Demo, run_dir: Path, *flags: str) -> None:
            assert "--chaos" in flags
            traces.write(run_dir, faulty)

        def train_on_nodes(self: demo._NodesDemo, run_dir: Path, *flags: str) -> None:
            traces.write(run_dir, faulty)
            self.killed = (71, 72, 73)

        monkeypatch.setattr(demo._Demo, "_train", train)
        monkeypatch.setattr(demo._Demo, "_train_and_kill", train_and_kill)
        monkeypatch.setattr(demo._NodesDemo, "_train", train)
        monkeypatch.setattr(demo._NodesDemo, "_train_and_kill", train_on_nodes)
        monkeypatch.setattr(demo._Demo, "_command", lambda self, *arguments: None)

    return prepare


def test_the_demo_proves_what_the_traces_show(
    prepared: Callable[[Events, Events], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(traces.quiet_run(20).events, _faulty().events)
    assert demo.main(["--run-dir", str(tmp_path / "demo")]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "PROVEN" in text and "NOT PROVEN" not in text and " NO]" not in text
    assert "train 2: replica 0 rank 0 was killed inside the reduction of bucket 1" in text
    assert "train 4: replica 1 rank 1 was slowed down for a step" in text
    assert "\n        train 2: replica 0 rank 0 inside the reduction of bucket 1; train 4: replica 2 rank 1 in the b" in text
    assert "train 4: microbatches 1, 3, 5 taken into the running pass by replica 1" in text
    assert "replica 3 in the place of replica 0 joined at train 5, " in text
    assert "replica 4 in the place of replica 2 joined at train 6, " in text
    assert "until replica 3 was announced, replica 1 finished 15 microbatches in 2 steps; longest pause 0.0" in text
    assert "until replica 4 was announced, replica 1 finished 9 microbatches in 1 step, replica 3 finished 3 microb" in text
    assert "20 steps, never fewer than 1 replica, exit code 15 (the demo asked for the end)" in text
    assert (tmp_path / "demo" / "faulty" / "loss.svg").exists()
    assert json.loads((tmp_path / "demo" / "faulty" / "summary.json").read_text())["param_bit_identical"] is True


def test_json_is_the_only_thing_on_stdout(
    prepared: Callable[[Events, Events], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(traces.quiet_run(20).events, _faulty().events)
    assert demo.main(["--json", "--run-dir", str(tmp_path / "demo")]) == ExitCode.OK
    content = json.loads(capsys.readouterr().out)
    assert content["proven"] is True
    assert all(claim["holds"] for claim in content["claims"])
    assert content["summary"]["microbatches_wasted"] == 0


def _replace(events: Events, kind: type[trace.Event], to: dict[str, object], **fields: object) -> Events:
    """Events with one changed: the last of its type with these fields."""
    found = [
        i for i, event in enumerate(events)
        if type(event) is kind and all(getattr(event, name) == value for name, value in fields.items())
    ]  # fmt: skip
    return [msgspec.structs.replace(event, **to) if i == found[-1] else event for i, event in enumerate(events)]


WASTED = trace.MicrobatchFinished(replica=1, rank=0, generation=2, step=19, microbatch=3, seconds=0.1, into=())
MORE = [  # than was lost: what a survivor had computed before
    trace.MicrobatchFinished(replica=1, rank=0, generation=2, step=1, microbatch=microbatch, seconds=0.1, into=(1,))
    for microbatch in (1, 2, 4, 5)
]


def _nothing_again(events: Events) -> Events:
    return [event for event in events if not (isinstance(event, trace.MicrobatchFinished) and event.generation > 1)]


def _without(kind: type[trace.Event], **fields: object) -> Callable[[Events], Events]:
    """Leave out the events of a type with these fields."""

    def left(events: Events) -> Events:
        return [one for one in events if type(one) is not kind or any(getattr(one, name) != fields[name] for name in fields)]

    return left


def _all_steps_at_the_end(events: Events) -> Events:
    return [msgspec.structs.replace(one, t=events[-1].t) if isinstance(one, trace.Committed) else one for one in events]


def _all_pause(events: Events) -> Events:
    """All members make a pause of 100 s after a newcomer has begun to form."""
    [begin] = [i for i, one in enumerate(events) if isinstance(one, trace.Forming) and one.newcomer == 4]
    return [msgspec.structs.replace(one, t=one.t + 100.0 * (i > begin)) for i, one in enumerate(events)]


def _one_pauses(events: Events) -> Events:
    """Replica 1 finishes nothing until both newcomers have joined."""
    [begin, end] = [
        i for i, one in enumerate(events)
        if (isinstance(one, trace.Forming) and one.newcomer == 3) or (isinstance(one, trace.Proven) and one.newcomers == (4,))
    ]  # fmt: skip
    late = [
        i for i, one in enumerate(events)
        if begin < i < end and isinstance(one, trace.Committed | trace.MicrobatchFinished) and one.replica == 1
    ]  # fmt: skip
    return [msgspec.structs.replace(one, t=events[end].t) if i in late else one for i, one in enumerate(events)]


def _another_end(events: Events) -> Events:
    """All replicas have the same other parameters at the end."""
    for replica in (1, 3, 4):
        events = _replace(events, trace.Applied, {"parameter_digest": "x"}, replica=replica, rank=0)
    return events


FAILURES: list[tuple[str, Callable[[Events], Events]]] = [
    ("Real processes were killed", lambda events: _replace(events, trace.Fault, {"point": "forward"}, point="backward")),
    ("Real processes were killed", lambda events: _replace(events, trace.Fault, {"rank": 0}, point="backward")),
    ("Real processes were killed", lambda events: _replace(events, trace.Fault, {"point": "reduce"}, point="backward")),
    ("Real processes were killed", lambda events: _replace(events, trace.Failure, {"cause": "exit code 1"})),
    ("The others did not let", lambda events: [event for event in events if not isinstance(event, trace.Extended)]),
    ("Training went on", lambda events: _replace(events, trace.RunFinished, {"exit_code": 10})),
    ("Every lost replica came back", _without(trace.Proven, newcomers=(4,))),
    ("Every lost replica came back", _without(trace.Proven)),
    ("Nobody stopped for them", _all_steps_at_the_end),
    ("Nobody stopped for them", _without(trace.Proven)),
    ("Nobody stopped for them", _all_pause),
    ("Nobody stopped for them", _one_pauses),
    ("Nobody stopped for them", _without(trace.Committed, replica=1, step=19)),
    ("Nobody stopped for them", _without(trace.Committed, replica=3, step=19)),
    ("Nobody stopped for them", _without(trace.Committed, replica=1, step=8)),
    ("Every step was made", lambda events: _replace(events, trace.Reduced, {"provenance": (2, 0, 1, 1, 1, 1)}, bucket=1)),
    ("Only what the dead", lambda events: [*events[:-1], WASTED, events[-1]]),
    ("Only what the dead", lambda events: [*events[:-1], *MORE, events[-1]]),
    ("Only what the dead", _nothing_again),
    ("All replicas held", lambda events: _replace(events, trace.Applied, {"parameter_digest": "x"}, replica=2, rank=1)),
    ("All replicas held", lambda events: _replace(events, trace.Applied, {"parameter_digest": "x"}, replica=4, rank=1)),
    ("The result is bit", _another_end),
    ("The result is bit", lambda events: _replace(events, trace.Applied, {"loss": 1.0}, replica=1, rank=1)),
    ("No invariant", lambda events: _replace(events, trace.Committed, {"digest": "x"})),
]


@pytest.mark.parametrize(("claim", "spoil"), FAILURES)
def test_a_claim_without_its_evidence_fails_the_demo(
    claim: str, spoil: Callable[[Events], Events], prepared: Callable[[Events, Events], None], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    prepared(traces.quiet_run(20).events, spoil(_faulty().events))
    assert demo.main(["--json", "--run-dir", str(tmp_path / "demo")]) == ExitCode.INVARIANT_VIOLATED
    content = json.loads(capsys.readouterr().out)
    assert content["proven"] is False
    assert [one["text"] for one in content["claims"] if not one["holds"] and one["text"].startswith(claim)], content["claims"]


@pytest.mark.parametrize("is_formed", [True, False])
def test_a_replica_that_does_not_come_back_in_time_is_told_and_fails_the_demo(
    is_formed: bool, prepared: Callable[[Events, Events], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = _faulty(is_healed=False).events
    if is_formed:
        events.insert(-1, trace.Forming(t=events[-1].t, newcomer=3, in_place_of=(0,)))
    prepared(traces.quiet_run(20).events, events)
    assert demo.main(["--run-dir", str(tmp_path / "demo")]) == ExitCode.INVARIANT_VIOLATED
    text = capsys.readouterr().out
    assert "NOT PROVEN" in text and " NO] Every lost replica came back" in text
    assert ("replica 3, in the place of replica 0, was formed and did not join: the run ended before\n" in text) == is_formed
    assert "180 s after the last death there were 1 of 3" in text


def _line(iteration: int, replicas: int) -> str:
    return (
        f" iteration {iteration:8}/    5000 | consumed samples: 108 | lm loss: 4.366181E+00 | loss scale: 1.0 | "
        f"generation: 2 | replicas: {replicas}/3 | quotas: 6 6 |"
    )


@pytest.mark.parametrize(
    ("replicas", "end"),
    [
        ({8: 1, 9: 2, 10: 3}, demo.STEPS),  # enough steps are made in any case
        ({8: 1, 30: 2, 40: 3}, 42),
        ({5: 2, 6: 3, 8: 2, 30: 3}, 32),  # the first is back before the last death
        ({5: 2, 6: 3, 8: 2, 30: 3, 31: 2, 50: 3}, 52),  # a newcomer dies
        ({5: 2, 6: 3}, demo.STEPS),  # the last death was not seen: the step was finished before
    ],
)
def test_the_run_with_deaths_ends_when_all_have_trained_together_again(replicas: dict[int, int], end: int) -> None:
    follow, now = demo.Return(), 3
    for iteration in range(1, 100):
        now = replicas.get(iteration, now)
        assert not follow.take("megatron-recover: replica 3 joins at train 14: 3 replicas train", iteration)
        if follow.take(_line(iteration, now), iteration):
            break
    assert iteration == end


def test_the_run_with_deaths_ends_when_its_time_is_over() -> None:
    follow = demo.Return()
    assert not follow.take(_line(7, 2), 0.0) and not follow.take(_line(8, 1), 1000.0)
    assert not follow.take(_line(900, 1), 1000.0 + demo.PATIENCE_S) and follow.take(_line(901, 1), 1000.1 + demo.PATIENCE_S)


def test_a_slow_run_goes_on_to_its_last_step_once_all_are_back() -> None:
    follow = demo.Return()
    late = [follow.take(_line(each, 1), 1000.0 * each) for each in (8, 9)]
    assert late == [False, True], "a replica is missing"
    follow = demo.Return()
    ends = [follow.take(_line(each, 3), 1000.0 * each) for each in range(8, 13)]
    assert ends == [False] * 4 + [True], "all train together, and 12 steps are wanted"


def _without_a_node() -> Events:
    """Events of a run that loses node 2, with the ranks of replica 2, in mid-step."""
    run = traces.Run()
    run.quiet_step()
    run.step_with_kill_in_backward(2, in_schedule=True)
    while run.trained < 5:
        run.quiet_step()
    loss = trace.Loss(replica=2, kind=LossKind.NODE_LOST, detail="node n2: its agent is gone")
    node = trace.NodeLost(node=2, name="n2", replicas=(2,), detail="its agent is gone")
    found: Events = []
    for event in run.finish().events:
        if isinstance(event, trace.Generation) and event.losses:
            found += [msgspec.structs.replace(node, t=event.t), msgspec.structs.replace(event, losses=(loss,))]
        elif not isinstance(event, trace.Fault | trace.Failure):
            found.append(event)
    return found


def _with_a_gap(events: Events, replica: int, rank: int) -> Events:
    """These events, but some of a rank or of an agent are missing before the loss of the node."""
    place = next(i for i, event in enumerate(events) if isinstance(event, trace.NodeLost))
    then = events[place].t
    return [*events[:place], trace.Gap(t=then, replica=replica, rank=rank, num_events=0, since=then), *events[place:]]


@pytest.mark.parametrize(("replica", "rank"), [(2, 0), (2, 1), (LAUNCHER, -2)])
def test_what_the_lost_node_took_with_it_is_told_and_does_not_fail_the_demo(
    replica: int, rank: int, prepared: Callable[[Events, Events], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(traces.quiet_run(5).events, _with_a_gap(_without_a_node(), replica, rank))
    assert demo.main(["--nodes", "3", "--json", "--run-dir", str(tmp_path / "demo")]) == ExitCode.OK
    [*_, last] = json.loads(capsys.readouterr().out)["claims"]
    assert last["holds"] and "missing" in last["evidence"] and "not judged" in last["evidence"]


def test_the_loss_of_a_whole_node_is_proven_and_told(
    prepared: Callable[[Events, Events], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(traces.quiet_run(5).events, _without_a_node())
    assert demo.main(["--nodes", "3", "--run-dir", str(tmp_path / "demo")]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "PROVEN" in text and "NOT PROVEN" not in text and " NO]" not in text
    assert "        train 2: node 2 with replica 2, 3 processes" in text
    assert (
        "     train 2: without replica 2 from then on (" in text
        and "the others finished that very step in generation 2" in text
    )


@pytest.mark.parametrize(
    ("claim", "spoil"),
    [
        ("A whole node was killed", lambda events: [event for event in events if not isinstance(event, trace.NodeLost)]),
        ("A whole node was killed", lambda events: _replace(events, trace.NodeLost, {"replicas": (1, 2)})),
        ("The others went on", lambda events: _replace(events, trace.RunFinished, {"exit_code": 10})),
        ("The result is bit", lambda events: _replace(events, trace.Applied, {"parameter_digest": "x"}, rank=0)),
        ("No invariant is broken", lambda events: _with_a_gap(events, replica=1, rank=0)),
        ("No invariant is broken", lambda events: _with_a_gap(events, replica=LAUNCHER, rank=0)),
        ("No invariant is broken", lambda events: _with_a_gap(events, replica=LAUNCHER, rank=-1)),
    ],
)
def test_a_claim_about_nodes_without_its_evidence_fails_the_demo(
    claim: str, spoil: Callable[[Events], Events], prepared: Callable[[Events, Events], None], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    prepared(traces.quiet_run(5).events, spoil(_without_a_node()))
    assert demo.main(["--nodes", "3", "--json", "--run-dir", str(tmp_path / "demo")]) == ExitCode.INVARIANT_VIOLATED
    content = json.loads(capsys.readouterr().out)
    assert [one["text"] for one in content["claims"] if not one["holds"] and one["text"].startswith(claim)], content["claims"]


def test_a_run_of_another_batch_is_no_reference(
    prepared: Callable[[Events, Events], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = traces.Run(microbatches=12)
    while reference.trained < 20:
        reference.quiet_step()
    prepared(reference.finish().events, _faulty().events)
    assert demo.main(["--json", "--run-dir", str(tmp_path / "demo")]) == ExitCode.INVARIANT_VIOLATED
    [claim] = [one for one in json.loads(capsys.readouterr().out)["claims"] if one["text"].startswith("Every step was made")]
    assert not claim["holds"]


def test_megatrons_line_is_cut_down_to_what_matters() -> None:
    line = (
        " [2026-11-21 10:53:46.2] iteration        9/      24 | consumed samples:          108 | elapsed time per iteration "
        "(ms): 977.6 | learning rate: 2.379865E-03 | global batch size:    12 | lm loss: 4.366181E+00 | loss scale: 1.0 | "
        "grad norm: 1.819 | number of skipped iterations:   0 | generation: 2 | replicas: 2/3 | quotas: 6 6 |"
    )
    assert demo.short(line) == "iteration  9 | loss 4.3662 | generation 2 | replicas 2/3 | quotas 6 6"
    assert demo.short("any other line") == "any other line"


def test_too_few_steps_prove_nothing(prepared: Callable[[Events, Events], None], tmp_path: Path) -> None:
    prepared(traces.quiet_run(8).events, _faulty(steps=8).events)
    assert demo.main(["--run-dir", str(tmp_path / "demo")]) == ExitCode.INVARIANT_VIOLATED


def test_a_used_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("data")
    with pytest.raises(SystemExit) as end:
        demo.main(["--run-dir", str(tmp_path)])
    assert end.value.code == ExitCode.BAD_INPUT
    assert "give another folder, as every run needs its own" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_stage_that_fails_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "TRAINING", "--no-such-flag")
    monkeypatch.setattr(demo._Demo, "_command", _only_training(demo._Demo._command))
    assert demo.main(["--run-dir", str(tmp_path / "demo")]) == ExitCode.FAILED
    error = capsys.readouterr().err
    assert "--no-such-flag" in error and "its output is in" in error
    assert f"     megatron-recover run: --data-path {tmp_path}" in error, "what the command itself says"


@pytest.mark.parametrize(
    ("torch", "cause"),
    [
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13: no such file"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
def test_a_machine_with_a_gpu_whose_torch_cannot_be_imported_is_refused_in_one_line(
    torch: str, cause: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(demo, "has_gpu", lambda devices: True)
    with pytest.raises(SystemExit) as end:
        demo.main(["--run-dir", str(tmp_path / "demo")])
    assert end.value.code == ExitCode.BAD_INPUT
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"megatron-recover demo: this machine has a GPU, and torch cannot be asked for it ({cause}); ")
    assert line.endswith(f" until `{sys.executable} -P -c 'import torch; print(torch.cuda.device_count())'` prints a number")
    assert not (tmp_path / "demo").exists()


def test_ranks_share_gpus_where_there_are_fewer(tmp_path: Path) -> None:
    for gpus, expected in ((0, []), (1, ["6"]), (4, ["2"]), (6, []), (8, [])):
        extra = demo._Demo(tmp_path, io.StringIO(), gpus)._extra
        assert ("--recover-ranks-per-gpu" in extra) == bool(expected) and set(expected) <= set(extra)


@pytest.mark.parametrize("engine", [True, False])
def test_a_gpu_without_transformer_engine_gets_the_flags_that_need_none(
    engine: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if engine else None)
    assert ("--transformer-impl" in demo._Demo(tmp_path, io.StringIO(), 8)._extra) == (not engine)


def test_sums_can_run_beside_a_backward_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    assert demo._Demo(tmp_path, io.StringIO(), 1).environment[name] == MOST_QUEUES
    assert name not in demo._Demo(tmp_path, io.StringIO(), 0).environment
    monkeypatch.setenv(name, "8")
    assert demo._Demo(tmp_path, io.StringIO(), 1).environment[name] == "8", "what the user sets is kept"


def test_torch_is_asked_for_gpus_only_where_the_machine_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="2\n")

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "nvidiactl").touch()
    assert (demo.num_gpus(tmp_path), asked) == (0, [])
    (tmp_path / "nvidia0").touch()
    assert demo.num_gpus(tmp_path) == 2 and "import torch" in asked[0][-1]


def test_the_demo_with_fsdp2_claims_the_same_of_lanes(
    prepared: Callable[[Events, Events], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(traces.quiet_run(20).events, _faulty().events)
    assert demo.main(["--fsdp2", "--run-dir", str(tmp_path / "demo")]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "2/4  a GPT of 2 layers, which FSDP2 shards over 2 lanes, 3 replicas, with kill -9 of two processes" in text
    assert "[yes] Real processes were killed: in a backward and inside a reduction, of different lanes" in text
    assert text.count("  [yes] ") == 10 and "PROVEN" in text and "stage" not in text


def test_the_job_with_fsdp2_is_accepted_and_has_as_many_microbatches(tmp_path: Path) -> None:
    """Also on a GPU, where Megatron's default are fused gradients, which FSDP2 refuses."""
    for kind, lanes in ((demo._Demo, 1), (demo._Fsdp2Demo, 2)):
        made = kind(tmp_path, io.StringIO(), 0)
        line = [*made._run(), *made._training(tmp_path / "run", "--train-iters", "9")]
        assert ("--lanes" in line) == (lanes > 1)
        megatron = line[line.index(str(demo.PRETRAIN)) + 1 : line.index("--data-path")]
        found = preflight([*megatron, "--mock-data"], num_replicas=demo.REPLICAS, lanes=lanes)
        assert found.num_microbatches == demo.MICROBATCHES and found.layout.num_ranks * demo.REPLICAS == demo.RANKS
        assert ("--use-torch-fsdp2" in megatron) == ("--no-gradient-accumulation-fusion" in megatron) == (lanes > 1)


def test_fsdp2_and_nodes_are_two_demos(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        demo.main(["--fsdp2", "--nodes", "3"])
    assert end.value.code == ExitCode.BAD_INPUT and "give one of them" in capsys.readouterr().err


@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [[], pytest.param(["--fsdp2"], marks=pytest.mark.slow)], ids=["stages", "fsdp2"])
def test_the_real_demo_proves_its_claims(flags: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_recover", "demo", *flags, "--json", "--run-dir", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == ExitCode.OK, done.stderr[-6000:]
    content = json.loads(done.stdout)
    assert content["proven"] is True
    summary = content["summary"]
    assert summary["steps"] >= demo.STEPS and summary["replicas_end"] == 3
    assert sum(one["generation"] is not None for one in summary["joins"]) >= 2
    assert (tmp_path / "demo" / "faulty" / "loss.svg").read_text().startswith("<?xml")


@pytest.mark.timeout(120)
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "megatron_recover", "demo", "--run-dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "importing torch" in line:  # the reference run's launcher is up
            break
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == ExitCode.INTERRUPTED, error
    assert "interrupted" in error and "Traceback" not in error
    _, alive = psutil.wait_procs(started, timeout=30)
    assert started and not alive


def _only_training(command: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *arguments: command(self, *arguments) if arguments[0] == "run" else None
