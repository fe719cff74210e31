"""`scripts/pretrain_gpt.py` where what a replica loses in a forward or backward is always dealt to the others in mid-pass.

In a step with such a fault, the replica that is to die begins when all others are in their pass, and these do not ask for its
end before they know of the loss. Otherwise which of the two comes first is chance: a pass takes less time here than a recovery.
"""

from __future__ import annotations

import json
import pathlib
import runpy
import time
from typing import Any

from megatron_recover.config import rank_context
from megatron_recover.control_plane.rank_driver import RankDriver
from megatron_recover.trainer.work_queue import WorkQueue

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def main() -> None:
    """Train; be patient."""
    context = rank_context()
    if context is not None and not context.dry_run:
        folder = pathlib.Path(context.run_dir)
        faults = json.loads((folder / "run.json").read_text())["faults"]
        _be_patient(folder, {each.get("step"): each["replica"] for each in faults if each["point"] in ("forward", "backward")})
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _be_patient(folder: pathlib.Path, victims: dict[int, int]) -> None:
    """`victims`: who is to die in a step."""
    begin, ask_close = WorkQueue.__init__, RankDriver.ask_close

    def begin_together(self: WorkQueue, member: RankDriver, *args: Any, **others: Any) -> None:
        begin(self, member, *args, **others)
        step = member.step
        (folder / f"begun.{step}.{member.replica}").touch()
        while victims.get(step) == member.replica and not all(
            (folder / f"begun.{step}.{replica}").exists() for replica in member.roster
        ):
            time.sleep(0.005)  # the others are other processes; nothing but the files tells what they are at

    def end_knowing(self: RankDriver) -> None:
        if victims.get(self.step, self.replica) in set(self.roster) - {self.replica}:  # its loss is still to come
            with self._changed:
                self._wait_until(lambda: bool(self._state.queue))
        ask_close(self)

    WorkQueue.__init__ = begin_together  # type: ignore[method-assign]
    RankDriver.ask_close = end_knowing  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
