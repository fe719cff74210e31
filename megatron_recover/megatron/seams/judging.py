"""Judges the Megatron that is imported: its release, and whether its functions were read."""

from __future__ import annotations

import os
import textwrap

import megatron.core

from megatron_recover.megatron.launch.arguments import flag_of
from megatron_recover.megatron.seams import bodies, seams


def judge_megatron(*, accepts_unknown: bool) -> list[str]:
    """Return lines about the Megatron that is imported, before a script has changed any of it.

    Raises ValueError with all functions that have another body than those that were read, and the
    difference, unless `accepts_unknown`; then the lines name them. Raises `UnsupportedMegatron` for
    a release that was never read.
    """
    all_seams = seams.load()
    if found := seams.unsupported_version(all_seams):
        raise seams.UnsupportedMegatron(seams.refusal(all_seams, found))
    folder = os.path.dirname(os.path.dirname(str(megatron.core.__file__)))
    release = str(megatron.core.__version__).partition("+")[0]  # behind it upstream writes a commit of the working directory
    lines = [f"Megatron-Core {release} of {folder}"]
    unknown = bodies.unknown(bodies.load(seams.folder()), bodies.relied_on(all_seams, seams.load_anchors()))
    if unknown and not accepts_unknown:
        raise ValueError(
            f"{lines[0]} has functions that nobody has compared with those of the release that this version was made for:\n"
            + textwrap.indent("\n".join(unknown), "  ")
            + f"\ncompare them with megatron-core {all_seams[0].versions[-1]}; if they do the same, add "
            f"{flag_of('accept_unknown_megatron')}"
        )
    return lines + [line for body in unknown for line in f"accepted although nobody has read it: {body}".splitlines()]
