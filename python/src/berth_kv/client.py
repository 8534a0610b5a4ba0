"""The synchronous client: one connection to an agent.

Its methods may be called from several threads at once. One thread of its own reads. Waits take a timeout in seconds and raise
DeadlineError after it; what a late answer brings is given back to the agent, so that the caller owns nothing then.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from . import _core, _values
from ._core import HEADER, Core, Message
from ._dial import WRITE_TIMEOUT, Connected, Info, dial
from ._values import Chunk, Staged
from .errors import AgentError, DeadlineError, lost
from .layout import Layout
from .pool import Pool, View

Future = concurrent.futures.Future[Any]

CALL_TIMEOUT = 30.0  # seconds; for calls that are answered at once, and waits that name none
_CLOSE_GRACE = 1.0


def connect(
    path: str, layout: Layout | None = None, *, part: str = "worker", engine_id: str | None = None, tokens_key: str | None = None,
    timeout: float = 10.0,
) -> Client:  # fmt: skip
    """Connect to the agent whose local_socket is at path.

    part is "worker", "scheduler" or "tool"; a tool needs no layout and may ask for status, cancel and drain. engine_id names the engine,
    the same for all its processes and another after a restart; by default it is new with each call. tokens_key is Keyer.tokens_key of
    engines that find requests by keys.
    """
    return Client(dial(path, layout, part, engine_id, tokens_key, timeout))


class Client:
    """A connection. Use it as a context manager, or call close."""

    def __init__(self, connected: Connected) -> None:
        self.info: Info = connected.info
        self.staging: Pool | None = connected.staging
        self.receive: Pool | None = connected.receive
        self._connected = connected
        self._sock = connected.sock
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(WRITE_TIMEOUT), 0))
        self._core: Core[Future] = Core(concurrent.futures.Future)
        self._lock = threading.RLock()  # of _core
        self._write_lock = threading.Lock()  # of writing to _sock; not taken while _lock is held
        self._closing = False
        self._reader = threading.Thread(target=self._read, name="berth-kv-reader", daemon=True)
        self._reader.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lost(self) -> AgentError | None:
        """Why the connection is gone, None while it is there."""
        return self._core.error

    def close(self) -> None:
        """Close the connection and unmap the pools. What is staged or claimed then stays quarantined while this process lives, or for
        the agent's quarantine_sec: give it back before. Harmless when called again."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)  # after what was sent
        if threading.current_thread() is not self._reader:
            self._reader.join(_CLOSE_GRACE)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._reader.join()
        self._connected.close()

    # Sending.

    def begin(
        self, req: str, total_chunks: int, *, host: str, alloc_port: int, init_port: int | None = None, deadline: float | None = None,
        stage: int = 0, berth_proxy: bool = False, timeout: float = CALL_TIMEOUT,
    ) -> Transfer:  # fmt: skip
        """Ask the receiver at host:alloc_port for room for a whole prompt of total_chunks chunks. Returns when the agent has accepted the
        request. deadline: seconds from now to ready. stage: staging slots wanted with the grant, if they are free. berth_proxy: the proxy
        is Berth's and watches the receiver."""
        fields = {
            "req": req, "total_chunks": total_chunks, "host": host, "alloc_port": alloc_port, "init_port": init_port,
            "deadline_ms": None if deadline is None else _values.millis(deadline), "stage": stage or None, "berth_proxy": berth_proxy or None,
        }  # fmt: skip
        with self._lock:
            call, state, frame = self._core.begin(fields)
        self._write(frame)
        try:
            self._result(call, timeout)
        except BaseException:
            if not call.abandoned:  # else its late answer sees to it
                with self._lock:
                    self._core.forget(state)
            raise
        return Transfer(self, state)

    def give_up(
        self, req: str, lost: str, *, host: str, alloc_port: int, init_port: int | None = None, timeout: float = CALL_TIMEOUT,
    ) -> None:  # fmt: skip
        """Say that nothing will come of a request that was begun, for a Berth proxy, through an agent that was lost: that one, whose
        info.incarnation is lost, may not have told the receiver of it, and then nobody else could tell the proxy. Changes nothing if this
        agent is the same one, which knows, and nothing of what has become ready."""
        if self.info.incarnation == lost:
            return
        self.begin(req, 1, host=host, alloc_port=alloc_port, init_port=init_port, berth_proxy=True, timeout=timeout)
        self.cancel(req, reason="peer_lost", text="its sender's agent was lost", timeout=timeout)

    def stage(self, req: str, n: int, *, timeout: float | None = CALL_TIMEOUT) -> Batch:
        """Take n staging slots for a granted request, at most info.max_stage. Waits for them; with timeout None it raises "busy" instead.
        Never wait while you hold staged slots."""
        fields = {"req": req, "n": n, "nonblocking": True} if timeout is None else {"req": req, "n": n, "deadline_ms": _values.millis(timeout)}

        def late(answer: Message | None) -> Message | None:
            return {"op": "unstage", "req": req, "slots": answer["slots"]} if answer else None

        answer = self._call("stage", fields, CALL_TIMEOUT if timeout is None else timeout + _CLOSE_GRACE, late)
        return Batch(self, req, _values.staged_views(self.staging, answer["slots"]))

    def unstage(self, req: str, slots: Iterable[View | int], *, timeout: float = CALL_TIMEOUT) -> None:
        """Give staged slots back unused."""
        self._call("unstage", {"req": req, "slots": [int(s.__index__()) for s in slots]}, timeout)

    def submit(self, req: str, chunks: Sequence[Staged], *, end: int | None = None, timeout: float = CALL_TIMEOUT) -> None:
        """Hand staged slots over to be sent, as one batch. Taken whole or not at all: on an AgentError the slots are still the caller's.
        end: the request's final number of chunks, with its last batch, which may be empty."""
        fields = _values.submission(req, chunks, end)
        slots = [c["slot"] for c in fields["chunks"]]

        def late(answer: Message | None) -> Message | None:
            return {"op": "unstage", "req": req, "slots": slots} if answer is None and slots else None

        self._call("submit", fields, timeout, late)

    # Receiving.

    def wait(self, req: str, *, timeout: float) -> None:
        """Wait until the request of that name is ready here. Raises AgentError with its reason when it ends otherwise."""
        answer = self._call("wait", {"req": req, "deadline_ms": _values.millis(timeout)}, timeout + _CLOSE_GRACE)
        if error := _core.ending_error(answer):
            raise error

    def find(self, by: str, keys: Sequence[str], *, timeout: float = CALL_TIMEOUT) -> tuple[str | None, int]:
        """Give `by`, the engine's name of its own request, the unclaimed request that holds the longest prefix of keys: its name, and how
        many keys; (None, 0) if there is none. It is to be claimed, or released, which frees it."""

        def late(answer: Message | None) -> Message | None:
            return {"op": "release", "by": by, "req": answer["req"]} if answer and answer.get("req") else None

        answer = self._call("find", {"by": by, "keys": list(keys)}, timeout, late)
        return answer.get("req"), answer["matched"]

    def claim(self, by: str, req: str, *, timeout: float = CALL_TIMEOUT) -> Claim:
        """Take all chunks of a ready request, to be read until they are released."""

        def late(answer: Message | None) -> Message | None:
            return {"op": "release", "by": by, "req": req} if answer else None

        answer = self._call("claim", {"by": by, "req": req}, timeout, late)
        try:
            return Claim(self, by, req, _values.claimed_chunks(self.receive, answer))
        except AgentError:
            self.release(by, req)
            raise

    def release(self, by: str, req: str, chunks: Sequence[int] | None = None, *, timeout: float = CALL_TIMEOUT) -> None:
        """These chunks, by index, have been read; without chunks all that are left. Also frees what find gave."""
        self._call("release", {"by": by, "req": req, "chunks": None if chunks is None else list(chunks)}, timeout)

    # Both.

    def cancel(self, req: str, *, reason: str = "cancelled", text: str | None = None, timeout: float = CALL_TIMEOUT) -> str:
        """End a request of that name, in whatever state. Returns its ending, "ready", "failed" or "cancelled", once none of its writes is
        in flight."""
        ending: str = self._call("cancel", {"req": req, "reason": reason, "text": text}, timeout)["ending"]
        return ending

    def status(self, *, timeout: float = CALL_TIMEOUT) -> dict[str, Any]:
        """The agent's /v1/status. Tools only."""
        out: dict[str, Any] = json.loads(self._call("status", {}, timeout)["status"])
        return out

    def drain(self, *, timeout: float = CALL_TIMEOUT) -> None:
        """Have the agent take nothing new. Tools only."""
        self._call("drain", {}, timeout)

    # Machinery.

    def _call(self, op: str, fields: Message, timeout: float, late: Callable[[Message | None], Message | None] | None = None) -> Message:
        with self._lock:
            call, frame = self._core.call(op, fields, late)
        self._write(frame)
        return self._result(call, timeout)

    def _result(self, call: _core.Call[Future], timeout: float) -> Message:
        try:
            concurrent.futures.wait([call.future], timeout)
        except BaseException:  # an interrupt: the caller owns nothing even if the answer is there
            self._give_up(call)
            raise
        if not call.future.done() and self._give_up(call, interrupted=False):
            raise DeadlineError("deadline", f"{call.op} was not answered within {timeout:g} s")
        return call.future.result()  # type: ignore[no-any-return]

    def _give_up(self, call: _core.Call[Future], interrupted: bool = True) -> bool:
        """Abandon a call, unless its answer has just come and the caller can still take it."""
        with self._lock:
            if not interrupted and call.future.done():
                return False
            frame = self._core.abandon(call)
        if frame:
            self._write(frame)
        return True

    @staticmethod
    def _await(future: Future, timeout: float | None) -> Any:
        concurrent.futures.wait([future], timeout)
        if not future.done():
            raise DeadlineError("deadline", "")
        return future.result()

    def _write(self, frame: bytes) -> None:
        try:
            with self._write_lock:
                self._sock.sendall(frame)
        except OSError as e:
            self._end(f"the connection to the agent broke: {e}")
            raise self._core.error or lost(str(e)) from e

    def _end(self, why: str) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._core.lost(lost("this client was closed" if self._closing else why))

    def _read(self) -> None:
        why = "the agent closed the connection"
        try:
            with self._sock.makefile("rb", 1 << 16) as f:
                while header := f.read(HEADER):
                    body = f.read(_core.frame_length(header))
                    message = _core.decode(body)
                    with self._lock:
                        frame = self._core.receive(message)
                    if frame:
                        self._write(frame)
        except (OSError, ValueError, AgentError) as e:
            why = str(e)
        self._end(why)


