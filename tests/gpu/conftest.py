"""The CUDA part runs where there is a GPU. Where there is one and nothing ran, it fails; where there is none, it says so."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_recover.host.gpus import has_gpu
from tests.gpu.findings import WITHOUT_A_GPU, Outcome, has_failed, table, verdicts


def missing() -> str:
    """What keeps these tests from running here; empty if nothing does."""
    if not torch.cuda.is_available():
        return "this machine has a GPU, but torch sees none; look at the driver" if has_gpu() else "this machine has no GPU"
    if importlib.util.find_spec("nccl") is None:
        return "nccl4py is not installed: make gpu-test installs it"
    return ""


collect_ignore_glob = ["test_*.py"] if missing() else []
_OUTCOMES = pytest.StashKey[list[tuple[str, Outcome]]]()
_REASONS = pytest.StashKey[dict[str, str]]()
_MEASURED = pytest.StashKey[list[str]]()
"""What tests have measured (`record_property`), to be read below the table."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """Tell each report which findings its test decides; with several workers it travels to the process with the table."""
    report = yield
    report.findings = [name for mark in item.iter_markers("finding") for name in mark.args]
    report.name = item.name
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Table(config), "findings")


class Table:
    """Collects the outcomes of all tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._stash = config.stash
        self._stash[_MEASURED] = []
        self._stash[_OUTCOMES] = [("G2", "failed" if has_gpu() and missing() else "skipped")]
        self._stash[_REASONS] = dict(WITHOUT_A_GPU)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "findings") or (report.when != "call" and report.outcome == "passed"):
            return  # of another folder, or of a fixture
        for name in report.findings:
            self._stash[_OUTCOMES].append((name, report.outcome))
            if report.skipped and isinstance(report.longrepr, tuple | list):
                self._stash[_REASONS][name] = report.longrepr[2].removeprefix("Skipped: ")
        if not report.skipped:
            self._stash[_OUTCOMES].append(("G2", "passed"))  # something has run, whatever came of it
        self._stash[_MEASURED] += [f"{report.name}: {what}: {value}" for what, value in report.user_properties]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    device = f"on {torch.cuda.get_device_name()}" if not missing() else f"nothing ran: {missing()}"
    terminalreporter.section(f"findings, {device}")
    for line in table(verdicts(config.stash[_OUTCOMES]), config.stash[_REASONS]):
        terminalreporter.write_line(line)
    for line in config.stash[_MEASURED]:
        terminalreporter.write_line(line)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput"):
        return  # it has seen a part of the tests
    found = verdicts(session.config.stash[_OUTCOMES])
    if has_failed(found, has_gpu=has_gpu()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
