"""`scripts/pretrain_gpt.py` whose writer begins to write when all others are in their next step (`late_saves.py`)."""

from __future__ import annotations

import pathlib
import runpy

from megatron_recover.config import rank_context
from tests.system.late_saves import save_late

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def main() -> None:
    """Train; save late."""
    context = rank_context()
    if context is not None and not context.dry_run:
        save_late(pathlib.Path(context.run_dir))
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
