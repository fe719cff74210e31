"""Two replicas of a node have files of their own, whatever names a rank inside its replica."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_recover.config import separate_flight_records


def test_flight_records_of_two_replicas_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/record_")
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", raising=False)
    assert separate_flight_records(str(tmp_path), 1) == f"{tmp_path}/replica-1-rank-"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/record_replica-1-rank-"
    assert "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ
    assert separate_flight_records(None, 0) is None
