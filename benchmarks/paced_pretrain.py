"""`scripts/pretrain_gpt.py` with every forward stretched to a fixed wall time, so that the number of cores decides nothing.

The time comes from the flag `--paced-forward-s SECONDS`, which is taken away before Megatron sees the arguments.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import time
from typing import Any


def main() -> None:
    """Train, paced."""
    at = sys.argv.index("--paced-forward-s")
    pace_s = float(sys.argv[at + 1])
    del sys.argv[at : at + 2]
    script = pathlib.Path(__file__).resolve().parents[1] / "scripts" / "pretrain_gpt.py"
    spec = importlib.util.spec_from_file_location("pretrain_gpt", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    forward_step = module.forward_step

    def paced(*args: Any, **kwargs: Any) -> Any:
        until = time.monotonic() + pace_s
        result = forward_step(*args, **kwargs)
        time.sleep(max(0.0, until - time.monotonic()))
        return result

    module.forward_step = paced
    module.main()


if __name__ == "__main__":
    main()
