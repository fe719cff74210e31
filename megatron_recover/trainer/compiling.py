"""Shows on the progress page when torch compiles inside a forward or backward: it may take minutes, and is no hang."""

from __future__ import annotations

import sys
from typing import Any

from megatron_recover.core.detector import Phase
from megatron_recover.progress_page import ProgressPage


def show_compilations(page: ProgressPage) -> None:
    """Enter `Phase.COMPILING` for as long as the compiler runs. Does nothing where no code has imported the compiler.

    Call it in the training thread, after the model was built: `torch.compile` imports the compiler, which takes seconds.
    """
    callback = sys.modules.get("torch._dynamo.callback")
    if callback is None:
        return
    before: list[Phase] = []

    def begins(_: Any) -> None:
        before.append(page.phase)
        page.enter(Phase.COMPILING)

    def ends(_: Any) -> None:
        if before:
            page.enter(before.pop())

    callback.on_compile_start(begins)
    callback.on_compile_end(ends)
