"""Adds bodies of the imported Megatron to `patches/bodies.toml`: `python -m scripts.study.bodies`.

Run it once somebody has compared these functions with those of the release before
(docs/how_to/move_to_another_megatron.md). With PYTHONPATH=CHECKOUT it reads a checkout.
"""

from __future__ import annotations

from pathlib import Path

import megatron.core

from megatron_recover.megatron.seams import bodies, seams

PATCHES = Path(__file__).resolve().parents[2] / "patches"
HEAD = """# Digests of the bodies of Megatron's functions that are replaced or called, of all releases that were read,
# each with a mark of four characters for each of the body's statements.
# Made by scripts/study/bodies.py; megatron_recover/megatron/seams/bodies.py says what a digest covers.

"""


def main() -> None:
    """Write the file, with what it has already."""
    known = {place: {**read} for place, read in bodies.load(PATCHES).items()} if (PATCHES / bodies.FILE).exists() else {}
    for place, function in bodies.relied_on(seams.load(), seams.load_anchors()).items():
        body = bodies.read(function)
        known.setdefault(place, {})[body.digest] = "".join(body.marks)
    lines = [
        f'"{place}" = {{ {", ".join(f'{digest} = "{marks}"' for digest, marks in read.items())} }}'
        for place, read in sorted(known.items())
    ]
    (PATCHES / bodies.FILE).write_text(HEAD + "\n".join(lines) + "\n")
    print(f"{len(lines)} functions; read was {megatron.core.__file__}")


if __name__ == "__main__":
    main()
