"""Sweeps of goodput over the rate of failures and the size of a job: CSV, and a plot of both.

    python -m scripts.study.sweep scenarios/large.toml --out DIR [--only rates|sizes]
        [--losses N] [--max-gpus N]

This module decides only which scenarios are simulated. Every point runs as long as `--losses`
losses are expected to take. Jobs of all sizes have as many microbatches for each replica.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_recover.sim.timed import result, scenario_file
from megatron_recover.sim.timed.models import HOUR_S, Losses, Scenario, Timing
from megatron_recover.sim.timed.policies import simulate
from megatron_recover.sim.workers import CTRL_C_CODE, ended_by_ctrl_c

COMMAND = "python -m scripts.study.sweep"
RATES = (
    ("RSC-2", 2.34 / (1000 * 24 * 8)),
    ("Llama 3", 419 / (54 * 24 * 16_384)),
    ("Meta, 98,304 GPUs", 1 / (0.3 * 98_304)),
    ("Llama 3 x 10", 10 * 419 / (54 * 24 * 16_384)),
    ("Llama 3 x 100", 100 * 419 / (54 * 24 * 16_384)),
    ("ReCoVer's test", 1 / (5 * 116 / HOUR_S * 512)),
)
"""Names of rates, and losses per GPU-hour. Sources:

- RSC-2: 2.34 failures per 1,000 node-days of 8 GPUs (Kokolis et al. 2024). Their other cluster,
  RSC-1, has 6.5, about the rate of the third line.
