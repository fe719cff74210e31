"""What a rank prints on a full disk is lost, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_recover.cluster.agent import Agent
from tests.cluster.waiting import until_readable

PROGRAM = """
import logging, sys, traceback
print("x" * 100_000, flush=True)
print("to stderr", file=sys.stderr)
logging.getLogger().warning("a warning")
sys.stdout.write("é\\n")
try:
    raise ValueError("something")
except ValueError:
    traceback.print_exc()
print("on its way out")
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["/dev/full", "log"])
def test_a_rank_prints_to_a_full_disk_and_goes_on(place: str, tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / place
    script.write_text(PROGRAM + f"open({str(tmp_path / 'end')!r}, 'w').write('reached')\n")
    agent = Agent(preload=(), environment=dict(os.environ), log=tmp_path / "server.log")
    try:
        until_readable(agent.fileno(), agent.is_ready, "the fork server")
        agent.spawn(0, 0, argv=(str(script),), environment={}, log=log)
        ends = []
        until_readable(agent.fileno(), lambda: ends.extend(agent.poll()) or ends, "the end of the rank")
        assert [end.status for end in ends] == [0] and (tmp_path / "end").read_text() == "reached"
    finally:
        agent.close()
    if place == "log":
        plain = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, check=True).stdout.decode()
        for line in [*plain.splitlines(), "to stderr", "ValueError: something"]:
            assert line in log.read_text(), "where there is room, everything is there"
