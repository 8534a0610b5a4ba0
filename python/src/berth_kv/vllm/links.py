"""Connections to the agents of some ranks, on an event loop in a thread of its own; dialled again when they are lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from .. import aio
from ..errors import AgentError, lost
from .settings import Engine

log = logging.getLogger("vllm.berth")
T = TypeVar("T")

_FIRST_PAUSE, _LAST_PAUSE = 0.02, 2.0
_DIAL_TIMEOUT = 5.0


class Links:
    """The event loop and one connection to each of the ranks' agents. Only agent() is for coroutines on the loop."""

    def __init__(self, engine: Engine, part: str, ranks: list[int]) -> None:
        """Connects to every agent. Raises AgentError if one cannot be had: the engine must not start with the wrong agent."""
        self._engine = engine
        self._part = part
        self._clients: dict[int, aio.Client | AgentError] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self.loop = asyncio.new_event_loop()
        self._changed: asyncio.Future[None] = self.loop.create_future()  # done, and another, when _clients changes
        self.closing = False
        self._thread = threading.Thread(target=self._run, name=f"berth-{part}", daemon=True)
        self._thread.start()
        try:
            for rank in ranks:
                self.run(self._start(rank)).result()
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        free_thread()
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, c: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(c, self.loop)

    def agent(self, rank: int) -> aio.Client:
        """The connection to a rank's agent, AgentError while there is none."""
        client = self._clients[rank]
        if isinstance(client, AgentError):
            raise client
        if client.lost:
            raise client.lost
        return client

    async def connected(self, rank: int) -> aio.Client:
        """The connection to a rank's agent, as soon as there is one."""
        while True:
            try:
                return self.agent(rank)
            except AgentError:
                await asyncio.shield(self._changed)

    def _set(self, rank: int, client: aio.Client | AgentError) -> None:
        self._clients[rank] = client
        changed, self._changed = self._changed, self.loop.create_future()
        changed.set_result(None)

    async def _dial(self, rank: int, timeout: float) -> aio.Client:
        e = self._engine
        path = e.settings.socket(rank, e.ranks)
        client = await aio.open_client(
            path, e.layout_of(rank), part=self._part, engine_id=e.engine_id, tokens_key=e.keyer.tokens_key(rank), timeout=timeout
        )
        error = unfit(e, client, path)
        if error:
            await client.close()
            raise error
        return client

    async def _start(self, rank: int) -> None:
        end = time.monotonic() + self._engine.settings.connect_timeout
        while True:
            try:
                client = await self._dial(rank, self._engine.settings.connect_timeout)
                break
            except AgentError as e:  # one that is not there yet is waited for, one that does not fit is not
                if e.code not in ("peer_lost", "busy", "deadline") or time.monotonic() > end:
                    raise
                await asyncio.sleep(0.2)
        self._set(rank, client)
        self._keepers.append(asyncio.create_task(self._keep(rank, client)))

    async def _keep(self, rank: int, client: aio.Client) -> None:
        try:
            while True:
                why = await asyncio.shield(client.gone)
                log.warning("the connection to the agent of rank %d is lost: %s", rank, why)
                self._set(rank, why)
                await client.close()
                pause = _FIRST_PAUSE
                while True:
                    try:
                        client = await self._dial(rank, _DIAL_TIMEOUT)
                        break
                    except AgentError as e:
                        self._set(rank, e)
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, _LAST_PAUSE)
                log.info("connected to the agent of rank %d again", rank)
                self._set(rank, client)
        finally:
            self._set(rank, lost("the engine is closing"))
            await client.close()

    def close(self) -> None:
        """Close the connections and end the thread."""

        async def stop() -> None:
            self.closing = True
            for k in self._keepers:
                k.cancel()
            if self._keepers:
                await asyncio.wait(self._keepers)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=2)
            await self.loop.shutdown_default_executor()

        if self.loop.is_closed():
            return
        try:
            self.run(stop()).result(10)
        except concurrent.futures.TimeoutError:
            log.warning("the connections to the agents did not close")
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self.loop.close()


def unfit(e: Engine, client: aio.Client, path: str) -> AgentError | None:
    """What is wrong with an agent, if anything."""
    chunk = e.layout.chunk_tokens
    if e.sends and not client.info.staging_capacity:
        return AgentError("unsupported", f"agent at {path}: it is no sender (staging_capacity 0), kv_role says that this engine sends")
    if e.receives and not client.info.receive_capacity:
        return AgentError("unsupported", f"agent at {path}: it is no receiver (receive_capacity 0), kv_role says that this engine receives")
    room = client.info.receive_capacity * chunk
    if e.receives and room < e.max_model_len:
        slots = client.info.receive_capacity
        text = f"its receive pool holds {room} tokens ({slots} slots of {chunk}), max_model_len is {e.max_model_len}: raise its pd_buffer_size"
        return AgentError("too_large", f"agent at {path}: {text}")
    return None


def free_thread() -> None:
    """Let this thread run on every core: vLLM pins its worker to some, and threads inherit that."""
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except OSError:
        pass
