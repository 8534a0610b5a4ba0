"""A worker's side: copies chunks out of and into vLLM's cache, beside its forward passes.

One thread copies; a coroutine for each prompt stages, has its chunks copied and submits them. The engine's own thread only says what may be
read or written, and waits for a copy under way only when blocks are taken from a preempted prompt, for as long as one chunk's copy lasts.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from .. import aio
from .._values import Staged
from ..errors import AgentError
from ..keys import chunks
from .cache import open_cache
from .links import Links, free_thread
from .messages import Compute, Failures, Load, Step
from .settings import Engine

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vllm.berth")


class Prompt:
    """A prompt being sent. lock guards ready, blocks and stop, and is held while a chunk is copied."""

    def __init__(self, c: Compute) -> None:
        self.request_id = c.request_id
        self.req = c.req
        self.hashes = c.hashes
        self.tokens = c.prompt
        self.lock = threading.Lock()
        self.ready = 0  # tokens whose KV is in blocks
        self.blocks: list[int] = []
        self.mark: Any = None  # after it they are
        self.stop = False
        self.changed = asyncio.Event()  # the loop's
        self.finished = False  # vLLM waits to free the blocks; guarded by WorkerSide's lock, like over
        self.over = False  # nothing is read any more
        self.copying = 0.0  # seconds


class WorkerSide:
    def __init__(self, engine: Engine, rank: int, kv_caches: dict[str, torch.Tensor]) -> None:
        self._engine = engine
        self._rank = rank
        self._chunk = engine.settings.chunk_tokens
        self._layout = engine.layout_of(rank)
        self._cache = open_cache(kv_caches, self._layout, engine.block_size, engine.kv_cache_dtype)
        self._links = Links(engine, "worker", [rank])
        self._copier = concurrent.futures.ThreadPoolExecutor(1, "berth-copier", initializer=free_thread)
        self._turn = Turnstile()
        self._prompts: dict[str, Prompt] = {}
        self._lock = threading.Lock()  # of what follows
        self._sent: set[str] = set()
        self._received: dict[str, list[int]] = {}  # request id: its blocks that are not valid
        self._failed: dict[str, str] = {}
        self._invalid: set[int] = set()

    def close(self) -> None:
        for p in self._prompts.values():
            p.stop = True
        self._links.close()
        self._copier.shutdown(cancel_futures=True)

    # What vLLM's worker says, in the order of a step.

    def preempted(self, request_ids: list[str]) -> None:
        for rid in request_ids:
            p = self._prompts.get(rid)
            if p is not None:
                with p.lock:
                    p.ready, p.blocks = 0, []

    def load(self, load: Load) -> None:
        self._links.run(self._load(load))

    def computed(self, step: Step) -> None:
        """The step's forward pass has been given to the device."""
        mark = self._cache.mark() if step.compute else None
        for c in step.compute:
            p = self._prompts.get(c.request_id)
            if p is None:
                p = self._prompts[c.request_id] = Prompt(c)
                self._links.run(self._send(p))
            with p.lock:
                p.ready, p.blocks, p.mark = c.ready, c.blocks, mark
            self._links.loop.call_soon_threadsafe(p.changed.set)
        for rid, stop in step.finished.items():
            p = self._prompts.pop(rid, None)
            with self._lock:
                if p is None or p.over:
                    self._sent.add(rid)
                    continue
                p.finished = True
            if stop:
                with p.lock:
                    p.stop = True
                self._links.loop.call_soon_threadsafe(p.changed.set)

    def done(self) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks are no longer read, and those whose load has ended."""
        if not self._sent and not self._received:
            return None, None
        with self._lock:
            sent, self._sent = self._sent, set()
            received, self._received = self._received, {}
        for blocks in received.values():
            self._invalid.update(blocks)
        return sent or None, set(received) or None

    def invalid(self) -> set[int]:
        """Blocks of the loads that done() just named and that failed."""
        out, self._invalid = self._invalid, set()
        return out

    def failures(self) -> Failures | None:
        if not self._failed:
            return None
        with self._lock:
            out, self._failed = self._failed, {}
        return Failures(out)

    # Sending.

    async def _send(self, p: Prompt) -> None:
        """Stage, copy and submit a prompt's chunks as they are computed. It waits for its own tokens and for slots, for no other prompt."""
        try:
            agent = self._links.agent(self._rank)
            total, sent = len(p.hashes), 0
            while sent < total and not p.stop:
                ready = total if p.ready == p.tokens else p.ready // self._chunk
                if ready <= sent:
                    p.changed.clear()
                    if p.ready // self._chunk <= sent and p.ready != p.tokens and not p.stop:
                        await p.changed.wait()
                    continue
                sent += await self._batch(agent, p, sent, min(ready - sent, agent.info.max_stage))
            if self._engine.settings.timings:
                log.info("berth send %s: gather %.1f ms for %d tokens, submitted at %.4f", p.req, 1000 * p.copying, p.tokens, time.monotonic())
        except AgentError as e:
            with self._lock:
                self._failed[p.request_id] = str(e)
        except Exception as e:
            log.exception("sending %s failed", p.req)
            with self._lock:
                self._failed[p.request_id] = repr(e)
        finally:
            with self._lock:
                p.over = True
                if p.finished:
                    self._sent.add(p.request_id)

    async def _batch(self, agent: aio.Client, p: Prompt, first: int, most: int) -> int:
        batch = await self._turn.stage(agent, p.req, most, self._engine.settings.transfer_timeout)
        try:
            async with batch:
                staged = await asyncio.get_running_loop().run_in_executor(self._copier, self._gather, agent, p, first, batch)
                if staged:
                    last = first + len(staged) == len(p.hashes)
                    await batch.submit(staged, end=len(p.hashes) if last else None)
        finally:
            self._turn.hand_in()
        return len(staged)

    def _gather(self, agent: aio.Client, p: Prompt, first: int, batch: aio.Batch) -> list[Staged]:
        """In the copier's thread: as many chunks as may be read, copied into their slots."""
        began = time.monotonic()
        staged: list[Staged] = []
        assert agent.staging is not None
        self._cache.pin(agent.staging.tensor(), writable=True)
        self._cache.after(p.mark)
        for index, slot in enumerate(batch, first):
            start, end = index * self._chunk, min((index + 1) * self._chunk, p.tokens)
            with p.lock:
                if p.stop or p.ready < end:
                    break
                self._cache.gather(p.blocks, start, end, slot.first(end - start).torch())
            key = self._engine.keyer.key(self._rank, p.hashes[index])
            staged.append(Staged(index, key, slot, end - start))
        p.copying += time.monotonic() - began
        return staged

    # Receiving.

    async def _load(self, load: Load) -> None:
        bad: list[int] = []
        try:
            agent = self._links.agent(self._rank)
            if agent.info.incarnation != load.incarnations[self._rank]:
                raise AgentError("peer_lost", "the agent has been restarted")
            await asyncio.get_running_loop().run_in_executor(self._copier, self._scatter, agent, load)
        except BaseException as e:
            log.warning("the KV of %s is not loaded, its prompt is computed here: %s", load.req, e)
            size = self._engine.block_size
            bad = load.blocks[load.start // size : chunks(load.end, size)]
        finally:
            with contextlib.suppress(AgentError):
                await self._links.agent(self._rank).release(load.request_id, load.req)
            with self._lock:
                self._received[load.request_id] = bad

    def _scatter(self, agent: aio.Client, load: Load) -> None:
        """In the copier's thread."""
        began = time.monotonic()
        assert agent.receive is not None
        self._cache.pin(agent.receive.tensor(), writable=False)
        at = 0
        for slot, tokens in load.chunks[self._rank]:
            start, end = max(at, load.start), min(at + tokens, load.end)
            if start < end:
                chunk = agent.receive.view(slot, tokens).torch()
                self._cache.scatter(load.blocks, start, end, chunk[:, :, start - at : end - at])
            at += tokens
        if self._engine.settings.timings:
            log.info("berth receive %s: scatter %.1f ms for %d tokens", load.req, 1000 * (time.monotonic() - began), load.end - load.start)


class Turnstile:
    """Keeps the agent's rule that nobody waits for slots while this engine holds some. Prompts stage side by side, so that one whose receiver
    is slow does not delay the others; whoever would have to wait meanwhile asks again as soon as something held is handed in."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    async def stage(self, agent: aio.Client, req: str, n: int, timeout: float) -> aio.Batch:
        """Up to n slots, as many as there are, at least one: to wait for more could mean to wait for those that a stopped receiver keeps.
        hand_in is due after each batch."""
        while True:
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            handed_in = self._next
            m = n
            while m > 1:
                try:
                    return await agent.stage(req, m, timeout=None)
                except AgentError as e:
                    if e.code != "busy":
                        raise
                m //= 2
            try:
                return await agent.stage(req, 1, timeout=timeout)
            except AgentError as e:
                if e.code != "holding":
                    raise
            await asyncio.wait([handed_in], timeout=timeout)

    def hand_in(self) -> None:
        if self._next is not None:
            self._next.set_result(None)
            self._next = None
