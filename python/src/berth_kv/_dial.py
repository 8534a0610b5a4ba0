"""The first exchange on a connection: hello, and the pools that come with its answer. It blocks, for both clients."""

from __future__ import annotations

import array
import os
import secrets
import socket
import time
from dataclasses import dataclass

from ._core import HEADER, VERSION, Message, decode, encode, error_of, frame_length, without_none
from .errors import AgentError, DeadlineError
from .layout import Layout
from .pool import Pool

# An agent that does not read for so long is gone: it closes a connection of an engine that does the same.
WRITE_TIMEOUT = 10.0
_MAX_POOLS = 2


@dataclass(frozen=True)
class Info:
    """What an agent is."""

    incarnation: str  # in hex; another after each start
    slot_bytes: int
    staging_capacity: int  # slots; 0: it is no sender
    receive_capacity: int  # slots; 0: it is no receiver
    max_stage: int  # most slots of one stage


@dataclass
class Connected:
    sock: socket.socket
    info: Info
    staging: Pool | None
    receive: Pool | None

    def close(self) -> None:
        self.sock.close()
        for pool in (self.staging, self.receive):
            if pool is not None:
                pool.close()


def new_engine_id() -> str:
    """An engine_id that no other engine has."""
    return secrets.token_hex(16)


def dial(
    path: str, layout: Layout | None, part: str, engine_id: str | None, tokens_key: str | None, timeout: float
) -> Connected:
    """Connect and say hello. A tool has no layout. Raises AgentError with the path in its text."""
    hello: Message = {"version": VERSION, "part": part}
    if layout is not None:
        hello |= {
            "engine_id": engine_id or new_engine_id(), "rank": layout.tp_rank, "layout": layout.facts(), "shape": list(layout.shape),
            "tokens_key": tokens_key,
        }  # fmt: skip
    elif part != "tool":
        raise ValueError(f"part {part!r} needs a layout")
    end = time.monotonic() + timeout
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        sock.settimeout(timeout)
        sock.connect(path)
        sock.sendall(encode(without_none({"id": 0, "op": "hello", **hello})))
        answer = _answer(sock, fds, end)
        if "error" in answer:
            raise error_of(answer["error"])
        if answer.get("version") != VERSION:
            raise AgentError("unsupported", f"it speaks version {answer.get('version')} of the local API, this client {VERSION}")
        return _connected(sock, answer, fds, layout)
    except BaseException as e:
        sock.close()
        if isinstance(e, TimeoutError) and not isinstance(e, AgentError):
            raise DeadlineError("deadline", f"agent at {path}: no answer to hello within {timeout:g} s") from e
        if isinstance(e, AgentError):
            raise type(e)(e.code, f"agent at {path}: {e.text}", e.retry_after) from None
        if isinstance(e, (OSError, EOFError, ValueError, KeyError, TypeError)):
            raise AgentError("peer_lost", f"agent at {path}: {e!s}") from e
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _answer(sock: socket.socket, fds: list[int], end: float) -> Message:
    """Read one frame and the descriptors on its first byte."""

    def read(n: int) -> bytes:
        data = b""
        while len(data) < n:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            sock.settimeout(left)
            part, ancillary, _, _ = sock.recvmsg(n - len(data), socket.CMSG_SPACE(_MAX_POOLS * 4), socket.MSG_CMSG_CLOEXEC)
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                    fds.extend(numbers)
            if not part:
                raise EOFError("it closed the connection during hello")
            data += part
        return data

    message = decode(read(frame_length(read(HEADER))))
    if message.get("id") != 0:
        raise ValueError("its first frame is no answer to hello")
    return message


def _connected(sock: socket.socket, answer: Message, fds: list[int], layout: Layout | None) -> Connected:
    info = Info(
        incarnation=bytes(answer["incarnation"]).hex(), slot_bytes=answer["slot_bytes"], staging_capacity=answer["staging_capacity"],
        receive_capacity=answer["receive_capacity"], max_stage=answer["max_stage"],
    )  # fmt: skip
    names = answer["pools"]
    if len(names) != len(fds):
        raise ValueError(f"{len(fds)} descriptors came for {len(names)} pools")
    pools: dict[str, Pool] = {}
    try:
        for name, fd in zip(names, fds):
            if layout is None or name not in ("staging", "receive"):
                raise ValueError(f"a pool {name!r} came")
            slots = info.staging_capacity if name == "staging" else info.receive_capacity
            pools[name] = Pool(name, fd, slots, info.slot_bytes, layout, writable=name == "staging")
    except BaseException:
        for pool in pools.values():
            pool.close()
        raise
    return Connected(sock, info, pools.get("staging"), pools.get("receive"))
