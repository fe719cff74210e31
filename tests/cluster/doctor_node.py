"""A node of a job that is examined, as a process: lines of JSON in and out, instead of the agents' links.

`python -m tests.cluster.doctor_node NODE HOST PORTS SECONDS NEED`: PORTS as 1,2; its clock is SECONDS ahead. It prints its
`Opened`. The line with those of all nodes is answered with its `Report`, also several times. It closes at the end of its stdin.
"""

from __future__ import annotations

import sys
import time

import msgspec

from megatron_recover.cluster.doctor.findings import Need
from megatron_recover.cluster.doctor.session import Opened, Session

KEY = bytes(range(32))


def main() -> None:
    node, host, ports, ahead_s, need = int(sys.argv[1]), sys.argv[2], [*map(int, sys.argv[3].split(","))], *sys.argv[4:]
    offset = round(float(ahead_s) * 1e9)
    needed = msgspec.structs.replace(msgspec.json.decode(need, type=Need), address=host)
    session = Session(node, f"n{node}", needed, KEY, ports=ports, now_ns=lambda: time.time_ns() + offset)
    print(msgspec.json.encode(session.opened).decode(), flush=True)
    for line in sys.stdin:
        opened = msgspec.json.decode(line, type=list[Opened])
        report = session.report(dict(enumerate(opened)), len(opened))
        print(msgspec.json.encode(report).decode(), flush=True)
    session.close()


if __name__ == "__main__":
    main()
