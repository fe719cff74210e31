"""Adds bodies of the imported Megatron to `patches/bodies.toml`: `python -m scripts.study.bodies`.

Run it once somebody has compared these functions with those of the release before
(docs/how_to/move_to_another_megatron.md). With PYTHONPATH=CHECKOUT it reads a checkout.
"""

from __future__ import annotations

from pathlib import Path

import megatron.core

from megatron_recover.megatron.seams import bodies, seams

PATCHES = Path(__file__).resolve().parents[2] / "patches"
HEAD = """# Digests of the bodies of Megatron's functions that are replaced or called, of all releases that were read.
# Made by scripts/study/bodies.py; megatron_recover/megatron/seams/bodies.py says what a digest covers.

"""


def main() -> None:
    """Write the file, with what it has already."""
    known = {place: [*digests] for place, digests in bodies.load(PATCHES).items()} if (PATCHES / bodies.FILE).exists() else {}
    for place, function in bodies.relied_on(seams.load(), seams.load_anchors()).items():
        if (body := bodies.digest(function)) not in known.setdefault(place, []):
            known[place].append(body)
    lines = [f'"{place}" = [{", ".join(f'"{body}"' for body in digests)}]' for place, digests in sorted(known.items())]
    (PATCHES / bodies.FILE).write_text(HEAD + "\n".join(lines) + "\n")
    print(f"{len(lines)} functions; read was {megatron.core.__file__}")


if __name__ == "__main__":
    main()
