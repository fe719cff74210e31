"""What a person sees of a run: only what is known, and a request to end is not told as a loss."""

from __future__ import annotations

import io
from pathlib import Path

from megatron_recover import trace
from megatron_recover.cluster.console import Console
from megatron_recover.cluster.job import Job, create_run_dir
from megatron_recover.config import RecoverConfig
from megatron_recover.core.values import ExitCode


def plan(label: str, quotas: tuple[int, ...]) -> trace.Plan:
    return trace.Plan(
        replica=0, generation=1, step=0, label=label, num_microbatches=sum(quotas), roster=(0, 1), quotas=quotas, transfers=(),
        computes=(), reduces=(), decided=(),
    )  # fmt: skip


def shown(tmp_path: Path, *events: trace.Event, exit_code: ExitCode = ExitCode.OK) -> tuple[str, str]:
    """The live line and everything that was printed, after these events."""
    job = Job(
        argv=("script.py",), num_replicas=2, layout=trace.Layout(tp=1, pp=1), config=RecoverConfig(),
        run_dir=create_run_dir(tmp_path / "run"),
    )  # fmt: skip
    printed = io.StringIO()
    console = Console(job, stream=printed)
    with trace.EventLog(job.run_dir / trace.EVENTS_FILE, 0.0) as log:
        for event in events:
            log.record(event)
    console.start()
    console.finished(exit_code, "training finished")
    return console.live_line(), printed.getvalue()


def test_at_the_start_nothing_is_claimed(tmp_path: Path) -> None:
    assert shown(tmp_path)[0] == "starting"


def test_a_folder_that_is_gone_is_not_pointed_at(tmp_path: Path) -> None:
    begun = trace.Generation(generation=1, roster=(0, 1), losses=(), reason="start")
    for events, kept in (((), False), ((begun,), True)):
        said = shown(tmp_path / str(kept), *events, exit_code=ExitCode.INTERRUPTED)[1]
        assert ("everything is in" in said) is kept, said


def test_quotas_are_those_of_training(tmp_path: Path) -> None:
    begun = trace.Generation(generation=1, roster=(0, 1), losses=(), reason="start")
    line, _ = shown(tmp_path, begun, plan("train 1", (3, 2)), plan("end 0", (0, 0)))
    assert line == "starting | replicas 2/2 | gen 1 | quotas 3 2"


def test_a_request_to_end_is_not_told_as_a_new_generation(tmp_path: Path) -> None:
    begun = trace.Generation(generation=1, roster=(0, 1), losses=(), reason="start")
    asked = trace.Generation(generation=2, roster=(0, 1), losses=(), reason="exit: SIGINT")
    line, printed = shown(tmp_path, begun, asked)
    assert line == "starting | ending (SIGINT) | replicas 2/2 | gen 2"
    assert "generation 1: replicas 0 1" in printed and "generation 2" not in printed


class Closed(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_the_log_goes_on_when_nobody_looks(tmp_path: Path) -> None:
    job = Job(
        argv=("script.py",), num_replicas=1, layout=trace.Layout(tp=1, pp=1), config=RecoverConfig(),
        run_dir=create_run_dir(tmp_path / "run"),
    )  # fmt: skip
    lines = [f" iteration {step}/ 3 | lm loss: 1.0" for step in (1, 2, 3)]
    job.log_of(0, 0).write_text("\n".join(lines) + "\n")
    console = Console(job, stream=Closed())
    console.says("something that nobody reads")
    console.start()
    console.finished(ExitCode.OK, "training finished")
    assert (job.run_dir / "train.log").read_text().splitlines() == lines
