"""The GPUs of this machine. This process uses no library that could open one."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

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
