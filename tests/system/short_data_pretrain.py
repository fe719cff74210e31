"""`scripts/pretrain_gpt.py` with data sets of 16 samples, so that a cyclic loader soon begins another epoch."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
NUM_SAMPLES = 16


def main() -> None:
    """Train; upstream makes a data set as long as the training, so it is cut once it is made."""
    build = BlendedMegatronDatasetBuilder.build

    def build_and_cut(self: Any) -> Any:
        datasets = build(self)
        GPTDataset.__len__ = lambda self: NUM_SAMPLES  # type: ignore[method-assign]
        return datasets

    BlendedMegatronDatasetBuilder.build = build_and_cut  # type: ignore[method-assign]
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
