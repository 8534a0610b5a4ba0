"""The client for asyncio: berth_kv.client with await.

One task of its own reads. Any call may be cancelled: what its late answer brings is given back to the agent. Everything belongs to the
event loop in which connect was awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from . import _core, _values
from ._core import HEADER, Core, Message
from ._dial import Connected, Info, dial
from ._values import Chunk, Staged
from .client import CALL_TIMEOUT
from .errors import AgentError, DeadlineError, lost
from .layout import Layout
from .pool import Pool, View

__all__ = ["Batch", "Claim", "Client", "Transfer", "connect", "open_client"]

Future = asyncio.Future  # of anything

_CLOSE_GRACE = 1.0


async def open_client(
    path: str, layout: Layout | None = None, *, part: str = "worker", engine_id: str | None = None, tokens_key: str | None = None,
    timeout: float = 10.0,
) -> Client:  # fmt: skip
    """Connect as berth_kv.connect does. The caller closes the client."""
    loop = asyncio.get_running_loop()
    dialing = loop.run_in_executor(None, dial, path, layout, part, engine_id, tokens_key, timeout)
    try:
        connected = await asyncio.shield(dialing)
    except asyncio.CancelledError:
        dialing.add_done_callback(lambda f: f.result().close() if not f.cancelled() and f.exception() is None else None)
        raise
    connected.sock.setblocking(False)
    try:
        reader, writer = await asyncio.open_unix_connection(sock=connected.sock)
    except BaseException:
        connected.close()
        raise
    return Client(connected, reader, writer)


@contextlib.asynccontextmanager
async def connect(
    path: str, layout: Layout | None = None, *, part: str = "worker", engine_id: str | None = None, tokens_key: str | None = None,
    timeout: float = 10.0,
) -> AsyncIterator[Client]:  # fmt: skip
    """Connect as berth_kv.connect does, and close at the end: `async with aio.connect(...) as agent`."""
    client = await open_client(path, layout, part=part, engine_id=engine_id, tokens_key=tokens_key, timeout=timeout)
    try:
        yield client
    finally:
        await client.close()


class Client:
    """A connection."""

    def __init__(self, connected: Connected, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.info: Info = connected.info
        self.staging: Pool | None = connected.staging
        self.receive: Pool | None = connected.receive
        self._connected = connected
        self._in = reader
        self._out = writer
        self._closing = False
        self._core: Core[Future[Any]] = Core(asyncio.get_running_loop().create_future)
        self._reader = asyncio.create_task(self._read(), name="berth-kv-reader")
        self.gone: Future[AgentError] = asyncio.get_running_loop().create_future()
        """Done when the connection is gone; the result says why."""

    @property
    def lost(self) -> AgentError | None:
        """Why the connection is gone, None while it is there."""
        return self._core.error

    async def close(self) -> None:
        """As the synchronous client's."""
        if not self._closing:
            self._closing = True
            with contextlib.suppress(OSError, RuntimeError):
                self._out.write_eof()
            await asyncio.wait([self._reader], timeout=_CLOSE_GRACE)
        self._out.transport.abort()
        await asyncio.wait([self._reader])
        self._connected.close()

    # Sending.

    async def begin(
        self, req: str, total_chunks: int, *, host: str, alloc_port: int, init_port: int | None = None, deadline: float | None = None,
        stage: int = 0, berth_proxy: bool = False, timeout: float = CALL_TIMEOUT,
    ) -> Transfer:  # fmt: skip
        """As the synchronous client's. If it is cancelled, so is the request."""
        call, state, frame = self._core.begin({
            "req": req, "total_chunks": total_chunks, "host": host, "alloc_port": alloc_port, "init_port": init_port,
            "deadline_ms": None if deadline is None else _values.millis(deadline), "stage": stage or None, "berth_proxy": berth_proxy or None,
        })  # fmt: skip
        try:
            await self._result(call, frame, timeout)
        except BaseException:
            if not call.abandoned:  # else its late answer sees to it
                self._core.forget(state)
            raise
        return Transfer(self, state)

    async def give_up(
        self, req: str, lost: str, *, host: str, alloc_port: int, init_port: int | None = None, timeout: float = CALL_TIMEOUT,
    ) -> None:  # fmt: skip
        """As the synchronous client's."""
        if self.info.incarnation == lost:
            return
        await self.begin(req, 1, host=host, alloc_port=alloc_port, init_port=init_port, berth_proxy=True, timeout=timeout)
        await self.cancel(req, reason="peer_lost", text="its sender's agent was lost", timeout=timeout)

    async def stage(self, req: str, n: int, *, timeout: float | None = CALL_TIMEOUT) -> Batch:
        """As the synchronous client's."""
        fields = {"req": req, "n": n, "nonblocking": True} if timeout is None else {"req": req, "n": n, "deadline_ms": _values.millis(timeout)}

        def late(answer: Message | None) -> Message | None:
            return {"op": "unstage", "req": req, "slots": answer["slots"]} if answer else None

        answer = await self._call("stage", fields, CALL_TIMEOUT if timeout is None else timeout + _CLOSE_GRACE, late)
        return Batch(self, req, _values.staged_views(self.staging, answer["slots"]))

    async def unstage(self, req: str, slots: Iterable[View | int], *, timeout: float = CALL_TIMEOUT) -> None:
        """Give staged slots back unused."""
        await self._call("unstage", {"req": req, "slots": [int(s.__index__()) for s in slots]}, timeout)

    async def submit(self, req: str, chunks: Sequence[Staged], *, end: int | None = None, timeout: float = CALL_TIMEOUT) -> None:
        """As the synchronous client's."""
        fields = _values.submission(req, chunks, end)
        slots = [c["slot"] for c in fields["chunks"]]

        def late(answer: Message | None) -> Message | None:
            return {"op": "unstage", "req": req, "slots": slots} if answer is None and slots else None

        await self._call("submit", fields, timeout, late)

    # Receiving.

    async def wait(self, req: str, *, timeout: float) -> None:
        """As the synchronous client's."""
        answer = await self._call("wait", {"req": req, "deadline_ms": _values.millis(timeout)}, timeout + _CLOSE_GRACE)
        if error := _core.ending_error(answer):
            raise error

    async def find(self, by: str, keys: Sequence[str], *, timeout: float = CALL_TIMEOUT) -> tuple[str | None, int]:
        """As the synchronous client's."""

        def late(answer: Message | None) -> Message | None:
            return {"op": "release", "by": by, "req": answer["req"]} if answer and answer.get("req") else None

        answer = await self._call("find", {"by": by, "keys": list(keys)}, timeout, late)
        return answer.get("req"), answer["matched"]

    async def claim(self, by: str, req: str, *, timeout: float = CALL_TIMEOUT) -> Claim:
        """As the synchronous client's."""

        def late(answer: Message | None) -> Message | None:
            return {"op": "release", "by": by, "req": req} if answer else None

        answer = await self._call("claim", {"by": by, "req": req}, timeout, late)
        try:
            return Claim(self, by, req, _values.claimed_chunks(self.receive, answer))
        except AgentError:
            await self.release(by, req)
            raise

    async def release(self, by: str, req: str, chunks: Sequence[int] | None = None, *, timeout: float = CALL_TIMEOUT) -> None:
        """As the synchronous client's."""
        await self._call("release", {"by": by, "req": req, "chunks": None if chunks is None else list(chunks)}, timeout)

    # Both.

    async def cancel(self, req: str, *, reason: str = "cancelled", text: str | None = None, timeout: float = CALL_TIMEOUT) -> str:
        """As the synchronous client's."""
        ending: str = (await self._call("cancel", {"req": req, "reason": reason, "text": text}, timeout))["ending"]
        return ending

    async def status(self, *, timeout: float = CALL_TIMEOUT) -> dict[str, Any]:
        """The agent's /v1/status. Tools only."""
        out: dict[str, Any] = json.loads((await self._call("status", {}, timeout))["status"])
        return out

    async def drain(self, *, timeout: float = CALL_TIMEOUT) -> None:
        """Have the agent take nothing new. Tools only."""
        await self._call("drain", {}, timeout)

    # Machinery.

    async def _call(self, op: str, fields: Message, timeout: float, late: Callable[[Message | None], Message | None] | None = None) -> Message:
        call, frame = self._core.call(op, fields, late)
        return await self._result(call, frame, timeout)

    async def _result(self, call: _core.Call[Future[Any]], frame: bytes, timeout: float) -> Message:
        self._write(frame)
        try:
            await asyncio.wait([call.future], timeout=timeout)
        except BaseException:  # the caller is cancelled, and owns nothing even if the answer is there
            self._give_up(call)
            raise
        if not call.future.done():
            self._give_up(call)
            raise DeadlineError("deadline", f"{call.op} was not answered within {timeout:g} s")
        message: Message = call.future.result()
        return message

    def _give_up(self, call: _core.Call[Future[Any]]) -> None:
        if back := self._core.abandon(call):
            self._write(back)

    def _write(self, frame: bytes) -> None:
        if self._out.transport.get_write_buffer_size() > _core.MAX_FRAME:
            self._end(f"the agent has not read {_core.MAX_FRAME} bytes")
        if not self._out.is_closing():
            self._out.write(frame)

    def _end(self, why: str) -> None:
        self._out.transport.abort()
        self._core.lost(lost("this client was closed" if self._closing else why))
        if not self.gone.done():
            self.gone.set_result(self._core.error or lost(why))

    async def _read(self) -> None:
        why = "the agent closed the connection"
        try:
            while True:
                body = await self._in.readexactly(_core.frame_length(await self._in.readexactly(HEADER)))
                if back := self._core.receive(_core.decode(body)):
                    self._write(back)
        except asyncio.IncompleteReadError:
            pass
        except asyncio.CancelledError:
            why = "the event loop is closing"
            raise
        except (OSError, ValueError, AgentError) as e:
            why = str(e)
        finally:
            self._end(why)


