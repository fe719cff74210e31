"""`scripts/pretrain_gpt.py`, whose ranks have a substitute of DeepEP: `tests/megatron/token_exchange.py`."""

from __future__ import annotations

import pathlib
import runpy

from tests.megatron import token_exchange

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"

if __name__ == "__main__":
    token_exchange.install()
    runpy.run_path(str(SCRIPT), run_name="__main__")
