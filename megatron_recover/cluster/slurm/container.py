"""Judge the paths of a launch line whose agents run in a container (pyxis).

Note [Paths in a container]
    A step without `--container-workdir` begins in the working directory of the image, wherever the
    batch script has its own. A container without a name is removed when its step ends, with all
    that is in none of its mounts. So a relative path names another place than outside, and a
    checkpoint in no mount is lost. Source: slurmstepd's part of pyxis, which calls `fchdir`, and
    its `README`. It was read and not run.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec

WRITTEN = ("--save", "--load", "--tensorboard-dir", "--wandb-save-dir", "--non-persistent-global-ckpt-dir",
           "--non-persistent-local-ckpt-dir", "--logits-save-dir", "--log-dir", "--log_dir", "--metrics-textfile")  # fmt: skip
"""Flags of the launch line with a place in which a job leaves something, or looks for it later."""
_SEVERAL = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
"""Flags with several values: paths, and weights between them."""
_READ = (*_SEVERAL, "--data-args-path", "--per-split-data-args-path", "--data-cache-path", "--pretrained-checkpoint",
         "--vocab-file", "--merge-file", "--yaml-cfg", "--te-precision-config-file", "--kitchen-config-file",
         "--logits-load-dir")  # fmt: skip
"""Further flags whose value names a file or folder."""


class Mount(msgspec.Struct, frozen=True):
    """A folder of the host in the container."""

    source: str
    """Folder of the host; `tmpfs` or `umount` where there is none."""
    target: str
    """Its place in the container."""


def mounts(text: str) -> list[Mount]:
    """Return the mounts of a `--container-mounts`: SRC, SRC:DST or SRC:DST:FLAGS, with commas."""
    parts = (each.split(":") for each in text.split(",") if each)
    return [Mount(part[0], part[1] if part[1:] and part[1] else part[0]) for part in parts]


def with_run_dir(given: str | None, run_dir: str) -> str:
    """Return a `--container-mounts` that also has the folder of the run directories."""
    return ",".join(filter(None, [given, f"{run_dir}:{run_dir}"]))


def host_path(path: str, among: Sequence[Mount]) -> str | None:
    """Return where the host has a path of the container; None if no mount holds the path."""
    inside = PurePosixPath(posixpath.normpath(path))
    holding = [each for each in among if inside.is_relative_to(each.target)]
    if not holding:
        return None
    nearest = max(holding, key=lambda each: len(PurePosixPath(each.target).parts))
    if nearest.source in ("tmpfs", "umount"):
        return None
    return str(Path(nearest.source).absolute() / inside.relative_to(nearest.target))


def mistakes(script: str | None, words: Sequence[str], given: str | None, run_dir: str) -> Iterator[str]:
    """Yield each path of a launch line that would be another one in the container, or lost.

    `script`: the training script; None if it is a module. `words`: the launch line. `given`: the
    value of `--container-mounts`. The folder `run_dir` is mounted by itself.
    """
    paths = [*([("the training script", script)] if script is not None else []), *_paths(words)]
    for flag, path in paths:
        if not path.startswith("/"):
            yield (
                f"{flag} is {path}: a container begins in the working directory of its image, not in {Path.cwd()}; write the "
                f"full path in the container, such as {Path(path).absolute()}, and name its folder in --container-mounts"
            )
    among = mounts(with_run_dir(given, run_dir))
    lost = {flag: path for flag, path in paths if flag in WRITTEN and path.startswith("/") and host_path(path, among) is None}
    further = ",".join(filter(None, [given, *(f"{path}:{path}" for path in dict.fromkeys(lost.values()))]))
    for flag, path in lost.items():
        yield (
            f"{flag} is {path}, which is in no mount of the container: what is written there is lost with the step; make the "
            f"folder on the host, and give --container-mounts {further}"
        )


def _paths(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag that names a place, with each of its values that is a path."""
    flag = ""
    for word in words:
        value = word
        if word.startswith("-"):
            flag, _, value = word.partition("=")
        if value and flag in (*WRITTEN, *_READ) and "://" not in value and not _is_weight(value):
            yield flag, value
        if value and flag not in _SEVERAL:
            flag = ""


def _is_weight(text: str) -> bool:
    """Return whether a value of `--data-path` is the weight of the next one."""
    try:
        float(text)
    except ValueError:
        return False
    return True
