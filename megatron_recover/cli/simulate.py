"""`megatron-recover simulate SCENARIO`: runs the protocol's machines on a virtual clock.

Without `--processes` the result is compared with checkpoint-restart and other policies. With it the
scenario also runs on real processes, and the verb prints how far the step times of the two are
apart.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_recover import packages, toml_file, trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.flags import Parser
from megatron_recover.sim.timed import result, scenario_file
from megatron_recover.sim.timed.models import Scenario
from megatron_recover.sim.timed.policies import simulate
from megatron_recover.sim.timed.recover import run_recover

TEXT = ("argparse.py", "ast.py", "bdb.py", "calendar.py", "cmd.py")
"""Files of the standard library that real processes train on."""


def _parser() -> Parser:
    parser = Parser(
        prog="megatron-recover simulate",
        description="Run a job of any size on a virtual clock: the protocol's own machines, with models of compute, network "
        "and failures around them; and what checkpoint-restart and others would have made of it.",
        epilog="Scenarios are in scenarios/, their keys in docs/reference/scenario.md. Exit code 2: the scenario has mistakes, "
        "each with its line, or a network slower than its timeouts, or a [[fault]] that never struck or took the last replica.",
    )
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help="a TOML file")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"write {result.RESULT_FILE} and {result.STEPS_FILE} there, too"
    )
    parser.add_argument(
        "--processes", type=Path, metavar="RUN_DIR",
        help="run the scenario on real processes of this machine, in this new run directory, and compare step times",
    )  # fmt: skip
    return parser


def main(argv: list[str]) -> int:
    """Simulate one scenario, with `--processes` also run it, and print the result."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        scenario = scenario_file.load(arguments.scenario)
    except ValueError as error:
        parser.error(str(error))
    if arguments.processes is not None:
        return _on_processes(parser, arguments, scenario)
    if arguments.out is not None:
        result.make_folder(parser, arguments.out)
    try:
        with _progress(scenario) as on_step:
            outcomes = simulate(scenario, on_step)
    except ValueError as error:
        parser.error(_in_file(arguments.scenario, error))
    found = result.summary(scenario, outcomes)
    table = ("policy", "gpu_hours", "microbatches"), result.throughput(outcomes)
    return _tell(parser, arguments, found, result.lines(found), table)


def _on_processes(parser: Parser, arguments: argparse.Namespace, scenario: Scenario) -> int:
    """Run the scenario on real processes and compare its step times with the simulated ones.

    Returns 0, or without a comparison the exit code of a run that failed.
    """
    from megatron_recover.cli import data, run
    from megatron_recover.cluster import chaos, rehearsal
    from megatron_recover.cluster.job import claim_folder

    if lacking := packages.mistakes(packages.TRAINING):
        parser.error("\n".join(f"--processes: {line}" for line in lacking))
    refused = "\n".join(f"--processes: {arguments.scenario}: {line}" for line in rehearsal.refusals(scenario))
    if refused:
        parser.error(refused)
    if arguments.out is not None and arguments.out.resolve().is_relative_to(arguments.processes.resolve()):
        parser.error(f"--out {arguments.out} lies in the folder of --processes, which the run wants empty; give another folder")
    existed = arguments.processes.exists()
    try:
        claim_folder(arguments.processes, flag="--processes")
        if not existed:  # a refused scenario must leave nothing; the run makes it again
            arguments.processes.rmdir()
    except ValueError as error:
        parser.error(str(error))
    if arguments.out is not None:
        result.make_folder(parser, arguments.out)
    try:
        with _progress(scenario) as on_step:
            job = run_recover(scenario, on_step)
    except ValueError as error:
        parser.error(_in_file(arguments.scenario, error))
    print("megatron-recover simulate: simulated; now on real processes", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="megatron-recover-") as folder:
        text, faults = Path(folder) / "text", Path(folder) / chaos.CHAOS_FILE
        data.write_dataset(text, [Path(sysconfig.get_paths()["stdlib"]) / name for name in TEXT])
        faults.write_text(chaos.render(scenario.fault, str(arguments.scenario)))
        code = run.main([
            "--replicas", str(scenario.job.replicas), "--run-dir", str(arguments.processes), "--chaos", str(faults), "--quiet",
            "--", *rehearsal.flags(scenario, text),
        ], goes_on=True)  # fmt: skip
    if code != ExitCode.OK:
        has_trace = (arguments.processes / trace.EVENTS_FILE).is_file()  # a run that never trained leaves nothing
        where = f"; see {arguments.processes}" if has_trace else ""
        print(f"megatron-recover simulate: the run ended with exit code {code}{where}", file=sys.stderr)
        return code
    found = result.comparison(job.step_seconds, [one.seconds for one in rehearsal.step_times(arguments.processes)])
    table = tuple(found["steps"][0]), (tuple(step.values()) for step in found["steps"])
    return _tell(parser, arguments, found, result.comparison_lines(found), table)


@contextlib.contextmanager
def _progress(scenario: Scenario) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many steps are simulated.

    It rewrites one line of stderr, which is gone in the end, and only on a terminal.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda count: None
        return
    with Live(Text("simulating"), console=console, refresh_per_second=4, transient=True) as live:
        yield lambda count: live.update(
            Text(f"recover: step {count} of {scenario.job.steps}", no_wrap=True, overflow="ellipsis")
        )


def _in_file(path: Path, error: ValueError) -> str:
    """Return the mistakes that the run of a scenario found, with the lines of their faults."""
    text, told = path.read_text(encoding="utf-8"), []
    for mistake in str(error).splitlines():
        named = re.match(r"\[\[fault\]\] (\d+)", mistake)
        line = toml_file.line_of_table(text, "fault", int(named[1]) - 1) if named else 0
        told.append(f"{path}: line {line}: {mistake}" if line else f"{path}: {mistake}")
    return "\n".join(told)


def _tell(
    parser: Parser,
    arguments: argparse.Namespace,
    found: Mapping[str, Any],
    lines: Iterable[str],
    table: tuple[tuple[str, ...], Iterable[tuple[Any, ...]]],
) -> int:
    """Print the result, and write it to `--out` if given."""
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    print(text if arguments.json else "\n".join(lines), flush=True)
    if arguments.out is not None:
        try:
            (arguments.out / result.RESULT_FILE).write_text(text + "\n")
            result.write_csv(arguments.out / result.STEPS_FILE, *table)
        except OSError as error:
            parser.error(f"--out {arguments.out}: cannot be written ({error.strerror}); give another folder")
    return ExitCode.OK
