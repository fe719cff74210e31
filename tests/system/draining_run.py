"""`megatron-recover`, with replica 0 asked to leave once all have begun step 3 and replica 1 once they have begun step 9."""

from __future__ import annotations

import sys

from megatron_recover import trace
from megatron_recover.cli import main, run
from megatron_recover.cluster.launcher import Launcher
from megatron_recover.control_plane.node_messages import DrainAsked
from megatron_recover.observe.follow.tail import Tail


class Draining(Launcher):
    """Follows the trace of its run, and asks when a step has begun."""

    def _spawn_all(self) -> None:
        super()._spawn_all()
        self._news = Tail(self._job.run_dir / trace.EVENTS_FILE)
        self._drains = [(3, 0), (9, 1)]
        self._look()

    def _look(self) -> None:
        for line in self._news.lines():
            event, _ = trace.parse(line)
            while isinstance(event, trace.Plan) and self._drains and event.step >= self._drains[0][0]:
                self._send(DrainAsked((self._drains.pop(0)[1],), "drain"))
        self._loop.after(0.01, self._look)


if __name__ == "__main__":
    run.Launcher = Draining
    sys.exit(main())
