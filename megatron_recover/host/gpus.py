"""The GPUs of this machine, seen without a library that could open one."""

from __future__ import annotations

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
    """Return whether this machine has a GPU of NVIDIA that this process may use."""
    return any(devices.glob(_NVIDIA))