class Transfer:
    """A request that this client began."""

    def __init__(self, client: Client, state: _core.Transfer[Future]) -> None:
        self._client = client
        self._state = state
        self.req = state.req

    @property
    def granted(self) -> Future:
        """Done when the whole prompt has its room (the result is the staging slots that came along), or when it has ended."""
        return self._state.granted

    @property
    def ended(self) -> Future:
        """Done when the request has ended: its result is None when it is ready, else it raises AgentError."""
        return self._state.ended

    def wait_granted(self, *, timeout: float = CALL_TIMEOUT) -> Batch:
        """Wait for the grant. Returns the slots that were staged with it, as many as begin asked for or none. Raises AgentError when the
        request ends instead; after a DeadlineError it goes on."""
        slots = self._within(self._state.granted, timeout, "granted")
        return Batch(self._client, self.req, _values.staged_views(self._client.staging, slots) if slots else [])

    def wait_ended(self, *, timeout: float = CALL_TIMEOUT) -> None:
        """Wait until the request is ready. Raises AgentError when it ends otherwise."""
        self._within(self._state.ended, timeout, "ended")

    def _within(self, future: Future, timeout: float, what: str) -> Any:
        try:
            return Client._await(future, timeout)
        except DeadlineError as e:
            if future.done():
                raise
            raise DeadlineError("deadline", f"request {self.req!r} was not {what} within {timeout:g} s") from e

    def stage(self, n: int, *, timeout: float | None = CALL_TIMEOUT) -> Batch:
        """Client.stage for this request."""
        return self._client.stage(self.req, n, timeout=timeout)

    def submit(self, chunks: Sequence[Staged], *, end: int | None = None) -> None:
        """Client.submit for this request."""
        self._client.submit(self.req, chunks, end=end)

    def cancel(self, *, reason: str = "cancelled", text: str | None = None, timeout: float = CALL_TIMEOUT) -> str:
        """Client.cancel for this request."""
        return self._client.cancel(self.req, reason=reason, text=text, timeout=timeout)


