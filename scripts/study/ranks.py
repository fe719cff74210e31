"""Compares the uses of rank and world size in Megatron with the list of those that somebody judged.

    python -m scripts.study.ranks

Under the launcher RANK and WORLD_SIZE are those of a replica, so two processes of a job have the
same RANK. `tests/megatron/rank_uses.toml` lists each use below `megatron.training` and
`megatron.core`, with a verdict and its reason. This prints what the list lacks and what is gone.

A *use* is a place in the code that names

- a function that returns the rank or the size of the world, or acts on one rank only (`FUNCTIONS`):
  torch's (with a group as argument too), Megatron's wrappers of these, and functions that print or
  log on one rank;
- a field of arguments or objects that holds one of these numbers (`FIELDS`), also as the name that
  `getattr` gets;
- a variable of the environment that holds one of these numbers (`VARIABLES`);
- the group of all ranks, from which rank and size can be asked;
- the number of devices, or the choice of a device: torch's rank arithmetic ends there;
- the data-parallel rank or size: this group is the lanes of one replica, so two processes of a job
  have the same data-parallel rank as well.

No uses are numbers that only address a peer of a collective, `rank()` and `size()` of a group that
the code was given, and the ranks of tensor, pipeline, context and expert parallelism: their groups
lie inside a replica and are those of torchrun.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

PACKAGES = ("megatron.training", "megatron.core")
LIST = Path(__file__).resolve().parents[2] / "tests" / "megatron" / "rank_uses.toml"
_OF_TORCH = ("get_rank", "get_world_size", "get_node_local_rank", "device_count", "set_device")
_OF_DATA_PARALLELISM = (
    "get_data_parallel_rank", "get_data_parallel_world_size", "get_data_parallel_src_rank", "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
)  # fmt: skip
_WRAPPERS = (
    "safe_get_rank", "_safe_get_rank", "safe_get_world_size", "get_local_rank_preinit", "resolve_slurm_rank",
    "resolve_slurm_world_size", "resolve_slurm_local_rank", "get_all_ranks", "get_fault_ranks",
)  # fmt: skip
_ON_ONE_RANK = (
    "is_rank0", "is_last_rank", "print_rank_0", "print_rank_last", "warn_rank_0", "log_single_rank",
    "log_on_each_pipeline_stage", "debug_rank", "find_checkpoint_rank_0", "_storage_glob_rank0",
)  # fmt: skip
_GROUPS = ("WORLD", "_get_default_group")
FUNCTIONS = frozenset({*_OF_TORCH, *_OF_DATA_PARALLELISM, *_WRAPPERS, *_ON_ONE_RANK, *_GROUPS})
FIELDS = frozenset(
    {"rank", "world_size", "local_rank", "local_world_size", "my_rank", "data_parallel_rank", "data_parallel_size"}
)
VARIABLES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE",
})  # fmt: skip

Use = tuple[str, str, str]
"""Module, qualified name of the function or class (empty outside of both), and the name."""


class Judgement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A verdict on a class of uses, with all uses to which it applies."""

    verdict: str
    """`harmless`, `adapted` or `refused`."""
    because: str
    uses: dict[str, dict[str, str]]
    """Module -> function -> names, with commas between them; one that is used N times ends with
    xN."""
    by: tuple[str, ...] = ()
    """What adapts the uses: names of seams, flags of `ADAPTATIONS`, or ``module:name`` of this
    package. What refuses them: flags of `REFUSALS`."""

    def counts(self) -> Counter[Use]:
        """Return how often each use is listed."""
        found: Counter[Use] = Counter()
        for module, functions in self.uses.items():
            for function, names in functions.items():
                for each in names.split(", "):
                    name, _, times = each.partition(" x")
                    found[module, function, name] += int(times or 1)
        return found


def judgements() -> tuple[Judgement, ...]:
    """Return the list. Raises msgspec's errors for a list that is none."""
    return msgspec.toml.decode(LIST.read_text(), type=dict[str, tuple[Judgement, ...]])["judged"]


def uses() -> Counter[Use]:
    """Return how often the installed Megatron has each use."""
    found: Counter[Use] = Counter()
    for package in PACKAGES:
        specification = importlib.util.find_spec(package)
        if specification is None or specification.submodule_search_locations is None:
            raise ModuleNotFoundError(f"{package} is not installed; see docs/getting_started.md")
        [folder] = specification.submodule_search_locations
        for path in sorted(Path(folder).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            module = ".".join((package, *(part for part in parts if part != "__init__")))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # of upstream's strings
                tree = ast.parse(path.read_text())
            found.update((module, *use) for use in uses_in(tree))
    return found


def uses_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the place and the name of each use in a module."""
    imported = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    names = {
        alias.asname or alias.name: alias.name
        for node in imported for alias in node.names if alias.name in FUNCTIONS
    }  # fmt: skip
    return _uses(tree, {name: name for name in FUNCTIONS} | names)


def _uses(tree: ast.Module, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    todo: list[tuple[ast.AST, str, bool]] = [(tree, "", False)]
    while todo:
        node, place, is_called = todo.pop()
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in names:
                yield place, names[name]
            case ast.Attribute(attr=name) if name in FUNCTIONS:
                yield place, name
            case ast.Attribute(attr=name) if name in FIELDS and not is_called:  # `group.rank()` is of a group
                yield place, f".{name}"
            case ast.Constant(value=str(name)) if name in VARIABLES:
                yield place, f"${name}"
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                if name in FIELDS:
                    yield place, f".{name}"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                place = f"{place}.{name}".lstrip(".")
        function = node.func if isinstance(node, ast.Call) else None
        todo += [(child, place, child is function) for child in ast.iter_child_nodes(node)]


def differences() -> list[str]:
    """Return a line for each use that Megatron has more or fewer times than the list.

    A function may use a name for several purposes; then several judgements share the number.
    """
    there, listed = uses(), sum((each.counts() for each in judgements()), Counter[Use]())
    return [
        f"{module}:{function} {name}: {there[use]} in Megatron, {listed[use]} judged"
        for use in sorted(there.keys() | listed.keys())
        if there[use] != listed[use]
        for module, function, name in [use]
    ]


def main() -> int:
    """Print the differences; return 1 if there are any."""
    found = differences()
    print(*found, sep="\n")
    print(f"{uses().total()} uses, {len(found)} differences from {LIST}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
