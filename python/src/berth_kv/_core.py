"""One connection to an agent without its socket: which calls wait, what an answer means, what is given back.

It decides and touches nothing. The sync client calls it under a lock, the asyncio client from its loop.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, InvalidStateError
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from .errors import AgentError, agent_error

VERSION = 1  # of the local API
MAX_FRAME = 16 << 20
MAX_CALLS = 4096  # unanswered ones; the agent refuses more
HEADER = 4

# Calls that may wait for long: the agent is told when nobody waits any more.
_LONG = frozenset({"stage", "wait", "cancel"})

Message = dict[str, Any]


class Future(Protocol):
    """What concurrent.futures.Future and asyncio.Future have in common."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: Any, /) -> None: ...
    def exception(self) -> Any: ...


F = TypeVar("F", bound=Future)


def encode(message: Message) -> bytes:
    """A frame: the length of a map, and the map."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME:
        raise AgentError("too_large", f"a frame of {len(body)} bytes; at most {MAX_FRAME}")
    return len(body).to_bytes(HEADER, "big") + body


def frame_length(header: bytes) -> int:
    n = int.from_bytes(header, "big")
    if not 0 < n <= MAX_FRAME:
        raise ValueError(f"the agent sent a frame of {n} bytes; 1 to {MAX_FRAME} are allowed")
    return n


def decode(body: bytes | bytearray | memoryview) -> Message:
    try:
        message = msgspec.msgpack.decode(body)
    except msgspec.DecodeError as e:
        raise ValueError(f"the agent sent what is not msgpack: {e}") from e
    if not isinstance(message, dict):
        raise ValueError(f"the agent sent {type(message).__name__}, not a map")
    return message


def error_of(e: Any) -> AgentError:
    if not isinstance(e, dict):
        return AgentError("internal", f"the agent answered with an unreadable error: {e!r}")
    retry = e.get("retry_ms")
    return agent_error(str(e.get("code")), str(e.get("text", "")), retry / 1000 if isinstance(retry, int) else None)


def ending_error(ending: Message) -> AgentError | None:
    """None for ready."""
    if ending["ending"] == "ready":
        return None
    code = ending.get("reason") or ("cancelled" if ending["ending"] == "cancelled" else "internal")
    return agent_error(code, ending.get("text", ""))


def without_none(fields: Message) -> Message:
    return {k: v for k, v in fields.items() if v is not None}


class Call(Generic[F]):
    """An unanswered call."""

    def __init__(self, id: int, op: str, future: F, late: Callable[[Message | None], Message | None] | None) -> None:
        self.id = id
        self.op = op
        self.future = future
        self.late = late  # what to send when the result comes and nobody waits: gets the answer, or None for an error
        self.abandoned = False


class Transfer(Generic[F]):
    """What became of a begun request. granted holds the staging slots that came along, ended the error, or None for ready."""

    def __init__(self, req: str, granted: F, ended: F) -> None:
        self.req = req
        self.granted = granted
        self.ended = ended
        self.abandoned = False


def settle(future: Future, result: Any = None, error: BaseException | None = None) -> None:
    """Give a future its result, unless it has one or its waiter cancelled it."""
    if future.done():
        return
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
            future.exception()  # an error that nobody asks for is no fault
    except (InvalidStateError, CancelledError):
        pass


class Core(Generic[F]):
    def __init__(self, new_future: Callable[[], F]) -> None:
        self._new_future = new_future
        self._last = 0
        self._calls: dict[int, Call[F]] = {}
        self._transfers: dict[str, Transfer[F]] = {}
        self._lost: AgentError | None = None

    @property
    def error(self) -> AgentError | None:
        """Why the connection is gone, None while it is there."""
        return self._lost

    def call(self, op: str, fields: Message, late: Callable[[Message | None], Message | None] | None = None) -> tuple[Call[F], bytes]:
        """Start a call: what waits, and the frame to send."""
        if self._lost is not None:
            raise self._lost
        if len(self._calls) >= MAX_CALLS:
            raise AgentError("busy", f"{len(self._calls)} unanswered calls; at most {MAX_CALLS}")
        self._last += 1
        frame = encode({"id": self._last, "op": op, **without_none(fields)})
        call = Call(self._last, op, self._new_future(), late)
        self._calls[call.id] = call
        return call, frame

    def begin(self, fields: Message) -> tuple[Call[F], Transfer[F], bytes]:
        """Start a begin. Its Transfer is known before the first event can come."""
        req = fields["req"]
        if req in self._transfers:
            raise AgentError("bad_request", f"req {req!r} is live already")
        t = Transfer(req, self._new_future(), self._new_future())

        def late(answer: Message | None) -> Message | None:
            if answer is None:
                self.forget(t)
                return None
            t.abandoned = True
            return {"op": "cancel", "req": req}

        call, frame = self.call("begin", fields, late)
        self._transfers[req] = t
        return call, t, frame

    def forget(self, t: Transfer[F]) -> None:
        """Drop a transfer that was not accepted."""
        if self._transfers.get(t.req) is t:
            del self._transfers[t.req]

    def abandon(self, call: Call[F]) -> bytes | None:
        """Nobody waits for a call any more, its answer may be there already: a frame to send, if any."""
        if call.abandoned or self._lost is not None:
            return None
        call.abandoned = True
        if call.id in self._calls:
            return self._send({"op": "hangup", "call": call.id}) if call.op in _LONG else None
        return self._give_back(call, None if call.future.exception() else call.future.result())

    def _give_back(self, call: Call[F], answer: Message | None) -> bytes | None:
        back = call.late(answer) if call.late else None
        return self._send(back) if back else None

    def _send(self, message: Message) -> bytes:
        """The frame of a call whose answer interests nobody."""
        self._last += 1
        call = Call(self._last, message["op"], self._new_future(), None)
        call.abandoned = True
        self._calls[call.id] = call
        return encode({"id": call.id, **message})

    def receive(self, message: Message) -> bytes | None:
        """Take in a frame of the agent; returns one to send, if any. ValueError: the connection is beyond help."""
        try:
            return self._event(message) if "event" in message else self._answer(message)
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"the agent sent what cannot be understood: {e!r}") from e

    def _answer(self, message: Message) -> bytes | None:
        call = self._calls.pop(message["id"], None)
        if call is None:
            raise ValueError(f"the agent answered call {message['id']!r}, which does not wait")
        error = error_of(message["error"]) if "error" in message else None
        if not call.abandoned:
            settle(call.future, message, error)
            return None
        return self._give_back(call, None if error else message)

    def _event(self, message: Message) -> bytes | None:
        t = self._transfers.get(message.get("req", ""))
        if t is None:
            return None  # of a connection of this engine that is gone
        if message["event"] == "granted":
            slots = message["slots"]
            if t.abandoned:
                return self._send({"op": "unstage", "req": t.req, "slots": slots}) if slots else None
            settle(t.granted, slots)
        elif message["event"] == "ended":
            del self._transfers[t.req]
            self._end(t, ending_error(message))
        return None

    @staticmethod
    def _end(t: Transfer[F], error: AgentError | None) -> None:
        settle(t.granted, [], error)  # ready without a grant: a request of no chunks
        settle(t.ended, error=error)

    def lost(self, error: AgentError) -> None:
        """The connection is gone: everything that waits ends."""
        if self._lost is not None:
            return
        self._lost = error
        calls, transfers = self._calls, self._transfers
        self._calls, self._transfers = {}, {}
        for call in calls.values():
            settle(call.future, error=error)
        for t in transfers.values():
            self._end(t, error)
