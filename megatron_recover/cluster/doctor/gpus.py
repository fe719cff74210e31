"""Check of the GPUs of a node: seen, enough, and free.

Another program asks the driver (`host/gpus.py`), so a driver that hangs holds nothing here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from megatron_recover.cluster.doctor.findings import Check, Finding, Need, fail, ok, warn
from megatron_recover.config import VISIBLE_GPUS
from megatron_recover.host import gpus

_HELD = 0.05
"""Share of a GPU's memory above which somebody else uses it. The driver itself takes about 1 %."""
_LOOK = "look with nvidia-smi"


class Query:
    """The question to the driver, which is asked in the background where there is a GPU."""

    def __init__(self) -> None:
        self._has_gpu = gpus.has_nvidia_gpu()
        self._query: subprocess.Popen[str] | None = gpus.start_query() if self._has_gpu else None
        self._answer: list[gpus.Gpu] | Finding | None = None

    def answer(self, timeout_s: float) -> list[gpus.Gpu] | Finding:
        """Wait up to `timeout_s` seconds for the driver; return all GPUs, or why none are known.

        A second call returns the same.
        """
        if self._answer is None:
            self._answer = self._ask(timeout_s)
        return self._answer

    def _ask(self, timeout_s: float) -> list[gpus.Gpu] | Finding:
        if not self._has_gpu:
            return []
        if self._query is None:
            return warn(Check.GPUS, "not looked at: nvidia-smi cannot be started", "install NVIDIA's tools beside the driver")
        try:
            return gpus.answered(self._query, timeout_s)
        except OSError as error:
            return warn(Check.GPUS, str(error), "restart the node's driver, or leave this node out")


def judged(need: Need, there: Sequence[gpus.Gpu]) -> Finding:
    """Return the finding about the GPUs that the driver knows. Pure."""
    shown = gpus.visible([*there], need.environment.get(VISIBLE_GPUS))
    value = f"{len(shown)} of {len(there)}" if len(shown) < len(there) else str(len(there))
    if not there:
        return ok(Check.GPUS, "none: training on the CPU")
    if not shown:
        return ok(Check.GPUS, f"{VISIBLE_GPUS} hides all {len(there)}: training on the CPU")
    needed = -(-(need.num_ranks or 0) // need.ranks_per_gpu)
    if needed > len(shown):
        fewer = "start fewer ranks on this node"
        if need.num_spares:
            largest = len(shown) * need.ranks_per_gpu - ((need.num_ranks or 0) - need.num_spares)
            fewer = f"give --spares {largest} or fewer" if largest > 0 else f"leave out --spares, and {fewer}"
        return fail(
            Check.GPUS, f"{value} seen, and {need.ranks} need {needed}",
            f"{fewer}, or correct {VISIBLE_GPUS}, the container's --gpus or Slurm's --gpus-per-node",
        )  # fmt: skip
    if closed := [str(each.number) for each in shown if each.is_prohibited]:
        return fail(Check.GPUS, f"compute mode Prohibited on {', '.join(closed)}", "nvidia-smi --compute-mode=0 as root")
    held = [f"{each.number} ({each.used_mib} MiB)" for each in shown if each.used_mib > _HELD * each.total_mib]
    if held:
        return warn(Check.GPUS, f"{value} seen, and in use by other processes: {', '.join(held)}", f"end them ({_LOOK})")
    return ok(Check.GPUS, f"{value} seen, free ({shown[0].name}, {shown[0].total_mib} MiB)")
