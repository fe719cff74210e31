"""`scripts/pretrain_gpt.py` on a disk that is full: while a checkpoint is written, no file may grow beyond `NUM_BYTES`.

So it is for all saves, or with the environment variable `ROOM_FROM` for those of earlier iterations.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import resource
from typing import Any

NUM_BYTES = 100_000


def main() -> None:
    """Train; run out of room."""
    from megatron.training import training

    script = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
    spec = importlib.util.spec_from_file_location("pretrain_gpt", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    upstream, room_from = training.save_checkpoint, int(os.environ.get("ROOM_FROM", "1000"))

    @functools.wraps(upstream)
    def save_with_little_room(iteration: int, *args: Any, **kwargs: Any) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if iteration < room_from:
            resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_BYTES, hard))
        try:
            upstream(iteration, *args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    training.save_checkpoint = save_with_little_room
    module.main()


if __name__ == "__main__":
    main()
