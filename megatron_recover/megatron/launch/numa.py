"""Binds a rank to the CPUs near its GPU, as torchrun does with `--numa-binding`.

torch finds the CPUs (torch/numa/binding.py). It has no public function for that; the functions used
here are those of torch 2.11 to 2.15.
"""

from __future__ import annotations

import inspect

from megatron_recover.config import FOR_CONSOLE, NumaBinding, RankContext

_BIND = "_bind_all_threads_in_current_process_to_logical_cpus"
"""Name of torch's function that binds a process."""


def bind(context: RankContext) -> None:
    """Have all threads of this rank, now and later, run on the CPUs near its GPU.

    The dry run only prints, for the console, how many CPUs these are for each GPU, of at most as
    many GPUs as there are ranks. Does nothing without `--numa-binding`. Raises ValueError as
    `cpus_near` does; in the dry run also if torch cannot bind a process.
    """
    mode = context.numa_binding
    if mode is None:
        return
    import torch
    from torch.numa import binding

    if context.dry_run:
        if not hasattr(binding, _BIND):
            raise ValueError(f"--numa-binding is {mode}, but torch {torch.__version__} has no {_BIND}; leave it out")
        num_gpus = min(context.num_ranks * context.num_replicas, max(1, torch.cuda.device_count()))
        numbers = ", ".join(f"{len(cpus_near(mode, gpu))} for GPU {gpu}" for gpu in range(num_gpus))
        print(f"{FOR_CONSOLE}ranks run on the CPUs near their GPUs ({mode}): {numbers}", flush=True)
        return
    getattr(binding, _BIND)(logical_cpu_indices=cpus_near(mode, context.gpu))


def cpus_near(mode: NumaBinding, gpu: int) -> set[int]:
    """Return the CPUs for a rank on a GPU; they are never none.

    Raises ValueError with the remedy if torch sees no GPU, cannot tell the CPUs, or names none.
    """
    import torch

    try:
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        from torch.numa.binding import AffinityMode, NumaOptions, _get_logical_cpus_to_bind_to

        # The argument is gpu_index, and device_index from torch 2.14 on.
        name = next(name for name in inspect.signature(_get_logical_cpus_to_bind_to).parameters if name.endswith("_index"))
        found: set[int] = _get_logical_cpus_to_bind_to(**{name: gpu, "numa_options": NumaOptions(AffinityMode(mode))})
        if not found:
            raise RuntimeError("the launcher may use none of them")
    except (RuntimeError, AssertionError, OSError, ImportError, StopIteration, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--numa-binding is {mode}, but torch {torch.__version__} does not tell the CPUs near GPU {gpu} "
            f"({str(error) or type(error).__name__}); leave it out, or start the launcher by numactl"
        ) from error
    return found
