"""What a process of `tests.forks` has imported when it starts: what ranks, our programs and tests in processes import."""

from __future__ import annotations

import gc
import os

from megatron_recover.cli.describing import PRELOAD
from megatron_recover.cluster.rank_process import preload
from megatron_recover.config import importing_without_driver
from megatron_recover.host.gpus import has_gpu

FUNCTIONS = () if has_gpu() else tuple(name for name in PRELOAD if ":" in name)
MODULES = (
    *(name for name in PRELOAD if ":" not in name),
    "matplotlib.pyplot",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron_recover.cli.check",
    "megatron_recover.cli.finish",
    "megatron_recover.cluster.forkserver",
    "megatron_recover.cluster.monitor",
    "megatron_recover.cluster.recorder",
    "megatron_recover.data_plane.direct",
    "megatron_recover.data_plane.gloo",
    "megatron_recover.observe.report.plot",
    "pytest",
    "tests.cluster.jobs",
    "tests.data_plane.ranks",
    "tests.megatron.processes",
)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as a run sets it (`cluster/environment.py`); it is read once
with importing_without_driver(hide_devices=True):  # else no fork could use a GPU
    for _name in (MODULES[0], *FUNCTIONS, *MODULES[1:]):
        preload(_name)
gc.collect()
gc.freeze()  # or the first collection of each process would copy all pages that it shares with the others
