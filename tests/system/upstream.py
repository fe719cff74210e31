"""Upstream's own training scripts, unchanged: where they are, and a run of one by torchrun on the CPU, or by ours.

`python -m torch.distributed.run ... tests/system/upstream.py SCRIPT FLAG...` runs the script as plain Megatron. Only what
Megatron needs to run without CUDA at all is put in its place first.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import sys
from argparse import ArgumentParser
from typing import Any

import pytest

from tests import forks

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 300  # a rank of torchrun imports everything by itself
FIGURES = re.compile(r"iteration +(\d+)/.*learning rate: ([0-9.E+-]+) .*lm loss: ([0-9.E+-]+) .*grad norm: ([0-9.]+)")
EVALUATIONS = re.compile(r"(\w+) loss at (iteration \d+.*?) \| lm loss value: ([0-9.E+-]+)")


def script(name: str) -> pathlib.Path:
    """The path of a script of upstream's; skips the test where there is no checkout."""
    given = os.environ.get("MEGATRON_CHECKOUT")
    checkout = pathlib.Path(given) if given else ROOT.parent / "shared" / "upstream" / "core_v0.19.0"
    path = checkout / name
    if not path.is_file():
        if given:
            raise FileNotFoundError(f"MEGATRON_CHECKOUT is {given}, and has no {name}")
        pytest.skip(f"no Megatron checkout: set MEGATRON_CHECKOUT to the folder with {name}")
    return path


def run(
    module: str, launch: str, command: str, expected: int = 0, cwd: pathlib.Path = ROOT, *, is_fresh: bool = False,
    **environment: str,
) -> str:  # fmt: skip
    """Run a launch line of torchrun's or of ours; return its output. No word may contain a space.

    `is_fresh`: as a user starts it, by an interpreter that imports all by itself.
    """
    line = [sys.executable, "-m", *module.split(), *launch.split(), *command.split()]
    print(shlex.join(line))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = forks.start(line, cwd=cwd, environment=variables, is_fresh=is_fresh)
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.terminate()  # and not killed: torchrun's ranks are in sessions of their own, and it ends them
        process.wait()
    assert process.returncode == expected, f"{shlex.join(line)}\n{output[-6000:]}"
    return output


def figures(output: str) -> dict[int, tuple[float, float, float]]:
    """Return loss, gradient norm and learning rate by iteration. (Upstream prints the mean of the first two losses twice.)"""
    return {int(found[1]): (float(found[3]), float(found[4]), float(found[2])) for found in FIGURES.finditer(output)}


def evaluations(output: str) -> dict[str, float]:
    """Return the losses of evaluations by the name that upstream gives them: iteration and data set."""
    return {found[2]: float(found[3]) for found in EVALUATIONS.finditer(output)}


def assert_alike(found: dict[int, tuple[float, float, float]], reference: dict[int, tuple[float, float, float]]) -> None:
    """Fail unless two jobs have printed alike: losses to four digits, norms, which have three decimals, to two, and rates."""
    assert found.keys() == reference.keys() and found
    for iteration, (loss, norm, rate) in found.items():
        assert rate == pytest.approx(reference[iteration][2], rel=1e-6), (iteration, found, reference)
        assert loss == pytest.approx(reference[iteration][0], rel=1e-4), (iteration, found, reference)
        assert norm == pytest.approx(reference[iteration][1], rel=1e-2), (iteration, found, reference)


def main() -> None:
    """Run upstream's script in this rank of torchrun's, on the CPU."""
    from megatron.training import arguments

    from megatron_recover.megatron import cpu
    from megatron_recover.megatron.launch import script as running

    cpu.enable_cpu()
    add = arguments.add_megatron_arguments

    def add_with_defaults(parser: ArgumentParser) -> Any:
        parser = add(parser)
        cpu.set_cpu_defaults(parser)
        parser.set_defaults(rerun_mode="disabled")  # as under `run`, so that both name their losses alike
        return parser

    arguments.add_megatron_arguments = add_with_defaults
    running.run(sys.argv[1:])


if __name__ == "__main__":
    main()
