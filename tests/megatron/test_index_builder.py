"""The index builder of data sets is compiled where there is something to compile, by one process at a time."""

from __future__ import annotations

import fcntl
import importlib.util
import threading
from pathlib import Path
from types import ModuleType

from megatron.core.datasets import utils

from megatron_recover.megatron.data.index_builder import IndexBuilder


def megatron_in(folder: Path) -> ModuleType:
    """Return a module with a `compile_helpers` that notes its calls."""
    (folder / "utils.py").write_text("calls = []\ndef compile_helpers():\n    calls.append(1)\n")
    spec = importlib.util.spec_from_file_location("utils", folder / "utils.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_wheel_has_nothing_to_compile(tmp_path: Path) -> None:
    """It has the builder and no Makefile; upstream's `make` failed there, and every run on a GPU with it."""
    module = megatron_in(tmp_path)
    IndexBuilder(module.compile_helpers, 30.0).compile()
    assert module.calls == []
    assert not Path(utils.__file__).with_name("Makefile").exists()


def test_one_process_at_a_time_compiles(tmp_path: Path) -> None:
    module, makefile = megatron_in(tmp_path), tmp_path / "Makefile"
    makefile.write_text("")
    with open(makefile) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=IndexBuilder(module.compile_helpers, 30.0).compile)
        waiting.start()
        waiting.join(0.3)
        assert module.calls == []
        fcntl.flock(other, fcntl.LOCK_UN)
        waiting.join(30)
    assert module.calls == [1]


def test_a_compiler_that_stands_still_is_waited_for_only_so_long(tmp_path: Path) -> None:
    """INV-8: a stopped process holds the lock for as long as it is stopped."""
    module, makefile = megatron_in(tmp_path), tmp_path / "Makefile"
    makefile.write_text("")
    with open(makefile) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        IndexBuilder(module.compile_helpers, 0.0).compile()
    assert module.calls == [1]
