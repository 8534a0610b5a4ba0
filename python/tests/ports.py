"""TCP ports of the loopback address, to be bound later: as internal/freeport gives them, from blocks that it knows."""

from __future__ import annotations

import contextlib
import random
import socket

_FIRST, _BLOCK, _BLOCKS = 10000, 500, 45  # below the range from which the kernel takes ports


def _claim() -> int:
    """The first port of a block that is this process's until it ends."""
    at = random.randrange(_BLOCKS)
    for i in range(_BLOCKS):
        base = _FIRST + (at + i) % _BLOCKS * _BLOCK
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0berth-ports-{base}")
            lock.listen()
        except OSError:
            lock.close()
            continue
        lock.detach()  # stays open
        return base
    raise RuntimeError(f"other processes hold all {_BLOCKS} blocks of ports")


_base = _claim()
_next = 0


def free_port() -> int:
    """A port that nobody is bound to, and that no other process is given while this one lives."""
    global _next
    for _ in range(_BLOCK):
        port = _base + _next
        _next = (_next + 1) % _BLOCK
        with socket.socket() as s, contextlib.suppress(OSError):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"none of the {_BLOCK} ports from {_base} on is free")
