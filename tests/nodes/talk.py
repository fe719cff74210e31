"""Two programs that talk over TCP, and print what they see of each other.

``python -m tests.nodes.talk serve PORT`` sends back what it gets; ``call ADDRESS PORT`` sends a line, waits for it, and so on.
They print `got`, `echo after X ms`, `silence` (for half a second), `end of file`, or the name of an error.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

SILENCE_S = 0.5
PAUSE_S = 0.02


def _say(words: str) -> None:
    os.write(1, f"{words}\n".encode())  # whole lines, from any thread


def _answer(connection: socket.socket) -> None:
    try:
        while line := connection.recv(64):
            _say("got")
            connection.sendall(line)
        _say("end of file")
    except OSError as error:
        _say(type(error).__name__)


def serve(port: int) -> None:
    """Answer all calls."""
    with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        _say("listening")
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_answer, args=[connection]).start()


def call(address: str, port: int) -> None:
    """Call once, and go on until the other ends or an error."""
    try:
        with socket.create_connection((address, port), timeout=SILENCE_S) as connection:
            _say("connected")
            is_answered, since = True, 0.0
            while True:
                if is_answered:
                    since = time.monotonic()
                    connection.sendall(b"line\n")
                try:
                    if not connection.recv(64):
                        _say("end of file")
                        return
                    is_answered = True
                    _say(f"echo after {1000 * (time.monotonic() - since):.0f} ms")
                except TimeoutError:
                    is_answered = False
                    _say("silence")
                time.sleep(PAUSE_S)
    except OSError as error:
        _say(type(error).__name__)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        call(sys.argv[2], int(sys.argv[3]))
