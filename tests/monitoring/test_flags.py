"""What is wrong with a flag for monitoring ends `run` with code 2, a reason and a remedy, before anything exists."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_recover import cli


def refused(capsys: pytest.CaptureFixture[str], run_dir: Path, *flags: str) -> str:
    """The one line with which a run is refused, or several, as for a script without any flag of Megatron."""
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--replicas", "2", "--run-dir", str(run_dir), *flags, "setup.py"])
    said = capsys.readouterr()
    assert (end.value.code, said.out, run_dir.exists()) == (2, "", False)
    return "\n".join(line.removeprefix("megatron-recover run: ") for line in said.err.splitlines())


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path, taken: int) -> None:
    assert refused(capsys, tmp_path / "run", "--metrics-port", str(taken)) == (
        f"--metrics-port {taken} is in use on 127.0.0.1; give another port, or 0 for a free one; `ss -ltnp sport = :{taken}` "
        "names who has it"
    )


def test_bad_ports_and_addresses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert refused(capsys, run_dir, "--metrics-port", "70000") == "--metrics-port is 70000; it must be 0 to 65535"
    assert refused(capsys, run_dir, "--metrics-address", "0.0.0.0").startswith("--metrics-address does nothing without")
    assert "give an address of this machine" in refused(
        capsys, run_dir, "--metrics-port", "0", "--metrics-address", "192.0.2.1"
    )
    assert "give an address of this machine" in refused(capsys, run_dir, "--metrics-port", "0", "--metrics-address", "no.such.")
    assert "--metrics-port: invalid int value: 'x'" in refused(capsys, run_dir, "--metrics-port", "x")


def test_bad_text_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert refused(capsys, run_dir, "--metrics-textfile", str(tmp_path / "x.txt")) == (
        f"--metrics-textfile {tmp_path / 'x.txt'} does not end with .prom; node_exporter reads no other file"
    )
    (tmp_path / "folder.prom").mkdir()
    (tmp_path / "file").touch()
    for path, why in {
        tmp_path / "folder.prom": "Is a directory", tmp_path / "none" / "x.prom": "No such file or directory",
        tmp_path / "file" / "x.prom": "Not a directory", Path("/proc/x.prom"): "No such file or directory",
    }.items():  # fmt: skip
        line = refused(capsys, run_dir, "--metrics-textfile", str(path))
        assert line.startswith(f"--metrics-textfile {path} cannot be written ({why}); give a file in a folder that exists")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder.prom"], "trying leaves nothing"


def test_bad_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert (
        refused(capsys, run_dir, "--on-event", "sh -c 'x")
        == "--on-event sh -c 'x: No closing quotation; quote it as for a shell"
    )
    for command in ("", "no-such-program x", str(tmp_path)):
        line = refused(capsys, run_dir, "--on-event", command)
        assert line.startswith("--on-event: there is no program") and "sh -c '...'" in line


def test_metrics_need_the_steps_of_the_trace_and_events_do_not(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("--trace-level", "faults", "--metrics-textfile", str(tmp_path / "x.prom"))
    assert refused(capsys, tmp_path / "run", *flags).endswith("which --trace-level faults leaves out; give --trace-level steps")
    assert "--train-iters is missing" in refused(capsys, tmp_path / "run", "--trace-level", "faults", "--on-event", "true")


def test_without_the_package_metrics_are_refused_and_events_are_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "prometheus_client" else there(name))
    assert "--metrics-port: prometheus-client is not installed; " in refused(capsys, tmp_path / "run", "--metrics-port", "0")
    assert "--train-iters is missing" in refused(capsys, tmp_path / "run", "--on-event", "true"), (
        "Megatron's flags are judged next"
    )
