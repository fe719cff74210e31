"""Describes what must be equal when replicas start, and what decides the samples of a run.

Each public function returns names and values for one rank. The names appear in the message about a
difference. `commit.CommitLoop` adds the shape, and the parameters and the state as initialized or
loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
from argparse import Namespace
from collections.abc import Iterator, Sequence

import torch

from megatron_recover import packages
from megatron_recover.config import nccl_order
from megatron_recover.megatron.launch.preflight_data import is_number

_OF_ONE_RANK = frozenset({"rank", "local_rank", "flight_recorder_dump_path", "profile"})
_OF_PROGRESS = frozenset(
    {
        "consumed_train_samples", "consumed_valid_samples", "curr_iteration", "finetune", "iteration",
        "num_floating_point_operations_so_far", "skipped_train_samples",
    }
)  # fmt: skip
"""Arguments in which Megatron keeps how far it has come. It sets `finetune` where it loads
`--pretrained-checkpoint`; the argument decides only what is loaded."""
_PACKAGES = ("torch", "megatron-core", "numpy", "megatron-recover")
_DATA_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
"""Arguments that name indexed data."""
_LONGEST = 120
"""Characters of a value. A longer value is cut, and its digest is added."""
_BLOCK_BYTES = 2**16
_NUM_BLOCKS = 64
"""Number of blocks to read of a file that has more, including the first and the last block."""


def arguments(args: Namespace, rank: int, *, unchanging: bool = False) -> dict[str, str]:
    """Return all arguments by name on rank 0, and their digest on every rank.

    `unchanging`: only those that are the same at each iteration (`_OF_PROGRESS` lists the others).

    Arguments that are not set (None, False, []) are left out by name, but are part of the digest.
    Arguments that differ between ranks (`_OF_ONE_RANK`) are in neither. Long values are cut
    (`_LONGEST`).
    """
    left_out = _OF_ONE_RANK | _OF_PROGRESS if unchanging else _OF_ONE_RANK
    values = {name: repr(value) for name, value in sorted(vars(args).items()) if name not in left_out}
    unset = ("None", "False", "[]")
    named = {f"argument {name}": _cut(value) for name, value in values.items() if value not in unset} if rank == 0 else {}
    which = "the arguments that do not change" if unchanging else "all arguments"
    return {**named, f"the digest of {which}": _digest(repr(sorted(values.items())).encode())}


def software(*, exact: bool) -> dict[str, str]:
    """Return the versions of Python and of the packages in `_PACKAGES`.

    With CUDA return also the settings of NCCL that decide the order of its additions
    (`config.NCCL_ORDER`). With `exact` (`--recover-determinism exact`) return also the kind of
    device: exact results are equal only on equal hardware.
    """
    parts = {f"the version of {name}": packages.version(name) or "unknown" for name in _PACKAGES}
    parts["the version of Python"] = platform.python_version()
    if torch.cuda.is_available():
        parts |= {f"the environment's {name}": value for name, value in nccl_order().items()}
    if exact and torch.cuda.is_available():
        parts["the device"] = torch.cuda.get_device_name()
    elif exact:
        parts["the device"] = f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}"
    return parts


def data(args: Namespace) -> dict[str, str]:
    """Return a digest of each indexed data set that the arguments name (`_DATA_PATHS`).

    The digest covers the index file and the file of samples, of a large file a sample of blocks. A
    data set is left out if one of its two files is missing, or if only a file of data sets names
    the data set.
    """
    words = [word for name in _DATA_PATHS for word in _words(getattr(args, name, None))]
    return {f"the data of {prefix}": _digest_of_data(prefix) for prefix in dict.fromkeys(words) if _is_indexed(prefix)}


def surroundings(args: Namespace, *, exact: bool) -> dict[str, str]:
    """Return the software and the data that must be equal on the same rank of every replica."""
    from megatron.core import parallel_state

    # As in upstream, tensor-parallel rank 0 reads the samples and sends them to its group.
    reads = parallel_state.get_tensor_model_parallel_rank() == 0
    return software(exact=exact) | (data(args) if reads else {})


def samples(args: Namespace) -> dict[str, str]:
    """Return what decides which samples a run reads, by name. Compared when a run resumes.

    That is digests as in `data`, weights, `--split` and `--seed`, and with `--dataloader-type
    cyclic` what decides its order; nothing if there are no indexed data sets and no weights. Names
    data sets by their position and not, as `data` does, by their paths: the files may have moved
    before a run resumes.
    """
    found: dict[str, str] = {}
    for name in _DATA_PATHS:
        flag, words = "--" + name.replace("_", "-"), _words(getattr(args, name, None))
        prefixes = [word for word in words if _is_indexed(word)]
        found |= {f"data set {number} of {flag}": _digest_of_data(each) for number, each in enumerate(prefixes, 1)}
        if weights := [word for word in words if is_number(word)]:
            found[f"the weights of {flag}"] = _cut(" ".join(weights))
    names = ["split", "seed"]
    if getattr(args, "dataloader_type", None) == "cyclic":
        names += ["dataloader_type", "micro_batch_size"]  # an epoch is a multiple of the microbatch
    flags = {f"--{name.replace('_', '-')}": str(getattr(args, name)) for name in names if hasattr(args, name)}
    return found | flags if found else {}


def _is_indexed(prefix: str) -> bool:
    return os.path.isfile(f"{prefix}.idx") and os.path.isfile(f"{prefix}.bin")


def _digest_of_data(prefix: str) -> str:
    return " ".join(f"{ending[1:]} {_digest_of_file(prefix + ending)}" for ending in (".idx", ".bin"))


def _words(value: Sequence[str] | str | None) -> Sequence[str]:
    return [value] if isinstance(value, str) else value or []


def _digest_of_file(path: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        for start in _starts(size):
            file.seek(start)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _starts(size: int) -> Iterator[int]:
    """Yield the offsets of the blocks to read: all blocks, or `_NUM_BLOCKS` of a large file."""
    if size <= _NUM_BLOCKS * _BLOCK_BYTES:
        yield from range(0, size, _BLOCK_BYTES)
        return
    for index in range(_NUM_BLOCKS):
        yield (size - _BLOCK_BYTES) * index // (_NUM_BLOCKS - 1)


def _cut(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}... ({_digest(value.encode())})"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