class Batch(Sequence[View]):
    """Staged slots, as writable views. As a context manager it gives back what was not submitted."""

    def __init__(self, client: Client, req: str, views: list[View]) -> None:
        self._client = client
        self._views = views
        self._held = {v.slot for v in views}
        self.req = req

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, i: Any) -> Any:
        return self._views[i]

    def submit(self, chunks: Sequence[Staged], *, end: int | None = None) -> None:
        """Client.submit of chunks in these slots."""
        self._client.submit(self.req, chunks, end=end)
        self._held.difference_update(int(c.slot.__index__()) for c in chunks)

    def unstage(self) -> None:
        """Give back what was not submitted."""
        if self._held:
            held, self._held = sorted(self._held), set()
            self._client.unstage(self.req, held)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(AgentError) if kind else contextlib.nullcontext():
            self.unstage()


class Claim:
    """Claimed chunks by ascending index. As a context manager it releases them."""

    def __init__(self, client: Client, by: str, req: str, chunks: list[Chunk]) -> None:
        self._client = client
        self.by = by
        self.req = req
        self.chunks = chunks

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.chunks)

    def release(self) -> None:
        """The chunks have been read: their views must not be used any more."""
        self._client.release(self.by, self.req)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(AgentError) if kind else contextlib.nullcontext():
            self.release()
