"""`scripts/pretrain_gpt.py` where replicas differ in what they hold: in some steps only replica 0 gets its last results.

All others keep the last result of each of their ranks out until a newer generation has come (it comes by the stall timeout). So
replica 0 holds every bucket, and in the next generation the last one of each stage has to be transferred.
"""

from __future__ import annotations

import pathlib
import runpy

from megatron_recover.control_plane.rank_driver import RankDriver
from megatron_recover.core.values import Held

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
STEPS = (1, 4)


def main() -> None:
    """Train; be late."""
    hold = RankDriver.hold
    late: set[int] = set()

    def hold_late(self: RankDriver, held: Held) -> bool:
        step = self._state.step
        # Without replica 0 nobody has all results and calls for a newer generation when no vote of the others comes.
        if (
            self.replica > 0
            and 0 in self.roster
            and step in STEPS
            and step not in late
            and held.bucket == self._state.buckets[-1]
        ):
            late.add(step)
            with self._changed:
                self._changed.wait_for(lambda: self._state.promised > self.generation)
        return hold(self, held)

    RankDriver.hold = hold_late
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
