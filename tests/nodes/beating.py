"""A program that does nothing but leave a line every 20 ms, which says when: so what a loss costs the survivors can be read.

``python -m tests.nodes.beating FOLDER SAVE_S`` writes to a file of its node, and ends with code 0 when FOLDER has a file `end`.
Told to end by a signal, it *saves*, which takes SAVE_S, and ends with code 0.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from pathlib import Path

BEAT_S = 0.02
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def main() -> None:
    """Beat until the end."""
    folder, save_s = Path(sys.argv[1]), float(sys.argv[2])
    told: list[int] = []
    for each in SIGNALS:
        signal.signal(each, lambda number, frame: told.append(number))
    with open(folder / f"beats-{socket.gethostname()}.jsonl", "a", buffering=1) as beats:

        def beat(**fields: object) -> None:
            beats.write(json.dumps({"at": time.monotonic(), **fields}) + "\n")

        while not told and not (folder / "end").exists():
            beat()
            time.sleep(BEAT_S)
        if told:
            until = time.monotonic() + save_s
            while time.monotonic() < until:
                beat(saving=True)
                time.sleep(BEAT_S)
            beat(saved=True)


if __name__ == "__main__":
    main()
