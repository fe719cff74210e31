"""`scripts/pretrain_gpt.py`, whose provider declares with `DECLARED` set that its data sets are read by index."""

from __future__ import annotations

import os
import pathlib
import runpy

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"

if __name__ == "__main__":
    script = runpy.run_path(str(SCRIPT))
    script["datasets_provider"].samples_by_id = "DECLARED" in os.environ
    script["main"]()
