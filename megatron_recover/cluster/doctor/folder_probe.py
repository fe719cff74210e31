"""A process that tries what a run does in folders, and prints what it finds as lines of JSON.

Each folder has a process of its own, a fork of this one: a call to a disk that does not answer
cannot be interrupted. What it makes has a random name. The first argument is a list of requests, in
JSON:

- `["try", PATH, DEED...]`: what there is at a path, and which deeds fail there. Leaves nothing.
- `["mark", PATH, NAME]`: leave a file of that name there, for other nodes to look for.
- `["look", FILE]` and `["remove", FILE]`: look for such a file; remove it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from megatron_recover.host import lock_file, whole_file

PREFIX = ".megatron-recover-doctor-"
"""Beginning of the name of everything that is made in a user's folder."""
Deed = Literal["write", "rename", "lock"]
"""An act of a run in a folder, beside reading it."""


def nearest(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists. Raises OSError."""
    place = Path(os.path.abspath(path))
    while not os.path.lexists(place):
        place = place.parent
    place.stat()  # follows a link, which may lead nowhere
    return place


def tried(path: Path, deeds: Sequence[Deed]) -> dict[str, object]:
    """Return what there is at `path`, and which of the `deeds` failed there.

    - `place`: the folder, or the nearest one above it; `is_folder`: whether it is one.
    - `free`, `total`: bytes of its file system; `files`: how many more files it can have, -1 if it
      counts none.
    - `failed`: [deed, reason] of the first deed that failed; null if none did. A deed is tried in a
      new folder inside the place.
    - `is_full`: whether it failed for want of room, which is then no failure.
    - `exchanges`: whether two names can change places in one step.

    Raises OSError if the place cannot be looked at.
    """
    place = nearest(path)
    usage = os.statvfs(place)
    found: dict[str, object] = {
        "place": str(place), "is_folder": place.is_dir(), "free": usage.f_bavail * usage.f_frsize,
        "total": usage.f_blocks * usage.f_frsize, "files": usage.f_favail if usage.f_files else -1,
        "failed": None, "is_full": False, "exchanges": True,
    }  # fmt: skip
    inside = place / f"{PREFIX}{os.urandom(8).hex()}"
    deed: Deed = "write"
    try:
        if not place.is_dir() or not deeds:
            return found
        inside.mkdir()
        (inside / "one").write_bytes(b"1")
        (inside / "other").write_bytes(b"2")
        whole_file.sync(inside / "one")
        if "rename" in deeds:
            deed = "rename"
            os.rename(inside / "one", inside / "renamed")
            found["exchanges"] = whole_file.exchange(inside / "renamed", inside / "other")
        if "lock" in deeds:
            deed = "lock"
            with lock_file.opened(inside / "lock") as file:
                lock_file.acquired(file, 0.0)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            found["is_full"] = True
        else:
            found["failed"] = [deed, error.strerror or str(error)]
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(inside)
    return found


def marked(path: Path, name: str) -> Path:
    """Leave a file in the folder at `path`, or in the nearest one above it; return the file.

    Raises OSError.
    """
    file = nearest(path) / f"{PREFIX}{name}"
    file.touch(exist_ok=False)
    whole_file.sync(file)
    return file


def answer_to(verb: str, path: str, *rest: str) -> dict[str, object]:
    """Do what a request asks for; return the answer, which has `error` if that cannot be done."""
    try:
        match verb:
            case "try":
                return tried(Path(path), [deed for deed in get_args(Deed) if deed in rest])
            case "mark":
                return {"file": str(marked(Path(path), *rest))}
            case "look":
                return {"is_there": os.path.lexists(path)}
            case _:
                Path(path).unlink(missing_ok=True)
                return {}
    except OSError as error:
        return {"error": error.strerror or str(error)}


def main(requests: Sequence[Sequence[str]]) -> None:
    """Print the number and the answer of each request as soon as it is there."""
    for number, request in enumerate(requests):
        if os.fork() == 0:
            line = json.dumps({"number": number, "answer": answer_to(*request)})
            os.write(1, line.encode() + b"\n")  # in one call: the others write to the same pipe
            os._exit(0)
    for _ in requests:
        os.wait()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
