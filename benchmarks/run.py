"""`make bench`: every benchmark of this package, joined into a table and `bench.json`.

    python -m benchmarks.run [--only NAME ...] [--out bench.json]

A module with `LONG = True` takes so long that it runs only where `--only` names it.

Each ratio compares measurements of one run on one machine. Absolute times are printed for
orientation only. The exit code is 1 if a benchmark failed to run. A goal that is not met is
reported and does not change the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import signal
import sys
import time
import traceback
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks.common import Row


def modules() -> list[str]:
    """Return the names of all modules of this package that have a function `rows`."""
    names = sorted(info.name for info in pkgutil.iter_modules(benchmarks.__path__) if info.name not in ("common", "run"))
    return [name for name in names if hasattr(importlib.import_module(f"benchmarks.{name}"), "rows")]


def is_long(name: str) -> bool:
    """Return whether a benchmark runs only where it is named."""
    return getattr(importlib.import_module(f"benchmarks.{name}"), "LONG", False)


def table(rows: list[Row]) -> Table:
    """Return the rows as a table for the terminal."""
    result = Table("benchmark", "value", "unit", "min", "median", "max", "runs", "goal", "met", "against", title="benchmarks")
    for row in rows:
        numbers = [f"{number:.4g}" for number in (row.min, row.median, row.max)]
        met = "" if row.met is None else "yes" if row.met else "NO"
        result.add_row(row.name, f"{row.value:.4g}", row.unit, *numbers, str(row.runs), row.goal, met, row.baseline)
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Run the benchmarks.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these modules only")
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="where the rows go (default: bench.json)")
    arguments = parser.parse_args(argv)
    known = modules()
    chosen = arguments.only or [name for name in known if not is_long(name)]
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"--only: no benchmark {', '.join(unknown)}; there are {', '.join(known)}")

    if not arguments.out.parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.parent}; make it, or give another place")

    rows: list[Row] = []
    failed: list[str] = []
    for name in chosen:
        started = time.monotonic()
        print(f"{name}: running, this takes minutes ...", file=sys.stderr, flush=True)
        try:
            rows.extend(importlib.import_module(f"benchmarks.{name}").rows())
        except Exception:
            traceback.print_exc()  # the other benchmarks still run; the exit code reports the failure
            failed.append(name)
        except KeyboardInterrupt:
            failed.append(f"{name} and what follows (interrupted)")
            break
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    Console(width=None if sys.stdout.isatty() else 240).print(table(rows))
    left_out = [name for name in known if name not in chosen and is_long(name)]
    if left_out and not arguments.only:
        print(f"left out, as they take long: {', '.join(left_out)} (name them with --only)", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so a benchmark ends its jobs at SIGTERM
    sys.exit(main())
