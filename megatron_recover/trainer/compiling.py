"""Show on the progress page that torch compiles: compiling may take minutes and is no hang."""

from __future__ import annotations

import sys
from typing import Any

from megatron_recover.core.progress import Phase
from megatron_recover.progress_page import ProgressPage


def show_compilations(page: ProgressPage) -> None:
    """Enter `Phase.COMPILING` on the page whenever the compiler runs, then the phase of before.

    Call it in the training thread after the model was built, since `torch.compile` imports the
    compiler. Do nothing if no code has imported the compiler: the import would take seconds.
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
