"""Finds the command by which a shell script launches training, as bash expands it.

The script runs in an empty folder, with stubs in place of all commands but a few that only read.
The stub of a launcher writes its words down. So nothing trains, and nothing is downloaded or
written, unless the script redirects output to a file outside of its folder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

LAUNCHERS = ("torchrun", "python", "python3", "uv")
READING = ("basename", "cat", "date", "dirname", "seq", "tr")
LENGTHS = frozenset({"--train-iters", "--train-samples"})
"""Flags of which a script that trains has one."""
ARGUMENTS = (("1",) * 9, (), ("0",) * 9, ("--checkpoint-path", "."))
"""What a script is called with, until it launches: paths and switches, nothing, switches that are
off, and the folder that one example insists on."""
_STUB = '#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@" >"$SEEN"\n'
_NOT_FOUND = "BASH_FUNC_command_not_found_handle%%"
"""The function that bash calls for all other commands."""
_WHICH_FINDS_NOTHING = '() { [ "$1" != which ]; }'
"""Its body: commands do nothing. Examples that look for srun would launch by it."""
_DEADLINE_S = 20.0


def below(folder: Path, links: Sequence[Path] = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each script below `folder` that launches training, and its launch line.

    The line is what comes behind torchrun's name. `links` are files that a script may look for in
    its working directory.
    """
    for script in sorted(folder.rglob("*.sh")):
        text = script.read_text()
        if "torchrun" not in text and "torch.distributed" not in text:
            continue
        if not any(length in text for length in LENGTHS):
            continue
        lines = (launch_line(script, arguments, links) for arguments in ARGUMENTS)
        if words := next((line for line in lines if LENGTHS & {*line}), None):
            yield str(script.relative_to(folder)), words


def launch_line(script: Path, arguments: Sequence[str], links: Sequence[Path] = ()) -> list[str]:
    """Return what comes behind torchrun's name where `script` calls it last; empty: it does not.

    Variables that the script insists on are set. Raises TimeoutExpired for a script that hangs.
    """
    with tempfile.TemporaryDirectory() as name:
        commands, seen, work = (Path(name, each) for each in ("commands", "seen", "work"))
        commands.mkdir()
        work.mkdir()
        for command in LAUNCHERS:
            (commands / command).write_text(_STUB)
            (commands / command).chmod(0o755)
        for command in READING:
            if path := shutil.which(command):
                (commands / command).symlink_to(path)
        for link in links:
            (work / link.name).symlink_to(link.resolve())
        needed = dict.fromkeys(re.findall(r"-z \"?\$\{?(\w+)", script.read_text()), "1")
        environment = {**needed, "PATH": str(commands), "HOME": name, "SEEN": str(seen), _NOT_FOUND: _WHICH_FINDS_NOTHING}
        subprocess.run(
            [shutil.which("bash") or "bash", str(script.resolve()), *arguments], cwd=work, env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_DEADLINE_S,
        )  # fmt: skip
        words = seen.read_text().splitlines() if seen.exists() else []
    for number, word in enumerate(words):
        if word in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
            return words[number + 1 :]
    return []
