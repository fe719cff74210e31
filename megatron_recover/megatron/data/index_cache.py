"""Guards upstream's index cache while it is built, so that no process reads a partial array."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_recover.core.progress import Phase
from megatron_recover.deadlines import figure
from megatron_recover.host import lock_file
from megatron_recover.host.whole_file import replacing
from megatron_recover.progress_page import ProgressPage


def cache_directory(data_cache_path: str | None, prefixes: Sequence[str]) -> Path | None:
    """Return the folder of upstream's index cache; None without `--data-cache-path` and data.

    The folder is `--data-cache-path`, else `cache` below the first of `prefixes`. Without the flag
    upstream has such a folder for each data set; the lock in the first one serves for all.
    """
    if data_cache_path is not None:
        return Path(data_cache_path)
    return Path(prefixes[0]) / "cache" if prefixes else None


@contextlib.contextmanager
def building_cache(directory: Path, patience_s: float) -> Iterator[None]:
    """Let one process at a time build upstream's index cache, and expose no partial array.

    Upstream treats a cache as complete if its files exist, and overwrites files that other
    processes may have mapped. Within this context `numpy.save` writes each array beside its final
    name, syncs it and renames it. So a killed builder leaves each array complete or absent. The
    next builder builds all arrays of a data set again if one is absent. Upstream's description
    beside them, which nothing reads back, may be partial.

    The lock only saves work. The kernel releases it when its holder ends. A process builds the
    cache without the lock, and reports that on stderr, in two cases: it has waited for `patience_s`
    seconds, because the holder is stopped or slow, or the file cannot be locked. Raises OSError if
    the folder or the lock file cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".building.lock"
    with lock_file.opened(path) as lock:
        try:
            if lock_file.acquired(lock, patience_s):
                lock.truncate(0)
                print(f"pid {os.getpid()}", file=lock, flush=True)
            else:
                holder = lock.read().strip() or "another process"
                _build_unlocked(f"{holder} has held {path} for {figure(patience_s)} s")
        except OSError as error:  # a file system without locks, or a full one
            _build_unlocked(f"{path} cannot be locked ({error.strerror})")
        save = numpy.save
        numpy.save = _atomic(save)
        try:
            yield
        finally:
            numpy.save = save


def building_cache_once(
    provider: Callable[..., Any], args: Namespace, *, patience_s: float, page: ProgressPage
) -> Callable[..., Any]:
    """Return `provider` wrapped: it runs within `building_cache` in rank 0 of a replica.

    The other ranks do not take the lock, since upstream builds in rank 0. Without a folder for the
    cache no rank does. `page` shows the phase `BUILDING_DATA` meanwhile.
    """
    prefixes = [word for word in args.data_path or args.train_data_path or [] if os.path.isfile(f"{word}.idx")]
    directory = cache_directory(args.data_cache_path, prefixes)

    @functools.wraps(provider)
    def provide(*values: Any, **others: Any) -> Any:
        with page.within(Phase.BUILDING_DATA):
            if directory is None or torch.distributed.get_rank() != 0:
                return provider(*values, **others)
            with building_cache(directory, patience_s):
                return provider(*values, **others)

    return provide


def _build_unlocked(why: str) -> None:
    print(f"{why}: building the index without the lock", file=sys.stderr)


def _atomic(save: Callable[..., None]) -> Callable[..., None]:
    def atomic_save(file: Any, array: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            save(file, array, *args, **kwargs)
            return
        with replacing(Path(file)) as stream:
            save(stream, array, *args, **kwargs)
            stream.flush()
            os.fsync(stream.fileno())

    return atomic_save
