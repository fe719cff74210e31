"""Counts which of upstream's own configurations `megatron-recover run` refuses, and why.

    python -m scripts.study.acceptance CHECKOUT

CHECKOUT is a clone of Megatron-LM, or of the part that has `tests/functional_tests`. Each
`model_config.yaml` below it that trains is judged as `run` would judge its flags (`REFUSALS`), and
so is each launch line of training that a shell script below `examples` has (`launch_lines.py`).
Data, folders and the number of GPUs are not judged. Inference and reinforcement learning are left
out; upstream's performance tests are of inference only.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_recover.megatron.launch import preflight
from scripts.study import launch_lines

OTHERS = ("inference", "rl")
"""Modes of upstream's tests that are no pre-training."""


LOADER = "--dataloader-type"
"""Flag that is refused with `external` later, when the script runs: none of upstream's declares
that its samples follow from an index."""


class Judged(msgspec.Struct, frozen=True):
    """A configuration of upstream's, and the flags for which it is refused."""

    name: str
    kind: str
    """`release`, `functional` or `example`."""
    refused: tuple[str, ...]


def configurations(checkout: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield all `model_config.yaml` of a checkout, read. Raises FileNotFoundError without any."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first is in C, where libyaml is
    files = sorted(checkout.rglob("model_config.yaml"))
    if not files:
        raise FileNotFoundError(f"{checkout} has no model_config.yaml; give a clone of Megatron-LM")
    for file in files:
        yield file, yaml.load(file.read_text(), loader)


class Line(msgspec.Struct, frozen=True):
    """The command line of a configuration of upstream's."""

    name: str
    kind: str
    """`release`, `functional` or `example`."""
    words: tuple[str, ...]


def lines(checkout: Path) -> Iterator[Line]:
    """Yield all configurations of a checkout that train. Raises FileNotFoundError without any."""
    for file, described in configurations(checkout):
        if described.get("MODEL_ARGS") and described.get("MODE") not in OTHERS:
            kind = "release" if described.get("TEST_TYPE") == "release" else "functional"
            yield Line(file.parent.name, kind, tuple(words(described["MODEL_ARGS"])))
    for name, line in launch_lines.below(checkout / "examples", [*checkout.glob("pretrain_*.py")]):
        yield Line(name, "example", tuple(line))


def judged(lines: Iterable[Line]) -> Iterator[Judged]:
    """Yield the judgement on each of `lines`."""
    for line in lines:
        flags = [each.split()[0].removesuffix(":") for each in preflight.unsupported(line.words)]
        if (LOADER, "external") in itertools.pairwise(line.words):
            flags.append(LOADER)
        yield Judged(line.name, line.kind, tuple(dict.fromkeys(flags)))


def words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags with values as words of a command line, as upstream's test runner does.

    A variable that the runner sets counts as 1.
    """
    found: list[str] = []
    for flag, value in flags.items():
        if value is True:
            found.append(flag)
        elif value is not None and value is not False:
            found += [flag, *shlex.split(re.sub(r"\$\{\w+\}", "1", str(value)))]
    return found


def table(configurations: Sequence[Judged]) -> str:
    """Return the counts by kind, the flags with how many each refuses, and what is refused."""
    kinds = sorted({each.kind for each in configurations})
    refused = {kind: [each for each in configurations if each.kind == kind and each.refused] for kind in kinds}
    told = [
        f"{kind}: {len(refused[kind])} of {sum(each.kind == kind for each in configurations)} refused" for kind in kinds
    ]  # fmt: skip
    for kind in kinds:
        flags = collections.Counter(flag for each in refused[kind] for flag in dict.fromkeys(each.refused))
        alone = collections.Counter(each.refused[0] for each in refused[kind] if len({*each.refused}) == 1)
        told += [f"\n{kind}, by flag (for it alone):"]
        told += [f"{number:5} ({alone[flag]:3})  {flag}" for flag, number in flags.most_common()]
    for kind in kinds:
        told += [f"\n{kind}, by name:"]
        told += [f"  {each.name}: {' '.join(dict.fromkeys(each.refused))}" for each in refused[kind]]
    return "\n".join(told)


def main(argv: Sequence[str]) -> int:
    """Print the table; return 0, or 2 for a folder without configurations."""
    parser = argparse.ArgumentParser(prog="python -m scripts.study.acceptance", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="a clone of Megatron-LM")
    try:
        print(table([*judged(lines(parser.parse_args(argv).checkout))]))
    except FileNotFoundError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
