"""Whether a run that resumes reads the samples that its checkpoint was trained on, before any rank is started.

Each checkpoint says what decided its samples (`alike.samples`, kept by `save_folder.SaveFolder.describe`). Nothing here loads a
checkpoint or decides which one is loaded: that is Megatron's.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Literal

from megatron_recover.core.alike import SHOWN, differences
from megatron_recover.megatron.checkpoint.save_folder import named_in, samples_of
from megatron_recover.megatron.data import alike


def judge(args: Namespace, resume_data: Literal["same", "other"]) -> str:
    """Compare the samples of the checkpoint that `args` load with those that `args` read; return a note for people, or nothing.

    Raises ValueError with both values where they differ and `resume_data` is "same".
    """
    if args.load is None or args.finetune:  # whose iterations are counted anew, on data of its own
        return ""
    iteration = args.ckpt_step or named_in(Path(args.load))  # as Megatron has it
    if iteration < 0:
        return ""
    checkpoint = f"loading checkpoint of iteration {iteration} from {args.load}"
    known = samples_of(Path(args.load), iteration)
    if known is None:
        return f"{checkpoint}, which does not say on which data it was trained: whether that is the same is not known"
    found = differences(tuple(known.items()), tuple(alike.samples(args).items()))
    if not found:
        return ""
    shown = [f"{name} was {before} and is {now}" for name, before, now in found[:SHOWN]]
    shown += [f"{len(found) - SHOWN} more differ"] if len(found) > SHOWN else []
    if resume_data == "same":
        raise ValueError(
            f"--load {args.load}: the checkpoint of iteration {iteration} was trained on other data than this run would read: "
            f"{'; '.join(shown)}; use the same data, --split and --seed, or, where they were changed on purpose, "
            "--recover-resume-data other"
        )
    return f"{checkpoint}, with other data from here on: {'; '.join(shown)}"
