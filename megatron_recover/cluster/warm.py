"""A warm process: a fresh interpreter that has imported everything and waits to become a rank.

CUDA cannot be used in a forked process once its parent has asked the driver anything, and imports
do ask: Megatron's and Transformer Engine's modules call `torch.cuda.is_available`. So on a machine
with GPUs ranks are not forked. The fork server starts this program once for each rank and for the
dry run. It starts another where such a process has imported everything and ends before it becomes a
rank, or where a request finds none. It does so as ``python -P -m megatron_recover.cluster.warm FD
SERVER MODULE...``. FD is a SOCK_SEQPACKET socket and SERVER the pid of the fork server. The
launcher requests the first rank when all have imported, as with forks.
An import should touch no device: a context on device 0 for each rank would cost hundreds of MiB
there. Megatron's do not. One that does is named in the log (Transformer Engine asks for the
capability of device 0 where flash-attn is installed).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys

from megatron_recover.cluster.forkserver_messages import MAX_DESCRIPTORS, MAX_PACKET_BYTES, WARM, read_request
from megatron_recover.cluster.packets import receive
from megatron_recover.cluster.rank_process import become_rank, preload, prepare, set_parent_death_signal, set_process_name
from megatron_recover.config import importing_without_driver


def _is_initialized() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _warn(module: str) -> None:
    print(f"importing {module} has initialized CUDA, before it was known which device this rank has", file=sys.stderr)


def main() -> None:
    """Import the modules named on the command line, wait for the request, and become the rank."""
    descriptor, server, *modules = sys.argv[1:]
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != int(server):  # the server died before the death signal was set
        os._exit(1)
    prepare()
    set_process_name("warm")
    with socket.socket(fileno=int(descriptor)) as control:
        control.set_inheritable(False)
        with importing_without_driver(hide_devices=False):
            for name in modules:
                before = _is_initialized()
                preload(name)
                if _is_initialized() and not before:
                    _warn(name)
        gc.collect()  # else the first collection of all that was imported delays the rank, by about 0.2 s
        with contextlib.suppress(BrokenPipeError):  # it is a rank already, and its request lies here
            control.send(WARM)
        packet, descriptors = receive(control, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
    spawn = read_request(descriptors)
    if not packet or spawn is None:
        sys.exit(f"a warm process got {'no request' if not packet else 'a request without its descriptors; raise `ulimit -n`'}")
    request, output, *handed_down = descriptors
    os.close(request)
    become_rank(spawn, output, handed_down)


if __name__ == "__main__":
    main()
