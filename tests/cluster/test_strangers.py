"""A job besieged by strangers with real sockets: it finishes, nobody is lost, nothing is decided otherwise (A9, A10, A11)."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import psutil
import pytest

from megatron_recover import trace
from megatron_recover.authentication.handshake import KEY_BYTES
from megatron_recover.core.exit_code import ExitCode
from tests.cluster.jobs import Spec
from tests.cluster.running import FOR_EVER, Start
from tests.cluster.strangers import Siege, ports_of, raise_descriptor_limit

pytestmark = pytest.mark.timeout(240)

NUM_STRANGERS = 10_000
REPLICAS, RANKS = 2, 2


def keys_of(process: psutil.Process) -> set[bytes]:
    """What sealed keys a process has open."""
    found = set()
    for name in os.listdir(f"/proc/{process.pid}/fd"):
        path = f"/proc/{process.pid}/fd/{name}"
        if "megatron-recover-key" in os.readlink(path):
            assert os.stat(path).st_mode & 0o077 == 0
            found.add(Path(path).read_bytes())
    return found


def test_the_key_reaches_ranks_and_is_shown_nowhere(start: Start, tmp_path: Path) -> None:
    # A fork would show the command line and the environment of its parent.
    job = start(Spec(run_dir=str(tmp_path / "run"), replicas=2, ranks=2, steps=FOR_EVER), is_fresh=True)
    ranks = [each for each in job.processes if each.name().startswith("replica-")]
    assert len(ranks) == 4
    logs = tmp_path / "run" / "logs"
    job.until(lambda: len(list(logs.glob("replica-*.log"))) == 4, "the logs of all ranks")
    [key] = keys_of(psutil.Process(job.launcher.pid))
    assert len(key) == KEY_BYTES
    assert not any(map(keys_of, ranks)), "a rank has read the key, and closes it then"
    shown = [Path(f"/proc/{each.pid}/{name}").read_bytes() for each in job.processes for name in ("cmdline", "environ")]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    shown += [path.read_bytes() for path in files]
    for form in (key, key.hex().encode(), base64.b64encode(key)):
        assert not any(form in text for text in shown)
    private = [path for path in files if path.name == trace.EVENTS_FILE or path.parent.name == "logs"]
    assert len(private) >= 7 and all(path.stat().st_mode & 0o077 == 0 for path in private)
    soft, hard = psutil.Process(ranks[0].pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard


def test_a_job_under_siege_loses_nobody(start: Start, tmp_path: Path) -> None:
    """10,000 strangers at coordinator, leaders and data endpoints; in the middle a replica dies, so that new links are made."""
    spec = Spec(run_dir=str(tmp_path / "run"), replicas=REPLICAS + 1, ranks=RANKS, steps=FOR_EVER)
    job = start(spec)
    ports = ports_of([psutil.Process(job.launcher.pid), *job.processes])
    # The coordinator, each leader, each rank's data plane.
    assert len(ports) == 1 + (REPLICAS + 1) * (1 + RANKS)
    num_strangers = min(NUM_STRANGERS, raise_descriptor_limit() - 1000)
    siege = Siege(ports, num_strangers)
    try:
        assert siege.full.wait(120), f"{siege.num_made} came"
        before = job.num_applied()
        job.until(lambda: job.num_applied() > before + 20, "steps under siege")
        [victim] = [each for each in job.processes if each.name() == f"replica-{REPLICAS}.0"]
        victim.kill()
        then = job.num_applied()
        job.until(lambda: job.num_applied() > then + 20, "steps after a death under siege")
        job.launcher.terminate()
        outcome = job.end()
    finally:
        siege.lift()
    print(f"{siege.num_made} strangers, {siege.num_let_go} let go")
    assert siege.num_made >= num_strangers and siege.num_let_go > num_strangers // 4
    assert outcome.exit_code == ExitCode.INTERRUPTED, outcome.output
    told = {(each.replica, each.rank, each.listener) for each in outcome.of(trace.Strangers)}
    assert (-1, -1, "coordinator") in told and {(0, rank, "data") for rank in range(RANKS)} <= told, "all of them are besieged"
    generations = outcome.of(trace.Generation)
    assert [each.roster for each in generations if each.losses] == [tuple(range(REPLICAS))]
    outcome.assert_exactly_once()