class Transfer:
    """A request that this client began."""

    def __init__(self, client: Client, state: _core.Transfer[Future[Any]]) -> None:
        self._client = client
        self._state = state
        self.req = state.req

    @property
    def granted(self) -> Future[Any]:
        """Done when the whole prompt has its room, or when it has ended. Not to be cancelled: use shield or asyncio.wait."""
        return self._state.granted

    @property
    def ended(self) -> Future[Any]:
        """Done when the request has ended: its result is None when it is ready, else it raises AgentError. Not to be cancelled."""
        return self._state.ended

    async def wait_granted(self, *, timeout: float = CALL_TIMEOUT) -> Batch:
        """As the synchronous client's."""
        slots = await self._within(self._state.granted, timeout, "granted")
        return Batch(self._client, self.req, _values.staged_views(self._client.staging, slots) if slots else [])

    async def wait_ended(self, *, timeout: float = CALL_TIMEOUT) -> None:
        """As the synchronous client's."""
        await self._within(self._state.ended, timeout, "ended")

    async def _within(self, future: Future[Any], timeout: float, what: str) -> Any:
        await asyncio.wait([future], timeout=timeout)
        if not future.done():
            raise DeadlineError("deadline", f"request {self.req!r} was not {what} within {timeout:g} s")
        return future.result()

    async def stage(self, n: int, *, timeout: float | None = CALL_TIMEOUT) -> Batch:
        """Client.stage for this request."""
        return await self._client.stage(self.req, n, timeout=timeout)

    async def submit(self, chunks: Sequence[Staged], *, end: int | None = None) -> None:
        """Client.submit for this request."""
        await self._client.submit(self.req, chunks, end=end)

    async def cancel(self, *, reason: str = "cancelled", text: str | None = None, timeout: float = CALL_TIMEOUT) -> str:
        """Client.cancel for this request."""
        return await self._client.cancel(self.req, reason=reason, text=text, timeout=timeout)


