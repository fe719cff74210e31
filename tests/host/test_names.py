"""Two replicas of a node have files of their own, whatever names a rank inside its replica."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_recover.config import separate_flight_records

FILE, OLDER_FILE, PIPE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (FILE, OLDER_FILE, PIPE):
        monkeypatch.delenv(name, raising=False)
    yield
    os.unsetenv(FILE)


def native(name: str) -> str | None:
    """The variable as torch's native code sees it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(name.encode())
    return None if value is None else value.decode()


def test_flight_records_of_two_replicas_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE, f"{tmp_path}/record_")
    monkeypatch.setenv(PIPE, f"{tmp_path}/pipe_")
    assert separate_flight_records(str(tmp_path), 1, "run") == f"{tmp_path}/replica-1-rank-"
    assert os.environ[FILE] == f"{tmp_path}/record_replica-1-rank-"
    assert os.environ[PIPE] == f"{tmp_path}/pipe_replica-1-rank-"
    assert OLDER_FILE not in os.environ


@pytest.mark.parametrize("pipe", [None, "pipe_"])
def test_flight_records_come_into_the_run_directory_unless_a_place_is_given(
    pipe: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pipe is not None:  # it requests records and names no place for them
        monkeypatch.setenv(PIPE, pipe)
    assert separate_flight_records(None, 0, str(tmp_path)) is None
    assert native(FILE) == f"{tmp_path}/flight-record-replica-0-rank-"
    assert FILE not in os.environ  # where Megatron would see a request


@pytest.mark.parametrize(("path", "variable"), [("mine_", None), (None, OLDER_FILE)])
def test_a_place_that_is_given_for_flight_records_is_kept(
    path: str | None, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, "mine_")
    assert separate_flight_records(path, 2, "run") == (None if path is None else "mine_replica-2-rank-")
    assert native(FILE) is None
    assert variable is None or native(variable) == "mine_replica-2-rank-"


NOT_TRAINING = ("core/inference/", "core/export/", "core/resharding/", "core/models/audio/")
WRITES = re.compile(
    r"open\([^)]*[\"'](?:w|a|wb|ab|a\+|w\+)[\"']|(?:torch|np|numpy)\.save\(|mkdir\(|makedirs\(|export_chrome_trace\(|\.bind\(|"
    r"_dump_snapshot\(|wget\.download\(|build_directory=|load_inline\(|run_server"
)
APART = {
    "core/config_logger.py": "refused",
    "core/datasets/blended_dataset.py": "the index cache: `building_cache`",
    "core/datasets/gpt_dataset.py": "the index cache: `building_cache`",
    "core/datasets/indexed_dataset.py": "data that is made, not trained on",
    "core/datasets/masked_dataset.py": "the index cache: `building_cache`",
    "core/datasets/object_storage_utils.py": "a copy of the index of remote data, which its client writes by a rename",
    "core/dist_checkpointing": "saves: one writer",
    "core/extensions/transformer_engine.py": "into memory",
    "core/nccl_allocator.py": "a library, compiled under a lock",
    "core/optimizer/distrib_optimizer.py": "saves: one writer",
    "core/optimizer/layer_wise_optimizer.py": "saves: one writer",
    "core/optimizer/optimizer.py": "saves: one writer",
    "core/rerun_state_machine.py": "refused",
    "core/ssm/triton_cache_manager.py": "a cache, written by renames",
    "core/tensor_parallel/random.py": "a library, compiled under a lock",
    "core/tokenizers/megatron_tokenizer.py": "no part of training",
    "core/tokenizers/text/libraries/megatron_hf_tokenizer.py": "a download, made by the dry run before ranks start",
    "core/transformer/moe/router_trace.py": "refused",
    "core/utils.py": "refused",
    "training/activation_logging.py": "refused",
    "training/checkpointing.py": "saves: one writer",
    "training/config/container.py": "not called",
    "training/distillation/logits_saver.py": "refused",
    "training/distillation/utils_logits.py": "refused",
    "training/ft_integration.py": "refused",
    "training/global_vars.py": "refused",
    "training/training.py": "refused",
    "training/utils/log_utils.py": "refused",
    "training/utils/utils.py": "refused",
}
"""What in Megatron writes files or opens ports, and why two replicas of a node do not meet there."""


def test_nothing_else_in_megatron_writes_files_or_opens_ports() -> None:
    """A new Megatron may name something by a rank of its world, which every replica of a node would then share."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    found = set()
    for part in ("core", "training"):
        for source in (root / part).rglob("*.py"):
            name = source.relative_to(root).as_posix()
            if not name.startswith(NOT_TRAINING) and WRITES.search(source.read_text()):
                found.add("core/dist_checkpointing" if name.startswith("core/dist_checkpointing/") else name)
    assert found == {*APART}