- Llama 3: 419 interruptions in 54 days on 16,384 GPUs (2024).
- Meta: one failure every 18 minutes on 98,304 GPUs (FT-HSDP, 2026).
- ReCoVer's test: one loss every 5 steps of 116 s on 512 GPUs.
"""
AT_SIZE = "Meta, 98,304 GPUs"
"""Rate at which the size varies."""
MAX_LOSSES = 1000
"""Largest value of `--losses`."""
GPUS = (2_048, 8_192, 32_768, 100_032)
"""GPUs of a job, in the sweep over sizes."""
HEAD = ("sweep", "rate", "losses_per_gpu_hour", "gpus", "policy", "losses", "hours", "goodput_of_ideal", "kill_to_plan_s")
CSV_FILE, PLOT_FILE = "sweep.csv", "sweep.svg"

Point = tuple[Any, ...]
"""One line of the CSV, as in `HEAD`."""


def point(base: Scenario, sweep: str, rate: str, replicas: int, losses: float, tell: Callable[[str], None]) -> Iterator[Point]:
    """Yield the points of all policies of one scenario, after a call of `tell`."""
    job = base.job
    per_gpu_hour = dict(RATES)[rate]
    failures = msgspec.structs.replace(base.failures, every_steps=None, per_gpu_hour=per_gpu_hour)
    table = msgspec.structs.replace(job, replicas=replicas, microbatches=job.microbatches // job.replicas * replicas)
    what = msgspec.structs.replace(base, job=table, failures=failures)
    step_s = Timing.of(what).ideal_step_s(replicas, table.microbatches)
    steps = round(losses / (Losses(what).hazard(replicas) * step_s)) + 4
    what = msgspec.structs.replace(what, job=msgspec.structs.replace(table, steps=steps))
    tell(f"{replicas * job.gpus:,} GPUs at the rate of {rate}: {steps:,} steps")
    for policy, outcome in simulate(what).items():
        waited = "" if outcome.kill_to_plan_s is None else round(outcome.kill_to_plan_s[0], 4)
        yield (
            sweep, rate, f"{per_gpu_hour:.3g}", replicas * job.gpus, policy, outcome.losses,
            round(outcome.seconds / HOUR_S, 3), round(outcome.goodput_of_ideal, 6), waited,
        )  # fmt: skip


def points(
    base: Scenario, only: str | None, losses: float, gpus: Sequence[int] = GPUS, tell: Callable[[str], None] = lambda _: None
) -> Iterator[Point]:
    """Yield the sweep over rates at the scenario's size, then the one over sizes.

    `tell`: as of `point`.
    """
    if only != "sizes":
        for rate, _ in RATES:
            yield from point(base, "rate", rate, base.job.replicas, losses, tell)
    if only != "rates":
        for number in gpus:
            yield from point(base, "size", AT_SIZE, number // base.job.gpus, losses, tell)


def draw(path: Path, found: Sequence[Point]) -> None:
    """Draw the part of the time that losses took (1 - goodput), over rate and over size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    colours = {"recover": "#1f5fa8", "shrink": "#f2b441", "drop-step": "#5f6368", "checkpoint-restart": "#b3261e"}
    with pyplot.rc_context(style | {"svg.hashsalt": "sweep"}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
        for policy, colour in colours.items():
            rates = sorted((float(row[2]), 1 - row[7]) for row in found if row[0] == "rate" and row[4] == policy)
            sizes = [(row[3], 1 - row[7]) for row in found if row[0] == "size" and row[4] == policy]
            for axes, line in ((left, rates), (right, sizes)):
                if line:
                    axes.plot(*zip(*line, strict=True), color=colour, marker="o", markersize=3, label=policy)
        left.set(xscale="log", yscale="log", xlabel="losses per GPU-hour", ylabel="part of the time that losses took")
        right.set(xscale="log", xlabel=f"GPUs, at the rate of {AT_SIZE}")
        for axes in (left, right):
            axes.grid(color="#e8eaed")
            axes.set_visible(bool(axes.lines))
        (left if left.lines else right).legend(frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


@ended_by_ctrl_c()
def main(arguments: list[str] | None = None) -> int:
    """Run the sweep and return the exit code: 2 for a wrong scenario, 130 after Ctrl-C.

    After Ctrl-C the table and the plot have the points found so far, if any.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.split("\n\n")[0])
    parser.add_argument("scenario", type=Path, help="a scenario with all policies, e.g. scenarios/large.toml")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"where {CSV_FILE} and {PLOT_FILE} go")
    parser.add_argument("--only", choices=("rates", "sizes"), help="one of the two sweeps")
    parser.add_argument("--losses", type=float, default=4, help="expected at each point (default: 4)")
    parser.add_argument("--max-gpus", type=int, help=f"the largest size (of {', '.join(map(str, GPUS))}; default: all)")
    options = parser.parse_args(arguments)
    if options.max_gpus is not None and options.only == "rates":
        parser.error("--max-gpus is for the sweep of sizes, which --only rates leaves out; give one of them")
    gpus = [number for number in GPUS if options.max_gpus is None or number <= options.max_gpus]
    if not gpus:
        parser.error(f"--max-gpus is {options.max_gpus}; the smallest size is {GPUS[0]}")
    if not 0 < options.losses <= MAX_LOSSES:
        parser.error(f"--losses is {options.losses:g}; it must be above 0 and at most {MAX_LOSSES}")
    try:
        base = scenario_file.load(options.scenario)
    except ValueError as error:
        parser.error(str(error))
    if base.job.gpus > gpus[0] and options.only != "rates":
        parser.error(
            f"{options.scenario}: a replica of [job] has {base.job.gpus} GPUs, and the smallest size has {gpus[0]}; "
            "take --only rates"
        )
    if base.fault:
        parser.error(f"{options.scenario}: a sweep draws its losses; leave the [[fault]] tables out")
    result.make_folder(parser, options.out)
    found: list[Point] = []
    began = time.monotonic()
    is_interrupted = False

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  simulating {what}", file=sys.stderr, flush=True)

    print(f"{'after':>8}  {' | '.join(HEAD)}", flush=True)
    try:
        for row in points(base, options.only, options.losses, gpus, tell):
            found.append(row)
            print(f"{time.monotonic() - began:6.0f} s  {' | '.join(map(str, row))}", flush=True)
            result.write_csv(options.out / CSV_FILE, HEAD, found)
    except ValueError as error:
        parser.error(f"{options.scenario}: {error}")
    except KeyboardInterrupt:
        is_interrupted = True
        if not found:
            print("interrupted before the first point")
            return CTRL_C_CODE
        result.write_csv(options.out / CSV_FILE, HEAD, found)  # Ctrl-C may have cut it
    draw(options.out / PLOT_FILE, found)
    told = f"interrupted after {len(found)} lines; " if is_interrupted else ""
    print(f"{told}wrote {options.out / CSV_FILE} and {options.out / PLOT_FILE}")
    return CTRL_C_CODE if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