class Batch(Sequence[View]):
    """Staged slots, as writable views. As an async context manager it gives back what was not submitted."""

    def __init__(self, client: Client, req: str, views: list[View]) -> None:
        self._client = client
        self._views = views
        self._held = {v.slot for v in views}
        self.req = req

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, i: Any) -> Any:
        return self._views[i]

    async def submit(self, chunks: Sequence[Staged], *, end: int | None = None) -> None:
        """Client.submit of chunks in these slots."""
        await self._client.submit(self.req, chunks, end=end)
        self._held.difference_update(int(c.slot.__index__()) for c in chunks)

    async def unstage(self) -> None:
        """Give back what was not submitted."""
        if self._held:
            held, self._held = sorted(self._held), set()
            await self._client.unstage(self.req, held)

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(AgentError) if kind else contextlib.nullcontext():
            await self.unstage()


class Claim:
    """Claimed chunks by ascending index. As an async context manager it releases them."""

    def __init__(self, client: Client, by: str, req: str, chunks: list[Chunk]) -> None:
        self._client = client
        self.by = by
        self.req = req
        self.chunks = chunks

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.chunks)

    async def release(self) -> None:
        """The chunks have been read: their views must not be used any more."""
        await self._client.release(self.by, self.req)

    async def __aenter__(self) -> Claim:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(AgentError) if kind else contextlib.nullcontext():
            await self.release()
