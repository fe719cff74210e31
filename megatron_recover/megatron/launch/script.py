"""Runs a training script, upstream's own too, with this package behind Megatron's two entry points.

`python script.py SCRIPT ARGUMENT...` behaves like `python SCRIPT ARGUMENT...`, and
`python script.py -m MODULE ARGUMENT...` like `python -m MODULE ARGUMENT...`. The launcher starts
the dry run and all ranks so.

From Megatron 0.18 on, upstream's training scripts call `parse_and_validate_args` and then
`pretrain`. `wrap` replaces both names before the script imports them, so the script needs no
change. The dry run refuses a script that calls `torch.distributed.init_process_group` itself: there
it would train alone on the user's data, and in ranks it would wait for ranks that were never
started.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import runpy
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from megatron_recover.config import BAD_ARGUMENTS, FOR_CONSOLE
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.megatron.launch import own_code, rank_warnings
from megatron_recover.megatron.launch.one_megatron import import_folder

Provider = Callable[[ArgumentParser], ArgumentParser]
"""A script's function that adds its own flags to Megatron's parser."""
_ORIGINAL, _ENTRY = "_recover_original", "_recover_entry"
"""Attributes of a wrapped function: upstream's function, and the `EntryPoints` behind it."""


class EntryPoints(Protocol):
    """The functions behind the two names that a training script calls."""

    def parse(
        self, extra_args_provider: Provider | None, args_defaults: Mapping[str, Any], *, ignores_unknown: bool = False
    ) -> Namespace:
        """Return all validated arguments, as upstream's `parse_and_validate_args` does."""

    def pretrain(self, arguments: dict[str, Any]) -> None:
        """Train as upstream's `pretrain` does; `arguments` are that function's, by name."""

    def is_writer(self) -> bool:
        """Return whether this rank's replica is the one that logs and saves at present."""


def original(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return upstream's function for one that `wrap` has put in its place, else `function`."""
    found: Callable[..., Any] = getattr(function, _ORIGINAL, function)
    return found


def is_wrapped() -> bool:
    """Return whether `wrap` has replaced the entry points in this process."""
    import megatron.training

    return original(megatron.training.pretrain) is not megatron.training.pretrain


def is_writer() -> bool:
    """Return whether this rank's replica is the one that logs and saves for the job at present.

    Until the job has begun that is replica 0. If the writer dies, the next replica becomes the
    writer. Under plain torchrun there is one replica, and the result is True.
    """
    import megatron.training

    entry: EntryPoints | None = getattr(megatron.training.pretrain, _ENTRY, None)
    return entry is None or entry.is_writer()


def wrap(entry: EntryPoints) -> None:
    """Put `entry` behind upstream's `parse_and_validate_args` and `pretrain`, for all importers.

    Call it before the script runs: names that are imported already stay upstream's.
    """
    import megatron.training
    import megatron.training.arguments
    import megatron.training.training

    upstream_parse = original(megatron.training.arguments.parse_and_validate_args)
    upstream_pretrain = original(megatron.training.training.pretrain)

    @functools.wraps(upstream_parse)
    def parse_and_validate_args(
        extra_args_provider: Provider | None = None,
        ignore_unknown_args: bool = False,
        args_defaults: Mapping[str, Any] | None = None,
    ) -> Namespace:
        return entry.parse(extra_args_provider, args_defaults or {}, ignores_unknown=ignore_unknown_args)

    @functools.wraps(upstream_pretrain)
    def pretrain(*values: Any, **named: Any) -> None:
        entry.pretrain(inspect.signature(upstream_pretrain).bind(*values, **named).arguments)

    setattr(parse_and_validate_args, _ORIGINAL, upstream_parse)
    setattr(pretrain, _ORIGINAL, upstream_pretrain)
    setattr(pretrain, _ENTRY, entry)
    megatron.training.arguments.parse_and_validate_args = parse_and_validate_args
    megatron.training.pretrain = megatron.training.training.pretrain = pretrain


def run(argv: list[str], *, warns: bool = False) -> None:
    """Run the script that `argv` names as `__main__`, with `argv` as its command line.

    `warns`: first print the lines of `rank_warnings` about the script, for the console.

    Ends the process with exit code 2 if the module is not found.
    """
    is_module = argv[0] == "-m"
    if sys.path[0] == os.path.dirname(os.path.abspath(sys.argv[0])):  # that of the script of ours which called
        del sys.path[0]
    sys.path.insert(0, import_folder(argv[0], is_module=is_module))
    if is_module:
        sys.argv[:] = argv[1:]
        if not _is_module(argv[1]):
            _refuse(f"there is no module {argv[1]}; its folder has to be the working directory or in PYTHONPATH")
        if warns:
            _warn(_file_of_module(argv[1]))
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = argv
        if warns:
            _warn(argv[0])
        runpy.run_path(argv[0], run_name="__main__")


def refuse_own_training() -> None:
    """Have a script that calls `init_process_group` itself end with exit code 2 and the remedy."""
    import torch.distributed

    torch.distributed.init_process_group = _refused("torch.distributed.init_process_group")


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        _refuse(
            f"{sys.argv[0]} calls {name}; call parse_and_validate_args and pretrain of megatron.training instead, as "
            "upstream's pretrain_gpt.py does, or megatron_recover.megatron.pretrain"
        )

    return refuse


def _refuse(line: str) -> NoReturn:
    """End the process with exit code 2 and a line for the user."""
    print(f"{BAD_ARGUMENTS}{line}", file=sys.stderr, flush=True)
    sys.exit(ExitCode.BAD_INPUT)


def _warn(file: str | None) -> None:
    """Print for the console what a script gets wrong about its rank; None: it has no source."""
    if file is not None:
        for line in rank_warnings.warnings(Path(file), own_code.own_folders()):
            print(f"{FOR_CONSOLE}{line}", flush=True)


def _file_of_module(name: str) -> str | None:
    """Return the file that `python -m` runs for a module or package."""
    found = importlib.util.find_spec(name)
    if found is not None and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{name}.__main__")
    return None if found is None else found.origin


def _is_module(name: str) -> bool:
    """Return whether Python finds a module; imports the packages that it is in."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # a package that one of them imports
            raise
        return False


def main() -> None:
    """Run the script of the command line as the dry run or a rank of `megatron-recover run`.

    Raises RuntimeError if the launcher did not start this process.
    """
    from megatron_recover.config import rank_context
    from megatron_recover.megatron import training
    from megatron_recover.megatron.launch import parsing

    context = rank_context()
    if context is None:
        raise RuntimeError("megatron-recover run starts this file; start the training script itself instead")
    training.begin(context)
    if not context.dry_run:
        run(sys.argv[1:])
        return
    refuse_own_training()
    with parsing.bad_input_ends():  # a script may judge its arguments, as upstream's configurations do
        run(sys.argv[1:], warns=True)


if __name__ == "__main__":
    main()
