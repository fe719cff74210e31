"""`python -m tests.seen` prints what a program finds that is started, and what one finds that it starts itself (`again`)."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys


def seen() -> dict[str, object]:
    """Everything that a fork may have from its parent and a new program has not."""
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    main = sys.modules["__main__"]
    return {
        "arguments": sys.argv,
        "descriptors": [each for each in descriptors if os.path.exists(f"/proc/self/fd/{each}")],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "handlers": {int(number): str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()},
        "ignored and blocked": [line for line in open("/proc/self/status") if line.startswith(("SigIgn", "SigBlk", "SigCgt"))],
        "is child of multiprocessing": multiprocessing.parent_process() is not None,
        "leads a session": os.getsid(0) == os.getpid(),
        "main": (main.__name__, getattr(main, "__file__", None), main.__spec__ and main.__spec__.name),
        "stdin": os.readlink("/proc/self/fd/0"),
        "streams": [(each.encoding, each.errors, each.line_buffering) for each in (sys.stdin, sys.stdout, sys.stderr)],
        "wakes": signal.set_wakeup_fd(-1),
    }


def main() -> int:
    """Print it, and end with an exit code of our own."""
    found = [seen()]
    if sys.argv[1:] == ["again"]:
        signal.signal(signal.SIGTERM, lambda *_: None)
        ours, theirs = socket.socketpair()
        os.set_inheritable(ours.fileno(), True)
        other = subprocess.Popen(
            [sys.executable, "-m", "tests.seen"], env={**os.environ, "AGAIN": "1"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, pass_fds=(theirs.fileno(),), start_new_session=True,
        )  # fmt: skip
        found += json.loads(other.communicate()[0])
        assert other.returncode == 3
    print(json.dumps(found))
    return 3


if __name__ == "__main__":
    sys.exit(main())
