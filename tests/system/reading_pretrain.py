"""`scripts/pretrain_gpt.py` that says once in each rank when a thread reads samples ahead."""

from __future__ import annotations

import pathlib
import runpy

from megatron_recover.progress_page import ProgressPage

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def main() -> None:
    """Train."""
    show = ProgressPage.show_reading

    def shown_and_said(page: ProgressPage, microbatch: int | None) -> None:
        ProgressPage.show_reading = show  # type: ignore[method-assign]
        print(f"reads ahead, at first microbatch {microbatch}", flush=True)
        show(page, microbatch)

    ProgressPage.show_reading = shown_and_said  # type: ignore[method-assign]
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
