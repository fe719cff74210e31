"""Judges what a run resumes from: its samples before training, and later what was loaded.

A resumed run has to read the samples of its checkpoint's run. A checkpoint of this project contains
a description of these samples (`alike.samples`, stored by `SaveFolder.describe`). Megatron chooses
and loads the checkpoint.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Literal

from megatron_recover.core.alike import SHOWN, differences
from megatron_recover.megatron.checkpoint.save_folder import named_in, samples_of
from megatron_recover.megatron.data import alike


def judge(args: Namespace, resume_data: Literal["same", "other"]) -> str:
    """Compare the samples of the checkpoint to load with the samples that this run reads.

    Returns a note for the user if they differ or the checkpoint has no description; otherwise, with
    `--finetune`, and if no checkpoint is to be loaded, an empty text. Raises ValueError with both
    values if they differ and `resume_data` is "same", and OSError if the tracker, the description
    or the data cannot be read.
    """
    if args.load is None or args.finetune:  # fine-tuning counts iterations anew, on its own data
        return ""
    iteration = args.ckpt_step or named_in(Path(args.load))  # as Megatron chooses it
    if iteration < 0:
        return ""
    checkpoint = f"loading checkpoint of iteration {iteration} from {args.load}"
    known = samples_of(Path(args.load), iteration)
    if known is None:
        return f"{checkpoint}, which does not say on which data it was trained; the data of this run may differ"
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


def begun_with(args: Namespace) -> str:
    """Return a description of the state that training began with."""
    if args.load is None or args.finetune or not args.iteration:
        return "the one that training begins with"
    return f"what was loaded from iteration {args.iteration} of --load {args.load}"


def is_loaded(args: Namespace, iteration: int) -> bool:
    """Return whether `iteration` was loaded from `--save`, whose tracker named it.

    Nothing was trained since, and saving again could only damage that checkpoint. Flags alone
    decide: a shared file system may show different trackers to the replicas, and then they would
    disagree on whether a save is due.
    """
    from_here = args.load is not None and os.path.realpath(args.load) == os.path.realpath(args.save)
    return args.iteration == iteration and from_here and not args.ckpt_step
