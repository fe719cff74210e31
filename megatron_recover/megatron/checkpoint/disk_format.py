"""Refuses a checkpoint to load whose format does not fit the arguments.

Megatron would notice after all ranks have built their model, or not at all, and names no flag.
Imports neither torch nor Megatron, so that the launcher can look before any rank starts.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from megatron_recover.megatron.checkpoint.save_folder import TRACKER


def refusals(args: Namespace) -> list[str]:
    """Return one line if Megatron cannot load the checkpoint that it would load; else none.

    `args` may be those of the command line alone or all of Megatron's. Without a checkpoint, and
    where the folder cannot be read or its name has `://`, nothing is refused.
    """
    for flag, folder in (("--load", args.load), ("--pretrained-checkpoint", args.pretrained_checkpoint)):
        checkpoint = None if folder is None or "://" in folder else _to_load(Path(folder), args.ckpt_step)
        if checkpoint is not None:  # Megatron takes the first that there is
            found = format_of(checkpoint)
            instead = "" if found is None else _unlike(found, args)
            return [f"{flag} {folder}: {checkpoint.name} has the format {found}, {instead}"] if instead else []
    return []


def format_of(checkpoint: Path) -> str | None:
    """Return the format of a checkpoint, as Megatron does (`_get_checkpoint_format`), or None."""
    try:
        names = os.listdir(checkpoint)
    except OSError:
        return None
    if "metadata.json" in names:
        return "torch_dist"
    if any(name.startswith("mp_rank_0") for name in names):
        return "torch"
    return "torch_dcp" if ".metadata" in names else None


def _to_load(folder: Path, step: int | None) -> Path | None:
    """Return the checkpoint that Megatron chooses in `folder`; None if there is none."""
    if step:
        return folder / f"iter_{step:07d}"
    try:
        named = (folder / TRACKER).read_text().strip()
    except OSError:
        return None
    if named.isdigit():
        return folder / f"iter_{int(named):07d}"
    return folder / named if named == "release" else None


def _unlike(found: str, args: Namespace) -> str:
    """Return why Megatron cannot load the format `found`, and the remedy; "" if it can."""
    if args.use_torch_fsdp2:
        if found == "torch_dcp":
            return ""
        return (
            "and with --use-torch-fsdp2 Megatron loads torch_dcp alone; leave --use-torch-fsdp2 out, or give a folder that was "
            "saved with it"
        )
    if found == "torch_dcp":
        return (
            "which Megatron loads with --use-torch-fsdp2 alone; add --use-torch-fsdp2 and --ckpt-format torch_dcp, or give a "
            "folder that was saved without them"
        )
    if found == "torch_dist" and args.ckpt_format == "torch" and not args.auto_detect_ckpt_format:
        return "and --ckpt-format is torch; use --ckpt-format torch_dist"
    return ""
