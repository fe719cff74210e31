"""The device on which a job trains, in words; refuses an unseen GPU, and that of another rank.

Upstream refuses every machine without CUDA. Here the CPU trains where torch sees no GPU, which must
not happen by mistake: on a CPU a job of hours would take weeks. Only NVIDIA's GPUs are looked for.
"""

from __future__ import annotations

from megatron_recover.config import VISIBLE_GPUS, visible_gpus
from megatron_recover.host.gpus import has_nvidia_gpu

_HIDE_ALL = ("", "-1")
"""Values of `VISIBLE_GPUS` with which a user trains on the CPU of a machine that has a GPU."""


def unseen_gpu() -> list[str]:
    """Return the refusal, in one line, if this machine has a GPU of NVIDIA.

    Return no line without such a GPU, or if the user has hidden all GPUs. Call this only where
    torch sees no GPU.
    """
    visible = visible_gpus()
    if not has_nvidia_gpu() or visible in _HIDE_ALL:
        return []
    return [
        f"this machine has a GPU of NVIDIA, and torch sees none: {_cause(visible)}; "
        f"to train on the CPU, set {VISIBLE_GPUS} to nothing"
    ]


def _cause(visible: str | None) -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for the CPU; install one that is built for the GPU"
    if visible is not None:
        return f"{VISIBLE_GPUS} is {visible}; set it to the indices of GPUs of this job, or leave it out"
    try:
        torch.cuda.init()
        said = "no reason is known"
    except (RuntimeError, AssertionError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    return f"{said}; look with `nvidia-smi`, update the driver, or request GPUs of the scheduler (Slurm: --gres)"


def device_line(*, num_gpus: int, num_used: int) -> str:
    """Return the line of the console that names the device; `num_gpus` is 0 on a CPU."""
    if num_gpus:
        return f"training on GPUs: {num_used} of the {num_gpus} that torch sees"
    return f"training on the CPU: {f'{VISIBLE_GPUS} hides every GPU' if has_nvidia_gpu() else 'torch finds no GPU'}"


def other_device(own: int) -> list[str]:
    """Return the refusal, in one line, if this thread's GPU is not the rank's own.

    `own` is the device that LOCAL_RANK names. Upstream has chosen that one, or another by
    `--local-rank`, and a script may have chosen another one since. Without CUDA return no line.
    """
    import torch

    if not torch.cuda.is_available() or (current := torch.cuda.current_device()) == own:
        return []
    return [
        f"this rank would train on cuda:{current}, and its own device is cuda:{own}: the script or --local-rank has chosen "
        "another; leave --local-rank out, and let torch.cuda.set_device have LOCAL_RANK, not RANK, which every replica has"
    ]
