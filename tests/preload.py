"""What a process of `tests.forks` has imported when it starts: what ranks, our programs and tests in processes import."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from megatron_recover.cli.describing import PRELOAD
from megatron_recover.cluster.rank_process import preload
from megatron_recover.config import importing_without_driver
from megatron_recover.host.gpus import has_gpu
from megatron_recover.observe.report import plot

FUNCTIONS = () if has_gpu() else tuple(name for name in PRELOAD if ":" in name)
MODULES = (
    *(name for name in PRELOAD if ":" not in name),
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt",
    "megatron.core.models.mimo",
    "megatron.core.optimizer",
    "megatron.core.tokenizers.text",
    "megatron.training.datasets.fim_dataset",
    "megatron_recover.cli.check",
    "megatron_recover.cli.finish",
    "megatron_recover.cli.run",
    "megatron_recover.cluster.coordinator",
    "megatron_recover.cluster.forkserver",
    "megatron_recover.cluster.monitor",
    "megatron_recover.cluster.recorder",
    "megatron_recover.control_plane.rank_driver",
    "megatron_recover.data_plane.direct",
    "megatron_recover.data_plane.gloo",
    "megatron_recover.megatron.checkpoint.boundary",
    "megatron_recover.megatron.checkpoint.resuming",
    "megatron_recover.megatron.data.alike",
    "megatron_recover.megatron.data.fill_in_middle",
    "megatron_recover.megatron.data.index_builder",
    "pytest",
    "tests.cluster.jobs",
    "tests.data_plane.ranks",
    "tests.megatron.processes",
)


def keep_help_texts() -> None:
    """Read the help texts of Megatron's arguments once.

    Megatron parses its own source for them whenever it makes a parser. Every rank does that, most of them twice: a tenth of the
    CPU time of a small job.
    """
    from argparse import ArgumentParser

    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    read: Any = ArgumentGroupFactory._get_field_docstrings
    kept: dict[type, dict[str, str]] = {}

    def texts_of(factory: ArgumentGroupFactory, of: type) -> dict[str, str]:
        if of not in kept:
            kept[of] = read(factory, of)
        return dict(kept[of])

    ArgumentGroupFactory._get_field_docstrings = texts_of
    add_megatron_arguments(ArgumentParser(allow_abbrev=False))


def leave_plots_blank() -> None:
    """Draw nothing at the end of a job: that takes 0.3 CPU-seconds, and no test looks at the plot of a job of forks.

    Programs that are no forks draw theirs (`tests/cli/test_demo.py`, `tests/cli/test_cli.py`).
    """

    def draw(folder: Path, *_: object) -> Path:
        place = folder / plot.PLOT_FILE
        place.touch()
        return place

    plot.draw = draw


os.environ.setdefault("OMP_NUM_THREADS", "1")  # as a run sets it (`cluster/environment.py`); it is read once
with importing_without_driver(hide_devices=True):  # else no fork could use a GPU
    for _name in (MODULES[0], *FUNCTIONS, *MODULES[1:]):
        preload(_name)
    keep_help_texts()
leave_plots_blank()
gc.collect()
gc.freeze()  # or the first collection of each process would copy all pages that it shares with the others
