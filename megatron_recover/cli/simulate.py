"""`megatron-recover simulate SCENARIO`: runs the protocol's machines on a virtual clock, against the usual alternatives."""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatron_recover.core.values import ExitCode
from megatron_recover.flags import Parser
from megatron_recover.sim import result, scenario_file
from megatron_recover.sim.policies import simulate


def main(argv: list[str]) -> int:
    """Simulate one scenario and tell what it found."""
    parser = Parser(
        prog="megatron-recover simulate",
        description="Run a job of any size on a virtual clock: the protocol's own machines, with models of compute, network "
        "and failures around them; and what checkpoint-restart and others would have made of it.",
        epilog="Scenarios are in scenarios/, their keys in docs/simulation.md. Exit code 2: the scenario has mistakes, each "
        "told with its line.",
    )
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help="a TOML file")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"also write {result.RESULT_FILE} and {result.STEPS_FILE} there"
    )
    arguments = parser.parse_args(argv)
    try:
        scenario = scenario_file.load(arguments.scenario)
    except ValueError as error:
        parser.error(str(error))
    outcomes = simulate(scenario)
    found = result.summary(scenario, outcomes)
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    if arguments.out is not None:
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / result.RESULT_FILE).write_text(text + "\n")
            result.write_csv(
                arguments.out / result.STEPS_FILE, ("policy", "gpu_hours", "microbatches"), result.throughput(outcomes)
            )  # fmt: skip
        except OSError as error:
            parser.error(f"--out {arguments.out}: cannot be written ({error.strerror}); give another folder")
    print(text if arguments.json else "\n".join(result.lines(found)))
    return ExitCode.OK
