"""The GPUs of this machine, seen without a library that could open one."""

from __future__ import annotations

from pathlib import Path

_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""Files in /dev of GPUs that torch's `cuda` uses: NVIDIA's driver, AMD's, and that of WSL."""


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether a process of this machine may find a GPU.

    A container has the files of the GPUs that it may use.
    """
    return any(any(devices.glob(pattern)) for pattern in _DEVICES)
