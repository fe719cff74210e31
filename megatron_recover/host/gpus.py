"""The GPUs of this machine. This process uses no library that could open one."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from megatron_recover.host.process_stat import cause_of

_NVIDIA = "nvidia[0-9]*"
_OTHERS = ("kfd", "dxg")
"""Files in /dev of AMD's driver and of WSL. They are also there without a GPU that torch can use:
with integrated graphics, and on any Windows machine."""


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether a process of this machine may find a GPU that torch calls `cuda`.

    A container has the files of the GPUs that it may use.
    """
    return has_nvidia_gpu(devices) or any(any(devices.glob(pattern)) for pattern in _OTHERS)


def has_nvidia_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether `devices` has the file of a GPU of NVIDIA. On WSL it has none."""
    return any(devices.glob(_NVIDIA))


_BYTES = "print(*(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())))"


_ANSWERS_S = 120.0
"""Seconds for which a driver may take to answer. Importing torch alone can take half a minute."""


@functools.cache
def gpu_bytes() -> tuple[int, ...]:
    """Return the bytes of memory of each GPU that torch sees, by a process that ends at once.

    This process asks no driver: what it forked then could use no GPU. Without torch, or where that
    process fails or has not answered after `_ANSWERS_S`, the result is empty.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"import torch; {_BYTES}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )  # fmt: skip
    try:
        words = process.communicate(timeout=_ANSWERS_S)[0].split()
    except subprocess.TimeoutExpired:  # a driver that hangs, and may keep the process from its end
        process.kill()
        return ()
    return tuple(map(int, words)) if process.returncode == 0 and all(map(str.isdecimal, words)) else ()


class Gpu(NamedTuple):
    """A GPU as NVIDIA's driver describes it."""

    number: int
    uuid: str
    name: str
    total_mib: int
    used_mib: int
    """Memory in use, by whichever process."""
    is_prohibited: bool
    """True if no process may compute on it (compute mode)."""


_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "compute_mode")
_NVIDIA_SMI = "nvidia-smi"
_READ_S = 0.1
"""Seconds to read what a program has written, also where the caller has no time left."""


def start_query() -> subprocess.Popen[str] | None:
    """Start the program that asks the driver for all GPUs; return None if that cannot be started.

    A driver that hangs holds that program only. Give it to `answered`.
    """
    command = [_NVIDIA_SMI, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip
    except OSError:
        return None


def answered(query: subprocess.Popen[str], timeout_s: float) -> list[Gpu]:
    """Return the GPUs that `start_query` asks for.

    Raises OSError with what the program said if it failed, wrote anything else than GPUs, or has
    not answered after `timeout_s` seconds. It is killed then, and not waited for.
    """
    try:
        text = query.communicate(timeout=max(_READ_S, timeout_s))[0]
    except subprocess.TimeoutExpired:
        query.kill()
        raise OSError(f"{_NVIDIA_SMI} does not answer") from None
    if query.returncode != 0:
        raise OSError(f"{_NVIDIA_SMI} ended with {cause_of(query.returncode)}: {_last_line(text)}")
    try:
        return [_gpu([word.strip() for word in line.split(",")]) for line in text.splitlines() if line.strip()]
    except ValueError:
        raise OSError(f"{_NVIDIA_SMI} wrote no list of GPUs: {_last_line(text)}") from None


def _gpu(words: list[str]) -> Gpu:
    """Return the GPU of a line. Raises ValueError for another line.

    A driver that does not know a figure writes `[N/A]`, which counts as 0.
    """
    index, uuid, name, total, used, mode = words
    total_mib, used_mib = (0 if each.startswith("[") else int(each) for each in (total, used))
    return Gpu(int(index), uuid, name, total_mib, used_mib, mode == "Prohibited")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1]


def visible(gpus: list[Gpu], selection: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA shows for a value of CUDA_VISIBLE_DEVICES; None: all.

    As CUDA does, stop at the first word that names no GPU. A word is an index, or the beginning of
    one UUID.
    """
    if selection is None:
        return gpus
    found: list[Gpu] = []
    for word in map(str.strip, selection.split(",")):
        is_number = not word or word.isdecimal()
        named = [each for each in gpus if (word == str(each.number) if is_number else each.uuid.startswith(word))]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return found
